"""Targeted textual feedback on many ranks: `ref/textual_feedback.py`, which has the formula, the traps and the glossary.

What is distributed, and what must be sent or summed over ranks:

    segments             over dp      a segment and its teacher's sequence are on one dp rank, and so are its hints
    tokens of a row      over cp      two chunks of each packed row, of the student's rows and of the teacher's (`runtime/cut.py`)
    a distilled token    over cp      belongs to the rank that has the student's prediction of it
    teacher's rows       over cp      are sent to that rank, without gradient
    the loss             everywhere   Σ over ranks; the caller passes one `budget`

The teacher's sequence is longer by the hint, and it ends with its last distilled token. So it needs rows of its own, and the two predictions of a
token are in different chunks, in general on different ranks. The teacher's goes to the student's, because it takes no gradient back. Every cp
rank knows `where`, so the ranks need not tell each other how many rows come.

One step, on every rank together; `starts` says where the segments begin in the student's packed rows, flattened

    where, doc = packed([hinted(segment, hints), …], starts, length)     positions in packed rows; the teacher's rows
    taught = teach(model, where, doc)                                    its hidden states
    out = model(ids, doc=…, logits=False)                                the student's, for rows [first, end) of T tokens
    some = within(where, first · T, end · T)
    pair = predictions(out.hidden.flatten(0, 1), taught, some, rows=(end − first, len(doc)))
    loss = head_loss(model, *pair, weight[own(some, T)], budget=…)       plus the policy loss

Two traps
a. `where` holds the distilled tokens of a dp rank, and its cp ranks all have it. Their number in a step is the sum over dp, not over all ranks.
b. FSDP gathers weights in every forward pass, so all ranks must make the same number of them. `packed` gives all dp ranks equally many rows of
   the teacher; the cost of a segment that has a hint is that of both passes (`scaled.packing.balance`).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ref import textual_feedback as ref
from ref.checks import expect
from ref.textual_feedback import Demo, Hint, Hinted, demo, divergence, hinted, leaked
from scaled.network.model import Transformer
from scaled.packing import rows as in_rows
from scaled.runtime.comm import most, moved, total
from scaled.runtime.cut import places
from scaled.runtime.mesh import current

__all__ = ["Demo", "Hint", "Hinted", "demo", "divergence", "feedback_loss", "hinted", "leaked", "predictions"]


def feedback_loss(
    student: Float[Tensor, "*batch V"],
    teacher: Float[Tensor, "*batch V"],
    weight: Shaped[Tensor, "*batch"],
    *,
    budget: int | float,
    kind: str = "reverse",
    top_k: int | None = None,
) -> Float[Tensor, ""]:
    """The loss (1) of all ranks' tokens, the same on every rank, from this rank's. ValueError as in `ref`."""
    return total(ref.feedback_loss(student, teacher, weight, budget=budget, kind=kind, top_k=top_k))


def predictions(
    student: Float[Tensor, "T D"], teacher: Float[Tensor, "U D"], where: Hinted, *, rows: tuple[int, int] = (1, 1)
) -> tuple[Float[Tensor, "n D"], Float[Tensor, "n D"]]:
    """`ref.textual_feedback.predictions` of this rank's distilled tokens, in their order (`own`), from this rank's chunks of both sequences. The
    teacher's part comes from the cp ranks that have it, and is detached.

    `rows`: how many packed rows `student` and `teacher` hold, one behind the other; positions of `where` then count through all of them.
    Raises ValueError as in `ref`, and for lengths that cannot be rows of two chunks on each rank."""
    cp = current().group("cp")
    expect("student", student, "float", "T", "D")
    expect("teacher", teacher, "float", "U", student.shape[1])
    sides, chunks = (("student", student, where.student), ("teacher", teacher, where.teacher)), 2 if cp.size > 1 else 1
    for (name, found, wanted), n in zip(sides, rows, strict=True):
        if len(found) % (chunks * n) if n else len(found):
            raise ValueError(f"{name} must hold {n} rows of equal length, with {chunks} chunks of each on this rank; got {len(found)} positions")
        if len(wanted) and len(found) * cp.size < int(wanted.max()):
            raise ValueError(f"{name} must have at least {int(wanted.max())} positions; got {len(found) * cp.size}")
    if cp.size == 1 or not len(where.student):
        return student[where.student - 1], teacher[where.teacher - 1].detach()
    (to, here), (at, there) = (owners(wanted - 1, len(found) // n * cp.size) for (_, found, wanted), n in zip(sides, rows, strict=True))
    mine, held = (to == cp.rank).nonzero()[:, 0], (at == cp.rank).nonzero()[:, 0]
    out = held[to[held].argsort(stable=True)]  # by their receiver, and for each in the order of tokens
    came = moved(teacher.detach()[there[out]], counts(to[held]), counts(at[mine]), cp)
    return student[here[mine]], came[at[mine].argsort(stable=True).argsort()]  # they come by their sender


def own(where: Hinted, width: int) -> Int[Tensor, " n"]:
    """Which of the distilled tokens are this rank's, in their order: those whose prediction by the student is here, in packed rows of `width`."""
    return (owners(where.student - 1, width)[0] == current().group("cp").rank).nonzero()[:, 0]


