"""Whatever a command uses up is ended, said in one line, and leaves the next call a clean sandbox and the machine as it
was."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from environments.sandbox import memory
from environments.sandbox.interface import Limits
from environments.sandbox.nursery import Nursery

SMALL = Limits(processes=20, memory=96 << 20, disk=8 << 20, inodes=300, output=4096, seconds=20.0)
GREEDY = """
import os, sys, time
children = [os.fork() for _ in range(3)]
kept = bytearray(os.urandom(4096)) * (48 << 8)
time.sleep(60)
"""
"""2^3 processes with 48 MiB each, none of which crosses the limit by itself."""
HIDDEN = """
import mmap, time
kept = mmap.mmap(-1, 160 << 20)
for at in range(0, len(kept), 1 << 20):
    kept[at:at + (1 << 20)] = b"x" * (1 << 20)
    kept.madvise(mmap.MADV_DONTNEED, at, 1 << 20)
time.sleep(60)
"""
"""Pages that no table of the process shows any more."""
ORPHANED = """
import ctypes, os, threading, time
def grow():
    time.sleep(0.3)
    kept = b"x" * (150 << 20)
    time.sleep(60)
threading.Thread(target=grow).start()
ctypes.CDLL(None).syscall(60 if os.uname().machine == "x86_64" else 93, 0)
"""
"""A process whose first thread has ended: the system says that it has no memory."""
SOCKETS = """
import os, socket, time
os.fork()
kept = [socket.socketpair() for _ in range(100)]
for one, _ in kept:
    one.setblocking(False)
    try:
        while one.send(b"x" * 65536):
            pass
    except BlockingIOError:
        pass
time.sleep(60)
"""
TCP = """
import socket, sys, time
try:
    server = socket.create_server((sys.argv[1], 0), family=10 if ":" in sys.argv[1] else 2)
except OSError:  # a kernel without IPv6
    server = socket.create_server(("127.0.0.1", 0))
kept = []
for _ in range(20):
    kept.append(socket.create_connection(server.getsockname()[:2]))
    kept.append(server.accept()[0])
    kept[-2].setblocking(False)
    try:
        while kept[-2].send(b"x" * 65536):
            pass
    except BlockingIOError:
        pass
time.sleep(60)
"""
DAEMON = """
import os, signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for handle in range(3):
            os.close(handle)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(5)
        open("/work/late", "w").write("written after the call")
    os._exit(0)
