"""RL of a language model on generated packages: what the verdicts say of made-up numbers, what is trained, and the
shortest run, interrupted and resumed."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kit.runs import Run
from ref.network import Config, Transformer
from ref.rl import compute_gradients
from sims.real_agent.experiment import ARMS, MEASURES, Experiment, LastBlocks, experiment, picture, verdicts

PACKAGES = [f"generated-heldout.{number}" for number in range(6) for _ in range(5)]


def results_of(gain=0.2, control=0.0, trainings=3, spread=0.0):
    """Held-out measures by policy: success 0.3 after SFT, more by `gain` after RL and by `control` after the control;
    the last training gains less by `spread`."""
    rng = np.random.default_rng(0)

    def measures(success):
        values = np.clip(success + rng.normal(0, 0.02, len(PACKAGES)), 0, 1).tolist()
        return {"packages": PACKAGES, **dict.fromkeys(MEASURES, values), "valid_calls": [0.99] * len(PACKAGES)}

    results = {"checkpoint": measures(0.0)}
    for number in range(trainings):
        less = spread if number == trainings - 1 else 0.0
        results[f"sft-{number}"] = measures(0.3)
        results[f"rl-{number}"] = measures(0.3 + gain - less)
        results[f"control-{number}"] = measures(0.3 + control)
    return results


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ({}, ["reproduced", "reproduced", "reproduced"]),
        ({"gain": 0.0}, ["not at this scale", "not at this scale", "not at this scale"]),
        ({"gain": -0.2}, ["contradicted", "contradicted", "contradicted"]),
        ({"control": 0.2}, ["reproduced", "reproduced", "not at this scale"]),
        ({"spread": 0.25}, ["partly", "partly", "partly"]),
    ],
)
def test_verdicts_follow_the_numbers(how, wanted):
    """Every training by itself must gain, and more than its control."""
    claims = verdicts(results_of(**how), replace(Experiment(), resamples=200))
    assert [claim["verdict"] for claim in claims[:3]] == wanted
    assert claims[3]["name"] == "calls" and claims[3]["measured"] == pytest.approx(0.01)


def test_only_the_last_blocks_are_trained_and_a_state_holds_them_alone():
    torch.manual_seed(0)
    shape = Config.tiny(
        30,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=0,
        intermediate_size=16,
    )
    model = Transformer(shape)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = LastBlocks(model, 1, 0.1, torch.float32)
    ids = torch.arange(8)[None]
    loss = -trainer.model.logprob(trainer.model(ids, logits=False).hidden[0, :-1], ids[0, 1:]).mean()
    gradients = compute_gradients(loss, trainer.model, retain_graph=True)
    assert [gradient is not None for gradient in gradients] == [name.startswith("layers.2.") for name in before]
    loss.backward()
    trainer.apply(None, 1.0)
    changed = {name for name, p in trainer.weights.masters.named_parameters() if not p.equal(before[name])}
    assert changed and all(name.startswith("layers.2.") for name in changed)
    state = trainer.state(1)
    assert state["weights"].keys() == trainer.trained.keys()
    again = LastBlocks(Transformer(shape), 1, 0.1, torch.float32)
    again.restore(state)
    assert all(again.trained[name].equal(p) for name, p in trainer.trained.items())


def test_the_shortest_run(tmp_path):
    """All parts, a picture, and nothing done twice."""
    with Run.open(tmp_path / "run", "figure real-agent", Experiment.quick(), resume=False) as run:
        results = experiment(run, Experiment.quick())
    assert [row["policy"] for row in results["rows"]] == ["checkpoint", "sft", *ARMS]
    assert all(len(results["curves"][f"{arm}-0"]) == 1 for arm in ARMS)
    assert len(list((tmp_path / "run" / "episodes").glob("*/*.jsonl"))) == 4
    picture(results, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    with Run.open(tmp_path / "run", "figure real-agent", Experiment.quick(), resume=True) as run:
        assert experiment(run, Experiment.quick())["rows"] == results["rows"]
