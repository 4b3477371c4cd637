"""What each kind of run leaves, read into one shape: the recipe's at both scales, a technique's, asynchronous RL, an
experiment's, and its record.

What a kind of run does not record is absent here, and the page says so. `files.py` finds files and remembers what
was read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from etude.explorer.provenance import facts, known_facts
from etude.explorer.runs.lines import accumulate_tokens, how_far, json_object, metrics_in, services_in, speed_in
from etude.ledger import figures
from etude.report.record import as_triple, before_after, best_of, collect, evaluation_of, in_words, stages_of
from kit.disk import timings
from kit.runs import flatten
from kit.settings import RunError
from kit.statistics import bootstrap, share

__all__ = ["RunData", "read"]

RECIPES = ("recipe", "recipe full")
DRIFT_KEYS = ("drift", "engine_kl", "kl")
"""What RL logs of its distance from the policy before it, and of its sampler from the trainer, as zeros where nobody
measures them."""
ARM_KEYS = ("training", "seed")
"""Numbers in an experiment's rows that tell trainings apart."""
Success = tuple[str, tuple[float, float, float], tuple[float, float, float]]
"""Measure, and (value, low, high) before and after training."""


@dataclass(frozen=True, eq=False)
class RunData:
    """What the page shows of a run; its files have been checked by now. Equal only to itself, so pictures can be cached
    by it: a run that has written since then is a new object."""

    name: str
    place: Path
    """Its folder, or the file of a committed record."""
    technique: str
    """As in its config.json, such as "recipe full"."""
    facts: list[str]
    """Seed and machine, in words."""
    settings: dict[str, Any]
    """Its settings by dotted key."""
    stages: dict[str, str]
    """Progress of each stage, in words."""
    metrics: dict[str, list[dict]]
    """Lines of metrics by stage. What training with RL logged is under "rl", whatever its run calls it."""
    missing: list[str]
    """Unfinished stages."""
    touched: float
    """When the run last wrote, in seconds since 1970."""
    changes: list[tuple[str, ...]] = field(default_factory=list)
    """Measure, before RL, after RL, difference."""
    successes: list[Success] = field(default_factory=list)
    """Measures of success."""
    claims: list[dict] = field(default_factory=list)
    """Verdicts of an experiment."""
    picture: Path | None = None
    """An experiment's picture."""
    result: dict[str, Any] = field(default_factory=dict)
    """What a technique's run reported in the end."""
    examples: list[dict] = field(default_factory=list)
    """Rollouts that the recipe's evaluation keeps: prompt, transcript, success."""
    machine: dict[str, Any] = field(default_factory=dict)
    """The machine that it ran on, and the commit."""

    @property
    def recipe(self) -> bool:
        return self.technique in RECIPES


def read(name: str, place: Path, touched: float) -> RunData:
    """The run in a folder, or a committed record. `touched`: when it last wrote, in seconds since 1970. Raises RunError
    for files that are missing or cannot be read, and OSError, AttributeError, LookupError, TypeError or ValueError for
    what is not in the format of a run."""
    if place.suffix == ".json":
        return _read_record(name, place, touched)
    config = json_object(place / "config.json")
    if not {"technique", "config", "machine"} <= config.keys():
        raise RunError(f"{place / 'config.json'} is not the configuration of a run")
    if not timings(place) and (place / "timings.jsonl").exists() and (place / "timings.jsonl").stat().st_size:
        raise RunError(f"{place / 'timings.jsonl'} holds no stage times")
    technique = config["technique"]
    read_kind = (
        _read_recipe
        if technique in RECIPES
        else _read_experiment
        if technique.startswith("figure ")
        else _read_technique
    )
    run = read_kind(name, place, config, touched)
    return replace(run, machine=config["machine"], metrics=run.metrics | speed_in(place, run.recipe))


def _read_recipe(name: str, folder: Path, config: dict, touched: float) -> RunData:
    """A run of the recipe, at either scale."""
    if (folder / "stages").is_dir():
        for path in sorted((folder / "stages").glob("*.json")):
            json_object(path)
            if not (folder / "metrics" / f"{path.stem}.jsonl").is_file():
                raise RunError(f"{folder / 'metrics' / path.stem}.jsonl is missing, although its stage is finished")
        record = collect(folder)
    else:
        record = json_object(folder / "report.json")  # a trimmed copy
    evaluation = evaluation_of(record)
    before, after = (evaluation.get(part) or {} for part in ("before", "after"))
    names = (("success", "sampled"), ("greedy", "greedy"), best_of(evaluation))
    pairs = [(words, as_triple(before.get(key)), as_triple(after.get(key))) for key, words in names]
    stages, changes = _list_planned_stages(config), [(row[0], *row[-3:]) for row in before_after(record)]
    return RunData(
        name,
        folder,
        config["technique"],
        facts(config),
        flatten(config["config"]),
        how_far(folder, record["stages"], record["seconds"], stages),
        metrics_in(folder),
        [stage for stage in stages if stage not in record["stages"]],
        touched,
        changes,
        [(words, first, last) for words, first, last in pairs if first and last],
        examples=evaluation.get("examples") or [],
    )


def _list_planned_stages(config: dict) -> list[str]:
    """The stages of a run of the recipe. One of Figure 2 at full scale measures in place of the evaluation, and drafts
    nothing."""
    settings = config["config"]
    replacements = {"eval": "measure"} if "study" in settings else {}
    return [replacements.get(stage, stage) for stage in stages_of(config)]


