"""Calls of a package's functions, in a sandbox: those that its tests make are recorded, and others are made and their
answers told.

    python3 -s -P -B fresh.py record PLAN       plays tests, and says which calls of functions of modules came through
                                                given lines
    python3 -s -P -B fresh.py answer PLAN       makes calls, and says of each what came back

Only plain data travels: None, truths, numbers, texts, bytes, and lists, tuples, sets and dicts of them. It is written
as JSON that keeps what JSON does not know. An answer of a class that derives from such a type is told as its base, by
methods of the base alone: whatever such an object says that it is equal to, it is told as what it holds.
"""

import importlib
import inspect
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

DEEPEST = 8
"""Values within each other, at most."""
LONGEST, ALL = 2_000, 200_000
"""Characters of the arguments of a call, and of all calls that are recorded."""
ANSWER = 4_000
"""Characters of an answer."""
NO_FUNCTION = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""Flags of code whose calls give no value."""


class NotPlain(ValueError):
    """A value that cannot travel."""


def find_plain_type(value: Any) -> Any:
    """The plain type that a value is of or derives from; its own type where there is none."""
    return next(
        (kind for kind in (bool, int, float, str, bytes, list, tuple, set, frozenset, dict) if isinstance(value, kind)),
        type(value),
    )


def pack_value(value: Any, exact: bool = True, depth: int = 0) -> Any:
    """A value as JSON: None, truths and texts as they are, a list with its kind for all else. `exact`: classes that
    derive from plain types are none, and dicts keep their order. Raises NotPlain."""
    if depth > DEEPEST:
        raise NotPlain("too deep")
    kind: Any = type(value) if exact else find_plain_type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return str.__str__(value)
    if kind is int:
        return ["int", str(int.__add__(value, 0))]
    if kind is float:
        return ["float", float.__repr__(value)]
    if kind is bytes:
        return ["bytes", bytes.hex(value)]
    if kind in (list, tuple, set, frozenset):
        parts = [pack_value(part, exact, depth + 1) for part in kind.__iter__(value)]
        return [kind.__name__.removeprefix("frozen"), parts if kind in (list, tuple) else sorted(parts, key=json.dumps)]
    if kind is dict:
        pairs = [
            [pack_value(key, exact, depth + 1), pack_value(part, exact, depth + 1)] for key, part in dict.items(value)
        ]
        return ["dict", pairs if exact else sorted(pairs, key=json.dumps)]
    raise NotPlain(kind.__name__)


def unpack_value(packed_value: Any) -> Any:
    """The value that was packed. Raises ValueError for what is none."""
    if packed_value is None or isinstance(packed_value, bool | str):
        return packed_value
    if not (isinstance(packed_value, list) and len(packed_value) == 2 and isinstance(packed_value[0], str)):
        raise ValueError("no packed value")
    kind, content = packed_value
    if kind in ("int", "float"):
        return {"int": int, "float": float}[kind](content)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind in ("list", "tuple", "set"):
        return {"list": list, "tuple": tuple, "set": set}[kind](map(unpack_value, content))
    if kind == "dict":
        return {unpack_value(key): unpack_value(part) for key, part in content}
    raise ValueError(f"no packed value: {kind[:20]}")


def unwrap_function(function: Any, code: Any) -> Any:
    """The function of a code, in what decorators have made of it; None where there is none."""
    while function is not None and getattr(function, "__code__", None) is not code:
        function = vars(function).get("__wrapped__") if hasattr(function, "__dict__") else None
    return function


class CallTracer:
    """Hears which calls of functions of modules came through the lines of holes. `holes`: file of the tree → its lines.
    `tests`: files of the tree that are none of the package."""

    def __init__(self, tree, holes, tests=()):
        self.tree, self.holes = tree + "/", {f"{tree}/{name}": frozenset(lines) for name, lines in holes.items()}
        self.tests = {f"{tree}/{name}" for name in tests}
        self.code_info, self.open_calls, self.calls, self.size, self.has_reached_hole = {}, {}, {}, 0, False

    def is_package_frame(self, frame):
        """Whether a frame is one of the package's code."""
        name = frame.f_code.co_filename
        return name.startswith(self.tree) and name not in self.tests

    def inspect_frame(self, frame):
        """The lines of holes in a code of the tree, its name where it is a function of a module, and its defaults; None
        for other code."""
        code = frame.f_code
        if not self.is_package_frame(frame):
            return None
        lines = {line for _, _, line in code.co_lines() if line} & self.holes.get(code.co_filename, frozenset())
        module = frame.f_globals.get("__name__")
        function = unwrap_function(frame.f_globals.get(code.co_name), code)
        if (
            function is None
            or code.co_qualname != code.co_name
            or code.co_flags & NO_FUNCTION
            or module not in sys.modules
        ):
            return lines, "", {}
        defaults = function.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        return (
            lines,
            f"{module}:{code.co_name}",
            {**dict(zip(names, defaults, strict=True)), **(function.__kwdefaults__ or {})},
        )

    def trace(self, frame, event, argument):
        code = frame.f_code
        if code not in self.code_info:
            self.code_info[code] = self.inspect_frame(frame)
        if self.code_info[code] is None or self.size > ALL:
            return None
        lines, name, _ = self.code_info[code]
        if name:
            self.open_calls[frame] = self.pack_call(frame, name)
        frame.f_trace_lines = bool(lines)
        return self.trace_inside if name or lines else None

    def trace_inside(self, frame, event, argument):
        if event == "line" and frame.f_lineno in self.code_info[frame.f_code][0]:
            self.has_reached_hole, outer = True, frame
            while outer is not None:
                if (text := self.open_calls.get(outer)) is not None and text not in self.calls:
                    self.calls[text], self.size = json.loads(text), self.size + len(text)
                outer = outer.f_back
        elif event == "return":
            self.open_calls.pop(frame, None)
        return self.trace_inside

    def pack_call(self, frame, name):
        """A call as JSON, and whether it came from outside of the tree; None for arguments that are not plain. Defaults
        are left out."""
        code, variables, defaults = frame.f_code, frame.f_locals, self.code_info[frame.f_code][2]
        names, at = code.co_varnames, code.co_argcount + code.co_kwonlyargcount
        extra_args = variables[names[at]] if code.co_flags & inspect.CO_VARARGS else ()
        args, named = [], {}
        for number, parameter in enumerate(names[:at]):
            default = parameter in defaults and variables[parameter] is defaults[parameter]
            if number < code.co_argcount and (
                extra_args or number == len(args) and not default or number < code.co_posonlyargcount
            ):
                args.append(variables[parameter])
            elif not default:
                named[parameter] = variables[parameter]
        args += extra_args
        if code.co_flags & inspect.CO_VARKEYWORDS:
            named |= variables[names[at + bool(code.co_flags & inspect.CO_VARARGS)]]
        outside = frame.f_back is None or not self.is_package_frame(frame.f_back)
        try:
            row = {
                "function": name,
                "args": [pack_value(value) for value in args],
                "named": {key: pack_value(value) for key, value in named.items()},
            }
            text = json.dumps({**row, "outside": outside}, sort_keys=True)
        except NotPlain:
            return None
        return text if len(text) <= LONGEST else None


