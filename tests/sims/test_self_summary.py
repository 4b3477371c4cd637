"""Scripted chains hold what they should and no more; RL on chains is RL on rollouts where chains have one segment; the
statistics against numbers by hand, and a fault in them is found out."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from kit.settings import fill
from recipe.microrepo import MicroRepo, NoiseConfig, Session, WorldConfig, demonstration, documents, generate
from recipe.small import demonstrations as chains
from recipe.small import stages as recipe
from recipe.small.agent import Language, one_row
from recipe.small.demonstrations import Lesson
from recipe.small.learner import Learner
from recipe.small.reinforcement import metrics_of
from recipe.small.settings import Memory
from recipe.small.tasks import MicroTasks
from ref import cpt
from ref.messages import Message
from ref.network import Config, Transformer
from ref.rl import Done, compute_reference_kl, compute_reward_terms, improve, score_rollouts
from ref.rollout import Limits, script_rollout
from ref.self_summary import spread
from sims.experiment import LAW_VERDICTS, VERDICTS, is_law
from sims.policies import SMOKE
from sims.self_summary import experiment as self_summary
from sims.self_summary.experiment import ARMS, COUNTS, Experiment

TINY = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    num_experts=4,
    moe_intermediate_size=32,
)
NEVER = Memory(wordy=0, forgetful=0, longest=69)


@pytest.fixture(scope="module")
def language():
    return Language(cpt.train_tokenizer(itertools.islice(documents(random.Random(0)), 300), 400))


@pytest.fixture
def config():
    settings = SMOKE | {"training": SMOKE["training"] | {"dtype": "float32"}, "rl": SMOKE["rl"] | {"prompts": 3}}
    return fill(recipe.Recipe, settings)


@pytest.fixture
def how(language):
    return chains.make_chaining(language, 96, 40, 70)


def lesson(language, how, depth, seed=0, memory=NEVER, noise=None):
    """A lesson of a training task, played."""
    rng = random.Random(seed)
    task = generate(rng, "train", depth)
    turns = demonstration(task, rng, noise or NoiseConfig.clean())
    rollout = script_rollout(
        MicroRepo(Session(task)), language, Limits(how), Lesson(language, task, turns, rng, memory).say
    )
    rollout.task = task
    return rollout, task, turns


def conversation(lesson):
    """Turns of a lesson: a function that takes one of them, and tells the lesson what it leads to."""
    environment = MicroRepo(Session(lesson.task))
    messages = environment.reset()

    def say(turn):
        messages.append(Message("assistant", turn))
        messages.extend(environment.step(messages[-1]).messages)
        lesson.hear(messages)

    return say


def summaries(language, chain):
    return [language.decode(s.tokens[s.summary].tolist()[:-1]) for s in chain.segments if s.summary.any()]


# ---------------------------------------------------------------------------------------------- demonstrations


@pytest.mark.parametrize("seed", range(6))
def test_without_limit_the_teacher_gives_the_recipes_demonstrations(language, demonstration_tokens, how, seed):
    wide = replace(how, join="none", trigger=2000)
    taught, task, turns = lesson(language, wide, seed % 3, seed, noise=NoiseConfig())
    ids, own = demonstration_tokens(language, task, turns)
    (segment,) = taught.chain.segments
    assert segment.tokens.tolist() == ids and segment.sampled.tolist() == own and taught.chain.finished


@pytest.mark.parametrize("join", ["self", "separate"])
@pytest.mark.parametrize("seed", range(4))
def test_a_scripted_chain_says_the_same_turns_and_solves_the_task(language, how, join, seed):
    taught, task, turns = lesson(language, replace(how, join=join), 2, seed)
    assert taught.chain.finished and taught.metrics["tests"] == 1 and len(taught.chain.segments) > 1
    said = [t for s in taught.chain.segments for t in s.tokens[s.sampled & ~s.summary].tolist()]
    assert said == [t for turn in turns for t in (*language.encode(turn), language.env)]
    # All that a segment needs to know stands in it: the body is written where the docstring and both helpers can be
    # seen.
    writing = next(s for s in taught.chain.segments if "write" in language.decode(s.tokens[s.sampled].tolist()))
    text = language.decode(writing.tokens.tolist()).partition("write")[0]
    assert task.files[task.target].doc in text and all(task.files[name].expr in text for name in task.helpers)


@pytest.mark.parametrize("seed", range(4))
def test_a_summary_of_a_multi_hop_task_says_where_to_read_on(language, how, seed):
    """What the target is, and the last file of the way: nothing before it is needed any more."""
    rng = random.Random(seed)
    task = generate(rng, "train", config=WorldConfig(multi_hop_share=1.0, hop_mix=(0, 0, 0, 0, 0, 1)))
    turns = demonstration(task, rng, NoiseConfig.clean())
    rollout = script_rollout(
        MicroRepo(Session(task)), language, Limits(how), Lesson(language, task, turns, rng, NEVER).say
    )
    assert rollout.chain.finished and rollout.metrics["tests"] == 1
    first, *later = summaries(language, rollout.chain)
    target = task.files[task.target]
    head, _, rest = first.partition(", m")
    assert later and head == f"def {task.target}({', '.join(target.args)}): {target.doc}"
    name, _, doc = f"m{rest}".partition(": ")
    assert name in task.helpers and doc == task.files[name].doc


def test_summaries_by_hand(language, how):
    rng = random.Random(5)
    task = generate(rng, "train", 2)
    first, second = task.helpers
    target = task.files[task.target]
    one = Lesson(language, task, [], rng, NEVER)
    say = conversation(one)
    head = f"def {task.target}({', '.join(target.args)}): {target.doc}"
    assert one.summary() == "nothing"
    for turn in (f"read {first}", f"read {task.target}"):
        say(turn)
    assert one.summary() == f"{head}, {first} is {task.files[first].expr}"
    say(f"write {task.target}\n    return 1")
    assert one.summary() == f"{head}, {first} is {task.files[first].expr}, ok"
    say("test")
    assert (
        one.summary().endswith(", failed") and second not in one.summary().partition(", ")[2].partition(target.doc)[2]
    )
    say(f"write {task.target}\n    {task.answer}")
    say("test")
    assert one.summary() == "passed"  # nothing else is needed any more
    assert one.known_files == []


def test_a_forgotten_file_is_read_again_and_a_wordy_summary_says_more(language):
    rng = random.Random(5)
    task = generate(rng, "train", 1)
    (helper,) = task.helpers
    one = Lesson(language, task, ["done"], rng, Memory(wordy=0, forgetful=1))
    say = conversation(one)
    for turn in (f"read {helper}", f"read {task.target}"):
        say(turn)
    text = one.summary()
    lost = ({helper, task.target} - set(one.known_files)).pop()
    assert one.turns == [f"read {lost}", "done"] and one.fact(lost, False) not in text
    other = next(iter(set(task.files) - {helper, task.target}), None)
    for longest, wordy in ((1000, True), (10, False)):  # one that is too long is cut down to what is needed
        one = Lesson(language, task, ["done"], rng, Memory(wordy=1, forgetful=0, longest=longest))
        say = conversation(one)
        for name in filter(None, (helper, task.target, other)):
            say(f"read {name}")
        text = one.summary()
        assert (f"{helper}: {task.files[helper].doc} is {task.files[helper].expr}" in text) == wordy
        assert other is None or (other in one.known_files) == wordy


def test_lessons_are_finished_and_within_the_limits(language, how, config):
    some = list(itertools.islice(chains.lessons(config, language, how, NoiseConfig(), Memory(longest=69)), 12))
    assert all(one.chain.finished for one in some) and max(len(one.chain.segments) for one in some) > 2
    for one in some:
        assert all(len(s.tokens) <= how.limit for s in one.chain.segments)
        assert len(one_row(one.chain).tokens) == sum(len(s.tokens) for s in one.chain.segments)


def test_a_lesson_whose_last_turn_a_limit_cuts_is_left_out(language, config):
    """Without summaries, some contexts are full within the turn that would have ended the episode."""
    few = chains.make_chaining(language, 80, 12, 40, 1)
    lessons = itertools.islice(chains.lessons(config, language, few, NoiseConfig(), Memory()), 200)
    last = [lesson.chain.segments[-1] for lesson in lessons]
    assert all(segment.finished for segment in last)
    assert max(len(segment.tokens) for segment in last) > few.limit - 3


def test_unlimited_has_the_recipes_long_context(how):
    assert chains.unlimited(how).limit == max(256, how.limit) and chains.unlimited(how).join == "none"


# -------------------------------------------------------------------------------------------------------------- RL


def model_of(language):
    torch.manual_seed(1)
    return Transformer(Config.tiny(language.tokenizer.get_vocab_size(), **TINY))


def test_a_step_on_chains_pays_chains_and_counts_every_token_once(language, how, config):
    """On policy every ratio is one, and the loss can be counted: −Σ over chains of advantage × tokens written /
    budget."""
    config = replace(config, rl=replace(config.rl, replay="none"))
    episodes = batch_of(language, how, config)
    model, reference = model_of(language), model_of(language)
    with torch.no_grad():
        reference.embed_tokens.weight.mul_(1.5)
        for segment in (s for e in episodes for s in e.chain.segments):
            logp = model(segment.tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, segment.tokens[1:, None])[:, 0]
            segment.logp[1:] = logp * segment.sampled[1:]
    assert len({len(e.chain.segments) for e in episodes}) > 1
    rewards = []
    for e in episodes:
        drift = 0.0
        for s in e.chain.segments:
            drift += compute_reference_kl(model, reference, s.tokens[None], s.sampled[None], s.logp[None])[0].item()
        rewards.append(sum(compute_reward_terms(e, config.rl.payment).values()) - config.rl.payment.kl * drift)
    pairs = torch.tensor(rewards, dtype=torch.float64).view(3, 2)
    advantages = (pairs - pairs.mean(1, keepdim=True)).flatten().tolist()
    written = [sum(int(s.sampled.sum()) for s in e.chain.segments) for e in episodes]
    expected = -sum(a * n for a, n in zip(advantages, written, strict=True)) / (6 * config.rl.budget_tokens)
    learner = Learner(config, model, None, 0.0, 0.0)
    learner.optimizers = [torch.optim.Adam(learner.trunk.masters.parameters(), lr=1e-3)]
    learner.rates = [[1e-3]]
    score_rollouts(config.rl, MicroTasks(config, language), episodes, 0)
    result = improve(config.rl, learner.model, reference, episodes)
    figures = metrics_of(config, Done(1, [e.task for e in episodes[::2]], episodes, result, learner.apply(result, 1.0)))
    assert abs(expected) > 1e-3 and figures["loss"] == pytest.approx(expected, rel=1e-3)
    assert figures["reward"] == pytest.approx(np.mean(rewards), rel=1e-5) and figures["grad_norm"] > 0
    assert figures["segments"] == sum(len(e.chain.segments) for e in episodes) / 6


def batch_of(language, how, config):
    """Groups of scripted chains, of unlike numbers of segments and unlike rewards."""
    depths = (0, 2, 1, 1, 0, 2)
    return [
        lesson(language, how, depth, seed, noise=NoiseConfig(stop_early=0.3))[0] for seed, depth in enumerate(depths)
    ]


@pytest.mark.parametrize("broken", [False, True])
def test_one_weight_tells_right_from_wrong(language, how, config, monkeypatch, broken):
    episodes = batch_of(language, how, config)
    assert len({len(e.chain.segments) for e in episodes}) > 1
    if broken:
        # Every segment gets its chain's advantage divided by the number of segments.
        def divided(values, some):
            return spread(values / torch.tensor([len(c.segments) for c in some]), some)

        monkeypatch.setattr(self_summary, "spread", divided)
    found = self_summary.one_weight(model_of(language), episodes, config)
    assert (found["split"] < 1e-9) != broken and found["faulty"] > 1e-2 and found["gradient"] > 0


# ------------------------------------------------------------------------------------------------------ statistics


def test_counts_of_a_scripted_chain(language, how, config):
    for join in ("self", "separate"):
        taught, _, _ = lesson(language, replace(how, join=join), 2)
        row = dict(zip(COUNTS, self_summary.counts(taught, config), strict=True))
        asked = len(summaries(language, taught.chain))
        assert row["success"] == row["finished"] == 1 and row["summaries"] == asked > 0 and row["segments"] == asked + 1
        assert row["prefill"] + row["written"] == len(one_row(taught.chain).tokens)
        assert (row["saved"] > 0) == (join == "self") and row["longest"] <= replace(how, join=join).limit


def test_ratio_by_hand():
    top, bottom = np.array([1.0, 2.0, 3.0, 2.0]), np.array([2.0, 4.0, 6.0, 4.0])
    assert self_summary.ratio(top, bottom, 100) == {"value": 0.5, "low": 0.5, "high": 0.5}
    assert self_summary.ratio(top, np.array([1.0, -1.0, 1.0, -1.0]), 100) is None


def invented(own_error, base_error, before_error=0.3, tokens=20.0):
    """Counts as if every rollout of a task went alike; success as a share, so that errors are exact."""
    lost = dict.fromkeys(ARMS, 0.0) | {
        ("chains", "self"): own_error,
        ("plain", "separate"): base_error,
        ("shown", "separate"): base_error + 0.1,
        ("shown", "self"): before_error,
    }
    found = {}
    for arm in ARMS:
        values = dict.fromkeys(COUNTS, 1.0) | {"success": 0.9 - lost[arm], "longest": 90, "prefill": 60, "saved": 40}
        values["summary_tokens"] = tokens if arm == ("chains", "self") else 20.0
        found[arm] = {"counts": np.tile([float(values[name]) for name in COUNTS], (6, 2, 1)), "depth": np.arange(6) % 3}
    return found


WEIGHT = {"split": 1e-15, "faulty": 0.5, "chains": 8, "most_segments": 3, "gradient": 1.0}


@pytest.mark.parametrize(
    "own, base, tokens, length",
    [
        (0.1, 0.2, 20, "not at this scale"),  # half the error, equal summaries
        (0.05, 0.2, 10, "reproduced"),  # a quarter, half the tokens
        (0.15, 0.2, 15, "partly"),
        (0.2, 0.2, 20, "not at this scale"),
        (0.1, 0.0, 30, "contradicted"),  # no error that could be halved, longer summaries
    ],
)
def test_verdicts_of_invented_results(own, base, tokens, length):
    """Of two agents one was trained under the limit: whatever their errors are, they test nothing."""
    claims = self_summary.verdicts(invented(own, base, tokens=tokens), WEIGHT, {"1": 1.0}, Experiment(resamples=20))
    by_name = {one["name"]: one for one in claims}
    assert by_name["half-error"]["verdict"] == "not tested" and by_name["shorter"]["verdict"] == length
    assert by_name["half-error"]["measured"] == (pytest.approx(own / base) if base else None)
    assert by_name["cache"]["measured"] == pytest.approx(0.4) and by_name["cache"]["verdict"] == "holds"
    assert by_name["rl-improves"]["measured"] == pytest.approx(0.3 - own)


def test_rl_that_only_makes_the_rest_better_is_partly():
    found = invented(0.1, 0.2)
    found["chains", "none"] = {**found["shown", "none"], "counts": found["shown", "none"]["counts"].copy()}
    found["chains", "none"]["counts"][..., 0] += 0.3  # without limit it gained even more than under it
    claims = {one["name"]: one for one in self_summary.verdicts(found, WEIGHT, {"1": 1.0}, Experiment(resamples=20))}
    assert claims["rl-improves"]["verdict"] == "partly"
    alone = self_summary.verdicts(found, WEIGHT | {"most_segments": 1}, {"1": 1.0}, Experiment(resamples=20))
    assert {one["name"]: one for one in alone}["one-weight"]["verdict"] == "not tested"


def test_rows_by_segments_take_one_mean_a_task():
    found = {"counts": np.zeros((2, 2, len(COUNTS))), "depth": np.array([0, 1])}
    found["counts"][..., COUNTS.index("segments")] = [[1, 1], [1, 2]]
    found["counts"][..., COUNTS.index("reward")] = [[1.0, 0.0], [0.0, 0.7]]
    rows = self_summary.rows_of(("shown", "self"), found, Experiment(resamples=20))
    one, two = (row for row in rows if row["part"] == "segments")
    assert (one["segments"], one["chains"], one["tasks"], one["reward"]) == (1, 3, 2, 0.25)
    assert (two["segments"], two["chains"], two["tasks"], two["reward"]) == (2, 1, 1, 0.7)


def test_a_quick_run(tmp_path, play_figure):
    record = play_figure("self-summary", tmp_path)
    assert {one["name"] for one in record["claims"]} == {"half-error", "shorter", "cache", "rl-improves", "one-weight"}
    laws = [
        one for one in record["claims"] if is_law(one["rule"]) and one["measured"] is not None
    ]  # a tiny batch may hold no long chain
    assert all(one["verdict"] in (LAW_VERDICTS if one in laws else VERDICTS) for one in record["claims"])
    assert {(row["policy"], row["join"]) for row in record["rows"]} == set(ARMS)
    rows = (tmp_path / "self-summary.csv").read_text().splitlines()
    assert len(rows) == len(record["rows"]) + 1 and (tmp_path / "self-summary.png").stat().st_size > 20_000
