"""`etude tasks serve`: serves a task's tools to a client of the Model Context Protocol on standard input and output."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import BinaryIO

from environments.harness.episode import Budget, Episode
from environments.harness.jobs import WORKING, make_job
from environments.harness.mcp import McpPolicy, Protocol
from environments.harness.record import Record
from environments.harness.tools import select_tools
from environments.harness.workspace import SYSTEM
from environments.sandbox.cache import cache_folder
from environments.sandbox.open import Kind, open_sandbox, own_store
from environments.tasks.check import exam_of
from etude.tasks.episodes import FOLDERS, graded, print_line, task_of, transcript_of
from kit.settings import Interrupted, RunError

__all__ = ["serve_task"]


def serve_task(
    name: str,
    policy_name: str,
    folders: Sequence[Path],
    prompt: str,
    out: Path,
    resume: bool,
    budget: Budget,
    strict: bool,
    corpus: Path | None,
    jobs: int,
    seconds: float,
    kind: Kind = "bubblewrap",
    ask: bool = True,
) -> None:
    """Plays an episode with a client's calls, grades it once the client has finished or gone, and serves until it has
    gone. Standard output carries the protocol alone. `ask`: grades with fresh inputs, too. Raises RunError, and
    Interrupted."""
    with redirect_streams() as (reader, writer):
        task, package = task_of(name, folders or FOLDERS, jobs, seconds, kind)
        exam, path = exam_of(task, package), transcript_of(task, out, resume)
        job = make_job(task, exam, prompt, corpus, strict, policy_name)
        with Record(path) as journal:
            for line in journal.lines:
                print_line(line)
            protocol = Protocol(select_tools(job.tools), f"{SYSTEM}\n\n{job.prompt}", metadata.version("etude"))
            door = McpPolicy(protocol, reader, writer, sum(line["kind"] == "reply" for line in journal.lines))

            def report_line(line: dict) -> None:
                print_line(line)
                door.on_line(line)

            fork = partial(open_sandbox, kind=kind, limits=WORKING)
            episode = Episode(job, door, journal, fork, own_store(cache_folder() / "store"), budget, report_line)
            print(f"{task.id} is served on standard input and output", flush=True)
            try:
                tree = episode.play()
            except KeyboardInterrupt:
                raise Interrupted(f"interrupted; --resume continues from turn {episode.turns}") from None
            wait_for_grading = run_in_own_group(lambda: graded(exam, journal, tree, seconds, kind, ask))
            door.outlast()
            if not wait_for_grading():
                raise RunError(f"{path} is not graded yet; --resume grades it")
        print(f"{path}: read it with `etude show {path}`")


@contextmanager
def redirect_streams() -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Standard input and output, for the protocol alone: meanwhile what this process or one that it starts reads is
    empty, and what it prints goes to standard error."""
    sys.stdout.flush()
    saved_handles = [os.dup(0), os.dup(1)]
    null_device = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null_device, 0), (2, 1)):
        os.dup2(source, target)
    os.close(null_device)
    try:
        with open(os.dup(saved_handles[0]), "rb") as reader, open(os.dup(saved_handles[1]), "wb") as writer:
            yield reader, writer
    finally:
        sys.stdout.flush()
        for number, handle in enumerate(saved_handles):
            os.dup2(handle, number)
            os.close(handle)


def run_in_own_group(work: Callable[[], object]) -> Callable[[], bool]:
    """Begins some work in a process and a group of its own, and gives what waits for it and says whether it was done. A
    client ends its server two seconds after it has closed the connection, with all processes of the server's group;
    this one goes on."""
    sys.stdout.flush()
    process = os.fork()
    if process:
        try:
            os.setpgid(process, process)  # both do it: else a signal could come before the other one has
        except OSError:
            pass  # it has, and has ended
        return lambda: os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    code = 1
    try:
        os.setpgid(0, 0)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)
