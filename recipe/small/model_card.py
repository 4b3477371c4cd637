"""The model cards of the recipe's checkpoints: what each one is, what it was trained on, and what was measured when it
was written."""

import sysconfig
from pathlib import Path

from kit.disk import read_json, read_lines
from kit.runs import Run
from recipe.small.settings import Recipe
from ref.network import Config, release

__all__ = ["about"]

OPENING = "repo m0 m1 m5 m9 fix m0"
CHECKPOINTS = {
    "mid-cpt": ("cpt", "A small language model in the middle of continued pretraining, after the short-context phase."),
    "mtp": ("mtp", "The network of `mid-cpt`, with draft layers distilled from it."),
    "cpt": ("long", "A small language model at the end of continued pretraining, after the long-context phase."),
    "sft": ("sft", "A small coding agent, fine-tuned on imperfect demonstrations of repairing tiny programs."),
    "final": ("rl", "A small coding agent, after reinforcement learning ({algorithm}) in a world of tiny programs."),
}
"""Checkpoint → the stage that writes it, and what it is; `algorithm` is that of RL."""
TEXT_METRICS = {
    "codebase_ppl": "perplexity on part of the held-out codebase",
    "codebase_bpb": "bits per byte there",
    "loss": "loss in the last step",
    "mtp_loss": "loss of the draft layers in the last step, nats",
}
ROLLOUT_METRICS = {
    "success": "success, tasks of the last step",
    "reward": "reward there",
    "turns": "turns there",
    "tokens": "tokens of a rollout there",
}
"""Metric → its name on the card."""


def about(run: Run, root: Path, name: str, config: Config, drafts: bool) -> str:
    """The card of the checkpoint `name` of a run with data in the run folder `root`."""
    stage, description = CHECKPOINTS.get(name, (name, f"A small coding agent from the experiment {run.technique}."))
    recipe = run.config if isinstance(run.config, Recipe) else Recipe()
    description = description.format(algorithm=recipe.rl.algorithm)
    agent = name not in ("mid-cpt", "mtp", "cpt")
    facts = {"data": data(root), "stage": stage}
    last = (read_lines(run.root / "metrics" / f"{stage}.jsonl") or [{}])[-1]
    labels = ROLLOUT_METRICS if "reward" in last else TEXT_METRICS
    facts |= {label: f"{last[key]:.4g}" for key, label in labels.items() if isinstance(last.get(key), (int, float))}
    return release.make_model_card(f"etude {name}", description, config, facts, OPENING if agent else None, drafts)


def data(root: Path) -> str:
    """The training data, in words."""
    try:
        corpus = read_json(root / "config.json")["config"]["data"]["corpus"]
        result = read_json(root / "stages" / "data.json")["result"]
        source = (
            f"files of {Path(corpus).name}"
            if corpus
            else f"files of Python {sysconfig.get_python_version()}'s standard library"
        )
        return (
            f"{result['tokens']:,} tokens: {result['files']:,} {source}, without its held-out part "
            f"{result['heldout']['name']}, and "
            f"{result['world_documents']:,} generated modules"
        )
    except (OSError, ValueError, KeyError, TypeError):  # the run of an experiment that took its data from elsewhere
        return "rows of another run"
