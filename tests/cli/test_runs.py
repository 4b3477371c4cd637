"""Run folders: who may open one, what a kill leaves, what damage is named."""

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kit import disk, process, runs
from kit.disk import seal_record
from kit.runs import Run, Stage
from kit.settings import RunError

ROOT = Path(__file__).resolve().parents[2]
LOOP = Path(__file__).with_name("loop.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Settings:
    seed: int = 0
    name: str = "x"


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def lasting(folder: Path) -> dict[str, bytes]:
    """What two runs of the same configuration must share."""
    return {name: data for name, data in tree(folder).items() if name.startswith(("metrics/", "stages/", "state/"))}


def play(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(LOOP), *map(str, arguments)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stderr == "", done.stderr  # a kill is no damage: nothing is said
    return done


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    play(out)
    return lasting(out)


# -------------------------------------------------------------------------------------------- who may open


def test_a_folder_that_is_no_run_is_left_alone(tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    before = tree(tmp_path)
    for resume in (False, True):
        with pytest.raises(RunError, match="holds no run"):
            Run.open(tmp_path, "kl", Settings(), resume)
    assert tree(tmp_path) == before


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match="is a file"):
        Run.open(tmp_path / "file", "kl", Settings())


def test_a_run_is_not_begun_twice(tmp_path):
    Run.open(tmp_path / "run", "kl", Settings()).close()
    before = tree(tmp_path)
    with pytest.raises(RunError, match="--resume"):
        Run.open(tmp_path / "run", "kl", Settings())
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("technique", "settings", "says"),
    [
        ("muon", Settings(), "holds a run of kl, not of muon"),
        ("kl", Settings(seed=4), "started with seed = 0, not 4"),
        ("kl", Settings(name="y", seed=1), "seed = 0, not 1"),
    ],
)
def test_resume_with_other_settings(tmp_path, technique, settings, says):
    Run.open(tmp_path, "kl", Settings()).close()
    before = tree(tmp_path)
    with pytest.raises(RunError, match=says):
        Run.open(tmp_path, technique, settings, resume=True)
    assert tree(tmp_path) == before


def test_damaged_configuration_is_named(tmp_path):
    Run.open(tmp_path, "kl", Settings()).close()
    (tmp_path / "config.json").write_text('{"technique"')
    with pytest.raises(RunError, match="config.json is damaged"):
        Run.open(tmp_path, "kl", Settings(), resume=True)


def test_a_setting_that_is_no_more_is_another_run(tmp_path):
    """Settings of an older version, of which one is gone."""
    Run.open(tmp_path, "kl", Settings()).close()
    record = json.loads((tmp_path / "config.json").read_text())
    record["config"]["gone"] = 3
    (tmp_path / "config.json").write_text(json.dumps(seal_record(record)))
    with pytest.raises(RunError, match="started with gone = 3, not nothing"):
        Run.open(tmp_path, "kl", Settings(), resume=True)


def test_a_run_from_before_a_setting_was_added_resumes(tmp_path):
    """With the setting's default, and with no other value."""
    Run.open(tmp_path, "kl", Settings(seed=7)).close()
    record = json.loads((tmp_path / "config.json").read_text())
    added, default = record["config"].popitem()
    (tmp_path / "config.json").write_text(json.dumps(seal_record(record)))
    Run.open(tmp_path, "kl", Settings(seed=7), resume=True).close()
    with pytest.raises(RunError, match=f"started with {added} = {default}, not other"):
        Run.open(tmp_path, "kl", replace(Settings(seed=7), **{added: "other"}), resume=True)


@dataclass
class Renamed:
    max_share: float = field(default=0.5, metadata={"renamed_from": "most"})


def test_a_run_from_before_a_setting_was_renamed_resumes(tmp_path):
    Run.open(tmp_path, "kl", Renamed(0.25)).close()
    record = json.loads((tmp_path / "config.json").read_text())
    record["config"] = {"most": record["config"]["max_share"]}
    (tmp_path / "config.json").write_text(json.dumps(seal_record(record)))
    Run.open(tmp_path, "kl", Renamed(0.25), resume=True).close()
    with pytest.raises(RunError, match="started with max_share = 0.25, not 0.5"):
        Run.open(tmp_path, "kl", Renamed(), resume=True)


def test_of_two_that_begin_at_once_one_has_the_folder(tmp_path, monkeypatch):
    """The other one began, and ended, after this one had looked and before it had the lock."""
    lock = runs.fcntl.flock

    def late(handle, how):
        monkeypatch.setattr(runs.fcntl, "flock", lock)
        Run.open(tmp_path / "run", "kl", Settings(seed=7)).close()
        lock(handle, how)

    monkeypatch.setattr(runs.fcntl, "flock", late)
    with pytest.raises(RunError, match="already holds a run; add --resume"):
        Run.open(tmp_path / "run", "kl", Settings())
    Run.open(tmp_path / "run", "kl", Settings(seed=7), resume=True).close()


def test_resume_of_nothing_begins(tmp_path):
    with Run.open(tmp_path / "deep" / "new", "kl", Settings(), resume=True) as run:
        assert not run.resumed and run.stage("a", 1).restore() is None


def test_lock_is_held_and_let_go(tmp_path):
    run = Run.open(tmp_path, "kl", Settings())
    for resume in (False, True):
        with pytest.raises(RunError, match="in use by another run"):
            Run.open(tmp_path, "kl", Settings(), resume)
    run.close()
    Run.open(tmp_path, "kl", Settings(), resume=True).close()


def test_lock_does_not_outlive_the_killed_owner_in_a_forked_child(tmp_path):
    program = (
        "import os, sys, time\nfrom tests.cli.loop import Loop\nfrom kit.runs import Run\n"
        "run = Run.open(sys.argv[1], 'loop', Loop())\n"
        "child = os.fork()\n"
        # The child speaks, not the owner: only then has it let go of what it inherited.
        "if child == 0:\n    print(os.getpid(), flush=True)\n    time.sleep(30)\n    os._exit(0)\n"
        "time.sleep(30)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "run")],
        env=ENVIRONMENT,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    child = int(owner.stdout.readline())
    try:
        with pytest.raises(RunError, match="in use"):
            Run.open(tmp_path / "run", "loop", Settings(), resume=True)
        owner.kill(), owner.wait()
        with pytest.raises(RunError, match="started with"):  # past the lock: only the settings differ
            Run.open(tmp_path / "run", "loop", Settings(), resume=True)
    finally:
        os.kill(child, 9)


def test_abandon_leaves_nothing_of_a_run_that_came_to_nothing(tmp_path):
    run = Run.open(tmp_path / "a" / "b", "kl", Settings())
    run.stage("one", 3).log(1, loss=1.0)
    run.abandon()
    run.close()
    assert not (tmp_path / "a").exists()
    run = Run.open(tmp_path / "a", "kl", Settings())
    run.stage("one", 1).finish({})
    run.abandon()
    run.close()
    assert (tmp_path / "a" / "stages" / "one.json").exists()
    run, inner = (
        Run.open(tmp_path / "c", "figure", Settings()),
        Run.open(tmp_path / "c" / "runs" / "1", "kl", Settings()),
    )
    inner.close()
    run.abandon()
    run.close()
    Run.open(
        tmp_path / "c", "figure", Settings(), resume=True
    ).close()  # a run of runs, none of which has come to an end


# --------------------------------------------------------------------------------------------------- kills


@pytest.mark.parametrize("seed", range(3))
def test_killed_anywhere_and_resumed(tmp_path, uninterrupted, seed):
    """SIGKILL at random moments, again and again, until it is through: the same bytes as without."""
    out = tmp_path / "run"
    done = play(out, "--kills", 8, "--seed", seed)
    assert done.stdout.count("begun") >= 3  # most of the kills hit a run at work
    assert lasting(out) == uninterrupted


@pytest.mark.parametrize("moment", ["state written", "state renamed", "manifest written", "stage recorded"])
def test_killed_between_two_steps_of_a_save(tmp_path, moment, capfd):
    """The four gaps of a commit, each hit exactly: what is on disk then loads."""

    class Killed(BaseException):
        pass

    real_replace, seen = os.replace, []

    def replace(source, target):
        seen.append(Path(target).name)
        hit = {"state written": "a-000002.pt", "manifest written": "a-000002.json", "stage recorded": "a.json"}
        if Path(target).name == hit.get(moment):
            raise Killed
        real_replace(source, target)
        if moment == "state renamed" and Path(target).name == "a-000002.pt":
            raise Killed

    patch = pytest.MonkeyPatch()
    run = Run.open(tmp_path, "kl", Settings())
    stage = run.stage("a", 3)
    with patch.context() as context:
        context.setattr(runs.os, "replace", replace)
        with pytest.raises(Killed):
            for step in (1, 2, 3):
                stage.log(step, value=step)
                stage.save({"step": step}, step)
            stage.finish({})
    run.close()
    with Run.open(tmp_path, "kl", Settings(), resume=True) as run:
        stage = run.stage("a", 3)
        step = stage.restore()["step"]
        assert step == (3 if moment == "stage recorded" else 1)
        for later in range(step, 3):
            stage.log(later + 1, value=later + 1)
        assert [json.loads(line)["value"] for line in stage.metrics_path.read_text().splitlines()] == [1, 2, 3]
        stage.finish({"done": True})
    assert not list((tmp_path / "state").glob("a-*"))
    assert capfd.readouterr().err == ""


# ------------------------------------------------------------------------------------- Ctrl-C, and full disks


@pytest.fixture
def recipe(monkeypatch, tmp_path, ask):
    """`etude run recipe` in which the given function of a run is all there is: exit code, stderr, folder."""

    def played(play, *words: object):
        from recipe.small import stages

        monkeypatch.setattr(stages, "run", lambda run, config: play(run))
        code, _, error = ask("run", "recipe", "--out", tmp_path / "run", *words)
        return code, error, tmp_path / "run"

    return played


def test_ctrl_c_while_a_state_is_written(recipe, monkeypatch, interruptible):
    """It waits until the state is whole: exit code 130 and the line that says how to go on, and nothing half
    written."""
    real, written = torch.save, []

    class Pressed:
        def __init__(self, file):
            self.file = file

        def write(self, block):
            written.append(len(block))
            if len(written) == 4:
                os.kill(os.getpid(), signal.SIGINT)
            return self.file.write(block)

        def flush(self):
            self.file.flush()

    def play(run):
        stage = run.stage("rl", 9)
        stage.log(1, loss=1.0)
        stage.save({"step": 1, "weight": torch.ones(1000)}, 1)
        monkeypatch.setattr(torch, "save", lambda state, file: real(state, Pressed(file)))
        stage.log(2, loss=0.5)
        stage.save({"step": 2, "weight": torch.ones(1000)}, 2)

    code, error, out = recipe(play)
    assert (code, error) == (130, f"interrupted; continue with: etude run recipe --out {out} --resume\n") and len(
        written
    ) > 4
    assert {path.name for path in (out / "state").iterdir()} == {
        f"rl-00000{n}.{e}" for n in (1, 2) for e in ("pt", "json")
    }
    monkeypatch.setattr(torch, "save", real)
    found = []
    assert recipe(lambda run: found.append(run.stage("rl", 9).restore()), "--resume")[0] == 0
    assert found[0]["step"] == 2 and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_is_ignored_where_it_was(monkeypatch):
    """As under nohup, or in a shell's background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with process.uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_a_kill_left_half_written_is_swept(tmp_path):
    out = interrupted(tmp_path / "run")
    for name in (".tmp-report.json", "state/.tmp-rl-000033.pt", "stages/.tmp-rl.json"):
        (out / name).write_bytes(b"half")
    (out / "mine").mkdir()
    (out / "mine" / ".tmp-letter").write_text("dear")
    Run.open(out, "kl", Settings(), resume=True).close()
    assert [path.name for path in out.rglob(".tmp-*")] == [".tmp-letter"]
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / ".tmp-mine").write_text("not a run's")
    Run.open(tmp_path / "new", "kl", Settings()).close()
    assert (tmp_path / "new" / ".tmp-mine").exists()


@contextlib.contextmanager
def room(size: int):
    """No file grows beyond so many bytes meanwhile: writes are short, then refused, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fill_weights(run: Run, stage: Stage) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(200_000)}, run.path("checkpoints", "final", "model.safetensors"))


