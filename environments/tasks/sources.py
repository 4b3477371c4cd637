"""Where a package comes from: a folder, an sdist, NAME==VERSION, whose sdist is fetched from the package index, or
generated:N, a package that is made up.
Nothing of it is run here.

pip would run the package's own build program to learn its name. An sdist is only unpacked: its name and version stand
in its file's name (PEP 625), and its hash in the index. A file that was fetched once lies in the cache, under its hash.
"""

from __future__ import annotations

import hashlib
import html.parser
import http.client
import os
import re
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
from pathlib import Path

from environments.deadline import fetch_answer
from environments.sandbox.visible import one_line
from environments.tasks import generated
from environments.tasks.package import Package, sanitised
from kit.disk import atomic_write, parse_json, read_toml
from kit.settings import RunError

__all__ = ["INDEX", "fetch", "links", "package_of", "unpack"]

INDEX = "https://pypi.org/simple"
"""Where sdists are looked for, unless PIP_INDEX_URL says otherwise. A page is HTML (PEP 503) or JSON (PEP 691)."""
SDIST = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)-(?P<version>[0-9][A-Za-z0-9.!+_]*)\.(tar\.gz|tgz)")
SPEC = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(==(?P<version>[0-9][A-Za-z0-9.!+_]*))?")
LARGEST, MEMBERS, SECONDS, SILENCE = 64 << 20, 20_000, 900.0, 60.0
"""Bytes of an sdist, and of all that is in it four times as many; files in it; seconds of a whole answer of the index,
and those for which it may say nothing."""
UNPACK, UNPACKING = Path(__file__).parent / "inside" / "unpack.py", 600.0
"""The program that unpacks, and seconds of wall-clock that it may take; it has a limit on processor time as well."""


def package_of(spec: str, cache: Path) -> Package:
    """The package that a folder, an sdist or NAME==VERSION names; of NAME alone, its newest version in the index; of
    generated:N, one that is made up (`generated.py`).
    `cache`: where sdists are kept. Raises RunError, in one line, where there is none, and ValueError where there is one
    that is no material for tasks."""
    path = Path(spec)
    if match := generated.SPEC.fullmatch(spec):
        return generated.generated_package(int(match["number"]), heldout=bool(match["heldout"]))
    if path.is_dir():
        return sanitised(path, *read_identity(path), "folder")
    if path.exists() or spec.endswith((".gz", ".tgz", ".zip", ".whl")):
        match = SDIST.fullmatch(path.name)
        if match is None or not path.is_file():
            raise RunError(f"{spec} is no sdist: a file NAME-VERSION.tar.gz, or a folder, or NAME==VERSION")
        return _read_sdist(path, match["name"], match["version"])
    spec_match = SPEC.fullmatch(spec)
    if spec_match is None:
        raise RunError(f"{spec!r} names no package: expected a folder, an sdist, NAME==VERSION, or generated:N")
    path, version = fetch(spec_match["name"], spec_match["version"], cache)
    return _read_sdist(path, spec_match["name"], version)


def read_identity(folder: Path) -> tuple[str, str]:
    """Name and version of a checkout, by its pyproject.toml or PKG-INFO; else the folder's name, and "0". Files are
    named after them, so they consist of letters, digits and a few signs."""
    try:
        project = read_toml(folder / "pyproject.toml").get("project")
        if isinstance(project, dict) and _are_plain(project.get("name"), project.get("version")):
            return project["name"], project["version"]
    except (OSError, ValueError, RecursionError):
        pass
    try:
        head = (folder / "PKG-INFO").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
        fields = dict(line.split(": ", 1) for line in head.splitlines() if ": " in line)
        if _are_plain(fields["Name"], fields["Version"]):
            return fields["Name"], fields["Version"]
    except (OSError, KeyError):
        pass
    return re.sub("[^A-Za-z0-9._-]+", "-", folder.resolve().name) or "package", "0"


def _are_plain(*names: object) -> bool:
    return all(isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._!+-]*", name) for name in names)


def _read_sdist(path: Path, name: str, version: str) -> Package:
    if path.stat().st_size > 4 * LARGEST:
        raise RunError(f"{path.name} holds more than {MEMBERS} files or {4 * LARGEST >> 20} MiB")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    with tempfile.TemporaryDirectory(prefix="etude-sdist-") as folder:
        return sanitised(unpack(path, Path(folder)), name, version, f"sdist, SHA-256 {digest}")


