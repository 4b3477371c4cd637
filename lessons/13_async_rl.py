# %% [markdown]
# # 13 · Asynchronous RL: nobody waits, and nothing is too old
#
# **After this lesson you can** say what a synchronous loop waits for, and predict what is gained if it does not wait;
# keep the life of every sample in a journal from which a service that died is rebuilt; bound the age of a token, and
# name the bias that comes with the bound; and say which log-prob the loss of a stale token needs, and what each
# correction leaves of the gradient.
#
# *About 60 minutes. Prerequisites: lessons 4 and 12. Source: Composer 2 technical report, §4.1 and §6.2;
# arXiv:2509.19128; arXiv:2505.24298.*
#
# ## The idea
#
# A step of RL needs rollouts, and rollouts need weights. A synchronous loop takes turns. The trainer waits for the
# slowest rollout, the engines wait for the trainer, and while a rollout waits for a tool, its slot samples nothing. In
# the report, sampling, environments, training and evaluation are services that do not wait for each other. The price is
# that rollouts are sampled with weights that are some updates old.
#
# $v$ counts the updates. A token that version $u$ sampled and that is trained on at version $v$ has *age* $v - u$. A
# group of rollouts has the age of its oldest token. There are three rules:
#
# $$\text{(1)}\;\; \text{trained} + \text{ready} + \text{running} < (S + v + 1)\,G \qquad
# \text{(2)}\;\; v - u_\text{oldest} \le S \qquad
# \text{(3)}\;\; \rho_t = \frac{\pi(o_t)}{\mu(o_t)}$$
#
# (1) says when another group may start, (2) which group may be trained on, (3) what its loss is made of. $S$ is the
# *staleness*, $G$ the number of groups per step, and $\mu$ the distribution from which the token was drawn. $S = 0$ is
# the synchronous loop.

# %% [markdown]
# **Predict first.** Admission is limited: a group may start only if it is needed for the current step or one of the
# next two. Is then every token that is trained on at most two updates old? How old does the oldest group get in fifty
# steps with slow tools?
#
# We begin on a virtual clock. `simulate` stands in for engines, tools and trainer, and a second there is only a number.
# Tools take a log-normal time, 0.2 seconds on average. Here is the same work, done in turns and done side by side:

# %%
import itertools
import math
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import get_args
from unittest import mock

import matplotlib.pyplot as plt
import torch

from kit.disk import read_lines
from kit.plots import BLUE, COLOURS, GREEN, ORANGE, RED
from lessons.async_parts import Brief, network
from lessons.course import check, hushed, quick, source
from ref import async_rl, dr_grpo
from ref.async_rl import Event, Life, Load, Rules, heavy_tailed, simulate
from ref.engine.continuous import Continuous
from ref.engine.sampler import Sampler
from scaled.async_rl import local, services
from scaled.async_rl.player import Player
from scaled.async_rl.records import unpack

threads = torch.get_num_threads()
torch.set_num_threads(1)  # as the services do
rules, load = Rules(groups=8, staleness=2, steps=quick(6, 3)), Load(heavy_tailed(0.2), slots=64)
runs = {mode: simulate(mode, rules, load) for mode in ("synchronous", "in-flight")}
figure, axes = plt.subplots(2, 1, figsize=(8, 3.4), sharex=True, layout="constrained")
for axis, (mode, out) in zip(axes, runs.items(), strict=True):
    for row, kind, colour in ((1, "train", BLUE), (0, "decode", GREEN), (0, "swap", RED)):
        axis.broken_barh(
            [(x.start, x.end - x.start) for x in out.spans if x.activity == kind],
            (row, 0.8),
            color=colour,
            edgecolor="white",
            linewidth=0.3,
        )
    axis.set(title=f"{mode}: {len(out.steps)} steps", yticks=(0.4, 1.4), yticklabels=("engine", "trainer"))
axes[-1].set(xlabel="virtual seconds")
plt.show()
for mode, out in runs.items():
    idle = f"trainer {out.trainer_idle:.0%}, engine {out.sampler_idle:.0%}"
    print(f"{mode:12s} {out.seconds:5.1f} s; idle: {idle}; mean age of a token {out.mean_age:.2f} updates")

