"""Where sandboxes keep what they build: a folder of the user, which the sandbox's own user may read."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from kit.settings import RunError

__all__ = ["SANDBOX_USER", "cache_folder", "keep", "make_folder", "owner", "reachable", "unused"]

SANDBOX_USER = 65533
"""The user as which bwrap runs when root asks. Limits on processes do not bind root, and files of root's would be the
sandbox's own. Debian and systemd give this number to nobody."""


def owner() -> int | None:
    """The user to whom a sandbox's files belong on this machine; None for the one who asks."""
    return SANDBOX_USER if os.geteuid() == 0 else None


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/etude`, by default `~/.cache/etude`, and for root, whose home is closed to others,
    `/var/cache/etude`."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(home):
        return Path(home) / "etude"
    return Path("/var/cache/etude") if os.geteuid() == 0 else Path.home() / ".cache" / "etude"


def make_folder(folder: Path) -> Path:
    """The folder, made if it is missing, with all above it that are. Other users may enter those, whatever the umask
    is."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
    return folder


def keep(folder: Path) -> int:
    """Says to all processes that this one uses a folder, until it ends or closes the handle that it gets. Raises
    OSError for one that is gone."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(handle, fcntl.LOCK_SH)
    return handle


def unused(folder: Path) -> int | None:
    """A handle of a folder that nobody uses, and that nobody can begin to use until the handle is closed; None where
    somebody does."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def reachable(folder: Path) -> Path:
    """The same folder. Raises RunError if root asks and the sandbox's user cannot get there."""
    if owner() is not None:
        for path in (folder, *folder.resolve().parents):
            if not path.stat().st_mode & 0o001:
                raise RunError(
                    f"{path} is closed to others, and a sandbox that root starts runs as user {SANDBOX_USER}: "
                    f"set XDG_CACHE_HOME to an open folder"
                )
    return folder
