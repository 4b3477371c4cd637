"""`etude run recipe --scale full`: the stages of the recipe on many ranks, one after another, from a Hugging Face
folder to an agent.

    data    packed rows and the held-out codebase, written once, before the ranks start
    cpt     short-context phase of continued pretraining; its end is mid-CPT
    mtp     draft layers, distilled on the frozen mid-CPT network
    long    long-context phase, network and layers together
    sft     demonstrations or conversations, both together
    rl      Dr. GRPO (`scaled/rl.py`); the layers stay as they are
    eval    held-out tasks before and after RL, and the held-out codebase, on all ranks
    decode  speculative decoding, timed on the CPU of rank 0; left out with evaluation.decode_rounds=0

They are those of `recipe/small/stages.py`, with the same settings, batches and schedules, and leave the same records in
the run folder. With `tasks.recipes` the agent works on real packages (`recipe/packages/`); the stages are then

    tasks   recipes read, the chat format chosen, scripted episodes played, before the ranks start
    data, cpt, mtp, long    as above, only with `data.corpus`
    sft     those episodes or conversations
    measure held-out packages with the checkpoint as it came and after SFT
    rl      on the training packages
    eval    held-out packages again

 One group of ranks plays them all. FOLDER/work/STAGE holds what a stage needs to resume:
`scaled/optimise.py` says what. Rank 0 records a stage that is finished; a group that starts again skips it.
"""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from kit.disk import read_lines
from kit.process import in_fresh_process, map_on_cores
from kit.runs import Run, Stage
from kit.settings import RunError
from recipe.full.package_stages import (
    evaluate_packages,
    limits_of,
    make_package_tasks,
    measure_packages,
    refusal_of,
    stopping,
)
from recipe.full.settings import FullRecipe
from recipe.full.weights import check_files, count_windows, gather, measure_codebase
from recipe.packages.chat_format import choose_template
from recipe.packages.data import add_empty_rows, conversations_of, make_card, pack_rows, prepare_tasks
from recipe.packages.own_reward import load_reward
from recipe.packages.tasks import PackageTasks, make_schemas
from recipe.small import evaluation
from recipe.small.agent import Language, hash_seed
from recipe.small.chat_template import template_of
from recipe.small.conversations import batches, check_conversations, kept_rows
from recipe.small.data import data, heldout_codebase, task_stream
from recipe.small.demonstrations import sft_batches
from recipe.small.latest_rollouts import FOLDER, Latest
from recipe.small.learner import RATES, language_of, rows_of
from recipe.small.micro_world import CheckpointTasks
from recipe.small.model_card import about
from recipe.small.monitoring import make_watcher
from ref.cpt import load_tokenizer
from ref.environment import ChatFormat, TaskSet
from ref.lora import count_parameters
from ref.network import load_extra, release
from ref.network.model import config_of
from ref.rl import Settings
from ref.rollout import Limits, Rollout
from scaled import cpt, rl, supervised
from scaled.data.read import Prepared, is_prepared
from scaled.mtp import MTP
from scaled.network.adapters import adapter_folder, save_adapter
from scaled.network.model import Transformer, load_hf, save_hf
from scaled.optimise import training_context
from scaled.runtime import preemption, sharding
from scaled.runtime.launch import Watchdog
from scaled.runtime.mesh import current, mesh

__all__ = ["FREE", "STAGES", "check", "latest_of", "layout", "make_rl_config", "play", "prepare", "prepared", "trained"]

TRAINED = ("cpt", "mtp", "long", "sft", "rl")
"""Stages that train."""
STAGES = ("cpt", "mtp", "long", "sft", "rl", "eval", "decode")
"""Stages that the ranks play, in order."""
CHECKPOINTS = {"cpt": "mid-cpt", "mtp": "mtp", "long": "cpt", "sft": "sft", "rl": "final"}
"""Stage → the checkpoint that it writes."""
UNITS = {"eval": "rollouts", "measure": "rollouts", "decode": "tasks"}
"""Stage → what its speed counts, if not tokens."""
STARTS: dict[str, str | None] = {"cpt": None, "mtp": "mid-cpt", "long": "mtp", "sft": "cpt", "rl": "sft"}
"""Stage → the checkpoint that it begins from; None is the given one."""
FREE = ("ep", "timeout", "restarts", "checkpoint_every")
"""Settings of the cluster that a resumed run may change, because they do not affect the trained weights."""


