"""System calls that Python has no function for: mounts, capabilities, limits of the process, the filter. Each raises
OSError."""

from __future__ import annotations

# The package signal loads enum, which slows down every start.
import _signal as signal  # pyright: ignore[reportMissingImports]
import ctypes
import os

__all__ = [
    "bind",
    "drop_capabilities",
    "end_with_parent",
    "filter_calls",
    "keep_mounts",
    "keep_private",
    "leave_namespaces",
    "mount",
    "only_handles",
    "signal",
    "unmount",
]

NOSUID, NODEV, NOEXEC, READ_ONLY, REMOUNT, BIND, RECURSIVE, PRIVATE = 2, 4, 8, 1, 32, 4096, 16384, 1 << 18
"""Flags of mount(2)."""
NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
"""Of unshare(2): mount, cgroup, UTS, IPC, user, process, network."""
DETACH = 2
"""Of umount2(2): what is open stays usable."""
SET_DUMPABLE, SET_SECCOMP, DROP_BOUNDING, NO_NEW_PRIVILEGES, AMBIENT, DEATH_SIGNAL = 4, 22, 24, 38, 47, 1
"""Options of prctl(2)."""
libc = ctypes.CDLL(None, use_errno=True)
libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
libc.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]


def _check(code: int, action: str) -> None:
    if code != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{action}: {os.strerror(number)}")


def mount(kind: str, target: str, options: str = "", flags: int = NOSUID | NODEV) -> None:
    """Mounts a file system of this kind."""
    _check(
        libc.mount(kind.encode(), target.encode(), kind.encode(), flags, options.encode()),
        f"mount of {kind} on {target}",
    )


def bind(source: str, target: str, read_only: bool = False) -> None:
    """Lets a file or a folder appear at another path."""
    _check(libc.mount(source.encode(), target.encode(), None, BIND, None), f"bind of {source} on {target}")
    if read_only:
        flags = BIND | REMOUNT | READ_ONLY | NOSUID | NODEV | NOEXEC
        _check(libc.mount(None, target.encode(), None, flags, None), f"making {target} read-only")


def unmount(target: str) -> None:
    """Takes a mount out of sight. What was bound from it, and what is open in it, goes on."""
    _check(libc.umount2(target.encode(), DETACH), f"unmount of {target}")


def keep_mounts() -> None:
    """What is mounted from now on is seen in no other namespace, and the other way round."""
    _check(libc.mount(None, b"/", None, RECURSIVE | PRIVATE, None), "making mounts private")


def leave_namespaces() -> None:
    """New ones of all kinds; that of processes is for those that are started next."""
    _check(libc.unshare(NAMESPACES), "new namespaces")


def only_handles(*handles: int) -> None:
    """These become the standard ones, and all others are closed. None of them may be a standard one."""
    for number, handle in enumerate(handles):
        os.dup2(handle, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) >= len(handles):
            try:
                os.close(int(name))
            except OSError:
                pass  # that of the folder itself


def drop_capabilities() -> None:
    """Gives up every capability, for this process and for all that it starts, for good."""
    for number in range(64):
        if libc.prctl(DROP_BOUNDING, number, 0, 0, 0) != 0:
            break  # the kernel has no such capability
    _check(libc.prctl(AMBIENT, 4, 0, 0, 0), "clearing ambient capabilities")
    header, no_capabilities = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    _check(libc.capset(header, no_capabilities), "capset")


def keep_private() -> None:
    """No other process may look into this one."""
    _check(libc.prctl(SET_DUMPABLE, 0, 0, 0, 0), "PR_SET_DUMPABLE")


def end_with_parent() -> None:
    """This process ends with the one that started it."""
    _check(libc.prctl(DEATH_SIGNAL, 9, 0, 0, 0), "PR_SET_PDEATHSIG")


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def filter_calls(program: bytes) -> None:
    """Installs a seccomp filter, eight bytes an instruction, for this process and for all that it starts."""
    _check(libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
    packed = _Program(len(program) // 8, program)
    _check(libc.prctl(SET_SECCOMP, 2, ctypes.addressof(packed), 0, 0), "seccomp filter")
