# %% [markdown]
# # 18 · A monitor, and the loop with users: an alarm that means something, and rewards that people make
#
# **After this lesson you can** watch a run so that an alarm means something however often you look; bet on a bounded
# mean, and say what each assumption buys; answer an alarm with a price while it still can act; turn what users do into
# rewards without paying for the wrong thing; and say what a gate keeps out, and how old data may be.
#
# *About 60 minutes. Prerequisites: lessons 4 and 17. Source: Composer 2 technical report, §4.2; Cursor on real-time RL;
# arXiv:2010.09686; Ville 1939.*
#
# ## The idea
#
# The authors of the report watched their runs. Thoughts moved into comments, and agents called nothing but the
# terminal. They saw both, and answered with new rewards. Whoever watches needs a rule that says when a curve has moved.
# The usual one is a
# threshold: the mean of a step lies three deviations away from where it was.
#
# **Predict first.** In a run nothing changes at all. Its statistic has a known mean and a known deviation, and we look
# once per step, for 300 steps. In how many of 100 such runs does the threshold raise an alarm at least once? And in how
# many if seven statistics are watched? Write your numbers down.
#
# Looking at a curve once per step means repeating a test once per step. The monitor bets instead. A statistic $x$ lies
# in $[0, 1]$, and while nothing changes its mean, given all that came before, is at most $b$. For a stake $0 < c < 1$
#
# $$f = 1 - c + c\,\frac{x}{b}, \qquad E[f \mid \text{past}] \le 1, \qquad
# M_t = R_t + \sum_{j \le t} w_j \prod_{j \le i \le t} f_i, \quad w_j = \frac{1}{j(j+1)}, \quad R_t = \frac{1}{t + 1}$$
#
# Each product is the wealth of a gambler who bets, from step $j$ on, that the mean is larger. All of them share a
# capital of 1, and $R_t$ is held back for those who begin later. While nothing changes no bet is favourable, and Ville
# (1939) bounds how rich they ever get:
#
# $$P\bigl(M_t \ge 1/\alpha \ \text{for some}\ t\bigr) \le \alpha$$
#
# The bound holds for all $t$ together, not only for one: you may look as often as you like, and a run may be as long as
# you like.

# %%
import math
import random
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import torch

from kit.plots import BLUE, GREEN, GREY, RED
from lessons.course import ROOT, check, quick, source, verdicts
from ref import dr_grpo, monitor
from ref.monitor import Band, Evidence, Monitor
from ref.transcript import Call, Transcript, Turn
from sims.real_time_rl import loop, rewards
from sims.real_time_rl.rewards import Distilling
from sims.real_time_rl.users import Served, Users

source(monitor.advance, monitor.log_evidence)

# %% [markdown]
# Here are the runs of the prediction: a step has eight groups, and a group shows the habit in one of ten cases. The
# threshold and the bets both know the mean and the deviation. Nothing is learnt, and nothing is approximate.

# %%
RUNS, STEPS, GROUPS, MEAN, ERROR = quick(1000, 50), quick(300, 40), 8, 0.1, 0.01
draw = np.random.default_rng(0)
evidence, alarmed = Evidence(), {"three deviations": np.zeros(RUNS, bool), "bets": np.zeros(RUNS, bool)}
curves = {name: [] for name in alarmed}
for _ in range(STEPS):
    x = (draw.random((RUNS, GROUPS)) < MEAN).astype(float)
    alarmed["three deviations"] |= np.abs(x.mean(1) - MEAN) > 3 * math.sqrt(MEAN * (1 - MEAN) / GROUPS)
    evidence = monitor.advance(evidence, x, Band(MEAN, MEAN))
    alarmed["bets"] |= monitor.log_evidence(evidence) >= math.log(1 / ERROR)
    for name, alarm_mask in alarmed.items():
        curves[name].append(alarm_mask.mean())

figure, axis = plt.subplots(figsize=(7, 3.2), layout="constrained")
for (name, curve), colour in zip(curves.items(), (RED, BLUE)):
    axis.plot(curve, color=colour, label=name)
    print(f"{name:17s} an alarm in {curve[-1]:.1%} of {RUNS} runs in which nothing changes")
