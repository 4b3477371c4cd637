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

from ref.model import Block, Config, KVCache, Output, RMSNorm, Transformer, attention_mask, initialise, rope_table

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
    seconds: float = 0.0
    """Wall-clock time, prefill included."""

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
        decoder.feed(prompt)                      given tokens: a prompt, an observation
        turn = decoder.generate(stop, max_new=64) list of new tokens, the stop token included
        decoder.total                             a Generation that sums all turns since the last reset()
    """

    def __init__(
        self,
        model: Transformer,
        mtp: MTP | None = None,
        *,
        max_len: int = 512,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
        draft_len: int | None = None,
    ):
        depth = 0 if mtp is None else mtp.mtp.depth if draft_len is None else draft_len
        if mtp is not None and not 1 <= depth <= mtp.mtp.depth:
            raise ValueError(f"draft_len must lie between 1 and {mtp.mtp.depth}, got {draft_len}")
        self.model, self.mtp, self.depth, self.max_len = model, mtp, depth, max_len
        self.temperature, self.generator = temperature, generator
        dtype = model.embed_tokens.weight.dtype
        self.cache = KVCache(model.config, 1, max_len, dtype)
        self.mtp_cache = None if mtp is None else KVCache(mtp.config, 1, max_len, dtype, depth)
        self.prenorm = torch.zeros(1, max_len, model.config.hidden_size, dtype=dtype)
        self.reset()

    def reset(self) -> None:
        """Forget the context and the counts."""
        self.tokens: list[int] = []
        self.cache.truncate(0)
        self.settled = 0  # positions at which every MTP layer saw only tokens that stand
        self.total = Generation(drafted=[0] * self.depth, accepted=[0] * self.depth)

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
        end = min(self.max_len, begin + (self.max_len if max_new is None else max_new))
        draft, q = [], None
        while len(self.tokens) < end:
            known = len(self.tokens)
            logits = self.trunk(draft)
            taken, token = self.verify(logits, draft, q)
            new = [*draft[:taken], token]
            if stop in new:
                new = new[: new.index(stop) + 1]
            self.tokens += new
            self.cache.truncate(len(self.tokens) - 1)
            stood = min(taken, len(new))
            # Layer k saw, at the last positions, the drafts before its own: where they fell it runs again.
            if draft and len(draft) == self.depth:
                self.settled = max(0, known - 1 - max(0, self.depth - 1 - stood))
            for k in range(len(draft)):
                self.total.drafted[k] += 1
                self.total.accepted[k] += k < stood
            self.total.cycles += 1
            if new[-1] == stop:
                break
            room = min(self.depth, end - len(self.tokens) - 1)
            draft, q = self.guess(room) if room > 0 else ([], None)
        new = self.tokens[begin:]
        self.total.tokens += new
        self.total.seconds += time.perf_counter() - started
        return new

    def trunk(self, draft: list[int]) -> Tensor:
        """Run what the trunk has not seen and the drafts; logits from the last known token on."""
        start = self.cache.length
        out = self.model(torch.tensor([self.tokens[start:] + draft]), cache=self.cache, logits=False)
        self.prenorm[:, start : self.cache.length] = out.prenorm
        return self.model.head(out.hidden[0, len(self.tokens) - 1 - start :])

    def guess(self, n: int) -> tuple[list[int], Tensor | None]:
        """n drafts, and the distributions they were drawn from (None when greedy)."""
        start, end = self.settled, len(self.tokens) - 1
        self.mtp_cache.truncate(start)
        rope = rope_table(self.mtp.config, torch.arange(start, end), self.prenorm.dtype)
        mask = attention_mask(self.mtp.config, end - start, start, None, self.prenorm)
        x, draft, qs = self.prenorm[:, start:end], [], []
        for k, layer in enumerate(self.mtp.layers[:n], 1):
            ids = torch.tensor([(self.tokens + draft)[start + k : end + k]])
            x = layer(x, self.model.embed_tokens(ids), rope, mask, self.mtp_cache, k - 1)
            logits = self.model.head(layer.norm(x[0, -1:]))
            if self.temperature:
                qs.append((logits[0].float() / self.temperature).softmax(-1))
                draft.append(invert(qs[-1], torch.rand((), generator=self.generator, dtype=torch.float64).item()))
            else:
                draft.append(int(logits.argmax(-1)))
        if n == self.depth:
            self.mtp_cache.length = end
        return draft, torch.stack(qs) if qs else None

    def verify(self, logits: Tensor, draft: list[int], q: Tensor | None) -> tuple[int, int]:
        """(drafts that stand, the token after them)."""
        if self.temperature:
            p = (logits.float() / self.temperature).softmax(-1)
            u = torch.rand(len(draft) + 1, generator=self.generator, dtype=torch.float64).tolist()
            return accept(p, q if draft else p[:0], draft, u)
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
