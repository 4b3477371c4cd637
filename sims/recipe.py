"""The whole recipe, small: data → continued pretraining → multi-token prediction → long context → SFT → RL → evaluation.

The order is the report's (Composer 2, §3–§5): the MTP layers are cut from the middle of pretraining and then trained jointly
in the long-context and SFT phases; RL follows SFT; every number of the evaluation is taken before and after RL on tasks whose
target and helper functions no training ever saw.

    etude run recipe --scale small --out runs/small

Each stage is a function of the configuration and of what earlier stages left on disk. All randomness comes from generators
seeded by (seed, stage, step): a resumed run repeats the dead one bit for bit, and a state is only weights, moments and a step.
"""

import itertools
import random
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from etude.runs import Run, RunError, Stage
from ref import cpt, dr_grpo
from ref.model import Config, Transformer, load_balancing_loss, load_hf, save_hf
from ref.mtp import MTP, MTPConfig, mtp_loss
from ref.muon import optimizers
from ref.precision import Masters
from ref.sampler import Sampler
from sims import evaluation
from sims.agent import Language, Payment, demonstration_tokens, pad, pay, play, reference_kl
from sims.microrepo import NoiseConfig, Task, WorldConfig, demonstration, documents, generate, transcript

__all__ = ["Recipe", "run"]


@dataclass(frozen=True)
class Data:
    """What is read."""

    corpus: str | None = None
    """Folder of code; none: the source of the running Python's standard library."""
    vocab_size: int = 1024
    """Byte-level BPE tokens, three special ones included."""
    world_share: float = 0.75
    """Share of pretraining tokens that are modules of the small world, the "internal codebase"."""
    heldout_share: float = 0.03
    """Size aimed at for the held-out codebase, as a share of the corpus."""


@dataclass(frozen=True)
class Training:
    """Optimisation of the supervised phases."""

    tokens: int = 1_000_000
    """Tokens of the short-context phase."""
    length: int = 128
    """Context of the short phase."""
    long_tokens: int = 300_000
    """Tokens of the long-context phase."""
    long_length: int = 256
    """Context of the long phase, and of the rolling perplexity window."""
    batch_tokens: int = 4096
    """Tokens per optimiser step."""
    optimizer: Literal["muon", "adamw"] = "muon"
    """Muon for matrices with AdamW for the rest, or AdamW alone."""
    muon_lr: float = 0.02
    """Learning rate of Muon: spectral norm of a step."""
    adamw_lr: float = 3e-3
    """Learning rate of AdamW."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute dtype of training; masters are float32."""
    sampler_dtype: Literal["bfloat16", "float32"] = "float32"
    """Dtype of the sampler's copy of the weights. On a CPU the products of one decoding step are so small that float32 is faster."""
    perplexity_every: int = 60
    """Steps between two looks at codebase perplexity."""
    perplexity_tokens: int = 16_384
    """Tokens of the held-out codebase that each look scores; the evaluation scores all."""


@dataclass(frozen=True)
class Sft:
    """Supervised fine-tuning on imperfect demonstrations."""

    demonstrations: int = 1000
    """Episodes of the scripted agent."""
    epochs: int = 5
    """Passes over them."""
    depth_mix: tuple[float, float, float] = (0.3, 0.5, 0.2)
    """Shares of depth 0, 1 and 2 among their tasks; depth 0 needs the least teaching."""
    rows: int = 10
    """Packed rows of `training.long_length` tokens per optimiser step; a row holds about three episodes."""
    muon_lr: float = 0.005
    """Learning rate of Muon."""
    adamw_lr: float = 1e-3
    """Learning rate of AdamW."""
    noise: NoiseConfig = field(default_factory=lambda: NoiseConfig(wrong_body=0.25, invalid_call=0.15))
    """How imperfect the scripted agent is."""


