"""Weight sync along real RL steps: how few weights change, whether the law says so, what a difference costs, and a
chain of versions.

    etude figure weight-sync            ten minutes; the policy of runs/small after SFT (make small)
    etude figure weight-sync --quick

Training runs of RL from the end of SFT, float32 masters under bfloat16 weights, in the recipe's world: AdamW at three
learning rates, and Muon with updates of the same size (root mean square) as the smallest and the largest of them; three
seeds each. After every step the bfloat16 weights are published (`ref/weight_sync.py`). One reader follows every
version, another comes for the last one only. Both are compared with the trainer's weights bit for bit.

The same two snapshots of every step are also coded as others code them, each under zstd level 1: XOR of all bits; index
and new value of each changed weight, four and two bytes. The entropy is that of independent positions and steps: n·H(p)
+ C·H(step) bits.

Rules were written before anything was measured. A training run gives one number, the mean over its steps; intervals are
Student's t over training runs. The law's rule is on the worst training run of all arms.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import zstandard
from torch import Tensor

from kit.disk import read_lines
from kit.process import one_thread
from kit.runs import Run
from kit.statistics import student
from recipe.small.demonstrations import context
from recipe.small.learner import Learner, language_of, load_checkpoint
from recipe.small.reinforcement import CORES
from recipe.small.settings import Recipe
from recipe.small.tasks import MicroTasks
from ref.engine.continuous import ContinuousSampler
from ref.muon import Muon
from ref.network import Transformer
from ref.rl import Done, MonitorSettings, train
from ref.weight_sync import Reader, Writer, changed_share, encode_delta, parts
from sims.experiment import above, at_most, below, claim
from sims.policies import agent

__all__ = ["Experiment", "experiment", "picture"]

SOURCE, SPARSE = "§6.2", "§6.2; arXiv:2602.03839"
MERGE_SPAN = 8
"""Versions that a merged delta spans."""


@dataclass(frozen=True)
class Experiment:
    """Sizes of the training runs."""

    run: str = "runs/small"
    """A finished run of the recipe (empty: first run a tiny recipe that has learned nothing)."""
    lrs: tuple[float, ...] = (1e-6, 1e-5, 1e-4)
    """Learning rates of AdamW; the first is the one that claims are about."""
    muon: tuple[float, ...] = (1e-6, 1e-4)
    """Root mean square of Muon's updates."""
    steps: int = 20
    """RL steps of each training run."""
    prompts: int = 6
    """Groups per step."""
    rollouts: int = 4
    """Rollouts per group."""
    seeds: int = 3
    """Training runs of each arm, two or more."""
    seed: int = 0
    """Seed of all random numbers."""

    def __post_init__(self):
        if self.seeds < 2 or not self.lrs or self.steps < MERGE_SPAN:
            raise ValueError(
                f"seeds must be at least 2, lrs must not be empty, and steps at least {MERGE_SPAN}; "
                f"got {self.seeds}, {self.lrs}, {self.steps}"
            )

    @classmethod
    def quick(cls) -> "Experiment":
        return cls(run="", lrs=(1e-6, 1e-4), muon=(1e-6,), steps=8, prompts=2, rollouts=2, seeds=2)

    @property
    def arms(self) -> list[tuple[str, float]]:
        """Optimiser and size of its updates."""
        return [("adamw", lr) for lr in self.lrs] + [("muon", lr) for lr in self.muon]


def compressed_size(*streams: np.ndarray) -> int:
    """Bytes of these streams under zstd level 1."""
    return sum(len(zstandard.ZstdCompressor(level=1).compress(np.ascontiguousarray(x).tobytes())) for x in streams)


def entropy(counts: np.ndarray) -> float:
    """Bits of all symbols together, by their own frequencies."""
    nonzero_counts = counts[counts > 0]
    return float(-(nonzero_counts * np.log2(nonzero_counts / nonzero_counts.sum())).sum())


def sizes(old: Tensor, new: Tensor) -> dict[str, float]:
    """Changed weights between two flat versions, and bytes of the codings to compare with."""
    positions, steps = encode_delta(old, new)
    before, after = (x.view(torch.int16).numpy() for x in (old, new))
    index = positions.numpy()
    return {
        "weights": len(old),
        "changed": len(index),
        "ones": float((steps.abs() == 1).double().mean()) if len(index) else 1.0,
        "xor": compressed_size(before ^ after),
        "index": compressed_size(index.astype(np.uint32), after[index]),
        "entropy": (
            entropy(np.array([len(index), len(old) - len(index)]))
            + entropy(steps.unique(return_counts=True)[1].numpy())
        )
        / 8,
    }


