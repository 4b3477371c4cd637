# %% [markdown]
# # 1 · Continued pretraining: rows of strangers
#
# **After this lesson you can** pack documents into rows so that none sees another; write a loss that does not depend on
# how a batch is cut; lay out a learning-rate schedule over phases; and measure how well a model knows a codebase.
#
# *About 50 minutes. Prerequisites: lesson 0. Source: Composer 2 technical report, §3.1 and Appendix B; the schedule
# after MiniCPM, arXiv:2404.06395, §4.*
#
# ## The idea
#
# Continued pretraining takes a model that has read a lot and trains it on code: most of it in short contexts, the rest
# in long ones. The loss is the oldest there is, the surprise at the next token, in nats. What needs care is what a
# token may be predicted *from*:
#
# $$L = -\sum_{b,t} w_{b,t} \log p(x_{b,t} \mid \text{the tokens of its own document before it})$$
#
# and what the sum is divided by. Afterwards the model is tested on a codebase that it has never seen. It reads the
# files one after another, through a window that rolls along:
#
# $$\mathrm{NLL} = -\sum_{t \ge 1} \log p(x_t \mid x_{s(t)} \dots x_{t-1})
# \qquad \text{perplexity} = e^{\mathrm{NLL}/\text{tokens}}
# \qquad \text{bits per byte} = \frac{\mathrm{NLL}}{\text{bytes}\cdot\ln 2}$$

# %% [markdown]
# **Predict first.** Two networks of one size train on the same files for the same number of tokens. One reads with a
# vocabulary of 1,024 tokens, the other with one of 300, hardly more than bytes. Which has the lower perplexity on a
# codebase that neither has seen, and which knows that codebase better?

# %%
import math
import random
import sysconfig

import matplotlib.pyplot as plt
import numpy as np
import torch

from lessons.course import check, quick, source
from recipe.microrepo import document, generate
from recipe.small.settings import Recipe
from ref import cpt, muon
from ref.network import Config, Transformer

source(cpt.pack)

# %% [markdown]
# ## From files to rows
#
# Training needs rows of equal length, and files have all lengths. `pack` lays whole documents side by side, each in the
# first row that has room, and cuts only what is longer than a row. It returns two arrays: the tokens, and `doc`, the
# number of each token's document in its row (−1 for padding). Everything that follows depends on that second array.
#
# The training data here are packages of the standard library, one of them held out, and modules of the small world,
# whose held-out functions differ from those in training. A byte-level tokenizer is trained on both.

# %%
library = cpt.read_corpus(
    sysconfig.get_paths()["stdlib"], (".py",), ("site-packages", "test", "tests", "idlelib", "lib2to3")
)
packages = {name: text for name, text in library.files.items() if "/" in name and name < "f"}
folder, train_corpus, heldout_corpus = cpt.hold_out_codebase(cpt.Corpus(packages, library.skipped))


def modules(split, count, seed):
    """Modules of the small world as files; held-out ones compute other functions than those of training."""
    rng = random.Random(seed)
    return {f"{number:05}.py": document(generate(rng, split), rng) for number in range(count)}


world, fresh = modules("train", quick(4000, 400), 0), cpt.Corpus(modules("heldout", 100, 1))
LENGTH, STEPS, ROWS = 128, quick(120, 6), 16


def prepared(vocabulary):
    """Tokenizer of so many tokens, and packed rows for all steps: half library, half small world."""
    texts = (
        [text[:8000] for text in train_corpus.files.values()],
        [*world.values()],
    )  # the beginnings, so that no file is most of what is read
    tokenizer = cpt.train_tokenizer((text for part in texts for text in part), vocabulary)
    pieces = []
    for part in texts:
        left = STEPS * ROWS * LENGTH / 2
        for text in part:
            pieces.append([*tokenizer.encode(text).ids, 0])
            left -= len(pieces[-1])
            if left < 0:
                break
    ids, doc = cpt.pack(pieces, LENGTH)
    return tokenizer, pieces, torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(doc.astype(np.int64))


tokenizer, pieces, ids, doc = prepared(1024)
short = [piece for piece in pieces if len(piece) <= LENGTH]
lone = 1 - sum(map(len, short)) / (LENGTH * len(short))
print(
    f"held out: {folder}, {len(heldout_corpus.files)} files, {heldout_corpus.bytes:,} bytes; read: {len(pieces):,} "
    f"documents, {len(ids):,} rows of {LENGTH}"
)
print(
    f"one document to a row would waste {lone:.0%} of {len(short):,} rows on padding; packed, "
    f"{(doc < 0).float().mean():.1%} is padding"
)

