"""Dr. GRPO: policy gradients from groups of rollouts, without the two normalisations that bias them. The rest of
the family is here too; each member differs by a few options.

Papers: Composer 2 technical report (arXiv:2603.24477v2), §4.1; Dr. GRPO (arXiv:2503.20783), §3, the default
here. For comparison GRPO (arXiv:2402.03300), RLOO (arXiv:2402.14740), DAPO (arXiv:2503.14476) and GSPO
(arXiv:2507.18071). The clipped surrogate is PPO's (arXiv:1707.06347).

Each prompt gets N rollouts. A rollout's advantage is its reward minus a baseline b computed from its own group.
The loss is PPO's surrogate, summed over every token the policy wrote and divided by one number that the caller
chooses beforehand:

    A_{g,i} = (R_{g,i} − b_{g,i}) / s_g                                                                (1)
    ρ_t     = π(o_t | o_<t) / μ(o_t | o_<t)                                                            (2)
    L       = −(1/budget) Σ_{b,t} w_{b,t} · min(ρ_t A_b, clip(ρ_t, 1 − clip_low, 1 + clip_high) A_b)   (3)

             baseline b          s_g   ratio ρ          weight w          clip −, +    budget counts
    dr_grpo  mean of the group   1     of the token     1                 0.2,  0.2    rollouts × longest
    grpo     mean of the group   std   of the token     1 / own length    0.2,  0.2    rollouts
    rloo     mean of the others  1     of the token     1                 0.2,  0.2    rollouts × longest
    dapo     mean of the group   std   of the token     1; 0 if cut off   0.2,  0.28   tokens
    gspo     mean of the group   std   geometric mean   1 / own length    3e-4, 4e-4   rollouts

What others do and Dr. GRPO does not, and why
a. No division by the rollout's own length. It looks like a harmless mean, but it rewards each token of a short
   right answer more than one of a long right answer, and penalises each token of a long wrong answer less, so
   wrong answers get longer. The result is no longer a gradient of the expected reward.
b. No division by the group's standard deviation. If nearly every rollout of a group is right, the deviation is
   tiny, and a small difference in behaviour (a length penalty, say) is scaled up to full size.
c. No mask on overlong rollouts (DAPO's idea): the policy produced them, so they count with their reward.

The trap is the denominator. `budget` must be the same number for every micro-batch and every rank of a step:
it counts what the table says over the entire step, where "longest" is the longest *allowed* response. A mean
over a micro-batch's own tokens would weight each token by the batch it landed in, and changing the micro-batch
size would change the gradient. Here the micro-batch gradients add up to the gradient of the full batch.

Where this file departs from the papers
1. Dr. GRPO's mean includes the rollout itself, so the expected gradient is (N − 1)/N times the true one, in the
   right direction. Leave-one-out (RLOO) removes the factor and changes nothing else.
2. The report trains "in a highly asynchronous regime", keeps samples close to on-policy (§4.1, §6.2), and does
   not print its surrogate. ρ with a wide clip is our choice; clip_low = clip_high = inf is plain importance
   sampling, and at ρ = 1 all of these have the same gradient. RLOO's paper uses neither ratio nor clip, and divides
   by the number of rollouts alone; here it has all three from Dr. GRPO, so that only the baseline differs.
3. GRPO: the KL term is left to ref/kl.py, and the clip is PPO's usual one. "std" is always the sample standard
   deviation, with N − 1 under the root, plus `eps`.
4. DAPO: resampling groups with equal rewards, and the penalty for nearly overlong answers, are left to the
   sampler and the reward; the loop in ref/rl.py has neither. A group with equal rewards has A = 0, and its tokens
   still count in the budget. DAPO's formula counts the tokens of one prompt; here all tokens of the step are
   counted. Truncated rollouts still count in their group's mean and deviation.
5. GSPO: `policy_loss` has the plain sequence surrogate. The loop in ref/rl.py sees a rollout in several
   micro-batches and takes the gradient token by token, as GSPO-token does; with one advantage for all tokens of a
   rollout, value and gradient are the same.
6. The clip acts on log ρ, where it is the same function, so a ratio that overflows on the clipped side cannot
   turn into 0 · inf = NaN in the backward pass. Where A = 0 the term is 0 for any ρ, so we use ρ = 1.
7. The mean is computed relative to the group's first reward. A group of equal rewards then has advantages of
   exactly zero (in float64 the plain mean of three 0.1s is not 0.1), and neither Adam nor a division by the
   deviation turns 1e-17 into a full step.

Run it
    etude run dr-grpo --scale small      a few seconds; the same as: python -m ref.dr_grpo
    etude figure grpo-bias               what the divisions do to gradient and length
    etude run dr-grpo --scale full       scaled/dr_grpo.py

Glossary
    symbol       variable        shape    where
    R            rewards         [G, N]   one number per rollout, N rollouts for each of G prompts
    A            advantages      [B]      (1); B = G·N rows once flattened
    log π(o_t)   logp            [B, T]   nats, with gradient
    log μ(o_t)   behavior_logp   [B, T]   nats, as recorded when the token was sampled; a constant
    mask         mask            [B, T]   true on tokens the policy wrote; false on prompt, tool output, padding
    log ρ        log_ratio       [B, T]   (2); for GSPO the mean over the rollout's tokens, repeated at each token
    w            weight          [B, T]   (3), zero wherever the mask is zero
    1/budget     budget          scalar   (3), global
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from ref.checks import expect, expect_choice, expect_positive, refuse

__all__ = ["FAMILY", "Variant", "family_loss", "group_advantages", "policy_loss", "ratio_statistics"]


OVERFLOW_MESSAGE = "rewards of a group must be close enough together that their mean and deviation do not overflow"


def group_advantages(
    rewards: Float[Tensor, "G N"], *, baseline: str = "mean", scale: str = "none", eps: float = 1e-6
) -> Float[Tensor, "G N"]:
    """(1): reward minus baseline, in the rewards' own unit; with scale "std", divided by the group's standard
    deviation plus `eps`. Equal rewards give exact zeros. Computed in float32 or wider; the deviation's squares
    in float64.

    Raises ValueError for a baseline or scale that `Variant` does not know; for rewards that are not finite, not
    floating point, or so far apart that their group's mean or deviation overflows; for eps ≤ 0; for N = 0; and
    for N = 1 if the baseline or the scale needs other rollouts.
    """
    expect_choice("baseline", baseline, "mean", "leave_one_out")
    expect_choice("scale", scale, "none", "std")
    expect_positive("eps", eps)
    expect("rewards", rewards, "float", "G", "N")
    N, min_rollouts = rewards.shape[1], 1 if (baseline, scale) == ("mean", "none") else 2
    if N < min_rollouts:
        raise ValueError(f"rewards must be [G, N] with N ≥ {min_rollouts} for {baseline}, {scale}; got N = {N}")
    refuse("rewards must be finite", ~rewards.isfinite().all(1))
    wide = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
    relative = wide - wide[:, :1]
    centred = relative - relative.mean(1, keepdim=True)  # Eq. 1: R − b, b the mean of the group
    # R_i − mean of the others = N/(N − 1) · (R_i − mean of all)
    advantages = centred * (N / (N - 1)) if baseline == "leave_one_out" else centred
    if scale == "std":
        variance = centred.double().square().sum(1, keepdim=True) / (N - 1)  # s_g²: the sample variance
        advantages = (advantages / (variance.sqrt() + eps)).to(wide.dtype)  # Eq. 1: A = (R − b) / s_g
        refuse(OVERFLOW_MESSAGE, ~variance.isfinite().all(1))
    refuse(OVERFLOW_MESSAGE, ~advantages.isfinite().all(1))
    return advantages


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
    """The loss (3), a scalar to minimise: −Σ w · min(ρA, clip(ρ)A) / budget. Defaults are Dr. GRPO's.

    Gradients flow through `logp` only. `mask` is boolean, or a weight per token. Where it is zero, and in
    rows where `keep` is false, the other arguments may hold anything, NaN and inf included, and contribute
    exactly nothing to the value or the gradient. The other options are `Variant`'s; `clip_low` or `clip_high` =
    inf disables that side of the clip.
    Raises ValueError unless budget > 0 and the clips ≥ 0; for other shapes or dtypes; for log-probs, advantages
    or weights that count but are not finite; and for kept rows without tokens if ρ or w averages over them.
    """
    expect_positive("budget", budget)
    expect_choice("length", length, "none", "rollout")
    log_ratio, advantage, weight = select_tokens(logp, behavior_logp, advantages, mask, ratio, keep)
    if length == "rollout":
        weight = weight / _count_tokens(mask, keep)  # w = 1 / own length
    # Eq. 3: min(ρA, clip(ρ)A)
    surrogate = torch.exp(clip_log_ratio(log_ratio, advantage, clip_low, clip_high)) * advantage
    return -(weight * surrogate).sum() / budget  # Eq. 3: −(1/budget) Σ w · surrogate


@dataclass(frozen=True)
class Variant:
    """One member of the family; the defaults are Dr. GRPO."""

    baseline: str = "mean"
    """Subtracted from each reward: the group's "mean", or "leave_one_out", the mean of the other rollouts."""
    scale: str = "none"
    """Divisor of a group's advantages: "none", or "std", the standard deviation of its rewards."""
    ratio: str = "token"
    """ρ: one per "token", or one per "sequence", the geometric mean over the rollout's tokens."""
    length: str = "none"
    """Divisor of a token's weight: "none", or "rollout", the number of tokens in its rollout."""
    clip_low: float = 0.2
    """Where A < 0, the gradient stops once ρ falls below 1 − clip_low."""
    clip_high: float = 0.2
    """Where A > 0, the gradient stops once ρ rises above 1 + clip_high."""
    drop_overlong: bool = False
    """Whether rollouts cut off by the length limit get weight zero."""
    divisor: str = "constant"
    """What the budget counts: "rollouts", "tokens", or rollouts times a "constant", the longest allowed response."""

    def token_weights(self, lengths: Int[Tensor, " B"], finished: Bool[Tensor, " B"]) -> Float[Tensor, " B"]:
        """w in (3), in float64, of each token of a rollout that has so many tokens in all. It is the mask's weight
        for a loss that sees rollouts in parts, and then stands for `length` and `keep` of `policy_loss`."""
        weights = torch.ones_like(lengths, dtype=torch.float64)
        if self.length == "rollout":
            weights = weights / lengths.clamp(min=1)  # w = 1 / own length
        return weights.where(finished, 0) if self.drop_overlong else weights

    def budget(self, rollouts: int, tokens: int, longest: int) -> float:
        """The budget (3) of a step with so many rollouts and tokens of the policy."""
        return float({"constant": rollouts * longest, "rollouts": rollouts, "tokens": tokens}[self.divisor])


