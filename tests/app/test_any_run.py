"""Any run opens: at full scale, of a technique, asynchronous, of an experiment. What is shown is what its files hold,
compared runs say whether they may be compared, and one that is going on is live until it ends."""

import fcntl
import json
import os
import shutil
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from etude.explorer import examples, provenance
from etude.explorer.pages import recipe
from etude.explorer.provenance import EXAMPLE, RECORDS
from etude.explorer.runs import comparison as run_comparison
from etude.explorer.runs import curves
from etude.explorer.runs import files as run_files
from etude.explorer.runs import state as run_state
from etude.explorer.runs.panels import PANELS
from etude.ledger import figures
from etude.report.record import STAGES
from kit.disk import read_lines
from recipe.small.agent import Language
from ref.cpt import load_tokenizer
from tests.app.test_async_pages import run  # noqa: F401 – a fixture
from tests.app.test_runs import played, runs, words  # noqa: F401 – a fixture

MACHINE = {"cpu": "A Desk Computer", "cores": 2, "threads": 1, "torch": "2.13", "commit": "c0ffee0"}
AGENT = examples.FOLDER / "agent"


def made(folder, technique, config, metrics, report=None):
    """A folder as a run of a technique leaves it."""
    for part in ("metrics", "stages"):
        (folder / part).mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"technique": technique, "config": config, "machine": MACHINE}))
    for stage, lines in metrics.items():
        (folder / "metrics" / f"{stage}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if report is not None:
        (folder / "report.json").write_text(json.dumps({"technique": technique, **report}))
    return folder


def trained(folder, heldout=64, price=0.005, steps=3, ended=True, technique="dr-grpo"):
    """A training of RL on ranks."""
    config = {
        "checkpoint": "somewhere/checkpoints/sft",
        "seed": 3,
        "heldout": heldout,
        "rl": {"steps": 3, "payment": {"kl": price}},
    }
    lines = [
        {
            "step": n,
            "reward": n / 10,
            "success": n / 5,
            "written": 40.0 + n,
            "tokens": 1000.0,
            "drift": 0.01 * n * bool(price),
        }
        for n in range(1, steps + 1)
    ]
    report = (
        {"result": {"heldout_before": 0.25, "heldout_after": 0.75}, "seconds": {technique: 30.0}} if ended else None
    )
    return made(folder, f"{technique} full", config, {technique: lines}, report)


def whole_recipe(folder, ago=0.0, **settings):
    """A run of the recipe at full scale: other names in RL, four rollouts of a task."""
    played(folder, ago=ago)
    config = json.loads((folder / "config.json").read_text())
    config["technique"], config["config"] = "recipe full", {**config["config"], "cluster": {"drafts": True}, **settings}
    (folder / "config.json").write_text(json.dumps(config))
    lines = [
        {"step": n, "tokens": 3000 * n, "success": 0.5, "reward": 0.4, "written": 50.0 + n, "drift": 0.1 * n}
        for n in (1, 2, 3)
    ]
    (folder / "metrics" / "rl.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = json.loads((folder / "stages" / "eval.json").read_text())
    for when in ("before", "after", "difference"):
        found["result"][when]["best_of_4"] = {**found["result"][when].pop("best_of_8"), "value": 0.5}
    found["result"]["samples"] = 4
    (folder / "stages" / "eval.json").write_text(json.dumps(found))
    return folder


@contextmanager
def locked(folder):
    """As long as a process lives that has the run."""
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def loaded(name):
    return run_files.load(name, provenance.folders("all")[name])


def points(name, key):
    xs, ys = curves.points(loaded(name))[key]
    return list(zip(xs.tolist(), ys.tolist(), strict=True))


# --------------------------------------------------------------------------------------------- kinds of runs


def test_a_training_on_ranks_is_shown_as_it_was_logged(page, runs, table):  # noqa: F811
    trained(runs / "ranks")
    at = page("recipe", kind="techniques", curves="RL: length, drift")
    assert at.multiselect(key="run").value == ["ranks"] and not at.error
    assert "**ranks**, your run of dr\\-grpo full · finished · seed 3 · A Desk Computer" in words(at)
    assert points("ranks", "length/tokens") == [(1, 41), (2, 42), (3, 43)], "those of a rollout, not of the step"
    assert points("ranks", "drift/kl") == [(n, 0.01 * n) for n in (1, 2, 3)]
    exact = binomtest(48, 64).proportion_ci(0.95)
    shown = table(at, "measure").iloc[0]
    assert shown["after RL"] == f"0.750 [{exact.low:.3f}, {exact.high:.3f}]" and shown["difference"] == "+0.500"
    assert table(at, "stage").set_index("stage").loc["dr-grpo", "ranks"] == "30 s"
    assert not at.radio(key="curves").options.count("Pretraining"), "it has none"


def test_what_nobody_measured_is_no_zero(page, runs):  # noqa: F811
    """Without a price for drift a training logs zeros."""
    trained(runs / "free", price=0.0)
    assert points("free", "drift/kl") == [] and "drift" not in curves.metrics_of([loaded("free")])
    at = page("recipe", kind="techniques", curves="RL: length, drift")
    assert "Distance from the policy before RL: not recorded by free." in words(at)


def test_the_recipe_at_full_scale_opens_like_the_small_one(page, runs, table):  # noqa: F811
    whole_recipe(runs / "ranks")
    at = page("recipe", curves="RL: length, drift")
    assert at.multiselect(key="run").options == ["ranks", EXAMPLE] and not at.error
    assert points("ranks", "length/tokens") == [(1, 51), (2, 52), (3, 53)] and points("ranks", "drift/kl")[-1] == (
        3,
        pytest.approx(0.3),
    )
    assert table(at, "measure").set_index("measure").loc["best of 4", "after RL"].startswith("0.500 [")
    assert "best of 8" not in table(at, "measure")["measure"].tolist()
    assert not provenance.finished(), "pages of examples play small runs alone"


def test_a_run_of_figure_2_at_full_scale_and_its_trainings(page, runs):  # noqa: F811
    outer = made(runs / "ladder", "cpt-rl full", {"seed": 0}, {})
    whole_recipe(outer / "runs" / "800-0", study={"seeds": 1}, cluster={"drafts": False})
    for stage in ("mtp", "decode", "eval"):
        (outer / "runs" / "800-0" / "stages" / f"{stage}.json").unlink()
    inner = loaded("ladder/runs/800-0")
    assert (
        inner.missing == ["measure"]
        and run_state.make_resume_command(inner) == "etude run cpt-rl --scale full --out runs/ladder --resume"
    )
    at = page("recipe", run="ladder/runs/800-0")
    assert "interrupted" in words(at) or "running" in words(at)
    assert "mtp" not in inner.stages and not at.error


def test_asynchronous_rl_shows_steps_success_and_last_rollouts(page, run, table, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    config = json.loads((run / "config.json").read_text())
    config["config"] |= {"checkpoint": str(AGENT), "rl": {"steps": 2, "payment": {"kl": 0.0}}}
    (run / "config.json").write_text(json.dumps(config))
    (run / "stages").mkdir()
    for stage, success in (("before", [0.0, 0.0, 1.0, 1.0]), ("after", [1.0, 1.0, 1.0, 1.0])):
        (run / "stages" / f"{stage}.json").write_text(json.dumps({"stage": stage, "result": {"success": success}}))
    (run / "report.json").write_text(json.dumps({"result": {"steps": 2.0}}))
    at = page("recipe", run="mine")
    assert not at.error and [line["step"] for line in loaded("mine").metrics["rl"]] == [1, 2]
    row = table(at, "measure").iloc[0]
    assert (
        row["before RL"].startswith("0.500 [")
        and row["after RL"] == "1.000"
        and row["difference"].startswith("+0.500 [")
    )
    text = Language(load_tokenizer(AGENT / "tokenizer.json")).decode([0, 1, 2])
    assert "Last rollouts of mine, of the step that made version 2" in [one.label for one in at.expander]
    assert [one.value for one in at.code if one.value == text] == [text] * 2


def test_a_demonstration_has_every_metric_that_it_logged(page, runs, table):  # noqa: F811
    made(
        runs / "kl",
        "kl",
        {"samples": 5},
        {"demo": [{"step": n, "k1_bias": 0.5 * n} for n in (1, 2)]},
        {"result": {"k1@1": 0.125}},
    )
    (runs / "kl" / "stages" / "demo.json").write_text('{"result": {}}')
    at = page("recipe", kind="techniques")
    assert at.radio(key="curves").options == [recipe.EVERY] and at.selectbox(key="metric").value == "k1_bias"
    assert [(row["step"], row["value"]) for row in curves.metric_rows("k1_bias", ["demo"], [loaded("kl")], 1)] == [
        (1, 0.5),
        (2, 1.0),
    ]
    assert (
        table(at, "figure").values.tolist() == [["k1@1", "0.125"]]
        and "finished" in words(at)
        and "seed" not in words(at)
    )


def test_an_experiment_shows_verdicts_and_arms(page, runs, table):  # noqa: F811
    record = json.loads((RECORDS / "disk-world.json").read_text())
    at = page("recipe", run="committed record disk-world")
    assert "**committed record disk\\-world**, a committed record of figure disk\\-world · finished · seed" in words(at)
    assert table(at, "verdict")["claim"].tolist() == [
        one["claim"] for one in (*figures.of_sources(record["claims"]), *figures.laws(record["claims"]))
    ]
    arms = at.multiselect(key="parts").options
    assert arms == [
        "training 0 · memory",
        "training 0 · disk",
        "training 1 · memory",
        "training 1 · disk",
        "training 2 · memory",
        "training 2 · disk",
    ]
    rows = curves.metric_rows("success", ["training 1 · disk"], [loaded("committed record disk-world")], 1)
    assert [row["value"] for row in rows] == [
        row["success"] for row in record["rows"] if row["training"] == 1 and row["arm"] == "disk"
    ]
    made(
        runs / "figure" / "disk-world", "figure disk-world", record["config"], {"disk-0": [{"step": 1, "success": 0.5}]}
    )
    assert not loaded("figure/disk-world").claims and loaded("figure/disk-world").missing == ["disk-0"]
    for ending in ("json", "png"):
        shutil.copy(RECORDS / f"disk-world.{ending}", runs / "figure" / "disk-world")
    assert len(loaded("figure/disk-world").claims) == len(record["claims"]) and not loaded("figure/disk-world").missing


def test_every_committed_record_opens(page, runs):  # noqa: F811
    found, broken = run_files.load_runs(provenance.folders("experiments"))
    assert (
        not broken
        and len(found) == len(list(RECORDS.glob("*.json")))
        and all(one.claims and one.picture for one in found)
    )


def test_a_link_opens_a_run_of_any_kind_and_a_kind_shows_its_own(page, runs, whole):  # noqa: F811
    trained(runs / "ranks")
    played(runs / "small")
    at = page("recipe", run="ranks")
    assert at.multiselect(key="run").value == ["ranks"] and "small" in at.multiselect(key="run").options
    whole(at.run())
    assert at.multiselect(key="run").value == ["ranks"]
    at.selectbox(key="kind").set_value("experiments")
    whole(at.run())
    assert (
        at.multiselect(key="run").value == [at.multiselect(key="run").options[0]]
        and "ranks" not in at.multiselect(key="run").options
    )
    shutil.rmtree(runs)
    assert "There is no such run in `runs/` yet. `etude run TECHNIQUE` makes one." in words(
        page("recipe", kind="techniques")
    )


# ------------------------------------------------------------------------------------------------ comparison


SETTINGS = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 2))


@settings(max_examples=40)
@given(one=SETTINGS, other=SETTINGS)
def test_settings_that_differ_are_listed_and_no_others(one, other):
    base = run_files.load(EXAMPLE, examples.FOLDER / "recipe")
    pair = [replace(base, name=name, settings=settings) for name, settings in (("one", one), ("other", other))]
    rows = run_comparison.differences(pair)
    assert {row["setting"] for row in rows} == {key for key in "abcdef" if one.get(key) != other.get(key)}
    assert all(row["one"] != row["other"] for row in rows) and not run_comparison.differences(
        [pair[0], replace(pair[0], name="again")]
    )


def test_runs_say_whether_they_may_be_compared(page, runs, table):  # noqa: F811
    base = run_files.load(EXAMPLE, examples.FOLDER / "recipe")

    def said(**settings):
        return run_comparison.comparable([base, replace(base, name="other", settings=base.settings | settings)])

    number = base.settings["evaluation.tasks"]
    assert said() == f"All runs were evaluated on the same {number} held-out tasks."
    assert said(**{"evaluation.tasks": 5}).startswith("The first 5 held-out tasks are the same")
    assert said(seed=99).startswith("The tasks are different samples of the same world, because the seeds differ.")
    assert said(**{"world.digits": 0.1}) == "**Not comparable**: the tasks are of different worlds (world.digits)."
    assert run_comparison.comparable([base]) == "" == run_comparison.comparable([base, replace(base, successes=[])])
    played(runs / "small")
    trained(runs / "ranks")
    at = page("recipe", run=["small", "ranks"])
    assert any("**Not comparable**: the held-out tasks of ranks are not recorded." == one.value for one in at.markdown)
    (runs / "small" / "checkpoints" / "sft").mkdir(parents=True)
    config = json.loads((runs / "ranks" / "config.json").read_text())
    config["config"]["checkpoint"] = "runs/small/checkpoints/sft"
    (runs / "ranks" / "config.json").write_text(json.dumps(config))
    at = page("recipe", run=["small", "ranks"])
    assert any(one.value.startswith("The first 64 held-out tasks are the same") for one in at.markdown), (
        "those of the run that it began from"
    )
    shown = table(at, "success").set_index("success")
    assert (
        shown.loc["sampled", "ranks"].startswith("0.750 [")
        and shown.loc["greedy", "ranks"] == "–" != shown.loc["greedy", "small"]
    )
    assert "small" in table(at, "setting").columns


# ------------------------------------------------------------------------------------------------------ live


def test_a_run_is_live_while_a_process_has_it_and_interrupted_after(page, runs, whole, monkeypatch):  # noqa: F811
    """As soon as the kernel has released its lock, however recently it wrote."""
    folder = trained(runs / "ranks", steps=1, ended=False)
    for rank in range(2):
        (folder / "ranks").mkdir(exist_ok=True)
        (folder / "ranks" / f"{rank}.pid").touch()
    refreshed = []
    fragment = recipe.st.fragment
    monkeypatch.setattr(
        recipe.st, "fragment", lambda function, run_every=None: refreshed.append(run_every) or fragment(function)
    )
    with locked(folder):
        at = page("recipe", run="ranks")
        assert any("live" in one.value for one in at.markdown) and "running, at dr\\-grpo" in words(at).replace(
            "dr-grpo", "dr\\-grpo"
        )
        assert "step 1 of 3" in words(at) and refreshed[-1] == recipe.SECONDS
        assert "saves metrics and no rollouts" in words(at)
        with open(folder / "metrics" / "dr-grpo.jsonl", "a") as file:
            file.write('{"step": 2, "reward": 0.5, "success": 0.5}\n{"step": 3, "rew')
        newest = {
            "step": 2,
            "prompt": "Repair m3.",
            "rollouts": [{"success": True, "reward": 0.5, "contexts": 1, "text": "read m3"}],
        }
        (folder / "rollouts").mkdir()
        (folder / "rollouts" / "rl.json").write_text(json.dumps(newest))
        whole(at.run())
        assert "step 2 of 3" in words(at), "what was written since is seen"
        assert "Last rollouts of ranks, of step 2 of RL, 1 of one group" in [one.label for one in at.expander]
        assert "read m3" in [
            one.value for one in at.code
        ] and "solved, reward 0.500, contexts: 1, task: Repair m3" in words(at).replace("\\", "")
    whole(at.run())
    assert refreshed[-1] is None and not any("live" in one.value for one in at.markdown)
    command = "etude run dr-grpo --scale full --out runs/ranks --resume --backend gloo --nproc 2"
    assert f"resume it with `{command}`" in words(at)


def test_a_finished_run_is_not_live_though_its_process_lives(page, runs):  # noqa: F811
    folder = trained(runs / "ranks")
    with locked(folder):
        assert not any("live" in one.value for one in page("recipe", run="ranks").markdown)


def test_looking_takes_no_lock_away_and_leaves_none(runs):  # noqa: F811
    folder = trained(runs / "ranks", ended=False)
    assert run_state.is_locked(folder) is None
    with locked(folder):
        assert run_state.is_locked(folder) is run_state.is_locked(folder) is True
    assert run_state.is_locked(folder) is False
    with open(folder / "lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_time_left_is_that_of_a_run_alike_or_the_pace(runs):  # noqa: F811
    played(runs / "before", ago=500)
    half = played(runs / "half", stages=STAGES[:5])
    with open(half / "timings.jsonl", "a") as file:
        file.write('{"stage": "rl", "seconds": 22.0, "step": 11, "rate": 1.0}\n')
    (half / "metrics" / "rl.jsonl").write_text(json.dumps({"step": 11, "reward": 0.5, "success": 0.5}) + "\n")
    took = {line["stage"]: line["seconds"] for line in read_lines(runs / "before" / "timings.jsonl")}
    (runs / "before" / "report.json").write_text("{}")
    with open(runs / "before" / "timings.jsonl", "a") as file:
        file.writelines(
            json.dumps({"stage": stage, "seconds": seconds, "finished": True}) + "\n" for stage, seconds in took.items()
        )
    now, before = loaded("half"), loaded("before")
    more = took["rl"] - 22 + took["eval"] + took["decode"]
    assert run_state.left(now, [now, before]) == f"about {more / 60:.0f} min more, as before took"
    assert run_state.left(now, [now]) == "about 3 min more of this stage, at the pace so far", "99 steps of 2 s"
    other = replace(before, settings=before.settings | {"rl.steps": 5})
    assert "pace" in run_state.left(now, [other]), "another run's settings tell nothing"
    trained(runs / "ranks", steps=1, ended=False)
    trained(runs / "earlier")
    assert run_state.left(loaded("ranks"), [loaded("earlier")]) == "about 20 s more, as earlier took", (
        "two of three steps of 10 s"
    )


@pytest.mark.parametrize(
    ("technique", "folder", "says"),
    [
        ("recipe", "small", "etude run recipe --out runs/small --resume"),
        ("kl", "my kl", "etude run kl --out 'runs/my kl' --resume"),
        ("figure mtp", "figure/mtp", "etude figure mtp --out runs/figure/mtp --resume"),
        ("async-rl", "async-rl", "etude run async-rl --out runs/async-rl --resume"),
        ("recipe full", "ranks", "etude run recipe --scale full --out runs/ranks --resume"),
    ],
)
def test_an_interrupted_run_says_how_it_goes_on(runs, technique, folder, says):  # noqa: F811
    base = run_files.load(EXAMPLE, examples.FOLDER / "recipe")
    assert run_state.make_resume_command(replace(base, technique=technique, place=provenance.RUNS / folder)) == says


def test_a_copy_without_a_lock_is_judged_by_when_it_wrote(runs):  # noqa: F811
    folder = trained(runs / "copy", ended=False)
    assert run_state.going(loaded("copy"))
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - 2 * run_state.AWAY,) * 2)
    assert not run_state.going(loaded("copy"))


def test_panels_of_several_runs_name_them(page, runs):  # noqa: F811
    """Whose a figure is stands in its caption: name, seed, commit."""
    trained(runs / "ranks")
    played(runs / "small")
    at = page("recipe", run=["small", "ranks"])
    captions = [one.value for one in at.caption if one.value.startswith(PANELS["RL: reward"][0].words)]
    assert len(captions) == 1 and "ranks (seed 3, c0ffee0)" in captions[0] and "small (seed 0, " in captions[0]
    shown = curves.draw_panel(PANELS["RL: reward"][0], 1, (loaded("ranks"), loaded("small")))
    assert {name.partition(" (")[0] for name in shown.looks} == {"ranks", "small"} and len(
        {look.colour for look in shown.looks.values()}
    ) == 2
    assert [row["value"] for row in shown.layers[0].rows if row["curve"] == "ranks (seed 3, c0ffee0), reward"] == [
        0.1,
        0.2,
        0.3,
    ]
