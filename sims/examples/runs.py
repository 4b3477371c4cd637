"""Examples of a finished run for the explorer, small enough to be committed for users without a run of their own.

    etude examples --run runs/small        a few minutes; writes to runs/small/examples

Everything is the last agent's own work on held-out tasks. Nothing is timed, and all random numbers come from
`Sizes.seed`: the same run on the same machine gives the same files. If an example was chosen from many, the file states
the rule.

    rollouts.json                  rollouts, several per task, with the items that they pay for
    chain.json                     chains of several contexts, in pieces, with the rewards of their groups and what
                                   their summaries kept
    token-distributions.npz        log-probs [positions, V] of policy and reference where the agent chose a token
    routing.json, routing.npz      router scores of an exact trainer, experts and log-probs of a coarse sampler
    drafting.json                  a speculative decode, pass by pass, and acceptance by depth over a sample
    hints.json                     messages with a fault, each with its context and its hint (`sims/examples/hints.py`)
"""

import io
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kit.disk import atomic_write
from kit.settings import RunError
from recipe.microrepo import MicroRepo, Session, Task
from recipe.small.agent import Language, Rollout, one_row, play, single
from recipe.small.data import task_stream
from recipe.small.demonstrations import context
from recipe.small.learner import language_of, load_checkpoint
from recipe.small.settings import Recipe
from ref.engine.sampler import Sampler
from ref.mtp import MTP
from ref.network import Transformer
from ref.rl import make_routing, pad
from ref.rollout import decode_rollout
from ref.router_replay import compare_experts
from sims.examples.chain_pieces import retold, words
from sims.examples.hints import hinted_messages
from sims.mtp.drafting import LONGEST, Timed
from sims.policies import read_config
from sims.router_replay.engines import engines

__all__ = ["PARTS", "PLACE", "Sizes", "write"]

PLACE = "examples"
"""Folder of the examples inside a run's folder."""


@dataclass(frozen=True)
class Sizes:
    """How much to sample, and how much of it to keep."""

    tasks: int = 32
    """Held-out tasks that the agent plays in the recipe's contexts."""
    samples: int = 8
    """Rollouts per task, which form a group."""
    shown_tasks: int = 6
    """Tasks of rollouts.json."""
    shown_samples: int = 4
    """Rollouts per task of rollouts.json."""
    positions: int = 64
    """Number of positions with stored distributions."""
    routed: int = 48
    """Rollouts of the coarse sampler, one per task."""
    dropping: int = 2
    """Number of rollouts with stored scores that are chosen for how much the filter drops."""
    alphas: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
    """Values of the filter's plausibility α."""
    drafting_tasks: int = 24
    """Tasks for speculative decoding."""
    seed: int = 0
    """Seed of all random numbers."""


PARTS = ("rollouts", "routing", "chain", "drafting", "hints", "token-distributions")
"""In the order in which they are made."""


