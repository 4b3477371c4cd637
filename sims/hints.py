"""Hints by rule for the small world: where a rollout broke a rule, and what its teacher is told there (`ref/textual_feedback.py`).

    … <|env|> answer              <|agent|> raed m3 <|env|>        the student
    … <|env|> answer              <|agent|> raed m3 <|env|>        the teacher: the environment's turn has one line more
              error: no such call

The environment says the hint, as one more line of what it said last, before the policy's message. The tiny agent has read such lines: several calls
of a turn are answered so, one below the other. It was never told rules in English, so hints are as short as errors, and use their words.

A rule is a function of the task, the messages so far and this message. It says what is wrong in a few words, or None. `RULES` stand in the order
in which they count, because a message has one hint: the gravest fault is told, and a broken call makes others moot.

    rule         fires where                                                               says, for example
    tool         there is no such call                                                     error: no such call
    argument     a call has a file or a body that is refused                               error: fix m3
    unread       the target is written, and it or a helper is not in the context           error: m7 not read
    summary      a file that the task needs was in the context and is not in the summary   error: note without m3
    unfinished   the policy ends without a body, or with one whose tests fail              error: no body
    untested     the policy ends with a body that was not tested                           error: not tested
    needless     a call could only say what the context says, or nothing of use            error: m5 not needed

`FEEDBACK` is the setting of SDPO (arXiv:2601.20802) instead: the teacher reads the error with which the environment will answer this very message.
There a policy's words come back, as in "unknown name foo". No hint is given that shares a run of tokens with the task's answer or with its
message and has it from nowhere else (`leaked`).
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ref.rollout import Rollout
from ref.self_summary import Chain
from ref.textual_feedback import Hint, leaked
from sims.microrepo import Session, Task
from sims.recipe.agent import Language
from sims.recipe.settings import Hints
from sims.transcripts import TOOLS, Message, messages

__all__ = ["FEEDBACK", "RULES", "Fault", "Rule", "faults", "given", "hints", "leaks", "shuffled"]

Says = Callable[[Task, Sequence[Message], Message], str | None]


@dataclass(frozen=True)
class Rule:
    """What a message must not do."""

    name: str
    says: Says
    """The hint for a message of this task after these; None if the message keeps the rule."""


@dataclass(frozen=True)
class Fault:
    """A message that broke a rule."""

    rule: str
    """Name of the rule."""
    says: str
    """What the teacher is told, without a line break in front."""
    message: Message
    """Where."""


def tool(task: Task, before: Sequence[Message], this: Message) -> str | None:
    return next((said for call, said in zip(this.calls, this.answers) if not call.valid and call.name not in TOOLS), None)


def argument(task: Task, before: Sequence[Message], this: Message) -> str | None:
    for call, said in zip(this.calls, this.answers):
        if call.valid or call.name not in TOOLS:
            continue
        if said == "error: no such file":
            return f"{said}, {task.prompt}"
        if call.name == "write" and call.path in task.files:
            return f"error: fix {task.target}" if call.path != task.target else "error: not a body"
        return said
    return None


def unread(task: Task, before: Sequence[Message], this: Message) -> str | None:
    if not any(call.writes for call in this.calls):
        return None
    return next((f"error: {name} not read" for name in (task.target, *task.helpers) if not shown(task, name, this.given)), None)


def summary(task: Task, before: Sequence[Message], this: Message) -> str | None:
    if not this.summary or state(before) == "passed":
        return None
    lost = (name for name in (task.target, *task.helpers) if shown(task, name, this.given) and not noted(task, name, this.text))
    return next((f"error: note without {name}" for name in lost), None)


def unfinished(task: Task, before: Sequence[Message], this: Message) -> str | None:
    if not ends(this):
        return None
    return {"": "error: no body", "failed": "error: tests fail"}.get(state([*before, this]))


def untested(task: Task, before: Sequence[Message], this: Message) -> str | None:
    return "error: not tested" if ends(this) and state([*before, this]) == "written" else None


def needless(task: Task, before: Sequence[Message], this: Message) -> str | None:
    read: set[str] = set()
    for number, call in enumerate(this.calls):
        so_far = [*before, replace(this, calls=this.calls[:number])]
        now = state(so_far)
        if now == "passed" and call.name != "done":
            return "error: passed"
        if call.name == "read" and call.valid:
            if call.path not in (task.target, *task.helpers):
                return f"error: {call.path} not needed"
            if (shown(task, call.path, this.given) or call.path in read) and not (call.path == task.target and now):
                return f"error: {call.path} known"
            read.add(call.path)
        if call.name == "test" and not now:
            return "error: no body"
        if call.name == "test" and now == "failed" or call.writes and call.wrote == body(so_far):
            return "error: nothing new"
    return None


def feedback(task: Task, before: Sequence[Message], this: Message) -> str | None:
    return "\n".join(said for call, said in zip(this.calls, this.answers) if not call.valid) or None


RULES = (
    Rule("tool", tool),
    Rule("argument", argument),
    Rule("unread", unread),
    Rule("summary", summary),
    Rule("unfinished", unfinished),
    Rule("untested", untested),
    Rule("needless", needless),
)
FEEDBACK = (Rule("feedback", feedback),)


def ends(this: Message) -> bool:
    """Whether the policy ends the episode here."""
    return any(call.name == "done" and call.valid for call in this.calls)


def body(found: Sequence[Message]) -> str | None:
    """The target's body after these messages."""
    return next((call.wrote for one in reversed(found) for call in reversed(one.calls) if call.writes), None)


