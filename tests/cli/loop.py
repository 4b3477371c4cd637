"""A toy training loop on a run folder, for the tests that kill it.

Its result depends on every random number drawn, so a wrong resume cannot end in the same place.
"""

import argparse
import os
import random
import signal
import sys
import time
import traceback
from dataclasses import dataclass

import numpy
import torch

from kit.process import pack_rng, restore_rng
from kit.runs import Run


@dataclass(frozen=True)
class Loop:
    steps: int = 60


def play(run: Run, name: str, steps: int, pace: float) -> dict:
    stage = run.stage(name, steps, "steps")
    if stage.finished:
        return stage.result()
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    weight, first = torch.zeros(50_000), 0
    if (state := stage.restore()) is not None:
        weight, first = state["weight"], state["step"]
        restore_rng(state["rng"])
    for step in range(first, steps):
        weight += torch.randn(50_000) * random.random() * float(numpy.random.rand())
        stage.log(step + 1, loss=weight.square().mean(), torn="x" * random.randrange(300))
        stage.progress(step + 1, loss=weight[0])
        time.sleep(pace)
        if stage.due() and step % 2:
            stage.save({"weight": weight, "step": step + 1, "rng": pack_rng()}, step + 1)
    return stage.finish({"sum": float(weight.sum())})


def attempt(out: str, pace: float) -> None:
    with Run.open(out, "loop", Loop(), resume=True, checkpoint_seconds=0.0) as run:
        os.write(1, b"begun\n")
        for name in ("one", "two"):
            play(run, name, Loop().steps, pace)


def main() -> None:
    """Forks the loop `kills` times, kills each at a random moment, then lets one come through.

    Forked, not started anew, so that the time goes into the loop and not into importing torch.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    draw = random.Random(arguments.seed)
    for kill in range(arguments.kills + 1):
        last = kill == arguments.kills
        child = os.fork()
        if child == 0:
            code = 1
            try:
                attempt(arguments.out, 0.0 if last else 0.002)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        if not last:
            time.sleep(draw.expovariate(1 / 0.15))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status):
            sys.exit(1)


if __name__ == "__main__":
    main()
