"""The network against transformers' in both directions, and against itself on every road that should give the
same numbers."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

import ref.network.fast
from ref.engine.layout import Rows
from ref.network import Config, KVCache, RopeScaling, Transformer, load_balancing_loss, load_hf, save_hf
from ref.network.checkpoint import ROPE_FIELDS
from tests.networks import configs, same, scramble

PLAIN_EXPERTS = {"experts_implementation": "eager"}
"""transformers' default, grouped_mm, refuses odd sizes."""

slow_to_draw = settings(
    max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def theirs_of(c: Config) -> torch.nn.Module:
    """transformers' own network of the same shape, weights its own."""
    scaling = {name: getattr(c.rope_scaling, name) for name in ("rope_type", *ROPE_FIELDS[c.rope_scaling.rope_type])}
    shape = dict(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_hidden_layers,
        num_attention_heads=c.num_attention_heads,
        head_dim=c.head_dim,
        num_key_value_heads=c.num_key_value_heads,
        rms_norm_eps=c.rms_norm_eps,
        tie_word_embeddings=c.tie_word_embeddings,
        max_position_embeddings=64,
        rope_parameters={"rope_theta": c.rope_theta}
        | {name: value for name, value in scaling.items() if value is not None},
    )
    if c.num_experts:
        shape |= dict(
            num_experts=c.num_experts,
            num_experts_per_tok=c.num_experts_per_tok,
            moe_intermediate_size=c.moe_intermediate_size,
            norm_topk_prob=c.norm_topk_prob,
            **PLAIN_EXPERTS,
        )
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(c.model_type, **shape))


def some_ids(c: Config, batch: int = 2, length: int = 9) -> torch.Tensor:
    return torch.randint(0, c.vocab_size, (batch, length))


def model_and_ids(c: Config, batch: int = 2, length: int = 9, dtype=torch.float64):
    torch.manual_seed(1)
    return scramble(Transformer(c)).to(dtype), some_ids(c, batch, length)


# ------------------------------------------------------------------------------ transformers


@slow_to_draw
@given(configs(), st.sampled_from([1, 13]))
def test_transformers_reads_what_we_write(tmp_path_factory, c, length):
    path = tmp_path_factory.mktemp("ours")
    model = scramble(Transformer(c))
    save_hf(model, path)
    theirs = AutoModelForCausalLM.from_pretrained(path, **PLAIN_EXPERTS)
    assert theirs.dtype == torch.float32
    ids = some_ids(c, length=length)
    same(model(ids).logits, theirs(ids).logits, atol=1e-5)


@slow_to_draw
@given(configs(), st.booleans(), st.sampled_from(["5GB", "3KB"]))
def test_we_read_what_transformers_writes(tmp_path_factory, c, per_expert, shard_size):
    path = tmp_path_factory.mktemp("theirs")
    theirs = scramble(theirs_of(c))
    theirs.save_pretrained(path, max_shard_size=shard_size, save_original_format=per_expert)
    model, ids = load_hf(path), some_ids(c, length=13)
    same(model(ids).logits, theirs(ids).logits, atol=1e-5)
    changed = ("router_aux_loss_coef", "initializer_range", "intermediate_size")
    assert replace(model.config, **{name: getattr(c, name) for name in changed}) == c


def test_gradients_are_those_of_transformers(tmp_path):
    c = Config.tiny(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, head_dim=8, num_experts=4, moe_intermediate_size=24
    )
    model = scramble(Transformer(c))
    save_hf(model, tmp_path / "m")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float64, **PLAIN_EXPERTS)
    model, ids = model.double(), some_ids(c, 3, 12)
    theirs(ids, labels=ids).loss.backward()
    out = model(ids, logits=False)
    loss = -model.logprob(out.hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).mean()
    loss.backward()
    named = dict(theirs.named_parameters())
    for name, parameter in model.named_parameters():
        name = "model." + name.replace("mlp.gate_up_proj", "mlp.experts.gate_up_proj")
        name = name.replace("mlp.down_proj", "mlp.experts.down_proj")
        same(parameter.grad, named[name].grad, atol=1e-7)  # transformers computes norms, router and rotation in float32


def test_bfloat16_is_as_close_to_float64_as_transformers(tmp_path):
    c = Config.tiny(vocab_size=50, hidden_size=64, num_hidden_layers=2)
    model, ids = scramble(Transformer(c)), some_ids(c, 4, 16)
    save_hf(model.bfloat16(), tmp_path / "m")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert theirs.dtype == torch.bfloat16
    with torch.no_grad():
        exact = load_hf(tmp_path / "m", torch.float64)(ids)
        out = load_hf(tmp_path / "m", torch.bfloat16)(ids, experts=exact.experts).logits
        bound = 2 * (theirs(ids).logits - exact.logits).abs().mean()
    assert (out - exact.logits).abs().mean() <= bound


