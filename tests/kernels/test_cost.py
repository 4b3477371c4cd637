"""The cost model: counts by hand, laws of the floor, and what it says of the kernels post's ratios."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.cost import BYTES, GPUS, Launch, floor, moe, product, quantised, quantised_product, share_of_quantisers
from kernels.launches import launches

QWEN = dict(tokens=32_768, hidden=2048, width=768, experts=128, top=8)
FORMS = [("bfloat16", "bfloat16"), ("mxfp8", "mxfp8"), ("nvfp4-token", "mxfp8"), ("fp8", "fp8")]


def test_a_product_by_hand():
    one = product("p", 8192, 8192, 8192, "bfloat16")
    assert one.flops == 2 * 8192**3 == 1_099_511_627_776
    assert one.reads == 2 * 2 * 67_108_864 and one.writes == 2 * 67_108_864
    # 1.0995e12 / 989.5e12 = 1.111 ms; its 403 MB take 0.084 ms on an H200.
    assert floor(one, GPUS["h200"]) == pytest.approx(1.1112e-3, rel=1e-3)
    assert floor(product("p", 8192, 8192, 8192, "fp8"), GPUS["h200"]) == pytest.approx(0.5556e-3, rel=1e-3)
    assert floor(product("p", 8192, 8192, 8192, "nvfp4-token"), GPUS["b200"]) == pytest.approx(0.1222e-3, rel=1e-3)


def test_quantisers_by_hand():
    """The floors of kernels/README.md for 8192 × 8192 numbers on an H200: 42 µs along one axis, 57 along both, 36 for
    NVFP4."""
    n = 8192
    (one,) = quantised("x", n, n, "mxfp8")
    (both,) = quantised("x", n, n, "mxfp8", "mxfp8")
    (four,) = quantised("x", n, n, "nvfp4-token")
    assert one.bytes == n * n * (2 + 1 + 1 / 32) and both.bytes == n * n * (2 + 2 + 2 / 32)
    assert four.bytes == n * n * (2 + 1 / 2 + 1 / 16) + 4 * n
    assert [round(1e6 * floor(launch, GPUS["h200"])) for launch in (one, both, four)] == [42, 57, 36]
    assert quantised("x", n, n, "bfloat16") == []


def test_the_layer_of_qwen3_by_hand():
    there, back = moe(**QWEN, forward="bfloat16", backward="bfloat16")
    rows = 262_144
    # Three products of 2 · rows · 2048 · 768 each way, and twice that backward.
    assert sum(one.flops for one in there) == 3 * 2 * rows * 2048 * 768 and sum(one.flops for one in back) == 2 * sum(
        one.flops for one in there
    )
    assert not any("quantise" in one.name for one in there + back)
    assert [one.name for one in there] == [
        "route",
        "count assignments",
        "place assignments",
        "gather x",
        "W13 x",
        "silu up",
        "W2 a",
        "combine",
    ]
    assert there[0].reads == 4 * 32_768 * 128 and there[0].writes == 12 * rows
    assert there[4].reads == 2 * (rows * 2048 + 128 * 1536 * 2048) and there[4].writes == 2 * rows * 1536
    there, back = moe(**QWEN, forward="nvfp4-token", backward="mxfp8")
    x = next(one for one in there if one.name.startswith("gather x"))
    assert x.reads == 2 * rows * 2048 + 8 * rows and x.writes == rows * 2048 * (0.5625 + 1.03125) + 4 * rows
    assert {one.format for one in there if one.flops} == {"nvfp4-token"} and {
        one.format for one in back if one.flops
    } == {"mxfp8"}


@pytest.mark.parametrize(("forward", "backward"), FORMS)
@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_fusing_saves_bytes_and_launches(forward, backward, gpu):
    fused, apart = (sum(moe(**QWEN, forward=forward, backward=backward, fused=way), []) for way in (True, False))
    assert sum(one.flops for one in fused) == sum(one.flops for one in apart)
    if forward == "bfloat16":
        assert fused == apart
    else:
        assert len(fused) < len(apart) and sum(one.bytes for one in fused) < sum(one.bytes for one in apart)
        assert floor(fused, gpu) < floor(apart, gpu) and share_of_quantisers(fused, gpu) < share_of_quantisers(
            apart, gpu
        )


@given(
    st.tuples(*(st.integers(1, 4096) for _ in range(3))),
    st.integers(1, 64),
    st.integers(1, 8),
    st.sampled_from(FORMS),
    st.booleans(),
    st.sampled_from(sorted(GPUS)),
)
def test_laws_of_a_floor(sizes, experts, top, forms, fused, name):
    """More tokens never take less time; a floor is no shorter than all bytes over the bandwidth or all FLOPs over the
    fastest peak."""
    (tokens, hidden, width), gpu = sizes, GPUS[name]
    layers = [sum(moe(n, hidden, width, experts, top, *forms, fused=fused), []) for n in (tokens, tokens + 1)]
    less, more = (floor(layer, gpu) for layer in layers)
    assert 0 < less < more
    assert less >= sum(one.bytes for one in layers[0]) / gpu.bandwidth * (1 - 1e-12)
    assert less >= sum(one.flops / gpu.peak(one.format) for one in layers[0] if one.flops) * (1 - 1e-12)
    assert sum(floor(one, gpu) for one in layers[0]) == less


RUNS = {
    "route": "route",
    "W13 x": "h = x w13ᵀ",
    "W2 a": "y = act w2ᵀ",
    "combine": "combine: Σ gate · y",
    "W2ᵀ dy": "d_act = dy w2",
    "gradient of W2": "dw2 = dyᵀ act",
    "W13ᵀ dh": "dx = dh w13",
    "gradient of W13": "dw13 = dhᵀ x",
    "combine dx": "combine: Σ dx",
}
"""What the model calls a launch, and what our list does."""


@given(
    st.integers(1, 3),
    st.integers(1, 8),
    st.integers(1, 4),
    st.integers(1, 12),
    st.integers(1, 12),
    st.sampled_from([f for f in FORMS if "fp8" not in f]),
)
def test_the_model_and_what_runs_are_one_count(full, experts, top, wide, narrow, forms):
    """Evenly spread tokens, and widths of whole blocks, so that nothing is padded. Every product has the same FLOPs and
    bytes, but that ours reads where the experts' rows end, and NVFP4's scale of each row. Quantisers write the same
    bytes, and read the same but for three things: ours read a token's row once for all of its experts, and how many
    rows there are; and the gates' gradient, which the model has with them, is a launch of its own. In bfloat16 ours
    computes the activation again on the way back, and writes it."""
    N, D, I, E, (forward, backward) = 128 * experts * full, 32 * wide, 32 * narrow, experts, forms
    A = N * top
    model = {one.name: one for one in sum(moe(N, D, I, E, top, forward, backward), [])}
    ours = {one.name: one for one in launches(N, D, I, E, top, forward, backward, native=False)}
    for name, same in RUNS.items():
        extra = 8 * E * (name in ("W13 x", "W2 a", "W2ᵀ dy", "W13ᵀ dh")) + 8 * (E + 1) * name.startswith("gradient")
        if forward == "nvfp4-token":
            extra += {"W13 x": 4 * (A + E * 2 * I), "W2 a": 4 * (A + E * D)}.get(name, 0)
        a, b = model[name], ours[same]
        assert (a.flops, a.reads + extra, a.writes) == (b.flops, b.bytes_read, b.bytes_written), name
    assert sum(one.flops for one in model.values()) == sum(one.flops for one in ours.values())
    made = [one for name, one in model.items() if name not in RUNS and "assignments" not in name]
    makers = [
        one
        for one in ours.values()
        if one.kernel in ("both_kernel", "swiglu_gradient_kernel", "gather_kernel", "swiglu_kernel")
    ]
    plain = forward == "bfloat16"
    assert sum(one.writes for one in made) + 2 * A * I * plain == sum(one.bytes_written for one in makers)
    once, gates, limits = 2 * 2 * (A - N) * D, 2 * A * D, 0 if plain else 4 * 8
    # Gates, and the place of each in the list, are read where the gradient is gathered; the model counts both, padded
    # rows have no gate.
    assert sum(one.reads for one in made) - once - gates + limits == sum(one.bytes_read for one in makers)


@given(st.integers(1, 8192), st.integers(1, 8192), st.integers(1, 8192), st.sampled_from(sorted(BYTES)))
def test_a_quantised_product_is_its_parts(M, N, K, form):
    launches = quantised_product(M, N, K, form)
    assert len(launches) == (1 if form == "bfloat16" else 3)
    assert sum(one.flops for one in launches) == 2 * M * N * K
    # What quantisers write the product reads, but for NVFP4's scales of tokens.
    if form in ("mxfp8", "fp8"):
        assert math.isclose(sum(one.writes for one in launches[:-1]), launches[-1].reads)


def test_formats_that_a_gpu_cannot_multiply_cost_what_bfloat16_costs():
    for form in ("mxfp8", "nvfp4-token"):
        assert GPUS["h200"].peak(form) == GPUS["h200"].bfloat16 and not GPUS["h200"].block_scaled
    assert GPUS["b200"].peak("mxfp8") == GPUS["b200"].fp8 and GPUS["b300"].peak("nvfp4-token") > GPUS["b200"].peak(
        "nvfp4-token"
    )


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Launch("p", 1, 1, 5), "has a format if and only if"),
        (lambda: Launch("p", 1, 1, 0, "fp8"), "has a format if and only if"),
        (lambda: Launch("p", 1, 1, 5, "int8"), "format must be one of"),
        (lambda: moe(0, 1, 1, 1, 1, "mxfp8", "mxfp8"), "sizes must be at least 1"),
        (lambda: quantised("x", 1, 1, "fp9"), "format"),
    ],
)
def test_what_is_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()
