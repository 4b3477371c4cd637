"""A door out of sandboxes: what its rules let through, what servers and folders may answer, and that all of it is
written down."""

import posixpath
import socket
import threading
import time
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.deadline import Deadline
from environments.egress import upstream as egress
from environments.egress.door import Door
from environments.egress.rules import HEAD, Host, Refused, Rules, check_request
from kit.disk import read_lines
from tests.environments.upstream import answering

RULES = Rules({"pypi.index": Host("https://pypi.org"), "looked.at": Host("https://example.org", ("HEAD",))})
CASES = {
    "another host": (b"GET http://evil.test/ HTTP/1.1", 403),
    "a number": (b"GET http://127.0.0.1/ HTTP/1.1", 403),
    "a number in another form": (b"GET http://2130706433/ HTTP/1.1", 403),
    "a hexadecimal number": (b"GET http://0x7f.1/ HTTP/1.1", 403),
    "a number of IPv6": (b"GET http://[::1]/ HTTP/1.1", 400),
    "localhost": (b"GET http://localhost/ HTTP/1.1", 403),
    "a name beneath": (b"GET http://a.pypi.index/ HTTP/1.1", 403),
    "a name with a dot behind it": (b"GET http://pypi.index./ HTTP/1.1", 403),
    "the upstream's own name": (b"GET http://pypi.org/ HTTP/1.1", 403),
    "a port": (b"GET http://pypi.index:22/ HTTP/1.1", 400),
    "a user": (b"GET http://pypi.index@127.0.0.1/ HTTP/1.1", 400),
    "a user with a password": (b"GET http://a:b@pypi.index/ HTTP/1.1", 400),
    "a backslash in the host": (b"GET http://pypi.index\\@evil.test/ HTTP/1.1", 400),
    "an escape in the host": (b"GET http://pypi%2eindex/ HTTP/1.1", 400),
    "another scheme": (b"GET https://pypi.index/ HTTP/1.1", 400),
    "a file": (b"GET file:///etc/passwd HTTP/1.1", 400),
    "no host": (b"GET /simple/ HTTP/1.1\r\nHost: pypi.index", 400),
    "a tunnel": (b"CONNECT 127.0.0.1:22 HTTP/1.1", 405),
    "a tunnel to a host of the list": (b"CONNECT pypi.index:443 HTTP/1.1", 405),
    "a method that changes something": (b"POST http://pypi.index/ HTTP/1.1", 405),
    "a method that is unknown": (b"FROB http://pypi.index/ HTTP/1.1", 405),
    "a method that another host has": (b"GET http://looked.at/ HTTP/1.1", 405),
    "a query": (b"GET http://pypi.index/a?secret HTTP/1.1", 403),
    "an empty query": (b"GET http://pypi.index/a? HTTP/1.1", 403),
    "a fragment": (b"GET http://pypi.index/a#b HTTP/1.1", 403),
    "dots": (b"GET http://pypi.index/a/../b HTTP/1.1", 403),
    "a dot": (b"GET http://pypi.index/./b HTTP/1.1", 403),
    "escaped dots": (b"GET http://pypi.index/a/%2e%2E/b HTTP/1.1", 403),
    "dots that are escaped twice": (b"GET http://pypi.index/%252e%252e/b HTTP/1.1", 403),
    "an escaped slash": (b"GET http://pypi.index/a%2f%2fb HTTP/1.1", 403),
    "two slashes": (b"GET http://pypi.index//evil.test/ HTTP/1.1", 403),
    "a backslash": (b"GET http://pypi.index/a\\b HTTP/1.1", 403),
    "an escaped zero": (b"GET http://pypi.index/a%00b HTTP/1.1", 403),
    "an escaped line": (b"GET http://pypi.index/a%0d%0aHost:b HTTP/1.1", 403),
    "a body": (b"GET http://pypi.index/ HTTP/1.1\r\nContent-Length: 3", 400),
    "a body in pieces": (b"GET http://pypi.index/ HTTP/1.1\r\nTransfer-Encoding: chunked", 400),
    "another protocol": (b"GET http://pypi.index/ HTTP/1.1\r\nUpgrade: websocket", 400),
    "a pause before a body": (b"GET http://pypi.index/ HTTP/1.1\r\nExpect: 100-continue", 400),
    "a folded header": (b"GET http://pypi.index/ HTTP/1.1\r\nAccept: a\r\n b", 400),
    "a space in a header's name": (b"GET http://pypi.index/ HTTP/1.1\r\nContent-Length : 3", 400),
    "a lonely end of a line": (b"GET http://pypi.index/ HTTP/1.1\r\nAccept: a\nX: b", 400),
    "two requests in a line": (b"GET http://pypi.index/ HTTP/1.1 GET http://evil.test/ HTTP/1.1", 400),
    "an old protocol": (b"GET http://pypi.index/", 400),
    "nothing": (b"", 400),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_refused(name):
    head, status = CASES[name]
    with pytest.raises(Refused) as found:
        check_request(head, RULES)
    assert found.value.status == status and found.value.reason and "\n" not in found.value.reason


def test_what_goes_on():
    """The method, the path without escapes, and the headers of the list; names alone of all others."""
    lines = [
        "GET http://PyPI.Index:80/a%2Bb/c HTTP/1.1",
        "Host: evil.test",
        "Accept: */*",
        "AUTHORIZATION: Basic secret",
        "cookie: a",
        "Content-Length: 0",
    ]
    asked = check_request("\r\n".join(lines).encode(), RULES)
    assert (asked.method, asked.host, asked.path, asked.headers) == ("GET", "pypi.index", "/a+b/c", {"accept": "*/*"})
    assert asked.dropped == ("host", "authorization", "cookie", "content-length") and "secret" not in repr(asked)
    assert check_request(b"HEAD http://looked.at HTTP/1.0\r\nAccept: " + b"x" * 301, RULES).headers == {}


PARTS = [
    "GET ",
    "HEAD ",
    "CONNECT ",
    "http://",
    "pypi.index",
    "looked.at",
    "evil.test",
    ":80",
    "/",
    "..",
    "%2e",
    "%2f",
    "?",
    "#",
    "@",
    " HTTP/1.1",
    "\r\n",
]


@given(st.binary() | st.lists(st.sampled_from(PARTS) | st.text(max_size=3)).map(lambda parts: "".join(parts).encode()))
def test_whatever_goes_on_is_on_the_list(head):
    """For any bytes: no other error than Refused, and of what goes on there is one reading only."""
    try:
        asked = check_request(head, RULES)
    except Refused:
        return
    assert asked.method in RULES.hosts[asked.host].methods and {*asked.headers} <= {*RULES.headers}
    assert posixpath.normpath(asked.path) == (asked.path.rstrip("/") or "/") and asked.path.isascii()
    assert not {*asked.path} & {*"%?#\\\r\n\0 "} and not {*"".join(asked.headers.values())} & {*"\r\n"}


@given(st.text("abc/.%25e", max_size=12))
def test_a_path_that_goes_on_is_read_once(path):
    """What stays when escapes are taken out has none, and goes through again as it is."""
    try:
        once = check_request(f"GET http://pypi.index/{path} HTTP/1.1".encode(), RULES).path
    except Refused:
        return
    assert check_request(f"GET http://pypi.index{once} HTTP/1.1".encode(), RULES).path == once


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "1", "a.1", "A.b", "a..b", "-a", "a:1", "", "a b", "a\n"])
def test_names_that_are_none(name):
    with pytest.raises(ValueError, match="name"):
        Rules({name: Host("https://pypi.org")})


