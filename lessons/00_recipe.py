# %% [markdown]
# # 0 · The recipe in one sitting
#
# **After this lesson you can** name the stages that turn a base model into a coding agent, and say what each learns
# from and leaves behind; read a run's report without being misled by it; and put an honest interval on a success rate.
#
# *About 45 minutes. Prerequisites: PyTorch, and what a language model is. Source: Composer 2 technical report, §2
# to §5.*
#
# ## The idea
#
# A model that writes code is not yet an agent that works in a repository. The report gets from one to the other through
# a chain of stages. Each starts from the weights that the previous one left; only the data and the loss change:
#
# | stage | learns from | by | lesson |
# |---|---|---|---|
# | **data** | files of code | reading, tokenising, packing into rows | 1 |
# | **CPT**, continued pretraining | those rows | $-\log p(x_t \mid x_{<t})$, short contexts | 1, 2 |
# | **MTP**, multi-token prediction | same rows | $\mathrm{KL}(p\,\Vert\,q^k)$: extra layers match the main head | 3 |
# | **long context** | longer rows | both losses; the learning rate falls to its end | 1 |
# | **SFT**, supervised fine-tuning | demonstrations of an agent | $-\log p$ on its tokens only; MTP layers too | 1, 7 |
# | **RL**, reinforcement learning | own attempts | $-A \log\pi(x)$, $A = r - \bar r$: reward over group mean | 4 to 8 |
# | **evaluation** | – | tasks, and a codebase, that no stage has seen | this one |
#
# The report does this to a model of a trillion parameters. Here the same chain runs on two cores, with a model that is
# a few hundred thousand times smaller, in a world small enough for it. What carries over is how the parts fit together,
# and how each can go wrong. Lessons 9 to 11 are about what lets the chain run on many machines: packing, low precision,
# and the same
# code on many
# ranks.

# %% [markdown]
# **Predict first.** `make small` trains an agent whose demonstrations often guess what they should read. After SFT it
# solves about 13% of tasks that it has not seen when it samples its tokens, and 5% when it always takes the likeliest
# one; one of 16 attempts succeeds at 59% of the tasks. RL then rewards solved tasks. By how many points does each of
# the three rise? Write down your guess before you read on.

# %% [markdown]
# ## The agent at work
#
# This is what the chain ends in. A small agent that it has trained comes with this repository. Here it works, live, on
# a task that it has not seen. It is told the names of the files of a repository, and which of them lost the body of its
# function.
# Everything else it has to read. It can `read` a file, `write` a body, `test` it, and say that it is `done`:

# %%
import itertools
from math import comb

import matplotlib.pyplot as plt
import numpy as np
import torch

from kit.disk import read_json, read_lines
from kit.settings import fill
from kit.statistics import bootstrap, pass_at_k
from lessons.course import ROOT, check, quick, source, tiny_run
from recipe.microrepo import document, transcript
from recipe.small import agent
from recipe.small import stages as recipe
from recipe.small.agent import Language, parted
from recipe.small.data import shown_episodes, task_stream
from recipe.small.demonstrations import context
from recipe.small.settings import Recipe
from ref.cpt import load_tokenizer
from ref.engine.sampler import Sampler
from ref.network import Config, load_hf

folder = ROOT / "results" / "examples" / "agent"
trained = fill(Recipe, read_json(folder / "record.json")["config"])
language = Language(load_tokenizer(folder / "tokenizer.json"))
sampler = Sampler(load_hf(folder), getattr(torch, trained.training.sampler_dtype))
held_out = list(itertools.islice(task_stream(trained, "evaluation"), 10))


def show(speaker, text):
    """Prints what somebody said."""
    print(f"{speaker:>6} │ " + "\n       │ ".join(line for line in text.split("\n") if line.strip()))


def attempt(number):
    """The agent tries a held-out task. It always takes the likeliest token."""
    (episode,) = agent.play(
        sampler,
        language,
        [held_out[number]],
        1,
        trained.rl.limits(context(language, trained)),
        trained.rl.max_turns,
        None,
        0.0,
    )
    for place, segment in enumerate(episode.chain.segments):
        if place:
            print("       ┆ a new context: the task, and the summary that the agent wrote of what went before")
        for positions, own in parted(segment, language.env):
            text = language.decode(segment.tokens[positions].tolist())
            for speaker in language.speakers:
                text = text.replace(speaker, "\n")
            show("agent" if own else "env", text)
    metrics = episode.metrics
    print(
        f"\n{'solved' if metrics['tests'] else 'not solved'}: {metrics['passed']:.0%} of the hidden tests "
        f"pass, after {metrics['turns']} turns"
    )


