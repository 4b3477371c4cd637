"""`etude kernels`: every kernel, compiled for GPUs that are not here, and what the compiler says of it.

kernels/compiled.py compiles one; this file asks several processes of it at a time, shows a table, and keeps it in
results/."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from kit.disk import atomic_write, parse_json, read_json
from kit.process import cores, machine
from kit.settings import RunError
from scaled.runtime import engine

__all__ = ["TARGETS", "Compiler", "code", "compile_all", "compiler", "play", "show", "unfit", "unfit_file", "write"]

TARGETS = ("sm_90", "sm_100", "gfx950")
"""Hopper, Blackwell, CDNA 4."""
FILE = "kernels-compiled.json"
CODE_MAKERS = {"ptx": "NVIDIA", "sass": "NVIDIA", "amdgcn": "AMD"}


class Compiler:
    """A process that compiles: kernels/compiled.py, without the interpreter, which would replace every kernel."""

    def __init__(self, errors: IO[str]):
        module = engine.kernel("compiled")
        root, environment = (
            Path(str(module.__file__)).parents[1],
            {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        )
        environment["PYTHONPATH"] = os.pathsep.join([str(root), *filter(None, [environment.get("PYTHONPATH")])])
        self.errors = errors
        self.process = subprocess.Popen(
            [sys.executable, "-m", module.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )
        first = self.answer()
        self.jobs: list[dict[str, Any]] = first["jobs"]
        self.versions: dict[str, str] = first["versions"]

    def ask(self, number: int, code_kind: str = "") -> dict[str, Any]:
        """The record of a job, or {"text": …}, its code. Raises RunError if the process has died."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{number} {code_kind}\n")
            self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.errors.seek(0)
            last = (self.errors.read().strip().splitlines() or ["no message"])[-1]
            raise RunError(f"the process that compiles kernels died: {last}")
        return parse_json(line)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def compiler() -> Iterator[Compiler]:
    """A process that compiles, killed at the end."""
    try:
        import triton  # noqa: F401
    except ImportError:
        raise RunError("etude kernels needs Triton: pip install triton (Linux)") from None
    with tempfile.TemporaryFile("w+") as errors:
        instance = Compiler(errors)
        try:
            yield instance
        finally:
            instance.stop()


def is_match(job: dict[str, Any], name: str | None, target: str | None) -> bool:
    """Whether a job's kernel or use contains the name, in small or capital letters."""
    query = (name or "").lower()
    return (query in job["kernel"].lower() or query in job["use"].lower()) and target in (None, job["target"])


