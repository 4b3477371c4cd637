"""The pages of low precision, packing, Muon and continued pretraining: what they show against `ref` called directly and
against figures by hand."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.explorer import provenance
from etude.explorer.pages import cpt as cpt_page
from etude.explorer.pages import low_precision, muon, packing, pretraining
from etude.explorer.pages.number_formats import FORMS, LAYOUTS, fields, grid, near, reading, value, verdict, way
from etude.explorer.pages.packed_rows import mask, pairs, place_sequences, seen_by_strangers
from ref import cpt, quant
from ref import packing as dealing
from ref.muon import COEFFICIENTS
from tests.app.test_runs import played, runs  # noqa: F401 – a fixture


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    """Where no run lies."""
    monkeypatch.chdir(tmp_path)


def shown(at):
    return {metric.label: metric.value for metric in at.metric}


# --------------------------------------------------------------------------------------------- low precision


@pytest.mark.parametrize("layout", ["bfloat16", "E4M3", "E2M1", "E8M0"])
def test_bits_mean_what_the_format_says(layout):
    """Sign, exponent and mantissa of every code, read as the standards define them, give the value that `ref`
    decodes."""
    shape = LAYOUTS[layout]
    for code in range(0, 1 << shape.bits, 37 if layout == "bfloat16" else 1):
        known = value(layout, code)
        if not math.isfinite(known):
            assert "2" not in reading(layout, code)
            continue
        sign, exponent, share = (int(bits or "0", 2) for bits in fields(layout, code))
        normal = exponent > 0 or not shape.mantissa
        power = (exponent if normal else 1) - shape.bias
        assert known == (-1) ** sign * math.ldexp(normal + share / 2**shape.mantissa, power)
        assert ("subnormal" in reading(layout, code)) is not normal


@given(
    st.floats(width=32),
    st.sampled_from(sorted(FORMS)),
    st.sampled_from(low_precision.COMPANIONS),
    st.sampled_from(low_precision.COMPANIONS),
)
@settings(max_examples=80)
def test_what_comes_back_is_the_nearest_value_times_its_scales(number, form, block, token):
    taken = way(number, form, block, token)
    assert verdict(taken) and len(near(taken)) >= 3
    if math.isnan(taken.back):
        assert not math.isfinite(number) or any(math.isnan(size) for *_, size in taken.scales)
        return
    product = torch.tensor(taken.rounded)
    for *_, size in reversed(taken.scales[1:]):
        product = product * torch.tensor(size) * torch.tensor(taken.scales[0][3])
    if len(taken.scales) == 1:
        product = product * torch.tensor(taken.scales[0][3])
    assert taken.back == pytest.approx(product.item(), rel=1e-6, abs=1e-44)
    if math.isfinite(taken.quotient) and math.isfinite(taken.rounded):
        away = abs(grid(taken.layout) - taken.quotient).min()
        assert abs(taken.rounded - taken.quotient) == away


def test_the_way_of_a_number_by_hand():
    """0.3 beside 1: MXFP8's scale is the power of two above 1/448, which is 2^-8, and 0.3 · 2^8 = 76.8 lies between 72
    and 80. NVFP4's scale makes 1 a 6, so 0.3 is 1.8, between 1.5 and 2."""
    taken = way(0.3, "MXFP8", 1.0)
    assert taken.scales == (("block", "E8M0", 119, 2.0**-8),) and taken.quotient == pytest.approx(76.8)
    assert (taken.rounded, taken.back, fields("E4M3", taken.code)) == (80.0, 0.3125, ("0", "1101", "010"))
    assert verdict(taken) == "Nearer to 80 than to 72."
    taken = way(0.3, "NVFP4", 1.0)
    assert (
        taken.scales[1][3] == 448
        and taken.rounded == 2
        and taken.back == pytest.approx(1 / 3)
        and fields("E2M1", taken.code) == ("0", "10", "0")
    )
    assert (
        "half-way" in verdict(way(17.0, "FP8 E4M3"))
        and way(17.0, "FP8 E4M3").back == 16
        and way(19.0, "FP8 E4M3").back == 20
    )
    assert (
        way(500.0, "FP8 E4M3").back == 448
        and way(3.4e38, "bfloat16").back == math.inf
        and "infinite" in verdict(way(3.4e38, "bfloat16"))
    )
    assert "becomes zero" in verdict(way(0.01, "NVFP4", 1.0)) and math.copysign(1, way(-0.0, "MXFP8", 1.0).back) == -1
    assert "became zero" in verdict(way(1e-3, "NVFP4", 1e-3, 1e6)), (
        "the block's own scale is below E4M3's smallest number"
    )


