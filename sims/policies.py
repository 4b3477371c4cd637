"""Trained agents for experiments: from a finished run of the recipe, or from one that the experiment runs itself."""

from pathlib import Path

import torch

from kit.disk import read_json
from kit.runs import Run
from kit.settings import RunError, fill
from recipe.small import stages as recipe

__all__ = ["SMOKE", "agent", "read_config"]

SMOKE = {
    "data": {"vocab_size": 400, "heldout_share": 0.005},
    "model": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "num_experts": 4,
        "moe_intermediate_size": 32,
    },
    "training": {
        "tokens": 16384,
        "long_tokens": 4096,
        "batch_tokens": 1024,
        "threads": 1,
        "perplexity_every": 8,
        "perplexity_tokens": 1024,
    },
    "mtp": {"tokens": 2048, "layers": {"depth": 2, "intermediate_size": 32}},
    "context": {"trigger": 80, "room": 30, "longest_summary": 40, "max_segments": 2},
    "sft": {"demonstrations": 24, "epochs": 2, "rows": 4},
    "rl": {"steps": 4, "prompts": 4, "rollouts": 2, "max_len": 64, "gate": 0.0},
    "evaluation": {"tasks": 4, "samples": 2, "decode_tasks": 1, "decode_rounds": 1, "resamples": 50},
}
"""Settings with which the recipe ends in seconds and its agent learns nothing: for --quick."""


def agent(run: Run, folder: str, seed: int) -> tuple[Path, recipe.Recipe]:
    """The folder and settings of a finished run of the recipe: `folder`, or, if that is empty, a run at SMOKE's size
    inside `run`. Raises RunError if `folder` is not such a run. Sets torch to the number of threads of that run."""
    if folder:
        config = read_config(Path(folder))
        torch.set_num_threads(config.training.threads)
        return Path(folder), config
    config = fill(recipe.Recipe, SMOKE | {"seed": seed})
    root = run.root / "recipe"
    with Run.open(root, "recipe", config, resume=root.exists()) as inner:
        recipe.run(inner, config)
    return root, config


def read_config(root: Path) -> recipe.Recipe:
    """The settings of a finished run. Raises RunError if `root` holds none, or if this version does not know some of
    its settings."""
    hint = "make one with: etude run recipe --scale small --out FOLDER"
    try:
        record = read_json(root / "config.json")
    except (OSError, ValueError) as error:
        raise RunError(f"run={root} is not a run of the recipe ({error}); {hint}") from None
    if record.get("technique") != "recipe" or not (root / "stages" / "eval.json").exists():
        raise RunError(f"run={root} is not a finished run of the recipe; {hint}")
    if "context" not in record["config"]:
        raise RunError(f"run={root} was made by a version without self-summaries; {hint}")
    return fill(
        recipe.Recipe, record["config"]
    )  # a setting that is newer than the run takes its default, which is the old behaviour
