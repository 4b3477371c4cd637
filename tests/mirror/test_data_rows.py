"""Prepared data as training rows: every token once an epoch, weights, positions, the same on all ranks; and runs that
train on them."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etude.run import settings as full_settings
from kit.runs import Run
from kit.settings import RunError, fill
from recipe.full import stages as chain
from recipe.small import data as recipe_data
from recipe.small.settings import Recipe
from ref.cpt import load_tokenizer
from ref.network import Config, Transformer, save_hf
from scaled import pretrain
from scaled.data import prepare
from scaled.data.prepare import Settings
from scaled.data.read import Prepared, is_prepared, quotas
from scaled.data.sources import Source
from sims.policies import SMOKE
from tests.mirror import calls
from tests.mirror.layouts import layouts, play
from tests.mirror.sources import folder

END = 7


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_run):
    """Three sources, one small, one without a weight, prepared for the tokenizer of the tiny run, which stands beside a
    network."""
    root = tmp_path_factory.mktemp("made")
    wanted = [
        Source(str(folder(root / name, seed, 3, n)), weight=w)
        for seed, (name, n, w) in enumerate((("a", 4, 3.0), ("b", 1, 1.0), ("c", 1, 0)))
    ]
    chosen = Settings(heldout="c", shard_tokens=3000)
    prepare.prepare(
        root / "out",
        [*wanted, Source(str(folder(root / "d", 9, 1, 2)), weight=0)],
        chosen,
        words(tiny_run),
        1,
        False,
        "",
    )
    torch_net(root / "net", len(load_tokenizer(words(tiny_run)).get_vocab()))
    shutil.copy(words(tiny_run), root / "net" / "tokenizer.json")
    return root


def words(tiny_run: Path) -> Path:
    return tiny_run / "checkpoints" / "mid-cpt" / "tokenizer.json"


def torch_net(path: Path, vocabulary: int) -> None:
    small = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    shape = Config.tiny(vocabulary, **small, num_experts=4, moe_intermediate_size=16)
    save_hf(Transformer(shape), path)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**6), st.integers(2, 700), st.integers(0, 40), st.integers(1, 12))
def test_an_epoch_is_every_document_once(made, seed, length, start, count):
    """In an order of its own, an end after each; rows are what follows row by row, wherever one begins to read."""
    data = Prepared(made / "out")
    stream = data.stream(length, seed, END)
    assert data.names == ["a", "b"]
    ids, doc = stream.rows(start, count)
    assert ids.dtype == doc.dtype == np.int32 and (doc[:, 0] == 0).all() and set(np.diff(doc).ravel()) <= {0, 1}
    for r in range(count):
        one = Prepared(made / "out").stream(length, seed, END).rows(start + r, 1)
        assert (one[0] == ids[r]).all() and (one[1] == doc[r]).all()
    for s in range(2):
        n = stream.totals[s]
        tokens, numbers = np.empty(2 * n, np.int32), np.empty(2 * n, np.int32)
        stream.length = 2 * n
        stream.fill(tokens, numbers, s, 0)
        stream.length = length
        every = sorted([*stream.document(s, d).tolist(), END] for d in range(len(stream.sizes[s])))
        epochs = []
        for half, which in ((tokens[:n], numbers[:n]), (tokens[n:], numbers[n:])):
            documents = [half[which == k].tolist() for k in np.unique(which)]
            assert sorted(documents) == every
            epochs.append(documents)
        assert epochs[0] != epochs[1] or len(every) < 4
        for r in range(min(2 * n // length, 20)):
            row, which = np.empty(length, np.int32), np.empty(length, np.int32)
            stream.fill(row, which, s, r * length)
            assert (row == tokens[r * length :][:length]).all() and (
                np.diff(which) == np.diff(numbers[r * length :][:length])
            ).all()


@settings(max_examples=40)
@given(st.lists(st.floats(0.001, 100), min_size=1, max_size=60), st.integers(0, 10**6), st.integers(1, 4000))
def test_rows_follow_the_weights(made, weights, seed, rows):
    """At any time each source has had its share, but for a row or two for every source."""
    data = Prepared(made / "out")
    data.names, data.weights = [str(n) for n in range(len(weights))], np.array(weights)
    data.shards = [data.shards[0]] * len(weights)
    stream = data.stream(8, seed, END)
    places = [stream.place(row) for row in range(rows)]
    for s, weight in enumerate(weights):
        mine = [number for source, number in places if source == s]
        assert mine == list(range(len(mine)))
        share = weight / sum(weights)
        error = abs(stream.quota[s] - stream.block * share)
        assert error < 1 or stream.quota[s] == 1 or error <= len(weights)  # who has no row takes one from the largest
        assert (
            abs(len(mine) - rows * stream.quota[s] / stream.block) <= 2 + len(weights) * stream.quota[s] / stream.block
        )
    assert stream.quota.sum() == stream.block and stream.quota.min() >= 1


def test_quotas_and_epochs_by_hand(made):
    assert quotas(np.array([3.0, 1.0]), 1024).tolist() == [768, 256] and quotas(
        np.array([1.0, 1.0, 1.0]), 10
    ).tolist() == [4, 3, 3]
    assert quotas(np.array([1.0, 1e-9]), 16).tolist() == [15, 1]
    data = Prepared(made / "out")
    stream = data.stream(64, 0, END)
    a, b = stream.totals
    assert (
        stream.epochs(1024) == {"a": 768 * 64 / a, "b": 256 * 64 / b}
        and data.tokens == a + b
        and data.documents == 12 + 3
    )
    sources = [stream.place(row)[0] for row in range(8)]
    assert sources.count(0) == 6 and sources.count(1) == 2


def test_pieces_are_the_documents_of_the_rows(made):
    stream = Prepared(made / "out").stream(50, 3, END)
    pieces, row = stream.pieces(), 0
    for row in range(6):
        ids, doc = stream.rows(row, 1)
        for k in range(doc.max() + 1):
            assert next(pieces) == ids[0][doc[0] == k].tolist()


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layouts, st.integers(0, 500), st.integers(0, 1000))
def test_every_layout_of_ranks_sees_the_same_rows(made, tmp_path_factory, layout, step, seed):
    """Those of the stream, whichever part of them a rank has; and nobody packs anything."""
    sets = [
        f"checkpoint={made / 'net'}",
        f"corpus={made / 'out'}",
        "rows=4",
        "length=32",
        f"seed={seed}",
        f"cp={layout['cp']}",
        f"ep={layout['ep']}",
    ]
    out = tmp_path_factory.mktemp("rows")
    ids, doc, held = play(layout, calls.prepared_rows, sets, out, step)
    wanted = (
        Prepared(made / "out")
        .stream(32, seed, load_tokenizer(made / "net" / "tokenizer.json").token_to_id("<|endoftext|>"))
        .rows(4 * step, 4)
    )
    assert (ids.numpy() == wanted[0]).all() and (doc.numpy() == wanted[1]).all()
    assert held == [f"c/p{p}/f0.py" for p in range(3)] and not list(out.iterdir())


def test_a_run_trains_on_prepared_data(made, tmp_path, capsys):
    """Two ranks; the loss falls, the held-out codebase is scored, and the card says what was read."""
    sets = [
        f"checkpoint={made / 'net'}",
        f"corpus={made / 'out'}",
        "rows=4",
        "length=32",
        "steps=100",
        "perplexity_tokens=300",
        "cp=2",
        "ep=2",
    ]
    out = tmp_path / "run"
    pretrain.prepare(full_settings.settings("cpt", "gloo", {}, sets), out)
    assert "corpus: source b is read " in capsys.readouterr().out
    assert [path.name for path in (out / "data").iterdir()] == ["prepared.json"]
    found = play(dict(dp=1, cp=2, ep=2), calls.training, "cpt", sets, out)
    losses = [json.loads(line)["loss"] for line in (out / "metrics" / "cpt.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] - 0.3 and 1 < found["codebase_perplexity"] < 300
    assert (
        f"{Prepared(made / 'out').tokens:,} tokens of out in rows of 32"
        in (out / "checkpoints" / "final" / "README.md").read_text()
    )


def test_other_data_or_another_tokenizer_is_refused(made, tmp_path, ask):
    """In one line, before a rank starts: a tokenizer that differs, data prepared anew since the run began, a shard that
    was cut short."""
    copy, net = tmp_path / "copy", tmp_path / "net"
    shutil.copytree(made / "out", copy)
    shutil.copytree(made / "net", net)
    config = full_settings.settings(
        "cpt", "gloo", {}, [f"checkpoint={net}", f"corpus={copy}", "rows=4", "length=32", "steps=2"]
    )
    pretrain.prepare(config, tmp_path / "run")
    text = (net / "tokenizer.json").read_text()
    (net / "tokenizer.json").write_text(json.dumps(json.loads(text)))  # the same, written otherwise
    pretrain.prepare(config, tmp_path / "run")
    (net / "tokenizer.json").write_text(text.replace("<|env|>", "<|other|>"))
    with pytest.raises(RunError, match="was prepared with another tokenizer than .*prepare it again: etude data"):
        pretrain.prepare(config, tmp_path / "run")
    words_ = [
        "run",
        "cpt",
        "--scale",
        "full",
        "--backend",
        "gloo",
        "--nproc",
        2,
        "--out",
        tmp_path / "new",
        "--corpus",
        copy,
        "--checkpoint",
        net,
    ]
    code_, _, error = ask(*words_, "--set", "length=32", "--set", "rows=4")
    assert code_ == 2 and "another tokenizer" in error and error.count("\n") == 1 and not (tmp_path / "new").exists()
    (net / "tokenizer.json").write_text(text)
    record = json.loads((copy / "data.json").read_text())
    (copy / "data.json").write_text(json.dumps(record | {"again": 1}))
    with pytest.raises(RunError, match="was prepared again since this run began"):
        pretrain.prepare(config, tmp_path / "run")
    shard = next((copy / "shards").glob("a-*.bin"))
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(RunError, match="bytes instead of"):
        Prepared(copy)
    shard.unlink()
    with pytest.raises(RunError, match="is missing; prepare the data again"):
        Prepared(copy)
    code_, _, error = ask("run", "cpt", "--corpus", made / "out", "--out", tmp_path / "small")
    assert code_ == 2 and "is prepared for full runs (--scale full)" in error and not (tmp_path / "small").exists()


def test_the_recipe_takes_prepared_data(made, tiny_run, tmp_path):
    """What is not the small world comes from the shards, token by token, and the held-out codebase is theirs."""
    tokenizer = words(tiny_run)
    config = fill(Recipe, {**SMOKE, "data": {**SMOKE.get("data", {}), "corpus": str(made / "out"), "world_share": 0.0}})
    given_ = chain.prepared(config.data.corpus, tokenizer)
    assert (
        given_ is not None
        and chain.prepared(str(made / "a"), tokenizer) is None
        and chain.prepared(None, tokenizer) is None
    )
    with Run.open(tmp_path / "run", "recipe", config) as run:
        recipe_data.data(run, config, tokenizer, prepared=given_)
    result = json.loads((tmp_path / "run" / "stages" / "data.json").read_text())["result"]
    assert result["heldout"] == {
        "name": "c",
        "files": 3,
        "bytes": sum(p.stat().st_size for p in (made / "c").rglob("*.py")),
    }
    assert result["files"] == 15 and result["epochs"] > 1 and result["skipped"] == {}
    assert recipe_data.heldout_codebase(tmp_path / "run").files == Prepared(made / "out").read_heldout().files
    with np.load(tmp_path / "run" / "data" / "short.npz") as packed:
        ids, doc = packed["ids"], packed["doc"]
    stream = given_.stream(
        config.training.long_length, config.seed, load_tokenizer(tokenizer).token_to_id("<|endoftext|>")
    )
    there = {
        tuple(piece[i : i + len(ids[0])])
        for piece, _ in zip(stream.pieces(), range(4000))
        for i in range(0, len(piece), len(ids[0]))
    }
    for row, numbers in zip(ids, doc):
        for k in range(numbers.max() + 1):
            assert tuple(row[numbers == k].tolist()) in there


def test_what_is_no_prepared_folder(made, tmp_path):
    (tmp_path / "data.json").write_text(json.dumps({"format": "other"}))
    assert (
        is_prepared(made / "out")
        and not is_prepared(tmp_path)
        and not is_prepared(tmp_path / "none")
        and not is_prepared(None)
    )
    (tmp_path / "data.json").write_text("[" * 10_000)
    assert not is_prepared(tmp_path)