FAMILY = {
    "dr_grpo": Variant(),
    "grpo": Variant(scale="std", length="rollout", divisor="rollouts"),
    "rloo": Variant(baseline="leave_one_out"),
    "dapo": Variant(scale="std", clip_high=0.28, drop_overlong=True, divisor="tokens"),
    "gspo": Variant(scale="std", ratio="sequence", length="rollout", clip_low=3e-4, clip_high=4e-4, divisor="rollouts"),
}


def family_loss(
    variant: Variant,
    logp: Float[Tensor, "B T"],
    behavior_logp: Float[Tensor, "B T"],
    rewards: Float[Tensor, "G N"],
    mask: Shaped[Tensor, "B T"],
    *,
    budget: int | float,
    finished: Bool[Tensor, " B"] | None = None,
) -> Float[Tensor, ""]:
    """The loss (3) of a variant on complete groups: row g·N + i is rollout i of group g, so B = G·N.

    `budget` is global and counts what the table above says. `finished` is false where the length limit cut a
    rollout off; only variants that drop such rollouts use it. Raises ValueError as `group_advantages` and
    `policy_loss` do, and also if B is not G·N or the mask is zero everywhere.
    """
    advantages = group_advantages(rewards, baseline=variant.baseline, scale=variant.scale).flatten()
    expect("logp", logp, "float", len(advantages), "T")
    expect("mask", mask, "any", *logp.shape)
    if not bool((mask != 0).any()):
        raise ValueError(f"mask must be nonzero somewhere; got shape {list(mask.shape)} without a single policy token")
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
    """How far π has moved from μ on these tokens: sums over the mask divided by the global `n_tokens`.

    `mean_ratio`: one in expectation if μ's log-probs are right. `clip_fraction`: share of tokens whose gradient
    the clip removes. `approx_kl`: k3 estimate of KL(μ‖π) in nats, since the samples are μ's; with the "sequence"
    ratio, a mean, it does not estimate the KL. No gradient. Raises ValueError as `policy_loss` does.
    """
    expect_positive("n_tokens", n_tokens)
    with torch.no_grad():
        log_ratio, advantage, weight = select_tokens(logp, behavior_logp, advantages, mask, ratio, None)
        is_clipped = clip_log_ratio(log_ratio, advantage, clip_low, clip_high) != log_ratio
        return {
            "mean_ratio": (weight * log_ratio.exp()).sum() / n_tokens,  # mean of ρ
            # share of tokens that Eq. 3 clips
            "clip_fraction": (weight * (is_clipped & (advantage != 0))).sum() / n_tokens,
            "approx_kl": (weight * (torch.expm1(log_ratio) - log_ratio)).sum() / n_tokens,  # k3 = (ρ − 1) − log ρ
        }


