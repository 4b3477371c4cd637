"""Dr. GRPO and its family on many ranks: `ref/dr_grpo.py`, which has the formulas, the pitfalls and the glossary.

What is distributed, and what must be summed over ranks:

    rollouts of a group    over dp      baseline and deviation belong to the complete group: sums over dp
    tokens of a rollout    over cp      its length and GSPO's mean log-ratio belong to the complete rollout: sums over
                                        cp
    the loss               everywhere   Σ over ranks; the caller passes one `budget`, so nothing is averaged here

Averaging is the pitfall. With a baseline over the rollouts on one rank, the gradient would depend on the layout, and
with one rollout per rank all advantages would be zero.

`group_advantages` takes [G, n]: the same G groups on every dp rank, with n of their rollouts here (n may differ, or be
0). If packing has scattered the rollouts, pass `rewards` [B] and `groups` [B], the group number of each rollout.
"""

import math

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from ref import dr_grpo as ref
from ref.checks import expect, expect_choice, expect_positive, refuse
from ref.dr_grpo import FAMILY, Variant
from scaled.runtime.comm import all_reduce_max, all_reduce_min, all_reduce_sum, sum_over, total

__all__ = ["FAMILY", "Variant", "family_loss", "group_advantages", "policy_loss", "ratio_statistics"]


def group_advantages(
    rewards: Float[Tensor, "G n"] | Float[Tensor, " B"],
    *,
    baseline: str = "mean",
    scale: str = "none",
    eps: float = 1e-6,
    groups: Int[Tensor, " B"] | None = None,
) -> Float[Tensor, "G n"] | Float[Tensor, " B"]:
    """Advantages of this rank's rollouts, over their groups' rollouts on all dp ranks; shape of `rewards`.

    With `groups`, a rollout that is alone in its group has advantage 0.
    Raises ValueError as in `ref`, where the size of a group counts its rollouts on all ranks, and for negative
    groups."""
    expect_choice("baseline", baseline, "mean", "leave_one_out")
    expect_choice("scale", scale, "none", "std")
    expect_positive("eps", eps)
    if groups is None:
        expect("rewards", rewards, "float", "G", "n")
        G, n = rewards.shape
        group_of = torch.arange(G, device=rewards.device).repeat_interleave(n)
    else:
        expect("rewards", rewards, "float", "B")
        expect("groups", groups, "int", len(rewards))
        last_group = groups.max() if len(groups) else torch.tensor(-1, device=rewards.device)
        if len(groups) and int(groups.min()) < 0:
            raise ValueError(f"groups must not be negative, got {int(groups.min())}")
        group_of, G = groups.long(), int(all_reduce_max(last_group, "dp")) + 1
    flat_rewards = rewards.flatten().to(torch.promote_types(rewards.dtype, torch.float32))
    refuse("rewards must be finite", ~flat_rewards.isfinite())

    def over_group(x: Tensor) -> Tensor:
        return all_reduce_sum(x.new_zeros(G).index_add_(0, group_of, x), "dp")

    count = over_group(torch.ones_like(flat_rewards))
    fewest_rollouts, required_rollouts = (
        count[count > 0].min().item() if bool((count > 0).any()) else 0,
        1 if groups is not None or (baseline, scale) == ("mean", "none") else 2,
    )
    if fewest_rollouts < required_rollouts:
        raise ValueError(
            f"rewards must be [G, N] with N ≥ {required_rollouts} for {baseline}, {scale}; got N = "
            f"{int(fewest_rollouts)}"
        )
    # Relative to the lowest reward of the group, so equal rewards give exact zeros.
    base = all_reduce_min(flat_rewards.new_full((G,), math.inf).scatter_reduce(0, group_of, flat_rewards, "amin"), "dp")
    relative = flat_rewards - base[group_of]
    # Eq. 1 (ref/dr_grpo.py): A = (R − b) / s, with b and s over the complete group.
    centred = relative - (over_group(relative) / count)[group_of]
    peers = (count - 1).clamp(min=1)
    advantages = centred * (count / peers)[group_of] if baseline == "leave_one_out" else centred
    if scale == "std":
        variance = over_group(centred.double().square()) / peers
        advantages = (advantages / (variance.sqrt() + eps)[group_of]).to(flat_rewards.dtype)
        refuse(ref.OVERFLOW_MESSAGE, ~variance[group_of].isfinite())
    refuse(ref.OVERFLOW_MESSAGE, ~advantages.isfinite())
    return advantages.view_as(rewards)


