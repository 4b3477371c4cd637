"""Feature deletion: does code that is taken out so that the rest stands make tasks that tests can grade?

    etude figure feature-deletion            ten to twenty minutes on two cores; Linux with bubblewrap
    etude figure feature-deletion --quick

Composer 2.5 asks an agent to delete code so that a codebase keeps working while specific, testable features are gone
(release of Composer 2.5). Here three rules delete (`ref/feature_deletion.py`): slices, bodies, symbols. Packages are
made up, with features that are known (`programs.py`); their tests run in sandboxes. A piece is a task where

    at least three tests fail, all others pass, nothing fails to be collected      `faults`, (4) of the reference
    at least half of the tests pass still                                          the codebase keeps working

Two controls delete as many lines as each slice has, of those that some test executes, without looking who: one of them
in one place, statements that follow each other in one suite of a function; the other scattered, lines anywhere. Holes
are filled by the same rule. A feature is hit if a test of it fails. Tests of other features than the one that is hit
most should pass: that is what "specific" means.

Power. Packages are the sample, since pieces of one share its helpers. In four packages of another seed (9) all slices
were tasks. Between packages the differences had these standard deviations: 0.04 for the share of tasks, slices −
scattered, 0.03 for slices − one place, 0.05 and 0.02 for the tests of other features that fail. Twenty-four packages
leave 95% intervals of ±0.02, ±0.01, ±0.02 and ±0.01; the differences themselves were 0.29, 0.02, 0.24 and 0.03. Where
all packages may be alike, Clopper and Pearson's interval over 24 packages begins at 0.86.

What this cannot show is that real packages are so. For those, docs/tasks.md counts 482 tasks of 1,646 pieces of twelve
packages. Most of the others are refused there because what is left holds a near twin of what was deleted, for which
nothing looks here.
"""

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from environments.sandbox.open import open_sandbox
from environments.tasks.make import Runner, fools
from environments.tasks.runner import LIMITS, Sandboxed
from kit.process import cores
from kit.runs import Run
from kit.settings import RunError
from kit.statistics import bootstrap, share
from ref.feature_deletion import Piece, bodies, delete, difficulty, faults, slices, symbols, undelete
from sims.experiment import above, at_most, claim
from sims.feature_deletion.deleted_at_random import code_lines, executed, in_one_place, scattered
from sims.feature_deletion.programs import Program, feature_of, program

__all__ = ["Experiment", "experiment", "picture"]

WAYS = ("slice", "body", "symbol", "one place", "scattered")
REASONS = ("task", "too few fail", "most fail", "not collected", "broken otherwise")
CONTROLS, PLACES = WAYS[3:], ("in one place", "scattered")
MEANS = ("lines", "failing", "others broken", "bits")
SIZES = (1, 2, 3, 5, 9, 17, 1000)
"""Where a group of sizes begins, in lines."""


@dataclass(frozen=True)
class Experiment:
    """Made-up packages, and what counts as a task."""

    programs: int = 24
    """Packages."""
    least: int = 3
    """Fewest tests that must fail."""
    max_share: float = field(default=0.5, metadata={"renamed_from": "most"})
    """Greatest share of the tests that may fail."""
    seed: int = 0
    """Seed of the packages, and of what the control deletes."""

    def __post_init__(self):
        if self.programs < 2 or self.least < 1 or not 0 < self.max_share <= 1:
            raise ValueError(
                f"programs must be at least 2, least at least 1, and max_share a share above 0; got {self}"
            )

    @classmethod
    def quick(cls) -> "Experiment":
        return cls(programs=2)


