"""Tasks made from a package: pieces are tried one by one, and what stands every check becomes a task.

What runs tests is given as an argument: code of a package runs in a sandbox, never here. Checks come in the order of their cost. Cheap ones need no
run: is there enough code to recognise a copy, is the tree free of copies, is it another piece than those before. Then the tests run without the
piece (`faults` of ref/feature_deletion.py), and with fools in its place: code that answers nothing, or what it was given, may pass half of the tests
that matter at most.

The same package gives the same tasks: pieces come sorted, ids are hashes of what was deleted, and nothing is drawn by chance.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from environments.fingerprint import Deleted, gone
from environments.grading.halves import halves
from environments.grading.lay import write
from environments.leaks import Limits, audit
from environments.tasks.answers import SILENT
from environments.tasks.package import Package
from environments.tasks.prompts import specified, terse
from ref.feature_deletion import Difficulty, Piece, bodies, delete, difficulty, faults, independent, joined, slices, symbols
from ref.source_text import Patch

__all__ = ["Made", "Runner", "Task", "baseline", "fools", "make", "task_id", "unions"]


READ = Limits(file=32 << 20, total=256 << 20)
"""Bytes that the audit unfolds from one file and from a whole package. Its files have 1 MiB at most; a file that unfolds
to more is a finding."""


class Runner(Protocol):
    """Runs a package's tests somewhere safe."""

    without: frozenset[str]
    """Tests that are never played."""

    def outcomes(
        self, files: Mapping[str, bytes], changes: Sequence[Mapping[str, bytes]] = ({},), only: Sequence[Collection[str] | None] = (), seed: int = 0
    ) -> Sequence[Mapping[str, str]]:
        """Files, tests included, and for each run some of them with other contents, and the tests to be played, where those are not all → for each
        run, test → "passed", "failed", "skipped" or "error". A file that cannot be collected is a test in error, and so is a run without an end.
        `seed`: of the hashes by which Python orders sets."""
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
    held: tuple[str, ...]
    """Those that it does not see."""
    keep: tuple[str, ...]
    """Tests that pass without the feature, and must go on doing so."""
    difficulty: Difficulty


@dataclass(frozen=True)
class Made:
    """What became of a package."""

    tasks: tuple[Task, ...]
    tried: int
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
    """Outcomes that are the same in every run, and the names of tests of which they are not. Sets have another order in each: a test may depend on
    it, and so may its name."""
    runs = [runner.outcomes(files, seed=seed)[0] for seed in range(repeats)]
    tests = sorted(set().union(*runs))
    flaky = tuple(test for test in tests if len({run.get(test, "missing") for run in runs}) > 1)
    return {test: runs[0][test] for test in tests if test not in flaky}, flaky


def fools(files: Mapping[str, bytes], piece: Piece) -> Iterable[tuple[str, dict[str, bytes]]]:
    """Trees in which every hole of a function holds an answer that knows nothing: None, and the last argument that is no keyword."""
    left = delete(files, piece)
    hole = b"raise NotImplementedError"
    changed = [one.file for one in piece.patches if any(hole in edit.new for edit in one.edits)]
    for name, answer in (("nothing", b"return None"), ("what it is given", b"return ([*locals().values()] or [None])[-1]")):
        if changed:
            yield name, {**left, **{file: left[file].replace(hole, answer) for file in changed}}


def unions(pieces: Sequence[Piece], most: int) -> tuple[Piece, ...]:
    """Joins of up to `most` pieces, at least two, that are independent of each other. With each piece go the next ones, in a circle, that can go with
    those before: about as many joins as pieces, each once."""
    order, found = sorted(pieces, key=label), dict[tuple[Patch, ...], Piece]()
    for at in range(len(order)):
        chosen: list[Piece] = []
        for piece in order[at:] + order[:at]:
            if len(chosen) < most and all(independent(piece, one) for one in chosen):
                chosen.append(piece)
        if len(chosen) > 1:
            one = joined(chosen)
            found.setdefault(one.patches, one)
    return tuple(found.values())


def make(package: Package, runner: Runner, least: int = 3, most: float = 0.5, repeats: int = 3, join: int = 1) -> Made:
    """All tasks of a package. `join`: up to so many pieces that are tasks are also taken out at once. Raises ValueError where its own tests do not
    pass: then it is no material."""
    whole = {**package.files, **package.tests}
    before, flaky = baseline(runner, whole, repeats)
    if sum(outcome == "passed" for outcome in before.values()) < least:
        raise ValueError(f"{package.name} {package.version}: fewer than {least} of its tests pass every time; nothing can be made of it")
    if broken := sorted(test for test, outcome in before.items() if outcome == "error"):
        raise ValueError(f"{package.name} {package.version}: {broken[0]} cannot be collected")
    stable = {test: lines for test, lines in runner.coverage(whole).items() if before.get(test) == "passed" or not test}
    source = {name: data for name, data in package.files.items() if name.endswith(".py")}
    pieces = [*slices(source, stable, least, most), *bodies(source), *symbols(source)]
    tasks, reasons = _checked(package, runner, pieces, before, least)
    parts = [task.piece for task in tasks]
    more = unions(parts, join) if join > 1 else ()
    harder, why_not = _checked(package, runner, more, before, least, parts) if more else ((), {})
    return Made((*tasks, *harder), len(pieces) + len(more), {**reasons, **why_not}, flaky)


