"""Low precision in the experts' matrix products: what the formats lose, what a shared scale leaks, and whether training
suffers.

    etude figure low-precision              under fifteen minutes on two cores; agent and text from runs/small (make
                                            small)
    etude figure low-precision --quick

1. Noise. The run's last agent reads held-out rows of its pretraining mix. The operands of its experts' products
   (activations before either product, weights, and gradients of the loss at their outputs) are quantised along the sum,
   format by format.
2. Leaks. The same agent, with experts in NVFP4: each row is read again with another last token, and again in a batch
   with other rows. A causal model with a scale per token gives the same result for the earlier tokens. All sums are in
   float64, because the order of float32 sums can move a value across a tie between two codes, which looks like a leak;
   the experiment also reports how often.
3. Division. NVFP4 with x · fl(1/s) instead of x / s, and likewise MXFP8: how many of the operands of part 1, in
   bfloat16, change.
4. Training. The recipe's network from scratch, same data and initial weights in every arm: products in float32 or
   bfloat16; MXFP8; the report's NVFP4 per token forward and MXFP8 backward; the same with a scale per tensor or with
   fast division; NVFP4 both ways. Judged by the loss on held-out rows, computed in the precision of the arm.

Our choices: all arms simulate precision (rounded values, products in float32), so they differ only in rounding. In
training, experts read and write bfloat16, except in the arm "float32". Everything else stays in float32, including
routers. "Per tensor" means the tokens of one expert, as its product sees them.

Rules of the verdicts, fixed before the first run (which used float32 operands, where fast division changes next to
nothing). Leaks: a row has moved if some log-prob moved by more than LEAST; a scale per tensor leaks if the interval of
the share of moved rows is above 0 and no row moved with a scale per token. Training: differences of held-out loss
between
arms of the same seed, Student's t over seeds. The report's pair trains like bfloat16 if the interval ends below NEAR
nats. The source saw the effects of a scale per tensor and of fast division in RL, after about a hundred steps. A few
supervised steps do not test that, and a hundred RL steps of the tiny agent in three arms and three seeds, with
quantised sampler and trainer, take hours on two cores.

Power. Three seeds vary by 0.001 to 0.006 nats, so differences of 0.004 to 0.015 nats can be detected; an arm that
diverged would be several nats away.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch

from kit.disk import read_lines
from kit.runs import Run
from kit.statistics import bootstrap, student
from recipe.small.learner import Learner, load_checkpoint, packed_rows, train
from recipe.small.settings import Recipe
from ref import cpt
from ref.network import Transformer
from sims.experiment import above, at_most, below, claim, untested
from sims.low_precision.quantised import KINDS, division, lower, moved, noise, operands
from sims.policies import agent

__all__ = ["Experiment", "experiment", "picture"]

SOURCE = "§6.1, Kernels"
FORMS = ("bfloat16", "mxfp8", "fp8", "nvfp4-token", "nvfp4-tensor")
"""Formats whose noise is measured."""
ARMS = {
    "float32": ("float32", "float32"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "MXFP8": ("mxfp8", "mxfp8"),
    "NVFP4 per token": ("nvfp4-token", "mxfp8"),
    "NVFP4 per tensor": ("nvfp4-tensor", "mxfp8"),
    "fast division": ("nvfp4-fast", "mxfp8"),
    "NVFP4 both ways": ("nvfp4-token", "nvfp4-token"),
}
"""Arms of training: format of the forward pass, of the backward pass. Experts read and write bfloat16, except in the
first arm."""
LEAST = 1e-3
"""A log-prob has moved if it changed by more than this many nats; without a change of codes, the order of float32 sums
moves it by about 1e-5."""
LEAKS = {form: (form, torch.float64) for form in ("float32", "mxfp8", "nvfp4-token", "nvfp4-tensor")} | {
    "nvfp4-token, float32": ("nvfp4-token", torch.float32)
}
"""Precisions of part 2: format of the experts' products, dtype of everything else and of sums."""
NEAR_LOSS = 0.02
"""Two held-out losses within this many nats per token are near."""


