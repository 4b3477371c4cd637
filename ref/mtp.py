"""Multi-token prediction by self-distillation, and speculative decoding with it.

Composer 2 report (arXiv:2603.24477v2) §3.1: layers that guess the tokens after the next are trained from scratch on the same data,
to match the *exact distribution* of the main head at each position instead of the next token's id. The layers are those of
DeepSeek-V3 (arXiv:2412.19437, §2.2):

    h^k_i = Block_k( W_k · [RMSNorm(h^{k-1}_i); RMSNorm(Emb(t_{i+k}))] ),        k = 1..D,  h^0 = the trunk before its final norm
    P^k_{i+k+1} = softmax(Head(RMSNorm_k(h^k_i)))                                guess of token i+k+1

Speculative decoding (arXiv:2211.17192) turns the guesses into speed without changing what comes out.

Where this file departs from the papers:
1. The layers are dense, whatever the trunk is: a draft must be cheap.
2. Embedding and head belong to the trunk. While the layers are distilled atop a frozen checkpoint nothing reaches the trunk; in joint
   training `detach_trunk=False` lets gradients through hidden states, embedding and head. The teacher is never differentiated.
3. The sum over depths is a plain mean; DeepSeek-V3's factor λ is the caller's.
4. A draft is a chain of D tokens, no tree.
5. Batch 1. Every cycle runs layer k once over all rows whose inputs became known or changed.

| paper | here | shape |
|---|---|---|
| h^k_i | `x` after layer k | B T D |
| W_k | `eh_proj` | D 2D |
| p(x), target distribution | `p` | d+1 V |
| q(x), draft distribution | `q` | d V |
| γ, guesses a cycle | `draft_len` | – |
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd import Function

from ref.model import Block, Config, Output, RMSNorm, Transformer, attention_mask, initialise, rope_table
from ref.model_decode import Stack, copied, unit

__all__ = ["MTP", "Decoder", "Generation", "MTPConfig", "accept", "mtp_loss", "plain_generate", "speculative_generate"]


@dataclass(frozen=True)
class MTPConfig:
    """Shape of the multi-token-prediction layers."""

    depth: int = 3
    """Layers, one for each token after the next (D)."""
    intermediate_size: int = 256
    """Width of the dense SwiGLU in each layer."""

    def __post_init__(self):
        if self.depth < 1:
            raise ValueError("depth must be at least 1")


class MTPLayer(nn.Module):
    """h^{k-1} and the embedding of token i+k → h^k."""

    def __init__(self, c: Config):
        super().__init__()
        self.hnorm, self.enorm = RMSNorm(c.hidden_size, c.rms_norm_eps), RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
        self.block = Block(c)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x, emb, rope, mask=None, cache=None, layer=0) -> Tensor:
        x = self.eh_proj(torch.cat((self.hnorm(x), self.enorm(emb)), -1))
        return self.block(x, rope, mask, cache, layer)[0]


class MTP(nn.Module):
    """D layers atop a trunk of shape `config`, whose embedding and head they use without owning them."""

    def __init__(self, config: Config, mtp: MTPConfig = MTPConfig()):
        super().__init__()
        self.mtp = mtp
        self.config = replace(config, num_experts=0, intermediate_size=mtp.intermediate_size, num_hidden_layers=mtp.depth)
        self.layers = nn.ModuleList(MTPLayer(self.config) for _ in range(mtp.depth))
        initialise(self, self.config)

    def forward(
        self, prenorm: Float[Tensor, "B T D"], emb: Float[Tensor, "B T D"], doc: Int[Tensor, "B T"] | None = None
    ) -> list[Float[Tensor, "B T D"]]:
        """Per depth k the final hidden states whose head gives the guess of token i+k+1. Positions i ≥ T−k have no token i+k:
        what stands there is meaningless, and nothing before it depends on it."""
        T = prenorm.shape[1]
        rope = rope_table(self.config, torch.arange(T, device=prenorm.device), prenorm.dtype)
        mask = attention_mask(self.config, T, 0, doc, prenorm)
        x, hidden = prenorm, []
        for k, layer in enumerate(self.layers, 1):
            x = layer(x, F.pad(emb[:, k:], (0, 0, 0, min(k, T))), rope, mask)
            hidden.append(layer.norm(x))
        return hidden


class HeadLoss(Function):
    """Cross-entropy against softmax(W h), forward and gradient in one pass over chunks: the N × V logits never exist at once.

    With the target's centroid m = E_p[W] a row's loss is logsumexp(W h) − m·h and its gradient E_q[W] − m, so a chunk needs p
    only where the head itself learns: dW = Σ w (q − p) hᵀ."""

    @staticmethod
    def forward(ctx, hidden, head, centroid, weight, target, chunk):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        hidden_learns, head_learns, *_ = ctx.needs_input_grad
        loss = torch.empty(len(hidden), dtype=wide, device=hidden.device)
        argmax = torch.empty(len(hidden), dtype=torch.long, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if hidden_learns else None
        d_head = torch.zeros_like(head, dtype=wide) if head_learns else None
        for start in range(0, len(hidden), chunk):
            at = slice(start, start + chunk)
            h, m, w = hidden[at], centroid[at], weight[at, None]
            q, lse, argmax[at] = softmax(F.linear(h, head), wide)
            loss[at] = lse - (m * h).sum(-1, dtype=wide)
            if head_learns:
                if target.is_floating_point():
                    q -= F.linear(target[at], head).softmax(-1, dtype=wide)
                else:
                    q.scatter_add_(1, target[at, None], -torch.ones_like(w))
                d_head += ((q * w).to(h.dtype).t() @ h).to(wide)
                if hidden_learns:
                    d_hidden[at] = (q.to(h.dtype) @ head) * w
            elif hidden_learns:
                d_hidden[at] = (q.to(h.dtype) @ head - m) * w
        ctx.save_for_backward(d_hidden, d_head)
        ctx.mark_non_differentiable(loss, argmax)
        return (loss * weight).sum(), loss, argmax

    @staticmethod
    def backward(ctx, g, *_):
        d_hidden, d_head = ctx.saved_tensors
        d_hidden = None if d_hidden is None else (g * d_hidden).to(d_hidden.dtype)
        return d_hidden, None if d_head is None else g * d_head, None, None, None, None


def softmax(logits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities, logsumexp and argmax over the last dimension; the logsumexp is read off the largest probability."""
    best, argmax = logits.max(-1)
    p = logits.softmax(-1, dtype=dtype)
    return p, best - p.gather(-1, argmax[..., None])[..., 0].log(), argmax


