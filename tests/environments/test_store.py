"""Stored trees come back as they were, damage is found, and nothing is changed in place."""

import hashlib
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.sandbox import manifest as lists
from environments.sandbox.cache import SANDBOX_USER, cache_folder, owner, reachable
from environments.sandbox.open import TREE_LIFETIME, own_store
from environments.sandbox.store import Store
from kit.settings import RunError


@pytest.fixture
def store(open_folder):
    return Store(open_folder / "store")


@pytest.fixture
def folder(open_folder):
    """Files with modes, a link out of the tree, an odd name, an empty folder, and two that may not be read."""
    made = open_folder / "tree"
    (made / "b" / "empty").mkdir(parents=True)
    for path, data, mode in (
        ("a.py", b"x = 1\n", 0o644),
        ("b/run", b"#!/bin/sh\n", 0o755),
        ("b/odd\n\x1b[31m", b"", 0o600),
        ("b/same", b"x = 1\n", 0o640),
    ):
        (made / path).write_bytes(data)
        (made / path).chmod(mode)
    (made / "out").symlink_to("/etc/passwd")
    (made / "loop").symlink_to("loop")
    return made


def listed(folder):
    return {path: entry for path, entry, _ in lists.of_folder(folder)}


def test_a_tree_comes_back(store, folder):
    name = store.add_folder(folder)
    assert name in store and name == lists.digest(listed(folder)) and store.manifest(name) == listed(folder)
    tree = store.tree(name)
    assert listed(tree) == lists.readable(store.manifest(name))
    assert os.readlink(tree / "out") == "/etc/passwd" and stat.S_IMODE((tree / "b/run").stat().st_mode) == 0o755
    whose = os.geteuid() if owner() is None else SANDBOX_USER
    assert {(tree / path).lstat().st_uid for path in store.manifest(name)} == {whose}


def test_nothing_is_linked_and_equal_contents_lie_there_once(store, folder):
    tree = store.tree(store.add_folder(folder))
    contents = [path for path in (store.folder / "contents").rglob("*") if path.is_file()]
    assert len(contents) == 3
    assert all(path.stat().st_nlink == 1 for path in [*contents, tree / "a.py", tree / "b/same"])
    (folder / "a.py").write_bytes(b"other")
    assert (tree / "a.py").read_bytes() == b"x = 1\n"


def test_another_process_finds_what_this_one_stored(store, folder):
    name = store.add_folder(folder)
    other = Store(store.folder)
    assert name in other and other.manifest(name) == store.manifest(name) and not other.laid_out(name)
    assert other.tree(name) == store.tree(name) and other.laid_out(name)


def test_what_nobody_uses_is_forgotten(store, folder):
    """With the contents that no other tree holds. A store that is open elsewhere keeps all."""
    old = store.add_folder(folder)
    for path in ("a.py", "b/same"):
        (folder / path).write_bytes(b"x = 2\n")
    young, later = store.add_folder(folder), time.time() + 1000
    store.tree(old), store.tree(young)
    os.utime(store.folder / "lists" / f"{young}.json", (later + 1, later + 1))
    before, other = {*store.folder.rglob("*")}, Store(store.folder)
    assert store.forget(later) == 0 and {*store.folder.rglob("*")} == before
    del other
    assert (
        store.forget(later) == 1
        and old not in store
        and not store.laid_out(old)
        and young in store
        and store.laid_out(young)
    )
    assert listed(store.tree(young)) == lists.readable(store.manifest(young)) and store.add_folder(folder) == young
    assert len([path for path in (store.folder / "contents").rglob("*") if path.is_file()]) == 3
    os.utime(store.folder / "lists" / f"{young}.json", (1, 1))
    assert Store(store.folder).manifest(young)  # who begins with it uses it
    assert store.forget(time.time() - 100) == 0 and store.forget(time.time() + 100) == 1


def test_the_user_s_store_forgets_once_a_day(open_folder, monkeypatch):
    asked, folder = [], open_folder / "store"
    monkeypatch.setattr(Store, "forget", lambda self, since: asked.append(since))
    for wait, expected in ((0, 1), (3600, 1), (24 * 3600, 2)):
        if wait:
            os.utime(folder / "forgotten", (time.time() - wait - 1,) * 2)
        own_store.cache_clear()  # as in another process
        assert own_store(folder) is own_store(folder) and len(asked) == expected
    assert asked[-1] < time.time() - TREE_LIFETIME + 10


def damage(path):
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


