"""Packages come from folders, sdists and an index, are unpacked and never run, and what is wrong with one is a line."""

import hashlib
import http.server
import io
import json
import tarfile
import threading

import pytest

from environments.tasks import sources
from environments.tasks.sources import fetch, links, package_of, unpack
from kit.settings import RunError

FILES = {
    "words/__init__.py": b"x = 1\n",
    "tests/test_words.py": b"def test(): pass\n",
    "setup.py": b"raise SystemExit('never run')\n",
}


def sdist(path, files=FILES, top="words-1.2/", members=()):
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(top + name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        for member in members:
            archive.addfile(member)
    return path


def test_a_folder_a_file_and_their_names(tmp_path):
    """By hand: what tells a package's name and version."""
    for name, data in FILES.items():
        (tmp_path / "here" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "here" / name).write_bytes(data)
    found = package_of(str(tmp_path / "here"), tmp_path)
    assert (found.name, found.version, found.origin) == ("here", "0", "folder") and set(found.tests) == {
        "tests/test_words.py"
    }
    (tmp_path / "here" / "PKG-INFO").write_text(
        "Metadata-Version: 2.1\nName: words\nVersion: 1.1\n\nVersion: of nothing\n"
    )
    assert sources.read_identity(tmp_path / "here") == ("words", "1.1")
    (tmp_path / "here" / "pyproject.toml").write_text('[project]\nname = "words"\nversion = "1.3"\n')
    assert sources.read_identity(tmp_path / "here") == ("words", "1.3")
    for other in (
        "project = 3\n",
        "[[project]]\nname = 'words'\n",
        "[project]\nname = ['words']\nversion = '1'\n",
        "x = " + "[" * 100_000,
        '[project]\nname = "../../planted"\nversion = "1"\n',
    ):
        (tmp_path / "here" / "pyproject.toml").write_text(other)
        assert sources.read_identity(tmp_path / "here") == ("words", "1.1")
    path = sdist(tmp_path / "words-1.2.tar.gz")
    found = package_of(str(path), tmp_path)
    assert (found.name, found.version) == ("words", "1.2") and {**found.files, **found.tests} == FILES
    assert found.origin == f"sdist, SHA-256 {hashlib.sha256(path.read_bytes()).hexdigest()}"


def linked(name, target, kind=tarfile.SYMTYPE):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


@pytest.mark.parametrize(
    "member",
    [
        tarfile.TarInfo("../planted"), tarfile.TarInfo("words-1.2/../../planted"),
        linked("words-1.2/out", "../../planted"),
        linked("words-1.2/out", "/etc/passwd"), linked("words-1.2/out", "../../planted", tarfile.LNKTYPE),
        linked("words-1.2/d", "", tarfile.CHRTYPE),
    ],
    ids=lambda member: f"{member.name}-{member.linkname}",
)  # fmt: skip
def test_an_archive_stays_in_its_folder(tmp_path, member):
    """Its members lead nowhere else, by their names or by links, and are no devices."""
    (tmp_path / "in").mkdir()
    (tmp_path / "planted").write_text("as it was")
    with pytest.raises(RunError, match="words-1.2.tar.gz cannot be unpacked") as error:
        unpack(sdist(tmp_path / "words-1.2.tar.gz", members=[member]), tmp_path / "in")
    assert "\n" not in str(error.value) and (tmp_path / "planted").read_text() == "as it was"


def test_archives_that_are_none(tmp_path, monkeypatch):
    (tmp_path / "broken-1.tar.gz").write_bytes(b"no archive")
    with pytest.raises(RunError, match="cannot be unpacked"):
        package_of(str(tmp_path / "broken-1.tar.gz"), tmp_path)
    with pytest.raises(RunError, match="holds 0 folders, not one"):
        package_of(str(sdist(tmp_path / "flat-1.tar.gz", {"a.py": b""}, top="")), tmp_path)
    monkeypatch.setattr(sources, "MEMBERS", 2)
    with pytest.raises(RunError, match="more than 2 files"):
        package_of(str(sdist(tmp_path / "many-1.tar.gz")), tmp_path)
    monkeypatch.setattr(sources, "MEMBERS", 100)
    monkeypatch.setattr(sources, "LARGEST", 10)
    with pytest.raises(RunError, match="or 0 MiB"):
        package_of(str(sdist(tmp_path / "large-1.tar.gz")), tmp_path)


@pytest.mark.parametrize("spec", ["words-1.0.zip", "missing-1.0.tar.gz", "words-1.0-py3-none-any.whl"])
def test_a_file_that_is_no_sdist(tmp_path, spec):
    with pytest.raises(RunError, match="is no sdist: a file NAME-VERSION.tar.gz"):
        package_of(spec, tmp_path)


@pytest.mark.parametrize("spec", ["", "../x", "words>=1", "words==", "a b"])
def test_what_names_no_package(tmp_path, spec, monkeypatch):
    """In a folder that has no neighbours."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises((RunError, ValueError), match="names no package|no source of Python"):
        package_of(spec or "==", tmp_path)


# The index: one of ours, on loopback.


@pytest.fixture
def index(tmp_path, monkeypatch):
    """Address → (type, content), which a test fills; the addresses that were asked for stand in `asked`."""
    pages, asked = {}, []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            kind, data = pages.get(self.path, ("", b""))
            self.send_response(200 if kind else 404)
            self.send_header("Content-Type", kind or "text/plain")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple/")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    pages["asked"] = asked
    yield pages
    server.shutdown()
    server.server_close()


def served(index, tmp_path, *versions, kind="html"):
    rows = []
    for version in versions:
        data = sdist(tmp_path / f"my_words-{version}.tar.gz", top=f"my_words-{version}/").read_bytes()
        index[f"/files/my_words-{version}.tar.gz"] = ("application/gzip", data)
        rows.append(
            (f"my_words-{version}.tar.gz", f"../../files/my_words-{version}.tar.gz", hashlib.sha256(data).hexdigest())
        )
    html = (
        "".join(f'<a href="{url}#sha256={digest}">{name}</a>\n' for name, url, digest in rows)
        + '<a href="x.whl">no hash</a>'
    )
    files = {"files": [{"filename": name, "url": url, "hashes": {"sha256": digest}} for name, url, digest in rows]}
    page = (
        ("text/html", html.encode())
        if kind == "html"
        else ("application/vnd.pypi.simple.v1+json", json.dumps(files).encode())
    )
    index["/simple/my-words/"] = page


@pytest.mark.parametrize("kind", ["html", "json"])
def test_an_sdist_is_fetched_once(index, tmp_path, kind):
    served(index, tmp_path, "1.9", "1.10", "2.0rc1", kind=kind)
    found = package_of("My.Words", tmp_path / "cache")
    assert (found.name, found.version) == ("My.Words", "1.10") and set(found.tests) == {"tests/test_words.py"}
    package_of("my_words==1.10", tmp_path / "cache")
    assert [path for path in index["asked"] if path.startswith("/files/")] == ["/files/my_words-1.10.tar.gz"]
    kept, _ = fetch("my_words", "1.10", tmp_path / "cache")
    kept.write_bytes(b"damaged")
    assert package_of("my_words==1.10", tmp_path / "cache").tests and kept.read_bytes() != b"damaged", (
        "what is damaged is fetched again"
    )


def test_what_is_wrong_with_an_index(index, tmp_path, monkeypatch):
    served(index, tmp_path, "1.0")
    for spec, says in (
        ("nobody==1.0", "the index knows no package nobody"),
        ("my-words==3.0", "the index has no sdist of my-words 3.0; it has 1.0"),
    ):
        with pytest.raises(RunError, match=says):
            package_of(spec, tmp_path / "cache")
    index["/files/my_words-1.0.tar.gz"] = ("application/gzip", b"something else")
    with pytest.raises(RunError, match="is not what the index says: its SHA-256 differs"):
        package_of("my-words==1.0", tmp_path / "cache")
    assert not (tmp_path / "cache").exists() or not [*(tmp_path / "cache").rglob("*.gz")]
    index["/simple/my-words/"] = ("application/vnd.pypi.simple.v1+json", b'{"files": 3}')
    with pytest.raises(RunError, match="is no page of a package index"):
        package_of("my-words==1.0", tmp_path / "cache")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(RunError, match="cannot be reached") as error:
        package_of("my-words==1.0", tmp_path / "cache")
    assert "\n" not in str(error.value)


def test_links_of_a_page():
    """Relative addresses, escaped names; no file without a hash, and none that lies on this machine."""
    digest = "a" * 64
    page = (
        f'<a href="a%2Bb-1.tar.gz#sha256={digest}">x</a><a '
        f'href="file:///etc/passwd#sha256={digest}">y</a><a>z</a><a href="c-1.tar.gz">c</a>'
    )
    assert links(page.encode(), "text/html", "https://x/simple/a/") == {
        "a+b-1.tar.gz": ("https://x/simple/a/a%2Bb-1.tar.gz", digest)
    }
