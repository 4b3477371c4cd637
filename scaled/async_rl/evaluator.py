"""The evaluator: it follows the versions that are published and measures each, in a process of its own and at low
priority.

It speaks with nobody and is waited for by nobody: it looks into the store, and takes the newest version that is due. If
measuring takes longer than `every` steps, versions are skipped. It ends when the run does, in the middle of a
measurement too.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kit.disk import read_lines
from ref import weight_sync
from ref.engine.sampler import Sampler
from scaled.async_rl.services import Log, no_room, open_stores, pause

__all__ = ["Evaluate", "evaluate", "read_measurements"]

Evaluate = Callable[[Sampler], float]
"""A sampler that holds a version → its success, for instance the share of held-out tasks that it solves."""

LOOK = 0.25
"""Seconds between two looks into the store."""


def evaluate(folder: Path, epoch: int, store: str, sampler: Sampler, measure: Evaluate, every: int, steps: int) -> None:
    """Measures versions 0, `every`, 2·`every` … as far as it keeps up, until the last one of `steps`. Raises OSError
    for a full disk; a store that does not answer is asked again."""
    os.nice(10)
    measurements = read_measurements(folder)
    log, last = Log(folder, "evaluator", epoch), int(max((line["version"] for line in measurements), default=-every))
    log("start")
    start_time = read_lines(folder / "events" / "evaluator.jsonl")[0]["at"]
    served_model = copy.deepcopy(sampler.model).bfloat16()
    reader = weight_sync.Reader(open_stores(store).weights, weight_sync.parts(served_model), "evaluator")
    failures = 0
    while last + every <= steps:
        time.sleep(LOOK)
        try:
            reader.read_manifests()
            due_version = max((version for version in reader.manifests if version % every == 0), default=-1)
            if due_version <= last:
                continue
            reader.fetch(due_version)
            reader.swap()
        except (OSError, weight_sync.SyncError) as error:
            if no_room(error):
                raise
            failures += 1
            log("unsynced", why=str(error))
            reader.manifests.clear()
            time.sleep(pause(failures))
            continue
        failures = 0
        sampler.load(served_model, due_version)
        log("load", version=due_version)
        with torch.inference_mode():
            success = float(measure(sampler))
        log("evaluated", version=due_version, success=success, seconds=round(time.time() - start_time, 3))
        last = due_version
    log("stop")


def read_measurements(folder: Path) -> list[dict]:
    """What the evaluator of a run has measured so far: `version`, `success`, and `seconds` since it first started,
    interruptions included."""
    return [line for line in read_lines(folder / "events" / "evaluator.jsonl") if line["what"] == "evaluated"]
