"""What `etude bench kernels` times: data, a gate that checks the result, kernels, and torch baselines. For memory-bound
kernels, the baseline is a copy of the same number of bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ref import muon as ref_muon
from ref import quant as ref_quant
from ref import router_replay as ref_router_replay
from ref import weight_sync as ref_weight_sync
from ref.network import linear_logprob as ref_logprob
from scaled.runtime import engine

expert_rows = engine.kernel("expert_rows")
experts = engine.kernel("experts")
gemm = engine.kernel("gemm")
grouped_gemm = engine.kernel("grouped_gemm")
linear_logprob = engine.kernel("linear_logprob")
muon = engine.kernel("muon")
quant = engine.kernel("quant")
router_replay = engine.kernel("router_replay")
weight_sync = engine.kernel("weight_sync")
excess, same_bits = engine.kernel("gate").excess, engine.kernel("gate").same_bits

COPY = "copy"


@dataclass
class Case:
    """One line of the table: a kernel and its baselines."""

    name: str
    size: str
    gate: Callable[[], str | None]
    """None if every kernel of the case is correct, else the reason."""
    kernels: dict[str, Callable[[], object]]
    baselines: dict[str, Callable[[], object]]
    bytes: int = 0
    """Bytes read and written by our kernel, if it is memory-bound; the baseline is then a copy of the same size."""
    flops: int = 0
    note: dict = field(default_factory=dict)


def cases(on: str, tiny: bool = False) -> Iterator[Case]:
    """Yields one case at a time, so only its data is in memory. `tiny`: sizes for the interpreter, which checks the
    gates."""
    for make in (quantisers, products, expert_products, layers, heads, routers, dispatch, deltas, orthogonal):
        yield from make(on, tiny)


def make_copy(amount: int, on: str) -> Callable[[], object]:
    """Copies half of `amount` bytes: reads plus writes add up to `amount`."""
    source = torch.zeros(amount // 2, dtype=torch.uint8, device=on)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def make_bits_gate(kernel: Callable, reference: Callable, *arguments) -> Callable[[], str | None]:
    def gate() -> str | None:
        expected = reference(*(a.cpu() if isinstance(a, Tensor) else a for a in arguments))
        return None if same_bits(kernel(*arguments), expected) else f"{kernel.__name__} differs from the reference"

    return gate


def make_error_gate(kernel: Callable, reference: Callable, exact: Callable, name: str) -> Callable[[], str | None]:
    """Each function returns one or several tensors: of the kernel, of the reference, in float64."""

    def tuple_of(result) -> tuple[Tensor, ...]:
        return result if isinstance(result, tuple) else (result,)

    def gate() -> str | None:
        worst = max(excess(a, b, c) for a, b, c in zip(*map(tuple_of, (kernel(), reference(), exact())), strict=True))
        return None if worst <= 1 else f"{name}'s error is {worst:.1f} times the allowed error"

    return gate


def quantisers(on: str, tiny: bool) -> Iterator[Case]:
    n = 64 if tiny else 8192
    x = torch.randn(n, n, device=on).bfloat16()
    # The reference is slow on a CPU, so the gate checks a part with every kind of block.
    part = x[: min(n, 512)].clone()
    part[0, :40], part[1, 3], part[2, 5] = 0, torch.nan, torch.inf
    for name, kernel, reference, arguments, width in (
        ("MXFP8", quant.mxfp8_quantize, ref_quant.mxfp8_quantize, (), 3 + 1 / 32),
        ("MXFP8, both axes", quant.mxfp8_quantize_both, ref_quant.mxfp8_quantize_both, (), 4 + 2 / 32),
        ("NVFP4 per token", quant.nvfp4_quantize, ref_quant.nvfp4_quantize, (), 2.5 + 1 / 16),
        ("FP8 1 × 128", quant.blockwise_fp8_quantize, ref_quant.blockwise_fp8_quantize, ((1, 128),), 3 + 4 / 128),
        (
            "FP8 128 × 128",
            quant.blockwise_fp8_quantize,
            ref_quant.blockwise_fp8_quantize,
            ((128, 128),),
            3 + 4 / 128**2,
        ),
    ):
        size = int(n * n * width)
        yield Case(
            name,
            f"{n} × {n}",
            make_bits_gate(kernel, reference, part, *arguments),
            {"kernel": partial(kernel, x, *arguments)},
            {COPY: make_copy(size, on)},
            size,
        )


def products(on: str, tiny: bool) -> Iterator[Case]:
    n = 64 if tiny else 8192
    a, b = (torch.randn(n, n, device=on).bfloat16() for _ in range(2))
    for form in ("fp8", "mxfp8", "nvfp4-token"):
        left, right = gemm.operand(a, form), gemm.operand(b, form, weight=True)
        baselines: dict[str, Callable[[], object]] = {"torch.mm, bfloat16": lambda: a @ b.T}
        if form == "fp8" and on == "cuda":
            scaled = torch_scaled(left, right)
            if scaled is not None:
                baselines["torch, 1 × 128 by 128 × 128"] = scaled
        yield Case(
            f"product, {form}",
            f"{n}³",
            make_error_gate(*make_product_calls(a[:256], b, form), f"product, {form}"),
            {
                "kernel": partial(gemm.matmul, left, right, torch.bfloat16),
                "kernel with quantisation": partial(gemm.linear, a, b, form),
            },
            baselines,
            flops=2 * n**3,
        )


def make_product_calls(a: Tensor, b: Tensor, form: str) -> tuple[Callable, Callable, Callable]:
    x, w = ref_quant.rounded(a.cpu(), form, 1).to(a.device), ref_quant.rounded(b.cpu(), form, 1, True).to(b.device)
    return lambda: gemm.linear(a, b, form), lambda: (x @ w.T).bfloat16(), lambda: x.double() @ w.double().T


def torch_scaled(left: Any, right: Any) -> Callable[[], Tensor] | None:
    """torch's product of the same codes, each a `kernels.gemm.Operand`, if this torch and GPU support it."""
    a, b = left.data.view(torch.float8_e4m3fn), right.data.view(torch.float8_e4m3fn)
    assert left.scales is not None and right.scales is not None
    scale_a, scale_b = left.scales.T.contiguous().T, right.scales.T.contiguous()
    call = partial(torch._scaled_mm, a, b.T, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)
    try:
        call()
    except (RuntimeError, ValueError):
        return None
    return call


