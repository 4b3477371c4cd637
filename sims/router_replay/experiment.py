"""Router replay between two engines: how much of their mismatch it removes, what the filter adds, and the effect on RL.

    etude figure router-mismatch            under a quarter of an hour; agents from runs/small (make small)
    etude figure router-mismatch --quick

1. No training. The run's last agent samples rollouts of held-out tasks with a coarser engine: bfloat16, or bfloat16
   with its weight matrices rounded to FP8 E4M3 (`recipe/small/fp8_rounding.py`). The trainer computes in float32 and
   scores the same tokens with its own experts, with plain replay, and with the filter at every α. Also measured,
   without a verdict: the pair that the recipe itself uses (`training.sampler_dtype` and `training.dtype`).
2. RL from the end of SFT, trainer in float32 and sampler with FP8 weights: without replay, with it, with the filter;
   and with an exact sampler, to separate effects of the mismatch from those of RL. Several training runs each; arms of
   one seed see the same tasks. The experiment also counts how many replayed experts the filter drops.
3. No network. On random scores the filter must keep exactly the experts that its definition keeps, at every α.

Our choices: the FP8 engine also rounds routers, which production engines often do not, and does not quantise
activations. The filter's α for verdicts is the recipe's default, chosen before anything was measured.

Power. The mismatch ratio of a training run varies by about 0.02 from step to step, so three runs can detect a
twentieth. Held-out success of a training run, 150 tasks × 4, varies by 0.03 by chance: only a harm of a tenth would
show, and 27 steps once showed 0.045 [0.002, 0.088] over tasks alone. This experiment is therefore not expected to test
whether replay prevents a collapse."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from kit.disk import read_lines
from kit.runs import Run
from kit.statistics import bootstrap, student
from recipe.small.agent import hash_seed
from recipe.small.data import task_stream
from recipe.small.evaluation import measure_policy
from recipe.small.learner import language_of, load_checkpoint
from recipe.small.reinforcement import learn
from recipe.small.settings import Recipe
from ref import router_replay
from sims.experiment import above, at_most, below, claim
from sims.policies import agent
from sims.router_replay.engines import Experiment, engines, independent, measure_engine, quotient, rows_of_engine

__all__ = ["Experiment", "experiment", "picture"]

R3 = "arXiv:2510.11370"
REPORTED = {"layers": 48, "decisions": 0.10, "tokens": 0.94}
"""What the sources report for a network of 48 layers."""
BELOW_ONE = 0.999
"""A ratio of mismatches counts as below one if it is below this: even if no expert is dropped, the order of sums
changes the sixth digit."""
ARMS = {"exact": ("full", "none"), "none": ("fp8", "none"), "plain": ("fp8", "plain"), "filtered": ("fp8", "filtered")}
"""Arms of RL: the sampler's weights, the trainer's replay."""


def run_training(run: Run, c: Experiment, root: Path, recipe: Recipe, arm: str, number: int) -> dict:
    """Part 2, one training run: the metrics of every step, and success on held-out tasks afterwards (arm "before": no
    training)."""
    heldout = list(itertools.islice(task_stream(recipe, "evaluation"), c.heldout))
    weights, replay = ARMS.get(arm, ("full", "none"))
    arm_recipe = replace(
        recipe,
        seed=recipe.seed + 1000 * c.seed + number,
        training=replace(recipe.training, dtype="float32", sampler_dtype="float32", sampler_weights=weights),
        rl=replace(recipe.rl, steps=c.steps, later=0.0, gate=0.0, replay=replay, replay_alpha=c.alpha),
        evaluation=replace(recipe.evaluation, samples=c.samples),
    )
    stage = run.stage(f"rl-{arm}-{number}", total=c.steps if arm in ARMS else 1, unit="tokens")
    if stage.finished:
        return stage.result()
    model = load_checkpoint(root, recipe, "sft", with_mtp=False)[0]
    if arm in ARMS:
        reference = load_checkpoint(root, recipe, "sft", with_mtp=False)[0]
        model = learn(stage, arm_recipe, model, None, reference, language_of(root))[0].trunk.model
    else:
        stage.restore()
    outcome = measure_policy(model, language_of(root), heldout, arm_recipe, hash_seed(c.seed, "router-mismatch"))
    return stage.finish(
        {"steps": read_lines(stage.metrics_path), "success": outcome["success"].mean(1), "greedy": outcome["greedy"]}
    )


def experiment(run: Run, config: Experiment) -> dict:
    """Both parts, and the verdicts."""
    c, (root, recipe) = config, agent(run, config.run, config.seed)
    rows = []
    for name in engines(recipe):
        rows += rows_of_engine(c, name, measure_engine(run, c, root, recipe, name), REPORTED["layers"])
    arms = {
        arm: [run_training(run, c, root, recipe, arm, number) for number in range(c.seeds if arm in ARMS else 1)]
        for arm in ("before", *ARMS)
    }
    for arm, number, result in (
        (arm, number, result) for arm, trainings in arms.items() for number, result in enumerate(trainings)
    ):
        keys = (
            "mismatch",
            "mismatch_p99",
            "mismatch_max",
            "engine_kl",
            "outside_clip",
            "grad_norm",
            "success",
            "reward",
        )
        rows += [
            {
                "part": "rl",
                "arm": arm,
                "seed": number,
                "step": s["step"],
                **{key: s[key] for key in keys},
                "dropped": s.get("dropped"),
            }
            for s in result["steps"]
        ]
        success, greedy = (bootstrap(result[key], n=c.resamples, seed=c.seed) for key in ("success", "greedy"))
        rows.append(
            {
                "part": "held-out",
                "arm": arm,
                "seed": number,
                "success": success["value"],
                "low": success["low"],
                "high": success["high"],
                "greedy": greedy["value"],
                "greedy_low": greedy["low"],
                "greedy_high": greedy["high"],
            }
        )
    return {
        "rows": rows,
        "claims": [*verdicts(c, rows, recipe.model.num_hidden_layers), threshold_law(c), *rl_verdicts(c, arms)],
    }


def threshold_law(c: Experiment, tokens: int = 64, experts: int = 12, k: int = 4) -> dict:
    """Part 3, the law of the filter: a replayed expert e stays if p_e ≥ α · p_(K), and the router's best others take
    the free places.

    Written as the definition reads, token by token and in probabilities; `ref/router_replay.py` works on logits and on
    whole tensors."""
    generator = torch.Generator().manual_seed(c.seed)
    scores = 2 * torch.randn(tokens, experts, generator=generator, dtype=torch.float64)
    replayed_experts = torch.stack([torch.randperm(experts, generator=generator)[:k] for _ in range(tokens)])
    deviations, dropped_shares = [], []
    for alpha in (0.0, 0.01, 0.1, 0.3, *c.alphas, 1.0):
        selected_experts = router_replay.replay(scores, replayed_experts, k, alpha)
        for token in range(tokens):
            p = scores[token].softmax(0).tolist()
            ranked_experts = sorted(range(experts), key=lambda expert: -p[expert])
            threshold = alpha * p[ranked_experts[k - 1]]
            kept_experts = [expert for expert in replayed_experts[token].tolist() if p[expert] >= threshold]
            expected_experts = (
                kept_experts
                + [expert for expert in ranked_experts if expert not in kept_experts][: k - len(kept_experts)]
            )
            deviations.append(len(set(selected_experts[token].tolist()) - set(expected_experts)) / k)
            dropped_shares.append(1 - len(kept_experts) / k)
    return claim(
        "filter-threshold",
        "the filter drops a replayed expert below α times the K-th largest probability, and no other",
        "ref/router_replay.py",
        float(np.mean(deviations)),
        at_most(0.0),
        unit="of the experts",
        note=f"{tokens} tokens of random scores, {k} of {experts} experts, every α of the experiment and four others; "
        f"{np.mean(dropped_shares):.0%} of the replayed experts are dropped",
        needs={"some are dropped and some kept": bool(0.1 < np.mean(dropped_shares) < 0.9)},
    )


def verdicts(c: Experiment, rows: list[dict], layers: int) -> list[dict]:
    """Part 1. Rules: a tenth of a layer's expert sets differ if the interval reaches a tenth, and 94% of tokens if it
    reaches 94%; replay halves the mismatch if the interval reaches one half; the filter helps if the interval of its
    p99 over that of plain replay is below one by more than rounding. If the filter dropped nothing, it had no effect to
    claim."""
    claims, exact = [], {0: [], 1: []}
    for engine, sampler in (("bf16", "bfloat16"), ("fp8", "8-bit weights")):
        ways, routing = parts_of(rows, engine)
        own_row, plain_row, chosen_row = ways["own"], ways["plain"], ways[f"α={c.alpha:g}"]
        filtered_rows = [row for row in ways.values() if row["alpha"]]
        for a, pairs in exact.items():
            pairs += [routing[f"unlike_{a}"]] if f"unlike_{a}" in routing else []

        def add_claim(
            name,
            says,
            source,
            row,
            key,
            rule,
            unit,
            note,
            reason,
            needs=None,
            idle=False,
            end=f" (sampler: {sampler})",
            engine=engine,
        ):
            value, interval = (None, None) if idle else (row[key], (row[f"{key}_low"], row[f"{key}_high"]))
            verdict = claim(f"{name}-{engine}", says + end, source, value, rule, interval, unit, note, needs)
            claims.append(
                verdict | {"note": note if verdict["verdict"] == "reproduced" else f"{note}. Likely reason: {reason}"}
            )

        add_claim(
            "decisions",
            "about 10% of routers choose another set of experts in the other engine",
            R3,
            routing,
            "routers",
            above(0.0, REPORTED["decisions"]),
            "of the sets of experts",
            f"of the chosen experts {routing['decisions']:.3f}; trainer in float32, "
            f"{routing['positions']} positions, bootstrap over rollouts",
            "two of eight experts, not eight of 128, and one implementation for both engines: only "
            "dtype and weights differ, no kernel does",
            {"no more than 20%": routing["routers"] <= 2 * REPORTED["decisions"]},
        )
        reported_share = independent(np.array([REPORTED["decisions"]]), REPORTED["layers"])
        add_claim(
            "tokens",
            "94% of tokens have another set of experts in at least one layer",
            R3,
            routing,
            "tokens",
            above(0.0, REPORTED["tokens"]),
            "of the tokens",
            f"{layers} layers here; independence over layers makes {routing['independent']:.3f} of our "
            f"share per layer, "
            f"{routing['independent_48']:.3f} of {REPORTED['layers']} such layers; of the reported 10% it makes "
            f"{reported_share:.3f}",
            f"{layers} layers against {REPORTED['layers']}",
        )
        ends = (("", ""), ("_low", "_high"), ("_high", "_low"))
        gains = {f"gone{end}": 1 - plain_row[f"k3_ratio{opposite_end}"] for end, opposite_end in ends}
        add_claim(
            "replay",
            "replay removes half of the mismatch (1.5e-3 → 7.5e-4 nats) or more",
            R3,
            gains,
            "gone",
            above(0.0, 0.5),
            "of KL(μ‖π)",
            f"k3 per token {own_row['k3']:.3g} → {plain_row['k3']:.3g} nats; where the trainer's own experts differ "
            f"{format_value(own_row['k3_moved'])} → "
            f"{format_value(plain_row['k3_moved'])}, elsewhere {format_value(own_row['k3_same'])} → "
            f"{format_value(plain_row['k3_same'])}; p99 {own_row['p99']:.3g} → "
            f"{plain_row['p99']:.3g}",
            "much of it is rounding inside experts, gates and attention, which replay leaves",
        )
        by_alpha = "; ".join(
            f"α = {row['alpha']:g}: {row['p99_ratio']:.3f} [{row['p99_ratio_low']:.3f}, {row['p99_ratio_high']:.3f}], "
            f"{100 * row['dropped']:.3f}% dropped"
            for row in filtered_rows
        )
        add_claim(
            "filter",
            "filtered replay has a lower p99 mismatch than plain replay",
            "§6.2",
            chosen_row,
            "p99_ratio",
            below(1.0, BELOW_ONE),
            "× plain's",
            f"p99 of |log π − log μ|, plain's {plain_row['p99']:.4g} nats; {by_alpha} (intervals of α other than "
            f"{c.alpha:g} widened for their number)",
            "the scores of these engines are so alike that few replayed experts are implausible, and "
            "others in their place add "
            "distance to an engine that plain replay follows",
            idle=not chosen_row["dropped"],
        )
    for a, says in ((0, "α = 0 is plain replay"), (1, "α = 1 is the router's own top-k")):
        if exact[a]:
            decisions, logp = np.max(exact[a], 0)
            note = (
                f"share of experts that differ, both engines; largest difference of a log-prob {logp:.1g} "
                f"nats, from the order of sums"
            )
            claims.append(
                claim(
                    f"alpha-{a}",
                    f"{says}, exactly",
                    "ref/router_replay.py",
                    float(decisions),
                    at_most(0.0),
                    note=note,
                    needs={"log-probs within 1e-4 nats": logp < 1e-4},
                )
            )
    return claims


def parts_of(rows: list[dict], engine: str) -> tuple[dict[str, dict], dict]:
    """The rows of one engine: by method, and the one on routing."""
    engine_rows = [row for row in rows if row.get("engine") == engine]
    return (
        {row["way"]: row for row in engine_rows if row["part"] == "mismatch"},
        next(row for row in engine_rows if row["part"] == "routing"),
    )


def format_value(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def rl_verdicts(c: Experiment, arms: dict[str, list[dict]]) -> list[dict]:
    """Part 2, from the training runs of each arm. Rules, fixed before measuring: a training run gives one number, and
    intervals are Student's t over runs, with arms of one seed in pairs. Mismatch is lower if the interval of the ratio
    of its sums over steps is below one by more than rounding. If the filter dropped nothing, it had no effect to claim.
    If the mismatch does no harm that its interval shows, there is nothing for replay to stabilise."""

    def select_steps(arm: str, key: str) -> np.ndarray:
        return np.array([[s[key] for s in training["steps"]] for training in arms[arm]], dtype=float)

    def make_ratio_claim(
        name: str, says: str, source: str, key: str, arm: str, base: str, note: str = "", idle: bool = False
    ) -> dict:
        arm_values, base_values = select_steps(arm, key), select_steps(base, key)
        ratios = [quotient(a.sum(), b.sum()) for a, b in zip(arm_values, base_values, strict=True)]
        note = (
            f"mean over {c.steps} steps {base_values.mean():.4g} → {arm_values.mean():.4g} nats; by training "
            f"{', '.join(f'{x:.3f}' for x in ratios)}{note}"
        )
        if idle:
            return claim(name, says, source, None, below(1.0, BELOW_ONE), None, f"× {base}'s", note)
        estimate = student(ratios)
        return claim(
            name,
            says,
            source,
            estimate["value"],
            below(1.0, BELOW_ONE),
            (estimate["low"], estimate["high"]),
            f"× {base}'s",
            note,
        )

    def compare_success(arm: str, base: str) -> dict[str, float]:
        return student(
            [np.mean(a["success"]) - np.mean(b["success"]) for a, b in zip(arms[arm], arms[base], strict=True)]
        )

    stable, harm, dropped_share = (
        compare_success("plain", "none"),
        compare_success("exact", "none"),
        select_steps("filtered", "dropped").mean(),
    )
    success_text = "; ".join(
        f"{arm} {np.mean([t['success'] for t in arm_trainings]):.3f}" for arm, arm_trainings in arms.items()
    )
    norms = ", ".join(
        f"{arm} {np.median(select_steps(arm, 'grad_norm')):.3g}/{select_steps(arm, 'grad_norm').max():.3g}"
        for arm in ARMS
    )
    clips = ", ".join(f"{arm} {100 * select_steps(arm, 'outside_clip').mean():.2f}%" for arm in ARMS)
    stable_text = f"{stable['value']:+.3f} [{stable['low']:+.3f}, {stable['high']:+.3f}]"
    has_harm = harm["low"] > 0
    return [
        make_ratio_claim(
            "rl-mismatch", "in RL with an 8-bit sampler, replay lowers the mismatch", R3, "mismatch", "plain", "none"
        ),
        make_ratio_claim("rl-p99", "and its p99", R3, "mismatch_p99", "plain", "none"),
        make_ratio_claim(
            "rl-filter",
            f"the filter (α = {c.alpha:g}) lowers the p99 further",
            "§6.2",
            "mismatch_p99",
            "filtered",
            "plain",
            f"; of the replayed experts it dropped {100 * dropped_share:.3g}%"
            + ("" if dropped_share else ": what the arms differ by is chance"),
            not dropped_share,
        ),
        claim(
            "rl-stable",
            "replay makes RL stable where the mismatch without it does harm",
            R3,
            stable["value"] if has_harm else None,
            above(),
            (stable["low"], stable["high"]) if has_harm else None,
            "held-out success",
            f"plain − none {stable_text}, {c.heldout} tasks × {c.samples}, {c.seeds} trainings; success "
            f"{success_text}; the harm there was to prevent in "
            f"{c.steps} steps, exact sampler − none: {harm['value']:+.3f} [{harm['low']:+.3f}, {harm['high']:+.3f}]"
            f"{'' if has_harm else ', none that shows'}; gradient norm, median/largest: {norms}; ratios outside the "
            f"clip: {clips}",
        ),
    ]


def picture(results: dict, path: Path) -> None:
    """Left: p99 against α. Middle: tokens that differ, against layers. Right: RL."""
    from kit.plots import COLOURS, GREY, save, sheet

    figure, (left, middle, right) = sheet(3, "Router replay between a coarse sampler and a float32 trainer", width=5.2)
    for engine, colour in zip(("bf16", "fp8"), COLOURS, strict=False):
        ways, routing = parts_of(results["rows"], engine)
        line = [row for row in ways.values() if row["alpha"] is not None]
        errors = np.abs(np.array([[row["p99"] - row["p99_low"], row["p99_high"] - row["p99"]] for row in line])).T
        points = [row["alpha"] for row in line], [row["p99"] for row in line]
        left.errorbar(*points, errors, fmt="o-", color=colour, capsize=3, label=f"{engine}, filtered")
        for row in line if engine == "fp8" else []:
            label_position = row["alpha"], row["p99_low"]
            left.annotate(
                f"{100 * row['dropped']:.2g}%",
                label_position,
                (0, -14),
                textcoords="offset points",
                ha="center",
                fontsize=8.5,
            )
        left.axhline(ways["own"]["p99"], color=colour, linestyle="--", linewidth=1.2, label=f"{engine}, no replay")
        L = sum(key.startswith("first_") for key in routing)
        middle.plot(
            range(1, L + 1),
            [routing[f"first_{i}"] for i in range(1, L + 1)],
            "o",
            color=colour,
            label=f"{engine}, measured",
        )
        layers = np.arange(1, REPORTED["layers"] + 1)
        middle.plot(layers, 1 - (1 - routing["routers"]) ** layers, ":", color=colour, label="independent layers")
    left.set(
        yscale="log",
        xlabel="α (0: plain replay, 1: the router's own)",
        title="Mismatch; per cent: replayed experts dropped (fp8)",
    )
    middle.plot(layers, 1 - (1 - REPORTED["decisions"]) ** layers, ":", color=GREY, label="independent, 10% a layer")
    middle.plot(
        [REPORTED["layers"]], [REPORTED["tokens"]], "*", color=GREY, markersize=13, label="reported: 94%, 48 layers"
    )
    middle.set(
        xscale="log", ylim=(0, 1.03), xlabel="layers", ylabel="share of tokens", title="Tokens whose experts differ"
    )
    middle.set_xticks([1, 2, 4, 8, 16, 48], ["1", "2", "4", "8", "16", "48"])
    middle.minorticks_off()
    # The exact sampler's mismatch comes from the order of sums and is five digits smaller: it is only in the table.
    arms = (("none", "no replay", "-"), ("plain", "replay", "-"), ("filtered", "filtered replay", "--"))
    for (arm, label, style), colour in zip(arms, COLOURS, strict=False):
        arm_rows = [row for row in results["rows"] if row["part"] == "rl" and row["arm"] == arm]
        steps = sorted({row["step"] for row in arm_rows})
        by_training = np.array([[row["mismatch_p99"] for row in arm_rows if row["step"] == step] for step in steps])
        right.plot(steps, by_training.mean(1), style, color=colour, label=label)
        right.fill_between(steps, by_training.min(1), by_training.max(1), color=colour, alpha=0.12, linewidth=0)
    right.set(
        yscale="log", xlabel="RL step", title="During RL from SFT, 8-bit sampler (mean and range of the trainings)"
    )
    for axes in (left, middle, right):
        low, high = axes.get_ylim()
        if axes is not middle:  # room for the legend
            axes.set(ylim=(low, high * (high / low) ** 0.45), ylabel="p99 of |log π − log μ|, nats")
        axes.legend(frameon=False, fontsize=8.5, loc="upper left" if axes is middle else "upper right", ncols=1)
    save(figure, path)
