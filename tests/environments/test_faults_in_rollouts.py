"""Faults in RL on packages: sandboxes killed in the middle of episodes and of gradings, calls that hang, that print 100
MB, and that write 20,000 files. The policy is scripted and its turns are sampled through the driver; sandboxes, tools,
graders, advantages and gradients are the real ones."""

import ast
import os
import random
import re
import signal
from collections import Counter, deque
from functools import partial

import pytest
import torch

from environments.grading import guarded
from environments.grading.guarded import Exam, grade
from environments.grading.lay import Editable, write
from environments.grading.ready import Judges, nursery_of_judges
from environments.harness.environment import HarnessTask
from environments.harness.task_set import HarnessTasks
from environments.harness.tools import openai, select_tools
from environments.harness.workspace import Job
from environments.sandbox.open import open_sandbox
from environments.tasks.build import GRADING
from environments.tasks.generated import generated_package
from recipe.packages.chat_format import DEFAULT_TEMPLATE
from recipe.small.chat_template import Template
from ref import rl
from ref.chat_format import TemplateFormat
from ref.engine.sampler import SampledTurn, Sampler, Segment
from ref.environment import EnvironmentFailure
from ref.messages import Message, ToolCall
from ref.network import Config, Transformer
from ref.rollout import Limits
from tests.chats import CONTROL, bytes_tokenizer
from tests.mirror.calls import grown
from tests.mirror.killed_sandboxes import kill_soon
from tests.talks import whole

LONGEST = 6000
"""Tokens of a context, one for each byte."""
TOOLS = ("write", "shell", "finish")
DOOMED = {3: 2, 5: 1, 6: 2, 7: 1}
"""Number of a rollout in its group → its episodes that lose their sandbox."""
HANG, FLOOD, FILES = 0, 2, 4
"""Numbers of the rollouts that do this. They solve their task all the same."""
WRITE_FLOOD = "head -c 100000000 /dev/zero | tr '\\0' x"
WRITE_FILES = """python3 -c "
import os
os.mkdir('many')
for n in range({0}): open(f'many/{{n}}', 'w').write(str(n))
print(len(os.listdir('many')), 'files')
\""""
NUMBER = re.compile(r"\[script (\d+)\]")


def shell(command):
    return ToolCall("shell", {"command": command}, "s")


FINISH = Message("assistant", None, tool_calls=(ToolCall("finish", {"message": "Done."}, "f"),))


def make_script(number, task, file_count):
    """The turns of a rollout of a task: every second one solves it. Most sleep a moment, in which some are killed."""
    files = {name: data.decode() for name, data in task.exam.gold_tree.items() if name in task.exam.editable}
    solve = tuple(ToolCall("write", {"path": name, "text": text}, "w") for name, text in files.items())
    command = {HANG: "sleep 600", FLOOD: WRITE_FLOOD, FILES: WRITE_FILES.format(file_count)}.get(number, "sleep 0.3")
    turns = [Message("assistant", None, tool_calls=(shell(command),)), FINISH]
    return [Message("assistant", None, tool_calls=solve), *turns] if number % 2 == 0 else turns


class ScriptedEngine:
    """An `Engine` whose policy writes the turns of the script that its prompt names. Log-probs are the network's."""

    in_waves, version = False, 0

    def __init__(self, sampler, slots, max_len):
        self.sampler, self.max_len, self.free = sampler, max_len, [*range(slots)]
        self.contexts = {}
        self.ready = []

    @property
    def free_slots(self):
        return len(self.free)

    @property
    def is_idle(self):
        return not self.ready

    def add(self, prompt, stop_ids, draws=None, longest_turn=None):
        slot = self.free.pop()
        number = int(NUMBER.search(self.sampler.chat_format.tokenizer.decode(list(prompt)))[1])
        self.contexts[slot] = (deque(self.sampler.scripts[number]), [*prompt], [False] * len(prompt))
        self.ready.append(slot)
        return slot

    def step(self):
        slots, self.ready = self.ready, []
        return slots

    def turn(self, slot):
        turns, tokens, sampled = self.contexts[slot]
        ids = self.sampler.chat_format.encode_turn([Message("user", "")], turns.popleft())
        stop = self.sampler.chat_format.stop_ids[0]
        tokens += [*ids, stop]
        sampled += [True] * (len(ids) + 1)
        return SampledTurn([*ids], stop)

    def extend(self, slot, tokens, longest_turn=None):
        self.contexts[slot][1].extend(tokens)
        self.contexts[slot][2].extend([False] * len(tokens))
        self.ready.append(slot)

    def remove(self, slot, finished=True):
        _, tokens, sampled = self.contexts.pop(slot)
        self.free.append(slot)
        self.ready = [other for other in self.ready if other != slot]
        ids, mask = torch.tensor(tokens), torch.tensor(sampled)
        with torch.no_grad():
            logp = rl.compute_own_logp(
                self.sampler.model, self.sampler.model(ids[None], logits=False).hidden, ids[None], mask[None]
            )
        experts = torch.zeros(len(ids) - 1, 0, 2, dtype=torch.int16)
        logp = torch.nn.functional.pad(logp[0], (1, 0))
        return Segment(ids, mask, logp, torch.where(mask, 0, -1), experts, finished)


