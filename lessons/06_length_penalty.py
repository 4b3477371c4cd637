# %% [markdown]
# # 6 · The length penalty: the marginal cost of a step
#
# **After this lesson you can** choose the bend, the exponent and the price of a length penalty from the effort that a
# policy really spends; state the marginal cost of effort on an easy and on a hard task; say how much parallel tool
# calls save; and say what a penalty does to tasks of every difficulty.
#
# *About 45 minutes. Prerequisites: lesson 4. Source: Composer 2 technical report, §4.2 and Figure 6.*
#
# ## The idea
#
# An agent that is paid for being right, and for nothing else, has no reason ever to be quick. So effort gets a price.
# But which? A fixed price per token asks the same of a one-line fix and of a day's refactoring. The report bends the
# price:
#
# $$C_{k,q}(x) = \frac{(1 + kx)^{1-q} - 1}{k\,(1-q)} \qquad\qquad C'_{k,q}(x) = (1 + kx)^{-q}$$
#
# $x$ is effort: a weighted sum of thinking tokens, tokens of tool calls, tokens of tool outputs, tokens of the final
# message, calls and turns. The slope $C'$ is what matters. It is the *marginal cost* of effort, the cost of one unit
# *more*: the full price at $x = 0$, and less the more a task has already taken.

# %% [markdown]
# **Predict first.** An agent that thinks far longer than it has to is trained under a price on thinking. Two prices
# cost the same on average: one is linear, the other has a marginal cost that falls. Tasks range from easy to very hard.
# Under each price, what becomes of the effort on the hardest tasks, those that need two thousand times as much as the
# easiest?

# %%
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import torch

from kit.disk import read_json
from lessons.course import ROOT, check, quick, source, verdicts
from recipe.small.settings import Recipe
from ref import dr_grpo, length_penalty
from ref.length_penalty import Effort, EffortWeights
from sims.length_penalty import curves as length_curves

source(length_penalty.length_penalty, length_penalty.marginal_cost)

# %% [markdown]
# The code does not look like the formula. As printed, the formula is 0/0 at $q = 1$, and near it most digits are lost:
# two numbers that agree in all their leading digits are subtracted, and the result is divided by almost nothing. So the
# limits are factored out first. `_ratio(expm1(z), z)` is $(e^z - 1)/z$ with its limit 1, `_ratio(growth, k * wide)` is
# $\ln(1+kx)/kx$ with its limit 1, and both
#
# $$q \to 1:\quad C = \frac{\ln(1+kx)}{k} \qquad\qquad k \to 0 \ \text{or}\ q = 0:\quad C = x$$
#
# come out of one line. Here is what that buys at $k = 0.01$ and $x = 300$, beside the truth in 60 digits:

# %%
k, x = 0.01, 300.0
for away in (1e-4, 1e-8, 1e-12, 1e-15):
    q = 1 + away
    truth, printed = float(length_curves.printed(x, k, q)), ((1 + k * x) ** (1 - q) - 1) / (k * (1 - q))
    print(
        f"q = 1 + {away:g}:  truth {truth:.9f}   as printed {printed:.9f}   the code "
        f"{length_penalty.length_penalty(x, k, q):.9f}"
    )

# %% [markdown]
# The first part of the experiment behind Figure 6 checks all of this, shape included, over a grid:

# %%
bends, exponents = quick((0.001, 0.01, 0.1), (0.01,)), (0.0, 0.5, 1.0, 2.0, 3.0)
for claim in length_curves.verdicts(length_curves.curves(bends, exponents), bends, exponents):
    print(f"{claim['verdict']}: {claim['claim']} ({claim['measured']:.2g}; {claim['note']})")

# %%
at = np.linspace(0, 1000, 501)
figure, (cost, slope) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
for q, style in zip((0.0, 0.5, 1.0, 2.0), ("-", "--", "-.", ":"), strict=True):
    cost.plot(at, length_penalty.length_penalty(at, k, q), style, label=f"q = {q:g}")
    slope.plot(at, length_penalty.marginal_cost(at, k, q), style, label=f"q = {q:g}")
