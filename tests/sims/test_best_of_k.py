"""pass@K along RL: the estimate is unbiased, verdicts tell widening from sharpening, and a dead training goes on where
it was."""

import itertools
import json
from math import comb
from types import SimpleNamespace

import numpy as np
import pytest

from kit.runs import Run
from recipe.small.data import task_stream
from sims.best_of_k import experiment as best_of_k
from sims.best_of_k.experiment import Experiment
from sims.policies import read_config


def drawn(p: list[float], trainings: int = 3, n: int = 16, seed: int = 0) -> np.ndarray:
    """Successes of tasks that succeed with these probabilities, [trainings, tasks]."""
    return np.random.default_rng(seed).binomial(n, p, (trainings, len(p)))


def decided(before: np.ndarray, after: np.ndarray) -> dict[str, dict]:
    return {c["name"]: c for c in best_of_k.verdicts(before, after, Experiment(resamples=200))}


def test_curves_by_hand():
    # Of 4 rollouts 1 and 2 succeeded: two drawn ones both fail in C(3,2)/C(4,2) = 1/2 and in 1/6 of the cases.
    got = best_of_k.curves(np.array([[0, 1], [2, 4]]), 4)
    assert got.shape == (2, 2, 4)
    np.testing.assert_allclose(got[0, 1], [1 / 4, 1 / 2, 3 / 4, 1])
    np.testing.assert_allclose(got[1, 0], [1 / 2, 5 / 6, 1, 1])
    np.testing.assert_allclose(got[[0, 1], [0, 1]], [[0] * 4, [1] * 4])


@pytest.mark.parametrize("p", [0.03, 0.4])
def test_curves_are_unbiased_where_the_plain_estimate_is_not(p):
    n = 6
    chance = np.array([comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)])
    expected = chance @ best_of_k.curves(np.arange(n + 1), n)
    right = 1 - (1 - p) ** np.arange(1, n + 1)
    np.testing.assert_allclose(expected, right, rtol=1e-12)
    plain = 1 - (1 - np.arange(n + 1)[:, None] / n) ** np.arange(1, n + 1)
    assert np.abs(chance @ plain - right).max() > 0.01


def test_crossing_is_the_first_k_without_a_lead():
    assert best_of_k.crossing(np.array([0.2, 0.5, 0.7]), np.array([0.4, 0.5, 0.6])) == 2
    assert best_of_k.crossing(np.array([0.2, 0.5]), np.array([0.3, 0.6])) is None


def test_churn_by_hand():
    before, after = np.array([[0, 0, 3, 5], [0, 2, 0, 5]]), np.array([[1, 0, 0, 5], [0, 0, 4, 5]])
    # Training 0 gains task 0 and loses task 2, training 1 gains task 2 and loses task 1; the looks before differ at 1
    # and 2.
    assert best_of_k.churn(before, after) == (0.25, 0.25, 0.25)
    assert best_of_k.churn(before[:1], after[:1]) == (0.25, 0.25, None)


def test_sharpening_is_not_taken_for_widening():
    """Half of the tasks go from 0.4 to 0.98, the others stay out of reach: the average rises by 0.29, best-of-16 does
    not."""
    claims = decided(drawn([0.4] * 60 + [0.0] * 60), drawn([0.98] * 60 + [0.0] * 60, seed=1))
    assert claims["average"]["verdict"] == "reproduced" and claims["average"]["measured"] == pytest.approx(
        0.29, abs=0.02
    )
    assert claims["best-of-16"]["verdict"] == "not at this scale" and claims["best-of-16"]["measured"] == pytest.approx(
        0, abs=0.01
    )
    assert "it shrinks: RL sharpens" in claims["best-of-16"]["note"]


def test_widening_is_seen():
    """A quarter of the tasks comes within reach."""
    claims = decided(drawn([0.5] * 60 + [0.0] * 60), drawn([0.5] * 60 + [0.25] * 30 + [0.0] * 30, seed=1))
    assert claims["best-of-16"]["verdict"] == claims["best-of-4"]["verdict"] == "reproduced"
    assert claims["best-of-16"]["measured"] == pytest.approx(0.25 * (1 - 0.75**16), abs=0.03)


