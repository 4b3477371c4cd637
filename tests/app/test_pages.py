"""The pages on which numbers are played with: every control, every edit, and what they show against `ref` called
directly."""

import json
import math

import pytest
import torch

from etude.explorer import examples
from etude.explorer.pages import advantages, groups
from etude.explorer.pages.kl import FAMILIES, PAGE, closed_form, estimates, moments
from etude.explorer.pages.kl_gradients import ROUNDING, gradients
from recipe.small.settings import RewardCoefficients
from ref import dr_grpo, kl
from ref.length_penalty import Effort, EffortWeights, effort, length_penalty, marginal_cost

MEMBERS = {name: advantages.NAMES[name] for name in dr_grpo.FAMILY}
ROLLOUTS = [
    {
        "task": "easy",
        "success": True,
        "own_tokens": 20,
        "given_tokens": 60,
        "calls": 3,
        "turns": 3,
        "invalid_calls": 0,
        "text": "read a\nwrite a\n",
    },
    {
        "task": "easy",
        "success": True,
        "own_tokens": 60,
        "given_tokens": 400,
        "calls": 9,
        "turns": 9,
        "invalid_calls": 0,
        "text": "read b\n",
    },
    {
        "task": "easy",
        "success": True,
        "own_tokens": 20,
        "given_tokens": 60,
        "calls": 3,
        "turns": 3,
        "invalid_calls": 2,
        "text": "red a\n",
    },
    {
        "task": "hard",
        "success": False,
        "own_tokens": 5,
        "given_tokens": 0,
        "calls": 1,
        "turns": 1,
        "invalid_calls": 0,
        "text": "stop\n",
    },
]


@pytest.fixture
def rollouts(tmp_path, monkeypatch):
    """An example in the form of the committed one, small enough to be reckoned by hand."""
    (tmp_path / "rollouts.json").write_text(json.dumps({"rollouts": ROLLOUTS}))
    monkeypatch.setattr(examples, "FOLDER", tmp_path)
    return ROLLOUTS


@pytest.mark.parametrize("name", ["kl", "advantages", "penalties"])
def test_every_control_at_every_end(page, drive, rollouts, name):
    at = page(name)
    before = dict(at.query_params)
    assert drive(at) > 8
    assert dict(at.query_params) == before, "every control is back where it began, and the URL with it"


@pytest.mark.parametrize(
    ("name", "slider", "least", "most"), [("kl", "kl", 1, 2), ("advantages", "longest", 0, 0), ("penalties", "q", 3, 3)]
)
def test_a_control_draws_what_it_changes_and_nothing_else(page, redrawn, rollouts, name, slider, least, most):
    """Neither advantages nor relative weights depend on the longest response."""
    at = page(name)
    control = at.slider(key=slider)
    for i in range(3):
        assert (
            least
            <= redrawn(at, at.slider(key=slider), type(control.value)(control.max - control.step * (2 + i)))
            <= most
        )


# ------------------------------------------------------------------------------------------- KL estimators


def test_kl_shows_what_ref_says(page, table):
    at = page("kl", kl="0.5", seed="3")
    shown = table(at, "estimator").set_index("estimator")
    assert (shown["exact KL"] == 0.5).all()
    for kind in kl.KINDS:
        mean, variance = kl.gaussian_oracle(1.0)[kind]
        assert shown.loc[kind, "mean, exact"] == pytest.approx(mean) and shown.loc[
            kind, "variance, exact"
        ] == pytest.approx(variance)
        assert abs(shown.loc[kind, "mean"] - mean) < 5 * shown.loc[kind, "standard error"]
    assert shown.loc["k3", "variance"] < shown.loc["k1", "variance"]