# ------------------------------------------------------------------------------ parameter counts


def counted(c: Config) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Transformer(c).parameters())


@pytest.mark.parametrize(
    "c",
    [
        Config.tiny(),
        Config.tiny(num_experts=0),
        Config.tiny(tie_word_embeddings=False),
        Config.qwen3_30b_a3b(),
        Config.tiny(num_experts=0, qk_norm=False, attention_bias=True),
        Config.tiny(num_experts=0, qk_norm=False),
    ],
    ids=["tiny", "dense", "untied", "30b", "qwen2", "llama"],
)
def test_parameters(c):
    assert counted(c) == c.parameters()


def test_parameters_of_qwen3_30b_a3b():
    c = Config.qwen3_30b_a3b()
    assert counted(c) == c.parameters() == 30_532_122_624
    # A token meets the router of every layer and the weights of 8 experts.
    unused = c.num_hidden_layers * (c.num_experts - c.num_experts_per_tok) * 3 * c.hidden_size * c.moe_intermediate_size
    assert counted(c) - unused == c.parameters(active=True) == 3_353_032_704


def test_dense_uses_all_it_has():
    c = Config.tiny(num_experts=0)
    assert c.parameters(active=True) == c.parameters()


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"num_key_value_heads": 3}, "multiple"),
        ({"num_experts_per_tok": 9}, "between 1 and num_experts"),
        ({"num_experts_per_tok": 0}, "between 1 and num_experts"),
        ({"head_dim": 7}, "even"),
        ({"qk_norm": False}, "none is with experts, without qk_norm and without attention_bias"),
        ({"attention_bias": True}, "none is with experts, with qk_norm and with attention_bias"),
        ({"num_experts": 0, "attention_bias": True}, "none is without experts, with qk_norm and with attention_bias"),
        (
            {"num_experts": 0, "qk_norm": False, "hidden_size": 30},
            "hidden_size must be a multiple of num_attention_heads in a Llama",
        ),
        ({"rope_scaling": RopeScaling("yarn", 2.0), "rope_theta": 1.0}, "rope_theta must be greater than 1 for yarn"),
    ],
)
def test_impossible_shapes_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Config.tiny(**wrong)


# ------------------------------------------------------------------------------ key-value cache


def in_chunks(model, ids, cache, sizes) -> torch.Tensor:
    return torch.cat([model(part, cache=cache).logits for part in ids.split(sizes, 1)], 1)


@slow_to_draw
@given(configs(), st.sampled_from([[1] * 9, [4, 1, 4], [9], [1, 8], [7, 2]]))
def test_cached_is_uncached(c, sizes):
    model, ids = model_and_ids(c)
    with torch.no_grad():
        same(in_chunks(model, ids, KVCache(c, 2, 9, torch.float64), sizes), model(ids).logits)


@slow_to_draw
@given(configs(), st.integers(0, 9))
def test_rows_laid_out_to_decode_give_the_networks_numbers(c, prefill):
    model, ids = model_and_ids(c, batch=3)
    cache, rows, hidden, chosen = KVCache(c, 3, 9, torch.float64), Rows(model, 9), [], []
    with torch.no_grad():
        whole = model(ids)
        if prefill:
            model(ids[:, :prefill], cache=cache)
        for t in range(prefill, 9):
            one, experts = rows.step(ids[:, t], cache)
            hidden.append(one)
            chosen.append(experts)
    assert cache.length == 9
    for t, (one, experts) in enumerate(zip(hidden, chosen, strict=True), prefill):
        same(one, whole.hidden[:, t])
        for mine, theirs in zip(experts, whole.experts, strict=True):
            assert torch.equal(mine, theirs.view(3, 9, -1)[:, t])


@slow_to_draw
@given(configs(), st.integers(0, 6))
def test_truncated_cache_forgets(c, keep):
    model, ids = model_and_ids(c)
    other = (ids + 1) % c.vocab_size
    cache = KVCache(c, 2, 12, torch.float64)
    with torch.no_grad():
        model(torch.cat((ids[:, :keep], other[:, keep:]), 1), cache=cache)
        cache.truncate(keep)
        same(model(ids[:, keep:], cache=cache).logits, model(ids).logits[:, keep:])
        assert cache.length == 9
    cache.truncate(50)
    assert cache.length == 9, "truncation never lengthens"


@pytest.mark.parametrize("rows", [[2, 0], [1], [0, 0, 2, 1]])
def test_selected_rows_go_on(rows):
    c = Config.tiny(vocab_size=30, hidden_size=16, num_hidden_layers=2, head_dim=4)
    model, ids = model_and_ids(c, batch=3)
    cache = KVCache(c, 3, 9, torch.float64)
    with torch.no_grad():
        model(ids[:, :5], cache=cache)
        cache.select(torch.tensor(rows))
        same(model(ids[rows, 5:], cache=cache).logits, model(ids).logits[rows, 5:])


