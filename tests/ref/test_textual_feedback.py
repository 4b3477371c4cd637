"""Where tokens go when a hint is put in, by hand and for a real network; divergences and their gradients by hand, in
closed form and by enumeration; what the teacher must not feel; sums over micro-batches; hints that leak."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from ref.engine.sampler import Segment
from ref.network import Transformer
from ref.textual_feedback import Demo, Hint, demo, divergence, feedback_loss, hinted, leaked, predictions
from tests.networks import configs, same, scramble

# Where a strategy makes a Hint, the check of types looks at a random item of a tuple.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
INF, NAN = math.inf, math.nan
KINDS = ("forward", "reverse", "js")
kinds = pytest.mark.parametrize("kind", KINDS)


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def rollout(tokens, own, **more):
    """A segment in which the policy wrote the tokens whose places have a 1 in `own`."""
    T = len(tokens)
    sampled = torch.tensor([mark == "1" for mark in own], dtype=torch.bool)
    kind = Segment if more else Segment
    empty = torch.zeros(max(T - 1, 0), 0, 2, dtype=torch.long)
    return kind(
        torch.tensor(tokens, dtype=torch.long), sampled, torch.zeros(T), torch.full((T,), -1), empty, True, **more
    )


#                 0  1   2   3   4  5   6   7
TEXT = rollout([1, 2, 30, 31, 3, 4, 50, 51], "00110011")


BY_HAND = {
    "in front of the message": ([Hint(2, (8, 9), 2, 4)], [1, 2, 8, 9, 30, 31], [2, 3], [4, 5]),
    "at the start of all": ([Hint(0, (8, 9), 2, 4)], [8, 9, 1, 2, 30, 31], [2, 3], [4, 5]),
    "at the end of the prompt, for the second message": (
        [Hint(6, (8,), 6, 8)],
        [1, 2, 30, 31, 3, 4, 8, 50, 51],
        [6, 7],
        [7, 8],
    ),
    "before an answer": ([Hint(4, (8,), 6, 8)], [1, 2, 30, 31, 8, 3, 4, 50, 51], [6, 7], [7, 8]),
    "between two given tokens": ([Hint(5, (8,), 6, 8)], [1, 2, 30, 31, 3, 8, 4, 50, 51], [6, 7], [7, 8]),
    "part of a message": ([Hint(2, (8,), 3, 4)], [1, 2, 8, 30, 31], [3], [4]),
    "two of them": (
        [Hint(2, (8, 9), 2, 4), Hint(6, (7,), 6, 8)],
        [1, 2, 8, 9, 30, 31, 3, 4, 7, 50, 51],
        [2, 3, 6, 7],
        [4, 5, 9, 10],
    ),
    "the later first": (
        [Hint(6, (7,), 6, 8), Hint(2, (8, 9), 2, 4)],
        [1, 2, 8, 9, 30, 31, 3, 4, 7, 50, 51],
        [2, 3, 6, 7],
        [4, 5, 9, 10],
    ),
    "two at one place": ([Hint(2, (8,), 2, 3), Hint(2, (9,), 3, 4)], [1, 2, 8, 9, 30, 31], [2, 3], [4, 5]),
    "an empty hint": ([Hint(2, (), 2, 4)], [1, 2, 30, 31], [2, 3], [2, 3]),
    "an empty message": ([Hint(2, (8,), 2, 2)], [1, 2, 8], [], []),
    "an empty message at the end": ([Hint(8, (8,), 8, 8)], [1, 2, 30, 31, 3, 4, 50, 51, 8], [], []),
    "an empty message after one with tokens": (
        [Hint(2, (8,), 2, 4), Hint(8, (9,), 8, 8)],
        [1, 2, 8, 30, 31],
        [2, 3],
        [3, 4],
    ),
    "no hint": ([], [], [], []),
    "given tokens in the message": ([Hint(2, (8,), 2, 8)], [1, 2, 8, 30, 31, 3, 4, 50, 51], [2, 3, 6, 7], [3, 4, 7, 8]),
}


@pytest.mark.parametrize("hints, tokens, student, teacher", BY_HAND.values(), ids=BY_HAND)
def test_where_tokens_go_by_hand(hints, tokens, student, teacher):
    found = hinted(TEXT, hints)
    assert (found.tokens.tolist(), found.student.tolist(), found.teacher.tolist()) == (tokens, student, teacher)
    assert found.tokens.dtype == torch.long


REFUSED = {
    "inside its own message": ([Hint(3, (8,), 3, 4)], "hint 0 must stand between messages"),
    "inside another message": ([Hint(7, (8,), 7, 7)], "hint 0 must stand between messages"),
    "inside another message's answer": (
        [Hint(2, (8,), 2, 8), Hint(4, (8,), 8, 8)],
        "hint 1 must stand between messages",
    ),
    "behind the start of its message": (
        [Hint(2, (8,), 2, 4), Hint(8, (8,), 6, 8)],
        "hint 1 must stand before its message",
    ),
    "messages that overlap": ([Hint(2, (8,), 2, 4), Hint(0, (9,), 3, 8)], "hints must correct different messages"),
    "the same message twice": ([Hint(2, (8,), 2, 4)] * 2, "hints must correct different messages"),
    "nothing of the policy's": ([Hint(4, (8,), 4, 6)], "it wrote no token from 4 to 6"),
    "an end beyond the segment": ([Hint(6, (8,), 6, 9)], "between 0 and 8"),
    "a start before it": ([Hint(0, (8,), -1, 4)], "between 0 and 8"),
    "a hint before it": ([Hint(-1, (8,), 2, 4)], "between 0 and 8"),
    "an end before the start": ([Hint(2, (8,), 4, 3)], "between 0 and 8"),
}


@pytest.mark.parametrize("hints, says", REFUSED.values(), ids=REFUSED)
def test_what_is_refused(hints, says):
    with pytest.raises(ValueError, match=says) as error:
        hinted(TEXT, hints)
    assert "\n" not in str(error.value)


def test_the_first_token_of_all_is_predicted_by_none():
    with pytest.raises(ValueError, match="no token predicts"):
        hinted(rollout([5, 6], "11"), [Hint(0, (8,), 0, 2)])
    assert hinted(rollout([5, 6], "01"), [Hint(0, (8,), 0, 2)]).student.tolist() == [1]


def test_a_chain_with_a_summary():
    """The summary is corrected in the segment in which it was written. The next one starts with it, and there it is
    nobody's message."""
    summary = torch.tensor([False] * 5 + [True] * 2)
    first = rollout([1, 2, 30, 3, 4, 40, 41], "0010011", summary=summary)
    second = rollout([1, 2, 40, 41, 50], "00001", summary=torch.zeros(5, dtype=torch.bool))
    found = hinted(first, [Hint(5, (8, 8), 5, 7)])
    assert found.tokens.tolist() == [1, 2, 30, 3, 4, 8, 8, 40, 41] and found.teacher.tolist() == [7, 8]
    with pytest.raises(ValueError, match="it wrote no token from 2 to 4"):
        hinted(second, [Hint(2, (8,), 2, 4)])
    assert hinted(second, [Hint(2, (8,), 4, 5)]).tokens.tolist() == [1, 2, 8, 40, 41, 50]


