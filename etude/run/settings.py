"""Settings of full runs: those of every technique, the number of ranks, and how they share the work."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kit.disk import read_json
from kit.settings import RunError, fill

if TYPE_CHECKING:
    from scaled.runtime.launch import Node

__all__ = [
    "DELETION",
    "PRETRAINING",
    "RL",
    "as_begun",
    "count",
    "grouped",
    "layout",
    "node_of",
    "one_gpu_options",
    "rehearsal_options",
    "settings",
]

PRETRAINING: dict[str, dict] = {
    "cpt": {},
    "muon": {"optimizer": "muon"},
    "mtp": {},
    "quant": {"experts": "nvfp4-token"},
}
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
"""Techniques that `scaled/rl.py` trains: Dr. GRPO on packed rows, each with at most one more part of the recipe turned
on; a monitor watches all of them."""
DELETION = "feature-deletion"
"""The technique whose full run trains nothing: `etude/run/feature_deletion.py`."""
FREE = ("cp", "ep", "timeout", "restarts", "checkpoint_every")
"""Settings that a resumed run may change, because they do not affect the trained weights."""


def settings(name: str, backend: str, toml: dict | None = None, sets: Sequence[str | tuple[str, Any]] = ()) -> Any:
    """Settings of a technique's full run, or of its rehearsal on CPUs. Raises RunError if it has none, and as
    `kit.settings.fill`."""
    from scaled import pretrain, rl

    if name == "recipe":
        from recipe.full.settings import FullRecipe

        return fill(FullRecipe, toml, sets, FullRecipe.rehearsal() if backend == "gloo" else FullRecipe())
    if name == "cpt-rl":
        from etude.run import budget_ladder

        return fill(
            budget_ladder.Ladder,
            toml,
            sets,
            budget_ladder.Ladder.rehearsal() if backend == "gloo" else budget_ladder.Ladder(),
        )
    if name == "async-rl":
        from recipe.asynchronous import run as async_rl

        return fill(async_rl.Async, toml, sets, async_rl.Async(cluster=async_rl.Cluster(backend=cast(Any, backend))))
    if name == DELETION:
        from etude.run.feature_deletion import Deletion

        return fill(Deletion, toml, sets)
    if name not in PRETRAINING | RL:
        techniques = ", ".join(["recipe", "cpt-rl", "async-rl", *PRETRAINING, *RL, DELETION])
        raise RunError(f"{name} has no full run; use --scale small. Techniques with a full run: {techniques}")
    kind = pretrain.Full if name in PRETRAINING else rl.Rl
    base = fill(kind, (PRETRAINING | RL)[name], base=kind.rehearsal() if backend == "gloo" else kind())
    return fill(kind, toml, sets, base)


def as_begun(config, out: Path, free: Sequence[str] = FREE, part: Callable[[dict], dict] = lambda config: config):
    """The settings with every field of `free` taken from the run in the folder, from a part of its settings."""
    try:
        before = part(read_json(out / "config.json")["config"])
        return dataclasses.replace(config, **{name: before[name] for name in free})
    except (OSError, ValueError, KeyError, TypeError):
        return config  # Run.open raises the error


def grouped(
    toml: dict, sets: Sequence[str | tuple[str, Any]], nproc: int | None, backend: str
) -> list[tuple[str, Any]]:
    """The settings that turn a small run of async-rl into a full one, whose trainer is a group of ranks. Raises
    RunError as `count`, and if the ranks are those of a Ray cluster and their number is not given."""
    config = settings("async-rl", backend, toml, sets)
    on_ray = config.runtime == "ray"  # which counts its GPUs itself
    if on_ray and nproc is None:
        raise RunError("async-rl at full scale on Ray needs --nproc, the number of ranks that train")
    return [
        ("trainers", count(config.cluster, nproc, "gloo" if on_ray else backend, "async-rl")),
        ("cluster.backend", backend),
    ]


def count(config, nproc: int | None, backend: str, name: str, nodes: int = 1) -> int:
    """The number of ranks on all machines. Raises RunError if this one has too few GPUs."""
    if nproc is not None and nproc < 1:
        raise RunError(f"--nproc must be at least 1, got {nproc}")
    if backend == "gloo":
        return nodes * (nproc or 2)
    import torch

    gpu_count = torch.cuda.device_count()
    minimum = nproc or max(-(-max(config.ep, config.cp) // nodes), 1)
    if gpu_count < minimum:
        command = f"etude run {name} --scale full"
        one_gpu = f"On one GPU: {command} {one_gpu_options(name)}. " if minimum > 1 else ""
        raise RunError(
            f"{name} at full scale needs {minimum} CUDA GPU{'s' * (minimum > 1)} (ep={config.ep}, "
            f"cp={config.cp}); this machine has {gpu_count}. "
            f"{one_gpu}On CPUs: {command} {rehearsal_options(name)}. To estimate its cost: etude plan"
        )
    return nodes * (nproc or gpu_count)


def node_of(name: str, nodes: int | None, node: int | None, rendezvous: str | None) -> Node | None:
    """This machine among those of a full run, from --nodes, --node and --rendezvous; None for the only one. Raises
    RunError if they make no sense, and for a technique that runs on one machine."""
    from scaled.runtime.launch import Node

    together = "--nodes N --node I --rendezvous HOST:PORT"
    if (nodes, node, rendezvous) == (None, None, None) or (nodes, node, rendezvous) == (1, None, None):
        return None
    if nodes is None or node is None or rendezvous is None:
        raise RunError(f"--nodes, --node and --rendezvous need each other, on every machine: {together}")
    if nodes < 1:
        raise RunError(f"--nodes must be at least 1, got {nodes}")
    if not 0 <= node < nodes:
        raise RunError(f"--node must be from 0 to {nodes - 1}, one for each of the {nodes} machines; got {node}")
    host, _, port = rendezvous.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 1 << 16
    if not is_port or not re.fullmatch(r"[\w.-]+|\[[\da-fA-F:.]+\]", host, re.ASCII):
        raise RunError(
            f"--rendezvous expects HOST:PORT, the address of node 0 and a free port of it (1 to 65535); "
            f"got {rendezvous!r}"
        )
    if nodes == 1:
        return None
    if name not in {"recipe", *PRETRAINING, *RL}:
        raise RunError(f"{name} runs on one machine: leave out --nodes, --node and --rendezvous")
    return Node(nodes, node, host, int(port))


def one_gpu_options(name: str) -> str:
    """The options of `etude run NAME --scale full` for a single GPU. They leave out --checkpoint."""
    if name in ("recipe", "cpt-rl"):
        return "--nproc 1 --config examples/rehearsal.toml --set cluster.ep=1"
    if name == "async-rl":
        return "--nproc 1 --set cluster.cp=1 --set cluster.ep=1"
    return "--nproc 1 --set cp=1 --set ep=1 --set dtype=float32 --set length=2048" + " --set rl.max_len=2048" * (
        name in RL
    )


def rehearsal_options(name: str) -> str:
    """The options of `etude run NAME --scale full` for a rehearsal on CPUs."""
    if name in ("recipe", "cpt-rl"):  # their defaults have the sizes of GPUs
        return (
            "--backend gloo --nproc 2 --config examples/rehearsal.toml --checkpoint "
            "runs/small/checkpoints/mid-cpt, after make small"
        )
    return "--backend gloo --nproc 4"


def layout(config, ranks: int) -> dict[str, int]:
    """dp, cp and ep for this number of ranks. Raises RunError if they do not fit it."""
    hint = "; for one rank: --set cp=1 --set ep=1 --set dtype=float32" if ranks == 1 else ""
    if ranks % config.cp:
        raise RunError(f"cp={config.cp} must divide the number of ranks, {ranks}; see --set cp=… and --nproc{hint}")
    split = {"dp": ranks // config.cp, "cp": config.cp, "ep": config.ep}
    if ranks % config.ep:
        raise RunError(f"ep={config.ep} must divide the number of ranks, {ranks}; see --set ep=… and --nproc{hint}")
    try:
        config.check(split["dp"])
    except ValueError as error:
        raise RunError(str(error)) from None
    return split
