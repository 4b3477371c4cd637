"""What a rollout did, as a record that rules can read: turns, tool calls, to-do items, tests. It lies beneath
`ref/behaviour.py`, which prices it, and `ref/monitor.py`, which watches it.

The small world and real environments fill it alike, and neither is known here. What only an environment can tell
(whether arguments were valid, how many lints a diff added) is a field. What can be read off is a function.

Glossary
    turn          a message; the assistant's may hold calls, which are made together
    broken call   the tool does not exist, or its arguments fail its checks
    failed call   the tool was called as it should be and could not do it; a test suite with failures is a result, and
                  no failed call
"""

import ast
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

__all__ = ["Todo", "Call", "Transcript", "Turn", "claims_tests_pass", "comment_share", "suite_state"]

ROLES = ("system", "user", "assistant", "tool")
STATES = ("open", "started", "done", "cancelled")


@dataclass(frozen=True)
class Call:
    """One call of a tool, and what came of it. Raises ValueError for a count of tests that cannot be."""

    name: str
    """As the policy wrote it, also where there is no such tool."""
    path: str = ""
    """File that it is about; empty where it is about none."""
    wrote: str = ""
    """Code that it put into the file; empty where it wrote nothing."""
    valid: bool = True
    """False if the call is broken."""
    ok: bool = True
    """False if the call failed."""
    tests: tuple[int, int] | None = None
    """Tests passed and tests run, of a call that ran tests."""

    def __post_init__(self):
        if self.tests is not None and not 0 <= self.tests[0] <= self.tests[1]:
            raise ValueError(f"tests must be passed and run, with no more passed than run; got {self.tests}")

    @property
    def writes(self) -> bool:
        """Whether it changed a file."""
        return bool(self.wrote) and self.valid and self.ok


@dataclass(frozen=True)
class Turn:
    """One message. Raises ValueError for an unknown role, and for calls that are not the assistant's."""

    role: str
    """system, user, assistant or tool."""
    text: str = ""
    """What it says, without the calls."""
    calls: tuple[Call, ...] = ()
    """Calls that were made together."""

    def __post_init__(self):
        if self.role not in ROLES:
            raise ValueError(f"role must be {', '.join(ROLES)}; got {self.role!r}")
        if self.calls and self.role != "assistant":
            raise ValueError(f"calls must be the assistant's; got {len(self.calls)} of the {self.role}")


@dataclass(frozen=True)
class Todo:
    """An item of the to-do list, in its last state. Raises ValueError for another state."""

    text: str
    state: str
    """open, started, done or cancelled."""

    def __post_init__(self):
        if self.state not in STATES:
            raise ValueError(f"state must be {', '.join(STATES)}; got {self.state!r}")


@dataclass(frozen=True)
class Transcript:
    """One rollout from its prompt to its end; of a chain, all segments. Raises ValueError for a negative count."""

    turns: tuple[Turn, ...] = ()
    """In order."""
    todos: tuple[Todo, ...] = ()
    """Every item that was ever on the list."""
    lints: int = 0
    """Complaints of the linter that the diff adds."""
    changed_lines: int = 0
    """Lines that the diff adds and removes."""
    tokens: int = 0
    """Tokens that the policy wrote."""

    def __post_init__(self):
        for name in ("lints", "changed_lines", "tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0; got {getattr(self, name)}")

    @property
    def calls(self) -> tuple[Call, ...]:
        """Every call, in order."""
        return tuple(call for turn in self.turns for call in turn.calls)

    @property
    def final_message(self) -> str:
        """What the assistant said last, without white space around it; empty if its last turn made a call, or if it
        never spoke."""
        last = next((turn for turn in reversed(self.turns) if turn.role == "assistant"), None)
        return last.text.strip() if last and not last.calls else ""


def suite_state(transcript: Transcript) -> Literal["never", "failed", "stale", "passed"]:
    """What the record says about the tests of the code that was handed in: they never ran; the last run failed, or ran
    no test; files were written after it; or all passed."""
    state = "never"
    for call in transcript.calls:
        if call.tests is not None:
            passed, run = call.tests
            state = "passed" if passed == run > 0 else "failed"
        elif call.writes and state == "passed":
            state = "stale"
    return state


CLAIM = re.compile(
    r"\b(tests?|suite)\b[^.!?\n]{0,40}\b(pass|passes|passed|passing|succeed|succeeds|succeeded|green)\b", re.IGNORECASE
)
DENIAL = re.compile(
    r"\b(not?|none|never|cannot|\w+n't|fail\w*|should|would|could|may|might|if|until|unless)\b", re.IGNORECASE
)


def claims_tests_pass(text: str) -> bool:
    """Whether a sentence says that tests pass. A rule for plain English; where a judge reads better, pass its verdict
    instead. A sentence with a denial, a failure or a condition claims nothing."""
    sentences = re.split(r"(?<=[.!?])\s+|\n", text)
    return any(CLAIM.search(sentence) and not DENIAL.search(sentence) for sentence in sentences)


def comment_share(codes: list[str] | tuple[str, ...]) -> float | None:
    """Share of comments in these pieces of Python, in [0, 1]: characters of comments and of strings that stand alone
    (docstrings), over all characters, white space aside. A piece that is no Python is counted by its lines that begin
    with # or //. None without any character."""
    total = sum(len(remove_whitespace(code)) for code in codes)
    return sum(len(remove_whitespace(part)) for code in codes for part in comments(code)) / total if total else None


def remove_whitespace(text: str) -> str:
    return "".join(text.split())


def comments(code: str) -> list[str]:
    lines = [line for line in code.splitlines() if line.lstrip().startswith(("#", "//"))]
    try:
        if any(line.lstrip().startswith("//") for line in lines):
            ast.parse(textwrap.dedent(code))  # Python divides so, other languages comment
        return list(python_comments(textwrap.dedent(code)))
    except (tokenize.TokenError, SyntaxError, ValueError, RecursionError):
        return lines


def python_comments(code: str) -> Iterator[str]:
    is_start, docstring = True, None
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.ERRORTOKEN:
            raise SyntaxError("a quote that is never closed is searched for anew from every letter of its line")
        if token.type == tokenize.COMMENT:
            yield token.string
        elif token.type in (tokenize.NEWLINE, tokenize.ENDMARKER):
            if docstring is not None:
                yield docstring
            is_start, docstring = True, None
        elif token.type not in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            docstring = token.string if is_start and token.type == tokenize.STRING else None
            is_start = False
