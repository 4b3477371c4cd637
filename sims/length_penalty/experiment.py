"""Figure 6, and what the nonlinear length penalty does to an agent that is trained under it.

    etude figure length-penalty         about 30 minutes on two threads; starts from the SFT checkpoint of runs/small
                                        (make small)
    etude figure length-penalty --quick

1. The curves C_{k,q}: against the printed formula in 60-digit decimals, their shape, their limits.
2. Behaviour. RL from the SFT checkpoint under four settings that differ only in the effort penalty:
       none          effort is free
       linear        q = 0
       nonlinear     q = 2, k = 1 / mean effort, so the curve bends at the effort of the SFT policy
       turns free    nonlinear, but turns have no price of their own
   Prices are matched by measurement, on rollouts of the SFT policy on RL tasks. Both nonlinear penalties cost `penalty`
   on average. The linear one charges as much for the next unit of effort as the nonlinear one at the mean effort of
   easy tasks. Both then push equally there, and the claim about room on hard tasks is not confounded with a weaker
   price. (At equal average cost, the bent curve has the lower price for the next unit at all efforts of this agent, on
   easy tasks, too.) All settings see the same tasks in the same order, then play held-out tasks of each depth.
   Intervals are bootstrapped over tasks and paired; training runs differ in their seed, and a claim must hold in each
   run.

Criteria, fixed before the experiment ran: easy is depth 0; hard is the greatest depth that the SFT policy solves in a
tenth of its rollouts (depth 2 is too hard for the tiny agent, and if it never solves a task, a penalty can only teach
it to stop). Parallel calls are judged at depth 2, where the demonstrations sometimes read two helpers in one turn:
among rollouts that read both, the share that read them in one turn, before and after RL with a price on turns. The work
is thus fixed, and giving up does not count.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from kit.runs import Run
from kit.statistics import bootstrap
from recipe.microrepo import Task
from recipe.small.agent import Language, hash_seed, play
from recipe.small.data import task_stream
from recipe.small.demonstrations import context
from recipe.small.learner import language_of, load_checkpoint
from recipe.small.reinforcement import learn
from recipe.small.settings import Recipe, RewardCoefficients
from ref.engine.continuous import ContinuousSampler
from ref.engine.sampler import Sampler
from ref.length_penalty import length_penalty, marginal_cost
from ref.rl import compute_reward_terms
from ref.rollout import Rollout
from sims.behaviour.effort import MEASURES, RATIOS, figure, measure
from sims.experiment import above, claim
from sims.length_penalty import curves as length_curves
from sims.policies import agent

__all__ = ["Experiment", "experiment", "picture"]

SETTINGS = ("none", "linear", "nonlinear", "turns free")
DEPTHS = (0, 1, 2)


@dataclass(frozen=True)
class Experiment:
    """Curves, prices, length of training, precision of the measurements."""

    exponents: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0, 3.0)
    """Values of q, one curve each."""
    bends: tuple[float, ...] = (0.001, 0.01, 0.1)
    """Values of k for checking the curves."""
    run: str = "runs/small"
    """A finished run of the recipe; RL starts from its SFT checkpoint (empty: first run a tiny recipe that has learned
    nothing)."""
    trainings: int = 2
    """RL training runs of each setting; the first has the recipe's own seed."""
    steps: int = 60
    """RL steps of each training run."""
    q: float = 2.0
    """Exponent of the nonlinear penalty; above 1 it is bounded."""
    bend: float = 1.0
    """Its k times the SFT policy's mean effort."""
    turn: float = 10.0
    """Effort per turn, about as much as the tokens and calls in it."""
    penalty: float = 0.2
    """Average cost of each nonlinear penalty for the SFT policy, as reward; solving a task pays 1."""
    matching: int = 128
    """RL tasks for matching prices, four rollouts each."""
    tasks: int = 100
    """Held-out tasks of each depth."""
    samples: int = 8
    """Rollouts per task."""
    margin: float = 0.05
    """A loss of success up to this size counts as none."""
    resamples: int = 2000
    """Bootstrap resamples, over tasks."""
    seed: int = 0
    """Seed of the measurements; added to the recipe's seed, it is that of the training runs."""

    @classmethod
    def quick(cls) -> "Experiment":
        return cls(run="", trainings=1, steps=2, matching=4, tasks=2, samples=2, resamples=100)


