"""scaled = ref for the network and what is trained with it, on every layout: values and the gradient of every
parameter, float64."""

import string
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ref import cpt, mtp, quant
from ref.network import Config, Transformer, load_balancing_loss, load_hf, save_hf
from ref.network.gradients import experts_swiglu
from tests.mirror import calls
from tests.mirror.layouts import EVERY, NAMES, close, layouts, play, seeds
from tests.networks import SCALINGS, scramble

few = settings(
    max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
size = st.integers(1, 3)
V = 40


def shape(experts: int, top: int, groups: int, tied: bool) -> Config:
    return Config.tiny(
        V,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=groups,
        head_dim=8,
        intermediate_size=24,
        num_experts=experts,
        num_experts_per_tok=top,
        moe_intermediate_size=8,
        tie_word_embeddings=tied,
    )


def made(config: Config, seed: int) -> tuple[Transformer, dict]:
    torch.manual_seed(seed)
    model = Transformer(config).double()
    return model, {name: p.detach() for name, p in model.named_parameters()}


def rows(layout: dict, seed: int, n: int, size: int, packed: bool):
    """ids and, where packed, documents of odd lengths with padding at the end."""
    B, T, g = n * layout["dp"], 2 * size * layout["cp"], torch.Generator().manual_seed(seed)
    ids = torch.randint(0, V, (B, T), generator=g)
    doc = (torch.rand(B, T, generator=g) < 0.3).long().cumsum(1)
    doc[:, T - T // 4 :] = -1
    return ids, doc if packed else None


def same_gradients(found: dict, model) -> None:
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys()
    for name in wanted:
        close(found[name], wanted[name])


@few
@given(
    layouts,
    seeds,
    size,
    size,
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([shape(8, 2, 2, True), shape(4, 3, 1, False), shape(4, 1, 4, True), shape(0, 1, 2, True)]),
)
def test_forward_and_backward(layout, seed, n, size, packed, replayed, remake, explicit, config):
    """Logits, balance loss, chosen experts and every gradient; experts replayed or not, activations kept or made again,
    attention as in short rows or as in long ones."""
    model, state = made(config, seed)
    ids, doc = rows(layout, seed, n, size, packed)
    experts = None
    if replayed and config.num_experts:
        g = torch.Generator().manual_seed(seed)
        draw = torch.rand(2, *ids.shape, config.num_experts, generator=g)
        experts = list(draw.argsort(-1)[..., : config.num_experts_per_tok])
    logits, loss, picks, grads = play(layout, calls.forward, config, state, ids, doc, experts, remake, explicit)
    out = model(ids, doc=doc, experts=None if experts is None else [layer.flatten(0, 1) for layer in experts])
    wanted = (out.logits * out.logits.sin()).sum()
    if config.num_experts:
        wanted = wanted + 10 * load_balancing_loss(out.router_logits, out.experts)
    wanted.backward()
    close(logits, out.logits)
    close(loss, wanted)
    assert all(torch.equal(a.flatten(0, 1), b) for a, b in zip(picks, out.experts, strict=True))
    same_gradients(grads, model)


@pytest.mark.parametrize("layout", EVERY, ids=NAMES)
def test_one_expert_takes_all_and_others_none(layout):
    """A router that sends every token to experts 0 and 1: ranks without a row, and one with all of them."""
    config = shape(8, 2, 2, True)
    model, state = made(config, 0)
    ids, _ = rows(layout, 0, 2, 2, False)
    experts = [torch.tensor([0, 1]).expand(*ids.shape, 2)] * 2
    logits, _, _, grads = play(layout, calls.forward, config, state, ids, None, experts, False)
    out = model(ids, experts=[layer.flatten(0, 1) for layer in experts])
    ((out.logits * out.logits.sin()).sum() + 10 * load_balancing_loss(out.router_logits, out.experts)).backward()
    close(logits, out.logits)
    same_gradients(grads, model)


FAMILIES = {
    "llama": replace(shape(0, 1, 2, True), qk_norm=False),
    "qwen2": replace(shape(0, 1, 2, False), qk_norm=False, attention_bias=True, rope_scaling=SCALINGS["yarn"]),
}
DENSE = [layout for layout in EVERY if layout["dp"] * layout["cp"] > 1 and layout["ep"] == 1]
dense = pytest.mark.parametrize("layout", DENSE, ids=lambda d: "-".join(map(str, d.values())))
families = pytest.mark.parametrize("family", FAMILIES)


@dense
@families
def test_other_families(layout, family):
    """Without QK-norm, with biases that are not zero, and under YaRN, rows longer than the context of pretraining."""
    config = FAMILIES[family]
    torch.manual_seed(0)
    model = scramble(Transformer(config)).double()
    state = {name: p.detach() for name, p in model.named_parameters()}
    ids, doc = rows(layout, 1, 1, 24 // (2 * layout["cp"]), packed=family == "llama")
    logits, loss, _, grads = play(layout, calls.forward, config, state, ids, doc, None, True)
    out = model(ids, doc=doc)
    wanted = (out.logits * out.logits.sin()).sum()
    wanted.backward()
    close(logits, out.logits)
    close(loss, wanted)
    assert ("layers.1.self_attn.k_proj.bias" in grads) == (family == "qwen2")
    same_gradients(grads, model)


@pytest.mark.parametrize("layout", [dict(dp=2, cp=1, ep=1), dict(dp=2, cp=2, ep=1)], ids=str)
@families
def test_folders_of_other_families(layout, family, tmp_path):
    """Read by many ranks and written by them again: the same bits, and the same shape."""
    torch.manual_seed(0)
    model = scramble(Transformer(FAMILIES[family]))
    save_hf(model, tmp_path / "in", max_shard_bytes=5000)
    found = play(layout, calls.through_a_folder, tmp_path / "in", tmp_path / "out", torch.float32)
    again = load_hf(tmp_path / "out")
    assert (again.config.model_type, again.config.rope_scaling) == (family, model.config.rope_scaling)
    for name, p in model.named_parameters():
        assert torch.equal(found[name], p) and torch.equal(again.get_parameter(name), p)


@pytest.mark.parametrize("layout", [dict(dp=1, cp=1, ep=1), dict(dp=2, cp=1, ep=1)], ids=str)
def test_new_biases_are_zero(layout):
    found = play(layout, calls.drawn, FAMILIES["qwen2"], 0)
    biases = [x for name, x in found.items() if name.endswith(".bias")]
    assert len(biases) == 6 and not any(bool(x.any()) for x in biases)
    assert all(bool((x == 1).all()) for name, x in found.items() if "norm" in name)


@few
@given(layouts, seeds, size, size, st.booleans(), st.sampled_from(["all", "some", "none", "shares"]))
def test_next_token_loss(layout, seed, n, size, packed, weighed):
    """The target of a chunk's last token is on another rank; some ranks may have nothing to score."""
    config = shape(4, 2, 2, True)
    model, state = made(config, seed)
    ids, doc = rows(layout, seed, n, size, packed)
    g = torch.Generator().manual_seed(seed)
    weight = {
        "all": None,
        "none": torch.zeros(ids.shape),
        "some": torch.rand(ids.shape, generator=g) < 0.2,
        "shares": torch.rand(ids.shape, generator=g, dtype=torch.float64),
    }[weighed]
    loss, count, grads = play(layout, calls.next_token, config, state, ids, doc, weight)
    hidden = model(ids, doc=doc, logits=False).hidden
    wanted, scored = cpt.next_token_loss(model, hidden, ids, doc, weight)
    wanted.backward()
    close(loss, wanted)
    close(count, scored)
    same_gradients(grads, model)


class Letters:
    """A tokenizer of printable characters."""

    def encode(self, text: str):
        return type("Encoding", (), {"ids": [string.printable.index(c) % V for c in text]})

    def decode(self, ids: list[int]) -> str:
        return "".join(string.printable[i] for i in ids)


@few
@given(layouts, seeds, st.integers(2, 60), st.integers(2, 12), st.integers(1, 5), st.booleans())
def test_codebase_nll(layout, seed, length, window, batch, cut_off):
    """Windows over dp, their tokens over cp, whatever does not share out evenly filled up."""
    config = shape(4, 2, 2, True)
    model, state = made(config, seed)
    g = torch.Generator().manual_seed(seed)
    text = "".join(string.ascii_letters[i] for i in torch.randint(0, 30, (length,), generator=g))
    corpus = cpt.Corpus({"a.py": text[: length // 2], "b.py": text[length // 2 :]})
    how = dict(
        window=window, stride=max(1, window // 3), batch=batch, max_tokens=max(2, length - 3) if cut_off else None
    )
    found = play(layout, calls.perplexity, config, state, Letters(), corpus, how)
    wanted = cpt.codebase_nll(model, Letters(), corpus, **how)
    close(found[0], wanted.nll)
    assert found[1:] == (wanted.tokens, wanted.bytes)


@few
@given(
    layouts,
    seeds,
    size,
    size,
    st.booleans(),
    st.booleans(),
    st.sampled_from(["distill", "hard"]),
    st.booleans(),
    st.sampled_from([1.0, 0.5]),
    st.integers(1, 3),
)
def test_mtp_loss(layout, seed, n, size, packed, weighed, kind, detached, share, depth):
    """Every depth looks over the borders of chunks; gradients of the layers, and of the trunk where they are let
    through."""
    config, heads = shape(4, 2, 2, seed % 2 == 0), mtp.MTPConfig(depth=depth, intermediate_size=12)
    model, state = made(config, seed)
    torch.manual_seed(seed + 1)
    layers = mtp.MTP(config, heads).double()
    ids, doc = rows(layout, seed, n, size, packed)
    weight = torch.randint(0, 3, ids.shape, generator=torch.Generator().manual_seed(seed)) if weighed else None
    how = dict(kind=kind, detach_trunk=detached, share=share, chunk=7)
    given_layers = {name: p.detach() for name, p in layers.named_parameters()}
    loss, count, figures, grads, trunk = play(
        layout, calls.distilled, config, state, heads, given_layers, ids, doc, weight, how
    )
    out = model(ids, doc=doc, logits=False)
    generator = torch.Generator().manual_seed(3)
    wanted, positions, shown = mtp.mtp_loss(layers, model, out, ids, doc, weight, generator=generator, **how)
    wanted.backward()
    close(loss, wanted)
    close(count, positions)
    assert figures.keys() == shown.keys()
    for name in shown:
        close(figures[name], shown[name])
    same_gradients(grads, layers)
    if not detached:
        same_gradients(trunk, model)


@pytest.mark.parametrize("layout", [dict(dp=1, cp=2, ep=1), dict(dp=2, cp=2, ep=1)], ids=str)
def test_mtp_loss_of_another_family(layout):
    config, heads = FAMILIES["qwen2"], mtp.MTPConfig(depth=2, intermediate_size=12)
    torch.manual_seed(0)
    model, layers = scramble(Transformer(config)).double(), scramble(mtp.MTP(config, heads)).double()
    ids, _ = rows(layout, 0, 1, 24 // (2 * layout["cp"]), packed=False)
    given = [{name: p.detach() for name, p in module.named_parameters()} for module in (model, layers)]
    loss, _, _, grads, _ = play(layout, calls.distilled, config, given[0], heads, given[1], ids, None, None, {})
    wanted, _, _ = mtp.mtp_loss(layers, model, model(ids, logits=False), ids)
    wanted.backward()
    close(loss, wanted)
    same_gradients(grads, layers)


def no_worse(found, ref, exact) -> bool:
    """Whether the error, of the whole tensor, is at most twice the reference's; the last rounding of a result is
    nobody's."""
    last = torch.finfo(ref.dtype).eps / 2 * exact.norm()
    return bool((found.double() - exact).norm() <= 2 * (ref.double() - exact).norm() + last)


@pytest.mark.parametrize("layout", [d for d in EVERY if d["ep"] > 1], ids=lambda d: "-".join(map(str, d.values())))
def test_eight_bit_dispatch(layout):
    """Rows travel in at most 0.52 of bfloat16's bytes; and the logits are as near to float64's as those of a network in
    bfloat16 whose experts read rows in FP8 or MXFP8, where that rounding is most of the error. Every pass replays the
    same experts."""
    config = Config.tiny(
        V,
        hidden_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=8,
        moe_intermediate_size=16,
        initializer_range=0.3,
    )
    model, state = made(config, 0)
    ids = torch.randint(0, V, (4, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact = model.bfloat16().double()(ids)
        model.bfloat16()
        theirs = [model(ids, experts=exact.experts).logits]
        mix = model.layers[0].mlp.mix
        for form in ("fp8", "mxfp8"):
            model.layers[0].mlp.mix = lambda x, *chosen, form=form: mix(quant.rounded(x, form).to(x.dtype), *chosen)
            theirs.append(model(ids, experts=exact.experts).logits)
    plain, *eighths = ((x.double() - exact.logits).norm() for x in theirs)
    assert min(eighths) > 2 * plain, "eight bits must be most of the error"
    experts = [layer.view(*ids.shape, -1) for layer in exact.experts]
    ours = [
        play(layout, calls.sent, config, state, ids, experts, how)
        for how in (("model", "model"), ("fp8", "bf16"), ("mxfp8", "bf16"))
    ]
    ranks, ep = layout["dp"] * layout["cp"], layout["ep"]
    counts = ranks * 8 * 8 * (ep - 1) // ep  # a number of rows for each of 8 experts
    crossing, rest = divmod(ours[0][1] - counts, 2 * 2 * 128)  # bfloat16 there and back
    assert crossing > 0 and rest == 0
    assert ours[1][1] == counts + crossing * (128 + 4 + 2 * 128)  # codes and one float32 scale there, bfloat16 back
    assert ours[2][1] == ours[1][1]  # codes and four scales of a byte
    assert 128 + 4 <= 0.52 * 2 * 128
    assert all(no_worse(found, ref, exact.logits) for (found, _), ref in zip(ours, theirs, strict=True))


def few_bits(g: torch.Generator, *shape: int, unit: int = 1, axis: int = -1, by: int = -1) -> torch.Tensor:
    """Whole numbers of 4 bits, ±7 twice in every 32 of `axis`; then those that differ along `by` differ by up to 2^±3.
    Scales of every format are powers of two of the `unit`, and products of two such tensors along `axis` are exact in
    float32, in whatever order they are added."""
    x = torch.randint(-7, 8, shape, generator=g).movedim(axis, -1)
    x[..., ::16] = 7 * (2 * torch.randint(0, 2, x[..., ::16].shape, generator=g) - 1)
    size = [n if i == by % len(shape) else 1 for i, n in enumerate(shape)]
    return unit * x.movedim(-1, axis) * torch.exp2(torch.randint(-3, 4, size, generator=g).float())


@pytest.mark.parametrize("layout", [dict(dp=2, cp=1, ep=2), dict(dp=2, cp=2, ep=4), dict(dp=2, cp=2, ep=2)], ids=str)
@pytest.mark.parametrize("dispatch", ["model", "fp8", "mxfp8"])
@pytest.mark.parametrize("crowded", [False, True])
def test_dispatch_from_ranks_without_a_token(layout, dispatch, crowded):
    """Rank 0 has them all, and where crowded its own experts get them all, so that nothing is sent or received
    anywhere: the mixture of what is left of the rows in eight bits, whose gradient is the rows'."""
    g = torch.Generator().manual_seed(0)
    x, w13, w2 = (
        torch.randn(*size, generator=g, dtype=torch.float64) for size in ((6, 130), (8, 32, 130), (8, 130, 16))
    )
    gates = torch.rand(6, 2, generator=g, dtype=torch.float64)
    experts = torch.rand(6, 2 if crowded else 8, generator=g).argsort(-1)[:, :2]
    found = play(layout, calls.of_the_first, x, gates, w13, w2, experts, (dispatch, "model"))
    sent = x if dispatch == "model" else quant.rounded(x, dispatch).double()
    whole = [t.clone().requires_grad_() for t in (sent, gates, w13, w2)]
    y = experts_swiglu(*whole, experts)
    (y * torch.linspace(-1, 1, 130)).sum().backward()
    for one, wanted in zip(found, (y, *(t.grad for t in whole)), strict=True):
        close(one, wanted)


def test_the_host_waits_once_for_a_layers_dispatch():
    x, gates, experts = torch.randn(6, 4), torch.rand(6, 2), torch.arange(12).view(6, 2) % 8
    assert play(dict(dp=2, cp=1, ep=2), calls.waits_of_the_host, x, gates, experts, 8) == (1, [])


@few
@given(
    layouts,
    seeds,
    st.integers(1, 3),
    st.sampled_from(["nvfp4-token", "mxfp8", "fp8", "float32"]),
    st.sampled_from(["mxfp8", "fp8", "float32"]),
)
def test_quantised_experts(layout, seed, n, forward, backward):
    """Rows are quantised where their experts are as they would be at home; the weights' gradients round blocks of an
    expert's rows, the same blocks where one group of ranks has all of them. Between two products stands a rounding, and
    a sum in another order could tip a value over its edge. So what is rounded there is exact, and what is left is the
    order of the last sums: no worse than the reference beside float64."""
    world, g = layout["dp"] * layout["cp"], torch.Generator().manual_seed(seed)
    N, D, E, K, width = 16 * n * world, 32, 8, 2, 32
    unit = 3 if forward == "nvfp4-token" else 1  # 448 · 6 is 21 · 2^7, and 448 is 7 · 2^6
    x, w13 = few_bits(g, N, D, unit=unit, by=0) / 16, few_bits(g, E, 2 * width, D, unit=unit, by=1) / 64
    w2, up = few_bits(g, E, D, width, axis=1, by=2) / 32, few_bits(g, 1, D, by=0)[0]
    gates, experts = (
        torch.exp2(-torch.randint(0, 4, (N, K), generator=g).float()),
        torch.rand(N, E, generator=g).argsort(-1)[:, :K],
    )
    values, weights = play(layout, calls.quantised, x, gates, w13, w2, experts, up, forward, backward)

    def whole(dtype):
        leaves = [t.to(dtype).requires_grad_() for t in (x, gates, w13, w2)]
        y = quant.experts_swiglu(*leaves, experts, forward, backward)
        return y.detach(), *torch.autograd.grad((y * up).sum(), leaves)

    found = [*values, *(weights if layout["ep"] == world or backward == "float32" else ())]
    for a, b, c in zip(found, whole(torch.float32), whole(torch.float64), strict=False):
        assert no_worse(a, b, c)