CP = {"long": "long_cp", "sft": "long_cp", "rl": "rl_cp"}
"""Stage → the setting of the cluster that is its cp, if not `cp`."""


def layout(c: FullRecipe, ranks: int, stage: str) -> dict[str, int]:
    """dp, cp and ep of a stage. Raises RunError if they do not fit this number of ranks."""
    for name in (CP.get(stage, "cp"), "ep"):
        if ranks % (n := getattr(c.cluster, name)):
            hint = "; for one rank: --config examples/rehearsal.toml --set cluster.ep=1" if ranks == 1 else ""
            raise RunError(
                f"cluster.{name}={n} must divide the number of ranks, {ranks}; see --set "
                f"cluster.{name}=… and --nproc{hint}"
            )
    cp = getattr(c.cluster, CP.get(stage, "cp"))
    return {"dp": ranks // cp, "cp": cp, "ep": c.cluster.ep}


def trained(c: FullRecipe) -> tuple[str, ...]:
    """The stages that train."""
    stages = TRAINED if c.has_pretraining else ("sft", "rl")
    return stages if c.has_drafts else tuple(name for name in stages if name != "mtp")


def stages_of(c: FullRecipe) -> tuple[str, ...]:
    """The stages that ranks play by default, in order."""
    if c.on_packages:
        return (*trained(c)[:-1], "measure", "rl", "eval")
    return (*trained(c), "eval", *(["decode"] if c.has_drafts and c.evaluation.decode_rounds else []))


def rows_of_step(c: FullRecipe, stage: str) -> tuple[str, int, str, int]:
    """Setting and number of the rows of a step in a supervised stage, and setting and number of their tokens."""
    t = c.training
    if stage == "sft":
        return (
            "sft.rows",
            c.sft.rows,
            "cluster.agent_length" if c.cluster.agent_length else "training.long_length",
            c.agent_length,
        )
    name = "long_length" if stage == "long" else "length"
    tokens: int = getattr(t, name)
    return f"training.batch_tokens / training.{name}", t.batch_tokens // tokens, f"training.{name}", tokens


def check(c: FullRecipe, ranks: int) -> None:
    """Checks the settings and the checkpoint before the ranks start. Raises RunError, CheckpointError, or a ValueError
    of one line, for what a rank would report later, maybe after days."""
    assert c.checkpoint is not None
    path, t = Path(c.checkpoint), c.training
    if not (path / "tokenizer.json").is_file():
        raise RunError(
            f"checkpoint {path} is not a folder with config.json, weights and tokenizer.json; choose "
            f"another --checkpoint"
        )
    check_conversations(c.sft.conversations)
    if c.on_packages:
        if c.context.join != FullRecipe().context.join:
            raise RunError("context is for the small world; see tasks.summary_at for summaries on packages")
        if c.rl.environment_timeout <= c.tasks.episode_seconds:
            raise RunError(
                f"rl.environment_timeout={c.rl.environment_timeout:g} must exceed "
                f"tasks.episode_seconds={c.tasks.episode_seconds:g}, or an agent could have its episode left out"
            )
        choose_template(path, make_schemas(c.tasks))
        if c.tasks.reward is not None:
            load_reward(Path(c.tasks.reward))
    elif c.sft.conversations is not None:
        template_of(path, Language(load_tokenizer(path / "tokenizer.json")))
    network = check_files(path)
    if network.num_experts % c.cluster.ep:
        raise RunError(
            f"cluster.ep={c.cluster.ep} must divide the network's {network.num_experts} experts; see --set cluster.ep=…"
        )
    if ranks == 1 and t.dtype != "float32":
        raise RunError(
            f"training.dtype={t.dtype} needs more than one rank (--nproc); with one rank use --set "
            f"training.dtype=float32"
        )
    for stage in trained(c):
        split = layout(c, ranks, stage)
        name, rows, length, tokens = rows_of_step(c, "sft" if stage == "rl" else stage)
        if tokens % (2 * split["cp"]):
            raise RunError(f"{length}={tokens} must be a multiple of 2 · cp = {2 * split['cp']}; see --set {length}=…")
        late = c.has_pretraining and stage not in ("cpt", "mtp")  # the stage long stretches
        positions = (t.stretched(network) if late else network).max_position_embeddings
        if tokens > positions:
            rope_hint = ", training.long_rope_theta and training.long_yarn" if late else ""
            raise RunError(
                f"{length}={tokens} is more than the network's {positions:,} positions; see --set {length}=…{rope_hint}"
            )
        if stage != "rl" and (rows < split["dp"] or rows % split["dp"]):
            raise RunError(f"{name} = {rows} rows per step must be a multiple of dp = {split['dp']}")
    for name, rank in (("sft.lora", c.sft.lora), ("rl.lora", c.rl.lora)):
        if rank >= network.hidden_size:
            raise RunError(
                f"{name}={rank} must be less than the network's width, {network.hidden_size}; 0: no adapters"
            )
    for name, n in (
        ("rl.prompts · rl.rollouts", c.rl.prompts * c.rl.rollouts),
        ("evaluation.tasks", c.evaluation.tasks),
    ):
        if n < ranks:
            raise RunError(
                f"{name} must be at least the number of ranks, {ranks}, to give each rank a conversation; got {n}"
            )
    name = rows_of_step(c, "sft")[2]
    if c.rl.max_len > c.agent_length:
        raise RunError(
            f"{name} must hold a context of rl.max_len = {c.rl.max_len} tokens, got {c.agent_length}; "
            f"see --set {name}=…"
        )
    if c.on_packages:
        layout(c, ranks, "eval")
        make_rl_config(c, network.num_experts)
        return
    CheckpointTasks(make_rl_config(c, network.num_experts), c.small, name)


def prepare(run: Run, c: FullRecipe) -> None:
    """Packs the rows, on this process, and says what the network has no use for."""
    assert c.checkpoint is not None
    network = config_of(c.checkpoint)
    if not network.num_experts and c.rl.replay != "none":
        print(f"router replay: {c.checkpoint} has no experts, so there is nothing to replay", flush=True)
    for name, rank in (("sft.lora", c.sft.lora), ("rl.lora", c.rl.lora)):
        if rank:
            count, layers = count_parameters(network, rank), "attention" if network.num_experts else "all projections"
            print(f"{name}={rank}: adapters of {layers}, {count:,} parameters, are trained; the network's "
                  f"{network.parameters():,} are frozen", flush=True)  # fmt: skip
    tokenizer, small = Path(c.checkpoint) / "tokenizer.json", c.small
    if c.on_packages:
        prepare_tasks(run, c.tasks, Path(c.checkpoint), c.sft.conversations, c.rl.max_len)
        tokenizer = run.root / "data" / "tokenizer" / "tokenizer.json"
        small = replace(small, sft=replace(c.sft, conversations=str(conversations_of(run.root, c.sft.conversations))))
    if c.has_pretraining:
        data(run, small, tokenizer, c.agent_length, prepared(c.data.corpus, tokenizer))
    else:
        pack_rows(run, c.sft.conversations, c.agent_length)


def prepared(corpus: str | None, tokenizer: Path) -> Prepared | None:
    """The corpus, if `etude data` prepared it. Raises RunError if it was for another tokenizer."""
    if not is_prepared(corpus):
        return None
    prepared_corpus = Prepared(str(corpus))
    prepared_corpus.check(tokenizer)
    return prepared_corpus


def make_rl_config(c: FullRecipe, experts: int, root: Path | None = None) -> rl.Rl:
    """The settings of RL."""
    start, shared = (
        str(c.checkpoint) if root is None else str(root / "checkpoints" / "sft"),
        {setting.name for setting in fields(Settings)},
    )
    settings = Settings(**{name: getattr(c.rl, name) for name in shared})
    return rl.Rl(
        **make_rank_settings(c, c.agent_length, c.cluster.rl_cp, checkpoint=start),
        rl=settings if experts else replace(settings, replay="none"),
        join=c.context.join,
        **({"engine": c.tasks.engine, "slots": c.tasks.slots} if c.on_packages else {}),
        micro_rows=c.cluster.micro_rows,
        sampler_dtype=c.training.sampler_dtype,
        heldout=0,
        max_failed_share=c.tasks.max_failed_share,
    )


def make_rank_settings(c: FullRecipe, length: int, cp: int, **overrides: Any) -> dict[str, Any]:
    """The fields of `scaled.optimise.Ranks`."""
    shared = ("ep", "rematerialise", "dispatch", "experts", "checkpoint_every", "timeout", "restarts")
    settings: dict[str, Any] = {name: getattr(c.cluster, name) for name in shared}
    return settings | {"length": length, "cp": cp, "dtype": c.training.dtype, "seed": c.seed} | overrides


# ------------------------------------------------------------------------------------------------ on every rank


Ends = Mapping[str, Callable[[Stage | None, Path, FullRecipe], None]]
"""Stage → what the ranks do in it; rank 0 has the stage's record."""


def play(out: Path, c: FullRecipe, ranks: int, ends: Ends | None = None) -> None:
    """All stages on this rank, except those that an earlier group has finished: those that train, then `ends`, which
    are by default the evaluation and the timed decoding."""
    me = dist.get_rank()
    run = Run(out, "recipe full", c, None, True, 20.0) if me == 0 else None
    order = stages_of(c) if ends is None else (*trained(c), *ends)
    if ends is None:
        ends = (
            {"measure": measure_packages, "eval": evaluate_packages}
            if c.on_packages
            else {"eval": evaluate, "decode": decode}
        )
    with stopping(run, out, c):
        for stage in order:
            with mesh(**layout(c, ranks, stage)):
                record = (
                    None if run is None else run.stage(stage, total=1, unit=UNITS.get(stage, "tokens"))
                )  # its total follows
                if refusal_of(out):
                    return
                finished_flag = [record is not None and record.finished]
                dist.broadcast_object_list(finished_flag, 0)
                if finished_flag[0]:
                    continue
                preemption.check()
                if stage in ends:
                    ends[stage](record, out, c)
                else:
                    train(run, record, out, c, stage)
                if run is not None:
                    shutil.rmtree(out / "work" / stage, ignore_errors=True)
                dist.barrier()


def train(run: Run | None, record: Stage | None, out: Path, c: FullRecipe, stage: str) -> None:
    """A stage that trains: from checkpoint to checkpoint."""
    work, begins = out / "work" / stage, STARTS[stage]
    if begins == "mtp" and not c.has_drafts:
        begins = "mid-cpt"
    if stage == "sft" and not c.has_pretraining:
        begins = None
    note = Note(record, work, stage) if record is not None else None
    start = Path(str(c.checkpoint)) if begins is None else out / "checkpoints" / begins
    if stage == "rl":
        metrics = reinforce(c, out, work, start, note)
    else:
        metrics = supervise(run, c, out, work, start, stage, note)
    if note is not None:
        note.finish(metrics, out / "checkpoints" / CHECKPOINTS[stage])


def supervise(
    run: Run | None, c: FullRecipe, out: Path, work: Path, start: Path, stage: str, note: Note | None
) -> dict:
    """cpt, mtp, long or sft."""
    length, batches, steps = make_batches(c, out, stage)
    phase = phase_of(c, stage, length, steps)
    with training_context(phase, work, dist.get_rank()):
        model, layers = load_parts(c, start, stage)
        look = partial(measure_perplexity, c, out, model, steps) if stage in ("cpt", "long") else lambda step: {}
        metrics = supervised.train(
            phase, work, model, layers, batches, note.log if note else quiet, trunk=stage != "mtp", look=look
        )
        if note is not None:
            note.catch_up(steps)
        save(run, out, c, CHECKPOINTS[stage], model, layers)
        save_adapter(model, out / "checkpoints" / CHECKPOINTS[stage], start, "the network before SFT")
    return {"steps": steps, **({"parameters": model.config.parameters()} if stage == "cpt" else {}), **metrics}


def phase_of(c: FullRecipe, stage: str, length: int, steps: int) -> supervised.Phase:
    """The settings of a supervised stage."""
    s, t, m = c.sft, c.training, c.mtp
    muon_lr, adamw_lr = (s.muon_lr, s.adamw_lr) if stage == "sft" else (t.muon_lr, t.adamw_lr)
    return supervised.Phase(
        **make_rank_settings(c, length, getattr(c.cluster, CP.get(stage, "cp")), seed=c.seed + (stage == "mtp")),
        name=stage,
        steps=steps,
        factor=RATES[stage],
        micro_rows=c.cluster.micro_rows,
        muon=t.optimizer == "muon",
        muon_lr=muon_lr,
        adamw_lr=adamw_lr,
        layers_muon_lr=m.muon_lr,
        layers_adamw_lr=m.lr,
        layers_weight=m.weight,
        detach_trunk=m.detach_trunk,
    )


def make_batches(c: FullRecipe, root: Path, stage: str) -> tuple[int, supervised.Batches, int]:
    """Tokens per row, batches and number of steps of a supervised stage: those of the small recipe."""
    t = c.training
    if stage == "sft":
        per_epoch, batch = (
            batches(add_empty_rows(kept_rows(root), c.sft.rows), c.sft.rows, [c.seed])
            if c.on_packages
            else sft_batches(root, c.small, c.agent_length)
        )
        return c.agent_length, batch, per_epoch * c.sft.epochs
    (rows, length), read = rows_of(root, "long" if stage == "long" else "short")
    B = t.batch_tokens // length
    steps = max(1, rows // B)
    if stage == "mtp":
        steps = max(1, min(steps, c.mtp.tokens // t.batch_tokens))
    return length, lambda step: read(np.arange(step * B, (step + 1) * B) % rows), steps


def load_parts(c: FullRecipe, start: Path, stage: str) -> tuple[Transformer, MTP | None]:
    """Network and draft layers that a stage trains, from its checkpoint."""
    model = load_hf(start, lora=c.sft.lora if stage == "sft" else 0, seed=c.seed)
    extra = load_extra(start)
    layers = None if stage == "cpt" or not c.has_drafts else MTP(model.config, c.mtp.layers)
    if layers is not None and stage != "mtp":
        with torch.no_grad():
            for name, p in layers.named_parameters():
                sharding.load_slice(name, p, extra[f"mtp.{name}"])
    if stage == "long":
        for part in filter(None, (model, layers)):
            part.config = c.training.stretched(part.config)
    return model, layers


def save(run: Run | None, out: Path, c: FullRecipe, name: str, model: Transformer, layers: MTP | None) -> None:
    """Writes a checkpoint of the run; all ranks call it together."""
    extra = None if layers is None else {f"mtp.{key}": x.cpu() for key, x in sharding.wholes(layers)}
    files = None
    if run is not None:
        card = (
            make_card(run, name, model.config, c.rl.algorithm, layers is not None)
            if c.on_packages and name == "sft"
            else about(run, out, name, model.config, layers is not None).replace("A small ", "A ")
        )
        own = not c.on_packages and (
            name == "final" or name == "sft" and c.sft.conversations is None
        )  # the agent's turns, not the given template's
        speakers = {"speakers": language_of(out).speakers} if own else {}
        files = release.make_sidecar_files(out / "data", model.config, card, **speakers)
    save_hf(model, out / "checkpoints" / name, extra=extra, sidecar_files=files)


def reinforce(c: FullRecipe, out: Path, work: Path, start: Path, note: Note | None) -> dict:
    """Dr. GRPO from the end of SFT; the draft layers go along unchanged."""
    config = make_rl_config(c, config_of(start).num_experts, out)
    log, say = (note.log, note.stage.say) if note else (quiet, quiet)
    if c.on_packages:
        tasks = make_package_tasks(c, out)
        metrics = reinforced("rl", config, work, out, tasks, tasks.chat_format, limits_of(c, tasks), log, say)
    else:
        tasks = CheckpointTasks(config, c.small)
        metrics = reinforced("rl", config, work, out, tasks, tasks.language, tasks.limits, log, say)
    if note is not None:
        note.catch_up(c.rl.steps)
        if c.sft.conversations is not None and not c.on_packages:
            replace_chat_template(work / "checkpoints" / "final", language_of(out).speakers)
        trained_folder = work / "checkpoints" / "final"
        for folder in filter(Path.exists, (trained_folder, adapter_folder(trained_folder))):
            shutil.rmtree(out / "checkpoints" / folder.name, ignore_errors=True)
            os.rename(folder, out / "checkpoints" / folder.name)
        if c.on_packages:
            final = out / "checkpoints" / "final"
            card = make_card(note.stage.run, "final", config_of(final), c.rl.algorithm, bool(load_extra(final)))
            (final / "README.md").write_text(card, encoding="utf-8")
    return {
        "steps": c.rl.steps,
        "prompts": c.rl.steps * c.rl.prompts,
        "rollouts": c.rl.steps * c.rl.prompts * c.rl.rollouts,
        **metrics,
    }


def reinforced(
    technique: str,
    c: rl.Rl,
    work: Path,
    out: Path,
    tasks: TaskSet,
    chat_format: ChatFormat,
    limits: Limits,
    log: Callable[..., None],
    say: Callable[[str], None],
) -> dict[str, float]:
    """RL on this rank, with the monitor, and the newest rollouts in the folder `out`. Slow environments are driven from
    this process, since their sandboxes are its own; others are sampled on all cores."""
    on_cores = current().device.type == "cpu" and not isinstance(tasks, PackageTasks)
    map_fn = partial(map_on_cores, processes_per_core=2, processes=None if on_cores else 1)
    return rl.train(
        technique,
        c,
        work,
        tasks,
        chat_format,
        limits,
        log=log,
        watcher=make_watcher(c.rl, tasks.tools, say) if c.rl.monitor.on else None,
        curriculum=tasks.curriculum() if isinstance(tasks, PackageTasks) else None,
        show=latest_of(c, out, chat_format),
        map_fn=map_fn,
    )


def latest_of(c: rl.Rl, out: Path, chat_format: Any) -> rl.Show:
    """Keeps the newest rollouts of rank 0 in the run's folder, as a small run does
    (`recipe/small/latest_rollouts.py`)."""
    latest = Latest(out / FOLDER / "rl.json", chat_format)

    def show(step: int, rollouts: Sequence[Rollout], rewards: Sequence[float]) -> None:
        if latest.due(step + 1 == c.rl.steps):
            solved = [bool(rollout.metrics.get("success")) for rollout in rollouts]
            latest.keep(step + 1, rollouts[0].task.prompt, [rollout.chain for rollout in rollouts], rewards, solved)

    return show


def replace_chat_template(folder: Path, speakers: tuple[str, str]) -> None:
    """Replaces the chat template that conversations were trained in by that of the agent's turns, in which RL went
    on."""
    files = release.make_sidecar_files(folder, config_of(folder), "", speakers)
    for name in ("tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        (folder / name).unlink(missing_ok=True)
        if name in files:
            (folder / name).write_bytes(files[name])


def measure_perplexity(c: FullRecipe, out: Path, model: Transformer, steps: int, step: int) -> dict[str, float]:
    """Perplexity on the beginning of the held-out codebase, every few steps and at the last."""
    t = c.training
    if step % t.perplexity_every and step != steps:
        return {}
    nll = cpt.codebase_nll(
        model,
        language_of(out).tokenizer,
        heldout_codebase(out),
        t.long_length,
        max_tokens=t.perplexity_tokens,
        batch=count_windows(c),
    )
    return {"codebase_ppl": nll.perplexity, "codebase_bpb": nll.bits_per_byte}


def evaluate(stage: Stage | None, out: Path, c: FullRecipe) -> None:
    """Held-out tasks before and after RL, each rank with its share, and the held-out codebase after each stage."""
    e, language = c.evaluation, language_of(out)
    tasks = list(itertools.islice(task_stream(c.small, "evaluation"), e.tasks))
    share = [tasks[i] for i in rl.share(len(tasks)).tolist()]
    saved_parts: list = [{}]
    if stage is not None:
        stage.total, saved_parts = 2 * len(share) * e.samples, [(stage.restore() or {}).get("parts", {})]
    dist.broadcast_object_list(saved_parts, 0)
    evaluations = saved_parts[0]
    with Watchdog(out / "work" / "eval", c.cluster.timeout) as watch:

        def beat(base: int, done: int) -> None:
            watch.beat(base + done)
            if stage is not None:
                stage.progress(base + done)

        for number, (moment, name) in enumerate({"before": "sft", "after": "final"}.items()):
            if moment in evaluations:
                continue
            preemption.check()
            model = gather(load_hf(out / "checkpoints" / name), getattr(torch, c.training.sampler_dtype))
            seed = hash_seed(c.seed, "evaluation")
            rank_results = evaluation.measure_policy(
                model, language, share, c.small, seed, partial(beat, number * len(share) * e.samples), copy=False
            )
            all_results: list = [None] * dist.get_world_size()
            dist.all_gather_object(all_results, rank_results)
            grids = {
                key: np.concatenate([results_of_rank[key] for results_of_rank in all_results])
                for key in rank_results
                if key != "example"
            }
            evaluations[moment] = grids | {"example": all_results[0]["example"]}  # of the first tasks
            if stage is not None:
                stage.save({"parts": evaluations}, number + 1)
        results = measure_codebase(c, out, watch.beat)
    if stage is not None:
        evaluation.conclude(stage, c.small, tasks, evaluations, results)


def decode(stage: Stage | None, out: Path, c: FullRecipe) -> None:
    """Speculative decoding, on rank 0. The others wait as long as it goes on, which may be longer than a collective
    would."""
    done, sign, e = out / "stages" / "decode.json", out / "work" / "decode" / "beat", c.evaluation
    if stage is not None:
        record = stage
        stage.total = e.decode_rounds * len(evaluation.WAYS) * e.decode_tasks
        stage.restore()
        sign.parent.mkdir(parents=True, exist_ok=True)

        def beat(task_count: float) -> None:
            record.progress(task_count)
            sign.touch()

        result = in_fresh_process(evaluation.decode_checkpoint, out, c.small, progress=beat)
        metric_names = ("acceptance", "recall_acceptance", "tokens_per_cycle", "retracted")
        stage.log(1, **{key: result["ways"][evaluation.FULL][key] for key in metric_names})
        stage.finish(result)
    last_beat, last_change = 0.0, time.monotonic()
    while not done.exists():
        time.sleep(0.1)
        if (beat_time := sign.stat().st_mtime if sign.exists() else 0.0) != last_beat:
            last_beat, last_change = beat_time, time.monotonic()
        if time.monotonic() - last_change > c.cluster.timeout:
            raise RunError(f"no progress in {c.cluster.timeout:g} s: rank 0 hangs in the stage decode")


def quiet(*_: object, **__: object) -> None:
    """What the other ranks show."""


class Note:
    """What rank 0 records of a stage: the lines of `scaled/optimise.py`, in the run's own metrics, with tokens counted
    from the beginning, and its speed beside them."""

    def __init__(self, stage: Stage, work: Path, name: str):
        self.stage, self.name, self.step, self.tokens = stage, name, 0, 0.0
        self.work, self.speed = (work / kind / f"{name}.jsonl" for kind in ("metrics", "speed"))
        self.stage.restore()  # an empty file of metrics: an interrupted stage's lines are noted again

    def catch_up(self, step: int) -> None:
        """Notes all lines up to a step."""
        for line in read_lines(self.work):
            if self.step < line["step"] <= step:
                self.step, values = (
                    line["step"],
                    {key: value for key, value in line.items() if key not in ("step", "tokens")},
                )
                self.tokens += line["tokens"]
                rate = {"lr": RATES[self.name](line["step"] - 1, int(self.stage.total))} if self.name in RATES else {}
                self.stage.log(line["step"], tokens=int(self.tokens), phase=self.name, **rate, **values)
        if self.speed.exists():
            path = self.stage.run.path("speed", self.speed.name)
            shutil.copyfile(self.speed, path)

    def log(self, step: int, steps: int, **metrics: float) -> None:
        """`scaled.optimise.Log`."""
        self.stage.total = steps
        self.catch_up(step)
        names = ("reward", "success", "failed", "loss", "mtp_loss", "codebase_ppl")
        self.stage.progress(step, self.tokens, **{name: metrics[name] for name in names if name in metrics})

    def finish(self, metrics: dict, checkpoint: Path) -> None:
        paths = [path for folder in (checkpoint, adapter_folder(checkpoint)) for path in sorted(folder.rglob("*"))]
        files = [path for path in paths if path.is_file() and path.name != "README.md"]
        self.stage.finish(metrics, files)
