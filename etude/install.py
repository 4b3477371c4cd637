"""`etude tasks install`: a folder is set up in a sandbox, in two stages, and what worked is kept as a small file that can be played again."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import textwrap
import urllib.parse
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from environments.egress.door import Door
from environments.egress.rules import Host, Rules
from environments.harness.episode import Budget
from environments.harness.messages import Policy, PolicyError
from environments.harness.remote import Remote
from environments.install.attempt import Attempt, Outcome, Revise, attempt, revised, why
from environments.install.folder import copied, read
from environments.install.model import Player
from environments.install.propose import VENV, modules, proposed
from environments.install.steps import Step, as_rows, of_rows
from environments.install.wheels import FOLDER, INDEX, laid, rooted
from environments.sandbox.cache import cache_folder
from environments.sandbox.interface import Limits
from environments.sandbox.open import open_sandbox, own_store
from environments.sandbox.visible import one_line
from kit.disk import Journal, atomic_write, read_json, read_lines
from kit.settings import Interrupted, RunError

__all__ = ["hosts_of", "install", "policy_of", "replay"]

LIMITS = Limits(processes=256, memory=1 << 30, disk=1 << 30, inodes=100_000, output=32 << 10, seconds=600.0)
"""Of the sandboxes in which packages are installed."""
BUDGET = Budget()
ALSO = {"https://pypi.org": ("files.index", "https://files.pythonhosted.org")}
"""Index → where its files lie, under which name."""


def hosts_of(index: str, private: bool) -> tuple[dict[str, Host], str]:
    """What a door lets through for an index, a folder or an address, and the path of its pages. Raises RunError."""
    if Path(index).is_dir():
        return {INDEX: Host(Path(index))}, "/simple/"
    if "://" not in index:
        raise RunError(f"--index {index} is no folder, and no address such as https://pypi.org/simple")
    try:
        there = urllib.parse.urlsplit(index)
        server = f"{there.scheme}://{there.netloc}"
        more = {name: Host(place, private=private) for known, (name, place) in ALSO.items() if known == server}
        return {INDEX: Host(server, private=private), **more}, f"{there.path.rstrip('/')}/"
    except ValueError as error:
        raise RunError(f"--index {one_line(index)}: {error}") from None


def policy_of(model: str, name: str, sampling: dict) -> Policy:
    """A model behind an address. Raises RunError."""
    if not name:
        raise RunError("a model behind an address has a name there: --name NAME")
    try:
        return Remote(model, name, os.environ.get("OPENAI_API_KEY", ""), sampling, told=lambda why: print(why, file=sys.stderr, flush=True))
    except ValueError as error:
        raise RunError(str(error)) from None


class Place:
    """The folder as it is, stored, and sandboxes over it. Use it as a context. Raises RunError."""

    def __init__(self, folder: Path, index: str | None, private: bool, log: Path) -> None:
        self.closing, self.store, self.index = ExitStack(), own_store(cache_folder() / "store"), index is not None
        hosts, pages = hosts_of(index, private) if index is not None else ({}, None)
        if not folder.is_dir():
            raise RunError(f"{folder} is no folder")
        root = rooted()
        with tempfile.TemporaryDirectory(prefix="etude-install-") as name:
            tree = Path(name) / "tree"
            copied(folder, tree, laid(pages))
            self.files = {path: data for path, data in read(tree).items() if not path.startswith(f"{FOLDER}/")}
            self.tree = self.store.add_folder(tree)
        log.parent.mkdir(parents=True, exist_ok=True)
        self.door = self.closing.enter_context(Door(Rules(hosts), log)) if hosts else None
        self.log, self.begun = log, len(read_lines(log))
        self.fork = partial(open_sandbox, limits=LIMITS, root=root, store=self.store, door=self.door)

    def fresh(self):
        return self.fork(self.tree)

    def trouble(self) -> str:
        """What the index had against the last request that it did not answer, if there is one."""
        whys = [str(line["why"]) for line in read_lines(self.log)[self.begun :] if line.get("host") and line.get("why")]
        hint = " (--private-index allows it)" if whys and "no public address" in whys[-1] else ""
        return f"; the index: {one_line(whys[-1])}{hint}" if whys else ""

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.close()


def install(
    folder: Path,
    index: str | None,
    out: Path,
    tries: int,
    policy: Policy | None = None,
    who: str = "",
    budget: Budget = BUDGET,
    private: bool = False,
    again: bool = False,
) -> Attempt:
    """Proposes steps for a folder and tries them; writes those that worked to `out`, and beside it what was tried and what was asked of the index.
    Without a policy, a script plays both stages. Raises RunError, in one line, where the folder is not set up; Interrupted."""
    if out.exists() and not again:
        raise RunError(f"{out} is there already; --again makes it anew, and --replay runs it")
    with Place(folder, index, private, out.with_suffix(".requests.jsonl")) as place, Tried(out.with_suffix(".tried.jsonl")) as tried:
        tried.add({"kind": "begin", "folder": str(folder), "tree": place.tree, "index": index, "who": who or "script"})
        try:
            steps, revise = _first(place, policy, who, budget, out)
            tried.add({"kind": "proposed", "steps": as_rows(steps)})
            found = _confirmed(place.fresh, attempt(steps, place.fresh, revise, tries, tried), tried)
        except PolicyError as error:
            raise RunError(f"{error}; {tried.path} tells what was tried") from None
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted; {tried.path} tells what was tried") from None
        tried.add({"kind": "end", "good": found.good, "tries": found.tries})
        if not found.good:
            raise RunError(f"{folder} is not set up after {_tries(found.tries)}: {_fault(found)}{place.trouble()}; {tried.path} tells what was tried")
        worked = [one.step for one in found.outcomes if one.passed]
        about = {"folder": folder.resolve().name, "tree": place.tree, "prepared": found.tree, "index": index is not None}
        atomic_write(out, json.dumps({**about, "steps": as_rows(worked)}, indent=1) + "\n")
    print(f"{out}: {len(worked)} steps work, after {_tries(found.tries)}; the folder as they leave it is tree {found.tree}")
    return found


def replay(folder: Path, path: Path, index: str | None, private: bool = False) -> Attempt:
    """Plays the steps of a file once more. Raises RunError for a file that is none, and where a step that worked does not."""
    try:
        kept = read_json(path)
        steps = of_rows(kept["steps"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise RunError(f"{path} holds no steps ({one_line(str(error))}): `etude tasks install` writes them") from None
    with Place(folder, index, private, path.with_suffix(".requests.jsonl")) as place, Tried(path.with_suffix(".tried.jsonl")) as tried:
        tried.add({"kind": "begin", "folder": str(folder), "tree": place.tree, "index": index, "who": f"replay of {path}"})
        try:
            found = attempt(steps, place.fresh, lambda *_: None, 1, tried)
        except KeyboardInterrupt:
            raise Interrupted("interrupted; the file of steps is as it was") from None
        tried.add({"kind": "end", "good": found.good, "tries": 1})
        if not all(one.passed for one in found.outcomes):
            raise RunError(f"{folder}: what worked once does not: {_fault(found)}{place.trouble()}")
    same = "the same tree as then" if found.tree == kept.get("prepared") else "another tree than then"
    print(f"{path}: all {len(steps)} steps work, and leave {same}, {found.tree}")
    return found


class Tried:
    """What was tried, as JSON lines and on the terminal. Use it as a context, and call it with each outcome."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.journal = path, Journal(path)
        if self.journal.torn():
            self.journal.append(b"\n")

    def add(self, line: dict) -> None:
        self.journal.append(json.dumps(line).encode() + b"\n")

    def __call__(self, number: int, one: Outcome) -> None:
        codes = {"command_exit": one.command, "check_exit": one.check, "passed": one.passed, "seconds": round(one.seconds, 3)}
        self.add({"kind": "step", "try": number, "command": one.step.command, "check": one.step.check, **codes, "said": one.text})
        if number:
            says = "" if one.passed else f": {why(one)}"
            print(f"try {number}, {one.seconds:.1f} s, {'works' if one.passed else 'fails'}: {_named(one.step)}{says}", flush=True)

    def __enter__(self) -> Tried:
        return self

    def __exit__(self, *_: object) -> None:
        self.journal.close()


