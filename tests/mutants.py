"""Plausible mistakes in `ref/`, `scaled/`, `environments/` and `kit/`, one line each, and the tests that must notice
each: what tests are worth.

    make mutants                             all of them: at most 40 minutes on two cores
    python -m tests.mutants --only kl        those whose file, line or test contains a word
    python -m tests.mutants --fresh          forgets what an interrupted run has found

The checkout is never edited: each of two slots is a copy of the tree in a temporary folder. This process imports torch,
pytest and what else the tests want, once. A mutant is a fork of it: in the slot's copy one line is another, and the
test file, or the test function, that the mutant names runs up to its first failure. Hypothesis draws the same examples
each time, so that the outcome does not depend on the day. All tests run without a mutation first: one that fails by
itself tells nothing, and those that take long come last when there is a mutation. Mutants with fast tests come first,
too. The cache of sandboxes lies in the temporary folder: no root file system of a mutant stays in the user's own.

A mutant that lives is a hole in the tests, unless no test can tell it from the original: then the list says why. The
exit code is 1 where a mutant lives without a reason, where one with a reason is killed, and where a line is no longer
there.
"""

import argparse
import gc
import hashlib
import importlib
import json
import os
import re
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
"""How many times the processor time that they take without a mutation tests may take, and half a minute more: a loop
that does not end is a mistake noticed too. Where they wait for an hour instead, something is wrong with the tests."""
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
    """A piece of a line, found once in the file; the formatter may have wrapped it."""
    new: str
    """What stands there instead."""
    test: str
    """The test file that must fail, or the function in it: FILE::NAME."""
    same: str = ""
    """Why no test can tell the two apart; empty where one can."""

    def __str__(self) -> str:
        return f"{self.file}: {self.old.strip()} → {self.new.strip()}"