def test_full_cache_says_so():
    c = Config.tiny(vocab_size=30)
    model, ids = model_and_ids(c)
    with pytest.raises(ValueError, match="KV cache is full: 9 positions asked of 8"):
        model(ids, cache=KVCache(c, 2, 8, torch.float64))


# ------------------------------------------------------------------------------ packed documents


@slow_to_draw
@given(configs(), st.lists(st.integers(1, 6), min_size=1, max_size=4), st.booleans(), st.booleans())
def test_packed_documents_are_documents_alone(monkeypatch, c, lengths, explicit_positions, explicit_attention):
    monkeypatch.setattr(ref.network.fast, "EXPLICIT_ATTENTION", 512 * 512 if explicit_attention else 0)
    model, ids = model_and_ids(c, batch=2, length=sum(lengths))
    doc = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).expand(2, -1)
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1) if explicit_positions else None
    packed = model(ids, positions=positions, doc=doc).logits
    alone = torch.cat([model(part).logits for part in ids.split(lengths, 1)], 1)
    same(packed, alone)


def test_rows_may_be_packed_differently():
    c = Config.tiny(vocab_size=30, hidden_size=16, num_hidden_layers=2, head_dim=4)
    model, ids = model_and_ids(c, batch=2, length=6)
    doc = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 3]])
    packed = model(ids, doc=doc).logits
    same(packed[0, 2:], model(ids[:1, 2:]).logits[0])
    same(packed[1, :5], model(ids[1:, :5]).logits[0])
    same(packed[1, 5:], model(ids[1:, 5:]).logits[0])


def test_packing_behind_a_cache_is_refused():
    c = Config.tiny(vocab_size=30)
    model, ids = model_and_ids(c)
    cache = KVCache(c, 2, 20, torch.float64)
    model(ids, cache=cache)
    with pytest.raises(ValueError, match="packed documents"):
        model(ids, cache=cache, doc=torch.zeros_like(ids))


# ------------------------------------------------------------------------------ roads of equal length


@slow_to_draw
@given(configs(), st.sampled_from([1, 2, 31]))
def test_explicit_attention_is_the_librarys(monkeypatch, c, length):
    model, ids = model_and_ids(c, length=length)
    weight = torch.randn(2, length, c.hidden_size, dtype=torch.float64)
    results = []
    for limit in (512 * 512, 0):
        monkeypatch.setattr(ref.network.fast, "EXPLICIT_ATTENTION", limit)
        hidden = model(ids, logits=False).hidden
        results.append((hidden.detach(), torch.autograd.grad((hidden * weight).sum(), model.layers.parameters())))
    (one, one_grads), (two, two_grads) = results
    same(one, two)
    for a, b in zip(one_grads, two_grads, strict=True):
        same(a, b)


@slow_to_draw
@given(configs(moe=True), st.sampled_from([1, 2]))
def test_all_experts_at_once_are_sorted_experts(c, tokens):
    model, _ = model_and_ids(c)
    moe, x = model.layers[0].mlp, torch.randn(tokens, c.hidden_size, dtype=torch.float64)
    sorted_road = moe(x)
    with torch.no_grad():
        _, gates, experts = moe.route(x, None)
        same(moe.all_experts(x, gates, experts), sorted_road[0])
        same(moe(x)[0], sorted_road[0])


def test_prenorm_hidden_and_head_fit_together():
    c = Config.tiny(vocab_size=30)
    model, ids = model_and_ids(c)
    out = model(ids)
    same(model.norm(out.prenorm), out.hidden)
    same(model.head(out.hidden), out.logits)
    logp = model.logprob(out.hidden.flatten(0, 1), ids.flatten(), chunk=7)
    same(logp, out.logits.log_softmax(-1).flatten(0, 1).gather(1, ids.view(-1, 1))[:, 0])
    assert model(ids, logits=False).logits is None


def test_explicit_positions_turn_the_heads():
    """Only differences of positions matter, and they do."""
    c = Config.tiny(vocab_size=30)
    model, ids = model_and_ids(c)
    plain, positions = model(ids).logits, torch.arange(9).expand(2, -1)
    same(model(ids, positions=positions + 100).logits, plain)
    assert (model(ids, positions=positions * 3).logits - plain).abs().max() > 1e-3


