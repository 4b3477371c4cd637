"""Base evaluations: models with known log-probs get known scores, two loaders agree, a killed run ends as one that was
not."""

import dataclasses
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from etude.evaluate import base as evaluation
from kit.disk import read_lines
from kit.runs import Run
from kit.settings import RunError
from ref import cpt
from ref.network import Config, Transformer, load_hf, save_hf
from sims.base_evaluations import experiment as base_eval
from sims.base_evaluations import knowledge, perplexity, table, tracking
from sims.base_evaluations.models import Base, HuggingFace, Reference, network_of, open_base
from sims.base_evaluations.table import Items, Settings

WORK = """def work_{0}(items, limit):
    total = {0}
    for item in items:
        total += item * {0}
        print(item, total)
    return total, limit


"""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Settings on a folder of a few files: the standard library takes seconds to read."""
    code = tmp_path_factory.mktemp("code")
    for n in range(4):
        (code / f"m{n}.py").write_text("".join(WORK.format(10 * n + k) for k in range(5 + n)))
    asked: dict[str, Any] = {"codebase": str(code), "chains_from": str(code), "package": "kit"}
    return Settings(
        codebase_bytes=3000, window=64, diffs=(1, 2), chains=3, chain_bytes=900, questions=12, resamples=50, **asked
    )


@pytest.fixture(scope="module")
def sets(small):
    """The same for the command line, smaller."""
    same = {key: getattr(small, key) for key in ("codebase", "chains_from", "package", "codebase_bytes", "chain_bytes")}
    same |= {"questions": 8, "chains": 2}
    return [f"{key}={value}" for key, value in same.items()]


class Known:
    """A network that knows some texts by heart, and is uniform elsewhere."""

    def __init__(self, tokenizer, texts=(), context=4096):
        self.context, self.vocab = context, tokenizer.get_vocab_size()
        self.known = [tokenizer.encode(text).ids for text in texts]

    def row(self, tokens):
        logits = torch.zeros(self.vocab)
        for known in self.known:
            if len(known) > len(tokens) and known[: len(tokens)] == tokens:
                logits[known[len(tokens)]] = 30.0
                break
        return logits

    def logits(self, ids, keep):
        return torch.stack([torch.stack([self.row(row[: k + 1]) for k in keep.tolist()]) for row in ids.tolist()])

    def decoder(self, batch, length):
        rows = [[] for _ in range(batch)]

        def feed(ids):
            for row, more in zip(rows, ids.tolist(), strict=True):
                row += more
            assert max(map(len, rows)) <= length
            return torch.stack([self.row(row) for row in rows])

        return feed


@pytest.fixture(scope="module")
def letters():
    """A tokenizer without merges: tokens are bytes."""
    return cpt.train_tokenizer(["ab"], len(cpt.SPECIAL_TOKENS) + 256)


class Stage:
    """A stage of no run."""

    def restore(self):
        return None

    def progress(self, *_):
        pass

    def log(self, *_, **__):
        pass

    def due(self):
        return False


@pytest.fixture(scope="module")
def items(letters, small):
    return Items.make([Base("any", "any", Known(letters), letters)], small)


def test_who_knows_every_answer_gets_100_and_who_knows_nothing_gets_chance(letters, items):
    texts = [q.prompt + q.answers[q.right] + "\n" for q in items.questions] + [
        c.prompt + c.answer + tracking.FENCE for c in items.chains
    ]
    wise = Base("wise", "wise", Known(letters, texts), letters)
    found = table.know(Stage(), wise, items)
    assert all(one["right"] and one["exact"] for one in found)
    for one in table.track(Stage(), wise, items):
        assert one["similarity"] == 100 and one["exact"] and one["first_choices"] == 1 and one["nats"] < 1e-6
    many = Items(knowledge.questions(None, 120, 5, tries=20), [], {}, 64)
    blank = Base("blank", "blank", Known(letters), letters)
    right = sum(one["right"] for one in table.know(Stage(), blank, many))
    assert abs(right - 30) < 4 * math.sqrt(
        120 * 0.25 * 0.75
    )  # four standard deviations: bytes are tokens, and all rates are equal


def test_a_uniform_network_needs_the_logarithm_of_its_vocabulary(letters, items):
    files = perplexity.file_nll(Base("blank", "blank", Known(letters), letters), items.texts, 64)
    assert [tokens for _, tokens, _ in files[1:]] == [size for _, _, size in files[1:]] and files[0][1] == files[0][
        2
    ] - 1
    assert sum(size for _, _, size in files) == len("\n".join(items.texts[n] for n in sorted(items.texts)).encode())
    total = perplexity.summed(files, 50)
    assert total["perplexity"] == pytest.approx(letters.get_vocab_size())
    assert total["nats"] == pytest.approx(total["tokens"] * math.log(letters.get_vocab_size()))
    low, high = total["bits_interval"]
    assert low <= total["bits_per_byte"] <= high < 1.001 * math.log2(letters.get_vocab_size())


def test_answers_stop_at_the_stop_or_at_their_limit(letters):
    text = Base("wise", "wise", Known(letters, ["ab: one\ntwo", "x: 1234567", "longer prompt: z\n"]), letters)
    assert text.continued(["ab:", "x:", "longer prompt:"], [20, 4, 9], "\n", batch=3) == [" one", " 123", " z"]
    assert text.continued(["ab:", "x:", "longer prompt:"], [20, 4, 9], "\n", batch=1) == [" one", " 123", " z"]
    with pytest.raises(ValueError, match="3 tokens and 5000 more do not fit the context of wise, 4096"):
        text.continued(["ab:"], [5000], "\n")
    with pytest.raises(ValueError, match="longer than the context"):
        text.log_probs([[1] * 5000], [0])


@pytest.fixture(scope="module")
def checkpoint(tiny_run):
    return tiny_run / "checkpoints" / "final"


def test_our_loader_and_transformers_agree_and_the_sum_is_that_of_the_reference_file(checkpoint, items):
    from transformers import AutoModelForCausalLM

    base = open_base(str(checkpoint), "unused")
    assert isinstance(base.network, Reference) and base.prefix == ()
    theirs = Base(
        "theirs",
        "theirs",
        HuggingFace(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)),
        base.tokenizer,
    )
    ours, other = (np.array(perplexity.file_nll(one, items.texts, 64)) for one in (base, theirs))
    assert np.allclose(ours[:, 0], other[:, 0], rtol=1e-5) and (ours[:, 1:] == other[:, 1:]).all()
    whole = cpt.codebase_nll(load_hf(checkpoint), base.tokenizer, cpt.Corpus(dict(items.texts)), 64)
    assert (
        whole.nll == pytest.approx(ours[:, 0].sum(), rel=1e-6)
        and [whole.tokens, whole.bytes] == ours[:, 1:].sum(0).tolist()
    )
    prompts = [question.prompt for question in items.questions[:5]]
    assert base.continued(prompts, [6] * 5, "\n") == theirs.continued(prompts, [6] * 5, "\n", batch=2)


def test_a_row_scores_alike_alone_and_among_others(checkpoint):
    base = open_base(str(checkpoint), "unused")
    pairs = [("def f(", "x):\n"), ("a", "b"), ("import os, sys\nprint(", "os.path)\n    return"), ("x = ", "1")]
    together, alone = base.scored(pairs), [base.scored([pair])[0] for pair in pairs]
    for one, other, (_, answer) in zip(together, alone, pairs, strict=True):
        assert (
            np.allclose(one.logp, other.logp, atol=1e-5)
            and one.greedy == other.greedy
            and len(one.logp) == len(base.encode(answer))
        )
    model = load_hf(checkpoint)
    ids = torch.tensor([base.encode("def f(") + base.encode("x):\n")])
    logp = model(ids).logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
    assert together[0].total == pytest.approx(logp[len(base.encode("def f(")) - 1 :].sum().item(), abs=1e-4)


def test_a_prefix_is_put_before_every_row_and_not_scored(letters):
    network = Known(letters)
    network.known = [[0, *letters.encode("ab").ids]]
    base = Base("p", "p", network, letters, prefix=(0,))
    (one,) = base.scored([("a", "b")])
    assert one.total == pytest.approx(0, abs=1e-6) and one.greedy == (True,)
    assert base.continued(["a"], [1], "\n") == ["b"]
    ((nats, tokens, size),) = perplexity.file_nll(base, {"x": "ab"}, 8)
    assert (tokens, size) == (2, 2) and nats == pytest.approx(0, abs=1e-6)


def test_a_run_that_was_killed_ends_as_one_that_was_not(checkpoint, small, tmp_path, monkeypatch):
    monkeypatch.setattr(table, "CHUNK", 2)
    names = [str(checkpoint)]
    with Run.open(tmp_path / "whole", "x", small) as run:
        whole = table.measure_models(run, names, small)
    right, calls = table.similarity, []

    def dying(*pair):
        calls.append(pair)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return right(*pair)

    monkeypatch.setattr(table, "similarity", dying)
    with pytest.raises(KeyboardInterrupt), Run.open(tmp_path / "cut", "x", small, checkpoint_seconds=0) as run:
        table.measure_models(run, names, small)
    with Run.open(tmp_path / "cut", "x", small, resume=True) as run:
        assert table.measure_models(run, names, small) == whole
    assert len(calls) == 5 + 2  # the third chunk of two chains alone was played again
    with Run.open(tmp_path / "cut", "x", small, resume=True) as run:
        monkeypatch.setattr(table, "open_base", None)  # nothing is opened for what is finished
        assert table.measure_models(run, names, small) == whole


def made_up(title, right, similarity, first_choices, nats, form=10, exact=0):
    """A model's records: 40 questions, 10 chains, of which the last are exactly right, and 6 files."""
    return {
        "title": title,
        "knowledge": [{"right": n < right, "form": n < form, "exact": False} for n in range(40)],
        "tracking": [
            {"similarity": similarity + n % 2, "exact": n >= 10 - exact, "nats": 10.0,
             "bytes": 200, "wanted": "x" * 200,
             "first_choices": 1.0 if n >= 10 - exact else first_choices,
             "written": "x" * 200 if n >= 10 - exact else "y" * (200 - 2 * similarity) + "x" * (2 * similarity)}
            for n in range(10)
        ],
        "codebase": [[nats * (100 + n), 60, 100 + n] for n in range(6)],
    }  # fmt: skip


