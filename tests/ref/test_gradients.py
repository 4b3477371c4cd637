"""Hand-written gradients: exact in float64 (gradcheck), those of autograd, and no worse in bfloat16 than
plain composition."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from ref.network.gradients import Groups, attend, chunked_logprob, experts_swiglu, rms_norm, turned_heads

EPS = 1e-5


# The definitions, as one would write them without caring for time.


def plain_rms_norm(x, weight):
    wide = torch.promote_types(x.dtype, torch.float32)
    x = x.to(wide)
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)).to(weight.dtype) * weight


def plain_turned_heads(qkv, weight, cos, sin, kv_heads, normed=True):
    C = len(weight)
    y = plain_rms_norm(qkv[:, :, :C], weight) if normed else qkv[:, :, :C] * weight
    a, b = y.chunk(2, -1)
    y = y * cos + torch.cat((b, a), -1) * sin
    q, k = y.transpose(1, 2).split((C - kv_heads, kv_heads), 1)
    return q.unflatten(1, (kv_heads, -1)), k, qkv[:, :, C:].transpose(1, 2)


def plain_attend(q, k, v, bias):
    B, G, R, T, _ = q.shape
    scores = torch.einsum("bgrtd,bgsd->bgrts", q, k) + bias.expand(B * G, -1, -1).view(B, G, R, T, -1)
    return torch.einsum("bgrts,bgsd->btgrd", scores.softmax(-1), v).flatten(2)


def plain_experts(x, gates, w13, w2, experts):
    y = torch.zeros_like(x)
    for n in range(x.shape[0]):
        for k in range(experts.shape[1]):
            e = experts[n, k]
            gate, up = (w13[e] @ x[n]).chunk(2)
            row = gates[n, k] * (w2[e] @ (F.silu(gate) * up))
            y = y.index_add(0, torch.tensor([n]), row[None])
    return y


def plain_logprob(hidden, weight, targets):
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return F.linear(hidden, weight).to(wide).log_softmax(-1).gather(1, targets[:, None])[:, 0]


@dataclass
class Case:
    fast: Callable
    plain: Callable
    inputs: Callable
    """() → tensors that want a gradient, then those that do not."""
    rest: Callable = tuple


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def turned(*shape):
    """The same as `randn`, lying otherwise in memory."""
    return randn(*reversed(shape)).permute(*reversed(range(len(shape))))


def angles(*shape):
    angle = randn(*shape)
    return torch.cat((angle.cos(), angle.cos()), -1), torch.cat((-angle.sin(), angle.sin()), -1)


def mixture(N, K, E, D=4, I=3, make=randn, allowed=None):
    allowed = range(E) if allowed is None else allowed
    chosen = torch.stack([torch.tensor(list(allowed))[torch.randperm(len(allowed))[:K]] for _ in range(N)])
    gates = torch.rand(N, K, dtype=torch.float64)
    return Case(
        experts_swiglu,
        plain_experts,
        lambda: (make(N, D), gates.clone(), make(E, 2 * I, D), make(E, D, I)),
        lambda: (chosen,),
    )


def norm(*shape, make=randn):
    return Case(lambda x, w: rms_norm(x, w, EPS), plain_rms_norm, lambda: (make(*shape), randn(shape[-1]) + 1))


def rope(B, T, G, R, d, make=randn, per_row=False, normed=True):
    """Cosine and sine are also multiplied by a number, as under YaRN, where there is no norm."""
    table = tuple((1 if normed else 1.3) * part for part in angles(*([B] if per_row else []), T, 1, d // 2))
    return Case(
        lambda x, w, c, s: turned_heads(x, w, c, s, G, EPS if normed else None),
        lambda x, w, c, s: plain_turned_heads(x, w, c, s, G, normed),
        lambda: (make(B, T, G * (R + 2), d), randn(G * (R + 1), d) + 1),
        lambda: table,
    )


def attention(B, G, R, T, S, d, make=randn, per_row=False):
    bias = randn(B * G if per_row else 1, R * T, S)
    bias[..., 1:][torch.rand(bias[..., 1:].shape) < 0.3] = float("-inf")
    return Case(
        attend, plain_attend, lambda: (make(B, G, R, T, d), make(B, G, S, d), make(B, G, S, d)), lambda: (bias,)
    )


def causal_attention(B, G, R, T, S, d, block, per_row=False):
    """In blocks of queries that share the keys they see; documents beside the causal mask where `per_row`."""
    bias = torch.zeros(B * G if per_row else 1, R, T, S, dtype=torch.float64)
    bias.masked_fill_(torch.ones(T, S, dtype=torch.bool).triu(S - T + 1), float("-inf"))
    if per_row:
        bias[::2, :, 2:, :2] = float("-inf")
    return Case(
        lambda q, k, v, bias: attend(q, k, v, bias, causal=True, block=block),
        plain_attend,
        lambda: (randn(B, G, R, T, d), randn(B, G, S, d), randn(B, G, S, d)),
        lambda: (bias.flatten(1, 2),),
    )


def head(N, V, D=4, chunk=3, make=randn):
    targets = torch.randint(0, V, (N,))
    return Case(
        lambda h, w, t: chunked_logprob(h, w, t, chunk),
        plain_logprob,
        lambda: (make(N, D), make(V, D)),
        lambda: (targets,),
    )


CASES = {
    "norm": lambda: norm(5, 7),
    "norm of one": lambda: norm(1, 1, 3),
    "norm, turned": lambda: norm(3, 2, 5, make=turned),
    "heads": lambda: rope(2, 3, 2, 2, 6),
    "heads, one": lambda: rope(1, 1, 1, 1, 2),
    "heads, positions by row": lambda: rope(2, 3, 1, 3, 4, per_row=True),
    "heads, turned": lambda: rope(2, 3, 2, 1, 2, make=turned),
    "heads without a norm": lambda: rope(2, 3, 2, 2, 6, per_row=True, normed=False),
    "heads without a norm, turned": lambda: rope(2, 3, 1, 3, 4, make=turned, normed=False),
    "attention": lambda: attention(2, 2, 2, 3, 4, 5),
    "attention, one": lambda: attention(1, 1, 1, 1, 1, 1),
    "attention, masks by row": lambda: attention(3, 2, 1, 2, 3, 4, per_row=True),
    "attention, turned": lambda: attention(2, 1, 3, 2, 2, 3, make=turned),
    "attention in blocks": lambda: causal_attention(2, 1, 2, 5, 5, 3, block=2),
    "attention in blocks, older keys": lambda: causal_attention(1, 2, 1, 4, 6, 2, block=2),
    "attention in blocks, documents": lambda: causal_attention(2, 2, 2, 4, 4, 2, block=3, per_row=True),
    "mixture": lambda: mixture(7, 2, 3),
    "mixture of all": lambda: mixture(5, 3, 3),
    "mixture of one expert": lambda: mixture(4, 1, 1),
    "mixture, one token": lambda: mixture(1, 2, 5),
    "mixture, idle experts": lambda: mixture(6, 2, 6, allowed=[1, 4]),
    "mixture, groups longer than the padding": lambda: mixture(45, 2, 2, D=2, I=1),
    "mixture, turned": lambda: mixture(5, 2, 3, make=turned),
    "head": lambda: head(7, 5),
    "head, one row": lambda: head(1, 3),
    "head, whole chunks": lambda: head(6, 4),
    "head, turned": lambda: head(5, 6, make=turned),
}


def with_gradients(function, inputs, rest, seed=7):
    leaves = [x.detach().requires_grad_() for x in inputs]
    results = function(*leaves, *rest)
    results = results if isinstance(results, tuple) else (results,)
    torch.manual_seed(seed)
    weights = [torch.randn(y.shape, dtype=torch.float64).to(y.dtype) for y in results]
    return [*(y.detach() for y in results), *torch.autograd.grad(results, leaves, weights)]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradcheck(case):
    case = case()
    leaves = [x.requires_grad_() for x in case.inputs()]
    rest = case.rest()
    assert torch.autograd.gradcheck(lambda *x: case.fast(*x, *rest), leaves)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_autograd_of_the_definition(case):
    case = case()
    inputs, rest = case.inputs(), case.rest()
    fast, plain = (with_gradients(f, inputs, rest) for f in (case.fast, case.plain))
    for ours, theirs in zip(fast, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


WIDE = {
    "norm": lambda: norm(300, 128),
    "heads": lambda: rope(4, 33, 2, 2, 32),
    "heads without a norm": lambda: rope(4, 33, 2, 2, 32, normed=False),
    "attention": lambda: attention(4, 2, 2, 33, 33, 32),
    "mixture": lambda: mixture(40, 2, 4, D=64, I=48),
    "head": lambda: head(96, 200, D=64, chunk=32),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", WIDE.values(), ids=WIDE)
def test_low_precision_errs_at_most_twice_as_much(case, dtype):
    """Value and every gradient against float64, root mean square, beside the plain composition's error."""
    case = case()
    inputs = [(x * (0.2 if x.ndim == 3 else 1)).to(dtype) for x in case.inputs()]
    rest = [x.to(dtype) if x.is_floating_point() else x for x in case.rest()]
    wide = [x.double() for x in inputs], [x.double() if x.is_floating_point() else x for x in rest]
    exact = with_gradients(case.plain, *wide)
    fast, plain = (with_gradients(f, inputs, rest) for f in (case.fast, case.plain))
    for truth, ours, theirs in zip(exact, fast, plain, strict=True):
        assert ours.dtype == theirs.dtype
        errors = [(x - truth).square().mean().sqrt() for x in (ours, theirs)]
        assert errors[0] <= 2 * errors[1], f"{errors[0]:.2e} against {errors[1]:.2e}"


