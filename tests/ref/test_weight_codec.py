"""The codec of weight deltas: bits come back whatever they are, and bytes that are no delta are refused."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ref import weight_codec as codec
from ref.weight_codec import SyncError, apply_delta, encode_delta, merge_deltas, pack, pack_full, unpack, unpack_full

NAN, OTHER_NAN, MINUS_ZERO = 0x7FC0, 0x7FC1, -0x8000
SPECIAL = [0, MINUS_ZERO, NAN, OTHER_NAN, 0x7F80, -0x80, 1, MINUS_ZERO + 1, -1]


def made(dtype, *bits):
    return torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(dtype)


def bits(x):
    return x.view(torch.int16)


@st.composite
def versions(draw, n: int = 2):
    """Versions of the same weights: any bits, any share of changes."""
    size, generator = draw(st.integers(0, 200)), torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    found = [torch.randint(-(2**15), 2**15, (size,), generator=generator).to(torch.int16)]
    special = torch.tensor(SPECIAL, dtype=torch.int16)
    for _ in range(n - 1):
        other = torch.randint(-(2**15), 2**15, (size,), generator=generator).to(torch.int16)
        near = found[-1] + torch.randint(-2, 3, (size,), generator=generator).to(torch.int16)
        kind = torch.rand(size, generator=generator)
        other = torch.where(
            kind < 0.2, special[torch.randint(0, len(SPECIAL), (size,), generator=generator)], other
        ).where(kind < 0.5, near)
        changed = torch.rand(size, generator=generator) < draw(st.sampled_from([0.0, 0.02, 0.4, 0.6, 1.0]))
        found.append(torch.where(changed, other, found[-1]))
    return [x.view(torch.bfloat16) for x in found]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_changed_is_what_has_other_bits(dtype):
    """NaN stays NaN and is not sent; 0 → −0 is, and NaN → another NaN."""
    old = made(dtype, 0, 0, NAN, 0x7E00 + 1, 0x3C00, 5).view(2, 3)
    new = made(dtype, 0, MINUS_ZERO, NAN, 0x7E00 + 2, 0x3C00, OTHER_NAN).view(2, 3)
    positions, steps = encode_delta(old, new)
    assert positions.tolist() == [1, 3, 5] and positions.dtype == torch.int64
    assert steps.tolist() == [-1, 1, OTHER_NAN - 5] and steps.dtype == torch.int32
    before = old.clone()
    found = apply_delta(old, positions, steps)
    assert found.shape == old.shape and torch.equal(bits(found), bits(new))
    assert torch.equal(bits(old), bits(before)), "the old version stays as it is"


def test_steps_count_numbers():
    """256 and 258 are neighbours in bfloat16, and so are 1 and 1 + 2^−7; −2^−133 to 2^−133 are three steps, over −0 and
    0."""
    old, new = (
        torch.tensor([256.0, 1.0, -(2.0**-133), 1.0]).bfloat16(),
        torch.tensor([258.0, 1 + 2**-7, 2.0**-133, 0.5]).bfloat16(),
    )
    assert encode_delta(old, new)[1].tolist() == [1, 1, 3, -128]


def test_the_line_has_every_pattern_once_and_sorts_numbers():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    line = codec.ordered(every)
    assert sorted(line.tolist()) == sorted(every.tolist()) and torch.equal(codec.ordered(line), every)
    numbers = every.view(torch.bfloat16).float()
    finite = ~numbers.isnan()
    along = numbers[finite][line[finite].argsort()]
    assert bool((along[1:] >= along[:-1]).all())


@given(versions())
def test_bits_come_back(pair):
    old, new = pair
    delta = encode_delta(old, new)
    for level in (0, 1):
        where, steps = unpack(pack(*delta, len(old), level), len(old))
        assert torch.equal(where, delta[0]) and torch.equal(steps, delta[1])
        assert torch.equal(bits(apply_delta(old, where, steps)), bits(new))


@given(versions(5))
def test_merged_is_encoded_at_once(chain):
    """What cancels is gone: the merged delta is that of the first and the last version."""
    merged = merge_deltas([encode_delta(a, b) for a, b in zip(chain, chain[1:])])
    wanted = encode_delta(chain[0], chain[-1])
    assert torch.equal(merged[0], wanted[0]) and torch.equal(merged[1], wanted[1])


@given(st.lists(st.one_of(st.integers(0, 300), st.integers(0, 2**62)), max_size=50))
def test_varints(values):
    """Seven bits a byte, the lowest first, as a loop over bytes would write them; and all first bytes before all second
    ones."""
    wanted: list[list[int]] = [[]]
    for value in values:
        k = 0
        while True:
            if k == len(wanted):
                wanted.append([])
            wanted[k].append(value & 0x7F | (0x80 if value >= 0x80 else 0))
            if value < 0x80:
                break
            value, k = value >> 7, k + 1
    streams = codec.varint(np.array(values, dtype=np.int64))
    assert [x.tolist() for x in streams] == wanted and codec.unvarint(streams).tolist() == values


def test_sizes_by_hand():
    """Behind head and lengths: eight changed weights of 1000, a step each, take sixteen bytes; six of ten a bitmask of
    two bytes and six steps."""
    head, where = codec.HEAD.size + 16, torch.arange(0, 1000, 125)
    assert len(pack(where, torch.ones(8, dtype=torch.int32), 1000, 0)) == head + 16
    assert len(pack(torch.arange(6), torch.ones(6, dtype=torch.int32), 10, 0)) == head + 8
    assert len(pack(torch.arange(5), torch.full((5,), 64), 1000, 0)) == head + 8 + 15, (
        "a step of 64 takes two bytes: its sign is one bit"
    )


@pytest.mark.parametrize(("level", "crossing"), [(0, 0.125), (1, 0.18)])
def test_the_shorter_of_gaps_and_mask_is_taken(level, crossing):
    """Independent positions: a delta of twice as many changes as at the crossing has a mask, one of half as many has
    gaps."""
    drawn, n = torch.rand(200_000, generator=torch.Generator().manual_seed(0)), 200_000
    for share, kind in ((crossing / 2, "gap"), (2 * crossing, "mask")):
        where = (drawn < share).nonzero()[:, 0]
        found, _, first, _ = codec.unpack_streams(
            blob := pack(where, torch.ones(len(where), dtype=torch.int32), n, level)
        )
        assert found == kind, share
        assert len(blob) < codec.HEAD.size + 24 + 1.1 * (n / 8 + len(where)) and torch.equal(unpack(blob, n)[0], where)
        assert sum(map(len, first)) == (n // 8 if kind == "mask" else pytest.approx(len(where), rel=2e-3))


@given(versions())
def test_anchors(pair):
    blob = pack_full(pair, 1)
    found = unpack_full(blob, sum(map(len, pair)))
    assert torch.equal(bits(found), bits(torch.cat(pair)))
    with pytest.raises(SyncError, match="no anchor"):
        unpack_full(blob, 1 + sum(map(len, pair)))


@given(st.data())
def test_cut_or_changed_bytes_never_give_a_wrong_position(data):
    """A digest finds them first; without it, too, every answer is a delta of that many weights, or SyncError."""
    old, new = data.draw(versions())
    blob = bytearray(pack(*encode_delta(old, new), len(old), data.draw(st.sampled_from([0, 1]))))
    if data.draw(st.booleans()):
        del blob[data.draw(st.integers(0, len(blob) - 1)) :]
    else:
        blob[data.draw(st.integers(0, len(blob) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        where, steps = unpack(bytes(blob), len(old))
    except SyncError:
        return
    assert len(where) == len(steps) and (
        not len(where) or 0 <= where[0] and where[-1] < len(old) and bool((where.diff() > 0).all())
    )


WRONG = {
    "dtype": (lambda: encode_delta(torch.zeros(2), torch.zeros(2)), "old and new must be bfloat16 or float16"),
    "steps": (
        lambda: apply_delta(torch.zeros(2).bfloat16(), torch.tensor([0]), torch.zeros(1).long()),
        "steps must be torch.int32",
    ),
    "range": (
        lambda: apply_delta(torch.zeros(2).bfloat16(), torch.tensor([2]), torch.ones(1).int()),
        "positions must lie in the 2",
    ),
    "order": (
        lambda: apply_delta(torch.zeros(2).bfloat16(), torch.tensor([1, 1]), torch.ones(2).int()),
        "positions must ascend",
    ),
    "base": (
        lambda: apply_delta(made(torch.bfloat16, 0x7FFF), torch.tensor([0]), torch.ones(1).int()),
        "beyond the last float",
    ),
    "size": (lambda: unpack(pack(torch.tensor([5]), torch.ones(1).int(), 6), 5), "no delta of 5 weights"),
    "kind": (lambda: unpack(pack_full([torch.zeros(4).bfloat16()], 1), 4), "no delta of 4 weights"),
    "empty": (lambda: unpack(b"", 4), "no delta"),
}


@pytest.mark.parametrize("call, says", WRONG.values(), ids=WRONG)
def test_bad_input(call, says):
    with pytest.raises(ValueError, match=says):
        call()
