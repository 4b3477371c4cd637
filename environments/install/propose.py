"""Stage 1 without a model: about ten commands with checks, from what the files of a folder say."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence

from environments.install.readers import (
    Project,
    ci_commands,
    make_commands,
    pyproject,
    requirements,
    setup_cfg,
    setup_py,
    tox,
)
from environments.install.steps import MAX_STEPS, Step, deduplicate_steps

__all__ = ["BUILT_HERE", "VENV", "configures", "modules", "named", "proposed"]

VENV = Step(
    "python3 -m venv --without-pip --system-site-packages .venv",
    "test -x .venv/bin/python && pip --version",
    "every folder",
)
"""pip lies in the root file system, and a program `pip` in the tree (wheels.py)."""
BUILT_HERE = "pip install --no-build-isolation --use-pep517"
"""For a folder that does not say with what it is built: pip would ask an index for setuptools and wheel, though the
setuptools here has both."""
FOR_TESTS = ("test", "tests", "testing", "dev", "develop")
"""Names of extras that tests may want."""
WORD = r"(?:pip3?|uv pip|python3? -m pip)"
INSTALL = re.compile(rf"(?:sudo )?{WORD} install (.+)")
PYTEST = re.compile(r"(?:python3? -m )?(?:pytest|py\.test)( .*)?")
ALONE = re.compile(r"((-U|--upgrade|--user|pip|setuptools|wheel|build|uv)( |\Z))+")
"""Arguments that renew what is there anyway."""
PLAIN = re.compile(r"[\w ./=<>!~,\[\]'\"+:@-]{1,300}")
"""What a command from a file may hold: no variables, pipes or redirections, whose meaning lies elsewhere."""


def configures(path: str) -> bool:
    """Whether a file tells how a folder is set up."""
    top = ("pyproject.toml", "setup.cfg", "setup.py", "tox.ini", "Makefile", ".gitlab-ci.yml")
    return path in top or bool(
        re.fullmatch(
            r"(requirements/)?[\w.-]*requirements[\w.-]*\.txt|requirements/[\w.-]+\.txt"
            r"|\.github/workflows/[\w.-]+\.ya?ml",
            path,
        )
    )


def proposed(files: Mapping[str, bytes]) -> list[Step]:
    """At most ten steps, each once. `files`: all of the folder's by their paths; only those that configure something
    are read. Raises nothing."""
    project = _read_project(files)
    first = [VENV, *_propose_requirements(files), *_propose_package(files, project)]
    last = [*_propose_imports(files, project), *_propose_tests(files)]
    file_commands = [*_propose_file_commands(files)]
    return deduplicate_steps(
        [
            *deduplicate_steps(first, MAX_STEPS - len(last)),
            *file_commands[: max(0, MAX_STEPS - len(last) - len(first))],
            *last,
        ]
    )


def named(distributions: Sequence[str]) -> str:
    """A check that says whether distributions are installed."""
    return (
        """python -c "from importlib.metadata import version; """
        f"""[version(name) for name in {[*distributions][:20]!r}]" """
    ).strip()


def _read_project(files: Mapping[str, bytes]) -> Project | None:
    """What the first file that tells of a package says; what the others know is added."""
    readers = {"pyproject.toml": pyproject, "setup.cfg": setup_cfg, "setup.py": setup_py}
    projects = [
        project for path, reader in readers.items() if path in files and (project := reader(files[path])) is not None
    ]
    if not projects:
        return Project() if "setup.py" in files else None
    return Project(
        *(
            next((value for project in projects if (value := getattr(project, name))), getattr(projects[0], name))
            for name in vars(projects[0])
        )
    )


def _propose_requirements(files: Mapping[str, bytes]) -> Iterator[Step]:
    """Files of requirements: the one that all need, and at most two that tests may."""
    paths = sorted(
        (path for path in files if path.endswith(".txt") and configures(path)),
        key=lambda path: (path != "requirements.txt", path),
    )
    chosen_paths = [path for path in paths if path == "requirements.txt" or re.search("test|dev", path)][:3]
    for path in chosen_paths:
        distributions = requirements(files[path])
        yield Step(
            f"pip install -r {shlex.quote(path)}",
            named(distributions) if distributions else "pip check",
            path,
            path == "requirements.txt",
        )


