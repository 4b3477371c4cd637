"""The audit finds every planted copy of the deleted code, only by the detector that is meant to, and nothing in a clean
tree."""

import ast
import base64
import bz2
import gzip
import html
import io
import json
import lzma
import marshal
import os
import py_compile
import random
import re
import sqlite3
import subprocess
import sysconfig
import tarfile
import textwrap
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.fingerprint import LEAST, Deleted, extract_removed_code, runs, tokens
from environments.git_objects import TooLarge, apply_delta, inflate, iterate_pack
from environments.leaks import Detectors, Limits, audit
from environments.unfold import DRESSES, FOLDS

GONE = '''
def camel_boundary(phrase, keep_acronyms=False):
    """Where words begin."""
    boundaries, previous_upper = [], False
    for position, letter in enumerate(phrase):
        currently_upper = letter.isupper()
        if currently_upper and not previous_upper:
            boundaries.append(position)
        elif keep_acronyms and previous_upper and letter == "\\u00df":
            raise LookupError("a sharp s has no capital letter")  # so says DIN
        previous_upper = currently_upper
    return tuple(boundaries) or None
'''
KEPT = '''"""Words."""

import re


def split(text):
    return re.split("[^a-z]+", text)
'''
ORIGINAL = KEPT + "\n" + GONE
DELETED = Deleted((GONE,), {"words/cases.py": KEPT.encode()})
ME = {
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@b",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@b",
    "GIT_CONFIG_GLOBAL": os.devnull,
}
ME |= {"GIT_CONFIG_SYSTEM": os.devnull, "PATH": os.environ["PATH"], "HOME": os.devnull}


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-c", "protocol.file.allow=always", *words],
        cwd=folder,
        env=ME,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def clean(folder: Path) -> Path:
    """A package without the feature, with tests and a page about it."""
    for name, text in {
        "words/__init__.py": "from words.cases import split\n",
        "words/cases.py": KEPT,
        "tests/test_cases.py": "from words import split\n\n\ndef test_split():\n    assert split('a b') == ['a', "
        "'b']\n",
        "README.md": "# Words\n\nSplits and joins words. `camel_boundary` says where words begin.\n",
        "setup.cfg": "[metadata]\nname = words\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def repository(folder: Path) -> Path:
    """A history in which the feature was deleted by the second commit."""
    git(folder, "init", "-q", "-b", "main")
    (folder / "words/cases.py").write_text(ORIGINAL)
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")
    (folder / "words/cases.py").write_text(KEPT)
    git(folder, "commit", "-qam", "second")
    return folder


def packed(folder: Path) -> None:
    """All objects in one pack, where the older version is a delta of the newer one."""
    repository(folder)
    (folder / "words/cases.py").write_text(ORIGINAL + "\n" + "\n".join(f"x{n} = {n}" for n in range(400)))
    git(folder, "commit", "-qam", "longer")
    (folder / "words/cases.py").write_text(KEPT)
    git(folder, "commit", "-qam", "shorter")
    git(folder, "repack", "-adfq", "--window=50")
    git(folder, "prune-packed")


def dangling(folder: Path) -> None:
    """Nobody refers to it: the reflog is gone, and so is the commit's branch."""
    git(folder, "init", "-q", "-b", "main")
    (folder / "secret").write_text(ORIGINAL)
    git(folder, "hash-object", "-w", "secret")
    (folder / "secret").unlink()


def stash(folder: Path) -> None:
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")
    (folder / "words/cases.py").write_text(ORIGINAL)
    git(folder, "stash", "-q")


def reflog(folder: Path) -> None:
    repository(folder)
    git(folder, "checkout", "-q", "--orphan", "fresh")
    git(folder, "commit", "-qm", "only")
    git(folder, "branch", "-qD", "main")


def another_branch(folder: Path) -> None:
    repository(folder)
    git(folder, "branch", "-q", "old", "HEAD~1")


def submodule(folder: Path) -> None:
    other = clean(folder.parent / "other")
    repository(other)
    git(folder, "init", "-q", "-b", "main")
    git(folder, "submodule", "-q", "add", str(other), "vendor")


def worktree(folder: Path) -> None:
    repository(folder)
    git(folder, "worktree", "add", "-q", "side", "HEAD~1")


def bundle(folder: Path) -> None:
    other = clean(folder.parent / "other")
    repository(other)
    git(other, "bundle", "create", "-q", str(folder / "words.bundle"), "--all")


def bare_object(folder: Path) -> None:
    """An object of Git under another name, in no repository."""
    data = ORIGINAL.encode()
    (folder / "blob.bin").write_bytes(zlib.compress(b"blob %d\0" % len(data) + data))


def put(name: str, data: bytes | str | Callable[[], bytes | str]) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        path, content = folder / name, data() if callable(data) else data
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return plant


def zipped(inner: str = "words/cases.py", data: bytes = b"") -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(inner, data or ORIGINAL.encode())
    return out.getvalue()


def tarred(inner: str = "words-1.0/words/cases.py", data: bytes = b"") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        info = tarfile.TarInfo(inner)
        info.size = len(data or ORIGINAL.encode())
        archive.addfile(info, io.BytesIO(data or ORIGINAL.encode()))
    return out.getvalue()


def compiled(name: str, optimize: int = 0, unchecked: bool = False) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        source = folder.parent / "cases.py"
        source.write_text(ORIGINAL)
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH if unchecked else py_compile.PycInvalidationMode.TIMESTAMP
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        py_compile.compile(str(source), str(folder / name), "words/cases.py", optimize=optimize, invalidation_mode=mode)
        source.unlink()

    return plant


def plain_names() -> str:
    """Code of which every name also stands in what is left."""
    return (
        "def split(text):\n    return re.split(text, text, re, text) or re.split(text, re.split(text, "
        "text, split)) or split\n"
    )


def notebook() -> str:
    cell = {
        "cell_type": "code",
        "source": ORIGINAL.splitlines(keepends=True),
        "outputs": [],
        "metadata": {},
        "execution_count": None,
    }
    return json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}, indent=1)


