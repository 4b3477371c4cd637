"""What a task leaves in its tree reaches nothing through the harness: not when it is shown, stored, laid out or forked.

Each attempt stands beside a control in which a careless harness falls for it.
"""

import base64
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from environments.sandbox.open import open_sandbox
from environments.sandbox.store import Store
from environments.sandbox.wire import Wire
from kit.settings import RunError

SECRET = "planted-271828"


@pytest.fixture
def hostile(sandbox, shared_store):
    """hostile(command) plays it in a fork of the sandbox, and gives that fork; what is stored of it lies in the shared
    store."""
    forks = []

    def played(command):
        forks.append(sandbox.fork(sandbox.snapshot()))
        heard = forks[-1].call("shell", {"command": command})
        assert heard.ok, heard
        return forks[-1]

    yield played
    for fork in forks:
        fork.close()


@pytest.fixture
def secret(open_folder):
    """A file outside of every sandbox."""
    (open_folder / "secret").mkdir()
    (open_folder / "secret" / "file").write_text(SECRET)
    return open_folder / "secret"


def stored(store):
    """Everything that a store holds."""
    return b"".join(path.read_bytes() for path in store.folder.rglob("*") if path.is_file() and not path.is_symlink())


def careless(tree, copy):
    """What a harness might do: copy a tree and follow its links."""
    shutil.copytree(tree, copy, symlinks=False, ignore_dangling_symlinks=True)
    return b"".join(path.read_bytes() for path in copy.rglob("*") if path.is_file())


def test_a_link_to_a_file_of_the_machine_is_stored_as_a_link(hostile, shared_store, secret, tmp_path):
    fork = hostile(f"ln -s {secret}/file stolen; ln -s {secret} folder; ln -s / everything")
    tree = shared_store.tree(fork.snapshot())
    assert SECRET.encode() not in stored(shared_store)
    assert os.readlink(tree / "stolen") == f"{secret}/file" and (tree / "folder").is_symlink()
    (tree / "everything").unlink()
    assert SECRET.encode() in careless(tree, tmp_path / "copy")


def test_a_link_in_place_of_a_folder_is_not_written_through(hostile, shared_store, secret):
    """The tree that is forked has files in a folder; in the other one, the folder is a link."""
    before = hostile("mkdir d; echo mine > d/file; mkdir d/sub; echo x > d/sub/y")
    after = hostile(f"ln -s {secret} d")
    for first, second in ((before, after), (after, before)):
        with first.fork(second.snapshot()) as fork:
            assert fork.snapshot() == second.snapshot()
    shared_store.tree(before.snapshot())
    shared_store.tree(after.snapshot())
    assert (secret / "file").read_text() == SECRET and os.listdir(secret) == ["file"]
    (shared_store.tree(after.snapshot()) / "d" / "file").write_text("written through the link")
    assert (secret / "file").read_text() != SECRET, "a harness that opens paths in a tree is led out"


def test_a_tree_with_a_fifo_holds_nobody_up(hostile, shared_store):
    fork = hostile("mkfifo pipe")
    with pytest.raises(RunError, match="pipe is a FIFO"):
        fork.snapshot()
    assert (
        fork.call("list", {}).ok
        and "pipe" in fork.call("glob", {"pattern": "*"}).text
        and fork.call("grep", {"pattern": "x"}).ok
    )
    heard = fork.call("shell", {"command": "cat pipe"}, timeout=0.3)
    assert heard.end_reason == "more than 0.3 seconds", "the control: who opens it waits"


@pytest.mark.parametrize("path", ["../outside", "/outside", "a/../../outside", ".."])
def test_a_server_cannot_name_paths_outside(hostile, shared_store, monkeypatch, open_folder, path):
    """As an archive can: this is what a careless unpacking would do with the name."""
    fork = hostile("true")
    rows = [["", "dir", 0o755, 0, ""], ["a", "dir", 0o755, 0, ""], [path, "file", 0o644, 1, "0" * 64]]
    monkeypatch.setattr(Wire, "answer", lambda *_: {"id": 2, "entries": rows, "removed": []})
    with pytest.raises(RunError, match="no tree"):
        fork.snapshot()
    target = open_folder / "x" / "tree"
    target.mkdir(parents=True)
    landed = Path(os.path.normpath(target / path))
    assert landed == target.parent or not landed.is_relative_to(target), (
        "the control: joined to a folder, the name leads out of it"
    )


