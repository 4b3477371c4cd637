"""Where versions of weights lie: a folder, or an address that fsspec knows, as a mapping of keys to bytes.

    open_store("/shared/weights")              a folder, which all machines mount
    open_store("s3://bucket/run-7")            with s3fs (pip install 'etude[cluster]'); AWS_ENDPOINT_URL names another
                                               server than Amazon's
    open_store("memory://run-7")               within one process

A value appears completely or not at all, and `setdefault` is a conditional create: of two writers one wins, and both
learn who. A store that does not answer is asked again a few times, each time with a time-out; then it raises
StoreError, an OSError.
"""

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any, TypeVar

from kit.disk import atomic_write
from kit.settings import RunError

__all__ = ["Folder", "Remote", "StoreError", "open_store"]

T = TypeVar("T")


class StoreError(OSError):
    """The store does not answer, or refuses. The message names its address."""


def open_store(address: str, timeout: float = 10.0, attempts: int = 3) -> MutableMapping[str, bytes]:
    """The store at an address. timeout: seconds for connecting, and for each answer; attempts: how often a store that
    does not answer is asked. Raises RunError for an address of an unknown kind, and where its driver is not
    installed."""
    if not address or timeout <= 0 or attempts < 1:
        raise RunError(
            f"a store needs an address, a timeout above 0 and at least one attempt; got {address!r}, "
            f"{timeout} and {attempts}"
        )
    return Remote(address, timeout, attempts) if "://" in address else Folder(address)


class Folder(MutableMapping[str, bytes]):
    """Files of a folder; a key is a path below it."""

    def __init__(self, root: str | Path):
        self.root = Path(root)

    def __getitem__(self, key: str) -> bytes:
        try:
            return (self.root / key).read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise KeyError(key) from None

    def __setitem__(self, key: str, value: bytes) -> None:
        (self.root / key).parent.mkdir(parents=True, exist_ok=True)
        atomic_write(self.root / key, value)

    # Values are never None.
    def setdefault(self, key: str, default: bytes = b"") -> bytes:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Creates the key unless it exists; returns its value."""
        path, temporary = self.root / key, self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".tmp-{uuid.uuid4().hex}")
        try:
            atomic_write(temporary, default)
            os.link(temporary, path)  # fails where there is one, unlike a rename
        except FileExistsError:
            return self[key]
        finally:
            temporary.unlink(missing_ok=True)
        return default

    def __delitem__(self, key: str) -> None:
        try:
            (self.root / key).unlink()
        except FileNotFoundError:
            raise KeyError(key) from None
        with contextlib.suppress(OSError):  # not the last one of its version
            (self.root / key).parent.rmdir()

    def __iter__(self) -> Iterator[str]:
        paths = (path for path in self.root.rglob("*") if not path.name.startswith(".tmp-") and path.is_file())
        return iter(sorted(path.relative_to(self.root).as_posix() for path in paths))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Remote(MutableMapping[str, bytes]):
    """Objects below an address of fsspec."""

    def __init__(self, address: str, timeout: float, attempts: int):
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise RunError(
                f"the store {address} needs fsspec: pip install 'etude[cluster]'; or name a folder"
            ) from None
        self.address, self.timeout, self.attempts = address, timeout, attempts
        options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
        if address.startswith(("s3://", "s3a://")):
            config = {"connect_timeout": timeout, "read_timeout": timeout, "retries": {"max_attempts": 0}}
            options |= {"config_kwargs": config}
        try:
            self.fs, self.root = url_to_fs(address, **options)
        except (ImportError, ValueError) as error:
            raise RunError(
                f"the store {address} cannot be opened ({error}); its driver for fsspec is missing, or "
                f"the address is wrong"
            ) from None
        if hasattr(self.fs, "retries"):
            self.fs.retries = (
                1  # the attempts are counted here, or a store that is down would be waited for attempts² times
            )

    def call_with_retries(self, call: Callable[[], T], key: str) -> T:
        """What call() returns. Raises KeyError where the key does not exist, FileExistsError where it does, and
        StoreError after the last attempt."""
        for attempt in range(1, self.attempts + 1):
            try:
                return call()
            except FileNotFoundError:
                raise KeyError(key) from None
            except FileExistsError:
                raise
            except Exception as error:  # drivers raise their own, not only OSError
                if attempt == self.attempts:
                    raise StoreError(
                        f"the store {self.address} does not answer for {key}: {type(error).__name__}: {error}"
                    ) from None
                time.sleep(0.1 * 2**attempt)
        raise AssertionError

    def full_key(self, key: str) -> str:
        return f"{self.root}/{key}"

    def __getitem__(self, key: str) -> bytes:
        return self.call_with_retries(lambda: self.fs.cat_file(self.full_key(key)), key)

    def __setitem__(self, key: str, value: bytes) -> None:
        self.call_with_retries(lambda: self.fs.pipe_file(self.full_key(key), value, **self.write_timeout(value)), key)

    def write_timeout(self, value: bytes) -> dict[str, float]:
        """How long a write may take: a server that does not answer before it has all bytes is not bound by the
        time-outs of the connection. A megabyte a second is the least that a store must take."""
        return {"timeout": 2 * self.timeout + len(value) / 1e6} if getattr(self.fs, "async_impl", False) else {}

    # Values are never None.
    def setdefault(self, key: str, default: bytes = b"") -> bytes:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Creates the key unless it exists; returns its value. An attempt whose answer was lost counts: what lies there
        then is its value."""
        try:
            self.call_with_retries(
                lambda: self.fs.pipe_file(self.full_key(key), default, mode="create", **self.write_timeout(default)),
                key,
            )
        except FileExistsError:
            return self[key]
        return default

    def __delitem__(self, key: str) -> None:
        self.call_with_retries(lambda: self.fs.rm_file(self.full_key(key)), key)

    def __iter__(self) -> Iterator[str]:
        try:
            self.fs.invalidate_cache()
            paths = self.call_with_retries(lambda: self.fs.find(self.root), "its keys")
        except KeyError:
            return iter(())
        return iter(sorted(path.removeprefix(self.root).lstrip("/") for path in paths))

    def __len__(self) -> int:
        return sum(1 for _ in self)
