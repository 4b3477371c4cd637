"""No tensor of a training is forgotten on the CPU: it runs on a GPU that is not there, and gives what it gives on the
CPU."""

import json
import math
import subprocess
import sys
from pathlib import Path

from tests.mirror.forgotten import TRAININGS

ROOT = Path(__file__).resolve().parents[2]


def test_trainings_on_another_device(tiny_run, tmp_path):
    """The draft layers were, and so was the generator of rollouts; a sampler on a GPU was forked. An H100 showed it."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.mirror.forgotten",
        str(tmp_path),
        str(tiny_run / "checkpoints"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert [*told] == [*TRAININGS]
    assert all(math.isfinite(value) for found in told.values() for value in found.values())


MIXED = """
import torch
from scaled.runtime.checkpoint import on_host
from tests import pretend

here = torch.ones(3)
with pretend.gpu() as device:
    there = here.to(device)
    assert type(on_host(there)) is torch.Tensor, "a checkpoint is staged in the computer's memory"
    assert (there + 1).sum().item() == 6 and there.device == device \
and (there * torch.tensor(2.0)).cpu().tolist() == [2, 2, 2]
    calls = lambda: there + here, lambda: there @ here, lambda: here.mul_(there), \
lambda: torch.where(there > 0, there, here)
    for call in calls:
        try:
            call()
        except RuntimeError as error:
            print(str(error)[:52])
"""


def test_mixed_devices_are_refused():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", MIXED], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["Expected all tensors to be on the same device, but f"] * 4, done.stderr[-2000:]
