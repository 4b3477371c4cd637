"""The harness as an environment for RL: scripted episodes in sandboxes become rollouts with ids, are graded, and go
through a gradient step."""

import ast
import json
import os
import pickle
import threading
import time
from collections import deque
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from environments.grading.guarded import Exam, grade
from environments.grading.lay import Editable, write
from environments.grading.ready import Judges
from environments.harness.environment import HarnessEnvironment, HarnessTask
from environments.harness.scripted import call
from environments.harness.task_set import HarnessTasks, Levels, spans_of
from environments.harness.tools import openai, select_tools
from environments.harness.workspace import Job, Workspace, has_src_layout, hide_times
from environments.sandbox.interface import Limits as Bounds
from environments.sandbox.interface import Observation
from environments.sandbox.open import open_sandbox
from environments.tasks.levels import Schedule
from recipe.small.chat_template import Template
from ref import rl
from ref.chat_format import TemplateFormat
from ref.engine import sampler as engines
from ref.engine.sampler import Sampler
from ref.environment import Environment, EnvironmentFailure, TaskSet
from ref.messages import Message, ToolCall
from ref.network import Transformer
from ref.rollout import Limits, Rollout, RolloutResult, rollout
from ref.textual_feedback import hinted
from tests.chats import bytes_tokenizer
from tests.contexts import CONFIG
from tests.durations import ends_within
from tests.ref.test_chat_words import PUBLISHED
from tests.talks import whole

TOOLS = ("read", "edit", "shell", "finish")
LONGEST = 2_500
"""Tokens of a context."""
GAP = "    raise NotImplementedError\n"
WORDS = Path(__file__).parents[2] / "examples" / "words"
CYCLES = (
    "from cycler import cycler\n\ndef test_ends_meet():\n    assert cycler(a=[1, "
    '2]).concat(cycler(a=[3])).by_key() == {"a": [1, 2, 3]}\n'
)
KEYS = """import pytest
from cycler import cycler

def test_two_keys():
    assert cycler(a=[1], b=[2]).concat(cycler(a=[3], b=[4])).by_key() == {"a": [1, 3], "b": [2, 4]}

def test_other_keys():
    with pytest.raises(ValueError):
        cycler(a=[1]).concat(cycler(b=[2]))
"""
MARKS = 'from markupsafe import escape\n\ndef test_an_angle():\n    assert str(escape("<a>")) == "&lt;a&gt;"\n'
QUOTES = """from markupsafe import escape

def test_quotes():
    assert str(escape("'&\\"")) == "&#39;&amp;&#34;"
"""


def installed(package):
    """The files of Python of an installed package."""
    folder = Path(find_spec(package).origin).parent
    return {f"{package}/{path.name}": path.read_bytes() for path in sorted(folder.glob("*.py"))}


def words():
    return {path.relative_to(WORDS).as_posix(): path.read_bytes() for path in sorted((WORDS / "words").rglob("*.py"))}


def checks_of(name, *asked):
    """A file of tests for each (arguments, result) of a function of nouns."""
    return [
        f"from words.nouns import {name}\n\ndef test_{name}():\n    assert {name}({args}) == {said!r}\n"
        for args, said in asked
    ]


CASES = {
    "counted": (words, "words/nouns.py", *checks_of("counted", ("1, 'cat'", "1 cat"), ("2, 'fly'", "2 flies"))),
    "listed": (words, "words/nouns.py", *checks_of("listed", ("['tea']", "tea"), ("'ab', 'or'", "a or b"))),
    "article": (words, "words/nouns.py", *checks_of("article", ("'cat'", "a cat"), ("'owl'", "an owl"))),
    "concat": (partial(installed, "cycler"), "cycler/__init__.py", CYCLES, KEYS),
    "_escape_inner": (partial(installed, "markupsafe"), "markupsafe/_native.py", MARKS, QUOTES),
}
"""Functions of three packages: their files, the file that holds the function, its tests that are shown, and those that
are held out."""


def names_of(file, tests):
    return tuple(f"{file}::{node.name}" for node in ast.parse(tests).body if isinstance(node, ast.FunctionDef))


