# %% [markdown]
# # 12 · Weight sync: what changed, and nothing else
#
# **After this lesson you can** predict how many bfloat16 weights a step of RL changes, and say why; code the difference
# in fewer bits than its numbers have; merge differences without the weights; and follow a chain of versions through a
# store that loses and damages things, without ever serving a wrong bit.
#
# *About 45 minutes. Prerequisites: lesson 4. Source: Composer 2 technical report, §4.1 and §6.2; arXiv:2602.03839.*
#
# ## The idea
#
# RL has two machines: one trains, one samples. After every step the sampler needs the new weights. A terabyte of them
# cannot be sent across the world every few minutes. The report sends a lossless difference through object storage: 20
# GiB instead of 1,024.
#
# Why is the difference so small? A bfloat16 number has eight significant bits. Between 1 and 2 its neighbours are
# $2^{-7}$ apart, and between $2^e$ and $2^{e+1}$ they are $2^{e-7}$ apart: one *ulp*. RL runs at learning rates near
# $10^{-6}$, and a step of Adam moves a weight by about that much. A weight of 0.02 has its nearest neighbour $2^{-13} =
# 1.2 \cdot 10^{-4}$ away. The trainer keeps a float32 *master* that moves at every step. The sampler gets the rounded
# weight, which moves only when the master crosses the boundary half-way between two neighbours.

# %% [markdown]
# **Predict first.** Weights are typically a few hundredths in size. Adam moves every master by about $10^{-6}$, and
# 1.5% of the bfloat16 weights change. What share changes if it moves every master by $10^{-5}$? And by $10^{-4}$, which
# is about an ulp? Ten times as many each time?

# %%
import math

import matplotlib.pyplot as plt
import torch

from lessons.course import check, quick, source, verdicts
from ref import weight_sync

generator = torch.Generator().manual_seed(0)
masters = 0.05 * torch.randn(400_000, generator=generator)
updates = torch.randn(400_000, generator=generator)
for lr in (1e-6, 1e-5, 1e-4):
    changed = ((masters + lr * updates).bfloat16() != masters.bfloat16()).double().mean()
    print(f"updates of {lr:g}: {changed:.3%} of the bfloat16 weights change")

# %% [markdown]
# **Your prediction:** updates of $10^{-5}$ change 10% of the weights, and updates of $10^{-4}$ change 47%. Neither is
# ten times as many: small weights have short ulps, and a weight that changes anyway cannot change more often.
#
# ## The law
#
# Suppose that a master lies anywhere between two boundaries with equal probability. There is one boundary per ulp, so a
# move by $\Delta$ crosses one with probability $|\Delta|/\mathrm{ulp}$, and with certainty if it is longer than an ulp:
#
# $$\text{changed share} \;=\; \mathbb{E}\left[\min\left(1, \frac{|\Delta|}{\mathrm{ulp}(w)}\right)\right]$$

# %%
source(weight_sync.ulp, weight_sync.changed_share)
for lr in (1e-6, 1e-5, 1e-4):
    changed = ((masters + lr * updates).bfloat16() != masters.bfloat16()).double().mean()
    print(f"updates of {lr:g}: measured {changed:.4%}, law {weight_sync.changed_share(masters, lr * updates):.4%}")

# %% [markdown]
# ## Exercise 1: the law for one size of weight
#
# All weights have the same absolute value `w`, and every update is `lr` long. Write `share(w, lr)`: the share that
# changes, a float. Use `math.frexp`: it gives `m, e` with $w = m\,2^e$ and $\tfrac12 \le m < 1$. Weights are not as
# small as $2^{-126}$.


