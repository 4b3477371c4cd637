"""What a reference file refuses: shapes, dtypes, empty groups, rows without a token, log-probs that are not
finite. ValueError names the argument, and a shape where one was expected. `test_dr_grpo.py` has the table of
the policy losses."""

import copy
import importlib
import importlib.util
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ref.engine.sampler import Lockstep, Sampler, sample
from ref.network import Config, Transformer
from ref.self_summary import Chaining
from tests.talks import chains_of, contexts_of

INF, NAN = math.inf, math.nan
FILES = (
    "kl",
    "dr_grpo",
    "length_penalty",
    "mtp",
    "engine/decoder",
    "cpt",
    "router_replay",
    "self_summary",
    "quant",
    "engine/sampler",
)


def load(name):
    """The file as a user imports it: without the tests' own shape checks, which would come first."""
    spec = importlib.util.spec_from_file_location(f"untyped_{Path(name).name}", Path("ref", f"{name}.py").resolve())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def ref():
    return SimpleNamespace(**{Path(name).name: load(name) for name in FILES})


def full(value, *shape):
    return torch.full(shape, value)


zeros, ones = torch.zeros, torch.ones


def refuses(says, function, /, *arguments, **options):
    with pytest.raises(ValueError, match=says):
        function(*arguments, **options)


def test_lists_are_no_tensors(ref):
    refuses(r"rewards must be a float tensor of shape \[G, N\]; got a list", ref.dr_grpo.group_advantages, [[1.0, 2.0]])
    refuses("logp must be a float tensor.*got a list", ref.kl.token_kl, [0.0], zeros(1), "k1")
    refuses("scores must be a float tensor.*got a list", ref.router_replay.gates, [[0.0]], zeros(1, 1).long())
    refuses(
        r"mask must be a tensor of shape \[1, 1\]; got a list",
        ref.dr_grpo.policy_loss,
        zeros(1, 1),
        zeros(1, 1),
        zeros(1),
        [[1]],
        budget=1,
    )
    refuses(r"logp must be a float tensor of shape \[\]; got an int", ref.kl.token_kl, 1, zeros(()), "k1")


# ------------------------------------------------------------------------ kl


TOKEN_KL = {
    "broadcast": (
        zeros(2, 3),
        zeros(2, 1),
        r"ref_logp must be a float tensor of shape \[2, 3\]; got torch.float32 of shape \[2, 1\]",
    ),
    "shape": (zeros(2, 3), zeros(2, 4), r"ref_logp must be a float tensor of shape \[2, 3\]"),
    "dtype": (zeros(2).long(), zeros(2), r"logp must be a float tensor of shape \[2\]; got torch.int64 of shape \[2\]"),
    "reference dtype": (zeros(2), zeros(2).long(), "ref_logp must be a float tensor.*torch.int64"),
    "NaN": (full(NAN, 2), zeros(2), "logp must be finite"),
    "impossible": (full(-INF, 2), zeros(2), "logp must be finite"),
    "reference NaN": (zeros(2), full(NAN, 2), "ref_logp must be finite or −inf"),
    "reference inf": (zeros(2), full(INF, 2), "ref_logp must be finite or −inf"),
}


@pytest.mark.parametrize("logp, ref_logp, says", TOKEN_KL.values(), ids=TOKEN_KL)
def test_token_kl(ref, logp, ref_logp, says):
    for kind in ref.kl.KINDS:
        refuses(says, ref.kl.token_kl, logp, ref_logp, kind)


EXACT_KL = {
    "broadcast": (
        zeros(2, 3),
        zeros(3),
        r"ref_logits must be a float tensor of shape \[2, 3\]; got torch.float32 of shape \[3\]",
    ),
    "dtype": (zeros(2, 3).long(), zeros(2, 3), r"logits must be a float tensor of shape \[2, V\]; got torch.int64"),
    "no dimension": (zeros(()), zeros(()), r"logits must be a float tensor of shape \[V\]"),
    "no vocabulary": (zeros(2, 0), zeros(2, 0), r"logits must be finite or −inf, with a finite one.*\[2, 0\]"),
    "NaN": (full(NAN, 2, 3), zeros(2, 3), "logits must be finite or −inf"),
    "inf": (full(INF, 2, 3), zeros(2, 3), "logits must be finite or −inf"),
    "nothing allowed": (full(-INF, 2, 3), zeros(2, 3), "logits must be .* with a finite one in each row"),
    "reference NaN": (zeros(2, 3), full(NAN, 2, 3), "ref_logits must be finite or −inf"),
    "reference allows nothing": (zeros(2, 3), full(-INF, 2, 3), "ref_logits must be .* in each row"),
}


