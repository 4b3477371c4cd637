"""The fast network against the plain one, on every road that it takes: same parameters, same call, same numbers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ref.network import KVCache, fast, load_balancing_loss, model, save_hf
from tests.networks import configs, same, scramble

roads = settings(max_examples=60, deadline=None)


def pair(c, dtype=torch.float64):
    """The plain network and the fast one, of the same weights."""
    torch.manual_seed(1)
    plain = scramble(model.Transformer(c)).to(dtype)
    quick = fast.Transformer(c).to(dtype)
    quick.load_state_dict(plain.state_dict())
    return plain, quick.eval()


def sizes_of_documents(draw, length):
    """Numbers of documents [length], one or several of them, and perhaps padding (−1) at the end."""
    cuts = sorted(draw(st.sets(st.integers(1, length - 1), max_size=3))) if length > 1 else []
    doc = torch.bucketize(torch.arange(length), torch.tensor(cuts), right=True)
    if draw(st.booleans()) and cuts:
        doc[cuts[-1] :] = -1
    return doc


@roads
@given(
    st.data(),
    configs(),
    st.sampled_from([1, 2, 9, 70]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["own", "given", "chosen"]),
)
def test_values_and_gradients_are_the_plain_networks(data, c, length, packed, explicit, routing):
    plain, quick = pair(c)
    ids = torch.randint(0, c.vocab_size, (2, length))
    doc = torch.stack([sizes_of_documents(data.draw, length) for _ in ids]) if packed else None
    positions = torch.randint(0, 50, ids.shape) if data.draw(st.booleans()) else None
    E, K, experts = c.num_experts, c.num_experts_per_tok, None
    if E and routing != "own":
        given_ones = [
            torch.stack([torch.randperm(E)[:K] for _ in range(ids.numel())]) for _ in range(c.num_hidden_layers)
        ]
        experts = given_ones if routing == "given" else [lambda scores: (-scores).topk(K, -1)[1]] * c.num_hidden_layers
    push, found = torch.randn(2, length, c.vocab_size, dtype=torch.float64), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast, "EXPLICIT_ATTENTION", 512 * 512 if explicit else 0)
        for network in (plain, quick):
            out = network(ids, positions=positions, doc=doc, experts=experts)
            logp = network.logprob(out.hidden.flatten(0, 1), ids.flatten())
            loss = (out.logits * push).sum() + logp.sum() + out.prenorm.sum()
            if out.router_logits:
                loss = loss + load_balancing_loss(out.router_logits, out.experts)
            gradients = torch.autograd.grad(loss, list(network.parameters()), allow_unused=True)
            found.append([out.logits, out.hidden, out.prenorm, logp, *out.router_logits, *out.experts, *gradients])
    for a, b in zip(*found, strict=True):
        if a is None or b is None:  # a weight that has no say, as the only expert's router
            assert all(x is None or not x.any() for x in (a, b))
            continue
        same(b, a, atol=1e-10 * max(1.0, a.abs().max().item()))


@roads
@given(configs(), st.lists(st.integers(1, 5), min_size=2, max_size=4))
def test_behind_a_cache_too(c, parts):
    plain, quick = pair(c)
    ids = torch.randint(0, c.vocab_size, (3, sum(parts)))
    found = []
    with torch.no_grad():
        for network in (plain, quick):
            cache = KVCache(c, 3, sum(parts), torch.float64)
            found.append(torch.cat([network(part, cache=cache).logits for part in ids.split(parts, 1)], 1))
        found.append(plain(ids).logits)
    same(found[1], found[0])
    same(found[2], found[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_in_lower_precision_its_error_is_at_most_twice_the_plain_networks(dtype):
    c = model.Config.tiny(64)
    exact, _ = pair(c)
    ids = torch.randint(0, 64, (4, 60))
    truth = exact(ids)
    errors = []
    for network in pair(c, dtype):
        errors.append((network(ids, experts=truth.experts).logits.double() - truth.logits).square().mean().sqrt())
    assert errors[1] < 2 * errors[0]


def test_each_class_is_read_from_the_same_folder(tmp_path):
    plain, quick = pair(model.Config.tiny(40, hidden_size=16, num_hidden_layers=1, head_dim=4), torch.float32)
    save_hf(quick, tmp_path / "quick")
    save_hf(plain, tmp_path / "plain")
    read, other = model.load_hf(tmp_path / "quick"), fast.load_hf(tmp_path / "plain")
    assert type(read) is model.Transformer and type(other) is fast.Transformer and type(read.layers[0]) is model.Block
    for a, b, d in zip(plain.parameters(), read.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b) and torch.equal(a, d)