def select_tokens(
    logp: Tensor, behavior_logp: Tensor, advantages: Tensor, mask: Tensor, ratio: str, keep: Tensor | None
) -> tuple[Tensor, ...]:
    """log ρ, A and the mask's weight for every token, in float32 or wider; zero on tokens that do not count.

    Tokens are selected before any arithmetic: NaN · 0 is NaN, in the backward pass too, so multiplying by the
    mask is not enough.
    """
    expect_choice("ratio", ratio, "token", "sequence")
    expect("logp", logp, "float", "B", "T")
    expect("behavior_logp", behavior_logp, "float", *logp.shape)
    expect("advantages", advantages, "float", len(logp))
    expect("mask", mask, "any", *logp.shape)
    is_counted = mask != 0
    if keep is not None:
        expect("keep", keep, "bool", len(logp))
        is_counted = is_counted & keep[:, None]
    inputs = {"logp": logp, "behavior_logp": behavior_logp, "advantages": advantages[:, None], "mask": mask}
    for name, x in inputs.items():
        refuse(f"{name} must be finite where the mask counts", (is_counted & ~x.isfinite()).any(1))
    wide = torch.promote_types(logp.dtype, torch.float32)
    log_ratio = (logp.to(wide) - behavior_logp.detach().to(wide)).where(is_counted, 0)  # Eq. 2: log ρ = log π − log μ
    if ratio == "sequence":
        # GSPO: log of the geometric mean of the rollout's ratios
        log_ratio = (log_ratio.sum(1, keepdim=True) / _count_tokens(mask, keep)).where(is_counted, 0)
    return log_ratio, advantages.detach().to(wide)[:, None].where(is_counted, 0), mask.to(wide).where(is_counted, 0)


