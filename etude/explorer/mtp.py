"""From acceptance to speed: what drafts are worth, and one speculative decode pass by pass."""

import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import streamlit as st

from etude.explorer import examples, files, provenance, spans
from etude.explorer.page import COLOURS, Page, axes, figure, table
from kit.settings import RunError
from ref import mtp
from ref.engine import decoder
from sims import drafting

MEASURED = Path(__file__).resolve().parents[2] / "results" / "figures" / "mtp.json"
MOST = 8
"""Drafts of a pass that the sliders go up to."""


ROW = {"tasks": int, **dict.fromkeys(("alpha", "draft_cost", "verify_cost", "opening_cost", "speedup", "speedup_low", "speedup_high"), files.NUMBER)}
"""What is needed of a measurement."""


def measured() -> dict[int, dict]:
    """By number of drafts the row that `etude figure mtp` committed: acceptance, costs in passes over one row, speed-up. RunError where
    there is none."""
    try:
        return _measured(*files.stamp(MEASURED))
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"results/figures/{MEASURED.name} cannot be read ({error}); measure it again with: etude figure mtp") from None


@lru_cache(4)
def _measured(path: Path, changed: int, size: int) -> dict[int, dict]:
    rows = files.parsed(path, {"rows": [{"part": str}]})["rows"]
    found = {int(way): row for row in rows if row["part"] == "decode" and (way := str(row.get("way"))).isdecimal()}
    if not found:
        raise ValueError("no decode is measured in it")
    if wrong := files.unlike(list(found.values()), [ROW]):
        raise ValueError(wrong)
    return found


def measured_by() -> str:
    """Whose measurement that is."""
    try:
        known = provenance.facts(json.loads(MEASURED.read_text(encoding="utf-8")))
    except (LookupError, TypeError):
        known = []
    return " · ".join([f"committed in results/figures/{MEASURED.name}, played by `etude figure mtp`", *map(provenance.plain, known)])


def speeds(alpha: float, cost: float, verify: float, opening: float, folder: Path | None = None) -> list[dict]:
    """A row for every number of drafts: tokens a pass and speed-ups as `sims/drafting.py` predicts them, and the measured one."""
    known, lengths, rows = measured(), np.array(examples.load("drafting", folder)["turns"]), []
    for drafts in range(1, MOST + 1):
        row = {
            "drafts": drafts,
            "tokens a pass": drafting.predicted(alpha, drafts, 0.0),
            "predicted": drafting.predicted(alpha, drafts, cost),
            "predicted, with turns": drafting.with_turns(alpha, drafts, cost, verify, opening, lengths),
        }
        if drafts in known:
            row |= {"measured": known[drafts]["speedup"], "low": known[drafts]["speedup_low"], "high": known[drafts]["speedup_high"]}
        rows.append(row)
    return rows


def depths(alpha: float, drafts: int, folder: Path | None = None) -> list[dict]:
    """A row for each depth: how often a draft stood with all before it, counted, and what one α for all depths makes of it, which is the
    tokens that a pass gains by that draft."""
    counted, rows = examples.load("drafting", folder)["drafts"], []
    deepest = counted[str(min(drafts, max(map(int, counted))))]
    for k in range(1, drafts + 1):
        row = {"depth": k, "from α": drafting.predicted(alpha, k, 0.0) - drafting.predicted(alpha, k - 1, 0.0)}
        if k <= len(deepest["drafted"]) and deepest["drafted"][k - 1]:
            offered, stood = deepest["drafted"][k - 1], deepest["accepted"][k - 1]
            row |= {"drafted": offered, "accepted": stood, "share": stood / offered}
        rows.append(row)
    return rows


def by_depth(rows: list[dict], alpha: float) -> None:
    """Acceptance by depth."""
    fig, ax = axes("depth of the draft", "share that stood with all before it", 5.4, 3.6, fixed=True)
    some = [row for row in rows if "share" in row]
    ax.bar([row["depth"] for row in some], [row["share"] for row in some], 0.6, color=COLOURS["sky"], label="counted")
    ax.plot([row["depth"] for row in rows], [row["from α"] for row in rows], "s--", color=COLOURS["orange"], label=f"α = {alpha:g} at every depth")
    ax.set(ylim=(0, 1.05), xticks=range(1, len(rows) + 1))
    ax.legend(frameon=False, fontsize=9, ncols=2, loc="lower left", bbox_to_anchor=(0, 1), borderpad=0)
    figure(
        fig,
        "mtp-acceptance",
        rows,
        "How often a draft of each depth stood, counted on the agent's rollouts, and what one α for all depths would give.",
    )


