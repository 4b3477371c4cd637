"""What RL gained over several seeds, compared with a control whose rewards carry no information.

    etude run recipe --config examples/search.toml --out runs/seed0 --seed 0          and 1, and 2
    etude run recipe --config examples/search.toml --out runs/shuffled0 --seed 0 --set rl.shuffle_rewards=true
    etude results runs/seed0 runs/seed1 runs/seed2 --control runs/shuffled0

Evaluation tasks differ from seed to seed, and so do corpus order, weights, demonstrations and RL tasks: each seed
repeats the complete recipe.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kit.disk import describe_mismatch, read_json, read_lines, timings
from kit.groups import bootstrap_groups
from kit.plots import COLOURS, GREY, save
from kit.process import machine
from kit.settings import RunError

__all__ = ["gather", "picture", "table"]

FIGURES = (
    ("success", "success, sampled"),
    ("greedy", "success, greedy"),
    ("best", "best of {samples}"),
    ("tokens", "tokens per rollout"),
    ("turns", "turns"),
    ("invalid_calls", "invalid calls"),
    ("segments", "contexts per rollout"),
)

INTERVAL = dict.fromkeys(("value", "low", "high"), (int, float))
CONFIG = {"config": {"seed": int, "rl": {"shuffle_rewards": bool}}}
MEASURES = {name: INTERVAL for name, _ in FIGURES if name != "best"}
OUTCOME = {"kind": str, "depth": int, **dict.fromkeys(("before", "after"), {"solved": int, "greedy": int})}
EVALUATION = {
    "result": {
        **dict.fromkeys(("before", "after", "difference"), MEASURES),
        "tasks": int,
        "samples": int,
        "outcomes": [OUTCOME],
        "codebase": object,
    }
}
"""Shapes of what is read of a run."""
SOLVED = {
    "success": lambda outcome, samples: outcome["solved"] / samples,
    "greedy": lambda outcome, samples: outcome["greedy"],
    "best": lambda outcome, samples: outcome["solved"] > 0,
}
"""Measures that are 0 to 1 for each task, from its outcome and the number of samples."""


def read(root: Path, shuffled: bool) -> dict:
    """The evaluation of a finished run. Raises RunError if the folder is not a finished run, or wrongly is (or is not)
    a control."""
    try:
        record = read_json(root / "config.json", CONFIG)
        config = record["config"]
        evaluation = read_json(root / "stages" / "eval.json", EVALUATION)["result"]
        decode = read_json(root / "stages" / "decode.json", {"result": dict})["result"]
    except (OSError, ValueError) as error:
        raise RunError(
            f"{root} is not a finished run of the recipe ({error}); pass folders of finished runs of `etude run recipe`"
        ) from None
    samples = evaluation["samples"]
    for part in ("before", "after", "difference"):
        best = evaluation[part].get(f"best_of_{samples}")
        if mismatch := describe_mismatch(best, INTERVAL):
            raise RunError(f"{root}: {part}: best_of_{samples} of its evaluation is damaged: {mismatch}")
        evaluation[part]["best"] = best
    if config["rl"]["shuffle_rewards"] != shuffled:
        kind = (
            "a control (rl.shuffle_rewards=true): pass it with --control"
            if not shuffled
            else "not a control: its rewards are not shuffled"
        )
        raise RunError(f"{root} is {kind}")
    finished = {line["stage"]: line for line in timings(root) if line.get("finished")}.values()
    curve = [
        line["success"]
        for line in read_lines(root / "metrics" / "rl.jsonl")
        if type(line.get("success")) in (int, float)
    ]
    return {
        "seed": config["seed"],
        "success_by_step": [round(x, 4) for x in curve],
        "before": evaluation["before"],
        "after": evaluation["after"],
        "difference": evaluation["difference"],
        "tasks": evaluation["tasks"],
        "samples": samples,
        "outcomes": evaluation["outcomes"],
        "codebase": evaluation["codebase"],
        "decode": decode,
        "seconds": round(sum(line["seconds"] for line in finished), 1),
        "stages": {line["stage"]: round(line["seconds"], 1) for line in finished},
        "config": config,
        "commit": (record.get("machine") or {}).get("commit"),
        "peak_memory_gib": max(
            (line["peak_memory_gib"] for line in finished if "peak_memory_gib" in line), default=None
        ),
    }


def gather(runs: Sequence[Path], controls: Sequence[Path]) -> dict:
    """All runs and controls with their intervals, and mean ± standard deviation of every difference over the seeds;
    for success and best of n also an interval over seeds and tasks. Raises RunError if they differ in more settings
    than the seed and `rl.shuffle_rewards`."""
    main, control = [read(Path(r), False) for r in runs], [read(Path(r), True) for r in controls]
    if len({run["samples"] for run in [*main, *control]}) > 1:
        raise RunError("the runs have different numbers of samples (evaluation.samples): their best of n differ")
    first = (main or control)[0]
    settings, seconds = first["config"], first["stages"]
    for root, run in zip([*runs, *controls], [*main, *control], strict=True):
        shared = {
            "seed": settings["seed"],
            "rl": {**run["config"]["rl"], "shuffle_rewards": settings["rl"]["shuffle_rewards"]},
        }
        if run["config"] | shared != settings:
            raise RunError(f"{root} has other settings than the first run; compare runs that differ in the seed only")
    for run in [*main, *control]:
        del run["config"], run["stages"]
    return {
        "command": "etude run recipe --scale small --seed SEED, with the settings in config",
        "control_command": "… --set rl.shuffle_rewards=true",
        "machine": machine(),
        "samples": first["samples"],
        "config": settings,
        "seconds": seconds,
        "runs": main,
        "control": control,
        "over_seeds": {
            name: {
                part: {"mean": float(np.mean(values)), "sd": float(np.std(values, ddof=1)) if len(values) > 1 else None}
                for part in ("before", "after", "difference")
                for values in [[run[part][name]["value"] for run in main]]
            }
            | ({"interval": over_seeds_and_tasks(main, name)} if name in SOLVED else {})
            for name, _ in FIGURES
        },
    }


def over_seeds_and_tasks(runs: Sequence[dict], name: str) -> dict[str, float]:
    """The mean difference with its interval: seeds are resampled, and within each of them its tasks. Of few seeds it is
    too narrow, which the seeds' own values show."""
    differences = [
        [SOLVED[name](task["after"], run["samples"]) - SOLVED[name](task["before"], run["samples"]) for task in tasks]
        for run in runs
        for tasks in [run["outcomes"]]
    ]
    return bootstrap_groups(differences)


