"""Fingerprints that tie an experiment's record to the code that measured it.

A record in `results/figures/` holds, next to its numbers,
    sources   path → fingerprint of the code that measured: every function and setting of the experiment's files
    rules     path → fingerprint of the code that judged: the functions that call `claim`, and `judge`
    seal      SHA-256 of everything else in the record
If the checkout's fingerprints differ from a record's, its rows are *stale*: `etude claims` gives them no verdict until
the experiment is run again, or until `python -m etude.ledger.fingerprints NAME` has shown that the change altered no
number. Records of earlier versions have no fingerprints; the ledger says so next to their verdicts.

The experiment's files are the module that the catalogue names and all modules of the experiment rooms that it imports,
directly or through one another (`EXPERIMENT_ROOMS`). What many experiments share is left out: the small world, most of
the recipe, the reference files. The record names their commit, and their own tests hold their behaviour. A fingerprint
is taken of the syntax tree, so comments, formatting and docstrings do not count, nor does prose: f-strings, the wording
of a claim, and the function that draws the picture.

    python -m etude.ledger.fingerprints grpo-bias mtp
        runs `etude figure NAME --quick` at the record's commit and here; if every row and every claim is the same to
        the last bit, seconds apart, the record takes today's fingerprints and today's wording
    python -m etude.ledger.fingerprints --at COMMIT mtp
        compares with a later commit, at which the record was not stale yet: what they share was changed in between, and
        only the change of the experiment is in question
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from etude import catalog
from kit.disk import atomic_write, read_json, seal_record
from kit.process import machine
from kit.settings import RunError

__all__ = [
    "ROOT",
    "fingerprints",
    "is_recorded",
    "is_sealed",
    "quick_record",
    "renew",
    "results_folder",
    "stale_reasons",
]

ROOT = Path(__file__).resolve().parents[2]
JUDGE = "sims/experiment.py"
"""Its `judge` turns every rule into a verdict."""
SHARED = ("sims/policies.py", JUDGE)
EXPERIMENT_ROOMS = (
    "sims/",
    "etude/run/cpt_real.py",
    "kit/statistics.py",
    "kit/trends.py",
    "recipe/small/fp8_rounding.py",
    "recipe/small/hints.py",
    "recipe/small/transcripts.py",
)
ENTRY = """
try:
    from etude.cli.main import main
except ImportError:  # a commit before 0.2.0
    from etude.cli import main
main()
"""
"""The command line of any commit."""
CLOCKED = ("step_s", "draft_cost")
"""Columns that a clock measures: no two runs have the same."""
PROSE = {"says": 1, "source": 2, "unit": 6, "note": 7}
"""Parameters of `claim` that are prose, with their positions."""

Read = Callable[[str], "str | None"]
"""Path from the root of the repository → the file's text, or None if there is no such file."""


def working_tree(path: str) -> str | None:
    """A file of this checkout."""
    file = ROOT / path
    return file.read_text(encoding="utf-8") if file.is_file() else None


def at_commit(commit: str) -> Read:
    """Reads files as they were at a commit of this checkout."""

    def read(path: str) -> str | None:
        result = subprocess.run(["git", "show", f"{commit}:{path}"], cwd=ROOT, capture_output=True, text=True)
        return result.stdout if result.returncode == 0 else None

    return read


class _Meaning(ast.NodeTransformer):
    """Removes from a syntax tree what cannot change a number: docstrings, f-strings, the wording of claims."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
            is_text = [
                isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant) and isinstance(s.value.value, str)
                for s in node.body
            ]
            node.body = [statement for statement, text in zip(node.body, is_text, strict=True) if not text] or [
                ast.Pass()
            ]
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return ast.Constant("")

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if _is_claim(node):
            node.args = [a for i, a in enumerate(node.args) if i not in PROSE.values() or isinstance(a, ast.Starred)]
            node.keywords = [k for k in node.keywords if k.arg not in PROSE]
        return self.generic_visit(node)


def _is_claim(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "claim"


def _hash_nodes(nodes: Iterable[ast.stmt]) -> str:
    return hashlib.sha256("\n".join(map(ast.dump, nodes)).encode()).hexdigest()[:16]


def _hash_halves(text: str) -> tuple[str, str | None]:
    """Fingerprints of a file's measuring and of its judging code; None for the second if nothing in it judges."""
    body = [
        s
        for s in _Meaning().visit(ast.parse(text)).body
        if not (isinstance(s, ast.FunctionDef) and s.name == "picture")
    ]
    is_rule = [any(map(_is_claim, ast.walk(statement))) for statement in body]
    rules = [statement for statement, rule in zip(body, is_rule, strict=True) if rule]
    return (
        _hash_nodes(s for s, rule in zip(body, is_rule, strict=True) if not rule),
        _hash_nodes(rules) if rules else None,
    )