@st.composite
def segments_with_hints(draw, vocab=50):
    """Tokens, marks of the written ones (given and written messages take turns), and hints, which may be empty, for
    some of the messages."""
    own, messages = "", []
    for _ in range(draw(st.integers(1, 4))):
        own += "0" * draw(st.integers(1, 4))
        size = draw(st.integers(0, 4))
        messages.append((len(own), len(own) + size))
        own += "1" * size
    tokens = draw(st.lists(st.integers(0, vocab - 1), min_size=len(own), max_size=len(own)))
    hints = []
    places = [p for p in range(len(own) + 1) if not (0 < p < len(own) and own[p - 1 : p + 1] == "11")]
    for begin, end in messages:
        if draw(st.booleans()):
            at = draw(st.sampled_from([p for p in places if p <= begin]))
            hints.append(Hint(at, tuple(draw(st.lists(st.integers(0, vocab - 1), max_size=3))), begin, end))
    return tokens, own, draw(st.permutations(hints))


@given(segments_with_hints())
@settings(max_examples=200)
def test_the_teacher_reads_the_same_messages_and_the_hints(case):
    segment, hints = rollout(*case[:2]), case[2]
    found = hinted(segment, hints)
    assert torch.equal(found.tokens[found.teacher], segment.tokens[found.student])
    wanted = sorted(t for hint in hints for t in range(hint.begin, hint.end))
    assert found.student.tolist() == wanted
    marks = [t for hint in hints for t in hint.tokens]
    assert len(found.tokens) <= len(segment.tokens) + len(marks)
    # Without the hints the sequence is the segment's beginning, and hints stand in their order of places.
    whole, ordered = segment.tokens.tolist(), sorted(hints, key=lambda hint: hint.at)
    by_hand = []
    for t in range(len(whole) + 1):
        for hint in ordered:
            if hint.at == t:
                by_hand += hint.tokens
        by_hand += whole[t : t + 1]
    assert found.tokens.tolist() == by_hand[: len(found.tokens)]
    for t, u in zip(found.student.tolist(), found.teacher.tolist()):
        shift = sum(len(hint.tokens) for hint in hints if hint.at <= t)
        assert u == t + shift
        assert u == len(found.tokens) - 1 or t < max(wanted) or any(hint.begin == hint.end for hint in hints), (
            "nothing stands behind the last message"
        )


