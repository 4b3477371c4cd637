"""What the experiment `monitor` says: its verdicts and its picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from sims.experiment import above, at_most, below, claim
from sims.hack_training import along
from sims.statistics import share, student

__all__ = ["learned", "picture"]

POST = "real-time RL"
REPORT = "§4.2"
BETS = "arXiv:2010.09686"
PLANTED = ("comments", "terminal", "broken")


def learned(played: Sequence[Mapping], unchanged: Mapping[str, int], base: Mapping[str, float]) -> list[dict]:
    """`played`: of each training, the step of its alarm and that at which its habit had doubled, the habit and success at the end, and whether the
    statistics that show it are inside of their bands then. `unchanged`: runs in which nothing changes, and how many of them raised an alarm."""
    recipe = share(np.arange(unchanged["runs"]) < unchanged["recipe"])
    exact = share(np.arange(unchanged["exact_runs"]) < unchanged["exact"])
    threshold = share(np.arange(unchanged["exact_runs"]) < unchanged["threshold"])
    planted = [one for one in played if one["arm"] in PLANTED]
    found = share([one["alarm"] is not None for one in planted])
    return [
        claim(
            "false-alarms",
            "an alarm means something: the recipe's monitor hardly ever raises one in a run in which nothing changes",
            BETS,
            recipe["high"],
            at_most(0.01),
            None,
            "share of unchanged runs with an alarm, upper end of its interval",
            f"{unchanged['recipe']} of {unchanged['runs']:,} runs, each with bands that it has learnt itself; Clopper and Pearson's 95% interval "
            f"[{recipe['low']:.4f}, {recipe['high']:.4f}]",
        ),
        claim(
            "exact-means",
            "the bound on false alarms holds without any tolerance",
            BETS,
            exact["high"],
            at_most(0.01),
            None,
            "share of unchanged runs with an alarm, upper end of its interval",
            f"{unchanged['exact']} of {unchanged['exact_runs']:,} runs of 100 steps, bets against the exact means",
        ),
        claim(
            "three-deviations",
            "a threshold that is looked at once a step raises false alarms in most runs",
            BETS,
            threshold["value"],
            above(0.5),
            (threshold["low"], threshold["high"]),
            "share of unchanged runs with an alarm",
            f"{unchanged['threshold']} of {unchanged['exact_runs']:,} runs of 100 steps, a step's mean three deviations away from the exact mean",
        ),
        claim(
            "planted-found",
            "a monitor finds what the report and the posts watched for: comments, the terminal, broken calls",
            f"{REPORT}; {POST}",
            found["value"],
            above(0.5),
            (found["low"], found["high"]),
            "share of the trainings with a planted failure in which it is found",
            "step of the alarm (step at which the habit had doubled): "
            + "; ".join(f"{arm} {steps(planted, arm)}" for arm in PLANTED)
            + f"; alarms without a mistake: {changed(played)}",
            {f"every training with {arm}": all(one["alarm"] is not None for one in planted if one["arm"] == arm) for arm in PLANTED},
        ),
        *(answered(played, habit, base[habit]) for habit in ("comments", "terminal")),
    ]


def steps(played: Sequence[Mapping], arm: str) -> str:
    """The steps of the alarms of an arm's trainings, and of the doubled habit in brackets."""
    words = {None: "never"}
    return ", ".join(f"{words.get(one['alarm'], one['alarm'])} ({words.get(one['doubled'], one['doubled'])})" for one in played if one["arm"] == arm)


def changed(played: Sequence[Mapping]) -> str:
    """What has changed in the control, which learns to solve its tasks."""
    return ", ".join(f"{name} at step {step}" for one in played if one["arm"] == "control" for name, step in one["others"]) or "none"


def answered(played: Sequence[Mapping], habit: str, before: float) -> dict:
    """Whether a price that follows the alarm ends the habit."""
    left, priced = ([one for one in played if one["arm"] == arm] for arm in (habit, f"{habit}-priced"))
    ends, solved = ({arm: np.array([one[name] for one in some]) for arm, some in (("left", left), ("priced", priced))} for name in ("end", "solved"))
    change = student(ends["priced"] - ends["left"])
    return claim(
        f"answered-{habit}",
        f"a new reward that follows the alarm ends the habit ({habit})",
        REPORT,
        change["value"],
        below(),
        (change["low"], change["high"]),
        "share of the habit over the last four steps, with the price minus without",
        f"before RL {before:.3f}; at the end without a price {ends['left'].mean():.3f}, with one {ends['priced'].mean():.3f}; success "
        f"{solved['left'].mean():.3f} and {solved['priced'].mean():.3f}; alarms at step {', '.join(str(one['alarm']) for one in priced)}",
        {"back within its band in every training": all(one["inside"] for one in priced)},
    )


TITLES = {"comments": "Comments, share of code", "terminal": "Terminal, share of calls", "broken": "Broken calls, share of calls"}
COLOURED = {"control": "no mistake", "comments": "paid", "comments-priced": "paid; priced from the alarm on"}


def picture(found: dict, path: Path) -> None:
    """The habits of the three failures along RL, thin each training, thick their mean, with the band and the alarms; and false alarms."""
    from sims.drawing import COLOURS, GREY, save, sheet

    figure, axes = sheet(4, "Planted failures: when the monitor finds them, and what a price does from then on")
    curves = {habit: f"watch_{habit}" for habit in PLANTED}
    rows = [{name: row.get(name, 0.0) for name in ("world", "step", *curves.values())} for row in found["rows"]]
    for axis, (habit, name) in zip(axes, curves.items()):
        colours = {"control": GREY, habit: COLOURS[1], f"{habit}-priced": COLOURS[0]}
        labels = dict(zip(colours, COLOURED.values()))
        shown = {world: colour for world, colour in colours.items() if any(row["world"] == world for row in rows)}
        along({name: axis}, rows, shown, labels)
        for one in found["trainings"]:
            if one["arm"] in shown and one["alarm"]:
                axis.axvline(one["alarm"], color=shown[one["arm"]], linewidth=0.8, linestyle=":")
        axis.axhline(2 * found["usual"]["means"][habit], color="black", linewidth=0.8, linestyle="--")
        axis.set(
            xlabel="RL step",
            title={"comments": "Comments, share of code", "terminal": "Terminal, share of reads, tests"}.get(habit, "Broken calls, share of calls"),
        )
        axis.legend(frameon=False, fontsize=7)
    last, unchanged = axes[-1], found["unchanged"]
    names = {"recipe": "recipe's", "exact": "exact means", "threshold": "3 deviations"}
    shares = [unchanged[name] / unchanged["runs" if name == "recipe" else "exact_runs"] for name in names]
    last.bar(range(3), shares, color=[COLOURS[0], COLOURS[0], COLOURS[1]])
    for at, value in enumerate(shares):
        last.text(at, value + 0.01, f"{value:.1%}", ha="center", fontsize=8)
    last.set(ylim=(0, 1.1), ylabel="share of unchanged runs", title="False alarms")
    last.set_xticks(range(3), names.values(), fontsize=7)
    save(figure, path)
