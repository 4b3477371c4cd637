"""Weights through S3: a server in a process of its own, on loopback, that hangs, dies and comes back in the middle.
`make test-faults` installs what this needs, and plays it."""

import importlib
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch

from ref.network import Config
from scaled.runtime.store import StoreError, open_store
from scaled.weight_sync import Part, Reader, SyncError, Writer
from tests.mirror import syncing
from tests.mirror.workers import free_port, ranks

pytestmark = pytest.mark.faults
QUICK = dict(timeout=1.0, attempts=2)
LONGEST = 60.0
"""Seconds within which a store that is down has to be given up. Seven are enough on an idle machine; without time-outs
it would be never."""


class Server:
    """S3 as moto plays it. It keeps everything in memory: once dead, it has lost all."""

    def __init__(self, port: int):
        self.port, self.process = port, None

    def start(self) -> None:
        words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self.process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(600):
            with socket.socket() as s:
                if s.connect_ex(("127.0.0.1", self.port)) == 0:
                    break
            assert self.process.poll() is None, "the server ended"
            time.sleep(0.05)
        open_store("s3://weights").fs.mkdir("weights")

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)


@pytest.fixture(scope="module")
def environment():
    """Whom to ask, and as whom. For the ranks as well."""
    for module in ("s3fs", "moto"):
        importlib.import_module(module)
    port = free_port()
    given = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in given.items():
            patch.setenv(name, value)
        yield given


@pytest.fixture
def server(environment):
    made = Server(int(environment["AWS_ENDPOINT_URL"].rpartition(":")[2]))
    made.start()
    yield made
    made.stop()


def weights(version: int) -> list[Part]:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(version)).bfloat16()
    return [Part("w", (64, 32), 0, x)]


def reader_of(address: str) -> Reader:
    return Reader(open_store(address, **QUICK), [Part("w", (64, 32), 0, torch.zeros(64, 32).bfloat16())])


def serves(reader: Reader, version: int) -> bool:
    return reader.version == version and torch.equal(reader.parts[0].weights, weights(version)[0].weights)


def test_a_bucket_is_a_mapping(server):
    """And `setdefault` creates, or finds what another has created."""
    store, other = open_store("s3://weights/a", **QUICK), open_store("s3://weights/a", **QUICK)
    assert list(store) == [] and "x" not in store
    store["0001/b"] = b"1"
    assert (
        store.setdefault("0001/manifest", b"mine") == b"mine"
        and other.setdefault("0001/manifest", b"theirs") == b"mine"
    )
    assert dict(other) == {"0001/b": b"1", "0001/manifest": b"mine"} and len(other) == 2
    del other["0001/b"]
    assert list(store) == ["0001/manifest"]
    with pytest.raises(KeyError):
        store["0001/b"]


def test_ranks_write_and_other_ranks_read(server, environment):
    shape = Config.tiny(40)
    ranks(2).run(
        dict(dp=2, cp=1, ep=2), syncing.elsewhere, environment, syncing.publish, "s3://weights/ranks", shape, 0, 3
    )
    found = ranks(4).run(
        dict(dp=4, cp=1, ep=1), syncing.elsewhere, environment, syncing.follow, "s3://weights/ranks", shape, [0, None]
    )
    wanted = syncing.versions(shape, 0, 3)[2]
    for served, state, _ in found:
        assert served == [0, 2] and all(torch.equal(state[name], x.view(torch.int16)) for name, x in wanted.items())


def test_a_server_that_hangs(server):
    """Publishing and reading give up in time, and nothing has moved; when it answers again, both go on."""
    writer, reader = Writer(open_store("s3://weights/hang", **QUICK)), reader_of("s3://weights/hang")
    writer.publish(0, weights(0))
    reader.fetch()
    reader.swap()
    server.send(signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(SyncError, match="version 1 was not published: .*the store s3://weights/hang does not answer"):
        writer.publish(1, weights(1))
    with pytest.raises(SyncError, match="the store does not answer"):
        reader.fetch()
    assert time.monotonic() - began < LONGEST and serves(reader, 0)
    server.send(signal.SIGCONT)
    writer.publish(1, weights(1))
    reader.fetch()
    reader.swap()
    assert serves(reader, 1)


def test_a_server_that_dies_and_comes_back_empty(server):
    """The writer's next difference helps the reader that has its base. One that comes late waits for the next anchor,
    and is told so."""
    writer, reader = Writer(open_store("s3://weights/dead", **QUICK), anchor_every=4), reader_of("s3://weights/dead")
    for version in (0, 1):
        writer.publish(version, weights(version))
    reader.fetch()
    reader.swap()
    server.stop()
    began = time.monotonic()
    with pytest.raises(SyncError, match="version 2 was not published"):
        writer.publish(2, weights(2))
    with pytest.raises(StoreError, match="does not answer"):
        reader.store["00000001/manifest"]
    assert time.monotonic() - began < LONGEST
    server.start()
    with pytest.raises(SyncError, match="no version yet"):
        reader.fetch()
    writer.publish(3, weights(3))
    reader.fetch()
    reader.swap()
    assert serves(reader, 3)
    late = reader_of("s3://weights/dead")
    with pytest.raises(SyncError, match="no delta or anchor in the store leads to version 3"):
        late.fetch()
    writer.publish(4, weights(4))
    late.fetch()
    late.swap()
    assert serves(late, 4)


def test_a_writer_is_killed_between_its_shards_and_its_manifest(server):
    """What it left is invisible, and the resumed trainer publishes the version again."""
    program = (
        "import os, signal\n"
        "from tests.mirror.test_store_s3 import QUICK, weights\n"
        "from scaled.runtime.store import open_store\n"
        "from scaled.weight_sync import Writer\n"
        "writer = Writer(open_store('s3://weights/killed', **QUICK))\n"
        "writer.publish(0, weights(0))\n"
        "writer.commit = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "writer.publish(1, weights(1))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=dict(os.environ), capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    store, reader = open_store("s3://weights/killed", **QUICK), reader_of("s3://weights/killed")
    assert any(key.startswith("00000001/delta") for key in store)
    reader.fetch()
    reader.swap()
    assert serves(reader, 0)
    resumed = Writer(store)
    resumed.publish(1, weights(1))
    reader.fetch()
    reader.swap()
    assert serves(reader, 1)