def _propose_package(files: Mapping[str, bytes], project: Project | None) -> Iterator[Step]:
    if project is None:
        return
    extras = [name for name in FOR_TESTS if name in project.extras][:1]
    source = next(path for path in ("pyproject.toml", "setup.cfg", "setup.py") if path in files)
    target = f"-e '.[{extras[0]}]'" if extras else "-e ."
    command = f"{'pip install' if project.built_with else BUILT_HERE} {target}"
    yield Step(command, named([project.name]) if project.name else "pip check", source)
    if project.tested_with:
        yield Step(
            f"pip install {' '.join(project.tested_with)}",
            named(project.tested_with),
            "pyproject.toml: dependency-groups",
            False,
        )


def modules(files: Iterable[str]) -> set[str]:
    """The folder's own packages and modules."""
    return {match[1] for path in files if (match := re.fullmatch(r"(?:src/)?([A-Za-z_]\w*)(?:/.*)?\.py", path))}


def _propose_imports(files: Mapping[str, bytes], project: Project | None) -> Iterator[Step]:
    """The package that has the project's name, or each one there is, up to two; and its first program."""
    tops = {name for name in modules(files) if any(f"{src}{name}/__init__.py" in files for src in ("", "src/"))}
    tops = (tops - {"tests", "test", "docs", "examples"}) | ({project.name} & modules(files) if project else set())
    import_name = re.sub(r"[-.]+", "_", project.name).lower() if project else ""
    chosen_modules = [name for name in sorted(tops) if name.lower() == import_name] or sorted(tops)[:2]
    if chosen_modules:
        yield Step("", f"python -c 'import {', '.join(chosen_modules)}'", "the folder's packages")
    if project and project.scripts:
        yield Step("", f"{shlex.quote(project.scripts[0])} --help", "pyproject.toml: scripts", False)


def _propose_tests(files: Mapping[str, bytes]) -> Iterator[Step]:
    """Tests can be collected, and pass."""
    if any(re.search(r"(^|/)(test_\w*|\w*_test)\.py$", path) for path in files):
        yield Step("", "python -m pytest -q --collect-only", "the folder's tests")
        yield Step("", "python -m pytest -q", "the folder's tests", False)


def _propose_file_commands(files: Mapping[str, bytes]) -> Iterator[Step]:
    """What tox, a Makefile and CI install and test, where it is more than what is proposed anyway."""
    for path in sorted(candidate for candidate in files if configures(candidate)):
        lines: Sequence[str] = ()
        if path == "tox.ini":
            deps, lines = tox(files[path])
            if deps:
                lines = [f"pip install {' '.join(map(shlex.quote, deps))}", *lines]
        elif path == "Makefile":
            lines = make_commands(files[path])
        elif path.endswith((".yml", ".yaml")):
            lines = ci_commands(files[path])
        for line in (part.strip() for entry in lines for part in re.split(r"&&|;", entry)):
            has_files = all(
                requirement in files for requirement in re.findall(r"(?:-r|--requirement)[ =]*([\w./-]+)", line)
            )
            if PLAIN.fullmatch(line) and has_files and (step := _parse_command(line, path)) is not None:
                yield step


def _parse_command(line: str, path: str) -> Step | None:
    """A command that installs or tests, as this environment has it."""
    if install := INSTALL.fullmatch(line):
        words = re.sub(r"(^|\s)--user\b", "", install[1]).strip()
        return (
            None
            if not words or ALONE.fullmatch(words) or words in ("-e .", ".")
            else Step(f"pip install {words}", "pip check", path, False)
        )
    if test := PYTEST.fullmatch(line):
        words = (test[1] or "").strip()
        return Step("", f"python -m pytest {words}", path, False) if words not in ("", "-q") else None
    return None
