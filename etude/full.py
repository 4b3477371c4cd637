"""`etude run TECHNIQUE --scale full`: starts torchrun, and on every rank runs `scaled/pretrain.py` or `scaled/rl.py`.

parent    checks settings, folder and GPUs, then starts torchrun on this module
rank      joins the process group, sets the mesh, trains; rank 0 shows progress and writes the report
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from etude import afterwards, catalog, expected
from kit.disk import atomic_write, read_lines
from kit.process import keep_freed_memory
from kit.runs import Run
from kit.settings import RunError, fill

PRETRAINING: dict[str, dict] = {"cpt": {}, "muon": {"optimizer": "muon"}, "mtp": {}, "quant": {"experts": "nvfp4-token"}}
"""Techniques that `scaled/pretrain.py` trains, and the defaults that each one changes."""
RL: dict[str, dict] = {
    "dr-grpo": {},
    "packing": {},
    "kl": {"rl": {"payment": {"kl": 0.005}}},
    "length-penalty": {"rl": {"payment": {"effort_price": 0.0002, "invalid_call": 0.03}}},
    "behaviour": {"rl": {"behaviour": {"broken": 0.03, "diff": 0.0001, "comments": 0.1, "sequential": 0.02}}},
    "monitor": {},
    "self-summary": {"join": "self"},
    "textual-feedback": {"rl": {"feedback": {"weight": 1.0}}},
    "router-replay": {"rl": {"replay": "filtered"}},
    "weight-sync": {"sync": "weights"},
}
"""Techniques that `scaled/rl.py` trains: Dr. GRPO on packed rows, each with at most one more part of the recipe turned on; a
monitor watches all of them."""
DELETION = "feature-deletion"
"""The technique whose full run trains nothing: `etude/deletion.py`."""
WITHOUT = (
    "a full run starts from a checkpoint: --checkpoint FOLDER, a Hugging Face folder. `hf download Qwen/Qwen3-30B-A3B-Base --local-dir FOLDER` gets "
    "one; `etude run recipe --scale small` makes tiny ones, in checkpoints/"
)
FREE = ("cp", "ep", "timeout", "restarts", "checkpoint_every")
"""Settings that a resumed run may change, because they do not affect the trained weights."""


def settings(name: str, backend: str, toml: dict | None = None, sets: Sequence[str | tuple[str, Any]] = ()) -> Any:
    """Settings of a technique's full run, or of its rehearsal on CPUs. Raises RunError if it has none, and as `kit.settings.fill`."""
    from scaled import pretrain, rl

    if name == "recipe":
        from etude import chain

        return fill(chain.Whole, toml, sets, chain.Whole.rehearsal() if backend == "gloo" else chain.Whole())
    if name == "cpt-rl":
        from etude import ladder

        return fill(ladder.Ladder, toml, sets, ladder.Ladder.rehearsal() if backend == "gloo" else ladder.Ladder())
    if name == "async-rl":
        from etude import async_rl

        return fill(async_rl.Async, toml, sets, async_rl.Async(cluster=async_rl.Cluster(backend=cast(Any, backend))))
    if name == DELETION:
        from etude.deletion import Deletion

        return fill(Deletion, toml, sets)
    if name not in PRETRAINING | RL:
        known = ", ".join(["recipe", "cpt-rl", "async-rl", *PRETRAINING, *RL, DELETION])
        raise RunError(f"{name} has no full run; use --scale small. Techniques with a full run: {known}")
    kind = pretrain.Full if name in PRETRAINING else rl.Rl
    base = fill(kind, (PRETRAINING | RL)[name], base=kind.rehearsal() if backend == "gloo" else kind())
    return fill(kind, toml, sets, base)


