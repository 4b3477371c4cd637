"""What a service has done by a thread while it goes on itself."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import torch

__all__ = ["BackgroundThread", "BackgroundCall"]


class BackgroundCall:
    """A call that another thread makes."""

    def __init__(self, call: Callable[[], object]):
        self.call, self.done, self.seconds = call, threading.Event(), 0.0
        self.error: Exception | None = None

    def run(self) -> None:
        start_time = time.monotonic()
        try:
            self.call()
        except Exception as error:
            self.error = error
        self.seconds = time.monotonic() - start_time
        self.done.set()


class BackgroundThread:
    """A thread that does errands, one after the other, and ends with the process at the latest."""

    def __init__(self):
        self.errands, start_event = queue.SimpleQueue[BackgroundCall](), threading.Event()
        threading.Thread(target=self.run, args=(start_event,), daemon=True).start()
        start_event.wait()

    def run(self, start_event: threading.Event) -> None:
        torch.set_num_threads(1)  # a number of its own; to be set while nobody computes
        start_event.set()
        while True:
            self.errands.get().run()

    def send(self, call: Callable[[], object]) -> BackgroundCall:
        errand = BackgroundCall(call)
        self.errands.put(errand)
        return errand
