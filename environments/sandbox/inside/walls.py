"""Walls that a process builds around itself inside of others: namespaces within namespaces.

bwrap needs a program to start. A process that has much imported and shall begin behind walls of its own builds them
itself, before anything of a task is there. It needs no rights for that: whoever makes a user namespace has all rights
in it, and none outside. The outer walls stay. What they show read-only cannot be made writable inside, and what they
hide is hidden.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct

from . import kernel
from .places import BASE

__all__ = ["build"]

GET_FLAGS, SET_FLAGS, UP = 0x8913, 0x8914, 1
"""Requests of ioctl(2) about a network device, and the flag of one that works."""
DEVICE = "16sh22x"
"""How the kernel reads the name and the flags of a device."""


def build() -> None:
    """Returns in another process, the first one of new namespaces; the one that has called is gone. Raises OSError for
    what the kernel refuses, in either of the two."""
    user, group = os.getuid(), os.getgid()
    kernel.leave_namespaces()
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    if os.fork():
        os._exit(0)
    kernel.keep_mounts()
    kernel.mount("proc", "/proc", flags=kernel.NOSUID | kernel.NODEV | kernel.NOEXEC)
    kernel.bind(
        BASE, BASE
    )  # as bwrap does with a tree: setup.py takes away what lies there, and what is mounted outside stays
    _enable_loopback()


def _enable_loopback() -> None:
    """A new network has a loopback device that does not work yet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as device:
        reply = fcntl.ioctl(device, GET_FLAGS, struct.pack(DEVICE, b"lo", 0))
        _, flags = struct.unpack(DEVICE, reply)
        fcntl.ioctl(device, SET_FLAGS, struct.pack(DEVICE, b"lo", flags | UP))
