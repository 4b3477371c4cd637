"""Code that nobody wrote, for the tests of prepared data."""

import random
from pathlib import Path

__all__ = ["code", "folder", "mutated"]


def code(draw: random.Random, functions: int = 12) -> str:
    """Functions of random words: two texts have no five words in common."""

    def word() -> str:
        return "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=7))

    return "\n".join(f"def {word()}({word()}, {word()}):\n    {word()} = {word()} + {word()}\n    return {word()} * 2\n" for _ in range(functions))


def mutated(text: str, draw: random.Random, share: float) -> str:
    """The text with about that share of its lines replaced, left out or doubled, and something before or behind it."""
    lines = []
    for line in text.split("\n"):
        kind = draw.random()
        lines += [] if kind < share / 3 else [line, line] if kind < share / 2 else [code(draw, 1)] if kind < share else [line]
    return "\n".join([*[f"# {draw.random()}"] * draw.randrange(3), *lines, *[f"print({draw.random()})"] * draw.randrange(3)])


def folder(root: Path, seed: int = 0, packages: int = 4, files: int = 5) -> Path:
    """A folder of packages."""
    draw = random.Random(seed)
    for p in range(packages):
        (root / f"p{p}").mkdir(parents=True)
        for f in range(files):
            (root / f"p{p}" / f"f{f}.py").write_text(code(draw))
    return root
