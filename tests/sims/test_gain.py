"""Several runs gathered: what is read, what is refused, what the table and the picture show."""

import json
from pathlib import Path

import pytest

from etude.ledger import gain
from kit.settings import RunError


def interval(value, half=0.04):
    return {"value": value, "low": value - half, "high": value + half}


def finished_run(root: Path, seed: int, after: float, shuffled: bool = False) -> Path:
    """A run folder with as much in it as `gather` reads."""
    figures = {"best_of_8" if name == "best" else name: 0.5 for name, _ in gain.FIGURES}
    before, solved = {"solved": 4, "greedy": 0}, {"solved": round(8 * after), "greedy": 1}
    result = {
        "before": {k: interval(v) for k, v in figures.items()},
        "after": {k: interval(after if k == "success" else v) for k, v in figures.items()},
        "difference": {k: interval(after - v if k == "success" else 0.0) for k, v in figures.items()},
        "tasks": 300,
        "samples": 8,
        "outcomes": [
            {"kind": kind, "depth": 1, "before": before, "after": solved} for kind in ("multi-hop", "composition")
        ],
        "codebase": [],
    }
    for folder in ("stages", "metrics"):
        (root / folder).mkdir(parents=True)
    config = {"config": {"seed": seed, "rl": {"shuffle_rewards": shuffled}}}
    (root / "config.json").write_text(json.dumps(config))
    (root / "stages" / "eval.json").write_text(json.dumps({"result": result}))
    (root / "stages" / "decode.json").write_text(json.dumps({"result": {"tasks": 24}}))
    (root / "metrics" / "rl.jsonl").write_text("".join(json.dumps({"success": s / 20}) + "\n" for s in range(20)))
    lines = [
        {"stage": "cpt", "seconds": 7.0, "peak_memory_gib": 1.0},
        {"stage": "cpt", "seconds": 3.0, "peak_memory_gib": 1.0, "finished": True},
        {"stage": "rl", "seconds": 9.0, "peak_memory_gib": 1.5, "finished": True},
        {"stage": "rl", "seconds": 5.0, "peak_memory_gib": 2.0, "finished": True},  # played again
    ]
    (root / "timings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


def test_mean_and_deviation_over_seeds(tmp_path):
    runs = [finished_run(tmp_path / str(s), s, after) for s, after in enumerate((0.6, 0.7, 0.8))]
    found = gain.gather(runs, [finished_run(tmp_path / "c", 0, 0.5, shuffled=True)])
    assert found["over_seeds"]["success"]["difference"] == pytest.approx({"mean": 0.2, "sd": 0.1})
    assert found["over_seeds"]["greedy"]["interval"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    interval = found["over_seeds"]["success"]["interval"]
    assert interval["low"] == 1 / 8 and interval["high"] == 2 / 8 and found["samples"] == 8
    assert [run["seed"] for run in found["runs"]] == [0, 1, 2] and len(found["control"]) == 1
    assert found["runs"][0]["seconds"] == 8.0 and found["runs"][0]["peak_memory_gib"] == 2.0


def test_table_has_a_column_a_run_and_the_control_last(tmp_path):
    found = gain.gather([finished_run(tmp_path / "a", 3, 0.75)], [finished_run(tmp_path / "c", 3, 0.5, shuffled=True)])
    header, _, success, *_ = gain.table(found).splitlines()
    assert header == "| held-out tasks | seed 3 | control, seed 3 |"
    assert "0.50 [0.46, 0.54] → 0.75 [0.71, 0.79]; +0.250 [+0.210, +0.290]" in success


def test_a_run_without_a_measure_is_named(tmp_path):
    """Without the best of its samples: it ended in a KeyError."""
    root = finished_run(tmp_path / "a", 0, 0.6)
    record = json.loads((root / "stages" / "eval.json").read_text())
    del record["result"]["after"]["best_of_8"]
    (root / "stages" / "eval.json").write_text(json.dumps(record))
    with pytest.raises(RunError, match="after: best_of_8 of its evaluation is damaged: not a JSON object"):
        gain.gather([root], [])


def test_runs_with_different_settings_are_not_averaged(tmp_path):
    roots = [finished_run(tmp_path / name, seed, 0.6) for seed, name in enumerate("ab")]
    record = json.loads((roots[1] / "config.json").read_text())
    record["config"]["rl"]["lr"] = 0.1
    (roots[1] / "config.json").write_text(json.dumps(record))
    with pytest.raises(RunError, match="b has other settings than the first run"):
        gain.gather(roots, [])


def test_runs_with_different_samples_are_not_compared(tmp_path):
    roots = [finished_run(tmp_path / name, 0, 0.6) for name in "ab"]
    record = json.loads((roots[1] / "stages" / "eval.json").read_text())
    for moment in ("before", "after", "difference"):
        record["result"][moment]["best_of_4"] = record["result"][moment]["best_of_8"]
    record["result"]["samples"] = 4
    (roots[1] / "stages" / "eval.json").write_text(json.dumps(record))
    with pytest.raises(RunError, match="different numbers of samples"):
        gain.gather(roots, [])


def test_one_seed_has_no_deviation(tmp_path):
    found = gain.gather([finished_run(tmp_path / "a", 0, 0.6)], [])
    assert found["over_seeds"]["success"]["after"] == {"mean": 0.6, "sd": None}


def test_picture_is_written(tmp_path):
    found = gain.gather([finished_run(tmp_path / "a", 0, 0.6)], [finished_run(tmp_path / "c", 0, 0.5, True)])
    gain.picture(found, tmp_path / "new" / "gain.svg")
    drawn = (tmp_path / "new" / "gain.svg").read_text()
    assert drawn.count("<path") > 30


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda root: root.mkdir(), "is not a finished run of the recipe"),
        (lambda root: (finished_run(root, 0, 0.5) / "stages" / "eval.json").unlink(), "is not a finished run"),
        (lambda root: finished_run(root, 0, 0.5, shuffled=True), "pass it with --control"),
    ],
    ids=["empty", "unfinished", "control among the runs"],
)
def test_other_folders_are_refused_in_one_line(tmp_path, build, says):
    build(tmp_path / "run")
    with pytest.raises(RunError, match=says) as error:
        gain.gather([tmp_path / "run"], [])
    assert "\n" not in str(error.value)


def test_a_run_is_no_control(tmp_path):
    finished_run(tmp_path / "run", 0, 0.5)
    with pytest.raises(RunError, match="not a control"):
        gain.gather([], [tmp_path / "run"])
