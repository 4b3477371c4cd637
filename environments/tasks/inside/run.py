"""Runs a package's tests many times, each time with some files changed, and reports each outcome, or which test
executed which lines.

pytest is imported once. Every run is a fork with a copy of the tree, so that no run sees what another one did, and no
module of the package is imported twice in a process. conftest files are loaded as the grader loads them, and asserts
are not rewritten: that would take most of the time, to word messages that nobody reads.

A package's code may do whatever it likes. Each fork has a pipe of its own for its answer, and no process of the same
user can look into this one. So a run can spoil its own answer and no other one, and environments/tasks/answers.py
checks it.

    PYTHONHASHSEED=0 python3 -s -P -B run.py PLAN

PLAN is JSON: tree, changes, only, without, jobs, seconds, each and trace (environments/tasks/runner.py).
"""

import base64
import ctypes
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

import_path = vars(sys.modules["_pytest.pathlib"])["import_path"]  # as pytest imports files of tests

PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
CPUCLOCK_SCHED = 2
"""With the process's number, the clock of its processor time."""
MAX_ANSWER_BYTES, HANDLES = 48 << 20, 4096
"""Bytes of an answer; and above the number of each handle that is open here."""
BUSY, PATIENCE = 20, 10
"""A run whose seconds are over, by the wall clock, is ended where it has used less than one of so many; and in any case
after so many times its seconds."""


class OutcomePlugin:
    """The outcome of each test; of a file that cannot be collected, "error". And the seconds of each.

    `selected_tests`: the tests to be played, None for all. `skipped_tests`: those not to be. `seconds`: of processor
    time after which a test ends the run."""

    def __init__(self, selected_tests: list[str] | None, skipped_tests: list[str], seconds: float) -> None:
        self.selected_tests, self.skipped_tests, self.seconds = (
            selected_tests if selected_tests is None else {*selected_tests},
            {*skipped_tests},
            seconds,
        )
        self.outcomes: dict[str, str] = {}
        self.durations: dict[str, float] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [
            item
            for item in items
            if item.nodeid not in self.skipped_tests
            and (self.selected_tests is None or item.nodeid in self.selected_tests)
        ]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self):
        signal.setitimer(signal.ITIMER_PROF, self.seconds)  # its signal ends the process, whatever the test catches
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.outcomes[report.nodeid or "collection"] = "error"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        phase_outcomes = (self.outcomes.get(report.nodeid, "passed"), report.outcome)
        self.outcomes[report.nodeid] = (
            "failed" if "failed" in phase_outcomes else "skipped" if "skipped" in phase_outcomes else "passed"
        )
        self.durations[report.nodeid] = self.durations.get(report.nodeid, 0.0) + report.duration


class Conftests:
    """Loads the tree's conftest files as the grader does: for their folders, and without those that cannot be imported.
    Those are in error."""

    def __init__(self, tree: str, reporter: OutcomePlugin) -> None:
        self.tree, self.reporter = Path(tree), reporter

    def pytest_load_initial_conftests(self, early_config):
        for path in sorted(self.tree.rglob("conftest.py"), key=lambda path: (len(path.parts), path)):
            try:
                module = import_path(path, mode="importlib", root=self.tree, consider_namespace_packages=False)
                early_config.pluginmanager.register(module, str(path))
            except Exception:
                self.reporter.outcomes[path.relative_to(self.tree).as_posix()] = "error"


def folders_of_tests(tree: str) -> list[str]:
    """Folders that pytest would put on the path: above each file of tests, the first one that is no package."""
    folders = set()
    for path in Path(tree).rglob("*.py"):
        if path.name.startswith("test_") or path.name.endswith("_test.py") or path.name == "conftest.py":
            folder = path.parent
            while folder != Path(tree) and (folder / "__init__.py").is_file():
                folder = folder.parent
            folders.add(str(folder))
    return sorted(folders)


