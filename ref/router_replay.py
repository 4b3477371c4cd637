"""Router replay: the trainer's forward pass takes the experts that the inference engine took.

Papers: Composer 2 technical report (arXiv:2603.24477v2), §6.2; rollout routing replay, arXiv:2510.11370.

An inference engine and a trainer round differently. In a dense network that shifts log-probs a little; in a
mixture of experts a score that moves by a rounding error can change which experts a token goes to, and its
log-prob jumps. The importance ratio π/μ of such a token is noise, and a few of them can wreck an RL step. So
the engine returns, for every token and layer, the indices of the experts it chose, and the trainer's router
only computes their gates:

    g_e = exp(s_e) / Σ_{j ∈ R} exp(s_j),   e ∈ R       R the replayed experts, s the trainer's own logits

Gradients reach the router through the gates. Composer 2 adds a plausibility filter: a replayed expert whose
score falls below a threshold derived from the router's own top-k is dropped for the router's next candidate.

    keep e ∈ R   ⟺   p_e ≥ α · p_(K)                p = softmax(s), p_(K) the K-th largest

Where this file departs from the paper
1. The report does not say how the threshold is derived. Ours is α times the K-th largest probability: α = 0
   is plain replay, α = 1 keeps only experts that the router itself would have picked.
2. Scores are logits and the filter works on them (s_e ≥ s_(K) + ln α): no probability underflows.
3. Experts come back ordered by score, kept ones first. Gates are computed in that order; a sum over experts
   does not care.
4. Where two experts tie for the K-th place, both count as the router's own.

Run it
    etude run router-replay --scale small    seconds; the same as: python -m ref.router_replay
    etude figure router-mismatch             between a coarse sampler and an exact trainer; wants runs/small
    etude run router-replay --scale full     scaled/router_replay.py, on many ranks

Glossary
    symbol   variable    shape    where
    s        scores      N E      the trainer's router logits of N tokens
    R        replayed    N K      experts that the inference engine chose
    α        alpha       scalar   plausibility, 0 to 1
    log π    logp        any      the trainer's log-prob of the sampled token, nats
    log μ    behavior    same     the inference engine's
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ref.checks import expect
from ref.network.model import weigh

__all__ = ["Demo", "demo", "compare_experts", "gates", "mismatch", "replay", "route"]


def replay(
    scores: Float[Tensor, "N E"], replayed: Int[Tensor, "N K"], k: int, alpha: float = 0.0
) -> Int[Tensor, "N K"]:
    """The k experts of every token: the replayed ones that are plausible, then the router's own by score.

    Always k distinct experts, for any scores (ties, −inf). ValueError for NaN or +inf among the scores, for
    replayed experts that are not k distinct ones of the E, and for alpha outside [0, 1]. §6.2."""
    check(scores, replayed, k, alpha)
    E, replayed = scores.shape[1], replayed.long()
    threshold = scores.topk(k, -1)[0][:, -1:] + (math.log(alpha) if alpha else -math.inf)  # s_(K) + ln α
    plausible = scores >= threshold  # p_e ≥ α · p_(K)
    is_kept = torch.zeros_like(plausible).scatter_(1, replayed, plausible.gather(1, replayed))
    rank = scores.sort(dim=-1, descending=True, stable=True)[1].argsort(-1)
    return (rank + E * ~is_kept).argsort(-1)[:, :k]  # the replayed ones first, then by rank


def check(scores: Tensor, replayed: Tensor, k: int, alpha: float) -> None:
    """Raises ValueError, naming the argument at fault."""
    expect("scores", scores, "float", "N", "E")
    N, E = scores.shape
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must lie between 0 and 1, got {alpha}")
    if not 1 <= k <= E:
        raise ValueError(f"k must lie between 1 and the {E} experts, got {k}")
    expect("replayed", replayed, "int", N, k)
    if bool((scores.isnan() | (scores == math.inf)).any()):
        raise ValueError("scores must be finite or -inf, and some are NaN or +inf")
    _distinct("replayed", replayed, E)


def gates(scores: Float[Tensor, "N E"], experts: Int[Tensor, "N K"], normalise: bool = True) -> Float[Tensor, "N K"]:
    """Weights of the chosen experts, computed from this router's own scores, so that gradients reach the router: a
    softmax over the chosen experts, or their share of a softmax over all E without `normalise`. Raises ValueError for
    experts that are not distinct ones of the E, for scores that are NaN or +inf, and for rows in which the softmax is
    over −inf only."""
    expect("scores", scores, "float", "N", "E")
    expect("experts", experts, "int", len(scores), "K")
    _distinct("experts", experts, scores.shape[1])
    softmax_scores = scores.gather(-1, experts.long()) if normalise else scores
    if not bool((scores < math.inf).all() and (softmax_scores > -math.inf).any(-1).all()):
        raise ValueError(
            "scores must be finite or -inf, with a finite one among the experts that the softmax is over in each row"
        )
    return weigh(scores, experts.long(), normalise)  # g_e = exp(s_e) / Σ_{j ∈ R} exp(s_j)


def route(
    scores: Float[Tensor, "N E"],
    k: int,
    replayed: Int[Tensor, "N K"] | None = None,
    alpha: float = 0.0,
    normalise: bool = True,
) -> tuple[Float[Tensor, "N K"], Int[Tensor, "N K"]]:
    """Gates and experts of a router: the replayed experts that are plausible, or its own k best if none are replayed
    (the lower index wins a tie). The network's router (`MoE.route`) does the same without the checks, and leaves ties
    to torch.topk. Raises ValueError as `replay` and `gates` do."""
    if replayed is None:
        expect("scores", scores, "float", "N", "E")
        if not 1 <= k <= scores.shape[1]:
            raise ValueError(f"k must lie between 1 and the {scores.shape[1]} experts, got {k}")
        experts = scores.sort(dim=-1, descending=True, stable=True)[1][:, :k]
    else:
        experts = replay(scores, replayed, k, alpha)
    return gates(scores, experts, normalise), experts


def mismatch(
    logp: Float[Tensor, "*shape"], behavior: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]
) -> dict[str, float]:
    """How far trainer and inference engine are apart on the sampled tokens (mask True), in nats: `kl` the
    mean of log μ − log π (an estimate of KL(μ‖π)), and p50, p99 and max of |log π − log μ|. Raises ValueError
    for other shapes or dtypes, when no token is sampled, and for log-probs of sampled ones not finite."""
    check_log_probs(logp, behavior, mask)
    if not bool(mask.any()):
        raise ValueError("mask must be True somewhere: there is no sampled token to compare")
    difference = (behavior - logp)[mask].double()  # log μ − log π
    size = difference.abs()
    # torch.quantile refuses more than 2^24 values, and a step of a full run samples more.
    p50, p99 = np.quantile(size.cpu().numpy(), [0.5, 0.99]).tolist()
    return {"kl": difference.mean().item(), "p50": p50, "p99": p99, "max": size.max().item()}


def check_log_probs(logp: Tensor, behavior: Tensor, mask: Tensor) -> None:
    """Raises ValueError, naming the argument at fault."""
    expect("logp", logp, "float", *getattr(logp, "shape", ()))
    expect("behavior", behavior, "float", *logp.shape)
    expect("mask", mask, "bool", *logp.shape)
    for name, x in (("logp", logp), ("behavior", behavior)):
        if not bool(x[mask].isfinite().all()):
            raise ValueError(f"{name} must be finite where mask is True")


def compare_experts(
    trainer_experts: Sequence[Int[Tensor, "N K"]], engine_experts: Sequence[Int[Tensor, "N K"]]
) -> dict[str, float]:
    """Per layer the experts of both engines → `decisions`, the share of chosen experts that the other did not
    choose, and `tokens`, the share of tokens with such an expert in at least one layer. The order of a
    token's experts does not count. Raises ValueError unless both hold as many layers, one at least, of one
    shape [N, K] with N and K at least 1."""
    check_experts(trainer_experts, engine_experts)
    if not trainer_experts[0].numel():
        raise ValueError(f"ours must hold experts of at least one token, got {list(trainer_experts[0].shape)}")
    missing = torch.stack(
        [~(a.unsqueeze(2) == b.unsqueeze(1)).any(2) for a, b in zip(trainer_experts, engine_experts, strict=True)]
    )
    return {"decisions": missing.double().mean().item(), "tokens": missing.any(2).any(0).double().mean().item()}


def check_experts(trainer_experts: Sequence[Tensor], engine_experts: Sequence[Tensor]) -> None:
    """Raises ValueError, naming the argument at fault, unless both hold as many layers, one at least, of one shape [N,
    K]."""
    if not len(trainer_experts) == len(engine_experts) > 0:
        raise ValueError(
            f"ours and theirs must hold as many layers, got {len(trainer_experts)} and {len(engine_experts)}"
        )
    for name, experts in (("ours", trainer_experts), ("theirs", engine_experts)):
        for layer, layer_experts in enumerate(experts):
            shape = trainer_experts[0].shape if layer or name == "theirs" else "NK"
            expect(f"{name}[{layer}]", layer_experts, "int", *shape)


def _distinct(name: str, experts: Tensor, E: int) -> None:
    low, high = (int(experts.min()), int(experts.max())) if experts.numel() else (0, 0)
    if low < 0 or high >= max(E, 1):
        raise ValueError(f"{name} must name experts 0 to {E - 1}, got {low} to {high}")
    ordered = experts.sort(-1)[0]
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        raise ValueError(f"{name} must hold distinct experts in each row, and some row repeats one")


@dataclass(frozen=True)
class Demo:
    """One random mixture of experts, run by a coarse engine and by an exact trainer."""

    tokens: int = 2048
    """Tokens compared."""
    bits: int = 5
    """Mantissa bits of the engine's weights (bfloat16 has 8, float32 24)."""
    alpha: float = 0.5
    """Plausibility of the filtered replay."""
    seed: int = 0
    """Seed of weights and tokens."""


