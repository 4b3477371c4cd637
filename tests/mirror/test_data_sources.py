"""Sources of prepared data: every kind, whatever is broken in it, wherever it is cut into units, and at addresses."""

import gzip
import io
import json
import os
import random
import sys
import tarfile
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kit.disk import read_lines
from kit.settings import RunError
from scaled.data import documents, sources
from scaled.data.documents import Document, UnreadableDocument, read
from scaled.data.prepare import Settings
from scaled.data.sources import Source
from tests.mirror.sources import SMALL, build, code, everything, folder, train_on_code


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    return train_on_code(tmp_path_factory.mktemp("tokenizer"))


GOOD = [code(random.Random(n), 3) for n in range(6)]


def table(path: Path, columns: dict, rows: int = 2) -> bytes:
    pq.write_table(pa.table(columns), path, row_group_size=rows)
    return path.read_bytes()


def bad_rows(root: Path) -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """Kinds of sources → the path of one, and everything bad in it, in order. Each has at least two good documents,
    too."""
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
    told = [
        (2, "broken JSON"),
        (3, "no content"),
        (4, "content is no text"),
        (5, "not an object"),
        (6, "not UTF-8"),
        (7, "not UTF-8"),
    ]
    told += [(8, "empty row"), (10, "empty")]
    found = {"jsonl": ("rows.jsonl", [(f"rows.jsonl:{n}", why) for n, why in told])}
    cut = gzip.compress(b"\n".join([*row, *[os.urandom(3000).hex().encode()] * 5]), mtime=0)
    (root / "cut.jsonl.gz").write_bytes(cut[: len(cut) * 2 // 3])
    found["gz"] = (
        "cut.jsonl.gz",
        [("cut.jsonl.gz", "damaged file: Compressed file ended before the end-of-stream marker was reached")],
    )
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
        [
            ("1.parquet:2", "no content"),
            ("d", "empty"),
            ("2.parquet", "damaged file"),
            ("3.parquet", "no column content"),
        ]
        + [("4.parquet:1", "content is no text"), ("4.parquet:2", "content is no text"), ("5.parquet", "damaged file")],
    )
    broken = pa.StringArray.from_buffers(
        3, *pa.array([GOOD[0].encode(), b"\xff\xfe", GOOD[1].encode()], pa.binary()).buffers()[1:]
    )
    table(root / "utf8.parquet", {"content": broken})
    found["utf8"] = ("utf8.parquet", [("utf8.parquet:2", "not UTF-8")])
    members = {
        "p/a.py": GOOD[0].encode(),
        "p/b.py": b"\xff",
        "../../up.py": GOOD[2].encode(),
        "p/c.py": GOOD[1].encode(),
    }
    members |= {"p/.h": b"x", "p/e.py": b"", "p/z": b"\0"}
    with tarfile.open(root / "code.tar.gz", "w:gz") as tar:
        for name, data in members.items():
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
        [
            ("p/b.py", "not UTF-8"),
            ("p/e.py", "empty"),
            ("p/z", "binary"),
            ("p/link.py", "a link or device"),
            ("p/huge.py", "too large"),
        ],
    )
    data = (root / "code.tar.gz").read_bytes()
    (root / "cut.tar.gz").write_bytes(data[:-40])
    found["cut tar"] = (
        "cut.tar.gz",
        [*found["tar"][1][:-1], ("p/huge.py", "too large"), ("cut.tar.gz", "damaged file")],
    )
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
    for name, data in {
        "a.py": GOOD[0].encode(),
        "b.py": b"\xff",
        "c.py": b"x\0",
        "d.py": GOOD[1].encode(),
        "p/.git/x": b"x",
    }.items():
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
    assert (
        mine["read"]["documents"] == len(bad) + mine["kept"]["documents"] + mine["heldout"]
        and mine["kept"]["documents"] >= 1
    )


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(st.text(max_size=40), st.just("{")), max_size=25), st.integers(1, 200), st.booleans())
def test_a_row_is_read_once_wherever_its_file_is_cut(tmp_path, texts, size, newline):
    """Ranges of bytes of a JSONL file give what the whole file gives, rows numbered alike."""
    file = tmp_path / "rows.jsonl"
    lines = [text if text == "{" else json.dumps({"content": text}) for text in texts]
    file.write_text("\n".join(lines) + ("\n" if newline and lines else ""))
    source = Source(str(file))

    def rows(size: int) -> list[Document | UnreadableDocument]:
        found, before = [], 0
        for unit in sources.units(source, 0, size)[0]:
            mine = [*read(unit, source, 1 << 20)]
            found += [one._replace(name=before + one.name) for one in mine]
            before += len(mine)
        return found

    assert rows(size) == rows(1 << 30) and len(rows(size)) == (
        len(texts) if newline or not texts or texts[-1] != "" else len(texts)
    )


