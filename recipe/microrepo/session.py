"""One episode in the small world: the agent's calls, their outputs, and the final verdict.

A turn has one call per line. Several calls in one turn are executed in order, and their outputs are joined by
newlines. An output never ends in a newline and is short, because the agent pays for its tokens.

    read m3         the file: signature, docstring, and its body if it has one
    write m3        the next lines that start with four spaces become its body: "ok" or "error: ..."
    test            "passed 3 of 3" or "passed 1 of 3: m3(2, 5) is 9, want 12"
    done            ends the episode, without output
"""

import copy
from collections.abc import Sequence

from recipe.microrepo import evaluator
from recipe.microrepo.environment import Verdict
from recipe.microrepo.evaluator import Body, EvaluationError
from recipe.microrepo.task import Case, Task

__all__ = ["Session", "called", "short"]

INDENT = "    "
MAX_CALLS = 16


class Session:
    """An episode of one task, in texts. Equal turns give equal outputs, so an episode can be replayed."""

    def __init__(self, task: Task, max_turns: int = 12) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, got {max_turns}")
        self.task = task
        self.max_turns = max_turns
        self.prompt = task.prompt
        self.turns = 0
        self.text: str | None = None
        self.body: Body | None = None
        self._finished = False
        self._tested = False
        self.counts: dict[str, int] = dict.fromkeys(("calls", "invalid_calls", "reads", "writes", "test_runs"), 0)

    @property
    def done(self) -> bool:
        """Whether the agent has finished or its turns are used up."""
        return self._finished or self.turns >= self.max_turns

    def step(self, text: str) -> str:
        """Executes one turn. Raises RuntimeError if the episode is over."""
        if self.done:
            raise RuntimeError("the episode is over")
        self.turns += 1
        lines = [line.rstrip() for line in text.split("\n")]
        answers, calls, position = [], 0, 0
        while position < len(lines) and not self._finished:
            line, position = lines[position], position + 1
            if not line:
                continue
            calls += 1
            if calls > MAX_CALLS:
                answers.append(self.refused("too many calls"))
                break
            start = position
            if line.startswith("write "):
                while position < len(lines) and lines[position].startswith(INDENT):
                    position += 1
            answers.append(self.call(line, lines[start:position]))
        if not calls:
            answers.append(self.refused("no call"))
        return "\n".join(answer for answer in answers if answer)

    def verify(self) -> Verdict:
        """Runs the hidden tests on the current body."""
        return self.reward_of([complaint is None for complaint in self.complaints(self.task.hidden_tests)])

    def judge(self) -> None:
        """The verdict needs nothing that ends."""

    def close(self) -> None:
        """Nothing is held."""

    def reward_of(self, passed: list[bool]) -> Verdict:
        """The verdict, from which hidden tests pass."""
        return Verdict(
            tests=float(all(passed)),
            passed=sum(passed) / len(passed),
            turns=self.turns,
            tested=self._tested,
            finished=self._finished,
            **self.counts,
        )

    def fork(self) -> "Session":
        """A copy of the current episode that continues independently. The task and the parsed body are shared,
        because both are read-only."""
        twin = copy.copy(self)
        twin.counts = dict(self.counts)
        return twin

    def call(self, line: str, body: list[str]) -> str:
        """The answer to a call: its line, and the lines of a body as they were written. A world of its own may know
        more calls."""
        match line.split(" "):
            case ["read", name]:
                return self.read(name)
            case ["write", name]:
                return self.write(name, "\n".join(part[len(INDENT) :] for part in body))
            case ["test"]:
                return self.test()
            case ["done"]:
                self._finished = True
                self.counts["calls"] += 1
                return ""
        return self.refused("no such call")

    def refused(self, reason: str) -> str:
        """The answer to a broken call, which is counted."""
        self.counts["calls"] += 1
        self.counts["invalid_calls"] += 1
        return f"error: {reason}"

    def accepted(self, kind: str) -> None:
        """Counts a call of this kind, which is one of `counts`."""
        self.counts["calls"] += 1
        self.counts[kind] += 1

    def read(self, name: str) -> str:
        """The answer to a call that reads a file."""
        text = self.source_of(name) if name in self.task.files else self.read_extra_file(name)
        if text is None:
            return self.refused("no such file")
        self.accepted("reads")
        return text

    def write(self, name: str, text: str) -> str:
        """The answer to a call that makes a text the body of a file."""
        if name not in self.task.files:
            return self.refused("no such file")
        if name != self.task.target:
            return self.refused(f"{name} is not the file to fix")
        try:
            self.body = evaluator.parse(self.code_of(text), self.task.files[name].args)
        except EvaluationError as error:
            return self.refused(str(error))
        self.accepted("writes")
        self.text, self._tested = text, False
        self.write_body()
        return "ok"

    def test(self) -> str:
        """The answer to a call that runs the visible tests."""
        self.accepted("test_runs")
        self._tested = self.body is not None
        complaints = self.complaints(self.task.visible_tests)
        failures = [complaint for complaint in complaints if complaint is not None]
        summary = f"passed {len(complaints) - len(failures)} of {len(complaints)}"
        return f"{summary}: {failures[0]}" if failures else summary

    def complaints(self, cases: Sequence[Case]) -> list[str | None]:
        """What is wrong with the body in each case, or None."""
        if self.body is None:
            return ["no body"] * len(cases)
        return [self._complaint(self.body, case) for case in cases]

    def _complaint(self, body: Body, case: Case) -> str | None:
        try:
            value = body.evaluate(case.inputs)
        except EvaluationError as error:
            return f"{called(self.task, case)} fails, {error}"
        return None if value == case.want else f"{called(self.task, case)} is {short(value)}, want {short(case.want)}"

    def source_of(self, name: str) -> str:
        """The text of a file."""
        module = self.task.files[name]
        return module.source(name, self.text if name == self.task.target else module.body)

    def code_of(self, text: str) -> str:
        """What of a body is code. In a world of its own not all of it may be."""
        return text

    def read_extra_file(self, name: str) -> str | None:
        """The text of a file that is no module; None if there is none. A world of its own may have some."""
        return None

    def write_body(self) -> None:
        """The target has a new body."""


def called(task: Task, case: Case) -> str:
    """The call of a test, as it stands in an answer."""
    return f"{task.target}({', '.join(map(str, case.inputs))})"


def short(value: int) -> str:
    """A number as it stands in an answer."""
    return str(value) if abs(value) < 10**9 else "large"
