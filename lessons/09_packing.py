# %% [markdown]
# # 9 · Packing: who trains on which sequences
#
# **After this lesson you can** say what a sequence costs and when its length starts to matter more than its tokens;
# deal sequences out to ranks so that none waits long, and prove how uneven the result can be at worst; say what no
# dealing can fix; and lay sequences in rows without one seeing another.
#
# *About 45 minutes. Prerequisites: lesson 0. Source: Composer 2 technical report, §6.1.*
#
# ## The idea
#
# A training step on many ranks lasts as long as its slowest rank. Rollouts have heavy-tailed lengths: most tasks are
# done after a thousand tokens, and some go on for a hundred thousand. A linear layer does the same work for every
# token. Attention compares each token with all earlier ones, so the work of a sequence of $T$ tokens has a second part:
#
# $$c(T) = a\,T + b\,T^2$$
#
# So two ranks with the same number of tokens can differ severalfold in work. Before each RL step, the report repacks
# all sequences over all data-parallel ranks, and counts the quadratic part. It does not say how. `ref/packing.py` uses
# the oldest rule there is (Graham, 1969): *longest processing time first*. Take the sequences in falling order of cost,
# and give each to the
# rank that has the
# least so far.

# %% [markdown]
# **Predict first.** A network like Qwen3-30B-A3B trains on one rollout of 32,000 tokens, or on 32 rollouts of 1,000
# tokens. How many times as much does the one cost as the 32? And how long does a step on 64 ranks take, compared with
# an even one, if 1,000 rollouts with heavy-tailed lengths are dealt out in turn, like cards?

# %%
import itertools

import matplotlib.pyplot as plt
import torch

from lessons.course import check, quick, source
from ref import cpt, packing
from ref.network import Config, Transformer

source(packing.Cost)

# %% [markdown]
# The two numbers follow from the shape of the network. In FLOPs: two for each active weight and token, and $4 \cdot
# T^2/2$ in each layer, head and channel for the two causal products $QK^\top$ and $PV$. The two parts are equal at $T =
# a/b$:

# %%
cost = packing.Cost.of(Config.qwen3_30b_a3b())
print(
    f"Qwen3-30B-A3B: {cost.linear:.3g} FLOPs a token and {cost.quadratic:.3g} a token squared; equal "
    f"at {cost.linear / cost.quadratic:,.0f} tokens"
)
for T in (1_000, 4_000, 16_000, 64_000, 256_000):
    print(f"{T:8,d} tokens: attention is {cost.quadratic * T**2 / cost(torch.tensor([T])).item():4.0%} of the work")
short_cost, long_cost = cost(torch.full((32,), 1000)).sum().item(), cost(torch.tensor([32_000])).item()
print(f"one rollout of 32,000 tokens costs {long_cost / short_cost:.2f} times what 32 of 1,000 cost")

# %% [markdown]
# ## Dealing

# %%
source(packing.balance, packing.imbalance)

# %% [markdown]
# Nothing in it is random, and ties are broken by number. That matters more than it seems: every rank runs this function
# by itself, on costs that all of them have gathered, and all must reach the same result without further communication
# (`scaled/packing.py`).
#
# How good is it? Let $M$ be the mean load of $R$ ranks. Look at the fullest rank at the end, and at the last sequence
# that it got, of cost $c$. At that moment it was the rank with the *least* load, so it had at most the mean of what had
# been dealt until then. That is at most everything except this sequence, $RM - c$, divided by $R$. Put the sequence on
# top:
#
# $$\max\ \text{load} \;\le\; \frac{RM - c}{R} + c \;=\; M + \Bigl(1 - \frac1R\Bigr)\,c$$
#
# And $c$ is small: costs fall, so the last sequence that a rank got is its cheapest. Of $k$ sequences, the cheapest is
# at most a $k$-th of the load. The rule is good only because it deals the big ones first. In another order, the last
# one could be the largest.
#
# ## Exercise 1: the bound
#
# Write `bound(costs, rank_of, ranks)`: the right-hand side of the inequality for a finished dealing, as a float. If
# several ranks tie for the fullest, take the first.


