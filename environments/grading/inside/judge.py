"""The judge: starts the process that plays the tests, hears it on a private pipe, and says the verdicts under seal.

It imports nothing of the tree. Its plan, with the key and the tests, is gone from the disk before the other process begins, and no process of the
same user can look into it, because it lets nobody read its memory. Of each test the first line counts.

    python3 -I -B judge.py FOLDER        FOLDER holds plan.json and play.py
"""

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
MOST = 4 << 20
"""Bytes that the other process may say."""


def seal(key: bytes, test: str, outcome: str) -> bytes:
    """As in environments/grading/verdicts.py."""
    body = json.dumps([test, outcome], separators=(",", ":"), ensure_ascii=True)
    return f"{hmac.new(key, body.encode(), hashlib.sha256).hexdigest()} {body}\n".encode()


def heard(reader: int, child: subprocess.Popen, until: float) -> bytes:
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


def main(folder: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    with open(f"{folder}/plan.json", "rb") as file:
        plan = json.load(file)
    os.unlink(f"{folder}/plan.json")
    key = bytes.fromhex(plan.pop("key"))
    reader, writer = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-I", "-B", f"{folder}/play.py", str(writer)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={"HOME": "/tmp", "LANG": "C.UTF-8", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        pass_fds=[writer],
        start_new_session=True,
    )
    os.close(writer)
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
