"""Reinforcement learning on many ranks: what `etude run dr-grpo --scale full` plays, and with their parts turned on kl, length-penalty,
self-summary and router-replay.

One step (Composer 2 technical report, §4.1, §6.1, §6.2):

    every rank      gathers the newest weights into its sampler and plays its share of the G·N conversations      `share`
    dp ranks        are dealt all segments by attention's quadratic cost, and lay them in rows                    `deal`
    cp ranks        take their two chunks of each row, with the experts that the sampler chose there
    all             drift from the reference → rewards → advantages over groups → one policy-gradient step        `improve`

Where this file departs from the report
1. Sampler and trainer take turns on the same ranks, so every step is on-policy.
2. The sampler is `ref.engine.sampler`: it needs room for the whole network on every rank.
3. k1 is charged to the reward. The report uses k1 and does not say where (`ref/kl.py`).
4. Tasks come in the world's mix throughout: harder ones are upsampled in small runs only (`sims/recipe/reinforcement.py`).

The environment is the caller's: a `World` plays conversations and says what each was worth, and nothing here knows what they are about.

| symbol | here | shape |
|---|---|---|
| G, N | `prompts`, `rollouts` | conversation n of a step is of group n // N |
| r − β·KL | `rewards` | G·N over all ranks, in order of n |
| A | `advantages` | G·N, the same on every rank |
| this rank's tokens | `Batch` | micro_rows, T/cp |
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ref import rl as ref_rl
from ref.engine.sampler import Sampler
from ref.network import fast as ref
from ref.network import release
from ref.rl import Played, World
from scaled.dr_grpo import group_advantages, policy_loss
from scaled.kl import token_kl
from scaled.network.model import Transformer, load_hf, save_hf
from scaled.optimise import CPU, Log, Ranks, begun, changed, optimise, told
from scaled.packing import Cost, balance, imbalance, lay, rows
from scaled.router_replay import differing, mismatch, replay
from scaled.runtime import sharding
from scaled.runtime.comm import gathered, most, summed
from scaled.runtime.cut import ahead, places
from scaled.runtime.exchange import exchange
from scaled.runtime.mesh import current

__all__ = ["Batch", "Played", "Rehearsal", "Rl", "Step", "World", "deal", "improve", "learn", "play_and_improve", "share"]


@dataclass(frozen=True)
class Rl(Ranks):
    """RL on a cluster; the layout is the report's for RL (§6.1), CP 8 and EP 8."""

    cp: int = 8
    """Ranks that share a row's tokens."""
    adamw_lr: float = 1e-6
    """Learning rate of AdamW."""
    prompts: int = 64
    """Groups of a step (G)."""
    rollouts: int = 16
    """Rollouts of a group (N)."""
    max_len: int = 32_768
    """Tokens of a context, where no summaries join several."""
    micro_rows: int = 1
    """Rows that a dp rank takes through the network at once."""
    temperature: float = 1.0
    """Sampling temperature."""
    budget_tokens: int = 4096
    """Constant that stands for a rollout's length in the normaliser G·N·budget_tokens (Dr. GRPO divides by no length)."""
    clip_low: float = 0.2
    """Where A < 0, ratios below 1 − clip_low no longer count."""
    clip_high: float = 0.2
    """Where A > 0, ratios above 1 + clip_high no longer count."""
    kl: float = 0.0
    """β: reward that a nat of k1 against the policy before RL costs, summed over the rollout; k1 in the reward is our choice."""
    effort_price: float = 0.0
    """Reward that a unit of penalised effort costs."""
    k: float = 0.01
    """Curvature of the length penalty C_{k,q} per unit of effort."""
    q: float = 0.5
    """Exponent of the length penalty; 0 is linear, larger bends more."""
    invalid_call: float = 0.0
    """Reward that each invalid tool call costs."""
    join: Literal["self", "none"] = "none"
    """What joins contexts: self-summaries, or nothing, which leaves one."""
    replay: Literal["none", "plain", "filtered"] = "none"
    """Router replay: whose experts the training pass takes (its own, the sampler's, the sampler's where they are plausible)."""
    replay_alpha: float = 0.5
    """Plausibility that filtered replay asks of an expert."""
    sampler_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the sampler's copy of the weights."""
    heldout: int = 128
    """Tasks that training never sees, played before and after; 0 plays none."""

    def __post_init__(self):
        super().__post_init__()
        self.at_least(1, "prompts", "max_len", "micro_rows", "budget_tokens")
        self.at_least(2, "rollouts")
        self.at_least(0, "kl", "effort_price", "invalid_call", "heldout", "clip_low", "clip_high")
        if self.max_len > self.length:
            raise ValueError(f"length must hold a context of max_len = {self.max_len} tokens, got {self.length}")
        if not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, got {self.temperature}: at 0 all rollouts of a group are the same")
        if not 0 <= self.replay_alpha <= 1:
            raise ValueError(f"replay_alpha must lie between 0 and 1, got {self.replay_alpha}")

    def check(self, dp: int) -> None:
        ranks = dp * self.cp
        for name, n in (("prompts · rollouts", self.prompts * self.rollouts), ("heldout", self.heldout or ranks)):
            if n < ranks:
                raise ValueError(f"{name} must be at least the number of ranks, {ranks}, so that each has a conversation; got {n}")


