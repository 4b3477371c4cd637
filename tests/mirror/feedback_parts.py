"""What ranks are asked to do with hints, habits and alarms. Every call gets the whole problem, takes this rank's part,
and returns whole results."""

import torch
import torch.distributed as dist

from ref.engine.sampler import Segment
from ref.textual_feedback import Hint, Hinted
from ref.transcript import Transcript
from scaled import behaviour, monitor, packing, textual_feedback
from scaled.runtime.comm import all_reduce_max, all_reduce_sum, gathered
from scaled.runtime.cut import cut, full, joined, places
from scaled.runtime.mesh import current
from tests.mirror.calls import given, gradients, leaf

__all__ = ["Laid", "crossed", "fed", "mine", "pairs", "parted", "refused", "step", "watched", "words"]

Told = list[tuple[Segment, list[Hint]]]
"""Segments with their hints."""


def fed(student, teacher, weight, how):
    """The loss from logits, and its gradient."""
    own = leaf(student)
    loss = textual_feedback.feedback_loss(own, cut(teacher), cut(weight), budget=7.0, **how)
    loss.backward()
    return loss.detach(), joined(own.grad)


def words(table, hint, before, weight, how):
    """The same for logits that come from one table, by the place of a token and the one before it; the table's
    gradient."""
    own, at = table.clone().requires_grad_(), places(before.shape[1])
    logits = own[at, cut(before)]
    loss = textual_feedback.feedback_loss(logits, logits + hint, cut(weight), **how)
    loss.backward()
    return loss.detach(), all_reduce_sum(own.grad)


class Laid:
    """This dp rank's segments in packed rows, and their teacher's."""

    def __init__(self, told: Told, length: int, wide: int):
        group = current().group("dp")
        self.numbers, self.segments = [*range(len(told))][group.rank :: group.size], told[group.rank :: group.size]
        self.found = [textual_feedback.hinted(*one) for one in self.segments]
        sizes = torch.tensor([len(one.tokens) for one, _ in self.segments], dtype=torch.long)
        row, start = packing.rows(sizes, length)
        self.starts, self.length = row * length + start, length
        self.rows = max(1, int(all_reduce_max(row.max() + 1 if len(row) else torch.tensor(0), "dp")))
        self.where, self.doc = textual_feedback.pack_hinted(self.found, self.starts, wide)

    def laid(self, columns: list, fill: float = 0, rest: tuple = ()) -> torch.Tensor:
        """What each of this dp rank's segments has for its tokens, in its rows; this rank's tokens of them."""
        out = torch.full((self.rows * self.length, *rest), fill, dtype=columns[0].dtype if columns else torch.long)
        for at, x in zip(self.starts.tolist(), columns, strict=True):
            out[at : at + len(x)] = x
        return out.unflatten(0, (self.rows, self.length))[:, places(self.length)]

    def names(self) -> torch.Tensor:
        """For each distilled token, in order, the number of its segment and its position there."""
        pairs = [
            (at + int(t), number, int(t))
            for at, number, one in zip(self.starts, self.numbers, self.found, strict=True)
            for t in one.student
        ]
        return torch.tensor([pair[1:] for pair in sorted(pairs)], dtype=torch.long).view(-1, 2)


def pairs(told: Told, tables: list, length: int, wide: int):
    """The hidden states that `tables` give to the tokens of each segment and of its teacher, packed and cut: what
    `predictions` makes of them, by segment and position, and the gradient of a function of both, by segment."""
    laid, D = Laid(told, length, wide), tables[0][0].shape[1]
    student = laid.laid([tables[n][0] for n in laid.numbers], rest=(D,)).double().flatten(0, 1).requires_grad_()
    teacher = torch.zeros(*laid.doc.shape, D, dtype=torch.float64)
    for at, n in enumerate(laid.numbers):
        teacher[laid.doc == at] = tables[n][1][: int((laid.doc == at).sum())]
    teacher = teacher[:, places(wide)].flatten(0, 1).requires_grad_()
    left, right = textual_feedback.predictions(student, teacher, laid.where, rows=(laid.rows, len(laid.doc)))
    (left * right.sin()).sum().backward()
    assert teacher.grad is None and not right.requires_grad and student.grad is not None
    both = torch.zeros(len(laid.where.student), 2 * D, dtype=torch.float64)
    both[textual_feedback.own(laid.where, length)] = torch.cat((left.detach(), right), 1)
    whole = full(student.grad.unflatten(0, (laid.rows, -1))).flatten(0, 1)
    grads = [whole[at : at + len(one.tokens)] for at, (one, _) in zip(laid.starts.tolist(), laid.segments, strict=True)]
    names = torch.cat(gathered(laid.names(), "dp"))
    order = (names @ torch.tensor([1000, 1])).argsort()
    every: list = [None] * current().group("dp").size
    if len(every) > 1:
        dist.all_gather_object(every, list(zip(laid.numbers, grads, strict=True)), group=current().group("dp").handle)
    else:
        every = [list(zip(laid.numbers, grads, strict=True))]
    by_segment = [grad for _, grad in sorted((one for some in every for one in some), key=lambda pair: pair[0])]
    return names[order], torch.cat(gathered(all_reduce_sum(both, "cp"), "dp"))[order], by_segment


