"""A tree has one hash, whatever the order, the times and the machine; and no list leads out of its tree."""

import hashlib
import os
import random
import socket

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from environments.sandbox import manifest as lists
from environments.sandbox.manifest import Entry
from kit.settings import RunError

NAMES = st.text(
    st.characters(codec=None, exclude_characters="/\0", exclude_categories=()), min_size=1, max_size=6
).filter(
    lambda name: (
        name not in (".", "..") and all(not 0xD800 <= ord(c) <= 0xDFFF or 0xDC80 <= ord(c) <= 0xDCFF for c in name)
    )
)
DIGESTS = st.binary(max_size=4).map(lambda data: hashlib.sha256(data).hexdigest())
LEAVES = st.one_of(
    st.builds(
        lambda mode, size, value: Entry("file", mode, size, value), st.integers(0, 0o777), st.integers(0, 9), DIGESTS
    ),
    st.builds(lambda value: Entry("link", 0o777, 0, value), NAMES),
)


@st.composite
def trees(draw):
    """Lists of up to three levels."""
    found = {"": Entry("dir", draw(st.integers(0, 0o777)))}
    for _ in range(draw(st.integers(0, 8))):
        folder = draw(
            st.sampled_from([path for path, entry in found.items() if entry.kind == "dir" and path.count("/") < 3])
        )
        path = f"{folder}/{draw(NAMES)}" if folder else draw(NAMES)
        if path not in found:
            found[path] = draw(st.one_of(LEAVES, st.builds(lambda mode: Entry("dir", mode), st.integers(0, 0o777))))
    return found


@given(trees(), st.randoms())
def test_the_canonical_form_knows_no_order_and_is_read_back(tree, order):
    shuffled = list(tree.items())
    order.shuffle(shuffled)
    assert lists.dump(dict(shuffled)) == lists.dump(tree) and lists.digest(dict(shuffled)) == lists.digest(tree)
    assert lists.load(lists.dump(tree)) == tree and lists.dump(tree).isascii()


def test_the_hash_of_a_tree_by_hand():
    """So that it stays the same from version to version."""
    empty = hashlib.sha256(b"").hexdigest()
    tree = {"": Entry("dir", 0o755), "é": Entry("link", 0o777, 0, "a b"), "a": Entry("file", 0o644, 0, empty)}
    written = f'[["","dir",493,0,""],["a","file",420,0,"{empty}"],["\\u00e9","link",511,0,"a b"]]'
    assert lists.dump(tree) == written.encode()
    assert lists.digest(tree) == hashlib.sha256(written.encode()).hexdigest()


@given(trees(), trees())
def test_a_change_leads_from_one_tree_to_the_other(before, after):
    remove, paths = lists.changed(before, after)
    found = lists.remove_paths(before, remove)
    for path in paths:
        assert path == "" or found[path.rpartition("/")[0]].kind == "dir", "a folder comes before what is in it"
        found[path] = after[path]
    assert found == after
    assert not any(a != b and a.startswith(b + "/") for a in remove for b in remove)


def test_a_change_by_hand():
    """Of a folder that is gone only its top is named, and a neighbour whose name begins like it by itself. Another kind
    is a removal, too."""
    root, folder, file = Entry("dir", 0o755), Entry("dir", 0o700), Entry("file", 0o600, 1, "0" * 64)
    before = {
        "": root,
        "pkg": folder,
        "pkg/a": file,
        "pkg/b": folder,
        "pkg/b/c": file,
        "pkg2": file,
        "turns": file,
        "stays": file,
    }
    after = {"": root, "turns": folder, "turns/x": file, "stays": Entry("file", 0o644, 1, "0" * 64)}
    assert lists.changed(before, after) == (["pkg", "pkg2", "turns"], ["stays", "turns", "turns/x"])


def test_whoever_owns_a_tree_can_read_it_and_enter_its_folders():
    tree = {
        "": Entry("dir", 0),
        "a": Entry("file", 0o070),
        "b": Entry("dir", 0o027),
        "c": Entry("link", 0o777, 0, "x"),
        "d": Entry("file", 0o755),
    }
    assert [entry.mode for entry in lists.readable(tree).values()] == [0o500, 0o470, 0o527, 0o777, 0o755]


@given(trees(), trees())
def test_rows_add_to_what_is_left_of_a_tree(before, after):
    """As a sandbox tells of its changes."""
    remove, paths = lists.changed(before, after)
    rows = [[path, e.kind, e.mode, e.size, e.value] for path in paths for e in [after[path]]]
    assert lists.parse(rows, lists.remove_paths(before, remove)) == after


