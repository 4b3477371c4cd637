"""Test coverage of a package of one file, the pieces derived from it, and the tests that fail without a piece."""

import difflib
from dataclasses import asdict, dataclass
from functools import lru_cache

import numpy as np
import streamlit as st

from etude.explorer.charts.chart import Axis, Look, boxes, chart, drawing, words
from etude.explorer.drawing import Drawing
from etude.explorer.page import Page, steering, table
from etude.explorer.spans import metrics
from ref import feature_deletion as ref

WAYS = ("slice", "body", "symbol")
PIECES = 12
"""As many as a way has at most, for any setting."""
TREE = {ref.FILE: ref.PROGRAM}
TESTS = [*ref.CHECKS]
LINES = ref.PROGRAM.decode().splitlines()
STATES = ("executed", "executed, and gone", "gone")
CODE, INDENT = 26, 0.3
"""Columns of the table that the program takes beside it, and a space of its indentation, which browsers leave out."""


@dataclass(frozen=True)
class PieceResult:
    """A piece, and what became of the tests without it."""

    label: str
    piece: ref.Piece
    failing: frozenset[str]
    faults: tuple[str, ...]
    hard: ref.Difficulty


@lru_cache(1)
def run_package() -> tuple[dict[str, str], dict[str, set[tuple[str, int]]]]:
    """Outcomes and coverage of the whole package."""
    return ref.play(ref.PROGRAM)


@lru_cache(64)
def try_pieces(way: str, least: int, max_share: float) -> tuple[PieceResult, ...]:
    """All pieces of a way. `least` and `max_share` choose the groups of slices, and `least` is the fewest tests that
    must fail."""
    before, coverage = run_package()
    pieces = {
        "slice": lambda: ref.slices(TREE, coverage, least, max_share),
        "body": lambda: ref.bodies(TREE),
        "symbol": lambda: ref.symbols(TREE),
    }[way]()
    results = []
    for number, piece in enumerate(pieces, 1):
        after, _ = ref.play(ref.delete(TREE, piece)[ref.FILE])
        failing = frozenset(test for test, outcome in after.items() if outcome == "failed")
        kinds = list(dict.fromkeys(test.rpartition(" ")[0] for test in TESTS if test in (piece.tests or failing)))
        label = f"{number}. `{piece.name.rpartition(':')[2]}`: {', '.join(kinds)}"
        results.append(
            PieceResult(
                label,
                piece,
                failing,
                ref.faults(TREE, piece, before, after, least),
                ref.difficulty(TREE, piece, len(failing)),
            )
        )
    return tuple(results)


def find_removed_lines(piece: ref.Piece | None) -> set[int]:
    """Lines that a piece takes."""
    return {
        line
        for patch in (piece.patches if piece else ())
        for edit in patch.edits
        for line in range(edit.first, edit.last + 1)
    }


def cells(piece: ref.Piece | None) -> np.ndarray:
    """Lines × tests: 0 not executed, 1 executed, 2 executed and gone, and 3 for what is gone and was not executed."""
    _, coverage = run_package()
    executed = np.array([[(ref.FILE, line) in coverage[test] for test in TESTS] for line in range(1, len(LINES) + 1)])
    is_gone = np.isin(np.arange(1, len(LINES) + 1), [*find_removed_lines(piece)])[:, None]
    return np.where(executed, 1 + is_gone, 3 * is_gone)


def make_cell_rows(result: PieceResult | None) -> list[dict]:
    """One row for each coloured field of the table: a line that a test executes, or that the piece takes."""
    executed = cells(result.piece if result else None)
    return [
        {
            "line": line,
            "test": test,
            "what": STATES[state - 1],
            "fails without it": bool(result) and test in result.failing,
            "source": LINES[line - 1].strip(),
        }
        | {"left": column - 0.45, "right": column + 0.45, "low": -line - 0.5, "high": -line + 0.5}
        for line, states in enumerate(executed.tolist(), 1)
        for column, (test, state) in enumerate(zip(TESTS, states, strict=True))
        if state
    ]


def picture(result: PieceResult | None) -> Drawing:
    """The table of coverage with a piece marked, beside the program; tests that fail without it have a cross."""
    gone_lines = find_removed_lines(result.piece if result else None)
    source = [
        {
            "place": INDENT * (len(text) - len(text.lstrip())) - CODE,
            "row": -line,
            "line": line,
            "source": text.strip(),
            "gone": line in gone_lines,
        }
        for line, text in enumerate(LINES, 1)
        if text
    ]
    names: dict[float, str] = {
        column: ("× " if result and test in result.failing else "") + test for column, test in enumerate(TESTS)
    }
    return drawing(
        Axis("", lower=-CODE - 0.5, upper=len(TESTS) - 0.5, ticks=names),
        Axis("", lower=-len(LINES) - 0.5, upper=-0.5, ticks={-line: str(line) for line in range(1, len(LINES) + 1)}),
        boxes(
            make_cell_rows(result),
            "left",
            "right",
            "low",
            "high",
            "what",
            tell=("line", "source", "test", "fails without it"),
        ),
        words(source, "place", "row", "source", tell=("line", "gone"), code=True),
        looks=dict(zip(STATES, (Look("sky"), Look("orange"), Look("#F6E3C0")), strict=True)),
        height=130 + 12 * len(LINES),
    )


