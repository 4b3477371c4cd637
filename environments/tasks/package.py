"""A package as material for tasks: the files that an agent may see, its tests, and where it comes from.

What goes into a tree is chosen, not what stays out of it: source, tests and the data and pages that belong to them.
Histories, caches, builds, other copies of the source and its rendered pages hold the answer to a task (see
environments/leaks.py), and none of them is needed to work."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

__all__ = ["Package", "is_collected", "licence_of", "sanitised", "tests_among"]

EXCLUDED_NAMES = re.compile(
    r"\..*|__pycache__|site-packages|.*\.(egg-info|dist-info|egg)|htmlcov|_build|node_modules|"
    r".*(~|\.(orig|rej|bak|sw[a-p]|pyc|pyo|so|pyd|whl|zip|tar|gz|bz2|xz|egg|db|sqlite|patch|diff|ipynb|html|log))",
    re.IGNORECASE | re.DOTALL,
)
"""Names of folders and files that never come into a tree."""
BUILD_NAMES = re.compile(r"build|dist|venv|env|cover|PKG-INFO|tags", re.IGNORECASE)
"""Names that what a tool has made often has. A folder of this name that is a package, or lies in one, is source."""
TEXTS = r".*\.(py|pyi|txt|md|rst|toml|cfg|ini|json|csv|yaml|yml|po|mo|typed)"
INCLUDED_NAMES = re.compile(rf"{TEXTS}|(LICEN[CS]E|COPYING|NOTICE|AUTHORS).*", re.IGNORECASE)
LARGEST = 256 << 20
"""Bytes of all files of a package."""
LICENCES = {
    "MIT": "permission is hereby granted, free of charge, to any person obtaining a copy",
    "Apache-2.0": "apache license version 2.0",
    "BSD-3-Clause": "neither the name of",
    "BSD-2-Clause": "redistribution and use in source and binary forms",
    "ISC": "permission to use, copy, modify, and/or distribute this software for any purpose",
    "PSF-2.0": "python software foundation license",
    "Unlicense": "this is free and unencumbered software released into the public domain",
}
"""Licence → words that its text has, the narrower one first where two share words."""


@dataclass(frozen=True)
class Package:
    """What tasks are made of."""

    name: str
    version: str
    files: Mapping[str, bytes]
    """Everything that an agent may see but the tests."""
    tests: Mapping[str, bytes]
    licence: str
    """By its SPDX name, or "unknown"."""
    origin: str
    """Where it was taken from: "sdist", "installed", "folder" or "generated", and what identifies it there."""

    @property
    def digest(self) -> str:
        """SHA-256 over all files, in the order of their names: a recipe that names it gives the same tasks or none."""
        sha256 = hashlib.sha256()
        for name, data in sorted({**self.files, **self.tests}.items()):
            sha256.update(f"{name}\0{len(data)}\0".encode() + data)
        return sha256.hexdigest()

    def remove_tests(self, left_out: Collection[str]) -> Package:
        """The package without some files of tests."""
        return replace(self, tests={name: data for name, data in self.tests.items() if name not in left_out})


def is_collected(name: str) -> bool:
    """Whether pytest looks for tests in a file of this name, as far as it is not told otherwise."""
    return re.fullmatch(r"(.*/)?(test_[^/]*|[^/]*_test)\.py", name) is not None


def is_test(name: str) -> bool:
    """Whether a file belongs to the tests, by its name. A folder called testing inside of a package is source."""
    *folders, file = name.split("/")
    return (
        any(folder.lower() in ("test", "tests") for folder in folders)
        or folders[:1] == ["testing"]
        or file.startswith("test_")
        or file in ("conftest.py", "tests.py")
        or is_collected(name)
    )


def tests_among(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files that belong to the tests. A file called NAME_test.py that defines no test is source, and so is a folder
    called testing in which pytest collects nothing."""
    names = {name for name in files if is_test(name)}
    if not any(name.startswith("testing/") and is_collected(name) for name in names):
        names -= {name for name in names if name.startswith("testing/") and not is_test(name.partition("/")[2])}
    for name in [name for name in names if name.endswith("_test.py") and not is_test(name.replace("_test.py", ".py"))]:
        if not re.search(rb"^\s*(async\s+)?(def|class)\s+test", files[name], re.MULTILINE | re.IGNORECASE):
            names.remove(name)
    return {name: files[name] for name in files if name in names}


