"""`etude run feature-deletion --scale full`: finds and tries all pieces of a package on many ranks, in sandboxes.

parent    takes from the package what tasks are made of, plays its tests in a sandbox, and writes both into
          OUT/material.json
rank      has the coverage of its share of the tests; all find the pieces together (`scaled/feature_deletion.py`), and
          each plays the tests without
          its share of the pieces
rank 0    writes OUT/pieces.jsonl: for each piece its way, its name, why it is no task, and what makes it hard, but no
          line of code

A piece is judged by (4) of `ref/feature_deletion.py` alone. `etude tasks make` asks for more: no copy in what is left,
no answer that knows nothing."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

from environments.sandbox.cache import cache_folder
from environments.sandbox.open import open_sandbox
from environments.tasks.make import baseline
from environments.tasks.package import Package
from environments.tasks.recipe import prepare_package
from environments.tasks.runner import LIMITS, Sandboxed
from environments.tasks.sources import package_of
from kit.disk import atomic_write, read_json
from kit.process import machine
from kit.settings import RunError
from ref.feature_deletion import Piece, delete, faults
from scaled.feature_deletion import bodies, difficulty, map_over_ranks, slices, symbols
from scaled.runtime.mesh import current

__all__ = ["Deletion", "material", "play", "prepare", "show"]


@dataclass(frozen=True)
class Deletion:
    """A package, and the sandboxes of each rank."""

    package: str | None = None
    """A folder, an sdist, or NAME==VERSION, whose sdist is fetched from the package index."""
    least: int = 3
    """Minimum number of tests that must fail."""
    max_share: float = field(default=0.5, metadata={"renamed_from": "most"})
    """Maximum share of the tests that a slice may affect."""
    seconds: float = 60.0
    """Time limit of the package's tests, in seconds."""
    jobs: int = 1
    """Concurrent runs of the tests on each rank."""
    sandbox: Literal["bubblewrap", "docker"] = "bubblewrap"
    """Sandbox backend."""
    timeout: float = 600.0
    """A third of the time for which a rank waits for the others, in seconds."""
    cp: ClassVar[int] = 1
    ep: ClassVar[int] = 1

    def __post_init__(self):
        if self.least < 1 or not 0 < self.max_share <= 1 or self.seconds <= 0 or self.jobs < 1 or self.timeout <= 0:
            raise ValueError(
                "least and jobs must be at least 1, max_share above 0 and at most 1, seconds and timeout above 0"
            )


def material(config: Deletion) -> Package:
    """The package. Raises RunError, in one line, where there is none."""
    if config.package is None:
        raise RunError(
            "feature-deletion at full scale needs a package with tests: --set package=FOLDER, an "
            "sdist, or NAME==VERSION"
        )
    try:
        return package_of(config.package, cache_folder() / "sdists")
    except ValueError as error:
        raise RunError(str(error)) from None


def runner_of(config: Deletion) -> Sandboxed:
    return Sandboxed(partial(open_sandbox, kind=config.sandbox, limits=LIMITS), config.jobs, config.seconds)


def prepare(config: Deletion, package: Package, out: Path) -> None:
    """Plays the package's tests, and writes what ranks need. What is there already stays. Raises RunError where its
    tests do not pass."""
    if (path := out / "material.json").exists():
        return
    runner = runner_of(config)
    try:
        package, _ = prepare_package(package, runner)
    except ValueError as error:
        raise RunError(str(error)) from None
    all_files = {**package.files, **package.tests}
    before, _ = baseline(runner, all_files)
    coverage = {
        test: sorted(lines)
        for test, lines in runner.coverage(all_files).items()
        if before.get(test) == "passed" or not test
    }
    files, tests = (
        {name: base64.b64encode(data).decode() for name, data in group.items()}
        for group in (package.files, package.tests)
    )
    record = {
        "files": files,
        "tests": tests,
        "before": before,
        "coverage": coverage,
        "without": sorted(runner.skipped_tests),
    }
    atomic_write(path, json.dumps(record))


def play(out: Path, config: Deletion, ranks: int) -> None:
    """This rank's part, under its mesh; rank 0 writes what was found."""
    record = read_json(out / "material.json")
    files, tests = (
        {name: base64.b64decode(data) for name, data in record[kind].items()} for kind in ("files", "tests")
    )
    source, all_files = {name: data for name, data in files.items() if name.endswith(".py")}, {**files, **tests}
    group = current().group("all")
    coverage_share = {
        test: [(file, line) for file, line in record["coverage"][test]]
        for test in sorted(record["coverage"])[group.rank :: group.size]
    }
    pieces = [*slices(source, coverage_share, config.least, config.max_share), *bodies(source), *symbols(source)]
    before: dict[str, str] = record["before"]

    def judge_pieces(batch: Sequence[Piece]) -> list[dict]:
        runner = runner_of(config)
        runner.skipped_tests = frozenset(record["without"])
        remaining = [delete(all_files, piece) for piece in batch]
        changes = [
            {patch.file: files[patch.file] for patch in piece.patches}
            for piece, files in zip(batch, remaining, strict=True)
        ]
        rows = []
        for piece, outcomes in zip(batch, runner.outcomes(all_files, changes), strict=True):
            after = {test: outcome for test, outcome in outcomes.items() if test in before or outcome == "error"}
            failing = sum(
                outcome == "failed" and before[test] == "passed" for test, outcome in after.items() if test in before
            )
            piece_difficulty = difficulty(source, piece, failing)
            piece_faults = faults(all_files, piece, before, after, config.least)
            rows.append(
                {
                    "way": piece.way,
                    "name": piece.name,
                    "faults": piece_faults,
                    **asdict(piece_difficulty),
                    "bits": piece_difficulty.bits,
                }
            )
        return rows

    rows = map_over_ranks(pieces, judge_pieces)
    if group.rank == 0:
        atomic_write(out / "pieces.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        report = {
            "scale": "full",
            "technique": "feature-deletion",
            "ranks": ranks,
            "machine": machine(),
            "result": summarize(rows),
        }
        atomic_write(out / "report.json", json.dumps(report, indent=1) + "\n")


def summarize(rows: Sequence[dict]) -> dict[str, float]:
    """As `ref.feature_deletion.demo`: for each way pieces, valid ones, and over those the means of lines, failing tests
    and bits."""
    means: dict[str, float] = {}
    for way in ("slice", "body", "symbol"):
        way_rows = [row for row in rows if row["way"] == way]
        valid = [row for row in way_rows if not row["faults"]]
        means |= {f"tried@{way}": float(len(way_rows)), f"valid@{way}": float(len(valid))}
        for name, key in (("lines", "lines"), ("failing", "tests"), ("bits", "bits")):
            means[f"{name}@{way}"] = sum(row[key] for row in valid) / max(1, len(valid))
    return means


def show(out: Path) -> None:
    """Prints the result."""
    for key, value in read_json(out / "report.json")["result"].items():
        print(f"{key:22s} {value:.4g}")
    print(f"report: {out / 'report.json'}\npieces: {out / 'pieces.jsonl'}")
