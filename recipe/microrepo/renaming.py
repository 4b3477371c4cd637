"""A call of the small world that has another name than the one an agent knows.

    write m3                the name that demonstrations use: "error: no such call"
        return a + b
    put m3                  the name that works here
        return a + b

Whoever writes nothing repairs nothing: no rollout of an agent that goes on to say `write` is ever paid. All else is as
in `Session`."""

from recipe.microrepo.session import Session
from recipe.microrepo.task import Task

__all__ = ["DEMONSTRATED_NAME", "RenamedSession", "renamed"]

DEMONSTRATED_NAME = "write"
"""The name of the call elsewhere."""


def renamed(text: str, name: str) -> str:
    """The same turn with both names of the call exchanged, wherever one begins a line."""
    exchange = {DEMONSTRATED_NAME: name, name: DEMONSTRATED_NAME}
    lines = (line.split(" ") for line in text.split("\n"))
    return "\n".join(" ".join([exchange.get(call, call), *arguments]) for call, *arguments in lines)


class RenamedSession(Session):
    """An episode in which a body is written by the call `name`."""

    def __init__(self, task: Task, max_turns: int = 12, name: str = "put") -> None:
        super().__init__(task, max_turns)
        self.name = name

    def step(self, text: str) -> str:
        return super().step(renamed(text, self.name))
