"""The plan's counts against what ranks really hold and really send."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from etude.plan import published
from ref.network import Config, Transformer, fast
from ref.network.model import rope_table
from scaled.plan import HARDWARE, eager_bytes, plan
from scaled.runtime.mesh import Layout
from tests.mirror import calls
from tests.mirror.layouts import EVERY, NAMES, play

SHAPES = {
    "experts": Config.tiny(
        50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        moe_intermediate_size=16,
    ),
    "odd": Config.tiny(
        51,
        hidden_size=18,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=6,
        num_experts=4,
        moe_intermediate_size=10,
        tie_word_embeddings=False,
    ),
    "dense": Config.tiny(
        50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=0,
        intermediate_size=24,
    ),
    "biases": Config.tiny(
        50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=0,
        intermediate_size=24,
        qk_norm=False,
        attention_bias=True,
    ),
    "wide": Config.tiny(50, hidden_size=128, num_hidden_layers=3),
}


@pytest.mark.parametrize(
    "shape, layout",
    [
        pytest.param(shape, layout, id=f"{shape}-{name}")
        for number, (layout, name) in enumerate(zip(EVERY, NAMES, strict=True))
        for shape in ("experts", ("odd", "dense", "biases")[number % 3])
    ],
)
def test_bytes_sent(shape, layout):
    """Every byte of FSDP, context and expert parallelism, on every rank, to the last one: counted by what went through
    torch.distributed, with the routing that there was; activations kept, and made again."""
    config = SHAPES[shape]
    torch.manual_seed(0)
    state = {name: p.detach().double() for name, p in Transformer(config).named_parameters()}
    ids = torch.randint(0, 50, (4, 16), generator=torch.Generator().manual_seed(1))
    if layout["dp"] * layout["cp"] == 1:
        assert plan(config, Layout(), 4, 16, computed=4).fsdp == 0
        return
    for remake, sent, rows in play(layout, calls.traffic, config, state, ids):
        crossing = [out + came for out, came in rows] or [0]
        found = plan(config, Layout(**layout), 4, 16, computed=4, crossing=0, remake=remake)
        experts = found.experts + sum((3 if remake else 2) * each * config.hidden_size * 4 for each in crossing)
        assert sent.get("allgather_base", 0) + sent.get("reduce_scatter_base", 0) == found.fsdp + found.attention
        assert sent.get("alltoall_base", 0) == experts
        assert set(sent) <= {"allgather_base", "reduce_scatter_base", "alltoall_base"}


@pytest.mark.parametrize("layout", [dict(dp=2, cp=1, ep=1), dict(dp=2, cp=2, ep=2)], ids=str)
@pytest.mark.parametrize("shape", ["experts", "dense"])
def test_bytes_sent_with_adapters(shape, layout):
    """Frozen weights are gathered, and send no gradients."""
    config, ids = SHAPES[shape], torch.randint(0, 50, (4, 16), generator=torch.Generator().manual_seed(1))
    for remake, sent, _ in play(layout, calls.traffic, config, None, ids, 4):
        planned = plan(config, Layout(**layout), 4, 16, computed=4, crossing=0, remake=remake, lora=4)
        assert sent.get("allgather_base", 0) + sent.get("reduce_scatter_base", 0) == planned.fsdp + planned.attention


@pytest.mark.parametrize("layout", EVERY, ids=NAMES)
def test_parameters_held(layout):
    config = SHAPES["odd"]
    held = play(layout, calls.held, config)
    assert max(held) == plan(config, Layout(**layout), 4, 16).parameters_held or layout["dp"] * layout["cp"] > 1
    assert max(held) <= plan(config, Layout(**layout), 4, 16).parameters_held <= max(held) * 1.25
    assert sum(held) == config.parameters()


@pytest.mark.parametrize(
    "layout", [dict(dp=1, cp=1, ep=1), dict(dp=2, cp=1, ep=1), dict(dp=2, cp=1, ep=2), dict(dp=4, cp=1, ep=4)], ids=str
)
@pytest.mark.parametrize("shape", ["experts", "dense", "biases", "wide"])
def test_memory(shape, layout):
    """State to the byte (padding aside), and with what autograd keeps, within 10%. Rows are long enough for attention
    without stored weights."""
    config = SHAPES[shape]
    ids = torch.randint(0, 50, (4, 1024), generator=torch.Generator().manual_seed(1))
    found = plan(config, Layout(**layout), 4, 1024, computed=4, remake=False)
    ranks = play(layout, calls.kept, config, ids, False)
    for state, *_ in ranks:
        assert state <= found.weights + found.gradients + found.moments <= 1.05 * state
    # Which rank gets how many expert rows is the router's doing, and a network that learnt nothing deals them unevenly:
    # the mean.
    activations = sum(kept for _, kept, _ in ranks) / len(ranks)
    assert activations == pytest.approx(found.activations, rel=0.1)


@pytest.mark.parametrize("layout", [dict(dp=1, cp=1, ep=1), dict(dp=2, cp=1, ep=1)], ids=str)
@pytest.mark.parametrize("shape", ["experts", "dense", "wide"])
def test_memory_with_adapters(shape, layout):
    """Gradients and moments of the adapters alone, whose inputs autograd keeps as those of all weights."""
    config = SHAPES[shape]
    ids = torch.randint(0, 50, (4, 1024), generator=torch.Generator().manual_seed(1))
    planned, whole = (plan(config, Layout(**layout), 4, 1024, computed=4, remake=False, lora=lora) for lora in (4, 0))
    assert planned.moments < whole.moments / 2
    ranks = play(layout, calls.kept, config, ids, False, None, 4)
    for state, *_ in ranks:
        assert state <= planned.weights + planned.gradients + planned.moments <= 1.05 * state
    activations = sum(kept for _, kept, _ in ranks) / len(ranks)
    assert activations == pytest.approx(planned.activations, rel=0.1)


def packed(length: int, longest: int) -> torch.Tensor:
    """The documents [1, length] of a packed row, of unlike lengths."""
    cuts = torch.randint(1, longest, (4 * length // longest,), generator=torch.Generator().manual_seed(0)).cumsum(0)
    return torch.bucketize(torch.arange(length), cuts, right=True)[None]


@pytest.mark.parametrize(
    "layout", [dict(dp=1, cp=1, ep=1), dict(dp=1, cp=2, ep=1), dict(dp=1, cp=2, ep=2), dict(dp=1, cp=4, ep=1)], ids=str
)
@pytest.mark.parametrize("shape", ["experts", "dense"])
def test_memory_of_a_packed_row(shape, layout):
    """What autograd keeps, within 10%: no mask."""
    config, length = SHAPES[shape], 4096
    found = plan(config, Layout(**layout), 1, length, computed=4, remake=False)
    ids = torch.randint(0, 50, (1, length), generator=torch.Generator().manual_seed(1))
    ranks = play(layout, calls.kept, config, ids, False, packed(length, 512))
    assert sum(kept for _, kept, _ in ranks) / len(ranks) == pytest.approx(found.activations, rel=0.1)


def test_a_packed_row_of_131072_tokens():
    """Both passes on two ranks that share the row. A mask would take 8.6 GB on each of them."""
    config, length, layout = SHAPES["dense"], 131_072, dict(dp=1, cp=2, ep=1)
    found = plan(config, Layout(**layout), 1, length, computed=4, remake=False)
    ids = torch.randint(0, 50, (1, length), generator=torch.Generator().manual_seed(1))
    for _, kept, grown in play(layout, calls.kept, config, ids, False, packed(length, 4096)):
        assert kept == pytest.approx(found.activations, rel=0.1)
        assert grown < 2 * found.activations  # with what the backward pass works in, which the plan does not count


class BetweenProducts(TorchDispatchMode):
    """Counts the bytes that operations other than products and attention read and write; views move none."""

    PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "_grouped_mm", "_scaled_dot_product", "linear")
    NOTHING_MOVED = ("empty", "new_empty", "empty_like", "arange", "_local_scalar_dense", "detach", "lift_fresh")

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out, name = func(*args, **(kwargs or {})), func._schema.name.split("::")[1]
        inputs, outputs = (
            [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)] for tree in ((args, kwargs), out)
        )
        held = {x.untyped_storage().data_ptr() for x in inputs}
        is_view = not name.endswith("_") and all(x.untyped_storage().data_ptr() in held for x in outputs)
        if not is_view and not name.startswith(self.PRODUCTS) and name not in self.NOTHING_MOVED:
            self.bytes += sum(x.numel() * x.element_size() for x in (*inputs, *outputs) if 0 not in x.stride())
        return out


def between_products(config: Config, tokens: int) -> int:
    torch.manual_seed(0)
    block = fast.Transformer(config).bfloat16().layers[0]
    x = torch.randn(1, tokens, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    rope = rope_table(config, torch.arange(tokens), torch.bfloat16)
    block(x, rope)[0].sum().backward()  # the first gradients of weights are allocated, the next ones added
    with BetweenProducts() as counted:
        y = block(x, rope)[0]
        torch.autograd.backward([y], [torch.ones_like(y)])
    return counted.bytes


@pytest.mark.parametrize(
    "widths",
    [
        dict(hidden_size=256, num_attention_heads=8, num_key_value_heads=2, head_dim=32, num_experts=16,
             num_experts_per_tok=4, moe_intermediate_size=128),
        dict(hidden_size=192, num_attention_heads=4, num_key_value_heads=4, head_dim=64, num_experts=32,
             num_experts_per_tok=2, moe_intermediate_size=64),
        dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=0,
             intermediate_size=768),
    ],
    ids=["experts", "few-experts", "dense"],
)  # fmt: skip
def test_bytes_between_products(widths, monkeypatch):
    """Of two lengths, whose difference is that of the tokens: what a layer's weights take is in both."""
    monkeypatch.setattr(fast, "EXPLICIT_ATTENTION", 0)
    config = Config.tiny(64, num_hidden_layers=1, **widths)
    counted = (between_products(config, 512) - between_products(config, 256)) / 256
    assert eager_bytes(config, 1, False, 2) == pytest.approx(counted, rel=0.1)
    once, again = (eager_bytes(config, 1, remake, 2) for remake in (False, True))
    assert 1.25 * once < again < 1.45 * once  # the forward pass is about a third


