"""A folder with a small package, in which caches lie, too: commands that make and play tasks of it leave nothing
elsewhere."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["home_of"]

PROJECT = {"words/__init__.py": "", "pyproject.toml": '[project]\nname = "words"\nversion = "1.0"\n'}


@contextmanager
def home_of(root: Path, files: Mapping[str, str]) -> Iterator[Path]:
    """The folder, with these files of its package `words` besides those that any has. The root file system is that of
    all tests."""
    with tempfile.TemporaryDirectory(prefix="etude-test-") as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "cache" / "etude").mkdir(parents=True)
        (folder / "cache" / "etude" / "roots").symlink_to(root.parent)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setenv("no_proxy", "127.0.0.1")
        for file, text in (PROJECT | dict(files)).items():
            (folder / "words" / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / "words" / file).write_text(text)
        yield folder
