"""A function or class of a module taken out whole: its definition, what imports it, and its places in `__all__`.

What runs at import decides. A module that uses the name while it is imported (in a decorator, a default, a base class, an alias) would break with
everything that imports it, so such a symbol is refused. Bodies of functions are left alone: a local variable of the same name is another variable,
and one who means the symbol meets a NameError when it is called.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

from ref.source_text import Edit, Source, apply, parse_source, patch, tree_of

__all__ = ["defined", "removal"]

Place = tuple[int, int]


def module_of(file: str) -> str:
    """The dotted name by which a file is imported, from the folder of the packages or from one called src."""
    return file.removesuffix(".py").removesuffix("/__init__").removeprefix("src/").replace("/", ".")


def defined(source: Source) -> list[str]:
    """Names of the functions and classes that a module defines at its top, also beneath `if` and `try`, and does not use itself at import."""
    found = {node.name for _, node in _statements(source.tree.body) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    return sorted(found - {node.id for node in at_import(source.tree) if isinstance(node, ast.Name)})


def removal(sources: Mapping[str, Source], file: str, name: str) -> dict[str, list[Edit]] | None:
    """The edits of each file that take a symbol out; None where something uses it at import."""
    edits: dict[str, list[tuple[Edit, ast.AST]]] = {}
    todo, done = [(file, name)], set()
    while todo:
        here, called = todo.pop()
        if (here, called) in done:
            continue
        done.add((here, called))
        found, onward = _here(sources[here], called, root=(here, called) == (file, name)), []
        if found is None:
            return None
        edits.setdefault(here, []).extend(found)
        for other, source in sources.items():
            for suite, node in _statements(source.tree.body):
                if isinstance(node, ast.ImportFrom) and _target(other, node) == module_of(here):
                    gone = [alias for alias in node.names if alias.name == called]
                    if gone:
                        edits.setdefault(other, []).extend(_without_aliases(source, suite, node, gone))
                    onward += [(other, alias.asname or alias.name) for alias in gone]
                    onward += [(other, called) for alias in node.names if alias.name == "*"]
            if other != here and any(isinstance(one, ast.Attribute) and one.attr == called for one in at_import(source.tree)):
                return None
        todo += onward
    edits = {other: found for other, found in edits.items() if found}
    if not all(_exact(sources[other], other, found) for other, found in edits.items()):
        return None
    return {other: [edit for edit, _ in found] for other, found in edits.items()}


def _statements(suite: Sequence[ast.stmt]) -> Iterator[tuple[Sequence[ast.stmt], ast.stmt]]:
    """Statements of a module's own scope, with the suites that they stand in."""
    for node in suite:
        yield suite, node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, part, []))
            for part in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
                yield from _statements(part.body)


