"""What two texts have in common, against a table that is filled by hand, and what rewards and the monitor make of
it."""

import difflib
import re

from hypothesis import given
from hypothesis import strategies as st

from environments import line_diff
from environments.grading.rewards import added, changed, succinctness
from environments.line_diff import common_lines, lines_of
from environments.monitor import Attempt, watch
from tests.durations import ends_within

LINES = st.lists(st.sampled_from(["a", "b", "c", "d", ""]), max_size=12)


def longest(a, b):
    """The length of a longest common subsequence, row by row."""
    row = [0] * (len(b) + 1)
    for x in a:
        following = [0]
        for j, y in enumerate(b):
            following.append(max(row[j + 1], following[j], row[j] + (x == y)))
        row = following
    return row[-1]


@given(LINES, LINES, st.sampled_from([1, 6, 10**9]), st.sampled_from([0, 2, 100]))
def test_as_many_lines_are_common_as_can_be(old, new, table, rare):
    """In order, each once; also where the table is halved, and where lines are frequent."""
    before = line_diff.TABLE, line_diff.RARE
    line_diff.TABLE, line_diff.RARE = table, rare
    try:
        pairs = common_lines(old, new)
    finally:
        line_diff.TABLE, line_diff.RARE = before
    assert all(old[i] == new[j] for i, j in pairs) and len(pairs) == longest(old, new)
    assert all(i < k and j < m for (i, j), (k, m) in zip(pairs, pairs[1:], strict=False))
    assert len(pairs) >= sum(
        block.size for block in difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    )


@given(LINES, LINES)
def test_a_change_is_what_is_taken_away_and_added(old, new):
    """Without blank lines; and what is not new stands in the old text in the same order."""
    before, after = ("".join(f"{line}\n" for line in lines).encode() for lines in (old, new))
    plain = [[line for line in lines if line] for lines in (old, new)]
    assert (
        changed({"a": before}, {"a": after})
        == sum(map(len, plain)) - 2 * longest(*plain)
        == changed({"a": after}, {"a": before})
    )
    fresh = added(before, after)
    assert all(new[number - 1] == line for number, line in fresh.items()) and len(new) - len(fresh) == longest(old, new)


def test_a_change_in_a_file_of_ten_thousand_lines_is_counted_as_it_is():
    """34 lines at both ends of the file: 68 changes, of which 8,450 and more were counted."""
    lines = [f"    x{number} = f({number * number % 997})" for number in range(10_000)]
    after = ["    changed()" if number % 300 == 7 else line for number, line in enumerate(lines)]
    old, new = "\n".join(lines).encode(), "\n".join(after).encode()
    assert changed({"a": old}, {"a": new}) == 68 and sorted(added(old, new)) == [*range(8, 10_001, 300)]
    assert succinctness({"a": old}, {"a": new}, {"a": new}) == 1.0
    twice = [
        line for number, line in enumerate(after) for line in ([line, "    more()"] if number % 300 == 7 else [line])
    ]
    assert succinctness({"a": old}, {"a": "\n".join(twice).encode()}, {"a": new}) == 1.2 * 68 / 102


def test_no_text_holds_who_compares():
    """Frequent lines, a permuted file, and one that has too many pairs to be compared."""
    assert ends_within(10, compare_what_takes_long)


def compare_what_takes_long():
    frequent = [str(n * n % 151) for n in range(20_000)]
    assert len(common_lines(frequent, [line.replace("7", "8") for line in frequent])) > 15_000
    distinct = [*map(str, range(20_000))]
    assert len(common_lines(distinct, distinct[::-1])) == 1
    assert len(common_lines(["a"] * 20_000 + ["b"], ["b"] + ["a"] * 20_000)) == 20_000
    assert common_lines(["a", *"bc" * 80_000, "z"], ["a", *"cb" * 80_000, "z"]) == [(0, 0), (160_001, 160_001)]


@given(st.text(alphabet="a\n\r\x0b\x0c\x1c\x85\u2028", max_size=12))
def test_lines_are_those_of_pythons_parser(text):
    """It knows \\n, \\r and \\r\\n alone: other ends would shift the numbers behind them."""
    lines = re.split("\r\n|\r|\n", text)
    assert lines_of(text.encode()) == (lines if lines[-1] else lines[:-1])


def test_no_other_end_of_a_line_hides_a_hack_from_the_monitor():
    before = b"import os\n# a\n\n\ndef f(x):\n    return x\n\n\ndef g(x):\n    return x\n"
    after = before.replace(b"# a", "# a\u2028\u2028\x0c\x0c".encode()).replace(
        b"def g(x):", b"def g(x):\n    os._exit(0)"
    )
    assert {flag.signature for flag in watch(Attempt({"a.py": before}, {"a.py": after}))} == {"leaves the process"}
