"""Multi-token prediction by self-distillation: layers that predict the tokens after the next one, and the speed-up.

Papers: Composer 2 technical report (arXiv:2603.24477v2), §3.1; the layers are those of DeepSeek-V3
(arXiv:2412.19437, §2.2).

The layers are trained from scratch on the trunk's data. They learn to match the *exact distribution* of the main
head at each position instead of the next token's id: first on top of a checkpoint from the middle of continued
pretraining, then jointly with the model, through its long-context phase and SFT. With k = 1..K, h^0 the trunk
before its final norm:

    h^k_i     = Block_k( W_k · [RMSNorm(h^{k−1}_i); RMSNorm(Emb(t_{i+k}))] )                               (1)
    q^k_i     = softmax(Head(RMSNorm_k(h^k_i)))          the prediction of token i+k+1                     (2)
    L         = (1/K) Σ_k Σ_i w_{i+k+1} KL(p_{i+k} ‖ q^k_i)      p_j: the main head's prediction of j+1    (3)

Why distributions: a draft is kept if the main head agrees with it, so a draft has to match the main head, even
where the data surprises it. Speculative decoding turns drafts into speed and does not change the output:
`ref/engine/decoder.py`.

The traps
a. Depth k at i sees the tokens up to i+k and must never see i+k+1. Compare it with the main head at i+k, not
   at i.
b. N × V logits for each depth would take most of the memory of a step. Only the centroid of the target is needed:
   −Σ p log q = logsumexp(W h) − m·h with m = E_p[W], whose gradient in h is E_q[W] − m (`HeadLoss`).
c. The teacher is the trunk itself. A gradient through p would teach it to be easy to predict instead of right.
   So p is never differentiated, and unless `detach_trunk=False` no gradient reaches the trunk at all.

Where this file departs from the papers
1. The layers are dense, whatever the trunk is: a draft must be cheap.
2. Embedding and head belong to the trunk. §3.1 does not say whether the layers' loss reaches it in joint
   training. Both variants are here. `detach_trunk=True`, the default, is distillation on top of a checkpoint. It
   also covers joint training in which the trunk learns as it would without the layers. `detach_trunk=False` is
   the joint training of DeepSeek-V3: gradients reach the trunk through hidden states, embedding and head. The
   recipe uses the first (its setting `mtp.detach_trunk`), and `etude figure mtp` measures what the second does to
   trunk and drafts.
3. The sum over depths is a plain mean; DeepSeek-V3's factor λ is left to the caller.
4. A draft is a chain of K tokens, not a tree.
5. `share` and "hard" labels (DeepSeek-V3's own loss) are here for comparison.

Run it
    etude run mtp --scale small      under a minute; the same as: python -m ref.mtp
    etude figure mtp                 distributions against labels, and the speed-up of drafts; needs runs/small
    etude run mtp --scale full       scaled/mtp.py

Glossary
    symbol     variable            shape    where
    K          MTPConfig.depth     scalar   number of layers
    h^k_i      x after layer k     B T D    (1), D the width
    t          ids                 [B, T]   tokens; Emb(t) is `emb`
    W_k        eh_proj             D 2D     (1)
    p_{i+k}    target              N D      (3), as the hidden state that the head turns into p
    m          centroid            N D      E_p[W], W the head's matrix [V, D]
    Σ p log p  negentropy          N        added to a cross-entropy to give the KL, nats
    w          weight              [B, T]   weight of the predicted token in the loss
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd import Function

from ref.checks import expect, expect_text
from ref.engine.decoder import Decoder, Generation, accept
from ref.network import Config, Output, Transformer
from ref.network.fast import ROWS, Block, RMSNorm, attention_mask
from ref.network.model import initialise, rope_table

__all__ = ["MTP", "Decoder", "Generation", "MTPConfig", "accept", "mtp_loss", "plain_generate", "speculative_generate"]


@dataclass(frozen=True)
class MTPConfig:
    """Shape of the multi-token-prediction layers."""

    depth: int = 3
    """Number of layers K, one for each token after the next one."""
    intermediate_size: int = 256
    """Width of the dense SwiGLU in each layer."""

    def __post_init__(self):
        for name in ("depth", "intermediate_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1; got {value}")


class MTPLayer(nn.Module):
    """h^{k-1} and the embedding of token i+k → h^k."""

    Block = Block

    def __init__(self, c: Config):
        super().__init__()
        self.hnorm, self.enorm = (RMSNorm(c.hidden_size, c.rms_norm_eps), RMSNorm(c.hidden_size, c.rms_norm_eps))
        self.eh_proj = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
        self.block = self.Block(c)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x, emb, rope, mask=None, cache=None, layer=0) -> Tensor:
        # Eq. 1: W_k · [RMSNorm(h^{k−1}_i); RMSNorm(Emb(t_{i+k}))]
        x = self.eh_proj(torch.cat((self.hnorm(x), self.enorm(emb)), -1))
        return self.block(x, rope, mask, cache, layer)[0]  # Eq. 1: h^k_i = Block_k(…)


class MTP(nn.Module):
    """K layers on top of a trunk of shape `config`. They use the trunk's embedding and head but do not own them."""

    Layer = MTPLayer

    def __init__(self, config: Config, mtp: MTPConfig = MTPConfig()):
        super().__init__()
        self.mtp = mtp
        self.config = replace(
            config, num_experts=0, intermediate_size=mtp.intermediate_size, num_hidden_layers=mtp.depth
        )
        self.layers: Sequence[MTPLayer] = nn.ModuleList(  # pyright: ignore[reportAttributeAccessIssue]
            self.Layer(self.config) for _ in range(mtp.depth)
        )
        initialise(self, self.config)

    def forward(
        self, prenorm: Float[Tensor, "B T D"], emb: Float[Tensor, "B T D"], doc: Int[Tensor, "B T"] | None = None
    ) -> list[Float[Tensor, "B T D"]]:
        """For each depth k, the final hidden states that the head turns into the prediction of token i+k+1.
        Positions i ≥ T−k have no token i+k: their values are meaningless, and no earlier position depends on
        them. Raises ValueError for other shapes or dtypes."""
        expect("prenorm", prenorm, "float", "B", "T", self.config.hidden_size)
        expect("emb", emb, "float", *prenorm.shape)
        if doc is not None:
            expect("doc", doc, "int", *prenorm.shape[:2])
        T = prenorm.shape[1]
        rope = rope_table(self.config, torch.arange(T, device=prenorm.device), prenorm.dtype)
        mask = attention_mask(self.config, T, 0, doc, prenorm)
        x, hidden = prenorm, []
        for k, layer in enumerate(self.layers, 1):
            x = layer(x, F.pad(emb[:, k:], (0, 0, 0, min(k, T))), rope, mask)
            hidden.append(layer.norm(x))  # Eq. 2: RMSNorm_k(h^k_i)
        return hidden


