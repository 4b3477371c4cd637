"""Figure 2: lines and their intervals by hand, verdicts on made-up trainings, what trainings share, and a death in the
middle."""

import itertools
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kit import trends
from kit.runs import Run
from kit.settings import fill
from kit.statistics import bootstrap
from recipe.microrepo import documents, generate
from recipe.small import stages as recipe
from recipe.small.agent import Language, one_row
from recipe.small.data import task_stream
from recipe.small.demonstrations import make_chaining, taught
from recipe.small.settings import Memory, Sft
from ref import cpt
from ref.network import Config, Transformer
from sims.cpt_rl import budgets
from sims.cpt_rl import experiment as cpt_rl
from sims.cpt_rl.experiment import Experiment
from sims.policies import SMOKE

BUDGETS = (1000, 10_000, 100_000, 1_000_000)
ONE_SEED = replace(Experiment.quick(), seeds=1)
MADE_UP = Experiment(budgets=BUDGETS, seeds=3, steps=4, last=2, resamples=200)


# ------------------------------------------------------------------------------------------------- statistics


def test_line_by_hand():
    assert trends.line(np.array([0.0, 1.0, 2.0]), np.array([1.0, 3.0, 2.0])) == pytest.approx((0.5, 1.5, 0.5))
    assert trends.line(np.array([0.0, 1.0]), np.array([2.0, 2.0])) == (0, 2, 0)
    assert trends.line(np.array([1.0, 1.0]), np.array([0.0, 2.0])) == (0, 1, 0)


def test_curvature_is_that_of_the_parabola_wherever_it_lies():
    x = np.array([10.0, 11, 13, 17])
    assert trends.curvature(x, 3 - 2 * x + 0.25 * x**2) == pytest.approx(0.25)


def test_every_token_weighs_the_same():
    nll = np.array([[[2.0, 1], [4, 3]], [[0, 5], [1, 5]]])
    assert trends.loss_of(nll).tolist() == [6 / 4, 1 / 10]  # not the mean of 2 and 4/3


def test_draws_hold_three_budgets_and_are_otherwise_fair():
    rng, at = np.random.default_rng(0), np.repeat([1, 2, 3], 2)
    drawn = np.array([trends.draw(rng, at) for _ in range(3000)])
    assert all(len(np.unique(at[some])) == 3 for some in drawn)
    np.testing.assert_allclose(np.bincount(drawn.flatten()) / drawn.size, 1 / 6, atol=0.01)


def made_nll(loss, tasks: int = 5) -> np.ndarray:
    """[trainings, tasks, (nats, tokens)] with these losses in every task."""
    return np.stack([np.array([[value * n, n] for n in range(1, tasks + 1)]) for value in loss])


def test_a_line_without_noise_has_no_interval():
    at, loss = np.repeat([1, 2, 3], 2), np.array([3.0, 2.9, 2.0, 2.2, 1.1, 1.0])
    got = trends.predicts(at, made_nll(loss), np.repeat((1 - 0.25 * loss)[:, None], 4, 1), 50, 0)
    assert (got["slope"], got["intercept"], got["r"]) == pytest.approx((-0.25, 1, -1))
    assert got["slope_over_seeds"] + got["slope_over_tasks"] == pytest.approx([-0.25] * 4)
    assert got["inside_slope"] == pytest.approx(-0.25)


def test_the_claim_is_between_budgets():
    """Within a budget a lower loss goes with less success, between budgets with more: the second is asked for, a seed
    at a time."""
    at, loss = np.repeat([1, 2, 3], 2), np.array([3.1, 2.9, 2.1, 1.9, 1.1, 0.9])
    outcome = np.array([0.1, -0.1, 0.1, -0.1, 0.1, -0.1]) + np.repeat([0, 0.5, 1], 2)
    got = trends.predicts(at, made_nll(loss), outcome[:, None], 20, 0)
    assert got["slope"] == pytest.approx(-0.5) and got["slope_over_seeds"] == pytest.approx([-0.5, -0.5])
    assert got["inside_slope"] == pytest.approx(1) and got["inside_r"] == pytest.approx(1)


