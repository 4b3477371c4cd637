"""Stored trees: a snapshot is the hash of the tree, a fork begins with it, and nothing that either does reaches the
other or the store."""

import os
import subprocess

import pytest

from environments.sandbox import bubblewrap
from environments.sandbox import manifest as lists
from environments.sandbox.bubblewrap import Bubblewrap
from environments.sandbox.open import open_sandbox
from environments.sandbox.store import Store
from environments.sandbox.wire import Wire
from kit.settings import RunError

FILES = {"a.txt": "one\n", "b/c.py": "x = 1\n", "b/d/e": "deep\n", "gone/f": "f\n"}
CHANGES = """
echo two >> a.txt; echo new > n; rm -r gone; mkdir gone; echo g > gone/g; rm b/c.py; \
ln -s /etc/passwd link; chmod 700 b/d; mkdir -p x/y
printf 'odd' > "$(printf 'odd\\n\\377')"; chmod 000 n; : > empty; mv b/d/e moved
"""


@pytest.fixture(scope="module", params=["overlay", "copy"])
def way(request):
    """Both ways in which a tree gets into a sandbox."""
    return request.param == "overlay"


@pytest.fixture
def begin(root, shared_store, tmp_path, way):
    """begin() gives a sandbox over FILES, and begin(snapshot) one over a stored tree."""
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    name, begun = shared_store.add_folder(tmp_path), []

    def beginner(snapshot=name, **how):
        begun.append(Bubblewrap(root, shared_store, snapshot, overlay=way, **how))
        return begun[-1]

    yield beginner
    for sandbox in begun:
        sandbox.close()


def test_it_begins_with_the_tree_and_an_unchanged_tree_has_its_hash(begin, shared_store, tmp_path, way):
    sandbox = begin()
    assert sandbox.overlaid == way, "this kernel has overlays in user namespaces"
    found = sandbox.call("shell", {"command": "find . -type f | sort | xargs head -n 9"}).text
    assert "one" in found and "x = 1" in found and "deep" in found
    assert sandbox.snapshot() == shared_store.add_folder(tmp_path)


def test_a_snapshot_is_the_hash_of_the_same_tree_made_outside(begin, shared_store, tmp_path):
    sandbox = begin()
    assert sandbox.call("shell", {"command": CHANGES}).ok
    name = sandbox.snapshot()
    assert sandbox.snapshot() == name, "taking one changes nothing"
    subprocess.run(["sh", "-c", CHANGES], cwd=tmp_path, check=True, env={"PATH": os.environ["PATH"]}, umask=0o022)
    outside = {path: entry for path, entry, _ in lists.of_folder(tmp_path)} if os.geteuid() == 0 else None
    if outside is not None:
        assert {path: entry for path, entry in shared_store.manifest(name).items() if path} == {
            p: e for p, e in outside.items() if p
        }
    kinds = {path: (entry.kind, entry.mode) for path, entry in shared_store.manifest(name).items()}
    assert kinds["link"] == ("link", 0o777) and kinds["n"] == ("file", 0) and kinds["b/d"] == ("dir", 0o700)
    assert (
        "gone/g" in kinds
        and "gone/f" not in kinds
        and "b/c.py" not in kinds
        and "b/d/e" not in kinds
        and os.fsdecode(b"odd\n\xff") in kinds
    )