@pytest.mark.parametrize("moe", [False, True])
def test_a_real_network_teaches_what_it_says_under_the_hint(moe):
    """The teacher's log-probs at mapped places are those of a sequence that is put together by hand, one token after
    the other."""

    @given(st.data(), configs(moe=moe))
    @settings(max_examples=15)
    def check(data, config):
        *text, hints = data.draw(segments_with_hints(vocab=config.vocab_size))
        segment = rollout(*text)
        found = hinted(segment, hints)
        assume(len(found.student))
        model = scramble(Transformer(config).double())
        with torch.no_grad():
            student = model(segment.tokens[None]).logits[0].log_softmax(-1)
            teacher = model(found.tokens[None]).logits[0].log_softmax(-1)
            left, right = predictions(student, teacher, found)
            for row, t in enumerate(found.student.tolist()):
                prefix = []
                for p in range(t + 1):
                    prefix += [
                        token
                        for hint in sorted(hints, key=lambda hint: hint.at)
                        if hint.at == p
                        for token in hint.tokens
                    ]
                    prefix += [int(segment.tokens[p])] if p < t else []
                same(right[row], model(torch.tensor([prefix])).logits[0, -1].log_softmax(-1))
                same(left[row], model(segment.tokens[None, :t]).logits[0, -1].log_softmax(-1))

    check()


def test_the_first_prediction_under_the_hint_is_made_by_its_last_token():
    """The place to which the student's t − 1 is shifted stands before the hint, and knows nothing of it."""
    where = hinted(TEXT, [Hint(2, (8, 9), 2, 4)])
    places = torch.arange(20.0)[:, None]
    student, teacher = predictions(places, places, where)
    assert student[:, 0].tolist() == [1, 2] and teacher[:, 0].tolist() == [3, 4]
    assert where.tokens[3] == 9


def test_sequences_that_are_too_short_are_refused():
    where = hinted(TEXT, [Hint(2, (8, 9), 2, 4)])
    ok = torch.zeros(5, 3)
    predictions(ok[:3], ok, where)
    with pytest.raises(ValueError, match="student must have at least 3 positions; got 2"):
        predictions(ok[:2], ok, where)
    with pytest.raises(ValueError, match="teacher must have at least 5 positions; got 4"):
        predictions(ok, ok[:4], where)


S, T = double(0.5, 0.25, 0.25), double(0.25, 0.25, 0.5)
M = double(0.375, 0.25, 0.375)
VALUES = {
    "forward": 0.25 * math.log(0.5) + 0.5 * math.log(2),
    "reverse": 0.5 * math.log(2) + 0.25 * math.log(0.5),
    "js": (0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3)),
}


@kinds
def test_divergences_by_hand(kind):
    assert divergence(S.log(), T.log() + 3, kind).item() == pytest.approx(VALUES[kind], abs=1e-15)