# %% [markdown]
# The engine's green bars end raggedly: while the last rollouts of a step wait for their tools, it decodes a handful of
# rows, or none. Side by side, other groups fill these gaps.
#
# ## Exercise 1: what waiting costs
#
# Between the two lies *one-step-off*: while a step is trained, the groups of the next one are sampled, and then each
# waits for the other. Sampling the groups of a step takes `sample` seconds, training `train` seconds, each by itself.
# While both run, each goes at the speed `shared`: 1 if they have machines of their own, less if they share one. Write
# `pace(sample, train, shared)`: the seconds of a step of the synchronous loop, and those of a step of one-step-off, in
# the long run.


# %% tags=["exercise"]
def pace(sample, train, shared):
    raise NotImplementedError  # your code: a pair


# %% tags=["check"]
def check_1():
    for sample, train, shared in ((1.0, 3.0, 1.0), (5.0, 3.0, 1.0), (1.0, 3.0, 0.5), (5.0, 3.0, 0.75)):
        tokens = round(10 * sample)
        even = Load(
            lambda group, rollout, n=tokens: [(n, 0.0)],
            1,
            4,
            token_s=lambda rows: 0.1,
            train_s=train,
            swap_s=0.0,
            shared=shared,
        )
        for actual, mode in zip(pace(sample, train, shared), ("synchronous", "one-step-off"), strict=True):
            before, last = simulate(mode, Rules(groups=4, steps=6), even).steps[2:4]
            message = (
                f"{sample:g} s of sampling, {train:g} s of training, speed {shared:g}: {mode} takes "
                f"{last - before:g} s a step, not {actual:g}"
            )
            assert abs(actual - (last - before)) < 1e-6, message


check(1, check_1)


# %% tags=["solution"] jupyter={"source_hidden": true}
def pace(sample, train, shared):
    overlap = min(sample, train) / shared  # until the shorter one is done
    return sample + train, overlap + abs(sample - train)


check(1, check_1)

# %% [markdown]
# At half speed each, one-step-off takes as long as taking turns: overlap alone gains back what was idle, and no more.
# On two cores of a laptop that is little. What it hides is waiting, above all for tools.
#
# ## The life of a sample
#
# generate → score → ready → train. Services die, and what they knew about each group must not die with them. So
# everything they know follows from a journal of four kinds of events: `Life` is a *fold* over it. It refuses an event
# that cannot follow.

# %%
source(Event, Life.admissible.fget, Life.take)  # pyright: ignore[reportAttributeAccessIssue]

# %%
life = Life(Rules(groups=2, staleness=1, steps=9))
first, second, third = life.start(), life.start(), life.start()
life.finish(third, oldest=0)
life.finish(first, oldest=0)
life.train(life.take())  # pyright: ignore[reportArgumentType]
life.start()
for event in life.journal:
    print(f"{event.kind:6s} groups {event.groups}, version {event.version}")
replica = Life(life.rules, life.journal)
print(
    f"after a kill: {replica.state}; {replica.admissible} more may start; the same as before: "
    f"{vars(replica) == vars(life)}"
)
try:
    replica.train((first, third))
except ValueError as error:
    print(f"said once more by a trainer that does not know whether it was heard: {error}")

# %% [markdown]
# The trainer took groups 0 and 2, and did not wait for group 1. Then one step was reported twice, and counted once.
#
# ## Exercise 2: the fold
#
# Write `may_start(journal, groups, staleness)`: how many groups may start after these events, by rule (1). The run has
# no end, so `steps` does not matter. A group that was dropped makes room for another one. Events are `Event`s: `kind`,
# `groups`, `version`.


# %% tags=["exercise"]
def may_start(journal, groups, staleness):
    raise NotImplementedError  # your code: a whole number


# %% tags=["check"]
def check_2():
    rng, limits = random.Random(0), Rules(groups=2, staleness=1, steps=10**6)
    life = Life(limits)
    for _ in range(300):
        actual, expected = may_start(list(life.journal), 2, 1), life.admissible
        counts = ", ".join(f"{n} {kind}" for kind, n in Counter(event.kind for event in life.journal).items())
        assert actual == expected, f"G = 2, S = 1; after {counts or 'no event'}: {expected} may start, not {actual}"
        running = [group for group, state in life.state.items() if state == "running"]
        move = rng.choice(("start", "finish", "finish", "drop", "train", "train"))
        if move == "start" and life.admissible:
            life.start()
        elif move == "finish" and running:
            life.finish(rng.choice(running), life.version)
        elif move == "drop" and running and rng.random() < 0.3:
            life.drop(rng.choice(running))
        elif move == "train" and (batch := life.take()):
            life.train(batch)