def test_what_happens_within_budgets_decides_nothing():
    """Trainings of one budget differ widely, and the better ones have the lower loss; the budgets' own means do not
    move with it."""
    at, luck = np.repeat([1, 2, 3], 3), np.tile([0.3, 0.0, -0.3], 3)
    loss = np.repeat([2.02, 2.0, 1.98], 3) + luck
    outcome = (0.5 - luck + np.tile([0.02, -0.01, 0.0], 3) * np.repeat([1, 0, -1], 3))[:, None]
    got = trends.predicts(at, made_nll(loss), outcome, 20, 0)
    assert trends.line(loss, outcome[:, 0])[0] == pytest.approx(-1, abs=0.02)  # all trainings in one heap would say so
    low, high = got["slope_over_seeds"]
    assert low < 0 < high


def test_seeds_and_tasks_have_intervals_of_their_own():
    rng, at, loss = np.random.default_rng(0), np.repeat([1, 2, 3], 3), np.repeat([3.0, 2.0, 1.0], 3)
    gain = rng.normal(0.3, 1, 30)  # some tasks gain from a lower loss, others lose, in every training alike
    got = trends.predicts(at, made_nll(loss), 1 - (loss[:, None] - 2) * gain, 1000, 0)
    low, high = got["slope_over_seeds"]
    assert high - low < 1e-9  # the seeds agree
    alone = bootstrap(-gain, n=1000)
    assert got["slope_over_tasks"] == pytest.approx([alone["low"], alone["high"]], abs=0.06)
    tilted = 1 - (loss - 2) * np.tile([0.1, 0.2, 0.6], 3)
    got = trends.predicts(at, made_nll(loss), tilted[:, None], 5, 0)
    assert [got[f"slope_{n}"] for n in range(3)] == pytest.approx([-0.1, -0.2, -0.6]) and got["slope_over_seeds"][1] > 0
    assert (
        trends.predicts(at[::3], made_nll(loss[::3]), tilted[::3, None], 5, 0)["slope_over_seeds"] is None
    )  # one seed


def test_log_line_and_power_law_are_told_apart():
    at = np.repeat(BUDGETS, 2)
    tokens = [np.array([b]) for b in at]
    straight = trends.falls(at, tokens, [8 - 0.3 * np.log(t) for t in tokens], 50, 0)
    assert (straight["slope"], straight["intercept"], straight["r2"]) == pytest.approx((-0.3, 8, 1))
    assert straight["slope_over_runs"] == pytest.approx([-0.3, -0.3]) and straight["curvature"] == pytest.approx(
        0, abs=1e-9
    )
    assert straight["r2_power_law"] < 0.999
    power = trends.falls(at, tokens, [9 * t**-0.3 for t in tokens], 50, 0)
    assert power["r2_power_law"] == pytest.approx(1) and power["r2"] < 0.95 and power["curvature_over_runs"][0] > 0


def test_curves_count_with_all_their_points():
    at, tokens = np.array([1, 2, 3]), [np.array([1.0]), np.array([1.0, np.e]), np.array([1.0, np.e, np.e**2])]
    loss = [np.array([3.0]), np.array([3.0, 1.0]), np.array([3.0, 1.0, 2.0])]
    x, y = np.array([0, 0, 1, 0, 1, 2]), np.array([3, 3, 1, 3, 1, 2])
    dx = x - x.mean()
    found = trends.falls(at, tokens, loss, 5, 0)
    assert found["slope"] == pytest.approx(dx @ y / (dx @ dx))
    assert (
        found["slope_over_runs"] is None and found["curvature_over_runs"] is None
    )  # all draws would be the same three runs
    assert trends.falls(np.append(at, 4), [*tokens, tokens[1]], [*loss, loss[1]], 5, 0)["slope_over_runs"] is not None


