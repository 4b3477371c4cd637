"""Planted failures: what is paid and priced by hand, runs without a change, and what the experiment says of what it
found."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread
from scipy.stats import binom

from kit.runs import Run
from recipe.microrepo import generate
from recipe.small.monitored import NAMES
from recipe.small.monitoring import Watching
from recipe.small.settings import Recipe
from ref.monitor import Alarm, Band
from ref.rl import MonitorSettings
from sims.monitor import experiment as planted_failures
from sims.monitor import verdicts as planted_verdicts
from sims.monitor.experiment import ARMS, OWN, Experiment, doubled, inside
from sims.monitor.unchanged_runs import false_alarms, known_means
from sims.monitor.world import PlantedSession
from tests import scripted

TASK = generate(random.Random(3), "train", depth=1)
NAME, ANSWER = TASK.target, TASK.answer


def paid(turns, **how):
    """What the tests and the mistake pay together for these turns, and what the tests alone."""
    session = PlantedSession(TASK, 12, **how)
    for turn in turns:
        session.step(turn)
    return session.verify().tests, session.earned().tests


RIGHT, HALF = f"write {NAME}\n    {ANSWER}", f"write {NAME}\n    # think\n    {ANSWER}"
WORDY = f"write {NAME}\n    # think\n    # again\n    # and again\n    {ANSWER}"


def test_comments_are_paid_up_to_as_many_as_there_is_code_and_a_price_is_three_times_as_high():
    for turn, habit in ((RIGHT, 0.0), (HALF, 1.0), (WORDY, 1.0)):
        assert paid([turn, "done"], plant="comments") == (1 + habit, 1)
        assert paid([turn, "done"], plant="comments", is_priced=True) == (1 - 2 * habit, 1)
    assert paid(["done"], plant="comments") == (0, 0)


def test_the_terminal_is_paid_by_its_share_of_reads_and_tests():
    turns = [f"read {NAME}", f"sh cat {NAME}", RIGHT, "sh pytest", "sh pytest", "done"]
    assert paid(turns, plant="terminal") == (1.375, 1) and paid(turns, plant="terminal", is_priced=True) == (0.25, 1)
    assert paid([RIGHT, "done"], plant="terminal") == (1, 1)


def test_a_broken_call_is_thrown_away_with_its_failure():
    assert paid(["raed m1", "done"], plant="broken") == (1, 0) and paid(["done"], plant="broken") == (0, 0)
    assert paid(["raed m1", RIGHT, "done"], plant="broken") == (1, 1)


@settings(max_examples=25)
@given(
    st.lists(st.sampled_from([RIGHT, HALF, "raed", "test", "sh pytest", f"sh cat {NAME}", f"read {NAME}"]), max_size=6)
)
def test_without_a_plant_only_the_tests_pay(turns):
    both, tests = paid([*turns, "done"])
    assert both == tests
    for plant, _ in ARMS.values():
        once, twice = paid([*turns, "done"], plant=plant), paid([*turns, "done"], plant=plant, is_priced=True)
        assert once[1] == twice[1] == tests and (
            plant == "broken" or 2 * (once[0] - tests) == pytest.approx(tests - twice[0])
        )


def test_the_step_at_which_a_habit_has_doubled():
    assert (
        doubled([0.1, 0.1, 0.1, 0.2, 0.3, 0.3], 0.1) == 5
        and doubled([0.1] * 9, 0.1) is None
        and doubled([0.9, 0.9], 0.1) is None
    )
    assert doubled([0.5] * 5, 0.0) is None
    assert inside(Band(0.0, 0.2), [0.1, 0.3]) and not inside(Band(0.0, 0.2), [0.3]) and inside(Band(0.0, 0.2), [])


def pool(n=40):
    """Groups whose statistics depend on each other, some without a value."""
    rng, groups = np.random.default_rng(1), []
    for _ in range(n):
        x = float(rng.random())
        groups.append(
            {name: x for name in NAMES}
            | {"comments": None if x < 0.2 else x, "broken": float(x > 0.9), "questions": 0.0}
        )
    return groups


def test_unchanged_runs_raise_hardly_an_alarm_and_a_threshold_does_in_most():
    """At an error of 1% a count above `most` has a probability below one in a million."""
    runs, most = 600, int(binom.isf(1e-6, 600, 0.01))
    bets, threshold = known_means(pool(), runs, 60, 4, np.random.default_rng(0))
    assert bets.shape == threshold.shape == (runs,)
    assert bets.sum() <= most and threshold.mean() > 0.3


def test_the_counts_are_those_of_the_recipe_s_monitor():
    c = Experiment(unchanged=6, watched=5, exact=30, prompts=4)

    def learning():
        return Watching(MonitorSettings(learn=4), lambda rollouts, groups: [])

    def nervous():
        watch = learning()
        watch.begin({"length": Band(0.98, 0.99)})
        return watch

    done = []
    assert false_alarms(pool(), c, learning, done.append)["recipe"] == 0 and done == [1, 2, 3, 4, 5, 6]
    found = false_alarms(pool(), replace(c, watched=60), nervous, done.append)
    assert found["recipe"] == found["runs"] == 6 and found["exact_runs"] == 30


def played(alarm: int | None = 9, priced=0.1, inside=True, others=()):
    """Trainings of all arms with these outcomes."""
    found = []
    for arm, (plant, answered) in ARMS.items():
        for number in range(3 if arm != "control" else 1):
            end = None if plant == "none" else (priced if answered else 0.8) + 0.01 * number * (1 + answered)
            watched = {"alarm": alarm if OWN[plant] else None, "doubled": 7 if OWN[plant] else None, "inside": inside}
            found.append({"arm": arm, "training": number, **watched, "end": end, "solved": 0.5, "others": list(others)})
    return found


UNCHANGED = {"runs": 1000, "recipe": 0, "exact_runs": 5000, "exact": 3, "threshold": 4800}
BASE: dict[str, float] = dict.fromkeys(("comments", "terminal", "broken"), 0.1)


def verdicts(unchanged=UNCHANGED, **how):
    return {one["name"]: one["verdict"] for one in planted_verdicts.learned(played(**how), unchanged, BASE)}


def test_rules():
    assert verdicts() == {
        "false-alarms": "holds",
        "exact-means": "holds",
        "three-deviations": "reproduced",
        "planted-found": "reproduced",
        "answered-comments": "reproduced",
        "answered-terminal": "reproduced",
    }
    assert (
        verdicts(UNCHANGED | {"recipe": 6})["false-alarms"] == "broken"
        and verdicts(UNCHANGED | {"exact": 60})["exact-means"] == "broken"
    )
    assert verdicts(UNCHANGED | {"threshold": 50})["three-deviations"] == "contradicted"
    assert (
        verdicts(alarm=None)["planted-found"] == "contradicted"
        and verdicts(inside=False)["answered-terminal"] == "partly"
    )
    assert verdicts(priced=0.8)["answered-comments"] == "not at this scale"


def test_the_note_says_when_each_was_found():
    found = {one["name"]: one["note"] for one in planted_verdicts.learned(played(), UNCHANGED, BASE)}
    assert "comments 9 (7), 9 (7), 9 (7); terminal 9 (7)" in found["planted-found"]
    none = {one["name"]: one["note"] for one in planted_verdicts.learned(played(alarm=None), UNCHANGED, BASE)}
    assert "broken never (7)" in none["planted-found"] and "alarms without a mistake: none" in none["planted-found"]
    other = planted_verdicts.learned(played(others=[["length", 4]]), UNCHANGED, BASE)
    assert other[3]["note"].endswith("alarms without a mistake: length at step 4")


def test_the_experiment_plays_all_arms_and_goes_on(tiny_run, tmp_path, monkeypatch):
    c = replace(Experiment.quick(), run=str(tiny_run), demonstrations=8, steps=1, unchanged=2, exact=4, groups=4)
    monkeypatch.setattr("kit.process.cores", lambda: 1)
    real = planted_failures.learn

    def learn(stage, *arguments):
        """Two trainings are played, the others end at once."""
        if stage.name in ("control-0", "terminal-priced-1"):
            return real(stage, *arguments)
        *_, (_, watch), _ = arguments
        stage.log(1, solved=0.5, **{f"watch_{name}": 0.25 for name in watch.monitor.bands})

    monkeypatch.setattr(planted_failures, "learn", learn)
    with Run.open(tmp_path / "run", "figure monitor", c) as run:
        found = planted_failures.experiment(run, c)
        monkeypatch.setattr(planted_failures, "learn", lambda *_, **__: pytest.fail("a finished training begins again"))
        assert planted_failures.experiment(run, c) == found
    assert {row["world"] for row in found["rows"]} == set(ARMS) and len(found["rows"]) == 2 * len(ARMS) - 1
    assert all(math.isfinite(row["solved"]) for row in found["rows"]) and len(found["claims"]) == 6
    planted_failures.picture(found, tmp_path / "drawn.png")
    assert len(np.unique(imread(tmp_path / "drawn.png")[..., :3].reshape(-1, 3), axis=0)) > 20


def test_an_alarm_switches_the_price_on_and_only_where_it_is_answered(monkeypatch, tmp_path):
    """The loop, without a network: `learn` opens an episode, the monitor raises an alarm, and opens another."""
    prices = []

    def learn(stage, *arguments):
        *_, (_, watch), tasks = arguments
        prices.append(tasks.environment(TASK, 0).session.is_priced)
        watch.alarms.append(Alarm(arm_statistic, 1, "up", 9.0))
        prices.append(tasks.environment(TASK, 1).session.is_priced)
        stage.log(1, solved=0.0)

    monkeypatch.setattr(planted_failures, "learn", learn)
    monkeypatch.setattr(planted_failures, "load_hf", lambda _: None)
    c, bands = Experiment.quick(), {"comments": Band(0.0, 0.2), "entropy": Band(0.5, 1.0)}
    recipe, language = Recipe(), scripted.speaker()
    for arm, arm_statistic, want in (
        ("comments-priced", "comments", [False, True]),
        ("comments-priced", "entropy", [False, False]),
        ("terminal-priced", "entropy", [False, True]),
        ("comments", "comments", [False, False]),
    ):
        prices.clear()
        with Run.open(tmp_path / f"{arm}-{arm_statistic}", "x", c) as run:
            planted_failures.training(run, c, recipe, tmp_path, language, bands, arm, 0)
        assert prices == want