# %% tags=["exercise"]
def bound(costs, rank_of, ranks):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_1():
    hand = torch.tensor([1.0, 5.0, 3.0, 3.0])
    actual = bound(hand, packing.balance(hand, 2), 2)
    assert abs(actual - 6.5) < 1e-12, f"both ranks have 6, the first of them 5 and 1: 6 + ½ · 1, not {actual}"
    three = torch.full((3,), 2.0)
    assert abs(bound(three, packing.balance(three, 2), 2) - 4.0) < 1e-12, (
        "three equal costs on two ranks: 3 + ½ · 2, and it is met exactly"
    )
    generator = torch.Generator().manual_seed(0)
    for ranks in (1, 3, 16):
        costs = torch.rand(100, dtype=torch.float64, generator=generator).square()
        rank_of = packing.balance(costs, ranks)
        fullest = packing.imbalance(costs, rank_of, ranks) * costs.sum().item() / ranks
        actual = bound(costs, rank_of, ranks)
        assert fullest <= actual + 1e-9, (
            f"on {ranks} ranks the fullest has {fullest:.4f}, more than your bound of {actual:.4f}"
        )
        assert actual < 1.2 * fullest, (
            f"on {ranks} ranks your bound, {actual:.3f}, is far over the fullest rank's {fullest:.3f}"
        )


check(1, check_1)


# %% tags=["solution"] jupyter={"source_hidden": true}
def bound(costs, rank_of, ranks):
    loads = torch.zeros(ranks, dtype=torch.float64).index_add_(0, rank_of, costs.double())
    last = costs[rank_of == loads.argmax()].min()
    return (loads.mean() + (1 - 1 / ranks) * last).item()


check(1, check_1)

# %% [markdown]
# ## Three ways to deal a heavy tail
#
# This is the reference's own demonstration: 64 ranks, 16 sequences each on average, lognormal lengths around 1,800
# tokens. They are dealt in turn, like cards; by the rule above but with *tokens* as the cost; and by the rule with the
# true cost. First one step, rank by rank, then the mean over many.

# %%
ranks, generator = 64, torch.Generator().manual_seed(0)
lengths = (1800 * torch.exp(1.5 * torch.randn(16 * ranks, generator=generator))).long().clamp(1, 40_000)
costs = cost(lengths)
assignments = {
    "in turn": torch.arange(len(lengths)) % ranks,
    "by tokens": packing.balance(lengths.double(), ranks),
    "by cost": packing.balance(costs, ranks),
}
sigmas = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
demo = packing.demo(packing.Demo(sigmas=sigmas, draws=quick(20, 2)))

figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.6), layout="constrained")
styles = dict(zip(assignments, (("#E69F00", "-", "^"), ("#0072B2", "--", "s"), ("#009E73", "-", "o")), strict=True))
for name, rank_of in assignments.items():
    colour, dash, mark = styles[name]
    loads = torch.zeros(ranks, dtype=torch.float64).index_add_(0, rank_of, costs)
    left.plot((loads / loads.mean()).sort().values, dash, color=colour, label=name)
    key = name.replace(" ", "_")
    right.plot(sigmas, [demo[f"{key}@{sigma:g}"] for sigma in sigmas], dash, marker=mark, color=colour, label=name)
right.plot(
    sigmas, [demo[f"longest@{sigma:g}"] for sigma in sigmas], ":", color="black", label="the longest sequence alone"
)
left.axhline(1, color="grey", linewidth=0.8)
left.set(
    xlabel="ranks, by their load", ylabel="load over the mean", title=f"One step: {len(lengths)} sequences, σ = 1.5"
)
right.axhline(1, color="grey", linewidth=0.8)
right.set(
    xlabel="σ of the logarithm of the length",
    ylabel="fullest rank over the mean",
    yscale="log",
    title="Mean over steps",
)
for axes in (left, right):
    axes.legend(frameon=False)
plt.show()
for name, rank_of in assignments.items():
    print(f"{name:10s} the step is {packing.imbalance(costs, rank_of, ranks):.3f} times as long as it need be")
print(f"the bound, by cost: {bound(costs, assignments['by cost'], ranks) / costs.sum().item() * ranks:.3f}")

# %% [markdown]
# **Your prediction:** the long rollout costs 2.9 times as much as the 32 short ones, and a step dealt in turn also
# takes about 2.9 times as long as it need be.

# %% [markdown]
# Left: the lengths of this step were cut at 40,000 tokens, so that no single sequence exceeds a rank's share. Dealing
# by cost then looks perfectly even. Dealing by tokens is even in tokens but not in work: ranks with a few long
# sequences keep all others waiting. Right, without that cut: the dotted line is a rank that holds nothing but the
# longest sequence. Once the line rises above one, no dealing can get below it, and soon dealing by cost or by tokens
# comes down to it exactly. That is where the next section begins. But first: is the rule optimal?
#
# ## Exercise 2: not the best
#
# Write `best(costs, ranks)`: the smallest possible load of the fullest rank, over all ways to deal. Try them all;
# `itertools.product` lists them.


# %% tags=["exercise"]
def best(costs, ranks):
    raise NotImplementedError  # your code: a float