def run(
    entry: catalog.Technique | catalog.Experiment,
    out: Path,
    toml: dict,
    sets: list[str | tuple[str, str]],
    resume: bool,
    nproc: int | None,
    backend: str,
) -> None:
    """The parent process. Raises RunError if the run cannot start or a rank fails."""
    config = settings(entry.name, backend, toml, sets)
    if entry.name in ("recipe", "cpt-rl"):
        return run_recipe(entry.name, config, out, resume, nproc, backend)
    if entry.name == DELETION:
        return run_deletion(config, out, resume, nproc, backend)
    ranks = count(config, nproc, backend, entry.name)
    layout(config, ranks)
    if config.checkpoint is None:
        raise RunError(WITHOUT)
    if not (Path(config.checkpoint) / "tokenizer.json").is_file():
        makes = "make small writes runs/small/checkpoints/" + ("sft" if entry.name in RL else "mid-cpt")
        raise RunError(f"checkpoint {config.checkpoint} is not a folder with config.json, weights and tokenizer.json; see --checkpoint ({makes})")
    check_work(config, entry.name, ranks)
    if entry.name in RL:
        from sims.microrepo.world import origin

        root, _ = origin(Path(str(config.checkpoint)))
        print("tasks and contexts: " + (f"as in {root}" if root else f"the recipe's defaults; {config.checkpoint} comes from no run of the recipe"))
    again = f"etude run {entry.name} --scale full --out {shlex.quote(str(out))} --resume" + (
        f" --backend {backend} --nproc {ranks}" if backend == "gloo" else ""
    )
    with Run.open(out, f"{entry.name} full", as_begun(config, out) if resume else config, resume) as opened:
        from scaled import pretrain
        from scaled.runtime import launch

        check_left(out)
        expected.tell(opened, ranks=ranks, backend=backend)
        if entry.name in PRETRAINING:
            with opened.told(again):
                try:
                    pretrain.prepare(config, out)  # here a bad corpus is a one-line error, and no GPU waits yet
                except ValueError as error:
                    raise RunError(str(error)) from None
        told = json.dumps({"technique": entry.name, "backend": backend, "ranks": ranks, "config": dataclasses.asdict(config)})
        code = launch.start("etude.full", [str(out.resolve()), told], ranks, config.restarts)
    if code:
        raise RunError(f"the ranks of {entry.name} failed; their errors are above. Continue with: {again}")
    show(out)
    afterwards.show(afterwards.of_full(out, entry.name in RL))


def run_recipe(name: str, config, out: Path, resume: bool, nproc: int | None, backend: str) -> None:
    """The parent process of all stages of the recipe, once or for several budgets. Raises RunError as `run`."""
    from etude import chain, ladder, outcome
    from scaled.runtime import launch

    ranks = count(config.cluster, nproc, backend, name)
    if config.checkpoint is None:
        raise RunError(WITHOUT)
    try:
        (chain if name == "recipe" else ladder).check(config, ranks)
    except ValueError as error:
        raise RunError(str(error)) from None
    begun = config
    if resume:
        cluster = as_begun(config.cluster, out, chain.FREE, lambda config: config["cluster"])
        begun = dataclasses.replace(config, cluster=cluster)
    if name == "cpt-rl":
        return ladder.learn(begun, out, resume, ranks, backend, config.cluster)
    again = f"etude run recipe --scale full --out {shlex.quote(str(out))} --resume" + (
        f" --backend gloo --nproc {ranks}" if backend == "gloo" else ""
    )
    with Run.open(out, "recipe full", begun, resume) as opened:
        with opened.told(again):
            expected.tell(opened, ranks=ranks, backend=backend)
            chain.prepare(opened, config)
            told = json.dumps({"technique": "recipe", "backend": backend, "ranks": ranks, "config": dataclasses.asdict(config)})
            code = launch.start("etude.full", [str(out.resolve()), told], ranks, config.cluster.restarts)
        if code:
            raise RunError(f"the ranks of the recipe failed; their errors are above. Continue with: {again}")
        outcome.show(out)


def run_deletion(config, out: Path, resume: bool, nproc: int | None, backend: str) -> None:
    """The parent process of a run that tries all pieces of a package. Raises RunError as `run`."""
    from etude import deletion
    from scaled.runtime import launch

    ranks, package = count(config, nproc, backend, DELETION), deletion.material(config)
    again = f"etude run {DELETION} --scale full --out {shlex.quote(str(out))} --resume --backend {backend} --nproc {ranks}"
    with Run.open(out, f"{DELETION} full", as_begun(config, out, ("timeout",)) if resume else config, resume) as opened:
        with opened.told(again):
            deletion.prepare(config, package, out)
            told = json.dumps({"technique": DELETION, "backend": backend, "ranks": ranks, "config": dataclasses.asdict(config)})
            code = launch.start("etude.full", [str(out.resolve()), told], ranks, 0)
        if code:
            raise RunError(f"the ranks of {DELETION} failed; their errors are above. Continue with: {again}")
    deletion.show(out)


