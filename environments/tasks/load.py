"""Reads recipes of tasks, and loads their tasks: from the user's cache, or made again from the package.

for path in list_recipes([Path("tasks")]):
    package, tasks = load_tasks(path, read_recipe(path), jobs=2, seconds=60.0, kind="bubblewrap")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from environments.sandbox.cache import cache_folder
from environments.sandbox.open import Kind
from environments.tasks.build import build_tasks
from environments.tasks.make import Task
from environments.tasks.package import Package
from environments.tasks.sources import package_of
from environments.tasks.task_cache import load_task, save_task
from kit.disk import read_json
from kit.settings import RunError

__all__ = ["list_recipes", "load_tasks", "read_recipe", "recipe_paths", "unused_tests", "ways_of"]


def read_recipe(path: Path) -> dict:
    """A recipe. Raises RunError for a file that is none."""
    try:
        recipe = read_json(path)
        about_package = recipe["package"]
        texts = [
            about_package["spec"],
            about_package["digest"],
            *(row["id"] for row in recipe["tasks"]),
            *about_package["left out"],
            *about_package["slow"],
            *about_package["flaky"],
        ]
        texts += about_package["ungradable"]
        if type(recipe.get("join", 1)) is not int or type(recipe.get("single_statements", False)) is not bool:
            raise TypeError("join, single_statements")
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("text")
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise RunError(
            f"{path} is not a recipe of tasks ({type(error).__name__}); make one with: etude tasks make PACKAGE"
        ) from None
    return recipe


def unused_tests(recipe: Mapping) -> dict[str, list[str]]:
    """The tests that a recipe does not use: another machine would find others."""
    return {reason: recipe["package"][reason] for reason in ("slow", "flaky", "ungradable")}


def ways_of(recipe: Mapping) -> dict[str, Any]:
    """The arguments of `make_tasks` that a recipe was made with."""
    return {"join": recipe.get("join", 1), "single_statements": recipe.get("single_statements", False)}


def recipe_paths(path: Path) -> Iterator[Path]:
    """A recipe's path, or those in a folder. Raises RunError where there is nothing."""
    if not path.exists():
        raise RunError(f"{path} does not exist; `etude tasks make PACKAGE` writes recipes into tasks/")
    yield from sorted(path.glob("*.json")) if path.is_dir() else [path]


def list_recipes(paths: Sequence[Path]) -> list[Path]:
    """The recipes at these paths. Raises RunError as `recipe_paths` does, and where there is none in a folder."""
    for folder in paths:
        if not [*recipe_paths(folder)]:
            raise RunError(f"{folder} contains no recipes; make one with: etude tasks make PACKAGE")
    return [recipe for path in paths for recipe in recipe_paths(path)]


def load_tasks(
    path: Path,
    recipe: Mapping,
    jobs: int,
    seconds: float,
    kind: Kind,
    progress: Callable[[int], None] = lambda count: None,
    say: Callable[[str], object] = print,
) -> tuple[Package, dict[str, Task]]:
    """A recipe's package, and its tasks by their ids, in the recipe's order; made again where one is not kept from
    before, of which `say` hears first. `path`: of the recipe, for messages. `jobs`, `seconds`, `kind`, `progress`: see
    `build_tasks`. Raises RunError, and ValueError as `package_of` does."""
    about_package, names = recipe["package"], [row["id"] for row in recipe["tasks"]]
    package = package_of(about_package["spec"], cache_folder() / "sdists")
    package = package.remove_tests(about_package.get("left out", ()))
    cache = cache_folder() / "tasks"
    tasks = {name: load_task(cache, name, package) for name in names}
    if None in tasks.values():
        say(f"{path}: making its tasks again, once; they are stored for later")
        try:
            package, _, result, _ = build_tasks(
                package, jobs, seconds, kind, unused_tests(recipe), **ways_of(recipe), progress=progress
            )
        except ValueError as error:
            raise RunError(str(error)) from None
        for built_task in result.tasks:
            save_task(cache, built_task, package)
        tasks = {name: load_task(cache, name, package) for name in names}
    for name, task in tasks.items():
        if task is None:
            raise RunError(f"{name} can no longer be made: `etude tasks check {path}` shows what differs")
    return package, {name: task for name, task in tasks.items() if task is not None}
