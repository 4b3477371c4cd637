"""`etude run async-rl`: asynchronous RL of the small world's agent with processes of this machine, or on a Ray cluster
(`scaled/async_rl`), from a checkpoint of the small recipe. It measures success on held-out tasks before and after, and
draws who did what when.

    runs/async-rl/services      journal, records of groups, weights, events: all that a killed run goes on with, and
                                that replays it; with
                                --set store=… weights and records lie there instead
    runs/async-rl/timeline.png  trainer, workers' slots and versions over time

With `--set trainers=2`, or `--scale full`, the trainer is a group of ranks that takes the step of `scaled/rl.py`
(`scaled/async_rl/group.py`)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from kit.plots import save
from kit.process import keep_freed_memory, map_on_cores
from kit.runs import Run, Stage
from kit.settings import RunError
from kit.statistics import bootstrap
from recipe.asynchronous import timeline as async_timeline
from recipe.packages.checkpoint_tasks import RolloutSetup, find_setup
from recipe.packages.tasks import PackageTasks
from recipe.small.agent import play
from recipe.small.micro_world import CheckpointTasks
from recipe.small.monitoring import make_watcher
from ref.async_rl import Rules
from ref.engine.continuous import ContinuousSampler
from ref.engine.sampler import Sampler
from ref.network import Transformer, load_hf, release, save_hf
from ref.network.model import config_of
from ref.rl import MonitorSettings, RewardCoefficients, Settings
from ref.rollout import sample_rollouts
from scaled.async_rl import cluster, evaluator, local, services, vllm_engine
from scaled.async_rl.evaluator import Evaluate
from scaled.async_rl.group import Sharded, TrainerGroup, restored
from scaled.async_rl.learner import Trained
from scaled.async_rl.local import Plan, claim
from scaled.async_rl.player import Setup
from scaled.network import model as sharded
from scaled.rl import Rl
from scaled.runtime.mesh import Compute, Layout

__all__ = ["Async", "Cluster", "Small", "run", "successes", "check_checkpoint"]


@dataclass(frozen=True)
class Cluster:
    """The ranks of a trainer that is a group, as in a full run of RL."""

    backend: Literal["gloo", "nccl"] = "gloo"
    """gloo: CPUs. nccl: a GPU for each rank."""
    cp: int = 1
    """Ranks that split the tokens of each row."""
    ep: int = 1
    """Ranks that split the experts of each layer."""
    length: int = 256
    """Tokens per row."""
    micro_rows: int = 32
    """Rows per dp rank in one forward pass."""
    dtype: Literal["bfloat16", "float32"] = "float32"
    """Compute dtype; weights, gradient sums and moments are float32."""
    rematerialise: bool = False
    """Recompute the activations of each block in the backward pass instead of keeping them."""
    timeout: float = 900.0
    """Seconds that a rank may keep the others waiting in the middle of a step."""


@dataclass(frozen=True)
class Async:
    """Settings of a run."""

    checkpoint: str = "runs/small/checkpoints/sft"
    """Hugging Face folder of a policy that was trained in the small world."""
    runtime: Literal["local", "ray"] = "local"
    """local: processes of this machine. ray: a Ray cluster, which RAY_ADDRESS names; without it Ray starts here."""
    seed: int = 0
    """Seed of all random numbers. Which weights sample which token also depends on the machine's pace; the journal
    keeps it."""
    staleness: int = 2
    """Maximum age, in updates, of a token that is trained on (S). 0: the synchronous loop."""
    workers: int = 2
    """Processes that sample, one thread each."""
    slots: int = 64
    """Concurrent conversations per worker, including those that wait for a tool."""
    tool_s: float = 0.2
    """Mean time of a tool in seconds, log-normal with σ = 1."""
    timeout: float = 10.0
    """Seconds without a heartbeat after which a worker is replaced."""
    tool_deadline: float = 60.0
    """Time limit of an environment's call, in seconds; after it the call has failed, and the episode is retried."""
    standby: int = 0
    """Standby processes, which hold the weights and replace a worker that dies."""
    store: str = ""
    """Store of weights and records of groups: a folder, or an address such as s3://bucket/run; by default the run's
    folder."""
    trainers: int = 1
    """Processes that train. More than one form a group of ranks, each with a part of the network and of a step's
    rollouts."""
    cluster: Cluster = field(default_factory=Cluster)
    """The ranks of such a group."""
    evaluate_every: int = 0
    """Steps between evaluations on the held-out tasks during training; 0: only before and after."""
    engine: Literal["own", "vllm"] = "own"
    """Inference engine of the workers: this project's, or vLLM, which needs a separate environment and a dense
    network."""
    join: Literal["self", "none"] = "self"
    """How contexts are joined: by self-summaries, or not at all."""
    heldout: int = 100
    """Number of held-out tasks before and after; 0: none."""
    samples: int = 4
    """Rollouts per held-out task."""
    rl: Settings = field(
        default_factory=lambda: Settings(steps=30, decay=15, payment=RewardCoefficients(), replay="filtered")
    )
    """Settings that synchronous RL has, too."""

    def __post_init__(self):
        for name, least in {
            "workers": 1,
            "trainers": 1,
            "slots": 1,
            "samples": 1,
            "heldout": 0,
            "tool_s": 0,
            "staleness": 0,
            "standby": 0,
            "evaluate_every": 0,
        }.items():
            if not getattr(self, name) >= least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.rl.steps < 1:
            raise ValueError(f"rl.steps must be at least 1, got {self.rl.steps}")
        if self.rl.lora:
            raise ValueError("rl.lora is for synchronous RL, such as etude run recipe --scale full")
        if self.rl.shuffle_rewards:
            raise ValueError(
                "rl.shuffle_rewards needs all rollouts of a step at once; use synchronous RL, such as etude run recipe"
            )
        for name in ("timeout", "tool_deadline"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0 seconds, got {getattr(self, name)}")
        if self.evaluate_every and not self.heldout:
            raise ValueError(f"evaluate_every measures held-out tasks: heldout must be at least 1, got {self.heldout}")
        if self.grouped:
            try:
                self.ranks.check(self.layout.dp)
            except ValueError as error:
                raise ValueError(f"cluster: {error}") from None
            if self.trainers == 1 and self.cluster.dtype != "float32":
                raise ValueError(f"cluster.dtype must be float32 with a single rank, got {self.cluster.dtype}")

    @property
    def grouped(self) -> bool:
        """Whether the trainer is a group of ranks."""
        return self.trainers > 1 or self.cluster.backend == "nccl"

    @property
    def layout(self) -> Layout:
        """How the ranks of a group share the work."""
        cp, ep = self.cluster.cp, self.cluster.ep
        for name, size in (("cp", cp), ("ep", ep)):
            if size < 1 or self.trainers % size:
                raise ValueError(f"{name}={size} must divide the number of trainers, {self.trainers}")
        return Layout(self.trainers // cp, cp, ep)

    @property
    def ranks(self) -> Rl:
        """The group's settings, as a full run of RL has them."""
        c = self.cluster
        shared_settings = {
            name: getattr(c, name) for name in ("length", "cp", "ep", "micro_rows", "dtype", "rematerialise", "timeout")
        }
        return Rl(checkpoint=self.checkpoint, rl=self.rl, join=self.join, seed=self.seed, heldout=0, **shared_settings)

    @property
    def length(self) -> int:
        """As long as contexts may be."""
        return self.cluster.length if self.grouped else 1 << 30

    @property
    def rules(self) -> Rules:
        return Rules(self.rl.prompts, self.staleness, self.rl.steps)


@dataclass(frozen=True)
class Small:
    """`scaled.async_rl.local.Parts`: the small world, and a trainer with float32 masters and bfloat16 weights. Raises
    RunError on a machine that does not see the checkpoint."""

    c: Async
    is_watched: bool = False
    """Whether a monitor reads the rollouts (`Plan.watch`)."""

    def sampler(self) -> Sampler:
        keep_freed_memory()
        return Sampler(load_hf(check_checkpoint(self.c.checkpoint)), torch.float32)

    def setup(self) -> Setup:
        # Without a monitor nothing needs transcripts.
        settings = self.c.rl if self.is_watched else replace(self.c.rl, monitor=MonitorSettings(on=False))
        return Setup(*find_setup(self.c, tool_s=self.c.tool_s), settings)

    def learner(self) -> Trained:
        keep_freed_memory()
        reference = load_hf(check_checkpoint(self.c.checkpoint)) if self.c.rl.payment.kl else None
        return Trained(self.c.rl, load_hf(check_checkpoint(self.c.checkpoint)), reference, map_on_cores)

    def rank(self) -> Sharded:
        """What a rank trains, instead."""
        keep_freed_memory()
        reference = sharded.load_hf(self.c.checkpoint) if self.c.rl.payment.kl else None
        return Sharded(self.c.ranks, sharded.load_hf(self.c.checkpoint), reference)

    def group(self) -> TrainerGroup:
        c = self.c.cluster
        compute = Compute(torch.bfloat16 if c.dtype == "bfloat16" else None, c.rematerialise)
        return TrainerGroup(self.c.layout, self.rank, compute, c.backend, c.timeout)

    def trained(self, folder: Path) -> Transformer:
        """The policy as it was saved last, in bfloat16."""
        if self.c.grouped:
            network = load_hf(self.c.checkpoint)
            restored(folder, network)
            return network.bfloat16()
        learner = self.learner()
        services.restored(folder / "trainer", learner)
        return learner.model

    def evaluate(self) -> Evaluate:
        setup = find_setup(self.c)
        return lambda sampler: float(heldout_success(self.c, setup, sampler.model).mean())


def check_checkpoint(checkpoint: str) -> str:
    """The folder of a policy. Raises RunError if there is none."""
    if not (Path(checkpoint) / "tokenizer.json").is_file():
        raise RunError(
            f"checkpoint {checkpoint} is not a folder with config.json, weights and tokenizer.json; "
            f"make small writes {Async().checkpoint}"
        )
    return checkpoint


def run(run: Run, config: Async) -> dict:
    """Evaluation, services, evaluation. Raises RunError for a checkpoint that cannot be played, and for settings that
    do not fit each other."""
    c, folder = config, run.path("services")
    check_checkpoint(c.checkpoint)
    if c.runtime == "ray":
        cluster.imported()
    setup = find_setup(c, length="cluster.length")
    if c.cluster.backend == "nccl" and c.runtime == "local" and torch.cuda.device_count() < c.trainers:
        gpu_count = torch.cuda.device_count()
        hint = "on one GPU: --set trainers=1; " if gpu_count else ""
        raise RunError(
            f"{c.trainers} trainers over nccl need as many GPUs, and this machine has {gpu_count}; "
            f"{hint}on CPUs: --set cluster.backend=gloo"
        )
    if c.grouped and (experts := config_of(c.checkpoint).num_experts) % c.cluster.ep:
        raise RunError(f"cluster.ep={c.cluster.ep} must divide the network's {experts} experts; see --set cluster.ep=…")
    try:
        plan = Plan(
            folder,
            c.rules,
            # Processes may start in another folder.
            Small(replace(c, checkpoint=str(Path(c.checkpoint).resolve())), is_watched=c.rl.monitor.on),
            c.workers,
            c.slots,
            c.rl.rollouts,
            c.seed,
            c.rl.temperature,
            c.timeout,
            store=c.store,
            tool_deadline=c.tool_deadline,
            standby=c.standby,
            evaluate_every=c.evaluate_every,
            group=Small(c).group() if c.grouped else None,
            engine=c.engine,
            watch=partial(make_watcher, c.rl, setup.tasks.tools) if c.rl.monitor.on else None,
        )
    except ValueError as error:
        raise RunError(str(error)) from None
    if c.engine == "vllm":
        vllm_engine.installed()
    claim(plan)  # before anything takes long
    before = (
        measure_heldout(run.stage("before", c.heldout, "tasks"), c, setup, load_hf(c.checkpoint)) if c.heldout else None
    )
    stage = run.stage("services", c.rl.steps, "tokens")
    if not stage.finished:
        reporter = StepReporter(stage, folder)
        (cluster.play if c.runtime == "ray" else local.play)(plan, reporter, say=stage.say)
        stage.finish(async_timeline.summary(folder, c.rl.steps))
    model = Small(c).trained(folder)
    after = measure_heldout(run.stage("after", c.heldout, "tasks"), c, setup, model) if c.heldout else None
    metrics = dict(stage.result())
    if rows := [
        {name: line[name] for name in ("version", "success", "seconds")} for line in evaluator.read_measurements(folder)
    ]:
        metrics["heldout by version"] = rows
    if before and after:
        a, b = np.array(before["success"]), np.array(after["success"])
        gain = bootstrap(b - a, seed=c.seed)
        metrics |= {"success_before": float(a.mean()), "success_after": float(b.mean())}
        metrics |= {"gain": gain["value"], "gain_low": gain["low"], "gain_high": gain["high"]}
    network = model.config
    card = release.make_model_card(
        f"etude run {run.technique}",
        f"An agent after asynchronous reinforcement learning ({c.rl.algorithm}).",
        network,
        {name.replace("_", " "): f"{value:.3g}" for name, value in metrics.items() if not isinstance(value, list)},
        opening="what the environment says first",
    )
    save_hf(
        model, run.path("checkpoints", "final"), sidecar_files=release.make_sidecar_files(c.checkpoint, network, card)
    )
    save(async_timeline.bars([async_timeline.make_run_timeline(run.root.name, folder)]), run.path("timeline.png"))
    return metrics


class StepReporter:
    """Shows a step: its metrics, what the workers do, how far the last of them is behind, and what the evaluator
    measured last."""

    def __init__(self, stage: Stage, folder: Path):
        self.stage, self.folder, self.tokens = stage, folder, 0.0

    def __call__(self, step: int, metrics: dict[str, float]) -> None:
        self.tokens += metrics["tokens"]
        slots = async_timeline.slots(self.folder)
        lag = step - min((slot["version"] for slot in slots), default=step)
        display_values = {name: metrics[name] for name in ("reward", "success", "age")} | {"lag": lag}
        if evaluations := evaluator.read_measurements(self.folder):
            display_values["heldout"] = evaluations[-1]["success"]
        self.stage.progress(
            step,
            self.tokens,
            **display_values,
            **{name: sum(slot[name] for slot in slots) for name in ("decoding", "tools")},
        )


def measure_heldout(stage: Stage, c: Async, setup: RolloutSetup, model: torch.nn.Module) -> dict:
    """Success of each held-out task, over its samples."""
    if stage.finished:
        return stage.result()
    success_rates = heldout_success(c, setup, model)
    stage.progress(c.heldout)
    return stage.finish({"success": success_rates})


def heldout_success(c: Async, setup: RolloutSetup, model: torch.nn.Module) -> np.ndarray:
    """Success of each held-out task, over its samples: at most `heldout`, since packages have only so many. Raises
    RunError where a rollout has no result."""
    tasks = setup.tasks
    if not isinstance(tasks, PackageTasks):
        return successes(c, tasks, model)
    selected, draws = tasks.heldout_tasks(c.heldout), torch.Generator().manual_seed(c.seed)
    sampler = ContinuousSampler(model, torch.float32)  # pyright: ignore[reportArgumentType]
    rollouts = sample_rollouts(
        sampler,
        tasks.environment,
        selected,
        c.samples,
        setup.chat_format,
        setup.limits,
        c.rl.temperature,
        draws,
        threads=tasks.is_slow,
    )
    if failures := [rollout.failure for rollout in rollouts if rollout.failure]:
        raise RunError(f"{len(failures)} rollouts of an evaluation have no result, the first because {failures[0]}")
    return np.array([rollout.metrics["success"] for rollout in rollouts]).reshape(-1, c.samples).mean(1)


def successes(c: Async, tasks: CheckpointTasks, model: torch.nn.Module) -> np.ndarray:
    """Success of each held-out task, over its samples: heldout"""
    sampler = ContinuousSampler(model, torch.float32)  # pyright: ignore[reportArgumentType]
    heldout_tasks, draws = (
        [tasks.task("heldout", number) for number in range(c.heldout)],
        torch.Generator().manual_seed(c.seed),
    )
    rollouts = play(
        sampler,
        tasks.language,
        heldout_tasks,
        c.samples,
        tasks.limits,
        tasks.config.rl.max_turns,
        draws,
        c.rl.temperature,
    )
    return np.array([rollout.metrics["success"] for rollout in rollouts]).reshape(-1, c.samples).mean(1)
