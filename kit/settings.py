"""Settings of a technique: a frozen dataclass, filled from TOML and from `--set key=value`."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import math
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

__all__ = [
    "LARGEST",
    "LARGEST_INTEGER",
    "Interrupted",
    "Preempted",
    "RunError",
    "describe",
    "fill",
    "parse_number",
    "quote",
]

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
SEEDS = 2**53
"""Upper bound of seeds. Experiments derive seeds a thousand times as large, and generators take 64 bits."""
LARGEST_INTEGER = 2**53 - 1
"""Largest whole number of a setting: beyond it, float64 no longer tells neighbours apart."""
MAX_DIGITS = 400
"""Longest text that is read as a whole number; Python refuses to read more than some thousand digits."""
NUMBER = re.compile(r"[+-]?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
LARGEST = (2 - 2**-23) * 2.0**127
"""Largest number of float32: a setting beyond it would be infinite in any tensor of that dtype."""


class RunError(Exception):
    """A one-line message that says what to do. The command line prints it and exits with code 2."""


class Interrupted(Exception):
    """The user stopped a run; the message says how to continue. The command line exits with the code."""

    code = 130


class Preempted(Interrupted):
    """A scheduler stopped a run, by SIGTERM or SIGUSR1, and may start it again."""

    code = 75  # EX_TEMPFAIL of sysexits.h: to be tried again later


def fill(cls: type[T], toml: dict | None, sets: Iterable[str | tuple[str, Any]] = (), base: T | None = None) -> T:
    """An instance of the (nested) dataclass `cls` from a TOML table, overridden by `key.sub=value` strings. An item of
    `sets` may also be a pair (key, value), whose value is not parsed: a path may be called none. Defaults are those of
    `base`, or else of the class.

    A field with the metadata {"renamed_from": OLD} is also read from the key OLD, with a line on stderr that names the
    new one.

    Raises RunError for an unknown key (with close matches), for a value of the wrong type or outside a Literal, for a
    number that float32 cannot hold, and for a ValueError from the dataclass's `__post_init__`.
    """
    if toml is not None and not isinstance(toml, dict):
        raise RunError(f"settings must be a table of keys and values, got {quote(toml)}")
    tree: dict = _copy(toml or {})
    for item in sets:
        if isinstance(item, str):
            key, equals, value = item.partition("=")
            if not equals or not key.strip():
                raise RunError(f"--set expects KEY=VALUE, got {item!r}")
            value = _Word(value.strip())
        else:
            key, value = item
        *groups, last = key.strip().split(".")
        table = tree
        for group in groups:
            table = table.setdefault(group, {})
            if not isinstance(table, dict):
                raise RunError(f"--set {key.strip()}: {group!r} is a value, not a group of keys")
        table[last] = value
    known_keys = [key for key, *_ in describe(cls)]
    return _build(cls, tree, "", base, known_keys)


def parse_number(text: str) -> int | float | None:
    """The number that a text spells, or None: ASCII digits with an optional sign, fraction and exponent, as TOML
    and JSON write decimal numbers, but without underscores. Without fraction and exponent it is a whole number."""
    if not NUMBER.fullmatch(text):
        return None
    return int(text) if len(text) <= MAX_DIGITS and text.lstrip("+-").isdigit() else float(text)


def describe(cls: Any) -> list[tuple[str, str, Any, str]]:
    """(dotted key, type, default, docstring) of every field of a nested dataclass, in order. Given an instance, its
    values are the defaults."""
    base, cls = (None, cls) if isinstance(cls, type) else (cls, type(cls))
    rows = []
    docs, hints = _field_docs(cls), typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind, default = hints[field.name], _default(field) if base is None else getattr(base, field.name)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            for key, text, value, doc in describe(kind):
                if default is not dataclasses.MISSING:
                    value = _get_nested(default, key)
                rows.append((f"{field.name}.{key}", text, value, doc))
        else:
            value = None if default is dataclasses.MISSING else default
            rows.append((field.name, _type_name(kind), value, docs.get(field.name, "")))
    return rows


def _copy(value: Any) -> Any:
    """A copy of a TOML or JSON value. What neither text, number, boolean nor none is, such as a date, becomes text."""
    if isinstance(value, dict):
        return {str(key): _copy(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(part) for part in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


class _Word(str):
    """A value typed on the command line; parsed as the type of its field."""


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _get_nested(instance: Any, dotted: str) -> Any:
    for name in dotted.split("."):
        instance = getattr(instance, name)
    return instance


@functools.cache
def _field_docs(cls: type) -> dict[str, str]:
    """The text of the string literal under each field, on one line."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        try:
            top = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        except (OSError, TypeError, SyntaxError):
            continue
        assert isinstance(top, ast.ClassDef)
        for field, text in zip(top.body, top.body[1:]):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                if isinstance(text.value, ast.Constant) and isinstance(text.value.value, str):
                    docs[field.target.id] = " ".join(text.value.value.split())
    return docs


