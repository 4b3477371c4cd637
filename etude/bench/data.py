"""`etude bench data`: a million lines of ten packages, prepared on one process and on two, with planted duplicates, and
once killed and resumed.

The packages are wheels, archives of code that pip downloads without running any of it. For an sdist pip runs the
package's build code, even to download it. Beside them stand two sources that the benchmark makes of their files:

    planted     exact copies, copies with a few changed lines, and changed copies of held-out files, each made of
                another file
    rows        JSONL with good and bad rows

Every round prepares all of it on one process and on two, in turns, in this process's own forks. The folders must be
equal to the last byte."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

from etude.bench import write_record
from etude.run import data as command
from kit.disk import atomic_write, hash_file, read_lines
from kit.process import machine
from kit.settings import RunError
from ref.cpt import load_tokenizer
from scaled.data.prepare import NEAR_HELD, Settings, prepare
from scaled.data.rules import Rules, reason
from scaled.data.sources import Source

PACKAGES = (
    "django==5.2.19", "docutils==0.23", "jinja2==3.1.6", "networkx==3.6.1", "nltk==3.10.4", "pygments==2.21.0",
    "rich==15.0.0", "setuptools==84.2.1", "sphinx==9.0.4", "sqlalchemy==2.1.9",
)  # fmt: skip
HELDOUT = "wheels/rich"
PLANTED_PER_KIND = 20
"""Documents of each planted kind."""
PROCESSES = (1, 2)


def bench(tokenizer: Path, archives: Path, out: Path | None = Path("results"), rounds: int = 2) -> dict[str, Any]:
    """Prints figures and writes out/data-CPU.json. Raises RunError if the wheels cannot be had, and if a planted
    duplicate is not found, a resumed build differs, or processes change a byte: then no figure is worth anything."""
    path = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    try:
        load_tokenizer(path)  # before anything is downloaded
    except (OSError, ValueError) as error:
        raise RunError(f"tokenizer {path}: {' '.join(str(error).split())}; see --tokenizer") from None
    fetch(archives)
    work = archives / "bench"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        wheels = sorted(archives.glob("*.whl"))
        planted = plant(wheels, work)
        sources = [
            Source(str(archives / "*.whl"), name="wheels", suffixes=(".py",)),
            Source(str(work / "planted")),
            Source(str(work / "rows.jsonl")),
        ]
        settings = Settings(heldout=HELDOUT)
        seconds: dict[int, list[float]] = {n: [] for n in PROCESSES}
        loads, reference, record = [], {}, {}
        for number in range(rounds):
            for processes in PROCESSES if number % 2 == 0 else PROCESSES[::-1]:
                shutil.rmtree(work / "out", ignore_errors=True)
                loads.append(os.getloadavg()[0])
                start = time.perf_counter()
                record = prepare(work / "out", sources, settings, path, processes, False, "etude bench data")
                seconds[processes].append(time.perf_counter() - start)
                files = hash_files(work / "out")
                if reference.setdefault("files", files) != files:
                    raise RunError(f"{processes} processes leave other files; that is a fault of the program")
                print(
                    f"round {number + 1} of {rounds}, processes {processes}: "
                    f"{seconds[processes][-1]:.1f} s, load {loads[-1]:.1f}",
                    flush=True,
                )
        planted_counts = check(planted, read_lines(work / "out" / "dropped.jsonl"))
        command.show(record, work / "out")
        kills = kill_and_resume(work, sources, settings, path, reference["files"])
    finally:
        shutil.rmtree(work, ignore_errors=True)
    ratio = statistics.median(a / b for a, b in zip(*(seconds[n] for n in PROCESSES), strict=True))
    lines, size = (sum(source["read"][key] for source in record["sources"]) for key in ("lines", "bytes"))
    result = {
        "what": "seconds to prepare ten wheels with planted duplicates and bad rows on one process and on two",
        "command": "etude bench data",
        "machine": machine(),
        "load_before_each_build": [round(x, 2) for x in loads],
        "packages": list(PACKAGES),
        "lines": lines,
        "bytes": size,
        "tokens": sum(source["kept"]["tokens"] for source in record["sources"]),
        "planted": {kind: len(names) for kind, names in planted.items()},
        "found": planted_counts,
        "sources": [
            {key: source[key] for key in ("name", "read", "kept", "licences")} | {"dropped": count_drops(source)}
            for source in record["sources"]
        ],
        "heldout": record["heldout"],
        "seconds": {str(n): build_times for n, build_times in seconds.items()},
        "mb_per_s": {
            str(n): round(size / 1e6 / statistics.median(build_times), 2) for n, build_times in seconds.items()
        },
        "faster_with_two": ratio,
        "killed_and_resumed": kills,
    }
    print(
        f"{lines:,} lines, {size / 1e6:.1f} MB: two processes are {ratio:.2f} times as fast as one; "
        f"killed {kills} times and resumed, the same bytes"
    )
    return write_record(result, out, "data", result["machine"]["cpu"])


def count_drops(source: dict[str, Any]) -> dict[str, int]:
    return {cause: entry["count"] for cause, entry in source["dropped"].items()}


def fetch(archives: Path) -> None:
    """Downloads the wheels that are missing. Raises RunError if pip cannot."""
    archives.mkdir(parents=True, exist_ok=True)
    present_wheels = {"==".join(path.name.split("-")[:2]) for path in archives.glob("*.whl")}
    if present_wheels - set(PACKAGES):
        raise RunError(
            f"{archives} holds other wheels: {', '.join(sorted(present_wheels - set(PACKAGES)))}; "
            f"choose another --archives"
        )
    if missing := [package for package in PACKAGES if package not in present_wheels]:
        target = ["--platform", "any", "--python-version", "3.12", "--implementation", "py", "--abi", "none"]
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--disable-pip-version-check",
            "--no-deps",
            "--only-binary",
            ":all:",
            *target,
        ]
        print(f"fetching {len(missing)} wheels", flush=True)
        if subprocess.run([*command, "-d", str(archives), *missing]).returncode:
            raise RunError(f"pip cannot download {', '.join(missing)}; put the wheels into {archives} by hand")


def plant(wheels: list[Path], work: Path) -> dict[str, list[str]]:
    """Writes the planted sources. Kind → names of the planted documents."""
    rng, rules, texts = random.Random(0), Rules(), {"near-held": [], "exact": []}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in sorted(member for member in archive.namelist() if member.endswith(".py")):
                text = archive.read(name).decode("utf-8", "replace")
                if text.count("\n") >= 60 and len(text) < 100_000 and reason(text, rules) is None:
                    texts["near-held" if name.startswith("rich/") else "exact"].append(text)
    texts["near"] = texts["exact"]
    (work / "planted").mkdir()
    names: dict[str, list[str]] = {}
    for kind in ("exact", "near", "near-held"):
        for number, text in enumerate(rng.sample(texts[kind], PLANTED_PER_KIND)):
            lines = [line + "  " for line in text.split("\n")]
            for at in range(0, len(lines), 40 if kind != "exact" else len(lines) + 1):
                lines[at] += "" if kind == "exact" else f"# changed {rng.random()}"
            names.setdefault(kind, []).append(f"{kind}-{number:02d}.py")
            (work / "planted" / names[kind][-1]).write_text("\n".join(lines), encoding="utf-8")
    rows = [
        json.dumps({"content": "\n".join("".join(rng.choices("abcdefghijkl ", k=60)) for _ in range(30))})
        for _ in range(100)
    ]
    bad = {"{": 3, '{"text": 1}': 20, '{"content": 1}': 41, '"text"': 60, '{"content": "\\ud800"}': 99}
    for row, number in bad.items():
        rows.insert(number - 1, row)
    (work / "rows.jsonl").write_text("\n".join(rows) + "\n")
    return names | {"bad rows": [f"rows.jsonl:{number}" for number in bad.values()]}


def check(planted: dict[str, list[str]], dropped: list[dict[str, Any]]) -> dict[str, int]:
    """How many planted documents of each kind were dropped for their reason. Raises RunError if one was not."""
    reasons_by_name = {row["name"]: row["reason"] for row in dropped}
    reasons = {"exact": ("exact duplicate",), "near": ("near duplicate", "exact duplicate"), "near-held": (NEAR_HELD,)}
    drop_counts: dict[str, int] = {}
    for kind, names in planted.items():
        drop_counts[kind] = sum(name in reasons_by_name for name in names)
        if missed := [
            name
            for name in names
            if reasons_by_name.get(name) not in reasons.get(kind, (reasons_by_name.get(name) or "",))
        ]:
            raise RunError(
                f"{len(missed)} of {len(names)} planted documents were not found: "
                f"{', '.join(f'{name} ({reasons_by_name.get(name)})' for name in missed)}"
            )
    return drop_counts


def kill_and_resume(
    work: Path, sources: list[Source], settings: Settings, tokenizer: Path, files: dict[str, str]
) -> int:
    """Kills the command twice, while it reads and while it tokenises, and goes on. Returns the number of kills. Raises
    RunError if files differ."""
    toml, out = work / "data.toml", work / "killed"
    tables = [
        f"[[source]]\npath = {json.dumps(source.path)}\nname = {json.dumps(source.name)}\nsuffixes = "
        f"{json.dumps(source.suffixes)}\n"
        for source in sources
    ]
    atomic_write(toml, f"heldout = {json.dumps(settings.heldout)}\n" + "".join(tables))
    command = [
        sys.executable,
        "-m",
        "etude.cli.main",
        "data",
        str(toml),
        "--out",
        str(out),
        "--tokenizer",
        str(tokenizer),
        "--processes",
        str(PROCESSES[-1]),
    ]
    kills = 0
    for pattern in ("work/0*.json", "work/*.lengths", None):
        process = subprocess.Popen([*command, *(["--resume"] if kills else [])], stdout=subprocess.DEVNULL)
        while pattern and process.poll() is None and len(list(out.glob(pattern))) < 3:
            time.sleep(0.02)
        if pattern and process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        if process.wait() and not pattern:
            raise RunError("the killed build cannot be resumed; its error is above")
    if hash_files(out) != files:
        raise RunError("a killed and resumed build leaves other files; that is a fault of the program")
    return kills


def hash_files(out: Path) -> dict[str, str]:
    """SHA-256 of every file that a build leaves for training."""
    paths = [*out.glob("*.jsonl"), out / "data.json", out / "tokenizer.json", *out.glob("shards/*")]
    return {path.relative_to(out).as_posix(): hash_file(path) for path in paths if path.name != "timings.jsonl"}