@dataclass(frozen=True)
class Experiment:
    """Sizes of all parts."""

    run: str = "runs/small"
    """A finished run of the recipe (empty: first run a tiny recipe that has learned nothing)."""
    rows: int = 64
    """Held-out rows of the pretraining mix, for measurements."""
    companions: int = 7
    """Number of other rows in the batch."""
    steps: int = 80
    """Training steps of each arm."""
    batch_rows: int = 8
    """Rows of `training.length` tokens per step."""
    looks: int = 6
    """Measurements of the held-out loss during training."""
    seeds: int = 3
    """Training runs of each arm; two or more."""
    resamples: int = 1000
    """Bootstrap resamples."""
    seed: int = 0
    """Seed of all random numbers."""

    @classmethod
    def quick(cls) -> "Experiment":
        return cls(run="", rows=4, companions=2, steps=3, batch_rows=4, looks=2, seeds=2, resamples=40)

    def __post_init__(self):
        if self.seeds < 2 or not 1 <= self.looks <= self.steps:
            raise ValueError(
                f"seeds must be at least 2, and looks must be in 1..steps; got seeds={self.seeds}, "
                f"looks={self.looks}, steps={self.steps}"
            )


def text_of(c: Experiment, root: Path) -> tuple[np.ndarray, np.ndarray]:
    """The rows of the pretraining mix, ids and documents [rows, length], in this experiment's own order; the first
    `c.rows` are held out."""
    ids, doc = (x.astype(np.int64) for x in packed_rows(root, "short"))
    order = np.random.default_rng([c.seed, 1]).permutation(len(ids))
    return ids[order], doc[order]


def experiment(run: Run, config: Experiment) -> dict:
    """All parts, and the verdicts."""
    c, (root, recipe) = config, agent(run, config.run, config.seed)
    ids, doc = text_of(c, root)
    if len(ids) < c.rows + c.batch_rows:
        raise ValueError(
            f"rows={c.rows} are held out and training needs {c.batch_rows} more, but the text of the "
            f"run has only {len(ids)}"
        )
    heldout_text = torch.from_numpy(ids[: c.rows]), torch.from_numpy(doc[: c.rows])
    stage = run.stage("measure", total=1 + len(LEAKS), unit="parts")
    if not stage.finished:
        stage.restore()
        stage.finish(measure_parts(stage, c, root, recipe, heldout_text))
    result, rows = stage.result(), []
    for kind in KINDS:
        for form in FORMS:
            row = {"part": "noise", "operand": kind, "form": form, **result["noise"][kind][form]}
            rows.append(
                row | {f"changed_{k}": v for k, v in result["division"][kind].items()} if form == "nvfp4-token" else row
            )
    for form in result["moved"]:
        for variation, sizes in result["moved"][form].items():
            share = bootstrap(np.array(sizes) > LEAST, n=c.resamples, seed=c.seed)
            rows.append(
                {
                    "part": "leak",
                    "form": form,
                    "how": variation,
                    "share": share["value"],
                    "low": share["low"],
                    "high": share["high"],
                    "median": float(np.median(sizes)),
                    "largest": max(sizes),
                }
            )
    trainings = {arm: [training(run, c, root, recipe, arm, number) for number in range(c.seeds)] for arm in ARMS}
    for arm, arm_trainings in trainings.items():
        for number, training_result in enumerate(arm_trainings):
            rows += [{"part": "training", "arm": arm, "seed": number, **look} for look in training_result["looks"]]
        rows.append(
            {
                "part": "end",
                "arm": arm,
                **gap(trainings, arm, "bfloat16"),
                "loss": float(np.mean(final_losses(arm_trainings))),
            }
        )
    return {"rows": rows, "claims": verdicts(c, rows, trainings)}


