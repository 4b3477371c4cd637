"""Multi-token prediction: what a depth may see, the loss and its gradients, and decoding that changes
nothing."""

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from lessons.talks import Ids, Talk
from ref.engine.decoder import invert
from ref.engine.layout import Stack
from ref.mtp import (
    MTP,
    Decoder,
    Demo,
    HeadLoss,
    MTPConfig,
    accept,
    demo,
    mtp_loss,
    plain_generate,
    speculative_generate,
    teach,
)
from ref.network import Config, Transformer
from ref.rollout import Limits, decode_rollout
from tests.talks import whole

SMALL = Config(
    vocab_size=23,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
    initializer_range=0.3,
)
LAYERS = MTPConfig(depth=3, intermediate_size=20)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """At these sizes a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pair(config=SMALL, layers=LAYERS, dtype=torch.float64, seed=0):
    """Trunk and layers with random weights, norm weights too."""
    torch.manual_seed(seed)
    model, mtp = Transformer(config), MTP(config, layers)
    for module in (model, mtp):
        for p in module.parameters():
            if p.ndim == 1:
                torch.nn.init.uniform_(p, 0.5, 1.5)
    return model.to(dtype), mtp.to(dtype)


def ids_of(*shape, vocab=SMALL.vocab_size, seed=0):
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed))


# What a depth may see


def test_depth_k_sees_up_to_k_tokens_ahead_and_no_further():
    model, mtp = pair()
    ids = ids_of(1, 12)

    def hidden(ids):
        with torch.no_grad():
            return [h[0] for h in mtp(model(ids).prenorm, model.embed_tokens(ids))]

    before = hidden(ids)
    for j in range(1, 12):
        changed = ids.clone()
        changed[0, j] = (changed[0, j] + 1) % SMALL.vocab_size
        for k, (a, b) in enumerate(zip(before, hidden(changed), strict=True), 1):
            moved = (a != b).any(-1)[: 12 - k]
            assert not moved[: max(0, j - k)].any(), "saw a token it should guess"
            if j >= k:
                assert moved[j - k], "did not look at the token it was given"


def test_packed_documents_are_strangers():
    model, mtp = pair()
    a, b = ids_of(1, 7, seed=1), ids_of(1, 9, seed=2)
    packed = torch.cat((a, b, torch.zeros(1, 3, dtype=torch.long)), 1)
    doc = torch.tensor([[0] * 7 + [1] * 9 + [-1] * 3])
    loss, n, _ = mtp_loss(mtp, model, model(packed, doc=doc), packed, doc)
    alone = [mtp_loss(mtp, model, model(x), x)[:2] for x in (a, b)]
    torch.testing.assert_close(loss, alone[0][0] + alone[1][0], rtol=1e-9, atol=1e-9)
    assert n == alone[0][1] + alone[1][1] == (5 + 4 + 3 + 7 + 6 + 5) / 3


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_short_rows(length):
    """Rows too short for a depth score what they can, and nothing at all is a loss of zero."""
    model, mtp = pair()
    ids = ids_of(2, length)
    loss, n, _ = mtp_loss(mtp, model, model(ids), ids)
    assert n == 2 * sum(max(0, length - k - 1) for k in (1, 2, 3)) / 3
    assert torch.isfinite(loss) and (n or loss == 0)
    loss.backward()


# The loss


def naive(mtp, model, ids, doc, weight, kind, keep=None, detach=True):
    """The definition, a position at a time, left to autograd."""
    out = model(ids, doc=doc)
    table = model.embed_tokens if model.config.tie_word_embeddings else model.lm_head
    prenorm, emb, head = out.prenorm, model.embed_tokens(ids), table.weight
    if detach:
        prenorm, emb, head = prenorm.detach(), emb.detach(), head.detach()
    teacher = out.logits.detach().log_softmax(-1)
    total, n = 0.0, 0.0
    for k, hidden in enumerate(mtp(prenorm, emb, doc), 1):
        student = (hidden @ head.t()).log_softmax(-1)
        for b, i in itertools.product(range(ids.shape[0]), range(ids.shape[1] - k - 1)):
            span = doc[b, i : i + k + 2]
            if (span != span[0]).any() or span[0] < 0 or keep is not None and not keep[b, i + k]:
                continue
            w = weight[b, i + k + 1]
            if kind == "hard":
                total = total - w * student[b, i, ids[b, i + k + 1]]
            else:
                p = teacher[b, i + k]
                total = total + w * (p.exp() * (p - student[b, i])).sum()
            n += w.item()
    return total / mtp.mtp.depth, n / mtp.mtp.depth


DOC = torch.tensor([[0] * 5 + [1] * 6, [0] * 8 + [-1] * 3])


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("detach", [True, False], ids=["detached", "joint"])
@pytest.mark.parametrize("kind", ["distill", "hard"])
def test_loss_is_its_definition(kind, detach, tied):
    model, mtp = pair(replace(SMALL, tie_word_embeddings=tied))
    ids, weight = ids_of(2, 11), torch.rand(2, 11, dtype=torch.float64) * (torch.rand(2, 11) < 0.7)
    parameters = [*model.named_parameters(), *mtp.named_parameters()]

    def gradients(loss):
        found = torch.autograd.grad(loss, [p for _, p in parameters], allow_unused=True)
        return {name: g for (name, _), g in zip(parameters, found, strict=True)}

    loss, n, figures = mtp_loss(
        mtp, model, model(ids, doc=DOC), ids, DOC, weight, kind=kind, detach_trunk=detach, chunk=5
    )
    wanted, count = naive(mtp, model, ids, DOC, weight, kind, detach=detach)
    torch.testing.assert_close(loss, wanted, rtol=1e-10, atol=1e-10)
    assert n == pytest.approx(count)
    got, right = gradients(loss), gradients(wanted)
    for name in got:
        if right[name] is None:
            assert got[name] is None, name
        else:
            torch.testing.assert_close(got[name], right[name], rtol=1e-8, atol=1e-10, msg=name)
    assert set(figures) == {f"{'kl' if kind == 'distill' else 'nll'}_{k}" for k in (1, 2, 3)} | {
        f"agree_{k}" for k in (1, 2, 3)
    }


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31), cuts=st.sets(st.integers(1, 3)), kind=st.sampled_from(["distill", "hard"]))
def test_micro_batches_divided_by_one_global_count_add_up(seed, cuts, kind):
    """Loss, count and every gradient; one of the rows is too short for any depth."""
    model, mtp = pair()
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, SMALL.vocab_size, (4, 8), generator=generator)
    doc = torch.randint(0, 3, (4, 8), generator=generator).sort(1)[0] - 1
    doc[2, 1:] = -1
    weight = torch.rand(4, 8, dtype=torch.float64, generator=generator)

    def step(edges):
        mtp.zero_grad()
        total, count = 0.0, 0.0
        for a, b in itertools.pairwise(edges):
            out = model(ids[a:b], doc=doc[a:b])
            loss, n, _ = mtp_loss(mtp, model, out, ids[a:b], doc[a:b], weight[a:b], kind=kind)
            (loss / 17).backward()
            total, count = total + loss.item(), count + n
        return total, count, [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in mtp.parameters()]

    (whole, n, slopes), (parts, m, sums) = step([0, 4]), step([0, *sorted(cuts), 4])
    assert parts == pytest.approx(whole, rel=1e-10, abs=1e-12) and m == pytest.approx(n, rel=1e-12)
    for got, want in zip(sums, slopes, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_trunk_learns_only_when_asked():
    model, mtp = pair()
    ids = ids_of(2, 9)
    mtp_loss(mtp, model, model(ids), ids)[0].backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None and p.grad.any() for p in mtp.parameters())
    mtp_loss(mtp, model, model(ids), ids, detach_trunk=False)[0].backward()
    assert all(p.grad.any() for name, p in model.named_parameters() if name != "norm.weight")


@pytest.mark.parametrize("soft", [True, False], ids=["soft", "hard"])
def test_head_loss_gradcheck(soft):
    torch.manual_seed(0)
    hidden = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    head = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    target = torch.randn(7, 4, dtype=torch.float64) if soft else torch.randint(0, 6, (7,))
    weight = torch.rand(7, dtype=torch.float64)

    def loss(hidden, head):
        fixed = original if not soft else teach(target, original, 3)[0]
        centroid = fixed[target] if not soft else fixed
        return HeadLoss.apply(hidden, head, centroid, weight, target, 3)[0]

    original = head.detach().clone()
    assert torch.autograd.gradcheck(lambda h: loss(h, original), (hidden,))
    # dW holds p fixed, as the definition does; written out, since p is itself a function of the head.
    value = loss(hidden, head)
    got = torch.autograd.grad(value, head)[0]
    logq = (hidden @ head.t()).log_softmax(-1)
    p = (target @ original.t()).softmax(-1) if soft else torch.eye(6, dtype=torch.float64)[target]
    right = torch.autograd.grad(-(weight * (p * logq).sum(-1)).sum(), head)[0]
    torch.testing.assert_close(got, right, rtol=1e-10, atol=1e-12)


def test_figures_are_means_per_depth():
    model, mtp = pair()
    ids = ids_of(2, 11)
    out = model(ids, doc=DOC)
    loss, n, figures = mtp_loss(mtp, model, out, ids, DOC)
    best, hidden = out.logits.argmax(-1), mtp(out.prenorm, model.embed_tokens(ids), DOC)
    total = 0.0
    for k in (1, 2, 3):
        at = [(b, i) for b in range(2) for i in range(11 - k - 1) if DOC[b, i] == DOC[b, i + k + 1] >= 0]
        agree = [model.head(hidden[k - 1][b, i]).argmax() == best[b, i + k] for b, i in at]
        assert figures[f"agree_{k}"] == pytest.approx(sum(agree) / len(at))
        total += figures[f"kl_{k}"] * len(at)
    assert total / 3 == pytest.approx(loss.item())


def test_share_scores_a_drawn_subset():
    model, mtp = pair()
    ids, ones = ids_of(2, 11), torch.ones(2, 11, dtype=torch.float64)
    out = model(ids, doc=DOC)
    drawn = torch.rand(2, 10, generator=torch.Generator().manual_seed(3)) < 0.5
    keep = torch.zeros(2, 11, dtype=torch.bool)
    keep[:, :10] = drawn
    loss, n, _ = mtp_loss(mtp, model, out, ids, DOC, share=0.5, generator=torch.Generator().manual_seed(3))
    wanted, count = naive(mtp, model, ids, DOC, ones, "distill", keep)
    torch.testing.assert_close(loss, wanted)
    assert n == pytest.approx(count) and n < mtp_loss(mtp, model, out, ids, DOC)[1]


def test_distillation_reaches_a_teacher_it_can_express():
    """A trunk that looks only at its own token: depth k is given that token and can match the distribution
    exactly."""
    model, mtp = pair(replace(SMALL, vocab_size=7), dtype=torch.float32)
    with torch.no_grad():
        for block in model.layers:
            block.self_attn.o_proj.weight.zero_()
    optimizer = torch.optim.AdamW(mtp.parameters(), 1e-2, weight_decay=0.0)
    for step in range(150):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / 150)
        ids = ids_of(8, 24, vocab=7, seed=step)
        with torch.no_grad():
            out = model(ids)
        loss, n, figures = mtp_loss(mtp, model, out, ids)
        if step == 0:
            first = figures
        optimizer.zero_grad()
        (loss / n).backward()
        optimizer.step()
    for k in (1, 2, 3):
        assert figures[f"kl_{k}"] < 0.01 < 0.2 < first[f"kl_{k}"]
        assert figures[f"agree_{k}"] > 0.93


def test_hard_labels_learn_the_data_not_the_teacher():
    """Where the data contradict the trunk, soft targets follow the trunk and hard labels the data."""
    model, _ = pair(dtype=torch.float32)
    ids = torch.arange(24).repeat(4, 1) % 5  # 0 1 2 3 4 0 1 …, of which a random trunk knows nothing
    with torch.no_grad():
        out = model(ids)
    share = {}
    for kind in ("distill", "hard"):
        _, mtp = pair(dtype=torch.float32)
        optimizer = torch.optim.AdamW(mtp.parameters(), 1e-2)
        for _ in range(100):
            loss, n, figures = mtp_loss(mtp, model, out, ids, kind=kind)
            optimizer.zero_grad()
            (loss / n).backward()
            optimizer.step()
        share[kind] = [figures[f"agree_{k}"] for k in (1, 2, 3)]
    assert min(share["distill"]) > 0.9 and min(share["hard"]) > 0.9  # each agrees with its own target
    assert (out.logits[:, 5:-1].argmax(-1) == ids[:, 6:]).float().mean() < 0.5  # and the targets differ


def test_unknown_kind():
    model, mtp = pair()
    ids = ids_of(1, 5)
    with pytest.raises(ValueError, match="distill or hard"):
        mtp_loss(mtp, model, model(ids), ids, kind="soft")
    with pytest.raises(ValueError, match="depth"):
        MTPConfig(depth=0)


# The network laid out for decoding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"num_experts": 0}, {"norm_topk_prob": False}, {"num_key_value_heads": 2}, {"num_experts_per_tok": 1}],
    ids=["moe", "dense", "plain-gates", "no-gqa", "top-1"],
)
def test_stack_is_the_network(changes, dtype):
    """In any split into passes: no further from float64 than twice the network in float32; bfloat16 weights are decoded
    in float32."""
    model, _ = pair(replace(SMALL, **changes), dtype=dtype)
    stack, ids = Stack(model.config, list(model.layers), 40), ids_of(1, 31)
    with torch.no_grad():
        exact, theirs = (copy.deepcopy(model).to(wide)(ids).prenorm[0] for wide in (torch.float64, torch.float32))
        emb, parts, start = model.float().embed_tokens(ids[0]), [], 0
        for size in (7, 1, 4, 2, 1, 16):
            parts.append(stack.run(emb[start : start + size], *stack.frame(start, size)))
            start += size
    assert start == 31 and (torch.cat(parts) - exact).norm() <= 2 * (theirs - exact).norm()


def test_stack_forgets_what_lies_behind_a_frame():
    model, _ = pair(dtype=torch.float32)
    stack = Stack(SMALL, list(model.layers), 40)
    ids = ids_of(1, 12)
    with torch.no_grad():
        emb, wanted = model.embed_tokens(ids[0]), model(ids).prenorm[0]
        stack.run(emb.flip(0), *stack.frame(0, 12))
        stack.run(emb[:5], *stack.frame(0, 5))
        x = stack.run(emb[5:], *stack.frame(5, 7))
    torch.testing.assert_close(x, wanted[5:], rtol=1e-5, atol=1e-5)


# Accept and reject


@given(
    mass=st.lists(st.sampled_from([0.0, 0.0, 5e-324, 1e-300, 1e-45, 1e-7, 0.3, 1.0]), min_size=1, max_size=6),
    u=st.floats(0, 1, exclude_max=True),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@settings(max_examples=150, deadline=None)
def test_what_is_drawn_always_has_mass(mass, u, dtype):
    mass = torch.tensor(mass, dtype=dtype)
    if bool(mass.any()):
        assert mass[invert(mass, u)] > 0
    else:
        with pytest.raises(ValueError, match="no token to draw; its sum is 0"):
            invert(mass, u)


def test_a_draft_that_falls_where_p_and_q_are_the_same_is_followed_by_a_token_of_p():
    """Nothing of p is left behind q: rounding let the draft fall, or it was none of q's. Token 3 is impossible."""
    p = torch.tensor([[0.5, 0.0, 0.5, 0.0]] * 2)
    for draft, u in ((1, 0.0), (1, 0.9), (3, 0.5)):
        taken, token = accept(p, p[:1].clone(), [draft], [u, 0.75])
        assert (taken, token) == (0, 2)