print(
    f"three deviations of seven statistics that do not depend on each other: "
    f"{1 - (1 - curves['three deviations'][-1]) ** 7:.2%}"
)
axis.axhline(ERROR, color="black", linewidth=0.8, linestyle=":", label="what the bets promise")
axis.set(xlabel="step", ylabel="share of runs with an alarm", ylim=(-0.02, 1.02))
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# **Your prediction:** the threshold raises an alarm in 80 of 100 runs with one statistic, and in all of them with
# seven. The threshold is not badly chosen: at one step it rarely errs. It is asked too often. For seven statistics the
# bets need M ≥ 7/α, and their errors add up to α, however much they depend on each other. Any fixed threshold is
# crossed if the run is long enough; a wider one only takes longer.
#
# What is the cost of that? The bets find a change later. Here are the same runs, with a change to twice the mean in the
# middle:

# %%
evidence, delays = Evidence(), np.full(RUNS, np.nan)
for step in range(STEPS):
    p = MEAN if step < STEPS // 2 else 2 * MEAN
    evidence = monitor.advance(evidence, (draw.random((RUNS, GROUPS)) < p).astype(float), Band(MEAN, MEAN))
    has_alarm = monitor.log_evidence(evidence) >= math.log(1 / ERROR)
    delays[has_alarm & np.isnan(delays)] = step - STEPS // 2
late = delays[delays >= 0]
print(
    f"found in {np.mean(delays >= 0):.1%} of the runs"
    + (f", {np.median(late):.0f} steps after the change in the median" if len(late) else "")
)

# %% [markdown]
# ## Exercise 1: a capital for all who might begin
#
# `x` is a list of observations, one a step. Write `capital(x, b, c)`: the list of $M_1, M_2, \dots$ for one stake $c$
# and bets on a larger mean. One running number is enough: sums over starts need no list of starts.


# %% tags=["exercise"]
def capital(x, b, c):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_1():
    def near(actual, want):
        return len(actual) == len(want) and all(abs(a - b) < 1e-9 for a, b in zip(actual, want))

    actual = capital([0.2] * 5, 0.2, 0.5)
    assert near(actual, [1.0] * 5), f"who always observes exactly b wins and loses nothing: M stays 1; not {actual}"
    actual = capital([1.0], 0.5, 0.5)
    assert near(actual, [0.5 + 0.5 * 1.5]), (
        f"one step: half of the capital bets, f = 1.5, half is held back: 1.25; not {actual}"
    )
    actual = capital([1.0, 0.0], 0.5, 0.5)
    want = 1 / 3 + (0.5 * 1.5 + 1 / 6) * 0.5
    assert near(actual, [1.25, want]), f"a win, then a loss, f = 1.5 and 0.5: 1.25 and {want:.4f}; not {actual}"
    actual = capital([1.0] * 12, 0.1, 0.4)[-1]
    assert actual > 1e4, f"twelve times 1 where 0.1 is usual: somebody is rich by now; not {actual}"
    for b in (0.1, 0.5):
        every = []
        for case in range(2**8):
            tosses = [case >> i & 1 for i in range(8)]
            every.append(
                b ** sum(tosses) * (1 - b) ** (8 - sum(tosses)) * capital([float(toss) for toss in tosses], b, 0.3)[-1]
            )
        assert abs(sum(every) - 1) < 1e-9, (
            f"over all 256 runs of eight tosses with mean {b}, the mean of M is 1; not {sum(every):.4f}"
        )


check(1, check_1)


# %% tags=["solution"] jupyter={"source_hidden": true}
def capital(x, b, c):
    bets, capitals = 0.0, []
    for t, value in enumerate(x, 1):
        bets = (bets + 1 / (t * (t + 1))) * (1 - c + c * value / b)
        capitals.append(bets + 1 / (t + 1))
    return capitals


check(1, check_1)

