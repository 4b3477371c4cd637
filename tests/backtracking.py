"""A matcher of regular expressions that counts its steps, as Python's would take them without its shortcuts.

Python's own cannot be asked how much it did, and times on a busy machine prove nothing. This one walks the parsed
pattern in the same order, with backtracking, atomic groups and possessive repetitions. `is_linear` attacks a pattern
with texts that are made from its own pieces."""

import itertools
import re
import sys
from functools import lru_cache
from re import _constants as codes  # pyright: ignore[reportAttributeAccessIssue]
from re import _parser as parser  # pyright: ignore[reportAttributeAccessIssue]

__all__ = ["TooManySteps", "attacks", "is_linear", "matches", "steps"]

IGNORECASE, MULTILINE, DOTALL = int(re.IGNORECASE), int(re.MULTILINE), int(re.DOTALL)
WORD = re.compile(r"\w")
CATEGORIES = {
    codes.CATEGORY_DIGIT: r"\d",
    codes.CATEGORY_NOT_DIGIT: r"\D",
    codes.CATEGORY_SPACE: r"\s",
    codes.CATEGORY_NOT_SPACE: r"\S",
    codes.CATEGORY_WORD: r"\w",
    codes.CATEGORY_NOT_WORD: r"\W",
}
ALPHABET = [
    chr(code)
    for code in (
        *range(97, 123),
        *range(65, 91),
        *range(48, 58),
        *range(32, 48),
        *range(58, 65),
        *range(91, 97),
        *range(123, 127),
    )
]


class TooManySteps(Exception):
    """The matcher was stopped."""


def width(items) -> int:
    """Characters of what stands behind; all its branches are as long."""
    inner = {codes.SUBPATTERN: lambda value: value[3], codes.BRANCH: lambda value: value[1][0]}
    return sum(0 if op is codes.AT else width(inner[op](value)) if op in inner else 1 for op, value in items)


def is_member(items, letter: str) -> bool:
    negated = bool(items) and items[0][0] is codes.NEGATE
    inside = False
    for op, value in items[negated:]:
        if op is codes.LITERAL:
            inside = inside or ord(letter) == value
        elif op is codes.RANGE:
            inside = inside or value[0] <= ord(letter) <= value[1]
        elif op is codes.CATEGORY:
            inside = inside or re.match(CATEGORIES[value], letter) is not None
    return inside != negated


class Matcher:
    """One pattern over one text."""

    def __init__(self, text: str, flags: int, limit: int) -> None:
        self.text, self.flags, self.limit, self.count, self.groups = text, flags, limit, 0, {}
        self.variants = [{letter.lower(), letter.upper()} if flags & IGNORECASE else {letter} for letter in text]
        self.members: dict[tuple, bool] = {}

    def first(self, items, at: int) -> int | None:
        """Where the first match ends."""
        ends = []
        return ends[0] if self.sequence(items, 0, at, lambda end: ends.append(end) is None) else None

    def sequence(self, items, index: int, at: int, then) -> bool:
        self.count += 1
        if self.count > self.limit:
            raise TooManySteps
        if index == len(items):
            return then(at)
        op, value = items[index]

        if op in (codes.LITERAL, codes.NOT_LITERAL, codes.ANY, codes.IN):
            return (
                at < len(self.text) and self.is_letter(op, value, at) and self.sequence(items, index + 1, at + 1, then)
            )

        def go(end: int) -> bool:
            return self.sequence(items, index + 1, end, then)

        if op is codes.SUBPATTERN:
            number, inner = value[0], value[3]

            def close(end: int) -> bool:
                before = self.groups.get(number)
                self.groups[number] = self.text[at:end]
                if go(end):
                    return True
                self.groups[number] = before
                return False

            return self.sequence(inner, 0, at, close)
        if op is codes.BRANCH:
            return any(self.sequence(branch, 0, at, go) for branch in value[1])
        if op in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            return self.repeat(op is codes.MAX_REPEAT, value, 0, at, go)
        if op is codes.POSSESSIVE_REPEAT:
            low, high, inner = value
            number = 0
            while number < high and (end := self.first(inner, at)) is not None and (end > at or number < low):
                number, at = number + 1, end
            return number >= low and go(at)
        if op is codes.ATOMIC_GROUP:
            return (end := self.first(value, at)) is not None and go(end)
        if op is codes.AT:
            return self.is_place(value, at) and go(at)
        if op in (codes.ASSERT, codes.ASSERT_NOT):
            direction, inner = value
            start = at if direction > 0 else at - width(inner)
            inside = start >= 0 and self.first(inner, start) is not None
            return inside == (op is codes.ASSERT) and go(at)
        if op is codes.GROUPREF:
            group = self.groups.get(value)
            return group is not None and self.text.startswith(group, at) and go(at + len(group))
        raise NotImplementedError(op)

    def repeat(self, greedy: bool, value, number: int, at: int, then) -> bool:
        low, high, inner = value

        def more() -> bool:
            return number < high and self.sequence(
                inner,
                0,
                at,
                lambda end: (end > at or number < low) and self.repeat(greedy, value, number + 1, end, then),
            )

        if not greedy:
            return number >= low and then(at) or more()
        return more() or number >= low and then(at)

    def is_letter(self, op, value, at: int) -> bool:
        letter = self.text[at]
        if op is codes.ANY:
            return letter != "\n" or bool(self.flags & DOTALL)
        key = (op, value if op is not codes.IN else id(value), letter)
        if (known := self.members.get(key)) is None:
            negated, variants = op is codes.NOT_LITERAL, self.variants[at]
            known = (
                any(is_member(value, one) for one in variants)
                if op is codes.IN
                else (chr(value) in variants) != negated
            )
            self.members[key] = known
        return known

    def is_place(self, value, at: int) -> bool:
        text, last = self.text, len(self.text)
        if value is codes.AT_BEGINNING:
            return at == 0 or bool(self.flags & MULTILINE) and text[at - 1] == "\n"
        if value is codes.AT_BEGINNING_STRING:
            return at == 0
        if value is codes.AT_END:
            return at == last or text[at:] == "\n" or bool(self.flags & MULTILINE) and text[at] == "\n"
        if value is codes.AT_END_STRING:
            return at == last
        edge = (at > 0 and WORD.match(text[at - 1]) is not None) != (at < last and WORD.match(text[at]) is not None)
        return edge == (value is codes.AT_BOUNDARY)