def write(
    run_folder: Path, out: Path, sizes: Sizes = Sizes(), progress: Callable[[str], None] = lambda part: None
) -> list[Path]:
    """Runs the last agent of a finished run of the recipe and writes the examples to `out`. `progress` is called with
    the name of each of `PARTS` when it begins. Raises RunError if `run_folder` is not such a run, or has no MTP
    layers."""
    recipe, language = read_config(run_folder), language_of(run_folder)
    after, mtp = load_checkpoint(run_folder, recipe, "final")
    before = load_checkpoint(run_folder, recipe, "sft", with_mtp=False)[0]
    if mtp is None:
        raise RunError(
            f"run={run_folder} has no MTP layers; make a new run with: etude run recipe --scale small --out FOLDER"
        )
    tasks = list(
        itertools.islice(task_stream(recipe, "evaluation"), max(sizes.tasks, sizes.routed, sizes.drafting_tasks))
    )
    generator = torch.Generator().manual_seed(sizes.seed)
    r = recipe.rl
    progress("rollouts")
    episodes = play(
        Sampler(after, torch.float32),
        language,
        tasks[: sizes.tasks],
        sizes.samples,
        r.limits(context(language, recipe)),
        r.max_turns,
        generator,
        r.temperature,
    )
    progress("routing")
    routing_example, arrays = measure_routing(after, recipe, language, tasks[: sizes.routed], sizes)
    progress("chain")
    chain = retold(after, before, recipe, language, tasks, episodes, sizes.samples)
    progress("drafting")
    drafting_example = measure_drafts(after, mtp, recipe, language, tasks[: sizes.drafting_tasks])
    progress("hints")
    hints = hinted_messages(language, tasks[: sizes.tasks], episodes, r.temperature, sizes.seed)
    rollouts = {"rollouts": [describe_rollout(e, language) for e in select_mixed(episodes, sizes)]}
    texts = {
        "rollouts": rollouts,
        "chain": chain,
        "routing": routing_example,
        "drafting": drafting_example,
        "hints": hints,
    }
    progress("token-distributions")
    columns = compute_distributions(after, before, episodes, sizes)
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{name}.json" for name in texts]
    for path, example in zip(paths, texts.values(), strict=True):
        atomic_write(path, json.dumps(example, indent=1, ensure_ascii=False) + "\n")
    for name, data in (("token-distributions", columns), ("routing", arrays)):
        paths.append(out / f"{name}.npz")
        file = io.BytesIO()
        np.savez_compressed(file, **data)  # pyright: ignore[reportArgumentType]
        atomic_write(paths[-1], file.getvalue())
    return paths


def select_mixed(episodes: Sequence[Rollout], sizes: Sizes) -> Sequence[Rollout]:
    """The first rollouts of each of the first tasks; tasks on which some rollouts succeed and some fail come first."""
    n = sizes.samples
    groups = [episodes[i : i + n][: sizes.shown_samples] for i in range(0, len(episodes), n)]
    groups.sort(key=lambda group: len({e.metrics["tests"] for e in group}), reverse=True)
    return list(itertools.chain(*groups[: sizes.shown_tasks]))


def describe_rollout(episode: Rollout, language: Language) -> dict:
    """A rollout: its text, and the items that it pays for."""
    metrics, written_tokens = episode.metrics, episode.chain.num_sampled_tokens
    tokens = one_row(episode.chain).tokens.tolist()
    return {
        "task": episode.environment.session.prompt,
        "success": bool(metrics["tests"]),
        "own_tokens": written_tokens,
        "given_tokens": len(tokens) - written_tokens - episode.opening,
        "calls": metrics["calls"],
        "turns": metrics["turns"],
        "invalid_calls": metrics["invalid_calls"],
        "text": language.decode(tokens),
    }


@torch.no_grad()
def compute_distributions(
    after: Transformer, before: Transformer, episodes: Sequence[Rollout], sizes: Sizes
) -> dict[str, np.ndarray]:
    """Log-probs of both agents, float16 [positions, V], at random positions where the last agent chose a token."""
    segments = [s for e in episodes for s in e.chain.segments]
    row, t = pad(segments)[1][:, 1:].nonzero(as_tuple=True)
    positions = np.random.default_rng(sizes.seed).choice(len(row), min(sizes.positions, len(row)), replace=False)
    logps = {"policy": [], "reference": []}
    for index in sorted(positions.tolist()):
        prefix = segments[row[index]].tokens[None, : t[index] + 1]
        for name, model in (("policy", after), ("reference", before)):
            logps[name].append(model(prefix).logits[0, -1].log_softmax(-1).half().numpy())
    return {name: np.stack(rows) for name, rows in logps.items()}


