"""A Docker engine of this machine, through Docker's SDK for Python, which is imported late: the image of a root file
system, and containers of it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kit.settings import RunError

from . import manifest as lists
from .cache import SANDBOX_USER, cache_folder, make_folder
from .visible import one_line
from .wire import Wire

__all__ = ["Container", "Framed", "connected", "image"]

REPOSITORY, VERSION = "etude-sandbox", 1
"""Of the images, whose tag is a hash of their root file system and of how they are made."""
IMAGE_LIFETIME = 14 * 24 * 3600
"""Seconds for which an image is kept that is not the one that is wanted."""
GROUPS = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def convert_errors(prefix: str) -> Iterator[None]:
    """Turns what the SDK raises into a RunError of one line, which begins with `prefix`."""
    import docker.errors  # pyright: ignore[reportMissingImports]
    import requests  # pyright: ignore[reportMissingModuleSource]

    try:
        yield
    except (docker.errors.DockerException, requests.RequestException, OSError) as error:
        raise RunError(f"{prefix}: {one_line(str(getattr(error, 'explanation', None) or error), 300)}") from None


def connected() -> Any:
    """A client of the engine that DOCKER_HOST names, by default the one of this machine. Raises RunError where none
    answers, with what to install or to start, and where it cannot bound memory and processes."""
    try:
        import docker  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise RunError(
            "a sandbox of Docker's needs its SDK for Python, which is not installed; run: pip install docker"
        ) from None
    address = os.environ.get("DOCKER_HOST", "")
    if address and not address.startswith("unix://"):
        raise RunError(f"a sandbox needs a Docker engine of this machine, at a Unix socket; DOCKER_HOST is {address!r}")
    advice = (
        "no Docker engine answers; on Debian and Ubuntu: apt-get install docker.io, and start it: "
        "systemctl start docker, or as root: dockerd"
    )
    with convert_errors(advice):
        client = docker.APIClient(base_url=address or None, version="auto", timeout=120)
        info = client.info()
    for key, resource in (("MemoryLimit", "memory"), ("PidsLimit", "processes")):
        if not info.get(key):
            client.close()
            raise RunError(
                f"this Docker engine cannot bound {resource}: its machine has no control group for "
                f"that; take kind='bubblewrap'"
            )
    return client


def image(client: Any, root: Path) -> str:
    """The name of the image that holds a root file system, which is imported first where the engine lacks it. Raises
    RunError, and closes the client then."""
    with close_on_error(client), convert_errors("the sandbox's image cannot be imported"):
        root_digest = (
            root.name
            if re.fullmatch("[0-9a-f]{64}", root.name)
            else lists.digest({path: entry for path, entry, _ in lists.of_folder(root)})
        )
        tag = hashlib.sha256(json.dumps([root_digest, VERSION, SANDBOX_USER]).encode()).hexdigest()[:24]
        name = f"{REPOSITORY}:{tag}"
        if not client.images(name):
            with lock_imports():
                if not client.images(name):
                    _import_image(client, root, tag)
                    _remove_old_images(client, tag)
        return name


@contextlib.contextmanager
def lock_imports() -> Iterator[None]:
    """Lets no other process of this user import an image: of two that do, one would be left without a name. Does
    nothing where the user has no cache folder."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            fcntl.flock(stack.enter_context(open(make_folder(cache_folder()) / "images.lock", "w")), fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def close_on_error(client: Any) -> Iterator[None]:
    """Closes a client where something is raised."""
    try:
        yield
    except BaseException:
        client.close()
        raise


