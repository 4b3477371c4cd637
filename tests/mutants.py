"""Plausible mistakes in `ref/`, `scaled/`, `environments/` and `kit/`, one line each, and the tests that must notice each: what tests are worth.

    make mutants                             all of them: at most 40 minutes on two cores
    python -m tests.mutants --only kl        those whose file, line or test contains a word
    python -m tests.mutants --fresh          forgets what an interrupted run has found

The checkout is never edited: each of two slots is a copy of the tree in a temporary folder. This process imports torch, pytest
and what else the tests want, once. A mutant is a fork of it: in the slot's copy one line is another, and the test file, or the test function, that
the mutant names runs up to its first failure. Hypothesis draws the same examples each time, so that the outcome does not depend on the day. All
tests run without a mutation first: one that fails by itself tells nothing, and those that take long come last when there is a mutation. Mutants
with fast tests come first, too. The cache of sandboxes lies in the temporary folder: no root file system of a mutant stays in the user's own.

A mutant that lives is a hole in the tests, unless no test can tell it from the original: then the list says why. The exit code is 1
where a mutant lives without a reason, where one with a reason is killed, and where a line is no longer there.
"""

import argparse
import gc
import hashlib
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kit.disk import read_lines

__all__ = ["MUTANTS", "Mutant", "mutated"]

ROOT = Path(__file__).resolve().parent.parent
JOURNAL = ROOT / "runs" / "mutants.jsonl"
SLOTS = 2
QUICK = 0.3
"""Seconds of a test that need not wait for others."""
PATIENCE = 10
"""How many times the processor time that they take without a mutation tests may take, and half a minute more: a loop that does not end is a
mistake noticed too. Where they wait for an hour instead, something is wrong with the tests."""
HOUR = 3600.0
WANTED = (
    "hypothesis.strategies",
    "pytest",
    "torch._dynamo",
    "torch.optim",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.auto.modeling_auto",
    "trl.trainer.grpo_trainer",
    "trl.trainer.rloo_trainer",
    "mpmath",
    "scipy.stats",
    "tokenizers",
    "safetensors.torch",
    "jaxtyping",
    "beartype.claw",
    "anyio._backends._asyncio",
    "torchao.prototype.mx_formats.mx_tensor",
    "torchao.prototype.mx_formats.nvfp4_tensor",
)
"""What the tests import that is not ours."""


@dataclass(frozen=True)
class Mutant:
    """One mistake."""

    file: str
    """Where it is made."""
    old: str
    """A piece of one line, found once in the file."""
    new: str
    """What stands there instead."""
    test: str
    """The test file that must fail, or the function in it: FILE::NAME."""
    same: str = ""
    """Why no test can tell the two apart; empty where one can."""

    def __str__(self) -> str:
        return f"{self.file}: {self.old.strip()} → {self.new.strip()}"


def of(name: str, *pairs: tuple[str, ...], test: str = "", room: str = "ref") -> Iterator[Mutant]:
    """The mutants of a file of a room. `test`: FILE or FILE::FUNCTION beneath tests/, without .py; by default tests/ref/test_NAME.py."""
    path, _, function = (test or f"ref/test_{Path(name).name}").partition("::")
    for old, new, *same in pairs:
        yield Mutant(f"{room}/{name}.py", old, new, f"tests/{path}.py{f'::{function}' if function else ''}", *same)


