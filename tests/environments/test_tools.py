"""What the tools do, played in this process on folders of the test, and what they say inside to calls that are none."""

import os
import socket
import time
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from environments.sandbox.inside import files, search, server
from environments.sandbox.inside.shell import Tail
from environments.sandbox.inside.tree import Refused, Room, place
from environments.sandbox.interface import LIMITS


@pytest.fixture
def room(tmp_path):
    made = tmp_path / "work"
    (made / "pkg" / "deep").mkdir(parents=True)
    (made / "a.txt").write_bytes(b"one\ntwo\nthree")
    (made / "pkg" / "b.py").write_bytes(b"import os\n\n\ndef f():\n    return os\n")
    (made / "pkg" / "deep" / "c.py").write_bytes(b"X = 'two'\r\n")
    (tmp_path / "secret").write_text("secret")
    (made / "out").symlink_to(tmp_path / "secret")
    (made / "up").symlink_to("..")
    (made / "in").symlink_to("pkg/b.py")
    (made / "loop").symlink_to("loop")
    os.mkfifo(made / "pipe")
    return Room(str(made), 4096)


def test_read(room):
    assert files.read(room, "a.txt") == "one\ntwo\nthree"
    assert files.read(room, "a.txt", start=2, lines=1) == "two\n"
    assert files.read(room, "a.txt", start=3) == "three" and files.read(room, "a.txt", start=9) == ""
    assert files.read(room, "in").startswith("import os")
    Path(room.root, "bytes").write_bytes(b"\xff\x00\x1b[2J")
    assert files.read(room, "bytes") == "\\xff\x00\x1b[2J"
    with pytest.raises(Refused, match="start"):
        files.read(room, "a.txt", start=0)


def test_a_huge_file_is_read_up_to_the_bound(room):
    with open(Path(room.root, "huge"), "wb") as file:
        file.write(b"line\n" * 1000)
        file.truncate(1 << 40)
    found = files.read(room, "huge")
    assert found.startswith("line\n" * 799 + "\n… ") and len(found.encode()) <= room.output
    assert found.endswith(f"… {(1 << 40) - 5 * 799} bytes more: read on with start=800")
    Path(room.root, "wide").write_text("x" * 5000 + "\nnext\n")
    assert files.read(room, "wide") == "x" * 3996 + "\n… 1010 bytes more: line 1 is longer than a tool may say"
    assert files.read(room, "huge", start=2, lines=2) == "line\nline\n"


def test_write_makes_folders_and_keeps_bytes(room):
    assert files.write(room, "new/sub/x.txt", "é\n") == "wrote 3 bytes to new/sub/x.txt"
    assert Path(room.root, "new/sub/x.txt").read_bytes() == "é\n".encode()
    files.write(room, "in", "through a link that stays\n")
    assert (
        Path(room.root, "pkg/b.py").read_text() == "through a link that stays\n" and Path(room.root, "in").is_symlink()
    )
    for path in ("", ".", "pkg", "pipe", "out", "up/x", "loop", "a.txt/x"):
        with pytest.raises((Refused, OSError)):
            files.write(room, path, "x")
    assert Path(room.root).parent.joinpath("secret").read_text() == "secret"


def test_edit_replaces_what_occurs_once(room):
    assert (
        files.edit(room, "a.txt", "two", "2") == "replaced 1 place in a.txt"
        and files.read(room, "a.txt") == "one\n2\nthree"
    )
    with pytest.raises(Refused, match="does not occur"):
        files.edit(room, "a.txt", "two", "2")
    with pytest.raises(Refused, match="occurs 3 times"):
        files.edit(room, "a.txt", "e", "E")
    assert files.edit(room, "a.txt", "e", "E", every=True) == "replaced 3 places in a.txt"
    with pytest.raises(Refused, match="empty"):
        files.edit(room, "a.txt", "", "x")
    files.edit(room, "pkg/deep/c.py", "'two'", "2")
    assert Path(room.root, "pkg/deep/c.py").read_bytes() == b"X = 2\r\n", "line ends stay"


@given(
    before=st.text("ab\n", max_size=12), old=st.text("ab\n", min_size=1, max_size=3), new=st.text("ab\n", max_size=3)
)
def test_edit_is_a_replacement_or_refused(tmp_path_factory, before, old, new):
    room = Room(str(tmp_path_factory.getbasetemp()))
    files.write(room, "law.txt", before)
    try:
        files.edit(room, "law.txt", old, new)
        assert before.count(old) == 1 and files.read(room, "law.txt") == before.replace(old, new)
    except Refused:
        assert before.count(old) != 1 and files.read(room, "law.txt") == before


