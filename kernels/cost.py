"""What kernels cost before any GPU has run them: launches with their bytes and FLOPs, and a floor of their time on four
GPUs.

    Launch               one launch of one kernel: bytes read and written once, FLOPs, the format of the product's
                         operands
    GPU, GPUS            peaks of H100, H200, B200 and B300 from public data sheets, dense
    quantised            a matrix in one orientation or in both, as one pass over it
    product              one product of two quantised matrices
    quantised_product    both operands quantised, then their product
    moe                  the launches of a layer of experts, forward and backward, with quantisers fused into what comes
                         before them, or apart
    floor                seconds: for each launch the longer of its bytes over the bandwidth and its FLOPs over the peak

A floor is what launches take at least that follow one another and meet only in memory. Every launch reads each of its
inputs once and writes each of its outputs once; a gather reads a row each time that it is named, though a cache may
serve some. A floor leaves out the time to start a launch, tiles that are not full, uneven experts, and clocks below
their peak. Every count is a plain sum, so that it can be checked with a pencil.

`kernels/launches.py` lists the same layer as our kernels run it: with padding, layouts of scales, what a sort needs,
each gathered row read once and the activation quantised again on the way back. `moe` is the textbook's count. It knows
every format and quantisers apart from what comes before them, which nobody launches here any more, but on which the
kernels post's ratios stand. tests/kernels/test_cost.py holds both equal in every FLOP and in every byte but those that
it names.

Without torch and Triton: `etude plan --kernels` computes on any machine.
"""

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = [
    "BYTES",
    "GPU",
    "GPUS",
    "QUANTISERS",
    "Launch",
    "floor",
    "moe",
    "product",
    "quantised",
    "quantised_product",
    "share_of_quantisers",
]

BYTES = {"bfloat16": 2.0, "fp8": 1 + 4 / 128, "mxfp8": 1 + 1 / 32, "nvfp4-token": 1 / 2 + 1 / 16}
"""Bytes per number with the scales of its block, by the names of `kernels.gemm.FORMS`. NVFP4's float32 scale per token
comes on top."""
QUANTISERS = "quantise"
"""The word in the name of every launch that quantises."""


@dataclass(frozen=True)
class Launch:
    """One launch of one kernel."""

    name: str
    """What it does, in words. The name of a launch that quantises has the word "quantise"."""
    reads: float
    """Bytes that it reads, each input once."""
    writes: float
    """Bytes that it writes, each output once."""
    flops: float = 0.0
    """FLOPs on tensor cores: 2·M·N·K for a product, otherwise 0. What a quantiser computes hides behind its bytes."""
    format: str = ""
    """The format of the product's operands, a name in `BYTES`; empty if there is no product."""

    def __post_init__(self):
        if self.format and self.format not in BYTES:
            raise ValueError(f"format must be one of {', '.join(BYTES)}, or empty; got {self.format!r}")
        if bool(self.flops) != bool(self.format):
            raise ValueError(
                f"a launch has a format if and only if it has FLOPs; {self.name!r} has {self.flops:g} "
                f"and {self.format!r}"
            )

    @property
    def bytes(self) -> float:
        return self.reads + self.writes


@dataclass(frozen=True)
class GPU:
    """Peaks of one GPU, dense: without structured sparsity."""

    name: str
    bandwidth: float
    """Bytes per second of its memory."""
    bfloat16: float
    """FLOPs per second of its tensor cores, operands in bfloat16."""
    fp8: float
    """The same for operands in FP8, with scales applied per block or not at all."""
    fp4: float
    """The same for NVFP4; 0 where tensor cores do not multiply it."""
    float32: float
    """FLOPs per second of its other cores."""

    @property
    def block_scaled(self) -> bool:
        """Whether tensor cores take MXFP8 and NVFP4 with the scales of their blocks. Elsewhere kernels expand both to
        bfloat16."""
        return self.fp4 > 0

    def peak(self, form: str) -> float:
        """FLOPs per second of a product whose operands have this format."""
        if form in ("mxfp8", "nvfp4-token") and not self.block_scaled:
            return self.bfloat16
        return {"bfloat16": self.bfloat16, "fp8": self.fp8, "mxfp8": self.fp8, "nvfp4-token": self.fp4}[form]


GPUS = {
    "h100": GPU("H100 SXM", 3.35e12, 989.5e12, 1979e12, 0.0, 67e12),
    "h200": GPU("H200 SXM", 4.8e12, 989.5e12, 1979e12, 0.0, 67e12),
    "b200": GPU("B200 (HGX)", 8e12, 2250e12, 4500e12, 9000e12, 80e12),
    "b300": GPU("B300 (HGX)", 8e12, 2250e12, 4500e12, 13125e12, 75e12),
}
"""NVIDIA's H100 and H200 data sheets (halves of the figures with sparsity); Blackwell Architecture Technical Brief,
table of HGX systems, for B200; HGX B300 in the Blackwell Ultra data sheet, an eighth of eight GPUs (FP4: 105 PFLOP/s
dense)."""


def floor(launches: Launch | Iterable[Launch], gpu: GPU) -> float:
    """Seconds that these launches take at least, one after another."""
    if isinstance(launches, Launch):
        work = launches.flops / gpu.peak(launches.format) if launches.format else 0.0
        return max(launches.bytes / gpu.bandwidth, work)
    return sum(floor(launch, gpu) for launch in launches)


