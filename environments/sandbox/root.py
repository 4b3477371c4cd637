"""A root file system of our own, made of this machine's parts: a Python, its standard library, pytest, a shell and the
utilities around it.

A sandbox that showed the machine's own /usr would show its packages, and with them other copies of what a task has
taken out: pip and setuptools carry such copies within them. So the sandbox sees a folder with what is listed here and
nothing more. It is put together in seconds, without a network, and kept in the cache folder under the hash of what is
in it. It appears there by one rename: whole, or not at all."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from kit.settings import RunError

from . import bytecode
from .cache import cache_folder, keep, make_folder, unused

__all__ = ["DISTRIBUTIONS", "UTILITIES", "Source", "find", "forget", "root_file_system", "sources"]

DISTRIBUTIONS = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
"""What pytest needs from Python 3.11 on."""
NEEDED = ("sh", "ls", "cat", "grep", "sed", "find")
"""Without these there is no sandbox."""
UTILITIES = NEEDED + tuple(
    "bash awk basename cmp chmod comm cp cut date dd df diff dirname du echo egrep env expand expr "
    "false fgrep fold gunzip gzip head hostname id "
    "install join kill ln md5sum mkdir mkfifo mktemp mv nice nl nohup od paste patch printenv printf "
    "pwd readlink realpath rm rmdir seq sha1sum "
    "sha256sum shuf sleep sort split stat tac tail tar tee test timeout touch tr true truncate uname "
    "uniq wc which xargs yes zcat [".split()
)
"""Taken where the machine has them."""
LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "ensurepip",
    "tkinter",
    "turtledemo",
    "__pycache__",
    "lib2to3",
    "sitecustomize.py",
}
"""Parts of the standard library that bring packages of others, or that no program needs."""
LIBRARIES = ("libgcc_s.so.1",)
"""Shared libraries that are opened by name only: threads end through this one."""
ROOT_LIFETIME = 14 * 24 * 3600
"""Seconds for which a root is kept that nobody asks for."""
REMOVED_PREFIX = ".removed-"
"""How the name of a folder begins that is being removed."""
PYTHON = f"python{sys.version_info[0]}.{sys.version_info[1]}"
LIBRARY, SITE, INSIDE = f"usr/lib/{PYTHON}", f"usr/lib/{PYTHON}/site-packages", "usr/lib/sandbox/inside"
FOLDERS = ("base", "dev/shm", "proc", "run", "tmp", "work", "etc", "home", SITE)
LINKS = {
    **{"bin": "usr/bin", "sbin": "usr/bin", "lib": "usr/lib", "lib64": "usr/lib", "usr/lib64": "lib"},
    **{"usr/bin/python3": PYTHON, "usr/bin/python": PYTHON},
    "usr/lib/python3/dist-packages": f"../{PYTHON}/site-packages",  # where the Python of Debian and Ubuntu looks
    **{
        "dev/fd": "/proc/self/fd",
        "dev/stdin": "/proc/self/fd/0",
        "dev/stdout": "/proc/self/fd/1",
        "dev/stderr": "/proc/self/fd/2",
    },
}
TEXTS = {
    "etc/passwd": "root:x:0:0:root:/:/bin/sh\nagent:x:1000:1000:agent:/tmp:/bin/sh\n",
    "etc/group": "root:x:0:\nagent:x:1000:\n",
    "etc/hosts": "127.0.0.1 localhost\n::1 localhost\n127.0.1.1 sandbox\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "usr/bin/pytest": '#!/bin/sh\nexec python3 -m pytest "$@"\n',
} | {f"dev/{name}": "" for name in ("null", "zero", "full", "random", "urandom")}


@dataclass(frozen=True)
class Source:
    """A file of the root, before it is there: copied from this machine, a text, or a link."""

    copied: Path | None = None
    text: str | None = None
    link: str | None = None
    runs: bool = False
    """Whether it may be executed."""


def root_file_system(distributions: tuple[str, ...] = DISTRIBUTIONS, cache: Path | None = None) -> Path:
    """The folder, which is built first if the cache lacks it. `distributions`: what lies in its site-packages, all of
    it, since nothing is added for what they need in turn. Raises RunError, in one line, for what this machine lacks."""
    with BUILD_LOCK.lock:
        return find(tuple(distributions), cache or cache_folder())


class _BuildLock:
    """One thread of a process builds at a time. A fork has its own lock: the thread that held this one is not in it."""

    def __init__(self) -> None:
        self.renew()
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        self.lock = threading.Lock()


BUILD_LOCK = _BuildLock()


@functools.cache
def find(distributions: tuple[str, ...], cache: Path) -> Path:
    """Looked for once in a process: to look at a thousand files takes as long as to start a sandbox."""
    roots, files = cache / "roots", sources(distributions)
    pointer = roots / "known" / _hash_sources(files)
    if (root := _find_root(roots, pointer)) is None:
        _make_root(roots, pointer, files)
        root = _find_root(roots, pointer)
    if root is None:
        raise RunError(
            f"the sandbox's root file system was removed from {roots} as soon as it was there; nothing "
            f"else should write there"
        )
    return root


def _find_root(roots: Path, pointer: Path) -> Path | None:
    """The root that was built of the same files, if it is there. No other process removes it until this one ends."""
    try:
        root = roots / pointer.read_text().strip()
        keep(root)
    except OSError:
        return None
    with contextlib.suppress(OSError):  # another user's cache
        os.utime(pointer)
    return root if root.is_dir() else None


def _make_root(roots: Path, pointer: Path, files: dict[str, Source]) -> None:
    building = Path(tempfile.mkdtemp(prefix=".building-", dir=make_folder(roots)))
    try:
        digest = _fill_root(building, files)
        try:
            building.rename(roots / digest)
        except OSError:
            if not (roots / digest).is_dir():  # else another process was faster
                raise
    except OSError as error:
        raise RunError(f"the sandbox's root file system cannot be built in {roots}: {error}") from None
    finally:
        _remove_root(building)
    temporary = make_folder(pointer.parent) / f".{pointer.name}-{os.getpid()}"
    temporary.write_text(digest + "\n")
    temporary.rename(pointer)
    try:
        forget(roots, time.time() - ROOT_LIFETIME)
    except OSError as error:
        raise RunError(f"what no sandbox uses any more cannot be removed from {roots}: {error}") from None


def forget(home: Path, since: float) -> None:
    """Removes roots that nobody has asked for since then and nobody uses, and what builds and removals that were killed
    have left. Raises OSError for what cannot be removed."""
    names = set()
    for pointer in (home / "known").iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process forgets at the same time
            if pointer.stat().st_mtime < since:
                pointer.unlink()
            else:
                names.add(pointer.read_text().strip())
    for folder in home.iterdir():
        with contextlib.suppress(FileNotFoundError):
            is_old = folder.name.startswith(REMOVED_PREFIX) or folder.stat().st_ctime < since
            if is_old and folder.name not in ("known", *names) and (handle := unused(folder)) is not None:
                try:
                    _remove_root(folder)
                finally:
                    os.close(handle)


def sources(distributions: Iterable[str]) -> dict[str, Source]:
    """Every file that the root begins with, by its path there: all but shared libraries, which follow from these, and
    bytecode."""
    files = {path: Source(text=text, runs=text.startswith("#!")) for path, text in TEXTS.items()}
    files |= {path: Source(link=target) for path, target in LINKS.items()}
    files[f"usr/bin/{PYTHON}"] = Source(Path(getattr(sys, "_base_executable", sys.executable)).resolve(), runs=True)
    for name, path in _find_utilities():
        files[f"usr/bin/{name}"] = Source(path, runs=True)
    for path, name in _list_library(Path(sysconfig.get_path("stdlib"))):
        files[f"{LIBRARY}/{name}"] = _replace_paths(path) if name.startswith("_sysconfigdata") else Source(path)
    for path in sorted((Path(__file__).parent / "inside").glob("*.py")):
        files[f"{INSIDE}/{path.name}"] = Source(path)
    for distribution in distributions:
        files |= _list_distribution(distribution)
    return files


def _find_utilities() -> Iterator[tuple[str, Path]]:
    """Names and programs. A script is taken only if the shell reads it."""
    for name in UTILITIES:
        program = shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin:/run/current-system/sw/bin")
        if program is not None:
            path = Path(program).resolve()
            with open(path, "rb") as file:
                first_line = file.readline(100)
            if first_line.startswith(b"\x7fELF") or first_line.split() in (
                [b"#!/bin/sh"],
                [b"#!/bin/bash"],
                [b"#!", b"/bin/sh"],
            ):
                yield name, path
                continue
        if name in NEEDED:
            raise RunError(
                f"a sandbox needs the program {name}, which is not in /usr/bin; on Debian and Ubuntu: "
                f"apt-get install coreutils grep sed findutils"
            )


def _list_library(folder: Path, prefix: str = "") -> Iterator[tuple[Path, str]]:
    """Files of the standard library, and their paths in it."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name in LEFT_OUT or entry.name.startswith(("config-", "_tkinter", "_test", "xx")):
            continue
        if entry.is_dir():
            yield from _list_library(Path(entry.path), f"{prefix}{entry.name}/")
        elif entry.name.endswith((".py", ".so", ".json", ".txt", ".html", ".css", ".typed")):
            yield Path(entry.path), prefix + entry.name


