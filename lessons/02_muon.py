# %% [markdown]
# # 2 · Muon: a step in every direction
#
# **After this lesson you can** say what Muon does to a gradient and why that is steepest descent under another norm;
# follow Newton–Schulz on singular values; choose which parameters it may have, and at what scale; and say what becomes
# of an expert that nobody visits.
#
# *About 40 minutes. Prerequisites: lesson 1. Source: the Composer 2.5 release, which trains with Muon (Composer 2 used
# AdamW); K. Jordan et al., "Muon" (2024); Moonlight, arXiv:2502.16982.*
#
# ## The idea
#
# The gradient of a weight matrix has a few large singular values and many small ones. A step along it moves the output
# in those few directions, and hardly in the others. Muon keeps all directions and makes them equally large:
#
# $$G = U\Sigma V^\top \;\longmapsto\; UV^\top$$
#
# This is steepest descent if the size of a step is measured by the most it can do to an activation, the spectral norm:
# among all $X$ with $\lVert X\rVert_2 \le 1$, $UV^\top$ is the one with the largest inner product with $G$. (Measured
# entry by entry, the same argument gives the sign of the gradient, which is what Adam does without its averages.)
#
# No decomposition is computed. An odd polynomial of a matrix acts on its singular values alone, $p(X) =
# U\,p(\Sigma)\,V^\top$, and one that pushes all of $(0, 1]$ towards one costs only a few matrix products per round:
#
# $$A = XX^\top \qquad X \leftarrow aX + (bA + cA^2)X \qquad (a, b, c) = (3.4445, -4.7750, 2.0315)$$

# %% [markdown]
# **Predict first.** An expert gets one token at the first step, and none in the 600 steps that follow: its gradient is
# then zero, and its momentum fades by 0.95 a step. For how many steps do its weights keep moving under AdamW, and for
# how many under Muon?

# %%
import itertools
import random

import matplotlib.pyplot as plt
import torch

from lessons.course import check, quick, source
from recipe.microrepo import documents
from ref import cpt, muon
from ref.network import Config, Transformer

source(muon.newton_schulz)

# %% [markdown]
# Three things deserve a look.
#
# * It divides by $\lVert X\rVert_F$ first. That is at least the largest singular value, so everything starts in $(0,
#   1]$, where the polynomial is tame. No singular value needs to be known.
# * `gram` is taken on the smaller side, so a tall matrix is never transposed.
# * Leading dimensions are separate matrices: an expert stack $[E, m, n]$ is $E$ problems, each at its own scale.
#
# Give it a diagonal matrix, and the diagonal that comes back shows what the polynomial does to each singular value:

# %%
values = torch.logspace(-4, 0, 200, dtype=torch.float64)
figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
start = values / values.norm()
for steps in (1, 2, 3, 5):
    axes.plot(
        start, muon.newton_schulz(torch.diag(values), steps).diagonal(), label=f"{steps} round{'s' * (steps > 1)}"
    )
axes.axhspan(0.68, 1.21, color="grey", alpha=0.15)
axes.set(xscale="log", xlabel="singular value / ‖G‖", ylabel="after Newton–Schulz")
axes.legend(frameon=False)
plt.show()
five = muon.newton_schulz(torch.diag(values)).diagonal()
for share in (1e-4, 1e-3, 2e-3, 1e-2):
    print(f"a singular value of {share:g} of the norm ends at {five[(start - share).abs().argmin()]:.2f}")
arrived = five[start > 0.002]
print(f"all above 0.002 end between {arrived.min():.2f} and {arrived.max():.2f}")

# %% [markdown]
# It never converges to one, and is not meant to. The coefficients were chosen for their slope at zero, $a^5 \approx
# 485$, which lifts small singular values within five rounds. Ending up between 0.68 and 1.21 is precise enough for a
# step.
#
# ## What real momentum looks like
#
# A small network trains on the characters of modules of the small world: once with Muon for matrices and AdamW for the
# rest, and with AdamW alone at three learning rates. `optimizers` does the sorting: embeddings, head and router are not
# maps between
# activations, and stay with AdamW.

# %%
source(muon.split_parameters)
text = "".join(itertools.islice(documents(random.Random(0)), quick(1500, 200)))
letters = torch.tensor([ord(c) for c in text])
shape = Config(
    vocab_size=128, hidden_size=64, num_hidden_layers=2, head_dim=16, num_experts=4, moe_intermediate_size=64
)


