"""`etude tasks hints`: finds where episodes on real tasks went wrong, with a hint for each place, and writes them for
training."""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from environments.grading.guarded import Exam
from environments.harness import record
from environments.harness.hint_audit import Secret, make_secret, refusal
from environments.harness.hint_judge import BadAnswer, find_fault
from environments.harness.hints import Fault, find_faults, row
from environments.harness.messages import Policy, PolicyError
from environments.harness.remote import Remote
from environments.sandbox.open import Kind
from environments.sandbox.visible import one_line
from environments.tasks.check import exam_of
from etude.tasks.episodes import FOLDERS, task_of
from kit.disk import atomic_write
from kit.settings import RunError

__all__ = ["hints"]


def make_judge(source: Literal["errors", "judge"], model: str, name: str) -> Policy | None:
    """The judge, if one is asked. Raises RunError."""
    if source == "errors":
        if model or name:
            raise RunError("--model and --name are for a judge; add --source judge")
        return None
    if not model or not name:
        raise RunError(
            "--source judge needs --model ADDRESS, such as http://localhost:8000/v1, and --name NAME, "
            "the model's name on the server"
        )
    try:
        key = os.environ.get("OPENAI_API_KEY", "")
        return Remote(
            model, name, key, {"temperature": 0}, on_retry=lambda reason: print(reason, file=sys.stderr, flush=True)
        )
    except ValueError as error:
        raise RunError(str(error)) from None


def make_gold_diff(exam: Exam) -> str:
    """The difference from the given code to the original."""
    diff: list[str] = []
    for name in sorted(exam.gold_tree):
        given_lines, gold_lines = (
            files.get(name, b"").decode(errors="replace").splitlines() for files in (exam.given_tree, exam.gold_tree)
        )
        diff += difflib.unified_diff(given_lines, gold_lines, f"a/{name}", f"b/{name}", lineterm="")
    return "\n".join(diff)


@dataclass(frozen=True)
class TaskContext:
    """What is known of a transcript's task."""

    secret: Secret
    visible_tests: frozenset[str]
    """Tests that the agent can run."""
    gold: str


def load_context(name: str, folders: Sequence[Path], jobs: int, seconds: float, kind: Kind) -> TaskContext:
    """About a task of a recipe; see `task_of`. Raises RunError."""
    task, package = task_of(name, folders or FOLDERS, jobs, seconds, kind)
    exam = exam_of(task, package)
    return TaskContext(make_secret(task, package, exam), frozenset((*task.visible, *task.keep)), make_gold_diff(exam))


def hints(
    paths: Sequence[Path],
    source: Literal["errors", "judge"],
    model: str,
    name: str,
    shown_gold: bool,
    out: Path | None,
    loss: Path | None,
    folders: Sequence[Path],
    jobs: int,
    seconds: float,
    kind: Kind,
) -> bool:
    """Says for each transcript where it went wrong and what its policy could have been told, and writes the hints to
    the file `out`, a line each. A transcript of which nothing can be said is named in one line, and the next one comes.
    `loss`: a checkpoint; how far each hint moves its prediction of the reply is said too. True if all could be read.
    Raises RunError."""
    if out is not None and out.exists():
        raise RunError(f"{out} already exists; choose another file with --out")
    if shown_gold and source == "errors":
        raise RunError("--shown-gold shows the original code to a judge; add --source judge")
    judge, explain_moves = make_judge(source, model, name), load_mover(loss)
    load_cached, rows, refused, all_read = cache(load_context), list[dict](), Counter[str](), True
    try:
        for path in paths:
            try:
                lines = record.read(path)
                task = load_cached(lines[0]["task"], tuple(folders), jobs, seconds, kind)
                mistakes = (
                    find_faults(lines, task.visible_tests)
                    if judge is None
                    else ask_judge(judge, lines, task, shown_gold)
                )
            except RunError as error:
                print(error if str(path) in str(error) else f"{path}: {error}", file=sys.stderr, flush=True)
                all_read = False
                continue
            reasons = [refusal(fault, task.secret) for fault in mistakes]
            refused.update(reason.partition(":")[0] for reason in reasons if reason)
            refused_count = len(mistakes) - reasons.count("")
            print(
                f"{path}: "
                f"{format_count(len(mistakes) - refused_count)}"
                f"{f', and {refused_count} refused' if refused_count else ''}",
                flush=True,
            )
            for fault, reason in zip(mistakes, reasons, strict=True):
                print(
                    f"  reply {fault.turn.number}, {fault.rule}: "
                    f"{f'refused, because {one_line(reason)}' if reason else fault.says}",
                    flush=True,
                )
                if not reason:
                    rows.append(row(lines, fault))
                    print(*(f"    {line}\n" for line in explain_moves(rows[-1])), sep="", end="", flush=True)
    except PolicyError as error:
        raise RunError(f"{error}; {format_count(len(rows))} found before") from None
    finally:
        if out is not None and rows:
            out.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(out, "".join(json.dumps(entry) + "\n" for entry in rows))
        if out is not None:
            print(f"{out}: {format_count(len(rows))}" if rows else f"no hints, so {out} is not written", flush=True)
    if refused:
        print(
            f"{sum(refused.values())} refused: "
            + ", ".join(f"{count} since {reason}" for reason, count in sorted(refused.items()))
        )
    return all_read


def ask_judge(judge: Policy, lines: Sequence[dict], task: TaskContext, shown_gold: bool) -> list[Fault]:
    """What a judge finds in an episode. Raises RunError for a second answer that is none, and PolicyError."""
    try:
        fault = find_fault(judge, lines, task.visible_tests, task.gold if shown_gold else "")
    except BadAnswer as error:
        raise RunError(f"the judge gave no valid answer in two attempts: {error}") from None
    return [] if fault is None else [fault]


def load_mover(loss: Path | None) -> Callable[[dict], Iterable[str]]:
    """What says how far a hint moves a checkpoint; nothing without one. torch is loaded for it alone."""
    if loss is None:
        return lambda hint: ()
    from etude.tasks.hint_loss import moves

    return moves(loss)


def format_count(number: int) -> str:
    return f"{number} hint" + ("" if number == 1 else "s")