def coloured() -> str:
    """As Sphinx prints sources."""
    return (
        "<pre>"
        + re.sub(r"\w+", lambda word: f'<span class="n">{word[0]}</span>', html.escape(GONE, quote=False))
        + "</pre>"
    )


def highlighted() -> str:
    """As coverage prints sources: words in elements, every line with its number."""
    rows = []
    for number, line in enumerate(ORIGINAL.splitlines(), 1):
        marked = "".join(
            f'<span class="nam">{html.escape(part)}</span>' if part.strip() else part for part in [*line.partition(" ")]
        )
        rows.append(
            f'<p class="run"><span class="n"><a id="t{number}" '
            f'href="#t{number}">{number}</a></span><span class="t">{marked}</span></p>'
        )
    return "<html><body>" + "\n".join(rows) + "</body></html>"


def patch_text() -> str:
    return "--- a/words/cases.py\n+++ b/words/cases.py\n@@ -8,14 +8,0 @@\n" + "".join(
        f"-{line}\n" for line in GONE.splitlines()
    )


def ctags() -> str:
    names = [
        "boundaries",
        "camel_boundary",
        "currently_upper",
        "keep_acronyms",
        "letter",
        "phrase",
        "position",
        "previous_upper",
    ]
    return "!_TAG_FILE_SORTED\t1\n" + "".join(
        f'{name}\twords/cases.py\t/^    {name} =/;"\tv\tfunction:camel_boundary\n' for name in names
    )


def mypy_cache() -> str:
    """It tells signatures and no bodies."""
    function = {
        ".class": "FuncDef",
        "arg_kinds": [0, 1],
        "arg_names": ["phrase", "keep_acronyms"],
        "fullname": "words.cases.camel_boundary",
    }
    return json.dumps({".class": "MypyFile", "_fullname": "words.cases", "names": {"camel_boundary": function}})


def pytest_cache() -> str:
    ids = [
        f"tests/test_cases.py::test_{name}"
        for name in ("camel_boundary", "keep_acronyms", "previous_upper", "currently_upper", "boundaries", "position")
    ]
    return json.dumps([*ids, "tests/test_cases.py::test[phrase-letter-a sharp s has no capital letter]"])


def listing() -> str:
    """What grep -n prints, of short lines."""
    lines = textwrap.wrap(" ".join(tokens(GONE)), 24)
    return "".join(f"words/cases.py:{number}:{line}\n" for number, line in enumerate(lines, 9))