def _replace_paths(path: Path) -> Source:
    """A module of settings that names the folders of this machine, with those of the root instead."""
    text = path.read_text(encoding="utf-8")
    for prefix in sorted(
        {sys.base_prefix, sys.base_exec_prefix, str(Path.home())} - {"/usr", "/"}, key=len, reverse=True
    ):
        text = text.replace(prefix, "/usr")
    return Source(text=text)


def _list_distribution(name: str) -> dict[str, Source]:
    """The files of an installed package. What says where it came from stays behind, as do its scripts."""
    try:
        files = metadata.distribution(name).files
    except metadata.PackageNotFoundError:
        files = None
    if not files:
        raise RunError(
            f"the sandbox's site-packages need {name}, which is not installed; run: {sys.executable} "
            f"-m pip install {name}"
        )
    package_files = {}
    for file in files:
        is_metadata = file.parent.name.endswith(".dist-info") and file.name in (
            "METADATA",
            "entry_points.txt",
            "top_level.txt",
        )
        if (
            ".." in file.parts
            or file.suffix in (".pyc", ".pth")
            or not (is_metadata or ".dist-info" not in file.parts[0])
        ):
            continue
        path = Path(str(file.locate()))
        if path.is_file():
            package_files[f"{SITE}/{file.as_posix()}"] = Source(path)
    return package_files


