"""Experiments at their quick size, all on one run of the recipe."""

import dataclasses
import importlib

import pytest

from etude import catalog, figures
from sims.microrepo import transcript


@pytest.fixture(scope="session")
def play_figure(tiny_run):
    def play(name, out, *sets):
        entry = catalog.find_experiment(name)
        settings = dataclasses.fields(importlib.import_module(entry.module).Experiment)
        if any(setting.name == "run" for setting in settings):
            sets = (f"run={tiny_run}", *sets)
        return figures.play(entry, out, {}, sets, quick=True, resume=False, cadence=20.0)

    return play


@pytest.fixture(scope="session")
def demonstration_tokens():
    """A demonstration as one context, and which of its tokens are the agent's own (each turn with the token that
    ends it): what chains and rollouts must come to, written down a second way."""

    def tokens(language, task, turns):
        ids, own = [], []
        for role, text in transcript(task, turns):
            piece = language.encode(text)
            if role == "env":
                closing = [] if text == "" and ids else [language.agent]
                ids += [language.env, *piece, *closing]
                own += [bool(own)] + [False] * (len(piece) + len(closing))
            else:
                ids += piece
                own += [True] * len(piece)
        return ids, own

    return tokens
