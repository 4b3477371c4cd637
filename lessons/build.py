"""Notebooks from percent scripts, executed: python -m lessons.build [NN …] [--all] [--words] [--check]

    python -m lessons.build           every lesson of which the script, or a file that it imports, has changed since it
                                      was executed
    python -m lessons.build 5 9       these, changed or not; --all: every one
    python -m lessons.build --words   nothing is executed: notebooks take over changed Markdown, and keep the outputs of
                                      unchanged code
    python -m lessons.build --check   nothing is executed: which notebooks are not what their scripts say (exit code 1)

lessons/NN_name.py is the source, lessons/notebooks/NN_name.ipynb is made from it and committed with its outputs. No
time stamps, no random cell ids, no progress on stderr: what differs from one execution to the next is what the lesson
itself measures. The two cells for Colab that `lessons.badges` adds stay, and are not executed.
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
from lessons.badges import dressed, is_colab_cell
from lessons.syllabus import notebook, scripts

__all__ = ["build", "changed", "differs", "executed", "made_from", "reworded", "tags", "unexecuted"]

ROOT = syllabus.FOLDER.parent
KERNEL = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
METADATA_KEYS = ("tags", "jupyter")
"""Metadata of a cell that its script gives it."""


def tags(cell: NotebookNode) -> list[str]:
    """The tags of a cell."""
    return cell.metadata.get("tags", [])


def read_script(script: Path) -> NotebookNode:
    """What is executed: the cells of a script alone, without outputs; solutions are folded."""
    book = jupytext.read(script, fmt="py:percent")
    book.metadata = nbformat.from_dict({"etude": {"made_from": compute_digest(script, book)}, **KERNEL})
    for number, cell in enumerate(book.cells):
        cell.id = f"cell-{number:02d}"
        cell.metadata = nbformat.from_dict(
            {name: cell.metadata[name] for name in METADATA_KEYS if name in cell.metadata}
        )
        if "solution" in tags(cell):
            cell.metadata["jupyter"] = {"source_hidden": True}
    return book


def unexecuted(script: Path) -> NotebookNode:
    """The notebook of a script, without outputs, with its cells for Colab if there is an address."""
    return dressed(read_script(script), script)


def list_code_cells(book: NotebookNode) -> list[tuple[str, NotebookNode]]:
    """What is executed: source and metadata of every code cell, in order."""
    return [(cell.source, cell.metadata) for cell in book.cells if cell.cell_type == "code" and not is_colab_cell(cell)]


def made_from(script: Path) -> str:
    """SHA-256 over what a notebook's outputs come from: the script's code cells and the files of this repository that
    it imports itself. Its Markdown does not count."""
    return compute_digest(script, jupytext.read(script, fmt="py:percent"))


def compute_digest(script: Path, book: NotebookNode) -> str:
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
    """The notebook of a script with its outputs. RunError when a cell fails or a solution does not solve its
    exercise."""
    book = read_script(script)
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
        cell_number = next(
            number
            for number, cell in enumerate(book.cells)
            if any(out.output_type == "error" for out in cell.get("outputs", ()))
        )
        raise RunError(f"{script.name}: cell {cell_number} stops with {error.ename}: {error.evalue}") from None
    book.metadata.update(nbformat.from_dict(KERNEL))  # the kernel has added its version
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
        if "solution" in tags(cell) and not any("solved" in out.get("text", "") for out in cell.outputs):
            output_text = "".join(out.get("text", "") for out in cell.outputs).strip()
            raise RunError(
                f"{script.name}: a solution does not solve its exercise: {output_text or 'it checks nothing'}"
            )
    return dressed(book, script)


def differs(script: Path) -> str:
    """How the committed notebook is another than its script says; empty where it is not."""
    path = notebook(script)
    if not path.is_file():
        return "there is no notebook"
    try:
        committed = nbformat.read(path, as_version=4)
    except ValueError as error:
        return f"the notebook cannot be read ({error})"
    expected = unexecuted(script)
    if len(committed.cells) != len(expected.cells):
        return f"the notebook has {len(committed.cells)} cells, the script {len(expected.cells)}"
    for number, (committed_cell, expected_cell) in enumerate(zip(committed.cells, expected.cells, strict=True)):
        if (committed_cell.cell_type, committed_cell.source, committed_cell.id, committed_cell.metadata) != (
            expected_cell.cell_type,
            expected_cell.source,
            expected_cell.id,
            expected_cell.metadata,
        ):
            return f"cell {number} of the notebook is not the script's"
        if (
            committed_cell.cell_type == "code"
            and committed_cell.execution_count is None
            and not is_colab_cell(committed_cell)
        ):
            return f"cell {number} of the notebook was not executed"
    return ""


def changed(script: Path) -> bool:
    """Whether the lesson has to be executed again."""
    return bool(differs(script)) or nbformat.read(notebook(script), as_version=4).metadata.get("etude") != {
        "made_from": made_from(script)
    }


def reworded(script: Path) -> NotebookNode:
    """The committed notebook with the Markdown of its script. Its outputs stay, and so does its record of what they
    come from. RunError where the code is not what was executed."""
    hint, path = f"execute it: python -m lessons.build {script.name[:2]}", notebook(script)
    try:
        committed, expected = nbformat.read(path, as_version=4), unexecuted(script)
    except (OSError, ValueError) as error:
        raise RunError(f"{script.stem} has no notebook that can be read ({error}); {hint}") from None
    executed_code, script_code = list_code_cells(committed), list_code_cells(expected)
    if len(executed_code) != len(script_code):
        raise RunError(
            f"{script.stem} has {len(script_code)} code cells, and {len(executed_code)} were executed; {hint}"
        )
    for number, (old, new) in enumerate(zip(executed_code, script_code, strict=True), 1):
        if old != new:
            raise RunError(f"{script.stem}: code cell {number} is not the one that was executed; {hint}")
    executed_cells = [cell for cell in committed.cells if cell.cell_type == "code" and not is_colab_cell(cell)]
    if not all(cell.execution_count for cell in executed_cells):
        raise RunError(f"{script.stem}: some of its code was never executed; {hint}")
    expected.metadata = committed.metadata
    for cell, old in zip(
        (cell for cell in expected.cells if cell.cell_type == "code" and not is_colab_cell(cell)),
        executed_cells,
        strict=True,
    ):
        cell.outputs, cell.execution_count = old.outputs, old.execution_count
    return expected


def write(script: Path, book: NotebookNode) -> None:
    """Writes the notebook of a lesson."""
    notebook(script).parent.mkdir(exist_ok=True)
    atomic_write(notebook(script), nbformat.writes(book) + "\n")


def build(script: Path) -> None:
    """Executes a lesson and writes its notebook."""
    start_time = time.perf_counter()
    write(script, executed(script))
    print(f"{script.stem}: {time.perf_counter() - start_time:.0f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lessons.build", description="Notebooks from percent scripts, executed."
    )
    parser.add_argument("numbers", nargs="*", type=int, metavar="NN", help="lessons; none: those that have changed")
    parser.add_argument("--all", action="store_true", help="every lesson, changed or not")
    parser.add_argument(
        "--words",
        action="store_true",
        help="execute nothing; take over changed Markdown where the code is what was executed",
    )
    parser.add_argument("--check", action="store_true", help="only say which notebooks are not what their scripts say")
    args = parser.parse_args()
    try:
        selected_scripts = [syllabus.find(number).path for number in args.numbers] or scripts()
        if args.check:
            differences = {script.stem: difference for script in selected_scripts if (difference := differs(script))}
            for name, difference in differences.items():
                print(f"{name}: {difference}; make it again: python -m lessons.build {name[:2]}")
            return 1 if differences else 0
        if args.words:
            for script in filter(differs, selected_scripts):
                write(script, reworded(script))
                print(f"{script.stem}: words", flush=True)
            return 0
        for script in selected_scripts:
            if args.numbers or args.all or changed(script):
                build(script)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