def trained(use_muon, adamw_lr=3e-3, steps=quick(80, 6)):
    """Network, optimisers and loss by step; the same weights at the start and the same batches every time."""
    torch.manual_seed(0)
    model, generator = Transformer(shape), torch.Generator().manual_seed(0)
    optimizers = muon.optimizers(model, adamw_lr=adamw_lr, use_muon=use_muon)
    rates, losses = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers], []
    for step in range(steps):
        for optimizer, full in zip(optimizers, rates, strict=True):
            for group, rate in zip(optimizer.param_groups, full, strict=True):
                group["lr"] = rate * cpt.wsd(step, steps, 5, steps // 3)
            optimizer.zero_grad()
        ids = letters[torch.randint(len(letters) - 96, (16, 1), generator=generator) + torch.arange(96)]
        loss, count = cpt.next_token_loss(model, model(ids, logits=False).hidden, ids)
        (loss / count).backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item() / count)
    return model, optimizers, losses


model, (optimizer, _), losses = trained(True)
figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
axes.plot(losses, label="Muon 0.02 + AdamW 0.003")
print(f"nats per character, last 5 steps: Muon {sum(losses[-5:]) / 5:.3f}")
for rate, style in ((1e-3, ":"), (3e-3, "-."), (1e-2, "--")):
    losses = trained(False, rate)[2]
    axes.plot(losses, style, label=f"AdamW {rate:g}")
    print(f"                                  AdamW at {rate:g} {sum(losses[-5:]) / 5:.3f}")
axes.set(xlabel="step", ylabel="nats per character")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# With one seed and a network that two cores train in seconds, this shows the effect but does not measure it.
# (`training.optimizer = "adamw"` runs the recipe without Muon.) Here are the momentum matrices at the end of this
# training:

# %%
names = (
    "layers.0.self_attn.q_proj.weight",
    "layers.0.self_attn.o_proj.weight",
    "layers.1.mlp.gate_up_proj",
    "layers.1.mlp.down_proj",
)
figure, axes = plt.subplots(1, len(names), figsize=(11, 2.6), sharey=True, layout="constrained")
for axis, name in zip(axes, names, strict=True):
    momentum = optimizer.state[model.get_parameter(name)]["momentum_buffer"]
    momentum = momentum.reshape(-1, *momentum.shape[-2:])[0]  # of a stack the first expert
    before, after = torch.linalg.svdvals(momentum), torch.linalg.svdvals(muon.newton_schulz(momentum))
    axis.plot(before / before[0], ".-", markersize=3, label="momentum, largest = 1")
    axis.plot(after, ".-", markersize=3, label="orthogonalised")
    axis.set(yscale="log", ylim=(1e-3, 3), xlabel="singular value, by rank")
    axis.set_title(name.removesuffix(".weight").replace("layers.", ""), fontsize=9)
    print(
        f"{name}: the first 4 of {len(before)} directions hold "
        f"{before[:4].square().sum() / before.square().sum():.0%} of the "
        f"momentum, and {after[:4].square().sum() / after.square().sum():.0%} of the step"
    )
axes[0].legend(frameon=False, fontsize=8)
plt.show()

# %% [markdown]
# ## Exercise 1: the nearest orthogonal matrix
#
# Write `polar(G)`: $UV^\top$, exactly, by `torch.linalg.svd`. The check tests what makes it the steepest step: its
# inner product with $G$ is the sum of $G$'s singular values, and no other matrix of spectral norm one has a larger one.


# %% tags=["exercise"]
def polar(G):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_1():
    generator = torch.Generator().manual_seed(1)
    for m, n in ((6, 6), (4, 9), (9, 4)):
        G = torch.randn(m, n, dtype=torch.float64, generator=generator)
        X = polar(G)
        assert X.shape == G.shape, f"{m}×{n} in, {m}×{n} out, not {list(X.shape)}: full_matrices=False"
        assert (torch.linalg.svdvals(X) - 1).abs().max() < 1e-9, "every singular value of the answer should be one"
        best, actual = torch.linalg.svdvals(G).sum(), (G * X).sum()
        assert (best - actual).abs() < 1e-9, (
            f"the inner product with G should be {best:.4f}, the sum of its singular values, not {actual:.4f}"
        )
        for _ in range(20):
            candidate = torch.randn(m, n, dtype=torch.float64, generator=generator)
            assert (G * candidate / torch.linalg.matrix_norm(candidate, 2)).sum() <= actual, (
                "another matrix of spectral norm one does better"
            )


