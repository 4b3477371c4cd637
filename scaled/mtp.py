"""Multi-token prediction on many ranks: `ref/mtp.py`, which has the layers, the loss (3) and its pitfalls.

Depth k at position i takes token i+k and is compared with the main head at i+k; both may be in a chunk on another rank. Little
data is sent: the first k embeddings of the next chunk, and what a student needs from the teacher there (its centroid E_p[W], one
vector per token; never logits). The teacher is computed once, on the rank of its token.

The sampler decodes, with one engine per rank, so those functions come from `ref`. The layers are dense and small, so FSDP keeps them
gathered from the forward to the backward pass.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ref import mtp as ref
from ref.checks import expect
from ref.mtp import Decoder, Generation, MTPConfig, accept, plain_generate, speculative_generate
from ref.network import Config, Output
from ref.network.model import rope_table
from scaled.network.model import Block, Transformer, attention_mask
from scaled.runtime.comm import summed, total
from scaled.runtime.cut import ahead, cut, places
from scaled.runtime.mesh import current
from scaled.runtime.sharding import initialise, shard

__all__ = ["MTP", "Decoder", "Generation", "MTPConfig", "accept", "mtp_loss", "plain_generate", "speculative_generate"]


class MTPLayer(ref.MTPLayer):
    """`ref.mtp.MTPLayer` with a block for context parallelism."""

    Block = Block


class MTP(ref.MTP):
    """K layers, sharded over all ranks; called with this rank's rows and tokens."""

    Layer = MTPLayer

    def __init__(self, config: Config, mtp: MTPConfig = MTPConfig()):
        if current().layout.world == 1:
            super().__init__(config, mtp)
            self.to(current().device)
            return
        with torch.device("meta"):
            super().__init__(config, mtp)
        shard(self, self.layers, reshard_after_forward=False)
        self.to_empty(device=current().device)
        initialise(self, self.config)

    def forward(
        self, prenorm: Float[Tensor, "B T D"], emb: Float[Tensor, "B T D"], doc: Int[Tensor, "B T"] | None = None
    ) -> list[Float[Tensor, "B T D"]]:
        """As in `ref`, for this rank's positions. ValueError for other shapes or dtypes."""
        cp = current().group("cp").size
        if cp == 1:
            return super().forward(prenorm, emb, doc)
        expect("prenorm", prenorm, "float", "B", "T", self.config.hidden_size)
        expect("emb", emb, "float", *prenorm.shape)
        if doc is not None:
            expect("doc", doc, "int", *prenorm.shape[:2])
        where = places(prenorm.shape[1] * cp).to(prenorm.device)
        rope, mask = rope_table(self.config, where, prenorm.dtype), attention_mask(self.config, where, doc, prenorm)
        x, hidden = prenorm, []
        for k, layer in enumerate(self.layers, 1):
            x = layer(x, ahead(emb, k), rope, mask)
            hidden.append(layer.norm(x))
        return hidden


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
    """`ref.mtp.mtp_loss` of all ranks' tokens, the same on every rank, from this rank's. `generator` must be in the same state on all ranks."""
    ref.check(model, out, ids, doc, weight, kind, share, chunk)
    table = model.embed_tokens if model.config.tie_word_embeddings else model.lm_head
    prenorm, emb, head = out.prenorm, F.embedding(ids, model.embed_tokens.weight), table.weight
    if detach_trunk:
        prenorm, emb, head = prenorm.detach(), emb.detach(), head.detach()
    doc = torch.zeros_like(ids) if doc is None else doc
    mesh, (B, Tl) = current(), ids.shape
    T = Tl * mesh.group("cp").size
    # Weight of the main head at j, which predicts token j+1.
    scored = (ahead(doc) == doc) & (ahead(doc) >= 0) & (places(T).to(ids.device) < T - 1)
    wide = torch.promote_types(prenorm.dtype, torch.float32)
    w = torch.ones_like(scored, dtype=wide) if weight is None else ahead(weight.to(wide))
    if share < 1:
        drawn = torch.rand(B * mesh.group("dp").size, T - 1, generator=generator) < share
        scored &= cut(F.pad(drawn, (0, 1))).to(ids.device)
    w = w * scored
    some = w != 0
    following = ahead(ids)
    if kind == "distill":
        found = ref.teach(out.hidden.detach()[some], head.detach(), chunk)
    else:
        found = head.detach()[following[some]], w.new_zeros(int(some.sum())), following[some]
    centroid, negentropy, wanted = (x.new_zeros(B, Tl, *x.shape[1:]).index_put((some,), x) for x in found)
    target = out.hidden.detach() if kind == "distill" else following
    loss, figures = w.new_zeros(()), []
    for k, hidden in enumerate(mtp(prenorm, emb, doc), 1):
        # Position i is compared with j = i + k.
        weighs = ahead(w, k) * (ahead(doc, k) == doc)
        at = weighs != 0
        parts = [ahead(x, k)[at] for x in (centroid, negentropy, wanted, target)]
        part, ce, guess = ref.HeadLoss.apply(hidden[at], head, parts[0], weighs[at], parts[3], chunk)
        loss = loss + part + (parts[1] * weighs[at]).sum()
        figures.append(torch.stack(((ce + parts[1]) @ weighs[at], (guess == parts[2]).to(wide) @ weighs[at], weighs.sum())))
    if not bool(loss.isfinite()):
        raise ValueError("out must give finite log-probs; those of its hidden states (or of the layers) are not finite")
    sums, name, K = summed(torch.stack(figures)).tolist(), "kl" if kind == "distill" else "nll", mtp.mtp.depth
    shown = {}
    for k, (value, agree, n) in enumerate(sums, 1):
        shown |= {f"{name}_{k}": value / max(n, 1e-9), f"agree_{k}": agree / max(n, 1e-9)}
    return total(loss) / K, sum(n for *_, n in sums) / K, shown