def by_drafts(rows: list[dict], drafts: int) -> None:
    """Speed-up by number of drafts."""
    fig, ax = axes("drafts a pass", "speed-up over plain decoding", 5.4, 3.6, fixed=True)
    at = [row["drafts"] for row in rows]
    ax.plot(at, [row["predicted"] for row in rows], "o--", color=COLOURS["orange"], label="predicted")
    ax.plot(at, [row["predicted, with turns"] for row in rows], "s-", color=COLOURS["blue"], label="with turns")
    known = [row for row in rows if "measured" in row]
    errors = [[row["measured"] - row["low"] for row in known], [row["high"] - row["measured"] for row in known]]
    ax.errorbar([row["drafts"] for row in known], [row["measured"] for row in known], errors, fmt="D", color="black", capsize=3, label="measured")
    ax.axvline(drafts, color=COLOURS["grey"], linewidth=1)
    ax.axhline(1, color=COLOURS["grey"], linestyle=":", linewidth=1)
    ax.set(xticks=at, ylim=(0, None))
    ax.legend(frameon=False, fontsize=9, ncols=3, loc="lower left", bbox_to_anchor=(0, 1), borderpad=0)
    figure(
        fig,
        "mtp-speed",
        rows,
        "Speed-up by number of drafts: dashed as the formula has it, solid with short turns and the cost of verifying, both "
        "from the controls; diamonds are measured, with 95% intervals over tasks.",
    )


def step_rows(steps: list[dict]) -> list[dict]:
    """A row for each pass: what was drafted, how much of it stood, what the trunk added."""
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
    """The decode up to a pass, drafts marked by what became of them. `again`: the command that writes another."""
    steps = found["steps"]
    rows = step_rows(steps)
    if len(rows) < 2:
        raise RunError("example drafting.json shows no decode of several passes; write it again with: " + again)
    at = st.slider("Pass", 1, len(rows), len(rows), key="pass", bind="query-params", help="Each is one pass of the trunk over all drafts at once.")
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
        ("Tokens a pass", f"{written / at:.2f}", f"{written} tokens in {at} passes."),
    )
    table(some, "mtp-passes")


def draw() -> None:
    folder = provenance.chosen("drafting.json")
    known, found = measured(), examples.load("drafting", folder)
    deepest = known[max(known)]

    def near(key: str, low: float, high: float) -> tuple[float, float, float]:
        """A slider's ends, and between them what was measured: another machine may have measured something beyond them."""
        return low, high, min(max(round(float(deepest[key]), 2), low), high)

    one, two, three, four, five = st.columns(5)
    drafts = one.slider("Drafts a pass (γ)", 1, MOST, min(max(known), MOST), key="drafts", bind="query-params")
    alpha = two.slider("α, chance that a draft stands", *near("alpha", 0.0, 1.0), 0.01, key="alpha", bind="query-params")
    cost = three.slider(
        "Cost of a draft (c)",
        *near("draft_cost", 0.0, 1.0),
        0.01,
        key="cost",
        bind="query-params",
        help="In passes of the trunk over one row, as the next two.",
    )
    verify = four.slider(
        "Cost of verifying",
        *near("verify_cost", 1.0, 3.0),
        0.01,
        key="verify",
        bind="query-params",
        help="A pass over the drafts. Theory takes it to be 1.",
    )
    opening = five.slider(
        "Cost of an opening",
        *near("opening_cost", 1.0, 4.0),
        0.01,
        key="opening",
        bind="query-params",
        help="A turn's first pass reads a prompt or an answer with nothing drafted, drafts or not.",
    )
    rows = speeds(alpha, cost, verify, opening, folder)
    here = rows[drafts - 1]
    spans.metrics(
        ("Tokens a pass, at best", f"{here['tokens a pass']:.2f}", "If text were one long turn."),
        ("Predicted", f"{here['predicted']:.2f}×", "By the formula."),
        (
            "Predicted, with turns",
            f"{here['predicted, with turns']:.2f}×",
            "The agent's own short turns, the cost of verifying and of openings counted.",
        ),
        (
            "Measured",
            f"{here['measured']:.2f}×" if "measured" in here else "–",
            f"results/figures/{MEASURED.name}: {deepest['tasks']} tasks at batch 1, with the α and the costs that were measured.",
        ),
    )
    left, right = st.columns(2)
    with left:
        by_depth(depths(alpha, drafts, folder), alpha)
    with right:
        by_drafts(rows, drafts)
    st.caption(f"Measured, and where the sliders begin: {measured_by()}.")
    table(rows, "mtp-speed-up")
    st.subheader("One decode, pass by pass")
    st.markdown(
        f"The agent after RL, greedy, on `{found['task']}`. In {found['identical']} of {found['tasks']} tasks the tokens are those of plain "
        "decoding, all of them: drafts change the speed and nothing else."
    )
    decode(found, examples.again(folder))


PAGE = Page(
    name="mtp",
    title="Multi-token prediction",
    says="Small layers on top of the trunk guess the tokens after the next. The trunk checks all guesses in one pass and keeps those that it would "
    "have written itself.",
    formula=r"\text{speed-up} = \frac{1-\alpha^{\gamma+1}}{(1-\alpha)(\gamma c + 1)}",
    look="where drafts pay, the formula promises more than an agent gets: its turns are short, every turn opens with a pass that nothing was "
    "drafted for, and a pass over several rows is not free here.",
    draw=draw,
    code=(drafting.predicted, drafting.with_turns, decoder.accept, mtp.MTPLayer),
    technique="mtp",
)