@pytest.mark.parametrize("logits, ref_logits, says", EXACT_KL.values(), ids=EXACT_KL)
def test_exact_kl(ref, logits, ref_logits, says):
    refuses(says, ref.kl.exact_kl, logits, ref_logits)


@pytest.mark.parametrize("m", [NAN, INF, -INF])
def test_gaussian_oracle(ref, m):
    refuses("m must be finite", ref.kl.gaussian_oracle, m)


# ------------------------------------------------------------------------ length penalty


@pytest.mark.parametrize("name", ["length_penalty", "marginal_cost"])
@pytest.mark.parametrize(
    "x, k, says",
    [
        (INF, 0.1, "effort x and kx must be finite"),
        (INF, 0.0, "effort x and kx must be finite"),
        (torch.tensor([1.0, INF]), 0.1, "effort x and kx must be finite"),
        (1e300, 1e10, "effort x and kx must be finite"),
        ([1.0, 2.0], 0.1, "effort x must be a real number, array or tensor; got type list"),
        (None, 0.1, "effort x must be a real number.*got type NoneType"),
        (torch.tensor([1 + 1j]), 0.1, "effort x must be a real number"),
    ],
    ids=["inf", "inf, linear", "inf in a tensor", "kx overflows", "list", "None", "complex"],
)
def test_length_penalty(ref, name, x, k, says):
    refuses(says, getattr(ref.length_penalty, name), x, k, 2.0)


def test_effort(ref):
    effort, Effort, EffortWeights = (getattr(ref.length_penalty, n) for n in ("effort", "Effort", "EffortWeights"))
    refuses("turns: .* finite", effort, Effort(turns=INF))
    refuses("turns: .* finite", effort, Effort(turns=INF), EffortWeights(turns=0.0))
    refuses("tool_calls: .* finite", effort, Effort(), EffortWeights(tool_calls=INF))


# ------------------------------------------------------------------------ router replay


EXPERTS = torch.tensor([[0, 1], [2, 3]])
REPLAY = {
    "scores, dims": (
        {"scores": zeros(4)},
        r"scores must be a float tensor of shape \[N, E\]; got torch.float32 of shape \[4\]",
    ),
    "scores, dtype": ({"scores": zeros(2, 4).long()}, "scores must be a float tensor.*torch.int64"),
    "replayed, dtype": (
        {"replayed": EXPERTS.float()},
        r"replayed must be an int tensor of shape \[2, 2\]; got torch.float32",
    ),
    "replayed, tokens": ({"replayed": EXPERTS[:1]}, r"replayed must be an int tensor of shape \[2, 2\].*\[1, 2\]"),
    "one NaN": ({"scores": torch.tensor([[0.0, 1, 2, 3], [0, 1, NAN, 2]])}, "scores must be finite or -inf"),
    "alpha": ({"alpha": NAN}, "alpha must lie between 0 and 1, got nan"),
    "no experts": ({"k": 0, "replayed": EXPERTS[:, :0]}, "k must lie between 1 and the 4 experts"),
}


@pytest.mark.parametrize("change, says", REPLAY.values(), ids=REPLAY)
def test_replay(ref, change, says):
    arguments = {"scores": zeros(2, 4), "replayed": EXPERTS, "k": 2, "alpha": 0.5}
    ref.router_replay.replay(**arguments)
    refuses(says, ref.router_replay.replay, **(arguments | change))


def test_indices_as_a_sampler_stores_them_are_replayed(ref):
    for dtype in (torch.int16, torch.int32):
        found = ref.router_replay.replay(zeros(2, 4), EXPERTS.to(dtype), 2)
        assert torch.equal(found.sort()[0], EXPERTS)
        assert ref.router_replay.gates(zeros(2, 4), EXPERTS.to(dtype)).tolist() == [[0.5, 0.5]] * 2


GATES = {
    "fewer tokens": (
        zeros(2, 4),
        EXPERTS[:1],
        r"experts must be an int tensor of shape \[2, K\]; got torch.int64 of shape \[1, 2\]",
    ),
    "dtype": (zeros(2, 4), EXPERTS.float(), "experts must be an int tensor.*torch.float32"),
    "scores, dtype": (zeros(2, 4).long(), EXPERTS, "scores must be a float tensor"),
    "out of range": (zeros(2, 4), EXPERTS + 1, "experts must name experts 0 to 3, got 1 to 4"),
    "negative": (zeros(2, 4), EXPERTS - 1, "experts must name experts 0 to 3"),
    "twice": (zeros(2, 4), EXPERTS * 0, "experts must hold distinct"),
    "NaN": (full(NAN, 2, 4), EXPERTS, "scores must be finite or -inf"),
    "inf": (full(INF, 2, 4), EXPERTS, "scores must be finite or -inf"),
    "nothing to weigh": (full(-INF, 2, 4), EXPERTS, "scores must .* a finite one among the experts"),
    "no experts": (zeros(2, 4), EXPERTS[:, :0], "scores must .* a finite one among the experts"),
}