def task_of(name, store, folder):
    """The task to write the body of a function, and a script that does."""
    files, file, shown, held = CASES[name]
    gold = {**files(), "tests/test_shown.py": shown.encode()}
    lines = gold[file].decode().splitlines(keepends=True)
    node = next(one for one in ast.walk(ast.parse(gold[file])) if isinstance(one, ast.FunctionDef) and one.name == name)
    first, last = node.body[0].lineno - 1, node.end_lineno
    body = "".join(lines[first:last])
    given = {**gold, file: "".join([*lines[:first], GAP, *lines[last:]]).encode()}
    write(given, folder / name)
    tests = {"tests/test_shown.py": shown, "tests/test_held.py": held}
    wanted = tuple(one for path, text in tests.items() for one in names_of(path, text))
    exam = Exam(given, gold, Editable((file,)), tests, wanted, name)
    job = Job(name, f"Write the body of {name} in {file} again.", store.add_folder(folder / name), given, tools=TOOLS)
    run = ToolCall("shell", {"command": "python3 -m pytest -q tests"})
    look = ToolCall("read", {"path": file, "start": first, "lines": 4})
    mend = ToolCall("edit", {"path": file, "old": GAP, "new": body})
    end = ToolCall("finish", {"message": "It is there again."})
    oracle = [Message("assistant", None, tool_calls=calls) for calls in ((look, run), (mend,), (run,), (end,))]
    return HarnessTask(job, exam, frozenset(names_of("tests/test_shown.py", shown))), oracle, [oracle[0], oracle[-1]]


def test_a_package_in_src_is_imported_as_if_it_were_installed(engine, shared_store, tmp_path):
    """Its tests name it, whatever folder they run in; a package at the top needs nothing."""
    files = {
        "src/pkg/__init__.py": b"ONE = 1\n",
        "tests/test_pkg.py": b"from pkg import ONE\n\ndef test_one():\n    assert ONE == 1\n",
    }
    write(files, tmp_path / "tree")
    job = Job("src", "", shared_store.add_folder(tmp_path / "tree"), files)
    workspace = Workspace(job, partial(open_sandbox, store=shared_store), shared_store)
    for number, args in enumerate(
        (
            {"command": "python3 -m pytest -q tests"},
            {"command": "python3 -c 'import pkg; print(pkg.ONE)'", "cwd": "tests"},
        )
    ):
        answer = workspace.call(call("shell", **args), number, 60.0)
        assert answer.ok and ("1 passed" in answer.text or answer.text == "1"), answer.text
    workspace.end()


@pytest.mark.parametrize(
    "names, has",
    [
        (["src/pkg/__init__.py"], True),
        (["src/six.py", "tests/test_six.py"], True),
        (["src/pkg/a.py"], False),
        (["pkg/__init__.py"], False),
        (["src/__init__.py", "src/a.py"], False),
        (["src/types.py", "src/a.py"], False),
        (["src/a.txt"], False),
    ],
)
def test_what_is_a_src_layout(names, has):
    """A folder src/ that is a package itself, or hides a module of Python's own, is not put on the path."""
    assert has_src_layout(names) == has


@pytest.mark.parametrize(
    "text, hidden",
    [
        ("1 passed in 0.12s", "1 passed in 0.00s"),
        ("== 1 failed, 2 passed in 1.23s ==\nnext", "== 1 failed, 2 passed in 0.00s ==\nnext"),
        ("3 passed in 65.04s (0:01:05)\n", "3 passed in 0.00s\n"),
        ("1 passed in 90061.50s (1 day, 1:01:01)", "1 passed in 0.00s"),
        ("1 passed in 180061.50s (2 days, 2:01:01)", "1 passed in 0.00s"),
        ("\\x1b[32m1 passed\\x1b[0m\\x1b[32m in 0.01s\\x1b[0m", "\\x1b[32m1 passed\\x1b[0m\\x1b[32m in 0.00s\\x1b[0m"),
        ("Ran 3 tests in 0.001s", "Ran 3 tests in 0.00s"),
        ("within 0.12s in 2s in 0.12sec in x0.12s in ١.١٢s", None),
        ("in 1.00s (of 2)", "in 0.00s (of 2)"),
    ],
)
def test_seconds_are_hidden(text, hidden):
    """Those that pytest and unittest say at the end, and nothing else."""
    assert hide_times(text) == (text if hidden is None else hidden)


@pytest.mark.parametrize("piece", ["in ", "in 1", "1", "in 1.0s (", "in 1.00s (1 day, ", "in 1.00s (1:"])
def test_hiding_seconds_takes_as_long_as_the_text_is_long(piece):
    assert ends_within(20, lambda: hide_times(piece * 1_000_000))


