"""Notebooks from percent scripts, executed: python -m lessons.build [NN …] [--all] [--words] [--check]

    python -m lessons.build           every lesson of which the script, or a file that it imports, has changed since it was executed
    python -m lessons.build 5 9       these, changed or not; --all: every one
    python -m lessons.build --words   nothing is executed: notebooks take over changed Markdown, and keep the outputs of unchanged code
    python -m lessons.build --check   nothing is executed: which notebooks are not what their scripts say (exit code 1)

lessons/NN_name.py is the source, lessons/notebooks/NN_name.ipynb is made from it and committed with its outputs. No time stamps, no
random cell ids, no progress on stderr: what differs from one execution to the next is what the lesson itself measures. The two cells for Colab
that `lessons.badges` adds stay, and are not executed.
"""

import argparse
import ast
import hashlib
import json
import os
import sys
import time
from pathlib import Path

import jupytext
import nbformat
from ipykernel.kernelspec import RESOURCES, get_kernel_dict
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode
from traitlets import default

from kit.disk import atomic_write
from kit.settings import RunError
from lessons import syllabus
from lessons.badges import dressed, ours
from lessons.syllabus import notebook, scripts

__all__ = ["build", "changed", "differs", "executed", "made_from", "reworded", "tags", "unexecuted"]

