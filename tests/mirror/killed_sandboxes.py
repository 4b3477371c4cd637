"""What ranks are made to do in tests/mirror/test_faults_on_packages.py: all stages of a run on packages, where
sandboxes are killed or cannot be opened."""

import contextlib
import os
import signal
import threading
from unittest import mock

import torch.distributed

from environments.harness.environment import HarnessEnvironment
from environments.sandbox.served import Served
from kit.settings import RunError
from recipe.full import stages
from recipe.packages.tasks import PackageTasks

__all__ = ["kill_soon", "whole"]


def kill_soon(sandbox, seconds: float) -> None:
    """SIGKILL for a sandbox's server after so many seconds. The handle never means another process."""
    handle = os.pidfd_open(sandbox.first)

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)

    timer = threading.Timer(seconds, kill)
    timer.daemon = True
    timer.start()


def whole(out, config, all_fail: bool) -> None:
    """The first rollout of rank 1 in each step of RL loses the sandboxes of its grading, however often it is tried, and
    the sandbox of the second sample of each held-out task cannot be opened. `all_fail`: no sandbox of RL can be
    opened."""
    rank, make, tell = torch.distributed.get_rank(), PackageTasks.environment, Served.tell

    def killed(sandbox, *args):
        handle = os.pidfd_open(sandbox.first)
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)
        return tell(sandbox, *args)

    class Closed(HarnessEnvironment):
        def reset(self):
            self.workspace.fork = open_none
            return super().reset()

    class Killed(HarnessEnvironment):
        def reward(self):
            with mock.patch.object(Served, "tell", killed):
                return super().reward()

    def environment(tasks, task, number):
        made, is_heldout = make(tasks, task, number), task in tasks.streams["heldout"]
        if number == 1 if is_heldout else all_fail:
            made.__class__ = Closed
        elif not is_heldout and rank == 1 and number == 0:
            made.__class__ = Killed
        return made

    with mock.patch.object(PackageTasks, "environment", environment):
        stages.play(out, config, torch.distributed.get_world_size())


def open_none(tree: str) -> None:
    raise RunError("no space is left for a sandbox")
