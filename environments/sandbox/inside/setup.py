"""What the first process does before anybody else is there: mounts the work tree, sets limits, and gives up what it
could do that for.

bwrap gives it a few capabilities within the sandbox's own user namespace. It mounts what bwrap 0.8 cannot: one tmpfs
that bounds bytes and inodes, with the work tree, /tmp and /dev/shm in it, and an overlay that lets the tree begin with
files that are nowhere copied. Where overlay mounts cannot be had, the files are copied. Then it gives all capabilities
up and installs the filter of system calls. Docker gives it none, and has mounted a tmpfs for each of the three; the
tree comes through the pipe.
"""

from __future__ import annotations

import os
import resource
import stat

from . import kernel, lines
from .kernel import signal
from .places import BASE, DISK, MASKED, MOUNTED, READ_ONLY, ROOM, WORK

__all__ = ["Start", "begin"]

NAMESPACE_LIMITS = {
    "max_inotify_instances": 16,
    "max_inotify_watches": 4096,
    "max_fanotify_groups": 0,
    "max_fanotify_marks": 0,
} | {f"max_{kind}_namespaces": 0 for kind in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup", "time")}
"""What the kernel counts by namespace, and else by user: a sandbox must not use up what the user who started it has."""
OWN_INODES = 8
"""Folders that the tmpfs begins with."""
SHARED_PROCESSES = 1 << 16
"""Where the kernel counts the processes of a user over several sandboxes, and a control group bounds those of each."""


class Start:
    """What the server works with. `upper`: a handle of the overlay's folder of changes, None where the tree was copied;
    `disks`: handles of the bounded file systems (see shell.py); `environment`: what commands are told beside the usual;
    the others are limits."""

    def __init__(
        self,
        upper: int | None,
        disks: tuple[int, ...],
        environment: dict,
        output: int,
        processes: int,
        flood: int,
        disk: int,
        inodes: int,
    ) -> None:
        self.upper, self.disks, self.environment, self.output = upper, disks, environment, output
        self.processes, self.flood, self.disk, self.inodes = processes, flood, disk, inodes


def begin(reader: int) -> tuple[Start, bytes]:
    """Reads what is wanted from the pipe, and does it. Gives also what was read beyond that. Raises OSError for what
    the kernel refuses."""
    buffer = b""
    while b"\n" not in buffer:
        if not (block := os.read(reader, 1 << 20)):
            raise EOFError("nobody says what is wanted")
        buffer += block
    first, _, buffer = buffer.partition(b"\n")
    request = lines.decode(first.decode())
    assert isinstance(request, dict)
    limits, base = request["limits"], request["base"]
    is_mounted = base.get("mounted", False)
    if door := base.get("door"):
        from .door import hand_out

        hand_out(door["handle"])
    upper, disks = (None, _open_folders(MOUNTED)) if is_mounted else _mount_tree(limits, base)
    buffer = _change_tree(request["remove"], request["entries"], reader, buffer)
    if not is_mounted:
        _mask_proc()
    _set_limits(limits, base["bytes"], SHARED_PROCESSES if is_mounted else limits["processes"] + ROOM)
    kernel.drop_capabilities()
    kernel.keep_private()
    if not base.get("nested"):  # who has started this one has ended long ago; it ends with the namespace around its own
        kernel.end_with_parent()
    kernel.filter_calls(bytes.fromhex(request["filter"]))
    names = ("output", "processes", "flood", "disk", "inodes")
    return Start(upper, disks, door["environment"] if door else {}, **{name: limits[name] for name in names}), buffer


def _open_folders(folders: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(os.open(folder, os.O_RDONLY | os.O_DIRECTORY) for folder in folders)


def _mount_tree(limits: dict, base: dict) -> tuple[int | None, tuple[int, ...]]:
    size, inodes = limits["disk"], limits["inodes"] + OWN_INODES
    kernel.mount("tmpfs", DISK, f"size={size},nr_inodes={inodes},mode=755")
    for name in ("upper", "scratch", "tmp", "shm"):
        os.mkdir(f"{DISK}/{name}")
    os.chmod(f"{DISK}/upper", stat.S_IMODE(os.stat(BASE).st_mode))
    upper = os.open(f"{DISK}/upper", os.O_RDONLY | os.O_DIRECTORY)
    disks = _open_folders((DISK,))
    is_overlaid = base["overlay"] and _overlay()
    if not is_overlaid:
        options = f"size={size + base['bytes']},nr_inodes={inodes + base['inodes']}"
        kernel.mount("tmpfs", DISK, options, kernel.REMOUNT | kernel.NOSUID | kernel.NODEV)
        _copy_tree(BASE, f"{DISK}/upper")
        kernel.bind(f"{DISK}/upper", WORK)
    kernel.bind(f"{DISK}/tmp", "/tmp")
    kernel.bind(f"{DISK}/shm", "/dev/shm")
    kernel.unmount(BASE)
    kernel.unmount(DISK)
    return upper if is_overlaid else None, disks


def _overlay() -> bool:
    """Whether the work tree is the base with changes above it. The kernel needs overlays in user namespaces (5.11) and
    extended attributes on tmpfs (6.6), which tell a folder that was made anew from one that was changed."""
    try:
        os.setxattr(f"{DISK}/upper", "user.overlay.probe", b"y")
        os.removexattr(f"{DISK}/upper", "user.overlay.probe")
        options = f"lowerdir={BASE},upperdir={DISK}/upper,workdir={DISK}/scratch,userxattr"
        kernel.mount("overlay", WORK, options)
        return True
    except OSError:
        return False


def _copy_tree(origin: str, destination: str) -> None:
    """Copies a tree, with modes and links."""
    for entry in os.scandir(origin):
        target, mode = f"{destination}/{entry.name}", entry.stat(follow_symlinks=False).st_mode
        if stat.S_ISLNK(mode):
            os.symlink(os.readlink(entry.path), target)
        elif stat.S_ISDIR(mode):
            os.mkdir(target)
            _copy_tree(entry.path, target)
            os.chmod(target, stat.S_IMODE(mode))
        else:
            source, copy = (
                os.open(entry.path, os.O_RDONLY),
                os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600),
            )
            while os.sendfile(copy, source, None, 1 << 24):
                pass
            os.fchmod(copy, stat.S_IMODE(mode))
            os.close(source)
            os.close(copy)


def _change_tree(remove: list[str], entries: list[list], reader: int, buffer: bytes) -> bytes:
    """Changes the tree: removes paths, then makes entries (path, kind, mode, and a file's size or a link's target) in
    their order. The contents of files follow each other in the pipe."""
    data = bytearray(buffer)
    for path in remove:
        _remove(f"{WORK}/{path}")
    folders = []
    for path, kind, mode, value in entries:
        target = f"{WORK}/{path}" if path else WORK
        if kind == "dir":
            os.makedirs(target, exist_ok=True)
            folders.append((target, mode))
            continue
        if os.path.lexists(target):
            os.unlink(target)
        if kind == "link":
            os.symlink(value, target)
            continue
        with open(target, "xb") as file:
            remaining = value
            while remaining:
                data = data or bytearray(os.read(reader, min(remaining, 1 << 20)))
                if not data:
                    raise EOFError("the tree is cut short")
                count = file.write(data[:remaining])
                del data[:count]
                remaining -= count
        os.chmod(target, mode)
    for target, mode in reversed(folders):
        os.chmod(target, mode)
    return bytes(data)


def _remove(path: str) -> None:
    if not os.path.islink(path) and os.path.isdir(path):
        for name in os.listdir(path):
            _remove(f"{path}/{name}")
        os.rmdir(path)
    else:
        os.unlink(path)


def _mask_proc() -> None:
    """No more user namespaces, and nothing in /proc that tells about the machine or changes it."""
    for name, limit in NAMESPACE_LIMITS.items():
        try:
            with open(f"/proc/sys/user/{name}", "w") as file:
                file.write(str(limit))
        except OSError:
            pass  # a kernel without this count; the filter refuses namespaces anyway
    for name in MASKED:
        path = f"/proc/{name}"
        if os.path.isdir(path):
            kernel.bind("/run", path, read_only=True)
        elif os.path.exists(path):
            kernel.bind("/dev/null", path)
    for name in READ_ONLY:
        if os.path.exists(f"/proc/{name}"):
            kernel.bind(f"/proc/{name}", f"/proc/{name}", read_only=True)


def _set_limits(limits: dict, base: int, processes: int) -> None:
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where the machine runs out of memory, it is the sandbox that goes
    for kind, limit in (
        (resource.RLIMIT_NPROC, processes),
        (
            resource.RLIMIT_AS,
            4 * limits["memory"] + 2**30,
        ),  # no single process runs away between two looks of the watchdog
        (resource.RLIMIT_FSIZE, limits["disk"] + base),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, 1024),
    ):
        _, hard = resource.getrlimit(kind)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)  # who started this may have less
        resource.setrlimit(kind, (limit, limit))
    signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # from within, the first process receives only signals that it has handlers for
