"""`etude figure async-rl`: what it reads out of a run, what its clock foretells by hand, its rules, and one cell of a
tiny agent."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from kit.runs import Run
from kit.settings import RunError
from recipe.asynchronous import timeline as async_timeline
from recipe.asynchronous.run import Async, Small, successes
from recipe.small.micro_world import CheckpointTasks
from ref.network import load_hf
from ref.rollout import Rollout
from ref.self_summary import Chain, Segment
from sims.async_rl import clock as async_clock
from sims.async_rl import experiment as async_figure
from sims.async_rl.cells import ARMS, Experiment, cell, settings, thirds_of
from sims.async_rl.clock import Pace, foretell, second, turns
from sims.async_rl.experiment import picture, slope, verdicts

SMALL = {
    "tools": (0.05,),
    "long": 0.05,
    "steps": 2,
    "long_steps": 2,
    "every": 1,
    "prompts": 2,
    "rollouts": 2,
    "heldout": 40,
    "samples": 1,
    "seeds": 2,
}
"""With more held-out rollouts than one process plays."""


def segment(sampled: str, version=(), summary: str = "") -> Segment:
    own = torch.tensor([x == "1" for x in sampled])
    T = len(own)
    versions = torch.full((T,), -1)
    versions[own] = torch.tensor(version or [0] * int(own.sum()))
    asked = torch.tensor([x == "1" for x in summary.ljust(T, "0")])
    return Segment(
        torch.zeros(T, dtype=torch.long),
        own,
        torch.zeros(T),
        versions,
        torch.zeros(T - 1, 1, 1, dtype=torch.long),
        True,
        asked,
    )


def test_turns_by_hand():
    """Tools run after turns, not after summaries, and not after the last turn."""
    chain = Chain([segment("0011101111", summary="0000001111"), segment("0001011")], True, 0)
    assert turns(Rollout(chain)) == [(3, True), (4, False), (1, True), (2, False)]


def test_ages_of_the_first_and_the_last_third():
    """Six tokens of versions 1 1 | 2 2 | 3 4 at version 4: the first third is 3 updates old, the last 0.5."""
    chain = Chain([segment("0110", (1, 1)), segment("01111", (2, 2, 3, 4))], True, 0)
    assert thirds_of(4, Rollout(chain)) == (3.0, 0.5)


def test_the_clock_of_a_synchronous_run_by_hand(tiny_run):
    """A worker's 2 groups of 2 rollouts of 10 tokens at 0.1 + 4·0.025 s, then 3 s of training, and 0.5 s until the next
    step's weights are there."""
    asked = Async(str(tiny_run / "checkpoints" / "sft"), workers=2, slots=4, staleness=0, tool_s=0.0)
    asked = replace(asked, rl=replace(asked.rl, steps=3, prompts=4, rollouts=2))
    pace = Pace(3.0, 0.4, 0.1, (0.1, 0.025), [[[(10, False)], [(4, True), (6, False)]]] * 4)
    assert foretell(pace, asked, second(asked)).steps == pytest.approx([5.0, 10.5, 16.0])


def test_the_clock_asks_for_the_same_tools_as_a_run(tiny_run):
    """Two rollouts at once: each takes its tokens and the waits that the small world draws for its turns, and the step
    waits for both."""
    asked = Async(str(tiny_run / "checkpoints" / "sft"), workers=1, slots=2, staleness=0, tool_s=0.7)
    asked = replace(asked, rl=replace(asked.rl, steps=1, prompts=1, rollouts=2))
    tasks = Small(asked).setup().tasks
    waits = [sum(tasks.latency(tasks.task("rl", 0), rollout, turn) for turn in range(2)) for rollout in range(2)]
    pace = Pace(3.0, 0.0, 0.0, (0.1, 0.0), [[[(10, True), (5, False), (5, True), (1, False)]] * 2])
    assert foretell(pace, asked, second(asked)).seconds == pytest.approx(2.1 + max(waits) + 3.0)
    assert waits[0] != waits[1]


