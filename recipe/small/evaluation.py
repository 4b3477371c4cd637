"""Before and after: held-out tasks, held-out codebase, speculative decoding of the agent's own rollouts."""

import itertools
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kit.process import in_fresh_process, one_thread
from kit.runs import Run, Stage
from kit.statistics import bootstrap, pass_at_k
from recipe.microrepo import MicroRepo, Session, Task
from recipe.microrepo.environment import TextSession
from recipe.small.agent import Language, hash_seed, one_row, play
from recipe.small.behaviours import BEHAVIOURS, count_behaviours
from recipe.small.data import heldout_codebase, task_stream
from recipe.small.demonstrations import context
from recipe.small.learner import language_of, load_checkpoint
from recipe.small.settings import Recipe
from recipe.small.transcripts import transcript_of
from ref import cpt
from ref.engine.decoder import Decoder, Generation
from ref.engine.sampler import Sampler
from ref.mtp import MTP
from ref.network import Transformer
from ref.rollout import decode_rollout

__all__ = [
    "FULL",
    "WAYS",
    "compare",
    "conclude",
    "decode_checkpoint",
    "measure_decoding",
    "measure_policy",
    "summarise",
]

FIGURES = ("success", "best", "greedy", "tokens", "turns", "invalid_calls")


def measure_policy(
    model: Transformer,
    language: Language,
    tasks: list[Task],
    config: Recipe,
    seed: int,
    progress=lambda done: None,
    copy: bool = True,
) -> dict[str, Any]:
    """Per task and sample, [tasks, samples]: success, tokens (sampled by the policy), turns, invalid_calls,
    finished, segments; greedy [tasks]; and behaviours [tasks, behaviours, 2], the rollouts that did each and that
    could have. Rollouts are chains of contexts; `model` is sampled in `training.sampler_dtype`. `copy`: see
    `ref.engine.sampler.Sampler`."""
    n, r = config.evaluation.samples, config.rl
    limits = r.limits(context(language, config))
    sampler = Sampler(model, getattr(torch, config.training.sampler_dtype), copy=copy)
    generator = torch.Generator().manual_seed(seed)
    episodes = play(sampler, language, tasks, n, limits, r.max_turns, generator, r.temperature, progress)
    greedy = play(sampler, language, tasks, 1, limits, r.max_turns, None, temperature=0.0)
    metrics = [e.metrics for e in episodes]
    behaviours = [count_behaviours(e.task, transcript_of(e)) for e in episodes]

    def make_grid(values) -> np.ndarray:
        return np.array(list(values), dtype=float).reshape(len(tasks), n)

    return {
        "success": make_grid(m["tests"] for m in metrics),
        "tokens": make_grid(e.chain.num_sampled_tokens for e in episodes),
        "turns": make_grid(m["turns"] for m in metrics),
        "invalid_calls": make_grid(m["invalid_calls"] for m in metrics),
        "finished": make_grid(e.chain.finished for e in episodes),
        "segments": make_grid(len(e.chain.segments) for e in episodes),
        "greedy": np.array([e.metrics["tests"] for e in greedy]),
        "behaviours": np.array([[counts[name] for name in BEHAVIOURS] for counts in behaviours], dtype=float)
        .reshape(len(tasks), n, len(BEHAVIOURS), 2)
        .sum(1),
        "depth": np.array([t.depth for t in tasks]),
        "multi_hop": np.array([t.kind == "multi-hop" for t in tasks]),
        "example": [language.decode(one_row(e.chain).tokens.tolist()) for e in greedy[:8]],
    }


def summarise(outcomes: dict[str, Any], resamples: int) -> dict:
    """Means with bootstrap intervals over tasks; pass@k for every k; shares of behaviours among the rollouts in which
    they were possible; success by depth, of each kind of task apart where there are several."""
    n = outcomes["success"].shape[1]
    solved_counts = outcomes["success"].sum(1)
    curve = [float(pass_at_k(solved_counts, n, k).mean()) for k in range(1, n + 1)]
    out: dict[str, Any] = {
        name: bootstrap(outcomes[name].mean(1), n=resamples)
        for name in ("success", "tokens", "turns", "invalid_calls", "finished", "segments")
    }
    out |= {
        f"best_of_{n}": bootstrap(solved_counts > 0, n=resamples),
        "greedy": bootstrap(outcomes["greedy"], n=resamples),
        "pass_at_k": curve,
    }
    out["behaviours"] = {
        name: bootstrap(counts, _divide_sums, n=resamples) | {"rollouts": int(counts[:, 1].sum())}
        for name, counts in zip(BEHAVIOURS, outcomes["behaviours"].swapaxes(0, 1), strict=True)
        if counts[:, 1].any()
    }

    def group_by_depth(selected: np.ndarray) -> dict[str, dict]:
        groups = {
            str(d): selected & (outcomes["depth"] == d) for d in sorted(set(outcomes["depth"][selected].tolist()))
        }
        return {
            depth: {
                "tasks": int(group.sum()),
                "success": bootstrap(outcomes["success"][group].mean(1), n=resamples),
                f"best_of_{n}": bootstrap(solved_counts[group] > 0, n=resamples),
                "greedy": bootstrap(outcomes["greedy"][group], n=resamples),
            }
            for depth, group in groups.items()
        }

    if len(set(outcomes["multi_hop"].tolist())) > 1:
        kinds = {"composition": ~outcomes["multi_hop"], "multi-hop": outcomes["multi_hop"]}
        out["by_kind"] = {kind: group_by_depth(group) for kind, group in kinds.items()}
    return {**out, "by_depth": group_by_depth(np.ones(len(solved_counts), dtype=bool))}


