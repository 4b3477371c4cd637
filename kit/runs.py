"""Run folders: configuration, resumable stages, metrics.

A run keeps everything in one folder:

    config.json               technique, configuration, versions; its presence makes the folder a run
    lock                      held with flock by the running process; the kernel releases it however the process ends
    metrics/STAGE.jsonl       one line per logged step; only values that a resumed run repeats bit for bit
    timings.jsonl             wall-clock seconds and rates, which differ from run to run
    state/STAGE-000040.pt     the last two checkpoints of an unfinished stage; the .json next to each commits it
    stages/STAGE.json         the result of a finished stage, with the hash of its metrics
    rollouts/STAGE.json       rollouts of the newest step of RL, for people who watch
    tensorboard/STAGE/        the same metrics as events; `etude run --log wandb` keeps its own in wandb/

SIGKILL is safe at any moment. A checkpoint counts only once its manifest exists, the manifest appears by one
rename, and it records the length of the metrics file. On resume the metrics are truncated to that length. The
steps that the killed process logged after its last checkpoint are then logged again, with the same values.
A line is appended completely or not at all, even on a full disk, so the record of a file matches its content.

config.json, the manifests and the results carry a seal, the SHA-256 of their own content: one whose seal does not match
is refused, not believed."""

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

from kit.board import Board, open_board
from kit.disk import (
    NO_ROOM,
    DamagedFile,
    Hashing,
    Journal,
    atomic_write,
    hash_file,
    parse_json,
    read_record,
    refusal,
    seal_record,
    sum_stage_seconds,
    what_is_wrong,
)
from kit.process import machine, peak_memory_gib, uninterrupted
from kit.progress import Progress
from kit.settings import Interrupted, RunError, fill
from kit.tracking import Tracker, open_tracker

__all__ = ["Run", "Stage", "flatten"]

CONFIG = {"technique": str, "config": dict}
"""Shape of config.json."""
RECORD = {"result": dict, "files": {...: {"bytes": int, "sha256": str}}}
"""Shape of stages/STAGE.json."""
MANIFEST = {"step": int, "bytes": int, "sha256": str, "metrics_bytes": int, "metrics_sha256": str}
"""Shape of state/STAGE-STEP.json."""


def _plain(value: Any) -> Any:
    """`value` in a form that JSON can hold: tensors and NumPy scalars become numbers, NaN and infinity become null."""
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
    # A forked worker shares the lock. If it outlives its parent, the folder stays locked.
    for handle in _held_locks:
        os.close(handle)
    _held_locks.clear()


os.register_at_fork(after_in_child=_drop_locks_in_child)


