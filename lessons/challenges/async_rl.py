"""Scorer of challenge 13: useful work per second on a virtual clock, under a rule that decides when to start rollouts.

Slots sample side by side, and all get slower the more of them are busy. The trainer takes a batch of finished samples
as soon as there is one. Every step makes a new version, and a sample that began more than BOUND versions before its
step is dropped. A long rollout that was trained on counts for its work: a rule that only ever gets short ones through
would train on another distribution.
"""

from __future__ import annotations

import numpy as np

from lessons.challenges import answers
from lessons.challenges.solution import Solves

__all__ = ["score"]

SLOTS, BATCH, TRAIN, BOUND, SECONDS, RUNS = 128, 16, 4.0, 2, 120.0, 2
WORK, SIGMA, SHARED = 5.0, 1.0, 32
"""Seconds of a rollout alone, in the mean; how heavy the tail is; busy slots that halve the speed."""


class Clock:
    """One run. Times in seconds, ages in versions."""

    def __init__(self, solution: Solves, rng: np.random.Generator):
        self.solution, self.rng = solution, rng
        self.time, self.version, self.trained, self.done_at = 0.0, 0, 0.0, np.inf
        self.remaining, self.work, self.born, self.began = np.zeros(0), np.zeros(0), np.zeros(0, dtype=int), np.zeros(0)
        self.finished: list[tuple[int, float]] = []

    def run(self) -> float:
        """The work of all samples that are trained on until the end."""
        while self.time < SECONDS:
            self.start()
            if self.done_at == np.inf and len(self.finished) >= BATCH:  # oldest first
                self.finished.sort()
                self.trained += sum(work for _, work in self.finished[:BATCH])
                self.finished, self.done_at = self.finished[BATCH:], self.time + TRAIN
            slow = 1 + len(self.remaining) / SHARED
            ends = self.time + slow * self.remaining.min() if len(self.remaining) else np.inf
            until = min(ends, self.done_at, SECONDS)
            self.remaining = self.remaining - (until - self.time) / slow
            self.time = until
            if until == self.done_at:
                self.version, self.done_at = self.version + 1, np.inf
            over = self.remaining <= 1e-9
            self.finished += zip(self.born[over].tolist(), self.work[over].tolist(), strict=True)
            fresh = self.version - self.born <= BOUND
            self.finished = [(born, work) for born, work in self.finished if self.version - born <= BOUND]
            is_running = ~over & fresh
            self.remaining, self.work, self.born, self.began = (
                self.remaining[is_running],
                self.work[is_running],
                self.born[is_running],
                self.began[is_running],
            )
        return self.trained

    def start(self) -> None:
        """Asks how many rollouts to begin."""
        free = SLOTS - len(self.remaining)
        running = [
            [int(self.version - born), round(self.time - began, 3)] for born, began in zip(self.born, self.began)
        ]
        state = {"free": free, "running": running, "finished": [self.version - born for born, _ in self.finished]}
        state |= {"training": self.done_at != np.inf, "batch": BATCH, "bound": BOUND, "version": self.version}
        count = answers.check_integer("start", self.solution("start", state), 0, free)
        new_work = WORK * np.exp(self.rng.normal(-(SIGMA**2) / 2, SIGMA, count))
        self.remaining, self.work = np.append(self.remaining, new_work), np.append(self.work, new_work)
        self.born, self.began = (
            np.append(self.born, [self.version] * count).astype(int),
            np.append(self.began, [self.time] * count),
        )


def score(solution: Solves, seed: int) -> float:
    """Work trained on, over that of a trainer that never waits and gets rollouts as they are drawn."""
    trained = [Clock(solution, np.random.default_rng([seed, run])).run() for run in range(RUNS)]
    return float(np.mean(trained)) / (BATCH * WORK * SECONDS / TRAIN)