# %% tags=["exercise"]
def share(w, lr):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_1():
    assert abs(share(1.0, 2**-9) - 0.25) < 1e-12, (
        f"at 1 an ulp is 2^-7, and 2^-9 is a quarter of it, not {share(1.0, 2**-9):g}"
    )
    assert share(0.5, 1.0) == 1.0, "an update longer than an ulp changes every weight: the share is 1, never more"
    for w in (0.02, 0.7, 1.999, 3.0):
        for lr in (1e-6, 1e-4):
            expected = weight_sync.changed_share(torch.tensor([w]), torch.tensor([lr], dtype=torch.float64))
            assert abs(share(w, lr) / expected - 1) < 1e-6, (
                f"at {w} an update of {lr:g} changes {expected:.5g} of the weights, not {share(w, lr):.5g}"
            )


check(1, check_1)


# %% tags=["solution"] jupyter={"source_hidden": true}
def share(w, lr):
    return min(1.0, lr / 2.0 ** (math.frexp(w)[1] - 8))


check(1, check_1)

# %% [markdown]
# ## How it breaks: masters in the middle
#
# The law needs masters that can lie anywhere. Load them from a bfloat16 checkpoint, and each lies exactly half-way
# between its two boundaries. An update of less than half an ulp then changes nothing, nor does the next one. It takes
# hundreds of steps until the masters have spread:

# %%
fresh, spread = masters.bfloat16().float(), masters.clone()
steps, lr = quick(300, 20), 1e-6
curves: dict[str, list[float]] = {"from a bfloat16 checkpoint": [], "from float32 masters": []}
for _ in range(steps):
    update = lr * torch.randn(len(masters), generator=generator)
    for name, x in zip(curves, (fresh, spread), strict=True):
        before = x.bfloat16()
        x += update
        curves[name].append((x.bfloat16() != before).double().mean().item())
figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
for (name, values), style in zip(curves.items(), ("-", "--"), strict=True):
    axes.plot([100 * value for value in values], style, label=name)
axes.axhline(100 * weight_sync.changed_share(masters, lr * updates), color="grey", linewidth=0.8, label="law")
axes.set(xlabel="step", ylabel="weights that change, %", ylim=(0, None))
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## A line of all bit patterns
#
# A difference of numbers will not do: bfloat16 cannot add 1 to 256, a NaN differs from itself, and −0 equals 0. A
# difference of *bit patterns* is exact, if the patterns are counted in the order of their numbers. Patterns of positive
# numbers are in order already. Those of negative ones run backwards from −0, pattern `0x8000`, so they are reversed: −0
# has place −1,
# the smallest negative
# number −2, and so on.

# %%
source(weight_sync.encode_delta, weight_sync.apply_delta)
old, new = torch.tensor([256.0, 0.02, 1.0, -0.0]).bfloat16(), torch.tensor([258.0, 0.02, math.nan, 0.0]).bfloat16()
positions, steps_of = weight_sync.encode_delta(old, new)
print(f"positions {positions.tolist()}, steps {steps_of.tolist()}")

# %% [markdown]
# ## Exercise 2: steps
#
# Write `step(a, b)`: the number of places from bit pattern `a` to bit pattern `b` on that line. Both are whole numbers
# from 0 to 65,535, the patterns read as unsigned.


# %% tags=["exercise"]
def step(a, b):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_2():
    assert step(0x3F80, 0x3F81) == 1, f"from 1 to the next number it is 1 step, not {step(0x3F80, 0x3F81)}"
    assert step(0x8000, 0x0000) == 1, f"from -0 to 0 it is 1 step, not {step(0x8000, 0)}"
    assert step(0x8001, 0x0001) == 3, (
        f"from the smallest negative number to the smallest positive one: over -0 and 0, 3 steps, not {step(0x8001, 1)}"
    )
    assert step(0xBF81, 0xBF80) == 1, "towards zero a negative number grows: one step up"
    patterns = torch.randint(-(2**15), 2**15, (2, 200), generator=torch.Generator().manual_seed(1)).to(torch.int16)
    positions, steps = weight_sync.encode_delta(*patterns.view(torch.bfloat16))
    expected = dict(zip(positions.tolist(), steps.tolist(), strict=True))
    for n, (a, b) in enumerate(zip(*(patterns.int() & 0xFFFF).tolist(), strict=True)):
        assert step(a, b) == expected.get(n, 0), (
            f"from {a:#06x} to {b:#06x} it is {expected.get(n, 0)} steps, not {step(a, b)}"
        )


