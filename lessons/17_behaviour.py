# %% [markdown]
# # 17 · Behaviour: what a rollout did on its way, and what that costs
#
# **After this lesson you can** measure habits from the record of a rollout; say what a price on a habit adds to every
# advantage of a group; keep prices so low that doing nothing never pays; and tell a fault that a price removes from a
# reward that will be farmed.
#
# *About 45 minutes. Prerequisites: lessons 4 and 6. Source: Composer 2 technical report, §4.2.*
#
# ## The idea
#
# Two rollouts solve the same task. One reads two files, edits, runs the tests and says what it did. The other calls a
# tool that does not exist, leaves its to-do list open, thinks in comments, and ends with "all tests pass" although it
# ran none. The tests pay both the same, so RL has no reason to prefer the first. The report adds rewards for style and
# communication, and penalties for poor tool calls such as to-do items left open. It gives neither formulas nor prices.
# Here is one way to do it. Let $m_j(x)$ be the measure of habit $j$ in rollout $x$:
#
# $$b(x) = -\sum_j p_j\, m_j(x), \qquad 0 \le m_j \le \text{cap}_j \qquad\qquad r = \text{outcome} - \text{effort} + b$$
#
# What becomes of $b$ in the advantages that RL learns from? Dr. GRPO's advantage is that of lesson 4.

# %% [markdown]
# **Predict first.** All four rollouts of a group are right, and all four leave one item of their to-do list open. That
# habit has a price of 0.02. What does it add to the four advantages? And what if the price is raised to 2?
#
# Measures are taken from a record, which the small world and real environments fill in the same way:

# %%
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import torch

from kit.disk import read_json
from kit.plots import BLUE, GREY
from lessons.course import ROOT, check, source, verdicts
from ref import behaviour, dr_grpo, transcript
from ref.behaviour import MEASURE_CAPS, Behaviour, Prices
from ref.transcript import Call, Todo, Transcript, Turn

source(behaviour.measures)

# %% [markdown]
# Four rollouts of one task, all of them right. The price of each habit is that of the table `Prices`:

# %%
READ, TEST, WRITE = (
    Call("read", "a.py"),
    Call("test", tests=(3, 3)),
    Call("write", "a.py", "def f(a):\n    return a + 1\n"),
)
BROKEN_CALL = Call("grep", valid=False)


def make_transcript(*turns, says="f adds one. All tests pass.", todos=()):
    """The record of a rollout: calls that are made together are a tuple, and a message ends it."""
    return Transcript((*(Turn("assistant", calls=calls) for calls in turns), Turn("assistant", says)), todos)


OPEN = (Todo("write it up", "open"),)
GROUP = {
    "tidy": make_transcript((READ,), (WRITE, TEST), todos=OPEN),
    "clumsy": make_transcript((BROKEN_CALL,), (BROKEN_CALL, READ), (WRITE, TEST), todos=OPEN),
    "silent": make_transcript((READ,), (WRITE, TEST), says="", todos=OPEN),
    "boastful": make_transcript((READ,), (WRITE,), todos=OPEN),
}
behaviours = {name: behaviour.behaviour(rollout, Prices()) for name, rollout in GROUP.items()}
for name, rollout_behaviour in behaviours.items():
    costs = ", ".join(f"{part} {value:+.3f}" for part, value in rollout_behaviour.parts.items() if value)
    print(f"{name:9s} reward {behaviour.compute_reward(1.0, 0.0, rollout_behaviour):.3f}   {costs}")

# %% [markdown]
# Each of them left its list open, and all pay for it. What becomes of that in the group's advantages?

# %%
for part, values in behaviour.group_parts(list(behaviours.values())).items():
    if any(rollout_behaviour.parts[part] for rollout_behaviour in behaviours.values()):
        print(f"{part:11s}" + "".join(f"{value:+9.4f}" for value in values))

