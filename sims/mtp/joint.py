"""Joint training of trunk and MTP layers (§3.1): does it harm the trunk, and do drafts gain?

A part of `etude figure mtp`. The report says that the layers train jointly with the model in the long-context phase and
SFT. It does not say whether their loss reaches the model. Both variants run from the same checkpoint of the run, on the
same batches:

    beside          the layers follow, the trunk learns as it would without them (the recipe's choice,
                    `mtp.detach_trunk`)
    through 0.3     their loss trains the trunk, too, with the weight of DeepSeek-V3 (arXiv:2412.19437, §4.2)
    through 1       … with all of its weight
    left            the layers are not trained: those of mid-CPT draft for the trunk of "beside"

Measured after the long-context phase on held-out text, and after SFT on the agent's own tokens in held-out
demonstrations: the trunk's loss, and the probability that sampling accepts a draft. Each repetition has its own order
of rows and its own demonstrations.

Power. Between two training runs on the same batches, rounding alone moves the loss on such a text by about 0.01 nats
per token, and acceptance by about 0.003. Three repetitions can detect 0.02 nats and 0.01 of acceptance.
"""

import itertools
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kit.runs import Run
from kit.statistics import bootstrap
from recipe.small import stages
from recipe.small.data import task_stream
from recipe.small.demonstrations import context, taught
from recipe.small.learner import language_of, load_checkpoint
from recipe.small.settings import Recipe
from ref import cpt
from ref.mtp import MTP
from ref.network import Transformer
from ref.rl import pad
from sims.cpt_rl.budgets import cut
from sims.experiment import above, below, claim
from sims.mtp.drafting import EXPECTED, Experiment, acceptance, curve

__all__ = ["ARMS", "LEFT", "joint_rows", "joint_verdicts", "training", "transplanted"]

ARMS = {"beside": (True, 1.0), "through 0.3": (False, 0.3), "through 1": (False, 1.0)}
"""Whether the layers' loss is detached from the trunk, and its weight."""
LEFT = "left"
TEXTS = {"cpt": "text", "sft": "demonstrations"}
"""Which text each checkpoint is measured on."""
MAX_HARM = 0.02
"""The trunk may be worse by this many nats per token and still count as unharmed."""


def make_recipe(c: Experiment, recipe: Recipe, arm: str, number: int) -> Recipe:
    """The recipe of one training run; the arms of a repetition differ only in the layers' loss."""
    detached, weight = ARMS[arm]
    return replace(
        recipe,
        seed=1000 * c.seed + number,
        mtp=replace(recipe.mtp, detach_trunk=detached, weight=weight),
        sft=replace(recipe.sft, epochs=c.epochs),
    )


def make_demonstrations(c: Experiment, recipe: Recipe, root: Path) -> tuple[Tensor, Tensor, Tensor]:
    """ids, doc and weight [rows, T] of the contexts of held-out demonstrations, one per row; weight 1 on the agent's
    own tokens."""
    language, rng = language_of(root), random.Random(f"{c.seed}-joint-mtp")
    rollouts = taught(
        task_stream(replace(recipe, seed=c.seed), "evaluation"),
        language,
        context(language, recipe),
        recipe.sft.noise,
        recipe.context.memory,
        rng,
    )
    segments = [
        segment for rollout in itertools.islice(rollouts, c.demonstrations) for segment in rollout.chain.segments
    ]
    ids, own_mask, _ = pad(segments)
    lengths = torch.tensor([len(segment.tokens) for segment in segments])
    return ids, torch.where(torch.arange(ids.shape[1]) < lengths[:, None], 0, -1), own_mask.float()


@torch.no_grad()
def measure_layers(trunk: Transformer, sets: dict[str, MTP], ids: Tensor, doc: Tensor, weight: Tensor | None) -> dict:
    """Nats and tokens of every row, [rows, 2], and the acceptance counts of each set of layers."""
    out = trunk(ids, doc=doc, logits=False)
    nll = []
    for row in range(len(ids)):
        row_slice = slice(row, row + 1)
        total, count = cpt.next_token_loss(
            trunk, out.hidden[row_slice], ids[row_slice], doc[row_slice], None if weight is None else weight[row_slice]
        )
        nll.append([total.item(), count])
    return {"nll": nll, **{name: acceptance(mtp, trunk, out, ids, doc, weight).tolist() for name, mtp in sets.items()}}


