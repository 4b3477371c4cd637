"""What pages say is what they show: the default view shows what a page teaches, exact zeros say so, and a figure comes
from its record."""

import json

import pytest

from etude.console import expected
from etude.explorer import provenance, spans
from etude.explorer.charts import chart as charts
from etude.explorer.page import ROOT
from etude.explorer.pages import low_precision, packing, pretraining, real_time_rl, recipe, replay
from etude.report.record import before_after, in_words


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    """Where no run lies."""
    monkeypatch.chdir(tmp_path)


def shown(at):
    return {metric.label: metric.value for metric in at.metric}


def folded(at, label):
    """Columns of the tables in closed boxes of this name."""
    return [
        set(one.value.columns)
        for box in at.expander
        if box.label == label and not box.proto.expanded
        for one in box.dataframe
    ]


def test_zero_says_that_it_is_exact():
    assert spans.exact(0) == spans.exact(-0.0) == spans.exact(0.0, "{:.2%}") == "exactly 0"
    assert (
        spans.exact(1e-9, "{:.2f}") == "0.00"
        and spans.exact(0.125, "{:.1%}") == "12.5%"
        and spans.exact(1234, "{:,}") == "1,234"
    )


def test_what_rounds_to_zero_has_no_sign():
    assert in_words({"value": -0.0008, "low": -0.023, "high": 0.004}, "{:+.2f}") == "0.00 [-0.02, 0.00]"
    assert (
        in_words(-0.0, "{:.3f}") == in_words(0.0004, "{:+.3f}") == "0.000"
        and in_words(-0.01, "{:+.2f}") == "-0.01"
        and in_words(10.0, "{:+.0f}") == "+10"
    )
    record = json.loads((ROOT / "results" / "examples" / "recipe" / "report.json").read_text())
    assert not [cell for row in before_after(record) for cell in row if "-0.00 " in cell or "-0.000 " in cell]


def test_the_outlier_of_the_first_view_hurts_those_who_share_its_scale(page):
    """And at a hundred, of which the answer speaks, it changes them without making them worse."""
    hurt, other = (f"NVFP4, per {one} and 16" for one in ("tensor", "token"))
    error = "error, earlier tokens"
    for size, least, most in ((100.0, 0.9, 1.1), (low_precision.LARGE, 5.0, 100.0)):
        rows = {row["scale"]: row for row in low_precision.payers(size, 0)}
        assert least < rows[hurt][error] / rows[other][error] < most
    at = page("low-precision")
    assert at.select_slider(key="outlier").value == low_precision.LARGE and at.selectbox(key="shared").value == hurt
    before = low_precision.payers(1.0, 0)
    without = next(row for row in before if row["scale"] == hurt)["lost, earlier tokens"]
    assert shown(at)["Lost, earlier tokens"] == f"{without:.1%} → {rows[hurt]['lost, earlier tokens']:.1%}"
    assert low_precision.format_lost_share(rows["FP8, one per token"], "earlier tokens") == "exactly 0"
    assert not any(row[f"lost, {who}"] != row[f"lost without, {who}"] for row in before for who in low_precision.GROUPS)
    label = "Errors and lost numbers by scale, at this outlier"
    assert any("past numbers that change" in columns for columns in folded(at, label))
    assert not [text for text in at.markdown if "causal mask" in text.value and text.value != low_precision.PAGE.look]


def test_the_first_view_of_packing_shows_that_even_tokens_are_uneven_work(page, table):
    at = page("packing")
    ways = table(at, "dealt").set_index("dealt")
    assert ways.loc["by tokens", "tokens, slowest over mean"] < 1.01 < 1.1 < ways.loc["by tokens", "slowest rank"]
    assert ways.loc["by cost", "slowest rank"] < 1.01 and "even in tokens and not in work" in packing.PAGE.look
    assert not [said for said in at.caption if "not even" in said.value], "no caption answers the question"
    assert any("waiting" in columns for columns in folded(at, "Load, bound and waiting by assignment"))


def test_the_time_of_a_run_is_the_records(monkeypatch, tmp_path):
    found = json.loads((ROOT / "results" / "recipe-small.json").read_text())
    assert (
        f" {found['runs'][0]['seconds'] / 60:.1f} minutes on {expected.describe_machine(found['machine'])}, "
        in recipe.took()
    )
    assert "minutes" not in recipe.PAGE.says
    monkeypatch.setattr(recipe, "ROOT", tmp_path)
    assert recipe.took() == ""


def test_before_and_after_is_folded_beside_its_chart(page):
    at = page("recipe")
    assert any(
        "before RL" in columns for columns in folded(at, "Every measure, before and after")
    ) and recipe.took() in {one.value for one in at.caption}


def test_a_filter_that_drops_nothing_says_so(page):
    at = page("replay", plausibility="0.0")
    assert shown(at)["Sampler's experts dropped"] == "exactly 0" and replay.dropped(0)[0]["dropped"] == 0


def test_what_never_pays_says_so(page):
    tiles = shown(page("real-time-rl"))
    found = real_time_rl.worth(real_time_rl.experiment.WAYS["loop"][0], real_time_rl.Users(), 0.4)
    assert (
        real_time_rl.even(found, "broken call") == 0
        and tiles["broken call pays below"] == "exactly 0" == tiles["Thrown away"]
    )


def test_a_logarithmic_axis_has_room_for_its_ticks(page):
    assert (
        charts.powers([1.0, 11.0])
        and not charts.powers([70.0, 190.0])
        and not charts.powers([])
        and not charts.powers([float("nan"), 3.0])
    )
    seen = [
        look[pretraining.UNITS[0]]
        for look in pretraining.looks(pretraining.read(provenance.folders()[provenance.EXAMPLE]))
    ]
    assert not charts.powers(seen), "perplexity of the committed run is drawn on a plain axis"
    (spec,) = [
        chart.proto.spec for chart in page("cpt").get("vega_lite_chart") if pretraining.UNITS[0] in chart.proto.spec
    ]
    assert '"log"' not in spec
