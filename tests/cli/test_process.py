"""Work in a process of its own: what comes back, what it reports, and how it may end."""

import contextlib
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from etude.process import in_new_process


def double(x, progress):
    progress(1)
    progress(2)
    return {"doubled": 2 * x, "pid": os.getpid()}


def stumble(progress):
    raise ValueError("no weights there")


def die(progress):
    os.kill(os.getpid(), signal.SIGKILL)


def live_long(file, progress):
    file.write_text(str(os.getpid()))
    time.sleep(60)


def ask_for_ever(file):
    in_new_process(live_long, file, progress=print)


def test_work_ends_with_the_process_that_asked_for_it(tmp_path):
    """SIGKILL of that one, which leaves it no time to say so."""
    asking = multiprocessing.get_context("spawn").Process(target=ask_for_ever, args=(tmp_path / "pid",))
    asking.start()
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert asking.is_alive() and time.monotonic() < deadline
        time.sleep(0.02)
    pid = int((tmp_path / "pid").read_text())
    asking.kill()
    asking.join()
    deadline = time.monotonic() + 10
    try:
        while Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
            assert time.monotonic() < deadline, "it goes on alone"
            time.sleep(0.02)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_returns_and_reports_from_another_process():
    seen = []
    found = in_new_process(double, 21, progress=seen.append)
    assert found["doubled"] == 42 and found["pid"] != os.getpid() and seen == [1, 2]


@pytest.mark.parametrize(
    ("function", "says"),
    [(stumble, "stumble: ValueError: no weights there"), (die, "die died with exit code -9")],
)
def test_a_failure_there_is_an_error_here(function, says):
    with pytest.raises(RuntimeError, match=says):
        in_new_process(function, progress=lambda n: None)
