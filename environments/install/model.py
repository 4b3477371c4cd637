"""Both stages by a policy: two runs of the harness, of which the first proposes and the second installs.

The first run looks at the folder, and writes steps. Its checks are kept as they are. The second one tries what it likes
in a sandbox with the door open, and writes the commands that it found. What counts is neither run but what attempt.py
hears when it plays these commands, and then those checks, in a fresh sandbox.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from environments.harness.episode import Budget, Episode
from environments.harness.messages import Policy
from environments.harness.record import Record
from environments.harness.workspace import Job
from environments.install.attempt import Outcome, explain_failure
from environments.install.steps import MAX_STEPS, Step, deduplicate_steps, parse_steps
from environments.install.wheels import FOLDER, INDEX
from environments.sandbox.interface import Sandbox
from environments.sandbox.store import Store
from kit.disk import parse_json
from kit.settings import RunError

__all__ = ["INSTALLS", "PROPOSES", "ModelInstaller"]

SYSTEM = """You set up the folder of a software project, so that it can be worked on. \
You work in it through tools, as another user than root.
What you leave is a file; nothing that you say is read. Call finish when the file is there. \
Several calls may stand in one reply."""
PROPOSES = f"""Look at this folder: its configuration, its README, its CI files, its tests. \
Then write {FOLDER}/steps.json, a JSON list of about ten
objects, at most {MAX_STEPS}: {{"command": what installs something, or "", \
"check": a command that ends with 0 only when that has worked, or ""}}.
The last ones are checks alone: what somebody who works here runs, such as an import, a program's help, \
or a few tests. A check must fail now.
Commands are played by bash, in this order, each behind `. {FOLDER}/env`. \
Packages go into an environment in .venv, which this makes:
%s"""
INSTALLS = f"""Set this folder up so that all of these checks pass:
%s
Begin each command with `. {FOLDER}/env`, which puts .venv/bin first. %s \
What cannot be had, such as a service, may be replaced by a stand-in.
Then write {FOLDER}/worked.json, a JSON list of the commands that are needed, in their order. \
They are played in a fresh copy of the folder, where
nothing else of what you did is left, and then the checks.
The last try was:
%s"""
NETWORK = f"There is no network but an index of packages, http://{INDEX}, which pip knows."
ALONE = "There is no network and no index of packages."
LOOKS = ("read", "list", "glob", "grep", "write", "edit", "finish")
TRIES = (*LOOKS[:-1], "shell", "delete", "finish")
LARGEST = 256 << 10
"""Bytes of a file that a run leaves."""


@dataclass(frozen=True)
class ModelInstaller:
    """Who plays, and in what. `fork`: opens a sandbox over a stored tree, `tree`: the folder as it is, `given`: its
    files, `transcripts`: the folder that they go to."""

    policy: Policy
    model_name: str
    fork: Callable[[str], Sandbox]
    store: Store
    tree: str
    given_files: Mapping[str, bytes]
    transcripts: Path
    first: Step
    """What makes an environment."""
    index: bool = True
    """Whether there is one."""
    budget: Budget = Budget()

    def propose_steps(self) -> list[Step]:
        """Stage 1. Raises RunError where what is left holds no steps, and PolicyError."""
        rows, record = self._run_episode("propose", PROPOSES % self.first.command, LOOKS, "steps.json")
        try:
            return [
                replace(step, source="the model", needed=True)
                for step in deduplicate_steps(parse_steps(rows, MAX_STEPS))
            ]
        except ValueError as error:
            raise RunError(f"the model proposes no steps: {error}; {record} tells what it did") from None

    def revise(self, steps: Sequence[Step], outcomes: Sequence[Outcome]) -> list[Step]:
        """Stage 2 (see attempt.py): other commands, and the same checks; the steps as they are where what is left holds
        none. Raises PolicyError."""
        checks = [Step("", step.check, step.source) for step in steps if step.check]
        report = "\n".join(
            f"{'worked' if outcome.passed else f'failed ({explain_failure(outcome)})'}: "
            f"{outcome.step.command or outcome.step.check}"
            for outcome in outcomes
        )
        task_prompt = INSTALLS % (
            "\n".join(f"  {step.check}" for step in checks),
            NETWORK if self.index else ALONE,
            report,
        )
        command_rows, _ = self._run_episode("try", task_prompt, TRIES, "worked.json")
        try:
            commands = parse_steps(
                [{"command": command} for command in command_rows] if isinstance(command_rows, list) else command_rows
            )
        except ValueError:
            return [*steps]
        return [*(replace(step, source="the model") for step in commands), *deduplicate_steps(checks, 100)]

    def _run_episode(self, name: str, prompt: str, tools: tuple[str, ...], file: str) -> tuple[object, Path]:
        """One run of the harness: the JSON of the file that it leaves, None where it leaves none, and its
        transcript."""
        self.transcripts.mkdir(parents=True, exist_ok=True)
        paths = (self.transcripts / f"{name}-{number}.jsonl" for number in itertools.count(1))
        path = next(candidate for candidate in paths if not candidate.exists())
        job = Job(name, prompt, self.tree, self.given_files, None, tools, policy_name=self.model_name, system=SYSTEM)
        with Record(path) as record:
            tree = Episode(job, self.policy, record, self.fork, self.store, self.budget).play()
        entry = self.store.manifest(tree).get(f"{FOLDER}/{file}")
        if entry is None or entry.kind != "file" or entry.size > LARGEST:
            return None, path
        try:
            return parse_json(self.store.content(entry)), path
        except (ValueError, RecursionError):
            return None, path
