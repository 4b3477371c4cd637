"""What the tests of the trainer group play: the tiny network of `async_parts.py` in float64, on ranks."""

import copy
import hashlib
import multiprocessing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from ref import muon, weight_sync
from ref.async_rl import Rules
from ref.engine.sampler import Sampler
from ref.rl import Settings, improve
from scaled.async_rl import services
from scaled.async_rl.group import Sharded, TrainerGroup
from scaled.async_rl.player import Player
from scaled.async_rl.records import pack
from scaled.network.model import Transformer
from scaled.rl import Rl
from scaled.runtime import sharding
from scaled.runtime.checkpoint import Checkpoints
from scaled.runtime.mesh import Layout, current
from tests.mirror.async_parts import Tiny
from tests.mirror.fault_parts import after, before, die
from tests.ref.test_continuous import network


@dataclass(frozen=True)
class Grouped(Tiny):
    """A mixture of four experts, so that they can be split over ranks."""

    fault: str = ""
    """Where the second rank dies."""
    mark: str = ""
    """The file that says that it did."""

    def __setstate__(self, state):
        self.__dict__.update(state)
        if self.fault and multiprocessing.current_process().name == "trainer-1":
            FAULTS[self.fault](Path(self.mark))

    @property
    def rl(self) -> Settings:
        return replace(super().rl, max_len=64)

    def whole(self):
        """The network in one piece, float64."""
        return network(num_experts=4).requires_grad_(True)

    def sampler(self):
        return Sampler(self.whole().float().requires_grad_(False), torch.bfloat16)

    def ranked(self) -> Sharded:
        layout, whole = current().layout, self.whole()
        model = Transformer(whole.config, init_weights=False).double()
        for (name, p), x in zip(model.named_parameters(), whole.parameters(), strict=True):
            sharding.load_slice(name, p, x.detach())
        return Sharded(Rl(length=64, cp=layout.cp, ep=layout.ep, micro_rows=4, heldout=0, rl=self.rl), model)

    def group(self, dp: int = 1, cp: int = 1, ep: int = 1) -> TrainerGroup:
        return TrainerGroup(Layout(dp, cp, ep), self.ranked)


def on_version(mark, self, version, *_):
    if version == 2:
        die(mark)


FAULTS = {
    "in the checkpoint": lambda mark: before(Checkpoints, "_write", partial(on_version, mark)),
    "before its shard": lambda mark: before(weight_sync.Writer, "publish", partial(on_version, mark)),
    "between shard and manifest": lambda mark: before(weight_sync.Writer, "commit", partial(on_version, mark)),
    "after the manifest": lambda mark: after(weight_sync.Writer, "commit", partial(on_version, mark)),
}


def replayed(folder, parts: Grouped) -> dict:
    """Whole weights after the recorded groups of a run have been trained on again, on these ranks."""
    learner = parts.ranked()
    services.replay(folder, learner)
    return {name: x.clone() for name, x in sharding.wholes(learner.model)}


def plain(parts: Grouped, rules: Rules) -> tuple[dict, dict]:
    """The loop without services and ranks in float64: weights by name, and the digest of each group's record."""
    torch.set_num_threads(1)
    model, digests = parts.whole(), {}
    optimizers = muon.optimizers(model, 0.0, parts.lr, use_muon=False)
    player = Player(parts.sampler(), parts.setup(), rules.groups * parts.rollouts, parts.rollouts, 0)
    for step in range(rules.steps):
        player.load(copy.deepcopy(model).bfloat16().requires_grad_(False), step)
        player.give(list(range(step * rules.groups, (step + 1) * rules.groups)))
        played = {}
        while player.groups:
            played |= player.tick()
        digests |= {group: hashlib.sha256(pack(some)).hexdigest() for group, some in played.items()}
        batch = [one for group in sorted(played) for one in played[group]]
        for segment in (segment for one in batch for segment in one.chain.segments):
            segment.logp = segment.logp.double()  # or `improve` takes rewards in float32
        found = improve(parts.rl, model, None, batch)
        for p, gradient in zip(model.parameters(), found.gradients, strict=True):
            p.grad = None if gradient is None else gradient
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}, digests
