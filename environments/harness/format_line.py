"""A line of a transcript (`record.py`) as text for a person."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterator

from environments.grading.guarded import Trust
from environments.sandbox.visible import one_line, visible
from kit.disk import parse_json

__all__ = ["format_line"]


def format_line(line: dict, rows: int) -> Iterator[str]:
    """A line of a transcript as lines of text."""
    kind = line["kind"]
    if kind == "begin":
        yield one_line(
            f"task {line['task']}, by {line.get('who') or 'nobody'}, tree {line['tree'][:12]}, tools "
            f"{', '.join(map(str, line['tools']))}",
            400,
        )
        yield from _format_block("asked", line["prompt"], rows)
    elif kind == "reply":
        tokens = f"{line['tokens']} tokens, " if line.get("tokens") is not None else ""
        yield f"── reply ({tokens}{line['seconds']:.1f} s{', cut off' if line.get('cut') else ''})"
        yield from _format_block("", line["text"], rows)
        for call in line["calls"]:
            yield from _format_block(f"→ {one_line(call['name'], 60)}", _format_arguments(call["arguments"]), rows)
    elif kind == "answer":
        mark = "broken call" if line.get("broken") else "ok" if line["ok"] else "failed"
        yield from _format_block(f"← {one_line(line['tool'], 60)} {mark}, {line['seconds']:.2f} s", line["text"], rows)
    elif kind == "turn" and line.get("diff"):
        yield from _format_block("changed", str(line["diff"]), rows)
    elif kind in ("nudge", "summary"):
        yield from _format_block({"nudge": "harness", "summary": "── summary"}[kind], line["text"], rows)
    elif kind in ("stop", "end"):
        yield f"{'stopped' if kind == 'stop' else 'end'}: {one_line(line['why'])}"
    elif kind == "grade":
        yield (
            f"reward {line['reward']:.2f}: {line.get('passed', '?')} of {line.get('of', '?')} tests pass, "
            f"succinctness {line.get('succinctness', 0):.2f}, conformance {line.get('conformance', 0):.2f}"
        )
        if line.get("asked"):
            yield f"  {line.get('agreed', '?')} of {line['asked']} fresh inputs give the result of the original"
        if (trust := str(line.get("trust", "")).upper()) in Trust.__members__:
            yield f"  {Trust[trust].value}"
        yield from (f"  flag: {one_line(str(flag))}" for flag in line["flags"])
        failed = [*(line.get("failed") or {}).items()]
        yield from (
            f"  {one_line(test)}: {one_line(str(reason))}" for test, reason in (failed[:rows] if rows else failed)
        )
        if rows and len(failed) > rows:
            yield f"  … {len(failed) - rows} more"


def _format_arguments(text: str) -> str:
    """Arguments as a person reads them: a line for each, and texts as they are."""
    try:
        args = parse_json(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(args, dict):
        return text
    return "\n".join(
        f"{name}: {value if isinstance(value, str) else json.dumps(value)}" for name, value in args.items()
    )


def _format_block(head: str, text: str, rows: int) -> Iterator[str]:
    """A heading and a text beneath it: in one line where it has one, else its first lines, indented."""
    width = shutil.get_terminal_size((120, 24)).columns if rows else 10**9
    lines = [visible(line).replace("\t", "    ") for line in text.splitlines() if line.strip() or not rows]
    if len(lines) <= 1 or rows == 1:
        remainder = f" … {len(lines) - 1} lines more" if len(lines) > 1 else ""
        first = (
            textwrap.shorten(lines[0], max(20, width - len(head) - len(remainder) - 3), placeholder=" …")
            if lines and rows
            else "".join(lines[:1])
        )
        if head or first:
            yield f"{head}: {first}{remainder}" if head and first else head or first + remainder
        return
    if head:
        yield head
    yield from (f"    {line[: width - 4]}" for line in (lines[:rows] if rows else lines))
    if rows and len(lines) > rows:
        yield f"    … {len(lines) - rows} lines more"
