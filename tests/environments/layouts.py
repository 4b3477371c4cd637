"""Awkward layouts of packages. `etude tasks make` ends with tasks of each, or with one line that names the cause.

All of them by hand, which takes a quarter of an hour:

    python -m tests.environments.layouts FOLDER && etude tasks make FOLDER/* --out FOLDER.recipes
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LAYOUTS", "Layout", "write_layout"]

CODE = '''
def limit(value, low, high):
    """value, but at least low and at most high."""
    if value < low:
        return low
    if value > high:
        return high
    return value


def deal(cards, hands):
    """Deals cards to so many hands, in turns."""
    dealt = [[] for _ in range(hands)]
    for turn, card in enumerate(cards):
        dealt[turn % hands].append(card)
    return dealt


def initials(name):
    """The first letters of a name's words, each with a dot; a small particle stays as it is."""
    particles = {"van", "von", "de"}
    parts = []
    for word in name.split():
        if word in particles:
            parts.append(word)
        else:
            parts.append(word[0].upper() + ".")
    return " ".join(parts)
'''
CASES = (
    "limit(1, 2, 3) == 2", "limit(9, 2, 3) == 3", "limit(2.5, 2, 3) == 2.5", "limit(-9, -3, -2) == -3",
    "deal([1, 2, 3], 2) == [[1, 3], [2]]", "deal([], 2) == [[], []]", "deal('ab', 3) == [['a'], ['b'], []]",
    "deal('abc', 1) == [['a', 'b', 'c']]", "initials('ada king') == 'A. K.'",
    "initials('ludwig van beethoven') == 'L. van B.'", "initials('') == ''", "initials('cher') == 'C.'",
)  # fmt: skip
NAMES = "limit, deal, initials"


def tests(imports: str, head: str = "") -> str:
    """A file with a test for each case. `imports`: where the functions come from."""
    cases = "".join(f"\n\ndef test_{number}():\n    assert {case}\n" for number, case in enumerate(CASES))
    return f"{head}from {imports} import {NAMES}\n{cases}"


def methods(imports: str) -> str:
    """The same for unittest."""
    test = "\n    def test_{}(self):\n        self.assertTrue({})\n"
    cases = "".join(test.format(number, case) for number, case in enumerate(CASES))
    return f"import unittest\n\nfrom {imports} import {NAMES}\n\n\nclass TestAll(unittest.TestCase):{cases}"


PK, TEST, PLAIN, MARK = "pk/__init__.py", "tests/test_pk.py", tests("pk"), b"\xef\xbb\xbf"
FIXTURES = """import pytest


@pytest.fixture
def low():
    return 2


@pytest.fixture(autouse=True)
def ready():
    yield
"""
WITH_FIXTURES = PLAIN.replace("test_0():\n    assert limit(1, 2, 3)", "test_0(low):\n    assert limit(1, low, 3)")
ODD_IDS = f"""import pytest

from pk import {NAMES}


@pytest.mark.parametrize(("value", "limited"), [(1, 2), (9, 3), (2.5, 2.5)], ids=["a[b]", "c::d / e", "é\\n☃"])
def test_limit(value, limited):
    assert limit(value, 2, 3) == limited
""" + "".join(f"\n\ndef test_{number}():\n    assert {case}\n" for number, case in enumerate(CASES[4:]))
DOCTESTS = CODE.replace('high."""', 'high.\n\n    >>> limit(1, 2, 3)\n    2\n    """')
SUBTESTS = methods("pk").replace("(self):\n        ", "(self):\n        with self.subTest(x=1):\n            ")
DATA = "from pathlib import Path\n\nTWO = int(Path(__file__).with_name('two.txt').read_text())\n"
MORE = "from test_base import TestAll\n\n\nclass TestMore(TestAll):\n    pass\n"
LIES = "for number in range(99):\n    open(f'/tmp/said-{number}', 'w').write('3')\n\n"
FEW = f"from pk import {NAMES}\n\n\ndef test_a():\n    assert {CASES[0]}\n"
TRIVIAL = "".join(f"def test_{name}():\n    assert True\n\n\n" for name in "abc")
FAILING = "".join(f"def {name}(*_):\n    pass\n\n\n" for name in NAMES.split(", "))
NOTHING = "no function or class of its source can be deleted"
NEVER = "test_pk.py cannot be collected"
SMOKE = "from pk import core\n\n\ndef test_there():\n    assert core\n"
SUFFIX_TESTS = {"pk/core_test.py": tests("pk.core"), "pk/test_smoke.py": SMOKE}
NETWORK = "import socket\n\n\ndef test_index():\n    socket.create_connection(('192.0.2.1', 80), 1)\n"


@dataclass(frozen=True)
class Layout:
    """Files of a package, and what becomes of it."""

    files: dict[str, str | bytes]
    says: str = ""
    """Why there are no tasks, as a pattern; empty where there are some."""
    passing: int = 12
    """Tests that pass at least, in the runner and in the grader."""
    links: dict[str, str] | None = None
    """Symbolic links, with what they lead to."""


LAYOUTS: dict[str, Layout] = {
    # Where the source lies.
    "flat-module": Layout({"pk.py": CODE, TEST: PLAIN}),
    "src-folder": Layout({"src/pk/__init__.py": CODE, TEST: PLAIN}),
    "namespace": Layout({"src/space/pk/__init__.py": CODE, TEST: tests("space.pk")}),
    "namespace-tests": Layout({"src/space/pk/__init__.py": CODE, "src/space/pk/tests/test_pk.py": tests("space.pk")}),
    "called-build": Layout({"src/build/__init__.py": "", "src/build/env.py": CODE, TEST: tests("build.env")}),
    "part-called-build": Layout({PK: "", "pk/build/core.py": CODE, TEST: tests("pk.build.core")}),
    "part-called-dist": Layout({PK: "", "pk/dist/__init__.py": CODE, TEST: tests("pk.dist")}),
    "part-called-tags": Layout({PK: "", "pk/tags/__init__.py": CODE, TEST: tests("pk.tags")}),
    "part-called-testing": Layout({PK: "", "pk/testing/core.py": CODE, TEST: tests("pk.testing.core")}),
    "unicode-module": Layout(
        {PK: "", "pk/größe.py": CODE, TEST: tests("pk.größe")}, "'pk/größe.py' cannot be editable"
    ),
    "odd-file-names": Layout({PK: CODE, "pk/c++ parts.py": "x = 1\n", TEST: PLAIN}),
    "build-copy": Layout({PK: CODE, "build/lib/pk/__init__.py": CODE, TEST: PLAIN}),
    "links": Layout({PK: CODE, TEST: PLAIN}, links={"pk/same.py": "__init__.py", "tests/up": ".."}),
    "only-links": Layout({TEST: PLAIN}, "no source of Python; its 1 symbolic links", links={"pk": "/tmp"}),
    "extension": Layout({
        PK: f"try:\n    from pk._fast import limit\nexcept ImportError:\n    pass\n{CODE}", TEST: PLAIN,
        "pk/_fast.c": "int x;\n", "pk/_fast.pyi": "def limit(value, low, high): ...\n",
        "setup.py": "raise SystemExit('is never run')\n",
    }),
    "extension-alone": Layout({PK: "from pk._fast import limit\n", TEST: PLAIN}, NEVER),
    "setup-with-effects": Layout({
        PK: CODE, TEST: PLAIN, "setup.py": "open('/tmp/planted', 'w')\nraise SystemExit(1)\n",
    }),
    # How files are written.
    "carriage-returns": Layout({PK: CODE.replace("\n", "\r\n"), TEST: PLAIN.replace("\n", "\r\n")}),
    "byte-order-marks": Layout({PK: MARK + CODE.encode(), TEST: MARK + PLAIN.encode()}),
    "coding-cookie": Layout({
        PK: f"# -*- coding: latin-1 -*-\n# caf\xe9\n{CODE}".encode("latin-1"),
        TEST: f"# -*- coding: cp1252 -*-\n# \u20ac\n{tests('pk')}".encode("cp1252"),
    }),
    "wrong-bytes": Layout({PK: CODE, TEST: b"# caf\xe9\n" + PLAIN.encode()}, "test_pk.py(: | cannot be coll)", 0),
    "null-bytes": Layout({PK: CODE, TEST: PLAIN + "\0"}, NEVER),
    "python-2": Layout({PK: "print 'hello'\n", TEST: PLAIN}, NEVER),
    # Where tests lie, and what they need.
    "inside-relative": Layout({PK: CODE, "pk/tests/__init__.py": "", "pk/tests/test_pk.py": tests("..")}),
    "suffix": Layout({PK: "", "pk/core.py": CODE, **SUFFIX_TESTS}, passing=13),
    "source-with-suffix": Layout(
        {PK: "", "pk/sign_test.py": CODE, TEST: tests("pk.sign_test")}, "sign_test.py looks like a hack: changes tests"
    ),
    "capitals": Layout({PK: CODE, "Tests/test_PK.py": PLAIN, "Tests/Helper.py": "x = 1\n"}),
    "capital-test": Layout({PK: CODE, "tests/Test_PK.py": PLAIN}, "no tests that pytest collects"),
    "one-file-tests": Layout({PK: CODE, "pk/tests.py": methods("pk")}, "no tests that pytest collects"),
    "unittest": Layout({PK: CODE, TEST: methods("pk")}),
    "subtests": Layout({PK: CODE, TEST: SUBTESTS}),
    "doctests": Layout({PK: DOCTESTS}, "holds no tests"),
    "doctests-too": Layout({PK: DOCTESTS, TEST: PLAIN}),
    "odd-ids": Layout({PK: CODE, TEST: ODD_IDS}, passing=10),
    "fixtures": Layout({PK: CODE, "tests/conftest.py": FIXTURES, TEST: WITH_FIXTURES}),
    "fixtures-inside": Layout({PK: CODE, "pk/conftest.py": FIXTURES, "pk/test_pk.py": WITH_FIXTURES}),
    "fixtures-above": Layout({
        PK: CODE, "conftest.py": "pytest_plugins = ['tests.shared']\n",
        "tests/__init__.py": "", "tests/shared.py": FIXTURES,
        "tests/unit/__init__.py": "", "tests/unit/test_pk.py": WITH_FIXTURES,
    }),
    "broken-conftest": Layout({PK: CODE, "tests/conftest.py": "import nothing_of_this_name\n", TEST: PLAIN}),
    "helper-beside": Layout({
        PK: CODE, "tests/values.py": "TWO = 2\n",
        TEST: tests("pk", "from values import TWO\n").replace("== 2\n", "== TWO\n"),
    }),
    "helper-relative": Layout({
        PK: CODE, "tests/__init__.py": "", "tests/values.py": "TWO = 2\n",
        TEST: tests("pk", "from .values import TWO\n").replace("== 2\n", "== TWO\n"),
    }),
    "test-of-a-test": Layout(
        {PK: CODE, "tests/test_base.py": methods("pk"), TEST: MORE}, passing=36
    ),
    "data-beside": Layout(
        {PK: CODE, "tests/two.txt": "2", TEST: tests("pk", DATA)},
        "12 of its tests pass, but 12 of them fail in the grader", passing=0,
    ),
    "network": Layout({PK: CODE, "tests/test_net.py": NETWORK, TEST: PLAIN}),
    "only-network": Layout({PK: CODE, "tests/test_net.py": NETWORK}, "no test passes"),
    "missing-package": Layout({PK: f"import nothing_of_this_name\n{CODE}", TEST: PLAIN}, NEVER),
    "one-test": Layout({PK: CODE, TEST: FEW}, "fewer than 3 of its tests pass", passing=1),
    "ends-early": Layout({PK: CODE, TEST: tests("pk", "import os\n\nos._exit(0)\n")}, "its tests do not end"),
    "writes-answers": Layout({PK: CODE, TEST: tests("pk", LIES)}),
    # Nothing to do.
    "empty": Layout({}, "no source of Python"),
    "empty-package": Layout({PK: "", TEST: TRIVIAL}, NOTHING, passing=3),
    "constants": Layout({PK: "A = 1\n", TEST: f"import pk\n\n\n{TRIVIAL}"}, NOTHING, passing=3),
    "no-tests": Layout({PK: CODE}, "holds no tests"),
    "failing-tests": Layout({PK: FAILING, TEST: PLAIN}, "no test passes"),
}  # fmt: skip


def write_layout(folder: Path, layout: Layout) -> None:
    """Writes a package into a folder, which is made."""
    for name, data in layout.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    for name, target in (layout.links or {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.symlink(target, folder / name)
    folder.mkdir(parents=True, exist_ok=True)


if __name__ == "__main__":
    for name, layout in LAYOUTS.items():
        write_layout(Path(sys.argv[1]) / name, layout)
