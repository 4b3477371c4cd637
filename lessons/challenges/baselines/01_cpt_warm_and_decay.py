"""A higher rate that rises, stays and falls, as in continued pretraining, and half of the rows from the domain."""


def plan(steps):
    rates = [min(1.0, (step + 1) / 10, (steps - step) / (0.4 * steps)) for step in range(steps)]
    return [[0.01 * rate, 0.5] for rate in rates]
