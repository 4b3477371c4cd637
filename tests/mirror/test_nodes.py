"""Several machines: two agents of torchrun on the loopback device stand in for them."""

import os
import signal
import time

from tests import forks
from tests.mirror.node_parts import FINAL, STEPS, agent
from tests.mirror.workers import free_port


def read_step(folder) -> int:
    return int((folder / "state").read_text().split()[0]) if (folder / "state").exists() else 0


def wait_for_step(folder, step, agents) -> None:
    deadline = time.monotonic() + 120
    while read_step(folder) < step:
        assert all(process.is_alive() for process in agents) and time.monotonic() < deadline, "no more steps"
        time.sleep(0.02)


def test_a_run_goes_on_after_a_rank_and_after_a_machine_was_lost(tmp_path):
    """A rank of the second machine is killed: both agents restart theirs, and they meet again, although the agents have
    counted different numbers of failures. Then that machine's agent is killed, its rank with it, and started again."""
    port = free_port()
    agents = [forks.begin(agent, node, port, tmp_path, said=tmp_path / f"said-{node}") for node in range(2)]
    wait_for_step(tmp_path, 5, agents)
    os.kill(int((tmp_path / "1.pid").read_text()), signal.SIGKILL)
    wait_for_step(tmp_path, 15, agents)
    agents[1].kill()
    agents[1].join()
    agents[1] = forks.begin(agent, 1, port, tmp_path, said=tmp_path / "said-again")
    for process, said in zip(agents, ("said-0", "said-again"), strict=True):
        forks.end(process, tmp_path / said, 120)
    assert (tmp_path / "state").read_text() == f"{STEPS} {FINAL}"
