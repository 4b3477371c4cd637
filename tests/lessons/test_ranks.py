"""Ranks that a notebook starts: what they are sent, what comes back, and what happens when one fails."""

import math
import os
import signal
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import scaled.kl
from lessons import mirror_ranks
from lessons.mirror_ranks import Ranks, packed, unpacked
from scaled.runtime.comm import all_reduce_sum
from scaled.runtime.mesh import current

HALF = torch.tensor([0.5])


def half(x):
    return HALF * x


def use(x):
    """A function of this file, a value, a module, a function of a module, and one inside."""

    def inside(y):
        return math.sqrt(y)

    return inside(half(x).item()) + len(scaled.kl.KINDS) + all_reduce_sum(torch.ones(1)).item()


SIZE = 3


def twice(function):
    """A decorator of this file."""

    def both(*arguments):
        return function(*arguments) * 2

    return both


@torch.no_grad()
def quiet(x: Tensor, n: int = SIZE, *, by: Callable[[Tensor], Tensor] = half) -> Tensor:
    """What stands above its body is looked up too."""

    @twice
    def inside(x: Tensor, n=n) -> Tensor:
        return by(x) * n

    return inside(x)


def calls_quiet(x):
    return quiet(x).item()


def alone():
    return os.getsid(0) == os.getpid()


def place():
    return current().group("dp").rank, os.getpid()


def fails_on_one():
    if current().group("dp").rank == 1:
        raise KeyError("here")
    return all_reduce_sum(torch.ones(1), "dp")  # waits for the other


def begins():
    raise NotImplementedError


def dies():
    os._exit(3)


@pytest.fixture(scope="module")
def two():
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


def test_a_function_is_sent_with_what_it_names():
    parts = packed(use)
    assert {name: part[0] for name, part in parts.items()} == {
        "use": "text",
        "half": "text",
        "HALF": "value",
        "math": "module",
        "scaled": "module",
        "torch": "module",
        "all_reduce_sum": "import",
    }
    assert unpacked(parts)["use"](8.0) == use(8.0) == 6.0
    with pytest.raises(ValueError, match="lambda"):
        packed(lambda: 1)


def test_what_stands_above_a_functions_body_is_sent_too(two):
    """Decorators, defaults and annotations are looked up where the function is defined: on the rank."""
    parts = packed(calls_quiet)
    assert {name: part[0] for name, part in parts.items()} == {
        "calls_quiet": "text",
        "quiet": "text",
        "twice": "text",
        "half": "text",
        "HALF": "value",
        "SIZE": "value",
        "torch": "module",
        "Tensor": "import",
        "Callable": "import",
    }
    assert unpacked(parts)["calls_quiet"](torch.tensor(8.0)) == calls_quiet(torch.tensor(8.0)) == 24.0
    assert two.run(dict(dp=2), calls_quiet, torch.tensor(8.0)) == [24.0, 24.0]


def test_all_ranks_answer_under_the_mesh(two):
    assert two.run(dict(dp=2), use, 8.0) == [2 + 3 + 2] * 2
    (first, a), (second, b) = two.run(dict(dp=2), place)
    assert (first, second) == (0, 1) and a != b and os.getpid() not in (a, b)


def test_what_a_rank_raises_is_raised_here(two, monkeypatch):
    """The same exception, with the rank's traceback; ranks that wait for the one that failed are started again."""
    before = two.run(dict(dp=2), place)
    with pytest.raises(NotImplementedError) as raised:
        two.run(dict(dp=2), begins)
    assert "in begins" in raised.value.__notes__[0]
    assert two.run(dict(dp=2), place) == before
    monkeypatch.setattr(mirror_ranks, "GRACE", 0.5)
    with pytest.raises(KeyError, match="here"):
        two.run(dict(dp=2), fails_on_one)
    assert two.run(dict(dp=2), use, 8.0) == [7.0, 7.0]
    with pytest.raises(RuntimeError, match="rank [01] ended"):
        two.run(dict(dp=2), dies)
    with pytest.raises(ValueError, match="dp · cp must be the number of ranks"):
        two.run(dict(dp=3), place)


def test_after_an_interrupt_no_old_answer_is_taken_for_a_new_one(two, monkeypatch):
    """The ranks may have answered the call that was interrupted."""
    before = two.run(dict(dp=2), place)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(mirror_ranks, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            two.run(dict(dp=2), use, 8.0)
    assert not two.processes
    after = two.run(dict(dp=2), place)
    assert [rank for rank, _ in after] == [0, 1] and not {pid for _, pid in before} & {pid for _, pid in after}
    assert two.run(dict(dp=2), alone) == [True, True], "a Ctrl-C here is none of theirs"


def test_a_rank_that_was_killed_between_calls_is_started_again(two):
    before = two.run(dict(dp=2), place)
    os.kill(before[1][1], signal.SIGKILL)
    os.waitid(os.P_PID, before[1][1], os.WEXITED | os.WNOWAIT)
    after = two.run(dict(dp=2), place)
    assert [rank for rank, _ in after] == [0, 1] and not {pid for _, pid in before} & {pid for _, pid in after}


def test_ranks_end(two):
    two.run(dict(dp=2), place)
    processes = list(two.processes)
    two.stop()
    assert all(process.poll() is not None for process in processes)
