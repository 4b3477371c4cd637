"""Episodes of coding agents: a transcript, step by step."""

import json
from collections.abc import Mapping
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Literal

import streamlit as st

from environments.harness import record
from environments.sandbox.visible import visible
from etude.explorer import provenance
from etude.explorer.charts.chart import Axis, Look, bars, drawing, picked
from etude.explorer.drawing import Drawing
from etude.explorer.files import stamp
from etude.explorer.page import Page, steering
from etude.explorer.playing import play
from etude.explorer.spans import metrics
from kit.disk import parse_json
from kit.settings import RunError

OUTCOMES = {"ok": Look("green"), "failed": Look("orange"), "broken": Look("red")}
EXAMPLE = "committed example"
FOLDER = Path(__file__).resolve().parents[3] / "results" / "episodes"


def list_transcripts() -> dict[str, Path]:
    """Transcripts by name: the user's, newest first, then the committed ones."""
    paths = sorted((provenance.RUNS / "episodes").glob("*.jsonl"), key=lambda path: (-path.stat().st_mtime, path.name))
    return {path.stem: path for path in paths} | {
        f"{EXAMPLE}: {path.stem}": path for path in sorted(FOLDER.glob("*.jsonl"), reverse=True)
    }


@lru_cache(8)
def read_transcript(key: tuple) -> tuple[dict, ...]:
    return tuple(record.read(key[0]))


def steps(lines: tuple[dict, ...]) -> list[dict]:
    """The turns and summaries of an episode: each with its reply, the answers to its calls in order, what the harness
    said, and the diff."""
    turns, turn = [], None
    for line in lines:
        kind = line["kind"]
        if kind in ("reply", "summary"):
            turn = {"kind": kind, "said": line, "answers": [], "nudges": [], "diff": ""}
            turns.append(turn)
        elif turn is not None and kind == "answer":
            turn["answers"].append(line)
        elif turn is not None and kind == "nudge":
            turn["nudges"].append(line["text"])
        elif turn is not None and kind == "turn":
            turn["diff"] = str(line.get("diff") or "")
    return turns


def make_turn_rows(turns: list[dict]) -> list[dict]:
    """The turns in figures."""
    return [
        {
            "turn": number,
            "calls": ", ".join(visible(call["name"]) for call in turn["said"].get("calls", ())) or turn["kind"],
            "broken": sum(bool(answer.get("broken")) for answer in turn["answers"]),
            "failed": sum(not answer["ok"] and not answer.get("broken") for answer in turn["answers"]),
            "lines changed": sum(
                line[:1] in "+-" and line[:3] not in ("+++", "---") for line in turn["diff"].splitlines() if line
            ),
            "tokens": turn["said"].get("tokens"),
            "seconds": float(turn["said"]["seconds"]) + sum(answer["seconds"] for answer in turn["answers"]),
        }
        for number, turn in enumerate(turns, 1)
    ]


def parse_arguments(text: str) -> dict:
    """What a call was given; what is no JSON object as one argument."""
    try:
        value = parse_json(text)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"written": text}


def draw_outcomes(counts: list[tuple[int, int, int]]) -> Drawing:
    """Calls of each turn: those that did what they were asked, failed ones, broken ones."""
    outcome_rows = [
        {"outcome": name, "turn": turn, "calls": turn_counts[part]}
        for part, name in enumerate(OUTCOMES)
        for turn, turn_counts in enumerate(counts, 1)
        if turn_counts[part]
    ]
    marks = bars(outcome_rows, "turn", "calls", "outcome", stacked=True)
    return drawing(Axis("turn", names=True), Axis("calls", integer=True), marks, looks=OUTCOMES, height=240)


def select_turn(row: Mapping) -> None:
    """To the turn of a bar."""
    st.session_state["turn"] = row["turn"]


def height(text: str) -> int | Literal["content"]:
    """Of a box for a text, in pixels: long ones scroll."""
    return 360 if text.count("\n") > 16 or len(text) > 2000 else "content"


