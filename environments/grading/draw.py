"""Arguments that no test has, drawn near those that tests have.

A letter or a number is another one, an element is gone or stands elsewhere, or an argument is that of another call.
Types stay, and so does most of a value: what is far from all that tests ask is mostly refused by a function, and tells
nothing.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from environments.grading.inside.fresh import pack_value, unpack_value

__all__ = ["CANDIDATES", "Call", "draw_calls", "mutated", "text_of"]

CANDIDATES = 400
"""Calls that are drawn, at most."""
REPLACE_RATE = 0.3
"""How often an argument is that of another call, and an entry of a dict is gone."""
Call = Mapping
"""`function`, "module:name"; `args`, a list, and `named`, a dict, with packed values (see inside/fresh.py)."""


def text_of(call: Call) -> str:
    """A call as text, the same for the same call."""
    return json.dumps([call["function"], call["args"], call["named"]], sort_keys=True)


def draw_calls(calls: Sequence[Call], seed: str, max_calls: int = CANDIDATES) -> list[dict]:
    """Calls that are near some others and none of them, each once; the same ones for the same seed. Each call gets as
    many, as far as it has them."""
    rng, test_texts, new_calls = random.Random(seed), {text_of(call) for call in calls}, dict[str, dict]()
    pools: dict[object, list[Call]] = {}
    for call in calls:
        pools.setdefault(call["function"], []).append(call)
    for _ in range(4 * max_calls // max(1, len(calls)) + 1):
        for call in calls:
            candidate = _change_argument(call, pools[call["function"]], rng)
            if len(new_calls) < max_calls and (text := text_of(candidate)) not in test_texts:
                new_calls.setdefault(text, candidate)
    return [*new_calls.values()]


def _change_argument(call: Call, pool: Sequence[Call], rng: random.Random) -> dict:
    """A call with one argument that is another one."""
    args, named = [*call["args"]], dict(call["named"])
    places = [*range(len(args)), *sorted(named)]
    if places:
        place, donor = rng.choice(places), rng.choice(pool)
        values: Any = args if isinstance(place, int) else named
        donor_values: Any = donor["args"] if isinstance(place, int) else donor["named"]
        has_place = place < len(donor_values) if isinstance(place, int) else place in donor_values
        values[place] = (
            donor_values[place]
            if has_place and rng.random() < REPLACE_RATE
            else pack_value(mutated(unpack_value(values[place]), rng))
        )
    return {"function": call["function"], "args": args, "named": named}


def mutated(value: object, rng: random.Random) -> object:
    """A value of the same type that is near: another letter, number, element or order."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + rng.choice((-1, 1, rng.randint(-10, 10), rng.randint(0, abs(value))))
    if isinstance(value, float):
        return round(value + rng.randint(-99, 99) / rng.choice((1, 10, 100)), 6) if math.isfinite(value) else value
    if isinstance(value, str):
        return _mutate_letter(value, rng)
    if isinstance(value, bytes):
        return _mutate_letter(value.decode("latin-1"), rng).encode("latin-1", "replace")
    if isinstance(value, list | tuple | set):
        parts = sorted(value, key=lambda part: json.dumps(pack_value(part))) if isinstance(value, set) else [*value]
        return type(value)(_mutate_parts(parts, rng))
    if isinstance(value, dict) and value:
        key = rng.choice([*value])
        remaining = {name: part for name, part in value.items() if name != key}
        return remaining if rng.random() < REPLACE_RATE else {**value, key: mutated(value[key], rng)}
    return value


def _mutate_parts(parts: list, rng: random.Random) -> list:
    if not parts:
        return parts
    index, other_index = rng.randrange(len(parts)), rng.randrange(len(parts))
    change = rng.randrange(4)
    if change == 0:
        return parts[:index] + parts[index + 1 :]
    if change == 1:
        return [*parts, parts[index]]
    if change == 2:
        parts[index], parts[other_index] = parts[other_index], parts[index]
        return parts
    return [*parts[:index], mutated(parts[index], rng), *parts[index + 1 :]]


def _mutate_letter(text: str, rng: random.Random) -> str:
    """One letter or digit is another one of its kind, is gone or stands twice; where there is none, the last character
    stands twice or is gone."""
    places = [at for at, letter in enumerate(text) if letter.isascii() and letter.isalnum()]
    if not text:
        return rng.choice("0aA")
    at = rng.choice(places) if places else len(text) - 1
    if not places:
        return text + text[-1:] if rng.random() < 0.5 else text[:-1]
    letter, change = text[at], rng.randrange(4)
    alphabet = (
        "0123456789"
        if letter.isdigit()
        else "abcdefghijklmnopqrstuvwxyz"
        if letter.islower()
        else "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    )
    return text[:at] + {0: "", 1: letter + rng.choice(alphabet)}.get(change, rng.choice(alphabet)) + text[at + 1 :]
