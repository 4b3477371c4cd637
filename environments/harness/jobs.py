"""Makes an agent's job of a task: the prompt, the stored tree that it begins with, its tools, and its corpus."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from environments.grading.guarded import Exam
from environments.grading.lay import write
from environments.harness.tools import TOOLS
from environments.harness.workspace import SYSTEM, Job
from environments.sandbox.cache import cache_folder
from environments.sandbox.interface import Limits
from environments.sandbox.open import own_store
from environments.tasks.make import Task
from kit.settings import RunError

__all__ = ["WORKING", "make_job", "read_pages", "store_files"]

WORKING = Limits(output=8 << 10)
"""Limits of an agent's sandbox. The output is short, because a model reads it."""


def make_job(
    task: Task,
    exam: Exam,
    prompt: str,
    corpus: Path | None = None,
    strict: bool = False,
    policy_name: str = "",
    *,
    tools: Sequence[str] | None = None,
    system: str = SYSTEM,
    hides_times: bool = False,
) -> Job:
    """What an agent is asked, over the stored tree of the exam. `prompt`: "specified" or "terse". `corpus`: a folder of
    pages for the tool web_search. `tools`: by default all, web_search only with a corpus. The rest: see `Job`. Raises
    RunError for a corpus without pages."""
    return Job(
        task.id,
        task.specified if prompt == "specified" else task.terse,
        store_files(exam.given_tree),
        exam.given_tree,
        read_pages(corpus) if corpus else None,
        tuple(tool for tool in TOOLS if corpus or tool != "web_search") if tools is None else tuple(tools),
        strict,
        policy_name,
        system,
        hides_times,
    )


def store_files(files: Mapping[str, bytes]) -> str:
    """The hash of a tree of files, stored in the user's store."""
    with tempfile.TemporaryDirectory(prefix="etude-try-") as name:
        folder = Path(name) / "tree"
        write(files, folder)
        return own_store(cache_folder() / "store").add_folder(folder)


def read_pages(corpus: Path) -> dict[str, str]:
    """The texts of a frozen corpus: every .md, .rst and .txt beneath a folder. Raises RunError."""
    paths = {
        path.relative_to(corpus).as_posix(): path
        for path in sorted(corpus.rglob("*"))
        if path.suffix in (".md", ".rst", ".txt")
    }
    if not paths:
        raise RunError(f"{corpus} contains no pages: .md, .rst or .txt")
    return {name: path.read_text(encoding="utf-8", errors="replace") for name, path in paths.items()}
