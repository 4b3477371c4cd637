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
    cases = "".join(f"\n    def test_{number}(self):\n        self.assertTrue({case})\n" for number, case in enumerate(CASES))
    return f"import unittest\n\nfrom {imports} import {NAMES}\n\n\nclass TestAll(unittest.TestCase):{cases}"


FIXTURES = "import pytest\n\n\n@pytest.fixture\ndef low():\n    return 2\n\n\n@pytest.fixture(autouse=True)\ndef ready():\n    yield\n"
WITH_FIXTURES = tests("pk").replace("def test_0():\n    assert limit(1, 2, 3)", "def test_0(low):\n    assert limit(1, low, 3)")
ODD_IDS = f"""import pytest

from pk import {NAMES}


@pytest.mark.parametrize(("value", "limited"), [(1, 2), (9, 3), (2.5, 2.5)], ids=["a[b]", "c::d / e", "é\\n☃"])
def test_limit(value, limited):
    assert limit(value, 2, 3) == limited
""" + "".join(f"\n\ndef test_{number}():\n    assert {case}\n" for number, case in enumerate(CASES[4:]))
DOCTESTS = CODE.replace('high."""', 'high.\n\n    >>> limit(1, 2, 3)\n    2\n    """')
SUFFIX_TESTS = {"pk/core_test.py": tests("pk.core"), "pk/test_smoke.py": "from pk import core\n\n\ndef test_there():\n    assert core\n"}
NETWORK = "import socket\n\n\ndef test_index():\n    socket.create_connection(('192.0.2.1', 80), 1)\n"


@dataclass(frozen=True)
class Layout:
    """Files of a package, and what becomes of it."""

    files: dict[str, str | bytes]
    says: str = ""
    """Why there are no tasks, as a pattern; empty where there are some."""
    passing: int = 12
    """Tests that pass, in the runner and in the grader."""
    links: dict[str, str] | None = None
    """Symbolic links, with what they lead to."""