def licence_of(files: Mapping[str, bytes]) -> str:
    """The licence whose words a file called LICENSE, LICENCE or COPYING has."""
    for name in sorted(files):
        if re.fullmatch(r"(LICEN[CS]E|COPYING)[^/]*", name.rpartition("/")[2], re.IGNORECASE):
            text = " ".join(re.sub(r"[*#]", " ", files[name].decode(errors="replace")).lower().split())
            for licence, words in LICENCES.items():
                if words in text or words.replace(" version", ", version") in text:
                    return licence
    return "unknown"


def sanitised(folder: Path, name: str, version: str, origin: str, largest: int = 1 << 20) -> Package:
    """The package that lies in a folder: its regular files of the kinds that are needed. Links are not followed, and
    files of more than `largest` bytes are left out. Raises ValueError for a folder without Python or without tests, for
    one that holds too much, and for files that cannot be read."""
    files: dict[str, bytes] = {}
    link_count, size = 0, 0
    for parent, subfolders, entries in os.walk(folder):
        relative = Path(parent).relative_to(folder).as_posix()
        prefix = "" if relative == "." else relative + "/"
        is_in_package = "__init__.py" in entries
        link_count += sum(Path(parent, entry).is_symlink() for entry in (*subfolders, *entries))
        subfolders[:] = sorted(entry for entry in subfolders if _is_part(Path(parent, entry), is_in_package))
        for entry in sorted(entries):
            path = Path(parent, entry)
            if (
                not _is_text(entry)
                or EXCLUDED_NAMES.fullmatch(entry)
                or BUILD_NAMES.fullmatch(entry)
                or not INCLUDED_NAMES.fullmatch(entry)
            ):
                continue
            try:
                status = path.lstat()
                if stat.S_ISREG(status.st_mode) and status.st_size <= largest:
                    files[prefix + entry] = path.read_bytes()
                    size += status.st_size
            except OSError as error:
                raise ValueError(f"{path} cannot be read: {error.strerror}") from error
            if size > LARGEST:
                raise ValueError(f"{folder} holds more than {LARGEST >> 20} MiB; name the folder of one package")
    tests = tests_among(files)
    source_files = {path: data for path, data in files.items() if path not in tests}
    note = f"; its {link_count} symbolic links are not followed" if link_count else ""
    if not any(path.endswith(".py") for path in source_files):
        raise ValueError(f"{folder} holds no source of Python{note}")
    if not any(path.endswith(".py") and not path.endswith(("/__init__.py", "conftest.py")) for path in tests):
        raise ValueError(f"{folder} holds no tests; tasks need some: take an sdist or a checkout that has them{note}")
    if not any(is_collected(path) for path in tests):
        raise ValueError(f"{folder} holds no tests that pytest collects: it takes test_NAME.py and NAME_test.py alone")
    return Package(name, version, source_files, tests, licence_of(source_files), origin)


def _is_part(folder: Path, is_in_package: bool) -> bool:
    """Whether a folder may hold source. `is_in_package`: whether it lies directly in a package."""
    if not _is_text(folder.name) or EXCLUDED_NAMES.fullmatch(folder.name):
        return False
    return not BUILD_NAMES.fullmatch(folder.name) or is_in_package or (folder / "__init__.py").is_file()


def _is_text(name: str) -> bool:
    """Whether a name is text that can be printed in one line; others cannot be named to anybody."""
    return name.isprintable()
