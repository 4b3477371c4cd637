"""Rounding is E4M3's, engines that agree are found to agree, one that does not is found out, and the rules of the
verdicts hold."""

import json

import numpy as np
import pytest
import torch

from recipe.small.fp8_rounding import fp8_rows
from ref import router_replay
from ref.engine.sampler import Sampler, Segment
from ref.formats import E4M3_MAX
from ref.network import Config, Transformer
from ref.router_replay import mismatch
from sims.router_replay import engines
from sims.router_replay import experiment as router_mismatch
from sims.router_replay.experiment import Experiment

SHAPE = Config(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    initializer_range=0.2,
)
WAYS = {"own": ("none", 0.0), "plain": ("plain", 0.0), "α=0": ("filtered", 0.0), "α=1": ("filtered", 1.0)}


def grid() -> torch.Tensor:
    """Every E4M3 number ≥ 0, in order, from its definition."""
    steps = torch.arange(8, dtype=torch.float64)
    normal = torch.cat([(1 + steps / 8) * 2.0**e for e in range(-6, 9)])
    return torch.cat((steps / 8 * 2.0**-6, normal))[:-1]  # the last would be NaN's code


def test_the_grid_is_kept_and_midpoints_go_to_even():
    values = grid().float()
    assert values[-1] == E4M3_MAX and len(values) == 127
    torch.testing.assert_close(
        fp8_rows(torch.cat((values, -values))[None])[0], torch.cat((values, -values)), rtol=0, atol=0
    )
    middle = (values[1:] + values[:-1]) / 2
    even = torch.where(torch.arange(126) % 2 == 0, values[:-1], values[1:])
    torch.testing.assert_close(fp8_rows(torch.cat((middle, values[-1:]))[None])[0, :-1], even, rtol=0, atol=0)
    assert fp8_rows(torch.tensor([[448.0, 17.0, 19.0, 0.0137]]))[0].tolist() == [448, 16, 20, 0.013671875]