def test_published_runs_are_planned_within_their_factor():
    """And the committed table is that of this code."""
    rows = published.compare()
    assert len(rows) >= 5 and all(1 / published.FACTOR <= row["ratio"] <= published.FACTOR for row in rows)
    assert all(0.6 * row["planned"] < row["eager"] < row["planned"] for row in rows)
    stored = json.loads((Path(__file__).resolve().parents[2] / "results" / "published-plan.json").read_text())
    assert stored == json.loads(json.dumps(rows))


def test_the_real_network():
    """Qwen3-30B-A3B: its size, and that state shared out over more ranks is less on each."""
    config = Config.qwen3_30b_a3b()
    eight, many = (plan(config, Layout(dp=dp, cp=2, ep=8), rows=dp, length=32_768) for dp in (4, 256))
    assert eight.parameters == 30_532_122_624 and eight.active == 3_353_032_704
    assert eight.parameters_held == pytest.approx(eight.parameters / 8, rel=1e-3)
    assert many.parameters_held < eight.parameters_held / 60
    assert eight.weights + eight.gradients + eight.moments == eight.parameters_held * 16
    # 6 · (active, embedding left out) · tokens and attention's share, which at 32k is more than half of it again.
    linear = 6 * (3_353_032_704 - 151_936 * 2048) * 16_384
    assert 1.5 * linear < eight.flops < 4 * linear
    seconds = eight.seconds(HARDWARE["h200"], Layout(dp=4, cp=2, ep=8))
    assert all(value > 0 for value in seconds.values())


def test_what_does_not_share_out_is_refused():
    with pytest.raises(ValueError, match="multiple of dp = 4"):
        plan(SHAPES["dense"], Layout(dp=4), 6, 16)
