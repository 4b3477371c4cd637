"""Rows of packed sequences: where each lies, the mask that keeps them apart, and what becomes of them without it."""

from functools import lru_cache

import torch
from torch import Tensor

from etude.explorer.page import COLOURS
from etude.explorer.spans import tint
from ref import packing
from ref.network import Config, Transformer
from ref.network.model import visible

__all__ = ["colour_of", "place_sequences", "mask", "mask_drawn", "pairs", "rows_drawn", "seen_by_strangers"]

CELLS = 40
"""Cells on a side of the drawn mask: each stands for as many tokens as fit."""
KINDS = tuple(colour for colour in COLOURS if colour != "grey")
MAX_ROWS = 24
"""Rows that are drawn."""


def place_sequences(lengths: Tensor, own: Tensor, width: int) -> list[dict]:
    """The sequences `own` (their numbers) in rows of `width` tokens: one dictionary for each, in the order of rows and
    places."""
    row, start = packing.rows(lengths[own], width)
    pieces = [
        {"row": r, "start": offset, "end": offset + size, "sequence": number, "tokens": size}
        for r, offset, size, number in zip(
            row.tolist(), start.tolist(), lengths[own].tolist(), own.tolist(), strict=True
        )
    ]
    return sorted(pieces, key=lambda piece: (piece["row"], piece["start"]))


def pairs(pieces: list[dict]) -> tuple[int, int]:
    """Pairs of query and key in a row that holds these sequences: those within a sequence, and those that there are
    without a mask."""
    token_count = sum(piece["tokens"] for piece in pieces)
    return sum(piece["tokens"] * (piece["tokens"] + 1) // 2 for piece in pieces), token_count * (token_count + 1) // 2


def mask(pieces: list[dict], width: int) -> list[list[str]]:
    """Who may look at whom in a row, CELLS × CELLS: "own", "stranger" (only without a mask), "padding" or "later"."""
    cell_tokens = max(1, width // CELLS)
    doc = packing.lay(
        [torch.full((piece["tokens"],), i) for i, piece in enumerate(pieces)],
        torch.zeros(len(pieces), dtype=torch.long),
        torch.tensor([piece["start"] for piece in pieces]),
        (1, width),
        -1,
    )[:, cell_tokens // 2 :: cell_tokens][:, :CELLS]
    T = doc.shape[1]
    sequence_mask, causal_mask = visible(T, 0, doc, doc.device), visible(T, 0, None, doc.device)
    assert sequence_mask is not None and causal_mask is not None
    is_token = (doc[0, :, None] >= 0) & (doc[0, None, :] >= 0)
    kinds = torch.where(~causal_mask[0, 0], 3, torch.where(~is_token, 2, torch.where(sequence_mask[0, 0], 0, 1)))
    return [[("own", "stranger", "padding", "later")[kind] for kind in row] for row in kinds.tolist()]


@lru_cache(1)
def seen_by_strangers() -> list[dict]:
    """What the mask is worth: three short sequences in one row of a small random network in float64, and how far, in
    nats, the log-probs of each are from those of the same sequence read alone."""
    torch.manual_seed(0)
    model = Transformer(Config.tiny(64, num_hidden_layers=1)).double().requires_grad_(False)
    sequences = [torch.randint(64, (T,)) for T in (9, 12, 8)]
    row, start = packing.rows(torch.tensor([len(ids) for ids in sequences]), 32)
    ids = packing.lay(sequences, row, start, (1, 32), 0)
    doc = packing.lay([torch.full((len(part),), i) for i, part in enumerate(sequences)], row, start, (1, 32), -1)
    masked_logprobs, unmasked_logprobs = (
        model(ids, doc=doc).logits.log_softmax(-1)[0],
        model(ids).logits.log_softmax(-1)[0],
    )
    rows = []
    for offset, part in sorted(zip(start.tolist(), sequences, strict=True), key=lambda pair: pair[0]):
        alone_logprobs, span = model(part[None]).logits.log_softmax(-1)[0], slice(offset, offset + len(part))
        distances = {
            name: (logprobs[span] - alone_logprobs).abs().max().item()
            for name, logprobs in (("with a mask", masked_logprobs), ("without", unmasked_logprobs))
        }
        rows.append({"sequence": f"{len(part)} tokens, from place {offset}", **distances})
    return rows


def colour_of(number: int) -> str:
    return COLOURS[KINDS[number % len(KINDS)]]


def rows_drawn(pieces: list[dict], width: int) -> str:
    """Rows as bars of HTML, a colour for each sequence; what is left empty is padding. MAX_ROWS rows at most."""
    bars, count = [], pieces[-1]["row"] + 1
    for row in range(min(count, MAX_ROWS)):
        row_pieces = [piece for piece in pieces if piece["row"] == row]
        parts = "".join(
            f'<span title="sequence {piece["sequence"] + 1}: {piece["tokens"]:,} tokens, '
            f'from place {piece["start"]:,}" style="position:absolute;'
            f"left:{100 * piece['start'] / width:.3f}%;width:{100 * piece['tokens'] / width:.3f}%;top:0;bottom:0;"
            f'background:{colour_of(piece["sequence"])};opacity:.75;box-shadow:inset -1px 0 white"></span>'
            for piece in row_pieces
        )
        style = f"position:relative;height:1.2rem;margin-bottom:3px;border:1px dashed {COLOURS['grey']}"
        bars.append(f'<div class="packed" title="padding" style="{style}">{parts}</div>')
    return "".join(bars) + (f"<div>and {count - MAX_ROWS} more</div>" if count > MAX_ROWS else "")


def mask_drawn(kinds: list[list[str]]) -> str:
    """Queries from top to bottom, keys from left to right."""
    looks = {
        "own": ("within a sequence", tint("blue", 0.75)),
        "stranger": (
            "across sequences, without a mask",
            f"background:repeating-linear-gradient(45deg,{COLOURS['orange']} 0 2px,transparent 2px 4px)",
        ),
        "padding": ("padding", tint("grey", 0.15)),
        "later": ("later token, always masked", ""),
    }
    cells = "".join(
        f'<span class="{kind}" title="{looks[kind][0]}" style="{looks[kind][1]}"></span>'
        for row in kinds
        for kind in row
    )
    key = " &ensp; ".join(
        f'<span style="{style};display:inline-block;width:1em;height:1em;vertical-align:-.15em"></span> {label}'
        for kind, (label, style) in looks.items()
        if kind != "later"
    )
    shape = (
        f"display:grid;grid-template-columns:repeat({len(kinds)},1fr);max-width:26rem;aspect-ratio:1;"
        f"border:1px solid {COLOURS['grey']}"
    )
    return f'<div style="font-size:.85rem;margin-bottom:.4rem">{key}</div><div style="{shape}">{cells}</div>'