# %% [markdown]
# ## What is watched
#
# A group of rollouts gives one value of each statistic. Rollouts of a group share their task, so they are not one
# observation each. On many ranks the parts of a group are summed before anything is divided (`scaled/monitor.py`), and
# every rank sees the same alarms.

# %%
source(monitor.statistics, monitor.learn_band)

# %% [markdown]
# In a real run the mean is not known, and training moves it. So the first steps establish what is usual, and the band
# gets a tolerance. An alarm then says that a statistic moved by more than training usually moves it. It does not say
# that this is bad.
#
# ## An alarm, and an answer
#
# A policy writes a comment with probability $h = \sigma(a)$, and RL moves $a$. The reward has a mistake: it pays for
# comments. In the second run the alarm is answered: from the next step on, a comment costs three times what the mistake
# pays. Except for the network, everything is as in a real run: records, statistics, bands, bets, and the advantage of
# lesson 4.

# %%
PAYS, RATE, N = 0.3, 4.0, 4
PLAIN, COMMENTED = "return (a + 1) * 2\n", "# first add one, then double it\nreturn (a + 1) * 2\n"


def record_of(comments):
    """A rollout that reads, writes with or without a comment, and tests."""
    calls = (Call("read", "m1"), Call("write", "m1", COMMENTED if comments else PLAIN), Call("test", tests=(3, 3)))
    return Transcript(tuple(Turn("assistant", calls=(call,)) for call in calls), tokens=40)


def training(answered, steps=quick(80, 16), learning=10, begin=-2.5, seed=0):
    """The share of comments along the steps, the band, and the step of the alarm."""
    draw, a, history, watch, shares = random.Random(seed), begin, [], None, []
    for step in range(steps):
        h = 1 / (1 + math.exp(-a))
        groups = [[draw.random() < h for _ in range(N)] for _ in range(GROUPS)]
        group_statistics = [
            monitor.statistics([record_of(has_comment) for has_comment in group], ("read", "write", "test"), 100)
            for group in groups
        ]
        shares.append(np.mean([stats["comments"] for stats in group_statistics]))
        price = 3 * PAYS if answered and watch and watch.alarms else 0.0
        if step < learning:
            history += [stats["comments"] for stats in group_statistics]
            continue  # the mistake comes after the steps that tell what is usual
        if watch is None:
            watch = Monitor({"comments": replace(monitor.learn_band(history), low=0.0)})
        watch.observe(group_statistics)
        group_rewards = torch.tensor(
            [[(PAYS - price) * has_comment for has_comment in group] for group in groups], dtype=torch.float64
        )
        advantages = dr_grpo.group_advantages(group_rewards)
        score = torch.tensor(groups, dtype=torch.float64) - h  # d log-prob / d a
        a += RATE * float((advantages * score).mean())
    return shares, watch.bands["comments"], [learning + alarm.step for alarm in watch.alarms]


figure, axis = plt.subplots(figsize=(7, 3.2), layout="constrained")
for answered, colour, name in ((False, RED, "the mistake alone"), (True, BLUE, "answered by a price")):
    shares, band, alarms = training(answered)
    axis.plot(range(1, len(shares) + 1), shares, color=colour, label=name)
    for step in alarms:
        axis.axvline(step, color=colour, linewidth=0.8, linestyle=":")
    print(
        f"{name:20s} usual: at most {band.high:.2f}; alarms at {alarms}; comments at the end {np.mean(shares[-4:]):.2f}"
    )
axis.axhspan(0, band.high, color=GREY, alpha=0.15)
axis.set(xlabel="step", ylabel="comments, share of the code")
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Exercise 2: what a price can still move
#
# A rollout has a habit with probability $h = \sigma(a)$, independently of others. The mistake pays `pays` for it, and
# the answer charges `price`. Groups have $N$ rollouts, and the advantage is the reward minus the group's mean. Write
# `pull(h, pays, price, N)`: the expectation of $\frac{1}{N} \sum_i A_i \, \partial \log \pi(x_i) / \partial a$, which
# is what moves $a$.


