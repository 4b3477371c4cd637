"""Demonstrations with hints, a call that has another name, and the experiment on both."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from kit.runs import Run
from recipe.microrepo import MicroRepo, NoiseConfig, Session, demonstration, generate
from recipe.microrepo.environment import TextSession
from recipe.microrepo.renaming import RenamedSession, renamed
from recipe.small.agent import parted, single
from recipe.small.hints import faults
from recipe.small.learner import language_of
from recipe.small.transcripts import messages
from ref.textual_feedback import leaked
from sims import hack_training
from sims.policies import read_config
from sims.textual_feedback import experiment as textual_feedback
from sims.textual_feedback import verdicts as feedback_verdicts
from sims.textual_feedback.hinted import HINTED_RULES, NAMES, REMINDER, Hinted, demonstrations, reminder, repaired
from tests import scripted
from tests.scripted import TASK

CLEAN = NoiseConfig.clean()
RIGHT = "write m3\n    return (a + b) * 2"
seeds = st.integers(0, 10**6)


@pytest.fixture(scope="module")
def language():
    return scripted.speaker()


def made(language, number, hinted=0.6, renaming=0.4, noise=textual_feedback.CLUMSY):
    rng = random.Random(1)
    tasks = (generate(rng, "train") for _ in itertools.count())
    how = scripted.wide(language)
    return list(
        itertools.islice(demonstrations(tasks, language, how, noise, random.Random(2), hinted, renaming), number)
    )


def hint_of(language, rollout):
    """Before which turn stands a line that the environment did not say, and what it says; None if there is none."""
    (segment,) = rollout.chain.segments
    given = [segment.tokens[where].tolist() for where, own in parted(segment, language.env) if not own]
    opening, *answers = [one for one in rollout.messages if one.role != "assistant"]
    said = [language.encode_opening([opening]), *(language.encode_answer((), [one]) for one in answers)]
    found = []
    for at, (tokens, plain) in enumerate(zip(given, said, strict=True)):
        if tokens != plain:
            more = len(tokens) - len(plain)
            assert [*tokens[: len(plain) - 1], *tokens[-1:]] == plain
            found.append((at, language.decode(tokens[-1 - more : -1]).removeprefix("\n")))
    assert len(found) < 2
    return found[0] if found else None


# A call with another name.


@given(seeds, st.sampled_from(NAMES))
def test_a_world_with_another_name_is_the_same_in_other_words(seed, name):
    rng = random.Random(seed)
    task = generate(rng, "train")
    turns = demonstration(task, rng, textual_feedback.CLUMSY)
    plain, other = Session(task), RenamedSession(task, name=name)
    for turn in turns:
        assert plain.step(turn) == other.step(renamed(turn, name)) and renamed(renamed(turn, name), name) == turn
    assert plain.verify() == other.verify()


@given(seeds)
def test_who_goes_on_to_say_write_is_never_paid(seed):
    rng = random.Random(seed)
    task = generate(rng, "train")
    session = RenamedSession(task)
    assert isinstance(session, TextSession)
    said = [session.step(turn) for turn in demonstration(task, rng, CLEAN) if not session.done]
    assert (
        session.verify().tests == 0
        and session.verify().writes == 0
        and any("error: no such call" in one for one in said)
    )


def test_a_body_that_looks_like_a_call_is_a_body():
    session = RenamedSession(TASK)
    assert session.step("put m3\n    return (a + b) * 2") == "ok" and session.step("write") == "error: no such call"


# Demonstrations.


def test_demonstrations_err_without_hints_and_obey_them(language):
    """Where a hint stands, the turn behind it breaks no rule, and is the one that the hint asks for."""
    found = made(language, 150)
    hints = [hint_of(language, one) for one in found]
    assert 30 < hints.count(None) < len(found) - 30
    wrong = [
        len(faults(one.task, messages(one, language), HINTED_RULES))
        for one, hint in zip(found, hints, strict=True)
        if hint is None
    ]
    assert np.mean(wrong) > 0.4, "the others go on to err"
    asked = set()
    for one, (at, text) in ((one, hint) for one, hint in zip(found, hints, strict=True) if hint):
        session = one.environment.session
        aliased = isinstance(session, RenamedSession)
        told = messages(one, language, RenamedSession if aliased else Session)
        this = told[at]
        assert this.context_before.endswith(f"\n{text}<|agent|>")
        asked.add(text.split()[0] + text.split()[-1])
        if isinstance(session, RenamedSession):
            assert text == reminder(session.name) and this.text.startswith(f"{session.name} {one.task.target}\n")
            assert not any(line.startswith("write ") for message in told for line in message.text.split("\n"))
            continue
        rule = "unread" if text.endswith("not read") else "tool" if text.endswith("call") else "needless"
        broken = [fault.rule for fault in faults(one.task, told, HINTED_RULES) if fault.message == this]
        assert rule not in broken
        if text.endswith("not read"):
            assert this.text == f"read {text.split()[1]}"
        if text.endswith("not needed"):
            assert this.text != f"read {text.split()[1]}"
        assert leaked(language.encode(f"\n{text}"), language.encode(one.task.answer), ()) is None
    assert {"error:read", "error:needed", "error:call", "calls:done"} <= asked


def test_shares_of_nothing_and_of_all(language):
    assert not any(hint_of(language, one) for one in made(language, 20, hinted=0.0, renaming=0.0))
    assert all(isinstance(one.environment.session, RenamedSession) for one in made(language, 20, renaming=1.0))
    assert not any(hint_of(language, one) for one in made(language, 20, hinted=1.0, renaming=0.0, noise=CLEAN)), (
        "there is nothing to repair"
    )


@pytest.mark.parametrize("limit", [80, 110, 140, 170, 200])
def test_contexts_that_end_within_a_turn_are_left_out(language, limit):
    """A last turn of which the context held only the beginning was said again where a repair had left it room: the
    script ran out of turns."""
    tasks, rng = random.Random(1), random.Random(2)
    stream = (generate(tasks, "train") for _ in range(300))
    found = [*demonstrations(stream, language, single(limit), textual_feedback.CLUMSY, rng, 1.0, 0.3)]
    assert found and all(one.chain.finished and one.chain.segments[-1].finished for one in found)


@pytest.mark.parametrize(
    "turns, after",
    [
        (["raed m3", "read m3", "read m7", RIGHT, "test", "done"], ["read m3", "read m7", RIGHT, "test", "done"]),
        (["read m3", "read m2", "read m7", RIGHT, "done"], ["read m3", "read m7", RIGHT, "done"]),
        (["read m3", "write m3\n    return a", "done"], ["read m3", "read m7", RIGHT, "test", "done"]),
    ],
)
def test_a_fault_is_repaired(language, turns, after):
    found = messages(scripted.played(language, scripted.wide(language), TASK, turns), language)
    assert repaired(TASK, found, faults(TASK, found, HINTED_RULES)[0]) == after


def test_a_hint_may_stand_in_front_of_the_first_turn(language):
    opening = MicroRepo(Session(TASK)).reset()
    plain, told = (one.encode_opening(opening) for one in (language, Hinted(language, "error: m2 not needed", 0)))
    assert language.decode(told) == language.decode(plain).replace("<|agent|>", "\nerror: m2 not needed<|agent|>")


def test_one_reminder_where_a_rollout_first_forgets(language):
    turns = ["read m3", f"read m7\n{RIGHT}", RIGHT, "test", "done"]
    episode = scripted.played(language, scripted.wide(language), TASK, turns)
    (fault,) = faults(TASK, messages(episode, language), REMINDER)
    assert fault.says == "calls: read put test done" and fault.message.text == turns[1]
    (row,) = textual_feedback.reminders(language, [episode], 0)
    assert [[language.decode(hint.tokens) for hint in one] for one in row] == [[f"\n{fault.says}"]]


# The experiment.


def test_arms_differ_in_what_they_say(tiny_run):
    c = textual_feedback.Experiment(run=str(tiny_run))
    recipe = read_config(tiny_run)
    arms = {
        arm: textual_feedback.arm_of(c, recipe, arm, language_of(tiny_run))
        for some in textual_feedback.ARMS.values()
        for arm in some
    }
    weights = {arm: one.rl.feedback.weight for arm, (one, _) in arms.items()}
    assert {arm for arm, weight in weights.items() if not weight} == {"outcome", "priced", "alone"} and {
        *weights.values()
    } == {0.0, c.weight}
    assert arms["priced"][0].rl.payment == recipe.rl.payment and arms["outcome"][0].rl.payment.invalid_call == 0
    assert {arm for arm, (_, hinting) in arms.items() if hinting} == {"forward", "reverse"}
    assert [arms[arm][0].rl.feedback.divergence for arm in ("hints", "forward", "reverse")] == [
        "reverse",
        "forward",
        "reverse",
    ]


def verdicts(**effects):
    """Verdicts on three trainings with these effects, an arm's on what is counted."""
    start = {
        "faults": {"faults": 1.0, "invalid": 0.6, "others": 0.3, "solved": 0.4},
        "renamed": {"wrote": 0.0, "solved": 0.0},
    }
    usual = {"hints": {"faults": -0.4}, "error": {"invalid": -0.3}, "forward": {"solved": 0.4}}
    spread, numbers = np.array([-0.01, 0.0, 0.01]), {}
    for world, arms in textual_feedback.ARMS.items():
        for arm in arms:
            change = usual.get(arm, {}) | effects.get(arm, {})
            numbers[arm] = {
                name: value + change.get(name, 0.0) + spread * bool(change) for name, value in start[world].items()
            }
            numbers[arm] = {name: np.broadcast_to(value, 3) for name, value in numbers[arm].items()}
    return {one["name"]: one["verdict"] for one in feedback_verdicts.learned(numbers, numbers, start)}


