"""The monitor beside RL: it changes no weight, a run that was killed says the same, and welcome changes are silent."""

import io
import itertools
import json
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.report import watched
from etude.report.watched import alarm_in
from kit.runs import Run
from kit.settings import RunError, fill
from recipe.microrepo import generate
from recipe.small import reinforcement
from recipe.small import stages as recipe
from recipe.small.latest_rollouts import Latest
from recipe.small.monitored import NAMES, SIDES
from recipe.small.monitoring import Watching, compute_group_statistics, describe_alarm, sided
from recipe.small.transcripts import TOOLS, transcript_of
from ref.monitor import Alarm, Band, learn_band, statistics
from ref.network import Config, Transformer
from ref.rl import MonitorSettings
from sims.policies import SMOKE
from tests import scripted

NET = dict(
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    num_experts=2,
    moe_intermediate_size=16,
)
USUAL = {
    "entropy": 0.9,
    "top_tool": 0.4,
    "comments": 0.0,
    "length": 0.3,
    "broken": 0.05,
    "questions": 0.0,
    "hacks": 0.0,
}


def unseen(rollouts, groups):
    """These tests give the statistics themselves."""
    return []


def bands_of(watch):
    assert watch.monitor
    return watch.monitor.bands


@pytest.fixture(scope="module")
def language():
    return scripted.speaker()


def trained(folder, language, killed_after=None, resume=False, observers=(), **changed):
    """Three steps of RL of an untrained policy: its weights, and the lines of its metrics. `observers`: who looks on,
    beside the monitor."""
    rl = SMOKE["rl"] | {"steps": 3, "prompts": 2, "rollouts": 2, "max_turns": 2, "monitor": {"learn": 1} | changed}
    config = fill(recipe.Recipe, SMOKE | {"rl": rl})
    torch.manual_seed(1)
    model, reference = (Transformer(Config.tiny(language.tokenizer.get_vocab_size(), **NET)) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    with Run.open(folder, "recipe", config, resume=resume, checkpoint_seconds=0) as run:
        stage = run.stage("rl", total=3)
        if killed_after:
            log, count = stage.progress, itertools.count(1)

            def until(*arguments, **shown):
                log(*arguments, **shown)
                if next(count) > killed_after:
                    raise KeyboardInterrupt

            stage.progress = until
        learner, _ = reinforcement.learn(stage, config, model, None, reference, language, observers)
    return learner.trunk.masters.state_dict(), (folder / "metrics" / "rl.jsonl").read_text()


def test_watching_changes_no_bit_and_a_killed_run_says_the_same(language, tmp_path, monkeypatch):
    """Nor does keeping the newest rollouts as text, which the run beside it does not. Ten minutes do not pass between
    two steps, so the file is that of the first step, and in the end that of the last."""
    moments, kept, keep = [], [], Latest.keep
    monkeypatch.setattr(Latest, "keep", lambda self, step, *given: kept.append(step) or keep(self, step, *given))

    def newest(name):
        return Latest(tmp_path / name / "rollouts" / "rl.json", language, 600.0, steps=3)

    def look(moment):
        moments.append(moment)
        return {}

    weights, whole = trained(tmp_path / "whole", language, observers=[newest("whole"), look])
    group, rewards, found = (
        moments[-1].rollouts[:2],
        moments[-1].done.result.rewards[:2].tolist(),
        json.loads(newest("whole").path.read_text(encoding="utf-8")),
    )
    assert kept == [1, 3] and found["step"] == 3 and found["prompt"] == group[0].environment.session.prompt
    for one, episode, reward in zip(found["rollouts"], group, rewards, strict=True):
        texts = [language.decode(segment.tokens.tolist()) for segment in episode.chain.segments]
        assert one == {
            "success": bool(episode.metrics["tests"]),
            "reward": reward,
            "contexts": len(texts),
            "text": "\n".join(texts),
        }

    others, unwatched = trained(tmp_path / "off", language, on=False)
    assert all(torch.equal(x, y) for x, y in zip(weights.values(), others.values(), strict=True))
    lines, plain = ([json.loads(line) for line in text.splitlines()] for text in (whole, unwatched))
    assert [{name: line[name] for name in other} for line, other in zip(lines, plain, strict=True)] == plain
    assert not any(name.startswith(("watch_", "evidence_")) for name in plain[0])
    assert (
        "watch_length" in lines[0]
        and "evidence_length" not in lines[0]
        and {"evidence_length", "high_broken", "alarm_hacks"} <= set(lines[1])
    )
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "killed", language, killed_after=2, observers=[newest("killed")])
    newest("killed").path.write_text("{")
    again, resumed = trained(tmp_path / "killed", language, resume=True, observers=[newest("killed")])
    assert resumed == whole and all(torch.equal(x, y) for x, y in zip(weights.values(), again.values(), strict=True))
    assert json.loads(newest("killed").path.read_text(encoding="utf-8")) == found


