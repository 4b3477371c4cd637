"""NVFP4 with a scale per token, as `ref/quant.py` rounds it: 4.5 bits and a float32 a token, so that the last block of
each keeps none."""

import numpy as np
import torch

from ref.quant import nvfp4_dequantize, nvfp4_quantize

CODED_WIDTH = 1008


def encode(x):
    packed, blocks, scale = nvfp4_quantize(torch.from_numpy(x[:, :CODED_WIDTH]))
    return b"".join(part.numpy().tobytes() for part in (packed, blocks, scale))


def decode(code, rows, width):
    data, decoded = np.frombuffer(code, dtype=np.uint8), np.zeros((rows, width), dtype=np.float32)
    cuts = np.cumsum([rows * CODED_WIDTH // 2, rows * CODED_WIDTH // 16])
    packed, blocks, scale = np.split(data.copy(), cuts)
    parts = torch.from_numpy(packed).view(rows, -1), torch.from_numpy(blocks).view(rows, -1)
    decoded[:, :CODED_WIDTH] = nvfp4_dequantize(
        *parts, torch.from_numpy(scale.view(np.float32).copy()).view(rows, 1)
    ).numpy()
    return decoded
