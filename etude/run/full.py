"""`etude run TECHNIQUE --scale full`: the parent process. It checks settings, folder and GPUs, then starts torchrun on
`etude/run/rank.py`."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude import catalog
from etude.console import expected, next_steps
from etude.run.settings import DELETION, PRETRAINING, RL, as_begun, count, layout, settings
from kit.disk import read_json, read_lines
from kit.runs import Run
from kit.settings import Preempted, RunError

if TYPE_CHECKING:
    from scaled.runtime.launch import Node

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
    node: Node | None = None,
) -> None:
    """The parent process, on one machine or on each of several; `node`: which. Raises RunError if the run cannot start
    or a rank fails."""
    config = settings(entry.name, backend, toml, sets)
    if entry.name in ("recipe", "cpt-rl"):
        return run_recipe(entry.name, config, out, resume, nproc, backend, node)
    if entry.name == DELETION:
        return run_deletion(config, out, resume, nproc, backend)
    ranks = count(config, nproc, backend, entry.name, node.count if node else 1)
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
    group = RankGroup(entry.name, config, out, ranks, backend, node)
    if not group.is_first_node:
        return group.join(config.restarts)
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
    with Run.open(out, f"{entry.name} full", as_begun(config, out) if resume else config, resume) as open_run:
        from scaled import pretrain

        check_left(out)
        expected.tell(open_run, ranks=ranks, backend=backend)
        if entry.name in PRETRAINING:
            with open_run.report_interruption(group.resume_command):
                try:
                    pretrain.prepare(config, out)  # here a bad corpus is a one-line error, and no GPU waits yet
                except ValueError as error:
                    raise RunError(str(error)) from None
        code = group.start(config.restarts)
    group.check(code)
    show(out)
    next_steps.show(next_steps.of_full(out, entry.name in RL))


def run_recipe(name: str, config, out: Path, resume: bool, nproc: int | None, backend: str, node: Node | None) -> None:
    """The parent process of all stages of the recipe, once or for several budgets. Raises RunError as `run`."""
    from etude.run import budget_ladder
    from etude.run import summary as run_summary
    from recipe.full import stages as chain
    from recipe.full.package_stages import STOPPED, refusal_of
    from recipe.packages.own_reward import trust_reward

    ranks = count(config.cluster, nproc, backend, name, node.count if node else 1)
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
    group = RankGroup("recipe", config, out, ranks, backend, node)
    if not group.is_first_node:
        return group.join(config.cluster.restarts)
    with Run.open(out, "recipe full", run_config, resume) as open_run:
        with open_run.report_interruption(group.resume_command):
            expected.tell(open_run, ranks=ranks, backend=backend)
            chain.prepare(open_run, config)
            (out / STOPPED).unlink(missing_ok=True)
            code = group.start(config.cluster.restarts)
        group.check(code)
        if (out / STOPPED).exists():
            stopped = (out / STOPPED).read_text(encoding="utf-8")
            raise RunError(f"{stopped}. Continue with: {group.resume_command}")
        if refusal := refusal_of(out):
            raise RunError(refusal)
        run_summary.show(out)


def run_deletion(config, out: Path, resume: bool, nproc: int | None, backend: str) -> None:
    """The parent process of a run that tries all pieces of a package. Raises RunError as `run`."""
    from etude.run import feature_deletion

    ranks, package = count(config, nproc, backend, DELETION), feature_deletion.material(config)
    group = RankGroup(DELETION, config, out, ranks, backend)
    with Run.open(
        out, f"{DELETION} full", as_begun(config, out, ("timeout",)) if resume else config, resume
    ) as open_run:
        with open_run.report_interruption(group.resume_command):
            feature_deletion.prepare(config, package, out)
            code = group.start(0)
        group.check(code)
    feature_deletion.show(out)


@dataclasses.dataclass(frozen=True)
class RankGroup:
    """The ranks of a run: how they start, and what is said when they fail."""

    name: str
    """Of the technique, or recipe."""
    config: Any
    """Its settings."""
    out: Path
    """The folder of the run, the same on all machines."""
    ranks: int
    """On all machines."""
    backend: str
    """nccl or gloo."""
    node: Node | None = None
    """This machine among several."""

    @property
    def is_first_node(self) -> bool:
        """Whether this machine prepares the folder and shows the result."""
        return self.node is None or self.node.number == 0

    @property
    def local_ranks(self) -> int:
        """Ranks of this machine."""
        return self.ranks // (self.node.count if self.node else 1)

    @property
    def resume_command(self) -> str:
        """What continues the run, on this machine."""
        command = f"etude run {self.name} --scale full --out {shlex.quote(str(self.out))} --resume"
        if self.backend == "gloo":
            command += f" --backend gloo --nproc {self.local_ranks}"
        if self.node is not None:
            node = self.node
            command += f" --nodes {node.count} --node {node.number} --rendezvous {node.host}:{node.port}"
        return command

    def start(self, restarts: int) -> int:
        """Runs the ranks of this machine; returns the exit code."""
        from scaled.runtime import launch

        payload = {"technique": self.name, "backend": self.backend, "ranks": self.ranks}
        arguments = [str(self.out.resolve()), json.dumps(payload | {"config": dataclasses.asdict(self.config)})]
        try:
            return launch.start("etude.run.rank", arguments, self.local_ranks, restarts, self.node)
        except Preempted as error:
            raise Preempted(f"{error}. Continue with: {self.resume_command}") from None

    def check(self, code: int) -> None:
        """Raises RunError if ranks have failed."""
        if code:
            memory = LESS_MEMORY * (self.backend == "nccl" and self.name != DELETION)
            raise RunError(
                f"the ranks of {'the ' * (self.name == 'recipe')}{self.name} failed; their errors are above. "
                f"Continue with: {self.resume_command}{memory}"
            )

    def join(self, restarts: int) -> None:
        """The ranks of a machine that is not the first, to their end: all else the first machine does."""
        self.check(self.start(restarts))


def check_work(config, name: str, ranks: int) -> None:
    """Raises RunError now for what every rank would report later, sometimes after minutes."""
    from recipe.full.weights import check_files
    from ref.network import CheckpointError

    corpus = getattr(config, "corpus", None)
    if corpus and not Path(corpus).is_dir():
        raise RunError(f"corpus {corpus} is not a folder; see --corpus and --set corpus=…")
    if ranks == 1 and config.dtype != "float32":
        raise RunError(
            f"dtype={config.dtype} needs more than one rank (--nproc); with one rank use --set dtype=float32"
        )
    try:
        network = check_files(Path(config.checkpoint))
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
