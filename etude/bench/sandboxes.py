"""`etude bench sandbox`: how long a sandbox takes to start, to answer, to be stored and to be forked, and how much
memory idle ones take.

The tree is as large as a package's repository: 3,114 files, 25 MB. A fork begins with that tree and one change. It
counts only if its own snapshot is the one that it was forked from. Then whole episodes are played and graded
(oracle.py).
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from environments.sandbox import memory
from environments.sandbox.bubblewrap import Bubblewrap
from environments.sandbox.cache import cache_folder
from environments.sandbox.open import open_sandbox
from environments.sandbox.store import Store
from etude.bench import write_record
from etude.bench.oracle import AT_ONCE, TWO, Plays
from kit.process import machine
from kit.settings import RunError

FILES, SIZE = 3114, 25_000_000
TARGETS = {"start": 60.0, "fork": 50.0, "oracle: both": 100.0}
"""Milliseconds, medians."""
TARGET_RATE = 15.0
"""Episodes a second, two at once: the target."""


def fill(folder: Path, files: int, size: int, seed: int = 0) -> None:
    """Writes a tree of text files with so many bytes in all."""
    draw = random.Random(seed)
    for i in range(files):
        path = folder / f"package{i % 40}" / f"part{i % 7}" / f"module{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(draw.randbytes(size // files // 2).hex().encode())


def time_call(seconds: dict[str, list[float]], name: str, do: Callable[[], Any]) -> Any:
    """What `do` gives; its seconds are noted."""
    start = time.perf_counter()
    result = do()
    seconds.setdefault(name, []).append(time.perf_counter() - start)
    return result


def run_round(seconds: dict[str, list[float]], tree: str, store: Store, root: Path | None, number: int) -> None:
    """One sandbox from its start to its end, and a fork of it. Raises RunError if the fork is another tree."""
    sandbox: Bubblewrap = time_call(seconds, "start", lambda: open_sandbox(tree, store=store, root=root))
    with sandbox:
        time_call(seconds, "list", lambda: sandbox.call("list", {}))
        time_call(seconds, "write", lambda: sandbox.call("write", {"path": "changed.py", "text": f"x = {number}\n"}))
        time_call(seconds, "read", lambda: sandbox.call("read", {"path": "changed.py"}))
        time_call(seconds, "grep", lambda: sandbox.call("grep", {"pattern": "^x = ", "path": "package0"}))
        time_call(seconds, "shell: true", lambda: sandbox.call("shell", {"command": "true"}))
        time_call(seconds, "shell: python", lambda: sandbox.call("shell", {"command": "python3 -c pass"}))
        name = time_call(seconds, "snapshot", sandbox.snapshot)
        fork = time_call(seconds, "fork", lambda: sandbox.fork(name))
        if fork.snapshot() != name:
            raise RunError("a fork is not the tree that it was forked from; that is a fault of the program")
        time_call(seconds, "close", fork.close)


def bench(
    out: Path | None = Path("results"),
    rounds: int = 30,
    idle: int = 100,
    files: int = FILES,
    size: int = SIZE,
    episodes: int = 20,
) -> dict[str, Any]:
    """Prints a table and writes out/sandbox-CPU.json. `episodes`: so many of each kind are played, and again two at
    once."""
    seconds: dict[str, list[float]] = {}
    loads = [os.getloadavg()[0]]
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_folder(), prefix="bench-") as home:
        Path(home).chmod(0o755)
        (Path(home) / "tree").mkdir()
        fill(Path(home) / "tree", files, size)
        store = Store(Path(home) / "store")
        tree = time_call(seconds, "store a folder", lambda: store.add_folder(Path(home) / "tree"))
        time_call(seconds, "lay a tree out", lambda: store.tree(tree))
        for number in range(rounds):
            run_round(seconds, tree, store, None, number)
        loads.append(os.getloadavg()[0])
        plays, rates = Plays(store), {}
        for number in range(episodes):
            plays.round_of(seconds, Path(home), number)
        nurseries = plays.nurseries()
        for name, tested, nursed in (kind for kind in AT_ONCE if nurseries or not kind[2]):
            rates[name] = plays.a_second(Path(home), name, tested, nursed, episodes)
        loads.append(os.getloadavg()[0])
        idle_sandboxes = [open_sandbox(tree, store=store) for _ in range(idle)]
        memory_sizes = [memory.processes(sandbox.first) for sandbox in idle_sandboxes]
        for sandbox in idle_sandboxes:
            sandbox.close()
    rows = [
        {
            "what": name,
            "ms": 1000 * statistics.median(samples),
            "slowest_ms": 1000 * max(samples),
            "times": len(samples),
        }
        for name, samples in seconds.items()
    ]
    for row in rows:
        target = f"   target {TARGETS[row['what']]:g}" if row["what"] in TARGETS else ""
        print(f"{row['what']:26} {row['ms']:9.2f} ms   slowest {row['slowest_ms']:9.2f}{target}")
    for name, count in rates.items():
        print(f"{name:26} {count:9.2f} episodes a second, {TWO} at once   target {TARGET_RATE:g}")
    print(f"{idle} idle sandboxes hold {sum(memory_sizes) / 2**20:.0f} MiB")
    result = {
        "what": "milliseconds of a sandbox's life, and memory of idle ones",
        "command": "etude bench sandbox",
        "machine": machine(),
        "files": files,
        "bytes": size,
        "rounds": rounds,
        "seed": 0,
        "load": loads,
        "rows": rows,
        "targets_ms": TARGETS,
        "episodes": {"a_second": rates, "at_once": TWO, "times": episodes, "target": TARGET_RATE},
        "idle": {"sandboxes": idle, "mib": sum(memory_sizes) / 2**20},
        "note": "medians; load: of the machine before the rounds, behind them, and behind the episodes; "
        "memory: proportional set sizes of the first "
        "processes; oracle: etude/bench/oracle.py",
    }
    return write_record(result, out, "sandbox", result["machine"]["cpu"])
