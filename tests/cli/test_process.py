"""Work in a process of its own: what comes back, what it reports, and how it may end."""

import contextlib
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from etude.process import in_fresh_process


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
    in_fresh_process(live_long, file, progress=print, fresh=0)


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
    found = in_fresh_process(double, 21, progress=seen.append, fresh=0)
    assert found["doubled"] == 42 and found["pid"] != os.getpid() and seen == [1, 2]


@pytest.mark.parametrize(
    ("function", "says"),
    [(stumble, "stumble: ValueError: no weights there"), (die, "die died with exit code -9")],
)
def test_a_failure_there_is_an_error_here(function, says):
    with pytest.raises(RuntimeError, match=says):
        in_fresh_process(function, progress=lambda n: None, fresh=0)


def test_a_process_that_has_done_little_is_fresh_enough():
    """And one that has worked for longer than `fresh` seconds is not."""
    seen, used = [], time.process_time()
    found = in_fresh_process(double, 21, progress=seen.append, fresh=used + 60)
    assert found == {"doubled": 42, "pid": os.getpid()} and seen == [1, 2]
    assert in_fresh_process(double, 21, progress=seen.append, fresh=used / 2)["pid"] != os.getpid()
