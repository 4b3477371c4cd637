"""Experiments at their quick size, all on one run of the recipe."""

import dataclasses
import importlib
import json

import pytest

from etude import catalog
from etude.ledger import figures
from recipe.microrepo import transcript
from sims import hack_training
from tests import forks


@pytest.fixture(scope="session")
def play_figure(tiny_run, tmp_path_factory):
    """`etude figure NAME --quick` into `out`, in a process of its own; what NAME.json then holds. `own`: it plays the
    run of the recipe that it stands on itself, instead of being given the one that all tests share."""

    def play(name, out, *sets, own=False):
        settings = dataclasses.fields(importlib.import_module(catalog.find_experiment(name).module).Experiment)
        if not own and any(setting.name == "run" for setting in settings):
            sets = (f"run={tiny_run}", *sets)
        words = [word for one in sets for word in ("--set", one)]
        forks.play("figure", name, "--quick", "--out", out, *words, said=tmp_path_factory.mktemp("said") / name)
        record = json.loads((out / f"{name}.json").read_text())
        assert not list(filter(None, map(figures.contradiction, record["claims"])))
        return record

    return play


@pytest.fixture
def short_of_words(monkeypatch):
    """short_of_words(MODULE): rollouts of an experiment on hacks end early. A policy that has learnt nothing talks
    until its context is full."""

    def shorten(module):
        def shorter(recipe):
            recipe = hack_training.undisturbed(recipe)
            return dataclasses.replace(recipe, rl=dataclasses.replace(recipe.rl, max_len=64))

        monkeypatch.setattr(module, "undisturbed", shorter)

    return shorten


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
