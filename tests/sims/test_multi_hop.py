"""Multi-hop tasks of the small world: references lead to the body, and guesses do not."""

import random
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.microrepo import NoiseConfig, Session, WorldConfig, demonstration, documents, generate, held_out
from recipe.microrepo.language import translate
from recipe.small.data import task_stream
from recipe.small.settings import Evaluation, Hints, Recipe, Sft
from recipe.small.tasks import N_KINDS, Depths

seeds = st.integers(0, 2**32)
splits = st.sampled_from(["train", "heldout"])
DEEP = WorldConfig(multi_hop_share=1.0, hop_mix=(1.0,) * 8)


@settings(deadline=None)
@given(seeds, splits)
def test_references_lead_to_the_body(seed, split):
    """From the target through every helper, to the one file whose body is the target's; nothing else is referred to."""
    task = generate(random.Random(seed), split, config=DEEP)
    assert task.kind == "multi-hop" and task.depth == len(task.helpers)
    way, name = [], task.target
    while task.files[name].doc.startswith("as "):
        name = task.files[name].doc.removeprefix("as ")
        assert task.files[name].args == task.files[task.target].args
        way.append(name)
    assert tuple(way) == task.helpers
    expression = translate(task.files[name].doc)
    assert task.answer == task.files[name].body == f"return {expression.code}"
    assert held_out(expression) is (split == "heldout")
    others = [module for other, module in task.files.items() if other not in (task.target, *task.helpers)]
    assert others and all(module.body == f"return {translate(module.doc).code}" for module in others)
    if split == "train":
        assert not any(held_out(translate(module.doc)) for module in others)


@settings(deadline=None)
@given(seeds, splits)
def test_a_file_shows_no_more_than_where_to_look(seed, split):
    """No file before the last shows the body, and the last shows it all."""
    task = generate(random.Random(seed), split, config=DEEP)
    session = Session(task, max_turns=12)
    texts = [session.step(f"read {name}") for name in (task.target, *task.helpers)]
    assert not any("return" in text for text in texts[:-1]) and texts[-1].endswith(task.answer)


@settings(deadline=None)
@given(seeds, splits)
def test_clean_demonstrations_read_every_file_of_the_way_and_nothing_else(seed, split):
    task = generate(random.Random(seed), split, config=DEEP)
    turns = demonstration(task, random.Random(seed), NoiseConfig.clean())
    session = Session(task, len(turns))
    for turn in turns:
        session.step(turn)
    verdict = session.verify()
    assert (verdict.tests, verdict.tested, verdict.finished, verdict.invalid_calls) == (1.0, True, True, 0)
    assert verdict.reads == task.depth + 1 and verdict.turns == task.depth + 4


@pytest.mark.parametrize(
    ("noise", "success", "reads"),
    [
        ({"guess": 1, "untested": 1}, 0.0, 1),
        ({"guess": 1, "give_up": 1}, 0.0, 1),
        ({"guess": 1}, 1.0, None),
        ({"useless_read": 1}, 1.0, None),
        ({"skip_test": 1}, 1.0, None),
        ({"stop_early": 1}, 0.0, 1),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_each_kind_of_noise_has_its_effect(noise, success, reads):
    """A guess fails, and only who tests it and goes on succeeds."""
    rng = random.Random(0)
    for _ in range(30):
        task = generate(rng, "train", config=DEEP)
        turns = demonstration(task, rng, NoiseConfig(**(vars(NoiseConfig.clean()) | noise)))
        session = Session(task, len(turns))
        for turn in turns:
            session.step(turn)
        verdict = session.verify()
        assert verdict.tests == success and verdict.reads == (
            reads or (task.depth + 1 + task.depth * noise.get("useless_read", 0))
        )


def test_streams_have_the_depths_of_their_use():
    """Demonstrations are shallow, RL goes deeper, and evaluation deeper still; documents show compositions only."""
    config = Recipe(world=WorldConfig(multi_hop_share=1.0))
    depths = {
        use: {task.depth for task in islice(task_stream(config, use), 200)}
        for use in ("demonstrations", "rl", "evaluation")
    }
    assert depths == {"demonstrations": {1, 2}, "rl": {1, 2, 3, 4}, "evaluation": {1, 2, 3, 4, 5, 6}}
    assert not any('"""as ' in text for text in islice(documents(random.Random(0), config.world), 200))


def test_a_share_of_the_tasks_is_multi_hop():
    rng, world = random.Random(0), WorldConfig(multi_hop_share=0.3)
    kinds = [generate(rng, "train", config=world).kind for _ in range(1000)]
    assert abs(kinds.count("multi-hop") / 1000 - 0.3) < 0.05
    assert generate(rng, "train", 2, WorldConfig(multi_hop_share=1.0)).kind == "composition", (
        "a depth is a composition's"
    )


def test_states_of_earlier_versions_are_read():
    """They knew three kinds of tasks."""
    curriculum = Depths(Recipe())
    curriculum.restore({"consumed": 7, "played": np.arange(9.0).reshape(3, 3)})
    assert curriculum.consumed == 7 and curriculum.kind_totals.shape == (N_KINDS, 3)
    assert curriculum.kind_totals.ravel()[:9].tolist() == [*range(9)] and not curriculum.kind_totals[3:].any()


@pytest.mark.parametrize(
    "wrong", [{"hop_mix": ()}, {"hop_mix": (0.0,)}, {"hop_mix": (1.0,) * 9}, {"multi_hop_share": 2}]
)
def test_impossible_worlds_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        WorldConfig(**wrong)
    for part in (Sft, Evaluation):
        if "hop_mix" in wrong:
            with pytest.raises(ValueError, match="hop_mix must be 1 to 8 non-negative weights"):
                part(**wrong)


def test_hints_are_refused():
    """Their rules ask which helper's body has been read."""
    rl = replace(Recipe().rl, feedback=Hints(weight=0.1))
    assert Recipe(rl=rl).rl.feedback.weight == 0.1
    with pytest.raises(ValueError, match="rl.feedback.weight must be 0 with world.multi_hop_share"):
        Recipe(rl=rl, world=WorldConfig(multi_hop_share=0.1))
