"""A curriculum on many ranks chooses what it chooses in one process, also where a group of ranks died."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from recipe.small.settings import Recipe
from recipe.small.tasks import Depths
from ref.rl import Curriculum
from ref.rollout import RolloutResult
from tests.mirror import curriculum_parts
from tests.mirror.curriculum_parts import Climb
from tests.mirror.layouts import layouts, play

outcomes = st.one_of(st.none(), st.just(1.0), st.just(1.0), st.just(0.0))


@settings(max_examples=12, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(layouts, st.data())
def test_ranks_choose_what_one_process_chooses(tmp_path_factory, layout, data):
    """Tasks and levels of every step; after a restart the journal has each step once."""
    prompts, every = data.draw(st.sampled_from([1, 2, 3])), data.draw(st.integers(1, 9))
    steps = data.draw(st.lists(st.lists(outcomes, min_size=2 * prompts, max_size=2 * prompts), min_size=2, max_size=10))
    end = data.draw(st.integers(1, len(steps)))
    restarts = [(end, data.draw(st.integers(0, end)))]
    curriculum, chosen, logged = Climb(every), [], []
    for number, successes in enumerate(steps):
        tasks = curriculum.choose(number, prompts)
        chosen.append(tasks)
        logged.append(curriculum.metrics)
        ended = [
            RolloutResult(tasks[n // 2], "dead", {}, 0)
            if success is None
            else RolloutResult(tasks[n // 2], "", {"success": success}, 0)
            for n, success in enumerate(successes)
        ]
        curriculum.update(tasks, ended)
    for where in ([], restarts):
        answer = play(layout, curriculum_parts.follow, steps, prompts, every, tmp_path_factory.mktemp("run"), where)
        assert answer == (chosen, logged, len(steps))


def test_the_level_rises_and_falls(tmp_path):
    """Where all succeed, the hardest level is reached, and left again where all fail."""
    layout = dict(dp=1, cp=1, ep=1)
    _, logged, _ = play(layout, curriculum_parts.follow, [[1.0] * 4] * 4 + [[0.0] * 4] * 2, 2, 4, tmp_path, [])
    assert [line["level"] for line in logged] == [0.0, 1.0, 2.0, 3.0, 3.0, 2.0]


def test_a_step_without_its_predecessors_is_refused(tmp_path):
    layout = dict(dp=1, cp=1, ep=1)
    with pytest.raises(ValueError, match="has 0 steps; step 2 needs all before it"):
        play(layout, curriculum_parts.follow, [[1.0] * 2] * 3, 1, 2, tmp_path, [(0, 2)])


def test_curricula_have_the_interface():
    assert isinstance(Depths(Recipe()), Curriculum) and isinstance(Climb(1), Curriculum)
