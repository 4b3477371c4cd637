"""What an agent acts in: environments that speak messages, the tasks that make them, and the format that turns messages
into tokens.

    environment = tasks.environment(task)
    messages = environment.reset()                 the opening: system and user
    result = environment.step(reply)               one turn of the policy: messages that answer it, and whether the
                                                   episode is over
    reward = environment.reward()                  named terms, and metrics

An environment never sees a token, and the policy's sampler never sees a message: a `ChatFormat` stands between them,
and `ref/rollout.py` drives both. The small world (`recipe/microrepo/`), real packages in sandboxes (`environments/`)
and a user's own environment are the same to everything that trains.

    class Guess:                                   a number between 0 and 9; the policy has three turns
        def __init__(self, number): self.number, self.turns, self.found = number, 0, False
        def reset(self): return [Message("user", "Guess a digit.")]
        def step(self, message):
            self.turns, self.found = self.turns + 1, message.content == str(self.number)
            answer = "higher" if message.content < str(self.number) else "lower"
            return StepResult([Message("user", answer)], self.found or self.turns == 3)
        def reward(self):
            return Reward({"found": float(self.found)}, {"success": float(self.found), "turns": self.turns})
        def close(self): pass
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from ref.messages import Message
from ref.textual_feedback import Hint
from ref.transcript import Transcript

__all__ = ["ChatFormat", "Environment", "EnvironmentFailure", "ForkableEnvironment", "Reward", "StepResult", "TaskSet"]


Me = TypeVar("Me")


class EnvironmentFailure(Exception):
    """The infrastructure failed, such as a sandbox that died; the policy is not to blame. The episode is neither a
    success nor a failure: it is tried again, or left out of the group's mean and of the loss, and counted."""


@dataclass(frozen=True)
class StepResult:
    """What an environment answers to a turn."""

    messages: Sequence[Message] = ()
    """In order, such as one for each tool call. Ignored if the episode is over."""
    done: bool = False
    """Whether the episode is over."""


@dataclass(frozen=True)
class Reward:
    """What an episode earned. Terms that need its tokens, such as the length penalty, are added by the loop
    (`ref/rl.py`)."""

    terms: Mapping[str, float] = field(default_factory=dict)
    """Named terms of the reward, such as "tests"."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What is logged and not rewarded. All episodes of a task set have the same names; "success" is among them."""


@runtime_checkable
class Environment(Protocol):
    """One episode of one task. Each method may be slow, and may raise EnvironmentFailure."""

    def reset(self) -> Sequence[Message]:
        """Starts the episode. Returns the messages that open it."""
        ...

    def step(self, message: Message) -> StepResult:
        """Takes a turn of the policy, its tool calls included; a broken call is answered as well. Not called once the
        episode is over."""
        ...

    def reward(self) -> Reward:
        """Judges the current state. Called once, after the last step, also where a limit of tokens or turns ended the
        episode early. Never called after an EnvironmentFailure."""
        ...

    def close(self) -> None:
        """Releases what the episode holds, such as a sandbox. Called once; also while a call that took too long still
        runs in another thread, which must then open nothing more. What it raises becomes a warning."""
        ...


@runtime_checkable
class ForkableEnvironment(Environment, Protocol):
    """An environment whose state can be copied (report §6.2: snapshot and fork)."""

    def fork(self: Me) -> Me:
        """An independent copy of the episode in its current state."""
        ...


@runtime_checkable
class TaskSet(Protocol):
    """Tasks in streams, "rl" and "heldout"; environments for them; and what is read off their rollouts."""

    is_slow: bool
    """Whether environments are run in threads, beside the engine."""
    tools: Sequence[str]
    """Names of the tools, for the monitor."""

    def task(self, stream: str, number: int) -> Any:
        """A task of a stream by its number. It has a `key`, a text that no other task has."""
        ...

    def environment(self, task: Any, number: int) -> Environment:
        """A new episode of a task. `number`: of the rollout among those of its task."""
        ...

    def transcript(self, rollout: Any) -> Transcript | None:
        """What a finished `ref.rollout.Rollout` did on its way, for behaviour rewards and the monitor; None if that is
        not known."""
        ...

    def hints(self, rollouts: Sequence[Any], seed: int) -> list[list[list[Hint]]]:
        """The hints of finished rollouts, for every context of every chain (`ref/textual_feedback.py`)."""
        ...


@runtime_checkable
class ChatFormat(Protocol):
    """Messages of a conversation as the token ids of one checkpoint, and back."""

    stop_ids: tuple[int, ...]
    """Tokens with which the policy ends its turn. The first one is given where a limit cut a turn off."""

    def encode_opening(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a context that begins with these messages, up to where the policy speaks."""
        ...

    def encode_answer(self, history: Sequence[Message], messages: Sequence[Message]) -> list[int] | None:
        """The tokens that follow the stop token of the last turn, up to where the policy speaks again. `history`: all
        messages before, that turn among them. None where the format rewrites earlier messages, so that the tokens so
        far no longer open the conversation: then a new context begins with `encode_opening`."""
        ...

    def decode_turn(self, tokens: Sequence[int]) -> Message:
        """The message that the policy wrote, without its stop token."""
        ...
