"""Feature deletion: what goes and what stays, by hand; its laws on generated programs, and on files of the standard
library as text."""

import ast
import random
import re
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ref import feature_deletion
from ref.feature_deletion import (
    Demo,
    Piece,
    bodies,
    delete,
    demo,
    difficulty,
    faults,
    joined,
    level,
    slices,
    statements,
    symbols,
    undelete,
)
from ref.source_text import Edit, apply, compiles, parse_source, patch, restore, split

FILLS = (b"pass", b"break", b"raise NotImplementedError")


def gone(source: str, ours: str, theirs: str = "", **more: object) -> list[str]:
    """What is left of `source` by each slice of the tests that execute its lines that hold `ours`; other tests execute
    those with `theirs`."""
    data = source.encode()
    lines = data.decode().split("\n")
    where = [
        {("f.py", n) for n, line in enumerate(lines, 1) if any(mark in line for mark in marks.split())}
        for marks in (ours, theirs)
    ]
    coverage = {**{f"o{n}": where[0] for n in range(3)}, **{f"t{n}": where[1] for n in range(3)}, **more}
    found = slices({"f.py": data}, coverage)
    return [delete({"f.py": data}, piece)["f.py"].decode() for piece in found if set(piece.tests) == {"o0", "o1", "o2"}]


@pytest.mark.parametrize(
    ("source", "ours", "theirs", "left"),
    [
        (
            "def f(x):|    if x:|        ours()|    theirs()|",
            "ours",
            "if theirs",
            "def f(x):|    if x:|        pass|    theirs()|",
        ),
        ("def f(x):|    ours()|    theirs()|", "ours", "theirs", "def f(x):|    theirs()|"),
        (
            'def f(x):|    "Doc."|    # how|    ours()|    # so||# kept|',
            "ours",
            "",
            'def f(x):|    "Doc."|    raise NotImplementedError||# kept|',
        ),
        ("def f(x):|    theirs()|    # why|    ours()|", "ours", "theirs", "def f(x):|    theirs()|"),
        (
            "def f(x):|    if x:|        theirs()|    elif ours():|        ours()|",
            "ours",
            "if: theirs",
            "def f(x):|    if x:|        theirs()|",
        ),
        (
            "def f(x):|    if x: theirs()|    else: ours()  # how|",
            "ours",
            "theirs",
            "def f(x):|    if x: theirs()|    else: pass|",
        ),
        (
            "def f(x):|    try:|        theirs()|    except E:|        ours()|    finally:|        theirs()|",
            "ours",
            "theirs",
            "def f(x):|    try:|        theirs()|    except E:|        pass|    finally:|        theirs()|",
        ),
        (
            "def f(x):|    match x:|        case 1:|            ours()|        case _: theirs()|",
            "ours",
            "match theirs",
            "def f(x):|    match x:|        case 1:|            pass|        case _: theirs()|",
        ),
        (
            "def f(x):|    for i in x: # theirs|        ours()|    else:|        theirs()|",
            "ours",
            "theirs",
            "def f(x):|    for i in x: # theirs|        pass|    else:|        theirs()|",
        ),
        (
            "async def f(x):|    async with x: # theirs|        await ours()|",
            "ours",
            "theirs",
            "async def f(x):|    async with x: # theirs|        pass|",
        ),
        (
            "class A:|    @d|    def f(x): # doc|        ours()|    y = 1|",
            "ours",
            "",
            "class A:|    @d|    def f(x): # doc|        raise NotImplementedError|    y = 1|",
        ),
        (
            "def f(x):|    @(|      ours)|    def g(): # ours|        ours()|    theirs()|",
            "ours def",
            "theirs",
            "def f(x):|    theirs()|",
        ),
        (
            "def f(x):|    def g(): # theirs|        ours()|    theirs()|",
            "ours",
            "theirs",
            "def f(x):|    def g(): # theirs|        raise NotImplementedError|    theirs()|",
        ),
        (
            "def f(x):|    class A: # theirs|        y = ours()|    theirs()|",
            "ours",
            "theirs",
            "def f(x):|    class A: # theirs|        pass|    theirs()|",
        ),
        ("def f(x): ours(); return 1|", "ours", "", "def f(x): raise NotImplementedError|"),
        ('def f(x): "Doc."; ours()|', "ours", "", 'def f(x): "Doc."; raise NotImplementedError|'),
        (
            "def f(x):|    if x: # theirs|        ours()  |    theirs()|",
            "ours",
            "theirs",
            "def f(x):|    if x: # theirs|        pass|    theirs()|",
        ),
        ("def f(x):|    ours(); y = 1|    theirs()|", "ours", "theirs", "def f(x):|    theirs()|"),
        ("def f(x):|    ours(); \\|  y = 1|    theirs()|", "ours y", "theirs", "def f(x):|    theirs()|"),
        ("def f(x):|    ours(1,|         2)|    theirs()|", "ours 2)", "theirs", "def f(x):|    theirs()|"),
        (
            'def f(x):|    y = """ # theirs|    # no comment"""|    ours()|',
            "ours",
            "theirs",
            'def f(x):|    y = """ # theirs|    # no comment"""|',
        ),
        (
            "def f(x):|    ours()|    if x:|        nobody()|    ours()",
            "ours",
            "",
            "def f(x):|    raise NotImplementedError",
        ),
        (
            "def f(x):|    if x: # theirs|        ours()|        nobody()|    theirs()|",
            "ours",
            "theirs",
            "def f(x):|    if x: # theirs|        pass|    theirs()|",
        ),
        ("def f(x):|    theirs()|    nobody()|    ours()|", "ours", "theirs", "def f(x):|    theirs()|    nobody()|"),
    ],
)
def test_a_slice_by_hand(source, ours, theirs, left):
    """A bar stands for the end of a line."""
    assert gone(source.replace("|", "\n"), ours, theirs) == [left.replace("|", "\n")]