def _read_technique(name: str, folder: Path, config: dict, touched: float) -> RunData:
    """A technique's run at either scale: whatever stages it has, and the report that stands beside its settings in the
    end."""
    technique, settings = config["technique"], config["config"]
    record, metrics, is_over = collect(folder), metrics_in(folder), _has_ended(folder)
    report = json_object(folder / "report.json") if (folder / "report.json").is_file() else {}
    seconds = record["seconds"] or report.get("seconds") or {}
    stages = list(dict.fromkeys([*seconds, *metrics, *record["stages"]]))
    result = report.get("result") or {}
    successes, changes = _measure_held_out(technique, settings, record, result)
    if technique.endswith(" full"):
        metrics = {
            ("rl" if any("reward" in line for line in lines) else stage): accumulate_tokens(lines)
            for stage, lines in metrics.items()
        }
    if technique == "async-rl":
        metrics = {**{stage: lines for stage, lines in metrics.items() if lines}, "rl": services_in(folder)}
    if "rl" in metrics and not flatten(settings).get("rl.payment.kl"):  # without a price for drift nobody measures it
        metrics = {
            stage: [{key: line[key] for key in line if key not in DRIFT_KEYS} for line in lines]
            for stage, lines in metrics.items()
        }
    done_stages = record["stages"] if record["stages"] or not is_over else dict.fromkeys(stages)
    return RunData(
        name,
        folder,
        technique,
        known_facts(config),
        flatten(settings),
        how_far(folder, done_stages, seconds, stages),
        metrics,
        _list_unfinished(stages, record["stages"], is_over),
        touched,
        successes=successes,
        changes=changes,
        result=result,
    )


def _measure_held_out(
    technique: str, settings: dict, record: dict, result: dict
) -> tuple[list[Success], list[tuple[str, str, str, str]]]:
    """Success on held-out tasks before and after RL, and the same as a row; empty where it was not measured. Trainings
    on ranks play each task once, before and after with the same number of tasks; asynchronous RL keeps each task's
    success."""
    tasks = [record["stages"].get(stage, {}).get("success") for stage in ("before", "after")]
    if technique.endswith(" full") and "heldout_before" in result and "heldout_after" in result:
        estimates = [
            _estimate_share(result[f"heldout_{moment}"], settings["heldout"]) for moment in ("before", "after")
        ]
        gain = f"{estimates[1]['value'] - estimates[0]['value']:+.3f}"
    elif technique == "async-rl" and all(tasks):
        estimates = [bootstrap(successes, seed=settings["seed"]) for successes in tasks]
        gain = in_words(bootstrap(np.subtract(tasks[1], tasks[0]), seed=settings["seed"]), "{:+.3f}")
    else:
        return [], []
    first, last = (as_triple(estimate) for estimate in estimates)
    assert first and last
    return [("sampled", first, last)], [("success, sampled", in_words(estimates[0]), in_words(estimates[1]), gain)]


def _read_experiment(name: str, folder: Path, config: dict, touched: float) -> RunData:
    """An experiment's run, finished or not."""
    record, experiment = collect(folder), config["technique"].partition(" ")[2]
    record_path = folder / f"{experiment}.json"
    result_record = json_object(record_path) if record_path.is_file() else {}
    metrics = metrics_in(folder)
    stages = list(dict.fromkeys([*record["seconds"], *metrics]))
    return RunData(
        name,
        folder,
        config["technique"],
        known_facts(config),
        flatten(config["config"]),
        how_far(folder, record["stages"], record["seconds"], stages),
        {stage: lines for stage, lines in metrics.items() if lines},
        _list_unfinished(stages, record["stages"], bool(result_record)),
        touched,
        claims=figures.claims_of(result_record) if result_record else [],
        picture=folder / f"{experiment}.png" if (folder / f"{experiment}.png").is_file() else None,
    )


def _read_record(name: str, path: Path, touched: float) -> RunData:
    """An experiment's committed record. Its rows that have steps are curves: one for each arm."""
    record = json_object(path)
    curves: dict[str, list[dict]] = {}
    for row in record["rows"]:
        if isinstance(row.get("step"), int):
            arm = [
                str(value) if isinstance(value, str) else f"{key} {value}"
                for key, value in row.items()
                if key in ARM_KEYS or isinstance(value, str)
            ]
            curves.setdefault(" · ".join(arm) or "all", []).append(
                {key: value for key, value in row.items() if key not in ARM_KEYS}
            )
    seconds = record["seconds"]
    picture = path.with_suffix(".png")
    return RunData(
        name,
        path,
        f"figure {record['experiment']}",
        known_facts(record),
        flatten(record["config"]),
        {stage: f"{duration:.0f} s" for stage, duration in seconds.items()}
        | {"together": f"{sum(seconds.values()) / 60:.1f} min"},
        curves,
        [],
        touched,
        claims=figures.claims_of(record),
        picture=picture if picture.is_file() else None,
        machine=record["machine"],
    )


def _estimate_share(value: float, tasks: int) -> dict[str, float]:
    """The share of so many tasks that were solved, each played once, with its interval."""
    solved = round(value * tasks)
    return share([True] * solved + [False] * (tasks - solved))


def _list_unfinished(stages: Sequence[str], done: Mapping[str, Any], is_over: bool) -> list[str]:
    """Of a run that does not tell what is to come: the stages that it has begun, or words for where it is."""
    if is_over:
        return []
    return [stage for stage in stages if stage not in done] or ["its end" if stages else "its beginning"]


def _has_ended(folder: Path) -> bool:
    """Whether a record stands beside the settings: the report, or what an evaluation writes."""
    return any(path.name != "config.json" for path in folder.glob("*.json"))