def crossing(step, low=0.0, high=1.0):
    """Where a step function of u leaves its value at `low`, to the last bit; `high` if it never does."""
    start = step(low)
    if step(1 - 2**-53) == start:
        return high
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if step(middle) == start else (low, middle)
    return high


def outcomes(p, q, draft):
    """{(accepted, next token): probability} of `accept`, integrated over its uniform numbers by finding every
    step."""
    found, d = {}, len(draft)
    reached = 1.0
    for k in range(d + 1):
        # The first k drafts stand. Draft k falls beyond a threshold of u_k; all other u are zero.
        def falls(u, k=k):
            return accept(p, q, draft, [0.0] * k + [u] + [0.0] * (d - k))[0] == k

        if k == d:
            here = reached
        else:
            threshold = 0.0 if falls(0.0) else crossing(falls)
            here, reached = reached * (1 - threshold), reached * threshold
        if here == 0:
            continue
        low = 0.0
        while low < 1:

            def token(u, k=k):
                return accept(p, q, draft, [0.0] * k + [1 - 2**-53] * (d - k) + [u])[1]

            high = crossing(token, low)
            key = (k, token(low))
            found[key] = found.get(key, 0.0) + here * (high - low)
            low = high
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("zeros", [False, True], ids=["full", "sparse"])
def test_accept_reproduces_the_target_exactly(seed, zeros):
    """Every first two tokens that a cycle of two drafts can give, enumerated over drafts and integrated over
    u: p, to 1e-12."""
    g, V = torch.Generator().manual_seed(seed), 4

    def table(*shape):
        x = torch.rand(*shape, V, dtype=torch.float64, generator=g)
        if zeros:
            x = x * (torch.rand(*shape, V, generator=g) < 0.6)
            x[..., 1] += 0.05
        return x / x.sum(-1, keepdim=True)

    p, q = [table(), table(V), table(V, V)], [table(), table(V)]
    got = torch.zeros(V, V, dtype=torch.float64)
    for x, y in itertools.product(range(V), repeat=2):
        drawn = q[0][x] * q[1][x, y]
        if drawn == 0:
            continue
        rows = outcomes(torch.stack((p[0], p[1][x], p[2][x, y])), torch.stack((q[0], q[1][x])), [x, y])
        assert sum(rows.values()) == pytest.approx(1, abs=1e-12)
        for (taken, token), share in rows.items():
            if taken == 0:
                got[token] += drawn * share * p[1][token]
            else:
                got[x, token if taken == 1 else y] += drawn * share
    torch.testing.assert_close(got, p[0][:, None] * p[1], rtol=0, atol=1e-12)


