"""The whole summary is one number in base 95: names in order of their letters, by their distances, and values; the
oldest are dropped."""

import math

HARD, SOFT = "bdfgklmnprst", "aeiou"
LONGEST = 8192


def number(name):
    a, b, c, d = name
    return ((HARD.index(a) * 5 + SOFT.index(b)) * 12 + HARD.index(c)) * 5 + SOFT.index(d)


def unpack(summary):
    """Values by name, and how recently each was used, 0 to 7."""
    number_value = 0
    for letter in summary:
        number_value = number_value * 95 + ord(letter) - 32
    count, number_value, facts = number_value % 64, number_value // 64, {}
    if not count:
        return {}
    number_value, rank = divmod(number_value, math.comb(3600, count))
    at = 3600
    for left in range(count, 0, -1):
        low, high = left - 1, at - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if math.comb(middle, left) <= rank else (low, middle - 1)
        rank -= math.comb(low, left)
        at = low
        number_value, value = divmod(number_value, LONGEST)
        number_value, heat = divmod(number_value, 4)
        facts[at] = [value, heat]
    return facts


def pack(facts):
    names, number_value = sorted(facts), 0
    for name in names:
        number_value = (number_value * 4 + facts[name][1]) * LONGEST + facts[name][0]
    rank = sum(math.comb(name, place) for place, name in enumerate(names, 1))
    number_value = (number_value * math.comb(3600, len(names)) + rank) * 64 + len(names)
    text = ""
    while number_value:
        number_value, letter = divmod(number_value, 95)
        text = chr(32 + letter) + text
    return text


def summarise(summary, lines, longest):
    facts, uses = unpack(summary), {}
    for line in lines:
        verb, name, *arguments = line.split()
        name = number(name)
        uses[name] = uses.get(name, 0) + 1
        if verb != "look":
            previous = facts.get(name, [0, 0])
            facts[name] = [min(LONGEST - 1, int(arguments[0]) + (previous[0] if verb == "add" else 0)), previous[1]]
    heat = {name: 0.85 * fact[1] + 0.7 * uses.get(name, 0) for name, fact in facts.items()}
    facts = {name: [fact[0], min(3, round(heat[name]))] for name, fact in facts.items()}
    order = sorted(facts, key=lambda name: -heat[name])
    while len(text := pack({name: facts[name] for name in order})) > longest:
        order.pop()
    return text


def answer(summary, name):
    return str(unpack(summary).get(number(name), [0])[0])
