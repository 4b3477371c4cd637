"""Objects over a pipe: two processes call each other's functions, and neither has the other's memory.

The tests run in one process, the examiner, and the package under test in another one, the examinee. Plain data travels
by value, as JSON: an object that crosses the pipe is built anew from builtin types, so no class of the examinee's
decides what it is equal to. Everything else travels as a reference: the receiver gets a proxy, and every use of the
proxy is a request to the owner. Classes get mirrors, so that isinstance, except clauses and pytest.raises work. An
instance of a class that derives from a builtin type brings its value along, and is compared by that value.

What one side knows about the other (`Link.strict` is True on the examiner's side):
1. The examinee may call the functions that a test passed to it, and use public attributes of instances of the tests'
   own classes. It cannot reach modules, frames, code, globals, or anything else of the examiner's.
2. The examiner never executes what the examinee names: of names it takes back only those that it sent itself, builtin
   types, and exceptions of modules that are imported already.
3. Two references whose class compares them by a method of its own are not compared: the test has not been carried
   (`NotCarried`).
A line that is no message ends the link (`LinkError`).
"""

import abc
import builtins
import collections
import collections.abc
import copy
import datetime
import decimal
import fractions
import functools
import importlib
import inspect
import io
import json
import operator
import os
import pathlib
import re
import sys
import threading
import types
import uuid
import warnings
from typing import Any

__all__ = ["LinkError", "Link", "NotCarried"]

LONGEST = 16 << 20
"""Bytes of a message."""
MAX_REQUESTS = 5000
"""Requests of a test, at most: whoever makes more would take longer than a grading may."""
DEEPEST = 60
"""Values within each other, and requests within requests."""
SCALARS = (bool, str, float, type(None))
SEQUENCES = {"l": list, "t": tuple, "s": set, "z": frozenset}
CODES = {kind: code for code, kind in SEQUENCES.items()}
BASES = (str, bytes, int, float, complex, tuple, frozenset, list, dict, set, bytearray)
"""Builtin types whose value an instance of a derived class brings along. bool and None have no derived classes."""
MUTABLE = (list, dict, set, bytearray)
VALUES: dict[str, tuple[type, Any, Any]] = {
    "bytes": (bytes, lambda v: [v.hex()], bytes.fromhex),
    "bytearray": (bytearray, lambda v: [v.hex()], bytearray.fromhex),
    "complex": (complex, lambda v: [v.real, v.imag], complex),
    "range": (range, lambda v: [v.start, v.stop, v.step], range),
    "slice": (slice, lambda v: [v.start, v.stop, v.step], slice),
    "Decimal": (decimal.Decimal, lambda v: [str(v)], decimal.Decimal),
    "Fraction": (fractions.Fraction, lambda v: [v.numerator, v.denominator], fractions.Fraction),
    "timedelta": (datetime.timedelta, lambda v: [v.days, v.seconds, v.microseconds], datetime.timedelta),
    "timezone": (datetime.timezone, lambda v: [*v.__getinitargs__()], datetime.timezone),
    "date": (datetime.date, lambda v: [v.year, v.month, v.day], datetime.date),
    "time": (datetime.time, lambda v: [v.hour, v.minute, v.second, v.microsecond, v.tzinfo], datetime.time),
    "datetime": (
        datetime.datetime,
        lambda v: [v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond, v.tzinfo],
        datetime.datetime,
    ),
    "OrderedDict": (collections.OrderedDict, lambda v: [[*v.items()]], collections.OrderedDict),
    "Counter": (collections.Counter, lambda v: [dict(v)], collections.Counter),
    "deque": (collections.deque, lambda v: [[*v], v.maxlen], collections.deque),
    "defaultdict": (collections.defaultdict, lambda v: [v.default_factory, dict(v)], collections.defaultdict),
    "mappingproxy": (types.MappingProxyType, lambda v: [dict(v)], types.MappingProxyType),
    "UUID": (uuid.UUID, lambda v: [v.hex], uuid.UUID),
    "Pattern": (re.Pattern, lambda v: [v.pattern, v.flags], re.compile),
    "PurePosixPath": (pathlib.PurePosixPath, lambda v: [str(v)], pathlib.PurePosixPath),
    "PosixPath": (pathlib.PosixPath, lambda v: [str(v)], pathlib.PosixPath),
}
"""Name → type, the arguments that make an equal value, and what takes them. Only exact types travel so."""
NAMES = {kind: name for name, (kind, _, _) in VALUES.items()}
SINGLETONS = {"...": ..., "NotImplemented": NotImplemented}
ABSTRACT = {name: getattr(collections.abc, name) for name in collections.abc.__all__}
OPERATIONS: dict[str, Any] = {
    **{
        f"__{name}__": getattr(operator, name)
        for name in ("lt", "le", "gt", "ge", "neg", "pos", "invert", "index", "concat", "contains")
    },
    **{f"__{name}__": getattr(operator, name) for name in ("getitem", "setitem", "delitem")},
    **{
        f"__{name}__": getattr(builtins, name)
        for name in ("abs", "bool", "int", "float", "complex", "len", "iter", "next", "reversed")
    },
    **{f"__{name}__": getattr(builtins, name) for name in ("hash", "repr", "str", "bytes", "format", "round", "dir")},
    "send": types.GeneratorType.send,
    "throw": types.GeneratorType.throw,
    "close": types.GeneratorType.close,
    "__length_hint__": operator.length_hint,
    "__enter__": lambda value: type(value).__enter__(value),
    "__exit__": lambda value, *error: type(value).__exit__(value, *error),
    "__copy__": copy.copy,
    "__deepcopy__": lambda value, *_: copy.deepcopy(value),
}
for _name in (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "lshift",
    "rshift",
    "and",
    "or",
    "xor",
    "matmul",
):
    _operator = getattr(operator, f"__{_name}__")
    OPERATIONS[f"__{_name}__"] = _operator
    OPERATIONS[f"__r{_name}__"] = lambda value, left, _operator=_operator: _operator(left, value)
    OPERATIONS[f"__i{_name}__"] = getattr(operator, f"__i{_name}__")
