"""A reward of the user's own on packages: the function `reward` of a Python file, named by `tasks.reward`.

    def reward(episode):
        return {"short": -0.002 * episode.changed_lines}

What it returns are further terms of an episode's reward, in addition to the grader's; their means are logged as
`reward_NAME`. The file is the user's code, as their command line is, and runs in the process that trains. What the
model wrote comes to it as data.

A run keeps a copy of the file, and a run folder may come from somebody else: it must not run their code. So a file is
run only if a run of this user began with it (`trust_reward`), whatever its path is."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments.grading.rewards import changed
from environments.harness.environment import HarnessEnvironment
from environments.harness.record import calls
from environments.harness.task_set import graded_files
from environments.monitor import Call
from environments.sandbox.cache import cache_folder, make_folder
from kit.settings import RunError
from ref.environment import Reward

__all__ = ["FinishedEpisode", "OwnRewardEnvironment", "load_reward", "trust_reward"]


@dataclass(frozen=True)
class FinishedEpisode:
    """What a function of rewards is given."""

    task: str
    """Name of the task."""
    prompt: str
    """What the task asks for."""
    before: Mapping[str, bytes]
    """The package's files before the episode, by path."""
    after: Mapping[str, bytes]
    """Its files after it, as they are graded."""
    calls: tuple[Call, ...]
    """The agent's calls of tools, in order: `tool`, its name, and `args`."""
    terms: Mapping[str, float]
    """The grader's terms: tests, succinctness, conformance."""
    metrics: Mapping[str, float]
    """success, passed, turns, calls, invalid_calls, failed_calls, finished, flags."""

    @property
    def changed_lines(self) -> int:
        """Lines that the agent took away or added, without blank ones."""
        return changed(self.before, self.after)


RewardFunction = Callable[[FinishedEpisode], Any]
"""What it returns is checked where it is called: numbers by name."""


def read_reward(path: Path) -> tuple[bytes, Path]:
    """The content of a file, and the mark of a user who trusts it. Raises RunError."""
    try:
        source = path.read_bytes()
    except OSError as error:
        raise RunError(f"tasks.reward={path} cannot be read ({error.strerror})") from None
    return source, cache_folder() / "rewards" / hashlib.sha256(source).hexdigest()


def trust_reward(path: Path) -> None:
    """Notes that this user has begun a run with a file. Raises RunError."""
    mark = read_reward(path)[1]
    make_folder(mark.parent)
    mark.touch()


def load_reward(path: Path) -> RewardFunction:
    """The function `reward` of a Python file. Raises RunError, also for a file that no run of this user began with:
    nothing of it is run then."""
    source, mark = read_reward(path)
    if not mark.exists():
        raise RunError(
            f"tasks.reward={path} is a program with which no run of yours has begun here, so it is not run; if you "
            f"have read it and trust it: touch {mark}"
        )
    namespace: dict[str, Any] = {"__name__": "reward", "__file__": str(path)}
    try:
        exec(compile(source, str(path), "exec"), namespace)
        function = namespace.get("reward")
    except Exception as error:
        raise RunError(f"tasks.reward={path} cannot be run: {describe_error(error)}") from None
    if not callable(function):
        raise RunError(f"tasks.reward={path} has no function reward(episode)")
    return function


def describe_error(error: Exception) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


class OwnRewardEnvironment(HarnessEnvironment):
    """An episode with further terms of the reward."""

    def __init__(self, function: RewardFunction, *args: Any) -> None:
        super().__init__(*args)
        self.function = function

    def reward(self) -> Reward:
        """See `Environment`. Raises RunError where the function fails or returns something else than numbers by
        name."""
        graded = super().reward()
        before, after = graded_files(self)
        job = self.task.job
        episode = FinishedEpisode(
            job.task, job.prompt, before, after, tuple(calls(self.lines)), graded.terms, graded.metrics
        )
        try:
            terms = {str(name): float(value) for name, value in self.function(episode).items()}
        except Exception as error:
            raise RunError(f"reward(episode) of tasks.reward fails on {job.task}: {describe_error(error)}") from None
        if repeated := sorted(terms.keys() & graded.terms.keys()):
            raise RunError(f"reward(episode) of tasks.reward names a term {repeated[0]!r}, which the grader has")
        if wrong := sorted(name for name, value in terms.items() if not math.isfinite(value)):
            raise RunError(f"reward(episode) of tasks.reward gives {terms[wrong[0]]} for {wrong[0]!r} on {job.task}")
        logged = {f"reward_{name}": value for name, value in terms.items()}
        return Reward({**graded.terms, **terms}, {**graded.metrics, **logged})
