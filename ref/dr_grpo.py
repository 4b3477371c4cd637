"""Dr. GRPO: policy gradients from groups of rollouts, without the two normalisations that bias them. Beside
it the rest of the family, each member the difference of a few words.

Papers: Composer 2 technical report (arXiv:2603.24477v2), §4.1; Dr. GRPO (arXiv:2503.20783), §3, the default
here. For comparison GRPO (arXiv:2402.03300), RLOO (arXiv:2402.14740), DAPO (arXiv:2503.14476) and GSPO
(arXiv:2507.18071). The clipped surrogate is PPO's (arXiv:1707.06347).

A prompt gets N rollouts. A rollout's advantage is its reward minus a baseline b that its own group gives. The
loss is PPO's surrogate, summed over every token the policy wrote and divided by one number that the caller
chose beforehand:

    A_{g,i} = (R_{g,i} − b_{g,i}) / s_g                                                                (1)
    ρ_t     = π(o_t | o_<t) / μ(o_t | o_<t)                                                            (2)
    L       = −(1/budget) Σ_{b,t} w_{b,t} · min(ρ_t A_b, clip(ρ_t, 1 − clip_low, 1 + clip_high) A_b)   (3)

             baseline b          s_g   ratio ρ          weight w          clip −, +    budget counts
    dr_grpo  mean of the group   1     of the token     1                 0.2,  0.2    rollouts × longest
    grpo     mean of the group   std   of the token     1 / own length    0.2,  0.2    rollouts
    rloo     mean of the others  1     of the token     1                 0.2,  0.2    rollouts
    dapo     mean of the group   std   of the token     1; 0 if cut off   0.2,  0.28   tokens
    gspo     mean of the group   std   geometric mean   1 / own length    3e-4, 4e-4   rollouts

What others do and Dr. GRPO does not, and why
a. No division by the rollout's own length. It looks like a harmless mean, but it pays a short right answer
   more per token than a long one and blames a long wrong answer less, so wrong answers grow. The gradient is
   then no gradient of the expected reward.
b. No division by the group's standard deviation. In a group where nearly every rollout is right, the
   deviation is tiny and a small difference in behaviour (a length penalty, say) is blown up to full size.
c. Overlong rollouts are not masked (DAPO's idea): they are what the policy did, and get what they earned.

The trap is the denominator. `budget` must be the same number for every micro-batch and every rank of a step:
it counts what the table says over the whole step, "longest" being the longest *allowed* response. A mean over
this micro-batch's own tokens would weigh tokens by their company; then changing the micro-batch size changes
the gradient. Here gradients of micro-batches add up to the gradient of the whole.

Where this file departs from the papers
1. Dr. GRPO's mean includes the rollout itself; so the expected gradient is (N − 1)/N times the true one, its
   direction right. Leave-one-out, RLOO, removes the factor, and nothing else.
2. The report trains "in a highly asynchronous regime", keeps samples close to on-policy (§4.1, §6.2), and does
   not print its surrogate. ρ with a wide clip is our choice; clip_low = clip_high = inf is plain importance
   sampling, and at ρ = 1 all of these have the same gradient. RLOO's paper has neither ratio nor clip; here
   both, so that only the baseline differs.
3. GRPO: the KL term is left to ref/kl.py, and the clip is PPO's usual one. "std" is everywhere the sample's,
   with N − 1 under the root, and `eps` added.
4. DAPO: drawing again where all rewards are equal, and the penalty for nearly overlong answers, are left to
   whoever samples and rewards. Its formula counts the tokens of one prompt, here the step's are counted. What
   was cut off still counts in its group's mean and deviation.
5. GSPO: the plain sequence surrogate; GSPO-token, with its stop-gradient, is left out.
6. The clip acts on log ρ, where it is the same function, so a ratio that overflows on the clipped side cannot
   turn into 0 · inf = NaN in the backward pass. Where A = 0 the term is 0 whatever ρ is, and ρ = 1 is taken.
7. The mean is taken relative to the group's first reward: a group of equal rewards then has advantage zero
   exactly, whatever the rounding (in float64 the plain mean of three 0.1s is not 0.1), and neither Adam nor a
   division by the deviation turns 1e-17 into a full step.

Run it
    etude run dr-grpo --scale small      a few seconds; the same as: python -m ref.dr_grpo
    etude figure grpo-bias               what the divisions do to gradient and length
    etude run dr-grpo --scale full       scaled/dr_grpo.py, or a clear answer while that does not exist

Glossary
    symbol       variable        shape    where
    R            rewards         [G, N]   one number per rollout, N rollouts for each of G prompts
    A            advantages      [B]      (1); B = G·N rows once flattened
    log π(o_t)   logp            [B, T]   nats, with gradient
    log μ(o_t)   behavior_logp   [B, T]   nats, as recorded when the token was sampled; a constant
    mask         mask            [B, T]   true where the policy wrote; not on prompt, tool output, padding
    log ρ        log_ratio       [B, T]   (2); for GSPO the mean over the rollout's tokens, at each of them
    w            weight          [B, T]   (3), zero wherever the mask is
    1/budget     budget          scalar   (3), global
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from ref.checks import expect, expect_choice, expect_positive, refuse

__all__ = ["FAMILY", "Variant", "family_loss", "group_advantages", "policy_loss", "ratio_statistics"]


TOO_FAR_APART = "rewards of a group must be near enough to one another for its mean and deviation not to overflow"


def group_advantages(rewards: Float[Tensor, "G N"], *, baseline: str = "mean", scale: str = "none", eps: float = 1e-6) -> Float[Tensor, "G N"]:
    """(1): reward minus baseline, in the rewards' own unit; with scale "std" in standard deviations of the
    group, to which `eps` is added. Equal rewards give exact zeros. In float32 or wider, the deviation's squares
    in float64.

    Raises ValueError for a baseline or scale that `Variant` does not know, rewards that are not finite, not
    floating point, or so far apart that their group's mean or deviation overflows, eps ≤ 0, and N = 0; N = 1
    too, if there must be others or a deviation.
    """
    expect_choice("baseline", baseline, "mean", "leave_one_out")
    expect_choice("scale", scale, "none", "std")
    expect_positive("eps", eps)
    expect("rewards", rewards, "float", "G", "N")
    N, least = rewards.shape[1], 1 if (baseline, scale) == ("mean", "none") else 2
    if N < least:
        raise ValueError(f"rewards must be [G, N] with N ≥ {least} for {baseline}, {scale}; got N = {N}")
    refuse("rewards must be finite", ~rewards.isfinite().all(1))
    wide = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
    relative = wide - wide[:, :1]
    centred = relative - relative.mean(1, keepdim=True)
    # R_i − mean of the others = N/(N − 1) · (R_i − mean of all)
    advantages = centred * (N / (N - 1)) if baseline == "leave_one_out" else centred
    if scale == "std":
        variance = centred.double().square().sum(1, keepdim=True) / (N - 1)
        advantages = (advantages / (variance.sqrt() + eps)).to(wide.dtype)
        refuse(TOO_FAR_APART, ~variance.isfinite().all(1))
    refuse(TOO_FAR_APART, ~advantages.isfinite().all(1))
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

    Gradient flows through `logp` only. `mask` is boolean, or a weight per token. Where it is zero, and in
    rows where `keep` is false, the other arguments may hold anything, NaN and inf included, and contribute
    exactly nothing to value and gradient. The other options are `Variant`'s; `clip_low` or `clip_high` = inf
    takes that side of the clip away.
    Raises ValueError unless budget > 0 and the clips ≥ 0; for other shapes or dtypes; for log-probs,
    advantages or weights not finite where they count; for kept rows without tokens if ρ or w averages over
    them.
    """
    expect_positive("budget", budget)
    expect_choice("length", length, "none", "rollout")
    log_ratio, advantage, weight = selected(logp, behavior_logp, advantages, mask, ratio, keep)
    if length == "rollout":
        weight = weight / _tokens(mask, keep)
    surrogate = torch.exp(pessimistic(log_ratio, advantage, clip_low, clip_high)) * advantage
    return -(weight * surrogate).sum() / budget