@torch.no_grad()
def measure_routing(
    model: Transformer, recipe: Recipe, language: Language, tasks: list[Task], sizes: Sizes
) -> tuple[dict, dict[str, np.ndarray]]:
    """The coarse sampler of `sims/router_replay/experiment.py` (FP8 weights, bfloat16) and a float32 trainer on the
    same tokens.

    Arrays: behavior [n] and logp [ways, n] of all sampled tokens, nats, rollout [n]; and for each rollout i that is
    shown i/scores [P, T−1, L, E], router logits of P different passes of the trainer, the pass of each α in i/pass
    [alphas], i/sampler and i/own [T−1, L, K] experts, i/behavior [T−1], i/logp [ways, T−1]. The ways are the trainer's
    own experts, then every α."""
    dtype, rounding, trainer_dtype = engines(recipe)["fp8"]
    trainer, r = model.to(trainer_dtype), recipe.rl
    generator = torch.Generator().manual_seed(sizes.seed)
    episodes = play(
        Sampler(model, dtype, rounding=rounding),
        language,
        tasks,
        1,
        r.limits(single(r.max_len)),
        r.max_turns,
        generator,
        r.temperature,
    )
    passes = [
        [run_trainer(trainer, e, None)] + [run_trainer(trainer, e, alpha) for alpha in sizes.alphas] for e in episodes
    ]
    sampled_masks = [one_row(e.chain).sampled[1:] for e in episodes]
    arrays = {
        "behavior": np.concatenate(
            [one_row(e.chain).logp[1:][mask] for e, mask in zip(episodes, sampled_masks, strict=True)]
        ),
        "logp": np.concatenate(
            [
                [p["logp"][mask] for p in rollout_passes]
                for rollout_passes, mask in zip(passes, sampled_masks, strict=True)
            ],
            1,
        ),
        "rollout": np.repeat(np.arange(len(sampled_masks)), [int(mask.sum()) for mask in sampled_masks]).astype(
            np.int16
        ),
    }

    def dropped_share(i: int) -> float:
        """Share of the sampler's experts that the strictest filter below α = 1 drops."""
        return compare_experts(passes[i][-2]["experts"].unbind(1), passes[i][1]["experts"].unbind(1))["decisions"]

    firsts = {bool(e.metrics["tests"]): i for i, e in reversed([*enumerate(episodes)])}
    most_dropping = sorted(range(len(episodes)), key=dropped_share, reverse=True)[: sizes.dropping]
    selected_indices, rollouts = (
        list(dict.fromkeys([*(firsts[key] for key in (True, False) if key in firsts), *most_dropping])),
        [],
    )
    for number, i in enumerate(selected_indices):
        e, rollout_passes = episodes[i], passes[i]
        distinct_scores: list[torch.Tensor] = []
        pass_indices = []
        for p in rollout_passes[1:]:
            matches = [k for k, scores in enumerate(distinct_scores) if torch.equal(scores, p["scores"])]
            pass_indices.append(matches[0] if matches else len(distinct_scores))
            distinct_scores += [] if matches else [p["scores"]]
        arrays |= {
            f"{number}/scores": torch.stack(distinct_scores).numpy(),
            f"{number}/pass": np.array(pass_indices, dtype=np.int8),
            f"{number}/sampler": one_row(e.chain).experts.to(torch.int8).numpy(),
            f"{number}/own": rollout_passes[0]["experts"].to(torch.int8).numpy(),
            f"{number}/behavior": one_row(e.chain).logp[1:].numpy(),
            f"{number}/logp": torch.stack([p["logp"] for p in rollout_passes]).numpy(),
        }
        rollouts.append(
            {
                "task": e.environment.session.prompt,
                "success": bool(e.metrics["tests"]),
                "tokens": words(language, one_row(e.chain).tokens.tolist()),
                "sampled": one_row(e.chain).sampled.int().tolist(),
            }
        )
    return {
        "sampler": "bfloat16, weights rounded to FP8 E4M3 a row",
        "trainer": "float32",
        "alphas": sizes.alphas,
        "played": len(episodes),
        "chosen": f"the first success, the first failure, and those {sizes.dropping} in which the filter at the "
        f"largest α below 1 drops most",
        "rollouts": rollouts,
    }, arrays


