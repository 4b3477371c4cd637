"""Experiments and claims from the command line: what is written, what is refused, what is never lost."""

import dataclasses
import importlib
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude import catalog
from etude.ledger import figures, fingerprints, statements
from kit.disk import seal_record
from kit.settings import RunError, fill
from sims.experiment import (
    LAW_VERDICTS,
    VERDICTS,
    above,
    at_least,
    at_most,
    below,
    between,
    claim,
    is_law,
    judge,
    untested,
)

RESULTS = Path(__file__).resolve().parents[2] / "results"


def finished(folder, name="kl-variance", quick=False, measured=1.0, seed=0):
    """A folder as `play` leaves it."""
    folder.mkdir(parents=True)
    record = {
        "experiment": name,
        "quick": quick,
        "command": f"etude figure {name}",
        "config": {"seed": seed},
        "machine": {"cpu": "a", "threads": 2, "torch": "2", "commit": "c"},
        "seconds": {"one": 1.25, "two": 2.0},
        "claims": [claim("crossing", "k3 stops winning", "Fig. 4", measured, above(), (0.5, 1.5), "nats", "a note")],
        "rows": [],
    }
    if entry := catalog.find_experiment(name):
        record |= fingerprints.fingerprints(entry.sim)
    record = seal_record(record)
    (folder / f"{name}.json").write_text(json.dumps(record))
    (folder / f"{name}.csv").write_text("a\n")
    (folder / f"{name}.png").write_bytes(b"picture")
    return folder


def rewritten(path, sealed=True, **changes):
    """Changes a record on disk, and seals it again."""
    record = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(seal_record(record) if sealed else record))


def test_gathering_keeps_what_other_experiments_said(tmp_path):
    out = tmp_path / "results" / "claims.json"
    out.parent.mkdir()
    other = claim("x", "y", "§1", None, above()) | {"experiment": "gone", "command": "etude figure gone"}
    out.write_text(json.dumps([other]))
    figures.gather([finished(tmp_path / "a", measured=1.0)], out)
    claims = figures.gather([finished(tmp_path / "b", measured=2.0, seed=3)], out)
    assert [(c["experiment"], c["measured"]) for c in claims] == [("kl-variance", 2.0), ("gone", None)]
    assert claims[0]["seconds"] == 3.2 and claims[0]["seed"] == 3 and claims == figures.load(out)
    assert (tmp_path / "results" / "figures" / "kl-variance.png").read_bytes() == b"picture"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: finished(p, quick=True), "--quick, which gives no verdicts"),
        (lambda p: finished(p, name="alchemy"), "not an experiment of this version"),
        (lambda p: p, "contains no finished experiment"),
    ],
)
def test_what_is_no_measurement_is_refused_and_nothing_written(tmp_path, make, says):
    out = tmp_path / "claims.json"
    with pytest.raises(RunError, match=says):
        figures.gather([finished(tmp_path / "good"), make(tmp_path / "bad")], out)
    assert not out.exists() and not (tmp_path / "figures").exists()


def test_missing_and_damaged_claims_are_named(tmp_path):
    with pytest.raises(RunError, match="does not exist; run experiments"):
        figures.load(tmp_path / "claims.json")
    (tmp_path / "claims.json").write_text("[{")
    with pytest.raises(RunError, match="is damaged"):
        figures.load(tmp_path / "claims.json")


def test_outside_a_clone_the_clones_claims_are_shown(tmp_path, ask, monkeypatch):
    """Those of the folder come first, as where experiments were gathered; an etude without a clone says in a line what
    to do."""
    monkeypatch.chdir(tmp_path)
    assert ask("claims", "--figure", "kl-variance") == ask(
        "claims", "--figure", "kl-variance", "--out", figures.COMMITTED
    )
    assert ask("claims", "--figure", "kl-variance")[0] == 0
    monkeypatch.setattr(figures, "COMMITTED", tmp_path / "no" / "claims.json")
    code, out, error = ask("claims", "--verdict", "holds")
    assert (
        code == 2
        and out == ""
        and error.count("\n") == 1
        and "results/claims.json does not exist; run experiments with etude figure" in error
    )
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "claims.json").write_text("[]")
    assert figures.find_claims_file() == Path("results/claims.json")


@pytest.mark.parametrize("content", ["{}", "[3]", '[{"claim": "x"}]', "WRONG"])
def test_claims_that_are_none_are_named(tmp_path, ask, content):
    good = claim("x", "y", "§1", None, above()) | {"experiment": "gone", "command": "etude figure gone"}
    text = json.dumps([good | {"verdict": "perhaps"}]) if content == "WRONG" else content
    (tmp_path / "claims.json").write_text(text)
    code, _, error = ask("claims", "--out", tmp_path / "claims.json")
    assert code == 2 and error.count("\n") == 1 and "is damaged" in error
    assert (tmp_path / "claims.json").read_text() == text


