"""The agent's side of the world: contexts, payment, batches of rollouts, and the RL step's meaning."""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kit import process
from kit.statistics import pass_at_k
from recipe.microrepo import MicroRepo, NoiseConfig, Session, demonstration, documents, generate
from recipe.small.agent import Language, one_row, parted, play, single
from recipe.small.fp8_rounding import fp8_rows
from recipe.small.settings import RewardCoefficients
from ref import cpt, kl
from ref.engine.sampler import Sampler, Segment
from ref.length_penalty import Effort, EffortWeights, effort, length_penalty
from ref.messages import Message
from ref.network import Config, Transformer
from ref.rl import compute_own_logp, compute_reference_kl, compute_reward_terms, pad
from ref.rollout import MIN_BATCH, Limits, Rollout, script_rollout
from ref.self_summary import Chain

TINY = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    num_experts=4,
    moe_intermediate_size=32,
)


@pytest.fixture(scope="module")
def language():
    return Language(cpt.train_tokenizer(itertools.islice(documents(random.Random(0)), 300), 400))


def replay(language, task, ids, own):
    """Feed a demonstration's own tokens through an environment as the sampler would; the context must be the same
    tokens. Also how many of them open it."""
    environment = MicroRepo(Session(task))
    opening = language.encode_opening(environment.reset())
    context, turn = list(opening), []
    for token, mine in zip(ids[len(context) :], own[len(context) :], strict=True):
        if not mine:
            continue
        context.append(token)
        if token not in language.stop_ids:
            turn.append(token)
            continue
        result, turn = environment.step(language.decode_turn(turn)), []
        if result.done:
            break
        context += language.encode_answer((), result.messages)
    return environment, context, len(opening)


@pytest.mark.parametrize("seed", range(12))
def test_demonstrations_and_rollouts_are_the_same_tokens(language, demonstration_tokens, seed):
    rng = random.Random(seed)
    task = generate(rng, "train")
    ids, own = demonstration_tokens(language, task, demonstration(task, rng, NoiseConfig()))
    _, context, opening = replay(language, task, ids, own)
    assert context == ids and len(own) == len(ids)
    assert not any(own[:opening]) and own[opening]
    assert ids[-1] == language.env and own[-1]


def test_clean_demonstrations_are_paid_in_full(language, demonstration_tokens):
    rng = random.Random(3)
    task = generate(rng, "heldout", depth=1)
    ids, own = demonstration_tokens(language, task, demonstration(task, rng, NoiseConfig.clean()))
    environment, _, opening = replay(language, task, ids, own)
    own, earned = torch.tensor(own), environment.reward()
    segment = Segment(
        torch.tensor(ids), own, own * -1.0, own.long(), torch.zeros(len(ids) - 1, 0, 0, dtype=torch.int16), True
    )
    payment = RewardCoefficients(effort_price=0.001, k=0.02, q=0.5, invalid_call=0.1)
    paid = compute_reward_terms(
        Rollout(Chain([segment], True), dict(earned.terms), dict(earned.metrics), opening=opening), payment
    )
    counts = Effort(
        tool_call_tokens=int(own.sum()), tool_output_tokens=len(ids) - opening - int(own.sum()), tool_calls=5, turns=5
    )  # read, read, write, test, done
    assert paid["tests"] == 1 and paid["invalid"] == 0
    assert paid["effort"] == -0.001 * length_penalty(effort(counts, payment.weights), 0.02, 0.5)
    assert sum(paid.values()) == pytest.approx(1 + paid["effort"])


def test_invalid_calls_cost(language):
    task = generate(random.Random(1), "train")
    turns = iter(("raed m1", "done"))
    found = script_rollout(
        MicroRepo(Session(task)), language, Limits(single(200)), lambda *_: language.encode(next(turns))
    )
    paid = compute_reward_terms(found, RewardCoefficients(effort_price=0.0, invalid_call=0.25, weights=EffortWeights()))
    assert paid["tests"] == 0 and sum(paid.values()) == -0.25


@given(
    spoken=st.lists(
        st.tuples(st.lists(st.integers(1, 3), max_size=3), st.lists(st.integers(0, 3), max_size=3)), max_size=5
    ),
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    cut=st.lists(st.integers(1, 3), max_size=3),
)
def test_a_rollout_is_parted_as_it_was_put_together(spoken, prompt, cut):
    """Turns, empty ones among them, end with 0, and a cut one does not; answers may be empty, and may hold a 0 too."""
    pieces = [(prompt, False)]
    for turn, answer in spoken:
        pieces += [([*turn, 0], True), (answer, False)]
    pieces = [piece for piece in [*pieces, (cut, True)] if piece[0]]
    tokens = torch.tensor([token for piece, _ in pieces for token in piece])
    own = torch.tensor([mine for piece, mine in pieces for _ in piece])
    rollout = Segment(
        tokens,
        own,
        torch.zeros(len(own)),
        torch.where(own, 0, -1),
        torch.zeros(len(own) - 1, 0, 1, dtype=torch.int16),
        not cut,
    )
    assert [(tokens[where].tolist(), mine) for where, mine in parted(rollout, 0)] == pieces


