"""The last rollouts that a run has left: those that its newest step trained on, or those of its evaluation.

While RL trains, a run of the recipe or on ranks replaces a file of them now and then
(`recipe/small/latest_rollouts.py`); asynchronous RL keeps them all."""

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from etude.explorer.runs.kinds import RunData
from etude.explorer.runs.lines import json_object
from kit.settings import RunError
from recipe.small import latest_rollouts
from recipe.small.agent import Language
from ref.cpt import load_tokenizer
from scaled.async_rl import services

__all__ = ["MAX_ROLLOUTS", "Rollout", "last", "silence"]

MAX_ROLLOUTS = 4
"""Rollouts that are shown."""


@dataclass(frozen=True)
class Rollout:
    """A rollout as text."""

    says: str
    """What became of it, in words."""
    text: str


def last(run: RunData) -> tuple[str, list[Rollout]]:
    """What the last rollouts of a run are, in words, and some of them; none where it keeps none, or they cannot be
    read."""
    if run.technique == "async-rl":
        journal = run.place / "services" / "journal.jsonl"
        try:
            return _read_trained(run.place, str(run.settings["checkpoint"]), journal.stat().st_mtime_ns)
        except (OSError, ValueError, LookupError, RunError):
            return "", []
    if run.examples:
        return "of the evaluation after RL, greedy", [
            Rollout(f"{describe_success(example['success'])}, task: {example['prompt']}", example["transcript"])
            for example in run.examples[:MAX_ROLLOUTS]
        ]
    try:
        return _read_newest(run.place)
    except RunError:
        return "", []


def _read_newest(folder: Path) -> tuple[str, list[Rollout]]:
    """What a training has kept of its newest step; nothing where it keeps nothing yet. Raises RunError for a file in
    another format."""
    paths = sorted((folder / latest_rollouts.FOLDER).glob("[!.]*.json"), key=lambda path: path.stat().st_mtime_ns)
    if not paths:
        return "", []
    content = json_object(paths[-1])
    try:
        rollouts = [
            Rollout(
                f"{describe_success(rollout['success'])}, reward {rollout['reward']:.3f}, contexts: "
                f"{rollout['contexts']}, task: {content['prompt']}",
                rollout["text"],
            )
            for rollout in content["rollouts"]
        ]
        return f"of step {content['step']:g} of RL, {len(rollouts[:MAX_ROLLOUTS])} of one group", rollouts[
            :MAX_ROLLOUTS
        ]
    except (LookupError, TypeError, ValueError) as error:
        raise RunError(
            f"{paths[-1]} does not hold the last rollouts of a training ({type(error).__name__}: {error})"
        ) from None


def describe_success(success: object) -> str:
    """In words."""
    return "solved" if success else "not solved"


@lru_cache(4)
def _read_trained(folder: Path, checkpoint: str, mtime_ns: int) -> tuple[str, list[Rollout]]:
    last_steps = deque(services.trained(folder / "services"), maxlen=1)
    if not last_steps:
        return "", []
    version, rollouts = last_steps[0]
    language = Language(load_tokenizer(Path(checkpoint) / "tokenizer.json"))
    rollout_texts = []
    for rollout in rollouts[:MAX_ROLLOUTS]:
        texts = [language.decode(segment.tokens.tolist()) for segment in rollout.chain.segments]
        outcome = (
            f"{describe_success(rollout.metrics.get('success'))}, reward {rollout.reward:.3f}, contexts: {len(texts)}"
        )
        rollout_texts.append(
            Rollout(f"its environment failed: {rollout.failure}" if rollout.failure else outcome, "\n".join(texts))
        )
    return f"of the step that made version {version + 1}", rollout_texts


def silence(run: RunData) -> str:
    """Why there are no rollouts of a run, in words."""
    if run.technique.startswith("figure "):
        return "An experiment saves measurements and no rollouts."
    try:
        _read_newest(run.place)
    except RunError as error:
        return f"Its last rollouts cannot be read: {error}."
    if run.recipe:
        return "No rollouts yet: those of the newest step are shown while RL trains."
    return "This run saves metrics and no rollouts."
