"""Answers to the exercises of lesson 15 (see `answers.py`)."""

TEXTS = {
    "15_environments": {
        1: """
# wrong: parts only joined
def name_of(files):
    import hashlib

    return hashlib.sha256(b"".join(path.encode() + data for path, data in sorted(files.items()))).hexdigest()

# wrong: with separators that anybody may write
def name_of(files):
    import hashlib

    return hashlib.sha256(b"\\n".join(path.encode() + b"\\0" + data \
for path, data in sorted(files.items()))).hexdigest()

# wrong: in the order in which they are listed
def name_of(files):
    import hashlib

    return hashlib.sha256(repr(files).encode()).hexdigest()

# wrong: contents alone
def name_of(files):
    import hashlib

    return hashlib.sha256(repr(sorted(files.values())).encode()).hexdigest()

# wrong: Python's own hash
def name_of(files):
    return hash(tuple(sorted(files.items())))

# right: with lengths
def name_of(files):
    import hashlib

    found = hashlib.blake2b()
    for path in sorted(files):
        found.update(f"{len(path.encode())} {len(files[path])} ".encode() + path.encode() + files[path])
    return found.hexdigest()
""",
        2: """
# wrong: all that is there
def goes_on(lines):
    return len(lines), [line["tree"] for line in lines if "tree" in line][-1]

# wrong: without what ends no turn
def goes_on(lines):
    stay = max(n for n, line in enumerate(lines, 1) if line["kind"] in ("begin", "turn"))
    return stay, [line["tree"] for line in lines[:stay] if "tree" in line][-1]

# wrong: the tree that it began with
def goes_on(lines):
    stay = max(n for n, line in enumerate(lines, 1) if line["kind"] in ("begin", "turn", "summary", "end", "grade"))
    return stay, lines[0]["tree"]

# right: from the end
def goes_on(lines):
    lines = list(lines)
    while lines[-1]["kind"] in ("reply", "answer", "nudge", "stop"):
        lines.pop()
    return len(lines), next(line["tree"] for line in reversed(lines) if line.get("tree"))
""",
        3: """
# wrong: what the agent left, without links
def make_graded_tree(given_tree, left, editable):
    return {path: data for path, data in left.items() if data is not None}

# wrong: what was removed comes back
def make_graded_tree(given_tree, left, editable):
    return given_tree | {path: data for path, data in left.items() if path in editable and data is not None}

# wrong: links as well
def make_graded_tree(given_tree, left, editable):
    return {path: data for path, data in given_tree.items() if path not in editable} \
| {path: left[path] for path in left if path in editable}

# wrong: no new modules
def make_graded_tree(given_tree, left, editable):
    both = {path: left.get(path) if path in editable else data for path, data in given_tree.items()}
    return {path: data for path, data in both.items() if data is not None}

# wrong: an empty file is none
def make_graded_tree(given_tree, left, editable):
    pristine = {path: data for path, data in given_tree.items() if path not in editable}
    return pristine | {path: data for path, data in left.items() if path in editable and data}

# right: path by path
def make_graded_tree(given_tree, left, editable):
    found = {}
    for path in {*given_tree, *left}:
        data = left.get(path) if path in editable else given_tree.get(path)
        if data is not None:
            found[path] = data
    return found
""",
        4: """
# wrong: whoever wrote them
def pays(lines, key, required_tests, traps):
    said = [json.loads(line.partition(b" ")[2]) for line in lines]
    return {tuple(one) for one in said} \
== {*((test, "passed") for test in required_tests), *((test, "failed") for test in traps)}

# wrong: lines of others are passed over
def pays(lines, key, required_tests, traps):
    outcomes = {parse_sealed_line(line, key) for line in lines} - {None}
    return outcomes == {*((test, "passed") for test in required_tests), *((test, "failed") for test in traps)}

# wrong: the last line counts
def pays(lines, key, required_tests, traps):
    if None in [parse_sealed_line(line, key) for line in lines]:
        return False
    return dict(parse_sealed_line(line, key) for line in lines) \
== {**dict.fromkeys(required_tests, "passed"), **dict.fromkeys(traps, "failed")}

# wrong: canaries that nobody heard of
def pays(lines, key, required_tests, traps):
    outcomes = {parse_sealed_line(line, key) for line in lines}
    return outcomes - {(test, "failed") for test in traps} == {(test, "passed") for test in required_tests}

# wrong: nothing failed
def pays(lines, key, required_tests, traps):
    outcomes = {parse_sealed_line(line, key) for line in lines}
    return None not in outcomes \
and all(outcome == ("failed" if test in traps else "passed") for test, outcome in outcomes)

# right: step by step
def pays(lines, key, required_tests, traps):
    heard = {}
    for line in lines:
        one = parse_sealed_line(line, key)
        if one is None or heard.setdefault(one[0], one[1]) != one[1]:
            return False
    passed = all(heard.pop(test, "missing") == "passed" for test in required_tests)
    failed = all(heard.pop(test, "missing") == "failed" for test in traps)
    return passed and failed and not heard
""",
    }
}
