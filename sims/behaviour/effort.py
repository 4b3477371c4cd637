"""What agents do in their rollouts, as numbers by task: effort, calls, turns, and whether calls were made in
parallel."""

from collections.abc import Sequence

import numpy as np

from recipe.microrepo import Task
from recipe.small.agent import Language, one_row, parted
from recipe.small.settings import RewardCoefficients
from ref.rl import compute_reward_terms
from ref.rollout import Rollout

__all__ = ["MEASURES", "figure", "helpers_read", "measure", "turns_of"]

MEASURES = (
    "success",
    "tokens",
    "turns",
    "calls",
    "invalid",
    "effort",
    "finished",
    "tried",
    "both",
    "together",
    "solved_tokens",
)
"""Per rollout: hidden tests pass; tokens written; turns; valid calls; invalid calls; effort; whether the agent ended
the episode; whether it wrote a body; read all helpers; read them all in one turn; its tokens if it succeeded, else
0."""
RATIOS = {
    "calls_per_turn": ("calls", "turns"),
    "read_together": ("together", "both"),
    "tokens_if_solved": ("solved_tokens", "success"),
}
"""Ratios of two means: (numerator, denominator)."""


def turns_of(rollout: Rollout, language: Language) -> list[str]:
    """The policy's turns as text."""
    segment = one_row(rollout.chain)
    turns = [segment.tokens[span].tolist() for span, is_own in parted(segment, language.env) if is_own]
    return [language.decode(turn[:-1] if turn[-1] == language.env else turn) for turn in turns]


def helpers_read(task: Task, turns: Sequence[str]) -> tuple[bool, bool]:
    """Whether all helpers of the task (at least two) were read, and whether one turn read them all."""
    reads = [{line.rstrip()[5:] for line in turn.split("\n") if line.startswith("read ")} for turn in turns]
    helpers = set(task.helpers)
    has_read_all = len(helpers) > 1 and helpers <= set().union(*reads)
    return has_read_all, has_read_all and any(helpers <= turn_reads for turn_reads in reads)


def measure(
    episodes: Sequence[Rollout], tasks: Sequence[Task], n: int, payment: RewardCoefficients, language: Language
) -> np.ndarray:
    """Means over the n rollouts of each task, which are adjacent: [tasks, MEASURES]. Effort uses the weights of
    `payment`."""
    rows = []
    for number, e in enumerate(episodes):
        m, written_tokens = e.metrics, e.chain.num_sampled_tokens
        effort = -compute_reward_terms(e, RewardCoefficients(effort_price=1.0, k=0.0, q=0.0, weights=payment.weights))[
            "effort"
        ]
        rows.append(
            [
                m["tests"],
                written_tokens,
                m["turns"],
                m["calls"] - m["invalid_calls"],
                m["invalid_calls"],
                effort,
                e.chain.finished,
                m["writes"] > 0,
                *helpers_read(tasks[number // n], turns_of(e, language)),
                m["tests"] * written_tokens,
            ]
        )
    return np.array(rows, dtype=float).reshape(len(tasks), n, len(MEASURES)).mean(1)


def figure(means: np.ndarray, measure_name: str) -> float:
    """One of MEASURES or RATIOS from means [MEASURES]; a ratio over nothing is 0."""
    if measure_name not in RATIOS:
        return float(means[MEASURES.index(measure_name)])
    numerator, denominator = (float(means[MEASURES.index(name)]) for name in RATIOS[measure_name])
    return numerator / denominator if denominator else 0.0
