"""Several machines: two agents of torchrun on the loopback device stand in for them."""

import os
import signal
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.run.settings import node_of
from kit.settings import RunError
from scaled.runtime.launch import Node
from tests import forks
from tests.mirror import node_parts
from tests.mirror.node_parts import FINAL, STEPS, agent
from tests.mirror.workers import free_port, ranks


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
    for process, log in zip(agents, ("said-0", "said-again"), strict=True):
        forks.end(process, tmp_path / log, 120)
    assert (tmp_path / "state").read_text() == f"{STEPS} {FINAL}"


@given(
    st.integers(-2, 6),
    st.integers(-2, 6),
    st.sampled_from(["a", "10.0.0.1", "[::1]", "a b", ""]),
    st.integers(-1, 70000),
)
def test_a_machine_has_a_number_below_their_count_and_an_address_to_meet_at(nodes, node, host, port):
    is_valid = 0 <= node < nodes and host not in ("a b", "") and 0 < port < 65536
    words = (nodes, node, f"{host}:{port}")
    if not is_valid:
        with pytest.raises(RunError, match="--node|--rendezvous"):
            node_of("cpt", *words)
        return
    assert node_of("cpt", *words) == (None if nodes == 1 else Node(nodes, node, host, port))
    for missing in range(3):
        if nodes > 1:
            with pytest.raises(RunError, match="need each other"):
                node_of("cpt", *(None if at == missing else word for at, word in enumerate(words)))


def test_machines_with_different_settings_say_so():
    layout = dict(dp=2, cp=1, ep=1)
    assert ranks(2).run(layout, node_parts.compare, (4, 4)) == ["", ""]
    same, different = ranks(2).run(layout, node_parts.compare, (4, 8))
    assert same == "" and "config.rows is 8 here and 4 on that of rank 0" in different
