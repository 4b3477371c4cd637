"""The sandbox that a Docker engine makes: the same root, tools, filter and limits as bubblewrap's, in a container.

The container has no network, no capabilities and no way to new ones, a read-only root, and a user that is not root.
Docker mounts a tmpfs each for the work tree, /tmp and /dev/shm; the tree is sent through the pipe, so nothing of this
machine is mounted. The tool server installs the same filter of system calls, above Docker's own. What is weaker than
bubblewrap's:

1. Memory. This process watches it if it may look into the container's, as root may. The control group's limit holds for
   all: for memory and files together, since both lie in memory.
2. Files. Each tmpfs has a bound, and the server watches their sum. For the moment between two looks more may lie there.
3. The end. A container is no child of this process. Its server ends when this process does, unless it hangs: `docker ps
   --filter label=etude` finds what is left.
"""

from __future__ import annotations

from pathlib import Path

from .cache import SANDBOX_USER
from .engine import Container, connected, image
from .inside.places import MASKED, MOUNTED, READ_ONLY, ROOM
from .interface import LIMITS, Limits
from .served import Served
from .start import BOOT
from .store import Store

__all__ = ["Docker", "host_config"]

PAGE, LINK = 4096, 100
"""Bytes of a page, and of a link that has room without one."""
SPARE = 32 * 2**20
"""Bytes of memory for the server and for what the kernel keeps of a container."""
HIDDEN_PATHS = (
    "/sys",
    "/dev/pts",
    "/dev/mqueue",
    "/dev/tty",
    "/dev/console",
    "/etc/resolv.conf",
    *(f"/proc/{name}" for name in MASKED),
)
"""What Docker shows of its machine, and no task needs."""


class Docker(Served):
    """A sandbox (see interface.py). `container`: the id that Docker gave it."""

    def __init__(self, root: Path, store: Store, snapshot: str, limits: Limits = LIMITS) -> None:
        """Raises RunError where no engine answers, or none that can bound what a sandbox uses; for a snapshot that is
        not stored or damaged."""
        self.root = root
        manifest = store.manifest(snapshot)
        client = connected()
        config = {
            "image": image(client, root),
            "command": ["/usr/bin/python3", "-I", "-S", "-c", BOOT],
            "user": f"{SANDBOX_USER}:{SANDBOX_USER}",
            "hostname": "sandbox",
            "working_dir": "/",
            "stdin_open": True,
            "network_disabled": True,
            "labels": {"etude": "sandbox"},
            "use_config_proxy": False,
        }
        pages = sum(
            -(-entry.size // PAGE) + (entry.kind == "link" and len(entry.value) > LINK) for entry in manifest.values()
        )
        container = Container(client, config, host_config(limits, pages * PAGE, len(manifest)))
        self.container = container.id
        super().__init__(container, store, limits, {}, manifest, {"mounted": True, "bytes": pages * PAGE})

    def fork(self, snapshot: str) -> Docker:
        """A sandbox that begins with a stored tree: see interface.py. Files only."""
        return Docker(self.root, self.store, snapshot, self.limits)

    def __enter__(self) -> Docker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def host_config(limits: Limits, size: int, entries: int) -> dict:
    """How the engine is to bound and to close off a container. `size`, `entries`: bytes and things of the tree that it
    begins with."""
    memory = limits.memory + limits.disk + size + SPARE
    tree_limits = (limits.disk + size, limits.inodes + entries + len(MOUNTED))
    scratch_limits = (limits.disk, limits.inodes)
    options = "rw,exec,nosuid,nodev,size={},nr_inodes={},uid={},gid={},mode=755"
    return {
        "NetworkMode": "none",
        "IpcMode": "private",
        "CgroupnsMode": "private",
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges"],
        "ReadonlyRootfs": True,
        "MaskedPaths": [*HIDDEN_PATHS],
        "ReadonlyPaths": [f"/proc/{name}" for name in READ_ONLY],
        "Tmpfs": {
            path: options.format(*(tree_limits if path == MOUNTED[0] else scratch_limits), SANDBOX_USER, SANDBOX_USER)
            for path in MOUNTED
        },
        "Memory": memory,
        "MemorySwap": memory,
        "PidsLimit": limits.processes + ROOM,
        "OomScoreAdj": 1000,
        "LogConfig": {"Type": "none", "Config": {}},
        "AutoRemove": True,
        "Init": False,
    }
