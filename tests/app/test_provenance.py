"""Whose data a page shows: the newest finished run of the user's where there is one, and the page always says which it
is."""

import json
import os
import shutil
import time

import numpy as np
import pytest

from etude.explorer import PAGES, examples, provenance
from etude.explorer.pages import kl, mtp, pretraining, real_time_rl
from etude.report.record import STAGES
from kit.disk import seal_record
from tests.app.test_runs import played, runs  # noqa: F401 – a fixture

SHOWN = {
    "mtp": "drafting.json",
    "kl": "token-distributions.npz",
    "penalties": "rollouts.json",
    "summary": "chain.json",
    "replay": "routing.npz",
}
"""Pages that show a run's examples, and a file that each needs."""
TOKENS = {"kl": {"family": kl.FAMILIES[2]}}


@pytest.fixture
def mine(runs):  # noqa: F811
    """A finished run of the user's with examples: another seed, another machine, other tasks."""

    def made(name="mine", ago=0.0, exampled=True, seed=7, stages=STAGES):
        folder = played(runs / name, stages=stages, ago=ago)
        config = json.loads((folder / "config.json").read_text())
        config["config"]["seed"], config["machine"]["cpu"], config["machine"]["commit"] = (
            seed,
            "A Desk Computer",
            "c0ffee",
        )
        (folder / "config.json").write_text(json.dumps(config))
        os.utime(folder / "config.json", (time.time() - ago,) * 2)
        if exampled:
            shutil.copytree(examples.FOLDER, folder / provenance.PLACE)
            for path in (folder / provenance.PLACE).glob("*.json"):
                path.write_text(
                    path.read_text(encoding="utf-8").replace('"task": "repo', f'"task": "{name} repo'), encoding="utf-8"
                )
        return folder

    return made


def said(at):
    return " ".join(element.value for element in (*at.caption, *at.info, *at.markdown, *at.warning))


@pytest.mark.parametrize("name", list(SHOWN))
def test_without_a_run_the_committed_example_is_shown_and_named(page, runs, name):  # noqa: F811
    at = page(name, **TOKENS.get(name, {}))
    assert at.selectbox(key="examples").options == [provenance.EXAMPLE] and not at.error and not at.info[1:]
    assert "Shown: **committed example**, a run from another machine · seed 0" in said(at) and "your run" not in said(
        at
    )


@pytest.mark.parametrize("name", list(SHOWN))
def test_the_newest_finished_run_is_shown_and_named(page, mine, drive, name):
    mine("old", ago=500)
    mine("new", ago=50)
    mine("half", stages=STAGES[:5])
    at = page(name, **TOKENS.get(name, {}))
    assert at.selectbox(key="examples").options == ["new", "old", provenance.EXAMPLE]
    assert "examples" not in at.query_params  # nobody has chosen
    assert "Shown: **new**, your run in runs/new · seed 7 · A Desk Computer" in said(at) and "commit c0ffee" in said(at)
    assert (
        name == "kl" or "new repo m" in said(at) or any("new repo m" in table.value.to_csv() for table in at.dataframe)
    )
    if name == "kl":
        return  # one of its sliders is disabled then
    before = dict(at.query_params)
    drive(at)
    assert not at.error and dict(at.query_params) == before | {"examples": "new"}  # which was chosen last


@pytest.mark.parametrize("name", list(SHOWN))
def test_a_run_without_examples_says_what_makes_them(page, mine, name):
    folder = mine("mine", exampled=False)
    for _ in range(2):
        at = page(name, **TOKENS.get(name, {}))
        (line,) = [info.value for info in at.info if "etude examples" in info.value]
        assert line.startswith("**mine** has no examples yet.") and "`etude examples --run runs/mine`" in line
        assert "Shown: **committed example**, a run from another machine · seed 0" in said(at) and not at.error
        (folder / provenance.PLACE).mkdir(exist_ok=True)  # as when the command was interrupted


def test_one_choice_goes_along_and_a_link_holds_it(page, mine, go, whole):
    mine("old", ago=500)
    mine("new", ago=50)
    at = page("summary")
    at.selectbox(key="examples").set_value("old")
    whole(at.run())
    at.selectbox(key="examples").set_value("new")
    whole(at.run())
    assert at.query_params["examples"] in ("new", ["new"])  # chosen, though it is what is shown by itself
    at.selectbox(key="examples").set_value("old")
    whole(at.run())
    assert "Shown: **old**" in said(at) and "old repo m" in said(at)
    link = dict(at.query_params)
    go(at, "replay")
    assert "Shown: **old**" in said(at) and at.query_params["examples"] in ("old", ["old"])
    go(at, "claims")
    assert "examples" not in at.query_params
    go(at, "summary", examples="new")
    assert "Shown: **new**" in said(at)
    assert "Shown: **old**" in said(page("summary", **link))
    at = page("summary", examples="g\none")
    assert ["There is no finished run g one here."] == [
        warning.value for warning in at.warning
    ] and "Shown: **new**" in said(at)


