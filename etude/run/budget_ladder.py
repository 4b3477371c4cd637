"""`etude run cpt-rl --scale full`: Figure 2 on many ranks. Several budgets of continued pretraining, the same SFT and
RL on each.

    OUT/corpus              rows of the largest budget, packed once
    OUT/runs/BUDGET-SEED    a run of the full recipe (recipe/full/stages.py) without draft layers, on the first rows of
                            its seed's order
    OUT/cpt-rl.{json,csv,png}

Budgets, fits, verdicts and picture are those of `sims/cpt_rl/experiment.py`, which plays the small scale. Here every
run begins from the same checkpoint, so a budget is what was learnt on top of it.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from etude.ledger import figures
from kit.disk import atomic_write, read_json
from kit.process import machine
from kit.runs import Run, Stage
from kit.settings import RunError
from recipe.full import stages as chain
from recipe.full.settings import Cluster, FullRecipe
from recipe.full.weights import count_windows, gather
from recipe.small.agent import hash_seed
from recipe.small.checks import check_ranges
from recipe.small.data import data, heldout_codebase
from recipe.small.evaluation import measure_policy
from recipe.small.learner import language_of
from scaled import cpt, rl
from scaled.network.model import load_hf
from scaled.runtime import launch
from scaled.runtime.launch import Watchdog
from sims.cpt_rl import budgets
from sims.cpt_rl import experiment as cpt_rl

__all__ = ["Ladder", "Study", "check", "learn", "play", "rung"]


@dataclass(frozen=True)
class Study:
    """Budgets and measurements."""

    budgets: tuple[int, ...] = ()
    """Pretraining tokens over both phases; three or more values, increasing. None given: a sixteenth, a quarter, and
    all of the recipe's."""
    seeds: int = 1
    """Training runs at each budget."""
    last: int = 10
    """Number of final RL steps whose training reward counts."""
    demonstrations: int = 200
    """Held-out demonstrations for measuring the loss."""
    tasks: int = 200
    """Held-out tasks that agents play, different from those of the demonstrations."""
    samples: int = 4
    """Rollouts per task."""
    codebase_tokens: int | None = None
    """Tokens of the held-out codebase to score after pretraining; none: all of them."""
    resamples: int = 2000
    """Bootstrap resamples."""

    def __post_init__(self):
        check_ranges(self, least=dict.fromkeys(("seeds", "last", "demonstrations", "tasks", "samples", "resamples"), 1))


