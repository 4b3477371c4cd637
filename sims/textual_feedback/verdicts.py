"""What the experiment `textual-feedback` says: its verdicts and its picture."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kit.statistics import student
from sims.experiment import above, below, between, claim
from sims.hack_training import along

__all__ = ["learned", "picture"]

RELEASE, SDPO = "Composer 2.5", "arXiv:2601.20802"
Numbers = Mapping[str, Mapping[str, np.ndarray]]
"""Of each arm and of each thing that is counted: its mean per rollout in every training [trainings]."""


def learned(steps: Numbers, ends: Numbers, before: Mapping[str, Mapping[str, float]]) -> list[dict]:
    """`steps`: over all rollouts of a training; `ends`: over held-out rollouts at its end; `before`: over held-out
    rollouts of each world before RL. Intervals: Student's, over trainings, of the difference between two arms with the
    same seeds and tasks."""

    def make_claim(
        name: str,
        says: str,
        source: str,
        numbers: Numbers,
        measure: str,
        arm: str,
        control: str,
        rule: dict,
        unit: str,
        needs: dict,
        suffix: str,
    ) -> dict:
        differences = numbers[arm][measure] - numbers[control][measure]
        interval = {key: round(x, 9) for key, x in student(differences).items()}
        period = "all rollouts of RL" if numbers is steps else "held-out rollouts after RL"
        means_text = f"{numbers[arm][measure].mean():.3f} {arm}, {numbers[control][measure].mean():.3f} {control}"
        note = f"{period}: {means_text}{suffix}; trainings by themselves: {', '.join(f'{x:+.3f}' for x in differences)}"
        return claim(
            name, says, source, interval["value"], rule, (interval["low"], interval["high"]), unit, note, needs
        )

    def check_trainings(numbers: Numbers, measure: str, arm: str, control: str, sign: int) -> dict[str, bool]:
        return {
            "every training by itself": bool((sign * (numbers[arm][measure] - numbers[control][measure])).min() > 0)
        }

    before_faults = before["faults"]
    faults_unit, before_text = (
        "faults a rollout, hints less outcome",
        f"; {before_faults['faults']:.3f} before RL, held-out",
    )
    return [
        make_claim(
            "fewer-faults",
            "with hints at the messages that went wrong, their faults fall faster than under the outcome reward alone",
            RELEASE,
            steps,
            "faults",
            "hints",
            "outcome",
            below(),
            faults_unit,
            check_trainings(steps, "faults", "hints", "outcome", -1),
            before_text,
        ),
        make_claim(
            "mended",
            "after RL with hints the agent errs less without them",
            RELEASE,
            ends,
            "faults",
            "hints",
            "outcome",
            below(),
            faults_unit,
            check_trainings(ends, "faults", "hints", "outcome", -1),
            before_text,
        ),
        make_claim(
            "equal-success",
            "hints cost no success",
            RELEASE,
            ends,
            "solved",
            "hints",
            "outcome",
            above(-0.05),
            "success, hints less outcome",
            {},
            f"; {before_faults['solved']:.3f} before RL",
        ),
        make_claim(
            "nothing-else",
            "a hint mends its own fault and changes no other",
            RELEASE,
            ends,
            "others",
            "hints",
            "outcome",
            between(-0.1, 0.1),
            "other faults a rollout, hints less outcome",
            {},
            f"; {before_faults['others']:.3f} before RL",
        ),
        make_claim(
            "right-hint",
            "it matters what the hint says: hints of other rollouts' faults mend less",
            RELEASE,
            steps,
            "faults",
            "hints",
            "shuffled",
            below(),
            "faults a rollout, hints less shuffled",
            check_trainings(steps, "faults", "hints", "shuffled", -1),
            "",
        ),
        make_claim(
            "more-than-error",
            "it matters that the hint says something: the word error alone mends less",
            RELEASE,
            steps,
            "faults",
            "hints",
            "bare",
            below(),
            "faults a rollout, hints less bare",
            check_trainings(steps, "faults", "hints", "bare", -1),
            "",
        ),
        make_claim(
            "more-than-prices",
            "a hint at the message does more than a price on the whole rollout",
            RELEASE,
            steps,
            "faults",
            "hints",
            "priced",
            below(),
            "faults a rollout, hints less priced",
            check_trainings(steps, "faults", "hints", "priced", -1),
            "",
        ),
        make_claim(
            "environment-s-error",
            "the environment's own error, as the hint, mends what it is about",
            SDPO,
            steps,
            "invalid",
            "error",
            "outcome",
            below(),
            "messages with invalid calls a rollout, error less outcome",
            check_trainings(steps, "invalid", "error", "outcome", -1),
            f"; {before_faults['invalid']:.3f} before RL, held-out",
        ),
        make_claim(
            "sparse",
            "hints teach what is never rewarded, because the agent never does it by itself",
            RELEASE,
            ends,
            "solved",
            "forward",
            "alone",
            above(),
            "success where a call has another name, hints less RL alone",
            check_trainings(ends, "solved", "forward", "alone", 1)
            | {"RL alone stays below 0.02": bool(ends["alone"]["solved"].mean() < 0.02)},
            f"; {before['renamed']['solved']:.3f} before RL",
        ),
        make_claim(
            "direction",
            "what the student hardly ever does, KL(teacher‖student) teaches and KL(student‖teacher) does not",
            SDPO,
            ends,
            "solved",
            "forward",
            "reverse",
            above(),
            "success where a call has another name, forward less reverse",
            check_trainings(ends, "solved", "forward", "reverse", 1),
            "",
        ),
    ]


LABELS = {
    "outcome": "outcome reward alone",
    "priced": "priced: calls and effort cost",
    "hints": "hints by rule",
    "error": "SDPO: the environment's error",
    "shuffled": "control: shuffled hints",
    "bare": "control: the word error",
}
SPARSE_LABELS = {"alone": "RL alone", "forward": "reminder, forward KL", "reverse": "reminder, reverse KL"}


def picture(results: dict, path: Path) -> None:
    """Faults along RL, success along RL, and success where a call has another name."""
    from kit.plots import COLOURS, GREY, save, sheet

    figure, (left, middle, right) = sheet(
        3, "A hint where a rollout went wrong, distilled into the agent that is not told"
    )
    worlds = {row["world"] for row in results["rows"]}
    palette = dict(zip(LABELS, (GREY, COLOURS[3], COLOURS[0], COLOURS[2], COLOURS[1], COLOURS[4]), strict=True))
    colours = {arm: colour for arm, colour in palette.items() if arm in worlds}
    along({"faults": left, "solved": middle}, results["rows"], colours, LABELS)
    left.set(xlabel="RL step", ylabel="faults a rollout", title="Faults that hints are about", ylim=(0, None))
    middle.set(xlabel="RL step", ylabel="share of rollouts", title="Solved the task", ylim=(-0.02, 1.02))
    left.legend(frameon=False, fontsize=7)
    sparse_colours = dict(zip(SPARSE_LABELS, (GREY, COLOURS[0], COLOURS[1]), strict=True))
    along(
        {"solved": right},
        results["rows"],
        {arm: colour for arm, colour in sparse_colours.items() if arm in worlds},
        SPARSE_LABELS,
    )
    right.set(
        xlabel="RL step", ylabel="share of rollouts", title="Solved, where write is called put", ylim=(-0.02, 1.02)
    )
    right.legend(frameon=False, fontsize=7)
    save(figure, path)
