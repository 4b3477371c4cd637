"""Scorer of challenge 3: how many tokens a rule for the length of drafts gets out of a unit of cost.

A text alternates between easy and hard stretches, which nobody announces. A draft token stands with one chance in an
easy stretch and with another in a hard one, and only if all before it stand. Verifying writes one token more.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lessons.challenges import answers
from lessons.challenges.solution import Solves

__all__ = ["score"]

TEXTS, CYCLES, LONGEST, COST, HISTORY = 6, 300, 8, 0.15, 24
STAND = (0.95, 0.35)
STAY = (0.985, 0.97)
"""Chance, after each token, that a stretch goes on: easy, hard."""


def draw_text(rng: np.random.Generator, tokens: int) -> np.ndarray:
    """Whether a draft of each token would stand, if all before it do."""
    stands, hard = np.zeros(tokens, dtype=bool), 0
    for place, (moves, draw) in enumerate(rng.random((tokens, 2))):
        hard = hard if moves < STAY[hard] else 1 - hard
        stands[place] = draw < STAND[hard]
    return stands


def run_cycles(stands: np.ndarray, length: Callable[[list[list[int]]], int]) -> tuple[int, float]:
    """Tokens written and cost of CYCLES cycles; `length` tells from the cycles so far how much to draft."""
    at, cost, history = 0, 0.0, []
    for _ in range(CYCLES):
        drafts = length(history)
        ahead = stands[at : at + drafts]
        accepted = drafts if ahead.all() else int(ahead.argmin())
        history.append([drafts, accepted])
        at, cost = at + accepted + 1, cost + 1 + COST * drafts
    return at, cost


def score(solution: Solves, seed: int) -> float:
    """Tokens per cost over those of the best fixed length, which is chosen in hindsight."""
    rng = np.random.default_rng(seed)
    texts = [draw_text(rng, CYCLES * (LONGEST + 1)) for _ in range(TEXTS)]

    def choose_length(history: list[list[int]]) -> int:
        return answers.check_integer("drafts", solution("drafts", history[-HISTORY:], LONGEST, COST), 0, LONGEST)

    def speed(length: Callable[[list[list[int]]], int]) -> float:
        tokens, cost = np.sum([run_cycles(stands, length) for stands in texts], 0)
        return float(tokens / cost)

    return speed(choose_length) / max(speed(lambda _, n=n: n) for n in range(LONGEST + 1))
