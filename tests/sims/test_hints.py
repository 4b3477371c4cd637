"""Each rule fires on its fault and not on the honest version; clean demonstrations break none; hints give nothing away
and move no message."""

import random
from collections import Counter
from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import strategies as st

from kit.settings import RunError
from recipe.microrepo import NoiseConfig, generate
from recipe.small.demonstrations import taught
from recipe.small.hints import FEEDBACK, RULES, Fault, faults, hint_rollouts, hints, shuffled
from recipe.small.micro_world import CheckpointTasks
from recipe.small.settings import Hints, Memory, Recipe, RuleName
from recipe.small.transcripts import Message, messages
from ref.engine.sampler import Sampler
from ref.network import load_hf
from ref.rl import Feedback, score_rollouts
from ref.rollout import Rollout, sample_rollouts
from ref.self_summary import Chain
from ref.textual_feedback import hinted, leaked
from scaled.rl import Rl
from tests import scripted
from tests.scripted import TASK

CLEAN = NoiseConfig.clean()
CLUMSY = NoiseConfig(
    useless_read=0.5, invalid_call=0.6, skip_read=0.5, wrong_body=0.6, untested=0.3, skip_test=0.3, stop_early=0.1
)
RIGHT, WRONG = "write m3\n    return (a + b) * 2", "write m3\n    return a + b"
TARGET, HELPER = "def m3(a, b): m7 then double", "m7 is a + b"


@pytest.fixture(scope="module")
def language():
    return scripted.speaker()


def demonstrations(language, number, noise, memory, seed=0, depth=None, **others):
    """Finished demonstrations of so many tasks, in contexts that soon need a summary."""
    rng = random.Random(seed)
    tasks = [generate(rng, "heldout", depth) for _ in range(number)]
    return list(taught(tasks, language, scripted.narrow(language, **others), noise, memory, rng))


def told(language, episode, rules=RULES):
    return [(fault.rule, fault.says) for fault in faults(episode.task, messages(episode, language), rules)]


# ---------------------------------------------------------------------------------------------------------- rules


HONEST = ["read m3", "read m7", RIGHT, "test", "done"]


@pytest.mark.parametrize(
    "turns, found",
    [
        (HONEST, None),
        (["read m3", "read m7", WRONG, "test", RIGHT, "test", "done"], None),
        (["read m3\nread m7", RIGHT, "test\ndone"], None),
        (["raed m3", *HONEST], ("tool", "error: no such call")),
        (["", *HONEST], ("tool", "error: no call")),
        (["read m9", *HONEST], ("argument", "error: no such file, repo m2 m3 m7 fix m3")),
        (["read m3", "read m7", "write m7\n    return 4", *HONEST[2:]], ("argument", "error: fix m3")),
        (["read m3", "read m7", "write m3\n    return m7(a, b)", *HONEST[2:]], ("argument", "error: not a body")),
        (["read m3 m7", *HONEST], ("argument", "error: no such call")),
        ([RIGHT, "test", "done"], ("unread", "error: m3 not read")),
        (["read m3", RIGHT, "test", "done"], ("unread", "error: m7 not read")),
        (["read m3", f"read m7\n{RIGHT}", "test", "done"], ("unread", "error: m7 not read")),
        (["read m3", "done"], ("unfinished", "error: no body")),
        (["read m3", "read m7", WRONG, "test", "done"], ("unfinished", "error: tests fail")),
        (["read m3", "read m7", RIGHT, "done"], ("untested", "error: not tested")),
        (["read m3", "read m7", WRONG, "test", RIGHT, "done"], ("untested", "error: not tested")),
        (["read m2", *HONEST], ("needless", "error: m2 not needed")),
        (["read m3", *HONEST], ("needless", "error: m3 known")),
        (["read m3\nread m7\nread m7", *HONEST[2:]], ("needless", "error: m7 known")),
        (["test", *HONEST], ("needless", "error: no body")),
        (["read m3", "read m7", WRONG, "test", "test", RIGHT, "test", "done"], ("needless", "error: nothing new")),
        (
            ["read m3", "read m7", WRONG, "test", WRONG, "test", RIGHT, "test", "done"],
            ("needless", "error: nothing new"),
        ),
        ([*HONEST[:4], "read m7", "done"], ("needless", "error: passed")),
        ([*HONEST[:4], "test", "done"], ("needless", "error: passed")),
    ],
)
def test_a_rule_finds_its_fault(language, turns, found):
    episode = scripted.played(language, scripted.wide(language), TASK, turns)
    assert told(language, episode) == ([found] if found else [])