@pytest.mark.parametrize("after", range(5))
@pytest.mark.parametrize("first", ["fork", "original"])
def test_a_fork_and_its_original_go_their_own_ways(language, after, first):
    """Forked after any number of turns, played on differently, in either order: each answers and is judged
    like a fresh session that was fed its turns alone."""
    task = generate(random.Random(3), "heldout", depth=1)
    turns = demonstration(task, random.Random(0), NoiseConfig.clean())
    assert len(turns) == 5  # read, read, write, test, done
    wrong = f"write {task.target}\n    return 7"
    ways = {"original": turns[after:], "fork": ["raed", wrong, "test", "test", "done"]}

    def say(environment, turn):
        return environment.step(language.decode_turn(language.encode(turn)))

    environment = MicroRepo(Session(task))
    for turn in turns[:after]:
        say(environment, turn)
    before = environment.reward()
    episodes = {"original": environment, "fork": environment.fork()}
    second = "fork" if first == "original" else "original"
    heard = {first: [say(episodes[first], turn) for turn in ways[first]]}
    assert episodes[second].reward() == before and episodes[second].session.turns == after
    heard[second] = [say(episodes[second], turn) for turn in ways[second]]
    for name, played in episodes.items():
        alone = MicroRepo(Session(task))
        for turn in turns[:after]:
            say(alone, turn)
        assert heard[name] == [say(alone, turn) for turn in ways[name]]
        assert played.reward() == alone.reward() and played.session.done and heard[name][-1].done
    assert episodes["original"].reward().terms["tests"] == 1 and episodes["fork"].reward().terms["tests"] == 0
    assert environment.session.task is episodes["fork"].session.task


def played(model, language, tasks, samples=4, how=None, temperature=1.0):
    generator = torch.Generator().manual_seed(5)
    return play(
        Sampler(model, torch.float32), language, tasks, samples, Limits(how or single(48)), 3, generator, temperature
    )


def same(some, others):
    for a, b in zip(some, others, strict=True):
        one, other = one_row(a.chain), one_row(b.chain)
        if not (
            torch.equal(one.tokens, other.tokens)
            and torch.equal(one.logp, other.logp)
            and (a.terms, a.metrics) == (b.terms, b.metrics)
        ):
            return False
    return True


def test_play_keeps_groups_together_and_repeats(language):
    model = Transformer(Config.tiny(language.tokenizer.get_vocab_size(), **TINY))
    tasks = [generate(random.Random(i), "train") for i in range(3)]
    first, second = played(model, language, tasks), played(model, language, tasks)
    assert [e.task for e in first] == [task for task in tasks for _ in range(4)]
    assert same(first, second)
    for e in first:
        prompt = language.encode_opening([Message("user", e.task.prompt)])
        assert one_row(e.chain).tokens[: e.opening].tolist() == prompt and len(one_row(e.chain).tokens) <= 48


def test_rollouts_are_the_same_on_one_core_and_on_two(language, monkeypatch):
    """To the last bit, chains of several contexts and the environments that they left among them."""
    model = Transformer(Config.tiny(language.tokenizer.get_vocab_size(), **TINY))
    tasks = [generate(random.Random(i), "train") for i in range(18)]
    monkeypatch.setattr(process, "cores", lambda: 2)
    several = played(model, language, tasks)
    monkeypatch.setattr(process, "cores", lambda: 1)
    alone = played(model, language, tasks)
    assert len(several) == 72 > MIN_BATCH and same(several, alone)
    assert all(
        e.task == e.environment.session.task == task
        for e, task in zip(several, sum(([t] * 4 for t in tasks), []), strict=True)
    )


def test_a_rollout_is_decided_by_its_task_and_its_number_alone(language):
    """Whoever is played beside it: other tasks, another order, more rollouts of the same task, asked for at once or one
    by one."""
    model = Transformer(Config.tiny(language.tokenizer.get_vocab_size(), **TINY))
    a, b, c = (generate(random.Random(i), "train") for i in range(3))

    def texts(episodes):
        return [one_row(e.chain).tokens.tolist() for e in episodes]

    whole = texts(played(model, language, [a, b, c]))
    assert texts(played(model, language, [c, a], 2)) == [*whole[8:10], *whole[:2]]
    assert texts(played(model, language, [b, b, b], 1)) == whole[4:7]
    assert len({tuple(t) for t in whole}) > 6