# %% tags=["exercise"]
def pull(h, pays, price, N):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_2():
    def exact(h, pays, price, N):
        total = 0.0
        for case in range(2**N):
            habits = [case >> i & 1 for i in range(N)]
            group_rewards = [(pays - price) * habit for habit in habits]
            mean = sum(group_rewards) / N
            total += (
                h ** sum(habits)
                * (1 - h) ** (N - sum(habits))
                * sum((r - mean) * (habit - h) for r, habit in zip(group_rewards, habits))
                / N
            )
        return total

    actual = pull(0.5, 0.3, 0.3, 4)
    assert abs(actual) < 1e-12, f"a price that equals the pay: nothing moves; not {actual}"
    for h in (0.0, 1.0):
        actual = pull(h, 0.3, 0.9, 4)
        assert abs(actual) < 1e-12, f"with h = {h:g} all rollouts are alike, and no price moves them: 0; not {actual}"
    actual = pull(0.5, 0.3, 0.9, 4)
    assert actual < 0, f"a price above the pay pushes the habit down: a negative number; not {actual}"
    for h, N in ((0.5, 2), (0.5, 4), (0.1, 4), (0.9, 3)):
        want, actual = exact(h, 0.3, 0.9, N), pull(h, 0.3, 0.9, N)
        assert abs(actual - want) < 1e-9, (
            f"h = {h}, {N} rollouts, pays 0.3, price 0.9: summed over all groups it is {want:.5f}; not {actual}"
        )


check(2, check_2)


# %% tags=["solution"] jupyter={"source_hidden": true}
def pull(h, pays, price, N):
    return (N - 1) / N * (pays - price) * h * (1 - h)


check(2, check_2)

# %%
for h in (0.05, 0.3, 0.5, 0.9, 0.99, 0.999):
    print(f"habit in {h:6.1%} of the rollouts: a price of 0.9 pulls with {pull(h, 0.3, 0.9, 4):+.5f}")

# %% [markdown]
# **An alarm can come too late.** Where all rollouts have the habit, all of them pay the price, and subtracting the
# group's mean cancels it. A trial of the experiment below ended there: the variety of tools fell, but it pointed to the
# terminal only when nothing else was called any more. So watch what shows the failure first, and pay less for it. Then
# an alarm comes while there is still
# something left to compare.
#
# ## The loop with users
#
# Cursor serves a policy, turns what users do with its edits into rewards, trains, checks a benchmark, and ships, every
# five hours. No test says what was right. Here the users are a model, and all of its numbers are our choice: users try
# three inputs and keep or undo the edit, they grow impatient, and some of them ask again.

# %%
source(Users.keeps, Users.follows, Distilling.reward)

# %% [markdown]
# The post says that two rewards taught the wrong thing. A session with a broken call was thrown away, so breaking a
# call on a hard task cost nothing. And edits were judged, but questions were not. What does each way of paying say
# about an edit that is right with probability $p$, and about its alternatives?

# %%
USERS, SECONDS = Users(), 30.0
EDIT = Served(edited=True, quality=1.0, has_question=False, open=False, has_broken_call=False, seconds=SECONDS)
WRONG, BROKEN_CALL = replace(EDIT, quality=0.0), replace(EDIT, edited=False, quality=0.0, has_broken_call=True)
NEEDLESS = Served(edited=False, quality=0.0, has_question=True, open=False, has_broken_call=False, seconds=SECONDS / 3)
WELCOME = replace(NEEDLESS, open=True)
WAYS = {"edits": Distilling(follow_ups=False), "thrown": Distilling(broken_calls="thrown"), "loop": Distilling()}

figure, axes = plt.subplots(1, 3, figsize=(9, 3), sharey=True, layout="constrained")
for axis, (name, way) in zip(axes, WAYS.items()):
    good, bad = (rewards.expected(way, USERS, session) for session in (EDIT, WRONG))
    axis.plot([0, 1], [bad, good], color=BLUE, label="an edit")
    for item, colour, label in (
        (NEEDLESS, RED, "a needless question"),
        (WELCOME, GREEN, "a welcome question"),
        (BROKEN_CALL, GREY, "a broken call"),
    ):
        worth = rewards.expected(way, USERS, item)
        if worth is not None:
            axis.axhline(worth, color=colour, label=label)
    axis.set(title=name, xlabel="p, the edit is right")
