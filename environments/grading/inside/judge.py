"""The judge: starts the process that plays the tests, hears it on a private pipe, and says the verdicts under seal.

It may be started long before there is anything to grade, since to import pytest takes longer than most tests. It says a line once the other process
has done that, and then waits for its plan on standard input: the key, the tests, and files of the tree, which it lays. So nothing of a tree is there
while anything is imported, and the key and the tests are never on the disk. No process of the same user can look into the judge, because it lets
nobody read its memory, and it imports nothing of the tree. Of each test the first line counts.

    python3 -I -B judge.py FOLDER        FOLDER holds play.py

In a sandbox of a nursery (environments/sandbox/nursery.py) both are forks of a process that has imported them and pytest.
"""

import base64
import ctypes
import hashlib
import hmac
import json
import os
import select
import signal
import subprocess
import sys
import time

PR_SET_DUMPABLE = 4
READY, NO_TREE = b"ready\n", 3
"""What is said when a plan may come; and how the judge ends where the tree finds no room."""
MOST = 4 << 20
"""Bytes that the other process may say."""
ENVIRONMENT = {"HOME": "/tmp", "LANG": "C.UTF-8", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""Of the other process."""
EXAM = "/work/exam"
"""The folder in a sandbox of a nursery. Nothing lies in it but the folder of the tests."""


def seal(key: bytes, test: str, outcome: str) -> bytes:
    """As in environments/grading/verdicts.py."""
    body = json.dumps([test, outcome], separators=(",", ":"), ensure_ascii=True)
    return f"{hmac.new(key, body.encode(), hashlib.sha256).hexdigest()} {body}\n".encode()


def heard(reader: int, child: "subprocess.Popen | Forked", until: float) -> bytes:
    """What the child said until it ended, or until its time was over. Others may hold the pipe open, so its end is not waited for."""
    said = b""
    while len(said) < MOST and time.monotonic() < until:
        ready, _, _ = select.select([reader], [], [], 0.02)
        if ready:
            block = os.read(reader, 1 << 16)
            if not block:
                break
            said += block
        elif child.poll() is not None:
            break
    return said


def verdicts(said: bytes) -> dict[str, str]:
    """The first outcome of each test. What is no line of ours counts as a test that nobody asked for."""
    found: dict[str, str] = {}
    for line in said.decode(errors="replace").splitlines():
        outcome, _, test = line.partition(" ")
        if outcome in ("passed", "failed", "skipped") and test:
            found.setdefault(test, outcome)
        else:
            found.setdefault("a line that is none", "failed")
    return found


def lay(files: dict[str, str], tree: str) -> None:
    """Lays files of a tree, which are new."""
    for name, data in files.items():
        os.makedirs(os.path.dirname(f"{tree}/{name}"), exist_ok=True)
        with open(f"{tree}/{name}", "xb") as file:
            file.write(base64.b64decode(data))


def started(folder: str, writer: int) -> subprocess.Popen:
    """The process that plays the tests. It knows nothing yet."""
    return subprocess.Popen(
        [sys.executable, "-I", "-B", f"{folder}/play.py", str(writer)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=ENVIRONMENT,
        pass_fds=[writer],
        start_new_session=True,
    )


class Forked:
    """The same as a fork of this one, in which all is imported. It has the pipe and what it reads from, and no other handle."""

    def __init__(self, folder: str, writer: int) -> None:
        reader, told = os.pipe()
        self.stdin = os.fdopen(told, "wb")
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _become_the_player(reader, writer)
            finally:
                os._exit(1)
        os.close(reader)

    def poll(self) -> int | None:
        """How it has ended, if it has."""
        found, status = os.waitpid(self.pid, os.WNOHANG)
        return status if found else None


def _become_the_player(reader: int, writer: int) -> None:
    """As `started` does it: a session of its own, little in its environment, and modules under no other names than there."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for number, handle in enumerate((reader, nothing, nothing)):
        os.dup2(handle, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != writer:
            try:
                os.close(int(name))
            except OSError:
                pass  # that of the folder itself
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    os.environ.clear()
    os.environ.update(ENVIRONMENT)
    del sys.modules["judge"]
    sys.modules["__main__"] = sys.modules.pop("play")
    vars(sys.modules["__main__"])["__name__"] = "__main__"
    sys.modules["__main__"].main(writer)


def nursed() -> None:
    """In a sandbox of a nursery, which has imported this module and play.py."""
    os.makedirs(f"{EXAM}/tests")
    main(EXAM, Forked)


def main(folder: str, begun=started) -> None:
    """`begun`: gives the process that plays the tests."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    reader, writer = os.pipe()
    child = begun(folder, writer)
    os.close(writer)
    if os.read(reader, len(READY)) != READY:
        sys.exit("the tests cannot be played: pytest is not there")
    os.write(1, READY)
    if reader in select.select([0, reader], [], [])[0]:
        sys.exit(1)  # who shall play is gone, or has said something before it was asked
    plan = json.load(sys.stdin.buffer)
    key = bytes.fromhex(plan.pop("key"))
    try:
        lay(plan.pop("files"), plan["tree"])
    except OSError as error:
        sys.stderr.write(f"the tree cannot be laid: {error}\n")
        sys.exit(NO_TREE)
    until = time.monotonic() + plan["seconds"]
    assert child.stdin is not None
    try:
        child.stdin.write(json.dumps(plan).encode())
        child.stdin.close()
    except BrokenPipeError:
        pass
    said = heard(reader, child, until)
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    out = b"".join(seal(key, test, outcome) for test, outcome in verdicts(said).items())
    sys.stdout.buffer.write(out)
    sys.stdout.flush()


if __name__ == "__main__":
    main(os.path.abspath(sys.argv[1]))
