"""What the files of a folder say about how it is set up: read, never run, and never trusted to be what they should be.

Every reader takes bytes and gives what it can find; of bytes that make no sense it finds nothing. YAML is read line by line, as far as the steps of
CI files go: `run:` of GitHub's workflows, `script:` of GitLab's jobs.
"""

from __future__ import annotations

import ast
import configparser
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from environments.syntax import parse
from kit.disk import parse_toml

__all__ = ["Project", "ci_commands", "make_commands", "pyproject", "requirements", "setup_cfg", "setup_py", "tox"]

NAME = re.compile(r"\s*([A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?)\s*(?=[\[(<>=!~;@\s]|\Z)")
TARGETS = ("install", "develop", "setup", "deps", "dev", "test", "tests", "check")
"""Targets of a Makefile that are looked into."""
BROKEN = (ValueError, TypeError, AttributeError, LookupError, RecursionError, MemoryError, SyntaxError, configparser.Error)
"""What parsers raise for what is none of theirs."""


@dataclass(frozen=True)
class Project:
    """What is known of a package."""

    name: str = ""
    dependencies: tuple[str, ...] = ()
    """Names."""
    extras: tuple[str, ...] = ()
    scripts: tuple[str, ...] = ()
    tested_with: tuple[str, ...] = field(default=())
    """Requirements of the group of dependencies for tests (PEP 735)."""
    built_with: bool = False
    """Whether pyproject.toml says with what it is built."""


def text(data: bytes) -> str:
    return data.decode("utf-8", "replace").replace("\r\n", "\n")


def names(lines: object) -> tuple[str, ...]:
    """Names of the requirements in a list of texts, without those for other machines."""
    rows = lines if isinstance(lines, Iterable) and not isinstance(lines, str | bytes) else ()
    found = [NAME.match(row) for row in rows if isinstance(row, str) and ";" not in row]
    return tuple(dict.fromkeys(one[1] for one in found if one))


def _words(found: object) -> tuple[str, ...]:
    """Keys, or items, that are names."""
    return tuple(one for one in found if isinstance(one, str) and NAME.fullmatch(one)) if isinstance(found, Iterable) else ()


def pyproject(data: bytes) -> Project | None:
    """Of pyproject.toml; None where it tells of no package."""
    try:
        found = parse_toml(text(data))
        built = "build-system" in found
        project, poetry = found.get("project"), found.get("tool", {}).get("poetry")
        groups = found.get("dependency-groups", {})
        tested = next((groups[name] for name in ("test", "tests", "dev") if isinstance(groups.get(name), list)), ())
        if isinstance(project, Mapping):
            more = _words(project.get("optional-dependencies", ())), _words(project.get("scripts", ()))
            return Project(one_name(project.get("name")), names(project.get("dependencies")), *more, names(tested), built)
        if isinstance(poetry, Mapping):
            needs = [name for name in _words(poetry.get("dependencies", ())) if name != "python"]
            return Project(
                one_name(poetry.get("name")), names(needs), _words(poetry.get("extras", ())), _words(poetry.get("scripts", ())), names(tested)
            )
        return Project(tested_with=names(tested)) if "build-system" in found else None
    except BROKEN:
        return None


def one_name(found: object) -> str:
    return found if isinstance(found, str) and NAME.fullmatch(found) else ""


def _config(data: bytes) -> configparser.RawConfigParser:
    found = configparser.RawConfigParser(strict=False)
    found.read_string(text(data))
    return found


def setup_cfg(data: bytes) -> Project | None:
    """Of setup.cfg; None where it tells of no package."""
    try:
        found = _config(data)
        if not found.has_section("metadata") and not found.has_section("options"):
            return None
        needs = found.get("options", "install_requires", fallback="").split("\n")
        extras = _words(found.options("options.extras_require")) if found.has_section("options.extras_require") else ()
        return Project(one_name(found.get("metadata", "name", fallback="")), names(needs), extras)
    except BROKEN:
        return None


def setup_py(data: bytes) -> Project | None:
    """Of setup.py, as far as its arguments are written out, there or in a variable of the module. It is not run."""
    try:
        tree = parse(data)
        known: dict[str, ast.expr] = {}
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                known[node.targets[0].id] = node.value
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "setup"]
        if not calls:
            return None
        given = {one.arg: known.get(one.value.id) if isinstance(one.value, ast.Name) else one.value for one in calls[-1].keywords if one.arg}
        name, needs, extras = (_literal(given.get(one)) for one in ("name", "install_requires", "extras_require"))
        return Project(one_name(name), names(needs), _words(extras or ()))
    except BROKEN:
        return None


def _literal(node: ast.expr | None) -> object:
    try:
        return None if node is None else ast.literal_eval(node)
    except BROKEN:
        return None


def requirements(data: bytes) -> tuple[str, ...]:
    """Names in a file of requirements. Options, addresses and what is for other machines are passed over."""
    whole = re.sub(r"\\\n", " ", text(data))
    lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in whole.split("\n")]
    return names([re.sub(r"\s--\S.*", "", line) for line in lines if line and not line.startswith("-") and "://" not in line.partition("@")[0]])


def tox(data: bytes) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Requirements and commands of [testenv] in tox.ini."""
    try:
        found = _config(data)
        deps, commands = (found.get("testenv", name, fallback="").split("\n") for name in ("deps", "commands"))
    except BROKEN:
        return (), ()
    named = [line.strip() for line in deps if line.strip() and not {*line} & {*":{}-"}]
    return tuple(line for line in named if NAME.match(line)), tuple(
        re.sub(r"\{posargs[^}]*\}", "", line).strip() for line in commands if line.strip()
    )


def make_commands(data: bytes) -> tuple[str, ...]:
    """Lines of the recipes that install and test, with the usual variables written out."""
    found, wanted = list[str](), False
    for line in re.sub(r"\\\n", " ", text(data)).split("\n"):
        if line.startswith("\t"):
            if wanted:
                found.append(re.sub(r"\$[({](PYTHON|PIP|PYTEST)[)}]", lambda one: one[1].lower(), line.strip().lstrip("@-+").strip()))
        elif line.strip() and not line.startswith((" ", "#")):
            head = re.match(r"([\w.-]+(?: +[\w.-]+)*) *::?(?!=)", line)
            wanted = bool(head) and bool({*head[1].split()} & {*TARGETS})
    return tuple(found)


def ci_commands(data: bytes) -> tuple[str, ...]:
    """Lines of the steps of a CI file."""
    return tuple(_steps(text(data).split("\n")))


def _steps(lines: list[str]) -> Iterator[str]:
    """What stands behind `run:`, and beneath `run: |`, `script:` and `before_script:`: all lines that are further in than the key."""
    inside = -1
    for line in lines:
        depth = len(line) - len(line.lstrip(" "))
        if inside >= 0 and line.strip() and (depth > inside or (depth == inside and line.lstrip().startswith("- "))):
            yield _plain(line.strip().removeprefix("- "))
            continue
        inside = inside if not line.strip() else -1
        key = re.match(r"( *(?:- +)?)(run|script|before_script):(?:\s++(.*))?$", line)
        if key is not None:
            value = (key[3] or "").strip()
            if value and not re.fullmatch(r"[|>][+-]?\d?(\s+#.*)?", value):
                yield _plain(value)
            else:
                inside = len(key[1])


def _plain(value: str) -> str:
    """A scalar without its quotes."""
    value = value.strip()
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
