"""Prices of habits in the recipe: what they add to the reward, that none changes nothing; and the experiment about
them."""

import itertools
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from kit.disk import read_lines
from kit.runs import Run
from kit.settings import RunError, fill
from recipe.microrepo import Session
from recipe.microrepo.manners import ManneredSession
from recipe.small.learner import language_of
from recipe.small.micro_world import CheckpointTasks
from recipe.small.reinforcement import learn
from recipe.small.settings import Recipe, RewardCoefficients
from recipe.small.tasks import MicroTasks
from recipe.small.transcripts import transcript_of
from ref.behaviour import MEASURE_CAPS, Behaviour, Prices, behaviour
from ref.engine.sampler import Sampler
from ref.network import load_hf
from ref.rl import MonitorSettings, compute_reward_terms, score_rollouts
from ref.rollout import rollout, sample_rollouts
from sims.behaviour import experiment as behaviour_prices
from sims.behaviour import verdicts as behaviour_verdicts
from sims.behaviour.experiment import ARMS, DEAR, Experiment, prices
from sims.policies import read_config
from tests import scripted
from tests.scripted import TASK


@pytest.fixture(scope="module")
def episode():
    """One broken call, and then the task is solved."""
    language = scripted.speaker()
    return scripted.played(
        language, scripted.wide(language), TASK, ["raed m3", "read m3", "write m3\n    return (a + b) * 2"]
    )


def trained(run, tiny_run, name, sets=(), opened=None):
    """One RL step from the tiny run's SFT checkpoint: what was logged, and all weights. That policy babbles, and hardly
    one rollout in four has a whole call, so there are many."""
    recipe = fill(
        Recipe, None, ["rl.steps=1", "rl.later=0", "rl.prompts=8", "rl.rollouts=8", *sets], read_config(tiny_run)
    )
    stage, start = run.stage(name, total=1), tiny_run / "checkpoints" / "sft"
    language = language_of(tiny_run)
    tasks = MicroTasks(recipe, language, opened) if opened else None
    learner, _ = learn(stage, recipe, load_hf(start), None, load_hf(start), language, tasks=tasks)
    return list(read_lines(stage.metrics_path)), [p.detach().clone() for p in learner.trunk.masters.parameters()]


def test_a_reward_is_the_sum_of_its_parts(episode):
    payment, costs = (
        RewardCoefficients(effort_price=0.001, invalid_call=0.25),
        replace(Prices.free(), broken=0.05, silent=0.125),
    )
    plain, behaved = compute_reward_terms(episode, payment), behaviour(transcript_of(episode), costs)
    paid = compute_reward_terms(episode, payment, behaved)
    assert (behaved.parts["broken"], behaved.parts["silent"], paid["invalid"], paid["tests"]) == (
        -0.05,
        -0.125,
        -0.25,
        1.0,
    )
    assert sum(paid.values()) == pytest.approx(sum(plain.values()) - 0.175) and paid["behaviour"] == pytest.approx(
        sum(behaved.parts.values())
    )
    assert (
        set(paid) == {*plain, "behaviour"}
        and set(behaved.parts) == {*MEASURE_CAPS}
        and plain["effort"] == paid["effort"] < 0
    )

    one = replace(episode, metrics=dict(episode.metrics))
    c = replace(Recipe().rl, payment=payment, behaviour=costs)
    score_rollouts(c, MicroTasks(Recipe(), scripted.speaker()), [one], 0)
    assert one.terms == paid and one.reward == sum(paid.values())
    assert one.metrics == episode.metrics | {f"behaviour_{name}": value for name, value in behaved.parts.items()}


def test_a_behaviour_that_costs_nothing_leaves_the_reward_bit_for_bit(episode):
    payment = RewardCoefficients(effort_price=0.0007, invalid_call=0.03)
    behaved = compute_reward_terms(episode, payment, Behaviour(dict.fromkeys(MEASURE_CAPS, 0.0)))
    assert sum(behaved.values()) == sum(compute_reward_terms(episode, payment).values())


