"""Metrics as TensorBoard events.

The process that logs them also writes them. torch's SummaryWriter writes in a thread, which prints a traceback when the
disk is full."""

from __future__ import annotations

import io
import itertools
import os
import time
from pathlib import Path
from typing import Any

from kit.disk import Journal

__all__ = ["Board", "open_board"]

_numbers = itertools.count()


class Board:
    """One file of events. Needs TensorBoard."""

    def __init__(self, folder: Path, step: int) -> None:
        """`step`: events after it replace those of earlier files in the folder; 0 if there are no earlier files."""
        from tensorboard.compat.proto import event_pb2

        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files in the order of their names.
        self.journal = Journal(folder / f"events.out.tfevents.{time.time():017.6f}.{os.getpid()}.{next(_numbers)}")
        self.write(file_version="brain.Event:2")
        if step:
            self.write(
                step=step + 1,
                session_log=event_pb2.SessionLog(  # pyright: ignore[reportAttributeAccessIssue]
                    status=event_pb2.SessionLog.START  # pyright: ignore[reportAttributeAccessIssue]
                ),
            )

    def add(self, scalars: dict[str, float], step: int) -> None:
        """Adds values by tag at a step. Raises OSError when the disk is full."""
        from tensorboard.compat.proto import summary_pb2

        values = [
            summary_pb2.Summary.Value(tag=tag, simple_value=value)  # pyright: ignore[reportAttributeAccessIssue]
            for tag, value in scalars.items()
        ]
        self.write(step=step, summary=summary_pb2.Summary(value=values))  # pyright: ignore[reportAttributeAccessIssue]

    def write(self, **facts: Any) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        event = event_pb2.Event(wall_time=time.time(), **facts)  # pyright: ignore[reportAttributeAccessIssue]
        RecordWriter(record).write(event.SerializeToString())
        self.journal.append(record.getvalue())

    def close(self) -> None:
        self.journal.close()


def open_board(folder: Path, step: int) -> Board | None:
    """A board, or None if TensorBoard is not installed."""
    try:
        return Board(folder, step)
    except ImportError:
        return None
