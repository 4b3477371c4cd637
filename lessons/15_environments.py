# %% [markdown]
# # 15 · Environments: real files, and a grader that believes nobody
#
# **After this lesson you can** say what RL needs from an environment, and test it: the same tree from the same calls,
# nothing that gets out, forks that do not touch each other; read an episode from its transcript, even one that was
# killed; say what a grader has to guard against, with which guards, and what they do not guard; and say what real files
# cost in a training step.
#
# *About 55 minutes. Prerequisites: lessons 4 and 14. Source: Composer 2 technical report, §6.2; the release of
# Composer 2.5.*
#
# ## The idea
#
# Lesson 14 made tasks. Now an agent has to work on them. Composer is trained in the harness in which it works: an agent
# reads, edits and runs real files in a machine of its own, and what it leaves is graded. Let $h$ be the tree of files,
# $a$ a call, $T$ the machine and $R$ the grader. RL asks for three things:
#
# $$\text{(1)}\;\; h_{t+1} = T(h_t, a_t) \qquad \text{(2)}\;\; T(h, a) \text{ needs and changes nothing but } h \qquad
# \text{(3)}\;\; R(h) = 1 \iff \text{the feature is there}$$
#
# (1) Rollouts of a group begin with the same tree, and a killed one resumes where it was. (2) What an agent does
# reaches neither this machine nor another agent; otherwise the advantage of one rollout would be another one's work.
# (3) is the hardest. A policy that is paid for $R$ will find every tree for which $R$ is wrong.

# %% [markdown]
# **Predict first.** Five agents leave their work: an oracle that solves the task; a fool that only claims to; one that
# leaves a `conftest.py` which reports every test as passed; one whose module ends the process at once; and one that
# returns an object equal to everything. A grader runs pytest and pays if the exit code is 0. Which of them does it pay?
#
# Here is what a machine lets through. Each attempt is first made on this machine, where it succeeds, and then in a
# sandbox:

# %%
import json
import random
import tempfile
from collections import defaultdict
from math import comb
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from environments.grading import lay, verdicts
from environments.grading.guarded import grade
from environments.harness import record
from environments.sandbox import manifest
from environments.sandbox.interface import Sandbox
from kit.disk import parse_json, read_json
from kit.plots import BLUE, GREY
from kit.settings import RunError
from lessons.course import QUICK, ROOT, check, quick, source
from lessons.course import verdicts as claimed
from sims.environments import demo as environments_demo
from sims.environments import words_task


def scene(part, *arguments):
    """The rows of a scene of `etude run environments`; none where this machine has no sandboxes, which are not needed
    for the exercises."""
    try:
        rows = [] if QUICK else part(environments_demo.Demo(), *arguments)
    except RunError as error:
        print(f"not run here: {error}")
        return
    heads = {name: name for name in rows[0]} if rows else {}
    widths = {name: max(len(str(row[name])) for row in [heads, *rows]) for name in heads}
    for row in [heads, *rows]:
        print("  ".join(f"{row[name]!s:{widths[name]}}" for name in heads).rstrip())


scene(environments_demo.walls)

# %% [markdown]
# A sandbox of bubblewrap has namespaces of its own for files, processes and the network, an empty environment and a
# filter of system calls. One call runs at a time, and every process that it starts ends with it. That is (2), and it
# makes (1) possible: between two
# calls there are only files.

# %%
source(Sandbox)

# %% [markdown]
# ## The name of a tree
#
# A snapshot is named by a hash of what it holds. Two rollouts that did the same things have the same name, on any
# machine, and a fork begins with a name. In the scene below, three agents go on from one draft. The third does the same
# as the first, and ends with the same tree.

# %%
scene(environments_demo.forks)

# %% [markdown]
# Why do these agents store their tree *before* they run tests? pytest leaves bytecode, and bytecode names the second in
# which its source was written. Times are not part of a tree's name, but they get in where a program writes one into a
# file. That is where determinism is lost.
#
# ## Exercise 1: a name that is one
#
# `files` is a dict: path → bytes. Write `name_of(files)`: a text that is the same for the same files, in whatever order
# they are listed and in every process, and different for different files. Paths and contents may be anything, so
# nothing can serve as a
# separator.