def test_the_two_directions_differ_by_hand():
    s, t = double(0.5, 0.5), double(0.9, 0.1)
    assert divergence(s.log(), t.log(), "forward").item() == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2))
    assert divergence(s.log(), t.log(), "reverse").item() == pytest.approx(0.5 * math.log(1 / 1.8) + 0.5 * math.log(5))
    assert divergence(s.log(), t.log()).item() == divergence(s.log(), t.log(), "reverse").item()


def closed_gradient(s, t, kind):
    """The table in the file's docstring."""
    m = (s + t) / 2
    log_ratio = {"forward": s * 0, "reverse": (s / t).log(), "js": (s / m).log()}[kind]
    if kind == "forward":
        return s - t
    return s * (log_ratio - (s * log_ratio).sum(-1, keepdim=True)) / (2 if kind == "js" else 1)


@kinds
@given(st.integers(1, 9), st.floats(0.1, 8), st.integers(0, 2**31))
@settings(max_examples=30)
def test_gradients_have_their_closed_forms(kind, V, size, seed):
    generator = torch.Generator().manual_seed(seed)
    student, teacher = size * torch.randn(2, 3, V, dtype=torch.float64, generator=generator)
    student.requires_grad_()
    (got,) = torch.autograd.grad(divergence(student, teacher, kind).sum(), student)
    torch.testing.assert_close(
        got, closed_gradient(student.detach().softmax(-1), teacher.softmax(-1), kind), rtol=1e-9, atol=1e-13
    )


@kinds
@pytest.mark.parametrize("top_k", [None, 1, 3, 5])
def test_gradients_are_those_of_the_values(kind, top_k):
    student, teacher = torch.randn(2, 4, 5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: divergence(x, teacher, kind, top_k), student.requires_grad_())


@kinds
@pytest.mark.parametrize("top_k", [None, 2])
def test_the_gradient_of_an_enumerable_policy(kind, top_k):
    """Every word of three letters, weighed with its probability: the loss and its gradient are the sums over prefixes,
    written out."""
    V, length = 3, 3
    table = torch.randn(length, V, V, dtype=torch.float64)  # logits of a letter by its place and the one before it
    hint = torch.randn(V, dtype=torch.float64)  # what the hint adds to them
    words = torch.tensor(list(itertools.product(range(V), repeat=length)))
    before = torch.cat([torch.zeros_like(words[:, :1]), words[:, :-1]], 1)
    logp = table.log_softmax(-1)[torch.arange(length), before, words].sum(1)
    leaf = table.clone().requires_grad_()
    logits = leaf[torch.arange(length), before]
    loss = feedback_loss(
        logits, logits + hint, logp.exp()[:, None].expand(-1, length), budget=length, kind=kind, top_k=top_k
    )
    loss.backward()
    value, gradient = 0.0, torch.zeros_like(table)
    for place, previous in itertools.product(range(length), range(V)):
        reached = logp.exp()[before[:, place] == previous].sum()
        s, t = table[place, previous].softmax(-1), (table[place, previous] + hint).softmax(-1)
        parts = torch.eye(V, dtype=torch.float64)
        if top_k:
            first, second = t.argsort(descending=True)[:top_k].tolist()
            parts = torch.stack([parts[first], parts[second], 1 - parts[first] - parts[second]])
        S, T = parts @ s, parts @ t
        M = (S + T) / 2
        terms = {
            "forward": T * (T / S).log(),
            "reverse": S * (S / T).log(),
            "js": (S * (S / M).log() + T * (T / M).log()) / 2,
        }
        slopes = {"forward": -T / S, "reverse": (S / T).log() + 1, "js": (S / M).log() / 2}  # d D / d S
        in_s = parts.t() @ slopes[kind]
        value += reached * terms[kind].sum() / length
        gradient[place, previous] = reached / length * s * (in_s - (s * in_s).sum())
    assert loss.item() == pytest.approx(value.item(), rel=1e-12)
    torch.testing.assert_close(leaf.grad, gradient, rtol=1e-10, atol=1e-14)


