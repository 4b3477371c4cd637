"""Work in a process of its own: what comes back, what it reports, and how it may end."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from kit import process
from kit.process import in_fresh_process, map_on_cores


def double(x, progress):
    progress(1)
    progress(2)
    return {"doubled": 2 * x, "pid": os.getpid()}


def stumble(progress):
    raise ValueError("no weights there")


def die(progress):
    os.kill(os.getpid(), signal.SIGKILL)


def press_ctrl_c(progress):
    os.kill(os.getpid(), signal.SIGINT)
    return "heard nothing"


def live_long(file, progress):
    file.write_text(str(os.getpid()))
    time.sleep(60)


def ask_for_ever(file):
    in_fresh_process(live_long, file, progress=print, fresh=0)


def test_work_ends_with_the_process_that_asked_for_it(tmp_path):
    """SIGKILL of that one, which leaves it no time to say so."""
    asking = multiprocessing.get_context("spawn").Process(target=ask_for_ever, args=(tmp_path / "pid",))
    asking.start()
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert asking.is_alive() and time.monotonic() < deadline
        time.sleep(0.02)
    pid = int((tmp_path / "pid").read_text())
    asking.kill()
    asking.join()
    deadline = time.monotonic() + 10
    try:
        while Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
            assert time.monotonic() < deadline, "it goes on alone"
            time.sleep(0.02)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_ctrl_c_is_left_to_the_process_that_asked():
    """A terminal sends it to both, and one of them has to say what it means."""
    assert in_fresh_process(press_ctrl_c, progress=print, fresh=0) == "heard nothing"


def test_returns_and_reports_from_another_process():
    seen = []
    found = in_fresh_process(double, 21, progress=seen.append, fresh=0)
    assert found["doubled"] == 42 and found["pid"] != os.getpid() and seen == [1, 2]


@pytest.mark.parametrize(
    ("function", "says"), [(stumble, "stumble: ValueError: no weights there"), (die, "die died with exit code -9")]
)
def test_a_failure_there_is_an_error_here(function, says):
    with pytest.raises(RuntimeError, match=says):
        in_fresh_process(function, progress=lambda n: None, fresh=0)


def test_a_process_that_has_done_little_is_fresh_enough():
    """And one that has worked for longer than `fresh` seconds is not."""
    seen, used = [], time.process_time()
    found = in_fresh_process(double, 21, progress=seen.append, fresh=used + 60)
    assert found == {"doubled": 42, "pid": os.getpid()} and seen == [1, 2]
    assert in_fresh_process(double, 21, progress=seen.append, fresh=used / 2)["pid"] != os.getpid()


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(process, "cores", lambda: 2)


def whose(part):
    time.sleep(0.05 * (part == 0))
    return part, os.getpid(), torch.get_num_threads(), os.getsid(0)


def test_parts_are_dealt_to_processes_of_one_thread_in_sessions_of_their_own(two_cores):
    done = []
    found = map_on_cores(whose, range(5), done.append)
    assert [part for part, *_ in found] == [*range(5)] and done == [1, 2, 3, 4, 5]
    pids = {pid for _, pid, *_ in found}
    assert len(pids) == 2 and os.getpid() not in pids
    assert all(threads == 1 and session == pid for _, pid, threads, session in found)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_as_many_processes_as_are_asked_for(two_cores, processes):
    """Whatever the number of cores; one is this process itself. 0.05 s of waiting gives every process a part."""
    found = map_on_cores(lambda part: (time.sleep(0.05), os.getpid())[1], range(6), processes=processes)
    assert len(set(found)) == processes and (os.getpid() in found) == (processes == 1)


def test_one_part_stays_here_and_takes_one_thread(two_cores):
    before = torch.get_num_threads()
    assert map_on_cores(whose, ["only"]) == [("only", os.getpid(), 1, os.getsid(0))]
    assert torch.get_num_threads() == before and map_on_cores(whose, []) == []


def test_a_view_of_much_memory_comes_back_as_its_own_numbers_alone(two_cores):
    def view(part):
        return {"row": torch.arange(2_000_000).view(2, -1)[part, :3], "half": torch.ones(2, dtype=torch.bool)}

    for part, answer in enumerate(map_on_cores(view, [0, 1])):
        assert answer["row"].tolist() == [part * 1_000_000 + i for i in range(3)] and answer["half"].all()
        assert answer["row"].untyped_storage().nbytes() == 24


def test_tensors_of_every_dtype_come_back(two_cores):
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool)
    for answer in map_on_cores(lambda part: [torch.tensor([[1, 0, 3]]).to(dtype) for dtype in dtypes], [0, 1]):
        assert all(
            torch.equal(x, torch.tensor([[1, 0, 3]]).to(dtype)) and x.dtype == dtype
            for x, dtype in zip(answer, dtypes, strict=True)
        )


def fall(part):
    if part == 1:
        raise ValueError("trigger must exceed every prompt")
    time.sleep(30)


def vanish(part):
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_fails_in_a_part_is_raised_at_once_and_nobody_is_left(two_cores):
    started, others = time.monotonic(), set(multiprocessing.active_children())  # other tests' ranks
    with pytest.raises(ValueError, match="trigger must exceed"):
        map_on_cores(fall, [0, 1])
    assert time.monotonic() - started < 20
    with pytest.raises(RuntimeError, match="a process that computed vanish died"):
        map_on_cores(vanish, [0, 1])
    assert set(multiprocessing.active_children()) <= others


def dawdle(part):
    (part / str(os.getpid())).touch()
    time.sleep(60)


def deal_for_ever(folder):
    process.cores = lambda: 2
    map_on_cores(dawdle, [folder, folder])


def test_parts_end_with_the_process_that_dealt_them(tmp_path):
    asking = multiprocessing.get_context("fork").Process(target=deal_for_ever, args=(tmp_path,))
    asking.start()
    deadline = time.monotonic() + 60
    while len([*tmp_path.iterdir()]) < 2:
        assert asking.is_alive() and time.monotonic() < deadline
        time.sleep(0.02)
    asking.kill()
    asking.join()
    deadline = time.monotonic() + 10
    for pid in (int(file.name) for file in tmp_path.iterdir()):
        while Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
            assert time.monotonic() < deadline, "it goes on alone"
            time.sleep(0.02)


def test_ctrl_c_within_a_block_comes_behind_it(interruptible):
    done = []
    with pytest.raises(KeyboardInterrupt):
        with process.uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("to its end")
        done.append("on")
    assert done == ["to its end"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(("asked", "found"), [("", 4), ("0", 4), ("3", 3), ("64", 4), ("many", 4), ("-1", 4)])
def test_cores_are_those_that_the_process_may_use(monkeypatch, asked, found):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 5})
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert process.cores() == found


def test_a_measurement_says_whether_its_source_was_edited(tmp_path, monkeypatch):
    """The commit of the checkout; with a mark where a file of it is another one, other than records and files that Git
    does not know."""

    def git(*words):
        return subprocess.run(
            ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c", *words],
            capture_output=True,
            text=True,
            check=True,
        )

    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "kit").mkdir()
    monkeypatch.setattr(process, "__file__", str(tmp_path / "kit" / "process.py"))
    assert process.machine()["commit"] is None
    git("init", "-q")
    (record := tmp_path / "results" / "figures" / "a.json").parent.mkdir(parents=True)
    for path in (record, tmp_path / "a.py"):
        path.write_text("1")
    git("add", "."), git("commit", "-qm", "first")
    head = git("rev-parse", "HEAD").stdout[:12]
    (tmp_path / "notes").write_text("mine")
    record.write_text("2")
    assert process.machine()["commit"] == head
    (tmp_path / "a.py").write_text("2")
    assert process.machine()["commit"] == f"{head}+changes"
