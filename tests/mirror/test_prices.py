"""`etude plan --recipe` against the plan of a step, what the settings say, and hand-computed numbers."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.plan import recipe as prices
from etude.run.settings import settings
from kit.settings import RunError
from recipe.small.agent import Language
from ref.network import Config
from scaled.plan import HARDWARE, plan
from scaled.runtime.mesh import Layout

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = tomllib.loads((ROOT / "examples" / "qwen3-30b-a3b.toml").read_text())
EXAMPLE.pop("study")  # of `cpt-rl`; the command leaves it out, too
QWEN, H200 = Config.qwen3_30b_a3b(), HARDWARE["h200"]
TALK = prices.Conversations(tokens=100.0, longest=50.0, demonstrations=1, has_tokenizer=False, own=40.0)


def of(gpus: int, *sets: str, network: Config = QWEN) -> dict[str, prices.Price]:
    return {
        one.stage: one for one in prices.prices(settings("recipe", "nccl", EXAMPLE, sets), network, gpus, H200, TALK)
    }


def test_the_example_fits_and_takes_the_tokens_that_it_says():
    for gpus in (8, 64):
        found = of(gpus)
        assert list(found) == ["cpt", "mtp", "long", "sft", "rl", "eval"] and not any(
            one.raised for one in found.values()
        )
        assert all(one.fits for one in found.values())
        for name, tokens in (("cpt", 2e9), ("mtp", 2e8), ("long", 2e8)):
            assert (
                found[name].steps * found[name].tokens == pytest.approx(tokens, rel=0.04)
                and found[name].steps * found[name].tokens <= tokens
            )
        assert found["sft"].steps * found["sft"].tokens == pytest.approx(50_000 * 2 * 100 / prices.FULLNESS, rel=0.02)
        assert found["rl"].steps == 200 and found["rl"].tokens == 64 * 16 * 100
        assert all(one.layout.world == gpus for one in found.values()) and found["rl"].layout.cp == 8


def test_decoding_is_priced_if_it_is_timed():
    """On one CPU thread: 4 ways · 3 tasks · 40 tokens, which each read all weights in float32, while the GPUs wait."""
    found = of(8, "evaluation.decode_rounds=5", "evaluation.decode_tasks=3")["decode"]
    read = 4 * QWEN.parameters() / prices.HOST_BANDWIDTH
    assert found.steps == 5 and found.tokens == 480 and found.seconds == pytest.approx(5 * 480 * read)
    assert found.dollars == pytest.approx(found.seconds / 3600 * 8 * H200.price) and found.memory == 0
    assert "decode" not in of(8, "evaluation.decode_rounds=5", "cluster.drafts=false")
    text = prices.describe(settings("recipe", "nccl", EXAMPLE, ("evaluation.decode_rounds=1",)), TALK, H200)
    assert "evaluation.decode_rounds=0 leaves it out" in text


def test_a_step_of_pretraining_is_its_micro_batches():
    found = of(8)["cpt"]
    step = plan(QWEN, Layout(4, 2, 8), 4, 32_768)
    parts = step.seconds(H200, Layout(4, 2, 8))
    micro = parts["network"] + max(parts["compute"] * 4 / 3, 3 * step.memory / H200.bandwidth) + parts["eager"]
    assert found.seconds / found.steps == pytest.approx(128 / 4 * micro) and found.memory == step.memory
    assert found.dollars == pytest.approx(found.seconds / 3600 * 8 * H200.price)


def test_decoding_reads_what_its_tokens_touch_once_per_token():
    dense = replace(QWEN, num_experts=0, num_experts_per_tok=0, num_key_value_heads=1)
    cache = prices.cache(dense, 50, 2)
    assert cache == 50 * 2 * 128 * 48 * 2
    assert prices.decoding(dense, 1, 2, H200, TALK) == pytest.approx(
        50 * (2 * dense.parameters() + cache) / H200.bandwidth
    )
    one, many = (prices.decoding(QWEN, rows, 2, H200, replace(TALK, tokens=0.0)) for rows in (1, 16))
    experts = QWEN.parameters() - QWEN.parameters(active=True)
    read = QWEN.parameters(active=True) + experts * 8 / 128
    assert one == pytest.approx(50 * 2 * read / H200.bandwidth)
    assert many == pytest.approx(50 * 2 * QWEN.parameters() / H200.bandwidth)  # 16 rows of 8 experts touch all 128
    crowd = prices.decoding(QWEN, 10**5, 2, H200, replace(TALK, tokens=0.0))
    assert crowd == pytest.approx(50 * 2 * QWEN.parameters(active=True) * 10**5 / (H200.flops * H200.efficiency))


@given(st.sampled_from([8, 16, 32, 64, 128, 256, 512, 1024]), st.sampled_from(["cpt", "mtp", "long", "sft", "rl"]))
def test_more_gpus_need_less_memory_each_and_are_never_short_of_rows(gpus, stage):
    here, twice = of(gpus)[stage], of(2 * gpus)[stage]
    assert twice.memory <= here.memory and twice.layout.world == 2 * here.layout.world
    rows = {"sft": 8, "rl": 0}.get(stage, 4_194_304 // (262_144 if stage == "long" else 32_768))
    assert bool(here.raised) == (0 < rows < here.layout.dp) and (here.raised or here.layout.dp) % here.layout.dp == 0


def test_what_the_settings_change():
    base, penalty, kept, f32 = (
        of(8),
        of(8, "rl.payment.kl=0.001"),
        of(8, "cluster.rematerialise=false"),
        of(8, "training.sampler_dtype=float32"),
    )
    assert (
        penalty["rl"].memory - base["rl"].memory == pytest.approx(4 * QWEN.parameters() / 8) and not penalty["rl"].fits
    )
    assert penalty["rl"].seconds > base["rl"].seconds and penalty["cpt"] == base["cpt"]
    assert kept["cpt"].memory > base["cpt"].memory and kept["cpt"].seconds < base["cpt"].seconds
    # The sampler's weights and its cache are twice as large.
    copy = 2 * QWEN.parameters() + prices.cache(QWEN, 64 * 16 / 8 * 100, 2)
    assert f32["rl"].memory - base["rl"].memory == pytest.approx(copy)
    deeper, plain = of(8, "mtp.layers.depth=6"), of(8, "mtp.layers.depth=1")
    assert deeper["cpt"] == plain["cpt"] and deeper["mtp"].seconds > base["mtp"].seconds > plain["mtp"].seconds
    assert (
        base["mtp"].memory < base["cpt"].memory
        and base["mtp"].seconds / base["mtp"].steps < base["cpt"].seconds / base["cpt"].steps
    )


def test_drafts_are_those_that_a_run_trains():
    c = settings("recipe", "nccl", EXAMPLE)
    shape, held, whole = prices.draft_layers(c, QWEN, 7)
    D, d = 2048, 128
    block = 2 * D * 32 * d + 2 * D * 4 * d + 2 * d + 3 * D * 6144
    norms = 5 * D  # of the block, of the two inputs, and before the head
    assert whole == pytest.approx(3 * (block + 2 * D * D + norms), abs=3 * 2 * D) and held == -(-whole // 7)
    assert prices.flops_of_drafts(QWEN, shape, whole, 1, 0) == 6 * whole + 14 * 151_936 * D


@pytest.mark.parametrize(
    "gpus, sets, why",
    [
        (3, [], "cluster.cp=2 must divide the number of ranks, 3"),
        (8, ["training.length=33333"], "length of 2 · cp"),
        (8, ["cluster.ep=7"], "cluster.ep=7"),
    ],
)
def test_what_cannot_be_split_is_one_line(gpus, sets, why):
    with pytest.raises(RunError, match=why):
        of(gpus, *sets)


def test_conversations_are_counted_in_the_networks_tokens(tiny_run, tmp_path):
    c = settings("recipe", "nccl", EXAMPLE)
    found, guessed = prices.conversations(c, tiny_run / "data", 20), prices.conversations(c, tmp_path, 20)
    assert found.has_tokenizer and not guessed.has_tokenizer and found.demonstrations == guessed.demonstrations == 20
    language, lengths = Language(prices.cpt.load_tokenizer(tiny_run / "data" / "tokenizer.json")), []
    chains = prices.lessons(c.small, language, prices.context(language, c.small), c.sft.noise, c.context.memory)
    for _, lesson in zip(range(20), chains):
        lengths.append(sum(len(segment.tokens) for segment in lesson.chain.segments))
    assert found.tokens == pytest.approx(sum(lengths) / 20) and 0 < found.longest < max(lengths)
    assert guessed.tokens > 10


def test_from_the_command_line(tiny_run, tmp_path, ask):
    start, recipe = tiny_run / "checkpoints" / "mid-cpt", ROOT / "examples" / "rehearsal.toml"
    code, said, error = ask("plan", "--recipe", recipe, "--checkpoint", start, "--gpus", 2, "--out", tmp_path)
    assert code == 0 and not error
    assert all(
        f"\n {stage} " in said for stage in ("cpt", "mtp", "long", "sft", "rl", "eval")
    ) and "Measured: the tokens of 200" in " ".join(said.split())
    found = json.loads((tmp_path / "recipe-plan.json").read_text())
    assert [one["stage"] for one in found] == ["cpt", "mtp", "long", "sft", "rl", "eval", "decode"] and found[0][
        "layout"
    ] == {"dp": 2, "cp": 1, "ep": 2}
    for words, why in (
        (["--checkpoint", start], "--checkpoint needs --recipe"),
        (["--recipe", recipe, "--rows", 2], "--rows applies to one step only"),
        (["--recipe", recipe, "--model", "tiny", "--checkpoint", start], "leave one of them out"),
        (["--recipe", tmp_path / "none.toml"], "none.toml"),
        (["--recipe", recipe, "--hardware", "abacus"], "unknown hardware 'abacus'"),
        (["--recipe", recipe, "--checkpoint", tmp_path / "nowhere"], "nowhere"),
        (["--recipe", recipe, "--gpus", 3], "cluster.ep=2 must divide the number of ranks, 3"),
    ):
        code, _, error = ask("plan", *words)
        assert code == 2 and why in error and error.count("\n") == 1, (words, error)
