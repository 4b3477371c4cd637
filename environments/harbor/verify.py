"""The guarded grader within Harbor's verifier, whose container takes the place of a sandbox of ours.

If the verifier is root, what the agent left runs as nobody, who cannot enter the folder of the tests nor that of the
reward, and every process of whom is ended before the reward is written.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from environments.grading.fresh import Question
from environments.grading.guarded import Exam, grade
from environments.grading.lay import Editable
from environments.sandbox.interface import Observation

__all__ = ["APP", "LocalSandbox", "exam_in", "main"]

APP = "/app"
"""Where the package lies, for the agent and for the verifier."""
NOBODY = 65534
WORK = Path("/work")
"""Where the grader plays the tests (see grading/guarded.py)."""
END = "import os, signal; os.kill(-1, signal.SIGKILL)"


class LocalSandbox:
    """What the grader needs of a sandbox (see sandbox/interface.py): a command in WORK, as nobody where this user is
    root."""

    waiting: subprocess.Popen | None = None

    def __init__(self, folder: Path) -> None:
        for part in ("tree", "exam"):
            shutil.rmtree(WORK / part, ignore_errors=True)
            if (folder / part).exists():
                shutil.copytree(folder / part, WORK / part)
        self.user: dict = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if can_switch_user() else {}
        if self.user:
            for parent, _, names in os.walk(WORK):
                for path in (parent, *(os.path.join(parent, name) for name in names)):
                    os.chown(path, NOBODY, NOBODY)

    def begin(self, command: str, timeout: float | None = None) -> Observation:
        """Starts a command that waits to be told something, and gives the line that it says."""
        options = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "cwd": WORK,
            "env": {"PATH": os.environ.get("PATH", "/usr/bin:/bin")},
        }
        self.waiting = subprocess.Popen(["/bin/sh", "-c", command], **options, **self.user)
        assert self.waiting.stdout is not None
        line = self.waiting.stdout.readline().decode(errors="replace")
        return Observation(line.rstrip("\n"), line.endswith("\n"))

    def waits(self) -> bool:
        """Whether a command waits."""
        return self.waiting is not None and self.waiting.poll() is None

    def tell(self, text: str, timeout: float | None = None) -> Observation:
        """Tells it, and gives what it says then on its standard output."""
        process, self.waiting = self.waiting, None
        if process is None:
            return Observation("no command waits for what it is told", False)
        try:
            output, _ = process.communicate(text.encode(), timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return Observation("", False, None, f"more than {timeout:g} seconds")
        return Observation(output.decode(errors="replace"), process.returncode == 0, process.returncode)

    def call(self, tool: str, args: Mapping[str, object], timeout: float | None = None) -> Observation:
        """No tool runs here. Raises NotImplementedError."""
        raise NotImplementedError("a verifier has no tools")

    def snapshot(self) -> str:
        """There are none here. Raises NotImplementedError."""
        raise NotImplementedError("a verifier stores no trees")

    def fork(self, snapshot: str) -> LocalSandbox:
        """There are none here. Raises NotImplementedError."""
        raise NotImplementedError("a verifier stores no trees")

    def close(self) -> None:
        """Ends every process of nobody's."""
        if self.user:
            subprocess.run([sys.executable, "-I", "-S", "-c", END], cwd="/", **self.user)


def can_switch_user() -> bool:
    """Whether this user may start processes as nobody."""
    try:
        return (
            os.geteuid() == 0 and subprocess.run(["true"], user=NOBODY, group=NOBODY, extra_groups=[]).returncode == 0
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return False


def exam_in(path: Path) -> tuple[Exam, float]:
    """The exam that export.py has written, and the seconds that its tests may take."""
    document = json.loads(path.read_text(encoding="utf-8"))
    given_tree, gold_tree = (
        {name: base64.b64decode(data) for name, data in document[tree].items()} for tree in ("given", "gold")
    )
    required_tests, target_tests, apart_tests = (tuple(document[kind]) for kind in ("wanted", "asked", "apart"))
    fresh = tuple(Question(**{**row, "args": tuple(row["args"])}) for row in document["fresh"])
    arguments = required_tests, document["package"], target_tests, fresh, apart_tests
    return Exam(
        given_tree, gold_tree, Editable(tuple(document["editable"])), document["tests"], *arguments, document["support"]
    ), document["seconds"]


def main(tests: str, left: str, logs: str) -> None:
    """Grades the folder `left`, and writes LOGS/reward.txt and what was found, LOGS/verdicts.json."""
    exam, seconds = exam_in(Path(tests) / "exam.json")
    modes = {path: os.stat(path).st_mode & 0o7777 for path in (tests, logs)} if can_switch_user() else {}
    try:
        for path in modes:
            os.chmod(path, stat.S_IRWXU)
        result = grade(exam, Path(left), LocalSandbox, seconds=seconds)
    finally:
        for path, mode in modes.items():
            os.chmod(path, mode)
    report = {
        name: getattr(result.reward, name) for name in ("success", "succinctness", "conformance", "flags", "total")
    }
    report |= {"failed": dict(result.verdicts.failed), "user of its own": bool(modes), "trust": result.trust.value}
    (Path(logs) / "verdicts.json").write_text(json.dumps(report, indent=1) + "\n")
    (Path(logs) / "reward.txt").write_text(f"{result.reward.total:g}\n")
