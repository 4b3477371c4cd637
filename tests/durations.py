"""That no input holds a function for long: seconds of this thread, for tests of functions that read hostile text."""

import gc
import time
from collections.abc import Callable

__all__ = ["ends_within"]


def ends_within(seconds: float, call: Callable[[], object], tries: int = 3) -> bool:
    """Whether call() takes less than `seconds` of this thread's time, at least once in `tries`.

    Tests use limits some ten times above what the function takes and far below what it took before it was mended.
    A collection of garbage after thousands of other tests takes seconds, so there is none in between."""
    for _ in range(tries):
        gc.disable()
        since = time.thread_time()
        try:
            call()
        finally:
            taken = time.thread_time() - since
            gc.enable()
        if taken < seconds:
            return True
    return False