def _type_name(kind: Any) -> str:
    origin = typing.get_origin(kind)
    if origin is Literal:
        return " or ".join(str(choice) for choice in typing.get_args(kind))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(part) for part in typing.get_args(kind))
    if origin in (tuple, list):
        inner = [part for part in typing.get_args(kind) if part is not Ellipsis]
        return "a list of " + _type_name(inner[0]) if inner else "a list"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "none"}
    return names.get(kind) or getattr(kind, "__name__", str(kind))


@functools.cache  # once for each process
def _announce_new_name(old_name: str, name: str) -> None:
    print(f"the setting {old_name} is now called {name}", file=sys.stderr)


def _build(cls: type[T], tree: dict, prefix: str, base: Any, known_keys: list[str]) -> T:
    hints, values = typing.get_type_hints(cls), {}
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name, field in fields.items():
        old_name = field.metadata.get("renamed_from")
        if old_name is not None and old_name in tree and old_name not in fields:
            if name in tree:
                raise RunError(f"{prefix}{old_name} is now called {prefix}{name}; leave out {prefix}{old_name}")
            _announce_new_name(prefix + old_name, prefix + name)
            tree = {name if key == old_name else key: value for key, value in tree.items()}
    for name in tree:
        if name not in fields:
            key = prefix + name
            suggestions = difflib.get_close_matches(key, known_keys, n=3, cutoff=0.6)
            suggestions = (
                suggestions
                or [option for option in known_keys if option.rpartition(".")[2] == name.rpartition(".")[2]][:3]
            )
            hint = (
                f"did you mean {' or '.join(suggestions)}?" if suggestions else f"known keys: {', '.join(known_keys)}"
            )
            raise RunError(f"unknown key {key!r}; {hint}")
    for name, field in fields.items():
        default = getattr(base, name) if base is not None else _default(field)
        kind, key = hints[name], prefix + name
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            table = tree.get(name, {})
            if not isinstance(table, dict):
                raise RunError(f"{key} is a group of keys, not a value; set {key}.KEY instead")
            inner = None if default is dataclasses.MISSING else default
            values[name] = _build(kind, table, key + ".", inner, known_keys)
        elif name in tree:
            values[name] = _coerce(kind, tree[name], key)
            if name != "seed" and (
                out_of_range := [x for x in _list_numbers(values[name]) if type(x) is int and abs(x) > LARGEST_INTEGER]
            ):
                raise RunError(
                    f"{key} must lie between -{LARGEST_INTEGER} and {LARGEST_INTEGER}, got {_shorten(out_of_range[0])}"
                )
            if out_of_range := [x for x in _list_numbers(values[name]) if type(x) is float and abs(x) > LARGEST]:
                raise RunError(f"{key} must fit float32, which ends at {LARGEST:.2g}; got {out_of_range[0]:g}")
        elif default is dataclasses.MISSING:
            raise RunError(f"{key} has no default; pass --set {key}=VALUE")
        else:
            values[name] = default
    try:
        instance = cls(**values)
    except (ValueError, AssertionError) as error:
        reason = " ".join(str(error).split())
        raise RunError(
            prefix + reason if reason.partition(" ")[0] in fields else f"{prefix.rstrip('.')}: {reason}".lstrip(": ")
        ) from None
    if "seed" in tree and not 0 <= values["seed"] < SEEDS:
        raise RunError(f"{prefix}seed must lie between 0 and {SEEDS - 1}, got {_shorten(values['seed'])}")
    for name in tree:
        if _find_smallest(values[name]) < 0 <= _find_smallest(_default(fields[name])):
            raise RunError(f"{prefix}{name} must not be negative, got {_find_smallest(values[name])}")
    return instance


