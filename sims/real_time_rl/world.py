"""The small world with users: the agent may ask instead of editing, and some tasks leave open what is wanted.

    read m3         def m3(a, b): with the docstring "lost"
    ask             ends the episode, without output: the user is asked what is wanted, and the rest is theirs

A question ends the session here; what the user answers, if they do, would be a session of its own. A fifth of the tasks
has lost its docstring with its body (`changed` of `recipe/microrepo/leftovers.py`). Nothing but three tests says what
is wanted there, so a question is welcome. Elsewhere the docstring says everything, and a question asks for what stands
there.

Seconds are those of a product, and our choice: three for each turn, which a network and a tool take together, and 0.05
for each token."""

from random import Random

from recipe.microrepo import NoiseConfig, Session, Task, demonstration
from recipe.microrepo.leftovers import LOST_DOCSTRING, changed, draw_other_function
from recipe.microrepo.session import INDENT, MAX_CALLS
from ref.rollout import Rollout
from sims.real_time_rl.users import Served

__all__ = ["ASK", "OPEN", "AskingSession", "is_hard", "is_open", "open_session", "served", "with_questions"]

ASK = "ask"
OPEN = 0.2
"""Share of the tasks that leave open what is wanted."""
TURN_SECONDS, TOKEN_SECONDS = 3.0, 0.05
BROKEN_CALL_ANSWERS = {f"error: {reason}" for reason in ("no call", "no such call", "too many calls")}
"""Answers to what no tool could read. A body that is refused, or a file that is not there, came of a sound call."""


class AskingSession(Session):
    """An episode in which a call ends it with a question. What follows it in its turn is not called, as after `done`.
    `broken`: how many calls no tool could read."""

    has_asked, broken_calls = False, 0

    @property
    def done(self) -> bool:
        return self.has_asked or super().done

    def step(self, text: str) -> str:
        lines = [line.rstrip() for line in text.split("\n")]
        if ASK not in lines or self.done:
            return self.count_broken_calls(super().step(text))
        turns, calls, lines_before = self.turns, self.counts["calls"], lines[: lines.index(ASK)]
        answer = self.count_broken_calls(super().step("\n".join(lines_before))) if any(lines_before) else ""
        self.turns = turns  # all of this is one turn, and its last call is still to come
        if not self.done and self.counts["calls"] - calls < MAX_CALLS:
            self.has_asked = True
            self.counts["calls"] += 1
        self.turns = turns + 1
        return answer

    def count_broken_calls(self, answer: str) -> str:
        """Counts the broken calls of a turn by its answer."""
        self.broken_calls += sum(line in BROKEN_CALL_ANSWERS for line in answer.split("\n"))
        return answer


def is_open(task: Task) -> bool:
    """Whether the task leaves open what is wanted."""
    return task.files[task.target].doc == LOST_DOCSTRING


def clouded(task: Task) -> Task:
    """A fifth of the tasks, always the same ones, without their docstring; the others as they are."""
    return changed(task, LOST_DOCSTRING) if Random(f"{task.key} open").random() < OPEN else task


def open_session(task: Task, max_turns: int) -> AskingSession:
    """A session that a user begins."""
    return AskingSession(clouded(task), max_turns)


def served(episode: Rollout) -> Served:
    """What came of a finished episode."""
    session = episode.environment.session
    assert isinstance(session, AskingSession)
    has_edit, verdict = session.body is not None, session.verify()
    return Served(
        edited=has_edit,
        quality=verdict.passed if has_edit else 0.0,
        has_question=session.has_asked and not has_edit,
        open=is_open(session.task),
        has_broken_call=session.broken_calls > 0,
        seconds=TURN_SECONDS * verdict.turns + TOKEN_SECONDS * episode.chain.num_sampled_tokens,
    )


def is_hard(episode: Rollout) -> bool:
    """Whether an episode's task leaves open what is wanted, or says it by two other files."""
    session = episode.environment.session
    assert isinstance(session, AskingSession)
    return is_open(session.task) or session.task.depth == 2


def with_questions(
    task: Task, rng: Random, noise: NoiseConfig, needless: float = 0.1, welcome: float = 0.5
) -> list[str]:
    """A demonstration. Where the task leaves open what is wanted, the agent asks after a look with probability
    `welcome`, and else writes some function. Elsewhere it asks with probability `needless`, at some time after its
    first look and before it writes."""
    target = task.target
    if is_open(task):
        guess = [
            f"write {target}\n{INDENT}return {draw_other_function(task).code}",
            *(["test"] if rng.random() < 0.5 else []),
            "done",
        ]
        return [f"read {target}", *([ASK] if rng.random() < welcome else guess)]
    turns = demonstration(task, rng, noise)
    if rng.random() < needless:
        last_position = next(
            (index for index, turn in enumerate(turns) if turn.startswith(("write", "done"))), len(turns)
        )
        return [*turns[: rng.randint(1, max(1, last_position))], ASK]
    return turns
