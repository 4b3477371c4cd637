"""Scorer of challenge 11: bytes that four ranks send each other until all of them know one loss.

Every rank is an interpreter of its own, which sees its quarter of the vocabulary and what it is sent. The scorer
carries the messages and counts."""

from __future__ import annotations

import contextlib

import numpy as np

from kit.settings import RunError
from lessons.challenges import answers
from lessons.challenges.solution import Solves

__all__ = ["score"]

RANKS, TOKENS, QUARTER, ROUNDS, CASES, NEAR = 4, 256, 256, 4, 3, 2e-3


def score(solution: Solves, seed: int) -> float:
    """Bytes sent, averaged over cases. Raises RunError where a rank's loss is not the loss."""
    rng, total = np.random.default_rng(seed), 0
    with contextlib.ExitStack() as open_ranks:
        ranks = [open_ranks.enter_context(solution.fresh()) for _ in range(RANKS)]
        for _ in range(CASES):
            logits = (rng.normal(size=(TOKENS, RANKS * QUARTER)) * rng.uniform(1.5, 3.0, (TOKENS, 1))).astype(
                np.float32
            )
            targets = np.where(rng.random(TOKENS) < 0.6, logits.argmax(1), rng.integers(0, RANKS * QUARTER, TOKENS))
            total += exchange_messages(ranks, logits, targets)
    return total / CASES


def exchange_messages(ranks: list[Solves], logits: np.ndarray, targets: np.ndarray) -> int:
    """Lets the ranks talk until each has named a loss; the bytes that were sent. logits: [TOKENS, vocabulary]; targets:
    [TOKENS]."""
    wide = logits.astype(np.float64)
    true = float(np.mean(np.logaddexp.reduce(wide, 1) - wide[np.arange(TOKENS), targets]))
    inboxes: list[list[dict[str, bytes]]] = [[] for _ in ranks]
    losses: dict[int, float] = {}
    sent_bytes = 0
    for turn in range(ROUNDS):
        arriving: list[dict[str, bytes]] = [{} for _ in ranks]
        for number, rank in enumerate(ranks):
            if number in losses:
                continue
            shard = logits[:, number * QUARTER : (number + 1) * QUARTER]
            reply = rank("talk", number, RANKS, shard, targets, inboxes[number])
            if not isinstance(reply, dict):
                losses[number] = answers.number("talk", reply)
                continue
            for recipient, message in reply.items():
                if recipient not in map(str, range(RANKS)) or recipient == str(number):
                    raise RunError(
                        f"talk must return a loss, or messages by the number of another rank, as text; "
                        f"got {recipient!r}"
                    )
                arriving[int(recipient)][str(number)] = answers.data("talk", message)
                sent_bytes += len(message)
        for inbox, new in zip(inboxes, arriving):
            inbox.append(new)
    if silent := [number for number in range(len(ranks)) if number not in losses]:
        raise RunError(f"talk of rank {silent[0]} must return the loss within {ROUNDS} rounds")
    worst = max(losses.values(), key=lambda loss: abs(loss - true))
    if not abs(worst - true) <= NEAR:
        raise RunError(
            f"a rank says that the loss is {worst:.5f}; it is {true:.5f}, and {NEAR:g} nats is how far off it may be"
        )
    return sent_bytes
