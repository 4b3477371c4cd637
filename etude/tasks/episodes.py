"""`etude tasks try`: runs an agent on a task and grades it. `etude show`: prints a transcript."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from environments.grading.guarded import Exam, Trust, grade, prepare_exam
from environments.grading.lay import write
from environments.grading.ready import Judges
from environments.harness import record, scripted
from environments.harness.episode import Budget, Episode
from environments.harness.messages import Policy, PolicyError
from environments.harness.record import Record
from environments.harness.remote import Remote
from environments.harness.tools import TOOLS
from environments.harness.workspace import Job
from environments.sandbox.cache import cache_folder
from environments.sandbox.interface import Limits
from environments.sandbox.open import Kind, open_sandbox, own_store
from environments.sandbox.visible import one_line, visible
from environments.tasks.check import exam_of
from environments.tasks.make import Task
from environments.tasks.package import Package
from environments.tasks.sources import package_of
from environments.tasks.task_cache import load_task, save_task
from etude.tasks.build import GRADING, made_of, recipe_of, recipes, unused_of
from kit.disk import parse_json
from kit.settings import Interrupted, RunError

__all__ = [
    "FOLDERS",
    "WORKING",
    "graded",
    "job_of",
    "show",
    "task_of",
    "tasks_of",
    "print_line",
    "transcript_of",
    "try_task",
]

WORKING = Limits(output=8 << 10)
"""Limits of an agent's sandbox. The output is short, because a model reads it."""
FOLDERS = (Path("tasks"), Path("examples/tasks"))
"""Folders in which recipes are searched."""


def find_recipe(name: str, folders: Sequence[Path]) -> tuple[Path, dict]:
    """The recipe with the task of this id or unique prefix. Raises RunError."""
    paths = [path for folder in folders if folder.exists() for path in recipes(folder)]
    rows = [(path, recipe, row["id"]) for path in paths for recipe in [recipe_of(path)] for row in recipe["tasks"]]
    matches = [candidate for candidate in rows if candidate[2] == name] or [
        candidate for candidate in rows if candidate[2].startswith(name)
    ]
    if len({candidate[2] for candidate in matches}) == 1:
        return matches[0][0], {**matches[0][1], "task": matches[0][2]}
    if matches:
        suffix = f" and {len(matches) - 12} more" if len(matches) > 12 else ""
        raise RunError(
            f"{len(matches)} tasks begin with {name}; choose one: "
            f"{', '.join(candidate[2] for candidate in matches[:12])}{suffix}"
        )
    places = ", ".join(map(str, folders))
    raise RunError(
        f"no recipe in {places} has a task {name}; `etude tasks make PACKAGE` writes recipes, which list their tasks"
    )


def task_of(name: str, folders: Sequence[Path], jobs: int, seconds: float, kind: Kind) -> tuple[Task, Package]:
    """The task and its package; made again where it is not kept from before. Raises RunError."""
    path, recipe = find_recipe(name, folders)
    name = recipe["task"]
    package, tasks = tasks_of(path, {**recipe, "tasks": [{"id": name}]}, jobs, seconds, kind)
    return tasks[name], package


def tasks_of(path: Path, recipe: dict, jobs: int, seconds: float, kind: Kind) -> tuple[Package, dict[str, Task]]:
    """A recipe's package, and its tasks by their ids; made again where one is not kept from before. Raises RunError."""
    package_info, names = recipe["package"], [row["id"] for row in recipe["tasks"]]
    package = package_of(package_info["spec"], cache_folder() / "sdists")
    left_out = set(package_info.get("left out", ()))
    package = Package(
        **{**vars(package), "tests": {file: data for file, data in package.tests.items() if file not in left_out}}
    )
    cache = cache_folder() / "tasks"
    tasks = {name: load_task(cache, name, package) for name in names}
    if None in tasks.values():
        print(f"{path}: making its tasks again, once; they are stored for later", flush=True)
        try:
            package, _, build, _ = made_of(package, jobs, seconds, kind, unused_of(recipe), recipe.get("join", 1))
        except ValueError as error:
            raise RunError(str(error)) from None
        for built_task in build.tasks:
            save_task(cache, built_task, package)
        tasks = {name: load_task(cache, name, package) for name in names}
    for name, task in tasks.items():
        if task is None:
            raise RunError(f"{name} can no longer be made: `etude tasks check {path}` shows what differs")
    return package, {name: task for name, task in tasks.items() if task is not None}


