"""What the experiment `textual-feedback` says: its verdicts and its picture."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from sims.experiment import above, below, between, claim
from sims.hack_training import along
from sims.statistics import student

__all__ = ["learned", "picture"]

RELEASE, SDPO = "Composer 2.5", "arXiv:2601.20802"
Numbers = Mapping[str, Mapping[str, np.ndarray]]
"""Of each arm and of each thing that is counted: its mean per rollout in every training [trainings]."""


def learned(steps: Numbers, ends: Numbers, before: Mapping[str, Mapping[str, float]]) -> list[dict]:
    """`steps`: over all rollouts of a training; `ends`: over held-out rollouts at its end; `before`: over held-out rollouts of each world before RL.
    Intervals: Student's, over trainings, of the difference between two arms with the same seeds and tasks."""

    def found(
        name: str, says: str, source: str, where: Numbers, what: str, one: str, other: str, rule: dict, unit: str, needs: dict, more: str
    ) -> dict:
        apart = where[one][what] - where[other][what]
        interval = {key: round(x, 9) for key, x in student(apart).items()}
        when = "all rollouts of RL" if where is steps else "held-out rollouts after RL"
        both = f"{where[one][what].mean():.3f} {one}, {where[other][what].mean():.3f} {other}"
        note = f"{when}: {both}{more}; trainings by themselves: {', '.join(f'{x:+.3f}' for x in apart)}"
        return claim(name, says, source, interval["value"], rule, (interval["low"], interval["high"]), unit, note, needs)

    def each(where: Numbers, what: str, one: str, other: str, sign: int) -> dict[str, bool]:
        return {"every training by itself": bool((sign * (where[one][what] - where[other][what])).min() > 0)}

    first = before["faults"]
    fewer, began = "faults a rollout, hints less outcome", f"; {first['faults']:.3f} before RL, held-out"
    return [
        found(
            "fewer-faults",
            "with hints at the messages that went wrong, their faults fall faster than under the outcome reward alone",
            RELEASE,
            steps,
            "faults",
            "hints",
            "outcome",
            below(),
            fewer,
            each(steps, "faults", "hints", "outcome", -1),
            began,
        ),
        found(
            "mended",
            "after RL with hints the agent errs less without them",
            RELEASE,
            ends,
            "faults",
            "hints",
            "outcome",
            below(),
            fewer,
            each(ends, "faults", "hints", "outcome", -1),
            began,
        ),
        found(
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
            f"; {first['solved']:.3f} before RL",
        ),
        found(
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
            f"; {first['others']:.3f} before RL",
        ),
        found(
            "right-hint",
            "it matters what the hint says: hints of other rollouts' faults mend less",
            RELEASE,
            steps,
            "faults",
            "hints",
            "shuffled",
            below(),
            "faults a rollout, hints less shuffled",
            each(steps, "faults", "hints", "shuffled", -1),
            "",
        ),
        found(
            "more-than-error",
            "it matters that the hint says something: the word error alone mends less",
            RELEASE,
            steps,
            "faults",
            "hints",
            "bare",
            below(),
            "faults a rollout, hints less bare",
            each(steps, "faults", "hints", "bare", -1),
            "",
        ),
        found(
            "more-than-prices",
            "a hint at the message does more than a price on the whole rollout",
            RELEASE,
            steps,
            "faults",
            "hints",
            "priced",
            below(),
            "faults a rollout, hints less priced",
            each(steps, "faults", "hints", "priced", -1),
            "",
        ),
        found(
            "environment-s-error",
            "the environment's own error, as the hint, mends what it is about",
            SDPO,
            steps,
            "invalid",
            "error",
            "outcome",
            below(),
            "messages with invalid calls a rollout, error less outcome",
            each(steps, "invalid", "error", "outcome", -1),
            f"; {first['invalid']:.3f} before RL, held-out",
        ),
        found(
            "sparse",
            "hints teach what is never rewarded, because the agent never does it by itself",
            RELEASE,
            ends,
            "solved",
            "forward",
            "alone",
            above(),
            "success where a call has another name, hints less RL alone",
            each(ends, "solved", "forward", "alone", 1) | {"RL alone stays below 0.02": bool(ends["alone"]["solved"].mean() < 0.02)},
            f"; {before['renamed']['solved']:.3f} before RL",
        ),
        found(
            "direction",
            "what the student hardly ever does, KL(teacher‖student) teaches and KL(student‖teacher) does not",
            SDPO,
            ends,
            "solved",
            "forward",
            "reverse",
            above(),
            "success where a call has another name, forward less reverse",
            each(ends, "solved", "forward", "reverse", 1),
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
SPARSE = {"alone": "RL alone", "forward": "reminder, forward KL", "reverse": "reminder, reverse KL"}


def picture(found: dict, path: Path) -> None:
    """Faults along RL, success along RL, and success where a call has another name."""
    from sims.drawing import COLOURS, GREY, save, sheet

    figure, (left, middle, right) = sheet(3, "A hint where a rollout went wrong, distilled into the agent that is not told")
    played = {row["world"] for row in found["rows"]}
    palette = dict(zip(LABELS, (GREY, COLOURS[3], COLOURS[0], COLOURS[2], COLOURS[1], COLOURS[4]), strict=True))
    colours = {arm: colour for arm, colour in palette.items() if arm in played}
    along({"faults": left, "solved": middle}, found["rows"], colours, LABELS)
    left.set(xlabel="RL step", ylabel="faults a rollout", title="Faults that hints are about", ylim=(0, None))
    middle.set(xlabel="RL step", ylabel="share of rollouts", title="Solved the task", ylim=(-0.02, 1.02))
    left.legend(frameon=False, fontsize=7)
    others = dict(zip(SPARSE, (GREY, COLOURS[0], COLOURS[1]), strict=True))
    along({"solved": right}, found["rows"], {arm: colour for arm, colour in others.items() if arm in played}, SPARSE)
    right.set(xlabel="RL step", ylabel="share of rollouts", title="Solved, where write is called put", ylim=(-0.02, 1.02))
    right.legend(frameon=False, fontsize=7)
    save(figure, path)
