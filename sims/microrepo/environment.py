"""The interface between a world and an agent, and the parts of its reward.

Rollouts, demonstrations and rewards only use `Environment`, so a sandbox with a real repository can replace
the small world without changing any of them.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

__all__ = ["Environment", "Reward"]


@dataclass(frozen=True)
class Reward:
    """The outcome of an episode, in named parts. The caller adds the effort in tokens."""

    tests: float
    """1.0 if all hidden tests pass, else 0.0."""
    passed: float
    """Fraction of the hidden tests that pass."""
    turns: int
    """Turns that the agent took, at most the environment's limit."""
    calls: int
    """Calls in these turns, including invalid ones."""
    invalid_calls: int
    """Calls that the environment rejected: misspelt, unknown file, refused body, or an empty turn."""
    reads: int
    """Successful reads."""
    writes: int
    """Successful writes."""
    test_runs: int
    """Runs of the visible tests."""
    tested: bool
    """Whether the agent ran the visible tests on the final body."""
    finished: bool
    """Whether the agent ended the episode itself; False if the turns ran out."""


@runtime_checkable
class Environment(Protocol):
    """One episode of one task. The agent sees `prompt`, then alternates turns with the environment until `done`."""

    @property
    def prompt(self) -> str:
        """The text that opens the episode."""
        ...

    @property
    def done(self) -> bool:
        """Whether the episode is over; `step` must then not be called any more."""
        ...

    def step(self, text: str) -> str:
        """Executes the calls of one turn and returns their output; invalid calls get an output, too.

        Raises RuntimeError if the episode is over."""
        ...

    def verify(self) -> Reward:
        """Judges the current state by tests that the agent never sees. May be called at any time."""
        ...

    def judge(self) -> None:
        """Makes sure of the verdict: `verify` goes on to answer after `close`."""
        ...

    def close(self) -> None:
        """Ends what the episode holds, such as a sandbox. Raises nothing."""
        ...

    def fork(self) -> "Environment":
        """An independent copy of the episode in its current state."""
        ...