@torch.no_grad()
def teach(hidden: Float[Tensor, "N D"], head: Float[Tensor, "V D"], chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """The main head's distribution p at every row, as far as a student needs it: centroid E_p[W] [N, D], negative entropy
    Σ p log p [N] (nats) and argmax [N]."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    parts = []
    for h in hidden.split(chunk):
        p, lse, argmax = softmax(F.linear(h, head), wide)
        m = p.to(h.dtype) @ head
        parts.append((m, (m * h).sum(-1, dtype=wide) - lse, argmax))
    m, negentropy, argmax = (torch.cat(part) for part in zip(*parts, strict=True))
    return m, negentropy, argmax


def mtp_loss(
    mtp: MTP,
    model: Transformer,
    out: Output,
    ids: Int[Tensor, "B T"],
    doc: Int[Tensor, "B T"] | None = None,
    weight: Tensor | None = None,
    *,
    kind: str = "distill",
    detach_trunk: bool = True,
    share: float = 1.0,
    generator: torch.Generator | None = None,
    chunk: int = 1024,
) -> tuple[Float[Tensor, ""], float, dict[str, float]]:
    """(loss summed over positions and averaged over depths, positions averaged over depths, figures per depth).

    `out` is the trunk's forward pass on `ids`. "distill": KL(main head at i+k ‖ depth k at i), nats, the main head not
    differentiated; "hard": −log q(t_{i+k+1}). Both score position i at depth k where t_i .. t_{i+k+1} lie in one document, that is on
    the same positions. `weight` [B, T] scales the loss of the *predicted* token, as in `cpt.next_token_loss`. `detach_trunk=False` lets
    gradients reach the trunk through hidden states, embedding and head. `share` < 1 scores that share of the positions,
    drawn by `generator`; the layers still see all. Figures: `kl_k` or `nll_k` per position and `agree_k`, how often the guess is
    the target's most likely token. Divide the loss by a *global* count."""
    if kind not in ("distill", "hard"):
        raise ValueError(f"kind must be distill or hard, got {kind!r}")
    table = model.embed_tokens if model.config.tie_word_embeddings else model.lm_head
    prenorm, emb, head = out.prenorm, model.embed_tokens(ids), table.weight
    if detach_trunk:
        prenorm, emb, head = prenorm.detach(), emb.detach(), head.detach()
    doc = torch.zeros_like(ids) if doc is None else doc
    scored = (doc[:, 1:] == doc[:, :-1]) & (doc[:, 1:] >= 0)
    if share < 1:
        scored &= torch.rand(scored.shape, generator=generator) < share
    b, j = scored.nonzero(as_tuple=True)  # the main head predicts token j+1; depth k does so from position i = j − k
    wide = torch.promote_types(prenorm.dtype, torch.float32)
    w = torch.ones(len(b), dtype=wide) if weight is None else weight[b, j + 1].to(wide)
    if kind == "distill":
        target = out.hidden.detach()[b, j]
        centroid, negentropy, wanted = teach(target, head.detach(), chunk)
    else:
        target = wanted = ids[b, j + 1]
        centroid, negentropy = head.detach()[target], torch.zeros_like(w)
    total, count, figures = w.new_zeros(()), 0.0, {}
    for k, hidden in enumerate(mtp(prenorm, emb, doc), 1):
        at = ((j >= k) & (doc[b, (j - k).clamp(min=0)] == doc[b, j])).nonzero()[:, 0]
        rows = hidden[b[at], j[at] - k]
        loss, ce, guess = HeadLoss.apply(rows, head, centroid[at], w[at], target[at], chunk)
        total = total + loss + (negentropy[at] * w[at]).sum()
        kl, agree, n = torch.stack(
            ((ce + negentropy[at]) @ w[at], (guess == wanted[at]).to(wide) @ w[at], w[at].sum())
        ).tolist()
        figures[f"{'kl' if kind == 'distill' else 'nll'}_{k}"] = kl / max(n, 1e-9)
        figures[f"agree_{k}"] = agree / max(n, 1e-9)
        count += n
    return total / mtp.mtp.depth, count / mtp.mtp.depth, figures


def accept(
    p: Float[Tensor, "d1 V"], q: Float[Tensor, "d V"], draft: Sequence[int], u: Sequence[float]
) -> tuple[int, int]:
    """The accept/reject rule of arXiv:2211.17192: (drafts accepted, the token that follows them).

    p: distributions of the main head at the d drafts and one further; q: those the drafts were drawn from; u: d+1 uniform
    numbers in [0, 1). Draft x stands with probability min(1, p(x)/q(x)); at the first that falls the next token comes from
    norm(max(p − q, 0)), and if all stand from the last p: the result is distributed as p, whatever q."""
    for k, x in enumerate(draft):
        if u[k] * float(q[k, x]) >= float(p[k, x]):
            return k, invert((p[k] - q[k]).clamp_(min=0), u[-1])
    return len(draft), invert(p[len(draft)], u[-1])


def invert(mass: Float[Tensor, "V"], u: float) -> int:
    """The token at which the cumulative distribution of `mass` (not normalised) passes the share u of its total."""
    total = mass.double().cumsum(-1)
    token = int(torch.searchsorted(total, u * total[-1], right=True))
    return min(token, len(mass) - 1)


@dataclass
class Generation:
    """What was generated and what it took."""

    tokens: list[int] = field(default_factory=list)
    """Generated tokens, the stop token included if there was one."""
    cycles: int = 0
    """Passes of the trunk, each of which gave at least one token."""
    drafted: list[int] = field(default_factory=list)
    """Guesses offered at each depth."""
    accepted: list[int] = field(default_factory=list)
    """Guesses that stood, at each depth."""
    recalled: list[int] = field(default_factory=list)
    """Drafts offered at each place of a turn's first pass by `recall`."""
    recalled_accepted: list[int] = field(default_factory=list)
    """Those of them that stood."""
    seconds: float = 0.0
    """Wall-clock time, prefill included."""

    def __add__(self, other: "Generation") -> "Generation":
        """Both, one after the other."""
        sums = {}
        for name, mine in vars(self).items():
            theirs, counts = getattr(other, name), isinstance(mine, list) and name != "tokens"
            sums[name] = [a + b for a, b in zip(mine, theirs, strict=True)] if counts else mine + theirs
        return Generation(**sums)

    @property
    def tokens_per_cycle(self) -> float:
        return len(self.tokens) / max(self.cycles, 1)

    @property
    def acceptance(self) -> list[float]:
        """Share of the guesses at each depth that stood (a guess falls with every guess before it)."""
        return [a / max(d, 1) for a, d in zip(self.accepted, self.drafted, strict=True)]


class Decoder:
    """One context, decoded at batch 1 with a KV cache; speculatively where `mtp` is given.

        decoder = Decoder(model, mtp, max_len=256)
        decoder.feed(prompt)                        given tokens: a prompt, an observation
        turn = decoder.generate(stop, max_new=64)   new tokens, the stop token included
        decoder.total                               a Generation that sums all turns since the last reset()

    The weights are copied, in `dtype`, when it is made: after an optimiser step make a new one."""

    def __init__(
        self,
        model: Transformer,
        mtp: MTP | None = None,
        *,
        max_len: int = 512,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
        draft_len: int | None = None,
        recall: int = 0,
        dtype: torch.dtype = torch.float32,
    ):
        """`draft_len`: MTP layers used (all). `recall`: drafts of a turn's first pass, where the layers have no hidden state to start from
        yet: the first tokens of the turn that last followed the same one to four tokens, in this decoder's life (0: none)."""
        depth = 0 if mtp is None else mtp.mtp.depth if draft_len is None else draft_len
        if mtp is not None and not 1 <= depth <= mtp.mtp.depth:
            raise ValueError(f"draft_len must lie between 1 and {mtp.mtp.depth}, got {draft_len}")
        self.depth, self.max_len, self.temperature, self.generator = depth, max_len, temperature, generator
        self.recall, self.turns = recall, {}
        table = model.embed_tokens if model.config.tie_word_embeddings else model.lm_head
        with torch.no_grad():
            self.trunk = Stack(model.config, list(model.layers), max_len, dtype)
            self.eps = self.trunk.eps
            self.embedding, self.norm = copied(model.embed_tokens.weight, dtype), copied(model.norm.weight, dtype)
            self.head = copied(table.weight.t(), dtype)
            layers = list(mtp.layers[:depth]) if mtp is not None else []
            self.drafter = Stack(mtp.config, [layer.block for layer in layers], max_len, dtype) if layers else None
            # W·[h; e] is one product for h; the other half is known for every token of the vocabulary.
            self.entrances = []
            for layer in layers:
                of_h, of_e = layer.eh_proj.weight.to(dtype).chunk(2, 1)
                tokens = unit(self.embedding, self.eps) * layer.enorm.weight.to(dtype) @ of_e.t()
                entrance = copied((of_h * layer.hnorm.weight.to(dtype)).t(), dtype)
                self.entrances.append((entrance, tokens, copied(layer.norm.weight, dtype)))
        self.prenorm = torch.zeros(max_len, model.config.hidden_size, dtype=dtype, device=self.embedding.device)
        self.reset()

    def reset(self) -> None:
        """Forget the context and the counts."""
        self.tokens: list[int] = []
        self.seen = 0  # positions the trunk has run, all on tokens that stand
        self.settled = 0  # positions at which every MTP layer has
        zeros = [[0] * n for n in (self.depth, self.depth, self.recall, self.recall)]
        self.total = Generation([], 0, *zeros)

    def feed(self, tokens: Sequence[int]) -> None:
        """Append given tokens; the next `generate` runs them in one pass. ValueError beyond max_len."""
        if len(self.tokens) + len(tokens) > self.max_len:
            raise ValueError(f"context of {len(self.tokens)} tokens and {len(tokens)} more exceed max_len {self.max_len}")
        self.tokens += tokens

    @torch.inference_mode()
    def generate(self, stop: int | None = None, max_new: int | None = None) -> list[int]:
        """Continue until `stop` (which is returned, and stays in the context), `max_new` tokens, or max_len."""
        if not self.tokens:
            raise ValueError("nothing to continue: feed at least one token")
        started, begin = time.perf_counter(), len(self.tokens)
        end = self.max_len if max_new is None else min(self.max_len, begin + max_new)
        contexts = [tuple(self.tokens[-n:]) for n in range(min(4, begin), 0, -1)]
        draft = next((self.turns[c] for c in contexts if c in self.turns), [])[: max(0, min(self.recall, end - begin - 1))]
        q, offered, stood = None, self.total.recalled, self.total.recalled_accepted
        while len(self.tokens) < end:
            known = len(self.tokens)
            taken, token = self.verify(self.run_trunk(draft), draft, q)
            new = [*draft[:taken], token]
            if stop in new:
                new = new[: new.index(stop) + 1]
            taken = min(taken, len(new))
            self.tokens += new
            self.seen = known + len(new) - 1
            self.total.cycles += 1
            for k in range(len(draft)):
                offered[k] += 1
                stood[k] += k < taken
            if offered is self.total.drafted and len(draft) == self.depth:
                # Near the end layer k saw the drafts before its own: of the last D−1 positions those where a draft fell are void.
                self.settled = max(0, known - 1 - max(0, self.depth - 1 - taken))
            if new[-1] == stop:
                break
            room = min(self.depth, end - len(self.tokens) - 1)
            draft, q = self.guess(room, stop) if room > 0 else ([], None)
            offered, stood = self.total.drafted, self.total.accepted
        new = self.tokens[begin:]
        if self.recall:
            self.turns.update((context, new) for context in contexts)
        self.total.tokens += new
        self.total.seconds += time.perf_counter() - started
        return new

    def run_trunk(self, draft: list[int]) -> Float[Tensor, "d1 V"]:
        """The tokens the trunk has not run, then the drafts, in one pass; logits from the last known token on."""
        start, known = self.seen, len(self.tokens)
        ids = torch.tensor(self.tokens[start:] + draft, device=self.embedding.device)
        x = self.trunk.run(F.embedding(ids, self.embedding), *self.trunk.frame(start, len(ids)))
        if self.depth:
            self.prenorm[start : start + len(x)] = x
        return torch.mm(unit(x[known - 1 - start :], self.eps) * self.norm, self.head)

    def guess(self, n: int, stop: int | None) -> tuple[list[int], Tensor | None]:
        """Up to n drafts, none behind `stop`, and the distributions [n, V] they were drawn from (None when greedy)."""
        start, end = self.settled, len(self.tokens) - 1
        ids, x, qs = self.tokens[start:], self.prenorm[start:end], []
        mask, blocks = self.drafter.frame(start, end - start)
        for k, (entrance, tokens, norm) in enumerate(self.entrances[:n], 1):
            at = torch.tensor(ids[k : k + end - start], device=x.device)
            x = torch.addmm(F.embedding(at, tokens), unit(x, self.eps), entrance)
            x = self.drafter.run(x, mask, blocks[k - 1 : k])
            logits = torch.mm(unit(x[-1:], self.eps) * norm, self.head)
            if self.temperature:
                qs.append((logits[0] / self.temperature).softmax(-1))
                ids.append(invert(qs[-1], torch.rand((), generator=self.generator, dtype=torch.float64).item()))
            else:
                ids.append(int(logits.argmax(-1)))
            if ids[-1] == stop:
                break
        return ids[end - start + 1 :], torch.stack(qs) if qs else None

    def verify(self, logits: Tensor, draft: list[int], q: Tensor | None) -> tuple[int, int]:
        """(drafts that stand, the token after them)."""
        if self.temperature:
            p = (logits / self.temperature).softmax(-1)
            u = torch.rand(len(draft) + 1, generator=self.generator, dtype=torch.float64).tolist()
            if q is None:  # recalled drafts are certain
                q = F.one_hot(torch.tensor(draft, dtype=torch.long, device=p.device), p.shape[-1]).to(p.dtype)
            return accept(p, q, draft, u)
        best = logits.argmax(-1).tolist()
        taken = next((k for k, x in enumerate(draft) if x != best[k]), len(draft))
        return taken, best[taken]


def speculative_generate(
    model: Transformer,
    mtp: MTP | None,
    prompt: Int[Tensor, "1 T"],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    draft_len: int | None = None,
    stop: int | None = None,
) -> Generation:
    """Continue a prompt with drafts by `mtp`, verified by `model`; same tokens (greedy) or same distribution (temperature > 0)
    as `plain_generate`."""
    max_len = prompt.shape[1] + max_new_tokens
    decoder = Decoder(model, mtp, max_len=max_len, temperature=temperature, generator=generator, draft_len=draft_len)
    decoder.feed(prompt[0].tolist())
    decoder.generate(stop, max_new_tokens)
    return decoder.total


def plain_generate(
    model: Transformer,
    prompt: Int[Tensor, "1 T"],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    stop: int | None = None,
) -> Generation:
    """The same decoder without drafts: one token a pass."""
    return speculative_generate(
        model, None, prompt, max_new_tokens, temperature=temperature, generator=generator, stop=stop
    )


@dataclass(frozen=True)
class Demo:
    """Learns generated code by the character, distils layers from it, and decodes with and without them."""

    steps: int = 240
    """Optimiser steps of the trunk (AdamW)."""
    mtp_steps: int = 160
    """Optimiser steps of the layers, atop the frozen trunk."""
    batch: int = 16
    """Rows a step."""
    length: int = 96
    """Characters a row."""
    lr: float = 4e-3
    """Learning rate of both; it falls linearly to zero."""
    mtp: MTPConfig = MTPConfig(depth=3, intermediate_size=128)
    """Shape of the layers."""
    prompts: int = 12
    """Contexts continued by each way of decoding, alternately."""
    new_tokens: int = 96
    """Characters continued."""
    temperature: float = 1.0
    """Of the sampled half; the other is greedy."""
    seed: int = 0
    """Seed of text, weights and sampling."""


def functions(generator: torch.Generator, length: int) -> Tensor:
    """`length` characters (code points below 128) of small Python functions, each used on the line that follows it."""
    text = ""
    while len(text) < length:
        a, b, name, op = (int(torch.randint(n, (), generator=generator)) for n in (10, 10, 6, 3))
        name, (sign, result) = "abcdef"[name] * 2, (("+", a + b), ("-", a - b), ("*", a * b))[op]
        text += f"def {name}(x):\\n    return x {sign} {b}\\nassert {name}({a}) == {result}\\n"
    return torch.tensor([ord(c) for c in text[:length]])


def demo(config: Demo = Demo(), log: Callable[..., None] = lambda *_, **__: None) -> dict[str, float]:
    """Acceptance by depth, tokens a pass and measured speed-up of speculative decoding, greedy and sampled."""
    generator = torch.Generator().manual_seed(config.seed)
    torch.manual_seed(config.seed)
    shape = Config(
        vocab_size=128, hidden_size=64, num_hidden_layers=4, head_dim=16, num_experts=4, moe_intermediate_size=64
    )
    model = Transformer(shape)
    mtp, figures, total = MTP(shape, config.mtp), {}, config.steps + config.mtp_steps
    for module, first, last in ((model, 0, config.steps), (mtp, config.steps, total)):
        optimizer = torch.optim.AdamW(module.parameters(), config.lr, betas=(0.9, 0.95))
        for step in range(first, last):
            optimizer.param_groups[0]["lr"] = config.lr * (last - step) / (last - first)
            ids = torch.stack([functions(generator, config.length) for _ in range(config.batch)])
            if module is model:
                out = model(ids, logits=False)
                loss = -model.logprob(out.hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).mean()
                figures["nll"] = loss.item()
            else:
                with torch.no_grad():
                    out = model(ids, logits=False)
                loss, count, stats = mtp_loss(mtp, model, out, ids)
                loss, figures = loss / count, figures | stats
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 9:
                log(step + 1, total, **figures)
    for name, temperature in (("greedy", 0.0), ("sampled", config.temperature)):
        runs: dict[str, Generation] = {}
        ways = {"plain": Decoder(model, temperature=temperature, generator=generator),
                "speculative": Decoder(model, mtp, temperature=temperature, generator=generator)}  # fmt: skip
        for _ in range(config.prompts):
            prompt = functions(generator, 40).tolist()
            for way, decoder in ways.items():
                decoder.reset()
                decoder.feed(prompt)
                decoder.generate(max_new=config.new_tokens)
                runs[way] = runs[way] + decoder.total if way in runs else decoder.total
        plain, fast = runs["plain"], runs["speculative"]
        if temperature == 0:
            figures["greedy_identical"] = float(plain.tokens == fast.tokens)
        figures |= {f"{name}_acceptance_{k}": share for k, share in enumerate(fast.acceptance, 1)}
        figures |= {
            f"{name}_tokens_per_pass": fast.tokens_per_cycle,
            f"{name}_plain_ms_per_token": 1e3 * plain.seconds / len(plain.tokens),
            f"{name}_speculative_ms_per_token": 1e3 * fast.seconds / len(fast.tokens),
            f"{name}_speed_up": plain.seconds / len(plain.tokens) / (fast.seconds / len(fast.tokens)),
        }
    return figures


if __name__ == "__main__":
    print(demo())
