"""Prices of habits: each should make its own rarer and leave success as it is. And what becomes of a habit that has no
price?

    etude figure behaviour          half an hour on one core with three trainings; starts from a run of the recipe in
                                    runs/small (make small)
    etude figure behaviour --quick

The report rewards style and communication and punishes poor tool calls, to-do items left open among them (§4.2); it
shows no figure. Here the policy of the recipe learns good and bad manners from demonstrations, half and half
(`recipe/microrepo/manners.py`). Then RL begins, from the same weights and on the same tasks, in four arms, which differ
in what `ref/behaviour.py` prices:

    none      nothing
    calls     to-do items left open, broken calls, failed calls, calls made one a turn
    words     no message, an untrue one, lints, lines, comments
    all       both

So each habit has its price in two arms and none in two, where the prices of others act. The recipe's prices of effort
and of invalid calls are paid in no arm, and use of the terminal is never priced. Each policy plays held-out tasks
before and after.

Power. Three trainings came first, one in each of `none`, `calls` and `all`, with seed 7, 24 steps and the price of
effort, and one in `none` without it. Lints and failed calls fell from a half to 0.02 where they had a price; without
one, lints, silence and failed calls moved by 0.1 to 0.2 in either direction, by chance. Most of what moved had moved by
step 16, so there are 16. With two arms on each side and three trainings, Student's interval is as wide as 2.5 standard
deviations to each side: a difference of 0.3 is seen if trainings spread by 0.12, one of 0.1 is not. To-do items left
open and comments fell without any price, comments to 0.004, so little is left for theirs to do. In rollouts before RL,
comments and untrue messages go with failure (success 0.48 with a comment and 0.58 without, 0.36 with an untrue message
and 0.63 without). What goes with failure, success alone unlearns; lints and silence it does not see. A loss of success
is seen if it is 0.1 and trainings spread by 0.04. Three trainings, with seed 0, then left nearly all prices undecided:
without a price trainings spread by 0.2 to 0.3. The committed record has eight, with seed 1, fixed before they ran
(`--set seed=1 --set trainings=8`); their interval is about a third as wide.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import torch

from kit.disk import read_lines
from kit.runs import Run
from recipe.microrepo import NoiseConfig, WorldConfig
from recipe.microrepo.manners import ManneredSession, mannered
from recipe.small.agent import Language, hash_seed, play
from recipe.small.data import task_stream
from recipe.small.demonstrations import context, taught
from recipe.small.learner import language_of
from recipe.small.reinforcement import Moment, learn, of_rollouts
from recipe.small.settings import Recipe
from recipe.small.tasks import MicroTasks
from recipe.small.transcripts import transcript_of
from ref.behaviour import Prices, measures
from ref.engine.sampler import Sampler
from ref.network import load_hf
from ref.rollout import Rollout
from ref.transcript import Transcript
from sims.behaviour.verdicts import learned, picture
from sims.hack_training import Size, engine, fine_tuned, undisturbed
from sims.policies import agent

__all__ = ["ARMS", "Experiment", "experiment", "picture"]

WORLD = WorldConfig(depth_mix=(0.5, 0.4, 0.1))
"""Short tasks, which leave room for manners."""
NOISE = NoiseConfig(invalid_call=0.35, skip_test=0.5)
"""Demonstrations break calls and skip tests often enough for groups that differ."""
DEAR = Prices(
    todos=0.15,
    broken=0.2,
    failed=0.2,
    silent=0.2,
    untrue=0.3,
    lints=0.2,
    diff=0.05,
    comments=0.4,
    sequential=0.4,
    free_comments=0.0,
)
"""A habit costs a fifth of success or so: far more than the defaults, for a training that is far shorter."""
CALLS = ("todos", "broken", "failed", "sequential")
WORDS = ("silent", "untrue", "lints", "diff", "comments")
ARMS: dict[str, tuple[str, ...]] = {"none": (), "calls": CALLS, "words": WORDS, "all": (*CALLS, *WORDS)}
"""What has a price in each arm."""
make_record = partial(transcript_of, open_session=ManneredSession)
"""The record of an episode in the world with manners."""


@dataclass(frozen=True)
class Experiment(Size):
    """Length of fine-tuning and of training, and held-out tasks."""

    epochs: int = 3
    """How often each demonstration is shown."""
    trainings: int = 3
    """RL training runs in each arm; they differ in their seed."""
    steps: int = 16
    """RL steps of each."""
    prompts: int = 6
    """Tasks of a step."""
    tasks: int = 40
    """Held-out tasks before and after."""
    lr: float = 3e-4
    """Learning rate of RL: three times the recipe's, for a fifth of its steps."""


def prices(arm: str) -> Prices:
    """What habits cost in an arm."""
    return replace(Prices.free(), **{name: getattr(DEAR, name) for name in (*ARMS[arm], "free_comments")})


def tuned(run: Run, c: Experiment, root: Path, recipe: Recipe) -> Path:
    """Fine-tunes the recipe's policy on demonstrations with manners. Returns the checkpoint's folder."""
    language, tasks = language_of(root), task_stream(recipe, "demonstrations")
    rollouts = taught(
        tasks,
        language,
        context(language, recipe),
        NOISE,
        recipe.context.memory,
        Random(f"{c.seed}-manners"),
        mannered,
        ManneredSession,
    )
    return fine_tuned(run, "mannered", c, root, recipe, rollouts)


