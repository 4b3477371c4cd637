"""The complete recipe at small scale: data → continued pretraining → multi-token prediction → long context → SFT → RL →
evaluation.

The order is the report's (Composer 2, §3–§5): the MTP layers are cut from the middle of pretraining and then trained
jointly in the long-context and SFT phases; RL follows SFT; every number of the evaluation is measured before and after
RL, on tasks whose target and helper functions are not in any training data. From SFT on, the agent works in short
contexts joined by its own summaries (§4.1); RL's sampler and trainer compute in different dtypes, and the trainer
replays the sampler's experts (§6.2).

    etude run recipe --scale small --out runs/small

Each stage is a function of the configuration and of the files of earlier stages. All randomness comes from generators
seeded by (seed, stage, step): a resumed run repeats the killed one bit for bit, and a checkpoint only needs weights,
moments and a step."""

from dataclasses import replace

import numpy as np
import torch

from kit.runs import Run
from recipe.small import evaluation, reinforcement
from recipe.small.data import data, task_stream
from recipe.small.demonstrations import sft_batches
from recipe.small.latest_rollouts import FOLDER, Latest
from recipe.small.learner import (
    RATES,
    Learner,
    checkpoint,
    language_of,
    load_checkpoint,
    perplexity_look,
    rows_of,
    train,
)
from recipe.small.settings import Recipe
from ref.mtp import MTP
from ref.network import Transformer

__all__ = ["run"]


def run(run: Run, config: Recipe) -> None:
    """Runs all stages in order, and skips those that an earlier process finished."""
    torch.set_num_threads(config.training.threads)
    data(run, config)
    pretrain(run, config)
    distil(run, config)
    lengthen(run, config)
    finetune(run, config)
    reinforce(run, config)
    evaluation.evaluate(run, config, task_stream(config, "evaluation"))


def pretrain(run: Run, config: Recipe) -> None:
    """Short-context phase: warm-up and the stable part of the schedule; its end is "mid-CPT"."""
    t = config.training
    (rows, length), read_rows = rows_of(run.root, "short")
    B = max(1, t.batch_tokens // length)
    steps = max(1, rows // B)
    stage = run.stage("cpt", total=steps)
    if stage.finished:
        return
    torch.manual_seed(config.seed)
    vocabulary = language_of(run.root).tokenizer.get_vocab_size()
    learner = Learner(config, Transformer(replace(config.model, vocab_size=vocabulary)), None, t.muon_lr, t.adamw_lr)
    train(
        stage,
        config,
        learner,
        lambda step: read_rows(np.arange(step * B, min((step + 1) * B, rows))),
        steps,
        lambda step: RATES["cpt"](step, steps),
        "short",
        look=perplexity_look(run, config, learner, steps),
    )
    files = checkpoint(run, "mid-cpt", learner.trunk.masters, None)
    stage.finish(
        {
            "steps": steps,
            "parameters": learner.trunk.masters.config.parameters(),
            "active_parameters": learner.trunk.masters.config.parameters(active=True),
        },
        files,
    )


def distil(run: Run, config: Recipe) -> None:
    """MTP layers from scratch on the frozen mid-CPT trunk, on the same data."""
    t = config.training
    (rows, length), read_rows = rows_of(run.root, "short")
    B = max(1, t.batch_tokens // length)
    steps = max(1, min(rows // B, config.mtp.tokens // t.batch_tokens))
    stage = run.stage("mtp", total=steps)
    if stage.finished:
        return
    torch.manual_seed(config.seed + 1)
    model, _ = load_checkpoint(run.root, config, "mid-cpt")
    learner = Learner(config, model, MTP(model.config, config.mtp.layers), t.muon_lr, t.adamw_lr)
    train(
        stage,
        config,
        learner,
        lambda step: read_rows(np.arange(step * B, min((step + 1) * B, rows))),
        steps,
        lambda step: RATES["mtp"](step, steps),
        "mtp",
        trunk=False,
    )
    assert learner.mtp is not None
    files = checkpoint(run, "mtp", learner.trunk.masters, learner.mtp.masters)
    stage.finish({"steps": steps, "parameters": sum(p.numel() for p in learner.mtp.masters.parameters())}, files)


def lengthen(run: Run, config: Recipe, start: str = "mtp") -> None:
    """Long-context phase from the checkpoint `start`, trunk and MTP layers together; the learning rate decays. From
    "mid-cpt", without `distil`, this phase and the next ones train only the trunk, with the same result, because the
    layers give it no gradient."""
    t = config.training
    (rows, length), read_rows = rows_of(run.root, "long")
    B = max(1, t.batch_tokens // length)
    steps = max(1, rows // B)
    stage = run.stage("long", total=steps)
    if stage.finished:
        return
    model, mtp = load_checkpoint(run.root, config, start)
    for part in filter(None, (model, mtp)):
        part.config = t.stretched(part.config)
    learner = Learner(config, model, mtp, t.muon_lr, t.adamw_lr)
    train(
        stage,
        config,
        learner,
        lambda step: read_rows(np.arange(step * B, min((step + 1) * B, rows))),
        steps,
        lambda step: RATES["long"](step, steps),
        "long",
        look=perplexity_look(run, config, learner, steps),
    )
    files = checkpoint(run, "cpt", learner.trunk.masters, learner.mtp and learner.mtp.masters)
    stage.finish({"steps": steps}, files)


def finetune(run: Run, config: Recipe) -> None:
    """SFT on demonstrations, including summaries, or on conversations, with the loss on the agent's own tokens; trains
    the MTP layers, too."""
    s = config.sft
    per_epoch, batch = sft_batches(run.root, config, config.training.long_length)
    steps = per_epoch * s.epochs
    stage = run.stage("sft", total=steps)
    if stage.finished:
        return

    learner = Learner(config, *load_checkpoint(run.root, config, "cpt"), s.muon_lr, s.adamw_lr)
    train(stage, config, learner, batch, steps, lambda step: RATES["sft"](step, steps), "sft")
    files = checkpoint(run, "sft", learner.trunk.masters, learner.mtp and learner.mtp.masters)
    stage.finish({"steps": steps} | ({} if s.conversations else {"demonstrations": s.demonstrations}), files)


def reinforce(run: Run, config: Recipe) -> None:
    """RL from the end of SFT. The MTP layers keep learning from the policy's own rollouts, so their drafts follow its
    changes (our choice: the report trains them only in the long-context and SFT phases)."""
    stage = run.stage("rl", total=max(config.rl.steps, 1), unit="tokens")
    if stage.finished:
        return
    model, mtp = load_checkpoint(run.root, config, "sft")
    reference = load_checkpoint(run.root, config, "sft", with_mtp=False)[0]
    language = language_of(run.root)
    latest = Latest(run.root / FOLDER / "rl.json", language, steps=config.rl.steps)
    learner, usage = reinforcement.learn(stage, config, model, mtp, reference, language, [latest])
    files = checkpoint(run, "final", learner.trunk.masters, learner.mtp and learner.mtp.masters)
    stage.finish(usage, files)
