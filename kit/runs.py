"""Run folders: configuration, resumable stages, metrics.

Everything a run leaves lies in one folder:

    config.json               technique, configuration, versions; its presence makes the folder a run
    lock                      held with flock by the process at work; the kernel lets go of it on any death
    metrics/STAGE.jsonl       one line per logged step; only values that a resumed run repeats bit for bit
    timings.jsonl             wall-clock seconds and rates, which no two runs share
    state/STAGE-000040.pt     resume state of an unfinished stage, the last two; .json beside it commits it
    stages/STAGE.json         the result of a finished stage, with the hash of its metrics
    tensorboard/STAGE/        the same metrics as events

What makes SIGKILL at any moment safe: a state file counts only once its manifest exists, a manifest appears
by one rename, and it records how long the metrics file was. On resume the metrics are cut back to that
length, so the steps that the dead process logged after its last checkpoint are logged again, the same.
Lines are appended whole or not at all: a full disk tears none, and what is recorded of a file is what it holds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import math
import os
import pickle
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kit.board import Board
from kit.disk import NO_ROOM, Hashing, Journal, atomic_write, hash_file, refusal, timings, what_is_wrong
from kit.process import machine, peak_memory_gib, uninterrupted
from kit.progress import Progress
from kit.settings import Interrupted, RunError

__all__ = ["Run", "Stage", "flatten"]


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it; tensors and NumPy scalars become numbers, NaN and infinity null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, Path):
        return str(value)
    if (tolist := getattr(value, "tolist", None)) is not None:
        return _plain(tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _warn(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------- the run

_held_locks: set[int] = set()


def _drop_locks_in_child() -> None:
    # A forked worker shares the lock; if it outlived its parent, the folder would stay locked.
    for handle in _held_locks:
        os.close(handle)
    _held_locks.clear()


os.register_at_fork(after_in_child=_drop_locks_in_child)


class Run:
    """An open run folder. Use `Run.open`; close it, or use it in a `with` statement."""

    def __init__(self, root: Path, technique: str, config: Any, lock: int, resumed: bool, cadence: float) -> None:
        self.root, self.technique, self.config = root, technique, config
        self.resumed, self.checkpoint_seconds = resumed, cadence
        self._lock: int | None = lock
        self._made: list[Path] = []
        self._stages: list[Stage] = []

    @classmethod
    def open(cls, out: str | Path, technique: str, config: Any, resume: bool = False, checkpoint_seconds: float = 20.0) -> Run:
        """Takes the folder `out` for a run of `technique` with the dataclass `config`.

        Raises RunError, with nothing written, when the folder is in use, holds another run (or one that
        `resume` was not asked for), or holds something that is no run.
        """
        out = Path(out)
        try:
            str(out).encode("utf-8")
        except UnicodeEncodeError:
            raise RunError(f"{out} is not UTF-8, and TensorBoard and safetensors open no such path; choose another --out") from None
        again = f"choose another --out, or delete {out}"
        if out.exists() and not out.is_dir():
            raise RunError(f"{out} is a file; choose a folder with --out")
        if out.is_dir():
            there = {entry.name for entry in out.iterdir() if not entry.name.startswith(".tmp-")} - {"lock"}
            if there and "config.json" not in there:
                raise RunError(f"{out} is not empty and holds no run; choose another --out")
            if there:
                before = cls._read_config(out)
                if (out / "lock").exists():
                    os.close(cls._take_lock(out))
                if not resume:
                    raise RunError(f"{out} already holds a run; --resume goes on with it, or {again}")
                cls._compare(before, technique, config, out)
        made = [folder for folder in (out, *out.parents) if not folder.exists()]
        out.mkdir(parents=True, exist_ok=True)
        lock = cls._take_lock(out)
        resumed = (out / "config.json").exists()
        try:
            if resumed:
                before = cls._read_config(out)
                if not resume:  # another process was quicker
                    raise RunError(f"{out} already holds a run; --resume goes on with it, or {again}")
                cls._compare(before, technique, config, out)
            if not resumed:  # before anything else is made: it is what tells a run from a stranger's folder
                record = {"technique": technique, "config": _plain(config), "machine": machine()}
                atomic_write(out / "config.json", json.dumps(record, indent=1) + "\n")
            else:
                for left in (path for part in (".", "state", "stages") for path in (out / part).glob(".tmp-*") if path.is_file()):
                    left.unlink()  # what a kill kept from becoming a file
            for folder in ("metrics", "state", "stages", "checkpoints"):
                (out / folder).mkdir(exist_ok=True)
        except BaseException:
            if not resumed:
                (out / "lock").unlink()
                _remove_empty(made)
            os.close(lock)
            raise
        _held_locks.add(lock)
        run = cls(out, technique, config, lock, resumed, checkpoint_seconds)
        run._made = made
        return run

    @staticmethod
    def _take_lock(out: Path) -> int:
        handle = os.open(out / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise RunError(f"output folder {out} is in use by another run; wait for it or choose another --out") from None
        return handle

    @staticmethod
    def _read_config(out: Path) -> dict:
        path = out / "config.json"
        try:
            record = json.loads(path.read_text())
            if not isinstance(record, dict) or not {"technique", "config"} <= set(record) or not isinstance(record["config"], dict):
                raise ValueError("it is not the configuration of a run")
            return record
        except ValueError as error:
            raise RunError(f"{path} is damaged ({error}); choose another --out") from None

    @staticmethod
    def _compare(before: dict, technique: str, config: Any, out: Path) -> None:
        if before["technique"] != technique:
            raise RunError(f"{out} holds a run of {before['technique']}, not of {technique}; choose another --out")
        old, new = flatten(before["config"]), flatten(_plain(config))
        for key in [*new, *(key for key in old if key not in new)]:
            if old.get(key, "nothing") != new.get(key, "nothing"):
                raise RunError(
                    f"{out} was started with {key} = {old.get(key, 'nothing')}, not "
                    f"{new.get(key, 'nothing')}; resume with the same settings or choose another --out"
                )

    def path(self, *parts: str) -> Path:
        """A path inside the run folder; its parent is made."""
        path = self.root.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def stage(self, name: str, total: float, unit: str = "tokens") -> Stage:
        """The stage `name`: its progress counts up to `total` steps, its speed is told in `unit`s a second.

        Raises RunError when the stage is finished but its files no longer are what it left.
        """
        stage = Stage(self, name, total, unit)
        self._stages.append(stage)
        return stage

    def seconds(self) -> dict[str, float]:
        """Wall-clock seconds by stage, interruptions left out, work that had to be repeated included."""
        spent: dict[str, float] = {}
        for line in timings(self.root):
            spent[line["stage"]] = max(spent.get(line["stage"], 0.0), line["seconds"])
        return spent

    def close(self) -> None:
        """Stops the progress bar and lets go of the folder."""
        for stage in self._stages:
            stage.close()
        if self._lock is not None:
            _held_locks.discard(self._lock)
            os.close(self._lock)
            self._lock = None

    def abandon(self) -> None:
        """Removes what this run made, when it was new and left no finished stage and nothing to resume."""
        if self.resumed or any(self.root.glob("stages/*.json")) or any(self.root.glob("state/*.json")):
            return
        for stage in self._stages:
            stage.close()
        for name in ("metrics", "state", "stages", "checkpoints", "tensorboard", "data"):
            shutil.rmtree(self.root / name, ignore_errors=True)
        for name in ("config.json", "timings.jsonl", "lock"):
            (self.root / name).unlink(missing_ok=True)
        _remove_empty(self._made)

    @contextlib.contextmanager
    def told(self, again: str) -> Iterator[None]:
        """What ends the work inside before its time is told in one line, with the command `again` where it goes on with this run. A new run that
        came to nothing leaves nothing. Raises Interrupted for Ctrl-C, RunError for a full disk, and lets through what else there is."""
        try:
            yield
        except KeyboardInterrupt:
            self.close()
            raise Interrupted(f"interrupted; go on with: {again}") from None
        except Exception as error:
            refused = refusal(error)
            if refused is None and not isinstance(error, RunError):
                raise
            self.abandon()
            if refused is None:
                raise
            if refused.errno in NO_ROOM:
                left = f"; make room, then go on with: {again}" if (self.root / "config.json").exists() else ""
                raise RunError(f"{refused.strerror}: {refused.filename or self.root}{left}") from None
            raise refused from None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _remove_empty(folders: Iterable[Path]) -> None:
    """Removes folders up to the first that something lies in."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of nested dicts by dotted key."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}.{key}" if prefix else key)
    return flat