def _divide_sums(counts: np.ndarray) -> float:
    """The share of rollouts that did something among those that could have, over [tasks, 2]."""
    return float(counts[:, 0].sum() / max(counts[:, 1].sum(), 1.0))


def compare(before: dict[str, Any], after: dict[str, Any], resamples: int) -> dict:
    """After minus before, paired by task, with bootstrap intervals."""
    n = before["success"].shape[1]
    pairs = {
        name: (after[name].mean(1) - before[name].mean(1))
        for name in ("success", "tokens", "turns", "invalid_calls", "segments")
    }
    pairs[f"best_of_{n}"] = after["success"].max(1) - before["success"].max(1)
    pairs["greedy"] = after["greedy"] - before["greedy"]
    counts = [part["behaviours"].swapaxes(0, 1) for part in (before, after)]
    behaviours = {
        name: bootstrap(np.hstack(pair), lambda c: _divide_sums(c[:, 2:]) - _divide_sums(c[:, :2]), n=resamples)
        for name, *pair in zip(BEHAVIOURS, *counts, strict=True)
        if all(part[:, 1].any() for part in pair)
    }
    return {name: bootstrap(values, n=resamples) for name, values in pairs.items()} | {"behaviours": behaviours}


WAYS = {
    "plain": (False, 0, False),
    "mtp": (True, 0, False),
    "mtp+recall": (True, 4, False),
    "mtp+recall+ahead": (True, 4, True),
}
"""Decoding methods: (drafts by the MTP layers, drafts recalled at the beginning of a turn, turns executed
before they are verified)."""
FULL = "mtp+recall+ahead"


def measure_decoding(
    model: Transformer,
    mtp: MTP,
    language: Language,
    tasks: list[Task],
    config: Recipe,
    rounds: int,
    progress=lambda n: None,
) -> dict:
    """Speculative and plain decoding of the agent's own rollouts at batch size 1, greedy, so all methods decode
    the same tokens. In a round, each of `WAYS` plays all tasks, in an order that rotates from round to round. An
    engine keeps its weights in the cache; four engines that alternated by task would evict each other's.

    `identical`: share of tasks with exactly the tokens of plain decoding. The speed of a round is its tokens
    over the decoder's seconds, which include prompts, observations and retracted turns;
    `speedup_with_environment` uses the time of complete episodes, including environment and forks.
    `retracted`: share of executed turns that were taken back. A decoder recalls what it saw earlier in the same
    round, in this task or others. The top level has the numbers of the method with all features."""
    chaining = context(language, config)
    decoders = {
        name: Decoder(model, mtp if drafts else None, max_len=chaining.limit, recall=recall)
        for name, (drafts, recall, _) in WAYS.items()
    }

    def decode_task(name: str, task: Task) -> tuple[TextSession, list[Generation], list[list[int]], float]:
        decoder, totals, contexts = decoders[name], [], []
        first, start_time = MicroRepo(Session(task, config.rl.max_turns)), time.perf_counter()
        last = first
        for last in decode_rollout(decoder, first, language, config.rl.limits(chaining), ahead=WAYS[name][2]):
            totals, contexts = [*totals, decoder.total], [*contexts, decoder.tokens]
        return last.session, totals, contexts, time.perf_counter() - start_time

    for name in WAYS:
        decode_task(name, tasks[0])
    speeds = {name: {"decoder": [], "clock": []} for name in WAYS}
    first_generations, identical_counts, turns = {}, {}, dict.fromkeys(WAYS, 0)
    for i in range(rounds):
        contexts_by_way = {}
        for place in range(len(WAYS)):
            name = [*WAYS][(i + place) % len(WAYS)]
            decoders[name].reset(forget=True)
            generations, contexts_by_way[name], clock = [], [], 0.0
            for number, task in enumerate(tasks, 1):
                session, totals, contexts, seconds = decode_task(name, task)
                clock += seconds
                generations += totals
                contexts_by_way[name].append(contexts)
                turns[name] += session.verify().turns if i == 0 else 0
                progress((i * len(WAYS) + place) * len(tasks) + number)
            total_generation = sum(generations[1:], generations[0])
            speeds[name]["decoder"].append(len(total_generation.tokens) / total_generation.seconds)
            speeds[name]["clock"].append(len(total_generation.tokens) / clock)
            first_generations.setdefault(name, total_generation)
        if i == 0:
            identical_counts = {
                name: sum(a == b for a, b in zip(contexts_by_way[name], contexts_by_way["plain"], strict=True))
                for name in WAYS
            }

    def compare_speed(name: str, timer: str) -> dict[str, float]:
        ratios = np.array(speeds[name][timer]) / np.array(speeds["plain"][timer])
        return {"median": float(np.median(ratios)), "low": float(ratios.min()), "high": float(ratios.max())}

    ways = {
        name: {
            "speedup": compare_speed(name, "decoder"),
            "speedup_with_environment": compare_speed(name, "clock"),
            "tokens_per_s": float(np.median(speeds[name]["decoder"])),
            "tokens_per_cycle": first_generations[name].tokens_per_cycle,
            "acceptance": first_generations[name].acceptance,
            "recall_acceptance": first_generations[name].recall_acceptance,
            "identical": identical_counts[name] / len(tasks),
            "retracted": first_generations[name].retracted / max(turns[name] + first_generations[name].retracted, 1),
        }
        for name in WAYS
        if name != "plain"
    }
    full = ways[FULL]
    return {
        "tasks": len(tasks),
        **{key: full[key] for key in ("identical", "acceptance", "tokens_per_cycle", "retracted", "speedup")},
        "plain_tokens_per_s": float(np.median(speeds["plain"]["decoder"])),
        "speculative_tokens_per_s": full["tokens_per_s"],
        "ways": ways,
    }


