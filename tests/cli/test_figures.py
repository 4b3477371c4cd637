"""Experiments and claims from the command line: what is written, what is refused, what is never lost."""

import json
import math

import pytest

from etude import catalog, figures
from etude.runs import RunError
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