def test_a_choice_that_the_other_run_has_not_is_none(page, mine, whole):
    """The first has a longer chain, more rollouts and other values of α than the other."""
    other = mine("other") / provenance.PLACE
    chain, routing, drafting, rollouts = (
        json.loads((other / f"{name}.json").read_text()) for name in ("chain", "routing", "drafting", "rollouts")
    )
    chain["chains"] = chain["chains"][:1]
    routing["rollouts"] = routing["rollouts"][:1]
    routing["rollouts"][0]["success"] = not routing["rollouts"][0]["success"]
    drafting["steps"] = drafting["steps"][:5]
    rollouts["rollouts"] = rollouts["rollouts"][:2]
    for name, found in (("chain", chain), ("routing", routing), ("drafting", drafting), ("rollouts", rollouts)):
        (other / f"{name}.json").write_text(json.dumps(found))
    for name in ("summary", "replay", "mtp", "penalties"):
        at = page(name, examples=provenance.EXAMPLE)
        for key in ("chain", "rollout"):
            for box in at.selectbox:
                if box.key == key:
                    box.set_value(box.options[-1])
                    whole(at.run())
        for slider in at.slider:
            if slider.key.startswith(("piece", "first", "pass", "read")):
                at.slider(key=slider.key).set_value(slider.max)
                whole(at.run())
        at.selectbox(key="examples").set_value("other")
        whole(at.run())
        assert not at.error and "Shown: **other**" in said(at), [error.value for error in at.error]


def test_broken_examples_of_a_run_name_the_command_for_that_run(page, mine):
    (mine("my run") / provenance.PLACE / "chain.json").write_text("{")
    at = page("summary")
    assert [error.value for error in at.error][0].endswith("write it again with: etude examples --run 'runs/my run'")


def test_a_run_that_was_given_up_is_not_what_the_recipe_begins_with(page, mine):
    mine("done", ago=5000)
    mine("given up", stages=STAGES[:2], ago=2000)
    at = page("recipe")
    assert at.multiselect(key="run").options == ["given up", "done", provenance.EXAMPLE] and at.multiselect(
        key="run"
    ).value == ["done"]
    assert "**done**, your run · finished · seed 7 · A Desk Computer" in said(at)
    assert "**committed example**, a run from another machine · finished" in said(
        page("recipe", run=provenance.EXAMPLE)
    )


def test_no_page_speaks_of_a_real_run_without_saying_which(page, runs):  # noqa: F811
    for one in PAGES:
        if one.name in SHOWN:
            assert "real run" not in said(page(one.name, **TOKENS.get(one.name, {}))) + one.says


def test_the_figures_of_kl_are_those_of_the_run(page, mine, table):
    """Not only its name: here policy and reference have changed places."""
    folder = mine() / provenance.PLACE
    stored = dict(np.load(folder / "token-distributions.npz"))
    policy, reference = (stored[name].astype(np.float64) for name in ("reference", "policy"))
    np.savez(
        folder / "token-distributions.npz", **stored | {"policy": stored["reference"], "reference": stored["policy"]}
    )
    logp, logq = (x - np.logaddexp.reduce(x, axis=-1, keepdims=True) for x in (policy, reference))
    exact = float((np.exp(logp) * (logp - logq)).sum(-1).mean())
    shown = [
        table(page("kl", examples=name, **TOKENS["kl"]), "exact KL")["exact KL"]
        for name in ("mine", provenance.EXAMPLE)
    ]
    assert shown[0].tolist() == pytest.approx([exact] * 3) and abs(shown[1][0] - exact) > 1e-4


def test_the_dashboard_of_real_time_rl_says_whose_it_is(page, runs):  # noqa: F811
    record = json.loads((provenance.RECORDS / "real-time-rl.json").read_text())
    line = (
        f"committed in results/figures/real-time-rl.json, made by `etude figure real-time-rl` · seed "
        f"{record['config']['seed']} · "
    )
    assert line in said(page("real-time-rl"))


@pytest.mark.parametrize(
    ("name", "experiment", "shown", "figure"),
    [
        ("mtp", "mtp", lambda: mtp.load_measurements()[1]["alpha"], {"alpha": 0.125}),
        ("cpt", "cpt-rl", lambda: pretraining.trainings()[0][0]["success_after"], {"success_after": 0.125}),
        ("real-time-rl", "real-time-rl", lambda: real_time_rl.record()["rows"][0]["kept"], {"kept": 0.125}),
    ],
)
def test_a_page_shows_the_user_s_own_experiment_and_says_so(page, runs, name, experiment, shown, figure):  # noqa: F811
    record = json.loads((provenance.RECORDS / f"{experiment}.json").read_text())
    record["rows"] = [
        row | {column: value for column, value in figure.items() if column in row} for row in record["rows"]
    ]
    folder = runs / "figure" / "own"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps({"technique": f"figure {experiment}", "config": {"seed": 5}, "machine": {}})
    )
    (folder / f"{experiment}.json").write_text(json.dumps(seal_record(record | {"quick": True})))
    [value] = figure.values()
    assert shown() != value, "what ran with --quick proves nothing"
    (folder / f"{experiment}.json").write_text(json.dumps(seal_record(record | {"config": {"seed": 5}})))
    assert shown() == value
    at = page(name)
    assert not at.error and f"your run in runs/figure/own, made by `etude figure {experiment}` · seed 5" in said(at)


def test_examples_go_into_the_run_and_elsewhere_only_where_asked(tmp_path, monkeypatch, ask):
    from sims.examples import runs as players

    monkeypatch.chdir(tmp_path)
    written = []
    monkeypatch.setattr(players, "write", lambda run, out, progress: written.append(out) or [])
    monkeypatch.setattr(examples, "write_recipe", lambda run, out: written.append(out) or out)
    assert ask("examples", "--run", "runs/mine")[0] == 0
    assert [str(path) for path in written] == ["runs/mine/examples", "runs/mine/examples/recipe"]
    assert ask("examples", "--run", "runs/mine", "--out", "results/examples")[0] == 0
    assert [str(path) for path in written[2:]] == ["results/examples", "results/examples/recipe"]
