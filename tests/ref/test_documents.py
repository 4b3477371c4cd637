"""Attention inside documents: who sees whom, without a mask of T² bytes."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ref.network.documents import SPARSE, attend_blocks, attend_documents, find_runs, make_block_mask
from ref.network.fast import make_document_mask
from ref.network.model import visible


def drawn(seed: int, rows: int, length: int) -> torch.Tensor:
    """Documents of all lengths, some with padding (−1) at the end."""
    g = torch.Generator().manual_seed(seed)
    doc = (torch.rand(rows, length, generator=g) < torch.rand(rows, 1, generator=g) ** 3).long().cumsum(1)
    doc[torch.arange(length) >= length - int(torch.randint(length, (), generator=g)) // 3 + torch.zeros(rows, 1)] = -1
    return doc


def places(seed: int, length: int) -> torch.Tensor:
    """Two chunks of a row, as a rank of a cp group holds them."""
    size = length // 4
    i = seed % 2
    chunks = torch.arange(4 * size).view(4, size)
    return chunks[[i, 3 - i]].flatten()


def explicit(q, k, v, seen):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return (q @ k.mT).masked_fill(~seen, float("-inf")).softmax(-1) @ v


lengths = st.sampled_from([1, 2, 7, 64, 130])
seeds = st.integers(0, 2**31 - 1)


@given(seeds, st.integers(1, 3), lengths)
def test_runs_say_what_the_mask_says(seed, rows, length):
    """Each query is in one run, which holds the keys that the mask shows it, and no others."""
    doc = drawn(seed, rows, length)
    where = torch.arange(length) if length % 4 else places(seed, length)
    found = find_runs(doc, where)
    wanted = visible(length, 0, doc, doc.device)
    wanted = torch.ones(rows, 1, 1, 1, dtype=torch.bool) if wanted is None else wanted[:, :, where]
    seen = torch.zeros_like(wanted)
    for run in found:
        n = run.queries.stop - run.queries.start
        assert n > 0 and not seen[run.rows, 0, run.queries].any(), "a query is in one run"
        for i in range(n):
            seen[run.rows, 0, run.queries.start + i, run.keys.start : run.keys.stop - n + 1 + i] = True
    assert torch.equal(seen, wanted)


@given(seeds, st.integers(1, 2), lengths, st.sampled_from([(2, 2), (4, 1), (6, 3)]))
def test_values_and_gradients_are_those_of_the_mask(seed, rows, length, heads):
    check_gradients(
        seed, drawn(seed, rows, length), torch.arange(length) if length % 4 else places(seed, length), heads
    )


def test_keys_that_both_chunks_see_get_the_gradients_of_both():
    """A document that is as long as the row."""
    check_gradients(0, torch.zeros(1, 16, dtype=torch.long), places(0, 16), (4, 2))


def check_gradients(seed, doc, where, heads):
    (rows, length), (H, G), d = doc.shape, heads, 4
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, H, len(where), d, generator=g, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(rows, G, length, d, generator=g, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mask = visible(length, 0, doc, doc.device)
    wanted = explicit(q, k, v, torch.tensor(True) if mask is None else mask[:, :, where])
    found = attend_documents(q, k, v, find_runs(doc, where))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    up = torch.randn(wanted.shape, generator=g, dtype=torch.float64)
    for ours, theirs in zip(
        torch.autograd.grad(found, (q, k, v), up), torch.autograd.grad(wanted, (q, k, v), up), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12 * (1 + float(theirs.abs().max())))


def test_scores_that_overflow_alone_are_joined_without_overflow():
    """Sums of weights as large as e^500 on one side and as small as e^−500 on the other."""
    q = torch.ones(1, 1, 2, 1, dtype=torch.float64)
    k = torch.tensor([500.0, -500.0, 0.0, 0.0, 500.0, -500.0, 0.0, 0.0], dtype=torch.float64).view(1, 1, 8, 1)
    v = torch.arange(8, dtype=torch.float64).view(1, 1, 8, 1)
    found = attend_documents(q, k, v, find_runs(torch.zeros(1, 8, dtype=torch.long), torch.tensor([4, 5])))
    assert found.flatten().tolist() == pytest.approx([2.0, 2.0])  # the mean of 0 and 4, both with all the weight


def test_bfloat16_is_as_close_as_with_a_mask():
    doc = drawn(3, 2, 128)
    where = places(0, 128)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 16, generator=g, dtype=torch.float64) for n in (64, 128, 128))
    exact = explicit(q, k, v, visible(128, 0, doc, doc.device)[:, :, where])
    short = [x.bfloat16() for x in (q, k, v)]
    masked = nn.functional.scaled_dot_product_attention(
        *short, visible(128, 0, doc, doc.device)[:, :, where], scale=1.0
    )
    ours = attend_documents(*short, find_runs(doc, where))
    assert (ours - exact).abs().mean() <= 1.1 * (masked - exact).abs().mean()


def test_a_document_in_several_pieces_needs_a_mask():
    doc = torch.tensor([[0, 0, 1, 1], [0, 1, 0, 0]])
    assert find_runs(doc[:1]) is not None and find_runs(doc) is None
    assert torch.equal(make_document_mask(doc), visible(4, 0, doc, doc.device))
    assert torch.equal(make_document_mask(doc, torch.tensor([0, 3])), visible(4, 0, doc, doc.device)[:, :, [0, 3]])


def test_what_is_computed_grows_with_the_documents_not_with_the_row():
    """Query-key pairs: Σ n² over documents."""
    for length in (1024, 8192):
        doc = (torch.arange(length) // 256)[None]
        pairs = sum((r.queries.stop - r.queries.start) * (r.keys.stop - r.keys.start) for r in find_runs(doc))
        assert pairs == length * 256
    halves = find_runs(doc, torch.arange(length).view(4, -1)[[0, 3]].flatten())
    assert len(halves) == len(find_runs(doc)) // 2


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@given(seeds, st.integers(1, 3), st.sampled_from([1, 100, 128, 129, 300, 512]))
def test_the_gpu_s_blocks_hold_all_that_is_seen(seed, rows, length):
    """FlexAttention reads the listed blocks only, and asks the mask only in those that are not whole."""
    doc = drawn(seed, rows, length)
    where = torch.arange(length) if length % 4 else places(seed, length)
    found = make_block_mask(doc, where)
    assert found.seq_lengths == (len(where), length) and found.BLOCK_SIZE == (SPARSE, SPARSE)
    seen = (where[:, None] >= torch.arange(length)) & (doc[:, where, None] == doc[:, None])
    tiles = (
        torch.nn.functional.pad(seen, (0, -length % SPARSE, 0, -len(where) % SPARSE))
        .unflatten(2, (-1, SPARSE))
        .unflatten(1, (-1, SPARSE))
    )
    some, every = tiles.any(4).any(2), tiles.all(4).all(2)
    listed = {}
    for name, number, index in (
        ("partial", found.kv_num_blocks, found.kv_indices),
        ("whole", found.full_kv_num_blocks, found.full_kv_indices),
    ):
        listed[name] = torch.zeros_like(some)
        for b, q in itertools.product(range(rows), range(some.shape[1])):
            listed[name][b, q, index[b, 0, q, : number[b, 0, q]].long()] = True
    assert not (listed["partial"] & listed["whole"]).any()
    assert (listed["whole"] <= every).all() and (some <= (listed["partial"] | listed["whole"])).all()
    if len(where) == length:  # in a whole row of documents in one piece, nothing more is read
        assert torch.equal(listed["partial"] | listed["whole"], some) and torch.equal(listed["whole"], every)


@given(seeds, st.integers(1, 2), st.sampled_from([1, 64, 130, 260]))
def test_the_gpu_s_blocks_say_the_same(seed, rows, length):
    """FlexAttention's own reference, without a GPU."""
    doc = drawn(seed, rows, length)
    where = torch.arange(length) if length % 4 else places(seed, length)
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, 4, len(where), 16, generator=g, dtype=torch.float64)
    k, v = (torch.randn(rows, 2, length, 16, generator=g, dtype=torch.float64) for _ in range(2))
    mask = visible(length, 0, doc, doc.device)
    wanted = explicit(q, k, v, torch.tensor(True) if mask is None else mask[:, :, where])
    torch.testing.assert_close(attend_blocks(q, k, v, make_block_mask(doc, where)), wanted, rtol=0, atol=1e-12)