cost.axhline(1 / k, color="grey", linewidth=1)
cost.set(xlabel="effort x", ylabel="C(x)", title=f"Cost, k = {k:g} (grey: the bound at q = 2)", ylim=(0, 500))
slope.set(xlabel="effort x", ylabel="C'(x)", title="Price of the next unit", yscale="log")
slope.legend(frameon=False)
plt.show()
for q in (0.5, 1.0, 2.0):
    print(
        f"q = {q:g}: the next unit costs "
        + ", ".join(f"{length_penalty.marginal_cost(x, k, q):.4f} at x = {x:g}" for x in (10.0, 100.0, 1000.0))
    )

# %% [markdown]
# With $q > 1$ the total cost is bounded by $1/(k(q-1))$. With $0 < q \le 1$ it grows without bound, ever more slowly.
# Easy tasks, where $x$ is small, feel nearly the whole price; on hard ones the next step is almost free.
#
# ## Exercise 1: choose the bend
#
# Somebody tells you: "at effort $x$, the marginal cost should be a fifth of what it is at the first unit". Write
# `bend(x, share, q)`, the $k$ for which it costs `share` of it. (One line; invert $C'$.)


# %% tags=["exercise"]
def bend(x, share, q):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_1():
    for x, share, q in ((300.0, 0.2, 2.0), (1000.0, 0.5, 1.0), (40.0, 0.9, 0.5)):
        k = bend(x, share, q)
        assert k > 0, f"k must be positive, not {k}"
        actual = length_penalty.marginal_cost(x, k, q)
        assert abs(actual - share) < 1e-9, (
            f"with your k = {k:.4g} the next unit at x = {x:g} costs {actual:.4f}, not {share} (q = {q:g})"
        )


check(1, check_1)


# %% tags=["solution"] jupyter={"source_hidden": true}
def bend(x, share, q):
    return (share ** (-1 / q) - 1) / x


check(1, check_1)

# %% [markdown]
# ## What counts as effort

# %%
source(length_penalty.EffortWeights, length_penalty.effort)

# %% [markdown]
# The report names the six terms but not their weights; these are this project's. The heavy one is the turn, a round
# trip for which the user has to wait. It is what makes **parallel tool calls** pay. Here are the same six files, read
# one per turn or all in
# one turn:

# %%
files = 6
one_by_one = Effort(tool_call_tokens=12 * files, tool_output_tokens=300 * files, tool_calls=files, turns=files)
together = replace(one_by_one, turns=1)
serial, parallel = length_penalty.effort(one_by_one), length_penalty.effort(together)
print(f"effort: {serial:g} one by one, {parallel:g} together")
for k in (0.0001, 0.001, 0.01):
    saved = {
        q: length_penalty.length_penalty(serial, k, q) - length_penalty.length_penalty(parallel, k, q)
        for q in (0.0, 0.5, 1.0, 2.0)
    }
    print(
        f"k = {k:g}: calling in parallel saves " + ", ".join(f"{value:.1f} (q = {q:g})" for q, value in saved.items())
    )

# %% [markdown]
# Look down the last column. With $q = 2$ the same habit is worth hundreds at $k = 0.0001$ and single digits at $k =
# 0.01$. There the curve is already flat at these efforts, and where the cost is flat nothing is learned. And where $kx$
# stays far below one, every $q$ is the linear price. $k$ has to be chosen for the efforts that the policy really
# spends.
#
# ## Exercise 2: what a habit is worth
#
# Write `saving(counts, k, q)`: the share of a rollout's cost, between 0 and 1, that would be saved if all its turns
# were one. `counts` is an `Effort`; weights are the defaults.


# %% tags=["exercise"]
def saving(counts, k, q):
    raise NotImplementedError  # your code: length_penalty.effort, length_penalty.length_penalty


