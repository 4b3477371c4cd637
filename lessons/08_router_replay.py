# %% [markdown]
# # 8 · Router replay: two engines, one choice of experts
#
# **After this lesson you can** say why a mixture of experts turns rounding errors into jumps of the log-probs; replay
# the sampler's experts so that the router still learns; choose, and doubt, the plausibility $\alpha$; and tell a
# harmless mismatch from indices that are off by one.
#
# *About 45 minutes. Prerequisites: lesson 4. Source: Composer 2 technical report, §6.2; arXiv:2510.11370.*
#
# ## The idea
#
# One engine samples, and another trains. Both hold the same weights but round differently. In a dense network that
# moves log-probs a little. In a mixture of experts, a router picks the $K$ best of $E$ scores, and *best of* is not
# continuous: a score that moves in its last digit can send a token to other experts, and its log-prob jumps. The
# importance ratio $\pi/\mu$ of that token is then noise.
#
# So the sampler returns which experts it chose, for every token and layer, and the trainer uses the same ones. Only the
# choice is replayed: the gates are computed from the trainer's own scores $s$, and gradients reach the router through
# them.
#
# $$g_e = \frac{e^{s_e}}{\sum_{j\in R} e^{s_j}}, \quad e \in R \qquad\qquad
# \text{keep } e \in R \iff p_e \ge \alpha\, p_{(K)}, \quad p = \mathrm{softmax}(s)$$
#
# $R$ are the experts that the token is sent to. The rule on the right is the report's *plausibility filter*, applied to
# every recorded expert before it enters $R$: one that this router finds absurd is dropped, and the router's next
# candidate takes its place. The report does not say how absurd is too absurd; a share $\alpha$ of the $K$-th best
# probability is this project's reading. $\alpha = 0$ is plain replay, $\alpha = 1$ the router's own choice.

# %% [markdown]
# **Predict first.** Two engines hold the same weights; the sampler rounds them to FP8, and nothing is trained in
# between. With two of eight experts per token and four layers, in what share of tokens does the importance ratio leave
# the range from 0.8 to 1.2? And if the trainer replays the sampler's experts?

# %%
import copy
import math
from dataclasses import replace
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import torch

from lessons.course import check, quick, source, verdicts
from lessons.talks import Ids, Parrot, Talk
from recipe.small.agent import single
from recipe.small.fp8_rounding import fp8_rows
from ref import router_replay
from ref.engine.sampler import Sampler
from ref.network import Config, Transformer
from ref.rollout import Limits, rollout
from sims.router_replay import engines

source(router_replay.replay, router_replay.gates)

# %% [markdown]
# * `floor` is the threshold as a logit: $p_e \ge \alpha\,p_{(K)}$ says $s_e \ge s_{(K)} + \ln\alpha$. The softmax
#   cancels, and nothing underflows.
# * `rank + E * ~kept` sorts once: first the kept experts by score, then all others by score. The first $K$ are the
#   answer, so there are always exactly $K$, all different.
# * In `gates`, `scores.gather` is differentiable in the scores. The indices carry no gradient, and need none.
#
# Four experts, two of them chosen; the sampler took 0 and 2:

# %%
scores, sampler_experts = torch.tensor([[2.0, 1.9, 0.5, -1.0]]), torch.tensor([[0, 2]])
print(f"probabilities {[round(p, 3) for p in scores.softmax(-1)[0].tolist()]}; the router's own two are 0 and 1")
for alpha in (0.0, 0.2, 0.25, 1.0):
    experts = router_replay.replay(scores, sampler_experts, 2, alpha)
    print(
        f"α = {alpha:4.2f}: experts {experts[0].tolist()}, gates "
        f"{[round(g, 3) for g in router_replay.gates(scores, experts)[0].tolist()]}"
    )

# %% [markdown]
# Expert 2 has 0.247 of the second best probability, so it falls between $\alpha = 0.2$ and $0.25$.
#
# ## Exercise 1: what is plausible
#
# Write `plausible(scores, replayed, k, alpha)`, [N, K], True where a replayed expert is kept. Use probabilities, as the
# formula does.


# %% tags=["exercise"]
def plausible(scores, replayed, k, alpha):
    raise NotImplementedError  # your code: scores [N, E], replayed [N, K]