# %% [markdown]
# **Your prediction:** it adds exactly zero, at any price.
#
# Dr. GRPO's advantage subtracts the mean of the group and divides by nothing. So it is linear, and each habit can be
# seen separately:
#
# $$A_i = A_i(\text{outcome}) + A_i(\text{effort}) - \sum_j p_j \bigl(m_j(x_i) - \overline{m_j}\bigr)$$
#
# The row of `todos` is zero, exactly. **A price acts only while a habit differs within groups.** A price, however high,
# does not remove a fault that the policy always makes. Something has to show it first that there is another way:
# demonstrations, a hint (lesson 16), or luck.
#
# ## Exercise 1: what a price adds
#
# `outcomes` and `measures` are lists, a number for each rollout of a group: its outcome, and the measure of one habit.
# Write `advantages(outcomes, measures, price, cap)`, the list of advantages of the whole reward, where the measure
# counts up to `cap`. Identical rollouts must have the same advantage to the bit, and a group of identical rollouts has
# exact
# zeros.


# %% tags=["exercise"]
def advantages(outcomes, measures, price, cap):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_1():
    def are_close(actual, want):
        return len(actual) == len(want) and all(abs(a - b) < 1e-12 for a, b in zip(actual, want))

    actual = advantages([1.0, 1.0], [0.0, 2.0], 0.1, 5.0)
    assert are_close(actual, [0.1, -0.1]), (
        f"two right rollouts, one with two faults at 0.1: its reward is 0.8 beside 1.0, so ±0.1; not {actual}"
    )
    actual = advantages([1.0, 1.0], [0.0, 9.0], 0.1, 5.0)
    assert are_close(actual, [0.25, -0.25]), f"nine faults count as five, since a cost has an end: ±0.25; not {actual}"
    actual = advantages([1.0, 0.0], [3.0, 3.0], 0.1, 5.0)
    assert are_close(actual, [0.5, -0.5]), f"a fault that both share moves nothing: ±0.5; not {actual}"
    for fault in (0.0, 0.7):
        actual = advantages([0.1] * 3, [fault] * 3, 0.3, 5.0)
        assert list(actual) == [0.0] * 3, (
            f"three rewards that are alike, {0.1 - 0.3 * fault:g}: exact zeros; not {actual}"
        )
    draw = np.random.default_rng(0)
    for _ in range(50):
        outcomes, measures = draw.integers(0, 2, 4).tolist(), draw.integers(0, 8, 4).tolist()
        parts = behaviour.group_parts([Behaviour({"habit": -0.05 * min(m, 5)}) for m in measures])["habit"]
        plain = dr_grpo.group_advantages(torch.tensor([outcomes], dtype=torch.float64))[0].tolist()
        actual = advantages(outcomes, measures, 0.05, 5)
        want = [a + b for a, b in zip(plain, parts)]
        assert are_close(actual, want), f"outcomes {outcomes}, faults {measures} at 0.05: {want}; not {actual}"


check(1, check_1)


# %% tags=["solution"] jupyter={"source_hidden": true}
def advantages(outcomes, measures, price, cap):
    rewards = [outcome - price * min(m, cap) for outcome, m in zip(outcomes, measures)]
    relative = [reward - rewards[0] for reward in rewards]
    return [value - sum(relative) / len(relative) for value in relative]


check(1, check_1)

# %% [markdown]
# ## A message that is not true
#
# "All tests pass" is a claim, and the record knows better. The claim also counts as untrue if tests ran only before the
# last edit: nobody saw the final code pass them.

# %%
source(transcript.suite_state)
for says in ("All tests pass.", "The tests should pass.", "Tests do not pass yet.", "I added a test."):
    print(f"{says:24s} claims that tests pass: {transcript.claims_tests_pass(says)}")

# %% [markdown]
# ## Exercise 2: what the record shows
#
# `calls` is a list of `Call`: `call.tests` is None, or the pair (passed, run), and `call.writes` says whether it
# changed a file. Write `has_passing_tests(calls)`: whether the record shows that the tests pass for the code that was
# handed in. A run of no test shows
# nothing.


