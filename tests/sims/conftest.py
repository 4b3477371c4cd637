"""Experiments at their quick size."""

import pytest

from etude import catalog, figures


@pytest.fixture
def play_figure():
    def play(name, out, *sets):
        return figures.play(catalog.find_experiment(name), out, {}, sets, quick=True, resume=False, cadence=20.0)

    return play
