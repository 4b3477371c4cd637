"""Badges for Colab: the command that writes them, what it is told, and the cell that installs etude."""

import ast
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.settings import RunError
from lessons import badges, build, syllabus
from lessons.address import Address, file_of, parse, stored

README = """# The course

<!-- syllabus -->
<!-- /syllabus -->
"""
COLAB = "https://colab.research.google.com/github"


def laid(base):
    """Two lessons with their notebooks, as they are committed, and a README."""
    there = base / "clone" / "lessons"
    (there / "notebooks").mkdir(parents=True)
    for number in (5, 17):
        script = syllabus.find(number).path
        shutil.copyfile(script, there / script.name)
        book = badges.dressed(
            nbformat.read(syllabus.notebook(script), as_version=4), there / script.name
        )  # this copy may have badges of its own
        syllabus.notebook(there / script.name).write_text(nbformat.writes(book) + "\n", encoding="utf-8")
    (there / "README.md").write_text(syllabus.filled(README, there), encoding="utf-8")
    return there


@pytest.fixture
def folder(tmp_path):
    return laid(tmp_path)


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    return laid(tmp_path_factory.mktemp("untouched"))


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def cells(script):
    return nbformat.read(syllabus.notebook(script), as_version=4).cells


def git(folder, *words):
    subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True)


def test_one_command_gives_every_lesson_a_badge_and_a_cell_that_installs(folder, capsys):
    before, plain = files(folder), {script: cells(script) for script in syllabus.scripts(folder)}
    assert badges.main(["me/etude"], folder) == 0
    said = capsys.readouterr()
    assert (
        said.out == "badges open https://github.com/me/etude/tree/main; 4 files have changed: commit and push them\n"
        and not said.err
    )
    for script, old in plain.items():
        now, at = cells(script), f"{COLAB}/me/etude/blob/main/lessons/notebooks/{script.stem}.ipynb"
        assert now[0].source == f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({at})"
        first = next(cell for cell in now if cell.cell_type == "code")
        assert "https://github.com/me/etude" in first.source and not first.outputs and first.execution_count is None
        assert [cell for cell in now if not badges.is_colab_cell(cell)] == old and len(now) == len(old) + 2, (
            "numbers and outputs stay"
        )
        assert f"]({at})" in (folder / "README.md").read_text(encoding="utf-8")
        nbformat.validate(nbformat.read(syllabus.notebook(script), as_version=4))
        assert not build.differs(script) and build.reworded(script).cells == now, "the builder keeps them"
    with_badges = files(folder)
    assert badges.main(["https://github.com/me/etude.git", "--branch", "main"], folder) == 0
    assert capsys.readouterr().out.endswith("; nothing has changed\n") and files(folder) == with_badges
    assert badges.main(["You/Other_1.x", "--branch", "v1.0"], folder) == 0
    assert not any(b"me/etude" in data for data in files(folder).values())
    assert f"{COLAB}/You/Other_1.x/blob/v1.0/" in (folder / "README.md").read_text(encoding="utf-8")
    assert badges.main(["--remove"], folder) == 0 and files(folder) == before


def test_a_lesson_that_is_executed_keeps_its_cells_for_colab(folder, monkeypatch):
    """They are no part of what is executed, so that an address changes nothing of what a lesson shows."""
    badges.write(Address("me", "etude"), folder)
    script = syllabus.scripts(folder)[0]
    played = []

    class Client:
        def __init__(self, book, **_):
            self.book = book

        def execute(self, env):
            for number, cell in enumerate(cell for cell in self.book.cells if cell.cell_type == "code"):
                played.append(cell.source)
                cell.execution_count = number + 1
                cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text="solved")]

    monkeypatch.setattr(build, "NotebookClient", Client)
    book = build.executed(script)
    assert not any("etude-clone" in source for source in played) and [cell.source for cell in book.cells] == [
        cell.source for cell in cells(script)
    ]
    build.write(script, book)
    assert not build.differs(script) and not build.changed(script)


