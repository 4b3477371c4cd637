"""Multi-token prediction on many ranks: `ref/mtp.py`, which has the layers, the loss (3) and its pitfalls.

Depth k at position i takes token i+k and is compared with the main head at i+k; both may be in a chunk on another rank.
Little data is sent: the first k embeddings of the next chunk, and what a student needs from the teacher there (its
centroid E_p[W], one vector per token; never logits). The teacher is computed once, on the rank of its token.

The sampler decodes, with one engine per rank, so those functions come from `ref`. The layers are dense and small, so
FSDP keeps them gathered from the forward to the backward pass.
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
from scaled.runtime.comm import all_reduce_sum, total
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
        token_positions = places(prenorm.shape[1] * cp).to(prenorm.device)
        rope, mask = (
            rope_table(self.config, token_positions, prenorm.dtype),
            attention_mask(self.config, token_positions, doc, prenorm),
        )
        x, hidden = prenorm, []
        for k, layer in enumerate(self.layers, 1):
            # Eq. 1 (ref/mtp.py): h^k; its norm is what the head of Eq. 2 reads.
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
    """`ref.mtp.mtp_loss` of all ranks' tokens, the same on every rank, from this rank's. `generator` must be in the
    same state on all ranks."""
    ref.check(model, out, ids, doc, weight, kind, share, chunk)
    table = model.embed_tokens if model.config.tie_word_embeddings else model.lm_head
    prenorm, emb, head = out.prenorm, F.embedding(ids, model.embed_tokens.weight), table.weight
    if detach_trunk:
        prenorm, emb, head = prenorm.detach(), emb.detach(), head.detach()
    doc = torch.zeros_like(ids) if doc is None else doc
    mesh, (B, Tl) = current(), ids.shape
    T = Tl * mesh.group("cp").size
    # Weight of the main head at j, which predicts token j+1.
    is_scored = (ahead(doc) == doc) & (ahead(doc) >= 0) & (places(T).to(ids.device) < T - 1)
    wide_dtype = torch.promote_types(prenorm.dtype, torch.float32)
    w = torch.ones_like(is_scored, dtype=wide_dtype) if weight is None else ahead(weight.to(wide_dtype))
    if share < 1:
        is_sampled = torch.rand(B * mesh.group("dp").size, T - 1, generator=generator) < share
        is_scored &= cut(F.pad(is_sampled, (0, 1))).to(ids.device)
    w = w * is_scored
    has_weight = w != 0
    next_ids = ahead(ids)
    if kind == "distill":
        teacher_values = ref.teach(out.hidden.detach()[has_weight], head.detach(), chunk)
    else:
        teacher_values = head.detach()[next_ids[has_weight]], w.new_zeros(int(has_weight.sum())), next_ids[has_weight]
    centroid, negentropy, top_ids = (
        x.new_zeros(B, Tl, *x.shape[1:]).index_put((has_weight,), x) for x in teacher_values
    )
    target = out.hidden.detach() if kind == "distill" else next_ids
    loss, depth_sums = w.new_zeros(()), []
    for k, hidden in enumerate(mtp(prenorm, emb, doc), 1):
        # Position i is compared with j = i + k.
        depth_weight = ahead(w, k) * (ahead(doc, k) == doc)
        is_compared = depth_weight != 0
        parts = [ahead(x, k)[is_compared] for x in (centroid, negentropy, top_ids, target)]
        part, ce, guessed_ids = ref.HeadLoss.apply(
            hidden[is_compared], head, parts[0], depth_weight[is_compared], parts[3], chunk
        )
        # Eq. 3 (ref/mtp.py): Σ w · KL(p ‖ q^k) = Σ w · (cross-entropy + Σ p log p); 1/K comes at the end.
        loss = loss + part + (parts[1] * depth_weight[is_compared]).sum()
        depth_sums.append(
            torch.stack(
                (
                    (ce + parts[1]) @ depth_weight[is_compared],
                    (guessed_ids == parts[2]).to(wide_dtype) @ depth_weight[is_compared],
                    depth_weight.sum(),
                )
            )
        )
    if not bool(loss.isfinite()):
        raise ValueError("out must give finite log-probs; those of its hidden states (or of the layers) are not finite")
    sums, name, K = (
        all_reduce_sum(torch.stack(depth_sums)).tolist(),
        "kl" if kind == "distill" else "nll",
        mtp.mtp.depth,
    )
    metrics = {}
    for k, (value, agree, n) in enumerate(sums, 1):
        metrics |= {f"{name}_{k}": value / max(n, 1e-9), f"agree_{k}": agree / max(n, 1e-9)}
    return total(loss) / K, sum(n for *_, n in sums) / K, metrics