def owners(at: Int[Tensor, " n"], width: int) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
    """The cp rank that has each position of packed rows of `width` tokens, and the position in its part; both flattened (`runtime/cut.py`)."""
    cp = current().group("cp").size
    if cp == 1:
        return torch.zeros_like(at), at
    size = width // (2 * cp)
    chunk = at % width // size
    late = chunk >= cp
    return torch.where(late, 2 * cp - 1 - chunk, chunk), (at // width * 2 + late) * size + at % size


def counts(ranks: Int[Tensor, " n"]) -> list[int]:
    """How many of these there are of each cp rank."""
    return ranks.bincount(minlength=current().group("cp").size).tolist()


def packed(found: Sequence[Hinted], starts: Int[Tensor, " S"], length: int) -> tuple[Hinted, Int[Tensor, "R U"]]:
    """Segments of this dp rank together: the teacher's sequences in R rows of `length` tokens, R the same on all dp ranks, with positions
    that count through all rows, and the number of the segment for each of the teacher's tokens (−1 for padding).

    `starts`: where the segments begin in the student's rows, flattened. A segment without a distilled token has no teacher's sequence. Raises
    ValueError, on every dp rank, if a sequence is longer than a row."""
    some = [number for number, one in enumerate(found) if len(one.student)]
    sizes, device = torch.tensor([len(found[number].tokens) for number in some], dtype=torch.long), current().device
    longest = int(most((sizes.max() if some else torch.tensor(0)).to(device), "dp"))
    if longest > length:
        raise ValueError(f"length must hold a segment with its hints, {longest} tokens; got {length}")
    row, start = in_rows(sizes, length)
    R = int(most((row.max() + 1 if some else torch.tensor(0)).to(device), "dp"))
    begin = (row * length + start).tolist()
    tokens, doc = torch.zeros(R * length, dtype=torch.long), torch.full((R * length,), -1)
    for number, at, size in zip(some, begin, sizes.tolist(), strict=True):
        tokens[at : at + size], doc[at : at + size] = found[number].tokens, number
    none = torch.zeros(0, dtype=torch.long)
    student = torch.cat([none, *(found[number].student.cpu() + int(starts[number]) for number in some)])
    teacher = torch.cat([none, *(found[number].teacher.cpu() + at for number, at in zip(some, begin, strict=True))])
    order = student.argsort()
    return Hinted(tokens, student[order], teacher[order]), doc.view(R, length)


def within(where: Hinted, first: int, end: int) -> Hinted:
    """The distilled tokens at the student's positions [first, end), counted from `first`; the teacher's stay."""
    some = (where.student >= first) & (where.student < end)
    return Hinted(where.tokens, where.student[some] - first, where.teacher[some])


@torch.no_grad()
def teach(model: Transformer, where: Hinted, doc: Int[Tensor, "R U"], micro_rows: int = 1) -> Float[Tensor, "m D"]:
    """Hidden states of the teacher's packed rows at this rank's tokens, m = R·U/cp, without gradient; `micro_rows` rows in a forward pass."""
    here, device = places(doc.shape[1]), current().device
    ids, doc = (x.view_as(doc)[:, here].to(device) for x in (where.tokens, doc))
    parts = [
        model(ids[first : first + micro_rows], doc=doc[first : first + micro_rows], logits=False).hidden for first in range(0, len(doc), micro_rows)
    ]
    return torch.cat(parts).flatten(0, 1) if parts else torch.zeros(0, model.config.hidden_size, dtype=model.norm.weight.dtype, device=device)


def head_loss(
    model: Transformer,
    student: Float[Tensor, "n D"],
    teacher: Float[Tensor, "n D"],
    weight: Shaped[Tensor, " n"],
    *,
    budget: int | float,
    kind: str = "reverse",
    top_k: int | None = None,
    chunk: int = 512,
) -> Float[Tensor, ""]:
    """`feedback_loss` from the hidden states of this rank's tokens. The head runs on `chunk` of them at a time, and once more in the backward pass,
    so that the logits of all never exist together. ValueError as in `ref`."""
    expect("student", student, "float", "n", model.config.hidden_size)
    expect("teacher", teacher, "float", *student.shape)
    expect("weight", weight, "any", len(student))

    def part(student: Tensor, teacher: Tensor, weight: Tensor) -> Tensor:
        with torch.no_grad():
            told = model.head(teacher)
        return ref.feedback_loss(model.head(student), told, weight, budget=budget, kind=kind, top_k=top_k)

    counted = (x[weight != 0].split(chunk) for x in (student, teacher, weight))
    return total(torch.stack([checkpoint(part, *block, use_reentrant=False) for block in zip(*counted, strict=True)]).sum())