@pytest.mark.parametrize(
    "upstream", ["pypi.org", "ftp://a", "https://a/b", "https://a:b@c", "https://a?b", "https://a\nb", ""]
)
def test_places_that_are_none(upstream):
    with pytest.raises(ValueError, match="a place outside"):
        Host(upstream)
    with pytest.raises(ValueError, match="methods"):
        Host("https://a", ("GET", "POST"))


@contextmanager
def opened(hosts, log, **bounds):
    """A door that answers on this machine's loopback, without a sandbox: ask(words) → status, headers, body."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()

    def ask(target, method="GET", *headers):
        with socket.create_connection(address, 20) as one:
            one.sendall("\r\n".join([f"{method} {target} HTTP/1.1", *headers, "", ""]).encode())
            with one.makefile("rb") as file:
                said = file.read()
        head, _, body = said.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        return int(first.split()[1]), dict(line.split(": ", 1) for line in lines), body

    with Door(Rules(hosts, **bounds), log) as door:
        door.serve(listener)
        yield ask, address


def test_headers_and_cookies_stay_on_their_side(tmp_path):
    with answering() as (server, heard), opened({"a.index": Host(server)}, tmp_path / "log") as (ask, _):
        sent = [
            "Host: b",
            "Authorization: Bearer planted",
            "Cookie: planted",
            "X-Any: planted",
            "User-Agent: planted",
            "Accept: text/plain",
        ]
        status, headers, body = ask("http://a.index/x", "GET", *sent)
        assert (status, body) == (200, b"plain") and headers.keys() == {"content-type", "content-length", "connection"}
        method, path, got = heard[0]
        assert (method, path, got["accept"]) == ("GET", "/x", "text/plain")
        assert "planted" not in str(heard) and got["Host"] == server.removeprefix("http://")
        (line,) = read_lines(tmp_path / "log")
        assert line["dropped"] == ["host", "authorization", "cookie", "x-any", "user-agent"] and "planted" not in str(
            line
        )
        assert [line[name] for name in ("verdict", "method", "host", "path")] == ["allowed", "GET", "a.index", "/x"]
        assert (line["status"], line["bytes"]) == (200, 5)
        assert ask("http://a.index/x", "HEAD")[1]["content-length"] == "1234"


def test_redirects_and_links_lead_to_hosts_of_the_list_only(tmp_path):
    with (
        answering() as (other, told),
        answering(other) as (server, _),
        opened({"a.index": Host(server)}, tmp_path / "log") as (ask, _),
    ):
        for path in ("away", "tricky"):
            status, headers, body = ask(f"http://a.index/{path}")
            assert status == 502 and "location" not in headers and b"not on the list" in body
        status, headers, _ = ask("http://a.index/near")
        assert status == 302 and headers["location"] == "http://a.index/plain"
        page = ask("http://a.index/page")[2].decode()
        assert 'href="http://a.index/files/a.whl"' in page and f'href="{other}/b.whl"' in page and not told
        assert f'href="{server}0/c"' in page  # another port, which only begins like the server's
        assert [line["verdict"] for line in read_lines(tmp_path / "log")] == [
            "refused",
            "refused",
            "allowed",
            "allowed",
        ]


@pytest.mark.parametrize("path", ["claims", "endless", "short", "packed"])
def test_answers_that_are_too_large_or_broken_do_not_go_in(tmp_path, path):
    with answering() as (server, _), opened({"a.index": Host(server)}, tmp_path / "log", largest=100_000) as (ask, _):
        status, _, body = ask(f"http://a.index/{path}")
        assert status == 502 and len(body) < 200
        (line,) = read_lines(tmp_path / "log")
        assert line["verdict"] == "refused" and line["why"].startswith("the answer")


@pytest.mark.parametrize("path", ["slow", "silent", "dribbles"])
def test_a_slow_server_is_left(tmp_path, path):
    """Also one that says a little now and then, so that no single wait is long."""
    with answering() as (server, _), opened({"a.index": Host(server)}, tmp_path / "log", seconds=0.3) as (ask, address):
        assert ask(f"http://a.index/{path}")[0] == 504
        (line,) = read_lines(tmp_path / "log")
        assert (line["verdict"], line["status"], line["why"]) == ("failed", 504, "more than 0.3 seconds")


def test_a_server_is_left_whichever_clock_is_first(tmp_path, monkeypatch):
    """The socket's own timeout may come before the deadline: that was told as another failure, 502."""
    monkeypatch.setattr("environments.egress.door.Deadline", lambda seconds: Deadline(60))
    with answering() as (server, _), opened({"a.index": Host(server)}, tmp_path / "log", seconds=0.3) as (ask, _):
        assert ask("http://a.index/silent")[0] == 504
        (line,) = read_lines(tmp_path / "log")
        assert (line["verdict"], line["status"], line["why"]) == ("failed", 504, "more than 0.3 seconds")


