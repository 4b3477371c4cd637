"""What the divisions that Dr. GRPO leaves out do to the gradient, to the length of answers, and to groups in which all
answers are right.

    etude figure grpo-bias              about a minute
    etude figure grpo-bias --quick      seconds

The policy answers three prompts with words of at most five symbols (sims/words.py). Everything is enumerated, including
complete groups of N rollouts.

1. Expected gradients, without sampling: each member of the family, and either division alone, compared with the true
   gradient of the expected reward, for random policies; on policy, so clips are idle and GSPO's gradient is GRPO's.
2. What these gradients do to the expected length of right and of wrong answers: the derivative in their direction.
3. Groups in which all answers are right and differ only by a small price per token: the size of the advantages, and how
   much of the expected gradient comes from such groups.
4. Training with Adam on sampled groups, measured exactly: reward, lengths, share truncated; and with truncated rollouts
   masked.

Budgets count rollouts for all members. DAPO's budget counts the tokens of its group, as in its paper, in units of the
policy's mean length; in training, the tokens of the step. Such constants do not affect Adam.
"""

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kit.runs import Run
from kit.statistics import bootstrap
from ref.dr_grpo import FAMILY, Variant, family_loss, group_advantages
from sims.experiment import above, at_least, at_most, below, claim
from sims.words import PROMPTS, Groups, World

__all__ = ["Experiment", "experiment", "picture"]

MEMBERS = FAMILY | {"only length": Variant(length="rollout"), "only std": Variant(scale="std")}
TRAINED = MEMBERS | {"masked": replace(FAMILY["dr_grpo"], drop_overlong=True)}
MEASURES = ("reward", "cut", "length", "right", "wrong")


@dataclass(frozen=True)
class Experiment:
    """Sizes of the four parts."""

    letters: int = 3
    """Letters of the alphabet, at least 2; one more symbol ends the word."""
    length: int = 5
    """The length limit in symbols, including the end; a word without an end is truncated there."""
    policies: int = 64
    """Random policies (standard normal logits) whose expected gradients are enumerated."""
    group_sizes: tuple[int, ...] = (2, 3, 4, 8)
    """N: rollouts per group. The last value is reported and used in training."""
    price: float = 0.02
    """Price per token in parts 1 and 3, where tokens have a price."""
    prices: tuple[float, ...] = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
    """Prices for the groups of right answers."""
    seeds: int = 32
    """Training runs of each member, each with its own random policy and samples."""
    groups: int = 2
    """Groups per prompt and step."""
    steps: int = 300
    """Optimiser steps."""
    looks: int = 20
    """Exact measurements during training."""
    lr: float = 0.03
    """Adam's learning rate."""
    seed: int = 0
    """Seed of all random numbers."""

    @classmethod
    def quick(cls) -> "Experiment":
        return cls(length=4, policies=8, group_sizes=(2, 4), prices=(1e-3, 1e-2, 1e-1), seeds=8, steps=40, looks=4)


def true_gradient(world: World, logits: Tensor, price: float) -> Tensor:
    """Gradient of the expected reward, averaged over prompts, in the shape of the logits."""
    logits = logits.detach().requires_grad_()
    return torch.autograd.grad((world.logp(logits).exp() * world.reward(price)).sum() / PROMPTS, logits)[0]


def expected_gradient(
    world: World,
    logits: Tensor,
    name: str,
    groups: list[Groups],
    only_all_right: bool = False,
    by_tokens: bool | None = None,
) -> Tensor:
    """Exact expectation of −∇loss of a member, averaged over prompts, or the part of it from groups in which all
    answers are right."""
    logits = logits.detach().requires_grad_()
    logp = world.logp(logits)
    q, surrogate = logp.detach().exp(), torch.zeros(len(logits), dtype=torch.float64)
    by_tokens = name == "dapo" if by_tokens is None else by_tokens
    for prompt, group in enumerate(groups):
        outcomes, chances = group.chances(q[:, prompt])
        pushes = group.pushes(TRAINED[name], by_tokens)
        if only_all_right:
            pushes = pushes * group.all_right[:, None]
        # Given the outcome, the word still follows the policy.
        weight = q[:, prompt] * (chances @ pushes / outcomes)[:, group.outcome_of]
        surrogate = surrogate + (weight * logp[:, prompt]).sum(1) / PROMPTS
    if by_tokens:
        surrogate = surrogate * (q * world.length).sum(2).mean(1)
    return torch.autograd.grad(surrogate.sum(), logits)[0]