os.wait()
"""


@pytest.fixture(scope="module")
def small(start):
    return start({"kept.txt": "kept\n"}, limits=SMALL)


@pytest.fixture(scope="module", params=["in a sandbox", "in a fork of a nursery"])
def bounded(request, small, root, shared_store):
    if request.param == "in a sandbox":
        yield small
        return
    with (
        Nursery("none", {"none": "def nursed(): pass"}, SMALL, root, shared_store) as nursery,
        nursery.sandbox() as sandbox,
    ):
        assert sandbox.call("write", {"path": "kept.txt", "text": "kept\n"}).ok
        yield sandbox


def python(program, word=""):
    """A command that runs a program with an argument."""
    return f"cat > /tmp/p.py <<'END'\n{program}\nEND\nexec python3 -I -S /tmp/p.py {word}"


CASES = {
    "fork bomb": (":(){ :|:& sleep 60; };:", "more than 20 processes"),
    "fork bomb that takes no notice of SIGTERM": ("trap '' TERM; f() { f & f & wait; }; f", "more than 20 processes"),
    "threads": (
        python("import threading, time\nfor _ in range(30): threading.Thread(target=time.sleep, args=(60,)).start()"),
        "more than 20 processes",
    ),
    "memory of one process": (
        python("import time\nkept = b'x' * (150 << 20)\ntime.sleep(60)"),
        "more than 96 MiB of memory",
    ),
    "memory of a process that may not be looked into": (
        python(
            "import ctypes, time\nctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\nkept = b'x' * (150 << 20)\ntime.sleep(60)"
        ),
        "more than 96 MiB of memory",
    ),
    "memory over many processes": (python(GREEDY), "more than 96 MiB of memory"),
    "shared memory that is in no table": (python(HIDDEN), "more than 96 MiB of memory"),
    "memory of a process without its first thread": (python(ORPHANED), "more than 96 MiB of memory"),
    "memory in sockets": (python(SOCKETS), "more than 96 MiB of memory"),
    "memory in connections": (python(TCP, "127.0.0.1"), "more than 96 MiB of memory"),
    "memory in connections by IPv6": (python(TCP, "::1"), "more than 96 MiB of memory"),
    "disk": ("dd if=/dev/zero of=/work/big bs=1M count=100 2>/dev/null", "more than 8 MiB of disk"),
    "disk of temporary files": (
        "head -c 5M /dev/zero > /tmp/a; head -c 5M /dev/zero > /dev/shm/b",
        "more than 8 MiB of disk",
    ),
    "disk that is tried again and again": (
        "while :; do head -c 1M /dev/zero >> /tmp/a; done 2>/dev/null",
        "more than 8 MiB of disk",
    ),
    "inodes": ("mkdir many; cd many; for i in $(seq 1000); do : > $i; done 2>/dev/null", "more than 300 inodes"),
    "output": ("yes", "more than 64 KiB of output"),
    "output of a daemon": ("(yes &); sleep 60", "more than 64 KiB of output"),
    "time": ("sleep 60", "more than 0.5 seconds"),
    "time, without notice of SIGTERM": (
        "trap '' TERM; sleep 60",
        "more than 1.2 seconds; it took no notice of SIGTERM, and was killed",
    ),
    "time, while stopped": ("kill -STOP $$", "more than 0.5 seconds"),
    "a daemon": (python(DAEMON), "1 process that outlived the call"),
    "a job in the background": ("sleep 60 & sleep 60 & echo started", "2 processes that outlived the call"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_limit_ends_what_crosses_it_and_nothing_else(bounded, case):
    command, says = CASES[case]
    witness = subprocess.Popen(["sleep", "100"])
    try:
        heard = bounded.call(
            "shell",
            {"command": command},
            timeout=(1.2 if "notice" in case else 0.5) if case.startswith("time") else None,
        )
        assert heard.end_reason == says and not heard.ok, heard
        assert len(heard.text.encode()) <= SMALL.output + 100 and heard.seconds < 20
        assert witness.poll() is None
    finally:
        witness.kill()
        witness.wait()
    after = bounded.call(
        "shell", {"command": "rm -rf /work/big /work/many /tmp/* /dev/shm/*; cat /proc/[0-9]*/comm; ls /work"}
    )
    assert after.ok and after.end_reason is None, after
    assert after.text.split() == ["python3", "bash", "kept.txt"], "only the server and the command itself are there"


def test_a_full_disk_does_not_end_the_command_that_makes_room(small):
    assert small.call("shell", {"command": "head -c 9M /dev/zero > big"}).end_reason == "more than 8 MiB of disk"
    heard = small.call("shell", {"command": "sleep 0.3; ls"})
    assert (heard.text, heard.end_reason) == ("big\nkept.txt\n", "more than 8 MiB of disk"), (
        "it runs to its end, and hears of it"
    )
    heard = small.call("shell", {"command": "sleep 0.3; rm big; sleep 0.3; ls"})
    assert heard.ok and heard.text == "kept.txt\n"
    heard = small.call(
        "shell", {"command": "head -c 9M /dev/zero > big; rm big; while :; do head -c 1M /dev/zero >> big; done"}
    )
    assert heard.end_reason == "more than 8 MiB of disk" and small.call("delete", {"path": "big"}).ok


def test_as_much_as_is_allowed_is_left_alone(small):
    """Just below each limit nothing is ended."""
    for command in (
        "for i in $(seq 15); do sleep 0.3 & done; wait",
        python("kept = bytearray(b'x') * (60 << 20)\nimport time\ntime.sleep(0.3)"),
        "head -c 6M /dev/zero > /tmp/a; rm /tmp/a",
        "mkdir m; for i in $(seq 200); do : > m/$i; done; rm -r m",
        "head -c 60000 /dev/zero | tr '\\0' 'x'",
        "sleep 0.3",
    ):
        heard = small.call("shell", {"command": command}, timeout=10)
        assert heard.ok and heard.end_reason is None, (command, heard)


def test_long_output_keeps_its_beginning_and_its_end(small):
    heard = small.call("shell", {"command": "seq 10000"})
    assert (
        heard.ok
        and heard.text.startswith("1\n2\n")
        and heard.text.endswith("9999\n10000\n")
        and "bytes left out" in heard.text
    )


def test_tools_meet_the_disk_s_limit_too(small):
    heard = small.call("write", {"path": "big", "text": "x" * (9 << 20)})
    assert (heard.ok, heard.end_reason) == (False, "more than 8 MiB of disk") and "No space left" in heard.text
    assert (
        small.call("delete", {"path": "big"}).ok
        and small.call("write", {"path": "big", "text": "x"}).ok
        and small.call("delete", {"path": "big"}).ok
    )


def test_a_long_file_comes_back_cut(small):
    assert small.call("write", {"path": "long", "text": "0123456789\n" * 1000}).ok
    heard = small.call("read", {"path": "long"})
    assert heard.ok and len(heard.text.encode()) <= SMALL.output + 100
    assert small.call("delete", {"path": "long"}).ok


def test_limits_of_the_sandbox_are_those_of_its_fork(small):
    with small.fork(small.snapshot()) as fork:
        assert fork.call("shell", {"command": CASES["disk"][0]}).end_reason == CASES["disk"][1]
        assert fork.call("read", {"path": "kept.txt"}).text == "kept\n"


def test_a_timeout_is_never_longer_than_the_limit(start):
    assert (
        start(limits=Limits(seconds=0.3)).call("shell", {"command": "sleep 60"}, timeout=50).end_reason
        == "more than 0.3 seconds"
    )


def test_memory_counts_shared_pages_once_and_children():
    """16 MiB, which a process shares with two children, are 16 MiB, and not 48."""
    program = """
