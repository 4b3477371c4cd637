"""Chains of diffs from the history of a git repository, read as data: no hook, no filter, no external diff and no
configuration of it runs.

Only plumbing is called (`rev-list`, `ls-tree`, `cat-file`), which neither checks files out nor converts them. Diffs are
ours, of the versions (`tracking.chain_of`).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from kit.settings import RunError
from sims.base_evaluations.tracking import Chain, chain_of

__all__ = ["from_history"]

SAFE_OPTIONS = (
    "-c",
    "core.fsmonitor=",
    "-c",
    "core.hooksPath=/dev/null",
    "-c",
    "protocol.allow=never",
    "-c",
    "core.pager=cat",
    "--no-replace-objects",
)
SECONDS = 60


def run_git(repository: Path, *words: str) -> bytes:
    inherited_variables = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    settings = {
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_OPTIONAL_LOCKS": "0",
    }
    settings |= {"GIT_NO_LAZY_FETCH": "1", "GIT_CEILING_DIRECTORIES": str(repository.resolve().parent)}
    try:
        process = subprocess.run(
            ["git", *SAFE_OPTIONS, "-C", str(repository), *words],
            capture_output=True,
            timeout=SECONDS,
            env=inherited_variables | settings,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        raise RunError("chains from a repository need git; install it, or leave out repository") from None
    except subprocess.TimeoutExpired:
        raise RunError(f"git took longer than {SECONDS} s in {repository}; choose a smaller repository") from None
    if process.returncode:
        reason = (process.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"])[-1]
        raise RunError(f"{repository}: git {words[0]} failed ({reason}); pass a git repository")
    return process.stdout


def from_history(
    repository: str | Path,
    counts: tuple[int, ...],
    per_count: int,
    size: int,
    fits: Callable[[Chain], bool] = lambda chain: True,
    commits: int = 2000,
) -> list[Chain]:
    """Up to `per_count` chains for each number of diffs in `counts`, of at most `size` bytes and such that `fits` says
    so (a model's context), from consecutive versions of Python files in the last `commits` first-parent commits of
    HEAD. A file gives one chain at most. Raises RunError for a folder without a repository, and if no chain fits."""
    root = Path(repository)
    if not root.is_dir():
        raise RunError(f"repository {repository} is not a folder; pass a git repository")
    history = run_git(root, "rev-list", "--first-parent", f"--max-count={commits}", "HEAD", "--").decode().split()[::-1]
    versions: dict[str, list[str]] = {}
    for commit in history:
        for entry in run_git(root, "ls-tree", "-r", "-z", "-l", commit).split(b"\0"):
            fields, _, name = entry.partition(b"\t")
            mode, kind, blob, length = (fields.decode().split() + [""] * 4)[:4]
            if (
                kind == "blob"
                and mode in ("100644", "100755")
                and name.endswith(b".py")
                and length.isdigit()
                and 120 <= int(length) <= size // 2
            ):
                blobs = versions.setdefault(os.fsdecode(name), [])
                if not blobs or blobs[-1] != blob:
                    blobs.append(blob)
    chains = []
    remaining_files = sorted(versions)
    for diffs in sorted(counts, reverse=True):
        count = 0
        for name in list(remaining_files):
            if count == per_count:
                break
            if (chain := find_chain(root, name, versions[name], diffs, size, fits)) is not None:
                chains.append(chain)
                remaining_files.remove(name)
                count += 1
    if not chains:
        raise RunError(
            f"{repository} has no Python file with versions that make a chain of {size} bytes; raise "
            f"chain_bytes, or leave it out"
        )
    return sorted(chains, key=lambda c: len(c.diffs))


def find_chain(
    root: Path, name: str, blobs: list[str], diffs: int, size: int, fits: Callable[[Chain], bool]
) -> Chain | None:
    """The newest chain of so many diffs through these versions that fits."""
    for end in range(len(blobs), diffs, -1):
        texts = [run_git(root, "cat-file", "blob", blob) for blob in blobs[end - diffs - 1 : end]]
        if not all(
            text.isascii() and text.endswith(b"\n") and b"```" not in text and b"\r" not in text for text in texts
        ):
            continue
        chain = chain_of(Path(name).name, [text.decode() for text in texts])
        if chain.size <= size and chain.first != chain.final and len(chain.answer) > 100 and fits(chain):
            return chain
    return None
