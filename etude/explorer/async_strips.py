"""Who did what when in asynchronous RL, as a chart over time: a strip for the trainer, and two for each worker. A clock unfolds it."""

from collections.abc import Callable, Sequence

from etude.async_timeline import Timeline, colour, thinned
from etude.explorer.drawing import Axis, Drawing, Layer, Look, boxes, drawing, rule, words
from etude.explorer.playing import play

__all__ = ["SLOTS", "clock", "strips"]

SLOTS = {"slots that decode": Look("green"), "that wait for a tool": Look("#F0C878"), "free": Look("#B8BFC6")}
MOMENTS = 640
"""Moments at which slots are drawn, of all workers together."""
NARROW = 0.012
"""Share of the time that a step must take to show its number."""


def clock(timelines: Sequence[Timeline], name: str, show: Callable[[float], None]) -> None:
    """Draws the clock, which plays from where one step ends to where the next one does, and what `show` draws at its time, seconds. At its end all is
    shown."""
    end = round(max(one.seconds for one in timelines) + 0.05, 1)
    stops = sorted({end, *(min(round(step[1] + 0.05, 1), end) for one in timelines for step in one.steps)})
    key = f"{name}-clock-{end:g}"  # another run has a clock of its own
    play("Clock, s", key, stops, end, show, least=0.0, step=0.1, one="Next step", help="What lies after it is not drawn.")


def strips(timelines: Sequence[Timeline], until: float) -> Drawing:
    """What was done until this time, seconds. A version has one colour on the step that makes it and on the worker that holds it later."""
    longest = max(one.seconds for one in timelines)
    high = sum(1.5 + 1.5 * len(one.slots) for one in timelines)
    moments = max(1, MOMENTS // max(1, sum(len(one.slots) for one in timelines)))
    versions, shares, ticks, top = list[dict](), list[dict](), dict[float, str](), high
    for one in timelines:
        ticks[top - 0.5] = f"{one.name}: trainer"
        versions += [stretch(one, "step", *step) | {"low": top - 0.875, "high": top - 0.125, "number": str(step[2])} for step in one.steps]
        top -= 1.0
        for who, lines in one.slots.items():
            ticks[top - 0.75] = who
            held = [*one.held.get(who, []), (one.seconds, -1)]
            holds = (stretch(one, who, at, after, version) for (at, version), (after, _) in zip(held, held[1:]))
            versions += [row | {"low": top - 0.25, "high": top} for row in holds]
            shares += [row for line in pieces(thinned(lines, one.seconds, moments), one.seconds) for row in stacked(one, who, line, top - 1.25)]
            top -= 1.5
        top -= 0.5
    versions, shares = cut(versions, until), cut(shares, until)
    now = [rule(x=until)] if until < longest else []
    return drawing(
        Axis("seconds", least=0, most=longest),
        Axis("", least=0, most=high, ticks=ticks),
        boxes(shares, "from", "until", "low", "high", "state", tell=("run", "who", "from", "to", *SLOTS)),
        *coloured(versions),
        words(numbered(versions, longest), "middle", "centre", "number", tell=("run", "from", "to"), look=Look("#FFFFFF")),
        *now,
        looks=SLOTS,
        height=round(90 + 28 * high),
    )


def stretch(one: Timeline, what: str, begin: float, end: float, version: int) -> dict:
    """A time in which a version was made or held."""
    return {"run": one.name, "what": what if what == "step" else f"{what} holds it", "version": version, "from": begin, "to": end}


def pieces(lines: Sequence[tuple[float, int, int, int]], seconds: float) -> list[tuple[float, float, int, int, int]]:
    """From when until when so many slots decode, wait and are free."""
    ends = [*(line[0] for line in lines[1:]), seconds]
    return [(line[0], end, *line[1:]) for line, end in zip(lines, ends, strict=True)]


def stacked(one: Timeline, who: str, piece: tuple[float, float, int, int, int], low: float) -> list[dict]:
    """The three states of a worker's slots, one above the other, by their shares."""
    begin, end, *counts = piece
    row = {"run": one.name, "who": who, "from": begin, "to": end} | dict(zip(SLOTS, counts, strict=True))
    found, whole = [], max(1, sum(counts))
    for state, count in zip(SLOTS, counts, strict=True):
        if count:
            found.append(row | {"state": state, "low": low, "high": low + count / whole})
            low += count / whole
    return found


def cut(rows: Sequence[dict], until: float) -> list[dict]:
    """What lies before this time, and of what goes on then the part before it."""
    return [row | {"until": min(row["to"], until)} for row in rows if row["from"] < min(row["to"], until)]


def coloured(versions: Sequence[dict]) -> list[Layer]:
    """A layer for each colour."""
    by: dict[str, list[dict]] = {}
    for row in versions:
        by.setdefault(colour(row["version"]), []).append(row)
    told = ("version", "run", "what", "from", "to")
    return [boxes(rows, "from", "until", "low", "high", tell=told, look=Look(shade)) for shade, rows in sorted(by.items())]


def numbered(versions: Sequence[dict], longest: float) -> list[dict]:
    """The steps that are wide enough for a number, each with the place of it."""
    middles = ((row, (row["from"] + row["until"]) / 2) for row in versions if "number" in row)
    wide = ((row, middle) for row, middle in middles if row["until"] - row["from"] > NARROW * longest)
    return [row | {"middle": middle, "centre": (row["low"] + row["high"]) / 2} for row, middle in wide]