@pytest.mark.parametrize(
    ("source", "ours", "theirs"),
    [
        ("x = ours()\nclass A:\n    y = ours()\n", "ours", "theirs"),  # runs at import
        ("def f(x):\n    ours() # theirs\n", "ours", "theirs"),  # others execute it too
        ("def f(x):\n    if ours(): # theirs\n        nobody()\n    theirs()\n", "ours", "theirs"),
        ("def f(x):\n    theirs()\n    yield ours\n", "ours", "theirs"),  # would be no generator any more
        ("def f(x):\n    if x: # theirs\n        pass\n    theirs()\n", "pass", "theirs"),  # it would be what it is
        ("def f(x):\n    raise NotImplementedError\ndef g(x):\n    return theirs()\n", "Error", "theirs"),
    ],
)
def test_no_slice_of(source, ours, theirs):
    assert gone(source, ours, theirs) == []


@pytest.mark.parametrize(
    "source", ['def f(x):\n    "Doc."; ours()\n    theirs()\n', "def f(x):\n    ours(); \\\n  theirs()\n"]
)
def test_what_shares_its_line_stays(source):
    assert gone(source, "ours", "theirs") == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "# coding: latin-1\ndef f(x='é'): return 1\n".encode("latin-1"),
            "# coding: latin-1\ndef f(x='é'): raise NotImplementedError\n".encode("latin-1"),
        ),
        (b"\xef\xbb\xbfdef f(): return 1\n", b"\xef\xbb\xbfdef f(): raise NotImplementedError\n"),
    ],
)
def test_a_changed_line_keeps_its_encoding(before, after):
    (piece,) = bodies({"f.py": before})
    assert delete({"f.py": before}, piece)["f.py"] == after


def test_what_the_compiler_refuses_is_no_slice():
    """Without `y = ours` the nonlocal statement would have no variable, which the parser does not mind."""
    source = "def f(x):\n    if x: # theirs\n        y = ours()\n    def g(): # theirs\n        nonlocal y\n"
    assert gone(source, "ours", "theirs") == []
    assert not compiles(b"def f():\n    def g():\n        nonlocal y\n") and compiles(b"x = 1\n")


def test_one_generator_of_two_may_lose_a_yield():
    source = "def f(x):\n    yield theirs\n    yield ours\n"
    assert gone(source, "ours", "theirs") == ["def f(x):\n    yield theirs\n"]
    assert gone("def f(x):\n    yield ours\n", "ours") == ["def f(x):\n    raise NotImplementedError\n"]