def _first(place: Place, policy: Policy | None, who: str, budget: Budget, out: Path) -> tuple[list[Step], Revise]:
    """Stage 1, and who plays stage 2."""
    if policy is None:
        return proposed(place.files), partial(revised, modules(place.files))
    given = (policy, who, place.fork, place.store, place.tree, place.files, out.with_suffix(""), VENV, place.index, budget)
    player = Player(*given)
    return player.proposed(), player.revise


def _confirmed(fresh: Callable, found: Attempt, tried: Tried) -> Attempt:
    """Where not all steps worked, those that did once more without the others: that is what a replay plays."""
    worked = [one.step for one in found.outcomes if one.passed]
    if not found.good or len(worked) == len(found.outcomes):
        return found
    again = attempt(worked, fresh, lambda *_: None, 1, tried)
    return replace(again, tries=found.tries)


def _fault(found: Attempt) -> str:
    failed: Sequence[Outcome] = [one for one in found.outcomes if not one.passed and one.step.needed]
    if not failed:
        return "all checks passed before anything was done, and tell nothing"
    more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
    return f"{_named(failed[0].step)}: {why(failed[0])}{more}"


def _named(step: Step) -> str:
    """A step, for a person."""
    return f"`{textwrap.shorten(one_line(step.command or step.check, 1000), 90, placeholder=' …')}`"


def _tries(count: int) -> str:
    return f"{count} {'try' if count == 1 else 'tries'}"