check(1, check_1)


# %% tags=["solution"] jupyter={"source_hidden": true}
def polar(G):
    U, _, Vh = torch.linalg.svd(G, full_matrices=False)
    return U @ Vh


check(1, check_1)

# %% [markdown]
# ## The step, and its scale
#
# $$M \leftarrow \mu M + (1-\mu)G \qquad U = (1-\mu)G + \mu M \qquad
# W \leftarrow (1 - \eta\lambda)W - \eta\,\sqrt{\max(1, m/n)}\;\mathrm{NS}(U)$$
#
# Momentum comes first and is orthogonalised afterwards: the step is the direction of a mean, not the mean of
# directions. $U$ is Nesterov's momentum, which already counts the current gradient.

# %%
source(muon.Muon.step_equal_shapes)

# %% [markdown]
# Where does the root come from? A tall matrix of $m$ outputs and $n$ inputs with unit singular values keeps the length
# of $x$, but spreads it over more outputs: each moves only by $\sqrt{n/m}$. The factor undoes that, so that a step of
# $\eta$ moves every output of every layer by about $\eta$, and one learning rate fits all shapes:

# %%
generator = torch.Generator().manual_seed(0)
for m, n in ((64, 64), (256, 64), (1024, 64), (64, 256)):
    weight = torch.nn.Parameter(torch.zeros(m, n))
    stepper = muon.Muon([weight], lr=1.0)
    weight.grad = torch.randn(m, n, generator=generator)
    stepper.step()
    moved = (weight.detach() @ torch.randn(n, 512, generator=generator)).square().mean().sqrt()
    print(
        f"{m:>5} outputs, {n:>4} inputs: an output moves by {moved:.2f} η; without the factor by "
        f"{moved / max(1, m / n) ** 0.5:.2f} η; "
        f"a weight by {weight.detach().square().mean().sqrt():.3f} η"
    )

# %% [markdown]
# An output moves by a little less than η, since Newton–Schulz ends below one on average. The last column shows why `lr`
# cannot be carried over from AdamW, which moves every *weight* by about η whatever the shape. Moonlight turns this
# around: its factor $0.2\sqrt{\max(m, n)}$ gives a weight a step as large as AdamW's are in practice, a fifth of η, and
# so borrows AdamW's learning rate. Neither is wrong; mixing them up is.
#
# What Muon does not see is the basis. Take a regression in which most input directions are rare, once along the axes
# and once rotated:

# %%
trials = []
metrics = muon.demo(muon.Demo(steps=quick(100, 20)), lambda step, total, **figures: trials.append(figures))
half = len(trials) // 2
figure, axes = plt.subplots(1, 2, figsize=(8, 3), sharey=True, layout="constrained")
for axis, part, title in zip(
    axes, (trials[:half], trials[half:]), ("rare directions are inputs", "the same, rotated"), strict=True
):
    for name, points, style in (("Muon", part[: half // 2], "o-"), ("AdamW", part[half // 2 :], "s--")):
        axis.plot([point["lr"] for point in points], [point["loss"] for point in points], style, label=name)
    axis.set(xscale="log", yscale="log", xlabel="learning rate", title=title)
    axis.set_xticks([0.03, 0.1, 0.3], ["0.03", "0.1", "0.3"])
    axis.minorticks_off()
axes[0].set_ylabel("final loss / first loss")
axes[0].legend(frameon=False)
plt.show()
for basis in ("axes", "rotated"):
    print(
        f"{basis:>8}: Muon {metrics[f'muon_loss_{basis}']:.2e}, AdamW "
        f"{metrics[f'adamw_loss_{basis}']:.2e}, each at its best rate"
    )
print(
    f"singular values after five rounds: float32 {metrics['smallest_fp32']:.3f} to {metrics['largest_fp32']:.3f}, "
    f"bfloat16 {metrics['smallest_bf16']:.3f} to {metrics['largest_bf16']:.3f}"
)

# %% [markdown]
# AdamW scales each weight by itself. Where rare directions *are* single inputs, that is exactly right, and it wins.
# Rotate the axes, and it has nothing to hold on to. Muon does equally well on both. The hidden directions of a network
# have no reason to lie along axes, but the rows of an embedding do: one more reason for the division of labour. The
# last line shows why the products may run in bfloat16.
#
# ## Exercise 2: a step by hand
#
# Write `step(W, M, G, lr, momentum, weight_decay)` → (new W, new M), with Nesterov, for one matrix; use
# `muon.newton_schulz`. Change nothing in place.


# %% tags=["exercise"]
def step(W, M, G, lr, momentum, weight_decay):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_2():
    generator = torch.Generator().manual_seed(2)
    for m, n in ((8, 8), (12, 5), (5, 12)):
        W, M = torch.randn(m, n, generator=generator), torch.zeros(m, n)
        weight = torch.nn.Parameter(W.clone())
        stepper = muon.Muon([weight], lr=0.1, momentum=0.9, weight_decay=0.5, ns_dtype=None)
        for number in (1, 2, 3):
            weight.grad = torch.randn(m, n, generator=generator)
            stepper.step()
            originals = [matrix.clone() for matrix in (W, M, weight.grad)]
            arguments = [matrix.clone() for matrix in originals]
            W, M = step(*arguments, 0.1, 0.9, 0.5)
            assert all(map(torch.equal, arguments, originals)), "something that was given has been changed in place"
            away = (M - stepper.state[weight]["momentum_buffer"]).abs().max()
            assert away < 1e-5, f"{m}×{n}, step {number}: the momentum is off by {away:.2g}. M ← μM + (1 − μ)G"
            away = (W - weight.detach()).abs().max()
            assert away < 1e-4, (
                f"{m}×{n}, step {number}: the weights are off by {away:.2g}. Nesterov? Decay, of W and "
                f"times lr? √max(1, m/n)?"
            )


check(2, check_2)


# %% tags=["solution"] jupyter={"source_hidden": true}
def step(W, M, G, lr, momentum, weight_decay):
    m, n = G.shape
    M = momentum * M + (1 - momentum) * G
    U = (1 - momentum) * G + momentum * M
    return (1 - lr * weight_decay) * W - lr * max(1, m / n) ** 0.5 * muon.newton_schulz(U), M


check(2, check_2)

# %% [markdown]
# ## Exercise 3: one head at a time
#
# The projection to queries is one matrix $[H d, n]$, but it serves $H$ heads. Composer 2.5 orthogonalises per head.
# Write `per_head(G, heads)`. To see why it matters, compare what each head gets with its own best step, `polar` of its
# own gradient: how close is the direction, and how large is the step? The gradient of the first head is 1, 100 and
# 1,000 times as large as those of the others. The direction suffers in any case, because rows of different heads are
# made orthogonal to each other. The size suffers when one head is loud: the quiet ones get what it leaves.

# %%
equal = torch.randn(4, 16, 64, generator=torch.Generator().manual_seed(3))
loud = equal * torch.tensor([1000.0, 1, 1, 1])[:, None, None]


def beside_best(gradient, steps):
    """Each head's step beside UVᵀ of its own gradient, both [heads, d, n]: cosine and relative size, each a list of
    numbers."""
    U, _, Vh = torch.linalg.svd(gradient, full_matrices=False)
    best, steps = (U @ Vh).flatten(1), steps.flatten(1)
    pair = torch.cosine_similarity(best, steps), steps.norm(dim=1) / best.norm(dim=1)
    return [[round(value, 3) for value in values.tolist()] for values in pair]


for times in (1, 100, 1000):
    gradient = equal * torch.tensor([times, 1, 1, 1])[:, None, None]
    near, large = beside_best(gradient, muon.newton_schulz(gradient.flatten(0, 1)).view_as(gradient))
    print(f"as a whole, the first head {times:>4} times as loud: cosines {near}, sizes {large}")


# %% tags=["exercise"]
def per_head(G, heads):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_3():
    actual = per_head(loud.flatten(0, 1), 4)
    assert actual.shape == (64, 64), f"the answer has the shape of the gradient, [64, 64], not {list(actual.shape)}"
    near, large = beside_best(loud, actual.view_as(loud))
    assert min(near) > 0.97, f"each head should come near its own best step; the cosines are {near}"
    assert 0.8 < min(large) <= max(large) < 1.2, (
        f"each head's step should be as large as its own best one; the sizes are {large}"
    )
    print(f"per head, the first 1000 times as loud: cosines {near}, sizes {large}")


check(3, check_3)


# %% tags=["solution"] jupyter={"source_hidden": true}
def per_head(G, heads):
    return muon.newton_schulz(G.unflatten(0, (heads, -1))).flatten(0, 1)


check(3, check_3)

# %% [markdown]
# ## How it breaks: the expert that nobody visits
#
# Orthogonalising throws away the size of a gradient. That is the point, until the size is the message. A mixture of
# experts has experts that a batch does not visit. Their gradient is zero, and all that is left is momentum, which fades
# by $\mu = 0.95$ a step. But a matrix a millionth as large has the *same* $UV^\top$. Suppose that an expert gets one
# token at the first step, so that its gradient has rank one, and none ever after. How far does each step move its
# weights?

# %%
gradient = torch.outer(*torch.randn(2, 64, generator=torch.Generator().manual_seed(4)))
weights = {name: torch.nn.Parameter(torch.zeros(64, 64)) for name in ("Muon", "AdamW")}
steppers = {
    "Muon": muon.Muon([weights["Muon"]], lr=1.0),
    "AdamW": torch.optim.AdamW([weights["AdamW"]], lr=1.0, betas=(0.9, 0.95), weight_decay=0.0),
}
moved = {name: [] for name in weights}
for number in range(600):
    for name, weight in weights.items():
        before = weight.detach().clone()
        weight.grad = gradient.clone() if number == 0 else torch.zeros_like(gradient)
        steppers[name].step()
        moved[name].append((weight.detach() - before).norm().item())
figure, axes = plt.subplots(figsize=(6, 2.8), layout="constrained")
for name, style in (("Muon", "-"), ("AdamW", "--")):
    axes.plot([value / moved[name][0] for value in moved[name]], style, label=name)
axes.set(xlabel="steps since the only gradient", ylabel="size of a step, first = 1")
axes.legend(frameon=False)
plt.show()
for number in (1, 10, 100, 300, 400, 500):
    print(
        f"step {number:>3}: Muon moves {moved['Muon'][number] / moved['Muon'][0]:7.2%} of its first step, "
        f"AdamW {moved['AdamW'][number] / moved['AdamW'][0]:7.2%}"
    )
print(
    f"in all, in first steps: Muon {sum(moved['Muon']) / moved['Muon'][0]:.0f}, AdamW "
    f"{sum(moved['AdamW']) / moved['AdamW'][0]:.1f}"
)

# %% [markdown]
# **Your prediction:** AdamW has all but stopped after a hundred steps; Muon still moves at full speed after four
# hundred.
#
# After a single token, the expert walks on at full speed for hundreds of steps, in a direction that was right once. It
# stops only because what is divided by is $\lVert X\rVert + \epsilon$, with $\epsilon = 10^{-7}$. So the losses that
# keep experts visited (`load_balancing_loss` in `ref/network/model.py`) are not only about balance.
#
# A second way to break Muon is to leave out the division by the norm. The polynomial is tame up to a point; beyond it,
# the fifth power takes over:

# %%
a, b, c = muon.COEFFICIENTS
for largest in (0.5, 1.0, 1.2, 1.25, 1.3, 1.5):
    x, path = largest, []
    for _ in range(5):
        x = a * x + b * x**3 + c * x**5
        path.append(x)
        if abs(x) > 1e6:
            break
    print(f"a singular value of {largest:4} goes to " + ", ".join(f"{value:.3g}" for value in path))

# %% [markdown]
# ## Open challenge
#
# Spend fifteen matrix products on rounds of odd polynomials, so that all singular values from 0.002 to 1 end as close
# to one as possible. `etude challenge 2` gives the rules, a file to begin with and the scores so far.
#
# ## Where to read on
#
# * `ref/muon.py` from top to bottom; `scaled/muon.py` for matrices that are sharded over many ranks, and
#   `kernels/muon.py`.
# * `etude run muon --scale small --set decay=2.0`: the regression with rarer directions.
# * `ref/network/masters.py`: the float32 masters to which these steps are applied.
# * Jordan's essay for how the coefficients were found; Moonlight for weight decay and the other scale; Bernstein and
#   Newhouse, "Old optimizer, new norm" (arXiv:2409.20325), for steepest descent under a norm of your choice.
# * Next: lesson 3, multi-token prediction.
