"""RL on the small world: `ref.rl.train` with what a long run needs. States are saved and restored, draft layers train
along, harder tasks are upsampled, all cores are used, and metrics are logged.

`recipe/small/stages.py` runs it once; the experiments run it with other settings and in worlds of their own.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch

from kit.process import map_on_cores, one_thread
from kit.runs import Stage
from kit.settings import RunError
from recipe.small.agent import Language, hash_seed, play
from recipe.small.data import task_stream
from recipe.small.demonstrations import context
from recipe.small.fp8_rounding import fp8_rows
from recipe.small.learner import Learner
from recipe.small.monitoring import Watching
from recipe.small.settings import Recipe
from recipe.small.tasks import Depths, MicroTasks
from ref.engine.continuous import ContinuousSampler
from ref.engine.sampler import Sampler
from ref.mtp import MTP
from ref.network import Transformer
from ref.rl import Done, train
from ref.rollout import Rollout
from ref.self_summary import Chaining

__all__ = ["CORES", "Moment", "Observer", "gate", "learn", "metrics_of", "of_rollouts"]

CORES = partial(map_on_cores, processes_per_core=2)
"""Next to two busy programs, four processes get two thirds of two cores; two get half."""


@dataclass
class Moment:
    """The policy before RL, or after a step."""

    step: int
    """Steps so far."""
    learner: Learner
    engine: Sampler
    """The training's; it may still hold the weights before the step."""
    done: Done | None = None
    """The step; None before the first one."""

    @cached_property
    def sampler(self) -> Sampler:
        """Holds the weights after the step."""
        if self.done:
            self.engine.load(self.learner.model, version=self.step)
        return self.engine

    @property
    def rollouts(self) -> Sequence[Rollout]:
        """Of the step."""
        return self.done.rollouts if self.done else ()


Observer = Callable[[Moment], dict]
"""Looks at a moment; what it returns is logged with the metrics of the step."""


def of_rollouts(measure: Callable[[Sequence[Rollout]], dict]) -> Observer:
    """An observer of each step's rollouts, without those whose environment failed."""
    return lambda moment: (
        measure([rollout for rollout in moment.rollouts if not rollout.failure]) if moment.done else {}
    )


def learn(
    stage: Stage,
    config: Recipe,
    model: Transformer,
    mtp: MTP | None,
    reference: Transformer,
    language: Language,
    observers: Sequence[Observer] = (),
    tasks: MicroTasks | None = None,
    chaining: Chaining | None = None,
) -> tuple[Learner, dict[str, int]]:
    """RL by `rl.variant`: every step samples G·N rollouts of fresh tasks with the newest weights and takes one Adam
    step on them. A rollout is a chain of contexts under `chaining`, by default the recipe's.

    model and mtp start from the end of SFT; `reference` prices drift. `tasks`: by default those of the recipe's world.
    `observers` look at the policy before the first step and after each. A `Watching` among them is the monitor; in the
    recipe's own world there is one by default (`rl.monitor`). Resumes from the stage's state. Returns the learner and
    what was consumed. Raises RunError if the policy's success is too low at the start (`rl.gate`), and for prices of
    behaviour in a world without transcripts."""
    r, t, chaining = config.rl, config.training, chaining or context(language, config)
    uses_default_tasks = tasks is None
    tasks = tasks or MicroTasks(config, language)
    learner = Learner(config, model, mtp, 0.0, 0.0)
    learner.optimizers = [torch.optim.Adam(learner.trunk.masters.parameters(), lr=r.lr, betas=(0.9, 0.95), fused=True)]
    learner.rates = [[g["lr"] for g in o.param_groups] for o in learner.all_optimizers]
    if r.behaviour.max_penalty and tasks.record is None:
        raise RunError(
            "behaviour has no record in this experiment's world; start from a run without prices of "
            "behaviour (rl.behaviour)"
        )
    watch = next((observer for observer in observers if isinstance(observer, Watching)), None)
    if watch is None and uses_default_tasks and r.monitor.on:
        watch = Watching.recipe(r.monitor, r.max_len)
        observers = [watch, *observers]
    rounding = fp8_rows if t.sampler_weights == "fp8" else None
    sampler = ContinuousSampler(learner.model, getattr(torch, t.sampler_dtype), rounding=rounding)

    curriculum, state, seen_tokens = Depths(config), stage.restore(), 0
    first = learner.restore(state) if state else 0
    if state:
        seen_tokens = state["seen"]
        curriculum.restore(state)
        if watch:
            watch.restore(state["watch"])
    else:
        if r.gate and (success := gate(config, sampler, language, chaining)) < r.gate:
            raise RunError(
                f"sampled success after SFT is {success:.3f}, below rl.gate={r.gate}: penalties would only teach the "
                "policy to stop; train longer (--set training.tokens=…) or lower --set rl.gate=…"
            )
        if initial_metrics := run_observers(observers, Moment(0, learner, sampler)):
            stage.log(0, **initial_metrics)

    def observe(done: Done) -> None:
        nonlocal seen_tokens
        seen_tokens += sum(len(segment.tokens) for rollout in done.rollouts for segment in rollout.chain.segments)
        metrics = metrics_of(config, done)
        metrics |= run_observers(observers, Moment(done.step, learner, sampler, done))
        for line in watch.lines if watch else ():
            stage.say(line)
        stage.log(done.step, **metrics)
        stage.progress(done.step, seen_tokens, reward=metrics["reward"], success=metrics["success"])
        if stage.due():
            watch_state = {"watch": watch.state()} if watch else {}
            stage.save(learner.state(done.step, seen=seen_tokens, **curriculum.state(), **watch_state), done.step)

    # the work between the processes is short; with other programs running, two threads would mostly wait for each other
    with one_thread():
        train(
            r,
            learner,
            sampler,
            tasks,
            language,
            r.limits(chaining),
            curriculum=curriculum,
            reference=reference.to(learner.dtype),
            seed=config.seed,
            first=first,
            observe=observe,
            map_fn=CORES,
        )
    prompts = r.steps * r.prompts
    return learner, {"steps": r.steps, "prompts": prompts, "rollouts": prompts * r.rollouts, "tokens": seen_tokens}