def state(found: Sequence[Message]) -> str:
    """What these messages have come to: "" without a body, then written, failed or passed."""
    now = ""
    for call in (call for one in found for call in one.calls):
        if call.writes:
            now = "written"
        elif call.tests is not None and now:
            now = "passed" if call.tests[0] == call.tests[1] else "failed"
    return now


def shown(task: Task, name: str, text: str) -> bool:
    """Whether the text of a file stands in what the policy was given, as the environment answers or as a summary notes it."""
    module = task.files[name]
    return module.source(name, None if name == task.target else f"return {module.expr}") in text or noted(task, name, text)


def noted(task: Task, name: str, text: str) -> bool:
    """Whether a summary holds what the task needs of a file: of the target its docstring, of a helper what it returns."""
    module = task.files[name]
    if name == task.target:
        forms = (f"def {name}({', '.join(module.args)}): {module.doc}",)
    else:
        forms = (f"{name} is {module.expr}", f"{name}: {module.doc} is {module.expr}")
    ended = f"{text}, ".replace("<|", ", <|")
    return any(f"{form}, " in ended for form in forms)


def faults(task: Task, found: Sequence[Message], rules: Sequence[Rule] = RULES) -> list[Fault]:
    """The faults of an episode, one for each message at most: of the rules that it broke, the first. What a limit cut off breaks none, because
    nothing was called."""
    broken = []
    for number, this in enumerate(found):
        told = ((rule.name, rule.says(task, found[:number], this)) for rule in rules) if this.whole else ()
        broken += [Fault(name, said, this) for name, said in told if said][:1]
    return broken


def shuffled(rollouts: Sequence[Sequence[Fault]], seed: int) -> list[list[Fault]]:
    """A control: the same faults in the same places, and each is told what was said of one in another rollout. Every text is used once.

    No fault keeps its rollout's text, unless one rollout has more than half of all. Equal texts stay equal, and a text may fit by chance."""
    order = [number for number, broken in enumerate(rollouts) if broken]
    random.Random(seed).shuffle(order)
    texts = [fault.says for number in order for fault in rollouts[number]]
    # In a circle of rollouts, a step as long as the longest of them leaves each.
    step = max((len(broken) for broken in rollouts), default=0)
    turned = iter(texts[step:] + texts[:step])
    told = {number: [replace(fault, says=next(turned)) for fault in rollouts[number]] for number in order}
    return [told.get(number, []) for number in range(len(rollouts))]


def hints(language: Language, task: Task, chain: Chain, broken: Sequence[Fault]) -> list[list[Hint]]:
    """For every context of the chain the hints that its teacher reads, for `ref.textual_feedback.hinted`. A hint that leaks is not given."""
    found: list[list[Hint]] = [[] for _ in chain.segments]
    for fault in broken:
        one = fault.message
        context = chain.segments[one.segment].tokens[: one.begin].tolist()
        if context[-1] != language.agent:
            raise ValueError(f"a message must follow the agent's token; token {one.begin - 1} is {context[-1]}")
        hint = language.encode(f"\n{fault.says}")
        if not leaks(language, task, hint, one, context):
            found[one.segment].append(Hint(one.begin - 1, hint, one.begin, one.end))
    return found


def leaks(language: Language, task: Task, hint: Sequence[int], one: Message, context: Sequence[int]) -> bool:
    """Whether a hint gives the task's answer away, or its message, as `ref.textual_feedback.leaked` finds it."""
    return any(leaked(hint, language.encode(secret), context) is not None for secret in (task.answer, one.text) if secret)


def given(rollouts: Sequence[Rollout], seed: int, language: Language, how: Hints) -> list[list[list[Hint]]]:
    """The hints of a step's finished rollouts, for every context of every chain. `seed` draws which texts are exchanged.

    Turns are played once more, in memory; an episode on disk says the same. Raises TypeError for a rollout in another world."""
    rules = FEEDBACK if how.source == "error" else [rule for rule in RULES if rule.name in how.rules]
    for rollout in rollouts:
        if not (rollout.failure or isinstance(session := getattr(rollout.environment, "session", None), Session)):
            raise TypeError(f"hints are for rollouts in the small world, got one in {type(session or rollout.environment).__name__}")
    broken = [[] if one.failure else faults(one.task, messages(one, language), rules) for one in rollouts]
    if how.source == "shuffled":
        broken = shuffled(broken, seed)
    if how.source == "bare":
        broken = [[replace(fault, says="error") for fault in one] for one in broken]
    return [hints(language, one.task, one.chain, some) for one, some in zip(rollouts, broken, strict=True)]
