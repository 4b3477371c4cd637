"""Policies that follow a script: what shows that a task, a sandbox and a grader work, before a model is asked."""

from __future__ import annotations

import json
import shlex
import zlib
from collections.abc import Iterable, Mapping, Sequence

from environments.harness.messages import Called, Message, PolicyError, Reply
from environments.harness.tools import Tool

__all__ = ["Script", "call", "fool", "oracle"]


def call(name: str, **arguments: object) -> Called:
    """A call with an id that follows from it."""
    text = json.dumps(arguments)
    return Called(f"{name}-{zlib.crc32(text.encode()):08x}", name, text)


class Script:
    """Says its replies one after the other, whatever it is shown, from number `reply_count` on: an episode that goes on
    has heard so many. Asked for a summary, it says `summary`."""

    def __init__(self, replies: Iterable[Reply], summary: str = "nothing yet", reply_count: int = 0) -> None:
        self.replies, self.summary, self.reply_count = [*replies], summary, reply_count

    def reply(self, messages: Sequence[Message], tools: Sequence[Tool], max_tokens: int) -> Reply:
        """See `Policy`. Raises PolicyError where the script is at its end."""
        if not tools:
            return Reply(self.summary)
        if self.reply_count >= len(self.replies):
            raise PolicyError("the script is at its end")
        self.reply_count += 1
        return self.replies[self.reply_count - 1]


def tests(names: Sequence[str], options: str = "-q") -> Called:
    """Runs tests."""
    return call("shell", command=f"python3 -m pytest {options} " + " ".join(map(shlex.quote, names)))


def oracle(given_files: Mapping[str, bytes], gold: Mapping[str, bytes], visible: Sequence[str]) -> Script:
    """Looks, writes the original code, runs the tests that fail without it, and finishes."""
    changed_paths = sorted(name for name in gold if given_files.get(name) != gold[name])
    look = [call("read", path=name) for name in changed_paths]
    write = [call("write", path=name, text=gold[name].decode("utf-8", "surrogateescape")) for name in changed_paths]
    return Script(
        [
            Reply("I look at what is there.", (*look, tests(visible))),
            Reply("I write what is missing.", tuple(write)),
            Reply("", (tests(visible), *(call("lints", path=name) for name in changed_paths))),
            Reply("", (call("finish", message="It is there again."),)),
        ]
    )


def fool(visible: Sequence[str]) -> Script:
    """Runs the tests, changes nothing, and says that it is done."""
    return Script([Reply("", (tests(visible),)), Reply("", (call("finish", message="All tests pass."),))])