def step(config, state, told: Told, length: int, wide: int, micro: int, chunk: int, how: dict):
    """The feedback loss of all segments through a network, and its gradients: rows packed, `micro` of them at a
    time."""
    model, laid = given(config, state), Laid(told, length, wide)
    ids = laid.laid([one.tokens for one, _ in laid.segments])
    doc = laid.laid([torch.full_like(one.tokens, n) for n, (one, _) in enumerate(laid.segments)], -1)
    taught = textual_feedback.compute_teacher_states(model, laid.where, laid.doc, micro)
    assert not taught.requires_grad
    total = 0.0
    for first in range(0, laid.rows, micro):
        some = textual_feedback.select_range(laid.where, first * length, (first + micro) * length)
        student = model(ids[first : first + micro], doc=doc[first : first + micro], logits=False).hidden
        pair = textual_feedback.predictions(student.flatten(0, 1), taught, some, rows=(len(student), len(laid.doc)))
        weight = (some.tokens[some.teacher] % 3)[
            textual_feedback.own(some, length)
        ]  # by the token itself, some of them zero
        pair = (x.masked_fill((weight == 0)[:, None], torch.nan) for x in pair)  # what does not count may hold anything
        loss = textual_feedback.head_loss(model, *pair, weight, budget=5, chunk=chunk, **how)
        loss.backward()
        total += loss.item()
    return total, gradients(model)


def refused(told: Told, length: int, wide: int):
    """Rows that are too narrow for a segment with its hints."""
    return Laid(told, length, wide).where


def mine(n: int, parts: list[int], axis: str) -> list[int]:
    """This rank's numbers below n: consecutive ones, rank r of the axis up to parts[r]."""
    ends = [0, *sorted(min(part, n) for part in parts)[: current().group(axis).size - 1], n]
    return [*range(*ends[current().group(axis).rank :][:2])]


def parted(rollouts, numbers, parts, axis):
    """What each price adds to each advantage, in the order of rollouts."""
    some = mine(len(rollouts), parts, axis)
    found = behaviour.group_parts(
        [rollouts[n] for n in some], groups=None if numbers is None else [numbers[n] for n in some], axis=axis
    )
    assert all(len(values) == len(some) for values in found.values())
    return {
        name: torch.cat(gathered(torch.tensor(values, dtype=torch.float64), axis)).tolist()
        for name, values in found.items()
    }


def watched(steps: list[list[list[Transcript]]], tools, longest, bands, parts, axis):
    """The statistics of every group of every step, whose rollouts are on several ranks; this rank's alarms, and its
    evidence."""
    watch, every = monitor.Monitor(bands, error=0.5), []
    for groups in steps:
        found = [
            monitor.statistics([group[n] for n in mine(len(group), parts, axis)], tools, longest, axis=axis)
            for group in groups
        ]
        watch.observe(found)
        every.append(found)
    alarms = [(one.statistic, one.step, one.direction, one.log_evidence) for one in watch.alarms]
    return every, alarms, {name: torch.from_numpy(one.log_wealth) for name, one in watch.evidence.items()}


def crossed(T: int, at: list[int], there: list[int], short: bool):
    """Places of one row of T tokens that are brought together, each known by its number."""
    own = places(T).double()[:, None]
    where = Hinted(torch.zeros(0, dtype=torch.long), torch.tensor(at), torch.tensor(there))
    left, right = textual_feedback.predictions(own[: -1 if short else None], own, where)
    numbers = textual_feedback.own(where, T).double()[:, None]
    return torch.cat(gathered(torch.cat((numbers, left, right), 1), "cp")).tolist()