# %% tags=["check"]
def check_1():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(200, 8, dtype=torch.float64, generator=generator)
    replayed = torch.rand(200, 8, generator=generator).argsort(-1)[:, :3]
    for alpha in (0.0, 0.3, 0.7, 1.0):
        actual = plausible(scores, replayed, 3, alpha)
        assert actual.shape == replayed.shape, (
            f"an answer for each replayed expert, {list(replayed.shape)}, not {list(actual.shape)}"
        )
        expected = (router_replay.replay(scores, replayed, 3, alpha)[:, None] == replayed[:, :, None]).any(-1)
        assert (actual == expected).all(), (
            f"α = {alpha}: {int((actual != expected).sum())} of {replayed.numel()} experts are judged otherwise"
        )


check(1, check_1)


# %% tags=["solution"] jupyter={"source_hidden": true}
def plausible(scores, replayed, k, alpha):
    p = scores.softmax(-1)
    return p.gather(1, replayed) >= alpha * p.topk(k, -1)[0][:, -1:]


check(1, check_1)

# %% [markdown]
# ## Two engines on the same tokens
#
# Now a whole network: four layers, eight experts, two per token, and random weights large enough for experts to matter.
# The sampler holds them in FP8 and computes in bfloat16; the trainer computes in float32. `engines.compare` lets the
# trainer score the sampler's tokens with its own experts, with replay, and with the filter.


# %%
torch.manual_seed(0)
shape = Config.tiny(vocab_size=256, hidden_size=64, head_dim=16, moe_intermediate_size=64, initializer_range=0.15)
trainer = Transformer(shape)
sampler = Sampler(trainer, torch.bfloat16, rounding=fp8_rows)
talks = [
    partial(Talk, Parrot([1 + n, 2, 3], answer=[5, 6, 7], turns=1000)) for n in range(quick(96, 8))
]  # three tokens answer whatever is said
full_rollouts = rollout(sampler, talks, Ids(), Limits(single(96)), seeds=torch.Generator().manual_seed(0))
rollouts = [rollout.chain.segments[0] for rollout in full_rollouts]
ways = {"own": ("none", 0.0), "plain": ("plain", 0.0)} | {f"α={a:g}": ("filtered", a) for a in (0.5, 0.75, 0.9, 1.0)}


def compare_engines(rollouts):
    """Compares the engines and prints the mismatch of each way, in nats."""
    comparison = engines.compare(trainer, rollouts, ways)
    print(f"{'experts':8s}{'p50':>9s}{'p99':>9s}{'max':>9s}   ratio outside 0.8 to 1.2   replayed experts dropped")
    for at, way in enumerate(ways):
        gap = torch.from_numpy(comparison["gap"][way])
        mismatch = router_replay.mismatch(-gap, torch.zeros_like(gap), torch.ones(len(gap), dtype=torch.bool))
        outside = ((gap < -math.log(1.2)) | (gap > -math.log(0.8))).double().mean()
        dropped = f"{comparison['dropped'][:, at].mean():.2%}" if way != "own" else "–"
        print(
            f"{way:8s}{mismatch['p50']:9.3f}{mismatch['p99']:9.3f}{mismatch['max']:9.3f}{outside:22.1%}{dropped:>27s}"
        )
    return comparison


comparison = compare_engines(rollouts)
decisions, tokens = comparison["shares"].mean(0)[[0, -1]]
moved = comparison["moved"]
L = shape.num_hidden_layers
print(
    f"\nthe engines differ in {decisions:.1%} of the chosen experts, and at {tokens:.1%} of the "
    f"positions in at least one of {L} layers"
)
for way in ("own", "plain"):
    size = np.abs(comparison["gap"][way])
    print(
        f"{way:6s} mean |log π − log μ|: {size[moved].mean():.3f} nats where some expert differs, "
        f"{size[~moved].mean():.3f} elsewhere"
    )

