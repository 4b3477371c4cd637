"""General text alone while the rate is high, and more and more of the domain while it falls."""


def plan(steps):
    rows = []
    for step in range(steps):
        rate = 0.015 * min(1.0, (step + 1) / 10, (steps - step) / (0.6 * steps))
        rows.append([rate, max(0.0, min(0.75, 1.5 * (step / steps - 0.4)))])
    return rows
