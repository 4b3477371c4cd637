"""Asynchronous RL on Ray: the same bits as with processes of this machine, and a run that outlives its actors. One Ray
for all, on loopback."""

import dataclasses
import socket
import sys
import threading
import time

import pytest

from kit.settings import RunError
from ref.async_rl import Rules
from scaled.async_rl import cluster
from scaled.async_rl.local import Plan, claim, named
from tests.mirror import test_async_group as group
from tests.mirror.async_parts import Tiny
from tests.mirror.fault_parts import Several
from tests.mirror.group_parts import plain
from tests.mirror.test_async_rl import check_synchronous
from tests.mirror.test_faults import check, facts

CPUS = 4


@pytest.fixture(scope="module")
def ray():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)  # no cluster that somebody else has started
        with cluster.joined(CPUS) as ray:
            yield ray


@pytest.mark.ray
@pytest.mark.parametrize("workers", [1, 2])
def test_without_staleness_it_is_the_synchronous_loop(ray, tmp_path, workers):
    """And so the run with processes of this machine, which is held against the same loop."""
    check_synchronous(tmp_path, workers, cluster.play)


@pytest.mark.ray
def test_whoever_is_killed_the_run_ends_and_replays(ray, tmp_path):
    """SIGKILL of a worker that has half of a version, of the trainer between a version and its manifest, and of the
    reconciler before it writes down a step; and the store is down for a while. Ray starts them anew, each with an epoch
    of its own."""
    rules, seen, began = Rules(4, 2, 5), [], {}
    faults = (
        "worker: in the middle of a swap",
        "trainer: between shard and manifest",
        "reconciler: before the line of a step",
        "versions cannot be stored",
    )
    parts = Several(seconds=0.02, steps=5, faults=faults, folder=str(tmp_path))
    down, over = tmp_path / "3", threading.Event()

    def lift():
        while not over.wait(0.02):
            if down.exists() and len(facts(tmp_path, "trainer", "waits for the store")) > 1:
                seen.append("down")
                return down.unlink()

    thread = threading.Thread(target=lift)
    thread.start()
    try:
        plan = Plan(tmp_path, rules, parts, 2, slots=6, rollouts=2, timeout=30.0)
        cluster.play(plan, started=lambda name, process: began.setdefault(name, []).append(process.pid))
    finally:
        over.set()
        thread.join()
    assert seen == ["down"] and all((tmp_path / str(n)).exists() for n in range(3))
    assert check(tmp_path, rules, Tiny(steps=5)) == 2  # the reconciler keeps no log of events
    assert {name: len(set(pids)) for name, pids in began.items()} == {
        "reconciler": 2,
        "trainer": 2,
        "worker-0": 2,
        "worker-1": 1,
    }


@pytest.mark.ray
@pytest.mark.parametrize("layout", [dict(dp=2), dict(cp=2, ep=2)], ids=str)
def test_a_group_of_ranks_without_staleness_is_it_too(ray, tmp_path, layout):
    group.check_synchronous(tmp_path, plain(group.PARTS, Rules(4, 0, 3)), layout, cluster.play)


@pytest.mark.ray
def test_whichever_rank_is_killed_the_run_ends_and_replays(ray, tmp_path):
    """Who is seen to die first is chance: a rank may say that another one is gone before Ray does."""
    assert len(group.check_killed(tmp_path, cluster.play)) == 3


@pytest.mark.ray
def test_what_another_rank_says_ends_the_run(ray, tmp_path):
    """A checkpoint that cannot be read is one line, whichever rank meets it."""
    how = dict(slots=8, rollouts=2, group=group.PARTS.group(dp=2))
    cluster.play(Plan(tmp_path, Rules(4, 0, 1), group.PARTS, 1, **how))
    (path,) = (tmp_path / "trainer").glob("step-*/__1_0.distcp")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RunError, match=r"distcp is damaged: \d+ of \d+ bytes$"):
        cluster.play(Plan(tmp_path, Rules(4, 0, 2), group.PARTS, 1, **how))


@pytest.mark.ray
def test_a_cluster_that_is_too_small(ray, tmp_path):
    with pytest.raises(
        RunError,
        match=rf"^the services want 10 CPUs, and the Ray cluster has {CPUS}; add machines, or take fewer "
        rf"workers or ranks$",
    ):
        cluster.play(Plan(tmp_path, Rules(9, 0, 1), Tiny(), 9, rollouts=2))
    ranks = dataclasses.replace(group.PARTS.group(dp=2), backend="nccl")
    with pytest.raises(RunError, match=r"^the services want 2 GPUs, and the Ray cluster has 0; "):
        cluster.play(Plan(tmp_path, Rules(4, 0, 1), group.PARTS, 1, slots=8, rollouts=2, group=ranks))


@dataclasses.dataclass(frozen=True)
class Unreadable(Tiny):
    def __setstate__(self, state):
        raise ValueError("nobody can read this")


@pytest.mark.ray
def test_what_no_machine_can_start_ends_the_run_at_once(ray, tmp_path):
    with pytest.raises(RunError, match="cannot be started: .*nobody can read this") as error:
        cluster.play(Plan(tmp_path, Rules(4, 0, 1), Unreadable(), 1, slots=8, rollouts=2))
    assert "\n" not in str(error.value)


def test_a_machine_must_see_the_run_folder_and_the_store(tmp_path):
    plan = Plan(tmp_path / "run", Rules(4, 0, 1), Tiny(), 1, store=str(tmp_path / "store"))
    name = named(plan.folder)
    assert name == named(plan.folder) != named(tmp_path / "another")
    assert "does not see the store" in cluster.unseen(plan, name, 0.0)  # nobody has made it this run's
    claim(plan)
    assert cluster.unseen(plan, name, 0.0) == ""
    elsewhere = dataclasses.replace(plan, folder=tmp_path / "nowhere")
    assert f"does not see the run folder {elsewhere.folder}; choose one that all machines" in cluster.unseen(
        elsewhere, name, 0.0
    )
    assert "does not see the run folder" in cluster.unseen(plan, b"of another run", 0.0)
    assert not elsewhere.folder.exists()


def test_ranks_meet_at_one_address_only(tmp_path):
    plan = Plan(tmp_path, Rules(4, 0, 1), group.PARTS, 1, slots=8, rollouts=2, group=group.PARTS.group(dp=2))
    with cluster.ranks_port(plan, "127.0.0.1") as port:
        socket.create_connection(("127.0.0.1", port)).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port))
    with cluster.ranks_port(dataclasses.replace(plan, group=None), "127.0.0.1") as port:
        assert port == 0


def test_a_file_of_another_machine_may_come_late(tmp_path):
    plan = Plan(tmp_path / "run", Rules(4, 0, 1), Tiny(), 1)
    thread = threading.Thread(target=lambda: (time.sleep(0.3), named(plan.folder)))
    thread.start()
    wrong = cluster.unseen(plan, b"another name", 0.0)
    thread.join()
    assert wrong and cluster.unseen(plan, named(plan.folder)) == ""


def test_without_ray_it_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RunError, match="^runtime=ray needs Ray; in the clone: pip install -c constraints.txt ray$"):
        cluster.play(Plan(tmp_path, Rules(4, 0, 1), Tiny(), 1))


def test_an_address_of_ray_s_client_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    monkeypatch.setattr(cluster, "imported", lambda: pytest.fail("nothing is imported for it"))
    with pytest.raises(RunError, match="start this one on a machine of it, with RAY_ADDRESS=auto"), cluster.joined(1):
        pass
