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
BATCH = 20
"""Runs in one call."""
SILENT = {"the run": "error"}
"""Outcomes of a run that said nothing, as in inside/run.py."""
SLOWER = 10
"""Times as long may a run take in which lines are recorded."""


class Sandboxed:
    """See `Runner` in make.py. `fresh`: opens a sandbox over a folder, with LIMITS or wider ones. `jobs`: runs at a time. `seconds`: of one run.
    `told`: hears how many runs were made, now and then."""

    def __init__(
        self, fresh: Callable[[Path], Sandbox], jobs: int = 2, seconds: float = 60.0, told: Callable[[int], None] = lambda count: None
    ) -> None:
        self.fresh, self.jobs, self.seconds, self.told = fresh, jobs, seconds, told

    def outcomes(self, files: Mapping[str, bytes], changes: Sequence[Mapping[str, bytes]] = ({},)) -> list[Mapping[str, str]]:
        """See `Runner`. Raises RunError where the sandbox cannot run tests at all."""
        found = []
        for at in range(0, len(changes), BATCH):
            found += [one["outcomes"] for one in self._play(files, changes[at : at + BATCH], False)]
            self.told(len(changes[at : at + BATCH]))
        return found

    def coverage(self, files: Mapping[str, bytes]) -> dict[str, set[tuple[str, int]]]:
        """See `Runner`. Raises RunError as well, and where the tests do not end in time: half a table would look like a whole one."""
        (found,) = self._play(files, [{}], True)
        self.told(1)
        if SILENT.keys() <= found["outcomes"].keys():
            raise RunError(f"the tests of which lines are recorded do not end within {self._time(True):g} seconds, or end the run")
        return {test: {(file, line) for file, lines in per.items() for line in lines} for test, per in found["lines"].items()}

    def _time(self, trace: bool) -> float:
        """Seconds of a run. To record lines takes several times as long as not to."""
        return min(SLOWER * self.seconds, LIMITS.seconds - 30) if trace else self.seconds

    def _play(self, files: Mapping[str, bytes], changes: Sequence[Mapping[str, bytes]], trace: bool) -> list[dict]:
        """What each run said. Where one of them takes the others down with it, halves are played again, until it is alone."""
        found = self._once(files, changes, trace)
        if found is not None:
            return found
        if len(changes) == 1:
            return [{"outcomes": dict(SILENT), "lines": {}}]
        half = len(changes) // 2
        return self._play(files, changes[:half], trace) + self._play(files, changes[half:], trace)

    def _once(self, files: Mapping[str, bytes], changes: Sequence[Mapping[str, bytes]], trace: bool) -> list[dict] | None:
        """What each run said, or None where the call crossed a limit. Raises RunError where the sandbox does not work."""
        plan = {
            "tree": "/work/tree",
            "changes": [{name: base64.b64encode(data).decode() for name, data in one.items()} for one in changes],
            "jobs": self.jobs,
            "seconds": self._time(trace),
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
            works = written.ok and (said.ok or sandbox.call("shell", {"command": "true"}).ok)
        finally:
            sandbox.close()
        if said.ok:
            return json.loads(said.text)
        if works and said.ended:
            return None
        raise RunError(f"the tests cannot be run: {said.ended or one_line(said.text[-200:]) or written.text}")
