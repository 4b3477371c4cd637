"""`etude` in processes of its own that begin with everything imported: forks of one that has imported it, once for the whole session.

    process = start("run", "recipe", "--out", out, said=tmp_path / "said")      a multiprocessing.Process: kill(), join(), exitcode
    play("run", "recipe", "--out", out, said=tmp_path / "said")                 waits; fails with what was said where the exit code is not 0

Started anew, each would import torch for seconds first. What is imported there is imported without the tests' checks of shapes.
"""

import multiprocessing
import os
import sys
from pathlib import Path

__all__ = ["play", "start"]

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch._dynamo", "etude.cli", "etude.report", "sims.recipe", "matplotlib.pyplot", "torch.utils.tensorboard"])


def start(*arguments: object, said: Path):
    """A process with the command line `etude arguments`; stdout and stderr go into the file `said`."""
    process = CONTEXT.Process(target=_command_line, args=(list(map(str, arguments)), str(said)))
    process.start()
    return process


def play(*arguments: object, said: Path, seconds: float = 300) -> str:
    """What `etude arguments` says, once it has ended well."""
    process = start(*arguments, said=said)
    process.join(seconds)
    process.kill()
    process.join()
    assert process.exitcode == 0, said.read_text()
    return said.read_text()


def _command_line(arguments: list[str], said: str) -> None:
    file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1), os.dup2(file, 2)
    sys.argv = ["etude", *arguments]
    from etude import cli

    cli.main()