def test_every_row_of_every_expert_has_its_own_scale():
    weight = torch.randn(3, 5, 40) * torch.logspace(-6, 6, 15).view(3, 5, 1)
    found = fp8_rows(weight)
    torch.testing.assert_close(found, torch.stack([fp8_rows(w) for w in weight]), rtol=0, atol=0)
    torch.testing.assert_close(fp8_rows(weight * 2**-7), found * 2**-7, rtol=0, atol=0)
    scale = weight.abs().amax(-1, keepdim=True) / E4M3_MAX
    assert ((found - weight).abs() <= torch.maximum(weight.abs() / 16, scale * 2**-10) * (1 + 1e-5)).all()
    assert fp8_rows(torch.zeros(2, 4)).abs().max() == 0
    # One scale for the whole tensor would have wiped out the small rows.
    assert (found[0, 0] != 0).any() and (fp8_rows(weight.view(1, -1)).view_as(weight)[0, 0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sampler_rounds_the_matrices_of_the_layers_and_nothing_else(dtype):
    first, second = Transformer(SHAPE), Transformer(SHAPE)
    plain, coarse = Sampler(first, dtype), Sampler(first, dtype, rounding=fp8_rows)
    for model in (first, second):
        plain.load(model, 1)
        coarse.load(model, 1) if model is second else None
        for (name, w), p, q in zip(
            model.named_parameters(), plain.model.parameters(), coarse.model.parameters(), strict=True
        ):
            rounded = name.startswith("layers.") and "norm" not in name
            assert torch.equal(p, w.to(dtype))
            assert torch.equal(q, fp8_rows(w).to(dtype) if rounded else w.to(dtype)), name
            assert rounded != torch.equal(p, q) or w.ndim == 1, name


def rollouts(model: Transformer, lengths=(9, 14, 11)) -> list[Segment]:
    """What a sampler would bring back that is the trainer itself; odd positions were sampled."""
    found = []
    for n in lengths:
        tokens = torch.randint(0, SHAPE.vocab_size, (n,))
        with torch.no_grad():
            out = model(tokens[None])
        logp = out.logits.log_softmax(-1)[0, :-1].gather(-1, tokens[1:, None])[:, 0]
        sampled = torch.arange(n) % 2 == 1
        experts = torch.stack(out.experts, 1)[:-1].to(torch.int16)
        behavior = torch.cat((torch.zeros(1), logp)) * sampled
        found.append(Segment(tokens, sampled, behavior, torch.zeros(n, dtype=torch.long), experts, True))
    return found


def test_an_engine_agrees_with_itself():
    model = Transformer(SHAPE)
    found = engines.compare(model, rollouts(model), WAYS)
    assert found["positions"].tolist() == [8, 13, 10] and found["rollout"].tolist() == [0] * 4 + [1] * 7 + [2] * 5
    assert not found["moved"].any() and not found["shares"].any() and not found["dropped"].any()
    assert all(np.abs(gap).max() < 1e-5 for gap in found["gap"].values())
    assert all(share == 0 and logp < 1e-5 for share, logp in found["unlike"].values())


def test_one_swapped_expert_is_counted_once():
    model = Transformer(SHAPE)
    some = rollouts(model)
    other = next(e for e in range(6) if e not in some[1].experts[6, 0].tolist())
    some[1].experts[6, 0, 0] = other
    found = engines.compare(model, some, WAYS)
    # Rollout 1 has 13 positions, 2 layers, 2 experts each; columns: decisions, routers by layer, tokens in the first 1,
    # 2 layers.
    assert found["shares"][1] == pytest.approx([1 / 52, 1 / 13, 0, 1 / 13, 1 / 13])
    assert not found["shares"][[0, 2]].any()
    # Position 6 predicts token 7, the fourth that rollout 1 sampled; the first rollout has four.
    assert found["moved"].nonzero()[0].tolist() == [4 + 3]
    assert np.abs(found["gap"]["own"]).max() < 1e-5
    changed = np.abs(found["gap"]["plain"]) > 1e-5
    assert changed[7] and not changed[:7].any() and not changed[11:].any()
    assert found["dropped"][1][[1, 2]].tolist() == [0, 0] and found["dropped"][1, 3] == pytest.approx(1 / 52)


def test_experts_of_the_wrong_position_are_found_out():
    model = Transformer(SHAPE)
    some = rollouts(model, (30, 30))
    for rollout in some:
        rollout.experts = rollout.experts.roll(1, 0)
    found = engines.compare(model, some, WAYS)
    assert found["shares"][:, 0].min() > 0.2 and found["moved"].mean() > 0.5
    assert np.abs(found["gap"]["plain"]).mean() > 100 * np.abs(found["gap"]["own"]).mean()


def test_statistics_by_hand():
    rollout, gap = np.array([0, 0, 1, 2, 2, 2]), np.array([0.1, -0.2, 0.0, 0.4, -0.1, 0.3])
    table = engines.by_rollout(gap, rollout)
    assert table.shape == (3, 3) and np.isnan(table).sum() == 3
    assert table[0, :2].tolist() == [0.1, -0.2] and table[1, 0] == 0 and table[2].tolist() == [0.4, -0.1, 0.3]
    right = mismatch(torch.zeros(6), torch.from_numpy(gap).float(), torch.ones(6, dtype=torch.bool))
    assert engines.p99(table) == pytest.approx(right["p99"], rel=1e-5)
    # log r = −gap: (r − 1) − log r.
    assert engines.k3(gap).tolist() == pytest.approx([np.exp(-g) - 1 + g for g in gap])
    assert engines.independent(np.array([0.1, 0.5])) == pytest.approx(1 - 0.9 * 0.5)
    assert engines.independent(np.array([0.05, 0.15]), 48) == pytest.approx(1 - 0.9**48)


def made(plain: float, filtered: float, routers: float, dropped: float = 0.01) -> list[dict]:
    """Rows of engines whose mismatch is `plain` and `filtered` times what it is without replay, where the filter takes
    so many experts."""
    c, rng = Experiment(alphas=(0.5, 1.0), resamples=100), np.random.default_rng(0)
    rollout, gap = np.repeat(np.arange(50), 20), rng.normal(0, 0.05, 1000)
    shares = np.full((50, 9), routers) + rng.normal(0, 1e-3, (50, 9))
    factor = {"own": 1.0, "plain": plain, "α=0": plain, "α=0.5": filtered, "α=1": 1.0}
    columns = {
        "rollout": rollout,
        "moved": rollout % 2 == 0,
        "shares": shares,
        "dropped": np.full((50, 5), dropped),
        "positions": np.full(50, 40),
    } | {f"gap {way}": gap * f for way, f in factor.items()}
    return [row for name in ("bf16", "fp8") for row in engines.rows_of_engine(c, name, columns, 48)]


@pytest.mark.parametrize(
    "plain, filtered, routers, expected",
    [
        (0.3, 0.2, 0.1, ("reproduced", "not at this scale", "reproduced", "reproduced")),
        (0.9, 0.9, 0.02, ("not at this scale", "not at this scale", "not at this scale", "not at this scale")),
        (
            1.2,
            1.3,
            0.95,
            ("partly", "reproduced", "contradicted", "contradicted"),
        ),  # nine tenths are not about one tenth
    ],
)
def test_rules_of_the_verdicts(plain, filtered, routers, expected):
    rows = made(plain, filtered, routers)
    found = {c["name"]: c for c in router_mismatch.verdicts(Experiment(alphas=(0.5, 1.0)), rows, 4)}
    assert tuple(found[f"{name}-fp8"]["verdict"] for name in ("decisions", "tokens", "replay", "filter")) == expected
    # Every statistic scales as it must: KL as the square, p99 in proportion.
    row = next(row for row in rows if row.get("way") == "plain")
    assert row["k3_ratio"] == pytest.approx(plain**2, rel=0.02) and row["p99_ratio"] == pytest.approx(plain)
    assert found["filter-fp8"]["measured"] == pytest.approx(filtered / plain)


@pytest.mark.parametrize(
    "wrong", [lambda alpha: alpha**2, lambda alpha: 0.9 * alpha, lambda alpha: min(1.0, 1.2 * alpha)]
)
def test_the_filter_s_law_sees_a_wrong_threshold(monkeypatch, wrong):
    """The laws at α = 0 and α = 1 hold for all of these."""
    assert router_mismatch.threshold_law(Experiment())["verdict"] == "holds"
    right = router_replay.replay
    monkeypatch.setattr(
        router_replay, "replay", lambda scores, replayed, k, alpha: right(scores, replayed, k, wrong(alpha))
    )
    assert router_mismatch.threshold_law(Experiment())["verdict"] == "broken"


def test_a_quick_run(tmp_path, play_figure):
    record = play_figure("router-mismatch", tmp_path)
    verdicts = {claim["name"]: claim["verdict"] for claim in record["claims"]}
    assert verdicts["alpha-0"] == verdicts["alpha-1"] == verdicts["filter-threshold"] == "holds"
    rl = {
        arm: [r["mismatch"] for r in record["rows"] if r["part"] == "rl" and r["arm"] == arm]
        for arm in router_mismatch.ARMS
    }
    assert {r["seed"] for r in record["rows"] if r["part"] == "rl"} == {0, 1}
    assert all((r["dropped"] is not None) == (r["arm"] == "filtered") for r in record["rows"] if r["part"] == "rl")
    # An exact sampler in the trainer's own dtype differs by the order of sums, one with 8-bit weights by its rounding.
    assert max(rl["exact"]) < 1e-4 < min(rl["none"]) and len(rl["none"]) == 4
    # Arms of one seed see the same tasks, seeds do not: a step is compared with its like.
    assert all(plain < none for plain, none in zip(rl["plain"], rl["none"], strict=True))
    assert {row["engine"] for row in record["rows"] if row["part"] == "routing"} == {"bf16", "fp8", "recipe"}
    assert (tmp_path / "router-mismatch.png").stat().st_size > 20_000
    assert json.loads((tmp_path / "router-mismatch.json").read_text())["quick"]


def arms_of(p99: dict[str, list[float]], dropped: float, success=(0.55, 0.55)) -> dict[str, list[dict]]:
    """Trainings of five steps each, arm by arm; success of those with the exact sampler, and of all others."""
    return {
        arm: [
            {
                "success": [success[arm != "exact"] + 0.001 * n, 0.5],
                "greedy": [1.0, 0.0],
                "steps": [{"mismatch": x, "mismatch_p99": x, "outside_clip": 0.0, "grad_norm": 0.1, "dropped": dropped}]
                * 5,
            }
            for n, x in enumerate(some)
        ]
        for arm, some in p99.items()
    }


def decided(p99: dict[str, list[float]], dropped: float = 0.01, **more) -> dict[str, dict]:
    return {
        c["name"]: c for c in router_mismatch.rl_verdicts(Experiment(steps=5, seeds=3), arms_of(p99, dropped, **more))
    }


LOWER = {"exact": [0.001] * 3, "none": [0.5, 0.5, 0.5], "plain": [0.3, 0.31, 0.29], "filtered": [0.27, 0.29, 0.25]}


def test_trainings_are_what_the_intervals_are_over():
    """Five steps of one training say no more than one; of three trainings that agree the interval is narrow, of three
    that do not it is wide."""
    claims = decided(LOWER)
    assert {claims[name]["verdict"] for name in ("rl-mismatch", "rl-p99", "rl-filter")} == {"reproduced"}
    each = np.array([0.6, 0.62, 0.58])
    half = 4.302653 * each.std(ddof=1) / 3**0.5
    assert claims["rl-p99"]["measured"] == pytest.approx(0.6) and claims["rl-p99"]["interval"] == pytest.approx(
        [0.6 - half, 0.6 + half]
    )
    apart = decided(LOWER | {"plain": [0.3, 0.7, 0.4]})
    assert apart["rl-mismatch"]["verdict"] == "not at this scale" and apart["rl-mismatch"]["measured"] == pytest.approx(
        14 / 15
    )
    assert decided(LOWER | {"plain": [0.6, 0.61, 0.62]})["rl-p99"]["verdict"] == "contradicted"


def test_a_filter_that_drops_nothing_has_lowered_nothing():
    """Arms that differ by chance: what the filter dropped in these very trainings decides whether it can have done
    anything."""
    idle = decided(LOWER, dropped=0.0)["rl-filter"]
    assert (
        idle["verdict"] == "not tested"
        and idle["measured"] is None
        and "what the arms differ by is chance" in idle["note"]
    )
    assert "dropped 1%" in decided(LOWER)["rl-filter"]["note"]
    still = {
        c["name"]: c
        for c in router_mismatch.verdicts(Experiment(alphas=(0.5, 1.0)), made(0.5, 0.4, 0.1, dropped=0.0), 4)
    }
    assert still["filter-fp8"]["verdict"] == "not tested" and still["filter-fp8"]["measured"] is None


def test_where_there_is_no_harm_there_is_none_to_prevent():
    assert decided(LOWER)["rl-stable"]["verdict"] == "not tested"
    harmful = decided(LOWER, success=(0.75, 0.55))["rl-stable"]
    assert harmful["verdict"] == "not at this scale" and harmful["measured"] == pytest.approx(
        0
    )  # there is, and replay prevents none of it