def table(results: dict) -> str:
    """Markdown: before → after with 95% intervals (bootstrap over tasks), one column per run, controls last."""
    columns = [(f"seed {run['seed']}", run) for run in results["runs"]]
    columns += [(f"control, seed {run['seed']}", run) for run in results["control"]]
    lines = ["| held-out tasks | " + " | ".join(name for name, _ in columns) + " |", "|---" * (len(columns) + 1) + "|"]

    def format_cell(run: dict, name: str) -> str:
        digits = 1 if name == "tokens" else 2
        parts = [run[moment][name] for moment in ("before", "after")]
        words = " → ".join(f"{p['value']:.{digits}f} [{p['low']:.{digits}f}, {p['high']:.{digits}f}]" for p in parts)
        d = run["difference"][name]
        return f"{words}; {d['value']:+.{digits + 1}f} [{d['low']:+.{digits + 1}f}, {d['high']:+.{digits + 1}f}]"

    lines += [
        f"| {title.format(**results)} | " + " | ".join(format_cell(run, name) for _, run in columns) + " |"
        for name, title in FIGURES
    ]
    return "\n".join(lines)


def picture(results: dict, path: Path) -> None:
    """Success during RL, and before and after it on held-out tasks, as PNG or SVG (by the suffix of `path`)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    curves = [(run, f"seed {run['seed']}", colour) for run, colour in zip(results["runs"], COLOURS, strict=False)]
    curves += [(run, f"control, seed {run['seed']}", GREY) for run in results["control"]]
    for run, label, colour in curves:
        curve = np.array(run["success_by_step"])
        left.plot(np.arange(1, len(curve) + 1), curve, color=colour, alpha=0.2, linewidth=0.8)
        width = min(WINDOW, len(curve))
        mean = np.convolve(curve, np.ones(width) / width, mode="valid")
        left.plot(np.arange(width, len(curve) + 1), mean, color=colour, linewidth=1.8, label=label)
    left.set(xlabel="RL step", ylabel="success of training rollouts", ylim=(0, 1))
    left.set_title(f"While training (mean of {WINDOW} steps)", loc="left", fontsize=11)
    left.legend(frameon=False, fontsize=9)
    for number, (run, _, colour) in enumerate(curves):
        for index, (name, _) in enumerate(FIGURES[:3]):
            x = index + (number - (len(curves) - 1) / 2) * 0.18
            for moment, marker, face, shift in (("before", "o", "white", -0.03), ("after", "o", colour, 0.03)):
                v = run[moment][name]
                bar = [[max(0.0, v["value"] - v["low"])], [max(0.0, v["high"] - v["value"])]]
                right.errorbar(x + shift, v["value"], bar, fmt=marker, color=colour, markerfacecolor=face, markersize=5)
    right.set_xticks(range(3), [title.format(**results) for _, title in FIGURES[:3]])
    right.set(ylim=(0, 1), xlim=(-0.5, 2.5))
    right.set_title("Held-out tasks: before (open) and after RL, 95% intervals", loc="left", fontsize=11)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#E5E8EB", linewidth=0.8)
        axes.set_axisbelow(True)
    save(figure, path)


WINDOW = 10
"""Number of RL steps that the thick lines average over."""