def test_accept_at_the_edges():
    p = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    q = torch.tensor([[0.25, 0.75, 0.0]], dtype=torch.float64)
    assert accept(p, q, [0], [0.999, 0.0]) == (1, 2)  # p > q: always stands
    assert accept(p, q, [1], [0.6, 0.0]) == (1, 2)
    assert accept(p, q, [1], [0.7, 0.999]) == (0, 0)  # falls at 2/3; only token 0 has p > q
    assert accept(p[:1], q[:0], [], [0.75]) == (0, 1)
    certain = torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64)
    assert accept(p, certain, [2], [0.0, 0.25])[0] == 0  # what p forbids never stands


# Decoding


@pytest.fixture(scope="module")
def trained():
    """A trunk that has learnt a noisy cycle and layers distilled from it: drafts stand often, not always."""
    torch.manual_seed(0)
    config = replace(SMALL, vocab_size=11, hidden_size=32, head_dim=16)
    model, mtp = Transformer(config), MTP(config, LAYERS)

    def text(seed):
        g = torch.Generator().manual_seed(seed)
        steps = torch.where(torch.rand(16, 24, generator=g) < 0.15, torch.randint(1, 11, (16, 24), generator=g), 3)
        return (steps.cumsum(1) + torch.randint(0, 11, (16, 1), generator=g)) % 11

    for module, first in ((model, 0), (mtp, 60)):
        optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
        for seed in range(first, first + 60):
            ids = text(seed)
            out = model(ids, logits=False)
            if module is model:
                loss = -model.logprob(out.hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).mean()
            else:
                total, n, _ = mtp_loss(mtp, model, out, ids)
                loss = total / n
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.requires_grad_(False), mtp.requires_grad_(False)


