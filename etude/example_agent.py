"""The committed agent, which `etude play` plays where no run is named: python -m etude.example_agent RUN

It is the last checkpoint of a small run of the recipe, in bfloat16 and without draft layers:

    config.json, model.safetensors, tokenizer.json, …    a Hugging Face folder, as every checkpoint
    record.json                                          the run's settings, and success beside the original's

Both agents play the same held-out tasks with the same random numbers. The original has the float32 weights that the run left; both are sampled in
the recipe's `training.sampler_dtype`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from kit.disk import atomic_write
from kit.process import machine
from kit.settings import RunError
from ref.network import Transformer, load_hf, release, save_hf
from sims.policies import read_config
from sims.recipe.agent import hash_seed
from sims.recipe.data import task_stream
from sims.recipe.evaluation import compare, measure_policy, summarise
from sims.recipe.learner import language_of, load_checkpoint
from sims.recipe.settings import Evaluation, Recipe

__all__ = ["FOLDER", "RECORD", "write"]

FOLDER = Path(__file__).resolve().parent.parent / "results" / "examples" / "agent"
"""Where it lies in a clone."""
RECORD = "record.json"
"""The file of its settings and of what was measured."""
FIGURES = ("success", "greedy", "tokens", "turns", "invalid_calls")
ABOUT = "A small coding agent, after reinforcement learning in a world of tiny programs: the one that `etude play` plays."


def write(run: Path, out: Path, tasks: int = 100, samples: int = 4) -> Path:
    """Writes the agent of a finished run to the folder `out`, plays it and the original on so many held-out tasks with so many rollouts each, and
    returns the record's path. Raises RunError if `run` is no finished run of the recipe, or if `out` is there already."""
    if out.exists():
        raise RunError(f"{out} is there already; delete it, or name another folder with --out")
    recipe, language = read_config(run), language_of(run)
    about = json.loads((run / "config.json").read_text(encoding="utf-8"))
    original = load_checkpoint(run, recipe, "final", with_mtp=False)[0]
    facts = {"run": f"seed {recipe.seed}, commit {about['machine']['commit']}", "success": f"in {RECORD}, beside that of the original"}
    card = release.card("etude example agent", ABOUT, original.config, facts, next(iter(task_stream(recipe, "evaluation"))).prompt)
    files = release.beside(run / "data", original.config, card)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_hf(load_checkpoint(run, recipe, "final", with_mtp=False)[0].to(torch.bfloat16), out, beside=files)
    weights = (out / "model.safetensors").read_bytes()
    record = {
        "command": "python -m etude.example_agent RUN",
        "machine": machine(),
        "run": {"seed": recipe.seed, "commit": about["machine"]["commit"], "machine": about["machine"]},
        "weights": {"dtype": "bfloat16", "bytes": len(weights), "sha256": hashlib.sha256(weights).hexdigest()},
        "held_out": measured(recipe, language, original, load_hf(out), tasks, samples),
        "config": about["config"],
    }
    atomic_write(out / RECORD, json.dumps(record, indent=1) + "\n")
    return out / RECORD


def measured(recipe: Recipe, language: Any, original: Transformer, agent: Transformer, tasks: int, samples: int) -> dict[str, Any]:
    """Success, tokens and turns of both agents with 95% intervals over tasks, and the difference, the agent's minus the original's."""
    held_out = list(itertools.islice(task_stream(recipe, "evaluation"), tasks))
    sized = Recipe(**{**vars(recipe), "evaluation": Evaluation(tasks=tasks, samples=samples)})
    seed = hash_seed(recipe.seed, "example agent")
    before, after = (measure_policy(model, language, held_out, sized, seed) for model in (original, agent))
    resamples = recipe.evaluation.resamples
    whole = {name: summarise(found, resamples) for name, found in (("original", before), ("agent", after))}
    return {
        "tasks": tasks,
        "samples": samples,
        "temperature": recipe.rl.temperature,
        **{name: {key: found[key] for key in FIGURES} for name, found in whole.items()},
        "difference": {key: value for key, value in compare(before, after, resamples).items() if key in FIGURES},
    }


def main(
    run: Annotated[Path, typer.Argument(help="A finished small run of the recipe.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")] = FOLDER,
) -> None:
    """Write the committed agent from a run, and measure it beside the original."""
    torch.set_num_threads(1)
    try:
        path = write(run, out)
    except (RunError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    found = json.loads(path.read_text(encoding="utf-8"))["held_out"]
    for name in ("original", "agent"):
        print("{}: success {value:.3f} [{low:.3f}, {high:.3f}]".format(name, **found[name]["success"]))
    print(f"record: {path}")


if __name__ == "__main__":
    typer.run(main)