def at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes that are evaluated when a module is imported. Annotations are among them unless they are strings by a future import."""
    lazy = any(
        isinstance(one, ast.ImportFrom) and one.module == "__future__" and any(a.name == "annotations" for a in one.names) for one in ast.walk(tree)
    )

    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        for field, value in ast.iter_fields(node):
            of_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and field == "body"
            if of_function or lazy and field in ("annotation", "returns"):
                continue
            inner = [child for child in (value if isinstance(value, list) else [value]) if isinstance(child, ast.AST)]
            yield from inner
            todo += inner


def _target(file: str, node: ast.ImportFrom) -> str:
    """The module from which an import statement takes its names."""
    if not node.level:
        return node.module or ""
    package = module_of(file).split(".")
    package = package if file.endswith("/__init__.py") else package[:-1]
    return ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])


def _here(source: Source, name: str, root: bool) -> list[tuple[Edit, ast.AST]] | None:
    """Edits of the module in which the name lives: of its definitions, if it is at home here, and of `__all__`. None if it is needed."""
    edits, spans = [], set()
    for suite, node in _statements(source.tree.body):
        if root and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            edits.append((_without(source, suite, node), node))
            spans |= {id(one) for one in ast.walk(node)}
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if [ast.unparse(one) for one in targets] == ["__all__"] and isinstance(node.value, ast.List | ast.Tuple):
                elements = node.value.elts
                gone = [at for at, one in enumerate(elements) if isinstance(one, ast.Constant) and one.value == name]
                edits += [(_without_element(source, elements, at, isinstance(node.value, ast.Tuple)), elements[at]) for at in gone]
    for one in at_import(source.tree):
        bound = isinstance(one, ast.alias) and root and (one.asname or one.name.partition(".")[0]) == name
        if id(one) not in spans and (isinstance(one, ast.Name) and one.id == name or bound):
            return None
    if any(isinstance(one, ast.Global) and name in one.names for one in ast.walk(source.tree)):
        return None
    return edits


def _without(source: Source, suite: Sequence[ast.stmt], node: ast.stmt) -> Edit:
    """A statement alone in its lines goes; the only one of a suite becomes `pass`."""
    return source.cut(node, node, "pass" if len(suite) == 1 and suite is not source.tree.body else "")


def _without_aliases(source: Source, suite: Sequence[ast.stmt], node: ast.ImportFrom, gone: Sequence[ast.alias]) -> list[tuple[Edit, ast.AST]]:
    if len(gone) == len(node.names):
        return [(_without(source, suite, node), node)]
    return [(_without_element(source, node.names, node.names.index(alias), False), alias) for alias in gone]


def _without_element(source: Source, elements: Sequence[ast.expr] | Sequence[ast.alias], at: int, is_tuple: bool) -> Edit:
    """An element of a list goes with one comma. In a line of its own it goes with the line."""

    def start(one: ast.expr | ast.alias) -> Place:
        return one.lineno, one.col_offset

    def end(one: ast.expr | ast.alias) -> Place:
        return one.end_lineno or one.lineno, one.end_col_offset or 0

    first, last = start(elements[at]), end(elements[at])
    head = source.lines[first[0] - 1].encode()[: first[1]].decode()
    tail = source.lines[last[0] - 1].encode()[last[1] :].decode()
    lines = range(first[0] - 1, last[0])
    old = b"".join(source.raw[number] for number in lines)
    rest = tail.lstrip().removeprefix(",").lstrip()
    if not head.strip() and (not rest or rest.startswith("#")):
        return Edit(first[0], old, b"")
    before = end(elements[at - 1]) if at else (0, 0)
    after = start(elements[at + 1]) if at + 1 < len(elements) else (0, 0)
    if before[0] == first[0] and not (is_tuple and len(elements) == 2):
        head = source.lines[first[0] - 1].encode()[: before[1]].decode()
    elif after[0] == last[0]:
        tail = source.lines[last[0] - 1].encode()[after[1] :].decode()
    elif not before[0]:
        tail = tail.lstrip().removeprefix(",")
    return Edit(first[0], old, (head + tail).encode(source.encoding))


def _exact(source: Source, file: str, gone: Sequence[tuple[Edit, ast.AST]]) -> bool:
    """Whether the edited file has the tree that it had, but for the nodes that had to go: a comma too many or too few is seen."""
    places = {(type(node), getattr(node, "lineno", 0), getattr(node, "col_offset", 0)) for _, node in gone}
    data, expected = b"".join(source.raw), tree_of("".join(source.lines))
    for node in ast.walk(expected):
        for field, value in ast.iter_fields(node):
            if isinstance(value, list):
                kept = [one for one in value if (type(one), getattr(one, "lineno", 0), getattr(one, "col_offset", 0)) not in places]
                if len(kept) < len(value):
                    setattr(node, field, kept or ([] if field == "elts" or isinstance(node, ast.Module) else [ast.Pass()]))
    try:
        after = parse_source(apply(patch(file, data, [edit for edit, _ in gone]), data)).tree
    except ValueError:
        return False
    # Statements before the first edit and behind the last one have their text: only the others need be compared.
    first, last = min(edit.first for edit, _ in gone), max(edit.last for edit, _ in gone)
    head = sum((node.end_lineno or 0) < first for node in expected.body)
    tail = sum(node.lineno > last for node in expected.body)
    parts = [tree.body[head : len(tree.body) - tail] for tree in (expected, after)]
    return [ast.dump(node) for node in parts[0]] == [ast.dump(node) for node in parts[1]]
