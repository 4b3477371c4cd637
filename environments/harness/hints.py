"""Where an episode went wrong, by rules over its transcript, and what its policy could have been told there.

A hint stands right before the reply that it is about. The same policy under the hint is a teacher for the policy
without it, over the tokens of that reply (ref/textual_feedback.py). So a hint names a fault and never its cure: one
that gives the answer distils the answer, and `hint_audit.py` refuses it. The rules, in their order; a reply is told of
the first that it broke:

    broken   a call was none: there is no such tool, or its arguments do not fit
    failed   a call failed, and said why. A command that ends with 1 does not count: so end tests that fail, and
             searches that find nothing
    unread   a file was changed of which the context shows nothing
    again    the same call as before, though nothing has changed since
    finish   the end, while tests fail that the agent can run

A reply that a limit cut off broke none of them. Whether a file is known, and whether a call was made before, is asked
of the context that the policy saw: what a summary left out is not held against it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from environments.harness.messages import Called, Message
from environments.harness.remote import message_of
from environments.harness.turns import Turn, arguments, turns, values
from environments.sandbox.visible import one_line

__all__ = ["LONGEST", "RULES", "SAYS", "Fault", "find_faults", "row"]

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


def find_faults(lines: Sequence[dict], visible_tests: Collection[str] = ()) -> list[Fault]:
    """The faults of an episode, one for a reply at most. `lines`: of its transcript. `visible_tests`: names of the
    tests that the agent can run, for what the grader said of them."""
    fault_list, episode_turns = [], turns(lines)
    grade = next((line for line in lines if line["kind"] == "grade"), None)
    failing = (
        None
        if grade is None or not (visible_tests or grade["success"])
        else {*(grade.get("failed") or ())} & {*visible_tests}
    )
    for number, turn in enumerate(episode_turns):
        verdicts = (
            ((name, rule(episode_turns[:number], turn, failing)) for name, rule in RULES.items())
            if not turn.cut
            else ()
        )
        fault_list += [Fault(turn, name, SAYS[name].format(detail)) for name, detail in verdicts if detail is not None][
            :1
        ]
    return fault_list


def _find_broken_call(before: Sequence[Turn], current_turn: Turn, failing: Collection[str] | None) -> str | None:
    texts = (
        answer["text"]
        for _, answer in current_turn.calls
        if answer.get("broken") and not answer["text"].startswith(OVER)
    )
    return next((one_line(text, LONGEST) for text in texts), None)


def _find_failed_call(before: Sequence[Turn], current_turn: Turn, failing: Collection[str] | None) -> str | None:
    for call, answer in current_turn.calls:
        if answer["ok"] or answer.get("broken"):
            continue
        code, end_reason = answer.get("exit") or 0, answer.get("ended")
        threshold = 3 if _runs_tests(call) else 2  # pytest ends with 2 where a file cannot be collected
        if end_reason or call.name != "shell" or code >= threshold:
            return one_line(str(end_reason) if end_reason else _last_line(answer) or f"exit code {code}", LONGEST)
    return None


def _last_line(answer: dict) -> str:
    """The last thing that a call said itself; empty for nothing."""
    lines = [line for line in answer["text"].splitlines() if line.strip() and not LIMITS.fullmatch(line.strip())]
    return lines[-1] if lines else ""


def _runs_tests(call: Called) -> bool:
    return call.name == "shell" and RUNS_TESTS.search(str(arguments(call).get("command"))) is not None


def _find_unread_change(before: Sequence[Turn], current_turn: Turn, failing: Collection[str] | None) -> str | None:
    heads = [*CHANGED.finditer(current_turn.diff)]
    ends = [*(head.start() for head in heads), len(current_turn.diff)][1:]
    previous_parts = {
        head[1]: current_turn.diff[head.end() : end] for head, end in zip(heads, ends, strict=True) if int(head[2])
    }
    for call, answer in current_turn.calls:
        path = str(arguments(call).get("path", "")).removeprefix("/work/").removeprefix("./")
        if (
            call.name in ("edit", "write")
            and answer["ok"]
            and path in previous_parts
            and not _is_known(current_turn, path, previous_parts[path])
        ):
            return one_line(path, LONGEST)
    return None


def _is_known(turn: Turn, path: str, diff: str) -> bool:
    """Whether the context shows anything of a file: its name in a call that looks at it, in what such a call said, or
    in a summary; or a line that stood in it."""
    name, calls_by_id, visible_texts = path.rpartition("/")[2], dict[str, Called](), list[str]()
    for message in turn.before[2:]:  # the task names files without showing them
        calls_by_id |= {call.id: call for call in message.calls}
        call = calls_by_id.get(message.answers)
        if call is not None and call.name in SHOWING:
            visible_texts += [values(call), message.text]
        elif message.role == "user":
            visible_texts.append(message.text)
    text = "\n".join(visible_texts)
    old = [line[1:].strip() for line in diff.splitlines() if line[:1] in (" ", "-")]
    return name in text or any(len(line) >= TELLING and line in text for line in old)


def _find_repeated_call(before: Sequence[Turn], current_turn: Turn, failing: Collection[str] | None) -> str | None:
    """A call sees the same tree as an earlier one unless a turn in between has a difference. Which of its calls made it
    is not told, so each that can write may have."""
    segment_turns = [*(turn for turn in before if turn.segment == current_turn.segment), current_turn]
    calls = [
        (number, position, call, answer)
        for number, turn in enumerate(segment_turns)
        for position, (call, answer) in enumerate(turn.calls)
    ]
    for number, position, call, answer in calls:
        if number < len(segment_turns) - 1 or answer.get("broken") or call.name in ("todo", "finish"):
            continue
        for earlier_number, earlier_position, earlier_call, earlier_answer in calls:
            if (earlier_number, earlier_position) >= (number, position):
                break
            if (
                earlier_call.name == call.name
                and not earlier_answer.get("broken")
                and arguments(earlier_call) == arguments(call)
            ):
                first = (earlier_number, earlier_position + (earlier_call.name != "shell"))
                between = {
                    n
                    for n, p, candidate, _ in calls
                    if first <= (n, p) < (number, position) and candidate.name in WRITERS
                }
                if not any(segment_turns[n].diff for n in between):
                    return call.name
    return None


def _find_early_finish(before: Sequence[Turn], current_turn: Turn, failing: Collection[str] | None) -> str | None:
    if not any(call.name == "finish" and not answer.get("broken") for call, answer in current_turn.calls):
        return None
    if failing is not None:
        return "" if failing else None
    for turn in reversed([*before, current_turn]):
        for call, answer in reversed([*turn.calls]):
            if _runs_tests(call) and (FAILED.search(_last_line(answer)) or PASSED.search(_last_line(answer))):
                return "" if FAILED.search(_last_line(answer)) else None
            if turn.diff and call.name in WRITERS:
                return None  # nobody has seen since
    return None


RULES = {
    "broken": _find_broken_call,
    "failed": _find_failed_call,
    "unread": _find_unread_change,
    "again": _find_repeated_call,
    "finish": _find_early_finish,
}
"""Rule → what its hint is filled with; None for a reply that keeps it. `failing`: of the tests that the agent can run
those that the grader saw fail; None where it did not say."""


def row(lines: Sequence[dict], fault: Fault) -> dict:
    """A hint as training takes it, in JSON: the messages before the reply as the policy saw them, `student`; the same
    with the hint behind them, `teacher`; and the reply, `message`. Messages are OpenAI's. A call that was no object of
    JSON stands there as servers read it; what was sampled is in `token_ids`, where the policy told it."""
    student = [message_of(message) for message in fault.turn.before]
    ids = {"token_ids": [*fault.turn.token_ids]} if fault.turn.token_ids is not None else {}
    schemas = lines[0].get("schemas")
    return {
        "task": lines[0]["task"],
        "turn": fault.turn.number,
        "rule": fault.rule,
        "hint": fault.says,
        "student": student,
        "teacher": [*student, message_of(Message("user", fault.says))],
        "message": message_of(fault.turn.reply),
        **ids,
        "tools": schemas if isinstance(schemas, list) else [],
    }
