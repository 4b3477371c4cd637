"""Levels of difficulty: quantiles that a training climbs, whatever happens, and a policy of known skill whose groups
keep a gradient."""

import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.tasks.levels import Schedule, State, bits_of, sorted_by
from kit.settings import RunError

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "tasks"
BITS = st.dictionaries(st.text("abcdef", min_size=1, max_size=4), st.floats(0, 20), min_size=3, max_size=30)
GROUPS = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)).map(lambda pair: (min(pair), max(pair))), max_size=40)


@given(BITS, st.data())
def test_levels_are_quantiles(bits, data):
    """All tasks, each once; no task of a level is easier than one of the level before; sizes differ by one at most."""
    number = data.draw(st.integers(1, len(bits)))
    levels = sorted_by(bits, number)
    assert sorted(task for tasks in levels for task in tasks) == sorted(bits) and len(levels) == number
    assert max(map(len, levels)) - min(map(len, levels)) <= 1
    for easier, harder in zip(levels, levels[1:], strict=False):
        assert max(bits[task] for task in easier) <= min(bits[task] for task in harder)
    assert sorted_by(dict(reversed(bits.items())), number) == levels


@given(BITS, GROUPS, st.integers(1, 20), st.integers(0, 3), st.data())
def test_a_training_stays_in_range_and_goes_on(bits, groups, every, seed, data):
    """Whatever succeeds: one level at a time, tasks of that level, each once before one comes again. Saved and loaded
    anywhere, the same follows."""
    one, other = (Schedule(bits, 3, every, seed) for _ in range(2))
    stop, state, drawn = data.draw(st.integers(0, len(groups))), State(), []
    for number, (solved, tried) in enumerate(groups):
        if number == stop:
            told = json.loads(json.dumps(vars(state)))
            state = State(**{**told, "draw_counts": tuple(told["draw_counts"])})
        task, behind = one.draw(state)
        assert (task, behind) == other.draw(state) and task in one.levels[state.level] and behind.level == state.level
        assert sum(behind.draw_counts) == number + 1
        drawn.append((state.level, task))
        state = one.update(behind, solved, tried)
        assert 0 <= state.level < 3 and abs(state.level - behind.level) <= 1 and state.num_rollouts < every
        more = one.update(behind, tried, tried)
        assert more.level >= state.level >= one.update(behind, 0, tried).level, "who solves more does not come lower"
    for now, tasks in enumerate(one.levels):
        mine = [task for at, task in drawn if at == now]
        for first in range(0, len(mine), len(tasks)):
            assert len({*mine[first : first + len(tasks)]}) == len(mine[first : first + len(tasks)])


def test_moving_by_hand():
    """Six of eight are enough to stay, seven to go up; two of eight to stay, one to go down; less than `every` decides
    nothing."""
    schedule = Schedule({"a": 1.0, "b": 2.0, "c": 3.0}, 3, 8)
    middle = State(level=1)
    assert [schedule.update(middle, solved, 8).level for solved in (8, 7, 6, 2, 1, 0)] == [2, 2, 1, 1, 0, 0]
    half = schedule.update(middle, 4, 4)
    assert (
        half == State(1, 4, 4) and schedule.update(half, 3, 4) == State(2) and schedule.update(half, 2, 4) == State(1)
    )
    assert schedule.draw(State(level=2))[0] == "c" and schedule.draw(State()) == ("a", State(draw_counts=(1, 0, 0)))


def test_what_is_saved_comes_back(tmp_path):
    """Of the same schedule; anything else is one line."""
    schedule, path = Schedule({"a": 1.0, "b": 2.0}, 2, 8), tmp_path / "state.json"
    assert schedule.load(path) == State()
    _, state = schedule.draw(State(1, 3, 4))
    schedule.save(path, state)
    assert schedule.load(path) == state == State(1, 3, 4, (0, 1))
    for other in (
        Schedule({"a": 1.0, "c": 2.0}, 2, 8),
        Schedule({"a": 1.0, "b": 2.0}, 1, 8),
        Schedule({"a": 1.0, "b": 2.0}, 2, 8, seed=1),
    ):
        with pytest.raises(RunError, match="the state of a schedule with other tasks, levels or numbers"):
            other.load(path)
    whole = json.loads(path.read_text())
    for text in (
        "",
        "[]",
        "{}",
        json.dumps({**whole, "state": {"now": 1}}),
        json.dumps({**whole, "state": {**whole["state"], "more": 1}}),
    ):
        path.write_text(text)
        with pytest.raises(RunError, match="holds no state of a schedule"):
            schedule.load(path)
    old_names = dict(zip(("now", "solved", "tried", "taken"), whole["state"].values(), strict=True))
    path.write_text(json.dumps({**whole, "state": old_names}))
    assert schedule.load(path) == state, "as an earlier version saved it"
    for name, value in (("level", 2), ("level", -1), ("num_solved", 5), ("draw_counts", [1]), ("num_rollouts", "4")):
        path.write_text(json.dumps({**whole, "state": {**whole["state"], name: value}}))
        with pytest.raises(RunError):
            schedule.load(path)