@pytest.mark.parametrize("scores, experts, says", GATES.values(), ids=GATES)
def test_gates(ref, scores, experts, says):
    refuses(says, ref.router_replay.gates, scores, experts)


ALL = ones(2, 3).bool()
MISMATCH = {
    "broadcast": ({"behavior": zeros(2, 1)}, r"behavior must be a float tensor of shape \[2, 3\]"),
    "mask, rows": ({"mask": ALL[:, 0]}, r"mask must be a bool tensor of shape \[2, 3\]; got torch.bool of shape \[2\]"),
    "mask, dtype": ({"mask": ALL.long()}, "mask must be a bool tensor.*torch.int64"),
    "dtype": ({"logp": zeros(2, 3).long()}, "logp must be a float tensor"),
    "NaN": ({"logp": full(NAN, 2, 3)}, "logp must be finite where mask is True"),
    "inf": ({"behavior": full(-INF, 2, 3)}, "behavior must be finite where mask is True"),
    "nothing": ({"mask": ~ALL}, "mask must be True somewhere"),
}


@pytest.mark.parametrize("change, says", MISMATCH.values(), ids=MISMATCH)
def test_mismatch(ref, change, says):
    arguments = {"logp": zeros(2, 3), "behavior": zeros(2, 3), "mask": ALL}
    refuses(says, ref.router_replay.mismatch, **(arguments | change))


def test_what_no_token_sampled_may_be_anything(ref):
    found = ref.router_replay.mismatch(torch.tensor([0.0, NAN]), zeros(2), torch.tensor([True, False]))
    assert found["max"] == 0


DIFFERING = {
    "no layers": ([], [], "ours and theirs must hold as many layers, got 0 and 0"),
    "layers": ([EXPERTS], [EXPERTS, EXPERTS], "as many layers, got 1 and 2"),
    "tokens": (
        [EXPERTS],
        [EXPERTS[:1]],
        r"theirs\[0\] must be an int tensor of shape \[2, 2\]; got torch.int64 of shape \[1, 2\]",
    ),
    "experts": ([EXPERTS], [EXPERTS[:, :1]], r"theirs\[0\] must be an int tensor of shape \[2, 2\]"),
    "unlike layers": ([EXPERTS, EXPERTS[:1]], [EXPERTS, EXPERTS], r"ours\[1\] must be an int tensor of shape \[2, 2\]"),
    "dims": ([EXPERTS[0]], [EXPERTS[0]], r"ours\[0\] must be an int tensor of shape \[N, K\]"),
    "dtype": ([EXPERTS.float()], [EXPERTS], r"ours\[0\] must be an int tensor.*torch.float32"),
    "no tokens": ([EXPERTS[:0]], [EXPERTS[:0]], r"ours must hold experts of at least one token, got \[0, 2\]"),
}


@pytest.mark.parametrize("ours, theirs, says", DIFFERING.values(), ids=DIFFERING)
def test_differing(ref, ours, theirs, says):
    refuses(says, ref.router_replay.compare_experts, ours, theirs)


# ------------------------------------------------------------------------ cpt


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    c = Config(
        vocab_size=23,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=0,
        intermediate_size=12,
    )
    model, ids = Transformer(c).requires_grad_(False), torch.randint(0, 23, (2, 6))
    return model, ids, model(ids)


