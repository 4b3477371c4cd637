# %% [markdown]
# # 11 · The mirror: one meaning on many ranks
#
# **After this lesson you can** say what a rank holds under data, context and expert parallelism and what it must ask of
# others; write a loss whose value and gradient do not depend on who computes which part; and recognise the mean that
# makes them depend on it.
#
# *About 60 minutes. Prerequisites: lessons 4 and 9. Source: Composer 2 technical report, §6.1.*
#
# ## The idea
#
# Every technique of this repository is written twice. `ref/X.py` takes the whole problem. `scaled/X.py` has the same
# names and the same signatures, takes *this rank's shard* of the same arguments, and returns this rank's shard, or the
# same number on every rank. The ranks are not an argument: they are the mesh that is set. Tests hold the two versions
# equal, in value and in gradient, on every layout of 1, 2 and 4 ranks.
#
# What makes that possible is one decision about losses. With $\ell_t$ for what a token contributes, $n$ tokens in all,
# and $R$ ranks:
#
# $$L = \frac1n\sum_{r=1}^{R}\ \sum_{t \in r} \ell_t \qquad\Longrightarrow\qquad
# \nabla L = \sum_{r=1}^{R} \nabla\Bigl(\frac1n \sum_{t\in r}\ell_t\Bigr)$$
#
# The loss is a sum over ranks of sums over tokens, divided by a number that every rank knows beforehand. Each rank
# calls backward on its own part, and gradients are *added*. Nothing depends on how the tokens were dealt out.

# %% [markdown]
# **Predict first.** One rank holds the four long texts of a batch, with 124 tokens to predict; the other holds the four
# short ones, with
# 12. Suppose that each rank takes the mean over its own tokens, and that gradients are averaged over the two ranks. How
#     many times as much
# does a token of a short text weigh as one of a long text? And would the loss that is reported at the first step give
# the mistake away?
#
# But first a drawing of which part is whose, on four ranks, two along each axis:

# %%
import matplotlib.pyplot as plt
import torch

import ref.cpt
import ref.dr_grpo
import scaled.cpt
import scaled.dr_grpo
from lessons import mesh_pictures
from lessons.course import check, quick, source
from lessons.mirror_ranks import Ranks
from ref.network import Config, Transformer
from scaled.network import model as network
from scaled.network.dispatch import on_owners
from scaled.runtime import comm, sharding
from scaled.runtime.comm import Traffic, all_reduce_sum, sum_over, total
from scaled.runtime.cut import cut, joined, places
from scaled.runtime.mesh import current

mesh_pictures.who_holds(dp=2, cp=2, ep=2)

# %% [markdown]
# Each box is a rank, and the batch on the right is painted in the ranks' colours. Three axes divide three different
# things:
#
# * `dp`, data parallelism, divides rows. Ranks one above the other train on different rows.
# * `cp`, context parallelism, divides the tokens of a row. Ranks side by side share their rows, and each has an early
#   chunk and a late one.
# * `ep`, expert parallelism, divides a layer's experts among neighbours. It adds no ranks: it is another way to group
#   the same ones. Ranks 0 and 2 own the same experts, so each keeps half of their weights.
#
# All other weights lie across all four ranks, a quarter on each, whatever the axes.
#
# This lesson runs on two ranks, two processes on this machine. We send each of them the text of a function, and they
# answer:

# %%
two = Ranks(2)
LAYOUTS = {
    "dp = 2": dict(dp=2),
    "cp = 2": dict(cp=2),
    "dp = 2, ep = 2": dict(dp=2, ep=2),
    "cp = 2, ep = 2": dict(cp=2, ep=2),
}


def get_mesh_coordinates():
    """This rank's place on each axis of the mesh."""
    return {axis: f"{current().group(axis).rank} of {current().group(axis).size}" for axis in ("dp", "cp", "ep", "all")}


for name, layout in LAYOUTS.items():
    for rank, places_of in enumerate(two.run(layout, get_mesh_coordinates)):
        print(f"{name:15s} rank {rank}:  " + "   ".join(f"{axis} {place}" for axis, place in places_of.items()))

# %% [markdown]
# With two ranks only one of `dp` and `cp` can be 2. In `dp = 2, ep = 2` the two ranks that train on different rows are
# also the two that own different experts. The axis `all` is made of both ranks in every layout.
#
# ## Who holds which tokens

# %%
source(cut, places)


def get_own_places():
    """Which places of a batch of 4 rows of 16 tokens are this rank's."""
    return cut(torch.arange(64).view(4, 16)).flatten()