def swap() -> bytes:
    return b"b0VIM 9.0" + bytes(4083) + b"\0".join(line.encode() for line in reversed(ORIGINAL.splitlines())) + b"\0"


def xxd() -> str:
    data = ORIGINAL.encode()
    return "".join(
        f"{at:08x}: {data[at : at + 16].hex(' ', 2):<40} {ascii(data[at : at + 16])}\n"
        for at in range(0, len(data), 16)
    )


def database(kind: str) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        with sqlite3.connect(folder / ".data") as base:
            if kind == "coverage":
                base.execute("CREATE TABLE line_bits (file_id integer, context_id integer, numbits blob)")
            else:
                base.execute("CREATE TABLE page (body text)")
                base.execute("INSERT INTO page VALUES (?)", (ORIGINAL,))
        base.close()

    return plant


def symbolic(folder: Path) -> None:
    (folder.parent / "outside.txt").write_text(ORIGINAL)
    (folder / "notes.txt").symlink_to(folder.parent / "outside.txt")


def hard(folder: Path) -> None:
    (folder.parent / "outside.txt").write_text(ORIGINAL)
    (folder / ".hidden").hardlink_to(folder.parent / "outside.txt")


def attribute(folder: Path) -> None:
    os.setxattr(folder / "README.md", "user.note", GONE.encode())


def other_layout() -> str:
    """Another formatter, other comments, the other quotes."""
    text = (
        GONE.replace('"', "'")
        .replace("    ", "\t")
        .replace(", ", " ,\n\t\t\t ")
        .replace(" = ", "=")
        .replace("'''Where words begin.'''", "'''Anything.'''")
    )
    return "if True:\n" + textwrap.indent("# new\n" + text, "  ")


@dataclass(frozen=True)
class Plant:
    name: str
    plant: Callable[[Path], None]
    where: str
    """What the path of the leak contains."""
    by: str
    """The detector without which it is not found."""