def of(name: str, *pairs: tuple[str, ...], test: str = "", room: str = "ref") -> Iterator[Mutant]:
    """The mutants of a file of a room. `test`: FILE or FILE::FUNCTION beneath tests/, without .py; by default
    tests/ref/test_NAME.py."""
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
        (
            "return -(weight * surrogate).sum() / budget",
            "return -(weight * surrogate).sum() / weight.sum().clamp(min=1)",
        ),
        ("return -(weight * surrogate).sum() / budget", "return -(weight * surrogate).mean()"),
        ("weight = weight / _count_tokens(mask, keep)", "weight = weight / mask.shape[1]"),
        ("is_counted = is_counted & keep[:, None]", "pass"),
        ("- behavior_logp.detach().to(wide)).where(is_counted, 0)", "- behavior_logp.to(wide)).where(is_counted, 0)"),
        ("- behavior_logp.detach().to(wide)).where(is_counted, 0)", "- behavior_logp.detach().to(wide)) * is_counted"),
        ("return log_ratio, advantages.detach().to(wide)", "return log_ratio, advantages.to(wide)"),
        ("mask.to(wide).where(is_counted, 0)", "is_counted.to(wide)"),
        (
            "log_ratio.sum(1, keepdim=True) / _count_tokens(mask, keep)",
            "log_ratio.sum(1, keepdim=True) / log_ratio.shape[1]",
        ),
        ("log_ratio.clamp(max=math.log1p(clip_high))", "log_ratio.clamp(max=math.log1p(clip_low))"),
        ("log_ratio.clamp(max=math.log1p(clip_high))", "log_ratio.clamp(max=clip_high)"),
        ("log_low = math.log1p(-clip_low)", "log_low = -math.log1p(clip_low)"),
        ("is_clipped & (advantage != 0)", "is_clipped"),
        ("torch.expm1(log_ratio) - log_ratio", "torch.expm1(log_ratio)"),
        ('"mean_ratio": (weight * log_ratio.exp())', '"mean_ratio": (log_ratio.exp())'),
        ('"dapo": Variant(scale="std", clip_high=0.28,', '"dapo": Variant(scale="std",'),
        ("clip_low=3e-4, clip_high=4e-4", "clip_low=4e-4, clip_high=3e-4"),
        ("keep=finished if variant.drop_overlong else None", "keep=finished"),
        ("weights = weights / lengths.clamp(min=1)", "weights = weights / lengths.max()"),
        ("return weights.where(finished, 0) if", "return weights.where(~finished, 0) if"),
        ('{"constant": rollouts * longest,', '{"constant": rollouts,'),
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
        ("torch.where(is_zero, 1.0, numerator", "torch.where(is_zero, 0.0, numerator"),
        ("denominator.masked_fill(is_zero, 1.0)", "denominator"),
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
            "self.length < chaining.trigger or self.num_contexts == chaining.max_segments",
            "self.length < chaining.trigger or self.num_contexts > chaining.max_segments",
        ),
        ("summary = torch.arange(T) >= (T", "summary = torch.arange(T) > (T"),
        ("self.summary_start = self.length + len(chaining.request)", "self.summary_start = self.length"),
        ("+ self.length - len(self.pending)", "+ self.length"),
        ("len(self.summary) > chaining.longest_summary", "len(self.summary) - 1 > chaining.longest_summary"),
        ("*self.summary, *chaining.resume", "*self.summary[:-1], *chaining.resume"),
        ("for exchange, _ in reversed(self.exchanges)", "for exchange, _ in self.exchanges"),
        ("if num_kept and size > chaining.longest_summary", "if size > chaining.longest_summary"),
        ("sum(int((~segment.sampled).sum()) for segment", "sum(len(segment.tokens) for segment"),
        ("front + self.trigger + self.room +", "front + self.trigger +"),
        ("twin.exchanges = list(self.exchanges)", "twin.exchanges = self.exchanges"),
        ("return advantages.repeat_interleave(counts)", "return (advantages / counts).repeat_interleave(counts)"),
        (
            "self.length, self.num_contexts = prompt, len(prompt), self.num_contexts + work",
            "self.length, self.num_contexts = prompt, len(prompt), self.num_contexts + 1",
        ),
    ),
    *of(
        "self_summary",
        ("self.dropped += sum(turns for _, turns in self.exchanges[:count])", "pass"),
        (
            "[(self.rewritten_prompt[len(self.base) :],",
            "[(self.rewritten_prompt,",
            "truncation never keeps the oldest exchange, since all of those that reach the trigger do not fit",
        ),
        ("len(prompt) < chaining.trigger or self.num_contexts", "True or self.num_contexts"),
        test="ref/test_rollout",
    ),
    *of(
        "router_replay",
        ("scores.topk(k, -1)[0][:, -1:]", "scores.topk(k, -1)[0][:, :1]"),
        ("(math.log(alpha) if alpha else -math.inf)", "(alpha - 1 if alpha else -math.inf)"),
        ("plausible = scores >= threshold", "plausible = scores > threshold"),
        ("(rank + E * ~is_kept)", "(rank + E * is_kept)"),
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
        ("if all_contexts and text.startswith(all_contexts[-1].text)", "if all_contexts"),
        ("if not text.startswith(before)", "if False"),
        ('if message.role != "assistant" or not message.learn', 'if message.role != "assistant"'),
        ("(mask[:length] & ~mask[1 : length + 1])", "(mask[:length] & ~mask[:length].roll(-1))"),
        ("nll / (n_tokens or 1.0)", "nll / (_ or 1.0)"),
    ),
    *of(
        "packing",
        ("space, row_index = min(candidates)", "space, row_index = max(candidates)"),
        ("(-lengths).argsort(stable=True)", "lengths.argsort(stable=True)"),
        ("(-costs.double()).argsort(stable=True)", "costs.double().argsort(stable=True)"),
        ("(-costs.double()).argsort(stable=True)", "torch.arange(len(costs))"),
        ("(load + float(costs[index]), rank)", "(load + 1.0, rank)"),
        ("return 1 / float((loads / max_load).mean())", "return 1 / float((loads / max_load).median())"),
        ("row_index, width - space, space - size", "row_index, space - size, space - size"),
        ("if space >= size]", "if space > size]"),
        ("+ self.quadratic * T.square()", "+ self.quadratic * T"),
        (
            "2.0 * config.num_hidden_layers * config.num_attention_heads",
            "2.0 * config.num_hidden_layers * config.num_key_value_heads",
        ),
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
        ("codes.masked_fill_(is_invalid[..., None], 0x7F)", "codes.masked_fill_(is_invalid[..., None], 0x7E)"),
        ("s = amax / (E4M3_MAX * 6)", "s = amax / E4M3_MAX"),
        ('largest.amax(-1, keepdim=True) if scale == "token"', 'largest.amax() if scale == "token"'),
        ("_divide(groups, step[..., None], division)", "_divide(groups, (largest / 6.0)[..., None], division)"),
        ("codes[..., ::2] | (codes[..., 1::2] << 4)", "codes[..., 1::2] | (codes[..., ::2] << 4)"),
        ("gates.flatten()[order, None]", "gates.flatten()[:, None]"),
        ("gate, up = grouped_linear(", "up, gate = grouped_linear("),
        ("token = order // gates.shape[1]", "token = order % len(x)"),
        ("repeat_interleave(block[0], -2)", "repeat_interleave(block[1], -2)"),
    ),
    *of(
        "formats",
        ("magnitude = x.abs().clamp_(max=6.0)", "magnitude = x.abs()"),
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
        ('{"lm_head", "head", "gate", "router", ', '{"lm_head", "head", "router", '),
        ("param.ndim < 2 or id(param) in embedding_ids or special_parts", "param.ndim < 2 or special_parts"),
        (
            '{"params": no_decay_params, "weight_decay": 0.0}',
            '{"params": no_decay_params, "weight_decay": weight_decay}',
        ),
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
        ("row_weight = w * ((j >= k)", "row_weight = w * ((j > k)"),
        ("return total / mtp.mtp.depth, count", "return total, count"),
        ("@ head - m) * w", "@ head + m) * w"),
        ("q -= F.linear(target[rows], head)", "q += F.linear(target[rows], head)"),
        ("+ (negentropy * row_weight).sum()", "+ negentropy.sum()"),
        ("target = target_tokens = ids[b, j + 1]", "target = target_tokens = ids[b, j]"),
        ("& (doc[:, 1:] >= 0)", "& (doc[:, 1:] > 0)"),
        ("rows = hidden[b, (j - k).clamp(min=0)]", "rows = hidden[b, j]"),
    ),
    *of(
        "engine/decoder",
        ("if u[k] * float(q[k, x]) >= float(p[k, x])", "if u[k] * float(q[k, x]) > float(p[k, x])"),
        ("(p[k] - q[k]).clamp_(min=0)", "p[k].clone()"),
        ("return len(draft), invert(p[len(draft)], u[-1])", "return len(draft), invert(p[0], u[-1])"),
        ("repeats > 2 for t, repeats in matches", "repeats > 1 for t, repeats in matches"),
        ("turn, repeats + 1 if turn == previous_turn else 1", "turn, repeats + 1"),
        ("context_length - 1 - max(0, self.depth - 1 - num_accepted)", "context_length - 1"),
        ("for n in range(4, 0, -1)", "for n in range(1, 5)"),
        ("new_tokens[: new_tokens.index(stop) + 1]", "new_tokens[: new_tokens.index(stop)]"),
        ("p = (logits / self.temperature).softmax(-1)", "p = logits.softmax(-1)"),
        ("self.retracted = len(self.pending) - number", "self.retracted = len(self.pending)"),
        ("self.tokens += p.fed_tokens", "pass"),
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
        ("                self.free.append(inbox)", "                pass"),
        ("            del function  #", "            #"),
        ("inbox = self.free.pop() if", "inbox = self.free[-1] if"),
        ("limits.tokens is not None and self.sampled >= limits.tokens", "False"),
        ("else max(1, limits.tokens - self.sampled)", "else limits.tokens"),
        ("(remaining, None if self.builder.is_summary else limits.turn_tokens)", "(remaining, limits.turn_tokens)"),
        ("self.engine.extend(entry.slot, tokens, active.longest_turn)", "self.engine.extend(entry.slot, tokens)"),
        ("[stop, *tokens])", "tokens)"),
        ("self.messages[self.starts[builder.dropped] :]", "self.messages[self.opening :]"),
        ("if tokens is None or active.has_reached_limit:", "if tokens is None:"),
        ("turn.stop is not None and not entry.active.has_reached_limit)", "turn.stop is not None)"),
        ("for entry in [entry for entry in self.entries if keys(entry.key)]:", "for entry in ():"),
        ("            is_late = self.is_abandoned", "            is_late = False"),
        ("self.is_abandoned, is_done = True, self.done.is_set()", "self.is_abandoned, is_done = True, False"),
        ("while self.queue and len(self.entries) < self.max_active:", "while self.queue:"),
        ("self.engine.in_waves and any(call.entry.active is None for call in self.calls)", "False"),
        ("        driver.close()\n", "        pass\n"),
        ("call.done.is_set() or time_now - call.start_time > self.limits.seconds]", "call.done.is_set()]"),
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
        (
            "torch.cat((a.q_proj.bias, a.k_proj.bias, a.v_proj.bias))",
            "torch.cat((a.q_proj.bias, 0 * a.k_proj.bias, a.v_proj.bias))",
        ),
        ("if bias is None else torch.addmm(bias, x, qkv)", "if True else torch.addmm(bias, x, qkv)"),
        test="ref/test_families",
    ),
    *of(
        "engine/layout",
        ("dtype=dtype).triu_(1)", "dtype=dtype).triu_(2)"),
        ("self.mask = mask.repeat_interleave(H // G, 0)", "self.mask = mask.repeat(H // G, 1)"),
        ("gates = top_logits.softmax(-1) if self.normalise", "gates = top_logits.softmax(-1) if not self.normalise"),
        test="ref/test_mtp",
    ),
    *of(
        "network/model",
        ("mask = mask & (doc[:, :, None] == doc[:, None, :])", "pass"),
        (".tril(start)[None]", ".tril(start + 1)[None]"),
        ("attention += d * (self.num_attention_heads + 2 *", "attention += d * (self.num_attention_heads +"),
        ("            param.zero_()", "            pass"),
        ("return scores.gather(-1, experts).softmax(-1)", "return scores.softmax(-1).gather(-1, experts)"),
        ("math.sqrt(2 * config.num_hidden_layers) if residual", "math.sqrt(config.num_hidden_layers) if residual"),
        ('residual = "o_proj" in name or "down_proj" in name', 'residual = "o_proj" in name'),
        ("/ layer_experts.numel()", "/ len(layer_experts)"),
        ("return total / len(router_logits)", "return total"),
        ("total = total + E * (share", "total = total + (share"),
        ("x = x + self.self_attn(self.input_layernorm(x),", "x = x + self.self_attn(x,"),
        ("F.silu(self.gate_proj(x)) * self.up_proj(x)", "F.silu(self.up_proj(x)) * self.gate_proj(x)"),
        ("self.length = min(self.length, length)", "self.length = length"),
        ("self.values = [v[rows] for v in self.values]", "self.values = [v[: len(rows)] for v in self.values]"),
        ("torch.arange(start, start + T, device=ids.device)", "torch.arange(T, device=ids.device)"),
        ("num_used_experts = self.num_experts_per_tok if active", "num_used_experts = 1 if active"),
    ),
    *of(
        "network/fast",
        ("self.q_norm.weight.mul(d**-0.5)", "self.q_norm.weight.div(d)"),
        ("x.new_full((H, d), d**-0.5)", "x.new_ones(H, d)"),
        ("torch.cat(biases) if biases else None", "0 * torch.cat(biases) if biases else None"),
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
        ("torch.logaddexp(l, prefix_l)", "torch.maximum(l, prefix_l)"),
        ("(start[:, 1:] != start[:, :-1]) | ", ""),
        ("gradient[run.rows, :, keys] += gradient_part", "gradient[run.rows, :, keys] = gradient_part"),
        ("positions[query] >= key) & ", "positions[query] >= key) | "),
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
        (
            "pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)",
            "pair_with(scaling.beta_slow), pair_with(scaling.beta_fast)",
        ),
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
        ("dk[:, :, :num_keys] +=", "dk[:, :, :num_keys] ="),
        ("lp.expm1()", "lp.exp()"),
        ("d_weight += p.t() @ (h * mg)", "d_weight = p.t() @ (h * mg)"),
        ("torch.mul(d_inner, act, out=d_value)", "torch.mul(d_inner, value, out=d_value)"),
        ("S - T + min(t + block, T)) for t in", "min(t + block, T)) for t in"),
        (
            "dim=-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32)",
            "dim=-1, keepdim=True, dtype=x.dtype",
        ),
        ("token = torch.arange(N * K, device=flat.device) // K", "token = torch.arange(N * K, device=flat.device) % N"),
        ("dg = (dy * y).sum(-1).index_select(0, token_rows)", "dg = (dy * y).sum(-1)[: len(token_rows)]"),
        ("dw = along.flatten(0, 1).sum(0)", "dw = along.flatten(0, 1).mean(0)"),
        ("torch.mul(u, weight, out=d_qkv[:, :, :C])", "d_qkv[:, :, :C] = u"),
    ),
    *of(
        "network/linear_logprob",
        ("-(logp.exp() * logp).sum(-1)", "(logp.exp() * logp).sum(-1)"),
        ('if target_kind == "teacher" else (logp, logq)', 'if target_kind != "teacher" else (logp, logq)'),
        ("with torch.no_grad():", "with torch.enable_grad():"),
        ("torch.promote_types(hidden.dtype, torch.float32)", "hidden.dtype"),
    ),
    *of(
        "weight_codec",
        ("positions = (a != b).nonzero()[:, 0]", "positions = (old.flatten() != new.flatten()).nonzero()[:, 0]"),
        (
            "positions, new = positions.long(), old.flatten().clone()",
            "positions, new = positions.long(), old.flatten()",
        ),
        ("return bits ^ ((bits >> 15) & 0x7FFF)", "return bits"),
        ("return positions[steps != 0], steps[steps != 0]", "return positions, steps"),
        ("values = values[has_more] >> 7", "values = values[has_more] >> 8"),
        ("values[open_indices] |= (stream & 0x7F)", "values[open_indices] |= stream"),
        ("np.diff(places, prepend=-1) - 1", "np.diff(places, prepend=0)"),
        ("return min(candidates, key=len)", "return candidates[-1]"),
    ),
    *of(
        "weight_sync",
        (
            "(updates.double().abs() / ulp(weights)).clamp(max=1)",
            "(updates.double().abs() / ulp(weights) / 2).clamp(max=1)",
        ),
        ('salt=row_number.to_bytes(16, "little")', "salt=bytes(16)"),
        (
            "if digest_by_place.setdefault(place, value) != value:",
            "if digest_by_place.setdefault(place, value) is None:",
        ),
        ("if first != ends.get(name, 0):", "if first < ends.get(name, 0):"),
        ("self.base_weights = [tensor.clone() for tensor in new_weights]", "self.base_weights = new_weights"),
        ('if manifest["digests"] != digests:', "if False:"),
        ('if hashed(blob) == shard["digest"]:', 'if len(blob) == shard["bytes"]:'),
        ("for _ in range(2):", "for _ in range(1):"),
        ("if served_versions and v <= min(served_versions)", "if served_versions and v <= max(served_versions)"),
        ("if version not in best or cost < best[version][0]:", "if version not in best:"),
        ("if not mismatches:", "if True:"),
        ('if manifests[version]["links"][link_number]["base"] is not None:', "if False:"),
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
        ("            param.grad = None", "            pass"),
        ("for master, _ in used_pairs:  # a", "for master, _ in []:  # a"),
        ("m for m, _ in used_pairs], max_norm)", "m for m, _ in used_pairs], max_norm, 1.0)"),
        ("self.masters = model.to(torch", "self.masters = model.to(dtype).to(torch"),
    ),
    *of(
        "engine/sampler",
        (
            "torch.where(self.sampled[slot, :length], self.version, -1)",
            "torch.where(self.sampled[slot, :length], 0, -1)",
        ),
        ("torch.where(self.sampled[slot, :length], self.version, -1)", "torch.full((length,), self.version)"),
        ("        self.version = version\n", "        pass\n"),
        ("self.experts[rows, t:n] =", "self.experts[rows.roll(1), t:n] ="),
        ("(logits.float() / temperature).log_softmax(-1)", "logits.float().log_softmax(-1)"),
        (
            "self.tokens[slot, self.turn_starts[slot] : self.lengths",
            "self.tokens[slot, self.turn_starts[slot] - 1 : self.lengths",
        ),
        ("deepcopy(plain) if copy else plain", "plain"),
        (
            "index for index in live_rows if self.lengths[self.rows[index]] == n",
            "index for index in range(len(self.rows)) if self.lengths[self.rows[index]] == n",
        ),
    ),
    *of(
        "cpt",
        ("size <= 5 * target_size", "size <= 50 * target_size"),
        ("target_size / 3 <= size", "target_size / 30 <= size"),
        ("(doc[:, 1:] == doc[:, :-1]) & (doc[:, 1:] >= 0)", "(doc[:, 1:] == doc[:, :-1])"),
        ("loss_weight *= weight[:, 1:]", "loss_weight *= weight[:, :-1]"),
        ("loss = -(logp * loss_weight).sum()", "loss = -(logp * loss_weight).mean()"),
        ("(step + 1) / max(warmup, 1)", "step / max(warmup, 1)"),
        ("(total - step) / max(decay, 1)", "(total - step - 1) / max(decay, 1)"),
        ("self.nll / self.bytes / math.log(2)", "self.nll / self.bytes"),
        ("math.exp(self.nll / self.tokens)", "math.exp(self.nll / (self.tokens + 1))"),
        ("positions >= scored_until[:, None]", "positions > scored_until[:, None]"),
        ("stride = window // 2 if stride is None", "stride = window - 1 if stride is None"),
        ("if space >= len(piece)", "if space > len(piece)"),
        ("fullest_row = min(range(len(free_tokens))", "fullest_row = max(range(len(free_tokens))"),
    ),
    *of(
        "network/checkpoint",
        ('"norm_topk_prob": False,', '"norm_topk_prob": True,'),
        ('"router_aux_loss_coef": 0.001}', '"router_aux_loss_coef": 0.01}'),
        ('record.get("rope_theta") or 10_000.0', 'record.get("rope_theta") or 1_000_000.0'),
        ('32_768, "tie_word_embeddings": False', '32_768, "tie_word_embeddings": True'),
        (
            '{"gate_proj": slice(0, half), "up_proj": slice(half, None)}',
            '{"up_proj": slice(0, half), "gate_proj": slice(half, None)}',
        ),
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
        ("self.positions[:S] > position[:A, None", "self.positions[:S] - 1 > position[:A, None"),
        ("values[:A, :, :S], mask, scale=1.0", "values[:A, :, :S], scale=1.0"),
        ("values[:A, :, :S], mask", "keys[:A, :, :S], mask"),
        ("k, v, self.mask, scale=1.0", "k, v, self.mask"),
        ("mask.repeat(1, heads, 1)", "mask.repeat_interleave(heads, 1)"),
        (
            "if len(y) <= DENSE else",
            "if len(y) <= 0 else",
            "both ways give the same up to rounding, which tokens do not show",
        ),
        ("masked_fill_(key_pos > query_pos[..., None]", "masked_fill_(key_pos >= query_pos[..., None]"),
        ("index * int(counts.max()) + rank", "index + rank * len(self.rows)"),
        (
            "attention = torch.cat((attention, earlier_tokens.attend(q[A:], keys, values, S)))",
            "attention = torch.cat((attention, torch.zeros_like(earlier_tokens.attend(q[A:], keys, values, S))))",
        ),
        test="ref/test_continuous",
    ),
    *of(
        "engine/continuous",
        ("self.cached_lengths[slot] = 0", "pass"),
        (
            "self.lengths[slot], self.max_len - 1, self.cached_lengths[slot] + 1 + budget_left",
            "self.lengths[slot], self.cached_lengths[slot] + 1 + budget_left",
        ),
        (
            "self.lengths[slot], self.max_len - 1, self.cached_lengths[slot] + 1 + budget_left",
            "self.lengths[slot], self.max_len - 1, self.cached_lengths[slot] + 1",
        ),
        ("budget_left -= ends[-1] - self.cached_lengths[slot] - 1", "pass"),
        ("is_new = position >= torch.tensor(self.routed_lengths)[token_slots]", "is_new = position >= 0"),
        ("self.draws[slots, index] if self.temperature", "self.draws[slots, index - 1] if self.temperature"),
        ("token in self.stop_ids[slot] or self.lengths[slot] == self.max_len or", "token in self.stop_ids[slot] or"),
        (
            "self.lengths[slot] = self.cached_lengths[slot] = self.routed_lengths[slot] = 0",
            "self.lengths[slot] = self.cached_lengths[slot] = 0",
        ),
        ("self.sampled[slot], self.logp[slot], self.versions[slot] = False, 0.0, -1", "pass"),
        ("self.pages.exchange(front, self.cached_lengths[a],", "self.pages.exchange(front, 0,"),
        (
            "length = min(self.lengths[slot], self.max_len - 1) - 1",
            "length = min(self.lengths[slot], self.max_len - 1)",
        ),
        ("or self.first_loads[source] == self.loads", "or True"),
        ("available = min(num_shared, self.cached_lengths[source])", "available = num_shared"),
        ("is_read[slot] = False", "pass"),
        ("self.experts[slot, num_routed:length] = self.experts[source, num_routed:length]", "pass"),
        ("self.pages.copy(self.slots.index(source), self.slots.index(slot), length)", "pass"),
    ),
    *of(
        "engine/pages",
        ("row_a = memory[:, :, a, :, :length_a].clone()", "row_a = memory[:, :, a, :, :length_a]"),
        ("if num_pages < num_before:", "if not num_pages:"),
        ("if counts[partner] < counts[row]:", "if False:"),
        ("flags = mmap.MAP_PRIVATE", "flags = mmap.MAP_SHARED"),
        ("row_start + head * self.stretch_bytes + offset, size", "row_start + offset, size"),
        test="ref/test_pages",
    ),
    *of(
        "engine/continuous",
        ("victims = [victim for victim in victims if self.ages[victim] > self.ages[slot]]", "pass"),
        ("for victim in reversed(by_age) if victim", "for victim in by_age if victim"),
        ("if num_missing > sum(counts[victim] for victim in victims):", "if num_missing > 0:"),
        test="ref/test_pages",
    ),
    *of(
        "feature_deletion",
        ("return bool(tests) and not tests & ~group", "return bool(tests & group)"),
        ("return bool(tests) and not tests & ~group", "return not tests & ~group"),
        ("least <= g.bit_count() <= max_share * len(tests)", "least < g.bit_count() <= max_share * len(tests)"),
        ("least <= g.bit_count() <= max_share * len(tests)", "least <= g.bit_count()"),
        (' and not g & bit[""]', ""),
        ("return [] if yields and covered.issuperset(yields) else edits", "return edits"),
        ("source.cut(suite[0], suite[-1], fill, with_comments=bool(fill))", "source.cut(suite[0], suite[-1], fill)"),
        ("if statements and source.alone(statements[0]):", "if statements:"),
        ('"" if len(part) == 1 and _is_elif(source, part[0]) else "pass"', '"pass"'),
        (
            '    tests = sorted(test for test, outcome in before.items() if outcome == "passed")',
            "    tests = sorted(before)",
        ),
        ("if test not in after]", "if test in after and False]"),
        (
            "for test in failed_tests if test not in piece.tests]",
            "for test in failed_tests if test in piece.tests and False]",
        ),
        ("self.functions - 1, self.files - 1, self.tests / 3", "self.functions, self.files - 1, self.tests / 3"),
        ("if not has_hole and names & holes)", "if names & holes)"),
        (
            "{file_patch.file for file_patch in first.patches}.isdisjoint(file_patch.file for "
            "file_patch in second.patches)",
            "first.patches[0].file != second.patches[0].file",
        ),
        ("is_disjoint and ({*first.tests}.isdisjoint(second.tests) or", "is_disjoint and (True or"),
        (
            "({*first.tests}.isdisjoint(second.tests) or {*first.tests} == {*second.tests})",
            "{*first.tests}.isdisjoint(second.tests)",
        ),
        (
            "parts = sorted(pieces, key=lambda piece: [file_patch.file for file_patch in piece.patches])",
            "parts = [*pieces]",
        ),
        (
            "sorted((file_patch for piece in parts for file_patch in piece.patches), key=lambda "
            "file_patch: file_patch.file)",
            "[file_patch for piece in parts for file_patch in piece.patches]",
        ),
        (
            "min(top, current + 1) if num_solved > high * num_rollouts",
            "min(top, current + 1) if num_solved >= high * num_rollouts",
        ),
        ("max(0, current - 1) if num_solved < low * num_rollouts", "current - 1 if num_solved < low * num_rollouts"),
    ),
    *of(
        "source_text",
        ("edit.first - 1 < position or", "False or"),
        ("if digest(data) == end:", "if False:"),
        ("shift += len(split(edit.new)) - len(split(edit.old))", "shift += 0"),
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
        ("next_symbols += [(importer, alias.asname or alias.name) for alias in aliases]", "pass"),
        ("if is_body or is_lazy and field in", "if is_lazy and field in"),
        ("if is_body or is_lazy and field in", "if is_body or field in"),
        ('"pass" if len(suite) == 1 and suite is not source.tree.body else ""', '""'),
        ("and not (is_tuple and len(elements) == 2)", ""),
        ('if ast.dump(expected) != ast.dump(tree_of("".join(lines[first - 1 : last]))):', "if False:"),
        ("if any(first <= edit.first <= last for edit in edits):", "if any(first == edit.first for edit in edits):"),
        ('if "".join(after) != "".join(lines):', "if False:"),
        ("if importer != current and symbol in module.attributes:", "if False:"),
        test="ref/test_feature_deletion",
    ),
    *of(
        "async_rl",
        ("(self.rules.staleness + self.version + 1) * G", "(self.rules.staleness + self.version + 2) * G"),
        ('ahead - self.count("running", "ready", "trained")', 'ahead - self.count("ready", "trained")'),
        ("            if self.version - self.oldest[group] > self.rules.staleness:\n", "            if False:\n"),
        ("tuple(fresh_groups[: self.rules.groups]) if", "tuple(fresh_groups[-self.rules.groups :]) if"),
        ("if not self.admissible:", "if False:"),
        ("if not 0 <= event.version <= self.version:", "if False:"),
        ("log_ratio.detach().clamp(max=math.log(cap))", "log_ratio.clamp(max=math.log(cap))"),
        ("log_ratio.detach().clamp(max=math.log(cap))", "log_ratio.detach().clamp(max=cap)"),
        ("total / mask.sum(1).clamp(min=1)", "total / mask.shape[1]"),
        ('{"synchronous": 0, "one-step-off": 1}', '{"synchronous": 1, "one-step-off": 1}'),
        ("self.life.version - version] += round(tokens)", "version] += round(tokens)"),
        ("is_stale = engine.version < self.life.version - self.life.rules.staleness", "is_stale = False"),
        ("self.work_left -= seconds * trainer", "self.work_left -= seconds"),
    ),
    *of(
        "textual_feedback",
        (
            "return student[hinted_sequence.student - 1], teacher[hinted_sequence.teacher - 1].detach()",
            "return student[hinted_sequence.student - 1], teacher[hinted_sequence.teacher - 1]",
        ),
        (
            "return student[hinted_sequence.student - 1], teacher[hinted_sequence.teacher - 1].detach()",
            "return student[hinted_sequence.student], teacher[hinted_sequence.teacher].detach()",
        ),
        ("(student + shift[student]).to(tokens.device)", "(student - 1 + shift[student - 1] + 1).to(tokens.device)"),
        ("shift[hint.at :] += len(hint.tokens)", "shift[hint.at + 1 :] += len(hint.tokens)"),
        ("shift[hint.at :] += len(hint.tokens)", "shift[hint.at :] = len(hint.tokens)"),
        ("is_distilled[begin:end] = sampled[begin:end].cpu()", "is_distilled[begin:end] = True"),
        ("bool(sampled[hint.at - 1] & sampled[hint.at])", "bool(sampled[hint.at])"),
        ("if next_begin < end:", "if next_begin <= end:"),
        ("if any(other_hint.begin < hint.at < other_hint.end for other_hint in hints):", "if False:"),
        (
            "student.to(wide).log_softmax(-1), teacher.detach().to(wide)",
            "student.to(wide).log_softmax(-1), teacher.to(wide)",
        ),
        ("top_tokens = logt.topk(top_k, -1).indices", "top_tokens = logs.topk(top_k, -1).indices"),
        ("return kl_divergence(logt, logs)", "return kl_divergence(logs, logt)"),
        (
            "return (mixture_kl(logs, logt) + mixture_kl(logt, logs)) / 2",
            "return (kl_divergence(logs, logt) + kl_divergence(logt, logs)) / 4",
        ),
        ("other_logp = logp.scatter(-1, tokens, -math.inf)", "other_logp = logp"),
        (
            "other_total = other_logp.masked_fill(is_empty, 0).logsumexp(-1, "
            "keepdim=True).masked_fill(is_empty, -math.inf)",
            "other_total = other_logp.logsumexp(-1, keepdim=True)",
        ),
        ("is_excluded = infinite | (probs == 0)", "is_excluded = infinite"),
        (".sum(-1).masked_fill(infinite.any(-1), math.inf)", ".sum(-1)"),
        (
            "return (weights * divergences).sum() / budget",
            "return (weights * divergences).sum() / weights.sum().clamp(min=1)",
        ),
        ("return (weights * divergences).sum() / budget", "return divergences.sum() / budget"),
        (
            "wide = torch.promote_types(torch.promote_types(student.dtype, teacher.dtype), torch.float32)",
            "wide = torch.promote_types(student.dtype, teacher.dtype)",
        ),
        (
            "if len(positions) and len(states) < int(positions[-1]):",
            "if len(positions) and len(states) < int(positions[0]):",
        ),
        (
            "tokens = torch.cat([*pieces, segment.tokens[start:last]])",
            "tokens = torch.cat([*pieces, segment.tokens[start:]])",
        ),
        ("secret = set(runs(answer)) - set(runs(context))", "secret = set(runs(answer))"),
        ("n = min(n, len(answer), len(hint))", "pass"),
    ),
    *of(
        "rl",
        ("loss = loss + c.feedback.weight * feedback_term", "loss = loss + feedback_term"),
        (
            "hinted_contexts = find_hinted(rollouts) if c.feedback.weight else {}",
            "hinted_contexts = find_hinted(rollouts)",
        ),
        ("student, teacher = (model.head(x) / c.temperature for x", "student, teacher = (model.head(x) for x"),
        ("budget=budget, kind=c.feedback.divergence", "budget=float(len(student)), kind=c.feedback.divergence"),
        ("batch.own[:, 1:] * weights[batch.chain][:, None]", "batch.own[:, 1:]"),
        ("budget=policy_budget,", "budget=budget,"),
        ("mean_log_ratio /= lengths.clamp(min=1)", "pass"),
        ("clip_high=objective.clip_high,", ""),
        ("number += 0 if rollout.hints else len(rollout.chain.segments)", "number += 0"),
        (
            "predictions(hidden[index], teacher_hidden[row], hinted_context)",
            "predictions(hidden[row], teacher_hidden[row], hinted_context)",
        ),
    ),
    *of(
        "behaviour",
        ('todo.state in ("open", "started")', 'todo.state == "open"'),
        ("sum(call.valid and not call.ok for call in calls)", "sum(not call.ok for call in calls)"),
        (
            'and claims(message) and suite_state(transcript) != "passed"',
            'and claims(message) and suite_state(transcript) == "failed"',
        ),
        ("max(0.0, share - free_comments) / (1 - free_comments)", "share"),
        ("(rounds - 1) / (len(calls) - 1)", "rounds / len(calls)"),
        ("[call.wrote for call in calls if call.valid]) or 0.0", "[call.wrote for call in calls]) or 0.0"),
        ("0.0 - getattr(prices, name) * min(counts[name], cap)", "0.0 - getattr(prices, name) * counts[name]"),
        ("0.0 - getattr(prices, name) * min(counts[name], cap)", "getattr(prices, name) * min(counts[name], cap)"),
        ("return outcome - effort_cost + parts.total", "return outcome + effort_cost + parts.total"),
        ("float(bool(message) and claims(message)", "float(claims(message)"),
        ("measures(transcript, prices.free_comments, claims)", "measures(transcript, claims=claims)"),
        (
            "relative = [rollout.parts[name] - first for rollout in group]",
            "relative = [rollout.parts[name] for rollout in group]",
        ),
        ("advantages[name] = [value - mean for value in relative]", "advantages[name] = relative"),
    ),
    *of(
        "transcript",
        ('return last.text.strip() if last and not last.calls else ""', 'return last.text.strip() if last else ""'),
        ('if turn.role == "assistant"), None)', "if turn.text), None)"),
        ('state = "passed" if passed == run > 0 else "failed"', 'state = "passed" if passed == run else "failed"'),
        ('elif call.writes and state == "passed":', "elif call.writes:"),
        ("return bool(self.wrote) and self.valid and self.ok", "return bool(self.wrote)"),
        ("and not DENIAL.search(sentence) for", "for"),
        (
            "token.string if is_start and token.type == tokenize.STRING else None",
            "token.string if token.type == tokenize.STRING else None",
        ),
        ("list(python_comments(textwrap.dedent(code)))", "list(python_comments(code))"),
        test="ref/test_behaviour",
    ),
    *of(
        "monitor",
        (
            "np.logaddexp(evidence.log_wealth, -math.log(t * (t + 1))) + gains",
            "np.logaddexp(evidence.log_wealth, -math.log(t)) + gains",
        ),
        (
            "np.logaddexp(evidence.log_wealth, -math.log(t * (t + 1))) + gains",
            "np.logaddexp(evidence.log_wealth + gains, -math.log(t * (t + 1)))",
        ),
        ("- math.log(2 * len(STAKES))", "- math.log(len(STAKES))"),
        ("np.asarray(np.logaddexp(wealth, -math.log(evidence.step + 1)))", "np.asarray(wealth)"),
        ("np.asarray(np.logaddexp(wealth, -math.log(evidence.step + 1)))", "np.asarray(np.logaddexp(wealth, 0.0))"),
        ("(values / band.high, (1 - values) / (1 - band.low))", "(values / band.low, (1 - values) / (1 - band.high))"),
        ("(values / band.high, (1 - values) / (1 - band.low))", "(values / band.high, (1 - values) / band.low)"),
        ("(odds[..., None, :] - 1)), nan=0.0)", "(odds[..., None, :] - 1)), nan=0.1)"),
        ("log_m >= math.log(len(self.bands) / self.error)", "log_m >= math.log(1 / self.error)"),
        ("log_m >= math.log(len(self.bands) / self.error)", "log_m >= len(self.bands) / self.error"),
        ("if name not in alarm_names and log_m", "if log_m"),
        ('"up" if up >= down else "down"', '"up"'),
        ("if wealth >= math.log(2 / error) else", "if wealth >= math.log(error / 2) else"),
        ("min(1.0, 1 - smallest_mean(1 - x) + tolerance)", "min(1.0, 1 - smallest_mean(1 - x))"),
        ("streak = streak + 1 if templates and templates[-1] == template else 1", "streak = streak + 1"),
        ("2 * broken_calls >= len(transcript.calls) and", ""),
        ("for p in shares) / math.log(len(set(tools)))", "for p in shares) / math.log(max(2, len(shares)))"),
        ("call.name if call.name in tools else None for call in calls", "call.name for call in calls"),
        ('rollout.final_message.endswith("?")', '"?" in rollout.final_message'),
        (
            "hacks = sum(any(signature.matches(rollout) for signature in signatures) for rollout in group)",
            "hacks = sum(signature.matches(rollout) for signature in signatures for rollout in group)",
        ),
        (
            'in turn.text for turn in transcript.turns if turn.role == "tool")',
            "in turn.text for turn in transcript.turns)",
        ),
        (
            '"comments": comment_share([call.wrote for call in calls if call.valid])',
            '"comments": comment_share([call.wrote for call in calls])',
        ),
    ),
    *of(
        "rl",
        ("(batch.keep * weights[batch.conversation]).reshape", "batch.keep.reshape"),
        ("budget=policy_budget,", "budget=budget,"),
        ("mean_log_ratio = all_reduce_sum(log_ratio_sums) / lengths", "mean_log_ratio = log_ratio_sums / lengths"),
        (
            "lengths, is_finished = all_reduce_sum(totals.to(device)).unbind()",
            "lengths, is_finished = totals.to(device).unbind()",
        ),
        room="scaled",
        test="mirror/test_rl::test_a_step_of_every_variant",
    ),
    *of(
        "textual_feedback",
        ("return total(ref.feedback_loss(student,", "return (ref.feedback_loss(student,"),
        ("teacher[hinted_sequence.teacher - 1].detach()", "teacher[hinted_sequence.teacher - 1]"),
        ("teacher_rows[teacher_rank[receive_ids].argsort(stable=True).argsort()]", "teacher_rows"),
        (
            "teacher_rows[teacher_rank[receive_ids].argsort(stable=True).argsort()]",
            "teacher_rows[teacher_rank[receive_ids].argsort(stable=True)]",
        ),
        ("send_ids[student_rank[send_ids].argsort(stable=True)]", "send_ids"),
        ("owners(positions - 1, len(states)", "owners(positions, len(states)"),
        ("torch.where(is_late, 2 * cp - 1 - chunk, chunk)", "torch.where(is_late, chunk - cp, chunk)"),
        ("(at // width * 2 + is_late) * size + at % size", "(at // width + is_late) * size + at % size"),
        (
            "hinted_tokens.student[mask] - first, hinted_tokens.teacher[mask])",
            "hinted_tokens.student[mask], hinted_tokens.teacher[mask])",
        ),
        (
            "hinted_tokens.student[mask] - first, hinted_tokens.teacher[mask])",
            "hinted_tokens.student[mask] - first, hinted_tokens.teacher[mask] - first)",
        ),
        ("segments[number].student.cpu() + int(starts[number])", "segments[number].student.cpu()"),
        ("= segments[number].tokens, number", "= segments[number].tokens, 0"),
        ("order = student.argsort()", "order = teacher.argsort()"),
        ("@torch.no_grad()\n", "\n"),
        ("return total(torch.stack([checkpoint", "return (torch.stack([checkpoint"),
        ("columns = (x[weight != 0].split(chunk)", "columns = (x.split(chunk)"),
        room="scaled",
        test="mirror/test_feedback",
    ),
    *of(
        "behaviour",
        ("[0] * len(group) if groups is None else groups", "[0] * len(group)"),
        ("if rank_group.size > 1:", "if False:"),
        ("if rank == rank_group.rank:", "if True:"),
        ("current().group(axis)", 'current().group("dp")'),
        room="scaled",
        test="mirror/test_feedback",
    ),
    *of(
        "monitor",
        ("device=current().device), axis).tolist()", 'device=current().device), "dp").tolist()'),
        ("call.name if call.name in names else None for call in calls", "call.name for call in calls"),
        ("[call.wrote for call in calls if call.valid]", "[call.wrote for call in calls]"),
        (
            "sum(min(1.0, rollout.tokens / longest) for rollout in group) if",
            "sum(rollout.tokens / longest for rollout in group) if",
        ),
        ('"length": length_sum / num_rollouts', '"length_sum": length_sum / num_calls'),
        ('"questions": questions / num_rollouts', '"questions": hacks / num_rollouts'),
        (
            "shares = [count / num_calls for count in tool_counts if count]",
            "shares = [count / sum(tool_counts[:-1]) for count in tool_counts if count]",
        ),
        room="scaled",
        test="mirror/test_feedback",
    ),
    *of(
        "watching",
        ("by_group[number // rollouts].append", "by_group[number % prompts].append"),
        ('watcher.longest, axis="all")', 'watcher.longest, axis="dp")'),
        ("keep_lines(journal, step)", "keep_lines(journal, step + 1)"),
        ("previous_steps = read_previous_steps(journal, step)", "previous_steps = read_previous_steps(journal, 0)"),
        ('{"step": step + 1, "groups": groups}', '{"step": step, "groups": groups}'),
        ("if group.size > 1:", "if False:"),
        ("for line in lines if is_first_rank else ():", "for line in ():"),
        ('and name != "alarm_at" and value != 0', "and value != 0"),
        room="scaled",
        test="mirror/test_watching",
    ),
    # The rooms on which money and trust depend: services, sandboxes, graders' tools, files.
    *of(
        "weight_sync",
        ("if self.version is None or version % self.anchor_every == 0:", "if version % self.anchor_every == 0:"),
        ('links.append(("delta", self.version,', 'links.append(("delta", version - 1,'),
        (
            "if version % self.merge_every == 0 and len(recent) == self.merge_every:",
            "if version % self.merge_every == 0:",
        ),
        ('links.append(("merged", recent[0][0],', 'links.append(("merged", recent[-1][0],'),
        (
            "if self.version is not None and version <= self.version:",
            "if self.version is not None and version < self.version:",
        ),
        ("for part_digest in digests), shapes, twice=False)", "for part_digest in digests), shapes)"),
        ("if want is None or want == have and newer_versions:", "if want is None:"),
        (
            "newer_versions = [version for version in errors if want is None or version > want]",
            "newer_versions = [*errors]",
        ),
        (
            "for version, manifest in self.manifests.items() if version in versions}",
            "for version, manifest in self.manifests.items()}",
        ),
        ("        if outage:", "        if False:"),
        ('key=lambda key: not key.endswith("/manifest")', 'key=lambda key: key.endswith("/manifest")'),
        (' and any(key.endswith("/manifest") for key in version_keys)', ""),
        ("with contextlib.suppress(OSError):  # unheard", "with contextlib.suppress(KeyError):  # unheard"),
        ("except (KeyError, OSError) as error:", "except KeyError as error:"),
        ("if last is not None and v < last]", "if last is not None and v <= last]"),
    ),
    *of(
        "weight_sync",
        ("words = np.flatnonzero(x != y)", "words = np.flatnonzero(x < y)"),
        (
            "positions = torch.cat((aligned_delta[0], aligned_size + tail_positions))",
            "positions = torch.cat((aligned_delta[0], tail_positions))",
        ),
        ("part.weights.detach().to(torch.bfloat16, copy=True)", "part.weights.detach().to(torch.bfloat16)"),
        ("            self.failure = error", "            pass"),
        ("failure, self.failure = self.failure, None", "failure = self.failure"),
        ("            outcome = [0, str(error)]", "            outcome = [0, None]"),
        ("sharding.slice_of(name, sharding.merged(model, name, p))", "sharding.slice_of(name, p)"),
        room="scaled",
        test="mirror/test_weight_sync",
    ),
    *of(
        "async_rl/wire",
        ("os.chmod(at, 0o600)", "os.chmod(at, 0o666)"),
        ("if len(frames) > 1 or not hmac", "if not hmac"),
        ("hmac.compare_digest(frames[0], self.token)", "self.token.startswith(frames[0])"),
        ("line.max_bytes = MAX_FRAME_BYTES", "pass"),
        ("if line.receive(WAIT) != [WELCOME]:", "if not line.receive(WAIT):"),
        ("            at.unlink(missing_ok=True)", "            pass"),
        (
            'if len(self.buffer) >= 4 and int.from_bytes(self.buffer[:4], "big") > self.max_bytes:',
            "if len(self.buffer) > self.max_bytes:",
        ),
        ("if frames or (frames := self._frames()):", "if frames:"),
        ("is_known = line not in self.strangers", "is_known = True"),
        ("                if is_known:", "                if True:"),
        ("del self.buffer[: 4 + size]", "del self.buffer[:size]"),
        ('return f"{self.host}:{self.number}"', 'return f"{self.host}:{self.number}:{self.token.decode()}"'),
        ("secrets.token_hex(16).encode()", 'b"0" * 32'),
        ("if len(data) > MAX_FRAME_BYTES:", "if len(data) > 2 * MAX_FRAME_BYTES:"),
        ("shutil.rmtree(folder, ignore_errors=True)", "pass"),
        (
            "            self.strangers.add(line := Line(with_keepalive(peer), max_bytes=len(self.token)))",
            "            line = Line(with_keepalive(peer))",
        ),
        room="scaled",
        test="mirror/test_wire",
    ),
    *of(
        "async_rl/messages",
        (
            'return type(value) is {"int": int, "str": str}[type_name]',
            'return isinstance(value, {"int": int, "str": str}[type_name])',
        ),
        (
            "all(type(element) is element_type for element in value)",
            "any(type(element) is element_type for element in value)",
        ),
        ("except (ValueError, KeyError, TypeError, AttributeError)", "except (ValueError, KeyError, TypeError)"),
        (
            "tuple(value) if isinstance(value, list) else value",
            "tuple(map(str, value)) if isinstance(value, list) else value",
        ),
        room="scaled",
        test="mirror/test_reconciler",
    ),
    *of(
        "async_rl/reconciler",
        ("if epoch < self.epochs.get(sender, 0):", "if False:"),
        ("self.epochs[name] += 1  # whatever", "pass  # whatever"),
        ("if self.losses[group] < self.tries:", "if self.losses[group] <= self.tries:"),
        ("return self.losses[group] >= self.tries - 1", "return self.losses[group] >= self.tries"),
        ("if time_now - worker.last_seen > self.timeout:", "if time_now - worker.last_seen > 2 * self.timeout:"),
        ("            self.workers[sender].last_seen = time_now", "            pass"),
        ("if message.version > self.published:", "if message.version >= self.published:"),
        (
            "worker.version < self.life.version - self.rules.staleness)",
            "worker.version < self.life.version - self.rules.staleness - 1)",
        ),
        ("        self.unclaimed -= owned_groups", "        pass"),
        ("if group not in worker.running:", "if group in self.records:"),
        ("            self.batch = None", "            pass"),
        ("is_repairing = time_now - self.repairs.get(message.version, -1e9) < self.timeout", "is_repairing = False"),
        ('if message.version == self.published and "trainer"', 'if message.version <= self.published and "trainer"'),
        ("self.holders = [None if holder == name else holder for holder in self.holders]", "pass"),
        (
            "player_candidates.append((len(worker.running) / worker.groups, name))",
            "player_candidates.append((len(worker.running), name))",
        ),
        ("places[group % self.rules.groups * len(places) // self.rules.groups]", "places[group % len(places)]"),
        ("if self.waits and self.published == self.life.version:", "if self.waits:"),
        ("self.published = self.life.version - 1", "self.published = self.life.version"),
        ("if self._suspect(group) and any(map(self._suspect, worker.running)):", "if False:"),
        ("if self.workers.keys() >= {*self.names, *self.spares}:", "if True:"),
        ("for event in self.life.journal[num_events:]:", "for event in ():"),
        ("g in self.unclaimed or g in self.queue or previous_worker is not None", "previous_worker is not None"),
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
        ("else path.name", "else str(path)"),
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
        ("_format_clock((self.stage.total - self.step)", "_format_clock(self.stage.total"),
        ('(1e4, "k")', '(1e3, "k")'),
        ("{value / (1e3 if letter == 'k' else limit):.1f}", "{value / limit:.1f}"),
        ("hours, minutes = divmod(total_seconds // 60, 60)", "hours, minutes = divmod(total_seconds, 60)"),
        ("self.first = (self.stage.start_time, step)", "self.first = (self.stage.start_time, 0)"),
        room="kit",
        test="cli/test_progress",
    ),
    *of(
        "egress/rules",
        ("    if url[3]:", "    if False:"),
        ('name.rpartition(".")[2].isdigit()', "name.isdigit()"),
        ("if method not in host.methods:", "if method not in METHODS:"),
        ('("content-length", "transfer-encoding", "upgrade", "expect")', '("content-length", "upgrade", "expect")'),
        (
            '("content-length", "transfer-encoding", "upgrade", "expect")',
            '("content-length", "transfer-encoding", "upgrade")',
        ),
        ("if field in rules.headers and len(value) <= VALUE}", "if field in rules.headers}"),
        ('        or "" in segments[:-1]', ""),
        (' or any(segment and not segment.strip(".") for segment in segments)', ""),
        ('urllib.parse.unquote(text, "latin-1")', "text"),
        ("if name not in rules.headers][:20]", "][:20]"),
        ("url[1].lower(), url[2]", "url[1], url[2]"),
        room="environments",
        test="environments/test_door",
    ),
    *of(
        "egress/upstream",
        ("path.is_file() and not path.is_symlink()", "path.is_file()"),
        ("(not ip.is_global or ip.is_multicast)", "not ip.is_global"),
        ("addresses(name, port, host.private or is_number(name))", "addresses(name, port, True)"),
        (
            "socket.create_connection((address, self.port), self.timeout)",
            "socket.create_connection((self.host, self.port), self.timeout)",
        ),
        ("and expected is not None and body.size != expected:", "and False:"),
        ('page.replace(f"{server}/".encode(), f"{name}/".encode())', "page.replace(server.encode(), name.encode())"),
        ("return name + target.path", "return location"),
        ("self.size > self.max_bytes:", "self.size > 2 * self.max_bytes:"),
        ('{host.upstream.lower(): f"http://{name}"', '{host.upstream.lower(): f"https://{name}"'),
        ('if response.headers.get("content-encoding", "identity") != "identity":', "if False:"),
        ('return re.sub(r"[-_.]+", "-", name).lower()', 'return re.sub(r"[-_.]+", "-", name)'),
        room="environments",
        test="environments/test_door",
    ),
    *of(
        "egress/door",
        (
            "is_exhausted = self.requests > self.rules.requests",
            "is_exhausted = self.requests > self.rules.requests + 1",
        ),
        ("            self.bytes += answer.size", "            pass"),
        ("if len(data) > HEAD:", "if len(data) > 9 * HEAD:"),
        ("min(self.rules.largest, remaining)", "self.rules.largest"),
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
        ('if parent is None or parent.kind != "dir":', "if parent is None:"),
        ("        if path in new:", "        if False:"),
        ('path.startswith(tops[-1] + "/")', "path.startswith(tops[-1])"),
        ("if path in before and before[path].kind != after[path].kind]", "if False]"),
        ('"file": 0o400, "dir": 0o500', '"file": 0o400, "dir": 0o400'),
        ("for path, e in sorted(manifest.items())]", "for path, e in manifest.items()]"),
        ("mode, flags = stat.S_IMODE(status.st_mode) & 0o777,", "mode, flags = stat.S_IMODE(status.st_mode),"),
        room="environments",
        test="environments/test_manifest",
    ),
    *of(
        "sandbox/store",
        ("        if hashlib.sha256(data).hexdigest() != entry.value:", "        if False:"),
        ("            if hashlib.sha256(data).hexdigest() != snapshot:", "            if False:"),
        ("            if actual != manifest:", "            if actual.keys() != manifest.keys():"),
        ("if remaining or digest.hexdigest() != value:", "if remaining:"),
        ("not in used_contents and path.stat().st_mtime < since:", "not in used_contents:"),
        ("            (folder / name).chmod(stat.S_IRWXU)", "            pass"),
        ("            self._touch(name)", "            pass"),
        ("            self._touch(snapshot)", "            pass"),
        (
            "if not self._list_path(path.name).exists() and path.stat().st_ctime < since:",
            "if path.stat().st_ctime < since:",
        ),
        ("                target.chmod(entry.mode)", "                pass"),
        (
            "fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)",
            "fcntl.flock(self._handle, fcntl.LOCK_SH | fcntl.LOCK_NB)",
        ),
        ('if entry.kind == "file" and not self.has(entry.value):', "if False:"),
        room="environments",
        test="environments/test_store",
    ),
    *of(
        "sandbox/cache",
        ("if not path.stat().st_mode & 0o001:", "if False:"),
        ("        folder.chmod(0o755)", "        pass"),
        ("if os.path.isabs(home):", "if home:"),
        room="environments",
        test="environments/test_store",
    ),
    *of(
        "sandbox/wire",
        ("if not isinstance(message, dict) or self.buffer:", "if not isinstance(message, dict):"),
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
        ('return " ".join(visible(text).split())[:max_characters]', 'return " ".join(visible(text).split())'),
        room="environments",
        test="environments/test_visible",
    ),
    *of(
        "sandbox/seccomp",
        (
            'FAMILIES = {1: "AF_UNIX", 2: "AF_INET", 10: "AF_INET6"}',
            'FAMILIES = {1: "AF_UNIX", 2: "AF_INET", 10: "AF_INET6", 40: "AF_VSOCK"}',
        ),
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
        (
            "self.tokens, self.turns = self.tokens + token_count, self.turns + 1",
            "self.tokens, self.turns = token_count, self.turns + 1",
        ),
        ("if self.tokens >= b.tokens:", "if self.tokens > b.tokens:"),
        ('self.budget = Budget(**begin["budget"])', 'Budget(**begin["budget"])'),
        ('if begin.get("who", "") != job.policy_name:', "if False:"),
        room="environments",
        test="environments/test_episode",
    ),
    *of(
        "harness/workspace",
        ("            if self.over:", "            if False:"),
        ("if number >= CALLS:", "if number > CALLS:"),
        ("text = cut(observation.text, SAYS)", "text = observation.text"),
        ("if len(old_lines) * len(new_lines) > MAX_LINE_PAIRS:", "if False:"),
        ("min(self.call_seconds, left)", "self.call_seconds"),
        ("            self.close()\n", "            pass\n"),
        room="environments",
        test="environments/test_episode",
    ),
    *of(
        "harness/record",
        ('if not answer.get("broken"):', "if True:"),
        ('while lines and lines[-1].get("kind") not in ENDS:', "while False:"),
        ('            history = [Message("user", f"You have', '            history += [Message("user", f"You have'),
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
    *of(
        "fingerprint",
        ("while at - places[first][0] > span:", "while False:"),
        room="environments",
        test="environments/test_leaks",
    ),
    *of(
        "install/attempt",
        ("if outcome.step.needed)", ")"),
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
        ("before.get(step_outcome.step.check, True)", "before.get(step_outcome.step.check, False)"),
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
        ("steps_by_key.setdefault(step.command or", "steps_by_key.setdefault(step.check or"),
        ("if max(len(command), len(check)) > CHARACTERS", "if len(command) > CHARACTERS"),
        ("if not command.strip() and not check.strip():", "if not command.strip():"),
        room="environments",
        test="environments/test_install_readers",
    ),
    *of(
        "sandbox/inside/tree",
        ('if not real_path.startswith(room.root + "/") and', "if not real_path.startswith(room.root) and"),
        ("real_path = os.path.join(resolve_path(folder), name)", "real_path = resolve_path(joined)"),
        ("    if os.path.lexists(real_path) and not stat.S_ISREG(os.lstat(real_path).st_mode):", "    if False:"),
        ("if entry.is_dir(follow_symlinks=False)]", "if entry.is_dir()]"),
        room="environments",
        test="environments/test_tools",
    ),
    *of(
        "sandbox/inside/search",
        ('expression, i = expression + "(?:[^/]+/)*", i + 3', 'expression, i = expression + ".*", i + 3'),
        ('"[^/]*" if words[i] == "*" else "[^/]"', '".*" if words[i] == "*" else "[^/]"'),
        ('return None if b"\\0" in head else', "return"),
        ("    file.seek(len(mark))", "    pass"),
        (
            "            block = file.readline(LONGEST)",
            "            block, number = file.readline(LONGEST), number + 1",
        ),
        room="environments",
        test="environments/test_tools",
    ),
    *of(
        "sandbox/inside/files",
        ("if times == 0 or (times > 1 and not every):", "if times == 0:"),
        ("        shutil.rmtree(real_path)", "        os.rmdir(real_path)"),
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
        ('if hashlib.sha256(data).hexdigest() == manifest["digest"]:', "if True:"),
        ("        if Path(key).name != key:", "        if False:"),
        ("return isinstance(error, OSError) and error.errno in NO_ROOM", "return isinstance(error, OSError)"),
        ('if "another writer" in str(error):', "if False:"),
        ('self.store.pop(f"{version:08d}/manifest", None)', "pass"),
        ("            if time.monotonic() - start_time > patience:", "            if False:"),
        ('"oldest": float(version - int(own.min()))', '"oldest": float(version - int(own.max()))'),
        ("part.weights.detach().to(torch.bfloat16, copy=True)", "part.weights.detach()"),
        ("            errand, self.errand = self.errand, None", "            errand = self.errand"),
        ("                raise errand.error", "                pass"),
        ("            self.errand.done.wait()", "            pass"),
        ("self.visible = -1", "self.visible = 0"),
        ("                self.writer = self.sync.Writer(self.store)", "                pass"),
        ("*(s.version[s.sampled] for p", "*(s.version for p"),
        ("for p in rollouts if not p.failure for s", "for p in rollouts for s"),
        ("[*compress(numbers, is_watched)], [*compress(rollouts, is_watched)]", "[*numbers], [*rollouts]"),
        room="scaled",
        test="mirror/test_services",
    ),
    *of(
        "async_rl/worker",
        ("self.first = self.first if self.failures else time_now", "self.first = self.first or time_now"),
        ("        self.failures, self.next = 0, 0.0", "        self.next = 0.0"),
        ("        self.next = time_now + pause(self.failures)", "        pass"),
        (
            "if no_room(error) or not isinstance(error, (OSError, weight_sync.SyncError)):",
            "if not isinstance(error, (OSError, weight_sync.SyncError)):",
        ),
        (
            "        if time_now - self.first > self.max_seconds:",
            "        if time_now - self.first > 2 * self.max_seconds:",
        ),
        ("                del self.storing[group]", "                pass"),
        ("(group, entry.done)][-MOST_DONE:])", "(group, entry.done)])"),
        (
            "                    error, entry.errand = entry.errand.error, None",
            "                    error = entry.errand.error",
        ),
        ("            self.tries.record_failure(error)", "            pass"),
        ("        return {**self.since, **versions}", "        return {**versions, **self.since}"),
        (
            "            for groups_of_kind in (self.since, self.storing, self.done):",
            "            for groups_of_kind in (self.since, self.storing):",
        ),
        room="scaled",
        test="mirror/test_services",
    ),
    *of(
        "async_rl/worker",
        (
            "            if self.wanted_version > self.served_version and self.tries.is_due:",
            "            if self.wanted_version > self.served_version:",
        ),
        ("        self.errand = None\n", "        pass\n"),
        room="scaled",
        test="mirror/test_services",
    ),
    *of(
        "async_rl/background",
        ("            self.error = error", "            pass"),
        ("        self.errands.put(errand)", "        threading.Thread(target=errand.run).start()"),
        room="scaled",
        test="mirror/test_services",
    ),
    *of(
        "async_rl/records",
        ("(n, len(s.tokens), s.finished) for n, chain", "(n, len(s.tokens), chain.finished) for n, chain"),
        (
            "for name in terms] for rollout in rollouts], dtype=torch.float64",
            "for name in terms] for rollout in rollouts], dtype=torch.float32",
        ),
        ("int(s.version[s.sampled].min())", "int(s.version.min())"),
        (".to(torch.int16)", ".to(torch.int8)"),
        ("[(chain.finished, chain.saved) for chain", "[(chain.finished, 0) for chain"),
        ("    if any(rollout.hints for rollout in rollouts):", "    if all(rollout.hints for rollout in rollouts):"),
        (
            "    if any(rollout.transcript for rollout in rollouts):",
            "    if all(rollout.transcript for rollout in rollouts):",
        ),
        (
            "return Hint(int(at), tuple(int(token) for token in tokens), int(begin),",
            "return Hint(int(at), (), int(begin),",
        ),
        ('Call(**{**fields, "tests": None if', 'Call(**{**fields, "ok": True, "tests": None if'),
        room="scaled",
        test="mirror/test_services",
    ),
    *of(
        "weight_codec",
        ("if bool((positions[1:] <= positions[:-1]).any()):", "if bool((positions[1:] < positions[:-1]).any()):"),
        ("int(positions[-1]) < old.numel():", "int(positions[-1]) <= old.numel():"),
        ("if len(stream) != len(open_indices) or byte_number > 8:", "if byte_number > 8:"),
        ("step_streams = varint((distances << 1) ^ (distances >> 63))", "step_streams = varint(distances << 1)"),
        ('if kind != "full" or not count == size == len(high) == len(low):', 'if kind != "full":'),
    ),
]


