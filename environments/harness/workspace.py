"""The place where an episode works: a sandbox over a stored tree, and the tools that a policy calls there.

A call is made by the harness itself (finish, todo, lints, the searches) or in the sandbox. Behind each turn the tree is
stored, so there is a tree for each: whoever goes on with an interrupted episode forks the last one. `Episode`
(episode.py) is one of a model behind an address, and `HarnessEnvironment` (environment.py) one for RL.
"""

from __future__ import annotations

import difflib
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from environments.grading.rewards import conformance
from environments.harness.index import Index
from environments.harness.messages import Called
from environments.harness.tools import TOOLS, BadCall, Tool, select_tools
from environments.sandbox.interface import Observation, Sandbox
from environments.sandbox.manifest import Entry
from environments.sandbox.store import Store
from environments.sandbox.visible import cut, one_line, visible
from kit.settings import RunError

__all__ = ["INVALID_CALL", "SYSTEM", "Answer", "Job", "Workspace", "difference", "hide_times"]

SYSTEM = """You are a software engineer. You work in a folder with the source of a package, through tools. \
There is no network.
Look at the code, change what is needed and no more, run the tests, and call finish when you are done. \
Several calls may stand in one reply."""
LARGEST, LONGEST, SAYS = 256 << 10, 16 << 10, 16 << 10
"""Bytes of a file that is compared or looked through for lints, of a turn's diff, and of an answer."""
MAX_LINE_PAIRS = 4_000_000
"""Pairs of lines that are compared for a diff, at most: whoever works in the tree chooses their number."""
CALLS = 32
"""Calls of a reply that are made."""
SRC_ON_PATH = "export PYTHONPATH=/work/src; "
"""Stands before commands where the package lies in src/, as if it were installed for development: its tests import it
by its name."""
CACHES = {"__pycache__", ".pytest_cache"}
WALL_CLOCK = re.compile(
    r"\bin [0-9]{1,9}\.[0-9]{2,3}s\b(?: \((?:[0-9]{1,6} days?, )?[0-9]{1,2}:[0-9]{2}:[0-9]{2}\))?", re.ASCII
)
"""How pytest and unittest say at the end how long the tests took: "in 0.12s", and "in 65.04s (0:01:05)"."""
INVALID_CALL = "broken"
"""What is said of an answer to a call that was none."""


@dataclass(frozen=True)
class Job:
    """What an agent is asked."""

    task: str
    """Its name."""
    prompt: str
    tree: str
    """The hash of the stored tree that it begins with."""
    given_files: Mapping[str, bytes]
    """The files of that tree: for lints, and for the search."""
    pages: Mapping[str, str] | None = None
    """A frozen corpus: name of a page → its text."""
    tools: tuple[str, ...] = tuple(TOOLS)
    strict: bool = False
    policy_name: str = ""
    """Who plays, and how it samples."""
    system: str = SYSTEM
    hides_times: bool = False
    """Whether answers of `shell` say "in 0.00s" wherever they say how long something took (`hide_times`): the tokens of
    an episode then do not depend on the clock."""


@dataclass(frozen=True)
class Answer:
    """What came of a call."""

    text: str
    ok: bool
    is_invalid: bool = False
    """Whether the call was none: there is no such tool, or its arguments do not fit."""
    exit: int | None = None
    end_reason: str | None = None
    seconds: float = 0.0