# %% tags=["exercise"]
def name_of(files):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_1():
    files = {"b.py": b"x = 1\n", "a.py": b""}
    actual = name_of(files)
    assert isinstance(actual, str) and len(actual) >= 16, (
        f"a text of 16 characters or more, not {actual!r}: Python's own hash() is another in each process"
    )
    assert name_of(dict(reversed(files.items()))) == actual, "the same files in another order are the same tree"
    assert name_of({"b.py": b"x = 1\n"}) != actual, "an empty file is not the same as none"
    assert name_of({**files, "b.py": b"x = 2\n"}) != actual, "another content is another tree"
    assert name_of({"c.py": b"x = 1\n", "a.py": b""}) != actual, "another path is another tree"
    for first, second in (
        ({"a": b"bc"}, {"ab": b"c"}),
        ({"a": b"1", "b": b"2"}, {"a": b"1b2"}),
        ({"a": b"1", "b": b"2"}, {"a": b"2", "b": b"1"}),
    ):
        assert name_of(first) != name_of(second), f"{first} and {second} are two trees"
    for mark in (b"\n", b"\0", b" ", b",", b"|", b":", b"\n\0", b"\0\n"):
        for end in (b"\n", b"\0", b"", b" ", b",", b"|", b":"):
            hidden = {"a": b"1" + end + b"b" + mark + b"2"}
            assert name_of(hidden) != name_of({"a": b"1", "b": b"2"}), (
                f"{hidden} is one file, and looks like two where parts are only joined"
            )


check(1, check_1)


# %% tags=["solution"] jupyter={"source_hidden": true}
def name_of(files):
    import hashlib

    rows = [[path, hashlib.sha256(data).hexdigest()] for path, data in sorted(files.items())]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


check(1, check_1)

# %% [markdown]
# The environment's own version also covers kinds, permissions, and the targets of links:

# %%
source(manifest.dump, manifest.digest)

# %% [markdown]
# ## An episode, turn by turn
#
# Between a policy and a sandbox stands the *harness*. It shows tools, reads calls, makes them, answers, counts turns
# and tokens, and writes a transcript. Here is the transcript of an oracle, a script that knows the answer, on a task
# from the little package
# `words`:

# %%
lines = record.read(ROOT / "results" / "episodes" / "oracle.jsonl")


def print_transcript(lines):
    """A transcript in short."""
    for line in lines:
        if line["kind"] == "begin":
            print(
                f"tree {line['tree'][:8]}, {len(line['tools'])} tools\n"
                + "\n".join(f"    {row}" for row in line["prompt"].splitlines()[:4])
            )
        elif line["kind"] == "reply":
            print(f"says {line['text']!r}")
            for call in line["calls"]:
                print(f"  → {call['name']} {call['arguments'][:90]}")
        elif line["kind"] == "answer":
            print(
                f"  ← {'ok' if line['ok'] else 'failed'}, {1000 * line['seconds']:.0f} ms: "
                f"{line['text'].splitlines()[-1][:90]}"
            )
        elif line["kind"] == "turn":
            print(
                f"  tree {line['tree'][:8]}"
                + "".join(f"\n    {row}" for row in line.get("diff", "").splitlines() if row[:1] in "+-")
            )
        elif line["kind"] == "grade":
            print(f"{line['passed']} of {line['of']} tests pass, flags: {line['flags']}; reward {line['reward']:g}")


print_transcript(lines)

# %% [markdown]
# One reply may hold several calls. A call that fails, such as tests that do not pass, is an answer like any other. The
# tree has a name after every turn; the first is the one with which the scene above began. And this is a *fool*, which
# claims to be
# done:

# %%
print_transcript(record.read(ROOT / "results" / "episodes" / "fool.jsonl")[1:])

