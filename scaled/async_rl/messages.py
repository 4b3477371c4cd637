"""What the services of asynchronous RL say to each other.

A message is a frozen dataclass of numbers, words and tuples of numbers. It travels as JSON, so reading one runs
nothing. Rollouts and weights do not travel in messages: they lie in a store, and a message names their key and digest.

Every client has an epoch, which whoever starts processes raises each time. A message of an earlier epoch than the last
one seen is from a process that was given up: it is refused.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from kit.disk import parse_json

__all__ = [
    "KINDS",
    "Batch",
    "Beat",
    "Done",
    "Forget",
    "Hello",
    "Loaded",
    "Message",
    "Published",
    "Ready",
    "Refused",
    "Repair",
    "Stop",
    "LoadFailed",
    "Trained",
    "Update",
    "Work",
    "Workers",
    "decode",
    "encode",
]


@dataclass(frozen=True)
class Message:
    """The fields that all messages to the reconciler have."""

    sender: str
    """ "trainer", or the name of a worker."""
    epoch: int
    """How many times a process of this name was started before."""


@dataclass(frozen=True)
class Hello(Message):
    """A worker that connects, again or for the first time."""

    groups: int
    """How many groups it can play at a time."""
    version: int
    """The weights it holds; −1 for none."""
    running: tuple[int, ...] = ()
    """The groups that it plays, or has played since it last heard of the reconciler."""
    oldest: tuple[int, ...] = ()
    """For each of them the version of its oldest token."""


@dataclass(frozen=True)
class Beat(Message):
    """A worker is alive."""


@dataclass(frozen=True)
class Loaded(Message):
    """A worker holds new weights."""

    version: int


@dataclass(frozen=True)
class LoadFailed(Message):
    """A worker cannot load a version that is published: what lies in the store is damaged, or is gone."""

    version: int


@dataclass(frozen=True)
class Done(Message):
    """A group is sampled, scored and stored."""

    group: int
    oldest: int
    """The version of its oldest token."""
    key: str
    """Where its rollouts lie."""
    digest: str
    """SHA-256 of what lies there."""


@dataclass(frozen=True)
class Ready(Message):
    """The trainer has nothing to do."""

    version: int
    """Steps that it has done."""
    groups: tuple[int, ...] = ()
    """The groups of its last step; empty before the first."""


@dataclass(frozen=True)
class Trained(Message):
    """A step is done and saved."""

    version: int
    """The number of steps before it."""
    groups: tuple[int, ...]


@dataclass(frozen=True)
class Published(Message):
    """The trainer's weights can be loaded."""

    version: int
    """Steps before them."""


@dataclass(frozen=True)
class Work:
    """To a worker: play these groups."""

    groups: tuple[int, ...]


@dataclass(frozen=True)
class Forget:
    """To a worker: give these groups up. They are too old, or another worker plays them."""

    groups: tuple[int, ...]


@dataclass(frozen=True)
class Update:
    """To a worker: this version is published."""

    version: int


@dataclass(frozen=True)
class Batch:
    """To the trainer: take a step on these groups."""

    version: int
    groups: tuple[int, ...]
    keys: tuple[str, ...]
    digests: tuple[str, ...]


@dataclass(frozen=True)
class Repair:
    """To the trainer: somebody cannot load this version. Publish it anew, whole."""

    version: int


@dataclass(frozen=True)
class Workers:
    """To the trainer: so many workers live. It is told when the last one is gone, and when there are some again."""

    alive: int


@dataclass(frozen=True)
class Refused:
    """To whoever just spoke: it was given up, or says what cannot be. It should end."""

    reason: str


@dataclass(frozen=True)
class Stop:
    """To everyone: all steps are done."""


TO_RECONCILER = (Hello, Beat, Loaded, LoadFailed, Done, Ready, Trained, Published)
KINDS = {kind.__name__: kind for kind in (*TO_RECONCILER, Work, Forget, Update, Batch, Repair, Workers, Refused, Stop)}


def encode(message: object) -> bytes:
    """A message as JSON."""
    return json.dumps(
        {"kind": type(message).__name__, **asdict(message)}  # pyright: ignore[reportArgumentType]
    ).encode()


def decode(data: bytes):
    """The message that `encode` made `data` of. Raises ValueError for anything else."""
    try:
        record = parse_json(data)
        kind = KINDS[record.pop("kind")]
        names = {field.name: str(field.type) for field in fields(kind)}
        if not set(record) <= set(names):
            raise ValueError(f"{kind.__name__} has no field {min(set(record) - set(names))}")
        arguments: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in record.items()
        }
        message = kind(**arguments)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a message: {error}") from None
    for name, type_name in names.items():
        if not matches_type(getattr(message, name), type_name):
            raise ValueError(f"{kind.__name__}.{name} must be {type_name}; got {getattr(message, name)!r:.60}")
    return message


def matches_type(value: object, type_name: str) -> bool:
    if type_name.startswith("tuple"):
        element_type = int if "int" in type_name else str
        return isinstance(value, tuple) and all(type(element) is element_type for element in value)
    return type(value) is {"int": int, "str": str}[type_name]
