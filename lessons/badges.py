"""Badges that open the lessons in Colab: `python -m lessons.badges OWNER/NAME [--branch main]`.

    python -m lessons.badges OWNER/NAME     for this repository on GitHub; another one replaces the first
    python -m lessons.badges                for the one that the clone's remote `origin` names
    python -m lessons.badges --remove       no badges any more

Every notebook gets two cells: a badge at its top, and before its first code a cell that clones and installs etude where
Colab has none. lessons/README.md gets the badges too. The address is stored in lessons/colab.txt, and `lessons.build`
keeps what it leads to. Scripts have no such cells, since they come with the clone. Nothing is executed. Commit and push
what has changed: Colab reads it from GitHub."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from kit.disk import atomic_write
from kit.settings import RunError
from lessons import syllabus
from lessons.address import Address, file_of, of_remote, parse, stored

__all__ = ["dressed", "main", "is_colab_cell", "write"]

TAG = "colab"
"""Tag of both cells."""
INSTALL = """\
# Colab begins without etude: there this cell clones and installs it. Elsewhere it does nothing.
import importlib.util
import subprocess
import sys
from pathlib import Path

if "google.colab" in sys.modules and getattr(importlib.util.find_spec("etude"), "origin", None) is None:
    clone = Path("etude-clone").resolve()
    if not clone.is_dir():
        subprocess.run(["git", "clone", "-q", "--depth", "1", "--branch", "{branch}", \
"{clone}", str(clone)], check=True)
    # Not with the versions of constraints.txt: Colab's own torch stays where it is new enough.
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "-e", str(clone)], check=True)
    sys.path.insert(0, str(clone))  # of what was installed since it began, this process knows nothing
    importlib.invalidate_caches()
"""


def is_colab_cell(cell: NotebookNode) -> bool:
    """Whether a cell is one of the two that an address adds: no part of the lesson, and not executed with it."""
    return TAG in cell.metadata.get("tags", [])


def dressed(book: NotebookNode, script: Path) -> NotebookNode:
    """The notebook of a script with the cells for the address that is stored beside the script, or without any."""
    book.cells = [cell for cell in book.cells if not is_colab_cell(cell)]
    address = stored(script.parent)
    if address is not None:
        first = next((index for index, cell in enumerate(book.cells) if cell.cell_type == "code"), len(book.cells))
        install = INSTALL.format(branch=address.branch, clone=address.clone).rstrip()
        book.cells.insert(first, nbformat.v4.new_code_cell(install, id="colab-install", metadata={"tags": [TAG]}))
        badge = syllabus.badge(script, address)
        book.cells.insert(0, nbformat.v4.new_markdown_cell(badge, id="colab-badge", metadata={"tags": [TAG]}))
    return book


def write(address: Address | None, folder: Path = syllabus.FOLDER) -> list[Path]:
    """Stores an address, or forgets the one that is stored, and writes it into the notebooks and README.md of a folder
    of lessons; the files that have changed. Outputs stay as they are. Raises RunError, before anything is written, if
    notebooks are missing or cannot be read."""
    books = {}
    for script in syllabus.scripts(folder):
        try:
            books[script] = nbformat.read(syllabus.notebook(script), as_version=4)
        except (OSError, ValueError) as error:
            message = " ".join(str(error).split())
            raise RunError(
                f"the notebook of {script.stem} cannot be read ({message}); work in a clone, and make "
                f"it again: make lessons"
            ) from None
    if not books:
        raise RunError(f"there are no lessons in {folder}")
    readme, address_path = folder / "README.md", file_of(folder)
    text, old_address = (
        readme.read_text(encoding="utf-8"),
        address_path.read_text(encoding="utf-8") if address_path.is_file() else None,
    )
    new_address = None if address is None else f"{address}\n"
    if new_address is None:
        address_path.unlink(missing_ok=True)
    else:
        atomic_write(address_path, new_address)
    contents = {
        syllabus.notebook(script): nbformat.writes(dressed(book, script)) + "\n" for script, book in books.items()
    }
    contents[readme] = syllabus.filled(text, folder)
    changed_paths = [path for path, content in contents.items() if path.read_text(encoding="utf-8") != content]
    for path in changed_paths:
        atomic_write(path, contents[path])
    return changed_paths + [address_path] * (new_address != old_address)


def main(words: Sequence[str] | None = None, folder: Path = syllabus.FOLDER) -> int:
    """The command. Returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m lessons.badges", description="Badges that open the lessons in Colab."
    )
    parser.add_argument(
        "address",
        nargs="?",
        metavar="OWNER/NAME",
        help="repository on GitHub; without it, that of the clone's remote origin",
    )
    parser.add_argument("--branch", help="branch whose notebooks are opened; main unless the address names another")
    parser.add_argument("--remove", action="store_true", help="take badges and installing cells away")
    args = parser.parse_args(words)
    try:
        if args.remove and (args.address or args.branch):
            raise RunError("--remove takes no address and no branch")
        address = None if args.remove else parse(args.address or of_remote(folder.parent), args.branch)
        paths = write(address, folder)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    summary = "no lesson has a badge" if address is None else f"badges open {address}"
    print(f"{summary}; {f'{len(paths)} files have changed: commit and push them' if paths else 'nothing has changed'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
