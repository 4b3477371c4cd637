"""Rollouts in a run's report, in the rendering of the explorer's first page: a success and a failure of the agent after
RL, each beside the same task before RL.

They are the first of their kind among the evaluation's greedy rollouts, so nobody chose them. The agents play them
again, now, because a run stores no probabilities. Where the checkpoints are gone, a report has the transcripts that the
evaluation stored, without probabilities."""

from __future__ import annotations

import html
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etude.play import html as rendering
from etude.play import tokens
from etude.play.example_agent import BEFORE
from etude.play.play import Agent, agent_in, find_checkpoints
from etude.play.tokens import Watched
from etude.report.episodes import render_episodes
from etude.report.record import as_triple, evaluation_of
from kit.settings import RunError
from recipe.microrepo import Task
from recipe.small.data import task_stream
from ref.network import CheckpointError

__all__ = ["pairs", "render_rollouts", "stored"]

MAX_TASKS = 60
"""Tasks among which a success and a failure are looked for."""
STYLE = """<style>
.sides{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,380px),1fr));gap:8px 20px;margin:8px 0 20px}
.sides h3{font-size:1rem;margin:.4em 0}
</style>"""


def render_rollouts(root: Path, record: dict[str, Any]) -> list[str]:
    """Blocks of HTML for the run folder `root`; those of stored transcripts if it holds no checkpoints that play."""
    if episodes := render_episodes(root):
        return [rendering.STYLE + STYLE, *episodes]
    result = evaluation_of(record)
    try:
        task_pairs = [*pairs(root, result)] if record.get("technique") == "recipe" and result else []
    except (RunError, CheckpointError, OSError):
        task_pairs = []
    task_pairs.sort(key=lambda pair: not pair[-1].view.success)
    blocks = [render_pair(root, *pair) for pair in task_pairs] or stored(result)
    return [rendering.STYLE + STYLE + rendering.legend(), *blocks] if blocks else []


def pairs(root: Path, result: dict[str, Any]) -> Iterator[tuple[int, Watched, Watched]]:
    """The first task that the agent after RL solves greedily, and the first that it does not: number, rollout before
    RL, and after. Nothing is looked for that the evaluation did not find. Raises RunError or CheckpointError where
    there are no such agents."""
    before, after = map(agent_in, find_checkpoints(root, BEFORE))
    share = as_triple((result.get("after") or {}).get("greedy"))
    should_find = {True: share is None or share[0] > 0, False: share is None or share[0] < 1}
    for number, task in enumerate(
        itertools.islice(task_stream(after.recipe, "evaluation"), min(MAX_TASKS, int(result.get("tasks") or 0)))
    ):
        if not any(should_find.values()):
            return
        stored_success = read_stored_success(result, number)
        if stored_success is not None and not should_find[stored_success]:
            continue
        rollout = sample_greedily(after, task)
        if should_find[rollout.view.success]:
            should_find[rollout.view.success] = False
            yield number, sample_greedily(before, task), rollout


def read_stored_success(result: dict[str, Any], number: int) -> bool | None:
    """Whether the evaluation's greedy rollout of a task succeeded; None where it did not store that."""
    examples = result.get("examples") or []
    return bool(examples[number].get("success")) if number < len(examples) else None


def sample_greedily(agent: Agent, task: Task) -> Watched:
    """The likeliest rollout of a task."""
    return tokens.watched(agent, task, 0.0, 0)


def render_pair(root: Path, number: int, before: Watched, after: Watched) -> str:
    """A task, before and after RL."""
    verdict = "solves" if after.view.success else "does not solve"
    command = f"etude play {shlex.quote(str(root))} --task {number} --greedy --before {BEFORE}"
    words = f"Held-out task {number} is the first that the agent after RL {verdict} with greedy decoding."
    replay_hint = f"<code>{html.escape(command)}</code> plays it again."
    sides = zip(("before RL", "after RL"), (before, after))
    columns = "".join(
        f"<div><h3>{name}</h3>{rendering.render_rollout(rollout, len(rollout.turns))}</div>" for name, rollout in sides
    )
    return f'<p>{words} {replay_hint}</p><div class="sides">{columns}</div>'


def stored(result: dict[str, Any]) -> list[str]:
    """The first success and the first failure among the transcripts of an evaluation."""
    examples = [example for example in result.get("examples") or [] if isinstance(example, dict)]
    firsts = [
        next((example for example in examples if bool(example.get("success")) == is_success), None)
        for is_success in (True, False)
    ]
    return [render_transcript(example) for example in firsts if example is not None]


def render_transcript(example: dict[str, Any]) -> str:
    """A transcript, with an edge in the colour of who speaks."""
    text = example.get("transcript", "")
    text = text if isinstance(text, str) else "\n".join(map(str, text))
    marks = {"<|env|>": "environment", "<|agent|>": "agent"}
    first, *parts = re.split(r"(<\|env\|>|<\|agent\|>)", text)
    messages = [
        ("environment", first),
        *((marks[mark], words) for mark, words in zip(parts[::2], parts[1::2], strict=True)),
    ]
    boxes = "".join(
        rendering.box(rendering.plain(words), rendering.EDGES[role], role) for role, words in messages if words
    )
    label = "solved" if example.get("success") else "not solved"
    return f"<p><b>{label}</b>: {html.escape(str(example.get('prompt', '')).strip())}</p>{boxes}"