def policy_of(
    model: str, name: str, exam: Exam, task: Task, sampling: dict, strict: bool, choice: Literal["auto", "required"]
) -> Policy:
    """Who plays: "oracle", "fool", or the address of a model. Raises RunError."""
    if model in ("oracle", "fool"):
        return (
            scripted.oracle(exam.given_tree, exam.gold_tree, task.visible)
            if model == "oracle"
            else scripted.fool(task.visible)
        )
    if not name:
        raise RunError("a model on a server needs its name there: --name NAME")
    try:
        key = os.environ.get("OPENAI_API_KEY", "")
        return Remote(
            model,
            name,
            key,
            sampling,
            strict,
            choice,
            on_retry=lambda reason: print(reason, file=sys.stderr, flush=True),
        )
    except ValueError as error:
        raise RunError(f"{error}; oracle and fool need no model") from None


def try_task(
    name: str,
    model: str,
    model_name: str,
    folders: Sequence[Path],
    prompt: str,
    out: Path,
    resume: bool,
    budget: Budget,
    sampling: dict,
    strict: bool,
    choice: Literal["auto", "required"],
    corpus: Path | None,
    jobs: int,
    seconds: float,
    kind: Kind = "bubblewrap",
    ask: bool = True,
) -> float:
    """Runs an episode, grades it, and returns the reward. `ask`: with fresh inputs, too. Raises RunError, and
    Interrupted."""
    task, package = task_of(name, folders or FOLDERS, jobs, seconds, kind)
    exam, path = exam_of(task, package), transcript_of(task, out, resume)
    policy = policy_of(model, model_name, exam, task, sampling, strict, choice)
    author = model if isinstance(policy, scripted.Script) else f"{model_name}, {json.dumps(sampling)}"
    job = job_of(task, exam, prompt, corpus, strict, author)
    with Record(path) as journal, Judges(partial(open_sandbox, kind=kind, limits=GRADING)) as judges:
        if isinstance(policy, scripted.Script):
            policy.reply_count = sum(line["kind"] == "reply" for line in journal.lines)
        for line in journal.lines:
            print_line(line)  # what was there already
        episode = Episode(
            job,
            policy,
            journal,
            partial(open_sandbox, kind=kind, limits=WORKING),
            own_store(cache_folder() / "store"),
            budget,
            print_line,
        )
        judges.expect()
        try:
            tree = episode.play()
        except PolicyError as error:
            raise RunError(f"{error}; --resume continues from turn {episode.turns}") from None
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted; --resume continues from turn {episode.turns}") from None
        reward = graded(exam, journal, tree, seconds, kind, ask, judges)
    print(f"{path}: read it with `etude show {path}`")
    return reward


def transcript_of(task: Task, out: Path, resume: bool) -> Path:
    """The path of a task's transcript. Raises RunError if it exists and is not to be resumed."""
    path = out / f"{task.id}.jsonl"
    if path.exists() and not resume:
        raise RunError(f"{path} already exists; --resume continues it, and --out chooses another folder")
    out.mkdir(parents=True, exist_ok=True)
    return path


def job_of(task: Task, exam: Exam, prompt: str, corpus: Path | None, strict: bool, policy_name: str) -> Job:
    """What an agent is asked, over the stored tree of the exam. `prompt`: "specified" or "terse". Raises RunError for a
    corpus without pages."""
    tools = tuple(tool for tool in TOOLS if corpus or tool != "web_search")
    task_prompt = task.specified if prompt == "specified" else task.terse
    return Job(
        task.id,
        task_prompt,
        store_files(exam.given_tree),
        exam.given_tree,
        read_pages(corpus) if corpus else None,
        tools,
        strict,
        policy_name,
    )


def graded(
    exam: Exam, journal: Record, tree: str, seconds: float, kind: Kind, ask: bool, judges: Judges | None = None
) -> float:
    """The reward of an episode that is over, graded unless its transcript says it. `tree`: the stored one that it left.
    `ask`: with fresh inputs. `judges`: may have opened a sandbox for it ahead."""
    if not any(line["kind"] == "grade" for line in journal.lines):
        store, fresh = own_store(cache_folder() / "store"), partial(open_sandbox, kind=kind, limits=GRADING)
        exam = prepare_exam(exam, journal.lines[0]["task"], fresh, seconds, ask=ask)
        result = grade(exam, store.tree(tree), fresh, [*record.calls(journal.lines)], seconds, judges=judges)
        journal.add("grade", **record.grade_fields(result, len(exam.required_tests)))
        print_line(journal.lines[-1])
    return next(line["reward"] for line in journal.lines if line["kind"] == "grade")


def store_files(files) -> str:
    """The hash of a tree of files, stored."""
    with tempfile.TemporaryDirectory(prefix="etude-try-") as name:
        folder = Path(name) / "tree"
        write(files, folder)
        return own_store(cache_folder() / "store").add_folder(folder)