ROOT = syllabus.FOLDER.parent
KERNEL = {"kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}, "language_info": {"name": "python"}}
KEPT = ("tags", "jupyter")
"""Metadata of a cell that its script gives it."""


def tags(cell: NotebookNode) -> list[str]:
    """The tags of a cell."""
    return cell.metadata.get("tags", [])


def bare(script: Path) -> NotebookNode:
    """What is executed: the cells of a script alone, without outputs; solutions are folded."""
    book = jupytext.read(script, fmt="py:percent")
    book.metadata = nbformat.from_dict({"etude": {"made_from": digest_of(script, book)}, **KERNEL})
    for number, cell in enumerate(book.cells):
        cell.id = f"cell-{number:02d}"
        cell.metadata = nbformat.from_dict({name: cell.metadata[name] for name in KEPT if name in cell.metadata})
        if "solution" in tags(cell):
            cell.metadata["jupyter"] = {"source_hidden": True}
    return book


def unexecuted(script: Path) -> NotebookNode:
    """The notebook of a script, without outputs, with its cells for Colab if there is an address."""
    return dressed(bare(script), script)


def code_of(book: NotebookNode) -> list[tuple[str, NotebookNode]]:
    """What is executed: source and metadata of every code cell, in order."""
    return [(cell.source, cell.metadata) for cell in book.cells if cell.cell_type == "code" and not ours(cell)]


def made_from(script: Path) -> str:
    """SHA-256 over what a notebook's outputs come from: the script's code cells and the files of this repository that it imports itself.
    Its Markdown does not count."""
    return digest_of(script, jupytext.read(script, fmt="py:percent"))


def digest_of(script: Path, book: NotebookNode) -> str:
    """The same, of a script that has been read."""
    cells = [[cell.source, tags(cell)] for cell in book.cells if cell.cell_type == "code"]
    files: set[Path] = set()
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{name}" for name in names)]
        files |= {path for path in (ROOT / (name.replace(".", "/") + ".py") for name in names) if path.is_file()}
    digest = hashlib.sha256(json.dumps(cells).encode())
    for path in sorted(files):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class Specs(KernelSpecManager):
    """One kernel: the Python that runs this, whatever kernels the user has installed."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        return KernelSpec(resource_dir=RESOURCES, **get_kernel_dict())


class Manager(AsyncKernelManager):
    """Starts that kernel."""

    @default("kernel_spec_manager")
    def _specs(self) -> Specs:
        return Specs(parent=self)


def executed(script: Path, quick: bool = False) -> NotebookNode:
    """The notebook of a script with its outputs. RunError when a cell fails or a solution does not solve its exercise."""
    book = bare(script)
    environment = {name: value for name, value in os.environ.items() if name not in ("MPLBACKEND", "ETUDE_QUICK")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    if quick:
        environment["ETUDE_QUICK"] = "1"
    client = NotebookClient(
        book,
        timeout=None,
        startup_timeout=600,
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,
        kernel_manager_class=Manager,
        resources={"metadata": {"path": str(ROOT)}},
        extra_arguments=["--HistoryManager.hist_file=:memory:", "--IPKernelApp.log_level=40"],
    )
    try:
        client.execute(env=environment)
    except CellExecutionError as error:
        at = next(number for number, cell in enumerate(book.cells) if any(out.output_type == "error" for out in cell.get("outputs", ())))
        raise RunError(f"{script.name}: cell {at} stops with {error.ename}: {error.evalue}") from None
    book.metadata.update(nbformat.from_dict(KERNEL))  # the kernel has added its version
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
        if "solution" in tags(cell) and not any("solved" in out.get("text", "") for out in cell.outputs):
            said = "".join(out.get("text", "") for out in cell.outputs).strip()
            raise RunError(f"{script.name}: a solution does not solve its exercise: {said or 'it checks nothing'}")
    return dressed(book, script)


def differs(script: Path) -> str:
    """How the committed notebook is another than its script says; empty where it is not."""
    at = notebook(script)
    if not at.is_file():
        return "there is no notebook"
    try:
        there = nbformat.read(at, as_version=4)
    except ValueError as error:
        return f"the notebook cannot be read ({error})"
    here = unexecuted(script)
    if len(there.cells) != len(here.cells):
        return f"the notebook has {len(there.cells)} cells, the script {len(here.cells)}"
    for number, (a, b) in enumerate(zip(there.cells, here.cells, strict=True)):
        if (a.cell_type, a.source, a.id, a.metadata) != (b.cell_type, b.source, b.id, b.metadata):
            return f"cell {number} of the notebook is not the script's"
        if a.cell_type == "code" and a.execution_count is None and not ours(a):
            return f"cell {number} of the notebook was not executed"
    return ""


def changed(script: Path) -> bool:
    """Whether the lesson has to be executed again."""
    return bool(differs(script)) or nbformat.read(notebook(script), as_version=4).metadata.get("etude") != {"made_from": made_from(script)}


def reworded(script: Path) -> NotebookNode:
    """The committed notebook with the Markdown of its script. Its outputs stay, and so does its record of what they come from. RunError where
    the code is not what was executed."""
    again, at = f"execute it: python -m lessons.build {script.name[:2]}", notebook(script)
    try:
        there, here = nbformat.read(at, as_version=4), unexecuted(script)
    except (OSError, ValueError) as error:
        raise RunError(f"{script.stem} has no notebook that can be read ({error}); {again}") from None
    was, now = code_of(there), code_of(here)
    if len(was) != len(now):
        raise RunError(f"{script.stem} has {len(now)} code cells, and {len(was)} were executed; {again}")
    for number, (old, new) in enumerate(zip(was, now, strict=True), 1):
        if old != new:
            raise RunError(f"{script.stem}: code cell {number} is not the one that was executed; {again}")
    kept = [cell for cell in there.cells if cell.cell_type == "code" and not ours(cell)]
    if not all(cell.execution_count for cell in kept):
        raise RunError(f"{script.stem}: some of its code was never executed; {again}")
    here.metadata = there.metadata
    for cell, old in zip((cell for cell in here.cells if cell.cell_type == "code" and not ours(cell)), kept, strict=True):
        cell.outputs, cell.execution_count = old.outputs, old.execution_count
    return here


def write(script: Path, book: NotebookNode) -> None:
    """Writes the notebook of a lesson."""
    notebook(script).parent.mkdir(exist_ok=True)
    atomic_write(notebook(script), nbformat.writes(book) + "\n")


def build(script: Path) -> None:
    """Executes a lesson and writes its notebook."""
    began = time.perf_counter()
    write(script, executed(script))
    print(f"{script.stem}: {time.perf_counter() - began:.0f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lessons.build", description="Notebooks from percent scripts, executed.")
    parser.add_argument("numbers", nargs="*", type=int, metavar="NN", help="lessons; none: those that have changed")
    parser.add_argument("--all", action="store_true", help="every lesson, changed or not")
    parser.add_argument("--words", action="store_true", help="execute nothing; take over changed Markdown where the code is what was executed")
    parser.add_argument("--check", action="store_true", help="only say which notebooks are not what their scripts say")
    wanted = parser.parse_args()
    try:
        some = [syllabus.find(number).path for number in wanted.numbers] or scripts()
        if wanted.check:
            wrong = {script.stem: said for script in some if (said := differs(script))}
            for name, said in wrong.items():
                print(f"{name}: {said}; make it again: python -m lessons.build {name[:2]}")
            return 1 if wrong else 0
        if wanted.words:
            for script in filter(differs, some):
                write(script, reworded(script))
                print(f"{script.stem}: words", flush=True)
            return 0
        for script in some:
            if wanted.numbers or wanted.all or changed(script):
                build(script)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