def test_delete(room):
    files.delete(room, "pkg")
    files.delete(room, "out")
    files.delete(room, "pipe")
    assert sorted(os.listdir(room.root)) == ["a.txt", "in", "loop", "up"]
    for path in (".", "", "/", "..", "up/secret", "missing", "../secret"):
        with pytest.raises((Refused, OSError)):
            files.delete(room, path)
    assert Path(room.root).parent.joinpath("secret").exists()


def test_list_names_kinds_and_where_links_lead(room):
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.path.relpath(os.path.join(room.root, "sock")))
    Path(room.root, "odd\n\x1b[2J").touch()
    rows = [line.split(None, 2) for line in files.ls(room).split("\n")]
    found = {name: kind for kind, _, name in rows}
    assert (
        found["a.txt"] == "file" and found["pkg"] == "folder" and found["pipe"] == "FIFO" and found["sock"] == "socket"
    )
    assert found["odd\\n\\x1b[2J"] == "file" and found["in -> pkg/b.py"] == "link"
    assert dict((name, size) for _, size, name in rows)["a.txt"] == "13"
    with pytest.raises(Refused, match="not a folder"):
        files.ls(room, "a.txt")


def test_no_tool_waits_for_a_fifo_or_follows_a_link_out(room):
    for path in (
        "pipe",
        "out",
        "up/secret",
        "../secret",
        "/etc/passwd",
        "loop",
        "pkg/../../secret",
        "/proc/self/environ",
    ):
        for tool in (
            lambda path: files.read(room, path),
            lambda path: files.edit(room, path, "a", "b"),
            lambda path: files.write(room, path, "x"),
        ):
            with pytest.raises((Refused, OSError)):
                tool(path)
    assert "secret" not in search.grep(room, "secret") and "pipe" not in search.grep(room, ".")
    assert search.glob(room, "**") == "a.txt\nin\nloop\nout\npipe\nup\npkg/b.py\npkg/deep/c.py"
    with pytest.raises(Refused, match="leads out"):
        search.grep(room, "secret", path="out")


@given(
    st.lists(st.sampled_from(["..", ".", "", "up", "out", "in", "pkg", "loop", "a.txt", "/etc", "x"]), max_size=5).map(
        "/".join
    )
)
@example("up/work/a.txt")
@example("loop/../up")
def test_a_place_lies_in_the_tree_or_is_refused(tmp_path_factory, path):
    base = tmp_path_factory.getbasetemp() / "places"
    if not base.exists():
        (base / "work" / "pkg").mkdir(parents=True)
        for name, target in (("up", ".."), ("out", "/etc"), ("in", "pkg"), ("loop", "loop")):
            (base / "work" / name).symlink_to(target)
    room = Room(str(base / "work"))
    for follow in (True, False):
        try:
            found = place(room, path, follow)
        except Refused:
            continue
        assert Path(os.path.realpath(os.path.dirname(found) if not follow else found)).is_relative_to(base / "work")


PARTS = st.text("ab.", min_size=1, max_size=3).filter(lambda part: part not in (".", ".."))


@given(
    st.lists(PARTS, min_size=1, max_size=3),
    st.lists(st.one_of(PARTS, st.sampled_from(["*", "?", "a*", "*.b", "[ab]", "[!a]*"])), min_size=1, max_size=3),
)
def test_a_glob_without_two_stars_matches_as_pathlib_does(path, words):
    wanted, name = "/".join(words), PurePosixPath(*path)
    same = len(words) == 1 or len(path) == len(
        words
    )  # pathlib matches from the right; ours from the root, where a slash is in it
    assert bool(search.pattern(wanted).fullmatch("/".join(path))) == (same and name.match(wanted))


@pytest.mark.parametrize(
    ("words", "path", "matches"),
    [
        ("*.py", "a/b/c.py", True),
        ("a/*.py", "a/b/c.py", False),
        ("a/**/*.py", "a/c.py", True),
        ("a/**/*.py", "a/b/b/c.py", True),
        ("**/b/*", "b/x", True),
        ("a/**", "a/b/c", True),
        ("a/**", "b", False),
        ("[a-c]?", "bx", True),
        ("[!a-c]", "b", False),
        ("[!a]", "/", False),
        ("a.c", "abc", False),
        ("[]]", "]", True),
        ("[", "[", True),
        ("[^a]", "^", True),
        ("[\\]", "\\", True),
        ("[a||b]", "|", True),
    ],
)
def test_globs_by_hand(words, path, matches):
    assert bool(search.pattern(words).fullmatch(path)) == matches


