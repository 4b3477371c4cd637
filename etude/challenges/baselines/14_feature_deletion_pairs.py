"""The greedy choice among single functions and pairs, tried in many orders; the longest list wins."""

import numpy as np


def grown(table, deleted):
    """The deletion with what would be left without a passing test, again and again."""
    used = table.any(0)
    while True:
        failing = table[:, sorted(deleted)].any(1)
        orphans = np.flatnonzero(used & ~table[~failing].any(0))
        more = deleted | set(orphans.tolist())
        if more == deleted:
            return sorted(deleted), failing
        deleted = more


def valid(deleted, failing):
    return len(deleted) <= 6 and 3 <= failing.sum() <= len(failing) // 2


def deletions(table):
    rng, used = np.random.default_rng(0), np.flatnonzero(table.any(0)).tolist()
    found = {}
    for a in used:
        for b in used[used.index(a) :]:
            deleted, failing = grown(table, {a, b})
            if valid(deleted, failing):
                found[failing.tobytes()] = deleted, failing
    sets = [deleted for deleted, _ in found.values()]
    failing = np.array([fails for _, fails in found.values()], dtype=np.int32)
    both = failing @ failing.T
    sizes = failing.sum(1)
    taken = np.array([np.isin(np.arange(table.shape[1]), one) for one in sets], dtype=np.int32)
    alike = (taken @ taken.T > 0) | (2 * both > sizes[:, None] + sizes[None, :] - both)
    best = []
    for _ in range(300):
        free, kept = np.ones(len(sets), dtype=bool), []
        for one in np.argsort(alike.sum(1) * rng.uniform(0.7, 1.3, len(sets)) + sizes * rng.uniform(0, 3)):
            if free[one]:
                kept.append(int(one))
                free &= ~alike[one]
        if len(kept) > len(best):
            best = kept
    return [sets[one] for one in best]
