"""Targets for attempts: files, processes, sockets and shared memory of the test's own, which all hold one secret."""

import contextlib
import ctypes
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

TARGET = """
import ctypes, json, os, signal, sys, time
libc = ctypes.CDLL(None)
libc.prctl(0x59616d61, ctypes.c_ulong(-1), 0, 0, 0)  # whoever may look into it may do so, also where Yama watches
kept = ctypes.create_string_buffer(os.environ["PLANTED_SECRET"].encode() + sys.argv[2].encode(), 64)
handle = os.open(sys.argv[3], os.O_RDONLY)
for number in (10, 12):
    signal.signal(number, lambda *_: open(sys.argv[4], "w").close())
print(json.dumps([ctypes.addressof(kept), handle]), flush=True)
while True:
    time.sleep(60)
"""
LIBC = ctypes.CDLL(None, use_errno=True)


def serve(server: socket.socket, secret: str) -> None:
    """Tells the secret to whoever connects or sends, until the socket is closed."""
    with contextlib.suppress(OSError, TypeError):  # the latter where a socket is shut that waits for a datagram
        while True:
            if server.type == socket.SOCK_DGRAM:
                _, sender = server.recvfrom(1000)
                server.sendto(secret.encode(), sender)
            else:
                other, _ = server.accept()
                with other, contextlib.suppress(OSError):
                    other.sendall(secret.encode())


def listening(family: int, kind: int, address, secret: str, closing: contextlib.ExitStack) -> socket.socket:
    """A socket that answers with the secret."""
    server = socket.socket(family, kind)
    server.bind(address)
    if kind == socket.SOCK_STREAM:
        server.listen()
    threading.Thread(target=serve, args=(server, secret), daemon=True).start()
    closing.callback(server.close)
    closing.callback(_shut, server)
    return server


def _shut(server: socket.socket) -> None:
    """Wakes the thread that waits on it."""
    with contextlib.suppress(OSError):
        server.shutdown(socket.SHUT_RDWR)


def target(
    name: str, secret: str, marker: Path, signalled: Path, closing: contextlib.ExitStack
) -> tuple[int, int, int]:
    """A process that holds the secret in its memory and its environment: its number, the address, and an open
    handle."""
    words = [sys.executable, "-I", "-S", "-c", TARGET, name, secret, str(marker), str(signalled)]
    child = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={"PLANTED_SECRET": f"environment-{secret}"}
    )
    closing.callback(child.wait)
    closing.callback(child.kill)
    assert child.stdout is not None
    address, handle = json.loads(child.stdout.readline())
    return child.pid, address, handle


@contextlib.contextmanager
def planted(repository: Path, store: Path) -> Iterator[dict]:
    """What attempts know (`at`). Everything is gone afterwards."""
    secret = f"planted-{secrets.token_hex(8)}"
    with contextlib.ExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="etude-planted-")))
        folder.chmod(0o755)
        marker, shared = folder / "marker", f"etude-{secret}"
        marker.write_text(secret)
        (folder / "writable").mkdir()
        (folder / "writable").chmod(0o777)
        (folder / "own").mkdir()
        os.mkfifo(folder / "pipe", 0o666)
        (folder / "pipe").chmod(0o666)
        Path("/dev/shm", shared).write_text(secret)
        closing.callback(Path("/dev/shm", shared).unlink)
        key = secrets.randbelow(1 << 30) + 1
        shared_memory, queue, semaphores = (
            LIBC.shmget(key, 4096, 0o1666),
            LIBC.msgget(key, 0o1666),
            LIBC.semget(key, 1, 0o1666),
        )
        assert min(shared_memory, queue, semaphores) >= 0
        closing.callback(LIBC.shmctl, shared_memory, 0, None)  # 0: remove
        closing.callback(LIBC.msgctl, queue, 0, None)
        closing.callback(LIBC.semctl, semaphores, 0, 0)
        process, address, handle = target(f"named-{secret}", secret, marker, folder / "signalled", closing)
        victim, _, _ = target("victim", secret, marker, folder / "victim", closing)
        port = listening(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0), secret, closing).getsockname()[1]
        datagrams = listening(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0), secret, closing).getsockname()[1]
        listening(socket.AF_UNIX, socket.SOCK_STREAM, str(folder / "socket"), secret, closing)
        listening(socket.AF_UNIX, socket.SOCK_STREAM, "\0" + shared, secret, closing)
        (folder / "socket").chmod(0o777)
        yield {
            **{
                "secret": secret,
                "planted": f"environment-{secret}",
                "marker": str(marker),
                "folder": str(folder),
                "own": str(folder / "own"),
            },
            **{
                "writable": str(folder / "writable"),
                "pipe": str(folder / "pipe"),
                "socket": str(folder / "socket"),
                "shared": shared,
            },
            **{
                "abstract": shared,
                "name": f"named-{secret}",
                "process": process,
                "address": address,
                "handle": handle,
                "server": victim,
            },
            **{
                "signalled": str(folder / "signalled"),
                "port": port,
                "datagrams": datagrams,
                "key": key,
                "home": str(Path.home()),
            },
            **{
                "repository": str(repository),
                "store": str(store / "trees"),
                "cmdline": Path("/proc/cmdline").read_text(),
                "outside": True,
            },
        }