@dataclass(frozen=True)
class Ladder(FullRecipe):
    """The recipe on ranks, and the study: `training.tokens` and `training.long_tokens` give the largest default budget
    and the phases' proportion, `rl.gate` and `rl.later` are 0, `evaluation` is not used."""

    study: Study = field(default_factory=Study)
    """Budgets and measurements."""

    @property
    def experiment(self) -> budgets.Experiment:
        """The settings of `sims/cpt_rl/experiment.py`. Raises ValueError for budgets that are not three or more
        increasing numbers."""
        s, total_tokens = self.study, self.training.tokens + self.training.long_tokens
        study_settings: dict[str, Any] = {setting.name: getattr(s, setting.name) for setting in dataclasses.fields(s)}
        return budgets.Experiment(
            **{
                **study_settings,
                "budgets": s.budgets or (total_tokens // 16, total_tokens // 4, total_tokens),
                "steps": self.rl.steps,
                "seed": self.seed,
            }
        )


def rung(c: Ladder, budget: int, number: int) -> Ladder:
    """The recipe of one training run; only budget and seed differ between runs."""
    t = c.training
    long = max(t.long_length, budget * t.long_tokens // (t.tokens + t.long_tokens))
    return replace(
        c,
        seed=1000 * c.seed + number,
        training=replace(t, tokens=budget - long, long_tokens=long),
        rl=replace(c.rl, gate=0.0, later=0.0),
        cluster=replace(c.cluster, drafts=False),
        evaluation=replace(c.evaluation, tasks=c.study.tasks, samples=c.study.samples),
    )


def check(c: Ladder, ranks: int) -> None:
    """Raises RunError, or a ValueError of one line, now for what the ranks would report later."""
    e = c.experiment
    if e.budgets[0] <= c.training.long_length:
        raise RunError(
            f"study.budgets: {e.budgets[0]:,} tokens must be more than one long row, "
            f"training.long_length={c.training.long_length:,}"
        )
    for name in ("demonstrations", "tasks"):
        if (n := getattr(c.study, name)) < ranks:
            raise RunError(
                f"study.{name} must be at least the number of ranks, {ranks}, to give each rank one; got {n}"
            )
    if c.sft.conversations is not None:
        raise RunError("cpt-rl measures SFT on the small world's demonstrations; leave out sft.conversations")
    chain.check(rung(c, e.budgets[-1], 0), ranks)


@dataclass(frozen=True)
class RankGroup:
    """The ranks of a training run."""

    ranks: int
    backend: str
    cluster: Cluster
    """A resumed run may change what does not affect the weights."""
    resume_command: str
    """The command that goes on after a failure."""


def learn(c: Ladder, out: Path, resume: bool, ranks: int, backend: str, cluster: Cluster) -> None:
    """The parent process: every training run, smallest budgets first; then fits, verdicts and picture. Raises RunError
    if ranks fail."""
    e = c.experiment
    largest = rung(c, e.budgets[-1], 0)
    resume_command = f"etude run cpt-rl --scale full --out {shlex.quote(str(out))} --resume" + (
        f" --backend gloo --nproc {ranks}" if backend == "gloo" else ""
    )
    with Run.open(out, "cpt-rl full", c, resume) as run, run.report_interruption(resume_command):
        corpus = out / "corpus"
        with Run.open(corpus, "recipe", largest.small, resume=corpus.exists()) as corpus_run:
            tokenizer = Path(str(c.checkpoint)) / "tokenizer.json"
            data(corpus_run, largest.small, tokenizer, prepared=chain.prepared(c.data.corpus, tokenizer))
        group = RankGroup(ranks, backend, cluster, resume_command)
        results = [
            measure_training_run(run, c, corpus, budget, number, group)
            for budget in e.budgets
            for number in range(e.seeds)
        ]
        conclusion = cpt_rl.concluded(results, e)
        record = {"experiment": "cpt-rl full", "command": resume_command.replace(" --resume", ""),
                  "config": dataclasses.asdict(e), "machine": machine(), "checkpoint": c.checkpoint,
                  "seconds": run.seconds(), **conclusion}  # fmt: skip
        atomic_write(out / "cpt-rl.csv", figures.as_csv(conclusion["rows"]))
        cpt_rl.picture(record, out / "cpt-rl.png")
        atomic_write(out / "cpt-rl.json", json.dumps(record, indent=1) + "\n")
    figures.show(conclusion["claims"])
    print(f"picture: {out / 'cpt-rl.png'}\ntable:   {out / 'cpt-rl.csv'}\nverdict: {out / 'cpt-rl.json'}")


def measure_training_run(run: Run, c: Ladder, corpus: Path, budget: int, number: int, group: RankGroup) -> dict:
    """One training run, from data to measurements, on a group of ranks of its own."""
    name = f"{budget}-{number}"
    stage = run.stage(name, total=1, unit="runs")
    if stage.finished:
        return stage.result()
    root, rung_config = run.root / "runs" / name, rung(c, budget, number)
    print(f"budget {budget:,}, seed {number}: {root}", flush=True)
    with Run.open(root, "recipe full", rung_config, resume=root.exists()) as inner_run:
        budgets.cut(inner_run, corpus, rung_config.small)
        cluster = replace(group.cluster, drafts=False)
        rank_arguments = {
            "technique": "cpt-rl",
            "backend": group.backend,
            "ranks": group.ranks,
            "config": dataclasses.asdict(replace(rung_config, cluster=cluster)),
        }
        if launch.start(
            "etude.run.rank", [str(root.resolve()), json.dumps(rank_arguments)], group.ranks, cluster.restarts
        ):
            raise RunError(f"the ranks of {root} failed; their errors are above. Continue with: {group.resume_command}")
    measurements = read_json(root / "stages" / "measure.json")["result"] | budgets.read_metrics(root, budget, number)
    stage.log(1, success=float(np.mean(measurements["final"]["success"])))
    return stage.finish(measurements)


# ------------------------------------------------------------------------------------------------ on every rank


def play(out: Path, c: Ladder, ranks: int, seed: int) -> None:
    """One training run on this rank; `seed` is that of the measurements, the same for all runs."""
    chain.play(out, c, ranks, {"measure": partial(measure, seed=seed)})


def measure(stage: Stage | None, out: Path, c: FullRecipe, seed: int) -> None:
    """`sims.cpt_rl.budgets.measure` on all ranks, each with its share: loss after pretraining; loss on demonstrations
    and success, before and after RL."""
    assert isinstance(c, Ladder)
    language = language_of(out)
    demonstrations, tasks = budgets.heldout(replace(c.experiment, seed=seed), c.small, language)
    local_demonstrations, local_tasks = (
        [items[i] for i in rl.share(len(items)).tolist()] for items in (demonstrations, tasks)
    )
    saved_results: list = [{}]
    if stage is not None:
        stage.total, saved_results = 2 * len(local_tasks) * c.study.samples, [stage.restore() or {}]
    dist.broadcast_object_list(saved_results, 0)
    results = saved_results[0]
    with Watchdog(out / "work" / "measure", c.cluster.timeout) as watch:

        def beat(base: int, done: int) -> None:
            watch.beat(base + done)
            if stage is not None:
                stage.progress(base + done)

        if "codebase_loss" not in results:
            window, max_codebase_tokens = c.training.long_length, c.study.codebase_tokens
            codebase_score = cpt.codebase_nll(
                load_hf(out / "checkpoints" / "cpt"),
                language.tokenizer,
                heldout_codebase(out),
                window,
                max_tokens=max_codebase_tokens,
                batch=count_windows(c),
            )
            results |= {
                "codebase_loss": codebase_score.nll / codebase_score.tokens,
                "codebase_bpb": codebase_score.bits_per_byte,
            }
        for number, name in enumerate(("sft", "final")):
            if name in results:
                continue
            model = gather(load_hf(out / "checkpoints" / name), getattr(torch, c.training.dtype))
            nll = budgets.demonstration_nll(model, [demonstration.chain for demonstration in local_demonstrations])
            done = partial(beat, number * len(local_tasks) * c.study.samples)
            policy_metrics = measure_policy(
                model, language, local_tasks, c.small, hash_seed(seed, "cpt-rl"), done, copy=False
            )
            rank_results: list = [None] * dist.get_world_size()
            dist.all_gather_object(rank_results, (nll, policy_metrics))
            grids = {
                key: np.concatenate([metrics[key] for _, metrics in rank_results])
                for key in ("success", "greedy", "turns", "finished")
            }
            results[name] = {
                "nll": [pair for pairs, _ in rank_results for pair in pairs],
                "success": grids["success"].mean(1).tolist(),
                "best": float(grids["success"].max(1).mean()),
                **{key: float(grids[key].mean()) for key in ("greedy", "turns", "finished")},
            }
            if stage is not None:
                stage.save(results, number + 1)
    if stage is not None:
        stage.log(1, **{f"success_{name}": float(np.mean(results[name]["success"])) for name in ("sft", "final")})
        stage.finish(results)
