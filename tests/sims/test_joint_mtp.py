"""Joint training: whose gradient reaches whom, pairs that are pairs, rules, and a killed training that goes on the
same."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch

from kit.runs import Run
from recipe.small import learner
from recipe.small import stages as recipe
from ref import cpt
from ref.mtp import mtp_loss
from ref.network.masters import Masters
from sims.mtp import joint as joint_mtp
from sims.mtp.experiment import Experiment, heldout
from sims.mtp.joint import ARMS, LEFT, joint_rows, joint_verdicts, training, transplanted
from sims.policies import read_config


def with_layers(config, **changes):
    return dataclasses.replace(config, mtp=dataclasses.replace(config.mtp, **changes))


def long_phase(tiny_run, folder, config):
    with Run.open(folder, "recipe", config) as run:
        for part in ("data", "checkpoints"):
            shutil.copytree(tiny_run / part, folder / part, dirs_exist_ok=True)
        recipe.lengthen(run, config)
    return learner.load_checkpoint(folder, config, "cpt")


def test_the_layers_loss_reaches_the_trunk_where_asked_and_nowhere_else(tiny_run, tmp_path):
    config = read_config(tiny_run)
    trunk, mtp = learner.load_checkpoint(tiny_run, config, "cpt")
    for name, changes in {"beside": {}, "weighed": {"weight": 0.3}, "through": {"detach_trunk": False}}.items():
        other, layers = long_phase(tiny_run, tmp_path / name, with_layers(config, **changes))
        assert all(torch.equal(a, b) for a, b in zip(trunk.parameters(), other.parameters(), strict=True)) == (
            name != "through"
        )
        assert name != "beside" or all(
            torch.equal(a, b) for a, b in zip(mtp.parameters(), layers.parameters(), strict=True)
        )


@pytest.mark.parametrize("weight", [0.3, 2.0])
def test_a_joint_step_takes_the_gradient_of_the_sum(tiny_run, tmp_path, monkeypatch, weight):
    config = with_layers(read_config(tiny_run), detach_trunk=False, weight=weight)
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, dtype="float32"))
    trunk, mtp = learner.load_checkpoint(tiny_run, config, "mtp")
    found, step = {}, Masters.step

    def seen(self, *arguments, **named):
        found[type(self.model).__name__] = [w.grad.clone() for w in self.model.parameters()]
        return step(self, *arguments, **named)

    monkeypatch.setattr(Masters, "step", seen)
    ids = torch.randint(0, trunk.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0))
    doc = torch.zeros_like(ids)
    out = trunk(ids, doc=doc, logits=False)
    main, count = cpt.next_token_loss(trunk, out.hidden, ids, doc, None)
    balance = learner.load_balancing_loss(out.router_logits, out.experts)
    drafts, n, _ = mtp_loss(mtp, trunk, out, ids, doc, detach_trunk=False)
    total = main / count + config.model.router_aux_loss_coef * balance + weight * drafts / n
    expected = torch.autograd.grad(total, [*trunk.parameters(), *mtp.parameters()])
    with Run.open(tmp_path / "run", "recipe", config) as run:
        learner.train(
            run.stage("one", total=1),
            config,
            learner.Learner(config, trunk, mtp, 0.0, 0.0),
            lambda step: (ids, doc, None),
            1,
            lambda step: 1.0,
            "one",
        )
    for mine, theirs in zip([*found["Transformer"], *found["MTP"]], expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-7)


def made(gain: float, harm: float) -> dict[str, list[dict]]:
    """Two repetitions of 60 rows: layers that trained along are accepted `gain` more often than those left, and with
    their loss in it the trunk's is `harm` higher."""
    rng, found = np.random.default_rng(0), {}

    def row(level, n, width):
        return (100 * np.maximum(level + rng.normal(0, 0.004, (60, n)), 0))[..., None].repeat(width, -1)

    for arm in ARMS:
        found[arm] = []
        for _ in range(2):
            one = {}
            for where in ("text", "demonstrations"):
                counts = {}
                for name in (arm, LEFT) if arm == "beside" else (arm,):
                    shares = row(0.6 - (gain if name == LEFT else 0), 2, 1)
                    counts[name] = np.concatenate((np.full_like(shares, 100), shares, shares), -1).tolist()
                nats = row(2 + (0 if arm == "beside" else harm), 1, 1)[:, 0]
                one[where] = {"nll": np.concatenate((nats, np.full_like(nats, 100)), -1).tolist(), **counts}
            found[arm].append(one)
    return found


