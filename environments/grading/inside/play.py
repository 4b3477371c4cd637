"""The player: runs tests that lie nowhere on the disk, and tells each outcome on the pipe whose number it is given.

Where tests can be carried (see remote.py), this process is the examiner: it holds the tests, their canaries and what
they expect, nobody can read its memory, and no code of the tree runs here. The package runs in another process, the
examinee, and is called over a pipe. Questions that no test has
(see fresh.py) go the same way, so that the examinee cannot tell which is which.

Tests that cannot be carried are played by a fork of this process, which was made before the plan came, with the package
in the same process. What that says is not believed for itself: see environments/grading/verdicts.py. What is done here
makes the usual ways useless. No configuration, conftest or plugin of the tree is read. The tree comes last on the path,
so it shadows no module. The tests' sources come through a pipe before anything of the tree is imported, and files of
their names are empty. Real tests are played under names that end like those of canaries, also in their code, and
neither the environment nor the command line tells what is being played.

    python3 -I -B play.py VERDICTS REQUESTS ANSWERS INNER-PLAN INNER-VERDICTS        numbers of handles
"""

import ctypes
import functools
import gc
import importlib
import importlib.abc
import importlib.util
import inspect
import json
import os
import random
import re
import signal
import sys
import types
from collections import Counter
from pathlib import Path

import pytest

for part in vars(sys.modules["_pytest.config"])["default_plugins"]:
    importlib.import_module(f"_pytest.{part}")  # else it is imported once there is a plan
for part in ("_pytest._argcomplete", "faulthandler", "pdb", "pickle", "readline", "unittest.mock"):
    if importlib.util.find_spec(part):  # pytest imports these when it begins, or many tests do
        importlib.import_module(part)


ARGUMENT_NAMES = vars(sys.modules["_pytest.fixtures"])["getfuncargnames"]


def argument_names(function, *args, **named) -> tuple[str, ...]:
    """pytest's own, which inspects a signature, for what takes arguments. Each value of a parametrised test is a
    function that takes none."""
    if type(function) is types.FunctionType and not vars(function):
        code = function.__code__
        if not code.co_argcount and not code.co_kwonlyargcount:
            return ()
    return ARGUMENT_NAMES(function, *args, **named)


vars(sys.modules["_pytest.fixtures"])["getfuncargnames"] = argument_names


def load_program(name: str) -> None:
    """Imports a program that lies beside this one, unless a nursery has done so."""
    if name not in sys.modules:
        path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])


for part in ("remote", "fresh"):
    load_program(part)
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
END = b"end\n"
"""Is said once all that can be carried was played."""