@pytest.mark.parametrize("family", FAMILIES)
def test_bias_and_variance_are_exact_whatever_was_sampled(page, table, family):
    """k1 and k3 have no bias, and their means over many samples lie near the exact ones; rare tokens decide k3's
    variance."""
    shown = table(page("kl", family=family, kl="0.3", samples="30000", seed="1"), "estimator").set_index("estimator")
    bias = {row["estimator"]: row["bias, exact"] for row in estimates(family, 0.3, 30_000, 1)[0]}
    assert max(abs(bias["k1"]), abs(bias["k3"])) < 1e-9 < 1e-3 < abs(bias["k2"])
    assert shown["bias, exact"].to_dict() == {"k1": "exactly 0", "k2": f"{bias['k2']:.4g}", "k3": "exactly 0"}
    for kind in kl.KINDS:
        error = (shown.loc[kind, "variance, exact"] / 30_000) ** 0.5
        assert abs(shown.loc[kind, "mean"] - shown.loc[kind, "mean, exact"]) < 5 * error
    assert shown.loc["k1", "variance"] == pytest.approx(shown.loc["k1", "variance, exact"], rel=0.1)


def test_each_gradient_is_one_row_under_the_names_of_the_page(page, table):
    at = page("kl")
    shown, found = table(at, "gradient").set_index("gradient"), {row["gradient"]: row for row in gradients()}
    right, other = "distance from ∇KL(π‖π_ref)", "distance from ∇KL(π_ref‖π)"
    assert shown.index.is_unique and list(shown.columns) == ["size", right, other]
    zero = {
        (name, column) for name in shown.index for column in shown.columns if shown.loc[name, column] == "exactly 0"
    }
    assert zero == {
        (name, column)
        for name, row in found.items()
        for column in shown.columns
        if row[column] is not None and row[column] < ROUNDING
    }
    hidden = [one.value for box in at.expander if not box.proto.expanded for one in box.dataframe]
    assert any(one.equals(table(at, "gradient")) for one in hidden), (
        "nothing answers the question before it is asked for"
    )
    assert zero == {
        ("k1 as loss", "size"),
        ("k1 in reward", right),
        ("k2 as loss", right),
        ("k3 as loss", other),
        ("on policy, k3 × ratio", right),
        ("off policy, k3 × ratio", right),
        ("off policy, k1 in reward, weight π/μ", right),
    }
    assert shown["size"].count() == shown[other].count() == 3 and shown[right].notna().all()


def test_what_to_look_for_in_kl_is_so():
    """Which of two Gaussians' estimators varies how much is known in closed form."""
    across, variances = closed_form()
    k1, k2, k3 = (variances[kind] for kind in ("k1", "k2", "k3"))
    assert "more than k1 beyond 0.628 nats." in PAGE.look and f"{kl.crossing():.3f}" == "0.628"
    agent = moments(FAMILIES[2], 0.0, 0)
    assert agent["k1"][0] < 0.2 and agent["k3"][1] > 20 * agent["k1"][1], (
        "on the agent's own tokens far more than k1 long before that"
    )
    for x, a, b, c in zip(across, k1, k2, k3, strict=True):
        assert (c > a) == (x > kl.crossing())
        if x < 0.3:
            assert c < min(a, b), "least while the policies are close"
    assert any(b > c > a for a, b, c in zip(k1, k2, k3, strict=True)), "but not most at once"


# -------------------------------------------------------------------------------------------- advantages


def test_advantages_of_every_preset_are_those_of_ref(page, whole, table):
    at = page("advantages")
    for preset, group in groups.PRESETS.items():
        at.selectbox(key="preset").set_value(preset)
        whole(at.run())
        assert not at.error
        shown, rewards = table(at, "Dr. GRPO"), torch.tensor([[reward for reward, *_ in group]], dtype=torch.float64)
        assert shown["length"].tolist() == [length for _, length, _ in group]
        for name, variant in dr_grpo.FAMILY.items():
            right = dr_grpo.group_advantages(rewards, baseline=variant.baseline, scale=variant.scale)[0]
            assert shown[MEMBERS[name]].tolist() == right.tolist()
            assert math.fsum(shown[MEMBERS[name]]) == pytest.approx(0, abs=1e-9)
        if preset == "all equal":
            assert (shown[list(MEMBERS.values())].to_numpy() == 0).all()