def test_a_server_whose_tls_never_begins(tmp_path):
    """It says a byte now and then; one that speaks no TLS at all has failed, and both stand in the log."""

    def dribble():
        one, _ = silent.accept()
        with one:
            for byte in b"\x16\x03\x03\x3f\xff" + bytes(200):
                try:
                    one.sendall(bytes([byte]))
                except OSError:
                    return
                time.sleep(0.02)

    with answering() as (server, _), socket.create_server(("127.0.0.1", 0)) as silent:
        thread = threading.Thread(target=dribble)
        thread.start()
        hosts = {
            "a.index": Host(server.replace("http:", "https:")),
            "b.index": Host(f"https://127.0.0.1:{silent.getsockname()[1]}"),
        }
        with opened(hosts, tmp_path / "log", seconds=0.5) as (ask, _):
            assert [ask(f"http://{name}/x")[0] for name in hosts] == [502, 504]
        thread.join()
    assert [line["verdict"] for line in read_lines(tmp_path / "log")] == ["failed", "failed"]


def test_guests_that_say_nothing_or_too_much(tmp_path):
    with opened({"a.index": Host(tmp_path)}, tmp_path / "log", seconds=0.3, together=1) as (ask, address):
        with socket.create_connection(address, 20) as slow:
            slow.sendall(b"GET")
            assert b" 504 " in slow.recv(100)
        with socket.create_connection(address, 20) as long:
            long.sendall(b"GET http://a.index/simple/ HTTP/1.1\r\n" + b"A: b\r\n" * (HEAD // 4))
            assert b" 431 " in long.recv(100)
        assert ask("http://a.index/simple/")[0] == 200
        assert [line["status"] for line in read_lines(tmp_path / "log")] == [504, 431, 200]


def test_a_name_that_comes_to_lead_to_this_machine(tmp_path, monkeypatch):
    """DNS rebinding. The address that was judged is the one that is connected to: a name is asked for once."""
    with answering() as (server, heard):
        port, answers = server.rpartition(":")[2], ["127.0.0.1", "127.9.9.9"]
        kept = socket.getaddrinfo

        def resolve(name, *more, **how):
            return kept(answers.pop(0) if name == "moving.test" else name, *more, **how)

        monkeypatch.setattr(egress.socket, "getaddrinfo", resolve)
        hosts = {
            "a.index": Host(f"http://moving.test:{port}"),
            "b.index": Host(f"http://moving.test:{port}", private=True),
        }
        with opened(hosts, tmp_path / "log") as (ask, _):
            status, _, body = ask("http://a.index/x")
            assert status == 502 and b"no public address" in body and not heard
            answers[:] = ["127.0.0.1", "127.9.9.9"]
            assert ask("http://b.index/x")[0] == 200 and answers == ["127.9.9.9"]


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "169.254.169.254",
        "192.168.1.1",
        "0.0.0.0",
        "::1",
        "::ffff:127.0.0.1",
        "fe80::1",
        "224.0.0.1",
    ],
)
def test_addresses_that_are_not_public(address):
    with pytest.raises(Refused, match="no public address"):
        egress.addresses(address, 80, private=False)
    assert egress.addresses(address, 80, private=True)
    assert egress.addresses("93.184.216.34", 80, private=False) == ["93.184.216.34"]


