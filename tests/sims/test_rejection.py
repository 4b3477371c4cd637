"""RL against rejection fine-tuning: what is kept, what is compared, and that a dead experiment goes on where it was."""

import json

import pytest
import torch

from kit.runs import Run
from recipe.small.data import task_stream
from recipe.small.learner import language_of
from sims.policies import read_config
from sims.rejection import experiment as rejection
from sims.rejection.experiment import Experiment


def arm(seed, rl, tuned, before, depths=(1, 2, 5, 6)):
    """A run with a task of each depth and these successes in every task."""
    return {
        "seed": seed,
        "tasks": [
            {
                "kind": "multi-hop",
                "depth": depth,
                "deeper": depth > 4,
                **{
                    name: {"sampled": value if depth < 5 or name != "rejection" else 0.0, "greedy": float(value > 0.5)}
                    for name, value in (("SFT", before), ("rejection", tuned), ("RL", rl))
                },
            }
            for depth in depths
        ],
        "kept": {"rollouts": 64, "solved": 8, "contexts": 9},
    }


def judged(*arms):
    return {claim["name"]: claim for claim in rejection.verdicts(arms, Experiment(resamples=200))}


def test_claims_by_hand():
    """Greedy over all tasks, sampled over those deeper than RL's; rejection fine-tuning falls to 0 on these."""
    claims = judged(arm(0, 0.8, 0.4, 0.2), arm(1, 0.9, 0.5, 0.2))
    assert claims["greedy"]["measured"] == 1.0 and claims["greedy"]["verdict"] == "reproduced"
    assert claims["deeper"]["measured"] == pytest.approx(0.85) and claims["deeper"]["verdict"] == "reproduced"
    assert claims["rejection"]["measured"] == pytest.approx((0.2 - 0.2 + 0.3 - 0.2) / 4)
    assert "SFT 0.200, rejection 0.225" in claims["rejection"]["note"]


def test_one_seed_against_it_is_no_reproduction():
    claims = judged(*(arm(seed, 0.9, 0.4, 0.2) for seed in range(5)), arm(5, 0.4, 0.6, 0.2))
    assert claims["greedy"]["verdict"] != "reproduced"


def test_without_deeper_tasks_nothing_is_shown_of_them():
    claims = judged(arm(0, 0.9, 0.4, 0.2, depths=(1, 2)))
    assert claims["deeper"]["measured"] == 0 and claims["deeper"]["verdict"] == "not at this scale"


def test_only_contexts_of_solved_rollouts_are_kept(tiny_run, tmp_path, monkeypatch):
    """Every third rollout is said to solve its task. What is kept are its contexts, with the agent's own tokens."""
    recipe = read_config(tiny_run)
    real, seen = rejection.play, []

    def play(*words, **more):
        rollouts = real(*words, **more)
        for rollout in rollouts:
            seen.append(rollout)
            rollout.metrics["tests"] = float(len(seen) % 3 == 0)
        return rollouts

    monkeypatch.setattr(rejection, "play", play)
    with Run.open(tmp_path / "run", "figure rejection", Experiment.quick()) as run:
        path, counts = rejection.sample(run, Experiment.quick(), 0, tiny_run, recipe)
    total = recipe.rl.steps * recipe.rl.prompts * recipe.rl.rollouts
    assert counts["rollouts"] == total == len(seen) and counts["solved"] == total // 3
    expected = [segment for rollout in seen[2::3] for segment in rollout.chain.segments]
    contexts = json.loads(path.read_text())
    assert len(contexts) == counts["contexts"] == len(expected)
    for (ids, sampled), segment in zip(contexts, expected, strict=True):
        assert torch.equal(torch.tensor(ids), segment.tokens) and torch.equal(torch.tensor(sampled), segment.sampled)
    stream = task_stream(recipe, "rl")
    tasks = [next(stream) for _ in range(total // recipe.rl.rollouts)]
    assert [rollout.task for rollout in seen] == [task for task in tasks for _ in range(recipe.rl.rollouts)]
    assert language_of(tiny_run).env in contexts[0][0]


def test_figure(play_figure, tiny_run, tmp_path):
    record = play_figure("rejection", tmp_path / "out", f"runs={tiny_run}")
    assert [claim["name"] for claim in record["claims"]] == ["greedy", "deeper", "rejection"]
    assert {row["arm"] for row in record["rows"]} == {"SFT", "rejection", "RL"}
    assert (tmp_path / "out" / "rejection.png").stat().st_size > 10_000


def test_sampling_that_was_interrupted_ends_the_same(tiny_run, tmp_path, monkeypatch):
    recipe, c = read_config(tiny_run), Experiment.quick()

    def sample(folder, resume=False):
        with Run.open(tmp_path / folder, "figure rejection", c, resume=resume, checkpoint_seconds=0) as run:
            path, counts = rejection.sample(run, c, 0, tiny_run, recipe)
        return path.read_text(), counts

    real, calls = rejection.play, []

    def solve_half(*words, **more):
        calls.append(len(words[2]))
        if len(calls) == 2:
            raise KeyboardInterrupt
        rollouts = real(*words, **more)
        for number, rollout in enumerate(rollouts):
            rollout.metrics["tests"] = float(number % 2)
        return rollouts

    monkeypatch.setattr(rejection, "play", solve_half)
    with pytest.raises(KeyboardInterrupt):
        sample("killed")
    resumed = sample("killed", resume=True)
    calls = [0] * 9
    assert resumed == sample("whole") and resumed[1]["solved"] > 0