def run_observers(observers: Sequence[Observer], moment: Moment) -> dict:
    """What all observers say of a moment."""
    metrics: dict = {}
    for observer in observers:
        metrics |= observer(moment)
    return metrics


def gate(config: Recipe, sampler: Sampler, language: Language, chaining: Chaining) -> float:
    """Sampled success on 64 training tasks that RL does not use."""
    tasks = list(itertools.islice(task_stream(config, "gate"), 64))
    generator = torch.Generator().manual_seed(hash_seed(config.seed, "gate"))
    episodes = play(sampler, language, tasks, 4, config.rl.limits(chaining), config.rl.max_turns, generator)
    return float(np.mean([e.metrics["tests"] for e in episodes]))


def metrics_of(config: Recipe, done: Done) -> dict[str, float]:
    """The metrics of a step. `kl` is the policy's drift from the reference and `engine_kl` the difference to its
    sampler, in nats per rollout; `dropped` is the share of replayed experts that the filter removed, and `outside_clip`
    that of tokens whose own ratio leaves the clip. With `rl.feedback`, `hints` is their number per rollout, and
    `divergence` how far the policy is from itself under its hints, in nats per token of the messages that they correct.
    Rollouts whose environment failed are counted, and in no mean."""
    r, result = config.rl, done.result
    groups = [done.rollouts[start : start + r.rollouts] for start in range(0, len(done.rollouts), r.rollouts)]
    rollouts = [rollout for rollout in done.rollouts if not rollout.failure]
    solved_by_group = [[member.metrics["tests"] for member in group if not member.failure] for group in groups]
    chains = [rollout.chain for rollout in rollouts]
    ratio, size, clip = result.gap.exp(), result.gap.abs(), r.objective

    def mean(values: Iterable[float]) -> float:
        values = list(values)
        return float(sum(values) / len(values))

    def mean_metric(name: str) -> float:
        return mean(float(rollout.metrics[name]) for rollout in rollouts)

    figures = {
        "reward": mean(result.rewards[result.rewards.isfinite()].tolist()),
        "success": mean_metric("tests"),
        "best": mean(max(group) for group in solved_by_group if group),
        "tokens": result.tokens / len(rollouts),
        "turns": mean_metric("turns"),
        "invalid_calls": mean_metric("invalid_calls"),
        "tested": mean_metric("tested"),
        "effort": mean(rollout.terms["effort"] for rollout in rollouts),
        "kl": mean(result.drift[result.drift.isfinite()].tolist()),
        "engine_kl": mean(result.engine[result.engine.isfinite()].tolist()),
        "loss": result.loss,
        "nll": result.nll,
        **done.metrics,
        "mismatch": size.mean().item(),
        "mismatch_p99": float(np.quantile(size.numpy(), 0.99)),
        "mismatch_max": size.max().item(),
        "outside_clip": ((ratio < 1 - clip.clip_low) | (ratio > 1 + clip.clip_high)).double().mean().item(),
        "finished": mean(float(c.finished) for c in chains),
        "segments": sum(len(c.segments) for c in chains) / len(chains),
        "summary_tokens": mean(c.summary_tokens for c in chains),
        "depth": float(np.mean([task.depth for task in done.tasks])),
    }
    figures |= {name: mean_metric(name) for name in rollouts[0].metrics if name.startswith("behaviour_")}
    figures |= {"hints": mean(sum(map(len, rollout.hints)) for rollout in rollouts)} if r.feedback.weight else {}
    figures |= {"failed": float(len(done.rollouts) - len(rollouts))} if len(rollouts) < len(done.rollouts) else {}
    return figures | {
        name: value for name in ("mtp_loss", "dropped", "divergence") if (value := getattr(result, name)) is not None
    }