def test_rules():
    assert set(verdicts().values()) == {"reproduced"}
    worse = verdicts(hints={"faults": 0.1})
    assert {name for name, verdict in worse.items() if verdict == "contradicted"} == {
        "fewer-faults",
        "mended",
        "right-hint",
        "more-than-error",
        "more-than-prices",
    }
    assert (
        verdicts(hints={"solved": -0.2})["equal-success"] == "contradicted"
        and verdicts(hints={"solved": 0.2})["equal-success"] == "reproduced"
    )
    assert verdicts(hints={"others": 0.5})["nothing-else"] == "contradicted"
    assert verdicts(shuffled={"faults": -0.4})["right-hint"] == "not at this scale"
    assert verdicts(alone={"solved": 0.1})["sparse"] == "partly"
    assert verdicts(reverse={"solved": 0.4})["direction"] == "not at this scale"


def test_the_experiment_plays_its_arms_and_goes_on(tiny_run, tmp_path, monkeypatch):
    """Some of them: one that is given the rules' hints, one that is given others, and one without."""
    c = textual_feedback.Experiment(
        str(tiny_run), demonstrations=8, epochs=1, trainings=2, steps=1, prompts=2, rollouts=2, tasks=1, samples=1
    )
    monkeypatch.setattr("kit.process.cores", lambda: 1)
    monkeypatch.setattr(textual_feedback, "ARMS", {"faults": ("outcome", "shuffled"), "renamed": ("forward",)})
    judged = []
    monkeypatch.setattr(textual_feedback, "learned", lambda *found: judged.append(found) or [])
    with Run.open(tmp_path / "run", "figure textual-feedback", c) as run:
        found = textual_feedback.experiment(run, c)
        monkeypatch.setattr(hack_training, "learn", lambda *_, **__: pytest.fail("a finished training begins again"))
        assert textual_feedback.experiment(run, c) == found
    assert [(row["world"], row["training"]) for row in found["rows"]] == [
        (arm, n) for arm in ("outcome", "shuffled", "forward") for n in (0, 1)
    ]
    steps, ends, before = judged[0]
    assert {arm: {*one} for arm, one in ends.items()} == {arm: {*one} for arm, one in steps.items()}
    assert {*before["faults"]} == {"faults", "invalid", "others", "solved"} and all(
        len(x) == 2 for one in ends.values() for x in one.values()
    )
    textual_feedback.picture(found, tmp_path / "drawn.png")
    assert len(np.unique(imread(tmp_path / "drawn.png")[..., :3].reshape(-1, 3), axis=0)) > 20


@pytest.mark.parametrize("wrong", [{"trainings": 1}, {"weight": 0.0}, {"hinted": 1.5}, {"renaming": -0.5}])
def test_bad_settings(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} .* got"):
        textual_feedback.Experiment(**wrong)
    assert replace(textual_feedback.Experiment.quick(), seed=1).run == ""
