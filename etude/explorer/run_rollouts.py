"""The last rollouts that a run has left: those that its newest step trained on, or those of its evaluation.

While RL trains, a run of the recipe or on ranks replaces a file of them now and then (`sims/recipe/latest.py`); asynchronous RL keeps them all.
"""

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from etude.explorer.run_kinds import Played
from etude.explorer.run_lines import json_object
from kit.settings import RunError
from ref.cpt import load_tokenizer
from scaled.async_rl import services
from sims.recipe import latest
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
    if run.examples:
        return "of the evaluation after RL, greedy", [
            Rollout(f"{solved(one['success'])}, task: {one['prompt']}", one["transcript"]) for one in run.examples[:KEPT]
        ]
    try:
        return _newest(run.place)
    except RunError:
        return "", []


def _newest(folder: Path) -> tuple[str, list[Rollout]]:
    """What a training has kept of its newest step; nothing where it keeps nothing yet. Raises RunError for a file in another format."""
    found = sorted((folder / latest.FOLDER).glob("[!.]*.json"), key=lambda path: path.stat().st_mtime_ns)
    if not found:
        return "", []
    kept = json_object(found[-1])
    try:
        told = [
            Rollout(f"{solved(one['success'])}, reward {one['reward']:.3f}, contexts: {one['contexts']}, task: {kept['prompt']}", one["text"])
            for one in kept["rollouts"]
        ]
        return f"of step {kept['step']:g} of RL, {len(told[:KEPT])} of one group", told[:KEPT]
    except (LookupError, TypeError, ValueError) as error:
        raise RunError(f"{found[-1]} does not hold the last rollouts of a training ({type(error).__name__}: {error})") from None


def solved(success: object) -> str:
    """In words."""
    return "solved" if success else "not solved"


@lru_cache(4)
def _trained(folder: Path, checkpoint: str, changed: int) -> tuple[str, list[Rollout]]:
    newest = deque(services.trained(folder / "services"), maxlen=1)
    if not newest:
        return "", []
    version, played = newest[0]
    language = Language(load_tokenizer(Path(checkpoint) / "tokenizer.json"))
    found = []
    for one in played[:KEPT]:
        texts = [language.decode(segment.tokens.tolist()) for segment in one.chain.segments]
        earned = f"{solved(one.metrics.get('success'))}, reward {one.reward:.3f}, contexts: {len(texts)}"
        found.append(Rollout(f"its environment failed: {one.failure}" if one.failure else earned, "\n".join(texts)))
    return f"of the step that made version {version + 1}", found


def silence(run: Played) -> str:
    """Why there are no rollouts of a run, in words."""
    if run.technique.startswith("figure "):
        return "An experiment keeps its measurements, no rollouts."
    try:
        _newest(run.place)
    except RunError as error:
        return f"Its last rollouts cannot be read: {error}."
    if run.recipe:
        return "No rollouts yet: those of the newest step are shown while RL trains."
    return "This run keeps no rollouts, only its metrics."
