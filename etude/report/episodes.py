"""Episodes on packages in a run's report: the first held-out task that the agent solves greedily after RL, and the
first that it does not, each as it was played at the three moments, with calls, answers, diffs, tests and reward."""

from __future__ import annotations

import html
import shlex
from pathlib import Path

from environments.harness import record
from environments.harness.format_line import format_line
from etude.play import html as rendering
from kit.settings import RunError

__all__ = ["render_episodes"]

MOMENTS = {"checkpoint": "checkpoint", "before": "before RL", "after": "after RL"}
SPEAKERS = {"reply": "agent", "summary": "summary", "answer": "environment", "nudge": "environment"}
"""Kind of a line → who speaks; other lines are what came of it."""
LONGEST = 6000
"""Characters of a line that are shown."""


def render_episodes(root: Path) -> list[str]:
    """Blocks of HTML; none where the run has no episodes. A file that is no transcript is left out."""
    by_outcome: dict[bool, str] = {}
    for path in sorted((root / "episodes" / "after").glob("*.jsonl")):
        for line in read_lines_of(path):
            if line["kind"] == "grade":
                by_outcome.setdefault(bool(line["success"]), path.stem)
    return [
        render_task(root, by_outcome[is_solved], is_solved) for is_solved in (True, False) if is_solved in by_outcome
    ]


def read_lines_of(path: Path) -> list[dict]:
    """The lines of a transcript; none where it cannot be read."""
    try:
        return record.read(path)
    except RunError:
        return []


def render_task(root: Path, name: str, is_solved: bool) -> str:
    """A task at all moments, next to each other."""
    verdict = "solves" if is_solved else "does not solve"
    command = f"etude play {shlex.quote(str(root))} --task {name} --greedy --before sft"
    words = (
        f"Held-out task {name} is the first that the agent after RL {verdict} with greedy decoding. "
        f"<code>{html.escape(command)}</code> plays it again."
    )
    columns = []
    for moment, title in MOMENTS.items():
        lines = read_lines_of(root / "episodes" / moment / f"{name}.jsonl")
        if lines:
            columns.append(f"<div><h3>{title}</h3>{''.join(map(render_line, lines))}</div>")
    return f'<p>{words}</p><div class="sides">{"".join(columns)}</div>'


def render_line(line: dict) -> str:
    """A line of a transcript as a box in the colour of who speaks; nothing for one that says nothing."""
    text = "\n".join(format_line(line, 0))
    if not text:
        return ""
    speaker = SPEAKERS.get(line["kind"], "context")
    shown_text = text if len(text) <= LONGEST else f"{text[:LONGEST]}\n(cut off: {len(text)} characters)"
    return rendering.box(rendering.plain(shown_text), rendering.EDGES[speaker], "" if speaker == "context" else speaker)
