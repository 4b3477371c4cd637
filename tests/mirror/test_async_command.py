"""`etude run async-rl`: what the command plays, leaves and says; a killed one goes on, and its journal replays to the
weights it leaves."""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from safetensors.torch import load_file

from kit.disk import read_lines
from kit.settings import fill
from recipe.asynchronous import timeline as async_timeline
from recipe.asynchronous.run import Async, Small
from ref.network import load_hf
from scaled.async_rl import evaluator, services
from tests import forks

FEW = {"rl.prompts": 2, "rl.rollouts": 2, "heldout": 3, "samples": 2, "slots": 4, "tool_s": 0.02}
AT_RANDOM = {"rl__temperature": 4}
"""Nearly every token as likely as any other: an agent that learned nothing may else write to its limit and call
nothing, whatever it draws, so that no group has an advantage and no call a hint."""


def words(tiny_run, out, **more):
    sets = {
        "checkpoint": tiny_run / "checkpoints" / "sft",
        **FEW,
        **{name.replace("__", "."): value for name, value in more.items()},
    }
    return (
        "run",
        "async-rl",
        "--out",
        out,
        *(word for name, value in sets.items() for word in ("--set", f"{name}={value}")),
    )


def steps(out):
    path = out / "services" / "journal.jsonl"
    return [line for line in (read_lines(path) if path.exists() else []) if line["kind"] == "train"]


