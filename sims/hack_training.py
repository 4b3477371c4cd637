"""What experiments on hacks share, and that on hints: a policy that has learnt some words, RL that may find their use,
looks before and after."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from kit.disk import read_lines
from kit.runs import Run, Stage
from recipe.small.agent import Language, hash_seed, play
from recipe.small.data import task_stream
from recipe.small.demonstrations import context
from recipe.small.learner import RATES, Learner, load_checkpoint, shown_rows, train
from recipe.small.reinforcement import Moment, learn, of_rollouts
from recipe.small.settings import Recipe
from recipe.small.tasks import Hinting, MicroTasks, OpenSession
from ref.engine.continuous import ContinuousSampler
from ref.engine.sampler import Sampler
from ref.network import Transformer, load_hf, save_hf
from ref.rollout import Rollout

__all__ = [
    "Heldout",
    "Length",
    "OpenSession",
    "Size",
    "RolloutMetrics",
    "along",
    "engine",
    "fine_tuned",
    "reinforced",
    "side_by_side",
    "undisturbed",
]

RolloutMetrics = Callable[[Sequence[Rollout]], dict[str, float]]
"""What is logged of a step's rollouts."""


@dataclass(frozen=True)
class Length:
    """Length of fine-tuning and of training, and held-out tasks. Each experiment has its own numbers, and adds what it
    alone needs."""

    run: str = "runs/small"
    """A finished run of the recipe; fine-tuning starts from its SFT checkpoint (empty: first run a tiny recipe that has
    learned nothing)."""
    demonstrations: int = 1400
    """Demonstrations of fine-tuning."""
    epochs: int = 2
    """How often each is shown."""
    trainings: int = 4
    """RL training runs in each world; they differ in their seed."""
    steps: int = 24
    """RL steps of each."""
    prompts: int = 8
    """Tasks of a step."""
    rollouts: int = 8
    """Rollouts of each task."""
    lr: float = 2e-4
    """Learning rate of RL: twice the recipe's, or more, for fewer steps."""
    tasks: int = 80
    """Held-out tasks before and after."""
    samples: int = 8
    """Rollouts of each."""
    seed: int = 0
    """Seed of the looks; added to the recipe's seed, it is that of the training runs."""

    def __post_init__(self):
        for name in ("demonstrations", "epochs", "steps", "prompts", "rollouts", "tasks", "samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.trainings < 2:
            raise ValueError(f"trainings must be at least 2, for an interval over them, got {self.trainings}")

    @classmethod
    def quick(cls) -> Self:
        return cls(run="", demonstrations=24, epochs=1, trainings=2, steps=2, prompts=2, rollouts=2, tasks=6, samples=2)


@dataclass(frozen=True)
class Size(Length):
    """The same, with some steps on disk."""

    disk_steps: int = 2
    """RL steps that are also played on disk, with a quarter of the tasks."""

    def __post_init__(self):
        super().__post_init__()
        if self.disk_steps < 1:
            raise ValueError(f"disk_steps must be at least 1, got {self.disk_steps}")

    @classmethod
    def quick(cls) -> Self:
        return replace(super().quick(), disk_steps=1)


def undisturbed(recipe: Recipe) -> Recipe:
    """The recipe with one context, so that no summary loses what was read, and one thread, which takes as long in a
    crowd."""
    recipe = replace(
        recipe, context=replace(recipe.context, join="none"), rl=replace(recipe.rl, max_len=max(recipe.rl.max_len, 224))
    )
    return replace(recipe, training=replace(recipe.training, threads=1))


def fine_tuned(run: Run, name: str, c: Length, root: Path, recipe: Recipe, lessons: Iterable[Rollout]) -> Path:
    """Fine-tunes the recipe's policy on the first of `lessons`. Returns the folder of the checkpoint `name`."""
    folder, s = run.path("checkpoints", name), recipe.sft
    pieces = [
        (segment.tokens, segment.sampled)
        for rollout in itertools.islice(lessons, c.demonstrations)
        for segment in rollout.chain.segments
    ]
    per_epoch, batch = shown_rows(pieces, recipe.training.long_length, s.rows, [recipe.seed + c.seed])
    steps = per_epoch * c.epochs
    stage = run.stage("sft", total=steps)
    if stage.finished:
        return folder
    learner = Learner(recipe, load_checkpoint(root, recipe, "sft", with_mtp=False)[0], None, s.muon_lr, s.adamw_lr)
    train(stage, recipe, learner, batch, steps, lambda step: RATES["sft"](step, steps), "sft")
    save_hf(learner.trunk.masters, folder)
    stage.finish({"steps": steps}, sorted(folder.rglob("*")))
    return folder


class Heldout:
    """Plays held-out tasks in a world and says what came of them. `counters`: what is asked of every rollout, by
    name."""

    def __init__(
        self,
        label: str,
        c: Length,
        recipe: Recipe,
        language: Language,
        worlds: Mapping[str, OpenSession],
        counters: Mapping,
    ):
        self.label, self.c, self.recipe, self.language, self.worlds, self.counters = (
            label,
            c,
            recipe,
            language,
            worlds,
            counters,
        )
        self.chaining, self.tasks = (
            context(self.language, recipe),
            list(itertools.islice(task_stream(recipe, "evaluation"), c.tasks)),
        )

    def __call__(self, sampler: Sampler, world: str, *seed: object) -> dict[str, list[int]]:
        """Of each task: the number of rollouts of which it is true, for everything that is counted."""
        c, generator = self.c, torch.Generator().manual_seed(hash_seed(self.c.seed, self.label, *seed))
        rl = self.recipe.rl
        episodes = play(
            sampler,
            self.language,
            self.tasks,
            c.samples,
            rl.limits(self.chaining),
            rl.max_turns,
            generator,
            rl.temperature,
            open_session=self.worlds[world],
        )
        counts = (
            np.array([[ask(e) for ask in self.counters.values()] for e in episodes], dtype=int)
            .reshape(c.tasks, c.samples, -1)
            .sum(1)
        )
        return dict(zip(self.counters, counts.T.tolist(), strict=True))


def engine(model: Transformer, recipe: Recipe) -> Sampler:
    """A sampler as RL has it."""
    return ContinuousSampler(
        Learner(recipe, model, None, 0.0, 0.0).trunk.model, getattr(torch, recipe.training.sampler_dtype)
    )


def reinforced(
    stage: Stage,
    c: Length,
    recipe: Recipe,
    number: int,
    start: Path,
    language: Language,
    open_session: OpenSession,
    measure_rollouts: RolloutMetrics,
    names: Sequence[str],
    at_end: Callable[[Sampler], dict],
    hinting: Hinting | None = None,
) -> dict:
    """The training run of that number in a world: of its steps what `names` lists, and what `at_end` says of the policy
    at its end. `hinting`: as in `learn`."""
    if stage.finished:
        return stage.result()
    rl = replace(recipe.rl, steps=c.steps, prompts=c.prompts, rollouts=c.rollouts, lr=c.lr, later=0.0, gate=0.0)
    config = replace(recipe, seed=recipe.seed + 1000 * c.seed + number + 1, rl=rl)
    end_metrics: dict[str, dict] = {}

    def observe_end(moment: Moment) -> dict:
        if moment.step == c.steps:
            end_metrics.update(at_end(moment.sampler))
        return {}

    tasks = MicroTasks(config, language, open_session, hinting=hinting)
    learn(
        stage,
        config,
        load_hf(start),
        None,
        load_hf(start),
        language,
        [of_rollouts(measure_rollouts), observe_end],
        tasks,
    )
    steps = [{name: line[name] for name in ("step", *names)} for line in read_lines(stage.metrics_path)]
    return stage.finish({"steps": steps, **end_metrics})


def side_by_side(
    run: Run,
    label: str,
    c: Size,
    recipe: Recipe,
    start: Path,
    language: Language,
    places: Mapping[str, OpenSession],
    measure_rollouts: RolloutMetrics,
    names: Sequence[str],
) -> dict[str, list[float]]:
    """Some steps in each of two places, from the same weights: what is logged of each step under `names`, and at last a
    sum of all weights."""
    values_by_place: dict[str, list[float]] = {}
    for place, open_session in places.items():
        stage = run.stage(f"{label}-{place}", total=c.disk_steps, unit="tokens")
        if not stage.finished:
            rl = replace(
                recipe.rl,
                steps=c.disk_steps,
                prompts=-(-c.prompts // 4),
                rollouts=c.rollouts,
                lr=c.lr,
                later=0.0,
                gate=0.0,
            )
            config = replace(recipe, rl=rl)
            tasks = MicroTasks(config, language, open_session)
            learner, _ = learn(
                stage, config, load_hf(start), None, load_hf(start), language, [of_rollouts(measure_rollouts)], tasks
            )
            total = sum(float(p.detach().double().abs().sum()) for p in learner.trunk.masters.parameters())
            lines = [[line[name] for name in names] for line in read_lines(stage.metrics_path)]
            stage.finish({"lines": [*lines, [total]]})
        values_by_place[place] = [value for line in stage.result()["lines"] for value in line]
    return values_by_place


def along(
    axes: Mapping[str, Any], rows: Sequence[Mapping], colours: Mapping[str, str], labels: Mapping[str, str]
) -> None:
    """Draws along RL what the axes are named after: each training thin, the mean of a world's thick."""
    for world, colour in colours.items():
        world_rows = [row for row in rows if row["world"] == world]
        steps = sorted({row["step"] for row in world_rows})
        for name, axis in axes.items():
            values = np.array([[row[name] for row in world_rows if row["step"] == step] for step in steps])
            axis.plot(steps, values, color=colour, linewidth=0.6, alpha=0.4)
            axis.plot(steps, values.mean(1), color=colour, linewidth=2, label=labels[world])
