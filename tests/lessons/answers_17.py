"""Answers to the exercises of lesson 17 (see `answers.py`)."""

TEXTS = {
    "17_behaviour": {
        1: """
# wrong: a cost without an end
def advantages(outcomes, measures, price, cap):
    rewards = [outcome - price * m for outcome, m in zip(outcomes, measures)]
    return [reward - rewards[0] - sum(r - rewards[0] for r in rewards) / len(rewards) for reward in rewards]

# wrong: a bonus
def advantages(outcomes, measures, price, cap):
    rewards = [outcome + price * min(m, cap) for outcome, m in zip(outcomes, measures)]
    return [reward - rewards[0] - sum(r - rewards[0] for r in rewards) / len(rewards) for reward in rewards]

# wrong: the outcome alone has a baseline
def advantages(outcomes, measures, price, cap):
    mean = sum(outcomes) / len(outcomes)
    return [outcome - mean - price * min(m, cap) for outcome, m in zip(outcomes, measures)]

# wrong: the mean first, so that equal rewards leave what rounding leaves
def advantages(outcomes, measures, price, cap):
    rewards = [outcome - price * min(m, cap) for outcome, m in zip(outcomes, measures)]
    return [reward - sum(rewards) / len(rewards) for reward in rewards]

# wrong: the price is capped, not the measure
def advantages(outcomes, measures, price, cap):
    rewards = [outcome - min(price * m, cap) for outcome, m in zip(outcomes, measures)]
    return [reward - rewards[0] - sum(r - rewards[0] for r in rewards) / len(rewards) for reward in rewards]

# right: part by part
def advantages(outcomes, measures, price, cap):
    capped = [min(m, cap) for m in measures]
    first, cost = [o - outcomes[0] for o in outcomes], [price * (m - capped[0]) for m in capped]
    return [a - sum(first) / len(first) - b + sum(cost) / len(cost) for a, b in zip(first, cost)]
""",
        2: """
# wrong: any run that passed will do
def has_passing_tests(calls):
    return any(call.tests is not None and call.tests[0] == call.tests[1] > 0 for call in calls)

# wrong: edits after it are overlooked
def has_passing_tests(calls):
    runs = [call.tests for call in calls if call.tests is not None]
    return bool(runs) and runs[-1][0] == runs[-1][1] > 0

# wrong: a run of no test shows something
def has_passing_tests(calls):
    passed = False
    for call in calls:
        if call.tests is not None:
            passed = call.tests[0] == call.tests[1]
        elif call.writes:
            passed = False
    return passed

# wrong: an edit that was refused counts
def has_passing_tests(calls):
    passed = False
    for call in calls:
        if call.tests is not None:
            passed = call.tests[0] == call.tests[1] > 0
        elif call.wrote:
            passed = False
    return passed

# stops: as if each call ran tests
def has_passing_tests(calls):
    return calls[-1].tests[0] == calls[-1].tests[1]

# right: from behind
def has_passing_tests(calls):
    for call in reversed(calls):
        if call.tests is not None:
            return call.tests[0] == call.tests[1] > 0
        if call.writes:
            return False
    return False
""",
        3: """
# wrong: who gives up pays nothing
def largest(p, habits, idle, prices):
    cost = sum(price * habits[name] for name, price in prices.items())
    return p / cost if cost > 0 else float("inf")

# wrong: a bound that can be negative
def largest(p, habits, idle, prices):
    extra_cost = sum(price * (habits[name] - idle[name]) for name, price in prices.items())
    return p / extra_cost if extra_cost else float("inf")

# wrong: prices are left out
def largest(p, habits, idle, prices):
    extra_cost = sum(habits[name] - idle[name] for name in prices)
    return p / extra_cost if extra_cost > 0 else float("inf")

# stops: nothing is divided by nothing
def largest(p, habits, idle, prices):
    return p / sum(price * (habits[name] - idle[name]) for name, price in prices.items())

# right: the two bills apart
def largest(p, habits, idle, prices):
    attempt, rest = (sum(price * some[name] for name, price in prices.items()) for some in (habits, idle))
    return float("inf") if attempt <= rest else p / (attempt - rest)
""",
    }
}