@dataclass(frozen=True)
class Mtp:
    """Multi-token prediction."""

    layers: MTPConfig = field(default_factory=MTPConfig)
    """Shape of the layers."""
    tokens: int = 400_000
    """Tokens of the first distillation, on a frozen trunk cut from mid-CPT."""
    lr: float = 3e-3
    """AdamW's learning rate, there and in the joint phases."""
    muon_lr: float = 0.02
    """Muon's learning rate for the layers' matrices."""
    weight: float = 1.0
    """Weight of the distillation loss in the joint phases."""
    rl_every: int = 2
    """The layers follow the policy in every so many RL steps."""


@dataclass(frozen=True)
class Rl:
    """Dr. GRPO in the small world."""

    steps: int = 80
    """Optimiser steps; 0 leaves RL out."""
    prompts: int = 16
    """Groups per step (G); a prompt is never used twice."""
    rollouts: int = 8
    """Rollouts per group (N)."""
    lr: float = 1.5e-4
    """Adam's learning rate; 3e-4 drifts twice as far for the same reward, 1e-3 destroys the policy."""
    warmup: int = 5
    """Steps over which the learning rate rises."""
    decay: int = 40
    """Steps at the end, half of all at most, over which it falls."""
    max_len: int = 192
    """Context limit of a rollout, in tokens."""
    max_turns: int = 12
    """Turns after which the environment closes."""
    temperature: float = 1.0
    """Sampling temperature, in training and in evaluation."""
    clip_low: float = 0.2
    """PPO clip below one."""
    clip_high: float = 0.2
    """PPO clip above one."""
    budget_tokens: int = 40
    """Constant that stands for a rollout's length in the normaliser G·N·budget_tokens (Dr. GRPO divides by no length)."""
    payment: Payment = field(default_factory=Payment)
    """Prices of effort, invalid calls and drift."""
    depth_mix: tuple[float, float, float] = (0.3, 0.5, 0.2)
    """Shares of depth 0, 1 and 2 among RL tasks: harder ones are upsampled (report §4.1); evaluation keeps the world's mix."""
    shuffle_rewards: bool = False
    """Control: rewards are permuted over the batch, so that they say nothing about the rollout they are given to."""
    gate: float = 0.10
    """Sampled success after SFT below which RL is not begun: penalties would only teach it to stop at once."""


@dataclass(frozen=True)
class Evaluation:
    """Held-out measurements."""

    tasks: int = 300
    """Held-out tasks."""
    samples: int = 8
    """Rollouts of each (best-of-8)."""
    decode_tasks: int = 24
    """Tasks on which speculative and plain decoding are timed, at batch 1."""
    resamples: int = 2000
    """Bootstrap resamples, over tasks."""


@dataclass(frozen=True)
class Recipe:
    """The recipe at a size for two cores and ten minutes."""

    seed: int = 0
    """Seed of everything random."""
    data: Data = field(default_factory=Data)
    """Corpus, tokenizer, mix."""
    model: Config = field(default_factory=Config.tiny)
    """The network."""
    world: WorldConfig = field(default_factory=WorldConfig)
    """The small world."""
    training: Training = field(default_factory=Training)
    """Pretraining."""
    mtp: Mtp = field(default_factory=Mtp)
    """Multi-token prediction."""
    sft: Sft = field(default_factory=Sft)
    """Supervised fine-tuning."""
    rl: Rl = field(default_factory=Rl)
    """Reinforcement learning."""
    evaluation: Evaluation = field(default_factory=Evaluation)
    """Held-out measurements."""


def run(run: Run, config: Recipe) -> None:
    """All stages in order; those that an earlier process finished are passed over."""
    data(run, config)
    pretrain(run, config)
    distil(run, config)
    lengthen(run, config)
    finetune(run, config)
    reinforce(run, config)
    evaluation.evaluate(run, config, task_stream(config, "evaluation"))


# ---------------------------------------------------------------------------------------------------- data


STDLIB_EXCLUDE = ("site-packages", "test", "tests", "lib2to3", "idlelib", "turtledemo", "ensurepip", "__pycache__")


