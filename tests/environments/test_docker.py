"""Docker's sandboxes: what gets out of them and what does not, their limits, and that snapshots are those of
bubblewrap's.

They run wherever a Docker engine of this machine answers. `make test-docker` starts one for them.
"""

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from environments.sandbox import memory, served
from environments.sandbox.docker import host_config
from environments.sandbox.engine import Framed, connected, image
from environments.sandbox.interface import LIMITS
from environments.sandbox.open import open_sandbox
from kit.settings import RunError
from tests.environments.planted import planted
from tests.environments.siege import CODES, MISTAKES, REPOSITORY, besieged, prepared
from tests.environments.test_limits import CASES, SMALL, python
from tests.environments.test_snapshots import CHANGES, FILES

SUCCEED = {
    "files: devices": "Docker makes /dev/tty; the null device lies over it, and there are no terminals",
    "files: starting set-user programs": "Docker's root is mounted without nosuid; no file in it has a set-user bit, "
    "and no process gains by one",
    "privilege: namespaces left": "the number is the machine's, which Docker cannot lower; the filter refuses every "
    "call that makes a namespace",
}
"""Attempts that succeed in Docker's sandboxes and not in bubblewrap's, and why that is borne."""


@pytest.fixture(scope="module")
def begin(engine, root, shared_store, tmp_path_factory):
    """begin(files, limits=…) gives a sandbox of Docker's; all of them are closed after the tests of this file."""
    begun = []

    def beginner(files=None, kind="docker", **how):
        folder = tmp_path_factory.mktemp("tree")
        for path, text in (files or {}).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        begun.append(open_sandbox(folder, kind, root=root, store=shared_store, **how))
        return begun[-1]

    yield beginner
    for sandbox in begun:
        sandbox.close()


@pytest.fixture(scope="module")
def siege(engine, root, shared_store):
    with planted(REPOSITORY, shared_store.folder) as at:
        yield besieged("this user", root, at, prepared(at), "docker")


@pytest.mark.parametrize("name", CODES)
def test_an_attempt_gets_nothing_or_is_known(siege, name):
    found = siege[name]
    assert not found.get("error", "").startswith(MISTAKES), found
    assert bool(found.get("got")) == (name in SUCCEED), found


def test_foreign_calls_end_the_process(siege):
    if os.uname().machine == "x86_64":
        assert siege["privilege: a call by the x32 numbers"]["error"] == "SIGSYS"
        assert siege["privilege: a 32-bit call"]["error"] in ("SIGSYS", "SIGSEGV")


@pytest.fixture(scope="module")
def small(begin):
    return begin({"kept.txt": "kept\n"}, limits=SMALL)


LIMITED = (
    "fork bomb",
    "threads",
    "memory of one process",
    "memory over many processes",
    "shared memory that is in no table",
    "disk",
    "disk of temporary files",
    "disk that is tried again and again",
    "inodes",
    "output",
    "time, while stopped",
    "a daemon",
    "a job in the background",
)
"""Those of bubblewrap's cases that Docker, or the three file systems, could treat otherwise."""


@pytest.mark.parametrize("case", LIMITED)
def test_a_limit_ends_what_crosses_it_and_nothing_else(small, case):
    if "memory" in case and os.geteuid() != 0:
        pytest.skip("only root may look into a container's memory; for others the control group's limit holds")
    command, says = CASES[case]
    heard = small.call("shell", {"command": command}, timeout=0.5 if case.startswith("time") else None)
    assert heard.end_reason == says and not heard.ok, heard
    assert len(heard.text.encode()) <= SMALL.output + 100
    after = small.call(
        "shell",
        {"command": "rm -rf /work/big /work/many /tmp/* /dev/shm/*; cat /proc/[0-9]*/comm; sleep 0.1; ls /work"},
    )
    assert after.ok and after.end_reason is None and after.text.split() == ["python3", "bash", "kept.txt"], after


def test_the_control_group_ends_what_this_process_does_not_see(begin, monkeypatch):
    """What a user has who may not look into containers: memory and files together are bounded, and it is said what
    ended a command."""
    monkeypatch.setattr(memory, "measure_memory", lambda first: 0)
    sandbox = begin(limits=SMALL)
    heard = sandbox.call("shell", {"command": CASES["memory of one process"][0]})
    assert heard.end_reason == "more than 96 MiB of memory" and not heard.ok
    assert sandbox.call("shell", {"command": "true"}).ok


