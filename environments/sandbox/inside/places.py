"""Folders and names that whoever makes a sandbox and its first process both know."""

from __future__ import annotations

__all__ = ["BASE", "DISK", "MASKED", "MOUNTED", "PROXY", "READ_ONLY", "ROOM", "WORK"]

DISK, BASE, WORK = "/run", "/base", "/work"
MASKED = (
    "acpi",
    "asound",
    "cmdline",
    "interrupts",
    "kcore",
    "key-users",
    "keys",
    "latency_stats",
    "sched_debug",
    "scsi",
    "timer_list",
    "timer_stats",
)
"""Names in /proc that tell about the machine, or reach it."""
READ_ONLY = ("bus", "fs", "irq", "sys", "sysrq-trigger")
"""Names in /proc through which settings are changed."""
MOUNTED = (WORK, "/tmp", "/dev/shm")
"""Where Docker has mounted a tmpfs each. The first has room for the tree and for what may be written; what is in the
others counts as well."""
ROOM = 17
"""Processes beyond the limit: the server, and room in which it sees who has crossed the limit."""
PROXY = ("127.0.0.1", 3128)
"""Where a door out of the sandbox is found, within the sandbox's own network namespace, if it has one."""