def task_stream(config: Recipe, use: str) -> Iterable[Task]:
    """Endless tasks for one use (demonstrations, rl, evaluation), each with its own generator; no key comes twice."""
    rng = random.Random(f"{config.seed}-{use}")
    mix = {"demonstrations": config.sft.depth_mix, "rl": config.rl.depth_mix}.get(use, config.world.depth_mix)
    world = replace(config.world, depth_mix=mix)
    seen: set[str] = set()
    while True:
        task = generate(rng, "heldout" if use == "evaluation" else "train", config=world)
        if task.key not in seen:
            seen.add(task.key)
            yield task


def data(run: Run, config: Recipe) -> None:
    """Reads the corpus, holds a codebase out, trains the tokenizer, packs both context lengths."""
    stage = run.stage("data", total=5, unit="steps")
    if stage.finished:
        return
    stage.restore()
    c, t = config.data, config.training
    if c.corpus is None:
        corpus = cpt.read_corpus(sysconfig.get_paths()["stdlib"], (".py",), STDLIB_EXCLUDE)
    else:
        corpus = cpt.read_corpus(c.corpus)
    try:
        name, train, held = cpt.hold_out_codebase(corpus, c.heldout_share)
    except ValueError as error:
        skipped = ", ".join(f"{n} {reason}" for reason, n in sorted(corpus.skipped.items())) or "none"
        raise RunError(f"corpus {c.corpus or 'of the standard library'}: {error} (skipped: {skipped}); "
                       "choose another folder with --corpus") from None  # fmt: skip
    folder = run.root / "data"
    folder.mkdir(exist_ok=True)
    stage.progress(1, files=len(corpus.files))

    rng = random.Random(f"{config.seed}-data")
    total = t.tokens + t.long_tokens
    world = list(itertools.islice(documents(rng, config.world), int(total * c.world_share / 55) + 64))
    spoken = [text for task, turns in itertools.islice(shown_episodes(config), 300) for _, text in transcript(task, turns)]
    tokenizer = cpt.train_tokenizer(
        itertools.chain((text[:20_000] for text in train.files.values()), world[:8000], spoken), c.vocab_size
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    stage.progress(2, vocabulary=tokenizer.get_vocab_size())

    end = tokenizer.token_to_id("<|endoftext|>")
    files = list(train.files.values())
    rng.shuffle(files)
    code = iter(code_pieces(tokenizer, files, total * (1 - c.world_share), t.long_length, end, rng))
    modules = iter([[*e.ids, end] for e in tokenizer.encode_batch(world)])
    stage.progress(3)
    paths = [folder / "tokenizer.json"]
    counts = {}
    for phase, tokens, length in (("short", t.tokens, t.length), ("long", t.long_tokens, t.long_length)):
        pieces = list(take(modules, tokens * c.world_share))
        pieces += take(code, tokens * (1 - c.world_share))
        ids, doc = cpt.pack(pieces, length, end)
        order = np.random.default_rng([config.seed, len(ids)]).permutation(len(ids))
        paths.append(folder / f"{phase}.npz")
        np.savez(paths[-1], ids=ids[order].astype(np.uint16), doc=doc[order].astype(np.int16))
        counts[phase] = int((doc >= 0).sum())
        stage.progress(4, tokens=counts[phase])
    paths.append(folder / "heldout.txt")
    paths[-1].write_text("\0".join(f"{n}\1{text}" for n, text in held.files.items()), encoding="utf-8")
    stage.log(1, files=len(corpus.files), bytes=corpus.bytes, **{f"{k}_tokens": v for k, v in counts.items()})
    stage.finish({
        "files": len(corpus.files), "bytes": corpus.bytes, "skipped": dict(sorted(corpus.skipped.items())),
        "tokens": sum(counts.values()), "vocab_size": tokenizer.get_vocab_size(), "world_documents": len(world),
        "heldout": {"name": name, "files": len(held.files), "bytes": held.bytes},
    }, paths)  # fmt: skip


def code_pieces(tokenizer, files: Iterable[str], tokens: float, length: int, end: int, rng: random.Random) -> list[list[int]]:
    """Shuffled pieces of at most `length` tokens, `tokens` in all, from the beginnings of files in the order given. No file
    gives more than 64 pieces: a large table or a manual of one project would otherwise be a phase's whole diet."""
    pieces: list[list[int]] = []
    for text in files:
        ids = [*tokenizer.encode(text[: 256 * length]).ids, end]
        pieces += [ids[i : i + length] for i in range(0, len(ids), length)][:64]
        tokens -= min(len(ids), 64 * length)
        if tokens <= 0:
            break
    rng.shuffle(pieces)
    return pieces


def take(pieces: Iterable[list[int]], tokens: float) -> Iterable[list[int]]:
    """Documents until they hold `tokens` tokens."""
    for piece in pieces:
        if tokens <= 0:
            return
        tokens -= len(piece)
        yield piece


def shown_episodes(config: Recipe) -> Iterable[tuple[Task, list[str]]]:
    """Endless demonstrations: tasks and the scripted agent's turns."""
    rng = random.Random(f"{config.seed}-scripted-agent")
    for task in task_stream(config, "demonstrations"):
        yield task, demonstration(task, rng, config.sft.noise)


def heldout_codebase(run: Run) -> cpt.Corpus:
    text = run.path("data", "heldout.txt").read_text(encoding="utf-8")
    return cpt.Corpus(dict(part.split("\1", 1) for part in text.split("\0")))


# ------------------------------------------------------------------------------------------- supervised phases


class Learner:
    """Trunk and MTP layers with their float32 masters and optimisers, and the state that a resumed stage needs."""

    def __init__(self, config: Recipe, model: Transformer, mtp: MTP | None, muon_lr: float, adamw_lr: float):
        t = config.training
        self.config, self.dtype = config, getattr(torch, t.dtype)
        self.trunk = Masters(model, self.dtype)
        self.mtp = Masters(mtp, self.dtype) if mtp is not None else None
        muon = t.optimizer == "muon"
        self.optimizers = optimizers(self.trunk.masters, muon_lr, adamw_lr, use_muon=muon)
        self.mtp_optimizers = optimizers(mtp, config.mtp.muon_lr, config.mtp.lr, use_muon=muon) if mtp is not None else []
        self.rates = [[g["lr"] for g in o.param_groups] for o in self.all_optimizers]

    @property
    def all_optimizers(self) -> list[torch.optim.Optimizer]:
        return [*self.optimizers, *self.mtp_optimizers]

    def schedule(self, factor: float) -> None:
        """Scale every learning rate by `factor`."""
        for optimizer, rates in zip(self.all_optimizers, self.rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor

    def state(self, step: int, **more) -> dict:
        return {
            "step": step, "trunk": self.trunk.masters.state_dict(), "optimizers": [o.state_dict() for o in self.all_optimizers],
            "mtp": self.mtp.masters.state_dict() if self.mtp else None, **more,
        }  # fmt: skip

    def restore(self, state: dict) -> int:
        """Take over a saved state; returns its step."""
        self.trunk.masters.load_state_dict(state["trunk"])
        self.trunk.copy_down()
        if self.mtp:
            self.mtp.masters.load_state_dict(state["mtp"])
            self.mtp.copy_down()
        for optimizer, saved in zip(self.all_optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        return state["step"]


def checkpoint(run: Run, name: str, trunk: Transformer, mtp: MTP | None) -> Path:
    """Writes checkpoints/NAME as a Hugging Face folder; MTP layers lie beside the weights in mtp.safetensors."""
    from safetensors.torch import save_file

    path = run.path("checkpoints", name)
    save_hf(trunk, path)
    (path / "tokenizer.json").write_bytes(run.path("data", "tokenizer.json").read_bytes())
    if mtp is not None:
        save_file({k: v.contiguous() for k, v in mtp.state_dict().items()}, str(path / "mtp.safetensors"))
    return path


def load_checkpoint(root: Path, config: Recipe, name: str, with_mtp: bool = True) -> tuple[Transformer, MTP | None]:
    """Trunk and, if the run folder `root` holds them, MTP layers, in float32."""
    from safetensors.torch import load_file

    path = root / "checkpoints" / name
    model = load_hf(path)
    if not with_mtp or not (path / "mtp.safetensors").exists():
        return model, None
    mtp = MTP(model.config, config.mtp.layers)
    mtp.load_state_dict(load_file(str(path / "mtp.safetensors")))
    return model, mtp


def language_of(root: Path) -> Language:
    from tokenizers import Tokenizer

    return Language(Tokenizer.from_file(str(root / "data" / "tokenizer.json")))


def rows_of(run: Run, phase: str) -> Callable[[np.ndarray], tuple[Tensor, Tensor, None]]:
    with np.load(run.path("data", f"{phase}.npz")) as packed:
        ids, doc = packed["ids"], packed["doc"]
    return ids.shape, lambda rows: (torch.from_numpy(ids[rows].astype(np.int64)), torch.from_numpy(doc[rows].astype(np.int64)), None)


def train(
    stage: Stage, config: Recipe, learner: Learner, batches: Callable[[int], tuple[Tensor, Tensor, Tensor | None]], steps: int,
    schedule: Callable[[int], float], phase: str, trunk: bool = True, look: Callable[[int], dict] | None = None,
) -> None:
    """`steps` optimiser steps on `batches(step)` → ids, doc, weight [B, T]; trains the trunk, the MTP layers, or both."""
    state = stage.restore()
    first = learner.restore(state) if state else 0
    seen = state["seen"] if state else 0
    model = learner.trunk.model
    for step in range(first, steps):
        ids, doc, weight = batches(step)
        learner.schedule(schedule(step))
        with torch.set_grad_enabled(trunk):
            out = model(ids, doc=doc, logits=False)
        figures: dict[str, float] = {}
        if trunk:
            loss, count = cpt.next_token_loss(model, out.hidden, ids, doc, weight)
            figures["loss"] = loss.item() / count
            loss = loss / count
            if out.router_logits:
                loss = loss + config.model.router_aux_loss_coef * load_balancing_loss(out.router_logits, out.experts)
            loss.backward()
        if learner.mtp is not None:
            distilled, count, stats = mtp_loss(learner.mtp.model, model, out, ids, doc, weight)
            (config.mtp.weight * distilled / count).backward()
            figures |= {"mtp_loss": distilled.item() / count, **stats}
            learner.mtp.step(learner.mtp_optimizers)
        if trunk:
            figures["grad_norm"] = learner.trunk.step(learner.optimizers).item()
        seen += int((doc >= 0).sum())
        look_at = look(step + 1) if look else {}
        stage.log(step + 1, tokens=seen, phase=phase, lr=schedule(step), **figures, **look_at)
        shown = {"loss": figures.get("loss", figures.get("mtp_loss"))} | {k: v for k, v in look_at.items() if k == "codebase_ppl"}
        stage.progress(step + 1, seen, **shown)
        if stage.due():
            stage.save(learner.state(step + 1, seen=seen), step + 1)


def perplexity_look(run: Run, config: Recipe, learner: Learner, steps: int) -> Callable[[int], dict]:
    """Codebase perplexity of the beginning of the held-out codebase, every so many steps and at the last."""
    language, codebase, t = language_of(run.root), heldout_codebase(run), config.training

    def look(step: int) -> dict:
        if step % t.perplexity_every and step != steps:
            return {}
        found = cpt.codebase_nll(learner.trunk.model, language.tokenizer, codebase, t.long_length, max_tokens=t.perplexity_tokens)
        return {"codebase_ppl": found.perplexity, "codebase_bpb": found.bits_per_byte}

    return look


def pretrain(run: Run, config: Recipe) -> None:
    """Short-context phase: warm-up and the stable part of the schedule; its end is "mid-CPT"."""
    t = config.training
    (rows, length), read = rows_of(run, "short")
    B = max(1, t.batch_tokens // length)
    steps = max(1, rows // B)
    stage = run.stage("cpt", total=steps)
    if stage.finished:
        return
    torch.manual_seed(config.seed)
    vocabulary = language_of(run.root).tokenizer.get_vocab_size()
    learner = Learner(config, Transformer(replace(config.model, vocab_size=vocabulary)), None, t.muon_lr, t.adamw_lr)
    train(stage, config, learner, lambda step: read(np.arange(step * B, min((step + 1) * B, rows))), steps,
          lambda step: cpt.wsd(step, 10 * steps, steps // 10, 0), "short", look=perplexity_look(run, config, learner, steps))  # fmt: skip
    path = checkpoint(run, "mid-cpt", learner.trunk.masters, None)
    stage.finish({"steps": steps, "parameters": learner.trunk.masters.config.parameters(),
                  "active_parameters": learner.trunk.masters.config.parameters(active=True)}, [path])  # fmt: skip


def distil(run: Run, config: Recipe) -> None:
    """MTP layers from scratch atop the frozen mid-CPT trunk, on the same data."""
    t = config.training
    (rows, length), read = rows_of(run, "short")
    B = max(1, t.batch_tokens // length)
    steps = max(1, min(rows // B, config.mtp.tokens // t.batch_tokens))
    stage = run.stage("mtp", total=steps)
    if stage.finished:
        return
    torch.manual_seed(config.seed + 1)
    model, _ = load_checkpoint(run.root, config, "mid-cpt")
    learner = Learner(config, model, MTP(model.config, config.mtp.layers), t.muon_lr, t.adamw_lr)
    train(stage, config, learner, lambda step: read(np.arange(step * B, min((step + 1) * B, rows))), steps,
          lambda step: cpt.wsd(step, steps, steps // 10, 0), "mtp", trunk=False)  # fmt: skip
    path = checkpoint(run, "mtp", learner.trunk.masters, learner.mtp.masters)
    stage.finish({"steps": steps, "parameters": sum(p.numel() for p in learner.mtp.masters.parameters())}, [path])


def lengthen(run: Run, config: Recipe) -> None:
    """Long-context phase, trunk and MTP layers together; the learning rate decays."""
    t = config.training
    (rows, length), read = rows_of(run, "long")
    B = max(1, t.batch_tokens // length)
    steps = max(1, rows // B)
    stage = run.stage("long", total=steps)
    if stage.finished:
        return
    learner = Learner(config, *load_checkpoint(run.root, config, "mtp"), t.muon_lr, t.adamw_lr)
    train(stage, config, learner, lambda step: read(np.arange(step * B, min((step + 1) * B, rows))), steps,
          lambda step: cpt.wsd(step, steps, 5, steps), "long", look=perplexity_look(run, config, learner, steps))  # fmt: skip
    path = checkpoint(run, "cpt", learner.trunk.masters, learner.mtp.masters)
    stage.finish({"steps": steps}, [path])


def finetune(run: Run, config: Recipe) -> None:
    """SFT on demonstrations, loss on the agent's own tokens; MTP layers go along."""
    s = config.sft
    language, length = language_of(run.root), config.training.long_length
    shown = [demonstration_tokens(language, *episode) for episode in itertools.islice(shown_episodes(config), s.demonstrations)]
    # Token and "is it the agent's own" travel through the packer as one number.
    packed, doc = cpt.pack([[2 * t + mine for t, mine in zip(*e, strict=True)] for e in shown], length, pad=0)
    B = min(s.rows, len(packed))
    per_epoch = len(packed) // B
    steps = per_epoch * s.epochs
    stage = run.stage("sft", total=steps)
    if stage.finished:
        return

    def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
        order = np.random.default_rng([config.seed, step // per_epoch]).permutation(len(packed))
        rows = order[step % per_epoch * B :][:B]
        both = torch.from_numpy(packed[rows].astype(np.int64))
        return both // 2, torch.from_numpy(doc[rows].astype(np.int64)), (both % 2).float()

    learner = Learner(config, *load_checkpoint(run.root, config, "cpt"), s.muon_lr, s.adamw_lr)
    train(stage, config, learner, batch, steps, lambda step: cpt.wsd(step, steps, 5, steps // 2), "sft")
    path = checkpoint(run, "sft", learner.trunk.masters, learner.mtp.masters)
    stage.finish({"steps": steps, "demonstrations": s.demonstrations}, [path])


# ------------------------------------------------------------------------------------------------------- RL


def reinforce(run: Run, config: Recipe) -> None:
    """Dr. GRPO: every step samples G·N rollouts of fresh tasks with the newest weights and takes one Adam step on them.

    The MTP layers keep learning from the policy's own rollouts, so that drafts follow it where it goes (ours: the report
    trains them in the long-context and SFT phases only)."""
    r, t = config.rl, config.training
    stage = run.stage("rl", total=max(r.steps, 1), unit="tokens")
    if stage.finished:
        return
    language = language_of(run.root)
    model, mtp = load_checkpoint(run.root, config, "sft")
    learner = Learner(config, model, mtp, 0.0, 0.0)
    learner.optimizers = [torch.optim.Adam(learner.trunk.masters.parameters(), lr=r.lr, betas=(0.9, 0.95), fused=True)]
    learner.rates = [[g["lr"] for g in o.param_groups] for o in learner.all_optimizers]
    reference = load_checkpoint(run.root, config, "sft", with_mtp=False)[0].to(learner.dtype)
    sampler = Sampler(learner.trunk.model, getattr(torch, t.sampler_dtype))

    state = stage.restore()
    first = learner.restore(state) if state else 0
    seen, consumed = (state["seen"], state["consumed"]) if state else (0, 0)
    if not state:
        success = gate(config, sampler, language)
        if success < r.gate:
            raise RunError(f"sampled success after SFT is {success:.3f}, below rl.gate={r.gate}: penalties would only teach the "
                           "policy to stop; train longer (--set training.tokens=…) or lower --set rl.gate=…")  # fmt: skip
    tasks = itertools.islice(task_stream(config, "rl"), consumed, None)
    for step in range(first, r.steps):
        learner.schedule(cpt.wsd(step, r.steps, r.warmup, min(r.decay, r.steps // 2)))
        sampler.load(learner.trunk.model, version=step)
        chosen = list(itertools.islice(tasks, r.prompts))
        generator = torch.Generator().manual_seed(hash_seed(config.seed, "rl", step))
        episodes = play(sampler, language, chosen, r.rollouts, r.max_len, r.max_turns, generator, r.temperature)
        figures = improve(config, learner, reference, episodes, step)
        consumed += len(chosen)
        seen += sum(len(e.rollout.tokens) for e in episodes)
        stage.log(step + 1, **figures)
        stage.progress(step + 1, seen, reward=figures["reward"], success=figures["success"])
        if stage.due():
            stage.save(learner.state(step + 1, seen=seen, consumed=consumed), step + 1)
    path = checkpoint(run, "final", learner.trunk.masters, learner.mtp.masters)
    stage.finish({"steps": r.steps, "prompts": consumed, "rollouts": consumed * r.rollouts, "tokens": seen}, [path])


def hash_seed(*parts) -> int:
    """A 63-bit seed from parts, the same in every process."""
    return random.Random("-".join(map(str, parts))).getrandbits(63)


def gate(config: Recipe, sampler: Sampler, language: Language) -> float:
    """Sampled success on 64 training tasks that RL will not use."""
    tasks = list(itertools.islice(task_stream(config, "gate"), 64))
    generator = torch.Generator().manual_seed(hash_seed(config.seed, "gate"))
    episodes = play(sampler, language, tasks, 4, config.rl.max_len, config.rl.max_turns, generator)
    return float(np.mean([e.verdict.tests for e in episodes]))


def improve(config: Recipe, learner: Learner, reference: Transformer, episodes: list, step: int) -> dict[str, float]:
    """One policy-gradient step on a batch of finished episodes; returns the figures of the batch."""
    r = config.rl
    G, N = r.prompts, r.rollouts
    paid = [pay(e, r.payment) for e in episodes]
    ids, mask, behavior = pad([e.rollout for e in episodes], multiple=32)
    lengths = torch.tensor([len(e.rollout.tokens) for e in episodes])
    # Micro-batches of like length waste little padding; few distinct shapes, because each new one costs its compilation.
    batches = [(rows, -(-int(lengths[rows].max()) // 32) * 32) for rows in lengths.argsort(stable=True).split(32)]
    drift = torch.zeros(len(episodes))
    for rows, T in batches:
        drift[rows] = reference_kl(reference, ids[rows, :T], mask[rows, :T], behavior[rows, :T])
    rewards = torch.tensor([p["reward"] for p in paid]) - r.payment.kl * drift
    if r.shuffle_rewards:
        generator = torch.Generator().manual_seed(hash_seed(config.seed, "shuffle", step))
        rewards = rewards[torch.randperm(len(rewards), generator=generator)]
    advantages = dr_grpo.group_advantages(rewards.view(G, N)).flatten()
    budget = float(G * N * r.budget_tokens)  # constant, so that the micro-batches' losses add up to the whole batch's

    model, total, gap, mtp_sum, mtp_count = learner.trunk.model, 0.0, 0.0, 0.0, 0.0
    for rows, T in batches:
        some, keep = ids[rows, :T], mask[rows, :T]
        out = model(some, logits=False)
        logp = model.logprob(out.hidden[:, :-1].flatten(0, 1), some[:, 1:].flatten()).view(len(rows), -1)
        loss = dr_grpo.policy_loss(logp, behavior[rows, 1:T], advantages[rows], keep[:, 1:], budget=budget,
                                   clip_low=r.clip_low, clip_high=r.clip_high)  # fmt: skip
        loss.backward()
        total += loss.item()
        gap += ((logp.detach() - behavior[rows, 1:T]) * keep[:, 1:]).abs().sum().item()
        if learner.mtp is not None and step % config.mtp.rl_every == 0:
            doc = torch.where(torch.arange(T) < lengths[rows, None], 0, -1)
            distilled, count, _ = mtp_loss(learner.mtp.model, model, out, some, doc, keep.float())
            (config.mtp.weight * distilled / mask.sum()).backward()
            mtp_sum, mtp_count = mtp_sum + distilled.item(), mtp_count + count
    norm = learner.trunk.step(learner.optimizers)
    if mtp_count:
        learner.mtp.step(learner.mtp_optimizers)

    verdicts = [e.verdict for e in episodes]
    own = mask.sum().item()

    def mean(values: Iterable[float]) -> float:
        values = list(values)
        return float(sum(values) / len(values))

    return {
        "reward": mean(rewards.tolist()), "success": mean(v.tests for v in verdicts),
        "best": mean(max(v.tests for v in verdicts[g * N : (g + 1) * N]) for g in range(G)),
        "tokens": own / len(episodes), "turns": mean(v.turns for v in verdicts),
        "invalid_calls": mean(v.invalid_calls for v in verdicts), "tested": mean(float(v.tested) for v in verdicts),
        "effort": mean(p["effort"] for p in paid), "kl": mean(drift.tolist()), "loss": total,
        "nll": -(behavior.sum().item() / own), "mismatch": gap / own, "grad_norm": norm.item(),
        "finished": mean(float(e.rollout.finished) for e in episodes), **({"mtp_loss": mtp_sum / mtp_count} if mtp_count else {}),
    }  # fmt: skip