def _count_tokens(mask: Tensor, keep: Tensor | None) -> Tensor:
    """Number of tokens in each rollout, [B, 1]."""
    count = (mask != 0).sum(1)
    is_empty = (count == 0) if keep is None else (count == 0) & keep
    refuse("mask must be nonzero somewhere in each row", is_empty)
    return count.clamp(min=1)[:, None]


def clip_log_ratio(log_ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """log of the ratio that min(ρA, clip(ρ)A) picks: ≤ 1 + clip_high for A > 0, ≥ 1 − clip_low for A < 0, and
    1 for A = 0, where an overflowing ρ would make ρA = NaN."""
    if not (clip_low >= 0 and clip_high >= 0):
        raise ValueError(f"clip_low and clip_high must not be negative; got {clip_low} and {clip_high}")
    log_low = math.log1p(-clip_low) if clip_low < 1 else -math.inf
    # Eq. 3: clipped from above where A > 0, from below where A < 0
    min_log_ratio = torch.where(advantage > 0, log_ratio.clamp(max=math.log1p(clip_high)), log_ratio.clamp(min=log_low))
    return min_log_ratio.where(advantage != 0, 0)  # ρ = 1 where A = 0


@dataclass(frozen=True)
class Demo:
    """A policy over short words, small enough to enumerate, trained on an easy prompt and a hard one."""

    letters: int = 3
    """Letters of the alphabet; one more symbol ends the word."""
    length: int = 4
    """Longest word."""
    groups: int = 8
    """G: groups per step, half of them for each prompt."""
    rollouts: int = 4
    """N: rollouts per group."""
    price: float = 0.02
    """Subtracted from the reward for every symbol written."""
    gradient_samples: int = 60_000
    """Rollouts behind each gradient that is compared with the exact one."""
    steps: int = 150
    """Optimiser steps."""
    lr: float = 0.05
    """Adam's learning rate."""
    seed: int = 0
    """Seed of the initial weights and of sampling."""


def _list_words(letters: int, length: int) -> tuple[Tensor, Tensor]:
    """All words [W, T] (symbol `letters` ends a word and pads the rest) and their masks [W, T], which include the end
    symbol."""
    rows = []
    for n in range(length + 1):
        rows += [word + (letters,) * (length - n) for word in itertools.product(range(letters), repeat=n)]
    words = torch.tensor(rows)
    return words, (words == letters).cumsum(1) <= 1


def _word_logp(logits: Tensor, words: Tensor) -> Tensor:
    """log π of each symbol [P, W, T] under logits [P, T, previous, symbol]; a word starts after an end."""
    previous = torch.cat([torch.full_like(words[:, :1], logits.shape[-1] - 1), words[:, :-1]], 1)
    return logits.log_softmax(-1)[:, torch.arange(words.shape[1]), previous, words]


def demo(config: Demo = Demo(), log: Callable[..., None] = lambda *_, **__: None) -> dict[str, float]:
    """Compare sampled gradients with the exact one, then train with Dr. GRPO.

    The easy prompt accepts every word; the hard one requires both of the first two letters. Each symbol costs
    `price`. A word without an end symbol was cut off.
    Returns the exact expected reward before and after training. For each member of FAMILY, and for Dr. GRPO with
    one division added, it also returns the cosine between the mean of many sampled gradients and the true one,
    its scale, and the easy prompt's part of it (truth = 1). All use the same rollouts and a budget that counts
    rollouts.
    """
    generator = torch.Generator().manual_seed(config.seed)
    words, mask = _list_words(config.letters, config.length)
    is_hard = (words == 0).any(1) & (words == 1).any(1)
    reward = torch.stack([torch.ones_like(is_hard), is_hard]).double() - config.price * mask.sum(1).double()
    finished = (words == config.letters).any(1)
    shape = (2, config.length, config.letters + 1, config.letters + 1)
    logits = torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()

    def expected_reward() -> Tensor:
        return ((_word_logp(logits, words) * mask).sum(2).exp() * reward).sum(1).mean()

    def sample(groups: int) -> Tensor:
        probs = (_word_logp(logits.detach(), words) * mask).sum(2).exp()
        return torch.multinomial(probs, groups // 2 * config.rollouts, replacement=True, generator=generator)

    def loss(variant: Variant, indices: Tensor) -> Tensor:
        word_logp, rows = _word_logp(logits, words)[torch.arange(2)[:, None], indices].flatten(0, 1), indices.flatten()
        rewards = reward.gather(1, indices).view(-1, config.rollouts)
        options = {"budget": len(rows), "finished": finished[rows]}
        return family_loss(variant, word_logp, word_logp.detach(), rewards, mask[rows], **options)

    divisions = {"length_division": Variant(length="rollout"), "std_division": Variant(scale="std")}
    initial_reward, indices = expected_reward(), sample(config.gradient_samples // config.rollouts)
    (exact,) = torch.autograd.grad(initial_reward, logits)
    metrics = {"reward_before": initial_reward.item()}
    for name, variant in (FAMILY | divisions).items():
        (gradient,) = torch.autograd.grad(-loss(variant, indices), logits)
        metrics[f"gradient_cosine_{name}"] = ((gradient * exact).sum() / (gradient.norm() * exact.norm())).item()
        metrics[f"gradient_scale_{name}"] = ((gradient * exact).sum() / exact.square().sum()).item()
        metrics[f"easy_share_{name}"] = (gradient[0].norm() / gradient.norm() / (exact[0].norm() / exact.norm())).item()
    optimizer = torch.optim.Adam([logits], lr=config.lr)
    for step in range(1, config.steps + 1):
        optimizer.zero_grad()
        loss(FAMILY["dr_grpo"], sample(config.groups)).backward()
        optimizer.step()
        log(step, config.steps, reward=expected_reward().item())
    return metrics | {"reward_after": expected_reward().item(), "reward_best": reward.amax(1).mean().item()}


if __name__ == "__main__":
    print(demo())
