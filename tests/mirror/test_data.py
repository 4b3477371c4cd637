"""`etude data`: planted duplicates are found, nothing near the held-out codebase is trained on, bad rows and files are named, and neither
interruptions nor the number of processes change a byte."""

import contextlib
import gzip
import io
import json
import os
import random
import signal
import tarfile
import time
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kit.disk import read_lines
from kit.settings import RunError
from ref.cpt import load_tokenizer, train_tokenizer
from scaled.data import prepare, sources
from scaled.data.documents import Bad, Document, read
from scaled.data.prepare import Settings
from scaled.data.read import Prepared
from scaled.data.sources import Source
from tests import forks
from tests.mirror.sources import code, folder, mutated
from tests.mirror.test_data_rules import similar

SMALL = Settings(unit_bytes=6000, shard_tokens=4000)
WHOLE = ("data.json", "dropped.jsonl", "heldout.jsonl", "tokenizer.json", "shards/*")


@pytest.fixture(autouse=True)
def unsynced(monkeypatch):
    """No test cuts the power, and a thousand small files wait long for the disk."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer([code(random.Random(1))], 300).save(str(path))
    return path


def build(out: Path, given: list[Source], tokenizer: Path, chosen: Settings = SMALL, processes: int = 1, resume: bool = False) -> dict:
    return prepare.prepare(out, given, chosen, tokenizer, processes, resume, "again")


def everything(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for pattern in WHOLE for path in sorted(out.glob(pattern))}


def other(out: Path, before: dict[str, bytes]) -> set[str]:
    """Files that are not as before."""
    return {name for name, _ in everything(out).items() ^ before.items()}


def trained(out: Path) -> list[str]:
    """The texts of all shards."""
    data = Prepared(out)
    coder = load_tokenizer(data.tokenizer)
    return [coder.decode(s.tokens[a:b].tolist()) for one in data.shards for s in one for a, b in zip(s.places, s.places[1:])]


def test_planted_duplicates_are_found(tmp_path, tokenizer):
    """Exact and near ones, within and across sources; the first stays."""
    draw, given = random.Random(2), folder(tmp_path / "code")
    texts = {name: (given / name).read_text() for name in ("p0/f0.py", "p2/f1.py")}
    planted = tmp_path / "planted"
    planted.mkdir()
    (planted / "exact.py").write_text("# Licensed under the MIT license\n# SPDX-License-Identifier: MIT\n" + texts["p0/f0.py"].replace("\n", "   \n"))
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
    assert dropped["near.py"]["similarity"] == pytest.approx(similar((planted / "near.py").read_text(), texts["p2/f1.py"]), abs=1e-4)
    assert sorted(trained(out)) == sorted([*(p.read_text() for p in given.glob("p[0-2]/*.py")), (planted / "own.py").read_text()])
    code_, mine = record["sources"]
    assert code_["read"]["documents"] == 20 and code_["kept"]["documents"] == 15 and code_["heldout"] == 5 and not code_["dropped"]
    assert mine["kept"]["documents"] == 1 and mine["dropped"]["exact duplicate"] == {"count": 2, "names": ["exact.py", "own2.py"]}
    assert code_["read"]["lines"] == sum(p.read_text().count("\n") for p in given.rglob("*.py"))
    assert code_["kept"]["tokens"] == sum(len(load_tokenizer(tokenizer).encode(p.read_text()).ids) for p in given.glob("p[0-2]/*.py"))
    assert list(Prepared(out).held().files) == [f"code/p3/f{i}.py" for i in range(5)] and record["heldout"]["near"] == 0
    assert not (out / "work").exists()


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**6), st.lists(st.floats(0, 1), min_size=3, max_size=12))
def test_nothing_near_a_held_out_document_is_trained_on(tmp_path_factory, tokenizer, seed, shares):
    """Whatever was changed in copies of it: no text in a shard has half of its runs of words in common with a held-out one."""
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
    rows = [json.dumps({"content": code(random.Random(n), 4), "path": f"r{n}.py"}) for n in range(20)] + ["{", json.dumps({"content": 3})]
    (root / "rows.jsonl").write_text("\n".join(rows) + "\n")
    wanted = [Source(str(given)), Source(str(root / "rows.jsonl"), weight=2.0)]
    build(root / "out", wanted, tokenizer)
    return Plain(wanted, everything(root / "out"))


def test_two_processes_leave_what_one_leaves(plain, tmp_path, tokenizer):
    wanted, before = plain.wanted, plain.files
    build(tmp_path / "out", wanted, tokenizer, processes=2)
    assert not other(tmp_path / "out", before)
    record = json.loads(before["data.json"])
    assert len(record["sources"][0]["shards"]) > 1 and record["sources"][1]["dropped"]["content is no text"]["names"] == ["rows.jsonl:22"]


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
        f'unit_bytes = 6000\nshard_tokens = 4000\n[[source]]\npath = "{wanted[0].path}"\n[[source]]\npath = "{wanted[1].path}"\nweight = 2.0\n'
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


GOOD = [code(random.Random(n), 3) for n in range(6)]


def table(path: Path, columns: dict, rows: int = 2) -> bytes:
    pq.write_table(pa.table(columns), path, row_group_size=rows)
    return path.read_bytes()


def bad_rows(root: Path) -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """Kinds of sources → the path of one, and everything bad in it, in order. Each has at least two good documents, too."""
    row = [json.dumps({"content": text}).encode() for text in GOOD]
    lines = [
        row[0],
        b"{",
        b'{"text": "x"}',
        b'{"content": 7}',
        b'"word"',
        b'{"content": "\xff"}',
        b'{"content": "\\ud800"}',
        b"",
        row[1],
        b'{"content": " "}',
    ]
    (root / "rows.jsonl").write_bytes(b"\n".join(lines))
    told = [(2, "broken JSON"), (3, "no content"), (4, "content is no text"), (5, "not an object"), (6, "not UTF-8"), (7, "not UTF-8")]
    told += [(8, "empty row"), (10, "empty")]
    found = {"jsonl": ("rows.jsonl", [(f"rows.jsonl:{n}", why) for n, why in told])}
    cut = gzip.compress(b"\n".join([*row, *[os.urandom(3000).hex().encode()] * 5]), mtime=0)
    (root / "cut.jsonl.gz").write_bytes(cut[: len(cut) * 2 // 3])
    found["gz"] = ("cut.jsonl.gz", [("cut.jsonl.gz", "damaged file: Compressed file ended before the end-of-stream marker was reached")])
    whole = table(root / "a.parquet", {"content": [GOOD[0], None, GOOD[1], " "], "path": ["a", None, "c", "d"]})
    found["parquet"] = ("a.parquet", [("a.parquet:2", "no content"), ("d", "empty")])
    (root / "t").mkdir()
    (root / "t" / "1.parquet").write_bytes(whole)
    (root / "t" / "2.parquet").write_bytes(whole[: len(whole) // 2])
    table(root / "t" / "3.parquet", {"other": [1]})
    table(root / "t" / "4.parquet", {"content": [1, 2]})
    (root / "t" / "5.parquet").write_bytes(b"")
    found["parquets"] = (
        "t/*.parquet",
        [("1.parquet:2", "no content"), ("d", "empty"), ("2.parquet", "damaged file"), ("3.parquet", "no column content")]
        + [("4.parquet:1", "content is no text"), ("4.parquet:2", "content is no text"), ("5.parquet", "damaged file")],
    )
    broken = pa.StringArray.from_buffers(3, *pa.array([GOOD[0].encode(), b"\xff\xfe", GOOD[1].encode()], pa.binary()).buffers()[1:])
    table(root / "utf8.parquet", {"content": broken})
    found["utf8"] = ("utf8.parquet", [("utf8.parquet:2", "not UTF-8")])
    with tarfile.open(root / "code.tar.gz", "w:gz") as tar:
        for name, data in {
            "p/a.py": GOOD[0].encode(),
            "p/b.py": b"\xff",
            "../../up.py": GOOD[2].encode(),
            "p/c.py": GOOD[1].encode(),
            "p/.h": b"x",
            "p/e.py": b"",
            "p/z": b"\0",
        }.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        link = tarfile.TarInfo("p/link.py")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        huge = tarfile.TarInfo("p/huge.py")
        huge.size = SMALL.max_bytes + 1
        tar.addfile(huge, io.BytesIO(b"x" * huge.size))
    found["tar"] = (
        "code.tar.gz",
        [("p/b.py", "not UTF-8"), ("p/e.py", "empty"), ("p/z", "binary"), ("p/link.py", "a link or device"), ("p/huge.py", "too large")],
    )
    data = (root / "code.tar.gz").read_bytes()
    (root / "cut.tar.gz").write_bytes(data[:-40])
    found["cut tar"] = ("cut.tar.gz", [*found["tar"][1][:-1], ("p/huge.py", "too large"), ("cut.tar.gz", "damaged file")])
    with zipfile.ZipFile(root / "code.whl", "w") as archive:
        for name, text in {"p/a.py": GOOD[0], "p/b.py": "", "p/c.py": GOOD[1]}.items():
            archive.writestr(name, text)
    data = (root / "code.whl").read_bytes()
    found["whl"] = ("code.whl", [("p/b.py", "empty")])
    (root / "cut.zip").write_bytes(data[:-30])
    (root / "z").mkdir()
    (root / "z" / "a.zip").write_bytes(data)
    (root / "z" / "b.zip").write_bytes(data[:-30])
    found["zips"] = ("z/*.zip", [("p/b.py", "empty"), ("b.zip", "damaged file: File is not a zip file")])
    tree = root / "tree"
    (tree / "p" / ".git").mkdir(parents=True)
    for name, data in {"a.py": GOOD[0].encode(), "b.py": b"\xff", "c.py": b"x\0", "d.py": GOOD[1].encode(), "p/.git/x": b"x"}.items():
        (tree / name).write_bytes(data)
    (tree / "p" / "link.py").symlink_to("/etc/passwd")
    found["folder"] = ("tree", [("b.py", "not UTF-8"), ("c.py", "binary")])
    return found


KINDS = ("jsonl", "gz", "parquet", "parquets", "utf8", "tar", "cut tar", "whl", "zips", "folder")


@pytest.mark.parametrize("kind", KINDS)
def test_bad_rows_and_files_are_named_skipped_and_counted(tmp_path, tokenizer, kind):
    found = bad_rows(tmp_path)
    assert set(found) == set(KINDS)
    path, bad = found[kind]
    source = Source(str(tmp_path / path), name="given")
    record = build(tmp_path / "out", [source], tokenizer, Settings(near=0))
    dropped = read_lines(tmp_path / "out" / "dropped.jsonl")
    assert [(one["name"], one["reason"][: len(why)]) for one, (_, why) in zip(dropped, bad, strict=True)] == bad
    (mine,) = record["sources"]
    assert sum(one["count"] for one in mine["dropped"].values()) == len(bad)
    assert mine["read"]["documents"] == len(bad) + mine["kept"]["documents"] + mine["heldout"] and mine["kept"]["documents"] >= 1


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(st.text(max_size=40), st.just("{")), max_size=25), st.integers(1, 200), st.booleans())
def test_a_row_is_read_once_wherever_its_file_is_cut(tmp_path, texts, size, newline):
    """Ranges of bytes of a JSONL file give what the whole file gives, rows numbered alike."""
    file = tmp_path / "rows.jsonl"
    lines = [text if text == "{" else json.dumps({"content": text}) for text in texts]
    file.write_text("\n".join(lines) + ("\n" if newline and lines else ""))
    source = Source(str(file))

    def rows(size: int) -> list[Document | Bad]:
        found, before = [], 0
        for unit in sources.units(source, 0, size)[0]:
            mine = [*read(unit, source, 1 << 20)]
            found += [one._replace(name=before + one.name) for one in mine]
            before += len(mine)
        return found

    assert rows(size) == rows(1 << 30) and len(rows(size)) == (len(texts) if newline or not texts or texts[-1] != "" else len(texts))


def test_a_bomb_is_left_out(tmp_path, monkeypatch):
    """An archive that unpacks to more than it may: what stands before is read, and the archive is named."""
    from scaled.data import documents

    monkeypatch.setattr(documents, "UNPACKED", 30_000)
    for name, zipped in (("a.tar.gz", False), ("a.zip", True)):
        files = {f"f{i}.py": GOOD[0] + f"\n# {i}" for i in range(400)}
        if zipped:
            with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as archive:
                for member, text in files.items():
                    archive.writestr(member, text)
        else:
            with tarfile.open(tmp_path / name, "w:gz") as tar:
                for member, text in files.items():
                    info = tarfile.TarInfo(member)
                    info.size = len(text)
                    tar.addfile(info, io.BytesIO(text.encode()))
        source = Source(str(tmp_path / name))
        (unit,) = sources.units(source, 0, 1 << 20)[0]
        *good, last = read(unit, source, 1 << 20)
        assert last == Bad(name, "damaged file: it unpacks to too many bytes") and 1 < len(good) < 399 and all(isinstance(x, Document) for x in good)


def test_an_address_of_fsspec(tmp_path, tokenizer):
    """A folder, a glob and a Parquet file at an address are what they are on the disk."""
    given = folder(tmp_path / "code")
    table(tmp_path / "a.parquet", {"content": GOOD, "path": [f"{n}.py" for n in range(6)]})
    wanted = [given, tmp_path / "*.parquet"]
    build(tmp_path / "here", [Source(str(path), name=f"s{i}") for i, path in enumerate(wanted)], tokenizer)
    build(tmp_path / "there", [Source(f"file://{path}", name=f"s{i}") for i, path in enumerate(wanted)], tokenizer)
    here, there = everything(tmp_path / "here"), everything(tmp_path / "there")
    assert {name: data.replace(b"file://", b"") for name, data in there.items()} == here
    with pytest.raises(RunError, match="nothing to read at memory://nowhere"):
        build(tmp_path / "none", [Source("memory://nowhere")], tokenizer)
    with pytest.raises(RunError, match="source etude-nothing://x"):
        build(tmp_path / "none", [Source("etude-nothing://x")], tokenizer)


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
    assert code_ == 2 and "near duplicates need datasketch: pip install -c constraints.txt -e '.[data]'; or set near = 0" in error


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
    texts = [" ".join(f"w{random.Random(n).randrange(vocabulary)}" for _ in range(50)) + f" w{vocabulary - 1} w{n}" for n in range(4)]
    for n, text in enumerate(texts):
        (tmp_path / "code" / f"{n}.txt").write_text(text)
    record = build(tmp_path / "out", [Source(str(tmp_path / "code"), rules="none")], tmp_path / "tokenizer.json")
    assert record["tokenizer"]["dtype"] == ("uint16" if vocabulary == 300 else "uint32")
    assert set(trained(tmp_path / "out")) < set(texts)
