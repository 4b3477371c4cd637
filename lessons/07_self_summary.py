# %% [markdown]
# # 7 · Self-summary: a rollout longer than its context
#
# **After this lesson you can** follow a rollout through several segments and say which token was given, written, or
# written as a summary; count what it saves to ask for a summary in the running context; and spread one reward over a
# chain so that its weight does not depend on its number of segments.
#
# *About 45 minutes. Prerequisites: lesson 4. Source: Composer 2 technical report, §4.1.*
#
# ## The idea
#
# A context is finite, and a task may not be. So a rollout becomes a *chain* of *segments*, each with a context of its
# own. When a context reaches a trigger length, a fixed request is appended, and the policy itself writes down what has
# to be remembered. The next segment opens with the prompt and that summary:
#
# ```
# segment 1    prompt turn answer turn answer … | request | summary      the context reached the trigger
# segment 2    prompt summary | turn answer … | request | summary
# segment S    prompt summary | turn answer … turn                       the conversation is over
# ```
#
# What makes a good summary? Nobody grades it. A summary is one more thing that the policy wrote, and the chain's single
# reward goes to every token that the policy wrote, summaries included: a summary is good if what follows goes well.
#
# $$A_c = R_c - \frac1N\sum_{c' \in \mathrm{group}} R_{c'} \qquad\qquad
# L = -\frac{1}{\mathrm{budget}}\sum_c A_c \sum_{s \in c}\ \sum_{t\ \mathrm{written\ in}\ s} \rho_t$$
#
# with the clip of lesson 4. Read the subscripts: the advantage has a $c$, never an $s$.

# %% [markdown]
# **Predict first.** A trainer sees segments as rows. Suppose that it takes the mean reward over the *rows* of a group
# as the baseline, instead of the mean over its chains. If chains with many segments earn less than short ones, does the
# average chain of a group look better or worse than it is? And if they earn more?

# %%
import itertools
from dataclasses import replace
from random import Random

import matplotlib.pyplot as plt
import torch

from lessons.course import check, quick, source, verdicts
from recipe.microrepo import MicroRepo, Session, demonstration, documents, transcript
from recipe.small import demonstrations as chains
from recipe.small.agent import Language
from recipe.small.data import shown_episodes, task_stream
from recipe.small.settings import Recipe
from ref import cpt, dr_grpo, self_summary
from ref.network import Config, Transformer
from ref.rl import compute_reward_terms
from ref.rollout import Limits, script_rollout
from sims.self_summary import experiment

source(self_summary.ChainBuilder.answer, self_summary.ChainBuilder.close, self_summary.ChainBuilder.go_on)

# %% [markdown]
# `ChainBuilder` follows one rollout while it is sampled, and knows nothing but its tokens.
#
# * `answer` takes each turn with the tokens that answer it, and counts. To the answer that reaches the trigger it adds
#   the request. So no turn is cut in two, and a context may exceed the trigger by the `room` that is left for one turn
#   and its answer.
# * `close` receives what was sampled, marks the summary in it, and
# * `go_on` opens the next segment: the prompt, the summary, and one or more fixed tokens that tell the policy to go on.
#   A summary that is too long ends the chain, just as hitting the limit ends a plain rollout.
#
# ## A chain, read
#
# To see chains that make sense, we need an agent that makes sense. The small world has a scripted one, which repairs
# functions according to a plan and summarises what it has read; SFT shows it to the policy. Its rollouts are made by
# the same code as the
# policy's.

# %%
recipe, limits = Recipe(), experiment.Experiment()
spoken = (
    text
    for task, turns in itertools.islice(shown_episodes(recipe), quick(300, 60))
    for _, text in transcript(task, turns)
)
document_texts = itertools.islice(documents(Random(0)), quick(300, 60))
language = Language(cpt.train_tokenizer(itertools.chain(spoken, document_texts), 600))
chaining = chains.make_chaining(language, limits.trigger, limits.room, limits.longest_summary)
world = replace(recipe, world=replace(recipe.world, depth_mix=limits.depth_mix))
tasks = list(itertools.islice(task_stream(world, "evaluation"), quick(40, 6)))
N = recipe.rl.rollouts


