"""Exactly k distinct experts for any scores; the filter's two ends; gates whose gradient reaches the router; the
forward pass under replay; the statistics on cases counted by hand."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from ref.network import Config, Transformer
from ref.network.fast import MoE
from ref.router_replay import compare_experts, demo, gates, mismatch, replay, route

LEVELS = st.sampled_from([-math.inf, -3.0, -1.0, 0.0, 0.5, 0.5000001, 2.0, 1e30])


@st.composite
def routings(draw):
    """Scores with ties and −inf, replayed experts, k and alpha."""
    E = draw(st.integers(1, 7))
    k, N = draw(st.integers(1, E)), draw(st.integers(0, 5))
    scores = torch.tensor(draw(st.lists(st.lists(LEVELS, min_size=E, max_size=E), min_size=N, max_size=N)))
    chosen = [draw(st.permutations(range(E)))[:k] for _ in range(N)]
    replayed = torch.tensor(chosen, dtype=torch.long).view(N, k)
    return scores.view(N, E).float(), replayed, k, draw(st.sampled_from([0.0, 1e-6, 0.3, 0.99, 1.0]))


def sets(experts):
    return [set(row) for row in experts.tolist()]


@settings(max_examples=200, deadline=None)
@given(routings())
def test_always_k_distinct_experts(case):
    scores, replayed, k, alpha = case
    experts = replay(scores, replayed, k, alpha)
    assert experts.shape == replayed.shape
    assert all(len(row) == k and row <= set(range(scores.shape[1])) for row in sets(experts))


@settings(max_examples=100, deadline=None)
@given(routings())
def test_alpha_zero_is_plain_replay(case):
    scores, replayed, k, _ = case
    assert sets(replay(scores, replayed, k, 0.0)) == sets(replayed)


@settings(max_examples=100, deadline=None)
@given(routings())
def test_alpha_one_is_the_routers_own_choice(case):
    """Where no two experts tie for the last place; where they do, none below that place is taken."""
    scores, replayed, k, _ = case
    for s, new in zip(scores, replay(scores, replayed, k, 1.0), strict=True):
        best = s.sort(descending=True)[0]
        if k == len(s) or best[k - 1] > best[k]:
            assert set(new.tolist()) == set(s.topk(k)[1].tolist())
        assert (s[new] >= best[k - 1]).all()


@settings(max_examples=100, deadline=None)
@given(routings())
def test_the_filter_keeps_the_plausible_and_only_them(case):
    """By the definition in probabilities, computed in float64; and what is added is the router's best."""
    scores, replayed, k, alpha = case
    for s, old, new in zip(
        scores.double(), replayed.tolist(), replay(scores, replayed, k, alpha).tolist(), strict=True
    ):
        finite = s[s > -math.inf]
        p = (s - finite.max()).exp() if len(finite) else torch.ones_like(s)
        floor = alpha * p.sort(descending=True)[0][k - 1]
        clear = [e for e in old if abs(p[e] - floor) > 1e-9 * max(p[e], floor)]
        assert {e for e in clear if p[e] > floor} <= set(new)
        added = set(new) - set(old)
        rest = [s[e] for e in range(len(s)) if e not in new]
        assert all(s[e] >= r for e in added for r in rest)


@settings(max_examples=50, deadline=None)
@given(routings(), st.floats(-5, 5))
def test_adding_a_constant_to_a_tokens_scores_changes_nothing(case, c):
    scores, replayed, k, _ = case
    scores = scores.clamp(max=4).double()
    assert sets(replay(scores + round(c), replayed, k, 0.5)) == sets(replay(scores, replayed, k, 0.5))


def test_by_hand():
    """p = .5, .3, .15, .05 and k = 2: the second largest is .3."""
    scores = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    replayed = torch.tensor([[3, 2]])
    assert sets(replay(scores, replayed, 2, 0.1)) == [{2, 3}]
    assert sets(replay(scores, replayed, 2, 0.4)) == [{0, 2}], "p = .05 falls, the best comes in its place"
    assert sets(replay(scores, replayed, 2, 0.6)) == [{0, 1}]


