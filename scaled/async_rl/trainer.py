"""The trainer: a loop that speaks with the reconciler, and has each step done by this process or by a group of ranks
(`group.py`).

A version is published by a thread while the next step is computed. A step waits for the store only if that has not
taken the version before yet."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from scaled.async_rl import services
from scaled.async_rl.messages import Batch, Published, Ready, Refused, Repair, Stop, Trained, Workers, decode, encode
from scaled.async_rl.services import BEAT, GivenUp, Learner, Log, Publisher, Stores, ages, retry_store_call
from scaled.async_rl.wire import ConnectionLost, Line, Port

if TYPE_CHECKING:
    from scaled.watching import Look

__all__ = ["Alone", "Work", "train"]


class Work(Protocol):
    """What `train` has done: by this process (`Alone`), or by a group of ranks (`group.Rank`)."""

    def restored(self) -> tuple[int, tuple[int, ...]]:
        """Steps done, and the groups of the last one, after what is trained has been restored; 0 and none at the
        beginning."""
        ...

    def step(self, version: int, batch: Batch) -> dict[str, float]:
        """Reads groups, trains on them, and saves step `version` + 1. Returns its metrics."""
        ...

    @property
    def publisher(self) -> Publisher:
        """Of this process."""
        ...

    def publish(self, version: int, anew: bool = False) -> None:
        """As `Publisher.publish`."""
        ...

    def start(self, version: int, on_visible: Callable[[], None]) -> None:
        """As `Publisher.start`."""
        ...


class Alone:
    """`Work` of a trainer that is one process."""

    def __init__(
        self, folder: Path, learner: Learner, stores: Stores, log: Log, patience: float, look: Look | None = None
    ):
        """patience: seconds that the store may be down. look: the monitor."""
        self.save_folder, self.learner, self.stores, self.log, self.patience = (
            folder / "trainer",
            learner,
            stores,
            log,
            patience,
        )
        self.save_folder.mkdir(exist_ok=True)
        self.look = look
        self.publisher = Publisher(stores.weights, learner, log, patience)

    def restored(self) -> tuple[int, tuple[int, ...]]:
        return services.restored(self.save_folder, self.learner)

    def step(self, version: int, batch: Batch) -> dict[str, float]:
        rollouts = retry_store_call(
            lambda: services.read(self.stores.groups, batch.keys, batch.digests),
            "reading groups",
            self.log,
            self.patience,
        )
        metrics = self.learner.step(rollouts) | ages(rollouts, version)
        metrics |= services.watch_step(self.look, version, range(len(rollouts)), rollouts)
        services.keep(self.save_folder, self.learner, version + 1, batch.groups)
        return metrics

    def publish(self, version: int, anew: bool = False) -> None:
        self.publisher.publish(version, anew)

    def start(self, version: int, on_visible: Callable[[], None]) -> None:
        self.publisher.start(version, on_visible)


def train(
    at: Path | Port,
    epoch: int,
    work: Work,
    log: Log,
    patience: float,
    show: Callable[[int, dict[str, float]], None] = lambda step, metrics: None,
) -> None:
    """The trainer, until it is told to stop. A step counts once its state is saved, and its weights are told once they
    are visible."""

    def announce_version() -> None:
        # Beside a step this loop cannot speak. If the reconciler is gone, the next one hears it when this loop
        # connects.
        with contextlib.suppress(ConnectionLost), contextlib.closing(Line.to(at, patience)) as connection:
            connection.say(encode(Published("trainer", epoch, work.publisher.visible)))

    version, groups = work.restored()
    log("start", version=version)
    work.publish(version)  # the process before this one may have done so: then nothing changes
    while True:
        line = Line.to(at, patience)
        try:
            line.say(encode(Ready("trainer", epoch, version, groups)))
            line.say(encode(Published("trainer", epoch, work.publisher.visible)))
            while True:
                work.publisher.check()
                for data in line.receive(BEAT):
                    message = decode(data)
                    if isinstance(message, Stop):
                        work.publisher.wait()
                        log("stop")
                        return
                    if isinstance(message, Refused):
                        raise GivenUp(message.reason)
                    if isinstance(message, Workers):
                        log("workers", alive=message.alive)
                    elif isinstance(message, Repair) and message.version == version:
                        work.publish(version, anew=True)
                    elif isinstance(message, Batch) and message.version == version:
                        log("train", version=version)
                        metrics = work.step(version, message)
                        version, groups = version + 1, message.groups
                        log("saved", version=version, **metrics)
                        work.start(version, announce_version)
                        log("publishing", version=version)
                        show(version, metrics)
                        line.say(encode(Trained("trainer", epoch, version - 1, groups)))
                        line.say(encode(Ready("trainer", epoch, version, groups)))
        except ConnectionLost:
            log("lost")
        finally:
            line.close()
