"""The stage that makes rows out of a corpus: nothing is lost, changed or starved on the way, for small and full runs
alike."""

import json
import os
import py_compile
import random
import sysconfig
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.runs import Run
from kit.settings import fill
from recipe.small import data as corpus
from recipe.small import learner
from recipe.small.agent import Language
from recipe.small.settings import Recipe
from ref import cpt
from scaled import pretrain as full
from sims.policies import SMOKE

END = 0
CODE = "ß"
"""A letter of every line of the tests' code, and of no module of the small world."""


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Fewer episodes for the tokenizer to read, and no TensorBoard."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "shown_episodes", lambda config: iter(()))
        patch.setattr("kit.runs.open_board", lambda *_: False)
        yield


def write(folder, lines, files=12):
    """Code of so many lines a file, a folder of its own each."""
    for n in range(files):
        (folder / f"p{n:02}").mkdir(parents=True)
        text = "".join(f"ß{n} = {CODE} + {i}\n" for i in range(lines))
        (folder / f"p{n:02}" / "a.py").write_text(text, encoding="utf-8")
    return folder


def read(out, code, **changed):
    """The folder in which the stage was played on a folder of code, and its result."""
    tree = {
        "data": SMOKE["data"] | {"corpus": str(code), "heldout_share": 0.08} | changed,
        "training": SMOKE["training"],
    }
    config = fill(Recipe, tree)
    with Run.open(out, "recipe", config) as run:
        corpus.data(run, config)
    return out, json.loads((out / "stages" / "data.json").read_text())["result"]


def documents(out, phase):
    """Tokens of every document of a phase."""
    with np.load(out / "data" / f"{phase}.npz") as packed:
        ids, doc = packed["ids"].astype(np.int64), packed["doc"]
    return [row[number == n].tolist() for row, number in zip(ids, doc, strict=True) for n in range(number.max() + 1)]


# ------------------------------------------------------------------------------------------- as much as asked for


@pytest.mark.parametrize("share", [0.0, 0.25, 0.75, 1.0])
@pytest.mark.parametrize("lines", [9, 900])
def test_both_phases_get_their_shares_however_small_the_corpus(tmp_path, capsys, lines, share):
    out, result = read(tmp_path / "out", write(tmp_path / "code", lines), world_share=share)
    language, asked = learner.language_of(out), SMOKE["training"]
    for phase, tokens in (("short", asked["tokens"]), ("long", asked["long_tokens"])):
        found = documents(out, phase)
        code = sum(len(ids) for ids in found if CODE in language.decode(ids))
        both = sum(map(len, found))
        assert (
            0 <= code - tokens * (1 - share) < 256 and 0 <= both - code - tokens * share < 256
        )  # a piece at most too many
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("corpus:")]
    small = lines == 9 and share < 1
    assert (result["epochs"] > 1) == small and len(said) == small
    assert all(f"so it is read {result['epochs']:,.2f} times" in line for line in said)


