"""Scorer of challenge 0: sampled success of the committed agent after RL with the reader's settings, within a budget of rollouts.

The budget counts rollouts and not seconds, so that the same seed gives the same score on a slow machine.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import torch

from etude.challenges.solution import Solves
from etude.example_agent import FOLDER
from etude.play import agent_in
from kit.runs import Run
from kit.settings import RunError, fill
from ref.network import load_hf
from sims.recipe.agent import hash_seed
from sims.recipe.data import task_stream
from sims.recipe.evaluation import measure_policy
from sims.recipe.reinforcement import learn
from sims.recipe.settings import Evaluation, Recipe

__all__ = ["score"]

ROLLOUTS, TASKS, SAMPLES = 3840, 150, 4
MAY = ("steps", "prompts", "rollouts", "lr", "warmup", "decay", "temperature", "clip_low", "clip_high", "budget_tokens", "later", "upsampling")
MAY += ("replay", "replay_alpha", "payment.effort_price", "payment.k", "payment.q", "payment.invalid_call", "payment.kl")
"""What a solution may set."""


def score(solution: Solves, seed: int) -> float:
    """Share of solved rollouts on held-out tasks, sampled at the recipe's temperature."""
    if not (FOLDER / "config.json").is_file():
        raise RunError("challenge 0 trains the agent that comes with a clone of the repository; work in one")
    agent = agent_in(FOLDER)
    config = wanted(solution("settings", ROLLOUTS), agent.recipe, seed)
    rl = config.rl
    if (cost := rl.steps * rl.prompts * rl.rollouts) > ROLLOUTS:
        raise RunError(f"settings may use {ROLLOUTS} rollouts; {rl.steps} steps of {rl.prompts} prompts with {rl.rollouts} rollouts each use {cost}")
    model = load_hf(FOLDER)
    if rl.steps:
        with tempfile.TemporaryDirectory() as folder, Run.open(Path(folder) / "run", "challenge", config) as run:
            stage = run.stage("rl", total=rl.steps, unit="tokens")
            model = learn(stage, config, model, None, load_hf(FOLDER), agent.language)[0].trunk.model
    sized = Recipe(**{**vars(agent.recipe), "evaluation": Evaluation(tasks=TASKS, samples=SAMPLES)})
    tasks = list(itertools.islice(task_stream(sized, "evaluation"), TASKS))
    found = measure_policy(model.to(getattr(torch, sized.training.dtype)), agent.language, tasks, sized, hash_seed(seed, "challenge"))
    return float(found["success"].mean())


def wanted(found: object, recipe: Recipe, seed: int) -> Recipe:
    """The agent's own settings with those that the solution wants. Raises RunError."""
    if not isinstance(found, dict):
        raise RunError("settings must return a dictionary of settings of RL, such as {'lr': 1e-4, 'steps': 30}")
    for name, value in found.items():
        if name not in MAY:
            raise RunError(f"settings may set {', '.join(MAY)}; got {name}")
        if isinstance(value, float) and value != value:
            raise RunError(f"settings must be numbers; {name} is not one")
    own = [("seed", hash_seed(seed, "rl") % 2**31), ("rl.gate", 0.0)]
    return fill(Recipe, {}, [*own, *((f"rl.{name}", value) for name, value in found.items())], base=recipe)
