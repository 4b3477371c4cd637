"""What the experiment `real-time-rl` says: its verdicts and its picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from kit.statistics import student
from sims.experiment import above, below, claim
from sims.hack_training import along

__all__ = ["learned", "on_policy", "picture"]

SOURCE = "real-time RL"
MAX_OUTSIDE_SHARE = 0.01
"""Share of a loop's tokens outside of the clip up to which its data are called nearly on-policy: one in a hundred."""


def learned(ends: Sequence[Mapping]) -> list[dict]:
    """What each way taught, what the A/B test says, and what old data cost. Intervals: Student's, over trainings.

    ends: for each "way" and "training", what held-out tasks said "at" its end of what was "learnt"; in `loop` also of
    the policy "before" and of the one that was "shipped". Changes are against the mean over the looks before, which are
    at one policy. The A/B test has a look before for each training."""

    def select(way: str, moment: str, name: str) -> np.ndarray:
        return np.array([end[name] for end in ends if end["way"] == way and end["at"] == moment])

    def compute_change(way: str, name: str) -> np.ndarray:
        return select(way, "learnt", name) - select("loop", "before", name).mean()

    def compute_difference(name: str) -> np.ndarray:
        """Of each training, the shipped policy's figure less that of the policy before, which other users tried."""
        return select("loop", "shipped", name) - select("loop", "before", name)

    def describe_training(way: str, name: str) -> str:
        return f"{select('loop', 'before', name).mean():.3f} before, {select(way, 'learnt', name).mean():.3f} after"

    def describe_test(name: str) -> str:
        return (
            f"{select('loop', 'before', name).mean():.3f} before, {select('loop', 'shipped', name).mean():.3f} shipped"
        )

    def make_verdict(
        name: str, says: str, rule: dict, values: np.ndarray, unit: str, note: str, needs: dict[str, bool]
    ) -> dict:
        estimate = student(values)
        trainings_text = f"trainings by themselves: {', '.join(f'{value:+.3f}' for value in values)}"
        return claim(
            name,
            says,
            SOURCE,
            estimate["value"],
            rule,
            (estimate["low"], estimate["high"]),
            unit,
            f"{note}; {trainings_text}",
            needs,
        )

    def check_trainings(values: np.ndarray, sign: int) -> dict[str, bool]:
        return {"every training by itself": bool((sign * values).min() > 0)}

    thrown_change, counted_change = compute_change("thrown", "broken_hard"), compute_change("loop", "broken_hard")
    edits_change, priced_change = compute_change("edits", "needless"), compute_change("loop", "needless")
    kept_gain, follow_gain = compute_difference("kept"), compute_difference("followed")
    seconds = compute_difference("seconds") / select("loop", "before", "seconds")
    day, week = (select("loop", "learnt", "right") - select(way, "learnt", "right") for way in ("daily", "weekly"))
    broken_unit, needless_unit = (
        "change of the share of hard sessions with a broken call",
        "change of the share of clear sessions that end in a question",
    )
    age_note = f"held-out sessions that did what is wanted: {describe_training('loop', 'right')}"
    return [
        make_verdict(
            "broken-calls",
            "sessions that are thrown away for a broken call teach broken calls on hard tasks",
            above(),
            thrown_change,
            broken_unit,
            f"held-out sessions on hard tasks with a broken call: {describe_training('thrown', 'broken_hard')}; on all "
            f"tasks {describe_training('thrown', 'broken')}",
            check_trainings(thrown_change, 1)
            | {"more than where they are counted": bool((thrown_change - counted_change).min() > 0)},
        ),
        make_verdict(
            "broken-calls-counted",
            "broken calls that are counted as negative are given up",
            below(),
            counted_change,
            broken_unit,
            f"held-out sessions on hard tasks with a broken call: {describe_training('loop', 'broken_hard')}; on all "
            f"tasks {describe_training('loop', 'broken')}",
            check_trainings(counted_change, -1),
        ),
        make_verdict(
            "questions",
            "a reward on edits kept alone teaches clarifying questions instead of edits",
            above(),
            edits_change,
            needless_unit,
            f"questions about clear tasks: {describe_training('edits', 'needless')}; about open ones "
            f"{describe_training('edits', 'welcome')}; sessions with an edit "
            f"{describe_training('edits', 'edited')}",
            check_trainings(edits_change, 1)
            | {"more than where follow-ups count": bool((edits_change - priced_change).min() > 0)},
        ),
        make_verdict(
            "questions-priced",
            "questions that cost what users say of them are given up where they are not needed",
            below(),
            priced_change,
            needless_unit,
            f"questions about clear tasks: {describe_training('loop', 'needless')}; about open ones "
            f"{describe_training('loop', 'welcome')}; sessions with an edit "
            f"{describe_training('loop', 'edited')}",
            check_trainings(priced_change, -1),
        ),
        make_verdict(
            "edits-kept",
            "in an A/B test users keep more of the edits of the shipped policy",
            above(),
            kept_gain,
            "change of the share of edits that are kept",
            f"{describe_test('kept')}; the post has +2.28%, of another product and its users",
            check_trainings(kept_gain, 1),
        ),
        make_verdict(
            "follow-ups",
            "in an A/B test fewer dissatisfied follow-ups come back to the shipped policy",
            below(),
            follow_gain,
            "change of the share of sessions with a dissatisfied follow-up",
            f"{describe_test('followed')}; the post has −3.13%",
            check_trainings(follow_gain, -1),
        ),
        make_verdict(
            "latency",
            "in an A/B test the shipped policy is done sooner",
            below(),
            seconds,
            "relative change of the seconds of a session",
            f"{describe_test('seconds')}; of sessions with an edit {describe_test('edit_seconds')}; the post has "
            "−10.3%; here only users' patience prices seconds",
            check_trainings(seconds, -1),
        ),
        make_verdict(
            "day-old",
            "data up to a day old train less well than those of the last five hours",
            above(),
            day,
            "success, shipped every loop against every day",
            f"{age_note}; shipped every day: {describe_training('daily', 'right')}; as many steps on as many sessions",
            check_trainings(day, 1),
        ),
        make_verdict(
            "week-old",
            "data up to a week old train less well than those of the last five hours",
            above(),
            week,
            "success, shipped every loop against never",
            f"{age_note}; never shipped: {describe_training('weekly', 'right')}; as many steps on as many sessions",
            check_trainings(week, 1),
        ),
    ]


