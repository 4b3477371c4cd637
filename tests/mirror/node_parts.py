"""What tests of several machines run: torchrun's agent, and a rank of it that does next to nothing."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from kit.settings import RunError

__all__ = ["FINAL", "STEPS", "agent", "compare"]

STEPS = 40
FINAL = sum(step * 3 for step in range(1, STEPS + 1))
"""What two ranks add up to, rank 0 the step and rank 1 twice the step."""


def agent(node: int, port: int, folder: Path) -> None:
    """One of two machines, with one rank."""
    from scaled.runtime import launch, preemption

    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", PET_LOCAL_ADDR="127.0.0.1")
    os.environ[preemption.FOLDER] = str(folder)
    words = (
        f"--nnodes 2 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} "
        f"--rdzv-id run --rdzv-conf is_host={node == 0},keep_alive_interval=1,keep_alive_max_attempt=2 -m {__name__}"
    )
    sys.exit(launch.agent(os.getppid(), [*words.split(), str(node), str(folder)]))


def rank(node: str, folder: Path) -> None:
    """Adds up a number on all ranks, step by step, from the last number that rank 0 has written."""
    from kit.disk import atomic_write
    from scaled.runtime import launch

    with launch.world("gloo", 20.0) as me:
        (folder / f"{node}.pid").write_text(str(os.getpid()))
        state = folder / "state"
        step, number = map(int, state.read_text().split()) if state.exists() else (0, 0)
        dist.barrier()
        while step < STEPS:
            step += 1
            sent = torch.tensor(step * (me + 1))
            dist.all_reduce(sent)
            number += int(sent)
            if me == 0:
                atomic_write(state, f"{step} {number}")
            time.sleep(0.05)
        dist.barrier()


def compare(own_rows: tuple[int, int]) -> str:
    """What a rank says whose machine has these settings, by rank."""
    from etude.run.rank import check_same

    os.environ["GROUP_WORLD_SIZE"] = "2"
    try:
        check_same({"technique": "cpt", "config": {"rows": own_rows[dist.get_rank()], "length": 32}})
    except RunError as error:
        return str(error)
    finally:
        del os.environ["GROUP_WORLD_SIZE"]
    return ""


if __name__ == "__main__":
    rank(sys.argv[1], Path(sys.argv[2]))