def training(
    run: Run, c: Experiment, root: Path, recipe: Recipe, arm: str, number: int, text: tuple[Tensor, Tensor]
) -> dict:
    """One training run of one arm, as a run of the recipe inside `run`: long context, SFT, and measurements after
    each."""
    name = f"joint-{arm.replace(' ', '-')}-{number}"
    stage = run.stage(name, total=len(TEXTS), unit="runs")
    if stage.finished:
        return stage.result()
    stage.restore()
    config, folder = make_recipe(c, recipe, arm, number), run.root / "joint" / name
    with Run.open(folder, "recipe", config, resume=folder.exists(), checkpoint_seconds=run.checkpoint_seconds) as inner:
        cut(inner, root, config, all_rows=True)
        shutil.copytree(root / "checkpoints" / "mtp", folder / "checkpoints" / "mtp", dirs_exist_ok=True)
        stages.lengthen(inner, config)
        stage.progress(1)
        stages.finetune(inner, config)
    results, mid_layers = {}, load_checkpoint(folder, config, "mtp")[1]
    for point, text_name in TEXTS.items():
        trunk, mtp = load_checkpoint(folder, config, point)
        assert mtp is not None and mid_layers is not None
        sets = {arm: mtp} | ({LEFT: mid_layers} if arm == "beside" else {})
        results[text_name] = measure_layers(
            trunk, sets, *(make_demonstrations(c, recipe, root) if point == "sft" else (*text, None))
        )
    shutil.rmtree(folder / "checkpoints")
    stage.log(1, **{f"loss_{text_name}": loss(np.array(f["nll"])) for text_name, f in results.items()})
    return stage.finish(results)


def loss(nll: np.ndarray) -> float:
    return float(nll[..., 0].sum() / nll[..., 1].sum())


def mean_acceptance(counts: np.ndarray) -> float:
    """The acceptance probability, averaged over depths; counts [rows, …, depth, 3]."""
    return float(curve(counts.reshape(-1, *counts.shape[-2:]), EXPECTED))