def test_special_values_have_a_way(page, whole):
    at = page("low-precision")
    for form in ("bfloat16", "NVFP4"):
        at.selectbox(key="format").set_value(form)
        for number in ("nan", "-inf", "-0", "1e-45", "1e999", "−2"):
            whole(at.text_input(key="number").set_value(number).run())
            assert not at.error and not at.warning and shown(at)["Comes back as"]
    assert shown(at)["Error"] == "exactly 0", "−2 is the largest of its block: it becomes −6, a value of the format"


def test_what_is_no_number_is_one_line(page):
    at = page("low-precision", number="zebra", format="MXFP8")
    assert [warning.value for warning in at.warning] == ["That is no number; the page shows 0.3."]
    assert shown(at)["Comes back as"] == "0.3125"


def test_who_pays_for_an_outlier():
    """What to look for: a scale per tensor changes the past, others change exactly none of it."""
    assert "exactly none" in low_precision.PAGE.look
    for outlier in (100.0, 1e6):
        rows = {row["scale"]: row for row in low_precision.payers(outlier, 0)}
        for name, row in rows.items():
            leaks = "per tensor" in name
            assert (row["past numbers that change"] > 0) is leaks and (row["past outputs move by"] > 0) is leaks
    assert (
        rows["FP8, one scale per tensor"]["lost, earlier tokens"]
        > 0.9
        > 0.1
        > rows["FP8, one per token"]["lost, earlier tokens"]
    )
    assert (
        rows["FP8, one per token"]["lost, rest of its token"]
        > 0.9
        > 0.1
        > rows["FP8, one per 16"]["lost, rest of its token"]
    )
    assert rows["FP8, one per 16"]["lost, its block of 16"] > 0.9, "somebody always pays"
    x = low_precision.batch(1e6, 0)
    assert torch.equal(low_precision.SHARED["NVFP4, per token and 16"](x), quant.rounded(x, "nvfp4-token"))
    by_hand = x.abs().max() / 448
    assert ((x.abs() < by_hand / 2**10) == (low_precision.SHARED["FP8, one scale per tensor"](x) == 0)).all(), (
        "half of the least value is 2^-10"
    )


def test_exact_zeros_say_so(page):
    assert shown(page("low-precision", shared="MXFP8, one per 32"))["Past outputs move by"] == "exactly 0"
    at = page("low-precision", shared="FP8, one scale per tensor")
    assert shown(at)["Past numbers that change"] == "448 of 448" and shown(at)["Past outputs move by"] != "exactly 0"


# --------------------------------------------------------------------------------------------------- packing


def test_dealing_by_hand():
    """Costs 5, 3, 3, 1 on two ranks: 5 + 1 and 3 + 3. The first rank's cheapest is 1, so the bound is 6 + ½."""
    lengths, cost = torch.tensor([1, 5, 3, 3]), dealing.Cost(1.0, 0.0)
    rows = {row["dealt"]: row for row in packing.ways(lengths, cost, 2)}
    assert rows["in turn"]["slowest rank"] == pytest.approx(8 / 6) and rows["in turn"]["waiting"] == pytest.approx(0.25)
    assert rows["by cost"]["slowest rank"] == pytest.approx(1) and rows["by cost"]["at most, proven"] == pytest.approx(
        6.5 / 6
    )
    assert [row["load"] for row in packing.bars(lengths, cost, 2) if row["dealt"] == "in turn"] == pytest.approx(
        [8 / 6, 4 / 6]
    )


@given(
    st.sampled_from(packing.COUNTS[:6]),
    st.sampled_from(packing.RANKS),
    st.sampled_from(packing.SIGMAS),
    st.integers(0, 20),
)
@settings(max_examples=25)
def test_the_bound_holds_and_every_sequence_is_dealt(count, ranks, sigma, seed):
    lengths, cost = packing.sample_lengths(count, 1800, sigma, 16_384, seed), packing.COSTS["Qwen3-30B-A3B"]()
    rows, bars = packing.ways(lengths, cost, ranks), packing.bars(lengths, cost, ranks)
    assert rows[2]["slowest rank"] <= rows[2]["at most, proven"] + 1e-9
    for row in rows:
        own = [bar for bar in bars if bar["dealt"] == row["dealt"]]
        assert len(own) == ranks and own[0]["load"] == pytest.approx(row["slowest rank"])
        assert sum(bar["sequences"] for bar in own) == count and sum(bar["tokens"] for bar in own) == int(lengths.sum())