def on_policy(rows: Sequence[Mapping]) -> dict:
    """Whether a loop that ships every five hours keeps its data nearly on-policy: how many tokens leave the clip in its
    steps, by what the policy has become since they were sampled. Interval: Student's, over trainings.

    rows: for each "way" and "training" and each loop, the mean over its steps of "outside_clip", the share of tokens
    whose ratio of probabilities leaves the clip, and of "age", the steps that the policy has made since it served. The
    rule was written after the record was played, and before more than the first line of this column was read."""

    def average_by_training(way: str, name: str) -> np.ndarray:
        numbers = sorted({row["training"] for row in rows if row["way"] == way})
        return np.array(
            [
                np.mean([row[name] for row in rows if row["way"] == way and row["training"] == number])
                for number in numbers
            ]
        )

    outside, estimate = (
        {way: average_by_training(way, "outside_clip") for way in AGES},
        student(average_by_training("loop", "outside_clip")),
    )
    shares_text = ", ".join(
        f"{AGES[way]} {share.mean():.4f} (age {average_by_training(way, 'age').mean():.1f} steps)"
        for way, share in outside.items()
    )
    return claim(
        "nearly-on-policy",
        "a loop of hours keeps its data nearly on-policy: of a hundred tokens less than one leaves the clip",
        SOURCE,
        estimate["value"],
        below(MAX_OUTSIDE_SHARE),
        (estimate["low"], estimate["high"]),
        "share of the tokens of a step that leave the clip",
        f"by the age of the data, mean over all loops: {shares_text}; the post has no number, and one in a hundred is "
        "what nearly means here; trainings by "
        f"themselves: {', '.join(f'{value:.4f}' for value in outside['loop'])}",
        {"fewer than in data up to a week old, in every training": bool((outside["loop"] < outside["weekly"]).all())},
    )


LABELS = {"loop": "both cures", "thrown": "broken: thrown away", "edits": "edits kept alone"}
AGES = {"loop": "five hours", "daily": "a day", "weekly": "a week"}
FIGURE_LABELS = {"kept": "edits kept", "followed": "dissatisfied\nfollow-ups", "seconds": "latency"}


def picture(results: dict, path: Path) -> None:
    """From the left: broken calls and needless questions along the loop; the A/B test's three figures; success by the
    age of the data."""
    from kit.plots import COLOURS, GREY, save, sheet

    figure, (broken_panel, needless_panel, test_panel, age_panel) = sheet(
        4, "A policy learns from users who keep its edits, undo them, or complain", width=4.0
    )
    rows = [{**row, "world": row["way"]} for row in results["rows"]]
    for axis, name, variant, colour in (
        (broken_panel, "broken_hard", "thrown", COLOURS[1]),
        (needless_panel, "needless", "edits", COLOURS[2]),
    ):
        along({name: axis}, rows, {variant: colour, "loop": COLOURS[0]}, LABELS)
        axis.set(xlabel="loops of five hours", ylabel="share of sessions", ylim=(-0.02, 1.02))
        axis.legend(frameon=False, fontsize=8)
    broken_panel.set_title("A broken call, on hard tasks")
    needless_panel.set_title("A question, on clear tasks")
    claims = {entry["name"]: entry for entry in results["claims"]}
    for index, name in enumerate(("edits-kept", "follow-ups", "latency")):
        entry = claims[name]
        low, high = (100 * bound for bound in entry["interval"])
        test_panel.bar(index, 100 * entry["measured"], 0.6, color=COLOURS[0])
        test_panel.plot([index, index], [low, high], color="black", linewidth=1.5)
    test_panel.axhline(0, color="black", linewidth=0.8)
    test_panel.set(xticks=range(3), xticklabels=[*FIGURE_LABELS.values()], ylabel="change, points (latency: %)")
    test_panel.set_title("A/B: shipped against before")
    ends = results["ends"]
    for index, way in enumerate(AGES):
        values = [end["right"] for end in ends if end["way"] == way and end["at"] == "learnt"]
        age_panel.bar(index, np.mean(values), 0.6, color=(COLOURS[0], COLOURS[4], GREY)[index])
        age_panel.plot([index] * len(values), values, "o", color="black", markersize=3)
    age_panel.axhline(
        np.mean([end["right"] for end in ends if end["at"] == "before"]), color="black", linewidth=1, linestyle="--"
    )
    age_panel.set(xticks=range(3), xticklabels=[*AGES.values()], ylabel="did what is wanted", ylim=(0, 1))
    age_panel.set_title("By the age of the data (line: before)")
    save(figure, path)