axes[0].set_ylabel("mean reward")
axes[2].legend(frameon=False, fontsize=7)
plt.show()

# %% [markdown]
# ## Exercise 3: at what probability does the way out pay?
#
# `right` and `wrong` are the mean rewards of an edit that is right and of one that is wrong, with `right > wrong`;
# `out` is the mean reward of the alternative. Write `tempted(right, wrong, out)`: the probability $p$ of a right edit
# below which the
# alternative is worth more. It lies between 0, never, and 1, always.


# %% tags=["exercise"]
def tempted(right, wrong, out):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_3():
    def near(actual, want):
        return abs(actual - want) < 1e-6

    actual = tempted(0.9, -0.9, 0.0)
    assert near(actual, 0.5), (
        f"edits earn ±0.9 and questions 0: whoever is right in less than half of the cases asks, 0.5; not {actual}"
    )
    actual = tempted(1.0, -1.0, -0.5)
    assert near(actual, 0.25), f"an alternative at −0.5 between −1 and 1: 2p − 1 = −0.5, so p = 0.25; not {actual}"
    actual = tempted(0.8, -1.2, -1.5)
    assert near(actual, 0.0), f"an alternative below a wrong edit tempts nobody: 0; not {actual}"
    actual = tempted(0.8, -1.2, 1.0)
    assert near(actual, 1.0), f"an alternative above a right edit tempts always: 1; not {actual}"
    actual = tempted(0.5, 0.1, 0.2)
    assert near(actual, 0.25), f"0.1 + 0.4·p = 0.2 at p = 0.25; not {actual}"


check(3, check_3)


# %% tags=["solution"] jupyter={"source_hidden": true}
def tempted(right, wrong, out):
    return min(1.0, max(0.0, (out - wrong) / (right - wrong)))


check(3, check_3)

# %% [markdown]
# ## The loop, live
#
# Tasks are easy, hard, or leave open what is wanted. A policy is a table: for each kind the probabilities of an edit,
# of a question and of a broken call. Users react to 256 sessions per step. A user asks only once, so a task has no
# group: a reward is compared with the mean of its batch, and `ref/dr_grpo.py` makes the gradient. The policy that
# serves may be older than the one that learns, and the ratio of the two is clipped:

# %%
KINDS, RIGHT = ("easy", "hard", "open"), (0.85, 0.25, 0.1)
ACTS = ("edit", "question", "broken")


def came_of(kind, act, draw):
    """What a user gets of a session."""
    if act == 1:
        return WELCOME if kind == 2 else NEEDLESS
    return BROKEN_CALL if act == 2 else EDIT if draw.random() < RIGHT[kind] else WRONG


def looped(way, every=1, steps=quick(60, 4), sessions=256, rate=6.0, seed=0):
    """Probabilities [steps, kinds, acts] along the loop; the served policy is replaced after every `every` steps."""
    draw, curve = random.Random(seed), []
    logits = torch.tensor([2.0, 0.5, 0.5], dtype=torch.float64).repeat(3, 1).requires_grad_()
    deployed = logits.detach().clone()
    for step in range(steps):
        if step % every == 0:
            deployed = logits.detach().clone()
        served = deployed.softmax(-1).tolist()
        samples = []
        for _ in range(sessions):
            kind = draw.choices(range(3), (0.4, 0.4, 0.2))[0]
            act = draw.choices(range(3), served[kind])[0]
            session = came_of(kind, act, draw)
            reward = way.reward(session, USERS.react(session, draw))
            if reward is not None:
                samples.append((kind, act, reward))
        kinds, acts, session_rewards = (list(column) for column in zip(*samples))
        logp, before = (table.log_softmax(-1)[kinds, acts][:, None] for table in (logits, deployed))
        advantages = dr_grpo.group_advantages(torch.tensor([session_rewards], dtype=torch.float64))[0]
        dr_grpo.policy_loss(
            logp, before, advantages, torch.ones_like(before, dtype=torch.bool), budget=sessions
        ).backward()
        with torch.no_grad():
            logits -= rate * logits.grad
        logits.grad = None
        curve.append(logits.detach().softmax(-1))
    return torch.stack(curve)