def split_rows(N: int, E: int, zipf: bool) -> Tensor:
    """End offsets of the experts' rows: equal shares, or shares proportional to 1/rank, with an empty last expert."""
    share = 1 / torch.arange(1, E + 1, dtype=torch.float64) if zipf else torch.ones(E, dtype=torch.float64)
    if zipf:
        share[-1] = 0
    return (share.cumsum(0) / share.sum() * N).round().long()


def expert_products(on: str, tiny: bool) -> Iterator[Case]:
    """The expert shapes of Qwen3-30B-A3B: 2048 → 2 × 768 → 2048, 128 experts, 8 per token."""
    E, D, J, sizes = (4, 32, 48, (40,)) if tiny else (128, 2048, 1536, (8 * 8192, 8 * 32768))
    for N in sizes:
        for zipf in (False, True):
            ends = split_rows(N, E, zipf).to(on)
            x, up = torch.randn(N, D, device=on).bfloat16(), torch.randn(N, J, device=on).bfloat16()
            w = (torch.randn(E, J, D, device=on) / D**0.5).bfloat16()
            size = f"{N} × {D} × {J}, {E} experts, {'Zipf' if zipf else 'balanced'}"
            operands = {
                form: (
                    gemm.operand(x, form),
                    gemm.operand(w, form, weight=True),
                    gemm.operand(up, form),
                    gemm.operand(w, form, -2, True),
                )
                for form in ("bfloat16", "fp8")
            }
            offsets = ends.int()
            kinds = {
                "forward": (
                    lambda f: grouped_gemm.expert_rows(*operands[f][:2], ends, x.dtype),
                    lambda: torch._grouped_mm(x, w.mT, offs=offsets),
                ),
                "dgrad": (
                    lambda f: grouped_gemm.expert_rows(*operands[f][2:], ends, x.dtype),
                    lambda: torch._grouped_mm(up, w, offs=offsets),
                ),
                "wgrad": (
                    lambda f: grouped_gemm.expert_weights(up, x, ends, f, x.dtype),
                    lambda: torch._grouped_mm(up.T, x, offs=offsets),
                ),
            }
            for kind, (kernel, theirs) in kinds.items():
                yield Case(
                    f"experts, {kind}",
                    size,
                    grouped_gate(kind, kernel, x, w, up, ends),
                    {f"kernel, {form}": partial(kernel, form) for form in operands},
                    {"torch._grouped_mm, bfloat16": theirs},
                    flops=2 * N * D * J,
                )