def measure_habits(record: Transcript, success: float) -> dict[str, float]:
    """What is asked of a rollout: the measures, the number of its to-do items, the terminal's share of its calls, and
    whether it solved the task."""
    terminal = sum(call.name == "sh" for call in record.calls) / max(1, len(record.calls))
    return measures(record, DEAR.free_comments) | {
        "items": float(len(record.todos)),
        "terminal": terminal,
        "success": success,
    }


def average_habits(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Means over a step's rollouts."""
    habit_rows = [
        measure_habits(rollout.transcript or make_record(rollout), rollout.metrics["tests"]) for rollout in rollouts
    ]
    return {name: float(np.mean([row[name] for row in habit_rows])) for name in habit_rows[0]}


class Heldout:
    """Plays held-out tasks and says what the policy does in them: means over rollouts."""

    def __init__(self, c: Experiment, recipe: Recipe, language: Language):
        self.c, self.recipe, self.language = c, recipe, language
        self.chaining = context(language, recipe)
        self.tasks = [task for task, _ in zip(task_stream(recipe, "evaluation"), range(c.tasks))]

    def __call__(self, sampler: Sampler, *seed: object) -> dict[str, float]:
        generator = torch.Generator().manual_seed(hash_seed(self.c.seed, "behaviour", *seed))
        rl, samples = self.recipe.rl, self.c.samples
        return average_habits(
            play(
                sampler,
                self.language,
                self.tasks,
                samples,
                rl.limits(self.chaining),
                rl.max_turns,
                generator,
                rl.temperature,
                open_session=ManneredSession,
            )
        )


def measure_before(run: Run, recipe: Recipe, start: Path, heldout: Heldout) -> dict[str, float]:
    """What the policy does before RL."""
    stage = run.stage("before", total=1)
    return stage.result() if stage.finished else stage.finish(heldout(engine(load_hf(start), recipe)))


def training(run: Run, c: Experiment, recipe: Recipe, start: Path, heldout: Heldout, arm: str, number: int) -> dict:
    """One training run in an arm: its steps, and held-out tasks at its end."""
    stage = run.stage(f"{arm}-{number}", total=c.steps, unit="tokens")
    if stage.finished:
        return stage.result()
    payment = replace(recipe.rl.payment, effort_price=0.0, invalid_call=0.0)
    rl = replace(
        recipe.rl, steps=c.steps, prompts=c.prompts, rollouts=c.rollouts, lr=c.lr, later=0.0, gate=0.0, payment=payment
    )
    config = replace(recipe, seed=recipe.seed + 1000 * c.seed + number + 1, rl=replace(rl, behaviour=prices(arm)))

    def measure_after(moment: Moment) -> dict:
        if moment.step < c.steps:
            return {}
        return {f"after_{name}": value for name, value in heldout(moment.sampler, arm, number).items()}

    tasks = MicroTasks(config, heldout.language, ManneredSession, make_record)
    learn(
        stage,
        config,
        load_hf(start),
        None,
        load_hf(start),
        heldout.language,
        [of_rollouts(average_habits), measure_after],
        tasks,
    )
    lines = list(read_lines(stage.metrics_path))
    after = {name.removeprefix("after_"): value for name, value in lines[-1].items() if name.startswith("after_")}
    return stage.finish(
        {"steps": [{name: line[name] for name in ("step", "reward", *after)} for line in lines], "after": after}
    )


def compute_changes(
    means_before: Mapping[str, float], results: Mapping[tuple[str, int], dict], trainings: int
) -> dict[str, dict[str, np.ndarray]]:
    """Of each arm and measure: what it is after RL minus what it was before, [trainings]."""
    return {
        arm: {
            name: np.array([results[arm, n]["after"][name] - means_before[name] for n in range(trainings)])
            for name in means_before
        }
        for arm in ARMS
    }


def experiment(run: Run, config: Experiment) -> dict:
    """Fine-tuning, the training runs, and the verdicts."""
    c = config
    root, recipe = agent(run, c.run, c.seed)
    recipe = undisturbed(recipe)
    rl, sft = replace(recipe.rl, max_turns=16, behaviour=Prices.free()), replace(recipe.sft, depth_mix=WORLD.depth_mix)
    recipe = replace(recipe, world=WORLD, sft=sft, rl=rl)
    start = tuned(run, c, root, recipe)
    heldout = Heldout(c, recipe, language_of(root))
    means_before = measure_before(run, recipe, start, heldout)
    results = {
        (arm, number): training(run, c, recipe, start, heldout, arm, number)
        for number in range(c.trainings)
        for arm in ARMS
    }
    rows = [
        {"world": arm, "training": number, **step}
        for (arm, number), result in results.items()
        for step in result["steps"]
    ]
    evaluations = [{"arm": "before", "training": -1, **means_before}]
    evaluations += [{"arm": arm, "training": number, **result["after"]} for (arm, number), result in results.items()]
    costs = {"prices": asdict(DEAR), "priced": {arm: list(names) for arm, names in ARMS.items()}}
    return {
        "rows": rows,
        "ends": evaluations,
        **costs,
        "claims": learned(means_before, compute_changes(means_before, results, c.trainings), ARMS),
    }
