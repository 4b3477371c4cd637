"""Finished groups as bytes: the rollouts with their tokens, log-probs, versions and experts, and what they earned.

One safetensors file for a group. All segments of all chains are laid end to end; `segments` says how long each is and which chain it belongs to.
Reading one runs nothing, and gives back every bit. This is the checkpoint of a group: a trainer that dies takes its groups from here, and a run
can be trained again from its journal and these files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from kit.disk import parse_json
from ref.rl import Played
from ref.self_summary import Chain, Segment

__all__ = ["oldest", "pack", "unpack"]

COLUMNS = ("tokens", "sampled", "logp", "version", "summary")
DTYPES = (torch.int64, torch.bool, torch.float32, torch.int64, torch.bool)


def pack(played: Sequence[Played]) -> bytes:
    """A group's rollouts, at least one, as the bytes of a safetensors file."""
    chains = [p.chain for p in played]
    segments = [s for chain in chains for s in chain.segments]
    names = sorted(played[0].figures)
    tensors: dict[str, Tensor] = {
        name: torch.cat([getattr(s, name) for s in segments]).to(dtype) for name, dtype in zip(COLUMNS, DTYPES, strict=True)
    }
    tensors["experts"] = torch.cat([s.experts for s in segments]).to(torch.int16)
    rows = [(n, len(s.tokens), s.finished) for n, chain in enumerate(chains) for s in chain.segments]
    tensors["segments"] = torch.tensor(rows, dtype=torch.int64)
    tensors["chains"] = torch.tensor([(chain.finished, chain.saved) for chain in chains], dtype=torch.int64)
    tensors["rewards"] = torch.tensor([p.reward for p in played], dtype=torch.float64)
    tensors["figures"] = torch.tensor([[p.figures[name] for name in names] for p in played], dtype=torch.float64)
    return save({name: x.contiguous() for name, x in tensors.items()}, {"figures": json.dumps(names)})


def unpack(data: bytes) -> list[Played]:
    """What `pack` was given. Raises ValueError for bytes that are not such a file."""
    try:
        names = parse_json(parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["figures"])
        tensors = load(data)
        rows = tensors["segments"].tolist()
        chains = [Chain([], bool(finished), saved) for finished, saved in tensors["chains"].tolist()]
        lengths = [length for _, length, _ in rows]
        columns = [tensors[name].split(lengths) for name in COLUMNS]
        experts = tensors["experts"].split([length - 1 for length in lengths])
        for (n, _, finished), tokens, sampled, logp, version, summary, chosen in zip(rows, *columns, experts, strict=True):
            chains[n].segments.append(Segment(tokens, sampled, logp, version, chosen, bool(finished), summary))
        earned = zip(chains, tensors["rewards"].tolist(), tensors["figures"].tolist(), strict=True)
        return [Played(chain, reward, dict(zip(names, some, strict=True))) for chain, reward, some in earned]
    except (SafetensorError, ValueError, KeyError, TypeError, IndexError, RuntimeError, RecursionError) as error:
        raise ValueError(f"not the record of a group: {error}") from None


def oldest(played: Sequence[Played]) -> int:
    """The version of the group's oldest token."""
    return min(int(s.version[s.sampled].min()) for p in played for s in p.chain.segments if bool(s.sampled.any()))
