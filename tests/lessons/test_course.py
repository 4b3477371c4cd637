"""What lessons stand on: code shown, parts played in silence, `etude lesson`, the builder's word."""

import inspect
import json
import re
import sys
from pathlib import Path

import pytest

from etude.cli import course as course_commands
from lessons import build, course, syllabus


def test_source_shows_the_code_as_it_stands(capsys):
    course.source(syllabus.find, course.Solved)
    assert capsys.readouterr().out == inspect.getsource(syllabus.find) + "\n" + inspect.getsource(course.Solved) + "\n"


def test_a_check_that_gives_no_reason_says_so(capsys):
    def bare():
        raise AssertionError

    assert not course.check(3, bare)
    assert capsys.readouterr().out == "Exercise 3: not yet. The check does not hold.\n"


def test_a_part_is_played_in_silence(capfd):
    """Progress goes nowhere, neither to stdout nor to stderr; what the part returns comes back, what it raises too."""

    def part(run, x):
        stage = run.stage("part", total=2)
        stage.progress(1)
        print("noise", file=sys.stderr)
        return stage.finish({"x": x})

    assert course.run(part, 3) == {"x": 3}
    with pytest.raises(ZeroDivisionError):
        course.run(lambda run: 1 / 0)
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_a_tiny_run_is_played_once_and_anew_when_its_settings_change(tmp_path, capfd, monkeypatch):
    """What a learner keeps beside it stays."""
    played = []
    monkeypatch.setattr(course, "RUNS", tmp_path / "lessons")
    monkeypatch.setattr(course.recipe, "run", lambda run, config: (print("noise"), played.append((run.root, config))))
    said = "a tiny run of the recipe comes first, once: half a minute\n"
    first = course.tiny_run()
    assert (
        first.parent == tmp_path / "lessons"
        and re.fullmatch("tiny-[0-9a-f]{8}", first.name)
        and capfd.readouterr() == ("", said)
    )
    assert course.tiny_run() == first == course.tiny_folder() and capfd.readouterr() == ("", "")
    for name in ("tiny", "tiny-mine", "tinkered"):
        (first.parent / name).mkdir()
        (first.parent / name / "config.json").write_text("{}")
    (first.parent / "tiny-00000000").mkdir()
    (first.parent / "05_kl.ipynb").write_text("mine")
    monkeypatch.setattr(course, "SMOKE", course.SMOKE | {"seed": 7})
    second = course.tiny_run()
    assert second != first and capfd.readouterr() == ("", said)
    assert {path.name for path in first.parent.iterdir()} == {
        second.name,
        "tiny-mine",
        "tinkered",
        "tiny-00000000",
        "05_kl.ipynb",
    }
    assert json.loads((second / "config.json").read_text())["config"]["seed"] == 7
    assert [(root, config.seed) for root, config in played] == [(first, 0), (first, 0), (second, 7)]


def test_claims_are_those_of_the_experiment():
    assert {claim["experiment"] for claim in course.claims("low-precision")} == {"low-precision"}
    assert course.claims("nothing") == []


def test_etude_lesson(ask, monkeypatch, tmp_path):
    """A list; an error for a number that there is none of; and Jupyter on a copy, which is not made anew."""
    monkeypatch.chdir(tmp_path)
    code, out, _ = ask("lesson")
    assert code == 0 and "KL: three estimates" in out and not any(tmp_path.iterdir())
    code, _, error = ask("lesson", 99)
    assert code == 2 and error.startswith("error: there is no lesson 99; there are 0, 1") and error.count("\n") == 1
    found = course_commands.importlib.util.find_spec
    monkeypatch.setattr(
        course_commands.importlib.util, "find_spec", lambda name: None if name == "jupyterlab" else found(name)
    )
    code, _, error = ask("lesson", 5)
    assert (
        code == 2
        and "pip install -e '.[course]'; or open" in error
        and error.count("\n") == 1
        and "05_kl.ipynb" in error
        and not any(tmp_path.iterdir())
    )
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    # A stand-in for Jupyter says what it was asked to open, and whether a kernel would find the lessons.
    (tmp_path / "jupyterlab").mkdir()
    (tmp_path / "jupyterlab" / "__init__.py").touch()
    says = (
        "import sys, lessons.course\nfrom pathlib import Path\nPath('asked').write_text(' "
        "'.join(sys.argv[1:]))\nsys.exit(3)\n"
    )
    (tmp_path / "jupyterlab" / "__main__.py").write_text(says)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, out, _ = ask("lesson", 5)
    copy = Path("runs") / "lessons" / "05_kl.ipynb"
    asked = f"--ServerApp.root_dir={tmp_path / copy.parent} --LabApp.default_url=/lab/tree/05_kl.ipynb"
    assert code == 3 and (tmp_path / "asked").read_text().removesuffix(" --allow-root") == asked
    assert copy.read_bytes() == syllabus.notebook(syllabus.find(5).path).read_bytes()
    copy.write_text("my work")
    for user in (0, 1000):
        monkeypatch.setattr(course_commands.os, "geteuid", lambda user=user: user)
        assert ask("lesson", 5)[0] == 3 and copy.read_text() == "my work"
        assert (tmp_path / "asked").read_text() == asked + (" --allow-root" if user == 0 else "")


def test_the_builder_says_what_differs(capsys, monkeypatch):
    """One line a lesson and exit code 1; nothing, and 0, when all are as they should be."""
    monkeypatch.setattr(sys, "argv", ["build", "5", "--check"])
    assert build.main() == 0 and capsys.readouterr().out == ""
    monkeypatch.setattr(sys, "argv", ["build", "--check"])
    monkeypatch.setattr(build, "differs", lambda script: "so it is" if script.stem == "05_kl" else "")
    assert (
        build.main() == 1 and capsys.readouterr().out == "05_kl: so it is; make it again: python -m lessons.build 05\n"
    )
    monkeypatch.setattr(sys, "argv", ["build", "99"])
    assert build.main() == 1 and "there is no lesson 99" in capsys.readouterr().err