def test_verdicts_on_made_up_numbers():
    c = base_eval.Experiment(models=("a", "b"), checkpoints=("final",), resamples=200)
    found = [
        made_up("a", 20, 60, 0.9, 0.8),
        made_up("b", 36, 97, 0.97, 0.6, exact=1),
        made_up("small", 9, 20, 0.3, 2.0),
    ]
    rows = table.rows_of(found, [{"first": 80.0, "hunk": 40.0}], c)
    claims = {one["name"]: one for one in base_eval.verdicts(found, rows, [50.0] * 10, c)}
    assert {name: one["verdict"] for name, one in claims.items()} == {
        "exact-rejects": "reproduced",
        "strict-tokens": "reproduced",
        "one-character": "holds",
        "knowledge-parts": "reproduced",
        "tracking-parts": "reproduced",
        "codebase-parts": "reproduced",
    }
    assert (
        claims["knowledge-parts"]["measured"] == 40
        and claims["tracking-parts"]["measured"] == 37
        and claims["one-character"]["measured"] == 0.5
    )
    assert claims["codebase-parts"]["measured"] == pytest.approx(0.2 / math.log(2))
    assert claims["exact-rejects"]["measured"] == 90 and "10 of 30" in claims["exact-rejects"]["note"]
    assert claims["exact-rejects"]["interval"] == pytest.approx(
        [55.5, 99.7], abs=0.1
    )  # Clopper and Pearson's of 9 in 10
    copied = {one["name"]: one for one in base_eval.verdicts(found, rows, [80.0] * 10, c)}["tracking-parts"]
    assert (
        copied["verdict"] == "partly" and "a copy of the first version 80" in copied["note"]
    )  # model a rebuilds less than a copy has
    alike = base_eval.verdicts([found[0], found[0], found[2]], rows, [50.0] * 10, c)
    assert [one["verdict"] for one in alike][3:] == ["not at this scale"] * 3 and alike[0]["verdict"] == "not tested"


