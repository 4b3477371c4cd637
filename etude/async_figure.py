"""`etude figure async-rl`: the synchronous loop on all cores against asynchronous services, at four mean times of a tool.

    etude figure async-rl            about an hour and a half on two quiet cores; from runs/small (make small)
    etude figure async-rl --quick

Three arms take the same optimiser steps on the same tasks, from the same policy:

    synchronous   a step's conversations are played in one process a core, all at once, and wait for their tools; then all cores train
    equal         services, staleness S, with as many conversations at a time as a step has
    more          services with twice as many

Measured: seconds for the steps; success on held-out tasks afterwards; ages of the tokens that were trained on, at the beginning and at the end
of a rollout. `ref.async_rl.simulate` predicts the seconds of each cell from what was measured outside of it: the time of an engine's step by
its rows, of an optimiser step, of publishing and loading. Waits are the same numbers in all arms: a tool's time depends on task, rollout and
turn alone.

Power. Seconds of a cell vary by a few percent between seeds, so three seeds show a tenth. Success of a training run varies by 0.03 between
seeds, so that arms have the same success is shown to about 0.05, not better.
"""

from __future__ import annotations

import functools
import itertools
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from etude import async_timeline
from etude.async_rl import Async, Small, Trained, measured
from kit.disk import read_lines
from kit.process import cores, on_cores
from kit.runs import Run
from ref.async_rl import Load, Rules, simulate
from ref.rl import Played
from ref.weight_sync import Reader, Writer, parts
from scaled.async_rl import services
from scaled.async_rl.local import Plan, play
from scaled.async_rl.player import Player
from scaled.runtime.store import Folder
from sims.experiment import above, at_most, claim
from sims.policies import agent
from sims.recipe.agent import parted
from sims.statistics import student

__all__ = ["Experiment", "experiment", "picture"]

ARMS = ("synchronous", "equal", "more")


