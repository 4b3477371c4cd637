"""A checkpoint stored as its difference from the one in the folder above: every bfloat16 weight as a step from the
other's.

    config.json, tokenizer.json, …    a Hugging Face folder without its weights
    weights.delta                     network, then draft layers: the codec of `ref/weight_codec.py`, with which weights
                                      travel to samplers
    weights.json                      the digest of the weights that it makes

A difference must be applied to exactly its base, so the digest is checked whenever the weights are read. `network` and
`drafts` read either kind of folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from kit.disk import atomic_write, read_json
from kit.settings import RunError
from ref.mtp import MTP, MTPConfig
from ref.network import Transformer, load_extra, load_hf
from ref.weight_codec import SyncError, apply_delta, encode_delta, pack, unpack

__all__ = ["DELTA", "drafts", "is_stored", "network", "store"]

DELTA, DIGEST = "weights.delta", "weights.json"
LEVEL = 19
"""Of zstd: it is written once."""
PREFIX = "mtp."
"""In front of the names of draft layers, where a checkpoint stores them."""


def is_stored(folder: Path) -> bool:
    """Whether a folder holds a difference."""
    return (folder / DELTA).is_file()


def network(folder: Path, layers: MTPConfig) -> Transformer:
    """A checkpoint's network in float32. `layers`: the shape of its draft layers. Raises RunError for a difference that
    does not fit its base."""
    return restore(folder, layers)[0] if is_stored(folder) else load_hf(folder)


def drafts(folder: Path, layers: MTPConfig) -> MTP | None:
    """A checkpoint's draft layers in float32; None where it has none. Raises RunError as `network`, and for layers of
    another shape."""
    return restore(folder, layers)[1] if is_stored(folder) else load_drafts(folder, load_hf(folder), layers)


def load_drafts(folder: Path, model: Transformer, layers: MTPConfig) -> MTP | None:
    """The draft layers in a Hugging Face folder, on top of its network."""
    if not (extra := load_extra(folder)):
        return None
    mtp = MTP(model.config, layers)
    try:
        mtp.load_state_dict({name.removeprefix(PREFIX): x for name, x in extra.items()})
    except RuntimeError:
        raise RunError(f"the draft layers in {folder} do not have the shape of its run's settings: {layers}") from None
    return mtp


def store(
    folder: Path, model: Transformer, mtp: MTP | None, layers: MTPConfig, sidecar_files: Mapping[str, bytes]
) -> None:
    """Writes what leads from the checkpoint in the folder above to this network and its draft layers, and the files
    `sidecar_files`. Raises RunError if the two have other shapes."""
    base, weights = flatten_weights(*load_checkpoint(folder.parent, layers)), flatten_weights(model, mtp)
    if len(base) != len(weights):
        raise RunError(
            f"{folder.parent} has {len(base):,} weights, but the difference stored in {folder.name} "
            f"has {len(weights):,}"
        )
    folder.mkdir(parents=True)
    for name, data in sidecar_files.items():
        atomic_write(folder / name, data)
    atomic_write(folder / DELTA, pack(*encode_delta(base, weights), len(base), LEVEL))
    atomic_write(
        folder / DIGEST,
        json.dumps({"dtype": "bfloat16", "base": "..", "sha256": hash_weights(weights)}, indent=1) + "\n",
    )


def restore(folder: Path, layers: MTPConfig) -> tuple[Transformer, MTP | None]:
    """The checkpoint that a difference makes of the one above."""
    model, mtp = load_checkpoint(folder.parent, layers)
    files = (
        *sorted(folder.parent.glob("*.safetensors")),
        *sorted(folder.parent.glob("mtp/*.safetensors")),
        folder / DELTA,
        folder / DIGEST,
    )
    weights, offset = (
        load_weights(
            folder, layers, tuple((path.stat().st_mtime_ns, path.stat().st_size) for path in files if path.is_file())
        ),
        0,
    )
    with torch.no_grad():
        for parameter in list_parameters(model, mtp):
            parameter.copy_(weights[offset : offset + parameter.numel()].view_as(parameter))
            offset += parameter.numel()
    return model, mtp


@lru_cache(4)
def load_weights(folder: Path, layers: MTPConfig, file_stamps: tuple[tuple[int, int], ...]) -> Tensor:
    """All its weights as bfloat16, flat, until one of the files has changed: the explorer asks for them again and
    again."""
    base = flatten_weights(*load_checkpoint(folder.parent, layers))
    try:
        weights = apply_delta(base, *unpack((folder / DELTA).read_bytes(), len(base)))
        expected_digest = read_json(folder / DIGEST)["sha256"]
    except (SyncError, ValueError, LookupError, TypeError, OSError) as error:
        raise RunError(
            f"{folder} contains no difference from the checkpoint above it ({error}); check both out again"
        ) from None
    if hash_weights(weights) != expected_digest:
        raise RunError(
            f"{folder} is the difference from another checkpoint than the one above it; check both out again"
        )
    return weights


def load_checkpoint(folder: Path, layers: MTPConfig) -> tuple[Transformer, MTP | None]:
    """Network and draft layers of a Hugging Face folder."""
    model = load_hf(folder)
    return model, load_drafts(folder, model, layers)


def list_parameters(*parts: nn.Module | None) -> list[Tensor]:
    """Of the network, then of its draft layers, in the order of their names."""
    return [x for part in parts if part is not None for _, x in sorted(part.named_parameters())]


def flatten_weights(*parts: nn.Module | None) -> Tensor:
    """All weights as bfloat16, flat."""
    return torch.cat([x.detach().to(torch.bfloat16).flatten() for x in list_parameters(*parts)])


def hash_weights(weights: Tensor) -> str:
    """Of their bits."""
    return hashlib.sha256(weights.view(torch.int16).numpy().tobytes()).hexdigest()
