"""The pages that read files: runs of the recipe, claims. Whole ones show; broken ones are one line, and the others
still show."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from etude.explorer import examples
from etude.explorer.pages import claims
from etude.explorer.provenance import EXAMPLE
from etude.explorer.runs import curves
from etude.explorer.runs import files as run_files
from etude.explorer.runs import state as run_state
from etude.explorer.runs.panels import PANELS, SPEED
from etude.ledger import figures
from etude.ledger.qualifications import qualified
from etude.ledger.statements import open_statements
from etude.report.record import STAGES, collect
from kit.settings import RunError


def played(folder, stages=STAGES, ago=0.0):
    """A run folder as the recipe leaves it after these stages, made of the committed example."""
    example, record = examples.FOLDER / "recipe", json.loads((examples.FOLDER / "recipe" / "report.json").read_text())
    for part in ("stages", "metrics"):
        (folder / part).mkdir(parents=True)
    shutil.copy(example / "config.json", folder)
    for stage in stages:
        (folder / "stages" / f"{stage}.json").write_text(
            json.dumps({"stage": stage, "result": record["stages"][stage], "files": {}})
        )
        shutil.copyfile(
            example / "metrics" / f"{stage}.jsonl", folder / "metrics" / f"{stage}.jsonl"
        ) if stage in METRICS else None
        (folder / "metrics" / f"{stage}.jsonl").touch()
    (folder / "timings.jsonl").write_text(
        "".join(json.dumps({"stage": s, "seconds": record["seconds"][s]}) + "\n" for s in stages)
    )
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - ago,) * 2)
    return folder


METRICS = {path.stem for path in (examples.FOLDER / "recipe" / "metrics").glob("*.jsonl")}


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def words(at):
    return " ".join(element.value for element in (*at.caption, *at.info, *at.error))


def test_with_no_run_the_committed_example_is_shown(page, runs, drive, table):
    at = page("recipe")
    assert at.multiselect(key="run").value == [EXAMPLE] and not at.error and "finished" in words(at)
    assert "seed 0" in words(at) and len(table(at, "measure")) >= 5
    assert drive(at) >= 7


def test_what_is_shown_of_a_run_is_what_it_recorded(page, runs, table):
    played(runs / "mine")
    record = collect(runs / "mine")
    at = page("recipe", curves="Pretraining", smooth="1")
    shown, eval_before = table(at, "measure"), record["stages"]["eval"]["before"]["success"]["value"]
    assert shown.set_index("measure").loc["success, sampled", "before RL"].startswith(f"{eval_before:.3f} ")
    assert table(at, "stage").set_index("stage").loc["cpt", "mine"] == f"{record['seconds']['cpt']:.0f} s"
    (run,), broken = run_files.load_runs({"mine": runs / "mine"})
    lines = [json.loads(line) for line in (runs / "mine" / "metrics" / "rl.jsonl").read_text().splitlines()]
    xs, ys = curves.points(run)["reward/success"]
    assert (
        not broken
        and (xs == [line["step"] for line in lines]).all()
        and (ys == [line["success"] for line in lines]).all()
    )
    loss = next(panel for panel in PANELS["Pretraining"] if panel.name == "loss")
    tokens = [row["tokens"] for row in curves.rows(loss, [run], 1)]
    assert tokens == sorted(tokens) and tokens[-1] > 1.5e6, "one stage goes on where the one before ended"


def test_the_newest_run_comes_first_and_several_are_compared(page, runs, table):
    played(runs / "old", ago=500)
    played(runs / "new", ago=50)
    at = page("recipe")
    assert at.multiselect(key="run").options == ["new", "old", EXAMPLE] and at.multiselect(key="run").value == ["new"]
    for what in PANELS.keys() - {SPEED}:  # which small runs do not have
        at = page("recipe", run=["new", "old"], curves=what)
        assert {"new", "old"} == set(table(at, "measure")["run"]) and {"new", "old"} <= set(table(at, "stage").columns)


def test_the_url_names_what_is_shown(page, runs, table, whole, go):
    """Its link shows the same run when a newer one has been played."""
    played(runs / "old", ago=500)
    at = page("recipe", curves="Pretraining")
    link = dict(at.query_params)
    assert link["run"] == "old"
    played(runs / "new", ago=50)
    assert (
        set(table(page("recipe", **link), "measure")["run"]) == {"old"} and page("recipe").query_params["run"] == "new"
    )
    whole(at.run())
    at.multiselect(key="run").set_value(["new", "old"])
    whole(at.run())
    assert at.query_params["run"] == ["new", "old"] and set(table(at, "measure")["run"]) == {"new", "old"}
    at.multiselect(key="run").set_value([])
    whole(at.run())
    assert (
        at.query_params["run"] == ""
        and "Choose a run." in words(at)
        and "Choose a run." in words(page("recipe", **at.query_params))
    )
    go(at, "recipe", run="old")
    assert at.multiselect(key="run").value == ["old"], "the browser's Back"
    go(at, "claims")
    go(at, "recipe")
    assert at.query_params["run"] == "old" == at.multiselect(key="run").value[0], "back from another page"


def test_a_run_that_is_not_there_is_said_in_one_line(page, runs, table, whole):
    played(runs / "old", ago=500)
    played(runs / "new", ago=50)
    at = page("recipe", run="g\none" + "x" * 999)
    (said,) = [warning.value for warning in at.warning]
    assert said.startswith("There is no run g onex") and "\n" not in said and len(said) < 120
    assert at.query_params["run"] == "new" and set(table(at, "measure")["run"]) == {"new"}
    at = page("recipe", run=["gone", "old"])
    assert ["There is no run gone here."] == [warning.value for warning in at.warning] and at.query_params[
        "run"
    ] == "old"
    assert not whole(at.run()).warning
    shutil.rmtree(runs / "old")
    whole(at.run())
    assert ["There is no run old here."] == [warning.value for warning in at.warning] and at.query_params[
        "run"
    ] == "new"


def test_runs_of_any_name_are_shown_under_it(page, runs, table):
    names = [r"cost$\frac$", "_hidden", "stage", "committed example", "*b* [x](http:)"]
    for ago, name in enumerate(names):
        played(runs / name, ago=float(ago))
    at = page("recipe")
    listed = at.multiselect(key="run").options
    assert listed == [names[0], "_hidden", "runs/stage", "runs/committed example", names[4], EXAMPLE]
    at.multiselect(key="run").set_value(listed).run()
    assert not at.exception and not at.error
    assert list(table(at, "stage").columns) == ["stage", *listed] and table(at, "stage")["stage"].tolist() == [
        *STAGES,
        "together",
    ]
    assert any(r"\*b\* \[x\]\(http\:\)" in caption.value for caption in at.caption), "no link"


def test_a_value_that_is_no_number_takes_only_its_own_window(page, runs):
    played(runs / "mine")
    lines = [json.loads(line) for line in (runs / "mine" / "metrics" / "rl.jsonl").read_text().splitlines()]
    lines[5] |= {"reward": float("nan"), "success": float("inf")}
    (runs / "mine" / "metrics" / "rl.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert not page("recipe").exception
    run = run_files.load("mine", runs / "mine")
    for row in curves.rows(PANELS["RL: reward"][0], [run], 9):
        assert np.isfinite(row["smoothed"]) and 0 <= row["smoothed"] <= 1


def test_a_run_that_cannot_be_looked_into_is_one_line(page, runs, table, monkeypatch):
    """As when it is somebody else's: asking whether there is a file in it is refused already."""
    played(runs / "good", ago=100)
    played(runs / "locked")

    def refuse(name):
        allowed = getattr(Path, name)

        def asked(path, *arguments, **more):
            if "locked" in path.parts:
                raise PermissionError(13, "Permission denied", str(path))
            return allowed(path, *arguments, **more)

        monkeypatch.setattr(Path, name, asked)

    for name in ("exists", "is_dir", "read_text"):
        refuse(name)
    at = page("recipe")
    (line,) = [error.value for error in at.error]
    assert "locked" in line and "Permission denied" in line and "\n" not in line
    assert at.multiselect(key="run").options == ["good", EXAMPLE] and set(table(at, "measure")["run"]) == {"good"}


