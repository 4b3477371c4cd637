"""The board: what our own solutions scored, results/challenges.json. A new score has its place among them.

The record holds for every challenge the machine, and for every solution, the starting file among them, its score with
each of the seeds."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.disk import atomic_write, read_json
from kit.process import machine
from kit.settings import RunError
from lessons.challenges.challenge import CHALLENGES, Challenge, docstring
from lessons.challenges.solution import Solution

__all__ = ["RESULTS", "Row", "best", "board", "measure_challenge", "place", "scored", "write"]

RESULTS = Path(__file__).resolve().parents[2] / "results" / "challenges.json"
START = "the starting file"


@dataclass(frozen=True)
class Row:
    """One solution on the board."""

    solution: str
    """Its name."""
    says: str
    """What it does, in a line."""
    scores: tuple[float, ...]
    """With seeds 0, 1, 2, …"""

    @property
    def score(self) -> float:
        """The mean over seeds."""
        return statistics.fmean(self.scores)

    @property
    def spread(self) -> float:
        """Half the distance between the highest and the lowest score."""
        return (max(self.scores) - min(self.scores)) / 2


def scored(challenge: Challenge, path: Path, seed: int) -> float:
    """The score of a file, in a process of its own. Raises RunError, in one line, for whatever is wrong with it."""
    with Solution(path, challenge.seconds) as solution:
        value = challenge.score(solution, seed)
    if not math.isfinite(value):
        raise RunError(f"{path}: the score is {value}; return smaller numbers, so that it can be computed")
    return value


def board(challenge: Challenge, path: Path = RESULTS) -> list[Row]:
    """The committed board, best first; empty where there is no record, as in an installed wheel. Raises RunError for a
    record that is none."""
    if not path.is_file():
        return []
    try:
        record = read_json(path)["challenges"].get(challenge.name, {"board": []})
        rows = [Row(row["solution"], row["says"], tuple(map(float, row["scores"]))) for row in record["board"]]
        return sorted(rows, key=lambda row: row.score, reverse=not challenge.least)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise RunError(
            f"{path} is not a valid board ({error}); write it anew with: python -m lessons.challenges"
        ) from None


def best(challenge: Challenge, path: Path = RESULTS) -> Row | None:
    """The best solution of the board."""
    return next(iter(board(challenge, path)), None)


def place(challenge: Challenge, score: float, rows: list[Row]) -> int:
    """The place of a score, from 1; a score that equals another one shares its place."""
    return 1 + sum(challenge.better(row.score, score) for row in rows)


def measure_challenge(challenge: Challenge, machine_facts: dict) -> dict[str, Any]:
    """What a record holds of one challenge; `machine_facts`: the machine. Raises RunError where one of our solutions is
    refused."""
    rows = []
    for path in (challenge.start, *challenge.baselines):
        name = START if path == challenge.start else path.stem.removeprefix(f"{challenge.stem}_").replace("_", " ")
        says = "What a reader begins with." if path == challenge.start else " ".join(docstring(path).split())
        rows.append(
            {
                "solution": name,
                "says": says,
                "scores": [scored(challenge, path, seed) for seed in range(challenge.seeds)],
            }
        )
    facts = {"number": challenge.number, "measure": challenge.measure, "bar": challenge.bar, "least": challenge.least}
    return {**facts, "seeds": list(range(challenge.seeds)), "machine": machine_facts, "board": rows}


def write(numbers: list[int], path: Path = RESULTS) -> Path:
    """Measures some challenges anew, all if none is named, and keeps what the record says of the others."""
    records = read_json(path)["challenges"] if path.is_file() else {}
    host = machine()  # before the record changes, which is a file of the checkout
    for challenge in CHALLENGES:
        if not numbers or challenge.number in numbers:
            records[challenge.name] = measure_challenge(challenge, host)
            print(
                f"{challenge.number:2d} {challenge.name}: "
                + ", ".join(f"{row.solution} {row.score:.4g}" for row in parse_rows(records, challenge)),
                flush=True,
            )
            ordered_records = {entry.name: records[entry.name] for entry in CHALLENGES if entry.name in records}
            atomic_write(
                path,
                json.dumps(
                    {"command": "python -m lessons.challenges", "challenges": ordered_records},
                    indent=1,
                    allow_nan=False,
                )
                + "\n",
            )
    return path


def parse_rows(record: dict[str, Any], challenge: Challenge) -> list[Row]:
    """The rows of a record as it is written."""
    return [Row(row["solution"], row["says"], tuple(row["scores"])) for row in record[challenge.name]["board"]]