def test_a_world_of_short_modules_lasts(tmp_path):
    """Modules are drawn for as long as a phase asks."""
    code = write(tmp_path / "code", 30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            corpus, "documents", lambda rng, world: iter(lambda: f"def m{rng.randrange(10)}(a):\n    return a\n", None)
        )
        out, _ = read(tmp_path / "out", code, world_share=0.9)
    assert sum(map(len, documents(out, "long"))) >= SMOKE["training"]["long_tokens"]


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=6), st.integers(0, 3000), st.integers(2, 16))
@settings(max_examples=60, deadline=None)
def test_pieces_are_what_is_asked_for_or_all_there_is(sizes, tokens, length):
    """No place of a file is read twice, and what is cut off a large file is what nobody asks for."""

    class Letters:
        def encode(self, text):
            return type("Encoding", (), {"ids": list(map(ord, text))})

    files = ["".join(chr(300 + 4000 * n + i) for i in range(size)) for n, size in enumerate(sizes)]
    pieces = corpus.code_pieces(Letters(), files, tokens, length, END, random.Random(0))
    found = [token for piece in pieces for token in piece if token != END]
    assert len(set(found)) == len(found) and max(map(len, pieces)) <= length
    assert sum(map(len, pieces)) >= min(tokens, sum(sizes) + len(sizes))


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ({"a.py": "x = 1\n", "b.py": "y = 2\n"}, "training tokens are fewer than a row of"),
        ({"a.py": "x = 1\n" * 999, "b.py": "y"}, "the held-out part is a single token"),
        ({"a.py": "x = 1\n"}, "the corpus has 1 usable text files; at least two"),
    ],
    ids=["row", "held", "files"],
)
@pytest.mark.parametrize(
    "words",
    [
        ("recipe", "--set", "training.tokens=2000", "--set", "training.long_tokens=2000"),
        ("cpt", "--scale", "full", "--backend", "gloo"),
    ],
    ids=["small", "full"],
)
def test_too_small_a_corpus_is_one_line_and_nothing_written(tiny_run, tmp_path, ask, words, code, says):
    (tmp_path / "code").mkdir()
    words += ("--checkpoint", tiny_run / "checkpoints" / "mid-cpt") if "full" in words else ()
    for name, text in code.items():
        (tmp_path / "code" / name).write_text(text)
    exit_code, _, error = ask("run", *words, "--corpus", tmp_path / "code", "--out", tmp_path / "new" / "out")
    assert (
        exit_code == 2
        and error.count("\n") == 1
        and says in error
        and f"corpus {tmp_path / 'code'}: " in error
        and "--corpus" in error
    )
    assert not (tmp_path / "new").exists()


def test_a_full_run_says_how_often_it_reads_a_small_corpus(tiny_run, tmp_path, capsys):
    start = str(tiny_run / "checkpoints" / "mid-cpt")
    settings = replace(full.Full.rehearsal(), corpus=str(write(tmp_path / "code", 30)), checkpoint=start, steps=100)
    full.prepare(settings, tmp_path / "out")
    said = capsys.readouterr().out
    there = (np.load(tmp_path / "out" / "data" / "doc.npy") >= 0).sum()
    assert said.count("\n") == 1 and f"100 steps need 204,800 tokens and it has {there:,} for training" in said
    full.prepare(settings, tmp_path / "out")
    assert capsys.readouterr().out == ""  # a run that goes on has been told


# ------------------------------------------------------------------------------------------------ text is text


def test_special_tokens_in_a_corpus_end_no_document_and_speak_for_nobody(tiny_run, tmp_path):
    code = write(tmp_path / "code", 40)
    for file in code.rglob("*.py"):
        file.write_text(file.read_text().replace("\n", "  # ß <|endoftext|> <|env|> <|agent|>\n"))
    out, _ = read(tmp_path / "out", code)
    small = [ids for phase in ("short", "long") for ids in documents(out, phase)]
    rehearsal = replace(
        full.Full.rehearsal(), corpus=str(code), checkpoint=str(tiny_run / "checkpoints" / "mid-cpt"), length=1024
    )
    full.prepare(rehearsal, tmp_path / "full")
    rows, doc = (np.load(tmp_path / "full" / "data" / f"{name}.npy") for name in ("rows", "doc"))
    large = [row[number == n].tolist() for row, number in zip(rows, doc, strict=True) for n in range(number.max() + 1)]
    for found, tokenizer in ((small, "out"), (large, "full")):
        assert not any({1, 2} & set(ids) or END in ids[:-1] for ids in found)
        texts = "".join(
            cpt.load_tokenizer(tmp_path / tokenizer / "data" / "tokenizer.json").decode(ids) for ids in found
        )
        assert texts.count("<|agent|>") > 50


def test_an_agents_word_is_no_command():
    tokenizer = cpt.train_tokenizer(["a b"], 260)
    from tokenizers import Tokenizer

    for language in (Language(tokenizer), Language(Tokenizer.from_str(tokenizer.to_str()))):
        ids = language.encode("write <|env|><|endoftext|>")
        assert min(ids) > 2 and language.decode(ids) == "write <|env|><|endoftext|>"