ROWS = zeros(2, 6).long()
NEXT_TOKEN = {
    "ids, length": (
        {"ids": ROWS[:, :4]},
        r"ids must be an int tensor of shape \[2, 6\]; got torch.int64 of shape \[2, 4\]",
    ),
    "ids, rows": ({"ids": ROWS[:1]}, r"ids must be an int tensor of shape \[2, 6\]"),
    "ids, transposed": (
        {"ids": ROWS.t()},
        r"ids must be an int tensor of shape \[2, 6\]; got torch.int64 of shape \[6, 2\]",
    ),
    "ids, dtype": ({"ids": ROWS.float()}, "ids must be an int tensor.*torch.float32"),
    "ids, unknown": ({"ids": ROWS + 23}, "ids must be tokens 0 to 22; got 23 to 23"),
    "ids, ignored": ({"ids": ROWS - 100}, "ids must be tokens 0 to 22; got -100"),
    "doc, rows": ({"doc": ROWS[:1]}, r"doc must be an int tensor of shape \[2, 6\]; got torch.int64 of shape \[1, 6\]"),
    "doc, dtype": ({"doc": ROWS.float()}, "doc must be an int tensor"),
    "weight, rows": ({"weight": ones(1, 6)}, r"weight must be a tensor of shape \[2, 6\]"),
    "weight, length": ({"weight": ones(2, 5)}, r"weight must be a tensor of shape \[2, 6\]"),
    "weight, NaN": ({"weight": full(NAN, 2, 6)}, "weight must be finite"),
}
HIDDEN = {
    "hidden, dims": ({"hidden": zeros(6, 16)}, r"hidden must be a float tensor of shape \[B, T, 16\]"),
    "hidden, width": (
        {"hidden": zeros(2, 6, 3)},
        r"hidden must be a float tensor of shape \[B, T, 16\]; got .* \[2, 6, 3\]",
    ),
    "hidden, NaN": ({"hidden": full(NAN, 2, 6, 16)}, "hidden must give finite log-probs"),
    "hidden, NaN where nothing is scored": (
        {"hidden": full(NAN, 2, 6, 16), "doc": ROWS - 1},
        "hidden must give finite log-probs",
    ),
}


@pytest.mark.parametrize("change, says", (NEXT_TOKEN | HIDDEN).values(), ids=NEXT_TOKEN | HIDDEN)
def test_next_token_loss(ref, network, change, says):
    model, ids, out = network
    refuses(says, ref.cpt.next_token_loss, model, **({"hidden": out.hidden, "ids": ids} | change))


@pytest.mark.parametrize("nothing", [{"doc": ROWS - 1}, {"weight": zeros(2, 6)}, {"weight": ROWS.bool()}], ids=str)
def test_rows_without_a_scored_token_are_a_loss_of_zero_and_count_none(ref, network, nothing):
    model, ids, out = network
    hidden = out.hidden.clone().requires_grad_()
    loss, count = ref.cpt.next_token_loss(model, hidden, ids, **nothing)
    loss.backward()
    assert (loss.item(), count) == (0, 0) and not hidden.grad.any()


PACK = {
    "length": ({"length": 0}, "length must be a whole number of at least 1; got 0"),
    "length, negative": ({"length": -1}, "length must be a whole number of at least 1"),
    "length, broken": ({"length": 2.5}, "length must be a whole number of at least 1; got 2.5"),
    "open_rows": ({"open_rows": -1}, "open_rows must be a whole number of at least 1"),
    "dtype": ({"documents": [[1], [1.7, 2.2]]}, r"documents must .*; number 1 is float64 \[2\]"),
    "shape": ({"documents": [[[1, 2], [3, 4]]]}, r"documents must .*; number 0 is int64 \[2, 2\]"),
}


@pytest.mark.parametrize("change, says", PACK.values(), ids=PACK)
def test_pack(ref, change, says):
    refuses(says, ref.cpt.pack, **({"documents": [[1, 2, 3]], "length": 4} | change))


@pytest.mark.parametrize(
    "step, total, warmup, decay", [(10, 10, 2, 2), (-1, 10, 2, 2), (0, 0, 1, 1), (3, 10, -1, 2), (NAN, 9, 1, 1)]
)
def test_wsd(ref, step, total, warmup, decay):
    refuses("step must lie in 0 … total − 1", ref.cpt.wsd, step, total, warmup, decay)


@pytest.mark.parametrize("share", [0, 1, -1, NAN, INF])
def test_hold_out_share(ref, share):
    refuses("share must lie between 0 and 1", ref.cpt.hold_out_codebase, ref.cpt.Corpus({"a": "x", "b": "y"}), share)


def test_a_corpus_of_one_folder_is_not_held_out_whole(ref):
    _, train, held = ref.cpt.hold_out_codebase(ref.cpt.Corpus({"a/1": "xx", "a/2": "yy"}), 0.9)
    assert train.files and held.files


def test_a_vocabulary_without_room_for_bytes(ref):
    refuses("vocab_size must be at least 259; got 100", ref.cpt.train_tokenizer, ["abc"], 100)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"batch": 0}, "batch must be at least 1"),
        ({"batch": -1}, "batch must be at least 1"),
        ({"max_tokens": -5}, "max_tokens must not be negative"),
        ({"stride": 0}, "nothing to score.*stride 0"),
        ({"window": 1}, "nothing to score.*window 1"),
    ],
    ids=str,
)
def test_codebase_nll(ref, change, says):
    tokenizer = ref.cpt.train_tokenizer(["abc"], 259)
    corpus = ref.cpt.Corpus({"a": "hello, hello, hello"})
    shape = dict(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=0,
        intermediate_size=16,
    )
    model = Transformer(Config.tiny(259, **shape))
    refuses(says, ref.cpt.codebase_nll, model, tokenizer, corpus, **({"window": 8} | change))
    if change == {"batch": 0}:
        small = Transformer(Config.tiny(50, **shape))
        refuses("tokenizer must give tokens 0 to 49", ref.cpt.codebase_nll, small, tokenizer, corpus, 8)
        with torch.no_grad():
            model.norm.weight.fill_(NAN)
        refuses("model must give finite log-probs", ref.cpt.codebase_nll, model, tokenizer, corpus, 8)


