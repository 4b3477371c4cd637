"""`etude tasks install`: sets a folder up in a sandbox, in two stages, and writes the steps that worked to a file that
can be replayed."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import textwrap
import urllib.parse
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from environments.egress.door import Door
from environments.egress.rules import Host, Rules
from environments.harness.episode import Budget
from environments.harness.messages import Policy, PolicyError
from environments.harness.remote import Remote
from environments.install.attempt import Attempt, Outcome, Revise, explain_failure, revised, run_attempts
from environments.install.folder import copy_folder, read
from environments.install.model import ModelInstaller
from environments.install.propose import VENV, modules, proposed
from environments.install.steps import Step, format_steps, parse_steps
from environments.install.wheels import FOLDER, INDEX, make_install_files, rooted
from environments.sandbox.cache import cache_folder
from environments.sandbox.interface import Limits
from environments.sandbox.open import open_sandbox, own_store
from environments.sandbox.visible import one_line
from kit.disk import Journal, atomic_write, read_json, read_lines
from kit.settings import Interrupted, RunError

__all__ = ["hosts_of", "install", "policy_of", "replay"]

LIMITS = Limits(processes=256, memory=1 << 30, disk=1 << 30, inodes=100_000, output=32 << 10, seconds=600.0)
"""Of the sandboxes in which packages are installed."""
BUDGET = Budget()
FILE_HOSTS = {"https://pypi.org": ("files.index", "https://files.pythonhosted.org")}
"""Index → where its files lie, under which name."""


def hosts_of(index: str, private: bool) -> tuple[dict[str, Host], str]:
    """What a door lets through for an index, a folder or an address, and the path of its pages. Raises RunError."""
    if Path(index).is_dir():
        return {INDEX: Host(Path(index))}, "/simple/"
    if "://" not in index:
        raise RunError(f"--index {index} is neither a folder nor an address such as https://pypi.org/simple")
    try:
        url = urllib.parse.urlsplit(index)
        server = f"{url.scheme}://{url.netloc}"
        file_hosts = {
            name: Host(address, private=private)
            for index_url, (name, address) in FILE_HOSTS.items()
            if index_url == server
        }
        return {INDEX: Host(server, private=private), **file_hosts}, f"{url.path.rstrip('/')}/"
    except ValueError as error:
        raise RunError(f"--index {one_line(index)}: {error}") from None


def policy_of(model: str, name: str, sampling: dict) -> Policy:
    """A model behind an address. Raises RunError."""
    if not name:
        raise RunError("a model on a server needs its name there: --name NAME")
    try:
        return Remote(
            model,
            name,
            os.environ.get("OPENAI_API_KEY", ""),
            sampling,
            on_retry=lambda reason: print(reason, file=sys.stderr, flush=True),
        )
    except ValueError as error:
        raise RunError(str(error)) from None


class Workspace:
    """The folder as it is, stored, and sandboxes over it. Use it as a context. Raises RunError."""

    def __init__(self, folder: Path, index: str | None, private: bool, log: Path) -> None:
        self.exit_stack, self.store, self.index = ExitStack(), own_store(cache_folder() / "store"), index is not None
        hosts, pages = hosts_of(index, private) if index is not None else ({}, None)
        if not folder.is_dir():
            raise RunError(f"{folder} is not a folder")
        root = rooted()
        with tempfile.TemporaryDirectory(prefix="etude-install-") as name:
            tree = Path(name) / "tree"
            copy_folder(folder, tree, make_install_files(pages))
            self.files = {path: data for path, data in read(tree).items() if not path.startswith(f"{FOLDER}/")}
            self.tree = self.store.add_folder(tree)
        log.parent.mkdir(parents=True, exist_ok=True)
        self.door = self.exit_stack.enter_context(Door(Rules(hosts), log)) if hosts else None
        self.log, self.log_start = log, len(read_lines(log))
        self.fork = partial(open_sandbox, limits=LIMITS, root=root, store=self.store, door=self.door)

    def fresh(self):
        return self.fork(self.tree)

    def trouble(self) -> str:
        """What the index had against the last request that it did not answer, if there is one."""
        reasons = [
            str(line["why"]) for line in read_lines(self.log)[self.log_start :] if line.get("host") and line.get("why")
        ]
        hint = " (--private-index allows it)" if reasons and "no public address" in reasons[-1] else ""
        return f"; the index: {one_line(reasons[-1])}{hint}" if reasons else ""

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *_: object) -> None:
        self.exit_stack.close()


def install(
    folder: Path,
    index: str | None,
    out: Path,
    tries: int,
    policy: Policy | None = None,
    policy_name: str = "",
    budget: Budget = BUDGET,
    private: bool = False,
    overwrite: bool = False,
) -> Attempt:
    """Proposes steps for a folder and tries them; writes those that worked to `out`, and beside it what was tried and
    what was asked of the index. Without a policy, a script plays both stages. Raises RunError, in one line, where the
    folder is not set up; Interrupted."""
    if out.exists() and not overwrite:
        raise RunError(f"{out} already exists; --again overwrites it, and --replay runs its steps")
    with (
        Workspace(folder, index, private, out.with_suffix(".requests.jsonl")) as workspace,
        AttemptLog(out.with_suffix(".tried.jsonl")) as attempt_log,
    ):
        attempt_log.add(
            {
                "kind": "begin",
                "folder": str(folder),
                "tree": workspace.tree,
                "index": index,
                "who": policy_name or "script",
            }
        )
        try:
            steps, revise = _propose_steps(workspace, policy, policy_name, budget, out)
            attempt_log.add({"kind": "proposed", "steps": format_steps(steps)})
            result = _confirm(
                workspace.fresh, run_attempts(steps, workspace.fresh, revise, tries, attempt_log), attempt_log
            )
        except PolicyError as error:
            raise RunError(f"{error}; {attempt_log.path} records the attempts") from None
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted; {attempt_log.path} records the attempts") from None
        attempt_log.add({"kind": "end", "good": result.good, "tries": result.tries})
        if not result.good:
            raise RunError(
                f"{folder} is not set up after {_format_tries(result.tries)}: "
                f"{_describe_fault(result)}{workspace.trouble()}; {attempt_log.path} records the attempts"
            )
        working_steps = [outcome.step for outcome in result.outcomes if outcome.passed]
        fields = {
            "folder": folder.resolve().name,
            "tree": workspace.tree,
            "prepared": result.tree,
            "index": index is not None,
        }
        atomic_write(out, json.dumps({**fields, "steps": format_steps(working_steps)}, indent=1) + "\n")
    print(
        f"{out}: {len(working_steps)} steps work, after {_format_tries(result.tries)}; the resulting "
        f"folder is tree {result.tree}"
    )
    return result


def replay(folder: Path, path: Path, index: str | None, private: bool = False) -> Attempt:
    """Plays the steps of a file once more. Raises RunError for a file that is none, and where a step that worked does
    not."""
    try:
        record = read_json(path)
        steps = parse_steps(record["steps"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise RunError(
            f"{path} contains no steps ({one_line(str(error))}): `etude tasks install` writes them"
        ) from None
    with (
        Workspace(folder, index, private, path.with_suffix(".requests.jsonl")) as workspace,
        AttemptLog(path.with_suffix(".tried.jsonl")) as attempt_log,
    ):
        attempt_log.add(
            {"kind": "begin", "folder": str(folder), "tree": workspace.tree, "index": index, "who": f"replay of {path}"}
        )
        try:
            result = run_attempts(steps, workspace.fresh, lambda *_: None, 1, attempt_log)
        except KeyboardInterrupt:
            raise Interrupted("interrupted; the file of steps is unchanged") from None
        attempt_log.add({"kind": "end", "good": result.good, "tries": 1})
        if not all(outcome.passed for outcome in result.outcomes):
            raise RunError(f"{folder}: a recorded step fails now: {_describe_fault(result)}{workspace.trouble()}")
    tree_note = "the recorded tree" if result.tree == record.get("prepared") else "another tree than the recorded one"
    print(f"{path}: all {len(steps)} steps work; the result is {tree_note}, {result.tree}")
    return result


class AttemptLog:
    """What was tried, as JSON lines and on the terminal. Use it as a context, and call it with each outcome."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.journal = path, Journal(path)
        if self.journal.torn():
            self.journal.append(b"\n")

    def add(self, line: dict) -> None:
        self.journal.append(json.dumps(line).encode() + b"\n")

    def __call__(self, number: int, outcome: Outcome) -> None:
        codes = {
            "command_exit": outcome.command,
            "check_exit": outcome.check,
            "passed": outcome.passed,
            "seconds": round(outcome.seconds, 3),
        }
        self.add(
            {
                "kind": "step",
                "try": number,
                "command": outcome.step.command,
                "check": outcome.step.check,
                **codes,
                "said": outcome.text,
            }
        )
        if number:
            detail = "" if outcome.passed else f": {explain_failure(outcome)}"
            print(
                f"try {number}, {outcome.seconds:.1f} s, {'works' if outcome.passed else 'fails'}: "
                f"{_describe_step(outcome.step)}{detail}",
                flush=True,
            )

    def __enter__(self) -> AttemptLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.journal.close()


