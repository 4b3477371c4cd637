"""Tasks by their difficulty, and which come next: as a policy gets better, its tasks get harder.

Groups of rollouts that all succeed or all fail have no gradient in GRPO. So tasks are sorted into levels by their bits
of difficulty ((5) of ref/feature_deletion.py), quantiles, so that each level holds as many. Tasks of one level are
drawn, each once before one comes again. After `every` rollouts the level moves by (6): up after many successes, down
after few.

Nothing is drawn by chance: order follows from the seed, and a state that was saved goes on as if nobody had stopped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from kit.disk import atomic_write, read_json
from kit.settings import RunError
from ref.feature_deletion import Difficulty, level

__all__ = ["Schedule", "State", "bits_of", "sorted_by"]


def bits_of(recipes: Iterable[Mapping]) -> dict[str, float]:
    """Task → bits of difficulty, for all tasks of some recipes. Raises KeyError and TypeError for what is no recipe."""
    return {row["id"]: Difficulty(**row["difficulty"]).bits for recipe in recipes for row in recipe["tasks"]}


def sorted_by(bits: Mapping[str, float], number: int) -> tuple[tuple[str, ...], ...]:
    """Tasks in so many levels, easiest first; sizes differ by one at most. Raises ValueError for more levels than
    tasks, and for none."""
    if not 1 <= number <= len(bits):
        raise ValueError(f"levels must be 1 to {len(bits)}, as many as there are tasks at most; got {number}")
    order = sorted(bits, key=lambda task: (bits[task], task))
    ends = [len(order) * at // number for at in range(number + 1)]
    return tuple(tuple(order[first:last]) for first, last in zip(ends, ends[1:], strict=False))


@dataclass(frozen=True)
class State:
    """Where a training is."""

    level: int = 0
    """The level, from 0."""
    num_solved: int = 0
    num_rollouts: int = 0
    """Rollouts since the level was last decided on."""
    draw_counts: tuple[int, ...] = ()
    """How many tasks of each level were drawn so far."""


OLD_FIELDS = {"now": "level", "solved": "num_solved", "tried": "num_rollouts", "taken": "draw_counts"}
"""Field of a state that an earlier version saved → its name now."""


class Schedule:
    """`bits`: of each task. `number`: of levels. `every`: rollouts behind which the level is decided on. `low`, `high`:
    see `level`. Raises ValueError."""

    def __init__(
        self,
        bits: Mapping[str, float],
        number: int = 6,
        every: int = 64,
        seed: int = 0,
        low: float = 0.25,
        high: float = 0.75,
    ) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1; got {every}")
        level(0, 0, 0, number - 1, low, high)
        self.levels, self.every, self.seed, self.low, self.high = sorted_by(bits, number), every, seed, low, high

    def draw(self, state: State) -> tuple[str, State]:
        """The next task, and the state behind it."""
        counts = [*(state.draw_counts or [0] * len(self.levels))]
        tasks = self.levels[state.level]
        turn, at = divmod(counts[state.level], len(tasks))
        order = sorted(tasks, key=lambda task: hashlib.sha256(f"{self.seed} {turn} {task}".encode()).digest())
        counts[state.level] += 1
        return order[at], replace(state, draw_counts=tuple(counts))

    def update(self, state: State, num_solved: int, num_rollouts: int) -> State:
        """The state after `num_solved` of `num_rollouts` rollouts on tasks of the level now. Raises ValueError for
        numbers that make no sense."""
        if not 0 <= num_solved <= num_rollouts:
            raise ValueError(f"num_solved must be 0 to num_rollouts; got {num_solved} of {num_rollouts}")
        state = replace(state, num_solved=state.num_solved + num_solved, num_rollouts=state.num_rollouts + num_rollouts)
        if state.num_rollouts < self.every:
            return state
        new_level = level(state.level, state.num_solved, state.num_rollouts, len(self.levels) - 1, self.low, self.high)
        return replace(state, level=new_level, num_solved=0, num_rollouts=0)

    @property
    def digest(self) -> str:
        """SHA-256 of the levels and of all numbers: a state belongs to it."""
        return hashlib.sha256(
            json.dumps([self.levels, self.every, self.seed, self.low, self.high]).encode()
        ).hexdigest()

    def save(self, path: Path, state: State) -> None:
        """Writes a state, all of it or nothing. Raises OSError where it does not fit onto the disk."""
        atomic_write(path, json.dumps({"schedule": self.digest, "state": asdict(state)}, indent=1) + "\n")

    def load(self, path: Path) -> State:
        """The state that was saved; the first one where there is no file. Raises RunError for another schedule's, and
        for another file."""
        if not path.exists():
            return State()
        try:
            document = read_json(path)
            fields = {OLD_FIELDS.get(name, name): value for name, value in document["state"].items()}
            state = State(**{**fields, "draw_counts": tuple(fields["draw_counts"])})
            is_valid = _are_counts([state.level, state.num_solved, state.num_rollouts, *state.draw_counts]) and len(
                state.draw_counts
            ) in (0, len(self.levels))
            is_valid = is_valid and state.level < len(self.levels) and state.num_solved <= state.num_rollouts
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise RunError(f"{path} holds no state of a schedule ({type(error).__name__}); name another file") from None
        if document.get("schedule") != self.digest or not is_valid:
            raise RunError(f"{path} is the state of a schedule with other tasks, levels or numbers; name another file")
        return state


def _are_counts(numbers: Sequence[object]) -> bool:
    return all(type(number) is int and number >= 0 for number in numbers)