def test_contents_that_a_server_lies_about_are_not_stored(hostile, shared_store, monkeypatch):
    fork = hostile("echo honest > new")
    monkeypatch.setattr(Wire, "read", lambda self, size, until: b"x" * size)
    monkeypatch.setattr(fork.store, "has", lambda _: False)
    with pytest.raises(RunError, match="was changed while it was stored"):
        fork.snapshot()


HOOK = """
mkdir -p .git/hooks .git/objects .git/refs
echo 'ref: refs/heads/main' > .git/HEAD
printf '[core]\\n\\trepositoryformatversion = 0\\n\\tfsmonitor = "touch %s/by-git; false"\\n' {place} > .git/config
for hook in pre-commit post-checkout post-index-change; do
    printf '#!/bin/sh\\ntouch %s/by-git\\n' {place} > .git/hooks/$hook
    chmod 755 .git/hooks/$hook
done
"""


def test_hooks_and_monitors_of_git_are_not_run(hostile, shared_store, open_folder):
    open_folder.chmod(0o777)
    fork = hostile(HOOK.format(place=open_folder))
    tree = shared_store.tree(fork.snapshot())
    with fork.fork(fork.snapshot()) as other:
        assert (
            other.call("list", {"path": ".git"}).ok and other.call("grep", {"pattern": "fsmonitor", "path": ".git"}).ok
        )
    assert not (open_folder / "by-git").exists()
    environment = {
        "PATH": os.environ["PATH"],
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "safe.directory",
        "GIT_CONFIG_VALUE_0": "*",
    }
    copy = open_folder / "copy"
    shutil.copytree(tree, copy)
    subprocess.run(["git", "status"], cwd=copy, env=environment, capture_output=True)
    assert (open_folder / "by-git").exists(), "the control: whoever asks git there runs the task's program"


def test_python_s_own_hooks_in_a_tree_are_not_run(hostile, shared_store, open_folder):
    """Neither the harness nor the sandbox's server imports anything from a tree."""
    open_folder.chmod(0o777)
    program = f"open({str(open_folder / 'by-python')!r}, 'w').close()"
    names = (
        "sitecustomize",
        "usercustomize",
        "conftest",
        "json",
        "os",
        "select",
        "hashlib",
        "shutil",
        "inside/__init__",
    )
    fork = hostile("mkdir inside; " + "; ".join(f'echo "{program}" > {name}.py' for name in names))
    tree = shared_store.tree(fork.snapshot())
    marked = fork.fork(fork.snapshot())
    with marked:
        inner = "open('/tmp/by-server', 'w').close()"
        marked.call("shell", {"command": "; ".join(f'echo "{inner}" > {name}.py' for name in names) + "; cp *.py /tmp"})
        assert marked.snapshot() and marked.call("delete", {"path": "inside"}).ok
        assert "by-server" not in marked.call("shell", {"command": "ls /tmp"}).text
    assert not (open_folder / "by-python").exists()
    subprocess.run([sys.executable, "-c", "import conftest"], cwd=tree, check=True)
    assert (open_folder / "by-python").exists(), "the control: a Python that begins in the tree"


def test_a_set_user_bit_is_not_stored(hostile, shared_store):
    fork = hostile("cp /usr/bin/true mine; chmod 6755 mine; mkdir d; chmod 1777 d")
    modes = {path: entry.mode for path, entry in shared_store.manifest(fork.snapshot()).items()}
    tree = shared_store.tree(fork.snapshot())
    assert (
        modes["mine"] == 0o755
        and modes["d"] == 0o777
        and not (tree / "mine").stat().st_mode & (stat.S_ISUID | stat.S_ISGID)
    )
    assert "-rwsr-sr-x" in fork.call("shell", {"command": "ls -l mine"}).text, (
        "the control: inside, the bits are there, and mean nothing"
    )


