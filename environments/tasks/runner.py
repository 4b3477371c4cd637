"""A runner of tests in sandboxes: many runs in one of them, each a fork of a warm pytest."""

from __future__ import annotations

import base64
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from environments.grading.lay import write
from environments.sandbox.interface import Limits, Sandbox
from environments.sandbox.visible import one_line
from environments.tasks.answers import SILENT, Answer, parse_answer, parse_answers
from kit.settings import RunError

__all__ = ["LIMITS", "Sandboxed"]

LIMITS = Limits(memory=1 << 30, output=64 << 20, seconds=600.0)
"""For sandboxes in which tests run: tables of coverage are long."""
BATCH = 20
"""Runs in one call."""
TEST_SECONDS = 3.0
"""Seconds of processor time of one test, after which its run is over: without a piece, a loop may never end."""
SLOWER = 10
"""Times as long may a run take in which lines are recorded, or the first one of a package."""
Tree = Mapping[str, bytes]
"""Files by their paths."""
Run = tuple[Mapping[str, bytes], Collection[str] | None]
"""Some files with other contents, and the tests that are played; None for all."""


class Sandboxed:
    """See `Runner` in make.py. `fresh`: opens a sandbox over a folder, with LIMITS or wider ones. `jobs`: runs at a
    time. `seconds`: of processor time of one run; a run that only waits for that long is ended as well (inside/run.py).
    `on_progress`: hears how many runs were made, now and then. `without`: tests that are never played."""

    def __init__(
        self,
        fresh: Callable[[Path], Sandbox],
        jobs: int = 2,
        seconds: float = 60.0,
        on_progress: Callable[[int], None] = lambda count: None,
    ) -> None:
        self.fresh, self.jobs, self.seconds, self.on_progress = fresh, jobs, seconds, on_progress
        self.skipped_tests: frozenset[str] = frozenset()

    def outcomes(
        self,
        files: Mapping[str, bytes],
        changes: Sequence[Mapping[str, bytes]] = ({},),
        only: Sequence[Collection[str] | None] = (),
        seed: int = 0,
    ) -> list[Mapping[str, str]]:
        """See `Runner`. Raises RunError where the sandbox cannot run tests at all."""
        results, runs = [], [*zip(changes, only or [None] * len(changes), strict=True)]
        for at in range(0, len(runs), BATCH):
            results += [
                run_answer["outcomes"]
                for run_answer in self._play_runs(files, runs[at : at + BATCH], self.seconds, TEST_SECONDS, seed=seed)
            ]
            self.on_progress(len(runs[at : at + BATCH]))
        return results

    def patiently(self, files: Mapping[str, bytes]) -> dict[str, tuple[str, float]]:
        """See `Runner`. Raises RunError as well."""
        first, second = self._play_runs(files, [({}, None)] * 2, self._long_limit, 0.0)
        self.on_progress(2)
        durations = (first["took"], second["took"])
        return {
            test: (outcome, min(times.get(test, math.inf) for times in durations))
            for test, outcome in first["outcomes"].items()
        }

    def coverage(self, files: Mapping[str, bytes]) -> dict[str, set[tuple[str, int]]]:
        """See `Runner`. Raises RunError as well, and where the tests do not end in time: half a table would look like a
        whole one."""
        (traced_answer,) = self._play_runs(files, [({}, None)], self._long_limit, 0.0, trace=True)
        self.on_progress(1)
        if SILENT in traced_answer["outcomes"]:
            raise RunError(
                f"the tests of which lines are recorded do not end within {self._long_limit:g} seconds, or end the run"
            )
        return {
            test: {(file, line) for file, lines in lines_by_file.items() for line in lines}
            for test, lines_by_file in traced_answer["lines"].items()
        }

    @property
    def _long_limit(self) -> float:
        return min(SLOWER * self.seconds, LIMITS.seconds - 30)

    def _play_runs(
        self, files: Tree, runs: Sequence[Run], seconds: float, test_seconds: float, trace: bool = False, seed: int = 0
    ) -> list[Answer]:
        """The answer of each run. Where a run takes others down with it, halves are played again, until it is alone."""
        answers = self._play_once(files, runs, seconds, test_seconds, trace, seed)
        if answers is not None:
            return answers
        if len(runs) == 1:
            return [parse_answer(None)]
        half = len(runs) // 2
        parts = (runs[:half], runs[half:])
        return [answer for part in parts for answer in self._play_runs(files, part, seconds, test_seconds, trace, seed)]

    def _play_once(
        self, files: Tree, runs: Sequence[Run], seconds: float, test_seconds: float, trace: bool, seed: int
    ) -> list[Answer] | None:
        """The answer of each run; None where the call crossed a limit, or where its text is no list of answers. Raises
        RunError where the sandbox does not work."""
        plan = {
            "tree": "/work/tree",
            "changes": [
                {name: base64.b64encode(data).decode() for name, data in changes.items()} for changes, _ in runs
            ],
            "only": [only if only is None else sorted(only) for _, only in runs],
            "without": sorted(self.skipped_tests),
            "jobs": self.jobs,
            "seconds": seconds,
            "each": test_seconds,
            "trace": trace,
        }
        with tempfile.TemporaryDirectory(prefix="etude-tasks-") as name:
            folder = Path(name)
            folder.chmod(0o755)
            write(files, folder / "tree")
            shutil.copyfile(Path(__file__).parent / "inside" / "run.py", folder / "run.py")
            sandbox = self.fresh(folder)
        try:
            write_result = sandbox.call("write", {"path": "plan.json", "text": json.dumps(plan)})
            result = sandbox.call(
                "shell",
                {
                    "command": f"exec env -i PATH=$PATH HOME=/tmp LANG=C.UTF-8 PYTHONHASHSEED={seed} python3 -s "
                    f"-P -B run.py plan.json"
                },
            )
            is_working = write_result.ok and (result.ok or sandbox.call("shell", {"command": "true"}).ok)
        finally:
            sandbox.close()
        if result.ok:
            return parse_answers(result.text, len(runs))
        if is_working and result.end_reason:
            return None
        raise RunError(
            f"the tests cannot be run: {result.end_reason or one_line(result.text[-200:]) or write_result.text}"
        )