def uncached(model, tokens, new, stop=None):
    """Greedy decoding by the definition: a forward pass over everything for each token."""
    tokens = list(tokens)
    begin = len(tokens)
    while len(tokens) < begin + new and (len(tokens) == begin or tokens[-1] != stop):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[begin:]


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompt=st.lists(st.integers(0, 10), min_size=1, max_size=9),
    new=st.integers(0, 22),
    depth=st.integers(1, 3),
    stop=st.one_of(st.none(), st.integers(0, 10)),
)
def test_greedy_tokens_are_the_same(trained, prompt, new, depth, stop):
    model, mtp = trained
    ids = torch.tensor([prompt])
    wanted = uncached(model, prompt, new, stop)
    plain = plain_generate(model, ids, new, stop=stop)
    fast = speculative_generate(model, mtp, ids, new, draft_len=depth, stop=stop)
    assert plain.tokens == fast.tokens == wanted
    assert plain.cycles == len(wanted)
    # A cycle gives what it accepted and one token more, unless the last thing accepted was the stop token.
    assert len(wanted) in (
        fast.cycles + sum(fast.accept_counts),
        fast.cycles + sum(fast.accept_counts) - (wanted[-1:] == [stop]),
    )
    assert all(0 <= a <= d for a, d in zip(fast.accept_counts, fast.draft_counts, strict=True))
    assert fast.accept_counts == sorted(fast.accept_counts, reverse=True)
    assert fast.draft_counts == sorted(fast.draft_counts, reverse=True) and len(fast.draft_counts) == depth
    assert fast.cycles <= len(wanted) and all(0 <= share <= 1 for share in fast.acceptance)


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    given_tokens=st.lists(st.lists(st.integers(0, 10), min_size=1, max_size=7), min_size=2, max_size=4),
    stop=st.integers(0, 10),
    recall=st.integers(0, 4),
    depth=st.integers(0, 3),
)
def test_turns_with_observations_between_them(trained, given_tokens, stop, recall, depth):
    """A conversation: forced tokens, a turn, forced tokens … The second time round the openings of turns are
    recalled."""
    model, mtp = trained
    decoder = Decoder(model, mtp if depth else None, draft_len=depth or None, max_len=64, recall=recall)
    for _ in range(2):
        decoder.reset()
        context = []
        for tokens in given_tokens:
            decoder.feed(tokens)
            context += tokens
            turn = uncached(model, context, 8, stop)
            context += turn
            assert decoder.generate(stop, max_new=8) == turn
        assert decoder.tokens == context
    total = decoder.total
    stops = total.cycles + sum(total.accept_counts) + sum(total.recalled_accepted) - len(total.tokens)
    assert 0 <= stops <= len(given_tokens)
    assert all(0 <= a <= d for a, d in zip(total.recalled_accepted, total.recall_counts, strict=True))
    assert bool(sum(total.recall_counts)) == bool(recall)
    assert total.recall_counts == [] or recall