def _find_imports(text: str, read: Read) -> set[str]:
    """Paths of the project's files that a module imports."""
    modules = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    places = [
        place
        for module in modules
        for place in (module.replace(".", "/") + ".py", module.replace(".", "/") + "/__init__.py")
    ]
    return {
        place
        for place in places
        if place.startswith(EXPERIMENT_ROOMS)
        and place not in SHARED
        and not place.endswith("/__init__.py")
        and read(place) is not None
    }


def fingerprints(sim: str, read: Read = working_tree) -> dict[str, dict[str, str]]:
    """The fingerprints of an experiment: {"sources": path → fingerprint, "rules": path → fingerprint}.

    sim: path of the experiment's file. read: where files come from. Raises RunError if there is no such file."""
    waiting, sources, rules = [sim], {}, {}
    while waiting:
        path = waiting.pop()
        if path in sources:
            continue
        if (text := read(path)) is None:
            raise RunError(f"{path} does not exist, so {sim} has no fingerprint")
        sources[path], judging = _hash_halves(text)
        if judging is not None:
            rules[path] = judging
        waiting += _find_imports(text, read)
    judge = next(s for s in ast.parse(read(JUDGE) or "").body if isinstance(s, ast.FunctionDef) and s.name == "judge")
    rules[JUDGE] = _hash_nodes([_Meaning().visit(judge)])
    return {"sources": dict(sorted(sources.items())), "rules": dict(sorted(rules.items()))}


def stale_reasons(record: dict, sim: str) -> list[str]:
    """Why a record's rows are stale, one reason per changed file; empty if they are not, or if the record has no
    fingerprints."""
    if not is_recorded(record):
        return []
    today = fingerprints(sim)
    reasons = []
    for half, verb in (("sources", "measures"), ("rules", "judges")):
        before, current = record[half], today[half]
        reasons += [
            f"what {path} {verb} has changed"
            for path in sorted(before.keys() | current.keys())
            if before.get(path) != current.get(path)
        ]
    return reasons


def is_recorded(record: dict) -> bool:
    """Whether a record says which code measured and judged it. Those of earlier versions do not."""
    return "sources" in record and "rules" in record


def is_sealed(record: dict) -> bool:
    """Whether a record is as it was written."""
    return "seal" in record and record == seal_record(record)


