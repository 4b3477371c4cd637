"""Does RL in the harness teach a language model? SmolLM2-135M on packages that are made up, but whose files, tools,
sandboxes, tests and grader are those of real ones (`environments/tasks/generated.py`).

    etude figure real-agent             hours on two cores; needs `make test-real`'s packages, Linux and bubblewrap
    etude figure real-agent --quick     a tiny network that learns nothing

Each training begins with the same checkpoint: SFT on scripted episodes, then Dr. GRPO on tasks of the training
packages, and as a control the same with rewards permuted over the rollouts of a step, which then say nothing about
them. A quarter of the compositions of which functions are made is held out; the evaluation is on packages made of these
alone. Only the last blocks of the network are trained, since the figure is made on two cores.

What to look for: success on held-out tasks after RL minus after SFT, sampled and greedy. Intervals are bootstrapped
over held-out packages, of means over trainings; every training by itself must show the effect, too. The level of the
tasks is generated: the figure says nothing about real packages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from environments.sandbox.cache import cache_folder
from environments.tasks.build import build_tasks
from environments.tasks.generated import generated_package
from environments.tasks.recipe import make_recipe
from environments.tasks.task_cache import save_task
from kit.disk import atomic_write, read_lines
from kit.process import cores, keep_freed_memory, map_on_cores
from kit.runs import Run
from kit.settings import RunError
from recipe.packages.chat_format import load_chat_format, make_chaining
from recipe.packages.data import pack_rows, prepare_tasks
from recipe.packages.evaluation import evaluate_policy, interval, save_episodes
from recipe.packages.settings import PackageSettings
from recipe.packages.tasks import PackageTasks, make_schemas
from recipe.small.conversations import batches, kept_rows
from ref import cpt, sft
from ref.engine.continuous import make_sampler
from ref.engine.sampler import Sampler
from ref.network import Transformer, load_hf
from ref.network.masters import Masters
from ref.rl import Done, Settings, Step, train
from ref.rollout import Limits, hash_seed
from sims.base_evaluations import packages as models
from sims.experiment import above, below, claim

__all__ = ["Experiment", "LastBlocks", "experiment", "make_tiny_checkpoint", "picture"]


@dataclass(frozen=True)
class Experiment:
    """Model, tasks, and lengths of the trainings."""

    model: str = "smollm2-135m"
    """Name of a model that pip brings, or the folder of a checkpoint."""
    packages: int = 110
    """Generated packages to train on, about seven tasks each."""
    heldout_packages: int = 20
    """Generated packages to evaluate on, whose compositions no other package has."""
    blocks: int = 8
    """Blocks that are trained, from the last one; 0: all."""
    trainings: int = 3
    """Trainings, which differ in their seed; each has a control."""
    demonstrations: int = 700
    """Scripted episodes that SFT learns from."""
    styles: tuple[str, ...] = ("direct",)
    """Their styles."""
    epochs: int = 1
    """Passes over them."""
    row_tokens: int = 3072
    """Tokens of a packed row in SFT, about four episodes."""
    rows: int = 1
    """Packed rows in a step of SFT."""
    sft_lr: float = 3e-4
    """Learning rate of Adam in SFT."""
    rl: Settings = Settings(
        steps=24,
        prompts=4,
        rollouts=8,
        lr=3e-5,
        warmup=3,
        decay=8,
        max_len=1024,
        turn_tokens=192,
        budget_tokens=200,
        micro_tokens=2048,
    )
    """RL."""
    tasks: int = 40
    """Held-out tasks of an evaluation."""
    samples: int = 4
    """Rollouts of each, besides a greedy one."""
    dtype: str = "bfloat16"
    """Of training and sampling; what is trained has float32 master weights."""
    turns: int = 8
    """Turns of an episode."""
    resamples: int = 2000
    """Bootstrap resamples, over held-out packages."""
    seed: int = 0
    """Of the first training."""

    @classmethod
    def quick(cls) -> Experiment:
        rl = replace(cls.rl, steps=1, prompts=1, rollouts=2, max_len=1000, turn_tokens=16)
        c = cls(model="", packages=1, heldout_packages=1, trainings=1, demonstrations=2, epochs=1, rows=1, rl=rl)
        return replace(
            c, tasks=1, samples=1, turns=1, resamples=50, dtype="float32", sft_lr=1e-3, row_tokens=rl.max_len
        )

    @property
    def package_settings(self) -> PackageSettings:
        """The tasks."""
        return PackageSettings(
            demonstrations=self.demonstrations, styles=self.styles, turns=self.turns, tools=TOOLS, min_valid_calls=0.0
        )


TOOLS = ("read", "edit", "shell", "finish")
"""Few, since their descriptions take a share of each context."""
ARMS = ("rl", "control")
SLOTS = 32
"""Rollouts that are sampled at once, at most."""
MEASURES = ("success", "greedy", "valid_calls", "finished", "tokens", "turns")


class LastBlocks:
    """A `ref.rl.Trainer` of the last blocks of a network, with master weights and Adam; all else stays."""

    mtp_weight = 0.0

    def __init__(self, model: Transformer, blocks: int, lr: float, dtype: torch.dtype):
        if blocks:
            for parameter in model.parameters():
                parameter.requires_grad_(False)
            for block in list(model.layers)[-blocks:]:
                block.requires_grad_(True)
        self.weights, self.lr = Masters(model, dtype), lr
        self.trained = {name: p for name, p in self.weights.masters.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.Adam(self.trained.values(), lr=lr, betas=(0.9, 0.95), fused=True)

    @property
    def model(self) -> Transformer:
        return self.weights.model

    def drafts(self, step: int) -> None:
        return None

    def apply(self, result: Step | None, rate: float) -> dict[str, float]:
        """Takes one optimiser step: on the gradients of a step of RL, or on those that lie in the model."""
        self.optimizer.param_groups[0]["lr"] = self.lr * rate
        norm = self.weights.step([self.optimizer], gradients=None if result is None else result.gradients)
        return {"grad_norm": norm.item()}

    def state(self, step: int, weights_only: bool = False) -> dict[str, Any]:
        """What was trained so far."""
        weights = {name: p.detach().clone() for name, p in self.trained.items()}
        return {"step": step, "weights": weights} | ({} if weights_only else {"adam": self.optimizer.state_dict()})

    def restore(self, state: Mapping[str, Any]) -> int:
        """Loads a state; returns its step."""
        with torch.no_grad():
            for name, values in state["weights"].items():
                self.trained[name].copy_(values)
        self.weights.copy_down()
        if "adam" in state:
            self.optimizer.load_state_dict(state["adam"])
        return state["step"]


@dataclass(frozen=True)
class Setup:
    """What all trainings share."""

    config: Experiment
    root: Path
    folder: Path
    """Of the checkpoint."""
    tasks: PackageTasks
    limits: Limits

    def trainer(self, lr: float, weights: Path | None = None) -> LastBlocks:
        """The checkpoint, or one whose last blocks were trained (`save_weights`)."""
        trainer = LastBlocks(load_hf(self.folder), self.config.blocks, lr, getattr(torch, self.config.dtype))
        if weights is not None:
            trainer.restore(torch.load(weights, weights_only=True))
        return trainer

    def sampler(self, model: Transformer) -> Sampler:
        return make_sampler("continuous", model, getattr(torch, self.config.dtype), SLOTS)


def make_recipes(run: Run, c: Experiment) -> Path:
    """Makes the tasks of the generated packages. Returns the folder of their recipes."""
    names = [(number, False) for number in range(c.packages)] + [(number, True) for number in range(c.heldout_packages)]
    stage, folder = run.stage("recipes", total=len(names), unit="packages"), run.path("recipes", "x").parent
    if not stage.finished:
        stage.restore()
        paths = []
        for done, (number, heldout) in enumerate(names, 1):
            spec = f"generated:{'heldout:' * heldout}{number}"
            path = folder / f"{spec.replace(':', '-')}.json"
            if not path.exists():
                package, unused, result, _ = build_tasks(
                    generated_package(number, heldout), cores(), 60.0, "bubblewrap"
                )
                for task in result.tasks:  # so that they are not made again where a run loads the recipe
                    save_task(cache_folder() / "tasks", task, package)
                atomic_write(path, json.dumps(make_recipe(spec, package, unused, result), indent=1) + "\n")
            paths.append(path)
            stage.progress(done)
        stage.finish({"packages": len(names)}, paths)
    return folder


def prepare(run: Run, c: Experiment) -> PackageSettings:
    """Tasks and conversations, as a full run on packages prepares them."""
    settings = replace(c.package_settings, recipes=str(make_recipes(run, c)))
    prepare_tasks(run, settings, checkpoint_of(run, c), None, c.rl.max_len)
    pack_rows(run, None, c.row_tokens)
    return settings


def make_setup(run: Run, c: Experiment, settings: PackageSettings) -> Setup:
    """The setup of this process, with sandboxes of its own."""
    folder = checkpoint_of(run, c)
    chat_format = load_chat_format(run.root / "data", make_schemas(settings))
    tasks = PackageTasks(settings, run.root, chat_format, c.seed)
    limits = replace(c.rl.limits(make_chaining(settings, chat_format, c.rl.max_len)), turns=c.turns)
    return Setup(c, run.root, folder, tasks, limits)


def checkpoint_of(run: Run, c: Experiment) -> Path:
    """The folder of the model. Raises RunError."""
    if c.model in models.PACKAGES:
        return models.folder_of(c.model, run.path("models", "x").parent)
    if not (Path(c.model) / "tokenizer.json").is_file():
        raise RunError(f"model={c.model} is neither one of {', '.join(models.PACKAGES)} nor the folder of a checkpoint")
    return Path(c.model)


def fine_tune(run: Run, setup: Setup, number: int) -> Path:
    """SFT of one training. Returns the file with the blocks that were trained."""
    c, path = setup.config, run.path("weights", f"sft-{number}.pt")
    packed = kept_rows(setup.root)
    per_epoch, batch = batches(packed, c.rows, [c.seed + number])
    steps = per_epoch * c.epochs
    stage = run.stage(f"sft-{number}", total=steps)
    if stage.finished:
        return path
    trainer, state, tokens = setup.trainer(c.sft_lr), stage.restore(), 0
    first = trainer.restore(state) if state else 0
    for step in range(first, steps):
        ids, doc, weight = batch(step)
        n_tokens, loss = sft.count_learned(doc, weight), 0.0
        for row in range(len(ids)):
            part = slice(row, row + 1)
            part_loss, _ = sft.sft_loss(trainer.model, ids[part], doc[part], weight[part], n_tokens)
            part_loss.backward()
            loss += part_loss.item()
        trainer.apply(None, cpt.wsd(step, steps, min(5, steps), steps // 2))
        tokens += int((doc >= 0).sum())
        stage.log(step + 1, loss=loss)
        stage.progress(step + 1, tokens, loss=loss)
        if stage.due():
            stage.save(trainer.state(step + 1), step + 1)
    torch.save(trainer.state(steps, weights_only=True), path)
    stage.finish({"steps": steps, "loss": loss, "tokens": tokens}, [path])
    return path


def reinforce(run: Run, setup: Setup, number: int, arm: str) -> Path:
    """RL of one training, or its control. Returns the file with the blocks that were trained."""
    c, name = setup.config, f"{arm}-{number}"
    path = run.path("weights", f"{name}.pt")
    stage = run.stage(name, total=c.rl.steps)
    if stage.finished:
        return path
    trainer, state = setup.trainer(c.rl.lr, run.root / "weights" / f"sft-{number}.pt"), stage.restore()
    first, tokens = (trainer.restore(state), state["tokens"]) if state else (0, 0)

    def observe(done: Done) -> None:
        nonlocal tokens
        valid = [rollout for rollout in done.rollouts if not rollout.failure]
        tokens += sum(len(segment.tokens) for rollout in valid for segment in rollout.chain.segments)
        groups = [done.rollouts[at : at + c.rl.rollouts] for at in range(0, len(done.rollouts), c.rl.rollouts)]
        rewards = [{rollout.reward for rollout in group if not rollout.failure} for group in groups]
        means = {key: float(np.mean([rollout.logged[key] for rollout in valid])) for key in valid[0].logged}
        stage.log(
            done.step,
            reward=float(done.result.rewards.nanmean()),
            spread=sum(len(group) > 1 for group in rewards) / len(groups),
            loss=done.result.loss,
            nll=done.result.nll,
            mismatch=done.result.gap.abs().mean().item(),
            failed=len(done.rollouts) - len(valid),
            **means,
            **done.metrics,
        )
        stage.progress(done.step, tokens, success=means["success"], reward=float(done.result.rewards.nanmean()))
        if stage.due():
            stage.save(trainer.state(done.step) | {"tokens": tokens}, done.step)

    train(
        replace(c.rl, shuffle_rewards=arm == "control"),
        trainer,
        setup.sampler(trainer.model),
        setup.tasks,
        setup.tasks.chat_format,
        setup.limits,
        seed=c.seed + number,
        name=name,
        first=first,
        observe=observe,
    )
    torch.save(trainer.state(c.rl.steps, weights_only=True), path)
    stage.finish({"steps": c.rl.steps, "tokens": tokens}, [path])
    return path


def measure(run: Run, setup: Setup, name: str, weights: Path | None) -> dict[str, Any]:
    """Held-out tasks by one policy: measures by task. Episodes of the first training are kept."""
    c = setup.config
    selected = setup.tasks.heldout_tasks(c.tasks)
    stage = run.stage(f"eval-{name}", total=len(selected) * (c.samples + 1), unit="rollouts")
    if stage.finished:
        return stage.result()
    stage.restore()
    sampler = setup.sampler(setup.trainer(0.0, weights).model)
    seed = hash_seed(c.seed, "real-agent", name)
    grids, greedy, failures = evaluate_policy(
        sampler, setup.tasks, selected, c.samples, setup.limits, c.rl.temperature, seed, stage.progress
    )
    if failures:
        raise RunError(
            f"{len(failures)} rollouts of the evaluation have no result, the first one because {failures[0]}; "
            f"resume the run"
        )
    folder = run.root / "episodes" / name
    save_episodes(folder, setup.tasks, greedy[:8], f"{c.model} {name}")
    packages = [setup.tasks.package_of[task.key] for task in selected]
    values = {key: (grids[key].mean(1) if grids[key].ndim > 1 else grids[key]).tolist() for key in MEASURES}
    return stage.finish({"packages": packages, **values}, [folder])


def play_part(run: Run, c: Experiment, settings: PackageSettings, part: tuple[str, int]) -> dict[str, Any]:
    """SFT, RL or its control in one training, and the evaluation of what it ends with: name and number of the part. In
    the record's run each part has a process and a core."""
    keep_freed_memory()
    (name, number), setup = part, make_setup(run, c, settings)
    if name == "checkpoint":
        return measure(run, setup, name, None)
    weights = fine_tune(run, setup, number) if name == "sft" else reinforce(run, setup, number, name)
    return measure(run, setup, f"{name}-{number}", weights)


