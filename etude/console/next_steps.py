"""The next commands after a command has finished: two or three, one line each."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from etude import catalog

__all__ = ["of_agent", "of_eval", "of_examples", "of_figure", "of_full", "of_tasks", "of_technique", "show"]

Step = tuple[str, str]
"""A command, and what it does."""


def show(steps: Sequence[Step]) -> None:
    """Prints one command per line, each with a remark as a shell comment, so that a line can be pasted."""
    width = max((len(command) for command, _ in steps), default=0)
    for number, (command, remark) in enumerate(steps):
        print(f"{'' if number else 'next:':7} {command:{width}}   # {remark}", flush=True)


def of_agent(root: Path) -> list[Step]:
    """After a run of the recipe."""
    run_path, checkpoints = shlex.quote(str(root)), root / "checkpoints"
    if not (checkpoints / "final").is_dir():
        return []
    episodes = sorted((root / "episodes" / "after").glob("*.jsonl"))
    if episodes:
        return [
            (f"etude show {shlex.quote(str(episodes[0]))}", "read an episode on a held-out task after RL"),
            (f"etude play {run_path} --task {episodes[0].stem} --before sft", "play a task, before RL and after it"),
        ]
    before_option = " --before sft" if (checkpoints / "sft").is_dir() else ""
    comparison = ", before RL and after it" if before_option else ""
    return [
        (f"etude play {run_path}{before_option}", f"watch the agent solve a task{comparison}"),
        (f"etude eval {run_path}{before_option}", "success on held-out tasks, with intervals"),
        ("etude explore", "in a browser: the agent token by token, and every technique"),
    ]


def of_technique(entry: catalog.Technique) -> list[Step]:
    """After a technique's demonstration."""
    figures = [experiment for experiment in catalog.EXPERIMENTS if experiment.sim == entry.sim]
    steps = [
        (f"etude figure {experiment.name}", f"measure what the source claims ({experiment.source})")
        for experiment in figures[:1]
    ]
    if entry.lesson is not None:
        steps.append((f"etude lesson {int(Path(entry.lesson).name.partition('_')[0])}", "its lesson, in Jupyter"))
    if entry.page is not None:
        steps.append(("etude explore", f"its interactive page, {entry.page}"))
    return steps


def of_figure(entry: catalog.Experiment, quick: bool) -> list[Step]:
    """After an experiment."""
    techniques = [
        technique for technique in catalog.TECHNIQUES if technique.sim == entry.sim and technique.name != "recipe"
    ]
    steps = [(f"etude figure {entry.name}", "the full experiment, which gives verdicts")] if quick else []
    steps.append((f"etude claims --figure {entry.name}", "the committed measurement and its verdicts"))
    return steps + [
        (f"etude run {technique.name}", f"the technique behind it: {technique.ref or technique.sim}")
        for technique in techniques[:1]
    ]


def of_full(root: Path, agent: bool) -> list[Step]:
    """After a technique's full run: `agent` where it trains one, else a base model."""
    final = root / "checkpoints" / "final"
    checkpoint_path = shlex.quote(str(final))
    if not final.is_dir():
        return []
    if agent:
        return [
            (f"etude play {checkpoint_path}", "watch the agent solve a task"),
            (f"etude eval {checkpoint_path}", "success on held-out tasks"),
        ]
    return [(f"etude eval base {checkpoint_path}", "knowledge, state tracking and codebase NLL of the model")]


def of_eval(run_or_checkpoint: Path | None, before: str | None) -> list[Step]:
    """After an agent was evaluated."""
    words = [] if run_or_checkpoint is None else [shlex.quote(str(run_or_checkpoint))]
    steps = [(" ".join(["etude play", *words]), "watch it solve a task")]
    if before is None and run_or_checkpoint is not None and (run_or_checkpoint / "checkpoints" / "sft").is_dir():
        steps.append(
            (" ".join(["etude eval", *words, "--before sft"]), "compare with the agent before RL, on the same tasks")
        )
    return steps


def of_examples(root: Path, out: Path) -> list[Step]:
    """After a run's agent was recorded for the explorer, which looks for it in the run's folder."""
    shows = (
        [("etude explore", "the pages of drafts, routing, summaries and hints show this run")]
        if out.parent == root
        else []
    )
    return [*shows, (f"etude play {shlex.quote(str(root))}", "watch its agent solve a task")]


def of_tasks(out: Path, checked: bool) -> list[Step]:
    """After tasks were made, or checked."""
    folder_path = shlex.quote(str(out))
    recipes_option = "" if folder_path == "tasks" else f" --recipes {folder_path}"
    steps = [] if checked else [(f"etude tasks check {folder_path}", "make the tasks again, and grade each")]
    return [
        *steps,
        (f"etude tasks levels {folder_path}", "sort them by difficulty"),
        (f"etude tasks try TASK --model oracle{recipes_option}", "solve a task in a sandbox with the original code"),
    ]
