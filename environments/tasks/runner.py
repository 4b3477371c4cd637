"""A runner of tests in sandboxes: many runs in one of them, each a fork of a warm pytest."""

from __future__ import annotations

import base64
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from environments.grading.lay import write
from environments.sandbox.interface import Limits, Sandbox
from environments.sandbox.visible import one_line
from kit.settings import RunError

__all__ = ["LIMITS", "Sandboxed"]

LIMITS = Limits(memory=1 << 30, output=64 << 20, seconds=600.0)
"""For sandboxes in which tests run: tables of coverage are long."""
BATCH = 100
"""Runs in one call."""


class Sandboxed:
    """See `Runner` in make.py. `fresh`: opens a sandbox over a folder, with LIMITS or wider ones. `jobs`: runs at a time. `seconds`: of one run."""

    def __init__(self, fresh: Callable[[Path], Sandbox], jobs: int = 2, seconds: float = 60.0) -> None:
        self.fresh, self.jobs, self.seconds = fresh, jobs, seconds

    def outcomes(self, files: Mapping[str, bytes], changes: Sequence[Mapping[str, bytes]] = ({},)) -> list[Mapping[str, str]]:
        """See `Runner`. Raises RunError where the sandbox cannot run tests at all."""
        found = []
        for at in range(0, len(changes), BATCH):
            found += [one["outcomes"] for one in self._play(files, changes[at : at + BATCH], False)]
        return found

    def coverage(self, files: Mapping[str, bytes]) -> dict[str, set[tuple[str, int]]]:
        """See `Runner`. Raises RunError as well."""
        (found,) = self._play(files, [{}], True)
        return {test: {(file, line) for file, lines in per.items() for line in lines} for test, per in found["lines"].items()}

    def _play(self, files: Mapping[str, bytes], changes: Sequence[Mapping[str, bytes]], trace: bool) -> list[dict]:
        plan = {
            "tree": "/work/tree",
            "changes": [{name: base64.b64encode(data).decode() for name, data in one.items()} for one in changes],
            "jobs": self.jobs,
            "seconds": self.seconds,
            "trace": trace,
        }
        with tempfile.TemporaryDirectory(prefix="etude-tasks-") as name:
            folder = Path(name)
            folder.chmod(0o755)
            write(files, folder / "tree")
            shutil.copyfile(Path(__file__).parent / "inside" / "run.py", folder / "run.py")
            sandbox = self.fresh(folder)
        try:
            written = sandbox.call("write", {"path": "plan.json", "text": json.dumps(plan)})
            said = sandbox.call("shell", {"command": "exec python3 -I -B run.py plan.json"})
        finally:
            sandbox.close()
        if not (written.ok and said.ok):
            raise RunError(f"the tests cannot be run: {said.ended or one_line(said.text[-200:]) or written.text}")
        return json.loads(said.text)
