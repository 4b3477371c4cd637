"""Llama, Qwen2 and Qwen3, with every kind of rotary embedding: transformers' own networks read, computed, sampled and
written again; and what is refused by name."""

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ref.engine.decoder import Decoder
from ref.engine.sampler import Sampler
from ref.mtp import MTP, MTPConfig
from ref.network import CheckpointError, Config, RopeScaling, Transformer, checkpoint, fast, load_hf, model, save_hf
from ref.network.model import config_of, rope_table
from ref.network.rope import frequencies
from tests.elsewhere import Monologue
from tests.networks import SCALINGS, scramble
from tests.talks import contexts_of

V, LONG = 61, 100
SHAPE = dict(
    vocab_size=V,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    tie_word_embeddings=False,
)
MOE = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, norm_topk_prob=True, experts_implementation="eager"
)
FAMILIES: dict[str, dict] = {
    "llama": {},
    "qwen2": {},
    "qwen3": dict(head_dim=16),
    "qwen3_moe": dict(head_dim=16, **MOE),
}
ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
}
EVERY = [(family, rope) for family in FAMILIES for rope in ROPES]
every = pytest.mark.parametrize("family, rope", EVERY, ids=[f"{family}-{rope}" for family, rope in EVERY])
each = pytest.mark.parametrize("family", FAMILIES)


def theirs(family: str, rope: str = "default", **changes) -> torch.nn.Module:
    """A network of transformers' own, whose norms and biases matter."""
    torch.manual_seed(len(family + rope))
    config = AutoConfig.for_model(
        family, **SHAPE | FAMILIES[family] | {"rope_parameters": {**ROPES[rope], "rope_theta": 1e4}} | changes
    )
    network = scramble(AutoModelForCausalLM.from_config(config))
    with torch.no_grad():
        for name, p in network.named_parameters():
            if name.endswith(".bias"):
                p.normal_(0.0, 0.5)
    return network


def reopened(path, family: str, **how) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        path, **({"experts_implementation": "eager"} if family == "qwen3_moe" else {}), **how
    )


def edit(path, **changes):
    """config.json with some values changed; None removes a key."""
    record = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in record.items() if v is not None}))


def ids(length: int = LONG, rows: int = 2) -> torch.Tensor:
    return torch.randint(0, V, (rows, length), generator=torch.Generator().manual_seed(1))


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Float32's rounding through two layers, of the largest logit; 2e-6 is the most that was seen."""
    assert (found - wanted).abs().max() <= 5e-6 * wanted.abs().max()


# ------------------------------------------------------------------------------ transformers


@torch.no_grad()
@every
def test_the_logits_are_those_of_transformers_and_so_are_those_of_what_we_write(tmp_path, family, rope):
    """Far beyond the longest context of pretraining, in one file and untied."""
    network = theirs(family, rope)
    network.save_pretrained(tmp_path / "theirs")
    wanted = network(ids()).logits
    for kind in (model, fast):
        ours = kind.load_hf(tmp_path / "theirs")
        assert ours.config.model_type == family and ours.config.rope_scaling.rope_type == rope
        near(ours(ids()).logits, wanted)
    save_hf(ours, tmp_path / "ours")
    assert torch.equal(reopened(tmp_path / "ours", family)(ids()).logits, wanted)
    assert config_of(tmp_path / "ours") == ours.config
    if rope != "default":  # the scaling must matter, or this test would tell nothing of it
        plain = replace(ours.config, rope_scaling=RopeScaling())
        other = fast.Transformer(plain)
        other.load_state_dict(ours.state_dict())
        assert (other(ids()).logits - wanted).abs().max() > 1e-2 * wanted.abs().max()


