"""What a policy is shown and what it answers, whatever wire it speaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from environments.harness.tools import Tool

__all__ = ["Called", "Message", "Policy", "PolicyError", "Reply"]


@dataclass(frozen=True)
class Called:
    """A call as a policy wrote it: it may be broken."""

    id: str
    name: str
    arguments: str
    """JSON, if it is."""


@dataclass(frozen=True)
class Message:
    """One message of the context."""

    role: str
    """system, user, assistant or tool."""
    text: str
    calls: tuple[Called, ...] = ()
    """Of the assistant."""
    answers: str = ""
    """Of a tool: the id of the call that it answers."""


@dataclass(frozen=True)
class Reply:
    """What a policy said in one turn."""

    text: str
    calls: tuple[Called, ...] = ()
    prompt_tokens: int | None = None
    """Of the context, where the policy tells."""
    tokens: int | None = None
    """That it sampled, where it tells."""
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    """Natural logarithms, one for each sampled token, where the policy tells."""
    prompt_ids: tuple[int, ...] | None = None
    cut: bool = False
    """Whether it ended at a limit on length."""


class PolicyError(Exception):
    """A policy that gives no answer, in one line that says why. The episode stops, and can be gone on with."""


class Policy(Protocol):
    """Who decides."""

    def reply(self, messages: Sequence[Message], tools: Sequence[Tool], most: int) -> Reply:
        """An answer to the context, of at most `most` tokens. Without tools: text only. Raises PolicyError."""
        ...
