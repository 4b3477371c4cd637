"""`etude run async-rl`: asynchronous RL of the small world's agent with processes of this machine (`scaled/async_rl`), from a checkpoint of the
small recipe. It measures success on held-out tasks before and after, and draws who did what when.

    runs/async-rl/services      journal, records of groups, weights, events: all that a killed run goes on with, and that replays it; with
                                --set store=… weights and records lie there instead
    runs/async-rl/timeline.png  trainer, workers' slots and versions over time
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from etude import async_timeline
from kit.process import keep_freed_memory, on_cores
from kit.runs import Run, Stage
from kit.settings import RunError
from ref.async_rl import Rules
from ref.engine.continuous import ContinuousSampler
from ref.engine.sampler import Sampler
from ref.network import load_hf, release, save_hf
from ref.rl import Payment, Settings
from scaled.async_rl import evaluator, services, vllm_engine
from scaled.async_rl.evaluator import Evaluate
from scaled.async_rl.learner import Trained
from scaled.async_rl.local import Plan, claim, play
from sims.drawing import save
from sims.microrepo.world import MicroWorld
from sims.statistics import bootstrap

__all__ = ["Async", "Small", "run"]


@dataclass(frozen=True)
class Async:
    """Settings of a run on one machine."""

    checkpoint: str = "runs/small/checkpoints/sft"
    """Hugging Face folder of a policy that was trained in the small world."""
    seed: int = 0
    """Seed of all random numbers. Which weights sample which token also depends on the machine's pace; the journal keeps it."""
    staleness: int = 2
    """Greatest age, in updates, of a token that is trained on (S). 0: the synchronous loop."""
    workers: int = 2
    """Processes that sample, one thread each."""
    slots: int = 64
    """Conversations that a worker holds at a time, those that wait for a tool included."""
    tool_s: float = 0.2
    """Mean time of a tool in seconds, log-normal with σ = 1."""
    timeout: float = 10.0
    """Seconds of silence after which a worker is given up."""
    tool_deadline: float = 60.0
    """Seconds that a tool may take; then its rollout is over."""
    standby: int = 0
    """Processes more that hold the weights and play nothing until a worker dies; one of them then takes its place."""
    store: str = ""
    """Where weights and records of groups lie: a folder, or an address such as s3://bucket/run; by default the run's own folder."""
    evaluate_every: int = 0
    """Steps from one version that is measured on the held-out tasks, while training goes on, to the next; 0: only before and after."""
    engine: Literal["own", "vllm"] = "own"
    """What workers sample with: this project's engine, or vLLM, which wants an environment of its own and a dense network."""
    join: Literal["self", "none"] = "self"
    """How contexts are joined: by self-summaries, or not at all."""
    heldout: int = 100
    """Held-out tasks before and after; 0: none."""
    samples: int = 4
    """Rollouts of each."""
    rl: Settings = field(default_factory=lambda: Settings(steps=30, decay=15, payment=Payment(), replay="filtered"))
    """What synchronous RL is told as well."""

    def __post_init__(self):
        for name, least in {
            "workers": 1,
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
        for name in ("timeout", "tool_deadline"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0 seconds, got {getattr(self, name)}")
        if self.evaluate_every and not self.heldout:
            raise ValueError(f"evaluate_every measures held-out tasks: heldout must be at least 1, got {self.heldout}")

    @property
    def length(self) -> int:
        """As long as contexts have to be."""
        return 1 << 30

    @property
    def rules(self) -> Rules:
        return Rules(self.rl.prompts, self.staleness, self.rl.steps)


@dataclass(frozen=True)
class Small:
    """`scaled.async_rl.local.Parts`: the small world, and a trainer with float32 masters and bfloat16 weights."""

    c: Async

    def sampler(self) -> Sampler:
        keep_freed_memory()
        return Sampler(load_hf(self.c.checkpoint), torch.float32)

    def scene(self) -> MicroWorld:
        return MicroWorld(self.c, tool_s=self.c.tool_s)

    def learner(self) -> Trained:
        keep_freed_memory()
        reference = load_hf(self.c.checkpoint) if self.c.rl.payment.kl else None
        return Trained(self.c.rl, load_hf(self.c.checkpoint), reference, on_cores)

    def evaluate(self) -> Evaluate:
        world = MicroWorld(self.c)
        return lambda sampler: float(successes(self.c, world, sampler.model).mean())


def run(run: Run, config: Async) -> dict:
    """Evaluation, services, evaluation. Raises RunError for a checkpoint that cannot be played, and for settings that do not fit each other."""
    c, folder = config, run.path("services")
    if not (Path(c.checkpoint) / "tokenizer.json").is_file():
        raise RunError(
            f"checkpoint {c.checkpoint} is not a folder with config.json, weights and tokenizer.json; make small writes {Async().checkpoint}"
        )
    world = MicroWorld(c)
    try:
        plan = Plan(
            folder,
            c.rules,
            Small(c),
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
            engine=c.engine,
        )
    except ValueError as error:
        raise RunError(str(error)) from None
    if c.engine == "vllm":
        vllm_engine.installed()
    claim(plan)  # before anything takes long
    before = measured(run.stage("before", c.heldout, "tasks"), c, world, load_hf(c.checkpoint)) if c.heldout else None
    stage = run.stage("services", c.rl.steps, "tokens")
    if not stage.finished:
        shown = Shown(stage, folder)
        play(plan, shown)
        stage.finish(async_timeline.summary(folder, c.rl.steps))
    learner = Small(c).learner()
    services.restored(folder / "trainer", learner)
    after = measured(run.stage("after", c.heldout, "tasks"), c, world, learner.model) if c.heldout else None
    found = dict(stage.result())
    if rows := [{name: line[name] for name in ("version", "success", "seconds")} for line in evaluator.measured(folder)]:
        found["heldout by version"] = rows
    if before and after:
        a, b = np.array(before["success"]), np.array(after["success"])
        gain = bootstrap(b - a, seed=c.seed)
        found |= {"success_before": float(a.mean()), "success_after": float(b.mean())}
        found |= {"gain": gain["value"], "gain_low": gain["low"], "gain_high": gain["high"]}
    network = learner.model.config
    card = release.card(
        f"etude run {run.technique}",
        "An agent after asynchronous reinforcement learning (Dr. GRPO).",
        network,
        {name.replace("_", " "): f"{value:.3g}" for name, value in found.items() if not isinstance(value, list)},
        opening="what the environment says first",
    )
    save_hf(learner.model, run.path("checkpoints", "final"), beside=release.beside(c.checkpoint, network, card))
    save(async_timeline.bars([async_timeline.played(run.root.name, folder)]), run.path("timeline.png"))
    return found


class Shown:
    """Shows a step: its metrics, what the workers do, how far the last of them is behind, and what the evaluator measured last."""

    def __init__(self, stage: Stage, folder: Path):
        self.stage, self.folder, self.tokens = stage, folder, 0.0

    def __call__(self, step: int, figures: dict[str, float]) -> None:
        self.tokens += figures["tokens"]
        now = async_timeline.slots(self.folder)
        lag = step - min((one["version"] for one in now), default=step)
        words = {name: figures[name] for name in ("reward", "success", "age")} | {"lag": lag}
        if known := evaluator.measured(self.folder):
            words["heldout"] = known[-1]["success"]
        self.stage.progress(step, self.tokens, **words, **{name: sum(one[name] for one in now) for name in ("decoding", "tools")})


def measured(stage: Stage, c: Async, world: MicroWorld, model: torch.nn.Module) -> dict:
    """Success of each held-out task, over its samples."""
    if stage.finished:
        return stage.result()
    found = successes(c, world, model)
    stage.progress(c.heldout)
    return stage.finish({"success": found})


def successes(c: Async, world: MicroWorld, model: torch.nn.Module) -> np.ndarray:
    """Success of each held-out task, over its samples: heldout"""
    sampler = ContinuousSampler(model, torch.float32)  # pyright: ignore[reportArgumentType]
    tasks = [task for task in range(c.heldout) for _ in range(c.samples)]
    played = world.play(sampler, "heldout", tasks, torch.Generator().manual_seed(c.seed))
    return np.array([p.figures["success"] for p in played]).reshape(-1, c.samples).mean(1)