def test_drafts_are_those_of_the_training_forward(trained):
    """Caches after many accepted and rejected drafts hold what one pass over the final text would put
    there."""
    model, mtp = trained
    g = torch.Generator().manual_seed(0)
    used, fresh = (Decoder(model, mtp, max_len=64, temperature=2.0, generator=g) for _ in range(2))
    used.feed([1, 4, 8, 2])
    used.generate(max_new=30)
    used.feed([9, 9])
    used.generate(max_new=11)
    total = used.total
    assert all(0 < a < d for a, d in zip(total.accept_counts, total.draft_counts, strict=True)), (
        "needs both outcomes at every depth"
    )
    fresh.feed(used.tokens[: used.trunk_length])
    with torch.inference_mode():
        fresh.run_trunk([])
        fresh.trunk_length = used.trunk_length
        fresh.guess(3, None)
    torch.testing.assert_close(
        used.trunk.kv[:, : used.trunk_length], fresh.trunk.kv[:, : used.trunk_length], rtol=1e-5, atol=1e-5
    )
    settled = min(used.settled, used.trunk_length - 3)
    assert settled > 30
    torch.testing.assert_close(used.drafter.kv[:, :settled], fresh.drafter.kv[:, :settled], rtol=1e-5, atol=1e-5)
    # And its next guesses are those of the layers as they are trained.
    used.temperature = 0.0
    with torch.inference_mode():
        used.run_trunk([])
        draft, _ = used.guess(3, None)
        ids = torch.tensor([used.tokens + draft])
        hidden = mtp(model(ids).prenorm, model.embed_tokens(ids))
    at = len(used.tokens) - 2
    assert draft == [int(model.head(h[0, at]).argmax()) for h in hidden]