def test_a_run_is_watched_while_it_goes_on_and_no_longer(page, runs, table, whole):
    played(runs / "half", stages=STAGES[:5])
    with open(runs / "half" / "timings.jsonl", "a") as file:
        file.write('{"stage": "rl", "seconds": 12.3, "step": 7, "rate": 1.0}\n{"stage": "rl", "sec')
    (runs / "half" / "metrics" / "rl.jsonl").write_text('{"step": 1, "reward": 0.5, "success": 0.5}\n{"step": 2, "rew')
    at = page("recipe")
    assert (
        "running, at rl" in words(at)
        and table(at, "stage").set_index("stage").loc["rl", "half"] == "12 s so far, at step 7"
    )
    assert "No evaluation yet." in words(at)
    (run,), _ = run_files.load_runs({"half": runs / "half"})
    assert run_state.going(run) and len(curves.points(run)["reward/reward"][0]) == 1
    played(runs / "dead", stages=STAGES[:2], ago=2 * run_state.AWAY)
    (run,), _ = run_files.load_runs({"dead": runs / "dead"})
    assert not run_state.going(run) and "interrupted 30 minutes ago at mtp" in words(page("recipe", run="dead"))
    (runs / "half" / "metrics" / "rl.jsonl").write_text(
        '{"step": 1, "reward": 0.5, "success": 0.5}\n{"step": 2, "reward": 0.7, "success": 0.8}\n'
    )
    assert len(curves.points(run_files.load_runs({"half": runs / "half"})[0][0])["reward/reward"][0]) == 2, (
        "what was written since is seen"
    )


