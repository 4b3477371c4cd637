"""The page of feature deletion: every control, and what it shows against `ref` called directly."""

import pytest

from etude.explorer.pages import feature_deletion
from ref import feature_deletion as ref

DEMO = ref.demo()


def test_every_control_goes_to_both_ends(page, drive):
    at = page("feature-deletion")
    before = dict(at.query_params)
    assert drive(at) > 12 and not at.error and dict(at.query_params) == before


def test_ways_are_those_of_the_demonstration(page, table):
    shown = table(page("feature-deletion"), "tried").set_index("way")
    for way in ("slice", "body", "symbol"):
        names = {
            "tried": "tried",
            "valid": "valid",
            "lines, mean": "lines",
            "failing, mean": "failing",
            "bits, mean": "bits",
        }
        assert [shown.loc[way, name] for name in names] == pytest.approx(
            [DEMO[f"{name}@{way}"] for name in names.values()]
        )


@pytest.mark.parametrize("way", feature_deletion.WAYS)
def test_a_piece_is_shown_as_it_is_cut(page, whole, table, way):
    at = page("feature-deletion", way=way)
    found = feature_deletion.try_pieces(way, 3, 0.5)
    for number in sorted({1, len(found) // 2 + 1, len(found)}):
        one = found[number - 1]
        whole(at.slider(key="piece").set_value(number).run())
        assert any(one.label in text.value for text in at.markdown)
        left = ref.delete(feature_deletion.TREE, one.piece)[ref.FILE]
        outcomes, _ = ref.play(left)
        failing = {test for test, said in outcomes.items() if said == "failed"}
        shown = {metric.label: metric.value for metric in at.metric}
        assert shown["Tests that fail"] == f"{len(failing)} of 18" and shown["Valid"] == ("no" if one.faults else "yes")
        assert [warning.value for warning in at.warning] == [*one.faults[:5]]
        (code,) = [one.value for one in at.code if one.language == "diff"]
        marked = [line[1:] for line in code.splitlines() if line.startswith("-") and not line.startswith("---")]
        assert "\n".join(marked) in ref.PROGRAM.decode() or len(one.piece.patches[0].edits) > 1
        assert left.decode().count("\n") == ref.PROGRAM.decode().count("\n") - len(marked) + sum(
            line.startswith("+") and not line.startswith("+++") for line in code.splitlines()
        )
    rows = table(at, "why not")
    assert len(rows) == len(found) and rows["valid"].sum() == DEMO[f"valid@{way}"]


def test_the_table_marks_what_goes_and_who_was_there():
    for one in feature_deletion.try_pieces("slice", 3, 0.5):
        cells, gone = feature_deletion.cells(one.piece), feature_deletion.find_removed_lines(one.piece)
        for number, row in enumerate(cells, 1):
            assert {*row.tolist()} <= ({2, 3} if number in gone else {0, 1})
        there = {test for test, column in zip(feature_deletion.TESTS, cells.T, strict=True) if (column == 2).any()}
        assert there == {*one.piece.tests} >= one.failing or one.faults
    assert {*feature_deletion.cells(None).ravel().tolist()} == {0, 1}


def test_each_field_of_the_chart_is_a_cell_of_the_table():
    """The program stands beside it, line by line, and a cross before the tests that fail."""
    one = feature_deletion.try_pieces("slice", 3, 0.5)[1]
    cells, (fields, source) = feature_deletion.cells(one.piece), (drawn := feature_deletion.picture(one)).layers
    assert len(fields.rows) == (cells > 0).sum()
    for row in fields.rows:
        state = cells[row["line"] - 1, feature_deletion.TESTS.index(row["test"])]
        assert row["what"] == feature_deletion.STATES[state - 1] and row["fails without it"] == (
            row["test"] in one.failing
        )
        assert row["low"] < -row["line"] < row["high"]
    assert [row["source"] for row in source.rows] == [line.strip() for line in feature_deletion.LINES if line]
    assert {name.removeprefix("× ") for name in drawn.x.ticks.values() if name.startswith("× ")} == {*one.failing}


def test_there_is_a_number_for_every_piece():
    assert (
        len(feature_deletion.try_pieces("slice", 1, 1.0))
        <= len(feature_deletion.try_pieces("slice", 2, 1.0))
        == feature_deletion.PIECES
    )


def test_where_no_group_is_left_the_table_is_still_drawn(page):
    at = page("feature-deletion", least="9", most="0.1")
    assert any("No group of tests" in text.value for text in at.markdown)
    assert len(at.get("vega_lite_chart")) == 1 and not at.error


def test_what_to_look_for_is_so():
    """Several times as many tasks as functions, and fewer tests that fail."""
    functions = sum(line.startswith("def ") for line in feature_deletion.LINES)
    assert (
        DEMO["valid@slice"] >= 3 * functions
        and DEMO["failing@slice"] < DEMO["failing@body"]
        and "several times" in feature_deletion.PAGE.look
    )


def test_a_control_draws_its_picture_anew_once(page, redrawn):
    at = page("feature-deletion")
    assert redrawn(at, at.slider(key="piece"), 5) == 1
    assert redrawn(at, at.slider(key="most"), 0.35) <= 1


def test_a_row_of_the_table_chooses_its_piece(page, monkeypatch):
    calls = []
    monkeypatch.setattr(feature_deletion, "steering", lambda *given: calls.append(given))
    at = page("feature-deletion", way="body")
    ((rows, _, key, values),) = calls
    assert at.slider(key=key).value in values and len(rows) == len(values)
    for row, number in zip(rows, values, strict=True):
        assert row["piece"].startswith(f"{number}. "), "the row that is chosen is the piece that is shown"