check(2, check_2)


# %% tags=["solution"] jupyter={"source_hidden": true}
def may_start(journal, groups, staleness):
    n = Counter(event.kind for event in journal)
    return (staleness + n["train"] + 1) * groups - (n["start"] - n["drop"])


check(2, check_2)

# %% [markdown]
# ## How it breaks: admission alone
#
# Rule (1) looks like a bound on the age: nobody may run more than $S$ steps ahead. It bounds *how many* groups run
# ahead. A slow group may start at version 0, be overtaken by all others, and end at version 9. Take rule (2) away, keep
# (1) at $S = 2$, and run
# the same services:


# %%
class AdmissionOnly(Life):
    """Admission at staleness 2; what is ready is trained on, however old."""

    @property
    def admissible(self):
        ahead = min(2 + self.version + 1, self.rules.steps) * self.rules.groups
        return max(0, ahead - self.count("running", "ready", "trained"))


steps = quick(50, 12)
load = Load(heavy_tailed(2.0), slots=96, train_s=1.0)
with mock.patch.object(async_rl, "Life", AdmissionOnly):
    unbounded = simulate("in-flight", Rules(8, staleness=10**6, steps=steps), load)
bounded = simulate("in-flight", Rules(8, staleness=2, steps=steps), load)

figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
for shift, (name, out), colour in ((-0.2, ("(1) alone", unbounded), RED), (0.2, ("(1) and (2)", bounded), BLUE)):
    axes.bar([age + shift for age in out.group_ages], list(out.group_ages.values()), 0.4, color=colour, label=name)
axes.axvline(2.5, color="grey", linewidth=0.8, linestyle="--")
axes.set(xlabel="age of a group when it is trained on, updates", ylabel="groups")
axes.legend(frameon=False)
plt.show()
for name, out in (("(1) alone", unbounded), ("(1) and (2)", bounded)):
    print(
        f"{name:12s} oldest group {max(out.group_ages)}, mean age of a token {out.mean_age:.2f}; "
        f"{out.trained} groups trained, {out.dropped} dropped"
    )

# %% [markdown]
# **Your prediction:** no. Admission alone limits how many groups run ahead, and here the oldest group is eight updates
# old when it is trained on. Only rule (2) bounds the age.

# %% [markdown]
# ## The bound and its bias
#
# With (2), a group that is too old when a step would take it is dropped, and another one takes its place. That is not
# free. What is dropped is not a random choice:

# %%
state = Life(Rules(8, 2, steps), bounded.journal).state
for kind in ("trained", "dropped"):
    rollouts = [
        load.turns(group, n)
        for group, group_state in state.items()
        if group_state == kind
        for n in range(load.rollouts)
    ]
    if rollouts:
        turns = sum(map(len, rollouts)) / len(rollouts)
        waits = sum(sum(wait for _, wait in rollout_turns) for rollout_turns in rollouts) / len(rollouts)
        print(
            f"{kind:8s} {len(rollouts) // load.rollouts:4d} groups: {turns:.2f} turns and {waits:.1f} "
            f"s of tools a rollout"
        )

# %% [markdown]
# What is dropped is slow, and what is slow has more turns and slower tools. A policy that is trained on the rest learns
# less from how its slow rollouts ended. Whoever reports a success rate should also report the dropped groups.
#
# ## Versions, token by token
#
# A plain engine finishes its rollouts with the old weights before it loads new ones. With *updates in flight* it loads
# them between two tokens, and goes on: later tokens of a long rollout are fresher. Every token keeps the version that
# sampled it. Prompts and the answers of tools were sampled by nobody; their version is −1.
#
# ## Exercise 3: how old is a group?
#
# Write `age(rollouts, version)`: the age of a group at a step at `version`. Each rollout is a list with the version of
# every token, −1 where the token was given.


# %% tags=["exercise"]
def age(rollouts, version):
    raise NotImplementedError  # your code: a whole number


