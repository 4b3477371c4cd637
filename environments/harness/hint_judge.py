"""Hints by a model that reads an episode: behind an OpenAI-compatible address, told the task, the transcript and the
verdict.

It names the reply at which the episode went wrong, and what its policy could have been told there, as one object of
JSON and nothing else. An answer in any other form is asked for once more. What the judge says goes through the same
audit as the rules' hints (`hint_audit.py`). It is not shown the original code unless somebody asks for it: a judge that
has read the answer tells it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from environments.harness.hints import LONGEST, Fault
from environments.harness.messages import Message, Policy, Reply
from environments.harness.turns import Turn, turns, values
from environments.sandbox.visible import cut, one_line
from kit.disk import parse_json

__all__ = ["BadAnswer", "make_judge_prompt", "find_fault"]

SYSTEM = """You read what an agent did on a programming task, and find the one reply at which it went wrong: \
the first after which the rest could
no longer be right, or the one that wasted most.
Answer with one JSON object and nothing else: {"turn": N, "hint": "..."}. N is the number of that reply. \
The hint is one sentence of at most 200
characters that the agent could have read right before it. It says what is wrong with the reply, \
and never what would be right: no code, and no name
that the agent could not know. If nothing went wrong, answer {"turn": 0, "hint": ""}."""
RETRY_PROMPT = 'That was no such answer: {}. Say the object alone, as in {{"turn": 3, "hint": "..."}}.'
TEXT_BYTES, TRANSCRIPT_BYTES, ANSWER_TOKENS = 2 << 10, 96 << 10, 2000
"""Bytes of a text that the judge is shown, bytes of the whole transcript, and tokens of its answer."""


class BadAnswer(ValueError):
    """What is wrong with a judge's answer, in one line."""


def make_judge_prompt(lines: Sequence[dict], visible_tests: Collection[str] = (), gold: str = "") -> list[Message]:
    """What a judge is told of an episode. `visible_tests`: names of the tests that the agent can run; others are not
    named. `gold`: the difference from the given code to the original, where the judge shall see it."""
    sections = [
        f"# The task\n\n{lines[0]['prompt']}",
        "# What the agent did",
        cut("\n\n".join(map(_format_turn, turns(lines))), TRANSCRIPT_BYTES),
        _format_verdict(lines, visible_tests),
    ]
    sections += (
        [f"# The original code. Nothing of it may be in the hint.\n\n{cut(gold, TRANSCRIPT_BYTES)}"] if gold else []
    )
    return [Message("system", SYSTEM), Message("user", "\n\n".join(sections))]


def _format_turn(turn: Turn) -> str:
    rows = [f"## Reply {turn.number}{', cut off' if turn.cut else ''}", cut(turn.reply.text, TEXT_BYTES)]
    for call, answer in turn.calls:
        rows += [
            f"calls {one_line(call.name)}:",
            cut(values(call), TEXT_BYTES),
            "is answered:",
            cut(answer["text"], TEXT_BYTES),
        ]
    return "\n".join(row for row in rows if row)


def _format_verdict(lines: Sequence[dict], visible_tests: Collection[str]) -> str:
    grade = next((line for line in lines if line["kind"] == "grade"), None)
    if grade is None:
        return "# The verdict\n\nNobody has graded it."
    failed_tests = sorted({*(grade.get("failed") or ())} & {*visible_tests})
    rows = [f"The reward is {grade['reward']:.2f}. {grade.get('passed', '?')} of {grade.get('of', '?')} tests pass."]
    rows += (
        [f"Of the tests that the agent could run, {len(failed_tests)} fail, such as {failed_tests[0]}."]
        if failed_tests
        else []
    )
    rows += [f"It was flagged: {one_line(str(flag))}." for flag in grade["flags"]]
    return "# The verdict\n\n" + "\n".join(rows)


def find_fault(
    policy: Policy, lines: Sequence[dict], visible_tests: Collection[str] = (), gold: str = ""
) -> Fault | None:
    """The fault that a judge finds, if any; `visible_tests`, `gold`: see `make_judge_prompt`. Raises BadAnswer where
    its second answer is none either, and PolicyError."""
    turns_by_number = {turn.number: turn for turn in turns(lines)}
    messages = make_judge_prompt(lines, visible_tests, gold)
    reply = policy.reply(messages, (), ANSWER_TOKENS)
    try:
        return _parse_answer(reply, turns_by_number)
    except BadAnswer as error:
        retry = [Message("assistant", reply.text), Message("user", RETRY_PROMPT.format(error))]
        return _parse_answer(policy.reply([*messages, *retry], (), ANSWER_TOKENS), turns_by_number)


def _parse_answer(reply: Reply, turns_by_number: dict[int, Turn]) -> Fault | None:
    if reply.cut:
        raise BadAnswer("it was cut off")
    try:
        answer = parse_json(reply.text)
    except (ValueError, RecursionError):
        raise BadAnswer(f"it is no JSON: {one_line(reply.text, 60)!r}") from None
    if not isinstance(answer, dict) or answer.keys() != {"turn", "hint"}:
        raise BadAnswer("it is no object with turn and hint")
    number, hint = answer["turn"], answer["hint"]
    if type(number) is not int or not isinstance(hint, str):
        raise BadAnswer("turn must be a whole number, and hint a text")
    if number == 0:
        return None
    if number not in turns_by_number:
        raise BadAnswer(f"there is no reply {one_line(str(number), 20)}" if turns_by_number else "there are no replies")
    hint_text = one_line(hint, LONGEST + 1)
    if not 0 < len(hint_text) <= LONGEST:
        raise BadAnswer(f"a hint must have 1 to {LONGEST} characters")
    return Fault(turns_by_number[number], "judge", hint_text)
