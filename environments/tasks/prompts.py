"""What an agent is asked: in few words, as people ask, or with all that a specification says.

The terse prompt has at most 390 characters, the median of CursorBench's prompts. It names what is missing and how that
shows, and nothing of how it was done. The specified one adds signatures, docstrings, the tests that fail, and the
rules. Both are made from names, signatures and docstrings; no line of the deleted code goes into either.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from environments.syntax import parse
from ref.feature_deletion import Piece

__all__ = ["TERSE", "specified", "terse"]

TERSE = 390
"""Characters."""


def list_functions(piece: Piece) -> list[tuple[str, list[str]]]:
    """Files of a piece, and the qualified names of functions in them."""
    functions = []
    for part in piece.name.split("+"):
        file, _, names = part.partition(":")
        functions.append((file, names.split(",")))
    return functions


def terse(piece: Piece, visible: Sequence[str]) -> str:
    """At most TERSE characters."""
    (file, names), *more_files = list_functions(piece)
    subject = f"`{names[0]}` in {file}" + (
        f" and {len(names) + len(more_files) - 1} more" if len(names) + len(more_files) > 1 else ""
    )
    verbs = {
        "slice": "lost part of what it did",
        "body": "is not implemented any more",
        "symbol": "is gone",
        "statement": "lacks one statement",
    }
    verb = verbs.get(piece.way, "are gone, or lost part of what they did")
    sentence = f"{subject} {verb}. Bring {'it' if piece.way in verbs else 'them'} back"
    tests = [test.rpartition("::")[2] for test in visible]
    for number in (3, 2, 1, 0):
        test_list = ", ".join(tests[:number])
        text = f"{sentence}; see {test_list}." if number and tests else f"{sentence}."
        if len(text) <= TERSE:
            return text
    return f"{sentence}."[:TERSE]


def specified(piece: Piece, files: Mapping[str, bytes], visible: Sequence[str], editable: Sequence[str]) -> str:
    """Signatures and docstrings from `files`, the files with the feature; the visible tests that fail; and the
    rules."""
    lines = ["Some code was taken out of this package. Write it again.", ""]
    for file, names in list_functions(piece):
        lines.append(f"In {file}:")
        for name in names:
            signature, doc = _read_signature(files[file], name)
            lines.append(f"- `{signature or name}`" + (f": {' '.join(doc.split())}" if doc else ""))
    lines += ["", "These tests fail and must pass:", *(f"- {test}" for test in visible)]
    lines += [
        "",
        f"Others that you cannot see must pass, too, and none may break. Change only "
        f"{', '.join(editable)}. Do not change tests.",
    ]
    return "\n".join(lines)


def _read_signature(data: bytes, name: str) -> tuple[str, str]:
    """Signature and docstring of a function or class by its qualified name."""
    node: ast.AST = parse(data)
    for part in name.replace(".<locals>", "").split("."):
        definitions = [
            child
            for child in ast.walk(node)
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and child.name == part
        ]
        if not definitions:
            return "", ""
        node = definitions[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    doc = ast.get_docstring(node) or ""
    if isinstance(node, ast.ClassDef):
        return f"class {name}", doc
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return (
        f"{'async ' if isinstance(node, ast.AsyncFunctionDef) else ''}def {name}({ast.unparse(node.args)}){returns}",
        doc,
    )