# %% [markdown]
# **Your prediction:** a third of the ratios leave the range; with replay it is a tenth.
#
# Read the first two rows. Nothing was trained between the two engines, and still a third of the ratios lie outside a
# clip of ±0.2. Replay brings the 99th percentile down to about a quarter. The last two lines say how. Where the experts
# agree anyway, replay changes little (what it repairs there came from other tokens, through attention); where they
# differ, it brings the mismatch down to the same level. What remains is plain rounding inside experts and attention,
# which replay cannot remove.
#
# Then the filter. At $\alpha = 0.5$ it does next to nothing here: hardly any expert is that implausible. Closer to one
# it drops some, and the mismatch goes *up*: either winner of a near-tie is plausible, and each one dropped is a step
# away from the engine that we want to follow. The report finds that the filter lowers the p99. Below is a case where it
# does.
#
# ## Where the jump comes from
#
# Take one rollout and walk in a straight line from the sampler's weights to the trainer's, all in float64. At every
# step we compute the log-probs, with the experts that the weights choose and with those that were recorded:

# %%
first_rollout = rollouts[0]
walker = Transformer(shape).double()
exact = {name: p.detach().double() for name, p in trainer.named_parameters()}
coarse = {name: p.detach().double() for name, p in sampler.model.named_parameters()}
recorded = [
    torch.cat((first_rollout.experts[:, layer].long(), torch.arange(2)[None])) for layer in range(L)
]  # the last predicts nothing


@torch.no_grad()
def walk(at, experts=None):
    """Log-probs [T − 1] and experts [L][T, K] a share `at` of the way from sampler to trainer."""
    walker.load_state_dict({name: coarse[name] + at * (exact[name] - coarse[name]) for name in exact})
    out = walker(first_rollout.tokens[None], logits=False, experts=experts)
    return walker.logprob(out.hidden[0, :-1], first_rollout.tokens[1:]), out.experts


places = np.linspace(0, 1, quick(81, 11))
own, replayed = (torch.stack([walk(at, experts)[0] for at in places]) for experts in (None, recorded))
steps = (own[1:] - own[:-1]).abs() * first_rollout.sampled[1:]
place, token = divmod(int(steps.argmax()), steps.shape[1])
print(
    f"largest change of a sampled token's log-prob in one of {len(places) - 1} steps: "
    f"{steps.max():.3f} nats with own experts, "
    f"{((replayed[1:] - replayed[:-1]).abs() * first_rollout.sampled[1:]).max():.3f} replayed"
)

low, high = places[place], places[place + 1]
before, after = walk(low)[0][token], walk(high)[0][token]
for _ in range(30):  # halve the step, keep the half with the jump
    middle = (low + high) / 2
    value = walk(middle)[0][token]
    if abs(value - before) > abs(after - value):
        high, after = middle, value
    else:
        low, before = middle, value
max_difference = max(((high - low) * (exact[name] - coarse[name])).abs().max().item() for name in exact)
changed = [
    layer
    for layer, (a, b) in enumerate(zip(walk(low)[1], walk(high)[1], strict=True))
    if set(a[token].tolist()) != set(b[token].tolist())
]
print(
    f"two sets of weights, no weight further apart than {max_difference:.0e}: log-probs {before:.3f} and "
    f"{after:.3f}, a factor of "
    f"{(after - before).abs().exp():.1f} in probability; experts change in layers {changed}"
)

# %%
figure, (path, sweep) = plt.subplots(1, 2, figsize=(9.5, 3.4), layout="constrained")
path.plot(places, own[:, token], "o-", markersize=2.5, label="own experts")
path.plot(places, replayed[:, token], "--", label="replayed")
path.set(
    xlabel="from the sampler's weights (0) to the trainer's (1)",
    ylabel="log-prob of one token, nats",
    title="One token on the way",
)
path.legend(frameon=False)
bits = quick((3, 4, 5, 6, 7, 8), (4, 6))
swept = [router_replay.demo(router_replay.Demo(bits=b, tokens=quick(2048, 256))) for b in bits]
for way, style in (("own", "o-"), ("replay", "s--")):
    sweep.plot(bits, [f[f"{way}_p99"] for f in swept], style, label={"own": "own experts", "replay": "replayed"}[way])
sweep.set(
    yscale="log",
    xlabel="mantissa bits of the sampler's weights",
    ylabel="p99 of |log π − log μ|, nats",
    title="Finer engines",
)
sweep.legend(frameon=False)
plt.show()
for b, f in zip(bits, swept, strict=True):
    print(
        f"{b} bits: {f['differing_decisions']:6.2%} of decisions differ; own experts: p99 "
        f"{f['own_p99']:.3f}, largest {f['own_max']:.3f}; "
        f"replayed: p99 {f['replay_p99']:.3f}, largest {f['replay_max']:.3f}"
    )

