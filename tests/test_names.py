"""Names are words of the field, and lines are short. What is left over from before is counted by folder, and may only
become less.

A value is a noun, a function a verb with its object, a boolean an adjective or `is_…`; no participle stands alone, and
pronouns and adverbs are no names."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PARTICIPLES = """apart asked begun broken built caught charged chosen corrected counted dealt drafted drawn ended
found given gone heard held kept known laid lost lumped made meant measured met opened paid played
pressed priced put read_ rearranged reckoned said seen sent shown spent squeezed stuck taken told
tried wanted won written looked boasted got"""
OTHERS = """one some each other others what where here there who whom whose which when why how it its them they
he she this that these those both either neither thing things stuff mine ours same whole rest much
many more most less few ever never now then once soon late_ early within without around again still
beside far"""
WORDS = frozenset(f"{PARTICIPLES} {OTHERS}".split())
LEFT = {
    "ref": 1,
    "scaled": 0,
    "environments": 0,
    "kit": 0,
    "kernels": 0,
    "etude": 0,
    "recipe": 0,
    "sims": 0,
    "lessons": 0,
    "examples": 7,
}
"""Folder → names of the wrong kind that are left."""
LONG = {
    "ref": 0,
    "scaled": 1,
    "environments": 0,
    "kit": 0,
    "kernels": 0,
    "etude": 0,
    "recipe": 0,
    "sims": 0,
    "lessons": 0,
    "examples": 5,
    "tests": 0,
}
"""Folder → lines of more than 120 characters that are left."""


def bindings(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every name that a file gives to something, and its line: variables, parameters, functions, classes, attributes,
    aliases."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name, node.lineno
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node.lineno
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name, node.lineno
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from ((alias.asname, node.lineno) for alias in aliases if alias.asname)


def wrong_names(text: str) -> list[tuple[str, int]]:
    return [(name, line) for name, line in bindings(ast.parse(text)) if name.lower().strip("_") in WORDS]


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("folder", LEFT)
def test_names_of_the_wrong_kind_only_become_fewer(folder):
    names = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files(folder)
        for name, line in wrong_names(path.read_text(encoding="utf-8"))
    ]
    names += [f"{path.relative_to(ROOT)}: the module's own name" for path in files(folder) if path.stem in WORDS]
    listed = "\n".join(names)
    assert len(names) <= LEFT[folder], (
        f"{len(names)} names, {LEFT[folder]} before; what does each hold, in words of the field?\n{listed}"
    )
    assert len(names) == LEFT[folder], f"only {len(names)} are left: write that number into LEFT"


@pytest.mark.parametrize("folder", LONG)
def test_long_lines_only_become_fewer(folder):
    texts = [(path.relative_to(ROOT), path.read_text(encoding="utf-8").splitlines()) for path in files(folder)]
    lines = [f"{path}:{number}" for path, text in texts for number, line in enumerate(text, 1) if len(line) > 120]
    assert len(lines) <= LONG[folder], (
        f"{len(lines)} lines have more than 120 characters, {LONG[folder]} had before: {' '.join(lines)}"
    )
    assert len(lines) == LONG[folder], f"only {len(lines)} are left: write that number into LONG"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("found = 1", ["found"]),
        ("def told(each, *, what=0): ...", ["told", "each", "what"]),
        ("for one in rows: self.kept = one", ["one", "kept"]),
        ("class Told: drawn: int = 0", ["Told", "drawn"]),
        ("import numpy as here", ["here"]),
        ("with open(path) as found, other: pass", ["found"]),
        ("match x:\n    case [some, *rest]: pass", ["some", "rest"]),
        ("try: pass\nexcept OSError as given: pass", ["given"]),
        ("_found = [one for one in rows]", ["_found", "one"]),
        ("losses = compute_losses(found, kept=1)", []),
        ("is_found = has_kept = finished = True", []),
    ],
)
def test_every_way_to_give_a_name_is_seen(text, names):
    assert sorted(name for name, _ in wrong_names(text)) == sorted(names)
