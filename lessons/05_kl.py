# %% [markdown]
# # 5 · KL: three estimates, and two places to put them
#
# **After this lesson you can** say what k1, k2 and k3 estimate and how far each can be trusted; find the divergence at
# which the popular one starts to fail; and say what gradient each of them has in the loss, and in the reward.
#
# *About 40 minutes. Prerequisites: lesson 4. Source: Composer 2 technical report, §4.1 and Figure 4.*
#
# ## The idea
#
# RL moves a policy $\pi$; a reference $\pi_\mathrm{ref}$, usually the policy before RL, says where it came from. How
# far has it gone?
#
# $$\mathrm{KL}(\pi\,\|\,\pi_\mathrm{ref}) = \mathbb E_{x\sim\pi}[-\log r],\qquad r=\frac{\pi_\mathrm{ref}(x)}{\pi(x)}$$
#
# The sum over a vocabulary can be computed, but not the sum over whole texts: those are sampled. With one sample per
# token, three estimates are in use, all due to John Schulman:
#
# $$k_1 = -\log r \qquad k_2 = \tfrac12(\log r)^2 \qquad k_3 = (r-1) - \log r$$
#
# $\mathbb{E}[r] = 1$, so adding $r - 1$ to $k_1$ changes no mean: $k_3$ is as unbiased as $k_1$. And since $\log r \le
# r - 1$, it is never negative. $k_1$, which scatters widely around a small mean, often is.

# %% [markdown]
# **Predict first.** A policy is trained three times: without any KL term, with $k_1$ as a term of the loss, and with
# $k_1$ subtracted from the reward. Without the term it ends at a KL of 3.1 nats. Where do the other two end?

# %%
import math

import matplotlib.pyplot as plt
import torch

from lessons.course import check, quick, run, source
from ref import kl
from sims.kl_variance import experiment as kl_variance

source(kl.token_kl)

# %% [markdown]
# Compare it with the formulas. Two things are easy to miss:
#
# * `expm1(log_ratio) - log_ratio`, not `exp(log_ratio) - 1 - log_ratio`. Near $r = 1$ the second subtracts two numbers
#   that agree in all their digits.
# * −∞ from the reference is allowed: a token that it forbids has an infinite cost. −∞ from the policy is an error: such
#   a token cannot have been sampled.
#
# How much does the short form lose? The exact value near $\log r = \epsilon$ is $\epsilon^2/2 + \dots$

# %%
for size in (1e-1, 1e-2, 1e-3, 1e-4):
    log_ratio = torch.tensor([size])
    short = (log_ratio.exp() - 1 - log_ratio).item()
    careful = kl.token_kl(torch.zeros(1), log_ratio, "k3").item()
    exact = math.expm1(log_ratio.double().item()) - log_ratio.double().item()
    print(f"log r = {size:g}:  short {short:.3e}  careful {careful:.3e}  exact {exact:.3e}")

# %% [markdown]
# ## Bias and variance
#
# Between $\mathcal N(0,1)$ and $\mathcal N(m,1)$ everything has a closed form in $u = m^2$; the KL is $u/2$.
# `gaussian_oracle` computes it:
#
# | | mean | variance |
# |---|---|---|
# | $k_1$ | $u/2$ | $u$ |
# | $k_2$ | $u/2 + u^2/8$ | $u^2/2 + u^3/4$ |
# | $k_3$ | $u/2$ | $e^u - 1 - u$ |
#
# For small $u$, $k_3$'s variance is about $u^2/2$, far below $k_1$'s $u$. But it is exponential.

# %%
for divergence in (0.01, 0.1, 0.5, 0.7, 1.0, 2.0):
    oracle = kl.gaussian_oracle(math.sqrt(2 * divergence))
    print(
        f"KL {divergence:5.2f}:  variance of k1 {oracle['k1'][1]:9.5f}   k2 {oracle['k2'][1]:9.5f}   "
        f"k3 {oracle['k3'][1]:9.5f}"
    )
print(f"k1 and k3 cross at {kl.crossing():.3f} nats")

# %% [markdown]
# The experiment behind the report's Figure 4 samples this, and compares what it finds with the closed forms. Here is
# its first part, with fewer samples than `etude figure kl-variance` takes:

# %%
settings = kl_variance.Experiment(
    divergences=(0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.5), samples=quick(1_000_000, 50_000)
)
rows = run(kl_variance.sampled, settings)
figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
for kind, style in zip(kl.KINDS, ("o-", "s--", "^:")):
    kind_rows = [row for row in rows if row["kind"] == kind]
    axes.plot([row["kl"] for row in kind_rows], [row["variance"] for row in kind_rows], style, label=kind)