PLANTS = [
    Plant("copy", put("old/cases.txt", ORIGINAL), "old/cases.txt", "text"),
    Plant("other layout", put("notes/a.md", other_layout), "notes/a.md", "text"),
    Plant("half of it", put("words/half.py", "".join(GONE.splitlines(keepends=True)[:9])), "words/half.py", "text"),
    Plant("bytecode", compiled("words/__pycache__/cases.cpython-311.pyc"), "cases.cpython-311.pyc", "names+bytecode"),
    Plant("optimised bytecode", compiled("words/__pycache__/cases.cpython-311.opt-2.pyc", 2),
        "opt-2.pyc", "names+bytecode"),
    Plant("bytecode by hash", compiled("words/__pycache__/cases.cpython-311.pyc", unchecked=True),
        "cases.cpython-311.pyc", "names+bytecode"),
    Plant("bytecode without source", compiled("lib/renamed.pyc"), "lib/renamed.pyc", "names+bytecode"),
    Plant("marshalled code", put("code.bin", lambda: marshal.dumps(compile(GONE, "x", "exec"))), "code.bin", "names"),
    Plant("mypy cache", put(".mypy_cache/3.11/words/cases.data.json", mypy_cache), "cases.data.json", "signatures"),
    Plant("pytest cache", put(".pytest_cache/v/cache/nodeids", pytest_cache), "nodeids", "names"),
    Plant("ruff cache", put(".ruff_cache/0.9/1234", lambda: b"\x07cases\0" + ctags().encode()),
        ".ruff_cache/0.9/1234", "names"),
    Plant("ctags", put("tags", ctags), "tags", "names"),
    Plant("git, loose", lambda folder: void(repository(folder)), ".git/objects", "zlib"),
    Plant("git, packed", packed, ".git/objects/pack", "git pack"),
    Plant("git, dangling", dangling, ".git/objects", "zlib"),
    Plant("git, reflog", reflog, ".git/objects", "zlib"),
    Plant("git, stash", stash, ".git/objects", "zlib"),
    Plant("git, another branch", another_branch, ".git/objects", "zlib"),
    Plant("git, submodule", submodule, ".git/modules/vendor/objects", "zlib"),
    Plant("git, worktree", worktree, "side/words/cases.py", "text"),
    Plant("git, bundle", bundle, "words.bundle", "git pack"),
    Plant("git, object alone", bare_object, "blob.bin", "zlib"),
    Plant("wheel", put("dist/words-1.0-py3-none-any.whl", zipped), "whl!words/cases.py", "zip"),
    Plant("egg behind a program", put("words.egg", lambda: b"#!/bin/sh\nexit\n" + zipped()),
        "words.egg!words/cases.py", "zip"),
    Plant("sdist", put("dist/words-1.0.tar.gz", lambda: gzip.compress(tarred())),
        "tar.gz!gzip!words-1.0/words/cases.py", "gzip+text"),
    Plant("tar", put("words.tar", tarred), "words.tar!words-1.0/words/cases.py", "text"),
    Plant("gz", put("cases.py.gz", lambda: gzip.compress(ORIGINAL.encode())), "cases.py.gz", "gzip"),
    Plant("bz2", put("cases.py.bz2", lambda: bz2.compress(ORIGINAL.encode())), "cases.py.bz2", "bz2"),
    Plant("xz", put("cases.py.xz", lambda: lzma.compress(ORIGINAL.encode())), "cases.py.xz", "xz"),
    Plant("lzma", put("cases.py.lzma", lambda: lzma.compress(ORIGINAL.encode(), lzma.FORMAT_ALONE)),
        "cases.py.lzma", "xz"),
    Plant("zlib", put("page.z", lambda: zlib.compress(ORIGINAL.encode())), "page.z", "zlib"),
    Plant("nested",
        put("a.tar.bz2", lambda: bz2.compress(tarred("b.zip", zipped("c.gz", gzip.compress(ORIGINAL.encode()))))),
        "b.zip!c.gz", "zip"),
    Plant("compressed bytes in a tar", put("a.tar", lambda: tarred("b.xz", lzma.compress(ORIGINAL.encode()))),
        "a.tar!b.xz!xz", "tar"),
    Plant("egg-info", put("words.egg-info/PKG-INFO", "Name: words\n\n" + textwrap.indent(ORIGINAL, "        ")),
        "PKG-INFO", "text"),
    Plant("build", put("build/lib/words/cases.py", ORIGINAL), "build/lib/words/cases.py", "text"),
    Plant("html docs", put("docs/_modules/words.html", coloured), "words.html", "html"),
    Plant("coverage html", put("htmlcov/cases_py.html", highlighted), "cases_py.html", "html"),
    Plant("coverage database", database("coverage"), ".data", "coverage"),
    Plant("text in a database", database("text"), ".data", "text+names"),
    Plant("backup", put("words/cases.py~", ORIGINAL), "cases.py~", "text"),
    Plant("orig", put("words/cases.py.orig", ORIGINAL), "cases.py.orig", "text"),
    Plant("rej", put("words/cases.py.rej", patch_text), "cases.py.rej", "diff"),
    Plant("swap", put("words/.cases.py.swp", swap), "cases.py.swp", "swap"),
    Plant("notebook", put("try.ipynb", notebook), "try.ipynb", "json+escapes"),
    Plant("a string in a program", put("s.py", f"code = {GONE!r}\n"), "s.py", "escapes"),
    Plant("log in JSON lines", put("log.jsonl", lambda: "".join(json.dumps({"text": x}) + "\n" for x in ("a", GONE))),
        "log.jsonl", "json+escapes"),
    Plant("listing with numbers", put("a.log", listing), "a.log", "numbered"),
    Plant("base64", put("a.txt", lambda: base64.encodebytes(ORIGINAL.encode())), "base64", "base64"),
    Plant("base64 for addresses", put("a.txt", lambda: base64.urlsafe_b64encode(zlib.compress(ORIGINAL.encode()))),
        "base64", "base64"),
    Plant("hex", put("a.txt", lambda: ORIGINAL.encode().hex()), "hex", "hex"),
    Plant("hex dump", put("a.txt", xxd), "hex dump", "hex"),
    Plant("UTF-16", put("a.txt", lambda: ORIGINAL.encode("utf-16")), "utf-16", "wide text"),
    Plant("UTF-32 without mark", put("a.txt", lambda: ORIGINAL.encode("utf-32-be")), "utf-32-be", "wide text"),
    Plant("site-packages", put("venv/lib/python3.11/site-packages/words/cases.py", ORIGINAL),
        "site-packages/words/cases.py", "text"),
    Plant("vendored copy", put("lib/site-packages/pip/_vendor/words/cases.py", ORIGINAL.replace("cases", "cs")),
        "_vendor/words", "text"),
    Plant("symbolic link", symbolic, "notes.txt", "links"),
    Plant("hard link", hard, ".hidden", "text"),
    Plant("extended attribute", attribute, "README.md!user.note", "attributes"),
]  # fmt: skip


