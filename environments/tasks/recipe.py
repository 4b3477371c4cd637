"""A recipe of tasks: what a package's tasks are, without a line of its code.

From the same package the same tasks are made again, and their ids, which are hashes of what was deleted, tell whether
they are."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict

from environments.tasks.make import MakeResult, Runner, Task
from environments.tasks.package import Package

__all__ = ["SLOW", "make_recipe", "compare_recipe", "prepare_package"]


SLOW = 1.0
"""Seconds of a test that is left out: it would be played once for every piece."""


def prepare_package(
    package: Package, runner: Runner, skipped_tests: Collection[str] | None = None
) -> tuple[Package, tuple[str, ...]]:
    """The package without the files of tests that cannot be collected: they need what is not there, such as another
    package. And their names. From here on the runner does not play `skipped_tests`: what a recipe names, or else the
    tests that take more than SLOW seconds, which depends on the machine. Raises ValueError where no test is left."""
    results = runner.patiently({**package.files, **package.tests})
    excluded_files = tuple(
        sorted(
            {test.partition("::")[0] for test, (outcome, _) in results.items() if outcome == "error"}
            & package.tests.keys()
        )
    )
    runner.skipped_tests = frozenset(
        skipped_tests
        if skipped_tests is not None
        else (test for test, (outcome, seconds) in results.items() if outcome != "error" and seconds > SLOW)
    )
    if not any(outcome == "passed" for test, (outcome, _) in results.items() if test not in runner.skipped_tests):
        has_passed = any(outcome == "passed" for outcome, _ in results.values())
        reason = (
            f"{excluded_files[0]} cannot be collected"
            if excluded_files
            else "all tests are slow"
            if has_passed
            else "no test passes"
        )
        reason = reason if results.keys() - {"the run"} else "its tests do not end"
        raise ValueError(f"{package.name} {package.version}: {reason}; nothing can be made of it")
    return package.remove_tests(excluded_files), excluded_files


def make_recipe(
    spec: str,
    package: Package,
    unused: Mapping[str, Collection[str]],
    result: MakeResult,
    join: int = 1,
    single_statements: bool = False,
) -> dict:
    """The recipe. `spec`: what the package was asked for by. `unused`: files of tests that are left out, tests that are
    slow, and tests that the grader does not see pass ("ungradable"): what no task uses. `join`,
    `single_statements`: see `make`; they stand there where they are not 1 and False."""
    about = {name: getattr(package, name) for name in ("name", "version", "licence", "origin", "digest")}
    return {
        "package": {
            "spec": spec,
            **about,
            **{reason: sorted(tests) for reason, tests in unused.items()},
            "flaky": list(result.flaky),
        },
        **({"join": join} if join > 1 else {}),
        **({"single_statements": True} if single_statements else {}),
        "pieces": {"tried": result.piece_count, **dict(sorted(result.why_not.items()))},
        "tasks": [_make_row(task) for task in sorted(result.tasks, key=lambda task: task.id)],
    }


def _make_row(task: Task) -> dict:
    tests = {"visible": len(task.visible), "held out": len(task.held_out), "kept": len(task.keep)}
    return {
        "id": task.id,
        "way": task.piece.way,
        "name": task.piece.name,
        "tests": tests,
        "difficulty": asdict(task.difficulty),
    }


def compare_recipe(recipe: Mapping, package: Package, result: MakeResult) -> tuple[str, ...]:
    """What is not as the recipe says; empty where all is."""
    about = recipe["package"]
    if about["digest"] != package.digest:
        return (f"the files of {package.name} {package.version} are others than those that the recipe was made of",)
    recipe_ids, made_ids = ({row["id"] for row in recipe["tasks"]}, {task.id for task in result.tasks})
    return (
        *(f"{task_id} is not made any more" for task_id in sorted(recipe_ids - made_ids)),
        *(f"{task_id} is new" for task_id in sorted(made_ids - recipe_ids)),
    )
