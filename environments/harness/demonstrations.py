"""Demonstrations: scripted episodes on tasks, as conversations for SFT (`ref/sft.py`).

    style         turns
    direct        find and read the place · edit it, run the failing tests · finish
    tests-first   run the failing tests · find and read the place · edit it, run them again · finish
    repair        find and read the place · edit it with a mistake, run the tests, which fail · edit again, run them ·
                  finish

The episodes are played in the harness, so what tools answer there is what they answer a model. The mistake of `repair`
is one token of the original code (`MISTAKES`); its turn has weight 0, so it is read and not learned. An episode counts
if it leaves the original code, and if the tests failed and passed when they should: a task whose failing tests the
agent cannot run, since their functions have held-out cases, has no demonstration.
"""

from __future__ import annotations

import ast
import difflib
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from environments.harness import scripted
from environments.harness.messages import Called, Reply
from environments.harness.record import context
from environments.harness.scripted import call
from environments.syntax import parse
from ref.source_text import compiles

__all__ = ["STYLES", "TOOLS_SHOWN", "Demonstration", "Style", "conversation", "demonstrate", "find_edits"]

Style = Literal["direct", "tests-first", "repair"]
STYLES: tuple[Style, ...] = get_args(Style)
TOOLS_SHOWN = ("read", "edit", "grep", "shell", "finish")
"""The tools of these episodes: few, since the schemas of all take a small model's context."""
NAMED = 6
"""Tests that a command names; of more, it runs the files."""
WINDOW, SHORT = 24, 120
"""Lines that are read around an edit in a file of more than SHORT lines; a shorter one is read whole."""
MISTAKES: tuple[tuple[str, str, str], ...] = (
    (r" == ", " != ", "the comparison must be `==`, not `!=`"),
    (r" != ", " == ", "the comparison must be `!=`, not `==`"),
    (r" > ", " >= ", "the bound itself does not belong to it: `>`, not `>=`"),
    (r" < ", " <= ", "the bound itself does not belong to it: `<`, not `<=`"),
    (r" >= ", " > ", "the bound itself belongs to it: `>=`, not `>`"),
    (r" <= ", " < ", "the bound itself belongs to it: `<=`, not `<`"),
    (r" not in ", " in ", "`not` is missing"),
    (r"\bif not ", "if ", "`not` is missing"),
    (r"\bmax\(", "min(", "it must be the largest, not the smallest"),
    (r"\bmin\(", "max(", "it must be the smallest, not the largest"),
    (r" \+ ", " - ", "it must be added, not subtracted"),
    (r" - ", " + ", "it must be subtracted, not added"),
    (r" and ", " or ", "both conditions must hold: `and`, not `or`"),
    (r" or ", " and ", "one condition is enough: `or`, not `and`"),
    (r"\bTrue\b", "False", "it must be True"),
    (r"\bFalse\b", "True", "it must be False"),
)
"""A pattern in the original code, what stands there by mistake, and how it is noticed."""


class FileEdit(NamedTuple):
    """A call of the tool `edit`."""

    path: str
    old: str
    """Occurs once in the file."""
    new: str


@dataclass(frozen=True)
class Demonstration:
    """A script, and the turn of its replies that is not learned, if there is one."""

    replies: tuple[Reply, ...]
    test_runs: tuple[bool, ...]
    """Whether the tests pass, each time they are run."""
    mistaken_reply: int | None = None


def find_edits(path: str, start_text: str, gold: str) -> list[FileEdit]:
    """Edits that make `gold` of `start_text`, one after the other, the last place first. Lines around a place are part
    of an edit where it would not be found without them. A single edit of the whole file where these do not do. The line
    break at the end of an edit is left out where the place is found without it."""
    before, after = start_text.splitlines(keepends=True), gold.splitlines(keepends=True)
    edits, current = list[FileEdit](), start_text
    blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    for tag, first, last, new_first, new_last in reversed(blocks):
        if tag == "equal":
            continue
        top, bottom = first, last
        while current.count("".join(before[top:bottom])) != 1 or top == bottom:
            if top == 0 and bottom == len(before):
                break
            top, bottom = max(0, top - 1), bottom if top > 0 else bottom + 1
        old = "".join(before[top:bottom])
        new = "".join([*before[top:first], *after[new_first:new_last], *before[last:bottom]])
        edits.append(_drop_line_break(FileEdit(path, old, new), current))
        current = current.replace(old, new, 1)
    if apply(start_text, edits) == gold:
        return edits
    return [_drop_line_break(FileEdit(path, start_text, gold), start_text)]


def _drop_line_break(edit: FileEdit, text: str) -> FileEdit:
    """The edit without the last line break of `old` and `new`, where both have one and `old` occurs once in the text
    without it, too: a small model tends to leave it out of one of them."""
    line_break = "\r\n" if edit.old.endswith("\r\n") else "\n"
    old = edit.old.removesuffix(line_break)
    if old == edit.old or not edit.new.endswith(line_break) or text.count(old) != 1:
        return edit
    return edit._replace(old=old, new=edit.new.removesuffix(line_break))


def apply(text: str, edits: Sequence[FileEdit]) -> str | None:
    """The text after the edits of a file; None where one does not find its place, or finds several."""
    for edit in edits:
        if text.count(edit.old) != 1:
            return None
        text = text.replace(edit.old, edit.new)
    return text


