"""Sandboxes with a door are as closed as others: nothing comes out but requests that its rules let through, and nothing
else in."""

import json
import os
import socket
import tempfile
from pathlib import Path

import pytest

from environments.egress.door import Door
from environments.egress.rules import Host, Rules
from environments.sandbox import listening
from environments.sandbox.inside.places import PROXY
from environments.sandbox.interface import Limits
from environments.sandbox.listening import Pair
from environments.sandbox.open import open_sandbox
from environments.sandbox.wire import WireError
from kit.disk import read_lines
from kit.settings import RunError
from tests.environments.planted import planted
from tests.environments.siege import CODES, HERE, MISTAKES, REPOSITORY
from tests.environments.upstream import answering

ASK = """
import json, socket, sys

def ask(head, port=3128):
    try:
        with socket.create_connection(("127.0.0.1", port), 20) as one:
            one.sendall(head.encode())
            with one.makefile("rb") as file:
                return file.read().decode("latin-1")
    except OSError as error:
        return type(error).__name__

print(json.dumps([ask(head) for head in json.load(open(sys.argv[1]))]))
"""
STEAL = """
import socket
for how in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
    for host in ("127.0.0.1", "0.0.0.0"):
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, how, 1)
        try:
            one.bind((host, 3128))
            one.listen()
            print("stolen")
        except OSError as error:
            print(type(error).__name__)
"""


def asked(sandbox, heads):
    """What a program inside hears, for each request that it makes."""
    assert sandbox.call("write", {"path": "ask.py", "text": ASK}).ok
    assert sandbox.call("write", {"path": "heads.json", "text": json.dumps(heads)}).ok
    heard = sandbox.call("shell", {"command": "python3 ask.py heads.json"})
    assert heard.ok, heard
    return json.loads(heard.text)


def test_no_attempt_gets_anything_with_a_door(root, shared_store):
    """All attempts of attempts.py, as whoever runs the tests."""
    with planted(REPOSITORY, shared_store.folder) as at:
        folder = Path(at["folder"])
        (folder / "tree").mkdir()
        with Door(Rules({"a.index": Host(folder / "tree")}), folder / "log") as door:
            limits = Limits(output=1 << 20, seconds=300.0)
            with open_sandbox(folder / "tree", limits=limits, root=root, store=shared_store, door=door) as sandbox:
                inside = {**at, "own": "/work", "server": 1, "outside": False}
                for path, text in (
                    ("runner.py", (HERE / "runner.py").read_text()),
                    ("asked.json", json.dumps({"at": inside, "codes": CODES})),
                ):
                    assert sandbox.call("write", {"path": path, "text": text}).ok
                heard = sandbox.call("shell", {"command": "python3 -I runner.py asked.json"})
                found = json.loads(heard.text)
                assert sandbox.call("list", {}).ok and heard.end_reason is None
            assert read_lines(folder / "log") == []
    assert found.keys() == CODES.keys() and not [
        one for one in found.values() if one.get("got") or one.get("error", "").startswith(MISTAKES)
    ]