def grouped_gate(
    kind: str, kernel: Callable, x: Tensor, w: Tensor, up: Tensor, ends: Tensor
) -> Callable[[], str | None]:
    """Compares with float64 and the reference, expert by expert, for the largest, the smallest and the last expert."""

    def gate() -> str | None:
        begins = torch.cat([ends.new_zeros(1), ends[:-1]]).tolist()
        counts = [b - a for a, b in zip(begins, ends.tolist(), strict=True)]
        expert_ids = {counts.index(max(counts)), counts.index(min(counts)), len(counts) - 1}
        for form in ("bfloat16", "fp8"):
            result = kernel(form)
            for e in expert_ids:
                rows = slice(begins[e], begins[e] + min(counts[e], 512 if kind != "wgrad" else counts[e]))
                if kind == "wgrad":
                    a, b = (ref_quant.rounded(t[rows].cpu(), form, 0) for t in (up, x))
                    a, b, actual = a.T, b.T, result[e]
                elif kind == "forward":
                    a, b, actual = (
                        ref_quant.rounded(x[rows].cpu(), form, 1),
                        ref_quant.rounded(w[e].cpu(), form, 1, True),
                        result[rows],
                    )
                else:
                    a, b, actual = (
                        ref_quant.rounded(up[rows].cpu(), form, 1),
                        ref_quant.rounded(w[e].cpu(), form, 0, True).T,
                        result[rows],
                    )
                a, b = a.to(x.device), b.to(x.device)
                worst = excess(actual, (a @ b.T).to(x.dtype), a.double() @ b.double().T)
                if not worst <= 1:
                    return f"{kind} in {form}, expert {e}: error is {worst:.1f} times the allowed error"
        return None

    return gate


def layers(on: str, tiny: bool) -> Iterator[Case]:
    """silu(gate) · up with quantisation, in one kernel and in two steps."""
    N, I = (40, 64) if tiny else (262144, 768)
    h = torch.randn(N, 2 * I, device=on).bfloat16()
    for form, width in (("fp8", 5 + 4 / 128), ("mxfp8", 5 + 1 / 32), ("nvfp4-token", 4.5 + 1 / 16)):

        def gate(form=form) -> str | None:
            # A difference in the last bit of exp occasionally moves a value across a midpoint.
            wide = h[:256].float()
            actual, expected = experts.activation(wide, form), gemm.operand(F.silu(wide[:, :I]) * wide[:, I:], form)
            share = float((actual.data != expected.data).double().mean())
            return None if share <= 0.002 else f"{share:.2%} of the codes differ"

        yield Case(
            f"SwiGLU and {form}",
            f"{N} × {I}",
            gate,
            {"kernel": partial(experts.activation, h, form)},
            {
                "torch, then our quantiser": lambda form=form: gemm.operand(F.silu(h[:, :I]) * h[:, I:], form),
                COPY: make_copy(int(N * I * width), on),
            },
            int(N * I * width),
        )


