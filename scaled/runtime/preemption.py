"""Leaving a machine that a scheduler takes away. It sends SIGTERM or SIGUSR1 some seconds or minutes before, to the
command `etude run`, to torchrun's agent, or to every process of the run; each of them notes the request in a folder
of this machine. At the end of a step all ranks ask each other whether one of their machines has a request; if so,
they save and leave, and the command exits with the code `CODE`.

    leaving()            in the command, before ranks start: a signal ends it
    listening(folder)    in the command and in the agent, while ranks run: a signal makes a request
    listen()             in a rank: the same
    check(save)          in a rank, between two steps: saves and raises Preempted if any machine has a request

torchrun, too, sends SIGTERM to ranks, to stop them after another one has failed. They then end at once, since nobody
else may be there to save with: such a signal comes without a request."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from kit.settings import Preempted
from scaled.runtime.mesh import current

__all__ = ["CODE", "check", "has_left", "leave", "leaving", "listen", "listening"]

CODE = Preempted.code
"""Exit code of a run that was asked to leave, and has saved."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
FOLDER = "ETUDE_PREEMPTION"
"""Variable of the environment: the folder of this machine's requests."""
PATIENCE = 1.0
"""Seconds until a SIGTERM has reached the agent if it was sent to all processes."""


@contextmanager
def handling(handler: Callable[..., object]) -> Iterator[None]:
    """Calls a function for each of the signals."""
    if threading.current_thread() is not threading.main_thread():  # which alone may set handlers
        yield
        return
    previous = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, old_handler in previous.items():
            signal.signal(number, old_handler)


@contextmanager
def leaving() -> Iterator[None]:
    """A context in which a signal raises Preempted."""

    def leave(number: int, _: object) -> None:
        raise Preempted(f"stopped by {signal.Signals(number).name} before the ranks had started")

    with handling(leave):
        yield


@contextmanager
def listening(folder: Path) -> Iterator[None]:
    """A context in which a signal makes a request in `folder`."""
    with handling(lambda *_: (folder / "requested").touch()):
        yield


def is_requested() -> bool:
    """Whether this machine has a request."""
    return FOLDER in os.environ and Path(os.environ[FOLDER], "requested").exists()


def listen() -> None:
    """From now on SIGUSR1 makes a request, and SIGTERM ends this process unless a request is there or follows soon. A
    thread decides, because Python runs handlers in the main thread, which may be waiting in a collective for ever."""
    if FOLDER not in os.environ or threading.current_thread() is not threading.main_thread():
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)
    # A child would write into the pipe of this process until its handlers are those of `restore`.
    os.register_at_fork(
        before=partial(signal.pthread_sigmask, signal.SIG_BLOCK, SIGNALS),
        after_in_parent=partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, SIGNALS),
        after_in_child=restore,
    )
    threading.Thread(target=_obey, args=(reader,), daemon=True).start()


def restore() -> None:
    """Signals do what they do by default: in a child of a rank, which its parent may terminate."""
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _obey(reader: int) -> None:
    while True:
        for number in os.read(reader, 1):
            if number == signal.SIGUSR1:
                Path(os.environ[FOLDER], "requested").touch()
            elif number == signal.SIGTERM:
                deadline = time.monotonic() + PATIENCE
                while not is_requested():
                    if time.monotonic() > deadline:
                        os.kill(os.getpid(), signal.SIGKILL)
                    time.sleep(0.02)


def check(save: Callable[[], None] = lambda: None) -> None:
    """Calls `save` and raises Preempted if any machine has a request; all ranks call it together."""
    flag = torch.tensor(float(is_requested()), device=current().device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(flag, dist.ReduceOp.MAX)
    if flag.item():
        save()
        raise Preempted("stopped by a signal; the state is saved")


def leave() -> None:
    """This rank has saved, and ends."""
    Path(os.environ[FOLDER], "left").touch()


def has_left(folder: Path) -> bool:
    """Whether the ranks of this machine have ended because of a request."""
    return (folder / "left").exists()