PANELS = ("needless questions, hard tasks", 1, 1), ("broken calls, hard tasks", 1, 2), ("welcome questions", 2, 1)
figure, axes = plt.subplots(1, 3, figsize=(9, 3), sharey=True, layout="constrained")
for (name, way), colour in zip(WAYS.items(), (RED, GREY, BLUE)):
    curve = looped(way)
    for axis, (title, kind, act) in zip(axes, PANELS):
        axis.plot(curve[:, kind, act], color=colour, label=name)
        axis.set(title=title, xlabel="step", ylim=(-0.02, 1.02))
    for kind, ends in zip(KINDS, curve[-1].tolist()):
        print(f"{name:7s}{kind:6s}" + "".join(f"{act:>10s} {end:.2f}" for act, end in zip(ACTS, ends)))
axes[0].legend(frameon=False)
plt.show()

# %% [markdown]
# Both hacks come by themselves, and both cures work. Look at the open tasks, too. A price on every question would have
# ended the welcome ones together with the others. The cure asks users: a question that nobody minds costs little. Where
# broken calls are thrown away, even welcome questions disappear, because whatever earns less than the mean of its batch
# is worse than what is thrown away.
#
# **How old may data be?** Here is the same loop, with a policy that is served longer before it is replaced:

# %%
figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
for every, colour in ((1, BLUE), (10, GREEN), (10**6, RED)):
    curve = looped(WAYS["loop"], every)
    success_rates = 0.4 * curve[:, 0, 0] * RIGHT[0] + 0.4 * curve[:, 1, 0] * RIGHT[1] + 0.2 * curve[:, 2, 1]
    name = "never replaced" if every > 10**3 else f"replaced after {every} step{'s' * (every > 1)}"
    axis.plot(success_rates, color=colour, label=name)
    print(f"{name:24s} at the end {success_rates[-1]:.2f} of the sessions do what is wanted")
axis.set(xlabel="step", ylabel="sessions that do what is wanted")
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# Where the ratio has left the clip, a sample teaches nothing more in its direction. Data from the first policy are then
# used up: they cannot say what the new policy does wrong. That is why the post's loop ends after five hours.
#
# **A gate.** Before a new policy is shipped, the old and the new one answer held-out tasks. The new one is shipped
# unless it is worse, that is, unless the interval of its gain lies below zero. What does such a gate keep out?

# %%
source(loop.ship)
draw = np.random.default_rng(0)
for gain in (-0.2, -0.1, -0.05, 0.0, 0.1):
    shipped = []
    for _ in range(quick(60, 3)):
        hard = np.clip(
            draw.normal(0.5, 0.2, 40), 0.2, 0.8
        )  # a task's chance of success by the deployed policy, two sessions each
        shipped.append(loop.ship(draw.binomial(2, np.clip(hard + gain, 0, 1)) / 2, draw.binomial(2, hard) / 2)[0])
    print(f"success {gain:+.2f}: shipped in {np.mean(shipped):.0%} of the loops")

# %% [markdown]
# It keeps out what is clearly worse. A policy that is a little worse passes, and a still worse one may pass in the next
# loop: a gate, too, is a test that is repeated. Cursor's gate uses a benchmark far larger than 40 tasks.
#
# ## How it breaks
#
# **A sum without weights.** Shiryaev and Roberts add up all gamblers, and give each a whole unit of capital. That finds
# changes sooner, and bounds the mean time to a false alarm. But the sum has mean $t$, so sooner or later it exceeds any
# threshold:

# %%
runs, steps = quick(400, 20), quick(1000, 50)
draw, sums, weighted_sums = np.random.default_rng(1), np.zeros(runs), np.zeros(runs)
first = {"sum of all": np.zeros(runs, bool), "with weights": np.zeros(runs, bool)}
for t in range(1, steps + 1):
    f = 1 - 0.1 + 0.1 * (draw.random(runs) < 0.5) / 0.5
    sums, weighted_sums = (sums + 1) * f, (weighted_sums + 1 / (t * (t + 1))) * f
    first["sum of all"] |= sums >= 1 / ERROR
    first["with weights"] |= weighted_sums + 1 / (t + 1) >= 1 / ERROR
for name, alarm_mask in first.items():
    print(f"{name:13s} an alarm in {alarm_mask.mean():.1%} of {runs} runs of {steps} steps in which nothing changes")

# %% [markdown]
# **One event counted eight times.** The bets assume that a value's mean is unchanged *given the values before it*,
# including those of its own step. A tool server that is down for a step breaks the calls of all eight groups. That is
# one event, and eight bets on it are not eight bets:

# %%
runs, steps = quick(1000, 50), quick(200, 30)
draw, group_evidence, mean = np.random.default_rng(2), Evidence(), Evidence()
alarms = {"a value for each group": np.zeros(runs, bool), "the mean over the groups": np.zeros(runs, bool)}
for _ in range(steps):
    x = np.repeat((draw.random((runs, 1)) < MEAN).astype(float), GROUPS, axis=1)  # down in one step of ten, as ever
    group_evidence, mean = (
        monitor.advance(previous_evidence, values, Band(MEAN, MEAN))
        for previous_evidence, values in ((group_evidence, x), (mean, x.mean(1, keepdims=True)))
    )
    for name, item in zip(alarms, (group_evidence, mean)):
        alarms[name] |= monitor.log_evidence(item) >= math.log(1 / ERROR)
for name, alarm_mask in alarms.items():
    print(f"{name:25s} an alarm in {alarm_mask.mean():.1%} of {runs} runs in which nothing changes")

# %% [markdown]
# **Training is a change.** If you watch the reward, you get an alarm, and it is good news. Fewer tools, more comments
# and more broken calls are watched; changes the other way are not. Within the tolerance, nothing is promised to be
# found.
#
# ## What trained agents did
#
# In the first experiment, mistakes were planted in the reward of real trainings, and prices followed the alarms. In the
# second, simulated users were served for twelve loops, in five ways. Both use networks in place of the tables above.
#
# The monitor raised no alarm in any of 1,000 unchanged runs, where a threshold of three deviations did in 93 of 100.
# Seven of nine planted habits were found, and one of the other two never doubled. A price from the alarm on took the
# terminal's share from 0.51 to 0.14. In the loop, when kept edits were the only reward, nine of ten sessions on clear
# tasks ended in a question; counting
# follow-ups ended that, and broken calls were given up once they counted. Data that are never renewed cost 0.05 of the
# sessions that do what is
# wanted.

# %%
for experiment in ("monitor", "real-time-rl"):
    verdicts(experiment)
    pixels = plt.imread(ROOT / "results" / "figures" / f"{experiment}.png")
    figure, axis = plt.subplots(figsize=(11, 11 * pixels.shape[0] / pixels.shape[1]), layout="constrained")
    axis.imshow(pixels)
    axis.axis("off")
    plt.show()

# %% [markdown]
# ## Open challenge
#
# Write an alarm that finds a change as early as possible and is false in at most one of a hundred quiet runs.
# `etude challenge 18` gives the rules, a file to begin with and the scores so far.
#
# ## Where to read on
#
# * `ref/monitor.py`: the bets both ways, what they assume, and the signatures of hacks. `scaled/monitor.py`: a group on
#   many ranks.
# * `recipe/small/monitoring.py` and `scaled/watching.py`: the monitor beside RL, small and full. Both say what has
#   changed.
# * `sims/monitor/experiment.py`: mistakes planted in a reward, and prices that follow an alarm. `etude figure monitor`
#   runs it.
# * `sims/real_time_rl/`: users, rewards, loop, gate. `etude figure real-time-rl` runs five ways.
