"""Experiments and claims from the command line: what is written, what is refused, what is never lost."""

import dataclasses
import importlib
import json
import math
from pathlib import Path

import pytest

from etude import catalog, figures
from etude.runs import RunError, fill
from sims.experiment import VERDICTS, claim, decide


def finished(folder, name="kl-variance", quick=False, measured=1.0, seed=0):
    """A folder as `play` leaves it."""
    folder.mkdir(parents=True)
    record = {
        "experiment": name, "quick": quick, "command": f"etude figure {name}", "config": {"seed": seed},
        "machine": {"cpu": "a", "threads": 2, "torch": "2", "commit": "c"}, "seconds": {"one": 1.25, "two": 2.0},
        "claims": [claim("crossing", "k3 stops winning", "Fig. 4", measured, "reproduced", (0.5, 1.5), "nats", "a note")],
        "rows": [],
    }  # fmt: skip
    (folder / f"{name}.json").write_text(json.dumps(record))
    (folder / f"{name}.csv").write_text("a\n")
    (folder / f"{name}.png").write_bytes(b"picture")
    return folder


def test_gathering_keeps_what_other_experiments_said(tmp_path):
    out = tmp_path / "results" / "claims.json"
    out.parent.mkdir()
    other = claim("x", "y", "§1", None, "partly") | {"experiment": "gone", "command": "etude figure gone"}
    out.write_text(json.dumps([other]))
    figures.gather([finished(tmp_path / "a", measured=1.0)], out)
    claims = figures.gather([finished(tmp_path / "b", measured=2.0, seed=3)], out)
    assert [(c["experiment"], c["measured"]) for c in claims] == [("kl-variance", 2.0), ("gone", None)]
    assert claims[0]["seconds"] == 3.2 and claims[0]["seed"] == 3 and claims == figures.load(out)
    assert (tmp_path / "results" / "figures" / "kl-variance.png").read_bytes() == b"picture"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: finished(p, quick=True), "--quick, whose numbers prove nothing"),
        (lambda p: finished(p, name="alchemy"), "no experiment of this version"),
        (lambda p: p, "holds no finished experiment"),
    ],
)
def test_what_is_no_measurement_is_refused_and_nothing_written(tmp_path, make, says):
    out = tmp_path / "claims.json"
    with pytest.raises(RunError, match=says):
        figures.gather([finished(tmp_path / "good"), make(tmp_path / "bad")], out)
    assert not out.exists() and not (tmp_path / "figures").exists()


def test_missing_and_damaged_claims_are_named(tmp_path):
    with pytest.raises(RunError, match="does not exist; play experiments"):
        figures.load(tmp_path / "claims.json")
    (tmp_path / "claims.json").write_text("[{")
    with pytest.raises(RunError, match="is damaged"):
        figures.load(tmp_path / "claims.json")


@pytest.mark.parametrize("content", ["{}", "[3]", '[{"claim": "x"}]', "WRONG"])
def test_claims_that_are_none_are_named(tmp_path, ask, content):
    good = claim("x", "y", "§1", None, "partly") | {"experiment": "gone", "command": "etude figure gone"}
    text = json.dumps([good | {"verdict": "perhaps"}]) if content == "WRONG" else content
    (tmp_path / "claims.json").write_text(text)
    code, _, error = ask("claims", "--out", tmp_path / "claims.json")
    assert code == 2 and error.count("\n") == 1 and "is damaged" in error
    assert (tmp_path / "claims.json").read_text() == text


def test_a_command_is_read_off_the_settings(tmp_path):
    """However they were given, and by whomever a run was resumed."""
    from sims.grpo_bias import Experiment

    def command(config):
        return figures.command_of("grpo-bias", Experiment, json.loads(json.dumps(dataclasses.asdict(config))))

    assert command(Experiment()) == ("etude figure grpo-bias", False)
    assert command(Experiment.quick()) == ("etude figure grpo-bias --quick", True)
    changed = dataclasses.replace(Experiment(), seed=3, group_sizes=(2, 5))
    assert command(changed) == ("etude figure grpo-bias --set group_sizes=2,5 --set seed=3", False)
    sets = [word for word in command(changed)[0].split() if "=" in word]
    assert fill(Experiment, {}, sets) == changed
    assert command(dataclasses.replace(Experiment.quick(), seed=1)) == ("etude figure grpo-bias --quick --set seed=1", True)