def broken(folder):
    """Ways to break a run folder, by name."""

    def cut(path):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    def put(name, content):
        (folder / name).write_bytes(content)

    return {
        "no config": lambda: (folder / "config.json").unlink(),
        "half a config": lambda: cut(folder / "config.json"),
        "config of nothing": lambda: put("config.json", b"{}"),
        "config of garbage": lambda: put("config.json", b"\xff\x00\x81"),
        "a list for a config": lambda: put("config.json", b"[1]"),
        "machine of garbage": lambda: put(
            "config.json", b'{"technique": "recipe", "config": {"seed": 0}, "machine": 3}'
        ),
        "half a stage": lambda: cut(folder / "stages" / "eval.json"),
        "a stage of garbage": lambda: put("stages/eval.json", b'{"result": 5}'),
        "an evaluation of garbage": lambda: put("stages/eval.json", b'{"result": {"before": {"success": "much"}}}'),
        "no metrics": lambda: (folder / "metrics" / "rl.jsonl").unlink(),
        "metrics of garbage": lambda: put("metrics/rl.jsonl", b"\x80\x81\x82\n\n"),
        "times of garbage": lambda: put("timings.jsonl", b'{"stage": "rl", "seconds": "long"}\n'),
        "a folder for a file": lambda: ((folder / "config.json").unlink(), (folder / "config.json").mkdir()),
        "no stages": lambda: shutil.rmtree(folder / "stages"),
    }


@pytest.mark.parametrize("way", list(broken(None)))
def test_a_broken_run_is_one_line_and_the_others_show(page, runs, table, way):
    played(runs / "good", ago=100)
    broken(played(runs / "bad"))[way]()
    at = page("recipe")
    assert len(at.error) == 1 and "bad" in at.error[0].value and "\n" not in at.error[0].value
    assert at.multiselect(key="run").options == ["good", EXAMPLE] and "good" in table(at, "measure")["run"].tolist()


def test_other_folders_are_none_of_its_business(page, runs):
    (runs / "figure" / "kl-variance").mkdir(parents=True)
    (runs / "kl").mkdir()
    (runs / "kl" / "config.json").write_text('{"technique": "kl", "config": {}, "machine": {}}')
    (runs / "notes.txt").write_text("mine")
    assert not page("recipe").error


