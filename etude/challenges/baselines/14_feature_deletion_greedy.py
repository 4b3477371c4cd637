"""Functions with all that only their tests execute; those with the fewest failing tests first, as long as they differ from the others."""

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


def chosen(table, candidates):
    """The candidates that differ enough from those before them."""
    kept = []
    for deleted, failing in sorted(candidates, key=lambda one: (one[1].sum(), one[0])):
        if all(not set(deleted) & set(some) and 2 * (failing & other).sum() <= (failing | other).sum() for some, other in kept):
            kept.append((deleted, failing))
    return [deleted for deleted, _ in kept]


def valid(deleted, failing):
    return len(deleted) <= 6 and 3 <= failing.sum() <= len(failing) // 2


def deletions(table):
    candidates = [grown(table, {function}) for function in np.flatnonzero(table.any(0)).tolist()]
    return chosen(table, [one for one in candidates if valid(*one)])
