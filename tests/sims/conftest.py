"""Experiments at their quick size, all on one run of the recipe."""

import dataclasses
import importlib

import pytest

from etude import catalog, figures
from etude.runs import Run, fill
from sims import recipe
from sims.policies import SMOKE


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """A finished run of the recipe, as experiments play it for themselves with --quick: `run` empty, seed 0."""
    root, config = tmp_path_factory.mktemp("tiny") / "recipe", fill(recipe.Recipe, SMOKE | {"seed": 0})
    with Run.open(root, "recipe", config) as inner:
        recipe.run(inner, config)
    return root


@pytest.fixture(scope="session")
def play_figure(tiny_run):
    def play(name, out, *sets):
        entry = catalog.find_experiment(name)
        settings = dataclasses.fields(importlib.import_module(entry.module).Experiment)
        if any(setting.name == "run" for setting in settings):
            sets = (f"run={tiny_run}", *sets)
        return figures.play(entry, out, {}, sets, quick=True, resume=False, cadence=20.0)

    return play