def run_episodes(chaining):
    """N episodes of the scripted agent on every task, those of a task side by side, the same turns whatever joins its
    contexts."""
    rng, episodes = Random(1), []
    for number, task in enumerate(t for t in tasks for _ in range(N)):
        lesson = chains.Lesson(
            language, task, demonstration(task, rng, recipe.sft.noise), Random(f"memory-{number}"), chains.Memory()
        )
        episodes.append(script_rollout(MicroRepo(Session(task)), language, Limits(chaining), lesson.say))
    return episodes


episodes = run_episodes(chaining)
number = next((i for i, e in enumerate(episodes) if e.metrics["tests"] and len(e.chain.segments) == 3), 0)
print(
    f"trigger {chaining.trigger} tokens, longest summary {chaining.longest_summary}, no context beyond "
    f"{chaining.limit}\n"
)
for segment in episodes[number].chain.segments:
    print(f"──── a context of {len(segment.tokens)} tokens")
    kinds = [
        ("SUMMARY" if s else "wrote") if own else "given"
        for own, s in zip(segment.sampled.tolist(), segment.summary.tolist(), strict=True)
    ]
    for kind, run in itertools.groupby(zip(kinds, segment.tokens.tolist(), strict=True), key=lambda pair: pair[0]):
        text = language.decode([token for _, token in run])
        print(f"{kind:8s}" + text.replace("\n", "\n        "))

# %% [markdown]
# A context of code shrinks to one line of facts. Look at the second segment: the summary that it opens with is *given*
# there. The policy wrote it in the first one, and that is where it counts. If it counted here too, a chain's summaries
# would weigh double.
#
# ## What the running context is worth
#
# The request is appended to a context whose keys and values are in the cache. Only the answer and the request are left
# to prefill. *Compaction* in a separate call, with an instruction of its own in front, has to read the whole context
# again. Here is the same agent on the same tasks, in all four modes of `ref/self_summary.py`:

# %%
ways = {
    "self": chaining,
    "separate": replace(chaining, join="separate"),
    "truncate": replace(chaining, join="truncate"),
    "none": chains.unlimited(chaining),
}
episodes_by_join = {join: run_episodes(way) for join, way in ways.items()}
print("means over chains   contexts  longest  prefill  written  of it summary  saved")
for join, episode_list in episodes_by_join.items():
    all_chains = [e.chain for e in episode_list]
    longest = max(len(s.tokens) for c in all_chains for s in c.segments)
    counts = [
        sum(map(of, all_chains)) / len(all_chains)
        for of in (lambda c: c.prefill, lambda c: c.num_sampled_tokens, lambda c: c.summary_tokens, lambda c: c.saved)
    ]
    segments = sum(len(c.segments) for c in all_chains) / len(all_chains)
    print(
        f"{join:18s} {segments:9.2f} {longest:8d} {counts[0]:8.1f} {counts[1]:8.1f} {counts[2]:14.1f} {counts[3]:6.1f}"
    )
total = {name: sum(getattr(e.chain, name) for e in episodes_by_join["self"]) for name in ("prefill", "saved")}
print(
    f"self: {total['prefill']} tokens of prefill + {total['saved']} saved = {sum(total.values())};  "
    f"separate calls really filled "
    f"{sum(e.chain.prefill for e in episodes_by_join['separate'])}"
)

# %% [markdown]
# `saved` is not an estimate. What the chain says that separate calls would have needed in addition is, to the token,
# what separate calls do need. (Here a separate compaction counts as a context of its own. `none` runs the fewest
# tokens, in contexts that have no limit. And since this agent keeps its plan outside the context, the table is about
# tokens only; what the modes do
# to *success* comes at
# the end.)

# %%
figure, axes = plt.subplots(figsize=(7.5, 3.4), layout="constrained")
for (join, episode_list), style in zip(episodes_by_join.items(), ("-", "--", "-.", "-"), strict=True):
    ran, across, up = 0, [], []
    for segment in episode_list[number].chain.segments:
        across += [ran, ran + len(segment.tokens)]
        up += [0, len(segment.tokens)]
        ran += len(segment.tokens)
    width, alpha = (5, 0.35) if join == "none" else (1.5, 1.0)  # where they agree, all can be seen
    axes.plot(across, up, style, label=f"{join}: {ran} tokens run", linewidth=width, alpha=alpha)
