"""What a GPU would be asked to run: every use of every kernel, written down without a GPU.

`launches` calls the kernels' public functions, and the gradients behind them, at the sizes of Qwen3-30B-A3B with 32,768
tokens. Their tensors have a shape and a dtype but no memory (torch's device "meta"), and say that they lie on a GPU. No
kernel starts: types, constants, options and grid of each launch are recorded instead. What is compiled from them
(kernels/compiled.py) is therefore what the functions hand to a GPU, and no copy of it that could go stale. A new kernel
needs a call in `uses`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from . import (
    expert_rows,
    experts,
    gemm,
    grouped_gemm,
    linear_logprob,
    muon,
    operands,
    quant,
    router_replay,
    weight_sync,
)
from .launch import Fitting, first

__all__ = ["Launch", "launches"]

TOKENS, WIDTH, VOCABULARY = 32_768, 2048, 151_936
EXPERTS, INNER, TOP_K = 128, 768, 8

FORWARD = ("mxfp8", "mxfp8"), ("nvfp4-token", "mxfp8"), ("mxfp8", None), ("nvfp4-token", None)
ORIENTATIONS = {"matrix": FORWARD, "gathered": FORWARD, "weighted": FORWARD[:1], "codes": FORWARD}
"""What one launch reads (kernels/orientations.py), and the formats along rows and along columns in which it writes
that; without columns in a forward pass alone."""

TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}
"""Triton's names of dtypes."""


@dataclass(frozen=True)
class Launch:
    """One launch on a GPU, with all configurations that are offered for it."""

    use: str
    """What the kernel is used for."""
    kernel: JITFunction
    signature: dict[str, str]
    """Triton's type of each argument; "constexpr" for what is known when it compiles."""
    constants: dict[str, Any]
    attributes: dict[tuple[int, ...], list]
    """What Triton knows about an argument: addresses and numbers that are multiples of 16."""
    options: dict[str, Any]
    numbers: dict[str, int | float]
    tensors: dict[str, tuple[tuple[int, ...], int]]
    """Shape and bytes per number."""
    bytes: int
    """Of all tensors, each once: what stands in for an argument that is not used is another one again."""
    form: str
    """What kernels/unfit.py calls it; "" if there is nothing to choose."""
    tiles: tuple[triton.Config, ...]
    grid: Callable[[dict], tuple[int, ...]]

    @property
    def name(self) -> str:
        """The kernel's file and name: "gemm.matmul_kernel"."""
        return f"{self.kernel.__module__.rpartition('.')[2]}.{self.kernel.__name__}"

    @property
    def exact(self) -> bool:
        """Whether the launch promises bits: multiplications and additions are not fused."""
        return self.options.get("enable_fp_fusion") is False

    def key(self) -> str:
        """Equal for launches that compile to the same code, but for the numbers that Triton knows to be multiples of
        16."""
        return repr((self.name, self.signature, self.constants, self.options))


def launches(capability: tuple[int, int] = (9, 0)) -> list[Launch]:
    """Every use on a GPU of this compute capability, in the order of `uses`; what compiles to the same code is there
    once. Needs a process without TRITON_INTERPRET."""
    launches_by_key: dict[str, Launch] = {}
    for use, call in uses():

        def note(kernel, form, tiles, arguments, grid, use=use):
            alike = sum(
                previous_launch.kernel is kernel and previous_launch.use.startswith(use)
                for previous_launch in launches_by_key.values()
            )
            launch = described(f"{use}, {alike + 1}" if alike else use, kernel, form, tiles, arguments, grid)
            launches_by_key.setdefault(launch.key(), launch)

        with OnGpu(), recorded(note, capability):
            call()
    return list(launches_by_key.values())