@kinds
@pytest.mark.parametrize("top_k", [None, 2])
def test_no_gradient_reaches_the_teacher_though_it_has_the_same_weights(kind, top_k):
    """The gradient is that of a teacher which is another network with equal weights."""
    weight, x, y = torch.randn(5, 4, dtype=torch.float64), *torch.randn(2, 7, 5, dtype=torch.float64)
    where = hinted(rollout(list(range(7)), "0011111"), [Hint(2, (), 2, 7)])

    def loss(student, teacher):
        return feedback_loss(
            *predictions(x @ student, y @ teacher, where), torch.ones(5), budget=5, kind=kind, top_k=top_k
        )

    both, alone = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    loss(both, both).backward()
    loss(alone, weight).backward()
    assert torch.equal(both.grad, alone.grad) and both.grad.abs().max() > 1e-3
    assert not predictions(x @ both, y @ both, where)[1].requires_grad, "whatever the caller does with it"
    # Also where a caller gives logits that were not detached.
    student, teacher = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    feedback_loss(student, teacher, torch.ones(3), budget=1, kind=kind, top_k=top_k).backward()
    assert teacher.grad is None and student.grad.any()


@kinds
@given(st.integers(1, 9), st.sampled_from([torch.float32, torch.float64]), st.integers(0, 2**31))
@settings(max_examples=30)
def test_a_hint_that_changes_nothing_costs_nothing(kind, V, dtype, seed):
    logits = 3 * torch.randn(4, V, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    for top_k in (None, 1, V):
        leaf = logits.clone().requires_grad_()
        loss = feedback_loss(leaf, leaf, torch.ones(4, dtype=torch.bool), budget=1, kind=kind, top_k=top_k)
        loss.backward()
        assert loss.item() == 0
        assert leaf.grad.abs().max() <= 8 * torch.finfo(dtype).eps


pairs = st.tuples(st.integers(1, 8), st.floats(0, 6), st.integers(0, 2**31), st.integers(0, 3))


def drawn(pair):
    """Logits of both, some of them −inf on both sides."""
    V, size, seed, forbidden = pair
    generator = torch.Generator().manual_seed(seed)
    student, teacher = size * torch.randn(2, 5, V, dtype=torch.float64, generator=generator)
    forbidden = min(forbidden, V - 1)
    student[:, :forbidden] = teacher[:, :forbidden] = -INF
    return student, teacher


@kinds
@given(pairs)
@example((6, 3.0, 0, 3))
@settings(max_examples=80)
def test_lumping_loses_and_never_adds(kind, pair):
    """The data-processing inequality; with all tokens as outcomes of their own nothing is lost, and more of them lose
    less."""
    student, teacher = drawn(pair)
    full, last = divergence(student, teacher, kind), torch.zeros(5, dtype=torch.float64)
    assert (full >= -1e-14).all()
    for k in range(1, student.shape[-1] + 1):
        found = divergence(student, teacher, kind, k)
        assert (found <= full + 1e-12).all() and (found >= last - 1e-12).all()
        last = found
    same(last, full, atol=1e-12)


def test_the_outcomes_of_their_own_are_the_teachers_and_the_rest_is_one_by_hand():
    s, t = double(0.7, 0.1, 0.1, 0.1), double(0.1, 0.2, 0.3, 0.4)
    want = 0.1 * math.log(0.1 / 0.4) + 0.9 * math.log(0.9 / 0.6)
    assert divergence(s.log(), t.log(), "reverse", 1).item() == pytest.approx(want)


@given(pairs)
@example((2, 6.0, 1, 0))
@settings(max_examples=80)
def test_jensen_shannon_is_bounded_and_symmetric(pair):
    student, teacher = drawn(pair)
    there, back = divergence(student, teacher, "js"), divergence(teacher, student, "js")
    same(there, back, atol=1e-14)
    assert (there <= math.log(2) + 1e-12).all() and (there >= -1e-14).all()
    assert (
        2 * there <= divergence(student, teacher, "forward") + 1e-12
    ).all()  # KL is convex: KL(p‖m) ≤ KL(p‖q)/2, and KL(q‖m) likewise


def test_distributions_that_share_nothing_are_log_two_apart():
    left, right = double(0.0, -INF), double(-INF, 0.0)
    student = left.clone().requires_grad_()
    found = divergence(student, right, "js")
    found.backward()
    assert found.item() == pytest.approx(math.log(2)) and not student.grad.isnan().any()
    assert divergence(left, right, "forward").item() == divergence(left, right, "reverse").item() == INF


def test_who_allows_what_the_other_forbids_decides_which_side_is_infinite():
    student, teacher = double(0.0, 0.0), double(0.0, -INF)
    assert divergence(student, teacher, "reverse").item() == INF
    assert divergence(student, teacher, "forward").item() == pytest.approx(math.log(2))
    with pytest.raises(ValueError, match="reverse divergence must be finite.*row 0 of 1"):
        feedback_loss(student[None], teacher[None], torch.ones(1), budget=1)


@kinds
@pytest.mark.parametrize("top_k", [None, 1, 2, 4])
def test_forbidden_tokens_leave_no_nan(kind, top_k):
    student, teacher = torch.randn(2, 6, 4, dtype=torch.float64)
    student[:, :2] = teacher[:, :2] = -INF
    student[3:, 2] = teacher[3:, 2] = -INF
    student.requires_grad_()
    loss = feedback_loss(student, teacher, torch.ones(6), budget=1, kind=kind, top_k=top_k)
    loss.backward()
    assert loss.isfinite() and student.grad.isfinite().all()
    assert not student.grad[:, :2].any()


@kinds
def test_probabilities_that_round_to_zero_leave_no_nan(kind):
    student, teacher = torch.tensor([[0.0, -200.0, -1e4]], requires_grad=True), torch.tensor([[-200.0, 0.0, -1e4]])
    loss = feedback_loss(student, teacher, torch.ones(1), budget=1, kind=kind)
    loss.backward()
    assert (
        loss.item() == pytest.approx(math.log(2) if kind == "js" else 200, rel=1e-6) and student.grad.isfinite().all()
    )


@kinds
@pytest.mark.parametrize("top_k", [None, 3])
def test_logits_in_bfloat16_are_compared_in_float32(kind, top_k):
    """A sum over a vocabulary in bfloat16 is off by more than policies that are close differ."""
    student, teacher = torch.randn(2, 4, 64).bfloat16()
    found = divergence(student, teacher, kind, top_k)
    assert found.dtype == torch.float32 and torch.equal(
        found, divergence(student.float(), teacher.float(), kind, top_k)
    )
    assert divergence(student, teacher.double(), kind, top_k).dtype == torch.float64


def test_what_does_not_count_may_hold_anything():
    logits = torch.randn(2, 3, 4, dtype=torch.float64)
    weight = double([0.0, 2.0, 1.0], [1.0, 0.0, 0.0])
    student, teacher = logits.clone(), 2 * logits
    student[weight == 0], teacher[weight == 0] = NAN, INF
    student.requires_grad_()
    loss = feedback_loss(student, teacher, weight, budget=7)
    loss.backward()
    each = divergence(logits, 2 * logits)
    assert loss.item() == pytest.approx(((2 * each[0, 1] + each[0, 2] + each[1, 0]) / 7).item())
    assert not student.grad[weight == 0].any() and student.grad[weight != 0].any()


@kinds
def test_without_a_token_that_counts_the_loss_is_zero(kind):
    """Empty messages everywhere, and also no rows at all."""
    for shape in ((2, 3), (0,), (0, 3)):
        student = torch.full((*shape, 4), NAN, requires_grad=True)
        loss = feedback_loss(student, student.detach(), torch.zeros(shape), budget=1, kind=kind)
        loss.backward()
        assert loss.item() == 0 and not student.grad.any()
    where = hinted(TEXT, [Hint(2, (8,), 2, 2)])
    student, teacher = predictions(torch.randn(8, 4), torch.randn(3, 4), where)
    assert student.shape == teacher.shape == (0, 4)


@kinds
@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.sampled_from([None, 1, 3]), st.integers(0, 2**31))
@settings(max_examples=40)
def test_micro_batches_add_up(kind, sizes, top_k, seed):
    """However the tokens of a step are dealt, the losses and the gradients add up to those of the full batch, since one
    number divides all."""
    generator = torch.Generator().manual_seed(seed)
    n = sum(sizes)
    student, teacher = torch.randn(2, n, 4, dtype=torch.float64, generator=generator)
    weight = torch.rand(n, dtype=torch.float64, generator=generator) * (torch.rand(n, generator=generator) < 0.8)
    whole, dealt = student.clone().requires_grad_(), student.clone().requires_grad_()
    full = feedback_loss(whole, teacher, weight, budget=11, kind=kind, top_k=top_k)
    full.backward()
    parts = zip(dealt.split(sizes), teacher.split(sizes), weight.split(sizes), strict=True)
    total = sum(feedback_loss(*part, budget=11, kind=kind, top_k=top_k) for part in parts)
    total.backward()
    assert total.item() == pytest.approx(full.item(), abs=1e-13)
    same(dealt.grad, whole.grad, atol=1e-15)