# %% tags=["check"]
def check_2():
    instances = (
        ([3, 3, 2, 2, 2], 2, 6),
        ([5, 5, 4, 4, 3, 3, 3], 3, 9),
        ([4, 1], 3, 4),
        ([1, 1, 1, 1], 2, 2),
        ([2, 2, 2], 2, 4),
        ([4, 4, 4, 3], 2, 8),
    )
    for costs, ranks, least in instances:
        actual = best(torch.tensor(costs, dtype=torch.float64), ranks)
        assert abs(actual - least) < 1e-12, (
            f"dealt as well as can be, {costs} on {ranks} ranks give the fullest {least}, not {actual}"
        )
    generator = torch.Generator().manual_seed(2)
    for ranks in (2, 3):
        costs = torch.rand(7, dtype=torch.float64, generator=generator)
        by_rule = packing.imbalance(costs, packing.balance(costs, ranks), ranks) * costs.sum().item() / ranks
        assert best(costs, ranks) <= by_rule + 1e-12, "the best dealing is not worse than the rule's"


check(2, check_2)


# %% tags=["solution"] jupyter={"source_hidden": true}
def best(costs, ranks):
    ways = torch.tensor(list(itertools.product(range(ranks), repeat=len(costs))))
    loads = torch.stack([(costs * (ways == rank)).sum(1) for rank in range(ranks)])
    return loads.amax(0).min().item()


check(2, check_2)

# %% [markdown]
# The first two of these instances are the worst possible for this rule on two and on three ranks: the step is then
# $\tfrac43 - \tfrac1{3R}$ times as long as it could be (Graham's theorem; take $2R-1, 2R-1, 2R-2, \dots, R+1, R+1, R,
# R, R$).

# %%
for costs_of, ranks_of in ((torch.tensor([3.0, 3, 2, 2, 2]), 2), (torch.tensor([5.0, 5, 4, 4, 3, 3, 3]), 3)):
    rule_load = (
        packing.imbalance(costs_of, packing.balance(costs_of, ranks_of), ranks_of) * costs_of.sum().item() / ranks_of
    )
    print(
        f"R = {ranks_of}: rule {rule_load:.0f}, best {best(costs_of, ranks_of):.0f}, ratio "
        f"{rule_load / best(costs_of, ranks_of):.4f}, "
        f"4/3 − 1/(3R) = {4 / 3 - 1 / (3 * ranks_of):.4f}"
    )

# %% [markdown]
# That takes few and large pieces. With sixteen sequences per rank, none longer than a rank's share, a solver would gain
# next to nothing (a thousandth here, says the bound), and every rank would have to run the same solver and reach the
# same result.
#
# ## One sequence too long
#
# The bound says what dealing cannot fix: a sequence that costs more than $M$ determines the length of the step. It has
# to be cut and shared by several ranks: context parallelism. Equal runs of tokens would again be unequal work, because
# a late token attends to more than an early one. So a row is cut into $2\,cp$ chunks, and rank $i$ takes chunks $i$ and
# $2\,cp - 1 - i$, an early one with a late one (report, §6.1).
#
# ## Exercise 3: pairs
#
# A chunk's work is the pairs (query, key) that causal attention computes for its queries: each token with itself and
# with all earlier ones in the row. Write `pairs(T, chunks)`: the number of pairs of every chunk, as a list of whole
# numbers, if a row of `T` tokens is cut into `chunks` equal chunks.


# %% tags=["exercise"]
def pairs(T, chunks):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_3():
    assert pairs(4, 4) == [1, 2, 3, 4], f"four chunks of one token: 1, 2, 3, 4 pairs, not {pairs(4, 4)}"
    assert pairs(8, 4) == [3, 7, 11, 15], (
        f"eight tokens in four chunks: the first two tokens have 1 + 2 pairs; got {pairs(8, 4)}"
    )
    assert sum(pairs(4096, 16)) == 4096 * 4097 // 2, "all chunks together are the whole triangle, T (T + 1) / 2"


check(3, check_3)


# %% tags=["solution"] jupyter={"source_hidden": true}
def pairs(T, chunks):
    size = T // chunks
    return [sum(range(c * size + 1, (c + 1) * size + 1)) for c in range(chunks)]


check(3, check_3)

# %%
print("  cp   runs of tokens   an early chunk with a late one      (busiest rank over the mean)")
for cp in (2, 4, 8, 16):
    work = torch.tensor(pairs(16_384, 2 * cp), dtype=torch.float64)
    chunk = torch.arange(2 * cp)
    print(
        f"{cp:4d} {packing.imbalance(work, chunk // 2, cp):14.3f} "
        f"{packing.imbalance(work, torch.minimum(chunk, 2 * cp - 1 - chunk), cp):22.3f}"
    )

# %% [markdown]
# The work is equal to the last pair. Lesson 11 runs this.
#
# ## Rows
#
# A rank's sequences are laid end to end in rows of one width. That gives batches of one shape and little padding. In
# falling order of length, each sequence goes to the fullest row that still has room for it (*best fit*).