check(2, check_2)


# %% tags=["solution"] jupyter={"source_hidden": true}
def step(a, b):
    places = [-1 - (bits - 0x8000) if bits >= 0x8000 else bits for bits in (a, b)]
    return places[1] - places[0]


check(2, check_2)

# %% [markdown]
# ## Bits
#
# How many bits must a changed weight cost? First *where*: if each of $n$ weights changes independently with probability
# $p$, the pattern has $n\,H(p)$ bits of entropy, so $H(p)/p$ for each changed weight. Then *how far*: nine of ten steps
# are ±1, which takes little more than a bit.
#
# ## Exercise 3: the bound
#
# Write `bits(p)`: $H(p)/p$ with $H(p) = -p\log_2 p - (1-p)\log_2(1-p)$, for $0 < p < 1$; a float.


# %% tags=["exercise"]
def bits(p):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_3():
    assert abs(bits(0.5) - 2) < 1e-12, (
        f"at one half each weight has one bit, so each changed one has 2, not {bits(0.5):g}"
    )
    assert abs(bits(0.25) - 3.24511) < 1e-4, (
        f"H(0.25) is 0.811278 bits, four times that is 3.2451, not {bits(0.25):.4f}"
    )
    assert abs(bits(0.003) - 9.8211) < 1e-3, f"at 0.3% it is 9.821 bits, not {bits(0.003):.3f}"


check(3, check_3)


# %% tags=["solution"] jupyter={"source_hidden": true}
def bits(p):
    return (-p * math.log2(p) - (1 - p) * math.log2(1 - p)) / p


check(3, check_3)

# %% [markdown]
# Here is what the codec needs in the reference's demonstration: made-up weights, eighteen versions, three sizes of
# updates. An index of four bytes and a value of two would be 48 bits.

# %%
demo = weight_sync.demo(weight_sync.Demo(weights=quick(300_000, 20_000)))
for lr in ("1e-06", "1e-05", "0.0001"):
    p = demo[f"changed@{lr}"]
    print(
        f"updates of {lr:7s} change {p:7.3%} (law {demo[f'law@{lr}']:7.3%}): {demo[f'bits@{lr}']:4.1f} "
        f"bits each, {bits(p):4.1f} of them unavoidable "
        f"for where; {demo[f'smaller@{lr}']:5.1f} times smaller than the weights; bits equal: "
        f"{demo[f'exact@{lr}'] == 1}"
    )

# %% [markdown]
# ## Late readers
#
# A reader that was away for eight steps needs eight differences. A weight that moved and moved back costs twice, for
# nothing; a weight that moved twice has its position sent twice. Steps on the line add up, so one difference can
# replace eight, and merging
# needs no weights:

# %%
source(weight_sync.merge_deltas)
print(", ".join(f"{lr}: {demo[f'merged@{lr}']:.2f} times smaller" for lr in ("1e-06", "1e-05", "0.0001")))

# %% [markdown]
# ## Exercise 4: merge
#
# Write `merge(first, second)` for differences as dicts from position to step, none of them zero. The result, also a
# dict, does what the two do in turn.


# %% tags=["exercise"]
def merge(first, second):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_4():
    assert merge({1: 1, 5: 2}, {5: 3, 7: -1}) == {1: 1, 5: 5, 7: -1}, "steps at the same position add up"
    assert merge({3: 1, 4: 1}, {3: -1}) == {4: 1}, "a weight that is back where it was has not changed, and is not sent"
    first, second = {3: 1}, {3: 2}
    merge(first, second)
    assert first == {3: 1} and second == {3: 2}, "the differences themselves stay as they are: other readers need them"
    assert merge({}, {2: 1}) == {2: 1} and merge({}, {}) == {}


check(4, check_4)


