"""What the page of continued pretraining shows: a schedule, packed rows, the metrics of a run, and the record of `etude
figure cpt-rl`."""

import itertools
import math
import random
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from etude.explorer import provenance
from etude.explorer.files import parsed, stamp
from etude.explorer.page import ROOT
from etude.report.record import joined_lines
from kit.disk import read_lines
from kit.settings import RunError
from recipe.microrepo import documents
from recipe.small.learner import RATES
from ref import cpt
from ref.network import Config, Transformer

__all__ = [
    "AFTER",
    "PHASES",
    "RECORD",
    "UNITS",
    "coder",
    "looks",
    "losses",
    "packed",
    "read",
    "schedule",
    "scored",
    "trainings",
]

PHASES = {"cpt": "short context", "long": "long context", "sft": "demonstrations"}
UNITS = ("perplexity a token", "nats a token", "bits a token", "bits a byte")
"""Columns of `looks`. Only the last can be compared between tokenizers."""
RECORD = ROOT / "results" / "figures" / "cpt-rl.json"
AFTER = {
    "success after RL": ("success_after", "loss-success"),
    "reward of RL's last steps": ("reward_last", "loss-reward"),
    "success before RL": ("success_before", None),
}
"""What a loss may be held against: column of the record, and its claim."""


def schedule(steps: dict[str, int]) -> list[dict]:
    """The factor of the learning rate at every optimiser step of the recipe's supervised phases, of so many steps
    each."""
    rows, previous_steps = [], 0
    for phase, count in steps.items():
        rows += [
            {"step": previous_steps + step + 1, "phase": PHASES[phase], "factor": RATES[phase](step, count)}
            for step in range(count)
        ]
        previous_steps += count
    return rows


@lru_cache(4)
def coder(path: Path, changed: int, size: int):
    """The tokenizer in a file with this stamp. Raises RunError if it holds none."""
    try:
        return cpt.load_tokenizer(path)
    except ValueError as error:
        raise RunError(str(error)) from None


@lru_cache(16)
def packed(tokenizer: tuple[Path, int, int], length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """ids and doc [rows, length] of forty modules of the small world, as `ref/cpt.py` packs them; each ends with the
    end of a document."""
    encode = coder(*tokenizer).encode
    return cpt.pack([[*encode(text).ids, 0] for text in itertools.islice(documents(random.Random(seed)), 40)], length)


class Linear(Transformer):
    """A network whose log-probs are the first number of what they are computed from, so that a loss's gradient says
    which of them it counts."""

    def logprob(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return hidden[:, 0]


@lru_cache(4)
def make_linear(vocabulary: int) -> Linear:
    """One with so many tokens, and otherwise as small as can be."""
    return Linear(Config.tiny(vocabulary, num_hidden_layers=1, num_experts=0))


def scored(ids: Tensor, doc: Tensor | None) -> Tensor:
    """Which tokens of ids [B, T] `next_token_loss` scores, bool [B, T]: those on whose log-prob its loss depends."""
    model = make_linear(int(ids.max()) + 1)
    hidden = torch.zeros(*ids.shape, model.config.hidden_size, requires_grad=True)
    loss, _ = cpt.next_token_loss(model, hidden, ids, doc)
    (gradient,) = torch.autograd.grad(loss, hidden)
    return torch.cat((torch.zeros(len(ids), 1, dtype=torch.bool), gradient[:, :-1, 0] != 0), 1)


def read(root: Path) -> dict[str, list[dict]]:
    """The metrics of a run's phases. Raises RunError if it has none of pretraining."""
    lines_by_phase = {
        phase: _read_lines(*stamp(path)) for phase in PHASES if (path := root / "metrics" / f"{phase}.jsonl").is_file()
    }
    if not lines_by_phase.get("cpt"):
        raise RunError(f"{root} has no metrics of pretraining")
    return lines_by_phase


@lru_cache(16)
def _read_lines(path: Path, mtime_ns: int, size: int) -> list[dict]:
    return read_lines(path)


def losses(lines: dict[str, list[dict]]) -> list[dict]:
    """Training loss by tokens read, over the phases."""
    joined, _ = joined_lines(lines, *PHASES)
    names = {"short": "short context", "long": "long context", "sft": "demonstrations"}
    return [
        {"tokens": line["tokens"], "phase": names.get(line["phase"], line["phase"]), "nats a token": line["loss"]}
        for line in joined
        if "loss" in line
    ]


def looks(lines: dict[str, list[dict]]) -> list[dict]:
    """The looks at the held-out codebase, in every unit."""
    joined, _ = joined_lines(lines, "cpt", "long")
    return [
        {
            "tokens": line["tokens"],
            **dict(
                zip(
                    UNITS,
                    (ppl := line["codebase_ppl"], math.log(ppl), math.log2(ppl), line["codebase_bpb"]),
                    strict=True,
                )
            ),
        }
        for line in joined
        if line.get("codebase_ppl") and line.get("codebase_bpb")
    ]


@lru_cache(2)
def _read_record(path: Path, mtime_ns: int, size: int) -> dict:
    return parsed(path, {"rows": [dict], "claims": [{"name": str, "claim": str, "verdict": str, "unit": str}]})


def trainings() -> tuple[list[dict], dict[str, dict]]:
    """The trainings of `etude figure cpt-rl`, the user's or the committed one, one row each, and its claims by name."""
    path = provenance.newest(RECORD)
    try:
        record = _read_record(*stamp(path))
    except (OSError, ValueError) as error:
        raise RunError(f"{path.name} cannot be read ({error}); make it again with: etude figure cpt-rl") from None
    return [row for row in record["rows"] if row.get("part") == "training"], {
        claim["name"]: claim for claim in record["claims"]
    }