class ScriptedSampler(Sampler):
    """`scripts`: the turns by the number that a prompt names."""

    def __init__(self, model, chat_format, scripts):
        super().__init__(model, torch.float32)
        self.chat_format, self.scripts = chat_format, scripts

    def engine(self, slots, max_len, temperature=1.0):
        return ScriptedEngine(self, min(slots, 8), max_len)


class FaultyTasks(HarnessTasks):
    """Tasks whose prompts name a script, of which each has `size`. Episodes lose their sandbox as `DOOMED` says, at a
    moment that is drawn, and so does every fifth grading."""

    def __init__(self, tasks, store, judges, chat_format, size, **limits):
        super().__init__({"rl": tasks}, partial(open_sandbox, store=store), store, self.grade, chat_format, **limits)
        self.judges, self.size, self.draw = judges, size, random.Random(0)
        self.killed, self.episodes = Counter(), Counter()
        if judges.nursery is None:
            return
        open_judge = judges.nursery.sandbox

        def open_doomed():
            sandbox = open_judge()
            self.episodes["graded"] += 1
            if self.episodes["graded"] % 5 == 0:
                self.kill("judge", sandbox)
            return sandbox

        judges.nursery.sandbox = open_doomed

    def grade(self, task, tree, calls):
        return grade(task.exam, self.store.tree(tree), self.judges.fresh, calls, judges=self.judges)

    def kill(self, what, sandbox):
        self.killed[what] += 1
        kill_soon(sandbox, self.draw.uniform(0.0, 0.1))

    def environment(self, task, number):
        tasks, environment = self, super().environment(task, number)
        index = self.streams["rl"].index(task) * self.size + number

        class Faulty(type(environment)):
            def reset(self):
                opening, user = super().reset()
                tasks.episodes[index] += 1
                if tasks.episodes[index] <= DOOMED.get(number, 0):
                    tasks.kill("episode", self.workspace.open())
                return [opening, Message("user", f"{user.content} [script {index}]")]

        environment.__class__ = Faulty
        return environment


def make_task(number, store, folder):
    """To write the body of a function of a made-up package again."""
    package = generated_package(number)
    file = next(iter(package.files))
    function = ast.parse(package.files[file]).body[0]
    lines = package.files[file].decode().splitlines(keepends=True)
    body = [*lines[: function.body[0].end_lineno], "    raise NotImplementedError\n", *lines[function.end_lineno :]]
    given = {**package.files, file: "".join(body).encode()}
    write(given, folder)
    tests = {f"test_{file}": package.tests[f"test_{file}"].decode()}
    required = [
        f"{name}::{node.name}"
        for name, text in tests.items()
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef)
    ]
    exam = Exam(given, {**package.files}, Editable((file,)), tests, tuple(required))
    return HarnessTask(Job(f"generated-{number}", "Write it.", store.add_folder(folder), given, tools=TOOLS), exam)


def make_model(chat_format):
    torch.manual_seed(0)
    return Transformer(
        Config.tiny(
            chat_format.tokenizer.get_vocab_size(),
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=16,
            num_experts=0,
            intermediate_size=16,
            max_position_embeddings=LONGEST,
        )
    )


@pytest.fixture(scope="module")
def chat_format():
    return TemplateFormat(bytes_tokenizer(control=CONTROL), Template(DEFAULT_TEMPLATE), openai(select_tools(TOOLS)))


@pytest.fixture
def judges(root, shared_store):
    """Graders of a nursery."""
    fresh = partial(open_sandbox, root=root, store=shared_store, limits=GRADING)
    with nursery_of_judges(GRADING, root, shared_store) as nursery, Judges(fresh, nursery=nursery) as judges:
        yield judges


