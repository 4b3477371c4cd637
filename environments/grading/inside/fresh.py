"""Calls of a package's functions, in a sandbox: those that its tests make are recorded, and others are made and their answers told.

    python3 -s -P -B fresh.py record PLAN       plays tests, and says which calls of functions of modules came through given lines
    python3 -s -P -B fresh.py answer PLAN       makes calls, and says of each what came back

Only plain data travels: None, truths, numbers, texts, bytes, and lists, tuples, sets and dicts of them. It is written as JSON that keeps what JSON
does not know. An answer of a class that derives from such a type is told as its base, by methods of the base alone: whatever such an object says
that it is equal to, it is told as what it holds.
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


def base(value: Any) -> Any:
    """The plain type that a value is of or derives from; its own type where there is none."""
    return next((one for one in (bool, int, float, str, bytes, list, tuple, set, frozenset, dict) if isinstance(value, one)), type(value))


def packed(value: Any, exact: bool = True, depth: int = 0) -> Any:
    """A value as JSON: None, truths and texts as they are, a list with its kind for all else. `exact`: classes that derive from plain types are
    none, and dicts keep their order. Raises NotPlain."""
    if depth > DEEPEST:
        raise NotPlain("too deep")
    kind: Any = type(value) if exact else base(value)
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
        parts = [packed(part, exact, depth + 1) for part in kind.__iter__(value)]
        return [kind.__name__.removeprefix("frozen"), parts if kind in (list, tuple) else sorted(parts, key=json.dumps)]
    if kind is dict:
        pairs = [[packed(key, exact, depth + 1), packed(part, exact, depth + 1)] for key, part in dict.items(value)]
        return ["dict", pairs if exact else sorted(pairs, key=json.dumps)]
    raise NotPlain(kind.__name__)


def unpacked(told: Any) -> Any:
    """The value that was packed. Raises ValueError for what is none."""
    if told is None or isinstance(told, bool | str):
        return told
    if not (isinstance(told, list) and len(told) == 2 and isinstance(told[0], str)):
        raise ValueError("no packed value")
    kind, rest = told
    if kind in ("int", "float"):
        return {"int": int, "float": float}[kind](rest)
    if kind == "bytes":
        return bytes.fromhex(rest)
    if kind in ("list", "tuple", "set"):
        return {"list": list, "tuple": tuple, "set": set}[kind](map(unpacked, rest))
    if kind == "dict":
        return {unpacked(key): unpacked(part) for key, part in rest}
    raise ValueError(f"no packed value: {kind[:20]}")


def wrapped(found: Any, code: Any) -> Any:
    """The function of a code, in what decorators have made of it; None where there is none."""
    while found is not None and getattr(found, "__code__", None) is not code:
        found = vars(found).get("__wrapped__") if hasattr(found, "__dict__") else None
    return found


class Watch:
    """Hears which calls of functions of modules came through the lines of holes. `holes`: file of the tree → its lines. `tests`: files of the tree
    that are none of the package."""

    def __init__(self, tree, holes, tests=()):
        self.tree, self.holes = tree + "/", {f"{tree}/{name}": frozenset(lines) for name, lines in holes.items()}
        self.tests = {f"{tree}/{name}" for name in tests}
        self.known, self.open, self.found, self.size, self.reached = {}, {}, {}, 0, False

    def within(self, frame):
        """Whether a frame is one of the package's code."""
        name = frame.f_code.co_filename
        return name.startswith(self.tree) and name not in self.tests

    def look(self, frame):
        """The lines of holes in a code of the tree, its name where it is a function of a module, and its defaults; None for other code."""
        code = frame.f_code
        if not self.within(frame):
            return None
        lines = {line for _, _, line in code.co_lines() if line} & self.holes.get(code.co_filename, frozenset())
        module = frame.f_globals.get("__name__")
        found = wrapped(frame.f_globals.get(code.co_name), code)
        if found is None or code.co_qualname != code.co_name or code.co_flags & NO_FUNCTION or module not in sys.modules:
            return lines, "", {}
        defaults = found.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        return lines, f"{module}:{code.co_name}", {**dict(zip(names, defaults, strict=True)), **(found.__kwdefaults__ or {})}

    def trace(self, frame, event, argument):
        code = frame.f_code
        if code not in self.known:
            self.known[code] = self.look(frame)
        if self.known[code] is None or self.size > ALL:
            return None
        lines, name, _ = self.known[code]
        if name:
            self.open[frame] = self.call(frame, name)
        frame.f_trace_lines = bool(lines)
        return self.trace_inside if name or lines else None

    def trace_inside(self, frame, event, argument):
        if event == "line" and frame.f_lineno in self.known[frame.f_code][0]:
            self.reached, up = True, frame
            while up is not None:
                if (text := self.open.get(up)) is not None and text not in self.found:
                    self.found[text], self.size = json.loads(text), self.size + len(text)
                up = up.f_back
        elif event == "return":
            self.open.pop(frame, None)
        return self.trace_inside

    def call(self, frame, name):
        """A call as JSON, and whether it came from outside of the tree; None for arguments that are not plain. Defaults are left out."""
        code, held, defaults = frame.f_code, frame.f_locals, self.known[frame.f_code][2]
        names, at = code.co_varnames, code.co_argcount + code.co_kwonlyargcount
        more = held[names[at]] if code.co_flags & inspect.CO_VARARGS else ()
        args, named = [], {}
        for number, one in enumerate(names[:at]):
            default = one in defaults and held[one] is defaults[one]
            if number < code.co_argcount and (more or number == len(args) and not default or number < code.co_posonlyargcount):
                args.append(held[one])
            elif not default:
                named[one] = held[one]
        args += more
        if code.co_flags & inspect.CO_VARKEYWORDS:
            named |= held[names[at + bool(code.co_flags & inspect.CO_VARARGS)]]
        outside = frame.f_back is None or not self.within(frame.f_back)
        try:
            told = {"function": name, "args": [packed(one) for one in args], "named": {key: packed(one) for key, one in named.items()}}
            text = json.dumps({**told, "outside": outside}, sort_keys=True)
        except NotPlain:
            return None
        return text if len(text) <= LONGEST else None