axes.axvline(kl.crossing(), color="grey", linewidth=1, label=f"k1 = k3 at {kl.crossing():.3f}")
axes.set(xlabel="KL(π‖π_ref), nats", ylabel="variance of one token, nats²", yscale="log")
axes.legend(frameon=False)
plt.show()
worst = max(abs(row["variance_z"]) for row in rows)
print(f"farthest from its closed form: {worst:.1f} standard errors")

# %% [markdown]
# ## Exercise 1: a mean and a standard error
#
# An estimate without its error is a rumour. Write `estimate(logp, ref_logp, kind)`: the mean of an estimator over
# sampled tokens and the standard error of that mean, as floats. Use `kl.token_kl`.


# %% tags=["exercise"]
def estimate(logp, ref_logp, kind):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_1():
    x = torch.randn(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logp, ref_logp = -x.square() / 2, -(x - 0.6).square() / 2
    for kind in kl.KINDS:
        mean, error = estimate(logp, ref_logp, kind)
        exact, variance = kl.gaussian_oracle(0.6)[kind]
        assert abs(error / math.sqrt(variance / len(x)) - 1) < 0.1, (
            f"{kind}: the standard error should be near {math.sqrt(variance / len(x)):.2e}"
        )
        assert abs(mean - exact) < 5 * error, f"{kind}: the mean should be near {exact:.4f}, not {mean:.4f}"


check(1, check_1)


# %% tags=["solution"] jupyter={"source_hidden": true}
def estimate(logp, ref_logp, kind):
    value = kl.token_kl(logp, ref_logp, kind)
    return value.mean().item(), (value.std() / len(value) ** 0.5).item()


check(1, check_1)

# %% [markdown]
# ## How it breaks: the gradient that is not there
#
# Put $k_1$ into the loss, differentiate it, and the logs look fine: a KL is printed, and it grows. But nothing holds it
# back, because
#
# $$\mathbb{E}_{x\sim\pi}[\nabla k_1] = \mathbb{E}_{x\sim\pi}[\nabla\log\pi(x)] = \nabla \textstyle\sum_x \pi(x) = 0.$$
#
# Here is the exact gradient, summed over a whole vocabulary:

# %%
generator = torch.Generator().manual_seed(0)
logits, reference = torch.randn(2, 32, dtype=torch.float64, generator=generator)
logits.requires_grad_()
(right,) = torch.autograd.grad(kl.exact_kl(logits, reference), logits)
(reverse_gradient,) = torch.autograd.grad(kl.exact_kl(reference, logits), logits)


def expected_gradient(kind):
    """E_{x~π}[∇k], with the samples held fixed: what backward() through the loss gives on average."""
    logp, ref_logp = logits.log_softmax(-1), reference.log_softmax(-1)
    probs = logp.detach().exp()
    (gradient,) = torch.autograd.grad((probs * kl.token_kl(logp, ref_logp, kind)).sum(), logits)
    return gradient


for kind in kl.KINDS:
    gradient = expected_gradient(kind)
    print(
        f"{kind} in the loss: size {gradient.norm() / right.norm():.3f} of ∇KL(π‖ref), off by "
        f"{(gradient - right).norm() / right.norm():.3f}; "
        f"from ∇KL(ref‖π) off by {(gradient - reverse_gradient).norm() / reverse_gradient.norm():.3f}"
    )

# %% [markdown]
# $k_2$, the biased one, is exactly right; $k_3$, the unbiased one, is not: its gradient is that of
# $\mathrm{KL}(\pi_\mathrm{ref}\,\|\,\pi)$. The bias of a *value* says nothing about its gradient.
#
# And in training? A policy of 32 actions learns from sampled rewards and should stay near the reference: with no KL
# term at all, with $k_1$ in the loss, and with $k_1$ subtracted from the reward.


# %%
def trained(placement, beta=1.0, steps=quick(300, 30)):
    """The exact KL after every step of a training with k1 "nowhere", in the "loss" or in the "reward", and the mean k1
    that a log would print."""
    generator = torch.Generator().manual_seed(1)
    pays = torch.randn(32, dtype=torch.float64, generator=generator)
    moving, true, printed = reference.clone().requires_grad_(), [], []
    optimizer = torch.optim.Adam([moving], lr=0.03)
    for _ in range(steps):
        logp = moving.log_softmax(-1)
        x = torch.multinomial(logp.detach().exp(), 256, replacement=True, generator=generator)
        k1, reward = kl.token_kl(logp[x], reference.log_softmax(-1)[x], "k1"), pays[x]
        if placement == "reward":
            reward = reward - beta * k1.detach()
        loss = -((reward - reward.mean()) * logp[x]).mean() + (beta * k1.mean() if placement == "loss" else 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        true.append(kl.exact_kl(moving.detach(), reference).item())
        printed.append(k1.mean().item())
    return true, printed


figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
for placement, style, width in (("nowhere", "-", 4), ("loss", "--", 1.5), ("reward", "-.", 1.5)):
    true, printed = trained(placement)
    axes.plot(
        true, style, linewidth=width, label=f"k1 {placement}" if placement == "nowhere" else f"k1 in the {placement}"
    )
    print(f"k1 {placement:>7}: at the end KL {true[-1]:.3f} nats, and the log says {printed[-1]:.3f}")
axes.set(xlabel="step", ylabel="KL(π‖π_ref), nats")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# **Your prediction:** $k_1$ in the loss ends at 3.0 nats, as if it were not there; $k_1$ in the reward ends at 0.5.
#
# In the loss, $k_1$ might as well not be there, and the log faithfully prints the KL as it grows. In the reward, it
# works.
#
# There is one more limit. All of this was one draw from one distribution. A text is many draws, and each token decides
# what the later ones are drawn from. Here sequences of four symbols are enumerated, and each rule is compared with the
# gradient of the KL between whole *sequences*:

# %%
for name, values in kl_variance.gradients_of_sequences(settings).items():
    print(f"{name:<50}: off by {min(values):.3f} to {max(values):.3f} of its size")

# %% [markdown]
# As a loss, $k_2$ is no longer right: it moves each token's own distribution and misses what the token does to the
# states that follow. $k_1$ in the reward is right if every token is charged the $k_1$ of the whole rollout (or of what
# follows), and wrong if it is charged only its own.
#
# ## Exercise 2: where k1 belongs
#
# $k_1$ is right in the reward, as a number that no gradient passes through. Write, for the distributions above, the
# *expected* gradient of the loss that a reward of $-k_1$ gives, which is minus the policy gradient:
# $\mathbb{E}_{x\sim\pi}[k_1
# \nabla\log\pi(x)]$. Sum over the vocabulary. It has to equal $\nabla\mathrm{KL}$.


# %% tags=["exercise"]
def reward_gradient(logits, reference):
    raise NotImplementedError  # your code: use kl.token_kl(..., "k1").detach()


# %% tags=["check"]
def check_2():
    actual = reward_gradient(logits, reference)
    assert actual.shape == logits.shape, (
        f"a gradient has the shape of the logits, {list(logits.shape)}, not {list(actual.shape)}"
    )
    away = ((actual - right).norm() / right.norm()).item()
    assert away < 1e-9, f"the gradient is off by {away:.2g} of its size"


check(2, check_2)


# %% tags=["solution"] jupyter={"source_hidden": true}
def reward_gradient(logits, reference):
    logp, ref_logp = logits.log_softmax(-1), reference.log_softmax(-1)
    k1 = kl.token_kl(logp, ref_logp, "k1").detach()
    return torch.autograd.grad((logp.detach().exp() * k1 * logp).sum(), logits)[0]


check(2, check_2)

# %% [markdown]
# ## Exercise 3: when to stop trusting k3
#
# You measure a KL of `divergence` nats between two policies whose log-ratio is nearly Gaussian, and you may draw `n`
# tokens. Return the estimator, "k1" or "k3", whose mean has the smaller standard error, and that error. Use
# `kl.gaussian_oracle`.


# %% tags=["exercise"]
def choose(divergence, n):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_3():
    for divergence, n, name in (
        (0.01, 400, "k3"),
        (0.5, 100, "k3"),
        (0.62, 400, "k3"),
        (0.64, 400, "k1"),
        (2.0, 2500, "k1"),
    ):
        actual, error = choose(divergence, n)
        assert actual == name, f"at {divergence} nats {name} varies less"
        want = math.sqrt(kl.gaussian_oracle(math.sqrt(2 * divergence))[name][1] / n)
        assert abs(error - want) < 1e-6 * want, (
            f"the standard error of a mean of n values is √(variance/n): {want:.5f}, not {error:.5f}"
        )


check(3, check_3)


# %% tags=["solution"] jupyter={"source_hidden": true}
def choose(divergence, n):
    oracle = kl.gaussian_oracle(math.sqrt(2 * divergence))
    name = min(("k1", "k3"), key=lambda kind: oracle[kind][1])
    return name, math.sqrt(oracle[name][1] / n)


check(3, check_3)

# %% [markdown]
# ## Open challenge
#
# Write an unbiased estimate of the KL from 32 sampled tokens that has less error than $k_1$ and $k_3$, close to the
# reference and far from it. `etude challenge 5` gives the rules, a file to begin with and the scores so far.
#
# ## Where to read on
#
# * `ref/kl.py` from top to bottom: off-policy tokens, and why an importance weight of one still changes a gradient.
# * `etude figure kl-variance` runs the whole experiment, the trained agent's own tokens included; `etude explore`, page
#   *KL estimators*.
# * `ref/rl.py`, function `improve`: the drift that the recipe charges its reward for.
# * John Schulman, "Approximating KL divergence" (2020); on the gradients, arXiv:2510.01555.
# * Next: lesson 6, the length penalty.
