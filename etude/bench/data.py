"""`etude bench data`: a million lines of ten packages, prepared on one process and on two, with planted duplicates, and once killed and resumed.

The packages are wheels, archives of code that pip downloads without running any of it. For an sdist pip runs the package's build code, even to
download it. Beside them stand two sources that the benchmark makes of their files:

    planted     exact copies, copies with a few changed lines, and changed copies of held-out files, each made of another file
    rows        JSONL with good and bad rows

Every round prepares all of it on one process and on two, in turns, in this process's own forks. The folders must be equal to the last byte.
"""

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

from etude import data as command
from etude.bench import written
from kit.disk import atomic_write, hash_file, read_lines
from kit.process import machine
from kit.settings import RunError
from ref.cpt import load_tokenizer
from scaled.data.prepare import NEAR_HELD, Settings, prepare
from scaled.data.rules import Rules, reason
from scaled.data.sources import Source

PACKAGES = (
    "django==5.2.19", "docutils==0.23", "jinja2==3.1.6", "networkx==3.6.1", "nltk==3.10.4", "pygments==2.21.0", "rich==15.0.0", "setuptools==84.2.1",
    "sphinx==9.0.4", "sqlalchemy==2.1.9",
)  # fmt: skip
HELDOUT = "wheels/rich"
EACH = 20
"""Documents of each planted kind."""
PROCESSES = (1, 2)


def bench(tokenizer: Path, archives: Path, out: Path | None = Path("results"), rounds: int = 2) -> dict[str, Any]:
    """Prints figures and writes out/data-CPU.json. Raises RunError if the wheels cannot be had, and if a planted duplicate is not found, a
    resumed build differs, or processes change a byte: then no figure is worth anything."""
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
        sources = [Source(str(archives / "*.whl"), name="wheels", suffixes=(".py",)), Source(str(work / "planted")), Source(str(work / "rows.jsonl"))]
        settings = Settings(heldout=HELDOUT)
        seconds: dict[int, list[float]] = {n: [] for n in PROCESSES}
        loads, seen, record = [], {}, {}
        for number in range(rounds):
            for processes in PROCESSES if number % 2 == 0 else PROCESSES[::-1]:
                shutil.rmtree(work / "out", ignore_errors=True)
                loads.append(os.getloadavg()[0])
                began = time.perf_counter()
                record = prepare(work / "out", sources, settings, path, processes, False, "etude bench data")
                seconds[processes].append(time.perf_counter() - began)
                found = contents(work / "out")
                if seen.setdefault("files", found) != found:
                    raise RunError(f"{processes} processes leave other files; that is a fault of the program")
                print(f"round {number + 1} of {rounds}, processes {processes}: {seconds[processes][-1]:.1f} s, load {loads[-1]:.1f}", flush=True)
        there = check(planted, read_lines(work / "out" / "dropped.jsonl"))
        command.show(record, work / "out")
        kills = killed(work, sources, settings, path, seen["files"])
    finally:
        shutil.rmtree(work, ignore_errors=True)
    ratio = statistics.median(a / b for a, b in zip(*(seconds[n] for n in PROCESSES), strict=True))
    lines, size = (sum(one["read"][key] for one in record["sources"]) for key in ("lines", "bytes"))
    result = {
        "what": "seconds to prepare ten wheels with planted duplicates and bad rows on one process and on two",
        "command": "etude bench data",
        "machine": machine(),
        "load_before_each_build": [round(x, 2) for x in loads],
        "packages": list(PACKAGES),
        "lines": lines,
        "bytes": size,
        "tokens": sum(one["kept"]["tokens"] for one in record["sources"]),
        "planted": {kind: len(names) for kind, names in planted.items()},
        "found": there,
        "sources": [{key: one[key] for key in ("name", "read", "kept", "licences")} | {"dropped": counts(one)} for one in record["sources"]],
        "heldout": record["heldout"],
        "seconds": {str(n): some for n, some in seconds.items()},
        "mb_per_s": {str(n): round(size / 1e6 / statistics.median(some), 2) for n, some in seconds.items()},
        "faster_with_two": ratio,
        "killed_and_resumed": kills,
    }
    print(
        f"{lines:,} lines, {size / 1e6:.1f} MB: two processes are {ratio:.2f} times as fast as one; killed {kills} times and resumed, the same bytes"
    )
    return written(result, out, "data", result["machine"]["cpu"])


def counts(source: dict[str, Any]) -> dict[str, int]:
    return {why: some["count"] for why, some in source["dropped"].items()}


