"""Which system calls a sandbox refuses, and the filter that the kernel runs at each call.

A namespace hides what is there; a filter keeps closed what the kernel offers to everybody: families of sockets that
know no namespace (AF_VSOCK reaches the machine that this one runs on), large and young interfaces with a record of
errors, and memory that no limit counts. A refused call fails with ENOSYS, as on a kernel that lacks it, so that
programs take their other way. Calls by another ABI (32-bit, x32) have other numbers: they end the process.

The filter is a program for the kernel's classic BPF machine (Linux, Documentation/userspace-api/seccomp_filter.rst),
written here by hand: load a word of the call, compare, return.
"""

from __future__ import annotations

import errno
import platform
import struct
from dataclasses import dataclass

from kit.settings import RunError

__all__ = ["FAMILIES", "MACHINES", "NAMESPACES", "NEWEST", "REFUSED", "Machine", "program", "refused"]


@dataclass(frozen=True)
class Machine:
    """What differs between processors."""

    column: int
    """Of the table."""
    audit: int
    """How the kernel names the ABI (linux/audit.h)."""
    x32: bool
    """Whether there is a second ABI under the same name, whose numbers begin at 2^30."""
    socket: int
    socketpair: int
    clone: int
    ioctl: int
    itself: tuple[int, ...]
    """prlimit, sched_setparam, sched_setscheduler, sched_setattr."""
    priority: tuple[tuple[int, int], ...]
    """setpriority and ioprio_set, each with the word that says that a single process is meant."""


MACHINES = {
    "x86_64": Machine(
        0,
        0xC000003E,
        True,
        socket=41,
        socketpair=53,
        clone=56,
        ioctl=16,
        itself=(302, 142, 144, 314),
        priority=((141, 0), (251, 1)),
    ),
    "aarch64": Machine(
        1,
        0xC00000B7,
        False,
        socket=198,
        socketpair=199,
        clone=220,
        ioctl=29,
        itself=(261, 118, 119, 274),
        priority=((140, 0), (30, 1)),
    ),
}
REFUSED: dict[str, dict[str, tuple[int | None, int | None]]] = {
    "another process's memory": {
        "ptrace": (101, 117),
        "process_vm_readv": (310, 270),
        "process_vm_writev": (311, 271),
        "process_madvise": (440, 440),
        "kcmp": (312, 272),
        "pidfd_getfd": (438, 438),
    },
    "the kernel's keyrings, which user namespaces share in part": {
        "add_key": (248, 217),
        "request_key": (249, 218),
        "keyctl": (250, 219),
    },
    "programs and hooks within the kernel": {
        "bpf": (321, 280),
        "perf_event_open": (298, 241),
        "userfaultfd": (323, 282),
        "init_module": (175, 105),
        "finit_module": (313, 273),
        "delete_module": (176, 106),
        "create_module": (174, None),
        "kexec_load": (246, 104),
        "kexec_file_load": (320, 294),
    },
    "queues of calls that no filter sees": {
        "io_uring_setup": (425, 425),
        "io_uring_enter": (426, 426),
        "io_uring_register": (427, 427),
    },
    "requests of which the machine has a fixed number for all its users": {"io_setup": (206, 0)},
    "mounts": {
        "mount": (165, 40),
        "umount2": (166, 39),
        "pivot_root": (155, 41),
        "chroot": (161, 51),
        "move_mount": (429, 429),
        "open_tree": (428, 428),
        "fsopen": (430, 430),
        "fsconfig": (431, 431),
        "fsmount": (432, 432),
        "fspick": (433, 433),
        "mount_setattr": (442, 442),
        "quotactl": (179, 60),
        "quotactl_fd": (443, 443),
        "swapon": (167, 224),
        "swapoff": (168, 225),
    },
    "namespaces": {"unshare": (272, 97), "setns": (308, 268), "clone3": (435, 435)},
    "files by handle, past every folder's permission": {
        "name_to_handle_at": (303, 264),
        "open_by_handle_at": (304, 265),
    },
    "memory that belongs to no process, and so to no limit": {
        "memfd_create": (319, 279),
        "memfd_secret": (447, 447),
        "shmget": (29, 194),
        "shmat": (30, 196),
        "shmctl": (31, 195),
        "msgget": (68, 186),
        "msgsnd": (69, 189),
        "semget": (64, 190),
        "mq_open": (240, 180),
        "vmsplice": (278, 75),
    },
    "the machine itself": {
        "reboot": (169, 142),
        "settimeofday": (164, 170),
        "clock_settime": (227, 112),
        "adjtimex": (159, 171),
        "clock_adjtime": (305, 266),
        "syslog": (103, 116),
        "acct": (163, 89),
        "sethostname": (170, 161),
        "setdomainname": (171, 162),
        "vhangup": (153, 58),
        "iopl": (172, None),
        "ioperm": (173, None),
        "modify_ldt": (154, None),
        "lookup_dcookie": (212, 18),
        "uselib": (134, None),
        "ustat": (136, None),
        "sysfs": (139, None),
        "_sysctl": (156, None),
        "nfsservctl": (180, 42),
        "fanotify_init": (300, 262),
        "personality": (135, 92),
    },
    "where memory lies": {
        "mbind": (237, 235),
        "set_mempolicy": (238, 237),
        "set_mempolicy_home_node": (450, 450),
        "migrate_pages": (256, 238),
        "move_pages": (279, 239),
    },
}
"""Why, and which: numbers on x86-64 and on aarch64, None where a processor's kernel has no such call. clone3 has its
flags in memory, where no filter can read them; the C library takes clone instead."""
FAMILIES = {1: "AF_UNIX", 2: "AF_INET", 10: "AF_INET6"}
"""Families of sockets that may be made: each lies within a network namespace. All others are refused with
EAFNOSUPPORT."""
NEWEST = 456
"""The last call that this table was made with (futex_requeue, Linux 6.7; both processors number new calls alike). Later
ones are refused."""
NAMESPACES = 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000 | 0x00020000
"""Flags of clone(2) that make a namespace: cgroup, UTS, IPC, user, process, network, mount. They are refused with
EPERM."""
TERMINAL = {0x5412: "TIOCSTI", 0x541C: "TIOCLINUX"}
"""Requests of ioctl(2) that type into somebody's terminal. They are refused with EPERM."""
CALLING_PROCESS = 0
"""The only process whose limits and priority may be changed, else EPERM: the kernel lets a process lower those of the
server, which is the same user."""
RAW, TYPE_MASK = 3, 0xF
"""Raw sockets are refused with EPERM; a socket's type holds flags beside it."""
PROTOCOLS = {0: "the family's own", 6: "TCP", 17: "UDP"}
"""Others are refused with EPROTONOSUPPORT: for most of them the kernel would load a module."""