def compile_all(
    name: str | None = None,
    target: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    choose: Callable[[list[dict]], list[dict]] = lambda jobs: jobs,
) -> tuple[list[dict], dict[str, str]]:
    """Records of all jobs that match, in the order of the registry, and the versions of the compilers. As many
    processes as cores; `choose` may leave jobs out. Raises RunError if nothing matches, or if a process dies."""
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(compiler())
        keys = {job["key"] for job in choose([job for job in first.jobs if is_match(job, name, target)])}
        numbers = [number for number, job in enumerate(first.jobs) if job["key"] in keys]
        if not numbers:
            raise RunError(
                f"no kernel or use contains {name!r}; the kernels are "
                f"{', '.join(sorted({job['kernel'] for job in first.jobs}))}"
            )
        records: dict[int, dict] = {}
        waiting, failed, lock = numbers[::-1], [], threading.Lock()

        def work(worker: Compiler | None) -> None:
            try:
                with contextlib.ExitStack() as own:
                    worker = worker or own.enter_context(compiler())
                    while not failed:
                        with lock:
                            if not waiting:
                                return
                            number = waiting.pop()
                        record = worker.ask(number)
                        with lock:
                            records[number] = record
                            progress(len(records), len(numbers))
            except Exception as error:
                failed.append(error)

        threads = [
            threading.Thread(target=work, args=(worker,))
            for worker in [first, *[None] * (min(cores(), len(numbers)) - 1)]
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            failed.append(KeyboardInterrupt())
            raise
        if failed:
            raise failed[0]
        return [records[number] for number in numbers], first.versions


def code(name: str, target: str, code_kind: str) -> tuple[dict[str, Any], str, int]:
    """The first matching job, its PTX, SASS or AMD assembly, and how many other jobs match."""
    with compiler() as instance:
        numbers = [number for number, job in enumerate(instance.jobs) if is_match(job, name, target)]
        if not numbers:
            raise RunError(
                f"no kernel or use contains {name!r}; the kernels are "
                f"{', '.join(sorted({job['kernel'] for job in instance.jobs}))}"
            )
        return instance.jobs[numbers[0]], instance.ask(numbers[0], code_kind)["text"], len(numbers) - 1


def play(name: str | None, target: str | None, code_kind: str | None, out: Path | None) -> None:
    """The command: a table, or the code of one kernel. The complete table is written to out/kernels-compiled.json."""
    if target is not None and target not in TARGETS:
        raise RunError(f"--target expects {', '.join(TARGETS)}, got {target!r}")
    if code_kind is not None:
        maker = "AMD" if target == "gfx950" else "NVIDIA"
        if CODE_MAKERS.get(code_kind) != maker:
            raise RunError(
                f"--show expects {', '.join(w for w, m in CODE_MAKERS.items() if m == maker)} for "
                f"{target or 'sm_90'}, got {code_kind!r}"
            )
        if name is None:
            raise RunError("--show needs the NAME of a kernel or of a use; `etude kernels` lists them")
        job, text, other_count = code(name, target or "sm_90", code_kind)
        print(text)
        print(
            f"{job['kernel']}, {job['use']}, {job['target']}, {job['tile']}; {other_count} other jobs match {name!r}",
            file=sys.stderr,
        )
        return
    is_part = name is not None or target is not None
    if is_part and out is not None:
        raise RunError("--out writes the complete table only; leave out NAME and --target")
    with progress_line() as progress:
        records, versions = compile_all(name, target, progress)
    show(records, versions, per_configuration=name is not None)
    if not is_part:
        print(f"written: {write(records, versions, out or Path('results'))}")


@contextlib.contextmanager
def progress_line() -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal; elsewhere a plain line every few seconds."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console, last = Console(stderr=True), time.monotonic()
    if console.is_terminal:
        with Progress(
            TextColumn("compiling"), BarColumn(16), MofNCompleteColumn(), TimeRemainingColumn(), console=console
        ) as bar:
            task = bar.add_task("")
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return

    def line(done: int, total: int) -> None:
        nonlocal last
        if done == total or time.monotonic() - last >= 5:
            last = time.monotonic()
            print(f"compiling {done}/{total}", file=sys.stderr, flush=True)

    yield line


def show(records: list[dict], versions: dict[str, str], per_configuration: bool = False) -> None:
    """Prints the table: a line for each use and target, with the range over configurations; with `per_configuration`, a
    line for each configuration."""
    from rich.console import Console
    from rich.table import Table

    groups: dict[tuple[str, ...], list[dict]] = {}
    for record in records:
        groups.setdefault(
            (record["kernel"], record["use"], record["target"], *([record["tile"]] if per_configuration else [])), []
        ).append(record)
    titles = ("tensor core", "registers", "spilled", "shared", "occupancy", "FLOPs/byte", "floor")
    table = Table(
        "kernel",
        "use",
        "target",
        "tile" if per_configuration else "fit",
        *titles,
        box=None,
        header_style="bold",
        pad_edge=False,
    )
    for (kernel, use, target, *tile), group in groups.items():
        good = [record for record in group if record["failed"] is None]
        fits = sum(record["fits"] for record in group)
        names = sorted({name for record in good for name in record["instructions"]})
        table.add_row(
            kernel,
            use,
            target,
            *(tile or [f"{fits} of {len(group)}"]),
            ", ".join(sorted({short(name) for name in names})) or ("–" if good else group[0]["failed"]),
            *(span([record[key] / by for record in good], unit) for key, by, unit in COLUMNS),
        )
    console = Console() if sys.stdout.isatty() else Console(width=200)
    console.print(table, highlight=False)
    print(
        f"Triton {versions['triton']}, ptxas {versions['ptxas']}. Registers and spilled bytes are per "
        f"thread, shared memory per block. "
        "FLOPs and bytes are per program.\nThe floor is the roofline's on H200, B200 and MI355X at the "
        "registry's sizes; docs/speed.md has "
        "what an H100 measured."
    )


COLUMNS = (
    ("registers", 1, ""),
    ("spilled", 1, ""),
    ("shared", 1024, " KB"),
    ("occupancy", 0.01, "%"),
    ("intensity", 1, ""),
    ("floor_us", 1, " µs"),
)


def span(values: list[float], unit: str) -> str:
    """The smallest to the largest: "64–128 KB"."""
    if not values:
        return "–"
    low, high = (f"{value:.0f}" for value in (min(values), max(values)))
    return f"{low}{unit}" if low == high else f"{low}–{high}{unit}"


def short(instruction: str) -> str:
    """wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 → wgmma e4m3.e4m3; tcgen05.mma.cta_group::1.kind::f16 →
    tcgen05 f16."""
    head, *parts = instruction.split(".")
    if head == "tcgen05":
        return " ".join(
            [head, *(part.removeprefix("kind::") for part in parts if re.search("kind::|block|scale_vec", part))]
        )
    if head in ("wgmma", "mma"):
        types = [part for part in parts if part in ("f16", "bf16", "tf32", "e4m3", "e5m2", "f32", "f64")]
        return f"{head} {'.'.join(types[1:3])}"
    return instruction


def write(records: list[dict], versions: dict[str, str], out: Path) -> Path:
    """Writes out/kernels-compiled.json, one line for each configuration, and returns its path."""
    record = {
        "what": "kernels compiled ahead of time: what the compiler says of them",
        "command": "etude kernels",
        "versions": versions,
        "machine": machine(),
    }
    out.mkdir(parents=True, exist_ok=True)
    head = json.dumps(record, indent=1, ensure_ascii=False)[:-2]
    lines = ",\n".join(f"  {json.dumps(entry, ensure_ascii=False)}" for entry in records)
    atomic_write(out / FILE, f'{head},\n "results": [\n{lines}\n ]\n}}\n')
    return out / FILE


def unfit(records: list[dict]) -> dict[tuple[str, str, str], tuple[str, ...]]:
    """What kernels/unfit.py has to say: (kernel, target, form) → the configurations that no autotuner should be
    offered."""
    bad: dict[tuple[str, str, str], dict[str, None]] = {}
    for record in records:
        if record["form"] and not record["fits"]:
            bad.setdefault((record["kernel"], record["target"], record["form"]), {})[record["tile"]] = None
    return {key: tuple(tiles) for key, tiles in bad.items()}


def unfit_file(records: list[dict]) -> str:
    """The text of kernels/unfit.py."""
    module = engine.kernel("unfit")
    lines = [
        f"    {key}: (\n" + "".join(f"        {tile!r},\n" for tile in tiles) + "    ),\n"
        for key, tiles in unfit(records).items()
    ]
    lines = [line.replace("'", '"') for line in lines]
    return f'''"""{module.__doc__}"""

__all__ = ["UNFIT"]

# fmt: off
UNFIT: dict[tuple[str, str, str], tuple[str, ...]] = {{
{"".join(lines)}}}
'''


if __name__ == "__main__":
    table = Path(__file__).resolve().parents[2] / "results" / FILE
    target = Path(str(engine.kernel("unfit").__file__))
    atomic_write(target, unfit_file(read_json(table)["results"]))
    print(f"written: {target}")