def void(_: object) -> None:
    pass


def less(gone: set[str]) -> Detectors:
    """All detectors but some."""
    every = Detectors()
    return replace(
        every,
        folds={name: fold for name, fold in every.folds.items() if name not in gone},
        dresses={name: dress for name, dress in every.dresses.items() if name not in gone},
        rules=every.rules - gone,
    )


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_a_planted_copy_is_found(plant, tmp_path):
    tree = clean(tmp_path / "tree")
    assert audit(tree, DELETED) == []
    plant.plant(tree)
    found = audit(tree, DELETED)
    assert any(plant.where in leak.path for leak in found), found
    assert not [leak for leak in found if leak.kind == "unread"]
    # What is not recognised by its text might still be by its names: a detector that gives text is tried without those.
    by = {*plant.by.split("+")}
    by |= set() if by <= {"signatures", "coverage", "bytecode", "names"} else {"names"}
    assert not [leak for leak in audit(tree, DELETED, detectors=less(by)) if plant.where in leak.path]


def test_kinds():
    """As many kinds as the room promises, each with a name of its own, and a plant for every detector."""
    assert len({plant.name for plant in PLANTS}) == len(PLANTS) >= 50
    assert {*FOLDS, *DRESSES, *Detectors().rules} <= {one for plant in PLANTS for one in plant.by.split("+")}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda text: text, True),
        (lambda text: re.sub(r"#.*", "# other words", text), True),
        (lambda text: re.sub(r"\s+", " ", text), True),
        (lambda text: text.upper(), False),
        (lambda text: re.sub(r"[a-z_]{6,}", "name", text), False),
        (lambda text: " ".join(random.Random(0).sample(tokens(text), len(tokens(text)))), False),
        (lambda text: "\n".join(text.splitlines()[:3]), False),
    ],
)
def test_what_a_fingerprint_sees(change, found):
    """Layout and comments do not matter; the order and the names do."""
    assert bool(DELETED.as_text(change(GONE))) == found


def test_fingerprints_by_hand():
    assert tokens("x = 'a' + 1.5 # why\n\\\n  y") == ["x", "=", '"', "a", '"', "+", "1.5", "y"]
    assert b"camel_boundary" in DELETED.telling and b"split" not in DELETED.telling and b"append" not in DELETED.telling
    assert DELETED.signatures == (frozenset({b"camel_boundary", b"phrase", b"keep_acronyms"}),)
    small = Deleted((" ".join(f"a{n}" for n in range(LEAST)),), {})
    assert len(small.blocks) == 1 and len(small.blocks[0].runs) == LEAST - 4
    long = Deleted((" ".join(f"a{n}" for n in range(500)),), {})
    assert [len(block.runs) for block in long.blocks] == [68] * 6 + [64]
    for code in ((), ("x = 1",), (" ".join("a" * (LEAST - 1)),)):
        with pytest.raises(ValueError, match="fewer than 14 tokens in every place"):
            Deleted(code, {})


@pytest.mark.parametrize(
    ("old", "new", "lost"),
    [
        ('__all__ = ["a", "b", "c"]', '__all__ = ["a", "c"]', 'b", "'),
        ("from x import a, b", "from x import a", ", b"),
        ('    return  "a  b"  # why\n', "    raise NotImplementedError\n", 'return  "a  b"  # why'),
        ("x = 1\n", "", "x = 1"),
        ("a a a", "a a", "a"),
        ("pass", "pass", ""),
    ],
)
def test_what_an_edit_takes(old, new, lost):
    """What begins and ends as before is not gone: the rest of a list of names is no copy of it."""
    assert extract_removed_code(old, new).strip() == lost.strip()