def check_work(config, name: str, ranks: int) -> None:
    """Raises RunError now for what every rank would report later, sometimes after minutes."""
    import torch

    from ref.network import CheckpointError, Transformer
    from ref.network.checkpoint import matched
    from ref.network.model import config_of

    corpus = getattr(config, "corpus", None)
    if corpus and not Path(corpus).is_dir():
        raise RunError(f"corpus {corpus} is not a folder; see --corpus and --set corpus=…")
    if ranks == 1 and config.dtype != "float32":
        raise RunError(
            f"dtype={config.dtype} applies to gathered weights, and a single rank gathers none; use --set dtype=float32 or more ranks (--nproc)"
        )
    try:
        network = config_of(config.checkpoint)
        with torch.device("meta"):
            shapes = {key: tuple(x.shape) for key, x in Transformer(network).state_dict().items()}
        matched(Path(config.checkpoint), shapes)
        if network.num_experts % config.ep:
            raise RunError(f"ep={config.ep} must divide the network's {network.num_experts} experts; see --set ep=…")
        if not network.num_experts and (name in RL and config.rl.replay != "none" or config.experts != "model"):
            raise RunError(f"{name} needs a network with experts, and {config.checkpoint} has none; see --set rl.replay=… and experts=…")
        if name in RL:
            from sims.microrepo.world import MicroWorld

            MicroWorld(config)
    except (CheckpointError, ValueError) as error:
        raise RunError(str(error)) from None


def check_left(out: Path) -> None:
    """Raises RunError if an earlier process left packed rows or a newest checkpoint that no rank could load."""
    import numpy as np

    from scaled.runtime.checkpoint import CheckpointError, Checkpoints

    for path in filter(Path.exists, (out / "data" / "rows.npy", out / "data" / "doc.npy")):
        try:
            np.load(path, mmap_mode="r")
        except Exception as error:  # Python objects in the array, or a damaged header
            raise RunError(f"{path} does not hold packed rows ({' '.join(str(error).split())}); delete {out / 'data'} to pack again") from None
    shelf = Checkpoints(out / "state")
    try:
        if shelf.steps():
            shelf.names()
    except CheckpointError as error:
        raise RunError(f"{error}; delete {shelf.path(shelf.steps()[-1])} to continue from the previous checkpoint, or choose another --out") from None


def as_begun(config, out: Path, free: Sequence[str] = FREE, part: Callable[[dict], dict] = lambda config: config):
    """The settings with every field of `free` taken from the run in the folder, from a part of its settings."""
    try:
        before = part(json.loads((out / "config.json").read_text())["config"])
        return dataclasses.replace(config, **{name: before[name] for name in free})
    except (OSError, ValueError, KeyError, TypeError):
        return config  # Run.open says what is wrong with it


def grouped(toml: dict, sets: Sequence[str | tuple[str, Any]], nproc: int | None, backend: str) -> list[tuple[str, Any]]:
    """The settings that make a full run of async-rl of a small one: its trainer is a group of ranks. Raises RunError as `count`, and where ranks are
    those of a Ray cluster and nobody says how many."""
    config = settings("async-rl", backend, toml, sets)
    on_ray = config.runtime == "ray"  # which counts its GPUs itself
    if on_ray and nproc is None:
        raise RunError("async-rl at full scale on Ray needs --nproc, the number of ranks that train")
    return [("trainers", count(config.cluster, nproc, "gloo" if on_ray else backend, "async-rl")), ("cluster.backend", backend)]


def count(config, nproc: int | None, backend: str, name: str) -> int:
    """The number of ranks. Raises RunError if there are too few GPUs."""
    if nproc is not None and nproc < 1:
        raise RunError(f"--nproc must be at least 1, got {nproc}")
    if backend == "gloo":
        return nproc or 2
    import torch

    here = torch.cuda.device_count()
    least = nproc or max(config.ep, config.cp, 1)
    if here < least:
        # Of the recipe, the sizes are for GPUs too.
        small = "--config examples/rehearsal.toml --backend gloo --nproc 2 --checkpoint runs/small/checkpoints/mid-cpt, after make small"
        raise RunError(
            f"{name} at full scale needs {least} CUDA GPUs (ep={config.ep}, cp={config.cp}); this machine has {here}. To rehearse it on CPUs: "
            f"etude run {name} --scale full {small if name in ('recipe', 'cpt-rl') else '--backend gloo --nproc 4'}. To estimate its cost: etude plan"
        )
    return nproc or here