def test_weights_are_copied(trained):
    model, mtp = trained
    decoder = Decoder(model, mtp, max_len=40)
    decoder.feed([1, 2, 3])
    before = decoder.generate(max_new=8)
    held = {name: p.clone() for module in (model, mtp) for name, p in module.named_parameters(prefix=str(id(module)))}
    for p in (*model.parameters(), *mtp.parameters()):
        p.zero_()
    decoder.reset()
    decoder.feed([1, 2, 3])
    after = decoder.generate(max_new=8)
    for module in (model, mtp):
        for name, p in module.named_parameters(prefix=str(id(module))):
            p.copy_(held[name])
    assert before == after


@pytest.mark.parametrize("way", ["plain", "one", "two", "recall"])
def test_sampled_tokens_follow_the_model(way):
    """The first three tokens of 800 continuations against the model's own probabilities of all 27, at
    temperature 2."""
    config = replace(
        SMALL, vocab_size=3, num_hidden_layers=1, num_experts=0, intermediate_size=8, initializer_range=0.15
    )
    model, mtp = pair(config, replace(LAYERS, depth=2), torch.float32)
    prompt, T, runs = [0, 2], 2.0, 800
    expected = {}
    with torch.no_grad():
        for abc in itertools.product(range(3), repeat=3):
            logp = (model(torch.tensor([[*prompt, *abc]])).logits[0] / T).log_softmax(-1)
            expected[abc] = runs * logp[[1, 2, 3], list(abc)].sum().exp().item()
    assert min(expected.values()) > 5 and sum(expected.values()) == pytest.approx(runs, rel=1e-5)
    decoder = Decoder(
        model,
        None if way == "plain" else mtp,
        max_len=8,
        temperature=T,
        recall=3 if way == "recall" else 0,
        draft_len={"one": 1, "two": 2}.get(way),
        generator=torch.Generator().manual_seed(5),
    )
    seen, offered, stood = dict.fromkeys(expected, 0), 0, 0
    for _ in range(runs):
        decoder.reset()
        decoder.feed(prompt)
        seen[tuple(decoder.generate(max_new=3))] += 1
        offered += sum(decoder.total.draft_counts + decoder.total.recall_counts)
        stood += sum(decoder.total.accept_counts + decoder.total.recalled_accepted)
    assert way == "plain" or runs / 10 < stood < 0.9 * offered, "needs both outcomes"
    statistic = sum((seen[k] - expected[k]) ** 2 / expected[k] for k in expected)
    assert chi2.sf(statistic, 26) > 1e-3


def test_sampling_is_decided_by_the_generator(trained):
    model, mtp = trained
    runs = [
        speculative_generate(
            model, mtp, torch.tensor([[1, 2]]), 24, temperature=1.0, generator=torch.Generator().manual_seed(seed)
        ).tokens
        for seed in (0, 0, 1)
    ]
    assert runs[0] == runs[1] != runs[2]


class Echo:
    """A toy environment: its answer to a turn depends on all turns so far, and it closes after six."""

    stop = 0

    def __init__(self, seed: int):
        self.prompt, self.turns, self.state = [1 + seed % 10, 4], [], seed

    def fork(self):
        return copy.deepcopy(self)

    def reply(self, turn):
        assert len(self.turns) < 6, "the conversation is over"
        self.turns.append(list(turn))
        self.state = (3 * self.state + sum(turn) + len(turn)) % 10
        return None if len(self.turns) == 6 else [10, 1 + self.state][: 1 + self.state % 2]