def payments(recipe: Recipe, c: Experiment, prices: dict) -> dict[str, RewardCoefficients]:
    """The recipe's payment under each setting, from the curves and prices that `matched` found."""
    base = recipe.rl.payment
    return {
        name: replace(base, effort_price=f["price"], k=f["k"], q=f["q"], weights=replace(base.weights, turns=f["turn"]))
        for name, f in prices.items()
    }


def matched(run: Run, c: Experiment, root: Path, recipe: Recipe) -> dict[str, dict]:
    """Curve and price of each setting. Nonlinear: SFT rollouts on RL tasks pay `penalty` on average. Linear: the next
    unit costs as much as under the nonlinear penalty at the mean effort of easy tasks."""
    stage = run.stage("matching", total=c.matching, unit="tasks")
    if stage.finished:
        return stage.result()
    stage.restore()
    tasks = list(itertools.islice(task_stream(recipe, "rl"), c.matching))
    episodes = playing(policy(root, recipe), language_of(root), tasks, 4, recipe, hash_seed(c.seed, "matching"))
    easy = np.repeat([task.depth == 0 for task in tasks], 4)
    curve = {"none": (0.0, c.turn), "nonlinear": (c.q, c.turn), "linear": (0.0, c.turn), "turns free": (c.q, 0.0)}
    prices_by_name = {}
    for name, (q, turn) in curve.items():
        unit = {name: {"price": 1.0, "k": 0.0, "q": 0.0, "turn": turn}}
        efforts = np.array([-compute_reward_terms(e, payments(recipe, c, unit)[name])["effort"] for e in episodes])
        k = c.bend / efforts.mean() if q else 0.0
        simple = float((efforts[easy] if easy.any() else efforts).mean())
        price = 0.0 if name == "none" else c.penalty / length_penalty(efforts, k, q).mean()
        if name == "linear":
            nonlinear = prices_by_name["nonlinear"]
            price = nonlinear["price"] * marginal_cost(simple, nonlinear["k"], nonlinear["q"])
        low, high = np.quantile(efforts, [0.1, 0.9])
        prices_by_name[name] = {
            "price": float(price),
            "k": float(k),
            "q": q,
            "turn": turn,
            "effort": float(efforts.mean()),
            "effort_easy": simple,
        }
        costs = [-compute_reward_terms(e, payments(recipe, c, prices_by_name)[name])["effort"] for e in episodes]
        prices_by_name[name] |= {
            "penalty": float(np.mean(costs)),
            "effort_low": float(low),
            "effort_high": float(high),
            "next_unit_easy": float(price * marginal_cost(simple, k, q)),
            "next_unit_low": float(price * marginal_cost(low, k, q)),
            "next_unit_high": float(price * marginal_cost(high, k, q)),
        }
    return stage.finish({name: prices_by_name[name] for name in SETTINGS})


def policy(root: Path, recipe: Recipe) -> Sampler:
    """The SFT policy as in RL's sampler: rounded to the dtype of training."""
    model = load_checkpoint(root, recipe, "sft", with_mtp=False)[0].to(getattr(torch, recipe.training.dtype))
    return Sampler(model, getattr(torch, recipe.training.sampler_dtype))


def playing(
    sampler: Sampler, language: Language, tasks: list[Task], n: int, recipe: Recipe, seed: int
) -> Sequence[Rollout]:
    r, generator = recipe.rl, torch.Generator().manual_seed(seed)
    return play(sampler, language, tasks, n, r.limits(context(language, recipe)), r.max_turns, generator, r.temperature)


def heldout(recipe: Recipe, c: Experiment) -> list[Task]:
    """The first held-out tasks of each depth, grouped by depth."""
    tasks_by_depth: dict[int, list[Task]] = {d: [] for d in DEPTHS}
    for task in task_stream(recipe, "evaluation"):
        if len(tasks_by_depth[task.depth]) < c.tasks:
            tasks_by_depth[task.depth].append(task)
        if all(len(depth_tasks) == c.tasks for depth_tasks in tasks_by_depth.values()):
            return [task for depth_tasks in tasks_by_depth.values() for task in depth_tasks]
    raise AssertionError("the stream of tasks ended")