# ------------------------------------------------------------------------ mtp


MTP_LOSS = {name: case for name, case in NEXT_TOKEN.items()} | {
    "share": ({"share": NAN}, "share must lie between 0 and 1"),
    "share, negative": ({"share": -1.0}, "share must lie between 0 and 1"),
    "chunk": ({"chunk": 0}, "chunk must be at least 1"),
    "kind": ({"kind": "soft"}, "kind must be distill or hard; got 'soft'"),
}


@pytest.mark.parametrize("change, says", MTP_LOSS.values(), ids=MTP_LOSS)
def test_mtp_loss(ref, network, change, says):
    model, ids, out = network
    layers = ref.mtp.MTP(model.config, ref.mtp.MTPConfig(2, 12))
    ref.mtp.mtp_loss(layers, model, out, ids)
    refuses(says, ref.mtp.mtp_loss, layers, model, out, **({"ids": ids} | change))


@pytest.mark.parametrize("part", ["hidden", "prenorm"])
def test_mtp_loss_of_hidden_states_that_are_not_finite(ref, network, part):
    model, ids, out = network
    layers = ref.mtp.MTP(model.config, ref.mtp.MTPConfig(2, 12))
    broken = type(out)(**(vars(out) | {part: out.hidden * NAN}))
    refuses("out must give finite log-probs", ref.mtp.mtp_loss, layers, model, broken, ids)


@pytest.mark.parametrize("nothing", [{"doc": ROWS - 1}, {"weight": zeros(2, 6)}, {"share": 0.0}], ids=str)
def test_mtp_loss_of_nothing_is_zero(ref, network, nothing):
    model, ids, out = network
    loss, count, figures = ref.mtp.mtp_loss(ref.mtp.MTP(model.config), model, out, ids, **nothing)
    loss.backward()
    assert (loss.item(), count) == (0, 0) and not any(figures.values())


@pytest.mark.parametrize(
    "prenorm, emb, doc, says",
    [
        (
            zeros(2, 6, 8),
            zeros(2, 6, 16),
            None,
            r"prenorm must be a float tensor of shape \[B, T, 16\]; got .* \[2, 6, 8\]",
        ),
        (zeros(6, 16), zeros(6, 16), None, r"prenorm must be a float tensor of shape \[B, T, 16\]"),
        (
            zeros(2, 6, 16),
            zeros(2, 4, 16),
            None,
            r"emb must be a float tensor of shape \[2, 6, 16\]; got .* \[2, 4, 16\]",
        ),
        (zeros(2, 6, 16), zeros(2, 6, 16).long(), None, "emb must be a float tensor"),
        (zeros(2, 6, 16), zeros(2, 6, 16), ROWS[:1], r"doc must be an int tensor of shape \[2, 6\]"),
    ],
    ids=["width", "dims", "emb, length", "emb, dtype", "doc, rows"],
)
def test_mtp_layers(ref, network, prenorm, emb, doc, says):
    refuses(says, ref.mtp.MTP(network[0].config), prenorm, emb, doc)


@pytest.mark.parametrize("change", [{"depth": 0}, {"depth": 1.5}, {"intermediate_size": 0}], ids=str)
def test_mtp_config(ref, change):
    refuses(f"{next(iter(change))} must be a whole number of at least 1", ref.mtp.MTPConfig, **change)


P, Q = full(0.25, 3, 4), full(0.25, 2, 4)
ACCEPT = {
    "p, rows": ({"p": P[:2]}, r"p must have shape \[3, 4\] for 2 drafts; got \[2, 4\]"),
    "q, rows": ({"q": Q[:1]}, r"q must have shape \[2, 4\] for 2 drafts"),
    "q, vocabulary": ({"q": Q[:, :3]}, r"q must have shape \[2, 4\].*got \[2, 3\]"),
    "u": ({"u": [0.1, 0.1]}, r"u must have shape \[3\] for 2 drafts; got \[2\]"),
    "draft, unknown": ({"draft": [0, 9]}, r"draft must hold tokens 0 to 3; got \[0, 9\]"),
    "draft, negative": ({"draft": [0, -1]}, "draft must hold tokens 0 to 3"),
    "p, NaN": ({"p": P * NAN}, "p must hold floating-point probabilities"),
    "q, NaN": ({"q": Q * NAN}, "q must hold floating-point probabilities"),
    "p, logits": ({"p": -P}, "p must hold floating-point probabilities that are finite and not negative"),
    "p, dtype": ({"p": P.long()}, "p must hold floating-point probabilities"),
    "p, nothing": ({"p": P * 0}, "mass must be finite and positive somewhere"),
    "u, one": ({"u": [0.1, 0.1, 1.0]}, r"u must hold numbers in \[0, 1\); got"),
    "u, negative": ({"u": [-0.1, 0.1, 0.1]}, "u must hold numbers in"),
    "u, NaN": ({"u": [0.1, NAN, 0.1]}, "u must hold numbers in"),
}


