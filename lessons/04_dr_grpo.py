# %% [markdown]
# # 4 · Dr. GRPO: two divisions that are not there
#
# **After this lesson you can** turn a group of rewards into a policy gradient in five ways; say which of them point
# along the gradient of the expected reward, which do not, and what each does to the length of answers; and find the
# mean in a training loop that makes its gradient depend on the size of the micro-batch.
#
# *About 60 minutes. Prerequisites: lesson 0, and what a policy gradient is. Source: Composer 2 technical report, §4.1;
# arXiv:2503.20783.*
#
# ## The idea
#
# The agent tries a prompt $N$ times. Such a *group* of rollouts is its own yardstick: a rollout's advantage is its
# reward minus a baseline $b$ that comes from the group, so no value network has to be trained. Every token that the
# policy wrote is then pushed by its rollout's advantage:
#
# $$A_i = \frac{R_i - b_i}{s} \qquad \rho_t = \frac{\pi(o_t)}{\mu(o_t)} \qquad
# L = -\frac{1}{\mathrm{budget}}\sum_{i,t} w_{i,t}\,\min\bigl(\rho_t A_i,\
# \mathrm{clip}(\rho_t,\,1-\epsilon_-,\,1+\epsilon_+)\,A_i\bigr)$$
#
# $\pi$ is the policy being trained, $\mu$ the one that sampled; as long as they are the same, $\rho = 1$ and the clip
# does nothing. Five well known methods are five ways to fill in the rest:
#
# | | baseline $b$ | $s$ | ratio $\rho$ | weight $w$ | clip −, + |
# |---|---|---|---|---|---|
# | Dr. GRPO | mean of the group | 1 | of the token | 1 | 0.2, 0.2 |
# | GRPO | mean of the group | deviation | of the token | 1 / own length | 0.2, 0.2 |
# | RLOO | mean of the *others* | 1 | of the token | 1 | 0.2, 0.2 |
# | DAPO | mean of the group | deviation | of the token | 1; 0 if cut off | 0.2, 0.28 |
# | GSPO | mean of the group | deviation | of the whole rollout | 1 / own length | 3e-4, 4e-4 |
#
# Dr. GRPO, which the report follows, divides by nothing, and neither does RLOO. Why not? Both divisions look like
# housekeeping: a mean over tokens, a standardised score. But each changes what is being maximised.

# %% [markdown]
# **Predict first.** All four answers of a group are right; they differ only in a price of a thousandth per token. Dr.
# GRPO gives them advantages of about a thousandth. Divide by the standard deviation of the group, and how large are the
# advantages, compared with those of a group in which half of the answers are right? And if the price is made ten times
# smaller?

# %%
import itertools

import matplotlib.pyplot as plt
import torch

from lessons.course import check, quick, run, source
from ref import dr_grpo
from sims.grpo_bias import experiment as grpo_bias

source(dr_grpo.group_advantages)

# %% [markdown]
# Four lines do the work. The last is a division that only `scale="std"` asks for. With the leave-one-out baseline, the
# advantage is the plain one times $N/(N-1)$, because a share of $1/N$ of the group's mean is the rollout's own reward.
# The mean is taken relative to the first reward. Here is what happens otherwise in a group whose rewards are all the
# same:

# %%
alike = torch.full((1, 3), 0.1, dtype=torch.float64)
print(f"three rewards of 0.1 less their plain mean: {(alike - alike.mean()).tolist()[0]}")
print(f"group_advantages:                           {dr_grpo.group_advantages(alike).tolist()[0]}")

# %% [markdown]
# Equal rewards are no reason to prefer one rollout to another. An exact zero says so, whatever it is later divided by.
# Now the loss:

# %%
source(dr_grpo.policy_loss)
for name, variant in dr_grpo.FAMILY.items():
    print(f"{name:8s} {variant}")