def heads(on: str, tiny: bool) -> Iterator[Case]:
    N, D, V = (40, 32, 100) if tiny else (8192, 2048, 151936)
    hidden, weight = torch.randn(N, D, device=on).bfloat16(), (torch.randn(V, D, device=on) / D**0.5).bfloat16()
    targets = torch.randint(V, (N,), device=on)

    def run(call: Callable, backward: bool, h: Tensor, w: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        """Log-probs and entropies; in the backward pass, the gradients of their sum."""
        if not backward:
            return call(h, w, t)
        h, w = h.detach().requires_grad_(), w.detach().requires_grad_()
        total = sum(part.sum() for part in call(h, w, t))
        assert isinstance(total, Tensor)
        return torch.autograd.grad(total, (h, w))

    def chunked(h: Tensor, w: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        parts = [
            checkpoint(ref_logprob.linear_logprob, a, w, b, use_reentrant=False)
            for a, b in zip(h.split(1024), t.split(1024), strict=True)
        ]
        return torch.cat([logp for logp, _ in parts]), torch.cat([entropy for _, entropy in parts])

    subset = hidden[:256], weight, targets[:256]
    wide = subset[0].double(), weight.double(), subset[2]
    note = {}
    if on == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(linear_logprob.linear_logprob, True, hidden, weight, targets)
        extra = torch.cuda.max_memory_allocated() - before - 2 * (hidden.numel() + weight.numel())
        note = {"extra_memory_share_of_float32_logits": round(extra / (4 * N * V), 4)}
    for backward in (False, True):
        yield Case(
            "log-prob and entropy" + (", gradients" if backward else ""),
            f"{N} × {D} × {V}",
            make_error_gate(
                partial(run, linear_logprob.linear_logprob, backward, *subset),
                partial(run, ref_logprob.linear_logprob, backward, *subset),
                partial(run, ref_logprob.linear_logprob, backward, *wide),
                "linear_logprob",
            ),
            {"kernel": partial(run, linear_logprob.linear_logprob, backward, hidden, weight, targets)},
            {"torch, 1024 tokens at a time": partial(run, chunked, backward, hidden, weight, targets)},
            flops=2 * N * D * V * (4 if backward else 1),
            note=note if backward else {},
        )


def routers(on: str, tiny: bool) -> Iterator[Case]:
    N, E, k, alpha = (40, 16, 4, 0.5) if tiny else (32768, 128, 8, 0.5)
    scores = torch.randn(N, E, device=on)
    replayed = (scores + 0.3 * torch.randn_like(scores)).topk(k).indices

    def gate() -> str | None:
        for replay_ids in (None, replayed):
            gates, expert_ids = router_replay.route(scores, k, replay_ids, alpha)
            expected, expected_ids = ref_router_replay.route(
                scores.cpu(), k, None if replay_ids is None else replay_ids.cpu(), alpha
            )
            exact, _ = ref_router_replay.route(
                scores.double().cpu(), k, None if replay_ids is None else replay_ids.cpu(), alpha
            )
            if not torch.equal(expert_ids.cpu(), expected_ids):
                return "route chooses different experts than the reference"
            if not excess(gates.cpu(), expected, exact) <= 1:
                return "the gates of route are wrong"
        return None

    def eager() -> Tensor:
        expert_ids = scores.softmax(-1).topk(k).indices
        picked = scores.softmax(-1).gather(1, expert_ids)
        return picked / picked.sum(-1, keepdim=True)

    yield Case(
        "router",
        f"{N} × {E}, top {k}",
        gate,
        {"kernel": partial(router_replay.route, scores, k)},
        {"softmax, topk, gather": eager},
    )
    yield Case(
        "router with filtered replay",
        f"{N} × {E}, top {k}",
        gate,
        {"kernel": partial(router_replay.route, scores, k, replayed, alpha)},
        {"ref": partial(ref_router_replay.route, scores, k, replayed, alpha), "softmax, topk, gather": eager},
    )


def dispatch(on: str, tiny: bool) -> Iterator[Case]:
    N, E, k, D = (40, 16, 4, 32) if tiny else (32768, 128, 8, 2048)
    expert_ids = torch.rand(N, E, device=on).topk(k).indices
    x, gates = torch.randn(N, D, device=on).bfloat16(), torch.rand(N, k, device=on)
    order, place, _ = expert_rows.sort_by_expert(expert_ids, E)
    rows = expert_rows.permute(x, order, place)

    def sorted_by_torch() -> tuple[Tensor, Tensor]:
        return expert_ids.flatten().argsort(stable=True), expert_ids.flatten().bincount(minlength=E)

    def summed_by_torch() -> Tensor:
        return (rows[place.flatten()].view(N, k, D) * gates[..., None].bfloat16()).sum(1)

    def gate() -> str | None:
        stable = sorted_by_torch()[0]
        if not torch.equal(order, stable):
            return "sort_by_expert is not the stable order"
        if not torch.equal(rows, x[stable // k]):
            return "permute moved the wrong rows"
        exact = (rows.double()[place.flatten()].view(N, k, D) * gates.double()[..., None]).sum(1)
        return (
            None
            if excess(expert_rows.unpermute(rows, order, place, gates), summed_by_torch(), exact) <= 1
            else "the sums of unpermute are wrong"
        )

    size, bytes_moved = f"{N} × {k} × {D}", (N * k + N) * D * 2
    yield Case(
        "sort by expert",
        f"{N} × {k}, {E} experts",
        gate,
        {"kernel": partial(expert_rows.sort_by_expert, expert_ids, E)},
        {"argsort, bincount": sorted_by_torch},
    )
    yield Case(
        "permute",
        size,
        gate,
        {"kernel": partial(expert_rows.permute, x, order, place)},
        {"index_select": lambda: x[order // k], COPY: make_copy(bytes_moved, on)},
        bytes_moved,
    )
    yield Case(
        "unpermute",
        size,
        gate,
        {"kernel": partial(expert_rows.unpermute, rows, order, place, gates)},
        {"gather, multiply, sum": summed_by_torch, COPY: make_copy(bytes_moved, on)},
        bytes_moved,
    )


def deltas(on: str, tiny: bool) -> Iterator[Case]:
    n = 4096 if tiny else 2**29
    old = torch.randn(n, device=on).bfloat16()
    new = old.clone()
    changed_places = torch.randperm(n, device=on)[: n // 100] if tiny else torch.randint(n, (n // 100,), device=on)
    new[changed_places] = -new[changed_places]
    new[:3] = torch.tensor([float("nan"), -0.0, 0.0], dtype=torch.bfloat16)
    positions, steps = weight_sync.encode_delta(old, new)

    def gate() -> str | None:
        if not torch.equal(weight_sync.apply_delta(old, positions, steps).view(torch.int16), new.view(torch.int16)):
            return "applying the delta does not give the new version"
        window = slice(0, min(n, 2**20))
        if not same_bits(
            weight_sync.encode_delta(old[window], new[window]),
            ref_weight_sync.encode_delta(old[window].cpu(), new[window].cpu()),
        ):
            return "encode_delta differs from the reference"
        return None

    size = 4 * n + 12 * len(positions)
    yield Case(
        "delta, encode",
        f"{n} weights, 1% changed",
        gate,
        {"kernel": partial(weight_sync.encode_delta, old, new)},
        {"torch.nonzero": partial(ref_weight_sync.encode_delta, old, new), COPY: make_copy(size, on)},
        size,
    )


def orthogonal(on: str, tiny: bool) -> Iterator[Case]:
    for shape in ((1, 48, 32),) if tiny else ((1, 2048, 2048), (1, 2048, 8192), (64, 768, 2048)):
        G = torch.randn(*shape, device=on)
        kernel, reference = (partial(f, G, dtype=torch.bfloat16) for f in (muon.newton_schulz, ref_muon.newton_schulz))
        exact = partial(ref_muon.newton_schulz, G.double(), dtype=torch.float64)
        yield Case(
            "Newton–Schulz, bfloat16",
            " × ".join(map(str, shape)),
            make_error_gate(kernel, reference, exact, "newton_schulz"),
            {"kernel": kernel},
            {"torch, bfloat16": reference},
        )
