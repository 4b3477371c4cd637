"""The table of challenges: one for each lesson. The command line, the board and the tests read it; a scorer is imported
when it is needed.

A challenge called NAME has three parts, all in this package:

    NAME.py                          score(solution, seed): a number, or RunError in one line for a solution that breaks
                                     the rules
    starts/NN_NAME.py                the file that a reader starts from; its docstring says what is asked, and its
                                     functions do not pass
    baselines/NN_NAME_*.py           solutions of ours, each with a line that says what it does
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kit.settings import RunError
from lessons.challenges.solution import Solves

__all__ = ["CHALLENGES", "Challenge", "docstring", "find"]

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Challenge:
    """One open problem with a score."""

    number: int
    """That of its lesson."""
    name: str
    """That of the technique, as the catalogue has it."""
    measure: str
    """What the score is, with its unit."""
    bar: float
    """What a score has to reach."""
    least: bool = True
    """Whether less is better."""
    seconds: float = 60.0
    """How long all calls of a solution may take together."""
    seeds: int = 3
    """With how many seeds the board is measured."""

    @property
    def stem(self) -> str:
        """How its files are called."""
        return f"{self.number:02d}_{self.name.replace('-', '_')}"

    @property
    def start(self) -> Path:
        """The file that a reader starts from."""
        return FOLDER / "starts" / f"{self.stem}.py"

    @property
    def baselines(self) -> list[Path]:
        """Our own solutions."""
        return sorted((FOLDER / "baselines").glob(f"{self.stem}_*.py"))

    @property
    def says(self) -> str:
        """What is asked: the docstring of the starting file, without its first line."""
        return docstring(self.start).partition("\n")[2].strip()

    @property
    def title(self) -> str:
        """The challenge in a few words."""
        return docstring(self.start).partition("\n")[0].partition(": ")[2].rstrip(".")

    @property
    def score(self) -> Callable[[Solves, int], float]:
        """The scorer: takes a solution and the seed of its cases."""
        return importlib.import_module(f"lessons.challenges.{self.name.replace('-', '_')}").score

    def passed(self, score: float) -> bool:
        """Whether a score reaches the bar."""
        return score <= self.bar if self.least else score >= self.bar

    def better(self, score: float, reference: float) -> bool:
        """Whether a score beats another one."""
        return score < reference if self.least else score > reference


def docstring(path: Path) -> str:
    """The docstring of a file."""
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


CHALLENGES = (
    Challenge(0, "recipe", "sampled success", 0.66, least=False, seeds=1),
    Challenge(1, "cpt", "nats a token above the source", 0.5),
    Challenge(2, "muon", "largest |σ − 1|", 0.1),
    Challenge(3, "mtp", "tokens per cost, over the best fixed length's", 1.05, least=False),
    Challenge(4, "dr-grpo", "variance over leave-one-out's", 0.9),
    Challenge(5, "kl", "error over the better of k1 and k3", 0.8),
    Challenge(6, "length-penalty", "share of effort saved", 0.25, least=False),
    Challenge(7, "self-summary", "share of answers", 0.7, least=False),
    Challenge(8, "router-replay", "F1", 0.8, least=False),
    Challenge(9, "packing", "percent above what no dealing can beat", 1.0),
    Challenge(10, "quant", "dB", 25.0, least=False),
    Challenge(11, "mirror", "bytes", 1000.0),
    Challenge(12, "weight-sync", "bits per weight", 0.3),
    Challenge(13, "async-rl", "share of what a trainer that never waits takes", 0.32, least=False),
    Challenge(14, "feature-deletion", "tasks a package", 15.0, least=False),
    Challenge(15, "environments", "F1", 0.75, least=False),
    Challenge(16, "textual-feedback", "share of what habits would gain", 0.63, least=False),
    Challenge(17, "behaviour", "share of what could be gained", 0.75, least=False),
    Challenge(18, "monitor", "steps to the alarm", 12.0),
)


def find(number: int) -> Challenge:
    """The challenge of a lesson. Raises RunError where there is none."""
    for challenge in CHALLENGES:
        if challenge.number == number:
            return challenge
    raise RunError(
        f"there is no challenge {number}; there are {', '.join(str(challenge.number) for challenge in CHALLENGES)}"
    )
