"""Self-summaries of the tiny coding agent: tasks that outgrow its context continue with notes that it writes itself.

    etude figure self-summary            about half an hour on two threads; starts from the agent of runs/small (make
                                         small)
    etude figure self-summary --quick

An agent after SFT trains on chains of a scripted agent (`recipe/small/demonstrations.py`), which summarises imperfectly
on purpose: sometimes more than needed, sometimes less. From there RL trains two agents with the same steps, tasks,
prices and budget: "plain" without a limit, which never has to write a summary, and "chains" with the limit, where the
reward of a chain also goes to its summaries. All play the same held-out tasks with

    none       one context of 256 tokens: the upper bound
    truncate   at the trigger the oldest turns are dropped
    separate   at the trigger a separate call with its own prompt asks the agent for a summary: prompt-based compaction
    self       at the trigger the running context asks for it

Compaction error is the loss of success relative to the plain agent without limit. At this size no prompt can explain a
task, so the agent also sees demonstrations of the separate call, as many as of the request in the running context. The
prompt-based baseline of the claims is the better of two: the agent after plain RL, and the agent before RL.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from kit.runs import Run
from kit.statistics import bootstrap
from recipe.small import demonstrations as chains
from recipe.small import reinforcement
from recipe.small.agent import Language, hash_seed, one_row, play
from recipe.small.data import task_stream
from recipe.small.learner import Learner, checkpoint, language_of, load_checkpoint, shown_rows, train
from recipe.small.settings import Memory, Recipe
from ref import cpt, dr_grpo
from ref.engine.continuous import ContinuousSampler
from ref.network import Transformer, load_hf
from ref.rl import compute_own_logp, compute_reward_terms, pad
from ref.rollout import Rollout
from ref.self_summary import Chaining, spread
from sims.experiment import above, at_least, at_most, below, claim, untested
from sims.policies import agent

__all__ = ["Experiment", "experiment", "picture"]

POLICIES = ("shown", "plain", "chains")
"""After demonstrations; after plain RL from there; after RL on chains from there."""
ARMS = (
    ("shown", "none"),
    ("shown", "truncate"),
    ("shown", "separate"),
    ("shown", "self"),
    ("plain", "none"),
    ("plain", "truncate"),
    ("plain", "separate"),
    ("plain", "self"),
    ("chains", "none"),
    ("chains", "self"),
)
COUNTS = (
    "success",
    "reward",
    "written",
    "summary_tokens",
    "summaries",
    "segments",
    "prefill",
    "saved",
    "longest",
    "finished",
)


@dataclass(frozen=True)
class Experiment:
    """Limits, training, evaluation."""

    run: str = "runs/small"
    """A finished run of the recipe, whose agent after SFT is the start (empty: first run a tiny recipe)."""
    trigger: int = 56
    """Tokens at which a context ends."""
    room: int = 24
    """Tokens by which the turn and its output may exceed the trigger."""
    longest_summary: int = 43
    """Maximum length of a summary, in tokens."""
    demonstrations: int = 800
    """Demonstrations of each kind: without limit, with self-summaries, with separate compaction."""
    epochs: int = 3
    """Passes over the demonstrations."""
    memory: Memory = field(default_factory=Memory)
    """How imperfect the scripted summaries are."""
    steps: int = 100
    """RL steps of each of the two agents."""
    tasks: int = 240
    """Held-out tasks."""
    samples: int = 8
    """Rollouts per task, for every agent and method."""
    weighed: int = 4
    """Groups of chains for checking the weight of a chain."""
    depth_mix: tuple[float, float, float] = (0.2, 0.45, 0.35)
    """Shares of depth 0, 1 and 2 among the held-out tasks; few of depth 0 outgrow the limit."""
    resamples: int = 2000
    """Bootstrap resamples, over tasks."""
    seed: int = 0
    """Seed of all random numbers."""

    @classmethod
    def quick(cls) -> "Experiment":
        return cls(
            run="",
            trigger=96,
            room=40,
            longest_summary=70,
            demonstrations=8,
            epochs=1,
            memory=Memory(longest=69),
            steps=1,
            weighed=2,
            tasks=3,
            samples=2,
            resamples=50,
        )


def show(run: Run, c: Experiment, root: Path, config: Recipe, chaining: Chaining) -> None:
    """Fine-tunes the agent after SFT on the three kinds of demonstrations, mixed; checkpoint "shown"."""
    s, language = config.sft, language_of(root)
    pieces = []
    for kind in (chains.unlimited(chaining), chaining, replace(chaining, join="separate")):
        for rollout in itertools.islice(chains.lessons(config, language, kind, s.noise, c.memory), c.demonstrations):
            pieces += [(segment.tokens, segment.sampled) for segment in rollout.chain.segments]
    order = np.random.default_rng([config.seed, 6]).permutation(len(pieces))
    length = max(config.training.long_length, chaining.limit)
    per_epoch, batch = shown_rows([pieces[i] for i in order], length, s.rows, [config.seed, 6])
    steps = per_epoch * c.epochs
    stage = run.stage("shown", total=steps)
    if stage.finished:
        return

    learner = Learner(config, load_checkpoint(root, config, "sft", with_mtp=False)[0], None, s.muon_lr, s.adamw_lr)
    train(stage, config, learner, batch, steps, lambda step: cpt.wsd(step, steps, min(5, steps), steps // 2), "shown")
    files = checkpoint(run, "shown", learner.trunk.masters, None, root)
    stage.finish({"steps": steps, "contexts": len(pieces)}, files)


def reinforce(run: Run, name: str, c: Experiment, root: Path, config: Recipe, chaining: Chaining) -> None:
    """RL of the shown agent under `chaining`; checkpoint `name`."""
    stage = run.stage(name, total=max(1, c.steps), unit="steps")
    if stage.finished:
        return
    model, reference = (load_hf(run.path("checkpoints", "shown")) for _ in range(2))
    config = replace(config, rl=replace(config.rl, steps=c.steps, gate=0.0, later=0.0))
    learner, _ = reinforcement.learn(stage, config, model, None, reference, language_of(root), chaining=chaining)
    files = checkpoint(run, name, learner.trunk.masters, None, root)
    stage.finish({"steps": c.steps}, files)


def counts(episode: Rollout, config: Recipe) -> list[float]:
    """COUNTS of one chain. `segments` counts working contexts; a separate compaction does not count."""
    chain = episode.chain
    summaries = sum(bool(s.summary.any()) for s in chain.segments)
    compactions = sum(bool(s.summary.any()) and bool((s.summary == s.sampled).all()) for s in chain.segments)
    longest = max(len(s.tokens) for s in chain.segments)
    reward = sum(compute_reward_terms(episode, config.rl.payment).values())
    return [
        episode.metrics["tests"],
        reward,
        chain.num_sampled_tokens,
        chain.summary_tokens,
        summaries,
        len(chain.segments) - compactions,
        chain.prefill,
        chain.saved,
        longest,
        float(chain.finished),
    ]


def measure(
    run: Run, c: Experiment, root: Path, config: Recipe, chaining: Chaining, policy: str
) -> dict[str, np.ndarray]:
    """COUNTS [tasks, samples, counts] of one agent on the held-out tasks, and their depths."""
    stage = run.stage(f"play-{policy}-{chaining.join}", total=c.tasks, unit="tasks")
    if not stage.finished:
        stage.restore()
        language, r = language_of(root), config.rl
        world = replace(config, world=replace(config.world, depth_mix=c.depth_mix))
        tasks = list(itertools.islice(task_stream(world, "evaluation"), c.tasks))
        sampler = ContinuousSampler(
            load_hf(run.path("checkpoints", policy)), getattr(torch, config.training.sampler_dtype)
        )
        generator = torch.Generator().manual_seed(hash_seed(c.seed, policy, chaining.join))
        rows, chunk = [], max(1, 256 // c.samples)
        for start in range(0, len(tasks), chunk):
            chunk_tasks = tasks[start : start + chunk]
            episodes = play(
                sampler, language, chunk_tasks, c.samples, r.limits(chaining), r.max_turns, generator, r.temperature
            )
            rows += [counts(e, config) for e in episodes]
            stage.progress(min(start + chunk, len(tasks)))
        stage.log(1, success=float(np.mean([row[0] for row in rows])))
        stage.finish({"counts": np.round(np.array(rows), 6).tolist(), "depth": [t.depth for t in tasks]})
    result = stage.result()
    return {
        "counts": np.array(result["counts"]).reshape(c.tasks, c.samples, len(COUNTS)),
        "depth": np.array(result["depth"]),
    }


def one_weight(model: Transformer, episodes: Sequence[Rollout], config: Recipe) -> dict[str, float]:
    """Does a chain's weight depend on its number of segments? Compares the parameter gradients of a batch of chains
    with segments as rows (as in the trainer) and with each chain as one row of packed segments, where advantages and
    denominator know nothing of segments. Distances are relative to the latter; `faulty`: baseline and denominator over
    rows."""
    batch, N = [e.chain for e in episodes], config.rl.rollouts
    rewards = torch.tensor(
        [sum(compute_reward_terms(e, config.rl.payment).values()) for e in episodes], dtype=torch.float64
    ).view(-1, N)
    advantages, budget = dr_grpo.group_advantages(rewards).flatten(), float(len(batch) * config.rl.budget_tokens)
    segments = [s for chain in batch for s in chain.segments]
    model = model.double()

    def gradient(rows: list, weights: torch.Tensor, budget: float, **tensors: torch.Tensor) -> torch.Tensor:
        ids, mask, _ = pad(rows)
        total = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
        for row_indices in torch.arange(len(rows)).split(8):
            hidden = model(
                ids[row_indices], logits=False, **{name: value[row_indices] for name, value in tensors.items()}
            ).hidden
            logp = compute_own_logp(model, hidden, ids[row_indices], mask[row_indices], config.rl.temperature)
            loss = dr_grpo.policy_loss(
                logp, logp.detach(), weights[row_indices].to(logp.dtype), mask[row_indices, 1:], budget=budget
            )
            total += torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        return total

    packed_rows = [one_row(chain) for chain in batch]
    T = max(len(w.tokens) for w in packed_rows)
    doc, token_positions = torch.full((len(batch), T), -1), torch.zeros(len(batch), T, dtype=torch.long)
    for row, chain in enumerate(batch):
        lengths = torch.tensor([len(s.tokens) for s in chain.segments])
        doc[row, : lengths.sum()] = torch.arange(len(lengths)).repeat_interleave(lengths)
        token_positions[row, : lengths.sum()] = torch.cat([torch.arange(int(n)) for n in lengths])
    reference_gradient = gradient(packed_rows, advantages, budget, doc=doc, positions=token_positions)
    split_gradient = gradient(segments, spread(advantages, batch), budget)
    owner = torch.arange(len(batch)).repeat_interleave(torch.tensor([len(chain.segments) for chain in batch]))
    segment_rewards, groups = rewards.flatten()[owner], owner // N
    row_means = torch.stack([segment_rewards[groups == g].mean() for g in range(len(rewards))])
    faulty_gradient = gradient(
        segments, segment_rewards - row_means[groups], float(len(segments) * config.rl.budget_tokens)
    )
    scale = reference_gradient.norm().clamp_min(1e-300)
    return {
        "split": ((split_gradient - reference_gradient).norm() / scale).item(),
        "faulty": ((faulty_gradient - reference_gradient).norm() / scale).item(),
        "chains": len(batch),
        "most_segments": max(len(chain.segments) for chain in batch),
        "gradient": reference_gradient.norm().item(),
    }


def measure_weight(run: Run, c: Experiment, root: Path, config: Recipe, chaining: Chaining) -> dict[str, float]:
    """`one_weight` on a batch of the agent at the start of RL on chains."""
    stage = run.stage("weight", total=1, unit="batches")
    if stage.finished:
        return stage.result()
    stage.restore()
    model, language, r = load_hf(run.path("checkpoints", "shown")), language_of(root), config.rl
    tasks = list(itertools.islice(task_stream(config, "gate"), c.weighed))
    generator = torch.Generator().manual_seed(hash_seed(config.seed, "weight"))
    episodes = play(
        ContinuousSampler(model, torch.float32),
        language,
        tasks,
        r.rollouts,
        r.limits(chaining),
        r.max_turns,
        generator,
        r.temperature,
    )
    return stage.finish(one_weight(model, episodes, config))


def experiment(run: Run, config: Experiment) -> dict:
    """Three training runs, ten evaluations, and the verdicts."""
    c = config
    root, recipe = agent(run, c.run, c.seed)
    recipe = replace(recipe, seed=c.seed)
    language: Language = language_of(root)
    chaining = chains.make_chaining(language, c.trigger, c.room, c.longest_summary)
    show(run, c, root, recipe, chaining)
    reinforce(run, "plain", c, root, recipe, chains.unlimited(chaining))
    reinforce(run, "chains", c, root, recipe, chaining)
    weight = measure_weight(run, c, root, recipe, chaining)
    results = {}
    for policy, join in ARMS:
        arm_chaining = chains.unlimited(chaining) if join == "none" else replace(chaining, join=join)
        results[policy, join] = measure(run, c, root, recipe, arm_chaining, policy)
    rows = [row for arm, result in results.items() for row in rows_of(arm, result, c)]
    has_outgrown = results["plain", "none"]["counts"][..., COUNTS.index("longest")] > c.trigger
    depth = results["plain", "none"]["depth"]
    outgrows = {str(d): float(has_outgrown[depth == d].mean()) for d in sorted(set(depth.tolist()))}
    claims = verdicts(results, weight, outgrows, c)
    return {"rows": rows, "claims": claims, "limit": chaining.limit, "outgrows": outgrows, "weight": weight}


def rows_of(arm: tuple[str, str], result: dict[str, np.ndarray], c: Experiment) -> list[dict]:
    """Means of an arm: over all tasks and by depth, with intervals of success; rewards by number of segments."""
    rows, (policy, join) = [], arm
    for d in ("all", *sorted(set(result["depth"].tolist()))):
        depth_counts = result["counts"] if d == "all" else result["counts"][result["depth"] == d]
        means = {name: float(depth_counts[..., i].mean()) for i, name in enumerate(COUNTS)}
        success = bootstrap(depth_counts[..., 0].mean(1), n=c.resamples)
        outgrown = float((depth_counts[..., COUNTS.index("longest")] > c.trigger).mean())
        rows.append(
            {
                "part": "arm",
                "policy": policy,
                "join": join,
                "depth": d,
                "tasks": len(depth_counts),
                **means,
                "low": success["low"],
                "high": success["high"],
                "outgrown": outgrown,
            }
        )
    segments = result["counts"][..., COUNTS.index("segments")]
    for n in sorted(set(segments.flatten().tolist())):
        has_n_segments = segments == n
        tasks = has_n_segments.any(1)
        # One mean per task: the chains of a task are not independent.
        reward = bootstrap(
            [result["counts"][t, has_n_segments[t], 1].mean() for t in tasks.nonzero()[0]], n=c.resamples
        )
        rows.append(
            {
                "part": "segments",
                "policy": policy,
                "join": join,
                "segments": int(n),
                "chains": int(has_n_segments.sum()),
                "tasks": int(tasks.sum()),
                "reward": reward["value"],
                "low": reward["low"],
                "high": reward["high"],
                "success": float(result["counts"][..., 0][has_n_segments].mean()),
            }
        )
    return rows


def ratio(top: np.ndarray, bottom: np.ndarray, n: int) -> dict[str, float] | None:
    """Σ top / Σ bottom with its interval, tasks resampled in pairs; None if the interval of the denominator reaches
    zero, because the ratio then says nothing."""
    if bootstrap(bottom, n=n)["low"] <= 0:
        return None

    def sample_ratio(sample: np.ndarray) -> float:
        return sample[:, 0].sum() / max(sample[:, 1].sum(), 1e-9)

    return bootstrap(np.stack([top, bottom], 1), sample_ratio, n=n)


def verdicts(results: dict, weight: dict, outgrows: dict, c: Experiment) -> list[dict]:
    """The claims, by rules fixed before any result was seen."""
    interval_note, post = "95% bootstrap over tasks, paired", "§4.1, self-summarisation post"

    def per_task(arm: tuple[str, str], name: str) -> np.ndarray:
        return results[arm]["counts"][..., COUNTS.index(name)].mean(1)

    def make_claim(
        name: str,
        says: str,
        source: str,
        estimate: dict | None,
        rule: dict,
        unit: str,
        note: str,
        needs: dict | None = None,
    ) -> dict:
        if estimate is None:
            return claim(name, says, source, None, rule, unit=unit, note=f"nothing to compare with; {note}")
        return claim(
            name,
            says,
            source,
            estimate["value"],
            rule,
            (estimate["low"], estimate["high"]),
            unit,
            f"{interval_note}; {note}",
            needs,
        )

    own_arm, success = ("chains", "self"), {arm: per_task(arm, "success") for arm in ARMS}
    top = success["plain", "none"]
    base = max((("plain", "separate"), ("shown", "separate")), key=lambda arm: success[arm].mean())
    errors = ", ".join(f"{p} {j} {(top - success[p, j]).mean():.3f}" for p, j in ARMS if (p, j) != ("plain", "none"))
    binds = ", ".join(f"{100 * share:.0f}% at depth {d}" for d, share in outgrows.items())

    sizes = np.stack([per_task(arm, name) for arm in (own_arm, base) for name in ("summary_tokens", "summaries")], 1)

    def size(sample: np.ndarray, column: int) -> float:
        return sample[:, column].sum() / max(sample[:, column + 1].sum(), 1e-9)

    has_both = bool(sizes[:, 1].any() and sizes[:, 3].any())
    length_ratio = (
        bootstrap(sizes, lambda sample: size(sample, 0) / max(size(sample, 2), 1e-9), n=c.resamples)
        if has_both
        else None
    )
    prefill, saved_tokens = per_task(own_arm, "prefill"), per_task(own_arm, "saved")
    played_ratio = ratio(
        per_task(("shown", "self"), "prefill"), per_task(("shown", "separate"), "prefill"), c.resamples
    )
    gain = bootstrap(success[own_arm] - success["shown", "self"], n=c.resamples)
    gain_over_plain = bootstrap(success[own_arm] - success["plain", "self"], n=c.resamples)
    before, after = (success[p, "none"] - success[p, "self"] for p in ("shown", "chains"))
    loss_reduction = bootstrap(before - after, n=c.resamples)
    has_segments = weight["most_segments"] > 1 and weight["gradient"] > 0
    return [
        make_claim(
            "half-error",
            "self-summaries lose about half of the success that prompt-based compaction loses",
            post,
            ratio(top - success[own_arm], top - success[base], c.resamples),
            untested(),
            "× its error",
            "one agent was trained under the limit and the other was not: to be played with both trained under it; "
            f"error against the plain agent without limit, success {top.mean():.3f}, whose rollouts "
            f"outgrow the trigger: "
            f"{binds}; "
            f"baseline {' '.join(base)}; errors: {errors}",
        ),
        make_claim(
            "shorter",
            "its summaries are far shorter than those of prompt-based compaction: 1,000 tokens, not 5,000",
            post,
            length_ratio,
            below(1.0, 0.5),
            "× their tokens",
            f"tokens a summary: {' '.join(base)} {size(sizes, 2):.1f}, chains self "
            f"{size(sizes, 0):.1f}; both were shown "
            f"summaries of one scripted agent, so only RL could part them, and at most "
            f"{c.longest_summary} tokens are allowed",
        ),
        make_claim(
            "cache",
            "asking in the running context reuses its cache and saves prefill",
            post,
            ratio(saved_tokens, prefill + saved_tokens, c.resamples) if saved_tokens.any() else None,
            at_least(0.01),
            "of all prefill",
            f"counted on chains after RL: {prefill.mean():.0f} tokens a rollout instead of "
            f"{(prefill + saved_tokens).mean():.0f}"
            + (
                f"; played, before RL {played_ratio['value']:.2f} × what it fills with separate calls"
                if played_ratio
                else ""
            ),
        ),
        make_claim(
            "rl-improves",
            "RL with the final reward on every token of the chain improves the summaries",
            "§4.1",
            gain,
            above(),
            "success",
            "under the limit, after minus before; the loss against its own play without limit falls by "
            f"{loss_reduction['value']:.3f} "
            f"[{loss_reduction['low']:.3f}, {loss_reduction['high']:.3f}], without which the agent may only have "
            "become better at the rest; "
            f"against plain RL, whose summaries no reward reached, {gain_over_plain['value']:+.3f} "
            f"[{gain_over_plain['low']:.3f}, {gain_over_plain['high']:.3f}]; "
            "demonstrations were noisy on purpose, and part of any gain is the removal of that noise",
            {"the loss against play without limit falls": loss_reduction["low"] > 0},
        ),
        claim(
            "one-weight",
            "a chain with more segments does not weigh more than one with fewer",
            "§4.1",
            weight["split"] if has_segments else None,
            at_most(1e-9),
            unit="relative",
            needs={"over rows it would": not has_segments or weight["faulty"] > 1e-2},
            note="distance of the parameters' gradient with segments as rows from that with chains as rows, on "
            f"{weight['chains']} chains of up to {weight['most_segments']} segments; with baseline and "
            f"denominator over rows "
            f"{weight['faulty']:.3f}"
            + ("" if has_segments else "; this batch had no chain of several segments, or no gradient"),
        ),
    ]


POLICY_LABELS = {"shown": "before RL", "plain": "plain RL", "chains": "RL on chains"}


def label(arm: tuple[str, str]) -> str:
    return f"{POLICY_LABELS[arm[0]]}: {'no limit' if arm[1] == 'none' else arm[1]}"


def whiskers(rows: list[dict], value: str) -> list[list[float]]:
    return [[row[value] - row["low"] for row in rows], [row["high"] - row[value] for row in rows]]


def picture(results: dict, path: Path) -> None:
    """Success with every method, by depth, and rewards by number of segments."""
    from kit.plots import COLOURS, GREY, save, sheet

    figure, (left, middle, right) = sheet(3, "A context limit, and what joins the contexts", width=5.0, height=4.0)
    arms = [row for row in results["rows"] if row["part"] == "arm"]
    colours = {"none": GREY, "truncate": COLOURS[5], "separate": COLOURS[1], "self": COLOURS[0]}
    all_rows = [row for row in arms if row["depth"] == "all"][::-1]
    left.barh(
        range(len(all_rows)),
        [row["success"] for row in all_rows],
        color=[colours[row["join"]] for row in all_rows],
        height=0.7,
        xerr=whiskers(all_rows, "success"),
        error_kw={"elinewidth": 1, "ecolor": "#333333"},
    )
    for index, row in enumerate(all_rows):
        left.text(row["high"], index, f" {row['success']:.2f}", va="center", fontsize=9)
    left.set_yticks(range(len(all_rows)), [label((row["policy"], row["join"])) for row in all_rows], fontsize=9)
    left.set(xlabel="success (95% interval over tasks)", title=f"All tasks; limit {results['limit']} tokens")
    left.set_xlim(0, max(0.1, 1.15 * max(row["high"] for row in all_rows)))
    shown_arms = (
        ("plain", "none"),
        ("plain", "truncate"),
        ("plain", "separate"),
        ("shown", "self"),
        ("chains", "self"),
    )
    for n, arm in enumerate(shown_arms):
        depth_rows = [row for row in arms if (row["policy"], row["join"]) == arm and row["depth"] != "all"]
        depth_positions, line = (
            [row["depth"] + 0.06 * (n - 2) for row in depth_rows],
            "o--" if arm[0] == "shown" else "o-",
        )
        middle.errorbar(
            depth_positions,
            [row["success"] for row in depth_rows],
            whiskers(depth_rows, "success"),
            fmt=line,
            color=colours[arm[1]],
            markersize=4,
            label=label(arm),
        )
    ticks = [f"depth {d}\n{100 * share:.0f}% outgrow it" for d, share in results["outgrows"].items()]
    middle.set_xticks([int(d) for d in results["outgrows"]], ticks)
    middle.set(
        ylabel="success (95% interval over tasks)",
        title="By depth; share of rollouts beyond the trigger",
        ylim=(0, 1.02),
    )
    middle.legend(frameon=False, fontsize=8, loc="best")
    by_number = [
        row for row in results["rows"] if row["part"] == "segments" and row["join"] == "self" and row["tasks"] > 1
    ]
    for arm, colour, side in (("shown", COLOURS[4], -1), ("chains", COLOURS[0], 1)):
        segment_rows = [row for row in by_number if row["policy"] == arm]
        segment_positions = [r["segments"] + 0.06 * side for r in segment_rows]
        right.errorbar(
            segment_positions,
            [r["reward"] for r in segment_rows],
            whiskers(segment_rows, "reward"),
            fmt="o-",
            color=colour,
            markersize=4,
            label=label((arm, "self")),
        )
        for x, r in zip(segment_positions, segment_rows, strict=True):
            right.annotate(
                str(r["chains"]),
                (x, r["reward"]),
                xytext=(5 * side, 4 * side),
                textcoords="offset points",
                fontsize=8,
                color=colour,
                ha="left" if side > 0 else "right",
                va="bottom" if side > 0 else "top",
            )
    max_segments = max((r["segments"] for r in by_number), default=1)
    right.set_xticks(range(1, max_segments + 1))
    right.set(
        xlabel="segments of the chain (beside the dots: chains)",
        ylabel="reward (95% interval over tasks)",
        title="Reward of chains by their segments",
        xlim=(0.5, max_segments + 0.5),
    )
    right.legend(frameon=False, fontsize=8)
    save(figure, path)