def compare(gradient: Tensor, right: Tensor) -> dict[str, Tensor]:
    """Per policy: cosine, norm ratio, relative distance, and the sine of the angle (the distance that no step size can
    fix)."""
    gradient, right = gradient.flatten(1), right.flatten(1)
    cosine = (gradient * right).sum(1) / (gradient.norm(dim=1) * right.norm(dim=1))
    across = gradient - right * ((gradient * right).sum(1) / right.square().sum(1))[:, None]
    return {
        "cosine": cosine,
        "norm": gradient.norm(dim=1) / right.norm(dim=1),
        "distance": (gradient - right).norm(dim=1) / right.norm(dim=1),
        "sine": across.norm(dim=1) / gradient.norm(dim=1),
    }


def gradients(c: Experiment) -> tuple[list[dict], dict[str, list]]:
    """Parts 1 to 3 by enumeration: rows, and the values per policy ({"what, member, N, price": [S]}) for the
    verdicts."""
    world = World(c.letters, c.length)
    logits = world.policies(c.policies, c.seed * 1000)
    slopes = {}
    for answer_kind in ("right", "wrong"):
        leaf = logits.clone().requires_grad_()
        (slopes[answer_kind],) = torch.autograd.grad(world.measure(leaf)[answer_kind].sum(), leaf)
    rows, values = [], {}
    for price, size in itertools.product((0.0, c.price), c.group_sizes):
        groups, truth = (
            [Groups(world, prompt, size, price) for prompt in range(PROMPTS)],
            true_gradient(world, logits, price),
        )
        expected_gradients = {name: expected_gradient(world, logits, name, groups) for name in MEMBERS}
        expected_gradients["masked"] = expected_gradient(world, logits, "masked", groups)
        expected_gradients["dapo, large step"] = expected_gradient(world, logits, "dapo", groups, by_tokens=False)
        for name, gradient in ({"truth": truth} | expected_gradients).items():
            comparison = compare(gradient, truth)
            unit = gradient / gradient.flatten(1).norm(dim=1)[:, None, None, None, None]
            comparison |= {
                f"grows {answer_kind}": (unit * slope).flatten(1).sum(1) for answer_kind, slope in slopes.items()
            }
            comparison["from (N-1)/N"] = (gradient - truth * (size - 1) / size).flatten(1).norm(dim=1) / truth.flatten(
                1
            ).norm(dim=1)
            if price and name in MEMBERS and size == c.group_sizes[-1]:
                part = expected_gradient(world, logits, name, groups, only_all_right=True)
                comparison["all right"] = part.flatten(1).norm(dim=1) / gradient.flatten(1).norm(dim=1)
            rows.append(
                {
                    "part": "gradient",
                    "member": name,
                    "N": size,
                    "price": price,
                    **{measure: value.mean().item() for measure, value in comparison.items()},
                }
            )
            values |= {f"{measure}, {name}, {size}, {price:g}": value.tolist() for measure, value in comparison.items()}
        ratio = expected_gradients["dr_grpo"] - expected_gradients["rloo"] * (size - 1) / size
        values[f"mean from leave-one-out, {size}, {price:g}"] = (
            ratio.flatten(1).norm(dim=1) / expected_gradients["rloo"].flatten(1).norm(dim=1)
        ).tolist()
    return rows, values