def measure_parts(stage, c: Experiment, root: Path, recipe: Recipe, heldout: tuple[torch.Tensor, torch.Tensor]) -> dict:
    """Parts 1 to 3."""
    model = load_checkpoint(root, recipe, "final", with_mtp=False)[0]
    sums = {kind: {form: [] for form in FORMS} for kind in KINDS}
    changed_counts = {kind: {form: np.zeros(2) for form in ("nvfp4", "mxfp8")} for kind in KINDS}
    for kind, parts, text in operands(model, *heldout):
        for form in FORMS:
            operand_noise = noise(parts, form)
            by_text = np.zeros((c.rows if text is not None else 1, 2))
            np.add.at(by_text, text if text is not None else np.zeros(len(operand_noise), int), operand_noise)
            sums[kind][form].append(by_text)
        for form in changed_counts[kind]:
            changed_counts[kind][form] += division(parts, form)
    stage.progress(1)

    def decibels(sample: np.ndarray) -> float:
        signal, error = sample.reshape(-1, 2).sum(0)
        return 10 * float(np.log10(signal / error)) if error else np.inf

    def sqnr(kind: str, form: str) -> dict[str, float]:
        estimate = bootstrap(np.sum(sums[kind][form], 0), decibels, n=c.resamples, seed=c.seed)
        return {"sqnr": estimate["value"], "low": estimate["low"], "high": estimate["high"]}

    signal_ratios = {kind: {form: sqnr(kind, form) for form in FORMS} for kind in KINDS}
    result = {
        "noise": signal_ratios,
        "division": {k: {f: float(n / total) for f, (n, total) in v.items()} for k, v in changed_counts.items()},
        "moved": {},
    }
    for number, (name, (form, dtype)) in enumerate(LEAKS.items(), 2):
        low_model = lower(load_checkpoint(root, recipe, "final", with_mtp=False)[0].to(dtype), form, "float32", dtype)
        result["moved"][name] = moved(low_model, *heldout, c.companions, np.random.default_rng([c.seed, 2]))
        stage.progress(number)
    return result