def test_the_deviation_blows_up_a_group_that_is_equally_correct(page, table):
    half, equal = (
        table(page("advantages", preset=preset), "Dr. GRPO").abs().max() for preset in ("half right", "equally correct")
    )
    assert equal["Dr. GRPO"] < 0.01 * half["Dr. GRPO"] and equal["GRPO"] > half["GRPO"]


def test_weights_per_token_are_what_the_papers_write():
    rewards, lengths, cut = [1.0, 0.0, 0.0, 0.5], [4, 10, 20, 7], [False, False, True, False]
    centred = [r - 0.375 for r in rewards]
    deviation = (sum(c * c for c in centred) / 3) ** 0.5 + 1e-6
    right = {
        "dr_grpo": [c / (4 * 32) for c in centred],
        "rloo": [c * 4 / 3 / (4 * 32) for c in centred],
        "grpo": [c / deviation / n / 4 for c, n in zip(centred, lengths)],
        "gspo": [
            c / deviation / n / 4 for c, n in zip(centred, lengths)
        ],  # at ratio one: as GRPO's, by way of the geometric mean
        "dapo": [0.0 if off else c / deviation / 41 for c, off in zip(centred, cut)],
    }
    for name, (_, weights) in groups.family(rewards, lengths, cut, 32).items():
        assert weights == pytest.approx(right[name], abs=1e-15), name


def test_equal_algorithms_are_named():
    same, double = [1.0, -1.0], [2.0, -2.0]
    assert advantages.describe_equal({"a": same, "b": double, "c": same, "d": double}) == "Equal here: a = c; b = d."
    assert advantages.describe_equal({"a": same, "b": [1.0, -1.0 + 1e-14]}) == "Equal here: a = b."
    assert advantages.describe_equal({"a": same, "b": double}) == "No two algorithms are equal here."


def test_five_algorithms_are_drawn_and_equal_ones_are_named(page):
    at = page("advantages", preset="long wrong answers")
    captions = " ".join(line.value for line in at.caption)
    assert "side by side. Equal here: GRPO = DAPO = GSPO." in captions, "advantages"
    assert "log-prob. Equal here: Dr. GRPO = RLOO = DAPO; GRPO = GSPO." in captions, "relative weights, none truncated"
    rows = [{"rollout": 1, "reward": 1.0, "length": 3, **dict.fromkeys(advantages.LOOKS, 0.5)}]
    (marks, _) = advantages.draw_marks(advantages.melt_rows(rows, "advantage"), "advantage").layers
    assert len(marks.rows) == len(advantages.LOOKS) == 5 and marks.dodge


def test_the_divisors_explain_the_weights(page, table):
    """A weight is the advantage over the divisor in the table; the factor between RLOO and Dr. GRPO is in the text."""
    at = page("advantages", preset="half right", longest="512")
    rows = table(at, "advantage divided by").set_index("algorithm")
    lengths = [length for _, length, _ in groups.PRESETS["half right"]]
    divisors = {"Dr. GRPO": 8 * 512, "RLOO": 8 * 512, "DAPO": sum(lengths)}
    for name, divisor in divisors.items():
        row = rows.loc[name]
        assert row["largest advantage"] / row["largest weight of a token"] == pytest.approx(divisor)
        words = str(divisor) if name == "DAPO" else "8 rollouts × 512"
        assert row["advantage divided by"].startswith(words)
    factor = rows.loc["RLOO", "largest weight of a token"] / rows.loc["Dr. GRPO", "largest weight of a token"]
    assert factor == pytest.approx(8 / 7) and any("8/7 ≈ 1.14 times" in line.value for line in at.markdown)