# %% [markdown]
# ## Exercise 2: where a killed episode goes on
#
# The transcript is written line by line, and a kill may come between any two lines. Whatever follows the last end of
# something was only half done, and is done again: a reply whose calls are not all answered has left a tree that was
# never stored. Ends are lines of the kinds `begin`, `turn`, `summary`, `end` and `grade`. Write `goes_on(lines)`: how
# many lines stay, and the name of the tree that a sandbox is forked from. `begin`, `turn` and `summary` have a `tree`,
# `end` and `grade` have
# none. There is
# always a `begin`.


# %% tags=["exercise"]
def goes_on(lines):
    raise NotImplementedError  # your code: a pair


# %% tags=["check"]
def check_2():
    summary = {"kind": "summary", "text": "I wrote a body.", "tree": "5" * 64, "spent": 1.0, "seconds": 0.5}
    longer = [*lines[:8], summary, *lines[8:]]
    for transcript in (lines, longer):
        for cut in range(1, len(transcript) + 1):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "torn.jsonl")
                path.write_text("".join(json.dumps(line) + "\n" for line in transcript[:cut]))
                with record.Record(path) as journal:
                    stay = len(journal.lines)
                    tree = next(line["tree"] for line in reversed(journal.lines) if "tree" in line)
            actual = goes_on(transcript[:cut])
            kinds = " ".join(line["kind"] for line in transcript[max(0, cut - 4) : cut])
            assert tuple(actual) == (stay, tree), (
                f"{cut} lines that end with {kinds}: {stay} stay, with tree {tree[:8]}; not {actual}"
            )


check(2, check_2)


# %% tags=["solution"] jupyter={"source_hidden": true}
def goes_on(lines):
    stay = max(n for n, line in enumerate(lines, 1) if line["kind"] in ("begin", "turn", "summary", "end", "grade"))
    return stay, [line["tree"] for line in lines[:stay] if "tree" in line][-1]


check(2, check_2)

# %% [markdown]
# ## How it breaks: the exit code
#
# A plain grader runs pytest in the tree that the agent left, and pays if the exit code is 0. But pytest runs the
# agent's files. Here are three that solve nothing:

# %%
for name, hack in (
    ("conftest.py", words_task.CONFTEST),
    ("the head of words/nouns.py", words_task.EXIT),
    ("its end", words_task.EQUAL),
):
    print(f"── {name}\n{hack.strip()}\n")

# %% [markdown]
# The first tells pytest that every test passed. The second ends the process with exit code 0 while the tests are still
# being collected. The third answers every question with a text that is equal to everything. Both graders on five
# agents, in sandboxes:

# %%
with tempfile.TemporaryDirectory() as folder:
    scene(environments_demo.graders, Path(folder))

# %% [markdown]
# **Your prediction:** it pays all of them but the fool. The guarded grader pays only the oracle.

# %% [markdown]
# ## Guards
#
# A rule against `conftest.py` would not be enough: there are 58 such hacks in `tests/environments/hacks.py`, and a
# policy finds the fifty-ninth. The guarded grader takes away what they rely on.
#
# | | guard | ends |
# |---|---|---|
# | G1 | no answer in the tree before it becomes a task (`environments/leaks.py`) | what was left behind (lesson 14) |
# | G2 | only plain, editable files on a pristine tree in a fresh sandbox | conftest, settings, rewritten tests, links |
# | G3 | no environment, no plugins; the tree is last on the path | a `pytest.py` of its own, `sitecustomize`, `.pth` |
# | G4 | verdicts on a sealed private pipe; what is missing has failed | printed verdicts, an early end, skipped tests |
# | G5 | canaries, which cannot pass, under names like those of tests | objects equal to everything, patched runners |
# | G6 | half of the tests is held out; fresh inputs, if asked for | tables of expected values |
# | G7, G8 | no network, and no process of the agent's is left | a download, a daemon that writes the reward later |
# | G9 | a monitor over changes and calls: what it flags is not paid | what the others miss, where it has a signature |

# %%
source(grade)

# %% [markdown]
# ## Exercise 3: what goes into the graded tree
#
# Guard G2. `given_tree` and `left` are dicts, path → bytes: what the agent began with, and what it left, where None
# stands for anything that is not a plain file, such as a link. `path in editable` says whether a task lets a path be
# changed; a `conftest.py` never is. Write `make_graded_tree(given_tree, left, editable)`: the tree that is graded. An
# editable file that the agent removed is gone there, and so is one that is no longer a plain file.


