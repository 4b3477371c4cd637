"""Believes in two kinds of stretches, keeps the chance of each up to date by Bayes' rule, and takes the best length for that."""

STAND = (0.95, 0.35)
LEAVE = (0.015, 0.03)


def moved(easy):
    return easy * (1 - LEAVE[0]) + (1 - easy) * LEAVE[1]


def drafts(history, longest, cost):
    easy = 0.6
    for drafted, kept in history:
        for place in range(kept + (kept < drafted)):
            good, bad = (STAND[k] if place < kept else 1 - STAND[k] for k in range(2))
            easy = moved(easy * good / (easy * good + (1 - easy) * bad))
        easy = moved(easy)
    best, most = 0, 0.0
    for length in range(longest + 1):
        written = 1.0
        for here, start in ((0, easy), (1, 1 - easy)):
            alive, state = start, 1.0 if here == 0 else 0.0
            for _ in range(length):
                alive *= state * STAND[0] + (1 - state) * STAND[1]
                state = moved(state)
                written += alive
        gain = written - 1.9 * (1 + cost * length)
        if not length or gain > most:
            best, most = length, gain
    return best
