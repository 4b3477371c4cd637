"""A recipe of tasks: what a package's tasks are, without a line of its code.

From the same package the same tasks are made again, and their ids, which are hashes of what was deleted, tell whether they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from environments.tasks.make import Made, Runner, Task
from environments.tasks.package import Package

__all__ = ["as_json", "differences", "prepared"]


def prepared(package: Package, runner: Runner) -> tuple[Package, tuple[str, ...]]:
    """The package without the files of tests that cannot be collected: they need what is not there, such as another package. And their names. Raises
    ValueError where none is left."""
    (found,) = runner.outcomes({**package.files, **package.tests})
    left_out = tuple(sorted({test.partition("::")[0] for test, outcome in found.items() if outcome == "error"} & package.tests.keys()))
    tests = {name: data for name, data in package.tests.items() if name not in left_out}
    if not any(outcome == "passed" for outcome in found.values()):
        why = f"{left_out[0]} cannot be collected" if left_out else "no test passes" if found.keys() - {"the run"} else "its tests do not end"
        raise ValueError(f"{package.name} {package.version}: {why}; nothing can be made of it")
    return replace(package, tests=tests), left_out


def as_json(spec: str, package: Package, left_out: Sequence[str], made: Made) -> dict:
    """The recipe. `spec`: what the package was asked for by."""
    about = {name: getattr(package, name) for name in ("name", "version", "licence", "origin", "digest")}
    return {
        "package": {"spec": spec, **about, "left out": list(left_out), "flaky": list(made.flaky)},
        "pieces": {"tried": made.tried, **dict(sorted(made.why_not.items()))},
        "tasks": [_row(task) for task in sorted(made.tasks, key=lambda task: task.id)],
    }


def _row(task: Task) -> dict:
    tests = {"visible": len(task.visible), "held out": len(task.held), "kept": len(task.keep)}
    return {"id": task.id, "way": task.piece.way, "name": task.piece.name, "tests": tests, "difficulty": asdict(task.difficulty)}


def differences(recipe: Mapping, package: Package, made: Made) -> tuple[str, ...]:
    """What is not as the recipe says; empty where all is."""
    about = recipe["package"]
    if about["digest"] != package.digest:
        return (f"the files of {package.name} {package.version} are others than those that the recipe was made of",)
    known, now = ({row["id"] for row in recipe["tasks"]}, {task.id for task in made.tasks})
    return (*(f"{one} is not made any more" for one in sorted(known - now)), *(f"{one} is new" for one in sorted(now - known)))