def fetch(archives: Path) -> None:
    """Downloads the wheels that are missing. Raises RunError if pip cannot."""
    archives.mkdir(parents=True, exist_ok=True)
    there = {"==".join(path.name.split("-")[:2]) for path in archives.glob("*.whl")}
    if there - set(PACKAGES):
        raise RunError(f"{archives} holds other wheels: {', '.join(sorted(there - set(PACKAGES)))}; choose another --archives")
    if missing := [one for one in PACKAGES if one not in there]:
        target = ["--platform", "any", "--python-version", "3.12", "--implementation", "py", "--abi", "none"]
        words = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:", *target]
        print(f"fetching {len(missing)} wheels", flush=True)
        if subprocess.run([*words, "-d", str(archives), *missing]).returncode:
            raise RunError(f"pip cannot download {', '.join(missing)}; put the wheels into {archives} by hand")


def plant(wheels: list[Path], work: Path) -> dict[str, list[str]]:
    """Writes the planted sources. Kind → names of the planted documents."""
    draw, rules, texts = random.Random(0), Rules(), {"near-held": [], "exact": []}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in sorted(one for one in archive.namelist() if one.endswith(".py")):
                text = archive.read(name).decode("utf-8", "replace")
                if text.count("\n") >= 60 and len(text) < 100_000 and reason(text, rules) is None:
                    texts["near-held" if name.startswith("rich/") else "exact"].append(text)
    texts["near"] = texts["exact"]
    (work / "planted").mkdir()
    names: dict[str, list[str]] = {}
    for kind in ("exact", "near", "near-held"):
        for number, text in enumerate(draw.sample(texts[kind], EACH)):
            lines = [line + "  " for line in text.split("\n")]
            for at in range(0, len(lines), 40 if kind != "exact" else len(lines) + 1):
                lines[at] += "" if kind == "exact" else f"# changed {draw.random()}"
            names.setdefault(kind, []).append(f"{kind}-{number:02d}.py")
            (work / "planted" / names[kind][-1]).write_text("\n".join(lines), encoding="utf-8")
    rows = [json.dumps({"content": "\n".join("".join(draw.choices("abcdefghijkl ", k=60)) for _ in range(30))}) for _ in range(100)]
    bad = {"{": 3, '{"text": 1}': 20, '{"content": 1}': 41, '"text"': 60, '{"content": "\\ud800"}': 99}
    for row, number in bad.items():
        rows.insert(number - 1, row)
    (work / "rows.jsonl").write_text("\n".join(rows) + "\n")
    return names | {"bad rows": [f"rows.jsonl:{number}" for number in bad.values()]}


def check(planted: dict[str, list[str]], dropped: list[dict[str, Any]]) -> dict[str, int]:
    """How many planted documents of each kind were dropped for their reason. Raises RunError if one was not."""
    found = {one["name"]: one["reason"] for one in dropped}
    reasons = {"exact": ("exact duplicate",), "near": ("near duplicate", "exact duplicate"), "near-held": (NEAR_HELD,)}
    number: dict[str, int] = {}
    for kind, names in planted.items():
        number[kind] = sum(name in found for name in names)
        if missed := [name for name in names if found.get(name) not in reasons.get(kind, (found.get(name) or "",))]:
            raise RunError(
                f"{len(missed)} of {len(names)} planted documents were not found: {', '.join(f'{name} ({found.get(name)})' for name in missed)}"
            )
    return number


def killed(work: Path, sources: list[Source], settings: Settings, tokenizer: Path, files: dict[str, str]) -> int:
    """Kills the command twice, while it reads and while it tokenises, and goes on. Returns the number of kills. Raises RunError if files differ."""
    toml, out = work / "data.toml", work / "killed"
    tables = [f"[[source]]\npath = {json.dumps(one.path)}\nname = {json.dumps(one.name)}\nsuffixes = {json.dumps(one.suffixes)}\n" for one in sources]
    atomic_write(toml, f"heldout = {json.dumps(settings.heldout)}\n" + "".join(tables))
    words = [
        sys.executable,
        "-m",
        "etude.cli",
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
        process = subprocess.Popen([*words, *(["--resume"] if kills else [])], stdout=subprocess.DEVNULL)
        while pattern and process.poll() is None and len(list(out.glob(pattern))) < 3:
            time.sleep(0.02)
        if pattern and process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        if process.wait() and not pattern:
            raise RunError("the killed build cannot be resumed; its error is above")
    if contents(out) != files:
        raise RunError("a killed and resumed build leaves other files; that is a fault of the program")
    return kills


def contents(out: Path) -> dict[str, str]:
    """SHA-256 of every file that a build leaves for training."""
    wanted = [*out.glob("*.jsonl"), out / "data.json", out / "tokenizer.json", *out.glob("shards/*")]
    return {path.relative_to(out).as_posix(): hash_file(path) for path in wanted if path.name != "timings.jsonl"}