def fill_tokenizer(run: Run, stage: Stage) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({f"word{i}": i for i in range(20_000)}, "word0")).save(str(run.path("data", "tokenizer.json")))


def fill_metrics(run: Run, stage: Stage) -> None:
    for step in range(2, 99):
        stage.log(step, words="x" * 5000)


def fill_events(run: Run, stage: Stage) -> None:
    for step in range(2, 999):
        stage.board.add({f"{'x' * 400}{i}": 1.0 for i in range(20)}, step)


FILLED = {
    "state": lambda run, stage: stage.save({"step": 2, "weight": torch.zeros(200_000)}, 2),
    "weights": fill_weights,
    "tokenizer": fill_tokenizer,
    "metrics": fill_metrics,
    "events": fill_events,
    "arrays": lambda run, stage: numpy.savez(run.path("data", "long.npz"), x=numpy.zeros(200_000)),
    "result": lambda run, stage: stage.finish({"text": "x" * 200_000}),
}


@pytest.mark.parametrize("what", list(FILLED))
@pytest.mark.parametrize("saved", [False, True], ids=["new", "saved"])
def test_a_full_disk_is_one_line(recipe, what, saved):
    """Whatever met it, and in whatever words; what was saved before is gone on with, and what came to nothing leaves
    nothing."""

    def play(run):
        stage = run.stage("rl", 9)
        stage.log(1, loss=1.0)
        if saved:
            stage.save({"step": 1}, 1)
        with room(65_536):
            FILLED[what](run, stage)

    code, error, out = recipe(play)
    assert code == 2 and error.count("\n") == 1 and error.startswith("error: File too large: "), error
    assert (
        out.exists() == saved
        and error.endswith(f"free some space, then continue with: etude run recipe --out {out} --resume\n") == saved
    )
    assert not saved or not list(out.rglob(".tmp-*"))
    found = []
    assert recipe(lambda run: found.append(run.stage("rl", 9).restore()), "--resume")[0] == 0
    assert found == [{"step": 1} if saved else None]


