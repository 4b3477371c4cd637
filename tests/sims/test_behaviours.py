"""What an agent does beside solving a task: counted in episodes, and summed up over tasks and kinds of tasks."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.microrepo import NoiseConfig, Session, WorldConfig, demonstration, generate
from recipe.small.behaviours import BEHAVIOURS, count_behaviours
from recipe.small.evaluation import compare, summarise
from recipe.small.transcripts import step_turn
from ref.transcript import Call, Transcript, Turn

WORLDS = (WorldConfig(), WorldConfig(multi_hop_share=1.0))
READ, WRITE, BAD, GOOD = (
    Call("read", "m1"),
    Call("write", "m1", "return a"),
    Call("test", tests=(1, 3)),
    Call("test", tests=(3, 3)),
)


def play(task, turns):
    """The transcript of these turns, played in a session of their own."""
    session = Session(task, len(turns))
    return Transcript(tuple(Turn("assistant", calls=step_turn(session, turn)[0]) for turn in turns))


@settings(deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(WORLDS))
def test_the_cleanest_episode_reads_and_tests_and_has_nothing_to_repair(seed, world):
    task = generate(random.Random(seed), "train", config=world)
    turns = demonstration(task, random.Random(seed), NoiseConfig.clean())
    assert count_behaviours(task, play(task, turns)) == {
        "reads_first": (1, 1),
        "tests": (1, 1),
        "repairs": (0, 0),
        "recovers": (0, 0),
    }


@settings(deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(WORLDS), st.integers(0, 5))
def test_an_episode_that_leaves_a_read_out_has_not_read_first(seed, world, left_out):
    task = generate(random.Random(seed), "train", config=world)
    turns = demonstration(task, random.Random(seed), NoiseConfig.clean())
    reads = [number for number, turn in enumerate(turns) if turn.startswith("read ")]
    del turns[reads[left_out % len(reads)]]
    assert count_behaviours(task, play(task, turns))["reads_first"] == (0, 1)


@pytest.mark.parametrize(
    "calls, expected",
    [
        ((), ((0, 0), (0, 0), (0, 0), (0, 0))),
        ((READ, BAD), ((0, 0), (0, 0), (0, 0), (0, 0))),  # a test of nothing fails, and there is nothing to repair
        ((WRITE, READ), ((0, 1), (0, 1), (0, 0), (0, 0))),
        ((READ, WRITE, BAD), ((1, 1), (1, 1), (0, 1), (0, 1))),
        ((READ, WRITE, BAD, WRITE), ((1, 1), (0, 1), (1, 1), (0, 1))),
        ((READ, WRITE, BAD, WRITE, BAD), ((1, 1), (1, 1), (1, 1), (0, 1))),
        ((READ, WRITE, BAD, WRITE, GOOD), ((1, 1), (1, 1), (1, 1), (1, 1))),
        ((READ, WRITE, GOOD, WRITE), ((1, 1), (0, 1), (0, 0), (0, 0))),
        ((READ, Call("write", "m1", "return", valid=False), READ), ((0, 0), (0, 0), (0, 0), (0, 0))),
        ((Call("read", "m1", valid=False), WRITE), ((0, 1), (0, 1), (0, 0), (0, 0))),
    ],
)
def test_what_was_done_of_what_could_be(calls, expected):
    task = generate(random.Random(0), "train", 0, WorldConfig(files=(1, 1)))
    renamed = tuple(Call(c.name, task.target if c.path else "", c.wrote, c.valid, c.ok, c.tests) for c in calls)
    found = count_behaviours(task, Transcript((Turn("assistant", calls=renamed),)))
    assert tuple(found[name] for name in BEHAVIOURS) == expected


def outcomes(success, greedy, depth, multi_hop, behaviours):
    success = np.array(success, dtype=float)
    same = dict.fromkeys(("tokens", "turns", "invalid_calls", "finished", "segments"), success)
    return {
        "success": success,
        **same,
        "greedy": np.array(greedy, dtype=float),
        "depth": np.array(depth),
        "multi_hop": np.array(multi_hop),
        "behaviours": np.array(behaviours, dtype=float),
    }


def test_shares_are_of_the_rollouts_that_could_and_kinds_are_apart():
    """Not means over tasks: a task in which one rollout could have tested weighs as much as that rollout."""
    none = [[0, 0]] * 3
    before = outcomes(
        [[0, 1], [0, 0], [1, 1]],
        [0, 0, 1],
        [1, 1, 2],
        [True, False, True],
        [[[1, 1], *none], [[0, 2], *none]] * 1 + [[[0, 0], *none]],
    )
    found = summarise(before, 50)
    share = found["behaviours"]["reads_first"]
    assert share["value"] == pytest.approx(1 / 3) and share["rollouts"] == 3
    assert set(found["behaviours"]) == {"reads_first"}, "what no rollout could do has no share"
    assert {kind: {d: part["tasks"] for d, part in parts.items()} for kind, parts in found["by_kind"].items()} == {
        "composition": {"1": 1},
        "multi-hop": {"1": 1, "2": 1},
    }
    assert found["by_kind"]["multi-hop"]["1"]["success"]["value"] == 0.5
    assert found["by_depth"]["1"]["success"]["value"] == 0.25 and found["by_depth"]["1"]["best_of_2"]["value"] == 0.5
    after = outcomes([[1, 1], [0, 0], [1, 1]], [1, 0, 1], [1, 1, 2], [True, False, True], [[[2, 2], *none]] * 3)
    difference = compare(before, after, 50)
    assert difference["behaviours"]["reads_first"]["value"] == pytest.approx(2 / 3)
    assert difference["greedy"]["value"] == pytest.approx(1 / 3)
    one_kind = summarise({**before, "multi_hop": np.array([True] * 3)}, 50)
    assert "by_kind" not in one_kind and one_kind["by_depth"] == found["by_depth"]