def equally_right(c: Experiment) -> list[dict]:
    """Part 3: root mean square of the advantages in groups of right answers to the easy prompt, exact over groups and
    averaged over policies, relative to that of a group in which half of the answers are right and tokens are free."""
    world, rows = World(c.letters, c.length), []
    q = world.logp(world.policies(c.policies, c.seed * 1000)).exp()[:, 0] * world.right[0]
    size = c.group_sizes[-1]
    half = (torch.arange(size) < size // 2).double()[None]
    for price in c.prices:
        groups = Groups(world, 0, size, price)
        _, chances = groups.chances((q / q.sum(1, keepdim=True)).clamp(min=1e-300))
        chances = chances * groups.all_right
        for scale in ("none", "std"):
            size_of = {
                "right": group_advantages(groups.rewards, scale=scale),
                "half": group_advantages(half, scale=scale),
            }
            square = {name: value.square().mean(1) for name, value in size_of.items()}
            value = ((chances @ square["right"]) / chances.sum(1)).sqrt().mean() / square["half"].sqrt()[0]
            rows.append({"part": "equally right", "scale": scale, "price": price, "N": size, "size": value.item()})
    return rows


def train(run: Run, c: Experiment, name: str) -> dict[str, list]:
    """Part 4: exact measurements [look][seed] while a member trains; all seeds in parallel, reward without price.
    Initial policies and uniform draws are the same for every member."""
    stage = run.stage(f"train-{name.replace(' ', '-')}", total=c.steps, unit="steps")
    if stage.finished:
        return stage.result()
    stage.restore()
    world, size, variant = World(c.letters, c.length), c.group_sizes[-1], TRAINED[name]
    logits = world.policies(c.seeds, c.seed * 1000 + 1).requires_grad_()
    optimizer, reward = torch.optim.Adam([logits], lr=c.lr), world.reward(0.0).repeat(c.seeds, 1)
    generator, curves = torch.Generator().manual_seed(c.seed * 1000 + 2), {"step": []}
    for step in range(c.steps + 1):
        if step % max(1, c.steps // c.looks) == 0 or step == c.steps:
            with torch.no_grad():
                measurements = world.measure(logits)
            curves["step"].append(step)
            for measure, value in measurements.items():
                curves.setdefault(measure, []).append(value.tolist())
            stage.log(step, **{measure: value.mean().item() for measure, value in measurements.items()})
            stage.progress(step)
        if step == c.steps:
            break
        with torch.no_grad():
            ladder = world.logp(logits).exp().flatten(0, 1).cumsum(1)
        draws = torch.rand(len(ladder), c.groups * size, dtype=torch.float64, generator=generator)
        pick = torch.searchsorted(ladder, draws * ladder[:, -1:]).clamp(max=len(world.words) - 1)
        mask = world.mask[pick].double()
        tokens = mask.view(c.seeds, -1).sum(1) if name == "dapo" else torch.full((c.seeds,), PROMPTS * pick.shape[1])
        mask = mask / tokens.repeat_interleave(PROMPTS)[:, None, None]
        logp = world.symbol_logp(logits, world.words[pick]).flatten(0, 1)
        rewards = reward.gather(1, pick).view(-1, size)
        options = {"budget": 1, "finished": world.finished[pick].flatten()}
        optimizer.zero_grad()
        family_loss(variant, logp, logp.detach(), rewards, mask.flatten(0, 1), **options).backward()
        optimizer.step()
    return stage.finish(curves)


def experiment(run: Run, config: Experiment) -> dict:
    """All four parts, and the verdicts."""
    c, stage = config, run.stage("gradients", total=1, unit="enumerations")
    if stage.finished:
        result = stage.result()
    else:
        rows, values = gradients(c)
        result = stage.finish({"rows": rows + equally_right(c), "values": values})
    curves = {name: train(run, c, name) for name in TRAINED}
    rows = result["rows"] + [
        {
            "part": "training",
            "member": name,
            "step": step,
            **{
                f"{measure}{end}": value
                for measure in MEASURES
                for end, value in zip(("", " low", " high"), interval(curve[measure][look]))
            },
        }
        for name, curve in curves.items()
        for look, step in enumerate(curve["step"])
    ]
    return {"rows": rows, "claims": verdicts(c, result["values"], result["rows"], curves)}


def interval(values: list[float]) -> tuple[float, float, float]:
    """Mean of independent values, with its bootstrap interval."""
    estimate = bootstrap(values, n=1000)
    return estimate["value"], estimate["low"], estimate["high"]


def verdicts(c: Experiment, values: dict, rows: list[dict], curves: dict) -> list[dict]:
    paper, report, size = "arXiv:2503.20783, §3", "§4.1", c.group_sizes[-1]
    exact = f"exact for N = {size}; bootstrap over {c.policies} random policies"
    by_seed = f"paired bootstrap over {c.seeds} trainings"

    def find_worst(measure: str, prices: tuple[float, ...] = (0.0, c.price)) -> float:
        return max(max(values[f"{measure}, {size}, {price:g}"]) for size in c.group_sizes for price in prices)

    def select(measure: str, member: str, price: float = 0.0) -> np.ndarray:
        return np.array(values[f"{measure}, {member}, {size}, {price:g}"])

    def change_at_end(measure: str, member: str, baseline: str | None = None) -> tuple[float, float, float]:
        """At the end of training, minus another member's, or minus the start."""
        curve = curves[member][measure]
        return interval(
            (np.array(curve[-1]) - np.array(curves[baseline][measure][-1] if baseline else curve[0])).tolist()
        )

    def make_claim(
        name: str, says: str, source: str, estimate: tuple, rule: dict, unit: str, note: str, needs: dict | None = None
    ) -> dict:
        return claim(name, says, source, estimate[0], rule, estimate[1:], unit, note, needs)

    def make_zero_claim(name: str, says: str, source: str, value: float) -> dict:
        note = f"largest relative distance, by enumeration, N = {c.group_sizes}"
        return claim(name, says, source, value, at_most(1e-9), note=note)

    def length_bias(answer_kind: str) -> tuple[float, float, float]:
        return interval(
            (select(f"grows {answer_kind}", "only length") - select(f"grows {answer_kind}", "dr_grpo")).tolist()
        )

    growth, true_growth, derivation = (
        select("grows wrong", "only length"),
        select("grows wrong", "truth"),
        "derived here, for the reason behind ",
    )
    shares = {name: interval(select("all right", name, c.price).tolist()) for name in ("only std", "dr_grpo")}
    sizes = {
        row["scale"]: row["size"] for row in rows if row["part"] == "equally right" and row["price"] == min(c.prices)
    }
    smallest_size = min(row["size"] for row in rows if row["part"] == "equally right" and row["scale"] == "std")
    length_saving, start = change_at_end("wrong", "grpo", "dr_grpo"), change_at_end("wrong", "dr_grpo")
    reward = change_at_end("reward", "dr_grpo", "grpo")
    return [
        make_zero_claim(
            "mean-factor",
            "Dr. GRPO's expected gradient is (N − 1)/N of the true one: its direction is unbiased",
            paper,
            find_worst("from (N-1)/N, dr_grpo"),
        ),
        make_zero_claim(
            "rloo-exact",
            "with the mean of the others as baseline the factor is gone: RLOO's is the true gradient",
            "arXiv:2402.14740",
            find_worst("distance, rloo"),
        ),
        make_zero_claim(
            "mean-against-others",
            "Dr. GRPO's gradient is (N − 1)/N times RLOO's",
            paper,
            find_worst("mean from leave-one-out"),
        ),
        make_claim(
            "length-gradient",
            "divided by the rollout's length, the gradient points elsewhere than the expected reward's",
            paper,
            interval(select("sine", "only length").tolist()),
            above(0.05),
            unit="sine of the angle",
            note=f"reward 0 or 1; {exact}; limit 0.05",
        ),
        make_claim(
            "std-gradient",
            "divided by the group's deviation, it does too",
            paper,
            interval(select("sine", "only std").tolist()),
            above(0.05),
            unit="sine of the angle",
            note=f"reward 0 or 1, where the deviation reweighs groups by how mixed they are; {exact}; limit 0.05",
        ),
        make_claim(
            "std-gradient-priced",
            "with a price on tokens, too, division by the deviation turns the gradient",
            derivation + report,
            interval(select("sine", "only std", c.price).tolist()),
            above(0.05),
            unit="sine of the angle",
            note=f"price {c.price:g} a token; {exact}; limit 0.05; looked at because of the claim on "
            f"equally right groups",
        ),
        make_claim(
            "wrong-longer",
            "division by length is a length bias: wrong answers get longer than by the unbiased gradient",
            f"{report}; {paper}",
            length_bias("wrong"),
            above(),
            unit="tokens per unit step",
            note=f"derivative of E[length | wrong] along the gradient, divided minus undivided, same step "
            f"length; {exact}",
        ),
        make_claim(
            "right-shorter",
            "and right answers shorter",
            paper,
            length_bias("right"),
            below(),
            unit="tokens per unit step",
            note=f"the same of E[length | right]; {exact}",
        ),
        make_claim(
            "wrong-grow",
            "with division by length, wrong answers grow",
            paper,
            interval(growth.tolist()),
            above(),
            unit="tokens per unit step",
            note=f"in {100 * (growth > 0).mean():.0f}% of policies; along the true gradient in "
            f"{100 * (true_growth > 0).mean():.0f}%, {true_growth.mean():.3f} on average: growth alone is no bias; "
            f"{exact}",
        ),
        make_claim(
            "wrong-longer-trained",
            "after training with division by length, wrong answers are longer than without it",
            f"{report}; {paper}",
            change_at_end("wrong", "only length", "dr_grpo"),
            above(),
            unit="tokens",
            note=f"E[length | wrong] after {c.steps} steps, exact; {by_seed}; without division it changed "
            f"by {start[0]:+.2f} since the start",
        ),
        claim(
            "std-blow-up",
            "division by the deviation blows up small differences in a group that is equally right",
            report,
            smallest_size,
            at_least(0.5),
            unit="× a half-right group's",
            needs={"undivided less than 0.1": sizes["none"] < 0.1},
            note=f"root mean square advantage, least over prices {min(c.prices):g} to {max(c.prices):g} a token; "
            f"undivided at {min(c.prices):g}: {sizes['none']:.2g}; exact for N = {size}; limits 0.5 and 0.1",
        ),
        make_claim(
            "std-share",
            "so that groups in which all are right make up more of the gradient",
            derivation + report,
            interval((select("all right", "only std", c.price) - select("all right", "dr_grpo", c.price)).tolist()),
            above(),
            unit="of the norm",
            note=f"price {c.price:g}: {shares['only std'][0]:.3f} divided, {shares['dr_grpo'][0]:.3f} "
            f"undivided; {exact}",
        ),
        make_claim(
            "unmasked-cut-off",
            "overlong rollouts not masked: the share cut off falls",
            derivation + report,
            change_at_end("cut", "dr_grpo"),
            below(),
            unit="of rollouts",
            note=f"end minus start of training; {by_seed}",
        ),
        make_claim(
            "masked-cut-off",
            "masked, more is cut off than unmasked",
            derivation + report,
            change_at_end("cut", "masked", "dr_grpo"),
            above(),
            unit="of rollouts",
            note=f"end of training; since the start, masked: {change_at_end('cut', 'masked')[0]:+.3f}; {by_seed}",
        ),
        make_claim(
            "masked-longer",
            "masked, answers are longer than unmasked",
            derivation + report,
            change_at_end("length", "masked", "dr_grpo"),
            above(),
            unit="tokens",
            note=f"end of training; {by_seed}",
        ),
        make_claim(
            "masked-grows",
            "masked, length grows during training",
            derivation + report,
            change_at_end("length", "masked"),
            above(),
            unit="tokens",
            note=f"end minus start; unmasked {change_at_end('length', 'dr_grpo')[0]:+.3f}; {by_seed}",
        ),
        make_claim(
            "as-good",
            "Dr. GRPO earns what GRPO earns (less 0.01 at most), with shorter wrong answers",
            "arXiv:2503.20783, Fig. 1 and 5",
            reward,
            above(-0.01),
            "reward",
            f"exact reward at the end, Dr. GRPO minus GRPO, equal learning rate; GRPO's wrong answers "
            f"are longer by {length_saving[0]:.3f} [{length_saving[1]:.3f}, {length_saving[2]:.3f}] tokens; {by_seed}",
            {"its wrong answers are shorter": length_saving[1] > 0},
        ),
    ]


def picture(results: dict, path: Path) -> None:
    """Above: angle, derivative of lengths, blow-up. Below: training."""
    from kit.plots import COLOURS, GREY, save, sheet

    figure, axes = sheet(
        3, "What divisions and masks do to the policy gradient (words of at most five symbols, enumerated)", rows=2
    )
    (angle, slope, blow), bottom = axes
    last = max(row["N"] for row in results["rows"] if row["part"] == "gradient")
    last_rows = [row for row in results["rows"] if row["part"] == "gradient" and row["N"] == last]
    names = [row["member"] for row in last_rows if not row["price"]][::-1]
    for shift, is_priced, colour in ((0.2, False, COLOURS[0]), (-0.2, True, COLOURS[1])):
        by_name = {row["member"]: row for row in last_rows if bool(row["price"]) == is_priced}
        label = f"price {by_name['truth']['price']:g} a token" if is_priced else "reward 0 or 1"
        places = [names.index(name) + shift for name in names]
        angle.barh(places, [by_name[name]["sine"] for name in names], height=0.38, color=colour, label=label)
    angle.set_yticks(range(len(names)), names)
    angle.set(xlabel="sine of the angle to the true gradient", title=f"Expected gradient, N = {last}: direction")
    angle.legend(frameon=False, loc="upper right")
    unpriced_rows = {row["member"]: row for row in last_rows if not row["price"]}
    for shift, answer_kind, colour in ((0.2, "right", COLOURS[2]), (-0.2, "wrong", COLOURS[3])):
        places, values = (
            [i + shift for i in range(len(names))],
            [unpriced_rows[name][f"grows {answer_kind}"] for name in names],
        )
        slope.barh(places, values, height=0.38, color=colour, label=f"given {answer_kind}")
        slope.axvline(unpriced_rows["truth"][f"grows {answer_kind}"], color=colour, linestyle=":")
    slope.set_yticks(range(len(names)), names)
    slope.set(xlabel="change of E[length], tokens per unit step", title="… what it does to length (reward 0 or 1)")
    slope.set_xlim(right=2 * max(row["grows wrong"] for row in unpriced_rows.values()))  # room for the legend
    slope.legend(frameon=False, loc="upper right")
    for scale, label, colour in (("none", "undivided", COLOURS[0]), ("std", "divided by deviation", COLOURS[1])):
        line = [row for row in results["rows"] if row["part"] == "equally right" and row["scale"] == scale]
        blow.plot([row["price"] for row in line], [row["size"] for row in line], "o-", color=colour, label=label)
    blow.axhline(1, color=GREY, linestyle=":")
    blow.set(
        xscale="log",
        yscale="log",
        xlabel="price of a token",
        ylabel="size of advantage / half-right group's",
        title="Groups in which all are right",
    )
    blow.legend(frameon=False)
    training = [row for row in results["rows"] if row["part"] == "training"]
    panels = (
        ("reward", "expected reward (exact)", ("dr_grpo", "grpo", "rloo", "dapo", "only length", "only std")),
        ("wrong", "E[length | wrong], tokens", ("dr_grpo", "grpo", "rloo", "dapo", "only length", "only std")),
        ("cut", "share cut off", ("dr_grpo", "masked", "grpo", "dapo")),
    )
    titles = (
        "Training: reward (gspo = grpo on policy)",
        "Training: length of wrong answers",
        "Training: overlong, masked or not",
    )
    colours: dict[str, str] = dict(
        zip(("dr_grpo", "grpo", "rloo", "dapo", "only length", "only std", "masked"), (*COLOURS, "#000000"))
    )
    for axis, (measure, label, members), title in zip(bottom, panels, titles):
        for name in members:
            line = [row for row in training if row["member"] == name]
            steps = [row["step"] for row in line]
            style = ":" if name == "rloo" else "-"
            axis.plot(
                steps,
                [row[measure] for row in line],
                style,
                color=colours[name],
                label=name,
                linewidth=2.5 if name == "rloo" else 1.5,
            )
            if name in ("dr_grpo", "only length", "masked"):
                axis.fill_between(
                    steps,
                    [r[f"{measure} low"] for r in line],
                    [r[f"{measure} high"] for r in line],
                    color=colours[name],
                    alpha=0.15,
                )
        axis.set(xlabel="step", ylabel=label, title=title)
        axis.legend(frameon=False, fontsize=8, ncols=2)
    save(figure, path)
