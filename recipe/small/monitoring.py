"""The monitor beside RL: what the rollouts of each step did, what is usual by the first steps, and a line where
something has changed.

The test is that of `ref/monitor.py`. A step gives one value of each statistic per group. Those of the first `learn`
steps make the bands. Half of `error` is for the bands, and half for the alarms, so an unchanged run ever raises one
with probability `error` at most.

What the report watched for has a direction: fewer tools, more comments, more broken calls, more questions, more hacks.
The other way is not watched, but for length, which is watched both ways. So training that goes well is silent, unless
it makes rollouts much longer or shorter. An alarm says that something has changed, not that it is bad.

What a step logs, for each statistic NAME that has a value
    watch_NAME       mean over the groups
and from the first step after the bands were learnt
    low_NAME, high_NAME    the band; a side that is not watched lies at 0 or 1
    evidence_NAME    log M, nats; at `alarm_at` it is an alarm
    alarm_NAME       0; from its alarm on 1, if it was for more, or -1, for less
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from recipe.small.monitored import NAMES, SIDES
from recipe.small.transcripts import TOOLS, transcript_of
from ref.monitor import Alarm, Band, Evidence, Monitor, learn_band, log_evidence, statistics
from ref.rl import MonitorSettings, Settings
from ref.rollout import Rollout
from ref.transcript import Transcript

if TYPE_CHECKING:
    from scaled.watching import Watcher

__all__ = ["Group", "ReadStatistics", "Watching", "describe_alarm", "compute_group_statistics", "make_watcher", "sided"]

Group = Mapping[str, float | None]
"""The statistics of a group; None where it has none."""
ReadStatistics = Callable[[Sequence[Rollout], int], Sequence[Group]]
"""(finished rollouts, those of a group adjacent; the number of groups) → their statistics."""


def compute_group_statistics(
    rollouts: Sequence[Rollout],
    groups: int,
    longest: int,
    tools: Sequence[str] = TOOLS,
    record: Callable[[Rollout], Transcript] = transcript_of,
) -> list[Group]:
    """The statistics of each group; lengths are shares of `longest` tokens. `tools` and `record` are those of the world
    that was played. A rollout whose environment failed is not counted, and a group without any other is left out."""
    n = len(rollouts) // groups
    records = [None if rollout.failure else rollout.transcript or record(rollout) for rollout in rollouts]
    transcript_groups = [
        [transcript for transcript in records[start : start + n] if transcript] for start in range(0, len(records), n)
    ]
    return [statistics(group, tools, longest) for group in transcript_groups if group]


def sided(name: str, band: Band) -> Band:
    """The band, open on the side on which the statistic is not watched."""
    side = SIDES.get(name, "both")
    return Band(0.0 if side == "up" else band.low, 1.0 if side == "down" else band.high)


class Watching:
    """The monitor of one run, with its state. `read_statistics` reads the rollouts of a step. `bands`: what is usual,
    if it is known; otherwise the first steps tell, and a statistic without any value in them is not watched. It is an
    observer (`recipe/small/reinforcement.py`)."""

    def __init__(
        self, config: MonitorSettings, read_statistics: ReadStatistics, bands: Mapping[str, Band] | None = None
    ):
        self.config, self.read_statistics = config, read_statistics
        self.lines: list[str] = []
        """What is to be said of the last step."""
        self.steps, self.history = 0, []
        self.monitor: Monitor | None = None
        if bands:
            self.begin(bands)

    def __call__(self, moment: Any) -> dict[str, float]:
        """One more step, if there is one: what is logged of it."""
        self.lines = []
        if moment.done is None:
            return {}
        log_values, self.lines = self.step(self.read_statistics(moment.rollouts, len(moment.done.tasks)))
        return log_values

    @classmethod
    def recipe(cls, config: MonitorSettings, longest: int) -> "Watching":
        """That of the recipe."""
        return cls(config, partial(compute_group_statistics, longest=longest))

    @property
    def alarms(self) -> list[Alarm]:
        """The first one of each statistic. Their steps count from the first one that was watched."""
        return self.monitor.alarms if self.monitor else []

    def begin(self, bands: Mapping[str, Band]) -> None:
        """From the next step on, changes are looked for."""
        self.monitor = Monitor({name: sided(name, band) for name, band in bands.items()}, self.config.error / 2)

    def step(self, groups: Sequence[Group]) -> tuple[dict[str, float], list[str]]:
        """One more step: what is logged of it, and a line for each new alarm."""
        self.steps += 1
        names = dict.fromkeys(name for group in groups for name in group)
        values = {name: [x for group in groups if (x := group[name]) is not None] for name in names}
        means = {
            name: float(np.mean(statistic_values)) for name, statistic_values in values.items() if statistic_values
        }
        log_values = {f"watch_{name}": mean for name, mean in means.items()}
        if self.monitor is None:
            self.learn(values)
            return log_values, []
        new_alarms = self.monitor.observe(groups)
        return (
            log_values | log_monitor(self.monitor),
            [describe_alarm(alarm, self.steps, means.get(alarm.statistic), self.monitor.bands) for alarm in new_alarms],
        )

    def learn(self, values: Mapping[str, list[float]]) -> None:
        """Remembers a step's values; the last step of learning makes the bands."""
        self.history.append({name: list(statistic_values) for name, statistic_values in values.items()})
        if len(self.history) < self.config.learn:
            return
        pooled_values = {
            name: [x for step in self.history for x in step.get(name, [])] for step in self.history for name in step
        }
        pooled_values = {name: statistic_values for name, statistic_values in pooled_values.items() if statistic_values}
        error = self.config.error / 2 / max(len(pooled_values), 1)
        self.history = []
        if pooled_values:
            self.begin(
                {
                    name: learn_band(statistic_values, error, self.config.tolerance)
                    for name, statistic_values in pooled_values.items()
                }
            )

    def state(self) -> dict[str, Any]:
        """What a stage saves."""
        snapshot: dict[str, Any] = {"steps": self.steps, "history": self.history}
        if self.monitor:
            snapshot["bands"] = {name: (band.low, band.high) for name, band in self.monitor.bands.items()}
            snapshot["evidence"] = {
                name: (statistic_evidence.step, statistic_evidence.log_wealth)
                for name, statistic_evidence in self.monitor.evidence.items()
            }
            snapshot["alarms"] = [asdict(alarm) for alarm in self.monitor.alarms]
        return snapshot

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken."""
        self.steps, self.history, self.monitor = state["steps"], [*state["history"]], None
        if "bands" in state:
            evidence = {name: Evidence(step, wealth) for name, (step, wealth) in state["evidence"].items()}
            alarms = [Alarm(**alarm) for alarm in state["alarms"]]
            bands = {name: Band(low, high) for name, (low, high) in state["bands"].items()}
            self.monitor = Monitor(bands, self.config.error / 2, evidence, alarms)


def make_watcher(settings: Settings, tools: Sequence[str], say: Callable[[str], None]) -> "Watcher":
    """The monitor of a full or asynchronous run of RL in a rank's process, for policies with these tools; on rank 0
    `say` shows what has changed."""
    from scaled.watching import Watcher  # a small run needs no ranks

    monitor = Watching.recipe(settings.monitor, settings.max_len)
    return Watcher(monitor.step, tools, settings.max_len, say)


def log_monitor(monitor: Monitor) -> dict[str, float]:
    """What is logged of bands, evidence and alarms."""
    metrics = {"alarm_at": math.log(len(monitor.bands) / monitor.error)}
    signs = {alarm.statistic: 1.0 if alarm.direction == "up" else -1.0 for alarm in monitor.alarms}
    for name, band in monitor.bands.items():
        evidence = float(log_evidence(monitor.evidence[name]))
        metrics |= {
            f"low_{name}": band.low,
            f"high_{name}": band.high,
            f"evidence_{name}": evidence,
            f"alarm_{name}": signs.get(name, 0.0),
        }
    return metrics


def describe_alarm(alarm: Alarm, step: int, mean: float | None, bands: Mapping[str, Band]) -> str:
    """An alarm in a line."""
    band, direction = bands[alarm.statistic], "more" if alarm.direction == "up" else "less"
    usual_range = {"up": f"at most {band.high:.2f}", "down": f"at least {band.low:.2f}"}.get(
        SIDES.get(alarm.statistic, "both"), f"{band.low:.2f} to {band.high:.2f}"
    )
    mean_text = "" if mean is None else f", now {mean:.2f}"
    return (
        f"monitor: {NAMES.get(alarm.statistic, alarm.statistic)} changed by step {step}: {direction} than "
        f"usual ({usual_range}){mean_text}"
    )