def _hash_sources(files: dict[str, Source]) -> str:
    """Changes when a file that is copied does, or this one: cheaper than reading all of them."""
    rows: list = [
        Path(__file__).read_text(encoding="utf-8"),
        Path(bytecode.__file__).read_text(encoding="utf-8"),
        sys.version,
    ]
    for path, source in sorted(files.items()):
        status = source.copied.stat() if source.copied else None
        rows.append(
            (path, source.text, source.link, str(source.copied), status and (status.st_size, status.st_mtime_ns))
        )
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _fill_root(root: Path, files: dict[str, Source]) -> str:
    """Fills the folder, and gives the hash of what is in it. Bytecode follows from the rest, and is not in the hash."""
    files = files | _find_shared_libraries(files)
    for folder in FOLDERS:
        (root / folder).mkdir(parents=True, exist_ok=True)
    rows = []
    for path, source in sorted(files.items()):
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.link is not None:
            target.symlink_to(source.link)
            rows.append((path, source.link))
            continue
        data = source.copied.read_bytes() if source.copied else (source.text or "").encode()
        target.write_bytes(data)
        target.chmod(0o755 if source.runs else 0o644)
        rows.append((path, source.runs, hashlib.sha256(data).hexdigest()))
        if path.endswith(".py"):
            bytecode.write(target, data, f"/{path}", source.copied)
    root.chmod(0o755)
    for folder, _, _ in os.walk(root):
        os.chmod(folder, 0o755)
    return hashlib.sha256(json.dumps([PYTHON, rows]).encode()).hexdigest()


def _find_shared_libraries(files: dict[str, Source]) -> dict[str, Source]:
    """The shared libraries that the programs and modules name, and the loader, all in one folder, where every loader
    looks."""
    binaries = [
        str(source.copied) for path, source in files.items() if source.copied and (source.runs or path.endswith(".so"))
    ]
    if (ldd := shutil.which("ldd", path="/usr/bin:/bin")) is None:
        raise RunError(
            "a sandbox needs ldd, which tells what programs are linked with; on Debian and Ubuntu: "
            "apt-get install libc-bin"
        )
    output = subprocess.run(
        [ldd, *binaries], capture_output=True, text=True, env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"}
    ).stdout
    libraries = {name: Path(path) for name, path in re.findall(r"^[ \t]++(\S++) => (/\S++) \(0x", output, re.MULTILINE)}
    libraries |= {
        os.path.basename(path): Path(path) for path in re.findall(r"^[ \t]++(/\S++) \(0x", output, re.MULTILINE)
    }
    folders = {path.parent for path in libraries.values()}
    libraries |= {name: folder / name for name in LIBRARIES for folder in folders if (folder / name).exists()}
    return {f"usr/lib/{name}": Source(path.resolve(), runs=True) for name, path in libraries.items()}


def _remove_root(folder: Path) -> None:
    """Removes a root, if it is there. It has lost its name before, so that nobody takes what is left of it for a whole
    one. Raises OSError."""
    if folder.exists() and stat.S_ISDIR(folder.lstat().st_mode):
        if not folder.name.startswith("."):
            folder = folder.rename(folder.with_name(f"{REMOVED_PREFIX}{folder.name}"))
        shutil.rmtree(folder)
