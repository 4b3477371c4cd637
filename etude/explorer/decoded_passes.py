"""One speculative decode, pass by pass: what was drafted, how much of it was accepted, and what the trunk added."""

import streamlit as st

from etude.explorer import spans
from etude.explorer.page import steering
from etude.explorer.playing import play
from kit.settings import RunError

__all__ = ["decode", "step_rows"]


def step_rows(steps: list[dict]) -> list[dict]:
    """One row per pass: what was drafted, how much of it was accepted, what the trunk added."""
    rows = []
    for step in steps:
        if step["kind"] != "given":
            drafted = step["drafted"]
            rows.append(
                {
                    "pass": len(rows) + 1,
                    "kind": step["kind"],
                    "drafted": len(drafted),
                    "accepted": step["accepted"],
                    "rejected": len(drafted) - step["accepted"],
                    "drafts": "".join(drafted),
                    "added": "".join(step["added"]),
                }
            )
    return rows


def decode(found: dict, again: str) -> None:
    """The decode, pass by pass, with drafts marked as accepted or rejected. `again`: the command that writes a new example."""
    steps = found["steps"]
    rows = step_rows(steps)
    if len(rows) < 2:
        raise RunError("example drafting.json shows no decode of several passes; write it again with: " + again)
    passes = range(1, len(rows) + 1)
    play("Pass", "pass", passes, len(rows), lambda at: upto(steps, rows, at), help="Each is one pass of the trunk over all drafts at once.")


def upto(steps: list[dict], rows: list[dict], at: int) -> None:
    """The first `at` passes. `rows`: those of `step_rows`."""
    parts, number = [], 0
    for step in steps:
        if step["kind"] == "given":
            parts.append(spans.spans(step["tokens"], "given", "given"))
            continue
        number += 1
        taken, told = step["accepted"], f"pass {number}, {step['kind']}"
        parts += [
            spans.spans(step["drafted"][:taken], "accepted", told),
            spans.spans(step["drafted"][taken:], "rejected", told),
            spans.spans(step["added"], "added", told),
        ]
        if number == at:
            break
    spans.write(parts, ("given", "accepted", "rejected", "added"))
    some = rows[:at]
    drafted, accepted, rejected = (sum(row[key] for row in some) for key in ("drafted", "accepted", "rejected"))
    written = accepted + sum(len(step["added"]) for step in [s for s in steps if s["kind"] != "given"][:at])
    spans.metrics(
        ("Drafted", drafted, None),
        ("Accepted", accepted, None),
        ("Rejected", rejected, None),
        ("Tokens per pass", f"{written / at:.2f}", f"{written} tokens in {at} passes."),
    )
    st.caption("Choose a row to go back to its pass.")
    steering(some, "mtp-passes", "pass", [row["pass"] for row in some])