def descendants(pid):
    """The process and all that it has started, itself first."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for parent in found:
        found += [child for child, its_parent in parents.items() if its_parent == parent]
    return found


def test_a_killed_run_goes_on_and_its_journal_replays_to_its_weights(tiny_run, tmp_path, ask):
    """With a standby, an evaluator, and a store of its own. The evaluator gets what time others leave, and on a busy
    machine they leave none: after two steps they are stopped until it has measured."""
    out, store = tmp_path / "run", tmp_path / "store"
    asked = *words(tiny_run, out, rl__steps=6, evaluate_every=1, standby=1, tool_s=0.6, **AT_RANDOM), "--store", store
    process = forks.start(*asked, said=tmp_path / "first")
    until = time.monotonic() + 120
    stopped = []
    while len(steps(out)) < 2 or not evaluator.read_measurements(out / "services"):
        assert time.monotonic() < until and process.is_alive()
        has_started = (out / "services" / "events" / "evaluator.jsonl").exists()  # and has its low priority
        if len(steps(out)) >= 2 and has_started and not stopped:
            stopped = [pid for pid in descendants(process.pid) if os.getpriority(os.PRIO_PROCESS, pid) < 10]
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    for pid in stopped[1:]:
        os.kill(pid, signal.SIGCONT)
    process.join()
    before = len(steps(out))
    code, said, error = ask("run", "async-rl", "--out", out, "--resume")
    assert code == 0, error
    assert "success_after" in said and "report.json" in said
    assert before >= 2 and len(steps(out)) == 6
    groups = [group for line in steps(out) for group in line["groups"]]
    assert len(set(groups)) == len(groups) == 12
    report = json.loads((out / "report.json").read_text())
    found, c = report["result"], fill(Async, report["config"])
    assert found["steps"] == 6 and 0 <= found["age"] <= found["oldest"] <= 2 and found["tokens_per_s"] > 0
    assert found["gain"] == pytest.approx(found["success_after"] - found["success_before"])
    assert 0 < found["trainer_busy"] < 1 and found["seconds"] < 240
    drawn = imread(out / "timeline.png")
    assert drawn.shape[1] == 1008 and len(np.unique(drawn[..., :3].reshape(-1, 3), axis=0)) > 10
    shown = async_timeline.make_run_timeline("run", out / "services")
    assert [version for *_, version in shown.steps] == [1, 2, 3, 4, 5, 6] and {"worker-0", "worker-1"} <= set(
        shown.slots
    )
    measured = found["heldout by version"]
    versions = [row["version"] for row in measured]
    assert versions == [row["version"] for row in evaluator.read_measurements(out / "services")]
    assert versions == sorted(set(versions)) and "heldout by version" in said
    assert all(0 <= row["success"] <= 1 and row["seconds"] > 0 for row in measured)
    assert not (out / "services" / "weights").exists() and any((store / "groups").iterdir())

    torch.set_num_threads(1)
    again = Small(c).learner()
    assert services.replay(out / "services", again) == 6
    assert {x.dtype for x in load_file(out / "checkpoints" / "final" / "model.safetensors").values()} == {
        torch.bfloat16
    }, "the weights as trained"
    left = load_hf(out / "checkpoints" / "final", torch.bfloat16)
    assert all(a.equal(b) for a, b in zip(again.model.parameters(), left.parameters(), strict=True))
    assert not all(
        a.equal(b) for a, b in zip(load_hf(c.checkpoint, torch.bfloat16).parameters(), left.parameters(), strict=True)
    )


def test_without_staleness_no_token_is_old(tiny_run, tmp_path, ask):
    out = tmp_path / "run"
    more = {"rl__feedback__weight": 0.5, "rl__monitor__learn": 1, **AT_RANDOM}
    code, _, error = ask(*words(tiny_run, out, rl__steps=3, staleness=0, heldout=0, **more))
    assert code == 0, error
    found = json.loads((out / "report.json").read_text())["result"]
    assert found["age"] == found["oldest"] == found["dropped_groups"] == 0 and "gain" not in found
    trained = async_timeline.trainings(async_timeline.events(out / "services")["trainer"])
    assert [step["version"] for step in trained] == [1, 2, 3] and all(step["oldest"] == 0 for step in trained)
    assert any(step.get("distilled") for step in trained), "an agent of chance needs hints"
    assert [line["step"] for line in read_lines(out / "services" / "watched.jsonl")] == [1, 2, 3]
    assert "alarm_at" not in trained[0] and all("evidence_length" in step for step in trained[1:])


@pytest.mark.parametrize(
    "sets, says",
    [
        (
            {"checkpoint": "nowhere"},
            "checkpoint nowhere is not a folder with config.json, weights and tokenizer.json; make small writes",
        ),
        ({"slots": 1}, "slots must be at least 2; got 1"),
        ({"staleness": -1}, "staleness must be at least 0, got -1"),
        ({"timeout": 0}, "timeout must be above 0 seconds, got 0"),
        (
            {"evaluate_every": 2, "heldout": 0},
            "evaluate_every measures held-out tasks: heldout must be at least 1, got 0",
        ),
        ({"store": "memory://here"}, "the store must be one that processes share; memory://here is one process's own"),
        ({"store": "nothing://here"}, "the store nothing://here cannot be opened"),
        ({"engine": "vllm"}, "--engine vllm needs vLLM, in an environment of its own: pip install -e '.[vllm]'"),
        ({"rl.steps": 0}, "rl.steps must be at least 1, got 0"),
    ],
)
def test_bad_settings_are_one_line(tiny_run, tmp_path, ask, sets, says):
    code, _, said = ask(
        *words(tiny_run, tmp_path / "run", **{name.replace(".", "__"): value for name, value in sets.items()})
    )
    assert code == 2 and says in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "runtime, says",
    [("ray", "runtime=ray needs Ray; in the clone: pip install"), ("slurm", "runtime expects local or ray")],
)
def test_a_runtime_that_is_not_there_is_one_line(tiny_run, tmp_path, ask, monkeypatch, runtime, says):
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, said = ask(*words(tiny_run, tmp_path / "run"), "--runtime", runtime)
    assert code == 2 and says in said and said.count("\n") == 1


def lines(*events):
    return [dict(zip(("at", "what", "epoch", "version"), event, strict=False)) for event in events]


def test_only_steps_that_were_saved_count_and_a_pause_costs_no_time():
    """The first process is killed in its second step, and the run goes on a hundred seconds later."""
    first = lines((10.0, "start", 0), (11.0, "train", 0, 0), (13.0, "saved", 0, 1), (14.0, "train", 0, 1))
    second = lines((114.0, "start", 0), (115.0, "train", 0, 1), (117.5, "saved", 0, 2), (118.0, "published", 0, 2))
    trained = async_timeline.trainings(first + second)
    assert [(step["began"], step["at"]) for step in trained] == [(11.0, 13.0), (115.0, 117.5)]
    at = async_timeline.clock(first + second)
    assert [at(second) for second in (10.0, 14.0, 60.0, 114.0, 118.0)] == [0.0, 4.0, 4.0, 4.0, 8.0]
    again = lines((13.5, "start", 1), (14.0, "train", 1, 1), (16.0, "saved", 1, 2))  # another process of the same run
    assert async_timeline.clock(first[:3] + again)(16.0) == 6.0