MUTANTS: list[Mutant] = [
    *of(
        "dr_grpo",
        ("relative - relative.mean(1, keepdim=True)", "relative - relative.mean()"),
        ("advantages = centred * (N / (N - 1)) if", "advantages = centred * ((N - 1) / N) if"),
        ("square().sum(1, keepdim=True) / (N - 1)", "square().sum(1, keepdim=True) / N"),
        (".sqrt() + eps)", ".sqrt())"),
        ("return -(weight * surrogate).sum() / budget", "return (weight * surrogate).sum() / budget"),
        ("return -(weight * surrogate).sum() / budget", "return -(weight * surrogate).sum() / weight.sum().clamp(min=1)"),
        ("return -(weight * surrogate).sum() / budget", "return -(weight * surrogate).mean()"),
        ("weight = weight / _tokens(mask, keep)", "weight = weight / mask.shape[1]"),
        ("live = live & keep[:, None]", "pass"),
        ("- behavior_logp.detach().to(wide)).where(live, 0)", "- behavior_logp.to(wide)).where(live, 0)"),
        ("- behavior_logp.detach().to(wide)).where(live, 0)", "- behavior_logp.detach().to(wide)) * live"),
        ("return log_ratio, advantages.detach().to(wide)", "return log_ratio, advantages.to(wide)"),
        ("mask.to(wide).where(live, 0)", "live.to(wide)"),
        ("log_ratio.sum(1, keepdim=True) / _tokens(mask, keep)", "log_ratio.sum(1, keepdim=True) / log_ratio.shape[1]"),
        ("log_ratio.clamp(max=math.log1p(clip_high))", "log_ratio.clamp(max=math.log1p(clip_low))"),
        ("log_ratio.clamp(max=math.log1p(clip_high))", "log_ratio.clamp(max=clip_high)"),
        ("floor = math.log1p(-clip_low)", "floor = -math.log1p(clip_low)"),
        ("clipped & (advantage != 0)", "clipped"),
        ("torch.expm1(log_ratio) - log_ratio", "torch.expm1(log_ratio)"),
        ('"mean_ratio": (weight * log_ratio.exp())', '"mean_ratio": (log_ratio.exp())'),
        ('"dapo": Variant(scale="std", clip_high=0.28, drop_overlong=True)', '"dapo": Variant(scale="std", drop_overlong=True)'),
        ("clip_low=3e-4, clip_high=4e-4", "clip_low=4e-4, clip_high=3e-4"),
        ("keep=finished if variant.drop_overlong else None", "keep=finished"),
    ),
    *of(
        "kl",
        ("return -log_ratio", "return log_ratio"),
        ("return log_ratio.square() / 2", "return log_ratio.square()"),
        ("return torch.expm1(log_ratio) - log_ratio", "return torch.expm1(-log_ratio) + log_ratio"),
        ("return torch.expm1(log_ratio) - log_ratio", "return log_ratio.exp() - 1 - log_ratio"),
        ("log_ratio = ref_logp - logp", "log_ratio = (ref_logp - logp).clamp(-20, 20)"),
        ("-(probs * log_ratio).sum(-1)", "-(probs.detach() * log_ratio).sum(-1)"),
        ("-(probs * log_ratio).sum(-1)", "-(probs * log_ratio).mean(-1)"),
        ("(u / 2 + u * u / 8,", "(u / 2 + u * u / 4,"),
        ("math.expm1(u) - u if", "math.exp(u) - u if"),
        ("    return u / 2", "    return u"),
    ),
    *of(
        "length_penalty",
        ("z = (1 - q) * growth", "z = (q - 1) * growth"),
        ("torch.exp(-q * growth)", "torch.exp((1 - q) * growth)"),
        ("torch.where(zero, 1.0, numerator", "torch.where(zero, 0.0, numerator"),
        ("denominator.masked_fill(zero, 1.0)", "denominator"),
        ("denominator.abs() < 1e-150", "denominator.abs() < 1e-6"),
        ("growth = torch.log1p(k * wide)", "growth = torch.log(1 + k * wide)"),
        ("_ratio(growth, k * wide) * ", ""),
        ("tool_output_tokens: float = 0.1", "tool_output_tokens: float = 1.0"),
        ("turns: float = 100.0", "turns: float = 20.0"),
        ("total += price[name] * count", "total += count"),
    ),
    *of(
        "self_summary",
        ("self.length < chaining.trigger", "self.length <= chaining.trigger"),
        (
            "self.length < chaining.trigger or self.used == chaining.max_segments",
            "self.length < chaining.trigger or self.used > chaining.max_segments",
        ),
        ("summary = torch.arange(T) >= (T", "summary = torch.arange(T) > (T"),
        ("self.begin = self.length + len(chaining.request)", "self.begin = self.length"),
        ("+ self.length - len(self.pending)", "+ self.length"),
        ("len(self.summary) > chaining.longest_summary", "len(self.summary) - 1 > chaining.longest_summary"),
        ("*self.summary, *chaining.resume", "*self.summary[:-1], *chaining.resume"),
        ("for exchange, _ in reversed(self.exchanges)", "for exchange, _ in self.exchanges"),
        ("if kept and size > chaining.longest_summary", "if size > chaining.longest_summary"),
        ("sum(int((~s.sampled).sum()) for s", "sum(len(s.tokens) for s"),
        ("front + self.trigger + self.room +", "front + self.trigger +"),
        ("twin.exchanges = list(self.exchanges)", "twin.exchanges = self.exchanges"),
        ("return advantages.repeat_interleave(counts)", "return (advantages / counts).repeat_interleave(counts)"),
        ("self.length, self.used = prompt, len(prompt), self.used + work", "self.length, self.used = prompt, len(prompt), self.used + 1"),
    ),
    *of(
        "self_summary",
        ("self.dropped += sum(turns for _, turns in self.exchanges[:count])", "pass"),
        (
            "[(self.rewritten[len(self.base) :],",
            "[(self.rewritten,",
            "truncation never keeps the oldest exchange, since all of those that reach the trigger do not fit",
        ),
        ("if len(prompt) < chaining.trigger or self.used", "if True or self.used"),
        test="ref/test_rollout",
    ),
    *of(
        "router_replay",
        ("scores.topk(k, -1)[0][:, -1:]", "scores.topk(k, -1)[0][:, :1]"),
        ("(math.log(alpha) if alpha else -math.inf)", "(alpha - 1 if alpha else -math.inf)"),
        ("plausible = scores >= floor", "plausible = scores > floor"),
        ("(rank + E * ~kept)", "(rank + E * kept)"),
        ("stable=True)[1].argsort(-1)", "stable=True)[1]"),
        ("if normalise else scores", "if not normalise else scores"),
        ("difference = (behavior - logp)[mask]", "difference = (logp - behavior)[mask]"),
        ("difference = (behavior - logp)[mask]", "difference = (behavior - logp)"),
        ("[0.5, 0.99]", "[0.5, 0.9]"),
        ("missing.any(2).any(0)", "missing.any(2).all(0)"),
        ("(a.unsqueeze(2) == b.unsqueeze(1)).any(2)", "(a == b)"),
    ),
    *of(
        "sft",
        ("end_of_turn(context.text, start, end, words.reader, traced.spelled)", "end"),
        ("if token.span() not in spelled]", "]"),
        ("if found and text.startswith(found[-1].text)", "if found"),
        ("if not text.startswith(before)", "if False"),
        ('if message.role != "assistant" or not message.learn', 'if message.role != "assistant"'),
        ("(mask[:length] & ~mask[1 : length + 1])", "(mask[:length] & ~mask[:length].roll(-1))"),
        ("nll / (n_tokens or 1.0)", "nll / (_ or 1.0)"),
    ),
    *of(
        "packing",
        ("left, at = min(fits)", "left, at = max(fits)"),
        ("(-lengths).argsort(stable=True)", "lengths.argsort(stable=True)"),
        ("(-costs.double()).argsort(stable=True)", "costs.double().argsort(stable=True)"),
        ("(-costs.double()).argsort(stable=True)", "torch.arange(len(costs))"),
        ("(load + float(costs[i]), rank)", "(load + 1.0, rank)"),
        ("return 1 / float((loads / most).mean())", "return 1 / float((loads / most).median())"),
        ("at, width - left, left - size", "at, left - size, left - size"),
        ("if left >= size]", "if left > size]"),
        ("+ self.quadratic * T.square()", "+ self.quadratic * T"),
        ("2.0 * config.num_hidden_layers * config.num_attention_heads", "2.0 * config.num_hidden_layers * config.num_key_value_heads"),
        ("config.parameters(active=True) - tables", "config.parameters() - tables"),
    ),
    *of(
        "quant",
        ("_product(rounded(grad, form, 1),", "_product(rounded(grad, form, 0),"),
        ("rounded(weight, form, 0, weight=True)", "rounded(weight, form, 1, weight=True)"),
        ("rounded(weight, form, 0, weight=True)", "rounded(weight, form, 0)"),
        ("rounded(grad, form, 0).T", "rounded(grad, form, 1).T"),
        ("rounded(x, form, 0)", "rounded(x, form, 1)"),
        ("rounded(weight, forward, 1, weight=True).T", "rounded(weight, forward, 0, weight=True).T"),
        ("_quantize(x, (128, 128)), (128, 128))", "_quantize(x, (1, 128)), (1, 128))"),
        ("scales = ((d + 0x7FFFFF) >> 23)", "scales = (d >> 23)"),
        ("(d <= 0x400000).int()", "(d <= 0x7FFFFF).int()"),
        ('"even": 1 << 19', '"even": 1 << 20'),
        ("extra) >> 23) - 8", "extra) >> 23) - 7"),
        ("power_of_two(127 - scales)[..., None]", "power_of_two(scales - 127)[..., None]"),
        ("codes.masked_fill_(lost[..., None], 0x7F)", "codes.masked_fill_(lost[..., None], 0x7E)"),
        ("s = amax / (E4M3_MAX * 6)", "s = amax / E4M3_MAX"),
        ('largest.amax(-1, keepdim=True) if scale == "token"', 'largest.amax() if scale == "token"'),
        ("_divide(split, step[..., None], division)", "_divide(split, (largest / 6.0)[..., None], division)"),
        ("codes[..., ::2] | (codes[..., 1::2] << 4)", "codes[..., 1::2] | (codes[..., ::2] << 4)"),
        ("gates.flatten()[order, None]", "gates.flatten()[:, None]"),
        ("gate, up = grouped_linear(", "up, gate = grouped_linear("),
        ("token = order // gates.shape[1]", "token = order % len(x)"),
        ("repeat_interleave(block[0], -2)", "repeat_interleave(block[1], -2)"),
    ),
    *of(
        "formats",
        ("size = x.abs().clamp_(max=6.0)", "size = x.abs()"),
        ("large = (exponent + 22) << 23", "large = (exponent + 23) << 23"),
        ("clamp_(min=127)", "clamp_(min=126)"),
        ("- large + 2 * (exponent - 127)", "- large + (exponent - 127)"),
        ("x = x.float().nan_to_num(0.0)", "x = x.float()"),
        ("2.0 ** (code - 127) for code", "2.0 ** (code - 128) for code"),
        ("*(-size for size in E2M1)", "*(size for size in E2M1)"),
    ),
    *of(
        "muon",
        ("(3.4445, -4.7750, 2.0315)\n", "(3.4445, -4.7750, 2.3015)\n"),
        ("steps: int = 5, *", "steps: int = 4, *"),
        ("gram, gram, beta=b, alpha=c)", "gram, gram, beta=c, alpha=b)"),
        (
            "tall = G.shape[-2] > G.shape[-1]",
            "tall = G.shape[-2] < G.shape[-1]",
            "p(XXᵀ)X = X p(XᵀX): the larger of the two products gives the same, and takes longer.",
        ),
        ("buffers, updates, 1 - momentum)", "buffers, updates, momentum)"),
        ("torch._foreach_lerp(updates, buffers, momentum)", "torch._foreach_lerp(updates, buffers, 1 - momentum)"),
        ("updates = torch._foreach_lerp(updates,", "updates = torch._foreach_lerp_(updates,"),
        ('1 - group["lr"] * group["weight_decay"]', '1 - group["weight_decay"]'),
        ("scale = max(1.0, m / n) ** 0.5", "scale = max(1.0, n / m) ** 0.5"),
        ("scale = max(1.0, m / n) ** 0.5", "scale = max(1.0, m / n)"),
        ('alpha=-group["lr"] * scale', 'alpha=group["lr"] * scale'),
        ('{"lm_head", "head", "gate", "router"}', '{"lm_head", "head", "router"}'),
        ("p.ndim < 2 or id(p) in outside or named", "p.ndim < 2 or named"),
        ('{"params": spared, "weight_decay": 0.0}', '{"params": spared, "weight_decay": weight_decay}'),
    ),
    *of(
        "mtp",
        ("(self.hnorm(x), self.enorm(emb))", "(self.enorm(x), self.hnorm(emb))"),
        ("(self.hnorm(x), self.enorm(emb))", "(self.enorm(emb), self.hnorm(x))"),
        ("F.pad(emb[:, k:], (0, 0, 0, min(k, T)))", "F.pad(emb[:, k + 1 :], (0, 0, 0, min(k + 1, T)))"),
        ("F.pad(emb[:, k:], (0, 0, 0, min(k, T)))", "emb.roll(-k, 1)"),
        ("emb.detach(), head.detach()\n", "emb.detach(), head\n"),
        ("scored &= weight[:, 1:] != 0", "scored &= weight[:, :-1] != 0"),
        ("weight[b, j + 1].to(wide)", "weight[b, j].to(wide)"),
        (" & (doc[b, (j - k).clamp(min=0)] == doc[b, j])", ""),
        ("at = w * ((j >= k)", "at = w * ((j > k)"),
        ("return total / mtp.mtp.depth, count", "return total, count"),
        ("@ head - m) * w", "@ head + m) * w"),
        ("q -= F.linear(target[at], head)", "q += F.linear(target[at], head)"),
        ("+ (negentropy * at).sum()", "+ negentropy.sum()"),
        ("target = wanted = ids[b, j + 1]", "target = wanted = ids[b, j]"),
        ("& (doc[:, 1:] >= 0)", "& (doc[:, 1:] > 0)"),
        ("rows = hidden[b, (j - k).clamp(min=0)]", "rows = hidden[b, j]"),
    ),
    *of(
        "engine/decoder",
        ("if u[k] * float(q[k, x]) >= float(p[k, x])", "if u[k] * float(q[k, x]) > float(p[k, x])"),
        ("(p[k] - q[k]).clamp_(min=0)", "p[k].clone()"),
        ("return len(draft), invert(p[len(draft)], u[-1])", "return len(draft), invert(p[0], u[-1])"),
        ("times > 2 for t, times in found", "times > 1 for t, times in found"),
        ("turn, times + 1 if turn == last else 1", "turn, times + 1"),
        ("known - 1 - max(0, self.depth - 1 - taken)", "known - 1"),
        ("for n in range(4, 0, -1)", "for n in range(1, 5)"),
        ("new[: new.index(stop) + 1]", "new[: new.index(stop)]"),
        ("p = (logits / self.temperature).softmax(-1)", "p = logits.softmax(-1)"),
        ("self.retracted = len(self.pending) - number", "self.retracted = len(self.pending)"),
        ("self.tokens += p.given", "pass"),
        test="ref/test_mtp",
    ),
    *of(
        "rollout",
        ("active = forks[-decoder.retracted]", "active = forks[0]"),
        ("active.read(SampledTurn(turn[:-1], stop) if", "active.read(SampledTurn(turn, stop) if"),
        test="ref/test_mtp",
    ),
    *of(
        "rollout",
        ("len(self.starts) >= limits.turns", "len(self.starts) > limits.turns"),
        ("limits.tokens is not None and self.sampled >= limits.tokens", "False"),
        ("else max(1, limits.tokens - self.sampled)", "else limits.tokens"),
        ("(remaining, None if self.builder.is_summary else limits.turn_tokens)", "(remaining, limits.turn_tokens)"),
        ("self.engine.extend(entry.slot, tokens, active.longest_turn)", "self.engine.extend(entry.slot, tokens)"),
        ("[stop, *tokens])", "tokens)"),
        ("self.messages[self.starts[builder.dropped] :]", "self.messages[self.opening :]"),
        ("if tokens is None or active.is_spent:", "if tokens is None:"),
        ("turn.stop is not None and not entry.active.is_spent)", "turn.stop is not None)"),
        ("for entry in [entry for entry in self.entries if keys(entry.key)]:", "for entry in ():"),
        ("            late = self.is_abandoned", "            late = False"),
        ("self.is_abandoned, over = True, self.done.is_set()", "self.is_abandoned, over = True, False"),
        ("while self.queue and len(self.entries) < self.most:", "while self.queue:"),
        ("self.engine.in_waves and any(call.entry.active is None for call in self.calls)", "False"),
        ("        driver.close()\n", "        pass\n"),
        ("call.done.is_set() or now - call.since > self.limits.seconds]", "call.done.is_set()]"),
        ("        elif call.error is not None:", "        elif False:"),
        ("        if entry.tries < self.limits.tries:", "        if entry.tries <= self.limits.tries:"),
        ("entry.draws = torch.Generator().manual_seed(entry.seed) if", "entry.draws = torch.Generator() if"),
        ("if len(tokens) > limit:", "if False:"),
    ),
    *of(
        "engine/layout",
        ("(q_norm * a.head_dim**-0.5).expand", "q_norm.expand"),
        ("scale.roll(a.head_dim // 2, -1) * sin", "scale * sin"),
        ("return qkv * block.input_layernorm.weight.to(cos.dtype), bias", "return qkv, bias"),
        ("y = unit(qk, self.eps) if c.qk_norm else qk", "y = unit(qk, self.eps)"),
        ("y = unit(x, self.eps) * norm", "y = unit(x, self.eps)"),
        (
            "k, v = cache.append(layer, heads[:, H : H + G, None], heads[:, H + G :, None])",
            "k, v = cache.append(layer, heads[:, H + G :, None], heads[:, H : H + G, None])",
        ),
        test="ref/test_model",
    ),
    *of(
        "engine/layout",
        ("y = unit(qk, self.eps) if self.qk_norm else qk", "y = unit(qk, self.eps)"),
        ("torch.cat((a.q_proj.bias, a.k_proj.bias, a.v_proj.bias))", "torch.cat((a.q_proj.bias, 0 * a.k_proj.bias, a.v_proj.bias))"),
        ("if bias is None else torch.addmm(bias, x, qkv)", "if True else torch.addmm(bias, x, qkv)"),
        test="ref/test_families",
    ),
    *of(
        "engine/layout",
        ("dtype=dtype).triu_(1)", "dtype=dtype).triu_(2)"),
        ("self.mask = mask.repeat_interleave(H // G, 0)", "self.mask = mask.repeat(H // G, 1)"),
        ("gates = best.softmax(-1) if self.normalise", "gates = best.softmax(-1) if not self.normalise"),
        test="ref/test_mtp",
    ),
    *of(
        "network/model",
        ("seen = seen & (doc[:, :, None] == doc[:, None, :])", "pass"),
        (".tril(start)[None]", ".tril(start + 1)[None]"),
        ("attention += d * (self.num_attention_heads + 2 *", "attention += d * (self.num_attention_heads +"),
        ("            p.zero_()", "            pass"),
        ("return scores.gather(-1, experts).softmax(-1)", "return scores.softmax(-1).gather(-1, experts)"),
        ("math.sqrt(2 * config.num_hidden_layers) if residual", "math.sqrt(config.num_hidden_layers) if residual"),
        ('residual = "o_proj" in name or "down_proj" in name', 'residual = "o_proj" in name'),
        ("/ chosen.numel()", "/ len(chosen)"),
        ("return total / len(router_logits)", "return total"),
        ("total = total + E * (share", "total = total + (share"),
        ("x = x + self.self_attn(self.input_layernorm(x),", "x = x + self.self_attn(x,"),
        ("F.silu(self.gate_proj(x)) * self.up_proj(x)", "F.silu(self.up_proj(x)) * self.gate_proj(x)"),
        ("self.length = min(self.length, length)", "self.length = length"),
        ("self.values = [v[rows] for v in self.values]", "self.values = [v[: len(rows)] for v in self.values]"),
        ("torch.arange(start, start + T, device=ids.device)", "torch.arange(T, device=ids.device)"),
        ("used = self.num_experts_per_tok if active", "used = 1 if active"),
    ),
    *of(
        "network/fast",
        ("self.q_norm.weight.mul(d**-0.5)", "self.q_norm.weight.div(d)"),
        ("x.new_full((H, d), d**-0.5)", "x.new_ones(H, d)"),
        (
            "torch.cat((self.q_proj.bias, self.k_proj.bias, self.v_proj.bias))",
            "torch.cat((self.q_proj.bias, 0 * self.k_proj.bias, self.v_proj.bias))",
        ),
        (
            "bias.repeat(1, config.num_attention_heads // config.num_key_value_heads, 1)",
            "bias.repeat_interleave(config.num_attention_heads // config.num_key_value_heads, 1)",
        ),
        ("bias.repeat_interleave(config.num_key_value_heads, 0)", "bias.repeat(config.num_key_value_heads, 1, 1)"),
        ("gate, up = torch.matmul(x, self.gate_up_proj", "up, gate = torch.matmul(x, self.gate_up_proj"),
        ("chunk)[:N]", "chunk)[-N:]"),
        test="ref/test_model",
    ),
    *of(
        "network/model",
        ("x * cos + x.roll(", "x * cos - x.roll("),
        ("wide.square().mean(-1, keepdim=True)", "wide.square().mean()"),
        ("self.q_norm(q), self.k_norm(k)", "self.q_norm(q), self.q_norm(k)"),
        ("t.repeat_interleave(self.heads // self.kv_heads, 1)", "t.repeat(1, self.heads // self.kv_heads, 1, 1)"),
        ("* self.head_dim**-0.5", "/ self.head_dim"),
        ("gate, up = F.linear(x[token], gate_up)", "up, gate = F.linear(x[token], gate_up)"),
        ("gates[token, k, None]", "gates[token, 0, None]"),
        ("if T == 1:", "if start:"),
        test="ref/test_fast",
    ),
    *of(
        "network/documents",
        ("[*triangle, (slice(run.keys.start, middle), False)]", "triangle"),
        ("torch.logaddexp(l, weight)", "torch.maximum(l, weight)"),
        ("(start[:, 1:] != start[:, :-1]) | ", ""),
        ("whole[run.rows, :, keys] += part", "whole[run.rows, :, keys] = part"),
        ("where[query] >= key) & ", "where[query] >= key) | "),
        ("return None", "pass"),
        test="ref/test_documents",
    ),
    *of("network/model", ("experts(scores.detach())", "experts(-scores)"), test="ref/test_router_replay"),
    *of(
        "network/model",
        ("angle.cos() * factor, angle.sin() * factor", "angle.cos(), angle.sin()"),
        (
            "self.k_proj = nn.Linear(c.hidden_size, self.kv_heads * c.head_dim, bias=c.attention_bias)",
            "self.k_proj = nn.Linear(c.hidden_size, self.kv_heads * c.head_dim, bias=False)",
        ),
        test="ref/test_families",
    ),
    *of(
        "network/rope",
        ("period = theta ** (i / head_dim)", "period = theta ** (2 * i / head_dim)"),
        ("1.0 / period / scaling.factor, 1.0", "1.0 / period * scaling.factor, 1.0"),
        ("((turns - low) / (high - low)).clamp(0, 1)", "((turns - low) / (high - low)).clamp(0.5, 1)"),
        ("(1 - share) * own / scaling.factor + share * own", "share * own / scaling.factor + (1 - share) * own"),
        ("pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)", "pair_with(scaling.beta_slow), pair_with(scaling.beta_fast)"),
        ("first, last = math.floor(first), math.ceil(last)", "first, last = math.ceil(first), math.floor(last)"),
        ("first, last = max(first, 0), min(last, 2 * n - 1)", "pass"),
        ("last += 0.001", "last += 1"),
        ("0.1 * math.log(scaling.factor) + 1.0 if", "(0.1 * math.log(scaling.factor) + 1.0) ** 0.5 if"),
        test="ref/test_families",
    ),
    *of(
        "network/gradients",
        ("mul_(-1.0 / x.shape[-1]) * r.square()", "mul_(-1.0) * r.square()"),
        ("g.roll(d // 2, -1), sin.roll(d // 2, -1))", "g.roll(d // 2, -1), sin)"),
        ("sin * weight.roll(d // 2, -1))", "sin * weight)"),
        ("dk[:, :, :seen] +=", "dk[:, :, :seen] ="),
        ("lp.expm1()", "lp.exp()"),
        ("d_weight += p.t() @ (h * mg)", "d_weight = p.t() @ (h * mg)"),
        ("torch.mul(d_inner, act, out=d_value)", "torch.mul(d_inner, value, out=d_value)"),
        ("S - T + min(t + block, T)) for t in", "min(t + block, T)) for t in"),
        ("dim=-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32)", "dim=-1, keepdim=True, dtype=x.dtype"),
        ("token = torch.arange(N * K, device=flat.device) // K", "token = torch.arange(N * K, device=flat.device) % N"),
        ("dg = (dy * y).sum(-1).index_select(0, of_token)", "dg = (dy * y).sum(-1)[: len(of_token)]"),
        ("dw = along.flatten(0, 1).sum(0)", "dw = along.flatten(0, 1).mean(0)"),
        ("torch.mul(u, weight, out=d_qkv[:, :, :C])", "d_qkv[:, :, :C] = u"),
    ),
    *of(
        "network/linear_logprob",
        ("-(logp.exp() * logp).sum(-1)", "(logp.exp() * logp).sum(-1)"),
        ('if other == "teacher" else (logp, logq)', 'if other != "teacher" else (logp, logq)'),
        ("with torch.no_grad():", "with torch.enable_grad():"),
        ("torch.promote_types(hidden.dtype, torch.float32)", "hidden.dtype"),
    ),
    *of(
        "weight_codec",
        ("positions = (a != b).nonzero()[:, 0]", "positions = (old.flatten() != new.flatten()).nonzero()[:, 0]"),
        ("positions, new = positions.long(), old.flatten().clone()", "positions, new = positions.long(), old.flatten()"),
        ("return bits ^ ((bits >> 15) & 0x7FFF)", "return bits"),
        ("return positions[steps != 0], steps[steps != 0]", "return positions, steps"),
        ("values = values[more] >> 7", "values = values[more] >> 8"),
        ("values[at] |= (raw & 0x7F)", "values[at] |= raw"),
        ("np.diff(where, prepend=-1) - 1", "np.diff(where, prepend=0)"),
        ("return min(found, key=len)", "return found[-1]"),
    ),
    *of(
        "weight_sync",
        ("(updates.double().abs() / ulp(weights)).clamp(max=1)", "(updates.double().abs() / ulp(weights) / 2).clamp(max=1)"),
        ('salt=n.to_bytes(16, "little")', "salt=bytes(16)"),
        ("if known.setdefault(place, value) != value:", "if known.setdefault(place, value) is None:"),
        ("if first != ends.get(name, 0):", "if first < ends.get(name, 0):"),
        ("self.held = [x.clone() for x in new]", "self.held = new"),
        ('if manifest["digests"] != digests:', "if False:"),
        ('if hashed(blob) == shard["digest"]:', 'if len(blob) == shard["bytes"]:'),
        ("for _ in range(2):", "for _ in range(1):"),
        ("if served and v <= min(served)", "if served and v <= max(served)"),
        ("if version not in best or cost < best[version][0]:", "if version not in best:"),
        ("if not other:", "if True:"),
        ('if manifests[version]["links"][n]["base"] is not None:', "if False:"),
    ),
    *of(
        "expert_rows",
        ("place[order] = torch.arange(len(order), device=order.device)", "place[:] = order"),
        ("return x[order // place.shape[1]]", "return x[order % len(x)]"),
        ("bincount(minlength=num_experts).cumsum(0)", "bincount(minlength=num_experts)"),
        (
            "(rows[place].to(wide) * gates.to(wide)[..., None]).sum(1).to(rows.dtype)",
            "(rows[place] * gates.to(rows.dtype)[..., None]).cumsum(1)[:, -1]",
        ),
        ("flat.argsort(stable=True)", "flat.flip(0).argsort(stable=True)"),
    ),
    *of(
        "network/masters",
        ("copy.deepcopy(model).to(dtype)", "model.to(dtype)"),
        ("        self.copy_down()", "        pass"),
        ("            work.grad = None", "            pass"),
        ("for master, _ in used:  # a", "for master, _ in []:  # a"),
        ("m for m, _ in used], max_norm)", "m for m, _ in used], max_norm, 1.0)"),
        ("self.masters = model.to(torch", "self.masters = model.to(dtype).to(torch"),
    ),
    *of(
        "engine/sampler",
        ("torch.where(self.sampled[slot, :k], self.version, -1)", "torch.where(self.sampled[slot, :k], 0, -1)"),
        ("torch.where(self.sampled[slot, :k], self.version, -1)", "torch.full((k,), self.version)"),
        ("        self.version = version\n", "        pass\n"),
        ("experts[rows, t:n] = torch", "experts[rows.roll(1), t:n] = torch"),
        ("(logits.float() / temperature).log_softmax(-1)", "logits.float().log_softmax(-1)"),
        ("self.tokens[slot, self.begin[slot] : self.known", "self.tokens[slot, self.begin[slot] - 1 : self.known"),
        ("copy.deepcopy(model).to(dtype)", "model.to(dtype)"),
        ("at for at in live if self.known[self.rows[at]] == n", "at for at in range(len(self.rows)) if self.known[self.rows[at]] == n"),
    ),
    *of(
        "cpt",
        ("size <= 5 * wanted", "size <= 50 * wanted"),
        ("wanted / 3 <= size", "wanted / 30 <= size"),
        ("(doc[:, 1:] == doc[:, :-1]) & (doc[:, 1:] >= 0)", "(doc[:, 1:] == doc[:, :-1])"),
        ("scored *= weight[:, 1:]", "scored *= weight[:, :-1]"),
        ("loss = -(logp * scored).sum()", "loss = -(logp * scored).mean()"),
        ("(step + 1) / max(warmup, 1)", "step / max(warmup, 1)"),
        ("(total - step) / max(decay, 1)", "(total - step - 1) / max(decay, 1)"),
        ("self.nll / self.bytes / math.log(2)", "self.nll / self.bytes"),
        ("math.exp(self.nll / self.tokens)", "math.exp(self.nll / (self.tokens + 1))"),
        ("places >= before[:, None]", "places > before[:, None]"),
        ("stride = window // 2 if stride is None", "stride = window - 1 if stride is None"),
        ("if free >= len(piece)", "if free > len(piece)"),
        ("fullest = min(range(len(room))", "fullest = max(range(len(room))"),
    ),
    *of(
        "network/checkpoint",
        ('"norm_topk_prob": False,', '"norm_topk_prob": True,'),
        ('"router_aux_loss_coef": 0.001}', '"router_aux_loss_coef": 0.01}'),
        ('record.get("rope_theta") or 10_000.0', 'record.get("rope_theta") or 1_000_000.0'),
        ('32_768, "tie_word_embeddings": False', '32_768, "tie_word_embeddings": True'),
        ('{"gate_proj": slice(0, half), "up_proj": slice(half, None)}', '{"up_proj": slice(0, half), "gate_proj": slice(half, None)}'),
        ("room -= size", "room = max_bytes - size"),
        ('f"{layer}.{e}.down_proj.weight": (e,)', 'f"{layer}.{e}.down_proj.weight": (e - 1,)'),
    ),
    *of(
        "network/checkpoint",
        ('LLAMA_OTHER_FIELDS = {"max_position_embeddings": 2048}', "LLAMA_OTHER_FIELDS = {}"),
        ('128 if kind == "qwen3" and', '128 if kind == "llama" and'),
        ('record.get("rope_scaling") or record.get("rope_parameters") or {}', 'record.get("rope_parameters") or {}'),
        ('rope.get("rope_type", rope.get("type", "default"))', 'rope.get("rope_type", "default")'),
        ('rope.setdefault("factor", longest / original)', 'rope.setdefault("factor", 1.0)'),
        ("0.1 * scale * math.log(", "0.1 * math.log("),
        ('"mlp_bias": record.get("mlp_bias"),', '"mlp_bias": False,'),
        ('kind != "qwen2" and record.get("attention_bias")', "False"),
        ('        record |= {"rope_scaling": rope}', "        pass"),
        test="ref/test_families",
    ),
    *of(
        "engine/ragged",
        ("self.where[:S] > position[:A, None, None]", "self.where[:S] >= position[:A, None, None] + 2"),
        ("hidden.repeat_interleave(self.keys[0].shape[1], 0)", "hidden.repeat(self.keys[0].shape[1], 1, 1)"),
        ("values[:A, :, :S].flatten(0, 1)", "keys[:A, :, :S].flatten(0, 1)"),
        ("cache[[a, b], :, :length] = cache[[b, a], :, :length]", "cache[a, :, :length] = cache[b, :, :length]"),
        ("if len(y) <= DENSE else", "if len(y) <= 0 else", "both ways give the same up to rounding, which tokens do not show"),
        ("masked_fill_(where > last[..., None]", "masked_fill_(where >= last[..., None]"),
        ("index * int(counts.max()) + nth", "index + nth * len(self.rows)"),
        (
            "seen = torch.cat((seen, before.attend(q[A:], keys, values, S)))",
            "seen = torch.cat((seen, torch.zeros_like(before.attend(q[A:], keys, values, S))))",
        ),
        test="ref/test_continuous",
    ),
    *of(
        "engine/continuous",
        ("self.read = [0] * len(self.read)", "pass"),
        ("self.known[slot], self.max_len - 1, self.read[slot] + 1 + left", "self.known[slot], self.read[slot] + 1 + left"),
        ("self.known[slot], self.max_len - 1, self.read[slot] + 1 + left", "self.known[slot], self.max_len - 1, self.read[slot] + 1"),
        ("left -= ends[-1] - self.read[slot] - 1", "pass"),
        ("new = position >= torch.tensor(self.routed)[where]", "new = position >= 0"),
        ("self.draws[slots, at] if self.temperature", "self.draws[slots, at - 1] if self.temperature"),
        (
            "if token in self.stop_ids[slot] or self.known[slot] == self.max_len or",
            "if token in self.stop_ids[slot] or",
            "the next step finds the context full, which costs a step and changes no token",
        ),
        ("self.known[slot] = self.read[slot] = self.routed[slot] = 0", "self.known[slot] = self.read[slot] = 0"),
        ("self.sampled[slot], self.logp[slot], self.versions[slot] = False, 0.0, -1", "pass"),
        ("self.ragged.exchange(front, back, max(", "self.ragged.exchange(front, front, max("),
    ),
    *of(
        "feature_deletion",
        ("return bool(found) and not found & ~group", "return bool(found & group)"),
        ("return bool(found) and not found & ~group", "return not found & ~group"),
        ("least <= g.bit_count() <= most * len(tests)", "least < g.bit_count() <= most * len(tests)"),
        ("least <= g.bit_count() <= most * len(tests)", "least <= g.bit_count()"),
        (' and not g & bit[""]', ""),
        ("return [] if yields and covered.issuperset(yields) else edits", "return edits"),
        ("source.cut(suite[0], suite[-1], fill, whole=bool(fill))", "source.cut(suite[0], suite[-1], fill)"),
        ("if run and source.alone(run[0]):", "if run:"),
        ('"" if len(part) == 1 and _is_elif(source, part[0]) else "pass"', '"pass"'),
        ('    tests = sorted(test for test, outcome in before.items() if outcome == "passed")', "    tests = sorted(before)"),
        ("if test not in after]", "if test in after and False]"),
        ("for test in failed if test not in piece.tests]", "for test in failed if test in piece.tests and False]"),
        ("self.functions - 1, self.files - 1, self.tests / 3", "self.functions, self.files - 1, self.tests / 3"),
        ("if not hole and used & holes)", "if used & holes)"),
        ("{one.file for one in piece.patches}.isdisjoint(one.file for one in other.patches)", "piece.patches[0].file != other.patches[0].file"),
        ("apart and ({*piece.tests}.isdisjoint(other.tests) or", "apart and (True or"),
        ("({*piece.tests}.isdisjoint(other.tests) or {*piece.tests} == {*other.tests})", "{*piece.tests}.isdisjoint(other.tests)"),
        ("parts = sorted(pieces, key=lambda piece: [one.file for one in piece.patches])", "parts = [*pieces]"),
        ("sorted((one for piece in parts for one in piece.patches), key=lambda one: one.file)", "[one for piece in parts for one in piece.patches]"),
        ("min(top, now + 1) if solved > high * tried", "min(top, now + 1) if solved >= high * tried"),
        ("max(0, now - 1) if solved < low * tried", "now - 1 if solved < low * tried"),
    ),
    *of(
        "source_text",
        ("edit.first - 1 < at or", "False or"),
        ("if digest(data) == end:", "if False:"),
        ("moved += len(split(edit.new)) - len(split(edit.old))", "moved += 0"),
        (
            "self.begins(node)[0] <= before or",
            "self.begins(node)[0] < before or",
            "what would be cut apart does not stand alone in its line, or does not compile",
        ),
        (' or self.lines[before - 1].rstrip().endswith("\\\\")):', "):"),
        ("line = decorators[0].lineno", "line = node.lineno"),
        ("and line not in self.quoted", ""),
        ("and text.startswith(begins)", ""),
        ("(before + fill).encode(self.encoding)", "(before + fill).encode()"),
        ('[len(line.rstrip(b"\\r\\n")) :]', "[len(line.rstrip()) :]"),
        ("mark = BOM if start == 1", "mark = BOM if start == 0"),
        test="ref/test_feature_deletion",
    ),
    *of(
        "source_symbols",
        ("onward += [(other, alias.asname or alias.name) for alias in gone]", "pass"),
        ("if of_function or lazy and field in", "if lazy and field in"),
        ("if of_function or lazy and field in", "if of_function or field in"),
        ('"pass" if len(suite) == 1 and suite is not source.tree.body else ""', '""'),
        ("and not (is_tuple and len(elements) == 2)", ""),
        ('if ast.dump(expected) != ast.dump(tree_of("".join(lines[first - 1 : last]))):', "if False:"),
        ("if any(first <= edit.first <= last for edit in edits):", "if any(first == edit.first for edit in edits):"),
        ('if "".join(after) != "".join(lines):', "if False:"),
        ("if other != here and called in module.attributes:", "if False:"),
        test="ref/test_feature_deletion",
    ),
    *of(
        "async_rl",
        ("(self.rules.staleness + self.version + 1) * G", "(self.rules.staleness + self.version + 2) * G"),
        ('ahead - self.count("running", "ready", "trained")', 'ahead - self.count("ready", "trained")'),
        ("            if self.version - self.oldest[group] > self.rules.staleness:\n", "            if False:\n"),
        ("tuple(young[: self.rules.groups]) if", "tuple(young[-self.rules.groups :]) if"),
        ("if not self.admissible:", "if False:"),
        ("if not 0 <= event.version <= self.version:", "if False:"),
        ("log_ratio.detach().clamp(max=math.log(cap))", "log_ratio.clamp(max=math.log(cap))"),
        ("log_ratio.detach().clamp(max=math.log(cap))", "log_ratio.detach().clamp(max=cap)"),
        ("total / mask.sum(1).clamp(min=1)", "total / mask.shape[1]"),
        ('{"synchronous": 0, "one-step-off": 1}', '{"synchronous": 1, "one-step-off": 1}'),
        ("self.life.version - version] += round(tokens)", "version] += round(tokens)"),
        ("old = engine.version < self.life.version - self.life.rules.staleness", "old = False"),
        ("self.work -= seconds * trainer", "self.work -= seconds"),
    ),
    *of(
        "textual_feedback",
        ("return student[where.student - 1], teacher[where.teacher - 1].detach()", "return student[where.student - 1], teacher[where.teacher - 1]"),
        ("return student[where.student - 1], teacher[where.teacher - 1].detach()", "return student[where.student], teacher[where.teacher].detach()"),
        ("(student + shift[student]).to(tokens.device)", "(student - 1 + shift[student - 1] + 1).to(tokens.device)"),
        ("shift[hint.at :] += len(hint.tokens)", "shift[hint.at + 1 :] += len(hint.tokens)"),
        ("shift[hint.at :] += len(hint.tokens)", "shift[hint.at :] = len(hint.tokens)"),
        ("asked[begin:end] = own[begin:end].cpu()", "asked[begin:end] = True"),
        ("bool(own[hint.at - 1] & own[hint.at])", "bool(own[hint.at])"),
        ("if following < end:", "if following <= end:"),
        ("if any(other.begin < hint.at < other.end for other in hints):", "if False:"),
        ("student.to(wide).log_softmax(-1), teacher.detach().to(wide)", "student.to(wide).log_softmax(-1), teacher.to(wide)"),
        ("chosen = logt.topk(top_k, -1).indices", "chosen = logs.topk(top_k, -1).indices"),
        ("return relative(logt, logs)", "return relative(logs, logt)"),
        ("return (to_mixture(logs, logt) + to_mixture(logt, logs)) / 2", "return (relative(logs, logt) + relative(logt, logs)) / 4"),
        ("rest = logp.scatter(-1, chosen, -math.inf)", "rest = logp"),
        (
            "together = rest.masked_fill(none, 0).logsumexp(-1, keepdim=True).masked_fill(none, -math.inf)",
            "together = rest.logsumexp(-1, keepdim=True)",
        ),
        ("left_out = infinite | (probs == 0)", "left_out = infinite"),
        (".sum(-1).masked_fill(infinite.any(-1), math.inf)", ".sum(-1)"),
        ("return (weights * found).sum() / budget", "return (weights * found).sum() / weights.sum().clamp(min=1)"),
        ("return (weights * found).sum() / budget", "return found.sum() / budget"),
        (
            "wide = torch.promote_types(torch.promote_types(student.dtype, teacher.dtype), torch.float32)",
            "wide = torch.promote_types(student.dtype, teacher.dtype)",
        ),
        ("if len(wanted) and len(found) < int(wanted[-1]):", "if len(wanted) and len(found) < int(wanted[0]):"),
        ("tokens = torch.cat([*pieces, segment.tokens[start:last]])", "tokens = torch.cat([*pieces, segment.tokens[start:]])"),
        ("secret = set(runs(answer)) - set(runs(context))", "secret = set(runs(answer))"),
        ("n = min(n, len(answer), len(hint))", "pass"),
    ),
    *of(
        "rl",
        ("loss = loss + c.feedback.weight * apart", "loss = loss + apart"),
        ("hinted_contexts = find_hinted(rollouts) if c.feedback.weight else {}", "hinted_contexts = find_hinted(rollouts)"),
        ("student, teacher = (model.head(x) / c.temperature for x", "student, teacher = (model.head(x) for x"),
        ("budget=budget, kind=c.feedback.divergence)", "budget=float(len(student)), kind=c.feedback.divergence)"),
        ("number += 0 if p.hints else len(p.chain.segments)", "number += 0"),
        ("predictions(hidden[at], taught[row], where)", "predictions(hidden[row], taught[row], where)"),
    ),
    *of(
        "behaviour",
        ('todo.state in ("open", "started")', 'todo.state == "open"'),
        ("sum(call.valid and not call.ok for call in calls)", "sum(not call.ok for call in calls)"),
        ('and claims(message) and suite_state(transcript) != "passed"', 'and claims(message) and suite_state(transcript) == "failed"'),
        ("max(0.0, share - free_comments) / (1 - free_comments)", "share"),
        ("(rounds - 1) / (len(calls) - 1)", "rounds / len(calls)"),
        ("[call.wrote for call in calls if call.valid]) or 0.0", "[call.wrote for call in calls]) or 0.0"),
        ("0.0 - getattr(prices, name) * min(found[name], cap)", "0.0 - getattr(prices, name) * found[name]"),
        ("0.0 - getattr(prices, name) * min(found[name], cap)", "getattr(prices, name) * min(found[name], cap)"),
        ("return outcome - effort_cost + found.total", "return outcome + effort_cost + found.total"),
        ("float(bool(message) and claims(message)", "float(claims(message)"),
        ("measures(transcript, prices.free_comments, claims)", "measures(transcript, claims=claims)"),
        ("relative = [one.parts[name] - first for one in group]", "relative = [one.parts[name] for one in group]"),
        ("found[name] = [value - mean for value in relative]", "found[name] = relative"),
    ),
    *of(
        "transcript",
        ('return last.text.strip() if last and not last.calls else ""', 'return last.text.strip() if last else ""'),
        ('if turn.role == "assistant"), None)', "if turn.text), None)"),
        ('state = "passed" if passed == run > 0 else "failed"', 'state = "passed" if passed == run else "failed"'),
        ('elif call.writes and state == "passed":', "elif call.writes:"),
        ("return bool(self.wrote) and self.valid and self.ok", "return bool(self.wrote)"),
        ("and not DENIAL.search(sentence) for", "for"),
        ("token.string if beginning and token.type == tokenize.STRING else None", "token.string if token.type == tokenize.STRING else None"),
        ("list(python_comments(textwrap.dedent(code)))", "list(python_comments(code))"),
        test="ref/test_behaviour",
    ),
    *of(
        "monitor",
        ("np.logaddexp(evidence.log_wealth, -math.log(t * (t + 1))) + gains", "np.logaddexp(evidence.log_wealth, -math.log(t)) + gains"),
        ("np.logaddexp(evidence.log_wealth, -math.log(t * (t + 1))) + gains", "np.logaddexp(evidence.log_wealth + gains, -math.log(t * (t + 1)))"),
        ("- math.log(2 * len(STAKES))", "- math.log(len(STAKES))"),
        ("np.asarray(np.logaddexp(wealth, -math.log(evidence.step + 1)))", "np.asarray(wealth)"),
        ("np.asarray(np.logaddexp(wealth, -math.log(evidence.step + 1)))", "np.asarray(np.logaddexp(wealth, 0.0))"),
        ("(values / band.high, (1 - values) / (1 - band.low))", "(values / band.low, (1 - values) / (1 - band.high))"),
        ("(values / band.high, (1 - values) / (1 - band.low))", "(values / band.high, (1 - values) / band.low)"),
        ("(odds[..., None, :] - 1)), nan=0.0)", "(odds[..., None, :] - 1)), nan=0.1)"),
        ("found >= math.log(len(self.bands) / self.error)", "found >= math.log(1 / self.error)"),
        ("found >= math.log(len(self.bands) / self.error)", "found >= len(self.bands) / self.error"),
        ("if name not in known and found", "if found"),
        ('"up" if up >= down else "down"', '"up"'),
        ("if wealth >= math.log(2 / error) else", "if wealth >= math.log(error / 2) else"),
        ("min(1.0, 1 - least(1 - x) + tolerance)", "min(1.0, 1 - least(1 - x))"),
        ("row = row + 1 if tried and tried[-1] == before else 1", "row = row + 1"),
        ("2 * broken >= len(one.calls) and", ""),
        ("for p in shares) / math.log(len(set(tools)))", "for p in shares) / math.log(max(2, len(shares)))"),
        ("call.name if call.name in tools else None for call in calls", "call.name for call in calls"),
        ('one.final_message.endswith("?")', '"?" in one.final_message'),
        (
            "hacked = sum(any(signature.found(one) for signature in signatures) for one in group)",
            "hacked = sum(signature.found(one) for signature in signatures for one in group)",
        ),
        ('in turn.text for turn in one.turns if turn.role == "tool")', "in turn.text for turn in one.turns)"),
        ('"comments": comment_share([call.wrote for call in calls if call.valid])', '"comments": comment_share([call.wrote for call in calls])'),
    ),
    *of(
        "textual_feedback",
        ("return total(ref.feedback_loss(student,", "return (ref.feedback_loss(student,"),
        ("teacher[where.teacher - 1].detach()", "teacher[where.teacher - 1]"),
        ("came[at[mine].argsort(stable=True).argsort()]", "came"),
        ("came[at[mine].argsort(stable=True).argsort()]", "came[at[mine].argsort(stable=True)]"),
        ("held[to[held].argsort(stable=True)]", "held"),
        ("(owners(wanted - 1, len(found)", "(owners(wanted, len(found)"),
        ("torch.where(late, 2 * cp - 1 - chunk, chunk)", "torch.where(late, chunk - cp, chunk)"),
        ("(at // width * 2 + late) * size + at % size", "(at // width + late) * size + at % size"),
        ("where.student[some] - first, where.teacher[some])", "where.student[some], where.teacher[some])"),
        ("where.student[some] - first, where.teacher[some])", "where.student[some] - first, where.teacher[some] - first)"),
        ("found[number].student.cpu() + int(starts[number])", "found[number].student.cpu()"),
        ("= found[number].tokens, number", "= found[number].tokens, 0"),
        ("order = student.argsort()", "order = teacher.argsort()"),
        ("@torch.no_grad()\n", "\n"),
        ("return total(torch.stack([checkpoint", "return (torch.stack([checkpoint"),
        ("counted = (x[weight != 0].split(chunk)", "counted = (x.split(chunk)"),
        room="scaled",
        test="mirror/test_feedback",
    ),
    *of(
        "behaviour",
        ("[0] * len(group) if groups is None else groups", "[0] * len(group)"),
        ("if here.size > 1:", "if False:"),
        ("if rank == here.rank:", "if True:"),
        ("current().group(axis)", 'current().group("dp")'),
        room="scaled",
        test="mirror/test_feedback",
    ),
    *of(
        "monitor",
        ("device=current().device), axis).tolist()", 'device=current().device), "dp").tolist()'),
        ("call.name if call.name in names else None for call in calls", "call.name for call in calls"),
        ("[call.wrote for call in calls if call.valid]", "[call.wrote for call in calls]"),
        ("sum(min(1.0, one.tokens / longest) for one in group) if", "sum(one.tokens / longest for one in group) if"),
        ('"length": length / rollouts', '"length": length / made'),
        ('"questions": asked / rollouts', '"questions": hacked / rollouts'),
        ("shares = [count / made for count in each if count]", "shares = [count / sum(each[:-1]) for count in each if count]"),
        room="scaled",
        test="mirror/test_feedback",
    ),
    *of(
        "watching",
        ("here[number // rollouts].append", "here[number % prompts].append"),
        ('watcher.longest, axis="all")', 'watcher.longest, axis="dp")'),
        ("keep_lines(journal, step)", "keep_lines(journal, step + 1)"),
        ("known = before(journal, step)", "known = before(journal, 0)"),
        ('{"step": step + 1, "groups": groups}', '{"step": step, "groups": groups}'),
        ("if group.size > 1:", "if False:"),
        ("for line in lines if first else ():", "for line in ():"),
        ('and name != "alarm_at" and value != 0', "and value != 0"),
        room="scaled",
        test="mirror/test_watching",
    ),
    # The rooms on which money and trust depend: services, sandboxes, graders' tools, files.
    *of(
        "weight_sync",
        ("if self.version is None or version % self.anchor_every == 0:", "if version % self.anchor_every == 0:"),
        ('links.append(("delta", self.version,', 'links.append(("delta", version - 1,'),
        ("if version % self.merge_every == 0 and len(recent) == self.merge_every:", "if version % self.merge_every == 0:"),
        ('links.append(("merged", recent[0][0],', 'links.append(("merged", recent[-1][0],'),
        ("if self.version is not None and version <= self.version:", "if self.version is not None and version < self.version:"),
        ("for one in digests), shapes, twice=False)", "for one in digests), shapes)"),
        ("if want is None or want == have and later:", "if want is None:"),
        ("later = [version for version in wrong if want is None or version > want]", "later = [*wrong]"),
        ("for version, manifest in self.known.items() if version in versions}", "for version, manifest in self.known.items()}"),
        ("        if down:", "        if False:"),
        ('key=lambda key: not key.endswith("/manifest")', 'key=lambda key: key.endswith("/manifest")'),
        (' and any(key.endswith("/manifest") for key in some)]', "]"),
        ("with contextlib.suppress(OSError):  # unheard", "with contextlib.suppress(KeyError):  # unheard"),
        ("except (KeyError, OSError) as error:", "except KeyError as error:"),
        ("if last is not None and v < last]", "if last is not None and v <= last]"),
    ),
    *of(
        "weight_sync",
        ("words = np.flatnonzero(x != y)", "words = np.flatnonzero(x < y)"),
        ("positions = torch.cat((near[0], whole + last))", "positions = torch.cat((near[0], last))"),
        ("part.weights.detach().to(torch.bfloat16, copy=True)", "part.weights.detach().to(torch.bfloat16)"),
        ("            self.failure = error", "            pass"),
        ("failure, self.failure = self.failure, None", "failure = self.failure"),
        ("            told = [0, str(error)]", "            told = [0, None]"),
        ("first, mine = sharding.slice_of(name, p.detach())", "first, mine = sharding.slice_of(name, p)"),
        room="scaled",
        test="mirror/test_weight_sync",
    ),
    *of(
        "async_rl/wire",
        ("os.chmod(at, 0o600)", "os.chmod(at, 0o666)"),
        ("if len(frames) > 1 or not hmac", "if not hmac"),
        ("hmac.compare_digest(frames[0], self.token)", "self.token.startswith(frames[0])"),
        ("line.most = MOST", "pass"),
        ("if line.heard(WAIT) != [WELCOME]:", "if not line.heard(WAIT):"),
        ("            at.unlink(missing_ok=True)", "            pass"),
        ('if len(self.got) >= 4 and int.from_bytes(self.got[:4], "big") > self.most:', "if len(self.got) > self.most:"),
        ("if found or (found := self._frames()):", "if found:"),
        ("known = line not in self.strangers", "known = True"),
        ("                if known:", "                if True:"),
        ("del self.got[: 4 + size]", "del self.got[:size]"),
        ('return f"{self.host}:{self.number}"', 'return f"{self.host}:{self.number}:{self.token.decode()}"'),
        ("secrets.token_hex(16).encode()", 'b"0" * 32'),
        ("if len(data) > MOST:", "if len(data) > 2 * MOST:"),
        ("shutil.rmtree(folder, ignore_errors=True)", "pass"),
        ("            self.strangers.add(line := Line(watched(peer), most=len(self.token)))", "            line = Line(watched(peer))"),
        room="scaled",
        test="mirror/test_wire",
    ),
    *of(
        "async_rl/messages",
        ('return type(value) is {"int": int, "str": str}[wanted]', 'return isinstance(value, {"int": int, "str": str}[wanted])'),
        ("all(type(one) is each for one in value)", "any(type(one) is each for one in value)"),
        ("except (ValueError, KeyError, TypeError, AttributeError)", "except (ValueError, KeyError, TypeError)"),
        ("tuple(value) if isinstance(value, list) else value", "tuple(map(str, value)) if isinstance(value, list) else value"),
        room="scaled",
        test="mirror/test_reconciler",
    ),
    *of(
        "async_rl/reconciler",
        ("if epoch < self.epochs.get(sender, 0):", "if False:"),
        ("self.epochs[name] += 1  # whatever", "pass  # whatever"),
        ("if self.losses[group] < self.tries:", "if self.losses[group] <= self.tries:"),
        ("return self.losses[group] >= self.tries - 1", "return self.losses[group] >= self.tries"),
        ("if now - worker.seen > self.timeout:", "if now - worker.seen > 2 * self.timeout:"),
        ("            self.workers[sender].seen = now", "            pass"),
        ("if message.version > self.published:", "if message.version >= self.published:"),
        ("worker.version < self.life.version - self.rules.staleness:", "worker.version < self.life.version - self.rules.staleness - 1:"),
        ("        self.unclaimed -= mine", "        pass"),
        ("if group not in worker.running:", "if group in self.records:"),
        ("            self.batch = None", "            pass"),
        ("asked = now - self.repairs.get(message.version, -1e9) < self.timeout", "asked = False"),
        ('if message.version == self.published and "trainer"', 'if message.version <= self.published and "trainer"'),
        ("self.holders = [None if holder == name else holder for holder in self.holders]", "pass"),
        ("able.append((len(worker.running) / worker.groups, name))", "able.append((len(worker.running), name))"),
        ("places[group % self.rules.groups * len(places) // self.rules.groups]", "places[group % len(places)]"),
        ("if self.waits and self.published == self.life.version:", "if self.waits:"),
        ("self.published = self.life.version - 1", "self.published = self.life.version"),
        ("if self._suspect(group) and any(map(self._suspect, worker.running)):", "if False:"),
        ("if self.workers.keys() >= {*self.names, *self.spares}:", "if True:"),
        ("for event in self.life.journal[before:]:", "for event in ():"),
        ("g in self.unclaimed or g in self.queue or before is not None", "before is not None"),
        ("self.alone = self.alone and not isinstance(message, Ready)", "pass"),
        ("self.alone == (not self.workers)", "False"),
        room="scaled",
        test="mirror/test_reconciler",
    ),
    *of(
        "process",
        ("numpy.random.set_state(", "str("),
        ('    torch.set_rng_state(state["torch"])', "    pass"),
        room="kit",
        test="cli/test_runs::test_random_generators_come_back",
    ),
    *of(
        "tracking",
        ('self.begin("allow" if resumed else "never")', 'self.begin("never")'),
        ('mode = None if os.environ.get("WANDB_MODE") else "offline"', "mode = None"),
        ('os.environ.setdefault("WANDB_ERROR_REPORTING", "false")', "pass"),
        ("else whole.name", "else str(whole)"),
        ("if Trackio._open is not self:", "if False:"),
        ("        if before is None:", "        if True:"),
        ('self.run.define_metric(f"{stage}/*", step_metric=axis)', "pass"),
        ('if name.rpartition("/")[0] == stage}, axis: step}', "}, axis: step}"),
        room="kit",
        test="cli/test_tracking",
    ),
    *of(
        "settings",
        ("table.setdefault(group, {})", "table.get(group, {})"),
        ("if len(text) <= MAX_DIGITS and text", "if text"),
        ("and abs(x) > LARGEST]", "and x > LARGEST]"),
        room="kit",
        test="cli/test_config",
    ),
    *of(
        "progress",
        ("max(after - before, 0.0) / max(end - start, 1e-9)", "max(after, 0.0) / max(end - start, 1e-9)"),
        ("if self.step >= self.stage.total:", "if False:"),
        ("min(100.0, 100.0 * self.step / self.stage.total)", "100.0 * self.step / self.stage.total"),
        ("_clock((self.stage.total - self.step)", "_clock(self.stage.total"),
        ('(1e4, "k")', '(1e3, "k")'),
        ("{value / (1e3 if letter == 'k' else limit):.1f}", "{value / limit:.1f}"),
        ("hours, minutes = divmod(whole // 60, 60)", "hours, minutes = divmod(whole, 60)"),
        ("self.first = (self.stage.opened, step)", "self.first = (self.stage.opened, 0)"),
        room="kit",
        test="cli/test_progress",
    ),
    *of(
        "egress/rules",
        ("    if found[3]:", "    if False:"),
        ('name.rpartition(".")[2].isdigit()', "name.isdigit()"),
        ("if method not in host.methods:", "if method not in METHODS:"),
        ('("content-length", "transfer-encoding", "upgrade", "expect")', '("content-length", "upgrade", "expect")'),
        ('("content-length", "transfer-encoding", "upgrade", "expect")', '("content-length", "transfer-encoding", "upgrade")'),
        ("if field in rules.headers and len(value) <= VALUE}", "if field in rules.headers}"),
        (' or "" in segments[:-1]:', ":"),
        (' or any(one and not one.strip(".") for one in segments)', ""),
        ('urllib.parse.unquote(written, "latin-1")', "written"),
        ("if name not in rules.headers][:20]", "][:20]"),
        ("found[1].lower(), found[2]", "found[1], found[2]"),
        room="environments",
        test="environments/test_door",
    ),
    *of(
        "egress/upstream",
        ("path.is_file() and not path.is_symlink()", "path.is_file()"),
        ("(not one.is_global or one.is_multicast)", "not one.is_global"),
        ("addresses(name, port, host.private or is_number(name))", "addresses(name, port, True)"),
        ("socket.create_connection((address, self.port), self.timeout)", "socket.create_connection((self.host, self.port), self.timeout)"),
        ("and expected is not None and body.size != expected:", "and False:"),
        ('page.replace(f"{server}/".encode(), f"{name}/".encode())', "page.replace(server.encode(), name.encode())"),
        ("return name + there.path", "return location"),
        ("self.size > self.most:", "self.size > 2 * self.most:"),
        ('{host.upstream.lower(): f"http://{name}"', '{host.upstream.lower(): f"https://{name}"'),
        ('if response.headers.get("content-encoding", "identity") != "identity":', "if False:"),
        ('return re.sub(r"[-_.]+", "-", name).lower()', 'return re.sub(r"[-_.]+", "-", name)'),
        room="environments",
        test="environments/test_door",
    ),
    *of(
        "egress/door",
        ("over = self.requests > self.rules.requests", "over = self.requests > self.rules.requests + 1"),
        ("            self.bytes += answer.size", "            pass"),
        ("if len(said) > HEAD:", "if len(said) > 9 * HEAD:"),
        ("min(self.rules.largest, left)", "self.rules.largest"),
        ('self._log(line | {"seconds"', 'self._log({"seconds"'),
        ('            self.journal.append(b"\\n")', "            pass"),
        ('    if line.get("method") == "HEAD":', "    if False:"),
        ("                if self._log(", "                if [True] or self._log("),
        room="environments",
        test="environments/test_door",
    ),
    *of(
        "sandbox/manifest",
        ('part in ("", ".", "..") for part', 'part in ("", ".") for part'),
        ('if above is None or above.kind != "dir":', "if above is None:"),
        ("        if path in new:", "        if False:"),
        ('path.startswith(tops[-1] + "/")', "path.startswith(tops[-1])"),
        ("if path in before and before[path].kind != after[path].kind]", "if False]"),
        ('"file": 0o400, "dir": 0o500', '"file": 0o400, "dir": 0o400'),
        ("for path, e in sorted(manifest.items())]", "for path, e in manifest.items()]"),
        ("mode, flags = stat.S_IMODE(found.st_mode) & 0o777,", "mode, flags = stat.S_IMODE(found.st_mode),"),
        room="environments",
        test="environments/test_manifest",
    ),
    *of(
        "sandbox/store",
        ("        if hashlib.sha256(data).hexdigest() != entry.value:", "        if False:"),
        ("            if hashlib.sha256(data).hexdigest() != snapshot:", "            if False:"),
        ("            if found != manifest:", "            if found.keys() != manifest.keys():"),
        ("if left or found.hexdigest() != value:", "if left:"),
        ("not in kept and path.stat().st_mtime < since:", "not in kept:"),
        ("            (folder / name).chmod(stat.S_IRWXU)", "            pass"),
        ("            self._used(name)", "            pass"),
        ("            self._used(snapshot)", "            pass"),
        ("if not self._list(path.name).exists() and path.stat().st_ctime < since:", "if path.stat().st_ctime < since:"),
        ("                target.chmod(entry.mode)", "                pass"),
        ("fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)", "fcntl.flock(self._handle, fcntl.LOCK_SH | fcntl.LOCK_NB)"),
        ('if entry.kind == "file" and not self.has(entry.value):', "if False:"),
        room="environments",
        test="environments/test_store",
    ),
    *of(
        "sandbox/cache",
        ("if not above.stat().st_mode & 0o001:", "if False:"),
        ("        folder.chmod(0o755)", "        pass"),
        ("if os.path.isabs(home):", "if home:"),
        room="environments",
        test="environments/test_store",
    ),
    *of(
        "sandbox/wire",
        ("if not isinstance(found, dict) or self.buffer:", "if not isinstance(found, dict):"),
        ("            if tick:", "            if False:"),
        ("return time.monotonic() < until", "return True"),
        ("        del self.buffer[: end + 1]", "        del self.buffer[:end]"),
        ("        except ValueError:", "        except TypeError:"),
        room="environments",
        test="environments/test_wire",
    ),
    *of(
        "sandbox/visible",
        ("\\u2028-\\u202e", "\\u2028-\\u202c"),
        ("        code -= 0xDC00", "        pass"),
        ('return " ".join(visible(text).split())[:most]', 'return " ".join(visible(text).split())'),
        room="environments",
        test="environments/test_visible",
    ),
    *of(
        "sandbox/seccomp",
        ('FAMILIES = {1: "AF_UNIX", 2: "AF_INET", 10: "AF_INET6"}', 'FAMILIES = {1: "AF_UNIX", 2: "AF_INET", 10: "AF_INET6", 40: "AF_VSOCK"}'),
        ("_line(AT_LEAST, NEWEST + 1, 0, 1)", "_line(AT_LEAST, NEWEST + 2, 0, 1)"),
        ("RAW, TYPE_MASK = 3, 0xF", "RAW, TYPE_MASK = 3, 0xFFFFFFFF"),
        ("0x20000000 | 0x40000000 | 0x00020000", "0x20000000 | 0x00020000"),
        ('"unshare": (272, 97)', '"unshare": (273, 97)'),
        ("len(lines) + 1), *lines, _line(RETURN, ALLOW)]", "len(lines)), *lines]"),
        room="environments",
        test="environments/test_seccomp",
    ),
    *of(
        "harness/episode",
        ("if len(silent) == PATIENCE and all(silent):", "if all(silent):"),
        ("return self.before + time.monotonic() - self.since", "return time.monotonic() - self.since"),
        ('if line["kind"] in ("reply", "summary"))\n', 'if line["kind"] == "reply")\n'),
        ("self.tokens, self.turns = self.tokens + written, self.turns + 1", "self.tokens, self.turns = written, self.turns + 1"),
        ("if self.tokens >= b.tokens:", "if self.tokens > b.tokens:"),
        ('self.budget = Budget(**begin["budget"])', 'Budget(**begin["budget"])'),
        ('if begin.get("who", "") != job.who:', "if False:"),
        room="environments",
        test="environments/test_episode",
    ),
    *of(
        "harness/workspace",
        ("            if self.over:", "            if False:"),
        ("if number >= CALLS:", "if number > CALLS:"),
        ("text = cut(heard.text, SAYS)", "text = heard.text"),
        ("if len(one) * len(other) > MANY:", "if False:"),
        ("min(self.call_seconds, left)", "self.call_seconds"),
        ("            self.close()\n", "            pass\n"),
        room="environments",
        test="environments/test_episode",
    ),
    *of(
        "harness/record",
        ('if not answer.get("broken"):', "if True:"),
        ('while lines and lines[-1].get("kind") not in ENDS:', "while False:"),
        ('            rest = [Message("user", f"You have', '            rest += [Message("user", f"You have'),
        ('for line in reversed(lines) if "spent" in line)', 'for line in lines if "spent" in line)'),
        ('ENDS = ("begin", "turn", "summary", "end", "grade")', 'ENDS = ("begin", "turn", "end", "grade")'),
        ("    if lines and path.read_bytes() != data:", "    if False:"),
        ('        self._journal.append(text.encode() + b"\\n")', "        pass"),
        room="environments",
        test="environments/test_episode",
    ),
    *of(
        "leaks",
        ("if not target.is_relative_to(self.root):", "if False:"),
        ("if len(data) > self.limits.file:", "if False:"),
        ("for name in os.listxattr(path, follow_symlinks=False):", "for name in ():"),
        ('(b"line_bits" in data or b"CREATE TABLE arc" in data)', 'b"CREATE TABLE arc" in data'),
        ("            except TooLarge as error:", "            except ZeroDivisionError as error:"),
        room="environments",
        test="environments/test_leaks",
    ),
    *of("fingerprint", ("while at - places[first][0] > span:", "while False:"), room="environments", test="environments/test_leaks"),
    *of(
        "install/attempt",
        ("if one.step.needed)", ")"),
        (" and module not in own:", ":"),
        room="environments",
        test="environments/test_install::test_modules_that_are_missing_are_installed_once",
    ),
    *of(
        "install/attempt",
        ("(at and step.command and codes[0] != 0)", "False"),
        room="environments",
        test="environments/test_install::test_what_an_index_lacks_to_build_and_to_test_with",
    ),
    *of(
        "install/attempt",
        ("before.get(one.step.check, True)", "before.get(one.step.check, False)"),
        ("return self.telling and all(", "return all("),
        room="environments",
        test="environments/test_install::test_checks_that_pass_before_tell_nothing",
    ),
    *of(
        "install/readers",
        ('isinstance(row, str) and ";" not in row]', "isinstance(row, str)]"),
        ("calls[-1].keywords", "calls[0].keywords"),
        ('if name != "python"]', "]"),
        room="environments",
        test="environments/test_install_readers",
    ),
    *of(
        "install/steps",
        ("found.setdefault(step.command or", "found.setdefault(step.check or"),
        ("if max(len(command), len(check)) > CHARACTERS", "if len(command) > CHARACTERS"),
        ("if not command.strip() and not check.strip():", "if not command.strip():"),
        room="environments",
        test="environments/test_install_readers",
    ),
    *of(
        "sandbox/inside/tree",
        ('if not real.startswith(room.root + "/") and', "if not real.startswith(room.root) and"),
        ("real = os.path.join(resolved(folder), name)", "real = resolved(joined)"),
        ("    if os.path.lexists(real) and not stat.S_ISREG(os.lstat(real).st_mode):", "    if False:"),
        ("if entry.is_dir(follow_symlinks=False)]", "if entry.is_dir()]"),
        room="environments",
        test="environments/test_tools",
    ),
    *of(
        "sandbox/inside/search",
        ('made, i = made + "(?:[^/]+/)*", i + 3', 'made, i = made + ".*", i + 3'),
        ('"[^/]*" if words[i] == "*" else "[^/]"', '".*" if words[i] == "*" else "[^/]"'),
        ('return None if b"\\0" in head else', "return"),
        ("    file.seek(len(mark))", "    pass"),
        ("            block = file.readline(LONGEST)", "            block, number = file.readline(LONGEST), number + 1"),
        room="environments",
        test="environments/test_tools",
    ),
    *of(
        "sandbox/inside/files",
        ("if times == 0 or (times > 1 and not every):", "if times == 0:"),
        ("        shutil.rmtree(real)", "        os.rmdir(real)"),
        ("if number + 1 >= start:", "if number >= start:"),
        room="environments",
        test="environments/test_tools",
    ),
    *of(
        "async_rl/services",
        ("if hashlib.sha256(data).hexdigest() != digest:", "if False:"),
        ("if int(path.stem) < version - 1:", "if int(path.stem) < version:"),
        ("if int(path.stem) < version - 1:", "if int(path.stem) < version - 2:"),
        ("return min(10.0, 0.1 * 2**failures)", "return 0.1 * 2**failures"),
        ('sorted(saved.glob("*.json"), reverse=True)', 'sorted(saved.glob("*.json"))'),
        ('if hashlib.sha256(data).hexdigest() == about["digest"]:', "if True:"),
        ("        if Path(key).name != key:", "        if False:"),
        ("return isinstance(error, OSError) and error.errno in NO_ROOM", "return isinstance(error, OSError)"),
        ('if "another writer" in str(error):', "if False:"),
        ('self.store.pop(f"{version:08d}/manifest", None)', "pass"),
        ("            if time.monotonic() - began > patience:", "            if False:"),
        ('"oldest": float(version - int(own.min()))', '"oldest": float(version - int(own.max()))'),
        ("part.weights.detach().to(torch.bfloat16, copy=True)", "part.weights.detach()"),
        ("            errand, self.errand = self.errand, None", "            errand = self.errand"),
        ("                raise errand.error", "                pass"),
        ("            self.errand.done.wait()", "            pass"),
        ("self.visible = -1", "self.visible = 0"),
        ("                self.writer = self.sync.Writer(self.store)", "                pass"),
        ("*(s.version[s.sampled] for p", "*(s.version for p"),
        ("for p in played if not p.failure for s", "for p in played for s"),
        room="scaled",
        test="mirror/test_services",
    ),
    *of(
        "async_rl/worker",
        ("self.first = self.first if self.failures else now", "self.first = self.first or now"),
        ("        self.failures, self.next = 0, 0.0", "        self.next = 0.0"),
        ("        self.next = now + pause(self.failures)", "        pass"),
        (
            "if no_room(error) or not isinstance(error, (OSError, weight_sync.SyncError)):",
            "if not isinstance(error, (OSError, weight_sync.SyncError)):",
        ),
        ("        if now - self.first > self.most:", "        if now - self.first > 2 * self.most:"),
        ("                del self.storing[group]", "                pass"),
        ("(group, one.done)][-MOST_DONE:])", "(group, one.done)])"),
        ("                    wrong, one.errand = one.errand.error, None", "                    wrong = one.errand.error"),
        ("            self.tries.failed(wrong)", "            pass"),
        ("        return {**self.since, **known}", "        return {**known, **self.since}"),
        ("            for kept in (self.since, self.storing, self.done):", "            for kept in (self.since, self.storing):"),
        room="scaled",
        test="mirror/test_services",
    ),
    *of(
        "async_rl/worker",
        ("            if self.wanted > self.serves and self.tries.now:", "            if self.wanted > self.serves:"),
        ("        self.errand = None\n", "        pass\n"),
        room="scaled",
        test="mirror/test_services",
    ),
    *of(
        "async_rl/beside",
        ("            self.error = error", "            pass"),
        ("        self.errands.put(errand)", "        threading.Thread(target=errand.run).start()"),
        room="scaled",
        test="mirror/test_services",
    ),
    *of(
        "async_rl/records",
        ("(n, len(s.tokens), s.finished) for n, chain", "(n, len(s.tokens), chain.finished) for n, chain"),
        ("for name in terms] for one in rollouts], dtype=torch.float64)", "for name in terms] for one in rollouts], dtype=torch.float32)"),
        ("int(s.version[s.sampled].min())", "int(s.version.min())"),
        (".to(torch.int16)", ".to(torch.int8)"),
        ("[(chain.finished, chain.saved) for chain", "[(chain.finished, 0) for chain"),
        room="scaled",
        test="mirror/test_services",
    ),
    *of(
        "weight_codec",
        ("if bool((positions[1:] <= positions[:-1]).any()):", "if bool((positions[1:] < positions[:-1]).any()):"),
        ("int(positions[-1]) < old.numel():", "int(positions[-1]) <= old.numel():"),
        ("if len(raw) != len(at) or k > 8:", "if k > 8:"),
        ("second = varint((far << 1) ^ (far >> 63))", "second = varint(far << 1)"),
        ('if kind != "full" or not count == size == len(high) == len(low):', 'if kind != "full":'),
    ),
]


