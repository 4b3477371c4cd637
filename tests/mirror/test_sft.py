"""SFT on conversations on many ranks is that of one: the count, the loss, its gradient, and three steps of the
stage."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.small import conversations, learner
from ref import muon, sft
from tests import chats
from tests.chats import AGENT, CHATML, spoken, template
from tests.mirror import calls
from tests.mirror.layouts import close, layouts, play, seeds
from tests.mirror.test_network import made, rows, same_gradients, shape
from tests.mirror.test_supervised import LAYOUTS, Silent, settings_of
from tests.mirror.workers import ranks

few = settings(max_examples=12, deadline=None, derandomize=True)
size = st.integers(1, 3)


@few
@given(layouts, seeds, size, size, st.booleans(), st.sampled_from([0.0, 0.2, 1.0]), st.booleans())
def test_loss_and_gradient(layout, seed, n, width, packed, share, bare):
    """Odd shapes, rows of padding alone, ranks without a token to learn, and a whole step without one."""
    config = shape(4 if seed % 2 else 0, 2, 2, True)
    model, state = made(config, seed)
    ids, doc = rows(layout, seed, n, width, packed)
    doc = torch.zeros_like(ids) if doc is None else doc
    weight = (torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < share).double()
    if bare:
        doc[0], weight[-1] = -1, 0.0
    n_tokens, loss, balance, grads = play(layout, calls.conversations, config, state, ids, doc, weight)
    assert n_tokens == sft.count_learned(doc, weight)
    wanted, even = sft.sft_loss(model, ids, doc, weight, n_tokens)
    (wanted + 0.5 * even).backward()
    close(loss, wanted)
    close(balance, even)
    same_gradients(grads, model)


@pytest.fixture(scope="module")
def batches():
    """Conversations in ChatML and in the agent's own template, packed; the last batch has a row of padding alone."""
    tokenizer, found = chats.bytes_tokenizer(), []
    for source in (CHATML, AGENT):
        for k in range(5):
            turns = [turn for i in range(1 + k % 3) for turn in (("u", "q" * (1 + k + i)), ("a", "xy"[: k % 3] + "é"))]
            found += sft.tokens_and_mask(spoken(*turns), template(source), tokenizer)
    kept, cut, dropped = sft.fitted(found, 64)
    assert (cut, dropped) == (3, 0)
    per_epoch, batch = conversations.batches(sft.pack(kept, 64), 4, [0])
    some = [batch(step) for step in range(3)]
    some[2][1][3], some[2][2][3] = -1, 0.0
    return per_epoch, some


def test_three_steps(batches):
    """Losses, counts and weights in float64, on 1, 2 and 4 ranks."""
    per_epoch, some = batches
    assert per_epoch >= 1 and all(0 < weight.mean() < 0.5 for _, _, weight in some)
    config = replace(shape(4, 2, 2, True), vocab_size=264)
    model, shared = made(config, 0)
    state = {name: p.clone() for name, p in shared.items()}  # the model is trained in place
    optimizers = calls.in_own_dtype(muon.optimizers(model, muon_lr=0.01, adamw_lr=1e-3))
    wanted = [sft.sft_step(model, optimizers, *batch, micro_rows=4) for batch in some]
    final = dict(model.named_parameters())
    assert all(not torch.equal(p, state[name]) for name, p in final.items())
    for layout in LAYOUTS:
        found, weights = play(layout, calls.taught, config, state, some, 4)
        for one, other in zip(found, wanted, strict=True):
            close(one["loss"], other["loss"])
            assert one["n_tokens"] == other["n_tokens"]
        for name, x in final.items():
            close(weights[name], x)


def test_both_loops_of_the_recipe_have_this_loss(batches, tmp_path):
    """The learner of the small recipe and the ranks of the full one, before their first step."""
    _, some = batches
    config = replace(shape(4, 2, 2, True), vocab_size=264)
    model, shared = made(config, 0)
    state = {name: p.clone() for name, p in shared.items()}  # the model is trained in place
    loss, _ = sft.sft_loss(model, *some[0], sft.count_learned(*some[0][1:]))
    c, silent = settings_of(detach=True), Silent()
    learner.train(silent, c, learner.Learner(c, model, None, 0.01, 1e-3), some.__getitem__, 1, lambda step: 1.0, "sft")
    close(silent.lines[0]["loss"], loss)
    first, *_ = ranks(2).run(dict(dp=2, cp=1, ep=2), calls.phase, c, config, "sft", state, None, some, tmp_path)
    close(first[0][0]["loss"], loss)