@pytest.mark.parametrize(
    "summary, found",
    [
        (f"{TARGET}, {HELPER}", None),
        (f"{HELPER}, {TARGET}", None),
        (f"{TARGET}, m7: a plus b is a + b, m2: a minus 3 is a - 3", None),
        ("nothing", "error: note without m3"),
        ("def m3(a, b): m7 then double then plus 4, m7 is a + b", "error: note without m3"),
        (TARGET, "error: note without m7"),
        (f"{TARGET}, m7 is a + b * 4", "error: note without m7"),
    ],
)
def test_a_summary_holds_what_the_task_needs(language, summary, found):
    turns = ["read m3", "read m7", "read m7", "read m7", RIGHT, "test", "done"]
    episode = scripted.played(language, scripted.narrow(language), TASK, turns, [summary, summary])
    one = next(one for one in messages(episode, language) if one.summary)
    assert [fault.says for fault in faults(TASK, messages(episode, language)) if fault.message == one] == (
        [found] if found else []
    )


def test_the_gravest_fault_is_told(language):
    episode = scripted.played(language, scripted.wide(language), TASK, [f"read m2\nread m9\nraed m3\n{WRONG}\ndone"])
    assert told(language, episode) == [("tool", "error: no such call")]
    alone = [told(language, episode, (rule,)) for rule in RULES]
    assert [one[0][0] for one in alone if one] == ["tool", "argument", "unread", "untested", "needless"]


def test_what_a_limit_cut_off_breaks_no_rule(language):
    how = replace(scripted.wide(language), trigger=30, longest_summary=1, room=0)
    episode = scripted.played(language, how, TASK, ["read m3", "write m3\n    return " + "a + " * 40])
    assert not episode.chain.finished and not messages(episode, language)[-1].is_whole and told(language, episode) == []


@pytest.mark.parametrize("join", ["self", "separate"])
def test_clean_demonstrations_break_no_rule(language, join):
    played = demonstrations(language, 40, replace(CLEAN, parallel_reads=0.5), Memory(wordy=0.5, forgetful=0), join=join)
    assert sum(len(episode.chain.segments) > 1 for episode in played) > 10
    assert [told(language, episode) for episode in played] == [[] for _ in played]


@pytest.mark.parametrize(
    "noise, rule",
    [
        (dict(invalid_call=1.0), "tool"),
        (dict(skip_read=1.0), "unread"),
        (dict(stop_early=1.0), "unfinished"),
        (dict(skip_test=1.0), "untested"),
        (dict(useless_read=1.0), "needless"),
        (dict(wrong_body=1.0), None),
        (dict(wrong_body=1.0, untested=1.0), "untested"),
    ],
)
def test_a_demonstrated_fault_breaks_its_own_rule_once(language, noise, rule):
    """The noise of demonstrations is written elsewhere and knows no rules."""
    played = demonstrations(language, 16, replace(CLEAN, **noise), scripted.NEVER, depth=2)
    found = Counter(tuple(rule for rule, _ in told(language, episode)) for episode in played)
    assert set(found) <= {(), (rule,)} and (rule is None or found[(rule,)] > 5), found


def test_a_forgotten_file_is_named(language):
    """A forgetful teacher reads again what its summary lost."""
    seen = 0
    for episode in demonstrations(language, 20, CLEAN, Memory(wordy=0, forgetful=1), depth=2):
        found = messages(episode, language)
        broken = [fault for fault in faults(episode.task, found) if fault.rule == "summary"]
        for fault in broken:
            after = found[found.index(fault.message) + 1]
            seen += 1
            assert after.text == fault.says.replace("error: note without ", "read ")
        assert [fault.rule for fault in faults(episode.task, found)] == ["summary"] * len(broken)
    assert seen > 5