class Run:
    """An open run folder. Use `Run.open`; close it, or use it in a `with` statement. One without a lock is for a
    process whose parent has it."""

    def __init__(
        self, root: Path, technique: str, config: Any, lock: int | None, resumed: bool, cadence: float
    ) -> None:
        self.root, self.technique, self.config = root, technique, config
        self.resumed, self.checkpoint_seconds = resumed, cadence
        self._lock: int | None = lock
        self._new_folders: list[Path] = []
        self._stages: list[Stage] = []
        self._tracker: Tracker | None = None
        self._has_tried_tracker = False

    @classmethod
    def open(
        cls, out: str | Path, technique: str, config: Any, resume: bool = False, checkpoint_seconds: float = 20.0
    ) -> Run:
        """Takes the folder `out` for a run of `technique` with the dataclass `config`.

        Raises RunError, and writes nothing, if the folder is in use, holds another run, holds this run without
        `resume`, or holds files that are not a run.
        """
        out = Path(out)
        try:
            str(out).encode("utf-8")
        except UnicodeEncodeError:
            raise RunError(
                f"{out} is not UTF-8, and TensorBoard and safetensors cannot open such a path; choose another --out"
            ) from None
        advice = f"choose another --out, or delete {out}"
        if out.exists() and not out.is_dir():
            raise RunError(f"{out} is a file; choose a folder with --out")
        if out.is_dir():
            entries = {entry.name for entry in out.iterdir() if not entry.name.startswith(".tmp-")} - {"lock"}
            if entries and "config.json" not in entries:
                raise RunError(f"{out} is not empty and holds no run; choose another --out")
            if entries:
                recorded = cls._read_config(out)
                if (out / "lock").exists():
                    os.close(cls._take_lock(out))
                if not resume:
                    raise RunError(f"{out} already holds a run; add --resume to continue it, or {advice}")
                cls._check_same_run(recorded, technique, config, out)
        new_folders = [folder for folder in (out, *out.parents) if not folder.exists()]
        out.mkdir(parents=True, exist_ok=True)
        lock = cls._take_lock(out)
        resumed = (out / "config.json").exists()
        try:
            if resumed:
                recorded = cls._read_config(out)
                if not resume:  # another process was faster
                    raise RunError(f"{out} already holds a run; add --resume to continue it, or {advice}")
                cls._check_same_run(recorded, technique, config, out)
            if not resumed:  # first of all: this file marks the folder as a run
                record = {"technique": technique, "config": _plain(config), "machine": machine()}
                atomic_write(out / "config.json", json.dumps(seal_record(record), indent=1) + "\n")
            else:
                for temporary_file in (
                    path for part in (".", "state", "stages") for path in (out / part).glob(".tmp-*") if path.is_file()
                ):
                    temporary_file.unlink()  # temporary files that a kill left behind
            for folder in ("metrics", "state", "stages", "checkpoints"):
                (out / folder).mkdir(exist_ok=True)
        except BaseException:
            if not resumed:
                (out / "lock").unlink()
                _remove_empty(new_folders)
            os.close(lock)
            raise
        _held_locks.add(lock)
        run = cls(out, technique, config, lock, resumed, checkpoint_seconds)
        run._new_folders = new_folders
        return run

    @staticmethod
    def _take_lock(out: Path) -> int:
        handle = os.open(out / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise RunError(
                f"output folder {out} is in use by another run; wait for it or choose another --out"
            ) from None
        return handle

    @staticmethod
    def _read_config(out: Path) -> dict:
        return read_record(out / "config.json", CONFIG, "choose another --out", "machine")

    @staticmethod
    def _check_same_run(recorded: dict, technique: str, config: Any, out: Path) -> None:
        if recorded["technique"] != technique:
            raise RunError(f"{out} holds a run of {recorded['technique']}, not of {technique}; choose another --out")
        new = flatten(_plain(config))
        try:  # a run of an earlier version has settings of before, and lacks those that are new
            old = flatten(_plain(fill(type(config), recorded["config"])))
        except RunError:
            old = flatten(recorded["config"])
        for key in [*new, *(key for key in old if key not in new)]:
            if old.get(key, "nothing") != new.get(key, "nothing"):
                raise RunError(
                    f"{out} was started with {key} = {old.get(key, 'nothing')}, not "
                    f"{new.get(key, 'nothing')}; resume with the same settings or choose another --out"
                )

    def path(self, *parts: str) -> Path:
        """A path inside the run folder; creates its parent folder."""
        path = self.root.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def stage(self, name: str, total: float, unit: str = "tokens") -> Stage:
        """The stage `name`. Its progress counts up to `total` steps; its speed is shown in `unit`s per second.

        Raises RunError if the stage is finished but its files have changed since.
        """
        stage = Stage(self, name, total, unit)
        self._stages.append(stage)
        return stage

    def track(self, scalars: dict[str, float], step: int) -> None:
        """Hands metrics to trackio or wandb, if the command asked for one."""
        if not self._has_tried_tracker:
            self._has_tried_tracker, self._tracker = (
                True,
                open_tracker(self.root, self.technique, flatten(_plain(self.config)), self.resumed),
            )
        if self._tracker:
            self._tracker.add(scalars, step)

    def seconds(self) -> dict[str, float]:
        """Wall-clock seconds by stage, without interruptions, but with repeated work."""
        return sum_stage_seconds(self.root)

    def close(self) -> None:
        """Stops the progress bar and releases the folder."""
        for stage in self._stages:
            stage.close()
        if self._tracker:
            self._tracker.close()
            self._tracker = None
        if self._lock is not None:
            _held_locks.discard(self._lock)
            os.close(self._lock)
            self._lock = None

    def abandon(self) -> None:
        """Removes the files of this run if it was new and has neither a finished stage nor a checkpoint, nor a run
        inside."""
        patterns = ("stages/*.json", "state/*.json", "*/config.json", "*/*/config.json")
        if self.resumed or any(path.is_file() for pattern in patterns for path in self.root.glob(pattern)):
            return
        for stage in self._stages:
            stage.close()
        if self._tracker:
            self._tracker.close()
            self._tracker = None
        for name in ("metrics", "state", "stages", "checkpoints", "rollouts", "tensorboard", "wandb", "data"):
            shutil.rmtree(self.root / name, ignore_errors=True)
        for name in ("config.json", "code.json", "timings.jsonl", "lock"):
            (self.root / name).unlink(missing_ok=True)
        _remove_empty(self._new_folders)

    @contextlib.contextmanager
    def report_interruption(self, resume_command: str) -> Iterator[None]:
        """Turns an early end of the block into a one-line message, with the command `resume_command` if it can continue
        this run. A new run without results leaves no files. Raises Interrupted for Ctrl-C and RunError for a full disk;
        other exceptions pass through."""
        try:
            yield
        except KeyboardInterrupt:
            self.close()
            raise Interrupted(f"interrupted; continue with: {resume_command}") from None
        except Exception as error:
            disk_error = refusal(error)
            if disk_error is None and not isinstance(error, RunError):
                raise
            self.abandon()
            if disk_error is None:
                raise
            if disk_error.errno in NO_ROOM:
                hint = (
                    f"; free some space, then continue with: {resume_command}"
                    if (self.root / "config.json").exists()
                    else ""
                )
                raise RunError(f"{disk_error.strerror}: {disk_error.filename or self.root}{hint}") from None
            raise disk_error from None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _remove_empty(folders: Iterable[Path]) -> None:
    """Removes empty folders upwards, up to the first that is not empty."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of nested dicts, by dotted key."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}.{key}" if prefix else key)
    return flat


class Stage:
    """One resumable part of a run. Used like this, it survives a kill at any moment:

        stage = run.stage("rl", total=200)
        if stage.finished:
            return stage.result()
        state = stage.restore()                        # None: start from the beginning
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
        self._earlier_seconds = run.seconds().get(name, 0.0)
        self.start_time = self._saved_at = time.perf_counter()
        self._saved_manifests: list[Path] = []
        self._metrics: Journal | None = None
        self._digest, self._offset = hashlib.sha256(), 0
        self.board: Board | None = None
        self._has_tried_board = False
        self._closed = False
        self._bar = Progress(self)
        self._record: dict | None = None
        if self._record_path.exists():
            self._record = self._check_finished()
            self._drop_states(keep=[])

    # -- a finished stage

    @property
    def finished(self) -> bool:
        """Whether this process or an earlier one finished the stage."""
        return self._record is not None

    def result(self) -> dict:
        """The result passed to `finish`, after a round trip through JSON."""
        if self._record is None:
            raise RuntimeError(f"stage {self.name} is not finished")
        return self._record["result"]

    def finish(self, result: dict, files: Iterable[str | Path] = ()) -> dict:
        """Ends the stage with `result` and drops its checkpoints. Returns the result after a round trip through JSON.

        `files`: files or folders in the run folder that the stage made. They are recorded with their hashes and
        checked before a resumed run relies on them.
        """
        self._open_metrics().sync()
        paths = []
        for path in map(Path, files):
            paths += sorted(item for item in path.rglob("*") if item.is_file()) if path.is_dir() else [path]
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
        self._bar.last()
        self.note_time(finished=True, peak_memory_gib=round(peak_memory_gib(), 3))
        self._record = record = parse_json(json.dumps(record))
        atomic_write(self._record_path, json.dumps(seal_record(record), indent=1) + "\n")
        self._drop_states(keep=[])
        self.close()
        return record["result"]

    def _check_finished(self) -> dict:
        path = self._record_path
        record = read_record(path, RECORD, f"delete it to run stage {self.name} again", "stage")
        for name, entry in record["files"].items():
            if defect := what_is_wrong(self.run.root / name, entry["bytes"], entry["sha256"]):
                raise RunError(
                    f"{self.run.root / name} is damaged ({defect}); delete {path} to run stage {self.name} again"
                )
        return record

    # -- checkpoints

    def _list_manifests(self) -> list[Path]:
        """Manifests of the saved checkpoints, newest first."""
        folder = self.run.root / "state"
        manifests = [path for path in folder.glob(f"{self.name}-*.json") if path.stem[len(self.name) + 1 :].isdigit()]
        return sorted(manifests, key=lambda path: -int(path.stem[len(self.name) + 1 :]))

    def _drop_states(self, keep: list[Path]) -> None:
        folder, names = self.run.root / "state", {path.stem for path in keep}
        for manifest in self._list_manifests():  # manifests first: a checkpoint without one does not count
            if manifest.stem not in names:
                manifest.unlink()
        for state in folder.glob(f"{self.name}-*.pt"):
            if state.stem not in names and state.stem[len(self.name) + 1 :].isdigit():
                state.unlink()

    def restore(self) -> dict | None:
        """The newest undamaged state, or None at the beginning; truncates the metrics file to match it.

        Prints the reason for each damaged checkpoint on stderr. Raises RunError if every checkpoint is damaged.
        """
        damaged: list[str] = []
        for manifest in self._list_manifests():
            state = manifest.with_suffix(".pt")
            try:
                record = read_record(manifest, MANIFEST, "")
            except DamagedFile as error:
                damaged.append(
                    f"checkpoint {state} is damaged (its manifest {manifest.name} is unreadable: {error.reason})"
                )
                continue
            offset, prefix = record["metrics_bytes"], record["metrics_sha256"]
            if defect := what_is_wrong(state, record["bytes"], record["sha256"]):
                damaged.append(f"checkpoint {state} is damaged ({defect})")
                continue
            if defect := what_is_wrong(self.metrics_path, offset, prefix, prefix=True):
                damaged.append(f"metrics {self.metrics_path} are damaged ({defect}) for checkpoint {state}")
                continue
            state_dict = _load_state(state)
            for line in damaged:
                _warn(f"error: {line}; continuing from {state.name}")
            self._saved_manifests = [manifest]
            self._open_metrics(offset, record["step"])
            return state_dict
        if damaged:
            # Two lines would hide which file to act on, so report the newest checkpoint only.
            raise RunError(
                f"{damaged[0]}, and no earlier one is intact; delete "
                f"{self.run.root / 'state'}/{self.name}-* to start stage {self.name} again"
            )
        self._open_metrics()
        return None

    def save(self, state: dict, step: int) -> None:
        """Saves `state` as the checkpoint that a resumed run continues from; keeps the previous one, too.

        Ctrl-C waits until the checkpoint is complete. Raises OSError if the disk is full; earlier checkpoints stay."""
        import torch

        self._open_metrics().sync()
        manifest = self.run.root / "state" / f"{self.name}-{int(step):06d}.json"
        path, temporary = manifest.with_suffix(".pt"), manifest.with_name(f".tmp-{manifest.stem}.pt")
        with uninterrupted():
            try:
                with open(temporary, "wb") as file:
                    hashing = Hashing(file)
                    try:
                        torch.save(state, hashing)  # pyright: ignore[reportArgumentType] – torch.save only writes to it
                    except RuntimeError as error:
                        raise hashing.failed or error from None
                    file.flush()
                    os.fsync(file.fileno())
                manifest.unlink(
                    missing_ok=True
                )  # the manifest of an earlier attempt at this step would not match the new file
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
            atomic_write(manifest, json.dumps(seal_record(record)) + "\n")
        self._saved_manifests = [saved for saved in self._saved_manifests if saved != manifest][-1:] + [manifest]
        self._drop_states(keep=self._saved_manifests)
        self._saved_at = time.perf_counter()

    def due(self) -> bool:
        """Whether the last save was at least `checkpoint_seconds` ago. Saving does not change any result, so the clock
        may decide."""
        return time.perf_counter() - self._saved_at >= self.run.checkpoint_seconds

    # -- metrics

    def _open_metrics(self, offset: int = 0, step: int = 0) -> Journal:
        """Opens the metrics file, truncated to `offset` bytes; a stage that was not restored starts with an empty
        file."""
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
        """Appends one line of metrics. Values may depend on configuration and step only, never on the clock."""
        journal = self._open_metrics()
        plain = _plain(metrics)
        line = (json.dumps({"step": int(step), **plain}) + "\n").encode()
        journal.append(line)
        self._digest.update(line)
        self._offset += len(line)
        if not self._has_tried_board:
            self._has_tried_board, self.board = True, open_board(self.run.root / "tensorboard" / self.name, self._step)
        scalars = {f"{self.name}/{name}": value for name, value in plain.items() if type(value) in (int, float)}
        if self.board:
            self.board.add(scalars, int(step))
        self.run.track(scalars, int(step))

    def progress(self, step: float, rate_units: float | None = None, **values: Any) -> None:
        """Moves the progress bar to `step` of the total.

        `rate_units`: number of `unit`s (tokens) that the stage has processed so far, for the speed; default `step`.
        `values`: other values for the line, such as loss or reward; numbers are shortened.
        """
        self._bar.update(step, step if rate_units is None else rate_units, values)

    def say(self, line: str) -> None:
        """Prints a line that stays on screen, above the progress bar."""
        self._bar.say(line)

    @property
    def seconds(self) -> float:
        """Wall-clock seconds spent in this stage, including earlier processes."""
        return self._earlier_seconds + time.perf_counter() - self.start_time

    def note_time(self, **facts: Any) -> None:
        """Adds a line to timings.jsonl: the seconds so far, and `facts`."""
        line = json.dumps({"stage": self.name, "seconds": round(self.seconds, 3), **facts}) + "\n"
        with contextlib.closing(Journal(self.run.root / "timings.jsonl")) as journal:
            journal.append(("\n" if journal.torn() else "").encode() + line.encode())

    def close(self) -> None:
        """Stops the bar and closes the files; keeps what was saved."""
        self._closed = True
        self._bar.stop()
        for open_file in filter(None, (self._metrics, self.board)):
            open_file.close()
        self._metrics = self.board = None


def _load_state(path: Path) -> dict:
    """Loads a saved state. Only tensors and plain values are accepted, so a shared run folder cannot execute code."""
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
        raise RunError(f"checkpoint {path} holds more than tensors and plain values; refusing to load it") from None
    except (RuntimeError, EOFError) as error:  # other archives that PyTorch can open, including programs
        raise RunError(
            f"checkpoint {path} is not a saved state ({type(error).__name__}); refusing to load it"
        ) from None
