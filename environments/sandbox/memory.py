"""How much memory a process and all below it hold, seen from outside, where nothing inside can hide any of it.

Proportional set sizes add up: a page that four processes share counts a quarter in each. Two kinds of memory are not in
them. Pages of shared anonymous mappings stay when a process takes them out of its tables, so such mappings count in
full. And the kernel holds what waits in sockets, so each socket counts as much as it may hold, and more where more
waits in it.
"""

from __future__ import annotations

import os

__all__ = ["measure_memory", "processes", "sockets"]


def measure_memory(first: int) -> int:
    """Bytes of a process, of all below it, and of the sockets of its network namespace."""
    return processes(first) + sockets(first)


def processes(first: int) -> int:
    """Bytes of a process and all below it. A process that ends meanwhile counts nothing."""
    total, shared, pids = 0, {}, [first]
    while pids:
        pid = pids.pop()
        try:
            tasks = [f"/proc/{pid}/task/{task}" for task in os.listdir(f"/proc/{pid}/task")]
            for task in tasks:
                pids += map(int, _read_or_empty(f"{task}/children").split())
            if thread := _find_living_thread(tasks):
                total += _read_proportional(thread)
                shared |= _read_anonymous(thread)
        except OSError:
            continue
    return total + sum(shared.values())


def sockets(pid: int) -> int:
    """Bytes, at most: of every socket in a process's network namespace the largest buffer that a program can ask for,
    which the kernel doubles; and twice what waits in TCP and UDP, whose buffers grow by themselves."""
    try:
        lines = _read(f"/proc/{pid}/net/sockstat").splitlines()
        if os.path.exists(f"/proc/{pid}/net/sockstat6"):
            lines += _read(f"/proc/{pid}/net/sockstat6").splitlines()
        used = {words[0]: int(words[2]) for words in map(bytes.split, lines)}
        total = used[b"sockets:"] * 2 * int(_read("/proc/sys/net/core/wmem_max"))
        if not any(used.get(kind) for kind in (b"TCP:", b"TCP6:", b"UDP:", b"UDP6:")):
            return total  # their lists are long to read, even where they are empty
        for kind in ("tcp", "tcp6", "udp", "udp6"):
            for line in _read(f"/proc/{pid}/net/{kind}").splitlines()[1:]:
                send_queue, _, receive_queue = line.split()[4].partition(b":")
                total += 2 * (int(send_queue, 16) + int(receive_queue, 16))
        return total
    except (OSError, ValueError, IndexError, KeyError):
        return 0


def _find_living_thread(tasks: list[str]) -> str:
    """One of these threads that has not ended, if there is one. A process lives on when its first thread ends, but is
    said to have no memory."""
    return next((task for task in tasks if _read_or_empty(f"{task}/statm").split()[:1] not in ([], [b"0"])), "")


def _read_or_empty(path: str) -> bytes:
    """What a thread says of itself, which may have ended: then nothing. Others of its process go on, and count."""
    try:
        return _read(path)
    except OSError:
        return b""


def _read_proportional(folder: str) -> int:
    for line in _read(f"{folder}/smaps_rollup").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def _read_anonymous(folder: str) -> dict[bytes, int]:
    """Shared anonymous memory, by its inode, which processes that share it have in common."""
    sizes: dict[bytes, int] = {}
    for line in _read(f"{folder}/maps").splitlines():
        if line.endswith(b"/dev/zero (deleted)"):
            span, _, _, _, inode, *_ = line.split()
            start, _, end = span.partition(b"-")
            sizes[inode] = sizes.get(inode, 0) + int(end, 16) - int(start, 16)
    return sizes


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
