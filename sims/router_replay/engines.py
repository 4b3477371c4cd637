"""Two engines on the same tokens: where a sampler and a trainer disagree, and how much of that router replay removes.

The measuring half of `sims/router_replay/experiment.py`.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kit.runs import Run
from kit.statistics import bootstrap
from recipe.small.agent import one_row, play, single
from recipe.small.data import task_stream
from recipe.small.fp8_rounding import fp8_rows
from recipe.small.learner import language_of, load_checkpoint
from recipe.small.settings import Recipe
from ref import kl
from ref.engine.sampler import Sampler, Segment
from ref.network import Transformer
from ref.rl import make_routing, pad
from ref.router_replay import compare_experts, mismatch

__all__ = ["Experiment", "compare", "engines", "independent", "measure_engine", "rows_of_engine"]


def engines(recipe: Recipe) -> dict[str, tuple[torch.dtype, Callable | None, torch.dtype]]:
    """The sampler's dtype, its rounding of weights, the trainer's dtype. The last pair is the one that the recipe
    uses."""
    recipe_engines = getattr(torch, recipe.training.sampler_dtype), None, getattr(torch, recipe.training.dtype)
    return {
        "bf16": (torch.bfloat16, None, torch.float32),
        "fp8": (torch.bfloat16, fp8_rows, torch.float32),
        "recipe": recipe_engines,
    }


@dataclass(frozen=True)
class Experiment:
    """Sizes of both parts."""

    run: str = "runs/small"
    """A finished run of the recipe (empty: first run a tiny recipe that has learned nothing)."""
    tasks: int = 600
    """Held-out tasks for comparing engines, one rollout each."""
    alphas: tuple[float, ...] = (0.25, 0.5, 0.75, 0.9, 1.0)
    """Values of the filter's plausibility α."""
    alpha: float = 0.5
    """The α of these that verdicts and RL use."""
    steps: int = 10
    """RL steps of each training run."""
    seeds: int = 3
    """Training runs of each arm, two or more."""
    heldout: int = 150
    """Held-out tasks for comparing the policies of the arms."""
    samples: int = 4
    """Rollouts per task."""
    resamples: int = 1000
    """Bootstrap resamples."""
    seed: int = 0
    """Seed of all random numbers."""

    def __post_init__(self):
        if self.seeds < 2:
            raise ValueError(
                f"seeds must be at least 2, to estimate the spread between training runs; got {self.seeds}"
            )
        if self.alpha not in self.alphas:
            raise ValueError(f"alpha must be one of alphas {self.alphas}, got {self.alpha}")

    @classmethod
    def quick(cls) -> "Experiment":
        return cls(run="", tasks=8, alphas=(0.5, 1.0), steps=2, seeds=2, heldout=3, samples=2, resamples=40)


def make_ways(c: Experiment) -> dict[str, tuple[str, float]]:
    """Which experts the trainer uses. α = 0 is for comparison with plain replay."""
    return {"own": ("none", 0.0), "plain": ("plain", 0.0)} | {f"α={a:g}": ("filtered", a) for a in (0.0, *c.alphas)}


