"""Guard G6: half of a task's tests is held out. The agent sees one half and is graded by both.

Which half a test is in follows from the task's id and the test's name by a keyed hash, so three makings of a task
agree, nobody chooses, and who knows the split of one task knows nothing about another's. Tests of one function stay
together, because a file is cut by functions; where one function has all tests, its cases are divided.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection

__all__ = ["halves"]


def halves(tests: Collection[str], task: str, key: bytes = b"") -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The visible half and the one held out, each sorted. The held-out half has as many functions, or one more. Raises
    ValueError for fewer than two tests, and for an empty id."""
    if len(set(tests)) < 2 or not task:
        raise ValueError(
            f"a task needs an id and at least two tests to hold one out; got {len(set(tests))} tests "
            f"and the id {task!r}"
        )
    groups: dict[str, list[str]] = {}
    for test in sorted(set(tests)):
        groups.setdefault(test.partition("[")[0], []).append(test)
    if len(groups) == 1:
        groups = {test: [test] for test in tests}
    order = sorted(groups, key=lambda name: hmac.new(key, f"{task}\0{name}".encode(), hashlib.sha256).digest())
    cut = len(order) // 2
    visible, held_out = ([test for name in part for test in groups[name]] for part in (order[:cut], order[cut:]))
    return tuple(sorted(visible)), tuple(sorted(held_out))