def test_a_group_is_one_value_of_each_statistic(language):
    tasks = [scripted.TASK, generate(random.Random(0), "train", 0)]
    turns = ["read m3", "write m3\n    return 4"], ["raed"]
    episodes = [
        scripted.played(language, scripted.wide(language), task, some, max_turns=3) for task in tasks for some in turns
    ]
    records = [transcript_of(episode) for episode in episodes]
    assert compute_group_statistics(episodes, len(tasks), 60) == [
        statistics(records[:2], TOOLS, 60),
        statistics(records[2:], TOOLS, 60),
    ]


PLAIN: list = [np.ndarray, np.dtype, type(np.dtype("d")), np.zeros(1).__reduce__()[0]]
shares = st.fixed_dictionaries({name: st.none() | st.floats(0, 1, allow_subnormal=False) for name in NAMES})
steps = st.lists(st.lists(shares, min_size=2, max_size=2), min_size=1, max_size=7)


@given(steps, st.integers(1, 3))
@settings(max_examples=60)
def test_saved_and_restored_after_every_step_it_says_the_same(steps, learn):
    """Also through torch's file, which holds plain values only."""
    config = MonitorSettings(learn=learn, tolerance=0.01, error=0.9)
    straight, halting = Watching(config, unseen), Watching(config, unseen)
    for groups in steps:
        want = straight.step(groups)
        file = io.BytesIO()
        torch.save(halting.state(), file)
        file.seek(0)
        halting = Watching(config, unseen)
        with torch.serialization.safe_globals(PLAIN):
            halting.restore(torch.load(file, weights_only=True))
        assert halting.step(groups) == want and halting.alarms == straight.alarms
        assert all(math.isfinite(value) for value in want[0].values())


def run_of(*parts, error=0.01):
    """The monitor after so many steps of groups with these values, and all that it said."""
    watch, rng, lines, logged = (
        Watching(MonitorSettings(learn=5, error=error), unseen),
        np.random.default_rng(0),
        [],
        [],
    )
    for many, changed in parts:
        for _ in range(many):
            means = USUAL | changed
            groups = [
                {
                    name: float(np.clip(mean + 0.05 * rng.standard_normal() * (0 < mean < 1), 0, 1))
                    for name, mean in means.items()
                }
                for _ in range(8)
            ]
            figures, said = watch.step(groups)
            logged.append({"step": len(logged) + 1, **figures})
            lines += said
    return watch, lines, logged


WORSE = {"entropy": 0.4, "top_tool": 0.8, "comments": 0.5, "length": 0.7, "broken": 0.5, "questions": 0.5, "hacks": 0.5}
BETTER = {"entropy": 1.0, "top_tool": 0.25, "broken": 0.0, "length": 0.25}


@pytest.mark.parametrize("name", NAMES)
def test_each_failure_is_said_once_and_within_twelve_steps(name):
    watch, lines, logged = run_of((15, {}), (25, {name: WORSE[name]}))
    (line,), (alarm,) = lines, watch.alarms
    step, way = alarm_in(logged, name) or (0, "")
    assert (
        15 < step <= 27 and alarm.step == step - 5 and alarm.direction == way == ("down" if name == "entropy" else "up")
    )
    assert NAMES[name] in line and f"by step {step}" in line
    assert [other for other in NAMES if alarm_in(logged, other)] == [name]