@torch.no_grad()
def compare(trainer: Transformer, rollouts: list[Segment], ways: dict[str, tuple[str, float]]) -> dict:
    """Results of both engines for the same tokens.

    gap: log μ − log π per method [sampled tokens], rollout after rollout; rollout, moved [the same]: number of the
    rollout, and whether the trainer's own experts differ where the token was predicted. Per rollout: positions;
    `shares`, those of `differing`: decisions, routers layer by layer, tokens in the first 1, 2, … layers; `dropped`:
    share of replayed experts, per method. unlike: α = 0 and α = 1 should equal plain replay and own experts; the share
    of decisions and the largest log-prob that differ."""
    ids, mask, behavior = pad(rollouts, multiple=32)
    T, experts_by_way, logp = ids.shape[1], {}, {}
    for way, (replay_mode, alpha) in ways.items():
        out = trainer(ids, logits=False, experts=make_routing(rollouts, T, replay_mode, alpha))
        logp[way] = trainer.logprob(out.hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).view(len(ids), -1)
        experts_by_way[way] = torch.stack(out.experts, 1).view(len(ids), T, len(out.experts), -1)  # B T L K
    is_sampled = mask[:, 1:]
    sampler_experts = torch.zeros_like(experts_by_way["own"][:, :-1])
    for row, rollout in enumerate(rollouts):
        sampler_experts[row, : len(rollout.experts)] = rollout.experts.long()
    experts_differ = (sampler_experts.sort(-1)[0] != experts_by_way["own"][:, :-1].sort(-1)[0]).any(-1).any(-1)
    shares, dropped_shares = [], []
    for row, rollout in enumerate(rollouts):
        n = len(rollout.experts)
        sampled_experts, trainer_experts = (
            sampler_experts[row, :n].unbind(1),
            {way: p[row, :n].unbind(1) for way, p in experts_by_way.items()},
        )
        own_experts, layers = trainer_experts["own"], range(len(sampled_experts))
        shares.append(
            [
                compare_experts(own_experts, sampled_experts)["decisions"],
                *(compare_experts([own_experts[i]], [sampled_experts[i]])["tokens"] for i in layers),
                *(compare_experts(own_experts[: i + 1], sampled_experts[: i + 1])["tokens"] for i in layers),
            ]
        )
        # The filter never takes back what it drops: the router's own candidates for the place score higher.
        dropped_shares.append([compare_experts(trainer_experts[way], sampled_experts)["decisions"] for way in ways])
    differences = {}
    for way, reference_way in (("α=0", "plain"), ("α=1", "own")):
        if way in ways:
            pair = [experts_by_way[w].flatten(0, 1).unbind(1) for w in (way, reference_way)]
            differences[way] = [
                compare_experts(*pair)["decisions"],
                (logp[way] - logp[reference_way])[is_sampled].abs().max().item(),
            ]
    return {
        "gap": {way: (behavior[:, 1:] - p)[is_sampled].double().numpy() for way, p in logp.items()},
        "rollout": is_sampled.nonzero()[:, 0].numpy(),
        "moved": experts_differ[is_sampled].numpy(),
        "shares": np.array(shares),
        "dropped": np.array(dropped_shares),
        "positions": np.array([len(r.experts) for r in rollouts]),
        "unlike": differences,
    }


def measure_engine(run: Run, c: Experiment, root: Path, recipe: Recipe, name: str) -> dict[str, np.ndarray]:
    """One pair of engines: the last agent's rollouts, and the columns of `compare` over all of them."""
    stage, path = run.stage(f"engine-{name}", total=c.tasks, unit="rollouts"), run.path("engines", f"{name}.npz")
    if not stage.finished:
        stage.restore()
        dtype, rounding, trainer_dtype = engines(recipe)[name]
        language, r, ways = language_of(root), recipe.rl, make_ways(c)
        model = load_checkpoint(root, recipe, "final", with_mtp=False)[0]
        sampler = Sampler(model, dtype, rounding=rounding)
        trainer, generator, parts = model.to(trainer_dtype), torch.Generator().manual_seed(c.seed), []
        tasks = list(itertools.islice(task_stream(recipe, "evaluation"), c.tasks))
        for start in range(0, len(tasks), 64):
            episodes = play(
                sampler,
                language,
                tasks[start : start + 64],
                1,
                r.limits(single(r.max_len)),
                r.max_turns,
                generator,
                r.temperature,
            )
            parts.append(compare(trainer, [one_row(e.chain) for e in episodes], ways))
            parts[-1]["rollout"] += start
            stage.progress(min(start + 64, len(tasks)))
        columns = {
            k: np.concatenate([p[k] for p in parts]) for k in ("rollout", "moved", "shares", "dropped", "positions")
        }
        columns |= {f"gap {way}": np.concatenate([p["gap"][way] for p in parts]) for way in ways}
        columns |= {f"unlike {way}": np.max([p["unlike"][way] for p in parts], 0) for way in parts[0]["unlike"]}
        np.savez(path, **columns)  # pyright: ignore[reportArgumentType]
        stage.log(
            1, tokens=len(columns["rollout"]), **{way: float(np.abs(columns[f"gap {way}"]).mean()) for way in ways}
        )
        stage.finish({"tokens": len(columns["rollout"])}, [path])
    with np.load(path) as columns:
        return dict(columns)


def by_rollout(column: np.ndarray, rollout: np.ndarray) -> np.ndarray:
    """A column of tokens as one row per rollout, padded with NaN: what a bootstrap over rollouts resamples."""
    position = np.arange(len(rollout)) - np.searchsorted(rollout, rollout)
    grid = np.full((rollout.max() + 1, position.max() + 1), np.nan)
    grid[rollout, position] = column
    return grid


def k3(gap: np.ndarray) -> np.ndarray:
    """The estimate of KL(μ‖π) per token that has the lowest variance near zero, in nats."""
    return kl.token_kl(torch.zeros(gap.shape, dtype=torch.float64), torch.from_numpy(-gap), "k3").numpy()


def p99(grid: np.ndarray) -> float:
    return float(np.quantile(np.abs(grid[~np.isnan(grid)]), 0.99))


