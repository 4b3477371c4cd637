"""What a policy is shown and what it answers, whatever wire it speaks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from environments.harness.tools import Tool

__all__ = ["THOUGHTS", "Called", "Message", "Policy", "PolicyError", "Reply", "text_of", "thoughts_in"]

THOUGHTS = ("reasoning_content", "reasoning", "reasoning_details")
"""Fields of a message in which servers give what a model thought: a text, or a list of parts. They get it back as it
was, with the calls that followed from it: some refuse the history without, others lose their plan."""


def thoughts_in(message: Mapping[str, object]) -> dict[str, object] | None:
    """The thoughts of a server's message, or of a transcript's line; None for none."""
    fields = {name: message.get(name) for name in THOUGHTS}
    return {name: value for name, value in fields.items() if isinstance(value, str | list) and value} or None


def text_of(thoughts: Mapping[str, object] | None) -> str:
    """Thoughts as a text, each once."""
    return next((value if isinstance(value, str) else json.dumps(value) for value in (thoughts or {}).values()), "")


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
    thoughts: Mapping[str, object] | None = None
    """Of the assistant: what it thought, in the fields in which a server gave it, and wants it back."""


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
    thoughts: Mapping[str, object] | None = None
    """What it thought before, in the fields in which the server gives it (`THOUGHTS`)."""


class PolicyError(Exception):
    """A policy that gives no answer, in one line that says why. The episode stops, and can be gone on with."""


class Policy(Protocol):
    """Who decides."""

    def reply(self, messages: Sequence[Message], tools: Sequence[Tool], max_tokens: int) -> Reply:
        """An answer to the context, of at most `max_tokens` tokens. Without tools: text only. Raises PolicyError."""
        ...