def measure_setting(
    run: Run, c: Experiment, root: Path, recipe: Recipe, name: str, number: int, payment: RewardCoefficients | None
) -> np.ndarray:
    """Trains one setting (if `payment` is None: keeps the SFT policy) and plays held-out tasks with it;
    [depths, tasks, MEASURES]."""
    # The same for all settings
    weighted_payment = replace(recipe.rl.payment, weights=replace(recipe.rl.payment.weights, turns=c.turn))
    stage = run.stage(f"{name.replace(' ', '-')}-{number}", total=c.steps if payment else 1, unit="tokens")
    if not stage.finished:
        config, language, tasks = recipe, language_of(root), heldout(recipe, c)
        if payment:
            seed = recipe.seed + 1000 * c.seed + number
            config = replace(recipe, seed=seed, rl=replace(recipe.rl, steps=c.steps, payment=payment, later=0.0))
            start, reference = (load_checkpoint(root, config, "sft", with_mtp=False)[0] for _ in range(2))
            learner, _ = learn(stage, config, start, None, reference, language)
            sampler = ContinuousSampler(learner.trunk.model, getattr(torch, config.training.sampler_dtype))
        else:
            stage.restore()
            sampler = policy(root, recipe)
        episodes = playing(
            sampler, language, tasks, c.samples, config, hash_seed(c.seed, "length-penalty", name, number)
        )
        stage.finish({"measures": measure(episodes, tasks, c.samples, weighted_payment, language)})
    return np.array(stage.result()["measures"]).reshape(len(DEPTHS), c.tasks, len(MEASURES))


def make_behaviour_rows(data: np.ndarray, sft: np.ndarray, c: Experiment) -> list[dict]:
    """One row per setting and depth: values with intervals, and their paired differences from "none"."""
    rows, means = [], dict(zip(SETTINGS, data.mean(1), strict=True))
    for (name, measures), d in itertools.product([("SFT", sft), *means.items()], DEPTHS):
        row = {"part": "behaviour", "setting": name, "depth": d}
        for quantity in (*MEASURES[:-1], *RATIOS):
            if quantity == "read_together" and d < 2:
                continue  # fewer than two helpers
            estimate = bootstrap(
                measures[d], lambda sample, quantity=quantity: figure(sample.mean(0), quantity), c.resamples
            )
            row |= {
                quantity: estimate["value"],
                f"{quantity}_low": estimate["low"],
                f"{quantity}_high": estimate["high"],
            }
        for quantity in ("success", "tokens", "turns", "effort"):
            change = bootstrap((measures[d] - means["none"][d])[:, MEASURES.index(quantity)], n=c.resamples)
            row |= {f"{quantity}_less_none{'' if end == 'value' else '_' + end}": v for end, v in change.items()}
        rows.append(row)
    return rows


