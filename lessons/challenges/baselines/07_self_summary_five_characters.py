"""Two characters for a name, two for its value, one for how often it was used; the rarest names are dropped."""

DIGITS = "".join(map(chr, range(33, 127)))
HARD, SOFT = "bdfgklmnprst", "aeiou"


def number(name):
    a, b, c, d = name
    return ((HARD.index(a) * 5 + SOFT.index(b)) * 12 + HARD.index(c)) * 5 + SOFT.index(d)


def pair(value):
    return DIGITS[value // 94] + DIGITS[value % 94]


def read(summary):
    places = [DIGITS.index(letter) for letter in summary]
    return {a * 94 + b: [c * 94 + d, e] for a, b, c, d, e in zip(*(places[k::5] for k in range(5)))}


def summarise(summary, lines, longest):
    facts = read(summary)
    for line in lines:
        verb, name, *arguments = line.split()
        fact = facts.setdefault(number(name), [0, 0])
        fact[1] += 1
        if verb != "look":
            fact[0] = int(arguments[0]) + (fact[0] if verb == "add" else 0)
    top_facts = sorted((item for item in facts.items() if item[1][0]), key=lambda item: -item[1][1])[: longest // 5]
    return "".join(pair(name) + pair(min(value, 8835)) + DIGITS[min(count, 93)] for name, (value, count) in top_facts)


def answer(summary, name):
    return str(read(summary).get(number(name), [0])[0])