def test_a_damaged_content_is_found(store, folder):
    name = store.add_folder(folder)
    entry = store.manifest(name)["a.py"]
    damage(store.folder / "contents" / entry.value[:2] / entry.value[2:])
    with pytest.raises(RunError, match="damaged"):
        store.content(entry)
    with pytest.raises(RunError, match="damaged, first at 'a.py'"):
        Store(store.folder).tree(name)


def test_a_damaged_list_is_found(store, folder):
    name = store.add_folder(folder)
    damage(store.folder / "lists" / f"{name}.json")
    with pytest.raises(RunError, match="damaged"):
        Store(store.folder).manifest(name)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: damage(t / "a.py"),
        lambda t: (t / "new").touch(),
        lambda t: (t / "out").unlink(),
        lambda t: (t / "a.py").chmod(0o777),
    ],
)
def test_a_damaged_tree_is_found(store, folder, change):
    name = store.add_folder(folder)
    change(store.tree(name))
    with pytest.raises(RunError, match="damaged"):
        Store(store.folder).tree(name)


def test_a_content_that_is_gone_is_found(store, folder):
    name = store.add_folder(folder)
    shutil.rmtree(store.folder / "contents")
    with pytest.raises(RunError, match="missing"):
        store.tree(name)
    assert not list((store.folder / "trees").iterdir())
    with pytest.raises(RunError, match="not stored"):
        Store(store.folder).add(store.manifest(name))


@pytest.mark.parametrize("name", ["", "0" * 64, "../lists", "x" * 64])
def test_what_is_not_stored_is_refused(store, name):
    assert name not in store
    with pytest.raises(RunError, match="no tree"):
        store.tree(name)


@pytest.mark.parametrize(
    ("size", "value"),
    [(5, hashlib.sha256(b"abcd").hexdigest()), (4, "0" * 64), (3, hashlib.sha256(b"abcd").hexdigest())],
)
def test_contents_are_checked_while_they_come(store, size, value):
    """Too few bytes, other bytes, and more than were said: each alone."""
    parts = [b"ab", b"cd"]
    with pytest.raises(RunError, match="was changed"):
        store.add_content(lambda most: parts.pop(0)[:most] if parts else b"", size, value, "x")
    assert not [path for path in (store.folder / "contents").rglob("*") if path.is_file()]


def test_what_is_being_stored_or_was_stored_again_is_not_forgotten(store, folder):
    """Contents come before the list that holds them. A tree that somebody stores again is in use, as one that somebody
    begins with."""
    value = hashlib.sha256(b"young").hexdigest()
    store.add_content(lambda most, left=[b"young"]: left.pop(), 5, value, "x")
    assert store.forget(time.time() - 100) == 0 and store.has(value)
    assert store.forget(time.time() + 100) == 0 and not store.has(value)
    name = store.add_folder(folder)
    os.utime(store.folder / "lists" / f"{name}.json", (1, 1))
    assert Store(store.folder).add_folder(folder) == name
    assert store.forget(time.time() - 100) == 0 and name in store


@settings(max_examples=20)
@given(st.dictionaries(st.from_regex(r"[a-c]{1,2}(/[a-c]){0,2}", fullmatch=True), st.binary(max_size=3), max_size=5))
def test_any_tree_comes_back(files):
    with tempfile.TemporaryDirectory() as home:
        Path(home).chmod(0o755)
        tree = Path(home, "tree")
        tree.mkdir()
        for path, data in files.items():
            if not any(other != path and other.startswith(path + "/") for other in files):
                (tree / path).parent.mkdir(parents=True, exist_ok=True)
                (tree / path).write_bytes(data)
        store = Store(Path(home, "store"))
        assert listed(store.tree(store.add_folder(tree))) == listed(tree)


def test_where_the_cache_lies(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "etude"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cache_folder() == Path.home() / ".cache" / "etude"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert cache_folder() == Path("/var/cache/etude")


def test_a_folder_is_made_open_to_others(open_folder):
    before = os.umask(0o077)
    try:
        store = Store(open_folder / "a" / "b" / "store")
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (open_folder / "a", store.folder, store.folder / "trees")}
    assert modes == {0o755} and stat.S_IMODE((store.folder / "contents").stat().st_mode) == 0o700


def test_a_folder_that_the_sandbox_s_user_cannot_reach_is_refused(monkeypatch, open_folder):
    (open_folder / "closed" / "in").mkdir(parents=True)
    (open_folder / "closed").chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert reachable(open_folder / "closed" / "in")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(RunError, match="XDG_CACHE_HOME"):
        reachable(open_folder / "closed" / "in")
