"""`--log trackio|wandb`: what TensorBoard has, and nothing without being asked. Small modules stand in for the
packages."""

import importlib.machinery
import os
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from kit import tracking
from kit.runs import Run
from kit.settings import RunError


@dataclass(frozen=True)
class Settings:
    seed: int = 0
    rate: float = 0.5


class Kept:
    """A run of a package: what it was begun with, and each call."""

    def __init__(self, facts):
        self.facts, self.rows, self.axes, self.ended = facts, [], {}, 0

    def log(self, metrics, step=None):
        self.rows.append((step, metrics))

    def define_metric(self, name, **how):
        self.axes[name] = how

    def finish(self):
        self.ended += 1


@pytest.fixture
def packages(monkeypatch):
    """Both packages, with the runs that they were asked for."""
    monkeypatch.delenv(tracking.VARIABLE, raising=False)
    for name in ("WANDB_MODE", "WANDB_ERROR_REPORTING"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    made = {}
    for name in tracking.KINDS:
        module, runs = types.ModuleType(name), []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)

        def init(runs=runs, **facts):
            runs.append(Kept(facts))
            return runs[-1]

        module.init, module.Settings = init, lambda **how: how
        monkeypatch.setitem(sys.modules, name, module)
        made[name] = runs
    return made


def logged(kept: Kept) -> set:
    """(name, step, value) of all that a run was given; a stage's step is where wandb has it."""
    found = set()
    for step, row in kept.rows:
        axes = {name for name in row if name.endswith("/step")}
        at = step if step is not None else row[next(iter(axes))]
        found |= {(name, at, value) for name, value in row.items() if name not in axes}
    return found


def on_board(root: Path) -> set:
    found = set()
    for folder in (root / "tensorboard").iterdir():
        board = EventAccumulator(str(folder)).Reload()
        found |= {(tag, event.step, event.value) for tag in board.Tags()["scalars"] for event in board.Scalars(tag)}
    return found


def play(root: Path, stages=("cpt", "rl"), steps=3, resume=False) -> None:
    with Run.open(root, "toy", Settings(), resume) as run:
        for stage in (run.stage(name, steps) for name in stages):
            for step in range(1, steps + 1):
                stage.log(step, loss=1.0 / 2**step, reward=step, text="no number", nothing=None, ok=True)
            stage.finish({})


