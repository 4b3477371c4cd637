"""Signals of a scheduler, and of torchrun. What a whole run does is tested in test_full.py."""

import ctypes
import multiprocessing
import os
import signal
import time

import pytest

from kit.settings import Interrupted, Preempted
from scaled.runtime import preemption
from tests import forks

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_makes_a_request_while_ranks_run_and_ends_the_command_before(tmp_path, number):
    before = [signal.getsignal(number) for number in SIGNALS]
    with preemption.leaving():
        with pytest.raises(Interrupted, match=f"{number.name} before the ranks had started"):
            os.kill(os.getpid(), number)
            time.sleep(10)
        with preemption.listening(tmp_path):
            os.kill(os.getpid(), number)
            while not (tmp_path / "requested").exists():
                time.sleep(0.01)
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_request_saves_first(tmp_path, monkeypatch):
    monkeypatch.setenv(preemption.FOLDER, str(tmp_path))
    events = []
    preemption.check(lambda: events.append("saved"))
    (tmp_path / "requested").touch()
    with pytest.raises(Preempted):
        preemption.check(lambda: events.append("saved"))
    assert events == ["saved"] and not preemption.has_left(tmp_path)
    preemption.leave()
    assert preemption.has_left(tmp_path) and Preempted.code == preemption.CODE == 75 != Interrupted.code


def listen(folder: str, child_code: str) -> None:
    """A rank whose main thread waits where no handler runs."""
    os.environ[preemption.FOLDER] = folder
    preemption.listen()
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join()
    with open(child_code, "w") as file:
        file.write(str(child.exitcode))
    mutex, library = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)  # for ever, and no signal ends it


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_rank_ends_at_once_for_torchrun_and_stays_for_a_scheduler(tmp_path, is_asked):
    """SIGTERM alone is torchrun's, after another rank has failed. After SIGUSR1 it belongs to a request of the
    scheduler: the rank will save. A child of the rank that is terminated ends in any case, and the rank does not take
    the signal for its own."""
    folder, child_code = tmp_path / "requests", tmp_path / "child"
    folder.mkdir()
    process = forks.begin(listen, str(folder), str(child_code))
    assert process.pid is not None
    while not child_code.exists() or not child_code.read_text():
        assert process.is_alive()
        time.sleep(0.02)
    assert child_code.read_text() == str(-signal.SIGTERM)
    if is_asked:
        os.kill(process.pid, signal.SIGUSR1)
        while not (folder / "requested").exists():
            time.sleep(0.02)
    os.kill(process.pid, signal.SIGTERM)
    process.join(preemption.PATIENCE + 1 if is_asked else 30)
    assert process.exitcode == (None if is_asked else -signal.SIGKILL)
    process.kill()
    process.join()