def mutated(mutant: Mutant, source: str) -> str:
    """The file with the mistake. ValueError where the original line is not there, or more than once."""
    if (count := source.count(mutant.old)) != 1:
        raise ValueError(f"{mutant}: the original is found {count} times, not once")
    return source.replace(mutant.old, mutant.new)


@dataclass
class Job:
    """A mutant, or a test file as it is."""

    test: str
    key: str
    """In the journal; another one once the test file is another."""
    mutant: Mutant | None = None
    limit: float = HOUR
    """Seconds of processor time."""
    slow: dict[str, float] = field(default_factory=dict)
    """Tests that come last, with the seconds that they took."""
    slot: int = -1
    began: float = 0.0


class Journal:
    """What came of each job, a line each. It begins anew once a file is another, test files aside."""

    def __init__(self, path: Path, digest: str, fresh: bool):
        self.path, self.found, tree = path, {}, {"tree": digest}
        lines = [] if fresh else read_lines(path)
        if lines and lines[0] == tree:
            self.found = {record["key"]: record for record in lines[1:]}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in (tree, *self.found.values())), encoding="utf-8")

    def add(self, **record: object) -> None:
        self.found[record["key"]] = record
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def digest(tree: Path) -> str:
    """Of the files that every outcome may depend on: a test file is part of its own jobs' keys."""
    state = hashlib.sha256()
    for path in sorted(tree.rglob("*.py")):
        name = path.relative_to(tree).as_posix()
        if not name.startswith("tests/") or path.name == "conftest.py":
            state.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return state.hexdigest()


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="WORD", default="", help="mutants whose file, line or test contains it")
    parser.add_argument("--fresh", action="store_true", help="forget what an interrupted run has found")
    asked = parser.parse_args(words)
    chosen = [m for m in MUTANTS if asked.only in f"{m} {m.test}"]
    for mutant in chosen:
        mutated(mutant, (ROOT / mutant.file).read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        tree, *slots = (copied(Path(folder) / name) for name in ("tree", *map(str, range(SLOTS))))
        known = Journal(JOURNAL, digest(tree), asked.fresh)
        Path(folder).chmod(0o755)  # the user of a sandbox must get to what it starts from
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        content = {m.test: hashlib.sha256((tree / m.test.partition("::")[0]).read_bytes()).hexdigest()[:12] for m in chosen}
        plain = [Job(test, f"{test} {content[test]}") for test in sorted(content)]
        prepare()
        run(plain, tree, slots, known)
        if broken := [job for job in plain if known.found[job.key]["end"] != "passed"]:
            print("\n".join(f"{job.test} fails without any mutation: {known.found[job.key]['said']}" for job in broken))
            return 1
        facts = {job.test: known.found[job.key] for job in plain}
        limit = {test: 30 + PATIENCE * fact["processor"] for test, fact in facts.items()}
        jobs = [Job(m.test, f"{m} | {m.test} {content[m.test]}", m, limit[m.test], facts[m.test]["slow"]) for m in chosen]
        run(sorted(jobs, key=lambda job: job.limit), tree, slots, known)
    gc.unfreeze()  # some libraries look at the end for what was left
    return report([(job.mutant, known.found[job.key]) for job in jobs])


def report(found: list[tuple[Mutant, dict]]) -> int:
    """Says which mutants live, and whether that is as it should be."""
    killed, same, wrong = 0, [], []
    for mutant, record in found:
        if record["end"] in ("failed", "endless"):
            killed += 1
            if mutant.same:
                wrong.append(f"KILLED   {mutant}\n         though it is said to be the same: {mutant.same}\n         {record['said']}")
        elif record["end"] == "passed" and mutant.same:
            same.append(f"same     {mutant}\n         {mutant.same}")
        else:
            wrong.append(f"{'SURVIVED' if record['end'] == 'passed' else 'BROKEN  '} {mutant}\n         {mutant.test} {record['said']}")
    print("\n".join([*same, *wrong]))
    files = len({mutant.file for mutant, _ in found})
    print(f"{len(found)} mutants of {files} files: {killed} killed, {len(same)} the same as the original, {len(wrong)} wrong")
    return 1 if wrong else 0


def copied(folder: Path) -> Path:
    """A copy of the tree: what is run, without what running leaves."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "runs", "__pycache__", "*.egg-info", "notebooks", "*.png"))
    return folder


def prepare() -> None:
    """Imports what forks share, and nothing that tests look at; with one thread, since threads do not survive a fork."""
    os.environ.update(OMP_NUM_THREADS="1", TRITON_INTERPRET="1", PYTHONDONTWRITEBYTECODE="1", HF_HUB_OFFLINE="1")
    sys.dont_write_bytecode = True  # two versions of a file may be of one size and one second
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != ROOT]
    print("importing what the tests import …", flush=True)
    import hypothesis
    import torch

    torch.set_num_threads(1)
    heard = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries complain of what nobody asks them for
    for name in WANTED:
        try:
            importlib.import_module(name)
        except ImportError:
            pass  # the tests that want it will say so
    os.dup2(heard, 2)
    gc.freeze()  # pytest collects garbage, and would look through all of torch each time
    quick = [phase for phase in hypothesis.Phase if phase.name in ("explicit", "generate")]  # a failure need not be made small
    same = {"derandomize": True, "database": None, "deadline": None, "suppress_health_check": list(hypothesis.HealthCheck)}
    hypothesis.settings.register_profile("mutants", phases=quick, **same)
    hypothesis.settings.load_profile("mutants")


def run(jobs: list[Job], tree: Path, slots: list[Path], known: Journal) -> None:
    """Every job that is not known yet, as many at a time as there are slots, which are like `tree` but for a job's mutation."""
    waiting = [job for job in jobs if job.key not in known.found]
    total, done, free, running = len(waiting), 0, list(range(len(slots))), {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of what ends the jobs
    try:
        while waiting or running:
            while waiting and free:
                job = waiting.pop(0)
                job.slot, job.began = free.pop(), time.monotonic()
                running[begin(job, tree, slots[job.slot])] = job
            pid, end, worked = ended(running)
            job, done = running.pop(pid), done + 1
            seconds = round(time.monotonic() - job.began, 1)
            said = f"{job.limit:.0f} s of work and no end" if end == "endless" else (slots[job.slot] / "said").read_text(encoding="utf-8")
            if job.mutant:
                shutil.copyfile(tree / job.mutant.file, slots[job.slot] / job.mutant.file)
            free.append(job.slot)
            slow = {} if job.mutant or end != "passed" else {"slow": json.loads((slots[job.slot] / "slow").read_text(encoding="utf-8"))}
            known.add(key=job.key, end=end, said=said[:500], seconds=seconds, processor=round(worked, 1), **slow)
            tell = {"passed": "lives" if job.mutant else "passes", "failed": "killed" if job.mutant else "fails"}.get(end, end)
            print(f"{done:4} of {total}  {tell:7} {worked:6.1f} s  {job.mutant or job.test}", flush=True)
    finally:
        for pid in running:
            end_group(pid)


def ended(running: dict[int, Job]) -> tuple[int, str, float]:
    """Waits for a job to end, or to take too long; the process, how it ended, and seconds of processor time."""
    ends = {0: "passed", 1: "failed", -signal.SIGXCPU: "endless"}
    while True:
        for pid, job in running.items():
            late = time.monotonic() - job.began > HOUR
            if late:
                end_group(pid)
            found, status, used = os.wait4(pid, 0 if late else os.WNOHANG)
            if found:
                end_group(pid)  # whatever it has started
                return pid, ends.get(os.waitstatus_to_exitcode(status), "broken"), used.ru_utime + used.ru_stime
        time.sleep(0.05)


def end_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def begin(job: Job, tree: Path, folder: Path) -> int:
    """The process that runs a job's tests in a slot."""
    if job.mutant:
        source = (tree / job.mutant.file).read_text(encoding="utf-8")
        (folder / job.mutant.file).write_text(mutated(job.mutant, source), encoding="utf-8")
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    code = 3
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (int(job.limit), int(job.limit) + 5))
        code = tests_of(job, folder)
    finally:
        os._exit(code)


def tests_of(job: Job, folder: Path) -> int:
    """In the fork: pytest's exit code. The first test that failed, and its message, are written into the file `said`."""
    import pytest
    import torch

    heard, said = os.open(folder / "heard", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), folder / "said"
    os.dup2(heard, 1), os.dup2(heard, 2)
    said.write_text("")
    os.chdir(folder)
    (folder / "tmp").mkdir(exist_ok=True)
    os.environ["PYTHONPATH"], tempfile.tempdir = str(folder), str(folder / "tmp")
    torch.set_num_threads = lambda n: None  # the slots share the cores
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "kit")]:
        del sys.modules[name]

    class First:
        seconds: dict[str, float] = {}

        def pytest_collection_modifyitems(self, items):
            items.sort(key=lambda item: job.slow.get(item.nodeid.partition("::")[2], 0.0))

        def pytest_sessionfinish(self):
            slow = {name: round(seconds, 2) for name, seconds in self.seconds.items() if seconds > QUICK}
            (folder / "slow").write_text(json.dumps(slow), encoding="utf-8")

        def pytest_runtest_logreport(self, report):
            name = report.nodeid.partition("::")[2]
            self.seconds[name] = self.seconds.get(name, 0.0) + report.duration
            if report.failed and not said.read_text():
                message = getattr(getattr(report.longrepr, "reprcrash", None), "message", "") or str(report.longrepr)
                said.write_text(f"{name}: {' '.join(message.split())}", encoding="utf-8")

        def pytest_collectreport(self, report):
            if report.failed:
                said.write_text(f"cannot be collected: {' '.join(str(report.longrepr).split())[-400:]}", encoding="utf-8")

        def pytest_collection_finish(self):
            room = (job.mutant.file if job.mutant else "ref").partition("/")[0]
            if not Path(str(importlib.import_module(room).__file__)).is_relative_to(folder):
                raise RuntimeError(f"{room} is not the copy")

    where = ["--rootdir", str(folder), "-c", str(folder / "pyproject.toml")]
    return int(pytest.main(["-x", "-p", "no:cacheprovider", *where, str(folder / job.test)], [First()]))


if __name__ == "__main__":
    sys.exit(main())