def experiment(run: Run, config: Experiment) -> dict:
    """All trainings, evaluations, and the verdicts."""
    c = (
        config
        if config.model
        else replace(config, model=str(make_tiny_checkpoint(run.path("models", "tiny", "x").parent)))
    )
    play = partial(play_part, run, c, prepare(run, c))
    results: dict[str, dict[str, Any]] = {}
    numbers = range(c.trainings)
    for parts in (
        [("checkpoint", 0), *(("sft", number) for number in numbers)],
        [(arm, number) for number in numbers for arm in ARMS],  # each from the SFT of its training
    ):
        for (name, number), result in zip(parts, map_on_cores(play, parts), strict=True):
            results[name if name == "checkpoint" else f"{name}-{number}"] = result
    rows = []
    for name, result in results.items():
        arm, _, number = name.partition("-")
        means = {key: float(np.mean(result[key])) for key in MEASURES}
        rows.append(
            {"policy": arm, "training": int(number) if number else "", "tasks": len(result["packages"]), **means}
        )
    curves = {
        f"{arm}-{number}": [
            {key: line[key] for key in ("step", "success", "reward", "spread") if key in line}
            for line in read_lines(run.root / "metrics" / f"{arm}-{number}.jsonl")
        ]
        for number in range(c.trainings)
        for arm in ARMS
    }
    return {"rows": rows, "claims": verdicts(results, c), "curves": curves, "measures": results}