def training(run: Run, c: Experiment, root: Path, recipe: Recipe, arm: str, number: int) -> dict:
    """One training run: `looks`, step and held-out loss."""
    stage = run.stage(f"{arm.replace(' ', '-')}-{number}", total=c.steps)
    if stage.finished:
        return stage.result()
    recipe = replace(recipe, training=replace(recipe.training, dtype="float32"))
    t, (ids, doc) = recipe.training, text_of(c, root)
    torch.manual_seed(1000 * c.seed + number)
    model = Transformer(load_checkpoint(root, recipe, "final", with_mtp=False)[0].config)
    dtype = torch.float32 if arm == "float32" else torch.bfloat16
    learner = Learner(recipe, lower(model, *ARMS[arm], dtype), None, t.muon_lr, t.adamw_lr)
    order = c.rows + np.random.default_rng([c.seed, 3, number]).permutation(len(ids) - c.rows)
    look_steps = {round(share * c.steps) for share in np.linspace(1 / c.looks, 1, c.looks)}

    def batch(step: int):
        indices = order[np.arange(step * c.batch_rows, (step + 1) * c.batch_rows) % len(order)]
        return torch.from_numpy(ids[indices]), torch.from_numpy(doc[indices]), None

    def measure_loss(step: int) -> dict:
        if step not in look_steps:
            return {}
        heldout_text = torch.from_numpy(ids[: c.rows]), torch.from_numpy(doc[: c.rows])
        losses = []
        with torch.no_grad():
            for row_ids, row_docs in zip(*(x.split(32) for x in heldout_text), strict=True):
                hidden = learner.trunk.model(row_ids, doc=row_docs, logits=False).hidden
                losses.append(cpt.next_token_loss(learner.trunk.model, hidden, row_ids, row_docs))
        return {"heldout_loss": float(sum(loss for loss, _ in losses) / sum(n for _, n in losses))}

    train(
        stage,
        recipe,
        learner,
        batch,
        c.steps,
        lambda step: cpt.wsd(step, c.steps, max(1, c.steps // 10), c.steps // 3),
        arm,
        look=measure_loss,
    )
    keys = ("step", "tokens", "heldout_loss")
    return stage.finish(
        {
            "looks": [
                {key: line[key] for key in keys} for line in read_lines(stage.metrics_path) if "heldout_loss" in line
            ]
        }
    )


def final_losses(trainings: list[dict]) -> np.ndarray:
    """Held-out loss at the end, by seed."""
    return np.array([training_result["looks"][-1]["heldout_loss"] for training_result in trainings])


Gap = TypedDict("Gap", {"gap": float, "low": float, "high": float, "each": list[float]})  # noqa: UP013
"""Difference of two arms: its mean with an interval, and every seed's."""


def gap(trained: dict[str, list[dict]], arm: str, base: str) -> Gap:
    """Held-out loss at the end, arm − base of the same seed: mean, Student's 95% interval over seeds, and every
    seed's."""
    by_seed = final_losses(trained[arm]) - final_losses(trained[base])
    estimate = student(by_seed)
    return {"gap": estimate["value"], "low": estimate["low"], "high": estimate["high"], "each": by_seed.tolist()}


def verdicts(c: Experiment, rows: list[dict], trained: dict[str, list[dict]]) -> list[dict]:
    """The claims, by the rules at the top of this file."""
    leaks = {(row["form"], row["how"]): row for row in rows if row["part"] == "leak"}
    changed = {row["operand"]: row for row in rows if row["part"] == "noise" and row["form"] == "nvfp4-token"}
    claims = []
    for variation, says in (
        ("batch", "a float32 scale per tensor makes what a model computes depend on the batch, one per token does not"),
        ("later", "and leaks future tokens into past ones, one per token does not"),
    ):
        row, token, coarse = (
            leaks[form, variation] for form in ("nvfp4-tensor", "nvfp4-token", "nvfp4-token, float32")
        )
        other_moves = ", ".join(f"{form} {leaks[form, variation]['largest']:.1g}" for form in ("float32", "mxfp8"))
        condition = f"read with {c.companions} others" if variation == "batch" else "given another last token"
        claims.append(
            claim(
                f"{variation}-leak",
                says,
                SOURCE,
                row["share"],
                above(),
                (row["low"], row["high"]),
                "of the rows",
                f"{c.rows} held-out rows {condition}: those in which a log-prob that should stay moves by more than "
                f"{LEAST:g} nats; largest move of "
                f"a row, median {row['median']:.3f}, at most {row['largest']:.2f} nats; with scales "
                f"per token {token['share']:g} of the rows, at "
                f"most {token['largest']:.1g} nats; all sums in float64 (in float32 their order alone "
                f"moves {coarse['share']:g} of the rows with "
                f"scales per token); largest move otherwise: {other_moves} nats",
                {"with scales per token none moves": token["share"] == 0},
            )
        )
    mx = {kind: row["changed_mxfp8"] for kind, row in changed.items()}
    nv = {kind: row["changed_nvfp4"] for kind, row in changed.items()}
    changes_text = ", ".join(f"{kind} {1e6 * share:.0f}" for kind, share in nv.items())
    claims.append(
        claim(
            "division-mxfp8",
            "fast division changes no number in MXFP8",
            SOURCE,
            max(mx.values()),
            at_most(1e-4),
            None,
            "of the numbers",
            "that change, the most of activations, products, weights and gradients, all bfloat16: "
            "dividing by a power of two is exact, "
            "and a scale of fl(1/448) · amax is hardly ever another than that of amax / 448; NVFP4, per million: "
            f"{changes_text}",
        )
    )

    def describe_gap(estimate: Gap) -> str:
        return f"by seed {', '.join(f'{x:+.4f}' for x in estimate['each'])}"

    floor = gap(trained, "float32", "bfloat16")
    context = (
        f"{c.steps} steps of {c.batch_rows} rows, {c.seeds} seeds; float32 − bfloat16, for scale: {floor['gap']:+.4f}"
    )
    losses = ", ".join(f"{arm} {final_losses(arm_trainings).mean():.3f}" for arm, arm_trainings in trained.items())
    for name, says, arm in (
        (
            "trains",
            "experts in NVFP4 per token forward and MXFP8 backward train like experts in bfloat16",
            "NVFP4 per token",
        ),
        ("mxfp8-trains", "experts in MXFP8, forward and backward, train like experts in bfloat16", "MXFP8"),
    ):
        estimate = gap(trained, arm, "bfloat16")
        claims.append(
            claim(
                name,
                says,
                SOURCE,
                estimate["gap"],
                below(NEAR_LOSS),
                (estimate["low"], estimate["high"]),
                "nats per token",
                f"held-out loss, {describe_gap(estimate)}; {context}; all arms: {losses}",
            )
        )
    for name, says, arm in (
        ("tensor-training", "with the scale per tensor, RL diverges", "NVFP4 per tensor"),
        ("division-nvfp4", "fast division in NVFP4 makes RL diverge after roughly a hundred steps", "fast division"),
    ):
        estimate = gap(trained, arm, "NVFP4 per token")
        changes_note = (
            f"; numbers that change, per million: {', '.join(f'{k} {1e6 * s:.0f}' for k, s in nv.items())}"
            if arm == "fast division"
            else ""
        )
        claims.append(
            claim(
                name,
                says,
                SOURCE,
                estimate["gap"],
                untested(),
                (estimate["low"], estimate["high"]),
                "nats per token",
                f"{c.steps} supervised steps test no RL; held-out loss over NVFP4 per token with IEEE division, "
                f"{describe_gap(estimate)}; {context}{changes_note}",
            )
        )
    return claims


def picture(results: dict, path: Path) -> None:
    """Left: signal to noise. Middle: movement of log-probs that should not move. Right: training."""
    from kit.plots import COLOURS, GREY, save, sheet

    figure, (left, middle, right) = sheet(3, "Experts in low precision", width=5.2)
    rows = results["rows"]
    for number, (form, colour) in enumerate(zip(FORMS[1:], COLOURS, strict=False)):
        noise_rows = [
            next(r for r in rows if r["part"] == "noise" and r["form"] == form and r["operand"] == kind)
            for kind in KINDS
        ]
        left.bar(
            np.arange(len(KINDS)) + 0.2 * (number - 1.5),
            [r["sqnr"] for r in noise_rows],
            0.19,
            color=colour,
            label=form,
        )
    left.set_xticks(range(len(KINDS)), KINDS)
    left.set(ylabel="signal to noise, dB", title="What is left of the products' operands")
    labels = {"later": "another last token", "batch": "other rows in the batch"}
    for number, (variation, label) in enumerate(labels.items()):
        leak_rows = [r for r in rows if r["part"] == "leak" and r["how"] == variation]
        positions = np.arange(len(leak_rows)) + 0.36 * (number - 0.5)
        middle.bar(
            positions,
            [max(r["largest"], 1e-7) for r in leak_rows],
            0.34,
            color=COLOURS[number],
            label=f"{label}: largest",
        )
        middle.plot(
            positions,
            [max(r["median"], 1e-7) for r in leak_rows],
            "_",
            color="black",
            markersize=16,
            label="median row" if number else None,
        )
    middle.set_xticks(range(len(leak_rows)), [r["form"].replace("nvfp4-", "nvfp4-\n") for r in leak_rows])
    middle.axhline(LEAST, color=GREY, linestyle=":")
    middle.set(yscale="log", ylabel="|Δ log p|, nats", title="Log-probs that should not move")
    base = {
        (r["seed"], r["step"]): r["heldout_loss"] for r in rows if r["part"] == "training" and r["arm"] == "bfloat16"
    }
    for arm, colour in zip([a for a in ARMS if a != "bfloat16"], (GREY, *COLOURS), strict=False):
        arm_rows = [r for r in rows if r["part"] == "training" and r["arm"] == arm]
        steps = sorted({r["step"] for r in arm_rows})
        differences = np.array(
            [[r["heldout_loss"] - base[r["seed"], s] for r in arm_rows if r["step"] == s] for s in steps]
        )
        right.plot(steps, differences.mean(1), "o-", color=colour, label=arm, markersize=4)
        right.fill_between(steps, differences.min(1), differences.max(1), color=colour, alpha=0.12, linewidth=0)
    right.axhline(0, color=GREY, linewidth=0.8)
    right.set(xlabel="step", ylabel="held-out loss − bfloat16's, nats", title="Training: mean and range of the seeds")
    for axes in (left, middle, right):
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * (high / low) ** 0.45 if axes is middle else high + 0.4 * (high - low))
        axes.legend(frameon=False, fontsize=8.5, ncols=2)
    save(figure, path)
