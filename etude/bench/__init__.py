"""`etude bench`: one file for each benchmark; results go to results/."""

import json
import re
from pathlib import Path

from kit.disk import atomic_write

__all__ = ["machine_with_gpu", "write_record"]


def machine_with_gpu() -> dict:
    """`kit.process.machine`, and the GPU where there is one."""
    import torch

    from kit.process import machine

    return machine() | (
        {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda} if torch.cuda.is_available() else {}
    )


def write_record(record: dict, out: Path | None, kind: str, device: str) -> dict:
    """Returns the record. If a folder `out` is given, first writes it to out/KIND-DEVICE.json and prints the path."""
    if out is not None:
        name = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", device.lower())).strip("-")
        path = Path(out) / f"{kind}-{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps(record, indent=1) + "\n")
        print(f"written: {path}")
    return record