@dataclass(frozen=True)
class Variant:
    """One member of the family; the defaults are Dr. GRPO."""

    baseline: str = "mean"
    """Taken from each reward: the group's "mean", or "leave_one_out", the mean of its other rollouts."""
    scale: str = "none"
    """What divides a group's advantages: "none", or "std", their standard deviation."""
    ratio: str = "token"
    """ρ: of each "token", or one for the "sequence", the geometric mean over the rollout's tokens."""
    length: str = "none"
    """What divides a token's weight: "none", or "rollout", the number of tokens in its rollout."""
    clip_low: float = 0.2
    """Where A < 0, ρ below 1 − clip_low no longer counts."""
    clip_high: float = 0.2
    """Where A > 0, ρ above 1 + clip_high no longer counts."""
    drop_overlong: bool = False
    """Whether rollouts that the length limit cut off weigh nothing."""


FAMILY = {
    "dr_grpo": Variant(),
    "grpo": Variant(scale="std", length="rollout"),
    "rloo": Variant(baseline="leave_one_out"),
    "dapo": Variant(scale="std", clip_high=0.28, drop_overlong=True),
    "gspo": Variant(scale="std", ratio="sequence", length="rollout", clip_low=3e-4, clip_high=4e-4),
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
    """The loss (3) of a variant on whole groups: row g·N + i is rollout i of group g, so B = G·N.

    `budget` is global and counts what the table above says. `finished` is false where the length limit cut a
    rollout off; a variant that drops those needs it, the others ignore it. Raises ValueError as
    `group_advantages` and `policy_loss` do, for B other than G·N, and for a mask that is zero everywhere.
    """
    advantages = group_advantages(rewards, baseline=variant.baseline, scale=variant.scale).flatten()
    expect("logp", logp, "float", len(advantages), "T")
    expect("mask", mask, "any", *logp.shape)
    if not bool((mask != 0).any()):
        raise ValueError(f"mask must be nonzero somewhere; got {list(mask.shape)} without a token of the policy")
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
    """How far π has moved from μ on these tokens, as sums over the mask divided by the global `n_tokens`.

    `mean_ratio` (one in expectation, if μ's log-probs are right), `clip_fraction` (tokens whose gradient the
    clip removes), `approx_kl` (k3 estimate of KL(μ‖π), nats: here the samples are μ's; no estimate of it for
    the ratio of a "sequence", a mean). No gradient. Raises ValueError as `policy_loss` does.
    """
    expect_positive("n_tokens", n_tokens)
    with torch.no_grad():
        log_ratio, advantage, weight = selected(logp, behavior_logp, advantages, mask, ratio, None)
        clipped = pessimistic(log_ratio, advantage, clip_low, clip_high) != log_ratio
        return {
            "mean_ratio": (weight * log_ratio.exp()).sum() / n_tokens,
            "clip_fraction": (weight * (clipped & (advantage != 0))).sum() / n_tokens,
            "approx_kl": (weight * (torch.expm1(log_ratio) - log_ratio)).sum() / n_tokens,
        }


def selected(logp: Tensor, behavior_logp: Tensor, advantages: Tensor, mask: Tensor, ratio: str, keep: Tensor | None) -> tuple[Tensor, ...]:
    """log ρ, A and the mask's weight of every token, float32 or wider, zero wherever nothing counts.

    Selected before any arithmetic: NaN · 0 is NaN, in the backward pass too, so multiplying by the mask is
    not enough.
    """
    expect_choice("ratio", ratio, "token", "sequence")
    expect("logp", logp, "float", "B", "T")
    expect("behavior_logp", behavior_logp, "float", *logp.shape)
    expect("advantages", advantages, "float", len(logp))
    expect("mask", mask, "any", *logp.shape)
    live = mask != 0
    if keep is not None:
        expect("keep", keep, "bool", len(logp))
        live = live & keep[:, None]
    counted = {"logp": logp, "behavior_logp": behavior_logp, "advantages": advantages[:, None], "mask": mask}
    for name, x in counted.items():
        refuse(f"{name} must be finite where the mask counts", (live & ~x.isfinite()).any(1))
    wide = torch.promote_types(logp.dtype, torch.float32)
    log_ratio = (logp.to(wide) - behavior_logp.detach().to(wide)).where(live, 0)
    if ratio == "sequence":
        log_ratio = (log_ratio.sum(1, keepdim=True) / _tokens(mask, keep)).where(live, 0)
    return log_ratio, advantages.detach().to(wide)[:, None].where(live, 0), mask.to(wide).where(live, 0)


def _tokens(mask: Tensor, keep: Tensor | None) -> Tensor:
    """Number of tokens in each rollout, [B, 1]."""
    count = (mask != 0).sum(1)
    empty = (count == 0) if keep is None else (count == 0) & keep
    refuse("mask must be nonzero somewhere in each row", empty)
    return count.clamp(min=1)[:, None]


def pessimistic(log_ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """log of the ratio that min(ρA, clip(ρ)A) picks: ≤ 1 + clip_high for A > 0, ≥ 1 − clip_low for A < 0; of
    1 for A = 0, where a ρ that overflows would make ρA = NaN."""
    if not (clip_low >= 0 and clip_high >= 0):
        raise ValueError(f"clip_low and clip_high must not be negative; got {clip_low} and {clip_high}")
    floor = math.log1p(-clip_low) if clip_low < 1 else -math.inf
    picked = torch.where(advantage > 0, log_ratio.clamp(max=math.log1p(clip_high)), log_ratio.clamp(min=floor))
    return picked.where(advantage != 0, 0)


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
    """Taken from the reward for every symbol written."""
    gradient_samples: int = 60_000
    """Rollouts behind each of the gradients that are compared with the exact one."""
    steps: int = 150
    """Optimiser steps."""
    lr: float = 0.05
    """Adam's learning rate."""
    seed: int = 0
    """Seed of initial weights and of sampling."""


def _words(letters: int, length: int) -> tuple[Tensor, Tensor]:
    """All words [W, T] (symbol `letters` ends one and pads the rest) and masks [W, T], the end included."""
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

    The easy prompt accepts every word, the hard one wants the first two letters both; each symbol costs
    `price`; a word without its end was cut off.
    Returns the exact expected reward before and after; and for FAMILY and for Dr. GRPO with either division
    alone, all on the same rollouts and with a budget that counts rollouts: the cosine between the mean of
    many sampled gradients and the true one, its scale, how large the easy prompt's part is (truth = 1).
    """
    generator = torch.Generator().manual_seed(config.seed)
    words, mask = _words(config.letters, config.length)
    hard = (words == 0).any(1) & (words == 1).any(1)
    reward = torch.stack([torch.ones_like(hard), hard]).double() - config.price * mask.sum(1).double()
    finished = (words == config.letters).any(1)
    shape = (2, config.length, config.letters + 1, config.letters + 1)
    logits = torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()

    def expected_reward() -> Tensor:
        return ((_word_logp(logits, words) * mask).sum(2).exp() * reward).sum(1).mean()

    def sample(groups: int) -> Tensor:
        probs = (_word_logp(logits.detach(), words) * mask).sum(2).exp()
        return torch.multinomial(probs, groups // 2 * config.rollouts, replacement=True, generator=generator)

    def loss(variant: Variant, pick: Tensor) -> Tensor:
        chosen, rows = _word_logp(logits, words)[torch.arange(2)[:, None], pick].flatten(0, 1), pick.flatten()
        rewards = reward.gather(1, pick).view(-1, config.rollouts)
        options = {"budget": len(rows), "finished": finished[rows]}
        return family_loss(variant, chosen, chosen.detach(), rewards, mask[rows], **options)

    divisions = {"length_division": Variant(length="rollout"), "std_division": Variant(scale="std")}
    start, pick = expected_reward(), sample(config.gradient_samples // config.rollouts)
    (exact,) = torch.autograd.grad(start, logits)
    figures = {"reward_before": start.item()}
    for name, variant in (FAMILY | divisions).items():
        (got,) = torch.autograd.grad(-loss(variant, pick), logits)
        figures[f"gradient_cosine_{name}"] = ((got * exact).sum() / (got.norm() * exact.norm())).item()
        figures[f"gradient_scale_{name}"] = ((got * exact).sum() / exact.square().sum()).item()
        figures[f"easy_share_{name}"] = (got[0].norm() / got.norm() / (exact[0].norm() / exact.norm())).item()
    optimizer = torch.optim.Adam([logits], lr=config.lr)
    for step in range(1, config.steps + 1):
        optimizer.zero_grad()
        loss(FAMILY["dr_grpo"], sample(config.groups)).backward()
        optimizer.step()
        log(step, config.steps, reward=expected_reward().item())
    return figures | {"reward_after": expected_reward().item(), "reward_best": reward.amax(1).mean().item()}


if __name__ == "__main__":
    print(demo())
