"""What drafts cost and save: how often they are accepted, the cost of each kind of pass, and the speed-up that theory
predicts.

Measures both training experiments of `etude figure mtp`. arXiv:2211.17192, theorem 3.8, where α is the probability that
a draft is accepted, γ the number of drafts per cycle, and c the cost of a draft in passes of the target:

    speed-up = (1 − α^(γ+1)) / ((1 − α)(γc + 1))

It assumes that a pass over γ + 1 rows costs no more than one over a single row, and that the text is one long turn. An
agent's turns are short, and their first pass reads a prompt or an observation without drafts: `with_turns` counts that,
too.
"""

import itertools
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kit.statistics import bootstrap
from recipe.microrepo import MicroRepo, Session
from recipe.small.agent import single
from recipe.small.data import task_stream
from recipe.small.learner import language_of, load_checkpoint
from recipe.small.settings import Recipe
from ref.engine.decoder import Decoder
from ref.mtp import MTP
from ref.network import Transformer
from ref.rollout import decode_rollout
from sims.experiment import above, at_least, between, claim

__all__ = [
    "Experiment",
    "EXPECTED",
    "FULL",
    "GREEDY",
    "Timed",
    "acceptance",
    "curve",
    "decode",
    "predicted",
    "speed_rows",
    "speed_verdicts",
    "with_turns",
]

FULL = "recall, ahead"
"""All drafts plus our own methods: recall the beginnings of turns, and execute turns before they are verified."""
PASS_KINDS = ("opening", "single", "verify", "guess")
LONGEST = 64
"""Longer turns count as this many tokens."""
GREEDY, EXPECTED = 1, 2
"""Columns of the counts of `acceptance`."""


@dataclass(frozen=True)
class Experiment:
    """Sizes of all parts."""

    run: str = "runs/small"
    """A finished run of the recipe (empty: first run a tiny recipe that has learned nothing)."""
    tokens: int = 400_000
    """Training tokens for each set of layers."""
    seeds: int = 4
    """Repetitions: initial weights and the order of batches."""
    rates: tuple[float, ...] = (0.5, 1.0, 2.0)
    """Learning rates, as multiples of the recipe's."""
    looks: tuple[float, ...] = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0)
    """When to measure the layers, as shares of the tokens."""
    heldout_tokens: int = 16_384
    """Tokens of held-out text."""
    repetitions: int = 3
    """Repetitions of the joint training."""
    epochs: int = 2
    """Epochs of SFT in the joint training."""
    demonstrations: int = 200
    """Held-out demonstrations for measuring the joint training."""
    tasks: int = 48
    """Held-out tasks to decode."""
    rounds: int = 3
    """Number of times that each task is decoded with each method."""
    resamples: int = 1000
    """Bootstrap resamples."""
    seed: int = 0
    """Seed of all random numbers."""

    def __post_init__(self):
        if 1.0 not in self.rates or self.looks[-1] != 1:
            raise ValueError(f"rates must contain 1.0 and looks must end with 1, got {self.rates} and {self.looks}")

    @classmethod
    def quick(cls) -> "Experiment":
        return cls(
            run="",
            tokens=8192,
            seeds=2,
            rates=(1.0, 2.0),
            looks=(0.25, 0.5, 1.0),
            heldout_tokens=2048,
            repetitions=1,
            epochs=1,
            demonstrations=6,
            tasks=2,
            rounds=1,
            resamples=50,
        )


@torch.no_grad()
def acceptance(
    mtp: MTP, trunk: Transformer, out, ids: Tensor, doc: Tensor, weight: Tensor | None = None, chunk: int = 4096
) -> np.ndarray:
    """[rows, depth, 3] for the text: number of scored positions, greedy drafts that equal the main head's choice, and Σ
    min(p, q), on the positions that `mtp_loss` scores."""
    is_scored = (doc[:, 1:] == doc[:, :-1]) & (doc[:, 1:] >= 0)
    b, j = (is_scored if weight is None else is_scored & (weight[:, 1:] != 0)).nonzero(as_tuple=True)
    totals = torch.zeros(len(ids), mtp.mtp.depth, 3, dtype=torch.float64)
    for k, hidden in enumerate(mtp(out.prenorm, trunk.embed_tokens(ids), doc), 1):
        is_valid = (j >= k) & (doc[b, (j - k).clamp(min=0)] == doc[b, j])
        for row, positions in zip(b[is_valid].split(chunk), j[is_valid].split(chunk), strict=True):
            p, q = (trunk.head(x).softmax(-1) for x in (out.hidden[row, positions], hidden[row, positions - k]))
            is_same = p.argmax(-1) == q.argmax(-1)
            counts = torch.stack((torch.ones(len(row)), is_same.float(), torch.minimum(p, q).sum(-1)), 1)
            totals[:, k - 1].index_add_(0, row, counts.double())
    return totals.numpy()