# %% tags=["exercise"]
def make_graded_tree(given_tree, left, editable):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_3():
    editable = lay.Editable(("words/", "setup/names.py"))
    given_tree = {
        "words/a.py": b"a",
        "words/b.py": b"b",
        "setup/names.py": b"n",
        "tests/test_a.py": b"t",
        "setup.cfg": b"[metadata]",
    }
    for case, changes in {
        "an edited file": {"words/a.py": b"A"},
        "a new module": {"words/c.py": b"c"},
        "a conftest in the editable folder": {"words/conftest.py": b"hack"},
        "a conftest at the top": {"conftest.py": b"hack"},
        "tests that were rewritten": {"tests/test_a.py": b"pass"},
        "configuration": {"setup.cfg": b"[tool:pytest]"},
        "a link in place of a file": {"words/b.py": None},
        "a link in place of a test": {"tests/test_a.py": None},
        "bytecode": {"words/__pycache__/a.cpython-311.pyc": b"hack"},
        "a file that was emptied": {"words/a.py": b""},
    }.items():
        for removed_paths in ((), ("words/b.py",), ("tests/test_a.py",)):
            left = {path: data for path, data in (given_tree | changes).items() if path not in removed_paths}
            with tempfile.TemporaryDirectory() as folder:
                for path, data in left.items():
                    at = Path(folder, path)
                    at.parent.mkdir(parents=True, exist_ok=True)
                    if data is None:
                        at.symlink_to("/etc/hostname")
                    else:
                        at.write_bytes(data)
                expected = lay.lay(given_tree, lay.collect(Path(folder), editable, given_tree), editable)
            actual = make_graded_tree(dict(given_tree), dict(left), editable)
            also = f", and {removed_paths[0]} removed" if removed_paths else ""
            wrong = sorted(path for path in {*expected, *actual} if expected.get(path, "-") != actual.get(path, "-"))
            assert not wrong, (
                f"{case}{also}: {wrong[0]} is {actual.get(wrong[0], 'not there')}, and should be "
                f"{expected.get(wrong[0], 'not there')}"
            )


check(3, check_3)


# %% tags=["solution"] jupyter={"source_hidden": true}
def make_graded_tree(given_tree, left, editable):
    pristine = {path: data for path, data in given_tree.items() if path not in editable}
    return pristine | {path: data for path, data in left.items() if path in editable and data is not None}


check(3, check_3)

# %% [markdown]
# ## Seals and canaries
#
# G2 ends the first hack but not the others, since the process that runs the tests has to import the agent's module. So
# how that process ends means nothing. It writes a line for each test to a pipe, and another process, which has imported
# nothing from the tree, seals the lines with a key. The second hack is silent there, and silence is failure.
#
# The third hack really does pass all tests. That is why there are *canaries* among them: copies of tests that ask for a
# value that is almost the right one, or that fail at their end. No solution passes one.

# %%
KEY = b"drawn anew for each grading"
TESTS = 'def test_city():\n    assert plural("city") == "cities"\n'
text, traps = verdicts.insert_canaries(TESTS, KEY)
print(text.partition("def nearly")[0].strip() + "\n")
space: dict = {}
exec(words_task.EQUAL, space)
for answer_name, plural in (
    ("the original", lambda noun: "cities"),
    ("a wrong answer", lambda noun: noun),
    ("the hack", lambda noun: space["Word"](noun)),
):
    passed = []
    for test in ("test_city", *traps):
        inner = {"plural": plural}
        exec(text, inner)
        try:
            inner[test]()
            passed.append(test)
        except AssertionError:
            pass
    print(f"{answer_name} passes: {', '.join(passed) or 'nothing'}")

# %% [markdown]
# ## Exercise 4: to pay or not to pay
#
# Guards G4 and G5. `parse_sealed_line(line, key)` gives the test and the outcome on a line, "passed", "failed" or
# "skipped", and None where the seal does not match the key. Write `pays(lines, key, required_tests, traps)`, True or
# False. It pays if every required test has passed and every canary has failed. It does not pay if a seal is wrong, if a
# test or a canary is missing, if a line names a test that is neither, or if two lines contradict each other.


