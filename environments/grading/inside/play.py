"""The player: runs tests that lie nowhere on the disk, and tells each outcome on the pipe whose number it is given.

The agent's code runs in this process, so nothing that it says is believed for itself: see environments/grading/verdicts.py. What is done here makes
the usual ways useless. No configuration, conftest or plugin of the tree is read. The tree comes last on the path, so it shadows no module. The
tests' sources come through a pipe before anything of the tree is imported, and files of their names are empty.
"""

import json
import os
import sys
import types
from pathlib import Path

import pytest


class Held:
    """Collects tests from sources in memory."""

    def __init__(self, sources: dict[str, str], wanted: set[str], folder: Path) -> None:
        self.sources, self.wanted, self.folder = sources, wanted, folder

    def pytest_collect_file(self, file_path: Path, parent: pytest.Collector) -> pytest.Module | None:
        name = file_path.relative_to(self.folder).as_posix()
        if name not in self.sources:
            return None
        module = types.ModuleType(name.removesuffix(".py").replace("/", "_"))
        module.__file__ = str(file_path)
        sys.modules[module.__name__] = module
        exec(compile(self.sources[name], str(file_path), "exec", dont_inherit=True), module.__dict__)
        found = pytest.Module.from_parent(parent, path=file_path)
        found.obj = module
        return found

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """What is wanted may be a case, or a function with all of its cases."""
        items[:] = [item for item in items if item.nodeid in self.wanted or item.nodeid.partition("[")[0] in self.wanted]


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
    plan = json.loads(sys.stdin.buffer.read())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    folder = Path(plan["folder"])
    for name in plan["tests"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / "pytest.ini").write_text("[pytest]\npython_files = none\n")
    os.chdir(folder)
    sys.path.append(plan["tree"])
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "-c", str(folder / "pytest.ini"), "--rootdir", str(folder), "--assert=plain"]
    pytest.main([*options, str(folder)], plugins=[Held(plan["tests"], set(plan["wanted"]), folder), Told(pipe)])


if __name__ == "__main__":
    main(int(sys.argv[1]))