# %%
source(packing.rows, packing.lay)

# %% [markdown]
# ## Exercise 4: what padding costs
#
# Write `filled(lengths, width)`: the share of places that hold a token when the sequences are laid out by
# `packing.rows`, as a float. For comparison, the check also shows one sequence per row.


# %% tags=["exercise"]
def filled(lengths, width):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_4():
    actual = filled(torch.tensor([3, 5, 4, 4]), 8)
    assert actual == 1.0, f"3 + 5 and 4 + 4 fill two rows of 8, so the share is 1, not {actual}"
    actual = filled(torch.tensor([5, 5, 5]), 8)
    assert abs(actual - 15 / 24) < 1e-6, (
        f"no two of three sequences of 5 fit in a row of 8: three rows, 15/24 full, not {actual}"
    )
    short_lengths = lengths[lengths <= 8192]
    assert filled(short_lengths, 8192) > 0.98, "so many sequences leave hardly anything empty"


check(4, check_4)


# %% tags=["solution"] jupyter={"source_hidden": true}
def filled(lengths, width):
    row, _ = packing.rows(lengths, width)
    return lengths.sum().item() / ((row.max().item() + 1) * width)


check(4, check_4)

# %%
short_lengths = lengths[lengths <= 8192]
print(
    f"{len(short_lengths)} sequences in rows of 8,192: {filled(short_lengths, 8192):.1%} of the places "
    f"hold a token; one "
    f"a row: {short_lengths.double().mean() / 8192:.1%}"
)

# %% [markdown]
# ## How it breaks: neighbours
#
# Sequences in one row are strangers, and a network that is not told so reads them as one text. Nothing complains:
# shapes fit, and the loss is finite and even falls. Here are three sequences in one row, and how far the log-probs of
# their tokens are from those that each sequence has alone:

# %%
torch.manual_seed(0)
model = Transformer(Config.tiny(64)).double().requires_grad_(False)
sequences = [torch.randint(64, (T,)) for T in (9, 12, 8)]
row, start = packing.rows(torch.tensor([len(ids) for ids in sequences]), 32)
ids = packing.lay(sequences, row, start, (1, 32), 0)
doc = packing.lay([torch.full((len(part),), i) for i, part in enumerate(sequences)], row, start, (1, 32), -1)
print("documents in the row:", doc[0].tolist())


def away(logits):
    """Largest distance of a log-prob of each sequence from the same sequence's read alone, nats."""
    alone = [model(part[None]).logits.log_softmax(-1)[0] for part in sequences]
    placed = [
        logits.log_softmax(-1)[r, at : at + len(part)]
        for part, r, at in zip(sequences, row.tolist(), start.tolist(), strict=True)
    ]
    return [(a - b).abs().max().item() for a, b in zip(alone, placed, strict=True)]


print("with document numbers:   ", ", ".join(f"{x:.0e}" for x in away(model(ids, doc=doc).logits)))
print("without document numbers:", ", ".join(f"{x:.0e}" for x in away(model(ids).logits)))

# %% [markdown]
# Only the sequence that lies first in its row comes out right. The others see strangers in front of them. (Their places
# in the row do no harm: rotary embeddings see only distances. What is left with document numbers is rounding.)
#
# The second leak is in the loss. The last token of a sequence gets the first token of the next one as its target, which
# nothing could predict, and after the last sequence of a row, padding is scored:

# %%
hidden = model(ids, doc=doc, logits=False).hidden
for name, doc_ids in (("with", doc), ("without", None)):
    loss, scored = cpt.next_token_loss(model, hidden, ids, doc_ids)
    print(
        f"{name:8s} document numbers: {scored:.0f} targets; three sequences have "
        f"{sum(len(part) - 1 for part in sequences)}"
    )

# %% [markdown]
# A third leak waits further on. A rank with few long sequences has as much *work* as one with many short ones, but not
# as many *tokens*. If the loss is first averaged on each rank, the tokens of the long sequences count for more. Lesson
# 11 says what to do about it.
#
# ## Open challenge
#
# Deal sequences to ranks so that the fullest rank is as close as possible to what no dealing can beat.
# `etude challenge 9` gives the rules, a file to begin with and the scores so far.
#
# ## Where to read on
#
# * `ref/packing.py`, the top of the file: the bound once more, and what the cost leaves out.
# * `scaled/packing.py` and `scaled/runtime/exchange.py`: costs gathered, sequences sent; `tests/mirror/test_losses.py`
#   holds them to `ref`.
# * `etude run packing` runs the demonstration with other settings.
# * R. L. Graham, "Bounds on multiprocessing timing anomalies" (1969).
# * Next: lesson 10, low precision.
