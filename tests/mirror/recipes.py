"""The command of a full recipe on two ranks, as small as it gets."""

from pathlib import Path

from kit.disk import hash_file
from kit.runs import flatten
from sims.policies import SMOKE
from tests import forks

ROOT = Path(__file__).resolve().parents[2]
SETS = {
    key: ",".join(map(str, value)) if isinstance(value, tuple) else value
    for key, value in flatten(SMOKE).items()
    if not key.startswith("model.")
}
CLUSTER = {"ep": 2, "micro_rows": 2, "checkpoint_every": 2}


def words(out: Path, checkpoint: Path, *more: object, technique: str = "recipe") -> list[object]:
    sets = (f"{key}={value}" for key, value in SETS.items())
    start = [
        "run",
        technique,
        "--scale",
        "full",
        "--backend",
        "gloo",
        "--nproc",
        "2",
        "--out",
        out,
        "--checkpoint",
        checkpoint,
    ]
    return [*start, "--corpus", forks.CORPUS, *(word for one in sets for word in ("--set", one)), *more]


def hash_results(out):
    """File of a run on packages → its SHA-256: metrics, checkpoints, episodes, evaluations."""
    files = (
        *out.glob("metrics/*.jsonl"),
        *out.glob("checkpoints/*/*.safetensors"),
        *out.glob("episodes/*/*.jsonl"),
        *(out / "stages" / f"{stage}.json" for stage in ("measure", "eval")),
    )
    return {str(path.relative_to(out)): hash_file(path) for path in files}
