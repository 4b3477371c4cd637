"""The group of rollouts on the page of advantages: presets, rows of the table, their text in the URL, and the results
of each algorithm."""

from collections.abc import Sequence

import torch

from kit.settings import RunError
from ref.dr_grpo import FAMILY, family_loss, group_advantages

__all__ = ["LONGEST", "MAX_ROLLOUTS", "PRESETS", "Row", "checked", "columns", "decode", "encode", "family", "rows"]

LONGEST, MAX_ROLLOUTS = 2048, 32
"""Maximum tokens per rollout and rollouts per group on this page."""
PRESETS: dict[str, list[tuple[float, int, bool]]] = {
    "half right": [
        (1.0, 30, False),
        (1.0, 45, False),
        (1.0, 60, False),
        (1.0, 38, False),
        (0.0, 52, False),
        (0.0, 35, False),
        (0.0, 70, False),
        (0.0, 41, False),
    ],
    "equally correct": [
        (0.991, 30, False),
        (0.989, 45, False),
        (0.990, 60, False),
        (0.992, 38, False),
        (0.990, 52, False),
        (0.991, 35, False),
        (0.988, 70, False),
        (0.990, 41, False),
    ],
    "one success": [(1.0, 40, False), *[(0.0, 40, False)] * 7],
    "long wrong answers": [
        (1.0, 20, False),
        (1.0, 25, False),
        (1.0, 30, False),
        (1.0, 35, False),
        (0.0, 60, False),
        (0.0, 120, False),
        (0.0, 240, False),
        (0.0, 480, False),
    ],
    "cut off": [
        (1.0, 40, False),
        (1.0, 90, False),
        (0.0, 50, False),
        (0.0, 70, False),
        (0.0, 128, True),
        (0.0, 128, True),
    ],
    "all equal": [(1.0, 20, False), (1.0, 40, False), (1.0, 80, False), (1.0, 160, False)],
}
"""Reward, length in tokens, and whether the length limit cut it off."""
Row = tuple[float | None, float | None, bool]
"""A rollout as the table holds it; an empty cell is None."""
COLUMNS = "reward", "length", "cut off"
EMPTY: Row = (None, None, False)


def columns(group: Sequence[Row]) -> dict[str, list]:
    """The group for Streamlit's table, column by column. Lengths are floats, so that the table takes what `checked` is
    to judge; and a group without rollouts has one empty row, because Streamlit tells a column's kind by what is in
    it."""
    cells = [(None if r is None else float(r), None if n is None else float(n), cut) for r, n, cut in group or [EMPTY]]
    return {name: [row[column] for row in cells] for column, name in enumerate(COLUMNS)}


def rows(edited: dict[str, list]) -> list[Row]:
    """What the table gives back, row by row; it also writes NaN for an empty cell."""
    cells = ([None if cell is None or cell != cell else cell for cell in edited[name]] for name in COLUMNS)
    group_rows = [(reward, length, bool(cut)) for reward, length, cut in zip(*cells, strict=True)]
    return [] if group_rows == [EMPTY] else group_rows


def encode(group: Sequence[Row]) -> str:
    """The table as text for the URL: reward_length per row, then x if truncated; rows joined by ~; an empty cell is
    empty."""

    def cell(value: float | None) -> str:
        return "" if value is None else f"{value:.10g}"

    return "~".join(f"{cell(reward)}_{cell(length)}{'x' if cut else ''}" for reward, length, cut in group)


def decode(text: str) -> list[Row]:
    """The inverse of `encode`. Raises RunError for any other text."""
    group = []
    try:
        for row in text.split("~") if text else ():
            reward, length = row.split("_")
            cells = [None if cell == "" else float(cell) for cell in (reward, length.removesuffix("x"))]
            group.append((*cells, length.endswith("x")))
    except ValueError:
        raise RunError("cannot read the group in the URL; showing the preset instead") from None
    if len(group) > 10 * MAX_ROLLOUTS:
        raise RunError(f"the group in the URL has {len(group)} rollouts; showing the preset instead")
    return group


def checked(group: Sequence[Row]) -> tuple[list[float], list[int], list[bool]]:
    """Rewards, lengths and which rollouts were truncated. Raises RunError that names the first invalid cell."""
    if not 2 <= len(group) <= MAX_ROLLOUTS:
        raise RunError(
            f"a group needs 2 to {MAX_ROLLOUTS} rollouts, got {len(group)}: a single rollout has "
            f"nothing to compare with"
        )
    rewards, lengths, cut = [], [], [cut for *_, cut in group]
    for number, (reward, length, _) in enumerate(group, 1):
        if reward is None or not abs(reward) <= 1e6:
            raise RunError(f"row {number}: the reward must be a number between minus and plus a million")
        if length is None or not 1 <= length <= LONGEST or length != int(length):
            raise RunError(f"row {number}: the length must be a whole number of tokens from 1 to {LONGEST}")
        rewards.append(reward)
        lengths.append(int(length))
    if all(cut):
        raise RunError("every rollout was truncated: DAPO would have nothing to learn from")
    return rewards, lengths, cut


def family(
    rewards: Sequence[float], lengths: Sequence[int], cut: Sequence[bool], longest: int
) -> dict[str, tuple[list[float], list[float]]]:
    """For each algorithm: advantages [N] and the weight per token of each rollout [N].

    The weight is what gradient ascent adds to log π of each of its tokens: minus the gradient of the loss at ratio one,
    where π is still the sampling policy."""
    R, n = torch.tensor([rewards], dtype=torch.float64), torch.tensor(lengths)
    mask = torch.arange(int(n.max())) < n[:, None]
    results = {}
    for name, variant in FAMILY.items():
        logp = torch.zeros(mask.shape, dtype=torch.float64, requires_grad=True)
        budget = variant.budget(len(lengths), sum(lengths), longest)
        loss = family_loss(variant, logp, logp.detach(), R, mask, budget=budget, finished=~torch.tensor(cut))
        (gradient,) = torch.autograd.grad(loss, logp)
        advantages = group_advantages(R, baseline=variant.baseline, scale=variant.scale)[0]
        results[name] = advantages.tolist(), (0.0 - gradient[:, 0]).tolist()  # 0 − x: no minus zero
    return results
