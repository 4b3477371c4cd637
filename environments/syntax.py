"""Python's parser for programs in which threads parse side by side, as gradings do."""

import ast

__all__ = ["parse"]

TRIES = 5
"""Python 3.11 raises SystemError where two threads parse at once (python/cpython#106905); the next try has another
moment."""


def parse(source: str | bytes) -> ast.Module:
    """The syntax tree of a module. Raises SyntaxError, ValueError, RecursionError and MemoryError as `ast.parse` does,
    and SystemError for source with which every try ends so: a policy may have written it."""
    for _ in range(TRIES - 1):
        try:
            return ast.parse(source)
        except SystemError:
            continue
    return ast.parse(source)