def plain(part):
    """A parsed pattern as lists, which are faster than the parser's own."""
    if isinstance(part, parser.SubPattern | list):
        return [plain(one) for one in part]
    return tuple(plain(one) for one in part) if isinstance(part, tuple) else part


@lru_cache
def parsed(pattern: str, flags: int):
    tree = parser.parse(pattern, flags)
    return plain(tree), int(tree.state.flags), tree


def matches(pattern: str, text: str, flags: int = 0) -> bool:
    """As bool(re.search(...)): proves that the matcher is one."""
    tree, flags, _ = parsed(pattern, flags)
    matcher = Matcher(text, flags, sys.maxsize)
    return any(matcher.first(tree, at) is not None for at in range(len(text) + 1))


def steps(pattern: str, text: str, flags: int = 0, anchored: bool = False, limit: int = 200_000) -> int:
    """Steps of a search that goes on from every place, as findall's does at worst; `anchored`: of a match from the
    beginning alone. Raises TooManySteps."""
    tree, flags, _ = parsed(pattern, flags)
    matcher, at = Matcher(text, flags, limit), 0
    while at <= len(text) and not (anchored and at):
        end = matcher.first(tree, at)
        at = max(at + 1, end or 0)
        if anchored and end is not None and end < len(text):  # fullmatch tries on
            matcher.sequence(tree, 0, 0, lambda end: end == len(text))
    return matcher.count


def samples(items, most: int = 4) -> list[str]:
    """Short texts that a piece of a pattern matches: every branch, options taken and left out."""
    results = [""]
    for op, value in items:
        if op in (codes.LITERAL, codes.NOT_LITERAL):
            choices = (
                [chr(value)] if op is codes.LITERAL else [next(letter for letter in ALPHABET if ord(letter) != value)]
            )
        elif op is codes.ANY:
            choices = ["a"]
        elif op is codes.IN:
            inside = [letter for letter in ALPHABET if is_member(value, letter)] or ["é"]
            choices = [*inside[:1], *inside[-1:]]
        elif op is codes.SUBPATTERN:
            choices = samples(value[3], most)
        elif op is codes.BRANCH:
            choices = [text for branch in value[1] for text in samples(branch, 2)]
        elif op in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
            choices = [text * max(1, min(value[0], 50)) for text in samples(value[2], most)]
        elif op is codes.ATOMIC_GROUP:
            choices = samples(value, most)
        elif op is codes.GROUPREF:
            choices = ["a"]
        else:
            choices = [""]
        results = [*dict.fromkeys(before + choice for choice in choices for before in results)][
            : max(most, len(choices))
        ]
    return results


def pieces(items) -> list:
    """Every single and every pair of neighbours within a pattern, and those within them."""
    wide = [item for item in items if item[0] is not codes.AT]
    rows = [wide[at : at + size] for size in (1, 2) for at in range(len(wide) - size + 1)]
    inner = [
        value[3] if op is codes.SUBPATTERN else value[2] if "REPEAT" in str(op) else value
        for op, value in items
        if op is not codes.BRANCH
    ]
    inner = [one for one in inner if isinstance(one, parser.SubPattern)]
    inner += [branch for op, value in items if op is codes.BRANCH for branch in value[1]]
    return [*rows, *inner, *itertools.chain.from_iterable(map(pieces, inner))]


def attacks(pattern: str, flags: int = 0) -> list[tuple[str, str, str]]:
    """Beginnings, fragments to repeat, and ends. A beginning leads up to a repetition, which the fragments may then
    drive."""
    tree = parsed(pattern, flags)[2]
    pumps = [text for piece in pieces(tree) for text in samples(piece, 2) if text]
    repeats = [at for at, (op, _) in enumerate(tree) if at and "REPEAT" in str(op)]
    heads = ["", *(text for at in (*repeats[:1], *repeats[-1:]) for text in samples(tree[:at], 1))]
    return [(head, pump, "\0\n!") for head in dict.fromkeys(heads) for pump in dict.fromkeys(pumps)]


def is_linear(pattern: str, flags: int = 0, anchored: bool = False) -> str:
    """Empty, or the text with which the steps grow faster than its length. A bound such as {0,40} may be reached first:
    so sizes rise."""
    for head, pump, tail in attacks(pattern, flags):
        before = sys.maxsize
        for size in (24, 48, 96, 192, 384):
            text = head + pump * -(-size // len(pump)) + tail
            try:
                count = steps(pattern, text, flags, anchored, limit=200 * size)
            except TooManySteps:
                return f"{head!r} + {pump!r} * {size // len(pump)} + {tail!r}: more than {200 * size} steps"
            if size > 24 and count <= 2.4 * before:
                break
            before = count
        else:
            return f"{head!r} + {pump!r} * n + {tail!r}: {before} steps for {len(text)} characters"
    return ""
