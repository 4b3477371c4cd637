"""Makes the tasks of a package in sandboxes, and has what grades them.

package, unused, result, seconds = build_tasks(package_of("generated:0", cache), 2, 60.0, "bubblewrap")
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial

from environments.grading.ready import Judges, nursery_of_judges
from environments.sandbox.interface import Limits
from environments.sandbox.open import Kind, open_sandbox
from environments.tasks.check import drop_flagged_tasks, ungradable
from environments.tasks.make import MakeResult, make_tasks
from environments.tasks.package import Package
from environments.tasks.recipe import prepare_package
from environments.tasks.runner import LIMITS, Sandboxed
from environments.tasks.support import decode_source

__all__ = ["GRADING", "build_tasks", "grading_timeout", "judges_of", "refuse_ungradable"]

GRADING = Limits(memory=1 << 30, output=4 << 20, seconds=600.0)
"""Limits of the sandboxes in which solutions are graded."""


def build_tasks(
    package: Package,
    jobs: int,
    seconds: float,
    kind: Kind,
    known_unused: Mapping[str, Collection[str]] | None = None,
    join: int = 1,
    single_statements: bool = False,
    progress: Callable[[int], None] = lambda count: None,
) -> tuple[Package, Mapping[str, Collection[str]], MakeResult, float]:
    """The package without the test files that cannot be collected, the names of tests that no task uses (see
    `make_recipe`; `known_unused`: those that a recipe has), its tasks, and the seconds that it took. `kind`: of the
    sandboxes. `join`, `single_statements`: see `make_tasks`. `progress`: hears how many runs of the tests were
    made, now and then. Raises ValueError for what is no material, and RunError."""
    since = time.monotonic()
    runner = Sandboxed(partial(open_sandbox, kind=kind, limits=LIMITS), jobs, seconds, progress)
    package, left_out = prepare_package(
        package, runner, known_unused and [*known_unused["slow"], *known_unused["flaky"], *known_unused["ungradable"]]
    )
    unused = {"left out": left_out, "slow": runner.skipped_tests, "ungradable": ()}
    if known_unused is None:
        (outcomes,) = runner.outcomes({**package.files, **package.tests})
        passed = [test for test, outcome in outcomes.items() if outcome == "passed"]
        grader = partial(open_sandbox, kind=kind, limits=GRADING)
        unused["ungradable"] = ungradable(package, passed, grader, grading_timeout(seconds))
        runner.skipped_tests |= {*unused["ungradable"]}
        refuse_ungradable(package, passed, unused["ungradable"])
    result = drop_flagged_tasks(make_tasks(package, runner, join=join, single_statements=single_statements), package)
    return package, unused, result, time.monotonic() - since


def grading_timeout(seconds: float) -> float:
    """Wall-clock seconds in which the tests of a package's own code are graded. They end, as they have before; a
    crowded machine makes them slow, and must not make other recipes."""
    return max(seconds, min(10 * seconds, GRADING.seconds - 30))


def refuse_ungradable(package: Package, passed: Collection[str], unseen_tests: Sequence[str], least: int = 3) -> None:
    """Raises ValueError where the grader sees fewer than `least` of the tests pass that pass elsewhere. `unseen_tests`:
    those that it does not see pass."""
    if len(passed) < least or len(passed) - len(unseen_tests) >= least:
        return
    summary = (
        f"{package.name} {package.version}: {len(passed)} of its tests pass, but {len(unseen_tests)} of "
        f"them fail in the grader"
    )
    file = unseen_tests[0].partition("::")[0]
    reason = "which copies Python files only, and no data files"
    try:
        decode_source(package.tests.get(file, b""))
    except ValueError as error:
        reason = f"{file}: {error}"
    raise ValueError(f"{summary}, such as {unseen_tests[0]} ({reason}); nothing can be made of it")


@cache
def judges_of(kind: Kind) -> Judges:
    """This process's own, for all tasks that it grades. bubblewrap's have a nursery, which ends with the process."""
    return Judges(
        partial(open_sandbox, kind=kind, limits=GRADING),
        nursery=nursery_of_judges(GRADING) if kind == "bubblewrap" else None,
    )
