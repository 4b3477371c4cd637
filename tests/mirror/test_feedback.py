"""scaled = ref for hints, habits and alarms, on every layout: the loss and its gradient, predictions that are brought
to one rank, a whole step through a network, what a price adds to an advantage, and alarms from rollouts on many
ranks."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ref import behaviour, monitor, textual_feedback
from ref.textual_feedback import Hint
from ref.transcript import Call, Transcript, Turn
from tests.mirror import feedback_parts
from tests.mirror.layouts import EVERY, NAMES, close, layouts, play, seeds
from tests.mirror.test_network import V, made, same_gradients, shape
from tests.ref.test_behaviour import tables, transcripts
from tests.ref.test_textual_feedback import rollout, segments_with_hints

# Where a strategy makes a Hint, the check of types looks at a random item of a tuple.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
some, few = (settings(max_examples=n, deadline=None, derandomize=True) for n in (10, 6))
kinds = st.sampled_from(["forward", "reverse", "js"])
size = st.integers(1, 3)
told = st.lists(segments_with_hints(V).map(lambda one: (rollout(*one[:2]), one[2])), min_size=1, max_size=6)


def widths(layout: dict, texts, more: int) -> tuple[int, int]:
    """Rows that hold every segment, and every teacher's sequence, a little longer than they must be."""
    unit = 2 * layout["cp"]
    longest = (
        max(len(one.tokens) for one, _ in texts),
        max(len(one.tokens) + sum(len(hint.tokens) for hint in hints) for one, hints in texts),
    )
    return tuple(unit * (-(-n // unit) + more) for n in longest)


@some
@given(
    layouts,
    seeds,
    size,
    size,
    st.integers(1, 5),
    kinds,
    st.sampled_from([None, 1, 3]),
    st.sampled_from([0.0, 0.4, 1.0]),
)
def test_the_loss_and_its_gradient(layout, seed, rows, length, words, kind, top_k, share):
    """Weights of tokens, ranks and steps without one that counts; what does not count holds NaN, and some tokens are
    forbidden."""
    g, B, T = torch.Generator().manual_seed(seed), rows * layout["dp"], 2 * length * layout["cp"]
    student, teacher = 3 * torch.randn(2, B, T, words, generator=g, dtype=torch.float64)
    student[..., 1:][torch.rand(B, T, words - 1, generator=g) < 0.2] = -math.inf
    teacher[..., 1:].masked_fill_(student[..., 1:] == -math.inf, -math.inf)
    weight = torch.rand(B, T, generator=g, dtype=torch.float64) * (torch.rand(B, T, generator=g) < share)
    student[weight == 0], teacher[weight == 0] = math.nan, math.inf
    how = dict(kind=kind, top_k=None if top_k is None else min(top_k, words))
    loss, grad = play(layout, feedback_parts.fed, student, teacher, weight, how)
    whole = student.clone().requires_grad_()
    wanted = textual_feedback.feedback_loss(whole, teacher, weight, budget=7.0, **how)
    wanted.backward()
    close(loss, wanted)
    close(grad, whole.grad)
    assert not grad[weight == 0].any()


@pytest.mark.parametrize("layout", EVERY[::2], ids=NAMES[::2])
def test_the_gradient_of_an_enumerable_policy(layout):
    """Every word of three letters, weighed with its probability, on all ranks: the gradient is the sum over prefixes,
    written out."""
    letters, length, unit = 3, 3, 2 * layout["cp"]
    table, hint = torch.randn(8, letters, letters, dtype=torch.float64), torch.randn(letters, dtype=torch.float64)
    every = torch.tensor(list(itertools.product(range(letters), repeat=length)))
    before = torch.cat([torch.zeros_like(every[:, :1]), every[:, :-1]], 1)
    logp = table.log_softmax(-1)[torch.arange(length), before, every].sum(1)
    fill = (0, -length % unit, 0, -len(every) % layout["dp"])
    weight = torch.nn.functional.pad(logp.exp()[:, None].expand(-1, length), fill)
    loss, found = play(
        layout, feedback_parts.words, table, hint, torch.nn.functional.pad(before, fill), weight, dict(budget=length)
    )
    value, gradient = 0.0, torch.zeros_like(table)
    for place, previous in itertools.product(range(length), range(letters)):
        reached = logp.exp()[before[:, place] == previous].sum()
        s, t = table[place, previous].softmax(-1), (table[place, previous] + hint).softmax(-1)
        apart = (s * (s / t).log()).sum()
        value += reached * apart / length
        gradient[place, previous] = reached / length * s * ((s / t).log() - apart)
    close(loss, value)
    close(found, gradient)


@some
@given(layouts, seeds, told, st.integers(0, 1))
def test_both_predictions_of_a_token_come_to_one_rank(layout, seed, texts, more):
    """Packed rows of segments, summaries and hints of any length: each token's student and teacher rows are those of
    its own segment, the gradient goes to the student alone, and to the position before the token."""
    g, found = torch.Generator().manual_seed(seed), [textual_feedback.hinted(*one) for one in texts]
    lengths = [(len(one.tokens), len(where.tokens)) for (one, _), where in zip(texts, found, strict=True)]
    hidden = [tuple(torch.randn(n, 3, generator=g, dtype=torch.float64) for n in both) for both in lengths]
    names, pairs, grads = play(layout, feedback_parts.pairs, texts, hidden, *widths(layout, texts, more))
    assert names.tolist() == [[n, t] for n, where in enumerate(found) for t in where.student.tolist()]
    leaves = [x.clone().requires_grad_() for x, _ in hidden]
    wanted = [
        textual_feedback.predictions(x, teacher, where)
        for x, (_, teacher), where in zip(leaves, hidden, found, strict=True)
    ]
    assert torch.equal(pairs, torch.cat([torch.cat(pair, 1).detach() for pair in wanted])), (
        "rows are moved, not computed"
    )
    sum((left * right.sin()).sum() for left, right in wanted).backward()
    for grad, x in zip(grads, leaves, strict=True):
        close(grad, torch.zeros_like(x) if x.grad is None else x.grad)


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_places_that_cross_by_hand(cp):
    """Row of 16: each of its tokens is brought together with the one that is as far from the other end."""
    at, there = [*range(1, 17)], [*range(16, 0, -1)]
    found = play(dict(dp=1, cp=cp), feedback_parts.crossed, 16, at, there, False)
    assert sorted(found) == [[n, n, 15 - n] for n in range(16)]
    first = found[: 16 // cp]
    assert [n for n, *_ in first] == ([*range(16)] if cp == 1 else [*range(8 // cp), *range(16 - 8 // cp, 16)]), (
        "the early chunk and the late one"
    )


@pytest.mark.parametrize(
    ("at", "there", "short", "says"),
    [
        (
            [1],
            [1],
            True,
            "student must hold 1 rows of equal length, with 2 chunks of each on this rank; got 7 positions",
        ),
        ([1], [17], False, "teacher must have at least 17 positions; got 16"),
        ([17], [1], False, "student must have at least 17 positions; got 16"),
    ],
)
def test_sequences_that_do_not_fit_are_refused(at, there, short, says):
    with pytest.raises(RuntimeError, match=says):
        play(dict(dp=1, cp=2), feedback_parts.crossed, 16, at, there, short)


def whole_step(model, texts, how):
    """The loss of a step from each segment alone, and its gradient in the model."""
    loss = torch.zeros((), dtype=torch.float64)
    for segment, hints in texts:
        where = textual_feedback.hinted(segment, hints)
        if len(where.student):
            hidden = [model(x[None], logits=False).hidden[0] for x in (segment.tokens, where.tokens)]
            pair = textual_feedback.predictions(*hidden, where)
            weight = segment.tokens[where.student] % 3
            loss = loss + textual_feedback.feedback_loss(*map(model.head, pair), weight, budget=5, **how)
    if loss.requires_grad:
        loss.backward()
    return loss


@few
@given(layouts, seeds, told, kinds, st.sampled_from([None, 4]), st.integers(1, 2), st.sampled_from([1, 3, 512]))
def test_a_step_through_a_network(layout, seed, texts, kind, top_k, micro, chunk):
    """Teacher and student packed, cut over ranks, some rows at a time, the head on some tokens at a time: loss and
    gradients are those of each segment alone on one rank."""
    model, state = made(shape(4 if seed % 2 else 0, 2, 2, bool(seed % 3)), seed)
    how = dict(kind=kind, top_k=top_k)
    found, grads = play(
        layout, feedback_parts.step, model.config, state, texts, *widths(layout, texts, 0), micro, chunk, how
    )
    wanted = whole_step(model, texts, how)
    close(found, wanted)
    largest = max((float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None), default=0.0)
    for name, p in model.named_parameters():
        close(
            grads[name] if name in grads else torch.zeros_like(p),
            torch.zeros_like(p) if p.grad is None else p.grad,
            largest,
        )
    assert all(bool(x.isfinite().all()) for x in grads.values())


TEXT = rollout([1, 2, 30, 31, 3, 4, 5, 36], "00110011")
EMPTY = {
    "hints that say nothing": [(TEXT, [Hint(2, (), 2, 4), Hint(0, (), 6, 8)])],
    "messages of no token": [(TEXT, [Hint(2, (8,), 2, 2), Hint(8, (9,), 8, 8)])],
    "no hint": [(TEXT, [])],
}


@pytest.mark.parametrize("texts", EMPTY.values(), ids=EMPTY)
def test_where_the_hint_changes_nothing_the_loss_is_zero(texts):
    """Also on ranks that have no segment, and the gradient is zero to rounding."""
    model, state = made(shape(4, 2, 2, True), 0)
    for layout in (dict(dp=2, cp=2, ep=2), dict(dp=4, cp=1, ep=1)):
        loss, grads = play(layout, feedback_parts.step, model.config, state, texts, 8, 8, 1, 512, dict(kind="js"))
        assert abs(loss) < 1e-15 and all(float(x.abs().max()) < 1e-12 for x in grads.values())


def test_a_hint_changes_the_gradient():
    """The control of the test above, and one step by hand on both sides: the same as on one rank, and not zero."""
    model, state = made(shape(4, 2, 2, True), 0)
    texts = [(TEXT, [Hint(2, (7, 8, 9), 2, 4)]), (TEXT, [Hint(0, (7,), 6, 8)]), (TEXT, [])]
    loss, grads = play(
        dict(dp=2, cp=2, ep=2), feedback_parts.step, model.config, state, texts, 8, 12, 1, 1, dict(kind="forward")
    )
    close(loss, whole_step(model, texts, dict(kind="forward")))
    same_gradients(grads, model)
    assert loss > 1e-6 and all(x.any() for name, x in grads.items() if "norm" not in name)


def test_a_row_that_is_too_short_for_the_hints_is_refused_on_every_dp_rank():
    texts = [(TEXT, [Hint(2, tuple(range(9)), 2, 4)]), (TEXT, [])]
    says = "length must hold a segment with its hints, 13 tokens; got 8"
    with pytest.raises(RuntimeError, match=f"(?s)rank 0.*{says}.*rank 1.*{says}|rank 1.*{says}.*rank 0.*{says}"):
        play(dict(dp=2, cp=1), feedback_parts.refused, texts, 8, 8)


@some
@given(layouts, st.lists(transcripts, min_size=1, max_size=8), tables, st.data())
def test_what_a_price_adds_is_of_the_whole_group(layout, ones, prices, data):
    """Bit for bit, wherever the rollouts are, some ranks without one; several groups in one call."""
    group = [behaviour.behaviour(one, prices) for one in ones]
    parts = data.draw(st.lists(st.integers(0, len(group)), min_size=3, max_size=3))
    axis = data.draw(st.sampled_from(["dp", "all"]))
    assert play(layout, feedback_parts.parted, group, None, parts, axis) == behaviour.group_parts(group)
    numbers = data.draw(st.lists(st.integers(0, 2), min_size=len(group), max_size=len(group)))
    found = play(layout, feedback_parts.parted, group, numbers, parts, axis)
    for number in set(numbers):
        members = [n for n, other in enumerate(numbers) if other == number]
        wanted = behaviour.group_parts([group[n] for n in members])
        assert {name: [values[n] for n in members] for name, values in found.items()} == wanted


@pytest.mark.parametrize(
    ("group", "says"),
    [
        ([], "group must hold at least one rollout"),
        ([{"todos": 0.0}, {"lints": 0.0}], "group must be priced by one table"),
    ],
)
def test_groups_that_are_refused_are_refused_on_every_rank(group, says):
    group = [behaviour.Behaviour(parts) for parts in group]
    with pytest.raises(RuntimeError, match=f"(?s)rank 0.*{says}.*rank 1.*{says}|rank 1.*{says}.*rank 0.*{says}"):
        play(dict(dp=2, cp=1), feedback_parts.parted, group, None, [1], "dp")


TOOLS = ("read", "write", "test")
BANDS = {
    name: monitor.Band(*band)
    for name, band in {"entropy": (0.0, 0.3), "broken": (0.0, 0.1), "length": (0.5, 1.0), "hacks": (0.0, 1.0)}.items()
}


@some
@given(layouts, st.lists(st.lists(st.lists(transcripts, min_size=1, max_size=5), max_size=2), max_size=3), st.data())
def test_statistics_and_alarms_are_of_all_ranks(layout, steps, data):
    parts = data.draw(st.lists(st.integers(0, 3), min_size=3, max_size=3))
    axis = data.draw(st.sampled_from(["dp", "all"]))
    found, alarms, evidence = play(layout, feedback_parts.watched, steps, TOOLS, 500, BANDS, parts, axis)
    watch = monitor.Monitor(BANDS, error=0.5)
    for groups, mine in zip(steps, found, strict=True):
        wanted = [monitor.statistics(group, TOOLS, 500) for group in groups]
        watch.observe(wanted)
        for one, other in zip(mine, wanted, strict=True):
            assert list(one) == list(other) and [x is None for x in one.values()] == [x is None for x in other.values()]
            close([x for x in one.values() if x is not None], [x for x in other.values() if x is not None])
    assert [alarm[:3] for alarm in alarms] == [(one.statistic, one.step, one.direction) for one in watch.alarms]
    for name, one in watch.evidence.items():
        close(evidence[name].exp(), torch.from_numpy(one.log_wealth).exp())


@pytest.mark.parametrize("layout", [dict(dp=1, cp=1), dict(dp=2, cp=1), dict(dp=2, cp=2)], ids=str)
@pytest.mark.parametrize("axis", ["dp", "all"])
def test_statistics_by_hand(layout, axis):
    """One that asks on the first rank, one that asks and one that works on the second: sums first, and then one
    division. "all": with cp=2 each is on a rank of its own."""
    asks = Transcript((Turn("assistant", "Which file?"),), tokens=10)
    calls = Call("write", wrote="return 7 # x\n"), Call("grep", wrote="# y\n", valid=False)
    works = Transcript((Turn("assistant", calls=calls), Turn("assistant", "Done.")), tokens=80)
    found, *_ = play(layout, feedback_parts.watched, [[[asks, asks, works]]], TOOLS, 40, BANDS, [1, 2, 3], axis)
    wanted = {"entropy": math.log(2) / math.log(3), "top_tool": 0.5, "comments": 2 / 9, "length": 0.5, "broken": 0.5}
    assert found == [[pytest.approx(wanted | {"questions": 2 / 3, "hacks": 0.0})]]


def test_alarms_by_hand():
    """Half of the ranks' rollouts call one tool and half another: each rank alone sees a collapse, and all together use
    both equally."""
    one, other = (Transcript((Turn("assistant", calls=(Call(name),) * 4),), tokens=10) for name in ("read", "write"))
    band = {"entropy": monitor.Band(0.5, 1.0)}
    steps = [[[one, other]] * 4] * 30
    for layout in (dict(dp=1, cp=1), dict(dp=2, cp=1)):
        found, alarms, _ = play(layout, feedback_parts.watched, steps, TOOLS, 40, band, [1, 1, 1], "dp")
        assert (
            alarms == []
            and found[0][0]["entropy"] == pytest.approx(math.log(2) / math.log(3))
            and found[0][0]["length"] == 0.25
        )
    found, alarms, _ = play(
        dict(dp=2, cp=1), feedback_parts.watched, [[[one, one]] * 4] * 30, TOOLS, 40, band, [1], "dp"
    )
    assert [alarm[:1] + alarm[2:3] for alarm in alarms] == [("entropy", "down")] and found[0][0]["top_tool"] == 1


def test_a_group_that_no_rank_has_is_refused_on_every_rank():
    says = "group and tools must hold one and two, and longest must be positive; got 0, 3, 40"
    with pytest.raises(RuntimeError, match=f"(?s)rank 0.*{says}.*rank 1.*{says}|rank 1.*{says}.*rank 0.*{says}"):
        play(dict(dp=2, cp=1), feedback_parts.watched, [[[]]], TOOLS, 40, BANDS, [0], "dp")
