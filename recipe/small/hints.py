"""Hints by rule for the small world: where a rollout broke a rule, and what its teacher is told there
(`ref/textual_feedback.py`).

    … <|env|> answer              <|agent|> raed m3 <|env|>        the student
    … <|env|> answer              <|agent|> raed m3 <|env|>        the teacher: the environment's turn has one line more
              error: no such call

The environment says the hint, as one more line of what it said last, before the policy's message. The tiny agent has
read such lines: several calls of a turn are answered so, one below the other. It was never told rules in English, so
hints are as short as errors, and use their words.

A rule is a function of the task, the messages so far and this message. It says what is wrong in a few words, or None.
`RULES` stand in the order in which they count, because a message has one hint: the gravest fault is told, and a broken
call makes others moot.

    rule         fires where                                                               says, for example
    tool         there is no such call                                                     error: no such call
    argument     a call has a file or a body that is refused                               error: fix m3
    unread       the target is written, and it or a helper is not in the context           error: m7 not read
    summary      a file that the task needs was in the context and is not in the summary   error: note without m3
    unfinished   the policy ends without a body, or with one whose tests fail              error: no body
    untested     the policy ends with a body that was not tested                           error: not tested
    needless     a call could only say what the context says, or nothing of use            error: m5 not needed

`FEEDBACK` is the setting of SDPO (arXiv:2601.20802) instead: the teacher reads the error with which the environment
will answer this very message. There a policy's words come back, as in "unknown name foo". No hint is given that shares
a run of tokens with the task's answer or with its message and has it from nowhere else (`leaked`).
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from recipe.microrepo import Session, Task
from recipe.small.agent import Language
from recipe.small.settings import Hints
from recipe.small.transcripts import TOOLS, Message, messages
from ref.rollout import Rollout
from ref.self_summary import Chain
from ref.textual_feedback import Hint, leaked

__all__ = ["FEEDBACK", "RULES", "Fault", "Rule", "faults", "hint_rollouts", "hints", "leaks", "shuffled"]

RuleCheck = Callable[[Task, Sequence[Message], Message], str | None]


@dataclass(frozen=True)
class Rule:
    """What a message must not do."""

    name: str
    says: RuleCheck
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


def check_tool(task: Task, earlier: Sequence[Message], message: Message) -> str | None:
    return next(
        (answer for call, answer in zip(message.calls, message.answers) if not call.valid and call.name not in TOOLS),
        None,
    )


def check_argument(task: Task, earlier: Sequence[Message], message: Message) -> str | None:
    for call, answer in zip(message.calls, message.answers):
        if call.valid or call.name not in TOOLS:
            continue
        if answer == "error: no such file":
            return f"{answer}, {task.prompt}"
        if call.name == "write" and call.path in task.files:
            return f"error: fix {task.target}" if call.path != task.target else "error: not a body"
        return answer
    return None


def check_unread(task: Task, earlier: Sequence[Message], message: Message) -> str | None:
    if not any(call.writes for call in message.calls):
        return None
    return next(
        (
            f"error: {name} not read"
            for name in (task.target, *task.helpers)
            if not is_shown(task, name, message.context_before)
        ),
        None,
    )


def check_summary(task: Task, earlier: Sequence[Message], message: Message) -> str | None:
    if not message.summary or find_state(earlier) == "passed":
        return None
    lost_names = (
        name
        for name in (task.target, *task.helpers)
        if is_shown(task, name, message.context_before) and not is_noted(task, name, message.text)
    )
    return next((f"error: note without {name}" for name in lost_names), None)


def check_unfinished(task: Task, earlier: Sequence[Message], message: Message) -> str | None:
    if not ends_episode(message):
        return None
    return {"": "error: no body", "failed": "error: tests fail"}.get(find_state([*earlier, message]))


def check_untested(task: Task, earlier: Sequence[Message], message: Message) -> str | None:
    return "error: not tested" if ends_episode(message) and find_state([*earlier, message]) == "written" else None


def check_needless(task: Task, earlier: Sequence[Message], message: Message) -> str | None:
    read_paths: set[str] = set()
    for number, call in enumerate(message.calls):
        messages_so_far = [*earlier, replace(message, calls=message.calls[:number])]
        status = find_state(messages_so_far)
        if status == "passed" and call.name != "done":
            return "error: passed"
        if call.name == "read" and call.valid:
            if call.path not in (task.target, *task.helpers):
                return f"error: {call.path} not needed"
            if (is_shown(task, call.path, message.context_before) or call.path in read_paths) and not (
                call.path == task.target and status
            ):
                return f"error: {call.path} known"
            read_paths.add(call.path)
        if call.name == "test" and not status:
            return "error: no body"
        if call.name == "test" and status == "failed" or call.writes and call.wrote == find_body(messages_so_far):
            return "error: nothing new"
    return None


def report_errors(task: Task, earlier: Sequence[Message], message: Message) -> str | None:
    return "\n".join(answer for call, answer in zip(message.calls, message.answers) if not call.valid) or None


RULES = (
    Rule("tool", check_tool),
    Rule("argument", check_argument),
    Rule("unread", check_unread),
    Rule("summary", check_summary),
    Rule("unfinished", check_unfinished),
    Rule("untested", check_untested),
    Rule("needless", check_needless),
)
FEEDBACK = (Rule("feedback", report_errors),)


def ends_episode(message: Message) -> bool:
    """Whether the policy ends the episode here."""
    return any(call.name == "done" and call.valid for call in message.calls)


def find_body(message_list: Sequence[Message]) -> str | None:
    """The target's body after these messages."""
    return next(
        (call.wrote for message in reversed(message_list) for call in reversed(message.calls) if call.writes), None
    )