@pytest.mark.parametrize(
    ("size", "files", "call_seconds"),
    [pytest.param(8, 500, 2.0, id="short"), pytest.param(20, 19_900, 60.0, id="long", marks=pytest.mark.faults)],
)
def test_a_run_ends_and_only_killed_sandboxes_are_masked(
    size, files, call_seconds, judges, shared_store, chat_format, tmp_path
):
    """A call that hangs, a flood and a tree of many files are the policy's, and paid by what it left; two rollouts of a
    group lose both sandboxes, and two others one of them; so do some gradings. The advantages are those of the rollouts
    that are left."""
    chosen = [make_task(number, shared_store, tmp_path / str(number)) for number in range(2)]
    scripts = [make_script(number, task, files) for task in chosen for number in range(size)]
    model, done = make_model(chat_format), []
    tasks = FaultyTasks(chosen, shared_store, judges, chat_format, size, call_seconds=call_seconds)
    curriculum = rl.InOrder(tasks)
    curriculum.choose = lambda step, count: chosen
    c = rl.Settings(steps=1, prompts=2, rollouts=size, budget_tokens=1000, micro_tokens=8192)
    rl.train(
        c,
        rl.Plain(model, 1e-3),
        ScriptedSampler(model, chat_format, scripts),
        tasks,
        chat_format,
        Limits(whole(LONGEST)),
        curriculum=curriculum,
        observe=done.append,
    )
    (step,) = done
    masked = [group * size + number for group in range(2) for number, tries in DOOMED.items() if tries == 2]
    rollouts = step.rollouts
    assert [number for number, rollout in enumerate(rollouts) if rollout.failure] == masked
    assert all("the sandbox's server has ended" in rollouts[number].failure for number in masked)
    assert tasks.killed["episode"] == 2 * sum(DOOMED.values()) >= 0.05 * 2 * size and tasks.killed["judge"] >= 1
    for number, rollout in enumerate(rollouts):
        assert rollout.failure or rollout.reward == (number % size % 2 == 0), (number, rollout.environment.lines)
    answers = {
        number: [line["text"] for line in rollouts[number].environment.lines if line["kind"] == "answer"]
        for number in (HANG, FLOOD, FILES)
    }
    assert f"[ended: more than {call_seconds:g} seconds]" in answers[HANG][1]
    assert answers[FLOOD][1].endswith("[ended: more than 1 MiB of output]") and len(answers[FLOOD][1]) < 20_000
    assert f"{files} files" in answers[FILES][1]
    assert step.result.rewards.isnan().nonzero()[:, 0].tolist() == masked
    left = [rollout for rollout in rollouts if not rollout.failure]
    assert step.result.tokens == sum(rollout.chain.num_sampled_tokens for rollout in left)
    assert step.result.rewards.nanmean() == sum(rollout.reward for rollout in left) / len(left)


def test_a_flood_is_not_held_in_memory(judges, shared_store, chat_format, tmp_path):
    """100 MB of output cost the process that drives the episode a few megabytes."""
    task = make_task(0, shared_store, tmp_path / "tree")
    tasks = FaultyTasks([task], shared_store, judges, chat_format, 1)
    environment = HarnessTasks.environment(tasks, task, 0)
    environment.reset()
    result, growth = grown(lambda: environment.step(make_script(FLOOD, task, 0)[1]))
    environment.close()
    assert "more than 1 MiB of output" in result.messages[0].content and growth < 20 << 20, growth


@pytest.mark.parametrize("is_large", [False, True])
def test_a_grading_that_loses_every_sandbox_is_no_failure_of_the_policy(
    is_large, shared_store, chat_format, root, tmp_path, monkeypatch
):
    """Once is made up for; twice is EnvironmentFailure, and not a reward of 0. Nor is the exam prepared by such."""
    monkeypatch.setattr(guarded, "MAX_FILES", 0 if is_large else 1000)
    task, killed = make_task(0, shared_store, tmp_path / "tree"), []

    def fresh(folder):
        sandbox = open_sandbox(folder, root=root, store=shared_store, limits=GRADING)
        monkeypatch.setattr(sandbox, "tell", lambda *args, own=sandbox.tell: kill_now(sandbox) or own(*args))
        return sandbox

    def kill_now(sandbox):
        if len(killed) < deaths:
            killed.append(sandbox)
            signal.pidfd_send_signal(os.pidfd_open(sandbox.first), signal.SIGKILL)

    with Judges(fresh) as judges:
        tasks = FaultyTasks([task], shared_store, judges, chat_format, 1)
        for deaths, fails in ((1, False), (3, True)):
            environment = HarnessTasks.environment(tasks, task, 0)
            environment.reset()
            for message in make_script(6, task, 0)[::2]:
                environment.step(message)
            if fails:
                with pytest.raises(EnvironmentFailure, match="the grading sandbox has ended twice"):
                    environment.reward()
                with pytest.raises(RuntimeError, match="the grading sandbox has ended twice"):
                    deaths += 2
                    guarded.prepare_exam(task.exam, "seed", fresh, judges=judges, ask=False)
            else:
                assert environment.reward().metrics["success"] == 1
            environment.close()