def test_a_command_is_read_off_the_settings(tmp_path):
    """However they were given, and by whomever a run was resumed."""
    from sims.grpo_bias.experiment import Experiment

    def command(config):
        return figures.command_of("grpo-bias", Experiment, json.loads(json.dumps(dataclasses.asdict(config))))

    assert command(Experiment()) == ("etude figure grpo-bias", False)
    assert command(Experiment.quick()) == ("etude figure grpo-bias --quick", True)
    changed = dataclasses.replace(Experiment(), seed=3, group_sizes=(2, 5))
    assert command(changed) == ("etude figure grpo-bias --set group_sizes=2,5 --set seed=3", False)
    sets = [word for word in command(changed)[0].split() if "=" in word]
    assert fill(Experiment, {}, sets) == changed
    assert command(dataclasses.replace(Experiment.quick(), seed=1)) == (
        "etude figure grpo-bias --quick --set seed=1",
        True,
    )


def test_quick_stays_quick_when_resumed(tmp_path, monkeypatch, ask):
    """By a command that does not say so: its numbers prove nothing either way."""
    from sims.grpo_bias import experiment as grpo_bias

    def cut(run, config):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(grpo_bias, "experiment", cut)
        code, _, said = ask("figure", "grpo-bias", "--quick", "--seed", 2, "--out", tmp_path / "x")
    assert code == 130 and f"etude figure grpo-bias --out {tmp_path / 'x'} --resume" in said
    found = {"rows": [{"a": 1}], "claims": [claim("n", "s", "§", 1.0, above())]}
    monkeypatch.setattr(grpo_bias, "experiment", lambda run, config: found)
    monkeypatch.setattr(grpo_bias, "picture", lambda found, path: path.write_bytes(b""))
    assert ask("figure", "grpo-bias", "--out", tmp_path / "x", "--resume")[0] == 0
    record = json.loads((tmp_path / "x" / "grpo-bias.json").read_text())
    assert record["quick"] and record["command"] == "etude figure grpo-bias --quick --set seed=2"
    code, _, said = ask("claims", tmp_path / "x", "--out", tmp_path / "claims.json")
    assert code == 2 and "which gives no verdicts" in said


def test_quick_gives_no_verdict(tmp_path, monkeypatch, ask):
    """Its numbers prove nothing; what the full experiment found stands beside them. Played again, it takes the next
    free folder."""
    from sims.grpo_bias import experiment as grpo_bias

    names = ("reached", "missed", "new")
    found = {
        "rows": [{"a": 1}],
        "claims": [claim(name, f"claim {name}", "§", 0.125, above(), (-1, 1), note="too small") for name in names],
    }
    needs = ({}, {"else": False})
    full = [
        claim(name, "c", "§", 0.75, above(), needs=n) | {"experiment": "grpo-bias", "command": "x"}
        for name, n in zip(names, needs)
    ]
    (tmp_path / "claims.json").write_text(json.dumps(full + [full[0] | {"experiment": "another", "name": "new"}]))
    monkeypatch.setattr(figures, "COMMITTED", tmp_path / "claims.json")
    monkeypatch.setattr(grpo_bias, "experiment", lambda run, config: found)
    monkeypatch.setattr(grpo_bias, "picture", lambda found, path: path.write_bytes(b""))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    for folder in ("grpo-bias-quick", "grpo-bias-quick-2"):
        code, said, _ = ask("figure", "grpo-bias", "--quick")
        assert (
            code == 0
            and "not at this scale" not in said
            and "too small" not in said
            and f"verdict: runs/figure/{folder}/grpo-bias.json" in said
        )
        rows = [line.split() for line in said.splitlines() if line.startswith("claim ") and "quick:" in line]
        assert [row[-2:] for row in rows] == [["0.75", "reproduced"], ["0.75", "partly"], ["–", "–"]]
        assert all(row[3] == "0.125" and "quick: no verdict" in " ".join(row) for row in rows)
    assert "etude figure grpo-bias" in said
    code, said, _ = ask("figure", "grpo-bias", "--out", "full")
    assert code == 0 and "not at this scale" in said and "quick" not in said


@pytest.mark.parametrize("entry", catalog.EXPERIMENTS, ids=lambda entry: entry.name)
def test_quick_is_there_for_every_experiment_and_needs_no_run(entry):
    """But for `base-eval`, which judges bases that are there. The command says --quick also where one more setting is
    changed."""
    settings = importlib.import_module(entry.module).Experiment
    quick = settings.quick()
    assert quick != settings() and (entry.name == "base-eval" or not getattr(quick, "run", ""))
    played = json.loads(json.dumps(dataclasses.asdict(dataclasses.replace(quick, seed=quick.seed + 1))))
    assert figures.command_of(entry.name, settings, played) == (
        f"etude figure {entry.name} --quick --set seed={quick.seed + 1}",
        True,
    )