Rehearsal = changed(
    Rl,
    "Rehearsal",
    "The same on CPUs, in the small world.",
    **CPU | {"length": 256, "steps": 20},
    prompts=16,
    rollouts=8,
    max_len=192,
    micro_rows=32,
    adamw_lr=1e-4,
    warmup=0.1,
    budget_tokens=40,
    heldout=64,
    checkpoint="runs/small/checkpoints/sft",
)


@dataclass
class Batch:
    """Rows that go through the network at once, this rank's tokens of them, [B, T/cp]."""

    ids: Tensor
    doc: Tensor
    """Number of the segment; −1 where nothing lies."""
    target: Tensor
    """The token that follows."""
    keep: Tensor
    """Whether the policy chose that one."""
    behavior: Tensor
    """Its log-prob under the sampler, nats."""
    conversation: Tensor
    """Whose it is: n."""
    experts: Tensor | None
    """[B, T/cp, L, K] that the sampler chose; −1 where it was not asked. None for a dense network."""


@dataclass
class Step(ref_rl.Step):
    """What a step found: `gradients` and `gap` are this rank's parts, all else is of all ranks."""

    mismatch: dict[str, float] = field(default_factory=dict)
    """Median and 99th percentile of |log π − log μ| over the policy's own tokens, nats."""
    load: float = 1.0
    """The fullest dp rank's work over the mean."""
    differs: float | None = None
    """Share of the experts that the training pass took and the sampler had not; None for a dense network."""


def learn(technique: str, c: Rl, folder: str | Path, world: World, log: Log = lambda *_, **__: None) -> dict[str, float]:
    """The whole training on this rank; `log(step, steps, **figures)` is called on rank 0. Returns the last step's figures and success on
    held-out tasks before and after. FOLDER/checkpoints/final holds the network in the end; what else lies there: `scaled/optimise.py`."""
    folder, rank = Path(folder), dist.get_rank()
    assert c.checkpoint is not None, "RL begins with a policy"
    with begun(c, folder, rank):
        model, reference = load_hf(c.checkpoint), load_hf(c.checkpoint) if c.kl else None
        with torch.device("meta"):  # no room is taken before the dtype is known: `fetch` fills it
            sampler = Sampler(ref.Transformer(model.config), getattr(torch, c.sampler_dtype))
        sampler.model.to_empty(device=current().device)
        found = {}
        if c.heldout:
            found["heldout_before"] = heldout(c, reference or model, sampler, world)
        found |= optimise(c, folder, technique, model, partial(play_and_improve, c, model, reference, sampler, world), log)
        if c.heldout:
            found["heldout_after"] = heldout(c, model, sampler, world)
        about = release.card(
            f"etude {technique}",
            "An agent after reinforcement learning (Dr. GRPO).",
            model.config,
            told(technique, c, found),
            opening="what the environment says first",
        )
        save_hf(model, folder / "checkpoints" / "final", beside=release.beside(c.checkpoint, model.config, about))
        return found