# %% [markdown]
# The weights change in the thirteenth decimal place, and the token becomes many times as likely, or as unlikely. A
# finer dtype does not cure that; it only makes it rarer. On the right, the replayed p99 and the largest value roughly
# halve with every extra bit of mantissa, as rounding errors do. With the trainer's own experts, far fewer decisions
# differ, but the largest jump hardly shrinks.
#
# ## Exercise 2: how layers add up
#
# Write `per_layer(share, layers)`: suppose that layers differ independently, each in the same share of tokens. What is
# that share, if `share` of the tokens differ in at least one of `layers` layers?


# %% tags=["exercise"]
def per_layer(share, layers):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_2():
    for share, layers in ((0.94, 48), (0.2, 4), (0.5, 1)):
        actual = per_layer(share, layers)
        back = engines.independent(np.full(layers, actual))
        assert abs(back - share) < 1e-9, (
            f"{layers} layers that each differ in {actual:.4f} of the tokens make {back:.4f}, not {share}"
        )


check(2, check_2)


# %% tags=["solution"] jupyter={"source_hidden": true}
def per_layer(share, layers):
    return 1 - (1 - share) ** (1 / layers)


check(2, check_2)

# %% [markdown]
# The replay paper reports that about 10% of the routers decide differently (a router: one token's set of experts in one
# layer) and that 94% of tokens do so in at least one layer, in a network of 48 layers. Independent layers with a tenth
# each would give:

# %%
print(f"{engines.independent(np.array([0.1]), 48):.3f} of the tokens")
layers = comparison["shares"].mean(0)[1 : 1 + L]
print(
    f"here: by layer {', '.join(f'{share:.3f}' for share in layers)} of the sets of experts differ, "
    f"{decisions:.3f} of the experts in them"
)
print(
    f"here: {tokens:.3f} of the positions differ in some layer; independent layers with their shares "
    f"would make {engines.independent(layers):.3f}"
)

# %% [markdown]
# That is more than is found, there and here. Differences come in clusters: a token that was routed differently in one
# layer reaches the next with a different input.
#
# ## Exercise 3: what the router learns
#
# A token's output is $y = \sum_{e\in R} g_e v_e$ with the gates of the equation at the top. Write
# `router_gradient(scores, experts, values)`: $\partial y/\partial s$, [N, E], for scores [N, E], experts [N, K] and $v$
# [N, K], without autograd.
# (`router_replay.gates` gives $g$.)


# %% tags=["exercise"]
def router_gradient(scores, experts, values):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_3():
    generator = torch.Generator().manual_seed(1)
    scores, values = (
        torch.randn(5, 6, dtype=torch.float64, generator=generator),
        torch.randn(5, 2, dtype=torch.float64, generator=generator),
    )
    experts = torch.rand(5, 6, generator=generator).argsort(-1)[:, :2]
    leaf = scores.clone().requires_grad_()
    (want,) = torch.autograd.grad((router_replay.gates(leaf, experts) * values).sum(), leaf)
    actual = router_gradient(scores, experts, values)
    assert actual.shape == scores.shape, (
        f"a gradient has the shape of the scores, {list(scores.shape)}, not {list(actual.shape)}"
    )
    expert_mask = torch.zeros(5, 6, dtype=torch.bool).scatter_(1, experts, True)
    assert not actual[~expert_mask].any(), "an expert that was not chosen is in no gate: its score has no gradient"
    off = (actual - want).abs().max()
    assert off < 1e-9, (
        f"off by {off:.2g}; is the sign right? a gate also depends on the scores of the other chosen experts"
    )


check(3, check_3)


# %% tags=["solution"] jupyter={"source_hidden": true}
def router_gradient(scores, experts, values):
    g = router_replay.gates(scores, experts)
    y = (g * values).sum(-1, keepdim=True)
    return torch.zeros_like(scores).scatter(1, experts, g * (values - y))


check(3, check_3)

# %% [markdown]
# An expert's score rises if its output is better than the mixture's. With these gates, an expert that was not chosen
# learns nothing, replay or not.
#
# ## How it breaks: constants for gates
#
# It is tempting to let the sampler return its gates too, and to use them as they are. Here is what a gate without a
# gradient does. The tokens' mean log-prob is differentiated with respect to the routers' weights, once with the gates
# recomputed, once with the same gates as constants:

# %%
batch = [rollout for rollout in rollouts if len(rollout.tokens) == 96][:8]
ids, keep = torch.stack([r.tokens for r in batch]), torch.stack([r.sampled for r in batch])[:, 1:]
filler = torch.arange(2).expand(len(batch), 1, 2)
picked = [torch.cat((torch.stack([r.experts[:, n].long() for r in batch]), filler), 1).flatten(0, 1) for n in range(L)]


def measure_router_gradient(experts, constant):
    """The mean log-prob, and the norm of its gradient with respect to all routers' weights."""
    network = copy.deepcopy(trainer)
    routers = [layer.mlp.gate for layer in network.layers]
    for router in routers if constant else []:
        router.register_forward_hook(lambda module, inputs, logits: logits.detach())
    hidden = network(ids, logits=False, experts=experts).hidden
    logp = network.logprob(hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).view(len(ids), -1)
    mean = (logp * keep).sum() / keep.sum()
    mean.backward()
    return mean.item(), math.sqrt(
        sum(r.weight.grad.square().sum().item() for r in routers if r.weight.grad is not None)
    )


for name, *arguments in (
    ("own experts", None, False),
    ("replayed, gates recomputed", picked, False),
    ("replayed, gates constant", picked, True),
):
    mean, norm = measure_router_gradient(*arguments)
    print(f"{name:28s} mean log-prob {mean:.6f}, gradient at the routers {norm:.4f}")
leaf = scores.clone().requires_grad_()
for normalise in (True, False):
    gate = router_replay.gates(leaf, sampler_experts[:, :1], normalise)
    (gradient,) = torch.autograd.grad(gate.sum(), leaf)
    print(
        f"one expert a token, normalise={normalise}: gate {gate.item():.3f}, gradient "
        f"{[round(g, 3) for g in gradient[0].tolist()]}"
    )

# %% [markdown]
# The value is the same to the last digit shown, and the routers stand still. The last two lines show the same trap in a
# model's design: with a single expert per token, a gate that is normalised over the chosen experts is one, whatever the
# score. (Not normalised, it is a softmax over all experts, and the others' scores get a gradient too.)
#
# ## How it breaks: off by one
#
# The experts of position $t$ were chosen while predicting token $t + 1$. If you store per token what was recorded per
# position, you are off by one, and everything still has the right shape. Shift the recorded experts by one position:

# %%
shifted = compare_engines([replace(rollout, experts=rollout.experts.roll(1, 0)) for rollout in rollouts])

# %% [markdown]
# Misplaced replay is far worse than none. Now the filter earns its keep: it throws out what this router cannot believe,
# and it lowers the p99, though for $\alpha < 1$ not to the level of the trainer's own experts. Better still, it
# *counts*. At $\alpha = 0.5$ the aligned indices lost next to nothing, and the shifted ones lose a third. A share of
# dropped experts far from zero is an alarm, and it is cheap to log.
#
# ## What trained agents did

# %%
verdicts("router-mismatch")

# %% [markdown]
# These two engines are one implementation in two precisions, and the trained agent has four layers; the sources report
# on real engines and on 48 layers. The paper's tenth counts *sets* of experts, one set for each token and layer; of
# single experts, roughly half as many differ. Where the filter drops nothing, it can improve nothing. A training gives
# one number, however many steps it has, because each step begins where the last one ended. So it takes several
# trainings to tell what replay does in RL. The notes in
# `results/claims.json` say what each number rests on.
#
# ## Open challenge
#
# Tell tokens whose replayed experts came from another place (off by one) from those where two engines honestly differ,
# with the highest F1. `etude challenge 8` gives the rules, a file to begin with and the scores so far.
#
# ## Where to read on
#
# * `ref/router_replay.py` from the top; `ref/network/model.py`, class `MoE`, where indices or a function of the logits
#   overrule the router.
# * `ref/rl.py`, function `routing`: from rollouts to the experts of a padded batch. Look for the row that pads.
# * `etude figure router-mismatch` runs the experiment, RL included; `etude explore`, page *Router replay*.
# * Rollout routing replay is arXiv:2510.11370; the filter is the Composer 2 technical report's, §6.2.
# * Next: lesson 9, packing.