def test_groups():
    """A slice needs three tests, at most half of all, and none that runs at import; it holds all that only some of its
    tests execute."""
    source = b"def f(x):\n    if x: a()\n    b()\n\ndef g():\n    c()\n"
    tree = {"f.py": source}
    few = {f"t{n}": {("f.py", 6)} for n in range(2)} | {f"u{n}": {("f.py", 3)} for n in range(4)}
    assert [piece.tests for piece in slices(tree, few)] == []
    assert [len(piece.tests) for piece in slices(tree, few, least=2)] == [2]
    assert [len(piece.tests) for piece in slices(tree, few, least=2, max_share=1.0)] == [4, 2]
    at_import = {**few, "": {("f.py", 6)}}
    assert slices(tree, at_import, least=2) == ()
    several = {"a.py": b"def f(x):\n    return 1\n", "b.py": b"def g(x):\n    return 2\n"}
    both = {f"t{n}": {("a.py", 2), ("b.py", 2)} for n in range(3)} | {f"u{n}": {("elsewhere.py", 1)} for n in range(3)}
    (piece,) = slices(several, both)
    assert (
        [one.file for one in piece.patches] == ["a.py", "b.py"]
        and piece.name == "a.py:f+b.py:g"
        and piece.tests == ("t0", "t1", "t2")
    )
    for least, most in ((0, 0.5), (3, 0.0), (3, 1.5)):
        with pytest.raises(ValueError, match="least must be at least 1 and max_share a share above 0"):
            slices(tree, few, least, most)


def test_bodies_by_hand():
    source = (
        b'class A:\n    def f(self):\n        """Doc."""\n        # how\n        return 1\n\n    def g(self): ...\n\n'
    )
    source += b'    def h(self):\n        "Doc."\n\n@d\nasync def k(x): return x # how\n'
    found = bodies({"m.py": source, "n.py": b"no python here", "o.txt": b"def f(): return 1"})
    assert [piece.name for piece in found] == ["m.py:A.f", "m.py:k"]
    assert delete({"m.py": source}, found[0])["m.py"] == source.replace(
        b"        # how\n        return 1\n", b"        raise NotImplementedError\n"
    )
    assert delete({"m.py": source}, found[1])["m.py"] == source.replace(b"return x # how", b"raise NotImplementedError")


def test_statements_by_hand():
    """Statements that end in another one's line, that yield, or that are all of a function stay."""
    source = b'''def f(x):
    """Doc."""
    # how
    y = [x,
         1]
    if y: return x
    for item in y:
        x += item
    a = 1; b = 2
    def inner():
        return 3
    return x  # done

def only(): return 1

def many(x):
    z = yield x
    z.append(1)
'''
    found = statements({"m.py": source, "n.py": b"no python here", "o.txt": source})
    assert [piece.name for piece in found] == ["m.py:f"] * 3 + ["m.py:many"]
    holes = [
        (b"    # how\n    y = [x,\n         1]\n", b"    raise NotImplementedError\n"),
        (b"        x += item\n", b"        raise NotImplementedError\n"),
        (b"    return x  # done\n", b"    raise NotImplementedError\n"),
        (b"    z.append(1)\n", b"    raise NotImplementedError\n"),
    ]
    for piece, (old, new) in zip(found, holes, strict=True):
        assert delete({"m.py": source}, piece)["m.py"] == source.replace(old, new)


def test_a_statement_without_which_the_file_does_not_compile_stays():
    source = b"def f(x):\n    y = x\n    def g():\n        nonlocal y\n        y = 1\n    g()\n"
    assert {piece.patches[0].edits[0].first for piece in statements({"m.py": source})} == {5, 6}


PACKAGE = {
    "p/__init__.py": b'from .m import (\n    a,  # first\n    b,\n)\nfrom p.n import c as see, d\n\n__all__ = ["a", '
    b'"b", "see", "d"]\n',
    "p/m.py": b'"""M."""\n__all__ = [\n    "a",\n    "b",\n]\n\ndef a():\n    return b()\n\n'
    b"# About b.\n@(\n  str)\ndef b():\n    return 1\n\ndef e(b):\n    return b\n",
    "p/n.py": b"from .m import e\n\nclass c:\n    pass\n\nif c:\n    def d(): return 1\n\ndef x(y=e): return y\n",
    "p/q.py": b"from . import m, n\nfrom p import *\n\nuse = n.d\n\ndef late():\n    from p import a\n    return a\n",
}