# %% tags=["check"]
def check_2():
    only_turns = Effort(turns=5)
    actual = saving(only_turns, 0.0, 0.0)
    assert abs(actual - 0.8) < 1e-9, (
        f"five turns and nothing else, at the linear price: a fifth is left, so 0.8 is saved, not {actual}"
    )
    actual = saving(Effort(thinking_tokens=500, turns=1), 0.001, 1.0)
    assert abs(actual) < 1e-12, f"who has one turn saves nothing, not {actual}"
    linear, bent = saving(one_by_one, 0.001, 0.0), saving(one_by_one, 0.001, 2.0)
    assert abs(linear - 500 / 972) < 1e-9, f"six files at the linear price save 500 of 972, not {linear:.4f}"
    assert abs(bent - 0.3494) < 1e-3, f"at k = 0.001, q = 2 they save 0.349 of the cost, not {bent:.4f}"
    assert EffortWeights().turns == 100


check(2, check_2)


# %% tags=["solution"] jupyter={"source_hidden": true}
def saving(counts, k, q):
    before, after = (
        length_penalty.length_penalty(length_penalty.effort(c), k, q) for c in (counts, replace(counts, turns=1))
    )
    return 1 - after / before


check(2, check_2)

# %% [markdown]
# ## An agent that decides how long to think
#
# To see what a penalty teaches, here is the smallest agent that has something to learn. On a task of difficulty $\tau$,
# thinking for $x$ tokens solves it with probability $1 - e^{-x/\tau}$: the first tokens help most, and on a hard task
# every token helps less. The reward is 1 if solved, minus `price` $\cdot\, C(x)$.
#
# Two penalties are compared, linear and $q = 2$, and the comparison has to be fair. `sims/length_penalty/experiment.py`
# does it like this: before training, both cost the same *on average* over the agent's current efforts, and $k$ is one
# over the mean effort, so that the curve bends where the policy is.
#
# ## Exercise 3: a price that matches
#
# Write `matched_price(efforts, k, q, budget)`: the price at which rollouts with these efforts [n] pay `budget` of
# reward on average.


# %% tags=["exercise"]
def matched_price(efforts, k, q, budget):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_3():
    efforts = np.array([10.0, 100.0, 1000.0])
    linear = matched_price(efforts, 0.0, 0.0, 0.2)
    assert abs(linear * 370 - 0.2) < 1e-9, (
        f"these efforts are 370 on average, so a linear price of {0.2 / 370:.6f} costs 0.2; yours is {linear:.6f}"
    )
    price = matched_price(efforts, 0.01, 2.0, 0.2)
    cost = price * length_penalty.length_penalty(efforts, 0.01, 2.0).mean()
    assert abs(cost - 0.2) < 1e-9, (
        f"at your price the bent penalty costs {cost:.4f} on average, not 0.2 (mean of costs is not cost of mean)"
    )


check(3, check_3)


# %% tags=["solution"] jupyter={"source_hidden": true}
def matched_price(efforts, k, q, budget):
    return budget / length_penalty.length_penalty(efforts, k, q).mean()


check(3, check_3)

# %% [markdown]
# The agent begins with efforts around $10\tau$: it solves nearly everything, and thinks far longer than it needs to.
# Prices are matched on the median efforts of five difficulties; two harder ones are added. For each difficulty it
# learns one number, the median of its effort (the spread is fixed), along the gradient of the expected reward. That is
# Dr. GRPO's expected direction (lesson 4), so nothing has to be sampled.

# %%
matched_difficulties, harder = [10.0, 30.0, 100.0, 300.0, 1000.0], [5000.0, 20_000.0]
difficulty = torch.tensor(matched_difficulties + harder, dtype=torch.float64)
usual = 10 * np.array(matched_difficulties)
k = 1 / usual.mean()
penalties = {
    name: (0.2 / length_penalty.length_penalty(usual, k, q).mean(), k, q)
    for name, q in (("linear", 0.0), ("nonlinear", 2.0))
}  # price, k, q
for name, (price, k, q) in penalties.items():
    next_unit = {x: price * length_penalty.marginal_cost(x, k, q) for x in (usual[0], usual[-1])}
    print(
        f"{name:9s} the next unit costs "
        + ", ".join(f"{1000 * value:.3f} thousandths at x = {x:g}" for x, value in next_unit.items())
    )


