"""Answers to the exercises of lesson 14 (see `answers.py`)."""

TEXTS = {
    "14_feature_deletion": {
        1: """
# wrong: the lines instead of the tests
def groups(coverage, least):
    lines = set().union(*coverage.values())
    return {frozenset([line]) for line in lines if sum(line in executed for executed in coverage.values()) >= least}

# wrong: more than least
def groups(coverage, least):
    lines = set().union(*coverage.values())
    candidates = {frozenset(test for test, executed in coverage.items() if line in executed) for line in lines}
    return {group for group in candidates if len(group) > least}

# wrong: every group of tests, whether a line has it or not
def groups(coverage, least):
    import itertools

    return {frozenset(one) for n in range(least, len(coverage) + 1) \
for one in itertools.islice(itertools.combinations(coverage, n), 50)}

# right: line by line
def groups(coverage, least):
    who = {}
    for test, executed in coverage.items():
        for line in executed:
            who.setdefault(line, set()).add(test)
    return {frozenset(found) for found in who.values() if len(found) >= least}
""",
        2: """
# wrong: also what others execute
def only(coverage, group):
    return set().union(*(coverage[test] for test in group))

# wrong: what all of the group execute
def only(coverage, group):
    theirs = set.intersection(*(coverage[test] for test in group)) if group else set()
    return theirs - set().union(*(executed for test, executed in coverage.items() if test not in group))

# right: line by line
def only(coverage, group):
    lines = {line for test in group for line in coverage[test]}
    return {line for line in lines if all(test in group for test, executed in coverage.items() if line in executed)}
""",
        3: """
# wrong: exactly as many as least
def valid(before, after, least, owners):
    failing = {test for test in before if before[test] == "passed" and after.get(test) == "failed"}
    return len(failing) == least and failing <= set(owners)

# wrong: errors and skipped tests count as nothing
def valid(before, after, least, owners):
    failing = {test for test in before if before[test] == "passed" and after.get(test) == "failed"}
    return len(failing) >= least and failing <= set(owners)

# wrong: tests that failed before count, too
def valid(before, after, least, owners):
    failing = {test for test in before if after.get(test) == "failed"}
    others_pass = all(after.get(test) == "passed" for test in before if test not in failing)
    return len(failing) >= least and others_pass and failing <= set(owners) and "error" not in after.values()

# right: with a count
def valid(before, after, least, owners):
    count = 0
    for test, outcome in before.items():
        if outcome != "passed" or after.get(test) == "passed":
            continue
        if after.get(test) != "failed" or test not in owners:
            return False
        count += 1
    return count >= least and not any(outcome == "error" for outcome in after.values())
""",
        4: """
# wrong: the name anywhere
def flagged(path):
    return any(name in path for name in (".mypy_cache", ".pytest_cache", "__pycache__"))

# wrong: at the top only
def flagged(path):
    return path.split("/")[0] in (".mypy_cache", ".pytest_cache", "__pycache__")

# wrong: the folder's own name as well
def flagged(path):
    return any(part in (".mypy_cache", ".pytest_cache", "__pycache__") for part in path.split("/"))

# right: with paths
def flagged(path):
    from pathlib import PurePosixPath

    return any(folder.name in (".mypy_cache", ".pytest_cache", "__pycache__") for folder in PurePosixPath(path).parents)
""",
        5: """
# wrong: all functions and files count
def doublings(lines, functions, files, tests, callers):
    return sum(math.log2(1 + n) for n in (lines, functions, files, tests / 3, callers))

# wrong: a sum of numbers, then one logarithm
def doublings(lines, functions, files, tests, callers):
    return math.log2(1 + lines + (functions - 1) + (files - 1) + tests / 3 + callers)

# right: a product within one logarithm
def doublings(lines, functions, files, tests, callers):
    return math.log2((1 + lines) * functions * files * (1 + tests / 3) * (1 + callers))
""",
    }
}