@pytest.mark.parametrize("name", ["code.whl", "a.parquet", "tree"])
def test_units_of_any_size_hold_the_same_documents(tmp_path, name):
    """Members of a zip file, row groups and files, one at a time or all at once."""
    bad_rows(tmp_path)
    source = Source(str(tmp_path / name))

    def found(size: int) -> tuple[int, list[Document | UnreadableDocument]]:
        units, _, _ = sources.units(source, 0, size)
        every = [(unit.first, one) for unit in units for one in read(unit, source, 1 << 20)]
        return len(units), [
            one if isinstance(one.name, str) else one._replace(name=first + one.name) for first, one in every
        ]

    (few, whole), (many, parts) = found(1 << 30), found(1)
    assert few == 1 < many and parts == whole and sum(isinstance(one, Document) for one in whole) >= 2


def test_a_bomb_is_left_out(tmp_path, monkeypatch):
    """An archive that unpacks to more than it may: what stands before is read, and the archive is named."""
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
        assert (
            last == UnreadableDocument(name, "damaged file: it unpacks to too many bytes")
            and 1 < len(good) < 399
            and all(isinstance(x, Document) for x in good)
        )


@pytest.mark.parametrize(
    ("at", "byte", "why"),
    [
        (8, b"\x01", "is encrypt"),
        (6, b"\xff", "zip file version"),
    ],  # flags, and version needed, of the member's entry in the directory
    ids=["encrypted", "newer"],
)
def test_a_zip_file_that_cannot_be_unpacked_is_named(tmp_path, at, byte, why):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name in ("p/a.py", "p/b.py"):
            archive.writestr(name, GOOD[0])
    data = bytearray((tmp_path / "a.zip").read_bytes())
    entry = data.rindex(b"PK\x01\x02") + at
    data[entry : entry + 1] = byte
    (tmp_path / "a.zip").write_bytes(data)
    source = Source(str(tmp_path / "a.zip"))
    *good, last = [one for unit in sources.units(source, 0, 1 << 20)[0] for one in read(unit, source, 1 << 20)]
    assert (
        isinstance(last, UnreadableDocument)
        and last.reason.startswith("damaged file: ")
        and why in last.reason
        and len(good) == (at == 8)
    )


def test_a_parquet_file_of_an_unknown_codec_is_named(tmp_path, monkeypatch):
    table(tmp_path / "a.parquet", {"content": GOOD})
    source = Source(str(tmp_path / "a.parquet"))

    def unknown(*_: object) -> None:
        raise pa.ArrowNotImplementedError("Codec type LZO not supported")

    monkeypatch.setattr(pq, "ParquetFile", unknown)
    (unit,) = sources.units(source, 0, 1 << 20)[0]
    assert [*read(unit, source, 1 << 20)] == [
        UnreadableDocument("a.parquet", "damaged file: Codec type LZO not supported")
    ]


@pytest.mark.parametrize("name", ["rows.jsonl", "a.parquet", "code.tar.gz", "code.whl", "tree"])
@pytest.mark.parametrize("error", [ConnectionResetError("reset by peer"), TimeoutError()], ids=["reset", "timeout"])
def test_a_connection_that_breaks_ends_the_build_and_loses_nothing(tmp_path, tokenizer, monkeypatch, name, error):
    """The files behind it are whole. Skipped as damaged, they would be missing from the data, and only from this build
    of it."""
    bad_rows(tmp_path)
    source = [Source(str(tmp_path / name), name="given")]
    build(tmp_path / "whole", source, tokenizer)

    def broken(address: str) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(documents, "open_file", broken)
        with pytest.raises(RunError, match="the connection broke"):
            build(tmp_path / "out", source, tokenizer)
    assert not (tmp_path / "out" / "data.json").exists()
    build(tmp_path / "out", source, tokenizer, resume=True)
    assert everything(tmp_path / "out") == everything(tmp_path / "whole")


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


def test_what_is_not_installed_is_said_in_one_line(tmp_path, tokenizer, monkeypatch):
    table(tmp_path / "a.parquet", {"content": GOOD})
    for module, path in (("pyarrow.parquet", str(tmp_path / "a.parquet")), ("fsspec", f"file://{tmp_path}/a.parquet")):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            with pytest.raises(RunError, match=r"pip install -c constraints.txt -e '.\[data\]'"):
                build(tmp_path / "out", [Source(path)], tokenizer)
        assert not (tmp_path / "out").exists()
