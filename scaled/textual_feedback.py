"""Targeted textual feedback on many ranks: `ref/textual_feedback.py`, which has the formula, the traps and the
glossary.

What is distributed, and what must be sent or summed over ranks:

    segments             over dp      a segment and its teacher's sequence are on one dp rank, and so are its hints
    tokens of a row      over cp      two chunks of each packed row, of the student's rows and of the teacher's
                                      (`runtime/cut.py`)
    a distilled token    over cp      belongs to the rank that has the student's prediction of it
    teacher's rows       over cp      are sent to that rank, without gradient
    the loss             everywhere   Σ over ranks; the caller passes one `budget`

The teacher's sequence is longer by the hint, and it ends with its last distilled token. So it needs rows of its own,
and the two predictions of a token are in different chunks, in general on different ranks. The teacher's goes to the
student's, because it takes no gradient back. Every cp rank knows `where`, so the ranks need not tell each other how
many rows come.

One step, on every rank together; `starts` says where the segments begin in the student's packed rows, flattened

    where, doc = packed([hinted(segment, hints), …], starts, length)     positions in packed rows; the teacher's rows
    teacher_states = teach(model, where, doc)                            its hidden states
    out = model(ids, doc=…, logits=False)                                the student's, for rows [first, end) of T
                                                                         tokens
    hinted_tokens = within(where, first · T, end · T)
    pair = predictions(out.hidden.flatten(0, 1), teacher_states, hinted_tokens, rows=(end − first, len(doc)))
    loss = head_loss(model, *pair, weight[own(hinted_tokens, T)], budget=…)       plus the policy loss

Two traps
a. `where` holds the distilled tokens of a dp rank, and its cp ranks all have it. Their number in a step is the sum over
   dp, not over all ranks.
b. FSDP gathers weights in every forward pass, so all ranks must make the same number of them. `pack_hinted` gives all
   dp ranks equally many rows of the teacher; the cost of a segment that has a hint is that of both passes
   (`scaled.packing.balance`).
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
from scaled.packing import rows as pack_rows
from scaled.runtime.comm import all_reduce_max, moved, total
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
    # Eq. 1 (ref/textual_feedback.py): (1/budget) Σ w_t · D_t, summed over ranks.
    return total(ref.feedback_loss(student, teacher, weight, budget=budget, kind=kind, top_k=top_k))


def predictions(
    student: Float[Tensor, "T D"],
    teacher: Float[Tensor, "U D"],
    hinted_sequence: Hinted,
    *,
    rows: tuple[int, int] = (1, 1),
) -> tuple[Float[Tensor, "n D"], Float[Tensor, "n D"]]:
    """`ref.textual_feedback.predictions` of this rank's distilled tokens, in their order (`own`), from this rank's
    chunks of both sequences. The teacher's part comes from the cp ranks that have it, and is detached.

    `rows`: how many packed rows `student` and `teacher` hold, one behind the other; positions of `hinted_sequence` then
    count through all of them. Raises ValueError as in `ref`, and for lengths that cannot be rows of two chunks on each
    rank."""
    cp = current().group("cp")
    expect("student", student, "float", "T", "D")
    expect("teacher", teacher, "float", "U", student.shape[1])
    sides, chunks = (
        (("student", student, hinted_sequence.student), ("teacher", teacher, hinted_sequence.teacher)),
        2 if cp.size > 1 else 1,
    )
    for (name, states, positions), n in zip(sides, rows, strict=True):
        if len(states) % (chunks * n) if n else len(states):
            raise ValueError(
                f"{name} must hold {n} rows of equal length, with {chunks} chunks of each on this "
                f"rank; got {len(states)} positions"
            )
        if len(positions) and len(states) * cp.size < int(positions.max()):
            raise ValueError(f"{name} must have at least {int(positions.max())} positions; got {len(states) * cp.size}")
    if cp.size == 1 or not len(hinted_sequence.student):
        return student[hinted_sequence.student - 1], teacher[hinted_sequence.teacher - 1].detach()
    (student_rank, student_place), (teacher_rank, teacher_place) = (
        owners(positions - 1, len(states) // n * cp.size) for (_, states, positions), n in zip(sides, rows, strict=True)
    )
    receive_ids, send_ids = (student_rank == cp.rank).nonzero()[:, 0], (teacher_rank == cp.rank).nonzero()[:, 0]
    # By their receiver, and for each in the order of tokens.
    send_order = send_ids[student_rank[send_ids].argsort(stable=True)]
    teacher_rows = moved(
        teacher.detach()[teacher_place[send_order]],
        counts(student_rank[send_ids]),
        counts(teacher_rank[receive_ids]),
        cp,
    )
    # They come by their sender.
    return student[student_place[receive_ids]], teacher_rows[teacher_rank[receive_ids].argsort(stable=True).argsort()]


def own(hinted_tokens: Hinted, width: int) -> Int[Tensor, " n"]:
    """Which of the distilled tokens are this rank's, in their order: those whose prediction by the student is here, in
    packed rows of `width`."""
    return (owners(hinted_tokens.student - 1, width)[0] == current().group("cp").rank).nonzero()[:, 0]


def owners(at: Int[Tensor, " n"], width: int) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
    """The cp rank that has each position of packed rows of `width` tokens, and the position in its part; both flattened
    (`runtime/cut.py`)."""
    cp = current().group("cp").size
    if cp == 1:
        return torch.zeros_like(at), at
    size = width // (2 * cp)
    chunk = at % width // size
    is_late = chunk >= cp
    return torch.where(is_late, 2 * cp - 1 - chunk, chunk), (at // width * 2 + is_late) * size + at % size


def counts(ranks: Int[Tensor, " n"]) -> list[int]:
    """How many of these there are of each cp rank."""
    return ranks.bincount(minlength=current().group("cp").size).tolist()


def pack_hinted(
    segments: Sequence[Hinted], starts: Int[Tensor, " S"], length: int
) -> tuple[Hinted, Int[Tensor, "R U"]]:
    """Segments of this dp rank together: the teacher's sequences in R rows of `length` tokens, R the same on all dp
    ranks, with positions that count through all rows, and the number of the segment for each of the teacher's tokens
    (−1 for padding).

    `starts`: where the segments begin in the student's rows, flattened. A segment without a distilled token has no
    teacher's sequence. Raises ValueError, on every dp rank, if a sequence is longer than a row."""
    numbers = [number for number, segment in enumerate(segments) if len(segment.student)]
    sizes, device = (
        torch.tensor([len(segments[number].tokens) for number in numbers], dtype=torch.long),
        current().device,
    )
    longest = int(all_reduce_max((sizes.max() if numbers else torch.tensor(0)).to(device), "dp"))
    if longest > length:
        raise ValueError(f"length must hold a segment with its hints, {longest} tokens; got {length}")
    row, start = pack_rows(sizes, length)
    R = int(all_reduce_max((row.max() + 1 if numbers else torch.tensor(0)).to(device), "dp"))
    begin = (row * length + start).tolist()
    tokens, doc = torch.zeros(R * length, dtype=torch.long), torch.full((R * length,), -1)
    for number, at, size in zip(numbers, begin, sizes.tolist(), strict=True):
        tokens[at : at + size], doc[at : at + size] = segments[number].tokens, number
    none = torch.zeros(0, dtype=torch.long)
    student = torch.cat([none, *(segments[number].student.cpu() + int(starts[number]) for number in numbers)])
    teacher = torch.cat(
        [none, *(segments[number].teacher.cpu() + at for number, at in zip(numbers, begin, strict=True))]
    )
    order = student.argsort()
    return Hinted(tokens, student[order], teacher[order]), doc.view(R, length)