def test_two_runs_give_the_same_bits():
    c = Config.tiny(vocab_size=100)
    model, ids = scramble(Transformer(c)).bfloat16(), some_ids(c, 4, 64)
    runs = []
    for _ in range(2):
        model.zero_grad()
        out = model(ids, logits=False)
        model.logprob(out.hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).mean().backward()
        runs.append([out.hidden.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


# ------------------------------------------------------------------------------ routing


@slow_to_draw
@given(configs(moe=True))
def test_supplied_experts(c):
    model, ids = model_and_ids(c)
    own = model(ids)
    assert [r.shape for r in own.router_logits] == [(18, c.num_experts)] * c.num_hidden_layers
    assert [e.shape for e in own.experts] == [(18, c.num_experts_per_tok)] * c.num_hidden_layers
    assert all(len(set(row)) == len(row) for row in own.experts[0].tolist())
    same(own.experts[0].sort()[0], own.router_logits[0].topk(c.num_experts_per_tok)[1].sort()[0])
    replayed = model(ids, experts=own.experts)
    same(replayed.logits, own.logits)
    assert all(torch.equal(a, b) for a, b in zip(replayed.experts, own.experts, strict=True))


def test_other_experts_change_the_result_and_teach_this_router():
    c = Config.tiny(vocab_size=30, num_experts=6, num_hidden_layers=2, hidden_size=16, head_dim=4)
    model, ids = model_and_ids(c)
    own = model(ids)
    other = [(e + 1) % c.num_experts for e in own.experts]
    forced = model(ids, experts=other)
    assert (forced.logits - own.logits).abs().max() > 1e-3
    assert all(torch.equal(a, b) for a, b in zip(forced.experts, other, strict=True))
    grads = torch.autograd.grad(forced.logits.square().sum(), [layer.mlp.gate.weight for layer in model.layers])
    assert all(g.abs().max() > 0 for g in grads)


def test_dense_blocks_route_nothing():
    c = Config.tiny(vocab_size=30, num_experts=0)
    model, ids = model_and_ids(c)
    assert model(ids).router_logits == [] and model(ids).experts == []


def test_load_balancing_loss_is_1_when_balanced_and_E_when_collapsed():
    E, N = 4, 12
    spread = torch.arange(N)[:, None] % E
    even = torch.zeros(N, E)
    torch.testing.assert_close(load_balancing_loss([even, even], [spread, spread]), torch.tensor(1.0))
    one_way = torch.full((N, E), -1e4).index_fill(1, torch.tensor([2]), 0.0)
    collapsed = torch.full((N, 1), 2)
    torch.testing.assert_close(load_balancing_loss([one_way], [collapsed]), torch.tensor(float(E)))
    torch.testing.assert_close(load_balancing_loss([even, one_way], [spread, collapsed]), torch.tensor((1.0 + E) / 2))


def test_load_balancing_loss_pushes_towards_the_idle():
    logits = torch.zeros(6, 3, requires_grad=True)
    load_balancing_loss([logits], [torch.tensor([[0], [0], [0], [0], [1], [1]])]).backward()
    busy, middle, idle = logits.grad.sum(0)
    assert busy > middle > idle and busy > 0 > idle


# ------------------------------------------------------------------------------ initial weights


@pytest.mark.parametrize("experts, bias", [(4, False), (0, False), (0, True)], ids=["moe", "dense", "biases"])
def test_initial_weights_have_their_deviation_and_outputs_into_the_residual_stream_a_smaller_one(experts, bias):
    """σ, and σ/√(2L) for the two outputs of each of L layers; norms are ones, and biases zeros."""
    family = dict(num_experts=experts, qk_norm=not bias, attention_bias=bias)
    c = Config.tiny(vocab_size=200, num_hidden_layers=8, initializer_range=0.5, tie_word_embeddings=False, **family)
    for name, p in Transformer(c).named_parameters():
        if p.ndim == 1:
            assert (p == (0 if name.endswith(".bias") else 1)).all(), name
        else:
            wanted = 0.5 / 4 if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")) else 0.5
            sure = 5 * wanted / (2 * p.numel()) ** 0.5  # five standard errors of a standard deviation
            assert abs(p.std().item() - wanted) < sure and abs(p.mean().item()) < 2 * sure, name


def test_load_balancing_loss_counts_assignments_not_tokens():
    """Two experts a token: shares are of 2N assignments, so that balance is 1 for any K; by hand where it is not
    balanced."""
    E, N = 4, 8
    chosen = torch.stack((torch.arange(N) % E, (torch.arange(N) + 1) % E), 1)
    torch.testing.assert_close(load_balancing_loss([torch.zeros(N, E)], [chosen]), torch.tensor(1.0))
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.25, 0.5, 0.125, 0.125]]).log()
    wanted = 4 * (0.5 * 0.375 + 0.25 * 0.375 + 0.25 * 0.125)
    torch.testing.assert_close(load_balancing_loss([logits], [torch.tensor([[0, 1], [0, 2]])]), torch.tensor(wanted))
