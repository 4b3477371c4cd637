"""Runs a package's tests many times, each time with some files changed, and says each outcome, or which test executed which lines.

pytest is imported once. Every run is a fork with a copy of the tree, so that none sees what another one did, and no module of the package is imported
twice in a process. Tests are collected without conftest files and without sibling modules, as the grader does, and asserts are not rewritten: that
would take most of the time, to word messages that nobody reads.

    PYTHONHASHSEED=0 python3 -s -P -B run.py PLAN        PLAN: JSON with tree, changes, only, without, jobs, seconds, each, and trace
"""

import base64
import ctypes
import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

PR_SET_CHILD_SUBREAPER = 36


class Told:
    """The outcome of each test; of a file that cannot be collected, "error". And the seconds of each.

    `only`: the tests to be played, None for all. `without`: those not to be. `each`: seconds of processor time after which a test ends the run."""

    def __init__(self, only: list[str] | None, without: list[str], each: float) -> None:
        self.only, self.without, self.each = only if only is None else {*only}, {*without}, each
        self.outcomes: dict[str, str] = {}
        self.took: dict[str, float] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self.without and (self.only is None or item.nodeid in self.only)]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self):
        signal.setitimer(signal.ITIMER_PROF, self.each)  # its signal ends the process, whatever the test catches
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.outcomes[report.nodeid or "collection"] = "error"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        both = (self.outcomes.get(report.nodeid, "passed"), report.outcome)
        self.outcomes[report.nodeid] = "failed" if "failed" in both else "skipped" if "skipped" in both else "passed"
        self.took[report.nodeid] = self.took.get(report.nodeid, 0.0) + report.duration


class Traced:
    """Lines of files in the tree by the test that executed them; by the empty name those that ran outside of tests."""

    def __init__(self, tree: str) -> None:
        self.tree, self.lines, self.now = tree + "/", {"": set()}, set()
        self.now = self.lines[""]

    def start(self) -> None:
        threading.settrace(self.trace)
        sys.settrace(self.trace)

    def trace(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(self.tree):
            return None
        if event == "line":
            self.now.add((frame.f_code.co_filename, frame.f_lineno))
        return self.trace

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.now = self.lines.setdefault(item.nodeid, set())
        try:
            return (yield)
        finally:
            self.now = self.lines[""]


def play(tree: str, changes: dict[str, str | None], only: list[str] | None, plan: dict) -> dict:
    """One run, in a process of its own."""
    for name, data in changes.items():
        path = Path(tree, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink() if data is None else path.write_bytes(base64.b64decode(data))
    os.chdir(tree)
    sys.path += [tree, f"{tree}/src"]
    Path(tree, ".pytest.ini").write_text("[pytest]\n")
    told, traced, trace = Told(only, plan["without"], plan["each"]), Traced(tree), plan["trace"]
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "-c", ".pytest.ini", "--rootdir", tree]
    options += ["--import-mode=importlib", "--assert=plain", "--tb=no", "--continue-on-collection-errors"]
    if trace:
        traced.start()
    pytest.main([*options, tree], plugins=[told, traced] if trace else [told])
    sys.settrace(None)
    found: dict[str, dict[str, list[int]]] = {}
    for test, lines in traced.lines.items():
        for file, line in sorted(lines):
            found.setdefault(test, {}).setdefault(file[len(tree) + 1 :], []).append(line)
    return {"outcomes": told.outcomes, "lines": found, "took": told.took}


def start(number: int, plan: dict) -> int:
    """Begins a run, and gives its process."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        for handle, how in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
            os.dup2(os.open(os.devnull, how), handle)
        tree = f"/tmp/run-{number}"
        shutil.copytree(plan["tree"], tree)
        found = play(tree, plan["changes"][number], plan["only"][number], plan)
        with open(f"/tmp/said-{number}", "w") as file:
            json.dump(found, file)
    finally:
        os._exit(0)


def end(session: int) -> None:
    """Ends what a run has started and left."""
    try:
        os.killpg(session, signal.SIGKILL)
    except ProcessLookupError:
        pass


def end_children() -> None:
    """Ends what has left its run's session. Orphans are children of this process, which adopts them."""
    me = os.getpid()
    while children := Path(f"/proc/{me}/task/{me}/children").read_text().split():
        for pid in map(int, children):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def finish(number: int) -> dict:
    """What a run said; an error where it said nothing, because it was ended or ended itself."""
    shutil.rmtree(f"/tmp/run-{number}", ignore_errors=True)
    try:
        with open(f"/tmp/said-{number}") as file:
            found = json.load(file)
        os.unlink(f"/tmp/said-{number}")
        return found
    except (OSError, ValueError):
        return {"outcomes": {"the run": "error"}, "lines": {}, "took": {}}


def main(path: str) -> None:
    with open(path) as file:
        plan = json.load(file)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    waiting, running, found = list(range(len(plan["changes"]))), {}, {}
    while waiting or running:
        while waiting and len(running) < plan["jobs"]:
            number = waiting.pop(0)
            running[start(number, plan)] = number, time.monotonic() + plan["seconds"]
        pid, _ = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            number, _ = running.pop(pid)
            end(pid)
            found[number] = finish(number)
        elif not pid:
            for late in [one for one, (_, until) in running.items() if time.monotonic() > until]:
                end(late)
            time.sleep(0.002)
    end_children()
    print(json.dumps([found[number] for number in sorted(found)]))


if __name__ == "__main__":
    main(sys.argv[1])
