"""Dr. GRPO: policy gradients from groups of rollouts, without the two normalisations that bias them.

Papers: Composer 2 technical report (arXiv:2603.24477v2), §4.1; Dr. GRPO (arXiv:2503.20783), §3; the clipped
surrogate is PPO's (arXiv:1707.06347), its asymmetric clip DAPO's (arXiv:2503.14476).

A prompt gets N rollouts. A rollout's advantage is its reward minus its group's mean. The loss is PPO's
surrogate, summed over every token the policy wrote and divided by one number that the caller chose
beforehand:

    A_{g,i} = R_{g,i} − mean_j R_{g,j}                                                                 (1)
    ρ_t     = π(o_t | o_<t) / μ(o_t | o_<t)                                                            (2)
    L       = −(1/budget) Σ_{b,t} mask_{b,t} · min(ρ_t A_b, clip(ρ_t, 1 − clip_low, 1 + clip_high) A_b)  (3)

What GRPO does and this does not, and why
a. No division by the rollout's own length. It looks like a harmless mean, but it pays a short right answer
   more per token than a long one and blames a long wrong answer less, so wrong answers grow. The gradient is
   then no gradient of the expected reward.
b. No division by the group's standard deviation. In a group where nearly every rollout is right, the
   deviation is tiny and a small difference in behaviour (a length penalty, say) is blown up to full size.

Overlong rollouts are *not* masked: they are what the policy did, and they get the reward they earned.

The trap is the denominator. `budget` must be the same number for every micro-batch and every rank of a step,
for example rollouts × longest allowed response. A mean over this micro-batch's own tokens would weigh tokens
by their company; then changing the micro-batch size changes the gradient. Here gradients of micro-batches add
up to the gradient of the whole.

Where this file departs from the papers
1. The mean includes the rollout itself, as in (1); so the expected gradient is (N − 1)/N times the true one,
   its direction right. (Leave-one-out, RLOO, removes the factor, and nothing else.)
2. The report is on-policy "as far as possible" and does not print its surrogate. ρ with a wide clip is our
   choice; clip_low = clip_high = inf is plain importance sampling, and at ρ = 1 all of these have the same
   gradient.
3. The clip acts on log ρ, where it is the same function, so a ratio that overflows on the clipped side cannot
   turn into 0 · inf = NaN in the backward pass.
4. The mean is taken relative to the group's first reward: a group of equal rewards then has advantage zero
   exactly, whatever the rounding (in float64 the plain mean of three 0.1s is not 0.1), and Adam does not turn
   1e-17 into a full step.

Run it
    etude run dr_grpo --scale small      a few seconds; the same as: python -m ref.dr_grpo
    etude run dr_grpo --scale full       scaled/dr_grpo.py, or a clear answer while that does not exist

Glossary
    symbol       variable        shape    where
    R            rewards         [G, N]   one number per rollout, N rollouts for each of G prompts
    A            advantages      [B]      (1); B = G·N rows once flattened
    log π(o_t)   logp            [B, T]   nats, with gradient
    log μ(o_t)   behavior_logp   [B, T]   nats, as recorded when the token was sampled; a constant
    mask         mask            [B, T]   true where the policy wrote; not on prompt, tool output, padding
    ρ            ratio           [B, T]   (2)
    1/budget     budget          scalar   (3), global
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

__all__ = ["group_advantages", "policy_loss", "ratio_statistics"]


def group_advantages(rewards: Float[Tensor, "G N"], *, baseline: str = "mean") -> Float[Tensor, "G N"]:
    """Reward minus the group's mean (1), in the rewards' own unit; equal rewards give exact zeros.

    Raises ValueError for a baseline other than "mean".
    """
    if baseline != "mean":
        raise ValueError(f'baseline must be "mean"; got {baseline!r}')
    relative = rewards - rewards[:, :1]
    return relative - relative.mean(1, keepdim=True)


def policy_loss(
    logp: Float[Tensor, "B T"],
    behavior_logp: Float[Tensor, "B T"],
    advantages: Float[Tensor, " B"],
    mask: Shaped[Tensor, "B T"],
    *,
    budget: int | float,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Float[Tensor, ""]:
    """The loss (3), a scalar to minimise: −Σ mask · min(ρA, clip(ρ)A) / budget.

    Gradient flows through `logp` only. `mask` is boolean, or a weight per token. Where it is zero the other
    arguments may hold anything, NaN and inf included, and contribute exactly nothing to value and gradient.
    `clip_low` or `clip_high` = inf takes that side of the clip away. Raises ValueError unless budget > 0.
    """
    if not budget > 0:
        raise ValueError(f"budget is the global denominator and must be positive; got {budget}")
    log_ratio, advantage, weight = _select(logp, behavior_logp, advantages, mask)
    surrogate = torch.exp(_pessimistic(log_ratio, advantage, clip_low, clip_high)) * advantage
    return -(weight * surrogate).sum() / budget


def ratio_statistics(
    logp: Float[Tensor, "B T"],
    behavior_logp: Float[Tensor, "B T"],
    advantages: Float[Tensor, " B"],
    mask: Shaped[Tensor, "B T"],
    *,
    n_tokens: int | float,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> dict[str, Float[Tensor, ""]]:
    """How far π has moved from μ on these tokens, as sums over the mask divided by the global `n_tokens`.

    `mean_ratio` (one in expectation, if μ's log-probs are right), `clip_fraction` (tokens whose gradient the
    clip removes), `approx_kl` (k3 estimate of KL(μ‖π), nats: here the samples are μ's). No gradient.
    """
    with torch.no_grad():
        log_ratio, advantage, weight = _select(logp, behavior_logp, advantages, mask)
        clipped = _pessimistic(log_ratio, advantage, clip_low, clip_high) != log_ratio
        return {
            "mean_ratio": (weight * log_ratio.exp()).sum() / n_tokens,
            "clip_fraction": (weight * (clipped & (advantage != 0))).sum() / n_tokens,
            "approx_kl": (weight * (torch.expm1(log_ratio) - log_ratio)).sum() / n_tokens,
        }


def _select(logp: Tensor, behavior_logp: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """log ρ, A and the weight of every token, float32 or wider, zero wherever the mask is.

    Selected before any arithmetic: NaN · 0 is NaN, in the backward pass too, so multiplying by the mask is
    not enough.
    """
    wide = torch.promote_types(logp.dtype, torch.float32)
    live = mask != 0
    log_ratio = (logp.to(wide) - behavior_logp.detach().to(wide)).where(live, 0)
    return log_ratio, advantages.detach().to(wide)[:, None].where(live, 0), mask.to(wide)


def _pessimistic(log_ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """log of the ratio that min(ρA, clip(ρ)A) picks: ≤ 1 + clip_high for A ≥ 0, ≥ 1 − clip_low for A < 0."""
    floor = math.log1p(-clip_low) if clip_low < 1 else -math.inf
    return torch.where(advantage >= 0, log_ratio.clamp(max=math.log1p(clip_high)), log_ratio.clamp(min=floor))


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
    """Compare sampled gradients with the exact one, then train.

    The easy prompt accepts every word, the hard one wants the first two letters both; each symbol costs
    `price`.
    Returns the exact expected reward before and after, the cosine between the mean of many sampled gradients
    and the true gradient, and how large the easy prompt's part is (truth = 1): for (3), for a division by
    length, by deviation.
    """
    generator = torch.Generator().manual_seed(config.seed)
    words, mask = _words(config.letters, config.length)
    hard = (words == 0).any(1) & (words == 1).any(1)
    reward = torch.stack([torch.ones_like(hard), hard]).double() - config.price * mask.sum(1).double()
    shape = (2, config.length, config.letters + 1, config.letters + 1)
    logits = torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()

    def expected_reward() -> Tensor:
        return ((_word_logp(logits, words) * mask).sum(2).exp() * reward).sum(1).mean()

    def sampled_loss(groups: int, weigh: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Tensor:
        logp = _word_logp(logits, words)
        probs = (logp.detach() * mask).sum(2).exp()
        pick = torch.multinomial(probs, groups // 2 * config.rollouts, replacement=True, generator=generator)
        groups_of_rewards = reward.gather(1, pick).view(-1, config.rollouts)
        advantages, weights = weigh(group_advantages(groups_of_rewards), mask[pick.flatten()].double())
        chosen = logp[torch.arange(2)[:, None], pick].flatten(0, 1)
        return policy_loss(chosen, chosen.detach(), advantages.flatten(), weights, budget=pick.numel())

    variants = {
        "dr_grpo": lambda a, w: (a, w),
        "length_division": lambda a, w: (a, w / w.sum(1, keepdim=True)),
        "std_division": lambda a, w: (a / (a.std(1, keepdim=True) + 1e-6), w),
    }
    start = expected_reward()
    (exact,) = torch.autograd.grad(start, logits)
    figures = {"reward_before": start.item()}
    for name, weigh in variants.items():
        (got,) = torch.autograd.grad(-sampled_loss(config.gradient_samples // config.rollouts, weigh), logits)
        figures[f"gradient_cosine_{name}"] = ((got * exact).sum() / (got.norm() * exact.norm())).item()
        figures[f"gradient_scale_{name}"] = ((got * exact).sum() / exact.square().sum()).item()
        figures[f"easy_share_{name}"] = (got[0].norm() / got.norm() / (exact[0].norm() / exact.norm())).item()
    optimizer = torch.optim.Adam([logits], lr=config.lr)
    for step in range(1, config.steps + 1):
        optimizer.zero_grad()
        sampled_loss(config.groups, variants["dr_grpo"]).backward()
        optimizer.step()
        log(step, config.steps, reward=expected_reward().item())
    return figures | {"reward_after": expected_reward().item(), "reward_best": reward.amax(1).mean().item()}


if __name__ == "__main__":
    print(demo())
