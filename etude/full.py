"""`etude run TECHNIQUE --scale full`: from the shell into torchrun, and on every rank into `scaled/train.py`.

    parent    checks settings, folder and GPUs, then runs torchrun with this same command inside
    rank      joins the others, sets the mesh, trains; rank 0 shows progress and writes the report
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path

from etude import catalog
from etude.settings import RunError, describe, fill

TRAINED = ("cpt", "mtp")
"""Techniques that `scaled/train.py` trains."""


def settings_class(backend: str) -> type:
    """Settings of a full run, or of its rehearsal on CPUs."""
    from scaled import train

    return train.Rehearsal if backend == "gloo" else train.Full


def run(entry: catalog.Technique, out: Path, toml: dict, sets: list[str], resume: bool, nproc: int | None, backend: str) -> None:
    """What the shell's process does. RunError where it cannot begin, or where the ranks failed."""
    if entry.name not in TRAINED:
        raise RunError(f"{entry.name} has no full run of its own yet: `scaled/` holds its functions, and cpt and mtp can be trained; use --scale small")
    config = fill(settings_class(backend), toml, sets)
    ranks = count(config, nproc, backend, entry.name)
    layout(config, ranks)
    if entry.name == "mtp" and config.checkpoint is None:
        raise RunError("mtp needs a trunk: --set checkpoint=FOLDER, a Hugging Face folder (etude run cpt --scale full leaves one)")
    if config.checkpoint and not (Path(config.checkpoint) / "tokenizer.json").is_file():
        raise RunError(f"checkpoint {config.checkpoint} is no folder with config.json, weights and tokenizer.json")
    take(entry, out, config, resume, backend, ranks)
    from scaled.runtime import launch

    code = launch.start("etude.full", [str(out.resolve())], ranks, config.restarts)
    if code:
        raise RunError(f"the ranks of {entry.name} failed; what they said stands above. Go on with: etude run {entry.name} --scale full "
                       f"--out {out} --resume" + (f" --backend {backend} --nproc {ranks}" if backend == "gloo" else ""))  # fmt: skip
    show(out, entry.name)


def count(config, nproc: int | None, backend: str, name: str) -> int:
    """How many ranks, or why none."""
    if nproc is not None and nproc < 1:
        raise RunError(f"--nproc must be at least 1, got {nproc}")
    if backend == "gloo":
        return nproc or 2
    import torch

    here = torch.cuda.device_count()
    least = nproc or max(config.ep, config.cp, 1)
    if here < least:
        raise RunError(
            f"{name} at full scale needs {least} CUDA GPUs here (ep={config.ep}, cp={config.cp}), and there are {here}. Rehearse it on CPUs: "
            f"etude run {name} --scale full --backend gloo --nproc 4. What it costs: etude plan"
        )
    return nproc or here


def layout(config, ranks: int) -> dict[str, int]:
    """dp, cp and ep of so many ranks."""
    if ranks % config.cp:
        raise RunError(f"cp={config.cp} must divide the number of ranks, {ranks}; see --set cp=… and --nproc")
    found = {"dp": ranks // config.cp, "cp": config.cp, "ep": config.ep}
    if ranks % config.ep:
        raise RunError(f"ep={config.ep} must divide the number of ranks, {ranks}; see --set ep=… and --nproc")
    if config.rows % found["dp"]:
        raise RunError(f"rows={config.rows} must be a multiple of dp = {found['dp']}; see --set rows=…")
    return found


def take(entry: catalog.Technique, out: Path, config, resume: bool, backend: str, ranks: int) -> None:
    """The folder of the run: a new one, or the one to go on with."""
    path = out / "config.json"
    record = {"technique": f"{entry.name} full", "backend": backend, "ranks": ranks, "config": dataclasses.asdict(config)}
    if path.exists():
        try:
            before = json.loads(path.read_text())
        except ValueError:
            raise RunError(f"{path} is damaged: not valid JSON; delete {out} to begin again") from None
        if not resume:
            raise RunError(f"{out} already holds a run; --resume goes on with it, or choose another --out, or delete {out}")
        free = {"cp", "ep", "timeout", "restarts", "checkpoint_every"}  # what may change without changing what is trained
        was, now = ({k: v for k, v in one.get("config", {}).items() if k not in free} for one in (before, record))
        if before.get("technique") != record["technique"] or was != now:
            other = [k for k in now if was.get(k) != now[k]] or ["technique"]
            raise RunError(f"{out} holds another run: {other[0]} differs; choose another --out")
    elif resume:
        raise RunError(f"{out} holds no run to go on with; leave --resume out")
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"{out} is not an empty folder; choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    temporary = out / ".config.json"
    temporary.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(temporary, path)


def show(out: Path, name: str) -> None:
    """What came out."""
    record = json.loads((out / "report.json").read_text())
    for key, value in record["result"].items():
        print(f"{key:22s} {value:.4g}")
    print(f"report: {out / 'report.json'}\nmodel:  {out / 'checkpoints' / 'final'}")


def rank(out: Path) -> None:
    """What each of torchrun's processes does."""
    from etude.process import machine
    from etude.progress import Progress
    from scaled import train
    from scaled.runtime import launch
    from scaled.runtime.mesh import mesh

    record = json.loads((out / "config.json").read_text())
    backend, technique = record["backend"], record["technique"].split()[0]
    config = settings_class(backend)(**record["config"])
    line = Line(technique, config.steps)
    progress, tokens = Progress(line), 0.0

    def log(step: int, steps: int, **metrics: float) -> None:
        nonlocal tokens
        tokens += metrics["tokens"]
        progress.update(step, tokens, {"loss": metrics["loss"]})
        if step == steps:
            progress.last()
            progress.stop()

    with launch.world(backend, config.timeout) as me, mesh(**layout(config, record["ranks"])):
        found = train.train(technique, config, out, log)
        if me == 0:
            report = {"technique": technique, "scale": "full", **record, "machine": machine(), "result": found}
            temporary = out / ".report.json"
            temporary.write_text(json.dumps(report, indent=1) + "\n")
            os.replace(temporary, out / "report.json")


class Line:
    """What `Progress` asks of a stage."""

    def __init__(self, name: str, total: int):
        self.name, self.total, self.unit, self._opened = name, total, "tokens", time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._opened

    def _note_time(self, **facts: float) -> None:
        """A full run keeps no second file of rates."""


def settings_table(backend: str) -> list[tuple]:
    """(key, default, what) of every setting."""
    return [(key, default, doc or kind) for key, kind, default, doc in describe(settings_class(backend))]


if __name__ == "__main__":
    import sys

    rank(Path(sys.argv[1]))