def read_pages(corpus: Path) -> dict[str, str]:
    """The texts of a frozen corpus: every .md, .rst and .txt beneath a folder. Raises RunError."""
    paths = {
        path.relative_to(corpus).as_posix(): path
        for path in sorted(corpus.rglob("*"))
        if path.suffix in (".md", ".rst", ".txt")
    }
    if not paths:
        raise RunError(f"{corpus} contains no pages: .md, .rst or .txt")
    return {name: path.read_text(encoding="utf-8", errors="replace") for name, path in paths.items()}


def print_line(line: dict) -> None:
    """One line of a transcript while it grows."""
    for text in format_line(line, 1 if line["kind"] != "grade" else 5):
        print(text, flush=True)


def show(path: Path, rows: int, out: Callable[[str], None] = print) -> None:
    """A transcript for a person: `rows` lines of each text at most, 0 for all. Raises RunError."""
    for line in record.read(path):
        for text in format_line(line, rows):
            out(text)


def format_line(line: dict, rows: int) -> Iterator[str]:
    """A line of a transcript as lines of text."""
    kind = line["kind"]
    if kind == "begin":
        yield one_line(
            f"task {line['task']}, by {line.get('who') or 'nobody'}, tree {line['tree'][:12]}, tools "
            f"{', '.join(map(str, line['tools']))}",
            400,
        )
        yield from _format_block("asked", line["prompt"], rows)
    elif kind == "reply":
        tokens = f"{line['tokens']} tokens, " if line.get("tokens") is not None else ""
        yield f"── reply ({tokens}{line['seconds']:.1f} s{', cut off' if line.get('cut') else ''})"
        yield from _format_block("", line["text"], rows)
        for call in line["calls"]:
            yield from _format_block(f"→ {one_line(call['name'], 60)}", _format_arguments(call["arguments"]), rows)
    elif kind == "answer":
        mark = "broken call" if line.get("broken") else "ok" if line["ok"] else "failed"
        yield from _format_block(f"← {one_line(line['tool'], 60)} {mark}, {line['seconds']:.2f} s", line["text"], rows)
    elif kind == "turn" and line.get("diff"):
        yield from _format_block("changed", str(line["diff"]), rows)
    elif kind in ("nudge", "summary"):
        yield from _format_block({"nudge": "harness", "summary": "── summary"}[kind], line["text"], rows)
    elif kind in ("stop", "end"):
        yield f"{'stopped' if kind == 'stop' else 'end'}: {one_line(line['why'])}"
    elif kind == "grade":
        yield (
            f"reward {line['reward']:.2f}: {line.get('passed', '?')} of {line.get('of', '?')} tests pass, "
            f"succinctness {line.get('succinctness', 0):.2f}, conformance {line.get('conformance', 0):.2f}"
        )
        if line.get("asked"):
            yield f"  {line.get('agreed', '?')} of {line['asked']} fresh inputs give the result of the original"
        if (trust := str(line.get("trust", "")).upper()) in Trust.__members__:
            yield f"  {Trust[trust].value}"
        yield from (f"  flag: {one_line(str(flag))}" for flag in line["flags"])
        failed = [*(line.get("failed") or {}).items()]
        yield from (
            f"  {one_line(test)}: {one_line(str(reason))}" for test, reason in (failed[:rows] if rows else failed)
        )
        if rows and len(failed) > rows:
            yield f"  … {len(failed) - rows} more"


def _format_arguments(text: str) -> str:
    """Arguments as a person reads them: a line for each, and texts as they are."""
    try:
        args = parse_json(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(args, dict):
        return text
    return "\n".join(
        f"{name}: {value if isinstance(value, str) else json.dumps(value)}" for name, value in args.items()
    )


def _format_block(head: str, text: str, rows: int) -> Iterator[str]:
    """A heading and a text beneath it: in one line where it has one, else its first lines, indented."""
    width = shutil.get_terminal_size((120, 24)).columns if rows else 10**9
    lines = [visible(line).replace("\t", "    ") for line in text.splitlines() if line.strip() or not rows]
    if len(lines) <= 1 or rows == 1:
        remainder = f" … {len(lines) - 1} lines more" if len(lines) > 1 else ""
        first = (
            textwrap.shorten(lines[0], max(20, width - len(head) - len(remainder) - 3), placeholder=" …")
            if lines and rows
            else "".join(lines[:1])
        )
        if head or first:
            yield f"{head}: {first}{remainder}" if head and first else head or first + remainder
        return
    if head:
        yield head
    yield from (f"    {line[: width - 4]}" for line in (lines[:rows] if rows else lines))
    if rows and len(lines) > rows:
        yield f"    … {len(lines) - rows} lines more"
