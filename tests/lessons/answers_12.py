"""Answers to the exercises of lesson 12, by lesson and exercise; `answers.py` says how they are written and read."""

TEXTS: dict[str, dict[int, str]] = {}

TEXTS["12_weight_sync"] = {
    1: """
# wrong: not capped
def share(w, lr):
    return lr / 2.0 ** (math.frexp(w)[1] - 8)

# wrong: frexp's exponent taken for the binade's
def share(w, lr):
    return min(1.0, lr / 2.0 ** (math.frexp(w)[1] - 7))

# wrong: half an ulp
def share(w, lr):
    return min(1.0, 2 * lr / 2.0 ** (math.frexp(w)[1] - 8))

# wrong: a smooth ulp
def share(w, lr):
    return min(1.0, lr / (w * 2.0**-7))

# right: by logarithm
def share(w, lr):
    return min(1.0, lr * 2.0 ** (7 - math.floor(math.log2(w))))

# right: by the next number
def share(w, lr):
    pattern = torch.tensor([w]).view(torch.int32) & -65536
    there = torch.cat((pattern, pattern + 65536)).view(torch.float32).double()
    return min(1.0, lr / (there[1] - there[0]).item())
""",
    2: """
# wrong: as unsigned numbers
def step(a, b):
    return b - a

# wrong: −0 is 0
def step(a, b):
    places = [-(bits - 0x8000) if bits >= 0x8000 else bits for bits in (a, b)]
    return places[1] - places[0]

# wrong: the other way
def step(a, b):
    places = [-1 - (bits - 0x8000) if bits >= 0x8000 else bits for bits in (a, b)]
    return places[0] - places[1]

# wrong: as signed integers
def step(a, b):
    places = [bits - 0x10000 if bits >= 0x8000 else bits for bits in (a, b)]
    return places[1] - places[0]

# right: by flipping bits
def step(a, b):
    def place(x):
        return ~(x & 0x7FFF) if x & 0x8000 else x

    return place(b) - place(a)
""",
    3: """
# wrong: the entropy of a weight
def bits(p):
    return -p * math.log2(p) - (1 - p) * math.log2(1 - p)

# wrong: in nats
def bits(p):
    return (-p * math.log(p) - (1 - p) * math.log(1 - p)) / p

# wrong: the index alone
def bits(p):
    return -math.log2(p)

# right: split up
def bits(p):
    return -math.log2(p) - (1 - p) / p * math.log1p(-p) / math.log(2)
""",
    4: """
# wrong: the second wins
def merge(first, second):
    return {**first, **second}

# wrong: zeros are sent
def merge(first, second):
    return {at: first.get(at, 0) + second.get(at, 0) for at in first | second}

# wrong: only what both have
def merge(first, second):
    return {at: first[at] + second[at] for at in first if at in second and first[at] + second[at]}

# wrong: the first is changed
def merge(first, second):
    for at, num_steps in second.items():
        first[at] = first.get(at, 0) + num_steps
    return {at: num_steps for at, num_steps in first.items() if num_steps}

# right: a copy
def merge(first, second):
    total = dict(first)
    for at, num_steps in second.items():
        total[at] = total.get(at, 0) + num_steps
        if not total[at]:
            del total[at]
    return total
""",
}