def test_the_example_is_a_run_cut_short(runs, tmp_path):
    run = played(runs / "mine")
    with open(run / "metrics" / "rl.jsonl", "w") as file:
        file.writelines(
            json.dumps({"step": step, "reward": 0.5, **({"codebase_ppl": 2.0} if step == 123 else {})}) + "\n"
            for step in range(1, 1001)
        )
    out = examples.write_recipe(run, tmp_path / "example")
    steps = [json.loads(line)["step"] for line in (out / "metrics" / "rl.jsonl").read_text().splitlines()]
    assert {1, 123, 1000} <= set(steps) and len(steps) <= examples.LINES + 2
    (copied,), broken = run_files.load_runs({"copy": out})
    assert not broken and not copied.missing and copied.changes == run_files.load_runs({"mine": run})[0][0].changes
    (run / "stages" / "decode.json").unlink()
    with pytest.raises(RunError, match="no finished run"):
        examples.write_recipe(run, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_the_committed_example_is_small():
    files = [path for path in (examples.FOLDER / "recipe").rglob("*") if path.is_file()]
    assert len(files) >= 5 and sum(path.stat().st_size for path in files) < 400_000


# ------------------------------------------------------------------------------------------------ claims


def test_claims_are_filtered(page, drive, whole, table):
    everything = figures.load(claims.RESULTS / "claims.json")
    known = figures.of_sources(everything)
    at = page("claims")
    assert len(table(at, "claim")) == len(known) < len(everything)
    assert figures.covered(everything) in [line.value for line in at.markdown]
    assert drive(at) > 10
    verdicts = {c["verdict"] for c in known}
    assert len(verdicts) > 3
    for verdict in verdicts:
        some = sorted({c["experiment"] for c in known if c["verdict"] == verdict})[:2]
        shown = table(page("claims", verdict=verdict, experiment=some), "claim")
        right = [c for c in known if c["verdict"] == verdict and c["experiment"] in some]
        assert right and shown["claim"].tolist() == [qualified(c) for c in right]
        assert shown["verdict"].tolist() == [f"{claims.MARKS[verdict]} {figures.worded(c)}" for c in right]
        assert shown["measured"].tolist() == [figures.format_measured_value(c) for c in right]
    at = page("claims", words="NO such claim")
    assert not at.error and "No claim matches" in words(at) and not at.dataframe


def test_laws_and_open_statements_have_tables_of_their_own(page, table):
    everything = figures.load(claims.RESULTS / "claims.json")
    at = page("claims")
    assert table(at, "law")["law"].tolist() == [qualified(c) for c in figures.laws(everything)]
    assert table(at, "statement")["statement"].tolist() == [
        statement.says for statement, _ in open_statements(everything)
    ]
    at = page("claims", experiment=["kl-variance"])
    assert len(table(at, "law")) == 17 and not any("statement" in shown.value.columns for shown in at.dataframe)
    at = page("claims", verdict=["not tested"], words="Diverges rl")
    assert table(at, "statement")["section"].tolist() == ["§6.1, Kernels"] * 2
    assert not any("law" in shown.value.columns for shown in at.dataframe)


def test_every_claim_is_in_the_chart_and_a_bar_says_its_experiment():
    everything = figures.of_sources(figures.load(claims.RESULTS / "claims.json"))
    rows = claims.counts(everything)
    assert sum(row["claims"] for row in rows) == len(everything) and all(row["claims"] for row in rows)
    (layer,) = claims.verdicts_drawn(rows).layers
    for name in {c["experiment"] for c in everything}:
        bars = [row for row in layer.rows if row["experiment"] == name]
        assert [row["left"] for row in bars] == [0, *(row["right"] for row in bars[:-1])], "without a gap"
        assert bars[-1]["right"] == sum(c["experiment"] == name for c in everything)
        assert [row["verdict"] for row in bars] == [
            v for v in claims.LOOKS if any(c["verdict"] == v for c in everything if c["experiment"] == name)
        ]


def test_the_answer_of_the_claims_page_is_what_the_records_say():
    everything = figures.of_sources(figures.load(claims.RESULTS / "claims.json"))
    verdicts = {
        name: Counter(c["verdict"] for c in everything if c["experiment"] == name)
        for name in {c["experiment"] for c in everything}
    }
    (first, most), (_, second) = Counter({name: found["contradicted"] for name, found in verdicts.items()}).most_common(
        2
    )
    assert "draft layers, mtp." in claims.PAGE.look and first == "mtp" and most > second
    engines = verdicts["async-rl"] + verdicts["weight-sync"]
    counts = f"{engines['reproduced']} of their {engines.total()} claims reproduce"
    assert f"Nothing is contradicted in async-rl and weight-sync: {counts}." in claims.PAGE.look
    assert not engines["contradicted"]


@pytest.mark.parametrize("content", [None, "[{", '[{"claim": 1}]', "[3]", '{"a": 1}'])
def test_broken_claims_are_one_line(page, tmp_path, monkeypatch, content):
    monkeypatch.setattr(claims, "RESULTS", tmp_path)
    if content is not None:
        (tmp_path / "claims.json").write_text(content)
    at = page("claims")
    assert len(at.error) == 1 and "\n" not in at.error[0].value


def test_a_missing_picture_is_named_and_the_others_show(page, tmp_path, monkeypatch):
    shutil.copytree(claims.RESULTS / "figures", tmp_path / "figures", ignore=shutil.ignore_patterns("*.json"))
    shutil.copy(claims.RESULTS / "claims.json", tmp_path)
    monkeypatch.setattr(claims, "RESULTS", tmp_path)
    (tmp_path / "figures" / "mtp.png").unlink()
    (tmp_path / "figures" / "cpt-rl.png").write_bytes(b"no picture")
    at = page("claims")
    assert {"mtp", "cpt-rl"} == {line.value.split()[3] for line in at.error}
    assert len(at.image) == len({c["experiment"] for c in figures.load(tmp_path / "claims.json")}) - 2


# ----------------------------------------------------------------------------------------- etude explore


def etude(*words, **environment):
    return subprocess.run(
        [sys.executable, "-m", "etude.cli.main", *words],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(claims.ROOT)} | environment,
    )