class Played:
    """pytest's plugin: plays the tests that are wanted, and watches while they run."""

    def __init__(self, wanted, watch):
        self.wanted, self.watch = {*wanted}, watch

    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items if item.nodeid in self.wanted or item.nodeid.partition("[")[0] in self.wanted]

    def pytest_runtest_call(self, item):
        sys.settrace(self.watch.trace)

    def pytest_runtest_teardown(self, item):
        sys.settrace(None)


def record(plan, say):
    """Says each call once, in the order of the tests."""
    import pytest

    tree = plan["tree"]
    files = sorted({test.partition("::")[0] for test in plan["wanted"]})
    os.chdir(tree)
    Path(tree, ".pytest.ini").write_text("[pytest]\n")
    watch = Watch(tree, plan["holes"], files)
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "-c", ".pytest.ini", "--rootdir", tree, "--import-mode=importlib", "--assert=plain"]
    pytest.main([*options, "--tb=no", "--continue-on-collection-errors", *files], plugins=[Played(plan["wanted"], watch)])
    for call in watch.found.values():
        say(call)


class Late(BaseException):
    """A call that takes too long."""


def late(*_):
    raise Late


def answered(asked, watch, each):
    """What comes of a call: its kind and what it is; whether a hole was reached, and whether the arguments stayed as they were. `each`: seconds of
    processor time for it."""
    args, named = [unpacked(one) for one in asked["args"]], {key: unpacked(one) for key, one in asked["named"].items()}
    watch.reached, reached = False, False
    try:
        module, _, name = asked["function"].partition(":")
        function = getattr(importlib.import_module(module), name)
        signal.setitimer(signal.ITIMER_PROF, each)
        try:
            sys.settrace(watch.trace if watch.holes else None)
            value = function(*args, **named)
        finally:
            sys.settrace(None)
            signal.setitimer(signal.ITIMER_PROF, 0)
            reached = watch.reached
        found = ["value", packed(value, exact=False)]
        if len(json.dumps(found)) > ANSWER:
            raise NotPlain("too long")
    except NotPlain:
        found = ["other", None]
    except BaseException as error:
        found = ["error", [one.__name__ for one in type(error).__mro__[:-1]]]
    try:
        same = [packed(one) for one in args] == asked["args"] and {key: packed(one) for key, one in named.items()} == asked["named"]
    except NotPlain:
        same = False
    return [*found, reached, same]


def answer(plan, say):
    """Says of each call, by its number, what came of it, in the order in which they are asked for."""
    watch = Watch(plan["tree"], plan["holes"])
    signal.signal(signal.SIGPROF, late)
    for number in plan["order"]:
        try:
            say([number, *answered(plan["asked"][number], watch, plan["each"])])
        except BaseException:  # what was left running, or a value that fights back
            say([number, "other", None, False, False])


def main(what, path):
    with open(path) as file:
        plan = json.load(file)
    os.unlink(path)
    pipe = os.dup(1)
    for handle, how in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        os.dup2(os.open(os.devnull, how), handle)
    sys.path += [plan["tree"], f"{plan['tree']}/src"]
    sys.argv[:], sys.orig_argv[:] = ["python3"], ["python3"]

    def say(found):
        os.write(pipe, json.dumps(found).encode() + b"\n")

    {"record": record, "answer": answer}[what](plan, say)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
