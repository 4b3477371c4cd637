"""Stage 2: steps are played in a fresh sandbox, and changed, until all that is needed works or the tries are used up.

Each try begins with the folder as it is, so what worked can be played again from there. Checks are played before
anything is done, too: where all checks pass then, they tell nothing. Whoever changes steps (scripted below, a model in
model.py) hears what each has said."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from environments.install.propose import BUILT_HERE, named
from environments.install.steps import Step, deduplicate_steps
from environments.install.wheels import FOLDER
from environments.sandbox.interface import Sandbox
from environments.sandbox.visible import one_line
from kit.settings import RunError

__all__ = ["Attempt", "Outcome", "Revise", "run_attempts", "run_step", "revised", "explain_failure"]

SAYS = 4000
"""Characters of what a step has said that are kept: the last ones."""
PACKAGES = {
    "yaml": "PyYAML",
    "PIL": "Pillow",
    "cv2": "opencv-python",
    "sklearn": "scikit-learn",
    "bs4": "beautifulsoup4",
    "attr": "attrs",
    "dateutil": "python-dateutil",
    "dotenv": "python-dotenv",
}
"""Module → distribution, where their names differ."""
MISSING = re.compile(r"No module named '([A-Za-z_]\w*)")


@dataclass(frozen=True)
class Outcome:
    """What became of a step."""

    step: Step
    command: int | None
    """Exit code; None where there was no command, or a bound has ended it."""
    check: int | None
    """The same; None also where the command failed, and nothing was checked."""
    text: str
    """What was said, and which bound was crossed."""
    seconds: float

    @property
    def passed(self) -> bool:
        return (self.command == 0 or not self.step.command) and (self.check == 0 or not self.step.check)


@dataclass(frozen=True)
class Attempt:
    """How it ended."""

    outcomes: tuple[Outcome, ...]
    """Of the last try."""
    tries: int
    tree: str
    """The hash of the tree that the last try left, stored; empty where something that is needed did not work."""
    telling: bool
    """Whether a check passes that did not before anything was done."""

    @property
    def good(self) -> bool:
        return self.telling and all(outcome.passed for outcome in self.outcomes if outcome.step.needed)


Revise = Callable[[Sequence[Step], Sequence[Outcome]], list[Step] | None]
"""Other steps after those that did not all work; None where nothing is left to try."""


def run_step(sandbox: Sandbox, step: Step) -> Outcome:
    """Plays a step. Raises RunError where the sandbox has ended."""
    codes: list[int | None] = [None, None]
    texts, seconds = list[str](), 0.0
    for at, command in enumerate((step.command, step.check)):
        if not command or (at and step.command and codes[0] != 0):
            continue
        observation = sandbox.call("shell", {"command": f". {FOLDER}/env\n{command}"})
        has_ended = observation.end_reason is not None and not (
            observation.exit == 0 and "outlived" in observation.end_reason
        )
        codes[at] = None if has_ended else observation.exit
        texts += [observation.text.strip("\n"), *([f"[ended: {observation.end_reason}]"] if has_ended else [])]
        seconds += observation.seconds
        if has_ended and sandbox.call("list", {}).end_reason:
            raise RunError(f"{one_line(command, 100)}: {observation.end_reason}")
    return Outcome(step, codes[0], codes[1], "\n".join(text for text in texts if text)[-SAYS:], seconds)


def run_attempts(
    steps: Sequence[Step],
    fresh: Callable[[], Sandbox],
    revise: Revise,
    tries: int,
    on_outcome: Callable[[int, Outcome], None] = lambda number, outcome: None,
) -> Attempt:
    """Tries at most `tries` times. `fresh`: opens a sandbox over the folder as it is. `on_outcome`: hears each outcome
    with the number of its try, from 1; those of the checks before anything is done with 0. Raises RunError."""
    before = dict[str, bool]()
    for number in range(1, tries + 1):
        if new_checks := [step.check for step in steps if step.check and step.check not in before]:
            with closing(fresh()) as sandbox:
                for check in dict.fromkeys(new_checks):
                    outcome = run_step(sandbox, Step("", check))
                    before[check] = outcome.passed
                    on_outcome(0, outcome)
        outcomes = list[Outcome]()
        with closing(fresh()) as sandbox:
            for step in steps:
                outcomes.append(run_step(sandbox, step))
                on_outcome(number, outcomes[-1])
            telling = any(
                step_outcome.passed and not before.get(step_outcome.step.check, True) for step_outcome in outcomes
            )
            result = Attempt(tuple(outcomes), number, "", telling)
            result = replace(result, tree=sandbox.snapshot()) if result.good else result
        if result.good or number == tries:
            return result
        if (new_steps := revise(steps, outcomes)) is None:
            return result
        steps = new_steps
    raise ValueError(f"tries must be positive; got {tries}")


def revised(own: Collection[str], steps: Sequence[Step], outcomes: Sequence[Outcome]) -> list[Step] | None:
    """Stage 2 without a model: what an index lacks to build with is taken from here, an extra that cannot be had is
    left out, and a module that is missing is installed by its name, once. `own`: the folder's modules: an index may
    hold something else of the same name, which nobody asked for."""
    new_steps, commands = list[Step](), {step.command for step in steps}
    for outcome in outcomes:
        step = outcome.step
        if not outcome.passed and (new_command := _find_other_command(outcome)) != step.command:
            step = replace(step, command=new_command)
        elif not outcome.passed:
            for module in dict.fromkeys(MISSING.findall(outcome.text)):
                name = str(PACKAGES.get(module, module))
                if f"pip install {name}" not in commands and module not in own:
                    new_steps.append(Step(f"pip install {name}", named([name]), "a module that was missing", False))
        new_steps.append(step)
    new_steps = deduplicate_steps(new_steps, 100)
    return None if new_steps == [*steps] else new_steps


def _find_other_command(outcome: Outcome) -> str:
    """Another command for one that installs a folder."""
    command = outcome.step.command
    if command.startswith("pip install -e .") or command.startswith("pip install -e '.["):
        if re.search(r"No matching distribution found for (wheel|setuptools)\b", outcome.text):
            return command.replace("pip install", BUILT_HERE, 1)
    return re.sub(r" -e '\.\[[\w.-]++\]'$", " -e .", command) if "pip install " in command else command


def explain_failure(outcome: Outcome) -> str:
    """Why a step did not work, in one line: what pip calls an error, or the last that was said."""
    lines = [line.strip() for line in outcome.text.split("\n") if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    best_lines = (
        [line for line in errors if "No matching distribution" in line]
        or errors[-1:]
        or lines[-1:]
        or ["it says nothing"]
    )
    return one_line(best_lines[-1].removeprefix("ERROR:").strip())
