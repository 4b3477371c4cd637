"""Training texts of the small world: documents for continued pretraining, demonstrations for fine-tuning.

A document begins like a task. Otherwise a small model never learns to copy file names from a prompt.

A demonstration is an episode of a scripted agent: it reads, writes, tests and finishes. Demonstrations can be
made imperfect on purpose. The policy then learns to react to a failing test, and reinforcement learning finds
faults to remove and alternatives to choose from.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from random import Random

from recipe.microrepo import evaluator
from recipe.microrepo.evaluator import EvaluationError
from recipe.microrepo.language import draw_first, reference, translate
from recipe.microrepo.session import Session
from recipe.microrepo.task import Case, Task, WorldConfig, generate

__all__ = ["NoiseConfig", "demonstration", "document", "documents", "mutate", "transcript"]


@dataclass(frozen=True)
class NoiseConfig:
    """Probabilities of deviations from the clean demonstration. All zero: clean."""

    useless_read: float = 0.15
    """Probability of reading a file that the task does not need."""
    parallel_reads: float = 0.3
    """Probability of reading two helpers in one turn instead of one after the other; not a fault, but an
    alternative."""
    invalid_call: float = 0.1
    """Probability of misspelling a call, which gives an error."""
    skip_read: float = 0.1
    """Probability of writing without reading a helper, guessing what it does."""
    wrong_body: float = 0.2
    """Probability of writing a body with one mistake."""
    untested: float = 0.3
    """Probability of finishing without a test after a wrong body, so the agent never learns of the mistake."""
    skip_test: float = 0.2
    """Probability of finishing without a test after a correct body."""
    stop_early: float = 0.05
    """Probability of finishing before writing anything."""
    guess: float = 0.0
    """Probability, at each reference of a multi-hop task, of writing a guess instead of reading on."""
    give_up: float = 0.0
    """Probability of finishing after a guess that fails its tests, instead of reading on."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 <= getattr(self, field.name) <= 1:
                raise ValueError(f"{field.name} is a probability, got {getattr(self, field.name)}")

    @classmethod
    def clean(cls) -> "NoiseConfig":
        """No noise: the episode that always succeeds, one call per turn."""
        return cls(**{field.name: 0.0 for field in fields(cls)})


def document(task: Task, rng: Random | None = None) -> str:
    """The task and its solution as text: prompt line, helpers, then the target with an inlined body.

    With `rng`, half of the documents of a task that has distractors show one of them in front."""
    module_names = [*task.helpers, task.target]
    distractors = [name for name in task.files if name not in module_names]
    if rng is not None and distractors and rng.random() < 0.5:
        module_names.insert(0, distractors[int(rng.random() * len(distractors))])
    modules = (task.files[name].source(name, f"return {task.files[name].expr}") for name in module_names)
    return "\n".join((task.prompt, *modules)) + "\n"


def documents(rng: Random, config: WorldConfig | None = None) -> Iterator[str]:
    """Endless documents of training tasks, which are compositions. None of their functions is held out, not even among
    the distractors."""
    config = replace(config or WorldConfig(), multi_hop_share=0.0)
    while True:
        yield document(generate(rng, "train", config=config), rng)


TOKENS = re.compile(r"\*\*|//|[-+*]|max|min|\b[abc]\b|\d+")
INTERCHANGEABLE = (("+", "-", "*", "//"), ("max", "min"), ("a", "b", "c"), tuple("0123456789"))


def mutate(expr: str, args: Sequence[str], rng: Random) -> str:
    """`expr` with one operator, function, argument or digit replaced by another of its kind.

    It always parses, but it may still compute the same function, or divide by zero."""
    token = rng.choice(list(TOKENS.finditer(expr)))
    text = token.group()
    if text == "**":
        choices = ["*", "+", "//"]
    else:
        kind = next(kind for kind in INTERCHANGEABLE if text in kind)
        choices = [choice for choice in kind if choice != text and (choice not in "abc" or choice in args)]
    return expr[: token.start()] + rng.choice(choices) + expr[token.end() :]


def _fails(body: str, task: Task, cases: Sequence[Case]) -> bool:
    try:
        parsed_body = evaluator.parse(body, task.files[task.target].args)
        return any(parsed_body.evaluate(case.inputs) != case.want for case in cases)
    except EvaluationError:
        return True


def _make_wrong_body(task: Task, rng: Random, cases: Sequence[Case]) -> str | None:
    """A body with one mistake that `cases` reveal, or None if none was found."""
    module = task.files[task.target]
    for _ in range(20):
        body = f"return {mutate(module.expr, module.args, rng)}"
        if _fails(body, task, cases):
            return body
    return None