class Workspace:
    """`fork`: opens a sandbox over a stored tree. `call_seconds`: of a call, at most. `tree`: where an episode goes on,
    by default the job's."""

    def __init__(
        self,
        job: Job,
        fork: Callable[[str], Sandbox],
        store: Store,
        call_seconds: float = 60.0,
        tree: str | None = None,
    ) -> None:
        self.job, self.fork, self.store, self.call_seconds = job, fork, store, call_seconds
        self.tools = {tool.name: tool for tool in select_tools(job.tools)}
        self.tree = job.tree if tree is None else tree
        self.has_src_layout = has_src_layout(job.given_files)
        self.over = ""
        """Why the episode is over, if it is."""
        self.index, self.corpus = None, None
        self.sandbox: Sandbox | None = None
        self.is_ended, self.lock = False, threading.Lock()

    def open(self) -> Sandbox:
        """The sandbox, which is opened if it is not. Raises RunError after `end`."""
        with self.lock:
            if self.is_ended:
                raise RunError("the episode is closed")
            if self.sandbox is None:
                self.sandbox = self.fork(self.tree)
            return self.sandbox

    def close(self) -> None:
        """Closes the sandbox; the next call opens another one over the stored tree."""
        with self.lock:
            sandbox, self.sandbox = self.sandbox, None
        if sandbox is not None:
            sandbox.close()

    def end(self) -> None:
        """Closes the sandbox for good, also where a call still runs in another thread."""
        self.is_ended = True
        self.close()

    def call(self, call: Called, number: int, left: float) -> Answer:
        """Makes the call of this number in its reply. `left`: seconds that the episode has."""
        since, tool, is_broken = time.monotonic(), self.tools.get(call.name), False
        try:
            if self.over:
                raise BadCall("the episode is over; this call was not made")
            if number >= CALLS:
                raise BadCall(f"there are more than {CALLS} calls in this reply")
            if left <= 0:
                return Answer("the time of the episode is over; this call was not made", False)
            if tool is None:
                raise BadCall(f"there is no tool {call.name[:100]!r}; there are {', '.join(self.tools)}")
            args = tool.parse_arguments(call.arguments, self.job.strict)
            if tool.name == "shell" and self.has_src_layout:
                args["command"] = SRC_ON_PATH + args["command"]
            observation = self._call_own_tool(tool, args) or self.open().call(
                tool.name, args, min(self.call_seconds, left)
            )
            if tool.name == "shell" and self.job.hides_times:
                observation = replace(observation, text=hide_times(observation.text))
        except BadCall as error:
            observation, is_broken = Observation(one_line(str(error), 1000), False), True
        text = cut(observation.text, SAYS)
        if observation.exit:
            text += f"\n[exit code {observation.exit}]"
        if observation.end_reason:
            text += f"\n[ended: {observation.end_reason}]"
        return Answer(
            text.strip("\n"),
            observation.ok,
            is_broken,
            observation.exit,
            observation.end_reason,
            time.monotonic() - since,
        )

    def keep(self) -> tuple[str, str]:
        """Stores the tree. Gives the difference to the last one, and what is to be said to the agent: a tree that
        cannot be stored, with a FIFO in it for instance, is the agent's to mend; the last good one stays."""
        try:
            previous, self.tree = self.tree, self.open().snapshot()
            return difference(self.store, previous, self.tree) if previous != self.tree else "", ""
        except RunError as error:
            observation = self.open().call("list", {})
            if observation.end_reason:
                self.over = f"the sandbox ended: {observation.end_reason}"
                return "", ""
            self.close()
            return "", f"The work tree cannot be stored, and is again as it was before: {one_line(str(error))}"

    def _call_own_tool(self, tool: Tool, args: dict) -> Observation | None:
        """What a tool of the harness says; None for one that runs in the sandbox."""
        if tool.name == "finish":
            self.over = "finish"
            return Observation("the episode is over", True)
        if tool.name == "todo":
            done = sum(item["state"] == "done" for item in args["items"])
            return Observation(f"{len(args['items'])} items, {done} done", True)
        if tool.name == "lints":
            return self._find_lints(args["path"])
        if tool.name == "semantic_search":
            self.index = self.index or Index(
                {name: data.decode() for name, data in self.job.given_files.items() if _is_text(data)}
            )
            return _search(self.index, args["query"])
        if tool.name == "web_search":
            self.corpus = self.corpus or Index(self.job.pages or {}, height=60)
            return _search(self.corpus, args["query"])
        return None

    def _find_lints(self, path: str) -> Observation:
        """Problems of the lines of a file that are new."""
        name = path.removeprefix("/work/").removeprefix("./")
        try:
            entry = self.store.manifest(self.open().snapshot()).get(name)
        except RunError as error:
            return Observation(one_line(str(error)), False)
        if entry is None or entry.kind != "file" or not name.endswith(".py") or entry.size > LARGEST:
            return Observation(
                f"{one_line(path)} is no file of Python in the work tree, or larger than {LARGEST >> 10} KiB", False
            )
        given_files = {name: self.job.given_files[name]} if name in self.job.given_files else {}
        report = conformance(given_files, {name: self.store.content(entry)})
        return Observation("\n".join(report.problems) or f"nothing in {report.lines} new lines", True)


def hide_times(text: str) -> str:
    """The text with 0.00s in place of the seconds that tests took: "1 passed in 0.12s" and "1 passed in 65.04s
    (0:01:05)" become "1 passed in 0.00s"."""
    return WALL_CLOCK.sub("in 0.00s", text)


def has_src_layout(files: Iterable[str]) -> bool:
    """Whether modules lie in the folder src/, which is none itself, and none has the name of one of Python's own."""
    names = {match[1] for name in files if (match := re.fullmatch(r"src/(\w+)(?:/__init__)?\.py", name))}
    return bool(names) and "__init__" not in names and not names & sys.stdlib_module_names


def difference(store: Store, before: str, after: str) -> str:
    """What changed from one stored tree to another, as a unified diff of its text files; of others it says so. Folders,
    and caches of Python and pytest, are left out. At most LONGEST bytes. Raises RunError."""
    old, new, rows = store.manifest(before), store.manifest(after), list[str]()
    for name in sorted(
        path for path in old.keys() | new.keys() if old.get(path) != new.get(path) and not CACHES & {*path.split("/")}
    ):
        sides = [_read_side(store, tree.get(name)) for tree in (old, new)]
        if None in sides:
            rows.append(f"{visible(name)}: no text, or a link, or too large")
            continue
        old_lines, new_lines = ([*map(visible, (side or "").splitlines())] for side in sides)
        if len(old_lines) * len(new_lines) > MAX_LINE_PAIRS:
            rows.append(f"{visible(name)}: too many lines to compare")
            continue
        lines = [*difflib.unified_diff(old_lines, new_lines, f"a/{visible(name)}", f"b/{visible(name)}", lineterm="")]
        if sum(map(len, rows)) > LONGEST:
            rows.append("…")
            break
        is_folder = any(tree[name].kind == "dir" for tree in (old, new) if name in tree)
        rows += lines or ([] if is_folder else [f"{visible(name)}: its mode or the end of its last line"])
    return cut("\n".join(rows), LONGEST)


def _read_side(store: Store, entry: Entry | None) -> str | None:
    """A file's text for a diff; empty where there is none, and None where it is nothing to compare."""
    if entry is None or entry.kind == "dir":
        return ""
    data = store.content(entry) if entry.kind == "file" and entry.size <= LARGEST else b"\0"
    return data.decode() if _is_text(data) else None


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in data


def _search(index: Index, query: str) -> Observation:
    blocks = [
        f"{hit.name}:{hit.line}\n" + "\n".join(line[:300] for line in hit.text.splitlines())
        for hit in index.find(query)
    ]
    return Observation("\n\n".join(blocks) or "nothing is found", True)