def learner_of(c: Experiment, recipe: Recipe, model: Transformer, optimizer: str, lr: float) -> Learner:
    """AdamW at the learning rate for all weights; or Muon for matrices, each with updates whose root mean square is
    `lr`: η/√n for n inputs."""
    learner = Learner(recipe, model, None, lr, lr)
    for torch_optimizer in learner.optimizers:
        if isinstance(torch_optimizer, Muon):
            matrices = [p for group in torch_optimizer.param_groups for p in group["params"]]
            torch_optimizer.param_groups = [
                {**torch_optimizer.param_groups[0], "params": [p], "lr": lr * p.shape[-1] ** 0.5} for p in matrices
            ]
    learner.rates = [[group["lr"] for group in torch_optimizer.param_groups] for torch_optimizer in learner.optimizers]
    return learner


def flat(model: Transformer) -> Tensor:
    return torch.cat([part.bits() for part in parts(model)])


def training(run: Run, c: Experiment, root: Path, recipe: Recipe, arm: tuple[str, float], number: int) -> list[dict]:
    """One training run: a row for each of its steps."""
    optimizer, lr = arm
    stage = run.stage(f"{optimizer}-{lr:g}-{number}", total=c.steps, unit="versions")
    if stage.finished:
        return read_lines(stage.metrics_path)
    stage.restore()
    arm_recipe = replace(
        recipe,
        seed=recipe.seed + 1000 * c.seed + number,
        training=replace(recipe.training, optimizer=optimizer, dtype="bfloat16"),
        rl=replace(
            recipe.rl,
            steps=c.steps,
            prompts=c.prompts,
            rollouts=c.rollouts,
            warmup=0,
            decay=0,
            world="memory",
            monitor=MonitorSettings(on=False),
        ),
    )
    language = language_of(root)
    learner = learner_of(c, arm_recipe, load_checkpoint(root, recipe, "sft", with_mtp=False)[0], optimizer, lr)
    trainer, reference = learner.model, load_checkpoint(root, recipe, "sft", with_mtp=False)[0].to(learner.dtype)
    sampler = ContinuousSampler(trainer, getattr(torch, recipe.training.sampler_dtype))
    store: dict[str, bytes] = {}
    writer = Writer(store, anchor_every=c.steps + 1, merge_every=MERGE_SPAN)
    followers = [Transformer(trainer.config).to(learner.dtype) for _ in range(2)]
    follower, late_reader = (
        Reader(store, parts(model), name) for model, name in zip(followers, ("follower", "late"), strict=True)
    )

    def publish(version: int) -> dict[str, int]:
        links = writer.publish(version, parts(trainer))["links"]
        return {link["kind"]: sum(shard["bytes"] for shard in link["shards"]) for link in links}

    anchor = publish(0)["anchor"]
    for reader in (follower, late_reader):
        reader.fetch()
        reader.swap()

    def weights() -> tuple[Tensor, Tensor]:
        """Masters and what is computed with, each as one vector."""
        return torch.cat([p.detach().flatten() for p in learner.trunk.masters.parameters()]), flat(trainer)

    last_weights = [weights()]

    def observe(done: Done) -> None:
        (masters, old), current_weights = last_weights[0], weights()
        last_weights[0] = current_weights
        updates, new, sent_bytes = current_weights[0] - masters, current_weights[1], publish(done.step)
        follower.fetch()
        follower.swap()
        readers = [follower]
        if done.step == c.steps:
            late_reader.fetch()
            late_reader.swap()
            readers.append(late_reader)
        is_exact = all(
            torch.equal(flat(followers[(follower, late_reader).index(reader)]).view(torch.int16), new.view(torch.int16))
            for reader in readers
        )
        row = {
            "arm": optimizer,
            "lr": lr,
            "seed": number,
            "version": done.step,
            **sizes(old, new),
            "law": changed_share(masters, updates),
        }
        row |= {
            "update": updates.double().square().mean().sqrt().item(),
            "delta": sent_bytes["delta"],
            "merged": sent_bytes.get("merged"),
            "anchor": anchor,
        }
        stage.log(
            done.step,
            **row,
            exact=float(is_exact),
            success=float(np.mean([rollout.metrics["tests"] for rollout in done.rollouts])),
        )
        stage.progress(done.step, unchanged=1 - row["changed"] / row["weights"])

    tasks, limits = MicroTasks(arm_recipe, language), arm_recipe.rl.limits(context(language, arm_recipe))
    with one_thread():
        train(
            arm_recipe.rl,
            learner,
            sampler,
            tasks,
            language,
            limits,
            reference=reference,
            seed=arm_recipe.seed,
            name="weight-sync",
            observe=observe,
            map_fn=CORES,
        )
    stage.finish({"versions": c.steps})
    return read_lines(stage.metrics_path)