def converse(decoder, talk, longest, ahead=True):
    """Runs a conversation in one context, to its end or to a turn of `longest` tokens; returns it in its final
    state."""
    limits = Limits(whole(decoder.max_len), turn_tokens=longest)
    (end,) = decode_rollout(decoder, Talk(talk), Ids((talk.stop,)), limits, ahead)
    return end.inner


@pytest.mark.parametrize("recall", [0, 4])
@pytest.mark.parametrize("max_len", [28, 200])
def test_turns_handed_over_early_change_nothing(trained, recall, max_len):
    """Conversations played ahead of verification: same tokens, same environment, some turns taken back on the
    way."""
    model, mtp = trained
    mtp = copy.deepcopy(mtp)
    g = torch.Generator().manual_seed(1)
    for p in mtp.parameters():  # these layers are too good
        p += 0.22 * torch.randn(p.shape, generator=g)
    plain = Decoder(model, max_len=max_len)
    ahead = Decoder(model, mtp, max_len=max_len, recall=recall)
    generate, retracted, pending = ahead.generate, [], []

    def watched(*args):
        turn = generate(*args)
        retracted.append(ahead.retracted)
        pending.append(len(ahead.pending))
        return turn

    ahead.generate = watched
    for _ in range(3):
        for seed in range(10):
            one, two = converse(plain, Echo(seed), 30, ahead=False), converse(ahead, Echo(seed), 30, ahead=True)
            assert plain.tokens == ahead.tokens and not ahead.pending
            assert (one.turns, one.state) == (two.turns, two.state)
            assert all(0 <= a <= d for a, d in zip(ahead.total.accept_counts, ahead.total.draft_counts, strict=True))
    assert max(pending) >= (2 if recall else 1), "nothing was handed over early"
    assert max(retracted) >= (1 if max_len > 100 else 0), "nothing had to be taken back"
    assert max_len < 100 or ahead.total.cycles < plain.total.cycles


def test_playing_ahead_keeps_the_distribution():
    """Two short turns with an answer between them: the joint distribution of all that was sampled, against
    the model's own."""
    config = replace(
        SMALL, vocab_size=3, num_hidden_layers=1, num_experts=0, intermediate_size=8, initializer_range=0.25
    )
    model, mtp = pair(config, replace(LAYERS, depth=2), torch.float32)
    T, runs, outcomes = 1.0, 2000, {}

    class Two:
        prompt, stop = [2], 0

        def __init__(self):
            self.turns = []

        def fork(self):
            return copy.deepcopy(self)

        def reply(self, turn):
            self.turns.append(tuple(turn))
            return None if len(self.turns) == 2 else [1 + sum(turn) % 2]

    def spread(tokens, turns, new, p):
        """Every outcome and its probability; a turn has two tokens at most, and is followed by the stop token if it
        does not stop."""
        logp = (model(torch.tensor([tokens])).logits[0, -1] / T).log_softmax(-1)
        for x in range(3):
            here, more = p * logp[x].exp().item(), (*new, x)
            if x != 0 and len(more) < 2:
                spread([*tokens, x], turns, more, here)
            elif len(turns) == 0:
                spread([*tokens, x, *([0] if x else []), 1 + sum(more) % 2], (more,), (), here)
            else:
                outcomes[(*turns, more)] = here

    with torch.no_grad():
        spread([2], (), (), 1.0)
    assert sum(outcomes.values()) == pytest.approx(1, rel=1e-5)
    decoder = Decoder(model, mtp, max_len=12, temperature=T, recall=2, generator=torch.Generator().manual_seed(2))
    seen, back = dict.fromkeys(outcomes, 0), {1: 0, 2: 0}
    generate = decoder.generate

    def watched(*args):
        turn = generate(*args)
        if decoder.retracted:
            back[decoder.retracted] += 1
        return turn

    decoder.generate = watched
    count = 0
    for _ in range(runs):
        end = converse(decoder, Two(), 2)
        sampled, turn = [], []
        context = decoder.tokens[1:]
        while context:
            turn.append(context.pop(0))
            if turn[-1] == 0 or len(turn) == 2:
                sampled.append(tuple(turn))
                turn = []
                if len(sampled) == 1:
                    assert sampled[0][-1] == 0 or context.pop(0) == 0
                    assert context.pop(0) == 1 + sum(sampled[0]) % 2
        assert [t[:-1] if t[-1] == 0 else t for t in sampled] == end.turns
        count += decoder.total.retracted
        seen[tuple(sampled)] += 1
    assert count == back[1] + 2 * back[2]
    assert back[1] > 50 and back[2] > 5, "too little was taken back"
    common = [k for k in outcomes if runs * outcomes[k] >= 5]
    rest = 1 - sum(outcomes[k] for k in common)
    statistic = sum((seen[k] - runs * outcomes[k]) ** 2 / (runs * outcomes[k]) for k in common)
    if rest > 1e-9:
        others = runs - sum(seen[k] for k in common)
        statistic += (others - runs * rest) ** 2 / (runs * rest)
    assert len(common) > 10 and chi2.sf(statistic, len(common)) > 1e-3


