"""The committed recordings of `etude play`, for a reader who has nothing installed: python -m etude.play.recording

The bundled checkpoint is sampled on one held-out task, before RL and after it, with the same random numbers. Both are
what `COMMAND` prints in a pipe, line by line; a test samples them again. `block` is what docs/recipe.md shows of them.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import torch
from rich.console import Console

from etude.play.example_agent import BEFORE, FOLDER
from etude.play.play import agent_in, find_checkpoints, play_one, task_of
from etude.play.terminal import show
from kit.disk import atomic_write, read_json
from kit.process import machine
from kit.settings import RunError

__all__ = ["COMMAND", "PATH", "TASK", "block", "recorded", "write"]

PATH = FOLDER.parent / "play.json"
"""Where they lie in a clone."""
TASK = 7
"""The first held-out task that one of the two solves and the other does not."""
COMMAND = f"etude play --task {TASK} --before {BEFORE}"


def recorded() -> str:
    """What the command prints below its first line. Raises RunError where the agents are missing."""
    agents = [agent_in(folder) for folder in find_checkpoints(None, BEFORE)]
    recipe, file = agents[-1].recipe, io.StringIO()
    task = task_of(recipe, TASK, None)
    show([play_one(agent, task, recipe.rl.temperature, 0) for agent in agents], Console(file=file))
    return file.getvalue()


def write(path: Path = PATH) -> Path:
    """Plays and writes the record, whose path it returns."""
    record = {
        "command": COMMAND,
        "by": "python -m etude.play.recording",
        "machine": machine(),
        "lines": recorded().splitlines(),
    }
    atomic_write(path, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return path


def block() -> str:
    """The record in Markdown. Raises RunError if it is missing."""
    try:
        record = read_json(PATH)
        lines, commit = record["lines"], record["machine"]["commit"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RunError(f"{PATH} holds no recording ({error}); make it with: python -m etude.play.recording") from None
    return "\n".join(
        [f"What `{record['command']}` prints (commit {commit}):", "", "```", *(line.rstrip() for line in lines), "```"]
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"record: {write()}")
