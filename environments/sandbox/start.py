"""Starting bwrap, and what to say when it does not start."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from kit.disk import parse_json
from kit.settings import RunError

from .cache import owner
from .wire import Wire

__all__ = ["BOOT", "Started", "explain", "information", "start"]

BOOT = "import sys; sys.path.insert(0, '/usr/lib/sandbox'); from inside.server import main; main()"
NURSERY = "import sys; sys.path.insert(0, '/usr/lib/sandbox'); from inside.nursery import main; main({})"
LANGUAGE = {"LANG": "C.UTF-8"}
"""All that a nursery finds in its environment: Python reads it when it begins, and its forks' programs expect it."""
CAPABILITIES = ("SYS_ADMIN", "SYS_RESOURCE", "SETPCAP", "DAC_OVERRIDE", "CHOWN", "FOWNER")
"""Of the first process, within the sandbox's own user namespace, until it has mounted the work tree and set its
limits."""
NODES = ("null", "zero", "full", "random", "urandom")
PROFILE = "abi <abi/4.0>, profile bwrap /usr/bin/bwrap flags=(unconfined) { userns, }"


class Spawner:
    """One thread that starts all sandboxes and lives as long as the process. The kernel ends a sandbox when the
    *thread* that started it ends; a worker's may end before its sandboxes do."""

    def __init__(self) -> None:
        self.lock, self.pool = threading.Lock(), None
        os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        """A forked process has none of its parent's threads."""
        self.lock, self.pool = threading.Lock(), None

    def run(self, command: list[str], **options) -> subprocess.Popen:
        with self.lock:
            self.pool = self.pool or ThreadPoolExecutor(1, thread_name_prefix="sandboxes")
        return self.pool.submit(subprocess.Popen, command, **options).result()


SPAWNER = Spawner()


@dataclass(frozen=True)
class Started:
    """A sandbox whose first process runs."""

    monitor: subprocess.Popen
    """bwrap, outside. It ends after the last process inside."""
    first: int
    """The number of the first process inside, as the machine sees it."""
    handle: int
    """A pidfd of it, which never means another process."""
    starter: int
    """The process that started it, and that alone ends it: a fork of that process does not when it ends itself."""
    afterwards: list[Callable[[], None]] = field(default_factory=list)
    """What is done once all processes are gone."""

    def stop(self) -> None:
        """Ends the first process. The kernel ends all others with it; nothing is waited for."""
        try:
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def kill(self, wait: float = 10.0) -> None:
        """Ends the first process, and with it all others. Returns once they are gone: bwrap waits for them."""
        if os.getpid() != self.starter:
            return
        self.stop()
        try:
            self.monitor.wait(wait)
        except subprocess.TimeoutExpired:
            self.monitor.kill()
            self.monitor.wait()
        os.close(self.handle)
        for pipe in (self.monitor.stdin, self.monitor.stdout, self.monitor.stderr):
            if pipe is not None:
                pipe.close()
        while self.afterwards:
            self.afterwards.pop()()

    def wire(self, tick: Callable[[], None]) -> Wire:
        """The pipes to the first process, which are bwrap's standard ones."""
        assert self.monitor.stdin is not None and self.monitor.stdout is not None
        return Wire(self.monitor.stdout.fileno(), self.monitor.stdin.fileno(), tick)

    def crossed(self) -> bool:
        """Whether a bound of bwrap's on memory has ended a process: it has none."""
        return False

    def failure(self, wire: Wire) -> str:
        """Why bwrap or the first process has ended, in one line."""
        return failure(self.monitor)


def command(program: str, root: Path, tree: Path | None, information: int, inherited: tuple[int, ...]) -> list[str]:
    """The words that start a sandbox, or a nursery where there is no tree. `information`: where bwrap writes the number
    of the first process."""
    words = [
        program,
        "--unshare-user",
        "--unshare-ipc",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-uts",
        "--unshare-cgroup-try",
    ]
    words += [
        "--uid",
        "1000",
        "--gid",
        "1000",
        "--hostname",
        "sandbox",
        "--die-with-parent",
        "--new-session",
        "--as-pid-1",
        "--cap-drop",
        "ALL",
    ]
    for name in CAPABILITIES if tree is not None else ():
        words += ["--cap-add", f"CAP_{name}"]
    words += ["--ro-bind", str(root), "/", "--proc", "/proc"]
    words += ["--ro-bind", str(tree), "/base"] if tree is not None else []
    for name in NODES:
        words += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    words += ["--info-fd", str(information), "--chdir", "/", "--", "/usr/bin/python3", "-I"]
    return [*words, "-S", "-c", BOOT] if tree is not None else [*words, "-B", "-c", NURSERY.format(*inherited)]


