"""How far a hint moves a checkpoint's prediction of the reply that it is about: the loss of ref/textual_feedback.py,
without training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from etude.play.play import Agent, agent_in, is_checkpoint
from kit.settings import RunError
from recipe.small.chat_template import Template, template_of
from ref import sft
from ref.textual_feedback import Hinted, divergence, predictions

__all__ = ["moves", "sequences"]

Tokens = torch.Tensor


def encode_reply(messages: list[dict], row: dict, render: Template, agent: Agent) -> tuple[Tokens, Tokens]:
    """The ids [T] of messages and the reply behind them, and the positions of the reply's. Raises ValueError where its
    place cannot be told."""
    before = [message | {"weight": 0} if message["role"] == "assistant" else message for message in messages]
    chat = sft.chat_of({"messages": [*before, row["message"]], "tools": row["tools"]})
    ((ids, own),) = sft.tokens_and_mask(chat, render, agent.language.tokenizer)
    return ids, own.nonzero()[:, 0]


def sequences(row: dict, render: Template, agent: Agent) -> tuple[Tokens, Hinted]:
    """The student's ids [T], and the teacher's with the places of the same tokens in both. Raises ValueError where the
    template does not write the reply with the same tokens behind the hint."""
    student, teacher = (
        encode_reply(row["student"], row, render, agent),
        encode_reply(row["teacher"], row, render, agent),
    )
    if not torch.equal(student[0][student[1]], teacher[0][teacher[1]]):
        raise ValueError("the chat template renders the reply differently after the hint")
    return student[0], Hinted(teacher[0], student[1], teacher[1])


def moves(folder: Path) -> Callable[[dict], Iterator[str]]:
    """A function from a hint, as `environments.harness.hints.row` gives it, to a line about the checkpoint in a folder.
    Raises RunError where none lies there that reads conversations."""
    if not is_checkpoint(folder):
        raise RunError(f"{folder} is not a checkpoint; a run has some in its folder checkpoints/")
    agent = agent_in(folder)
    render, model = template_of(folder, agent.language), agent.network().eval()

    @torch.no_grad()
    def move(row: dict) -> Iterator[str]:
        try:
            student, teacher = sequences(row, render, agent)
        except ValueError as error:
            yield f"no KL, because {error}"
            return
        plain, hinted = (model(ids[None]).logits[0] for ids in (student, teacher.tokens))
        without_hint, with_hint = predictions(plain, hinted, teacher)
        divergences = divergence(without_hint, with_hint, "reverse").double()
        yield (
            f"KL {divergences.sum():.4f} nats over {len(divergences)} tokens, {divergences.mean():.4f} a token, from "
            "the prediction without the hint to that with it"
        )

    return move