# ---------------------------------------------------------------------------------------------------------- hints


@pytest.fixture(scope="module")
def clumsy(language):
    """200 tasks, played clumsily: episodes with their messages."""
    played = demonstrations(language, 200, CLUMSY, Memory(wordy=0.5, forgetful=0.5), seed=3)
    return [(episode, messages(episode, language)) for episode in played]


@pytest.mark.parametrize("rules", [RULES, FEEDBACK], ids=["rules", "feedback"])
def test_hints_stand_before_their_messages_and_give_nothing_away(language, clumsy, rules):
    fired = Counter()
    for episode, found in clumsy:
        broken = faults(episode.task, found, rules)
        rows = hints(language, episode.task, episode.chain, broken)
        assert sum(map(len, rows)) == len(broken)  # none leaked
        told = iter(broken)
        for segment, row in zip(episode.chain.segments, rows, strict=True):
            where = hinted(segment, row)
            assert where.student.tolist() == [t for hint in row for t in range(hint.begin, hint.end)]
            assert where.tokens[where.teacher].tolist() == segment.tokens[where.student].tolist()
            assert len(where.tokens) == (row[-1].end + sum(len(hint.tokens) for hint in row) if row else 0)
            for hint in row:
                fault = next(told)
                fired[fault.rule] += 1
                context = segment.tokens[: hint.begin].tolist()
                assert segment.tokens[hint.at : hint.begin].tolist() == [language.agent]
                assert language.decode(hint.tokens) == "\n" + fault.says
                assert not {language.env, language.agent, language.end} & {*hint.tokens}
                assert leaked(hint.tokens, language.encode(episode.task.answer), context) is None
                assert leaked(hint.tokens, language.encode(fault.message.text), context) is None
    wanted = {rule.name for rule in rules} - {"argument"}  # no demonstration has a refused argument
    assert wanted <= {*fired} and min(fired[name] for name in wanted) > 3


def test_feedback_is_what_the_environment_answers_next(language, clumsy):
    for episode, found in clumsy[:60]:
        for fault in faults(episode.task, found, FEEDBACK):
            answer = found[found.index(fault.message) + 1].context_before.removeprefix(fault.message.context_before)
            assert answer.startswith(fault.says)


def test_a_hint_that_quotes_its_message_is_not_given(language):
    episode = scripted.played(
        language, scripted.wide(language), TASK, ["read m3", "read m7", "write m3\n    return zygomorphism"]
    )
    found = messages(episode, language)
    (quoting,) = faults(TASK, found, FEEDBACK)
    assert quoting.says == "error: unknown name zygomorphism"
    assert hints(language, TASK, episode.chain, [quoting]) == [[]]
    assert [len(row) for row in hints(language, TASK, episode.chain, faults(TASK, found))] == [
        2
    ]  # not a body; then done without one


def test_a_hint_that_says_the_answer_is_not_given(language):
    episode = scripted.played(language, scripted.wide(language), TASK, ["raed m3", *HONEST])
    (fault,) = faults(TASK, messages(episode, language))
    assert hints(language, TASK, episode.chain, [replace(fault, says=TASK.answer)]) == [[]]


def test_the_same_episode_has_the_same_hints(language, clumsy):
    episode, _ = next((episode, found) for episode, found in clumsy if len(faults(episode.task, found)) > 1)
    once, again = (
        [hints(language, episode.task, episode.chain, faults(episode.task, messages(episode, language)))]
        for _ in range(2)
    )
    assert once == again


# -------------------------------------------------------------------------------------------------------- control


@drawn(st.lists(st.integers(0, 5), max_size=8), st.integers(0, 2**32))
def test_shuffled_hints_come_from_other_rollouts(sizes, seed):
    rollouts = [
        [Fault("tool", f"{n} {i}", Message(0, i, i + 1, "", "")) for i in range(size)] for n, size in enumerate(sizes)
    ]
    mixed = shuffled(rollouts, seed)
    assert [[(f.rule, f.message) for f in row] for row in mixed] == [
        [(f.rule, f.message) for f in row] for row in rollouts
    ]
    assert sorted(f.says for row in mixed for f in row) == sorted(f.says for row in rollouts for f in row)
    assert mixed == shuffled(rollouts, seed)
    if 2 * max(sizes, default=0) <= sum(sizes):
        assert all(f.says.split()[0] != str(n) for n, row in enumerate(mixed) for f in row)


