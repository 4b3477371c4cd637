"""From sources to shards, on several processes, in steps that a killed build goes on with.

    read          units of the sources: documents, rules, hashes                  on all processes, `scan.py`
    deduplicate   hold a codebase out; drop what is near it, and duplicates       hashes of all documents, one process
    tokenise      the documents that stay                                         on all processes
    shards        tokens in memory-mapped files                                   on all processes, `shards.py`

OUT/data.json       what was read, kept and dropped of every source, and why; written last: if it exists, the data is
                    complete
OUT/dropped.jsonl   every dropped document or bad row, with its reason
OUT/heldout.jsonl   the held-out codebase
OUT/tokenizer.json  the tokenizer of the shards
OUT/shards/         the shards
OUT/work/           what the steps leave to each other; gone at the end

Every file is the same for any number of processes, and after any interruption: a unit's files depend on nothing but the
unit, and the steps between go in the order of the sources.
"""

import contextlib
import hashlib
import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kit.disk import atomic_write, hash_file, read_json
from kit.process import map_on_cores
from kit.runs import Run
from kit.settings import RunError
from ref.cpt import load_tokenizer
from scaled.data import shards
from scaled.data.duplicates import duplicates, sketches
from scaled.data.holdout import Index, choose_heldout, part_of
from scaled.data.read import FORMAT
from scaled.data.rules import Rules
from scaled.data.scan import Scan, Task, Tokenise, dtype_of, scan, tokenise
from scaled.data.sources import Source, Unit, units

__all__ = ["Build", "Settings", "prepare"]

MAX_NAMES = 20
"""Names of dropped documents that data.json lists for every reason; dropped.jsonl lists all."""
NEAR_HELD = "near the held-out codebase"