WORDS = st.from_regex(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,8}[A-Za-z0-9_-])?", fullmatch=True)
OWNERS = st.from_regex(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,8}[A-Za-z0-9])?", fullmatch=True)
ADDRESSES = st.builds(
    Address,
    OWNERS,
    st.from_regex(r"[A-Za-z0-9._-]{1,10}", fullmatch=True).filter(
        lambda name: name.strip(".") and not name.endswith(".git")
    ),
    WORDS.filter(lambda branch: ".." not in branch and not branch.endswith(".lock")),
)
FORMS = (
    "{o}/{n}",
    "github.com/{o}/{n}",
    "https://github.com/{o}/{n}",
    "http://www.github.com/{o}/{n}.git",
    "https://GitHub.com/{o}/{n}/",
    "https://u:s3cret@github.com/{o}/{n}.git",
    "git@github.com:{o}/{n}.git\n",
    "ssh://git@github.com/{o}/{n}.git",
    "ssh://git@github.com:22/{o}/{n}",
)


@given(ADDRESSES, st.sampled_from(FORMS))
def test_what_is_written_is_read_back(address, form):
    """From every way to say where a repository lies; from the file; from the badge; and from the cell, which is
    Python."""
    assert parse(form.format(o=address.owner, n=address.name), address.branch) == address == parse(str(address))
    script = Path("05_kl.py")
    owner, name, blob, branch, path = re.fullmatch(
        rf".*\({COLAB}/([^/]+)/([^/]+)/(blob)/([^/]+)/(.*)\)", syllabus.badge(script, address)
    ).groups()
    assert Address(owner, name, branch) == address and path == "lessons/notebooks/05_kl.ipynb"
    tree = ast.parse(badges.INSTALL.format(branch=address.branch, clone=address.clone))
    lists = (
        [word.value for word in node.elts if isinstance(word, ast.Constant)]
        for node in ast.walk(tree)
        if isinstance(node, ast.List)
    )
    words = next(some for some in lists if some[0] == "git")
    assert words[words.index("--branch") + 1 :] == [
        address.branch,
        f"https://github.com/{address.owner}/{address.name}",
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["etude"],
            "a repository on GitHub was expected, got 'etude'; say which: python -m lessons.badges "
            "OWNER/NAME [--branch main]",
        ),
        (["me/etude/lessons"], "a repository on GitHub was expected, got 'me/etude/lessons'"),
        (["https://gitlab.com/me/etude"], "a repository on GitHub was expected"),
        (["https://example.org/github.com/me/etude"], "a repository on GitHub was expected"),
        (["https://u:s3cret@gitlab.com/me/etude"], "a repository on GitHub was expected; say which"),
        (["me/.."], "a repository on GitHub was expected"),
        (["me/.git"], "a repository on GitHub was expected"),
        (['me/e"tude'], "a repository on GitHub was expected"),
        (["mé/etude"], "a repository on GitHub was expected"),
        (["me/etude\n# and more"], "a repository on GitHub was expected"),
        (
            ["https://github.com/me/etude/tree/a/b"],
            "a branch for Colab is one word of letters, digits, and . _ - between them; got 'a/b'",
        ),
        (["me/etude", "--branch="], "a branch for Colab is one word"),
        (["me/etude", "--branch=--upload-pack=x"], "a branch for Colab is one word"),
        (["me/etude", "--branch=a..b"], "a branch for Colab is one word"),
        (["me/etude", "--branch=main.lock"], "a branch for Colab is one word"),
        (["me/etude", "--branch=main\n"], "a branch for Colab is one word"),
        (["me/etude", "--remove"], "--remove takes no address and no branch"),
        (
            [],
            "this folder has no remote called origin to take an address from; say which: python -m "
            "lessons.badges OWNER/NAME",
        ),
    ],
    ids=lambda x: str(x)[:40],
)
def test_a_bad_address_is_one_line_and_nothing_is_written(untouched, capsys, words, says):
    before = files(untouched)
    assert badges.main(words, untouched) == 2
    said = capsys.readouterr()
    assert (
        said.err.startswith(f"error: {says}")
        and said.err.count("\n") == 1
        and not said.out
        and "s3cret" not in said.err
    )
    assert files(untouched) == before