attempt(4)

# %% [markdown]
# Read it line by line. The agent read the file that it has to repair. The docstring names helpers, so it read those
# too. It wrote a body, tested it, and stopped. Tests that it never saw decide whether the task counts as solved. `etude
# play --task 4
# --greedy` shows the same attempt in a terminal, and without `--greedy` it samples, so that another `--seed` gives
# another attempt. This one
# fails:

# %%
attempt(9)

# %% [markdown]
# The docstring names two helpers, and the agent read only one of them. The body that it wrote is wrong. The test said
# so, and it wrote the same body again. Then its context was full: `note` asks it to write down what the next one should
# know, and what it wrote is wrong too. It is a small agent, of 2.7 million parameters.
#
# ## The chain, in code
#
# How does a network come to do this? Here are the function that runs the whole chain, and one of its stages:

# %%
source(recipe.run, recipe.finetune)
print(f"parameters: {Config.tiny().parameters():,} here")

# %% [markdown]
# `run` is the table above, line by line. `finetune` is shown as an example, since all stages are built alike:
#
# * It takes its demonstrations from the seed and its weights from `checkpoints/cpt`, and it leaves `checkpoints/sft`.
# * A finished stage is skipped, and one that was killed resumes from its last saved state. All randomness comes from
#   generators that are seeded by seed, stage and step, so a resumed run repeats the killed one bit for bit.
# * The loss is nowhere to be seen: `train` serves every supervised phase. What makes it SFT is `weight`, which is one
#   on the agent's own tokens.
#
# ## What it learns from
#
# Pretraining shows it finished modules of the same world, beside other code:

# %%
settings = recipe.Recipe()
task, turns = next(
    (task, turns) for task, turns in shown_episodes(settings) if task.depth == 1 and turns.count("test") == 2
)
print(document(task))

# %% [markdown]
# The docstring of the last one, the target, refers to a helper. The helper's file has to be read and its body inlined:
# depth 1. SFT shows how that is done, through a scripted agent that makes mistakes and sometimes finds them. `env`
# speaks first:

# %%
for speaker, text in transcript(task, turns):
    print(f"{speaker:>6} │ " + "\n       │ ".join(text.split("\n")))

# %% [markdown]
# The reward is one if 32 hidden tests pass, else zero, less small prices for effort, for calls that make no sense, and
# for drifting away from the policy before RL.
#
# ## A tour through the stages
#
# `tiny_run` runs every stage with as few steps as possible. That takes half a minute, and the run is kept for the next
# time. It is a tour, not a training: nothing can be learned in so few steps, and the agent that comes out of it solves
# no task. What it shows is what each stage reports, and how the stages follow one another:

# %%
root = tiny_run()
for name in ("data", "cpt", "mtp", "long", "sft", "rl"):
    result = read_json(root / "stages" / f"{name}.json")["result"]
    print(f"{name:>5}: " + ", ".join(f"{key} {value}" for key, value in result.items() if isinstance(value, int)))
print("checkpoints:", ", ".join(sorted(path.name for path in (root / "checkpoints").iterdir())))


def logged(stage):
    """The lines that a stage logged, one dictionary for each step."""
    return read_lines(root / "metrics" / f"{stage}.jsonl")


panels = (
    ("cpt", "loss", "CPT: nats per token"),
    ("mtp", "mtp_loss", "MTP: KL to the main head"),
    ("long", "loss", "long context: nats per token"),
    ("sft", "loss", "SFT: nats per own token"),
    ("rl", "success", "RL: success"),
)
figure, axes = plt.subplots(1, len(panels), figsize=(12, 2.4), layout="constrained")
for axis, (stage, key, title) in zip(axes, panels, strict=True):
    line = [(entry["step"], entry[key]) for entry in logged(stage)]
    axis.plot(*zip(*line, strict=True), ".-", markersize=4)
    axis.set(xlabel="step", ylim=(-0.05, 1) if key == "success" else None)
    axis.set_title(title, fontsize=9)
    axis.locator_params(axis="x", integer=True, nbins=5)
