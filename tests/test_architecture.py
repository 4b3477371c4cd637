"""The arrows between the rooms point one way, and the catalogue names what exists."""

import ast
import dataclasses
import importlib
import inspect
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from environments.harbor.export import grader
from etude import catalog

ROOT = Path(__file__).resolve().parent.parent
STDLIB = set(sys.stdlib_module_names)
ROOMS = {"kit", "ref", "kernels", "scaled", "recipe", "sims", "environments", "lessons", "etude", "app"}
FOLDED = ("recipe.", "sims.", "etude.")
# What the three strict rooms may import beside the standard library, and which rooms each may know.
LIBRARIES = {
    "ref": {"torch", "einops", "numpy", "jaxtyping", "safetensors", "tokenizers", "zstandard"},
    "kernels": {"torch", "triton", "jaxtyping", "numpy"},
    "environments": set(),
    "environments/sandbox/engine.py": {"docker", "requests"},
    "environments/harbor/verify.py": set(),
    "environments/grading/inside": {"pytest"},
    "environments/tasks/inside": {"pytest"},
}
MAY = {
    "ref": {"ref"},
    "kernels": {"kernels", "ref"},
    "scaled": {"scaled", "ref", "kernels", "kit"},
    "recipe": {"recipe", "ref", "scaled", "kernels", "environments", "kit"},
    "sims": {"sims", "recipe", "ref", "scaled", "kernels", "environments", "kit"},
    "environments": {"environments", "ref", "kit"},
    "environments/sandbox/engine.py": {"environments.sandbox", "kit"},
    "environments/harbor/verify.py": {"environments.grading", "environments.sandbox.interface"},
    "environments/sandbox/inside": {"environments.sandbox.inside"},
    "environments/grading/inside": {"environments.grading.inside"},
    "environments/tasks/inside": {"environments.tasks.inside"},
    "lessons": {"lessons", "sims", "recipe", "ref", "scaled", "kernels", "environments", "kit"},
    "kit": {"kit"},
    "etude/catalog.py": set(),
    "etude/report/record.py": {"kit.disk"},
    "etude/report/pictures.py": {"etude.report.record"},
    "etude/report/watched.py": {"etude.report.record", "etude.report.pictures", "recipe.small.monitored"},
    "etude/report/speed.py": {"etude.report.record", "etude.report.pictures", "kit.disk"},
    "etude/report/page.py": {
        "etude.report.record",
        "etude.report.pictures",
        "etude.report.speed",
        "etude.report.watched",
        "kit.disk",
    },
}


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """All of a program, in the order of `ast.walk`; read once, though many tests ask."""
    return tuple(ast.walk(ast.parse(source)))


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def last(called: ast.AST) -> str:
    """The last part of a dotted name; empty for what is none. Asked before `ast.unparse`, which is slow."""
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""


def imports(path: Path) -> set[str]:
    """Every module that the file imports, anywhere in it, also by importlib or the engine's `kernel` with a literal
    name."""
    return imported(text(path), path.relative_to(ROOT).parent.parts)


def imported(source: str, package: tuple[str, ...]) -> set[str]:
    found = set()
    for node in nodes(source):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            if last(node.func) in ("import_module", "__import__") and ast.unparse(node.func) in (
                "importlib.import_module",
                "__import__",
            ):
                found.add(node.args[0].value)
            elif last(node.func) == "kernel" and ast.unparse(node.func) in ("kernel", "engine.kernel"):
                found.add(f"kernels.{node.args[0].value}")
    return found


