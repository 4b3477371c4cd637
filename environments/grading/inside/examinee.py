"""The examinee: the process that runs the package, and with it the agent's code. The tests run in another one.

It begins before anything of a task is known, and is told the folders of the package and nothing else: no test, no
expectation and no name of a test comes here, and pytest is not loaded. What it answers is whatever the agent's code
makes it answer; see remote.py for what the other side does with that.

    python3 -I -B examinee.py READER WRITER
"""

import importlib.util
import io
import os
import signal
import sys
import warnings

if "remote" not in sys.modules:  # a nursery has imported it
    spec = importlib.util.spec_from_file_location(
        "remote", os.path.join(os.path.dirname(os.path.abspath(__file__)), "remote.py")
    )
    assert spec is not None and spec.loader is not None
    sys.modules["remote"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["remote"])

__all__ = ["main"]

JUDGE_MODULES = ("_pytest", "pytest", "pluggy", "iniconfig", "judge", "play", "packaging", "pygments")
"""Modules that a fork of a nursery has and a process of its own would not have."""


KEPT_MODULES: list = []


class Late(BaseException):
    """A request takes too long."""


def raise_late(*_: object) -> None:
    raise Late


def main(reader: int, writer: int) -> None:
    """Serves requests until nobody asks any more."""
    # They are kept, since to take them down would copy the memory that this fork has in common with others.
    KEPT_MODULES.extend(sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] in JUDGE_MODULES)
    remote = sys.modules["remote"]
    null_handle = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_handle, 0)
    os.close(null_handle)
    sys.argv[:], sys.orig_argv[:] = ["python3"], ["python3"]
    link = remote.Link(reader, writer, strict=False)
    kind, *settings = link.receive()
    if kind != "begin":
        return
    folders, seconds, cpu = settings
    remote.stay_on(cpu)
    os.chdir(folders[0])
    sys.path += folders
    recorded_warnings: list = []
    streams = {name: io.StringIO() for name in ("stdout", "stderr")}
    sys.stdout, sys.stderr = streams["stdout"], streams["stderr"]
    warnings.simplefilter("always")
    warnings.showwarning = lambda message, category, *_, **__: recorded_warnings.append(
        warnings.WarningMessage(message, category, "", 0)
    )
    link.after = lambda: remote.notices(recorded_warnings, streams)
    signal.signal(signal.SIGPROF, raise_late)
    while True:
        message = link.receive()
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            link.serve(message)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