def test_distilled_layers_save_passes(trained):
    model, mtp = trained
    fast = speculative_generate(model, mtp, torch.tensor([[1, 4, 7]]), 60)
    assert fast.tokens_per_cycle > 2 and fast.cycles < 30
    both = fast + fast
    assert both.cycles == 2 * fast.cycles and both.accept_counts == [2 * n for n in fast.accept_counts]
    assert both.tokens == fast.tokens * 2 and both.acceptance == fast.acceptance


def test_limits(trained):
    model, mtp = trained
    decoder = Decoder(model, mtp, max_len=10)
    with pytest.raises(ValueError, match="feed"):
        decoder.generate()
    decoder.feed([1, 2, 3])
    with pytest.raises(ValueError, match="max_len"):
        decoder.feed([0] * 8)
    assert len(decoder.generate(max_new=4)) == 4
    assert len(decoder.generate()) == 3 and len(decoder.tokens) == 10
    assert decoder.generate() == [] and decoder.generate(max_new=5) == []
    decoder.reset()
    decoder.feed([1] * 10)
    assert decoder.generate() == []
    with pytest.raises(ValueError, match="draft_len"):
        Decoder(model, mtp, draft_len=4)


def test_demo_runs():
    seen = []
    figures = demo(
        Demo(steps=20, mtp_steps=10, batch=4, length=32, prompts=1, new_tokens=12),
        lambda step, total, **metrics: seen.append((step, total, metrics)),
    )
    assert [s[:2] for s in seen] == [(10, 30), (20, 30), (30, 30)] and "nll" in seen[0][2] and "kl_1" in seen[2][2]
    assert figures["greedy_identical"] == 1.0
    assert {"greedy_speed_up", "sampled_speed_up", "greedy_acceptance_1", "sampled_tokens_per_pass"} <= set(figures)


def test_a_layer_joins_hidden_states_and_embeddings_as_equation_1_says():
    """W · [norm h; norm e], each under its own norm's weights, h first: what the block is given."""
    model, mtp = pair()
    layer, ids = mtp.layers[1], ids_of(2, 9)
    seen = []
    layer.block.register_forward_pre_hook(lambda block, inputs: seen.append(inputs[0]))
    h, emb = torch.randn(2, 9, 16, dtype=torch.float64), model.embed_tokens(ids)
    mtp(h, emb)
    (given,) = seen
    before = []
    mtp.layers[0].register_forward_hook(lambda block, inputs, output: before.append(output))
    mtp(h, emb)
    of_h, of_e = layer.eh_proj.weight.chunk(2, 1)

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + SMALL.rms_norm_eps).sqrt() * weight

    two_on = torch.nn.functional.pad(emb[:, 2:], (0, 0, 0, 2))
    wanted = norm(before[0], layer.hnorm.weight) @ of_h.t() + norm(two_on, layer.enorm.weight) @ of_e.t()
    torch.testing.assert_close(given, wanted)


def test_recall_believes_the_longest_ending_that_it_knows(trained):
    """What followed two tokens says more than what followed the second of them."""
    decoder = Decoder(trained[0], max_len=64, recall=8)
    decoder.turns = {(7,): ([1, 2], 1), (4, 7): ([3, 2], 1)}
    assert decoder.remember([1, 4, 7]) == ([3, 2], False)
    assert decoder.remember([1, 5, 7]) == ([1, 2], False)
    assert decoder.remember([1, 7, 5]) == ([], False)


def test_recall_is_sure_of_a_turn_once_it_has_followed_the_same_tokens_three_times_running(trained):
    """The first three times a pass verifies it; the fourth time it is handed over before any. A turn of another kind
    begins the count again."""
    model, _ = trained
    decoder = Decoder(model, max_len=64, recall=8)
    first = uncached(model, [1, 4, 7], 30)
    stop = first[3]  # some token that it comes to
    turn = first[: first.index(stop) + 1]

    def play():
        decoder.reset()
        decoder.feed([1, 4, 7])
        assert decoder.generate(stop, ahead=True) == turn
        early = decoder.total.cycles == 0
        assert decoder.generate(stop, 0) == [] and decoder.tokens == [1, 4, 7, *turn]
        return early

    assert [play() for _ in range(5)] == [False, False, False, True, True]
    for ending in list(decoder.turns):
        decoder.turns[ending] = ([(turn[0] + 1) % 11, *turn[1:]], 2)  # as if another one had come last
    assert [play() for _ in range(4)] == [False, False, False, True]