def test_both_at_once():
    """The average rises by more than best-of-16 does: tasks came within reach, and others were sharpened."""
    claims = decided(drawn([0.3] * 60 + [0.0] * 60), drawn([0.95] * 60 + [0.5] * 12 + [0.0] * 48, seed=1))
    assert claims["best-of-16"]["verdict"] == "reproduced" and "it shrinks" in claims["best-of-16"]["note"]


def test_as_many_gained_as_lost_is_no_rise():
    """Three trainings, ten tasks: each wins one and loses another. In floats the mean is 1e-17."""
    before, after = np.full((3, 10), 16), np.full((3, 10), 16)
    for training in range(3):
        before[training, training] = after[(training + 1) % 3, 9 - training] = 0
    best = decided(before, after)["best-of-16"]
    assert (
        (after == 0).sum() == (before == 0).sum() and best["measured"] == 0 and best["verdict"] == "not at this scale"
    )


def test_one_training_that_falls_prevents_reproduced():
    after = drawn([0.9] * 120, seed=1)
    after[2] = drawn([0.3] * 120, 1, seed=2)[0]
    assert decided(drawn([0.4] * 120), after)["average"]["verdict"] == "partly"


@pytest.fixture(scope="module")
def played(play_figure, tmp_path_factory):
    """The quick experiment, with the tiny recipe in it."""
    out = tmp_path_factory.mktemp("best-of-k")
    return out, play_figure("best-of-k", out, own=True)


def test_rows_of_a_quick_run(played):
    out, record = played
    c, rows = Experiment.quick(), [row for row in record["rows"] if row["part"] == "all"]
    assert [(row["step"], row["k"]) for row in rows] == list(itertools.product((0, 1, 2), range(1, c.samples + 1)))
    assert len(record["claims"]) == 3 and (out / "best-of-k.png").stat().st_size > 20_000
    lines = [json.loads(line) for line in (out / "metrics/rl-0.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "solved" in line] == [0, 1, 2]


def test_successes_go_to_their_tasks(played, tmp_path, monkeypatch):
    """Rollouts whose outcome says which task they are of: a table turned the wrong way would mix them up."""
    out, _ = played
    root, c = out / "recipe", Experiment(run="", trainings=1, steps=2, tasks=5, samples=3)
    recipe = read_config(root)
    tasks = list(itertools.islice(task_stream(recipe, "evaluation"), c.tasks))

    def play(sampler, language, some, n, *rest):
        assert [t.key for t in some] == [
            t.key for t in tasks
        ]  # the recipe's held-out tasks, whatever the training's seed
        return [SimpleNamespace(metrics={"tests": float(s < t % 4)}) for t in range(len(some)) for s in range(n)]

    monkeypatch.setattr(best_of_k, "play", play)
    with Run.open(tmp_path / "run", "figure best-of-k", c) as run:
        looks = best_of_k.training(run, c, root, recipe, 1)
    assert [look["solved"] for look in looks] == [[0, 1, 2, 3, 0]] * 3


def test_a_training_that_was_interrupted_ends_the_same(played, tmp_path, monkeypatch):
    """It dies in its last look and goes on: the looks of both processes stand side by side, as if nothing had
    happened."""
    out, record = played
    c, calls, play = Experiment.quick(), [], best_of_k.play

    def dying(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return play(*args)

    root, recipe = out / "recipe", read_config(out / "recipe")
    whole = json.loads((out / "stages/rl-0.json").read_text())["result"]["looks"]
    monkeypatch.setattr(best_of_k, "play", dying)
    with (
        pytest.raises(KeyboardInterrupt),
        Run.open(tmp_path / "run", "figure best-of-k", c, checkpoint_seconds=0.0) as run,
    ):
        best_of_k.training(run, c, root, recipe, 0)
    with Run.open(tmp_path / "run", "figure best-of-k", c, resume=True) as run:
        assert best_of_k.training(run, c, root, recipe, 0) == whole
    assert len(calls) == 4  # three looks, one of them twice
    assert (tmp_path / "run/metrics/rl-0.jsonl").read_bytes() == (out / "metrics/rl-0.jsonl").read_bytes()
