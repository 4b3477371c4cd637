"""Sandboxes end without a trace, whatever ends them, and say why where they cannot begin."""

import gc
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from environments.sandbox import bubblewrap, served
from environments.sandbox.bubblewrap import Bubblewrap
from environments.sandbox.interface import Limits
from environments.sandbox.open import open_sandbox
from environments.sandbox.start import PROFILE, explain, information
from environments.sandbox.wire import Wire
from kit.settings import RunError


def alive(sandbox):
    """Whether a process of the sandbox is left on this machine."""
    return (
        Path(f"/proc/{sandbox.first}").exists()
        and Path(f"/proc/{sandbox.first}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    )


def test_closing_ends_all_and_is_said_to_later_calls(start):
    sandbox = start()
    assert alive(sandbox)
    sandbox.close()
    sandbox.close()
    assert not alive(sandbox)
    heard = sandbox.call("list", {})
    assert (heard.ok, heard.end_reason) == (False, "the sandbox is closed")
    with pytest.raises(RunError, match="closed"):
        sandbox.snapshot()


def test_a_server_that_is_killed_ends_the_episode_in_one_line(start):
    sandbox = start()
    os.kill(sandbox.first, signal.SIGKILL)
    for _ in range(2):
        heard = sandbox.call("list", {})
        assert heard.end_reason == "the sandbox's server has ended; the episode is over" and not heard.ok
    with pytest.raises(RunError, match="has ended"):
        sandbox.snapshot()


def test_a_server_that_is_killed_in_a_call_ends_the_episode_in_one_line(start):
    sandbox = start()
    timer = threading.Timer(0.3, lambda: os.kill(sandbox.first, signal.SIGKILL))
    timer.start()
    heard = sandbox.call("shell", {"command": "sleep 60"})
    assert "has ended" in heard.end_reason and "\n" not in heard.end_reason and not alive(sandbox)


def test_a_server_that_stops_answering_is_ended_at_its_time(start, monkeypatch):
    monkeypatch.setattr(served, "LATE", 0.3)
    sandbox = start()
    os.kill(sandbox.first, signal.SIGSTOP)
    heard = sandbox.call("list", {}, timeout=0.2)
    assert heard.end_reason == "the sandbox's server gave no answer in time; the episode is over" and not alive(sandbox)


@pytest.mark.parametrize(
    "answer",
    [
        {"text": 1, "ok": True, "exit": None, "ended": None, "seconds": 0},
        {"text": "", "ok": "yes", "exit": None, "ended": None, "seconds": 0},
        {"text": "", "ok": True, "exit": "0", "ended": None, "seconds": 0},
        {"text": "", "ok": True, "exit": None, "ended": 3, "seconds": 0},
        {"text": "", "ok": True, "exit": 0, "ended": None, "seconds": float("nan")},
        {"text": "", "ok": True, "exit": True, "ended": None, "seconds": 0},
        {"id": 99},
        {},
    ],
)
def test_an_answer_that_is_none_ends_the_episode(start, monkeypatch, answer):
    sandbox = start()
    monkeypatch.setattr(Wire, "answer", lambda *_: {"id": 1, **answer})
    assert sandbox.call("list", {}).end_reason == "the sandbox's server said what is no answer; the episode is over"


def test_sandboxes_end_with_the_process_that_started_them(root, shared_store, open_folder):
    """Also where that is killed, and also where they hang."""
    (open_folder / "t").mkdir()
    name = shared_store.add_folder(open_folder / "t")
    program = f"""
import os, signal, sys, threading
sys.path.insert(0, {str(Path(bubblewrap.__file__).parents[2])!r})
from pathlib import Path
from environments.sandbox.bubblewrap import Bubblewrap
from environments.sandbox.start import PROFILE, explain
from environments.sandbox.store import Store
two = [Bubblewrap(Path({str(root)!r}), Store(Path({str(shared_store.folder)!r})), {name!r}) for _ in range(2)]
os.kill(two[1].first, signal.SIGSTOP)
threading.Thread(target=two[0].call, args=("shell", {{"command": "sleep 100"}})).start()
print(*(sandbox.first for sandbox in two), flush=True)
threading.Event().wait()
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    firsts = [os.pidfd_open(int(word)) for word in child.stdout.readline().split()]
    child.kill()
    child.communicate()
    for first in firsts:
        assert ended(first, 20)
        os.close(first)


def ended(handle, seconds):
    """Whether the process ends by then."""
    return bool(select.select([handle], [], [], seconds)[0])


def test_a_sandbox_outlives_the_thread_that_opened_it(start):
    found = []
    thread = threading.Thread(target=lambda: found.append(start()))
    thread.start()
    thread.join()
    time.sleep(0.1)
    assert found[0].call("list", {}).ok


def test_a_forked_process_that_ends_leaves_its_parent_s_sandboxes(start):
    sandbox = start()
    program = os.fork()
    if program == 0:
        sandbox.close()
        os._exit(0)
    os.waitpid(program, 0)
    assert sandbox.call("list", {}).ok


def test_a_sandbox_may_be_closed_during_a_call(start):
    """Whoever waits for the call's answer hears of it, and reads from no handle that means something else by then."""
    sandbox, heard = start(), []
    thread = threading.Thread(
        target=lambda: heard.append(sandbox.call("shell", {"command": "echo begun; sleep 60"}, 60))
    )
    thread.start()
    time.sleep(0.3)
    since = time.monotonic()
    sandbox.close()
    thread.join()
    assert heard[0].end_reason == "the sandbox is closed" and time.monotonic() - since < 10
    assert sandbox.call("list", {}).end_reason == "the sandbox is closed"


def test_a_start_that_comes_to_nothing_is_not_waited_for():
    """bwrap says nothing, or less than it should, and holds its pipe open."""
    for said in (b"", b'{"child-pid"'):
        reader, writer = os.pipe()
        os.write(writer, said)
        assert information(reader, 0.05) == said
        os.close(writer)
    handle = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    with pytest.raises(OSError, match="Is a directory"):
        information(handle)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)


def test_a_sandbox_that_nobody_keeps_is_closed(root, shared_store, open_folder):
    (open_folder / "t").mkdir()
    sandbox = Bubblewrap(root, shared_store, shared_store.add_folder(open_folder / "t"))
    first = os.pidfd_open(sandbox.first)
    del sandbox
    gc.collect()
    assert ended(first, 20)
    os.close(first)


def test_no_handle_stays_open(start):
    start().close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        start().close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_it_is_another_user_s_process_and_knows_nothing_of_the_environment(start, monkeypatch):
    monkeypatch.setenv("PLANTED_SECRET", "planted-3141")
    sandbox = start()
    lines = Path(f"/proc/{sandbox.first}/status").read_text()
    status = dict(line.split(":\t", 1) for line in lines.splitlines() if ":\t" in line)
    assert "0" not in status["Uid"].split() and status["NoNewPrivs"] == "1" and status["Seccomp"] == "2"
    assert [status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")] == ["0" * 16] * 5
    if os.geteuid() == 0:
        assert Path(f"/proc/{sandbox.first}/environ").read_bytes() in (b"", b"PWD=/\0"), "what bwrap sets itself"
    else:
        with pytest.raises(PermissionError):
            Path(f"/proc/{sandbox.first}/environ").read_bytes()


def test_limits_must_be_positive():
    for change in ({"memory": 0}, {"processes": -1}, {"seconds": float("inf")}, {"output": 100}, {"disk": 4095}):
        with pytest.raises(ValueError, match=next(iter(change))):
            Limits(**change)


def test_kinds_and_systems_that_are_none(tmp_path, monkeypatch):
    with pytest.raises(RunError, match="no kind of sandbox"):
        open_sandbox(tmp_path, "virtual")  # pyright: ignore
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    with pytest.raises(RunError, match="Darwin"):
        open_sandbox(tmp_path)


def test_a_machine_without_bubblewrap_is_told_what_to_install(start, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RunError, match="apt-get install bubblewrap"):
        start()


@pytest.mark.parametrize(
    ("setting", "value", "says"),
    [
        ("kernel/apparmor_restrict_unprivileged_userns", "1", PROFILE),
        ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces"),
        ("nothing", "", "seccomp=unconfined"),
    ],
)
def test_where_user_namespaces_are_forbidden_it_is_said_by_what(tmp_path, setting, value, says):
    (tmp_path / setting).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / setting).write_text(value + "\n")
    for error in (
        "setting up uid map: Permission denied",
        "No permissions to create new namespace",
        "OSError: mount of tmpfs on /run: Operation not permitted",
    ):
        told = explain(f"bwrap: {error}", tmp_path)
        assert says in told and error in told and "\n" not in told
    assert explain("bwrap: Can't find source path /x", tmp_path).startswith("the sandbox did not start")


def test_a_sandbox_that_cannot_start_says_why(shared_store, open_folder):
    (open_folder / "t").mkdir()
    (open_folder / "root").mkdir()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RunError, match="did not start; bwrap says"):
        open_sandbox(open_folder / "t", root=open_folder / "root", store=shared_store)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_interface_is_what_others_build_on(sandbox):
    heard = sandbox.call("list", {})
    assert json.dumps([heard.text, heard.ok, heard.exit, heard.end_reason, heard.seconds]) and heard.seconds >= 0
