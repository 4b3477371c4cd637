"""Answers to the exercises of lesson 18 (see `answers.py`)."""

TEXTS = {
    "18_monitor": {
        1: """
# wrong: every start has a whole capital
def capital(x, b, c):
    bets, capitals = 0.0, []
    for t, value in enumerate(x, 1):
        bets = (bets + 1) * (1 - c + c * value / b)
        capitals.append(bets)
    return capitals

# wrong: what is held back is forgotten
def capital(x, b, c):
    bets, capitals = 0.0, []
    for t, value in enumerate(x, 1):
        bets = (bets + 1 / (t * (t + 1))) * (1 - c + c * value / b)
        capitals.append(bets)
    return capitals

# wrong: who begins at a step does not bet in it
def capital(x, b, c):
    bets, capitals = 0.0, []
    for t, value in enumerate(x, 1):
        bets = bets * (1 - c + c * value / b) + 1 / (t * (t + 1))
        capitals.append(bets + 1 / (t + 1))
    return capitals

# wrong: all begin at the first step
def capital(x, b, c):
    wealth, capitals = 1.0, []
    for value in x:
        wealth *= 1 - c + c * value / b
        capitals.append(wealth)
    return capitals

# wrong: the difference in place of the ratio
def capital(x, b, c):
    bets, capitals = 0.0, []
    for t, value in enumerate(x, 1):
        bets = (bets + 1 / (t * (t + 1))) * (1 + c * (value - b))
        capitals.append(bets + 1 / (t + 1))
    return capitals

# right: start by start
def capital(x, b, c):
    gains = [1 - c + c * value / b for value in x]
    capitals = []
    for t in range(1, len(x) + 1):
        total = 1 / (t + 1)
        for j in range(1, t + 1):
            product = 1 / (j * (j + 1))
            for gain in gains[j - 1 : t]:
                product *= gain
            total += product
        capitals.append(total)
    return capitals
""",
        2: """
# wrong: a rollout is compared with others alone
def pull(h, pays, price, N):
    return (pays - price) * h * (1 - h)

# wrong: the share for the variance
def pull(h, pays, price, N):
    return (N - 1) / N * (pays - price) * h

# wrong: the price is paid to the habit
def pull(h, pays, price, N):
    return (N - 1) / N * (pays + price) * h * (1 - h)

# wrong: the sign
def pull(h, pays, price, N):
    return (N - 1) / N * (price - pays) * h * (1 - h)

# wrong: the sum over the group
def pull(h, pays, price, N):
    return (N - 1) * (pays - price) * h * (1 - h)

# right: over how many have the habit
def pull(h, pays, price, N):
    import math

    total = 0.0
    for k in range(N + 1):
        chance = math.comb(N, k) * h**k * (1 - h) ** (N - k)
        total += chance * (pays - price) * k * (1 - k / N) / N
    return total
""",
        3: """
# wrong: nothing bounds it
def tempted(right, wrong, out):
    return (out - wrong) / (right - wrong)

# wrong: the chance of a wrong edit
def tempted(right, wrong, out):
    return min(1.0, max(0.0, (right - out) / (right - wrong)))

# wrong: a wrong edit costs nothing
def tempted(right, wrong, out):
    return min(1.0, max(0.0, out / right))

# wrong: the middle
def tempted(right, wrong, out):
    return 0.5 if wrong < out < right else float(out >= right)

# right: by halves
def tempted(right, wrong, out):
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        low, high = (p, high) if p * right + (1 - p) * wrong < out else (low, p)
    return high if out > wrong else 0.0
""",
    }
}