class Support(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the original's conftest files and helper modules of tests from sources in memory, whatever lies in the
    tree. `plan`: "packages", "modules" and "conftests", as environments/tasks/support.py finds them."""

    def __init__(self, plan: dict, folder: Path) -> None:
        self.modules, self.conftests = plan.get("modules", {}), plan.get("conftests", ())
        self.folder = folder

    def find_spec(self, name, path=None, target=None):
        if name not in self.modules:
            return None
        file, _, is_package = self.modules[name]
        return importlib.util.spec_from_loader(name, self, origin=str(self.folder / file), is_package=is_package)

    def exec_module(self, module):
        file, source, _ = self.modules[module.__name__]
        module.__file__ = str(self.folder / file)
        exec(compile(source, module.__file__, "exec", dont_inherit=True), module.__dict__)

    def pytest_load_initial_conftests(self, early_config):
        """The name under which a conftest file is registered says for which folder its fixtures are."""
        for file, name in self.conftests:
            try:
                early_config.pluginmanager.register(importlib.import_module(name), str(self.folder / file))
            except Exception:
                pass  # tests that need it fail


class SourceCollector:
    """Collects tests from sources in memory. `link`: to the process that runs the package, if that is another one."""

    def __init__(self, plan: dict, folder: Path, link=None) -> None:
        self.sources, self.names, self.packages = plan["tests"], plan["names"], plan["support"].get("packages", {})
        self.selected_tests, self.folder, self.link = {*plan["wanted"]}, folder, link
        self.functions = {test.partition("[")[0] for test in self.selected_tests}

    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Dir:
        """A folder is never a package: whoever leaves an __init__.py there would have it imported."""
        return pytest.Dir.from_parent(parent, path=path)

    def pytest_collect_file(self, file_path: Path, parent: pytest.Collector) -> pytest.Module | None:
        path = file_path.relative_to(self.folder).as_posix()
        if path not in self.sources:
            return None
        module = types.ModuleType(path.removesuffix(".py").replace("/", "_"))
        module.__file__ = str(file_path)
        if path in self.packages:
            module.__package__ = self.packages[path]
        sys.modules[module.__name__] = module
        exec(compile(self.sources[path], str(file_path), "exec", dont_inherit=True), module.__dict__)
        if self.link is not None and self.link.taint:
            raise RuntimeError(f"{path} cannot be carried: {self.link.taint}")
        rename(
            module,
            self.sources[path],
            {test: new_name for test, new_name in self.names.items() if test.partition("::")[0] == path},
        )
        node = pytest.Module.from_parent(parent, path=file_path)
        node.obj = module
        return node

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(
        self, collector: pytest.Collector, name: str, obj: object
    ) -> list[pytest.Item] | None:
        """A function none of whose cases is wanted has no items."""
        return [] if inspect.isroutine(obj) and f"{collector.nodeid}::{name}" not in self.functions else None

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """What is wanted may be a case, or a function with all of its cases. Each is played where its test stands. No
        failure is put into words, which takes longer than a test, and all canaries fail. Nobody asks for the line that
        a test stands in."""
        items[:] = [
            item
            for item in items
            if item.nodeid in self.selected_tests or item.nodeid.partition("[")[0] in self.selected_tests
        ]
        for item in items:
            vars(item).update(repr_failure=format_nothing, _repr_failure_py=format_nothing, location=("", None, ""))


def format_nothing(*_: object, **__: object) -> str:
    """A failure in no words."""
    return ""


def rename(module: types.ModuleType, source: str, names: dict[str, str]) -> None:
    """Gives tests of a module, and of classes in it, other names, also in their code. `names`: FILE::CLASS::TEST → the
    same with another last name, which tests of one name have in common. A test's own name goes, unless the source uses
    it elsewhere."""
    new_names = {test.rpartition("::")[2]: new_test.rpartition("::")[2] for test, new_test in names.items()}
    word_counts, definition_counts = Counter(re.findall(r"\w+", source)), Counter(re.findall(r"\bdef\s+(\w+)", source))
    holders = [
        module,
        *(value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__),
    ]
    for holder in holders:
        parts = [(name, part) for name, part in vars(holder).items() if not name.startswith("__")]
        if not any(name in new_names for name, _ in parts):
            continue
        for name, part in parts:  # all of them, so that their order stays
            delattr(holder, name)
            if name in new_names:
                _rename(part.__func__ if isinstance(part, staticmethod | classmethod) else part, name, new_names[name])
                setattr(holder, new_names[name], part)
                if word_counts[name] == definition_counts[name]:
                    continue
            setattr(holder, name, part)
    for test in names:  # those that a class inherits, or that another module defines
        *owners, name = test.split("::")[1:]
        holder = functools.reduce(lambda outer, owner: getattr(outer, owner, None), owners, module)
        part = inspect.getattr_static(holder, name, None)
        if isinstance(part, types.FunctionType) and inspect.getattr_static(holder, new_names[name], None) is None:
            copy = types.FunctionType(part.__code__, part.__globals__, name, part.__defaults__, part.__closure__)
            functools.update_wrapper(copy, part)
            del copy.__wrapped__
            copy.__kwdefaults__ = part.__kwdefaults__
            _rename(copy, name, new_names[name])
            setattr(holder, new_names[name], copy)


def _rename(function: object, name: str, new_name: str) -> None:
    while isinstance(function, types.FunctionType) and function.__name__ == name:
        qualified_name = f"{function.__qualname__.rpartition('.')[0]}.{new_name}".removeprefix(".")
        if function.__code__.co_name == name:
            function.__code__ = function.__code__.replace(co_name=new_name, co_qualname=qualified_name)
        function.__name__, function.__qualname__ = new_name, qualified_name
        function = vars(function).get("__wrapped__")


class RemoteImporter(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports modules of the package from the process that runs it, and the tests' own modules from sources in
    memory."""

    def __init__(self, link, tops: set[str], local: dict[str, list]) -> None:
        self.link, self.tops, self.local, self.executed_modules = link, tops, local, set()

    def find_spec(self, name, path=None, target=None):
        if name in self.local:
            return importlib.util.spec_from_loader(name, self, is_package=self.local[name][1])
        if name.partition(".")[0] not in self.tops:
            return None
        try:
            module = self.link.ask("import", name)
        except ModuleNotFoundError as error:
            if error.name == name or name in str(error):
                return None
            raise
        module_spec = importlib.util.spec_from_loader(name, self, is_package="__path__" in vars(module))
        assert module_spec is not None
        module_spec.loader_state = module
        return module_spec

    def create_module(self, spec):
        return spec.loader_state

    def exec_module(self, module):
        if (local := self.local.get(module.__name__)) is not None:
            exec(compile(local[0], f"/{module.__name__}", "exec", dont_inherit=True), module.__dict__)
        elif module.__name__ in self.executed_modules:
            self.link.ask("reload", module.__name__)
        self.executed_modules.add(module.__name__)


class OutcomeReporter:
    """Says of each test how it ended, once it has."""

    def __init__(self, pipe: int, link=None) -> None:
        self.pipe, self.link, self.outcomes = pipe, link, {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        previous = self.outcomes.get(report.nodeid, "passed")
        is_tainted = self.link is not None and self.link.taint
        self.outcomes[report.nodeid] = (
            "failed"
            if is_tainted or "failed" in (previous, report.outcome)
            else "skipped"
            if "skipped" in (previous, report.outcome)
            else "passed"
        )
        if report.when == "teardown":
            if self.link is not None:
                self.link.begin()
            os.write(self.pipe, f"{self.outcomes[report.nodeid]} {report.nodeid}\n".encode())


def play(plan: dict, pipe: int, link=None) -> None:
    """Runs the tests of a plan."""
    sys.argv[:], sys.orig_argv[:] = ["pytest"], ["python3"]
    # pytest would put the name of each test into the environment.
    vars(sys.modules["_pytest.runner"])["_update_current_test_var"] = lambda item, phase: None
    folder = Path(plan["folder"])
    for name in plan["tests"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    os.chdir(folder)
    options = ["--noconftest", "-p", "no:cacheprovider", "--assert=plain"]
    options += ["-p", "no:terminal", "-s"]  # nobody reads what is printed; capsys and capfd work all the same
    # No file of configuration, which could be written meanwhile.
    options += ["-c", os.devnull, "-o", "python_files=none", "--rootdir", str(folder), "--confcutdir", str(folder)]
    if link is not None:
        options += ["--continue-on-collection-errors"]  # a file that cannot be carried takes no other one with it
    support = Support(plan["support"], folder)
    sys.meta_path.insert(0, support)
    pytest.main(
        [*options, str(folder)], plugins=[support, SourceCollector(plan, folder, link), OutcomeReporter(pipe, link)]
    )


def answer(number: int, question: dict) -> str:
    """What comes of a question: its number, and as JSON kind and answer as fresh.py tells them. Raises what ends the
    link."""
    fresh, remote = sys.modules["fresh"], sys.modules["remote"]
    try:
        args, named = (
            [fresh.unpack_value(argument) for argument in question["args"]],
            {key: fresh.unpack_value(argument) for key, argument in question["named"].items()},
        )
        module, _, name = question["function"].partition(":")
        value = getattr(importlib.import_module(module), name)(*args, **named)
        outcome = ["value", fresh.pack_value(value, exact=False)]
    except (fresh.NotPlain, remote.NotCarried):
        outcome = ["other", None]
    except remote.LinkError:
        raise
    except BaseException as error:
        outcome = ["error", [error_class.__name__ for error_class in type(error).__mro__[:-1]]]
    text = json.dumps(outcome)
    return f"answer {number} {text if len(text) <= fresh.ANSWER else 'null'}\n"


def examine(plan: dict, pipe: int, requests: int, answers: int) -> None:
    """Plays the tests that can be carried, and asks before what no test asks, in an order that is drawn by chance."""
    remote = sys.modules["remote"]
    cpu = ctypes.CDLL(None).sched_getcpu()
    remote.stay_on(cpu)
    link = remote.Link(answers, requests, strict=True)
    link.noticed = remote.repeat
    link.send(["begin", plan["folders"], plan["each"], cpu])
    sys.meta_path.append(RemoteImporter(link, {*plan["tops"]}, plan["local"]))
    order = [*range(len(plan["asked"]))]
    random.SystemRandom().shuffle(order)
    try:
        for number in order:  # first, before a test has changed anything
            os.write(pipe, answer(number, plan["asked"][number]).encode())
        link.begin()
        if plan["wanted"]:
            play(plan, pipe, link)
    except BaseException:
        pass  # what was not said counts as failed


def main(pipe: int, requests: int, answers: int, inner_plan: int, inner_pipe: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    gc.freeze()  # what pytest has made stays: collections, of which it makes some at its end, need not look through it
    os.write(pipe, b"ready\n")  # pytest is imported, and nothing else is known
    inner_pid = os.fork() if os.read(0, 1) == b"1" else None  # before the plan comes
    if inner_pid == 0:
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            for handle in (0, pipe, requests, answers):
                os.close(handle)
            data = b""
            while block := os.read(inner_plan, 1 << 20):
                data += block
            os.close(inner_plan)
            os.open(os.devnull, os.O_RDONLY)
            os.setsid()
            ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
            plan = json.loads(data)
            sys.path += plan["folders"]
            play(plan, inner_pipe)
        finally:
            os._exit(0)  # all is told; to take a process with pytest down in order takes as long as many tests
    for handle in (inner_plan, inner_pipe):
        os.close(handle)
    plan = json.loads(sys.stdin.buffer.read())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        if plan["wanted"] or plan["asked"]:
            examine(plan, pipe, requests, answers)
        os.write(pipe, END)
        os.close(requests)
        if inner_pid:
            os.waitpid(inner_pid, 0)
    finally:
        os._exit(0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