def test_what_makes_no_sense():
    for how in ({"number": 0}, {"number": 3}, {"number": 2, "every": 0}, {"number": 2, "low": 0.9}):
        with pytest.raises(ValueError, match="must"):
            Schedule({"a": 1.0, "b": 2.0}, **how)
    with pytest.raises(ValueError, match="num_solved must be 0 to num_rollouts; got 3 of 2"):
        Schedule({"a": 1.0}, 1).update(State(), 3, 2)


def dead(groups):
    """Share of groups without a gradient: all of their eight rollouts succeed, or none."""
    return sum(solved in (0, 8) for solved in groups) / len(groups)


@pytest.mark.parametrize("gain", [0.0, 0.01])
@pytest.mark.parametrize("skill", [6.0, 9.0, 12.0])
def test_groups_of_a_policy_of_known_skill_keep_a_gradient(skill, gain):
    """It solves a task with the probability 1 / (1 + e^(2 (d − skill))), d being its bits, and gains skill with every
    group that has a gradient. Of the tasks that are here, those of the schedule have none less often than those drawn
    from all, and a policy that learns ends higher."""
    bits = bits_of(json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json")))
    rng, schedule, every = random.Random(0), Schedule(bits, 8, 32), sorted(bits)

    def group(task, now):
        chance = 1 / (1 + math.exp(min(50.0, 2 * (bits[task] - now))))
        return sum(rng.random() < chance for _ in range(8))

    found, levels, state, now = [], [], State(), skill
    for _ in range(300):
        task, state = schedule.draw(state)
        found.append(group(task, now))
        levels.append(state.level)
        now += gain * (found[-1] not in (0, 8))
        state = schedule.update(state, found[-1], 8)
    other, plain = [], skill
    for _ in range(300):
        other.append(group(rng.choice(every), plain))
        plain += gain * (other[-1] not in (0, 8))
    assert dead(found[60:]) < 0.75 * dead(other[60:]) and now >= plain
    rate = sum(found[60:]) / (8 * len(found[60:]))
    assert 0.2 < rate < 0.85
    assert gain == 0.0 or sum(levels[-60:]) >= sum(levels[60:120])


def test_the_command(ask, tmp_path):
    """Levels of the tasks that are here, and the names of one of them."""
    code, said, _ = ask("tasks", "levels", FOLDER, "--number", 8)
    assert code == 0 and said.startswith("level 0: 60 tasks, ") and said.count("\n") == 8
    code, said, _ = ask("tasks", "levels", FOLDER, "--number", 8, "--level", 7)
    bits = bits_of(json.loads(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*.json"))
    names = said.split()
    assert code == 0 and names == [*sorted_by(bits, 8)[7]]
    (tmp_path / "x.json").write_text("{}")
    bare = json.loads((FOLDER / "toolz-1.0.0.json").read_text(encoding="utf-8"))
    (tmp_path / "y.json").write_text(json.dumps({**bare, "tasks": [{"id": "a"}]}))
    for words, says in (
        ((FOLDER, "--number", 9999), "levels must be 1 to 482"),
        ((FOLDER, "--level", 6), "--level expects a level from 0 to 5, got 6"),
        ((tmp_path / "x.json",), "is not a recipe of tasks"),
        ((tmp_path / "y.json",), "is not a recipe with the difficulty of its tasks"),
    ):
        code, _, wrong = ask("tasks", "levels", *words)
        assert code == 2 and says in wrong and wrong.count("\n") == 1, (words, wrong)
