"""Speed of the kernels on a GPU, each beside what one would otherwise call, behind a gate: no number where the result is wrong.

A case is data, what is right about the result, and contenders: kernels, and baselines of torch. Contenders take turns; a figure is the
median over rounds of a ratio within a round. Bandwidth is compared with a copy timed in the same rounds.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from etude.runs import RunError, atomic_write, machine
from kernels import delta, experts, gemm, grouped_gemm, linear_logprob, moe, newton_schulz, quant
from kernels.gate import excess, same_bits
from ref import delta as ref_delta
from ref import linear_logprob as ref_logprob
from ref import muon, router_replay
from ref import quant as ref_quant

COPY = "copy"


@dataclass
class Case:
    """One line of the table: what is timed beside what."""

    name: str
    size: str
    gate: Callable[[], str | None]
    """None where every kernel of the case is right, else what is wrong."""
    ours: dict[str, Callable[[], object]]
    baselines: dict[str, Callable[[], object]]
    bytes: int = 0
    """Read and written by ours, where memory is the limit; the baseline is then a copy of as many."""
    flops: int = 0
    note: dict = field(default_factory=dict)


def kernels(out: Path | None = Path("results"), rounds: int = 15) -> dict:
    """Times every kernel on the first GPU and writes out/kernels-DEVICE.json. Raises RunError without a GPU; a case whose gate is shut is
    named and has no number."""
    if not torch.cuda.is_available():
        raise RunError("etude bench kernels needs a CUDA GPU; on this machine `make test` runs the kernels, interpreted")
    results = []
    for case in cases("cuda"):
        wrong = case.gate()
        line = {"case": case.name, "size": case.size, "wrong": wrong}
        if wrong is None:
            line |= summary(case, take_turns(case.ours | case.baselines, rounds))
        results.append(line)
        print(sentence(line))
        del case
        torch.cuda.empty_cache()
    record = {
        "what": "kernels beside what one would otherwise call, seconds and ratios",
        "command": "etude bench kernels", "machine": machine() | device(), "rounds": rounds, "results": results,
    }  # fmt: skip
    if out is not None:
        path = Path(out) / f"kernels-{re.sub(r'[^a-z0-9]+', '-', device()['gpu'].lower()).strip('-')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps(record, indent=1) + "\n")
        print(f"written: {path}")
    return record


def device() -> dict:
    import triton

    return {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "triton": triton.__version__}


def take_turns(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every contender, round by round; between calls the L2 cache is written over."""
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    names, seconds = list(contenders), {name: [] for name in contenders}
    for turn in range(rounds + 3):
        for name in names:
            flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            contenders[name]()
            end.record()
            torch.cuda.synchronize()
            if turn >= 3:
                seconds[name].append(begin.elapsed_time(end) / 1000)
        names.append(names.pop(0))
    return seconds


def summary(case: Case, seconds: dict[str, list[float]]) -> dict:
    """Medians, and every kernel's speed over every baseline's: where memory is the limit, bytes/s over the copy's."""
    ratios = {}
    for ours in case.ours:
        for name in case.baselines:
            each = sorted(theirs / mine for mine, theirs in zip(seconds[ours], seconds[name], strict=True))
            quarter = len(each) // 4
            ratios[f"{ours} / {name}"] = [round(v, 3) for v in (statistics.median(each), each[quarter], each[-1 - quarter])]
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    rate = {"TB/s": case.bytes / 1e12} if case.bytes else {"TFLOP/s": case.flops / 1e12} if case.flops else {}
    rates = {unit: {name: round(amount / s, 3) for name, s in middle.items()} for unit, amount in rate.items()}
    return {"seconds": middle, "ratio_and_middle_half": ratios, **rates, **case.note}


def sentence(line: dict) -> str:
    head = f"{line['case']}, {line['size']}"
    if line["wrong"]:
        return f"{head}: no speed to show, {line['wrong']}"
    return f"{head}: " + "; ".join(f"{name} {low:.2f} [{a:.2f}, {b:.2f}]" for name, (low, a, b) in line["ratio_and_middle_half"].items())


# Cases. `tiny` are sizes for the interpreter, which checks the gates.


def cases(on: str, tiny: bool = False) -> Iterator[Case]:
    """One after another, so that only one case's data is in memory."""
    for make in (quantisers, products, expert_products, layers, heads, routers, dispatch, deltas, orthogonal):
        yield from make(on, tiny)