def curve(counts: np.ndarray, column: int) -> np.ndarray:
    """Acceptance, mean over depths, at every look; counts [rows, looks, depth, 3] as a bootstrap draws them."""
    total = counts.sum(0)
    return (total[..., column] / total[..., 0]).mean(-1)


class Timed(Decoder):
    """Times its passes by kind: openings of turns, passes over one row, passes that verify drafts; and the drafting
    between them. Does not work for turns executed early, whose passes do several things at once."""

    def reset(self, forget: bool = False) -> None:
        super().reset(forget)
        self.totals_by_kind = {kind: [0.0, 0] for kind in PASS_KINDS}  # seconds, and passes or drafts
        self.tested_drafts = self.stood = 0
        self.turns_seen: list[int] = []

    def run_trunk(self, ahead: list[int]):
        self.kind = "opening" if len(self.tokens) - self.trunk_length > 1 else "verify" if ahead else "single"
        start_time = time.perf_counter()
        x = super().run_trunk(ahead)
        self.count(self.kind, time.perf_counter() - start_time, 1)
        return x

    def settle(self, x, draft, q, stop, counts) -> int:
        start_time = time.perf_counter()
        n_accepted = super().settle(x, draft, q, stop, counts)
        self.count(self.kind, time.perf_counter() - start_time, 0)
        # Drafts after the first rejected one were never tested.
        self.tested_drafts, self.stood = self.tested_drafts + min(n_accepted + 1, len(draft)), self.stood + n_accepted
        return n_accepted

    def guess(self, n: int, stop: int | None):
        start_time = time.perf_counter()
        draft, q = super().guess(n, stop)
        self.count("guess", time.perf_counter() - start_time, len(draft))
        return draft, q

    def generate(self, stop: int | None = None, max_new: int | None = None, ahead: bool = False) -> list[int]:
        turn = super().generate(stop, max_new, ahead)
        self.turns_seen += [min(len(turn), LONGEST)] if turn else []
        return turn

    def count(self, kind: str, seconds: float, n: int) -> None:
        self.totals_by_kind[kind][0] += seconds
        self.totals_by_kind[kind][1] += n


def decode(root: Path, recipe: Recipe, c: Experiment, progress) -> dict:
    """The last agent's greedy rollouts of held-out tasks at batch size 1: plain, with 1 … D drafts per cycle, and with
    all our methods; every task with every method in turn. Per method and task, summed over rounds: seconds, tokens, the
    sums of `Timed`, and whether the tokens equal those of plain decoding."""
    model, mtp = load_checkpoint(root, recipe, "final")
    language, r, depth = language_of(root), recipe.rl, recipe.mtp.layers.depth
    plain = Timed(model, max_len=r.max_len)
    ways: dict[str, Decoder] = {"plain": plain}
    ways |= {str(g): Timed(model, mtp, draft_len=g, max_len=r.max_len) for g in range(1, depth + 1)}
    ways[FULL] = Decoder(model, mtp, max_len=r.max_len, recall=4)
    tasks = list(itertools.islice(task_stream(recipe, "evaluation"), c.tasks))
    keys = (
        "seconds",
        "tokens",
        "passes",
        "same",
        "tried",
        "stood",
        *(f"{kind} {unit}" for kind in PASS_KINDS for unit in ("s", "n")),
    )
    sums_by_way = {way: {key: [0.0] * len(tasks) for key in keys} for way in ways}
    accepted_by_way, lengths = {way: [[0] * depth, [0] * depth] for way in ways}, [[0] * (LONGEST + 1) for _ in tasks]
    for number in range(-1, c.rounds):  # the first round, of one task, warms up
        for decoder in ways.values():
            decoder.reset(forget=True)
        for task_index, task in enumerate(tasks[:1] if number < 0 else tasks):
            for way in [*ways][task_index % len(ways) :] + [*ways][: task_index % len(ways)]:
                decoder = ways[way]
                list(
                    decode_rollout(
                        decoder,
                        MicroRepo(Session(task, r.max_turns)),
                        language,
                        r.limits(single(r.max_len)),
                        ahead=way == FULL,
                    )
                )
                if number < 0:
                    continue
                total, way_sums = decoder.total, sums_by_way[way]
                sums = {"seconds": total.seconds, "tokens": len(total.tokens), "passes": total.cycles}
                if isinstance(decoder, Timed):
                    sums |= {"tried": decoder.tested_drafts, "stood": decoder.stood}
                    for kind, pair in decoder.totals_by_kind.items():
                        sums |= {f"{kind} s": pair[0], f"{kind} n": pair[1]}
                for key, value in sums.items():
                    way_sums[key][task_index] += value
                for sums, counts in zip(accepted_by_way[way], (total.draft_counts, total.accept_counts), strict=True):
                    sums[: len(counts)] = [a + b for a, b in zip(sums, counts, strict=False)]
            if number == 0:
                for way, decoder in ways.items():
                    sums_by_way[way]["same"][task_index] = float(decoder.tokens == plain.tokens)
                for length in plain.turns_seen:
                    lengths[task_index][length] += 1
            progress(max(number, 0) * len(tasks) + task_index + 1)
    return {"ways": sums_by_way, "accepted": accepted_by_way, "lengths": lengths}