def experiment(run: Run, config: Experiment) -> dict:
    """All training runs, and the verdicts."""
    c, (root, recipe) = config, agent(run, config.run, config.seed)
    rows = [row for number in range(c.seeds) for arm in c.arms for row in training(run, c, root, recipe, arm, number)]
    table = [summary(run_rows) for arm in c.arms for run_rows in of_arm(rows, c, arm)]
    return {"rows": table, "claims": verdicts(c, rows, table), "steps": rows}


def of_arm(rows: list[dict], c: Experiment, arm: tuple[str, float]) -> list[list[dict]]:
    """The rows of each training run of an arm."""
    return [
        [row for row in rows if (row["arm"], row["lr"], row["seed"]) == (*arm, number)] for number in range(c.seeds)
    ]


def summary(steps: list[dict]) -> dict:
    """One training run: means over its steps, weighted as the bytes are."""

    def total(key: str) -> float:
        return float(sum(row[key] for row in steps))

    spans = [row for row in steps if row["merged"] is not None]
    single = sum(
        sum(row["delta"] for row in steps if span["version"] - MERGE_SPAN < row["version"] <= span["version"])
        for span in spans
    )
    changed_weights, raw_bytes = total("changed"), 2 * total("weights")
    return {
        **{key: steps[0][key] for key in ("arm", "lr", "seed")},
        "steps": len(steps),
        "update": total("update") / len(steps),
        "unchanged": 1 - changed_weights / total("weights"),
        "changed": changed_weights / total("weights"),
        "law": total("law") / len(steps),
        "ones": total("ones") / len(steps),
        **{f"{key}_bits": 8 * total(key) / max(changed_weights, 1) for key in ("delta", "xor", "index", "entropy")},
        **{f"{key}_times": raw_bytes / total(key) for key in ("delta", "xor", "index")},
        "share": total("delta") / raw_bytes,
        "of_xor": total("delta") / total("xor"),
        "merged": single / sum(row["merged"] for row in spans),
        "anchor_share": steps[0]["anchor"] / (2 * steps[0]["weights"]),
        "other_bits": len(steps) - total("exact"),
    }


def verdicts(c: Experiment, rows: list[dict], table: list[dict]) -> list[dict]:
    """Rules: 98% of the weights keep their bits if the interval is above 98%; a difference is a fiftieth of the weights
    if the interval is below 1.98%, the report's share; a changed weight costs at most 15 bits, and a delta at most 0.6
    of XOR's, if the intervals are below; merging saves if the interval of eight deltas over a merged one is above one.
    The law's share is right within a twentieth of it in every training run. A chain is exact if no version of any
    training run has another bit, in a reader that follows or in one that comes late."""

    def select_arm(arm: tuple[str, float]) -> list[dict]:
        return [row for row in table if (row["arm"], row["lr"]) == arm]

    first_rows = select_arm(("adamw", c.lrs[0]))
    setting_text = f"AdamW at {c.lrs[0]:g}, {c.seeds} training runs of {c.steps} steps"

    def make_claim(
        name: str, says: str, source: str, key: str, rule: dict, unit: str, note: str, needs: dict | None = None
    ) -> dict:
        estimate = student([row[key] for row in first_rows])
        return claim(
            name,
            says,
            source,
            estimate["value"],
            rule,
            (estimate["low"], estimate["high"]),
            unit,
            f"{setting_text}; {note}",
            needs,
        )

    def format_means(key: str, form: str, factor: float = 1.0) -> str:
        return ", ".join(
            f"{arm} {lr:g}: {factor * np.mean([row[key] for row in select_arm((arm, lr))]):{form}}"
            for arm, lr in c.arms
        )

    worst_row = max(table, key=lambda row: abs(row["changed"] / row["law"] - 1))
    ratios = {lr: float(np.mean([row["of_xor"] for row in select_arm(("adamw", lr))])) for lr in c.lrs}
    return [
        make_claim(
            "unchanged",
            "98–99% of bfloat16 weights are the same bits after a step of RL",
            SPARSE,
            "unchanged",
            above(0.98),
            "of the weights",
            f"in percent, {format_means('unchanged', '.2f', 100)}",
        ),
        make_claim(
            "fiftieth",
            "a difference is a fiftieth of the weights (20.3 of 1,024 GiB)",
            SOURCE,
            "share",
            below(0.0198),
            "of the bytes",
            f"times smaller, {format_means('delta_times', '.0f')}",
        ),
        make_claim(
            "bits",
            "a changed weight takes at most 15 bits",
            "ref/weight_codec.py",
            "delta_bits",
            below(15.0),
            "bits",
            f"{format_means('delta_bits', '.1f')}; entropy of independent positions and steps: "
            f"{format_means('entropy_bits', '.1f')}; index and value: "
            f"{format_means('index_bits', '.1f')}; XOR: {format_means('xor_bits', '.1f')}",
        ),
        make_claim(
            "xor",
            "a delta by gap and step is at most 0.6 of XOR under zstd",
            "ref/weight_codec.py",
            "of_xor",
            below(0.6),
            "of XOR's bytes",
            format_means("of_xor", ".2f"),
            {"at the other learning rates of AdamW too": max(ratios.values()) < 0.6},
        ),
        make_claim(
            "merged",
            f"a merged delta of {MERGE_SPAN} versions is smaller than {MERGE_SPAN} deltas",
            "ref/weight_sync.py",
            "merged",
            above(1.0),
            "times smaller",
            format_means("merged", ".2f"),
        ),
        claim(
            "law",
            "the changed share is E[min(1, |Δ|/ulp(w))]",
            "ref/weight_sync.py",
            abs(worst_row["changed"] / worst_row["law"] - 1),
            at_most(0.05),
            unit="of the share",
            note=f"the worst of {len(table)} training runs: {worst_row['arm']} at {worst_row['lr']:g}, measured "
            f"{worst_row['changed']:.5f}, law "
            f"{worst_row['law']:.5f}; largest difference of a share "
            f"{max(abs(row['changed'] - row['law']) for row in table):.1g}",
        ),
        claim(
            "chain",
            "weights rebuilt from differences are the trainer's, bit for bit",
            SOURCE,
            float(sum(row["other_bits"] for row in table)),
            at_most(0.0),
            unit="versions with other bits",
            note=f"{len(rows)} versions in {len(table)} chains, a reader that follows each, and one that "
            f"comes late for the last",
        ),
    ]