axes.axhline(chaining.trigger, color="grey", linewidth=1)
axes.set(
    xlabel="tokens that the engine ran, prefill included",
    ylabel="length of the context",
    title="One task, four ways (grey: the trigger)",
)
axes.legend(frameon=False, fontsize=9, loc="upper left", ncols=2)
axes.set_ylim(
    0,
    1.45
    * max(len(s.tokens) for episode_list in episodes_by_join.values() for s in episode_list[number].chain.segments),
)
plt.show()

# %% [markdown]
# ## Exercise 1: count what was saved
#
# Write `reused(chain, chaining)`: over the segments that end in a summary, the tokens that a separate call would have
# had to run again: its instruction (`chaining.instruction`), and the old context up to and including the last token
# that the policy wrote *before* its summary. (The answer and the request after it are read once either way.) A segment
# has `tokens`, `sampled` and
# `summary`.


# %% tags=["exercise"]
def reused(chain, chaining):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_1():
    for at, episode in enumerate(episodes):
        actual, kinds = (
            reused(replace(episode.chain, saved=0), chaining),
            len(episode.chain.segments),
        )  # counted, not looked up
        assert actual == episode.chain.saved, (
            f"chain {at}, of {kinds} segments: {episode.chain.saved} tokens are saved, not {actual}"
        )


check(1, check_1)


# %% tags=["solution"] jupyter={"source_hidden": true}
def reused(chain, chaining):
    total = 0
    for segment in chain.segments:
        if segment.summary.any():
            turns = (segment.sampled & ~segment.summary).nonzero()
            total += len(chaining.instruction) + int(turns[-1]) + 1
    return total


check(1, check_1)

# %% [markdown]
# ## One reward for the chain
#
# To the trainer every segment is a row of the batch, with a context of its own. This is all that connects chains and
# rows:

# %%
source(self_summary.spread)

# %% [markdown]
# It is one line of code without a division. Does a chain then weigh the same however it is cut?
# `sims/self_summary/experiment.py` answers with a network's gradient. It compares segments as rows, as the trainer does
# it, with every chain as *one* row, its segments packed side by side, where nothing can count segments at all. The
# network is small and random; the chains are those of the scripted agent.

# %%
torch.manual_seed(0)
tiny = Config.tiny(
    language.tokenizer.get_vocab_size(),
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    num_experts=4,
    moe_intermediate_size=32,
)
episode_list = episodes[: quick(8, 2) * N]
weight = experiment.one_weight(Transformer(tiny), episode_list, recipe)
rows = sum(len(e.chain.segments) for e in episode_list)
print(
    f"{weight['chains']} chains of up to {weight['most_segments']} segments, {rows} rows; distance "
    f"from the gradient with chains as rows:"
)
print(f"  segments as rows, advantages spread            {weight['split']:.1e}")
print(
    f"  segments as rows, baseline and mean over rows  {weight['faulty']:.2f} (the denominator alone: "
    f"{1 - weight['chains'] / rows:.2f})"
)

# %% [markdown]
# The first distance is rounding. The second, from innocent-looking means over the rows of a group and of a batch, is
# nearly as large as the gradient itself. Part of it is the denominator: there are about three times as many rows as
# chains, so everything becomes a third as large, by a ratio that changes from batch to batch. The rest is the baseline.
#
# ## Exercise 2: credit, token by token
#
# Write `credit(rewards, episode_chains)`: `rewards` is [G, N], one for each chain, and the chains come in the same
# order. Return a list of tensors, one for each segment in order, [T] each: the advantage where the policy wrote the
# token in that segment, zero where it was given. Use `dr_grpo.group_advantages` and `self_summary.spread`.