def quote(value: Any) -> str:
    """A value as it was written, cut after 80 characters."""
    if isinstance(value, int) and not isinstance(value, bool):
        return repr(_shorten(value))
    text = (
        "a list"
        if isinstance(value, list) and len(value) > 20
        else str(value)
        if not isinstance(value, dict)
        else "a table"
    )
    return repr(text if len(text) <= 80 else f"{text[:80]}…")


def _shorten(number: int) -> str:
    """A whole number, or its magnitude if it has many digits."""
    return str(number) if abs(number) < 10**40 else f"a number of {number.bit_length()} bits"


def _list_numbers(value: Any) -> list[float]:
    """The numbers in a setting."""
    return [item for item in (value if isinstance(value, (tuple, list)) else [value]) if type(item) in (int, float)]


def _find_smallest(value: Any) -> float:
    """The smallest number in a setting; zero if it holds no numbers."""
    return min(_list_numbers(value), default=0)


def _coerce(kind: Any, value: Any, key: str) -> Any:
    """Converts `value`, from TOML or the command line, to type `kind`."""
    origin, word = typing.get_origin(kind), isinstance(value, _Word)
    type_error = RunError(f"{key} expects {_type_name(kind)}, got {quote(value)}")
    if origin in (typing.Union, types.UnionType):
        parts = typing.get_args(kind)
        if type(None) in parts and (value is None or (word and value.lower() in ("none", "null", ""))):
            return None
        for part in parts:
            if part is not type(None):
                try:
                    return _coerce(part, value, key)
                except RunError:
                    continue
        raise type_error
    if origin is Literal:
        for choice in typing.get_args(kind):
            if (word and str(choice) == value) or (type(value) is type(choice) and value == choice):
                return choice
        raise type_error
    if origin in (tuple, list):
        inner = [part for part in typing.get_args(kind) if part is not Ellipsis]
        if word:
            value = [_Word(part.strip()) for part in value.strip("()[]").split(",") if part.strip()]
        if not isinstance(value, list):
            raise type_error
        if origin is tuple and Ellipsis not in typing.get_args(kind) and len(value) != len(inner):
            raise RunError(f"{key} expects {len(inner)} values, got {len(value)}")
        has_one_type = len(inner) == 1
        return origin(_coerce(inner[0 if has_one_type else index], part, key) for index, part in enumerate(value))
    if kind is bool:
        if word and value.lower() in ("true", "yes", "on", "1", "false", "no", "off", "0"):
            return value.lower() in ("true", "yes", "on", "1")
        if isinstance(value, bool):
            return value
        raise type_error
    if kind in (int, float):
        if isinstance(value, bool) or not isinstance(value, (int, float, _Word)):
            raise type_error
        if isinstance(value, _Word):
            number = parse_number(value)
            if number is None:
                raise type_error
        else:
            number = value
        if kind is int:
            if isinstance(number, float) and not number.is_integer():
                raise type_error
            return int(number)
        try:
            decimal = float(number)
        except OverflowError:
            decimal = math.inf
        if not math.isfinite(decimal):
            raise type_error
        return decimal
    if kind is str or kind is Path:
        if not isinstance(value, str):
            raise type_error
        return kind(str(value))
    raise type_error