def wrapped(text: str) -> re.Pattern[str]:
    """Finds a piece of code, on one line or wrapped as the formatter wraps it: behind an opening bracket, before a
    closing one, where a space is."""
    indent, body = re.fullmatch(r"(\s*)(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    end = "\n" if body.endswith("\n") else ""
    parts = [
        re.escape(part) if part.strip() else r"\s+"
        for part in re.split(r"(\s+|[()\[\]{}])", body.removesuffix("\n"))
        if part
    ]
    opened = {re.escape(bracket): re.escape(bracket) + r"\s*" for bracket in "([{"}
    closed = {re.escape(bracket): r"(?:,?\s*)" + re.escape(bracket) for bracket in ")]}"}
    return re.compile(re.escape(indent) + "".join((opened | closed).get(part, part) for part in parts) + end)


def mutated(mutant: Mutant, source: str) -> str:
    """The file with the mistake. ValueError where the original line is not there, or more than once."""
    matches = [*wrapped(mutant.old).finditer(source)]
    if len(matches) != 1:
        raise ValueError(f"{mutant}: the original is found {len(matches)} times, not once")
    return source[: matches[0].start()] + mutant.new + source[matches[0].end() :]


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
        content = {
            m.test: hashlib.sha256((tree / m.test.partition("::")[0]).read_bytes()).hexdigest()[:12] for m in chosen
        }
        plain = [Job(test, f"{test} {content[test]}") for test in sorted(content)]
        prepare()
        run(plain, tree, slots, known)
        if broken := [job for job in plain if known.found[job.key]["end"] != "passed"]:
            print("\n".join(f"{job.test} fails without any mutation: {known.found[job.key]['said']}" for job in broken))
            return 1
        facts = {job.test: known.found[job.key] for job in plain}
        limit = {test: 30 + PATIENCE * fact["processor"] for test, fact in facts.items()}
        jobs = [
            Job(m.test, f"{m} | {m.test} {content[m.test]}", m, limit[m.test], facts[m.test]["slow"]) for m in chosen
        ]
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
                wrong.append(
                    f"KILLED   {mutant}\n         though it is said to be the same: {mutant.same}\n    "
                    f"     {record['said']}"
                )
        elif record["end"] == "passed" and mutant.same:
            same.append(f"same     {mutant}\n         {mutant.same}")
        else:
            wrong.append(
                f"{'SURVIVED' if record['end'] == 'passed' else 'BROKEN  '} {mutant}\n         "
                f"{mutant.test} {record['said']}"
            )
    print("\n".join([*same, *wrong]))
    files = len({mutant.file for mutant, _ in found})
    print(
        f"{len(found)} mutants of {files} files: {killed} killed, {len(same)} the same as the "
        f"original, {len(wrong)} wrong"
    )
    return 1 if wrong else 0


def copied(folder: Path) -> Path:
    """A copy of the tree: what is run, without what running leaves."""
    shutil.copytree(
        ROOT, folder, ignore=shutil.ignore_patterns(".*", "runs", "__pycache__", "*.egg-info", "notebooks", "*.png")
    )
    return folder


def prepare() -> None:
    """Imports what forks share, and nothing that tests look at; with one thread, since threads do not survive a
    fork."""
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
    quick = [
        phase for phase in hypothesis.Phase if phase.name in ("explicit", "generate")
    ]  # a failure need not be made small
    same = {
        "derandomize": True,
        "database": None,
        "deadline": None,
        "suppress_health_check": list(hypothesis.HealthCheck),
    }
    hypothesis.settings.register_profile("mutants", phases=quick, **same)
    hypothesis.settings.load_profile("mutants")


def run(jobs: list[Job], tree: Path, slots: list[Path], known: Journal) -> None:
    """Every job that is not known yet, as many at a time as there are slots, which are like `tree` but for a job's
    mutation."""
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
            said = (
                f"{job.limit:.0f} s of work and no end"
                if end == "endless"
                else (slots[job.slot] / "said").read_text(encoding="utf-8")
            )
            if job.mutant:
                shutil.copyfile(tree / job.mutant.file, slots[job.slot] / job.mutant.file)
            free.append(job.slot)
            slow = (
                {}
                if job.mutant or end != "passed"
                else {"slow": json.loads((slots[job.slot] / "slow").read_text(encoding="utf-8"))}
            )
            known.add(key=job.key, end=end, said=said[:500], seconds=seconds, processor=round(worked, 1), **slow)
            tell = {"passed": "lives" if job.mutant else "passes", "failed": "killed" if job.mutant else "fails"}.get(
                end, end
            )
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
    """In the fork: pytest's exit code. The first test that failed, and its message, are written into the file
    `said`."""
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
                said.write_text(
                    f"cannot be collected: {' '.join(str(report.longrepr).split())[-400:]}", encoding="utf-8"
                )

        def pytest_collection_finish(self):
            room = (job.mutant.file if job.mutant else "ref").partition("/")[0]
            if not Path(str(importlib.import_module(room).__file__)).is_relative_to(folder):
                raise RuntimeError(f"{room} is not the copy")

    where = ["--rootdir", str(folder), "-c", str(folder / "pyproject.toml")]
    return int(pytest.main(["-x", "-p", "no:cacheprovider", *where, str(folder / job.test)], [First()]))


if __name__ == "__main__":
    sys.exit(main())