def make_tables(
    trainings: dict[str, list[dict]], text_name: str
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """By arm: nats and tokens [rows, repetitions, 2], and acceptance counts [rows, repetitions, depth, 3]."""
    nll = {arm: np.array([f[text_name]["nll"] for f in results]).swapaxes(0, 1) for arm, results in trainings.items()}
    counts = {
        name: np.array([f[text_name][name] for f in trainings["beside" if name == LEFT else name]]).swapaxes(0, 1)
        for name in (LEFT, *ARMS)
    }
    return nll, counts


def joint_rows(c: Experiment, trainings: dict[str, list[dict]]) -> list[dict]:
    """One row per arm and text: loss and acceptance, with intervals over rows of the text, and the range over
    repetitions."""
    rows = []
    for text_name in TEXTS.values():
        nll, counts = make_tables(trainings, text_name)
        for name, arm_counts in counts.items():
            row = {"part": "joint", "arm": name, "text": text_name}
            for measure, data, statistic in (
                ("loss", nll["beside" if name == LEFT else name], loss),
                ("accepted", arm_counts, mean_acceptance),
            ):
                estimate, by_repetition = (
                    bootstrap(data, statistic, n=c.resamples, seed=c.seed),
                    [statistic(repetition) for repetition in data.swapaxes(0, 1)],
                )
                row |= {
                    measure: estimate["value"],
                    f"{measure}_low": estimate["low"],
                    f"{measure}_high": estimate["high"],
                    f"{measure}_least": min(by_repetition),
                    f"{measure}_most": max(by_repetition),
                }
            rows.append(row)
    return rows


def joint_verdicts(c: Experiment, trainings: dict[str, list[dict]]) -> list[dict]:
    """Rules, fixed before measuring, for the agent's tokens after SFT; text after the long phase is in the notes.
    Jointly trained layers draft well if more of their drafts are accepted than those of the mid-CPT layers, in every
    repetition. The trunk is unharmed if its loss, trained with the layers' loss at DeepSeek-V3's weight, exceeds the
    loss without it by at most HARM."""

    def estimate_difference(text_name: str, measure: str, a: str, b: str) -> tuple[dict[str, float], list[float]]:
        nll, counts = make_tables(trainings, text_name)
        data, statistic = (nll, loss) if measure == "loss" else (counts, mean_acceptance)
        # Both arms of a row are resampled together, as a pair.
        pair = np.concatenate((data[a], data[b]), -1)
        half = data[a].shape[-1]

        def difference(sample: np.ndarray) -> float:
            return statistic(sample[..., :half]) - statistic(sample[..., half:])

        return (
            bootstrap(pair, difference, n=c.resamples, seed=c.seed),
            [difference(repetition) for repetition in pair.swapaxes(0, 1)],
        )

    def describe_difference(text_name: str, measure: str, a: str, b: str = "beside") -> str:
        estimate, by_repetition = estimate_difference(text_name, measure, a, b)
        return (
            f"{estimate['value']:+.4f} [{estimate['low']:+.4f}, {estimate['high']:+.4f}] "
            f"({', '.join(f'{x:+.4f}' for x in by_repetition)})"
        )

    acceptances = {
        (text_name, name): mean_acceptance(counts)
        for text_name in TEXTS.values()
        for name, counts in make_tables(trainings, text_name)[1].items()
    }
    levels = "; ".join(
        f"{text_name}: " + ", ".join(f"{name} {acceptances[text_name, name]:.4f}" for name in (LEFT, *ARMS))
        for text_name in TEXTS.values()
    )
    drafts, draft_differences = estimate_difference("demonstrations", "accepted", "beside", LEFT)
    trunk, loss_differences = estimate_difference("demonstrations", "loss", "through 0.3", "beside")
    length = (
        f"{c.repetitions} repetitions (in brackets), long context and {c.epochs} epochs of SFT; bootstrap over rows"
    )
    return [
        claim(
            "joint-drafts",
            "MTP layers that train jointly with the model in long context and SFT draft better than those of mid-CPT",
            "§3.1",
            drafts["value"],
            above(),
            (drafts["low"], drafts["high"]),
            "of acceptance",
            f"Σ min(p, q), mean over depths, on the agent's own tokens after SFT, trunk's loss apart: "
            f"{levels}. Do drafts gain where their "
            f"loss reaches the trunk? Weight 0.3: {describe_difference('demonstrations', 'accepted', 'through 0.3')}, "
            "text after the long phase "
            f"{describe_difference('text', 'accepted', 'through 0.3')}; weight 1: "
            f"{describe_difference('demonstrations', 'accepted', 'through 1')}, "
            f"{describe_difference('text', 'accepted', 'through 1')}. {length}",
            {"every repetition": min(draft_differences) > 0},
        ),
        claim(
            "joint-trunk",
            f"the layers' loss does not harm the model that it reaches (by more than {MAX_HARM:g} nats a token)",
            "§3.1; arXiv:2412.19437, §2.2",
            trunk["value"],
            below(MAX_HARM),
            (trunk["low"], trunk["high"]),
            "nats per token",
            "loss with it − without, weight 0.3 as DeepSeek-V3's, the agent's own tokens after SFT "
            f"({', '.join(f'{x:+.4f}' for x in loss_differences)}); "
            f"text after the long phase {describe_difference('text', 'loss', 'through 0.3')}; weight 1: "
            f"{describe_difference('demonstrations', 'loss', 'through 1')}, "
            f"{describe_difference('text', 'loss', 'through 1')}. {length}",
            {"every repetition": max(loss_differences) < MAX_HARM},
        ),
    ]


def transplanted(rows: list[dict]) -> list[dict]:
    """Claims on the rows of `joint_rows`: do layers cut from mid-CPT serve the final trunk as they are? On each text,
    what they get accepted is divided by what layers get accepted that trained along. They serve if they keep half of
    it. This rule came after the measurement; every bound between 0.32 and 0.87 gives the same verdicts. Intervals are
    divided end by end, which is wider than a paired ratio would be."""
    rows_by_arm = {(row["arm"], row["text"]): row for row in rows if row["part"] == "joint"}
    claims = []
    for text_name, words in (
        ("text", "held-out text after the long-context phase"),
        ("demonstrations", "the agent's own tokens after SFT"),
    ):
        mid_row, joint_row = rows_by_arm[LEFT, text_name], rows_by_arm["beside", text_name]
        claims.append(
            claim(
                f"transplant-{text_name}",
                f"draft layers cut from mid-CPT serve the final trunk without more training ({words})",
                "§3.1",
                mid_row["accepted"] / joint_row["accepted"],
                above(0.5),
                (
                    mid_row["accepted_low"] / joint_row["accepted_high"],
                    mid_row["accepted_high"] / joint_row["accepted_low"],
                ),
                "of the acceptance of layers that trained along",
                f"Σ min(p, q), mean over depths: {mid_row['accepted']:.3f}, by repetition "
                f"{mid_row['accepted_least']:.3f} to {mid_row['accepted_most']:.3f}; "
                f"trained along {joint_row['accepted']:.3f}; both 95% intervals divided end by end",
            )
        )
    return claims