def decode_checkpoint(root: Path, config: Recipe, progress) -> dict:
    """`measure_decoding` for the final policy of a run."""
    dtype = getattr(torch, config.training.dtype)
    model, mtp = load_checkpoint(root, config, "final")
    assert mtp is not None
    tasks = list(itertools.islice(task_stream(config, "evaluation"), config.evaluation.decode_tasks))
    with one_thread():  # products for one token are too small for two threads
        return measure_decoding(
            model.to(dtype), mtp.to(dtype), language_of(root), tasks, config, config.evaluation.decode_rounds, progress
        )


def conclude(stage: Stage, config: Recipe, tasks: list[Task], parts: dict[str, dict], codebase: list[dict]) -> None:
    """Finishes the stage `eval` with what `measure_policy` found before and after RL, and the held-out codebase by
    checkpoint."""
    before, after, e = parts["before"], parts["after"], config.evaluation
    stage.log(
        1,
        **{
            f"{moment}_{k}": float(parts[moment][k].mean()) for moment in parts for k in ("success", "greedy", "tokens")
        },
    )
    stage.finish(
        {
            "tasks": e.tasks,
            "samples": e.samples,
            "before": summarise(before, e.resamples),
            "after": summarise(after, e.resamples),
            "difference": compare(before, after, e.resamples),
            "outcomes": [
                {
                    "kind": task.kind,
                    "depth": task.depth,
                    **{
                        moment: {"solved": int(part["success"][number].sum()), "greedy": int(part["greedy"][number])}
                        for moment, part in parts.items()
                    },
                }
                for number, task in enumerate(tasks)
            ],
            "codebase": codebase,
            "examples": [
                {"prompt": t.prompt, "depth": t.depth, "transcript": text, "success": bool(ok)}
                for t, text, ok in zip(tasks, after["example"], after["greedy"], strict=False)
            ],
        }
    )


def evaluate(run: Run, config: Recipe, tasks: Iterable[Task]) -> None:
    """The last stages: `eval` (deterministic) and `decode` (timed)."""
    e, language, dtype = config.evaluation, language_of(run.root), getattr(torch, config.training.dtype)
    tasks = list(itertools.islice(tasks, e.tasks))
    stage = run.stage("eval", total=2 * e.tasks * e.samples, unit="rollouts")
    if not stage.finished:
        parts = (stage.restore() or {}).get("parts", {})
        names = {"before": "sft", "after": "final"}
        for number, (moment, name) in enumerate(names.items()):
            if moment not in parts:
                model = load_checkpoint(run.root, config, name, with_mtp=False)[0].to(dtype)
                base = number * e.tasks * e.samples
                parts[moment] = measure_policy(
                    model,
                    language,
                    tasks,
                    config,
                    hash_seed(config.seed, "evaluation"),
                    lambda done, base=base: stage.progress(base + done),
                )
                stage.save({"parts": parts}, number + 1)
        codebase, results = heldout_codebase(run.root), []
        for name in ("mid-cpt", "cpt", "sft", "final"):
            model = load_checkpoint(run.root, config, name, with_mtp=False)[0].to(dtype)
            likelihood = cpt.codebase_nll(model, language.tokenizer, codebase, config.training.long_length)
            results.append(
                {"checkpoint": name, "perplexity": likelihood.perplexity, "bits_per_byte": likelihood.bits_per_byte}
            )
        conclude(stage, config, tasks, parts, results)
    if not e.decode_rounds:
        return
    stage = run.stage("decode", total=e.decode_rounds * len(WAYS) * e.decode_tasks, unit="tasks")
    if not stage.finished:
        stage.restore()
        report = in_fresh_process(decode_checkpoint, run.root, config, progress=stage.progress)
        metric_names = ("acceptance", "recall_acceptance", "tokens_per_cycle", "retracted")
        stage.log(1, **{key: report["ways"][FULL][key] for key in metric_names})
        stage.finish(report)