def demonstrate(
    task: str,
    style: Style,
    given_files: Mapping[str, bytes],
    gold: Mapping[str, bytes],
    visible: Sequence[str],
    *,
    runs_files: bool = False,
) -> Demonstration | None:
    """The script of a style; its words are drawn by the name of the task. `runs_files`: tests are run by their files,
    however few they are, with a line for each failure; by default up to NAMED are run by their names. None where
    nothing in the code can be mistaken so, where no test can be run that fails, and for files that are not in UTF-8 or
    are gone."""
    rng = random.Random(f"{task} {style}")
    paths = sorted(name for name in gold if given_files.get(name) != gold[name])
    try:
        texts = {path: (given_files[path].decode(), gold[path].decode()) for path in paths}
    except (KeyError, UnicodeDecodeError):
        return None
    edits = [edit for path in paths for edit in find_edits(path, *texts[path])]
    names = [test for test in visible if _is_defined(test, given_files)]
    if not names:
        return None
    if runs_files or len(names) > NAMED:
        names = sorted({test.partition("::")[0] for test in names})
    # a failure in a line: a small model's context holds no tracebacks of eight tests
    tests = scripted.tests(names, "-q --tb=line" if runs_files else "-q")
    places = [look for path in paths for look in _looks(path, *texts[path])]
    files = ", ".join(paths)
    look = Reply(rng.choice((f"I look at {files}.", f"First I read {files}.", f"The code is in {files}.")), (*places,))
    done = rng.choice(("The tests pass.", "All of them pass now.", "That was it: the tests pass."))
    finish = Reply(done, (call("finish", message=f"{files}: the missing code is there again."),))
    begin = [Reply(rng.choice(("I run the tests that fail.", "First the failing tests.")), (tests,))]
    begin = [*begin, look] if style == "tests-first" else [look]
    write = rng.choice(("I write what is missing and run the tests.", "This is what the description asks for."))
    if style != "repair":
        runs = (False, True) if style == "tests-first" else (True,)
        return Demonstration((*begin, Reply(write, (*map(_call, edits), tests)), finish), runs)
    candidates = [
        (number, new, says) for number, edit in enumerate(edits) for new, says in _mistakes(edit, *texts[edit.path])
    ]
    if not candidates:
        return None
    number, wrong, says = rng.choice(candidates)
    mistaken = [edit._replace(new=wrong) if at == number else edit for at, edit in enumerate(edits)]
    path = edits[number].path
    wrong_text = apply(texts[path][0], [edit for edit in mistaken if edit.path == path])
    if wrong_text is None:
        return None
    repairs = find_edits(path, wrong_text, texts[path][1])
    return Demonstration(
        (
            *begin,
            Reply(write, (*map(_call, mistaken), tests)),
            Reply(f"A test fails: {says}.", (*map(_call, repairs), tests)),
            finish,
        ),
        test_runs=(False, True),
        mistaken_reply=len(begin),
    )


def _is_defined(test: str, files: Mapping[str, bytes]) -> bool:
    """Whether a test stands in its file: one whose function has held-out cases does not."""
    path, *names = test.partition("[")[0].split("::")
    try:
        nodes: list[ast.stmt] = parse(files[path]).body
    except (KeyError, SyntaxError, ValueError):
        return False
    for name in names:
        matches = [node for node in nodes if getattr(node, "name", None) == name]
        if not matches:
            return False
        nodes = getattr(matches[0], "body", [])
    return True


def _call(edit: FileEdit) -> Called:
    return call("edit", path=edit.path, old=edit.old, new=edit.new)


def _looks(path: str, start_text: str, gold: str) -> list[Called]:
    """Calls that show where a file is edited."""
    lines = start_text.splitlines()
    if len(lines) <= SHORT:
        return [call("read", path=path)]
    blocks = difflib.SequenceMatcher(None, lines, gold.splitlines(), autojunk=False).get_opcodes()
    starts = {max(1, first + 1 - WINDOW // 2) for tag, first, *_ in blocks if tag != "equal"}
    return [call("read", path=path, start=start, lines=WINDOW) for start in sorted(starts)]


def _mistakes(edit: FileEdit, start_text: str, gold: str) -> list[tuple[str, str]]:
    """The new text of an edit with one mistake, and how it is noticed: in a line that `start_text` does not have, and
    so that the file still compiles."""
    mistakes, given_lines = [], {*start_text.splitlines()}
    for pattern, wrong, says in MISTAKES:
        for match in re.finditer(pattern, edit.new):
            start = edit.new.rfind("\n", 0, match.start()) + 1
            line = edit.new[start:].partition("\n")[0]
            new = edit.new[: match.start()] + wrong + edit.new[match.end() :]
            if line not in given_lines and compiles(gold.replace(edit.new, new, 1).encode()):
                mistakes.append((new, says))
    return mistakes


def conversation(lines: Sequence[dict], demonstration: Demonstration) -> dict | None:
    """The transcript of a demonstration as a line of JSONL for SFT: messages and tools as OpenAI's. None if it ended
    otherwise than by `finish`, if a call was broken or an edit failed, if tests passed or failed against the plan, and
    if the harness has said something between, or had a summary written."""
    answers = [line for line in lines if line["kind"] == "answer"]
    outcomes = {
        name: [answer["ok"] for answer in answers if answer["tool"] == name] for name in ("edit", "shell", "finish")
    }
    if not all(outcomes["edit"]) or outcomes["finish"] != [True] or outcomes["shell"] != [*demonstration.test_runs]:
        return None
    if any(line["kind"] in ("summary", "nudge") or line.get("broken") for line in lines):
        return None
    messages, replies = [], 0
    for message in context([*lines]):
        row: dict = {"role": message.role, "content": message.text}
        if message.role == "assistant":
            row["tool_calls"] = [
                {"id": called.id, "type": "function", "function": {"name": called.name, "arguments": called.arguments}}
                for called in message.calls
            ]
            if replies == demonstration.mistaken_reply:
                row["weight"] = 0
            replies += 1
        if message.role == "tool":
            row["tool_call_id"] = message.answers
        messages.append(row)
    return {"messages": messages, "tools": lines[0]["schemas"]}
