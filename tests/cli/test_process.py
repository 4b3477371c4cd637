"""Work in a process of its own: what comes back, what it reports, and how it may end."""

import os
import signal

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