# %% tags=["solution"] jupyter={"source_hidden": true}
def merge(first, second):
    total = {at: first.get(at, 0) + second.get(at, 0) for at in sorted(first | second)}
    return {at: num_steps for at, num_steps in total.items() if num_steps}


check(4, check_4)

# %% [markdown]
# ## A chain in a store
#
# A writer and two readers share a mapping of keys to bytes: here a dict, on a cluster a folder or `s3://…`
# (`scaled/runtime/store.py`). The manifest is created last, so a version is there completely or not at all.

# %%
store: dict[str, bytes] = {}
weights = (0.05 * torch.randn(300, 200, generator=generator)).bfloat16()


def part_of(x):
    return [weight_sync.Part("model.layers.0.mlp.down_proj.weight", (300, 200), 0, x)]


writer = weight_sync.Writer(store, anchor_every=4, merge_every=2)
follower, late = (weight_sync.Reader(store, part_of(torch.zeros_like(weights)), name) for name in ("follower", "late"))
trained = []
for version in range(7):
    weights = (weights.float() + 2e-5 * torch.randn(300, 200, generator=generator)).bfloat16() if version else weights
    trained.append(weights)
    writer.publish(version, part_of(weights))
    if version < 3:
        follower.fetch()
        follower.swap()
for key in sorted(store):
    print(f"{key:38s} {len(store[key]):7,d} bytes")

# %% [markdown]
# The follower serves version 2. Now its next difference is damaged by one bit, and so is the merged one over it. The
# digest of the shard reveals that, and the reader takes another route, from the nearest anchor. What it serves are the
# trainer's weights,
# bit for bit.

# %%
for key in [key for key in store if key.startswith(("00000003/delta", "00000004/merged"))]:
    store[key] = store[key][:-1] + bytes([store[key][-1] ^ 1])
requested_keys = []
take = follower.get
follower.get = lambda shard: (  # pyright: ignore[reportAttributeAccessIssue]
    requested_keys.append(shard["key"]),
    take(shard),
)[1]
follower.fetch()
follower.swap()
print("asked for:", ", ".join(key[:17] for key in requested_keys))
is_identical = torch.equal(follower.parts[0].weights.view(torch.int16), trained[6].view(torch.int16))
print(f"serves version {follower.version}, bits equal: {is_identical}")

# %% [markdown]
# ## How it breaks: applied twice
#
# A difference is right once, on its own base. Applied twice, or to weights that have drifted, it gives weights that
# look like any others: no shape is wrong, no number is infinite, and answers are only a little worse. One public system
# logged a failed update and went on, and every later difference was then built on the wrong base. That is why each
# manifest holds the digest of the *result*: the reader compares it before it serves anything.

# %%
late.fetch(5)
late.swap()
weight_bits = late.weights[0].view(torch.int16)
weight_bits[1234] ^= 1  # one bit of memory, and no one is told
late.fetch(6)
late.swap()
is_identical = torch.equal(late.parts[0].weights.view(torch.int16), trained[6].view(torch.int16))
print(
    f"one bit had drifted; serves version {late.version} all the same, by way of an anchor; bits equal: {is_identical}"
)

# %% [markdown]
# ## What the experiment found
#
# Real steps of RL in the small world, AdamW at three learning rates and Muon, three seeds each (`etude figure
# weight-sync`):

# %%
verdicts("weight-sync")

# %% [markdown]
# ## Open challenge
#
# Write the smallest lossless delta between two versions of bfloat16 weights. `etude challenge 12` gives the rules, a
# file to begin with and the scores so far.
#
# ## Where to read on
#
# * `ref/weight_sync.py` and, beneath it, `ref/weight_codec.py`: the chain and the codec.
# * `scaled/weight_sync.py`: every rank publishes its own rows; a reader with other rows fetches the shards that it
#   needs. `tests/mirror` reads on 1, 2 and 4 ranks what 1, 2 and 4 have written.
# * `etude run weight-sync --scale full` runs RL whose samplers read their weights from a store.
# * `make test-faults` stops an S3 server in the middle.
