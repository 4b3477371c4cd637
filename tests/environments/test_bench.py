"""The benchmark of sandboxes measures what it says, and shows no speed of forks that are other trees."""

import json

import pytest

from environments.sandbox.bubblewrap import Bubblewrap
from etude.bench import sandboxes
from kit.settings import RunError

SMALL = {"rounds": 2, "idle": 2, "files": 40, "size": 40_000}


def test_it_writes_what_it_prints(tmp_path, capsys):
    record = sandboxes.bench(tmp_path, **SMALL)
    printed = capsys.readouterr().out
    rows = {row["what"]: row for row in record["rows"]}
    assert {"start", "fork", "snapshot", "read", "shell: true"} <= set(rows) and rows["fork"]["times"] == 2
    assert all(0 < row["ms"] <= row["slowest_ms"] and row["what"] in printed for row in rows.values())
    assert record["idle"]["sandboxes"] == 2 and 1 < record["idle"]["mib"] < 200
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text()) == record


def test_a_fork_that_is_another_tree_has_no_speed(monkeypatch):
    names = iter("ab")
    monkeypatch.setattr(Bubblewrap, "snapshot", lambda _: next(names))
    monkeypatch.setattr(Bubblewrap, "fork", lambda sandbox, _: sandbox)
    with pytest.raises(RunError, match="fault of the program"):
        sandboxes.bench(None, **SMALL)
