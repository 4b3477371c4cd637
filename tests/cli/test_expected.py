"""How long something takes is said only where it was measured; a command ends with commands that exist."""

import itertools
import json
import re
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from environments.tasks.package import Package
from etude import catalog
from etude.cli import results as result_commands
from etude.console import expected, next_steps
from etude.console.progress_line import Line
from etude.explorer import examples as explorer_examples
from etude.tasks import task_times
from kit.disk import seal_record
from kit.process import machine
from kit.runs import Run
from sims.examples import runs as examples
from tests.test_readme import wrong


@dataclass(frozen=True)
class Part:
    steps: tuple[int, ...] = (1, 2)


@dataclass(frozen=True)
class Settings:
    seed: int = 0
    rate: float = 0.5
    part: Part = field(default_factory=Part)


def finished(root: Path, config=None, technique="toy", seconds=(600.0, 900.0), over=True, box=None) -> Path:
    """A run with two stages that took so long."""
    with Run.open(root, technique, config or Settings()) as run:
        for name, took in zip(("cpt", "rl"), seconds):
            run.stage(name, 1).finish({})
            (root / "timings.jsonl").unlink()
    lines = [
        {"stage": name, "seconds": took, **({"finished": True} if over else {})}
        for name, took in zip(("cpt", "rl"), seconds)
    ]
    (root / "timings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (root / "report.json").write_text("{}")
    if box is not None:
        record = json.loads((root / "config.json").read_text())
        (root / "config.json").write_text(json.dumps(seal_record({**record, "machine": {**record["machine"], **box}})))
    return root


def said(capsys, root="runs/new", config=None, technique="toy", done=()) -> str:
    """What is told at the start of a run, with these stages done already."""
    with Run.open(Path(root), technique, config or Settings(seed=7)) as run:
        for name in done:
            run.stage(name, 1).finish({})
        capsys.readouterr()
        expected.tell(run)
    shutil.rmtree(root)
    return capsys.readouterr().out


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_takes_as_long_as_one_like_it(home, capsys):
    """Whatever its seed; where it lies in runs/, or beside the new one."""
    finished(home / "runs" / "old")
    assert said(capsys) == "expected: 25 min, as the run in runs/old took on this machine\n"
    assert said(capsys, done=["cpt"]) == "expected: 15 min more, as the run in runs/old took on this machine\n"
    assert said(capsys, done=["cpt", "rl"]) == ""
    shutil.move(home / "runs" / "old", home / "elsewhere" / "old")
    assert said(capsys) == "" and "as the run in elsewhere/old" in said(capsys, "elsewhere/new")


def test_no_guess_is_made_from_what_is_not_alike(home, capsys):
    """Other settings, another technique, another machine, a run that has not ended, one that is damaged, one of
    seconds."""
    unlike = {
        "settings": {"config": Settings(rate=0.25)},
        "inner": {"config": Settings(part=Part((1, 3)))},
        "technique": {"technique": "other"},
        "machine": {"box": {"cpu": "an abacus"}},
        "cores": {"box": {"cores": machine()["cores"] + 1}},
        "unfinished": {"over": False},
        "short": {"seconds": (3.0, 4.0)},
    }
    for name, how in unlike.items():
        finished(home / "runs" / name, **how)
    for name, text in (
        ("damaged", "{"),
        ("list", "[]"),
        ("odd", '{"technique": "toy", "config": {"rate": "x"}, "machine": 3}'),
    ):
        (home / "runs" / name).mkdir()
        (home / "runs" / name / "config.json").write_text(text)
    assert said(capsys) == ""
    finished(home / "runs" / "alike")
    assert "as the run in runs/alike took" in said(capsys)
    (home / "runs" / "alike" / "report.json").unlink()
    assert said(capsys) == ""


def test_ranks_are_compared_and_a_run_that_says_nothing_of_itself_is_not_announced(home, capsys):
    finished(home / "runs" / "alike")
    (home / "runs" / "alike" / "report.json").write_text('{"ranks": 8, "backend": "nccl"}')
    capsys.readouterr()
    for ranks, says in ((8, "expected: 25 min, as the run in runs/alike"), (1, "")):
        with Run.open(home / "runs" / "new", "toy", Settings(seed=7)) as run:
            expected.tell(run, ranks=ranks, backend="nccl")
        assert capsys.readouterr().out.startswith(says) and (says or not capsys.readouterr().out)
        if ranks == 8:
            with Run.open(
                home / "runs" / "new", "toy", Settings(seed=7), True
            ) as run:  # begun, and nothing says how far it came
                expected.tell(run, ranks=8, backend="nccl")
            assert capsys.readouterr().out == ""
        shutil.rmtree(home / "runs" / "new")


def test_without_a_run_the_committed_record_names_its_machine(home, capsys, monkeypatch):
    record = {
        "config": {"seed": 3, "rate": 0.5},
        "seconds": {"cpt": 4000.0, "rl": 4000.0},
        "machine": {"cpu": "Abacus", "cores": 1},
    }
    monkeypatch.setattr(expected, "COMMITTED", home)
    (home / "figures").mkdir()
    (home / "figures" / "toy.json").write_text(json.dumps(record))
    assert (
        said(capsys, technique="figure toy")
        == "expected: 2.2 h, as it took on 1 core (Abacus), see results/figures/toy.json\n"
    )
    assert (
        said(capsys, technique="figure toy", config=Settings(rate=1.0)) == "" == said(capsys, technique="figure other")
    )
    (home / "recipe-small.json").write_text(json.dumps(record))
    (home / "examples" / "recipe").mkdir(parents=True)
    (home / "examples" / "recipe" / "report.json").write_text(
        json.dumps({**record, "config": {"rate": 1.0}, "seconds": {"rl": 3600.0 * 3}})
    )
    assert "2.2 h" in said(capsys, technique="recipe") and "recipe-small.json" in said(capsys, technique="recipe")
    assert "3.0 h" in said(capsys, technique="recipe", config=Settings(rate=1.0))
    assert said(capsys, technique="recipe", config=Settings(rate=2.0)) == ""
    finished(home / "runs" / "figure" / "toy", technique="figure toy")
    assert "on this machine" in said(capsys, technique="figure toy")


@given(st.floats(0, 1e6))
@example(5970.0)
def test_a_duration_is_near_its_seconds(seconds):
    number, unit = expected.duration(seconds).split()
    size = {"s": 1, "min": 60, "h": 3600}[unit]
    assert abs(float(number) * size - seconds) <= size / 2 and float(number) < 100 or unit == "h"
    assert bool(expected.line(seconds, "so")) == (seconds >= expected.LONG)


def test_an_evaluation_takes_as_long_by_rollout_as_that_of_its_run(home):
    """Twice as many rollouts, twice as long; two agents, both; an agent whose run does not tell, no word."""
    example = home / "examples" / "agent"
    record = {"technique": "recipe", "machine": machine(), "config": {"evaluation": {"tasks": 10, "samples": 4}}}
    run = home / "runs" / "small"
    (run / "checkpoints" / "final").mkdir(parents=True)
    (run / "config.json").write_text(json.dumps(record))
    (run / "report.json").write_text("{}")
    (run / "timings.jsonl").write_text('{"stage": "eval", "seconds": 300.0, "finished": true}\n')
    final = Path("runs/small/checkpoints/final")
    assert (
        expected.of_rollouts([final], example, 50)
        == "expected: 2 min, as the evaluation in runs/small took on this machine"
    )
    assert (
        expected.of_rollouts([final, final], example, 50)
        == "expected: 5 min, as the evaluation in runs/small took on this machine"
    )
    assert (
        expected.of_rollouts([final], example, 1) == "" == expected.of_rollouts([final, home / "x" / "y"], example, 50)
    )
    assert "as the evaluation of a small run took on 2 cores" in expected.of_rollouts([example], example, 10**5)


def test_a_package_takes_as_long_as_it_took_here(home, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    package = Package("words", "1.0", {}, {}, "MIT", "folder")
    assert task_times.format_expected_duration("made", package, 1, 2, "bubblewrap") == ""
    for seconds in (900.0, 120.0):
        task_times.remember("made", package, 1, 2, "bubblewrap", seconds)
    task_times.remember("remade", package, 1, 2, "bubblewrap", 60.0)
    assert (
        task_times.format_expected_duration("made", package, 1, 2, "bubblewrap")
        == "expected: 2 min, as words 1.0 took on this machine"
    )
    assert (
        task_times.format_expected_duration("remade", package, 1, 2, "bubblewrap", 8) == ""
    )  # nobody has graded them here
    task_times.remember("graded", package, 1, 2, "bubblewrap", 120.0, 4)
    assert (
        task_times.format_expected_duration("remade", package, 1, 2, "bubblewrap", 8)
        == "expected: 5 min, as words 1.0 took on this machine"
    )
    for other in (
        (replace(package, version="2.0"), 1, 2, "bubblewrap"),
        (package, 3, 2, "bubblewrap"),
        (package, 1, 1, "bubblewrap"),
    ):
        assert task_times.format_expected_duration("made", *other) == ""
    (file,) = (home / "cache" / "etude").iterdir()
    file.write_text(file.read_text() + '{"what": "made"')  # a kill
    task_times.remember("made", package, 1, 2, "bubblewrap", 30.0)
    assert task_times.format_expected_duration("made", package, 1, 2, "bubblewrap").startswith("expected: 30 s")


def test_examples_take_as_long_as_they_took_with_such_a_run(home, ask, monkeypatch):
    """The first time nobody knows; then with the same settings, whatever the seed; it says which part begins, and the
    end what comes next."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    monkeypatch.setattr(examples, "write", lambda run, out, progress: progress("routing") or [])
    monkeypatch.setattr(explorer_examples, "write_recipe", lambda run, out: out)
    clock = itertools.cycle([0.0, 60.0, 240.0])
    monkeypatch.setattr(result_commands, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    for name, settings in (
        ("one", {"seed": 0, "rl": {"steps": 3}}),
        ("two", {"seed": 1, "rl": {"steps": 3}}),
        ("other", {"rl": {"steps": 4}}),
    ):
        (home / "runs" / name).mkdir(parents=True)
        (home / "runs" / name / "config.json").write_text(json.dumps({"technique": "recipe", "config": settings}))
    says = "expected: 4 min, as etude examples took on this machine with such a run\n"
    for name, known in (("one", False), ("one", True), ("two", True), ("other", False)):
        code, out, _ = ask("examples", "--run", f"runs/{name}")
        assert (
            code == 0
            and out.startswith(says) is known
            and "part 2 of 6: routing, 60 s\n" in out
            and "next:   etude explore" in out
            and f"etude play runs/{name}" in out
        )
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "runs" / "one" / "config.json"))
    assert ask("examples", "--run", "runs/one")[0] == 0, "a folder that cannot be written"


@given(st.integers(1, 500), st.integers(0, 500), st.floats(0.1, 1e5))
def test_a_line_says_how_long_the_rest_takes(total, done, seconds):
    """At the pace so far; nothing before the first is done, and after the last."""
    one = Line("agent", "rollouts", total)
    one.done = done = min(done, total)
    says = one.words(seconds)
    begins, _, left = says.partition(", about ")
    assert begins == f"{done} of {total} rollouts, {seconds:.0f} s" and bool(left) == (0 < done < total)
    assert not left or left == f"{expected.duration(seconds * (total - done) / done)} left"
    assert Line("words", "runs of its tests").words(3.4) == "0 runs of its tests, 3 s"


def steps(root: Path) -> list[tuple[str, str]]:
    """Everything that is named at an end."""
    found = [*next_steps.of_agent(root), *next_steps.of_full(root, True), *next_steps.of_full(root, False)]
    found += [*next_steps.of_tasks(root, True), *next_steps.of_tasks(root, False)]
    found += [*next_steps.of_eval(None, None), *next_steps.of_eval(root, None), *next_steps.of_eval(root, "sft")]
    found += [*next_steps.of_examples(root, root / "examples"), *next_steps.of_examples(root, root / "other" / "place")]
    found += [step for entry in catalog.TECHNIQUES for step in next_steps.of_technique(entry)]
    return found + [
        step for entry in catalog.EXPERIMENTS for quick in (True, False) for step in next_steps.of_figure(entry, quick)
    ]


def test_what_is_named_at_an_end_exists(home):
    """In a folder with a blank, too; and a run without its last model is told no agent."""
    root, finds = (
        home / "my run",
        {"run": catalog.find, "figure": catalog.find_experiment, "claims": catalog.find_experiment},
    )
    for name in ("final", "sft"):
        (root / "checkpoints" / name).mkdir(parents=True)
    commands = {command for command, _ in steps(root)}
    assert len(commands) > 40
    for command in commands:
        if (verb := command.split()[1]) in finds:
            assert finds[verb](command.split()[-1]), command
        else:
            assert not wrong(re.sub(r"^etude eval (?!base)", "etude eval agent ", command)), command
    assert next_steps.of_agent(home / "other") == [] == next_steps.of_full(home / "other", True)


def test_in_a_pipe_the_end_is_plain_lines(capsys):
    next_steps.show([("etude play runs/small", "watch"), ("etude explore", "in a browser")])
    shown = capsys.readouterr().out
    assert shown == "next:   etude play runs/small   # watch\n        etude explore           # in a browser\n"
    next_steps.show([])
    assert capsys.readouterr().out == ""


def test_a_demonstration_ends_with_what_comes_next(home, ask, monkeypatch):
    import ref.kl

    monkeypatch.setattr(ref.kl, "demo", lambda config, log: {"seed": config.seed})
    code, shown, _ = ask("run", "kl")
    assert code == 0 and "expected:" not in shown
    assert (
        "next:   etude figure kl-variance   # " in shown and "        etude lesson 5             # its lesson" in shown
    )
