"""Matrices whose blocks are hard to quantise."""

import torch

from ref.formats import e4m3_decode

E4M3 = e4m3_decode(torch.arange(0x7F, dtype=torch.uint8)).tolist()
"""The sizes of E4M3 by code."""


def neighbours(x, dtype):
    """Numbers, the next larger ones and the next smaller ones of a dtype."""
    x = x.to(dtype)
    whole = x.view(torch.int16 if dtype == torch.bfloat16 else torch.int32)
    return torch.cat([x, (whole + 1).view(dtype), (whole - 1).view(dtype)]).float()


def ties(values, largest, size, dtype, generator):
    """[32, 8 · size]: every midpoint of a format and its neighbours, with signs, times a power of two per row, in
    blocks that their largest number leads. For NVFP4 a row begins with 448 times the largest number of E2M1, so that
    its float32 scale is a power of two."""
    values, shape = torch.tensor(values), (32, 8, size)
    near = neighbours((values[1:] + values[:-1]) / 2, dtype)
    x = near[torch.randint(len(near), shape, generator=generator)] * (
        torch.randint(2, shape, generator=generator) * 2 - 1
    )
    x[:, :, 0] = largest
    if largest == 6:
        x[:, 0] = 0
        x[:, 0, 0] = 2688
    return (x.flatten(1) * torch.exp2(torch.randint(-20, 20, (32, 1), generator=generator).float())).to(dtype)


def hard(size, dtype, generator):
    """[size, 1024], 1024 blocks of `size`, each of its own kind: any numbers, any bits, subnormal numbers, zeros of
    both signs, the edges of scales; and NaN and infinities in every fourth row."""
    shape = (size, 1024 // size, size)

    def random(low, high, *of):
        return torch.randint(low, high, of or shape, generator=generator)

    sign, spread = 1.0 - 2 * random(0, 2), torch.exp2(random(-140, 127, *shape[:2], 1).float())
    edges = neighbours(torch.tensor([448.0, 1.75, 1.875, 1.0, 6.0, 3.5, 2688.0]), torch.float32)
    kinds = [
        torch.randn(shape, generator=generator) * spread,
        random(-(2**31), 2**31).int().view(torch.float32),
        random(0, 2**23).int().view(torch.float32) * sign,
        torch.zeros(shape) * sign,
        edges[random(0, len(edges))] * spread.clamp(max=2.0**100) * sign,
    ]
    which = random(0, len(kinds), *shape[:2], 1).expand(shape)
    x = torch.stack(kinds).gather(0, which[None])[0].flatten(1)
    x = torch.where(x.isfinite(), x, 1.0)
    lost = torch.tensor([torch.nan, torch.inf, -torch.inf])[random(0, 3, *x.shape)]
    x[::4] = torch.where(torch.rand(x.shape, generator=generator) < 1 / 100, lost, x)[::4]
    return x.to(dtype)


def every_bfloat16():
    return (torch.arange(65536) << 16).int().view(torch.float32).view(64, 1024)
