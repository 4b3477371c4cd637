"""The small world as the environment of a full run of RL: a `ref.rl.World` for `scaled/rl.py`, which plays batches, and a
`scaled.async_rl.player.Scene`, which is asked for one conversation at a time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from kit.disk import read_json
from kit.settings import RunError, fill
from ref.cpt import load_tokenizer
from ref.engine.sampler import Sampler
from ref.rl import Played, Settings
from ref.self_summary import Chain
from ref.textual_feedback import Hint
from ref.transcript import Transcript
from sims.hints import given
from sims.microrepo import Session, Task
from sims.recipe.agent import Episode, Language, pay, play
from sims.recipe.data import task_stream
from sims.recipe.demonstrations import context
from sims.recipe.settings import Recipe
from sims.transcripts import priced, transcript_of

__all__ = ["MicroWorld"]


class Asked(Protocol):
    """The settings of a training run that the world needs."""

    @property
    def checkpoint(self) -> str | None: ...

    @property
    def length(self) -> int: ...

    @property
    def join(self) -> Any: ...

    @property
    def rl(self) -> Settings: ...


class MicroWorld:
    """Tasks of repairing tiny programs, with the tokens of the checkpoint's tokenizer. Contexts and tasks are as in `recipe`; without it, as in the
    run of the recipe that the checkpoint comes from (`origin`), else the recipe's defaults. Raises RunError for a tokenizer without role
    tokens, or if `c.length` is too short for a context; `length` is what the user calls that setting. `tool_s`: mean time of a tool in seconds,
    log-normal with σ = 1, for runs that do not wait for each other; a tool of the small world itself takes microseconds."""

    def __init__(self, c: Asked, recipe: Recipe | None = None, length: str = "length", tool_s: float = 0.0):
        assert c.checkpoint is not None
        self.tool_s = tool_s
        path = Path(c.checkpoint) / "tokenizer.json"
        self.language = Language(load_tokenizer(path))
        if None in (self.language.env, self.language.agent):
            raise RunError(
                f"{path} has no tokens <|env|> and <|agent|>, nor those of a chat: the small world needs a policy that was trained in it; "
                "etude run recipe --scale small writes one to checkpoints/sft"
            )
        self.root, settings = origin(Path(c.checkpoint))
        self.recipe = recipe or fill(Recipe, settings)
        rl = replace(self.recipe.rl, max_len=c.rl.max_len)
        self.how = context(self.language, replace(self.recipe, rl=rl, context=replace(self.recipe.context, join=c.join)))
        if self.how.limit > c.length:
            raise RunError(f"{length} must hold a context of {self.how.limit} tokens, got {c.length}; see --set {length}=…")
        self.payment, self.temperature = c.rl.payment, c.rl.temperature
        self.prices, self.watched = c.rl.behaviour, c.rl.monitor.on
        self.streams: dict[str, tuple[Iterator[Task], list[Task]]] = {}
        prompt = len(Episode(self.language, Session(self.task("rl", 0))).prompt)
        self.hinted, feedback = bool(c.rl.feedback.weight), self.recipe.rl.feedback
        if self.hinted and feedback.source == "shuffled":
            raise RunError("rl.feedback.source=shuffled exchanges hints between all rollouts of a step, and a rank sees its own; use --scale small")
        if prompt + 1 >= self.how.limit:
            raise RunError(f"a prompt has about {prompt} tokens; contexts of {self.how.limit} leave no room for an answer; see --set rl.max_len=…")

    def task(self, stream: str, number: int) -> Task:
        """A task of a stream. Generates all earlier tasks on the way, which costs nothing compared with playing one."""
        use = "evaluation" if stream == "heldout" else stream
        source, known = self.streams.setdefault(stream, (iter(task_stream(self.recipe, use)), []))
        known += itertools.islice(source, max(0, number + 1 - len(known)))
        return known[number]

    def play(self, sampler: Sampler, stream: str, tasks: Sequence[int], generator: torch.Generator) -> list[Played]:
        """`ref.rl.World`."""
        chosen = [self.task(stream, n) for n in tasks]
        episodes = play(sampler, self.language, chosen, 1, self.how, self.recipe.rl.max_turns, generator, self.temperature)
        hints = given(episodes, 0, self.recipe.rl.feedback) if self.hinted else [[]] * len(episodes)
        records = [transcript_of(*pair) if self.watched and stream == "rl" else None for pair in zip(episodes, chosen, strict=True)]
        return [self.paid(*one) for one in zip(episodes, chosen, hints, records, strict=True)]

    def open(self, stream: str, task: int) -> Episode:
        """`scaled.async_rl.player.Scene`."""
        return Episode(self.language, Session(self.task(stream, task), self.recipe.rl.max_turns))

    def latency(self, stream: str, task: int, rollout: int, turn: int) -> float:
        """`scaled.async_rl.player.Scene`."""
        return self.tool_s * random.Random(f"{stream}-{task}-{rollout}-{turn}").lognormvariate(-0.5, 1.0)

    def settle(self, conversation: Episode, chain: Chain) -> Played:
        """`scaled.async_rl.player.Scene`."""
        session = conversation.take(chain).environment
        assert isinstance(session, Session)
        return self.paid(conversation, session.task)

    def paid(self, episode: Episode, task: Task, hints: Sequence[Sequence[Hint]] = (), record: Transcript | None = None) -> Played:
        """A finished episode of a task, with its reward."""
        reward = pay(episode, self.payment, *priced(self.prices, [episode], [task]))["reward"]
        return Played(episode.chain, reward, figures(episode), hints, record)


def figures(episode) -> dict[str, float]:
    """The metrics of a conversation."""
    verdict, chain = episode.verdict, episode.chain
    return {
        "success": float(verdict.tests),
        "turns": float(verdict.turns),
        "invalid_calls": float(verdict.invalid_calls),
        "written": float(chain.written),
        "segments": float(len(chain.segments)),
        "summary_tokens": float(chain.summary_tokens),
    }


def origin(checkpoint: Path) -> tuple[Path | None, dict]:
    """The run of the recipe that a checkpoint comes from, and its settings: the run that it is in, RUN/checkpoints/NAME, or that of the
    checkpoint from which its full run started. None and no settings if there is no such run."""
    seen: set[Path] = set()
    while (root := checkpoint.resolve().parent.parent) not in seen:
        seen.add(root)
        try:
            record = read_json(root / "config.json")
            if record["technique"] in ("recipe", "recipe full"):
                known = {field.name for field in fields(Recipe)}
                return root, {name: value for name, value in record["config"].items() if name in known}
            checkpoint = Path(record["config"]["checkpoint"])
        except (OSError, ValueError, KeyError, TypeError):
            break
    return None, {}