"""Special methods that are requests. Comparisons by == are none of them."""
EQUALITY_METHODS = {"__eq__", "__ne__", "__hash__"}
ORDER_METHODS = {"__lt__", "__le__", "__gt__", "__ge__"}


def stay_on(cpu: int) -> None:
    """Keeps this process on a CPU. Two processes that wait for each other are faster on one than on two, each of which
    would have to be woken. Where the system does not allow it, or does not know the CPU (−1), grading is only
    slower."""
    try:
        os.sched_setaffinity(0, {cpu})
    except (OSError, ValueError):
        pass


class NotCarried(Exception):
    """A test asks for what cannot cross the pipe."""


class LinkError(BaseException):
    """The other side has ended, or has said what is no message."""


def _is_standard(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in sys.stdlib_module_names


def _resolve(module: str, name: str) -> Any:
    """An object of a module that is imported, by its qualified name; None where there is none."""
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def _find_name(value: Any) -> tuple[str, str] | None:
    """Module and qualified name of a type or function of the standard library, by which the other side finds its own;
    else None."""
    if not isinstance(
        value,
        type
        | types.FunctionType
        | types.BuiltinFunctionType
        | types.MethodDescriptorType
        | types.WrapperDescriptorType,
    ):
        return None
    module = getattr(value, "__module__", None) or getattr(getattr(value, "__objclass__", None), "__module__", None)
    name = getattr(value, "__qualname__", None)
    if isinstance(module, str) and isinstance(name, str) and _is_standard(module) and _resolve(module, name) is value:
        return module, name
    return None


def _is_known_type(value: Any) -> bool:
    """Whether a class may be named by the examinee: builtin types, exceptions, abstract containers, and types of
    values."""
    if not isinstance(value, type):
        return False
    if value in NAMES or value in ABSTRACT.values():
        return True
    named = _is_standard(value.__module__) and _resolve(value.__module__, value.__qualname__) is value
    return named and (value.__module__ == "builtins" or issubclass(value, BaseException))


def _is_local(name: str) -> bool:
    """Whether the other side is never asked for an attribute: what proxies hold themselves, and what pytest looks for
    in everything."""
    return name in ("_number", "_link") or name.startswith(("_abc_", "_pytest", "__pytest", "pytest"))


class Mirror(abc.ABCMeta):
    """The class of mirrors of classes. An attribute that a mirror lacks, and a call of it, are requests to the owner of
    the class."""

    def __call__(cls, *args: Any, **named: Any) -> Any:
        link = cls._link
        if "_number" not in cls.__dict__:
            link.derive(cls)
        return link.ask("call", ["h", cls._number], args, named)

    def __getattr__(cls, name: str) -> Any:
        if _is_local(name) or name in ("__abstractmethods__", "__signature__", "__isabstractmethod__"):
            raise AttributeError(name)
        return cls._link.get(cls._number, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        if name.startswith("_abc_") or name in (
            "_link",
            "_number",
            "_derived",
            "__abstractmethods__",
            "__module__",
            "__qualname__",
        ):
            super().__setattr__(name, value)
        else:
            cls._link.ask("set", ["h", cls._number], name, value)

    def __iter__(cls) -> Any:
        return cls._link.ask("op", "__iter__", ["h", cls._number], ())

    def __len__(cls) -> int:
        return cls._link.ask("op", "__len__", ["h", cls._number], ())

    def __getitem__(cls, key: Any) -> Any:
        return cls._link.ask("op", "__getitem__", ["h", cls._number], (key,))

    def __bool__(cls) -> bool:
        return True


class Method:
    """A method of an object of the other side, which is looked up when it is called."""

    def __init__(self, instance: Any, name: str) -> None:
        self.__self__, self.__name__ = instance, name

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.__self__._link.ask("method", ["h", self.__self__._number], args, named, self.__name__)

    def __getattr__(self, name: str) -> Any:
        if _is_local(name):
            raise AttributeError(name)
        return getattr(self.__self__._link.get(self.__self__._number, self.__name__), name)


class Forward:
    """An attribute of a mirrored class: reading and writing it are requests. `is_method`: it is a function of that
    class."""

    def __init__(self, name: str, is_method: bool) -> None:
        self.name, self.is_method = name, is_method

    def __get__(self, instance: Any, owner: Any) -> Any:
        target = owner if instance is None else instance
        if "_derived" in vars(type(instance)):  # a class of this side comes before the one that has the attribute
            return target._link.ask("bound", ["h", target._number], self.name, self.owner)
        return (
            Method(instance, self.name)
            if self.is_method and instance is not None
            else target._link.get(target._number, self.name)
        )

    def __set_name__(self, owner: Any, name: str) -> None:
        self.owner = owner

    def __set__(self, instance: Any, value: Any) -> None:
        instance._link.ask("set", ["h", instance._number], self.name, value)

    def __delete__(self, instance: Any) -> None:
        instance._link.ask("delete", ["h", instance._number], self.name)


class Proxy:
    """What mirrors of classes have in common. An attribute that an instance lacks is a request to its owner."""

    _link: Any
    _number: int

    def __getattr__(self, name: str) -> Any:
        if _is_local(name) or name.startswith("__") and name not in ("__name__", "__wrapped__"):
            raise AttributeError(name)
        return self._link.get(self._number, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_number", "__traceback__", "__context__", "__cause__", "__suppress_context__", "__notes__"):
            object.__setattr__(self, name, value)
        else:
            self._link.ask("set", ["h", self._number], name, value)

    def __delattr__(self, name: str) -> None:
        self._link.ask("delete", ["h", self._number], name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self._link.refuse("an object of the other side cannot be pickled")

    def __copy__(self) -> Any:
        return self._link.ask("op", "__copy__", ["h", self._number], ())

    def __deepcopy__(self, memo: Any) -> Any:
        return self._link.ask("op", "__deepcopy__", ["h", self._number], ())

    def __init__(self, *args: Any, **named: Any) -> None:
        """Is called by classes of this side that derive from one of the other: that one's method comes next."""
        if "_derived" in vars(type(self)):
            base = next(
                parent for parent in type(self).__mro__ if "_derived" not in vars(parent) and "_number" in vars(parent)
            )
            self._link.ask("bound", ["h", self._number], "__init__", base)(*args, **named)


class Opaque(Proxy):
    """The same for objects without a value: text of them is a request, too."""

    def __repr__(self) -> str:
        return self._link.ask("op", "__repr__", ["h", self._number], ())

    def __str__(self) -> str:
        return self._link.ask("op", "__str__", ["h", self._number], ())


class Function:
    """A function of the other side. It binds as functions do."""

    def __init__(self, link: Any, number: int, about: dict) -> None:
        self._link, self._number, self._binds = link, number, about.get("binds", False)
        self.__name__, self.__qualname__ = about.get("name", "function"), about.get("name", "function")
        self.__doc__, self.__module__ = about.get("doc"), str(about.get("module"))
        if about.get("parameters") is not None:
            self.__signature__ = inspect.Signature(
                [inspect.Parameter(*parameter[:2], **_make_default(parameter)) for parameter in about["parameters"]]
            )

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._link.ask("call", ["h", self._number], args, named)

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self if instance is None or not self._binds else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if _is_local(name) or name.startswith("__") and name != "__wrapped__":
            raise AttributeError(name)
        return self._link.get(self._number, name)

    def __repr__(self) -> str:
        return f"<function {self.__name__}>"

    def __deepcopy__(self, memo: Any) -> Any:
        return self


def _make_default(parameter: list) -> dict:
    return {"default": parameter[2]} if len(parameter) > 2 else {}


class Module(types.ModuleType):
    """A module of the other side."""

    def __getattr__(self, name: str) -> Any:
        if _is_local(name) or name in ("__path__", "__file__", "__spec__", "__wrapped__"):
            raise AttributeError(name)
        link, number, cache = self.__dict__["_link"], self.__dict__["_number"], self.__dict__["_cache"]
        if name == "__all__":
            return link.ask("names", ["h", number])
        if name in cache:
            return cache[name]
        value = link.get(number, name)
        if issubclass(type(value), (Function, Mirror)):
            cache[name] = value  # until a test puts another one in its place
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Module):
            # a module within a package, as an import binds it: the package on the other side says what the name stands
            # for
            return
        if name.startswith("__") or name in ("_link", "_number") or isinstance(value, types.ModuleType):
            super().__setattr__(name, value)
        else:
            self._cache.pop(name, None)
            self._link.ask("set", ["h", self._number], name, value)

    def __delattr__(self, name: str) -> None:
        self._cache.pop(name, None)
        self._link.ask("delete", ["h", self._number], name)


def _make_operation(name: str) -> Any:
    def method(self: Any, *args: Any) -> Any:
        if name == "__exit__":
            args = (*args[:2], None)
        return self._link.ask("op", name, ["h", self._number], args)

    method.__name__ = name
    return method


def _generate(link: Any, number: int) -> Any:
    """A generator that does what one of the other side does."""
    target, operation, args = ["h", number], "send", (None,)
    while True:
        try:
            value = link.ask("op", operation, target, args)
        except StopIteration as error:
            return error.value
        try:
            operation, args = "send", ((yield value),)
        except GeneratorExit:
            if not link.is_broken:
                link.ask("op", "close", target, ())
            raise
        except BaseException as error:
            operation, args = "throw", (error,)


def _compare(self: Any, operand: Any) -> Any:
    if self is operand:
        return True
    if _is_standard(type(self).__module__) and _get_number(operand) is None:
        return False
    raise self._link.refuse(f"{type(self).__name__} compares by a method of its own")


class Link:
    """One end of a pipe pair. `strict`: this side is the examiner's."""

    def __init__(self, reader: int, writer: int, strict: bool) -> None:
        self.reader, self.writer, self.strict = reader, writer, strict
        self.buffer, self.lock, self.depth = bytearray(), threading.RLock(), 0
        self.own: dict[int, Any] = {}
        self.numbers: dict[int, int] = {}
        self.theirs: dict[int, Any] = {}
        self.named: set[tuple[str, str]] = set()
        self.taint = ""
        """Why the test that runs was not carried; empty where it was so far."""
        self.requests = 0
        self.is_broken = False
        self.after: Any = None
        """On the examinee's side: what happened besides during a request, such as warnings."""
        self.noticed: Any = None
        """On the examiner's side: is given what the other side says so."""

    def refuse(self, reason: str) -> NotCarried:
        self.taint = self.taint or reason
        return NotCarried(reason)

    def begin(self) -> None:
        """A test begins."""
        self.taint, self.requests = "", 0

    # Messages.

    def send(self, message: Any) -> None:
        data = json.dumps(message).encode() + b"\n"
        if len(data) > LONGEST:
            raise self.refuse("a message is too long")
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self.writer, view) :]
        except OSError:
            self.is_broken = True
            raise LinkError("the other side has ended") from None

    def receive(self) -> list:
        while (end := self.buffer.find(b"\n")) < 0:
            block = b"" if len(self.buffer) > LONGEST else os.read(self.reader, 1 << 16)
            if not block:
                self.is_broken = True
                raise LinkError("the other side has ended")
            self.buffer += block
        line = bytes(self.buffer[:end])
        del self.buffer[: end + 1]
        try:
            message = json.loads(line.decode())
        except (ValueError, RecursionError):
            message = None
        if not (isinstance(message, list) and message and isinstance(message[0], str)):
            self.is_broken = True
            raise LinkError("no message")
        return message

    def ask(self, action: str, *parts: Any) -> Any:
        """A request, and its answer. Raises what the other side raises, NotCarried, and Broken."""
        with self.lock:
            if self.is_broken:
                raise LinkError("the link is broken")
            self.depth, self.requests = self.depth + 1, self.requests + 1
            try:
                if self.strict and self.requests > MAX_REQUESTS:
                    raise self.refuse(f"it makes more than {MAX_REQUESTS} requests")
                if self.depth > DEEPEST:
                    raise RecursionError("requests within requests")
                args = parts[1] if action in ("call", "method") else ()
                self.send(self._make_request(action, parts))
                while (message := self.receive())[0] not in ("ok", "error"):
                    self.serve(message)
                return self._read_outcome(message, args)
            finally:
                self.depth -= 1

    def _make_request(self, action: str, parts: tuple) -> list:
        target = [
            argument for argument in parts if isinstance(argument, list) and len(argument) == 2 and argument[0] == "h"
        ][:1]
        if action in ("call", "method"):
            return [
                action,
                *target,
                [self.pack(argument) for argument in parts[1]],
                {name: self.pack(argument) for name, argument in parts[2].items()},
                *parts[3:],
            ]
        if action == "op":
            return [action, parts[0], *target, [self.pack(argument) for argument in parts[2]]]
        return [
            action,
            *target,
            *(argument if isinstance(argument, str) else self.pack(argument) for argument in parts[len(target) :]),
        ]

    def _read_outcome(self, message: list, args: Any) -> Any:
        try:
            kind, packed_value, extras = message
            for at, content in extras.get("args", {}).items():
                argument, new_content = args[int(at)], self.unpack(content)
                if type(argument) is not type(new_content) or type(argument) not in MUTABLE:
                    raise ValueError("no content of an argument")
                _refill(argument, new_content)
            if self.noticed is not None:
                self.noticed(self, extras)
            if kind == "ok" and isinstance(packed_value, list) and len(packed_value) == 2 and packed_value[0] == "a":
                return args[packed_value[1]]
            value = self.unpack(packed_value)
        except NotCarried:
            raise
        except Exception as error:
            self.is_broken = True
            raise LinkError(f"no answer: {type(error).__name__}: {error}") from None
        if kind == "ok":
            return value
        if not isinstance(value, BaseException):
            self.is_broken = True
            raise LinkError("no error")
        raise value

    def get(self, number: int, name: str) -> Any:
        return self.ask("get", ["h", number], name)

    def derive(self, kind: Any) -> None:
        """Makes a class on the other side for one of this side that derives from a mirror: the same name and bases, and
        methods that call this side's. Raises NotCarried where a base or an attribute cannot cross the pipe."""
        for base in kind.__bases__:
            if isinstance(base, Mirror) and "_number" not in vars(base):
                self.derive(base)
        space = {
            name: part
            for name, part in vars(kind).items()
            if name not in IMPLICIT_ATTRIBUTES and not name.startswith("_abc_")
        }
        parts = [[name, *self._describe_attribute(part)] for name, part in space.items()]
        number = self.ask("derive", kind.__name__, [*kind.__bases__], parts)
        if type(number) is not int:
            raise LinkError("no number of a class")
        kind._derived, kind._number = True, number
        self.theirs[number] = kind

    def _describe_attribute(self, part: Any) -> tuple[str, Any]:
        """An attribute of a class as `derive` tells it."""
        if isinstance(part, staticmethod | classmethod):
            return type(part).__name__, part.__func__
        if isinstance(part, property):
            return "property", (part.fget, part.fset, part.fdel)
        return "plain", part

    def _make_derived_class(self, name: str, bases: list, parts: list) -> int:
        """The same on the side that owns the bases."""
        make = {
            "staticmethod": staticmethod,
            "classmethod": classmethod,
            "property": lambda accessors: property(*accessors),
            "plain": lambda part: part,
        }
        kind = types.new_class(
            name,
            tuple(bases),
            {},
            lambda space: space.update({attribute: make[category](part) for attribute, category, part in parts}),
        )
        number = len(self.own) + 1
        self.own[number], self.numbers[id(kind)] = kind, number
        return number

    # Serving.

    def serve(self, message: list) -> None:
        """Answers a request of the other side."""
        extras: dict[str, Any] = {}
        try:
            answer = self._handle_request(message, extras)
            response = ["ok", answer]
        except LinkError:
            raise
        except BaseException as error:
            if self.strict and not isinstance(error, Exception):
                raise
            try:
                response = ["error", self.pack(error)]
            except BaseException:
                response = ["error", self.pack(RuntimeError("an error that cannot be told"))]
        if self.after is not None:
            extras |= self.after()
        with self.lock:
            self.send([*response, extras])

    def _handle_request(self, message: list, extras: dict) -> Any:
        try:
            action, *parts = message
            if action == "derive" and not self.strict:
                return self._make_derived_class(*map(self.unpack, parts))
            if action == "op":
                name, target, args = parts
                subject, args = self._resolve_target(target, "op", name), [self.unpack(part) for part in args]
                return self.pack(OPERATIONS[name](subject, *args))
            subject = self._resolve_target(
                parts[0], action, parts[3] if action == "method" else parts[1] if len(parts) > 1 else ""
            )
        except (KeyError, IndexError) as error:
            raise RuntimeError(f"no request: {error}") from None
        if action == "call":
            return self._call(subject, parts[1], parts[2], extras)
        if action == "method":
            return self._call(getattr(subject, parts[3]), parts[1], parts[2], extras)
        if action == "get":
            return self.pack(getattr(subject, parts[1]))
        if action == "set":
            return setattr(subject, parts[1], self.unpack(parts[2]))
        if action == "delete":
            return delattr(subject, parts[1])
        if action == "bound" and not self.strict:
            owner = self.unpack(parts[2])
            return self.pack(getattr(super(_find_predecessor(type(subject), owner), subject), parts[1]))
        if action == "names" and not self.strict:
            return self.pack(
                [*getattr(subject, "__all__", [name for name in vars(subject) if not name.startswith("_")])]
            )
        if action == "import" and not self.strict:
            return self.pack(importlib.import_module(subject))
        if action == "reload" and not self.strict:
            return self.pack(importlib.reload(sys.modules[subject]))
        raise RuntimeError("no request")

    def _resolve_target(self, reference: Any, action: str, name: Any) -> Any:
        """The object that a request is about. Raises AttributeError for what the examinee may not ask of the
        examiner."""
        if action in ("import", "reload"):
            return reference
        subject = self.own[reference[1]]
        if self.strict:
            is_private = not isinstance(name, str) or name.startswith("_") and not _is_custom(name)
            is_foreign = action in ("get", "set", "delete", "method") and (is_private or not _is_of_tests(subject))
            if is_foreign or action not in ("get", "set", "delete", "method", "call", "op"):
                raise AttributeError(name)
        return subject

    def _call(self, function: Any, args: list, named: dict, extras: dict) -> Any:
        values = [self.unpack(part) for part in args]
        value = function(*values, **{str(name): self.unpack(part) for name, part in named.items()})
        if self.strict:
            return self.pack(value)
        for at, argument in enumerate(values):  # what was given by value, and is another value now
            if type(argument) in MUTABLE:
                try:
                    if (packed_content := self.pack(argument)) != args[at]:
                        extras.setdefault("args", {})[str(at)] = packed_content
                except NotCarried:
                    pass
        for at, argument in enumerate(values):
            if argument is value and type(argument) in MUTABLE:
                return ["a", at]
        return self.pack(value)

    # Values.

    def pack(self, value: Any, depth: int = 0) -> Any:
        """A value as JSON. Raises NotCarried."""
        if depth > DEEPEST:
            raise self.refuse("a value is too deep")
        kind = type(value)
        if kind in SCALARS:
            return value
        if kind is int:
            return value if abs(value) < 1 << 53 else ["n", hex(value)]
        if kind in CODES:
            return [CODES[kind], [self.pack(part, depth + 1) for part in value]]
        if kind is dict:
            return ["d", [[self.pack(key, depth + 1), self.pack(part, depth + 1)] for key, part in value.items()]]
        if kind in NAMES:
            name = NAMES[kind]
            return ["x", name, [self.pack(part, depth + 1) for part in VALUES[name][1](value)]]
        for name, single in SINGLETONS.items():
            if value is single:
                return ["1", name]
        if kind is types.ModuleType and _is_standard(value.__name__) and sys.modules.get(value.__name__) is value:
            if self.strict or (value.__name__, "") in self.named:
                self.named.add((value.__name__, ""))
                return ["g", value.__name__, ""]
        if (number := _get_number(value)) is not None and value._link is self:
            return ["h", number]
        if kind is Method:
            return self.pack(value.__self__._link.get(value.__self__._number, value.__name__), depth)
        if self.numbers.get(id(value), 0) < 0:  # it was made for an object of the other side, and goes home as that
            return ["h", -self.numbers[id(value)]]
        if (name := _find_name(value)) is not None and (self.strict or name in self.named or _is_known_type(value)):
            self.named.add(name)
            return ["g", *name]
        return self._make_reference(value, depth)

    def _make_reference(self, value: Any, depth: int) -> list:
        """An object of this side: its number, the first time what it is, and its content."""
        kind = type(value)
        is_hidden = issubclass(kind, HIDDEN_TYPES) or kind.__module__.partition(".")[0] in (
            "_pytest",
            "pytest",
            "unittest",
            "pluggy",
        )
        if self.strict and (is_hidden or kind.__name__.startswith("Test")):
            raise self.refuse(f"a {kind.__name__} is not shown to the other side")
        number = self.numbers.get(id(value))
        first = number is None
        if number is None:
            number = len(self.own) + 1
            self.own[number], self.numbers[id(value)] = value, number
        # by its type: what it says of itself does not count
        base = next((base_type for base_type in BASES if issubclass(kind, base_type)), None)
        content = None
        if base is not None and (first or base in MUTABLE):
            content = [self.pack(_extract_content(base, value), depth + 1)]
        return ["o", number, self._describe(value, depth) if first else None, content]

    def _describe(self, value: Any, depth: int) -> dict:
        kind = type(value)
        if issubclass(kind, types.ModuleType):
            return {"kind": "module", "name": value.__name__, "package": hasattr(value, "__path__")}
        if issubclass(kind, type):
            bases = [self._pack_base(parent, depth) for parent in value.__bases__]
            own = [name for name in vars(value) if name not in OBJECT_ATTRIBUTES]
            return {
                "kind": "class",
                "name": value.__name__,
                "module": value.__module__,
                "bases": [parent for parent in bases if parent is not None],
                "methods": [
                    name for name in own if name in OPERATIONS or name in EQUALITY_METHODS or name == "__call__"
                ],
                "names": [
                    [name, type(vars(value)[name]) is types.FunctionType]
                    for name in own
                    if not name.startswith("__") or _is_custom(name)
                ],
                "doc": value.__doc__ if isinstance(value.__doc__, str) else None,
            }
        if issubclass(kind, FUNCTIONS):
            return {
                "kind": "function",
                "name": str(getattr(value, "__name__", "function")),
                "module": str(getattr(value, "__module__", "")),
                "doc": value.__doc__ if isinstance(value.__doc__, str) and not self.strict else None,
                "parameters": self._describe_parameters(value, depth),
                "binds": isinstance(value, types.FunctionType),
            }
        if issubclass(kind, types.GeneratorType):
            return {"kind": "generator"}
        about: dict[str, Any] = {"kind": "instance", "class": self._pack_class(kind, depth)}
        if issubclass(kind, BaseException):
            about["args"] = [self._pack_argument(part, depth) for part in value.args]
        return about

    def _pack_argument(self, value: Any, depth: int) -> Any:
        try:
            return self.pack(value, depth + 1)
        except NotCarried:
            return None

    def _pack_class(self, kind: type, depth: int) -> Any:
        """A class as the class of an instance: one that the other side has, or a mirror."""
        is_known = issubclass(kind, BaseException) and _is_known_type(kind)
        return ["g", kind.__module__, kind.__qualname__] if is_known else self._make_reference(kind, depth + 1)

    def _pack_base(self, kind: type, depth: int) -> Any:
        """A class as a base of another one; None where mirrors do without it."""
        if kind in (object, type):
            return None
        is_known = (
            kind in BASES or kind in ABSTRACT.values() or issubclass(kind, BaseException) and _is_known_type(kind)
        )
        if is_known:
            name = next(
                (name for name, abstract_class in ABSTRACT.items() if abstract_class is kind), kind.__qualname__
            )
            return ["g", "collections.abc" if kind in ABSTRACT.values() else kind.__module__, name]
        return self._make_reference(kind, depth + 1)

    def _describe_parameters(self, value: Any, depth: int) -> list | None:
        try:
            signature_parameters = inspect.signature(value).parameters.values()
        except (TypeError, ValueError):
            return None
        empty = inspect.Parameter.empty
        return [
            [
                parameter.name,
                int(parameter.kind),
                *([] if parameter.default is empty else [self._pack_argument(parameter.default, depth)]),
            ]
            for parameter in signature_parameters
        ]

    def unpack(self, packed_value: Any, depth: int = 0) -> Any:
        """The value that was packed. Raises ValueError and others for what is none."""
        if depth > 2 * DEEPEST:
            raise ValueError("a value is too deep")
        if packed_value is None or isinstance(packed_value, bool | str | int | float):
            return packed_value
        code, *fields = packed_value
        if code in SEQUENCES:
            return SEQUENCES[code]([self.unpack(part, depth + 1) for part in fields[0]])
        if code == "d":
            return {self.unpack(key, depth + 1): self.unpack(part, depth + 1) for key, part in fields[0]}
        if code == "n":
            return int(fields[0], 16)
        if code == "x":
            _, _, make = VALUES[fields[0]]
            return make(*[self.unpack(part, depth + 1) for part in fields[1]])
        if code == "1":
            return SINGLETONS[fields[0]]
        if code == "h":
            return self.own[fields[0]]
        if code == "g":
            return self._find_named(*fields)
        if code == "o":
            return self._get_proxy(*fields, depth=depth)
        raise ValueError("no value")

    def _find_named(self, module: str, name: str) -> Any:
        if not self.strict:
            self.named.add((module, name))
            importlib.import_module(module)
            return functools.reduce(getattr, name.split("."), sys.modules[module]) if name else sys.modules[module]
        value = (_resolve(module, name) if name else sys.modules.get(module)) if _is_standard(module) else None
        if value is None or (module, name) not in self.named and not _is_known_type(value):
            raise ValueError("no name that may be used")
        return value

    def _get_proxy(self, number: int, about: dict | None, content: list | None, depth: int) -> Any:
        if type(number) is not int:
            raise ValueError("no number")
        proxy = self.theirs.get(number)
        if proxy is None:
            if about is None:
                raise ValueError("an object that nobody knows")
            proxy = self._make_proxy(number, about, content, depth)
            self.theirs.setdefault(number, proxy)
        elif content is not None and isinstance(proxy, MUTABLE):
            _refill(proxy, self.unpack(content[0], depth + 1))
        return proxy

    def _make_proxy(self, number: int, about: dict, content: list | None, depth: int) -> Any:
        kind = about["kind"]
        if kind == "generator":
            return self._register_stand_in(number, _generate(self, number))
        if kind == "module":
            module = Module(str(about["name"]))
            module.__dict__.update(_link=self, _number=number, _cache={})
            if about["package"]:
                module.__dict__["__path__"] = []
            return module
        if kind == "function":
            parameters = about.get("parameters")
            parameters = (
                None
                if parameters is None
                else [
                    [str(parameter[0]), inspect._ParameterKind(parameter[1]), *map(self.unpack, parameter[2:])]
                    for parameter in parameters
                ]
            )
            return Function(self, number, {**about, "parameters": parameters})
        if kind == "class":
            return self._make_mirror(number, about, depth)
        owner: Any = self.unpack(about["class"], depth + 1)
        if not isinstance(owner, type):
            raise ValueError("no class")
        if not isinstance(owner, Mirror):
            if not issubclass(owner, BaseException):
                raise ValueError("no class of an instance")
            args = [self.unpack(part, depth + 1) for part in about.get("args", ())]
            error = owner.__new__(owner, *args)
            if owner.__module__ == "builtins":
                error.__init__(*args)
            error.args = tuple(args)
            return self._register_stand_in(number, error)
        return self._make_instance(owner, number, about, content, depth)

    def _make_instance(self, owner: Any, number: int, about: dict, content: list | None, depth: int) -> Any:
        """A proxy for an instance of a mirrored class, with the value that it brings along."""
        base: Any = next((base_type for base_type in BASES if issubclass(owner, base_type)), None)
        instance: Any
        if issubclass(owner, BaseException):
            instance = owner.__new__(owner, *(args := [self.unpack(part, depth + 1) for part in about.get("args", ())]))
            BaseException.__setattr__(instance, "args", tuple(args))
        elif base is None:
            instance = object.__new__(owner)
        else:
            value = self.unpack((content or [])[0], depth + 1)
            if type(value) is not base:
                raise ValueError("no content")
            make: Any = base.__new__
            instance = make(owner) if base in MUTABLE else make(owner, value)
            if base in MUTABLE:
                _refill(instance, value)
        vars(instance)["_number"] = number
        return instance

    def _register_stand_in(self, number: int, value: Any) -> Any:
        """A value that was made for an object of the other side, and is kept, so that it goes home as that."""
        self.numbers[id(value)], self.own[-number] = -number, value
        return value

    def _make_mirror(self, number: int, about: dict, depth: int) -> type:
        bases = [self.unpack(parent, depth + 1) for parent in about["bases"]]
        if not all(isinstance(parent, type) for parent in bases):
            raise ValueError("no classes")
        has_value = any(issubclass(parent, (*BASES, BaseException)) for parent in bases)
        space: dict[str, Any] = {
            "_link": self,
            "_number": number,
            "__doc__": about.get("doc"),
            "__module__": str(about["module"]),
        }
        space |= {str(name): Forward(str(name), bool(is_method)) for name, is_method in about["names"]}
        for name in about["methods"]:
            if name in EQUALITY_METHODS:
                if not has_value and "__eq__" in about["methods"]:
                    space |= {"__eq__": _compare, "__hash__": _make_operation("__hash__")}
            elif not (has_value and name in ORDER_METHODS):
                space[name] = _call_remote if name == "__call__" else _make_operation(name)
        mixin = Proxy if has_value else Opaque
        if not any(issubclass(parent, Proxy) for parent in bases):
            bases = [mixin, *bases]
        try:
            mirror = Mirror(str(about["name"]), tuple(bases), space)
        except TypeError:  # bases that do not go together
            mirror = Mirror(str(about["name"]), (mixin,), space)
        mirror.__abstractmethods__ = frozenset()
        return mirror


def _find_predecessor(kind: type, owner: type) -> type:
    """The class that comes before another one in the order in which attributes are looked up."""
    order = kind.__mro__
    return order[order.index(owner) - 1]


IMPLICIT_ATTRIBUTES = {
    "__module__",
    "__dict__",
    "__weakref__",
    "__doc__",
    "__qualname__",
    "__abstractmethods__",
    "__slots__",
    "__annotations__",
    "__parameters__",
}
"""Attributes of a class that its counterpart on the other side has of itself."""


def _call_remote(self: Any, *args: Any, **named: Any) -> Any:
    return self._link.ask("call", ["h", self._number], args, named)


FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
)
PYTHON_NAMES = {
    *dir(type),
    *dir(object),
    *dir(types.FunctionType),
    "__slots__",
    "__weakref__",
    "__getattr__",
    "__del__",
    "__class_getitem__",
    "__setstate__",
}
PYTHON_NAMES |= {
    "__getnewargs__",
    "__getnewargs_ex__",
    "__orig_bases__",
    "__parameters__",
    "__match_args__",
    "__set_name__",
    "__set__",
    "__delete__",
}
PYTHON_NAMES |= {
    "__static_attributes__",
    "__firstlineno__",
    "__post_init__",
    "__await__",
    "__aiter__",
    "__anext__",
    "__aenter__",
    "__aexit__",
    "__call__",
}
PYTHON_NAMES |= {"__dataclass_fields__", "__dataclass_params__", "__missing__", "__fspath__"}
"""Special names that have a meaning of Python's own."""
HIDDEN_TYPES = (types.ModuleType, types.FrameType, types.CodeType, types.TracebackType)
"""Objects of the examiner's to which there are no references."""
OBJECT_ATTRIBUTES = {*vars(object)} - {
    "__eq__",
    "__ne__",
    "__hash__",
    "__lt__",
    "__le__",
    "__gt__",
    "__ge__",
    "__repr__",
    "__str__",
    "__format__",
    "__dir__",
}