def picture(results: dict, path: Path) -> None:
    """Left: changed share and the law. Middle: bits for each changed weight by coding. Right: how much smaller than all
    weights."""
    from kit.plots import BLUE, COLOURS, GREY, RED, save, sheet

    figure, (left, middle, right) = sheet(
        3, "Weight sync along RL steps: what changes, and what a difference costs", width=5.0
    )
    rows = results["rows"]
    for arm, colour, marker in (("adamw", BLUE, "o"), ("muon", RED, "s")):
        arm_rows = [row for row in rows if row["arm"] == arm]
        left.plot(
            [row["law"] for row in arm_rows],
            [row["changed"] for row in arm_rows],
            marker,
            color=colour,
            label={"adamw": "AdamW", "muon": "Muon"}[arm],
        )
    line_ends = [min(row["law"] for row in rows) / 1.5, 1.5 * max(row["law"] for row in rows)]
    left.plot(line_ends, line_ends, color=GREY, linewidth=1, zorder=0)
    left.set(
        xscale="log",
        yscale="log",
        xlabel="E[min(1, |Δ|/ulp(w))]",
        ylabel="changed share of bfloat16 weights",
        title="Law and measurement, a dot a run",
    )
    left.legend(frameon=False)
    arms = list(dict.fromkeys((row["arm"], row["lr"]) for row in rows))
    names = [f"{'AdamW' if arm == 'adamw' else 'Muon'}\n{lr:g}" for arm, lr in arms]
    codings = {"index": "index + value", "xor": "XOR", "delta": "gap + step", "entropy": "entropy"}

    def mean(arm: tuple, key: str) -> float:
        return float(np.mean([row[key] for row in rows if (row["arm"], row["lr"]) == arm]))

    for number, (key, label) in enumerate(codings.items()):
        bar_positions = np.arange(len(arms)) + 0.2 * (number - 1.5)
        colour = GREY if key == "entropy" else COLOURS[number]
        middle.bar(bar_positions, [mean(arm, f"{key}_bits") for arm in arms], 0.18, color=colour, label=label)
        if key != "entropy":
            right.bar(bar_positions + 0.1, [mean(arm, f"{key}_times") for arm in arms], 0.18, color=colour)
    middle.set(ylabel="bits", title="Bits for each changed weight, zstd 1")
    middle.margins(y=0.3)
    middle.legend(frameon=False, ncols=2)
    right.set(yscale="log", ylabel="weights / difference, bytes", title="How much smaller than all weights")
    for axes in (middle, right):
        axes.set_xticks(range(len(arms)), names)
    save(figure, path)