def test_an_answer_hides_how_long_tests_took_where_the_job_says_so():
    """Of `shell`; what a file says stays."""

    class Slow:
        def call(self, tool, args, seconds):
            return Observation("1 passed in 0.12s", True, 0 if tool == "shell" else None)

        def close(self):
            pass

    run, read = call("shell", command="pytest"), call("read", path="log.txt")
    for hides_times, answer in ((False, "1 passed in 0.12s"), (True, "1 passed in 0.00s")):
        workspace = Workspace(Job("a", "", "", {}, hides_times=hides_times), lambda tree: Slow(), None)
        assert workspace.call(run, 0, 60.0).text == answer
        assert workspace.call(read, 1, 60.0).text == "1 passed in 0.12s"
        workspace.end()


TOLD = deque()
"""Tokens that the policy is made to sample next."""


def told(logits, temperature, u):
    """In place of `ref.engine.sampler.sample`, for one context."""
    token = torch.tensor([TOLD.popleft()])
    return token, (logits.float() / temperature).log_softmax(-1).gather(1, token[:, None])[:, 0]


class Led:
    """An environment whose policy is made to write a script's turns."""

    def __init__(self, environment, script, chat_format):
        self.environment, self.script, self.chat_format, self.written = environment, deque(script), chat_format, []

    def __getattr__(self, name):
        return getattr(self.environment, name)

    def reset(self):
        self.history = self.environment.reset()
        self._lead()
        return self.history

    def _lead(self):
        self.said = self.script.popleft()
        ids = [*self.chat_format.encode_turn(self.history, self.said), self.chat_format.stop_ids[0]]
        self.written += ids
        TOLD.extend(ids)

    def step(self, message):
        assert [(call.name, call.arguments) for call in message.tool_calls] == [
            (call.name, call.arguments) for call in self.said.tool_calls
        ]
        result = self.environment.step(message)
        self.history = [*self.history, message, *result.messages]
        if not result.done:
            self._lead()
        return result


@pytest.fixture(scope="module")
def chat_format():
    """That of Qwen2.5, over a tokenizer that knows pieces of what is said here: contexts are shorter than in bytes."""
    tokenizer, said = Tokenizer(models.BPE()), [data.decode() for case in CASES.values() for data in case[0]().values()]
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([*said, json.dumps(openai(select_tools(TOOLS)))], trainer)
    merges = [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    tokenizer = bytes_tokenizer(
        *merges, control=("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>")
    )
    return TemplateFormat(
        tokenizer, Template(PUBLISHED["qwen2_5"], {"eos_token": "<|im_end|>"}), openai(select_tools(TOOLS))
    )


@pytest.fixture(scope="module")
def model(chat_format):
    torch.manual_seed(0)
    return Transformer(
        replace(CONFIG, vocab_size=chat_format.tokenizer.get_vocab_size(), max_position_embeddings=LONGEST)
    )


@pytest.fixture(scope="module")
def made(root, shared_store, tmp_path_factory):
    """Tasks by name, with the scripts of one who solves them and of one who gives up."""
    folder = tmp_path_factory.mktemp("trees")
    return {name: task_of(name, shared_store, folder) for name in CASES}


@pytest.fixture(scope="module")
def tasks(root, shared_store, made, chat_format):
    fresh = partial(open_sandbox, root=root, store=shared_store, limits=Bounds(memory=1 << 30, output=4 << 20))
    with Judges(fresh) as judges:

        def graded(task, tree, calls):
            return grade(task.exam, shared_store.tree(tree), fresh, calls, judges=judges)

        fork = partial(open_sandbox, root=root, store=shared_store, limits=Bounds(output=8 << 10))
        yield HarnessTasks({"rl": [task for task, *_ in made.values()]}, fork, shared_store, graded, chat_format)


@pytest.fixture(scope="module")
def played(tasks, made, model, chat_format):
    """Of each task a rollout of the oracle and one of who gives up, sampled by the model's own engine."""
    sampler, found = Sampler(model, torch.float32), list[tuple[Rollout, list[int]]]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "sample", told)
        for task, *scripts in made.values():
            for number, script in enumerate(scripts):
                led = Led(tasks.environment(task, number), script, chat_format)
                (one,) = rollout(sampler, [lambda led=led: led], chat_format, Limits(whole(LONGEST)), seeds=[0])
                one.task, one.environment = task, led.environment
                found.append((one, led.written))
    return found


def test_it_is_an_environment(tasks, made):
    assert isinstance(tasks, TaskSet) and isinstance(tasks.environment(tasks.task("rl", 0), 0), Environment)
    count = len(made)
    rounds = [[tasks.task("rl", turn * count + at).key for at in range(count)] for turn in range(2)]
    assert [sorted(names) for names in rounds] == [sorted(made)] * 2 and rounds[0] != rounds[1]


