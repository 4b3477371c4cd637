"""Real-time RL with simulated users: the five-hour loop, the two hacks that it bred, their cures, and how old its data
may be.

    etude figure real-time-rl          an hour and a half on two cores; starts from a run of the recipe in runs/small
                                       (make small)
    etude figure real-time-rl --quick

Cursor serves a policy, makes rewards of what users do about its edits, trains on them, looks at a benchmark, and ships,
every five hours. Two rewards taught the wrong thing: a session with a broken call was thrown away, and the policy broke
calls where it expected to fail; edits were judged and questions were not, and the policy asked. Here users are a model
(`users.py`) and the world is small (`world.py`).

First the policy of the recipe learns the words, from demonstrations: some ask without need, some break a call. Then the
loop begins, from the same weights and with the same users' tasks, in five ways:

    loop       both cures: follow-ups count, to questions too, and a broken call is the worst of all
    thrown     a session with a broken call is thrown away
    edits      edits kept are all that counts
    daily      as `loop`, and shipped after every 5 loops: data are up to a day old
    weekly     as `loop`, and never shipped: a week has 34 loops, and here it ends after twelve, so that all data are of
               the first policy

At the end held-out tasks are served to new users: by what each way has learnt, and, in `loop`, in an A/B test of the
shipped policy against the policy before, with users of their own for either side.

Scaled down: twelve loops are two and a half days, a loop has 128 sessions instead of billions of tokens, and two steps.

Power. Trials came first, with seed 7, the same held-out tasks and one training in each way. In the first, tasks were
easier, and more edits were kept than undone: in nine loops `edits` bred no question (0.10 of the sessions on clear
tasks, then 0.05), as `users.py` says it must be. So tasks are harder here, and more demonstrations ask. In the second
trial, with these settings, questions on clear tasks went from 0.23 to 0.82 in `edits` and to 0.04 in `loop`; broken
calls on hard tasks from 0.19 to 0.44 in `thrown` and to 0.10 in `loop`; sessions that did what is wanted from 0.29 to
0.44 in `loop`, 0.41 in `daily` and 0.36 in `weekly`. Edits kept rose by 0.03, follow-ups fell by 0.09, and sessions
took longer, by a fifth, since fewer end early in a question: the claim about latency is expected to fail. Student's
interval over five trainings is as wide as 1.24 of their standard deviations to each side. If they spread by 0.03, a
change of 0.04 is seen: both hacks and their cures, follow-ups, and what a week costs. For edits kept, and for what a
day costs, that is hardly enough.

Two of the five trainings in each way were played first and seen before the others, and nothing was changed after that.
Questions on clear tasks went from 0.17 to 0.94 and 0.91 in `edits`, and to 0.02 in `loop`. Broken calls on hard tasks
went from 0.17 to 0.44 in one training of `thrown`, and not at all in the other; to 0.07 and 0.11 in `loop`. What is
wanted was done by 0.41 in `loop`, 0.40 in `daily` and 0.36 in `weekly`."""

import itertools
import random
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from kit.disk import read_lines
from kit.runs import Run
from recipe.microrepo import WorldConfig
from recipe.small.data import task_stream
from recipe.small.demonstrations import context, taught
from recipe.small.learner import language_of
from recipe.small.settings import Recipe
from ref.engine.sampler import Sampler
from ref.network import load_hf
from sims.hack_training import Size, engine, fine_tuned, undisturbed
from sims.policies import agent
from sims.real_time_rl.loop import Plan, Service, compute_session_metrics, loops
from sims.real_time_rl.rewards import Distilling
from sims.real_time_rl.users import Users
from sims.real_time_rl.verdicts import learned, on_policy, picture
from sims.real_time_rl.world import AskingSession, clouded, with_questions

__all__ = ["WAYS", "Experiment", "experiment", "picture"]

HARD_WORLD = WorldConfig(depth_mix=(0.1, 0.3, 0.6), two_helper_steps=(1, 1))
"""Tasks of which the policy solves less than half, so that there is something to avoid."""
DAY, WEEK = 5, 34
"""Loops of five hours in a day and in a week."""
WAYS: dict[str, tuple[Distilling, int]] = {
    "loop": (Distilling(), 1),
    "thrown": (Distilling(broken_calls="thrown"), 1),
    "edits": (Distilling(follow_ups=False), 1),
    "daily": (Distilling(), DAY),
    "weekly": (Distilling(), WEEK),
}
"""What counts, and after how many loops it is shipped."""