def test_quick_stays_quick_when_resumed(tmp_path, monkeypatch, ask):
    """By a command that does not say so: its numbers prove nothing either way."""
    from sims import grpo_bias

    def cut(run, config):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(grpo_bias, "experiment", cut)
        code, _, said = ask("figure", "grpo-bias", "--quick", "--seed", 2, "--out", tmp_path / "x")
    assert code == 130 and f"etude figure grpo-bias --out {tmp_path / 'x'} --resume" in said
    found = {"rows": [{"a": 1}], "claims": [claim("n", "s", "§", 1.0, "partly")]}
    monkeypatch.setattr(grpo_bias, "experiment", lambda run, config: found)
    monkeypatch.setattr(grpo_bias, "picture", lambda found, path: path.write_bytes(b""))
    assert ask("figure", "grpo-bias", "--out", tmp_path / "x", "--resume")[0] == 0
    record = json.loads((tmp_path / "x" / "grpo-bias.json").read_text())
    assert record["quick"] and record["command"] == "etude figure grpo-bias --quick --set seed=2"
    code, _, said = ask("claims", tmp_path / "x", "--out", tmp_path / "claims.json")
    assert code == 2 and "whose numbers prove nothing" in said


@pytest.mark.parametrize("entry", catalog.EXPERIMENTS, ids=lambda entry: entry.name)
def test_the_committed_record_was_played_by_its_command(entry):
    record = json.loads((Path(__file__).resolve().parents[2] / "results" / "figures" / f"{entry.name}.json").read_text())
    settings = importlib.import_module(entry.module).Experiment
    assert figures.command_of(entry.name, settings, record["config"]) == (record["command"], record["quick"]) and not record["quick"]


def test_a_table_where_a_number_belongs(tmp_path, ask):
    (tmp_path / "bad.toml").write_text("[seed]\nx = 1\n")
    code, _, said = ask("figure", "grpo-bias", "--quick", "--config", tmp_path / "bad.toml", "--out", tmp_path / "x")
    assert code == 2 and said.count("\n") == 1 and "seed" in said and not (tmp_path / "x").exists()


def test_tables_say_the_interval_and_the_unit(tmp_path, capsys):
    claims = figures.gather([finished(tmp_path / "a", measured=0.62831)], tmp_path / "claims.json")
    assert "| 0.628 [0.5, 1.5] nats | reproduced | `etude figure kl-variance` |" in figures.markdown(claims)
    figures.show([claims[0] | {"verdict": "partly"}])
    assert "a note" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"verdict": "true"}, "verdict must be one of"),
        ({"measured": math.nan}, "measured must be finite"),
        ({"interval": (2.0, 1.0)}, "interval must be"),
        ({"interval": (0.0, math.inf)}, "interval must be"),
    ],
)
def test_a_claim_is_checked(change, says):
    with pytest.raises(ValueError, match=says):
        claim(**({"name": "n", "says": "s", "source": "§", "measured": 1.0, "verdict": "partly"} | change))


def test_verdicts():
    assert [decide(True), decide(False, True), decide(False)] == list(VERDICTS)


def test_bad_words_cost_one_line(ask, tmp_path):
    code, _, error = ask("figure", "kl-varience", "--out", tmp_path / "x")
    assert code == 2 and error.count("\n") == 1 and "did you mean kl-variance" in error
    code, _, error = ask("figure", "kl-variance", "--set", "run=/nowhere", "--out", tmp_path / "x")
    assert code == 2 and "is no run of the recipe" in error and error.count("\n") == 1
    assert not (tmp_path / "x").exists()
    code, out, _ = ask("figure")
    assert code == 0 and all(entry.name in out for entry in catalog.EXPERIMENTS)
