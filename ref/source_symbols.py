"""A function or class of a module taken out whole: its definition, what imports it, and its places in `__all__`.

What runs at import decides. A module that uses the name while it is imported (in a decorator, a default, a base class,
an alias) would break with everything that imports it, so such a symbol is refused. Bodies of functions are left alone:
a local variable of the same name is another variable, and one who means the symbol meets a NameError when it is called.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence

from ref.source_text import Edit, Source, apply, lines_of, patch, tree_of

__all__ = ["Module", "removal"]

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Place = tuple[int, int]


class Module:
    """A file, and what is asked of it for every symbol. It is read once, so that the symbols of a package cost no more
    than its lines."""

    def __init__(self, file: str, source: Source) -> None:
        self.file, self.source = file, source
        self.definitions: dict[str, list[tuple[Sequence[ast.stmt], Definition]]] = {}
        """The functions and classes of each name that stand in the module's own scope, with the suites that they stand
        in."""
        self.imports: dict[str, list[tuple[Sequence[ast.stmt], ast.ImportFrom]]] = {}
        """The statements there that take names from each module, with their suites."""
        self.all_lists: list[ast.List | ast.Tuple] = []
        """What is assigned or added to `__all__`."""
        self.names: dict[str, list[ast.Name]] = {}
        """The places at which each name is used at import."""
        self.bound_imports: dict[str, list[ast.alias]] = {}
        """The imports that bind each name at import."""
        self.attributes: set[str] = set()
        """The attributes that are asked for at import."""
        self.globals = {name for node in ast.walk(source.tree) if isinstance(node, ast.Global) for name in node.names}
        for suite, node in _list_statements(source.tree.body):
            if isinstance(node, Definition):
                self.definitions.setdefault(node.name, []).append((suite, node))
            elif isinstance(node, ast.ImportFrom):
                self.imports.setdefault(_imported_module(file, node), []).append((suite, node))
            elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and isinstance(
                node.value, ast.List | ast.Tuple
            ):
                target, *extra_targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if isinstance(target, ast.Name) and target.id == "__all__" and not extra_targets:
                    self.all_lists.append(node.value)
        for node in at_import(source.tree):
            if isinstance(node, ast.Name):
                self.names.setdefault(node.id, []).append(node)
            elif isinstance(node, ast.alias):
                self.bound_imports.setdefault(node.asname or node.name.partition(".")[0], []).append(node)
            elif isinstance(node, ast.Attribute):
                self.attributes.add(node.attr)
        ends = [chunk[-1].end_lineno or 0 for chunk in source.chunks(source.tree.body)]
        self.parts = [(before + 1, end) for before, end in zip([0, *ends], ends, strict=False)]
        """First and last lines of its statements, each with the lines above that belong to none."""

    @property
    def defined(self) -> list[str]:
        """Names of the functions and classes that it defines at its top, also beneath `if` and `try`, and does not use
        itself at import."""
        return sorted(self.definitions.keys() - self.names.keys())


def module_of(file: str) -> str:
    """The dotted name by which a file is imported, from the folder of the packages or from one called src."""
    return file.removesuffix(".py").removesuffix("/__init__").removeprefix("src/").replace("/", ".")


def removal(modules: Mapping[str, Module], file: str, name: str) -> dict[str, list[Edit]] | None:
    """The edits of each file that take a symbol out; None where something uses it at import. `modules`: by their
    files."""
    edits: dict[str, list[tuple[Edit, ast.AST]]] = {}
    todo, done = [(file, name)], set()
    while todo:
        current, symbol = todo.pop()
        if (current, symbol) in done:
            continue
        done.add((current, symbol))
        found_edits, next_symbols = _home_edits(modules[current], symbol, root=(current, symbol) == (file, name)), []
        if found_edits is None:
            return None
        edits.setdefault(current, []).extend(found_edits)
        for importer, module in modules.items():
            for suite, node in module.imports.get(module_of(current), ()):
                aliases = [alias for alias in node.names if alias.name == symbol]
                if aliases:
                    edits.setdefault(importer, []).extend(_remove_aliases(module.source, suite, node, aliases))
                next_symbols += [(importer, alias.asname or alias.name) for alias in aliases]
                next_symbols += [(importer, symbol) for alias in node.names if alias.name == "*"]
            if importer != current and symbol in module.attributes:
                return None
        todo += next_symbols
    edits = {path: file_edits for path, file_edits in edits.items() if file_edits}
    if not all(_is_exact(modules[path], file_edits) for path, file_edits in edits.items()):
        return None
    return {path: [edit for edit, _ in file_edits] for path, file_edits in edits.items()}


def _list_statements(suite: Sequence[ast.stmt]) -> Iterator[tuple[Sequence[ast.stmt], ast.stmt]]:
    """Statements of a module's own scope, with the suites that they stand in."""
    for node in suite:
        yield suite, node
        if not isinstance(node, Definition):
            for part in ("body", "orelse", "finalbody"):
                yield from _list_statements(getattr(node, part, []))
            for part in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
                yield from _list_statements(part.body)