def start(root: Path, tree: Path | None, inherited: tuple[int, ...] = ()) -> Started:
    """Starts the first process over a read-only root, with `tree` at /base; without a tree it is that of a nursery, and
    has no capabilities. Its pipes are the monitor's standard ones, and it inherits these handles. Raises RunError."""
    if (program := shutil.which("bwrap")) is None:
        raise RunError(
            "a sandbox needs bubblewrap, which is not installed; on Debian and Ubuntu: apt-get install bubblewrap"
        )
    if not Path("/proc/thread-self/children").exists():
        raise RunError(
            "a sandbox's limit on memory needs a kernel that lists the children of a process (CONFIG_PROC_CHILDREN)"
        )
    user_id = owner()
    user_options, prefix = {}, []
    if user_id is not None and (setpriv := shutil.which("setpriv")) is not None:
        prefix = [setpriv, f"--reuid={user_id}", f"--regid={user_id}", "--clear-groups", "--"]
    elif user_id is not None:  # Python changes the user only after a fork, which takes long in a large process
        user_options = {"user": user_id, "group": user_id, "extra_groups": []}
    reader, writer = os.pipe()
    try:
        # bwrap begins without environment: what --clearenv takes away can still be read in /proc/1/environ
        pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
        words = [*prefix, *command(program, root, tree, writer, inherited)]
        environment = {} if tree is not None else LANGUAGE
        monitor = SPAWNER.run(
            words,
            **pipes,
            **user_options,
            bufsize=0,
            env=environment,
            cwd="/",
            pass_fds=(writer, *inherited),
            start_new_session=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        os.close(reader)
        raise RunError(f"{program} cannot be started: {error}") from None
    finally:
        os.close(writer)
    report = information(reader)
    try:
        first = int(parse_json(report)["child-pid"])
        return Started(monitor, first, os.pidfd_open(first), os.getpid())
    except (ValueError, KeyError, OSError):
        raise RunError(failure(monitor)) from None


def information(reader: int, seconds: float = 30.0) -> bytes:
    """What bwrap says of the first process, and nothing where it does not come to that. Closes the handle."""
    output, until, poll = b"", time.monotonic() + seconds, select.poll()
    poll.register(reader, select.POLLIN)
    try:
        while poll.poll(1000 * max(0.0, until - time.monotonic())) and (block := os.read(reader, 1000)):
            output += block
    finally:
        os.close(reader)
    return output


def failure(monitor: subprocess.Popen) -> str:
    """Why bwrap or the first process has ended, in one line."""
    assert monitor.stderr is not None
    os.set_blocking(monitor.stderr.fileno(), False)
    until, output = time.monotonic() + 2, b""
    while time.monotonic() < until and monitor.poll() is None:
        time.sleep(0.01)
    output = monitor.stderr.read(4000) or b""
    monitor.kill()
    monitor.wait()
    for pipe in (monitor.stdin, monitor.stdout, monitor.stderr):
        if pipe is not None:
            pipe.close()
    return explain(" ".join(output.decode(errors="replace").split()))


def explain(output: str, settings: Path = Path("/proc/sys")) -> str:
    """What to do about an error of bwrap's: which setting forbids user namespaces, if one does."""

    def value(name: str) -> str:
        try:
            return (settings / name).read_text().strip()
        except OSError:
            return ""

    about = f"bwrap says: {output[:300] or 'nothing'}"
    if not re.search(r"[Nn]amespace|uid map|loopback|Operation not permitted|Permission denied|No space left", output):
        return f"the sandbox did not start; {about}"
    if value("kernel/apparmor_restrict_unprivileged_userns") == "1":
        load = "apparmor_parser -r /etc/apparmor.d/bwrap"
        return (
            f"AppArmor forbids user namespaces: write '{PROFILE}' into /etc/apparmor.d/bwrap, and run: {load}; {about}"
        )
    if value("kernel/unprivileged_userns_clone") == "0":
        return f"the kernel forbids user namespaces; run: sysctl -w kernel.unprivileged_userns_clone=1; {about}"
    if value("user/max_user_namespaces") == "0":
        return f"the kernel allows no user namespaces; run: sysctl -w user.max_user_namespaces=10000; {about}"
    return (
        f"user namespaces are forbidden here; in a container, start it with --security-opt seccomp=unconfined; {about}"
    )
