"""Who did what when in asynchronous RL, as a chart over time: a strip for the trainer, and two for each worker. A clock
unfolds it."""

from collections.abc import Callable, Sequence

from etude.explorer.drawing import Axis, Drawing, Layer, Look, boxes, drawing, rule, words
from etude.explorer.playing import play
from recipe.asynchronous.timeline import Timeline, colour, thinned

__all__ = ["SLOTS", "clock", "strips"]

SLOTS = {"slots that decode": Look("green"), "that wait for a tool": Look("#F0C878"), "free": Look("#B8BFC6")}
MOMENTS = 640
"""Moments at which slots are drawn, of all workers together."""
NARROW = 0.012
"""Share of the time that a step must take to show its number."""


def clock(timelines: Sequence[Timeline], name: str, show: Callable[[float], None]) -> None:
    """Draws the clock, which plays from where one step ends to where the next one does, and what `show` draws at its
    time, seconds. At its end all is shown."""
    end = round(max(run.seconds for run in timelines) + 0.05, 1)
    stops = sorted({end, *(min(round(step[1] + 0.05, 1), end) for run in timelines for step in run.steps)})
    key = f"{name}-clock-{end:g}"  # another run has a clock of its own
    play(
        "Clock, s",
        key,
        stops,
        end,
        show,
        least=0.0,
        step=0.1,
        step_label="Next step",
        help="Later events are not drawn.",
    )


def strips(timelines: Sequence[Timeline], until: float) -> Drawing:
    """What was done until this time, seconds. A version has one colour on the step that makes it and on the worker that
    holds it later."""
    longest = max(run.seconds for run in timelines)
    high = sum(1.5 + 1.5 * len(run.slots) for run in timelines)
    moments = max(1, MOMENTS // max(1, sum(len(run.slots) for run in timelines)))
    versions, shares, ticks, top = list[dict](), list[dict](), dict[float, str](), high
    for run in timelines:
        ticks[top - 0.5] = f"{run.name}: trainer"
        versions += [
            make_span(run, "step", *step) | {"low": top - 0.875, "high": top - 0.125, "number": str(step[2])}
            for step in run.steps
        ]
        top -= 1.0
        for worker, lines in run.slots.items():
            ticks[top - 0.75] = worker
            held_versions = [*run.version_changes.get(worker, []), (run.seconds, -1)]
            spans = (
                make_span(run, worker, start, after, version)
                for (start, version), (after, _) in zip(held_versions, held_versions[1:])
            )
            versions += [row | {"low": top - 0.25, "high": top} for row in spans]
            shares += [
                row
                for line in split_pieces(thinned(lines, run.seconds, moments), run.seconds)
                for row in stack_slots(run, worker, line, top - 1.25)
            ]
            top -= 1.5
        top -= 0.5
    versions, shares = clip_rows(versions, until), clip_rows(shares, until)
    time_rule = [rule(x=until)] if until < longest else []
    return drawing(
        Axis("seconds", lower=0, upper=longest),
        Axis("", lower=0, upper=high, ticks=ticks),
        boxes(shares, "from", "until", "low", "high", "state", tell=("run", "who", "from", "to", *SLOTS)),
        *make_colour_layers(versions),
        words(
            select_numbered(versions, longest),
            "middle",
            "centre",
            "number",
            tell=("run", "from", "to"),
            look=Look("#FFFFFF"),
        ),
        *time_rule,
        looks=SLOTS,
        height=round(90 + 28 * high),
    )


def make_span(run: Timeline, activity: str, begin: float, end: float, version: int) -> dict:
    """A time in which a version was made or held."""
    return {
        "run": run.name,
        "what": activity if activity == "step" else f"{activity} holds it",
        "version": version,
        "from": begin,
        "to": end,
    }


def split_pieces(
    lines: Sequence[tuple[float, int, int, int]], seconds: float
) -> list[tuple[float, float, int, int, int]]:
    """From when until when so many slots decode, wait and are free."""
    ends = [*(line[0] for line in lines[1:]), seconds]
    return [(line[0], end, *line[1:]) for line, end in zip(lines, ends, strict=True)]


def stack_slots(run: Timeline, worker: str, piece: tuple[float, float, int, int, int], low: float) -> list[dict]:
    """The three states of a worker's slots, one above the other, by their shares."""
    begin, end, *counts = piece
    row = {"run": run.name, "who": worker, "from": begin, "to": end} | dict(zip(SLOTS, counts, strict=True))
    state_rows, total = [], max(1, sum(counts))
    for state, count in zip(SLOTS, counts, strict=True):
        if count:
            state_rows.append(row | {"state": state, "low": low, "high": low + count / total})
            low += count / total
    return state_rows


def clip_rows(rows: Sequence[dict], until: float) -> list[dict]:
    """What lies before this time, and of what goes on then the part before it."""
    return [row | {"until": min(row["to"], until)} for row in rows if row["from"] < min(row["to"], until)]


def make_colour_layers(versions: Sequence[dict]) -> list[Layer]:
    """A layer for each colour."""
    rows_by_colour: dict[str, list[dict]] = {}
    for row in versions:
        rows_by_colour.setdefault(colour(row["version"]), []).append(row)
    hover_columns = ("version", "run", "what", "from", "to")
    return [
        boxes(rows, "from", "until", "low", "high", tell=hover_columns, look=Look(shade))
        for shade, rows in sorted(rows_by_colour.items())
    ]


def select_numbered(versions: Sequence[dict], longest: float) -> list[dict]:
    """The steps that are wide enough for a number, each with the place of it."""
    middles = ((row, (row["from"] + row["until"]) / 2) for row in versions if "number" in row)
    wide = ((row, middle) for row, middle in middles if row["until"] - row["from"] > NARROW * longest)
    return [row | {"middle": middle, "centre": (row["low"] + row["high"]) / 2} for row, middle in wide]
