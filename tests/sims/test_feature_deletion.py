"""Made-up packages whose tests pass and whose features are known, deletions at random, and the rules of the experiment
on feature deletion."""

import importlib.abc
import importlib.util
import random
import sys

import numpy as np
import pytest
from matplotlib.image import imread

from kit.runs import Run
from kit.settings import RunError
from ref.feature_deletion import delete, difficulty, slices, undelete
from ref.source_text import compiles
from sims.feature_deletion import experiment as sim
from sims.feature_deletion.deleted_at_random import code_lines, executed, in_one_place, scattered
from sims.feature_deletion.programs import feature_of, program


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of a made-up package from memory."""

    def __init__(self, files):
        self.files = {
            name.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): (name, data)
            for name, data in files.items()
        }

    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, self, is_package=name == "made") if name in self.files else None

    def exec_module(self, module):
        name, data = self.files[module.__name__]
        exec(compile(data, name, "exec"), vars(module))


class Own:
    """The tests of a made-up package, which is ours: it plays in this process, as pytest would play it."""

    def __init__(self, *how):
        self.runs, self.skipped_tests, self.lines = 0, frozenset(), None

    def outcomes(self, files, changes=({},), only=(), seed=0):
        runs = zip(changes, only or [None] * len(changes), strict=True)
        return [self.one({**files, **change}, tests) for change, tests in runs]

    def coverage(self, files):
        self.lines = {"": set()}
        try:
            self.one(files, None)
            return self.lines
        finally:
            self.lines = None

    def one(self, files, only):
        self.runs += 1
        finder, outcomes = Finder({name: data for name, data in files.items() if name.startswith("made/")}), {}
        sys.meta_path.insert(0, finder)
        before = sys.gettrace()
        try:
            for name in sorted(name for name in files if name.startswith("tests/")):
                space = {}
                self.now = ""
                sys.settrace(self.trace if self.lines is not None else before)
                try:
                    exec(compile(files[name], name, "exec"), space)
                except Exception:
                    outcomes[name] = "error"
                    continue
                for test, function in [(key, value) for key, value in space.items() if key.startswith("test_")]:
                    for number in function.pytestmark[0].args[1]:
                        self.now = f"{name}::{test}[{number}]"
                        if only is None or self.now in only:
                            outcomes[self.now] = self.said(function, number)
        finally:
            sys.settrace(before)
            sys.meta_path.remove(finder)
            for module in [module for module in sys.modules if module.partition(".")[0] == "made"]:
                del sys.modules[module]
        return outcomes

    def trace(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith("made/"):
            return None
        if event == "line":
            self.lines.setdefault(self.now, set()).add((frame.f_code.co_filename, frame.f_lineno))
        return self.trace

    @staticmethod
    def said(function, number):
        try:
            function(number)
        except (Exception, pytest.fail.Exception):
            return "failed"
        return "passed"


@pytest.mark.parametrize("seed", range(6))
def test_a_made_up_package_passes_its_tests(seed):
    made = program(seed)
    (outcomes,) = Own().outcomes({**made.files, **made.tests})
    assert {*outcomes.values()} == {"passed"} and len(outcomes) >= 30
    sizes = {}
    for test in outcomes:
        sizes[feature_of(test)] = sizes.get(feature_of(test), 0) + 1
    assert len(sizes) >= 10 and min(sizes.values()) >= 3, "each feature has tests enough to be a task"
    assert program(seed) == made and program(seed + 1) != made


def test_deletions_at_random_have_the_lines_that_were_asked_for():
    made = program(3)
    coverage = Own().coverage({**made.files, **made.tests})
    known = executed(made.files, coverage)
    for piece in slices(made.files, coverage):
        asked = difficulty(made.files, piece).lines
        for draw in (in_one_place, scattered):
            found = draw(made.files, known, asked, random.Random(piece.name))
            assert draw(made.files, known, asked, random.Random(piece.name)) == found
            left = delete(made.files, found)
            assert undelete(left, found) == made.files and all(compiles(data) for data in left.values())
            nearest = min(abs(code_lines(edit) - asked) for _, edit, _ in known)
            assert abs(difficulty(made.files, found).lines - asked) == (nearest if draw is in_one_place else 0)
            lines = {
                (one.file, line)
                for one in found.patches
                for edit in one.edits
                for line in range(edit.first, edit.last + 1)
            }
            assert {*found.tests} == {test for test, some in coverage.items() if test and lines & some}
            assert draw is scattered or len(found.patches) == len(found.patches[0].edits) == 1


def test_pieces_of_a_package_are_judged():
    """Every row by hand: which tests fail, and of which features."""
    made, runner, c = program(2), Own(), sim.Experiment()
    rows = sim.package(made, runner, 0, c)
    assert {row["way"] for row in rows} == {*sim.WAYS} and all(row["gold"] for row in rows)
    count = {way: sum(row["way"] == way for row in rows) for way in sim.WAYS}
    assert count["slice"] == count["one place"] == count["scattered"] > count["body"] > 5
    assert all(row["task"] == (row["why"] == "task") and 0 <= row["others broken"] <= 1 for row in rows)
    assert all(row["failing"] >= 3 and row["failing"] <= row["tests"] / 2 for row in rows if row["task"])
    assert all(row["others broken"] == 0 for row in rows if row["features"] <= 1)
    clean = next(row for row in rows if row["piece"] == "made/base.py:clean" and row["way"] == "body")
    assert clean["why"] == "most fail" and clean["features"] > 5
    assert any(row["why"] == "not collected" for row in rows if row["way"] == "symbol")


def test_a_package_whose_tests_do_not_pass_is_refused():
    made = program(0)
    made.files["made/base.py"] = made.files["made/base.py"].replace(b"text.split()", b"text.lower()")
    with pytest.raises(RunError, match="does not pass before anything is deleted"):
        sim.package(made, Own(), 0, sim.Experiment())


# The rules.


def made_up(tasks=1.0, control=0.7, broken=(0.1, 0.3), fools=0.0, gold=True):
    """Rows of four packages, with ten slices, as many of each control, and five bodies."""
    rows = []
    for number in range(4):
        for way, n, share in (
            ("slice", 10, tasks),
            ("body", 5, 1.0),
            ("symbol", 5, 0.0),
            ("one place", 10, control),
            ("scattered", 10, control),
        ):
            for at in range(n):
                row = {"program": number, "way": way, "task": at < share * n, "features": 1 + at % 2, "gold": gold}
                row |= {
                    "others broken": broken[way in sim.CONTROLS] + 0.01 * number,
                    "fools": fools if way == "slice" else 0.0,
                }
                rows.append(row)
    return {one["name"]: one for one in sim.verdicts(rows, sim.Experiment(programs=4))}


def test_rules():
    def said(**how):
        return {name: one["verdict"] for name, one in made_up(**how).items()}

    base = said()
    assert base["gold-back"] == "holds" and said(gold=False)["gold-back"] == "broken"
    assert base["slices-are-tasks"] == "not at this scale", "four packages say too little, however alike they are"
    assert (
        said(tasks=0.5)["slices-are-tasks"] == "not at this scale"
        and made_up(tasks=0.5)["slices-are-tasks"]["measured"] == 0
    )
    for way in ("one-place", "scattered"):
        assert base[f"more-than-{way}"] == base[f"spares-{way}"] == "reproduced"
        assert (
            said(control=1.0)[f"more-than-{way}"] == "not at this scale"
            and said(tasks=0.5)[f"more-than-{way}"] == "contradicted"
        )
        assert said(broken=(0.3, 0.1))[f"spares-{way}"] == "contradicted"
    assert base["more-than-functions"] == "reproduced" and made_up()["more-than-functions"]["measured"] == 5
    assert said(tasks=0.2)["more-than-functions"] == "contradicted"
    assert made_up(fools=0.5)["no-fool"]["measured"] == 1 and made_up(fools=0.6)["no-fool"]["measured"] == 0


def test_the_experiment_is_drawn_and_goes_on(tmp_path, monkeypatch):
    """The interrupted run plays no package twice."""
    runners = []
    monkeypatch.setattr(sim, "Sandboxed", lambda *how: runners.append(Own()) or runners[-1])
    c = sim.Experiment.quick()
    for resumed in (False, True):
        with Run.open(tmp_path / "run", "figure feature-deletion", c, resumed) as run:
            found = sim.experiment(run, c)
    assert runners[0].runs > 100 and runners[1].runs == 0
    assert len(found["claims"]) == 8 and [row["way"] for row in found["ways"]] == [*sim.WAYS]
    assert [(row["program"], row["way"]) for row in found["rows"]] == [
        (number, way) for number in (0, 1) for way in sim.WAYS
    ]
    assert all(sum(row[why] for why in sim.REASONS) == row["tried"] for row in found["rows"])
    assert sum(row["pieces"] for row in found["sizes"]) == sum(
        row["tried"] for row in found["rows"] if row["way"] not in ("body", "symbol")
    )
    sim.picture(found, tmp_path / "drawn.png")
    assert len(np.unique(imread(tmp_path / "drawn.png")[..., :3].reshape(-1, 3), axis=0)) > 20


@pytest.mark.parametrize("wrong", [{"programs": 1}, {"least": 0}, {"max_share": 0.0}])
def test_bad_settings(wrong):
    with pytest.raises(ValueError, match="programs must be at least 2"):
        sim.Experiment(**wrong)
