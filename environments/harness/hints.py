"""Where an episode went wrong, by rules over its transcript, and what its policy could have been told there.

A hint stands right before the reply that it is about. The same policy under the hint is a teacher for the policy without it, over the tokens of that
reply (ref/textual_feedback.py). So a hint names a fault and never its cure: one that gives the answer distils the answer, and `hint_audit.py` refuses
it. The rules, in their order; a reply is told of the first that it broke:

    broken   a call was none: there is no such tool, or its arguments do not fit
    failed   a call failed, and said why. A command that ends with 1 does not count: so end tests that fail, and searches that find nothing
    unread   a file was changed of which the context shows nothing
    again    the same call as before, though nothing has changed since
    finish   the end, while tests fail that the agent can run

A reply that a limit cut off broke none of them. Whether a file is known, and whether a call was made before, is asked of the context that the policy
saw: what a summary left out is not held against it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from environments.harness.messages import Called, Message
from environments.harness.remote import message_of
from environments.harness.turns import Turn, arguments, turns, values
from environments.sandbox.visible import one_line

__all__ = ["LONGEST", "RULES", "SAYS", "Fault", "faults", "row"]

SAYS = {
    "broken": "One of the calls in your next reply would be refused: {}",
    "failed": "One of the calls in your next reply would fail: {}",
    "unread": "Your next reply would change {} without having looked at it.",
    "again": "Your next reply would call {} once more with the same arguments, though nothing has changed since.",
    "finish": "Your next reply would finish while tests fail that you can run.",
}
"""What the teacher is told, by rule."""
LONGEST = 300
"""Characters of an error that a hint quotes."""
OVER = ("the episode is over", "the time of the episode is over")
"""How the harness begins to refuse a call that would have been a good one earlier."""
WRITERS = {"write", "edit", "delete", "shell"}
SHOWING = {"read", "grep", "shell", "semantic_search", "write"}
"""Tools after which a file is known: `write` says what it holds itself."""
TELLING = 8
"""Characters of a line of a file by which it is recognised in the context."""
RUNS_TESTS = re.compile(r"\b(pytest|py\.test|unittest)\b")
FAILED, PASSED = re.compile(r"\b\d+ (failed|errors?)\b|^FAILED \("), re.compile(r"\b\d+ passed\b|^OK\b")
CHANGED = re.compile(r"^--- a/(.*)\n\+\+\+ b/.*\n@@ -(\d+)", re.MULTILINE)
LIMITS = re.compile(r"\[(exit code -?\d+|ended: .*)\]")


@dataclass(frozen=True)
class Fault:
    """A reply that went wrong, and the hint."""

    turn: Turn
    rule: str
    says: str


def faults(lines: Sequence[dict], shown: Collection[str] = ()) -> list[Fault]:
    """The faults of an episode, one for a reply at most. `lines`: of its transcript. `shown`: names of the tests that the agent can run, for what the
    grader said of them."""
    found, made = [], turns(lines)
    grade = next((line for line in lines if line["kind"] == "grade"), None)
    failing = None if grade is None or not (shown or grade["success"]) else {*(grade.get("failed") or ())} & {*shown}
    for number, this in enumerate(made):
        told = ((name, rule(made[:number], this, failing)) for name, rule in RULES.items()) if not this.cut else ()
        found += [Fault(this, name, SAYS[name].format(what)) for name, what in told if what is not None][:1]
    return found


def _broken(before: Sequence[Turn], this: Turn, failing: Collection[str] | None) -> str | None:
    said = (answer["text"] for _, answer in this.calls if answer.get("broken") and not answer["text"].startswith(OVER))
    return next((one_line(text, LONGEST) for text in said), None)


def _failed(before: Sequence[Turn], this: Turn, failing: Collection[str] | None) -> str | None:
    for call, answer in this.calls:
        if answer["ok"] or answer.get("broken"):
            continue
        code, ended = answer.get("exit") or 0, answer.get("ended")
        least = 3 if _runs_tests(call) else 2  # pytest ends with 2 where a file cannot be collected
        if ended or call.name != "shell" or code >= least:
            return one_line(str(ended) if ended else _last_line(answer) or f"exit code {code}", LONGEST)
    return None


def _last_line(answer: dict) -> str:
    """The last thing that a call said itself; empty for nothing."""
    said = [line for line in answer["text"].splitlines() if line.strip() and not LIMITS.fullmatch(line.strip())]
    return said[-1] if said else ""


def _runs_tests(call: Called) -> bool:
    return call.name == "shell" and RUNS_TESTS.search(str(arguments(call).get("command"))) is not None


def _unread(before: Sequence[Turn], this: Turn, failing: Collection[str] | None) -> str | None:
    heads = [*CHANGED.finditer(this.diff)]
    ends = [*(head.start() for head in heads), len(this.diff)][1:]
    were_there = {head[1]: this.diff[head.end() : end] for head, end in zip(heads, ends, strict=True) if int(head[2])}
    for call, answer in this.calls:
        path = str(arguments(call).get("path", "")).removeprefix("/work/").removeprefix("./")
        if call.name in ("edit", "write") and answer["ok"] and path in were_there and not _known(this, path, were_there[path]):
            return one_line(path, LONGEST)
    return None


def _known(turn: Turn, path: str, diff: str) -> bool:
    """Whether the context shows anything of a file: its name in a call that looks at it, in what such a call said, or in a summary; or a line that
    stood in it."""
    name, asked, shown = path.rpartition("/")[2], dict[str, Called](), list[str]()
    for one in turn.before[2:]:  # the task names files without showing them
        asked |= {call.id: call for call in one.calls}
        call = asked.get(one.answers)
        if call is not None and call.name in SHOWING:
            shown += [values(call), one.text]
        elif one.role == "user":
            shown.append(one.text)
    text = "\n".join(shown)
    old = [line[1:].strip() for line in diff.splitlines() if line[:1] in (" ", "-")]
    return name in text or any(len(line) >= TELLING and line in text for line in old)


def _again(before: Sequence[Turn], this: Turn, failing: Collection[str] | None) -> str | None:
    """A call sees the same tree as an earlier one unless a turn in between has a difference. Which of its calls made it is not told, so each that
    can write may have."""
    here = [*(turn for turn in before if turn.segment == this.segment), this]
    made = [(number, at, call, answer) for number, turn in enumerate(here) for at, (call, answer) in enumerate(turn.calls)]
    for number, at, call, answer in made:
        if number < len(here) - 1 or answer.get("broken") or call.name in ("todo", "finish"):
            continue
        for earlier, place, other, heard in made:
            if (earlier, place) >= (number, at):
                break
            if other.name == call.name and not heard.get("broken") and arguments(other) == arguments(call):
                first = (earlier, place + (other.name != "shell"))
                between = {n for n, p, one, _ in made if first <= (n, p) < (number, at) and one.name in WRITERS}
                if not any(here[n].diff for n in between):
                    return call.name
    return None


def _finish(before: Sequence[Turn], this: Turn, failing: Collection[str] | None) -> str | None:
    if not any(call.name == "finish" and not answer.get("broken") for call, answer in this.calls):
        return None
    if failing is not None:
        return "" if failing else None
    for turn in reversed([*before, this]):
        for call, answer in reversed([*turn.calls]):
            if _runs_tests(call) and (FAILED.search(_last_line(answer)) or PASSED.search(_last_line(answer))):
                return "" if FAILED.search(_last_line(answer)) else None
            if turn.diff and call.name in WRITERS:
                return None  # nobody has seen since
    return None


RULES = {"broken": _broken, "failed": _failed, "unread": _unread, "again": _again, "finish": _finish}
"""Rule → what its hint is filled with; None for a reply that keeps it. `failing`: of the tests that the agent can run those that the grader saw
fail; None where it did not say."""


def row(lines: Sequence[dict], fault: Fault) -> dict:
    """A hint as training takes it, in JSON: the messages before the reply as the policy saw them, `student`; the same with the hint behind them,
    `teacher`; and the reply, `message`. Messages are OpenAI's. A call that was no object of JSON stands there as servers read it; what was sampled is
    in `token_ids`, where the policy told it."""
    student = [message_of(one) for one in fault.turn.before]
    ids = {"token_ids": [*fault.turn.token_ids]} if fault.turn.token_ids is not None else {}
    schemas = lines[0].get("schemas")
    return {
        "task": lines[0]["task"],
        "turn": fault.turn.number,
        "rule": fault.rule,
        "hint": fault.says,
        "student": student,
        "teacher": [*student, message_of(Message("user", fault.says))],
        "message": message_of(fault.turn.said),
        **ids,
        "tools": schemas if isinstance(schemas, list) else [],
    }