LAYOUTS: dict[str, Layout] = {
    # Where the source lies.
    "flat-module": Layout({"pk.py": CODE, "tests/test_pk.py": tests("pk")}),
    "src-folder": Layout({"src/pk/__init__.py": CODE, "tests/test_pk.py": tests("pk")}),
    "namespace": Layout({"src/space/pk/__init__.py": CODE, "tests/test_pk.py": tests("space.pk")}),
    "namespace-tests": Layout({"src/space/pk/__init__.py": CODE, "src/space/pk/tests/test_pk.py": tests("space.pk")}),
    "called-build": Layout({"src/build/__init__.py": "", "src/build/env.py": CODE, "tests/test_pk.py": tests("build.env")}),
    "part-called-build": Layout({"pk/__init__.py": "", "pk/build/core.py": CODE, "tests/test_pk.py": tests("pk.build.core")}),
    "part-called-dist": Layout({"pk/__init__.py": "", "pk/dist/__init__.py": CODE, "tests/test_pk.py": tests("pk.dist")}),
    "part-called-tags": Layout({"pk/__init__.py": "", "pk/tags/__init__.py": CODE, "tests/test_pk.py": tests("pk.tags")}),
    "part-called-testing": Layout({"pk/__init__.py": "", "pk/testing/core.py": CODE, "tests/test_pk.py": tests("pk.testing.core")}),
    "unicode-module": Layout({"pk/__init__.py": "", "pk/größe.py": CODE, "tests/test_pk.py": tests("pk.größe")}),
    "odd-file-names": Layout({"pk/__init__.py": CODE, "pk/c++ parts.py": "x = 1\n", "tests/test_pk.py": tests("pk")}),
    "build-copy": Layout({"pk/__init__.py": CODE, "build/lib/pk/__init__.py": CODE, "tests/test_pk.py": tests("pk")}),
    "links": Layout({"pk/__init__.py": CODE, "tests/test_pk.py": tests("pk")}, links={"pk/same.py": "__init__.py", "tests/up": ".."}),
    "only-links": Layout({"tests/test_pk.py": tests("pk")}, "no source of Python; its 1 symbolic links", links={"pk": "/tmp"}),
    "extension": Layout({
        "pk/__init__.py": f"try:\n    from pk._fast import limit\nexcept ImportError:\n    pass\n{CODE}", "pk/_fast.c": "int x;\n",
        "pk/_fast.pyi": "def limit(value, low, high): ...\n", "setup.py": "raise SystemExit('is never run')\n", "tests/test_pk.py": tests("pk"),
    }),
    "extension-alone": Layout({"pk/__init__.py": "from pk._fast import limit\n", "tests/test_pk.py": tests("pk")}, "test_pk.py cannot be collected"),
    "setup-with-effects": Layout({
        "pk/__init__.py": CODE, "tests/test_pk.py": tests("pk"), "setup.py": "open('/tmp/planted', 'w')\nraise SystemExit(1)\n",
    }),
    # How files are written.
    "carriage-returns": Layout({"pk/__init__.py": CODE.replace("\n", "\r\n"), "tests/test_pk.py": tests("pk").replace("\n", "\r\n")}),
    "byte-order-marks": Layout({"pk/__init__.py": b"\xef\xbb\xbf" + CODE.encode(), "tests/test_pk.py": b"\xef\xbb\xbf" + tests("pk").encode()}),
    "coding-cookie": Layout({
        "pk/__init__.py": f"# -*- coding: latin-1 -*-\n# caf\xe9\n{CODE}".encode("latin-1"),
        "tests/test_pk.py": f"# -*- coding: cp1252 -*-\n# \u20ac\n{tests('pk')}".encode("cp1252"),
    }),
    "wrong-bytes": Layout({"pk/__init__.py": CODE, "tests/test_pk.py": b"# caf\xe9\n" + tests("pk").encode()}, "test_pk.py cannot be collected"),
    "null-bytes": Layout({"pk/__init__.py": CODE, "tests/test_pk.py": tests("pk") + "\0"}, "test_pk.py cannot be collected"),
    "python-2": Layout({"pk/__init__.py": "print 'hello'\n", "tests/test_pk.py": tests("pk")}, "test_pk.py cannot be collected"),
    # Where tests lie, and what they need.
    "inside-relative": Layout({"pk/__init__.py": CODE, "pk/tests/__init__.py": "", "pk/tests/test_pk.py": tests("..")}),
    "suffix": Layout({"pk/__init__.py": "", "pk/core.py": CODE, **SUFFIX_TESTS}, passing=13),
    "source-with-suffix": Layout({"pk/__init__.py": "", "pk/sign_test.py": CODE, "tests/test_pk.py": tests("pk.sign_test")}),
    "capitals": Layout({"pk/__init__.py": CODE, "Tests/test_PK.py": tests("pk"), "Tests/Helper.py": "x = 1\n"}),
    "capital-test": Layout({"pk/__init__.py": CODE, "tests/Test_PK.py": tests("pk")}, "no tests that pytest collects"),
    "one-file-tests": Layout({"pk/__init__.py": CODE, "pk/tests.py": methods("pk")}, "no tests that pytest collects"),
    "unittest": Layout({"pk/__init__.py": CODE, "tests/test_pk.py": methods("pk")}),
    "subtests": Layout({
        "pk/__init__.py": CODE, "tests/test_pk.py": methods("pk").replace("(self):\n        ", "(self):\n        with self.subTest(x=1):\n            "),
    }),
    "doctests": Layout({"pk/__init__.py": DOCTESTS}, "holds no tests"),
    "doctests-too": Layout({"pk/__init__.py": DOCTESTS, "tests/test_pk.py": tests("pk")}),
    "odd-ids": Layout({"pk/__init__.py": CODE, "tests/test_pk.py": ODD_IDS}, passing=11),
    "fixtures": Layout({"pk/__init__.py": CODE, "tests/conftest.py": FIXTURES, "tests/test_pk.py": WITH_FIXTURES}),
    "fixtures-inside": Layout({"pk/__init__.py": CODE, "pk/conftest.py": FIXTURES, "pk/test_pk.py": WITH_FIXTURES}),
    "fixtures-above": Layout({
        "pk/__init__.py": CODE, "conftest.py": "pytest_plugins = ['tests.shared']\n", "tests/__init__.py": "", "tests/shared.py": FIXTURES,
        "tests/unit/__init__.py": "", "tests/unit/test_pk.py": WITH_FIXTURES,
    }),
    "broken-conftest": Layout({"pk/__init__.py": CODE, "tests/conftest.py": "import nothing_of_this_name\n", "tests/test_pk.py": tests("pk")}),
    "helper-beside": Layout({
        "pk/__init__.py": CODE, "tests/values.py": "TWO = 2\n",
        "tests/test_pk.py": tests("pk", "from values import TWO\n").replace("== 2\n", "== TWO\n"),
    }),
    "helper-relative": Layout({
        "pk/__init__.py": CODE, "tests/__init__.py": "", "tests/values.py": "TWO = 2\n",
        "tests/test_pk.py": tests("pk", "from .values import TWO\n").replace("== 2\n", "== TWO\n"),
    }),
    "test-of-a-test": Layout({
        "pk/__init__.py": CODE, "tests/test_base.py": methods("pk"), "tests/test_pk.py": "from test_base import TestAll\n\n\nclass TestMore(TestAll):\n    pass\n",
    }, passing=36),
    "data-beside": Layout({
        "pk/__init__.py": CODE, "tests/two.txt": "2", "tests/test_pk.py": tests("pk", "from pathlib import Path\n\nTWO = int(Path(__file__).with_name('two.txt').read_text())\n"),
    }, "12 of its tests pass, but 12 of them not in the grader", passing=0),
    "network": Layout({"pk/__init__.py": CODE, "tests/test_net.py": NETWORK, "tests/test_pk.py": tests("pk")}),
    "only-network": Layout({"pk/__init__.py": CODE, "tests/test_net.py": NETWORK}, "no test passes"),
    "missing-package": Layout({"pk/__init__.py": f"import nothing_of_this_name\n{CODE}", "tests/test_pk.py": tests("pk")}, "test_pk.py cannot be collected"),
    "two-tests": Layout({"pk/__init__.py": CODE, "tests/test_pk.py": f"from pk import {NAMES}\n\n\ndef test_a():\n    assert {CASES[0]}\n"}, "fewer than 3 of its tests pass", passing=1),
    "ends-early": Layout({"pk/__init__.py": CODE, "tests/test_pk.py": tests("pk", "import os\n\nos._exit(0)\n")}, "its tests do not end"),
    "writes-answers": Layout({"pk/__init__.py": CODE, "tests/test_pk.py": tests("pk", "for n in range(99):\n    open(f'/tmp/said-{n}', 'w').write('3')\n\n")}),
    # Nothing to do.
    "empty": Layout({}, "no source of Python"),
    "empty-package": Layout({"pk/__init__.py": "", "tests/test_pk.py": "def test_a():\n    assert True\n\n\ndef test_b():\n    assert True\n\n\ndef test_c():\n    assert True\n"}, "no function or class of its source can be taken out", passing=3),
    "constants": Layout({"pk/__init__.py": "A = 1\nB = 2\n", "tests/test_pk.py": "import pk\n\n\ndef test_a():\n    assert pk.A\n\n\ndef test_b():\n    assert pk.B\n\n\ndef test_c():\n    assert pk\n"}, "no function or class of its source can be taken out", passing=3),
    "no-tests": Layout({"pk/__init__.py": CODE}, "holds no tests"),
    "failing-tests": Layout({"pk/__init__.py": "".join(f"def {name}(*_):\n    pass\n" for name in NAMES.split(", ")), "tests/test_pk.py": tests("pk")}, "no test passes"),
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