def _is_custom(name: str) -> bool:
    """Whether a name with underscores on both sides is one of a library, such as `__html__`."""
    return (
        name.startswith("__")
        and name.endswith("__")
        and name not in OPERATIONS
        and name not in EQUALITY_METHODS
        and name not in PYTHON_NAMES
    )


def _is_of_tests(value: Any) -> bool:
    """Whether attributes of an object of the examiner's may be asked for: instances of classes that tests define, such
    classes, and files in memory."""
    if type(value) in (io.BytesIO, io.StringIO):
        return True
    kind = value if isinstance(value, type) else type(value)
    return not _is_standard(kind.__module__) and kind.__module__.partition(".")[0] not in (
        "_pytest",
        "pytest",
        "pluggy",
        "remote",
        "play",
        "__main__",
    )


def _get_number(value: Any) -> int | None:
    """The number of a proxy; None for any other object. Asks for nothing."""
    if issubclass(type(value), (Mirror, Function, Module)):
        return vars(value).get("_number")
    return object.__getattribute__(value, "__dict__").get("_number") if isinstance(type(value), Mirror) else None


def _extract_content(base: type, value: Any) -> Any:
    """The builtin value of an instance of a derived class, whatever its methods say."""
    if base is str:
        return str.__str__(value) if type(str.__str__(value)) is str else "".join(str.__iter__(value))
    if base is dict:
        return {key: dict.__getitem__(value, key) for key in dict.keys(value)}
    if base in (list, tuple, set, frozenset, bytearray):
        return base([*base.__iter__(value)])
    if base is int:
        return int.__add__(value, 0)
    if base is float:
        return float.__add__(value, 0.0)
    if base is complex:
        return complex.__add__(value, 0j)
    return bytes.__add__(value, b"")


