"""Scorer of challenge 0: sampled success of an agent after RL with the reader's settings, within a budget of rollouts.

The agent is that of the reader's own run on compositions, as it was after SFT. The budget counts rollouts and not
seconds, so that the same seed gives the same score on a slow machine.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from kit.runs import Run
from kit.settings import RunError, fill
from lessons.challenges.solution import Solves
from recipe.small.agent import hash_seed
from recipe.small.data import task_stream
from recipe.small.evaluation import measure_policy
from recipe.small.learner import language_of, load_checkpoint
from recipe.small.reinforcement import learn
from recipe.small.settings import Recipe
from sims.policies import read_config

__all__ = ["score"]

ROLLOUTS, TASKS, SAMPLES = 3840, 150, 4
RUN = Path("runs") / "compositions"
"""Where the agent comes from."""
ALLOWED_SETTINGS = (
    "steps",
    "prompts",
    "rollouts",
    "lr",
    "warmup",
    "decay",
    "temperature",
    "clip_low",
    "clip_high",
    "budget_tokens",
    "later",
    "upsampling",
)
ALLOWED_SETTINGS += (
    "replay",
    "replay_alpha",
    "payment.effort_price",
    "payment.k",
    "payment.q",
    "payment.invalid_call",
    "payment.kl",
)
"""What a solution may set."""


def score(solution: Solves, seed: int) -> float:
    """Share of solved rollouts on held-out tasks, sampled at the recipe's temperature."""
    own, language = read_config(RUN), language_of(RUN)
    config = build_config(solution("settings", ROLLOUTS), own, seed)
    rl = config.rl
    if (cost := rl.steps * rl.prompts * rl.rollouts) > ROLLOUTS:
        raise RunError(
            f"settings may use {ROLLOUTS} rollouts; {rl.steps} steps of {rl.prompts} prompts with "
            f"{rl.rollouts} rollouts each use {cost}"
        )
    model, reference = (load_checkpoint(RUN, config, "sft", with_mtp=False)[0] for _ in range(2))
    if rl.steps:
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.redirect_stdout(sys.stderr),
            Run.open(Path(folder) / "run", "challenge", config) as run,
        ):
            stage = run.stage("rl", total=rl.steps, unit="tokens")
            model = learn(stage, config, model, None, reference, language)[0].trunk.model
    sized = replace(own, evaluation=replace(own.evaluation, tasks=TASKS, samples=SAMPLES))
    tasks = list(itertools.islice(task_stream(sized, "evaluation"), TASKS))
    results = measure_policy(
        model.to(getattr(torch, sized.training.dtype)), language, tasks, sized, hash_seed(seed, "challenge")
    )
    return float(results["success"].mean())


def build_config(overrides: object, recipe: Recipe, seed: int) -> Recipe:
    """The agent's own settings with those that the solution wants. Raises RunError."""
    if not isinstance(overrides, dict):
        raise RunError("settings must return a dictionary of settings of RL, such as {'lr': 1e-4, 'steps': 30}")
    for name, value in overrides.items():
        if name not in ALLOWED_SETTINGS:
            raise RunError(f"settings may set {', '.join(ALLOWED_SETTINGS)}; got {name}")
        if isinstance(value, float) and value != value:
            raise RunError(f"settings must be numbers; {name} is not one")
    own = [("seed", hash_seed(seed, "rl") % 2**31), ("rl.gate", 0.0)]
    return fill(Recipe, {}, [*own, *((f"rl.{name}", value) for name, value in overrides.items())], base=recipe)