def test_what_was_cut_off_is_no_bias_of_length(page, table):
    at = page("advantages", preset="cut off", relative="false")
    shown, whole_group = table(at, "Dr. GRPO"), table(at, "longest ÷ shortest").set_index("algorithm")
    assert shown["cut off"].tolist() == [cut for *_, cut in groups.PRESETS["cut off"]]
    assert whole_group.loc[["Dr. GRPO", "RLOO", "DAPO"], "longest ÷ shortest"].tolist() == pytest.approx([1, 1, 1])
    assert whole_group.loc["GRPO", "longest ÷ shortest"] == pytest.approx(40 / 128)
    assert (whole_group["sum of advantages"] == 0).all()


def test_edits_are_judged_and_stay_in_the_link(page, edit, table):
    at = page("advantages", preset="one success")
    assert "group" not in at.query_params
    edit(at, {1: {"reward": 0.25}, 2: {"length": 80}}, add=[{"reward": -1.0, "length": 7, "cut off": True}], delete=[7])
    shown = table(at, "Dr. GRPO")
    assert shown["reward"].tolist() == [1, 0.25, 0, 0, 0, 0, 0, -1] and shown["length"].tolist() == [
        40,
        40,
        80,
        40,
        40,
        40,
        40,
        7,
    ]
    assert shown["Dr. GRPO"].tolist() == pytest.approx([r - 0.03125 for r in shown["reward"]])
    again = page("advantages", **at.query_params)
    assert again.query_params == at.query_params
    assert table(again, "Dr. GRPO").equals(shown)
    again.selectbox(key="preset").set_value("all equal").run()
    assert "group" not in again.query_params and (table(again, "Dr. GRPO")["Dr. GRPO"] == 0).all(), (
        "a preset begins anew"
    )


def test_edits_are_there_again_with_the_browsers_back(page, go, edit, table):
    """From another page, and from another preset: the address of the edits brings them back, as the table itself does
    not know them any more."""
    at = go(page("kl"), "advantages", preset="one success")
    edit(at, {1: {"reward": 0.25}})
    edited, address = table(at, "Dr. GRPO"), dict(at.query_params)
    assert address["group"] and not edited.equals(table(page("advantages", preset="one success"), "Dr. GRPO"))
    go(at, "kl")
    go(at, "advantages", **address)
    assert table(at, "Dr. GRPO").equals(edited) and at.query_params == address
    go(at, "kl")
    go(at, "advantages", preset="one success")
    assert "group" not in at.query_params, "an address without them is without them"
    go(at, "advantages", **address)
    at.selectbox(key="preset").set_value("half right").run()
    assert "group" not in at.query_params and len(table(at, "Dr. GRPO")) == 8
    at.selectbox(key="preset").set_value("one success")
    go(at, "advantages", **address)
    assert table(at, "Dr. GRPO").equals(edited) and at.query_params == address


@pytest.mark.parametrize(
    ("rows", "add", "delete", "says"),
    [
        ({2: {"reward": None}}, (), (), "row 3: the reward"),
        ({2: {"reward": float("nan")}}, (), (), "row 3: the reward"),
        ({2: {"reward": 1e300}}, (), (), "row 3: the reward"),
        ({0: {"length": -4}}, (), (), "row 1: the length"),
        ({0: {"length": 0}}, (), (), "row 1: the length"),
        ({0: {"length": 2.5}}, (), (), "row 1: the length"),
        ({0: {"length": None}}, (), (), "row 1: the length"),
        ({0: {"length": 99_999}}, (), (), "row 1: the length"),
        ({0: {"length": 600}}, (), (), "longer than the longest allowed"),
        ({}, [{"cut off": False}], (), "row 9: the reward"),  # a new row, as the browser sends it
        ({}, [{"reward": 1, "length": 5, "cut off": False}] * 30, (), "2 to 32 rollouts"),
        ({}, (), range(1, 8), "2 to 32 rollouts, got 1"),
        ({}, (), range(8), "2 to 32 rollouts, got 0"),
        ({row: {"cut off": True} for row in range(8)}, (), (), "every rollout was truncated"),
    ],
)
def test_a_bad_cell_is_one_line(page, edit, rows, add, delete, says):
    at = edit(page("advantages"), rows, add, list(delete))
    assert len(at.error) == 1 and says in at.error[0].value and "\n" not in at.error[0].value
    again = page("advantages", **at.query_params)
    assert [error.value for error in again.error] == [error.value for error in at.error], "the link shows the same"


