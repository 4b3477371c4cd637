"""Who holds what, and what crosses between ranks: laws of `scaled/runtime` on every layout."""

import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.settings import RunError
from recipe.full import stages as chain
from recipe.full.settings import Cluster, FullRecipe
from scaled.runtime import launch
from scaled.runtime.cut import cut, places
from scaled.runtime.mesh import AXES, Compute, Layout, computing, current, mesh
from tests import forks
from tests.mirror import calls, workers
from tests.mirror.layouts import EVERY, close, layouts, play, seeds
from tests.mirror.workers import Ranks, ranks

slow = settings(max_examples=16, deadline=None, derandomize=True)


@slow
@given(layouts, seeds, st.integers(1, 3), st.integers(1, 3), st.integers(1, 9))
def test_cutting_and_joining(layout, seed, rows, size, k):
    """joined(cut(x)) is x, full(cut(x)) this rank's rows, ahead(x, k) x shifted by k over all borders; and gradients of
    a function of all three are those of the whole."""
    B, T = rows * layout["dp"], 2 * size * layout["cp"]
    x = torch.randn(B, T, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    back, rows_whole, shifted, loss, grad = play(layout, calls.laws, x, k)
    assert torch.equal(back, x) and rows_whole
    next_ = torch.zeros_like(x)
    next_[:, : max(T - k, 0)] = x[:, k:]
    assert torch.equal(shifted, next_)
    whole = x.clone().requires_grad_()
    later = torch.cat((whole[:, k:], torch.zeros_like(whole[:, :k])), 1)[:, :T]
    wanted = (whole * later).sum() + (whole.square().sum(1, keepdim=True) * whole).sum()
    wanted.backward()
    close(loss, wanted)
    close(grad, whole.grad)


@pytest.mark.parametrize("cp", [2, 4])
def test_causal_work_is_equal(cp):
    """Pairs of a query and a key that it sees: every rank has the same number of them, to the pair."""
    T = 4 * 2 * cp
    found = play(dict(dp=1, cp=cp), calls.everyone, T)
    assert sorted(torch.cat(found).tolist()) == list(range(T))
    work = {int((part + 1).sum()) for part in found}
    assert len(work) == 1


@slow
@given(layouts, seeds, st.integers(1, 4))
def test_rows_to_their_owners_and_back(layout, seed, n):
    """all_to_all with any splits, empty ones too, there and back, and its gradient."""
    g = torch.Generator().manual_seed(seed)
    N = n * layout["dp"]
    x = torch.randn(N, dtype=torch.float64, generator=g)
    owner = torch.randint(0, 8, (N,), generator=g)
    found, grad = play(layout, calls.to_owners, x, owner)
    factor = owner % layout["ep"] + 1
    close(found, x * factor)
    close(grad, 2 * x * factor**2)


@pytest.mark.parametrize(
    "layout", [dict(dp=0), dict(cp=-1), dict(dp=2, cp=3, ep=4), dict(ep=1.5), dict(dp=True, cp="2")]
)
def test_no_layout(layout):
    with pytest.raises(ValueError, match="dp|cp|ep"):
        Layout(**layout)


def test_too_few_ranks():
    with pytest.raises(ValueError, match="torchrun --nproc-per-node 6"), mesh(dp=2, cp=3, ep=2):
        pass


def test_without_a_mesh_there_is_one_rank():
    assert all((current().group(axis).size, current().group(axis).rank) == (1, 0) for axis in AXES)
    x = torch.randn(3, 5)
    assert torch.equal(cut(x), x) and places(5).tolist() == list(range(5))


def test_layouts_are_all_there():
    assert {(d["dp"], d["cp"], d["ep"]) for d in EVERY} >= {
        (4, 1, 1),
        (1, 4, 1),
        (2, 2, 4),
        (4, 1, 2),
        (1, 1, 1),
        (1, 2, 2),
    }


def test_what_does_not_share_out_is_refused():
    """Rows that dp does not divide, tokens that 2·cp does not."""
    for call, args, says in (
        (calls.laws, (torch.zeros(3, 8, 1), 1), "multiple of dp = 2"),
        (calls.everyone, (6,), "2 · cp = 4"),
    ):
        with pytest.raises(RuntimeError, match=says):
            play(dict(dp=2, cp=2), call, *args)


@pytest.mark.parametrize("how", ["in torch.distributed", "elsewhere", "meets"])
def test_who_hangs_is_named_with_its_line(tmp_path, how):
    """As on GPUs, where a rank waits for a collective long after it has begun it, and where it waits for others that
    sample."""
    found = dict(ranks(2).run(dict(dp=1, cp=2, ep=1), calls.hung, tmp_path, how))
    assert len(found[0]) == 1 and found[1] == [""]
    assert re.fullmatch(r"no step after step -1 in 1 s: rank 1 hangs in calls\.py:\d+ dawdle", found[0][0])


def test_a_rank_that_waits_for_one_at_work_beats_with_it(tmp_path, monkeypatch):
    """However long that takes: each beat of the other is one of its own, until the other has come as well."""
    watches = []
    for rank in range(2):
        fake = SimpleNamespace(
            get_rank=lambda rank=rank: rank,
            get_world_size=lambda: 2,
            barrier=lambda: None,
            group=SimpleNamespace(WORLD=None),
        )
        monkeypatch.setattr(launch, "dist", fake)
        monkeypatch.setattr(launch, "current", lambda: SimpleNamespace(groups=[]))
        watches.append(launch.Watchdog(tmp_path, 1000.0))
    waits, works = watches
    thread = threading.Thread(target=waits.meet)
    thread.start()
    for _ in range(3):
        waits.last_beat = -1.0
        works.stay_alive()
        works.publish()
        while waits.last_beat < 0:
            time.sleep(0.01)
        assert thread.is_alive() and waits.is_meeting
    works.meet()
    thread.join()
    assert not waits.is_meeting and not works.is_meeting


@pytest.mark.parametrize("where", ["heldout", "perplexity"])
def test_who_hangs_outside_of_the_steps_is_named_too(where, tiny_run, tmp_path):
    found = dict(
        ranks(2).run(
            dict(dp=2, cp=1, ep=1), calls.hung_outside, where, tiny_run / "checkpoints" / "sft", forks.CORPUS, tmp_path
        )
    )
    assert len(found[0]) == 1 and found[1] == [""]
    assert re.fullmatch(r"no step after step -1 in 1 s: rank 1 hangs in calls\.py:\d+ dawdle", found[0][0])


def test_ranks_wait_for_rank_0_to_decode_as_long_as_it_goes_on(tmp_path):
    c = replace(FullRecipe(), cluster=Cluster(timeout=1))
    with pytest.raises(RunError, match="no progress in 1 s: rank 0 hangs in the stage decode"):
        chain.decode(None, tmp_path, c)
    sign, done = tmp_path / "work" / "decode" / "beat", tmp_path / "stages" / "decode.json"

    def work() -> None:
        sign.parent.mkdir(parents=True)
        for _ in range(20):
            time.sleep(0.1)
            sign.touch()
        done.parent.mkdir()
        done.touch()

    threading.Thread(target=work).start()
    chain.decode(None, tmp_path, c)  # two seconds, with a sign of life in each
    assert done.exists()


def test_ranks_that_still_compute_are_waited_for_and_ranks_that_only_wait_are_not(monkeypatch):
    """On a crowded machine a call may take minutes; that alone says nothing is wrong."""
    monkeypatch.setattr(workers, "TIMEOUT", 0.5)
    one = Ranks(1)
    try:
        assert one.run({}, calls.busy, 2.0) == [2.0]
        with pytest.raises(RuntimeError, match=r"ranks \[0\] hang: no answer and no work in 0 s"):
            one.run({}, calls.idle, 60.0)
        assert one.run({}, calls.busy, 0.1) == [0.1], "started again"
    finally:
        one.stop()


def test_what_ranks_do_to_what_they_are_sent_reaches_nobody_else():
    x = torch.arange(6.0)
    assert torch.equal(play(dict(dp=1, cp=2, ep=1), calls.spoilt, x), -torch.ones(6)) and torch.equal(
        x, torch.arange(6.0)
    )


def test_ranks_have_one_thread_whatever_the_caller_has(monkeypatch):
    """A sum in float32 depends on it: a run that goes on elsewhere goes on the same."""
    seen = []

    class Started:
        def __init__(self, command, env):
            seen.append(env)

        def wait(self):
            return 0

    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setattr(launch.subprocess, "Popen", Started)
    assert launch.start("some.module", ["out"], 2, 0) == 0 and seen[0]["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
        ("NCCL_DEBUG", None),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", None),
        ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"),
    ],
)
def test_variables_of_gpus_are_set_unless_the_user_has_set_them(monkeypatch, tmp_path, name, same):
    """Also under the name that they had before: torch reads the earlier one first."""
    for variable in filter(None, (name, same)):
        monkeypatch.delenv(variable, raising=False)
    assert name in launch.variables(tmp_path)
    for variable in filter(None, (name, same)):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "")
            assert name not in launch.variables(tmp_path)
    documented = (Path(__file__).resolve().parents[2] / "docs" / "scaling.md").read_text()
    assert f"| `{name}={launch.variables(Path('FOLDER'))[name]}`" in documented


def test_the_mesh_is_that_of_the_process_in_every_thread():
    """On a GPU the backward pass, and what it computes again, run in a thread of autograd's own."""
    seen = []
    with mesh(), computing(rematerialise=True):
        thread = threading.Thread(target=lambda: seen.append(current().compute.rematerialise))
        thread.start()
        thread.join()
        assert current().compute == Compute(rematerialise=True)
    assert seen == [True] and current().compute == Compute()
