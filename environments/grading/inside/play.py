"""The player: runs tests that lie nowhere on the disk, and tells each outcome on the pipe whose number it is given.

The agent's code runs in this process, so nothing that it says is believed for itself: see environments/grading/verdicts.py. What is done here makes
the usual ways useless. No configuration, conftest or plugin of the tree is read. The tree comes last on the path, so it shadows no module. The
tests' sources come through a pipe before anything of the tree is imported, and files of their names are empty. Real tests are played under names
that end like those of canaries, and neither the environment nor the command line tells what is being played.
"""

import gc
import importlib
import importlib.abc
import importlib.util
import inspect
import json
import os
import sys
import types
from pathlib import Path

import pytest

for part in vars(sys.modules["_pytest.config"])["default_plugins"]:
    importlib.import_module(f"_pytest.{part}")  # else it is imported once there is a plan


class Support(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the original's conftest files and helper modules of tests from sources in memory, whatever lies in the
    tree. `plan`: "packages", "modules" and "conftests", as environments/tasks/support.py finds them."""

    def __init__(self, plan: dict, folder: Path) -> None:
        parts = (plan.get(part, {}) for part in ("packages", "modules", "conftests"))
        self.packages, self.modules, self.conftests = parts
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


class Held:
    """Collects tests from sources in memory."""

    def __init__(self, sources: dict[str, str], wanted: set[str], names: dict[str, str], folder: Path, packages: dict[str, str]) -> None:
        self.sources, self.wanted, self.names, self.folder = sources, wanted, names, folder
        self.packages = packages

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
        for test, played in self.names.items():
            file, *owners, name = test.split("::")
            if file == path:
                also(module, owners, name, played.rpartition("::")[2])
        found = pytest.Module.from_parent(parent, path=file_path)
        found.obj = module
        return found

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """What is wanted may be a case, or a function with all of its cases. Each is played where its test stands under its own name."""
        own, at = {played: test for test, played in self.names.items()}, {}
        heads = {item: item.nodeid.partition("[")[0] for item in items}
        for number, item in enumerate(items):
            at.setdefault(heads[item], number)
        items.sort(key=lambda item: at.get(own.get(heads[item], heads[item]), at[heads[item]]))
        items[:] = [item for item in items if item.nodeid in self.wanted or heads[item] in self.wanted]


def also(module: types.ModuleType, owners: list[str], name: str, other: str) -> None:
    """Gives a test of a module, or of a class in it, another name beside its own."""
    holder: object = module
    for owner in owners:
        holder = getattr(holder, owner, None)
    test = inspect.getattr_static(holder, name, None)
    if test is not None:
        setattr(holder, other, test)


class Told:
    """Says of each test how it ended, once it has."""

    def __init__(self, pipe: int) -> None:
        self.pipe, self.outcomes = pipe, {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        before = self.outcomes.get(report.nodeid, "passed")
        self.outcomes[report.nodeid] = (
            "failed" if "failed" in (before, report.outcome) else "skipped" if "skipped" in (before, report.outcome) else "passed"
        )
        if report.when == "teardown":
            os.write(self.pipe, f"{self.outcomes[report.nodeid]} {report.nodeid}\n".encode())


def main(pipe: int) -> None:
    gc.freeze()  # what pytest has made stays: collections, of which it makes some at its end, need not look through it
    os.write(pipe, b"ready\n")  # pytest is imported, and nothing else is known
    plan = json.loads(sys.stdin.buffer.read())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv[:], sys.orig_argv[:] = ["pytest"], ["python3"]
    # pytest would put the name of each test into the environment.
    vars(sys.modules["_pytest.runner"])["_update_current_test_var"] = lambda item, when: None
    folder = Path(plan["folder"])
    for name in plan["tests"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / "pytest.ini").write_text("[pytest]\npython_files = none\n")
    os.chdir(folder)
    sys.path += [plan["tree"], f"{plan['tree']}/src"]
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "--assert=plain", "--tb=no"]  # to word a failure takes longer than the test
    options += ["-c", str(folder / "pytest.ini"), "--rootdir", str(folder)]
    support = Support(plan["support"], folder)
    sys.meta_path.insert(0, support)
    held = Held(plan["tests"], set(plan["wanted"]), plan["names"], folder, support.packages)
    pytest.main([*options, str(folder)], plugins=[support, held, Told(pipe)])
    os._exit(0)  # all is told; to take a process with pytest down in order takes as long as many tests


if __name__ == "__main__":
    main(int(sys.argv[1]))
