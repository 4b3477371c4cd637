"""The last rollouts that a run has left: those that its newest step trained on, or those of its evaluation."""

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from etude.explorer.run_kinds import Played
from kit.settings import RunError
from ref.cpt import load_tokenizer
from scaled.async_rl import services
from sims.recipe.agent import Language

__all__ = ["KEPT", "Rollout", "last", "silence"]

KEPT = 4
"""Rollouts that are shown."""


@dataclass(frozen=True)
class Rollout:
    """A rollout as text."""

    says: str
    """What became of it, in words."""
    text: str


def last(run: Played) -> tuple[str, list[Rollout]]:
    """What the last rollouts of a run are, in words, and some of them; none where it keeps none, or they cannot be read."""
    if run.technique == "async-rl":
        journal = run.place / "services" / "journal.jsonl"
        try:
            return _trained(run.place, str(run.settings["checkpoint"]), journal.stat().st_mtime_ns)
        except (OSError, ValueError, LookupError, RunError):
            return "", []
    if not run.examples:
        return "", []
    return "of the evaluation after RL, greedy", [
        Rollout(f"{'solved' if one['success'] else 'not solved'}, task: {one['prompt']}", one["transcript"]) for one in run.examples[:KEPT]
    ]


@lru_cache(4)
def _trained(folder: Path, checkpoint: str, changed: int) -> tuple[str, list[Rollout]]:
    newest = deque(services.trained(folder / "services"), maxlen=1)
    if not newest:
        return "", []
    version, played = newest[0]
    language = Language(load_tokenizer(Path(checkpoint) / "tokenizer.json"))
    found = []
    for one in played[:KEPT]:
        solved = "solved" if one.figures.get("success") else "not solved"
        texts = [language.decode(segment.tokens.tolist()) for segment in one.chain.segments]
        found.append(Rollout(f"{solved}, reward {one.reward:.3f}, contexts: {len(texts)}", "\n".join(texts)))
    return f"of the step that made version {version + 1}", found


def silence(run: Played) -> str:
    """Why there are no rollouts of a run, in words."""
    if run.technique.startswith("figure "):
        return "An experiment keeps its measurements, no rollouts."
    if run.recipe:
        return "A run of the recipe keeps no rollouts while it trains, only its metrics; its evaluation leaves some."
    return "This run keeps no rollouts, only its metrics."
