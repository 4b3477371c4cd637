"""Tasks made from a package: pieces are tried one by one, and what stands every check becomes a task.

What runs tests is given as an argument: code of a package runs in a sandbox, never here. Checks come in the order of
their cost. Cheap ones need no run: is there enough code to recognise a copy, is the tree free of copies, is it another
piece than those before. Then the tests run without the piece (`faults` of ref/feature_deletion.py), and with fools in
its place: code that answers nothing, or what it was given, may pass half of the tests that matter at most.

The same package gives the same tasks: pieces come sorted, ids are hashes of what was deleted, and nothing is drawn by
chance."""

from __future__ import annotations

import hashlib
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from environments.fingerprint import Deleted, extract_removed_code
from environments.grading.halves import halves
from environments.grading.lay import write
from environments.leaks import Limits, audit
from environments.tasks.answers import SILENT
from environments.tasks.package import Package
from environments.tasks.prompts import specified, terse
from ref.feature_deletion import (
    Difficulty,
    Piece,
    are_independent,
    bodies,
    delete,
    difficulty,
    faults,
    joined,
    slices,
    statements,
    symbols,
)
from ref.source_text import Patch

__all__ = ["MakeResult", "Runner", "Task", "baseline", "fools", "make_tasks", "task_id", "unions"]


READ = Limits(file=32 << 20, total=256 << 20)
"""Bytes that the audit unfolds from one file and from a whole package. Its files have 1 MiB at most; a file that
unfolds to more is a finding."""


class Runner(Protocol):
    """Runs a package's tests somewhere safe."""

    skipped_tests: frozenset[str]
    """Tests that are never played."""

    def outcomes(
        self,
        files: Mapping[str, bytes],
        changes: Sequence[Mapping[str, bytes]] = ({},),
        only: Sequence[Collection[str] | None] = (),
        seed: int = 0,
    ) -> Sequence[Mapping[str, str]]:
        """Files, tests included, and for each run some of them with other contents, and the tests to be played, where
        those are not all → for each run, test → "passed", "failed", "skipped" or "error". A file that cannot be
        collected is a test in error, and so is a run without an end. `seed`: of the hashes by which Python orders
        sets."""
        ...

    def patiently(self, files: Mapping[str, bytes]) -> Mapping[str, tuple[str, float]]:
        """The same → test → its outcome, and its seconds, the least of two runs. Here a test may be slow."""
        ...

    def coverage(self, files: Mapping[str, bytes]) -> Mapping[str, Collection[tuple[str, int]]]:
        """The same → test → lines that it executed; the empty name for what ran at import."""
        ...


@dataclass(frozen=True)
class Task:
    """A feature to be written again."""

    id: str
    package: str
    version: str
    licence: str
    origin: str
    piece: Piece
    terse: str
    specified: str
    visible: tuple[str, ...]
    """Tests that fail without the feature and that the agent sees."""
    held_out: tuple[str, ...]
    """Those that it does not see."""
    keep: tuple[str, ...]
    """Tests that pass without the feature, and must go on doing so."""
    difficulty: Difficulty


@dataclass(frozen=True)
class MakeResult:
    """What became of a package."""

    tasks: tuple[Task, ...]
    piece_count: int
    """Pieces that were looked at."""
    reasons: Mapping[str, tuple[str, ...]]
    """Piece that became no task → why."""
    flaky: tuple[str, ...]
    """Tests whose outcome changed from one run to the next: no task uses them."""

    @property
    def why_not(self) -> Mapping[str, int]:
        """How many pieces failed first for which kind of reason."""
        return Counter(reasons[0].partition(":")[0] for reasons in self.reasons.values())


def baseline(runner: Runner, files: Mapping[str, bytes], repeats: int = 3) -> tuple[dict[str, str], tuple[str, ...]]:
    """Outcomes that are the same in every run, and the names of tests of which they are not. Sets have another order in
    each: a test may depend on it, and so may its name."""
    runs = [runner.outcomes(files, seed=seed)[0] for seed in range(repeats)]
    tests = sorted(set().union(*runs))
    flaky = tuple(test for test in tests if len({run.get(test, "missing") for run in runs}) > 1)
    return {test: runs[0][test] for test in tests if test not in flaky}, flaky


