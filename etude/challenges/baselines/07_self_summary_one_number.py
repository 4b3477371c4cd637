"""The whole summary is one number in base 95: names in order of their letters, by their distances, and values; the oldest are dropped."""

import math

HARD, SOFT = "bdfgklmnprst", "aeiou"
LONGEST = 8192


def number(name):
    a, b, c, d = name
    return ((HARD.index(a) * 5 + SOFT.index(b)) * 12 + HARD.index(c)) * 5 + SOFT.index(d)


def unpacked(summary):
    """Values by name, and how recently each was used, 0 to 7."""
    whole = 0
    for letter in summary:
        whole = whole * 95 + ord(letter) - 32
    count, whole, facts = whole % 64, whole // 64, {}
    if not count:
        return {}
    whole, rank = divmod(whole, math.comb(3600, count))
    at = 3600
    for left in range(count, 0, -1):
        low, high = left - 1, at - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if math.comb(middle, left) <= rank else (low, middle - 1)
        rank -= math.comb(low, left)
        at = low
        whole, value = divmod(whole, LONGEST)
        whole, heat = divmod(whole, 4)
        facts[at] = [value, heat]
    return facts


def packed(facts):
    names, whole = sorted(facts), 0
    for name in names:
        whole = (whole * 4 + facts[name][1]) * LONGEST + facts[name][0]
    rank = sum(math.comb(name, place) for place, name in enumerate(names, 1))
    whole = (whole * math.comb(3600, len(names)) + rank) * 64 + len(names)
    text = ""
    while whole:
        whole, letter = divmod(whole, 95)
        text = chr(32 + letter) + text
    return text


def summarise(summary, lines, longest):
    facts, uses = unpacked(summary), {}
    for line in lines:
        verb, name, *rest = line.split()
        name = number(name)
        uses[name] = uses.get(name, 0) + 1
        if verb != "look":
            before = facts.get(name, [0, 0])
            facts[name] = [min(LONGEST - 1, int(rest[0]) + (before[0] if verb == "add" else 0)), before[1]]
    heat = {name: 0.85 * fact[1] + 0.7 * uses.get(name, 0) for name, fact in facts.items()}
    facts = {name: [fact[0], min(3, round(heat[name]))] for name, fact in facts.items()}
    order = sorted(facts, key=lambda name: -heat[name])
    while len(text := packed({name: facts[name] for name in order})) > longest:
        order.pop()
    return text


def answer(summary, name):
    return str(unpacked(summary).get(number(name), [0])[0])
