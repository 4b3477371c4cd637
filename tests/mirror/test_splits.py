"""`etude plan --rl`: the simulator at the plan's speeds against limits that are known, numbers computed by hand, and
its own bound."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude import planning, prices, splits
from etude.splits import Engines, Trainer, Work
from kit.settings import RunError
from ref.network import Config
from scaled.plan import HARDWARE

QWEN, H200 = Config.qwen3_30b_a3b(), HARDWARE["h200"]
SMALL = Work(
    groups=4,
    rollouts=4,
    turns=4,
    turn_tokens=20,
    tool_tokens=40,
    prompt_tokens=50,
    tool_s=0.0,
    publish_s=0.0,
    swap_s=0.0,
)


def even(count: int = 1, slots: int = 10**6) -> Engines:
    """Engines whose tokens take 10 ms whatever decodes, with room for all."""
    return Engines(count, 1, slots, lambda rows: 0.01)


def test_lengths_by_hand():
    """10 turns of 300 tokens, 9 answers of 1,200, and a prompt; at most 15 turns of 450 tokens."""
    work = Work()
    assert work.own == 3000 and work.tokens == 1500 + 3000 + 9 * 1200
    assert work.longest == 1500 + 15 * 450 + 14 * 1200
    odd = replace(work, turns=1, turn_tokens=1)
    assert odd.own == 1 and odd.tokens == 1501 and odd.longest == 1501


def test_a_slow_trainer_sets_the_pace():
    """A step takes ten times as long as its sampling: the trainer never waits, whatever the bound, and groups are as
    old as admission lets them."""
    for staleness in (1, 4):
        rate, out = splits.play(100.0, even(), staleness, SMALL)
        assert rate == pytest.approx(36.0) and out.dropped == 0
        assert max(out.group_ages) <= staleness


def test_a_fast_trainer_waits_for_the_sampler():
    """One slot for each rollout of a step: what is sampled in a step's time is what it trains on, and the trainer takes
    no time."""
    work = replace(SMALL, turns=1, turn_tokens=1, groups=4)
    rate, _ = splits.play(1e-6, Engines(1, 1, 16, lambda rows: 0.01), 4, work)
    assert rate == pytest.approx(3600 / 0.01, rel=0.02)
    half, _ = splits.play(1e-6, Engines(1, 1, 8, lambda rows: 0.01), 4, work)
    assert half == pytest.approx(rate / 2, rel=0.02)


def test_equal_speeds_without_tools_double_what_turns_reach():
    """Sampler and trainer take the same time for a step. In turns, S = 0, it takes both; beside each other, one: twice
    as fast."""
    sampling, _ = splits.play(1e-6, Engines(1, 1, 16, lambda rows: 0.01), 0, SMALL)
    train_s = 3600 / sampling
    alternating, _ = splits.play(train_s, Engines(1, 1, 16, lambda rows: 0.01), 0, SMALL)
    beside, _ = splits.play(train_s, Engines(1, 1, 16, lambda rows: 0.01), 8, SMALL)
    assert alternating == pytest.approx(sampling / 2, rel=0.02)
    assert beside == pytest.approx(sampling, rel=0.02)


def test_slow_tools_want_staleness():
    slow = replace(SMALL, tool_s=2.0)
    rates = [splits.play(1.0, even(), staleness, slow)[0] for staleness in (0, 1, 4, 16)]
    assert rates[0] < rates[1] < rates[2] < rates[3] <= 3600.001


@settings(max_examples=25)
@given(
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 4),
    st.floats(0.05, 5.0),
    st.integers(1, 64),
    st.sampled_from([0.0, 0.3]),
)
def test_nothing_is_faster_than_the_bound(groups, rollouts, turns, staleness, train_s, slots, tool_s):
    """Tools that take one time, rollouts that sample a token a turn; engines whose tokens take longer the more rollouts
    decode."""
    work = Work(groups, rollouts, turns, 1, 0, 1, tool_s, 0.0, (staleness,), 0.0, 0.0)
    groups = min(groups, splits.SIMULATED_SIZE[0])
    work = replace(work, groups=groups)
    sampler = Engines(1, 1, slots, lambda rows: 0.2 + 0.01 * rows)
    rate, out = splits.play(train_s, sampler, staleness, work)
    train = Trainer(1, train_s, 0.0, True)
    # What was sampled before the steps that count helps them: the bound is one of long runs.
    ahead = (staleness + 1) / splits.STEPS
    assert rate <= 3600 / train_s * (1 + 1e-9)
    assert rate <= splits.bound(train, sampler, staleness, work) * (1 + ahead) * (1 + 1e-9)
    assert out.trained == len(out.steps) * groups


def test_an_engine_decodes_as_the_recipes_plan_says():
    """Without anything given, a token takes what `etude plan --recipe` says for conversations of this length; a given
    token is a forward pass."""
    work = Work(tool_tokens=0, prompt_tokens=1, turns=20)
    engine = splits.engines(QWEN, H200, work)
    talk = prices.Conversations(tokens=work.tokens, longest=1.0, demonstrations=1, has_tokenizer=False)
    for rows in (1, 7, 40):
        assert engine.token_s(rows) == pytest.approx(prices.decoding(QWEN, rows, 2, H200, talk), rel=2e-3)
    more = replace(work, tool_tokens=600)
    apart = splits.engines(QWEN, H200, more).token_s(1e-9) - splits.engines(QWEN, H200, more).token_s(0.0)
    assert apart > 0
    crowd = 10**4
    longer = splits.engines(QWEN, H200, more).token_s(crowd) - prices.decoding(
        QWEN, crowd, 2, H200, replace(talk, tokens=more.tokens)
    )
    given_tokens = crowd * (more.tokens - more.own) / more.own
    cost = splits.Cost.of(QWEN)
    assert longer == pytest.approx(given_tokens * (cost.linear + cost.quadratic * more.tokens) / (0.5 * 989e12))


def test_an_engine_takes_as_many_gpus_as_its_weights_need():
    work = Work()
    one, two = splits.engines(QWEN, H200, work), splits.engines(QWEN, replace(H200, memory=50e9), work)
    weights, each = 2 * QWEN.parameters(), 2 * 4 * 128 * 48 * 2 * work.tokens
    assert one.gpus == 1 and one.slots == int((0.92 * 141e9 - weights) / each)
    assert two.gpus == 2 and two.slots == int((0.92 * 100e9 - weights) / each)
    with pytest.raises(RunError, match="an engine with 61 GB of weights does not fit a node of 8 GPUs"):
        splits.engines(QWEN, replace(H200, memory=5e9), work)


def test_a_step_of_the_trainer_is_that_of_the_plan():
    work = Work()
    (one,) = planning.plan_steps("qwen3_30b_a3b", [64], 2, 8, 32_768, 1, "h200")
    rows = math.ceil(64 * 16 * work.tokens / 0.95 / 32_768)
    found = splits.trainer("qwen3_30b_a3b", 64, 2, 8, 32_768, "h200", work)
    assert (
        found.step_s == pytest.approx(math.ceil(rows / 32) * one["step_seconds"])
        and found.fits
        and found.memory == one["memory"]
    )


@given(st.integers(2, 600), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4, 8]))
def test_splits_use_all_gpus(gpus, cp, engine):
    """What the trainer does not take, whole engines do."""
    for train in splits.candidates(gpus, cp, engine):
        assert 0 < train < gpus and train % cp == 0 and (gpus - train) % engine == 0


FEW = Work(groups=64, rollouts=4, turns=2, tool_s=0.5, staleness=(4, 1, 2))


@pytest.fixture(scope="module")
def found():
    return splits.find_splits("qwen3_30b_a3b", [32, 16], 2, 8, 32_768, "h200", FEW)


def test_the_table_is_in_order_and_its_gpus_add_up(found):
    assert [(one.gpus, one.staleness) for one in found] == [(16, 1), (16, 2), (16, 4), (32, 1), (32, 2), (32, 4)]
    for one in found:
        assert (
            one.sampler + one.trainer == one.gpus
            and one.engines == one.sampler
            and one.effective_staleness <= one.staleness
        )
        assert (
            0 <= one.trainer_idle <= 1
            and 0 < one.sampler_used
            and 0 <= one.dropped < 1
            and one.mean_age <= one.effective_staleness
        )
        assert one.dollars == pytest.approx(one.gpus * 3.5 / one.steps_per_hour)
    for before, one in zip(found, found[1:]):
        if before.gpus == one.gpus:
            assert one.steps_per_hour >= before.steps_per_hour, "a higher bound is never slower"
    assert found[5].steps_per_hour > 1.5 * found[2].steps_per_hour, "twice the GPUs"


def test_no_other_split_is_faster(found):
    """All candidates, simulated: those that were left out could not have won by more than what they were left out
    for."""
    one, engine = found[1], splits.engines(QWEN, H200, FEW)
    for gpus in splits.candidates(16, 2, 1):
        train = splits.trainer("qwen3_30b_a3b", gpus, 2, 8, 32_768, "h200", FEW)
        if train.fits:
            rate, _ = splits.play(train.step_s, replace(engine, count=16 - gpus), 2, FEW)
            assert rate <= one.steps_per_hour * splits.CLOSE


def test_from_the_command_line(tmp_path, ask):
    few = ["--set", "groups=8", "--set", "rollouts=2", "--set", "turns=2", "--set", "staleness=[1,2]"]
    code, said, error = ask("plan", "--rl", "--gpus", 16, *few, "--out", tmp_path)
    assert code == 0 and not error and "qwen3_30b_a3b on h200" in said and "steps/h" in said
    assert "8 × 2 rollouts" in " ".join(said.split())
    written = json.loads((tmp_path / "rl-plan.json").read_text())
    assert [(one["gpus"], one["staleness"]) for one in written["splits"]] == [(16, 1), (16, 2)]
    assert written["work"]["groups"] == 8 and all(one["sampler"] + one["trainer"] == 16 for one in written["splits"])


@pytest.mark.parametrize(
    "words, why",
    [
        (["--kernels"], "--rl does not apply to --kernels"),
        (["--launches", "mxfp8"], "--rl does not apply to --launches"),
        (["--rows", 2], "--rows does not apply to --rl, which splits GPUs between sampler and trainer"),
        (["--recipe", "examples/rehearsal.toml"], "--recipe does not apply to --rl"),
        (["--gpus", 2], "2 GPUs cannot be split: the trainer needs at least --cp 2, and an engine 1"),
        (["--gpus", 4], "no split of 4 GPUs fits: the trainer's ranks would need"),
        (["--set", "tool_s=-1"], "tool_s must be at least 0, got -1"),
        (["--set", "staleness=[]"], "staleness must hold one bound or more"),
        (["--set", "turns=100"], "rollouts of up to 247,800 tokens do not fit rows of 32,768"),
        (["--set", "tols=3"], "tols"),
        (["--hardware", "abacus"], "unknown hardware 'abacus'"),
        (["--model", "nothing"], "--model expects qwen3_30b_a3b, tiny, or a Hugging Face folder"),
    ],
)
def test_what_does_not_fit_together_is_one_line(ask, words, why):
    code, said, error = ask("plan", "--rl", *words)
    assert code == 2 and why in error and error.count("\n") == 1 and not said, error


def test_settings_without_the_split_are_refused(ask):
    code, _, error = ask("plan", "--set", "tool_s=1")
    assert code == 2 and error.count("\n") == 1 and "--set applies to --rl only" in error
