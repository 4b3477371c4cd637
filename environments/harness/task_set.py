"""Tasks of packages as a `ref.environment.TaskSet`, a curriculum over them, and what is read off their rollouts.

    tasks = HarnessTasks({"rl": […], "heldout": […]}, fork, store, grader, chat_format)
    ref.rl.train(settings, trainer, sampler, tasks, chat_format, limits, curriculum=Levels(Schedule(bits), tasks))

An episode is kept as lines (`environment.py`). With the summaries of the rollout's chain between them they are what
`record.py` reads from a file, so the rules for hints and the record of behaviour are the same for a trained policy and
for a model behind an address."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from environments.grading.rewards import changed, conformance
from environments.harness.environment import Grader, HarnessEnvironment, HarnessTask
from environments.harness.hint_audit import refusal
from environments.harness.hints import find_faults
from environments.harness.tools import TOOLS
from environments.harness.turns import Turn, arguments, turns
from environments.harness.workspace import INVALID_CALL
from environments.sandbox.interface import Sandbox
from environments.sandbox.store import Store
from environments.tasks.levels import Schedule, State
from ref import transcript
from ref.environment import ChatFormat
from ref.messages import Message
from ref.rollout import SUMMARY, Rollout, RolloutResult
from ref.textual_feedback import Hint

__all__ = ["HarnessTasks", "Levels", "Span", "graded_files", "lines_of", "spans_of", "transcript_of"]

COUNT = re.compile(r"\b(\d+) (passed|failed|errors?)\b")


class HarnessTasks:
    """`streams`: tasks by the name of their stream. Each comes once before one comes again, in an order that follows
    from `seed`. `fork`, `store`, `seconds`, `call_seconds`: see `HarnessEnvironment`. `chat_format`: that of the
    rollouts, for hints. Raises ValueError for an empty stream."""

    is_slow = True

    def __init__(
        self,
        streams: Mapping[str, Sequence[HarnessTask]],
        fork: Callable[[str], Sandbox],
        store: Store,
        grader: Grader,
        chat_format: ChatFormat,
        seed: int = 0,
        seconds: float = 1800.0,
        call_seconds: float = 60.0,
    ) -> None:
        if empty := [name for name, tasks in streams.items() if not tasks]:
            raise ValueError(f"stream {empty[0]!r} has no tasks")
        self.streams, self.fork, self.store, self.grader, self.chat_format = streams, fork, store, grader, chat_format
        self.seed, self.seconds, self.call_seconds = seed, seconds, call_seconds
        self.tools: Sequence[str] = tuple(TOOLS)

    def task(self, stream: str, number: int) -> HarnessTask:
        """See `TaskSet`. Raises KeyError for an unknown stream."""
        tasks = self.streams[stream]
        turn, at = divmod(number, len(tasks))
        return sorted(
            tasks, key=lambda task: hashlib.sha256(f"{self.seed} {stream} {turn} {task.key}".encode()).digest()
        )[at]

    def environment(self, task: HarnessTask, number: int) -> HarnessEnvironment:
        """See `TaskSet`."""
        return HarnessEnvironment(task, self.fork, self.store, self.grader, self.seconds, self.call_seconds)

    def transcript(self, rollout: Rollout) -> transcript.Transcript:
        """See `TaskSet`."""
        return transcript_of(rollout, self.chat_format.stop_ids)

    def hints(self, rollouts: Sequence[Rollout], seed: int) -> list[list[list[Hint]]]:
        """See `TaskSet`. The rules of `hints.py`; a hint that tells of the solution is left out."""
        return [self._hints(rollout) for rollout in rollouts]

    def _hints(self, rollout: Rollout) -> list[list[Hint]]:
        hints: list[list[Hint]] = [[] for _ in rollout.chain.segments]
        if rollout.failure:
            return hints
        spans = [span for span in spans_of(rollout, self.chat_format.stop_ids) if not span.is_summary]
        for fault in find_faults(lines_of(rollout, self.chat_format.stop_ids), rollout.task.visible_tests):
            span = spans[fault.turn.number - 1]
            if not refusal(fault, rollout.task.secret):
                hints[span.segment] += self._hint(rollout, span, fault.says)
        return hints

    def _hint(self, rollout: Rollout, span: Span, says: str) -> list[Hint]:
        """The hint as a message of the user, in front of where the turn's own message begins; none where the format
        cannot say it there."""
        opening = rollout.messages[:2]
        without_hint, with_hint = (
            self.chat_format.encode_opening(messages) for messages in (opening, [*opening, Message("user", says)])
        )
        prefix_length = next(
            (at for at, pair in enumerate(zip(without_hint, with_hint, strict=False)) if pair[0] != pair[1]),
            min(len(without_hint), len(with_hint)),
        )
        prompt = without_hint[prefix_length:]
        before = rollout.chain.segments[span.segment].tokens[: span.begin].tolist()
        if with_hint[len(with_hint) - len(prompt) :] != prompt or before[len(before) - len(prompt) :] != prompt:
            return []
        return [
            Hint(
                span.begin - len(prompt),
                tuple(with_hint[prefix_length : len(with_hint) - len(prompt)]),
                span.begin,
                span.end,
            )
        ]


class Span(NamedTuple):
    """Where a turn stands in a chain."""

    segment: int
    begin: int
    end: int
    is_summary: bool
    is_cut: bool
    """Whether a limit ended it."""


def spans_of(rollout: Rollout, stop_ids: Sequence[int]) -> list[Span]:
    """The turns of a chain, summaries included, in order."""
    spans = []
    for number, segment in enumerate(rollout.chain.segments):
        sampled_mask, tokens = [False, *segment.sampled.tolist(), False], segment.tokens.tolist()
        begins = [at for at in range(len(tokens)) if sampled_mask[at + 1] and not sampled_mask[at]]
        for begin in begins:
            end = next(at for at in range(begin, len(tokens) + 1) if not sampled_mask[at + 1])
            spans.append(Span(number, begin, end, bool(segment.summary[begin]), tokens[end - 1] not in stop_ids))
    return spans


def lines_of(rollout: Rollout, stop_ids: Sequence[int]) -> list[dict]:
    """The lines of an episode as `record.py` has them, with the summaries of its chain."""
    episode_lines, lines = list[dict](rollout.environment.lines), list[dict]()
    cuts = [span.is_cut for span in spans_of(rollout, stop_ids) if not span.is_summary]
    messages = (message for message in rollout.messages if message.role == "assistant")
    replies = 0
    for line in episode_lines:
        if line["kind"] == "reply":
            while (message := next(messages)).name == SUMMARY:
                lines.append({"kind": "summary", "text": message.content or ""})
            line, replies = {**line, "cut": cuts[replies]}, replies + 1
        lines.append(line)
    return lines


def transcript_of(rollout: Rollout, stop_ids: Sequence[int]) -> transcript.Transcript:
    """What an episode was, for behaviour rewards and the monitor. Lints and changed lines are those of the files that
    were graded."""
    lines, environment = lines_of(rollout, stop_ids), rollout.environment
    history = [transcript.Turn("system", lines[0]["system"]), transcript.Turn("user", lines[0]["prompt"])]
    todos: dict[str, transcript.Todo] = {}
    for turn in turns(lines):
        history.append(
            transcript.Turn(
                "assistant",
                turn.reply.text,
                tuple(call_of(called.name, arguments(called), line) for called, line in turn.calls),
            )
        )
        history += [transcript.Turn("tool", line["text"]) for line in turn.answers]
        todos |= todos_of(turn)
    before, after = graded_files(environment)
    count = len(conformance(before, after).problems)
    return transcript.Transcript(
        tuple(history), tuple(todos.values()), count, changed(before, after), rollout.chain.num_sampled_tokens
    )


def graded_files(environment: HarnessEnvironment) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The files of the package before an episode, and after it as they are graded."""
    exam, before = environment.task.exam, dict(environment.task.exam.given_tree)
    if environment.grade is None:
        return before, before
    unchanged = {name: data for name, data in before.items() if name not in exam.editable}
    return before, {**unchanged, **environment.grade.collected.files}


