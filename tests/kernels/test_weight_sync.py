"""Weight deltas: whatever the bits, what is sent rebuilds the new version; the kernel sends what the reference
sends."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import weight_sync as kernels
from ref import weight_sync as ref
from scaled import weight_sync as scaled
from scaled.runtime import engine

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def bits(x):
    return x.cpu().view(torch.int16)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_bits_come_back(data):
    """Random bits, NaN payloads, infinities and zeros of both signs among them; any share of changes."""
    shape = data.draw(st.lists(st.integers(0, 60), min_size=1, max_size=2))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**20)))
    old, other = (torch.randint(-(2**15), 2**15, shape, generator=generator).to(torch.int16) for _ in range(2))
    special = torch.tensor([0, -(2**15), 0x7FC0, 0x7FC1, 0x7F80, -0x40], dtype=torch.int16)
    other = torch.where(
        torch.rand(shape, generator=generator) < 0.2, special[torch.randint(0, 6, shape, generator=generator)], other
    )
    changed = torch.rand(shape, generator=generator) < data.draw(st.sampled_from([0.0, 0.01, 0.5, 1.0]))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16]))
    old, new = old.view(dtype), torch.where(changed, other, old).view(dtype)
    positions, steps = ref.encode_delta(old, new)
    assert torch.equal(bits(ref.apply_delta(old, positions, steps)), bits(new))
    assert positions.tolist() == (bits(old).flatten() != bits(new).flatten()).nonzero()[:, 0].tolist()
    ours = kernels.encode_delta(old.to(DEVICE), new.to(DEVICE))
    assert torch.equal(ours[0].cpu(), positions) and torch.equal(ours[1].cpu(), steps)
    assert torch.equal(bits(kernels.apply_delta(old.to(DEVICE), *ours)), bits(new))


def test_many_blocks_and_views():
    old = torch.randn(70, 61).bfloat16()
    new = old.clone()
    new[::7, ::3] += 1
    for a, b in ((old, new), (old.T, new.T), (old[::2], new[::2])):
        theirs, ours = ref.encode_delta(a, b), kernels.encode_delta(a.to(DEVICE), b.to(DEVICE))
        assert all(torch.equal(x, y.cpu()) for x, y in zip(theirs, ours, strict=True))
        assert torch.equal(kernels.apply_delta(a.to(DEVICE), *ours).cpu(), b)


def test_minus_zero_is_a_change_and_nan_is_none():
    old = torch.tensor([0.0, float("nan"), 1.0]).bfloat16()
    new = torch.tensor([-0.0, float("nan"), 1.0]).bfloat16()
    assert ref.encode_delta(old, new)[0].tolist() == [0]


WRONG = {
    "dtype": (lambda m: m.encode_delta(torch.zeros(2), torch.zeros(2)), "old and new must be bfloat16 or float16"),
    "steps": (
        lambda m: m.apply_delta(torch.zeros(2).bfloat16(), torch.tensor([0]), torch.zeros(1).long()),
        "steps must be torch.int32",
    ),
    "positions": (
        lambda m: m.apply_delta(torch.zeros(2).bfloat16(), torch.tensor([2]), torch.zeros(1).int()),
        "positions must lie in the 2",
    ),
}


@pytest.mark.parametrize("module", [ref, kernels], ids=["ref", "kernel"])
@pytest.mark.parametrize("call, says", WRONG.values(), ids=WRONG)
def test_bad_input(call, says, module):
    with pytest.raises(ValueError, match=says):
        call(module)


def test_a_chain_through_the_kernels(monkeypatch):
    """Where a kernel can run, writer and reader take it, and the store holds the same bytes as without."""
    called, stores = [], []
    for interpreted in (False, True):
        device = DEVICE if interpreted else "cpu"
        monkeypatch.setattr(engine, "INTERPRETED", interpreted)
        monkeypatch.setattr(scaled, "kernel", lambda name: called.append(name) or kernels)
        store, weights = {}, torch.randn(40, 30, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
        writer, served = scaled.Writer(store), torch.zeros(40, 30, device=device).bfloat16()
        reader = scaled.Reader(store, [scaled.Part("w", (40, 30), 0, served)])
        for version in range(3):
            weights[version::7, ::3] *= -2  # the same bits on any device
            writer.publish(version, [scaled.Part("w", (40, 30), 0, weights)])
            reader.fetch()
            reader.swap()
            assert torch.equal(bits(served), bits(weights))
        assert ("weight_sync" in called) == interpreted
        stores.append(store)
    assert stores[0] == stores[1]
