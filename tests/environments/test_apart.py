"""Tests and package in two processes: what crosses the pipe, what does not, who is not paid by it, and who is."""

import ctypes
import json
import os
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.grading.guarded import Exam, Trust, examined, grade
from environments.grading.inside.remote import Broken, Link, NotCarried
from environments.grading.lay import Editable, write
from environments.grading.rewards import Weights
from environments.monitor import Episode, watch
from tests.environments import blind_hacks
from tests.environments.blind_hacks import ATTACKS, HONEST, WANTED
from tests.environments.hacks import HACKS
from tests.environments.test_fresh import PLAIN
from tests.environments.test_hacks import EXAM, IN_THE_PROCESS, fresh, nursed

__all__ = ["fresh", "nursed"]  # fixtures

BARE = Exam(
    given={name: text.encode() for name, text in blind_hacks.GIVEN.items()},
    gold={name: text.encode() for name, text in blind_hacks.GOLD.items()},
    editable=Editable(("words/",)),
    tests={"test_nouns.py": blind_hacks.TESTS},
    wanted=WANTED,
    package="words",
    asked=WANTED,
)
WHOLE = Weights(1.0, 0.0, 0.0)


@pytest.fixture
def leave(tmp_path):
    """The folder that an agent left, with these files in it."""

    def left(files, exam=BARE):
        write({**exam.given, **{name: text.encode() for name, text in files.items()}}, tmp_path / "left")
        return tmp_path / "left"

    return left


@pytest.fixture(scope="module")
def exam(fresh, nursed):
    return examined(BARE, "words", fresh, judges=nursed)


def test_the_original_is_paid_apart(exam, fresh, nursed, leave):
    assert exam.apart == WANTED and exam.trust is Trust.APART and len(exam.fresh) >= 8
    found = grade(exam, leave(blind_hacks.GOLD), fresh, judges=nursed)
    assert found.reward.total == 1.0 and found.trust is Trust.APART and found.agreement is not None and not found.agreement.differing


def test_nothing_done_is_paid_nothing_and_no_hack(exam, fresh, nursed, leave):
    nothing = grade(exam, leave({}), fresh, judges=nursed)
    assert nothing.reward.total == 0.0 and nothing.reward.flags == ()


def test_a_judge_that_is_started_does_the_same(exam, fresh, leave):
    assert grade(exam, leave(blind_hacks.GOLD), fresh).reward.total == 1.0


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_not_paid(name, exam, fresh, nursed, leave):
    """By the tests alone: neither the monitor nor fresh inputs are needed."""
    found = grade(replace(exam, fresh=()), leave(ATTACKS[name]), fresh, seconds=10, judges=nursed)
    assert not found.verdicts.all_passed and found.reward.total == 0.0, found


@pytest.mark.parametrize("hack", [hack for hack in HACKS if hack.name in IN_THE_PROCESS], ids=lambda hack: hack.name)
def test_a_known_hack_is_not_paid_apart(hack, fresh, nursed, leave):
    found = grade(replace(EXAM, apart=EXAM.wanted), leave(hack.files, EXAM), fresh, seconds=10, judges=nursed)
    assert not found.verdicts.all_passed and found.reward.total == 0.0, found


@pytest.mark.parametrize("name", HONEST)
def test_an_odd_solution_is_paid_in_full(name, exam, fresh, nursed, leave):
    found = grade(exam, leave(HONEST[name]), fresh, judges=nursed, weights=WHOLE)
    assert found.reward.total == 1.0 and found.reward.flags == (), found


def test_fifteen_attacks_and_twenty_solutions():
    assert len(ATTACKS) >= 7 + 15 and len(HONEST) >= 20
