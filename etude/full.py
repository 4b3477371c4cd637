"""`etude run TECHNIQUE --scale full`: from the shell into torchrun, and on every rank into `scaled/train.py`.

    parent    checks settings, folder and GPUs, then runs torchrun with this same command inside
    rank      joins the others, sets the mesh, trains; rank 0 shows progress and writes the report
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

from etude import catalog
from etude.runs import Run, RunError, atomic_write, fill

TRAINED = ("cpt", "mtp")
"""Techniques that `scaled/train.py` trains."""
FREE = ("cp", "ep", "timeout", "restarts", "checkpoint_every")
"""Settings that a resumed run may change: they do not change what is trained."""


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
    with Run.open(out, f"{entry.name} full", as_begun(config, out) if resume else config, resume):
        from scaled.runtime import launch

        told = json.dumps({"technique": entry.name, "backend": backend, "ranks": ranks, "config": dataclasses.asdict(config)})
        code = launch.start("etude.full", [str(out.resolve()), told], ranks, config.restarts)
    if code:
        raise RunError(f"the ranks of {entry.name} failed; what they said stands above. Go on with: etude run {entry.name} --scale full "
                       f"--out {out} --resume" + (f" --backend {backend} --nproc {ranks}" if backend == "gloo" else ""))  # fmt: skip
    show(out)


def as_begun(config, out: Path):
    """The settings, but those that may change without changing what is trained as the run in the folder has them."""
    try:
        before = json.loads((out / "config.json").read_text())["config"]
        return dataclasses.replace(config, **{name: before[name] for name in FREE})
    except (OSError, ValueError, KeyError, TypeError):
        return config  # Run.open says what is wrong with it


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


def show(out: Path) -> None:
    """What came out."""
    record = json.loads((out / "report.json").read_text())
    for key, value in record["result"].items():
        print(f"{key:22s} {value:.4g}")
    print(f"report: {out / 'report.json'}\nmodel:  {out / 'checkpoints' / 'final'}")


def rank(out: Path, told: dict) -> None:
    """What each of torchrun's processes does."""
    from etude.process import machine
    from etude.progress import Progress
    from scaled import train
    from scaled.runtime import launch
    from scaled.runtime.mesh import mesh

    backend, technique = told["backend"], told["technique"]
    config = settings_class(backend)(**told["config"])
    line = Line(technique, config.steps)
    progress, tokens = Progress(line), 0.0

    def log(step: int, steps: int, **metrics: float) -> None:
        nonlocal tokens
        tokens += metrics["tokens"]
        progress.update(step, tokens, {"loss": metrics["loss"]})
        if step == steps:
            progress.last()
            progress.stop()

    with launch.world(backend, config.timeout) as me, mesh(**layout(config, told["ranks"])):
        found = train.train(technique, config, out, log)
        if me == 0:
            report = {"scale": "full", **told, "machine": machine(), "result": found}
            atomic_write(out / "report.json", json.dumps(report, indent=1) + "\n")


class Line:
    """What `Progress` asks of a stage."""

    def __init__(self, name: str, total: int):
        self.name, self.total, self.unit, self._opened = name, total, "tokens", time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._opened

    def _note_time(self, **facts: float) -> None:
        """A full run keeps no second file of rates."""


if __name__ == "__main__":
    import sys

    rank(Path(sys.argv[1]), json.loads(sys.argv[2]))
