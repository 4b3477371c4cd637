"""Believes in two kinds of stretches, keeps the chance of each up to date by Bayes' rule, and takes the best length for
that."""

STAND = (0.95, 0.35)
LEAVE = (0.015, 0.03)


def move_state(easy):
    return easy * (1 - LEAVE[0]) + (1 - easy) * LEAVE[1]


def drafts(history, longest, cost):
    easy = 0.6
    for draft_count, accepted in history:
        for place in range(accepted + (accepted < draft_count)):
            good, bad = (STAND[k] if place < accepted else 1 - STAND[k] for k in range(2))
            easy = move_state(easy * good / (easy * good + (1 - easy) * bad))
        easy = move_state(easy)
    best, best_gain = 0, 0.0
    for length in range(longest + 1):
        tokens = 1.0
        for kind, start in ((0, easy), (1, 1 - easy)):
            alive, state = start, 1.0 if kind == 0 else 0.0
            for _ in range(length):
                alive *= state * STAND[0] + (1 - state) * STAND[1]
                state = move_state(state)
                tokens += alive
        gain = tokens - 1.9 * (1 + cost * length)
        if not length or gain > best_gain:
            best, best_gain = length, gain
    return best