class Stage:
    """One resumable part of a run. The pattern, which a kill at any moment cannot break:

        stage = run.stage("rl", total=200)
        if stage.finished:
            return stage.result()
        state = stage.restore()                        # None: begin at the beginning
        for step in range(state["step"] if state else 0, 200):
            ...
            stage.log(step + 1, loss=loss)
            stage.progress(step + 1, tokens, loss=loss)
            if stage.due():
                stage.save({"step": step + 1, "model": model.state_dict(), "rng": pack_rng()}, step + 1)
        stage.finish({"loss": loss})

    States hold tensors, numbers, strings, NumPy arrays, and dicts, lists and tuples of these.
    """

    def __init__(self, run: Run, name: str, total: float, unit: str) -> None:
        self.run, self.name, self.total, self.unit = run, name, total, unit
        self.metrics_path = run.root / "metrics" / f"{name}.jsonl"
        self._record_path = run.root / "stages" / f"{name}.json"
        self._before = run.seconds().get(name, 0.0)
        self._opened = self._saved_at = time.perf_counter()
        self._kept: list[Path] = []
        self._metrics: Journal | None = None
        self._digest, self._offset = hashlib.sha256(), 0
        self._board: Board | None = None
        self._boarded = False
        self._closed = False
        self._show = Progress(self)
        self._record: dict | None = None
        if self._record_path.exists():
            self._record = self._check_finished()
            self._drop_states(keep=[])

    # -- a finished stage

    @property
    def finished(self) -> bool:
        """Whether an earlier process (or this one) brought the stage to its end."""
        return self._record is not None

    def result(self) -> dict:
        """What `finish` was given, as JSON brings it back."""
        if self._record is None:
            raise RuntimeError(f"stage {self.name} is not finished")
        return self._record["result"]

    def finish(self, result: dict, files: Iterable[str | Path] = ()) -> dict:
        """Ends the stage with `result`, forgets its resume states; returns the result as JSON brings it back.

        `files` (or folders) in the run folder that the stage made are recorded with their hashes, and checked
        before a resumed run relies on them.
        """
        self._begin().sync()
        paths = []
        for path in map(Path, files):
            paths += sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        record = {
            "stage": self.name,
            "result": _plain(result),
            "files": {
                str(path.relative_to(self.run.root)): {"bytes": size, "sha256": digest}
                for path, size, digest in [
                    (self.metrics_path, self._offset, self._digest.hexdigest()),
                    *((path, path.stat().st_size, hash_file(path)) for path in paths),
                ]
            },
        }
        self._show.last()
        self._note_time(finished=True, peak_memory_gib=round(peak_memory_gib(), 3))
        atomic_write(self._record_path, json.dumps(record, indent=1) + "\n")
        self._record = record = json.loads(json.dumps(record))
        self._drop_states(keep=[])
        self.close()
        return record["result"]

    def _check_finished(self) -> dict:
        record = self._record_path
        try:
            found = json.loads(record.read_text())
            expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in found["files"].items()}
            found["result"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(f"{record} is damaged ({error}); delete it to run stage {self.name} again") from None
        for name, (size, digest) in expected.items():
            if wrong := what_is_wrong(self.run.root / name, size, digest):
                raise RunError(f"{self.run.root / name} is damaged ({wrong}); delete {record} to run stage {self.name} again")
        return found

    # -- resume states

    def _states(self) -> list[Path]:
        """Manifests of the saved states, newest first."""
        folder = self.run.root / "state"
        found = [path for path in folder.glob(f"{self.name}-*.json") if path.stem[len(self.name) + 1 :].isdigit()]
        return sorted(found, key=lambda path: -int(path.stem[len(self.name) + 1 :]))

    def _drop_states(self, keep: list[Path]) -> None:
        folder, names = self.run.root / "state", {path.stem for path in keep}
        for manifest in self._states():  # manifests first: a state without one does not count
            if manifest.stem not in names:
                manifest.unlink()
        for state in folder.glob(f"{self.name}-*.pt"):
            if state.stem not in names and state.stem[len(self.name) + 1 :].isdigit():
                state.unlink()

    def restore(self) -> dict | None:
        """The newest undamaged state, or None at the beginning; the metrics file is cut back to fit it.

        A damaged state is named on stderr with what is wrong. Raises RunError when states exist, none whole.
        """
        damaged: list[str] = []
        for manifest in self._states():
            state = manifest.with_suffix(".pt")
            try:
                record = json.loads(manifest.read_text())
                size, digest = record["bytes"], record["sha256"]
                offset, prefix = record["metrics_bytes"], record["metrics_sha256"]
            except (ValueError, KeyError, TypeError) as error:
                damaged.append(f"checkpoint {state} is damaged (its manifest {manifest.name} is unreadable: {error})")
                continue
            if wrong := what_is_wrong(state, size, digest):
                damaged.append(f"checkpoint {state} is damaged ({wrong})")
                continue
            if wrong := what_is_wrong(self.metrics_path, offset, prefix, prefix=True):
                damaged.append(f"metrics {self.metrics_path} are damaged ({wrong}) for checkpoint {state}")
                continue
            loaded = _load(state)
            for line in damaged:
                _warn(f"error: {line}; going on from {state.name}")
            self._kept = [manifest]
            self._begin(offset, record["step"])
            return loaded
        if damaged:
            # Two lines would hide which file to act on; the newest one's story is the one to tell.
            raise RunError(
                f"{damaged[0]}, and no earlier one is whole; delete {self.run.root / 'state'}/{self.name}-* to start stage {self.name} again"
            )
        self._begin()
        return None

    def save(self, state: dict, step: int) -> None:
        """Makes `state` the one that a resumed run goes on from; the one before it is kept too.

        Ctrl-C waits until the state is whole. OSError where the disk has no room for it: those before it stay."""
        import torch

        self._begin().sync()
        manifest = self.run.root / "state" / f"{self.name}-{int(step):06d}.json"
        path, temporary = manifest.with_suffix(".pt"), manifest.with_name(f".tmp-{manifest.stem}.pt")
        with uninterrupted():
            try:
                with open(temporary, "wb") as file:
                    hashing = Hashing(file)
                    try:
                        torch.save(state, hashing)  # pyright: ignore[reportArgumentType] – it writes, and is not asked for more
                    except RuntimeError as error:
                        raise hashing.failed or error from None
                    file.flush()
                    os.fsync(file.fileno())
                manifest.unlink(missing_ok=True)  # of an earlier attempt at this step, which would not fit the new file
                os.replace(temporary, path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            record = {
                "step": int(step),
                "bytes": hashing.bytes,
                "sha256": hashing.digest.hexdigest(),
                "metrics_bytes": self._offset,
                "metrics_sha256": self._digest.hexdigest(),
            }
            atomic_write(manifest, json.dumps(record) + "\n")
        self._kept = [kept for kept in self._kept if kept != manifest][-1:] + [manifest]
        self._drop_states(keep=self._kept)
        self._saved_at = time.perf_counter()

    def due(self) -> bool:
        """Whether the last save is `checkpoint_seconds` ago. Saving changes no result; the clock decides."""
        return time.perf_counter() - self._saved_at >= self.run.checkpoint_seconds

    # -- metrics

    def _begin(self, offset: int = 0, step: int = 0) -> Journal:
        """Opens the metrics file cut to `offset` bytes; a stage not restored begins with an empty one."""
        if self._metrics is not None:
            return self._metrics
        if self._record is not None or self._closed:
            raise RuntimeError(f"stage {self.name} is over")
        self._metrics = Journal(self.metrics_path, keep=offset)
        self._offset = offset
        with open(self.metrics_path, "rb") as file:
            self._digest = hashlib.sha256(file.read())
        self._step = step
        return self._metrics

    def log(self, step: int, **metrics: Any) -> None:
        """One line of metrics: values that depend on configuration and step only, never on the clock."""
        journal = self._begin()
        plain = _plain(metrics)
        line = (json.dumps({"step": int(step), **plain}) + "\n").encode()
        journal.append(line)
        self._digest.update(line)
        self._offset += len(line)
        if not self._boarded:
            self._boarded, self._board = True, Board(self.run.root / "tensorboard" / self.name, self._step)
        if self._board:
            self._board.add({f"{self.name}/{name}": value for name, value in plain.items() if type(value) in (int, float)}, int(step))

    def progress(self, step: float, rate_units: float | None = None, **shown: Any) -> None:
        """Moves the progress bar to `step` of the total.

        `rate_units`: how many `unit`s (tokens) the stage has handled so far, for the speed; else `step`.
        `shown`: what else the line tells, such as loss or reward; numbers are shortened.
        """
        self._show.update(step, step if rate_units is None else rate_units, shown)

    @property
    def seconds(self) -> float:
        """Wall-clock seconds spent in this stage, earlier processes included."""
        return self._before + time.perf_counter() - self._opened

    def _note_time(self, **facts: Any) -> None:
        line = json.dumps({"stage": self.name, "seconds": round(self.seconds, 3), **facts}) + "\n"
        with contextlib.closing(Journal(self.run.root / "timings.jsonl")) as journal:
            journal.append(("\n" if journal.torn() else "").encode() + line.encode())

    def close(self) -> None:
        """Stops the bar and closes the files; what was saved stays."""
        self._closed = True
        self._show.stop()
        for open_file in filter(None, (self._metrics, self._board)):
            open_file.close()
        self._metrics = self._board = None


def _load(path: Path) -> dict:
    """A saved state. Only tensors and plain values are read back: a shared run folder cannot run code."""
    import numpy
    import torch

    arrays = [
        numpy.ndarray,
        numpy.dtype,
        *(type(numpy.dtype(code)) for code in "?bBhHiIlLqQefdSU"),
        numpy.zeros(1).__reduce__()[0],
        numpy.float64(0).__reduce__()[0],
    ]
    try:
        with torch.serialization.safe_globals(arrays):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise RunError(f"checkpoint {path} holds more than tensors and plain values; it is not loaded") from None
    except (RuntimeError, EOFError) as error:  # other archives that PyTorch knows, programs among them
        raise RunError(f"checkpoint {path} is no saved state ({type(error).__name__}); it is not loaded") from None