def test_episodes_are_paid_and_trained_on(played, model, chat_format):
    """Trained is what was sampled, each token once, and the gradient leads from who gives up to who solves the task."""
    solved, gave_up = ([one for one, _ in played[at::2]] for at in range(2))
    assert [one.reward for one in solved] == [1.0] * len(solved), [one.environment.lines[-1] for one in solved]
    assert [one.reward for one in gave_up] == [0.0] * len(solved)
    assert all(one.metrics["success"] == 1 and one.metrics["calls"] == 5 and one.metrics["finished"] for one in solved)
    for one, written in played:
        (segment,) = one.chain.segments
        assert segment.tokens[segment.sampled].tolist() == written and segment.finished
    settings = rl.Settings(prompts=len(solved), rollouts=2, budget_tokens=1000)
    rollouts = [one for one, _ in played]
    result = rl.improve(settings, model, None, rollouts)
    assert result.tokens == sum(len(written) for _, written in played)
    assert result.gap.abs().max() <= 1e-5, "the trainer's log-probs are those of the engine"

    def margin(network):
        logp = [
            network.logprob(network(s.tokens[None], logits=False).hidden[0, :-1], s.tokens[1:])[s.sampled[1:]].sum()
            for s in segments
        ]
        return sum(logp[::2]) - sum(logp[1::2])

    segments = [one.chain.segments[0] for one in rollouts]
    with torch.no_grad():
        before = margin(model)
        for p, gradient in zip(model.parameters(), result.gradients, strict=True):
            if gradient is not None:
                p -= 1e-3 * gradient
        after = margin(model)
        for p, gradient in zip(model.parameters(), result.gradients, strict=True):
            if gradient is not None:
                p += 1e-3 * gradient
    assert after > before


