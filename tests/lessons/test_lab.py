"""`make lab`: what the target brings, the reader's own copies, the address that is printed."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kit.settings import RunError
from lessons import lab, syllabus

ROOT = Path(__file__).resolve().parents[2]


def test_the_target_brings_what_it_needs():
    """It depends on the extra `course`, and that has JupyterLab and a kernel."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^lab: \.venv/\.has-course\n\t\$\(BIN\)/python -m lessons\.lab$", text, re.MULTILINE)
    assert re.search(r"^\.PHONY:.* lab ", text, re.MULTILINE) and re.search(r"^# make lab ", text, re.MULTILINE)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert {"jupyterlab", "ipykernel"} <= set(extras["course"])
    done = subprocess.run(["make", "--no-print-directory", "-n", "lab"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.rstrip().endswith(".venv/bin/python -m lessons.lab")


def test_every_lesson_is_there_and_nothing_is_overwritten(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "runs" / "lessons" / "05_kl.ipynb"
    mine.parent.mkdir(parents=True)
    mine.write_text("my answers")
    called = []
    monkeypatch.setattr(lab, "find_spec", lambda name: name)
    monkeypatch.setattr(lab.subprocess, "call", lambda words, env: called.append((words, env)) or 0)
    assert lab.main() == 0 and mine.read_text() == "my answers"
    made = {syllabus.notebook(script).name for script in syllabus.scripts()}
    assert {path.name for path in mine.parent.iterdir()} == made and len(made) >= 18
    ((words, env),) = called
    address = re.search(r"http://127\.0\.0\.1:(\d+)/lab\?token=(\w+)", capsys.readouterr().out)
    assert address and f"--ServerApp.port={address[1]}" in words and env["JUPYTER_TOKEN"] == address[2]
    assert f"--ServerApp.root_dir={mine.parent}" in words and "--ServerApp.ip=127.0.0.1" in words
    assert not any(address[2] in word for word in words), "other users may read a command, and no environment"
    assert words[:3] == [sys.executable, "-m", "jupyterlab"] and str(ROOT) in env["PYTHONPATH"]


def test_a_port_that_is_taken_is_passed_over():
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert lab.free(port) > port


def test_without_jupyter_a_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lab, "find_spec", lambda name: None)
    with pytest.raises(RunError, match=r"pip install -e '\.\[course\]'"):
        lab.main()
    assert not list(tmp_path.iterdir())
