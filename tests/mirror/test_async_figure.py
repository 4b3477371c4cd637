"""`etude figure async-rl`: what it reads out of a run, what its clock foretells by hand, its rules, and one small figure of a tiny agent."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from etude import async_clock
from etude.async_cells import ARMS, Experiment, settings, thirds_of
from etude.async_clock import Pace, foretell, turns
from etude.async_figure import picture, slope, verdicts
from etude.async_rl import Async, Small
from ref.rl import Played
from ref.self_summary import Chain, Segment
from tests import forks

SMALL = {"tools": 0.05, "long": 0.05, "steps": 2, "long_steps": 2, "every": 1, "prompts": 2, "rollouts": 2, "heldout": 2, "samples": 1, "seeds": 2}


def segment(sampled: str, version=(), summary: str = "") -> Segment:
    own = torch.tensor([x == "1" for x in sampled])
    T = len(own)
    versions = torch.full((T,), -1)
    versions[own] = torch.tensor(version or [0] * int(own.sum()))
    asked = torch.tensor([x == "1" for x in summary.ljust(T, "0")])
    return Segment(torch.zeros(T, dtype=torch.long), own, torch.zeros(T), versions, torch.zeros(T - 1, 1, 1, dtype=torch.long), True, asked)


def test_turns_by_hand():
    """Tools run after turns, not after summaries, and not after the last turn."""
    chain = Chain([segment("0011101111", summary="0000001111"), segment("0001011")], True, 0)
    assert turns(Played(chain, 0.0, {})) == [(3, True), (4, False), (1, True), (2, False)]


def test_ages_of_the_first_and_the_last_third():
    """Six tokens of versions 1 1 | 2 2 | 3 4 at version 4: the first third is 3 updates old, the last 0.5."""
    chain = Chain([segment("0110", (1, 1)), segment("01111", (2, 2, 3, 4))], True, 0)
    assert thirds_of(4, Played(chain, 0.0, {})) == (3.0, 0.5)


def test_the_clock_of_a_synchronous_run_by_hand(tiny_run):
    """A worker's 2 groups of 2 rollouts of 10 tokens at 0.1 + 4·0.025 s, then 3 s of training, and 0.5 s until the next step's weights are there."""
    asked = Async(str(tiny_run / "checkpoints" / "sft"), workers=2, slots=4, staleness=0, tool_s=0.0)
    asked = replace(asked, rl=replace(asked.rl, steps=3, prompts=4, rollouts=2))
    pace = Pace(3.0, 0.4, 0.1, (0.1, 0.025), [[[(10, False)], [(4, True), (6, False)]]] * 4)
    assert foretell(pace, asked).steps == pytest.approx([5.0, 10.5, 16.0])


def test_the_clock_asks_for_the_same_tools_as_a_run(tiny_run):
    """Two rollouts at once: each takes its tokens and the waits that the small world draws for its turns, and the step waits for both."""
    asked = Async(str(tiny_run / "checkpoints" / "sft"), workers=1, slots=2, staleness=0, tool_s=0.7)
    asked = replace(asked, rl=replace(asked.rl, steps=1, prompts=1, rollouts=2))
    scene = Small(asked).scene()
    waits = [sum(scene.latency("rl", 0, rollout, turn) for turn in range(2)) for rollout in range(2)]
    pace = Pace(3.0, 0.0, 0.0, (0.1, 0.0), [[[(10, True), (5, False), (5, True), (1, False)]] * 2])
    assert foretell(pace, asked).seconds == pytest.approx(2.1 + max(waits) + 3.0)
    assert waits[0] != waits[1]


def test_a_slope_through_the_common_beginning():
    curve = [{"seconds": t, "success": 0.5 + 0.002 * t} for t in (0.0, 10.0, 20.0)]
    assert slope(curve, 0.5) == pytest.approx(0.002)
    assert slope(curve, 0.4) > 0.002


def made(c: Experiment, faster: float = 2.5, later: float = 0.0, foretold: float = 1.0) -> tuple[list[dict], list[dict]]:
    """Cells and curves: with latency, `more` is so many times faster than the synchronous loop."""
    rows, curves = [], []
    for arm, tool, seed in c.cells:
        speed = 1.0 if arm == "synchronous" or not tool else {"equal": 1.5, "one": 1.8, "more": faster}[arm]
        seconds = (100 + seed) / speed
        age = {"synchronous": 0.0, "equal": 1.5, "one": 0.9, "more": 1.7}[arm]
        row = {"arm": arm, "tool_s": tool, "seed": seed, "seconds": seconds, "foretold": foretold * seconds, "age": age, "foretold_age": age}
        rows.append(row | {"first_third": age + 0.1 + 0.01 * seed, "last_third": age, "trainer_busy": 0.5, "dropped": 0})
        if tool == c.long and arm != "one":
            for version in range(0, c.long_steps + 1, c.every):
                gained = 0.1 * version / c.long_steps - (later if arm == "more" and version == c.long_steps else 0.0)
                one = {"version": version, "seconds": seconds * version / c.long_steps, "success": 0.6 + gained}
                curves.append({"arm": arm, "seed": seed, **one})
    return rows, curves


def decided(c: Experiment, **changes: float) -> dict[str, str]:
    return {claim["name"]: claim["verdict"] for claim in verdicts(c, *made(c, **changes))}


def test_rules():
    c = Experiment()
    assert set(decided(c).values()) == {"reproduced", "holds"}
    assert decided(c, faster=1.6)["half-the-time"] == "partly" and decided(c, faster=1.6)["balance"] == "contradicted"
    assert decided(c, faster=0.8)["half-the-time"] == decided(c, faster=0.8)["same-success"] == "contradicted"
    assert decided(c, faster=1.2)["same-success"] == "not at this scale"
    assert decided(c, later=0.06)["stable"] == "contradicted" and decided(c, later=0.04)["stable"] == "reproduced"
    assert decided(c, foretold=1.16)["clock"] == "broken" and decided(c, foretold=0.86)["clock"] == "holds"


def test_cells_differ_in_what_they_compare_and_nothing_else(tmp_path):
    c = Experiment()
    assert len(c.cells) == len(set(c.cells)) == 3 * (3 * 4 + 1)
    asked = {arm: settings(c, tmp_path, arm, 0.2, 1) for arm in ARMS}
    assert [one.staleness for one in asked.values()] == [0, 2, 2, 1]
    assert [one.slots * one.workers for one in asked.values()] == [128, 128, 256, 256]
    assert len({replace(one, staleness=0, slots=64) for one in asked.values()}) == 1
    with pytest.raises(ValueError, match="long one of tools"):
        Experiment(long=0.3)


def test_a_small_figure(tiny_run, tmp_path):
    """All arms of a tiny agent: S = 0 has only fresh tokens, every version is measured, the first one is the same for all; the picture is drawn."""
    out = tmp_path / "figure"
    sets = (word for name, value in {"checkpoint": tiny_run / "checkpoints" / "sft", **SMALL}.items() for word in ("--set", f"{name}={value}"))
    forks.play("figure", "async-rl", "--out", out, *sets, said=tmp_path / "said")
    found = json.loads((out / "async-rl.json").read_text())
    rows = found["rows"]
    assert len(rows) == 8 and {row["arm"] for row in rows} == set(ARMS)
    for row in rows:
        assert row["seconds"] > 0 and row["foretold"] > 0 and row["tokens_per_s"] > 0 and 0 < row["trainer_busy"] < 1
        assert row["oldest"] <= {"synchronous": 0, "one": 1}.get(row["arm"], 2)
        assert row["age"] == 0 or row["arm"] != "synchronous"
    assert [one["version"] for one in found["curves"]] == [0, 1, 2] * 8
    assert len({one["success"] for one in found["curves"] if one["version"] == 0}) <= 2  # one for each seed of the rollouts
    assert len(found["claims"]) == 7 and found["clock"]["train_s"] > 0
    assert not list((out / "cells").iterdir())
    drawn = imread(out / "async-rl.png")
    assert len(np.unique(drawn[..., :3].reshape(-1, 3), axis=0)) > 50
    picture(found, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").stat().st_size > 10_000


def test_a_pace_survives_its_record():
    pace = Pace(3.0, 0.4, 0.1, (0.1, 0.025), [[[(10, False)]]])
    assert async_clock.of_json(json.loads(json.dumps(async_clock.as_json(pace)))).token_s == pace.token_s