def expected_reward(median, price, k, q):
    """Expected reward [tasks] of an agent whose log effort is normal around log `median` with deviation 0.5, by 64
    quantiles."""
    z = torch.special.ndtri((torch.arange(64, dtype=torch.float64) + 0.5) / 64)
    x = median[:, None] * torch.exp(0.5 * z)
    return (1 - torch.exp(-x / difficulty[:, None]) - price * length_penalty.length_penalty(x, k, q)).mean(1)


def trained(start, price, k, q, steps=quick(1500, 100)):
    """The median effort [tasks] after training from `start` [tasks]."""
    log_median = start.log().requires_grad_()
    optimizer = torch.optim.Adam([log_median], lr=0.05, betas=(0.9, 0.99))
    for _ in range(steps):
        optimizer.zero_grad()
        (-expected_reward(log_median.exp(), price, k, q).sum()).backward()
        optimizer.step()
    return log_median.detach().exp()


def success(median):
    return expected_reward(median, 0.0, 0.0, 0.0)


learned = {name: trained(10 * difficulty, *penalty) for name, penalty in penalties.items()}
print("difficulty  " + "".join(f"{d:10g}" for d in difficulty.tolist()))
for name, median in {"before": 10 * difficulty, **learned}.items():
    print(f"{name:9s} x " + "".join(f"{m:11.3g}" if m >= 0.1 else "   about 0 " for m in median.tolist()))
    print("     solved " + "".join(f"{s:10.3f}" for s in success(median).tolist()))

# %%
figure, (effort_axis, solved_axis) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
for (name, median), style in zip({"before": 10 * difficulty, **learned}.items(), ("k:", "s--", "o-"), strict=True):
    effort_axis.plot(difficulty, median.clamp(min=1), style, label=name)
    solved_axis.plot(difficulty, success(median), style, label=name)
effort_axis.set(xscale="log", yscale="log", xlabel="difficulty τ", ylabel="median effort", title="How long it thinks")
solved_axis.set(xscale="log", xlabel="difficulty τ", ylabel="share solved", title="What it solves", ylim=(-0.03, 1.03))
solved_axis.legend(frameon=False)
plt.show()

# %% [markdown]
# **Your prediction:** under the linear price the hardest tasks are given up, with 14 tokens where there were 200,000;
# under the falling one they keep all of their effort.
#
# Up to a difficulty of 300 the agent is quicker under the bent price than under the linear one, and gives up at most
# about a hundredth of success for it. Beyond that, it keeps its room to think. Under the linear price it learns to
# leave hard tasks half thought through, and not to try the hardest at all.
#
# ## How it breaks: a linear penalty on hard tasks
#
# That last point is not a matter of degree. Under a linear price $p$ the best effort has a closed form, and from some
# difficulty on it is *nothing at all*: where $p\,\tau \ge 1$, not even the first token earns what it costs.
#
# ## Exercise 4: where giving up pays
#
# Write `best_effort(tau, price)`: the $x \ge 0$ that maximises $1 - e^{-x/\tau} - p\,x$. (Set the slope to zero, and
# mind the case in which it is never zero.)


# %% tags=["exercise"]
def best_effort(tau, price):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_4():
    grid = np.linspace(0, 20_000, 200_001)
    for tau, price in ((10.0, 2e-4), (1000.0, 2e-4), (3000.0, 2e-4), (5000.0, 2e-4), (10_000.0, 2e-4)):
        actual, best = best_effort(tau, price), grid[(1 - np.exp(-grid / tau) - price * grid).argmax()]
        assert abs(actual - best) < 0.2, (
            f"τ = {tau:g}, price {price:g}: the best effort is {best:.1f}, not {actual:.1f}"
        )


check(4, check_4)


# %% tags=["solution"] jupyter={"source_hidden": true}
def best_effort(tau, price):
    return max(0.0, -tau * np.log(price * tau))


check(4, check_4)

# %% [markdown]
# With the matched prices from above:

# %%
linear_price, _, _ = penalties["linear"]
price, k, q = penalties["nonlinear"]
print(f"linear: giving up is best from difficulty {1 / linear_price:.0f} on")
print(f"nonlinear: the whole bill never exceeds {price / (k * (q - 1)):.2f}, and solving pays 1")