def test_symbols_by_hand():
    found = {piece.name: piece for piece in symbols(PACKAGE)}
    # c is used by the `if`, d by an attribute and e by a default, all at import
    assert sorted(found) == ["p/m.py:a", "p/m.py:b", "p/n.py:x", "p/q.py:late"]
    left = delete(PACKAGE, found["p/m.py:a"])
    assert (
        left["p/__init__.py"]
        == b'from .m import (\n    b,\n)\nfrom p.n import c as see, d\n\n__all__ = ["b", "see", "d"]\n'
    )
    assert left["p/m.py"] == PACKAGE["p/m.py"].replace(b"def a():\n    return b()\n", b"").replace(b'    "a",\n', b"")
    assert left["p/q.py"] == PACKAGE["p/q.py"]
    left = delete(PACKAGE, found["p/m.py:b"])
    assert (
        left["p/m.py"]
        == b'"""M."""\n__all__ = [\n    "a",\n]\n\ndef a():\n    return b()\n\n\ndef e(b):\n    return b\n'
    )
    assert undelete(left, found["p/m.py:b"]) == PACKAGE


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("from p.m import f", None),
        ("from p.m import f, g", "from p.m import g"),
        ("from p.m import g, f", "from p.m import g"),
        ("from p.m import g, f as h, k", "from p.m import g, k"),
        ("from p.m import (f,\n  g)", "from p.m import (\n  g)"),
        ("from p.m import (g,\n  f)", "from p.m import (g,\n  )"),
        ("from p.m import (g, f,)", "from p.m import (g,)"),
        ("from p.m import f; x = 1", "refused"),
        ("from p.m import g, \\\n  f", "refused"),
        ("from p.m import f\n__all__ = ['f']", "__all__ = []"),
        ("from p.m import f\n__all__ = ('f', 'g')", "__all__ = ('g')"),
        ("from p.m import f\n__all__ = ('g', 'f')", "__all__ = ('g', )"),
        ("from p.m import f\n__all__ += ['g', 'f',]", "__all__ += ['g',]"),
        ("try:\n    from p.m import f\nexcept ImportError: pass", "try:\n    pass\nexcept ImportError: pass"),
        ("from p.m import f\ng = f", "refused"),
        ("from p.m import f\nclass A(f): pass", "refused"),
        ("from p.m import f\ndef k(x: f): pass", "refused"),
        (
            "from __future__ import annotations\nfrom p.m import f\ndef k(x: f): pass",
            "from __future__ import annotations\ndef k(x: f): pass",
        ),
        ("from p.m import f\ndef k(f): return f", "def k(f): return f"),
        ("import p.m\nx = p.m.f", "refused"),
        ("import p.m\ndef k(): return p.m.f", "import p.m\ndef k(): return p.m.f"),
        ("from p.m import f as h\ny = h", "refused"),
    ],
)
def test_what_imports_a_symbol(line, left):
    """Either nothing is left of the name at import, or the symbol is not offered. `__all__ = ('g')` would be a string:
    such a tuple is refused."""
    tree = {"p/m.py": b"def f():\n    return 1\n", "p/other.py": line.encode() + b"\n"}
    found = [piece for piece in symbols(tree) if piece.name == "p/m.py:f"]
    if left == "refused" or left == "__all__ = ('g')":
        assert not found
        return
    after = delete(tree, found[0])
    assert after["p/m.py"] == b"" and after["p/other.py"].decode() == ("" if left is None else left + "\n")


def test_a_symbol_that_takes_the_name_of_the_encoding_along_stays():
    """The comment stands directly above it. Without it, what is left would be read as other letters."""
    for above, found in ((b"# coding: latin-1\n", ["f.py:g"]), (b"# coding: latin-1\n\n", ["f.py:f", "f.py:g"])):
        tree = {"f.py": above + b"def f():\n    return 1\n\ndef g():\n    return '\xc3\xa9'\n"}
        assert [piece.name for piece in symbols(tree)] == found