def behaviour_claims(data: np.ndarray, sft: np.ndarray, prices: dict, c: Experiment) -> list[dict]:
    """Verdicts from measures [SETTINGS, trainings, depths, tasks, MEASURES].

    Reproduced: the interval and every training run are on the claim's side. Partly: only the interval is."""
    names = (*SETTINGS, "SFT")
    data = np.concatenate((data, np.broadcast_to(sft, data[:1].shape)))
    solved_shares = sft[:, :, 0].mean(1)
    hard_depth = max((d for d in DEPTHS[1:] if solved_shares[d] >= 0.1), default=1)

    def read_value(m: np.ndarray, name: str, d: int, quantity: str) -> float:
        return figure(m[names.index(name), d], quantity)

    def saved_share(m: np.ndarray, name: str, d: int) -> float:
        return 1 - read_value(m, name, d, "tokens") / read_value(m, "none", d, "tokens")

    def compare(m: np.ndarray, setting: str, d: int, quantity: str) -> float:
        return read_value(m, "nonlinear", d, quantity) - read_value(m, setting, d, quantity)

    def make_claim(
        name: str,
        says: str,
        statistic: Callable[[np.ndarray], float],
        unit: str,
        note: str,
        threshold: float = 0.0,
        lacks: str = "",
    ) -> dict:
        """A claim that the statistic of means [names, depths, MEASURES] is above `threshold`; `lacks`: why it cannot be
        tested."""
        rule = above(threshold)
        if lacks:
            return claim(name, says, "§4.2, Fig. 6", None, rule, note=f"{lacks}; {note}")
        # Task j of every depth and setting is resampled together, which keeps pairs, and depths in proportion.
        e = bootstrap(np.moveaxis(data.mean(1), 2, 0), lambda sample: statistic(sample.mean(0)), c.resamples)
        by_training = [statistic(training.mean(2)) for training in data.swapaxes(0, 1)]
        needs = {"every training by itself": min(by_training) > threshold}
        note += f"; 95% bootstrap over tasks; trainings by themselves: {', '.join(f'{v:+.3f}' for v in by_training)}"
        return claim(name, says, "§4.2, Fig. 6", e["value"], rule, (e["low"], e["high"]), unit, note, needs)

    mean = data.mean((1, 3))
    shares = "; ".join(
        f"{s} {100 * saved_share(mean, s, 0):.0f}% easy, {100 * saved_share(mean, s, hard_depth):.0f}% hard"
        for s in SETTINGS[1:]
    )
    levels = ", ".join(f"{name} {read_value(mean, name, hard_depth, 'success'):.3f}" for name in SETTINGS)
    reading_text = ", ".join(f"{name} {100 * read_value(mean, name, 2, 'read_together'):.0f}%" for name in names)
    readers = (
        min(read_value(mean, name, 2, "both") for name in ("SFT", "nonlinear")) * c.tasks * c.samples * c.trainings
    )
    solved_text = ", ".join(f"{100 * s:.0f}%" for s in solved_shares)

    def spread(m: np.ndarray, name: str) -> float:
        return saved_share(m, name, 0) - saved_share(m, name, hard_depth)

    return [
        make_claim(
            "easy-quick",
            "the penalty makes easy tasks quick",
            lambda m: saved_share(m, "nonlinear", 0),
            "of the tokens",
            "tokens saved at depth 0 by the nonlinear penalty against none",
        ),
        make_claim(
            "easy-more-than-hard",
            "the nonlinear penalty saves on easy rather than on hard tasks, compared with a linear one",
            lambda m: spread(m, "nonlinear") - spread(m, "linear"),
            "of the tokens",
            f"easy − hard, nonlinear − linear. Tokens saved against none: {shares}. Hard is depth {hard_depth}: SFT "
            f"solves {solved_text} "
            f"of rollouts at depths 0, 1, 2. The next unit of an easy task costs the same under both; "
            f"SFT rollouts pay on average "
            f"{prices['linear']['penalty']:.3f} linear, {prices['nonlinear']['penalty']:.3f} nonlinear",
        ),
        make_claim(
            "hard-room",
            "hard tasks keep room: more tokens there than under a linear penalty as dear on easy ones",
            lambda m: compare(m, "linear", hard_depth, "tokens"),
            "tokens",
            f"nonlinear − linear at depth {hard_depth}",
        ),
        make_claim(
            "hard-success",
            f"success on hard tasks is not below a linear penalty's (by more than {c.margin:g})",
            lambda m: compare(m, "linear", hard_depth, "success"),
            "success",
            f"nonlinear − linear at depth {hard_depth}: {levels}",
            -c.margin,
            "too rarely solved without a penalty" if read_value(mean, "none", hard_depth, "success") < 0.1 else "",
        ),
        make_claim(
            "parallel",
            "a price on turns teaches parallel tool calls: the same work in fewer turns",
            lambda m: compare(m, "SFT", 2, "read_together"),
            "of rollouts",
            f"depth 2, of rollouts that read both helpers those that read them in one turn, after RL "
            f"with a price on turns − before: {reading_text}",
            lacks="too few rollouts read both helpers" if readers < 20 else "",
        ),
    ]


