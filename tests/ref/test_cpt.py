"""Corpus, tokenizer, packing, schedule, loss and codebase perplexity."""

import copy
import itertools
import json as json_package
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ref import cpt
from ref.network import Config, Transformer, save_hf

TINY = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    num_experts=4,
    moe_intermediate_size=32,
)


@pytest.fixture(scope="module")
def tokenizer():
    return cpt.train_tokenizer([Path(cpt.__file__).read_text()] * 2, 400)


# --------------------------------------------------------------------------------------------------- corpus


def test_bad_files_are_counted_and_good_ones_read(tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "good.py").write_bytes("x = 'ä'\r\n".encode())
    (tmp_path / "b.py").write_text("y = 1\n")
    (tmp_path / "empty.py").write_text(" \n")
    (tmp_path / "binary.py").write_bytes(b"a\0b")
    (tmp_path / "latin.py").write_bytes("# \xe4".encode("latin-1"))
    (tmp_path / "huge.py").write_text("z" * 2000)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config.py").write_text("hidden")
    (tmp_path / "skip").mkdir()
    (tmp_path / "skip" / "c.py").write_text("skipped")
    os.symlink(tmp_path, tmp_path / "loop")
    os.symlink(tmp_path / "nowhere", tmp_path / "dangling.py")
    os.mkfifo(tmp_path / "pipe.py")
    corpus = cpt.read_corpus(tmp_path, (".py",), ("skip",), max_bytes=1000)
    assert corpus.files == {"b.py": "y = 1\n", "pkg/good.py": "x = 'ä'\n"}
    assert corpus.skipped == {"empty": 1, "binary": 1, "encoding": 1, "huge": 1}


def test_a_corpus_may_be_deeper_than_python_calls(tmp_path):
    """And a folder that cannot be listed is counted."""
    folders = [tmp_path / "/".join(["d"] * depth) for depth in range(1, 1101)]
    try:
        for folder in folders:
            folder.mkdir()
        (folders[-1] / "a.py").write_text("x = 1\n")
        (tmp_path / "b.py").write_text("y = 1\n")
        corpus = cpt.read_corpus(tmp_path)
        assert corpus.files == {"b.py": "y = 1\n", "d/" * 1100 + "a.py": "x = 1\n"} and not corpus.skipped
    finally:  # here: what pytest clears away old folders with would call itself as often
        (folders[-1] / "a.py").unlink(missing_ok=True)
        for folder in reversed(folders):
            folder.rmdir()
    assert cpt.read_corpus(tmp_path / "nowhere").skipped == {"unreadable": 1}


def test_names_are_any_bytes(tmp_path):
    names = [b"caf\xe9.py", b"new\nline.py", b"\x01.py", b"blank .py ", b"na\xc3\xafve.py"]
    for name in names:
        (tmp_path / os.fsdecode(name)).write_text("x = 1\n")
    corpus = cpt.read_corpus(tmp_path)
    assert {os.fsencode(name) for name in corpus.files} == set(names) and not corpus.skipped


