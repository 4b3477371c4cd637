"""What ranks are asked to do with a monitor beside RL. Every call gets the whole problem, takes this rank's part, and
returns whole results."""

import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from kit.disk import read_lines
from recipe.small.monitoring import Watching
from recipe.small.transcripts import TOOLS
from ref.engine.sampler import Sampler
from ref.network import fast as ref_model
from ref.rl import MonitorSettings
from ref.rollout import Rollout
from ref.self_summary import Chain
from ref.transcript import Call, Transcript, Turn
from scaled import rl
from scaled.runtime import sharding
from scaled.runtime.mesh import current
from scaled.watching import Watcher, watching
from tests.mirror.calls import Script, given

__all__ = ["LONGEST", "looked", "recorded", "trained"]

LONGEST = 50
"""Tokens of the longest rollout."""


def recorded(seed: int, breaking: float) -> Transcript:
    """A rollout of a few calls, each broken with this probability."""
    draw = random.Random(seed)
    calls = [
        Call(draw.choice(TOOLS), wrote=draw.choice(("", "return 1\n")), valid=draw.random() >= breaking)
        for _ in range(draw.randint(0, 4))
    ]
    return Transcript(tuple(Turn("assistant", calls=(call,)) for call in calls), tokens=draw.randint(1, 2 * LONGEST))


def watcher_of(watch: MonitorSettings, said: list[str]) -> Watcher:
    return Watcher(Watching.recipe(watch, LONGEST).step, TOOLS, LONGEST, said.append)


class Recorded(Script):
    """Rollouts of a step that went as written down, with their transcripts."""

    def __init__(self, chains, rewards, records):
        super().__init__(chains, rewards)
        self.records = records

    def __call__(self, stream, numbers, *what):
        N = len(self.chains)
        step = numbers[0] * 2 // N if numbers else 0  # two rollouts of a task
        mine = zip(super().__call__(stream, numbers), rl.share(N).tolist(), strict=True)
        return [replace(one, transcript=self.records[step * N + n]) for one, n in mine]


def trained(settings, config, state, chains, rewards, records, watch: MonitorSettings | None, folder: Path):
    """Some steps of RL on conversations that are given: their metrics, and the weights after them."""
    model, sampler = given(config, state), Sampler(ref_model.Transformer(config), torch.float64)
    script, figures, said = Recorded(chains, rewards, records), [], []
    look = watching(watcher_of(watch, said), folder, settings.rl.prompts, settings.rl.rollouts) if watch else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(len(records) // len(chains)):
        found = rl.sample_and_improve(
            settings, model, None, script, script, partial(rl.fetch, sampler, model), step, look=look
        )
        optimizer.step()
        optimizer.zero_grad()
        sharding.reshard(model)
        figures.append(found)
    return figures, {name: x.clone() for name, x in sharding.wholes(model)}


def looked(
    records: list[list[Transcript]],
    prompts: int,
    watch: MonitorSettings,
    folder: Path,
    restarts: tuple[tuple[int, int], ...] = (),
):
    """What is logged of every step, what rank 0 has said, and the journal. A restart (end, begin) is a group of ranks
    that dies before step `end`; the next group goes on from step `begin`."""
    N = len(records[0])
    numbers, logged, said = rl.share(N).tolist(), {}, []
    spans = [*zip([0, *(begin for _, begin in restarts)], [*(end for end, _ in restarts), len(records)], strict=True)]
    for begin, end in spans:
        look = watching(watcher_of(watch, said), folder, prompts, N // prompts)
        for step in range(begin, end):
            logged[step] = look(
                step, numbers, [Rollout(Chain([], finished=True), transcript=records[step][n]) for n in numbers]
            )
    told = [said]
    if current().group("all").size > 1:
        dist.broadcast_object_list(told, 0)
    return [logged[step] for step in range(len(records))], told[0], read_lines(folder / "watched.jsonl")