@pytest.mark.parametrize("change, says", ACCEPT.values(), ids=ACCEPT)
def test_accept(ref, change, says):
    arguments = {"p": P, "q": Q, "draft": [0, 1], "u": [0.1, 0.1, 0.1]}
    assert ref.decoder.accept(**arguments)[0] == 2
    refuses(says, ref.decoder.accept, **(arguments | change))


GENERATE = {
    "rows": ({"prompt": ROWS}, r"prompt must be an int tensor of shape \[1, T\]; got torch.int64 of shape \[2, 6\]"),
    "dims": ({"prompt": ROWS[0]}, r"prompt must be an int tensor of shape \[1, T\]"),
    "dtype": ({"prompt": ROWS[:1].float()}, "prompt must be an int tensor"),
    "nothing": ({"prompt": ROWS[:1, :0]}, "feed at least one token"),
    "unknown": ({"prompt": ROWS[:1] + 23}, "tokens must be whole numbers from 0 to 22"),
    "negative": ({"prompt": ROWS[:1] - 1}, "tokens must be whole numbers from 0 to 22"),
    "new": ({"max_new_tokens": -1}, "max_new_tokens must not be negative; got -1"),
    "temperature": ({"temperature": NAN}, "temperature"),
    "temperature, negative": ({"temperature": -1.0}, "temperature"),
}


@pytest.mark.parametrize("change, says", GENERATE.values(), ids=GENERATE)
def test_generate(ref, network, change, says):
    arguments = {"model": network[0], "prompt": ROWS[:1], "max_new_tokens": 2} | change
    refuses(says, ref.mtp.plain_generate, **arguments)
    refuses(says, ref.mtp.speculative_generate, mtp=ref.mtp.MTP(network[0].config), **arguments)


def test_decoder(ref, network):
    for options in ({"max_len": 0}, {"recall": -1}, {"temperature": INF}):
        refuses(next(iter(options)), ref.decoder.Decoder, network[0], **options)
    refuses("tokens must be whole numbers", ref.decoder.Decoder(network[0]).feed, [1.5])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_decoding_with_weights_that_are_no_numbers(ref, network, temperature):
    broken = copy.deepcopy(network[0])
    broken.norm.weight[3] = NAN
    for layers in (None, ref.mtp.MTP(broken.config)):
        decoder = ref.decoder.Decoder(broken, layers, temperature=temperature)
        decoder.feed([1, 2])
        refuses(
            "p must hold floating-point probabilities" if temperature else "model must give logits",
            decoder.generate,
            max_new=3,
        )


# ------------------------------------------------------------------------ sampler


SAMPLE = {
    "temperature, negative": ({"temperature": -0.5}, "temperature must be finite and not negative; got -0.5"),
    "temperature, NaN": ({"temperature": NAN}, "temperature must be finite and not negative; got nan"),
    "temperature, inf": ({"temperature": INF}, "temperature must be finite"),
    "NaN": ({"logits": torch.tensor([[0.0, 1.0], [0.0, NAN]])}, "logits / temperature .*; row 1 of 2 is not"),
    "inf": ({"logits": torch.tensor([[INF, 1.0], [0.0, 1.0]])}, "logits / temperature .*; row 0 of 2 is not"),
    "nothing allowed": ({"logits": full(-INF, 2, 3)}, "logits / temperature .*; row 0 of 2 is not"),
}


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("change, says", SAMPLE.values(), ids=SAMPLE)
def test_sample(change, says, greedy):
    arguments = {
        "logits": torch.tensor([[0.0, -INF]] * 2),
        "temperature": 0.0 if greedy else 1.0,
        "u": torch.tensor([0.1, 0.9]),
    }
    assert sample(**arguments)[0].tolist() == [0, 0]
    refuses(says, sample, **(arguments | change))


