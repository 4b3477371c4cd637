"""Challenge 14: the most tasks in a table.

A feature that is taken out of a package makes a task if the tests that need it fail and the rest goes on working. The
table of who executes what says which deletions do: [80 tests, 60 functions]. Take one to six functions at a time. A
deletion makes a task if at least three tests fail and at most half of them, if a test executes each deleted function,
and if every other function that any test executes is still executed by one that passes.

deletions(table): return a list of deletions, each a list of function numbers. No two may share a function, or be nearly
the same: of the tests that fail under either, at most half may fail under both.

Score: tasks a package, averaged over six packages. More is better. A single deletion that makes no task is refused.
"""


def deletions(table):
    """One function, if it makes a task alone."""
    for function in range(table.shape[1]):
        failing = table[:, function]
        left = [candidate for candidate in range(table.shape[1]) if candidate != function and table[:, candidate].any()]
        if 3 <= failing.sum() <= 40 and table[~failing][:, left].any(0).all():
            return [[function]]
    return []
