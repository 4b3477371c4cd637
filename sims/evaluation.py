"""Before and after: held-out tasks, held-out codebase, and speculative decoding of the agent's own rollouts."""

import itertools
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from etude.runs import Run
from ref import cpt
from ref.model import Transformer
from ref.mtp import MTP, Decoder
from ref.sampler import Sampler
from sims.agent import Episode, Language, play
from sims.microrepo import Session, Task
from sims.statistics import bootstrap, pass_at_k

if TYPE_CHECKING:
    from sims.recipe import Recipe

__all__ = ["compare", "measure_decoding", "measure_policy", "summarise"]

FIGURES = ("success", "best", "greedy", "tokens", "turns", "invalid_calls")


def measure_policy(
    model: Transformer, language: Language, tasks: list[Task], config: "Recipe", seed: int, progress=lambda done: None
) -> dict[str, np.ndarray]:
    """Per task and sample, [tasks, samples]: success, tokens (sampled by the policy), turns, invalid_calls, finished; and greedy
    [tasks]. `model` samples in its own dtype."""
    n, r = config.evaluation.samples, config.rl
    sampler = Sampler(model, model.embed_tokens.weight.dtype)
    generator = torch.Generator().manual_seed(seed)
    episodes: list[Episode] = []
    chunk = max(1, 256 // n)
    for start in range(0, len(tasks), chunk):
        episodes += play(sampler, language, tasks[start : start + chunk], n, r.max_len, r.max_turns, generator, r.temperature)
        progress(len(episodes))
    greedy = play(sampler, language, tasks, 1, r.max_len, r.max_turns, None, temperature=0.0)
    verdicts = [e.verdict for e in episodes]

    def grid(values) -> np.ndarray:
        return np.array(list(values), dtype=float).reshape(len(tasks), n)

    return {
        "success": grid(v.tests for v in verdicts),
        "tokens": grid(int(e.rollout.sampled.sum()) for e in episodes),
        "turns": grid(v.turns for v in verdicts),
        "invalid_calls": grid(v.invalid_calls for v in verdicts),
        "finished": grid(e.rollout.finished for e in episodes),
        "greedy": np.array([e.verdict.tests for e in greedy]),
        "depth": np.array([t.depth for t in tasks]),
        "example": [language.decode(e.rollout.tokens.tolist()) for e in greedy[:8]],
    }


def summarise(found: dict[str, Any], resamples: int) -> dict:
    """Means with bootstrap intervals over tasks; pass@k for every k; success by depth."""
    n = found["success"].shape[1]
    solved = found["success"].sum(1)
    curve = [float(pass_at_k(solved, n, k).mean()) for k in range(1, n + 1)]
    out = {name: bootstrap(found[name].mean(1), n=resamples) for name in ("success", "tokens", "turns", "invalid_calls", "finished")}
    out |= {f"best_of_{n}": bootstrap(solved > 0, n=resamples), "greedy": bootstrap(found["greedy"], n=resamples), "pass_at_k": curve}
    out["by_depth"] = {
        str(d): {
            "tasks": int((found["depth"] == d).sum()),
            "success": bootstrap(found["success"][found["depth"] == d].mean(1), n=resamples),
            f"best_of_{n}": bootstrap(solved[found["depth"] == d] > 0, n=resamples),
            "greedy": bootstrap(found["greedy"][found["depth"] == d], n=resamples),
        }
        for d in sorted(set(found["depth"].tolist()))
    }  # fmt: skip
    return out


def compare(before: dict[str, Any], after: dict[str, Any], resamples: int) -> dict:
    """After minus before, paired by task, with bootstrap intervals."""
    n = before["success"].shape[1]
    pairs = {name: (after[name].mean(1) - before[name].mean(1)) for name in ("success", "tokens", "turns", "invalid_calls")}
    pairs[f"best_of_{n}"] = (after["success"].max(1) - before["success"].max(1))
    pairs["greedy"] = after["greedy"] - before["greedy"]
    return {name: bootstrap(values, n=resamples) for name, values in pairs.items()}


def converse(decoder: Decoder, language: Language, task: Task, max_len: int, max_turns: int) -> list[int]:
    """One episode at batch 1 through a decoder; returns all tokens of the context."""
    episode = Episode(language, Session(task, max_turns))
    decoder.reset()
    decoder.feed(episode.prompt)
    while len(decoder.tokens) < max_len:
        turn = decoder.generate(episode.stop, max_len - len(decoder.tokens))
        if turn[-1] != episode.stop:
            break
        answer = episode.reply(turn[:-1])
        if answer is None:
            break
        decoder.feed(answer[: max_len - len(decoder.tokens)])
    return list(decoder.tokens)


def measure_decoding(
    model: Transformer, mtp: MTP, language: Language, tasks: list[Task], config: "Recipe", rounds: int = 3, progress=lambda n: None
) -> dict:
    """Plain against speculative decoding of the agent's own rollouts at batch 1, task by task in turn, greedy, so that both decode
    the same tokens. The ratio of a round is total plain seconds over total speculative seconds. `identical`: share of tasks whose
    tokens agree in full."""
    r = config.rl
    plain = Decoder(model, None, max_len=r.max_len)
    fast = Decoder(model, mtp, max_len=r.max_len)
    ratios, speeds = [], {"plain": [], "speculative": []}
    drafted, accepted, cycles, tokens, same = np.zeros(fast.depth), np.zeros(fast.depth), 0, 0, 0
    converse(plain, language, tasks[0], r.max_len, r.max_turns)
    converse(fast, language, tasks[0], r.max_len, r.max_turns)
    for i in range(rounds):
        seconds, count = {"plain": 0.0, "speculative": 0.0}, {"plain": 0, "speculative": 0}
        for number, task in enumerate(tasks):
            seen = {}
            pair = [("plain", plain), ("speculative", fast)]
            for name, decoder in pair if number % 2 else pair[::-1]:
                started = time.perf_counter()
                seen[name] = converse(decoder, language, task, r.max_len, r.max_turns)
                del started
                seconds[name] += decoder.total.seconds
                count[name] += len(decoder.total.tokens)
            if i == 0:
                same += seen["plain"] == seen["speculative"]
                drafted += fast.total.drafted
                accepted += fast.total.accepted
                cycles, tokens = cycles + fast.total.cycles, tokens + len(fast.total.tokens)
            progress(i * len(tasks) + number + 1)
        speed = {name: count[name] / seconds[name] for name in seconds}
        ratios.append(speed["speculative"] / speed["plain"])
        for name in speeds:
            speeds[name].append(speed[name])
    return {
        "tasks": len(tasks), "identical": same / len(tasks), "acceptance": [float(a / max(d, 1)) for a, d in zip(accepted, drafted, strict=True)],
        "tokens_per_cycle": tokens / cycles,
        "speedup": {"median": float(np.median(ratios)), "low": min(ratios), "high": max(ratios)},
        "plain_tokens_per_s": float(np.median(speeds["plain"])), "speculative_tokens_per_s": float(np.median(speeds["speculative"])),
    }  # fmt: skip


def evaluate(run: Run, config: "Recipe", tasks: list[Task]) -> None:
    """The last stages: `eval` (deterministic) and `decode` (timed)."""
    from sims.recipe import hash_seed, heldout_codebase, language_of, load_checkpoint

    e, language, dtype = config.evaluation, language_of(run), getattr(torch, config.training.dtype)
    tasks = list(itertools.islice(tasks, e.tasks))
    stage = run.stage("eval", total=2 * e.tasks * e.samples, unit="rollouts")
    if not stage.finished:
        parts = (stage.restore() or {}).get("parts", {})
        names = {"before": "sft", "after": "final"}
        for number, (when, name) in enumerate(names.items()):
            if when not in parts:
                model = load_checkpoint(run, config, name, with_mtp=False)[0].to(dtype)
                base = number * e.tasks * e.samples
                parts[when] = measure_policy(model, language, tasks, config, hash_seed(config.seed, "evaluation"),
                                             lambda done, base=base: stage.progress(base + done))  # fmt: skip
                stage.save({"parts": parts}, number + 1)
        codebase, results = heldout_codebase(run), []
        for name in ("mid-cpt", "cpt", "sft", "final"):
            model = load_checkpoint(run, config, name, with_mtp=False)[0].to(dtype)
            found = cpt.codebase_nll(model, language.tokenizer, codebase, config.training.long_length)
            results.append({"checkpoint": name, "perplexity": found.perplexity, "bits_per_byte": found.bits_per_byte})
        before, after = parts["before"], parts["after"]
        stage.log(1, **{f"{when}_{k}": float(parts[when][k].mean()) for when in parts for k in ("success", "greedy", "tokens")})
        stage.finish({
            "tasks": e.tasks, "samples": e.samples, "before": summarise(before, e.resamples), "after": summarise(after, e.resamples),
            "difference": compare(before, after, e.resamples), "codebase": results,
            "examples": [{"prompt": t.prompt, "depth": t.depth, "transcript": text, "success": bool(ok)}
                         for t, text, ok in zip(tasks, after["example"], after["greedy"], strict=False)],
        })  # fmt: skip
    stage = run.stage("decode", total=3 * e.decode_tasks, unit="rollouts")
    if not stage.finished:
        stage.restore()
        model, mtp = load_checkpoint(run, config, "final")
        found = measure_decoding(model.to(dtype), mtp.to(dtype), language, tasks[: e.decode_tasks], config, progress=stage.progress)
        stage.log(1, acceptance=found["acceptance"], tokens_per_cycle=found["tokens_per_cycle"])
        stage.finish(found)
