"""A task as a folder of Harbor's (task.toml, schema 1.4), which brings the guarded grader along.

Harbor's verifier is separate: it begins in a fresh container of the same image, gets the agent's package back at the
path where it lay, and `tests/`, which the agent never sees. There `verify.py` grades as `etude tasks check` does. The
network is off for both.
"""

from __future__ import annotations

import base64
import json
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from environments.grading.guarded import Exam
from environments.harbor.verify import APP
from environments.tasks.check import exam_of
from environments.tasks.make import Task
from environments.tasks.package import Package

__all__ = ["CARRIED", "as_json", "folder", "toml"]

ROOT = Path(__file__).parents[2]
PARTS = ("__init__.py", "line_diff.py", "monitor.py", "monitor_code.py", "monitor_shell.py", "syntax.py", "grading")
PARTS += ("harbor/__init__.py", "harbor/verify.py", "sandbox/__init__.py", "sandbox/interface.py")
CARRIED = (*(f"environments/{part}" for part in PARTS), "kit/__init__.py", "kit/disk.py", "kit/settings.py")
"""What the grader consists of, beneath the project's folder; folders with all that is in them."""
SLACK = 120.0
"""Seconds for the verifier beside the tests' own."""
DOCKERFILE = """FROM python:{python}-slim
# pip and its wheels carry copies of other packages, and a task may be about one of those.
RUN python -m pip install --no-cache-dir pytest=={pytest} && \
python -m pip uninstall -y pip && rm -rf /usr/local/lib/python3.*/ensurepip
RUN useradd --create-home agent
COPY --chown=agent app/ {app}/
WORKDIR {app}
"""
TEST = """#!/bin/sh
# test.sh [FOLDER [LOGS]]: grades what lies in FOLDER. Where this user is root, nothing of it is run as root.
app=${{1:-{app}}}
logs=${{2:-/logs/verifier}}
mkdir -p "$logs"
echo 0 > "$logs/reward.txt"
here=$(cd "$(dirname "$0")" && pwd)
exec python3 -I -B -c 'import sys; sys.path.insert(0, sys.argv[1] + "/grader"); \
from environments.harbor.verify import main; main(*sys.argv[1:])' \\
  "$here" "$app" "$logs"
"""
SOLVE = """#!/bin/sh
# The original code.
set -e
cp -R "$(dirname "$0")/files/." {app}/
"""


def toml(tables: Mapping[str, Mapping[str, object]]) -> str:
    """Tables of texts, numbers, truths and lists of them as TOML; what stands in the table "" comes first, without a
    name."""
    lines: list[str] = []
    for name, table in sorted(tables.items(), key=lambda item: item[0] != ""):
        lines += [*([""] if lines else []), *([f"[{name}]"] if name else [])]
        lines += [f"{key} = {_format_value(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


def _format_value(value: object) -> str:
    # A text of JSON is one of TOML, but for halves of characters, which are written whole, and for one control
    # character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def as_json(exam: Exam, seconds: float) -> str:
    """An exam as `verify.py` reads it. `seconds`: of wall-clock for all tests together."""

    def encode_tree(tree: Mapping[str, bytes]) -> dict[str, str]:
        return {path: base64.b64encode(data).decode() for path, data in tree.items()}

    fields = {
        "editable": exam.editable.names,
        "tests": exam.tests,
        "wanted": exam.required_tests,
        "package": exam.package,
    }
    fresh = [{**vars(question), "named": dict(question.named)} for question in exam.fresh]
    fields |= {
        "asked": exam.target_tests,
        "apart": exam.separate_tests,
        "fresh": fresh,
        "seconds": seconds,
        "support": exam.support,
    }
    return json.dumps({"given": encode_tree(exam.given_tree), "gold": encode_tree(exam.gold_tree), **fields})


def folder(
    task: Task, package: Package, pytest: str, seconds: float = 60.0, exam: Exam | None = None
) -> dict[str, bytes]:
    """Path → content of a task's folder. `pytest`: the version with which the task was checked. `seconds`: of
    wall-clock that all tests may take. `exam`: the task's, with what `examined` finds of it; without it there are no
    fresh inputs, and no test is played apart."""
    exam = exam or exam_of(task, package)
    description = f"Write again what was taken out of {package.name} {package.version}."
    difficulty = {f"difficulty_{name}": value for name, value in asdict(task.difficulty).items()}
    tables: dict[str, dict[str, object]] = {
        "": {"schema_version": "1.4", "artifacts": [APP]},
        "task": {
            "name": f"etude/{re.sub('[^A-Za-z0-9._-]', '-', task.id)}",
            "description": description,
            "keywords": ["python", "feature-deletion"],
        },
        "metadata": {
            "package": package.name,
            "version": package.version,
            "licence": package.licence,
            "origin": package.origin,
            **difficulty,
        },
        "verifier": {"environment_mode": "separate", "timeout_sec": seconds + SLACK},
        "agent": {"timeout_sec": 1800.0, "user": "agent"},
        "environment": {
            "network_mode": "no-network",
            "build_timeout_sec": 600.0,
            "cpus": 1,
            "memory_mb": 2048,
            "storage_mb": 4096,
        },
    }
    python = ".".join(platform.python_version_tuple()[:2])
    files = {
        "task.toml": toml(tables),
        "instruction.md": f"The package lies in {APP}.\n\n{task.specified}\n",
        "environment/Dockerfile": DOCKERFILE.format(python=python, pytest=pytest, app=APP),
        "tests/test.sh": TEST.format(app=APP),
        "tests/exam.json": as_json(exam, seconds),
        "solution/solve.sh": SOLVE.format(app=APP),
    }
    contents = {path: text.encode() for path, text in files.items()}
    contents |= {f"environment/app/{path}": data for path, data in exam.given_tree.items()}
    contents |= {f"solution/files/{patch.file}": package.files[patch.file] for patch in task.piece.patches}
    return contents | grader()


def grader() -> dict[str, bytes]:
    """Path → content of the grader, as `tests/` carries it: the standard library is all that it needs beside pytest."""
    files = [
        path
        for name in CARRIED
        for path in ([ROOT / name] if name.endswith(".py") else sorted((ROOT / name).rglob("*.py")))
    ]
    return {f"tests/grader/{path.relative_to(ROOT).as_posix()}": path.read_bytes() for path in files}
