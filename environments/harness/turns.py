"""A transcript by its turns: each reply with the context in which it was made and what came of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from environments.harness.messages import Called, Message
from environments.harness.record import context
from kit.disk import parse_json

__all__ = ["Turn", "arguments", "turns", "values", "words_of"]


@dataclass(frozen=True)
class Turn:
    """A reply, with what stood before it and what came of it."""

    number: int
    """From 1, counted over the whole transcript."""
    segment: int
    """How many summaries stand before it."""
    before: tuple[Message, ...]
    """The context in which it was made."""
    reply: Message
    answers: tuple[dict, ...]
    """Lines of the transcript, one for each call."""
    diff: str
    """What changed in the tree."""
    cut: bool
    """Whether a limit ended the reply."""
    token_ids: tuple[int, ...] | None
    """That were sampled, where the policy told them."""

    @property
    def calls(self) -> Iterator[tuple[Called, dict]]:
        """The calls with their answers."""
        return zip(self.reply.calls, self.answers, strict=False)


def turns(lines: Sequence[dict]) -> tuple[Turn, ...]:
    """The turns of a transcript that came to their end. `lines`: as `environments.harness.record.read` gives them."""
    turn_list, segment, number = [], 0, 0
    for at, line in enumerate(lines):
        segment += line["kind"] == "summary"
        if line["kind"] != "reply":
            continue
        number += 1
        turn_lines = [*_until_turn(lines[at + 1 :])]
        if turn_lines and turn_lines[-1]["kind"] == "turn":
            *before, reply = context([*lines[: at + 1]])
            answers, ids = tuple(answer for answer in turn_lines if answer["kind"] == "answer"), line.get("token_ids")
            sampled = tuple(ids) if isinstance(ids, list) and all(type(token) is int for token in ids) else None
            turn_list.append(
                Turn(
                    number,
                    segment,
                    tuple(before),
                    reply,
                    answers,
                    turn_lines[-1].get("diff") or "",
                    bool(line.get("cut")),
                    sampled,
                )
            )
    return tuple(turn_list)


def _until_turn(lines: Sequence[dict]) -> Iterator[dict]:
    for line in lines:
        if line["kind"] in ("reply", "summary"):
            return
        yield line
        if line["kind"] == "turn":
            return


def arguments(call: Called) -> dict:
    """The arguments of a call; empty where they are no object of JSON."""
    try:
        value = parse_json(call.arguments or "{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def values(call: Called) -> str:
    """The values of a call's arguments as they are meant, with their line breaks; of what is none, as it was
    written."""
    args = arguments(call)
    return (
        "\n".join(value if isinstance(value, str) else json.dumps(value) for value in args.values())
        if args
        else call.arguments
    )


def words_of(message: Message) -> str:
    """All that a message says: its text and its calls."""
    return "\n".join([message.text, *(f"{call.name} {values(call)}" for call in message.calls)])