@dataclass(frozen=True)
class Experiment:
    """Settings."""

    run: str = "runs/small"
    """Run of the recipe whose policy after SFT starts; empty: a small one is played."""
    tools: tuple[float, ...] = (0.0, 0.05, 0.2, 0.5)
    """Mean times of a tool, seconds."""
    steps: int = 10
    """Optimiser steps of a cell."""
    long: int = 30
    """Optimiser steps at the time of a tool that `at` names, after which success is compared."""
    at: float = 0.2
    """Mean time of a tool, seconds, at which success is compared; one of `tools`."""
    staleness: int = 2
    """S, updates."""
    prompts: int = 16
    """Groups per step."""
    rollouts: int = 8
    """Rollouts per group."""
    heldout: int = 150
    """Held-out tasks."""
    samples: int = 4
    """Rollouts of each."""
    seeds: int = 3
    """Training runs of each cell, two or more."""
    seed: int = 0
    """Seed of all random numbers."""

    def __post_init__(self):
        if self.seeds < 2 or self.at not in self.tools or min(self.steps, self.long) < 1:
            raise ValueError(f"seeds must be at least 2, steps and long at least 1, and at one of tools; got {self}")

    @classmethod
    def quick(cls) -> Experiment:
        return cls(run="", tools=(0.0, 0.05), at=0.05, steps=2, long=3, prompts=2, rollouts=2, heldout=3, samples=2, seeds=2)

    def settings(self, checkpoint: str, tool_s: float, arm: str, number: int) -> Async:
        """Of one training run."""
        each = -(-self.prompts * self.rollouts // cores())
        return Async(
            checkpoint=checkpoint,
            seed=1000 * self.seed + number,
            staleness=0 if arm == "synchronous" else self.staleness,
            workers=cores(),
            slots=each * (2 if arm == "more" else 1),
            tool_s=tool_s,
            heldout=self.heldout,
            samples=self.samples,
            rl=replace(Async().rl, steps=self.long if tool_s == self.at else self.steps, prompts=self.prompts, rollouts=self.rollouts),
        )


def waited(player: Player, steps: list[tuple[int, float]] | None = None) -> dict[int, list[Played]]:
    """Play what a player has been given to its end, in real time. `steps` receives rows and seconds of each step of the engine."""
    found: dict[int, list[Played]] = {}
    while player.groups:
        if (idle := player.idle(time.monotonic())) > 0:
            time.sleep(idle)
        began, before = time.monotonic(), len(player.seated) - len(player.due)
        found |= player.tick(began)
        if steps is not None:
            steps.append((max(1, before), time.monotonic() - began))
    return found


def synchronous(c: Async, show: Callable[[int, dict[str, float]], None]) -> tuple[float, Trained, dict]:
    """The loop without services: seconds, what was trained, and the rollouts of its first step."""
    learner, small, first = Trained(c, functools.partial(on_cores, each=2)), Small(c), {}
    sampler, scene, n = small.sampler(), small.scene(), cores()
    began = time.monotonic()
    for step in range(c.rl.steps):
        sampler.load(learner.masters.model, step)
        blocks = [[step * c.rl.prompts + g for g in range(c.rl.prompts) if g * n // c.rl.prompts == part] for part in range(n)]

        def share(groups: list[int]) -> dict[int, list[Played]]:
            player = Player(sampler, scene, max(1, len(groups)) * c.rl.rollouts, c.rl.rollouts, c.seed, c.rl.temperature)
            player.give(groups)
            return waited(player)

        played = dict(itertools.chain(*(one.items() for one in on_cores(share, [block for block in blocks if block]))))
        first = first or played
        figures = learner.step([one for group in sorted(played) for one in played[group]])
        show(step + 1, figures)
    return time.monotonic() - began, learner, first


def asynchronous(c: Async, folder: Path, show: Callable[[int, dict[str, float]], None]) -> tuple[float, Trained]:
    """The services: seconds from the first work that a worker is given to the last version, and what was trained."""
    play(Plan(folder, c.rules, Small(c), c.workers, c.slots, c.rl.rollouts, c.seed, c.rl.temperature, c.timeout), show)
    known = async_timeline.events(folder)
    begun = min(line["at"] for name, lines in known.items() if name != "trainer" for line in lines if line["what"] == "work")
    learner = Trained(c)
    services.restored(folder / "trainer", learner)
    return async_timeline.trainings(known["trainer"])[-1]["at"] - begun, learner


def freshness(folder: Path) -> float:
    """How much younger, in updates, the last quarter of a rollout's own tokens is than the first, when they are trained on; the mean over the
    rollouts."""
    found = []
    for line in read_lines(folder / "journal.jsonl"):
        if line["kind"] == "ready":
            for p in services.read(folder, [line["key"]], [line["digest"]]):
                own = torch.cat([s.version[s.sampled] for s in p.chain.segments]).double()
                quarter = max(1, len(own) // 4)
                found.append((own[-quarter:].mean() - own[:quarter].mean()).item())
    return float(np.mean(found))


def turns_of(p: Played, stop: int) -> list[tuple[int, bool]]:
    """Tokens of each turn of a rollout, and whether a tool answers it: after the last turn of a context none does."""
    found = []
    for segment in p.chain.segments:
        own = [piece.stop - piece.start for piece, mine in parted(segment, stop) if mine]
        found += [(tokens, n < len(own) - 1) for n, tokens in enumerate(own)]
    return found


def calibrated(c: Async, folder: Path) -> dict:
    """What one needs to predict: seconds of an engine's step as a + b · rows, of an optimiser step on one core and on all, and of publishing,
    fetching and loading weights. All cores do the same meanwhile."""
    small, n = Small(replace(c, tool_s=0.0)), cores()
    sampler, scene = small.sampler(), small.scene()

    def share(part: int) -> tuple[list[tuple[int, float]], dict[int, list[Played]]]:
        groups = [g for g in range(c.rl.prompts) if g * n // c.rl.prompts == part]
        player, steps = Player(sampler, scene, max(1, len(groups)) * c.rl.rollouts, c.rl.rollouts, c.seed, c.rl.temperature), []
        player.give(groups)
        return steps, waited(player, steps)

    shares = on_cores(share, range(n))
    timed = np.array([step for steps, _ in shares for step in steps])
    b, a = np.polyfit(timed[:, 0], timed[:, 1], 1)
    played = dict(itertools.chain(*(found.items() for _, found in shares)))
    batch = [one for group in sorted(played) for one in played[group]]

    def trained(_: int) -> float:
        learner = small.learner()
        learner.step(batch)
        began = time.monotonic()
        learner.step(batch)
        return time.monotonic() - began

    both = Trained(c, functools.partial(on_cores, each=2))
    both.step(batch)
    began = time.monotonic()
    both.step(batch)
    all_cores = time.monotonic() - began
    writer, reader = Writer(Folder(folder)), Reader(Folder(folder), parts(small.learner().model))
    writer.publish(0, parts(small.learner().model))
    reader.fetch()
    reader.swap()
    began = time.monotonic()
    writer.publish(1, parts(both.model))
    reader.fetch()
    published = time.monotonic() - began
    began = time.monotonic()
    reader.swap()
    sampler.load(both.masters.model, 1)
    swapped = time.monotonic() - began
    shutil.rmtree(folder)
    stop, groups = scene.language.env, sorted(played)
    return {
        "token_a": float(max(a, 1e-6)),
        "token_b": float(max(b, 0.0)),
        "train_s": on_cores(trained, [0])[0],
        "train_all_s": all_cores,
        "publish_s": published,
        "swap_s": swapped,
        "turns": [[turns_of(p, stop) for p in played[group]] for group in groups],
    }


def predicted(c: Async, arm: str, known: dict) -> float:
    """Seconds of a cell on the virtual clock."""
    scene = Small(c).scene()

    def turns(group: int, rollout: int) -> list[tuple[int, float]]:
        found, turn = [], 0
        for tokens, answered in known["turns"][group % len(known["turns"])][rollout]:
            found.append((tokens, scene.latency("rl", group, rollout, turn) if answered else 0.0))
            turn += answered
        return found

    sync, n = arm == "synchronous", cores()
    load = Load(
        turns,
        rollouts=c.rl.rollouts,
        slots=c.slots * c.workers,
        workers=c.workers,
        token_s=lambda rows: known["token_a"] + known["token_b"] * rows,
        train_s=known["train_all_s" if sync else "train_s"],
        publish_s=0.0 if sync else known["publish_s"],
        swap_s=known["swap_s"],
        shared=1.0 if sync else n / (n + 1),
    )
    return simulate("synchronous" if sync else "in-flight", Rules(c.rl.prompts, c.staleness, c.rl.steps), load).seconds


def experiment(run: Run, config: Experiment) -> dict:
    """All cells, seed by seed, and the verdicts."""
    c, (root, _) = config, agent(run, config.run, config.seed)
    checkpoint, rows = str(root / "checkpoints" / "sft"), []
    for number, tool_s, arm in itertools.product(range(c.seeds), c.tools, ARMS):
        rows.append(cell(run, c, checkpoint, number, tool_s, arm))
    return {"rows": rows, "claims": verdicts(c, rows)}


def cell(run: Run, c: Experiment, checkpoint: str, number: int, tool_s: float, arm: str) -> dict:
    """One training run: its seconds, what the virtual clock predicts, success afterwards where it is compared."""
    settings = c.settings(checkpoint, tool_s, arm, number)
    name = f"{arm}-{tool_s:g}-{number}"
    stage = run.stage(name, settings.rl.steps, "steps")
    if stage.finished:
        return stage.result()
    folder = run.path("services", name)
    shutil.rmtree(folder, ignore_errors=True)  # what a killed process began would be timed with its pause

    def show(step: int, figures: dict[str, float]) -> None:
        stage.progress(step, success=figures["success"], **({"age": figures["age"]} if "age" in figures else {}))

    known = calibrated(settings, run.path("calibration"))
    found: dict = {"arm": arm, "tool_s": tool_s, "seed": number, "steps": settings.rl.steps, "predicted_s": predicted(settings, arm, known)}
    if arm == "synchronous":
        found["seconds"], learner, _ = synchronous(settings, show)
    else:
        found["seconds"], learner = asynchronous(settings, folder, show)
        figures = async_timeline.summary(folder, settings.rl.steps)
        found |= {key: figures[key] for key in ("age", "oldest", "dropped_groups", "trainer_busy")} | {"fresher": freshness(folder)}
    if tool_s == c.at:
        heldout = run.stage(f"{name}-heldout", c.heldout, "tasks")
        success = measured(heldout, settings, Small(settings).scene(), learner.masters.model.float())["success"]
        found["success"] = float(np.mean(success))
    shutil.rmtree(folder, ignore_errors=True)
    return stage.finish(found | {key: known[key] for key in ("token_a", "token_b", "train_s", "train_all_s", "publish_s", "swap_s")})


def verdicts(c: Experiment, rows: list[dict]) -> list[dict]:
    """Rules: services are faster where tools take their time if the interval of the ratio is above one, and as fast as in the field at two; where
    tools take none they may lose a seventh. The success is the same if the interval of the difference is above −0.05, in at most 0.65 of the time.
    Later tokens are fresher if the interval is above zero. The virtual clock is right within 15% in every cell, over the seeds."""

    def of(arm: str, tool_s: float, key: str = "seconds") -> np.ndarray:
        return np.array([row[key] for row in rows if (row["arm"], row["tool_s"]) == (arm, tool_s)])

    def interval(values: np.ndarray) -> tuple[float, tuple[float, float]]:
        found = student(values)
        return found["value"], (found["low"], found["high"])

    def ratios(arm: str, tool_s: float) -> np.ndarray:
        return of("synchronous", tool_s) / of(arm, tool_s)

    def table(arm: str) -> str:
        return ", ".join(f"{1000 * tool_s:g} ms {ratios(arm, tool_s).mean():.2f}" for tool_s in c.tools)

    each = f"{c.seeds} training runs a cell"
    faster, fast = interval(ratios("more", c.at))
    plain, plainly = interval(ratios("equal", c.tools[0]))
    gap, gaps = interval(of("more", c.at, "success") - of("synchronous", c.at, "success"))
    share = float((1 / ratios("more", c.at)).mean())
    fresh, fresher = interval(np.array([np.mean([row["fresher"] for row in rows if row["seed"] == n and "fresher" in row]) for n in range(c.seeds)]))
    off = {(arm, t): float(of(arm, t, "predicted_s").mean() / of(arm, t).mean() - 1) for arm in ARMS for t in c.tools}
    worst = max(off, key=lambda key: abs(off[key]))
    return [
        claim(
            "faster",
            f"asynchronous services take the same steps faster where a tool takes {1000 * c.at:g} ms",
            "§4.1; arXiv:2509.19128",
            faster,
            above(1.0, 2.0),
            fast,
            "times as fast",
            f"twice a step's conversations at a time; {each}; {table('more')}; at equal concurrency {table('equal')}",
        ),
        claim(
            "no-tools",
            "where tools take no time, services lose little on the same cores",
            "etude/async_figure.py",
            plain,
            above(0.85),
            plainly,
            "times as fast",
            f"as many conversations at a time as a step has; {each}",
        ),
        claim(
            "same-success",
            "the same steps end in the same success, sooner",
            "§4.1; arXiv:2509.19128",
            gap,
            above(-0.05),
            gaps,
            "of held-out tasks",
            f"{c.long} steps at {1000 * c.at:g} ms, in {share:.2f} of the time; {each}",
            {"in at most 0.65 of the time": share <= 0.65},
        ),
        claim(
            "fresher",
            "updates in flight make a rollout's later tokens fresher",
            "§4.1; arXiv:2509.19128",
            fresh,
            above(0.0),
            fresher,
            "updates",
            "last quarter of a rollout's own tokens against the first, over all cells with services",
        ),
        claim(
            "clock",
            "the virtual clock predicts the time of each cell",
            "ref/async_rl.py",
            abs(off[worst]),
            at_most(0.15),
            unit="of the time",
            note=f"the worst of {len(off)} cells: {worst[0]} at {1000 * worst[1]:g} ms, {off[worst]:+.0%}; "
            + ", ".join(f"{arm} {1000 * t:g} ms {value:+.0%}" for (arm, t), value in off.items()),
        ),
    ]


def picture(found: dict, path: Path) -> None:
    """Left: steps a minute by the time of a tool, with what the virtual clock says. Middle: times as fast as the synchronous loop. Right: success
    against the time that the same steps took."""
    from sims.drawing import COLOURS, GREY, save, sheet

    rows = found["rows"]
    figure, (left, middle, right) = sheet(3, "Asynchronous RL: the same steps, with services that do not wait", width=5.0)
    tools = sorted({row["tool_s"] for row in rows})
    names = {"synchronous": "synchronous loop", "equal": "services, as many slots", "more": "services, twice the slots"}
    spots = np.arange(len(tools))
    for arm, colour in zip(ARMS, COLOURS, strict=False):
        some = [[row for row in rows if (row["arm"], row["tool_s"]) == (arm, t)] for t in tools]
        speed = [[60 * row["steps"] / row["seconds"] for row in cell] for cell in some]
        left.plot(spots, [np.mean(cell) for cell in speed], "o-", color=colour, label=names[arm])
        left.plot(spots, [np.mean([60 * row["steps"] / row["predicted_s"] for row in cell]) for cell in some], "x", color=colour)
        if arm != "synchronous":
            base = [[row["seconds"] for row in rows if (row["arm"], row["tool_s"]) == ("synchronous", t)] for t in tools]
            ratio = [np.array(b) / [row["seconds"] for row in cell] for b, cell in zip(base, some, strict=True)]
            middle.plot(spots, [x.mean() for x in ratio], "o-", color=colour, label=names[arm])
            for spot, x in zip(spots, ratio, strict=True):
                middle.plot([spot] * len(x), x, ".", color=colour, alpha=0.5)
        right.plot(*zip(*[(row["seconds"], row["success"]) for cell in some for row in cell if "success" in row], strict=True), "o", color=colour)
    left.plot([], [], "x", color=GREY, label="virtual clock")
    middle.axhline(1, color=GREY, linewidth=1)
    for one in (left, middle):
        one.set_xticks(spots, [f"{1000 * t:g}" for t in tools])
        one.set_xlabel("mean time of a tool, ms")
    left.set(ylabel="steps a minute", title="Throughput")
    middle.set(title="Times as fast as the synchronous loop")
    right.set(xlabel="seconds", title="Success after the same steps")
    left.legend(fontsize=8)
    left.set_ylim(bottom=0)
    right.set_xlim(left=0)
    save(figure, path)
