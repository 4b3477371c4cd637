"""The benchmark of sandboxes measures what it says, and shows no speed of forks that are other trees, nor of episodes
that are not paid."""

import json

import pytest

from environments.grading.ready import Judges
from environments.harness.record import Record
from environments.sandbox.bubblewrap import Bubblewrap
from etude.bench import oracle, sandboxes
from kit.settings import RunError

SMALL = {"rounds": 2, "idle": 2, "files": 40, "size": 40_000, "episodes": 1}


def test_it_writes_what_it_prints(tmp_path, capsys):
    record = sandboxes.bench(tmp_path, **SMALL)
    printed = capsys.readouterr().out
    rows = {row["what"]: row for row in record["rows"]}
    assert {"start", "fork", "snapshot", "read", "shell: true"} <= set(rows) and rows["fork"]["times"] == 2
    assert all(0 < row["ms"] <= row["slowest_ms"] and row["what"] in printed for row in rows.values())
    for name in ("oracle", "oracle, no tests", "oracle, cold"):
        agent, grading, both = (rows[f"{name}: {part}"]["ms"] for part in ("agent", "grading", "both"))
        assert both == pytest.approx(agent + grading)
    assert (
        record["episodes"]["a_second"].keys() == {name for name, _, _ in oracle.AT_ONCE}
        and "episodes a second, 2 at once   target 15" in printed
    )
    assert record["idle"]["sandboxes"] == 2 and 1 < record["idle"]["mib"] < 200
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text()) == record


def test_a_fork_that_is_another_tree_has_no_speed(monkeypatch):
    names = iter("ab")
    monkeypatch.setattr(Bubblewrap, "snapshot", lambda _: next(names))
    monkeypatch.setattr(Bubblewrap, "fork", lambda sandbox, _: sandbox)
    with pytest.raises(RunError, match="fault of the program"):
        sandboxes.bench(None, **SMALL)


def test_an_oracle_that_is_not_paid_has_no_speed(shared_store, tmp_path):
    plays = oracle.Plays(shared_store)
    assert plays.exam.given_tree != plays.exam.gold_tree and len(plays.exam.required_tests) == 32
    with Judges(plays.fresh) as judges, Record(tmp_path / "a.jsonl") as journal:
        with pytest.raises(RunError, match="the oracle is paid 0; that is a fault of the program"):
            plays.grading(journal, plays.tree, judges)


def test_without_the_package_it_says_where_to_run_it(shared_store, tmp_path):
    with pytest.raises(RunError, match="run it in a clone of the repository"):
        oracle.Plays(shared_store, tmp_path)