ROLLOUT = {
    "temperature": ({"temperature": -1.0}, "temperature must be finite and not negative; got -1.0"),
    "length": ({"max_len": 0}, "max_len must be at least 1; got 0"),
    "prompt, nothing": ({"prompt": []}, "prompt must hold tokens 0 to 22, and a prompt must not be empty"),
    "prompt, unknown": ({"prompt": [1, 23]}, "prompt must hold tokens 0 to 22"),
    "prompt, negative": ({"prompt": [-1]}, "prompt must hold tokens 0 to 22"),
    "prompt, dtype": ({"prompt": [1.5]}, "prompt must hold tokens 0 to 22"),
}


@pytest.mark.parametrize("change, says", ROLLOUT.values(), ids=ROLLOUT)
def test_rollout(ref, network, change, says):
    sampler, talks = ref.sampler.Sampler(network[0], torch.float32), [Talk([1, 2]), Talk(change.get("prompt", [3]))]
    slots, max_len, temperature = 2, change.get("max_len", 5), change.get("temperature", 1.0)

    def sampled(talks, max_len=5, temperature=1.0):
        engine = sampler.engine(slots, max_len, temperature)
        return [engine.add(talk.prompt, [0], torch.rand(max_len)) for talk in talks]

    assert sampled([Talk([1, 2]), Talk([3])]) == [0, 1]
    refuses(says, sampled, talks, max_len, temperature)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampling_from_weights_that_are_no_numbers(network, temperature):
    sampler = Sampler(network[0], torch.float32)
    sampler.model.norm.weight[3] = NAN
    refuses("logits / temperature", contexts_of, sampler, [Talk([1, 2])], 5, temperature)


# ------------------------------------------------------------------------ self-summary


def chain(ref, segments):
    nothing = (zeros(1).long(), zeros(1).bool(), zeros(1), zeros(1).long(), zeros(0, 0, 2).short(), True)
    return ref.self_summary.Chain([ref.self_summary.Segment(*nothing) for _ in range(segments)])


SPREAD = {
    "column": (zeros(2, 1), r"advantages must be a float tensor of shape \[2\]; got torch.float32 of shape \[2, 1\]"),
    "number": (zeros(()), r"advantages must be a float tensor of shape \[2\]"),
    "rows": (zeros(3), r"advantages must be a float tensor of shape \[2\]; got torch.float32 of shape \[3\]"),
    "dtype": (zeros(2).long(), "advantages must be a float tensor.*torch.int64"),
    "NaN": (torch.tensor([1.0, NAN]), "advantages must be finite"),
    "list": ([1.0, 2.0], "advantages must be a float tensor.*got a list"),
}


@pytest.mark.parametrize("advantages, says", SPREAD.values(), ids=SPREAD)
def test_spread(ref, advantages, says):
    chains = [chain(ref, 2), chain(ref, 1)]
    assert ref.self_summary.spread(torch.tensor([1.0, 2.0]), chains).tolist() == [1, 1, 2]
    refuses(says, ref.self_summary.spread, advantages, chains)


@pytest.mark.parametrize(
    "change", [{"trigger": NAN}, {"trigger": 2.5}, {"room": NAN}, {"longest_summary": None}], ids=str
)
def test_chaining(ref, change):
    settings = {"trigger": 20, "longest_summary": 4, "room": 3, "request": (1,)}
    ref.self_summary.Chaining(**settings)
    refuses(
        f"{next(iter(change))} must be a whole number of at least", ref.self_summary.Chaining, **(settings | change)
    )


class Talk:
    def __init__(self, prompt):
        self.prompt, self.stop = prompt, 0

    def reply(self, turn):
        return None


CHAINS = {
    "prompt, nothing": ({"prompt": []}, "prompt must hold tokens 0 to 22, and a prompt must not be empty"),
    "prompt, unknown": ({"prompt": [23]}, "prompt must hold tokens 0 to 22"),
    "request": ({"request": (23,)}, "request must hold tokens 0 to 22"),
    "resume": ({"resume": (-1,)}, "resume must hold tokens 0 to 22"),
    "temperature": ({"temperature": NAN}, "temperature must be finite and not negative; got nan"),
    "temperature, negative": ({"temperature": -1.0}, "temperature must be finite and not negative"),
}


@pytest.mark.parametrize("change, says", CHAINS.values(), ids=CHAINS)
def test_rollout_chains(network, change, says):
    settings = {"trigger": 20, "longest_summary": 4, "room": 3, "request": (1,)}
    settings |= {name: value for name, value in change.items() if name in ("request", "resume")}
    talks = [Talk([1, 2]), Talk(change.get("prompt", [3]))]
    options = {"temperature": change["temperature"]} if "temperature" in change else {}
    how = Chaining(**settings)
    refuses(says, chains_of, Sampler(network[0], torch.float32), talks, how, **options)