# %% tags=["check"]
def check_3():
    actual = age([[-1, -1, 4, 4, -1, 5]], 6)
    assert actual == 2, (
        f"the oldest token that was sampled has version 4, and 6 − 4 = 2, not {actual}; a given token has no age"
    )
    actual = age([[-1, 5, 6], [-1, 3, 6], [-1, 6]], 6)
    assert actual == 3, f"a group is as old as the oldest token of any of its rollouts: 6 − 3 = 3, not {actual}"
    actual = age([[-1, 6, -1, 6], [-1, 6]], 6)
    assert actual == 0, f"all tokens are of the newest weights: age 0, not {actual}"


check(3, check_3)


# %% tags=["solution"] jupyter={"source_hidden": true}
def age(rollouts, version):
    return version - min(token_version for rollout in rollouts for token_version in rollout if token_version >= 0)


check(3, check_3)

# %% [markdown]
# ## What the log-prob must be
#
# $\mu(o_t)$ in (3) is the probability under which the token was drawn. It is tempting to keep only versions and to
# compute $\mu$ later, with the weights of that version. With updates in flight that is another number. Keys and values
# of earlier tokens were
# computed with older weights, and the new weights read them. No single version ever had this distribution. An engine
# could read the whole context again after each swap (`cache="recompute"`), which costs a prefill. Both ways, with new
# weights from the twelfth place on:

# %%
old, new = network().double().requires_grad_(False), network().double().requires_grad_(False)
generator = torch.Generator().manual_seed(1)
with torch.no_grad():
    for p in new.parameters():
        p += 0.005 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
models = {0: old, 1: new}


