"""Scorer of challenge 1: held-out loss on a domain after 150 steps of continued pretraining with the reader's schedule
and mix.

Texts come from two sources of words. The domain follows the general source after three words of four, and has rules of
its own after the others. General text never ends; of the domain there are a few rows. Sources are known exactly, and so
is the least loss that any model can have."""

from __future__ import annotations

import numpy as np
import torch

from kit.process import one_thread
from kit.settings import RunError
from lessons.challenges import answers
from lessons.challenges.solution import Solves
from ref.cpt import next_token_loss
from ref.network import Config, Transformer

__all__ = ["score"]

STEPS, ROWS, LENGTH, WORDS, OWN_ROWS, HELD_ROWS, FASTEST = 150, 8, 48, 48, 24, 64, 1.0


def draw_chances(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Chances of the next word after each word, [rows, WORDS]."""
    return rng.dirichlet(np.full(WORDS, 0.08), rows)


def draw_text(rng: np.random.Generator, chances: np.ndarray, rows: int) -> np.ndarray:
    """Rows of words, [rows, LENGTH + 1]."""
    tokens, ends = rng.integers(0, WORDS, (rows, LENGTH + 1)), chances.cumsum(1)
    for t in range(1, LENGTH + 1):
        tokens[:, t] = (rng.random((rows, 1)) > ends[tokens[:, t - 1]]).sum(1).clip(max=WORDS - 1)
    return tokens


def score(solution: Solves, seed: int) -> float:
    """Loss on held-out text of the domain, less that of the source itself, in nats a token."""
    plan = answers.array("plan", solution("plan", STEPS), STEPS, 2)
    if plan.min() < 0 or plan[:, 0].max() > FASTEST or plan[:, 1].max() > 1:
        raise RunError(f"plan must return learning rates from 0 to {FASTEST:g}, and shares from 0 to 1")
    rng = np.random.default_rng(seed)
    general = draw_chances(rng, WORDS)
    domain = np.where(rng.random((WORDS, 1)) < 0.75, general, draw_chances(rng, WORDS))
    own, heldout = draw_text(rng, domain, OWN_ROWS), draw_text(rng, domain, HELD_ROWS)
    least = float(-np.log(domain[heldout[:, :-1], heldout[:, 1:]]).mean())
    try:
        with one_thread():
            return train(rng, plan, general, own, heldout, seed) - least
    except ValueError:
        raise RunError("plan destroys the model: its loss is no number any more; lower the learning rate") from None


def train(
    rng: np.random.Generator, plan: np.ndarray, general: np.ndarray, own: np.ndarray, heldout: np.ndarray, seed: int
) -> float:
    """Trains a small network and returns its loss on `heldout`, in nats a token. Raises ValueError once that is no
    number."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        shape = Config.tiny()
        sized = dict(
            vocab_size=WORDS,
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=24,
        )
        model = Transformer(
            Config(
                **{
                    **vars(shape),
                    **sized,
                    "num_experts": 0,
                    "intermediate_size": 96,
                    "max_position_embeddings": LENGTH + 1,
                }
            )
        )
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    for rate, share in plan.tolist():
        domain_rows = int(rng.binomial(ROWS, share))
        ids = torch.from_numpy(
            np.concatenate([own[rng.integers(0, OWN_ROWS, domain_rows)], draw_text(rng, general, ROWS - domain_rows)])
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        total, count = next_token_loss(model, model(ids).hidden, ids)
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        ids = torch.from_numpy(heldout)
        total, count = next_token_loss(model, model(ids).hidden, ids)
    return float(total) / count