def test_rows_and_masks_by_hand():
    pieces = place_sequences(torch.tensor([3, 5, 4, 4, 9]), torch.arange(4), 8)
    assert [(one["row"], one["start"], one["end"], one["sequence"]) for one in pieces] == [
        (0, 0, 5, 1),
        (0, 5, 8, 0),
        (1, 0, 4, 2),
        (1, 4, 8, 3),
    ]
    assert pairs(pieces[:2]) == (15 + 6, 36) and pairs(pieces[:1]) == (15, 15)
    kinds = mask(place_sequences(torch.tensor([2, 1]), torch.arange(2), 4), 4)
    assert kinds == [
        ["own", "later", "later", "later"],
        ["own", "own", "later", "later"],
        ["stranger", "stranger", "own", "later"],
        ["padding"] * 4,
    ]
    first, *others = seen_by_strangers()
    assert first["without"] == 0 and all(row["with a mask"] < 1e-12 < 0.1 < row["without"] for row in others)


def test_packing_begins_on_a_row_of_several_sequences(page):
    lengths, cost = packing.sample_lengths(256, 1800, 1.0, 16_384, 0), next(iter(packing.COSTS.values()))()
    mine = packing.assign_ranks(lengths, cost(lengths), 8)["by cost"] == 0
    rows = [one["row"] + 1 for one in place_sequences(lengths, mine.nonzero()[:, 0], 16_384)]
    assert page("packing").slider(key="row").value == next(row for row in rows if rows.count(row) >= 3)


def test_controls_of_packing_move_its_figures(page, whole, table):
    at = page("packing", **{"ranks": "4", "lengths-seed": "3", "pay": "attention alone"})
    lengths, cost = packing.sample_lengths(256, 1800, 1.0, 16_384, 3), dealing.Cost(0.0, 1.0)
    assert table(at, "dealt")["slowest rank"].tolist() == [
        row["slowest rank"] for row in packing.ways(lengths, cost, 4)
    ]
    before = shown(at)
    whole(at.select_slider(key="ranks").set_value(64).run())
    assert shown(at)["Slowest rank, in turn"] != before["Slowest rank, in turn"]
    whole(at.select_slider(key="sequences").set_value(4).run())
    whole(at.slider(key="rank").set_value(64).run())
    assert any("has no sequence" in told.value for told in at.info)
    whole(at.slider(key="rank").set_value(1).run())
    assert shown(at)["Pairs across sequences"] == "exactly 0"


# ------------------------------------------------------------------------------------------------------ Muon


def test_a_round_is_the_polynomial():
    a, b, c = COEFFICIENTS
    for row in muon.curve(1, "float64")[::10]:
        x = row["share of ‖G‖"]
        assert row["after"] == pytest.approx(a * x + b * x**3 + c * x**5, abs=1e-6)
    nothing, one = muon.rounds((8, 16), 2.0, 0, "float64")[:2]
    assert sum(x * x for x in nothing) == pytest.approx(1) and nothing[0] / nothing[-1] == pytest.approx(100)
    assert one == pytest.approx(sorted((a * x + b * x**3 + c * x**5 for x in nothing), reverse=True), abs=1e-6)


def test_what_to_look_for_in_muon_is_so():
    assert "five rounds" in muon.PAGE.look and "between 0.68 and 1.21" in muon.PAGE.look
    arrived = [row["after"] for row in muon.curve(5, "float32") if row["share of ‖G‖"] > 0.002]
    assert len(arrived) > 100 and 0.68 <= min(arrived) <= max(arrived) <= 1.21
    least = muon.own(muon.gradient((8, 16), 3.0, 0), 5, "float32")[-1]
    assert "0.001 to about 0.44" in muon.PAGE.look and least["after"] == pytest.approx(0.44, abs=0.005)


def test_steps_of_three_optimisers():
    G = muon.gradient((8, 16), 2.0, 1).float()
    steps = muon.stepped(G, 5, "float32")
    assert torch.equal(steps["SGD"], -G) and torch.allclose(steps["Adam"], -G.sign(), atol=1e-3)
    rows = {row["step"]: row for row in muon.compared(G, 5, "float32")}
    assert rows["SGD"]["spectral norm"] == pytest.approx(1, abs=1e-5) and rows["SGD"]["ratio"] == pytest.approx(
        100, rel=1e-3
    )
    best = rows["exact −UVᵀ"]["of the best descent"]
    assert best == pytest.approx(1, abs=1e-5) and all(
        row["of the best descent"] <= best + 1e-5 for row in rows.values()
    )
    assert rows["SGD"]["of the best descent"] < rows["Muon"]["of the best descent"]


