"""Messages with a fault and their hints, for the explorer's page of textual feedback: hints.json of
`sims/examples/runs.py`.

Of each rule of `recipe/small/hints.py` the first faults in the agent's own rollouts are kept, one of a rollout, and no
two are told the same. So what was said of another one, the control, is always another text. A hint that leaks is not
given, and its fault not kept."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from recipe.microrepo import Task
from recipe.small.agent import Language, parted
from recipe.small.hints import RULES, Fault, faults, hints, shuffled
from recipe.small.transcripts import messages
from ref.rollout import Rollout

__all__ = ["FAULTS_PER_RULE", "hinted_messages"]

FAULTS_PER_RULE = 2
"""Faults of each rule."""


def hinted_messages(
    language: Language, tasks: Sequence[Task], episodes: Sequence[Rollout], temperature: float, seed: int
) -> dict[str, Any]:
    """Plain values: `temperature`, at which the rollouts were sampled; `played`, how many there are; `chosen`, the rule
    of choice; and `rollouts`, each the context of one fault. The rollouts of a task are adjacent, as many of each.
    `seed` draws who is told what was said of whom.

    tokens, own              ids of the whole context, and from where to where the policy wrote: [begin, end) of each
                             message
    begin, end, text, logp   the message with the fault, and its log-probability as the sampler noted it, nats
    rule, says, other        the rule that it broke, what its teacher is told, and what the teacher of another one is
                             told
    task, answer, success    prompt, a right body, and whether all hidden tests pass in the end"""
    fault_items: list[tuple[Task, Rollout, Fault]] = []
    for number, episode in enumerate(episodes):
        task = tasks[number * len(tasks) // len(episodes)]
        rule_counts, used_texts = (
            Counter(fault.rule for *_, fault in fault_items),
            {fault.says for *_, fault in fault_items},
        )
        new_faults = (
            fault
            for fault in faults(task, messages(episode, language))
            if rule_counts[fault.rule] < FAULTS_PER_RULE and fault.says not in used_texts
        )
        fault_items += [
            (task, episode, fault) for fault in new_faults if any(hints(language, task, episode.chain, [fault]))
        ][:1]
    names = [rule.name for rule in RULES]
    # Stable: those of a rule stay in the order in which they were played
    fault_items.sort(key=lambda item: names.index(item[2].rule))
    other_faults = shuffled([[fault] for *_, fault in fault_items], seed)
    return {
        "temperature": temperature,
        "played": len(episodes),
        "chosen": f"of each rule the first {FAULTS_PER_RULE} faults, one of a rollout, no two of which are told "
        f"the same",
        "rollouts": [
            describe_context(language, *item, other_fault.says)
            for item, (other_fault,) in zip(fault_items, other_faults, strict=True)
        ],
    }


def describe_context(language: Language, task: Task, episode: Rollout, fault: Fault, other_says: str) -> dict[str, Any]:
    """The context of one fault."""
    message = fault.message
    segment = episode.chain.segments[message.segment]
    return {
        "task": task.prompt,
        "answer": task.answer,
        "success": bool(episode.metrics["tests"]),
        "rule": fault.rule,
        "says": fault.says,
        "other": other_says,
        "text": message.text,
        "begin": message.begin,
        "end": message.end,
        "logp": round(float(segment.logp[message.begin : message.end].double().sum()), 6),
        "own": [[span.start, span.stop] for span, is_own in parted(segment, language.env) if is_own],
        "tokens": segment.tokens.tolist(),
    }