def test_an_idle_experts_weights_get_zero_not_garbage():
    case = mixture(6, 2, 6, allowed=[1, 4])
    _, _, _, d_w13, d_w2 = with_gradients(case.fast, case.inputs(), case.rest())
    for e in (0, 2, 3, 5):
        assert (d_w13[e] == 0).all() and (d_w2[e] == 0).all()
    assert d_w13[1].abs().sum() > 0 and d_w2[4].abs().sum() > 0


def test_norm_is_of_unit_mean_square_and_ignores_scale():
    x = randn(4, 50)
    y = rms_norm(x, torch.ones(50, dtype=torch.float64), 0.0)
    torch.testing.assert_close(y.square().mean(-1), torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(rms_norm(1000 * x, torch.ones(50, dtype=torch.float64), 0.0), y)
    (d,) = torch.autograd.grad((rms_norm(x.requires_grad_(), y[0].detach(), 0.0) * y).sum(), x)
    assert (d * x).sum(-1).abs().max() < 1e-10, "no gradient along x itself"


def test_the_squares_of_a_norm_may_be_beyond_the_dtype():
    """300² is more than float16 holds."""
    x = torch.full((2, 64), 300.0, dtype=torch.float16, requires_grad=True)
    y = rms_norm(x, torch.ones(64, dtype=torch.float16), 1e-6)
    assert torch.equal(y, torch.ones_like(y))
    y[:, 0].sum().backward()
    torch.testing.assert_close(x.grad[0, 0].item() * 300, 1 - 1 / 64, rtol=1e-2, atol=0)


def test_turning_keeps_length_and_leaves_values():
    x, (cos, sin) = randn(2, 3, 8, 6), angles(3, 1, 3)
    q, k, v = turned_heads(x, torch.ones(6, 6, dtype=torch.float64), cos, sin, 2, 0.0)
    for y in (q, k):
        torch.testing.assert_close(y.square().sum(-1), torch.full(y.shape[:-1], 6.0, dtype=torch.float64))
    torch.testing.assert_close(v, x[:, :, 6:].transpose(1, 2))


def test_attention_to_one_key_is_its_value():
    q, k, v = randn(1, 1, 2, 3, 4), randn(1, 1, 3, 4), randn(1, 1, 3, 4)
    bias = torch.full((3, 3), float("-inf"), dtype=torch.float64).fill_diagonal_(0.0).repeat(2, 1)[None]
    y = attend(q, k, v, bias).view(3, 2, 4)
    torch.testing.assert_close(y, v[0, 0][:, None].expand(-1, 2, -1))
    uniform = attend(torch.zeros_like(q), k, v, torch.zeros_like(bias)).view(3, 2, 4)
    torch.testing.assert_close(uniform, v[0, 0].mean(0).expand(3, 2, 4))


def test_keys_that_no_query_of_a_block_sees_are_not_multiplied():
    """A key of NaN behind every query of the first block leaves that block alone."""
    q, k, v = randn(1, 1, 1, 4, 2), randn(1, 1, 4, 2), randn(1, 1, 4, 2)
    k[:, :, 2:] = v[:, :, 2:] = float("nan")
    bias = torch.zeros(1, 4, 4, dtype=torch.float64).masked_fill_(torch.ones(4, 4).triu(1) > 0, float("-inf"))
    y = attend(q, k, v, bias, causal=True, block=2)
    assert y[:, :2].isfinite().all() and y[:, 2:].isnan().all()


def test_logprob_of_a_uniform_head_and_its_push():
    hidden, weight = torch.zeros(3, 4).requires_grad_(), torch.ones(8, 4)
    logp = chunked_logprob(hidden, weight, torch.tensor([0, 3, 7]))
    torch.testing.assert_close(logp, torch.full((3,), -torch.log(torch.tensor(8.0)).item()))
    hidden, weight = torch.eye(4).requires_grad_(), torch.zeros(8, 4, requires_grad=True)
    chunked_logprob(hidden, weight, torch.tensor([0, 1, 2, 3])).sum().backward()
    torch.testing.assert_close(weight.grad[:4], torch.eye(4) - 1 / 8)
    torch.testing.assert_close(weight.grad[4:], torch.full((4, 4), -1 / 8))


def test_sure_tokens_keep_their_gradient_in_bfloat16():
    """1 − p for a token of probability 0.999 lies far below bfloat16's step at 1."""
    hidden = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[7.0], [0.0]], dtype=torch.bfloat16)
    chunked_logprob(hidden, weight, torch.tensor([0])).sum().backward()
    p = torch.tensor([7.0, 0.0], dtype=torch.float64).softmax(0)[1].item()
    assert abs(hidden.grad.item() / (7 * p) - 1) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@given(
    experts=st.integers(1, 6), P=st.sampled_from([3, 8, 16]), Q=st.sampled_from([5, 16, 32]), seed=st.integers(0, 99)
)
def test_grouped_products_are_each_groups_own(dtype, experts, P, Q, seed):
    """By the library where its alignment allows and by ourselves elsewhere; experts without tokens included."""
    torch.manual_seed(seed)
    chosen = torch.randint(0, experts, (torch.randint(1, 80, ()).item(), 1))
    groups = Groups(chosen, experts + 1)
    rows, weight, other = (
        torch.randint(-3, 4, shape).to(dtype)  # small integers: every order of summation gives the same
        for shape in ((len(groups.tokens), P), (experts + 1, P, Q), (len(groups.tokens), Q))
    )
    by_rows, by_columns = groups.mm(rows, weight), groups.mm(rows.t(), other)
    assert groups.lengths[-1] == 0 and by_columns.shape == (experts + 1, P, Q)
    start = 0
    for e, n in enumerate(groups.lengths):
        some = slice(start, start + n)
        assert torch.equal(by_rows[some], (rows[some].double() @ weight[e].double()).to(dtype))
        assert torch.equal(by_columns[e], (rows[some].double().t() @ other[some].double()).to(dtype))
        start += n
