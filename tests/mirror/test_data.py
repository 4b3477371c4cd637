"""`etude data`: planted duplicates are found, nothing near the held-out codebase is trained on, bad rows and files are
named, and neither interruptions nor the number of processes change a byte."""

import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kit.disk import read_lines
from kit.settings import RunError
from ref.cpt import load_tokenizer
from scaled.data.prepare import Settings
from scaled.data.read import Prepared
from scaled.data.sources import Source
from tests import forks
from tests.mirror.sources import build, code, everything, folder, mutated, similar, train_on_code, trained


@pytest.fixture(autouse=True)
def unsynced(monkeypatch):
    """No test cuts the power, and a thousand small files wait long for the disk."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    return train_on_code(tmp_path_factory.mktemp("tokenizer"))


def other(out: Path, before: dict[str, bytes]) -> set[str]:
    """Files that are not as before."""
    return {name for name, _ in everything(out).items() ^ before.items()}


def test_planted_duplicates_are_found(tmp_path, tokenizer):
    """Exact and near ones, within and across sources; the first stays."""
    draw, given = random.Random(2), folder(tmp_path / "code")
    texts = {name: (given / name).read_text() for name in ("p0/f0.py", "p2/f1.py")}
    planted = tmp_path / "planted"
    planted.mkdir()
    (planted / "exact.py").write_text(
        "# Licensed under the MIT license\n# SPDX-License-Identifier: MIT\n" + texts["p0/f0.py"].replace("\n", "   \n")
    )
    (planted / "near.py").write_text(texts["p2/f1.py"].replace("return", "yield", 1))
    (planted / "own.py").write_text(code(draw))
    (planted / "own2.py").write_text((planted / "own.py").read_text())
    out = tmp_path / "out"
    record = build(out, [Source(str(given)), Source(str(planted), weight=0.5)], tokenizer, Settings(heldout="code/p3"))
    dropped = {one["name"]: one for one in read_lines(out / "dropped.jsonl")}
    assert {name: (one["reason"], one["of"]) for name, one in dropped.items()} == {
        "exact.py": ("exact duplicate", "code/p0/f0.py"),
        "near.py": ("near duplicate", "code/p2/f1.py"),
        "own2.py": ("exact duplicate", "planted/own.py"),
    }
    assert dropped["near.py"]["similarity"] == pytest.approx(
        similar((planted / "near.py").read_text(), texts["p2/f1.py"]), abs=1e-4
    )
    assert sorted(trained(out)) == sorted(
        [*(p.read_text() for p in given.glob("p[0-2]/*.py")), (planted / "own.py").read_text()]
    )
    code_, mine = record["sources"]
    assert (
        code_["read"]["documents"] == 20
        and code_["kept"]["documents"] == 15
        and code_["heldout"] == 5
        and not code_["dropped"]
    )
    assert mine["kept"]["documents"] == 1 and mine["dropped"]["exact duplicate"] == {
        "count": 2,
        "names": ["exact.py", "own2.py"],
    }
    assert code_["read"]["lines"] == sum(p.read_text().count("\n") for p in given.rglob("*.py"))
    assert code_["kept"]["tokens"] == sum(
        len(load_tokenizer(tokenizer).encode(p.read_text()).ids) for p in given.glob("p[0-2]/*.py")
    )
    assert (
        list(Prepared(out).read_heldout().files) == [f"code/p3/f{i}.py" for i in range(5)]
        and record["heldout"]["near"] == 0
    )
    assert not (out / "work").exists()


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**6), st.lists(st.floats(0, 1), min_size=3, max_size=12))
def test_nothing_near_a_held_out_document_is_trained_on(tmp_path_factory, tokenizer, seed, shares):
    """Whatever was changed in copies of it: no text in a shard has half of its runs of words in common with a held-out
    one."""
    root, draw = tmp_path_factory.mktemp("near"), random.Random(seed)
    given = folder(root / "code", seed, 3, 2)
    for i, share in enumerate(shares):
        (given / "p0" / f"copy{i}.py").write_text(mutated((given / "p2" / f"f{i % 2}.py").read_text(), draw, share))
    record = build(root / "out", [Source(str(given))], tokenizer, Settings(heldout="code/p2"))
    held = [(given / "p2" / f"f{i}.py").read_text() for i in range(2)]
    for text in trained(root / "out"):
        assert max(similar(text, one) for one in held) < 0.5
    least = sum(max(similar(p.read_text(), one) for one in held) >= 0.5 for p in given.glob("p0/copy*.py"))
    assert record["heldout"]["near"] >= least and len(trained(root / "out")) >= 4


class Plain:
    """A source, and every file of a build that nothing disturbed."""

    def __init__(self, wanted: list[Source], files: dict[str, bytes]):
        self.wanted, self.files = wanted, files


@pytest.fixture(scope="module")
def plain(tmp_path_factory, tokenizer):
    """A source of many units with something to drop, and what an undisturbed build leaves."""
    root = tmp_path_factory.mktemp("plain")
    given = folder(root / "code", 5, 5, 6)
    (given / "p1" / "copy.py").write_text((given / "p0" / "f0.py").read_text())
    rows = [json.dumps({"content": code(random.Random(n), 4), "path": f"r{n}.py"}) for n in range(20)] + [
        "{",
        json.dumps({"content": 3}),
    ]
    (root / "rows.jsonl").write_text("\n".join(rows) + "\n")
    wanted = [Source(str(given)), Source(str(root / "rows.jsonl"), weight=2.0)]
    build(root / "out", wanted, tokenizer)
    return Plain(wanted, everything(root / "out"))


def test_two_processes_leave_what_one_leaves(plain, tmp_path, tokenizer):
    wanted, before = plain.wanted, plain.files
    build(tmp_path / "out", wanted, tokenizer, processes=2)
    assert not other(tmp_path / "out", before)
    record = json.loads(before["data.json"])
    assert len(record["sources"][0]["shards"]) > 1 and record["sources"][1]["dropped"]["content is no text"][
        "names"
    ] == ["rows.jsonl:22"]


class Killed(BaseException):
    """What no code catches."""


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 120), min_size=1, max_size=3), st.booleans())
def test_a_killed_build_goes_on_and_ends_with_the_same_bytes(plain, tokenizer, tmp_path_factory, writes, torn):
    """Killed at random writes; `torn` leaves the half of a temporary file behind, as SIGKILL does."""
    wanted, before = plain.wanted, plain.files
    out, replace = tmp_path_factory.mktemp("killed") / "out", os.replace
    for n in writes:
        left = n

        def killed(source, target):
            nonlocal left
            left -= 1
            if left == 0:
                if torn:
                    Path(target).with_name(f".tmp-{Path(target).name}-torn").write_bytes(Path(source).read_bytes()[:-1])
                raise Killed
            replace(source, target)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "replace", killed)
            with contextlib.suppress(Killed):
                build(out, wanted, tokenizer, resume=out.exists())
    build(out, wanted, tokenizer, resume=out.exists())
    assert not other(out, before)


def test_sigkill_of_the_command(plain, tokenizer, tmp_path, ask):
    """From outside, with two processes, while units are read; then as the user goes on."""
    wanted, before = plain.wanted, plain.files
    config, out = tmp_path / "data.toml", tmp_path / "out"
    config.write_text(
        f'unit_bytes = 6000\nshard_tokens = 4000\n[[source]]\npath = "{wanted[0].path}"\n[[source]]\n'
        f'path = "{wanted[1].path}"\nweight = 2.0\n'
    )
    words = ["data", config, "--out", out, "--tokenizer", tokenizer, "--processes", 2]
    process = forks.start(*words, said=tmp_path / "said")
    while process.is_alive() and not list(out.glob("work/0*.json")):
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    code, _, error = ask(*words)
    assert code == 2 and "already holds a run; add --resume" in error
    code, said, error = ask(*words, "--resume")
    assert code == 0 and not error and not other(out, before)
    assert "held out: " in said and f"data: {out}" in said and "1 exact duplicate" in " ".join(said.split())
    assert ask(*words, "--resume")[0] == 0 and not other(out, before)


def test_what_cannot_be_prepared_is_said_in_one_line(tmp_path, tokenizer, ask, monkeypatch):
    given, out = folder(tmp_path / "code", files=2), tmp_path / "out"
    config = tmp_path / "data.toml"
    source = f'[[source]]\npath = "{given}"\n'
    (tmp_path / "code2").mkdir()
    for text, why in (
        ("", "there is no source; name one or more in the settings: [[source]]"),
        ("source = 3", "source must be a list of tables"),
        ("[[source]]\nname = 'x'", "data.toml: source 1: path must name a folder"),
        ("[[source]]\npth = 'x'", "source 1: unknown key 'pth'; did you mean path"),
        (source + "weight = -1.0", "source 1: weight must"),
        (source + source, "two sources are called code"),
        (f"[[source]]\npath = '{tmp_path}/code2'", "source code2: nothing to read at"),
        (f"[[source]]\npath = '{tmp_path}/nowhere'", "source nowhere: nothing to read at"),
        ("near = 2.0\n" + source, "near must be 0 or lie between"),
        ("nears = 2.0\n" + source, "unknown key 'nears'; did you mean near"),
        ("heldout = 'cod/p0'\n" + source, "heldout = 'cod/p0' begins with no source; they are code"),
        ("rules = {least_words = -1}\n" + source, "rules.least_words"),
    ):
        config.write_text(text)
        code_, _, error = ask("data", config, "--out", out, "--tokenizer", tokenizer)
        assert code_ == 2 and why in error and error.count("\n") == 1, (text, error)
        assert not out.exists()
    config.write_text(source)
    (tmp_path / "bad.json").write_text("{}")
    for words, why in (
        ([], "name a tokenizer: --tokenizer FILE"),
        (["--tokenizer", tmp_path / "none"], "none"),
        (["--tokenizer", tmp_path / "bad.json"], "bad.json holds no tokenizer"),
    ):
        code_, _, error = ask("data", config, "--out", out, *words)
        assert code_ == 2 and why in error and error.count("\n") == 1 and not out.exists(), error
    monkeypatch.setitem(__import__("sys").modules, "datasketch", None)
    code_, _, error = ask("data", config, "--out", out, "--tokenizer", tokenizer)
    assert (
        code_ == 2
        and "near duplicates need datasketch: pip install -c constraints.txt -e '.[data]'; or set near = 0" in error
    )


def test_a_source_that_changed_is_not_mixed_in(tmp_path, tokenizer):
    """Neither is a build with other settings."""
    given, out = folder(tmp_path / "code"), tmp_path / "out"
    build(out, [Source(str(given))], tokenizer)
    with pytest.raises(RunError, match="was started with settings.near"):
        build(out, [Source(str(given))], tokenizer, Settings(near=0.5, unit_bytes=6000, shard_tokens=4000), resume=True)
    (given / "p0" / "f0.py").write_text("x = 1\n" * 30)
    with pytest.raises(RunError, match="was started with files ="):
        build(out, [Source(str(given))], tokenizer, resume=True)


@pytest.mark.parametrize("vocabulary", [300, 70_000])
def test_tokens_take_two_bytes_or_four(tmp_path, vocabulary):
    """By the highest token of a tokenizer, of any kind."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    coder = Tokenizer(models.WordLevel({f"w{n}": n for n in range(vocabulary)}, unk_token="w0"))
    coder.pre_tokenizer = pre_tokenizers.Whitespace()
    coder.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "code").mkdir()
    texts = [
        " ".join(f"w{random.Random(n).randrange(vocabulary)}" for _ in range(50)) + f" w{vocabulary - 1} w{n}"
        for n in range(4)
    ]
    for n, text in enumerate(texts):
        (tmp_path / "code" / f"{n}.txt").write_text(text)
    record = build(tmp_path / "out", [Source(str(tmp_path / "code"), rules="none")], tmp_path / "tokenizer.json")
    assert record["tokenizer"]["dtype"] == ("uint16" if vocabulary == 300 else "uint32")
    assert set(trained(tmp_path / "out")) < set(texts)
