"""The small world as an `Environment` (`ref/environment.py`), and the outcome of an episode."""

from dataclasses import asdict, dataclass
from typing import Protocol, runtime_checkable

from ref.environment import Reward, StepResult
from ref.messages import Message

__all__ = ["MicroRepo", "Verdict"]


@dataclass(frozen=True)
class Verdict:
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
class TextSession(Protocol):
    """One episode of one task, in texts: `recipe.microrepo.Session`, in memory or on disk, and its variants in
    experiments."""

    @property
    def prompt(self) -> str:
        """The task, in words."""
        ...

    @property
    def done(self) -> bool:
        """Whether the episode is over."""
        ...

    def step(self, text: str) -> str:
        """Takes a turn of the agent. Returns the answer to its calls."""
        ...

    def verify(self) -> Verdict:
        """The outcome so far."""
        ...

    def judge(self) -> None:
        """Makes sure of the verdict: `verify` goes on to answer after `close`."""
        ...

    def close(self) -> None:
        """Releases what the session holds."""
        ...

    def fork(self) -> "TextSession":
        """An independent copy in the current state."""
        ...


class MicroRepo:
    """An episode of the small world as an `Environment`: a turn is the text of a message, and so is its answer."""

    def __init__(self, session: TextSession):
        self.session = session

    def reset(self) -> list[Message]:
        return [Message("user", self.session.prompt)]

    def step(self, message: Message) -> StepResult:
        answer = self.session.step(message.content or "")
        return StepResult([Message("tool", answer)], self.session.done)

    def reward(self) -> Reward:
        """All hidden tests pass, or not. The metrics are those of `Verdict`, and "success"."""
        self.session.judge()
        verdict = self.session.verify()
        return Reward({"tests": verdict.tests}, {"success": verdict.tests, **asdict(verdict)})

    def close(self) -> None:
        self.session.close()

    def fork(self) -> "MicroRepo":
        return MicroRepo(self.session.fork())