class TracingPlugin:
    """pytest's plugin: plays the tests that are wanted, and watches while they run."""

    def __init__(self, test_names, tracer):
        self.test_names, self.tracer = {*test_names}, tracer

    def pytest_collection_modifyitems(self, items):
        items[:] = [
            item for item in items if item.nodeid in self.test_names or item.nodeid.partition("[")[0] in self.test_names
        ]

    def pytest_runtest_call(self, item):
        sys.settrace(self.tracer.trace)

    def pytest_runtest_teardown(self, item):
        sys.settrace(None)


def record(plan, emit):
    """Says each call once, in the order of the tests."""
    import pytest

    tree = plan["tree"]
    files = sorted({test.partition("::")[0] for test in plan["wanted"]})
    os.chdir(tree)
    Path(tree, ".pytest.ini").write_text("[pytest]\n")
    tracer = CallTracer(tree, plan["holes"], files)
    options = [
        "-q",
        "--noconftest",
        "-p",
        "no:cacheprovider",
        "-c",
        ".pytest.ini",
        "--rootdir",
        tree,
        "--import-mode=importlib",
        "--assert=plain",
    ]
    pytest.main(
        [*options, "--tb=no", "--continue-on-collection-errors", *files],
        plugins=[TracingPlugin(plan["wanted"], tracer)],
    )
    for call in tracer.calls.values():
        emit(call)


class Late(BaseException):
    """A call that takes too long."""


def raise_late(*_):
    raise Late


def answer_call(call, tracer, seconds):
    """What comes of a call: its kind and what it is; whether a hole was reached, and whether the arguments stayed as
    they were. `seconds`: of processor time for it."""
    args, named = (
        [unpack_value(argument) for argument in call["args"]],
        {key: unpack_value(argument) for key, argument in call["named"].items()},
    )
    tracer.has_reached_hole, has_reached_hole = False, False
    try:
        module, _, name = call["function"].partition(":")
        function = getattr(importlib.import_module(module), name)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            sys.settrace(tracer.trace if tracer.holes else None)
            value = function(*args, **named)
        finally:
            sys.settrace(None)
            signal.setitimer(signal.ITIMER_PROF, 0)
            has_reached_hole = tracer.has_reached_hole
        outcome = ["value", pack_value(value, exact=False)]
        if len(json.dumps(outcome)) > ANSWER:
            raise NotPlain("too long")
    except NotPlain:
        outcome = ["other", None]
    except BaseException as error:
        outcome = ["error", [error_class.__name__ for error_class in type(error).__mro__[:-1]]]
    try:
        is_unchanged = [pack_value(argument) for argument in args] == call["args"] and {
            key: pack_value(argument) for key, argument in named.items()
        } == call["named"]
    except NotPlain:
        is_unchanged = False
    return [*outcome, has_reached_hole, is_unchanged]


def answer(plan, emit):
    """Says of each call, by its number, what came of it, in the order in which they are asked for."""
    tracer = CallTracer(plan["tree"], plan["holes"])
    signal.signal(signal.SIGPROF, raise_late)
    for number in plan["order"]:
        try:
            emit([number, *answer_call(plan["asked"][number], tracer, plan["each"])])
        except BaseException:  # what was left running, or a value that fights back
            emit([number, "other", None, False, False])


def main(command, path):
    with open(path) as file:
        plan = json.load(file)
    os.unlink(path)
    pipe = os.dup(1)
    for handle, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        os.dup2(os.open(os.devnull, flags), handle)
    sys.path += [plan["tree"], f"{plan['tree']}/src"]
    sys.argv[:], sys.orig_argv[:] = ["python3"], ["python3"]

    def emit(row):
        os.write(pipe, json.dumps(row).encode() + b"\n")

    {"record": record, "answer": answer}[command](plan, emit)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