def test_a_run_that_gets_better_is_silent():
    watch, lines, _ = run_of((15, {}), (200, BETTER))
    assert lines == [] and watch.alarms == [] and watch.steps == 215


def test_length_is_watched_both_ways():
    _, (line,), logged = run_of((15, {}), (25, {"length": 0.02}))
    assert "less than usual" in line and next(line["alarm_length"] for line in logged if line.get("alarm_length")) == -1


def test_the_errors_of_bands_and_alarms_add_up_to_that_of_the_run():
    watch, _, logged = run_of((6, {}), error=0.02)
    assert watch.monitor and watch.monitor.error == 0.01 and logged[-1]["alarm_at"] == pytest.approx(math.log(7 / 0.01))
    other = Watching(MonitorSettings(learn=1, error=0.02, tolerance=0.1), unseen)
    other.learn({name: [mean] * 40 for name, mean in USUAL.items()})
    assert bands_of(other)["broken"] == Band(0.0, learn_band([0.05] * 40, 0.01 / 7, 0.1).high)
    assert bands_of(other)["length"] == learn_band([0.3] * 40, 0.01 / 7, 0.1)


def test_a_statistic_without_a_value_at_first_is_not_watched():
    watch = Watching(MonitorSettings(learn=2), unseen)
    for _ in range(6):
        logged, _ = watch.step([USUAL | {"comments": None}] * 4)
    assert "watch_comments" not in logged and set(bands_of(watch)) == {*NAMES} - {"comments"}
    logged, _ = watch.step([USUAL | {"comments": 0.4}] * 4)
    assert logged["watch_comments"] == 0.4 and "high_comments" not in logged
    empty = Watching(MonitorSettings(learn=1), unseen)
    assert empty.step([dict.fromkeys(NAMES)]) == ({}, []) and empty.monitor is None


def test_an_alarm_in_words():
    bands = {"length": Band(0.1, 0.4), "entropy": Band(0.7, 1.0), "broken": Band(0.0, 0.2)}
    assert describe_alarm(Alarm("length", 3, "down", 9.0), 13, 0.05, bands) == (
        "monitor: length of rollouts changed by step 13: less than usual (0.10 to 0.40), now 0.05"
    )
    assert "less than usual (at least 0.70)" in describe_alarm(Alarm("entropy", 3, "down", 9.0), 13, None, bands)
    assert "more than usual (at most 0.20), now 0.50" in describe_alarm(Alarm("broken", 3, "up", 9.0), 13, 0.5, bands)
    assert set(SIDES) == set(NAMES)
    assert sided("broken", Band(0.1, 0.2)) == Band(0.0, 0.2) and sided("entropy", Band(0.1, 0.2)) == Band(0.1, 1.0)


def test_settings_that_cannot_be_are_refused():
    for wrong in ("learn=0", "tolerance=0", "error=1"):
        with pytest.raises(RunError, match=rf"rl\.monitor\.{wrong.partition('=')[0]} must"):
            fill(recipe.Recipe, {}, [f"rl.monitor.{wrong}"])
    assert recipe.Recipe().rl.monitor.on


def test_the_report_says_what_has_changed():
    _, _, calm = run_of((20, {}))
    _, _, logged = run_of((15, {}), (25, {"comments": 0.5}))
    step, _ = alarm_in(logged, "comments") or (0, "")
    assert (
        watched.sentence(logged) == f"Watched from step 6 on. Changed: comments in written code (more, by step {step})."
    )
    assert watched.sentence(calm) == "Watched from step 6 on. Nothing that is watched has changed."
    rows = {row[0]: row[1:] for row in watched.rows(logged)}
    assert (
        rows["comments in written code"][1::2] == ["0.50", f"more, by step {step}"] and rows["broken calls"][-1] == "–"
    )
    (figure,) = watched.picture(logged)
    assert figure.startswith("<figure><img ") and watched.changes(calm) == []
    for nothing in ([], calm[:4], [{"step": 1, "reward": 0.0}]):
        assert watched.sentence(nothing) == "" and watched.rows(nothing) == [] and watched.picture(nothing) == []