def find_state(message_list: Sequence[Message]) -> str:
    """What these messages have come to: "" without a body, then written, failed or passed."""
    status = ""
    for call in (call for message in message_list for call in message.calls):
        if call.writes:
            status = "written"
        elif call.tests is not None and status:
            status = "passed" if call.tests[0] == call.tests[1] else "failed"
    return status


def is_shown(task: Task, name: str, text: str) -> bool:
    """Whether the text of a file stands in what the policy was given, as the environment answers or as a summary notes
    it."""
    module = task.files[name]
    return module.source(name, None if name == task.target else f"return {module.expr}") in text or is_noted(
        task, name, text
    )


def is_noted(task: Task, name: str, text: str) -> bool:
    """Whether a summary holds what the task needs of a file: of the target its docstring, of a helper what it
    returns."""
    module = task.files[name]
    if name == task.target:
        forms = (f"def {name}({', '.join(module.args)}): {module.doc}",)
    else:
        forms = (f"{name} is {module.expr}", f"{name}: {module.doc} is {module.expr}")
    padded_text = f"{text}, ".replace("<|", ", <|")
    return any(f"{form}, " in padded_text for form in forms)


def faults(task: Task, message_list: Sequence[Message], rules: Sequence[Rule] = RULES) -> list[Fault]:
    """The faults of an episode, one for each message at most: of the rules that it broke, the first. What a limit cut
    off breaks none, because nothing was called."""
    fault_list = []
    for number, message in enumerate(message_list):
        violations = (
            ((rule.name, rule.says(task, message_list[:number], message)) for rule in rules) if message.is_whole else ()
        )
        fault_list += [Fault(name, text, message) for name, text in violations if text][:1]
    return fault_list


def shuffled(rollouts: Sequence[Sequence[Fault]], seed: int) -> list[list[Fault]]:
    """A control: the same faults in the same places, and each is told what was said of one in another rollout. Every
    text is used once.

    No fault keeps its rollout's text, unless one rollout has more than half of all. Equal texts stay equal, and a text
    may fit by chance."""
    order = [number for number, rollout_faults in enumerate(rollouts) if rollout_faults]
    random.Random(seed).shuffle(order)
    texts = [fault.says for number in order for fault in rollouts[number]]
    # In a circle of rollouts, a step as long as the longest of them leaves each.
    step = max((len(rollout_faults) for rollout_faults in rollouts), default=0)
    rotated_texts = iter(texts[step:] + texts[:step])
    shuffled_faults = {
        number: [replace(fault, says=next(rotated_texts)) for fault in rollouts[number]] for number in order
    }
    return [shuffled_faults.get(number, []) for number in range(len(rollouts))]


def hints(language: Language, task: Task, chain: Chain, fault_list: Sequence[Fault]) -> list[list[Hint]]:
    """For every context of the chain the hints that its teacher reads, for `ref.textual_feedback.hinted`. A hint that
    leaks is not given."""
    hints_by_context: list[list[Hint]] = [[] for _ in chain.segments]
    for fault in fault_list:
        message = fault.message
        context = chain.segments[message.segment].tokens[: message.begin].tolist()
        if context[-1] != language.agent:
            raise ValueError(f"a message must follow the agent's token; token {message.begin - 1} is {context[-1]}")
        hint = language.encode(f"\n{fault.says}")
        if not leaks(language, task, hint, message, context):
            hints_by_context[message.segment].append(Hint(message.begin - 1, hint, message.begin, message.end))
    return hints_by_context


def leaks(language: Language, task: Task, hint: Sequence[int], message: Message, context: Sequence[int]) -> bool:
    """Whether a hint gives the task's answer away, or its message, as `ref.textual_feedback.leaked` finds it."""
    return any(
        leaked(hint, language.encode(secret), context) is not None for secret in (task.answer, message.text) if secret
    )


def hint_rollouts(
    rollouts: Sequence[Rollout], seed: int, language: Language, settings: Hints
) -> list[list[list[Hint]]]:
    """The hints of a step's finished rollouts, for every context of every chain. `seed` draws which texts are
    exchanged.

    Turns are played once more, in memory; an episode on disk says the same. Raises TypeError for a rollout in another
    world."""
    rules = FEEDBACK if settings.source == "error" else [rule for rule in RULES if rule.name in settings.rules]
    for rollout in rollouts:
        if not (rollout.failure or isinstance(session := getattr(rollout.environment, "session", None), Session)):
            raise TypeError(
                f"hints are for rollouts in the small world, got one in {type(session or rollout.environment).__name__}"
            )
    fault_lists = [
        [] if episode.failure else faults(episode.task, messages(episode, language), rules) for episode in rollouts
    ]
    if settings.source == "shuffled":
        fault_lists = shuffled(fault_lists, seed)
    if settings.source == "bare":
        fault_lists = [[replace(fault, says="error") for fault in rollout_faults] for rollout_faults in fault_lists]
    return [
        hints(language, episode.task, episode.chain, episode_faults)
        for episode, episode_faults in zip(rollouts, fault_lists, strict=True)
    ]