def judge_piece(
    tree: Mapping[str, bytes], piece: Piece, before: Mapping[str, str], after: Mapping[str, str], c: Experiment
) -> dict:
    """One row for a piece: whether it is a task, and how much else it breaks."""
    newly_failing = [test for test, outcome in before.items() if outcome == "passed" and after.get(test) != "passed"]
    hits: dict[str, int] = {}
    for test in newly_failing:
        hits[feature_of(test)] = hits.get(feature_of(test), 0) + 1
    main_feature = max(hits, key=lambda name: (hits[name], name)) if hits else ""
    other_tests = [test for test in before if feature_of(test) != main_feature]
    is_broken = bool(faults(tree, piece, before, after, c.least))
    has_error = any(outcome == "error" for outcome in after.values())
    has_too_few = sum(after.get(test) == "failed" for test in newly_failing) < c.least
    is_too_wide = len(newly_failing) > c.max_share * len(before)
    piece_difficulty = difficulty(tree, piece, len(newly_failing))
    return {
        "way": piece.way,
        "piece": piece.name,
        "task": not is_broken and not is_too_wide,
        "why": (
            "not collected"
            if has_error
            else "too few fail"
            if has_too_few
            else "most fail"
            if is_too_wide
            else "broken otherwise"
            if is_broken
            else "task"
        ),
        "lines": piece_difficulty.lines,
        "failing": len(newly_failing),
        "bits": piece_difficulty.bits,
        "features": len(hits),
        "others broken": sum(feature_of(test) != main_feature for test in newly_failing) / max(1, len(other_tests)),
        "gold": undelete(delete(tree, piece), piece) == tree,
    }


def package(source_program: Program, runner: Runner, number: int, c: Experiment) -> list[dict]:
    """All pieces of one package. Raises RunError where a test of it does not pass before anything is deleted."""
    all_files = {**source_program.files, **source_program.tests}
    (before,) = runner.outcomes(all_files)
    if failing_tests := [test for test, outcome in before.items() if outcome != "passed"]:
        raise RunError(f"package {number}: {failing_tests[0]} does not pass before anything is deleted")
    coverage = runner.coverage(all_files)
    slice_pieces = slices(source_program.files, coverage, c.least, c.max_share)
    pieces = [*slice_pieces, *bodies(source_program.files), *symbols(source_program.files)]
    deletable, rng = (
        executed(source_program.files, coverage),
        random.Random(f"feature-deletion-{1000 * c.seed + number}"),
    )
    sizes = [
        sum(code_lines(edit) for file_patch in piece.patches for edit in file_patch.edits) for piece in slice_pieces
    ]
    pieces += [
        delete_lines(source_program.files, deletable, size, rng)
        for delete_lines in (in_one_place, scattered)
        for size in sizes
    ]
    outcomes_by_piece = runner.outcomes(all_files, [changed_files(delete(all_files, piece), piece) for piece in pieces])
    rows = [
        judge_piece(all_files, piece, before, after, c) for piece, after in zip(pieces, outcomes_by_piece, strict=True)
    ]
    fool_answers = [
        (index, answer)
        for index, piece in enumerate(pieces)
        if rows[index]["task"] and piece.way not in CONTROLS
        for _, answer in fools(all_files, piece)
    ]
    tests_by_index = {
        index: [test for test, outcome in outcomes_by_piece[index].items() if outcome == "failed"]
        for index, _ in fool_answers
    }
    fool_outcomes = runner.outcomes(
        all_files,
        [changed_files(answer, pieces[index]) for index, answer in fool_answers],
        [tests_by_index[index] for index, _ in fool_answers],
    )
    for (index, _), outcomes in zip(fool_answers, fool_outcomes, strict=True):
        passed_share = sum(outcomes.get(test) == "passed" for test in tests_by_index[index]) / len(
            tests_by_index[index]
        )
        rows[index]["fools"] = max(passed_share, rows[index].get("fools", 0.0))
    return [{"program": number, "tests": len(before), **row} for row in rows]


def changed_files(files: Mapping[str, bytes], piece: Piece) -> dict[str, bytes]:
    return {file_patch.file: files[file_patch.file] for file_patch in piece.patches}


def experiment(run: Run, config: Experiment) -> dict:
    """All packages, each a stage of the run, and the verdicts."""
    runner = Sandboxed(partial(open_sandbox, limits=LIMITS), cores())
    rows: list[dict] = []
    for number in range(config.programs):
        stage = run.stage(f"package-{number}", total=1, unit="packages")
        if not stage.finished:
            stage.finish({"rows": package(program(1000 * config.seed + number), runner, number, config)})
        rows += stage.result()["rows"]
    return {
        "rows": summarise_packages(rows, config.programs),
        "ways": summarise_ways(rows, config.programs),
        "sizes": summarise_sizes(rows),
        "claims": verdicts(rows, config),
    }