class OnGpu(TorchFunctionMode):
    """Inside, tensors say that they lie on a GPU. A tensor that is asked for its number, as a delta's number of
    changes, says 2^20; one that is asked whether something is so (whether a gradient overflows) says no."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        for method, answer in (
            (torch.Tensor.is_cuda.__get__, True),
            (torch.Tensor.__int__, 2**20),
            (torch.Tensor.__bool__, False),
        ):
            if func == method:
                return answer
        return func(*args, **(kwargs or {}))


@contextmanager
def recorded(note: Callable, capability: tuple[int, int]) -> Iterator[None]:
    """Inside, launches are noted instead of started, and every GPU is of this compute capability."""
    before = JITFunction.run, Autotuner.run, torch.cuda.get_device_capability

    def run(self, *args, grid, warmup, **kwargs):
        only = triton.Config({}, num_warps=kwargs.pop("num_warps", 4))
        note(self, "", (only,), dict(zip(self.arg_names, args, strict=False)) | kwargs, grid)

    def choose(self, *args, grid, warmup, **kwargs):
        arguments, prune = dict(zip(self.arg_names, args, strict=False)) | kwargs, self.early_config_prune
        fitted = isinstance(prune, Fitting)
        tiles = self.configs.candidates(first(arguments).dtype) if fitted else self.configs.large
        note(self.fn, prune.form(arguments) if fitted else "", tuple(tiles), arguments, grid)

    JITFunction.run, Autotuner.run, torch.cuda.get_device_capability = run, choose, lambda device=None: capability
    try:
        yield
    finally:
        JITFunction.run, Autotuner.run, torch.cuda.get_device_capability = before


def described(use: str, kernel: JITFunction, form: str, tiles: tuple, arguments: dict[str, Any], grid: Any) -> Launch:
    """A launch from its arguments, as Triton specialises them: the number 1 is a constant, and multiples of 16 are
    known as such."""
    signature, constants, attributes, numbers, tensors, distinct = {}, {}, {}, {}, {}, {}
    for at, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name] = "constexpr"
            if name in arguments:
                constants[name] = arguments[name]
            continue
        value = arguments[name]
        if isinstance(value, Tensor):
            signature[name] = "*" + TYPES[value.dtype]
            attributes[(at,)] = (
                [["tt.divisibility", 16]] if value.storage_offset() * value.element_size() % 16 == 0 else []
            )
            if value.nbytes < 2**31:
                attributes[(at,)].append(["tt.pointer_range", 32])
            tensors[name], distinct[id(value)] = (tuple(value.shape), value.element_size()), value.nbytes
            continue
        numbers[name] = value
        if isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1:
            signature[name], constants[name] = "constexpr", 1
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(at,)] = [["tt.divisibility", 16]]
    options = {name: value for name, value in arguments.items() if name not in kernel.arg_names}
    attributes = {at: properties for at, properties in attributes.items() if properties}
    size = grid if callable(grid) else lambda tile, fixed=grid: fixed
    return Launch(
        use,
        kernel,
        signature,
        constants,
        attributes,
        options,
        numbers,
        tensors,
        sum(distinct.values()),
        form,
        tiles,
        size,
    )


class Saved:
    """What a torch.autograd.Function keeps between forward and backward."""

    needs_input_grad = (True,) * 9

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        pass


def both_ways(
    use: str, function: type[torch.autograd.Function], arguments: Callable[[], tuple]
) -> Iterator[tuple[str, Callable[[], object]]]:
    """A function, and its gradient. Autograd itself would want a device."""

    def backward() -> None:
        ctx = Saved()
        out = function.forward(ctx, *arguments())
        function.backward(ctx, *(torch.empty_like(t) for t in (out if isinstance(out, tuple) else (out,))))

    yield use, lambda: function.forward(Saved(), *arguments())
    yield f"{use}, gradient", backward


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def indices(*shape: int) -> Tensor:
    return numbers(*shape, dtype=torch.int64)


def weights() -> tuple[Tensor, Tensor]:
    """w13 and w2 of a layer of experts."""
    return numbers(EXPERTS, 2 * INNER, WIDTH), numbers(EXPERTS, WIDTH, INNER)


def uses() -> Iterator[tuple[str, Callable[[], object]]]:
    """What is called, and under which name. Tensors are made when a call is made."""
    wide, rows = (8192, 8192), TOKENS * TOP_K
    for mode in ("rceil", "floor", "ceil", "even"):
        yield f"MXFP8 along rows, {mode}", lambda mode=mode: quant.mxfp8_quantize(numbers(*wide), -1, mode)
    yield "MXFP8 along columns", lambda: quant.mxfp8_quantize(numbers(*wide), 0)
    yield "MXFP8 both ways", lambda: quant.mxfp8_quantize_both(numbers(*wide))
    yield "MXFP8 along rows, float32", lambda: quant.mxfp8_quantize(numbers(*wide, dtype=torch.float32))
    yield "MXFP8 of SwiGLU", lambda: experts.activation(numbers(rows, 2 * INNER), "mxfp8", indices(1))
    for scale in ("token", "tensor"):
        for division in ("ieee", "fast"):
            yield (
                f"NVFP4 per {scale}, {division}",
                lambda a=scale, b=division: quant.nvfp4_quantize(numbers(TOKENS, WIDTH), a, b),
            )
    yield "NVFP4 per token, long tokens", lambda: quant.nvfp4_quantize(numbers(*wide))
    yield "NVFP4 per token, float32", lambda: quant.nvfp4_quantize(numbers(TOKENS, WIDTH, dtype=torch.float32))
    yield "NVFP4 of SwiGLU", lambda: experts.activation(numbers(rows, 2 * INNER), "nvfp4-token", indices(1))
    for block in ((1, 128), (128, 128)):
        yield f"FP8 {block[0]} × {block[1]}", lambda block=block: quant.blockwise_fp8_quantize(numbers(*wide), block)
    yield "FP8 of SwiGLU", lambda: experts.activation(numbers(rows, 2 * INNER), "fp8")

    for source, ways in ORIENTATIONS.items():
        for by_rows, by_columns in ways:

            def quantise_operand(source=source, ways=(by_rows, by_columns)):
                if source == "matrix":
                    return operands.make_operands(weights()[0], *ways)
                x = numbers(TOKENS, WIDTH, dtype=torch.uint8 if source == "codes" else torch.bfloat16)
                gates = {
                    "weighted": numbers(TOKENS, TOP_K, dtype=torch.float32),
                    "codes": numbers(TOKENS, WIDTH // 32, dtype=torch.uint8),
                }
                return operands.make_operands(
                    x, *ways, source=source, index=indices(rows), K=TOP_K, gates=gates.get(source), limit=indices(1)
                )

            yield (
                f"{source} to {by_rows} rows {f'and {by_columns} columns' if by_columns else 'alone'}",
                quantise_operand,
            )
    yield (
        "MXFP8 of SwiGLU's gradient",
        lambda: experts.swiglu_gradient(numbers(rows, 2 * INNER), numbers(rows, INNER), "mxfp8", indices(1)),
    )

    for form in ("bfloat16", "fp8", "mxfp8", "nvfp4-token"):
        back, dtype = (
            ("mxfp8", torch.bfloat16)
            if form == "nvfp4-token"
            else (form, torch.float32 if form == "bfloat16" else torch.bfloat16)
        )

        def linear(form=form, back=back, dtype=dtype):
            return numbers(TOKENS, WIDTH, dtype=dtype), numbers(2 * INNER, WIDTH, dtype=dtype), form, back

        yield from both_ways(f"product, {form}", gemm.Linear, linear)
    for form in ("bfloat16", "float32", "fp8", "mxfp8", "nvfp4-token"):
        back, dtype = "mxfp8" if form == "nvfp4-token" else form, torch.float32 if form == "float32" else torch.bfloat16

        def grouped(form=form, back=back, dtype=dtype):
            return (
                numbers(rows, WIDTH, dtype=dtype),
                numbers(EXPERTS, 2 * INNER, WIDTH, dtype=dtype),
                indices(EXPERTS),
                form,
                back,
            )

        yield from both_ways(f"experts' product, {form}", grouped_gemm.GroupedLinear, grouped)

    yield "SwiGLU", lambda: experts.swiglu(numbers(rows, 2 * INNER))
    yield "SwiGLU's gradient", lambda: experts.swiglu(numbers(rows, 2 * INNER), numbers(rows, INNER))
    yield "rows sorted by expert", lambda: expert_rows.sort_by_expert(indices(TOKENS, TOP_K), EXPERTS)
    yield from both_ways(
        "tokens to experts",
        expert_rows.Permute,
        lambda: (numbers(TOKENS, WIDTH), indices(rows), indices(TOKENS, TOP_K)),
    )
    yield from both_ways(
        "experts to tokens",
        expert_rows.Unpermute,
        lambda: (numbers(rows, WIDTH), indices(rows), indices(TOKENS, TOP_K), numbers(TOKENS, TOP_K)),
    )

    for form in ("bfloat16", "fp8", "mxfp8", "nvfp4-token"):
        back = "mxfp8" if form == "nvfp4-token" else form

        def layer(form=form, back=back, received=False):
            codes = (
                (numbers(TOKENS, WIDTH, dtype=torch.uint8), numbers(TOKENS, WIDTH // 32, dtype=torch.uint8))
                if received
                else (None, None)
            )
            gates = numbers(TOKENS, TOP_K, dtype=torch.float32)
            return numbers(TOKENS, WIDTH), gates, *weights(), indices(TOKENS, TOP_K), *codes, form, back

        yield (
            f"layer, {form}, forward alone",
            lambda form=form, back=back: experts.mixture(
                numbers(TOKENS, WIDTH), numbers(TOKENS, EXPERTS, dtype=torch.float32), TOP_K, *weights(), form, back
            ),
        )
        yield from both_ways(f"layer, {form}", experts.Layer, layer)
        if back == "mxfp8":

            def received(layer=layer):
                return layer(received=True)

            def received_alone(received=received):
                x, gates, w13, w2, expert_ids, codes, scales, *forms = received()
                experts.received_swiglu(x, codes, scales, gates, w13, w2, expert_ids, *forms)

            yield f"layer, {form}, of MXFP8 tokens, forward alone", received_alone
            yield from both_ways(f"layer, {form}, of MXFP8 tokens", experts.Layer, received)

    for dtype in (torch.bfloat16, torch.float32):
        name = TYPES[dtype]

        def head(dtype=dtype):
            return numbers(8192, WIDTH, dtype=dtype), numbers(VOCABULARY, WIDTH, dtype=dtype), indices(8192)

        yield from both_ways(f"log-prob and entropy, {name}", linear_logprob.LinearLogprob, head)
        for mode, target_kind in ((1, "teacher"), (2, "reference")):

            def distance(dtype=dtype, mode=mode):
                return *(numbers(n, WIDTH, dtype=dtype) for n in (8192, VOCABULARY) * 2), mode

            yield from both_ways(f"KL, {target_kind}, {name}", linear_logprob.LinearKL, distance)

    for scores in (torch.float32, torch.bfloat16):
        yield f"route, {TYPES[scores]}", lambda s=scores: router_replay.route(numbers(TOKENS, EXPERTS, dtype=s), TOP_K)
    yield (
        "route, gates of all experts",
        lambda: router_replay.route(numbers(TOKENS, EXPERTS, dtype=torch.float32), TOP_K, normalise=False),
    )
    for alpha in (0.0, 0.5):

        def replay(alpha=alpha):
            router_replay.route(numbers(TOKENS, EXPERTS, dtype=torch.float32), TOP_K, indices(TOKENS, TOP_K), alpha)

        yield f"route, replay, alpha {alpha}", replay

    for dtype in (torch.bfloat16, torch.float32):
        for shape, way in (((2 * INNER, WIDTH), "wide"), ((WIDTH, INNER), "tall")):

            def orthogonalise(shape=shape, dtype=dtype):
                muon.newton_schulz(numbers(EXPERTS, *shape, dtype=torch.float32), dtype=dtype)

            yield f"Newton–Schulz, {way}, {TYPES[dtype]}", orthogonalise

    def versions():
        return numbers(EXPERTS, 2 * INNER, WIDTH), numbers(EXPERTS, 2 * INNER, WIDTH)

    yield "delta between weights", lambda: weight_sync.encode_delta(*versions())
    yield "delta applied", lambda: weight_sync.apply_delta(versions()[0], indices(2**22), indices(2**22).int())
