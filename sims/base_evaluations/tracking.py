"""State tracking (Appendix B, after LoCoDiff): a file, a chain of diffs, and the question what the file is now.

    chain   = a first version, k diffs in unified form, the last version
    prompt  = all but the last version, fenced; the model writes on, greedily, until it closes the fence
    score   = `similarity` (0 … 100, by characters), and whether the text is exactly right

Chains come from a folder of Python, by seeded edits of its shorter functions and classes that leave valid Python
(rename a name, insert, delete or swap lines); or from the history of a git repository
(sims/base_evaluations/history.py). Lengths are in bytes, because every model has to read the same chain, and tokenizers
differ.

A score needs something beside it. `baselines` gives what a reader without any understanding gets: who copies the first
version, and who writes what the last diff shows of the new file. A small model may be near them when it writes.
`sims/base_evaluations/table.py` therefore also reports what it gives the true last version, in bits per byte, and how
often a true token is its first choice.

The trap: exact match throws away an answer that is off by one character like one that is empty. `brittleness` counts
that."""

from __future__ import annotations

import ast
import difflib
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sims.base_evaluations.distance import similarity

__all__ = ["FENCE", "NEAR", "Chain", "baselines", "brittleness", "chain_of", "edited", "pieces", "synthetic"]

FENCE = "\n```"
"""What ends an answer."""
NEAR = 95.0
"""A similarity from which on an answer counts as nearly right: at most 5% of its characters are off."""


@dataclass(frozen=True)
class Chain:
    """A file and what happened to it."""

    name: str
    first: str
    diffs: tuple[str, ...]
    final: str

    @property
    def prompt(self) -> str:
        """What the model reads. The answer is `final`, whose last line break belongs to the fence."""
        diffs_text = "".join(f"Diff {n}:\n```diff\n{diff}```\n" for n, diff in enumerate(self.diffs, 1))
        return f"{self.name}:\n```python\n{self.first}```\n{diffs_text}{self.name} after the diffs:\n```python\n"

    @property
    def answer(self) -> str:
        """What the model should write before the fence."""
        return self.final.rstrip("\n")

    @property
    def size(self) -> int:
        """Bytes of prompt and answer."""
        return len((self.prompt + self.answer + FENCE).encode())


def chain_of(name: str, versions: Sequence[str]) -> Chain:
    """The chain through these versions of a file, each ending in a line break. Raises ValueError for fewer than two
    versions, for a neighbour that is the same, and for a text without its last line break."""
    if (
        len(versions) < 2
        or any(a == b for a, b in zip(versions, versions[1:]))
        or not all(v.endswith("\n") for v in versions)
    ):
        raise ValueError(
            "a chain needs two or more versions, each another than the one before, and each with a "
            "line break at its end"
        )
    diffs = []
    for a, b in zip(versions, versions[1:]):
        lines = [*difflib.unified_diff(split_lines(a), split_lines(b), n=1)][2:]
        diffs.append("".join(lines))
    return Chain(name, versions[0], tuple(diffs), versions[-1])


