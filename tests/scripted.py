"""Episodes of the small world that say given turns, and given summaries where they are asked for one."""

import itertools
import random
from collections.abc import Sequence

from recipe.microrepo import MicroRepo, Session, Task, documents
from recipe.microrepo.task import Module
from recipe.small.agent import Language
from recipe.small.demonstrations import Lesson, make_chaining
from recipe.small.settings import Memory
from ref import cpt
from ref.rollout import Limits, Rollout, script_rollout
from ref.self_summary import Chaining

__all__ = ["NEVER", "TASK", "narrow", "played", "speaker", "wide"]

NEVER = Memory(wordy=0, forgetful=0, longest=69)
TASK = Task(
    files={
        "m2": Module(("a", "b"), "a minus 3", "a - 3"),
        "m3": Module(("a", "b"), "m7 then double", "(a + b) * 2"),
        "m7": Module(("a", "b"), "a plus b", "a + b"),
    },
    target="m3",
    depth=1,
    helpers=("m7",),
)


def speaker() -> Language:
    """A language of 400 tokens, learnt from the small world's texts."""
    return Language(cpt.train_tokenizer(itertools.islice(documents(random.Random(0)), 300), 400))


def narrow(language: Language, **others) -> Chaining:
    """Contexts that soon need a summary."""
    return make_chaining(language, 96, 40, 70, **others)


def wide(language: Language) -> Chaining:
    """One context for everything."""
    return make_chaining(language, 2000, 40, 70, join="none")


class Scripted(Lesson):
    def __init__(self, language: Language, task: Task, turns: Sequence[str], summaries: Sequence[str]):
        super().__init__(language, task, turns, random.Random(0), NEVER)
        self.summaries = [*summaries]

    def summary(self) -> str:
        return self.summaries.pop(0) if self.summaries else "nothing"


def played(
    language: Language,
    how: Chaining,
    task: Task,
    turns: Sequence[str],
    summaries: Sequence[str] = (),
    max_turns: int = 12,
    **limits,
) -> Rollout:
    """The finished rollout under these limits. After the given turns it says `done`."""
    lesson = Scripted(language, task, [*turns, *["done"] * max_turns], summaries)
    found = script_rollout(MicroRepo(Session(task, max_turns)), language, Limits(how, **limits), lesson.say)
    found.task = task
    return found