def test_a_policy_without_finite_log_probs(network):
    class Broken(Lockstep):
        def remove(self, slot, finished=True):
            segment = super().remove(slot, finished)
            return replace(segment, logp=segment.logp * NAN)

    how = Chaining(trigger=20, longest_summary=4, room=3, request=(1,))
    sampler = Sampler(network[0], torch.float32)
    sampler.engine = lambda *sizes: Broken(sampler, *sizes)
    refuses("the policy must give finite log-probs", chains_of, sampler, [Talk([1])], how)


# ------------------------------------------------------------------------ low precision


codes8, bytes8 = torch.zeros(2, 40, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8)
QUANT = {
    "MXFP8 dtype": ("mxfp8_quantize", (zeros(4).int(),), {}, "x must be a float tensor; got torch.int32"),
    "MXFP8 axis": ("mxfp8_quantize", (zeros(4),), {"axis": 1}, r"x must have an axis 1; got shape \[4\]"),
    "MXFP8 mode": ("mxfp8_quantize", (zeros(4),), {"mode": "up"}, "mode must be rceil, floor, ceil or even; got 'up'"),
    "MXFP8 scales": (
        "mxfp8_dequantize",
        (codes8, bytes8, 0),
        {},
        r"scales must be an int tensor of shape \[1, 40\]; got torch.uint8 of shape \[2, 2\]",
    ),
    "NVFP4 number": ("nvfp4_quantize", (3.0,), {}, "x must be a float tensor; got float"),
    "NVFP4 no axis": ("nvfp4_quantize", (zeros(()),), {}, r"x must have an axis -1; got shape \[\]"),
    "NVFP4 nothing": (
        "nvfp4_quantize",
        (zeros(3, 0),),
        {},
        r"the last axis of x must not be empty; got shape \[3, 0\]",
    ),
    "NVFP4 scale": ("nvfp4_quantize", (zeros(4),), {"scale": "row"}, "scale must be token or tensor; got 'row'"),
    "NVFP4 division": (
        "nvfp4_quantize",
        (zeros(4),),
        {"division": "exact"},
        "division must be ieee or fast; got 'exact'",
    ),
    "NVFP4 blocks": (
        "nvfp4_dequantize",
        (codes8, bytes8, zeros(2, 1)),
        {},
        r"blocks must be an int tensor of shape \[2, 5\]",
    ),
    "NVFP4 float32": (
        "nvfp4_dequantize",
        (codes8[:, :16], bytes8, zeros(2)),
        {},
        r"scale must be a float tensor of shape \[2, 1\]; got .* \[2\]",
    ),
    "NVFP4 size": (
        "nvfp4_dequantize",
        (codes8[:, :16], bytes8, zeros(2, 1)),
        {"size": 30},
        "size must be 32 or one less.*got 30",
    ),
    "FP8 one axis": ("blockwise_fp8_quantize", (zeros(4),), {}, r"x must have rows and columns.*got \[4\]"),
    "FP8 block": ("blockwise_fp8_quantize", (zeros(4, 4), (0, 4)), {}, r"block sizes must be at least 1.*\(0, 4\)"),
    "FP8 scales": (
        "blockwise_fp8_dequantize",
        (codes8, zeros(1, 1)),
        {},
        r"scale must be a float tensor of shape \[2, 1\]",
    ),
    "format": ("rounded", (zeros(4), "int4"), {}, "form must be one of float32, .*; got 'int4'"),
    "linear shapes": (
        "linear",
        (zeros(2, 3), zeros(4, 5)),
        {},
        r"weight must be a float tensor of shape \[O, 3\]; got .* \[4, 5\]",
    ),
    "linear format": (
        "linear",
        (zeros(2, 3), zeros(4, 3), "fp4"),
        {},
        "forward and backward must each be one of .*; got 'fp4'",
    ),
    "experts": (
        "grouped_linear",
        (zeros(2, 3), zeros(2, 4, 3), torch.tensor([1])),
        {},
        r"ends must be an int tensor of shape \[2\]",
    ),
    "ends fall": (
        "grouped_linear",
        (zeros(2, 3), zeros(2, 4, 3), torch.tensor([3, 2])),
        {},
        "ends must rise to the 2 tokens of x",
    ),
    "ends short": (
        "grouped_linear",
        (zeros(2, 3), zeros(2, 4, 3), torch.tensor([0, 1])),
        {},
        "ends must rise to the 2 tokens of x",
    ),
}


@pytest.mark.parametrize("name, args, how, says", QUANT.values(), ids=QUANT)
def test_quant(ref, name, args, how, says):
    refuses(says, getattr(ref.quant, name), *args, **how)