def fools(files: Mapping[str, bytes], piece: Piece) -> Iterable[tuple[str, dict[str, bytes]]]:
    """Trees in which every hole of a function holds an answer that knows nothing: None, and the last argument that is
    no keyword."""
    remaining_files = delete(files, piece)
    hole = b"raise NotImplementedError"
    changed_files = [patch.file for patch in piece.patches if any(hole in edit.new for edit in patch.edits)]
    for name, answer in (
        ("nothing", b"return None"),
        ("what it is given", b"return ([*locals().values()] or [None])[-1]"),
    ):
        if changed_files:
            yield (
                name,
                {**remaining_files, **{file: remaining_files[file].replace(hole, answer) for file in changed_files}},
            )


def unions(pieces: Sequence[Piece], max_pieces: int) -> tuple[Piece, ...]:
    """Joins of up to `max_pieces` pieces, at least two, that are independent of each other. With each piece go the next
    ones, in a circle, that can go with those before: about as many joins as pieces, each once."""
    order, joins = sorted(pieces, key=label), dict[tuple[Patch, ...], Piece]()
    for at in range(len(order)):
        members: list[Piece] = []
        for piece in order[at:] + order[:at]:
            if len(members) < max_pieces and all(are_independent(piece, member) for member in members):
                members.append(piece)
        if len(members) > 1:
            union = joined(members)
            joins.setdefault(union.patches, union)
    return tuple(joins.values())


def make_tasks(
    package: Package,
    runner: Runner,
    min_tests: int = 3,
    max_share: float = 0.5,
    repeats: int = 3,
    join: int = 1,
    single_statements: bool = False,
) -> MakeResult:
    """All tasks of a package. `join`: up to so many pieces that are tasks are also taken out at once.
    `single_statements`: also tasks of one statement each, the easiest. Raises ValueError where its own tests do not
    pass: then it is no material."""
    files = {**package.files, **package.tests}
    before, flaky = baseline(runner, files, repeats)
    if sum(outcome == "passed" for outcome in before.values()) < min_tests:
        raise ValueError(
            f"{package.name} {package.version}: fewer than {min_tests} of its tests pass every time; "
            f"nothing can be made of it"
        )
    if broken_tests := sorted(test for test, outcome in before.items() if outcome == "error"):
        raise ValueError(f"{package.name} {package.version}: {broken_tests[0]} cannot be collected")
    stable = {test: lines for test, lines in runner.coverage(files).items() if before.get(test) == "passed" or not test}
    source = {name: data for name, data in package.files.items() if name.endswith(".py")}
    pieces = [*slices(source, stable, min_tests, max_share), *bodies(source), *symbols(source)]
    pieces += statements(source) if single_statements else ()
    tasks, reasons = _check_pieces(package, runner, pieces, before, min_tests)
    parts = [task.piece for task in tasks if task.piece.way != "statement"]
    joined_pieces = unions(parts, join) if join > 1 else ()
    joined_tasks, joined_reasons = (
        _check_pieces(package, runner, joined_pieces, before, min_tests, parts) if joined_pieces else ((), {})
    )
    return MakeResult((*tasks, *joined_tasks), len(pieces) + len(joined_pieces), {**reasons, **joined_reasons}, flaky)


def _check_pieces(
    package: Package,
    runner: Runner,
    pieces: Sequence[Piece],
    before: Mapping[str, str],
    least: int,
    parts: Sequence[Piece] = (),
) -> tuple[tuple[Task, ...], dict[str, tuple[str, ...]]]:
    """The tasks among some pieces, and why the others are none. `before`: outcomes with all of the code. `parts`: what
    was joined."""
    files, reasons = {**package.files, **package.tests}, dict[str, tuple[str, ...]]()
    pieces_by_patches: dict[tuple[Patch, ...], Piece] = {}
    with tempfile.TemporaryDirectory(prefix="etude-audit-") as name:
        write(package.files, Path(name) / "tree")
        for piece in pieces:
            if piece.patches in pieces_by_patches:
                reasons[label(piece)] = ("again: another way found the same piece",)
            elif problems := _find_cheap_faults(package, piece, Path(name) / "tree"):
                reasons[label(piece)] = problems
            else:
                pieces_by_patches[piece.patches] = piece
    results = dict(
        zip(
            pieces_by_patches,
            runner.outcomes(
                files, [_select_changes(piece, delete(files, piece)) for piece in pieces_by_patches.values()]
            ),
            strict=True,
        )
    )
    for patches, outcomes in list(results.items()):
        after = {test: outcome for test, outcome in outcomes.items() if test in before or outcome == "error"}
        if SILENT in after:  # no test of it has failed: nothing is known of any
            reasons[label(pieces_by_patches[patches])] = ("tests: the run does not end without it",)
            del results[patches]
        elif problems := faults(files, pieces_by_patches[patches], before, after, least):
            reasons[label(pieces_by_patches[patches])] = tuple(f"tests: {problem}" for problem in problems)
            del results[patches]
        else:
            results[patches] = after
    attempts = [(patches, name, fool) for patches in results for name, fool in fools(files, pieces_by_patches[patches])]
    failing_tests = {patches: _find_failing(before, after) for patches, after in results.items()}
    fool_outcomes = runner.outcomes(
        files,
        [_select_changes(pieces_by_patches[key], fool) for key, _, fool in attempts],
        [failing_tests[key] for key, _, _ in attempts],
    )
    for (patches, name, _), outcomes in zip(attempts, fool_outcomes, strict=True):
        passed_count, total = (
            sum(outcomes.get(test) == "passed" for test in failing_tests[patches]),
            len(failing_tests[patches]),
        )
        if 2 * passed_count > total:
            reasons[label(pieces_by_patches[patches])] = (
                f"fool: an answer of {name} passes {passed_count} of {total} tests",
            )
    tasks = [
        _make_task(package, pieces_by_patches[patches], before, after, parts)
        for patches, after in results.items()
        if label(pieces_by_patches[patches]) not in reasons
    ]
    return tuple(tasks), reasons


