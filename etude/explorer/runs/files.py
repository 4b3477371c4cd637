"""Any run on disk as it is now. A run is read again only when one of its files has changed.

whole(found)        the current runs in these folders, newest first, and a line for each that is broken
load(name, place)   one of them
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from etude.explorer.provenance import EXAMPLE
from etude.explorer.runs.kinds import RunData, read
from kit.settings import RunError

__all__ = ["load", "load_runs"]

FILES = (
    "*.json",
    "timings.jsonl",
    "stages/*.json",
    "metrics/*.jsonl",
    "rollouts/[!.]*.json",
    "services/events/trainer.jsonl",
)
"""Files of a run that the page depends on."""


def load_runs(folders: Mapping[str, Path]) -> tuple[list[RunData], list[str]]:
    """The current runs in these folders, newest first and committed ones last, and an error line for each broken
    run."""
    runs, error_messages = [], []
    for name, place in folders.items():
        try:
            runs.append(load(name, place))
        except RunError as error:
            error_messages.append(str(error))
    return sorted(runs, key=lambda run: (_rank_origin(run), -run.touched)), error_messages


def _rank_origin(run: RunData) -> int:
    """0 for a run on this machine, 1 for the committed example, 2 for a committed record."""
    return 2 if run.place.suffix == ".json" else int(run.name == EXAMPLE)


def load(name: str, place: Path) -> RunData:
    """A run as it is on disk now. Raises RunError if files are missing or damaged."""
    try:
        files = [place] if place.suffix == ".json" else sorted(path for part in FILES for path in place.glob(part))
        return _load(name, place, tuple((path, path.stat().st_mtime_ns, path.stat().st_size) for path in files))
    except (OSError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise RunError(f"{place} is not in the format of a run ({type(error).__name__}: {error})") from None


@lru_cache(256)
def _load(name: str, place: Path, stamp: tuple) -> RunData:
    return read(name, place, max((ns / 1e9 for _, ns, _ in stamp), default=0.0))