def experiment(run: Run, config: Experiment) -> dict:
    """Curves, prices, training runs, measurements, verdicts."""
    c = config
    root, recipe = agent(run, c.run, c.seed)
    prices = matched(run, c, root, recipe)
    setting_payments = payments(recipe, c, prices)
    sft = measure_setting(run, c, root, recipe, "sft", 0, None)
    data = np.array(
        [
            [measure_setting(run, c, root, recipe, s, n, setting_payments[s]) for n in range(c.trainings)]
            for s in SETTINGS
        ]
    )
    curve_rows = length_curves.curves(c.bends, c.exponents)
    rows = [
        *curve_rows,
        *({"part": "price", "setting": name, **f} for name, f in prices.items()),
        *make_behaviour_rows(data, sft, c),
    ]
    return {
        "rows": rows,
        "claims": length_curves.verdicts(curve_rows, c.bends, c.exponents) + behaviour_claims(data, sft, prices, c),
    }


def picture(results: dict, path: Path) -> None:
    """Figure 6, and the behaviour of agents trained under the penalties, by depth."""
    from kit.plots import COLOURS, GREY, save, sheet

    drawing, axes = sheet(2, "The nonlinear length penalty, and agents trained under it", rows=2, width=6.6, height=3.9)
    (curve, tokens), (success, together_panel) = axes
    rows, c = results["rows"], results["config"]
    k = c["bends"][len(c["bends"]) // 2]
    for q, colour in zip(c["exponents"], COLOURS, strict=False):
        curve_points = [
            row for row in rows if row["part"] == "curve" and (row["k"], row["q"]) == (k, q) and row["x"] <= 10 / k
        ]
        efforts = np.linspace(0, 10 / k, 401)
        cost = length_penalty(efforts, k, q)
        curve.plot(efforts, cost, color=colour)
        curve.plot(
            [row["x"] for row in curve_points], [row["exact"] for row in curve_points], "o", color=colour, markersize=3
        )
        label = f" q = {q:g}" + (", linear" if q == 0 else ", logarithm" if q == 1 else "")
        end = int((cost <= 5.1 / k).sum()) - 1
        curve.text(efforts[end], cost[end], label, color=colour, fontsize=9, va="center")
    curve.set(
        xlim=(0, 12.5 / k),
        ylim=(0, 5.4 / k),
        xlabel="effort x, token equivalents",
        ylabel="C(x), token equivalents",
        title=f"The penalty at k = {k:g} (lines; dots: printed formula)",
    )
    series = [("SFT", GREY), *zip(SETTINGS, (COLOURS[4], COLOURS[1], COLOURS[0], COLOURS[3]), strict=True)]
    for index, (name, colour) in enumerate(series):
        setting_rows = [row for row in rows if row["part"] == "behaviour" and row["setting"] == name]
        for axis, quantity in ((tokens, "tokens"), (success, "success")):
            y = np.array([[row[quantity], row[f"{quantity}_low"], row[f"{quantity}_high"]] for row in setting_rows]).T
            error = np.clip([y[0] - y[1], y[2] - y[0]], 0, None)
            axis.errorbar(
                np.array(DEPTHS) + 0.13 * (index - 2), y[0], error, fmt="o", color=colour, markersize=5, label=name
            )
        last = setting_rows[-1]
        y, low, high = (last[f"read_together{end}"] for end in ("", "_low", "_high"))
        together_panel.barh(4 - index, y, color=colour, height=0.6)
        together_panel.plot([low, high], [4 - index] * 2, color="#333333", linewidth=1.5)
    for axis in (tokens, success):
        axis.set_xticks(DEPTHS, ["0 (easy)", "1", "2"])
        axis.set_xlabel("depth: helpers to read")
    tokens.set(ylabel="tokens a rollout", title="Tokens written on held-out tasks (95%, over tasks)")
    success.set(ylabel="share of rollouts solved", title="Success", ylim=(0, 1))
    tokens.legend(frameon=False, fontsize=9)
    together_panel.set_yticks(range(5), [name for name, _ in reversed(series)])
    together_panel.set(
        xlabel="of rollouts that read both helpers", xlim=(0, 1), title="Both helpers read in one turn, depth 2"
    )
    save(drawing, path)
