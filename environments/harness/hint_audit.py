"""Does a hint tell what the agent has to find? A hint that gives the answer distils the answer.

Refused is a hint with something that only the original code has, or the tests that are held out: a row of RUN tokens, a
whole line of at least three, a name, a number, or a word in quotes. What the given tree says is no secret, nor what the
context says before the reply. A hint that quotes what the reply says or writes is refused too: a policy that reads its
own message copies it.

What is not found: the answer in other words. So who asks a judge tells it nothing that it need not know.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from environments.fingerprint import COMMENT, EVERYDAY, RUN, extract_removed_code, runs, tokens
from environments.grading.guarded import Exam
from environments.harness.hints import SAYS, Fault
from environments.harness.messages import Message
from environments.harness.turns import arguments, words_of
from environments.tasks.make import Task
from environments.tasks.package import Package

__all__ = ["Secret", "make_secret", "refusal"]

TELLING = re.compile(r"[^\W\d]\w{2,}|\d[\w.]{2,}")
"""Tokens that can tell something alone: names and numbers of three characters and more."""
STRING = re.compile(r'"{3}[\s\S]*?"{3}|\'{3}[\s\S]*?\'{3}|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'')
SHORTEST = 3
"""Tokens of a line that is looked for as a whole."""
WRITTEN_ARGUMENTS = ("text", "old", "new")
"""Arguments that hold what a reply writes."""


def _tokenize(text: str) -> list[str]:
    """Tokens of a text, what it says behind a # included. A number at the end of a sentence is without its full
    stop."""
    return [token.rstrip(".") if token[0].isdigit() else token for token in tokens(text.replace("#", " "))]


def _find_shared_run(row: Sequence[str], secret: set[tuple[str, ...]], context: Sequence[str]) -> str:
    """The first RUN tokens of a row that are secret, and not known from another one; empty for none."""
    secret_runs = secret - runs(context)
    return next(
        (" ".join(row[at : at + RUN]) for at in range(len(row) - RUN + 1) if tuple(row[at : at + RUN]) in secret_runs),
        "",
    )


def _drop_prose(text: str) -> str:
    """Code without the strings that are prose: their words are anybody's, and rows of them are found."""
    return STRING.sub(lambda match: '""' if " " in match[0] else match[0], text)


def _telling_tokens(row: Sequence[str]) -> set[str]:
    return {token for token in row if TELLING.fullmatch(token) and token not in EVERYDAY}


@dataclass(frozen=True)
class Secret:
    """What a hint must not tell."""

    code: tuple[str, ...]
    """Code that was taken out, and tests that are held out, a text for each place."""
    given_texts: tuple[str, ...] = ()
    """The files that the agent begins with: nothing in them is secret."""

    @cached_property
    def given_tokens(self) -> tuple[set[tuple[str, ...]], set[str]]:
        """Rows and telling tokens of the files that are given."""
        rows = [_tokenize(text) for text in self.given_texts]
        return set().union(*map(runs, rows)), set().union(*map(_telling_tokens, rows))

    @cached_property
    def rows(self) -> set[tuple[str, ...]]:
        """Rows of RUN tokens of the secret code."""
        return set().union(*(runs(_tokenize(text)) for text in self.code)) - self.given_tokens[0]

    @cached_property
    def lines(self) -> set[tuple[str, ...]]:
        """Its lines that are shorter."""
        code_lines = {tuple(tokens(line)) for text in self.code for line in text.splitlines()}
        given_lines = {tuple(_tokenize(line)) for text in self.given_texts for line in text.splitlines()}
        return {line for line in code_lines - given_lines if SHORTEST <= len(line) < RUN}

    @cached_property
    def names(self) -> set[str]:
        """Its telling tokens."""
        return (
            set().union(*(_telling_tokens(_tokenize(_drop_prose(COMMENT.sub("", text)))) for text in self.code))
            - self.given_tokens[1]
        )

    def find_leak(self, hint: str, context: str = "") -> str:
        """What a hint tells of it that the context does not; empty for nothing."""
        row, context_row = _tokenize(hint), _tokenize(context)
        if shared_run := _find_shared_run(row, self.rows, context_row):
            return shared_run
        for line in sorted(self.lines):
            if holds(row, line) and not holds(context_row, line):
                return " ".join(line)
        names = self.names - {*context_row}
        return next((token for token in row if token in names), "")


def holds(row: Sequence[str], line: Sequence[str]) -> bool:
    """Whether tokens stand one behind the other in a row."""
    return any(tuple(row[at : at + len(line)]) == tuple(line) for at in range(len(row) - len(line) + 1))


def find_quotation(hint: str, message: Message, context: str) -> str:
    """A row of tokens that a hint has of what a message says or writes, and the context does not; empty for none."""
    written_texts = [
        value
        for call in message.calls
        for name, value in arguments(call).items()
        if name in WRITTEN_ARGUMENTS and isinstance(value, str)
    ]
    message_runs = set().union(*(runs(_tokenize(text)) for text in (message.text, *written_texts)))
    return _find_shared_run(_tokenize(hint), message_runs, _tokenize(context))


def make_secret(task: Task, package: Package, exam: Exam) -> Secret:
    """What no hint may tell: the code that was taken out, and what is held out of the tests. Not what the agent was
    given."""
    code = [
        extract_removed_code(edit.old.decode(errors="replace"), edit.new.decode(errors="replace"))
        for patch in task.piece.patches
        for edit in patch.edits
    ]
    for name, data in package.tests.items():
        full_lines, given_lines = (text.decode(errors="replace").splitlines() for text in (data, exam.given_tree[name]))
        code.append(
            "\n".join(line[2:] for line in difflib.ndiff(given_lines, full_lines) if line.startswith("+ "))
            if full_lines != given_lines
            else ""
        )
    return Secret(tuple(filter(None, code)), tuple(data.decode(errors="replace") for data in exam.given_tree.values()))


def refusal(fault: Fault, secret: Secret) -> str:
    """Why a hint is not given; empty for a good one. A rule's own words tell nothing of any task."""
    context = "\n".join(map(words_of, fault.turn.before))
    if leak := secret.find_leak(fault.says, f"{context}\n{SAYS.get(fault.rule, '')}"):
        return f"it tells of the solution: {leak}"
    if quotation := find_quotation(fault.says, fault.turn.reply, context):
        return f"it quotes the reply: {quotation}"
    return ""