def test_a_score_at_its_floor_and_answers_that_give_themselves_away_are_partly():
    """Of all that is nearly right nothing is right: a strict score had no room to fall. And who chooses as well without
    the question knew nothing."""
    c = base_eval.Experiment(models=("a", "b"), checkpoints=("final",), resamples=200)
    found = [
        made_up("a", 20, 60, 0.9, 0.8, form=20),
        made_up("b", 36, 97, 0.97, 0.6),
        made_up("small", 9, 20, 0.3, 2.0),
    ]
    claims = {
        one["name"]: one
        for one in base_eval.verdicts(found, table.rows_of(found, [{"first": 80.0, "hunk": 40.0}], c), [50.0] * 10, c)
    }
    assert [claims[name]["verdict"] for name in ("exact-rejects", "strict-tokens", "knowledge-parts")] == ["partly"] * 3
    assert (
        claims["exact-rejects"]["interval"] == pytest.approx([100 * 0.025**0.1, 100])
        and claims["tracking-parts"]["verdict"] == "reproduced"
    )
    assert "without the question: 50, 25, 25" in claims["knowledge-parts"]["note"]


def test_without_the_question_the_form_of_the_answers_alone_is_heard(letters):
    """A network that loves long runs of one letter prefers such an answer, asked or not; one that knows the answer is
    right only when asked."""
    question = knowledge.Question(
        "value", "f()", knowledge.WORKED_EXAMPLES["value"] + ">>> f()\n", ("1", "aaaa", "2", "3"), 0
    )
    asked = Items([question], [], {}, 64)
    loves = Base("loves", "loves", Known(letters, [question.unasked + "aaaa\n", question.prompt + "aaaa\n"]), letters)
    knows = Base("knows", "knows", Known(letters, [question.unasked + "aaaa\n", question.prompt + "1\n"]), letters)
    ((by_form,), (by_heart,)) = (table.know(Stage(), base, asked) for base in (loves, knows))
    assert (by_form["right"], by_form["form"], by_heart["right"], by_heart["form"]) == (False, False, True, False)
    long = dataclasses.replace(question, right=1)
    assert [table.know(Stage(), loves, Items([long], [], {}, 64))[0][key] for key in ("right", "form")] == [True, True]