@dataclass(frozen=True)
class Experiment:
    """Length of fine-tuning and of the loops, and held-out tasks."""

    run: str = "runs/small"
    """A finished run of the recipe; fine-tuning starts from its SFT checkpoint (empty: first run a tiny recipe that has
    learned nothing)."""
    demonstrations: int = 1400
    """Demonstrations of fine-tuning."""
    epochs: int = 2
    """How often each is shown."""
    needless: float = 0.2
    """Share of the demonstrations that ask without need."""
    clumsy: float = 0.2
    """Share of the demonstrations that break a call."""
    trainings: int = 5
    """Loops in each way; they differ in their seed."""
    plan: Plan = field(default_factory=Plan)
    """How long each goes on."""
    users: Users = field(default_factory=Users)
    """Who reacts."""
    tasks: int = 80
    """Held-out tasks at the end."""
    samples: int = 8
    """Sessions on each."""
    seed: int = 0
    """Seed of the demonstrations; added to the recipe's seed, it is that of the loops."""

    def __post_init__(self):
        for name in ("demonstrations", "epochs", "tasks", "samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("needless", "clumsy"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a probability, got {getattr(self, name)}")
        if self.trainings < 2:
            raise ValueError(f"trainings must be at least 2, for an interval over them, got {self.trainings}")

    @classmethod
    def quick(cls) -> "Experiment":
        plan = Plan(loops=2, steps=1, sessions=4, gate_tasks=2, gate_samples=1)
        return cls(run="", demonstrations=24, epochs=1, trainings=2, plan=plan, tasks=6, samples=2)


def tuned(run: Run, c: Experiment, root: Path, recipe: Recipe) -> Path:
    """Fine-tunes the recipe's policy on demonstrations in which some ask, and some break a call. Returns the
    checkpoint's folder."""
    language, rng = language_of(root), random.Random(f"{c.seed}-questions")
    noise = replace(recipe.sft.noise, invalid_call=c.clumsy, stop_early=0.0)
    turns = partial(with_questions, needless=c.needless)
    tasks = map(clouded, task_stream(recipe, "demonstrations"))
    rollouts = taught(
        tasks, language, context(language, recipe), noise, recipe.context.memory, rng, turns, AskingSession
    )
    size = Size(run=c.run, demonstrations=c.demonstrations, epochs=c.epochs, seed=c.seed)
    return fine_tuned(run, "questions", size, root, recipe, rollouts)


class HeldOut:
    """Held-out tasks, served to new users."""

    def __init__(self, c: Experiment, service: Service):
        held_out = iter(task_stream(service.recipe, "evaluation"))
        self.c, self.service, self.tasks = c, service, list(itertools.islice(held_out, c.tasks))
        self.gate = list(itertools.islice(held_out, c.plan.gate_tasks))

    def __call__(self, sampler: Sampler, *seed: object) -> dict[str, float]:
        return compute_session_metrics(
            self.service.serve(sampler, self.tasks, self.c.samples, self.c.seed, "test", *seed)
        )


def training(run: Run, c: Experiment, start: Path, test: HeldOut, way: str, number: int) -> dict:
    """One loop in a way: a line for each of its rounds, what it has learnt, and the A/B test."""
    stage = run.stage(f"{way}-{number}", total=c.plan.loops, unit="sessions")
    if stage.finished:
        return stage.result()
    stage.restore()
    recipe, (distil, ship_interval) = test.service.recipe, WAYS[way]
    learned_sampler, deployed_sampler = loops(
        stage, c.plan, test.service, distil, ship_interval, start, test.gate, recipe.seed + 1000 * c.seed + number + 1
    )
    results = {"learnt": test(learned_sampler, way, number)}
    if way == "loop":
        results |= {
            "before": test(engine(load_hf(start), recipe), "before", number),
            "shipped": test(deployed_sampler, "shipped", number),
        }
    return stage.finish({"loops": read_lines(stage.metrics_path), **results})


def experiment(run: Run, config: Experiment) -> dict:
    """Fine-tuning, the loops, and the verdicts."""
    c = config
    root, recipe = agent(run, c.run, c.seed)
    recipe = undisturbed(recipe)
    start = tuned(run, c, root, recipe)
    test = HeldOut(c, Service(replace(recipe, world=HARD_WORLD), language_of(root), c.users))
    results = {
        (way, number): training(run, c, start, test, way, number) for number in range(c.trainings) for way in WAYS
    }
    rows = [
        {"way": way, "training": number, **line}
        for (way, number), result in results.items()
        for line in result["loops"]
    ]
    evaluations = [
        {"way": way, "training": number, "at": moment, **result[moment]}
        for (way, number), result in results.items()
        for moment in ("before", "learnt", "shipped")
        if moment in result
    ]
    return {"rows": rows, "ends": evaluations, "claims": [*learned(evaluations), on_policy(rows)]}
