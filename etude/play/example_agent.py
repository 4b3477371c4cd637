"""The committed agent, which `etude play` plays where no run is named: python -m etude.play.example_agent RUN

It is the last checkpoint of a small run of the recipe, in bfloat16, and beside it the one before RL:

    config.json, model.safetensors, tokenizer.json, …    a Hugging Face folder, as every checkpoint
    mtp/                                                 its draft layers
    sft/                                                 the agent before RL, as a difference from this one
                                                         (`etude/play/difference.py`)
    record.json                                          the run's settings, success before and after RL, and success
                                                         beside the original's

All play the same held-out tasks with the same random numbers. The original has the float32 weights that the run left;
all are sampled in the recipe's `training.sampler_dtype`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from etude.play import difference
from kit.disk import atomic_write, read_json
from kit.process import machine
from kit.settings import RunError
from recipe.small.agent import hash_seed
from recipe.small.data import task_stream
from recipe.small.evaluation import compare, measure_policy, summarise
from recipe.small.learner import language_of, load_checkpoint
from recipe.small.settings import Evaluation, Recipe
from ref.network import Transformer, release, save_hf
from sims.policies import read_config

__all__ = ["BEFORE", "FOLDER", "RECORD", "STREAM", "write"]

FOLDER = Path(__file__).resolve().parents[2] / "results" / "examples" / "agent"
"""Where it lies in a clone."""
BEFORE = "sft"
"""The checkpoint before RL: in a run, and in this folder."""
RECORD = "record.json"
"""The file of its settings and of what was measured."""
STREAM = "example agent"
"""Of the random numbers with which they play."""
FIGURES = ("success", "greedy", "tokens", "turns", "invalid_calls")
ABOUT = (
    "A small coding agent, after reinforcement learning in a world of tiny programs: the one that `etude play` plays."
)
ABOUT_BEFORE = """# etude example agent, before reinforcement learning

The checkpoint `sft` of the same run. \
`weights.delta` holds its bfloat16 weights as a difference from those of the folder above, draft layers too;
`etude play --before sft` and the explorer read it. Its success is in the record there.
"""


def write(run: Path, out: Path, tasks: int = 100, samples: int = 4) -> Path:
    """Writes the agent of a finished run, and the one before RL, to the folder `out`. Plays both, and the original, on
    so many held-out tasks with so many rollouts each. Returns the record's path. Raises RunError if `run` is no
    finished run of the recipe, or if `out` is there already."""
    if out.exists():
        raise RunError(f"{out} already exists; delete it, or choose another folder with --out")
    recipe, language = read_config(run), language_of(run)
    about = read_json(run / "config.json")
    (original, layers), before = (load_checkpoint(run, recipe, name) for name in ("final", BEFORE))
    facts = {
        "run": f"seed {recipe.seed}, commit {about['machine']['commit']}",
        "success": f"in {RECORD}, beside that of the original",
    }
    opening = next(iter(task_stream(recipe, "evaluation"))).prompt
    card = release.make_model_card("etude example agent", ABOUT, original.config, facts, opening, layers is not None)
    files = release.make_sidecar_files(run / "data", original.config, card)
    out.parent.mkdir(parents=True, exist_ok=True)
    drafts = {f"mtp.{name}": x.bfloat16() for name, x in layers.state_dict().items()} if layers is not None else None
    save_hf(
        load_checkpoint(run, recipe, "final", with_mtp=False)[0].to(torch.bfloat16),
        out,
        extra=drafts,
        sidecar_files=files,
    )
    extra_files = {
        "README.md": ABOUT_BEFORE.encode(),
        "config.json": (out / "config.json").read_bytes(),
        "tokenizer.json": files["tokenizer.json"],
    }
    difference.store(out / BEFORE, *before, recipe.mtp.layers, extra_files)
    weights = (out / "model.safetensors").read_bytes()
    players = {"original": original, BEFORE: difference.network(out / BEFORE, recipe.mtp.layers)}
    record = {
        "command": "python -m etude.play.example_agent RUN",
        "machine": machine(),
        "run": {"seed": recipe.seed, "commit": about["machine"]["commit"], "machine": about["machine"]},
        "weights": {"dtype": "bfloat16", "bytes": len(weights), "sha256": hashlib.sha256(weights).hexdigest()},
        "held_out": measure(
            recipe, language, players | {"agent": difference.network(out, recipe.mtp.layers)}, tasks, samples
        ),
        "config": about["config"],
    }
    atomic_write(out / RECORD, json.dumps(record, indent=1) + "\n")
    return out / RECORD


def measure(
    recipe: Recipe, language: Any, players: Mapping[str, Transformer], tasks: int, samples: int
) -> dict[str, Any]:
    """Success, tokens and turns of each with 95% intervals over tasks, how many rollouts of each task succeed, and the
    differences of the agent: from the original, and from itself before RL."""
    held_out = list(itertools.islice(task_stream(recipe, "evaluation"), tasks))
    sized = Recipe(**{**vars(recipe), "evaluation": Evaluation(tasks=tasks, samples=samples)})
    seed, resamples = hash_seed(recipe.seed, STREAM), recipe.evaluation.resamples
    evaluations = {name: measure_policy(model, language, held_out, sized, seed) for name, model in players.items()}
    differences = {
        name: compare(evaluations[name], evaluations["agent"], resamples) for name in players if name != "agent"
    }

    def select_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
        return {key: metrics[key] for key in FIGURES}

    return {
        "tasks": tasks,
        "samples": samples,
        "temperature": recipe.rl.temperature,
        **{
            name: select_metrics(summarise(evaluation, resamples))
            | {"solved": evaluation["success"].sum(1).astype(int).tolist()}
            for name, evaluation in evaluations.items()
        },
        "difference": {name: select_metrics(comparison) for name, comparison in differences.items()},
    }


def main(
    run: Annotated[Path, typer.Argument(help="Finished small run of the recipe.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")] = FOLDER,
) -> None:
    """Write the bundled checkpoint from a run, and evaluate it next to the original."""
    torch.set_num_threads(1)
    try:
        path = write(run, out)
    except (RunError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    results = read_json(path)["held_out"]
    for name in ("original", BEFORE, "agent"):
        print("{}: success {value:.3f} [{low:.3f}, {high:.3f}]".format(name, **results[name]["success"]))
    print(f"record: {path}")


if __name__ == "__main__":
    typer.run(main)