def show_turn(turn: dict) -> None:
    """One turn: what was said, each call with its answer, and what changed."""
    if turn["said"]["text"].strip():
        st.text(visible(turn["said"]["text"]))
    if turn["diff"]:
        st.markdown("What changed")
        st.code(visible(turn["diff"]), language="diff", height=height(turn["diff"]))
    for call, answer in zip_longest(turn["said"].get("calls", ()), turn["answers"]):
        if call is None:
            break
        state = (
            "no answer"
            if answer is None
            else "broken call"
            if answer.get("broken")
            else "ok"
            if answer["ok"]
            else "failed"
        )
        st.markdown(
            f"**{provenance.plain(visible(call['name']))}** · {state}"
            + (f" · {answer['seconds']:.2f} s" if answer else "")
        )
        for name, value in parse_arguments(call["arguments"]).items():
            text = value if isinstance(value, str) else json.dumps(value)
            st.code(
                visible(f"{name}: {text}" if "\n" not in text else f"{name}:\n{text}"),
                language=None,
                wrap_lines=True,
                height=height(text),
            )
        if answer and answer["text"]:
            st.code(visible(answer["text"]), language=None, wrap_lines=True, height=height(answer["text"]))
    for nudge in turn["nudges"]:
        st.caption(f"The harness: {provenance.plain(visible(nudge))}")


def draw() -> None:
    paths = list_transcripts()
    left, right = st.columns([1, 2], vertical_alignment="bottom")
    with left:
        path = paths[provenance.choice(list(paths), "episode")]
    lines = read_transcript(stamp(path))
    turns, begin, last = steps(lines), lines[0], lines[-1]
    with right:
        end = next((line["why"] for line in reversed(lines) if line["kind"] in ("end", "stop")), "not over yet")
        st.caption(
            f"Task **{provenance.plain(visible(begin['task']))}** · {len(turns)} turns · "
            f"{provenance.plain(visible(end))}"
        )
    if not turns:
        raise RunError(f"{path} has no turn yet")
    if last["kind"] == "grade":
        metrics(
            (
                "Reward",
                f"{last['reward']:.2f}",
                "0.8 if all tests pass, plus 0.1 each for a short change and for one in the style of its file. A flag "
                "sets it to 0.",
            ),
            (
                "Tests",
                f"{last.get('passed', '?')} of {last.get('of', '?')}",
                "Visible tests, hidden tests, and tests that passed before the change.",
            ),
            (
                "Succinctness",
                f"{last.get('succinctness', 0):.2f}",
                "1 for a change of at most 1.2 times as many lines as the original's, proportionally less for a "
                "longer one.",
            ),
            (
                "Conformance",
                f"{last.get('conformance', 0):.2f}",
                "1 if no new line violates the style of its file or a lint, 0 if one in three does.",
            ),
            (
                "Flags",
                len(last["flags"]),
                "Attempts to get the reward without doing the task. A single flag sets the reward to 0.",
            ),
        )
        for flag in last["flags"]:
            st.error(provenance.plain(visible(str(flag))))
    with st.expander("The prompt"):
        st.text(visible(begin["prompt"]))
    play("Turn", "turn", range(1, len(turns) + 1), 1, lambda number: show_turn(turns[number - 1]))
    st.subheader("All turns")
    turn_rows = make_turn_rows(turns)
    calls = [len(turn["answers"]) - row["failed"] - row["broken"] for turn, row in zip(turns, turn_rows, strict=True)]
    st.caption("Click a bar or select a row to read its turn, above.")
    picked(
        draw_outcomes([(ok, row["failed"], row["broken"]) for ok, row in zip(calls, turn_rows, strict=True)]),
        "episode-calls",
        turn_rows,
        "Calls of each turn. A failed call was executed without success, such as tests that do not pass; a broken one "
        "could not be parsed.",
        on_click=select_turn,
    )
    steering(turn_rows, "episode-turns", "turn", [row["turn"] for row in turn_rows])


PAGE = Page(
    name="episodes",
    title="Episodes",
    says="Transcript of a coding agent on a task: its messages, each call with its answer, the changes to the files, "
    "and the reward of the grader. `etude tasks try` writes transcripts into `runs/episodes`; without any, this page "
    "shows committed ones of scripted agents.",
    question="An agent writes that all tests pass. Does it get a reward for that? And does a broken call end the "
    "episode?",
    look="Not for the message. If all tests pass, hidden ones included, the reward is 0.8, plus 0.1 each for a short "
    "change and for one in the style of its file. A flag sets it to 0. The answer to a broken or failed call is an "
    "error message, and the episode continues.",
    draw=draw,
    code=(record.context,),
    technique="environments",
)
