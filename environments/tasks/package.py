"""A package as material for tasks: the files that an agent may see, its tests, and where it comes from.

What goes into a tree is chosen, not what stays out of it: source, tests and the data and pages that belong to them. Histories, caches, builds, other
copies of the source and its rendered pages hold the answer to a task (see environments/leaks.py), and none of them is needed to work.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

__all__ = ["Package", "licence_of", "sanitised"]

OUT = re.compile(
    r"(.*/)?(\.[^/]*|__pycache__|build|dist|site-packages|[^/]*\.(egg-info|dist-info|egg)|htmlcov|_build|venv|env|node_modules)(/.*)?|"
    r".*(~|\.(orig|rej|bak|sw[a-p]|pyc|pyo|so|pyd|whl|zip|tar|gz|bz2|xz|egg|db|sqlite|patch|diff|ipynb|html|log))|(.*/)?(PKG-INFO|tags|TAGS|cover)",
    re.IGNORECASE | re.DOTALL,
)
KEPT = re.compile(r".*\.(py|pyi|txt|md|rst|toml|cfg|ini|json|csv|yaml|yml|po|mo|typed)|(.*/)?(LICEN[CS]E|COPYING|NOTICE|AUTHORS)[^/]*", re.IGNORECASE)
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
    """Where it was taken from: "sdist", "installed" or "folder", and what identifies it there."""

    @property
    def digest(self) -> str:
        """SHA-256 over all files, in the order of their names: a recipe that names it gives the same tasks or none."""
        found = hashlib.sha256()
        for name, data in sorted({**self.files, **self.tests}.items()):
            found.update(f"{name}\0{len(data)}\0".encode() + data)
        return found.hexdigest()

    def without(self, left_out: Collection[str]) -> Package:
        """The package without some files of tests."""
        return replace(self, tests={name: data for name, data in self.tests.items() if name not in left_out})


def is_test(name: str) -> bool:
    """Whether a file belongs to the tests."""
    parts = name.split("/")
    return (
        any(part in ("test", "tests", "testing") for part in parts[:-1]) or parts[-1].startswith("test_") or parts[-1] in ("conftest.py", "tests.py")
    )


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
    """The package that lies in a folder: its regular files of the kinds that are needed. Links are not followed, and files of more than `largest`
    bytes are left out. Raises ValueError for a folder without Python or without tests."""
    found: dict[str, bytes] = {}
    for below, folders, files in os.walk(folder):
        relative = Path(below).relative_to(folder).as_posix()
        prefix = "" if relative == "." else relative + "/"
        folders[:] = sorted(one for one in folders if not OUT.fullmatch(prefix + one))
        for one in sorted(files):
            path = Path(below, one)
            what = path.lstat()
            if not OUT.fullmatch(prefix + one) and KEPT.fullmatch(prefix + one) and stat.S_ISREG(what.st_mode) and what.st_size <= largest:
                found[prefix + one] = path.read_bytes()
    tests = {one: data for one, data in found.items() if is_test(one)}
    rest = {one: data for one, data in found.items() if one not in tests}
    if not any(one.endswith(".py") for one in rest):
        raise ValueError(f"{folder} holds no source of Python")
    if not any(one.rpartition("/")[2].startswith("test") and one.endswith(".py") for one in tests):
        raise ValueError(f"{folder} holds no tests; tasks need some: take an sdist or a checkout that has them")
    return Package(name, version, rest, tests, licence_of(rest), origin)