def test_steps_are_paired_and_a_test_that_is_not_would_be_found_out():
    rng = np.random.default_rng(0)
    hard, luck = rng.random(40), rng.normal(0, 0.2, (3, 1))
    outcome = np.array([0.0, 0.1, 0.05])[:, None, None] + luck + hard
    first, second, ends = trends.orders(outcome, 300, 0)
    for step, value in ((first, 0.1), (second, -0.05), (ends, 0.05)):
        assert [step["value"], step["low"], step["high"]] == pytest.approx([value] * 3)
    mixed = np.stack([rng.permutation(one.T).T for one in outcome])  # every budget has its tasks in another order
    assert trends.orders(mixed, 300, 0)[0]["high"] - trends.orders(mixed, 300, 0)[0]["low"] > 0.1


# --------------------------------------------------------------------------------------------------- verdicts


def made_up(loss=lambda b: 8 - 0.3 * np.log(b), success=lambda b: 0.1 * np.log10(b), reward=None, seed=0) -> list[dict]:
    """Trainings as `sims.cpt_rl.budgets.training` returns them, with laws of the budget and a little noise."""
    rng, found = np.random.default_rng(seed), []
    hard = rng.normal(0, 0.2, 60)
    hard -= hard.mean()
    for budget, number in itertools.product(BUDGETS, range(3)):
        played = {
            "nll": made_nll([loss(budget) / 4 + rng.normal(0, 0.003)])[0].tolist(),
            "best": 1.0,
            "greedy": 0.5,
            "turns": 4.0,
            "finished": 1.0,
        }
        last = (reward or success)(budget)
        found.append(
            {
                "budget": budget,
                "seed": number,
                "tokens": budget - 1,
                "codebase_loss": loss(budget) + rng.normal(0, 0.01),
                "codebase_bpb": 2.0,
                "kl": 0.1,
                "reward": [0.0, 0.0, last, last + rng.normal(0, 0.01)],
                "sft": played | {"success": [0.2] * 60},
                "final": played | {"success": (success(budget) + hard).tolist()},
                "looks": [
                    {"phase": "cpt", "tokens": t, "ppl": float(np.exp(loss(t))), "lr": 1.0}
                    for t in (budget / 4, budget / 2)
                ]
                + [
                    {"phase": "cpt", "tokens": 1, "ppl": 1e9, "lr": 0.5},
                    {"phase": "long", "tokens": budget, "ppl": 1e9, "lr": 1.0},
                ],
            }
        )
    return found


def decided(found: list[dict]) -> dict[str, dict]:
    fits = cpt_rl.fitted(found, MADE_UP)
    json.dumps(fits)
    return {c["name"]: c for c in cpt_rl.verdicts([cpt_rl.row(f, MADE_UP) for f in found], fits, MADE_UP)}


def test_a_world_as_in_the_figure():
    """Looks off the full learning rate are outliers here: counted, they would spoil the fit along training."""
    claims = decided(made_up())
    assert {c["verdict"] for c in claims.values()} == {"reproduced"} and len(claims) == 7
    assert claims["codebase-loss"]["measured"] == pytest.approx(-0.3 * np.log(10), abs=0.01)
    assert claims["codebase-loss-along"]["measured"] == pytest.approx(-0.3 * np.log(10), rel=1e-6)
    # A tenfold budget takes 0.3·ln 10/4 nats a token and gives 0.1 of success.
    assert claims["loss-success"]["measured"] == pytest.approx(-0.1 / (0.075 * np.log(10)), rel=0.05)
    assert (
        claims["budget-order"]["measured"] == pytest.approx(0.1) and "no success" not in claims["budget-order"]["note"]
    )
    # … 0.3·ln 10 nats of the codebase.
    assert claims["perplexity-success"]["measured"] == pytest.approx(-0.1 / (0.3 * np.log(10)), rel=0.02)
    assert (
        "correlation of the budgets' means -1.000, with the loss after SFT -1.000"
        in claims["perplexity-reward"]["note"]
    )


