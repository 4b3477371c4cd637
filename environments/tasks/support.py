"""What tests need besides themselves: conftest files, modules that they import from each other, and the packages that
their files lie in. It is taken from the original and laid as part of the exam; what an agent left of it is not looked
at.

Nothing is run to find it. A module is needed where a file of tests, or a conftest file above it, names it in an import
or in a text, as in `pytest_plugins`. Files of data are not laid: the package's code could change them while tests run.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePosixPath

from environments.syntax import parse

__all__ = ["decode_source", "find_support", "package_of_file"]


def decode_source(data: bytes) -> str:
    """The text of a file of Python, by its byte order mark or coding cookie. Raises ValueError where Python could not
    decode it either."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return data.decode(encoding)
    except (SyntaxError, LookupError, UnicodeDecodeError) as error:
        raise ValueError(f"this is no text of Python: {error}") from error


def find_support(tests: Mapping[str, bytes], source: Collection[str], test_files: Collection[str]) -> dict[str, object]:
    """What the files `test_files` of `tests` need, as inside/play.py takes it: "packages", file → the package that it
    lies in, by which its relative imports are resolved; "modules", name → file, source, and whether it is a package;
    and "conftests", files and the names of their modules, outer folders first. `source`: the package's other files."""
    modules = {
        name: file for file in _select_python(tests) for name in _list_import_names(file, {*tests, *source})[::-1]
    }
    modules |= {_make_module_name(file): file for file in _select_python(tests)}
    folders = {str(folder) for file in test_files for folder in PurePosixPath(file).parents}
    conftests = [f"{folder}/conftest.py".removeprefix("./") for folder in sorted(folders)]
    conftests = [file for file in conftests if file in tests]
    needed_files = _find_imported_files(tests, modules, [*test_files, *conftests]) | {*conftests}
    support_modules: dict[str, tuple[str, str, bool]] = {}
    for name, file in modules.items():
        if file in needed_files:
            support_modules[name] = (file, decode_source(tests[file]), file.endswith("__init__.py"))
    for name in [*support_modules]:
        for parent in _list_parents(name):
            if parent in modules:
                file = modules[parent]
                support_modules.setdefault(parent, (file, decode_source(tests[file]), file.endswith("__init__.py")))
            elif not any(f"{_make_module_name(file)}.".startswith(f"{parent}.") for file in _select_python(source)):
                support_modules.setdefault(parent, (parent.replace(".", "/"), "", True))
    return {
        "packages": {file: package for file in sorted(test_files) if (package := package_of_file(file))},
        "modules": {name: [*support_modules[name]] for name in sorted(support_modules)},
        "conftests": [
            [file, _make_module_name(file)] for file in sorted(conftests, key=lambda file: (file.count("/"), file))
        ],
    }


def package_of_file(file: str) -> str:
    """The package that a file lies in, as it is imported from the tree or from its folder src; empty for none."""
    return _make_module_name(f"{_get_folder(file)}/__init__.py") if "/" in file.removeprefix("src/") else ""


def _select_python(files: Collection[str]) -> list[str]:
    return sorted(file for file in files if file.endswith(".py"))


def _get_folder(file: str) -> str:
    return str(PurePosixPath(file).parent)


def _make_module_name(file: str) -> str:
    """The name under which a file is imported from the tree, or from its folder src."""
    return file.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _list_import_names(file: str, files: Collection[str]) -> list[str]:
    """The names under which a file of tests is imported: from the tree, and from the first folder above it that is no
    package, which pytest puts on the path."""
    folder = PurePosixPath(file).parent
    while str(folder) != "." and f"{folder}/__init__.py" in files:
        folder = folder.parent
    return [*dict.fromkeys((_make_module_name(file), _make_module_name(str(PurePosixPath(file).relative_to(folder)))))]


def _list_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _find_imported_files(tests: Mapping[str, bytes], modules: Mapping[str, str], files: Collection[str]) -> set[str]:
    """The files that some files import, and those that these import."""
    needed_files, todo, visited_files = set[str](), [*files], set[str]()
    while todo:
        file = todo.pop()
        if file in visited_files:
            continue
        visited_files.add(file)
        for name in _find_imports(tests[file], package_of_file(file)):
            for part in (*_list_parents(name), name):
                if part in modules:
                    needed_files.add(modules[part])
                    todo.append(modules[part])
    return needed_files


def _find_imports(data: bytes, package: str) -> Iterator[str]:
    """Names that may be modules which a file imports, and texts that may name one. None for a file that is no
    Python."""
    try:
        tree = parse(data)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent_parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parent_parts, *([node.module] if node.module else [])])
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200:
            yield node.value