def policy_loss(
    logp: Float[Tensor, "B T"],
    behavior_logp: Float[Tensor, "B T"],
    advantages: Float[Tensor, " B"],
    mask: Shaped[Tensor, "B T"],
    *,
    budget: int | float,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ratio: str = "token",
    length: str = "none",
    keep: Bool[Tensor, " B"] | None = None,
) -> Float[Tensor, ""]:
    """The loss (3) of all ranks' tokens, the same on every rank. ValueError as in `ref`."""
    expect_positive("budget", budget)
    expect_choice("length", length, "none", "rollout")
    log_ratio, advantage, weight = selected(logp, behavior_logp, advantages, mask, ratio, keep)
    if length == "rollout":
        weight = weight / _tokens(mask, keep)
    # Eq. 3 (ref/dr_grpo.py): −(1/budget) Σ w · min(ρA, clip(ρ)A), summed over ranks.
    surrogate = torch.exp(ref.clip_log_ratio(log_ratio, advantage, clip_low, clip_high)) * advantage
    return total(-(weight * surrogate).sum() / budget)


def family_loss(
    variant: Variant,
    logp: Float[Tensor, "B T"],
    behavior_logp: Float[Tensor, "B T"],
    rewards: Float[Tensor, "G n"],
    mask: Shaped[Tensor, "B T"],
    *,
    budget: int | float,
    finished: Bool[Tensor, " B"] | None = None,
) -> Float[Tensor, ""]:
    """The loss (3) of a variant: row g·n + i here is this rank's rollout i of group g. ValueError as in `ref`."""
    advantages = group_advantages(rewards, baseline=variant.baseline, scale=variant.scale).flatten()
    expect("logp", logp, "float", len(advantages), "T")
    expect("mask", mask, "any", *logp.shape)
    if not bool(all_reduce_sum((mask != 0).sum())):
        raise ValueError(
            f"mask must be nonzero somewhere; got shape {list(mask.shape)} per rank without any token of the policy"
        )
    if variant.drop_overlong or finished is not None:
        expect("finished", finished, "bool", len(advantages))
    return policy_loss(
        logp,
        behavior_logp,
        advantages,
        mask,
        budget=budget,
        clip_low=variant.clip_low,
        clip_high=variant.clip_high,
        ratio=variant.ratio,
        length=variant.length,
        keep=finished if variant.drop_overlong else None,
    )


def ratio_statistics(
    logp: Float[Tensor, "B T"],
    behavior_logp: Float[Tensor, "B T"],
    advantages: Float[Tensor, " B"],
    mask: Shaped[Tensor, "B T"],
    *,
    n_tokens: int | float,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ratio: str = "token",
) -> dict[str, Float[Tensor, ""]]:
    """`ref.dr_grpo.ratio_statistics` over all ranks' tokens; `n_tokens` is global."""
    expect_positive("n_tokens", n_tokens)
    with torch.no_grad():
        log_ratio, advantage, weight = selected(logp, behavior_logp, advantages, mask, ratio, None)
        is_clipped = ref.clip_log_ratio(log_ratio, advantage, clip_low, clip_high) != log_ratio
        return {
            "mean_ratio": all_reduce_sum((weight * log_ratio.exp()).sum()) / n_tokens,
            "clip_fraction": all_reduce_sum((weight * (is_clipped & (advantage != 0))).sum()) / n_tokens,
            "approx_kl": all_reduce_sum((weight * (torch.expm1(log_ratio) - log_ratio)).sum()) / n_tokens,
        }


def selected(
    logp: Tensor, behavior_logp: Tensor, advantages: Tensor, mask: Tensor, ratio: str, keep: Tensor | None
) -> tuple[Tensor, ...]:
    """log ρ, A and weight of this rank's tokens; for sequence ratios, log ρ is the mean over all tokens of the
    sequence, on all ranks."""
    expect_choice("ratio", ratio, "token", "sequence")
    # Eq. 2 (ref/dr_grpo.py): log ρ = log π − log μ.
    log_ratio, advantage, weight = ref.select_tokens(logp, behavior_logp, advantages, mask, "token", keep)
    if ratio == "sequence":
        is_live = mask != 0 if keep is None else (mask != 0) & keep[:, None]
        mean = sum_over(log_ratio.sum(1, keepdim=True), "cp") / _tokens(mask, keep)
        log_ratio = mean.expand_as(log_ratio).where(is_live, 0)
    return log_ratio, advantage, weight


def _tokens(mask: Tensor, keep: Tensor | None) -> Tensor:
    """Tokens of each rollout on all cp ranks together, [B, 1]."""
    count = all_reduce_sum((mask != 0).sum(1), "cp")
    empty = (count == 0) if keep is None else (count == 0) & keep
    refuse("mask must be nonzero somewhere in each row", empty)
    return count.clamp(min=1)[:, None]
