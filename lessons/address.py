"""Where a copy of this repository lies on GitHub, for Colab. `python -m lessons.badges` stores the address in
lessons/colab.txt."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from kit.settings import RunError

__all__ = ["Address", "file_of", "of_remote", "parse", "stored"]

HOST = (
    r"(?i:(?:https?|ssh|git)://(?:[^/@\s]*@)?(?:www\.)?github\.com(?::\d+)?/|git@github\.com:|(?:www\.)?github\.com/)"
)
ADDRESS = re.compile(
    rf"(?:{HOST})?(?P<owner>[A-Za-z0-9][A-Za-z0-9_-]{{0,38}})/(?P<name>[A-Za-z0-9._-]{{1,100}}?)"
    r"(?:\.git)?(?:/tree/(?P<branch>.+?))?/?",
    re.ASCII,
)
BRANCH = re.compile(r"(?!.*\.\.)(?!.*\.lock$)[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9_-])?", re.ASCII)
"""One word: in Colab's addresses a slash would look like the beginning of the path."""
USAGE = "python -m lessons.badges OWNER/NAME [--branch main]"


@dataclass(frozen=True)
class Address:
    """A branch of a repository on GitHub. `parse` makes one, and checks it."""

    owner: str
    """A user or an organisation."""
    name: str
    """The repository."""
    branch: str = "main"
    """What is cloned, and whose notebooks are opened."""

    def __str__(self) -> str:
        return f"{self.clone}/tree/{self.branch}"

    @property
    def clone(self) -> str:
        """What `git clone` takes."""
        return f"https://github.com/{self.owner}/{self.name}"

    def opens(self, path: str) -> str:
        """The address under which Colab opens a notebook, given by its path in the repository."""
        return f"https://colab.research.google.com/github/{self.owner}/{self.name}/blob/{self.branch}/{path}"


def parse(text: str, branch: str | None = None) -> Address:
    """The address that a text names: OWNER/NAME, an address on github.com, or what `git remote` calls it. `branch` goes
    before the text's own. Raises RunError for any other text, and for a branch that is not one word. A password in it
    is left behind, and never repeated."""
    match = ADDRESS.fullmatch(text.strip())
    if match is None or not match["name"].strip(".") or match["name"].endswith(".git"):
        received_text = "" if "@" in text else f", got {text.strip()[:60]!r}"
        raise RunError(f"a repository on GitHub was expected{received_text}; say which: {USAGE}")
    branch_name = branch if branch is not None else match["branch"] or "main"
    if not BRANCH.fullmatch(branch_name):
        raise RunError(
            f"a branch for Colab is one word of letters, digits, and . _ - between them; got {branch_name[:40]!r}"
        )
    return Address(match["owner"], match["name"], branch_name)


def of_remote(root: Path) -> str:
    """What the clone in this folder calls its origin. Raises RunError if the folder is no clone, or has no such
    remote."""
    command = ["git", "-C", str(root), "remote", "get-url", "origin"]
    try:
        # Without the first question, git would answer for a clone that this folder lies in.
        result = subprocess.run(command, capture_output=True, text=True) if (root / ".git").exists() else None
    except OSError:
        result = None
    if result is None or result.returncode:
        raise RunError(f"this folder has no remote called origin to take an address from; say which: {USAGE}")
    return result.stdout


def file_of(folder: Path) -> Path:
    """Where the address of the lessons in a folder is stored."""
    return folder / "colab.txt"


def stored(folder: Path) -> Address | None:
    """The address of the lessons in a folder; None if nobody gave one. Raises RunError as `parse`."""
    path = file_of(folder)
    return parse(path.read_text(encoding="utf-8")) if path.is_file() else None
