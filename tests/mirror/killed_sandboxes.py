"""What ranks are made to do in tests/mirror/test_faults_on_packages.py: all stages of a run on packages, where sandboxes
are killed or cannot be opened."""

import contextlib
import os
import random
import signal
import threading
from unittest import mock

import torch.distributed

from environments.harness.environment import HarnessEnvironment
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
    """The first rollout of rank 1 in each step of RL loses its sandbox, however often it is tried, and the sandbox of
    the second sample of each held-out task cannot be opened. `all_fail`: no sandbox of RL can be opened."""
    rank, make, draw = torch.distributed.get_rank(), PackageTasks.environment, random.Random(0)

    class Faulty(HarnessEnvironment):
        def reset(self):
            if self.fault == "closed":
                raise_full(self.task.key)
            messages = super().reset()
            if self.fault == "killed":
                kill_soon(self.workspace.open(), draw.uniform(0.0, 0.01))
            return messages

    def environment(self, task, number):
        made = make(self, task, number)
        made.__class__ = Faulty
        is_heldout = task in self.streams["heldout"]
        is_closed = number == 1 if is_heldout else all_fail
        made.fault = "closed" if is_closed else "killed" if not is_heldout and rank == 1 and number == 0 else ""
        return made

    with mock.patch.object(PackageTasks, "environment", environment):
        stages.play(out, config, torch.distributed.get_world_size())


def raise_full(task: str) -> None:
    from environments.harness.environment import infrastructure

    with infrastructure(task):
        raise RunError("no space is left for a sandbox")
