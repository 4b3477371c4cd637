"""Runtime checks of the shapes and types that functions of `ref` declare.

jaxtyping's decorator binds, checks and stores the arguments of every call, which was half of the time of tests that
train. So of each function the first `FIRST` calls of a test are checked, and of the later ones each `EVERY`th."""

import functools
import inspect

import jaxtyping

__all__ = ["install", "start_test"]

FIRST, EVERY = 8, 16
_number_of_test = 0


def install() -> None:
    """Modules of `ref` that are imported from now on are checked."""
    original = jaxtyping.jaxtyped

    def jaxtyped(function=None, *, typechecker):
        if function is None:
            return functools.partial(jaxtyped, typechecker=typechecker)
        if inspect.isclass(function):  # a dataclass, whose constructor is checked
            unchecked = function.__init__
            original(function, typechecker=typechecker)
            if function.__init__ is not unchecked:
                function.__init__ = _sample(unchecked, function.__init__)
            return function
        checked = original(function, typechecker=typechecker)
        return _sample(function, checked) if inspect.isfunction(function) else checked

    jaxtyping.jaxtyped = jaxtyped
    jaxtyping.install_import_hook(["ref"], "beartype.beartype")


def start_test() -> None:
    """Counts calls from zero again."""
    global _number_of_test
    _number_of_test += 1


def _sample(unchecked, checked):
    test, calls = -1, 0

    @functools.wraps(unchecked)
    def call(*args, **kwargs):
        nonlocal test, calls
        if test != _number_of_test:
            test, calls = _number_of_test, 0
        calls += 1
        return (checked if calls <= FIRST or calls % EVERY == 0 else unchecked)(*args, **kwargs)

    return call
