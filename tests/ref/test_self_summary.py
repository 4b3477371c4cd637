"""Chains counted by hand, with a policy whose next token is known; the running context literally continued;
one advantage for every written token; splitting a chain changes nothing; the plain sampler below the trigger;
cuts; bad inputs."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lessons.talks import Ids, Talk
from ref.dr_grpo import group_advantages, policy_loss
from ref.engine.decoder import Decoder
from ref.engine.sampler import Sampler, Segment
from ref.network import Config, Transformer
from ref.rollout import Limits, decode_rollout
from ref.self_summary import Chain, ChainBuilder, Chaining, Demo, demo, spread
from tests.talks import chains_of, contexts_of

STOP, PROMPT = 0, [1, 2, 5]
TINY = Config.tiny(
    12,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=16,
    num_experts=0,
    intermediate_size=16,
    moe_intermediate_size=8,
)
BRIEF = replace(TINY, vocab_size=7)  # fewer tokens, shorter turns


def scripted(after):
    """A network whose only block adds nothing, and which says what follows the last token: 5 → "6 7 stop", a
    turn; 4 → "8 9 stop", a summary."""
    model = Transformer(replace(TINY, tie_word_embeddings=False))
    with torch.no_grad():
        model.layers[0].self_attn.o_proj.weight.zero_()
        model.layers[0].mlp.down_proj.weight.zero_()
        model.embed_tokens.weight.copy_(torch.eye(12, 16))
        next_token = [after.get(token, 11) for token in range(12)]
        model.lm_head.weight.copy_(torch.eye(12)[next_token].t() @ torch.eye(12, 16))
    return model


POLITE = scripted({5: 6, 6: 7, 7: STOP, 4: 8, 8: 9, 9: STOP})
HAND = Chaining(trigger=11, longest_summary=3, room=4, request=(4,), resume=(5,), instruction=(10, 10))


@dataclass
class Quiz:
    """Answers every turn with the same tokens, `turns` − 1 times; remembers the turns it heard."""

    turns: int
    answer: tuple = (3, 5)
    prompt: tuple | list = (1, 2, 5)
    stop: int = STOP

    def __post_init__(self):
        self.prompt, self.heard = list(self.prompt), []

    def reply(self, turn):
        self.heard.append(turn)
        return list(self.answer) if len(self.heard) < self.turns else None

    def fork(self):
        twin = replace(self)
        twin.heard = list(self.heard)
        return twin


def play(how=HAND, turns=3, model=POLITE, **quiz):
    (chain,) = chains_of(Sampler(model, torch.float32), [Quiz(turns, **quiz)], how, temperature=0.0)
    return chain


def random_chains(seed, turns=(5,), network=BRIEF, **changes):
    """Chains of a random network, its conversations, and the settings."""
    how = Chaining(20, 14, 12, request=(4, 4), resume=(5,), instruction=(6,) * 3, max_segments=3)
    how = replace(how, **changes)
    torch.manual_seed(seed)
    quizzes = [Quiz(n) for n in turns]
    sampler = Sampler(Transformer(network), torch.float32)
    return chains_of(sampler, quizzes, how, generator=torch.Generator().manual_seed(seed)), quizzes, how


def rows(chains):
    return [s for c in chains for s in c.segments]


# ------------------------------------------------------------------------------------------ chains by hand


SECOND = [*PROMPT, 8, 9, STOP, 5, 6, 7, STOP]


def test_self_by_hand():
    """Two exchanges make a context of 3 + 5 + 5 = 13 ≥ 11 tokens; the third turn comes after the summary."""
    chain = play()
    first, second = chain.segments
    assert first.tokens.tolist() == [*PROMPT, 6, 7, STOP, 3, 5, 6, 7, STOP, 3, 5, 4, 8, 9, STOP]
    assert second.tokens.tolist() == SECOND
    assert first.sampled.nonzero()[:, 0].tolist() == [3, 4, 5, 8, 9, 10, 14, 15, 16]
    assert first.summary.nonzero()[:, 0].tolist() == [14, 15, 16]
    assert second.sampled.nonzero()[:, 0].tolist() == [7, 8, 9] and not second.summary.any()
    assert chain.finished and first.finished and second.finished
    assert chain.num_sampled_tokens == 12 and chain.summary_tokens == 3
    # Prompt 3, answers 2 + 2, request 1; then prompt 3, summary 3, resume 1.
    assert chain.prefill == 8 + 7
    # A separate call: its own 2, and the context of 11 that the running cache already holds.
    assert chain.saved == 2 + 11


@pytest.mark.parametrize("trigger, segments", [(9, 2), (13, 2), (14, 1)])
def test_the_trigger_is_reached_with_the_answer_and_at_equality(trigger, segments):
    """Contexts after an answer have 8 and 13 tokens; the third turn ends the conversation."""
    chain = play(replace(HAND, trigger=trigger))
    assert len(chain.segments) == segments and chain.finished


def test_separate_by_hand():
    chain, own = play(replace(HAND, join="separate")), play()
    work, compaction, second = chain.segments
    assert work.tokens.tolist() == [*PROMPT, 6, 7, STOP, 3, 5, 6, 7, STOP]
    assert compaction.tokens.tolist() == [10, 10, *work.tokens.tolist(), 3, 5, 4, 8, 9, STOP]
    assert compaction.sampled.tolist() == compaction.summary.tolist() == [False] * 16 + [True] * 3
    assert second.tokens.tolist() == SECOND and chain.finished
    assert (chain.num_sampled_tokens, chain.summary_tokens, chain.saved) == (
        own.num_sampled_tokens,
        own.summary_tokens,
        0,
    )
    assert chain.prefill == own.prefill + own.saved == (3 + 2) + (2 + 11 + 2 + 1) + 7


def test_truncate_by_hand():
    """An exchange has 5 tokens: one stays where a summary may have 3 to 9, two where it may have 10."""
    for longest, kept in ((3, 1), (9, 1), (10, 2)):
        chain = play(replace(HAND, join="truncate", trigger=18, longest_summary=longest), turns=4)
        first, second = chain.segments
        assert first.tokens.tolist() == [*PROMPT, *[6, 7, STOP, 3, 5] * 2, 6, 7, STOP]
        assert second.tokens.tolist() == [*PROMPT, *[6, 7, STOP, 3, 5] * kept, 6, 7, STOP]
        assert second.sampled.sum() == 3 and chain.finished and not chain.summary_tokens and not chain.saved


def test_none_is_cut_at_the_same_limit():
    chain = play(replace(HAND, join="none"), turns=99)
    assert len(chain.segments) == 1 and len(chain.segments[0].tokens) == HAND.limit == 11 + 4 + 1 + 3
    assert not chain.finished and not chain.segments[0].finished


def test_the_last_segment_is_not_asked():
    chain = play(replace(HAND, max_segments=3), turns=99)
    assert [bool(s.summary.any()) for s in chain.segments] == [True, True, False]
    assert [s.finished for s in chain.segments] == [True, True, False] and not chain.finished
    assert len(chain.segments[-1].tokens) == HAND.limit
    separate = play(replace(HAND, max_segments=3, join="separate"), turns=99)  # its compactions do not count
    assert [bool(s.summary.any()) for s in separate.segments] == [False, True, False, True, False]


def test_a_conversation_that_ends_at_the_trigger_is_not_asked():
    chain = play(turns=2)
    assert len(chain.segments) == 1 and chain.finished and len(chain.segments[0].tokens) == 11


@pytest.mark.parametrize("longest, segments", [(2, 1), (3, 2)])
def test_a_summary_too_long_ends_the_chain_and_stays_written(longest, segments):
    chain = play(replace(HAND, longest_summary=longest))
    assert len(chain.segments) == segments and chain.finished == (segments == 2)
    assert chain.summary_tokens == 3 and chain.segments[0].sampled[-3:].all()


def test_a_summary_that_does_not_stop_is_cut_at_the_limit():
    chain = play(model=scripted({5: 6, 6: 7, 7: STOP, 4: 8, 8: 8}))
    (segment,) = chain.segments
    assert not chain.finished and not segment.finished
    assert len(segment.tokens) == HAND.limit and chain.summary_tokens == HAND.limit - 14


def test_an_answer_beyond_the_limit_cuts_the_chain_before_any_summary():
    chain = play(answer=(3,) * 30)
    (segment,) = chain.segments
    assert not chain.finished and not segment.finished and len(segment.tokens) == HAND.limit
    assert chain.num_sampled_tokens == 3 and chain.summary_tokens == chain.saved == 0


# ------------------------------------------------------------------------- what holds for any random policy


JOINS = st.sampled_from(["self", "separate", "truncate", "none"])


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), JOINS, st.lists(st.integers(1, 7), min_size=1, max_size=4), st.integers(1, 4))
def test_no_turn_is_lost_or_trained_twice_and_no_context_passes_the_limit(seed, join, turns, most):
    chains, quizzes, how = random_chains(seed, turns, join=join, max_segments=most)
    for chain, quiz in zip(chains, quizzes, strict=True):
        spoken = [t for s in chain.segments for t in s.tokens[s.sampled & ~s.summary].tolist()]
        heard = [token for turn in quiz.heard for token in (*turn, STOP)]
        assert spoken[: len(heard)] == heard  # the rest is a turn that a limit cut
        assert chain.finished == (len(quiz.heard) == quiz.turns)
        if chain.finished:
            assert spoken == heard
        assert sum(not s.summary.any() or join == "self" for s in chain.segments) <= most
        assert chain.prefill + chain.num_sampled_tokens == sum(len(s.tokens) for s in chain.segments)
        for s in chain.segments:
            assert len(s.tokens) <= how.limit
            assert not (s.summary & ~s.sampled).any() and bool((s.logp[~s.sampled] == 0).all())


@settings(max_examples=6, deadline=None)
@example(1347)  # a turn so long that the request fits and no summary behind it
@given(st.integers(0, 10**6))
def test_a_segment_continues_its_running_context_and_the_next_opens_with_prompt_and_summary(seed):
    """The plain sampler with the same draws writes the same tokens up to the end of the last turn before the
    request."""
    (chain,), _, how = random_chains(seed)
    torch.manual_seed(seed)
    sampler = Sampler(Transformer(BRIEF), torch.float32)
    (plain,) = contexts_of(sampler, [Quiz(5)], 60, generator=torch.Generator().manual_seed(seed))
    first = chain.segments[0]
    asked = int((first.sampled & ~first.summary).nonzero()[-1]) + 1
    assert torch.equal(first.tokens[:asked], plain.tokens[:asked])
    assert torch.equal(first.sampled[:asked], plain.sampled[:asked])
    torch.testing.assert_close(first.logp[:asked], plain.logp[:asked], rtol=0, atol=1e-5)
    for s, following in zip(chain.segments, chain.segments[1:], strict=False):
        begin = int(s.summary.nonzero()[0])
        assert s.tokens[begin - 2 : begin].tolist() == list(how.request)
        assert begin - 2 >= how.trigger
        opening = [*PROMPT, *s.tokens[begin:].tolist(), *how.resume]
        assert following.tokens[: len(opening)].tolist() == opening
        assert not following.sampled[: len(opening)].any() and following.sampled[len(opening)]


@pytest.mark.parametrize("join", ["self", "separate", "truncate", "none"])
def test_below_the_trigger_a_chain_is_the_samplers_rollout(join):
    turns, network = [1, 2, 3, 2], replace(BRIEF, num_experts=4)
    chains, _, how = random_chains(3, turns, network, trigger=200, join=join)
    torch.manual_seed(3)
    sampler = Sampler(Transformer(network), torch.float32)
    plain = contexts_of(sampler, [Quiz(n) for n in turns], how.limit, generator=torch.Generator().manual_seed(3))
    for chain, rollout in zip(chains, plain, strict=True):
        (segment,) = chain.segments
        for name, value in vars(rollout).items():
            same = torch.equal if isinstance(value, torch.Tensor) else bool.__eq__
            assert same(getattr(segment, name), value), name
        assert chain.finished == rollout.finished and not segment.summary.any()


# ---------------------------------------------------------------------------------------- one weight a chain


def chain_of(lengths):
    """A finished chain of segments: two given tokens, then so many written ones."""

    def segment(n):
        written = torch.arange(n + 2) >= 2
        nothing = torch.zeros(n + 1, 0, 2, dtype=torch.int16)
        zeros = torch.zeros(n + 2)
        return Segment(zeros.long(), written, zeros, zeros.long(), nothing, True, torch.zeros_like(written))

    return Chain([segment(n) for n in lengths], True)


def padded(segments, values=lambda s: s.sampled):
    return torch.nn.utils.rnn.pad_sequence([values(s) for s in segments], batch_first=True)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4), st.integers(0, 99))
def test_splitting_a_chain_changes_neither_loss_nor_gradient(chains, seed):
    """The same tokens with the same log-probs, in chains of one segment and in chains of several."""
    generator = torch.Generator().manual_seed(seed)
    advantages = torch.randint(-8, 9, (len(chains),), generator=generator).double() / 8
    drift = [torch.rand(sum(lengths), generator=generator).double() - 0.5 for lengths in chains]

    def step(split):
        cut = [chain_of(lengths if split else [sum(lengths)]) for lengths in chains]
        mask = padded(rows(cut))
        logp = torch.zeros(mask.shape, dtype=torch.float64)
        logp[mask] = torch.cat(drift)
        logp.requires_grad_()
        loss = policy_loss(logp, torch.zeros_like(logp), spread(advantages, cut), mask, budget=64)
        loss.backward()
        assert not logp.grad[~mask].any()
        return loss.detach(), logp.grad[mask]

    (whole, whole_grad), (parts, parts_grad) = step(False), step(True)
    assert torch.equal(whole_grad, parts_grad)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-14)  # the order of the sum differs


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["self", "separate", "truncate"]))
def test_every_written_token_carries_its_chains_advantage_and_given_ones_nothing(seed, join):
    chains, _, _ = random_chains(seed, (2, 5, 7), join=join)
    advantages = torch.tensor([0.5, -1.0, 2.0])
    segments = rows(chains)
    mask, behavior = padded(segments), padded(segments, lambda s: s.logp.clone())
    logp = behavior.clone().requires_grad_()
    policy_loss(logp, behavior, spread(advantages, chains), mask, budget=8).backward()
    row = 0
    for chain, advantage in zip(chains, advantages.tolist(), strict=True):
        for s in chain.segments:
            grad = logp.grad[row, : len(s.tokens)]
            assert bool((grad[s.sampled] == -advantage / 8).all()) and not grad[~s.sampled].any()
            assert bool((grad[s.summary] == -advantage / 8).all())
            row += 1
        # Its pull is its advantage times what it wrote, however often it ran out of context.
        pull = logp.grad[row - len(chain.segments) : row].sum().item()
        assert pull == pytest.approx(-advantage * chain.num_sampled_tokens / 8)


def test_the_baseline_is_over_chains():
    """Two chains, one in three segments: over chains ±0.5; over rows the long one draws the mean."""
    chains = [chain_of([2, 2, 2]), chain_of([6])]
    rewards = torch.tensor([[1.0, 0.0]])
    assert spread(group_advantages(rewards).flatten(), chains).tolist() == [0.5, 0.5, 0.5, -0.5]
    over_rows = group_advantages(spread(rewards.flatten(), chains)[None]).flatten()
    assert over_rows.tolist() == [0.25, 0.25, 0.25, -0.75]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
@settings(max_examples=30, deadline=None)
def test_spread_repeats_each_advantage_for_its_segments(counts):
    chains = [chain_of([1] * n) for n in counts]
    given_ = torch.arange(len(counts)).double()
    assert spread(given_, chains).tolist() == [c for c, n in enumerate(counts) for _ in range(n)]


# ------------------------------------------------------------------------------------------------ bad inputs


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"trigger": 0}, "trigger must be a whole number of at least 1"),
        ({"longest_summary": 0}, "longest_summary must be a whole number of at least 1"),
        ({"room": -1}, "room must be a whole number of at least 0"),
        ({"max_segments": 0}, "max_segments must be a whole number of at least 1"),
        ({"request": ()}, "request must not be empty"),
        ({"join": "separate", "request": ()}, "request must not be empty"),
    ],
)
def test_bad_settings(changes, says):
    with pytest.raises(ValueError, match=says):
        replace(HAND, **changes)


def test_an_unknown_join_is_named_without_the_type_checker_too():
    with pytest.raises(ValueError, match="join must be self, separate, truncate or none; got 'both'"):
        Chaining.__post_init__(SimpleNamespace(**vars(HAND) | {"join": "both"}))


def test_the_trigger_must_leave_a_turn_behind_prompt_summary_and_resume():
    sampler = Sampler(POLITE, torch.float32)
    with pytest.raises(ValueError, match="trigger must exceed .* 7 tokens"):
        chains_of(sampler, [Quiz(2)], replace(HAND, trigger=7))
    for fits in (replace(HAND, trigger=8), replace(HAND, trigger=7, join="none")):
        assert chains_of(sampler, [Quiz(2)], fits, temperature=0.0)


def test_no_conversations_and_advantages_that_do_not_fit():
    with pytest.raises(ValueError, match="there must be at least one environment"):
        chains_of(Sampler(POLITE, torch.float32), [], HAND)
    with pytest.raises(ValueError, match="chains must hold"):
        spread(torch.zeros(0), [])
    with pytest.raises(ValueError, match=r"advantages must be a float tensor of shape \[1\].* \[2\]"):
        spread(torch.zeros(2), [chain_of([1])])
    with pytest.raises(ValueError, match="chain 1 has none"):
        spread(torch.zeros(2), [chain_of([1]), Chain()])


@pytest.mark.parametrize("join", ["self", "separate", "truncate", "none"])
def test_at_batch_one_a_chain_has_the_samplers_contexts(join):
    """Greedy, with turns handed over ahead of their proof and taken back where they fall, and without."""
    segments, retracted = [], 0
    for seed in range(12):
        torch.manual_seed(seed)
        model = Transformer(BRIEF)
        for p in model.parameters():
            p.data.normal_(0, 0.7)  # a greedy network that does not repeat itself for long
        how = Chaining(20, 14, 12, (4, 4), (5,), (6,) * 3, max_segments=3, join=join)
        quizzes = [Quiz(turns, answer=(seed % 5 + 1, 5)) for turns in (1, 4, 9)]
        chains = chains_of(Sampler(model, torch.float32), quizzes, how, temperature=0.0)
        decoders = {ahead: Decoder(model, max_len=how.limit, recall=4) for ahead in (False, True)}
        for ahead, decoder in decoders.items():
            for quiz, chain in zip(quizzes, chains, strict=True):
                contexts, played = [], Quiz(quiz.turns, quiz.answer)
                for after in decode_rollout(
                    decoder, Talk(played), Ids((STOP,)), Limits(how), ahead
                ):  # a fork where the decoder ran ahead
                    contexts.append(list(decoder.tokens))
                    retracted += decoder.total.retracted
                assert contexts == [s.tokens.tolist() for s in chain.segments]
                assert after.inner.heard == quiz.heard
        segments += [len(chain.segments) for chain in chains]
    assert retracted > 0 and (max(segments) > 1) == (join != "none")


def test_at_batch_one_the_decoders_room_is_the_chains():
    with pytest.raises(ValueError, match="max_len"):
        next(
            decode_rollout(
                Decoder(Transformer(BRIEF), max_len=HAND.limit + 1), Talk(Quiz(1)), Ids((STOP,)), Limits(HAND)
            )
        )


def test_demo_counts():
    figures = demo(Demo(chains=12, turns=4, trigger=26, longest_summary=20))
    assert figures["self_segments"] > 1 and figures["none_segments"] == 1
    assert figures["self_saved"] > 0 == figures["separate_saved"]
    # Chains have unlike numbers of rows; over chains the mean is zero.
    assert figures["advantage_over_rows"] != 0


class Counting(Quiz):
    """Answers every turn with its number."""

    def reply(self, turn):
        return super().reply(turn) and [len(self.heard), 5]


def test_what_truncation_keeps_stands_in_the_order_in_which_it_was_said():
    """Three exchanges of five tokens reach the trigger; ten tokens hold the last two of them."""
    how = replace(HAND, join="truncate", longest_summary=10, trigger=17)
    (chain,) = chains_of(Sampler(POLITE, torch.float32), [Counting(4)], how, temperature=0.0)
    first, second = (s.tokens.tolist() for s in chain.segments)
    assert first == [*PROMPT, 6, 7, STOP, 1, 5, 6, 7, STOP, 2, 5, 6, 7, STOP]
    assert second == [*PROMPT, 6, 7, STOP, 2, 5, 6, 7, STOP, 3, 5, 6, 7, STOP] and chain.finished


@pytest.mark.parametrize(("sizes", "kept"), [((9, 2, 3), 2), ((2, 3, 9), 1), ((3, 4, 4), 2), ((1, 1, 9), 1)])
def test_truncation_keeps_the_newest_exchanges_that_fit(sizes, kept):
    """`longest_summary` is 8: what counts is the size of the newest exchanges, not that of the oldest."""
    builder = ChainBuilder(PROMPT, replace(HAND, join="truncate", trigger=len(PROMPT) + sum(sizes), longest_summary=8))
    answers = [builder.answer([6] * size, []) for size in sizes]
    assert answers == [[], [], None] and builder.go_on([])
    assert builder.prompt == [*PROMPT, *[6] * sum(sizes[-kept:])] and builder.dropped == 3 - kept


def test_a_fork_lives_by_itself():
    """What is said to one after the fork, the other has not heard, and does not carry on into its next context."""
    one = ChainBuilder(PROMPT, replace(HAND, join="truncate", trigger=13))
    one.answer([6, 7, STOP], [1, 5])
    other = one.fork()
    assert one.answer([8, STOP], [2, 5]) == [2, 5] and other.answer([9, 9, STOP], [2, 5]) is None, "the trigger"
    kept = [[exchange for exchange, _ in builder.exchanges] for builder in (one, other)]
    assert kept == [[[6, 7, STOP, 1, 5], [8, STOP, 2, 5]], [[6, 7, STOP, 1, 5], [9, 9, STOP, 2, 5]]]
    assert (one.length, other.length) == (12, 13)