# The laws, on programs that nobody wrote.

SIMPLE = [
    "a()",
    "b = 'é'",
    "c = (1,\n 2)",
    'd = """x\n# no comment\n"""',
    "e = 1; f()",
    "g = 1 \\\n + 2",
    "return 1",
    "# about it",
    "h = [i for i in ()]",
    "yield 1",
]
SIMPLE += [
    "del a",
    "(\n b\n)",
    "f'{b}'",
    "if a: b()",
    "for i in c: a(); b()",
    "",
    "def k(): return 1",
    "@d\n@(\n e)\ndef m(): pass",
]
HEADS = [
    "if a:",
    "while a:",
    "for i in a:",
    "with a as b:",
    "def k(x=1):",
    "async def k():",
    "class K:",
    "@d\ndef k():",
    "try:",
    "match a:",
]


@st.composite
def suites(draw, depth):
    """Lines of statements, not yet indented."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        head = draw(st.sampled_from(HEADS)) if depth and draw(st.booleans()) else None
        if head is None:
            found += draw(st.sampled_from(SIMPLE)).split("\n")
            continue
        inner = [" " + line for line in [*draw(suites(depth - 1)), "z()"]]
        more = [" " + line for line in draw(suites(depth - 1))] + [" z()"]
        if head == "match a:":
            found += [head, " case 1:", *(" " + line for line in inner), " case _: b()"]
        elif head == "try:":
            found += [
                head,
                *inner,
                "except E:",
                *more,
                *draw(st.sampled_from([[], ["finally:", *more], ["else: a()", "finally: b()"]])),
            ]
        else:
            tail = {
                "if a:": [[], ["else:", *more], ["elif b:", *more], ["elif b: a()", "else:", *more]],
                "for i in a:": [[], ["else:", *more]],
            }
            doc = draw(st.sampled_from([[], [' "Doc."']])) if head.startswith(("def", "async", "class")) else []
            found += [*head.split("\n"), *doc, *inner, *draw(st.sampled_from(tail.get(head, [[]])))]
    return found


@st.composite
def programs(draw):
    lines = [
        "def top():",
        *(" " + line for line in [*draw(suites(2)), "z()"]),
        *draw(st.sampled_from([[], ["x = 1"], ["class A:", " def f(self): return 1"]])),
    ]
    cookie = draw(st.sampled_from(["", "# coding: latin-1", "\ufeff"]))
    lines = [cookie, *lines] if cookie.startswith("#") else [cookie + lines[0], *lines[1:]]
    end = draw(st.sampled_from(["\n", "\r\n", "\r"]))
    text = end.join(lines) + draw(st.sampled_from(["", end]))
    data = text.encode("latin-1" if cookie.startswith("#") else "utf-8")
    return data if compiles(data) else f"def top():{end} a(){end} b(){end}".encode()


@st.composite
def tables(draw, lines):
    """Coverage: tests that execute some runs of lines each."""
    places = st.tuples(st.integers(1, lines), st.integers(0, 3))
    return {
        name: {("f.py", n) for at, more in draw(st.lists(places, max_size=4)) for n in range(at, at + more + 1)}
        for name in ("", *"tuvwxyz")
    }


def holds(tree: dict[str, bytes], piece: Piece) -> None:
    """All that must be true of every piece of every way."""
    after = delete(tree, piece)
    assert after.keys() == tree.keys() and after != tree
    assert delete(after, piece) == after
    assert undelete(after, piece) == tree and undelete(tree, piece) == tree
    for one in piece.patches:
        parse_source(after[one.file])
        # What is left are lines of the original in their order, and one line for each edit that fills a hole.
        lines, kept, fills = split(tree[one.file]), [], 0
        edits = {number: edit for edit in reversed(one.edits) for number in range(edit.first, edit.last + 1)}
        for number, line in enumerate(lines, 1):
            if not (edit := edits.get(number)):
                kept.append(line)
            elif number == edit.first and edit.new:
                kept.append(edit.new)
                fills += 1
        assert b"".join(kept) == after[one.file]
        assert fills == sum(bool(edit.new) for edit in one.edits)
    for file in tree.keys() - {one.file for one in piece.patches}:
        assert after[file] == tree[file]


@settings(max_examples=100)
@given(st.data())
def test_laws_of_slices(data):
    tree = {"f.py": data.draw(programs())}
    table = data.draw(tables(len(split(tree["f.py"]))))
    found = slices(tree, table, least=1, max_share=0.9)
    for piece in found:
        holds(tree, piece)
        assert compiles(delete(tree, piece)["f.py"]) and 1 <= len(piece.tests) <= 6 and "" not in piece.tests
        for edit in piece.patches[0].edits:
            run = {
                test
                for test, lines in table.items()
                if any(("f.py", n) in lines for n in range(edit.first, edit.last + 1))
            }
            assert run and run <= set(piece.tests)
            assert not edit.new or edit.new.rstrip(b"\r\n").endswith(FILLS)
    shuffled = data.draw(st.permutations(list(table)))
    assert slices(tree, {test: sorted(table[test], reverse=True) for test in shuffled}, least=1, max_share=0.9) == found


def test_a_loop_without_its_body_ends():
    source = "def f(x):\n    while x:  # theirs\n        x = g(x)  # ours\n    return x  # theirs\n"
    assert gone(source, "ours", "theirs") == [
        "def f(x):\n    while x:  # theirs\n        break\n    return x  # theirs\n"
    ]


def test_line_ends_that_meet_are_not_put_back_wrongly():
    """Without the second line, a carriage return and a line feed become one end of a line."""
    before = b"x = 1\ry = 2\n\nz = 3\n"
    one = patch("f.py", before, [Edit(2, b"y = 2\n", b"")])
    with pytest.raises(ValueError, match="line ends are of several kinds"):
        restore(one, apply(one, before))


@settings(max_examples=100)
@given(programs())
def test_laws_of_bodies_and_symbols(program):
    tree = {"f.py": program, "g.py": b"from f import (top,\n x)\n"}
    whole, found = bodies(tree), symbols(tree)
    assert any(piece.name == "f.py:top" for piece in whole) and any(piece.name == "f.py:top" for piece in found)
    for piece in [*whole, *found]:
        holds(tree, piece)
        assert all(compiles(data) for data in delete(tree, piece).values())
    for piece in found:
        name = piece.name.rpartition(":")[2]
        left = ast.parse(delete(tree, piece)["f.py"])
        assert name not in {getattr(node, "name", None) for node in left.body}


def generators(data: bytes) -> dict[str, set[bool]]:
    """Whether the functions of a name are generators: a program may define one name twice."""
    found: dict[str, set[bool]] = {}
    for name, node in feature_deletion.functions(ast.parse(data)):
        found.setdefault(name, set()).add(any(isinstance(one, ast.Yield) for one in feature_deletion.own(node)))
    return found


@settings(max_examples=50)
@given(st.data())
def test_a_generator_stays_one(data):
    tree = {"f.py": data.draw(programs())}
    for piece in slices(tree, data.draw(tables(len(split(tree["f.py"])))), least=1, max_share=0.9):
        after = delete(tree, piece)["f.py"]
        empty = {
            name for name, node in feature_deletion.functions(ast.parse(after)) if isinstance(node.body[-1], ast.Raise)
        }
        left, before = generators(after), generators(tree["f.py"])
        assert all(left[name] <= before[name] for name in left if name not in empty)


LIBRARY = Path(sysconfig.get_path("stdlib"))
FILES = [
    "json/__init__.py",
    "json/decoder.py",
    "json/encoder.py",
    "json/scanner.py",
    "json/tool.py",
    "textwrap.py",
    "dataclasses.py",
    "argparse.py",
]


@pytest.mark.parametrize("name", FILES)
def test_files_of_the_standard_library(name):
    """As text: nothing of it is executed."""
    tree = {name: (LIBRARY / name).read_bytes()}
    lines, draw = len(split(tree[name])), random.Random(name)
    table = {
        f"t{n}": {(name, line + more) for line in draw.choices(range(1, lines), k=12) for more in range(9)}
        for n in range(5)
    }
    ways = [bodies(tree), symbols(tree), slices(tree, table, least=1, max_share=0.9), statements(tree)]
    assert ways[0] and (ways[2] and ways[3] or lines < 100)
    for way in ways:
        for piece in draw.sample(way, min(5, len(way))):
            holds(tree, piece)
            assert difficulty(tree, piece).lines > 0


# Patches, and what is wrong with a task.


def test_a_patch_knows_its_file():
    found = patch("f.py", b"a\nb\r\nc", [Edit(3, b"c", b"z"), Edit(1, b"a\n", b"")])
    assert (
        apply(found, b"a\nb\r\nc") == b"b\r\nz" == apply(found, b"b\r\nz") and restore(found, b"b\r\nz") == b"a\nb\r\nc"
    )
    for other in (b"", b"a\nb\r\nd"):
        with pytest.raises(ValueError, match="f.py is not the file that the piece was cut from"):
            apply(found, other)
    for edits in (
        [Edit(1, b"x\n", b"")],
        [Edit(1, b"a\nb\r\n", b""), Edit(2, b"b\r\n", b"")],
        [Edit(4, b"d", b"")],
        [Edit(1, b"", b"x")],
    ):
        with pytest.raises(ValueError, match="not those that the edit takes away, or two edits overlap"):
            patch("f.py", b"a\nb\r\nc", edits)
    with pytest.raises(ValueError, match="change nothing"):
        patch("f.py", b"a\n", [Edit(1, b"a\n", b"a\n")])
    with pytest.raises(ValueError, match="the tree lacks f.py"):
        delete({}, Piece("slice", "f.py:f", (found,)))


@given(st.binary(max_size=60).map(lambda data: data.translate(None, b"\0")))
def test_lines_are_all_of_a_file(data):
    assert b"".join(split(data)) == data and b"" not in split(data)
    try:
        source = parse_source(data)
    except ValueError:
        return
    assert b"".join(source.raw) == data and len(source.raw) == len(source.lines)


@pytest.mark.parametrize(
    "data",
    [
        b"def f(:\n",
        b"\x00",
        b"# coding: no-such\nx = 1\n",
        b"x = '\xe9'\n",
        b"# coding: utf-7\nx = '+AOk-'\n",
        b"(" * 1000,
    ],
)
def test_no_source(data):
    with pytest.raises(ValueError):
        parse_source(data)


def test_faults_by_hand():
    tree = {"f.py": b"def f(x):\n    return 1\n"}
    (piece,) = slices(tree, {**{f"t{n}": {("f.py", 2)} for n in range(3)}, **{f"u{n}": set() for n in range(3)}})
    before = {**{f"t{n}": "passed" for n in range(3)}, **{f"u{n}": "passed" for n in range(3)}, "w": "failed"}
    good = {**before, "t0": "failed", "t1": "failed", "t2": "failed"}
    assert faults(tree, piece, before, good) == ()
    for change, said in (
        ({"t2": "passed"}, ("2 tests fail; at least 3 must",)),
        ({"u1": "failed"}, ("u1 fails, although it never executed the piece",)),
        ({"u1": "skipped"}, ("u1 was skipped",)),
        ({"test_x.py": "error"}, ("test_x.py cannot be collected",)),
        ({"w": "error"}, ("w cannot be collected",)),
    ):
        assert faults(tree, piece, before, {**good, **change}) == said
    assert faults(tree, piece, before, {name: said for name, said in good.items() if name != "u2"}) == (
        "u2 was not run",
    )
    with pytest.raises(ValueError, match="is not the file"):
        faults({"f.py": b"def f(x):\n    return 2\n"}, piece, before, good)


# Difficulty.


def test_difficulty_by_hand():
    tree = {
        "a.py": b"def f(x):\n    # how\n    y = 1\n\n    return y\n\ndef g():\n    return f(1)\n\nclass A:\n   "
        b" def m(self):\n        return mod.f\n",
        "b.py": b"def h():\n    return f\n",
    }
    table = {
        **{f"t{n}": {("a.py", 3), ("a.py", 5), ("b.py", 2)} for n in range(3)},
        **{f"u{n}": {("a.py", 8)} for n in range(4)},
    }
    piece = next(piece for piece in slices(tree, table) if len(piece.tests) == 3)
    found = difficulty(tree, piece)
    assert (found.lines, found.functions, found.files, found.tests, found.callers) == (3, 2, 2, 3, 2)
    assert found.bits == pytest.approx(2 + 1 + 1 + 1 + 1.584962500721156)
    assert difficulty(tree, piece, failing=9).bits == pytest.approx(found.bits + 1)
    whole = next(piece for piece in symbols(tree) if piece.name == "a.py:f")
    assert difficulty(tree, whole).callers == 3 and difficulty(tree, whole).functions == 1


def test_a_piece_that_holds_another_is_harder():
    tree = {"f.py": b"def f(x):\n    if x:\n        a()\n        b()\n    c()\n    return 1\n"}
    table = {
        **{f"t{n}": {("f.py", line) for line in (2, 3, 4, 5, 6)} for n in range(3)},
        **{f"u{n}": {("f.py", line) for line in (2, 5, 6)} for n in range(3)},
    }
    table |= {f"v{n}": set() for n in range(6)}
    small, large = sorted((piece for piece in slices(tree, table)), key=lambda piece: len(piece.tests))
    assert difficulty(tree, small).bits < difficulty(tree, large).bits


def lying(number: int, files: str, tests: str) -> Piece:
    """A piece with a line in each of some files."""
    patches = tuple(patch(file, b"x = 1\ny = 2\n", [Edit(1, b"x = 1\n", b"pass\n")]) for file in files)
    return Piece("slice", f"{files}:f{number}", patches, tuple(tests))


def test_pieces_are_joined_by_hand():
    """In whatever order: patches by file, tests of all, and a tree from which all of it is gone and comes back."""
    one, other = lying(0, "ac", "uv"), lying(1, "b", "w")
    both = joined([other, one])
    assert (
        both == joined([one, other])
        and [part.file for part in both.patches] == ["a", "b", "c"]
        and both.tests == ("u", "v", "w")
    )
    assert both.way == "several" and both.name == "ac:f0+b:f1"
    tree = dict.fromkeys("abcd", b"x = 1\ny = 2\n")
    left = delete(tree, both)
    assert left == {**dict.fromkeys("abc", b"pass\ny = 2\n"), "d": tree["d"]} and undelete(left, both) == tree
    assert joined([one, lying(1, "b", "uv")]).tests == ("u", "v"), "the same tests are no overlap"


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ([lying(0, "a", "u")], "at least two; got 1"),
        ([lying(0, "a", "u"), lying(1, "a", "v")], "a:f0 and a:f1 change the same file, or share"),
        ([lying(0, "ab", "u"), lying(1, "c", "w"), lying(2, "b", "v")], "ab:f0 and b:f2 change the same file"),
        (
            [lying(0, "a", "uv"), lying(1, "b", "vw")],
            "a:f0 and b:f1 change the same file, or share a part of their tests",
        ),
    ],
)
def test_pieces_that_are_not_independent(pieces, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        joined(pieces)


@given(st.integers(0, 5), st.integers(0, 20), st.integers(0, 20))
def test_levels(now, solved, more):
    tried = solved + more
    after = level(now, solved, tried, 5)
    assert 0 <= after <= 5 and abs(after - now) <= 1
    assert after >= level(now, max(0, solved - 1), tried, 5)
    assert level(now, 0, 0, 5) == now


def test_levels_by_hand():
    assert [level(2, solved, 8, 5) for solved in (0, 1, 2, 6, 7, 8)] == [1, 1, 2, 2, 3, 3]
    assert level(5, 8, 8, 5) == 5 and level(0, 0, 8, 5) == 0
    for bad in ((6, 1, 2, 5), (0, 3, 2, 5), (0, 1, 2, 5, 0.8, 0.2)):
        with pytest.raises(ValueError, match="must hold; got"):
            level(*bad)


def test_demo():
    """Slices find more tasks in one file than it has functions."""
    said = []
    found = demo(Demo(), lambda *place, **row: said.append((place, row["way"])))
    assert said == [((1, 3), "slice"), ((2, 3), "body"), ((3, 3), "symbol")]
    assert (found["tried@slice"], found["valid@slice"], found["valid@body"], found["valid@symbol"]) == (11, 10, 3, 3)
    assert found == demo() and found["bits@slice"] < found["bits@body"]