# ------------------------------------------------------------------------------------------------------- a step


def words(language, rows):
    """What the hints of each episode say."""
    return [[language.decode(hint.tokens).removeprefix("\n") for row in one for hint in row] for one in rows]


def test_the_settings_name_the_rules():
    assert get_args(RuleName) == tuple(rule.name for rule in RULES) and {*Hints().rules} <= {*get_args(RuleName)}
    for wrong in ((), ("tool", "tool")):
        with pytest.raises(ValueError, match="rules must be different, and one at least"):
            Hints(rules=wrong)


def test_what_the_hints_of_a_step_say(language, clumsy):
    """Each source says its own, at the messages that the chosen rules find."""
    episodes = [episode for episode, _ in clumsy[:60]]
    chosen = tuple(rule for rule in RULES if rule.name in ("tool", "needless"))
    broken = [faults(episode.task, found, chosen) for episode, found in clumsy[:60]]
    how = Hints(1.0, rules=("needless", "tool"))
    rows = hint_rollouts(episodes, 0, language, how)
    assert rows == [hints(language, e.task, e.chain, some) for e, some in zip(episodes, broken, strict=True)]
    assert words(language, rows) == [[fault.says for fault in some] for some in broken] and sum(map(len, broken)) > 20

    bare = hint_rollouts(episodes, 0, language, replace(how, source="bare"))
    mixed, again, other = (
        hint_rollouts(episodes, seed, language, replace(how, source="shuffled")) for seed in (0, 0, 1)
    )
    for control in (bare, mixed):
        assert [[(h.at, h.begin, h.end) for row in one for h in row] for one in control] == [
            [(h.at, h.begin, h.end) for row in one for h in row] for one in rows
        ]
    assert {text for one in words(language, bare) for text in one} == {"error"}
    assert sorted(sum(words(language, mixed), [])) == sorted(sum(words(language, rows), [])) and mixed == again != other

    error = hint_rollouts(episodes, 0, language, replace(how, source="error"))
    assert words(language, error) == [
        [fault.says for fault in faults(e.task, found, FEEDBACK)] for e, found in clumsy[:60]
    ]


def test_hints_of_another_world_are_refused(language):
    with pytest.raises(TypeError, match="hints are for rollouts in the small world, got one in object"):
        hint_rollouts([Rollout(Chain(), environment=object())], 0, language, Hints(1.0))


def test_a_full_run_s_world_gives_hints_where_they_have_a_weight(tiny_run):
    """Of its own rollouts; what would be exchanged between ranks is refused."""
    asked = replace(Rl.rehearsal(), checkpoint=str(tiny_run / "checkpoints" / "sft"), length=256)
    told = replace(asked, rl=replace(asked.rl, feedback=Feedback(1.0)))
    sampler = Sampler(load_hf(tiny_run / "checkpoints" / "sft"), torch.float32)

    def sampled(c):
        tasks, generator = CheckpointTasks(c), torch.Generator().manual_seed(0)
        four = [tasks.task("rl", number) for number in range(4)]
        found = sample_rollouts(sampler, tasks.environment, four, 1, tasks.language, tasks.limits, 1.0, generator)
        score_rollouts(c.rl, tasks, found, 0)
        return found

    plain, taught = sampled(asked), sampled(told)
    assert not any(one.hints for one in plain) and [len(one.hints) for one in taught] == [
        len(one.chain.segments) for one in taught
    ]
    for one in taught:
        for segment, some in zip(one.chain.segments, one.hints, strict=True):
            hinted(segment, some)
    recipe = CheckpointTasks(asked).recipe
    assert isinstance(recipe, Recipe)
    mixed = replace(recipe, rl=replace(recipe.rl, feedback=Hints(1.0, source="shuffled")))
    CheckpointTasks(asked, mixed)
    with pytest.raises(RunError, match="rl.feedback.source=shuffled exchanges hints between all rollouts of a step"):
        CheckpointTasks(told, mixed)