@pytest.mark.parametrize("budget", [0, -1, INF, NAN])
def test_a_denominator_must_be_positive(budget):
    with pytest.raises(ValueError, match="budget must be positive"):
        feedback_loss(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1), budget=budget)


def test_arguments_that_are_refused():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="kind must be forward or reverse or js; got 'k1'"):
        divergence(x, x, "k1")
    for k in (0, 4):
        with pytest.raises(ValueError, match=f"top_k must be between 1 and the vocabulary's 3; got {k}"):
            divergence(x, x, top_k=k)
    for bad in (torch.full((2, 3), NAN), torch.full((2, 3), INF), torch.full((2, 3), -INF)):
        with pytest.raises(ValueError, match="student must be finite or −inf"):
            divergence(bad, x)
        with pytest.raises(ValueError, match="teacher must be finite or −inf"):
            divergence(x, bad)
    with pytest.raises(ValueError, match="weight must be finite; row 1 of 2"):
        feedback_loss(x, x, torch.tensor([1.0, NAN]), budget=1)


def test_hints_that_leak_by_hand():
    context, message = (1, 2, 3, 4, 5), (6, 7, 8, 9)
    assert leaked((0, 6, 7, 8, 0), message, context, 3) == (6, 7, 8)
    assert leaked((0, 6, 7, 0, 8), message, context, 3) is None
    assert leaked((0, 1, 2, 3, 0), (1, 2, 3), context, 3) is None, "what the student has read may be repeated"
    assert leaked((3, 4, 6), (3, 4, 6, 7), context, 3) == (3, 4, 6), (
        "a part of the context beside a part of the answer is new"
    )
    assert leaked((0, 8, 9), (8, 9), context, 4) == (8, 9), "a short answer is looked for as a whole"
    assert leaked((9,), (8, 9, 10), context, 4) == (9,), "and so is a short hint"
    assert leaked((), message, context) is leaked((0,), (), context) is None
    with pytest.raises(ValueError, match="n must be at least 1"):
        leaked((1,), (1,), (), 0)