def select_range(hinted_tokens: Hinted, first: int, end: int) -> Hinted:
    """The distilled tokens at the student's positions [first, end), counted from `first`; the teacher's stay."""
    mask = (hinted_tokens.student >= first) & (hinted_tokens.student < end)
    return Hinted(hinted_tokens.tokens, hinted_tokens.student[mask] - first, hinted_tokens.teacher[mask])


@torch.no_grad()
def compute_teacher_states(
    model: Transformer, hinted_tokens: Hinted, doc: Int[Tensor, "R U"], micro_rows: int = 1
) -> Float[Tensor, "m D"]:
    """Hidden states of the teacher's packed rows at this rank's tokens, m = R·U/cp, without gradient; `micro_rows` rows
    in a forward pass."""
    cp_positions, device = places(doc.shape[1]), current().device
    ids, doc = (x.view_as(doc)[:, cp_positions].to(device) for x in (hinted_tokens.tokens, doc))
    parts = [
        model(ids[first : first + micro_rows], doc=doc[first : first + micro_rows], logits=False).hidden
        for first in range(0, len(doc), micro_rows)
    ]
    return (
        torch.cat(parts).flatten(0, 1)
        if parts
        else torch.zeros(0, model.config.hidden_size, dtype=model.norm.weight.dtype, device=device)
    )


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
    """`feedback_loss` from the hidden states of this rank's tokens. The head runs on `chunk` of them at a time, and
    once more in the backward pass, so that the logits of all never exist together. ValueError as in `ref`."""
    expect("student", student, "float", "n", model.config.hidden_size)
    expect("teacher", teacher, "float", *student.shape)
    expect("weight", weight, "any", len(student))

    def chunk_loss(student: Tensor, teacher: Tensor, weight: Tensor) -> Tensor:
        with torch.no_grad():
            teacher_logits = model.head(teacher)
        # Eq. 1 (ref/textual_feedback.py), for a chunk of this rank's tokens.
        return ref.feedback_loss(model.head(student), teacher_logits, weight, budget=budget, kind=kind, top_k=top_k)

    columns = (x[weight != 0].split(chunk) for x in (student, teacher, weight))
    return total(
        torch.stack([checkpoint(chunk_loss, *block, use_reentrant=False) for block in zip(*columns, strict=True)]).sum()
    )
