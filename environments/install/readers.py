"""What the files of a folder say about how it is set up: read, never run, and never trusted to be what they should be.

Every reader takes bytes and gives what it can find; of bytes that make no sense it finds nothing. YAML is read line by
line, as far as the steps of CI files go: `run:` of GitHub's workflows, `script:` of GitLab's jobs.
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
PARSE_ERRORS = (
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    RecursionError,
    MemoryError,
    SyntaxError,
    configparser.Error,
)
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


def decode_text(data: bytes) -> str:
    return data.decode("utf-8", "replace").replace("\r\n", "\n")


def parse_names(lines: object) -> tuple[str, ...]:
    """Names of the requirements in a list of texts, without those for other machines."""
    rows = lines if isinstance(lines, Iterable) and not isinstance(lines, str | bytes) else ()
    matches = [NAME.match(row) for row in rows if isinstance(row, str) and ";" not in row]
    return tuple(dict.fromkeys(match[1] for match in matches if match))


def _select_names(values: object) -> tuple[str, ...]:
    """Keys, or items, that are names."""
    return (
        tuple(value for value in values if isinstance(value, str) and NAME.fullmatch(value))
        if isinstance(values, Iterable)
        else ()
    )


def pyproject(data: bytes) -> Project | None:
    """Of pyproject.toml; None where it tells of no package."""
    try:
        document = parse_toml(decode_text(data))
        has_build_system = "build-system" in document
        project, poetry = document.get("project"), document.get("tool", {}).get("poetry")
        groups = document.get("dependency-groups", {})
        test_requirements = next(
            (groups[name] for name in ("test", "tests", "dev") if isinstance(groups.get(name), list)), ()
        )
        if isinstance(project, Mapping):
            optional_names = (
                _select_names(project.get("optional-dependencies", ())),
                _select_names(project.get("scripts", ())),
            )
            return Project(
                check_name(project.get("name")),
                parse_names(project.get("dependencies")),
                *optional_names,
                parse_names(test_requirements),
                has_build_system,
            )
        if isinstance(poetry, Mapping):
            needs = [name for name in _select_names(poetry.get("dependencies", ())) if name != "python"]
            return Project(
                check_name(poetry.get("name")),
                parse_names(needs),
                _select_names(poetry.get("extras", ())),
                _select_names(poetry.get("scripts", ())),
                parse_names(test_requirements),
            )
        return Project(tested_with=parse_names(test_requirements)) if "build-system" in document else None
    except PARSE_ERRORS:
        return None


def check_name(value: object) -> str:
    return value if isinstance(value, str) and NAME.fullmatch(value) else ""


def _parse_config(data: bytes) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False)
    parser.read_string(decode_text(data))
    return parser


def setup_cfg(data: bytes) -> Project | None:
    """Of setup.cfg; None where it tells of no package."""
    try:
        parser = _parse_config(data)
        if not parser.has_section("metadata") and not parser.has_section("options"):
            return None
        needs = parser.get("options", "install_requires", fallback="").split("\n")
        extras = (
            _select_names(parser.options("options.extras_require"))
            if parser.has_section("options.extras_require")
            else ()
        )
        return Project(check_name(parser.get("metadata", "name", fallback="")), parse_names(needs), extras)
    except PARSE_ERRORS:
        return None


def setup_py(data: bytes) -> Project | None:
    """Of setup.py, as far as its arguments are written out, there or in a variable of the module. It is not run."""
    try:
        tree = parse(data)
        assignments: dict[str, ast.expr] = {}
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                assignments[node.targets[0].id] = node.value
        calls = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "setup"
        ]
        if not calls:
            return None
        arguments = {
            keyword.arg: assignments.get(keyword.value.id) if isinstance(keyword.value, ast.Name) else keyword.value
            for keyword in calls[-1].keywords
            if keyword.arg
        }
        name, needs, extras = (
            _evaluate_literal(arguments.get(key)) for key in ("name", "install_requires", "extras_require")
        )
        return Project(check_name(name), parse_names(needs), _select_names(extras or ()))
    except PARSE_ERRORS:
        return None


def _evaluate_literal(node: ast.expr | None) -> object:
    try:
        return None if node is None else ast.literal_eval(node)
    except PARSE_ERRORS:
        return None


def requirements(data: bytes) -> tuple[str, ...]:
    """Names in a file of requirements. Options, addresses and what is for other machines are passed over."""
    joined_text = re.sub(r"\\\n", " ", decode_text(data))
    lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in joined_text.split("\n")]
    return parse_names(
        [
            re.sub(r"\s--\S.*", "", line)
            for line in lines
            if line and not line.startswith("-") and "://" not in line.partition("@")[0]
        ]
    )


def tox(data: bytes) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Requirements and commands of [testenv] in tox.ini."""
    try:
        parser = _parse_config(data)
        deps, commands = (parser.get("testenv", name, fallback="").split("\n") for name in ("deps", "commands"))
    except PARSE_ERRORS:
        return (), ()
    requirement_lines = [line.strip() for line in deps if line.strip() and not {*line} & {*":{}-"}]
    return tuple(line for line in requirement_lines if NAME.match(line)), tuple(
        re.sub(r"\{posargs[^}]*\}", "", line).strip() for line in commands if line.strip()
    )


def make_commands(data: bytes) -> tuple[str, ...]:
    """Lines of the recipes that install and test, with the usual variables written out."""
    commands, is_selected = list[str](), False
    for line in re.sub(r"\\\n", " ", decode_text(data)).split("\n"):
        if line.startswith("\t"):
            if is_selected:
                commands.append(
                    re.sub(
                        r"\$[({](PYTHON|PIP|PYTEST)[)}]",
                        lambda match: match[1].lower(),
                        line.strip().lstrip("@-+").strip(),
                    )
                )
        elif line.strip() and not line.startswith((" ", "#")):
            head = re.match(r"([\w.-]+(?: +[\w.-]+)*) *::?(?!=)", line)
            is_selected = bool(head) and bool({*head[1].split()} & {*TARGETS})
    return tuple(commands)


def ci_commands(data: bytes) -> tuple[str, ...]:
    """Lines of the steps of a CI file."""
    return tuple(_read_steps(decode_text(data).split("\n")))


def _read_steps(lines: list[str]) -> Iterator[str]:
    """What stands behind `run:`, and beneath `run: |`, `script:` and `before_script:`: all lines that are further in
    than the key."""
    inside = -1
    for line in lines:
        depth = len(line) - len(line.lstrip(" "))
        if inside >= 0 and line.strip() and (depth > inside or (depth == inside and line.lstrip().startswith("- "))):
            yield _unquote(line.strip().removeprefix("- "))
            continue
        inside = inside if not line.strip() else -1
        key = re.match(r"( *(?:- +)?)(run|script|before_script):(?:\s++(.*))?$", line)
        if key is not None:
            value = (key[3] or "").strip()
            if value and not re.fullmatch(r"[|>][+-]?\d?(\s+#.*)?", value):
                yield _unquote(value)
            else:
                inside = len(key[1])


def _unquote(value: str) -> str:
    """A scalar without its quotes."""
    value = value.strip()
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