@given(st.lists(st.sampled_from("abc(,)"), max_size=12), st.lists(st.sampled_from("abc(,)"), max_size=12))
def test_nothing_that_is_gone_is_forgotten(old, new):
    """What an edit takes, put between what stays, is the old text again."""
    row, left = tokens(" ".join(old)), tokens(" ".join(new))
    lost = tokens(extract_removed_code(" ".join(old), " ".join(new)))
    ends = [
        (at, len(row) - at - len(lost)) for at in range(len(row) - len(lost) + 1) if row[at : at + len(lost)] == lost
    ]
    assert any(
        at + rest <= len(left) and row[:at] == left[:at] and row[len(row) - rest :] == left[len(left) - rest :]
        for at, rest in ends
    )


@given(
    st.lists(st.sampled_from(["alpha", "beta", "=", "(", ")", "for", "1"]), min_size=LEAST, max_size=200),
    st.sampled_from([" ", "\n", "\t\n "]),
)
def test_a_whole_copy_is_always_found(row, space):
    deleted = Deleted((" ".join(row),), {})
    text = "before " + space.join(row) + " after"
    assert deleted.may_hold(text.encode()) and deleted.as_text(text)


# Clean trees.

LIBRARY = Path(sysconfig.get_path("stdlib"))


def functions_of(*names: str) -> list[Deleted]:
    """Bodies of functions of the standard library, as a task would delete them."""
    found = []
    for name in names:
        source = (LIBRARY / name).read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                code = "\n".join(source.splitlines()[node.body[0].lineno - 1 : node.end_lineno])
                if len(tokens(code)) >= LEAST:
                    found.append(Deleted((code,), {name: source.replace(code, "").encode()}))
    return found


def test_no_alarm_on_clean_trees(tmp_path):
    """24 functions of three files, and the sources and bytecode of five other packages of the standard library."""
    deleted = functions_of("textwrap.py", "argparse.py", "json/encoder.py")
    deleted = random.Random(0).sample(deleted, 24)
    for package in ("email", "http", "importlib", "unittest", "concurrent"):
        (tmp_path / package).symlink_to(LIBRARY / package)
    files = [path for package in sorted(tmp_path.iterdir()) for path in package.resolve().rglob("*") if path.is_file()]
    alarms = []
    for path in files:
        data = path.read_bytes()
        found = runs(tokens(data.decode(errors="replace")))
        alarms += [(number, path) for number, one in enumerate(deleted) if one.find_runs(found) or one.by_names(data)]
    assert len(files) > 100 and alarms == []


def test_the_library_s_own_folder_is_clean():
    """Through every fold and dress, links and attributes included."""
    assert audit(LIBRARY / "email", DELETED) == []


def test_the_original_itself_is_seen_in_the_library():
    """Where the file of a deleted function still lies there, it is named."""
    deleted = functions_of("json/scanner.py")[0]
    assert {leak.path for leak in audit(LIBRARY / "json", deleted)} >= {"scanner.py"}


# Bounds.


def test_bombs_and_cut_files_are_named(tmp_path):
    """What cannot be read to its end is a finding: nobody is told that a tree is clean of which a part was not seen."""
    limits = Limits(depth=4, file=100_000, total=10_000_000)
    zeros = gzip.compress(bytes(200_000))
    matryoshka = b"x"
    for _ in range(6):
        matryoshka = gzip.compress(matryoshka + os.urandom(20))
    for name, data in {
        "a.gz": zeros,
        "b.zip": zipped("zeros", bytes(200_000)),
        "c.z": zlib.compress(bytes(200_000)),
        "d.gz": matryoshka,
        "e.bin": bytes(100_001),
        "f.bz2": bz2.compress(bytes(200_000)),
        "g.xz": lzma.compress(bytes(200_000)),
        "h.tar": tarred("zeros", bytes(90_000)),
    }.items():
        (tmp_path / name).write_bytes(data)
    os.mkfifo(tmp_path / "i.fifo")
    (tmp_path / "j").symlink_to("/")
    (tmp_path / "k").symlink_to("k")
    found = audit(tmp_path, DELETED, limits)
    assert {leak.kind for leak in found} == {"unread"}
    assert {leak.path.partition("!")[0] for leak in found} == {
        "a.gz",
        "b.zip",
        "c.z",
        "d.gz",
        "e.bin",
        "f.bz2",
        "g.xz",
        "i.fifo",
        "j",
    }
    assert audit(tmp_path, DELETED, replace(limits, files=2))[-1].reason == "the tree has more than 2 files"
    with pytest.raises(ValueError, match="tree must be a folder"):
        audit(tmp_path / "a.gz", DELETED)