@pytest.mark.parametrize("group", ["nonsense", "1_2_3", "a_b", "~~~", "1_2~" * 99, "nan_4~inf_5", "1_1e400~2_3"])
def test_a_link_that_cannot_be_read_is_one_line(page, group):
    at = page("advantages", group=group)
    assert len(at.error) == 1 and "\n" not in at.error[0].value


# --------------------------------------------------------------------------------------------- penalties


def test_rollouts_are_ranked_by_what_the_recipe_pays(page, rollouts, table):
    at = page("penalties", k="0.1", q="1.5", price="0.01", turns="10", **{"tool-calls": "3"})
    shown = table(at, "rank").set_index("rollout")
    for number, r in enumerate(rollouts, 1):
        x = effort(
            Effort(
                tool_call_tokens=r["own_tokens"],
                tool_output_tokens=r["given_tokens"],
                tool_calls=r["calls"],
                turns=r["turns"],
            ),
            EffortWeights(1.0, 1.0, 0.1, 1.0, 3.0, 10.0),
        )
        reward = (
            r["success"] - 0.01 * length_penalty(x, 0.1, 1.5) - RewardCoefficients().invalid_call * r["invalid_calls"]
        )
        row = shown.loc[number]
        assert row["effort"] == pytest.approx(x) and row["reward"] == pytest.approx(reward)
        assert row["C(effort)"] == pytest.approx(length_penalty(x, 0.1, 1.5)) and row[
            "next unit costs"
        ] == pytest.approx(marginal_cost(x, 0.1, 1.5))
    assert shown["reward"].is_monotonic_decreasing and shown.loc[[1, 2], "without a penalty"].tolist() == [1, 1]
    assert shown.loc[1, "rank"] < shown.loc[2, "rank"], "of two that are right the one that spent less is ahead"
    assert any("this page leaves it out" in text.value for text in at.markdown), "the recipe also charges for drift"


def test_the_limits_close_and_the_straight_line(page, rollouts, table):
    at = page("penalties", k="0.01", q="2")
    limits = table(at, "limit")
    assert limits["close by"].tolist() == pytest.approx(limits["at the limit"].tolist(), rel=1e-6) and len(limits) == 4
    shown = table(page("penalties", q="0"), "rank")
    assert (
        shown["C(effort)"].tolist() == pytest.approx(shown["effort"].tolist()) and (shown["next unit costs"] == 1).all()
    )


def test_calls_in_one_turn_are_cheaper(page, rollouts, whole):
    at = page("penalties")
    line = next(m.value for m in at.markdown if "Serial or parallel" in m.value)
    weights, p = RewardCoefficients().weights, RewardCoefficients()
    serial, parallel = (
        effort(Effort(tool_call_tokens=72, tool_output_tokens=1800, tool_calls=6, turns=turns), weights)
        for turns in (6, 1)
    )
    saved = length_penalty(serial, p.k, p.q) - length_penalty(parallel, p.k, p.q)
    assert saved > 0 and f"save {saved:.1f}" in line
    whole(at.slider(key="turns").set_value(0.0).run())
    assert "save 0.0, 0%" in next(m.value for m in at.markdown if "Serial or parallel" in m.value)


def test_without_its_example_the_page_still_draws(page, tmp_path, monkeypatch):
    monkeypatch.setattr(examples, "FOLDER", tmp_path)
    for content in (None, "{", "[]", '{"rollouts": []}', '{"rollouts": [{"task": 1}]}'):
        if content is not None:
            (tmp_path / "rollouts.json").write_text(content)
        at = page("penalties")
        assert len(at.error) == 1 and "etude examples" in at.error[0].value and len(at.get("vega_lite_chart")) >= 3