@pytest.mark.parametrize("entry", catalog.EXPERIMENTS, ids=lambda entry: entry.name)
def test_the_committed_record_was_played_by_its_command(entry):
    record = json.loads((RESULTS / "figures" / f"{entry.name}.json").read_text())
    settings = importlib.import_module(entry.module).Experiment
    assert (
        figures.command_of(entry.name, settings, record["config"]) == (record["command"], record["quick"])
        and not record["quick"]
    )


def test_a_table_where_a_number_belongs(tmp_path, ask):
    (tmp_path / "bad.toml").write_text("[seed]\nx = 1\n")
    code, _, said = ask("figure", "grpo-bias", "--quick", "--config", tmp_path / "bad.toml", "--out", tmp_path / "x")
    assert code == 2 and said.count("\n") == 1 and "seed" in said and not (tmp_path / "x").exists()


def test_tables_say_the_interval_and_the_unit(tmp_path, capsys):
    claims = figures.gather([finished(tmp_path / "a", measured=0.62831)], tmp_path / "claims.json")
    assert "| 0.628 [0.5, 1.5] nats | reproduced | `etude figure kl-variance` |" in figures.markdown(claims)
    figures.show([claims[0] | {"verdict": "partly"}])
    assert "a note" in capsys.readouterr().out
    law = claim("l", "a sum is a sum", "closed form", 2e-16, at_most(1e-9)) | {
        "experiment": "x",
        "command": "etude figure x",
    }
    figures.show([law])
    said = capsys.readouterr().out
    assert "a sum is a sum" in said and "at most 1e-09" in said and "holds" in said and "claim " not in said
    assert figures.markdown([*claims, law]) == figures.markdown(claims)
    assert (
        "| a sum is a sum | closed form | 2e-16 | at most 1e-09 | holds | `etude figure x` |"
        in figures.markdown_laws([*claims, law])
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rule": {"kind": "true"}}, "a rule must be one of above, below"),
        ({"rule": {"kind": "above", "null": 0.0}}, "with its own fields"),
        ({"rule": above(1.0, 0.5)}, "amount must be on the claim's side of null"),
        ({"value": None, "interval": (0.0, 1.0)}, "needs a measured number"),
        ({"value": math.nan}, "measured must be finite"),
        ({"interval": (2.0, 1.0)}, "interval must be"),
        ({"interval": (0.0, math.inf)}, "interval must be"),
    ],
)
def test_a_claim_is_checked(change, says):
    with pytest.raises(ValueError, match=says):
        claim(**({"name": "n", "says": "s", "source": "§", "value": 1.0, "rule": above()} | change))


@pytest.mark.parametrize(
    ("rule", "interval", "needs", "verdict"),
    [
        (above(), (0.1, 0.3), {}, "reproduced"),
        (above(), (0.1, 0.3), {"every seed": False}, "partly"),
        (above(), (0.0, 0.3), {}, "not at this scale"),
        (above(), (-0.1, 0.3), {"every seed": False}, "not at this scale"),
        (above(), (-0.3, -0.1), {}, "contradicted"),
        (above(1.0), (0.8, 0.9), {}, "contradicted"),
        (below(), (-0.3, -0.1), {}, "reproduced"),
        (below(), (0.1, 0.3), {}, "contradicted"),
        (above(1.0, 2.0), (1.9, 2.2), {}, "reproduced"),
        (above(1.0, 2.0), (1.7, 1.9), {}, "partly"),
        (above(1.0, 2.0), (1.6, 2.2), {}, "partly"),  # the upper end reaches the amount, the measured value does not
        (
            above(1.0, 2.0),
            (1.2, 3.8),
            {},
            "partly",
        ),  # how much is open: the interval holds less than half of the amount
        (above(1.0, 2.0), (1.1, 1.2), {}, "not at this scale"),  # a sixth faster is no part of twice as fast
        (above(1.0, 2.0), (1.1, 2.5), {"every seed": False}, "partly"),
        (below(1.0, 0.5), (0.4, 0.55), {}, "reproduced"),
        (below(1.0, 0.5), (0.48, 0.56), {}, "partly"),
        (below(1.0, 0.5), (0.8, 0.9), {}, "not at this scale"),
        (between(0.9, 1.1), (0.95, 1.05), {}, "reproduced"),
        (between(0.9, 1.1), (0.95, 1.2), {}, "not at this scale"),
        (between(0.9, 1.1), (1.2, 1.3), {}, "contradicted"),
        (untested(), (0.1, 0.3), {}, "not tested"),
        (at_most(0.2), (0.1, 0.3), {}, "holds"),
        (at_most(0.1), (0.1, 0.3), {}, "broken"),
        (at_least(0.2), (0.1, 0.3), {}, "holds"),
        (at_least(0.2), (0.1, 0.3), {"bounded": False}, "broken"),
    ],
)
def test_verdicts(rule, interval, needs, verdict):
    assert judge(rule, sum(interval) / 2, interval, needs) == verdict
    assert judge(rule, None) == "not tested"
    assert (verdict in LAW_VERDICTS) == is_law(rule) and verdict in VERDICTS + LAW_VERDICTS