def test_what_they_did_is_read(played, tasks, chat_format):
    """Behaviour and monitor see calls, tests and lines; a hint stands as a message before the turn that went wrong."""
    for at, (one, _) in enumerate(played):
        seen = tasks.transcript(one)
        names = [call.name for call in seen.calls]
        assert names == (["read", "shell", "finish"] if at % 2 else ["read", "shell", "edit", "shell", "finish"])
        assert seen.calls[1].tests[0] < seen.calls[1].tests[1] and bool(seen.changed_lines) == (at % 2 == 0)
        if at % 2 == 0:
            assert seen.calls[3].tests[0] == seen.calls[3].tests[1] > 0
        assert len(spans_of(one, chat_format.stop_ids)) == one.metrics["turns"]
        ((segment,), (hints,)) = one.chain.segments, tasks.hints([one], 0)[0]
        assert len(hints) == at % 2, "only who gives up while tests fail"
        for hint in hints:
            said = "Your next reply would finish while tests fail that you can run."
            text, plain = (
                chat_format.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
                for ids in (hinted(segment, hints).tokens, segment.tokens)
            )
            head, tail = text.split(f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n")
            assert head.endswith("<|im_end|>\n") and tail.endswith("<|im_end|>") and '"finish"' in tail
            assert plain == f"{head}<|im_start|>assistant\n{tail}"


def test_broken_calls_and_silence(tasks, made):
    """Each call is answered, and who says nothing twice is done."""
    environment = tasks.environment(made["counted"][0], 0)
    environment.reset()
    calls = (
        ToolCall("raed", {"path": "a"}, "x1"),
        ToolCall("", "no call at all", "x2"),
        ToolCall("shell", {"command": "exit 3"}, "x3"),
    )
    result = environment.step(Message("assistant", None, tool_calls=calls))
    assert [one.tool_call_id for one in result.messages] == ["x1", "x2", "x3"] and not result.done
    assert "there is no tool 'raed'" in result.messages[0].content and "[exit code 3]" in result.messages[2].content
    assert not environment.step(Message("assistant", "Hm.")).done and environment.step(Message("assistant", "Hm.")).done
    reward = environment.reward()
    environment.close()
    assert (
        sum(reward.terms.values()) == 0 and reward.metrics["invalid_calls"] == 2 and reward.metrics["failed_calls"] == 1
    )
    assert reward.metrics["turns"] == 3 and reward.metrics["finished"] == 0


def test_a_sandbox_that_dies_is_nobody_s_fault(tasks, made):
    environment = tasks.environment(made["counted"][0], 0)
    environment.reset()
    os.kill(environment.workspace.open().first, 9)
    with pytest.raises(EnvironmentFailure, match="counted: the sandbox's server has ended"):
        environment.step(Message("assistant", None, tool_calls=(ToolCall("read", {"path": "words/nouns.py"}),)))
    environment.close()

    def none(tree):
        raise RuntimeError("no room for a sandbox")

    with pytest.raises(EnvironmentFailure, match="counted: no room for a sandbox"):
        HarnessEnvironment(made["counted"][0], none, tasks.store, tasks.grader).reset()


def test_what_an_agent_does_to_its_sandbox_is_its_own_fault(tasks, made):
    """Else whoever fails could have the episode left out."""
    environment = tasks.environment(made["counted"][0], 0)
    environment.reset()
    for command in ("kill -9 -1", "kill -9 1", "python3 -c 'x = bytearray(1 << 31)'"):
        result = environment.step(Message("assistant", None, tool_calls=(ToolCall("shell", {"command": command}),)))
        assert len(result.messages) == 1 and not result.done
    assert environment.reward().metrics["success"] == 0
    environment.close()


def test_levels_follow_success(tasks, made):
    bits = {name: float(at) for at, name in enumerate(made)}
    levels = Levels(Schedule(bits, number=2, every=4), tasks)
    easy = levels.choose(0, 2)
    assert {task.key for task in easy} == set(list(made)[:2])

    def ended(success, failure=""):
        return RolloutResult(None, failure, {} if failure else {"success": success}, 0)

    levels.update(easy, [ended(1.0, "dead")] * 9 + [ended(1.0)] * 3)
    assert levels.progress.level == 0 and levels.progress.num_rollouts == 3
    levels.update(easy, [ended(1.0)])
    assert levels.progress.level == 1 and {task.key for task in levels.choose(1, 3)} == set(list(made)[2:])
    with pytest.raises(ValueError, match="task other of the schedule is not in the stream"):
        Levels(Schedule({"other": 1.0}, number=1), tasks)


def test_an_episode_whose_time_is_over_is_over(tasks, made):
    """A call that was not made for want of time is no invalid call, and waiting for the policy takes no time."""
    environment = HarnessEnvironment(made["counted"][0], tasks.fork, tasks.store, tasks.grader, seconds=1.0)
    environment.reset()
    time.sleep(1.1)
    slow = ToolCall("shell", {"command": "sleep 5"})
    result = environment.step(Message("assistant", None, tool_calls=(slow, slow)))
    assert (
        result.done
        and "the time of the episode is over" in result.messages[1].content
        and 1.0 <= environment.elapsed_seconds < 4.0
    )
    reward = environment.reward()
    environment.close()
    assert (
        reward.metrics["invalid_calls"] == 0 and reward.metrics["failed_calls"] == 2 and reward.metrics["finished"] == 0
    )


def test_what_is_closed_in_the_middle_of_a_call_opens_no_other_sandbox(tasks, made):
    opened, ended = [], []

    def fork(tree):
        opened.append(tasks.fork(tree))
        return opened[-1]

    environment = HarnessEnvironment(made["counted"][0], fork, tasks.store, tasks.grader)
    environment.reset()

    def step():
        try:
            environment.step(Message("assistant", None, tool_calls=(ToolCall("shell", {"command": "sleep 3"}),)))
        except EnvironmentFailure as error:
            ended.append(str(error))

    thread = threading.Thread(target=step)
    thread.start()
    time.sleep(0.3)
    environment.close()
    thread.join(20)
    assert not thread.is_alive() and len(opened) == 1 and len(ended) == 1


def test_an_episode_in_another_process_is_its_record(played):
    """Sandbox, store and grader stay where they are; what reads a rollout needs the lines and the grade."""
    environment = played[0][0].environment
    other = pickle.loads(pickle.dumps(environment))
    assert (
        other.lines == environment.lines
        and other.grade == environment.grade
        and other.task == environment.task
        and not hasattr(other, "grader")
    )


@pytest.mark.parametrize(
    ("error", "is_failure"),
    [(OSError("no space"), True), (RecursionError("deep"), False), (NotImplementedError(), False)],
)
def test_a_grader_s_mistake_is_no_failure_of_the_infrastructure(tasks, made, error, is_failure):
    def grader(*_):
        raise error

    environment = HarnessEnvironment(made["counted"][0], tasks.fork, tasks.store, grader)
    environment.reset()
    with pytest.raises(EnvironmentFailure if is_failure else type(error)):
        environment.reward()
    environment.close()
