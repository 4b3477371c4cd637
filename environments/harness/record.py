"""A transcript: JSON lines, one for each thing that happened, in order.

It is what an episode goes on with after a kill, and what a person reads. Kinds of lines:

    begin    what was asked, with which tools and budgets, over which tree
    reply    of the policy: text, thoughts, calls, tokens, ids and log-probs where they are known, seconds
    answer   of a tool to a call
    nudge    of the harness, where a reply called nothing
    turn     the end of a turn: the tree's hash, what changed in it, seconds so far
    summary  the policy's own, which takes the place of all before it but what was asked; also the end of a turn
    stop     why nobody went on: the policy gave no answer. The episode can be gone on with
    end      why the episode is over
    grade    what it earned

What stands behind the last end of a turn was not finished, and is done again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from environments.grading.guarded import Grade
from environments.harness.messages import Called, Message, thoughts_in
from environments.monitor import Call
from environments.sandbox.visible import one_line
from kit.disk import Journal, atomic_write, parse_json, read_lines
from kit.settings import RunError

__all__ = ["Record", "calls", "context", "grade_fields", "read", "elapsed_seconds"]

ENDS = ("begin", "turn", "summary", "end", "grade")
"""Kinds of lines behind which nothing is half done."""
NUMBER = (int, float)
FIELDS = {
    "begin": {"task": str, "system": str, "prompt": str, "tools": list, "strict": bool, "budget": dict, "tree": str},
    "reply": {"text": str, "calls": list, "seconds": NUMBER},
    "answer": {"id": str, "tool": str, "text": str, "ok": bool, "seconds": NUMBER},
    "nudge": {"text": str},
    "turn": {"tree": str, "spent": NUMBER},
    "summary": {"text": str, "tree": str, "spent": NUMBER, "seconds": NUMBER},
    "stop": {"why": str},
    "end": {"why": str},
    "grade": {"reward": NUMBER, "success": bool, "flags": list},
}
"""Fields that a line of a kind has."""
OPTIONAL_FIELDS = {
    **dict.fromkeys(("tokens", "prompt_tokens", "passed", "of", "agreed", "asked", "exit"), int),
    **dict.fromkeys(("succinctness", "conformance", "seconds"), NUMBER),
    **dict.fromkeys(("broken", "cut"), bool),
    **dict.fromkeys(("diff", "over", "ended", "who"), str),
    **dict.fromkeys(("failed", "thoughts"), dict),
}
"""Fields that it may have."""


def read(path: Path) -> list[dict]:
    """The lines of a transcript. Raises RunError, in one line, for what is none."""
    try:
        lines = read_lines(path)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    if not lines or lines[0].get("kind") != "begin":
        raise RunError(f"{path} is no transcript: `etude tasks try` writes them")
    for number, line in enumerate(lines, 1):
        if not _is_valid(line):
            raise RunError(f"{path}: line {number} is none of a transcript")
    return lines


def _is_valid(line: dict) -> bool:
    """Whether a line has the fields of its kind."""
    fields = FIELDS.get(str(line.get("kind")))
    if fields is None or not all(isinstance(line.get(name), kind) for name, kind in fields.items()):
        return False
    if not all(
        line[name] is None or isinstance(line[name], kind) for name, kind in OPTIONAL_FIELDS.items() if name in line
    ):
        return False
    return line["kind"] != "reply" or all(_is_call(call) for call in line["calls"])


def _is_call(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("id", "name", "arguments"))


class Record:
    """A transcript that is being written. What a kill left half done at its end is cut off first, and `lines` are those
    that stay."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = _read_finished(path)
        self._journal = Journal(path)

    def add(self, kind: str, **fields: object) -> None:
        """Adds a line. Raises OSError where it does not fit onto the disk."""
        text = json.dumps({"kind": kind, **fields})
        self._journal.append(text.encode() + b"\n")
        if kind in ENDS:
            self._journal.sync()
        self.lines.append(parse_json(text))  # as it would be read

    def close(self) -> None:
        self._journal.close()

    def __enter__(self) -> Record:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_finished(path: Path) -> list[dict]:
    """The lines up to the last end of a turn; those behind it are cut off. Raises RunError for another file."""
    lines = read(path) if path.exists() and path.stat().st_size else []
    while lines and lines[-1].get("kind") not in ENDS:
        lines.pop()
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    if lines and path.read_bytes() != data:
        atomic_write(path, data)
    return lines


def context(lines: list[dict]) -> list[Message]:
    """What the policy is shown next: what it was asked, and what was said and done since, or since its last summary."""
    begin = lines[0]
    opening, history = [Message("system", begin["system"]), Message("user", begin["prompt"])], []
    for line in lines[1:]:
        if line["kind"] == "reply":
            reply_calls = tuple(Called(call["id"], call["name"], call["arguments"]) for call in line["calls"])
            history.append(
                Message("assistant", line["text"], reply_calls, thoughts=thoughts_in(line.get("thoughts") or {}))
            )
        elif line["kind"] == "answer":
            history.append(Message("tool", line["text"], answers=line["id"]))
        elif line["kind"] == "nudge":
            history.append(Message("user", line["text"]))
        elif line["kind"] == "summary":
            history = [Message("user", f"You have worked on this before. Your own summary of it:\n\n{line['text']}")]
    return [*opening, *history]


def elapsed_seconds(lines: list[dict]) -> float:
    """Seconds of all turns so far."""
    return next((line["spent"] for line in reversed(lines) if "spent" in line), 0.0)


def calls(lines: list[dict]) -> Iterator[Call]:
    """The calls that were made, for the monitor. What was no call, or came after the end, did nothing."""
    requests = [call for line in lines if line["kind"] == "reply" for call in line["calls"]]
    answers = [line for line in lines if line["kind"] == "answer"]
    for call, answer in zip(requests, answers, strict=False):
        if not answer.get("broken"):
            yield Call(call["name"], parse_json(call["arguments"] or "{}"))


def grade_fields(grade: Grade, test_count: int) -> dict:
    """The fields of the line that says what an episode earned. `test_count`: tests of the exam."""
    fields = {"reward": grade.reward.total, "success": grade.reward.success}
    fields |= {"succinctness": grade.reward.succinctness, "conformance": grade.reward.conformance}
    fields |= {"passed": len(grade.verdicts.passed), "of": test_count}
    if grade.agreement:
        fields |= {
            "agreed": grade.agreement.question_count - len(grade.agreement.differing),
            "asked": grade.agreement.question_count,
        }
    fields |= {"trust": grade.trust.name.lower(), "flags": [*grade.reward.flags]}
    return fields | {"failed": {test: one_line(reason) for test, reason in grade.verdicts.failed.items()}}