figure, panels = plt.subplots(1, 2, figsize=(9, 1.9), layout="constrained")
for axes, name in zip(panels, ("dp = 2", "cp = 2"), strict=True):
    owner = torch.zeros(64)
    for rank, own_places in enumerate(two.run(LAYOUTS[name], get_own_places)):
        owner[own_places] = rank
    axes.imshow(owner.view(4, 16).numpy(), cmap="cividis", aspect="auto")
    axes.set(title=f"{name}: rank 0 dark, rank 1 light", xlabel="token", ylabel="row", yticks=range(4))
plt.show()

# %% [markdown]
# Context parallelism gives each rank an early chunk and a late one; lesson 9 showed why. What a rank then lacks are the
# keys and values of the other chunks. They are gathered, and the queries stay where they are:

# %%
source(network.Attention)

# %% [markdown]
# ## A loss of all ranks
#
# Lesson 4's loss, on a batch that is cut by rows and on one that is cut by tokens. What every rank reports has to be
# what `ref` says of the whole, and so has the gradient:

# %%
generator = torch.Generator().manual_seed(0)
B, T = 6, 16
logp, behavior = (-3 * torch.rand(B, T, dtype=torch.float64, generator=generator) for _ in range(2))
advantages = torch.randn(B, dtype=torch.float64, generator=generator)
mask = torch.rand(B, T, generator=generator) < 0.6


def policy(logp, behavior, advantages, mask):
    """Loss of this rank's shard, and the whole gradient."""
    own_logp = cut(logp).clone().requires_grad_()
    loss = scaled.dr_grpo.policy_loss(own_logp, cut(behavior), cut(advantages), cut(mask), budget=48)
    loss.backward()
    return loss.detach(), joined(own_logp.grad)


full_logp = logp.clone().requires_grad_()
expected_loss = ref.dr_grpo.policy_loss(full_logp, behavior, advantages, mask, budget=48)
expected_loss.backward()
print(f"ref, the whole batch:   loss {expected_loss.item():+.15f}")
for name in ("dp = 2", "cp = 2"):
    for rank, (loss, gradient) in enumerate(two.run(LAYOUTS[name], policy, logp, behavior, advantages, mask)):
        print(
            f"scaled, {name}, rank {rank}: loss {loss.item():+.15f}, gradient off by "
            f"{(gradient - full_logp.grad).abs().max():.0e}"
        )

# %% [markdown]
# Two functions do the adding, and between them lies a trap:

# %%
source(comm.Total, total, comm.SumOver, sum_over)

# %% [markdown]
# Both add up over ranks; they differ on the way back, in `backward`. `total` is for the last step: every rank reports
# the sum, each differentiates its own part, and the gradient passes through unchanged. `sum_over` is for a sum that
# every rank goes on to *use*: its gradient is the sum of what comes back on all of them. Confuse the two, and the
# values are still
# right:


# %%
def square_sum(x, function):
    """Σ x² over all ranks, and its gradient, with either of the two."""
    own_x = cut(x).clone().requires_grad_()
    value = (total if function == "total" else sum_over)(own_x.square().sum(), "all")
    value.backward()
    return value.item(), joined(own_x.grad)


x = torch.arange(1.0, 5.0, dtype=torch.float64)
for function in ("total", "sum_over"):
    value, gradient = two.run(dict(dp=2), square_sum, x, function)[0]
    print(f"{function:9s} value {value:g}, gradient {gradient.tolist()}; right is {(2 * x).tolist()}")

# %% [markdown]
# ## Exercise 1: a mean over all tokens
#
# Write `mean_nll(nll, scored)`: from this rank's losses per token [b, t] and a mask of those that count, the mean over
# all ranks' counted tokens. Every rank has to return the same value, and its backward pass has to leave the gradient of
# that mean. `total` and `all_reduce_sum` (a sum over ranks without gradient) are all that you need.


# %% tags=["exercise"]
def mean_nll(nll, scored):
    raise NotImplementedError  # your code


# %% tags=["check"]
def mean_on_ranks(nll, scored):
    own_nll = cut(nll).clone().requires_grad_()
    value = mean_nll(own_nll, cut(scored))
    value.backward()
    return value.item(), joined(own_nll.grad)