@pytest.mark.parametrize(
    "gain, harm, expected",
    [
        (0.05, 0.0, ("reproduced", "reproduced")),
        (0.0, 0.0195, ("not at this scale", "not at this scale")),
        (-0.05, 0.1, ("contradicted", "contradicted")),
        (0.05, -0.1, ("reproduced", "reproduced")),
    ],
)
def test_rules_of_joint_training(gain, harm, expected):
    c = Experiment(repetitions=2, resamples=300)
    found = {one["name"]: one for one in joint_verdicts(c, made(gain, harm))}
    assert (found["joint-drafts"]["verdict"], found["joint-trunk"]["verdict"]) == expected
    assert found["joint-drafts"]["measured"] == pytest.approx(gain, abs=0.003) and found["joint-trunk"][
        "measured"
    ] == pytest.approx(harm, abs=0.003)


def test_a_repetition_that_disagrees_makes_it_partly():
    some = made(0.2, 0.0)
    some["beside"][1]["demonstrations"][LEFT] = np.array(some["beside"][1]["demonstrations"]["beside"]).tolist()
    found = {one["name"]: one["verdict"] for one in joint_verdicts(Experiment(repetitions=2, resamples=300), some)}
    assert found["joint-drafts"] == "partly"


def test_rows_say_what_was_counted():
    rows = {(row["arm"], row["text"]): row for row in joint_rows(Experiment(resamples=50), made(0.1, 0.05))}
    assert rows["through 1", "text"]["loss"] - rows["beside", "text"]["loss"] == pytest.approx(0.05, abs=0.003)
    assert rows[LEFT, "text"]["accepted"] == pytest.approx(0.5, abs=0.003)
    assert rows[LEFT, "text"]["accepted_least"] <= rows[LEFT, "text"]["accepted"] <= rows[LEFT, "text"]["accepted_most"]


@pytest.mark.parametrize("gain, verdict", [(0.1, "reproduced"), (0.3, "not at this scale"), (0.5, "contradicted")])
def test_layers_of_mid_cpt_serve_if_they_keep_half_of_what_is_accepted(gain, verdict):
    found = transplanted(joint_rows(Experiment(resamples=50), made(gain, 0.0)))
    assert [one["name"] for one in found] == ["transplant-text", "transplant-demonstrations"] and {
        one["verdict"] for one in found
    } == {verdict}
    for one in found:
        assert (
            one["measured"] == pytest.approx((0.6 - gain) / 0.6, abs=0.01)
            and one["interval"][0] < one["measured"] < one["interval"][1]
        )


def test_a_killed_training_goes_on_the_same(tiny_run, tmp_path, monkeypatch):
    c, config = Experiment.quick(), read_config(tiny_run)
    *text, _ = heldout(c, tiny_run, config)

    def played(folder, resume=False):
        with Run.open(folder, "mtp", c, resume=resume, checkpoint_seconds=0) as run:
            return training(run, c, tiny_run, config, "through 0.3", 0, tuple(text))

    whole, calls, step = played(tmp_path / "whole"), [], Masters.step

    def dying(self, *arguments, **named):
        calls.append(1)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return step(self, *arguments, **named)

    monkeypatch.setattr(Masters, "step", dying)
    with pytest.raises(KeyboardInterrupt):
        played(tmp_path / "killed")
    assert played(tmp_path / "killed", resume=True) == whole
    assert (
        played(tmp_path / "killed", resume=True) == whole
        and not (tmp_path / "killed/joint/joint-through-0.3-0/checkpoints").exists()
    )
    assert joint_mtp.loss(np.array(whole["text"]["nll"])) > 1
