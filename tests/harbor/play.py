"""Holds exported tasks against Harbor itself: its models read them, its lint finds nothing, its oracle is paid 1.0 and
its nop 0.0.

python tests/harbor/play.py FOLDER CLASS        FOLDER holds tasks as `etude tasks export` writes them; CLASS is the
                                                environment that plays them
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from harbor.models.task.task import Task
from harbor.models.task.verifier_mode import VerifierEnvironmentMode, resolve_task_verifier_mode

WANTED = {"oracle": 1.0, "nop": 0.0}


def rewards(folder: Path, agent: str, where: str, out: Path) -> dict[str, object]:
    """Task → its reward, or what went wrong."""
    harbor = Path(sys.executable).with_name("harbor")
    words = [
        harbor,
        "run",
        "-p",
        folder,
        "-a",
        agent,
        "-e",
        where,
        "-o",
        out,
        "--job-name",
        agent,
        "-n",
        "2",
        "-q",
        "-y",
    ]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {}
    for path in (out / agent).glob("*/result.json"):
        told = json.loads(path.read_text())
        result, error = told["verifier_result"], told["exception_info"]
        found[told["task_name"]] = (
            error["exception_message"] if error else (result or {}).get("rewards", {}).get("reward")
        )
    return found


def main(folder: Path, where: str) -> None:
    paths = sorted(path for path in folder.iterdir() if path.is_dir())
    tasks = [Task(path) for path in paths]
    assert tasks, f"{folder} holds no tasks"
    for task in tasks:
        assert (
            task.config.schema_version == "1.4"
            and resolve_task_verifier_mode(task.config) == VerifierEnvironmentMode.SEPARATE
        ), task.name
    lint = subprocess.run([Path(sys.executable).with_name("harbor"), "lint", *paths], capture_output=True, text=True)
    assert lint.returncode == 0, lint.stdout + lint.stderr
    wrong = []
    with tempfile.TemporaryDirectory(prefix="etude-harbor-jobs-") as out:
        for agent, wanted in WANTED.items():
            found = rewards(folder, agent, where, Path(out))
            wrong += [
                f"{agent} of {task.name}: {found.get(task.name)!r}" for task in tasks if found.get(task.name) != wanted
            ]
    print(
        f"{where}: {len(tasks)} tasks read and linted by Harbor; oracle 1.0 and nop 0.0 "
        + (f"but for {len(wrong)}" if wrong else "for all of them")
    )
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