def call_of(name: str, args: Mapping[str, object], line: Mapping[str, object]) -> transcript.Call:
    """A call of the record. `line`: its answer."""
    counts = {outcome: int(number) for number, outcome in COUNT.findall(str(line["text"]))} if name == "shell" else {}
    passed = counts.pop("passed", 0)
    run = passed + sum(counts.values())
    wrote = args.get("text", "") if name == "write" else args.get("new", "") if name == "edit" else ""
    tests = (passed, run) if run and "pytest" in str(args.get("command")) else None
    is_valid = not line.get(INVALID_CALL)
    return transcript.Call(
        name, str(args.get("path", "")), str(wrote), is_valid, bool(line["ok"]) or tests is not None, tests
    )


def todos_of(turn: Turn) -> dict[str, transcript.Todo]:
    """The items that a turn put on the list, in their last state."""
    lists = (arguments(called)["items"] for called, line in turn.calls if called.name == "todo" and line["ok"])
    return {item["text"]: transcript.Todo(item["text"], item["state"]) for items in lists for item in items}


class Levels:
    """A curriculum by difficulty (`environments/tasks/levels.py`): a `ref.rl.Curriculum` over the stream "rl"."""

    def __init__(self, schedule: Schedule, tasks: HarnessTasks) -> None:
        """Raises ValueError for a task of the schedule that is not in the stream."""
        self.schedule, self.progress, self.tasks_by_name = (
            schedule,
            State(),
            {task.key: task for task in tasks.streams["rl"]},
        )
        if missing := [name for names in schedule.levels for name in names if name not in self.tasks_by_name]:
            raise ValueError(f"task {missing[0]} of the schedule is not in the stream")

    def choose(self, step: int, count: int) -> list[HarnessTask]:
        """See `Curriculum`. Tasks of the level now; each comes once before one comes again."""
        tasks = []
        for _ in range(count):
            name, self.progress = self.schedule.draw(self.progress)
            tasks.append(self.tasks_by_name[name])
        return tasks

    def update(self, tasks: Sequence[HarnessTask], outcomes: Sequence[RolloutResult]) -> None:
        """See `Curriculum`. Failed environments count neither as solved nor as tried."""
        valid = [outcome for outcome in outcomes if not outcome.failure]
        solved = sum(outcome.metrics["success"] == 1 for outcome in valid)
        self.progress = self.schedule.update(self.progress, solved, len(valid))

    @property
    def metrics(self) -> dict[str, float]:
        """The level of the next step, counted from 0."""
        return {"level": float(self.progress.level)}

    def save(self, path: Path) -> None:
        """Saves where the curriculum stands, as `Schedule.save`."""
        self.schedule.save(path, self.progress)

    def load(self, path: Path) -> None:
        """Goes on where `save` was called. Raises RunError as `Schedule.load`."""
        self.progress = self.schedule.load(path)
