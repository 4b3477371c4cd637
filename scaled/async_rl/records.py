"""Finished groups as bytes: the rollouts with their tokens, log-probs, versions and experts, what they earned, their
hints, and their transcripts.

One safetensors file for a group. All segments of all chains are laid end to end; `segments` says how long each is and
which chain it belongs to. Reading one runs nothing, and gives back every bit. This is the checkpoint of a group: a
trainer that dies takes its groups from here, and a run can be trained again from its journal and these files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from kit.disk import parse_json
from ref.engine.sampler import Segment
from ref.rollout import Rollout
from ref.self_summary import Chain
from ref.textual_feedback import Hint
from ref.transcript import Call, Todo, Transcript, Turn

__all__ = ["oldest", "pack", "unpack"]

COLUMNS = ("tokens", "sampled", "logp", "version", "summary")
DTYPES = (torch.int64, torch.bool, torch.float32, torch.int64, torch.bool)


def pack(rollouts: Sequence[Rollout]) -> bytes:
    """A group's rollouts as the bytes of a safetensors file. Those whose environment failed are without tokens."""
    chains = [Chain() if rollout.failure else rollout.chain for rollout in rollouts]
    segments = [s for chain in chains for s in chain.segments]
    example = next((rollout for rollout in rollouts if not rollout.failure), Rollout(Chain()))
    metrics, terms = sorted(example.metrics), list(example.terms)
    tensors: dict[str, Tensor] = {
        name: torch.cat([torch.zeros(0, dtype=dtype), *(getattr(s, name).to(dtype) for s in segments)])
        for name, dtype in zip(COLUMNS, DTYPES, strict=True)
    }
    tensors["experts"] = (
        torch.cat([s.experts for s in segments]).to(torch.int16)
        if segments
        else torch.zeros(0, 0, 1, dtype=torch.int16)
    )
    rows = [(n, len(s.tokens), s.finished) for n, chain in enumerate(chains) for s in chain.segments]
    tensors["segments"] = torch.tensor(rows, dtype=torch.int64).view(-1, 3)
    tensors["chains"] = torch.tensor([(chain.finished, chain.saved) for chain in chains], dtype=torch.int64)
    missing_value = float("nan")
    tensors["terms"] = torch.tensor(
        [[missing_value if rollout.failure else rollout.terms[name] for name in terms] for rollout in rollouts],
        dtype=torch.float64,
    )
    tensors["metrics"] = torch.tensor(
        [[missing_value if rollout.failure else rollout.metrics[name] for name in metrics] for rollout in rollouts],
        dtype=torch.float64,
    )
    header: dict[str, Any] = {"metrics": metrics, "terms": terms, "failures": [rollout.failure for rollout in rollouts]}
    if any(rollout.hints for rollout in rollouts):
        header["hints"] = [
            [[astuple(hint) for hint in context_hints] for context_hints in rollout.hints] for rollout in rollouts
        ]
    if any(rollout.transcript for rollout in rollouts):
        header["transcripts"] = [rollout.transcript and asdict(rollout.transcript) for rollout in rollouts]
    # A single entry: safetensors writes several in any order, and equal groups must have equal bytes.
    return save({name: x.contiguous() for name, x in tensors.items()}, {"about": json.dumps(header)})


def unpack(data: bytes) -> list[Rollout]:
    """What `pack` was given, without messages and environments. Raises ValueError for bytes that are not such a
    file."""
    try:
        header = parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        tensors = load(data)
        if "rewards" in tensors:  # as earlier versions wrote it
            tensors |= {"terms": tensors["rewards"][:, None], "metrics": tensors["figures"]}
            header = {
                "metrics": parse_json(header["figures"]),
                "terms": ["reward"],
                "failures": [""] * len(tensors["rewards"]),
            }
        else:
            header = parse_json(header["about"])
        metrics, terms, failures = (header[name] for name in ("metrics", "terms", "failures"))
        rows = tensors["segments"].tolist()
        chains = [Chain([], bool(finished), saved) for finished, saved in tensors["chains"].tolist()]
        lengths = [length for _, length, _ in rows]
        columns = [tensors[name].split(lengths) for name in COLUMNS]
        experts = tensors["experts"].split([length - 1 for length in lengths])
        for (n, _, finished), tokens, sampled, logp, version, summary, segment_experts in zip(
            rows, *columns, experts, strict=True
        ):
            chains[n].segments.append(Segment(tokens, sampled, logp, version, segment_experts, bool(finished), summary))
        rollouts = []
        for chain, values, numbers, failure, hints, transcript in zip(
            chains,
            tensors["terms"].tolist(),
            tensors["metrics"].tolist(),
            failures,
            header.get("hints", [[]] * len(chains)),
            header.get("transcripts", [None] * len(chains)),
            strict=True,
        ):
            if not isinstance(failure, str):
                raise ValueError("a failure is no text")
            reward_parts = (dict(zip(terms, values, strict=True)), dict(zip(metrics, numbers, strict=True)))
            rollout = Rollout(chain, failure=failure) if failure else Rollout(chain, *reward_parts)
            rollout.hints = [[read_hint(*values) for values in context_hints] for context_hints in hints]
            rollout.transcript = None if transcript is None else read_transcript(transcript)
            rollouts.append(rollout)
        return rollouts
    except (SafetensorError, ValueError, KeyError, TypeError, IndexError, RuntimeError, RecursionError) as error:
        raise ValueError(f"not the record of a group: {error}") from None


def read_hint(at: int, tokens: Sequence[int], begin: int, end: int) -> Hint:
    """A hint from the values of its fields."""
    return Hint(int(at), tuple(int(token) for token in tokens), int(begin), int(end))


def read_transcript(values: Mapping[str, Any]) -> Transcript:
    """A transcript from its fields as JSON has them."""

    def read_call(fields: Mapping[str, Any]) -> Call:
        return Call(**{**fields, "tests": None if fields["tests"] is None else tuple(fields["tests"])})

    turns = tuple(
        Turn(turn["role"], turn["text"], tuple(read_call(call) for call in turn["calls"])) for turn in values["turns"]
    )
    return Transcript(**{**values, "turns": turns, "todos": tuple(Todo(**todo) for todo in values["todos"])})


def oldest(rollouts: Sequence[Rollout], serving: int) -> int:
    """The version of the group's oldest token, in rollouts whose environment did not fail; `serving` if there is
    none."""
    segments = (s for rollout in rollouts if not rollout.failure for s in rollout.chain.segments)
    return min((int(s.version[s.sampled].min()) for s in segments if bool(s.sampled.any())), default=serving)
