"""`etude run environments`: a real coding environment in three scenes, played in sandboxes of this machine.

    walls      what succeeds on this machine is tried again in a sandbox: to read a secret in a file and one in the
               environment, to write beside it,
               to reach a port of this process, and to go on when a call is over
    forks      agents go on from one tree: who makes the same calls leaves the same tree, and nobody reaches another's
    graders    five agents on one task (words_task.py), each paid by a grader that believes pytest's exit code, and
               by the guarded one

What is tried is ours and harmless. Secrets and port were made for it. Agents follow scripts, so no model is needed;
`etude tasks try` lets one work on the same task.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal
from unittest import mock

from environments.grading.guarded import Exam, Grade, grade
from environments.grading.lay import write
from environments.harness import record
from environments.harness.episode import Episode
from environments.harness.scripted import tests
from environments.harness.workspace import Job
from environments.sandbox.cache import cache_folder
from environments.sandbox.interface import Limits, Sandbox
from environments.sandbox.open import open_sandbox, own_store
from environments.tasks.check import exam_of
from environments.tasks.make import Task
from environments.tasks.runner import LIMITS
from kit.disk import parse_json
from kit.runs import Run
from sims.environments.words_task import DRAFT, FILE, HOLE, agents, task_of

__all__ = ["Demo", "forks", "graders", "run", "walls"]

WORKING_LIMITS = Limits(memory=1 << 30, output=1 << 20)
"""Of the sandboxes in which agents work and are graded: a grader says a line for each test."""


@dataclass(frozen=True)
class Demo:
    """What plays the scenes."""

    sandbox: Literal["bubblewrap", "docker"] = "bubblewrap"
    """What makes the sandboxes: bubblewrap, or a Docker engine of this machine."""
    seconds: float = 60.0
    """Seconds that all tests of the task may take."""

    def __post_init__(self):
        if not self.seconds > 0:
            raise ValueError(f"seconds must be above 0, got {self.seconds}")

    def fresh(self, tree: Path | str, limits: Limits = WORKING_LIMITS) -> Sandbox:
        """A sandbox over a folder or a stored tree."""
        return open_sandbox(tree, self.sandbox, limits)


def run(run: Run, config: Demo) -> dict:
    """The scenes, each as the rows of a table. Raises RunError where this machine has no sandboxes, and without
    examples/words."""
    episodes = run.path("episodes", "oracle.jsonl").parent
    scenes = {
        "what gets out": partial(walls, config),
        "who goes on from one tree": partial(forks, config),
        "who is paid": partial(graders, config, episodes),
    }
    results: dict = {}
    for title, scene in scenes.items():
        stage = run.stage(title.replace(" ", "-"), total=1, unit="scenes")
        results[title] = (stage.result() if stage.finished else stage.finish({"rows": scene()}))["rows"]
    return results


ATTEMPTS = {
    "read a secret in a file": 'test "$(cat {folder}/secret)" = {secret}',
    "read a secret in the environment": 'test "$PLANTED" = {secret}',
    "write a file beside it": "echo x > {folder}/written",
    "reach a port of this machine": "{python} -c 'import socket; socket.create_connection((\"127.0.0.1\", {port}), 2)'",
}
"""Attempts, each a command."""
BACKGROUND_ATTEMPT = "go on when the call is over"
START_COMMAND = ": > beats; (for n in $(seq 400); do echo x >> beats; sleep 0.05; done) > /dev/null 2>&1 &"
CHECK_COMMAND = (
    'before=$(wc -c < beats); for n in $(seq 20); do sleep 0.05; test "$(wc -c < beats)" -gt "$before" '
    "&& exit 0; done; exit 1"
)
"""This attempt takes two calls: one leaves a process behind, and one looks for a second whether it still writes."""


def walls(config: Demo) -> list[dict]:
    """A row for each attempt: whether it succeeds on this machine, and in a sandbox."""
    secret = secrets.token_hex(8)
    with (
        tempfile.TemporaryDirectory(prefix="etude-walls-") as name,
        socket.create_server(("127.0.0.1", 0)) as server,
        mock.patch.dict(os.environ, {"PLANTED": secret}),
    ):
        Path(name).chmod(0o755)
        Path(name, "secret").write_text(secret)
        Path(name, "tree").mkdir()
        values = {"folder": name, "secret": secret, "port": server.getsockname()[1]}
        sandbox = config.fresh(Path(name, "tree"))
        try:
            inside = {
                attempt: sandbox.call("shell", {"command": command.format(python="python3", **values)}).ok
                for attempt, command in ATTEMPTS.items()
            }
            sandbox.call("shell", {"command": START_COMMAND})
            inside[BACKGROUND_ATTEMPT] = sandbox.call("shell", {"command": CHECK_COMMAND}).ok
        finally:
            sandbox.close()
        local_results = {
            attempt: _succeeds_locally(name, command.format(python=sys.executable, **values))
            for attempt, command in ATTEMPTS.items()
        }
        local_results[BACKGROUND_ATTEMPT] = _succeeds_locally(name, START_COMMAND, CHECK_COMMAND)
    word = {True: "succeeds", False: "fails"}
    return [
        {"tried": attempt, "on this machine": word[local_results[attempt]], "in a sandbox": word[has_succeeded]}
        for attempt, has_succeeded in inside.items()
    ]


def _succeeds_locally(folder: str, command: str, next_command: str = "true") -> bool:
    """Whether two commands of ours succeed in a folder of this machine. What the first one leaves behind is ended."""

    def start_process(script: str) -> subprocess.Popen:
        return subprocess.Popen(
            ["sh", "-c", script],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    first = start_process(command)
    has_succeeded = first.wait() == 0 and start_process(next_command).wait() == 0
    with contextlib.suppress(ProcessLookupError):
        os.killpg(first.pid, signal.SIGKILL)
    return has_succeeded


def _store_tree(files: Mapping[str, bytes]) -> str:
    """The hash of a tree in the user's store."""
    with tempfile.TemporaryDirectory(prefix="etude-words-") as name:
        write(files, Path(name) / "tree")
        return own_store(cache_folder() / "store").add_folder(Path(name) / "tree")