# %% tags=["exercise"]
def has_passing_tests(calls):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_2():
    red, none, refused = Call("test", tests=(2, 3)), Call("test", tests=(0, 0)), replace(WRITE, valid=False)
    for case, calls in {
        "nothing": [],
        "an edit": [WRITE],
        "an edit, and tests that pass": [WRITE, TEST],
        "tests that pass, and an edit after them": [TEST, WRITE],
        "an edit, tests, an edit, tests": [WRITE, TEST, WRITE, TEST],
        "tests that fail": [WRITE, red],
        "tests that fail, and then pass": [WRITE, red, TEST],
        "tests that pass, and then fail": [WRITE, TEST, red],
        "a run of no test": [WRITE, none],
        "tests that pass, and then a run of none": [WRITE, TEST, none],
        "tests that pass, and a file read after them": [WRITE, TEST, READ],
        "tests that pass, and an edit that was refused": [WRITE, TEST, refused],
        "tests that fail, and an edit": [red, WRITE],
    }.items():
        want = transcript.suite_state(Transcript((Turn("assistant", calls=tuple(calls)),))) == "passed"
        actual = has_passing_tests(calls)
        assert actual is want, f"{case}: {want}, not {actual}"


check(2, check_2)


# %% tags=["solution"] jupyter={"source_hidden": true}
def has_passing_tests(calls):
    passed = False
    for call in calls:
        if call.tests is not None:
            passed = call.tests[0] == call.tests[1] > 0
        elif call.writes:
            passed = False
    return passed


check(2, check_2)

# %% [markdown]
# ## How it breaks
#
# **A reward is farmed.** Why are all parts costs, and none a bonus? Pay 0.02 for each to-do item that is ticked off,
# and an agent opens and ticks items until its context is full. Pay for comments, and it comments. A cost can at best be
# avoided. The best that a policy can do about $b$ is to behave, and then nothing is left to gain.
#
# **Doing nothing costs nothing.** An agent that makes no call breaks none. An attempt that succeeds with probability
# $p$ and has habits that cost $c$ earns $p - c$; giving up at once earns 0, less what silence costs. On hard tasks,
# high prices teach the
# policy to give up.

# %%
table = Prices()
print(f"all parts together can take {table.max_penalty:.2f}")
for name, cap in MEASURE_CAPS.items():
    print(f"  {name:11s} {getattr(table, name):.4f} · {cap:g} = {getattr(table, name) * cap:.3f}")

# %% [markdown]
# ## Exercise 3: prices that leave hard tasks worth trying
#
# A policy succeeds with probability `p` in an attempt. Its attempts have the mean measures `habits`, and giving up has
# the mean measures `idle`; both are dicts, name → measure, after the caps. `prices` is a dict, name → price. Write
# `largest(p, habits, idle, prices)`: the largest factor by which all prices may be multiplied so that an attempt is
# paid at least as much as giving up, which never succeeds. If no factor is too large, it is `float("inf")`.


# %% tags=["exercise"]
def largest(p, habits, idle, prices):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_3():
    def near(actual, want):
        return actual == want or abs(actual - want) < 1e-9

    actual = largest(0.1, {"broken": 1.0}, {"broken": 0.0}, {"broken": 0.03})
    assert near(actual, 0.1 / 0.03), f"an attempt earns 0.1 − 0.03·f, giving up 0: f = {0.1 / 0.03:.3f}, not {actual}"
    actual = largest(
        0.1, {"broken": 1.0, "silent": 0.0}, {"broken": 0.0, "silent": 1.0}, {"broken": 0.03, "silent": 0.02}
    )
    assert near(actual, 10.0), (
        f"who gives up is silent, and pays 0.02·f for it: 0.1 − 0.03·f ≥ −0.02·f while f ≤ 10, not {actual}"
    )
    actual = largest(0.1, {"silent": 0.5}, {"silent": 1.0}, {"silent": 0.2})
    assert actual == float("inf"), (
        f"where attempts behave better than who gives up, every factor will do: infinity, not {actual}"
    )
    actual = largest(0.0, {"broken": 1.0}, {"broken": 1.0}, {"broken": 0.1})
    assert actual == float("inf"), (
        f"an attempt that costs what giving up costs is never the worse choice: infinity, not {actual}"
    )
    actual = largest(0.0, {"broken": 1.0}, {"broken": 0.0}, {"broken": 0.1})
    assert near(actual, 0.0), f"an attempt that never succeeds is worth no price: 0, not {actual}"