def _guess_body(task: Task, skipped_helper: str, rng: Random, cases: Sequence[Case]) -> str | None:
    """A body with a guess for the helper `skipped_helper`, or None if every guess was right by chance."""
    module = task.files[task.target]
    helper_expressions = {name: translate(task.files[name].doc) for name in task.helpers}
    for _ in range(20):
        helper_expressions[skipped_helper] = reference(skipped_helper, draw_first(rng, module.args, 0.5))
        body = f"return {translate(module.doc, helper_expressions).code}"
        if _fails(body, task, cases):
            return body
    return None


def demonstration(task: Task, rng: Random, noise: NoiseConfig | None = None) -> list[str]:
    """The turns of a scripted agent that solves `task` with the imperfections of `noise`; the last turn is `done`."""
    noise = noise or NoiseConfig()
    if task.kind == "multi-hop":
        return _demonstrate_multi_hop(task, rng, noise)
    target, needed_helpers = task.target, [*task.helpers]
    write_prefix = f"write {target}\n    "
    turns = [f"read {target}"]
    if rng.random() < noise.stop_early:
        return [*turns, "done"]

    skipped_helper = rng.choice(needed_helpers) if needed_helpers and rng.random() < noise.skip_read else None
    reads = [f"read {name}" for name in needed_helpers if name != skipped_helper]
    turns += ["\n".join(reads)] if len(reads) > 1 and rng.random() < noise.parallel_reads else reads
    distractors = [name for name in task.files if name != target and name not in needed_helpers]
    if distractors and rng.random() < noise.useless_read:
        turns.insert(rng.randrange(len(turns) + 1), f"read {rng.choice(distractors)}")

    skips_test = rng.random() < noise.untested
    revealing_tests = task.hidden_tests if skips_test else task.visible_tests
    wrong_body = None
    if skipped_helper is not None:
        wrong_body = _guess_body(task, skipped_helper, rng, revealing_tests)
    elif rng.random() < noise.wrong_body:
        wrong_body = _make_wrong_body(task, rng, revealing_tests)
    if wrong_body is not None:
        turns.append(write_prefix + wrong_body)
        if not skips_test:
            turns.append("test")
    if wrong_body is None or not skips_test:
        turns += [f"read {skipped_helper}"] if skipped_helper is not None else []
        turns += _write_answer(task, rng, noise)
    return _end(turns, rng, noise)


def _demonstrate_multi_hop(task: Task, rng: Random, noise: NoiseConfig) -> list[str]:
    """Follows references to the body, or guesses at one of them. Which of `noise` holds: useless_read, invalid_call,
    skip_test, untested (after a guess), stop_early, guess, give_up."""
    write_prefix = f"write {task.target}\n    "
    turns = [f"read {task.target}"]
    if rng.random() < noise.stop_early:
        return [*turns, "done"]
    distractors = [name for name in task.files if name != task.target and name not in task.helpers]
    for name in task.helpers:
        if rng.random() < noise.guess:
            turns.append(write_prefix + _guess_any_body(task, rng))
            if rng.random() < noise.untested:
                return [*turns, "done"]
            turns.append("test")
            if rng.random() < noise.give_up:
                return [*turns, "done"]
        if rng.random() < noise.useless_read:
            turns.append(f"read {rng.choice(distractors)}")
        turns.append(f"read {name}")
    return _end([*turns, *_write_answer(task, rng, noise)], rng, noise)


def _write_answer(task: Task, rng: Random, noise: NoiseConfig) -> list[str]:
    """The turn that writes the answer, and mostly a test of it."""
    turns = [f"write {task.target}\n    {task.answer}"]
    return [*turns, "test"] if rng.random() >= noise.skip_test else turns


def _end(turns: list[str], rng: Random, noise: NoiseConfig) -> list[str]:
    """The turns and `done`, one of them perhaps misspelt at first."""
    turns = [*turns, "done"]
    if rng.random() < noise.invalid_call:
        position = rng.randrange(len(turns))
        turns.insert(position, _misspell(turns[position], rng))
    return turns


def _guess_any_body(task: Task, rng: Random) -> str:
    """A body with one operation that fails the visible tests."""
    args = task.files[task.target].args
    while True:
        body = f"return {draw_first(rng, args, 0.5).code}"
        if _fails(body, task, task.visible_tests):
            return body


def _misspell(turn: str, rng: Random) -> str:
    """The first line of the turn, with two neighbouring letters of its first word swapped."""
    line = turn.split("\n")[0]
    spots = [i for i in range(len(line.split(" ")[0]) - 1) if line[i] != line[i + 1]]
    i = rng.choice(spots)
    return line[:i] + line[i + 1] + line[i] + line[i + 2 :]


def transcript(task: Task, turns: Sequence[str]) -> list[tuple[str, str]]:
    """The episode that `turns` produce, as ("env" | "agent", text), starting with the prompt.

    The output follows each agent entry and is empty after `done`; turns after the end are left out."""
    session = Session(task)
    episode = [("env", session.prompt)]
    for turn in turns:
        if session.done:
            break
        episode += [("agent", turn), ("env", session.step(turn))]
    return episode
