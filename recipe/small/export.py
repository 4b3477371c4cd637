"""The recipe's demonstrations as conversations in JSONL, in OpenAI's shape.

    {"messages": [{"role": "user", "content": "repo m0 m3 fix m3"},
                  {"role": "assistant", "content": null, "tool_calls": [{"id": "call_1", "type": "function",
                      "function": {"name": "read", "arguments": "{\\"file\\": \\"m3\\"}"}}]},
                  {"role": "tool", "tool_call_id": "call_1", "content": "def m3(a, b): …"}, …], "tools": […]}

Each context of a chain is a conversation (`recipe/small/demonstrations.py`). The summary with which a later one begins,
and the empty turn before a request for one, are the assistant's words without being learned there: their weight is 0.
The agent's own template (`ref.network.release.make_chat_template`) turns a line back into the context, token by token.
"""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kit.disk import atomic_write
from kit.settings import RunError
from recipe.microrepo import Session
from recipe.small.agent import Language
from recipe.small.demonstrations import make_sft_rollouts
from recipe.small.settings import Recipe
from ref.rollout import Rollout
from ref.self_summary import Segment

__all__ = ["conversations_of", "export"]

TOOLS = {
    "read": ("Returns a file.", ("file",)),
    "write": ("Replaces the body of the file to fix. Each line of the body begins with four spaces.", ("file", "body")),
    "test": ("Runs the visible tests.", ()),
    "done": ("Ends the episode.", ()),
}
"""The small world's calls: what they do, and their arguments."""


def schema(name: str) -> dict[str, Any]:
    description, keys = TOOLS[name]
    parameters = {"type": "object", "properties": {key: {"type": "string"} for key in keys}, "required": list(keys)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def calls_of(turn: str) -> list[tuple[str, dict[str, str]]]:
    """The calls of a turn, misspelled ones too: name and arguments. Empty if they would not be spelled as the turn
    is."""
    calls: list[tuple[str, dict[str, str]]] = []
    for call_text in re.findall(r"[^\n]+(?:\n {4}[^\n]*)*", turn):
        line, _, body = call_text.partition("\n")
        name, _, file = line.partition(" ")
        calls.append((name, {key: value for key, value in (("file", file), ("body", body)) if value}))
    return calls if "\n".join(spoken(*call) for call in calls) == turn else []


def spoken(name: str, values: dict[str, str]) -> str:
    """A call as the agent spells it, and as its template does."""
    first_value, *other_values = [*values.values()] or [""]
    return "\n".join([f"{name} {first_value}" if first_value else name, *other_values])


def pieces_of(ids: list[int], language: Language) -> list[tuple[bool, str, int]]:
    """A context as it was spoken: whether the agent speaks, the text, and the place of the token behind it."""
    pieces, start = [], 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or ids[end] in (language.env, language.agent):
            pieces.append((ids[start] == language.agent, language.decode(ids[start + 1 : end]), end))
            start = end
    return pieces[:-1] if pieces[-1][:2] == (False, "") else pieces  # the last token only ends the agent's turn


def conversation_of(segment: Segment, session: Session, language: Language, numbers: Iterator[int]) -> dict[str, Any]:
    """A context as a conversation. Its turns are played in `session`, which earlier contexts have brought to its
    beginning: an answer does not say which call gave which part of it. A turn that a limit cut off, without its end, is
    left out."""
    messages: list[dict[str, Any]] = []
    tool_messages: list[dict[str, Any]] = []  # answers to the last turn, one for each call
    for is_agent, text, end in pieces_of(segment.tokens.tolist(), language):
        if not is_agent:
            tool_text = "\n".join(filter(None, (message["content"] for message in tool_messages)))
            messages += tool_messages if tool_messages and tool_text == text else [{"role": "user", "content": text}]
            tool_messages = []
        elif end == len(segment.tokens):
            continue
        elif not bool(segment.sampled[end]):
            messages.append({"role": "assistant", "content": text, "weight": 0})
        elif bool(segment.summary[end]):
            messages.append({"role": "assistant", "content": text})
        else:
            calls, fork = calls_of(text), session.fork()
            fork.max_turns += len(calls)
            answers = ["" if fork.done else fork.step(spoken(*call)) for call in calls]
            if calls and "\n".join(filter(None, answers)) == session.step(text):
                ids = [f"call_{next(numbers)}" for _ in calls]
                functions = [{"name": name, "arguments": json.dumps(values)} for name, values in calls]
                tool_calls = [
                    {"id": i, "type": "function", "function": function} for i, function in zip(ids, functions)
                ]
                messages.append({"role": "assistant", "content": None, "tool_calls": tool_calls})
                tool_messages = [
                    {"role": "tool", "tool_call_id": i, "content": answer} for i, answer in zip(ids, answers)
                ]
            else:
                messages.append({"role": "assistant", "content": text})
    return {"messages": messages, "tools": [schema(name) for name in TOOLS]}


def conversations_of(lesson: Rollout, language: Language) -> Iterator[dict[str, Any]]:
    """The contexts of a demonstration, in order."""
    session, numbers = Session(lesson.task), itertools.count(1)
    for segment in lesson.chain.segments:
        yield conversation_of(segment, session, language, numbers)


def export(config: Recipe, language: Language, out: Path) -> tuple[int, int]:
    """Writes the demonstrations of a run to a JSONL file, all or none, and returns their number and that of the
    conversations. Raises RunError if the file exists."""
    if out.exists():
        raise RunError(f"{out} exists already; name another file with --out")
    lines, demonstrations = [], 0
    for demonstrations, rollout in enumerate(make_sft_rollouts(config, language), 1):
        lines += [
            json.dumps(conversation, ensure_ascii=False) + "\n" for conversation in conversations_of(rollout, language)
        ]
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(out, "".join(lines))
    return demonstrations, len(lines)
