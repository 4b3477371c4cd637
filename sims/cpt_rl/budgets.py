"""One training run of Figure 2 (`sims/cpt_rl/experiment.py`): a budget and a seed → pretraining → SFT → RL →
measurements.

Each is a run of the recipe in its own folder, without MTP layers. An experiment that died can therefore resume in the
training run and stage where it stopped.
"""

import itertools
import random
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from kit.disk import read_lines
from kit.runs import Run
from kit.settings import fill
from recipe.microrepo import Task
from recipe.small import stages as recipe
from recipe.small.agent import Language, hash_seed
from recipe.small.data import heldout_codebase, heldout_file, task_stream
from recipe.small.demonstrations import context, taught
from recipe.small.evaluation import measure_policy
from recipe.small.learner import language_of, load_checkpoint, packed_rows
from recipe.small.settings import Recipe
from ref import cpt
from ref.network import Transformer
from ref.network.release import TOKENIZER_FILES
from ref.rl import compute_own_logp, pad
from ref.rollout import Rollout
from ref.self_summary import Chain
from sims.policies import SMOKE

__all__ = ["Experiment", "cut", "demonstration_nll", "heldout", "settings", "read_metrics", "training"]


@dataclass(frozen=True)
class Experiment:
    """Budgets and measurements."""

    budgets: tuple[int, ...] = (125_000, 315_000, 800_000, 2_000_000)
    """Pretraining tokens over both phases; three or more values, increasing."""
    seeds: int = 3
    """Training runs at each budget."""
    steps: int = 30
    """RL steps of each training run."""
    last: int = 10
    """Number of final RL steps whose training reward counts."""
    demonstrations: int = 200
    """Held-out demonstrations for measuring the loss."""
    tasks: int = 200
    """Held-out tasks that agents play, different from those of the demonstrations."""
    samples: int = 4
    """Rollouts per task."""
    looks: int = 8
    """Measurements of codebase perplexity in the short-context phase."""
    codebase_tokens: int | None = None
    """Tokens of the held-out codebase to score after pretraining; none: all of them."""
    resamples: int = 2000
    """Bootstrap resamples."""
    tiny: bool = False
    """Use tiny networks that learn next to nothing in seconds, for --quick."""
    seed: int = 0
    """Seed of the measurements; the seeds of the corpus and of each training run are a thousand times this, plus a
    number."""

    @classmethod
    def quick(cls) -> "Experiment":
        return cls(
            budgets=(4096, 8192, 16384),
            seeds=2,
            steps=2,
            last=2,
            demonstrations=8,
            tasks=4,
            samples=2,
            looks=2,
            codebase_tokens=2048,
            resamples=100,
            tiny=True,
        )

    def __post_init__(self) -> None:
        if len(self.budgets) < 3 or any(a >= b for a, b in itertools.pairwise(self.budgets)):
            raise ValueError(f"budgets must be three or more increasing numbers, got {list(self.budgets)}")
        if self.seeds < 1 or not 1 <= self.last <= self.steps:
            raise ValueError(
                f"seeds must be at least 1, and last must be in 1..steps; got seeds={self.seeds}, "
                f"last={self.last}, steps={self.steps}"
            )