plt.show()
for stage, key, _ in panels:
    first, *_, last = [entry[key] for entry in logged(stage)]
    print(f"{stage:>5} {key}: {first:.3f} at the first step, {last:.3f} at the last")

# %% [markdown]
# The losses begin to fall, as far as so few steps can show it. RL has nothing to work with: no attempt succeeds, and in
# a group where all fail, $A = r - \bar r$ says nothing about the tests. This is why `rl.gate` refuses to begin RL below
# a success rate of one tenth (the tour switches the gate off): the prices would teach the policy to stop at once, and
# nothing else would teach it anything.
#
# ## With time to learn
#
# `make small` runs the same chain at a size at which it learns, in ten minutes or more, in a world of search: most
# docstrings say only `as m5`, that of `m5` may say `as m2`, and so on to a file with a body, which is to be copied. SFT
# shows one or two such references, and a scripted agent that often guesses instead of reading on. RL has one to four,
# the held-out tasks one to six. Its results over several seeds are committed. What follows is read from that file.

# %%
committed = read_json(ROOT / "results" / "recipe-small.json")
runs, control = committed["runs"], committed["control"]
print(
    f"{committed['command']}, {len(runs)} seeds, {committed['machine']['cpu']}, {committed['machine']['cores']} cores, "
    f"{min(r['seconds'] for r in runs) / 60:.0f} to {max(r['seconds'] for r in runs) / 60:.0f} minutes"
)
for name in ("success", "greedy", "best", "tokens", "turns", "invalid_calls"):
    summary, label = committed["over_seeds"][name], f"best of {committed['samples']}" if name == "best" else name
    print(
        f"{label:>14}: {summary['before']['mean']:7.3f} → {summary['after']['mean']:7.3f}   "
        f"{summary['difference']['mean']:+.3f} ± {summary['difference']['sd']:.3f} between seeds"
    )
gains = [run["difference"]["success"] for run in runs]
gains_text = ", ".join(
    f"{gain['value']:+.3f} ± {(gain['high'] - gain['low']) / 3.92:.3f}" for gain in gains
)  # 95% is 3.92 standard errors wide
print(f"gain in success, seed by seed, ± standard error over its tasks: {gains_text}")

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
window = 10
for number, run in enumerate([*runs, *control]):
    smooth = np.convolve(run["success_by_step"], np.ones(window) / window, "valid")
    line_options = (
        {"color": "tab:blue", "label": "RL" if number == 0 else None}
        if number < len(runs)
        else {"color": "grey", "linestyle": "--"}
    )
    left.plot(
        np.arange(len(smooth)) + window / 2,
        smooth,
        **({"label": "rewards shuffled"} if number == len(runs) else {}) | line_options,
    )
left.set(xlabel="RL step", ylabel=f"success, mean of {window} steps")
left.legend(frameon=False)
for phase, style in (("before", "o--"), ("after", "o-")):
    curve = np.mean([run[phase]["pass_at_k"] for run in runs], axis=0)
    right.plot(np.arange(1, len(curve) + 1), curve, style, label=f"{phase} RL")
right.set(xlabel="k", ylabel="pass@k, held-out tasks")
right.legend(frameon=False)
plt.show()
for run in control:
    summary = run["difference"]["success"]
    print(f"control, rewards shuffled: success {summary['value']:+.3f} [{summary['low']:+.3f}, {summary['high']:+.3f}]")

# %% [markdown]
# **Your prediction:** greedy success rises by about 70 points, sampled success by 55, and best of 16 by 31.
#
# Such a table is worth learning to read. Four things are in it.
#
# * **sampled and greedy are two agents.** `success` samples at temperature one; `greedy` takes the likeliest token.
#   After SFT the likeliest thing is to guess, so the greedy agent is the worse one. Had greedy success been high before
#   RL, and stayed where it was, RL would only have made the policy stick to what it already preferred. Whoever prints
#   sampled success alone cannot tell the two apart.
# * **pass@k is what is within reach.** One attempt in eight succeeds before RL, and one of 16 at more than half of the
#   tasks: what RL is to find, it can stumble upon. After RL one of 16 succeeds at nearly all. So RL did not only make
#   likely what was within reach; it brought tasks within reach, deeper ones than any that it was trained on, too.
# * **A control carries the claim.** When the same rewards go to the wrong attempts, success falls, sampled and in 16
#   attempts. So the gain comes from what the rewards say, not from more steps.
# * **Two kinds of spread.** The interval of one run, `[low, high]`, says how much another draw of *tasks* could change.
#   `± between seeds` says how much another *repetition* would: another training, and other tasks too, because every
#   seed draws its own
#   200. The line of gains, seed by seed, shows how much of that the tasks alone can explain: most of it. What training
#   adds, three seeds cannot say.
#
# And one number that no success rate shows:

# %%
for name in (record["checkpoint"] for record in runs[0]["codebase"]):
    bits = [record["bits_per_byte"] for run in runs for record in run["codebase"] if record["checkpoint"] == name]
    print(f"{name:>8}: {np.mean(bits):.2f} bits per byte of a codebase that was held out")

# %% [markdown]
# The long-context phase lowers it; SFT undoes more than that. Fine-tuned on a few hundred thousand tokens of its own
# small world, the model forgets what other people's code looks like. RL changes little about it. A run's `report.html`
# has all of this in the same order: before and after, RL's curves, the codebase, decoding, one rollout in full.
# `report.json` holds the numbers, and
# `metrics/*.jsonl` the steps.
#
# ## Exercise 1: metrics have holes
#
# Perplexity is expensive to measure, so it is measured only every so many steps, and only those lines of
# `metrics/cpt.jsonl` have `codebase_ppl`. Write `last_look(lines, key)`. It returns a pair, the last logged value of
# `key` and the tokens seen by then, or `None` if there is no such line.


# %% tags=["exercise"]
def last_look(lines, key):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_1():
    lines = [
        {"step": 1, "tokens": 10},
        {"step": 2, "tokens": 20, "ppl": 7.0},
        {"step": 3, "tokens": 30, "ppl": 9.0},
        {"step": 4, "tokens": 40},
    ]
    actual = last_look(lines, "ppl")
    assert actual is not None and tuple(actual) == (9.0, 30), (
        "the last line that has the key counts, not the last line, and not the smallest value"
    )
    assert last_look([{"tokens": 5, "ppl": 0.0}], "ppl") is not None, "a value of zero is a value"
    assert last_look(lines, "loss") is None, "without any such line there is nothing to report: None"
    value, tokens = last_look(logged("cpt"), "codebase_ppl")
    assert value > 1 and 0 < tokens <= logged("cpt")[-1]["tokens"], "a perplexity, and tokens counted in the same line"


check(1, check_1)


# %% tags=["solution"] jupyter={"source_hidden": true}
def last_look(lines, key):
    measurements = [(line[key], line["tokens"]) for line in lines if key in line]
    return measurements[-1] if measurements else None


check(1, check_1)

# %% [markdown]
# ## Exercise 2: pass@k without bias
#
# Of $n$ attempts at a task, $c$ succeeded. How likely is it that at least one of $k$ attempts would have? The tempting
# $1 - (1 - c/n)^k$ is too low, and the more so the fewer the attempts. The unbiased estimate is the share of the
# $k$-subsets of the $n$ attempts that hold a success. Write `within_reach(c, n, k)`.

# %%
truth, k = 0.1, 8
print(f"success {truth} an attempt: pass@{k} is {1 - (1 - truth) ** k:.3f}")
for n in (8, 16, 64):
    chances = [comb(n, c) * truth**c * (1 - truth) ** (n - c) for c in range(n + 1)]
    tempting = sum(chance * (1 - (1 - c / n) ** k) for c, chance in enumerate(chances))
    print(f"the tempting estimate from {n:>2} attempts has the mean {tempting:.3f}")


# %% tags=["exercise"]
def within_reach(c, n, k):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_2():
    for c, n, k in ((0, 8, 3), (8, 8, 3), (2, 6, 3), (5, 6, 3), (1, 8, 1)):
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        want = sum(map(any, subsets)) / len(subsets)
        actual = within_reach(c, n, k)
        assert abs(actual - want) < 1e-6, (
            f"c={c}, n={n}, k={k}: {want:.4f} of the subsets hold a success, not {actual:.4f}"
        )
    assert np.allclose([within_reach(c, 8, 4) for c in range(9)], pass_at_k(range(9), 8, 4)), (
        "differs from kit.statistics.pass_at_k"
    )