def test_a_state_says_where_the_metrics_really_end(tmp_path):
    """A write may take less than it is given. The rest is written too, or the line leaves nothing behind."""
    with Run.open(tmp_path, "kl", Settings()) as run:
        stage = run.stage("rl", 9)
        stage.log(1, loss=1.0)
        stage.save({"step": 1}, 1)
        with room(stage.metrics_path.stat().st_size + 10), pytest.raises(OSError, match="too large"):
            stage.log(2, loss=0.5)
        stage.log(2, loss=0.25)
        stage.save({"step": 2}, 2)
    manifest = json.loads((tmp_path / "state" / "rl-000002.json").read_text())
    assert manifest["metrics_bytes"] == stage.metrics_path.stat().st_size
    assert [json.loads(line)["loss"] for line in stage.metrics_path.read_text().splitlines()] == [1.0, 0.25]
    with Run.open(tmp_path, "kl", Settings(), resume=True) as run:
        assert run.stage("rl", 9).restore() == {"step": 2}


@given(st.lists(st.tuples(st.binary(max_size=40), st.lists(st.integers(1, 8), max_size=6), st.booleans()), max_size=12))
def test_a_journal_holds_whole_entries(tmp_path_factory, entries):
    """However little each write takes, and wherever the disk then refuses more."""
    path = tmp_path_factory.mktemp("journal") / "file"
    journal, whole = disk.Journal(path), b""
    real = journal.file

    class Slow:
        def __init__(self, takes, refuses):
            self.takes, self.refuses = iter(takes), refuses

        def write(self, block):
            take = next(self.takes, None)
            if take is None and self.refuses:
                raise OSError(28, "No space left on device")
            return real.write(block[:take])

        fileno, truncate, close = real.fileno, real.truncate, real.close

    for entry, takes, refuses in entries:
        journal.file = Slow(takes, refuses)
        if refuses and sum(takes) < len(entry):
            with pytest.raises(OSError):
                journal.append(entry)
        else:
            journal.append(entry)
            whole += entry
        assert path.read_bytes() == whole
    journal.close()