LOAD, AND, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
"""Instructions: load a word; and; jump if equal, if at least, if any bit is set; return."""
NUMBER, ABI, FIRST, SECOND, THIRD = 0, 4, 16, 24, 32
"""Where the words lie in the kernel's `struct seccomp_data`; of an argument the lower half, which is all that these
calls read."""
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000


def refused(machine: Machine) -> dict[int, str]:
    """Number and name of every call that is refused whatever its arguments are."""
    pairs = ((numbers[machine.column], name) for calls in REFUSED.values() for name, numbers in calls.items())
    return {number: name for number, name in pairs if number is not None}


def program(name: str | None = None) -> bytes:
    """The filter for a processor (by default this one), eight bytes an instruction. Raises RunError for a processor
    without a table."""
    name = name or platform.machine()
    if name not in MACHINES:
        raise RunError(f"no filter of system calls is known for {name}; there are {' and '.join(MACHINES)}")
    machine = MACHINES[name]
    lines = [_line(LOAD, ABI), _line(EQUAL, machine.audit, 1, 0), _line(RETURN, KILL), _line(LOAD, NUMBER)]
    if machine.x32:
        lines += [_line(AT_LEAST, 1 << 30, 0, 1), _line(RETURN, KILL)]
    lines += [_line(AT_LEAST, NEWEST + 1, 0, 1), _line(RETURN, ERROR | errno.ENOSYS)]
    for number in sorted(refused(machine)):
        lines += [_line(EQUAL, number, 0, 1), _line(RETURN, ERROR | errno.ENOSYS)]
    lines += _match_call(
        machine.clone, [_line(LOAD, FIRST), _line(ANY_BIT, NAMESPACES, 0, 1), _line(RETURN, ERROR | errno.EPERM)]
    )
    process_check = [_line(EQUAL, CALLING_PROCESS, 1, 0), _line(RETURN, ERROR | errno.EPERM)]
    for number in machine.itself:
        lines += _match_call(number, [_line(LOAD, FIRST), *process_check])
    for number, process in machine.priority:
        lines += _match_call(
            number,
            [
                _line(LOAD, FIRST),
                _line(EQUAL, process, 1, 0),
                _line(RETURN, ERROR | errno.EPERM),
                _line(LOAD, SECOND),
                *process_check,
            ],
        )
    requests = [_line(LOAD, SECOND)]
    for request in TERMINAL:
        requests += [_line(EQUAL, request, 0, 1), _line(RETURN, ERROR | errno.EPERM)]
    lines += _match_call(machine.ioctl, requests)
    families = [_line(EQUAL, family, len(FAMILIES) - i, 0) for i, family in enumerate(FAMILIES)]
    family = [_line(LOAD, FIRST), *families, _line(RETURN, ERROR | errno.EAFNOSUPPORT)]
    raw = [_line(LOAD, SECOND), _line(AND, TYPE_MASK), _line(EQUAL, RAW, 0, 1), _line(RETURN, ERROR | errno.EPERM)]
    protocols = [_line(EQUAL, protocol, len(PROTOCOLS) - i, 0) for i, protocol in enumerate(PROTOCOLS)]
    protocol = [_line(LOAD, THIRD), *protocols, _line(RETURN, ERROR | errno.EPROTONOSUPPORT)]
    for number in (machine.socket, machine.socketpair):
        lines += _match_call(number, family + raw + protocol)
    return b"".join([*lines, _line(RETURN, ALLOW)])


def _match_call(number: int, lines: list[bytes]) -> list[bytes]:
    """Lines that only calls of one number come through; they end in allowing the call."""
    return [_line(EQUAL, number, 0, len(lines) + 1), *lines, _line(RETURN, ALLOW)]


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One instruction. `if_true`, `if_false`: how many lines a comparison skips."""
    return struct.pack("<HBBI", code, if_true, if_false, value)