def test_without_a_price_no_record_is_made(episode):
    assert Recipe().rl.behaviour == Prices.free() and Prices.free().max_penalty == 0
    c, one = replace(Recipe().rl, monitor=MonitorSettings(on=False)), replace(episode)
    score_rollouts(
        c, MicroTasks(Recipe(), scripted.speaker(), record=lambda _: pytest.fail("a record was made")), [one], 0
    )
    assert one.transcript is None and one.terms == compute_reward_terms(episode, c.payment)


def test_a_price_is_logged_and_moves_the_policy_and_one_that_nothing_is_asked_moves_nothing(
    tiny_run, tmp_path, monkeypatch
):
    """No rollout of the plain world has a to-do item."""
    monkeypatch.setattr("kit.process.cores", lambda: 1)
    with Run.open(tmp_path / "run", "test", Recipe()) as run:
        free, weights = trained(run, tiny_run, "free")
        none, same = trained(run, tiny_run, "todos", ["rl.behaviour.todos=0.5"])
        dear, other = trained(run, tiny_run, "broken", ["rl.behaviour.broken=0.05"])
    assert not any(name.startswith("behaviour") for line in free for name in line)
    parts = {f"behaviour_{name}" for name in MEASURE_CAPS}
    timed = {"time", "seconds", "tokens_per_s"}
    for before, line in zip(free, none, strict=True):
        assert set(line) - set(before) == parts and all(line[name] == 0 for name in parts)
        assert {name: value for name, value in line.items() if name in before and name not in timed} == {
            name: value for name, value in before.items() if name not in timed
        }
    assert all(torch.equal(x, y) for x, y in zip(weights, same, strict=True))
    first, line = free[0], dear[0]
    assert first["invalid_calls"] == line["invalid_calls"] > 0, "the first step's rollouts are the same"
    assert (
        -0.05 * line["invalid_calls"] <= line["behaviour_broken"] + 1e-9
        and line["behaviour_broken"] < 0
        and line["behaviour_silent"] == 0
    )
    assert line["reward"] == pytest.approx(first["reward"] + line["behaviour_broken"])
    assert not all(torch.equal(x, y) for x, y in zip(weights, other, strict=True))


def test_a_world_without_a_record_has_no_prices(tiny_run, tmp_path):
    with Run.open(tmp_path / "run", "test", Recipe()) as run:
        with pytest.raises(
            RunError,
            match=r"behaviour has no record in this experiment's world; start from a run without .*rl\.behaviour",
        ):
            trained(run, tiny_run, "opened", ["rl.behaviour.todos=0.5"], opened=Session)


def test_a_full_run_pays_the_same_prices(tiny_run):
    """Conversations that are played together, and those that are asked for one at a time."""
    recipe = read_config(tiny_run)
    dear, played = replace(recipe.rl, behaviour=replace(Prices.free(), broken=0.25)), []
    for rl in (recipe.rl, dear):
        asked: Any = SimpleNamespace(
            checkpoint=str(tiny_run / "checkpoints" / "sft"), length=512, join=recipe.context.join, rl=rl
        )
        world, generator = CheckpointTasks(asked), torch.Generator().manual_seed(0)
        sampler, tasks = (
            Sampler(load_hf(asked.checkpoint), torch.float32),
            [world.task("rl", number) for number in range(24)],
        )
        found = sample_rollouts(sampler, world.environment, tasks, 1, world.language, world.limits, 1.0, generator)
        (alone,) = rollout(sampler, [partial(world.environment, tasks[0], 0)], world.language, world.limits, 1.0, [0])
        alone.task = tasks[0]
        score_rollouts(rl, world, found, 0)
        score_rollouts(rl, world, [alone], 0)
        played.append([*found, alone])
    free, paid = played
    costs = [0.25 * min(5.0, one.metrics["invalid_calls"]) for one in free]
    assert max(costs) > 0 and [one.reward for one in paid] == pytest.approx(
        [one.reward - cost for one, cost in zip(free, costs, strict=True)]
    )


# The experiment.