@torch.no_grad()
@each
def test_shards_and_tied_heads(tmp_path, family):
    network = theirs(family, "yarn", tie_word_embeddings=True)
    network.save_pretrained(tmp_path / "theirs", max_shard_size="3KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 3
    ours = load_hf(tmp_path / "theirs")
    assert ours.config.tie_word_embeddings
    near(ours(ids()).logits, network(ids()).logits)
    save_hf(ours, tmp_path / "ours", max_shard_bytes=3000)
    assert torch.equal(reopened(tmp_path / "ours", family)(ids()).logits, network(ids()).logits)


@torch.no_grad()
@every
def test_bfloat16_errs_no_more_than_transformers(tmp_path, family, rope):
    """Beside float32 with the same bfloat16 weights, root mean square: at most twice transformers' error."""
    theirs(family, rope).bfloat16().save_pretrained(tmp_path)
    exact = load_hf(tmp_path, torch.float32)(ids())
    found = load_hf(tmp_path, torch.bfloat16)(ids(), experts=exact.experts or None).logits
    other = reopened(tmp_path, family, dtype=torch.bfloat16)(ids()).logits
    assert found.dtype == other.dtype == torch.bfloat16
    error, bound = ((x.float() - exact.logits).square().mean().sqrt() for x in (found, other))
    assert error <= 2 * bound


@torch.no_grad()
@every
def test_either_spelling_of_the_rotary_embedding_is_enough(tmp_path, family, rope):
    """transformers 5 reads rope_parameters, and 4 rope_theta and rope_scaling, whose type was once called `type`."""
    config = replace(config_like(family), rope_theta=5e3, rope_scaling=SCALINGS[rope])
    ours = scramble(Transformer(config))
    save_hf(ours, tmp_path)
    wanted = ours(ids()).logits
    record = json.loads((tmp_path / "config.json").read_text())
    assert record["architectures"] == [checkpoint.FAMILIES[family].architecture] and record["model_type"] == family
    spellings = [{"rope_parameters": None}, {"rope_theta": None, "rope_scaling": None}]
    if rope != "default":
        aged = {"type" if name == "rope_type" else name: value for name, value in record["rope_scaling"].items()}
        spellings.append({"rope_parameters": None, "rope_scaling": aged})
    for spelling in spellings:
        (tmp_path / "config.json").write_text(json.dumps(record))
        edit(tmp_path, **spelling)
        assert config_of(tmp_path) == config
        near(reopened(tmp_path, family)(ids()).logits, wanted)


def config_like(family: str) -> Config:
    """Our shape of a family."""
    found = checkpoint.FAMILIES[family]
    experts = dict(num_experts=4, moe_intermediate_size=8) if found.moe else dict(num_experts=0, intermediate_size=40)
    shape = dict(
        hidden_size=32,
        num_hidden_layers=2,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    return Config.tiny(V, **shape, **experts, qk_norm=found.qk_norm, attention_bias=found.attention_bias)


SILENT = ("max_position_embeddings", "rms_norm_eps", "initializer_range", "tie_word_embeddings")


@each
def test_where_a_config_is_silent_the_defaults_of_its_family_hold(tmp_path, family):
    given = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": V,
        "hidden_size": 64,
        "num_hidden_layers": 2,
    }
    given |= {
        "intermediate_size": 40,
        **({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8} if "moe" in family else {}),
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **given}))
    ours, other = config_of(tmp_path), AutoConfig.for_model(family, **given)
    assert {name: getattr(ours, name) for name in SILENT} == {name: getattr(other, name) for name in SILENT}
    assert ours.rope_theta == other.rope_parameters["rope_theta"] and ours.rope_scaling == RopeScaling()
    assert ours.head_dim == (getattr(other, "head_dim", None) or 16)
    if family == "llama":  # the first ones had as many keys as queries, and did not say so
        edit(tmp_path, num_key_value_heads=None)
        assert config_of(tmp_path).num_key_value_heads == 4


# ------------------------------------------------------------------------------ frequencies