@settings(max_examples=60, deadline=None)
@given(routings(), st.booleans(), st.sampled_from(["own", "plain", "filtered"]))
def test_the_networks_router_does_the_same(case, normalise, how):
    """One rule, with checks here and without them in the network; which of several equal scores is the k-th, torch.topk
    decides there."""
    scores, replayed, k, alpha = case
    E = scores.shape[1]
    scores = scores.clamp(-30, 4) + 1e-3 * torch.arange(E)  # a product gives no −inf, and no two are equal
    router = MoE(Config.tiny(9, hidden_size=E, num_experts=E, num_experts_per_tok=k, norm_topk_prob=normalise)).to(
        scores.dtype
    )
    with torch.no_grad():
        router.gate.weight.copy_(torch.eye(E))
    filtered = partial(replay, replayed=replayed, k=k, alpha=alpha)
    logits, weights, experts = router.route(scores, {"own": None, "plain": replayed, "filtered": filtered}[how])
    torch.testing.assert_close(logits, scores, rtol=0, atol=0)
    given_experts = {"own": (None, 0.0), "plain": (replayed, 0.0), "filtered": (replayed, alpha)}[how]
    wanted, chosen = route(scores, k, *given_experts, normalise=normalise)
    assert sets(experts) == sets(chosen)
    order = chosen.argsort(1), experts.long().argsort(1)
    torch.testing.assert_close(weights.gather(1, order[1]), wanted.gather(1, order[0]), rtol=1e-6, atol=0)


def test_gates_sum_to_one_and_their_gradient_reaches_every_chosen_score():
    scores = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    experts = torch.tensor([[5, 0], [1, 2], [3, 4], [0, 1], [2, 5]])
    g = gates(scores, experts)
    torch.testing.assert_close(g.sum(-1), torch.ones(5, dtype=torch.float64))
    (d,) = torch.autograd.grad((g * torch.tensor([1.0, -1.0])).sum(), scores)
    chosen = torch.zeros_like(d, dtype=torch.bool).scatter_(1, experts, True)
    assert (d[chosen] != 0).all() and (d[~chosen] == 0).all()
    torch.testing.assert_close(gates(scores, experts, normalise=False), scores.softmax(-1).gather(1, experts))


def test_a_softmax_over_nothing_is_refused_and_no_other():
    """Expert 2 alone has a finite score. Among the chosen 0 and 1 there is nothing to share; of all experts, they have
    no share."""
    scores, experts = torch.tensor([[-math.inf, -math.inf, 1.0]]), torch.tensor([[0, 1]])
    with pytest.raises(ValueError, match="a finite one among the experts that the softmax is over"):
        gates(scores, experts)
    assert gates(scores, experts, normalise=False).tolist() == [[0.0, 0.0]]
    with pytest.raises(ValueError, match="a finite one among the experts that the softmax is over"):
        gates(torch.full((1, 3), -math.inf), experts, normalise=False)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 9), st.integers(1, 9), st.integers(1, 9), st.data(), st.booleans())
def test_choice_gates_and_gradient_are_those_of_transformers(N, E, D, data, normalise):
    """A second opinion by another hand, on random inputs, k = 1 and k = E included: what its router chooses, this
    one replays at any alpha, falls back on at alpha = 1 whatever was replayed, and chooses by itself."""
    k = data.draw(st.integers(1, E))
    torch.manual_seed(data.draw(st.integers(0, 2**16)))
    theirs = Qwen3MoeTopKRouter(
        Qwen3MoeConfig(hidden_size=D, num_experts=E, num_experts_per_tok=k, norm_topk_prob=normalise)
    )
    ours = MoE(Config.tiny(9, hidden_size=D, num_experts=E, num_experts_per_tok=k, norm_topk_prob=normalise))
    with torch.no_grad():
        ours.gate.weight.copy_(theirs.weight.normal_())
    x, push = torch.randn(N, D), torch.randn(N, E)
    scores, weights, chosen = theirs(x)
    (slope,) = torch.autograd.grad((weights * push.gather(1, chosen)).sum(), theirs.weight)

    def dense(gate, experts):
        return torch.zeros(N, E).scatter(1, experts, gate)

    other = torch.stack([torch.randperm(E)[:k] for _ in range(N)]) if N else chosen
    for alpha, replayed in ((0.0, chosen), (0.5, chosen), (1.0, chosen), (1.0, other)):
        experts = replay(scores.detach(), replayed, k, alpha)
        assert sets(experts) == sets(chosen)
        torch.testing.assert_close(dense(gates(scores, experts, normalise), experts), dense(weights, chosen))
    for given_experts in (None, chosen, partial(replay, replayed=other, k=k, alpha=1.0)):
        logits, gate, experts = ours.route(x, given_experts)
        assert torch.equal(logits, scores) and sets(experts) == sets(chosen)
        torch.testing.assert_close(dense(gate, experts), dense(weights, chosen))
        torch.testing.assert_close(gate, gates(logits, experts, normalise))
        (got,) = torch.autograd.grad((gate * push.gather(1, experts)).sum(), ours.gate.weight)
        torch.testing.assert_close(got, slope)


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    shape = Config.tiny(vocab_size=32, hidden_size=16, num_hidden_layers=2, head_dim=8, moe_intermediate_size=8)
    return Transformer(shape).double(), torch.randint(0, 32, (2, 5))