def test_an_expert_that_nobody_visits_stays_exactly_where_it_is(page, plays):
    rows = muon.experts(0.95)
    assert {row["moves by"] for row in rows if row["expert"] == "never visited"} == {0.0}
    walked = {
        name: sum(
            row["of its first step"] for row in rows if row["optimiser"] == name and row["expert"] == "visited once"
        )
        for name in ("Muon", "Adam")
    }
    assert walked["Muon"] > 300 > 30 > walked["Adam"]
    sizes = [row["of its first step"] for row in rows if row["optimiser"] == "Muon" and row["expert"] == "visited once"]
    full = [size for size in sizes if size > 0.97]
    assert sizes[: len(full)] == full and 1.6 < max(full) < 1.75 and len(full) == 441
    at = page("muon", rounds="0", decades="1.0")
    assert (
        shown(at)["Never visited, moves by"] == "exactly 0"
        and shown(at)["Largest over smallest, before"] == shown(at)["after"] == "10"
    )
    at.slider(key="rounds").set_value(5).run()
    assert float(shown(at)["after"]) < 2 and plays(at, "rounds") == 5


# ----------------------------------------------------------------------------------------- continued pretraining


def test_the_schedule_is_the_recipes():
    rows = pretraining.schedule({"cpt": 20, "long": 10, "sft": 10})
    factors = [row["factor"] for row in rows]
    assert (
        factors[:3] == [0.5, 1, 1] and factors[19] == 1 and factors[20:25] == pytest.approx([0.2, 0.4, 0.6, 0.7, 0.6])
    )
    assert (
        factors[29] == pytest.approx(0.1)
        and factors[-1] == pytest.approx(0.2)
        and [row["step"] for row in rows] == [*range(1, 41)]
    )


def test_what_is_scored_in_a_row():
    doc = torch.tensor([[0, 0, 0, 1, 1, -1], [0, 1, -1, -1, -1, -1]])
    found = pretraining.scored(torch.ones(2, 6, dtype=torch.long), doc)
    assert found.tolist() == [[False, True, True, False, True, False], [False] * 6]
    assert pretraining.scored(torch.ones(2, 6, dtype=torch.long), None).sum() == 10


def test_perplexity_in_four_units_is_that_of_the_committed_run(page, whole):
    at = page("cpt")
    folder = provenance.folders()[provenance.EXAMPLE] / "metrics"
    lines = [
        json.loads(line) for phase in ("cpt", "long") for line in (folder / f"{phase}.jsonl").read_text().splitlines()
    ]
    seen = [line for line in lines if "codebase_ppl" in line]
    assert any("committed example" in line.value for line in at.caption)
    assert shown(at)["at the end of pretraining"] == f"{seen[-1]['codebase_ppl']:.1f}"
    for unit, wanted in (("nats a token", math.log(seen[0]["codebase_ppl"])), ("bits a byte", seen[0]["codebase_bpb"])):
        whole(at.radio(key="unit").set_value(unit).run())
        assert shown(at)["Held-out codebase, first look"] == f"{wanted:.3f}"
    nll = cpt.CodebaseNLL(pretraining.looks(pretraining.read(folder.parent))[0]["nats a token"], 1, 1)
    assert nll.perplexity == pytest.approx(seen[0]["codebase_ppl"])


def test_without_document_numbers_strangers_are_scored(page, whole):
    at = page("cpt")
    assert shown(at)["Scored from another document, or padding"] == "exactly 0"
    assert shown(at)["Tokens scored"] == "122 of 128"
    whole(at.toggle(key="undivided").set_value(True).run())
    assert shown(at)["Scored from another document, or padding"] == "5" and shown(at)["Tokens scored"] == "127 of 128"


def test_a_run_of_the_users_is_shown(page, runs):  # noqa: F811
    folder = played(runs / "mine")
    lines = [
        {"step": 1, "tokens": 100, "phase": "short", "loss": 3.0},
        {"step": 2, "tokens": 200, "phase": "short", "loss": 2.0},
    ]
    lines[1] |= {"codebase_ppl": math.e**2, "codebase_bpb": 1.5}
    (folder / "metrics" / "cpt.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "metrics" / "long.jsonl").write_text("")
    at = page("cpt", unit="nats a token")
    assert any("**mine**, your run" in line.value for line in at.caption) and not at.error
    assert shown(at)["at the end of pretraining"] == "2.000"
    (folder / "metrics" / "cpt.jsonl").unlink()
    assert [error.value for error in page("cpt").error] == ["runs/mine has no metrics of pretraining"]


def test_what_to_look_for_in_pretraining_is_the_committed_figure(page, table, whole):
    rows, claims = pretraining.trainings()
    assert claims["loss-success"]["verdict"] == "reproduced" and "more success after RL" in cpt_page.PAGE.look
    at = page("cpt")
    assert (
        table(at, "loss after SFT")["success after RL"].tolist() == [row["success_after"] for row in rows]
        and len(rows) == 12
    )
    whole(at.radio(key="after").set_value("success before RL").run())
    assert table(at, "loss after SFT")["success before RL"].tolist() == [row["success_before"] for row in rows]
