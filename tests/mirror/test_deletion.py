"""scaled = ref for feature deletion, on every layout: the same pieces in the same order, from coverage that lies on
many ranks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ref import feature_deletion as ref
from scaled import feature_deletion as scaled
from tests.mirror import calls
from tests.mirror.layouts import layouts, play
from tests.ref.test_feature_deletion import PACKAGE, programs

some = settings(max_examples=20, deadline=None, derandomize=True)
NAMES = ("f.py", "g.py", "p/h.py")
USER = b"from f import top, A as B\nfrom g import *\nimport g\n\ndef user(x=1):\n    return top() or g.top\n"


def wanted(tree, coverage, least, most):
    """What `calls.deleted` returns, from the whole problem."""
    found = [ref.slices(tree, coverage, least, most), ref.bodies(tree), ref.symbols(tree), ref.statements(tree)]
    return [(pieces, [ref.difficulty(tree, piece) for piece in pieces]) for pieces in found]


@st.composite
def packages(draw):
    """Files, one of them no Python and none of them covered, and who executes what: more tests than a byte has bits,
    and lines that hold no code."""
    tree = {name: draw(programs()) for name in NAMES[: draw(st.integers(1, 3))]} | {
        "user.py": USER,
        "notes.txt": b"top",
        "broken.py": b"def (",
    }
    places = st.tuples(
        st.sampled_from([name for name in tree if name != "broken.py"]), st.integers(0, 40), st.integers(0, 4)
    )
    tests = [f"t{number}" for number in range(draw(st.sampled_from([1, 5, 8, 19])))]
    common = draw(st.lists(places, max_size=3))
    coverage = {}
    for test in ["", *tests]:
        own = draw(st.lists(places, max_size=4)) + (common if test and draw(st.booleans()) else [])
        lines = {name: len(tree[name].splitlines()) + 1 for name in tree}
        coverage[test] = {(name, at % lines[name] + more) for name, at, more in own for more in range(more + 1)} | {
            ("gone.py", 1)
        }
    return tree, coverage


@some
@given(layouts, packages(), st.integers(1, 3), st.sampled_from([0.3, 0.5, 1.0]))
def test_pieces_are_the_same_and_in_the_same_order(layout, package, least, most):
    assert play(layout, calls.deleted, *package, least, most) == wanted(*package, least, most)


@some
@given(st.lists(st.sampled_from([*PACKAGE]), min_size=1, unique=True), st.data())
def test_symbols_of_some_files_of_a_package(names, data):
    """Star imports, names under which others import, attributes at import: whichever of the files are there."""
    tree = {name: PACKAGE[name] for name in names} | {"x.py": data.draw(programs())}
    assert scaled.symbols(tree) == ref.symbols(tree)


@pytest.mark.parametrize(
    "others",
    [
        {"b.py": b"from a import *\n", "c.py": b"from b import f\n"},
        {"b.py": b"from a import f as g\n", "c.py": b"from b import g as h\n", "d.py": b"from c import h\n"},
        {"b.py": b"from a import f as g\n", "c.py": b"import b\nx = b.g\n"},
        {"b.py": b"import a\nx = a.f\n"},
        {"b.py": b"import a\ndef k(): return a.f\n"},
    ],
)
def test_a_symbol_is_followed_through_files(others):
    """Under other names, through a star, to an attribute that is read at import: each file matters."""
    tree = {"a.py": b"def f():\n    return 1\n", **others, "z.py": b"def f():\n    return 2\n"}
    found = ref.symbols(tree)
    assert scaled.symbols(tree) == found


@pytest.mark.parametrize("most", [0.25, 0.49, 0.5, 0.51, 1.0])
def test_the_bounds_of_a_group_are_those_of_the_reference(most):
    """Groups of exactly `least` tests, and of exactly the share `most`."""
    tree = {"f.py": b"def f(x):\n    if x:\n        a()\n    b()\n\ndef g(x):\n    c()\n\ndef h():\n    d()\n"}
    coverage = {
        f"t{n}": {("f.py", line) for line in ([2, 3] if n < 2 else [2, 4] if n < 4 else [7])} | {("f.py", 10)}
        for n in range(8)
    }
    for least in (1, 2, 3, 4, 5):
        assert scaled.slices(tree, coverage, least, most) == ref.slices(tree, coverage, least, most)
    assert {len(piece.tests) for piece in scaled.slices(tree, coverage, 4, 0.5)} == {4}


def test_coverage_that_every_rank_has_whole_is_joined():
    """As that of a rank which played a test again."""
    tree = {"f.py": b"def f(x):\n    if x:\n        a()\n    b()\n"}
    coverage = {f"t{n}": {("f.py", line) for line in ([2, 3] if n < 3 else [2, 4])} for n in range(9)}
    found = play(dict(dp=2, cp=1), calls.deleted, tree, coverage, 3, 0.5)
    assert found == wanted(tree, coverage, 3, 0.5) and len(found[0][0]) == 1
    assert play(dict(dp=2, cp=1), scaled.slices, tree, coverage) == ref.slices(tree, coverage)


@pytest.mark.parametrize(
    ("call", "arguments", "says"),
    [
        (calls.deleted_from_others, ({}, {}), "tree must hold the same files on every rank"),
        (scaled.slices, ({"f.py": b"def ("}, {"t": [("f.py", 1)]}), "this is no Python source"),
        (scaled.slices, ({}, {}, 0), "least must be at least 1"),
    ],
)
def test_what_is_refused_is_refused_on_every_rank(call, arguments, says):
    with pytest.raises(RuntimeError, match=f"(?s)rank 0.*{says}.*rank 1.*{says}|rank 1.*{says}.*rank 0.*{says}"):
        play(dict(dp=2, cp=1), call, *arguments)


def test_what_one_rank_finds_wrong_all_say_and_none_waits():
    assert play(dict(dp=2, cp=1), calls.dealt, 5, -1) == [10, 11, 12, 13, 14]
    with pytest.raises(
        RuntimeError, match="(?s)rank 0.*3 is wrong.*rank 1.*3 is wrong|rank 1.*3 is wrong.*rank 0.*3 is wrong"
    ):
        play(dict(dp=2, cp=1), calls.dealt, 5, 3)