def predicted(alpha: float, drafts: int, cost: float) -> float:
    """The speed-up of arXiv:2211.17192, theorem 3.8."""
    tokens = drafts + 1 if alpha == 1 else (1 - alpha ** (drafts + 1)) / (1 - alpha)
    return tokens / (drafts * cost + 1)


def with_turns(alpha: float, drafts: int, cost: float, verify: float, opening: float, lengths: np.ndarray) -> float:
    """The same with turns: lengths[n] turns of n tokens. An opening pass gives the first token of a turn and costs
    `opening` passes over one row, with or without drafts. `verify`: cost of a pass over drafts. The last cycle of a
    turn drafts at most the tokens that are left."""
    probabilities = [alpha**a * (1 - alpha) for a in range(drafts)] + [alpha**drafts]
    expected_costs = [0.0]  # expected cost of the cycles that give n more tokens
    for n in range(1, len(lengths)):
        remaining_cost = sum(p * expected_costs[max(0, n - a - 1)] for a, p in enumerate(probabilities))
        expected_costs.append(verify + cost * min(drafts, n) + remaining_cost)
    turns = range(1, len(lengths))
    plain = sum(lengths[n] * (opening + n - 1) for n in turns)
    return plain / sum(lengths[n] * (opening + expected_costs[n - 1]) for n in turns)


def speed_rows(c: Experiment, results: dict) -> list[dict]:
    """A row per decoding method: speed-up over plain decoding with its interval over tasks, counts, predictions."""
    ways = {way: {key: np.array(values) for key, values in sums.items()} for way, sums in results["ways"].items()}
    lengths, plain, rows = np.array(results["lengths"]), ways["plain"], []

    def mean_cost(sums: dict, key: str, indices: np.ndarray) -> float:
        return sums[f"{key} s"][indices].sum() / max(sums[f"{key} n"][indices].sum(), 1)

    for way, sums in ways.items():

        def speedup(indices: np.ndarray, sums: dict = sums) -> float:
            slow, fast = (s["seconds"][indices].sum() / s["tokens"][indices].sum() for s in (plain, sums))
            return slow / fast

        def costs(indices: np.ndarray, sums: dict = sums) -> tuple[float, float, float, float]:
            single_cost = max(mean_cost(plain, "single", indices), 1e-12)
            alpha = sums["stood"][indices].sum() / max(sums["tried"][indices].sum(), 1)
            return (
                alpha,
                mean_cost(sums, "guess", indices) / single_cost,
                mean_cost(sums, "verify", indices) / single_cost,
                mean_cost(plain, "opening", indices) / single_cost,
            )

        def predict_speedup(indices: np.ndarray, way: str = way, costs=costs) -> float:
            return predicted(costs(indices)[0], int(way), costs(indices)[1])

        def predict_with_turns(indices: np.ndarray, way: str = way, costs=costs) -> float:
            alpha, cost, verify, opening = costs(indices)
            return with_turns(alpha, int(way), cost, verify, opening, lengths[indices].sum(0))

        all_indices = np.arange(len(lengths))
        row = {
            "part": "decode",
            "way": way,
            "tasks": len(lengths),
            "identical": sums["same"].mean(),
            "tokens_per_pass": sums["tokens"].sum() / sums["passes"].sum(),
        }
        statistics = {"speedup": speedup}
        if way.isdigit():
            row |= dict(zip(("alpha", "draft_cost", "verify_cost", "opening_cost"), costs(all_indices), strict=True))
            statistics |= {
                "predicted": predict_speedup,
                "with_turns": predict_with_turns,
                "theory_ratio": lambda indices: predict_speedup(indices) / speedup(indices),
                "fuller_ratio": lambda indices: predict_with_turns(indices) / speedup(indices),
            }
        for key, statistic in statistics.items():
            estimate = bootstrap(
                all_indices, lambda indices, f=statistic: f(indices.astype(int)), n=c.resamples, seed=c.seed
            )
            row |= {key: estimate["value"], f"{key}_low": estimate["low"], f"{key}_high": estimate["high"]}
        drafted_counts, accepted_counts = results["accepted"][way]
        row |= {
            f"accepted_{k}": a / d for k, (d, a) in enumerate(zip(drafted_counts, accepted_counts, strict=True), 1) if d
        }
        rows.append({key: float(value) if isinstance(value, np.floating) else value for key, value in row.items()})
    return rows


