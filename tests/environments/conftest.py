"""Folders and sandboxes that tests share."""

import tempfile
from pathlib import Path

import pytest

from environments.sandbox.engine import connected
from environments.sandbox.open import open_sandbox
from environments.sandbox.root import root_file_system
from environments.sandbox.store import Store
from kit.settings import RunError


@pytest.fixture(scope="session")
def root():
    """The root file system of the user who runs the tests, from the cache."""
    return root_file_system()


@pytest.fixture(scope="session")
def engine():
    """Skips where no Docker engine answers."""
    try:
        connected().close()
    except RunError as error:
        pytest.skip(str(error))


@pytest.fixture
def open_folder():
    """A folder that other users may enter: pytest's own ones are closed to them."""
    with tempfile.TemporaryDirectory(prefix="etude-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def shared_store():
    """A store for the tests of a file."""
    with tempfile.TemporaryDirectory(prefix="etude-test-") as name:
        Path(name).chmod(0o755)
        yield Store(Path(name) / "store")


@pytest.fixture(scope="module")
def start(root, shared_store, tmp_path_factory):
    """start({path: text}, limits=…) gives a sandbox; all of them are closed after the tests of a file."""
    started = []

    def starter(files=None, **how):
        folder = tmp_path_factory.mktemp("tree")
        for path, text in (files or {}).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        started.append(open_sandbox(folder, root=root, store=shared_store, **how))
        return started[-1]

    yield starter
    for sandbox in started:
        sandbox.close()


@pytest.fixture(scope="module")
def sandbox(start):
    """One sandbox for the tests of a file that leave nothing behind."""
    return start({"a.txt": "one\ntwo\n", "pkg/b.py": "def f():\n    return 1\n"})