KILLED = """
import os, time
if os.fork() {whose} 0:
    kept = bytearray(os.urandom(4096)) * (300 << 8)
time.sleep(60)
"""
"""Of two processes one crosses the control group's limit: the command's own, or its child."""


@pytest.mark.parametrize("whose", ["!=", "=="])
def test_what_is_left_of_a_command_hides_not_that_memory_ended_it(begin, monkeypatch, whose):
    monkeypatch.setattr(memory, "measure_memory", lambda first: 0)
    sandbox = begin(limits=SMALL)
    heard = sandbox.call("shell", {"command": python(KILLED.format(whose=whose))})
    assert heard.end_reason == "more than 96 MiB of memory" and not heard.ok and heard.seconds < 15
    assert sandbox.call("shell", {"command": "cat /proc/[0-9]*/comm; true"}).text.split() == ["python3", "bash"]


WRITABLE = """
import os
for line in sorted(open("/proc/self/mountinfo"), key=lambda line: line.split()[4]):
    try:
        os.close(os.open(os.path.join(line.split()[4], "made"), os.O_WRONLY | os.O_CREAT, 0o600))
        print(line.split()[4])
        os.unlink(os.path.join(line.split()[4], "made"))
    except OSError:
        pass
"""
"""Names the mounted folders in which a file can be made."""