def test_files_come_in_alphabetical_order_of_their_paths(tmp_path):
    for name in ("b/z.py", "a.py", "b.py", "a/y.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert list(cpt.read_corpus(tmp_path).files) == sorted(["b/z.py", "a.py", "b.py", "a/y.py"])


def test_one_folder_of_the_right_size_is_held_out():
    files = (
        {f"big/{i}.py": "x" * 1000 for i in range(90)}
        | {f"small/{i}.py": "y" * 1000 for i in range(4)}
        | {"top.py": "z" * 5000}
    )
    name, train, held = cpt.hold_out_codebase(cpt.Corpus(files), 0.04)
    assert name == "small" and set(held.files) == {f"small/{i}.py" for i in range(4)}
    assert set(train.files) | set(held.files) == set(files) and not set(train.files) & set(held.files)


@given(st.integers(2, 200), st.floats(0.01, 0.5))
def test_a_flat_corpus_is_split_by_files(n, share):
    files = {f"f{i:03}.py": f"text {i}" for i in range(n)}
    _, train, held = cpt.hold_out_codebase(cpt.Corpus(files), share)
    assert (
        train.files
        and held.files
        and {**train.files, **held.files} == files
        and not train.files.keys() & held.files.keys()
    )


@pytest.mark.parametrize("files", [{}, {"only.py": "x"}])
def test_too_small_a_corpus_says_so(files):
    with pytest.raises(ValueError, match="at least two"):
        cpt.hold_out_codebase(cpt.Corpus(files))


# ------------------------------------------------------------------------------------------------ tokenizer


@given(st.text())
@settings(max_examples=200)
def test_any_text_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_special_tokens_come_first_and_are_single(tokenizer):
    for number, token in enumerate(cpt.SPECIAL_TOKENS):
        assert tokenizer.token_to_id(token) == number and tokenizer.decode([number], skip_special_tokens=False) == token


@pytest.fixture(scope="module")
def careless(tokenizer):
    """The same tokenizer as others load it: special tokens in a text are control tokens to it, and it puts one before
    every text."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    made = Tokenizer.from_str(tokenizer.to_str())
    made.post_processor = TemplateProcessing(single="<|env|> $A", special_tokens=[("<|env|>", 1)])
    assert made.encode("a<|endoftext|>").ids[::2] == [1, 0]
    return made


spelled = st.lists(st.sampled_from([*cpt.SPECIAL_TOKENS, "<|", "|>", "x = 1\n"]) | st.text(max_size=8)).map("".join)


@given(spelled)
def test_text_is_only_text(tokenizer, careless, text):
    """However the tokenizer came here, no special token comes out of a text, and the text comes back."""
    wanted = tokenizer.encode(text).ids
    assert min(wanted, default=3) >= len(cpt.SPECIAL_TOKENS)
    assert tokenizer.decode(wanted, skip_special_tokens=False) == tokenizer.decode(wanted) == text
    assert (
        cpt.as_text(careless).encode(text).ids == wanted
        and cpt.as_text(copy.deepcopy(tokenizer)).encode(text).ids == wanted
    )
    assert careless.encode("<|agent|>").ids == [1, 2]  # nobody changed it


def test_a_loaded_tokenizer_reads_text_as_text_wherever_it_lies(tokenizer, careless, tmp_path):
    path = tmp_path / os.fsdecode(b"caf\xe9") / "tokenizer.json"
    path.parent.mkdir()
    path.write_text(careless.to_str())
    text = "a<|endoftext|>b"
    assert cpt.load_tokenizer(path).encode(text).ids == tokenizer.encode(text).ids
    path.write_text("{}")
    with pytest.raises(ValueError, match="holds no tokenizer: Model missing"):
        cpt.load_tokenizer(path)


@given(spelled)
def test_a_tokenizer_json_cuts_and_pads_nothing(tokenizer, text):
    """Whoever saved it last may have left `truncation` and `padding` in it, and control tokens that are not special."""
    from tokenizers import AddedToken, Tokenizer

    made = Tokenizer.from_str(tokenizer.to_str())
    made.enable_truncation(4)
    made.enable_padding(length=9)
    made.add_tokens([AddedToken(name, special=False, normalized=False) for name in ("<think>", "<h1>", "  ")])
    read = cpt.as_text(made)
    assert read.encode(text).ids == cpt.as_text(read).encode(text).ids and read.decode(read.encode(text).ids) == text
    assert len(made.encode("x" * 9).ids) == 9 and made.truncation is not None  # nobody changed it
    plain = read.encode(f"<think>{text}<h1>").ids
    assert plain[0] != read.token_to_id("<think>") and plain[-1] == read.token_to_id(
        "<h1>"
    )  # a tag of HTML is no control token


def test_special_tokens_in_texts_are_text_to_the_trainer_too():
    """Merges are learned from what such a word is spelled with, as from any other."""
    one, other = (cpt.train_tokenizer([f"a<|{word}|>b\n" * 9] * 3, 300) for word in ("endoftext", "endoftexu"))
    assert one.get_vocab_size() == other.get_vocab_size()
    assert one.encode("<|endoftext|>").tokens == ["<|", "endoftext", "|>"]


# -------------------------------------------------------------------------------------------------- packing


@given(st.lists(st.lists(st.integers(1, 9), max_size=40), max_size=60), st.integers(1, 24), st.integers(1, 5))
def test_packing_keeps_every_token_and_cuts_only_long_documents(documents, length, open_rows):
    ids, doc = cpt.pack(documents, length, pad=0, open_rows=open_rows)
    pieces = []
    for row, number in zip(ids, doc, strict=True):
        assert all(
            a <= b or b == -1 for a, b in zip(number, number[1:], strict=False)
        )  # documents in order, padding last
        pieces += [tuple(row[number == n]) for n in range(number.max() + 1)]
        assert (row[number < 0] == 0).all()
    expected = [tuple(d[i : i + length]) for d in documents for i in range(0, len(d), length)]
    assert sorted(pieces) == sorted(expected)


def test_what_fits_exactly_is_packed():
    ids, doc = cpt.pack([[1] * 5, [2] * 6, [3] * 3, [4] * 2], 8)
    assert ids.tolist() == [[1] * 5 + [3] * 3, [2] * 6 + [4] * 2]
    assert doc.tolist() == [[0] * 5 + [1] * 3, [0] * 6 + [1] * 2]


def test_packing_wastes_less_than_one_row_at_a_time():
    lengths = np.random.default_rng(0).integers(30, 100, 2000).tolist()
    ids, doc = cpt.pack([[1] * n for n in lengths], 128)
    rows, room = 0, 0
    for n in lengths:  # next fit: begin a row whenever the document does not fit the current one
        rows, room = (rows + 1, 128 - n) if n > room else (rows, room - n)
    assert (doc >= 0).sum() == sum(lengths) and len(ids) < 0.9 * rows


# ------------------------------------------------------------------------------------------ schedule and loss


@given(st.integers(1, 300), st.integers(0, 50), st.integers(0, 300))
def test_schedule_rises_stays_and_falls(total, warmup, decay):
    factors = [cpt.wsd(s, total, warmup, decay) for s in range(total)]
    assert all(0 < f <= 1 for f in factors)
    top = factors.index(max(factors))
    assert factors[: top + 1] == sorted(factors[: top + 1]) and factors[top:] == sorted(factors[top:], reverse=True)
    if decay and warmup + decay <= total:
        assert factors[-1] == pytest.approx(1 / decay)


def test_loss_by_hand():
    """Uniform logits: every scored token costs ln V; the first token of each document and the padding are not
    scored."""
    model = Transformer(Config.tiny(50, **TINY))
    with torch.no_grad():
        model.embed_tokens.weight.zero_()
    ids = torch.tensor([[3, 4, 5, 6, 7, 8, 9]])
    doc = torch.tensor([[0, 0, 0, 1, 1, -1, -1]])
    loss, count = cpt.next_token_loss(model, model(ids, doc=doc, logits=False).hidden, ids, doc)
    assert count == 3 and loss.item() == pytest.approx(3 * math.log(50), rel=1e-6)
    weight = torch.tensor([[1.0, 0, 1, 1, 0, 1, 1]])
    loss, count = cpt.next_token_loss(model, model(ids, doc=doc, logits=False).hidden, ids, doc, weight)
    assert count == 1 and loss.item() == pytest.approx(math.log(50), rel=1e-6)


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return Transformer(Config.tiny(50, **TINY)).double()


@given(seed=st.integers(0, 2**31), cuts=st.sets(st.integers(1, 4)), order=st.permutations(range(5)))
@settings(max_examples=15, deadline=None)
def test_micro_batches_divided_by_one_global_count_add_up_and_rows_may_change_places(network, seed, cuts, order):
    """Loss and gradient, with documents, padding, weights and rows that score nothing at all."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 50, (5, 6), generator=generator)
    doc = torch.randint(0, 3, (5, 6), generator=generator).sort(1)[0] - 1
    weight = torch.rand(5, 6, dtype=torch.float64, generator=generator) * (torch.rand(5, 1, generator=generator) < 0.8)
    hidden = torch.randn(5, 6, 32, dtype=torch.float64, generator=generator)

    def step(*parts):
        x, total, count = hidden.clone().requires_grad_(), 0.0, 0.0
        for rows in parts:
            loss, scored = cpt.next_token_loss(network, x[rows], ids[rows], doc[rows], weight[rows])
            (loss / 17).backward()
            total, count = total + loss.item(), count + scored
        return total, count, x.grad

    total, count, slope = step(list(range(5)))
    edges = [0, *sorted(cuts), 5]
    for parts in ([list(range(a, b)) for a, b in itertools.pairwise(edges)], [order]):
        other, others, grad = step(*parts)
        assert other == pytest.approx(total, rel=1e-6) and others == pytest.approx(count, rel=1e-6)
        torch.testing.assert_close(grad, slope, rtol=1e-6, atol=1e-9)


def test_descent_makes_the_scored_token_likelier_and_leaves_unscored_positions(network):
    ids, doc = torch.tensor([[3, 4, 5, 6, 7, 8]]), torch.tensor([[0, 0, 0, 1, 1, -1]])
    hidden = torch.randn(1, 6, 32, dtype=torch.float64).requires_grad_()
    cpt.next_token_loss(network, hidden, ids, doc)[0].backward()
    assert hidden.grad.any(-1).tolist() == [[True, True, False, True, False, False]]
    before, after = ((network.head(h).log_softmax(-1)) for h in (hidden, hidden - 1e-4 * hidden.grad))
    moved = (after - before)[0, [0, 1, 3], [4, 5, 7]]
    assert (moved > 0).all()


@given(seed=st.integers(0, 2**31), share=st.sampled_from([0.0, 0.1, 0.5, 1.0]))
@settings(max_examples=15, deadline=None)
def test_what_weighs_nothing_is_not_looked_at(network, seed, share):
    """Loss and gradient are those of every position's log-prob times its weight, and hidden states of no weight may be
    anything."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 50, (3, 9), generator=generator)
    weight = torch.rand(3, 9, dtype=torch.float64, generator=generator) * (
        torch.rand(3, 9, generator=generator) < share
    )
    hidden = torch.randn(3, 9, 32, dtype=torch.float64, generator=generator).requires_grad_()
    all_of_them = network.head(hidden[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    expected = -(all_of_them * weight[:, 1:]).sum()
    (slope,) = torch.autograd.grad(expected, hidden)
    strange = hidden.detach().clone()
    strange[:, :-1][weight[:, 1:] == 0] = math.nan
    strange.requires_grad_()
    loss, count = cpt.next_token_loss(network, strange, ids, None, weight)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6) and count == pytest.approx(
        weight[:, 1:].sum().item(), rel=1e-6
    )
    torch.testing.assert_close(strange.grad, slope, rtol=1e-6, atol=1e-9)


# ----------------------------------------------------------------------------------------- codebase perplexity


@pytest.mark.parametrize("window, stride, batch", [(64, 32, 7), (64, 63, 4), (50, 1, 32), (4096, 2048, 2)])
def test_codebase_nll_is_the_sum_transformers_gives_on_the_same_windows(tmp_path, tokenizer, window, stride, batch):
    """On the source of a real package, `json`: each token under the window that the definition names, one forward pass
    each."""
    from transformers import AutoModelForCausalLM

    package = Path(json_package.__file__).parent
    model = Transformer(Config.tiny(tokenizer.get_vocab_size(), **TINY, max_position_embeddings=4096))
    save_hf(model, tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    limit = 260 if stride == 1 else 1500
    found = cpt.codebase_nll(model, tokenizer, package, window, stride, max_tokens=limit, batch=batch)
    text = "\n".join(p.read_text() for p in sorted(package.glob("*.py")))
    ids = torch.tensor(tokenizer.encode(text).ids[:limit])
    total, scored, start = 0.0, 1, 0
    while scored < len(ids):
        start = min(start, max(0, len(ids) - window))
        end = min(start + window, len(ids))
        with torch.no_grad():
            logp = theirs(ids[None, start:end]).logits[0].double().log_softmax(-1)
        total -= sum(logp[t - start - 1, ids[t]].item() for t in range(scored, end))
        scored, start = end, start + stride
    assert found.tokens == len(ids) - 1
    assert found.nll == pytest.approx(total, rel=1e-6)
    assert found.bytes == len(tokenizer.decode(ids.tolist()).encode())


def test_files_are_concatenated_alphabetically(tmp_path, tokenizer):
    model = Transformer(Config.tiny(tokenizer.get_vocab_size(), **TINY))
    for name, text in (("b.py", "second = 2\n"), ("a.py", "first = 1\n")):
        (tmp_path / name).write_text(text)
    one = cpt.codebase_nll(model, tokenizer, cpt.Corpus({"all": "first = 1\n\nsecond = 2\n"}), 32)
    assert cpt.codebase_nll(model, tokenizer, tmp_path, 32) == one
    assert one.bits_per_byte == pytest.approx(one.nll / one.bytes / math.log(2))
    assert one.perplexity == pytest.approx(math.exp(one.nll / one.tokens))


@pytest.mark.parametrize("limit", [None, 40])
def test_special_tokens_in_a_codebase_are_bytes_like_others(tokenizer, careless, limit):
    model = Transformer(Config.tiny(tokenizer.get_vocab_size(), **TINY))
    text = "END = '<|endoftext|>'  # <|env|> <|agent|>\n" * 5
    found = cpt.codebase_nll(model, careless, cpt.Corpus({"a.py": text}), 32, max_tokens=limit)
    ids = tokenizer.encode(text).ids[:limit]
    assert (found.tokens, found.bytes) == (len(ids) - 1, len(tokenizer.decode(ids).encode()))
    assert limit or found.bytes == len(text.encode())
    assert found == cpt.codebase_nll(model, tokenizer, cpt.Corpus({"a.py": text}), 32, max_tokens=limit)


def test_nothing_to_score_says_so(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="nothing to score"):
        cpt.codebase_nll(Transformer(Config.tiny(tokenizer.get_vocab_size(), **TINY)), tokenizer, tmp_path)


def test_the_demonstration_learns():
    found = cpt.demo(cpt.Demo(steps=24, looks=2))
    looks = [v for k, v in found.items() if k.startswith("perplexity")]
    assert looks[-1] < looks[0] / 2


@pytest.mark.parametrize("files, name", [(1, None), (2, "small"), (25, "small"), (26, None), (60, None)])
def test_a_folder_is_held_out_from_a_third_of_the_share_to_five_times_it(files, name):
    """Of 200 equal files 2.5% are five: a folder of two to 25 files will do, else every 40th file is taken."""
    small = {f"small/{i:03}.py": "x" * 10 for i in range(files)}
    corpus = cpt.Corpus(small | {f"big/{i:03}.py": "y" * 10 for i in range(200 - files)})
    found, train, held = cpt.hold_out_codebase(corpus, 0.025)
    assert found == (name or "5 files") and len(held.files) == (files if name else 5)
    assert name or set(held.files) == set(list(corpus.files)[20::40])


def test_the_window_moves_by_half_of_itself_unless_told_and_a_corpus_is_read_in_alphabetical_order(tokenizer):
    text = Path(cpt.__file__).read_text()[:2000]
    model = Transformer(Config.tiny(tokenizer.get_vocab_size(), **TINY, initializer_range=0.3))
    corpus = cpt.Corpus({"b.py": text[1000:], "a.py": text[:1000]})
    found = cpt.codebase_nll(model, tokenizer, corpus, 48)
    assert found == cpt.codebase_nll(model, tokenizer, cpt.Corpus({"all": f"{text[:1000]}\n{text[1000:]}"}), 48, 24)
    assert found.nll != cpt.codebase_nll(model, tokenizer, corpus, 48, 47).nll


@pytest.mark.parametrize(
    "total, warmup, decay, wanted",
    [(6, 2, 3, [1 / 2, 1, 1, 1, 2 / 3, 1 / 3]), (3, 0, 0, [1, 1, 1]), (2, 4, 0, [1 / 4, 1 / 2])],
)
def test_schedule_by_hand(total, warmup, decay, wanted):
    assert [cpt.wsd(step, total, warmup, decay) for step in range(total)] == pytest.approx(wanted)


def test_the_demonstration_repeats_a_small_corpus_and_refuses_one_of_less_than_a_row(tmp_path):
    for n in range(4):
        (tmp_path / f"{n}.py").write_text("\n".join(f"def f{n}{i}(x):\n    return x + {i}\n" for i in range(20)))
    found = cpt.demo(cpt.Demo(corpus=str(tmp_path), steps=2, looks=1, hidden_size=16, vocab_size=300))
    assert "perplexity@4096" in found and found["epochs"] > 1
    for n in range(4):
        (tmp_path / f"{n}.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match="corpus must have at least 128 training tokens, one row, but has"):
        cpt.demo(cpt.Demo(corpus=str(tmp_path)))
