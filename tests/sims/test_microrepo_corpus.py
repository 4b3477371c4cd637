"""Training texts of the small world: scripted episodes end as they should, documents give nothing away."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.microrepo import (
    EvaluationError,
    NoiseConfig,
    Session,
    WorldConfig,
    demonstration,
    document,
    documents,
    generate,
    held_out,
    mutate,
    transcript,
)
from recipe.microrepo.evaluator import parse
from recipe.microrepo.language import translate

seeds = st.integers(0, 2**32)
splits = st.sampled_from(["train", "heldout"])
depths = st.sampled_from([0, 1, 2])


@pytest.mark.parametrize("split", ["train", "heldout"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_clean_demonstrations_always_succeed(split, depth):
    rng = random.Random(depth)
    for _ in range(60):
        task = generate(rng, split, depth)
        turns = demonstration(task, rng, NoiseConfig.clean())
        session = Session(task)
        answers = [session.step(turn) for turn in turns]
        reward = session.verify()
        assert (reward.tests, reward.passed, reward.invalid_calls) == (1.0, 1.0, 0)
        assert reward.tested and reward.finished and session.done
        assert reward.calls == reward.turns == len(turns) == depth + 4
        assert answers[-2:] == ["passed 3 of 3", ""]


def test_mutated_bodies_are_found_out():
    rng = random.Random(3)
    caught = 0
    for _ in range(400):
        task = generate(rng, "train")
        module = task.files[task.target]
        session = Session(task)
        body = f"return {mutate(module.expr, module.args, rng)}"
        answer = session.step(f"write {task.target}\n    {body}\ntest")
        assert answer.startswith("ok\npassed ")
        caught += session.verify().tests == 0.0
    assert caught > 380


def test_no_slip_gets_past_hidden_tests_that_visible_tests_reveal():
    rng = random.Random(4)
    for _ in range(200):
        task = generate(rng, "train")
        module = task.files[task.target]
        body = parse(f"return {mutate(module.expr, module.args, rng)}", module.args)
        if any(outcome(body, case) != case.want for case in task.visible_tests):
            assert any(outcome(body, case) != case.want for case in task.hidden_tests)


def outcome(body, case):
    try:
        return body.evaluate(case.inputs)
    except EvaluationError:
        return None


@settings(deadline=None)
@given(seeds, splits)
def test_noisy_demonstrations_replay(seed, split):
    rng = random.Random(seed)
    task = generate(rng, split)
    turns = demonstration(task, rng, NoiseConfig(*[0.5] * 8))
    episode = transcript(task, turns)
    assert episode[0] == ("env", task.prompt)
    assert [text for role, text in episode if role == "agent"] == turns
    assert [role for role, _ in episode] == ["env", *["agent", "env"] * len(turns)]
    assert turns[-1] == "done" and episode[-1] == ("env", "")


@pytest.mark.parametrize(
    ("noise", "success"),
    [
        (dict(useless_read=1), 1.0),
        (dict(parallel_reads=1), 1.0),
        (dict(invalid_call=1), 1.0),
        (dict(skip_test=1), 1.0),
        (dict(wrong_body=1), 1.0),
        (dict(skip_read=1), 1.0),
        (dict(wrong_body=1, untested=1), 0.0),
        (dict(skip_read=1, untested=1), 0.0),
        (dict(stop_early=1), 0.0),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_each_kind_of_noise_has_its_effect(noise, success):
    rng = random.Random(0)
    clean = NoiseConfig.clean()
    for _ in range(30):
        task = generate(rng, "train", 2, WorldConfig(files=(4, 6)))
        turns = demonstration(task, rng, NoiseConfig(**(vars(clean) | noise)))
        session = Session(task)
        for turn in turns:
            session.step(turn)
        reward = session.verify()
        assert reward.tests == success
        assert reward.invalid_calls == noise.get("invalid_call", 0)
        tested = success == 1 and "skip_test" not in noise
        assert reward.tested == tested
        assert reward.reads == 3 + noise.get("useless_read", 0) - (2 if "stop_early" in noise else 0) - (
            noise.get("skip_read", 0) * noise.get("untested", 0)
        )


def test_document_shows_prompt_helpers_and_inlined_target():
    task = generate(random.Random(2), "train", 1)
    (helper,) = task.helpers
    lines = document(task).split("\n")
    assert lines[0] == task.prompt
    assert lines[1].startswith(f"def {helper}(") and lines[3] == f"    return {task.files[helper].expr}"
    assert lines[4].startswith(f"def {task.target}(") and lines[6] == f"    {task.answer}"
    assert lines[7:] == [""]


def test_documents_hold_no_function_that_is_held_out():
    stream = documents(random.Random(5))
    for _ in range(300):
        text = next(stream)
        known = {}
        for module in text.split("\ndef ")[1:]:
            name = module.split("(")[0]
            phrase = module.split('"""')[1]
            known[name] = translate(phrase, known)
            assert module.rstrip("\n").endswith(f"return {known[name].code}")
            assert not held_out(known[name])


@settings(max_examples=30, deadline=None)
@given(seeds, splits, depths, st.sampled_from([(1, 1), (1, 3)]), st.sampled_from([(0, 0), (0, 3)]))
def test_every_world_that_is_accepted_can_be_solved(seed, split, depth, helper_operations, steps):
    config = WorldConfig((1, 1, 1), (1, 10), (1, 4), helper_operations, steps, steps, digits=seed % 2)
    rng = random.Random(seed)
    task = generate(rng, split, depth, config)
    session = Session(task)
    for turn in demonstration(task, rng, NoiseConfig.clean()):
        session.step(turn)
    assert session.verify().tests == 1.0