def per_program(rows: Sequence[Mapping], way: str, column: str, programs: int, total: bool = False) -> np.ndarray:
    """The mean of a column over the pieces of a way, or its sum, for each package."""
    values_by_program = [
        [float(row[column]) for row in rows if row["program"] == number and row["way"] == way and column in row]
        for number in range(programs)
    ]
    return np.array(
        [sum(values) if total else float(np.mean(values)) if values else np.nan for values in values_by_program]
    )


def summarise_packages(rows: Sequence[Mapping], programs: int) -> list[dict]:
    """One row for each package and way: pieces, what became of them, and means."""
    summaries = []
    for number in range(programs):
        for way in WAYS:
            if way_rows := [row for row in rows if row["program"] == number and row["way"] == way]:
                row = {"program": number, "tests": way_rows[0]["tests"], "way": way, "tried": len(way_rows)}
                row |= {reason: sum(row["why"] == reason for row in way_rows) for reason in REASONS}
                row |= {name: float(np.mean([row[name] for row in way_rows])) for name in MEANS}
                summaries.append(
                    row
                    | {
                        "one feature": sum(row["features"] == 1 for row in way_rows),
                        "fools": max(row.get("fools", 0.0) for row in way_rows),
                    }
                )
    return summaries


def summarise_ways(rows: Sequence[Mapping], programs: int) -> list[dict]:
    """One row for each way: pieces, tasks, their share with its interval over packages, and means over pieces."""
    summaries = []
    for way in WAYS:
        way_rows = [row for row in rows if row["way"] == way]
        shares = per_program(rows, way, "task", programs)
        row: dict[str, Any] = {"way": way, "tried": len(way_rows), "tasks": sum(row["task"] for row in way_rows)}
        row |= {
            f"share{'' if name == 'value' else '_' + name}": value
            for name, value in bootstrap(shares[~np.isnan(shares)]).items()
        }
        summaries.append(row | {name: float(np.mean([row[name] for row in way_rows])) for name in MEANS})
    return summaries


def summarise_sizes(rows: Sequence[Mapping]) -> list[dict]:
    """For slices and controls, by how many lines go: pieces, and the mean share of other features' tests that fail."""
    summaries = []
    for way in ("slice", *CONTROLS):
        for low, high in itertools.pairwise(SIZES):
            if size_rows := [row for row in rows if row["way"] == way and low <= row["lines"] < high]:
                mean = {name: float(np.mean([row[name] for row in size_rows])) for name in ("lines", "others broken")}
                summaries.append({"way": way, "from": low, "below": high, "pieces": len(size_rows), **mean})
    return summaries


def verdicts(rows: Sequence[Mapping], c: Experiment) -> list[dict]:
    """Whether slices make tasks, whether the rest stands better than at random, and whether the tests can be fooled."""
    columns = partial(per_program, rows, programs=c.programs)
    shares, interval_text, source = columns("slice", "task"), "95% bootstrap over packages", "Composer 2.5"
    high_share = share(shares >= 0.9)
    gains = {way: bootstrap(shares - columns(way, "task")) for way in CONTROLS}
    spared_gains = {
        way: bootstrap(columns(way, "others broken") - columns("slice", "others broken")) for way in CONTROLS
    }
    extra_tasks = bootstrap(columns("slice", "task", total=True) - columns("body", "task", total=True))
    worst_shares = [
        max((row["fools"] for row in rows if row["program"] == number and "fools" in row), default=0.0)
        for number in range(c.programs)
    ]
    honest_share = share([worst_share <= 0.5 for worst_share in worst_shares])
    rows_by_way = {way: [row for row in rows if row["way"] == way] for way in WAYS}
    counts_text = "; ".join(
        f"{way}: {sum(row['task'] for row in way_rows)} tasks of {len(way_rows)}"
        for way, way_rows in rows_by_way.items()
    )
    alone_text = ", ".join(
        f"{np.mean([row['features'] == 1 for row in way_rows]):.2f} ({way})" for way, way_rows in rows_by_way.items()
    )
    return [
        claim(
            "slices-are-tasks",
            "code that is deleted so that the rest stands makes tasks that tests can grade",
            source,
            high_share["value"],
            above(0.5),
            (high_share["low"], high_share["high"]),
            "of the packages: 0.9 of the slices or more",
            f"{counts_text}; Clopper and Pearson's 95% over packages",
        ),
        *(
            claim(
                f"more-than-{way.replace(' ', '-')}",
                f"more often than as many lines deleted at random, {place}",
                source,
                gains[way]["value"],
                above(),
                (gains[way]["low"], gains[way]["high"]),
                "of the pieces, slices − control",
                f"paired by package; {interval_text}",
            )
            for way, place in zip(CONTROLS, PLACES, strict=True)
        ),
        *(
            claim(
                f"spares-{way.replace(' ', '-')}",
                f"what goes is specific: fewer tests of other features fail than after a deletion at random, {place}",
                source,
                spared_gains[way]["value"],
                above(),
                (spared_gains[way]["low"], spared_gains[way]["high"]),
                "of the other features' tests, control − slices",
                f"one feature alone is hit by shares of {alone_text}; {interval_text}",
            )
            for way, place in zip(CONTROLS, PLACES, strict=True)
        ),
        claim(
            "more-than-functions",
            "slices find tasks that whole functions do not: a package gives more of them",
            "ref/feature_deletion.py",
            extra_tasks["value"],
            above(),
            (extra_tasks["low"], extra_tasks["high"]),
            "tasks a package, slices − bodies",
            interval_text,
        ),
        claim(
            "no-fool",
            "the tests that fail can grade: an answer that knows nothing passes half of them at most",
            source,
            honest_share["value"],
            above(0.5),
            (honest_share["low"], honest_share["high"]),
            "of the packages: so in every task",
            "the better of two answers, None and the last argument, in place of what a function lost; it passes "
            f"{max(worst_shares):.2f} of a task's tests "
            "at most; Clopper and Pearson's 95% over packages",
        ),
        claim(
            "gold-back",
            "what was deleted comes back byte for byte",
            "ref/feature_deletion.py, (4)",
            float(sum(not row["gold"] for row in rows)),
            at_most(0.0),
            None,
            "pieces that do not come back",
            f"of {len(rows)}",
        ),
    ]


