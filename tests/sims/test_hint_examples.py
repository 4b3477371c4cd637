"""The faults that the explorer shows: the first of each rule, whole, each with a hint of its own and one of another
rollout."""

import random
from collections import Counter

import pytest

from recipe.microrepo import NoiseConfig, generate
from recipe.small.demonstrations import taught
from recipe.small.hints import RULES, faults, hints
from recipe.small.settings import Memory
from recipe.small.transcripts import messages
from sims.examples.hints import FAULTS_PER_RULE, hinted_messages
from tests import scripted

CLUMSY = NoiseConfig(
    useless_read=0.5, invalid_call=0.6, skip_read=0.5, wrong_body=0.6, untested=0.3, skip_test=0.3, stop_early=0.1
)
NAMES = [rule.name for rule in RULES]


@pytest.fixture(scope="module")
def played():
    """Tasks and one clumsy rollout of each, in contexts that soon need a summary."""
    language, rng = scripted.speaker(), random.Random(0)
    tasks = [generate(rng, "heldout") for _ in range(40)]
    lessons = [*taught(tasks, language, scripted.narrow(language), CLUMSY, Memory(wordy=0.0, forgetful=0.5), rng)]
    return language, [lesson.task for lesson in lessons], lessons


def test_of_each_rule_the_first_faults_are_kept(played):
    language, tasks, lessons = played
    found = hinted_messages(language, tasks, lessons, 1.0, 0)["rollouts"]
    times = Counter(one["rule"] for one in found)
    assert {*times} == {*NAMES} - {"argument"}, "the script never has a call refused for its argument"
    assert max(times.values()) == FAULTS_PER_RULE
    assert [NAMES.index(one["rule"]) for one in found] == sorted(NAMES.index(one["rule"]) for one in found)
    assert len({one["says"] for one in found}) == len(found), "no two are told the same"
    assert sorted(one["other"] for one in found) == sorted(one["says"] for one in found) and all(
        one["other"] != one["says"] for one in found
    )
    firsts = [
        fault for task, e in zip(tasks, lessons, strict=True) for fault in faults(task, messages(e, language))[:1]
    ]
    assert firsts[0].says in {one["says"] for one in found}


def test_an_entry_is_the_context_of_its_fault(played):
    language, tasks, lessons = played
    for one in hinted_messages(language, tasks, lessons, 1.0, 0)["rollouts"]:
        at = next(
            n for n, e in enumerate(lessons) for segment in e.chain.segments if segment.tokens.tolist() == one["tokens"]
        )
        task, episode = tasks[at], lessons[at]
        fault, *_ = [
            fault
            for fault in faults(task, messages(episode, language))
            if (fault.rule, fault.says) == (one["rule"], one["says"])
        ]
        assert (fault.message.begin, fault.message.end, fault.message.text) == (one["begin"], one["end"], one["text"])
        assert (one["task"], one["answer"], one["success"]) == (
            task.prompt,
            task.answer,
            episode.metrics["tests"] == 1.0,
        )
        segment = episode.chain.segments[fault.message.segment]
        spans = {place for begin, end in one["own"] for place in range(begin, end)}
        assert spans == {*segment.sampled.nonzero()[:, 0].tolist()} and [one["begin"], one["end"]] in one["own"]
        assert any(hints(language, task, episode.chain, [fault])), "it may be hinted at: the hint gives nothing away"


def test_where_nothing_went_wrong_there_is_nothing(played):
    language, tasks, _ = played
    lessons = [
        *taught(
            tasks[:4],
            language,
            scripted.narrow(language),
            NoiseConfig.clean(),
            Memory(wordy=0.0, forgetful=0.0),
            random.Random(0),
        )
    ]
    found = hinted_messages(language, [lesson.task for lesson in lessons], lessons, 0.7, 0)
    assert found["rollouts"] == [] and found["played"] == len(lessons) and found["temperature"] == 0.7