def _propose_steps(
    workspace: Workspace, policy: Policy | None, policy_name: str, budget: Budget, out: Path
) -> tuple[list[Step], Revise]:
    """Stage 1, and who plays stage 2."""
    if policy is None:
        return proposed(workspace.files), partial(revised, modules(workspace.files))
    arguments = (
        policy,
        policy_name,
        workspace.fork,
        workspace.store,
        workspace.tree,
        workspace.files,
        out.with_suffix(""),
        VENV,
        workspace.index,
        budget,
    )
    player = ModelInstaller(*arguments)
    return player.propose_steps(), player.revise


def _confirm(fresh: Callable, first_attempt: Attempt, attempt_log: AttemptLog) -> Attempt:
    """Where not all steps worked, those that did once more without the others: that is what a replay plays."""
    working_steps = [outcome.step for outcome in first_attempt.outcomes if outcome.passed]
    if not first_attempt.good or len(working_steps) == len(first_attempt.outcomes):
        return first_attempt
    second_attempt = run_attempts(working_steps, fresh, lambda *_: None, 1, attempt_log)
    return replace(second_attempt, tries=first_attempt.tries)


def _describe_fault(result: Attempt) -> str:
    failed: Sequence[Outcome] = [outcome for outcome in result.outcomes if not outcome.passed and outcome.step.needed]
    if not failed:
        return "all checks passed before any step, so they check nothing"
    suffix = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
    return f"{_describe_step(failed[0].step)}: {explain_failure(failed[0])}{suffix}"


def _describe_step(step: Step) -> str:
    """A step, for a person."""
    return f"`{textwrap.shorten(one_line(step.command or step.check, 1000), 90, placeholder=' …')}`"


def _format_tries(count: int) -> str:
    return f"{count} {'try' if count == 1 else 'tries'}"
