"""`etude`, or a function, in processes of its own that begin with everything imported: forks of one that has imported
it, once for the whole session.

    process = start("run", "recipe", "--out", out, said=tmp_path / "said")      a multiprocessing.Process: kill(),
                                                                                join(), exitcode
    play("run", "recipe", "--out", out, said=tmp_path / "said")                 waits; fails with what was said where
                                                                                the exit code is not 0
    begin(function, x, y, said=…)                                               calls a function there
    end(process, said)                                                          the same for one that was started

Started anew, each would import torch for seconds first. What is imported there is imported without the tests' checks of
shapes."""

import atexit
import multiprocessing
import os
import sys
from pathlib import Path

__all__ = ["CORPUS", "begin", "end", "play", "smallest", "start"]

CORPUS = Path(__file__).resolve().parents[1] / "ref"

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch._dynamo",
        "etude.cli.main",
        "etude.report.page",
        "recipe.small.stages",
        "scaled.rl",
        "scaled.pretrain",
        "matplotlib.pyplot",
        "tensorboard.compat.proto.summary_pb2",
        "tensorboard.summary.writer.record_writer",
        "tests.mirror.fault_parts",
        "tests.mirror.group_parts",
    ]
)


def smallest(out: Path, *more: object) -> tuple:
    """The words of `etude run recipe` at its smallest, on the source of `ref`: the standard library takes seconds to
    read and to score."""
    from kit.runs import flatten
    from sims.policies import SMOKE

    sets = (
        f"{key}={','.join(map(str, value)) if isinstance(value, tuple) else value}"
        for key, value in flatten(SMOKE).items()
    )
    return "run", "recipe", "--out", out, "--corpus", CORPUS, *(word for one in sets for word in ("--set", one)), *more


def begin(function, *arguments: object, said: Path | str = os.devnull):
    """A process that calls a function; stdout and stderr go into the file `said`."""
    process = CONTEXT.Process(target=_heard, args=(str(said), function, arguments))
    process.start()
    atexit.register(process.kill)  # where a test failed before it ended; Python would wait for it
    return process


def start(*arguments: object, said: Path, threads: int = 1):
    """A process with the command line `etude arguments`, as under OMP_NUM_THREADS=threads."""
    return begin(command_line, threads, *map(str, arguments), said=said)


def play(*arguments: object, said: Path, seconds: float = 300) -> str:
    """What `etude arguments` says, once it has ended well."""
    return end(start(*arguments, said=said), said, seconds)


def end(process, said: Path, seconds: float = 300) -> str:
    """The same of a process that runs."""
    process.join(seconds)
    process.kill()
    process.join()
    assert process.exitcode == 0, said.read_text()[-9000:]
    return said.read_text()


def _heard(said: str, function, arguments: tuple) -> None:
    file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1), os.dup2(file, 2)
    function(*arguments)


def command_line(threads: int, *arguments: str) -> None:
    """What `start` calls in the process."""
    import torch

    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)  # it has read the variable already
    sys.argv = ["etude", *arguments]
    from etude.cli import main as cli

    cli.main()