NUMBERS = st.floats(-10, 10)
INTERVALS = st.tuples(NUMBERS, NUMBERS, NUMBERS).map(sorted)


@given(INTERVALS, NUMBERS, st.none() | st.floats(0.1, 5), st.booleans())
def test_what_holds_the_null_shows_no_effect(where, null, more, met):
    """Neither reproduced nor partly, whatever the amount; wholly on the wrong side is contradicted; downwards is
    upwards in a mirror."""
    low, measured, high = where
    rule = above(null, None if more is None else null + more)
    verdict = judge(rule, measured, (low, high), {"every seed": met})
    assert (verdict == "contradicted") == (high < null)
    assert verdict not in ("reproduced", "partly") or low > null
    assert verdict != "reproduced" or met
    mirrored = below(-null, None if more is None else -(null + more))
    assert judge(mirrored, -measured, (-high, -low), {"every seed": met}) == verdict


def test_rules_in_words():
    needy = claim("n", "s", "§", 1.0, above(1.0, 2.0), needs={"every seed": True, "a line": False})
    assert figures.ruled(needy) == "above 1, as far as 2; every seed: yes; a line: no"
    words = [
        figures.ruled(claim("n", "s", "§", 1.0, rule))
        for rule in (below(), between(0.9, 1.1), at_most(1e-9), untested())
    ]
    assert words == ["below 0", "between 0.9 and 1.1", "at most 1e-09", "none applies"]


def test_a_number_alone_is_its_own_interval():
    assert (
        judge(above(), 0.0) == "not at this scale"
        and judge(above(), 1.0) == "reproduced"
        and judge(above(), -1.0) == "contradicted"
    )


# ------------------------------------------------------------------------------------------------ the ledger


def ids(claims):
    return [f"{c['experiment']}/{c['name']}" for c in claims]


def test_no_committed_verdict_is_other_than_its_rule_makes_it():
    claims = figures.load(RESULTS / "claims.json")
    assert (
        len(claims) > 50
        and figures.laws(claims)
        and len(figures.of_sources(claims)) + len(figures.laws(claims)) == len(claims)
    )
    for one in claims:
        if one["verdict"] == "stale":
            assert one["note"].startswith("stale: "), one["name"]
            continue
        assert judge(one["rule"], one["measured"], one["interval"], one["needs"]) == one["verdict"], one["name"]
        assert one["verdict"] in (LAW_VERDICTS if is_law(one["rule"]) else VERDICTS)
        if one["measured"] is None:
            assert one["verdict"] == "not tested", one["name"]
            continue
        low, high = one["interval"] or (one["measured"], one["measured"])
        if one["rule"]["kind"] in ("above", "below") and low <= one["rule"]["null"] <= high:
            assert one["verdict"] == "not at this scale", one["name"]
        assert one["verdict"] in ("reproduced", "holds") or one["note"], f"{one['name']} does not say why"


def test_a_ledger_s_numbers_are_the_same_on_every_machine():
    """A sum in another order differs in its last digits: numpy's and LAPACK's order depends on the processor."""
    here, there = (
        {"measured": -0.45494522518376 + off, "interval": [1e-9 * (1 + off), 2.0], "note": "0.1"}
        for off in (0.0, 3e-16)
    )
    assert here != there and figures.rounded(here) == figures.rounded(there) == {
        "measured": -0.4549452252,
        "interval": [1e-9, 2.0],
        "note": "0.1",
    }


def test_the_committed_claims_are_made_of_the_committed_records(tmp_path):
    """etude claims results/figures, to the last byte: no figure and no verdict is written by hand."""
    figures.gather([RESULTS / "figures"], tmp_path / "claims.json")
    assert (tmp_path / "claims.json").read_bytes() == (RESULTS / "claims.json").read_bytes()
    for entry in catalog.EXPERIMENTS:
        for ending in ("png", "csv", "json"):
            name = f"{entry.name}.{ending}"
            assert (tmp_path / "figures" / name).read_bytes() == (RESULTS / "figures" / name).read_bytes()


def test_gathering_where_the_records_lie_already(tmp_path):
    one = finished(tmp_path / "results" / "figures")
    record = (one / "kl-variance.json").read_text()
    assert ids(figures.gather([one], tmp_path / "results" / "claims.json")) == ["kl-variance/crossing"]
    assert (one / "kl-variance.json").read_text() == record and (one / "kl-variance.png").read_bytes() == b"picture"