def test_it_is_closed_off_as_asked(small, engine):
    """What the kernel says of the first process: it has no privilege, and another user than root."""
    lines = Path(f"/proc/{small.first}/status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    assert (
        "0" not in status["Uid"].split() + status["Gid"].split()
        and status["NoNewPrivs"] == "1"
        and status["Seccomp"] == "2"
    )
    assert [status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")] == ["0" * 16] * 5
    heard = small.call("shell", {"command": "touch /usr/x /x; id -un; cat /proc/net/dev | tail -n +3 | cut -d: -f1"})
    assert heard.text.count("Read-only file system") == 2 and heard.text.split()[-2:] == ["agent", "lo"]
    assert small.call("shell", {"command": python(WRITABLE)}).text.split() == ["/dev/shm", "/tmp", "/work"]


def test_snapshots_and_forks_are_those_of_bubblewrap(begin, shared_store):
    one, other = begin(FILES), begin(FILES, "bubblewrap")
    assert one.snapshot() == other.snapshot()
    for sandbox in (one, other):
        assert sandbox.call("shell", {"command": CHANGES}).ok
    name = one.snapshot()
    assert name == other.snapshot()
    with one.fork(name) as fork, other.fork(name) as back:
        assert fork.snapshot() == back.snapshot() == name
        assert fork.call("shell", {"command": "rm -rf * && echo mine > a.txt && echo x > /tmp/y"}).ok
        assert fork.snapshot() != name == one.snapshot() and one.call("read", {"path": "a.txt"}).text == "one\ntwo\n"
        fork.call("shell", {"command": "mkfifo pipe"})
        with pytest.raises(RunError, match="pipe is a FIFO"):
            fork.snapshot()


def test_a_tree_may_be_larger_than_the_disk_s_limit(begin):
    sandbox = begin({f"{i}/a": "x" * (1 << 20) for i in range(10)}, limits=SMALL)
    assert sandbox.call("write", {"path": "more", "text": "x" * (7 << 20)}).ok
    heard = sandbox.call("write", {"path": "most", "text": "x" * (2 << 20)})
    assert not heard.ok and heard.end_reason == "more than 8 MiB of disk"


def gone(first, seconds=20.0):
    """Whether this process ends by then."""
    until, path = time.monotonic() + seconds, Path(f"/proc/{first}")
    while path.exists() and time.monotonic() < until:
        time.sleep(0.01)
    return not path.exists()


def left():
    """The containers of ours, also those that are being removed."""
    client = connected()
    try:
        return {found["Id"] for found in client.containers(all=True, filters={"label": "etude"})}
    finally:
        client.close()


def test_closing_ends_all_and_leaves_no_container(begin, root, shared_store):
    gc.collect()
    before, handles = left(), len(os.listdir("/proc/self/fd"))
    sandbox, heard = begin(), []
    thread = threading.Thread(target=lambda: heard.append(sandbox.call("shell", {"command": "sleep 60"})))
    thread.start()
    time.sleep(0.3)
    sandbox.close()
    sandbox.close()
    thread.join()
    assert heard[0].end_reason == "the sandbox is closed" and gone(sandbox.first, 0) and left() <= before
    assert len(os.listdir("/proc/self/fd")) == handles
    forgotten = open_sandbox(REPOSITORY / "kit", "docker", root=root, store=shared_store)
    first = forgotten.first
    del forgotten
    gc.collect()
    assert gone(first) and left() <= before


def test_a_server_that_is_killed_ends_the_episode_in_one_line(begin):
    sandbox, client = begin(), connected()
    client.kill(sandbox.container)
    client.close()
    assert sandbox.call("list", {}).end_reason == "the sandbox's server has ended; the episode is over"
    assert sandbox.call("list", {}).end_reason == "the sandbox's server has ended; the episode is over"


def test_a_sandbox_ends_with_the_process_that_started_it(engine, root, open_folder):
    (open_folder / "t").mkdir()
    program = f"""
import sys, threading
sys.path.insert(0, {str(Path(served.__file__).parents[2])!r})
from pathlib import Path
from environments.sandbox.open import open_sandbox
from environments.sandbox.store import Store
here = Path({str(open_folder)!r})
sandbox = open_sandbox(here / "t", "docker", root=Path({str(root)!r}), store=Store(here / "store"))
threading.Thread(target=sandbox.call, args=("shell", {{"command": "sleep 100"}})).start()
print(sandbox.first, flush=True)
threading.Event().wait()
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    first = int(child.stdout.readline())
    child.kill()
    child.communicate()
    assert gone(first)


def test_an_image_is_imported_once(engine, root):
    assert image(connected(), root) == image(connected(), root)


def test_where_no_engine_answers_it_is_said_what_to_do(tmp_path, monkeypatch):
    pytest.importorskip("docker", reason="the SDK is not installed")
    for address, says in (
        (f"unix://{tmp_path}/none", "apt-get install docker.io"),
        ("tcp://127.0.0.1:1", "at a Unix socket"),
    ):
        monkeypatch.setenv("DOCKER_HOST", address)
        with pytest.raises(RunError, match=says) as error:
            connected()
        assert "\n" not in str(error.value)


def test_without_the_sdk_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "docker", None)
    with pytest.raises(RunError, match="pip install docker"):
        connected()


def test_bounds_hold_the_tree_and_what_may_be_written():
    host = host_config(LIMITS, 5000, 7)
    assert (
        "size=268440456,nr_inodes=20010" in host["Tmpfs"]["/work"]
        and "size=268435456,nr_inodes=20000" in host["Tmpfs"]["/tmp"]
    )
    assert host["Memory"] == host["MemorySwap"] == (512 + 256 + 32) * 2**20 + 5000 and host["PidsLimit"] == 81


def test_frames_are_taken_apart_wherever_they_are_cut():
    reader, writer = os.pipe()
    parts = ((1, b"one\n"), (2, b"oops"), (1, b""), (1, b"two\n"))
    said = b"".join(bytes([stream, 0, 0, 0]) + len(text).to_bytes(4, "big") + text for stream, text in parts)
    for size in (1, 3, 7, 8, 9, 100):
        wire = Framed(reader)
        for at in range(0, len(said), size):
            wire.take(said[at : at + size])
        assert (bytes(wire.buffer), bytes(wire.errors)) == (b"one\ntwo\n", b"oops")
    os.close(reader)
    os.close(writer)


def test_a_sandbox_that_cannot_start_says_why_and_leaves_nothing(engine, root, shared_store, open_folder, monkeypatch):
    before = left()
    (open_folder / "t").mkdir()
    (open_folder / "root").mkdir()
    with pytest.raises(RunError, match="Docker did not start the sandbox: .*python3") as error:
        open_sandbox(open_folder / "t", "docker", root=open_folder / "root", store=shared_store)
    assert "\n" not in str(error.value)
    client = connected()
    client.remove_image(image(client, open_folder / "root"))
    client.close()
    monkeypatch.setattr("environments.sandbox.seccomp.program", lambda: b"\0" * 8)
    with pytest.raises(RunError, match="the sandbox did not start; it says: OSError: .*seccomp filter"):
        open_sandbox(open_folder / "t", "docker", root=root, store=shared_store)
    assert left() <= before