import os, sys, time
kept = bytearray(os.urandom(1 << 20)) * 16
for _ in range(2):
    if os.fork() == 0:
        time.sleep(60)
print(sum(kept[::4096]) and "up", flush=True)
time.sleep(60)
"""
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", program], stdout=subprocess.PIPE, text=True)
    children = []
    try:
        assert child.stdout.readline() == "up\n"
        children = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
        assert len(children) == 2
        found = memory.processes(child.pid)
        assert 16 << 20 <= found < 40 << 20
        assert memory.processes(int(children[0])) < 16 << 20, "a third of what is shared"
    finally:
        for pid in map(int, children):
            os.kill(pid, 9)
        child.kill()
        child.wait()
    assert memory.processes(child.pid) == 0


def test_lower_limits_of_whoever_starts_it_are_kept(root, shared_store, open_folder):
    """Nobody may raise a hard limit, and a sandbox starts all the same."""
    (open_folder / "t").mkdir()
    name = shared_store.add_folder(open_folder / "t")
    program = f"""
import resource, sys
sys.path.insert(0, {str(Path(memory.__file__).parents[2])!r})
from pathlib import Path
from environments.sandbox.bubblewrap import Bubblewrap
from environments.sandbox.store import Store
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
resource.setrlimit(resource.RLIMIT_SIGPENDING, (100, 100))
with Bubblewrap(Path({str(root)!r}), Store(Path({str(shared_store.folder)!r})), {name!r}) as sandbox:
    print(sandbox.call("shell", {{"command": "ulimit -Hn; ulimit -Hi"}}).text, end="")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "200\n100\n", done.stderr
