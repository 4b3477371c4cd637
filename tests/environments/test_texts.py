"""Edits and searches over files as others write them: line ends of two characters, marks of byte order, UTF-16, long
lines."""

import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from environments.sandbox.inside import files, search
from environments.sandbox.inside.texts import MARKS, edited, encoding_of
from environments.sandbox.inside.tree import Refused, Room

ENCODINGS = [(b"", "utf-8"), *MARKS]
PIECES = st.lists(st.sampled_from(["a", "b", "é", "\U0001f600", "\n", "\n"]), max_size=10).map("".join)
WORDS = PIECES.filter(bool)


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    return Room(str(tmp_path_factory.mktemp("work").resolve()), 1 << 16)


def file(room, data, name="a.txt"):
    path = Path(room.root, name)
    path.write_bytes(data)
    return path


@given(PIECES, WORDS, PIECES, st.sampled_from(["\n", "\r\n"]), st.sampled_from(ENCODINGS), st.booleans())
def test_what_is_read_is_what_an_edit_takes(room, before, old, new, end, kind, every):
    """The file keeps its mark, its encoding and its line ends, and what stands elsewhere."""
    mark, encoding = kind
    path = file(room, mark + before.replace("\n", end).encode(encoding))
    assert files.read(room, "a.txt") == before
    times = before.count(old)
    try:
        files.edit(room, "a.txt", old, new, every)
        assert times == 1 or times and every
        wanted = before.replace(old, new)
        style = end if "\n" in before else "\n"
        assert (
            path.read_bytes() == mark + wanted.replace("\n", style).encode(encoding)
            and files.read(room, "a.txt") == wanted
        )
    except Refused:
        assert times == 0 or times > 1 and not every
        assert path.read_bytes() == mark + before.replace("\n", end).encode(encoding)


BYTES = st.lists(
    st.sampled_from([b"a", b"b", b"\r\n", b"\n", b"\r", b"\xff", b"\xef\xbb\xbf", b"\xff\xfe", b"\0", "é".encode()]),
    max_size=12,
)


@given(
    BYTES.map(b"".join),
    st.sampled_from(["a", "b", "ab", "a\n", "\nb", "a\r\nb", "é"]),
    st.sampled_from(["", "c", "c\n", "\nc\n"]),
)
def test_every_byte_outside_of_the_span_stays(data, old, new):
    """Also of files with line ends of both kinds, with bytes that are no text, or that only begin like UTF-16."""
    times, after = edited(data, old, new, False)
    if times != 1:
        assert after == data
        return
    head = next(at for at in range(len(data) + 1) if at == min(len(data), len(after)) or data[at] != after[at])
    mark, encoding = encoding_of(data)
    spans = {old.replace("\n", end).encode(kind) for end in ("\n", "\r\n") for kind in ("utf-8", encoding)}
    put = {new.replace("\n", end).encode(kind) for end in ("\n", "\r\n") for kind in ("utf-8", encoding)}
    ways = ((at, span, text) for at in range(head + 1) for span in spans if data[at:].startswith(span) for text in put)
    assert any(after == data[:at] + text + data[at + len(span) :] for at, span, text in ways)


def test_each_place_keeps_its_own_line_ends(room):
    """In a file of both kinds, new lines end as those do that they replace, or that follow."""
    path = file(room, b"one\r\ntwo\r\nthree\nfour\nfive")
    files.edit(room, "a.txt", "one\n", "1\n1b\n")
    files.edit(room, "a.txt", "four", "4\n4b")
    files.edit(room, "a.txt", "two\nthree", "2\n3")
    files.edit(room, "a.txt", "five", "5\n")
    assert path.read_bytes() == b"1\r\n1b\r\n2\r\n3\n4\n4b\n5\n"
    with pytest.raises(Refused, match="occurs 2 times"):
        file(room, b"a\nb a\r\nb") and files.edit(room, "a.txt", "a\nb", "c")
    path = file(room, b"a\nb a\r\nb")
    files.edit(room, "a.txt", "a\r\nb", "c")
    assert path.read_bytes() == b"a\nb c", "who says which one is meant is understood"


def test_a_text_without_bytes_loses_no_file(room):
    path = file(room, b"one\ntwo\n")
    with pytest.raises(UnicodeEncodeError):
        files.edit(room, "a.txt", "one", "\ud800")
    assert path.read_bytes() == b"one\ntwo\n"


@example("", "^$", (b"\xff\xfe\x00\x00", "utf-32-le"))  # a mark, and no line
@given(
    st.lists(st.sampled_from(["a", "é", "x" * 4093, "\U0001f600", "needle", "\n", "\r\n", "\ud800"]), max_size=8).map(
        "".join
    ),
    st.sampled_from(["needle", "^a", "a$", "é.*needle", "x{3}é", "\\\\x", "^$", "\U0001f600a", "^needle"]),
    st.sampled_from(ENCODINGS),
)
def test_a_search_finds_what_python_finds_in_the_text(room, text, pattern, kind):
    """Line for line, however long a line is and wherever a character lies."""
    mark, encoding = kind
    data = mark + text.encode(encoding, "surrogatepass")
    file(room, data)
    if not mark and data.startswith((b"\xff\xfe", b"\xfe\xff")) or encoding == "utf-8" and b"\0" in data:
        return
    decoded = data[len(mark) :].decode(encoding, "backslashreplace")
    lines = decoded.removesuffix("\n").split("\n") if decoded else []
    wanted = [str(number) for number, line in enumerate(lines, 1) if re.search(pattern, line.rstrip("\r"))]
    said = search.grep(room, pattern, "a.txt")
    assert [row.split(":", 2)[1] for row in said.splitlines()] == wanted if wanted else said == "nothing matches"


def test_of_a_long_line_the_part_with_the_match_is_shown(room):
    file(room, b"a" * 50_000 + b" needle " + b"b" * 50_000 + b"\nshort needle\n")
    long, short = search.grep(room, "needle").splitlines()
    assert (
        "needle" in long
        and len(long) < search.EXCERPT_CHARACTERS + 20
        and long.endswith("…")
        and short == "a.txt:2:short needle"
    )


def test_what_is_no_text_is_not_searched_and_it_is_said(room):
    file(room, b"needle\0")
    assert search.grep(room, "needle") == "nothing matches"
    assert search.grep(room, "needle", "a.txt") == "a.txt holds null bytes: it is no text, and not searched"