def test_a_fork_is_the_tree_and_writes_reach_neither_parent_nor_store(begin, shared_store):
    parent = begin()
    parent.call("shell", {"command": CHANGES})
    name = parent.snapshot()
    first, second = parent.fork(name), parent.fork(name)
    with first, second:
        assert first.snapshot() == second.snapshot() == name
        assert first.call("shell", {"command": "rm -rf * && echo mine > a.txt && echo x > /tmp/y"}).ok
        changed = first.snapshot()
        assert changed != name and second.snapshot() == parent.snapshot() == name
        assert (
            second.call("read", {"path": "a.txt"}).text == "one\ntwo\n"
            and not second.call("shell", {"command": "cat /tmp/y"}).ok
        )
        third = first.fork(changed)
        with third:
            assert third.snapshot() == changed and third.call("list", {}).text.endswith("a.txt")
            back = third.fork(name)
            with back:
                assert back.snapshot() == name, "a fork of a fork goes back to an earlier tree"
    fresh = begin(name)
    assert fresh.snapshot() == name
    again = Store(shared_store.folder)
    assert lists.readable(again.manifest(name)) == {path: entry for path, entry, _ in lists.of_folder(again.tree(name))}


def test_a_folder_that_the_tree_began_with_can_be_moved(begin):
    sandbox = begin()
    assert sandbox.call(
        "shell",
        {"command": 'mv b moved && cat moved/c.py && python3 -c \'import shutil; shutil.move("gone", "there")\''},
    ).ok
    with sandbox.fork(sandbox.snapshot()) as fork:
        assert (
            fork.call("shell", {"command": "ls; ls moved there"}).text
            == "a.txt\nmoved\nthere\nmoved:\nc.py\nd\n\nthere:\nf\n"
        )


def test_a_fork_far_from_its_base_is_laid_out(begin, shared_store, monkeypatch, way):
    parent = begin()
    monkeypatch.setattr(bubblewrap, "NEAR_FILES", 2)
    parent.call("shell", {"command": f"for i in 1 2 3; do echo $i > far{way}$i; done"})
    name = parent.snapshot()
    assert not shared_store.laid_out(name)
    with parent.fork(name) as fork:
        assert shared_store.laid_out(name) and fork.base == name and fork.snapshot() == name


def test_what_cannot_be_stored_is_refused_and_the_episode_goes_on(begin):
    sandbox = begin()
    for make, says in (
        ("mkfifo b/pipe", "b/pipe is a FIFO"),
        ("python3 -c 'import socket; socket.socket(1).bind(\"s\")'", "s is a socket"),
    ):
        sandbox.call("shell", {"command": make})
        with pytest.raises(RunError, match=says):
            sandbox.snapshot()
        sandbox.call("shell", {"command": "rm -f b/pipe s"})
    sandbox.call("shell", {"command": "d=.; for i in $(seq 150); do d=$d/d; done; mkdir -p $d"})
    with pytest.raises(RunError, match="deeper than 100"):
        sandbox.snapshot()
    assert sandbox.call("delete", {"path": "d"}).ok and sandbox.snapshot()


def test_a_damaged_store_is_found_at_a_fork(root, open_folder):
    (open_folder / "t").mkdir()
    (open_folder / "t" / "a").write_text("a")
    store = Store(open_folder / "store")
    with open_sandbox(open_folder / "t", root=root, store=store) as sandbox:
        sandbox.call("write", {"path": "b", "text": "b"})
        name = sandbox.snapshot()
        value = store.manifest(name)["b"].value
        path = store.folder / "contents" / value[:2] / value[2:]
        path.write_bytes(b"c")
        with pytest.raises(RunError, match="damaged"):
            sandbox.fork(name)
        path.unlink()
        with pytest.raises(RunError, match="cannot be read"):
            sandbox.fork(name)
        with pytest.raises(RunError, match="no tree"):
            sandbox.fork("0" * 64)


def test_a_tree_that_a_server_lies_about_is_refused(start, monkeypatch, shared_store):
    sandbox = start({"a": "a"})
    lies = [["", "dir", 0o755, 0, ""], ["../../escape", "file", 0o644, 1, "0" * 64]]
    monkeypatch.setattr(Wire, "answer", lambda *_: {"id": 1, "entries": lies, "removed": []})
    with pytest.raises(RunError, match="no tree"):
        sandbox.snapshot()
    assert not list(shared_store.folder.parent.glob("**/escape"))
