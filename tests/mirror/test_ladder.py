"""`etude run cpt-rl --scale full`: three budgets on two ranks that stay from test to test."""

import json

import numpy as np
import pytest

from etude.run import budget_ladder
from etude.run.settings import settings
from kit.disk import hash_file, read_lines
from recipe.small.data import heldout_codebase
from recipe.small.learner import language_of, packed_rows
from ref import cpt
from ref.network import load_hf
from scaled.runtime import launch
from sims.cpt_rl import budgets
from tests.mirror.recipes import words

STUDY = {
    "budgets": "4096,8192,16384",
    "demonstrations": 6,
    "tasks": 4,
    "samples": 2,
    "last": 2,
    "resamples": 50,
    "codebase_tokens": 500,
}
SETS = [word for key, value in STUDY.items() for word in ("--set", f"study.{key}={value}")]


def results(out):
    """What must not depend on interruptions."""
    record = json.loads((out / "cpt-rl.json").read_text())
    weights = {str(path.relative_to(out)): hash_file(path) for path in out.glob("runs/*/checkpoints/*/*.safetensors")}
    return weights | {key: record[key] for key in ("rows", "claims", "fits")}


def test_three_budgets_and_the_same_sft_and_rl_on_each(tiny_run, tmp_path, ask, here):
    """Played through, and killed in pretraining and in the measurements: the same weights, figures and verdicts."""
    start, out, killed = tiny_run / "checkpoints" / "mid-cpt", tmp_path / "through", tmp_path / "killed"
    code, said, error = ask(*words(out, start, *SETS, technique="cpt-rl"))
    assert code == 0 and not error and f"picture: {out / 'cpt-rl.png'}" in said, error
    found = json.loads((out / "cpt-rl.json").read_text())
    trainings = [row for row in found["rows"] if row["part"] == "training"]
    assert [(row["budget"], row["seed"]) for row in trainings] == [(4096, 0), (8192, 0), (16384, 0)]
    assert all(abs(row["tokens"] - row["budget"]) < 0.2 * row["budget"] + 256 for row in trainings)
    assert {claim["verdict"] for claim in found["claims"] if claim["name"] != "budget-order"} == {
        "not tested"
    }  # one seed has no interval

    runs = [out / "runs" / f"{budget}-0" for budget in (4096, 8192, 16384)]
    rows = [packed_rows(run, "short")[0] for run in runs]
    for less, more in zip(rows, rows[1:]):
        assert len(less) < len(more) and np.array_equal(less, more[: len(less)])  # a smaller budget reads the beginning
    told = [json.loads((run / "config.json").read_text())["config"] for run in runs]
    assert all(
        one["sft"] == told[0]["sft"] and one["rl"] == told[0]["rl"] and one["seed"] == 0 and one["rl"]["later"] == 0
        for one in told
    )
    assert not any((run / "checkpoints" / "mtp").exists() for run in runs)

    # The measurements of one rank, from the checkpoints.
    c = settings("cpt-rl", "gloo", told[1])
    shown, _ = budgets.heldout(c.experiment, c.small, language_of(runs[1]))
    for name in ("sft", "final"):
        nll = budgets.demonstration_nll(load_hf(runs[1] / "checkpoints" / name), [lesson.chain for lesson in shown])
        measured = json.loads((runs[1] / "stages" / "measure.json").read_text())["result"][name]["nll"]
        assert np.allclose(measured, nll, rtol=1e-5) and len(nll) == 6
    last = load_hf(runs[1] / "checkpoints" / "cpt")
    scored = cpt.codebase_nll(
        last, language_of(runs[1]).tokenizer, heldout_codebase(runs[1]), c.training.long_length, max_tokens=500
    )
    assert trainings[1]["codebase_loss"] == pytest.approx(scored.nll / scored.tokens, rel=1e-5)
    assert trainings[1]["reward_last"] == pytest.approx(
        np.mean([line["reward"] for line in read_lines(runs[1] / "metrics" / "rl.jsonl")][-2:])
    )

    here += ["cpt", "measure"]
    for more in ([], ["--resume"]):
        code, _, error = ask(*words(killed, start, *SETS, *more, technique="cpt-rl"))
        assert code == 2 and "Continue with: etude run cpt-rl --scale full --out" in error
    assert ask(*words(killed, start, *SETS, "--resume", technique="cpt-rl"))[0] == 0
    assert results(killed) == results(out) and len(results(out)) == 3 * 4 * 2 + 3


def test_rungs_share_all_but_budget_and_seed():
    c = settings(
        "cpt-rl", "gloo", {"training": {"tokens": 90_000, "long_tokens": 30_000, "long_length": 256}, "seed": 2}
    )
    assert c.experiment.budgets == (7500, 30_000, 120_000) and c.experiment.steps == c.rl.steps
    small, large = budget_ladder.rung(c, 7500, 1), budget_ladder.rung(c, 120_000, 1)
    assert (small.training.tokens, small.training.long_tokens, large.training.tokens) == (
        5625,
        1875,
        90_000,
    ) and small.seed == 2001
    assert small.sft == large.sft and small.rl == large.rl and small.rl.gate == 0 and not small.cluster.drafts
    assert (
        small.experiment.seed == 2001 and budget_ladder.rung(c, 300, 0).training.long_tokens == 256
    )  # never less than a row


def test_what_cannot_work_is_said_before_a_rank_starts(tiny_run, tmp_path, ask, monkeypatch):
    monkeypatch.setattr(launch, "start", lambda *_: pytest.fail("ranks were started"))
    start, out = tiny_run / "checkpoints" / "mid-cpt", tmp_path / "out"
    for sets, why in (
        (["study.budgets=1000,2000"], "budgets must be three or more increasing numbers"),
        (["study.budgets=3000,2000,4000"], "budgets must be three or more increasing numbers"),
        (["study.budgets=100,2000,4000"], "study.budgets: 100 tokens must be more than one long row"),
        (["study.tasks=1"], "study.tasks must be at least the number of ranks, 2"),
        (["study.demonstrations=1"], "study.demonstrations must be at least the number of ranks, 2"),
        (
            ["sft.conversations=chats.jsonl"],
            "cpt-rl measures SFT on the small world's demonstrations; leave out sft.conversations",
        ),
        (["study.last=500"], "last must be in 1.."),
        (["cluster.rl_cp=4"], "cluster.rl_cp=4 must divide the number of ranks, 2"),
    ):
        code, _, error = ask(
            *words(out, start, *SETS, *(word for one in sets for word in ("--set", one)), technique="cpt-rl")
        )
        assert code == 2 and why in error and error.count("\n") == 1, (sets, error)
    code, _, error = ask("run", "cpt-rl", "--scale", "full", "--backend", "gloo")
    assert code == 2 and "a full run starts from a checkpoint" in error
    code, _, error = ask("run", "cpt-rl")
    assert code == 2 and "cpt-rl is a figure: etude figure cpt-rl" in error
    assert not out.exists()
