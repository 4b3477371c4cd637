"""The monitor on many ranks: it says what it says of a small run, changes no bit of the training, and goes on where a
group of ranks died."""

import dataclasses

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from recipe.small.monitoring import Watching
from recipe.small.transcripts import TOOLS
from ref.monitor import statistics
from ref.rl import MonitorSettings, Settings
from ref.rollout import Rollout
from ref.self_summary import Chain
from scaled.rl import Rl
from scaled.watching import Watcher, shortened, watching
from tests.contexts import CONFIG, LENGTH, network, policy, segment
from tests.mirror import watch_parts
from tests.mirror.layouts import close, layouts, play, seeds
from tests.mirror.watch_parts import LONGEST, recorded

EAGER = MonitorSettings(learn=4, tolerance=0.01, error=0.5)


def run_of(seed: int, steps: int, rollouts: int) -> list:
    """Records of a run that is broken from its middle on."""
    return [
        [recorded(seed + step * rollouts + n, 0.9 * (step >= steps // 2) + 0.05) for n in range(rollouts)]
        for step in range(steps)
    ]


def small(records: list, prompts: int, watch: MonitorSettings) -> tuple[list, list, list]:
    """What the small recipe's monitor logs and says of the same rollouts, and its alarms."""
    monitor, logged, lines = Watching.recipe(watch, LONGEST), [], []
    for step in records:
        N = len(step) // prompts
        figures, said = monitor.step([statistics(step[n * N : n * N + N], TOOLS, LONGEST) for n in range(prompts)])
        logged.append(figures)
        lines += said
    return logged, lines, monitor.alarms


def alike(found: list, wanted: list) -> None:
    assert [one.keys() for one in found] == [one.keys() for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        for name, value in other.items():
            close(one[name], value)


@settings(max_examples=6, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(layouts, seeds, st.sampled_from([(8, 2), (7, 3), (4, 5)]), st.integers(0, 13), st.integers(0, 13))
def test_full_runs_are_watched_like_small_ones_and_resumed_ones_like_all(
    tmp_path_factory, layout, seed, shape, killed, back
):
    """Metrics, alarms and lines on ranks are those of the small recipe, within 1e-10, wherever a group's rollouts lie.
    A group of ranks that goes on from an earlier step logs what an undisturbed one logs, to the bit, and its journal
    has every step once."""
    prompts, rollouts = shape
    records = run_of(seed % 1000, 14, prompts * rollouts)
    logged, said, journal = play(layout, watch_parts.looked, records, prompts, EAGER, tmp_path_factory.mktemp("whole"))
    wanted, lines, alarms = small(records, prompts, EAGER)
    alike(logged, wanted)
    assert said == lines and {"broken"} <= {alarm.statistic for alarm in alarms}
    assert [line["step"] for line in journal] == [*range(1, 15)]
    again, told, other = play(
        layout,
        watch_parts.looked,
        records,
        prompts,
        EAGER,
        tmp_path_factory.mktemp("killed"),
        ((killed, min(killed, back)), (13, 12)),
    )
    assert (again, other) == (logged, journal) and set(told) == set(said)


@settings(max_examples=4, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(layouts, seeds)
def test_watching_changes_no_bit(tmp_path_factory, layout, seed):
    """Weights after three steps, and all other metrics, are those of a run that nobody watches."""
    g, state, G, N = torch.Generator().manual_seed(seed), network(seed % 5), 3, 2
    chains = [Chain([segment(g, policy(state))], finished=True) for _ in range(G * N)]
    rewards = torch.randn(G * N, generator=g, dtype=torch.float64)
    few = Settings(prompts=G, rollouts=N, max_len=LENGTH, budget_tokens=5)
    c = dataclasses.replace(Rl.rehearsal(), rl=few, length=LENGTH, heldout=0, cp=layout["cp"], ep=layout["ep"])
    records = [one for step in run_of(seed % 1000, 3, G * N) for one in step]
    how = (c, CONFIG, state, chains, rewards, records)
    figures, weights = play(
        layout, watch_parts.trained, *how, MonitorSettings(learn=1), tmp_path_factory.mktemp("watched")
    )
    plain, others = play(layout, watch_parts.trained, *how, None, tmp_path_factory.mktemp("plain"))
    assert all(torch.equal(x, others[name]) for name, x in weights.items()) and not all(
        torch.equal(x, state[name]) for name, x in weights.items()
    )
    assert [{name: one[name] for name in other} for one, other in zip(figures, plain, strict=True)] == plain
    assert (
        "watch_length" in figures[0]
        and "evidence_length" in figures[-1]
        and not any("watch_length" in one for one in plain)
    )
    assert shortened(figures[0]) == plain[0] and shortened(figures[-1]) == plain[-1] | {"alarms": 0.0}


def test_alarms_are_counted_in_what_is_left():
    metrics = {
        "step": 3,
        "loss": 0.1,
        "watch_broken": 0.2,
        "alarm_at": 6.5,
        "alarm_broken": 1.0,
        "alarm_length": -1.0,
        "alarm_hacks": 0.0,
    }
    assert shortened(metrics | {"low_broken": 0.0, "high_broken": 0.1, "evidence_broken": 9.0}) == {
        "step": 3,
        "loss": 0.1,
        "alarms": 2.0,
    }
    assert shortened({"loss": 0.1, "lower": 2.0}) == {"loss": 0.1, "lower": 2.0}


def test_a_conversation_without_a_record_is_refused(tmp_path):
    look = watching(Watcher(lambda groups: ({}, []), TOOLS, LONGEST, print), tmp_path, 1, 2)
    with pytest.raises(ValueError, match="every rollout its transcript"):
        look(0, [0, 1], [Rollout(Chain([], finished=True))] * 2)


def test_a_monitor_says_that_it_comes_late(tmp_path):
    """A run that was begun before there was a monitor, or whose journal was lost, is watched from where it is."""
    said, played = [], [Rollout(Chain([], finished=True), transcript=watch_parts.recorded(0, 0.5))] * 2
    for name, steps in {"whole": (0, 1), "late": (3, 4)}.items():
        (tmp_path / name).mkdir()
        for step in steps:
            watching(Watcher(lambda groups: ({}, []), TOOLS, LONGEST, said.append), tmp_path / name, 1, 2)(
                step, [0, 1], played
            )
    late = "monitor: it begins with step {} of the run; watched.jsonl does not have all steps before"
    assert said == [late.format(4), late.format(4)]