PUBLISHED = {
    "Llama 3.1": (
        128,
        5e5,
        131_072,
        {"rope_type": "llama3", "factor": 8.0} | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        8192,
    ),
    "Llama 3.2": (
        64,
        5e5,
        131_072,
        {"rope_type": "llama3", "factor": 32.0} | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        8192,
    ),
    "Qwen2.5 for 128k": (128, 1e6, 32_768, {"rope_type": "yarn", "factor": 4.0}, 32_768),
    "Qwen3-Coder for 1M": (128, 1e7, 262_144, {"rope_type": "yarn", "factor": 4.0}, 262_144),
    "SmolLM2": (64, 1e5, 8192, {"rope_type": "default"}, None),
    "DeepSeek-Coder 6.7B": (128, 1e5, 16_384, {"rope_type": "linear", "factor": 4.0}, None),
    "another temperature": (
        64,
        1e4,
        512,
        {"rope_type": "yarn", "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.5},
        64,
    ),
    "its own temperature": (64, 1e4, 512, {"rope_type": "yarn", "factor": 8.0, "attention_factor": 0.5}, 64),
    "an exact ramp": (
        64,
        1e4,
        512,
        {"rope_type": "yarn", "factor": 8.0, "truncate": False, "beta_fast": 8, "beta_slow": 2},
        64,
    ),
    "no factor": (64, 1e4, 512, {"rope_type": "yarn", "factor": None}, 64),
    "no length": (64, 1e4, 512, {"rope_type": "yarn", "factor": 2.0}, None),
    "a step": (
        8,
        1e4,
        512,
        {"rope_type": "yarn", "factor": 2.0, "beta_fast": 2, "beta_slow": 2, "truncate": False},
        64,
    ),
}


@pytest.mark.parametrize("head_dim, theta, longest, rope, original", PUBLISHED.values(), ids=PUBLISHED)
def test_frequencies_are_those_of_transformers_to_the_last_bit(tmp_path, head_dim, theta, longest, rope, original):
    """At a position of 100,000 a last bit would be seen."""
    rope = rope | {"rope_theta": theta} | ({} if original is None else {"original_max_position_embeddings": original})
    shape = dict(SHAPE, hidden_size=4 * head_dim, max_position_embeddings=longest)
    other = AutoConfig.for_model("llama", **shape, rope_parameters=dict(rope))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **shape, "rope_parameters": rope}))
    c = config_of(tmp_path)
    found, factor = frequencies(c.head_dim, c.rope_theta, c.rope_scaling, torch.float32)
    if rope["rope_type"] == "default":
        wanted, scale = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim)), 1.0
    else:
        wanted, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](other)
    assert torch.equal(found, wanted) and factor == scale


def of(scaling: RopeScaling, pairs: int = 32, theta: float = 1e4) -> tuple[torch.Tensor, float]:
    return frequencies(2 * pairs, theta, scaling, torch.float64)