def _refill(container: Any, value: Any) -> None:
    """Gives a container another content."""
    if isinstance(container, dict):
        dict.clear(container)
        dict.update(container, value)
    elif isinstance(container, set):
        set.clear(container)
        set.update(container, value)
    elif isinstance(container, list):
        list.__setitem__(container, slice(None), value)
    else:
        bytearray.__setitem__(container, slice(None), value)


def notices(warned: list, streams: dict[str, Any]) -> dict:
    """What a request of the examinee's has led to besides: warnings, and what was printed."""
    notes: dict[str, Any] = {}
    if warned:
        notes["warned"] = [[warning.category.__name__, str(warning.message)] for warning in warned]
        warned.clear()
    for name, stream in streams.items():
        if stream.tell():
            notes[name] = stream.getvalue()
            stream.seek(0)
            stream.truncate()
    return notes


def repeat(link: Link, extras: dict) -> None:
    """On the examiner's side: does again what was noticed on the other one."""
    for name in ("stdout", "stderr"):
        if isinstance(text := extras.get(name), str):
            getattr(sys, name).write(text)
    for name, text in extras.get("warned", ()):
        kind = getattr(builtins, str(name), None)
        if not (isinstance(kind, type) and issubclass(kind, Warning)):
            kind = UserWarning
        warnings.warn(str(text), kind, stacklevel=4)
