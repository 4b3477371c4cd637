"""The greedy choice among single functions and pairs, tried in many orders; the longest list wins."""

import numpy as np


def grow(table, deleted):
    """The deletion with what would be left without a passing test, again and again."""
    used = table.any(0)
    while True:
        failing = table[:, sorted(deleted)].any(1)
        orphans = np.flatnonzero(used & ~table[~failing].any(0))
        larger = deleted | set(orphans.tolist())
        if larger == deleted:
            return sorted(deleted), failing
        deleted = larger


def is_valid(deleted, failing):
    return len(deleted) <= 6 and 3 <= failing.sum() <= len(failing) // 2


def deletions(table):
    rng, used = np.random.default_rng(0), np.flatnonzero(table.any(0)).tolist()
    candidates = {}
    for a in used:
        for b in used[used.index(a) :]:
            deleted, failing = grow(table, {a, b})
            if is_valid(deleted, failing):
                candidates[failing.tobytes()] = deleted, failing
    sets = [deleted for deleted, _ in candidates.values()]
    failing = np.array([fails for _, fails in candidates.values()], dtype=np.int32)
    shared = failing @ failing.T
    sizes = failing.sum(1)
    membership = np.array([np.isin(np.arange(table.shape[1]), functions) for functions in sets], dtype=np.int32)
    alike = (membership @ membership.T > 0) | (2 * shared > sizes[:, None] + sizes[None, :] - shared)
    best = []
    for _ in range(300):
        free, accepted = np.ones(len(sets), dtype=bool), []
        for index in np.argsort(alike.sum(1) * rng.uniform(0.7, 1.3, len(sets)) + sizes * rng.uniform(0, 3)):
            if free[index]:
                accepted.append(int(index))
                free &= ~alike[index]
        if len(accepted) > len(best):
            best = accepted
    return [sets[index] for index in best]
