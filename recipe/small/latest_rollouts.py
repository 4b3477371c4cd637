"""The newest rollouts of a training as text, for people who watch it: one group, in a file that is replaced every 20
seconds.

RUN/rollouts/STAGE.json    the step, and of each rollout the task, its reward, whether it solved the task, its contexts,
                           and its text

The group is always the first of its step, so nobody has chosen it. When a file is written, the clock decides; what is
written follows from the step alone, and the last step is always written. Nothing is drawn and no weight is touched, so
training has the same bits with the file and without."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kit.disk import atomic_write
from recipe.small.agent import Language
from ref.self_summary import Chain

__all__ = ["FOLDER", "MAX_ROLLOUTS", "Latest"]

FOLDER = "rollouts"
"""Folder of the files inside a run's folder."""
MAX_ROLLOUTS = 8
"""Rollouts that are kept of a group."""
LONGEST = 20_000
"""Characters of a rollout that are kept."""
SECONDS = 20.0
"""Between two files, at least. An atomic write waits for the disk, some milliseconds."""


class Latest:
    """Keeps the newest rollouts of one stage in `path`, at most once in `seconds`."""

    def __init__(self, path: Path, language: Language, seconds: float = SECONDS, steps: int = 0):
        self.path, self.language, self.seconds, self.steps = path, language, seconds, steps
        self.last_write_time: float | None = None

    def due(self, last: bool) -> bool:
        """Whether it is time for the next file: at the first step, after so many seconds, and at the `last` step."""
        return last or self.last_write_time is None or time.monotonic() - self.last_write_time >= self.seconds

    def __call__(self, moment: Any) -> dict:
        """As an observer of a training (`recipe/small/reinforcement.py`)."""
        done = moment.done
        if done and self.due(done.step == self.steps):
            group = done.rollouts[: len(done.rollouts) // len(done.tasks)]
            solved_flags = [bool(rollout.metrics.get("success")) for rollout in group]
            self.keep(
                done.step,
                group[0].task.prompt,
                [rollout.chain for rollout in group],
                done.result.rewards.tolist(),
                solved_flags,
            )
        return {}

    def keep(
        self, step: int, prompt: str, chains: Sequence[Chain], rewards: Sequence[float], solved: Sequence[bool]
    ) -> None:
        """Replaces the file: the rollouts of one group, after so many steps; what `rewards` and `solved` hold beyond
        them is not read. Raises OSError if the disk refuses."""
        rollouts = [
            {
                "success": bool(success),
                "reward": float(reward),
                "contexts": len(chain.segments),
                "text": self.text(chain),
            }
            for chain, reward, success in zip(chains[:MAX_ROLLOUTS], rewards, solved, strict=False)
        ]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(
            self.path, json.dumps({"step": step, "prompt": prompt, "rollouts": rollouts}, ensure_ascii=False) + "\n"
        )
        self.last_write_time = time.monotonic()

    def text(self, chain: Chain) -> str:
        """All contexts of a chain, each from a line of its own on."""
        full_text = "\n".join(self.language.decode(segment.tokens.tolist()) for segment in chain.segments)
        return (
            full_text if len(full_text) <= LONGEST else f"{full_text[:LONGEST]}\n(cut off: {len(full_text)} characters)"
        )