@dataclass(frozen=True)
class Settings:
    """How data is prepared."""

    tokenizer: str | None = None
    """tokenizer.json, or a folder that has one; `--tokenizer` overrides it."""
    heldout: str = ""
    """Held-out codebase: SOURCE, or SOURCE/FOLDER; empty takes the top-level folder whose size is nearest to
    `heldout_share`."""
    heldout_share: float = 0.03
    """Wanted size of the held-out codebase, as a share of everything."""
    near: float = 0.7
    """Jaccard similarity of five-word shingles from which on documents are duplicates; 0 looks for exact duplicates
    alone."""
    heldout_near: float = 0.5
    """The same for training documents that are like held-out ones, or hold most of one."""
    max_bytes: int = 1 << 20
    """Longest document; longer ones are left out."""
    unit_bytes: int = 4 << 20
    """About how much a process reads at a time."""
    shard_tokens: int = 1 << 26
    """Tokens of a shard; the last document may go beyond."""
    rules: Rules = field(default_factory=Rules)
    """Thresholds of the rules."""

    def __post_init__(self):
        if not 0 < self.heldout_share < 1:
            raise ValueError(f"heldout_share must lie between 0 and 1, got {self.heldout_share}")
        if self.near and not 0.1 <= self.near <= 1:
            raise ValueError(f"near must be 0 or lie between 0.1 and 1, got {self.near}")
        if not 0 < self.heldout_near <= 1:
            raise ValueError(f"heldout_near must lie between 0 and 1, got {self.heldout_near}")
        for name in ("max_bytes", "unit_bytes", "shard_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class Build:
    """What makes two builds the same: `kit.runs.Run` compares it when one is resumed."""

    sources: tuple[Source, ...]
    settings: Settings
    tokenizer: str
    """SHA-256 of the tokenizer."""
    files: str
    """SHA-256 over name, size and time of every file of the sources."""


@dataclass
class Plan:
    """What is read."""

    sources: tuple[Source, ...]
    units: list[Unit]
    unlisted_folders: list[int]
    """Folders that could not be listed, of every source."""
    build: Build


def plan(sources: Sequence[Source], settings: Settings, tokenizer: Path) -> Plan:
    """Lists the sources. Raises RunError if one is empty, or has the name of another."""
    names = [source.label for source in sources]
    if not names:
        raise RunError("there is no source; name one or more in the settings: [[source]] with path = …")
    if repeated_names := [name for name, n in Counter(names).items() if n > 1]:
        raise RunError(f"two sources are called {repeated_names[0]}; give each [[source]] a name of its own")
    if settings.heldout and settings.heldout.split("/")[0] not in names:
        raise RunError(f"heldout = {settings.heldout!r} begins with no source; they are {', '.join(names)}")
    all_units, unlisted_folders, files_digest = [], [], hashlib.sha256()
    for number, source in enumerate(sources):
        source_units, num_unlisted, files = units(source, number, settings.unit_bytes)
        all_units += source_units
        unlisted_folders.append(num_unlisted)
        files_digest.update(json.dumps(files).encode("utf-8", "surrogateescape"))
    return Plan(
        tuple(sources),
        all_units,
        unlisted_folders,
        Build(tuple(sources), settings, hash_file(tokenizer), files_digest.hexdigest()),
    )


def prepare(
    out: Path,
    sources: Sequence[Source],
    settings: Settings,
    tokenizer: Path,
    processes: int,
    resume: bool,
    resume_command: str,
) -> dict[str, Any]:
    """Builds the folder OUT, or goes on with it, and returns data.json. `resume_command` is the command that goes on
    after an interruption. Raises RunError, in one line, for what the user can change."""
    try:
        vocabulary = load_tokenizer(tokenizer)
    except (OSError, ValueError) as error:
        raise RunError(f"tokenizer {tokenizer}: {' '.join(str(error).split())}; see --tokenizer") from None
    if settings.near:
        sketches()
    build_plan = plan(sources, settings, tokenizer)
    with Run.open(out, "data", build_plan.build, resume) as run, run.report_interruption(resume_command):
        if not (out / "data.json").exists():
            work = run.path("work", "tokenizer.json").parent
            atomic_write(work / "tokenizer.json", tokenizer.read_bytes())
            with report_dead_process(resume_command):
                build(run, build_plan, settings, work, np.dtype(dtype_of(vocabulary)).name, processes)
        shutil.rmtree(out / "work", ignore_errors=True)
        for name in ("state", "checkpoints"):  # a run's folders, empty here
            with contextlib.suppress(OSError):
                (out / name).rmdir()
    return read_json(out / "data.json")


@contextlib.contextmanager
def report_dead_process(resume_command: str):
    """A process that the system ended is one line."""
    try:
        yield
    except RuntimeError as error:
        if "died" not in str(error):
            raise
        raise RunError(
            f"{error} Continue, perhaps with fewer processes or a smaller unit_bytes: {resume_command}"
        ) from None


def build(run: Run, build_plan: Plan, settings: Settings, work: Path, dtype: str, processes: int) -> None:
    """All steps."""
    if not (plan_stage := run.stage("plan", total=1)).finished:
        plan_stage.finish({"units": len(build_plan.units), "bytes": sum(unit.bytes for unit in build_plan.units)})
    tasks = [
        Task(i, unit, build_plan.sources[unit.source], settings.rules, settings.max_bytes, bool(settings.near), work)
        for i, unit in enumerate(build_plan.units)
    ]
    sizes = [unit.bytes for unit in build_plan.units]
    run_stage(run, "read", scan, tasks, sizes, [work / f"{i:05d}.json" for i in range(len(tasks))], processes)
    scans = [Scan(work, i) for i in range(len(tasks))]
    names = names_of(build_plan, scans)
    kept_documents, dropped_entries, heldout = decide(run, build_plan, settings, work, scans, names, processes)

    tasks = [
        Tokenise(i, kept_documents[i], work / "tokenizer.json", work) for i in range(len(scans)) if kept_documents[i]
    ]
    sizes = [sum(scans[task.number].documents[i][1] for i in task.documents) for task in tasks]
    run_stage(
        run, "tokenise", tokenise, tasks, sizes, [work / f"{task.number:05d}.lengths" for task in tasks], processes
    )

    layouts: list[list[shards.Layout]] = []
    (run.root / "shards").mkdir(exist_ok=True)
    for leftover in (run.root / "shards").glob(".tmp-*"):  # what a kill left
        leftover.unlink()
    for number, source in enumerate(build_plan.sources):
        unit_numbers = [i for i, unit in enumerate(build_plan.units) if unit.source == number and kept_documents[i]]
        lengths = [np.fromfile(work / f"{i:05d}.lengths", np.int64) for i in unit_numbers]
        files = [work / f"{i:05d}.tokens" for i in unit_numbers]
        layouts.append(
            shards.plan_shards(lengths, files, settings.shard_tokens, run.root / "shards" / source.label, dtype)
        )
    flat = [layout for source_layouts in layouts for layout in source_layouts]
    ends = [layout.path.with_name(layout.path.name + ".json") for layout in flat]
    run_stage(run, "shards", shards.write, flat, [int(layout.lengths.sum()) for layout in flat], ends, processes)
    manifests = [
        [read_json(layout.path.with_name(layout.path.name + ".json")) for layout in source_layouts]
        for source_layouts in layouts
    ]

    lines = [
        json.dumps(
            {
                "name": names[u][i]
                if len(build_plan.sources) == 1
                else f"{build_plan.sources[build_plan.units[u].source].label}/{names[u][i]}",
                "text": scans[u].text(i),
            }
        )
        for u, i in heldout["documents"]
    ]
    text = "".join(line + "\n" for line in lines)
    atomic_write(run.root / "heldout.jsonl", text)
    atomic_write(run.root / "dropped.jsonl", "".join(json.dumps(entry) + "\n" for entry in dropped_entries))
    shutil.copyfile(work / "tokenizer.json", run.root / "tokenizer.json")
    record = {
        "format": FORMAT,
        "tokenizer": {"sha256": build_plan.build.tokenizer, "dtype": dtype},
        "heldout": {
            "name": heldout["name"],
            "documents": len(lines),
            "bytes_of_text": heldout["bytes"],
            "near": sum(entry["reason"] == NEAR_HELD for entry in dropped_entries),
            "bytes": len(text),
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
        },
        "sources": [
            statistics(number, build_plan, scans, kept_documents, dropped_entries, heldout, manifests[number])
            for number in range(len(build_plan.sources))
        ],
    }
    atomic_write(run.root / "data.json", json.dumps(record, indent=1) + "\n")


def run_stage(
    run: Run,
    name: str,
    work: Callable[[Any], Any],
    tasks: Sequence[Any],
    sizes: Sequence[int],
    ends: Sequence[Path],
    processes: int,
) -> None:
    """A step on all processes: the tasks whose last file is not there, the largest first."""
    stage = run.stage(name, total=len(tasks), unit="tokens" if name == "shards" else "B")
    if stage.finished:
        return
    stage.restore()
    pending = sorted((i for i, end in enumerate(ends) if not end.exists()), key=lambda i: -sizes[i])
    finished_size, progress_sizes = (
        sum(sizes) - sum(sizes[i] for i in pending),
        np.cumsum([0, *(sizes[i] for i in pending)]),
    )
    stage.progress(len(tasks) - len(pending), finished_size)
    map_on_cores(
        work,
        [tasks[i] for i in pending],
        lambda n: stage.progress(len(tasks) - len(pending) + n, finished_size + int(progress_sizes[n])),
        processes=processes,
    )
    stage.finish({"tasks": len(tasks), "size": sum(sizes)})


def names_of(build_plan: Plan, scans: Sequence[Scan]) -> list[list[str]]:
    """The name of every document, as text: FILE:ROW for a row without one."""
    names, rows = [], Counter()
    for unit, unit_scan in zip(build_plan.units, scans, strict=True):
        names.append(
            [document_name(unit, rows[unit.source, unit.address], document[0]) for document in unit_scan.documents]
        )
        unit_scan.dropped = [
            [document_name(unit, rows[unit.source, unit.address], name), *fields] for name, *fields in unit_scan.dropped
        ]
        rows[unit.source, unit.address] += unit_scan.rows
    return names


def document_name(unit: Unit, rows: int, name: str | int) -> str:
    return name if isinstance(name, str) else f"{unit.label}:{rows + name}"


def decide(
    run: Run,
    build_plan: Plan,
    settings: Settings,
    work: Path,
    scans: Sequence[Scan],
    names: list[list[str]],
    processes: int,
) -> tuple[list[list[int]], list[dict], dict[str, Any]]:
    """The documents of every unit that stay; every one that does not, with its reason; the held-out codebase."""
    stage = run.stage("deduplicate", total=3, unit="steps")
    places, file = (
        [(u, i) for u, unit_scan in enumerate(scans) for i in range(len(unit_scan.documents))],
        work / "decided.json",
    )
    label = [build_plan.sources[unit.source].label for unit in build_plan.units]
    if stage.finished and file.exists():
        decision = read_json(file, limit=sys.maxsize)
        return decision["kept"], decision["dropped"], decision["held"]
    stage.restore()
    parts = [part_of(label[u], names[u][i]) for u, i in places]
    name, heldout_numbers = choose_heldout(
        parts, [scans[u].documents[i][1] for u, i in places], settings.heldout, settings.heldout_share
    )
    # A codebase is read alphabetically.
    heldout_numbers = sorted(
        heldout_numbers, key=lambda n: (build_plan.units[places[n][0]].source, names[places[n][0]][places[n][1]])
    )
    marks = {u: scans[u].shingles() for u in sorted({places[n][0] for n in heldout_numbers})}
    index = Index.of([marks[places[n][0]][places[n][1]] for n in heldout_numbers])
    stage.progress(1)

    near_matches = map_on_cores(
        partial(match_heldout, scans, index, settings.heldout_near), range(len(scans)), processes=processes
    )
    digests = {scans[u].documents[i][4]: k for k, (u, i) in reversed([*enumerate(places[n] for n in heldout_numbers)])}
    stage.progress(2)
    heldout_set, heldout_places, matches = set(heldout_numbers), [places[n] for n in heldout_numbers], {}
    for n, (u, i) in enumerate(places):
        if n not in heldout_set and (
            match := (digests[scans[u].documents[i][4]], 1.0)
            if scans[u].documents[i][4] in digests
            else near_matches[u].get(i)
        ):
            matches[n] = (NEAR_HELD, heldout_places[match[0]], match[1])
    for duplicate in duplicates(
        comparable_documents(scans, places, heldout_set | matches.keys(), bool(settings.near)), settings.near
    ):
        matches[duplicate.document] = (
            "exact duplicate" if duplicate.similarity == 1 and is_exact(scans, places, duplicate) else "near duplicate",
            places[duplicate.of],
            duplicate.similarity,
        )

    kept_documents: list[list[int]] = [[] for _ in scans]
    dropped_entries: list[list[dict]] = [
        [{"source": label[u], "name": entry[0], "reason": entry[1]} for entry in unit_scan.dropped]
        for u, unit_scan in enumerate(scans)
    ]
    for n, (u, i) in enumerate(places):
        if n in matches:
            rule, (v, j), similarity = matches[n]
            dropped_entries[u].append(
                {
                    "source": label[u],
                    "name": names[u][i],
                    "reason": rule,
                    "of": f"{label[v]}/{names[v][j]}",
                    "similarity": similarity,
                }
            )
        elif n not in heldout_set:
            kept_documents[u].append(i)
    unlisted_labels = [
        source.label
        for source, n in zip(build_plan.sources, build_plan.unlisted_folders, strict=True)
        for _ in range(n)
    ]
    all_dropped: list[dict] = [
        {"source": source, "name": "a folder that cannot be listed", "reason": "unreadable"}
        for source in unlisted_labels
    ]
    all_dropped += [entry for unit_dropped in dropped_entries for entry in unit_dropped]
    if not any(kept_documents):
        raise RunError(
            "nothing is left to train on; dropped: "
            + ", ".join(f"{n} {rule}" for rule, n in Counter(d["reason"] for d in all_dropped).items())
        )
    heldout_record = {
        "name": name,
        "documents": heldout_places,
        "bytes": sum(scans[u].documents[i][1] for u, i in heldout_places),
    }
    atomic_write(file, json.dumps({"kept": kept_documents, "dropped": all_dropped, "held": heldout_record}))
    stage.progress(3)
    stage.finish({"kept": sum(map(len, kept_documents)), "dropped": len(all_dropped), "heldout": len(heldout_places)})
    return kept_documents, all_dropped, heldout_record


def match_heldout(scans: Sequence[Scan], index: Index, near: float, number: int) -> dict[int, tuple[int, float]]:
    """The documents of a unit that are near to held-out ones: which one, and how near."""
    nearest = {i: index.nearest(marks, near) for i, marks in enumerate(scans[number].shingles())}
    return {i: match for i, match in nearest.items() if match}


def comparable_documents(
    scans: Sequence[Scan], places: Sequence[tuple[int, int]], excluded_numbers: set[int], near: bool
):
    """What `duplicates` compares: all documents but some, in order."""
    unit, marks, minhashes = -1, [], np.zeros((0, 0))
    for n, (u, i) in enumerate(places):
        if u != unit:
            unit, marks, minhashes = u, scans[u].shingles() if near else [], scans[u].signatures()
        if n not in excluded_numbers:
            yield n, scans[u].documents[i][4], minhashes[i] if near else minhashes, marks[i] if near else minhashes


def is_exact(scans: Sequence[Scan], places: Sequence[tuple[int, int]], duplicate: Any) -> bool:
    """Whether a duplicate is exact: equal shingles alone do not say so."""
    (u, i), (v, j) = places[duplicate.document], places[duplicate.of]
    return scans[u].documents[i][4] == scans[v].documents[j][4]


def statistics(
    number: int,
    build_plan: Plan,
    scans: Sequence[Scan],
    kept_documents: list[list[int]],
    dropped_entries: list[dict],
    heldout: dict[str, Any],
    manifests: list[dict],
) -> dict[str, Any]:
    """What data.json says about a source."""
    source = build_plan.sources[number]
    source_scans = [(u, scans[u]) for u, unit in enumerate(build_plan.units) if unit.source == number]
    read_sizes = [(document[1], document[2]) for _, unit_scan in source_scans for document in unit_scan.documents] + [
        (entry[2], entry[3]) for _, unit_scan in source_scans for entry in unit_scan.dropped
    ]
    kept_records = [unit_scan.documents[i] for u, unit_scan in source_scans for i in kept_documents[u]]
    names_by_rule: dict[str, list[str]] = {}
    for entry in dropped_entries:
        if entry["source"] == source.label:
            names_by_rule.setdefault(entry["reason"], []).append(entry["name"])
    return {
        "name": source.label,
        "path": source.path,
        "weight": source.weight,
        "read": {
            "documents": len(read_sizes),
            "bytes": sum(b for b, _ in read_sizes),
            "lines": sum(lines for _, lines in read_sizes),
        },
        "kept": {
            "documents": len(kept_records),
            "bytes": sum(document[1] for document in kept_records),
            "lines": sum(document[2] for document in kept_records),
            "tokens": sum(manifest["tokens"] for manifest in manifests),
        },
        "heldout": sum(build_plan.units[u].source == number for u, _ in heldout["documents"]),
        "dropped": {
            rule: {"count": len(names), "names": names[:MAX_NAMES]}
            for rule, names in sorted(names_by_rule.items(), key=lambda x: (-len(x[1]), x[0]))
        },
        "licences": dict(
            sorted(
                Counter(document[3] or "none found" for document in kept_records).items(), key=lambda x: (-x[1], x[0])
            )
        ),
        "shards": manifests,
    }