def split_lines(text: str) -> list[str]:
    """Lines with their ends. str.splitlines would also cut at form feeds, which diffs do not."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def pieces(texts: dict[str, str], min_bytes: int, max_bytes: int) -> list[tuple[str, str]]:
    """(name, text) of the functions and classes in Python files whose source is `min_bytes` to `max_bytes` bytes long
    and plain ASCII without fences, as if each were a file. A file that does not parse gives none."""
    pieces_by_text = {}
    for path in sorted(texts):
        if not path.endswith(".py"):
            continue
        try:
            tree = ast.parse(texts[path])
        except (SyntaxError, ValueError):
            continue
        lines = split_lines(texts[path])
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.end_lineno:
                text = "".join(lines[node.lineno - 1 : node.end_lineno])
                if min_bytes <= len(text) <= max_bytes and text.isascii() and not re.search("```|[\t\r\f]", text):
                    pieces_by_text.setdefault(
                        text if text.endswith("\n") else text + "\n", f"{node.name.strip('_').lower() or 'piece'}.py"
                    )
    return [(name, text) for text, name in pieces_by_text.items()]


def synthetic(
    texts: dict[str, str],
    counts: Sequence[int],
    per_count: int,
    size: int,
    seed: int,
    fits: Callable[[Chain], bool] = lambda chain: True,
) -> list[Chain]:
    """`per_count` chains for each number of diffs in `counts`, of at most `size` bytes and such that `fits` says so (a
    model's context), every one from another piece of the files. Raises ValueError if the files have too few pieces."""
    rng, chains = random.Random(seed), []
    candidates = pieces(texts, 120, size // 4)
    rng.shuffle(candidates)
    remaining = iter(candidates)
    for diffs in sorted(counts, reverse=True):  # long chains first: they fit fewer pieces
        count = 0
        for name, text in remaining:
            versions: list[str | None] = [text]
            for _ in range(diffs):
                versions.append(edited(versions[-1], rng))
            if None in versions:
                continue
            chain = chain_of(name, [v for v in versions if v is not None])
            if chain.size <= size and chain.first != chain.final and len(chain.answer) > 100 and fits(chain):
                chains.append(chain)
                count += 1
                if count == per_count:
                    break
        if count < per_count:
            raise ValueError(
                f"chains must be fewer, or longer: the files give {count} of {per_count} with {diffs} "
                f"diffs in {size} bytes"
            )
    return sorted(chains, key=lambda c: len(c.diffs))


def edited(text: str | None, draw: random.Random) -> str | None:
    """The text after one edit: a name renamed everywhere, or a line inserted, deleted, or swapped with the next. It is
    valid Python, and another text than before. None if twenty tries find none."""
    for _ in range(20 if text else 0):
        assert text is not None
        kind, lines = draw.choice(("rename", "insert", "delete", "swap")), split_lines(text)
        index = draw.randrange(1, len(lines)) if len(lines) > 1 else 0
        if kind == "rename":
            fresh = rename_name(text, draw)
        elif kind == "insert":
            margin = (
                re.match(r" *", lines[index]).group()  # pyright: ignore[reportOptionalMemberAccess] (it always matches)
            )
            fresh = "".join([*lines[:index], f"{margin}{draw.choice(WORDS)} = {draw.randrange(100)}\n", *lines[index:]])
        elif kind == "delete":
            fresh = "".join([*lines[:index], *lines[index + 1 :]])
        else:
            fresh = (
                "".join(
                    [*lines[: index - 1], *lines[index : index + 1], *lines[index - 1 : index], *lines[index + 1 :]]
                )
                if index > 1
                else text
            )
        if fresh != text and is_valid_python(fresh):
            return fresh
    return None


WORDS = ("count", "limit", "offset", "total", "depth", "width", "first", "last", "index", "step")
"""Names that edits bring in."""


def rename_name(text: str, draw: random.Random) -> str:
    tree = ast.parse(text)
    names = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    words, fresh = set(re.findall(r"\w+", text)), draw.choice(WORDS)
    if not names or fresh in words:
        return text
    old = draw.choice(sorted(names))
    return re.sub(rf"\b{old}\b", fresh, text)


def is_valid_python(text: str) -> bool:
    try:
        return bool(ast.parse(text).body)
    except (SyntaxError, ValueError):
        return False


def baselines(chains: Iterable[Chain]) -> list[dict[str, float]]:
    """{first, hunk} of each chain: the similarity of the first version, and of the new lines of the last diff, to the
    last version."""
    rows = []
    for chain in chains:
        hunk = "".join(line[1:] for line in split_lines(chain.diffs[-1]) if line[:1] in " +")
        rows.append(
            {
                "first": similarity(chain.first.rstrip("\n"), chain.answer),
                "hunk": similarity(hunk.rstrip("\n"), chain.answer),
            }
        )
    return rows


def brittleness(pairs: Sequence[tuple[str, str]], seed: int = 0) -> dict[str, list]:
    """What exact match does to nearly right answers; pairs (written, wanted).

    {rejected: for each answer of similarity 95 or more, whether exact match counts it as wrong; moved: for each wanted
    text, by how many points of 100 one wrong character in it lowers the similarity, where it lowers exact match from
    100 to 0}."""
    rng, shifts = random.Random(seed), []
    for _, target in pairs:
        position = rng.randrange(len(target))
        letter = rng.choice([c for c in "abcxyz01_ " if c != target[position]])
        shifts.append(100.0 - similarity(target[:position] + letter + target[position + 1 :], target))
    return {
        "rejected": [output != target for output, target in pairs if similarity(output, target) >= NEAR],
        "moved": shifts,
    }