def test_replaying_ones_own_choice_is_the_plain_forward_pass(network):
    model, ids = network
    plain = model(ids)
    torch.testing.assert_close(model(ids, experts=plain.experts).logits, plain.logits)


def test_the_filter_steers_each_layer_by_the_scores_of_its_own_pass(network):
    """With α = 1 whatever is replayed, the network runs as if nothing were: also in its second layer, whose
    scores exist only once the first has run."""
    model, ids = network
    plain = model(ids)
    wrong = [torch.stack([torch.randperm(8)[:2] for _ in range(10)]) for _ in plain.experts]
    steered = model(ids, experts=[partial(replay, replayed=e, k=2, alpha=1.0) for e in wrong])
    torch.testing.assert_close(steered.logits, plain.logits)
    assert not torch.allclose(model(ids, experts=wrong).logits, plain.logits)


def test_gradient_of_the_router_under_replay(network):
    model, ids = network
    other = [torch.stack([torch.randperm(8)[:2] for _ in range(10)]) for _ in range(2)]
    model.zero_grad()
    model(ids, experts=other).logits.square().mean().backward()
    assert all(layer.mlp.gate.weight.grad.abs().sum() > 0 for layer in model.layers)


def test_mismatch_by_hand():
    logp, behavior = torch.tensor([[-1.0, -2.0, 9.0]]), torch.tensor([[-1.5, -1.0, 0.0]])
    found = mismatch(logp, behavior, torch.tensor([[True, True, False]]))
    assert found == pytest.approx({"kl": 0.25, "p50": 0.75, "p99": 0.995, "max": 1.0})


def test_mismatch_of_more_tokens_than_torch_takes_quantiles_of():
    """A step of a full run samples 33.5 million; `torch.quantile` refuses more than 2^24."""
    n = 2**24 + 1
    logp = torch.arange(n, dtype=torch.float32)
    found = mismatch(logp, torch.zeros(n), torch.ones(n, dtype=torch.bool))
    assert found == {
        "kl": -(n - 1) / 2,
        "p50": (n - 1) / 2,
        "p99": pytest.approx(0.99 * (n - 1), rel=1e-15),
        "max": n - 1,
    }


def test_differing_by_hand():
    a = [torch.tensor([[0, 1], [2, 3]]), torch.tensor([[0, 1], [0, 1]])]
    b = [torch.tensor([[1, 0], [2, 0]]), torch.tensor([[0, 1], [1, 0]])]
    assert compare_experts(a, b) == {"decisions": 1 / 8, "tokens": 0.5}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"alpha": 1.5}, "alpha"),
        ({"k": 5}, "k must"),
        ({"replayed": torch.tensor([[0, 1, 2], [0, 1, 3]])}, r"replayed must be an int tensor of shape \[2, 2\]"),
        ({"replayed": torch.tensor([[0, 4], [0, 1]])}, "replayed must name experts 0 to 3"),
        ({"replayed": torch.tensor([[-1, 0], [0, 1]])}, "replayed must name experts"),
        ({"replayed": torch.tensor([[1, 1], [0, 1]])}, "replayed must hold distinct"),
        ({"scores": torch.full((2, 4), math.nan)}, "scores"),
        ({"scores": torch.full((2, 4), math.inf)}, "scores"),
    ],
    ids=str,
)
def test_errors_name_the_argument(change, says):
    arguments = {"scores": torch.zeros(2, 4), "replayed": torch.tensor([[0, 1], [2, 3]]), "k": 2, "alpha": 0.5}
    with pytest.raises(ValueError, match=says):
        replay(**(arguments | change))


def test_nothing_sampled_is_an_error():
    with pytest.raises(ValueError, match="mask"):
        mismatch(torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.bool))


def test_demo_replay_removes_most_of_the_tail():
    found = demo()
    assert found["differing_decisions"] > 0
    assert found["replay_p99"] < 0.5 * found["own_p99"]
