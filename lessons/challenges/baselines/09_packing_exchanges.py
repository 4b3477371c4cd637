"""Longest first, then the fullest rank moves a sequence to another one, or swaps two with it, as long as the fuller of
both gets emptier."""

import numpy as np


def deal(costs, ranks):
    loads, rank_of = np.zeros(ranks), np.zeros(len(costs), dtype=int)
    for i in np.argsort(-costs):
        rank_of[i] = loads.argmin()
        loads[rank_of[i]] += costs[i]
    for _ in range(2000):
        full = loads.argmax()
        inside, outside = np.flatnonzero(rank_of == full), np.flatnonzero(rank_of != full)
        own_costs = np.concatenate([costs[inside], [0.0]])
        other_costs, owners = (
            np.concatenate([costs[outside], np.zeros(ranks)]),
            np.concatenate([rank_of[outside], np.arange(ranks)]),
        )
        transfers = own_costs[:, None] - other_costs[None, :]
        highest = np.maximum(loads[full] - transfers, loads[owners] + transfers)
        highest[transfers <= 1e-12] = np.inf
        highest[:, owners == full] = np.inf
        a, b = np.unravel_index(highest.argmin(), highest.shape)
        if highest[a, b] >= loads[full] - 1e-12:
            break
        loads[full] -= transfers[a, b]
        loads[owners[b]] += transfers[a, b]
        if a < len(inside):
            rank_of[inside[a]] = owners[b]
        if b < len(outside):
            rank_of[outside[b]] = full
    return rank_of
