"""The drawings of lesson 11 say what the code does."""

import matplotlib.pyplot as plt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lessons import mesh_pictures
from scaled.runtime.mesh import Layout, current


def test_the_batch_is_painted_as_it_is_cut():
    """Two rows to each dp index; an early and a late chunk to each cp index; and the mesh of this process stays what it
    was."""
    before = current()
    first, second = [0] * 4 + [1] * 8 + [0] * 4, [2] * 4 + [3] * 8 + [2] * 4
    assert mesh_pictures.owners(Layout(2, 2, 2), 4, 16).tolist() == [first, first, second, second]
    assert current() is before
    with pytest.raises(ValueError, match="rows must be a multiple"):
        mesh_pictures.owners(Layout(2, 2), 4, 18)
    assert current() is before


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2))
@settings(max_examples=20, deadline=None)
def test_every_token_has_one_owner_and_all_own_as_many(dp, cp, rows, chunk):
    owner = mesh_pictures.owners(Layout(dp, cp), dp * rows, 2 * cp * chunk)
    assert torch.equal(owner.flatten().bincount(minlength=dp * cp), torch.full((dp * cp,), rows * 2 * chunk))


@given(
    st.integers(1, 3).flatmap(
        lambda ranks: st.tuples(
            st.just(ranks), st.lists(st.lists(st.integers(0, 2 * ranks - 1)), min_size=ranks, max_size=ranks)
        )
    )
)
def test_a_row_goes_to_the_owner_of_its_expert_and_home(drawn):
    """At every station two rows never share a place, and places have no gap; on arrival rows lie by expert."""
    ranks, chosen = drawn
    rows = [(home, place, expert) for home, mine in enumerate(chosen) for place, expert in enumerate(mine)]
    paths = mesh_pictures.journeys(tuple(map(tuple, chosen)), 2 * ranks)
    for (home, place, expert), (start, ordered, there, end) in zip(rows, paths, strict=True):
        assert start == end == (home, place) and ordered[0] == home and there[0] == expert // 2
    for station in zip(*paths, strict=True):
        for rank in range(ranks):
            assert sorted(place for at, place in station if at == rank) == [
                *range(sum(at == rank for at, _ in station))
            ]
    come = sorted((there, expert) for (_, _, expert), (_, _, there, _) in zip(rows, paths, strict=True))
    for rank in range(ranks):
        experts = [expert for (at, _), expert in come if at == rank]
        assert experts == sorted(experts)


def test_both_are_drawn(monkeypatch):
    shown = []
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.gcf()) or plt.close())
    mesh_pictures.who_holds(dp=2, cp=2, ep=2)
    mesh_pictures.all_to_all(((2, 0), (3,)))
    texts = [text.get_text() for figure in shown for axes in figure.axes for text in axes.texts]
    assert any("rank 3: dp 1, cp 1, ep 1" in text and "1/2 of experts 2 to 3" in text for text in texts)
    assert any("owns experts\n2, 3" in text for text in texts) and len(shown) == 2