def test_a_large_vocabulary_keeps_its_tokens(tmp_path, monkeypatch):
    """Rows hold the tokenizer's numbers, beyond 65,535 too."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    letters = dict.fromkeys([*map(chr, range(32, 127)), "\n", "ß"])
    words = [*cpt.SPECIAL_TOKENS, *(f"<{n}>" for n in range(70_000 - 3 - len(letters))), *letters]
    large = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<0>"))
    large.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    monkeypatch.setattr(cpt, "train_tokenizer", lambda texts, vocabulary: large)
    out, result = read(tmp_path / "out", write(tmp_path / "code", 30))
    assert result["vocab_size"] == 70_000
    for phase in ("short", "long"):
        found = {token for ids in documents(out, phase) for token in ids}
        assert found <= {END, *range(70_000 - len(letters), 70_000)} and max(found) > 65_535


@given(st.integers(260, 1 << 18), st.data())
def test_numbers_are_narrowed_without_loss(count, data):
    numbers = np.array(data.draw(st.lists(st.integers(0, count - 1), max_size=5)) + [0, count - 1])
    kept = corpus.narrow(numbers, count, np.uint16, np.uint32)
    assert (kept == numbers).all() and kept.itemsize == (2 if count <= 65_536 else 4)


# --------------------------------------------------------------------------------------------- what is held out


names = st.binary(min_size=1, max_size=12).filter(lambda name: b"\0" not in name and b"/" not in name).map(os.fsdecode)


@given(st.dictionaries(names, st.text(), max_size=5))
def test_what_is_held_out_comes_back_as_it_was_read(tmp_path_factory, files):
    path = tmp_path_factory.getbasetemp() / "held" / "data" / corpus.HELDOUT
    path.parent.mkdir(parents=True, exist_ok=True)
    corpus.keep(cpt.Corpus(files), path)
    assert corpus.heldout_codebase(path.parents[1]).files == files


def test_a_run_scores_the_files_that_it_held_out(tmp_path):
    """Line ends, control characters and names of any bytes, from the folder to the run and back."""
    code = write(tmp_path / "code", 40)
    for n, name in enumerate((b"caf\xe9.py", b"\x01.py", b"new\nline.py", b"a\x1cb\x85.py")):
        (code / os.fsdecode(b"p\xff")).mkdir(exist_ok=True)
        (code / os.fsdecode(b"p\xff") / os.fsdecode(name)).write_bytes(
            f"ß = {n}\r# \x0c\x1c\x01\u2028 a\r\r\nb\n".encode() * 9
        )
    out, result = read(tmp_path / "out", code, heldout_share=0.16)
    name, _, held = cpt.hold_out_codebase(cpt.read_corpus(code), 0.16)
    assert corpus.heldout_codebase(out).files == held.files and result["heldout"]["name"] == name == os.fsdecode(
        b"p\xff"
    )


def test_runs_of_earlier_versions_are_read(tmp_path):
    files = {"p/a.py": "x = 'ä'\n\1\r", "p/b.py": ""}
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "heldout.txt").write_bytes(
        "\0".join(f"{name}\1{text}" for name, text in files.items()).encode()
    )
    assert corpus.heldout_codebase(tmp_path).files == files


# -------------------------------------------------------------------------------------------- the default corpus


def test_small_and_full_runs_read_and_hold_out_the_same_library(tmp_path, monkeypatch):
    library = write(tmp_path / "library", 20, files=30)
    for name in cpt.LIBRARY_EXCLUDE:
        (library / "p00" / name).mkdir()
        (library / "p00" / name / "b.py").write_text(f"{CODE} = 1\n" * 50)
    (library / "notes.txt").write_text(CODE * 99)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    out, result = read(tmp_path / "out", None, corpus=None, heldout_share=0.03)
    learn, held = full.read(full.Full())
    assert len(learn.files) + len(held.files) == result["files"] == 30
    assert corpus.heldout_codebase(out).files == held.files


def test_bytecode_is_not_part_of_a_corpus(tmp_path):
    """Whatever of the folder has been imported meanwhile, a run reads the same."""
    (tmp_path / "a.py").write_text("x = 1\n")
    before = cpt.read_corpus(tmp_path)
    py_compile.compile(str(tmp_path / "a.py"))
    after = cpt.read_corpus(tmp_path)
    assert list(tmp_path.glob("__pycache__/*.pyc")) and (after.files, after.skipped) == (before.files, before.skipped)
