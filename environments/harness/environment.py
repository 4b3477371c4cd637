"""Real tasks in sandboxes for RL: an episode of the harness as a `ref.environment.Environment`.

A turn's calls are made in their order in the episode's own sandbox (`workspace.py`); each is answered with a message of
its own, broken ones too. The reward is the guarded grader's (`environments/grading/`), in its named parts. What happens
is kept as lines like those of `record.py`, which hints, behaviour rewards and the monitor read (`task_set.py`).

A sandbox that cannot be opened, or whose server dies, is a failure of the infrastructure (`EnvironmentFailure`): the
episode is neither won nor lost. When a context is full the rollout's driver asks for a summary (`ref/rollout.py`); an
environment does not know of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from environments.grading.guarded import Exam, Grade
from environments.grading.rewards import WEIGHTS, Weights
from environments.harness.episode import NUDGE, PATIENCE
from environments.harness.hint_audit import Secret
from environments.harness.messages import Called
from environments.harness.record import calls, grade_fields
from environments.harness.workspace import INVALID_CALL, Answer, Job, Workspace
from environments.monitor import Call
from environments.sandbox.interface import SERVER_ENDED, Sandbox
from environments.sandbox.store import Store
from kit.settings import RunError
from ref.environment import EnvironmentFailure, Reward, StepResult
from ref.messages import Message, ToolCall

__all__ = ["Grader", "HarnessEnvironment", "HarnessTask"]


@dataclass(frozen=True)
class HarnessTask:
    """What an agent is asked, and how what it leaves is graded."""

    job: Job
    exam: Exam
    visible_tests: frozenset[str] = frozenset()
    """Names of the tests that the agent can run."""
    secret: Secret = Secret(())
    """What no hint may tell."""

    @property
    def key(self) -> str:
        return self.job.task

    @property
    def prompt(self) -> str:
        return self.job.prompt


Grader = Callable[[HarnessTask, str, Sequence[Call]], Grade]
"""(task, the hash of the stored tree that was left, the calls that were made) → the grade."""


class HarnessEnvironment:
    """One episode. `fork`: opens a sandbox over a stored tree. `seconds`: of all calls together, and of storing the
    trees that they leave, after which the episode is over, so that the policy can keep nobody waiting for longer;
    waiting for the policy is not counted. `call_seconds`: of a call."""

    def __init__(
        self,
        task: HarnessTask,
        fork: Callable[[str], Sandbox],
        store: Store,
        grader: Grader,
        seconds: float = 1800.0,
        call_seconds: float = 60.0,
        weights: Weights = WEIGHTS,
    ) -> None:
        self.task, self.grader, self.seconds, self.weights = task, grader, seconds, weights
        self.workspace = Workspace(task.job, fork, store, call_seconds)
        self.lines: list[dict] = []
        """What happened, as in `record.py`, without summaries."""
        self.silent = self.call_count = 0
        self.elapsed_seconds = 0.0
        self.grade: Grade | None = None

    def reset(self) -> list[Message]:
        """See `Environment`. Opens the sandbox."""
        job = self.task.job
        self.lines = [{"kind": "begin", "task": job.task, "system": job.system, "prompt": job.prompt, "tree": job.tree}]
        with infrastructure(self.task.key):
            self.workspace.open()
        return [Message("system", job.system), Message("user", job.prompt)]

    def step(self, message: Message) -> StepResult:
        """See `Environment`. Replies without a call, `PATIENCE` of them one after the other, end the episode."""
        parsed_calls = [to_called(call, self.call_count + number) for number, call in enumerate(message.tool_calls)]
        fields = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in parsed_calls]
        self.lines.append({"kind": "reply", "text": message.content or "", "calls": fields})
        answers = [
            self._call(number, *pair) for number, pair in enumerate(zip(parsed_calls, message.tool_calls, strict=True))
        ]
        self.call_count += len(parsed_calls)
        if not parsed_calls:
            self.silent += 1
            answers = [Message("user", NUDGE)]
            self.lines.append({"kind": "nudge", "text": NUDGE})
        diff = ""
        if parsed_calls:
            self.silent, since = 0, time.monotonic()
            with infrastructure(self.task.key):
                diff, complaint = self.workspace.keep()
            self.elapsed_seconds += time.monotonic() - since
            check_server(self.task.key, self.workspace.over.removeprefix("the sandbox ended: "))
            if complaint:
                answers.append(Message("user", complaint))
                self.lines.append({"kind": "nudge", "text": complaint})
        self.lines.append({"kind": "turn", "tree": self.workspace.tree, "diff": diff})
        return StepResult(
            answers, bool(self.workspace.over) or self.silent >= PATIENCE or self.elapsed_seconds >= self.seconds
        )

    def _call(self, number: int, call: Called, tool_call: ToolCall) -> Message:
        since = time.monotonic()
        with infrastructure(self.task.key):
            answer = self.workspace.call(call, number, self.seconds - self.elapsed_seconds)
        self.elapsed_seconds += time.monotonic() - since
        check_server(self.task.key, answer.end_reason or "")
        self.lines.append(
            {
                "kind": "answer",
                "id": call.id,
                "tool": call.name,
                "text": answer.text,
                "ok": answer.ok,
                **optional_fields(answer),
            }
        )
        return Message("tool", answer.text, tool_call_id=tool_call.id, name=tool_call.name)

    def reward(self) -> Reward:
        """See `Environment`. The terms are the parts of the grader's reward; their sum is its total."""
        with infrastructure(self.task.key):
            self.workspace.close()
            grade = self.grade = self.grader(self.task, self.workspace.tree, [*calls(self.lines)])
        self.lines.append({"kind": "grade", **grade_fields(grade, len(self.task.exam.required_tests))})
        parts, is_success, weights = grade.reward, grade.reward.success and not grade.reward.flags, self.weights
        terms = {
            "tests": weights.success * is_success,
            "succinctness": weights.succinctness * parts.succinctness * is_success,
            "conformance": weights.conformance * parts.conformance * is_success,
        }
        answers = [line for line in self.lines if line["kind"] == "answer"]
        metrics = {
            "success": float(is_success),
            "passed": len(grade.verdicts.passed) / max(1, len(self.task.exam.required_tests)),
            "flags": len(parts.flags),
            "turns": sum(line["kind"] == "reply" for line in self.lines),
            "calls": len(answers),
            "invalid_calls": sum(INVALID_CALL in line for line in answers),
            "failed_calls": sum(not line["ok"] and INVALID_CALL not in line for line in answers),
            "finished": float(self.workspace.over == "finish"),
        }
        return Reward(terms, metrics)

    def close(self) -> None:
        """See `Environment`. A call that still runs opens no other sandbox."""
        self.workspace.end()

    def __getstate__(self) -> dict:
        """An episode in another process is its record: sandbox, store and grader stay where they are."""
        return {
            name: getattr(self, name) for name in ("task", "lines", "grade", "elapsed_seconds", "call_count", "silent")
        }


def to_called(call: ToolCall, number: int) -> Called:
    """A call as the harness takes it, with an id that no other one of the episode has: a chat format may count them
    anew in each turn."""
    return Called(
        f"c{number + 1:08d}",
        call.name,
        call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments),
    )


def optional_fields(answer: Answer) -> dict:
    """Fields of an answer's line that it need not have."""
    fields = {"exit": answer.exit, "ended": answer.end_reason, INVALID_CALL: answer.is_invalid or None}
    return {name: value for name, value in fields.items() if value is not None}


def check_server(task: str, end_reason: str) -> None:
    """Raises EnvironmentFailure if the sandbox's server has ended."""
    if end_reason.startswith(SERVER_ENDED):
        raise EnvironmentFailure(f"{task}: {end_reason}")


@contextmanager
def infrastructure(task: str) -> Iterator[None]:
    """What sandboxes and graders raise is the infrastructure's failure: they answer whatever the policy does. Mistakes
    of programs stay errors."""
    try:
        yield
    except (NotImplementedError, RecursionError):
        raise
    except (RunError, RuntimeError, OSError) as error:
        raise EnvironmentFailure(f"{task}: {error}") from error