def test_requests_from_inside(root, shared_store, tmp_path):
    """Services of this machine, other hosts, methods, headers, redirects: each beside a request that goes through, and
    all in the log."""
    with planted(REPOSITORY, shared_store.folder) as at, answering(f"http://127.0.0.1:{at['port']}") as (server, told):
        with socket.create_connection(("127.0.0.1", at["port"])) as control:
            assert at["secret"].encode() in control.recv(100)
        own = server.removeprefix("http://")
        heads = [
            "GET http://a.index/x HTTP/1.1\r\nAuthorization: planted-a\r\nCookie: planted-b\r\n"
            "X-Planted: planted-c\r\n\r\n",
            *(
                f"CONNECT {place} HTTP/1.1\r\n\r\n"
                for place in (f"127.0.0.1:{at['port']}", f"localhost:{at['port']}", own, "a.index:80")
            ),
            *(
                f"GET http://{place}/ HTTP/1.1\r\n\r\n"
                for place in (f"127.0.0.1:{at['port']}", f"a.index:{at['port']}", own, "evil.test")
            ),
            f"GET http://a.index@127.0.0.1:{at['port']}/ HTTP/1.1\r\n\r\n",
            "POST http://a.index/x HTTP/1.1\r\nContent-Length: 7\r\n\r\nplanted",
            "GET http://a.index/away HTTP/1.1\r\n\r\n",
            "GET http://a.index/tricky HTTP/1.1\r\n\r\n",
            "GET http://a.index/../x HTTP/1.1\r\n\r\n",
            "GET http://a.index/endless HTTP/1.1\r\n\r\n",
            "GET http://a.index/x HTTP/1.1\r\n\r\nGET http://a.index/second HTTP/1.1\r\n\r\n",
            "GET /x HTTP/1.1\r\nHost: a.index\r\n\r\n",
        ]
        tree = tmp_path / "tree"
        tree.mkdir()
        with Door(Rules({"a.index": Host(server)}, largest=100_000), tmp_path / "log") as door:
            with open_sandbox(tree, root=root, store=shared_store, door=door) as sandbox:
                heard = asked(sandbox, heads)
        assert [int(one.split()[1]) for one in heard] == [
            200,
            *[405] * 4,
            *[400] * 3,
            403,
            400,
            405,
            502,
            502,
            403,
            502,
            200,
            400,
        ]
        assert not any(at["secret"] in one for one in heard)
        assert [path for _, path, _ in told] == ["/x", "/away", "/tricky", "/endless", "/x"] and "planted" not in str(
            told
        )
        lines = read_lines(tmp_path / "log")
        assert [line["status"] for line in lines] == [int(one.split()[1]) for one in heard]
        assert [line["verdict"] == "allowed" for line in lines] == [" 200 " in one[:20] for one in heard]
        assert lines[0]["dropped"] == ["authorization", "cookie", "x-planted"] and "planted" not in str(
            [line.get("path") for line in lines]
        )


def test_a_door_belongs_to_its_sandbox(root, shared_store, tmp_path):
    """Without one there is nothing at its address. Forks have it too; nobody inside can take its place; with the
    sandbox it is gone."""
    tree = tmp_path / "tree"
    tree.mkdir()
    head = ["GET http://a.index/simple/ HTTP/1.1\r\n\r\n"]
    with open_sandbox(tree, root=root, store=shared_store) as closed:
        assert asked(closed, head) == ["ConnectionRefusedError"]
        assert "proxy" not in closed.call("shell", {"command": "env"}).text
    before = len(os.listdir("/proc/self/fd"))
    with Door(Rules({"a.index": Host(tree)}), tmp_path / "log") as door:
        with (
            open_sandbox(tree, root=root, store=shared_store, door=door) as first,
            first.fork(first.snapshot()) as second,
        ):
            for sandbox in (first, second):
                assert " 200 " in asked(sandbox, head)[0]
                assert f"http_proxy=http://{PROXY[0]}:{PROXY[1]}\n" in sandbox.call("shell", {"command": "env"}).text
            assert first.call("shell", {"command": f"python3 -c '{STEAL}'"}).text.split() == ["OSError"] * 4
            handles = first.call("shell", {"command": "ls /proc/self/fd; cat /proc/net/unix | wc -l"}).text.split()
            assert handles == ["0", "1", "2", "3", "1"]
            first.close()
            assert " 200 " in asked(second, head)[0]
            door.close()
            assert asked(second, head) == ["ConnectionRefusedError"]
        assert [line["sandbox"] for line in read_lines(tmp_path / "log")] == [1, 2, 2]
    assert len(os.listdir("/proc/self/fd")) <= before


def test_what_a_sandbox_may_hand_out(monkeypatch):
    """One socket that listens at the address of a door, and nothing else."""

    def hand_out(said, *handles):
        with Pair() as pair:
            socket.send_fds(pair.inner_socket, [said], [one.fileno() for one in handles])
            return pair.received()

    (listener, other), file = (socket.create_server(("127.0.0.1", 0)) for _ in range(2)), tempfile.TemporaryFile()
    with listener, other, file, socket.socket() as quiet:
        monkeypatch.setattr(listening, "PROXY", listener.getsockname())
        before = len(os.listdir("/proc/self/fd"))
        for handles in ((), (other,), (file,), (quiet,), (listener, listener)):
            with pytest.raises(WireError, match="hands out no socket"):
                hand_out(b"door", *handles)
        with pytest.raises(WireError, match="hands out no socket"):
            hand_out(b"x", listener)
        hand_out(b"door", listener).close()
        assert len(os.listdir("/proc/self/fd")) == before


def test_docker_has_no_doors(tmp_path):
    with Door(Rules({}), tmp_path / "log") as door, pytest.raises(RunError, match="needs bubblewrap"):
        open_sandbox(tmp_path, "docker", door=door)
