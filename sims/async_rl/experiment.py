"""Asynchronous RL against the synchronous loop: time for the same steps, success against time, and ages, at several
latencies of tools.

    etude figure async-rl            an hour on two idle cores; the policy of runs/small after SFT (make small)
    etude figure async-rl --quick

Every cell is a run of the services of `scaled/async_rl` from the same policy, with the same tasks, optimiser and number
of steps, and as many workers as there are cores, of one thread each. The trainer computes on all cores.

    synchronous    S = 0: all groups of a step are sampled with its weights, and the trainer waits for the last of them
    equal          asynchronous with updates in flight, with as many slots as the synchronous loop has
    more           the same with twice as many slots
    one            the same as `more` with S = 1, at one latency only
    wide           the same as `more` with twice the bound on age, at that latency only

S = 0 is the synchronous loop to the last bit (tests/mirror/test_async_rl.py). It pays for publishing and loading
weights once a step, which a loop in one process need not: the row of the virtual clock says how long that is. The time
of a cell is from the first group that is given out to the last step that is saved; loading Python is left out.

Held-out success is measured afterwards, from the chain of weights that the run has published, so measuring takes no
time of a cell. Success grows with time s(t) = s(0) + b·t, fitted by least squares over the versions of a training run,
s(0) being common to all; the ratio of two slopes b is the share of the time for the same success.

The virtual clock of `ref.async_rl.simulate` foretells each cell, from `sims/async_rl/clock.py`.

Power, written down before it was played. Seconds of cells of one kind differ by 1 to 3% on an idle machine, so three
seeds tell 1.1 from 1.0 in a ratio. Success of one version on 200 tasks of four rollouts has a standard error of 0.02
between training runs that all see the same tasks, and 20 steps gain about 0.05 to 0.10: a slope is known to a third,
and a ratio of slopes that is 0.65 may well have an interval that holds 1. The ratio of seconds for the same steps is
the sharper number, and `stable` says whether the steps are worth the same.

Rules were written before anything was measured, but for one: `wide` and its claim were added when the first seed had
shown that with S = 2 a fourth of all groups is dropped for its age, so that a fifth of the sampled tokens are for
nothing. A cell gives one number, and intervals are Student's t over seeds.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kit.runs import Run
from kit.statistics import student
from recipe.asynchronous.run import check_checkpoint
from sims.async_rl import clock as async_clock
from sims.async_rl.cells import ARMS, Experiment, cell, settings
from sims.experiment import above, below, between, claim
from sims.policies import agent

__all__ = ["Experiment", "experiment", "picture"]


def experiment(run: Run, config: Experiment) -> dict:
    """All cells, and the verdicts."""
    c = config
    checkpoint = Path(c.checkpoint) if c.checkpoint else agent(run, "", c.seed)[0] / "checkpoints" / "sft"
    check_checkpoint(str(checkpoint))
    stage = run.stage("clock", 1, "measurements")
    if not stage.finished:
        pace = async_clock.measure(run.path("clock"), settings(c, checkpoint, "synchronous", 0.0, 0))
        shutil.rmtree(run.path("clock"))
        stage.progress(1)
        stage.finish(async_clock.as_json(pace))
    pace = async_clock.of_json(stage.result())
    rows, world = [], async_clock.second(settings(c, checkpoint, "more", 0.0, 0))
    for arm, tool, number in c.cells:
        cell_config = settings(c, checkpoint, arm, tool, number)
        row = {
            "arm": arm,
            "tool_s": tool,
            "seed": number,
            **cell(run, f"{arm}-{tool:g}-{number}", cell_config, c.every if tool == c.long else 0),
        }
        forecast = async_clock.foretell(pace, cell_config, world)
        rows.append({**row, "foretold": forecast.seconds, "foretold_age": forecast.mean_age})
    curves = [{"arm": row["arm"], "seed": row["seed"], **point} for row in rows for point in row.pop("curve")]
    clock = {name: value for name, value in async_clock.as_json(pace).items() if name != "turns"}
    return {"rows": rows, "curves": curves, "clock": clock, "claims": verdicts(c, rows, curves)}


def slope(curve: list[dict], origin: float) -> float:
    """Success gained a second: least squares through `origin` at the beginning."""
    t, s = (np.array([point[key] for point in curve]) for key in ("seconds", "success"))
    return float((t * (s - origin)).sum() / (t * t).sum())


def verdicts(c: Experiment, rows: list[dict], curves: list[dict]) -> list[dict]:
    """Rules: half the time at the latency `long` if the interval of the ratio is above 1 and reaches 2; no loss without
    latency if it is above 0.85; the same success in less time if the ratio of slopes is below 1, and as early as we aim
    at if it reaches 0.65; stable if success after the same steps differs by less than 0.05; wider if with twice the
    bound on age the interval of the ratio of times is above 1 and reaches 2, and success is as stable; fresher if a
    rollout's first third is older than its last; a balance if S = 2 takes less time than S = 1 with older tokens; in
    the background if publishing takes the trainer at most 0.02 of the time. The virtual clock is right if in a seed's
    worst cell it is off by less than 0.15."""

    def select(key: str, arm: str, tool: float) -> np.ndarray:
        return np.array([row[key] for row in rows if (row["arm"], row["tool_s"]) == (arm, tool)])

    def times(arm: str, tool: float, baseline: str = "synchronous") -> np.ndarray:
        return select("seconds", baseline, tool) / select("seconds", arm, tool)

    def curve(arm: str, number: int) -> list[dict]:
        return [point for point in curves if (point["arm"], point["seed"]) == (arm, number)]

    def spread(arm: str, form: str, value: Callable[[str, float], np.ndarray]) -> str:
        return ", ".join(f"{1000 * tool:g} ms {value(arm, tool).mean():{form}}" for tool in c.tools)

    def over_seeds(
        name: str,
        statement: str,
        source: str,
        values: np.ndarray,
        rule: dict,
        unit: str,
        note: str,
        needs: dict | None = None,
    ) -> dict:
        interval = student(values)
        return claim(
            name, statement, source, interval["value"], rule, (interval["low"], interval["high"]), unit, note, needs
        )

    arms, numbers, ms = ("equal", "more"), range(c.seeds), f"{1000 * c.long:g} ms"
    origin = float(np.mean([point["success"] for point in curves if point["version"] == 0]))
    slopes = {arm: np.array([slope(curve(arm, n), origin) for n in numbers]) for arm in ("synchronous", *arms)}
    last = {arm: np.array([curve(arm, n)[-1]["success"] for n in numbers]) for arm in ARMS}
    ratio = slopes["synchronous"] / np.maximum(slopes["more"], 1e-9)
    errors = {(r["arm"], r["tool_s"], r["seed"]): r["foretold"] / r["seconds"] - 1 for r in rows}
    worst_cells = [max((key for key in errors if key[2] == n), key=lambda key: abs(errors[key])) for n in numbers]
    mean_errors = {(a, t): np.mean([errors[a, t, n] for n in numbers]) for a, t, n in errors if n == 0}
    ages = ", ".join(f"{arm} {select('age', arm, c.long).mean():.2f}" for arm in ("one", *arms, "wide"))
    busy = ", ".join(f"{arm} {select('trainer_busy', arm, c.tools[0]).mean():.0%}" for arm in slopes)
    dropped = ", ".join(f"{arm} {select('dropped', arm, c.long).mean():.1f}" for arm in ("one", *arms, "wide"))
    wide_gain = last["wide"] - last["synchronous"]
    minutes = ", ".join(f"{arm} {60 * arm_slopes.mean():.4f}" for arm, arm_slopes in slopes.items())
    ends = ", ".join(f"{arm} {last[arm].mean():.3f}" for arm in slopes)
    return [
        over_seeds(
            "half-the-time",
            f"with tools of {ms} the same steps take half the time",
            "arXiv:2505.24298; arXiv:2509.19128",
            times("more", c.long),
            above(1.0, 2.0),
            "times faster",
            "; ".join(f"{arm} slots: {spread(arm, '.2f', times)}" for arm in arms),
        ),
        over_seeds(
            "no-latency",
            "where nothing has to be waited for, services side by side are not slower than 0.85 of the "
            "synchronous loop",
            "scaled/async_rl",
            times("equal", c.tools[0]),
            above(0.85),
            "times faster",
            f"tools of {1000 * c.tools[0]:g} ms; share of the time in which the trainer is busy: {busy}",
        ),
        over_seeds(
            "same-success",
            "the same held-out success takes at most 0.65 of the time",
            "arXiv:2505.24298",
            ratio,
            below(1.0, 0.65),
            "of the time",
            f"tools of {ms}; success a minute: {minutes}; success from {origin:.3f} to {ends}; "
            f"{c.heldout} tasks of {c.samples} rollouts",
        ),
        over_seeds(
            "stable",
            f"tokens of up to {c.staleness} updates of age train as well as fresh ones",
            "§4.1, §6.2",
            last["more"] - last["synchronous"],
            between(-0.05, 0.05),
            "of the tasks",
            f"success after {c.long_steps} steps, tools of {ms}; mean age in updates: {ages}; groups "
            f"dropped: {dropped}",
        ),
        over_seeds(
            "wider",
            f"tokens of up to {2 * c.staleness} updates of age halve the time too, and train as well",
            "arXiv:2505.24298",
            times("wide", c.long),
            above(1.0, 2.0),
            "times faster",
            f"tools of {ms}; success differs by {wide_gain.mean():+.3f}; groups dropped: {dropped}; "
            f"added after S = {c.staleness} had been seen",
            {"success differs by less than 0.05": bool(abs(wide_gain.mean()) < 0.05)},
        ),
        over_seeds(
            "fresher",
            "weights swapped in flight make a rollout's later tokens less stale",
            "§4.1; arXiv:2509.19128",
            select("first_third", "more", c.long) - select("last_third", "more", c.long),
            above(0.0),
            "updates",
            "mean age of the first third of a rollout's own tokens "
            f"{select('first_third', 'more', c.long).mean():.2f}, of its last "
            f"{select('last_third', 'more', c.long).mean():.2f}",
        ),
        over_seeds(
            "balance",
            "a larger bound on age gives more throughput for older tokens",
            "§6.2",
            times("more", c.long, "one"),
            above(1.0),
            "times faster than with S = 1",
            f"S = {c.staleness}, tools of {ms}; mean age in updates: {ages}",
            {"tokens are older": bool((select("age", "more", c.long) > select("age", "one", c.long)).all())},
        ),
        over_seeds(
            "background",
            "publishing a version every step costs the trainer no time",
            "§6.2",
            select("publishing", "more", c.long),
            between(-0.02, 0.02),
            "of the time",
            f"from a step that is saved to its version on its way, S = {c.staleness}, tools of {ms}; "
            f"the version itself takes "
            f"{select('published_s', 'more', c.long).mean():.2f} s beside the next step",
        ),
        over_seeds(
            "clock",
            "a virtual clock foretells each run within 15%",
            "ref/async_rl.py",
            np.array([abs(errors[key]) for key in worst_cells]),
            below(0.15),
            "of the seconds",
            "each seed's worst cell: "
            f"{', '.join(f'{a} at {1000 * t:g} ms {errors[a, t, n]:+.0%}' for a, t, n in worst_cells)}. Means over "
            "seeds: "
            + "; ".join(
                f"{a}: {', '.join(f'{1000 * t:g} ms {v:+.0%}' for (b, t), v in mean_errors.items() if a == b)}"
                for a in ARMS
            ),
        ),
    ]


def picture(results: dict, path: Path) -> None:
    """Left: how many times faster than the synchronous loop, over latency. Middle: success over time. Right: throughput
    over the age of tokens."""
    from kit.plots import BLUE, GREEN, GREY, ORANGE, RED, save, sheet

    rows, c = results["rows"], results["config"]
    tools, at = c["tools"], range(len(c["tools"]))
    colours = {"synchronous": GREY, "equal": BLUE, "more": RED, "one": GREEN, "wide": ORANGE}
    labels = {
        "synchronous": "synchronous, S = 0",
        "equal": f"S = {c['staleness']}, as many slots",
        "more": f"S = {c['staleness']}, twice as many",
    }
    labels |= {"one": "S = 1, twice as many", "wide": f"S = {2 * c['staleness']}, twice as many"}

    def select(key: str, arm: str, tool: float) -> np.ndarray:
        return np.array([row[key] for row in rows if (row["arm"], row["tool_s"]) == (arm, tool)])

    figure, (left, middle, right) = sheet(
        3, "Asynchronous RL: the same steps in less time, with tokens of a bounded age", width=5.0
    )
    for arm in ("equal", "more"):
        for key, style in (("seconds", "-"), ("foretold", ":")):
            times = [select(key, "synchronous", tool) / select(key, arm, tool) for tool in tools]
            left.plot(
                at,
                [ratios.mean() for ratios in times],
                style,
                color=colours[arm],
                label=labels[arm] if key == "seconds" else None,
            )
            if key == "seconds":
                left.plot(
                    [x for x, ratios in zip(at, times) for _ in ratios],
                    np.concatenate(times),
                    "o",
                    color=colours[arm],
                    markersize=4,
                    alpha=0.6,
                )
    left.plot([], [], ":", color=GREY, label="the virtual clock")
    left.axhline(1.0, color=GREY, linewidth=1, zorder=0)
    left.set_xticks(at, [f"{1000 * tool:g}" for tool in tools])
    left.set(xlabel="mean time of a tool, ms", ylabel="times faster", title="Time for the same steps")
    left.set_ylim(bottom=0)
    left.legend(frameon=False, fontsize=8)
    for arm in ("synchronous", "equal", "more"):
        curves = [
            [point for point in results["curves"] if (point["arm"], point["seed"]) == (arm, n)]
            for n in range(c["seeds"])
        ]
        minutes, success = (
            np.array([[point[key] for point in curve] for curve in curves]) for key in ("seconds", "success")
        )
        for x, y in zip(minutes / 60, success, strict=True):
            middle.plot(x, y, color=colours[arm], linewidth=0.7, alpha=0.4)
        middle.plot(minutes.mean(0) / 60, success.mean(0), "o-", color=colours[arm], label=labels[arm])
    middle.set(
        xlabel="minutes",
        ylabel="success on held-out tasks",
        title=f"Success over time, tools of {1000 * c['long']:g} ms",
    )
    middle.legend(frameon=False, fontsize=8)
    for arm in ARMS:
        paces = [60 * c["long_steps"] / select(key, arm, c["long"]) for key in ("seconds", "foretold")]
        right.plot(select("age", arm, c["long"]), paces[0], "o", color=colours[arm], label=labels[arm])
        right.plot(select("foretold_age", arm, c["long"]), paces[1], "+", color=colours[arm], markersize=9)
    right.plot([], [], "+", color=GREY, markersize=9, label="the virtual clock")
    right.set(xlabel="mean age of tokens, updates", ylabel="steps a minute", title="Throughput against staleness")
    right.set_ylim(bottom=0)
    right.legend(frameon=False, fontsize=8)
    save(figure, path)