def _import_image(client: Any, root: Path, tag: str) -> None:
    def strip_metadata(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return None if member.name == "etc/passwd" else member

    with tempfile.NamedTemporaryFile(prefix="etude-image-") as file:
        with tarfile.open(fileobj=file, mode="w") as archive:
            for path in sorted(root.iterdir()):
                archive.add(path, arcname=path.name, filter=strip_metadata)
            users = tempfile.TemporaryFile()
            users.write(
                f"root:x:0:0:root:/:/bin/sh\nagent:x:{SANDBOX_USER}:{SANDBOX_USER}:agent:/tmp:/bin/sh\n".encode()
            )
            member = tarfile.TarInfo("etc/passwd")
            member.size, member.mode = users.tell(), 0o644
            users.seek(0)
            archive.addfile(member, users)
        file.flush()
        client.import_image_from_file(file.name, repository=REPOSITORY, tag=tag)
    client.inspect_image(f"{REPOSITORY}:{tag}")


def _remove_old_images(client: Any, tag: str) -> None:
    """Removes images of other roots that are old and that no container uses."""
    for image_info in client.images(REPOSITORY):
        for name in image_info.get("RepoTags") or []:
            if name != f"{REPOSITORY}:{tag}" and image_info["Created"] < time.time() - IMAGE_LIFETIME:
                with contextlib.suppress(RunError), convert_errors("it is in use"):
                    client.remove_image(name)


class Framed(Wire):
    """The socket of an attached container. The engine frames what comes: the stream (1: standard output, 2: error) in a
    byte, three that are 0, and the length in four."""

    def __init__(self, handle: int, tick: Callable[[], None] = lambda: None) -> None:
        super().__init__(handle, handle, tick)
        self.raw, self.stream, self.left = bytearray(), 0, 0
        self.errors = bytearray()

    def take(self, block: bytes) -> None:
        """Adds to the buffer what is of standard output, and to `errors` the beginning of what is not."""
        self.raw += block
        while self.raw:
            if not self.left:
                if len(self.raw) < 8:
                    return
                self.stream, self.left = self.raw[0], int.from_bytes(self.raw[4:8], "big")
                del self.raw[:8]
                continue
            chunk = self.raw[: self.left]
            del self.raw[: len(chunk)]
            self.left -= len(chunk)
            if self.stream == 1:
                self.buffer += chunk
            else:
                self.errors += chunk[: 4000 - len(self.errors)]


class Container:
    """A container that runs (see Machine in served.py). `first`: the number of its first process."""

    def __init__(self, client: Any, config: dict, host: dict) -> None:
        """`config`: of create_container; `host`: what the engine's API calls HostConfig. Takes the client over. Raises
        RunError."""
        self.client, self.starter, self.first, self.killed = client, os.getpid(), 0, 0
        self.id, self.handle = "", -1
        try:
            with convert_errors("Docker did not start the sandbox"):
                self.id = client.create_container(**config, host_config=host)["Id"]
                socket = client.attach_socket(self.id, {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
                self.handle = os.dup(socket.fileno())
                # else it stays open until garbage is collected
                if (response := getattr(socket, "_response", None)) is not None:
                    response.close()
                client.start(self.id)
                self.first = client.inspect_container(self.id)["State"]["Pid"]
                self.group = self._find_oom_counter()
                self.killed = self._count_oom_kills()
        except BaseException:
            self.kill()
            raise

    def _find_oom_counter(self) -> Path:
        """The file in which the kernel counts what it has ended for want of memory."""
        for line in Path(f"/proc/{self.first}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for folder, name in ((GROUPS / "memory", "memory.oom_control"), (GROUPS, "memory.events")):
                counter = folder / path.lstrip("/") / name
                if self.id in path and controllers in ("memory", "") and counter.exists():
                    return counter
        raise RunError(
            "the control group of Docker's container is not seen here; a sandbox needs an engine that "
            "runs on the same machine"
        )

    def _count_oom_kills(self) -> int:
        match = re.search(r"^oom_kill (\d+)$", self.group.read_text(), re.MULTILINE)
        return int(match[1]) if match else 0

    def wire(self, tick: Callable[[], None]) -> Framed:
        """The container's standard input and output."""
        return Framed(self.handle, tick)

    def crossed(self) -> bool:
        """Whether the kernel has ended a process for the container's limit on memory since this was last asked."""
        try:
            previous, self.killed = self.killed, self._count_oom_kills()
        except OSError:  # the group went with the last process
            return False
        return self.killed > previous

    def stop(self) -> None:
        """Ends the first process, and with it all others."""
        with contextlib.suppress(RunError), convert_errors("it has ended"):
            self.client.kill(self.id)

    def kill(self) -> None:
        """Ends all, and returns once the container is removed."""
        if os.getpid() != self.starter:
            return
        self.stop()
        with contextlib.suppress(RunError), convert_errors("it is removed"):
            self.client.wait(self.id, condition="removed", timeout=20)
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1
        self.client.close()

    def failure(self, wire: Wire) -> str:
        """What the first process said before it ended."""
        wire.drain(time.monotonic() + 2)
        errors = wire.errors if isinstance(wire, Framed) else b""
        return f"the sandbox did not start; it says: {one_line(errors.decode(errors='replace'), 300) or 'nothing'}"