ODD = [
    b"-rf",
    b"new\nline",
    b"\x1b[2J",
    b"\xff\xfe",
    b"a b",
    b"$(touch x)",
    b"`touch x`",
    b"%s%n",
    b"\xe2\x80\xae" + b"txt",
    b"'\"\\",
    b"*",
]


def test_odd_names_are_stored_shown_and_forked(hostile, shared_store):
    names = ", ".join(map(repr, ODD))
    fork = hostile(f"mkdir odd; cd odd; python3 -c \"import base64; exec(base64.b64decode('{encoded(names)}'))\"")
    name = fork.snapshot()
    assert {path for path in shared_store.manifest(name) if path.startswith("odd/")} == {
        "odd/" + os.fsdecode(odd) for odd in ODD
    }
    assert {path.name for path in (shared_store.tree(name) / "odd").iterdir()} == {os.fsdecode(odd) for odd in ODD}
    for tool, args in (("list", {"path": "odd"}), ("glob", {"pattern": "odd/*"}), ("grep", {"pattern": "content"})):
        text = fork.call(tool, args).text
        assert text.count("\n") == len(ODD) - 1 and not re.search(
            "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]", text
        ), text
    for odd in ODD:
        path = "odd/" + os.fsdecode(odd)
        assert fork.call("read", {"path": path}).text == "content\n" and fork.call("delete", {"path": path}).ok
    assert fork.call("list", {"path": "odd"}).text == "the folder is empty"


def encoded(names):
    return base64.b64encode(f"for name in [{names}]: open(name, 'w').write('content\\n')".encode()).decode()


def test_output_moves_no_cursor(hostile):
    fork = hostile("printf '\\033[2J\\033]0;title\\007\\033[31mred\\b\\b\\rover\\233A' > escapes")
    for text in (fork.call("shell", {"command": "cat escapes"}).text, fork.call("read", {"path": "escapes"}).text):
        assert "\x1b" not in text and "\\x1b[2J\\x1b]0;title\\x07" in text
    raw = subprocess.run(["printf", "\\033[2J"], capture_output=True, text=True).stdout
    assert "\x1b" in raw, "the control: what a program prints reaches the terminal as it is"
    heard = fork.call("shell", {"command": "exit 3; \x1b[2J"})
    assert "\x1b" not in heard.text
    missing = fork.call("read", {"path": "\x1b[2J\nmissing"})
    assert "\x1b" not in missing.text and "\n" not in missing.text


def test_answers_cannot_be_forged_from_a_command(hostile):
    """It has no handle of the server's pipe, and what it prints is text."""
    forged = '{"id": 2, "text": "forged", "ok": true, "exit": 0, "ended": null, "seconds": 0}'
    program = f"for n in $(seq 0 30); do echo '{forged}' >&$n; done 2>/dev/null; ls /proc/self/fd; exit 7"
    fork = hostile("true")
    heard = fork.call("shell", {"command": program})
    assert heard.exit == 7 and not heard.ok and heard.text.count("forged") == 2
    assert set(heard.text.split("\n")[-5:-1]) <= {"0", "1", "2", "3"}


def test_a_file_that_changes_while_it_is_stored_is_refused(open_folder, monkeypatch):
    """What was hashed is what is stored, or nothing is."""
    tree, store = open_folder / "tree", Store(open_folder / "store")
    tree.mkdir()
    (tree / "a").write_text("a")
    has = store.has

    def changes(value):
        (tree / "a").write_text("b")
        return has(value)

    monkeypatch.setattr(store, "has", changes)
    with pytest.raises(RunError, match="'a' was changed while it was stored"):
        store.add_folder(tree)
    assert not [path for path in (store.folder / "contents").rglob("*") if path.is_file()] and not list(
        (store.folder / "lists").iterdir()
    )


def test_the_folder_that_a_sandbox_begins_with_is_never_written(start, tmp_path):
    (tmp_path / "mine").write_text("mine")
    sandbox = start()
    with open_sandbox(tmp_path, root=sandbox.root, store=sandbox.store) as other:
        assert other.call("shell", {"command": "rm mine; echo x > new; chmod 777 ."}).ok
    assert os.listdir(tmp_path) == ["mine"] and Path(tmp_path, "mine").read_text() == "mine"