@given(st.binary(max_size=300), st.sampled_from(list(FOLDS)))
def test_no_data_breaks_a_fold(data, kind):
    heads = {
        "gzip": b"\x1f\x8b\x08",
        "bz2": b"BZh9",
        "xz": b"\xfd7zXZ\x00",
        "zlib": b"\x78\x9c",
        "zip": zipped(),
        "tar": tarred()[:512],
        "git pack": b"PACK\0\0\0\2",
    }
    for one in (data, heads.get(kind, b"") + data):
        for label, inner in FOLDS[kind](one, 1 << 20):
            assert isinstance(label, str) and len(inner) <= 1 << 20


@given(st.binary(max_size=2000), st.data())
def test_a_damaged_archive_breaks_no_audit(noise, data):
    whole = data.draw(
        st.sampled_from([zipped(), tarred(), gzip.compress(ORIGINAL.encode()), lzma.compress(ORIGINAL.encode())])
    )
    at = data.draw(st.integers(0, len(whole) - 1))
    for kind in FOLDS:
        for damaged in (whole[:at], whole[:at] + noise + whole[at:], whole[:at] + noise[: len(whole) - at]):
            for _ in FOLDS[kind](damaged, 1 << 20):
                pass


# Git's formats.


def test_a_delta_by_hand():
    base = b"hello, world"
    delta = bytes([12, 11, 0b10010000, 5, 2]) + b", " + bytes([0b10010001, 8, 4])
    assert apply_delta(base, delta, 100) == b"hello, " + b"orld"
    for wrong in (bytes([11, 5]), bytes([12, 5, 0]), bytes([12, 5, 3]) + b"abc"):
        with pytest.raises(ValueError):
            apply_delta(base, wrong, 100)
    with pytest.raises(TooLarge):
        apply_delta(base, delta, 10)


def test_every_object_of_a_pack_has_git_s_name(tmp_path):
    """Deltas by place and by name, against Git's own list."""
    tree = clean(tmp_path / "tree")
    packed(tree)
    names = {line.split()[0] for line in git(tree, "cat-file", "--batch-check", "--batch-all-objects").splitlines()}
    (path,) = (tree / ".git/objects/pack").glob("*.pack")
    assert "delta" in git(tree, "verify-pack", "-v", str(path)) and "chain length" in git(
        tree, "verify-pack", "-v", str(path)
    )
    assert {name for name, _ in iterate_pack(path.read_bytes(), 1 << 20)} == names
    out = git(tree, "rev-list", "--all", "--objects")
    listed = subprocess.run(
        ["git", "pack-objects", "--stdout", "--window=50", "--no-reuse-delta", "--no-reuse-object"],
        cwd=tree, env=ME, input="".join(line.split()[0] + "\n" for line in out.splitlines()).encode(),
        capture_output=True, check=True,
    )  # fmt: skip
    by_name = listed.stdout  # without --delta-base-offset, deltas name their base
    assert {name for name, _ in iterate_pack(by_name, 1 << 20)} == names
    with pytest.raises(TooLarge):
        list(iterate_pack(by_name, 2000))
    with pytest.raises(ValueError):
        list(iterate_pack(by_name[:-60], 1 << 20))
    known: dict[bytes, tuple[int, bytes]] = {}
    list(iterate_pack(by_name, 1 << 20, known))
    assert {name.hex() for name in known} == names


def test_streams():
    data = b"abc" + zlib.compress(b"x" * 50_000) + b"rest"
    out, end = inflate(data, 50_000, 3)
    assert out == b"x" * 50_000 and data[end:] == b"rest"
    with pytest.raises(TooLarge):
        inflate(data, 49_999, 3)
    with pytest.raises(ValueError, match="cut off"):
        inflate(data[:40], 50_000, 3)