def settings(c: Experiment, budget: int, number: int) -> Recipe:
    """The recipe of one training run; only budget and seed differ between runs."""
    base = fill(Recipe, SMOKE if c.tiny else {})
    t = base.training
    long_budget = budget * t.long_tokens // (t.tokens + t.long_tokens)
    perplexity_interval = max(1, (budget - long_budget) // t.batch_tokens // c.looks)
    return replace(
        base,
        seed=1000 * c.seed + number,
        training=replace(t, tokens=budget - long_budget, long_tokens=long_budget, perplexity_every=perplexity_interval),
        rl=replace(base.rl, steps=c.steps, gate=0.0, later=0.0),
        evaluation=replace(base.evaluation, tasks=c.tasks, samples=c.samples),
    )


def cut(run: Run, corpus: Path, config: Recipe, all_rows: bool = False) -> None:
    """The stage `data` of one training run: rows of the common corpus in the order of its seed, as many as its budget
    needs, or all of them."""
    stage = run.stage("data", total=1, unit="steps")
    if stage.finished:
        return
    stage.restore()
    t, counts = config.training, {}
    file_names = [name for name in TOKENIZER_FILES if (corpus / "data" / name).is_file()]
    paths = [run.path("data", name) for name in (*file_names, heldout_file(corpus).name)]
    for path in paths:
        shutil.copyfile(corpus / "data" / path.name, path)
    for phase, tokens, length in (("short", t.tokens, t.length), ("long", t.long_tokens, t.long_length)):
        ids, doc = packed_rows(corpus, phase)
        rows = np.random.default_rng([config.seed, len(ids)]).permutation(len(ids))[
            : None if all_rows else max(1, round(tokens / length))
        ]
        paths.append(run.path("data", f"{phase}.npz"))
        np.savez(paths[-1], ids=ids[rows], doc=doc[rows])
        counts[phase] = int((doc[rows] >= 0).sum())
    stage.finish(counts, paths)


def heldout(c: Experiment, config: Recipe, language: Language) -> tuple[list[Rollout], list[Task]]:
    """Demonstrations, as imperfect as those of SFT, and tasks to play. They are the same for every training run, no
    task is in both, and every target and helper function is held out from all training data."""
    stream, rng = (
        iter(task_stream(replace(config, seed=c.seed), "evaluation")),
        random.Random(f"{c.seed}-heldout-agent"),
    )
    rollouts = taught(stream, language, context(language, config), config.sft.noise, config.context.memory, rng)
    return list(itertools.islice(rollouts, c.demonstrations)), list(itertools.islice(stream, c.tasks))


@torch.no_grad()
def demonstration_nll(model: Transformer, chains: list[Chain], batch: int = 32) -> list[list[float]]:
    """[nats, tokens] of each demonstration, over the agent's own tokens, including its summaries."""
    segments = [s for chain in chains for s in chain.segments]
    owner = torch.tensor([c for c, chain in enumerate(chains) for _ in chain.segments])
    ids, mask, _ = pad(segments)
    ids, mask = (x.to(model.embed_tokens.weight.device) for x in (ids, mask))
    totals = torch.zeros(len(chains), 2, dtype=torch.float64)
    for rows in torch.arange(len(segments)).split(batch):
        logp = compute_own_logp(model, model(ids[rows], logits=False).hidden, ids[rows], mask[rows])
        totals.index_add_(0, owner[rows], torch.stack((-logp.double().sum(1), mask[rows, 1:].sum(1).double()), 1).cpu())
    return totals.tolist()


def measure(run: Run, c: Experiment, config: Recipe) -> dict:
    """The last stage of one training run: loss after pretraining; loss on demonstrations and success, before and after
    RL."""
    stage = run.stage("measure", total=2 * c.tasks * c.samples, unit="rollouts")
    if stage.finished:
        return stage.result()
    result, language = stage.restore() or {}, language_of(run.root)
    demonstrations, tasks = heldout(c, config, language)
    if "codebase_loss" not in result:
        model, window = load_checkpoint(run.root, config, "cpt")[0], config.training.long_length
        likelihood = cpt.codebase_nll(
            model, language.tokenizer, heldout_codebase(run.root), window, max_tokens=c.codebase_tokens
        )
        result |= {"codebase_loss": likelihood.nll / likelihood.tokens, "codebase_bpb": likelihood.bits_per_byte}
    for number, name in enumerate(("sft", "final")):
        if name in result:
            continue
        model, offset = load_checkpoint(run.root, config, name)[0], number * c.tasks * c.samples
        nll = demonstration_nll(model, [rollout.chain for rollout in demonstrations])
        outcomes = measure_policy(
            model.to(getattr(torch, config.training.sampler_dtype)),
            language,
            tasks,
            config,
            hash_seed(c.seed, "cpt-rl"),
            lambda n, offset=offset: stage.progress(offset + n),
        )
        result[name] = {
            "nll": nll,
            "success": outcomes["success"].mean(1).tolist(),
            "best": float(outcomes["success"].max(1).mean()),
            **{key: float(outcomes[key].mean()) for key in ("greedy", "turns", "finished")},
        }
        stage.save(result, number + 1)
    stage.log(1, **{f"success_{name}": float(np.mean(result[name]["success"])) for name in ("sft", "final")})
    return stage.finish(result)


def training(run: Run, c: Experiment, corpus: Path, budget: int, number: int) -> dict:
    """One training run, from data to measurements, as a run of the recipe inside `run`."""
    name = f"{budget}-{number}"
    stage = run.stage(name, total=1, unit="runs")
    if stage.finished:
        return stage.result()
    config, root = settings(c, budget, number), run.root / "runs" / name
    with Run.open(root, "recipe", config, resume=root.exists(), checkpoint_seconds=run.checkpoint_seconds) as inner:
        cut(inner, corpus, config)
        recipe.pretrain(inner, config)
        recipe.lengthen(inner, config, start="mid-cpt")
        recipe.finetune(inner, config)
        recipe.reinforce(inner, config)
        result = measure(inner, c, config)
    result |= read_metrics(root, budget, number)
    stage.log(1, success=float(np.mean(result["final"]["success"])))
    return stage.finish(result)


def read_metrics(root: Path, budget: int, number: int) -> dict:
    """What the metrics of one training run say."""
    lines = {phase: read_lines(root / "metrics" / f"{phase}.jsonl") for phase in ("cpt", "long", "rl")}
    short_tokens, last = lines["cpt"][-1]["tokens"], lines["rl"][-1]
    return {
        "budget": budget,
        "seed": number,
        "tokens": short_tokens + lines["long"][-1]["tokens"],
        "looks": [
            {"phase": phase, "tokens": look["tokens"] + offset, "ppl": look["codebase_ppl"], "lr": look["lr"]}
            for phase, offset in (("cpt", 0), ("long", short_tokens))
            for look in lines[phase]
            if "codebase_ppl" in look
        ],
        "reward": [step["reward"] for step in lines["rl"]],
        "kl": last["kl"] if "kl" in last else last["drift"],  # a full run calls it drift
    }