@given(
    st.lists(st.integers(0, 3), max_size=8),
    st.lists(st.integers(0, 3), max_size=8),
    st.lists(st.integers(0, 3), max_size=8),
    st.integers(1, 4),
)
@settings(max_examples=100)
def test_leaks_are_shared_by_the_hint_and_the_answer_alone(hint, answer, context, n):
    found = leaked(hint, answer, context, n)

    def holds(tokens):
        return any(tuple(tokens[i : i + len(found)]) == found for i in range(len(tokens)))

    if found is not None:
        assert len(found) == min(n, len(hint), len(answer)) and holds(hint) and holds(answer) and not holds(context)
    assert leaked(hint, answer, [*context, 9, *hint], n) is None, "what the context says already is no secret"
    if answer and answer not in ([context[i : i + len(answer)] for i in range(len(context))]):
        assert leaked([9, *answer, 9], answer, context, len(answer)) == tuple(answer), (
            "the whole answer is always found"
        )


def test_the_demonstration_cures_a_fault_that_the_outcome_does_not_see():
    found = demo(replace(Demo(), steps=60))
    assert found["feedback_faults_after"] < 0.5 * found["feedback_faults_before"]
    assert found["outcome_faults_after"] > 0.8 * found["outcome_faults_before"]
    assert abs(found["feedback_success_after"] - found["outcome_success_after"]) < 0.1
    assert found["outcome_success_after"] > 2 * found["outcome_success_before"]