def share_of_quantisers(launches: Iterable[Launch], gpu: GPU) -> float:
    """Time of launches that quantise over the time of products, as the kernels post counts it. What a fused launch does
    beside quantising is in the first; nothing is in both."""
    launches = list(launches)
    return floor([launch for launch in launches if QUANTISERS in launch.name], gpu) / floor(
        [launch for launch in launches if launch.flops], gpu
    )


def quantised(name: str, rows: float, width: float, *forms: str, reads: float | None = None) -> list[Launch]:
    """One pass over a bfloat16 matrix [rows, width] that writes it in each of these formats: one, or two for both
    orientations. bfloat16 alone needs no launch. `reads` replaces the bytes of the matrix where the launch computes the
    matrix from something else."""
    if unknown := set(forms) - BYTES.keys():
        raise ValueError(f"format must be one of {', '.join(BYTES)}; got {', '.join(sorted(unknown))}")
    bytes_read = 2 * rows * width if reads is None else reads
    bytes_written = sum(rows * (width * BYTES[form] + (4 if form == "nvfp4-token" else 0)) for form in forms)
    if set(forms) == {"bfloat16"}:
        return [] if reads is None else [Launch(name, bytes_read, 2 * rows * width)]
    return [Launch(f"{name}: {QUANTISERS}", bytes_read, bytes_written)]


def product(name: str, M: float, N: float, K: float, form: str, experts: int = 1, out: float = 2) -> Launch:
    """[M, K] by [K, N], summed over K. With `experts`, each multiplies its own part of M by its own [K, N]."""
    return Launch(name, (M * K + experts * N * K) * BYTES[form], M * N * out, 2 * M * N * K, form)


def weight_gradient(name: str, rows: float, N: float, K: float, form: str, experts: int = 1, out: float = 2) -> Launch:
    """The gradient [experts, N, K] of a weight, summed over the rows of each expert."""
    return Launch(name, rows * (N + K) * BYTES[form], experts * N * K * out, 2 * rows * N * K, form)


def quantised_product(M: int, N: int, K: int, form: str) -> list[Launch]:
    """Quantise both operands, and multiply them."""
    return [*quantised("x", M, K, form), *quantised("weight", N, K, form), product("product", M, N, K, form)]


def moe(
    tokens: int,
    hidden: int,
    width: int,
    experts: int,
    top: int,
    forward: str,
    backward: str,
    fused: bool = True,
    weights: bool = True,
) -> tuple[list[Launch], list[Launch]]:
    """Launches of a layer of experts: of its forward pass, and of its backward pass. Products of the forward pass are
    in the format `forward`, those of both gradients in `backward`.

        forward     route, count, place, gather x, W13 · x, silu · up, W2 · that, combine
        backward    gather dy, its gradient of silu · up, W2's gradient, of gate and up, W13's gradient, of x, combine

    fused: each quantiser is part of the launch that makes its numbers, and writes both orientations at once. Otherwise
    numbers are written in bfloat16 and each orientation is a pass of its own. weights: quantise them as well, once in
    each orientation; a step with several micro-batches does this only once. Raises ValueError for sizes below 1."""
    if min(tokens, hidden, width, experts, top) < 1:
        raise ValueError(
            f"sizes must be at least 1; got tokens {tokens}, hidden {hidden}, width {width}, experts "
            f"{experts}, top {top}"
        )
    D, I, E, rows = hidden, width, experts, tokens * top

    def make_activation_launches(name: str, wide: float, reads: float, *forms: str) -> list[Launch]:
        """A launch that makes [rows, wide] from `reads` bytes, and gives it to products in these formats."""
        if fused or set(forms) == {"bfloat16"}:
            return quantised(name, rows, wide, *forms, reads=reads)
        quantiser_launches = [launch for form in forms for launch in quantised(f"{name} in {form}", rows, wide, form)]
        return [Launch(name, reads, 2 * rows * wide), *quantiser_launches]

    def weight(name: str, high: int, wide: int) -> list[Launch]:
        if not weights:
            return []
        passes = [(forward, backward)] if fused else [(forward,), (backward,)]
        return [
            launch
            for forms in passes
            for launch in quantised(f"{name} in {' and '.join(forms)}", E * high, wide, *forms)
        ]

    index = 8 * rows
    forward_launches = [
        Launch("route", 4 * tokens * E, (8 + 4) * rows),
        Launch("count assignments", index, 0),
        Launch("place assignments", index, 2 * index),
        *weight("w13", 2 * I, D),
        *weight("w2", D, I),
        *make_activation_launches("gather x", D, 2 * rows * D + index, forward, backward),
        product("W13 x", rows, 2 * I, D, forward, E),
        *make_activation_launches("silu up", I, 2 * rows * 2 * I, forward, backward),
        product("W2 a", rows, D, I, forward, E),
        Launch("combine", 2 * rows * D + (8 + 4) * rows, 2 * tokens * D),
    ]
    backward_launches = [
        # The gates' gradient needs what the experts gave.
        *make_activation_launches("gather dy", D, 2 * rows * D + 2 * rows * D + (8 + 4) * rows, backward, backward),
        product("W2ᵀ dy", rows, I, D, backward, E),
        *make_activation_launches("gradient of silu up", 2 * I, 2 * rows * (2 * I + I), backward, backward),
        weight_gradient("gradient of W2", rows, D, I, backward, E),
        product("W13ᵀ dh", rows, D, 2 * I, backward, E),
        weight_gradient("gradient of W13", rows, 2 * I, D, backward, E),
        Launch("combine dx", 2 * rows * D + 8 * rows, 2 * tokens * D),
    ]
    return forward_launches, backward_launches
