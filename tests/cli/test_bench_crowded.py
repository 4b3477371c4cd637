"""`etude bench contention`: who is timed when, what the record says, and that the old way is the old way. No time is
judged here."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from etude.bench import crowded as bench_crowded
from kit.settings import RunError
from recipe.small import agent, evaluation, reinforcement
from ref import rollout
from ref.engine.continuous import ContinuousSampler
from ref.engine.sampler import Sampler


def test_medians_and_ratios_within_a_round():
    """Ratios are within a round, because the machine's own speed moves between rounds."""
    found = bench_crowded.summary({"alone": [1.0, 2.0, 4.0], "threads": [2.0, 2.0, 8.0], "crowded": [1.5, 4.0, 6.0]})
    assert found == {
        "alone_s": 2.0,
        "threads_s": 2.0,
        "crowded_s": 4.0,
        "faster_than_threads": 2.0,
        "slower_in_a_crowd": 1.5,
    }


def test_every_part_is_played_in_every_way_by_turns(tmp_path, monkeypatch):
    ways, played = [], []

    class Way:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            ways.append(self.name)

        def __exit__(self, *_):
            ways.pop()

    monkeypatch.setattr(bench_crowded, "busy", lambda: Way("crowded"))
    monkeypatch.setattr(bench_crowded, "threads", lambda: Way("threads"))
    monkeypatch.setattr(
        bench_crowded, "parts_of", lambda root: {n: lambda n=n: played.append((n, *ways)) for n in ("sampling", "step")}
    )
    record = bench_crowded.bench(tmp_path, tmp_path, rounds=3)
    assert played[:2] == [("sampling",), ("step",)]  # what is computed once only
    for name in ("sampling", "step"):
        mine = [(way or ["alone"])[0] for n, *way in played[2:] if n == name]
        assert mine == ["alone", "threads", "crowded", "threads", "crowded", "alone", "crowded", "alone", "threads"]
        assert all(len(seconds) == 3 for seconds in record["parts"][name]["seconds"].values())
    (file,) = tmp_path.glob("crowded-*.json")
    assert json.loads(file.read_text())["command"] == "etude bench contention"


def test_a_folder_without_a_policy_is_one_line(tmp_path, ask):
    with pytest.raises(RunError, match="holds no run with a policy after SFT; make one"):
        bench_crowded.parts_of(tmp_path)
    code, _, said = ask("bench", "contention", tmp_path)
    assert code == 2 and said.count("\n") == 1 and "make small" in said


def test_the_old_way_is_one_process_with_threads():
    before, own = (
        torch.get_num_threads(),
        (agent.map_on_cores, rollout.MIN_BATCH, rollout.MAX_BATCH, evaluation.one_thread, reinforcement.CORES),
    )
    with bench_crowded.threads():
        assert torch.get_num_threads() == bench_crowded.cores() and (rollout.MIN_BATCH, rollout.MAX_BATCH) == (800, 800)
        assert agent.map_on_cores(lambda part: (part, os.getpid()), [1, 2], processes_per_core=2) == [
            (1, os.getpid()),
            (2, os.getpid()),
        ]
        assert reinforcement.CORES is agent.map_on_cores
        assert ContinuousSampler.engine == Sampler.engine
    assert ContinuousSampler.engine is not Sampler.engine
    assert torch.get_num_threads() == before
    assert (agent.map_on_cores, rollout.MIN_BATCH, rollout.MAX_BATCH, evaluation.one_thread, reinforcement.CORES) == own


def test_busy_programs_end_with_a_killed_benchmark(tmp_path):
    code = (
        "import time\nfrom etude.bench import crowded\nwith crowded.busy():\n    print('busy', "
        "flush=True)\n    time.sleep(600)\n"
    )
    own = {**os.environ, "PYTHONPATH": str(Path(bench_crowded.__file__).parents[2]), "ETUDE_TEST_MARK": tmp_path.name}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=own)
    assert process.stdout.readline() == b"busy\n"

    def left() -> list[str]:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if (
                    tmp_path.name.encode() in (folder / "environ").read_bytes()
                    and b"getppid" in (folder / "cmdline").read_bytes()
                ):
                    found.append(folder.name)
            except OSError:
                continue
        return found

    assert left()
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while left() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left()


def test_busy_programs_are_sessions_of_their_own_and_end(monkeypatch):
    started, real = [], subprocess.Popen

    def seen(*arguments, **named):
        assert named == {"start_new_session": True}
        started.append(real(*arguments, **named))
        return started[-1]

    monkeypatch.setattr(bench_crowded.subprocess, "Popen", seen)
    with bench_crowded.busy():
        assert len(started) == bench_crowded.cores() and all(program.poll() is None for program in started)
    assert all(program.poll() is not None for program in started)


def test_a_busy_program_that_wakes_up_late_ends_at_once():
    """The benchmark may be gone before the program looks for it for the first time."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    subprocess.run([sys.executable, "-c", bench_crowded.BUSY, str(gone.pid)], timeout=60, check=True)