class HeadLoss(Function):
    """Cross-entropy against softmax(W h), with loss and gradient computed in one pass over chunks, so the N × V
    logits never exist at once.

    With the target's centroid m = E_p[W], a row's loss is logsumexp(W h) − m·h and its gradient E_q[W] − m. A
    chunk therefore needs p only if the head itself is trained: dW = Σ w (q − p) hᵀ."""

    @staticmethod
    def forward(ctx, hidden, head, centroid, weight, target, chunk):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        hidden_learns, head_learns, *_ = ctx.needs_input_grad
        loss = torch.empty(len(hidden), dtype=wide, device=hidden.device)
        argmax = torch.empty(len(hidden), dtype=torch.long, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if hidden_learns else None
        d_head = torch.zeros_like(head, dtype=wide) if head_learns else None
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            h, m, w = hidden[rows], centroid[rows], weight[rows, None]
            q, lse, argmax[rows] = softmax(F.linear(h, head), wide)  # Eq. 2: q = softmax(W h)
            loss[rows] = lse - (m * h).sum(-1, dtype=wide)  # −Σ p log q = logsumexp(W h) − m·h
            if head_learns:
                if target.is_floating_point():
                    q -= F.linear(target[rows], head).softmax(-1, dtype=wide)  # q − p
                else:
                    q.scatter_add_(1, target[rows, None], -torch.ones_like(w))  # q − p, p one at the target
                d_head += ((q * w).to(h.dtype).t() @ h).to(wide)  # dW = Σ w (q − p) hᵀ
                if d_hidden is not None:
                    d_hidden[rows] = (q.to(h.dtype) @ head) * w  # dh = w (E_q[W] − E_p[W])
            elif d_hidden is not None:
                d_hidden[rows] = (q.to(h.dtype) @ head - m) * w  # dh = w (E_q[W] − m)
        ctx.save_for_backward(d_hidden, d_head)
        ctx.mark_non_differentiable(loss, argmax)
        return (loss * weight).sum(), loss, argmax

    @staticmethod
    def backward(ctx, g, *_):
        d_hidden, d_head = ctx.saved_tensors
        d_hidden = None if d_hidden is None else (g * d_hidden).to(d_hidden.dtype)
        return d_hidden, None if d_head is None else g * d_head, None, None, None, None


def softmax(logits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities, logsumexp and argmax over the last dimension; the logsumexp follows from the largest
    probability."""
    top_logits, argmax = logits.max(-1)
    p = logits.softmax(-1, dtype=dtype)
    return p, top_logits - p.gather(-1, argmax[..., None])[..., 0].log(), argmax  # logsumexp(z) = max z − log max p


@torch.no_grad()
def teach(hidden: Float[Tensor, "N D"], head: Float[Tensor, "V D"], chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """What a student needs of the main head's distribution p at every row: centroid E_p[W] [N, D], negative
    entropy Σ p log p [N] (nats) and argmax [N]."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    parts = []
    for h in hidden.split(chunk):
        p, lse, argmax = softmax(F.linear(h, head), wide)
        m = p.to(h.dtype) @ head  # m = E_p[W]
        parts.append((m, (m * h).sum(-1, dtype=wide) - lse, argmax))  # Σ p log p = m·h − logsumexp(W h)
    m, negentropy, argmax = (torch.cat(part) for part in zip(*parts, strict=True))
    return m, negentropy, argmax


def check(
    model: Transformer,
    out: Output,
    ids: Tensor,
    doc: Tensor | None,
    weight: Tensor | None,
    kind: str,
    share: float,
    chunk: int,
) -> None:
    """Raise a ValueError that names the wrong argument."""
    if kind not in ("distill", "hard"):
        raise ValueError(f"kind must be distill or hard; got {kind!r}")
    if not (0 <= share <= 1 and chunk >= 1):
        raise ValueError(f"share must lie between 0 and 1, and chunk must be at least 1; got {share} and {chunk}")
    expect_text(ids, doc, weight, *out.prenorm.shape[:2], vocab=model.config.vocab_size)


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
    """(loss summed over positions and averaged over depths, number of positions averaged over depths, metrics
    per depth).

    `out` is the trunk's forward pass on `ids`. "distill": KL(main head at i+k ‖ depth k at i) in nats, without
    a gradient through the main head; "hard": −log q(t_{i+k+1}). Both score the same positions: i at depth k
    counts if t_i .. t_{i+k+1} lie in one document. `weight` [B, T] scales the loss of the *predicted* token, as
    in `cpt.next_token_loss`. With `detach_trunk` the loss does not train the trunk (a checkpoint, or a trunk
    with its own loss); without it, the loss trains the trunk too, through hidden states, embedding and head
    (departure 2). `share` < 1 scores that share of the positions, drawn by `generator`; the layers still see
    all. Metrics: `kl_k` or `nll_k` per position, and `agree_k`, how often the prediction is the target's most
    likely token. Divide the loss by a *global* count.

    The loss is zero if nothing is scored. Raises ValueError for an unknown kind, share outside [0, 1], chunk <
    1, other shapes or dtypes, tokens outside the vocabulary, and a weight or a loss that is not finite."""
    check(model, out, ids, doc, weight, kind, share, chunk)
    table = model.embed_tokens if model.config.tie_word_embeddings else model.lm_head
    prenorm, emb, head = out.prenorm, model.embed_tokens(ids), table.weight
    if detach_trunk:
        prenorm, emb, head = prenorm.detach(), emb.detach(), head.detach()
    doc = torch.zeros_like(ids) if doc is None else doc
    scored = (doc[:, 1:] == doc[:, :-1]) & (doc[:, 1:] >= 0)
    if weight is not None:
        scored &= weight[:, 1:] != 0
    if share < 1:
        scored &= torch.rand(scored.shape, generator=generator) < share
    # The main head at j predicts token j+1; depth k does so from position i = j − k. Rows of weight zero are padding
    # (see ROWS).
    b, j = (F.pad(index, (0, -len(index) % ROWS)) for index in scored.nonzero(as_tuple=True))
    wide = torch.promote_types(prenorm.dtype, torch.float32)
    w = torch.ones(len(b), dtype=wide) if weight is None else weight[b, j + 1].to(wide)
    w = torch.where(torch.arange(len(b), device=w.device) < scored.sum(), w, 0.0)
    if kind == "distill":
        target = out.hidden.detach()[b, j]
        centroid, negentropy, target_tokens = teach(target, head.detach(), chunk)
    else:
        target = target_tokens = ids[b, j + 1]
        centroid, negentropy = head.detach()[target], torch.zeros_like(w)
    total, count, metrics = w.new_zeros(()), 0.0, {}
    for k, hidden in enumerate(mtp(prenorm, emb, doc), 1):
        row_weight = w * ((j >= k) & (doc[b, (j - k).clamp(min=0)] == doc[b, j]))  # w_{i+k+1}, zero across documents
        rows = hidden[b, (j - k).clamp(min=0)]
        loss, ce, guess = HeadLoss.apply(rows, head, centroid, row_weight, target, chunk)
        total = total + loss + (negentropy * row_weight).sum()  # Eq. 3: Σ_i w KL(p ‖ q)
        kl, agree, n = torch.stack(
            ((ce + negentropy) @ row_weight, (guess == target_tokens).to(wide) @ row_weight, row_weight.sum())
        ).tolist()
        metrics[f"{'kl' if kind == 'distill' else 'nll'}_{k}"] = kl / max(n, 1e-9)
        metrics[f"agree_{k}"] = agree / max(n, 1e-9)
        count += n
    if not bool(total.isfinite()):
        raise ValueError("out must give finite log-probs, but its hidden states or the layers give others")
    return total / mtp.mtp.depth, count / mtp.mtp.depth, metrics  # Eq. 3: (1/K) Σ_k


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
    """Continue a prompt with drafts from `mtp`, verified by `model`: the same tokens (greedy) or the same
    distribution (temperature > 0) as `plain_generate`. Raises ValueError for a prompt that is not one non-empty
    row of tokens, for max_new_tokens < 0, and as `Decoder` does."""
    expect("prompt", prompt, "int", 1, "T")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must not be negative; got {max_new_tokens}")
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
    """The same decoder without drafts: one token per pass."""
    return speculative_generate(
        model, None, prompt, max_new_tokens, temperature=temperature, generator=generator, stop=stop
    )


@dataclass(frozen=True)
class Demo:
    """Train on generated code character by character, distil the layers, and decode with and without them."""

    steps: int = 240
    """Optimiser steps of the trunk (AdamW)."""
    mtp_steps: int = 160
    """Optimiser steps of the layers, on top of the frozen trunk."""
    batch: int = 16
    """Rows per step."""
    length: int = 96
    """Characters per row."""
    lr: float = 4e-3
    """Learning rate of both; it falls linearly to zero."""
    mtp: MTPConfig = MTPConfig(depth=3, intermediate_size=128)
    """Shape of the layers."""
    prompts: int = 12
    """Contexts that each way of decoding continues, in turn."""
    new_tokens: int = 96
    """Characters generated per context."""
    temperature: float = 1.0
    """Temperature of the sampled half; the other half is greedy."""
    seed: int = 0
    """Seed of text, weights and sampling."""


def functions(generator: torch.Generator, length: int) -> Tensor:
    """`length` characters (code points below 128) of small Python functions, each used on the line after it."""
    text = ""
    while len(text) < length:
        a, b, name, op = (int(torch.randint(n, (), generator=generator)) for n in (10, 10, 6, 3))
        name, (sign, result) = "abcdef"[name] * 2, (("+", a + b), ("-", a - b), ("*", a * b))[op]
        text += f"def {name}(x):\n    return x {sign} {b}\nassert {name}({a}) == {result}\n"
    return torch.tensor([ord(char) for char in text[:length]])


def demo(config: Demo = Demo(), log: Callable[..., None] = lambda *_, **__: None) -> dict[str, float]:
    """Acceptance by depth, tokens per pass and measured speed-up of speculative decoding, greedy and sampled."""
    generator = torch.Generator().manual_seed(config.seed)
    torch.manual_seed(config.seed)
    shape = Config(
        vocab_size=128, hidden_size=64, num_hidden_layers=4, head_dim=16, num_experts=4, moe_intermediate_size=64
    )
    model = Transformer(shape)
    mtp, metrics, total = MTP(shape, config.mtp), {}, config.steps + config.mtp_steps
    for module, first, last in ((model, 0, config.steps), (mtp, config.steps, total)):
        optimizer = torch.optim.AdamW(module.parameters(), config.lr, betas=(0.9, 0.95))
        for step in range(first, last):
            optimizer.param_groups[0]["lr"] = config.lr * (last - step) / (last - first)
            ids = torch.stack([functions(generator, config.length) for _ in range(config.batch)])
            if module is model:
                out = model(ids, logits=False)
                loss = -model.logprob(out.hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).mean()
                metrics["nll"] = loss.item()
            else:
                with torch.no_grad():
                    out = model(ids, logits=False)
                loss, count, stats = mtp_loss(mtp, model, out, ids)
                loss, metrics = loss / count, metrics | stats
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 9:
                log(step + 1, total, **metrics)
    for name, temperature in (("greedy", 0.0), ("sampled", config.temperature)):
        runs: dict[str, Generation] = {}
        decoders = {
            "plain": Decoder(model, temperature=temperature, generator=generator),
            "speculative": Decoder(model, mtp, temperature=temperature, generator=generator),
        }
        for _ in range(config.prompts):
            prompt = functions(generator, 40).tolist()
            for method, decoder in decoders.items():
                decoder.reset()
                decoder.feed(prompt)
                decoder.generate(max_new=config.new_tokens)
                runs[method] = runs[method] + decoder.total if method in runs else decoder.total
        plain_run, speculative = runs["plain"], runs["speculative"]
        if temperature == 0:
            metrics["greedy_identical"] = float(plain_run.tokens == speculative.tokens)
        metrics |= {f"{name}_acceptance_{k}": share for k, share in enumerate(speculative.acceptance, 1)}
        metrics |= {
            f"{name}_tokens_per_pass": speculative.tokens_per_cycle,
            f"{name}_plain_ms_per_token": 1e3 * plain_run.seconds / len(plain_run.tokens),
            f"{name}_speculative_ms_per_token": 1e3 * speculative.seconds / len(speculative.tokens),
            f"{name}_speed_up": (
                plain_run.seconds / len(plain_run.tokens) / (speculative.seconds / len(speculative.tokens))
            ),
        }
    return metrics


if __name__ == "__main__":
    print(demo())