def renew(name: str, at: str | None = None) -> str:
    """Shows by `--quick` that a record's experiment still measures the same, then writes today's fingerprints into the
    record.

    `at`: the commit to compare with, by default the record's own. Returns a line that says what happened. Raises
    RunError if the experiment is unknown, if the commit is none of this checkout or the record was stale there, or if a
    row or claim differs."""
    entry = catalog.find_experiment(name)
    if entry is None:
        raise RunError(f"there is no experiment '{name}'; etude figure lists them")
    path = results_folder() / f"{name}.json"
    record = read_json(path)
    commit = at or record.get("renewed", {}).get("commit") or record["machine"]["commit"]
    if subprocess.run(["git", "cat-file", "-e", f"{commit}^{{commit}}"], cwd=ROOT, capture_output=True).returncode:
        advice = "give --at one that is" if at else f"run it again: etude figure {name}"
        raise RunError(f"cannot compare {name} with {commit}, which is not a commit of this checkout; {advice}")
    if at and (
        not is_recorded(record)
        or {half: record[half] for half in ("sources", "rules")} != fingerprints(entry.sim, at_commit(at))
    ):
        raise RunError(
            f"{name} had changed before {at}, or its record has no fingerprints; compare with the "
            f"record's own commit, without --at"
        )
    with tempfile.TemporaryDirectory() as folder:
        before = quick_record(name, at=commit, folder=Path(folder))
        after = quick_record(name, at=None, folder=Path(folder))
    if difference := _find_difference(before, after):
        raise RunError(
            f"{name} gives other results since {commit[:12]}: {difference}; run it again: etude figure {name}"
        )
    record["claims"] = _reword_claims(record["claims"], before["claims"], after["claims"])
    record |= fingerprints(entry.sim) | {
        "renewed": {"commit": machine()["commit"], "compared": f"{len(after['rows'])} rows of --quick", "with": commit}
    }
    atomic_write(path, json.dumps(seal_record(record), indent=1) + "\n")
    return (
        f"{name}: {len(after['rows'])} rows and {len(after['claims'])} claims of --quick are the same as "
        f"at {commit[:12]}"
    )


def _reword_claims(claims: list[dict], before: list[dict], after: list[dict]) -> list[dict]:
    """A record's claims in today's words, where the words do not depend on the size of the run."""
    old, new = ({claim["name"]: claim for claim in group} for group in (before, after))

    def select_prose(claim: dict) -> dict:
        name = claim["name"]
        is_same = name in new and all(claim[key] == old[name][key] for key in ("claim", "source"))
        return {key: new[name][key] for key in ("claim", "source")} if is_same else {}

    return [claim | select_prose(claim) for claim in claims]


def results_folder() -> Path:
    """Where the committed records lie."""
    return ROOT / "results" / "figures"


def quick_record(name: str, at: str | None, folder: Path) -> dict:
    """The record of `etude figure NAME --quick` at a commit; None: of this checkout."""
    tree, out = ROOT, folder / (at or "now")
    if at:
        tree = folder / "tree"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", str(tree), at], cwd=ROOT, check=True)
    try:
        command = [sys.executable, "-c", ENTRY, "figure", name, "--quick", "--out", str(out)]
        run = subprocess.run(
            command, cwd=tree, env={**_copy_environment(), "PYTHONPATH": str(tree)}, capture_output=True, text=True
        )
    finally:
        if at:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)
    if not (out / f"{name}.json").exists():  # a law that so small a run breaks also exits 1, with a record
        raise RunError(
            f"etude figure {name} --quick fails at {at or 'this commit'}: {run.stderr.strip().splitlines()[-1:]}"
        )
    return read_json(out / f"{name}.json")


def _copy_environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def _find_difference(before: dict, after: dict) -> str:
    """The first difference between two records' rows and claims, in words; empty if there is none."""
    if len(before["rows"]) != len(after["rows"]):
        return f"{len(before['rows'])} rows became {len(after['rows'])}"
    for number, (old, new) in enumerate(zip(before["rows"], after["rows"], strict=True)):
        for key in sorted((old.keys() | new.keys()) - set(CLOCKED)):
            if old.get(key) != new.get(key):
                return f"row {number}, {key}: {old.get(key)!r} became {new.get(key)!r}"
    numbers = ("name", "measured", "interval", "rule", "needs")
    for old, new in zip(before["claims"], after["claims"], strict=False):
        for key in numbers:
            if old.get(key) != new.get(key):
                return f"{old['name']}, {key}: {old.get(key)!r} became {new.get(key)!r}"
    return (
        ""
        if len(before["claims"]) == len(after["claims"])
        else f"{len(before['claims'])} claims became {len(after['claims'])}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m etude.ledger.fingerprints",
        description="Shows that records still hold, and renews their fingerprints.",
    )
    parser.add_argument("experiments", nargs="+", metavar="NAME")
    parser.add_argument("--at", metavar="COMMIT", help="compare with this commit in place of the record's own")
    arguments = parser.parse_args()
    for experiment in arguments.experiments:
        try:
            print(renew(experiment, arguments.at), flush=True)
        except RunError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
