"""Environments and a chat format whose words are token ids: what lessons and tests sample without a tokenizer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ref.environment import Reward, StepResult
from ref.messages import Message

__all__ = ["Ids", "Parrot", "Talk", "TokenTalk", "spoken", "format_tokens"]


def format_tokens(tokens: Sequence[int]) -> str:
    """Token ids as a text."""
    return " ".join(map(str, tokens))


def spoken(messages: Sequence[Message]) -> list[int]:
    """The token ids of some messages."""
    return [int(word) for message in messages for word in (message.content or "").split()]


@dataclass(frozen=True)
class Ids:
    """A `ref.environment.ChatFormat`: a message holds the ids of its tokens."""

    stop_ids: tuple[int, ...] = (0,)

    def encode_opening(self, messages: Sequence[Message]) -> list[int]:
        return spoken(messages)

    def encode_answer(self, history: Sequence[Message], messages: Sequence[Message]) -> list[int]:
        return spoken(messages)

    def decode_turn(self, tokens: Sequence[int]) -> Message:
        return Message("assistant", format_tokens(tokens))


class TokenTalk(Protocol):
    """Somebody who answers turns of tokens."""

    prompt: list[int]

    def reply(self, turn: list[int]) -> list[int] | None:
        """The answer to a turn, without its stop token; None if the conversation is over."""
        ...


class Talk:
    """An `Environment` in which somebody answers turns of tokens. It earns nothing."""

    def __init__(self, inner: TokenTalk):
        self.inner = inner

    def reset(self) -> list[Message]:
        return [Message("user", format_tokens(self.inner.prompt))]

    def step(self, message: Message) -> StepResult:
        answer = self.inner.reply(spoken([message]))
        return StepResult([Message("user", format_tokens(answer or []))], answer is None)

    def reward(self) -> Reward:
        return Reward({}, {"success": 1.0})

    def close(self) -> None:
        """Nothing is held."""

    def fork(self) -> "Talk":
        return Talk(self.inner.fork())  # pyright: ignore[reportAttributeAccessIssue]


@dataclass
class Parrot:
    """Answers every turn but the last with the same tokens."""

    prompt: list[int]
    answer: list[int]
    turns: int
    turns_seen: list[list[int]] = field(default_factory=list)

    def reply(self, turn: list[int]) -> list[int] | None:
        self.turns_seen.append(turn)
        return self.answer if len(self.turns_seen) < self.turns else None
