"""Sdists that are damaged, cut off or made to fill the memory end in one line, whichever library fails over them."""

import gzip
import random
import tarfile
import tracemalloc
import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from environments.tasks import sources
from environments.tasks.inside import unpack as program
from environments.tasks.sources import package_of
from environments.unfold import FOLDS, TooLarge
from kit.settings import RunError
from tests.environments.test_sources import FILES, sdist


def pax_header(size):
    """A header of another member, which says that so many bytes of it follow."""
    member = tarfile.TarInfo("words-1.2/pax")
    member.type, member.size = tarfile.XHDTYPE, size
    return member.tobuf(tarfile.USTAR_FORMAT)


def chain_of_headers(count):
    """Headers that each belong to the next one: a reader that calls itself for each runs out of stack."""
    record = b"17 comment=abcdef\n"
    block = record.ljust(512, b"\0")
    return b"".join(pax_header(len(record)) + block for _ in range(count))


def deep_folder(depth):
    member = tarfile.TarInfo("words-1.2" + "/d" * depth)
    member.type = tarfile.DIRTYPE
    return member.tobuf(tarfile.PAX_FORMAT)


def sparse_file(size):
    """A file that says it has so many bytes, of which none is there (GNU's old format)."""
    member = tarfile.TarInfo("words-1.2/sparse.py")
    member.type = tarfile.GNUTYPE_SPARSE
    block = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    block[483:495] = b"%011o\0" % size
    block[148:156] = b"        "
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def compressed(head, zeros=0, cut=None):
    """gzip of some blocks and so many MiB of zeros behind them, which are never all in memory."""
    packer, out = zlib.compressobj(9, zlib.DEFLATED, 31), bytearray()
    out += packer.compress(head)
    for _ in range(zeros):
        out += packer.compress(bytes(1 << 20))
    out += packer.flush()
    return bytes(out[:cut])


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (compressed(pax_header(600 << 20), zeros=60), "it holds more than 20000 files or 16 MiB"),
        (compressed(bytes(1024), zeros=60), "it holds more than 20000 files or 16 MiB"),
        (compressed(chain_of_headers(5000)), "its headers lie too deep within each other"),
        (compressed(deep_folder(3000)), "it holds more than 100 folders within each other"),
        (compressed(sparse_file(1 << 40) + bytes(1024)), "File too large"),
        (compressed(bytes(1024), cut=-9), "it is cut off"),
        (b"\x1f\x8b\x08\x00" + b"\xff" * 60, "Error -3 while decompressing"),
        (b"", "it is cut off"),
        (gzip.compress(b"x" * 3000), "invalid header"),
    ],
    ids="header-of-600-MB 60-MB-of-zeros headers-of-headers 3000-folders sparse cut-off no-deflate empty "
    "no-tar".split(),
)
def test_an_archive_that_is_made_to_break_its_reader(tmp_path, monkeypatch, data, says):
    """One line, and none of its bytes in the memory of the process that asks."""
    monkeypatch.setattr(sources, "LARGEST", 4 << 20)
    path = tmp_path / "words-1.2.tar.gz"
    path.write_bytes(data)
    tracemalloc.start()
    with pytest.raises(RunError, match=says) as error:
        package_of(str(path), tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    assert "words-1.2.tar.gz cannot be unpacked" in str(error.value) and "\n" not in str(error.value)


def test_a_process_that_is_ended_is_a_line(tmp_path, monkeypatch):
    """By a limit of its own, or of whoever asks."""
    monkeypatch.setattr("environments.tasks.sources.UNPACKING", 0.001)
    with pytest.raises(RunError, match=r"words-1.2.tar.gz cannot be unpacked within 0.001 seconds"):
        package_of(str(sdist(tmp_path / "words-1.2.tar.gz")), tmp_path)
    monkeypatch.setattr("environments.tasks.sources.UNPACKING", 60.0)
    (tmp_path / "killed.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    monkeypatch.setattr("environments.tasks.sources.UNPACK", tmp_path / "killed.py")
    with pytest.raises(RunError, match="it takes too much memory or processor time"):
        package_of(str(tmp_path / "words-1.2.tar.gz"), tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of a small sdist, and of the archive within it."""
    data = sdist(tmp_path_factory.mktemp("whole") / "words-1.2.tar.gz").read_bytes()
    return data, gzip.decompress(data)


@given(seed=st.integers(0, 2**32), outside=st.booleans())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_sdists_are_unpacked_or_one_line(whole, tmp_path, seed, outside):
    """Bytes that are changed, missing or doubled, and files that are cut off: of the gzip file, or of the tar
    within."""
    draw, path = random.Random(seed), tmp_path / "words-1.2.tar.gz"
    path.write_bytes(damaged(whole[0], draw) if outside else gzip.compress(damaged(whole[1], draw), 1))
    says = program.fault(str(path), str(tmp_path / f"{seed}-{outside}"), 1 << 20, 100)
    assert says is None or says
    if seed % 20 == 0:  # in a process of its own, which takes longer
        try:
            package_of(str(path), tmp_path)
        except (RunError, ValueError) as error:
            assert "\n" not in str(error)


def damaged(data, draw):
    out = bytearray(data)
    for _ in range(draw.randrange(1, 4)):
        at, length = draw.randrange(len(out) or 1), draw.choice((1, 1, 8, 512))
        old = bytes(out[at : at + length])
        out[at : at + length] = draw.choice((b"", draw.randbytes(length), bytes(length), old * 2, b"9" * length))
    return bytes(out[: draw.randrange(len(out) + 1)] if draw.random() < 0.3 else out)


def test_a_whole_sdist_is_unpacked_whole(whole, tmp_path):
    """By the program itself, too: the same files, in gzip of several members and with zeros behind."""
    data, inner = whole
    for number, form in enumerate((data, data + bytes(999), gzip.compress(inner[:700]) + gzip.compress(inner[700:]))):
        (tmp_path / "words-1.2.tar.gz").write_bytes(form)
        assert program.fault(str(tmp_path / "words-1.2.tar.gz"), str(tmp_path / str(number)), 1 << 20, 100) is None
        top = tmp_path / str(number) / "words-1.2"
        paths = [path for path in top.rglob("*") if path.is_file()]
        assert {path.relative_to(top).as_posix(): path.read_bytes() for path in paths} == FILES


def test_an_archive_that_no_fold_can_read_is_a_finding():
    """Within a package, too: what a library raises over it is not the audit's end."""
    chain = chain_of_headers(5000)
    for kind, data in (("tar", chain), ("gzip", gzip.compress(bytes(1 << 20)))):
        with pytest.raises(
            TooLarge, match="tar cannot be read: RecursionError|more than 1000 bytes are in a compressed"
        ):
            list(FOLDS[kind](data, 1000))
