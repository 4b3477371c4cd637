"""All attempts of attempts.py in one sandbox, which a process of its own opens: what each got."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from environments.sandbox.root import PYTHON
from tests.environments import attempts

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
NAMES = [(family, name) for family, found in attempts.FAMILIES.items() for name in found]
CODES = {f"{family}: {name}": attempts.FAMILIES[family][name].code for family, name in NAMES}
NOBODY = 65534
MISTAKES = (
    "NameError",
    "SyntaxError",
    "TypeError",
    "KeyError",
    "AttributeError",
    "ImportError",
    "ModuleNotFoundError",
    "UnboundLocalError",
    "late",
)
"""Errors of an attempt that was not made at all."""


def said(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def prepared(at):
    """The folder of what was planted, with what a siege needs."""
    folder = Path(at["folder"])
    shutil.copy(HERE / "runner.py", folder)
    for room in ("environments", "kit"):
        shutil.copytree(REPOSITORY / room, folder / "code" / room, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tree").mkdir()
    (folder / "tree" / "file").write_text("x")
    return folder


def besieged(user, root, at, folder, kind="bubblewrap"):
    """All attempts in one sandbox that this user opens. What they did to the machine counts, whatever they say."""
    store = folder / f"store of {user}, {kind}"
    store.mkdir()
    request = folder / "request.json"
    told = {
        "root": str(root),
        "store": str(store),
        "tree": str(folder / "tree"),
        "code": str(folder / "code"),
        "runner": str(folder / "runner.py"),
    }
    request.write_text(json.dumps({**told, "kind": kind, "at": at, "codes": CODES}))
    with open(at["marker"]) as inherited:
        os.set_inheritable(inherited.fileno(), True)
        heard = said(played(user, root, folder, "besiege.py", request, store, {"PLANTED_SECRET": at["planted"]}))
    assert heard["lives"] and heard["ended"] is None, heard
    found = heard["found"]
    for name, trace in (
        ("files: writing", "writable/written"),
        ("files: renaming", "writable/renamed"),
        ("processes: signalling a process", "signalled"),
    ):
        if (folder / trace).exists():
            found[name] = {"got": "its trace is on the machine"}
    return found


def played(user, root, folder, name, request, store, environment):
    """A script of this folder, which this user runs; it is told the path of a request. `store`: a folder that shall be
    the user's."""
    program, script, how = [sys.executable], HERE / name, {}
    if user == "nobody":
        os.chown(store, NOBODY, NOBODY)
        script = shutil.copy(HERE / name, folder)
        loader = next(
            (root / "usr" / "lib").glob("ld-*")
        )  # another user may not be able to enter where this Python lies
        program = [loader, "--library-path", root / "usr" / "lib", root / "usr" / "bin" / PYTHON]
        how = {"user": NOBODY, "group": NOBODY, "extra_groups": [], "cwd": "/"}
    kept = {name: os.environ[name] for name in ("PATH", "DOCKER_HOST") if name in os.environ}
    return subprocess.run(
        [*program, script, request], capture_output=True, text=True, env={**kept, **environment}, close_fds=False, **how
    )