def quotient(above: float, below: float) -> float:
    """above / below; one if both engines agree so well that `below` is zero."""
    return float(above / below) if below else 1.0


def independent(routers: np.ndarray, layers: int | None = None) -> float:
    """Share of tokens that differ in at least one layer if layers were independent: 1 − Π(1 − d_l); for another number
    of layers, each with the mean d."""
    return float(1 - (np.prod(1 - routers) if layers is None else (1 - np.mean(routers)) ** layers))


def rows_of_engine(c: Experiment, name: str, columns: dict[str, np.ndarray], num_layers: int) -> list[dict]:
    """A row on routing and one per method, with intervals over rollouts. `num_layers`: number of layers for the
    prediction by independence. The ratios of a method compare it with what it should improve on (replay: own experts;
    filter: plain replay), on the same resampled rollouts. Those at other values of α than the chosen one have wider
    intervals, to correct for their number."""

    def interval(key: str, values: np.ndarray, statistic: Callable, level: float = 0.95) -> dict[str, float]:
        estimate = bootstrap(values, statistic, n=c.resamples, seed=c.seed, level=level)
        return {key: estimate["value"], f"{key}_low": estimate["low"], f"{key}_high": estimate["high"]}

    def compute_share(sample: np.ndarray) -> np.ndarray:
        return sample[:, :-1].sum(0) / sample[:, -1].sum()

    positions, L = columns["positions"], (columns["shares"].shape[1] - 1) // 2
    # Counts, so that a long rollout has more weight.
    counts = np.column_stack((columns["shares"] * positions[:, None], positions))
    row = {"part": "routing", "engine": name, "positions": int(positions.sum()), "rollouts": len(positions)}
    row |= interval("decisions", counts, lambda d: compute_share(d)[0]) | interval(
        "tokens", counts, lambda d: compute_share(d)[-1]
    )
    row |= interval("routers", counts, lambda d: compute_share(d)[1 : L + 1].mean())
    row |= interval("independent", counts, lambda d: independent(compute_share(d)[1 : L + 1]))
    row |= interval(f"independent_{num_layers}", counts, lambda d: independent(compute_share(d)[1 : L + 1], num_layers))
    row |= {
        f"{key}_{i + 1}": float(compute_share(counts)[start + i])
        for key, start in (("routers", 1), ("first", 1 + L))
        for i in range(L)
    }
    rows = [row | {f"unlike_{a}": columns[f"unlike α={a}"].tolist() for a in (0, 1) if f"unlike α={a}" in columns}]
    grids = {way: by_rollout(columns[f"gap {way}"], columns["rollout"]) for way in make_ways(c)}
    surprise = {way: np.nansum(by_rollout(k3(columns[f"gap {way}"]), columns["rollout"]), 1) for way in grids}
    size = (~np.isnan(grids["own"])).sum(1)
    for number, (way, (mode, alpha)) in enumerate(make_ways(c).items()):
        gap = columns[f"gap {way}"]
        all_tokens = torch.ones(len(gap), dtype=torch.bool)
        mismatch_metrics = mismatch(torch.from_numpy(-gap), torch.zeros(len(gap), dtype=torch.float64), all_tokens)
        row = {
            "part": "mismatch",
            "engine": name,
            "way": way,
            "alpha": alpha if mode == "filtered" else None,
            "sampled": len(gap),
        }
        row |= mismatch_metrics | interval(
            "kl", np.column_stack((np.nansum(grids[way], 1), size)), lambda d: compute_share(d)[0]
        )
        row |= interval("k3", np.column_stack((surprise[way], size)), lambda d: compute_share(d)[0]) | interval(
            "p99", grids[way], p99
        )
        for key, is_selected in (("k3_moved", columns["moved"]), ("k3_same", ~columns["moved"])):
            row[key] = float(k3(gap[is_selected]).mean()) if is_selected.any() else None
        row["outside_clip"] = float(((np.exp(-gap) < 0.8) | (np.exp(-gap) > 1.2)).mean())
        row["dropped"] = (
            float((columns["dropped"][:, number] * positions).sum() / positions.sum()) if mode != "none" else None
        )
        base = {"none": None, "plain": "own", "filtered": "plain"}[mode]
        if base:
            level = 0.95 if alpha in (0.0, c.alpha) else 1 - 0.05 / len(c.alphas)
            sums, pair = np.column_stack((surprise[way], surprise[base])), np.stack((grids[way], grids[base]), -1)
            row |= interval("k3_ratio", sums, lambda d: quotient(*d.sum(0)), level)
            row |= interval("p99_ratio", pair, lambda d: quotient(p99(d[..., 0]), p99(d[..., 1])), level)
        rows.append(row)
    return rows