@pytest.mark.parametrize("kind", tracking.KINDS)
def test_a_package_gets_what_tensorboard_gets(kind, packages, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with tracking.logged_to(kind):
        play(Path("runs/toy"))
    (kept,) = packages[kind]
    assert logged(kept) == on_board(Path("runs/toy")) and ("rl/reward", 3, 3.0) in logged(kept)
    assert kept.ended == 1 and not packages["wandb" if kind == "trackio" else "trackio"]
    assert (kept.facts["project"], kept.facts["name"], kept.facts["group"]) == ("etude", "toy", "toy")
    assert kept.facts["config"] == {"seed": 0, "rate": 0.5} and tracking.VARIABLE not in os.environ


def test_nothing_is_logged_unasked(packages, tmp_path):
    play(tmp_path / "toy")
    assert packages == {"trackio": [], "wandb": []}


def test_a_run_of_wandb_is_offline_unless_the_environment_says_otherwise(packages, tmp_path, monkeypatch, capsys):
    with tracking.logged_to("wandb"):
        play(tmp_path / "one")
        assert os.environ["WANDB_ERROR_REPORTING"] == "false" and "wandb: offline, in" in capsys.readouterr().out
        monkeypatch.delenv("WANDB_ERROR_REPORTING")
        monkeypatch.setenv("WANDB_MODE", "online")
        play(tmp_path / "two")
    one, two = packages["wandb"]
    assert (one.facts["mode"], two.facts["mode"]) == ("offline", None) and "WANDB_ERROR_REPORTING" not in os.environ
    assert one.facts["id"] != two.facts["id"] and one.facts["dir"] == str(tmp_path / "one")
    axes = {"cpt/step": None, "cpt/*": "cpt/step", "rl/step": None, "rl/*": "rl/step"}
    assert {name: how.get("step_metric") for name, how in one.axes.items()} == axes


def test_a_block_within_another_leaves_the_outer_choice(packages):
    with tracking.logged_to("wandb"):
        with tracking.logged_to("trackio"), tracking.logged_to(None):
            assert os.environ[tracking.VARIABLE] == "trackio"
        assert os.environ[tracking.VARIABLE] == "wandb"
    assert tracking.VARIABLE not in os.environ


def test_metrics_of_two_stages_each_have_the_axis_of_their_own(packages, tmp_path):
    """By hand: one call with both, as a run within a run may make."""
    with tracking.logged_to("wandb"):
        tracker = tracking.open_tracker(tmp_path, "toy", {}, False)
        tracker.add({"cpt/loss": 1.0, "rl/reward": 2.0, "rl/a/b": 3.0}, 7)
        tracker.close()
    (kept,) = packages["wandb"]
    rows = [{"cpt/loss": 1.0, "cpt/step": 7}, {"rl/reward": 2.0, "rl/step": 7}, {"rl/a/b": 3.0, "rl/a/step": 7}]
    assert kept.rows == [(None, row) for row in rows]


def test_a_run_that_goes_on_goes_on_there(packages, tmp_path, monkeypatch):
    """The same name and, for wandb, the same id; a new run in a folder that was deleted is another one."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    for kind in tracking.KINDS:
        root = tmp_path / kind
        with tracking.logged_to(kind):
            play(root, ["cpt"])
            play(root, ["rl"], resume=True)
            first, second = packages[kind]
            assert first.facts["name"] == second.facts["name"] == kind and second.facts["resume"] == "allow"
            assert first.facts.get("id") == second.facts.get("id")
            for path in sorted(root.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            play(root, ["cpt"])
        third = packages[kind][2]
        assert third.facts["resume"] == "never" if kind == "trackio" else third.facts["id"] != first.facts["id"]


@settings(max_examples=15)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=8))
def test_runs_within_runs_share_the_one_that_trackio_has(order):
    """However runs take turns, each row is in a run of its own name: trackio ends one where another begins."""
    open_now, rows = [], []

    def init(name, **_):
        open_now[:] = [name]

        def log(row, step):
            rows.append((open_now[0], name, step))

        return types.SimpleNamespace(log=log, finish=lambda: None)

    fake = types.ModuleType("trackio")
    fake.__spec__, fake.init = importlib.machinery.ModuleSpec("trackio", None), init
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "trackio", fake)
        patch.setenv(tracking.VARIABLE, "trackio")
        runs = [tracking.open_tracker(Path(f"/nowhere/{n}"), "toy", {}, False) for n in range(3)]
        for step, n in enumerate(order):
            runs[n].add({"x/y": 1.0}, step)
        for run in runs:
            run.close()
    assert rows == [(str(n), str(n), step) for step, n in enumerate(order)]


def test_only_a_folder_below_runs_is_named(tmp_path, monkeypatch):
    """What is logged holds no other path of this machine."""
    monkeypatch.chdir(tmp_path)
    assert (
        tracking.name_of(Path("runs/figure/mtp"))
        == "figure/mtp"
        == tracking.name_of(tmp_path / "runs" / "figure" / "mtp")
    )
    assert tracking.name_of(tmp_path / "elsewhere" / "toy") == "toy" and tracking.name_of(Path("runs")) == "runs"


BAD = [
    ("zebra", "--log expects trackio or wandb, got 'zebra'"),
    ("wandb", "--log wandb needs the package wandb: pip install wandb, or in the clone: pip install -e '.[log]'"),
    ("trackio", "--log trackio needs the package trackio: pip install trackio, or"),
]


@pytest.mark.parametrize(("kind", "says"), BAD, ids=[kind for kind, _ in BAD])
@pytest.mark.parametrize(
    "words",
    [["run", "kl"], ["figure", "kl-variance"], ["run", "cpt", "--scale", "full", "--backend", "gloo"]],
    ids=" ".join,
)
def test_what_is_missing_is_said_in_a_line(kind, says, words, tmp_path, monkeypatch, ask):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, out, error = ask(*words, "--log", kind)
    assert code == 2 and out == "" and error.startswith("error: ") and says in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_command_logs_and_a_refusal_leaves_nothing(packages, tmp_path, monkeypatch, ask):
    import ref.kl

    def demo(config, log):
        log(1, 1, kl=0.25)
        return {"kl": 0.25}

    monkeypatch.setattr(ref.kl, "demo", demo)
    assert ask("run", "kl", "--log", "wandb", "--out", tmp_path / "kl")[0] == 0
    (kept,) = packages["wandb"]
    assert logged(kept) == {("demo/kl", 1, 0.25)} and kept.ended == 1

    def refuses(**_):
        raise ValueError("no API key\nis configured")

    monkeypatch.setattr(sys.modules["wandb"], "init", refuses)
    code, _, error = ask("run", "kl", "--log", "wandb", "--out", tmp_path / "other")
    assert (code, error) == (2, "error: --log wandb: no API key is configured; go on without --log, or mend it\n")
    assert not (tmp_path / "other").exists()
    with pytest.raises(RunError), tracking.logged_to("nothing"):
        pass