# %%
def parse_sealed_line(line, key):
    """What stands on a line, if its seal is right."""
    test, outcome = parse_json(line.partition(b" ")[2])
    return (test, outcome) if line == verdicts.seal(key, test, outcome) else None


# %% tags=["exercise"]
def pays(lines, key, required_tests, traps):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_4():
    key, required_tests, traps = b"key", ["a", "b"], ["c"]
    good = [("a", "passed"), ("b", "passed"), ("c", "failed")]
    for case, outcomes, should in (
        ("both tests pass, and the canary fails", good, True),
        ("in another order", good[::-1], True),
        ("the same line twice", [*good, good[0]], True),
        ("a test fails", [("a", "failed"), *good[1:]], False),
        ("a test is skipped", [("a", "skipped"), *good[1:]], False),
        ("a test is not heard of", good[1:], False),
        ("the canary passes", [*good[:2], ("c", "passed")], False),
        ("the canary is skipped", [*good[:2], ("c", "skipped")], False),
        ("the canary is not heard of", good[:2], False),
        ("a test is first failed and then passed", [("a", "failed"), *good], False),
        ("a test that nobody asked for", [*good, ("d", "passed")], False),
        ("nothing at all", [], False),
    ):
        actual = pays([verdicts.seal(key, *outcome) for outcome in outcomes], key, required_tests, traps)
        assert actual is should, f"{case}: {should}, not {actual}"
    for at in range(3):
        forged = [verdicts.seal(b"another" if at == n else key, *outcome) for n, outcome in enumerate(good)]
        assert pays(forged, key, required_tests, traps) is False, (
            f"line {at + 1} has a seal of another key, so somebody else wrote on the pipe"
        )
    forged = [*(verdicts.seal(key, *outcome) for outcome in good), verdicts.seal(b"another", "a", "passed")]
    assert pays(forged, key, required_tests, traps) is False, (
        "one line more with a wrong seal: somebody else wrote on the pipe"
    )
    draw = random.Random(0)
    for _ in range(300):
        extra_outcomes = [
            (draw.choice("aabbcd"), draw.choice(("passed", "passed", "failed", "skipped")))
            for _ in range(draw.randint(0, 4))
        ]
        outcomes = extra_outcomes + draw.choice([[], good])
        lines = [verdicts.seal(key, *outcome) for outcome in outcomes]
        should = verdicts.read(lines, key, required_tests, traps).all_passed
        actual = pays(lines, key, required_tests, traps)
        assert actual is should, f"{outcomes}: {should}, not {actual}"


check(4, check_4)


# %% tags=["solution"] jupyter={"source_hidden": true}
def pays(lines, key, required_tests, traps):
    outcomes = {parse_sealed_line(line, key) for line in lines}
    return outcomes == {*((test, "passed") for test in required_tests), *((test, "failed") for test in traps)}


check(4, check_4)

# %% [markdown]
# ## Where to put the trap
#
# Only a canary of a test that looks at the agent's answer can catch it. Two of the four canaries of a file ask for a
# different value. If they were drawn from all of its $n$ tests, of which $m$ look at the feature, the third hack would
# be paid with
# probability
#
# $$\binom{n - m}{2} \Big/ \binom{n}{2}$$
#
# That is how it was here until this lesson was written: the scene above paid the hack in one run out of four or five.
# `words` has few tests. In a file of a hundred tests, four of which look at the feature, it would have been paid nine
# times out of ten. Now tests that fail without the feature are copied first.

# %%
for n, m in ((8, 4), (20, 4), (100, 4)):
    print(f"{m} of {n} tests look at the feature: paid with chance {comb(n - m, 2) / comb(n, 2):.2f}")