def test_the_figure_plays_on_a_run_of_the_recipe(play_figure, sets, tmp_path):
    record = play_figure("base-eval", tmp_path / "out", *sets)
    assert [row["model"] for row in record["rows"]][:2] == ["small run, cpt", "small run, final"] and len(
        record["rows"]
    ) == 5
    assert (tmp_path / "out" / "base-eval.png").stat().st_size > 10_000
    lines = read_lines(tmp_path / "out" / "data" / "questions.jsonl")
    assert len(lines) == 8 and all(knowledge.verified([knowledge.Question(**line) for line in lines]))


def test_eval_base_writes_a_table_a_picture_and_what_was_asked(ask, checkpoint, sets, tmp_path):
    words = (
        "eval",
        "base",
        checkpoint,
        "--quick",
        *(word for one in sets for word in ("--set", one)),
        "--out",
        tmp_path / "out",
    )
    code, said, _ = ask(*words)
    record = json.loads((tmp_path / "out" / "base.json").read_text())
    assert code == 0 and "copies the" in said and [row["model"] for row in record["rows"]][0] == "final"
    row = record["rows"][0]
    assert (
        row["knowledge_low"] <= row["knowledge"] <= row["knowledge_high"]
        and row["nats_low"] <= row["nats"] <= row["nats_high"]
    )
    assert {path.name for path in (tmp_path / "out" / "data").iterdir()} == {
        "questions.jsonl",
        "chains.jsonl",
        "files.jsonl",
    }
    code, _, error = ask(*words)
    assert code == 2 and "already holds a run; add --resume" in error
    assert ask(*words, "--resume")[0] == 0
    assert json.loads((tmp_path / "out" / "base.json").read_text())["rows"] == record["rows"]


