"""Attempts to get out of a sandbox: none succeeds, as whoever runs the tests and, if that is root, as another user too;
and each succeeds elsewhere.

The attempts stand in attempts.py, their targets in planted.py. All of a user's attempts share one sandbox. Another
sandbox is a fork of a nursery, in which they are made where graded code runs.
"""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environments import attempts
from tests.environments.planted import planted
from tests.environments.siege import CODES, MISTAKES, REPOSITORY, besieged, prepared, said

USERS = ["this user", "nobody"] if os.geteuid() == 0 else ["this user"]
WHO = [*USERS, *(f"{user}, in a nursery" for user in USERS)]


@pytest.fixture(scope="module")
def siege(root, shared_store):
    """What every attempt got: by user in the sandbox, outside, and in a weaker sandbox."""
    with planted(REPOSITORY, shared_store.folder) as at:
        folder = prepared(at)
        shared_store.tree(shared_store.add_folder(folder / "tree"))
        found = {user: besieged(user, root, at, folder) for user in USERS}
        found |= {f"{user}, in a nursery": besieged(user, root, at, folder, "nursery") for user in USERS}
        (folder / "asked.json").write_text(json.dumps({"at": at, "codes": codes(attempts.OUTSIDE, attempts.ROOT)}))
        with open(at["marker"]) as inherited:
            os.set_inheritable(inherited.fileno(), True)
            environment = {**os.environ, "PLANTED_SECRET": at["planted"]}
            how = {"capture_output": True, "text": True, "env": environment, "close_fds": False}
            plain = subprocess.run([sys.executable, "-I", folder / "runner.py", folder / "asked.json"], **how)
            (folder / "asked.json").write_text(json.dumps({"at": at, "codes": codes(attempts.WEAK)}))
            weak = subprocess.run([*weaker(folder), BASE, "-I", folder / "runner.py", folder / "asked.json"], **how)
        found[attempts.OUTSIDE] = found[attempts.ROOT] = said(plain)
        found[attempts.WEAK] = said(weak)
        yield found


BASE = str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())


def codes(*controls):
    return {name: code for name, code in CODES.items() if of(name).control in controls}


def of(name):
    family, _, rest = name.partition(": ")
    return attempts.FAMILIES[family][rest]


def weaker(folder):
    """A sandbox that shows the machine's files, gives all capabilities within its namespaces, and filters nothing."""
    words = [
        "bwrap",
        "--unshare-user",
        "--uid",
        "0",
        "--gid",
        "0",
        "--cap-add",
        "ALL",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-ipc",
    ]
    words += ["--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    # A checkout in /tmp has its environment there, too.
    return [*words, "--ro-bind", sys.base_prefix, sys.base_prefix, "--bind", folder, folder]


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("name", CODES)
def test_an_attempt_gets_nothing(siege, who, name):
    found = siege[who][name]
    assert not found.get("got"), found
    assert not found.get("error", "").startswith(MISTAKES), found


@pytest.mark.parametrize("name", [name for name in CODES if of(name).control != attempts.OWN])
def test_the_same_attempt_succeeds_elsewhere(siege, name):
    attempt = of(name)
    found = siege[attempt.control][name]
    assert found.get("got") or attempt.perhaps or (attempt.control == attempts.ROOT and os.geteuid() != 0), found


def test_most_controls_show_something(siege):
    """Where a kernel lacks what is attempted, a control shows nothing; that must stay the exception."""
    shown = [name for name in CODES if of(name).control != attempts.OWN and siege[of(name).control][name].get("got")]
    perhaps = [name for name in CODES if of(name).perhaps]
    assert len(shown) >= 60 and len(perhaps) < len(CODES) / 3
    assert all(
        attempt.why
        for found in attempts.FAMILIES.values()
        for attempt in found.values()
        if attempt.control == attempts.OWN
    )


def test_foreign_calls_end_the_process(siege):
    """Not with an error that a program could go on from."""
    if platform.machine() == "x86_64":
        for who in WHO:
            assert siege[who]["privilege: a call by the x32 numbers"]["error"] == "SIGSYS"
            assert siege[who]["privilege: a 32-bit call"]["error"] in ("SIGSYS", "SIGSEGV")