def demo(config: Demo = Demo(), log: Callable[..., None] = lambda *_, **__: None) -> dict[str, float]:
    """Mismatch of log-probs without replay, with it, and with the filter; and how many decisions differ."""
    from ref.network import Config, Transformer

    torch.manual_seed(config.seed)
    shape = Config.tiny(vocab_size=256, hidden_size=64, head_dim=16, moe_intermediate_size=64, initializer_range=0.15)
    trainer, engine = Transformer(shape), Transformer(shape)
    scale = 2.0**config.bits
    coarse_state = {}
    for name, param in trainer.state_dict().items():
        mantissa, exponent = torch.frexp(param)
        coarse_state[name] = torch.ldexp((mantissa * scale).round() / scale, exponent)
    engine.load_state_dict(coarse_state)
    ids = torch.randint(0, shape.vocab_size, (max(1, config.tokens // 64), 65))
    targets, mask = ids[:, 1:], torch.ones(len(ids), 64, dtype=torch.bool)
    metrics: dict[str, float] = {}

    def score_tokens(model: Transformer, experts=None):
        with torch.no_grad():
            output = model(ids[:, :-1], experts=experts)
        return output.logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0], output

    behavior, sampled = score_tokens(engine)
    own_logp, output = score_tokens(trainer)
    metrics |= {
        f"differing_{metric}": value for metric, value in compare_experts(output.experts, sampled.experts).items()
    }
    # The filter looks at the scores of the very pass it steers: a layer's input depends on those before.
    filtered = [
        partial(replay, replayed=layer, k=shape.num_experts_per_tok, alpha=config.alpha) for layer in sampled.experts
    ]
    variants = {
        "own": own_logp,
        "replay": score_tokens(trainer, sampled.experts)[0],
        "filtered": score_tokens(trainer, filtered)[0],
    }
    for step, (variant, logp) in enumerate(variants.items(), 1):
        metrics |= {f"{variant}_{metric}": value for metric, value in mismatch(logp, behavior, mask).items()}
        log(step, len(variants), **metrics)
    return metrics


if __name__ == "__main__":
    for name, value in demo().items():
        print(f"{name:20s} {value:.5f}")