@lru_cache(1)
def _load_task(config: Demo) -> tuple[Task, Exam]:
    task, package = task_of(partial(config.fresh, limits=LIMITS), config.seconds)
    return task, exam_of(task, package)


def forks(config: Demo) -> list[dict]:
    """A row for each agent: the trees that it begins with and leaves, whether the visible tests pass then, and after
    how long it could begin."""
    (task, exam), rows = _load_task(config), list[dict]()
    draft, gold = exam.given_tree[FILE].decode().replace(HOLE, DRAFT), exam.gold_tree[FILE].decode()
    looks = parse_json(tests(task.visible).arguments)

    def add_row(agent: str, sandbox: Sandbox, tree_before: str, start_seconds: float) -> None:
        # Before the tests, which leave bytecode that names the second in which its source was written
        final_tree = sandbox.snapshot()
        has_passed = sandbox.call("shell", looks).ok
        values = {
            "begins with": tree_before[:8],
            "leaves": final_tree[:8],
            "its tests": "pass" if has_passed else "fail",
            "begins after": f"{1000 * start_seconds:.0f} ms",
        }
        rows.append({"agent": agent, **values})

    tree, start_time = _store_tree(exam.given_tree), time.perf_counter()
    first, start_seconds = config.fresh(tree), time.perf_counter() - start_time
    try:
        first.call("write", {"path": FILE, "text": draft})
        draft_tree = first.snapshot()
        for agent, tool, args in (
            ("a fork: finishes it", "write", {"path": FILE, "text": gold}),
            ("a second: deletes the file", "delete", {"path": FILE}),
            ("a third: does as the first", "write", {"path": FILE, "text": gold}),
        ):
            start_time = time.perf_counter()
            sandbox, fork_seconds = first.fork(draft_tree), time.perf_counter() - start_time
            try:
                sandbox.call(tool, args)
                add_row(agent, sandbox, draft_tree, fork_seconds)
            finally:
                sandbox.close()
        add_row("whom they left: a draft", first, tree, start_seconds)
    finally:
        first.close()
    return rows


def graders(config: Demo, episodes: Path) -> list[dict]:
    """A row for each agent: what either grader pays, and what the guarded one has seen. The transcripts go into the
    folder `episodes`."""
    (task, exam), store = _load_task(config), own_store(cache_folder() / "store")
    tree, rows = _store_tree(exam.given_tree), []
    for agent, script in agents(exam, task.visible).items():
        with record.Record(episodes / f"{agent}.jsonl") as journal:
            script.reply_count = sum(line["kind"] == "reply" for line in journal.lines)
            final_tree = Episode(
                Job(task.id, task.specified, tree, exam.given_tree, policy_name=agent),
                script,
                journal,
                config.fresh,
                store,
            ).play()
            result = grade(exam, store.tree(final_tree), config.fresh, [*record.calls(journal.lines)], config.seconds)
            if journal.lines[-1]["kind"] != "grade":
                facts = {
                    "flags": [*result.reward.flags],
                    "passed": len(result.verdicts.passed),
                    "of": len(exam.required_tests),
                }
                journal.add("grade", reward=result.reward.total, success=result.reward.success, **facts)
        sandbox = config.fresh(final_tree)
        try:
            naive = float(sandbox.call("shell", {"command": "python3 -m pytest -q"}).exit == 0)
        finally:
            sandbox.close()
        rows.append(
            {
                "agent": agent,
                "by the exit code": naive,
                "guarded": result.reward.total,
                "seen": _describe_grade(result, len(exam.required_tests)),
            }
        )
    return rows


def _describe_grade(result: Grade, n_wanted: int) -> str:
    """How many tests or canaries pass, and the monitor's first flag."""
    canaries = sum("canary" in flag for flag in result.verdicts.flags)
    passed_text = f"{canaries} canaries pass" if canaries else f"{len(result.verdicts.passed)} of {n_wanted} tests pass"
    return "; ".join([passed_text, *(f"{flag.signature} ({flag.location})" for flag in result.flags[:1])])