def _checked(
    package: Package, runner: Runner, pieces: Sequence[Piece], before: Mapping[str, str], least: int, parts: Sequence[Piece] = ()
) -> tuple[tuple[Task, ...], dict[str, tuple[str, ...]]]:
    """The tasks among some pieces, and why the others are none. `before`: outcomes with all of the code. `parts`: what was joined."""
    whole, reasons = {**package.files, **package.tests}, dict[str, tuple[str, ...]]()
    todo: dict[tuple[Patch, ...], Piece] = {}
    with tempfile.TemporaryDirectory(prefix="etude-audit-") as name:
        write(package.files, Path(name) / "tree")
        for piece in pieces:
            if piece.patches in todo:
                reasons[label(piece)] = ("again: another way found the same piece",)
            elif found := _cheap(package, piece, Path(name) / "tree"):
                reasons[label(piece)] = found
            else:
                todo[piece.patches] = piece
    played = dict(zip(todo, runner.outcomes(whole, [_changes(piece, delete(whole, piece)) for piece in todo.values()]), strict=True))
    for patches, outcomes in list(played.items()):
        after = {test: outcome for test, outcome in outcomes.items() if test in before or outcome == "error"}
        if SILENT in after:  # no test of it has failed: nothing is known of any
            reasons[label(todo[patches])] = ("tests: the run does not end without it",)
            del played[patches]
        elif found := faults(whole, todo[patches], before, after, least):
            reasons[label(todo[patches])] = tuple(f"tests: {one}" for one in found)
            del played[patches]
        else:
            played[patches] = after
    tried = [(patches, name, fool) for patches in played for name, fool in fools(whole, todo[patches])]
    failing = {patches: _failing(before, after) for patches, after in played.items()}
    answers = runner.outcomes(whole, [_changes(todo[one], fool) for one, _, fool in tried], [failing[one] for one, _, _ in tried])
    for (patches, name, _), outcomes in zip(tried, answers, strict=True):
        passed, all_of_them = sum(outcomes.get(test) == "passed" for test in failing[patches]), len(failing[patches])
        if 2 * passed > all_of_them:
            reasons[label(todo[patches])] = (f"fool: an answer of {name} passes {passed} of {all_of_them} tests",)
    tasks = [_task(package, todo[patches], before, after, parts) for patches, after in played.items() if label(todo[patches]) not in reasons]
    return tuple(tasks), reasons


def task_id(package: Package, piece: Piece) -> str:
    """The package's name and version, and a hash of what is deleted."""
    return f"{package.name}-{package.version}-{_digest(piece)[:12]}"


def label(piece: Piece) -> str:
    """A name for a piece that no other one has."""
    return f"{piece.way} {piece.name} {_digest(piece)[:8]}"


def _changes(piece: Piece, files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {one.file: files[one.file] for one in piece.patches}


def _failing(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    return sorted(test for test, outcome in before.items() if outcome == "passed" and after.get(test) == "failed")


def _digest(piece: Piece) -> str:
    return hashlib.sha256(repr([(one.file, one.before, one.after) for one in piece.patches]).encode()).hexdigest()


def _cheap(package: Package, piece: Piece, tree: Path) -> tuple[str, ...]:
    """Reasons that need no run. `tree`: where the package lies, and lies again afterwards."""
    code = tuple(gone(edit.old.decode(errors="replace"), edit.new.decode(errors="replace")) for one in piece.patches for edit in one.edits)
    left = _changes(piece, delete(package.files, piece))
    try:
        deleted = Deleted(code, left)
    except ValueError as error:
        return (f"short: {error}",)
    try:
        for name, data in left.items():
            (tree / name).write_bytes(data)
        return tuple(f"leak: {leak.path}, {leak.why}" for leak in audit(tree, deleted, READ))
    finally:
        for name in left:
            (tree / name).write_bytes(package.files[name])


def _halves(failing: Sequence[str], name: str, piece: Piece, parts: Sequence[Piece]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The tests that are shown and those that are held out: of each part its own halves, so that each part shows itself."""
    groups = {tuple(sorted({*one.tests} & {*failing})) for one in parts if {*one.patches} <= {*piece.patches}}
    if {test for group in groups for test in group} != {*failing} or any(len(group) < 2 for group in groups):
        groups = {tuple(failing)}
    both = [halves(group, name) for group in sorted(groups)]
    visible, held = (tuple(sorted(test for half in side for test in half)) for side in zip(*both, strict=True))
    return visible, held


def _task(package: Package, piece: Piece, before: Mapping[str, str], after: Mapping[str, str], parts: Sequence[Piece]) -> Task:
    failing = _failing(before, after)
    keep = tuple(sorted(test for test, outcome in before.items() if outcome == "passed" and after.get(test) == "passed"))
    name = task_id(package, piece)
    visible, held = _halves(failing, name, piece, parts)
    source = {one: data for one, data in package.files.items() if one.endswith(".py")}
    piece = replace(piece, tests=tuple(failing))
    editable = [one.file for one in piece.patches]
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
        held,
        keep,
        difficulty(source, piece, len(failing)),
    )
