"""Code that nobody wrote, and builds of it, for the tests of prepared data."""

import random
import re
from pathlib import Path

from ref.cpt import load_tokenizer, train_tokenizer
from scaled.data import prepare
from scaled.data.prepare import Settings
from scaled.data.read import Prepared
from scaled.data.rules import body
from scaled.data.sources import Source

__all__ = ["SMALL", "build", "code", "everything", "folder", "mutated", "similar", "train_on_code", "trained"]

SMALL = Settings(unit_bytes=6000, shard_tokens=4000)
WHOLE = ("data.json", "dropped.jsonl", "heldout.jsonl", "tokenizer.json", "shards/*")
"""What a build leaves for training."""


def code(draw: random.Random, functions: int = 12) -> str:
    """Functions of random words: two texts have no five words in common."""

    def word() -> str:
        return "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=7))

    return "\n".join(
        f"def {word()}({word()}, {word()}):\n    {word()} = {word()} + {word()}\n    return {word()} * 2\n"
        for _ in range(functions)
    )


def mutated(text: str, draw: random.Random, share: float) -> str:
    """The text with about that share of its lines replaced, left out or doubled, and something before or behind it."""
    lines = []
    for line in text.split("\n"):
        kind = draw.random()
        lines += (
            []
            if kind < share / 3
            else [line, line]
            if kind < share / 2
            else [code(draw, 1)]
            if kind < share
            else [line]
        )
    return "\n".join(
        [*[f"# {draw.random()}"] * draw.randrange(3), *lines, *[f"print({draw.random()})"] * draw.randrange(3)]
    )


def folder(root: Path, seed: int = 0, packages: int = 4, files: int = 5) -> Path:
    """A folder of packages."""
    draw = random.Random(seed)
    for p in range(packages):
        (root / f"p{p}").mkdir(parents=True)
        for f in range(files):
            (root / f"p{p}" / f"f{f}.py").write_text(code(draw))
    return root


def train_on_code(root: Path) -> Path:
    """A tokenizer.json."""
    train_tokenizer([code(random.Random(1))], 300).save(str(root / "tokenizer.json"))
    return root / "tokenizer.json"


def build(
    out: Path, given: list[Source], tokenizer: Path, chosen: Settings = SMALL, processes: int = 1, resume: bool = False
) -> dict:
    return prepare.prepare(out, given, chosen, tokenizer, processes, resume, "again")


def everything(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for pattern in WHOLE for path in sorted(out.glob(pattern))}


def trained(out: Path) -> list[str]:
    """The texts of all shards."""
    data = Prepared(out)
    coder = load_tokenizer(data.tokenizer)
    return [
        coder.decode(s.tokens[a:b].tolist()) for one in data.shards for s in one for a, b in zip(s.places, s.places[1:])
    ]


def runs(text: str) -> set[tuple[str, ...]]:
    """Shingles without hashes."""
    words = re.findall(r"\w+", body(text))
    return {tuple(words[i : i + 5]) for i in range(max(len(words) - 4, 1))} if words else set()


def similar(a: str, b: str) -> float:
    """Jaccard similarity of the runs of five words."""
    return len(runs(a) & runs(b)) / max(len(runs(a) | runs(b)), 1)