def task_id(package: Package, piece: Piece) -> str:
    """The package's name and version, and a hash of what is deleted."""
    return f"{package.name}-{package.version}-{_compute_digest(piece)[:12]}"


def label(piece: Piece) -> str:
    """A name for a piece that no other one has."""
    return f"{piece.way} {piece.name} {_compute_digest(piece)[:8]}"


def _select_changes(piece: Piece, files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {patch.file: files[patch.file] for patch in piece.patches}


def _find_failing(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    return sorted(test for test, outcome in before.items() if outcome == "passed" and after.get(test) == "failed")


def _compute_digest(piece: Piece) -> str:
    return hashlib.sha256(
        repr([(patch.file, patch.before, patch.after) for patch in piece.patches]).encode()
    ).hexdigest()


def _find_cheap_faults(package: Package, piece: Piece, tree: Path) -> tuple[str, ...]:
    """Reasons that need no run. `tree`: where the package lies, and lies again afterwards."""
    code = tuple(
        extract_removed_code(edit.old.decode(errors="replace"), edit.new.decode(errors="replace"))
        for patch in piece.patches
        for edit in patch.edits
    )
    remaining_files = _select_changes(piece, delete(package.files, piece))
    try:
        deleted = Deleted(code, remaining_files)
    except ValueError as error:
        return (f"short: {error}",)
    try:
        for name, data in remaining_files.items():
            (tree / name).write_bytes(data)
        return tuple(f"leak: {leak.path}, {leak.reason}" for leak in audit(tree, deleted, READ))
    finally:
        for name in remaining_files:
            (tree / name).write_bytes(package.files[name])


def _split_tests(
    failing_tests: Sequence[str], name: str, piece: Piece, parts: Sequence[Piece]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The tests that are shown and those that are held out: of each part its own halves, so that each part shows
    itself."""
    groups = {tuple(sorted({*part.tests} & {*failing_tests})) for part in parts if {*part.patches} <= {*piece.patches}}
    if {test for group in groups for test in group} != {*failing_tests} or any(len(group) < 2 for group in groups):
        groups = {tuple(failing_tests)}
    group_halves = [halves(group, name) for group in sorted(groups)]
    visible, held_out = (
        tuple(sorted(test for half in side for test in half)) for side in zip(*group_halves, strict=True)
    )
    return visible, held_out


def _make_task(
    package: Package, piece: Piece, before: Mapping[str, str], after: Mapping[str, str], parts: Sequence[Piece]
) -> Task:
    failing_tests = _find_failing(before, after)
    keep = tuple(
        sorted(test for test, outcome in before.items() if outcome == "passed" and after.get(test) == "passed")
    )
    name = task_id(package, piece)
    visible, held_out = _split_tests(failing_tests, name, piece, parts)
    source = {path: data for path, data in package.files.items() if path.endswith(".py")}
    piece = replace(piece, tests=tuple(failing_tests))
    editable = [patch.file for patch in piece.patches]
    return Task(
        name,
        package.name,
        package.version,
        package.licence,
        package.origin,
        piece,
        terse(piece, visible),
        specified(piece, package.files, visible, editable),
        visible,
        held_out,
        keep,
        difficulty(source, piece, len(failing_tests)),
    )