test_source = "".join(
    f"def test_{at}():\n    assert {'plural' if at < 4 else 'article'}({at}) == {at}\n" for at in range(20)
)
for name, first in (("from all", ()), ("from those that ask", [f"test_{at}" for at in range(4)])):
    keys = [f"key {number}".encode() for number in range(quick(2000, 20))]
    misses = [
        not any(
            "nearly_" in row and "plural" in row
            for row in verdicts.insert_canaries(test_source, key, first=first)[0].splitlines()
        )
        for key in keys
    ]
    print(f"20 tests, drawn {name}: {np.mean(misses):.3f} of {len(keys)} gradings have no canary that looks")

# %% [markdown]
# ## What is not guarded
#
# * Code that finds the pipe within its own process, and tells tests from canaries by means for which the monitor has no
#   signature. It would have to stand in the editable files, where a person can read it.
# * A policy that knows a package by heart, held-out tests included, can write a table of answers. The option `--fresh`
#   of `etude tasks try` then asks what no test asks.
# * A sandbox shows which kernel and processors this machine has, and a task can keep all processors busy until its time
#   is up.
# * The tests themselves: where they ask too little, any grader pays a wrong answer.
#
# ## What it costs
#
# The oracle above took a second. Where did it go?

# %%
seconds_by_tool = defaultdict(float)
for line in lines:
    if line["kind"] == "answer":
        seconds_by_tool[line["tool"]] += line["seconds"]
for tool, seconds in sorted(seconds_by_tool.items(), key=lambda item: -item[1]):
    print(f"{tool:8s} {1000 * seconds:6.1f} ms")

# %% [markdown]
# Two starts of pytest take nearly all of it. In training it is the same. `etude figure disk-world` trains the small
# world's agent twice with the same random numbers: in memory, where a tool takes microseconds, and on disk, where each
# episode has a sandbox, each `test` runs pytest, and the guarded grader decides. If the two differ in a single answer,
# every later
# step shows it.

# %%
results = read_json(ROOT / "results" / "figures" / "disk-world.json")
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained", width_ratios=(2, 1))
step = {}
for arm, colour, style, width in (("memory", GREY, "-", 4), ("disk", BLUE, "--", 1.5)):
    rows = [row for row in results["rows"] if row["arm"] == arm]
    mean = [
        np.mean([row["success"] for row in rows if row["step"] == at]) for at in sorted({row["step"] for row in rows})
    ]
    left.plot(range(1, len(mean) + 1), mean, style, color=colour, linewidth=width, label=arm)
    step[arm] = float(np.median([row["step_s"] for row in rows]))
right.bar(list(step), list(step.values()), color=[GREY, BLUE])
left.set(xlabel="RL step", ylabel="success", ylim=(0, 1), title="the same curve")
left.legend(frameon=False)
right.set(ylabel="seconds a step", title="another price")
plt.show()
rollouts = results["config"]["prompts"] * results["config"]["rollouts"]
print(f"{results['machine']['cpu']}, {results['machine']['cores']} cores: {step['memory']:.1f} s a step in "
    f"memory, {step['disk']:.1f} s on disk; "
      f"real files cost {(step['disk'] - step['memory']) / rollouts:.2f} s a rollout")  # fmt: skip
claimed("disk-world")

# %% [markdown]
# Such a loop waits for its tools most of the time, and lesson 13 says what to do about it: sample other rollouts
# meanwhile. Sandboxes are processes, and run side by side on as many machines as there are.
#
# ## Open challenge
#
# Find the episodes that cheat, from their transcripts alone, with the highest F1. `etude challenge 15` gives the rules,
# a file to begin with and the scores so far.
#
# ## Where to read on
#
# * `etude run environments` runs the three scenes; `etude show` reads their transcripts, and the explorer's page of
#   episodes steps through one.
# * `environments/sandbox/interface.py`, then `environments/grading/guarded.py`: the two ends of an episode.
#   `docs/architecture.md` lists what separates a task from the machine.
# * `tests/environments/attempts.py`: attempts to get out of a sandbox, each beside a control in which it succeeds.
#   `tests/environments/hacks.py`: hacks, each beside a grader that pays it.
# * `etude tasks try` lets a model work on a task, `etude tasks serve` any agent that speaks MCP, and `etude tasks
#   export` writes tasks for Harbor. `docs/tasks.md` says how.
