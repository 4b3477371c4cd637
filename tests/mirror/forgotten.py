"""Plays full trainings on a GPU that is not there (tests/pretend.py), and prints their metrics:
`python -m tests.mirror.forgotten FOLDER CHECKPOINTS`."""

import json
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from etude.run import settings as full_settings
from recipe.small.micro_world import CheckpointTasks
from scaled import pretrain, rl
from scaled.runtime.checkpoint import Checkpoints
from scaled.runtime.mesh import mesh
from tests import pretend

TEXT = (
    f"corpus={Path(__file__).resolve().parents[2] / 'kit'}",
    "rows=2",
    "length=64",
    "perplexity_tokens=64",
    "steps=1",
    "warmup=0",
    "decay=1",
)
WORLD = (
    "heldout=0",
    "rl.steps=1",
    "rl.prompts=1",
    "rl.rollouts=2",
    "rl.warmup=0",
    "rl.decay=0",
    "rl.max_len=160",
    "length=160",
    "micro_rows=4",
)
TRAININGS = {
    "mtp": ("mid-cpt", TEXT),
    "quant": ("mid-cpt", (*TEXT, "experts=mxfp8", "dispatch=mxfp8")),
    "self-summary": (
        "sft",
        (*WORLD, "dtype=float32", "sampler_dtype=float32", "rl.replay=filtered", "rl.payment.kl=0.1", "sync=store"),
    ),
}


def main(folder: Path, checkpoints: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    told = {}
    # torch.distributed.checkpoint copies from devices that it knows.
    with mock.patch.object(Checkpoints, "save", lambda *_: None), pretend.gpu():
        for technique, (start, sets) in TRAININGS.items():
            c = full_settings.settings(technique, "gloo", {}, [f"checkpoint={checkpoints / start}", *sets])
            with mesh(**full_settings.layout(c, 1)):
                if technique in full_settings.RL:
                    tasks = CheckpointTasks(c)
                    told[technique] = rl.train(technique, c, folder / technique, tasks, tasks.language, tasks.limits)
                else:
                    told[technique] = pretrain.train(technique, c, folder / technique)
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