def test_a_world_without_any_of_it():
    claims = decided(made_up(loss=lambda b: 5 + 0.1 * np.log(b), success=lambda b: 0.1 * np.log10(b) - 0.25))
    assert {claims[name]["verdict"] for name in ("codebase-loss", "loss-success", "perplexity-success")} == {
        "contradicted"
    }
    assert (
        claims["budget-order"]["verdict"] == "reproduced"
    )  # success still rises with the budget, only not with the loss
    assert "RL adds no success at 1,000, 10,000 tokens" in claims["budget-order"]["note"]


def test_a_fall_that_ends_is_partly():
    claims = decided(made_up(loss=lambda b: 4 + 40 * b**-0.5))
    assert claims["codebase-loss"]["verdict"] == claims["codebase-loss-along"]["verdict"] == "partly"
    assert "the fall slows down" in claims["codebase-loss"]["note"]


def test_one_budget_out_of_order_is_no_order():
    dip = {1000: 0.3, 10_000: 0.5, 100_000: 0.45, 1_000_000: 0.6}
    claim = decided(made_up(success=dip.get))["budget-order"]
    assert (
        claim["verdict"] == "contradicted"
        and claim["measured"] == pytest.approx(-0.05)
        and "10,000 → 100,000" in claim["note"]
    )
    assert decided(made_up(reward=dip.get))["budget-order"]["verdict"] == "partly"
    assert decided(made_up(success=lambda b: -0.01 * np.log10(b)))["budget-order"]["verdict"] == "contradicted"


def test_noise_is_not_taken_for_foresight():
    rng = np.random.default_rng(1)
    claim = decided(made_up(success=lambda b: rng.normal(0.5, 0.1)))["loss-success"]
    assert claim["verdict"] != "reproduced" and claim["interval"][0] < 0 < claim["interval"][1]


def test_perplexity_of_a_single_seed_decides_nothing():
    """Nor do trainings of one budget count, however much they differ: slopes are those between the budgets of a
    seed."""
    rows = [cpt_rl.row(f, MADE_UP) for f in made_up()]
    alone = cpt_rl.perplexity_foretells([row for row in rows if row["seed"] == 0])
    assert {one["verdict"] for one in alone} == {"not tested"}
    shifted = [
        row
        | {"success_after": row["success_after"] + row["seed"], "codebase_loss": row["codebase_loss"] + 5 * row["seed"]}
        for row in rows
    ]
    for before, after in zip(cpt_rl.perplexity_foretells(rows), cpt_rl.perplexity_foretells(shifted), strict=True):
        assert after["measured"] == pytest.approx(before["measured"]) and after["interval"] == pytest.approx(
            before["interval"]
        )


@pytest.mark.parametrize("wrong", [{"budgets": (1, 2)}, {"budgets": (1, 3, 2)}, {"seeds": 0}, {"steps": 5, "last": 6}])
def test_settings_that_decide_nothing_are_refused(wrong):
    with pytest.raises(ValueError):
        replace(Experiment(), **wrong)


# -------------------------------------------------------------------------------------------------- trainings


@pytest.fixture(scope="module")
def language():
    return Language(cpt.train_tokenizer(itertools.islice(documents(random.Random(0)), 100), 400))


def test_loss_of_demonstrations_is_that_of_the_agents_own_tokens(language):
    """Against each context of each demonstration by itself, from all logits; the whole text's loss is another
    number."""
    model = Transformer(
        replace(Config.tiny(), vocab_size=400, hidden_size=32, num_hidden_layers=1, moe_intermediate_size=16)
    )
    rng, how = random.Random(1), make_chaining(language, 120, 60, 100)
    tasks = [generate(rng, "heldout", depth) for depth in (0, 2, 1)]
    chains = [one.chain for one in taught(tasks, language, how, Sft().noise, Memory(), rng)]
    assert len(chains) == 3 and max(len(chain.segments) for chain in chains) > 1
    got, everything = budgets.demonstration_nll(model, chains, batch=2), []
    for (nats, count), chain in zip(got, chains, strict=True):
        agents, written, whole = 0.0, 0, 0.0
        for segment in chain.segments:
            ids, own = segment.tokens.tolist(), segment.sampled.tolist()
            with torch.no_grad():
                logp = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
            each = [-logp[t - 1, ids[t]].item() for t in range(1, len(ids))]
            agents += sum(value for value, mine in zip(each, own[1:], strict=True) if mine)
            written, whole = written + sum(own[1:]), whole + sum(each)
        assert count == written and nats == pytest.approx(agents, rel=1e-4)
        everything.append(whole)
    assert np.abs(np.array(got)[:, 0] - everything).min() > 1


