"""Every way to lay out one, two and four ranks, and how a call is made on them."""

import numpy as np
import torch
from hypothesis import strategies as st

from scaled.runtime.mesh import mesh
from tests.mirror.workers import ranks

LAYOUTS = {
    n: [dict(dp=n // cp, cp=cp, ep=ep) for cp in (1, 2, 4) if n % cp == 0 for ep in (1, 2, 4) if n % ep == 0]
    for n in (1, 2, 4)
}
EVERY = [layout for layouts in LAYOUTS.values() for layout in layouts]
NAMES = ["-".join(f"{axis}{size}" for axis, size in layout.items()) for layout in EVERY]

layouts = st.sampled_from(EVERY)
seeds = st.integers(0, 2**31 - 1)


def play(layout: dict, call, *args):
    """call(*args) on the ranks of a layout; what rank 0 returned, once all are seen to have returned the same."""
    n = layout["dp"] * layout["cp"]
    if n == 1:
        with mesh(**layout):
            return call(*args)
    first, *others = ranks(n).run(layout, call, *args)
    for rank, other in enumerate(others, 1):
        assert same(first, other), f"rank {rank} returned something else than rank 0"
    return first


def same(a, b) -> bool:
    """Equal to the last bit, NaN like NaN."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


def close(found, wanted, scale: float = 1.0) -> None:
    """Within 1e-10 of the largest value, in float64: sums in another order, and nothing else."""
    found, wanted = (
        np.asarray(x.detach() if isinstance(x, torch.Tensor) else x, dtype=np.float64) for x in (found, wanted)
    )
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    limit = 1e-10 * max(scale, float(np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0)))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=limit)