def test_a_folder_as_an_index(tmp_path):
    """A page for each package, by its normal name; links and other files are not offered."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    (folder / "My_Pkg-1.0-py3-none-any.whl").write_bytes(b"wheel")
    (folder / "my.pkg-0.9.tar.gz").write_bytes(b"sdist")
    (folder / "secret.txt").write_text("planted")
    (folder / "link-1.0-py3-none-any.whl").symlink_to(folder / "secret.txt")
    with opened({"a.index": Host(folder)}, tmp_path / "log") as (ask, _):
        assert ask("http://a.index/simple/")[2].count(b"<a ") == 1
        page = ask("http://a.index/simple/my-pkg/")[2]
        assert b'href="/files/My_Pkg-1.0-py3-none-any.whl#sha256=' in page and b"/files/my.pkg-0.9.tar.gz" in page
        assert ask("http://a.index/files/My_Pkg-1.0-py3-none-any.whl")[2] == b"wheel"
        for name in ("old-style-1.2.tar.gz", "a-2!1.0+local-1-py2.py3-none-any.whl"):
            (folder / name).write_bytes(b"x")
            assert ask(f"http://a.index/files/{name}")[0] == 200
        assert b'href="old-style/"' in ask("http://a.index/simple/")[2]
        status, headers, body = ask("http://a.index/files/My_Pkg-1.0-py3-none-any.whl", "HEAD")
        assert (status, headers["content-length"], body) == (200, "5", b"")
        for path in (
            "files/secret.txt",
            "files/link-1.0-py3-none-any.whl",
            "simple/secret/",
            "simple",
            "",
            "files/",
            "wheels/x",
            "simple/my-pkg/x",
        ):
            assert ask(f"http://a.index/{path}")[0] == 404, path


def test_a_door_that_was_used_too_often_is_closed(tmp_path):
    (tmp_path / "a-1.tar.gz").write_bytes(b"x" * 80)
    with opened({"a.index": Host(tmp_path)}, tmp_path / "log", requests=3, total=150) as (ask, address):
        assert [ask("http://a.index/files/a-1.tar.gz")[0] for _ in range(3)] == [200, 502, 502]
        with pytest.raises((OSError, IndexError)):
            ask("http://a.index/simple/")
        until = time.monotonic() + 10
        with pytest.raises(OSError):  # the thread that listens ends a moment after the last answer
            while time.monotonic() < until:
                socket.create_connection(address, 5).close()
    lines = read_lines(tmp_path / "log")
    assert [line["verdict"] for line in lines] == ["allowed", "refused", "refused", "closed"]


def test_every_connection_has_a_line_and_none_goes_in_without(tmp_path):
    before = threading.active_count()
    with opened({"a.index": Host(tmp_path)}, tmp_path / "log") as (ask, address):
        (tmp_path / "log").write_text('{"torn')
        socket.create_connection(address).close()
        statuses = [
            ask(*words)[0]
            for words in (("http://a.index/simple/",), ("http://b/",), ("http://a.index/", "PUT"), ("x",))
        ]
    lines = read_lines(tmp_path / "log")
    assert (
        statuses == [200, 403, 405, 400]
        and len(lines) >= 4
        and all({"at", "sandbox", "verdict"} <= line.keys() for line in lines)
    )
    (tmp_path / "log").write_text('{"torn')
    Door(Rules({}), tmp_path / "log").close()
    assert (tmp_path / "log").read_bytes() == b'{"torn\n'  # what is written next has a line of its own
    for thread in threading.enumerate():
        if thread.name.startswith("door"):
            thread.join(5)
    assert threading.active_count() <= before + 1
