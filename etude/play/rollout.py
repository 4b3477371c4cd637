"""One rollout in the small world as a person or a program reads it: who said what, what changed, which tests pass, and
the verdict.

`etude play` makes it from an agent's chain of contexts, or from a reader's turns; `etude/play/terminal.py` shows it,
and `as_json` is a line for programs."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from recipe.microrepo import Session, Verdict
from recipe.small.agent import Language, parted
from ref.rollout import Rollout
from ref.self_summary import Segment

__all__ = ["Piece", "RolloutView", "difference", "of_episode", "of_session", "pieces", "wrong"]


@dataclass(frozen=True)
class Piece:
    """Something that was said."""

    role: Literal["environment", "agent", "summary", "context"]
    """`summary`: the agent's, on request. `context`: a remark that a new context begins, or that a limit cut the last
    one off."""
    text: str


@dataclass(frozen=True)
class RolloutView:
    """A rollout that is over."""

    policy_name: str
    """The agent's checkpoint, or the reader."""
    prompt: str
    depth: int
    """Number of helper files that the target's docstring names."""
    files: dict[str, str]
    """Name → text of every file at the beginning."""
    pieces: tuple[Piece, ...]
    diff: tuple[str, ...]
    """Lines of the target, each behind a space, or + where it is new; empty if nothing was written."""
    solution: str
    """A right body."""
    visible: tuple[str | None, ...]
    """For each test that the agent could run: what is wrong, or None."""
    hidden: tuple[str | None, ...]
    """The same for the tests that decide."""
    reward: Verdict
    own_tokens: int
    """Tokens that the player wrote, with the one that ends each turn."""
    contexts: int

    @property
    def success(self) -> bool:
        """Whether all hidden tests pass."""
        return bool(self.reward.tests)

    def as_json(self) -> dict[str, Any]:
        """Plain values; docs/recipe.md lists them."""
        counts = {"success": self.success, "own_tokens": self.own_tokens, "contexts": self.contexts}
        counts |= {name: getattr(self.reward, name) for name in ("turns", "calls", "invalid_calls", "finished")}
        tests = {
            name: {"passed": results.count(None), "of": len(results), "wrong": wrong(results)}
            for name, results in self.tests.items()
        }
        task_facts = {"who": self.policy_name, "prompt": self.prompt, "depth": self.depth, "files": self.files}
        return {
            **task_facts,
            "pieces": [asdict(piece) for piece in self.pieces],
            "diff": list(self.diff),
            "solution": self.solution,
            **tests,
            **counts,
        }

    @property
    def tests(self) -> dict[str, tuple[str | None, ...]]:
        """Both kinds of tests by name."""
        return {"visible": self.visible, "hidden": self.hidden}


def wrong(tests: tuple[str | None, ...]) -> str | None:
    """What is wrong in the first test that fails; None if all pass."""
    return next((complaint for complaint in tests if complaint is not None), None)


def of_session(
    policy_name: str, session: Session, session_pieces: tuple[Piece, ...], own_tokens: int, contexts: int = 1
) -> RolloutView:
    """What a session has come to, behind the pieces that led there."""
    task = session.task
    files = {
        name: module.source(name, None if name == task.target else module.body) for name, module in task.files.items()
    }
    visible, hidden = (tuple(session.complaints(cases)) for cases in (task.visible_tests, task.hidden_tests))
    diff = difference(files[task.target], session.source_of(task.target))
    reward = session.verify()
    return RolloutView(
        policy_name,
        task.prompt,
        task.depth,
        files,
        session_pieces,
        diff,
        task.answer,
        visible,
        hidden,
        reward,
        own_tokens,
        contexts,
    )


def difference(before: str, after: str) -> tuple[str, ...]:
    """All lines of a text, with + before what is new and - before what has gone; empty if nothing changed."""
    return tuple(difflib.unified_diff(before.split("\n"), after.split("\n"), lineterm="", n=10**6))[3:]


def of_episode(policy_name: str, rollout: Rollout, language: Language) -> RolloutView:
    """An agent's rollout in the small world."""
    chain = rollout.chain
    return of_session(
        policy_name,
        rollout.environment.session,
        tuple(pieces(rollout, language)),
        chain.num_sampled_tokens,
        len(chain.segments),
    )


def pieces(rollout: Rollout, language: Language) -> Iterator[Piece]:
    """What was said in all contexts, in order. A later context repeats the prompt and the summary before it; here it is
    a remark."""
    yield Piece("environment", rollout.environment.session.prompt)
    for number, segment in enumerate(rollout.chain.segments, 1):
        if number > 1:
            yield Piece("context", f"context {number}: the agent knows the task and its summary")
        yield from split_segment(segment, language)
    if not rollout.chain.finished:
        yield Piece("context", "cut off: the context is full")


def split_segment(segment: Segment, language: Language) -> Iterator[Piece]:
    """What was said behind the prompt of a context."""
    tokens = segment.tokens.tolist()
    for span, is_own in parted(segment, language.env):
        ids = tokens[span]
        if is_own:
            text = language.decode(ids[:-1] if ids[-1] == language.env else ids)  # without its end, a limit cut it off
            yield Piece("summary" if segment.summary[span.start] else "agent", text)
        elif span.start:
            answer, *request = split(ids, language.agent)
            yield from (
                Piece("environment", language.decode([i for i in part if i != language.env]))
                for part in (answer, *request)
                if part
            )


def split(ids: list[int], mark: int) -> list[list[int]]:
    """The parts of a list between the marks; each part ends before a mark."""
    parts, start = [], 0
    for position, token in enumerate(ids):
        if token == mark:
            parts.append(ids[start:position])
            start = position + 1
    return [*parts, ids[start:]] if start < len(ids) else parts