def test_held_out_is_held_out(language):
    c = Experiment(demonstrations=20, tasks=30)
    config = fill(recipe.Recipe, SMOKE)  # contexts for a tokenizer of 400
    first, last = (replace(config, seed=seed) for seed in (0, 2))
    shown, tasks = budgets.heldout(c, first, language)
    again, others = budgets.heldout(c, last, language)  # every training is measured on the same
    assert others == tasks
    assert [one_row(one.chain).tokens.tolist() for one in again] == [
        one_row(one.chain).tokens.tolist() for one in shown
    ]
    keys = [task.key for task in [*(one.task for one in shown), *tasks]]
    assert len(keys) == len(set(keys)) == 50
    wanted = {
        task.files[name].expr
        for task in [*(one.task for one in shown), *tasks]
        for name in (task.target, *task.helpers)
    }
    for use in ("rl", "demonstrations"):
        trained = {
            module.expr for task in itertools.islice(task_stream(last, use), 300) for module in task.files.values()
        }
        assert len(trained) > 300 and not wanted & trained


def test_trainings_differ_in_budget_and_seed_alone():
    c = Experiment()
    one, two = budgets.settings(c, c.budgets[0], 1), budgets.settings(c, c.budgets[-1], 2)
    assert two.training.tokens + two.training.long_tokens == c.budgets[-1] and (one.seed, two.seed) == (1, 2)
    assert two.training.long_tokens / two.training.tokens == pytest.approx(0.3, rel=1e-3)  # as in the recipe
    same = replace(
        two.training,
        tokens=one.training.tokens,
        long_tokens=one.training.long_tokens,
        perplexity_every=one.training.perplexity_every,
    )
    assert replace(two, seed=1, training=same) == one
    assert two == replace(recipe.Recipe(), seed=2, training=two.training, rl=two.rl, evaluation=two.evaluation)


def test_every_training_finds_its_place(tmp_path, monkeypatch):
    """The whole experiment over made-up trainings, each asked for once, budgets outermost."""
    found = {(f["budget"], f["seed"]): f for f in made_up()}
    monkeypatch.setattr(cpt_rl, "data", lambda run, config: None)
    monkeypatch.setattr(cpt_rl, "training", lambda run, c, corpus, budget, number: found[budget, number])
    with Run.open(tmp_path / "run", "figure cpt-rl", MADE_UP) as run:
        record = cpt_rl.experiment(run, MADE_UP)
    rows = [row for row in record["rows"] if row["part"] == "training"]
    assert [(row["budget"], row["seed"]) for row in rows] == list(itertools.product(BUDGETS, range(3))) == list(found)
    for row in rows:
        one = found[row["budget"], row["seed"]]
        assert (row["reward_last"], row["reward_first"]) == pytest.approx((np.mean(one["reward"][2:]), 0))
        assert (row["success_before"], row["success_after"]) == pytest.approx((0.2, 0.1 * np.log10(row["budget"])))
    steps = [row for row in record["rows"] if row["part"] == "step"]
    assert [row["value"] for row in steps] == pytest.approx([0.1, 0.1, 0.1, 0.3]) and steps[-1][
        "name"
    ] == "1,000 → 1,000,000"
    cpt_rl.picture(record | {"config": {"last": MADE_UP.last}}, tmp_path / "cpt-rl.png")
    assert (tmp_path / "cpt-rl.png").stat().st_size > 20_000


