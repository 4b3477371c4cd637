"""`etude run TECHNIQUE --scale full`: the parent process. It checks settings, folder and GPUs, then starts torchrun on
`etude/run/rank.py`."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path

from etude import catalog
from etude.console import expected, next_steps
from etude.run.settings import DELETION, PRETRAINING, RL, as_begun, count, layout, settings
from kit.disk import read_json, read_lines
from kit.runs import Run
from kit.settings import RunError

__all__ = ["run"]

NO_CHECKPOINT = (
    "a full run starts from a checkpoint: --checkpoint FOLDER, a Hugging Face folder. Download one with "
    "`hf download Qwen/Qwen3-30B-A3B-Base --local-dir FOLDER`, or use a tiny one of a small run: "
    "runs/small/checkpoints/mid-cpt, after make small"
)
LESS_MEMORY = (
    ". If a GPU ran out of memory: shorter rows, fewer rows per forward pass, or more GPUs; etude plan estimates it"
)
"""Hint after ranks on GPUs have failed."""


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
        raise RunError(NO_CHECKPOINT)
    if not (Path(config.checkpoint) / "tokenizer.json").is_file():
        source_hint = "make small writes runs/small/checkpoints/" + ("sft" if entry.name in RL else "mid-cpt")
        raise RunError(
            f"checkpoint {config.checkpoint} is not a folder with config.json, weights and "
            f"tokenizer.json; see --checkpoint ({source_hint})"
        )
    check_work(config, entry.name, ranks)
    if entry.name in RL:
        from recipe.small.micro_world import origin

        root, _ = origin(Path(str(config.checkpoint)))
        print(
            "tasks and contexts: "
            + (
                f"as in {root}"
                if root
                else f"the recipe's defaults; {config.checkpoint} comes from no run of the recipe"
            )
        )
    resume_command = f"etude run {entry.name} --scale full --out {shlex.quote(str(out))} --resume" + (
        f" --backend {backend} --nproc {ranks}" if backend == "gloo" else ""
    )
    with Run.open(out, f"{entry.name} full", as_begun(config, out) if resume else config, resume) as open_run:
        from scaled import pretrain
        from scaled.runtime import launch

        check_left(out)
        expected.tell(open_run, ranks=ranks, backend=backend)
        if entry.name in PRETRAINING:
            with open_run.report_interruption(resume_command):
                try:
                    pretrain.prepare(config, out)  # here a bad corpus is a one-line error, and no GPU waits yet
                except ValueError as error:
                    raise RunError(str(error)) from None
        payload = json.dumps(
            {"technique": entry.name, "backend": backend, "ranks": ranks, "config": dataclasses.asdict(config)}
        )
        code = launch.start("etude.run.rank", [str(out.resolve()), payload], ranks, config.restarts)
    if code:
        raise RunError(describe_failure(entry.name, resume_command, backend))
    show(out)
    next_steps.show(next_steps.of_full(out, entry.name in RL))


def run_recipe(name: str, config, out: Path, resume: bool, nproc: int | None, backend: str) -> None:
    """The parent process of all stages of the recipe, once or for several budgets. Raises RunError as `run`."""
    from etude.run import budget_ladder
    from etude.run import summary as run_summary
    from recipe.full import stages as chain
    from recipe.full.package_stages import STOPPED, refusal_of
    from recipe.packages.own_reward import trust_reward
    from scaled.runtime import launch

    ranks = count(config.cluster, nproc, backend, name)
    if config.checkpoint is None:
        raise RunError(NO_CHECKPOINT)
    if name == "recipe" and config.tasks.reward is not None and not resume:
        trust_reward(Path(config.tasks.reward))  # named by the user, not by a folder that is resumed
    try:
        (chain if name == "recipe" else budget_ladder).check(config, ranks)
    except ValueError as error:
        raise RunError(str(error)) from None
    run_config = config
    if resume:
        cluster = as_begun(config.cluster, out, chain.FREE, lambda config: config["cluster"])
        run_config = dataclasses.replace(config, cluster=cluster)
    if name == "cpt-rl":
        return budget_ladder.learn(run_config, out, resume, ranks, backend, config.cluster)
    resume_command = f"etude run recipe --scale full --out {shlex.quote(str(out))} --resume" + (
        f" --backend gloo --nproc {ranks}" if backend == "gloo" else ""
    )
    with Run.open(out, "recipe full", run_config, resume) as open_run:
        with open_run.report_interruption(resume_command):
            expected.tell(open_run, ranks=ranks, backend=backend)
            chain.prepare(open_run, config)
            payload = json.dumps(
                {"technique": "recipe", "backend": backend, "ranks": ranks, "config": dataclasses.asdict(config)}
            )
            (out / STOPPED).unlink(missing_ok=True)
            code = launch.start("etude.run.rank", [str(out.resolve()), payload], ranks, config.cluster.restarts)
        if code:
            raise RunError(describe_failure("the recipe", resume_command, backend))
        if (out / STOPPED).exists():
            raise RunError(f"{(out / STOPPED).read_text(encoding='utf-8')}. Continue with: {resume_command}")
        if refusal := refusal_of(out):
            raise RunError(refusal)
        run_summary.show(out)


def run_deletion(config, out: Path, resume: bool, nproc: int | None, backend: str) -> None:
    """The parent process of a run that tries all pieces of a package. Raises RunError as `run`."""
    from etude.run import feature_deletion
    from scaled.runtime import launch

    ranks, package = count(config, nproc, backend, DELETION), feature_deletion.material(config)
    resume_command = (
        f"etude run {DELETION} --scale full --out {shlex.quote(str(out))} --resume --backend {backend} --nproc {ranks}"
    )
    with Run.open(
        out, f"{DELETION} full", as_begun(config, out, ("timeout",)) if resume else config, resume
    ) as open_run:
        with open_run.report_interruption(resume_command):
            feature_deletion.prepare(config, package, out)
            payload = json.dumps(
                {"technique": DELETION, "backend": backend, "ranks": ranks, "config": dataclasses.asdict(config)}
            )
            code = launch.start("etude.run.rank", [str(out.resolve()), payload], ranks, 0)
        if code:
            raise RunError(describe_failure(DELETION, resume_command, "gloo"))
    feature_deletion.show(out)


def describe_failure(name: str, resume_command: str, backend: str) -> str:
    """The error message after ranks have failed."""
    return (
        f"the ranks of {name} failed; their errors are above. Continue with: "
        f"{resume_command}{LESS_MEMORY * (backend == 'nccl')}"
    )


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
            f"dtype={config.dtype} needs more than one rank (--nproc); with one rank use --set dtype=float32"
        )
    try:
        network = config_of(config.checkpoint)
        with torch.device("meta"):
            shapes = {key: tuple(x.shape) for key, x in Transformer(network).state_dict().items()}
        matched(Path(config.checkpoint), shapes)
        if network.num_experts % config.ep:
            raise RunError(f"ep={config.ep} must divide the network's {network.num_experts} experts; see --set ep=…")
        if not network.num_experts and (name in RL and config.rl.replay != "none" or config.experts != "model"):
            raise RunError(
                f"{name} needs a network with experts, and {config.checkpoint} has none; see --set "
                f"rl.replay=… and experts=…"
            )
        if name in RL:
            from recipe.packages.checkpoint_tasks import find_setup

            find_setup(config)
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
            raise RunError(
                f"{path} does not hold packed rows ({' '.join(str(error).split())}); delete "
                f"{out / 'data'} to pack again"
            ) from None
    shelf = Checkpoints(out / "state")
    try:
        if shelf.steps():
            shelf.names()
    except CheckpointError as error:
        raise RunError(
            f"{error}; delete {shelf.path(shelf.steps()[-1])} to continue from the previous "
            f"checkpoint, or choose another --out"
        ) from None


def show(out: Path) -> None:
    """Prints the result."""
    record = read_json(out / "report.json")
    for key, value in record["result"].items():
        print(f"{key:22s} {value:.4g}")
    if record["technique"] in RL:
        from etude.report import watched

        if summary := watched.sentence(read_lines(out / "metrics" / f"{record['technique']}.jsonl")):
            print(f"RL:     {summary}")
    print(f"report: {out / 'report.json'}\nmodel:  {out / 'checkpoints' / 'final'}")