def run_trainer(trainer: Transformer, episode: Rollout, alpha: float | None) -> dict[str, torch.Tensor]:
    """One pass over a rollout of T tokens with the sampler's experts filtered at `alpha`, or the trainer's own (None):
    scores [T−1, L, E], experts [T−1, L, K] and log-probs [T−1] of the tokens that follow."""
    tokens = one_row(episode.chain).tokens[None]
    replayed_experts = make_routing(
        [one_row(episode.chain)], tokens.shape[1], "none" if alpha is None else "filtered", alpha or 0.0
    )
    out = trainer(tokens, logits=False, experts=replayed_experts)
    logp = trainer.logprob(out.hidden[0, :-1], tokens[0, 1:])
    return {"scores": torch.stack(out.router_logits, 1)[:-1], "experts": torch.stack(out.experts, 1)[:-1], "logp": logp}


class RecordingDecoder(Timed):
    """Records the given tokens and every pass: the drafted tokens, how many were accepted, and what the trunk added."""

    def reset(self, forget: bool = False) -> None:
        super().reset(forget)
        self.events: list[dict] = []

    def feed(self, tokens: Sequence[int]) -> None:
        super().feed(tokens)
        self.events.append({"kind": "given", "tokens": list(tokens)})

    def settle(self, x, draft, q, stop, counts) -> int:
        length_before = len(self.tokens)
        n_accepted = super().settle(x, draft, q, stop, counts)
        self.events.append(
            {
                "kind": self.kind,
                "drafted": list(draft),
                "accepted": n_accepted,
                "added": self.tokens[length_before + n_accepted :],
            }
        )
        return n_accepted


def measure_drafts(model: Transformer, mtp: MTP, recipe: Recipe, language: Language, tasks: list[Task]) -> dict:
    """Greedy rollouts at batch size 1, plain and with 1 … D drafts per pass. By number of drafts: offered and accepted
    at each depth; `tried`, the tested drafts, and `stood`, the accepted ones; tokens, passes. `turns`: number of turns
    by length. Shown step by step: the first success with a rejected draft, with D drafts."""
    r, depth = recipe.rl, recipe.mtp.layers.depth
    decoders = {
        g: RecordingDecoder(model, mtp if g else None, draft_len=g or None, max_len=r.max_len) for g in range(depth + 1)
    }
    lengths, identical = [0] * (LONGEST + 1), 0
    example: dict | None = None
    counts = {
        g: {"drafted": [0] * g, "accepted": [0] * g, "tried": 0, "stood": 0, "tokens": 0, "passes": 0}
        for g in range(1, depth + 1)
    }
    for task in tasks:
        for g, decoder in decoders.items():
            environment, limits = MicroRepo(Session(task, r.max_turns)), r.limits(single(r.max_len))
            (environment,) = decode_rollout(decoder, environment, language, limits, ahead=False)
            total = decoder.total
            if g:
                draft_counts = counts[g]
                sums = {
                    "tried": decoder.tested_drafts,
                    "stood": decoder.stood,
                    "tokens": len(total.tokens),
                    "passes": total.cycles,
                }
                draft_counts |= {key: draft_counts[key] + value for key, value in sums.items()}
                by_depth = {"drafted": total.draft_counts, "accepted": total.accept_counts}
                draft_counts |= {
                    key: [a + b for a, b in zip(draft_counts[key], values, strict=True)]
                    for key, values in by_depth.items()
                }
        for length in decoders[0].turns_seen:
            lengths[length] += 1
        identical += all(decoder.tokens == decoders[0].tokens for decoder in decoders.values())
        has_rejection = decoder.stood < decoder.tested_drafts
        is_solved = bool(environment.session.verify().tests)
        if example is None or has_rejection and is_solved and not example["good"]:
            steps = [
                {k: words(language, v) if isinstance(v, list) else v for k, v in step.items()}
                for step in decoder.events
            ]
            example = {"good": has_rejection and is_solved, "task": task.prompt, "success": is_solved, "steps": steps}
    assert example is not None
    example.pop("good")
    return {
        "tasks": len(tasks),
        "identical": identical,
        "turns": lengths,
        "drafts": {str(g): draft_counts for g, draft_counts in counts.items()},
        **example,
    }
