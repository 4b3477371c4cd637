"""What a sandbox says can be printed: nothing in it moves a cursor, hides, or turns the direction round."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.sandbox.visible import cut, one_line, visible

ANY = st.text(st.characters(codec=None, exclude_categories=()))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, tab\tand\nnewline", "plain, tab\tand\nnewline"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("\x9b31m", "\\x9b31m"),
        ("over\rwritten\x08\x7f", "over\\x0dwritten\\x08\\x7f"),
        ("access\u202etxt.exe", "access\\u202etxt.exe"),
        ("zero\u200bwidth\ufeff", "zero\\u200bwidth\\ufeff"),
        ("tags \U000e0041", "tags \\U000e0041"),
        (b"\xff".decode(errors="surrogateescape"), "\\xff"),
        ("half \ud800", "half \\ud800"),
        ("ünïcödé 漢字 🙂", "ünïcödé 漢字 🙂"),
    ],
)
def test_shown(text, shown):
    assert visible(text) == shown


@given(ANY)
def test_nothing_hidden_is_left_and_twice_is_once(text):
    shown = visible(text)
    assert not [c for c in shown if c not in "\n\t" and unicodedata.category(c) in ("Cc", "Cs")]
    assert not {"\u202e", "\u2066", "\u200b", "\u2028"} & set(shown)
    assert visible(shown) == shown
    shown.encode()


@given(ANY.map(visible), st.integers(2, 200))
def test_a_cut_text_keeps_both_ends_and_counts_the_rest(text, most):
    found, data = cut(text, most), text.encode()
    if len(data) <= most:
        assert found == text
        return
    head, middle, tail = (
        found.split("\n… ")[0],
        found.rpartition("\n… ")[2].partition("\n")[0],
        found.rpartition("left out …\n")[2],
    )
    assert len(head.encode()) + len(tail.encode()) <= most or "…" in text
    assert text.startswith(head) and text.endswith(tail)
    if "…" not in text:
        assert middle == f"{len(data) - len(head.encode()) - len(tail.encode())} bytes left out …"


@given(ANY, st.integers(0, 300))
def test_one_line(text, most):
    found = one_line(text, most)
    assert len(found) <= most and len(found.splitlines()) <= 1
