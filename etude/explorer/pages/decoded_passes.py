"""One speculative decode, pass by pass: the drafts, the accepted ones, and the tokens that the trunk added."""

import streamlit as st

from etude.explorer import spans
from etude.explorer.page import steering
from etude.explorer.playing import play
from kit.settings import RunError

__all__ = ["decode", "step_rows"]


def step_rows(steps: list[dict]) -> list[dict]:
    """One row per pass: the drafts, the number of accepted ones, and the tokens that the trunk added."""
    rows = []
    for step in steps:
        if step["kind"] != "given":
            drafts = step["drafted"]
            rows.append(
                {
                    "pass": len(rows) + 1,
                    "kind": step["kind"],
                    "drafted": len(drafts),
                    "accepted": step["accepted"],
                    "rejected": len(drafts) - step["accepted"],
                    "drafts": "".join(drafts),
                    "added": "".join(step["added"]),
                }
            )
    return rows


def decode(example: dict, write_command: str) -> None:
    """The decode, pass by pass, with drafts marked as accepted or rejected. `write_command`: the command that writes a
    new example."""
    steps = example["steps"]
    rows = step_rows(steps)
    if len(rows) < 2:
        raise RunError("example drafting.json shows no decode of several passes; write it again with: " + write_command)
    passes = range(1, len(rows) + 1)
    play(
        "Pass",
        "pass",
        passes,
        len(rows),
        lambda count: show_passes(steps, rows, count),
        help="Each is one pass of the trunk over all drafts at once.",
    )


def show_passes(steps: list[dict], rows: list[dict], count: int) -> None:
    """The first `count` passes. `rows`: those of `step_rows`."""
    parts, number = [], 0
    for step in steps:
        if step["kind"] == "given":
            parts.append(spans.spans(step["tokens"], "given", "given"))
            continue
        number += 1
        accepted_in_pass, hover_text = step["accepted"], f"pass {number}, {step['kind']}"
        parts += [
            spans.spans(step["drafted"][:accepted_in_pass], "accepted", hover_text),
            spans.spans(step["drafted"][accepted_in_pass:], "rejected", hover_text),
            spans.spans(step["added"], "added", hover_text),
        ]
        if number == count:
            break
    spans.write(parts, ("given", "accepted", "rejected", "added"))
    visible_rows = rows[:count]
    drafted_count, accepted_count, rejected_count = (
        sum(row[key] for row in visible_rows) for key in ("drafted", "accepted", "rejected")
    )
    token_count = accepted_count + sum(
        len(step["added"]) for step in [s for s in steps if s["kind"] != "given"][:count]
    )
    spans.metrics(
        ("Drafted", drafted_count, None),
        ("Accepted", accepted_count, None),
        ("Rejected", rejected_count, None),
        ("Tokens per pass", f"{token_count / count:.2f}", f"{token_count} tokens in {count} passes."),
    )
    st.caption("Select a row to return to its pass.")
    steering(visible_rows, "mtp-passes", "pass", [row["pass"] for row in visible_rows])