def test_explore_starts_streamlit_with_the_repositorys_page(monkeypatch, capsys):
    from etude.cli import course as course_commands
    from etude.cli import main as cli

    started = []
    monkeypatch.setattr(course_commands, "is_free", lambda port: True)
    monkeypatch.setattr(os, "execv", lambda program, words: started.append((program, words)))
    cli.app(["explore", "--port", "8765", "--no-browser"], standalone_mode=False)
    ((program, given),) = started
    assert program == given[0] == sys.executable and given[1:5] == [
        "-m",
        "streamlit",
        "run",
        str(claims.ROOT / "app.py"),
    ]
    assert (
        given[given.index("--server.fileWatcherType") + 1] == "none"
    )  # watching a checkout with its .venv took most of a core
    assert given[given.index("--server.port") + 1] == "8765" and given[given.index("--server.headless") + 1] == "true"
    assert "http://127.0.0.1:8765" in capsys.readouterr().out
    # Else a notice that advertises Streamlit to coding agents lies over the title of every page, where one of them is
    # installed.
    assert given[given.index("--logger.hideWelcomeMessage") + 1] == "true"


def test_explore_takes_the_next_port_that_is_free(monkeypatch, capsys):
    from etude.cli import course as course_commands
    from etude.cli import main as cli

    started = []
    monkeypatch.setattr(os, "execv", lambda program, words: started.append(words))
    monkeypatch.setattr(course_commands, "is_free", lambda port: port > 8502)
    cli.app(["explore"], standalone_mode=False)
    assert (
        started[0][started[0].index("--server.port") + 1] == "8503"
        and "http://127.0.0.1:8503" in capsys.readouterr().out
    )


def test_what_stands_in_the_way_of_explore_is_one_line(monkeypatch):
    import socket

    from etude.cli import main as cli

    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(RunError, match="is in use; choose another --port"):
            cli.app(["explore", "--port", str(taken.getsockname()[1])], standalone_mode=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for words in (["explore"], ["examples"], ["bench", "explorer"]):
        with pytest.raises(
            RunError, match=rf"^etude {' '.join(words)} needs Streamlit; in the clone: pip install -e '\.\[explore\]'$"
        ):
            cli.app(words, standalone_mode=False)
