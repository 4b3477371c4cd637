"""Functions with all that only their tests execute; those with the fewest failing tests first, as long as they differ
from the others."""

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


def choose(table, candidates):
    """The candidates that differ enough from those before them."""
    accepted = []
    for deleted, failing in sorted(candidates, key=lambda candidate: (candidate[1].sum(), candidate[0])):
        if all(
            not set(deleted) & set(accepted_functions)
            and 2 * (failing & accepted_failing).sum() <= (failing | accepted_failing).sum()
            for accepted_functions, accepted_failing in accepted
        ):
            accepted.append((deleted, failing))
    return [deleted for deleted, _ in accepted]


def is_valid(deleted, failing):
    return len(deleted) <= 6 and 3 <= failing.sum() <= len(failing) // 2


def deletions(table):
    candidates = [grow(table, {function}) for function in np.flatnonzero(table.any(0)).tolist()]
    return choose(table, [candidate for candidate in candidates if is_valid(*candidate)])