doc_numbers = cpt.pack([[*tokenizer.encode(text).ids, 0] for text in list(world.values())[:40]], 2 * LENGTH)[1]
figure, axes = plt.subplots(figsize=(9, 2.4), layout="constrained")
axes.imshow(np.ma.masked_less(doc_numbers, 0), aspect="auto", cmap="tab10", vmin=0, vmax=9, interpolation="nearest")
axes.set(
    xlabel="place in the row",
    ylabel="row",
    title="40 modules in rows of the long context; each colour is a document, white is padding",
)
plt.show()

# %% [markdown]
# ## The loss
#
# A row holds strangers, so `doc` is needed twice: attention must not cross a document's border, and no token can
# predict the first token of the next document. The network takes `doc` for the first; here is the second.

# %%
source(cpt.next_token_loss)

# %% [markdown]
# * `scored` keeps a token if it and the one before it belong to the same document. That drops each document's first
#   token, and padding.
# * It returns **a sum and a count**, not a mean. Only the caller, who knows all of a step's micro-batches, divides.
# * Positions run on through the row. Rotary embeddings see only distances, so a document deep in a row reads as it
#   would alone.
#
# ## Exercise 1: what is scored
#
# Write `scored(doc)`: for `doc` [B, T], a Boolean [B, T−1] that is true where the token at t + 1 is to be predicted
# from the one at t.


# %% tags=["exercise"]
def scored(doc):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_1():
    actual = scored(torch.tensor([[0, 0, 0, 1, 1, -1], [0, 1, -1, -1, -1, -1]]))
    assert actual.shape == (2, 5), f"six tokens have five successors: [2, 5], not {list(actual.shape)}"
    assert not actual[0, -1] and not actual[1, 1:].any(), "padding (−1) is nobody's to predict, not even from padding"
    assert not actual[0, 2] and not actual[1, 0], (
        "the first token of a document cannot be predicted from its neighbour in the row"
    )
    assert actual.tolist() == [[True, True, False, True, False], [False] * 5], f"all others are: {actual.tolist()}"
    count = cpt.next_token_loss(
        tiny, tiny(ids[shared], doc=doc[shared], logits=False).hidden, ids[shared], doc[shared]
    )[1]
    assert int(scored(doc[shared]).sum()) == count, f"next_token_loss scores {count:.0f} tokens of these rows"