class LineTracer:
    """Lines of files in the tree by the test that executed them; by the empty name those that ran outside of tests."""

    def __init__(self, tree: str) -> None:
        self.tree, self.lines, self.current_lines = tree + "/", {"": set()}, set()
        self.current_lines = self.lines[""]

    def start(self) -> None:
        threading.settrace(self.trace)
        sys.settrace(self.trace)

    def trace(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(self.tree):
            return None
        if event == "line":
            self.current_lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self.trace

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.current_lines = self.lines.setdefault(item.nodeid, set())
        try:
            return (yield)
        finally:
            self.current_lines = self.lines[""]


def play(tree: str, changes: dict[str, str | None], only: list[str] | None, plan: dict) -> dict:
    """One run, in a process of its own."""
    for name, data in changes.items():
        path = Path(tree, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink() if data is None else path.write_bytes(base64.b64decode(data))
    os.chdir(tree)
    sys.path += [tree, f"{tree}/src", *folders_of_tests(tree)]
    Path(tree, ".pytest.ini").write_text("[pytest]\n")
    reporter, tracer, trace = OutcomePlugin(only, plan["without"], plan["each"]), LineTracer(tree), plan["trace"]
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "-c", ".pytest.ini", "--rootdir", tree]
    options += ["--import-mode=importlib", "--assert=plain", "--tb=no", "--continue-on-collection-errors"]
    if trace:
        tracer.start()
    pytest.main([*options, tree], plugins=[reporter, Conftests(tree, reporter), *([tracer] if trace else [])])
    sys.settrace(None)
    lines: dict[str, dict[str, list[int]]] = {}
    for test, executed_lines in tracer.lines.items():
        for file, line in sorted(executed_lines):
            lines.setdefault(test, {}).setdefault(file[len(tree) + 1 :], []).append(line)
    return {"outcomes": reporter.outcomes, "lines": lines, "took": reporter.durations}


class Run:
    """A fork that plays tests. `pid`: of the process, which leads a session of its own."""

    def __init__(self, number: int, plan: dict) -> None:
        self.number, self.seconds, self.since = number, plan["seconds"], time.monotonic()
        self.folder = tempfile.mkdtemp(prefix="run-")
        self.reader, writer = os.pipe()
        os.set_blocking(self.reader, False)
        self.answer, self.is_open = bytearray(), True
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self.become(writer, plan)
            finally:
                os._exit(0)
        os.close(writer)

    def become(self, writer: int, plan: dict) -> None:
        """What the fork does."""
        os.setsid()
        os.closerange(3, writer)  # pipes of other runs
        os.closerange(writer + 1, HANDLES)
        for handle, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
            os.dup2(os.open(os.devnull, flags), handle)
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        tree = f"{self.folder}/tree"
        shutil.copytree(plan["tree"], tree)
        answer = json.dumps(play(tree, plan["changes"][self.number], plan["only"][self.number], plan)).encode()
        with open(writer, "wb") as pipe:
            pipe.write(answer)

    def read(self) -> None:
        """Takes what the pipe holds."""
        try:
            while block := os.read(self.reader, 1 << 20):
                self.answer += block
                if len(self.answer) > MAX_ANSWER_BYTES:
                    break
            self.is_open = False
        except BlockingIOError:
            pass

    def is_late(self) -> bool:
        """Whether the run has used up its time. What counts is processor time, since a crowded machine makes every run
        slow; but a run that waits for something may wait for ever."""
        wall_seconds = time.monotonic() - self.since
        try:
            cpu_seconds = time.clock_gettime(((~self.pid) << 3) | CPUCLOCK_SCHED)
        except OSError:
            return False
        return (
            cpu_seconds > self.seconds
            or wall_seconds > self.seconds
            and cpu_seconds < wall_seconds / BUSY
            or wall_seconds > PATIENCE * self.seconds
        )

    def end(self) -> None:
        """Ends the processes of the run's session."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def result(self) -> str | None:
        """The answer as it was given: JSON, unless code of the package wrote something else; None where there is
        none."""
        self.end()
        self.read()
        os.close(self.reader)
        shutil.rmtree(self.folder, ignore_errors=True)
        return self.answer.decode(errors="replace") if len(self.answer) <= MAX_ANSWER_BYTES else None


def end_children() -> None:
    """Ends what has left its run's session. Orphans are children of this process, which adopts them."""
    me = os.getpid()
    while children := Path(f"/proc/{me}/task/{me}/children").read_text().split():
        for pid in map(int, children):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def main(path: str) -> None:
    with open(path) as file:
        plan = json.load(file)
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    pending, active_runs, results = list(range(len(plan["changes"]))), dict[int, Run](), dict[int, str | None]()
    while pending or active_runs:
        while pending and len(active_runs) < plan["jobs"]:
            run = Run(pending.pop(0), plan)
            active_runs[run.pid] = run
        ready, _, _ = select.select([run.reader for run in active_runs.values() if run.is_open], [], [], 0.002)
        for run in active_runs.values():
            if run.reader in ready:
                run.read()
        pid, _ = os.waitpid(-1, os.WNOHANG)
        if pid in active_runs:
            run = active_runs.pop(pid)
            results[run.number] = run.result()
        elif not pid:
            for run in active_runs.values():
                if len(run.answer) > MAX_ANSWER_BYTES or run.is_late():
                    run.end()
    end_children()
    print(json.dumps([results[number] for number in sorted(results)]))


if __name__ == "__main__":
    main(sys.argv[1])