def test_without_an_address_it_is_that_of_the_clone(folder, capsys):
    """Its password is left where it is."""
    git(folder.parent, "init", "-q")
    git(folder.parent, "remote", "add", "origin", "https://u:s3cret@gitlab.com/me/etude.git")
    before = files(folder)
    assert badges.main([], folder) == 2
    said = capsys.readouterr().err
    assert (
        said.startswith("error: a repository on GitHub was expected; say which")
        and said.count("\n") == 1
        and "s3cret" not in said
    )
    assert files(folder) == before
    git(folder.parent, "remote", "set-url", "origin", "https://u:s3cret@github.com/me/etude.git")
    assert badges.main(["--branch", "dev"], folder) == 0 and stored(folder) == Address("me", "etude", "dev")
    assert "s3cret" not in capsys.readouterr().out and not any(b"s3cret" in data for data in files(folder).values())


def test_what_cannot_be_read_is_said_before_anything_is_written(folder):
    for text, says in (
        ("{", "notebook of 17_behaviour cannot be read .*make lessons"),
        (None, "notebook of 17_behaviour cannot be read"),
    ):
        at = syllabus.notebook(syllabus.scripts(folder)[1])
        at.unlink() if text is None else at.write_text(text)
        before = files(folder)
        with pytest.raises(RunError, match=says):
            badges.write(Address("me", "etude"), folder)
        assert files(folder) == before
    for script in syllabus.scripts(folder):
        script.unlink()
    with pytest.raises(RunError, match="there are no lessons in"):
        badges.write(Address("me", "etude"), folder)
    file_of(folder).write_text("nowhere")
    with pytest.raises(RunError, match="a repository on GitHub was expected, got 'nowhere'"):
        stored(folder)


GIT = """#!/bin/sh
echo git "$@" >> "$SAID"
for last in "$@"; do :; done
mkdir -p "$last/lessons" && echo "here = 1" > "$last/lessons/__init__.py"
"""
PIP = "import os, sys\nwith open(os.environ['SAID'], 'a') as file:\n    print('pip', *sys.argv[1:], file=file)\n"


@pytest.fixture
def colab(tmp_path):
    """play(HEAD, TAIL): runs the cell between these lines in a Python without packages, with a git and a pip that only
    note their words. Returns the words and what was printed. Beside it the folder of packages that can be imported, and
    the one in which the cell runs."""
    fakes, work, said = tmp_path / "fakes", tmp_path / "content", tmp_path / "said"
    work.mkdir()
    for name, text in {
        "pip/__init__.py": "",
        "pip/__main__.py": PIP,
        "google/colab/__init__.py": "",
        "bin/git": GIT,
    }.items():
        (fakes / name).parent.mkdir(parents=True, exist_ok=True)
        (fakes / name).write_text(text)
    (fakes / "bin" / "git").chmod(stat.S_IRWXU)
    environment = {
        **os.environ,
        "PYTHONPATH": str(fakes),
        "PATH": f"{fakes / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "SAID": str(said),
    }

    def play(head, tail=""):
        said.write_text("")
        cell = badges.INSTALL.format(branch="main", clone="https://github.com/me/etude")
        words = [
            sys.executable,
            "-S",
            "-c",
            f"{head}\n{cell}\n{tail}",
        ]  # -S: without this Python's packages, among them etude
        done = subprocess.run(words, cwd=work, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return said.read_text().splitlines(), done.stdout

    return play, fakes, work


def test_the_cell_installs_where_etude_is_missing_on_colab_and_nowhere_else(colab):
    play, fakes, work = colab
    assert play("") == ([], "") and not any(work.iterdir()), "another machine, where a reader took the wrong Python"
    told, out = play("import google.colab", "import lessons; print(lessons.here, sys.path[0])")
    clone = work / "etude-clone"
    assert told == [
        f"git clone -q --depth 1 --branch main https://github.com/me/etude {clone}",
        f"pip install -q -e {clone}",
    ]
    assert out == f"1 {clone}\n", "without a restart"
    assert play("import google.colab")[0] == told[1:], "a clone that is there is not made again"
    (work / "etude").mkdir()  # a clone that someone made by hand is no package
    assert play("import google.colab")[0] == told[1:]
    (fakes / "etude").mkdir()
    (fakes / "etude" / "__init__.py").write_text("")
    assert play("import google.colab") == ([], ""), "etude is installed"