check(3, check_3)


# %% tags=["solution"] jupyter={"source_hidden": true}
def largest(p, habits, idle, prices):
    extra_cost = sum(price * (habits[name] - idle[name]) for name, price in prices.items())
    return p / extra_cost if extra_cost > 0 else float("inf")


check(3, check_3)

# %% [markdown]
# **A deviation blows it up.** GRPO divides advantages by the deviation of the group. In a group whose rollouts are all
# right, one lint complaint then counts as much as success does elsewhere:

# %%
rewards = torch.tensor([[1.0, 1.0, 1.0, 0.995], [1.0, 1.0, 1.0, 0.0]], dtype=torch.float64)
for scale, name in (("none", "Dr. GRPO"), ("std", "GRPO")):
    group_advantages = dr_grpo.group_advantages(rewards, scale=scale)
    for case, values in zip(("one lint", "one failure"), group_advantages.tolist()):
        print(f"{name:9s} {case:12s}" + "".join(f"{value:+9.4f}" for value in values))

# %% [markdown]
# ## What a trained agent did
#
# The small world has no to-do lists and no messages, so one with manners was built (`recipe/microrepo/manners.py`). A
# policy learnt good and bad manners from demonstrations, half and half. Then RL went on with no price, with prices on
# calls, with prices on words
# and code, and with all:

# %%
verdicts("behaviour")
record = read_json(ROOT / "results" / "figures" / "behaviour.json")
begin, *ends = record["ends"]
figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
for at, name in enumerate(MEASURE_CAPS):
    for shift, has_price, colour in ((-0.18, True, BLUE), (0.18, False, GREY)):
        ratios = [end[name] / begin[name] for end in ends if (name in record["priced"][end["arm"]]) == has_price]
        axis.barh(
            at + shift,
            np.mean(ratios),
            0.34,
            color=colour,
            label=("with its price" if has_price else "without") if at == 0 else None,
        )
axis.axvline(1.0, color="black", linewidth=0.8)
axis.set(
    yticks=range(len(MEASURE_CAPS)), yticklabels=list(MEASURE_CAPS), xlabel="after RL, as a share of what it was before"
)
axis.invert_yaxis()
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# Read the verdicts with the picture. Each habit is rarer with its price than without. That took eight trainings of each
# arm: an earlier run had three, and hardly any of its intervals ended below zero, because a habit without a price does
# not stay where it was. It drifts, up in one training and down in another: success does not depend on lint or silence,
# so nothing holds them. So a price does not only lower a habit; it also decides what chance decided before. Silence
# still drifts by more than its price moves it, and two prices that work in the mean do not work in every training.
#
# Comments need no price here. In this world a comment repeats the docstring, sometimes a wrong one, and rollouts with
# comments solve fewer tasks; success alone removes the habit. In the report comments grew, because there they were
# thoughts that helped. A price need not repeat what the outcome already says.
#
# ## Open challenge
#
# Set the prices of three habits so that training moves them far and costs little success. `etude challenge 17` gives
# the rules, a file to begin with and the scores so far.
#
# ## Where to read on
#
# * `ref/behaviour.py`: all nine measures, and five traps. `ref/transcript.py`: the record beneath it, and what counts
#   as a claim or a comment.
# * `recipe/microrepo/manners.py`: the world with manners. `recipe/small/transcripts.py`: how a record is made from an
#   episode.
# * `etude figure behaviour` runs the four arms. `etude run recipe --scale small --set rl.behaviour.broken=0.05` trains
#   with a price, and logs each part.
# * `scaled/behaviour.py`: a group whose rollouts are on several ranks.
