"""The full run of feature deletion: what it writes, what it goes on with, what it refuses. Its little package is ours,
and plays in this process."""

import json
from pathlib import Path

import pytest

from etude import catalog
from etude.run import feature_deletion, full
from etude.run import settings as full_settings
from kit.disk import read_lines
from kit.settings import RunError
from ref import feature_deletion as ref
from scaled.runtime import launch
from tests.environments.test_tasks import PACKAGE, Player

SETS = ["package=words"]


@pytest.fixture
def here(monkeypatch):
    """One rank in this process, and players instead of sandboxes: those that were made."""
    players = []

    def runner_of(config):
        players.append(Player())
        return players[-1]

    def start(module, arguments, nproc, restarts, node):
        out, told = arguments
        full_told = json.loads(told)
        feature_deletion.play(Path(out), full_settings.settings("feature-deletion", "gloo", full_told["config"]), nproc)
        return 0

    monkeypatch.setattr(feature_deletion, "runner_of", runner_of)
    monkeypatch.setattr(feature_deletion, "material", lambda config: PACKAGE)
    monkeypatch.setattr(launch, "start", start)
    return players


def run(out, sets=SETS, resume=False):
    full.run(catalog.find("feature-deletion"), out, {}, sets, resume, 1, "gloo")


def test_a_full_run_says_what_the_demonstration_says(here, tmp_path, capsys):
    """Of the same package, as both judge by the same rule; and no line of its code is in what is written."""
    run(tmp_path / "run")
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["result"] == pytest.approx(ref.demo()) and "valid@slice" in capsys.readouterr().out
    rows = read_lines(tmp_path / "run" / "pieces.jsonl")
    assert len(rows) == sum(report["result"][f"tried@{way}"] for way in ("slice", "body", "symbol"))
    assert any(row["faults"] for row in rows) and all(row["bits"] > 0 for row in rows)
    assert "capitalize" not in (tmp_path / "run" / "pieces.jsonl").read_text()


def test_a_run_goes_on_with_the_tests_that_it_played(here, tmp_path):
    run(tmp_path / "run")
    first, played = (tmp_path / "run" / "pieces.jsonl").read_bytes(), len(here)
    (tmp_path / "run" / "pieces.jsonl").unlink()
    (tmp_path / "run" / "report.json").unlink()
    run(tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "pieces.jsonl").read_bytes() == first and len(here) == played + 1
    with pytest.raises(RunError, match="least"):
        run(tmp_path / "run", [*SETS, "least=4"], resume=True)


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        ([], "needs a package with tests: --set package=FOLDER"),
        (["package=/nowhere/at all"], "names no package"),
        (["least=0"], "least and jobs must be at least 1"),
        (["package={empty}"], "holds no source of Python"),
    ],
)
def test_what_is_refused_is_one_line(tmp_path, sets, says):
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=says) as error:
        run(tmp_path / "run", [one.format(empty=tmp_path / "empty") for one in sets])
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_a_rank_that_fails_is_said_with_the_command_that_goes_on(here, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "start", lambda *how: 1)
    with pytest.raises(RunError, match="--resume --backend gloo --nproc 1"):
        run(tmp_path / "run")
    assert (tmp_path / "run" / "material.json").exists()
