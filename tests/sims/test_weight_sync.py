"""The experiment on weight sync: what it measures by hand, its rules, and one training run of a tiny agent."""

from dataclasses import replace

import pytest
import torch

from kit.runs import Run
from ref.network import Config, Transformer
from sims.policies import read_config
from sims.weight_sync import experiment as weight_sync
from sims.weight_sync.experiment import Experiment, experiment, learner_of, picture, sizes, summary, training, verdicts


def test_sizes_by_hand():
    """Four of a thousand weights change by one step: entropy 1000·H(0.004) bits for where, and none for how far."""
    old = torch.linspace(1, 1.9, 1000).bfloat16()
    new = old.clone()
    new.view(torch.int16)[[3, 500, 501, 900]] += 1
    found = sizes(old, new)
    assert found["weights"] == 1000 and found["changed"] == 4 and found["ones"] == 1
    assert found["entropy"] == pytest.approx((4 * 7.965784 + 996 * 0.005782) / 8, rel=1e-3)
    assert found["index"] < 50 and found["xor"] < 60
    none = sizes(old, old)
    assert none["changed"] == none["entropy"] == 0 and none["ones"] == 1


def test_updates_of_muon_have_the_size_of_adamws(tiny_run):
    """The root mean square of an update is lr, whatever the shape, as far as five iterations orthogonalise (0.7 to 1.2
    of it)."""
    recipe = read_config(tiny_run)
    recipe = replace(recipe, training=replace(recipe.training, optimizer="muon"))
    learner = learner_of(Experiment(), recipe, Transformer(recipe.model), "muon", 1e-3)
    before = [p.detach().clone() for p in learner.trunk.masters.parameters()]
    for p in learner.trunk.masters.parameters():
        p.grad = torch.randn_like(p)
    for optimizer in learner.optimizers:
        optimizer.step()
    sizes = [
        (p - q).square().mean().sqrt().item() for p, q in zip(learner.trunk.masters.parameters(), before) if p.ndim > 1
    ]
    assert all(0.6e-3 < size < 1.3e-3 for size in sizes)


def made(c: Experiment, **changes) -> list[dict]:
    """Steps of every training run, each with 1% of a thousand weights changed."""
    rows = []
    for arm, lr in c.arms:
        for seed in range(c.seeds):
            for version in range(1, c.steps + 1):
                row = {
                    "arm": arm,
                    "lr": lr,
                    "seed": seed,
                    "version": version,
                    "weights": 1000,
                    "changed": 10 + seed % 2,
                    "ones": 1.0,
                }
                row |= {
                    "xor": 40,
                    "index": 80,
                    "entropy": 15,
                    "law": (10 + seed % 2) / 1000,
                    "update": lr,
                    "delta": 17,
                    "anchor": 1500,
                }
                rows.append(row | {"merged": 60 if version % 8 == 0 else None, "exact": 1.0} | changes)
    return rows


def decided(c: Experiment, rows: list[dict]) -> dict[str, str]:
    table = [summary(some) for arm in c.arms for some in weight_sync.of_arm(rows, c, arm)]
    return {claim["name"]: claim["verdict"] for claim in verdicts(c, rows, table)}


def test_rules():
    c = Experiment()
    fine = decided(c, made(c))
    assert set(fine.values()) == {"reproduced", "holds"}
    assert decided(c, made(c, changed=30))["unchanged"] == "contradicted"
    assert decided(c, made(c, delta=100))["fiftieth"] == "contradicted"
    assert decided(c, made(c, law=0.02))["law"] == "broken"
    assert decided(c, made(c, xor=20))["xor"] == "contradicted"
    rows = made(c)
    rows[7]["exact"] = 0.0
    assert decided(c, rows)["chain"] == "broken"
    short = replace(c, steps=16)
    assert decided(short, made(short))["chain"] == "holds", (
        "a law needs no size: a short run with --quick would be an error"
    )
    others = made(c)
    for row in others:
        row["xor"] = 20 if row["lr"] == 1e-4 else 40
    assert decided(c, others)["xor"] == "partly"


def test_summary_by_hand():
    c = Experiment()
    found = summary(made(c)[:20])
    assert (
        found["unchanged"] == 0.99
        and found["delta_bits"] == pytest.approx(8 * 17 / 10)
        and found["delta_times"] == pytest.approx(2000 / 17)
    )
    assert (
        found["merged"] == pytest.approx(8 * 17 / 60)
        and found["of_xor"] == pytest.approx(17 / 40)
        and found["other_bits"] == 0
    )


def test_a_training_run_of_a_tiny_agent(tiny_run, tmp_path):
    """Every version is the trainer's, bit for bit; the law says how many weights change; a finished run is not played
    again."""
    c = Experiment(run=str(tiny_run), lrs=(1e-5,), muon=(), steps=8, prompts=2, rollouts=2, seeds=2)
    recipe = read_config(tiny_run)
    with Run.open(tmp_path / "run", "figure weight-sync", c) as run:
        rows = training(run, c, tiny_run, recipe, ("adamw", 1e-5), 0)
        assert [row["version"] for row in rows] == list(range(1, 9)) and all(row["exact"] for row in rows)
        assert rows[7]["merged"] and not rows[6]["merged"]
        moved = [row for row in rows if row["changed"]]
        assert moved and all(row["delta"] < row["xor"] + 100 for row in rows)
        assert training(run, c, tiny_run, recipe, ("adamw", 1e-5), 0) == rows
        other = training(run, c, tiny_run, recipe, ("adamw", 1e-5), 1)
        assert [row["changed"] for row in other] != [row["changed"] for row in rows]
        found = experiment(run, c)
    assert {claim["name"] for claim in found["claims"]} == {
        "unchanged",
        "fiftieth",
        "bits",
        "xor",
        "merged",
        "law",
        "chain",
    }
    picture(found, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.mark.parametrize("wrong", [dict(seeds=1), dict(steps=4), dict(lrs=())])
def test_bad_settings(wrong):
    with pytest.raises(ValueError, match="seeds must be at least 2"):
        Experiment(**wrong)


def test_a_network_is_flat_in_the_order_of_its_parts():
    model = Transformer(Config.tiny(40))
    assert len(weight_sync.flat(model)) == sum(p.numel() for p in model.parameters())