# %% tags=["exercise"]
def credit(rewards, episode_chains):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_2():
    episode_chains = [e.chain for e in episodes[: 2 * N]]
    rewards = torch.arange(2 * N, dtype=torch.float64).square().view(2, N)
    actual = credit(rewards, episode_chains)
    segments = [s for chain in episode_chains for s in chain.segments]
    assert len(actual) == len(segments), f"one tensor for each of the {len(segments)} segments, not {len(actual)}"
    for at, (token_credit, segment) in enumerate(zip(actual, segments, strict=True)):
        assert token_credit.shape == segment.tokens.shape, (
            f"segment {at} has {len(segment.tokens)} tokens, your tensor {list(token_credit.shape)}"
        )
        assert not token_credit[~segment.sampled].any(), (
            f"segment {at}: given tokens get credit; a summary that opens a context is given there"
        )
    owners = [number for number, chain in enumerate(episode_chains) for _ in chain.segments]
    for at, (token_credit, segment, chain) in enumerate(zip(actual, segments, owners, strict=True)):
        want = (rewards.flatten()[chain] - rewards[chain // N].mean()).item()
        away = (token_credit[segment.sampled] - want).abs().max().item() if segment.sampled.any() else 0.0
        assert away < 1e-5, (
            f"segment {at}: every token written in it has its chain's advantage, {want:+.2f}; yours "
            f"are off by up to {away:.2g}"
        )


check(2, check_2)


# %% tags=["solution"] jupyter={"source_hidden": true}
def credit(rewards, episode_chains):
    advantages = self_summary.spread(dr_grpo.group_advantages(rewards).flatten(), episode_chains)
    segments = [s for chain in episode_chains for s in chain.segments]
    return [torch.where(s.sampled, a, 0.0) for a, s in zip(advantages, segments, strict=True)]


check(2, check_2)

# %% [markdown]
# ## How it breaks: a baseline over rows
#
# Rows repeat a chain's reward once per segment. Where long chains earn less, the mean over rows lies below the mean
# over chains, and the chains of a group look better than their own group. The reference's `demo` measures this on a
# random network that is charged 1 for every hundred tokens that it writes:

# %%
figures = self_summary.demo(self_summary.Demo(chains=quick(64, 8)))
mean, max_segments, wrote = (figures[name] for name in ("self_segments", "most_segments", "self_written"))
print(f"{mean:.2f} segments a chain on average, {max_segments:.0f} at most, {wrote:.1f} tokens written")
print(
    f"mean advantage of a chain with the baseline over rows: {figures['advantage_over_rows']:+.3f} (over chains: zero)"
)

# %% [markdown]
# A group cannot be better than itself on average, and yet that is what it is told. Now the scripted agent, whose
# rewards are the recipe's: hidden tests, less the price of effort and of invalid calls.

# %%
rewards = torch.tensor(
    [sum(compute_reward_terms(e, recipe.rl.payment).values()) for e in episodes], dtype=torch.float64
)
numbers = torch.tensor([len(e.chain.segments) for e in episodes])
owner = torch.arange(len(episodes)) // N
right = dr_grpo.group_advantages(rewards.view(-1, N)).flatten()
over_rows = torch.stack([(rewards * numbers)[owner == g].sum() / numbers[owner == g].sum() for g in range(len(tasks))])
faulty = rewards - over_rows[owner]
shift = over_rows - rewards.view(-1, N).mean(1)
print(
    f"baseline over rows − baseline over chains: mean {shift.mean():+.4f}, from {shift.min():+.3f} to "
    f"{shift.max():+.3f}; above zero in "
    f"{int((shift > 0).sum())} of {len(shift)} groups, below in {int((shift < 0).sum())}"
)
print(f"mean advantage of a chain: {right.mean():+.4f} over chains, {faulty.mean():+.4f} over rows")
flipped = (right * faulty < 0) & (right.abs() > 1e-9)
print(f"advantages that change their sign: {flipped.double().mean():.1%}")
share = torch.tensor([e.metrics["tests"] for e in episodes], dtype=torch.float64)
for n in sorted(set(numbers.tolist())):
    mask = numbers == n
    advantage_text = f"{right[mask].mean():+.3f} over chains, {faulty[mask].mean():+.3f} over rows"
    print(
        f"{n} segments: {int(mask.sum()):4d} chains, {share[mask].mean():.2f} solved, mean advantage {advantage_text}"
    )

# %% [markdown]
# Here it mostly goes the other way. Chains of one segment are wrong more often than longer ones: some stopped early,
# some ended in a summary that became too long. So the mean over rows is too *high* on average, though not in every
# group, and chains of every length are told that they are worse than they are.

# %%
figure, axes = plt.subplots(figsize=(6.5, 3.4), layout="constrained")
counts = [n for n in sorted(set(numbers.tolist())) if (numbers == n).sum() >= quick(5, 1)]
for values, style, label in ((right, "o-", "baseline over chains"), (faulty, "s--", "baseline over rows")):
    axes.plot(counts, [values[numbers == n].mean() for n in counts], style, label=label)
axes.axhline(0, color="grey", linewidth=1)
axes.set(
    xlabel="segments of the chain",
    ylabel="mean advantage",
    title="What a chain is told (lengths of five chains or more)",
)
axes.set_xticks(counts)
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Exercise 3: the fault in closed form
#
# A group of chains has rewards $R$ and numbers of segments $S$. With the baseline over rows, what is the mean advantage
# of its chains? Write `row_bias(rewards, segments)` for tensors [N]. Counting rows as above will do; better, derive it
# first: it is one covariance and one mean.


# %% tags=["exercise"]
def row_bias(rewards, segments):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_3():
    equal_bias = row_bias(torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64), torch.tensor([2, 2, 2]))
    assert abs(float(equal_bias)) < 1e-9, (
        f"chains of equally many segments: there is no fault, not {float(equal_bias):.3f}"
    )
    unequal_bias = row_bias(torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([1, 3]))
    assert abs(float(unequal_bias) - 0.25) < 1e-9, (
        f"rewards 1 and 0, segments 1 and 3: rows have mean 1/4, chains 1/2, so 0.25, not {float(unequal_bias):.3f}"
    )
    for g in range(len(tasks)):
        mask = owner == g
        actual, want = float(row_bias(rewards[mask], numbers[mask])), faulty[mask].mean().item()
        assert abs(actual - want) < 1e-9, f"group {g}: the chains' mean advantage is {want:+.4f}, not {actual:+.4f}"


check(3, check_3)


# %% tags=["solution"] jupyter={"source_hidden": true}
def row_bias(rewards, segments):
    segments = segments.double()
    covariance = (segments * rewards).mean() - segments.mean() * rewards.mean()
    return -covariance / segments.mean()


check(3, check_3)

# %% [markdown]
# **Your prediction:** where long chains earn less, the average chain looks better than it is; where they earn more, it
# looks worse.
#
# So the fault has the sign of *minus* the covariance of length and reward. It is zero as long as all chains of a group
# have the same length, as in every unit test with a single segment. A batch that suffers from it looks like any other.
#
# ## What trained agents did
#
# The whole experiment trains the tiny agent by RL, once without a limit and once under it with summaries in the running
# context. It then runs held-out tasks in every mode:

# %%
verdicts("self-summary")

# %% [markdown]
# The notes to these verdicts in `results/claims.json` say what each compares. One thing is worth knowing before you
# quote any of them. At this size no prompt can explain a task, so the separate call was also taught by demonstrations,
# as many as for the request in the running context. Only one of the two was then trained under the limit. Half the
# error, or not, could therefore be the effect of that training: *not tested*.
#
# ## Open challenge
#
# Write the summary of a long session in 120 characters, and the reader of it, so that most later questions are answered
# rightly. `etude challenge 7` gives the rules, a file to begin with and the scores so far.
#
# ## Where to read on
#
# * `ref/self_summary.py` from the top; `ref.rollout.decode_rollout` runs one chain at a time, with drafts.
# * `recipe/small/demonstrations.py`: what the scripted agent puts into a summary, and how it is made to forget on
#   purpose.
# * `etude figure self-summary` runs the experiment (up to an hour); `etude explore`, page *Self-summary*, steps through
#   a real chain.
# * `ref/rl.py`, function `improve`: rewards and drift by chain, rows by segment, in the recipe's own step.
# * Composer 2 technical report, §4.1, on self-summarisation.
# * Next: lesson 8, what happens when sampler and trainer disagree about the experts.
