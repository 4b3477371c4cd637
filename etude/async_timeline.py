"""What the services of asynchronous RL did and when, from the events that they write (`scaled/async_rl/services.py`): figures and a picture."""

from __future__ import annotations

from pathlib import Path

from kit.disk import read_lines
from sims.drawing import BLUE, GREEN, GREY, ORANGE, RED, save, sheet

__all__ = ["events", "picture", "slots", "summary"]


def events(folder: Path) -> dict[str, list[dict]]:
    """Name of each service → its events, in order."""
    return {path.stem: read_lines(path) for path in sorted((folder / "events").glob("*.jsonl"))}


def workers(known: dict[str, list[dict]]) -> dict[str, list[dict]]:
    """Of the services those that play."""
    return {name: lines for name, lines in known.items() if name not in ("trainer", "evaluator")}


def slots(folder: Path) -> list[dict]:
    """What the workers' slots do now, as far as is known."""
    last = ([line for line in lines if line["what"] == "slots"][-1:] for lines in workers(events(folder)).values())
    return [line for found in last for line in found]


def trainings(lines: list[dict]) -> list[dict]:
    """The steps of the trainer that count: when each began and was saved, and its metrics. What a killed process began is not among them."""
    found, began = {}, 0.0
    for line in lines:
        if line["what"] == "train":
            began = line["at"]
        elif line["what"] == "saved":
            found[line["version"]] = {**line, "began": began}
    return [found[version] for version in sorted(found)]


def played_seconds(lines: list[dict]) -> float:
    """From the trainer's start to its last event, without the pauses in which the whole run was interrupted."""
    total, begun = 0.0, lines[0]["at"]
    for before, line in zip(lines, lines[1:]):
        if line["what"] == "start" and line["epoch"] == 0:  # processes of a run that goes on count from 0 again
            total, begun = total + before["at"] - begun, line["at"]
    return total + lines[-1]["at"] - begun


def summary(folder: Path, steps: int) -> dict[str, float]:
    """Figures of a finished run."""
    known = events(folder)
    trained = trainings(known["trainer"])
    seconds = played_seconds(known["trainer"])
    tokens = sum(step["tokens"] for step in trained)
    journal = read_lines(folder / "journal.jsonl")
    loads = [line for lines in workers(known).values() for line in lines if line["what"] == "load"]
    return {
        "steps": float(steps),
        "seconds": seconds,
        "seconds_per_step": seconds / steps,
        "tokens_per_s": tokens / seconds,
        "trainer_busy": sum(step["at"] - step["began"] for step in trained) / seconds,
        "age": sum(step["age"] * step["tokens"] for step in trained) / tokens,
        "oldest": max(step["oldest"] for step in trained),
        "dropped_groups": float(sum(line["kind"] == "drop" for line in journal)),
        "pause_ms": 1000 * sum(line["pause_s"] for line in loads) / max(1, len(loads)),
        "restarts": float(sum(max(line["epoch"] for line in lines) for lines in known.values())),
    }


def picture(folder: Path, path: Path) -> None:
    """Over time: what the trainer and the workers' slots do; versions published and held; ages of the tokens of each step."""
    known = events(folder)
    start = min(lines[0]["at"] for lines in known.values())
    trained = trainings(known["trainer"])
    playing = workers(known)
    figure, axes = sheet(1, "Asynchronous RL: who did what when", rows=3, width=10.0, height=2.6)

    busy, versions, ages = axes
    busy.broken_barh([(step["began"] - start, step["at"] - step["began"]) for step in trained], (len(playing), 0.8), color=BLUE, edgecolor="white")
    for row, lines in enumerate(playing.values()):
        seen = [line for line in lines if line["what"] == "slots"]
        if not seen:
            continue
        at = [line["at"] - start for line in seen]
        whole = [line["decoding"] + line["tools"] + line["free"] for line in seen]
        decoding = [row + 0.8 * line["decoding"] / n for line, n in zip(seen, whole, strict=True)]
        tools = [row + 0.8 * (line["decoding"] + line["tools"]) / n for line, n in zip(seen, whole, strict=True)]
        busy.fill_between(at, row, decoding, color=GREEN, linewidth=0, label="decode" if row == 0 else None)
        busy.fill_between(at, decoding, tools, color=ORANGE, linewidth=0, label="wait for a tool" if row == 0 else None)
        busy.fill_between(at, tools, row + 0.8, color="#E5E8EB", linewidth=0, label="free" if row == 0 else None)
    busy.set_yticks([row + 0.4 for row in range(len(playing) + 1)], [*playing, "trainer"])
    busy.legend(loc="upper center", ncols=3, fontsize=8, title="slots of a worker", title_fontsize=8)
    busy.set_title("Steps of the trainer, and shares of the workers' slots")

    out = [line for line in known["trainer"] if line["what"] == "published"]
    versions.step([line["at"] - start for line in out], [line["version"] for line in out], where="post", color=BLUE, label="published")
    for name, colour in zip(playing, (GREEN, ORANGE, RED, GREY), strict=False):
        held = [line for line in playing[name] if line["what"] == "load"]
        versions.step([line["at"] - start for line in held], [line["version"] for line in held], where="post", color=colour, label=name, linewidth=1)
    versions.legend(fontsize=8)
    versions.set_title("Version of the weights, in updates")

    at = [step["at"] - start for step in trained]
    ages.plot(at, [step["age"] for step in trained], ".-", color=BLUE, label="mean")
    ages.plot(at, [step["oldest"] for step in trained], ".", color=RED, label="oldest")
    ages.legend(fontsize=8)
    ages.set_title("Age of the tokens of a step, in updates")
    ages.set_xlabel("seconds")
    for one in axes:
        one.set_xlim(0, trained[-1]["at"] - start)
    save(figure, path)