def test_each_habit_has_its_price_in_two_arms_and_none_in_two():
    for name in MEASURE_CAPS:
        paid = [arm for arm in ARMS if getattr(prices(arm), name)]
        assert (
            len(paid) == 2 and "all" in paid and {getattr(prices(arm), name) for arm in paid} == {getattr(DEAR, name)}
        )
    assert prices("none") == replace(Prices.free(), free_comments=DEAR.free_comments) and prices("all") == DEAR
    assert set(behaviour_verdicts.HABITS) == set(MEASURE_CAPS)


def verdicts(fall=-0.3, drift=0.0, cost=0.02, comments=0.1, terminal=0.1):
    """Verdicts on four trainings: what a price does, what happens without one, what all prices cost, and what grows
    without one."""
    noise = np.array([-0.01, 0.01, 0.02, -0.02])
    changes = {
        arm: {name: noise + (drift + fall if name in names else drift) for name in MEASURE_CAPS}
        for arm, names in ARMS.items()
    }
    for number, arm in enumerate(ARMS):
        changes[arm] |= {
            "success": noise * number / 4 - cost * (arm == "all"),
            "terminal": noise + terminal,
            "items": noise,
        }
    changes["none"]["comments"] = noise + comments
    begin = dict.fromkeys((*MEASURE_CAPS, "success", "terminal", "items"), 0.5)
    return {one["name"]: one["verdict"] for one in behaviour_verdicts.learned(begin, changes, ARMS)}


def test_rules():
    habits = [f"price-{name}" for name in MEASURE_CAPS]
    assert verdicts() == dict.fromkeys(
        (*habits, "leaves-success", "comments-without-price", "terminal-without-price"), "reproduced"
    )
    assert {verdicts(fall=0.0)[name] for name in habits[:-2]} == {"not at this scale"}
    assert {verdicts(fall=0.3)[name] for name in habits[:-2]} == {"contradicted"}
    assert verdicts(drift=0.4)["price-todos"] == "partly", "fewer than without a price, and more than before"
    assert (
        verdicts(cost=0.3)["leaves-success"] == "contradicted"
        and verdicts(cost=0.08)["leaves-success"] == "not at this scale"
    )
    found = verdicts(comments=-0.1, terminal=0.0)
    assert (found["comments-without-price"], found["terminal-without-price"]) == ("contradicted", "not at this scale")


def test_the_experiment_plays_all_arms_and_goes_on(tiny_run, tmp_path, monkeypatch):
    c = Experiment(
        str(tiny_run), demonstrations=8, epochs=1, trainings=2, steps=1, prompts=1, rollouts=2, tasks=1, samples=2
    )
    monkeypatch.setattr("kit.process.cores", lambda: 1)
    with Run.open(tmp_path / "run", "figure behaviour", c) as run:
        found = behaviour_prices.experiment(run, c)
        monkeypatch.setattr(behaviour_prices, "learn", lambda *_, **__: pytest.fail("a finished training begins again"))
        assert behaviour_prices.experiment(run, c) == found
    assert [(row["world"], row["training"]) for row in found["rows"]] == [
        *itertools.product(ARMS, [0]),
        *itertools.product(ARMS, [1]),
    ]
    assert {end["arm"] for end in found["ends"]} == {"before", *ARMS} and len(found["ends"]) == 9
    behaviour_prices.picture(found, tmp_path / "drawn.png")
    assert len(np.unique(imread(tmp_path / "drawn.png")[..., :3].reshape(-1, 3), axis=0)) > 20


def test_what_is_asked_of_a_rollout():
    language = scripted.speaker()
    lesson = scripted.played(language, scripted.wide(language), TASK, ["read m3", "done"])
    found = behaviour_prices.average_habits([lesson])
    assert (
        found["terminal"] == found["success"] == found["items"] == 0.0
        and found["silent"] == 1.0
        and set(MEASURE_CAPS) < set(found)
    )
    assert transcript_of(lesson, ManneredSession).final_message == ""


@pytest.mark.parametrize("wrong", [{"trainings": 1}, {"steps": 0}])
def test_bad_settings(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} .* got"):
        Experiment(**wrong)