@given(st.text(max_size=8))
def test_any_glob_is_one_or_is_refused(words):
    try:
        search.pattern(words)
    except Refused:
        pass


def test_grep(room):
    assert search.grep(room, "two") == "a.txt:2:two\npkg/deep/c.py:1:X = 'two'"
    assert search.grep(room, "TWO", glob="*.py", ignore_case=True) == "pkg/deep/c.py:1:X = 'two'"
    assert (
        search.grep(room, r"^def", path="pkg") == "pkg/b.py:4:def f():"
        and search.grep(room, "one", path="a.txt") == "a.txt:1:one"
    )
    Path(room.root, "binary").write_bytes(b"two\0two")
    Path(room.root, "long").write_bytes(b"x" * 10_000 + b"two\nlast two\n")
    assert "binary" not in search.grep(room, "two")
    assert "long:2:last two" in search.grep(room, "last")
    assert search.grep(room, "nowhere") == "nothing matches"
    with pytest.raises(Refused, match="regular expression"):
        search.grep(room, "(")
    Path(room.root, "many").write_text("two\n" * 10_000)
    found = search.grep(room, "two")
    assert len(found.encode()) <= room.output and found.endswith(search.TRUNCATION_NOTE)


def test_a_line_that_is_cut_off_counts_once(room, monkeypatch):
    monkeypatch.setattr(search, "LONGEST", 16)
    Path(room.root, "long").write_text(f"{'x' * 50}\nneedle\n{'y' * 15}\n{'z' * 16}\nlast needle\n")
    assert search.grep(room, "needle", path="long") == "long:2:needle\nlong:5:last needle"


def test_answers_fit_whatever_is_in_them(sandbox):
    """A folder of many names, and lines of characters that take twelve bytes on the way: the episode goes on."""
    fill = (
        "import os\nos.mkdir('many')\nfor i in range(4000):\n    open('many/' + chr(0x1F600) * 50 + "
        "str(i), 'w').write(chr(0x1F600) * 200)\n"
    )
    assert sandbox.call("shell", {"command": f"cat > /tmp/fill.py <<'END'\n{fill}END\npython3 /tmp/fill.py"}).ok
    for tool, args in (
        ("list", {"path": "many"}),
        ("glob", {"pattern": "*"}),
        ("grep", {"pattern": "."}),
        ("shell", {"command": "ls many"}),
    ):
        heard = sandbox.call(tool, args)
        assert heard.end_reason is None and len(heard.text.encode()) <= LIMITS.output + 100, (tool, heard.end_reason)
        assert tool == "shell" or "more" in heard.text.splitlines()[-1]
    assert sandbox.call("delete", {"path": "many"}).ok