def gains(results: Mapping[str, dict], arm: str, measure_name: str, c: Experiment) -> np.ndarray:
    """[trainings, tasks]: after an arm minus after SFT."""
    return np.array(
        [
            np.subtract(results[f"{arm}-{number}"][measure_name], results[f"sft-{number}"][measure_name])
            for number in range(c.trainings)
        ]
    )


def verdicts(results: Mapping[str, dict], c: Experiment) -> list[dict]:
    """RL raises success on held-out packages, sampled and greedy, and more than its control; the control does not."""
    packages = results["checkpoint"]["packages"]
    claims = []

    def add(name: str, says: str, differences: np.ndarray, rule: dict, sign: int, note: str) -> None:
        mean = interval(differences.mean(0), packages, c.resamples)
        by_training = differences.mean(1)
        claims.append(
            claim(
                name,
                says,
                "§4",
                mean["value"],
                rule,
                (mean["low"], mean["high"]),
                "success on held-out tasks, after minus before",
                f"95% bootstrap over {len({*packages})} generated packages of {len(packages)} tasks, means of "
                f"{c.trainings} trainings; trainings by themselves: "
                f"{', '.join(f'{value:+.3f}' for value in by_training)}. {note}",
                {"every training by itself": bool((sign * by_training > 0).all())},
            )
        )

    def average(name: str, measure_name: str) -> float:
        return float(np.mean([results[f"{name}-{number}"][measure_name] for number in range(c.trainings)]))

    for key, word in (("success", "sampled"), ("greedy", "greedy")):
        note = f"Success {average('sft', key):.3f} → {average('rl', key):.3f}; the level of the tasks is generated"
        add(f"rl-{word}", f"RL raises {word} success on held-out tasks", gains(results, "rl", key, c), above(), 1, note)
    difference = gains(results, "rl", "success", c) - gains(results, "control", "success", c)
    note = f"The control alone: {average('sft', 'success'):.3f} → {average('control', 'success'):.3f}"
    add("beyond-control", "the gain is more than that of permuted rewards", difference, above(), 1, note)
    valid = np.array([results[f"sft-{number}"]["valid_calls"] for number in range(c.trainings)])
    note = (
        f"Valid calls before SFT {float(np.mean(results['checkpoint']['valid_calls'])):.3f}, after SFT "
        f"{float(valid.mean()):.3f}, after RL {average('rl', 'valid_calls'):.3f}"
    )
    claims.append(
        claim("calls", "after SFT calls are valid", "§3.1", float(1 - valid.mean()), below(0.05), None, "share", note)
    )
    return claims


