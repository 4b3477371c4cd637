"""What the experiment `behaviour` says: its verdicts and its picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from kit.statistics import student
from sims.experiment import above, below, between, claim
from sims.hack_training import along

__all__ = ["HABITS", "learned", "picture"]

SECTION = "§4.2"
HABITS = {
    "todos": ("a price on to-do items that are left open leaves fewer of them", "items"),
    "broken": ("a price on broken calls makes them rarer", "calls"),
    "failed": ("a price on failed calls makes them rarer", "calls"),
    "sequential": ("a price on calls that are made one a turn gets them made together", "of 1"),
    "silent": ("a price on silence gets the user a message", "of rollouts"),
    "untrue": ("a price on false claims about tests makes them rarer", "of rollouts"),
    "lints": ("a price on the linter's complaints makes them rarer", "complaints"),
    "diff": ("a price on lines makes code shorter", "lines"),
    "comments": ("a price on comments makes them a smaller share of the code", "of 1"),
}
"""What a price on each measure should do, and its unit; all measures are means per rollout."""
Changes = Mapping[str, Mapping[str, np.ndarray]]
"""Of each arm and measure: held-out mean after RL minus the one before, [trainings]."""


def learned(begin: Mapping[str, float], changes: Changes, arms: Mapping[str, Sequence[str]]) -> list[dict]:
    """Whether each price makes its habit rarer, what that does to success, and what becomes of two habits without a
    price. Intervals: Student's, over trainings. What was before RL is the same for all trainings, so its own error is
    not in them; where arms are compared it cancels."""

    def describe_means(name: str) -> str:
        arm_texts = (f"{arm} {begin[name] + changes[arm][name].mean():.3f}" for arm in arms)
        return f"held-out mean per rollout, before RL {begin[name]:.3f}, after it: {', '.join(arm_texts)}"

    def make_verdict(
        name: str, says: str, rule: dict, values: np.ndarray, unit: str, note: str, needs: dict[str, bool]
    ) -> dict:
        estimate = {key: round(x, 9) for key, x in student(values).items()}
        trainings_text = f"trainings by themselves: {', '.join(f'{value:+.3f}' for value in values)}"
        return claim(
            name,
            says,
            SECTION,
            estimate["value"],
            rule,
            (estimate["low"], estimate["high"]),
            unit,
            f"{note}; {trainings_text}",
            needs,
        )

    claims = []
    for name, (says, unit) in HABITS.items():
        priced_change, free_change = (mean_change(changes, arms, name, is_priced) for is_priced in (True, False))
        note = (
            f"{describe_means(name)}; items on the list: {describe_means('items')}"
            if name == "todos"
            else describe_means(name)
        )
        needs = {
            "every training by itself": bool((priced_change - free_change).max() < 0),
            "rarer than before RL where it has a price": bool(priced_change.mean() < 0),
        }
        claims.append(
            make_verdict(
                f"price-{name}", says, below(), priced_change - free_change, f"{unit}, priced against not", note, needs
            )
        )
    cost, unit = changes["all"]["success"] - changes["none"]["success"], "success, all prices against none"
    claims.append(
        make_verdict(
            "leaves-success",
            "prices of habits leave success as it is",
            between(-0.1, 0.1),
            cost,
            unit,
            describe_means("success"),
            {},
        )
    )
    unpriced_habits = {
        "comments": ("without a price on them, comments grow in code", "of the code, after RL against before"),
        "terminal": (
            "without a price on it, the terminal takes the place of other tools",
            "of all calls, after RL against before",
        ),
    }
    for name, (says, unit) in unpriced_habits.items():
        rise = changes["none"][name]
        needs = {"every training by itself": bool(rise.min() > 0)}
        claims.append(make_verdict(f"{name}-without-price", says, above(), rise, unit, describe_means(name), needs))
    return claims


def mean_change(changes: Changes, arms: Mapping[str, Sequence[str]], name: str, is_priced: bool) -> np.ndarray:
    """The change of a measure in the arms that price it, or in the others: their mean, [trainings]."""
    return np.mean(
        [changes[arm][name] for arm, priced_names in arms.items() if (name in priced_names) == is_priced], axis=0
    )


ARM_LABELS = {"none": "no price", "calls": "calls priced", "words": "words and code priced", "all": "all priced"}


def picture(results: dict, path: Path) -> None:
    """Left: every habit after RL, as a share of what it was before, where it has a price and where it has none. Middle:
    success along RL. Right: held-out success, comments and use of the terminal, by arm."""
    from matplotlib.ticker import PercentFormatter

    from kit.plots import BLUE, COLOURS, GREY, save, sheet

    figure, (left, middle, right) = sheet(3, "Habits with a price and without")
    colours = dict(zip(ARM_LABELS, (GREY, COLOURS[1], COLOURS[2], COLOURS[0]), strict=True))
    before, *ends = results["ends"]
    names = list(HABITS)
    for index, name in enumerate(names):
        for shift, is_priced, colour in ((-0.17, True, BLUE), (0.17, False, GREY)):
            values = [
                end[name] / max(before[name], 1e-9)
                for end in ends
                if (name in results["priced"][end["arm"]]) == is_priced
            ]
            left.plot(values, [index + shift] * len(values), "o", color=colour, markersize=3, alpha=0.5)
            label = ("with its price" if is_priced else "without") if index == 0 else None
            left.plot(
                [np.mean(values)] * 2,
                [index + shift - 0.15, index + shift + 0.15],
                color=colour,
                linewidth=3,
                label=label,
            )
    left.axvline(1.0, color="black", linewidth=0.8)
    left.set(
        yticks=range(len(names)), yticklabels=names, title="Held-out, share of what it was before RL", xlim=(0, None)
    )
    left.invert_yaxis()
    left.xaxis.set_major_formatter(PercentFormatter(1.0))
    left.legend(frameon=False, fontsize=8)
    along({"success": middle}, results["rows"], colours, ARM_LABELS)
    middle.set(xlabel="RL step", ylabel="share of rollouts", title="Success along RL", ylim=(0, 1))
    middle.legend(frameon=False, fontsize=8)
    for index, name in enumerate(("success", "comments", "terminal")):
        for number, (arm, colour) in enumerate(colours.items()):
            values = [end[name] for end in ends if end["arm"] == arm]
            right.bar(index + 0.2 * (number - 1.5), np.mean(values), 0.18, color=colour)
            right.plot([index + 0.2 * (number - 1.5)] * len(values), values, ".", color="black", markersize=3)
        right.plot([index - 0.4, index + 0.4], [before[name]] * 2, color="black", linewidth=1)
    right.set(
        xticks=range(3), xticklabels=["success", "comments'\nshare of code", "terminal's\nshare of calls"], ylim=(0, 1)
    )
    right.set_title("Held-out, by arm; line: before RL", fontsize=9)
    save(figure, path)