@given(st.lists(st.binary(max_size=30), max_size=8), st.integers(2, 40))
def test_a_tail_keeps_beginning_and_end(blocks, room):
    kept, whole = Tail(room), b"".join(blocks)
    for block in blocks:
        kept.add(block)
    assert kept.total == len(whole) and len(kept.head) + len(kept.tail) <= 2 * room + 30
    assert whole.startswith(bytes(kept.head)) and whole.endswith(bytes(kept.tail[-kept.half :] if kept.tail else b""))
    if len(whole) <= 2 * (room // 2):
        assert kept.text() == whole.decode("utf-8", "backslashreplace")
    else:
        assert f"… {len(whole) - 2 * (room // 2)} bytes left out …" in kept.text()


@pytest.mark.parametrize(
    ("tool", "args", "says"),
    [
        ("nothing", {}, "there is no tool 'nothing'; there are read, write"),
        (["read"], {}, "there is no tool"),
        ("read", [], "expects its arguments by name"),
        ("read", {}, "read needs path, text"),
        ("read", {"path": 3}, "path of read must be text; got 3"),
        ("read", {"path": "a", "start": True}, "start of read must be a whole number; got true"),
        ("read", {"path": "a", "stop": 3}, "read has no argument 'stop'; it has path, start, lines"),
        ("edit", {"path": "a", "old": "x", "new": "y", "every": 1}, "every of edit must be true or false; got 1"),
    ],
)
def test_a_call_that_is_none_is_an_observation(sandbox, tool, args, says):
    with pytest.raises(Refused, match="."):
        server.checked(tool, args)
    if isinstance(tool, str) and isinstance(args, dict):
        heard = sandbox.call(tool, args)
        assert (
            not heard.ok
            and says in heard.text
            and "\n" not in heard.text
            and heard.exit is None
            and heard.end_reason is None
        )


def test_tools_inside_say_what_went_wrong_in_one_line(sandbox):
    sandbox.call("shell", {"command": "mkfifo p; ln -s /etc/passwd out; ln -s loop loop; mkdir -p d/e; ln -s / root"})
    for tool, args, says in (
        ("read", {"path": "missing"}, "No such file or directory: missing"),
        ("read", {"path": "d"}, "d is a folder, not a file"),
        ("read", {"path": "p"}, "p is a FIFO, not a file"),
        ("read", {"path": "out"}, "out leads out of /work"),
        ("read", {"path": "root/etc/passwd"}, "root/etc/passwd leads out of /work"),
        ("read", {"path": "/proc/1/environ"}, "/proc/1/environ leads out of /work"),
        ("write", {"path": "p", "text": "x"}, "p is a FIFO, not a file"),
        ("write", {"path": "a\0b", "text": "x"}, "null character"),
        ("grep", {"pattern": "("}, "pattern is no regular expression"),
        ("shell", {"command": "true", "cwd": "missing"}, "No such file or directory: missing"),
        ("shell", {"command": "true", "cwd": "a.txt"}, "a.txt is no folder"),
        ("shell", {"command": "true", "cwd": "root"}, "root leads out of /work"),
        ("delete", {"path": "."}, "'.' names nothing in /work"),
    ):
        heard = sandbox.call(tool, args)
        assert not heard.ok and says in heard.text and "\n" not in heard.text and heard.end_reason is None, heard
    assert (
        sandbox.call("delete", {"path": "d"}).ok
        and sandbox.call("shell", {"command": "rm p out loop root; ls"}).text == "a.txt\npkg\n"
    )


def test_args_that_json_cannot_hold_are_an_observation(sandbox):
    for args in ({"path": {1, 2}}, {"path": float("nan")}, {1: "a"}):
        assert not sandbox.call("read", args).ok
    assert "MiB" in sandbox.call("write", {"path": "x", "text": "x" * (33 << 20)}).text
    for timeout in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="timeout"):
            sandbox.call("list", {}, timeout=timeout)


def test_odd_names_come_and_go_as_they_are(sandbox):
    name = os.fsdecode(b"odd \xff\n\x1b[31m'\"")
    assert sandbox.call("write", {"path": name, "text": "x"}).ok and sandbox.call("read", {"path": name}).text == "x"
    assert (
        sandbox.call("list", {}).text.count("\n") == 2 and "odd \\xff\\n\\x1b[31m'\"" in sandbox.call("list", {}).text
    )
    assert sandbox.call("delete", {"path": name}).ok


def test_an_expression_that_never_ends_is_ended(sandbox):
    sandbox.call("write", {"path": "slow", "text": "a" * 60 + "!"})
    since = time.monotonic()
    heard = sandbox.call("grep", {"pattern": "(a+)+$"}, timeout=0.3)
    assert heard.end_reason == "more than 0.3 seconds" and not heard.ok and time.monotonic() - since < 10
    assert sandbox.call("delete", {"path": "slow"}).ok


def test_a_module_that_is_edited_twice_within_a_second_is_not_taken_for_the_first(sandbox):
    """Both versions have one size: what was compiled would count as up to date."""
    for number in range(4):
        assert sandbox.call("write", {"path": "a.py", "text": f"print({number})\n"}).ok
        assert sandbox.call("shell", {"command": "python3 -c 'import a'"}).text == f"{number}\n"


def test_a_shell_says_how_its_command_ended(sandbox):
    heard = sandbox.call("shell", {"command": "echo out; echo err >&2; pwd; exit 3", "cwd": "pkg"})
    assert (heard.text, heard.exit, heard.ok, heard.end_reason) == ("out\nerr\n/work/pkg\n", 3, False, None)
    assert sandbox.call("shell", {"command": "kill -9 $$"}).exit == 137
    assert sandbox.call("shell", {"command": "cat"}).text == "", "nothing waits for what nobody types"
    assert sandbox.call("shell", {"command": ""}).ok
    assert not sandbox.call("shell", {"command": "x" * 200_000}).ok
    assert sandbox.call("shell", {"command": "yes | head -1"}).ok
    environment = dict(line.split("=", 1) for line in sandbox.call("shell", {"command": "env"}).text.splitlines())
    assert set(environment) <= {
        "PATH",
        "HOME",
        "TMPDIR",
        "LANG",
        "TERM",
        "USER",
        "SHELL",
        "PYTHONDONTWRITEBYTECODE",
        "PWD",
        "SHLVL",
        "_",
    }