def make_tiny_checkpoint(folder: Path) -> Path:
    """Writes a network that has learned nothing, with a tokenizer of ChatML's tokens, for --quick."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from ref.network import Config, save_hf

    if (folder / "tokenizer.json").exists():
        return folder
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [data.decode() for number in range(10) for data in generated_package(number).files.values()]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=1000, special_tokens=control, initial_alphabet=alphabet)
    )
    shape = Config.tiny(
        tokenizer.get_vocab_size(),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=0,
        intermediate_size=32,
        max_position_embeddings=1024,
    )
    torch.manual_seed(0)
    save_hf(Transformer(shape), folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def picture(results: dict, path: Path) -> None:
    """Left: success of the policies on held-out tasks. Right: success of the rollouts along RL."""
    from kit.plots import COLOURS, GREY, save, sheet

    figure, (left, right) = sheet(2, "RL of a 135M model on generated packages")
    policies = ("checkpoint", "sft", "rl", "control")
    for offset, (key, label) in enumerate((("success", "sampled"), ("greedy", "greedy"))):
        for at, policy in enumerate(policies):
            values = [row[key] for row in results["rows"] if row["policy"] == policy]
            x = at + 0.36 * (offset - 0.5)
            left.bar(x, np.mean(values), 0.34, color=COLOURS[offset], label=label if not at else None)
            left.plot([x] * len(values), values, "o", color=GREY, markersize=4)
    left.set_xticks(range(len(policies)), ["as it came", "after SFT", "after RL", "control"])
    left.set(ylabel="share of held-out tasks", title="Success (dots: trainings)", ylim=(0, 1))
    left.legend(frameon=False)
    for name, lines in results["curves"].items():
        is_control = name.startswith("control")
        steps, values = [line["step"] for line in lines], [line["success"] for line in lines]
        label = {"rl-0": "RL", "control-0": "control"}.get(name)
        right.plot(steps, values, color=GREY if is_control else COLOURS[2], linewidth=1.2, label=label)
    right.set(xlabel="RL step", ylabel="share of rollouts", title="Success on training tasks", ylim=(0, 1))
    right.legend(frameon=False)
    save(figure, path)
