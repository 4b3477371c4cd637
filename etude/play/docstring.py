"""Another docstring for a task of the small world: what a reader types becomes a task with its own answer and tests."""

from __future__ import annotations

import re
from dataclasses import replace

from kit.settings import RunError
from recipe.microrepo import Task
from recipe.microrepo.evaluator import EvaluationError
from recipe.microrepo.language import BINARY, UNARY, translate

__all__ = ["GRAMMAR", "MAX_OPERATIONS", "rewritten"]

MAX_OPERATIONS = 8
"""Operations that a docstring may have: `square` doubles the digits of a number, and so do eight of them 256 times."""
GRAMMAR = f"two operands around plus, minus or times, or behind larger or smaller, \
or one behind {', '.join(UNARY[:-1])} or {UNARY[-1]}; \
then steps such as “then plus 3” or “then half”"


def rewritten(task: Task, doc: str) -> Task:
    """The task with another docstring of its target; answer and tests follow. Its operands are the target's arguments,
    digits and other files. Raises RunError: one line that says what a docstring may be."""
    doc, module = " ".join(doc.split()), task.files[task.target]
    other_files = {name: file for name, file in task.files.items() if name != task.target}
    if sum(word in (*BINARY, *UNARY) for word in doc.split()) > MAX_OPERATIONS:
        raise RunError(f"the docstring of {task.target} may have at most {MAX_OPERATIONS} operations")
    try:
        helpers = {name: translate(file.doc) for name, file in other_files.items() if name in doc.split()}
        translation = translate(doc, helpers)
    except ValueError as error:
        operands = [*module.args, "0 to 9", *other_files]
        raise RunError(f"{error}; a docstring is {GRAMMAR}; operands are {', '.join(operands)}") from None
    if missing := sorted(set(re.findall(r"\b[abc]\b", translation.code)) - {*module.args}):
        raise RunError(
            f"{task.target} has no argument {' or '.join(missing)}, which its docstring uses; it has "
            f"{', '.join(module.args)}"
        )
    names = tuple(dict.fromkeys(word for word in doc.split() if word in helpers))
    edited = replace(
        task,
        files=task.files | {task.target: module._replace(doc=translation.phrase, expr=translation.code)},
        depth=len(names),
        helpers=names,
    )
    try:
        edited.hidden_tests  # noqa: B018 – makes the tests, which evaluate the answer
    except EvaluationError as error:
        raise RunError(f"the docstring of {task.target} describes a function without a value: {error}") from None
    return edited
