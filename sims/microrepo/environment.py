"""What a world must offer to an agent, and what it pays.

Rollouts, demonstrations and rewards are written against `Environment` alone, so that a sandbox with a real
repository can take the place of the small world without a change in any of them.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

__all__ = ["Environment", "Reward"]


@dataclass(frozen=True)
class Reward:
    """How an episode went, in named parts. Effort in tokens is known to the caller and added by it."""

    tests: float
    """1.0 when all hidden tests pass, else 0.0."""
    passed: float
    """Fraction of the hidden tests that pass."""
    turns: int
    """Turns that the agent took, at most the limit of the environment."""
    calls: int
    """Calls within these turns, invalid ones included."""
    invalid_calls: int
    """Calls that the environment could not follow: misspelt, unknown file, refused body, or an empty turn."""
    reads: int
    """Successful reads."""
    writes: int
    """Successful writes."""
    test_runs: int
    """Runs of the visible tests."""
    tested: bool
    """Whether the body that was judged had been put to the visible tests."""
    finished: bool
    """Whether the agent ended the episode itself; False when the turns ran out."""


@runtime_checkable
class Environment(Protocol):
    """One episode of one task. The agent sees `prompt`, then speaks and listens in turns until `done`."""

    @property
    def prompt(self) -> str:
        """The text that opens the episode."""
        ...

    @property
    def done(self) -> bool:
        """Whether the episode is over; `step` must not be called any more."""
        ...

    def step(self, text: str) -> str:
        """Carries out the calls of one turn and returns what they said; a wrong call is answered, too.

        Raises RuntimeError when the episode is over."""
        ...

    def verify(self) -> Reward:
        """Judges the state as it is, by tests that the agent never sees. May be called at any time."""
        ...

    def fork(self) -> "Environment":
        """A copy of the episode as it stands; what happens to one of the two leaves the other alone."""
        ...