# %% [markdown]
# * `select_tokens` picks the policy's own tokens *before* any arithmetic. Multiplying by a mask is not enough:
#   0 · NaN is NaN.
# * `clip_log_ratio` is the min and the clip, on $\log\rho$.
# * `budget` is a number that the caller hands in. That is the whole defence against the second trap below.
#
# How much does one token weigh? At $\rho = 1$ the loss is linear in $\log\pi$, so its gradient tells us. Four rollouts,
# two right and two wrong, of different lengths:


# %%
def token_weights(name, rewards, lengths):
    """What a member of the family pushes each token of each rollout by, [N]; the budget is left out."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    logp = torch.zeros(mask.shape, dtype=torch.float64, requires_grad=True)
    rewards, finished = torch.tensor([rewards], dtype=torch.float64), torch.ones(len(lengths), dtype=torch.bool)
    loss = dr_grpo.family_loss(dr_grpo.FAMILY[name], logp, logp.detach(), rewards, mask, budget=1, finished=finished)
    return -torch.autograd.grad(loss, logp)[0][:, 0]


rewards, lengths = [1.0, 1.0, 0.0, 0.0], [2, 8, 2, 8]
print("rollout:            right, 2   right, 8   wrong, 2   wrong, 8   (tokens)")
for name in dr_grpo.FAMILY:
    print(f"{name:8s} a token:" + "".join(f"{w:11.3f}" for w in token_weights(name, rewards, lengths).tolist()))

# %% [markdown]
# Under `grpo` and `gspo` a token of the long wrong answer is blamed only a quarter as much as one of the short wrong
# answer. Being wrong at length is cheap. A token of the short right answer earns four times what one of the long right
# answer earns. (GSPO equals GRPO in every table of gradients of this lesson: the two differ in the ratio and its clip,
# and here the ratio is one.)
#
# ## The expected gradient, enumerated
#
# What a rule does *on average* could be sampled. But it is better to leave nothing to chance. Let the policy write
# words of at most five symbols for three prompts (any finished word is right; it must contain letter 0; it must contain
# letters 0 and 1). Then there are so few words, and so few groups of $N$ of them, that the expected gradient of every
# member of the family can be summed exactly and compared with the true gradient of the expected reward.
# `sims/grpo_bias/experiment.py` does it
# for random policies:

# %%
settings = grpo_bias.Experiment(
    length=quick(5, 4),
    policies=quick(16, 4),
    group_sizes=quick((2, 4, 8), (2, 4)),
    seeds=quick(16, 4),
    steps=quick(150, 10),
    looks=quick(10, 2),
)
N = settings.group_sizes[-1]
rows, values = grpo_bias.gradients(settings)
free = {row["member"]: row for row in rows if row["N"] == N and row["price"] == 0}
print(f"N = {N}, means over {settings.policies} policies   size, true = 1   sine of the angle to the true gradient")
for name in ("dr_grpo", "rloo", "grpo", "gspo", "dapo", "dapo, large step", "only length", "only std", "masked"):
    print(f"  {name:16s} {free[name]['norm']:26.4f} {free[name]['sine']:22.2e}")
for row in rows:
    if row["member"] == "dr_grpo" and row["price"] == 0:
        factor = (row["N"] - 1) / row["N"]
        print(
            f"dr_grpo, N = {row['N']}: (N − 1)/N = {factor}; distance from that much of the true "
            f"gradient {row['from (N-1)/N']:.1e}"
        )

# %% [markdown]
# Read the table from the top. Dr. GRPO is the true gradient, only shorter: by $(N-1)/N$, to the last digit. Its
# baseline contains the rollout's own reward, so $1/N$ of what a rollout earned is taken away again. RLOO has the factor
# one and differs in nothing else. A factor is harmless; it belongs to the learning rate.
#
# `only length` and `only std` are Dr. GRPO with one division added. Dividing by length turns the gradient by an angle
# that no learning rate can correct. Dividing by the standard deviation turns it only a little here, where every reward
# is 0 or 1. Keep that number in mind until prices come in.
#
# DAPO divides by no length and is turned furthest. What turns it is its third choice: rollouts that were cut off weigh
# nothing. `masked` is Dr. GRPO with only that change. In this world many words reach the limit (a quarter of them when
# the trainings below begin). They are never right, and yet nothing is blamed for them. (DAPO also divides by the tokens
# of the step's own rollouts, here of one group. In a step of many groups that makes no difference: `dapo, large step`.)
#
# And where does the turned gradient lead? Here is the derivative of the expected length along it:

# %%
names = ["dr_grpo", "only length", "only std", "masked", "grpo", "dapo"]
figure, (angle, slope) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained", sharey=True)
angle.barh(names, [free[name]["sine"] for name in names], color="#0072B2")
angle.set(xlabel="sine of the angle to the true gradient", title=f"Direction, N = {N}")
places = range(len(names))
slope.barh(
    [p - 0.2 for p in places],
    [free[name]["grows wrong"] for name in names],
    height=0.38,
    color="#D55E00",
    label="given wrong",
)
slope.barh(
    [p + 0.2 for p in places],
    [free[name]["grows right"] for name in names],
    height=0.38,
    color="#009E73",
    label="given right",
)
slope.axvline(free["truth"]["grows wrong"], color="#D55E00", linestyle=":")
slope.set(xlabel="change of E[length], tokens per unit step", title="Length (dotted: true gradient, wrong)")
slope.set_xlim(-0.1, 0.62)
slope.legend(frameon=False, loc="upper right")
angle.invert_yaxis()
plt.show()
for name in ("truth", "only length", "masked", "dapo"):
    print(
        f"{name:12s} E[length | wrong] {free[name]['grows wrong']:+.3f}, E[length | right] "
        f"{free[name]['grows right']:+.3f} tokens per unit step"
    )

# %% [markdown]
# Growth alone is no bias: in this world longer words have more chances to be right, and the true gradient lengthens
# wrong answers too. The bias is what is added on top. Does it survive a training, with samples, noise and Adam? We
# train a few random policies both ways, with the same starts and the same draws:

# %%
curves = {name: run(grpo_bias.train, settings, name) for name in ("dr_grpo", "only length")}
for name, curve in curves.items():
    first, last = (
        {key: sum(curve[key][look]) / settings.seeds for key in ("reward", "cut", "wrong")} for look in (0, -1)
    )
    print(
        f"{name:12s} reward {first['reward']:.3f} → {last['reward']:.3f}   cut off {first['cut']:.3f} "
        f"→ {last['cut']:.3f}   "
        f"E[length | wrong] {first['wrong']:.3f} → {last['wrong']:.3f} tokens"
    )
longer = torch.tensor(curves["only length"]["wrong"][-1]) - torch.tensor(curves["dr_grpo"]["wrong"][-1])
error = longer.std() / len(longer) ** 0.5
print(
    f"divided − undivided: {longer.mean():+.3f} ± {error:.3f} tokens (standard error over "
    f"{settings.seeds} pairs of trainings)"
)

# %% [markdown]
# The reward is the same, and wrong answers are longer: this is the length bias for which the Dr. GRPO paper blames the
# division (its §3).
#
# ## Exercise 1: the factor, by your own enumeration
#
# A policy picks one of a few actions; `logits` [A] are its parameters, `rewards` [A] what the actions pay. Write
# `average_gradient(logits, rewards, N, baseline)`: the expectation, over all $A^N$ groups, of $\frac1N\sum_i A_i
# \nabla\log\pi(a_i)$. Use `dr_grpo.group_advantages` and `itertools.product`. The check compares your answer with the
# true gradient, and with
# $(N-1)/N$ of it.


# %% tags=["exercise"]
def average_gradient(logits, rewards, N, baseline):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_1():
    logits = torch.tensor([0.3, -0.5, 0.1], dtype=torch.float64, requires_grad=True)
    rewards = torch.tensor([1.0, 0.3, 0.0], dtype=torch.float64)
    (true,) = torch.autograd.grad((logits.softmax(0) * rewards).sum(), logits)
    for N, (baseline, factor) in itertools.product(
        (2, 3, 4), (("mean", lambda N: (N - 1) / N), ("leave_one_out", lambda N: 1.0))
    ):
        actual = average_gradient(logits, rewards, N, baseline)
        assert actual.shape == logits.shape, (
            f"a gradient has the shape of the logits, {list(logits.shape)}, not {list(actual.shape)}"
        )
        away = ((actual - factor(N) * true).norm() / true.norm()).item()
        assert away < 1e-9, (
            f"N = {N}, {baseline}: expected {factor(N):.3f} times the true gradient, off by {away:.2g} of its size"
        )


check(1, check_1)


# %% tags=["solution"] jupyter={"source_hidden": true}
def average_gradient(logits, rewards, N, baseline):
    logp, total = logits.log_softmax(0), 0.0
    for group in itertools.product(range(len(logits)), repeat=N):
        group_logp = logp[list(group)]
        advantages = dr_grpo.group_advantages(rewards[list(group)][None], baseline=baseline)[0]
        total = total + group_logp.sum().exp().detach() * (advantages * group_logp).mean()
    return torch.autograd.grad(total, logits)[0]


check(1, check_1)

# %% [markdown]
# ## The ratio and its clip
#
# Rollouts are a little older than the policy that learns from them, so $\rho$ is not always one. The surrogate loss
# multiplies by it, which corrects the expectation, and the clip stops rewarding a move that has gone far enough. Here
# is $\partial
# L/\partial\log\pi$ of one token, against $\rho$:


# %%
def pull(ratio, advantage, variant):
    """The push on log π of a single token, [n], at ratios [n]."""
    logp = ratio.log().requires_grad_()
    loss = dr_grpo.policy_loss(
        logp[:, None],
        torch.zeros(len(ratio), 1, dtype=ratio.dtype),
        torch.full_like(ratio, advantage),
        torch.ones(len(ratio), 1),
        budget=1,
        clip_low=variant.clip_low,
        clip_high=variant.clip_high,
    )
    return 0.0 - torch.autograd.grad(loss, logp)[0]


ratios = torch.tensor([0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 1.27, 1.29, 2.0], dtype=torch.float64)
print("ratio              " + "".join(f"{r:7.2f}" for r in ratios.tolist()))
for name, advantage in itertools.product(("dr_grpo", "dapo"), (1.0, -1.0)):
    print(
        f"{name:8s} A = {advantage:+.0f}   "
        + "".join(f"{p:7.2f}" for p in pull(ratios, advantage, dr_grpo.FAMILY[name]).tolist())
    )

# %% [markdown]
# Two things are surprising at first sight. First, the clip works on one side only. A token with $A > 0$ that has become
# *less* likely is still pulled back, by ρ times A. So is one with $A < 0$ that has become *more* likely, and without
# any bound ($\rho = 2$ pulls by 2). Second, a clipped token is not held at the boundary: it has no gradient at all.
# DAPO's higher upper bound leaves tokens more room to rise.
#
# ## Exercise 2: who is still pushed
#
# Write `pushed(ratio, advantage, clip_low, clip_high)` for tensors of one shape: True where the token has a gradient.
# Do not use autograd; two comparisons and the sign of $A$ are enough.


# %% tags=["exercise"]
def pushed(ratio, advantage, clip_low, clip_high):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_2():
    ratio = torch.tensor([0.3, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 3.0], dtype=torch.float64)
    for name in ("dr_grpo", "dapo", "gspo"):
        variant = dr_grpo.FAMILY[name]
        for advantage in (1.0, -1.0, 0.0):
            actual = pushed(ratio, torch.full_like(ratio, advantage), variant.clip_low, variant.clip_high)
            want = pull(ratio, advantage, variant) != 0
            assert actual.shape == ratio.shape, (
                f"one answer for each token: {list(ratio.shape)}, not {list(actual.shape)}"
            )
            wrong = ratio[actual.bool() != want].tolist()
            assert not wrong, f"{name}'s clip, A = {advantage:+.0f}: wrong at ratios {wrong}"


check(2, check_2)


# %% tags=["solution"] jupyter={"source_hidden": true}
def pushed(ratio, advantage, clip_low, clip_high):
    return ((advantage > 0) & (ratio <= 1 + clip_high)) | ((advantage < 0) & (ratio >= 1 - clip_low))


check(2, check_2)

# %% [markdown]
# ## How it breaks: a group in which all are right
#
# Charge a small price for every token, as lesson 6 will, and look at a group where all four answers are right. Their
# rewards differ by one or two thousandths. What does division by the deviation make of that?

# %%
price, lengths = 0.001, [3, 4, 5, 4]
net_rewards = torch.tensor([[1 - price * length for length in lengths]], dtype=torch.float64)
mixed = torch.tensor([[1.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
for group_name, group in (("all right, priced", net_rewards), ("half right", mixed)):
    for scale in ("none", "std"):
        print(
            f"{group_name:18s} divided by: {scale:5s}"
            + "".join(f"{a:10.4f}" for a in dr_grpo.group_advantages(group, scale=scale)[0].tolist())
        )

# %% [markdown]
# One token more or less now counts as much as right or wrong. The size of the price no longer matters: make it ten
# times smaller, and nothing changes:

# %%
sizes = grpo_bias.equally_right(settings)
priced_rows = {row["member"]: row for row in rows if row["N"] == N and row["price"]}
figure, (size, share) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
for scale, label, style in (("none", "undivided", "o-"), ("std", "divided by the deviation", "s--")):
    line = [row for row in sizes if row["scale"] == scale]
    size.plot([row["price"] for row in line], [row["size"] for row in line], style, label=label)
size.set(
    xscale="log",
    yscale="log",
    xlabel="price of a token",
    ylabel="advantage / half-right group's",
    title="Groups in which all are right",
)
size.legend(frameon=False)
names = ["dr_grpo", "only std", "grpo", "dapo"]
share.bar(names, [priced_rows[name]["all right"] for name in names], color="#CC79A7")
share.set(ylabel="share of the gradient's norm", title=f"What such groups give, price {settings.price:g}")
plt.show()
low, high = (
    min(row["size"] for row in sizes if row["scale"] == "std"),
    max(row["size"] for row in sizes if row["scale"] == "std"),
)
print(
    f"divided, over all prices: {low:.3f} to {high:.3f} of a half-right group's advantage; undivided, "
    f"at the least price: {sizes[0]['size']:.1e}"
)
for name in ("dr_grpo", "only std"):
    gradient_share, sine = priced_rows[name]["all right"], priced_rows[name]["sine"]
    print(
        f"{name:9s} at a price of {settings.price:g}: {gradient_share:.3f} of the gradient is from "
        f"such groups, sine {sine:.2g}"
    )

# %% [markdown]
# **Your prediction:** with the division, these advantages are about as large as a half-right group's, at every price.
#
# This is the division that looked harmless a page ago. With a price of two hundredths per token, groups in which every
# answer is right make up about sixteen times as large a share of the gradient, and the gradient is turned nearly as far
# as by the other division. The report gives this blow-up as its reason for leaving the deviation out.
#
# ## How it breaks: a mean over whoever happens to be there
#
# The second trap is in none of these papers, because it is in the training loop. A step's rollouts do not fit into
# memory at once; they come in micro-batches, and on many ranks. Rollouts of similar length go together, which saves
# padding. Now divide each loss by *its own* number of tokens and average the parts, as you would for a classifier:

# %%
generator = torch.Generator().manual_seed(0)
B, T, V = 8, 40, 16
ids = torch.randint(0, V, (B, T), generator=generator)
mask = torch.arange(T - 1) < torch.tensor([2, 2, 3, 4, 35, 38, 39, 39])[:, None]
advantages = dr_grpo.group_advantages(torch.tensor([[1.0, 1, 0, 1, 0, 1, 0, 0]], dtype=torch.float64))[0]
table = torch.randn(
    V, V, dtype=torch.float64, generator=generator
).requires_grad_()  # logits of the next token, given this one


def log_probs(rows):
    """log π of the tokens of some rollouts, [rows, T − 1]."""
    return table[ids[rows, :-1]].log_softmax(-1).gather(-1, ids[rows, 1:, None])[..., 0]


def part(rows, budget):
    """The loss of a micro-batch."""
    logp = log_probs(rows)
    return dr_grpo.policy_loss(logp, logp.detach(), advantages[rows], mask[rows], budget=budget)


(full_gradient,) = torch.autograd.grad(part(torch.arange(B), mask.sum().item()), table)
for size in (8, 4, 2, 1):
    parts = torch.arange(B).split(size)
    (local,) = torch.autograd.grad(sum(part(rows, mask[rows].sum().item()) for rows in parts) / len(parts), table)
    cosine = (local * full_gradient).sum() / (local.norm() * full_gradient.norm())
    print(
        f"{size} rollouts a micro-batch, divided by its own tokens: off by "
        f"{(local - full_gradient).norm() / full_gradient.norm():.2f}, cosine {cosine:.2f}"
    )

# %% [markdown]
# Nothing changed but the micro-batch size, a setting that is chosen by what fits into memory. At one rollout per
# micro-batch, the mean over its tokens is the division by length again, through the back door. On many ranks the same
# happens when each rank divides by its own count.
#
# ## Exercise 3: micro-batches that add up
#
# Write `accumulated(sizes, budget)`: split the eight rollouts into micro-batches of the given sizes, in order, call
# `backward()` for each, and return `table.grad` (clear it first). It must be the gradient of the whole step, however
# the step is cut. `budget` counts the whole step.


# %% tags=["exercise"]
def accumulated(sizes, budget):
    raise NotImplementedError  # your code: part(rows, ...) is the loss of some rollouts


# %% tags=["check"]
def check_3():
    budget = B * (T - 1)  # rollouts × the longest allowed
    (want,) = torch.autograd.grad(part(torch.arange(B), budget), table)
    for sizes in ((8,), (4, 4), (1,) * 8, (5, 2, 1)):
        actual = accumulated(sizes, budget)
        assert actual is not None and actual.shape == table.shape, f"return table.grad, of shape {list(table.shape)}"
        away = ((actual - want).norm() / want.norm()).item()
        assert away < 1e-9, f"cut into {sizes} the gradient is off by {away:.2g} of its size"


check(3, check_3)


# %% tags=["solution"] jupyter={"source_hidden": true}
def accumulated(sizes, budget):
    table.grad = None
    for rows in torch.arange(B).split(list(sizes)):
        part(rows, budget).backward()
    return table.grad


check(3, check_3)

# %% [markdown]
# ## Open challenge
#
# Write an advantage for groups of four rollouts whose gradient is unbiased and has less variance than that of
# leave-one-out. `etude challenge 4` gives the rules, a file to begin with and the scores so far.
#
# ## Where to read on
#
# * `ref/dr_grpo.py` from the top: where it departs from each of the five papers. `scaled/dr_grpo.py` is the same on
#   many ranks, with the budget as the one number that travels.
# * `etude figure grpo-bias` runs the whole experiment: four group sizes, trainings of every member, and cut-off
#   rollouts masked or not. `etude explore`, page *Group advantages*.
# * `ref/rl.py`, function `improve`: one step as the recipe takes it, micro-batches and budget included.
# * Dr. GRPO is arXiv:2503.20783; GRPO arXiv:2402.03300; RLOO arXiv:2402.14740; DAPO arXiv:2503.14476; GSPO
#   arXiv:2507.18071.
# * Next: lesson 5, KL, what keeps the policy near where it came from.
