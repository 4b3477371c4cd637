"""Grading sandboxes in which a judge waits before there is anything to grade.

To open a sandbox and to import pytest in it takes longer than to play the tests of most tasks, and neither depends on
what is graded. So it may be done while the agent still works. What waits holds the grader's programs, pytest and an
empty folder: the tree, the tests and the key come later, through a pipe. Each of them serves one grading and is closed
behind it, as one that is opened on the spot.

Where a nursery is given, pytest is imported once for all gradings: each has a fork of it, behind walls of its own
(environments/sandbox/nursery.py)."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from environments.grading.lay import write
from environments.sandbox.interface import Limits, Sandbox

if TYPE_CHECKING:  # a grader that goes along with a task has none of these (environments/harbor)
    from environments.sandbox.nursery import Nursery
    from environments.sandbox.store import Store

__all__ = ["JUDGE", "Judges", "start_judge", "nursery_of_judges", "open_judge_sandbox"]

INSIDE = Path(__file__).parent / "inside"
PROGRAMS = ("remote", "fresh", "examinee", "play", "judge")
"""Of `inside/`, in the order in which they import each other."""
JUDGE = "exec python3 -I -B exam/judge.py exam"


def open_judge_sandbox(fresh: Callable[[Path], Sandbox], tree: Mapping[str, bytes] | None = None) -> Sandbox:
    """A sandbox in which a judge waits for its plan. `tree`: lies there from the beginning, where it is too large for a
    plan. Raises RuntimeError where the sandbox does not do."""
    with tempfile.TemporaryDirectory(prefix="etude-grade-") as name:
        folder = Path(name)
        (folder / "exam" / "tests").mkdir(parents=True)
        for program in PROGRAMS:
            shutil.copyfile(INSIDE / f"{program}.py", folder / "exam" / f"{program}.py")
        if tree is not None:
            write(tree, folder / "tree")
        folder.chmod(0o755)
        sandbox = fresh(folder)
    return start_judge(sandbox)


def start_judge(sandbox: Sandbox) -> Sandbox:
    """The same sandbox, in which a judge waits. Raises RuntimeError, and closes it, where none does."""
    try:
        observation = sandbox.begin(JUDGE)
        if not observation.ok:
            raise RuntimeError(f"the grading sandbox has no judge: {observation.end_reason or observation.text}")
    except BaseException:
        sandbox.close()
        raise
    return sandbox


def nursery_of_judges(limits: Limits, root: Path | None = None, store: Store | None = None) -> Nursery:
    """A nursery of grading sandboxes, for `Judges`. `root`, `store`: see open.py."""
    from environments.sandbox.nursery import Nursery

    return Nursery(
        JUDGE, {name: (INSIDE / f"{name}.py").read_text(encoding="utf-8") for name in PROGRAMS}, limits, root, store
    )


class Judges:
    """Sandboxes with judges, opened ahead by a thread of its own. `fresh`: opens a sandbox over a folder.
    `max_waiting`: as many wait at a time, at most. `nursery`: gives sandboxes instead, unless it is refused here;
    whoever made it closes it. Threads may share it; a forked process has none of its parent's sandboxes."""

    def __init__(self, fresh: Callable[[Path], Sandbox], max_waiting: int = 1, nursery: Nursery | None = None) -> None:
        """Raises ValueError unless `most` is positive."""
        if max_waiting < 1:
            raise ValueError(f"most must be at least 1; got {max_waiting}")
        self.fresh, self.max_waiting, self.nursery = fresh, max_waiting, nursery
        self._reset()

    def expect(self) -> None:
        """Says that something will be graded: opens a sandbox for it, unless so many wait already. Returns at once."""
        self._reset_after_fork()
        with self._lock:
            self._expected_count += 1
            self._fill()

    def settle(self) -> None:
        """Returns once all that is being opened is open, or has failed."""
        self._reset_after_fork()
        with self._lock:
            futures = [*self._futures]
        for future in futures:
            _wait_for_sandbox(future)

    def take(self) -> Sandbox:
        """A sandbox in which a judge waits; nobody else gets it, and whoever takes it closes it. One is opened now
        where none waits, or what waits has ended. Raises as `open_judge_sandbox` does."""
        self._reset_after_fork()
        with self._lock:
            ready_future = self._futures.popleft() if self._futures else None
            self._expected_count = max(0, self._expected_count - 1)
            self._fill()
        if ready_future is not None:
            sandbox = _wait_for_sandbox(ready_future)
            if sandbox is not None and sandbox.waits():
                return sandbox
            if sandbox is not None:
                sandbox.close()
        return self._open_sandbox()

    def close(self) -> None:
        """Closes what waits. Closing twice does nothing, and what is expected later opens again."""
        self._reset_after_fork()
        with self._lock:
            futures, self._futures, self._expected_count = [*self._futures], deque(), 0
        for future in futures:
            if not future.cancel() and (sandbox := _wait_for_sandbox(future)) is not None:
                sandbox.close()

    def __enter__(self) -> Judges:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reset(self) -> None:
        self._pid, self._lock, self._expected_count = os.getpid(), threading.Lock(), 0
        self._futures: deque[Future[Sandbox]] = deque()
        self._executor: ThreadPoolExecutor | None = None

    def _reset_after_fork(self) -> None:
        """A forked process begins anew: its parent's threads are not there, and its parent's sandboxes are its
        parent's."""
        if self._pid != os.getpid():
            self._reset()

    def _fill(self) -> None:
        while len(self._futures) < min(self.max_waiting, self._expected_count):
            self._executor = self._executor or ThreadPoolExecutor(self.max_waiting, thread_name_prefix="judges")
            self._futures.append(self._executor.submit(self._open_sandbox))

    def _open_sandbox(self) -> Sandbox:
        if self.nursery is not None and not self.nursery.refused:
            from kit.settings import RunError

            try:
                return start_judge(self.nursery.sandbox())
            except (RunError, RuntimeError, OSError) as error:  # the last two where processes or handles are short
                if isinstance(error, RunError) and not self.nursery.has_forked:
                    self.nursery.refuse(f"each grading starts pytest anew: {error}")
        return open_judge_sandbox(self.fresh)


def _wait_for_sandbox(future: Future[Sandbox]) -> Sandbox | None:
    """What was opened ahead, once it is; None where that failed. Whoever opens one now sees why."""
    try:
        return future.result()
    except Exception:
        return None
