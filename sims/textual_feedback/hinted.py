"""Demonstrations with hints: what a policy has to have read before it can be its own teacher
(`ref/textual_feedback.py`).

A model of Composer's size understands a reminder in English. The tiny agent does not: it has never been told anything.
Fine-tuning therefore shows it demonstrations in which a hint stands in front of a turn, and the turn obeys it. The
others, as many, have the faults of `NoiseConfig` and no hint, so the policy errs where it is not told, and the policy
under a hint is another one.

    raed m3           broke a rule            error: no such call           read m3
    read m5           broke a rule            error: m5 not needed          what came after it
    write m3 …        broke a rule            error: m7 not read            read m7, then what is right
    write m3 …        in a world in which it has another name               calls: read put test done        put m3 …

No hint says what the repaired turn says: a reminder lists all calls, and a name that was not read is in the context. No
hint stands in front of a turn that is repaired from another fault, so the policy may also learn that hints of any kind
mean care.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import ref.messages
from recipe.microrepo import MicroRepo, NoiseConfig, Session, Task, demonstration
from recipe.microrepo.environment import TextSession
from recipe.microrepo.renaming import DEMONSTRATED_NAME, RenamedSession, renamed
from recipe.small.agent import Language
from recipe.small.demonstrations import Lesson, taught
from recipe.small.hints import RULES, Fault, Rule, faults
from recipe.small.settings import Memory
from recipe.small.transcripts import TOOLS, Message, messages
from ref.rollout import Limits, Rollout, script_rollout
from ref.self_summary import Chain, Chaining

__all__ = ["HINTED_RULES", "NAMES", "REMINDER", "Hinted", "demonstrations", "reminder", "repaired"]

HINTED_RULES = tuple(rule for rule in RULES if rule.name in ("tool", "argument", "unread", "needless"))
"""The rules whose faults one message can mend. A summary that lost a file, a body that is wrong or untested: what is
missing was missing before."""
NAMES = ("put", "set", "save", "edit", "fill", "make")
"""Names that `write` has in some demonstrations."""


def reminder(name: str) -> str:
    """A hint that lists the calls there are."""
    return f"calls: {' '.join(name if call == DEMONSTRATED_NAME else call for call in TOOLS)}"


def remind_once(task: Task, earlier: Sequence[Message], message: Message) -> str | None:
    """The first turn that says `write` is reminded of the calls there are, in the world in which that is `put`."""
    has_old_call = [
        any(line.startswith(f"{DEMONSTRATED_NAME} ") for line in turn.text.split("\n")) for turn in [*earlier, message]
    ]
    return reminder(NAMES[0]) if has_old_call[-1] and not any(has_old_call[:-1]) else None


REMINDER = (Rule("reminder", remind_once),)
"""The rule of a world in which `write` is called `put`: one reminder for each rollout, where it first forgets."""


class Hinted:
    """The agent's chat format, with a hint as the last line of what the environment says before turn number `at`."""

    def __init__(self, language: Language, hint: str, at: int):
        self.language, self.hint, self.at, self.stop_ids = language, language.encode(f"\n{hint}"), at, language.stop_ids
        self.turns = 0

    def encode_opening(self, messages: Sequence[ref.messages.Message]) -> list[int]:
        return self.add_hint(self.language.encode_opening(messages))

    def encode_answer(
        self, history: Sequence[ref.messages.Message], messages: Sequence[ref.messages.Message]
    ) -> list[int]:
        self.turns += 1
        return self.add_hint(self.language.encode_answer(history, messages))

    def decode_turn(self, tokens: Sequence[int]) -> ref.messages.Message:
        return self.language.decode_turn(tokens)

    def add_hint(self, message_tokens: list[int]) -> list[int]:
        return [*message_tokens[:-1], *self.hint, message_tokens[-1]] if self.turns == self.at else message_tokens


def script_hinted_rollout(
    language: Language,
    chaining: Chaining,
    task: Task,
    turns: Sequence[str],
    hint: str,
    turn_index: int,
    open_session: Callable[[Task], TextSession] = Session,
) -> Rollout:
    """The rollout of a scripted agent that is told something in front of turn number `turn_index`."""
    scripted_agent = Lesson(language, task, turns, random.Random(0), Memory(wordy=0, forgetful=0))
    rollout = script_rollout(
        MicroRepo(open_session(task)), Hinted(language, hint, turn_index), Limits(chaining), scripted_agent.say
    )
    rollout.task = task
    return rollout


def repaired(task: Task, message_list: Sequence[Message], fault: Fault) -> list[str]:
    """The turns of a demonstration up to the one with the fault, and then those of an agent that obeys its hint."""
    turns, turn_index = [message.text for message in message_list], message_list.index(fault.message)
    if fault.rule == "unread":
        missing = fault.says.split()[1]
        return [
            *turns[:turn_index],
            f"read {missing}",
            f"{DEMONSTRATED_NAME} {task.target}\n    {task.answer}",
            "test",
            "done",
        ]
    return [*turns[:turn_index], *turns[turn_index + 1 :]]


def demonstrations(
    tasks: Iterable[Task],
    language: Language,
    chaining: Chaining,
    noise: NoiseConfig,
    rng: random.Random,
    hinted: float,
    renaming: float,
) -> Iterator[Rollout]:
    """Finished demonstrations in single contexts. A share `renaming` is of worlds in which `write` has another name,
    and a reminder says so where it is first needed. Of the others with faults, a share `hinted` is repaired at one of
    them, under its hint."""
    memory = Memory(wordy=0, forgetful=0)
    for task in tasks:
        if rng.random() < renaming:
            name = rng.choice(NAMES)
            turns = [renamed(turn, name) for turn in demonstration(task, rng, noise)]
            turn_index = next((n for n, turn in enumerate(turns) if turn.startswith(f"{name} ")), None)
            if turn_index is None:
                continue
            rollout = script_hinted_rollout(
                language, chaining, task, turns, reminder(name), turn_index, partial(RenamedSession, name=name)
            )
        else:
            (rollout,) = [*itertools.islice(taught([task], language, chaining, noise, memory, rng), 1)] or [None]
            if rollout is None or not has_whole_end(rollout.chain):
                continue
            message_list = messages(rollout, language)
            fault_list = faults(task, message_list, HINTED_RULES)
            if not fault_list or rng.random() >= hinted:
                yield rollout
                continue
            fault = rng.choice(fault_list)
            rollout = script_hinted_rollout(
                language,
                chaining,
                task,
                repaired(task, message_list, fault),
                fault.says,
                message_list.index(fault.message),
            )
        if has_whole_end(rollout.chain):
            yield rollout


def has_whole_end(chain: Chain) -> bool:
    """Whether the last turn is whole: a context may end within the word that ends the episode, and then the message
    cannot be played again."""
    return chain.finished and chain.segments[-1].finished