shared = (doc.max(1).values > 0).nonzero()[:6, 0]  # rows of several documents
torch.manual_seed(0)
tiny = Transformer(
    Config.tiny(
        1024,
        hidden_size=32,
        num_hidden_layers=1,
        num_experts=0,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
)
check(1, check_1)


# %% tags=["solution"] jupyter={"source_hidden": true}
def scored(doc):
    return (doc[:, 1:] == doc[:, :-1]) & (doc[:, 1:] >= 0)


check(1, check_1)

# %% [markdown]
# ## Exercise 2: micro-batches
#
# A step rarely fits into memory at once, so its rows are taken in parts, and their gradients add up. Write
# `accumulate(model, parts, total)`: call `backward()` for each of the parts `(ids, doc)`, so that in the end the
# gradients are those of the *mean* loss over all `total` scored tokens of the step. The parts below hold very different
# numbers of tokens.


# %% tags=["exercise"]
def accumulate(model, parts, total):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_2():
    batch_ids, batch_doc = ids[shared].clone(), doc[shared].clone()
    batch_doc[4:, 10:] = -1  # the last two rows are almost all padding
    loss, total = cpt.next_token_loss(tiny, tiny(batch_ids, doc=batch_doc, logits=False).hidden, batch_ids, batch_doc)
    expected = torch.autograd.grad(loss / total, list(tiny.parameters()))
    tiny.zero_grad()
    accumulate(tiny, [(batch_ids[:4], batch_doc[:4]), (batch_ids[4:], batch_doc[4:])], total)
    actual = torch.cat([p.grad.flatten() for p in tiny.parameters() if p.grad is not None])
    expected = torch.cat([g.flatten() for g in expected])
    tiny.zero_grad()
    assert actual.shape == expected.shape, "some parameters have no gradient: was backward() called?"
    away = ((actual - expected).norm() / expected.norm()).item()
    assert away < 1e-4, (
        f"the gradient is off by {away:.0%} of its size. Divided by each part's own count? By the "
        f"number of parts? No `doc`?"
    )


check(2, check_2)


# %% tags=["solution"] jupyter={"source_hidden": true}
def accumulate(model, parts, total):
    for ids, doc in parts:
        loss, _ = cpt.next_token_loss(model, model(ids, doc=doc, logits=False).hidden, ids, doc)
        (loss / total).backward()


check(2, check_2)

# %% [markdown]
# ## The schedule
#
# `wsd` warms up, stays, and decays. Its point is the middle: the stable part needs no known end. Training can be cut
# there, continued, or branched, and the decay is spent where it is wanted. The recipe's short phase ends at the full
# rate, and MTP layers are added there. The long phase warms up briefly once more and then decays to the end.

# %%
source(cpt.wsd)
recipe = Recipe().training
phases = [recipe.tokens // recipe.batch_tokens, recipe.long_tokens // recipe.batch_tokens]
factors = [cpt.wsd(step, 10 * phases[0], phases[0] // 10, 0) for step in range(phases[0])]
factors += [cpt.wsd(step, phases[1], 5, phases[1]) for step in range(phases[1])]
figure, axes = plt.subplots(figsize=(6, 2.4), layout="constrained")
axes.plot(factors)
axes.axvline(phases[0], color="grey", linewidth=1)
axes.set(xlabel="optimiser step of the recipe", ylabel="factor of the rate")
axes.text(phases[0] / 2, 0.5, f"short, {recipe.length} tokens", ha="center")
axes.text(phases[0] + phases[1] / 2, 0.1, f"long, {recipe.long_length}", ha="center")
plt.show()

# %% [markdown]
# ## Training, live
#
# The whole phase in a dozen lines: rows, forward pass with `doc`, loss over count, Muon and AdamW (lesson 2). We train
# twice, with a vocabulary of 1,024 tokens and with one of 300, which is hardly more than bytes. Every so often both
# codebases are measured, cut to the same bytes for both. Each network reads the same number of *tokens*, so the larger
# vocabulary sees more source for the same compute. That is what it is for.


# %%
def cut(codebase, size):
    """The first so many bytes of its files."""
    files, left = {}, size
    for name, text in codebase.files.items():
        files[name] = text.encode()[:left].decode(errors="ignore")
        left -= len(files[name].encode())
    return cpt.Corpus({name: text for name, text in files.items() if text})


codebases = [cut(codebase, quick(8000, 2000)) for codebase in (heldout_corpus, fresh)]


def read(tokenizer, ids, doc):
    """A network that has read the rows, and its looks: step → CodebaseNLL of the library's folder and of fresh
    modules."""
    torch.manual_seed(0)
    shape = Config.tiny(
        tokenizer.get_vocab_size(),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=4,
        moe_intermediate_size=64,
    )
    model, order, looks = Transformer(shape), torch.randperm(len(ids)), {}
    optimizers = muon.optimizers(model)
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    for step in range(STEPS + 1):
        if step % max(1, STEPS // 6) == 0:
            looks[step] = [cpt.codebase_nll(model, tokenizer, codebase, LENGTH) for codebase in codebases]
        if step == STEPS:
            return model, looks
        for optimizer, full in zip(optimizers, rates, strict=True):
            for group, rate in zip(optimizer.param_groups, full, strict=True):
                group["lr"] = rate * cpt.wsd(step, STEPS, STEPS // 10, STEPS // 3)
            optimizer.zero_grad()
        rows = order[torch.arange(step * ROWS, (step + 1) * ROWS) % len(order)]
        loss, count = cpt.next_token_loss(
            model, model(ids[rows], doc=doc[rows], logits=False).hidden, ids[rows], doc[rows]
        )
        (loss / count).backward()
        for optimizer in optimizers:
            optimizer.step()


model, looks = read(tokenizer, ids, doc)
few_tokenizer, _, few_ids, few_doc = prepared(300)
few_model, few_looks = read(few_tokenizer, few_ids, few_doc)

figure, panels = plt.subplots(1, 2, figsize=(9, 3.2), sharex=True, layout="constrained")
for measurements, label, style in ((looks, "1,024 tokens", "o-"), (few_looks, "300 tokens", "s--")):
    for index, (name, colour) in enumerate(((folder, "tab:blue"), ("fresh modules", "tab:orange"))):
        line = [pair[index] for pair in measurements.values()]
        panels[0].plot(
            measurements.keys(),
            [measurement.perplexity for measurement in line],
            style,
            color=colour,
            label=f"{name}, {label}",
        )
        panels[1].plot(measurements.keys(), [measurement.bits_per_byte for measurement in line], style, color=colour)
        print(
            f"{name:>13}, vocabulary of {label}, {line[0].bytes / line[0].tokens:.2f} bytes each: "
            f"perplexity {line[0].perplexity:6.1f} → {line[-1].perplexity:5.2f}, "
            f"bits per byte {line[0].bits_per_byte:.2f} → {line[-1].bits_per_byte:.2f}"
        )
panels[0].set(xlabel="step", ylabel="codebase perplexity", yscale="log")
panels[1].set(xlabel="step", ylabel="bits per byte")
panels[0].legend(frameon=False, fontsize=8)
plt.show()

# %% [markdown]
# **Your prediction:** the small vocabulary has by far the lower perplexity, and the large one knows the codebase
# better: it needs fewer bits per byte.

# %% [markdown]
# ## Do the strangers matter?
#
# Here are two tests of the network just trained, on fresh modules packed into rows. First, a document is read alone and
# in its row, with `doc` and without. Then the loss is taken three ways: as it should be; with attention open across
# borders; and with first tokens scored as well.

# %%
packed = cpt.pack([[*tokenizer.encode(text).ids, 0] for text in fresh.files.values()], LENGTH)
fresh_ids, fresh_doc = (torch.from_numpy(array.astype(np.int64)) for array in packed)
row = int(fresh_doc.max(1).values.argmax())
mask = fresh_doc[row] == 1
alone = model(fresh_ids[row, mask][None]).logits[0].log_softmax(-1)
for name, numbers in (("with doc", fresh_doc[row : row + 1]), ("without", None)):
    among = model(fresh_ids[row : row + 1], doc=numbers).logits[0, mask].log_softmax(-1)
    print(
        f"second document of a row, {name:>8}: log-probs differ from those it has alone by up to "
        f"{(among - alone).abs().max():.1e} nats"
    )
with torch.no_grad():
    closed, open_hidden = model(fresh_ids, doc=fresh_doc, logits=False).hidden, model(fresh_ids, logits=False).hidden
    # padding stays out of all three
    text = torch.where(fresh_doc >= 0, 0, -1)
    sums = {}
    for name, hidden, numbers in (
        ("as it should be", closed, fresh_doc),
        ("attention open", open_hidden, fresh_doc),
        ("borders scored too", open_hidden, text),
    ):
        loss, count = sums[name] = cpt.next_token_loss(model, hidden, fresh_ids, numbers)
        print(f"{name:>18}: {loss / count:.4f} nats a token, {count:.0f} tokens")
    border_sums, fewer = sums["borders scored too"], sums["attention open"]
    print(
        f"the {border_sums[1] - fewer[1]:.0f} first tokens that were scored as well cost "
        f"{(border_sums[0] - fewer[0]) / (border_sums[1] - fewer[1]):.1f} nats each"
    )

# %% [markdown]
# With `doc` the document reads as it would alone, up to rounding. Without it, the strangers in front change what the
# network says about it. A first token behind a border costs more than a blind guess among all 1,024 tokens would (6.9
# nats). None of this raises an error: each mistake only gives another number that looks like a loss.
#
# ## Exercise 3: bits per byte
#
# A paper reports the perplexity over `tokens` tokens of a text of `size` bytes. Write `bits(perplexity, tokens, size)`:
# its bits per byte.


# %% tags=["exercise"]
def bits(perplexity, tokens, size):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_3():
    assert abs(bits(256.0, 1000, 1000) - 8) < 1e-9, "a token a byte, all 256 alike: eight bits a byte"
    assert abs(bits(256.0, 1000, 4000) - 2) < 1e-9, "the same surprise, spread over four bytes a token: two bits a byte"
    for measurement in (*looks[STEPS], *few_looks[STEPS]):
        actual = bits(measurement.perplexity, measurement.tokens, measurement.bytes)
        assert abs(actual - measurement.bits_per_byte) < 1e-5, (
            f"should be {measurement.bits_per_byte:.4f}, not {actual:.4f}: perplexity is e to the nats a token"
        )


check(3, check_3)


# %% tags=["solution"] jupyter={"source_hidden": true}
def bits(perplexity, tokens, size):
    return tokens * math.log2(perplexity) / size


check(3, check_3)

# %% [markdown]
# ## How it breaks: two numbers called perplexity
#
# Look once more at the figures of the live training. By perplexity, the network with 300 tokens knows both codebases
# better. It does not: it guesses smaller pieces. Per byte of source the order is reversed, on both. Perplexities of
# models with different tokenizers cannot be compared at all, and nothing in the number warns you.
#
# The second trap is quieter. A window that rolls without overlap leaves the token at its head without context. Windows
# that overlap, with only the new tokens scored, give every token at least window − stride tokens of context. Same
# weights, same text:

# %%
for name, codebase in zip((folder, "fresh modules"), codebases, strict=True):
    measurements = {}
    for width, stride in ((128, 127), (128, 64), (128, 16), (64, 32), (16, 8)):
        measurements[width, stride] = cpt.codebase_nll(model, tokenizer, codebase, width, stride).perplexity
    print(
        f"{name:>13}, window and stride: "
        + ", ".join(f"{width}/{stride} {value:.2f}" for (width, stride), value in measurements.items())
    )
    print(
        f"{'':>13}  the largest is {max(measurements.values()) / min(measurements.values()) - 1:.0%} above the smallest"
    )
sizes = np.array([len(tokenizer.encode(text).ids) for text in codebases[1].files.values()])
print(
    f"{(sizes < 128).mean():.0%} of the modules are shorter than 128 tokens, {(sizes < 64).mean():.0%} shorter than 64"
)

# %% [markdown]
# More context is not even always better: on the modules, a window of 64 beats one of 128. The reason is simple. Nearly
# all modules are shorter than 128 tokens, and about half are shorter than 64. A network that was trained behind masks
# has never seen two strangers in one context, and the longer the rolling window, the more of them it shows. So a
# perplexity without its window and stride cannot be reproduced. The Composer 2 report gives no stride; ours is half a
# window, and
# `ref/cpt.py` says so.
#
# ## Exercise 4: how much context
#
# Write `contexts(n, window, stride)`: for a text of n tokens, the number of tokens from which token 1, 2, … n − 1 is
# predicted. Windows begin at multiples of the stride; the last is pulled back so that it ends with the text; a token is
# scored in the first window that holds it.


# %% tags=["exercise"]
def contexts(n, window, stride):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_4():
    actual = list(contexts(10, 4, 2))
    assert len(actual) == 9, f"token 0 is not scored: nine numbers, not {len(actual)}"
    assert actual == [1, 2, 3, 2, 3, 2, 3, 2, 3], f"window 4, stride 2, ten tokens: 1 2 3 2 3 2 3 2 3, not {actual}"
    assert list(contexts(5, 8, 4)) == [1, 2, 3, 4], "a text shorter than the window is one window"
    for n, window, stride in ((100, 32, 8), (101, 32, 31), (77, 16, 5)):
        windows = cpt.windows(model.config, tokenizer, heldout_corpus, window, stride, n, 32)
        want = windows.rows(0, len(windows.starts))[1].nonzero()[:, 1].tolist()
        actual = list(contexts(n, window, stride))
        off = [t for t, (a, b) in enumerate(zip(actual, want), 1) if a != b]
        assert len(actual) == len(want) and not off, (
            f"n={n}, window={window}, stride={stride}: off first at token {min(off, default=len(actual))}"
        )


check(4, check_4)


# %% tags=["solution"] jupyter={"source_hidden": true}
def contexts(n, window, stride):
    width = min(window, n)
    starts = [*range(0, n - width, stride), n - width]
    return [t - next(start for start in starts if start + width > t) for t in range(1, n)]


check(4, check_4)

# %% [markdown]
# ## Open challenge
#
# Plan the learning rate and the share of domain text of each of 150 steps, for the least held-out loss of a small model
# on the domain. `etude challenge 1` gives the rules, a file to begin with and the scores so far.
#
# ## Where to read on
#
# * `ref/cpt.py` from top to bottom: how a corpus is read, what is held out, the traps a to d. `scaled/cpt.py` is the
#   same on many ranks.
# * `etude figure cpt-rl` (the report's Figure 2): what more pretraining does to the loss and to RL; `etude claims
#   --figure cpt-rl` shows verdicts.
# * `recipe/small/data.py`: the recipe's own mix of small world and code, and how long files are kept from dominating
#   it.
# * Lesson 9 deals sequences out to ranks by what they cost; there, packing is about time, not about masks.
# * Next: lesson 2, Muon, which has already been at work here.