def play_and_improve(c: Rl, model: Transformer, reference: Transformer | None, sampler: Sampler, world: World, step: int) -> dict[str, float]:
    """Plays a step's conversations and leaves their policy gradient in `model`; the figures of the step."""
    numbers = share(c.prompts * c.rollouts).tolist()
    fetch(sampler, model, step)
    played = world.play(sampler, "rl", [step * c.prompts + n // c.rollouts for n in numbers], generator(c.seed, "rl", step))
    found = improve(c, model, reference, played)
    figures = {"loss": found.loss, "reward": found.rewards.mean().item()} | means(played)
    figures |= {"drift": found.drift.mean().item(), "engine_kl": found.engine.mean().item(), "imbalance": found.load}
    figures |= {"mismatch": found.mismatch["p50"], "mismatch_p99": found.mismatch["p99"], "tokens": float(found.tokens)}
    return figures | ({} if found.differs is None else {"routing_differs": found.differs})


def improve(c: Rl, model: Transformer, reference: Transformer | None, played: Sequence[Played]) -> Step:
    """`ref.rl.improve` of all ranks' conversations, of which `played` are this rank's (`share`). The gradient stands in `model`, too."""
    G, N = c.prompts, c.rollouts
    numbers = share(G * N)
    batches, load = deal(c, model, played, numbers)
    device = batches[0].ids.device

    # Policy and reference compute alike, with their own experts: what the sampler computes otherwise is no drift.
    drift, engine = torch.zeros(2, G * N, dtype=torch.float64, device=device).unbind()
    if reference is not None:
        with torch.no_grad():
            for batch in batches:
                now, before = (own_logp(network, batch, None, c.temperature)[0] for network in (model, reference))
                for whole, part in ((drift, token_kl(now, before, "k1")), (engine, batch.behavior - now)):
                    whole.index_add_(0, batch.conversation[batch.keep], part[batch.keep].double())
        drift, engine = summed(torch.stack((drift, engine))).unbind()
    # A dp rank's conversations are its cp ranks' shares; of the groups they belong to, other dp ranks have the rest.
    mine = torch.cat(gathered(numbers.to(device), "cp"))
    here = torch.tensor([p.reward for p in played], dtype=torch.float64, device=device)
    rewards = torch.cat(gathered(here, "cp")) - c.kl * drift[mine]
    advantages = torch.cat(gathered(group_advantages(rewards, groups=mine // N), "dp"))

    total, pairs, routed = 0.0, [], []
    for batch in batches:
        logp, chosen = own_logp(model, batch, routing(c, batch), c.temperature)
        # Packed, a row holds tokens of several rollouts: each token is handed in as a row of its own.
        loss = policy_loss(
            logp.reshape(-1, 1),
            batch.behavior.reshape(-1, 1),
            advantages[batch.conversation.flatten()],
            batch.keep.reshape(-1, 1),
            budget=float(G * N * c.budget_tokens),
            clip_low=c.clip_low,
            clip_high=c.clip_high,
        )
        loss.backward()
        total += loss.item()
        pairs.append((logp.detach(), batch.behavior, batch.keep))
        if batch.experts is not None:
            known = batch.experts.flatten(0, 1)[:, 0, 0] >= 0
            routed.append((torch.stack(chosen, 1)[known], batch.experts.flatten(0, 1)[known]))
    logp, behavior, keep = (torch.cat([x.flatten() for x in column]) for column in zip(*pairs, strict=True))
    differs = None
    if routed:
        ours, theirs = (torch.cat(x).unbind(1) for x in zip(*routed, strict=True))
        differs = differing(ours, theirs)["decisions"]
    tokens, sampled = summed(torch.stack((keep.sum().double(), behavior[keep].sum().double()))).tolist()
    return Step(
        loss=total,
        gradients=[p.grad for p in model.parameters()],
        rewards=torch.cat(gathered(rewards, "dp")),
        drift=drift,
        engine=engine,
        gap=(logp - behavior)[keep],
        tokens=int(tokens),
        nll=-sampled / tokens,
        mismatch=mismatch(logp, behavior, keep),
        load=load,
        differs=differs,
    )


def share(n: int) -> Tensor:
    """Numbers below n that fall to this rank: equal runs, in order of ranks."""
    group = current().group("all")
    return torch.arange(n).tensor_split(group.size)[group.rank]


def generator(seed: int, *what: object) -> torch.Generator:
    """What a rank draws with; drawn anew for each step, so that a training that begins again repeats what it drew."""
    name = "-".join(map(str, (seed, *what, current().group("all").rank)))
    return torch.Generator(current().device).manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7]))


def fetch(sampler: Sampler, model: Transformer, version: int) -> None:
    """The newest weights, whole, into this rank's sampler. All ranks together."""
    with torch.no_grad():
        for (_, whole), mine in zip(sharding.wholes(model), sampler.model.parameters(), strict=True):
            mine.copy_(whole)
    sampler.version = version


def deal(c: Rl, model: Transformer, played: Sequence[Played], numbers: Tensor) -> tuple[list[Batch], float]:
    """All ranks' conversations, dealt to dp ranks by cost and laid in rows: this rank's tokens, in as many batches as every other rank
    has; and the fullest rank's load over the mean."""
    device, config = current().device, model.config
    dp = current().group("dp").size
    segments = [(n, s) for n, p in zip(numbers.tolist(), played, strict=True) for s in p.chain.segments]
    columns = {
        "ids": [s.tokens for _, s in segments],
        "sampled": [s.sampled.long() for _, s in segments],
        "behavior": [s.logp for _, s in segments],
        "conversation": [torch.full_like(s.tokens, n) for n, s in segments],
    }
    if config.num_experts:
        # The last token of a context predicts nothing, and was not routed.
        columns["experts"] = [torch.nn.functional.pad(s.experts.int(), (0, 0, 0, 0, 0, 1), value=-1) for _, s in segments]
    sizes = torch.cat(gathered(torch.tensor([len(s.tokens) for _, s in segments], device=device), "cp"))
    costs = Cost.of(config)(sizes)
    rank_of = balance(costs, dp)
    held = {}
    for name, column in columns.items():
        together = torch.cat(gathered(torch.cat(column).to(device), "cp"))
        held[name] = exchange(list(together.split(sizes.tolist())), rank_of)
    sizes = torch.tensor([len(x) for x in held["ids"]])
    row, start = rows(sizes, c.length)
    R = int(most((row.max() + 1).to(device), "dp"))
    shape = (-(-R // c.micro_rows) * c.micro_rows, c.length)
    held["doc"] = [torch.full((int(T),), i, device=device) for i, T in enumerate(sizes)]
    empty = {"doc": -1, "experts": -1}
    laid = {name: lay(column, row, start, shape, empty.get(name, 0)).to(device) for name, column in held.items()}
    here, batches = places(c.length).to(device), []  # rows are this dp rank's: only their tokens are cut
    for first in range(0, shape[0], c.micro_rows):
        part = {name: x[first : first + c.micro_rows, here] for name, x in laid.items()}
        batches.append(
            Batch(
                part["ids"],
                part["doc"],
                ahead(part["ids"]),
                ahead(part["sampled"]) > 0,
                ahead(part["behavior"]),
                part["conversation"],
                part.get("experts"),
            )
        )
    return batches, imbalance(costs, rank_of, dp)


def routing(c: Rl, batch: Batch) -> list | None:
    """Per layer what the training pass is told of experts."""
    if c.replay == "none" or batch.experts is None:
        return None
    K = batch.experts.shape[-1]
    # Where the sampler was not asked, K distinct ones; no gradient comes from there.
    known = batch.experts.where(batch.experts >= 0, torch.arange(K, device=batch.experts.device, dtype=batch.experts.dtype))
    layers = known.long().flatten(0, 1).unbind(1)
    return list(layers) if c.replay == "plain" else [partial(replay, replayed=e, k=K, alpha=c.replay_alpha) for e in layers]


def own_logp(model: Transformer, batch: Batch, experts: list | None, temperature: float) -> tuple[Tensor, list[Tensor]]:
    """Log-probs [B, T/cp], at the temperature that they were sampled at, of the tokens that the policy chose, zero elsewhere, where the
    head is not asked; and the experts taken."""
    out = model(batch.ids, doc=batch.doc, logits=False, experts=experts)
    at = batch.keep.nonzero(as_tuple=True)
    logp = model.logprob(out.hidden[at] / temperature, batch.target[at])
    return logp.new_zeros(batch.keep.shape).index_put(at, logp), out.experts


def heldout(c: Rl, model: Transformer, sampler: Sampler, world: World) -> float:
    """Sampled success on held-out tasks, one conversation each."""
    fetch(sampler, model, 0)
    played = world.play(sampler, "heldout", share(c.heldout).tolist(), generator(c.seed, "heldout"))
    return means(played)["success"]


def everyone(values: Sequence[float]) -> float:
    """The mean over all ranks' values."""
    here = torch.tensor([sum(values), len(values)], dtype=torch.float64, device=current().device)
    whole = summed(here)
    return (whole[0] / whole[1]).item()


def means(played: Sequence[Played]) -> dict[str, float]:
    """Of each figure the mean over all ranks' conversations."""
    return {name: everyone([p.figures[name] for p in played]) for name in sorted(played[0].figures)}