def picture(results: dict, path: Path) -> None:
    """Left: share of tasks by way, a dot for each package. Middle: what else fails, by lines that go. Right: what
    becomes of the pieces."""
    from kit.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, save, sheet

    figure, (left, middle, right) = sheet(3, "Features deleted by rule from made-up packages")
    rows, ways = results["rows"], results["ways"]
    colours: dict[str, str] = dict(zip(WAYS, (BLUE, GREEN, PURPLE, RED, GREY), strict=True))
    for index, row in enumerate(ways):
        left.bar(index, row["share"], color=colours[row["way"]], alpha=0.4)
        left.errorbar(
            index,
            row["share"],
            [[row["share"] - row["share_low"]], [row["share_high"] - row["share"]]],
            color="black",
            capsize=3,
        )
        dots = [package_row["task"] / package_row["tried"] for package_row in rows if package_row["way"] == row["way"]]
        left.plot(index + np.linspace(-0.3, 0.3, len(dots)), dots, ".", color=colours[row["way"]])
    for way, line in (("scattered", "o:"), ("one place", "s--"), ("slice", "x-")):
        size_rows = [row for row in results["sizes"] if row["way"] == way]
        middle.plot(
            [row["lines"] for row in size_rows],
            [row["others broken"] for row in size_rows],
            line,
            color=colours[way],
            label=way,
        )
    low = np.zeros(len(WAYS))
    for reason, colour in zip(REASONS, (BLUE, ORANGE, RED, PURPLE, GREY), strict=True):
        parts = [[package_row for package_row in rows if package_row["way"] == way] for way in WAYS]
        part = np.array(
            [
                sum(package_row[reason] for package_row in way_rows)
                / max(1, sum(package_row["tried"] for package_row in way_rows))
                for way_rows in parts
            ]
        )
        right.bar(WAYS, part, bottom=low, color=colour, label=reason)
        low += part
    left.set(
        xticks=range(len(WAYS)),
        xticklabels=WAYS,
        ylabel="share of the pieces",
        title="Pieces that are tasks",
        ylim=(0, 1.05),
    )
    middle.set(
        xlabel="lines that go",
        ylabel="share that fails, mean",
        title="Tests of other features",
        xscale="log",
        ylim=(0, None),
    )
    right.set(ylabel="share of the pieces", title="What becomes of them", ylim=(0, 1.35))
    middle.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    middle.minorticks_off()
    middle.legend(frameon=False)
    right.legend(frameon=False, ncols=2, loc="upper left")
    save(figure, path)