def test_bad_checkpoints_are_one_line_and_leave_nothing(ask, checkpoint, sets, tmp_path):
    bare, strange, small = tmp_path / "bare", tmp_path / "strange", tmp_path / "small"
    for folder in (bare, strange):
        shutil.copytree(checkpoint, folder)
    (bare / "tokenizer.json").unlink()
    (strange / "config.json").write_text(
        json.dumps(json.loads((checkpoint / "config.json").read_text()) | {"model_type": "no_such_family"})
    )
    save_hf(Transformer(Config.tiny(64)), small)
    shutil.copy(checkpoint / "tokenizer.json", small)
    cases = (
        (("nothing",), "nothing is neither one of smollm2-135m, gemma3-270m nor a folder with config.json"),
        ((bare,), "has no tokenizer.json; pass a Hugging Face folder"),
        ((strange,), "model_type 'no_such_family' is not supported"),
        ((small,), "its tokenizer has 400 tokens, and the network only 64"),
        ((checkpoint, checkpoint), "each once"),
        ((checkpoint, "--set", "chains=0"), "chains must be at least 1, got 0"),
        ((checkpoint, "--set", "package=no_such_thing"), "is not installed here as Python source"),
        ((checkpoint, "--set", "chain_bytes=500", "--set", "chains=4000"), "chains must be fewer, or longer"),
        ((checkpoint, "--repository", tmp_path / "none"), "pass a git repository"),
    )
    few = [word for one in sets for word in ("--set", one)]
    for words, says in cases:
        code, _, error = ask("eval", "base", *few, *words, "--out", tmp_path / "out")
        assert code == 2 and says in error and error.count("\n") == 1, (words, error)
        assert not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_is_not_handed_to_transformers(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "cut")
    with open(tmp_path / "cut" / "model.safetensors", "r+b") as file:
        file.truncate(1000)
    with pytest.raises(RunError) as caught:
        open_base(str(tmp_path / "cut"), "unused")
    assert "transformers" not in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_without_text_is_one_line(tmp_path):
    with pytest.raises(RunError, match="has no text file of at most 10 bytes; choose another --codebase"):
        perplexity.codebase(tmp_path, 10)
    (tmp_path / "b.py").write_text("b = 1\n")
    (tmp_path / "a.py").write_text("a = 100000000\n")
    assert perplexity.codebase(tmp_path, 10) == {"b.py": "b = 1\n"} and list(perplexity.codebase(tmp_path, 100)) == [
        "a.py",
        "b.py",
    ]


def test_settings_are_refused_in_words():
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"window": 3}, "window must be at least 4"),
        ({"diffs": (2, 2)}, "diffs must be different numbers"),
    )
    for changes, words in refused:
        with pytest.raises(ValueError, match=words):
            Settings(**changes)
    with pytest.raises(ValueError, match="models and checkpoints must be two or more together"):
        base_eval.Experiment(models=(), checkpoints=("cpt",))
    assert evaluation.BaseEvalConfig(names=("a",)).names == ("a",)


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_real_bases_know_more_than_chance_and_compress_code(name, tmp_path, letters):
    cache = Path(os.environ.get("ETUDE_MODELS") or tmp_path)
    base = open_base(name, cache)
    assert isinstance(base.network, Reference if name == "smollm2-135m" else HuggingFace) and len(base.prefix) == (
        name == "gemma3-270m"
    )
    files = perplexity.file_nll(base, perplexity.codebase(None, 4000), 256)
    assert 0.3 < perplexity.summed(files, 50)["bits_per_byte"] < 1.5
    lengths = "".join(f">>> len({'abcd'[:n]!r})\n{n}\n" for n in (1, 2, 3)) + ">>> len('abcd')\n"
    assert base.continued([lengths], [3], "\n") == ["4"]  # by 3.7 and 2.0 nats before the next token
    prompts = ["def add(a, b):\n    return a +", "import numpy as"]
    assert (
        base.continued(prompts, [2, 2], "\n")
        == [base.continued([prompt], [2], "\n")[0] for prompt in prompts]
        == [" b", " np"]
    )
    assert isinstance(network_of(name, cache / name), Reference) == (name == "smollm2-135m")