@pytest.mark.parametrize(
    "line",
    [
        '{"a": 1}',
        "[1, 2]",
        "3",
        '{"stage": "rl"}',
        '{"seconds": 3}',
        '{"stage": "rl", "seconds": "long"}',
        '{"stage": ["rl"], "seconds": 3}',
        '{"stage": "rl", "seconds": NaN}',
        '{"stage": "rl", "seconds": -1e9}',
        '{"stage": "rl", "seconds": 99, "peak_memory_gib": "much"}',
        "\udc80",
        "{" * 99,
    ],
)
def test_a_foreign_line_among_the_timings_is_passed_over(tmp_path, line):
    from etude.ledger import gain
    from etude.report import record

    with Run.open(tmp_path, "kl", Settings()) as run:
        run.stage("rl", 1).finish({})
    spent = run.seconds()
    with open(tmp_path / "timings.jsonl", "a", errors="surrogateescape") as file:
        file.write(line + "\n")
    with Run.open(tmp_path, "kl", Settings(), resume=True) as run:
        assert run.stage("rl", 1).finished and run.seconds() == spent == record.collect(tmp_path)["seconds"]
    assert len(gain.timings(tmp_path)) == 1


def test_events_are_read_by_tensorboard(tmp_path):
    """What a resumed run logs again takes the place of what the dead one logged after its last state."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for loss, steps in ((1.0, 4), (2.0, 6)):
        with Run.open(tmp_path, "kl", Settings(), resume=True) as run:
            stage = run.stage("rl", 9)
            state = stage.restore()
            for step in range(state["step"] if state else 0, steps):
                stage.log(step + 1, loss=loss, name="x", on=True, none=None)
                if step + 1 == 2:
                    stage.save({"step": 2}, 2)
    events = EventAccumulator(str(tmp_path / "tensorboard" / "rl")).Reload()
    assert events.Tags()["scalars"] == ["rl/loss"]
    assert [(event.step, event.value) for event in events.Scalars("rl/loss")] == [
        (1, 1.0),
        (2, 1.0),
        (3, 2.0),
        (4, 2.0),
        (5, 2.0),
        (6, 2.0),
    ]


# -------------------------------------------------------------------------------------------------- damage


def interrupted(out: Path) -> Path:
    """A run whose stage has states at steps 20 and 30 and metrics up to 33."""
    with Run.open(out, "kl", Settings()) as run:
        stage = run.stage("rl", 40)
        for step in range(1, 34):
            stage.log(step, loss=1 / step)
            if step % 10 == 0:
                stage.save({"step": step, "weight": torch.full((100,), float(step))}, step)
    assert {p.name for p in (out / "state").glob("*")} == {f"rl-0000{n}0.{e}" for n in "23" for e in ("pt", "json")}
    return out


def cut(path: Path, keep: float) -> None:
    os.truncate(path, int(path.stat().st_size * keep))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda out: cut(out / "state/rl-000030.pt", 0.5), "rl-000030.pt is damaged (it is cut short"),
        (lambda out: cut(out / "state/rl-000030.pt", 0), "rl-000030.pt is damaged (it is cut short: 0 of"),
        (lambda out: flip(out / "state/rl-000030.pt"), "rl-000030.pt is damaged (its content has changed"),
        (lambda out: (out / "state/rl-000030.pt").unlink(), "rl-000030.pt is damaged (it is missing"),
        (lambda out: cut(out / "state/rl-000030.json", 0.5), "rl-000030.pt is damaged (its manifest rl-000030.json"),
        (lambda out: cut(out / "state/rl-000030.json", 0), "rl-000030.pt is damaged (its manifest rl-000030.json"),
        (lambda out: cut(out / "metrics/rl.jsonl", 0.7), "metrics/rl.jsonl are damaged (it is cut short"),
        (lambda out: (out / "state/rl-000030.pt").write_bytes(b"x" * 9999999), "instead of"),
    ],
    ids=["half", "empty", "bit", "missing", "manifest half", "manifest empty", "metrics", "longer"],
)
def test_damage_is_named_and_the_previous_state_loads(tmp_path, capfd, harm, says):
    out = interrupted(tmp_path / "run")
    harm(out)
    with Run.open(out, "kl", Settings(), resume=True) as run:
        stage = run.stage("rl", 40)
        state = stage.restore()
        error = capfd.readouterr().err
        assert state["step"] == 20 and state["weight"].eq(20.0).all()
        assert error.count("\n") == 1 and says in error and "continuing from rl-000020.pt" in error
        assert len(stage.metrics_path.read_text().splitlines()) == 20
        for step in range(21, 36):
            stage.log(step, loss=1 / step)
            if step == 25:
                stage.save({"step": 25}, 25)
    assert {p.name for p in (out / "state").glob("*")} == {f"rl-0000{n}.{e}" for n in (20, 25) for e in ("pt", "json")}


@pytest.mark.parametrize(
    "harm",
    [
        lambda out: [cut(path, 0.5) for path in (out / "state").glob("*.pt")],
        lambda out: [cut(path, 0.5) for path in (out / "state").glob("*.json")],
        lambda out: cut(out / "metrics/rl.jsonl", 0.1),
        lambda out: (out / "metrics/rl.jsonl").unlink(),
        lambda out: flip_first(out / "metrics/rl.jsonl"),
    ],
    ids=["states", "manifests", "metrics cut", "metrics gone", "metrics changed"],
)
def test_no_whole_state_left(tmp_path, capfd, harm):
    out = interrupted(tmp_path / "run")
    harm(out)
    before = tree(out)
    with Run.open(out, "kl", Settings(), resume=True) as run:
        with pytest.raises(RunError, match=r"damaged.*no earlier one is intact; delete .*rl-\*"):
            run.stage("rl", 40).restore()
    assert tree(out) == before
    for path in (out / "state").glob("rl-*"):  # what the message says to do
        path.unlink()
    with Run.open(out, "kl", Settings(), resume=True) as run:
        assert run.stage("rl", 40).restore() is None
        assert (out / "metrics/rl.jsonl").read_bytes() == b""


def flip_first(path: Path) -> None:
    path.write_bytes(b"[" + path.read_bytes()[1:])


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda out: cut(out / "metrics/a.jsonl", 0.9), "metrics/a.jsonl is damaged (it is cut short"),
        (lambda out: flip_first(out / "metrics/a.jsonl"), "metrics/a.jsonl is damaged (its content"),
        (lambda out: cut(out / "stages/a.json", 0.9), "stages/a.json is damaged"),
        (lambda out: cut(out / "checkpoints/a/model.bin", 0.5), "checkpoints/a/model.bin is damaged (it is cut short"),
    ],
)
def test_a_finished_stage_is_checked(tmp_path, harm, says):
    with Run.open(tmp_path, "kl", Settings()) as run:
        stage = run.stage("a", 1)
        stage.log(1, loss=0.5)
        run.path("checkpoints", "a", "model.bin").write_bytes(b"123456")
        stage.finish({"x": 1.5}, files=[tmp_path / "checkpoints" / "a"])
    with Run.open(tmp_path, "kl", Settings(), resume=True) as run:
        assert run.stage("a", 1).finished and run.stage("a", 1).result() == {"x": 1.5}
    harm(tmp_path)
    with Run.open(tmp_path, "kl", Settings(), resume=True) as run:
        with pytest.raises(RunError) as raised:
            run.stage("a", 1)
    assert says in str(raised.value) and "delete" in str(raised.value) and "\n" not in str(raised.value)


def test_a_stage_whose_name_begins_like_another_one_s_keeps_its_states(tmp_path):
    with Run.open(tmp_path, "kl", Settings()) as run:
        for name in ("rl-late", "rl"):
            stage = run.stage(name, 3)
            for step in (1, 2, 3):
                stage.save({"name": name, "step": step}, step)
    assert len([*(tmp_path / "state").glob("*.pt")]) == 4
    with Run.open(tmp_path, "kl", Settings(), resume=True) as run:
        assert run.stage("rl", 3).restore() == {"name": "rl", "step": 3}
        run.stage("rl", 3).finish({})
        assert run.stage("rl-late", 3).restore() == {"name": "rl-late", "step": 3}


def test_a_state_that_is_written_again_and_not_to_its_end(tmp_path, monkeypatch):
    """Step 2 is saved anew with other values, and the process is killed when the new file lies there: its old manifest
    must not vouch for it, and it need not be damaged to be passed over."""

    class Killed(BaseException):
        pass

    def write(path, content):
        raise Killed

    with Run.open(tmp_path, "kl", Settings()) as run:
        stage = run.stage("rl", 3)
        stage.save({"step": 1}, 1), stage.save({"step": 2}, 2)
        monkeypatch.setattr(runs, "atomic_write", write)
        with pytest.raises(Killed):
            stage.save({"step": 2, "more": 1}, 2)
        monkeypatch.undo()
    assert [path.name for path in (tmp_path / "state").glob("*.json")] == ["rl-000001.json"]
    with Run.open(tmp_path, "kl", Settings(), resume=True) as run:
        assert run.stage("rl", 3).restore() == {"step": 1}


# --------------------------------------------------------------------------------------------- small print


def test_metrics_are_exact_and_valid_json(tmp_path):
    with Run.open(tmp_path, "kl", Settings()) as run:
        stage = run.stage("a", 2)
        stage.log(
            1, pi=0.1 + 0.2, t=torch.tensor(3), n=numpy.float32(0.5), bad=float("nan"), far=-float("inf"), many=[1.0, 2]
        )
        stage.save({}, 1)
        with pytest.raises(RuntimeError, match="not finished"):
            stage.result()
        stage.finish({"array": numpy.arange(2)})
        with pytest.raises(RuntimeError, match="over"):
            stage.log(2, pi=0)
    line = (tmp_path / "metrics" / "a.jsonl").read_text()
    assert (
        line == '{"step": 1, "pi": 0.30000000000000004, "t": 3, "n": 0.5, "bad": null, "far": null, "many": [1.0, 2]}\n'
    )
    assert list((tmp_path / "tensorboard" / "a").glob("events*"))


def test_random_generators_come_back(tmp_path):
    def draw():
        return random.random(), float(numpy.random.rand()), float(torch.rand(())), float(numpy.random.randn())

    with Run.open(tmp_path, "kl", Settings()) as run:
        draw()
        run.stage("a", 2).save({"rng": process.pack_rng(), "own": numpy.random.default_rng(3).bit_generator.state}, 1)
        expected = draw()
    with Run.open(tmp_path, "kl", Settings(), resume=True) as run:
        draw()
        state = run.stage("a", 2).restore()
        process.restore_rng(state["rng"])
        assert draw() == expected
        assert state["own"] == numpy.random.default_rng(3).bit_generator.state


def test_a_state_cannot_run_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/ran",)

    with Run.open(tmp_path / "run", "kl", Settings()) as run:
        run.stage("a", 2).save({"x": Evil()}, 1)
    with Run.open(tmp_path / "run", "kl", Settings(), resume=True) as run:
        with pytest.raises(RunError, match="a-000001.pt"):
            run.stage("a", 2).restore()
    assert not (tmp_path / "ran").exists()


def test_seconds_add_up_over_resumes(tmp_path):
    for _ in range(2):
        with Run.open(tmp_path, "kl", Settings(), resume=True) as run:
            stage = run.stage("a", 2)
            time.sleep(0.03)
            stage.progress(1)
    assert 0.05 < run.seconds()["a"] < 5


def test_seconds_by_hand(tmp_path):
    """Each line says how many there were up to it; a resumed stage begins with what was spent before."""
    lines = [("rl", 3.0), ("rl", 5.5), ("cpt", 1.0), ("rl", 4.0)]
    (tmp_path / "timings.jsonl").write_text(
        "".join(json.dumps({"stage": s, "seconds": n}) + "\n" for s, n in lines)
        + '{"stage": "rl", "seconds": Infinity}\n'
    )
    assert disk.sum_stage_seconds(tmp_path) == {"rl": 5.5, "cpt": 1.0}


def test_a_torn_end_is_seen_and_the_next_line_has_one_of_its_own(tmp_path):
    with contextlib.closing(disk.Journal(tmp_path / "file")) as journal:
        assert not journal.torn()
        journal.append(b'{"a": 1}\n')
        assert not journal.torn()
        journal.append(b'{"b"')
        assert journal.torn()
    with Run.open(tmp_path / "run", "kl", Settings()) as run:
        (run.root / "timings.jsonl").write_text('{"stage": "rl", "sec')
        run.stage("rl", 1).note_time(step=1)
        run.stage("rl", 1).note_time(step=2)
    assert [line["step"] for line in disk.timings(tmp_path / "run")] == [1, 2]


def test_the_system_s_error_behind_another_one():
    assert disk.refusal(Exception("I/O error: No space left on device (os error 28)")).errno == 28
    assert disk.refusal(error := OSError(28, "x")) is error
    for other in (ValueError("(os error 28)"), RunError("(os error 28)"), Exception("28")):
        assert disk.refusal(other) is None


def test_due_follows_the_clock(tmp_path):
    with Run.open(tmp_path, "kl", Settings(), checkpoint_seconds=0.05) as run:
        stage = run.stage("a", 2)
        assert not stage.due()
        time.sleep(0.06)
        assert stage.due()
        stage.save({}, 1)
        assert not stage.due()


def test_lines_of_a_file_that_a_kill_cut_anywhere(tmp_path):
    """Whole lines are read, the torn one is not, wherever it was torn: within a character too."""
    lines, path = (
        [{"step": 1, "loss": 0.1}, {"step": 2, "text": "é\u2028}\x1c"}, {"step": 3, "of": {"a": [1]}}],
        tmp_path / "metrics.jsonl",
    )
    ends, whole = [0], b""
    for line in lines:
        whole += json.dumps(line, ensure_ascii=False).encode() + b"\n"
        ends.append(len(whole))
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        assert disk.read_lines(path) == lines[: sum(end - 1 <= size for end in ends[1:])]
    path.write_bytes(whole[: ends[2] + 3] + b"\n[4]\n" + whole[ends[2] :])
    assert disk.read_lines(path) == lines, "what is torn or no object is passed over, and reading goes on"
    assert disk.read_lines(tmp_path / "none") == []


def test_atomic_write_keeps_the_old_content_on_failure(tmp_path, monkeypatch):
    path = tmp_path / "file"
    disk.atomic_write(path, "old")
    monkeypatch.setattr(runs.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError):
        disk.atomic_write(path, b"new")
    assert path.read_text() == "old" and [*tmp_path.iterdir()] == [path]


def test_machine_tells_no_names():
    facts = json.dumps(process.machine())
    assert str(ROOT) not in facts and os.uname().nodename not in process.machine().values()
    assert process.peak_memory_gib() > 0.05