def speed_verdicts(rows: list[dict]) -> list[dict]:
    """Rules, fixed before measuring. Two to three times: faster, and the interval reaches two. Predicted: the interval
    of theory over measurement is within a tenth of one. Identical, a law: in every task."""
    ways = {row["way"]: row for row in rows if row["part"] == "decode"}
    deepest = ways[max((way for way in ways if way.isdigit()), key=int)]
    full, drafts, identical_share = ways[FULL], deepest["way"], min(row["identical"] for row in ways.values())
    costs_text = (
        f"α = {deepest['alpha']:.3f}, a draft costs {deepest['draft_cost']:.3f} passes over one row, a "
        f"pass over drafts "
        f"{deepest['verify_cost']:.3f}, a turn's opening {deepest['opening_cost']:.3f}"
    )

    acceptance_text = ", ".join(f"{value:.3f}" for key, value in deepest.items() if key.startswith("accepted_"))
    return [
        claim(
            "speed-up",
            f"speculative decoding with MTP layers is 2–3× faster ({drafts} drafts a pass)",
            "write-ups (§3.1)",
            deepest["speedup"],
            above(1.0, 2.0),
            (deepest["speedup_low"], deepest["speedup_high"]),
            "× plain",
            f"decoder's time for rollouts of {deepest['tasks']} held-out tasks at batch 1, bootstrap over tasks; "
            f"{deepest['tokens_per_pass']:.2f} tokens a pass; {costs_text}; drafts that stood with all before them, by "
            f"depth: {acceptance_text}; with "
            f"recalled openings and turns handed over early, which are ours, {full['speedup']:.2f} "
            f"[{full['speedup_low']:.2f}, "
            f"{full['speedup_high']:.2f}]",
        ),
        claim(
            "predicted",
            "the speed-up follows from acceptance and the cost of a draft alone: (1 − α^(γ+1)) / ((1 − α)(γc + 1))",
            "arXiv:2211.17192, thm. 3.8",
            deepest["theory_ratio"],
            between(0.9, 1.1),
            (deepest["theory_ratio_low"], deepest["theory_ratio_high"]),
            "predicted / measured",
            f"predicted {deepest['predicted']:.3f}, measured {deepest['speedup']:.3f}; {costs_text}; with turns' "
            "openings and the cost of "
            f"a pass over drafts: predicted {deepest['with_turns']:.3f}, {deepest['fuller_ratio']:.3f} "
            f"[{deepest['fuller_ratio_low']:.3f}, {deepest['fuller_ratio_high']:.3f}] of measured",
        ),
        claim(
            "identical",
            "speculative decoding does not change greedy output",
            "§3.1; arXiv:2211.17192",
            identical_share,
            at_least(1.0),
            unit="of tasks",
            note="the least of all ways; token for token, whole rollouts",
        ),
    ]