def make_piece_rows(results: tuple[PieceResult, ...]) -> list[dict]:
    """One row for each piece."""
    return [
        {
            "piece": result.label.replace("`", ""),
            "valid": not result.faults,
            "failing tests": len(result.failing),
            **{name: value for name, value in asdict(result.hard).items() if name not in ("tests", "files")},
            "bits": result.hard.bits,
            "why not": "; ".join(result.faults),
        }
        for result in results
    ]


def format_diff(piece: ref.Piece) -> str:
    """The piece as a diff of the file, with all of what stays."""
    after = ref.delete(TREE, piece)[ref.FILE].decode().splitlines()
    return "\n".join(difflib.unified_diff(LINES, after, ref.FILE, ref.FILE, lineterm="", n=2))


def draw() -> None:
    first, second, third, fourth = st.columns(4)
    way_help = (
        "slice: statements that only a group of tests executes; body: the body of a function; symbol: a whole "
        "function and its imports."
    )
    way = first.selectbox("Way", WAYS, key="way", bind="query-params", help=way_help)
    least = second.slider("Fewest tests that must fail", 1, 9, 3, key="least", bind="query-params")
    max_share = third.slider(
        "Greatest share of the tests",
        0.1,
        1.0,
        0.5,
        0.05,
        key="most",
        bind="query-params",
        help="The largest share of all tests in the group of a slice.",
    )
    results = try_pieces(way, least, max_share)
    number = fourth.slider(
        "Piece",
        1,
        PIECES,
        1,
        key="piece",
        bind="query-params",
        help="At most as many as there are: the table below names them.",
    )
    index = min(number, len(results)) - 1 if results else None
    if index is None:
        st.markdown("No group of tests satisfies both limits.")
    else:
        st.markdown(f"Piece {results[index].label} (of {len(results)})")
    result = None if index is None else results[index]
    executed = cells(result.piece if result else None)
    chart(
        picture(result),
        "feature-deletion-coverage",
        [
            {
                "line": line,
                "source": LINES[line - 1],
                "gone": line in find_removed_lines(result.piece if result else None),
            }
            | {test: bool(0 < cell < 3) for test, cell in zip(TESTS, executed[line - 1], strict=True)}
            for line in range(1, len(LINES) + 1)
        ],
        "Lines (rows) that each test (column) executes. The deleted piece is orange. Tests with a cross fail without "
        "it.",
        wide=True,
    )
    if result is not None:
        selection = result
        metrics(
            (
                "Valid",
                "no" if selection.faults else "yes",
                "Enough tests fail, all others pass, and the original can be restored.",
            ),
            ("Tests that fail", f"{len(selection.failing)} of {len(TESTS)}", None),
            ("Lines", selection.hard.lines, "Without blank lines and comments."),
            ("Callers", selection.hard.callers, "Intact functions that use a function with deleted code."),
            (
                "Difficulty",
                f"{selection.hard.bits:.2f} bits",
                "Sum of the base-2 logarithms of lines, functions, files, tests and callers.",
            ),
        )
        for fault in selection.faults[:5]:
            st.warning(fault)
        st.subheader("The deleted code")
        st.code(format_diff(selection.piece), language="diff", wrap_lines=True)
        st.subheader("All pieces of this way")
        st.caption("Select a row to show its piece.")
        steering(make_piece_rows(results), "feature-deletion-pieces", "piece", range(1, len(results) + 1))
    st.subheader("Three ways")
    table(
        [
            {
                "way": name,
                "tried": len(pieces),
                "valid": len(valid_pieces),
                "lines, mean": float(np.mean([piece.hard.lines for piece in valid_pieces])) if valid_pieces else None,
                "failing, mean": float(np.mean([len(piece.failing) for piece in valid_pieces]))
                if valid_pieces
                else None,
                "bits, mean": float(np.mean([piece.hard.bits for piece in valid_pieces])) if valid_pieces else None,
            }
            for name in WAYS
            for pieces in [try_pieces(name, least, max_share)]
            for valid_pieces in [[piece for piece in pieces if not piece.faults]]
        ],
        "feature-deletion-ways",
    )


PAGE = Page(
    name="feature-deletion",
    title="Feature deletion",
    says="Tasks made from a package and its tests: delete code that only a few tests execute; the agent has to write "
    "it again. The page deletes each piece of a small package and runs the tests.",
    formula=r"S(G) = \Bigl\{\, s : \varnothing \ne \bigcup_{l \in s} w(l) \subseteq G \,\Bigr\}",
    symbols={
        "S(G)": "the slice of a group G of tests: the statements that are deleted",
        "s": "a statement, as a set of lines",
        "l": "a line",
        "w(l)": "the tests that execute line l",
    },
    question="Delete whole function bodies, or slices that only some tests execute: which gives more tasks, and which "
    "fails more tests?",
    look="Slices. They find branches inside functions, several times as many tasks as there are functions, and each "
    "fails few tests. A deleted body fails the tests of all its callers, which is more tests per task.",
    draw=draw,
    code=(ref.slices, ref.faults, ref.Difficulty),
    technique="feature-deletion",
)