def layout(config, ranks: int) -> dict[str, int]:
    """dp, cp and ep for this number of ranks."""
    if ranks % config.cp:
        raise RunError(f"cp={config.cp} must divide the number of ranks, {ranks}; see --set cp=… and --nproc")
    found = {"dp": ranks // config.cp, "cp": config.cp, "ep": config.ep}
    if ranks % config.ep:
        raise RunError(f"ep={config.ep} must divide the number of ranks, {ranks}; see --set ep=… and --nproc")
    try:
        config.check(found["dp"])
    except ValueError as error:
        raise RunError(str(error)) from None
    return found


def show(out: Path) -> None:
    """Prints the result."""
    record = json.loads((out / "report.json").read_text())
    for key, value in record["result"].items():
        print(f"{key:22s} {value:.4g}")
    if record["technique"] in RL:
        from etude.report import watched

        if said := watched.sentence(read_lines(out / "metrics" / f"{record['technique']}.jsonl")):
            print(f"RL:     {said}")
    print(f"report: {out / 'report.json'}\nmodel:  {out / 'checkpoints' / 'final'}")


def rank(out: Path, told: dict) -> None:
    """One process of torchrun."""
    from scaled.runtime import launch

    if told["backend"] == "gloo":  # gathered weights, sent and freed again and again, else come as new pages each time
        keep_freed_memory()
    config = settings(told["technique"], told["backend"], told["config"])
    with launch.world(told["backend"], getattr(config, "cluster", config).timeout) as me, in_a_line(out):
        if told["technique"] == "recipe":
            from etude import chain

            chain.play(out, config, told["ranks"])
        elif told["technique"] == "cpt-rl":
            from etude import ladder

            ladder.play(out, config, told["ranks"], config.seed // 1000)
        elif told["technique"] == DELETION:
            from etude import deletion
            from scaled.runtime.mesh import mesh

            with mesh(dp=told["ranks"]):
                deletion.play(out, config, told["ranks"])
        else:
            train(out, told, config, me)


@contextlib.contextmanager
def in_a_line(out: Path) -> Iterator[None]:
    """Turns a bad checkpoint and a full disk into one line."""
    from kit.disk import NO_ROOM, refusal
    from ref.network.checkpoint import CheckpointError

    try:
        yield
    except (CheckpointError, RunError) as error:  # usually every rank raises it, but some files are read by one rank only
        sys.exit(f"error: {error}")
    except Exception as error:
        refused = refusal(error)
        if refused is None or refused.errno not in NO_ROOM:
            raise
        sys.exit(f"error: {refused.strerror}: {refused.filename or out}; free some space")


def train(out: Path, told: dict, config, me: int) -> None:
    """One technique, on this rank."""
    from kit.process import machine
    from kit.progress import Progress
    from scaled import pretrain, rl
    from scaled.runtime.mesh import mesh

    technique = told["technique"]
    line = Line(technique, config.schedule.steps)
    progress, tokens = Progress(line), 0.0
    run = Run(out, f"{technique} full", config, None, any((out / "metrics").glob("*.jsonl")), 20.0)

    def log(step: int, steps: int, **metrics: float) -> None:
        nonlocal tokens
        tokens += metrics["tokens"]
        run.track({f"{technique}/{name}": value for name, value in metrics.items()}, step)
        progress.update(step, tokens, {name: metrics[name] for name in ("reward", "success", "loss") if name in metrics})
        if step == steps:
            progress.last()
            progress.stop()

    with mesh(**layout(config, told["ranks"])):
        if technique in RL:
            from etude.chain import latest_of, watcher_of
            from sims.microrepo.world import MicroWorld

            world = MicroWorld(config)
            found = rl.learn(technique, config, out, world, log, watcher_of(config, progress.say), latest_of(config, out, world))
        else:
            found = pretrain.train(technique, config, out, log)
    if me == 0:
        report = {"scale": "full", **told, "machine": machine(), "result": found}
        if not run.resumed:
            report["seconds"] = {technique: round(line.seconds, 1)}
        atomic_write(out / "report.json", json.dumps(report, indent=1) + "\n")
    run.close()


class Line:
    """The part of a stage that `Progress` needs."""

    def __init__(self, name: str, total: int):
        self.name, self.total, self.unit, self.opened = name, total, "tokens", time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.opened

    def note_time(self, **facts: float) -> None:
        """Does nothing: a full run does not record rates in a second file."""


if __name__ == "__main__":
    rank(Path(sys.argv[1]), json.loads(sys.argv[2]))