# %% [markdown]
# ## How it breaks, again: a penalty that teaches the policy to stop
#
# So is the bent price safe? No. What is bounded is the *total*. The marginal cost of the *first* step is the full
# price, and that is higher than the linear price that it was matched with. Let the same agent meet the hardest tasks
# with far too little effort, like a policy that has only seen easy ones:

# %%
short = trained(torch.full_like(difficulty, 300.0), *penalties["nonlinear"])
for start, median in (("10τ", learned["nonlinear"]), ("300", short)):
    rewards = expected_reward(median, *penalties["nonlinear"])
    print(
        f"difficulty {difficulty[-1]:g}, begun at {start}: {success(median)[-1]:.3f} solved, reward "
        f"{round(rewards[-1].item(), 3) + 0.0:.3f}"
    )

# %% [markdown]
# There is a better place far away, with a valley in front of it. Inside a group of rollouts it looks like this. None
# solved the task, so only the penalty tells them apart:

# %%
efforts = torch.tensor([[100.0, 300.0, 600.0, 1200.0]], dtype=torch.float64)
for name, (price, k, q) in penalties.items():
    advantages = dr_grpo.group_advantages(-price * length_penalty.length_penalty(efforts, k, q))
    print(
        f"{name:9s} advantages of efforts 100, 300, 600, 1200, none solved: "
        + ", ".join(f"{a:+.3f}" for a in advantages[0].tolist())
    )
print(f"the recipe refuses to begin RL where fewer than {Recipe().rl.gate:.0%} of rollouts succeed")

# %% [markdown]
# Every such group says one thing: stop earlier. No curve repairs that. What helps is to begin where the policy
# sometimes succeeds. So the recipe measures success first, and refuses to begin RL where there is too little.
#
# ## What trained agents did
#
# A toy shows what a rule *can* do. This is what was measured on the tiny coding agent, trained under each setting:

# %%
verdicts("length-penalty")
print()
record = read_json(ROOT / "results" / "figures" / "length-penalty.json")
for row in record["rows"]:
    if row["part"] == "price" and row["setting"] in ("linear", "nonlinear"):
        low, high = row["effort_low"], row["effort_high"]  # a tenth of the rollouts lies below, a tenth above
        print(
            f"{row['setting']:9s} the next unit costs {1000 * row['next_unit_low']:.2f} thousandths at "
            f"effort {low:.0f} and "
            f"{1000 * row['next_unit_high']:.2f} at effort {high:.0f}, {high / low:.1f} times as much"
        )

# %% [markdown]
# Read each verdict with the lines below it. The efforts on which the toy's prices were matched span a factor of a
# hundred. The agent's efforts, without the cheapest and the most expensive tenth, span about a factor of four. In so
# narrow a range, a bent price that costs the same on average has the lower marginal cost at *both* ends, on the cheap
# rollouts too: matching the total does not match the slope. So the experiment matches the slope. At the mean effort of
# easy tasks the next unit costs the same under both
# penalties. Below that effort the bent one charges more for it, above that effort less, which is what hard tasks see.
# Whether tokens that are kept there buy anything is another question. The rule on success asks only that the bent
# penalty loses at most 0.05 against the straight one, not that it wins.
#
# ## Open challenge
#
# Choose price, k and q of the length penalty so that agents save as much effort as possible and lose no more than one
# point of success. `etude challenge 6` gives the rules, a file to begin with and the scores so far.
#
# ## Where to read on
#
# * `ref/length_penalty.py`: the trap in its author's words, and why a negative $k$ raises an error.
# * `etude figure length-penalty` reproduces Figure 6 and runs all trainings (up to an hour); `etude explore`, page
#   *Length penalties*, re-ranks real rollouts as you move $k$ and $q$.
# * `ref/rl.py`, function `compute_reward_terms`: what a rollout is charged for.
# * Composer 2 technical report, §4.2, on the other behaviour rewards and on what went wrong with them.
# * Next: lesson 7, what to do when a task outgrows the context.
