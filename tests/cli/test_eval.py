"""`etude eval`: figures are those of the rollouts, two agents play the same tasks, and bad input is one line."""

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.main import get_command

from etude.cli.evaluate import OrAgent, eval_app
from etude.evaluate import agent as evaluating
from etude.play.play import FOLDER, agent_in
from recipe.small.agent import hash_seed, play
from recipe.small.data import task_stream
from recipe.small.demonstrations import context
from ref.engine.sampler import Sampler
from ref.network import load_hf


@pytest.fixture
def one_core(monkeypatch):
    monkeypatch.setattr("kit.process.cores", lambda: 1)


def test_figures_are_those_of_the_rollouts(one_core, ask):
    """Played here once more: success, turns and wrong calls."""
    agent = agent_in(FOLDER)
    recipe, tasks = agent.recipe, list(itertools.islice(task_stream(agent.recipe, "evaluation"), 2))
    code, out, _ = ask("eval", FOLDER, "--tasks", 2, "--samples", 2, "--seed", 5, "--json")
    found = json.loads(out)
    sampler = Sampler(
        load_hf(FOLDER).to(getattr(torch, recipe.training.dtype)), getattr(torch, recipe.training.sampler_dtype)
    )
    generator = torch.Generator().manual_seed(hash_seed(5, "eval"))
    how, r = context(agent.language, recipe), recipe.rl
    episodes = play(sampler, agent.language, tasks, 2, r.limits(how), r.max_turns, generator, r.temperature)
    (only,) = found["agents"]
    assert code == 0 and (found["tasks"], found["samples"], found["seed"]) == (2, 2, 5) and "difference" not in found
    for name, values in (("success", "tests"), ("turns", "turns"), ("invalid_calls", "invalid_calls")):
        assert only[name]["value"] == pytest.approx(np.mean([e.metrics[values] for e in episodes]))
        assert only[name]["low"] <= only[name]["value"] <= only[name]["high"]
    assert sum(some["tasks"] for some in only["by_depth"].values()) == 2


def test_an_agent_beside_itself_differs_in_nothing(one_core, ask, tmp_path, monkeypatch):
    """And the table has the figures of the JSON: of the same rollouts, which are not played again for it."""
    shutil.copytree(FOLDER, tmp_path / "other")
    parts, play_all = [], evaluating.evaluate_agent
    monkeypatch.setattr(evaluating, "evaluate_agent", lambda *how: parts.append(play_all(*how)) or parts[-1])
    words = ["eval", FOLDER, "--before", tmp_path / "other", "--tasks", 1, "--samples", 1]
    code, out, _ = ask(*words, "--json")
    found = json.loads(out)
    differences = [*found["difference"].pop("behaviours").values(), *found["difference"].values()]
    assert code == 0 and len(parts) == 2 and all(value == {"value": 0, "low": 0, "high": 0} for value in differences)
    monkeypatch.setattr(evaluating, "evaluate_agent", lambda *how: parts.pop(0))
    monkeypatch.setenv("COLUMNS", "250")
    code, out, _ = ask(*words)
    rows = [line.split() for line in out.splitlines()]
    value = found["agents"][1]["success"]
    shown = [f"{value['value']:.3f}", f"[{value['low']:.3f},", f"{value['high']:.3f}]"]
    assert code == 0 and ["success", *shown, *shown, "0.000", "[0.000,", "0.000]"] in rows


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere"], "nowhere is neither a run nor a checkpoint"),
        ([FOLDER, "--before", "base"], "got base; there are sft"),
        ([FOLDER, "--tasks", "0"], "--tasks"),
        (["base"], "Missing argument 'CHECKPOINT…'"),
    ],
)
def test_bad_input_is_one_line(words, says, ask):
    code, out, error = ask("eval", *words)
    assert code == 2 and out == "" and says in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "where"),
    [
        ([], None),
        (["agent"], None),
        (["--samples", 4], None),
        (["agent", "somewhere"], Path("somewhere")),
        (["somewhere"], Path("somewhere")),
    ],
)
def test_without_a_name_it_is_the_clones_agent(words, where, ask, monkeypatch):
    asked = []
    monkeypatch.setattr(evaluating, "evaluate", lambda *given: asked.append(given))
    code, out, _ = ask("eval", *words)
    assert code == 0 and asked == [(where, None, 100, 4, 0, False)] and out == ""


def test_a_shell_completes_the_kinds_of_evaluation():
    assert eval_app.info.cls is OrAgent
    group = get_command(eval_app)
    context = group.make_context("eval", [], resilient_parsing=True)
    assert [one.value for one in group.shell_complete(context, "")] == ["agent", "base"]
