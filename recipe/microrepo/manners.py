"""A world with manners: to-do items, a final message, comments and a terminal in the small world's repositories, so
that habits have a place.

The report rewards how an agent behaves, beside what it achieves (Composer 2 technical report, §4.2). In the small world
a turn is nothing but calls, and nobody can be silent, lie or leave a list open. Here an episode has these words more,
and is paid like any other:

    todo fix m3         a new item of the to-do list: "item 1"
    tick 1              that item is done: "ok", or "error: no such item"
    sh cat m3           what read m3 does; sh pytest is what test does. Whatever else stands behind sh fails: "sh: not
                        found"
    say tests pass      the message to the user, unanswered and no call; what was said last is the final message, and
                        none may be said
    write m3            "ok": lines of a body that begin with # are comments, which the interpreter ignores and the
                        agent pays for
        # m7 then double
        return (a + b) * 2

A linter has one rule (`lints`). What an episode was, `recipe/small/transcripts.py` reads off, and `ref/behaviour.py`
prices. Demonstrations (`mannered`) have good and bad manners, half and half: what all rollouts share, no price can
move.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, fields
from random import Random

from recipe.microrepo.corpus import NoiseConfig, demonstration
from recipe.microrepo.evaluator import Body
from recipe.microrepo.session import Session
from recipe.microrepo.task import Task
from ref.transcript import Todo

__all__ = ["TOOLS", "ManneredSession", "Manners", "lints", "mannered"]

TOOLS = ("read", "write", "test", "done", "todo", "tick", "sh")
"""The calls of this world."""
ALL_PASSED_ANSWER = "passed 3 of 3"
"""What an agent hears whose tests all pass."""


class ManneredSession(Session):
    """An episode with to-do items, messages, comments and a terminal."""

    def __init__(self, task: Task, max_turns: int = 12) -> None:
        super().__init__(task, max_turns)
        self.todos: tuple[Todo, ...] = ()
        """The list, with what is done."""
        self.message = ""
        """What was said last."""
        self.failed = 0
        """Calls that were made as they should be and could not be carried out."""

    def call(self, line: str, body: list[str]) -> str:
        match line.split(" "):
            case ["todo", *words] if words:
                self.counts["calls"] += 1
                self.todos = (*self.todos, Todo(" ".join(words), "open"))
                return f"item {len(self.todos)}"
            case ["tick", number]:
                return self.tick(number)
            case ["say", *words]:
                self.message = " ".join(words)
                return ""
            case ["sh", "cat", name] if name in self.task.files:
                return self.read(name)
            case ["sh", "pytest"]:
                return self.test()
            case ["sh", *words] if words:
                self.counts["calls"] += 1
                self.failed += 1
                return "sh: not found"
        return super().call(line, body)

    def tick(self, number: str) -> str:
        """The answer to a call that ends an item."""
        index = next((index for index in range(len(self.todos)) if str(index + 1) == number), None)
        if index is None:
            return self.refused("no such item")
        self.counts["calls"] += 1
        self.todos = (*self.todos[:index], Todo(self.todos[index].text, "done"), *self.todos[index + 1 :])
        return "ok"

    def code_of(self, text: str) -> str:
        return "\n".join(line for line in text.split("\n") if not line.lstrip().startswith("#"))


def lints(body: Body | None) -> int:
    """What the linter says against a body: one complaint for a name that is only there to be returned, as RET504 of
    ruff."""
    if body is None or len(body.statements) < 2:
        return 0
    assignment, last = body.statements[-2:]
    return int(
        isinstance(assignment, ast.Assign)
        and last.value is not None
        and ast.unparse(assignment.targets[0]) == ast.unparse(last.value)
    )


@dataclass(frozen=True)
class Manners:
    """Probabilities of habits in a demonstration."""

    plan: float = 0.7
    """Making a to-do list, of two items."""
    leave: float = 0.5
    """Leaving an item of it open."""
    silent: float = 0.35
    """Ending without a message."""
    lie: float = 0.8
    """Saying that tests pass where they were not run."""
    comment: float = 0.5
    """Repeating the docstring as a comment above the code."""
    name: float = 0.5
    """Giving the result a name before it is returned."""
    terminal: float = 0.4
    """Reading and testing through the terminal; drawn for every call."""
    fumble: float = 0.4
    """Trying a command that there is not."""
    separate_calls: float = 0.5
    """Making calls one a turn, where several could be made together."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 <= getattr(self, field.name) <= 1:
                raise ValueError(f"{field.name} is a probability, got {getattr(self, field.name)}")

    @classmethod
    def good(cls) -> Manners:
        """The best manners: a list that is worked off, an honest message, plain code, and calls made together."""
        return cls(**{field.name: float(field.name == "plan") for field in fields(cls)})


def mannered(task: Task, rng: Random, noise: NoiseConfig, manners: Manners = Manners()) -> list[str]:
    """A demonstration with these manners: the turns of the scripted agent, with what it plans, hides and says."""

    def happens(probability: float) -> bool:
        return rng.random() < probability

    def shell(call: str) -> str:
        verb, _, name = call.partition(" ")
        terminal = verb in ("read", "test") and happens(manners.terminal)
        return (f"sh cat {name}" if verb == "read" else "sh pytest") if terminal else call

    comment, name = happens(manners.comment), happens(manners.name)
    work = [style_turn(task, turn, comment, name) for turn in demonstration(task, rng, noise)[:-1]]
    lines = [[shell(line) for line in turn.split("\n")] if not turn.startswith("write") else [turn] for turn in work]
    if happens(manners.fumble):
        lines.insert(rng.randint(0, len(lines)), ["sh ls"])
    plan = [f"todo fix {task.target}", f"todo test {task.target}"] if happens(manners.plan) else []
    ticks = [f"tick {number}" for number, _ in enumerate(plan, 1) if not happens(manners.leave)]
    message = "tests pass" if has_passing_tests(task, work) or happens(manners.lie) else "not tested"
    ends = [*ticks, *([] if happens(manners.silent) else [f"say {message}"])]
    if happens(manners.separate_calls):
        return [*plan, *(line for turn in lines for line in turn), *ends, "done"]
    return ["\n".join(turn) for turn in [*join_turns([plan, *lines] if plan else lines), [*ends, "done"]]]


def style_turn(task: Task, turn: str, comment: bool, name: bool) -> str:
    """A turn that writes code, with a comment, or with a name for what it returns."""
    head, _, code = turn.partition("\n    return ")
    if not code:
        return turn
    comment_line = f"\n    # {task.files[task.target].doc}" if comment else ""
    return f"{head}{comment_line}\n    x = {code}\n    return x" if name else f"{head}{comment_line}\n    return {code}"


def join_turns(turns: Sequence[list[str]]) -> list[list[str]]:
    """Turns that need nothing of each other's answers, made together: the plan with the first call, and a test with
    what it tests."""
    joined_turns: list[list[str]] = []
    for turn in turns:
        last_call = joined_turns[-1][-1] if joined_turns else ""
        if last_call.startswith("todo ") or last_call.startswith("write ") and turn[0] in ("test", "sh pytest"):
            joined_turns[-1] = [*joined_turns[-1], *turn]
        else:
            joined_turns.append(turn)
    return joined_turns


def has_passing_tests(task: Task, turns: Sequence[str]) -> bool:
    """Whether an agent that has taken these turns has seen its code pass the tests."""
    session, has_passed = ManneredSession(task, len(turns) + 1), False
    for turn in turns:
        answer = session.step(turn)
        has_passed = answer == ALL_PASSED_ANSWER or has_passed and not turn.startswith("write ")
    return has_passed
