"""`etude figure cpt-real`: continued pretraining of a real network on ranks (`scaled/pretrain.py`); data, measures and
verdicts are those of `sims/cpt_real/experiment.py`. A training run that is measured leaves its settings and its report,
not its weights, which are gigabytes."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import torch

from etude.run import settings as full_settings
from kit.runs import Run
from kit.settings import RunError
from ref import cpt
from ref.network import load_hf
from scaled import pretrain
from scaled.runtime import launch
from sims.base_evaluations.packages import PACKAGES, folder_of
from sims.cpt_real.experiment import Experiment, concluded, corpus_of, losses, picture

__all__ = ["Experiment", "experiment", "picture"]


def experiment(run: Run, config: Experiment) -> dict:
    """The network as it came, then every training run, smallest budgets first; fits, intervals, verdicts."""
    c = config
    start = folder_of(c.model, run.root / "models", print) if c.model in PACKAGES else Path(c.model)
    if not (start / "tokenizer.json").is_file():
        raise RunError(
            f"model {c.model} is neither one of {', '.join(PACKAGES)} nor a folder with "
            f"tokenizer.json; see --set model=…"
        )
    corpus = corpus_of(c.package, run.root / "package")
    heldout = {
        "package": cpt.hold_out_codebase(cpt.read_corpus(corpus))[2],
        "library": cpt.hold_out_codebase(cpt.read_library())[2],
    }
    plan = [("base", 0, 0)]
    plan += [("package", budget, number) for budget in c.budgets for number in range(c.seeds)]
    plan += [("control", c.budgets[-1], number) for number in range(c.seeds)]
    results = []
    for arm, budget, number in plan:
        stage = run.stage(f"{arm}-{budget}-{number}", total=2, unit="parts")
        if not stage.finished:
            folder = start if arm == "base" else train_arm(run.root, c, arm, start, corpus, budget, number)
            model, tokenizer = load_hf(folder), cpt.load_tokenizer(start / "tokenizer.json")
            result: dict = {"arm": arm, "budget": budget, "seed": number}
            for done, (part, files) in enumerate(heldout.items(), 1):
                result[part] = losses(model, tokenizer, files, c)
                stage.progress(done)
            stage.finish(result)
            if arm != "base":
                shutil.rmtree(folder)
        results.append(stage.result())
    return concluded(results, c)


def train_arm(root: Path, c: Experiment, arm: str, start: Path, corpus: Path, budget: int, number: int) -> Path:
    """Plays one training run on its ranks, or goes on with it, and returns its checkpoint. Raises RunError if the ranks
    fail."""
    steps, out = budget // (c.rows * c.length), root / "runs" / f"{arm}-{budget}-{number}"
    settings = {
        "checkpoint": str(start.resolve()), "corpus": str(corpus.resolve()) if arm == "package" else None,
        "rows": c.rows, "length": c.length, "steps": steps, "warmup": -(-steps // 10), "decay": steps // 2,
        "optimizer": "adamw", "adamw_lr": c.lr, "perplexity_tokens": 0,
        "seed": 1000 * c.seed + number, "dtype": c.dtype, "cp": 1, "ep": 1, "checkpoint_every": 25, "timeout": 900.0,
    }  # fmt: skip
    backend = "nccl" if torch.cuda.device_count() >= c.ranks else "gloo"
    config = full_settings.settings("cpt", backend, settings)
    full_settings.layout(config, c.ranks)
    with Run.open(out, "cpt full", config, resume=out.exists()):
        print(f"{arm}, {budget:,} tokens, seed {number}: {out}", flush=True)
        pretrain.prepare(config, out)
        rank_arguments = json.dumps(
            {"technique": "cpt", "backend": backend, "ranks": c.ranks, "config": dataclasses.asdict(config)}
        )
        if launch.start("etude.run.rank", [str(out.resolve()), rank_arguments], c.ranks, config.restarts):
            raise RunError(f"the ranks of {out} failed; their errors are above")
    shutil.rmtree(out / "state", ignore_errors=True)
    return out / "checkpoints" / "final"