def test_a_step_ends_when_its_version_is_on_its_way():
    """A process that was killed after it had saved a step sends no version, and what it did later counts as saved
    again."""
    log = [
        (1.0, "train", 0),
        (3.0, "saved", 1),
        (3.5, "publishing", 1),
        (3.6, "train", 1),
        (5.0, "saved", 2),
        (6.0, "start", 2),
    ]
    steps = async_timeline.trainings([{"at": at, "what": what, "version": version} for at, what, version in log])
    assert [(step["began"], step["at"], step["sent"]) for step in steps] == [(1.0, 3.0, 3.5), (3.6, 5.0, 5.0)]


def test_a_slope_through_the_common_beginning():
    curve = [{"seconds": t, "success": 0.5 + 0.002 * t} for t in (0.0, 10.0, 20.0)]
    assert slope(curve, 0.5) == pytest.approx(0.002)
    assert slope(curve, 0.4) > 0.002


def made(
    c: Experiment,
    faster: float = 2.5,
    wider: float = 2.8,
    later: float = 0.0,
    foretold: float = 1.0,
    publishing: float = 0.001,
) -> tuple[list[dict], list[dict]]:
    """Cells and curves: with latency, `more` is so many times faster than the synchronous loop."""
    rows, curves = [], []
    for arm, tool, seed in c.cells:
        speed = (
            1.0 if arm == "synchronous" or not tool else {"equal": 1.5, "one": 1.8, "more": faster, "wide": wider}[arm]
        )
        seconds = (100 + seed) / speed
        age = {"synchronous": 0.0, "equal": 1.5, "one": 0.9, "more": 1.7, "wide": 2.4}[arm]
        row = {
            "arm": arm,
            "tool_s": tool,
            "seed": seed,
            "seconds": seconds,
            "foretold": foretold * seconds,
            "age": age,
            "foretold_age": age,
        }
        rows.append(
            row
            | {
                "first_third": age + 0.1 + 0.01 * seed,
                "last_third": age,
                "trainer_busy": 0.5,
                "dropped": 0,
                "published_s": 0.1,
            }
        )
        rows[-1]["publishing"] = publishing
        if tool == c.long:
            for version in range(0, c.long_steps + 1, c.every):
                gained = 0.1 * version / c.long_steps - (
                    later if arm in ("more", "wide") and version == c.long_steps else 0.0
                )
                one = {"version": version, "seconds": seconds * version / c.long_steps, "success": 0.6 + gained}
                curves.append({"arm": arm, "seed": seed, **one})
    return rows, curves


def decided(c: Experiment, **changes: float) -> dict[str, str]:
    return {claim["name"]: claim["verdict"] for claim in verdicts(c, *made(c, **changes))}


def test_rules():
    c = Experiment()
    assert set(decided(c).values()) == {"reproduced"}
    assert decided(c, faster=1.6)["half-the-time"] == "partly" and decided(c, faster=1.6)["balance"] == "contradicted"
    assert decided(c, faster=0.8)["half-the-time"] == decided(c, faster=0.8)["same-success"] == "contradicted"
    assert decided(c, faster=1.2)["same-success"] == "not at this scale"
    assert decided(c, later=0.06)["stable"] == "contradicted" and decided(c, later=0.04)["stable"] == "reproduced"
    assert decided(c, wider=1.6)["wider"] == "partly" and decided(c, wider=0.9)["wider"] == "contradicted"
    assert decided(c, later=0.06)["wider"] != "reproduced" and decided(c, later=0.04)["wider"] == "reproduced"
    assert decided(c, publishing=0.03)["background"] == "contradicted"
    assert decided(c, foretold=1.16)["clock"] == "contradicted" and decided(c, foretold=0.86)["clock"] == "reproduced"


def test_cells_differ_in_what_they_compare_and_nothing_else(tmp_path):
    c = Experiment()
    assert len(c.cells) == len(set(c.cells)) == 3 * (3 * 4 + 2)
    asked = {arm: settings(c, tmp_path, arm, 0.2, 1) for arm in ARMS}
    assert [one.staleness for one in asked.values()] == [0, 2, 2, 1, 4]
    assert [one.slots * one.workers for one in asked.values()] == [128, 128, 256, 256, 256]
    assert len({replace(one, staleness=0, slots=64) for one in asked.values()}) == 1
    with pytest.raises(ValueError, match="long one of tools"):
        Experiment(long=0.3)


