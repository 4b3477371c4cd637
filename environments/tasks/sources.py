"""Where a package comes from: a folder, an sdist, or NAME==VERSION, whose sdist is fetched from the package index. Nothing of it is run here.

pip would run the package's own build program to learn its name. An sdist is only unpacked: its name and version stand in its file's name (PEP 625),
and its hash in the index. A file that was fetched once lies in the cache, under its hash.
"""

from __future__ import annotations

import hashlib
import html.parser
import http.client
import json
import os
import re
import tarfile
import tempfile
import tomllib
import urllib.parse
import urllib.request
from pathlib import Path

from environments.deadline import answer_of
from environments.sandbox.visible import one_line
from environments.tasks.package import Package, sanitised
from kit.disk import atomic_write
from kit.settings import RunError

__all__ = ["INDEX", "fetch", "links", "package_of", "unpack"]

INDEX = "https://pypi.org/simple"
"""Where sdists are looked for, unless PIP_INDEX_URL says otherwise. A page is HTML (PEP 503) or JSON (PEP 691)."""
SDIST = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)-(?P<version>[0-9][A-Za-z0-9.!+_]*)\.(tar\.gz|tgz)")
SPEC = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(==(?P<version>[0-9][A-Za-z0-9.!+_]*))?")
LARGEST, MEMBERS, SECONDS, SILENCE = 64 << 20, 20_000, 900.0, 60.0
"""Bytes of an sdist, and of all that is in it four times as many; files in it; seconds
of a whole answer of the index, and those for which it may say nothing."""


def package_of(spec: str, cache: Path) -> Package:
    """The package that a folder, an sdist or NAME==VERSION names; of NAME alone, its newest version in the index. `cache`: where sdists are kept.
    Raises RunError, in one line, where there is none, and ValueError where there is one that is no material for tasks."""
    path = Path(spec)
    if path.is_dir():
        return sanitised(path, *named(path), "folder")
    if path.exists() or spec.endswith((".gz", ".tgz", ".zip", ".whl")):
        found = SDIST.fullmatch(path.name)
        if found is None or not path.is_file():
            raise RunError(f"{spec} is no sdist: a file NAME-VERSION.tar.gz, or a folder, or NAME==VERSION")
        return _of_sdist(path, found["name"], found["version"])
    asked = SPEC.fullmatch(spec)
    if asked is None:
        raise RunError(f"{spec!r} names no package: expected a folder, an sdist, or NAME==VERSION")
    path, version = fetch(asked["name"], asked["version"], cache)
    return _of_sdist(path, asked["name"], version)


def named(folder: Path) -> tuple[str, str]:
    """Name and version of a checkout, by its pyproject.toml or PKG-INFO; else the folder's name, and "0"."""
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8")).get("project")
        if isinstance(project, dict) and isinstance(project.get("name"), str) and isinstance(project.get("version"), str):
            return project["name"], project["version"]
    except (OSError, ValueError, RecursionError):
        pass
    try:
        said = (folder / "PKG-INFO").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
        fields = dict(line.split(": ", 1) for line in said.splitlines() if ": " in line)
        return fields["Name"], fields["Version"]
    except (OSError, KeyError):
        return folder.resolve().name, "0"


def _of_sdist(path: Path, name: str, version: str) -> Package:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    with tempfile.TemporaryDirectory(prefix="etude-sdist-") as folder:
        return sanitised(unpack(path, Path(folder)), name, version, f"sdist, SHA-256 {digest}")


def unpack(path: Path, folder: Path) -> Path:
    """Unpacks an sdist into a folder, and gives the one folder that is in it. Raises RunError for links out of it, devices, and too many files."""
    try:
        with tarfile.open(path) as archive:
            size = 0
            for number, member in enumerate(archive):
                size += member.size
                if number >= MEMBERS or size > 4 * LARGEST:
                    raise RunError(f"{path.name} holds more than {MEMBERS} files or {4 * LARGEST >> 20} MiB")
            archive.extractall(folder, filter="data")
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        raise RunError(f"{path.name} cannot be unpacked: {one_line(str(error))}") from None
    tops = [one for one in folder.iterdir() if one.is_dir() and not one.is_symlink()]
    if len(tops) != 1:
        raise RunError(f"{path.name} is no sdist: it holds {len(tops)} folders, not one")
    return tops[0]


class _Anchors(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        address = dict(attrs).get("href")
        if tag == "a" and address:
            self.found.append((urllib.parse.unquote(urllib.parse.urlsplit(address).path.rpartition("/")[2]), address))


def links(page: bytes, kind: str, address: str) -> dict[str, tuple[str, str]]:
    """File → its address and its SHA-256, of a page of the index; files without a hash are left out. `kind`: the page's type. Raises ValueError."""
    if "json" in kind:
        rows = [(row["filename"], row["url"], row["hashes"].get("sha256", "")) for row in json.loads(page)["files"]]
    else:
        parser = _Anchors()
        parser.feed(page.decode(errors="replace"))
        rows = [(name, url, dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(url).fragment)).get("sha256", "")) for name, url in parser.found]
    whole = ((name, urllib.parse.urldefrag(urllib.parse.urljoin(address, url))[0], digest) for name, url, digest in rows)
    return {name: (url, digest) for name, url, digest in whole if re.fullmatch("[0-9a-f]{64}", digest) and url.startswith(("https:", "http:"))}


def fetch(name: str, version: str | None, cache: Path) -> tuple[Path, str]:
    """The sdist of a package and its version, from the cache or the index. Raises RunError."""
    address = f"{(os.environ.get('PIP_INDEX_URL') or INDEX).rstrip('/')}/{re.sub('[-_.]+', '-', name).lower()}/"
    page, kind = _get(address, f"the index knows no package {name}", "application/vnd.pypi.simple.v1+json, text/html;q=0.5")
    try:
        files = links(page, kind, address)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RunError(f"{address} is no page of a package index") from None
    sdists = {found["version"]: (file, *files[file]) for file in files if (found := SDIST.fullmatch(file))}
    wanted = version or max((one for one in sdists if re.fullmatch(r"[0-9.]+", one)), key=_order, default="")
    if wanted not in sdists:
        known = ", ".join(sorted(sdists, key=_order)[-5:])
        raise RunError(f"the index has no sdist of {name} {wanted}".rstrip() + (f"; it has {known}" if known else ""))
    file, url, digest = sdists[wanted]
    kept = cache / digest / file
    if not (kept.is_file() and hashlib.sha256(kept.read_bytes()).hexdigest() == digest):
        data, _ = _get(url, f"the index has lost {file}")
        if hashlib.sha256(data).hexdigest() != digest:
            raise RunError(f"{url} is not what the index says: its SHA-256 differs; try again later")
        kept.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(kept, data)
    return kept, wanted


def _order(version: str) -> list[int]:
    return [int(part) for part in re.findall("[0-9]+", version)]


def _get(address: str, missing: str, accept: str = "*/*") -> tuple[bytes, str]:
    try:
        request = urllib.request.Request(address, headers={"Accept": accept, "User-Agent": "etude"})
        answer = answer_of(request, SECONDS, LARGEST, silence=SILENCE)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise RunError(f"{address} cannot be reached: {one_line(str(getattr(error, 'reason', error)))}") from None
    if answer.status >= 300:
        raise RunError(missing if answer.status == 404 else f"{address} answers {answer.status}")
    return answer.data, answer.kind
