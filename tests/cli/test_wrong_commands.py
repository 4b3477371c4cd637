"""The command line under wrong words: 300 different invocations over all commands, each refused in one line, and
nothing written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from etude.cli import main as cli
from tests.cli.wrong_words import commands, invocations, lay_files

ROOT = Path(__file__).resolve().parents[2]
COUNT = 300


def tree(root: Path) -> dict[str, tuple]:
    """Every file and folder with its size and time of change."""
    return {
        str(path): (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in sorted(root.rglob("*"))
        if not path.is_dir()
    }


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with the files that wrong invocations name. A process that would replace this one, a server's, is
    refused."""
    lay_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("a wrong command started a server"))
    return tmp_path


def test_every_command_has_wrong_invocations():
    """A command that is added needs a row, or has nothing that could be wrong."""

    def names(group, path=()):
        for name, command in group.commands.items():
            yield from names(command, (*path, name)) if hasattr(command, "commands") else [(*path, name)]

    covered = {tuple(words[:2]) for words, _ in commands()} | {tuple(words[:1]) for words, _ in commands()}
    without_words = {
        ("list",),
        *(("bench", name) for name in ("model", "kernels", "plan", "delta", "sandbox", "explorer", "tools")),
    }
    aliases = {("bench", "crowded")}
    assert set(names(typer.main.get_command(cli.app))) - covered == without_words | aliases


def test_wrong_words_end_in_one_line(place, monkeypatch, ask):
    """No traceback, no work begun, one line on stderr, exit code 1 or 2, and every file as it was. Commands that
    go through a list of files name the file first, the others begin with "error:"."""
    monkeypatch.setattr(cli, "app", typer.main.get_command(cli.app))  # built once, as in a process
    before, failures, count = tree(place), [], 0
    for words in invocations(COUNT, 20260729):
        count += 1
        try:
            code, _, error = ask(*words)
        except BaseException as escaped:  # a traceback, for who types the command
            failures.append((words, repr(escaped)))
            continue
        named = error.startswith("error: ") or words[0] == "tasks"
        if code not in (1, 2) or error.count("\n") != 1 or not named or len(error) > 10_000 or tree(place) != before:
            failures.append((words, code, error))
            before = tree(place)
    assert count == COUNT and not failures


@pytest.mark.parametrize(
    "words", [("run", "kl", "--set", "seed=١٠"), ("show", os.fsdecode(b"caf\xe9"))], ids=["digits", "bytes"]
)
def test_wrong_words_from_outside(place, words):
    """In a process of its own: no traceback, and nothing on stdout."""
    done = subprocess.run(
        [sys.executable, "-m", "etude.cli.main", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=300,
    )
    assert (
        done.returncode == 2
        and done.stdout == b""
        and done.stderr.startswith(b"error: ")
        and done.stderr.count(b"\n") == 1
    )


def test_a_reader_that_has_gone_is_no_error(place):
    """etude glossary | head -1: nothing on stderr."""
    reader, writer = os.pipe()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "etude.cli.main", "glossary"], env=environment, stdout=writer, stderr=subprocess.PIPE
    )
    os.close(writer)
    os.close(reader)
    _, error = process.communicate(timeout=300)
    assert error == b"" and process.returncode == 1


def test_a_full_device_is_one_line(place):
    """What cannot be printed is said once."""
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "etude.cli.main", "list"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=300,
        )
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1 and b"No space left on device" in done.stderr
