"""How long the services of asynchronous RL take on this machine, so that the virtual clock of `ref.async_rl.simulate`
can foretell a run.

    measure(folder, config)              a short synchronous run of the services, and an engine that is timed token by
                                         token
    foretell(pace, config, tasks)      the seconds that a run should take, and all else that the virtual clock sees

Nothing of the run that is foretold goes in: not its steps, not its rollouts. What goes in is how long a step of
training takes on idle cores, how long a token takes with so many rows, from the end of a step to new weights in an
engine, and the turns of the short run's rollouts."""

from __future__ import annotations

import shutil
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from kit.process import cores, map_on_cores
from recipe.asynchronous import timeline as async_timeline
from recipe.asynchronous.run import Async, Small
from recipe.small.micro_world import CheckpointTasks
from ref.async_rl import Load, Outcome, Rules, simulate
from ref.rollout import Rollout
from scaled.async_rl import services
from scaled.async_rl.local import Plan, play
from scaled.async_rl.player import Player

__all__ = ["Pace", "as_json", "foretell", "measure", "of_json", "plan_of", "second", "turns"]


@dataclass(frozen=True)
class Pace:
    """Times in seconds, and the turns of some rollouts."""

    train_s: float
    """A step of training on all cores, nothing else running; saving it included."""
    publish_s: float
    """From the end of a step until an engine begins to load its weights."""
    swap_s: float
    """An engine's pause for new weights."""
    token_s: tuple[float, float]
    """An engine's step: a + b · rows, while each core has an engine."""
    turns: list[list[list[tuple[int, bool]]]]
    """Of each group and rollout the turns: tokens, and whether a tool runs afterwards."""


def plan_of(folder: Path, c: Async) -> Plan:
    """A run of the services with these settings, in this folder."""
    return Plan(
        folder,
        c.rules,
        Small(c),
        c.workers,
        c.slots,
        c.rl.rollouts,
        c.seed,
        c.rl.temperature,
        c.timeout,
        tool_deadline=c.tool_deadline,
    )


def measure(folder: Path, c: Async, steps: int = 8) -> Pace:
    """Plays `steps` synchronous steps without latency in `folder`, which is emptied before, and then times engines, one
    on each core. The first half of the steps is not timed: until memory has been touched and kernels chosen, a step
    takes half as long again."""
    shutil.rmtree(folder, ignore_errors=True)
    slots = -(-c.rl.prompts // c.workers) * c.rl.rollouts
    short = replace(c, staleness=0, tool_s=0.0, slots=slots, rl=replace(c.rl, steps=steps))
    play(plan_of(folder, short))
    service_events = async_timeline.events(folder)
    training_steps, warmup = async_timeline.trainings(service_events["trainer"]), steps // 2
    save_times = {step["version"]: step["at"] for step in training_steps}
    loads = [
        line
        for lines in async_timeline.workers(service_events).values()
        for line in lines
        if line["what"] == "load" and warmup <= line["version"] < steps
    ]
    rollouts_by_step = [rollouts for _, rollouts in services.trained(folder)]
    groups = [
        step_rollouts[n : n + c.rl.rollouts]
        for step_rollouts in rollouts_by_step
        for n in range(0, len(step_rollouts), c.rl.rollouts)
    ]
    ticks = np.concatenate(map_on_cores(lambda number: time_engine(short, number), range(cores())))
    coefficients = np.linalg.lstsq(np.stack([np.ones(len(ticks)), ticks[:, 0]], 1), ticks[:, 1], rcond=None)[0]
    return Pace(
        statistics.median(step["at"] - step["began"] for step in training_steps[warmup:]),
        statistics.median(line["at"] - line["pause_s"] - save_times[line["version"]] for line in loads),
        statistics.median(line["pause_s"] for line in loads),
        (max(float(coefficients[0]), 1e-4), max(float(coefficients[1]), 0.0)),
        [[turns(rollout) for rollout in group] for group in groups],
    )


def time_engine(c: Async, number: int) -> np.ndarray:
    """Rows and seconds of each step of an engine that plays a worker's share of a step: [steps, 2]"""
    parts = Small(c)
    sampler = parts.sampler()
    sampler.version = 0
    player = Player(sampler, parts.setup(), c.slots, c.rl.rollouts, c.seed, c.rl.temperature)
    share = c.slots // c.rl.rollouts
    player.give(range(share * number, share * (number + 1)))
    samples = []
    while player.groups:
        rows, start = player.slots()["decoding"] + player.slots()["queued"], time.monotonic()
        player.tick()
        samples.append((rows, time.monotonic() - start))
    return np.array(samples)


def turns(rollout: Rollout) -> list[tuple[int, bool]]:
    """The turns of a rollout: how many tokens were sampled, and whether a tool ran afterwards. None where its
    environment failed."""
    rollout_turns: list[tuple[int, bool]] = []
    for segment in rollout.chain.segments:
        bounds = np.flatnonzero(np.diff(np.concatenate([[0], segment.sampled.int().numpy(), [0]])))
        for begin, end in bounds.reshape(-1, 2).tolist():
            rollout_turns.append((end - begin, not bool(segment.summary[begin:end].any())))
    return [*rollout_turns[:-1], (rollout_turns[-1][0], False)] if rollout_turns else []


def second(c: Async) -> CheckpointTasks:
    """Tasks whose tools take a second in the mean."""
    return CheckpointTasks(c, tool_s=1.0)


def foretell(pace: Pace, c: Async, tasks: CheckpointTasks) -> Outcome:
    """What the virtual clock says about a run with these settings. Tools take what they take in the run, to the bit;
    `tasks`: of `second`."""

    def draw_turns(group: int, rollout: int) -> list[tuple[int, float]]:
        tool_calls, timed_turns = 0, []
        for tokens, tool in pace.turns[group % len(pace.turns)][rollout]:
            timed_turns.append(
                (tokens, c.tool_s * tasks.latency(tasks.task("rl", group), rollout, tool_calls) if tool else 0.0)
            )
            tool_calls += tool
        return timed_turns

    a, b = pace.token_s
    load = Load(
        draw_turns,
        rollouts=c.rl.rollouts,
        slots=c.workers * c.slots,
        workers=c.workers,
        token_s=lambda rows: a + b * rows,
        train_s=pace.train_s,
        publish_s=pace.publish_s,
        swap_s=pace.swap_s,
        shared=lambda engines: min(1.0, cores() / (cores() + engines)),
    )
    return simulate("in-flight" if c.staleness else "synchronous", Rules(c.rl.prompts, c.staleness, c.rl.steps), load)


def as_json(pace: Pace) -> dict:
    return asdict(pace)


def of_json(record: dict) -> Pace:
    """What `as_json` made. Lists stand for tuples."""
    return Pace(**{**record, "token_s": tuple(record["token_s"])})