def sampled(cache):
    """A context of 24 tokens; the weights change after nine of them were sampled."""
    engine = Continuous(Sampler(old, torch.float64), slots=1, max_len=24)
    slot = engine.add(
        [1, 2, 3], [-1], draws=torch.rand(24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    )
    for _ in range(9):
        engine.step()
    engine.load(new, 1, cache)
    while not engine.step():
        pass
    return engine.remove(slot)


for cache in ("keep", "recompute"):
    rollout = sampled(cache)
    later = {version: model(rollout.tokens[None]).logits[0, :-1].log_softmax(-1) for version, model in models.items()}
    print(f'cache="{cache}": largest |log μ recorded − log μ computed afterwards|, nats:', end=" ")
    for version, logp in later.items():
        mask = rollout.version[1:] == version
        max_difference = (rollout.logp[1:] - logp.gather(1, rollout.tokens[1:, None])[:, 0])[mask].abs().max()
        print(
            f"{max_difference:.1g} for {int(mask.sum())} tokens of version {version}",
            end="; " if version == 0 else "\n",
        )

# %% [markdown]
# So the log-prob is recorded when the token is drawn, and travels with it. Versions are only for bookkeeping.
#
# ## What a stale token does to the loss
#
# Take a policy that can be enumerated: two tokens, three values each, nine rollouts. The first token was drawn two
# updates ago, the second one update ago. All expectations are sums over nine terms, so there is no noise, only bias.
# Each way to use such tokens gives a gradient, to be compared with the gradient on policy:
#
# * *as if fresh*: $\nabla\log\pi$ times the advantage, without a correction;
# * *PPO's clip*: the surrogate of lesson 4. A token whose ratio has left $[0.8, 1.2]$ on its own side has no gradient;
# * *token weights* (`truncated_ratios`): $\min(\rho_t, 2)$, a constant, times $\nabla\log\pi$;
# * *sequence rejection* (`sequence_mask`): rollouts whose ratios have a geometric mean outside $[0.8, 1.25]$ do not
#   count. Then token weights.

# %%
source(async_rl.truncated_ratios, async_rl.sequence_mask)


# %%
def logps(weights):
    """Log-probs of both tokens of the nine rollouts, [9, 2]."""
    return torch.stack(
        (weights[:3].log_softmax(0).repeat_interleave(3), weights[3:].view(3, 3).log_softmax(1).flatten()), 1
    )


def gradients(current_weights, first, second, reward, weight_functions=()):
    """The exact gradient at `current_weights`, of tokens drawn by `first` and by `second`: name → [12]. `more`: further
    names → weights of tokens, a function of the log ratios."""
    current_weights = current_weights.clone().requires_grad_()
    logp, behavior = logps(current_weights), torch.stack((logps(first)[:, 0], logps(second)[:, 1]), 1)
    chance, ratio = behavior.sum(1).exp(), (logp - behavior).detach()
    advantage = reward - (chance * reward).sum()
    accept_mask = async_rl.sequence_mask(ratio, torch.ones(9, 2, dtype=torch.bool), 0.8, 1.25)
    truncated = async_rl.truncated_ratios(ratio)
    weights = {
        "as if fresh": torch.ones_like(ratio),
        "token weights": truncated,
        "sequence rejection": accept_mask * truncated,
    }
    weights |= {name: function(ratio) for name, function in dict(weight_functions).items()}
    goals = {name: (chance[:, None] * w * advantage[:, None] * logp).sum() for name, w in weights.items()}
    goals["PPO's clip"] = -dr_grpo.policy_loss(logp, behavior, advantage, chance[:, None].expand(9, 2), budget=1)
    goals["on policy"] = (logp.sum(1).exp() * reward).sum()
    return {name: torch.autograd.grad(goal, current_weights, retain_graph=True)[0] for name, goal in goals.items()}


def draw_policies(seed, size):
    """A random policy, an update of this size in each logit, and rewards."""
    g = torch.Generator().manual_seed(seed)
    current_weights, update = (
        torch.randn(12, dtype=torch.float64, generator=g),
        size * torch.randn(12, dtype=torch.float64, generator=g),
    )
    return (
        current_weights,
        current_weights - 2 * update,
        current_weights - update,
        torch.rand(9, dtype=torch.float64, generator=g),
    )


sizes = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
policies = quick(100, 20)
gradients_by_size = [[gradients(*draw_policies(seed, size)) for seed in range(policies)] for size in sizes]
names = [name for name in gradients_by_size[0][0] if name != "on policy"]
figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
print(f"{'size of an update':20s}" + "".join(f"{size:13g}" for size in sizes))
for name, colour, style in zip(names, COLOURS, ("-", "--", "-.", ":"), strict=False):
    pairs = [
        [(policy_gradients[name], policy_gradients["on policy"]) for policy_gradients in size_gradients]
        for size_gradients in gradients_by_size
    ]
    error = [sum(float((a - b).norm() / b.norm()) for a, b in size_pairs) / policies for size_pairs in pairs]
    cosine = [sum(float(torch.cosine_similarity(a, b, 0)) for a, b in size_pairs) / policies for size_pairs in pairs]
    axes[0].loglog(sizes, error, style, color=colour, marker="o", markersize=3, label=name)
    axes[1].semilogx(sizes, cosine, style, color=colour, marker="o", markersize=3)
    print(f"{name:20s}" + "".join(f"{a:7.3f} {b:5.3f}" for a, b in zip(error, cosine, strict=True)))
axes[0].set(xlabel="size of an update, in each logit", ylabel="relative error of the gradient")
axes[1].set(xlabel="size of an update, in each logit", ylabel="cosine with the one on policy")
axes[0].legend(frameon=False)
plt.show()

# %% [markdown]
# As long as nothing is cut off, the last three are the same. A token's own ratio takes away a third of the error. The
# rest is the other token's ratio, which none of them takes into account. With larger updates they diverge. Token
# weights stay best. Sequence rejection and the clip throw gradient away, and what is left points elsewhere: from 0.1
# on, the clip is further from the gradient on policy than no correction at all. It is a brake, which limits how far a
# token is pushed, and not a correction for age. Where updates are small, all agree. Hence the report's main strategy:
# samples stay close to on-policy.
#
# ## Exercise 4: the exact weight
#
# None of them is exact, at any size. Which weights of tokens are? Write `exact(log_ratio)`, [B, T] → [B, T]: $w$ such
# that $\mathbb{E}_\mu\bigl[\sum_t w_t\,A\,\nabla\log\pi(o_t)\bigr]$ is the gradient on policy. The reward $A$ belongs
# to the
# whole rollout.


# %% tags=["exercise"]
def exact(log_ratio):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_4():
    log_ratio = torch.tensor([[0.0, math.log(2.0), math.log(3.0)]], dtype=torch.float64)
    actual = exact(log_ratio)
    assert actual.shape == log_ratio.shape, f"a weight for each token, [1, 3], not {list(actual.shape)}"
    for seed in range(20):
        gradients_by_name = gradients(*draw_policies(seed, 0.4), weight_functions={"yours": exact})
        relative_error = float(
            (gradients_by_name["yours"] - gradients_by_name["on policy"]).norm() / gradients_by_name["on policy"].norm()
        )
        assert relative_error < 1e-9, (
            f"on enumerated policies your gradient is {relative_error:.1%} away from the one on policy"
        )
    assert torch.allclose(actual, torch.full((1, 3), 6.0, dtype=torch.float64)), (
        f"ratios 1, 2 and 3: got {[round(x, 3) for x in actual[0].tolist()]}"
    )


check(4, check_4)


# %% tags=["solution"] jupyter={"source_hidden": true}
def exact(log_ratio):
    return log_ratio.sum(1, keepdim=True).exp().expand_as(log_ratio)


check(4, check_4)

# %% [markdown]
# This is exact, and of no use: the product of $T$ ratios, each with a log-normal spread of $\sigma$, has a relative
# variance of $e^{\sigma^2 T} - 1$. Bias is the price of avoiding that.

# %%
for T in (10, 100, 1000):
    print(
        f"σ = 0.1, {T:5d} tokens: one ratio varies by {math.expm1(0.01):.3f}, their product by "
        f"{math.expm1(0.01 * T):.3g}"
    )

# %% [markdown]
# ## Four ways to run the same services
#
# Back to the virtual clock. *asynchronous* is within $S$, but an engine loads new weights only once its running
# rollouts have ended.

# %%
config = async_rl.Demo(latencies=quick((0.0, 0.1, 0.2, 0.5, 1.0), (0.0, 0.5)), steps=quick(12, 3))
demo = async_rl.demo(config)
modes = get_args(async_rl.Mode)
measures = {
    "steps_per_minute": "steps a minute",
    "mean_age": "mean age of a token, updates",
    "dropped": "groups dropped",
}
figure, axes = plt.subplots(1, 3, figsize=(10, 3.2), layout="constrained")
for mode, colour, style in zip(modes, COLOURS, ("-", "--", "-.", ":"), strict=False):
    for axis, (measure, label) in zip(axes, measures.items(), strict=True):
        axis.set(xlabel="mean latency of a tool, s", ylabel=label)
        axis.plot(
            config.latencies,
            [demo[f"{measure}@{mode},{x:g}"] for x in config.latencies],
            style,
            color=colour,
            label=mode,
        )
axes[0].legend(frameon=False)
plt.show()
for x in config.latencies:
    before = demo[f"steps_per_minute@synchronous,{x:g}"]
    print(
        f"{x:4.2f} s: " + ", ".join(f"{mode} {demo[f'steps_per_minute@{mode},{x:g}'] / before:.2f}" for mode in modes)
    )

# %% [markdown]
# Without tools, overlap gains what training and sampling can hide of each other: exercise 1, with machines of their
# own. With slow tools it gains much more, and most with updates in flight. One-step-off still waits for the slowest
# rollout of each step. An engine that has to finish its rollouts before it loads new weights samples little meanwhile,
# and what it began just before an update is soon too old: it drops the most. The price of throughput is age. Where
# tools are quick it lies close to $S$, because sampling runs ahead as far as it may.
#
# ## Processes
#
# Now without a virtual clock. `local.play` starts a reconciler, which holds a `Life`, a trainer and two workers, each a
# process of its own. The problem is small: nine tokens, three turns, less reward for each token
# (`lessons/async_parts.py`). First $S = 0$. The promise is that it *is* the synchronous loop: not similar, but the same
# bits. Here is that loop, with its
# conversations split into two
# shares:


# %%
def synchronous(parts, workers):
    """No service, no waiting for each other: sample, then train."""
    learner = parts.learner()
    players = [
        Player(parts.sampler(), parts.setup(), slots=16, rollouts=parts.rollouts, seed=0) for _ in range(workers)
    ]
    for step in range(parts.steps):
        rollouts_by_group = {}
        for n, player in enumerate(players):
            player.load(learner.model, step)
            player.give([step * parts.groups + g for g in range(parts.groups) if g * workers // parts.groups == n])
            while player.groups:
                rollouts_by_group |= player.tick()
        learner.step([rollout for group in sorted(rollouts_by_group) for rollout in rollouts_by_group[group]])
    return learner


def trained(folder, parts):
    """The learner as the trainer left it, and one that is trained again from the journal and the records."""
    left, replica = parts.learner(), parts.learner()
    services.restored(folder / "trainer", left)
    services.replay(folder, replica)
    return left, replica


def are_equal(a, b):
    return all(x.equal(y) for x, y in zip(a.masters.masters.parameters(), b.masters.masters.parameters(), strict=True))


base = Path(tempfile.mkdtemp())
parts = Brief(steps=quick(8, 3))
with hushed():
    local.play(
        local.Plan(
            base / "still", Rules(parts.groups, 0, parts.steps), parts, workers=2, slots=16, rollouts=parts.rollouts
        )
    )
left, replica = trained(base / "still", parts)
print(f"S = 0 and two processes: the synchronous loop's weights, to the bit: {are_equal(left, synchronous(parts, 2))}")
print(f"trained again from the journal: the same bits: {are_equal(left, replica)}")

# %% [markdown]
# Now $S = 2$, slow tools, weights in flight. After the second step a worker is killed, with SIGKILL, in the middle of
# its rollouts.

# %%
parts = Brief(steps=quick(20, 6), tool_s=0.03)
bound = Rules(parts.groups, 2, parts.steps)
alive, ages = {}, []


def show(step, figures):
    ages.append(figures["oldest"])
    if step == 2:
        alive["worker-1"].kill()


with hushed():
    plan = local.Plan(base / "flight", bound, parts, workers=2, slots=16, rollouts=parts.rollouts)
    local.play(plan, show, started=alive.__setitem__)
journal = read_lines(base / "flight" / "journal.jsonl")
ready = {line["groups"][0]: line["key"] for line in journal if line["kind"] == "ready"}
batches = [line["groups"] for line in journal if line["kind"] == "train"]
worker_counts = Counter(key.split("-", 1)[1] for key in ready.values())
print(
    ", ".join(
        f"{name.rpartition('-')[0]}, process {int(name.rpartition('-')[2]) + 1}: {n} groups"
        for name, n in sorted(worker_counts.items())
    )
)
different = len(set(itertools.chain(*batches)))
print(
    f"{len(batches)} steps on {different} different groups; the oldest token that was trained on: "
    f"{max(ages):.0f} updates"
)
left, replica = trained(base / "flight", parts)
print(f"trained again from the journal: the same bits: {are_equal(left, replica)}")

# %% [markdown]
# What the first process of worker-1 left unfinished was sampled anew, by its second process or by worker-0. Such a
# group keeps its number, and with it its task and its random numbers, and no group was trained on twice. *When* things
# happen is different on each run. What the trainer did is in the journal, and can be replayed. Here is which versions
# wrote the tokens of each
# group, and which
# step took it:

# %%
figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
for at, (step, group) in enumerate((step, group) for step, batch in enumerate(batches) for group in batch):
    segments = [s for p in unpack((base / "flight" / "groups" / ready[group]).read_bytes()) for s in p.chain.segments]
    versions = Counter(torch.cat([s.version[s.sampled] for s in segments]).tolist())
    axes.plot([at, at], [min(versions), max(versions)], color=GREEN, linewidth=1)
    axes.scatter(
        [at] * len(versions), list(versions), [40 * n / versions.total() for n in versions.values()], color=GREEN
    )
positions = [n for n in range(len(batches) * parts.groups)]
axes.step(positions, [n // parts.groups for n in positions], where="mid", color=BLUE, label="version that is trained")
axes.step(
    positions,
    [n // parts.groups - 2 for n in positions],
    where="mid",
    color=ORANGE,
    linestyle="--",
    label="bound, S = 2",
)
axes.set(
    xlabel="groups, in the order in which they were trained on", ylabel="version of their tokens", ylim=(-0.5, None)
)
axes.legend(frameon=False)
plt.show()
shutil.rmtree(base)
torch.set_num_threads(threads)

# %% [markdown]
# ## Open challenge
#
# Decide on a virtual clock how many rollouts to start, for the most useful work per second under a bound on its age.
# `etude challenge 13` gives the rules, a file to begin with and the scores so far.
#
# ## Where to read on
#
# * `ref/async_rl.py`: the life of a sample, the corrections, the virtual clock.
# * `scaled/async_rl/reconciler.py`: which worker samples what, and which worker is given up; `services.py`: what each
#   process does; `tests/mirror/test_async_rl.py` kills all of them.
# * `etude run async-rl --scale small` runs these services with the agent of `make small`, and draws who did what when.
# * PipelineRL (arXiv:2509.19128) for updates in flight; AReaL (arXiv:2505.24298) for admission; IMPALA
#   (arXiv:1802.01561) for truncated weights.