def at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes that are evaluated when a module is imported. Annotations are among them unless they are strings by a
    future import."""
    is_lazy = any(
        isinstance(statement, ast.ImportFrom)
        and statement.module == "__future__"
        and any(alias.name == "annotations" for alias in statement.names)
        for statement in ast.walk(tree)
    )

    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        for field, value in ast.iter_fields(node):
            is_body = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and field == "body"
            if is_body or is_lazy and field in ("annotation", "returns"):
                continue
            inner = [child for child in (value if isinstance(value, list) else [value]) if isinstance(child, ast.AST)]
            yield from inner
            todo += inner


def _imported_module(file: str, node: ast.ImportFrom) -> str:
    """The module from which an import statement takes its names."""
    if not node.level:
        return node.module or ""
    package = module_of(file).split(".")
    package = package if file.endswith("/__init__.py") else package[:-1]
    return ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])


def _home_edits(module: Module, name: str, root: bool) -> list[tuple[Edit, ast.AST]] | None:
    """Edits of the module in which the name lives: of its definitions, if it is at home here, and of `__all__`. None if
    it is needed."""
    edits: list[tuple[Edit, ast.AST]] = []
    inner_nodes: set[ast.AST] = set()
    for suite, node in module.definitions.get(name, ()) if root else ():
        edits.append((_remove_statement(module.source, suite, node), node))
        inner_nodes |= {*ast.walk(node)}
    for value in module.all_lists:
        indices = [
            index
            for index, element in enumerate(value.elts)
            if isinstance(element, ast.Constant) and element.value == name
        ]
        edits += [
            (_remove_element(module.source, value.elts, index, isinstance(value, ast.Tuple)), value.elts[index])
            for index in indices
        ]
    needed = [*module.names.get(name, ()), *(module.bound_imports.get(name, ()) if root else ())]
    return None if name in module.globals or not inner_nodes.issuperset(needed) else edits


def _remove_statement(source: Source, suite: Sequence[ast.stmt], node: ast.stmt) -> Edit:
    """A statement alone in its lines goes; the only one of a suite becomes `pass`."""
    return source.cut(node, node, "pass" if len(suite) == 1 and suite is not source.tree.body else "")


def _remove_aliases(
    source: Source, suite: Sequence[ast.stmt], node: ast.ImportFrom, aliases: Sequence[ast.alias]
) -> list[tuple[Edit, ast.AST]]:
    if len(aliases) == len(node.names):
        return [(_remove_statement(source, suite, node), node)]
    return [(_remove_element(source, node.names, node.names.index(alias), False), alias) for alias in aliases]


def _remove_element(
    source: Source, elements: Sequence[ast.expr] | Sequence[ast.alias], index: int, is_tuple: bool
) -> Edit:
    """An element of a list goes with one comma. In a line of its own it goes with the line."""

    def start(element: ast.expr | ast.alias) -> Place:
        return element.lineno, element.col_offset

    def end(element: ast.expr | ast.alias) -> Place:
        return element.end_lineno or element.lineno, element.end_col_offset or 0

    first, last = start(elements[index]), end(elements[index])
    head = source.lines[first[0] - 1].encode()[: first[1]].decode()
    tail = source.lines[last[0] - 1].encode()[last[1] :].decode()
    lines = range(first[0] - 1, last[0])
    old = b"".join(source.raw[number] for number in lines)
    remainder = tail.lstrip().removeprefix(",").lstrip()
    if not head.strip() and (not remainder or remainder.startswith("#")):
        return Edit(first[0], old, b"")
    before = end(elements[index - 1]) if index else (0, 0)
    after = start(elements[index + 1]) if index + 1 < len(elements) else (0, 0)
    if before[0] == first[0] and not (is_tuple and len(elements) == 2):
        head = source.lines[first[0] - 1].encode()[: before[1]].decode()
    elif after[0] == last[0]:
        tail = source.lines[last[0] - 1].encode()[after[1] :].decode()
    elif not before[0]:
        tail = tail.lstrip().removeprefix(",")
    return Edit(first[0], old, (head + tail).encode(source.encoding))


def _is_exact(module: Module, removed_edits: Sequence[tuple[Edit, ast.AST]]) -> bool:
    """Whether the edited file has the tree that it had, but for the nodes that had to go: a comma too many or too few
    is seen. Statements that no edit touches have their text, and so their trees: only the others are read again."""
    edits, data, lines = [edit for edit, _ in removed_edits], b"".join(module.source.raw), [*module.source.lines]
    places = {(type(node), getattr(node, "lineno", 0), getattr(node, "col_offset", 0)) for _, node in removed_edits}
    for edit in edits:
        lines[edit.first - 1 : edit.last] = [
            edit.new.decode(module.source.encoding).removeprefix("\ufeff"),
            *[""] * (edit.last - edit.first),
        ]
    try:
        _, after = lines_of(apply(patch(module.file, data, edits), data))
        if "".join(after) != "".join(lines):  # the line that names the encoding went, too
            return False
        for first, last in module.parts:
            if any(first <= edit.first <= last for edit in edits):
                expected = tree_of("\n" * (first - 1) + "".join(module.source.lines[first - 1 : last]))
                _prune(expected, places)
                if ast.dump(expected) != ast.dump(tree_of("".join(lines[first - 1 : last]))):
                    return False
    except (SyntaxError, ValueError):
        return False
    return True


def _prune(tree: ast.Module, places: Collection[tuple[type[ast.AST], int, int]]) -> None:
    """Takes nodes out of the lists that they stand in. A suite that nothing is left of says `pass`."""
    for node in ast.walk(tree):
        for field, value in ast.iter_fields(node):
            if isinstance(value, list):
                remaining = [
                    child
                    for child in value
                    if (type(child), getattr(child, "lineno", 0), getattr(child, "col_offset", 0)) not in places
                ]
                if len(remaining) < len(value):
                    setattr(
                        node,
                        field,
                        remaining or ([] if field == "elts" or isinstance(node, ast.Module) else [ast.Pass()]),
                    )