def check_1():
    nll = torch.rand(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    scored = torch.zeros(4, 8, dtype=torch.bool)
    scored[0, 6:], scored[2:, 2:] = True, True
    for name in ("dp = 2", "cp = 2"):
        for rank, (value, gradient) in enumerate(two.run(LAYOUTS[name], mean_on_ranks, nll, scored)):
            right = nll[scored].mean().item()
            assert abs(value - right) < 1e-12, (
                f"{name}: rank {rank} says {value:.6f}, and the mean of all is {right:.6f}"
            )
            away = (gradient - scored.double() / scored.sum()).abs().max().item()
            assert away < 1e-12, (
                f"{name}: the value is right, and the gradient is off by {away:.2g}; each counted "
                f"token has 1/{int(scored.sum())}"
            )


check(1, check_1)


# %% tags=["solution"] jupyter={"source_hidden": true}
def mean_nll(nll, scored):
    return total((nll * scored).sum() / all_reduce_sum(scored.sum()))


check(1, check_1)

# %% [markdown]
# ## Exercise 2: a group on two ranks
#
# The $N$ rollouts of a prompt may be spread over several ranks. Write `advantages_here(rewards)`: rewards [G, n] of
# this rank's rollouts of G groups (n differs between ranks, and may be 0) → reward minus the mean of the *whole* group.
# Do not use
# `scaled.dr_grpo`; `all_reduce_sum(x, "dp")` is enough.


# %% tags=["exercise"]
def advantages_here(rewards):
    raise NotImplementedError  # your code


# %% tags=["check"]
def groups_on_ranks(rewards, sizes):
    """The columns of `rewards`, so many of them on each rank."""
    rank = current().group("dp").rank
    own_rewards = rewards[:, sum(sizes[:rank]) : sum(sizes[: rank + 1])]
    return advantages_here(own_rewards)


def check_2():
    rewards = torch.rand(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected = ref.dr_grpo.group_advantages(rewards)
    for sizes in ((3, 2), (1, 4), (5, 0)):
        actual = torch.cat(two.run(dict(dp=2), groups_on_ranks, rewards, sizes), 1)
        assert actual.shape == expected.shape, (
            f"an advantage for each reward, {list(expected.shape)}, not {list(actual.shape)}"
        )
        away = (actual - expected).abs().max().item()
        assert away < 1e-12, f"with {sizes[0]} and {sizes[1]} rollouts a group: off by {away:.2g}"


check(2, check_2)


# %% tags=["solution"] jupyter={"source_hidden": true}
def advantages_here(rewards):
    count = all_reduce_sum(torch.tensor(float(rewards.shape[1])), "dp")
    return rewards - (all_reduce_sum(rewards.sum(1), "dp") / count)[:, None]


check(2, check_2)

# %% [markdown]
# A mean over the rollouts that a rank happens to hold would have given the single rollout of (1, 4) an advantage of
# exactly zero. Nothing is learned from it, and no log says so.
#
# ## Who holds which weights
#
# FSDP2 shards every weight outside the experts over all ranks, and gathers it only while its block computes. Experts
# are first dealt out whole to the ranks of an ep group. As you read the code below, look for the division that is not
# there:

# %%
source(sharding.shard)


def weights_here(config):
    """Numbers that this rank holds at rest: of experts, and of all else."""
    sizes = {"experts": 0, "all else": 0}
    for name, p in network.Transformer(config).named_parameters():
        sizes["experts" if name.rpartition(".")[2] in sharding.EXPERTS else "all else"] += p.to_local().numel()
    return sizes


tiny = Config.tiny(
    64, hidden_size=32, num_hidden_layers=2, num_experts=4, moe_intermediate_size=48, head_dim=16, num_attention_heads=2
)
print(f"the whole network: {tiny.parameters():,}")
for name in ("dp = 2", "dp = 2, ep = 2"):
    print(
        name,
        *(f"rank {rank}: {sizes}" for rank, sizes in enumerate(two.run(LAYOUTS[name], weights_here, tiny))),
        sep="\n  ",
    )

# %% [markdown]
# In both layouts a rank holds half. What differs is what travels: with `ep = 1` each block's experts are gathered on
# every rank; with `ep = 2` they stay where they are, and tokens travel to them. Here are seven rows on two ranks. The
# number in a dot is the expert that the row's router chose:

# %%
mesh_pictures.all_to_all(((2, 0, 1, 3), (3, 0, 2)))

# %% [markdown]
# Follow one colour. Each rank sorts its rows by expert. Then every rank sends every other rank the rows whose experts
# live there: that is an all-to-all, and the thick lines are the rows that change ranks in it. The experts compute, and
# a second all-to-all takes each row home, where its gate multiplies it. Now the code:

# %%
source(on_owners)

# %% [markdown]
# Router → sort by expert → all-to-all → own experts → all-to-all → times the gates, at home. The owner of expert $e$ is
# rank $\lfloor e / (E/ep) \rfloor$ of its ep group.
#
# ## Exercise 3: what travels
#
# Write `rows_to(experts, num_experts, ep)`: how many rows a rank sends to each rank of its ep group in one layer, as a
# list of `ep` whole numbers (the rows that stay are counted too). `experts` [tokens, K] are the experts that its tokens
# chose.


# %% tags=["exercise"]
def rows_to(experts, num_experts, ep):
    raise NotImplementedError  # your code


# %% tags=["check"]
def traffic(config, seed):
    """Bytes that this rank's all-to-alls send in a forward pass, and the experts that its tokens chose, layer by
    layer."""
    torch.manual_seed(seed)
    model = network.Transformer(config)
    ids = torch.randint(config.vocab_size, (4, 16), generator=torch.Generator().manual_seed(seed))
    with Traffic() as traffic_counter, torch.no_grad():
        out = model(cut(ids))
    return traffic_counter.bytes_sent["alltoall_base"], out.experts


def check_3():
    assert list(rows_to(torch.tensor([[0, 1], [3, 1], [2, 0]]), 4, 2)) == [4, 2], (
        "experts 0 and 1 are rank 0's, 2 and 3 are rank 1's"
    )
    assert list(rows_to(torch.tensor([[0, 1], [2, 0]]), 8, 4)) == [3, 1, 0, 0], (
        "8 experts on 4 ranks: two each, and a number for every rank"
    )
    for seed in (0, 1):
        answers = two.run(LAYOUTS["dp = 2, ep = 2"], traffic, tiny, seed)
        rows = [[rows_to(layer, tiny.num_experts, 2) for layer in experts] for _, experts in answers]
        for rank, (bytes_sent, _) in enumerate(answers):
            rows_sent = sum(layer[1 - rank] for layer in rows[rank])  # rows sent, and the other's rows sent back
            back = sum(layer[rank] for layer in rows[1 - rank])
            counts = (
                tiny.num_hidden_layers * tiny.num_experts // 2 * 8
            )  # how many rows go to each expert there, told beforehand
            predicted_bytes = (rows_sent + back) * tiny.hidden_size * 4 + counts
            assert predicted_bytes == bytes_sent, (
                f"by your count rank {rank} sends {predicted_bytes:,} bytes; {bytes_sent:,} were counted on the way"
            )


check(3, check_3)


# %% tags=["solution"] jupyter={"source_hidden": true}
def rows_to(experts, num_experts, ep):
    return (experts.flatten() // (num_experts // ep)).bincount(minlength=ep).tolist()


check(3, check_3)

# %% [markdown]
# Your count is right to the last byte. `etude plan` counts a cluster's traffic in the same way.
#
# ## The experiment: twenty steps, five ways
#
# We train the same network on the same batches, in float64: once with `ref` in this process, on two ranks in four
# layouts, and on two ranks in a fifth way. The fifth is how such code is often written at first: each rank takes the
# mean over its own tokens, and gradients are averaged. The rows are dealt out unevenly, on purpose: one rank has the
# four long texts, the other
# the four short
# ones.

# %%
steps, rows, length = quick(20, 3), 8, 32
torch.manual_seed(0)
start = Transformer(tiny).double()
state = {name: p.detach() for name, p in start.named_parameters()}
generator = torch.Generator().manual_seed(3)
batches = []
for _ in range(steps):
    first, stride = (
        torch.randint(64, (rows, 1), generator=generator),
        torch.tensor([5] * (rows // 2) + [7] * (rows // 2))[:, None],
    )
    ids = (first + stride * torch.arange(length)) % 64  # long texts count in fives, short ones in sevens
    weight = torch.ones(rows, length, dtype=torch.bool)
    weight[rows // 2 :, 4:] = False
    batches.append((ids, weight))


def reference(state, batches):
    """Mean loss of every step, by `ref`."""
    model = Transformer(tiny).double()
    model.load_state_dict(state, strict=False)
    optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-2), []
    for ids, weight in batches:
        loss, count = ref.cpt.next_token_loss(model, model(ids, logits=False).hidden, ids, weight=weight)
        (loss / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss / count).item())
    return losses


def on_ranks(state, batches, local_mean):
    """The same on these ranks."""
    model = network.Transformer(tiny).double()
    for name, p in model.named_parameters():
        sharding.load_slice(name, p, state[name])
    optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-2), []
    for ids, weight in batches:
        ids, weight = cut(ids), cut(weight)
        hidden = model(ids, logits=False).hidden
        loss, count = scaled.cpt.next_token_loss(model, hidden, ids, weight=weight)
        losses.append((loss / count).item())
        if local_mean:  # of this rank's own tokens, and then the mean over ranks
            own_loss, own_count = ref.cpt.next_token_loss(model, hidden, ids, weight=weight)
            (own_loss / own_count / current().layout.world).backward()
        else:
            (loss / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


ways = {name: (layout, False) for name, layout in LAYOUTS.items()} | {"local means": (dict(dp=2), True)}
alone = torch.tensor(reference(state, batches), dtype=torch.float64)
curves = {}
for name, (layout, local_mean) in ways.items():
    losses, _ = two.run(layout, on_ranks, state, batches, local_mean)
    curves[name] = torch.tensor(losses, dtype=torch.float64)
figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.5), layout="constrained")
left.plot(alone, color="black", label="ref, one process")
left.plot(curves["dp = 2"], "o", color="#0072B2", markersize=4, label="two ranks, sums")
left.plot(curves["local means"], "--", color="#D55E00", label="two ranks, local means")
for (name, curve), mark in zip(curves.items(), "o^svx", strict=True):
    right.plot(
        (curve - alone).abs().clamp(min=1e-17),
        mark,
        markersize=4,
        label=name,
        color="#D55E00" if name == "local means" else None,
    )
left.set(xlabel="step", ylabel="loss, nats a token")
right.set(xlabel="step", ylabel="distance from ref, nats (1e-17: none)", yscale="log", ylim=(1e-18, 1e3))
for axes in (left, right):
    axes.legend(frameon=False, fontsize=8.5, ncols=1 if axes is left else 2)
plt.show()
for name, curve in curves.items():
    print(f"{name:15s} farthest from ref: {(curve - alone).abs().max():.1e} nats")

# %% [markdown]
# ## How it breaks: the local mean
#
# The four layouts agree with `ref`, up to the order of sums in float64. The fifth is a different training. At the first
# step nothing looks wrong: its loss is reported correctly, and before the first update there is no difference to see.
# But how much does a token weigh in its gradient?

# %%
ids, weight = batches[0]
token_counts = [int(part[:, 1:].sum()) for part in weight.chunk(2)]
for rank, n in enumerate(token_counts):
    print(
        f"rank {rank}: {n:3d} tokens; each weighs 1/{sum(token_counts)} in the mean over all, and 1/{2 * n} "
        f"in the mean of means"
    )
print(f"a token of rank 1 weighs {token_counts[0] / token_counts[1]:.1f} times what one of rank 0 weighs")

# %% [markdown]
# **Your prediction:** a token on the rank with the short texts weighs ten times as much as one on the other rank, and
# the loss of the first step does not show it.
#
# Deal the rows differently, change the number of ranks or the size of a micro-batch, and you get yet another training.
# That is why the denominators of this repository are arguments (`budget`, `n_tokens`) or counts that are summed over
# all ranks, and why `shard` above sets FSDP's divide factor to one: its default averages gradients over ranks, which is
# the same mistake from the other side.
#
# The bug is common because it hides so well: with one rank, or with rows of equal length, both means are the same
# number. A test with two ranks and *unequal* shards catches it at once. The tests of losses in `tests/mirror` draw
# masks and groups at random, so shards are unequal most of the time.

# %%
two.stop()

# %% [markdown]
# ## Open challenge
#
# Compute one loss on four ranks that each hold a quarter of the vocabulary, with as few bytes sent between them as
# possible. `etude challenge 11` gives the rules, a file to begin with and the scores so far.
#
# ## Where to read on
#
# * `scaled/runtime/`: `mesh.py`, `cut.py`, `comm.py` and `sharding.py`, a page each; then any file of `scaled/` beside
#   its twin in `ref/`.
# * `tests/mirror/`: how equality is tested; `lessons/mirror_ranks.py`: how this lesson starts its ranks.
# * `etude run cpt --scale full --backend gloo --nproc 4 --set ep=2 --set cp=2`: a whole training on four ranks of this
#   machine.
# * `etude plan`: what a step on 8, 64 or 512 GPUs would hold, send and cost.
# * Back to lesson 0, with other eyes.
