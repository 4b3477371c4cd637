"""Gaps and steps under zstd, as `ref/weight_codec.py` packs them."""

import numpy as np
import torch

from ref.weight_codec import apply_delta, encode_delta, pack, unpack


def weights(bits):
    return torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)


def encode(old, new):
    positions, steps = encode_delta(weights(old), weights(new))
    return pack(positions, steps, len(old), level=19)


def decode(old, delta):
    new = apply_delta(weights(old), *unpack(delta, len(old)))
    return new.view(torch.int16).numpy().view(np.uint16)
