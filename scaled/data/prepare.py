"""From sources to shards, on several processes, in steps that a killed build goes on with.

    read          units of the sources: documents, rules, hashes                  on all processes, `scan.py`
    deduplicate   hold a codebase out; drop what is near it, and duplicates       hashes of all documents, on one process
    tokenise      the documents that stay                                         on all processes
    shards        tokens in memory-mapped files                                   on all processes, `shards.py`

OUT/data.json       what was read, kept and dropped of every source, and why; written last: if it exists, the data is complete
OUT/dropped.jsonl   every dropped document or bad row, with its reason
OUT/heldout.jsonl   the held-out codebase
OUT/tokenizer.json  the tokenizer of the shards
OUT/shards/         the shards
OUT/work/           what the steps leave to each other; gone at the end

Every file is the same for any number of processes, and after any interruption: a unit's files depend on nothing but the unit, and the steps
between go in the order of the sources.
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
from kit.process import on_cores
from kit.runs import Run
from kit.settings import RunError
from ref.cpt import load_tokenizer
from scaled.data import shards
from scaled.data.duplicates import duplicates, sketches
from scaled.data.holdout import Index, choose, part_of
from scaled.data.read import FORMAT
from scaled.data.rules import Rules
from scaled.data.scan import Scan, Task, Tokenise, dtype_of, scan, tokenise
from scaled.data.sources import Source, Unit, units

__all__ = ["Build", "Settings", "prepare"]

NAMED = 20
"""Names of dropped documents that data.json lists for every reason; dropped.jsonl lists all."""
NEAR_HELD = "near the held-out codebase"


@dataclass(frozen=True)
class Settings:
    """How data is prepared."""

    tokenizer: str | None = None
    """tokenizer.json, or a folder that has one; `--tokenizer` overrides it."""
    heldout: str = ""
    """Held-out codebase: SOURCE, or SOURCE/FOLDER; empty takes the top-level folder whose size is nearest to `heldout_share`."""
    heldout_share: float = 0.03
    """Wanted size of the held-out codebase, as a share of everything."""
    near: float = 0.7
    """Jaccard similarity of five-word shingles from which on documents are duplicates; 0 looks for exact duplicates alone."""
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
    lost: list[int]
    """Folders that could not be listed, of every source."""
    build: Build


def plan(sources: Sequence[Source], settings: Settings, tokenizer: Path) -> Plan:
    """Lists the sources. Raises RunError if one is empty, or has the name of another."""
    names = [source.label for source in sources]
    if not names:
        raise RunError("there is no source; name one or more in the settings: [[source]] with path = …")
    if twice := [name for name, n in Counter(names).items() if n > 1]:
        raise RunError(f"two sources are called {twice[0]}; give each [[source]] a name of its own")
    if settings.heldout and settings.heldout.split("/")[0] not in names:
        raise RunError(f"heldout = {settings.heldout!r} begins with no source; they are {', '.join(names)}")
    found, lost, facts = [], [], hashlib.sha256()
    for number, source in enumerate(sources):
        mine, bad, files = units(source, number, settings.unit_bytes)
        found += mine
        lost.append(bad)
        facts.update(json.dumps(files).encode("utf-8", "surrogateescape"))
    return Plan(tuple(sources), found, lost, Build(tuple(sources), settings, hash_file(tokenizer), facts.hexdigest()))


def prepare(out: Path, sources: Sequence[Source], settings: Settings, tokenizer: Path, processes: int, resume: bool, again: str) -> dict[str, Any]:
    """Builds the folder OUT, or goes on with it, and returns data.json. `again` is the command that goes on after an interruption.
    Raises RunError, in one line, for what the user can change."""
    try:
        vocabulary = load_tokenizer(tokenizer)
    except (OSError, ValueError) as error:
        raise RunError(f"tokenizer {tokenizer}: {' '.join(str(error).split())}; see --tokenizer") from None
    if settings.near:
        sketches()
    planned = plan(sources, settings, tokenizer)
    with Run.open(out, "data", planned.build, resume) as run, run.told(again):
        if not (out / "data.json").exists():
            work = run.path("work", "tokenizer.json").parent
            atomic_write(work / "tokenizer.json", tokenizer.read_bytes())
            with died(again):
                build(run, planned, settings, work, np.dtype(dtype_of(vocabulary)).name, processes)
        shutil.rmtree(out / "work", ignore_errors=True)
        for name in ("state", "checkpoints"):  # a run's folders, empty here
            with contextlib.suppress(OSError):
                (out / name).rmdir()
    return read_json(out / "data.json")


@contextlib.contextmanager
def died(again: str):
    """A process that the system ended is one line."""
    try:
        yield
    except RuntimeError as error:
        if "died" not in str(error):
            raise
        raise RunError(f"{error} Continue, perhaps with fewer processes or a smaller unit_bytes: {again}") from None


def build(run: Run, planned: Plan, settings: Settings, work: Path, dtype: str, processes: int) -> None:
    """All steps."""
    if not (begun := run.stage("plan", total=1)).finished:
        begun.finish({"units": len(planned.units), "bytes": sum(unit.bytes for unit in planned.units)})
    tasks = [
        Task(i, unit, planned.sources[unit.source], settings.rules, settings.max_bytes, bool(settings.near), work)
        for i, unit in enumerate(planned.units)
    ]
    sizes = [unit.bytes for unit in planned.units]
    spread(run, "read", scan, tasks, sizes, [work / f"{i:05d}.json" for i in range(len(tasks))], processes)
    scans = [Scan(work, i) for i in range(len(tasks))]
    names = names_of(planned, scans)
    kept, dropped, held = decide(run, planned, settings, work, scans, names, processes)

    tasks = [Tokenise(i, kept[i], work / "tokenizer.json", work) for i in range(len(scans)) if kept[i]]
    sizes = [sum(scans[task.number].documents[i][1] for i in task.kept) for task in tasks]
    spread(run, "tokenise", tokenise, tasks, sizes, [work / f"{task.number:05d}.lengths" for task in tasks], processes)

    layouts: list[list[shards.Layout]] = []
    (run.root / "shards").mkdir(exist_ok=True)
    for torn in (run.root / "shards").glob(".tmp-*"):  # what a kill left
        torn.unlink()
    for number, source in enumerate(planned.sources):
        mine = [i for i, unit in enumerate(planned.units) if unit.source == number and kept[i]]
        lengths = [np.fromfile(work / f"{i:05d}.lengths", np.int64) for i in mine]
        files = [work / f"{i:05d}.tokens" for i in mine]
        layouts.append(shards.cut(lengths, files, settings.shard_tokens, run.root / "shards" / source.label, dtype))
    flat = [layout for some in layouts for layout in some]
    ends = [layout.path.with_name(layout.path.name + ".json") for layout in flat]
    spread(run, "shards", shards.write, flat, [int(layout.lengths.sum()) for layout in flat], ends, processes)
    manifests = [[read_json(layout.path.with_name(layout.path.name + ".json")) for layout in some] for some in layouts]

    lines = [json.dumps({"name": names[u][i] if len(planned.sources) == 1 else f"{planned.sources[planned.units[u].source].label}/{names[u][i]}",
                         "text": scans[u].text(i)}) for u, i in held["documents"]]  # fmt: skip
    text = "".join(line + "\n" for line in lines)
    atomic_write(run.root / "heldout.jsonl", text)
    atomic_write(run.root / "dropped.jsonl", "".join(json.dumps(one) + "\n" for one in dropped))
    shutil.copyfile(work / "tokenizer.json", run.root / "tokenizer.json")
    record = {
        "format": FORMAT,
        "tokenizer": {"sha256": planned.build.tokenizer, "dtype": dtype},
        "heldout": {
            "name": held["name"],
            "documents": len(lines),
            "bytes_of_text": held["bytes"],
            "near": sum(one["reason"] == NEAR_HELD for one in dropped),
            "bytes": len(text),
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
        },
        "sources": [statistics(number, planned, scans, kept, dropped, held, manifests[number]) for number in range(len(planned.sources))],
    }
    atomic_write(run.root / "data.json", json.dumps(record, indent=1) + "\n")


def spread(run: Run, name: str, work: Callable[[Any], Any], tasks: Sequence[Any], sizes: Sequence[int], ends: Sequence[Path], processes: int) -> None:
    """A step on all processes: the tasks whose last file is not there, the largest first."""
    stage = run.stage(name, total=len(tasks), unit="tokens" if name == "shards" else "B")
    if stage.finished:
        return
    stage.restore()
    left = sorted((i for i, end in enumerate(ends) if not end.exists()), key=lambda i: -sizes[i])
    before, done = sum(sizes) - sum(sizes[i] for i in left), np.cumsum([0, *(sizes[i] for i in left)])
    stage.progress(len(tasks) - len(left), before)
    on_cores(work, [tasks[i] for i in left], lambda n: stage.progress(len(tasks) - len(left) + n, before + int(done[n])), processes=processes)
    stage.finish({"tasks": len(tasks), "size": sum(sizes)})


def names_of(planned: Plan, scans: Sequence[Scan]) -> list[list[str]]:
    """The name of every document, as text: FILE:ROW for a row without one."""
    found, rows = [], Counter()
    for unit, scanned in zip(planned.units, scans, strict=True):
        found.append([named(unit, rows[unit.source, unit.address], one[0]) for one in scanned.documents])
        scanned.dropped = [[named(unit, rows[unit.source, unit.address], name), *more] for name, *more in scanned.dropped]
        rows[unit.source, unit.address] += scanned.rows
    return found


def named(unit: Unit, rows: int, name: str | int) -> str:
    return name if isinstance(name, str) else f"{unit.label}:{rows + name}"


def decide(
    run: Run, planned: Plan, settings: Settings, work: Path, scans: Sequence[Scan], names: list[list[str]], processes: int
) -> tuple[list[list[int]], list[dict], dict[str, Any]]:
    """The documents of every unit that stay; every one that does not, with its reason; the held-out codebase."""
    stage = run.stage("deduplicate", total=3, unit="steps")
    place, file = [(u, i) for u, scanned in enumerate(scans) for i in range(len(scanned.documents))], work / "decided.json"
    label = [planned.sources[unit.source].label for unit in planned.units]
    if stage.finished and file.exists():
        found = read_json(file, limit=sys.maxsize)
        return found["kept"], found["dropped"], found["held"]
    stage.restore()
    parts = [part_of(label[u], names[u][i]) for u, i in place]
    name, mine = choose(parts, [scans[u].documents[i][1] for u, i in place], settings.heldout, settings.heldout_share)
    mine = sorted(mine, key=lambda n: (planned.units[place[n][0]].source, names[place[n][0]][place[n][1]]))  # a codebase is read alphabetically
    marks = {u: scans[u].shingles() for u in sorted({place[n][0] for n in mine})}
    index = Index.of([marks[place[n][0]][place[n][1]] for n in mine])
    stage.progress(1)

    near = on_cores(partial(near_held, scans, index, settings.heldout_near), range(len(scans)), processes=processes)
    digests = {scans[u].documents[i][4]: k for k, (u, i) in reversed([*enumerate(place[n] for n in mine)])}
    stage.progress(2)
    held, of, gone = set(mine), [place[n] for n in mine], {}
    for n, (u, i) in enumerate(place):
        if n not in held and (hit := (digests[scans[u].documents[i][4]], 1.0) if scans[u].documents[i][4] in digests else near[u].get(i)):
            gone[n] = (NEAR_HELD, of[hit[0]], hit[1])
    for one in duplicates(rest(scans, place, held | gone.keys(), bool(settings.near)), settings.near):
        gone[one.document] = (
            "exact duplicate" if one.similarity == 1 and same(scans, place, one) else "near duplicate",
            place[one.of],
            one.similarity,
        )

    kept: list[list[int]] = [[] for _ in scans]
    dropped: list[list[dict]] = [
        [{"source": label[u], "name": one[0], "reason": one[1]} for one in scanned.dropped] for u, scanned in enumerate(scans)
    ]
    for n, (u, i) in enumerate(place):
        if n in gone:
            why, (v, j), similarity = gone[n]
            dropped[u].append({"source": label[u], "name": names[u][i], "reason": why, "of": f"{label[v]}/{names[v][j]}", "similarity": similarity})
        elif n not in held:
            kept[u].append(i)
    lost = [source.label for source, n in zip(planned.sources, planned.lost, strict=True) for _ in range(n)]
    every: list[dict] = [{"source": source, "name": "a folder that cannot be listed", "reason": "unreadable"} for source in lost]
    every += [one for some in dropped for one in some]
    if not any(kept):
        raise RunError("nothing is left to train on; dropped: " + ", ".join(f"{n} {why}" for why, n in Counter(d["reason"] for d in every).items()))
    found = {"name": name, "documents": of, "bytes": sum(scans[u].documents[i][1] for u, i in of)}
    atomic_write(file, json.dumps({"kept": kept, "dropped": every, "held": found}))
    stage.progress(3)
    stage.finish({"kept": sum(map(len, kept)), "dropped": len(every), "heldout": len(of)})
    return kept, every, found


def near_held(scans: Sequence[Scan], index: Index, near: float, number: int) -> dict[int, tuple[int, float]]:
    """The documents of a unit that are near to held-out ones: which one, and how near."""
    found = {i: index.nearest(marks, near) for i, marks in enumerate(scans[number].shingles())}
    return {i: hit for i, hit in found.items() if hit}


def rest(scans: Sequence[Scan], place: Sequence[tuple[int, int]], without: set[int], near: bool):
    """What `duplicates` compares: all documents but some, in order."""
    at, marks, minhashes = -1, [], np.zeros((0, 0))
    for n, (u, i) in enumerate(place):
        if u != at:
            at, marks, minhashes = u, scans[u].shingles() if near else [], scans[u].signatures()
        if n not in without:
            yield n, scans[u].documents[i][4], minhashes[i] if near else minhashes, marks[i] if near else minhashes


def same(scans: Sequence[Scan], place: Sequence[tuple[int, int]], one: Any) -> bool:
    """Whether a duplicate is exact: equal shingles alone do not say so."""
    (u, i), (v, j) = place[one.document], place[one.of]
    return scans[u].documents[i][4] == scans[v].documents[j][4]


def statistics(
    number: int, planned: Plan, scans: Sequence[Scan], kept: list[list[int]], dropped: list[dict], held: dict[str, Any], manifests: list[dict]
) -> dict[str, Any]:
    """What data.json says about a source."""
    source = planned.sources[number]
    mine = [(u, scans[u]) for u, unit in enumerate(planned.units) if unit.source == number]
    read = [(one[1], one[2]) for _, scanned in mine for one in scanned.documents] + [
        (one[2], one[3]) for _, scanned in mine for one in scanned.dropped
    ]
    stays = [scanned.documents[i] for u, scanned in mine for i in kept[u]]
    out: dict[str, list[str]] = {}
    for one in dropped:
        if one["source"] == source.label:
            out.setdefault(one["reason"], []).append(one["name"])
    return {
        "name": source.label,
        "path": source.path,
        "weight": source.weight,
        "read": {"documents": len(read), "bytes": sum(b for b, _ in read), "lines": sum(lines for _, lines in read)},
        "kept": {
            "documents": len(stays),
            "bytes": sum(one[1] for one in stays),
            "lines": sum(one[2] for one in stays),
            "tokens": sum(one["tokens"] for one in manifests),
        },
        "heldout": sum(planned.units[u].source == number for u, _ in held["documents"]),
        "dropped": {why: {"count": len(some), "names": some[:NAMED]} for why, some in sorted(out.items(), key=lambda x: (-len(x[1]), x[0]))},
        "licences": dict(sorted(Counter(one[3] or "none found" for one in stays).items(), key=lambda x: (-x[1], x[0]))),
        "shards": manifests,
    }
