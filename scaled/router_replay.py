"""Router replay on many ranks: `ref/router_replay.py`, which has the rule and the glossary.

A token's experts are replayed on the rank of the token: indices are split like ids (`runtime/cut.py`), [B, T, K] per
layer, and passed to this rank's forward pass, whose router scores the same tokens. The choice does not depend on which
rank owns an expert, so `replay` and `gates` are those of `ref`, and `route` differs only in its kernel. The statistics
cover the tokens of all ranks, because the 99th percentile of one rank says nothing about that of the batch.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ref import router_replay as ref
from ref.router_replay import Demo, demo, gates, replay
from scaled.runtime.comm import all_reduce_sum, gathered
from scaled.runtime.engine import fast, kernel

__all__ = ["Demo", "demo", "compare_experts", "gates", "mismatch", "replay", "route"]


def route(
    scores: Float[Tensor, "N E"],
    k: int,
    replayed: Int[Tensor, "N K"] | None = None,
    alpha: float = 0.0,
    normalise: bool = True,
) -> tuple[Float[Tensor, "N K"], Int[Tensor, "N K"]]:
    """`ref.router_replay.route`; on GPUs by `kernels/router_replay.py`, for scores in float32 or bfloat16."""
    # g_e = exp(s_e) / Σ exp(s_j) over the replayed experts (ref/router_replay.py), by a kernel or by `ref`.
    if fast(scores) and scores.dtype in (torch.float32, torch.bfloat16):
        return kernel("router_replay").route(scores, k, replayed, alpha, normalise)
    return ref.route(scores, k, replayed, alpha, normalise)


def mismatch(
    logp: Float[Tensor, "*shape"], behavior: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]
) -> dict[str, float]:
    """`ref.router_replay.mismatch` for the sampled tokens of all ranks; a rank may have none, but at least one rank
    must have some."""
    ref.check_log_probs(logp, behavior, mask)
    pairs = torch.cat(gathered(torch.stack((logp[mask], behavior[mask]), 1).double()))
    return ref.mismatch(pairs[:, 0], pairs[:, 1], torch.ones(len(pairs), dtype=torch.bool, device=pairs.device))


def compare_experts(
    trainer_experts: Sequence[Int[Tensor, "N K"]], engine_experts: Sequence[Int[Tensor, "N K"]]
) -> dict[str, float]:
    """`ref.router_replay.compare_experts` for the tokens of all ranks, with equal weights; a rank may have none, but at
    least one rank must have some."""
    ref.check_experts(trainer_experts, engine_experts)
    local_shares = (
        ref.compare_experts(trainer_experts, engine_experts)
        if len(trainer_experts[0])
        else {"decisions": 0.0, "tokens": 0.0}
    )
    num_tokens = torch.tensor(float(len(trainer_experts[0])), dtype=torch.float64, device=trainer_experts[0].device)
    shares, tokens = (
        all_reduce_sum(
            torch.tensor(list(local_shares.values()), dtype=torch.float64, device=num_tokens.device) * num_tokens
        ),
        all_reduce_sum(num_tokens),
    )
    if not tokens:
        raise ValueError("ours must hold experts of at least one token on some rank")
    return dict(zip(local_shares, (shares / tokens).tolist(), strict=True))