check(2, check_2)


# %% tags=["solution"] jupyter={"source_hidden": true}
def within_reach(c, n, k):
    return 1 - comb(n - c, k) / comb(n, k)


check(2, check_2)

# %% [markdown]
# ## How it breaks: attempts are not tasks
#
# 200 tasks with 16 attempts each give 3,200 results, but not 3,200 independent ones: a hard task is hard sixteen times
# over. An interval that resamples attempts claims to know far more than it does. How often does a "95%" interval
# contain the truth? Here 100 tasks are drawn, half of them nearly hopeless or nearly certain, and each is tried 8
# times. All of that is repeated
# many times:

# %%
draw = np.random.default_rng(0)
evaluations, coverage_counts, widths = quick(300, 40), {"attempts": 0, "tasks": 0}, {"attempts": 0.0, "tasks": 0.0}
for number in range(evaluations):
    difficulty = draw.beta(0.4, 0.4, size=100)  # the mean is one half
    results = draw.random((100, 8)) < difficulty[:, None]
    for unit_of, values in (("attempts", results.ravel()), ("tasks", results.mean(1))):
        summary = bootstrap(values, n=quick(200, 60), seed=number)
        coverage_counts[unit_of] += summary["low"] <= 0.5 <= summary["high"]
        widths[unit_of] += (summary["high"] - summary["low"]) / evaluations
for unit_of in coverage_counts:
    print(
        f"resampling {unit_of:>8}: interval {widths[unit_of]:.3f} wide, holds the truth in "
        f"{coverage_counts[unit_of] / evaluations:.0%} of evaluations"
    )

# %% [markdown]
# The narrow interval is not a better measurement. It is the same measurement with a wrong label, and one evaluation in
# three confidently shows what is not there. This is why `evaluation.summarise` averages each task's attempts first.
#
# ## Exercise 3: a difference, paired
#
# The *same* tasks are tried before and after RL. What makes a task hard then cancels in the difference, if it is taken
# task by task. Write `gained(before, after)` for results [tasks, attempts], 1 for a success and 0 otherwise. It returns
# a dictionary with the mean difference and its interval: `value`, `low`, `high`. Use `bootstrap`.


# %% tags=["exercise"]
def gained(before, after):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_3():
    draw = np.random.default_rng(1)
    difficulty = draw.beta(0.4, 0.4, size=(200, 1))
    changed = np.clip(difficulty + draw.choice((-0.3, 0.5), size=(200, 1)), 0, 1)  # some tasks are unlearned
    before, after = ((draw.random((200, 8)) < chance).astype(float) for chance in (difficulty, changed))
    actual = gained(before, after)
    differences = after.mean(1) - before.mean(1)
    assert abs(actual["value"] - differences.mean()) < 1e-12, (
        f"the mean difference is {differences.mean():.4f}, after minus before"
    )
    width, expected_width = actual["high"] - actual["low"], 2 * 1.96 * differences.std() / len(differences) ** 0.5
    assert width < 1.3 * expected_width, (
        "too wide: two intervals subtracted? Subtract first, task by task, then resample"
    )
    assert width > 0.75 * expected_width, "too narrow: resample tasks, with all their attempts, not attempts"


check(3, check_3)


# %% tags=["solution"] jupyter={"source_hidden": true}
def gained(before, after):
    return bootstrap(np.mean(after, axis=1) - np.mean(before, axis=1))


check(3, check_3)

# %% [markdown]
# ## Open challenge
#
# Train the agent of your own small run on from SFT with 3,840 rollouts of RL, with settings of your choice, for the
# highest sampled success. `etude challenge 0` gives the rules, a file to begin with and the scores so far.
#
# ## Where to read on
#
# * `recipe/small/settings.py`, where every field says in one line what it is; then `recipe/small/stages.py`.
#   `etude run recipe --scale small --seed 3` starts a run of your own, and `etude explore`, page *The recipe*, watches
#   it.
# * `recipe/small/evaluation.py`: what is measured before and after, and how decoding is timed.
# * `results/claims.json`, or `etude claims --all`: every claim of the sources that was put to the test, including those
#   that did not hold here.
# * Chen et al., "Evaluating large language models trained on code" (arXiv:2107.03374): where the unbiased pass@k comes
#   from.
# * Next: lesson 1, continued pretraining.