def room_of(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    folder = name.rpartition("/")[0]
    return next((found for found in (name, folder) if found in MAY), name.partition("/")[0])


def files() -> list[Path]:
    return sorted(p for room in ROOMS for p in [*(ROOT / room).rglob("*.py"), *ROOT.glob(f"{room}.py")])


def test_quantiles_are_numpy_s():
    """`torch.quantile` refuses more than 2^24 values, and a step of a full run samples more tokens."""
    for path in files():
        calls = [node.func for node in nodes(text(path)) if isinstance(node, ast.Call)]
        owners = {
            ast.unparse(f.value)
            for f in calls
            if isinstance(f, ast.Attribute) and f.attr in ("quantile", "nanquantile")
        }
        assert owners <= {"np"}, path


@pytest.mark.parametrize("path", files(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_arrows(path):
    room = room_of(path)
    for module in imports(path):
        top = module.partition(".")[0]
        if top in ROOMS:
            if not path.is_relative_to(ROOT / "etude" / "cli"):
                assert not module.startswith(("etude.cli", "app")), f"nothing imports {module}"
            if room in MAY:
                allowed = any(module == arrow or module.startswith(arrow + ".") for arrow in MAY[room])
                assert allowed, f"{room} may not import {module}"
        elif room in LIBRARIES and top not in STDLIB:
            assert top in LIBRARIES[room], f"{room} may not import {module}"


@cache
def find_arrows() -> dict[str, set[str]]:
    """Module → the modules of the project that it imports."""
    modules = {
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__"): path
        for path in files()
    }
    arrows = {}
    for name, path in modules.items():
        there = {found if found in modules else found.rpartition(".")[0] for found in imports(path)}
        arrows[name] = {one for one in there if one in modules and one != name}
    return arrows


def find_circle(arrows: dict[str, set[str]]) -> list[str]:
    """The names that lie in a circle, or before one."""
    arrows = dict(arrows)
    while leaves := [name for name, known in arrows.items() if not known & arrows.keys()]:
        for name in leaves:
            del arrows[name]
    return sorted(arrows)


def test_no_file_imports_one_that_imports_it():
    """Nor by way of others, nor for the type checker only: what a file says can be read before what stands on it."""
    assert not find_circle(find_arrows())


def test_no_folder_imports_one_that_imports_it():
    """The folders of the recipe, the experiments and the application layer: a reader takes them one after another. A
    file beside the folders is one of its own."""
    folders: dict[str, set[str]] = {}
    for name, known in find_arrows().items():
        if name.startswith(FOLDED):
            parts = (".".join(one.split(".")[:2]) for one in known if one.startswith(FOLDED))
            folders.setdefault(".".join(name.split(".")[:2]), set()).update(parts)
    assert len(folders) > 40 and not find_circle({name: known - {name} for name, known in folders.items()})
    assert find_circle({"a": {"b"}, "b": {"a"}, "c": set()}) == ["a", "b"]


def test_a_technique_is_read_by_itself():
    """A reference file may import the network, but no other technique: it says all that it does."""
    techniques = {t.ref.removesuffix(".py").replace("/", ".") for t in catalog.TECHNIQUES if t.ref}
    for name in techniques:
        found = imports(ROOT / (name.replace(".", "/") + ".py"))
        others = {m for m in found for other in techniques - {name} if m == other or m.startswith(other + ".")}
        assert not others, f"{name} imports {others}"


def test_a_class_of_ref_has_one_definition():
    """Whoever reads `Environment` need not ask which. A technique's settings are called `Demo` in every file, as the
    catalogue wants; a class of the fast network has the name of the plain one that it derives from."""
    where: dict[str, list[str]] = {}
    for path in sorted((ROOT / "ref").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if (
                isinstance(node, ast.ClassDef)
                and node.name != "Demo"
                and f"model.{node.name}" not in map(ast.unparse, node.bases)
            ):
                where.setdefault(node.name, []).append(path.relative_to(ROOT).as_posix())
    assert not {name: found for name, found in where.items() if len(found) > 1}


def test_fp8_is_rounded_in_one_place():
    """`ref/formats.py` rounds to FP8, and all others call it. Kernels are its twins, and round bits; the benchmark
    hands codes to cuBLAS, and block_scaled.py to tensor cores; registry.py knows Triton's name for their type."""
    allowed = {"ref/formats.py", "etude/bench/kernel_cases.py", "kernels/block_scaled.py", "kernels/registry.py"}
    casts = {"float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"}
    for path in files():
        name = path.relative_to(ROOT).as_posix()
        for node in nodes(text(path)):
            if name not in allowed:
                assert not (isinstance(node, ast.Attribute) and node.attr in casts), (
                    f"{name} casts to FP8; ref.formats.e4m3_encode does"
                )
            if name != "ref/formats.py" and not name.startswith("kernels/"):
                assert not (isinstance(node, ast.Constant) and node.value == 448), f"{name} spells E4M3_MAX"


def parses_lines(source: str) -> bool:
    """Whether a program takes JSON from something that it loops over, line by line. The name of a loop means its
    element within the loop alone."""
    for node in nodes(source):
        if isinstance(node, ast.For | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            targets = (
                [node.target] if isinstance(node, ast.For) else [generator.target for generator in node.generators]
            )
            elements = {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
            for call in ast.walk(node):
                if (
                    isinstance(call, ast.Call)
                    and call.args
                    and isinstance(call.args[0], ast.Name)
                    and call.args[0].id in elements
                ):
                    if ast.unparse(call.func) in PARSERS:
                        return True
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "map"
            and ast.unparse(node.args[0]) in PARSERS
        ):
            return True
    return False


PARSERS = ("json.loads", "parse_json")


def test_lines_of_json_are_read_in_one_place():
    """A kill may tear the last one, and `kit.disk.read_lines` knows. What is held out (`recipe/small/data.py`) is
    recorded with its hash: whole, or refused, and no line of it may be passed over. Rows of a user's corpus
    (`scaled/data/documents.py`) come from a stream, and each bad one is named."""
    found = {
        path.relative_to(ROOT).as_posix() for path in [*files(), ROOT / "tests/mutants.py"] if parses_lines(text(path))
    }
    assert found == {"kit/disk.py", "recipe/small/data.py"}


@pytest.mark.parametrize(
    "source", ["[json.loads(x) for x in f]", "for x in f:\n y = json.loads(x)", "list(map(json.loads, f))"]
)
def test_another_reader_of_lines_is_seen(source):
    assert parses_lines(source) and not parses_lines(source.replace("loads", "dumps"))
    assert not parses_lines("[json.loads(path.read_text()) for path in paths]")
    assert not parses_lines("def f(lines):\n for line in lines:\n  print(line)\ndef g(line):\n return json.loads(line)")


STANDARD_LIBRARY_ONLY = {
    "environments/grading/inside/fresh.py",
    "environments/grading/inside/judge.py",
    "environments/grading/inside/play.py",
    "environments/grading/inside/remote.py",
    "environments/sandbox/inside/lines.py",
    "environments/tasks/inside/run.py",
    "environments/harbor/verify.py",
}
"""Programs that are copied into a sandbox or container without the rest of etude, and read what their caller has
written."""
PARSING = {("json", "load"), ("json", "loads"), ("json", "JSONDecoder"), ("tomllib", "load"), ("tomllib", "loads")}


def bare_parsing(source: str) -> set[str]:
    """Uses of the standard library's parsers of JSON and TOML, under whatever name a file imports them."""
    modules = {
        alias.asname or alias.name: alias.name
        for node in nodes(source)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    uses = set()
    for node in nodes(source):
        if isinstance(node, ast.ImportFrom) and not node.level:
            uses |= {f"{node.module}.{alias.name}" for alias in node.names if (node.module, alias.name) in PARSING}
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and (modules.get(node.value.id), node.attr) in PARSING
        ):
            uses.add(f"{modules[node.value.id]}.{node.attr}")
    return uses


def test_files_and_messages_are_parsed_within_limits():
    """`kit.disk` bounds size and nesting, and its errors have one line; `ref`, which imports no other room, has a twin.
    `environments/unfold.py` reads values that stand one after another in a text, and catches what that can raise."""
    parsers = {path.relative_to(ROOT).as_posix(): bare_parsing(text(path)) for path in files()}
    assert {name: uses for name, uses in parsers.items() if uses and name not in STANDARD_LIBRARY_ONLY} == {
        "kit/disk.py": {"json.loads", "tomllib.loads"},
        "ref/checks.py": {"json.loads"},
        "environments/unfold.py": {"json.JSONDecoder"},
    }
    assert all(parsers[name] for name in STANDARD_LIBRARY_ONLY), "a file that parses nothing needs no exception"


@pytest.mark.parametrize(
    "source",
    [
        "import json\njson.loads(x)",
        "import json as j\nmap(j.load, f)",
        "from json import loads",
        "import tomllib\ntomllib.load(f)",
    ],
)
def test_a_bare_parser_is_seen(source):
    assert bare_parsing(source) and not bare_parsing(source.replace("load", "dump"))


def test_python_is_parsed_in_one_place_where_gradings_run_in_threads():
    """Programs inside of a sandbox have one thread."""
    rooms = [
        path for path in files() if path.relative_to(ROOT).parts[0] == "environments" and "inside" not in path.parts
    ]
    callers = {path.relative_to(ROOT).as_posix() for path in rooms if re.search(r"\bast\.parse\(", text(path))}
    assert callers == {"environments/syntax.py"}


def test_the_grader_that_goes_along_with_a_harbor_task_carries_what_it_imports():
    """A verifier's container has no other file of the project."""
    carried = {path.removeprefix("tests/grader/").removesuffix(".py").replace("/", ".") for path in grader()}
    missing = {}
    for module in carried:
        path = ROOT / f"{module.replace('.', '/')}.py"
        for_types = [
            node for node in nodes(text(path)) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        ]
        names = imports(path) - {name for node in for_types for name in imported(ast.unparse(node), ())}
        missing[module] = {
            name for name in names if name.partition(".")[0] in ROOMS and not {name, name.rpartition(".")[0]} & carried
        }
    assert {module: names for module, names in missing.items() if names} == {}


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(source: str) -> set[str]:
    """The private names that a file defines: functions, classes, variables, arguments, attributes."""
    found = set()
    for node in nodes(source):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("self", "cls")
        ):
            found.add(node.attr)
    return {name for name in found if private(name)}


def trespasses(source: str, package: tuple[str, ...], others: set[str]) -> set[str]:
    """Names with an underscore that a file takes from a module of ours, or from an object whose class stands in another
    file: `others` are the private names that other files define."""
    tree, found, modules = nodes(source), set(), set()
    others, methods = others - own_names(source), [node.name for node in tree if isinstance(node, ast.FunctionDef)]
    for node in tree:
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module.partition(".")[0] in {*ROOMS, "tests"}:
                found |= {f"{module}.{alias.name}" for alias in node.names if private(alias.name)}
                modules |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            modules |= {
                alias.asname or alias.name for alias in node.names if alias.name.partition(".")[0] in {*ROOMS, "tests"}
            }
    for node in tree:
        if isinstance(node, ast.Attribute) and private(node.attr):
            owner = ast.unparse(node.value)
            inherited = (
                owner == "super()" and methods.count(node.attr) < 2
            )  # this file does not hold the one that is overridden
            if owner in modules or owner.rpartition(".")[0] in modules or inherited or node.attr in others:
                found.add(f"{owner}.{node.attr}")
        elif isinstance(node, ast.Call) and last(node.func) in ("setattr", "getattr", "delattr") and len(node.args) > 1:
            owner, name = node.args[:2]
            if isinstance(name, ast.Constant) and private(str(name.value)) and ast.unparse(owner) in modules:
                found.add(f"{ast.unparse(owner)}.{name.value}")
    return found


def test_no_file_uses_the_private_names_of_another():
    """What another file may use has a name without an underscore, and a docstring that says what it is."""
    every = [*files(), *sorted((ROOT / "tests").rglob("*.py"))]
    defined = {path: own_names(text(path)) for path in every}
    found = {}
    for path in every:
        others = set().union(*(names for other, names in defined.items() if other != path))
        if some := trespasses(text(path), path.relative_to(ROOT).parent.parts, others):
            found[path.relative_to(ROOT).as_posix()] = some
    assert not found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from ref.x import _y", {"ref.x._y"}),
        ("from .x import _y", {"ref.x._y"}),
        ("from ref import x\nx._y", {"x._y"}),
        ("from ref import x as z\nz.C._y()", {"z.C._y"}),
        ("import ref.x\nref.x._y", {"ref.x._y"}),
        ("from ref import x\nmonkeypatch.setattr(x, '_y', 1)", {"x._y"}),
        ("class A(B):\n def f(self): super()._y()", {"super()._y"}),
        ("def f(stage): stage._other", {"stage._other"}),
        ("class A(B):\n def f(self): self._other", {"self._other"}),
        ("import torch\ntorch._foreach_add_(x)\nx._own", set()),
        ("class A:\n def _other(self): self._other()", set()),
        ("from ref import x\nx.__doc__", set()),
    ],
)
def test_a_private_name_of_another_file_is_seen(source, found):
    assert trespasses(source, ("ref",), {"_other"}) == found


PTX = {f"ptx{part}" for part in ("", "_floats", "_integers", "_memory", "_program", "_steps")}
JUDGES = {"compiled", "cost", "gate", "launches", "registry", "work"} | PTX
"""Files of kernels/ that tell about kernels: no part of a run calls them."""
HELPERS = {"bits", "block_scaled", "launch", "operands", "orientations", "swizzle", "tiles", "unfit", *JUDGES}
"""Files of kernels/ that replace nothing."""
PARTS = {"gemm": "quant", "grouped_gemm": "quant", "experts": "quant"}
"""Files of kernels/ that replace functions of a `ref` file that has more of them than one file should hold."""


def kernel_files() -> list[Path]:
    return sorted(path for path in (ROOT / "kernels").glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("path", kernel_files(), ids=lambda path: path.stem)
def test_a_kernel_has_the_file_name_and_the_signature_of_what_it_replaces(path):
    dotted = {
        found: found.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        for found in (ROOT / "ref").rglob("*.py")
    }
    theirs = {found: importlib.import_module(name) for found, name in dotted.items() if found.stem != "__init__"}
    ours = importlib.import_module(f"kernels.{path.stem}")
    functions = {
        name for name in ours.__all__ if inspect.isfunction(getattr(ours, name))
    }  # what other kernels call on the device is none
    replaced = {name for name in functions if any(name in getattr(module, "__all__", ()) for module in theirs.values())}
    if path.stem in HELPERS:
        assert not replaced, f"{replaced} belong beside their twins' names"
        return
    twins = [module for found, module in theirs.items() if found.stem == PARTS.get(path.stem, path.stem)]
    assert len(twins) == 1, (
        f"kernels/{path.name} must have the name of one file of ref/, or stand among HELPERS or PARTS"
    )
    assert replaced and replaced <= set(twins[0].__all__)
    for name in replaced:
        wanted, found = (
            [(p.name, p.kind, p.default) for p in inspect.signature(getattr(m, name)).parameters.values()]
            for m in (twins[0], ours)
        )
        assert found == wanted, name


def called(rooms: set[str]) -> set[str]:
    """Modules of kernels/ that files of these rooms import, themselves or by way of others there."""
    names = {f"kernels.{path.stem}": path for path in kernel_files()}

    def of(path: Path) -> set[str]:
        return {found if found in names else found.rpartition(".")[0] for found in imports(path)} & names.keys()

    found = set().union(*(of(path) for path in files() if room_of(path) in rooms))
    while more := set().union(*(of(names[name]) for name in found)) - found:
        found |= more
    return {name.removeprefix("kernels.") for name in found}


def test_kernels_have_the_callers_that_the_catalogue_promises():
    """`scaled` calls every kernel but those of which kernels/README.md says that nothing does, and no technique names
    one of those. Tests and benchmarks take the gate, and the plan the list of launches."""
    told = re.findall(r"Nothing calls `(\w+)` yet", (ROOT / "kernels" / "README.md").read_text(encoding="utf-8"))
    assert {path.stem for path in kernel_files()} - JUDGES - called({"scaled"}) == set(told)
    named = {Path(technique.kernel).stem for technique in catalog.TECHNIQUES if technique.kernel}
    assert named <= called({"scaled"})


def test_the_walker_sees_relative_nested_and_dynamic_imports():
    source = (
        "def f():\n from ..x import y\n from . import z\n import a.b\n importlib.import_module('app')\n "
        "kernel('k').f()\n"
    )
    assert imported(source, ("recipe", "microrepo")) == {"recipe.x.y", "recipe.microrepo.z", "a.b", "app", "kernels.k"}


def test_nobody_knows_the_name_of_the_folder_of_kernels():
    """Installed it is `etude_kernels`: its modules import each other relatively, and other rooms ask the engine."""
    for path in files():
        for node in nodes(text(path)):
            named = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            named += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.partition(".")[0] == "kernels" for name in named), (
                f"{path} imports kernels by that name"
            )


@pytest.mark.parametrize("technique", catalog.TECHNIQUES, ids=lambda technique: technique.name)
def test_catalogue(technique):
    paths = [getattr(technique, column) for column in ("ref", "scaled", "kernel", "sim", "lesson", "figure")]
    for path in filter(None, [*paths, *technique.tests]):
        assert (ROOT / path).is_file(), f"{technique.name} names {path}, which does not exist"
    module = importlib.import_module(technique.module)
    if technique.demo or technique.ref is None:
        assert list(inspect.signature(module.run).parameters)[:2] == ["run", "config"]
    if technique.ref is None:
        return
    module = importlib.import_module(dotted(technique.ref))
    assert technique.tests, "a technique comes with tests of meaning"
    assert all(hasattr(module, name) for name in module.__all__)
    assert dataclasses.is_dataclass(module.Demo) and module.Demo.__dataclass_params__.frozen
    assert list(inspect.signature(module.demo).parameters) == ["config", "log"]


def dotted(path: str) -> str:
    """The import name of a file."""
    return path.removesuffix(".py").replace("/", ".")


WITHOUT_TWIN = {"async-rl"}
"""References without a twin: services of `scaled/async_rl/` use the reference itself."""


def documented() -> str:
    """The README, the map of docs/ and the page of claims, with links as from the root."""
    pages = (ROOT / "README.md", ROOT / "docs" / "README.md", ROOT / "docs" / "claims.md")
    return "\n".join(page.read_text(encoding="utf-8").replace("](../", "](") for page in pages)


def broken_links(technique: catalog.Technique, readme_text: str, claimed: set[str]) -> list[str]:
    """What is missing from lesson → reference → kernel and scaled twin → experiment → figure and page → number in the
    README → tests."""
    missing = []
    for part in ("ref", "scaled", "lesson"):
        if not getattr(technique, part):
            missing.append(f"no {part}")
    paths = [
        *filter(None, (getattr(technique, part) for part in ("ref", "scaled", "kernel", "sim", "lesson", "figure")))
    ]
    missing += [f"{path} does not exist" for path in [*paths, *technique.tests] if not (ROOT / path).is_file()]
    if not technique.tests:
        missing.append("no tests")
    taught = dotted(technique.ref) if technique.ref else technique.module
    if technique.lesson and (ROOT / technique.lesson).is_file() and taught not in imports(ROOT / technique.lesson):
        missing.append(f"{technique.lesson} does not import {taught}")
    experiment = next((entry for entry in catalog.EXPERIMENTS if entry.sim == technique.sim), None)
    if technique.sim and experiment is None:
        missing.append(f"{technique.sim} is no experiment of the catalogue")
    if experiment:
        if technique.figure != f"results/figures/{experiment.name}.png":
            missing.append(f"its figure is not that of {experiment.name}")
        if experiment.name not in claimed:
            missing.append(f"results/claims.json has no claim of {experiment.name}")
        if f"`etude figure {experiment.name}`" not in readme_text:
            missing.append(f"no page has a row of {experiment.name}")
    if (
        technique.page
        and not (ROOT / "etude" / "explorer" / "pages" / f"{technique.page.replace('-', '_')}.py").is_file()
    ):
        missing.append(f"the explorer has no page {technique.page}")
    return missing + [f"no page mentions {path}" for path in paths if f"]({path})" not in readme_text]


@pytest.mark.parametrize("technique", [t for t in catalog.TECHNIQUES if t.ref], ids=lambda technique: technique.name)
def test_the_chain_of_a_technique_has_no_gap(technique):
    claimed = {
        claim["experiment"] for claim in json.loads((ROOT / "results" / "claims.json").read_text(encoding="utf-8"))
    }
    text = documented()
    assert broken_links(technique, text, claimed) == (["no scaled"] if technique.name in WITHOUT_TWIN else [])


def test_environments_have_no_reference_and_all_the_rest():
    """No single file is the thing to read, and sandboxes need no ranks."""
    claimed = {
        claim["experiment"] for claim in json.loads((ROOT / "results" / "claims.json").read_text(encoding="utf-8"))
    }
    text = documented()
    assert broken_links(catalog.find("environments"), text, claimed) == ["no ref", "no scaled"]


def test_a_gap_in_the_chain_is_seen():
    """Every link, taken away, is missed."""
    claimed = {
        claim["experiment"] for claim in json.loads((ROOT / "results" / "claims.json").read_text(encoding="utf-8"))
    }
    whole, text = catalog.find("quant"), documented()
    for change in (
        {"lesson": None},
        {"lesson": "lessons/05_kl.py"},
        {"scaled": "scaled/nothing.py"},
        {"kernel": "kernels/nothing.py"},
        {"sim": "sims/behaviour/effort.py"},
        {"figure": None},
        {"page": "nothing"},
        {"tests": ()},
    ):
        assert broken_links(dataclasses.replace(whole, **change), text, claimed), change
    assert broken_links(whole, text, claimed - {"low-precision"}) == [
        "results/claims.json has no claim of low-precision"
    ]
    assert len(broken_links(whole, text.replace("low-precision", ""), claimed)) == 2


@pytest.mark.parametrize("entry", catalog.EXPERIMENTS, ids=lambda entry: entry.name)
def test_experiments(entry):
    for path in (entry.sim, *entry.tests):
        assert (ROOT / path).is_file(), f"{entry.name} names {path}, which does not exist"
    module = importlib.import_module(entry.module)
    assert module.Experiment.__dataclass_params__.frozen and isinstance(module.Experiment.quick(), module.Experiment)
    assert isinstance(module.Experiment().seed, int) and entry.tests
    assert list(inspect.signature(module.experiment).parameters) == ["run", "config"]
    assert list(inspect.signature(module.picture).parameters) == ["results", "path"]


@pytest.mark.parametrize("technique", [t for t in catalog.TECHNIQUES if t.ref], ids=lambda technique: technique.name)
def test_a_reference_file_says_where_it_comes_from_and_how_to_run_it(technique):
    """Paper, numbered departures, commands that exist, glossary."""
    says = ast.get_docstring(ast.parse((ROOT / technique.ref).read_text(encoding="utf-8")))
    for part in ("\nWhere this file departs from the ", "\n1. ", "\nRun it\n", "\nGlossary\n", "arXiv:"):
        assert part in says, f"{technique.ref} lacks {part!r}"
    runs, figures = (re.findall(rf"^ +etude {verb} (\S+)", says, re.MULTILINE) for verb in ("run", "figure"))
    assert {"small", "full"} <= set(re.findall(rf"etude run {technique.name} --scale (\w+)", says))
    assert all(catalog.find(name) for name in runs) and all(catalog.find_experiment(name) for name in figures)


def test_names_are_unique_and_found():
    names = [technique.name for technique in catalog.TECHNIQUES]
    assert len(set(names)) == len(names)
    assert catalog.find("dr_grpo") is catalog.find("dr-grpo") is not None
    assert catalog.find("nothing") is None


@pytest.mark.parametrize("order", ["import kernels, transformers", "import transformers, kernels"])
def test_kernels_beside_transformers(order):
    """transformers probes for a package of that name and must not take ours for it."""
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{order}\n"
        "from transformers import Qwen3MoeForCausalLM\n"
        "from transformers.utils import is_kernels_available\n"
        f"assert kernels.__file__.startswith({str(ROOT)!r}), kernels.__file__\n"
        "assert not is_kernels_available()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT.parent)
    assert done.returncode == 0, done.stderr


def test_empty_memory_is_poisoned():
    assert torch.empty(1000).isnan().all()
    assert (torch.empty(10, dtype=torch.int64) == torch.iinfo(torch.int64).max).all()


def test_settings_of_one_name_are_of_one_kind():
    """Small and full runs share the settings of RL; elsewhere, too, a name stands for the same type and unit in
    both."""
    from kit.settings import describe
    from recipe.small.settings import Recipe
    from ref.rl import Settings
    from scaled import pretrain, rl

    shared = {f.name for f in dataclasses.fields(Settings)}
    kinds: dict[str, set[tuple[str, str]]] = {}
    told: dict[str, set[str]] = {}
    for cls in (Recipe, pretrain.Full, rl.Rl):
        for key, kind, _, doc in describe(cls):
            name = key.rpartition(".")[2]
            kinds.setdefault(name, set()).add((kind, re.sub(r"^rl\.", "", key) if key.startswith("rl.") else name))
            if key.startswith("rl.") and key.split(".")[1] in shared:
                told.setdefault(key, set()).add(doc)
    assert {key for key in told if len(told[key]) > 1} == set()
    assert {key.split(".")[1] for key in told} == shared
    assert {name: found for name, found in kinds.items() if len({kind for kind, _ in found}) > 1} == {}


def test_no_merge_is_left_half_done():
    """Its marks are no syntax error where they stand in a docstring."""
    marks = re.compile(r"^(<<<<<<< |=======$|>>>>>>> )", re.MULTILINE)
    texts = [
        *files(),
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "tests").rglob("*.py"),
        ROOT / "Makefile",
        ROOT / "pyproject.toml",
    ]
    assert [path.relative_to(ROOT).as_posix() for path in texts if marks.search(path.read_text(encoding="utf-8"))] == []