@pytest.fixture(scope="module")
def played(play_figure, tmp_path_factory):
    """The quick experiment with one seed."""
    out = tmp_path_factory.mktemp("cpt-rl")
    return out, play_figure("cpt-rl", out, "seeds=1")


def test_rows_of_a_quick_run(played):
    out, record = played
    c, rows = ONE_SEED, {p: [r for r in record["rows"] if r["part"] == p] for p in ("training", "look", "fit", "step")}
    assert [(r["budget"], r["seed"]) for r in rows["training"]] == list(itertools.product(c.budgets, range(c.seeds)))
    assert [r["name"] for r in rows["fit"]] == ["after", "along", "success", "reward"] and len(rows["step"]) == 3
    for row in rows["training"]:
        looks = [r for r in rows["look"] if (r["budget"], r["seed"]) == (row["budget"], row["seed"])]
        tokens = [r["tokens"] for r in looks]
        assert len(looks) >= c.looks and tokens == sorted(tokens) and tokens[-1] == row["tokens"] <= 1.1 * row["budget"]
        assert row["codebase_ppl"] == pytest.approx(np.exp(row["codebase_loss"])) and 0 < row["sft_loss"] < 7
    assert len(record["claims"]) == 7 and (out / "cpt-rl.png").stat().st_size > 20_000
    assert len((out / "cpt-rl.csv").read_text().splitlines()) == len(record["rows"]) + 1


def test_a_smaller_budget_reads_the_beginning_of_a_larger_one(played, tmp_path):
    out, _ = played
    with Run.open(tmp_path / "run", "recipe", budgets.settings(ONE_SEED, 4096, 1)) as run:
        budgets.cut(run, out / "corpus", run.config)

    def rows(root: Path, phase: str) -> np.ndarray:
        with np.load(root / "data" / f"{phase}.npz") as packed:
            return packed["ids"]

    for phase in ("short", "long"):
        small, large, other = (
            rows(root, phase) for root in (out / "runs/4096-0", out / "runs/16384-0", tmp_path / "run")
        )
        assert len(large) >= 4 * len(small) - 4 and (large[: len(small)] == small).all()
        assert other.shape == small.shape and (other != small).any()


def test_a_dead_training_goes_on_to_the_same_end(played, tmp_path):
    """It died before the end of RL."""
    out, _ = played
    root = tmp_path / "run"
    shutil.copytree(out, root)
    before = json.loads((root / "stages" / "8192-0.json").read_text())["result"]
    for path in ("stages/8192-0.json", *(f"runs/8192-0/stages/{name}.json" for name in ("rl", "measure"))):
        (root / path).unlink()
    shutil.rmtree(root / "runs/8192-0/checkpoints/final")
    with Run.open(root, "figure cpt-rl", ONE_SEED, resume=True) as run:
        assert budgets.training(run, ONE_SEED, root / "corpus", 8192, 0) == before


def test_mtp_layers_would_change_nothing_in_the_trunk(played, tmp_path):
    out, _ = played
    root, config = tmp_path / "run", budgets.settings(ONE_SEED, 4096, 0)
    shutil.copytree(out / "runs/4096-0", root)
    without = load_file(root / "checkpoints/cpt/model.safetensors")
    for name in ("long", "sft", "rl", "measure"):
        (root / "stages" / f"{name}.json").unlink()
    with Run.open(root, "recipe", config, resume=True) as run:
        recipe.distil(run, config)
        recipe.lengthen(run, config)
    assert (root / "checkpoints/cpt/mtp/model.safetensors").exists()
    trunk, start = (load_file(root / f"checkpoints/{name}/model.safetensors") for name in ("cpt", "mid-cpt"))
    assert trunk.keys() == without.keys() and all(torch.equal(trunk[name], without[name]) for name in trunk)
    assert not all(torch.equal(trunk[name], start[name]) for name in trunk)