def test_padding_and_reference_kl_by_hand(language):
    model = Transformer(Config.tiny(language.tokenizer.get_vocab_size(), **TINY))
    reference = Transformer(Config.tiny(language.tokenizer.get_vocab_size(), **TINY))
    tasks = [generate(random.Random(i), "train") for i in range(2)]
    episodes = play(
        Sampler(model, torch.float32), language, tasks, 2, Limits(single(40)), 3, torch.Generator().manual_seed(0)
    )
    ids, mask, behavior = pad([one_row(e.chain) for e in episodes], multiple=16)
    assert ids.shape[1] % 16 == 0 and mask.sum() == sum(e.chain.num_sampled_tokens for e in episodes)
    behavior += torch.rand(behavior.shape) * mask  # a sampler that computes otherwise
    drift, engine = compute_reference_kl(model, reference, ids, mask, behavior)
    for row, episode in enumerate(episodes):
        r, here = one_row(episode.chain), mask[row, 1:]
        with torch.no_grad():
            now, before = (
                network(ids[row, None]).logits[0, :-1].log_softmax(-1).gather(1, ids[row, 1:, None])[:, 0]
                for network in (model, reference)
            )
        assert int(here.sum()) == int(r.sampled.sum())
        torch.testing.assert_close(drift[row], kl.token_kl(now, before, "k1")[here].sum(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(engine[row], (behavior[row, 1:] - now)[here].sum(), rtol=1e-4, atol=1e-4)


@given(seed=st.integers(0, 2**31), share=st.sampled_from([0.0, 0.3, 1.0]), temperature=st.sampled_from([0.5, 1.0, 1.7]))
@settings(max_examples=10, deadline=None)
def test_own_log_probs_are_those_of_the_whole_text_where_the_agent_spoke(seed, share, temperature):
    generator = torch.Generator().manual_seed(seed)
    model = Transformer(Config.tiny(50, **TINY)).double()
    ids, mask = torch.randint(0, 50, (3, 7), generator=generator), torch.rand(3, 7, generator=generator) < share
    hidden = torch.randn(3, 7, model.config.hidden_size, dtype=torch.float64, generator=generator).requires_grad_()
    every = (model.head(hidden[:, :-1]) / temperature).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    expected, own = torch.where(mask[:, 1:], every, 0.0), compute_own_logp(model, hidden, ids, mask, temperature)
    torch.testing.assert_close(own, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), hidden)[0] for x in (own, expected)))


def test_a_policy_has_not_drifted_from_itself_at_any_temperature(language):
    """What sampled is what learns: no drift, and engines that agree at the temperature that was sampled at. A sampler
    with 8-bit weights computes otherwise, and that is no drift either."""
    model = Transformer(Config.tiny(language.tokenizer.get_vocab_size(), **TINY))
    tasks = [generate(random.Random(i), "train") for i in range(2)]
    for temperature in (0.6, 1.0, 1.5):
        generator = torch.Generator().manual_seed(0)
        episodes = play(
            Sampler(model, torch.float32), language, tasks, 2, Limits(single(40)), 3, generator, temperature
        )
        ids, mask, behavior = pad([one_row(e.chain) for e in episodes])
        drift, engine = compute_reference_kl(model, model, ids, mask, behavior, temperature)
        other = compute_reference_kl(model, model, ids, mask, behavior, 1.3)[1]
        assert not drift.any() and engine.abs().max() < 1e-3 < other.abs().max()
        coarse = Sampler(model, torch.float32, rounding=fp8_rows)
        episodes = play(coarse, language, tasks, 2, Limits(single(40)), 3, generator, temperature)
        drift, engine = compute_reference_kl(model, model, *pad([one_row(e.chain) for e in episodes]), temperature)
        assert not drift.any() and engine.abs().max() > 1e-3


def test_pass_at_k_is_the_mean_over_all_subsets():
    for n, c in ((8, 3), (5, 0), (5, 5), (6, 1)):
        outcomes = [1] * c + [0] * (n - c)
        for k in range(1, n + 1):
            subsets = [max(s) for s in itertools.combinations(outcomes, k)]
            assert pass_at_k([c], n, k)[0] == pytest.approx(sum(subsets) / len(subsets), abs=1e-12)
    with pytest.raises(ValueError):
        pass_at_k([1], 8, 9)