def test_a_verdict_against_its_rule_is_refused(tmp_path):
    """In the file, in a record, and before a record is written."""
    path = tmp_path / "a" / "kl-variance.json"
    finished(path.parent)
    path.write_text(path.read_text().replace('"verdict": "reproduced"', '"verdict": "partly"'))
    rewritten(path)
    with pytest.raises(
        RunError, match="cannot judge .*by its rule crossing is 'reproduced', not 'partly'.*run kl-variance again"
    ):
        figures.gather([path.parent], tmp_path / "claims.json")
    assert not (tmp_path / "claims.json").exists()
    claims = figures.gather([finished(tmp_path / "b")], tmp_path / "claims.json")
    (tmp_path / "claims.json").write_text(json.dumps([claims[0] | {"interval": [-1.0, 3.0]}]))
    with pytest.raises(RunError, match="is damaged .*by its rule crossing is 'not at this scale', not 'reproduced'"):
        figures.load(tmp_path / "claims.json")


@pytest.mark.parametrize("name", [entry.name for entry in catalog.EXPERIMENTS])
def test_a_loosened_bound_in_a_copied_record_is_refused(tmp_path, name):
    """And so is every other change: the record is sealed."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for ending in ("json", "csv", "png"):
        (folder / f"{name}.{ending}").write_bytes((RESULTS / "figures" / f"{name}.{ending}").read_bytes())
    figures.gather([folder], tmp_path / "claims.json")
    claims = json.loads((folder / f"{name}.json").read_text())["claims"]
    for loosened in claims:
        if is_law(loosened["rule"]):
            loosened["rule"]["bound"] *= 2 if loosened["rule"]["kind"] == "at most" else 0.5
            loosened["rule"]["bound"] += 1e-3 if loosened["rule"]["kind"] == "at most" else -1e-3
        else:
            loosened["note"] += "."
    rewritten(folder / f"{name}.json", sealed=False, claims=claims)
    with pytest.raises(RunError, match=f"record of {name} that was changed"):
        figures.gather([folder], tmp_path / "claims.json")


def test_rows_of_other_code_are_stale_and_count_as_nothing(tmp_path, capsys):
    path = finished(tmp_path / "a") / "kl-variance.json"
    fresh = json.loads(path.read_text())
    assert figures.gather([path.parent], tmp_path / "claims.json")[0]["verdict"] == "reproduced"
    changes = {
        "sources": fresh["sources"] | {"sims/kl_variance/experiment.py": "0" * 16},
        "rules": {key: value for key, value in fresh["rules"].items() if key != "sims/experiment.py"},
    }
    for half, reason in (
        ("sources", "what sims/kl_variance/experiment.py measures has changed"),
        ("rules", "what sims/experiment.py judges has changed"),
    ):
        rewritten(path, **{"sources": fresh["sources"], "rules": fresh["rules"]} | {half: changes[half]})
        (stale,) = figures.gather([path.parent], tmp_path / "claims.json")
        assert stale["verdict"] == "stale" and stale["note"] == f"stale: {reason}; a note"
        assert figures.load(tmp_path / "claims.json") == [stale] and statements.coverage([stale])[0] == 0
    path.write_text(json.dumps({key: value for key, value in fresh.items() if key not in ("sources", "rules", "seal")}))
    rewritten(path)
    (earlier,) = figures.gather([path.parent], tmp_path / "claims.json")
    assert earlier["verdict"] == "reproduced" and figures.worded(earlier) == "reproduced, code not recorded"
    rewritten(path, **{"sources": fresh["sources"], "rules": changes["rules"]})
    figures.gather([path.parent], tmp_path / "claims.json")
    figures.show(figures.load(tmp_path / "claims.json"))
    assert "stale" in capsys.readouterr().out


def test_a_run_goes_on_only_under_the_code_that_began_it(tmp_path, monkeypatch, ask):
    from sims.grpo_bias import experiment as grpo_bias

    found = {"rows": [{"a": 1}], "claims": [claim("n", "s", "§", 1.0, above())]}
    monkeypatch.setattr(grpo_bias, "experiment", lambda run, config: found)
    monkeypatch.setattr(grpo_bias, "picture", lambda found, path: path.write_bytes(b""))
    assert ask("figure", "grpo-bias", "--out", tmp_path / "x")[0] == 0
    record = json.loads((tmp_path / "x" / "grpo-bias.json").read_text())
    assert fingerprints.is_sealed(record) and fingerprints.stale_reasons(record, "sims/grpo_bias/experiment.py") == []
    assert ask("figure", "grpo-bias", "--out", tmp_path / "x", "--resume")[0] == 0
    code = json.loads((tmp_path / "x" / "code.json").read_text())
    code["sources"]["sims/words.py"] = "another"
    (tmp_path / "x" / "code.json").write_text(json.dumps(code))
    status, _, error = ask("figure", "grpo-bias", "--out", tmp_path / "x", "--resume")
    assert (
        status == 2
        and error.count("\n") == 1
        and "was started with other code (what sims/words.py measures has changed)" in error
    )


def test_a_broken_law_ends_a_run_with_1(tmp_path, monkeypatch, ask):
    """A law holds at any size, with --quick too. A claim that is not reproduced is no error."""
    from sims.grpo_bias import experiment as grpo_bias

    monkeypatch.setattr(grpo_bias, "picture", lambda found, path: path.write_bytes(b""))
    for measured, status in ((0.5, 0), (2.0, 1)):
        claims = [claim("sum", "a sum is a sum", "§", measured, at_most(1.0)), claim("n", "s", "§", -1.0, above())]
        monkeypatch.setattr(
            grpo_bias, "experiment", lambda run, config, claims=claims: {"rows": [{"a": 1}], "claims": claims}
        )
        for quick in ([], ["--quick"]):
            code, out, error = ask("figure", "grpo-bias", *quick, "--out", tmp_path / f"{status}{len(quick)}")
            assert (
                code == status
                and ("broken: sum (2, at most 1)" in error) == bool(status)
                and ("broken" in out or not status)
            )


EXPERIMENT = '''"""Doc."""
from sims.experiment import above, claim
from sims.shapes import area
from recipe.small.agent import play

def measure(c):
    "Doc."
    return area(c) + play(c)

def verdicts(c):
    note = f"of {c} files"
    return [claim("n", "as the source says", "§1", measure(c), above(0.5), note=note)]

def picture(found, path):
    draw(found)
'''
SHAPES = "def area(c):\n    return c * c\n"


@pytest.mark.parametrize(
    ("file", "old", "new", "half"),
    [
        ("sims/x.py", "area(c) + play(c)", "area(c) - play(c)", "sources"),
        ("sims/shapes.py", "c * c", "c * 2", "sources"),
        ("sims/x.py", "above(0.5)", "above(0.4)", "rules"),
        ("sims/experiment.py", "return rule", "return not rule", "rules"),
        ("sims/x.py", "as the source says", "in other words", ""),
        ("sims/x.py", "of {c} files", "of {c} texts", ""),
        ("sims/x.py", '"""Doc."""', "# no docstring", ""),
        ("sims/x.py", "draw(found)", "draw(path)", ""),
        ("recipe/small/agent.py", "1", "2", ""),
    ],
)
def test_what_changes_a_fingerprint(file, old, new, half):
    """Code that measures or judges does, in the experiment's file or in one that it imports; prose, pictures and shared
    code do not."""
    files = {
        "sims/x.py": EXPERIMENT,
        "sims/shapes.py": SHAPES,
        "recipe/small/agent.py": "def play(c): return 1",
        "sims/experiment.py": "def judge(rule):\n    return rule\n",
    }
    assert old in files[file]
    before = fingerprints.fingerprints("sims/x.py", files.get)
    after = fingerprints.fingerprints("sims/x.py", (files | {file: files[file].replace(old, new)}).get)
    assert before["sources"].keys() == {"sims/x.py", "sims/shapes.py"} and before["rules"].keys() == {
        "sims/x.py",
        "sims/experiment.py",
    }
    assert [key for key in before if before[key] != after[key]] == ([half] if half else [])


def test_a_record_is_renewed_only_if_quick_measures_the_same(tmp_path, monkeypatch):
    """To the last bit, rows and claims, at the record's commit and here; then its wording is today's too."""
    (tmp_path / "results" / "figures").mkdir(parents=True)
    path = finished(tmp_path / "a") / "kl-variance.json"
    rewritten(path, sources={"sims/kl_variance/experiment.py": "before"}, machine={"commit": "HEAD"})
    place = tmp_path / "results" / "figures" / path.name
    place.write_text(path.read_text())
    today = fingerprints.fingerprints("sims/kl_variance/experiment.py")
    monkeypatch.setattr(fingerprints, "results_folder", lambda: place.parent)
    quick = {
        "rows": [{"a": 1.0, "step_s": 0.1}],
        "claims": [claim("crossing", "k3 stops winning", "Fig. 4", 1.0, above())],
    }
    new = {"rows": [{"a": 1.0, "step_s": 0.2}], "claims": [claim("crossing", "in other words", "Fig. 4", 1.0, above())]}
    runs = {"HEAD": quick, None: {**new, "rows": [{"a": 1.0 + 1e-15}]}}
    monkeypatch.setattr(fingerprints, "quick_record", lambda name, at, folder: runs[at])
    with pytest.raises(RunError, match="gives other results since HEAD: row 0, a"):
        fingerprints.renew("kl-variance")
    assert place.read_text() == path.read_text()
    runs[None] = new
    assert "1 rows and 1 claims of --quick are the same" in fingerprints.renew("kl-variance")
    record = json.loads(place.read_text())
    assert fingerprints.is_sealed(record) and {half: record[half] for half in today} == today
    assert [c["claim"] for c in record["claims"]] == ["in other words"] and record["renewed"][
        "compared"
    ] == "1 rows of --quick"
    with pytest.raises(RunError, match="there is no experiment 'alchemy'"):
        fingerprints.renew("alchemy")


def test_a_record_is_compared_with_another_commit_only_if_it_was_not_stale_there(tmp_path, monkeypatch):
    path = finished(tmp_path / "a") / "kl-variance.json"
    monkeypatch.setattr(fingerprints, "results_folder", lambda: path.parent)
    quick, commits = {"rows": [{"a": 1.0}], "claims": []}, []
    monkeypatch.setattr(fingerprints, "quick_record", lambda name, at, folder: commits.append(at) or quick)
    rewritten(
        path,
        machine={"commit": "HEAD"},
        **fingerprints.fingerprints("sims/kl_variance/experiment.py", fingerprints.at_commit("HEAD")),
    )
    assert "are the same as at HEAD" in fingerprints.renew("kl-variance", "HEAD") and commits == ["HEAD", None]
    assert json.loads(path.read_text())["renewed"]["with"] == "HEAD"
    record = json.loads(path.read_text())
    for changed in (
        record | {"sources": {"sims/kl_variance/experiment.py": "before"}},
        {key: value for key, value in record.items() if key != "sources"},
    ):
        path.write_text(json.dumps(seal_record(changed)))
        before = path.read_text()
        with pytest.raises(RunError, match="had changed before HEAD"):
            fingerprints.renew("kl-variance", "HEAD")
        assert path.read_text() == before and commits == ["HEAD", None]
    with pytest.raises(
        RunError,
        match="cannot compare kl-variance with nowhere, which is not a commit of this checkout; give --at one that is",
    ):
        fingerprints.renew("kl-variance", "nowhere")


def test_every_claim_hangs_on_a_statement_and_every_statement_says_what_tests_it():
    named = [name for statement in statements.STATEMENTS for name in statement.tests]
    assert sorted(named) == sorted(ids(figures.load(RESULTS / "claims.json")))  # once each
    names = [statement.name for statement in statements.STATEMENTS]
    assert len(set(names)) == len(names) == len({statement.says for statement in statements.STATEMENTS})
    for statement in statements.STATEMENTS:
        assert statement.section and bool(statement.tests) != bool(statement.reason), (
            f"{statement.name}: either tests, or why there are none"
        )
    held = {
        word.rstrip(";")
        for statement in statements.STATEMENTS
        for word in statement.reason.split()
        if word.startswith("tests/")
    }
    assert held and all((RESULTS.parent / path).is_file() for path in held)


def test_coverage_counts_statements(monkeypatch):
    """One tested, one tested by a law alone, one whose only claim was not tested, one that nothing tests."""
    some = tuple(
        statements.Statement(n, "§1", n, tests, why)
        for n, tests, why in (
            ("a", ("x/1", "x/2"), ""),
            ("b", ("x/3",), ""),
            ("c", ("x/4",), ""),
            ("d", (), "needs a GPU"),
        )
    )
    monkeypatch.setattr(statements, "STATEMENTS", some)
    claims = [
        claim(n, n, "§1", 1.0, rule, note="too few; more") | {"experiment": "x"}
        for n, rule in (("1", untested()), ("2", above(2.0)), ("3", at_most(1.0)), ("4", untested()))
    ]
    assert statements.coverage(claims) == (2, 1, 4)
    assert [(statement.name, why) for statement, why in statements.open_statements(claims)] == [
        ("c", "too few"),
        ("d", "needs a GPU"),
    ]
    assert statements.open_statements([])[2][1] == "x/4 was not run"
    assert (
        figures.covered(claims) == "2 of the sources' 4 testable statements are tested, 1 of them by laws alone (50%)."
    )


def test_the_ledger_from_the_command_line(ask):
    code, out, _ = ask("claims", "--all")
    claims = figures.load(RESULTS / "claims.json")
    words = " ".join(out.split())
    assert figures.covered(claims) in words
    parts = [words.index(part) for part in ("claim source", "law source", "not tested source", "testable statements")]
    assert code == 0 and parts == sorted(parts) and "transparent proxy" in words


def test_bad_words_cost_one_line(ask, tmp_path):
    code, _, error = ask("figure", "kl-varience", "--out", tmp_path / "x")
    assert code == 2 and error.count("\n") == 1 and "did you mean kl-variance" in error
    code, _, error = ask("figure", "kl-variance", "--set", "run=/nowhere", "--out", tmp_path / "x")
    assert code == 2 and "is not a run of the recipe" in error and error.count("\n") == 1
    assert not (tmp_path / "x").exists()
    code, out, _ = ask("figure")
    assert code == 0 and all(entry.name in out for entry in catalog.EXPERIMENTS)


def test_claims_of_one_verdict_or_figure_and_their_number(tmp_path, ask):
    out = tmp_path / "claims.json"
    rows = [("one", 1.0, above(), "x"), ("two", 2.0, above(3.0), "x"), ("three", 0.5, above(), "y")]
    claims = [
        claim(name, f"claim {name}", "§1", value, rule) | {"experiment": where, "command": ""}
        for name, value, rule, where in rows
    ]
    out.write_text(json.dumps(claims))
    verdicts = [one["verdict"] for one in claims]
    assert verdicts[0] == verdicts[2] != verdicts[1]
    code, said, _ = ask("claims", "--out", out, "--all")
    assert code == 0 and "statements are tested" in said and "3 claims: 2 " in said and said.endswith("0 laws\n")
    code, said, _ = ask("claims", "--out", out, "--verdict", verdicts[1])
    assert code == 0 and "claim two" in said and "claim one" not in said and f"1 claim: 1 {verdicts[1]}\n" in said
    code, said, _ = ask("claims", "--out", out, "--figure", "x", "--verdict", verdicts[0])
    assert "claim one" in said and "claim two" not in said and "claim three" not in said and "statements" not in said
    bad = [
        (["--verdict", "good"], "unknown verdict 'good'; choose from: reproduced, partly"),
        (["--verdict", "brokn"], "unknown verdict 'brokn'; did you mean broken? Choose from: reproduced, partly"),
        (["--figure", "z"], "no claims of 'z'; choose from: x, y"),
        (["--all", "--figure", "x"], "--all shows everything; leave it out, or --figure and --verdict"),
    ]
    for words, says in bad:
        code, said, error = ask("claims", "--out", out, *words)
        assert (code, said) == (2, "") and says in error and error.count("\n") == 1


def test_claims_begin_with_counts_and_have_a_line_for_each_experiment(tmp_path, ask):
    out = tmp_path / "claims.json"
    rows = [
        ("one", 1.0, above(), "mtp"),
        ("two", 2.0, above(3.0), "mtp"),
        ("law", 2.0, at_most(1.0), "mtp"),
        ("three", 0.5, above(), "kl-variance"),
        ("four", 0.5, above(), "cpt-real"),
    ]
    claims = [
        claim(name, f"says {name}", "§1", value, rule, note="a note") | {"experiment": e, "command": ""}
        for name, value, rule, e in rows
    ]
    claims[3] |= {"verdict": "stale", "note": "stale: changed", "unrecorded": True}
    claims[4]["after_the_fact"] = True
    out.write_text(json.dumps(claims))
    code, said, error = ask("claims", "--out", out)
    lines = said.splitlines()
    assert (code, error) == (0, "") and "says" not in said
    assert lines[:3] == [
        "4 claims: 2 reproduced, 1 contradicted, 1 stale",
        "1 law: 1 broken",
        "1 stale; 1 with a rule written after the measurement; 1 without a record of the code",
    ]
    assert lines[3] == figures.covered(claims) and lines[4] == ""
    assert [line.split(maxsplit=2) for line in lines[5:9]] == [
        ["experiment", "state", "claims and laws"],
        ["mtp", "broken", "2 claims: 1 reproduced, 1 contradicted; 1 law: 1 broken"],
        ["kl-variance", "stale", "1 claim: 1 stale"],
        ["cpt-real", "ok", "1 claim: 1 reproduced"],
    ]
    assert "etude claims --figure NAME" in lines[-1]
    code, _, error = ask("claims", "--out", out, "--figure", "kl-varience")
    assert code == 2 and error.startswith(
        "error: no claims of 'kl-varience'; did you mean kl-variance? Choose from: mtp,"
    )
    assert ask("claims", "--out", out, "--figure", "kl_variance") == ask(
        "claims", "--out", out, "--figure", "kl-variance"
    )


def test_in_a_pipe_every_claim_is_a_line(ask, monkeypatch):
    """Whatever the width of the window: cells are between tabs, and the first one is the claim's name."""
    for columns in ("20", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        code, said, _ = ask("claims", "--all")
        claims = figures.load(RESULTS / "claims.json")
        first_cells = [line.partition("\t")[0] for line in said.splitlines() if "\t" in line]
        names = [f"{one['experiment']}/{one['name']}" for one in (*figures.of_sources(claims), *figures.laws(claims))]
        assert code == 0 and [cell for cell in first_cells if "/" in cell] == names and len(said.splitlines()) < 500
    assert not any(line.endswith(" ") for line in said.splitlines())


def test_an_empty_ledger_has_no_experiments(tmp_path, ask):
    (tmp_path / "claims.json").write_text("[]")
    code, said, error = ask("claims", "--out", tmp_path / "claims.json")
    assert (
        (code, error) == (0, "")
        and said.startswith("0 claims\n0 laws\n0 stale; 0 with ")
        and len(said.splitlines()) == 4
    )