def test_a_cell_and_its_clock(tiny_run, tmp_path, monkeypatch):
    """The services of a tiny agent: no token beyond the bound, each version measured from the chain, the first as
    `successes` says."""
    c = Experiment(**SMALL)
    asked = settings(c, tiny_run / "checkpoints" / "sft", "more", 0.05, 1)
    with Run.open(tmp_path / "run", "figure async-rl", c) as run:
        found = cell(run, "more", asked, 1)
        assert cell(run, "more", asked, 1) == found
    assert 0 < found["seconds"] < 300 and 0 < found["trainer_busy"] < 1 and 0 <= found["age"] <= found["oldest"] <= 2
    assert 0 <= found["publishing"] < 1 - found["trainer_busy"] and found["published_s"] > 0
    assert found["first_third"] >= found["last_third"] and found["tokens_per_s"] > 0
    assert [one["version"] for one in found["curve"]] == [0, 1, 2]
    assert (
        0
        == found["curve"][0]["seconds"]
        < found["curve"][1]["seconds"]
        < found["curve"][2]["seconds"]
        == pytest.approx(found["seconds"])
    )
    assert found["curve"][0]["success"] == successes(asked, CheckpointTasks(asked), load_hf(asked.checkpoint)).mean()
    assert not list((tmp_path / "run" / "cells").iterdir())
    trainings = async_timeline.trainings

    def slow_at_first(lines):
        first, *rest = trainings(lines)
        return [{**first, "began": first["began"] - 1000.0}, *rest]

    monkeypatch.setattr(async_timeline, "trainings", slow_at_first)
    pace = async_clock.measure(tmp_path / "clock", asked, steps=2)
    assert pace.train_s < 300, "a first step, which warms up, was timed"
    assert (
        min(pace.train_s, pace.publish_s, pace.swap_s, pace.token_s[0]) > 0
        and pace.token_s[1] >= 0
        and len(pace.turns) == 2 * 2
    )
    told = foretell(pace, asked, second(asked))
    assert told.trained == 4 and told.seconds > 2 * pace.train_s


def test_the_figure_of_given_cells(tiny_run, tmp_path, monkeypatch):
    """What `cell` says goes into rows, curves and verdicts, and the picture is drawn."""
    c = Experiment(checkpoint=str(tiny_run / "checkpoints" / "sft"), steps=3, prompts=2, rollouts=2)
    rows, curves = made(c)
    given = {f"{row['arm']}-{row['tool_s']:g}-{row['seed']}": row for row in rows}

    def drawn(run, name, asked, every):
        row = given[name]
        mine = [one for one in curves if every and (one["arm"], one["seed"]) == (row["arm"], row["seed"])]
        return {
            "at": [],
            **{k: v for k, v in row.items() if k not in ("arm", "tool_s", "seed", "foretold", "foretold_age")},
            "curve": mine,
        }

    pace = Pace(3.0, 0.4, 0.1, (0.01, 0.001), [[[(10, True), (3, False)]] * 2])
    monkeypatch.setattr(async_figure, "cell", drawn)
    monkeypatch.setattr(async_clock, "measure", lambda folder, asked: folder.mkdir() or pace)
    with Run.open(tmp_path / "run", "figure async-rl", c) as run:
        found = async_figure.experiment(run, c)
    assert len(found["rows"]) == len(c.cells) and all(row["foretold"] > 0 for row in found["rows"])
    assert len(found["claims"]) == 9 and found["clock"]["train_s"] == 3.0
    assert len(found["curves"]) == len(curves)
    picture({**found, "config": {**asdict(c), "tools": list(c.tools)}}, tmp_path / "drawn.png")
    shown = imread(tmp_path / "drawn.png")
    assert len(np.unique(shown[..., :3].reshape(-1, 3), axis=0)) > 50


def test_a_checkpoint_that_is_none(tmp_path):
    c = Experiment(checkpoint=str(tmp_path / "nowhere"))
    with (
        Run.open(tmp_path / "run", "figure async-rl", c) as run,
        pytest.raises(RunError, match="nowhere is not a folder with config.json"),
    ):
        async_figure.experiment(run, c)


def test_a_pace_survives_its_record():
    pace = Pace(3.0, 0.4, 0.1, (0.1, 0.025), [[[(10, False)]]])
    assert async_clock.of_json(json.loads(json.dumps(async_clock.as_json(pace)))).token_s == pace.token_s