def copy_of(amount: int, on: str) -> Callable[[], object]:
    """Copies half of `amount` bytes, so that as many are read and written in all."""
    source = torch.zeros(amount // 2, dtype=torch.uint8, device=on)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def bits(ours: Callable, theirs: Callable, *arguments) -> Callable[[], str | None]:
    def gate() -> str | None:
        expected = theirs(*(a.cpu() if isinstance(a, Tensor) else a for a in arguments))
        return None if same_bits(ours(*arguments), expected) else f"{ours.__name__} differs from the reference"

    return gate


def three_ways(ours: Callable, theirs: Callable, exact: Callable, name: str) -> Callable[[], str | None]:
    """Each gives a tensor or several: of the kernel, of the reference, of float64."""

    def tuple_of(result) -> tuple[Tensor, ...]:
        return result if isinstance(result, tuple) else (result,)

    def gate() -> str | None:
        worst = max(excess(a, b.to(a.device), c.to(a.device)) for a, b, c in zip(*map(tuple_of, (ours(), theirs(), exact())), strict=True))
        return None if worst <= 1 else f"{name}'s error is {worst:.1f} times what it may be"

    return gate


def quantisers(on: str, tiny: bool) -> Iterator[Case]:
    n = 64 if tiny else 8192
    x = torch.randn(n, n, device=on).bfloat16()
    # The reference on a CPU takes its time: the gate looks at a part with every kind of block.
    part = x[: min(n, 512)].clone()
    part[0, :40], part[1, 3], part[2, 5] = 0, torch.nan, torch.inf
    for name, ours, theirs, arguments, width in (
        ("MXFP8", quant.mxfp8_quantize, ref_quant.mxfp8_quantize, (), 3 + 1 / 32),
        ("MXFP8, both axes", quant.mxfp8_quantize_both, ref_quant.mxfp8_quantize_both, (), 4 + 2 / 32),
        ("NVFP4 per token", quant.nvfp4_quantize, ref_quant.nvfp4_quantize, (), 2.5 + 1 / 16),
        ("FP8 1 × 128", quant.blockwise_fp8_quantize, ref_quant.blockwise_fp8_quantize, ((1, 128),), 3 + 4 / 128),
        ("FP8 128 × 128", quant.blockwise_fp8_quantize, ref_quant.blockwise_fp8_quantize, ((128, 128),), 3 + 4 / 128**2),
    ):
        size = int(n * n * width)
        yield Case(name, f"{n} × {n}", bits(ours, theirs, part, *arguments), {"kernel": partial(ours, x, *arguments)}, {COPY: copy_of(size, on)}, size)


def products(on: str, tiny: bool) -> Iterator[Case]:
    n = 64 if tiny else 8192
    a, b = (torch.randn(n, n, device=on).bfloat16() for _ in range(2))
    for form in ("fp8", "mxfp8", "nvfp4-token"):
        left, right = gemm.operand(a, form), gemm.operand(b, form, weight=True)
        baselines = {"torch.mm, bfloat16": lambda: a @ b.T}
        if form == "fp8" and on == "cuda":
            scaled = torch_scaled(left, right)
            if scaled is not None:
                baselines["torch, 1 × 128 by 128 × 128"] = scaled
        yield Case(
            f"product, {form}", f"{n}³", three_ways(*product_ways(a[:256], b, form), f"product, {form}"),
            {"kernel": partial(gemm.matmul, left, right, torch.bfloat16), "kernel with quantisation": partial(gemm.linear, a, b, form)},
            baselines, flops=2 * n**3,
        )  # fmt: skip


def product_ways(a: Tensor, b: Tensor, form: str) -> tuple[Callable, Callable, Callable]:
    x, w = ref_quant.rounded(a.cpu(), form, 1).to(a.device), ref_quant.rounded(b.cpu(), form, 1, True).to(b.device)
    return lambda: gemm.linear(a, b, form), lambda: (x @ w.T).bfloat16(), lambda: x.double() @ w.double().T


def torch_scaled(left: gemm.Operand, right: gemm.Operand) -> Callable[[], Tensor] | None:
    """torch's product of the same codes, where this torch and GPU have it."""
    a, b = left.data.view(torch.float8_e4m3fn), right.data.view(torch.float8_e4m3fn)
    scale_a, scale_b = left.scales.T.contiguous().T, right.scales.T.contiguous()
    call = partial(torch._scaled_mm, a, b.T, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)
    try:
        call()
    except (RuntimeError, ValueError):
        return None
    return call


def split_rows(N: int, E: int, zipf: bool) -> Tensor:
    """Ends of the experts' rows: equal shares, or shares as 1/rank, the last expert empty."""
    share = 1 / torch.arange(1, E + 1, dtype=torch.float64) if zipf else torch.ones(E, dtype=torch.float64)
    if zipf:
        share[-1] = 0
    return (share.cumsum(0) / share.sum() * N).round().long()


def expert_products(on: str, tiny: bool) -> Iterator[Case]:
    """The expert shapes of Qwen3-30B-A3B: 2048 → 2 × 768 → 2048, 128 experts, 8 of them a token."""
    E, D, J, sizes = (4, 32, 48, (40,)) if tiny else (128, 2048, 1536, (8 * 8192, 8 * 32768))
    for N in sizes:
        for zipf in (False, True):
            ends = split_rows(N, E, zipf).to(on)
            x, w, up = torch.randn(N, D, device=on).bfloat16(), (torch.randn(E, J, D, device=on) / D**0.5).bfloat16(), torch.randn(N, J, device=on).bfloat16()
            size = f"{N} × {D} × {J}, {E} experts, {'Zipf' if zipf else 'balanced'}"
            operands = {form: (gemm.operand(x, form), gemm.operand(w, form, weight=True), gemm.operand(up, form), gemm.operand(w, form, -2, True)) for form in ("bfloat16", "fp8")}  # fmt: skip
            offsets = ends.int()
            kinds = {
                "forward": (lambda f: grouped_gemm.expert_rows(*operands[f][:2], ends, x.dtype), lambda: torch._grouped_mm(x, w.mT, offs=offsets)),
                "dgrad": (lambda f: grouped_gemm.expert_rows(*operands[f][2:], ends, x.dtype), lambda: torch._grouped_mm(up, w, offs=offsets)),
                "wgrad": (lambda f: grouped_gemm.expert_weights(up, x, ends, f, x.dtype), lambda: torch._grouped_mm(up.T, x, offs=offsets)),
            }
            for kind, (kernel, theirs) in kinds.items():
                yield Case(
                    f"experts, {kind}", size, grouped_gate(kind, kernel, x, w, up, ends),
                    {f"kernel, {form}": partial(kernel, form) for form in operands}, {"torch._grouped_mm, bfloat16": theirs}, flops=2 * N * D * J,
                )  # fmt: skip


def grouped_gate(kind: str, kernel: Callable, x: Tensor, w: Tensor, up: Tensor, ends: Tensor) -> Callable[[], str | None]:
    """Against float64 and the reference, expert by expert, for the largest, the smallest and the last of them."""

    def gate() -> str | None:
        begins = torch.cat([ends.new_zeros(1), ends[:-1]]).tolist()
        counts = [b - a for a, b in zip(begins, ends.tolist(), strict=True)]
        some = {counts.index(max(counts)), counts.index(min(counts)), len(counts) - 1}
        for form in ("bfloat16", "fp8"):
            result = kernel(form)
            for e in some:
                rows = slice(begins[e], begins[e] + min(counts[e], 512 if kind != "wgrad" else counts[e]))
                if kind == "wgrad":
                    a, b = (ref_quant.rounded(t[rows].cpu(), form, 0) for t in (up, x))
                    a, b, ours = a.T, b.T, result[e]
                elif kind == "forward":
                    a, b, ours = ref_quant.rounded(x[rows].cpu(), form, 1), ref_quant.rounded(w[e].cpu(), form, 1, True), result[rows]
                else:
                    a, b, ours = ref_quant.rounded(up[rows].cpu(), form, 1), ref_quant.rounded(w[e].cpu(), form, 0, True).T, result[rows]
                a, b = a.to(x.device), b.to(x.device)
                worst = excess(ours, (a @ b.T).to(x.dtype), a.double() @ b.double().T)
                if not worst <= 1:
                    return f"{kind} in {form}, expert {e}: error {worst:.1f} times what it may be"
        return None

    return gate


def layers(on: str, tiny: bool) -> Iterator[Case]:
    """silu(gate) · up and its quantisation, in one kernel and in two steps."""
    N, I = (40, 64) if tiny else (262144, 768)
    h = torch.randn(N, 2 * I, device=on).bfloat16()
    for form, width in (("fp8", 5 + 4 / 128), ("mxfp8", 5 + 1 / 32), ("nvfp4-token", 4.5 + 1 / 16)):

        def gate(form=form) -> str | None:
            # A last place of exp moves a value across a midpoint now and then.
            wide = h[:256].float()
            ours, theirs = experts.activation(wide, form), gemm.operand(F.silu(wide[:, :I]) * wide[:, I:], form)
            share = max(float((a != b).double().mean()) for a, b in ((ours.data, theirs.data),))
            return None if share <= 0.002 else f"{share:.2%} of the codes differ"

        yield Case(
            f"SwiGLU and {form}", f"{N} × {I}", gate, {"kernel": partial(experts.activation, h, form)},
            {"torch, then our quantiser": lambda form=form: gemm.operand(F.silu(h[:, :I]) * h[:, I:], form), COPY: copy_of(int(N * I * width), on)},
            int(N * I * width),
        )  # fmt: skip


def heads(on: str, tiny: bool) -> Iterator[Case]:
    N, D, V = (40, 32, 100) if tiny else (8192, 2048, 151936)
    hidden, weight = torch.randn(N, D, device=on).bfloat16(), (torch.randn(V, D, device=on) / D**0.5).bfloat16()
    targets = torch.randint(V, (N,), device=on)

    def chunked(backward: bool) -> Tensor:
        h, w = hidden.detach().requires_grad_(backward), weight.detach().requires_grad_(backward)
        chunks = [torch.utils.checkpoint.checkpoint(ref_logprob.linear_logprob, a, w, t, use_reentrant=False) for a, t in zip(h.split(1024), targets.split(1024), strict=True)]  # fmt: skip
        logp = torch.cat([c[0] for c in chunks])
        return torch.autograd.grad(logp.sum(), (h, w))[0] if backward else logp

    def fused(backward: bool) -> Tensor:
        h, w = hidden.detach().requires_grad_(backward), weight.detach().requires_grad_(backward)
        logp = linear_logprob.linear_logprob(h, w, targets)[0]
        return torch.autograd.grad(logp.sum(), (h, w))[0] if backward else logp

    def ways(few: int = 256) -> tuple[Callable, Callable, Callable]:
        h, t = hidden[:few], targets[:few]
        return (
            lambda: linear_logprob.linear_logprob(h, weight, t),
            lambda: ref_logprob.linear_logprob(h, weight, t),
            lambda: ref_logprob.linear_logprob(h.double(), weight.double(), t),
        )

    note = {}
    if on == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fused(True)
        extra = torch.cuda.max_memory_allocated() - before - 2 * (hidden.numel() + weight.numel())
        note = {"extra_memory_share_of_float32_logits": round(extra / (4 * N * V), 4)}
    for backward in (False, True):
        yield Case(
            "log-prob and entropy" + (", with gradients" if backward else ""), f"{N} × {D} × {V}", three_ways(*ways(), "linear_logprob"),
            {"kernel": partial(fused, backward)}, {"torch, 1024 tokens at a time": partial(chunked, backward)},
            flops=2 * N * D * V * (4 if backward else 1), note=note if backward else {},
        )  # fmt: skip


def routers(on: str, tiny: bool) -> Iterator[Case]:
    N, E, k, alpha = (40, 16, 4, 0.5) if tiny else (32768, 128, 8, 0.5)
    scores = torch.randn(N, E, device=on)
    replayed = (scores + 0.3 * torch.randn_like(scores)).topk(k).indices

    def gate() -> str | None:
        for given in (None, replayed):
            gates, chosen = moe.route(scores, k, given, alpha)
            expected, theirs = router_replay.route(scores.cpu(), k, None if given is None else given.cpu(), alpha)
            exact, _ = router_replay.route(scores.double().cpu(), k, None if given is None else given.cpu(), alpha)
            if not torch.equal(chosen.cpu(), theirs):
                return "route picks other experts than the reference"
            if not excess(gates.cpu(), expected, exact) <= 1:
                return "route's gates are off"
        return None

    def eager() -> Tensor:
        chosen = scores.softmax(-1).topk(k).indices
        picked = scores.softmax(-1).gather(1, chosen)
        return picked / picked.sum(-1, keepdim=True)

    yield Case("router", f"{N} × {E}, top {k}", gate, {"kernel": partial(moe.route, scores, k)}, {"softmax, topk, gather": eager})
    yield Case(
        "router with filtered replay", f"{N} × {E}, top {k}", gate, {"kernel": partial(moe.route, scores, k, replayed, alpha)},
        {"ref": partial(router_replay.route, scores, k, replayed, alpha), "softmax, topk, gather": eager},
    )  # fmt: skip


def dispatch(on: str, tiny: bool) -> Iterator[Case]:
    N, E, k, D = (40, 16, 4, 32) if tiny else (32768, 128, 8, 2048)
    chosen = torch.rand(N, E, device=on).topk(k).indices
    x, gates = torch.randn(N, D, device=on).bfloat16(), torch.rand(N, k, device=on)
    order, place, _ = moe.sort_by_expert(chosen, E)

    def gate() -> str | None:
        stable = chosen.cpu().flatten().argsort(stable=True)
        if not torch.equal(order.cpu(), stable):
            return "sort_by_expert is not the stable order"
        rows = moe.permute(x, order, place)
        if not torch.equal(rows.cpu(), x.cpu()[stable // k]):
            return "permute moved other rows"
        exact = (rows.double()[place.flatten()].view(N, k, D) * gates.double()[..., None]).sum(1)
        theirs = (rows[place.flatten()].view(N, k, D) * gates[..., None].bfloat16()).sum(1)
        return None if excess(moe.unpermute(rows, order, place, gates), theirs, exact) <= 1 else "unpermute's sums are off"

    rows = moe.permute(x, order, place)
    yield Case("sort by expert", f"{N} × {k}, {E} experts", gate, {"kernel": partial(moe.sort_by_expert, chosen, E)}, {"argsort, bincount": lambda: (chosen.flatten().argsort(stable=True), chosen.flatten().bincount(minlength=E))})  # fmt: skip
    size = (N * k + N) * D * 2
    yield Case("permute", f"{N} × {k} × {D}", gate, {"kernel": partial(moe.permute, x, order, place)}, {"index_select": lambda: x[order // k], COPY: copy_of(size, on)}, size)
    yield Case("unpermute", f"{N} × {k} × {D}", gate, {"kernel": partial(moe.unpermute, rows, order, place, gates)}, {"gather, multiply, sum": lambda: (rows[place.flatten()].view(N, k, D) * gates[..., None].bfloat16()).sum(1), COPY: copy_of(size, on)}, size)  # fmt: skip


def deltas(on: str, tiny: bool) -> Iterator[Case]:
    n = 4096 if tiny else 2**29
    old = torch.randn(n, device=on).bfloat16()
    new = old.clone()
    where = torch.randperm(n, device=on)[: n // 100] if tiny else torch.randint(n, (n // 100,), device=on)
    new[where] = -new[where]
    new[:3] = torch.tensor([float("nan"), -0.0, 0.0], dtype=torch.bfloat16)
    positions, values = delta.encode_delta(old, new)

    def gate() -> str | None:
        if not torch.equal(delta.apply_delta(old, positions, values).view(torch.int16), new.view(torch.int16)):
            return "the delta applied is not the new version"
        few = slice(0, min(n, 2**20))
        if not same_bits(delta.encode_delta(old[few], new[few]), ref_delta.encode_delta(old[few].cpu(), new[few].cpu())):
            return "encode_delta differs from the reference"
        return None

    size = 4 * n + 10 * len(positions)
    yield Case("delta, encode", f"{n} weights, 1% changed", gate, {"kernel": partial(delta.encode_delta, old, new)}, {"torch.nonzero": partial(ref_delta.encode_delta, old, new), COPY: copy_of(size, on)}, size)  # fmt: skip


def orthogonal(on: str, tiny: bool) -> Iterator[Case]:
    for shape in ((1, 48, 32),) if tiny else ((1, 2048, 2048), (1, 2048, 8192), (64, 768, 2048)):
        G = torch.randn(*shape, device=on)
        ours, theirs = (partial(f, G, dtype=torch.bfloat16) for f in (newton_schulz.newton_schulz, muon.newton_schulz))
        exact = partial(muon.newton_schulz, G.double(), dtype=torch.float64)
        yield Case("Newton–Schulz, bfloat16", " × ".join(map(str, shape)), three_ways(ours, theirs, exact, "newton_schulz"), {"kernel": ours}, {"torch, bfloat16": theirs})  # fmt: skip