@given(trees())
def test_a_tree_differs_from_itself_in_nothing_and_is_gone_without_its_root(tree):
    assert (
        lists.changed(tree, tree) == ([], [])
        and lists.remove_paths(tree, [""]) == {}
        and lists.remove_paths(tree, []) == tree
    )
    assert lists.readable(lists.readable(tree)) == lists.readable(tree)


FILE = ["file", 0o644, 1, "0" * 64]
ROOT = ["", "dir", 0o755, 0, ""]


@pytest.mark.parametrize(
    "rows",
    [
        {},
        [["a", *FILE]],
        [ROOT, ["../a", *FILE]],
        [ROOT, ["..", "dir", 0o755, 0, ""], ["../a", *FILE]],
        [ROOT, ["a", "dir", 0o755, 0, ""], ["a/..", "dir", 0o755, 0, ""], ["a/../b", *FILE]],
        [ROOT, [".", "dir", 0o755, 0, ""], ["./a", *FILE]],
        [ROOT, ["/a", *FILE]],
        [ROOT, ["a/./b", *FILE], ["a", "dir", 0o755, 0, ""]],
        [ROOT, ["a//b", *FILE], ["a", "dir", 0o755, 0, ""]],
        [ROOT, ["a/b", *FILE]],
        [ROOT, ["a\0b", *FILE]],
        [ROOT, ["a", *FILE], ["a", *FILE]],
        [ROOT, ["a", "link", 0o777, 0, "/etc"], ["a/passwd", *FILE]],
        [ROOT, ["a", *FILE], ["a/b", *FILE]],
        [ROOT, ["x" * 256, *FILE]],
        [ROOT, ["a", "file", 0o4755, 1, "0" * 64]],
        [ROOT, ["a", "file", 0o644, -1, "0" * 64]],
        [ROOT, ["a", "file", 0o644, 1, "../../etc/passwd"]],
        [ROOT, ["a", "device", 0o644, 0, ""]],
        [ROOT, ["a", "link", 0o777, 0, ""]],
        [ROOT, ["a", "file", True, 1, "0" * 64]],
        [ROOT, ["a"]],
        [["", *FILE]],
        [["", "link", 0o777, 0, "/"]],
    ],
)
def test_no_list_leads_out_of_its_tree(rows):
    with pytest.raises(ValueError):
        lists.parse(rows)


@given(st.binary(max_size=60))
@example(b"[" * 50)
def test_what_is_no_list_is_refused(data):
    try:
        assert lists.dump(lists.load(data)) == data
    except ValueError:
        pass


def test_a_deeply_nested_list_is_refused():
    with pytest.raises(ValueError):
        lists.load(b"[" * 100_000)


def fill(folder, seed):
    """The same tree, made in another order and at another time."""
    order = random.Random(seed)
    files = {"b/c.py": b"1", "a.txt": b"x", "b/d": b"", os.fsdecode(b"odd\n\xff"): b"?"}
    for path, data in order.sample(sorted(files.items()), len(files)):
        (folder / path).parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        (folder / path).write_bytes(data)
        (folder / path).chmod(0o640)
        os.utime(folder / path, (order.random() * 1e9, order.random() * 1e9))
    (folder / "link").symlink_to("/etc/passwd")
    for name in ("", "b"):
        (folder / name).chmod(0o755)


def test_a_folder_s_list_depends_on_its_content_alone(tmp_path):
    found = []
    for seed in range(3):
        folder = tmp_path / str(seed)
        folder.mkdir()
        fill(folder, seed)
        found.append({path: entry for path, entry, _ in lists.of_folder(folder)})
    assert (
        found[0]
        == found[1]
        == found[2]
        == lists.parse([[p, e.kind, e.mode, e.size, e.value] for p, e in found[0].items()])
    )
    assert found[0]["link"] == Entry("link", 0o777, 0, "/etc/passwd")
    (folder / "a.txt").chmod(0o4640), (folder / "b").chmod(0o2755)  # set-user and set-group bits are not part of a tree
    assert {path: entry for path, entry, _ in lists.of_folder(folder)} == found[0]
    (folder / "a.txt").chmod(0o600)
    assert {path: entry for path, entry, _ in lists.of_folder(folder)} != found[0]


def test_what_cannot_be_stored_is_named_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RunError, match="'pipe' is a FIFO"):
        list(lists.of_folder(tmp_path))
    (tmp_path / "pipe").unlink()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "s"))
        with pytest.raises(RunError, match="'s' is a socket"):
            list(lists.of_folder(tmp_path))
    with pytest.raises(RunError, match="is no folder"):
        list(lists.of_folder(tmp_path / "missing"))