def unpack(path: Path, folder: Path) -> Path:
    """Unpacks an sdist into a folder, and returns the one folder that is in it. The archive is read in a process of its
    own (inside/unpack.py). Raises RunError, in one line, for whatever is wrong with it: damage, names and links that
    lead out, devices, and too many files, bytes or folders."""
    program = [sys.executable, "-I", "-B", str(UNPACK)]
    arguments = [str(path.resolve()), str(folder), str(4 * LARGEST), str(MEMBERS)]
    null_device = subprocess.DEVNULL
    with tempfile.TemporaryFile() as answer:
        try:
            subprocess.run(
                [*program, *arguments], stdin=null_device, stdout=answer, stderr=null_device, timeout=UNPACKING
            )
        except subprocess.TimeoutExpired:
            raise RunError(f"{path.name} cannot be unpacked within {UNPACKING:g} seconds") from None
        answer.seek(0)
        try:
            error = parse_json(answer.read(1 << 16))["error"]
        except (ValueError, LookupError):
            error = "it takes too much memory or processor time"  # a signal ended the process
    if error is not None:
        raise RunError(f"{path.name} cannot be unpacked: {one_line(str(error))}")
    folders = [entry for entry in folder.iterdir() if entry.is_dir() and not entry.is_symlink()]
    if len(folders) != 1:
        raise RunError(f"{path.name} is no sdist: it holds {len(folders)} folders, not one")
    return folders[0]


class _Anchors(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        address = dict(attrs).get("href")
        if tag == "a" and address:
            self.links.append((urllib.parse.unquote(urllib.parse.urlsplit(address).path.rpartition("/")[2]), address))


def links(page: bytes, kind: str, address: str) -> dict[str, tuple[str, str]]:
    """File → its address and its SHA-256, of a page of the index; files without a hash are left out. `kind`: the page's
    type. Raises ValueError."""
    if "json" in kind:
        rows = [(row["filename"], row["url"], row["hashes"].get("sha256", "")) for row in parse_json(page)["files"]]
    else:
        parser = _Anchors()
        parser.feed(page.decode(errors="replace"))
        rows = [
            (name, url, dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(url).fragment)).get("sha256", ""))
            for name, url in parser.links
        ]
    absolute_rows = (
        (name, urllib.parse.urldefrag(urllib.parse.urljoin(address, url))[0], digest) for name, url, digest in rows
    )
    return {
        name: (url, digest)
        for name, url, digest in absolute_rows
        if re.fullmatch("[0-9a-f]{64}", digest) and url.startswith(("https:", "http:"))
    }


def fetch(name: str, version: str | None, cache: Path) -> tuple[Path, str]:
    """The sdist of a package and its version, from the cache or the index. Raises RunError."""
    address = f"{(os.environ.get('PIP_INDEX_URL') or INDEX).rstrip('/')}/{re.sub('[-_.]+', '-', name).lower()}/"
    page, kind = _fetch_url(
        address, f"the index knows no package {name}", "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
    )
    try:
        files = links(page, kind, address)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RunError(f"{address} is no page of a package index") from None
    sdists = {match["version"]: (file, *files[file]) for file in files if (match := SDIST.fullmatch(file))}
    target_version = version or max(
        (candidate for candidate in sdists if re.fullmatch(r"[0-9.]+", candidate)), key=_parse_version, default=""
    )
    if target_version not in sdists:
        newest_versions = ", ".join(sorted(sdists, key=_parse_version)[-5:])
        raise RunError(
            f"the index has no sdist of {name} {target_version}".rstrip()
            + (f"; it has {newest_versions}" if newest_versions else "")
        )
    file, url, digest = sdists[target_version]
    cached_path = cache / digest / file
    if not (cached_path.is_file() and hashlib.sha256(cached_path.read_bytes()).hexdigest() == digest):
        data, _ = _fetch_url(url, f"the index has lost {file}")
        if hashlib.sha256(data).hexdigest() != digest:
            raise RunError(f"{url} is not what the index says: its SHA-256 differs; try again later")
        cached_path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(cached_path, data)
    return cached_path, target_version


def _parse_version(version: str) -> list[int]:
    return [int(part) for part in re.findall("[0-9]+", version)]


def _fetch_url(address: str, missing: str, accept: str = "*/*") -> tuple[bytes, str]:
    try:
        request = urllib.request.Request(address, headers={"Accept": accept, "User-Agent": "etude"})
        answer = fetch_answer(request, SECONDS, LARGEST, silence=SILENCE)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise RunError(f"{address} cannot be reached: {one_line(str(getattr(error, 'reason', error)))}") from None
    if answer.status >= 300:
        raise RunError(missing if answer.status == 404 else f"{address} answers {answer.status}")
    return answer.data, answer.kind