def test_linear_scaling_reads_positions_as_if_they_were_nearer():
    c = Config.tiny(rope_scaling=RopeScaling("linear", factor=4.0))
    far, near_by = (
        rope_table(config, torch.arange(0, 40 * n, n), torch.float64) for config, n in ((c, 4), (Config.tiny(), 1))
    )
    for a, b in zip(far, near_by, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_fast_pairs_keep_their_frequency_and_slow_ones_lose_the_whole_factor(kind):
    """And those in between lie in between, one after the other."""
    own, L = of(RopeScaling())[0], 4096
    share = of(RopeScaling(kind, 8.0, L))[0] / own
    turns = L * own / (2 * math.pi)
    assert (share[turns > 33] == 1).all() and (share[turns < 0.9] == 1 / 8).all()
    ramp = share[(share < 1) & (share > 1 / 8)]
    assert len(ramp) > 3 and (ramp.diff() < 0).all()


def test_the_ramp_of_llama3_is_linear_in_the_turns():
    """By hand: 2.5 turns lie midway between 1 and 4, so that the frequency is the mean of θ and θ/8."""
    L = 1000
    theta = (2.5 * 2 * math.pi / L) ** -2  # of the second pair of two: base^(−1/2)
    found = of(RopeScaling("llama3", 8.0, L), pairs=2, theta=theta)[0]
    assert found[1].item() == pytest.approx(2.5 * 2 * math.pi / L * (1 + 1 / 8) / 2, rel=1e-12)


def test_the_ramp_of_yarn_is_linear_in_the_number_of_the_pair():
    """By hand: of 8 pairs, the i-th makes 10^(4 − i/2) / 2π turns within L = 10^4. β and α are the turns of the second
    and the sixth."""
    turns = [10 ** (4 - i / 2) / (2 * math.pi) for i in range(8)]
    found = of(RopeScaling("yarn", 4.0, 10_000, beta_fast=turns[2], beta_slow=turns[6], truncate=False), pairs=8)[0]
    wanted = [
        own * (1 - (1 - 1 / 4) * min(max((i - 2) / 4, 0), 1))
        for i, own in enumerate(of(RopeScaling(), pairs=8)[0].tolist())
    ]
    assert found.tolist() == pytest.approx(wanted, rel=1e-9)


def test_yarn_sharpens_attention_as_its_paper_says():
    """√(1/t) = 0.1 ln s + 1 on queries and on keys: scores are divided by t."""
    assert (
        of(RopeScaling("yarn", 4.0, 64))[1] == 0.1 * math.log(4) + 1
        and of(RopeScaling("yarn", 4.0, 64, attention_factor=0.7))[1] == 0.7
    )
    assert {of(RopeScaling(kind, 4.0, 64))[1] for kind in ("default", "linear", "llama3")} == {1.0}
    cos, sin = rope_table(Config.tiny(rope_scaling=RopeScaling("yarn", 4.0, 64)), torch.arange(50), torch.float64)
    torch.testing.assert_close(cos.square() + sin.square(), torch.full_like(cos, (0.1 * math.log(4) + 1) ** 2))


WRONG = [
    ({"factor": 0.5}, "factor must be at least 1 and finite; got 0.5"),
    ({"factor": math.nan}, "factor must be at least 1"),
    ({"original_max_position_embeddings": 0}, "original_max_position_embeddings must be at least 1; got 0"),
    ({"low_freq_factor": 4.0}, "low_freq_factor must lie between 0 and high_freq_factor; got 4.0 and 4.0"),
    ({"beta_fast": 0.5}, "beta_slow must lie between 0 and beta_fast; got 1.0 and 0.5"),
    ({"attention_factor": 0.0}, "attention_factor must be positive and finite; got 0.0"),
]


@pytest.mark.parametrize("wrong, message", WRONG, ids=[str(wrong) for wrong, _ in WRONG])
def test_impossible_scalings_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        replace(RopeScaling("yarn", 2.0), **wrong)


# ------------------------------------------------------------------------------ decoding


def greedy(network, prompt: list[int], length: int) -> list[int]:
    """The plain network's likeliest tokens, one after the other, without a cache."""
    tokens = list(prompt)
    with torch.no_grad():
        while len(tokens) < length:
            tokens.append(int(network(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens


@every
def test_sampler_and_decoder_choose_the_tokens_of_the_plain_network(family, rope):
    """In float64, beyond the longest context of pretraining; the decoder also with drafts of layers of the same
    family."""
    torch.manual_seed(3)
    c = replace(config_like(family), rope_scaling=SCALINGS[rope])
    plain, quick = scramble(model.Transformer(c)).double(), fast.Transformer(c).double()
    quick.load_state_dict(plain.state_dict())
    prompt, length = ids(20, 1)[0].tolist(), 48
    wanted = greedy(plain, prompt, length)
    [found] = contexts_of(Sampler(quick, torch.float64), [Monologue(prompt, V)], length, temperature=0.0)
    assert found.tokens.tolist() == wanted
    layers = scramble(MTP(c, MTPConfig(depth=2, intermediate_size=16))).double()
    assert layers.config.model_type == (family if family != "qwen3_moe" else "qwen3")
    for drafts in (None, layers):
        decoder = Decoder(quick, drafts, max_len=length, dtype=torch.float64)
        decoder.feed(prompt)
        assert prompt + decoder.generate() == wanted


# ------------------------------------------------------------------------------ refusals

UNSUPPORTED = {
    "Mistral": (
        "llama",
        {"model_type": "mistral"},
        "model_type 'mistral' is not supported, only llama, qwen2, qwen3, qwen3_moe",
    ),
    "Gemma": ("llama", {"model_type": "gemma2"}, "model_type 'gemma2' is not supported"),
    "Qwen2-MoE": ("qwen2", {"model_type": "qwen2_moe"}, "model_type 'qwen2_moe' is not supported"),
    "no type": ("llama", {"model_type": None}, "model_type None is not supported"),
    "a list of types": ("llama", {"model_type": ["llama"]}, "is not supported"),
    "Llama's bias": ("llama", {"attention_bias": True}, "attention_bias is not supported"),
    "Qwen3's bias": ("qwen3", {"attention_bias": True}, "attention_bias is not supported"),
    "bias of the MLP": ("llama", {"mlp_bias": True}, "mlp_bias is not supported"),
    "a word of bias": ("llama", {"mlp_bias": "no"}, "mlp_bias must be true or false; got 'no'"),
    "window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
        "sliding-window attention is not supported",
    ),
    "window layers": (
        "qwen2",
        {"layer_types": ["full_attention", "sliding_attention"]},
        "sliding-window attention is not supported",
    ),
    "part rotation": ("llama", {"partial_rotary_factor": 0.5}, "partial rotary embedding is not supported"),
    "gelu": ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    "quantised": (
        "qwen2",
        {"quantization_config": {"quant_method": "gptq"}},
        "a quantized checkpoint is not supported",
    ),
    "uneven heads": (
        "llama",
        {"num_attention_heads": 6},
        "hidden_size must be a multiple of num_attention_heads in a Llama",
    ),
}
ROPE_FAULTS = {
    "dynamic": ({"rope_type": "dynamic", "factor": 2.0}, "rope scaling of type 'dynamic' is not supported"),
    "longrope": (
        {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
        "rope scaling of type 'longrope' is not supported",
    ),
    "su": ({"type": "su", "factor": 2.0}, "rope scaling of type 'su' is not supported"),
    "no text": ({"rope_type": ["yarn"]}, r"rope scaling of type \['yarn'\] is not supported"),
    "by layer": (
        {"full_attention": {"rope_type": "default"}},
        "a rotary embedding for each type of layer is not supported",
    ),
    "no factor": ({"type": "linear"}, "factor missing from the rope scaling of type 'linear'"),
    "half a llama": (
        {"rope_type": "llama3", "factor": 8.0},
        "low_freq_factor, high_freq_factor missing from the rope scaling of type 'llama3'",
    ),
    "factor in quotes": ({"rope_type": "yarn", "factor": "4"}, "rope_scaling.factor must be a number; got '4'"),
    "negative": ({"rope_type": "linear", "factor": -2.0}, "rope_scaling.factor must be a number; got -2.0"),
    "shorter": ({"rope_type": "linear", "factor": 0.5}, "factor must be at least 1 and finite; got 0.5"),
    "half a token": (
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0.5},
        "rope_scaling.original_max_position_embeddings must be a positive whole number; got 0.5",
    ),
    "truncate in quotes": (
        {"rope_type": "yarn", "factor": 2.0, "truncate": "no"},
        "rope_scaling.truncate must be true or false; got 'no'",
    ),
}
FAULTS = UNSUPPORTED | {
    name: ("llama", {"rope_scaling": rope}, message) for name, (rope, message) in ROPE_FAULTS.items()
}


@pytest.mark.parametrize("family, changes, message", FAULTS.values(), ids=FAULTS)
def test_what_would_be_misread_is_refused_by_name(tmp_path, family, changes, message):
    (tmp_path / "config.json").write_text(checkpoint.write_config(asdict(config_like(family)), torch.float32))
    config_of(tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message) as raised:
        config_of(tmp_path)
    assert str(tmp_path / "config.json") in str(raised.value) and "\n" not in str(raised.value)


def test_a_bias_that_belongs_to_no_family_is_named(tmp_path):
    """A Qwen2 folder that calls itself Llama: the biases are not left out in silence."""
    save_hf(Transformer(config_like("qwen2")), tmp_path)
    edit(tmp_path, model_type="llama", attention_bias=False)
    with pytest.raises(
        CheckpointError,
        match=r"tensor model.layers.0.self_attn.k_proj.bias in .* does not belong to this network \(and 5 more\)",
    ):
        load_hf(tmp_path)


def test_qwen2_has_its_biases_whatever_the_field_says(tmp_path):
    """transformers does not read attention_bias there."""
    save_hf(ours := Transformer(config_like("qwen2")), tmp_path)
    edit(tmp_path, attention_bias=False)
    assert config_of(tmp_path) == ours.config
