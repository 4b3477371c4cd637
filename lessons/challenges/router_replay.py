"""Scorer of challenge 8: which tokens have replayed experts that came from another place.

Two engines compute the scores of a token's experts with a little noise between them, so they honestly disagree now and
then. In some sequences the record slips: from some token on, each has the experts of the token before it.
"""

from __future__ import annotations

import numpy as np

from lessons.challenges import answers
from lessons.challenges.solution import Solves

__all__ = ["draw_sequence", "score"]

SEQUENCES, TOKENS, EXPERTS, TOP_K = 80, 96, 16, 2


def draw_sequence(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores of the trainer [TOKENS, EXPERTS], recorded experts [TOKENS, CHOSEN], and which tokens slipped to experts
    that are not theirs."""
    scores, alike = rng.normal(size=(TOKENS, EXPERTS)), rng.uniform(0.3, 0.9)
    for t in range(1, TOKENS):
        scores[t] = alike * scores[t - 1] + (1 - alike**2) ** 0.5 * scores[t]
    noisy_scores = scores + rng.choice([0.05, 0.2, 0.5]) * rng.standard_t(4, scores.shape)
    own = np.sort(np.argsort(-noisy_scores, 1)[:, :TOP_K], 1)
    recorded, slipped = own.copy(), np.zeros(TOKENS, dtype=bool)
    if rng.random() < 0.5:
        begins = int(rng.integers(1, TOKENS - 4))
        ends = TOKENS if rng.random() < 0.5 else min(TOKENS, begins + int(rng.integers(4, 40)))
        recorded[begins:ends] = own[begins - 1 : ends - 1]
        slipped[begins:ends] = (recorded != own).any(1)[begins:ends]
    return scores, recorded, slipped


def score(solution: Solves, seed: int) -> float:
    """F1 of the tokens that the solution calls slipped."""
    rng, right, called, true = np.random.default_rng(seed), 0, 0, 0
    for _ in range(SEQUENCES):
        scores, recorded, slipped = draw_sequence(rng)
        predictions = answers.wholes("slipped", solution("slipped", scores, recorded), 0, 1, TOKENS).astype(bool)
        right, called, true = (
            right + int((predictions & slipped).sum()),
            called + int(predictions.sum()),
            true + int(slipped.sum()),
        )
    return 2 * right / (called + true)
