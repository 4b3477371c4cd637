"""A policy server in miniature: it samples rollouts from its own copy of the weights, in its own dtype.

Inference and training are separate engines in this recipe (Composer 2 report §4.1, §6.2): the trainer optimises float32
masters, and the sampler decodes with the latest copy it received. So every token comes back with its log-probability, the
policy version that sampled it, and the experts that its position was routed to. The trainer needs these for importance
ratios, staleness and router replay.

Where this file departs from a real server (vLLM, SGLang):
1. All rows of a batch share one position. A step feeds every row its next token: a waiting token of the prompt or of an
   observation if there is one, else the token just sampled. There is no paging and no padding mask, and no prefill beyond the
   prompts' common length. Finished rows are dropped by compacting the batch.
2. The environment answers synchronously, inside the loop: at this size an answer takes microseconds.

    sampler = Sampler(model, dtype=torch.bfloat16)
    rollouts = sampler.rollout(conversations, max_len=192, generator=torch.Generator().manual_seed(0))

| paper | here | shape |
|---|---|---|
| behaviour policy μ | the sampler's copy | – |
| log μ(a_t) | `Rollout.logp` | T, zero on given tokens |
| replayed routing | `Rollout.experts` | T−1 L K |
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ref.engine.layout import Rows
from ref.network import KVCache, Transformer

__all__ = ["Conversation", "Rollout", "Sampler", "sample"]


@runtime_checkable
class Conversation(Protocol):
    """The other side of a rollout, in tokens."""

    prompt: list[int]
    """Tokens at the start of the context."""
    stop: int
    """Token with which the policy ends its turn."""

    def reply(self, turn: list[int]) -> list[int] | None:
        """The answer to a turn (without its stop token) in tokens, or None if the conversation is over."""


@dataclass
class Rollout:
    """One conversation as the policy saw it, T tokens in total."""

    tokens: Int[Tensor, " T"]
    """Prompt, sampled tokens and observations in order."""
    sampled: Bool[Tensor, " T"]
    """True where the policy chose the token."""
    logp: Float[Tensor, " T"]
    """Log-probability (nats) of a sampled token under the distribution it was drawn from; zero elsewhere."""
    version: Int[Tensor, " T"]
    """Version of the weights that sampled the token; −1 on given tokens."""
    experts: Int[Tensor, "T-1 L K"]
    """Experts that position t was routed to while predicting token t+1; L = 0 for a dense model."""
    finished: bool
    """False if max_len cut the rollout off."""


def uniform(generator: torch.Generator | Sequence[torch.Generator] | None, rows: int, length: int) -> Float[Tensor, "B T"]:
    """Uniform numbers in [0, 1), float64: what row b draws at position t, whatever else is in the batch. Pass one generator for
    all rows, or one per row."""
    if isinstance(generator, Sequence):
        return torch.stack([torch.rand(length, generator=g, dtype=torch.float64) for g in generator])
    device = generator.device if generator is not None else "cpu"
    return torch.rand(rows, length, generator=generator, dtype=torch.float64, device=device).cpu()


def sample(logits: Float[Tensor, "B V"], temperature: float, u: Float[Tensor, " B"] | None):
    """Tokens [B] drawn from softmax(logits / temperature) by inverting the cumulative distribution at u, uniform in [0, 1), and their
    log-probabilities [B] under it (float32). Temperature 0 is greedy and needs no u: it takes the first maximum, with log-probability
    0. Raises ValueError for a temperature that is negative or not finite, and for logits that define no distribution (NaN, inf, or
    −inf everywhere)."""
    check_temperature(temperature)
    if temperature == 0:
        token = logits.argmax(-1)
        check_logits(logits.gather(1, token[:, None]).isfinite())
        return token, torch.zeros(len(logits), device=logits.device)
    assert u is not None
    logp = (logits.float() / temperature).log_softmax(-1)
    mass = logp.exp().double().cumsum(-1)
    check_logits(mass[:, -1:] > 0)
    token = torch.searchsorted(mass, u[:, None].to(mass) * mass[:, -1:], right=True).clamp_(max=logits.shape[-1] - 1)
    return token[:, 0], logp.gather(1, token)[:, 0]


def check_temperature(temperature: float) -> None:
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be finite and not negative; got {temperature}")


def check_logits(fine: Bool[Tensor, "B 1"]) -> None:
    if not bool(fine.all()):
        row = int(fine[:, 0].logical_not().nonzero()[0])
        raise ValueError(f"logits / temperature must be finite or −inf, with a finite one in each row; row {row} of {len(fine)} is not")


def check_tokens(name: str, tokens: Sequence, vocab: int | float, least: int = 0) -> None:
    if len(tokens) < least or not all(isinstance(t, int) and 0 <= t < vocab for t in tokens):
        raise ValueError(f"{name} must hold tokens 0 to {vocab - 1}, and a prompt must not be empty")


class Sampler:
    """Holds a copy of a policy and runs conversations with it in batches.

    rounding: applied to every weight matrix of the layers before it is stored in `dtype`, as in an engine with coarser weights.
    It includes routers and expert stacks, but not norms, embedding and head. None: no rounding."""

    def __init__(self, model: Transformer, dtype: torch.dtype = torch.bfloat16, version: int = 0, rounding: Callable[[Tensor], Tensor] | None = None):
        self.model = copy.deepcopy(model).to(dtype).requires_grad_(False)
        self.dtype, self.version, self.rounding = dtype, version, rounding
        if rounding is not None:
            self.load(model, version)

    @torch.no_grad()
    def load(self, model: Transformer, version: int) -> None:
        """Copy the weights of `model`, rounded to the sampler's dtype."""
        for (name, mine), theirs in zip(self.model.named_parameters(), model.parameters(), strict=True):
            coarse = self.rounding if name.startswith("layers.") and theirs.ndim > 1 else None
            mine.copy_(theirs if coarse is None else coarse(theirs))
        self.version = version

    def check(self, conversations: Sequence[Conversation], max_len: int, temperature: float) -> None:
        """What `rollout` refuses before it starts."""
        check_temperature(temperature)
        if max_len < 1:
            raise ValueError(f"max_len must be at least 1; got {max_len}")
        for n, c in enumerate(conversations):
            check_tokens(f"prompt of conversation {n}", c.prompt, self.model.config.vocab_size, least=1)

    @torch.inference_mode()
    def rollout(
        self,
        conversations: Sequence[Conversation],
        max_len: int,
        temperature: float = 1.0,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
    ) -> list[Rollout]:
        """Run all conversations to their end or to `max_len` tokens, in one batch; results are in the order given. `generator`: one
        for all, or one per conversation, which then draws the same numbers whatever else is in the batch. Raises ValueError, before
        any conversation starts, for max_len < 1, a temperature that `sample` refuses, and a prompt that is empty or holds tokens
        outside the vocabulary; later for a model that gives no distribution (NaN among its weights)."""
        B, config, device = len(conversations), self.model.config, self.model.embed_tokens.weight.device
        self.check(conversations, max_len, temperature)
        known = torch.tensor([min(len(c.prompt), max_len) for c in conversations])  # number of known tokens in each row
        tokens = torch.zeros(B, max_len, dtype=torch.long)
        for row, c in enumerate(conversations):
            tokens[row, : known[row]] = torch.tensor(c.prompt[:max_len])
        sampled = torch.zeros(B, max_len, dtype=torch.bool)
        logp = torch.zeros(B, max_len)
        layers = config.num_hidden_layers if config.num_experts else 0
        experts = torch.zeros(B, max_len, layers, config.num_experts_per_tok, dtype=torch.int16)
        turn_start, finished = known.tolist(), [False] * B
        u = uniform(generator, B, max_len)

        cache, decode = KVCache(config, B, max_len, self.dtype, device=device), Rows(self.model, max_len)
        rows, live = torch.arange(B), torch.ones(B, dtype=torch.bool)  # the rows of the batch, and which are still running
        t = 0
        while live.any() and t < max_len - 1:
            # One token per step, or as many as every row already knows: the prompts' common length runs in one pass.
            n = min(max(t + 1, int(known[rows[live]].min())), max_len - 1)
            if n == t + 1:
                hidden, chosen = decode.step(tokens[rows, t].to(device), cache)
            else:
                out = self.model(tokens[rows, t:n].to(device), cache=cache, logits=False)
                hidden, chosen = out.hidden[:, -1], out.experts
            if layers:
                experts[rows, t:n] = torch.stack(chosen, 1).to("cpu", torch.int16).view(len(rows), n - t, layers, -1)
            t = n
            free = (live & (known[rows] == t)).nonzero()[:, 0]
            if len(free):
                speakers = rows[free]
                logits = self.model.head(hidden[free.to(device)])
                drawn, drawn_logp = (x.cpu() for x in sample(logits, temperature, u[speakers, t]))
                tokens[speakers, t], sampled[speakers, t], logp[speakers, t] = drawn, True, drawn_logp
                known[speakers] = t + 1
                for at, row, token in zip(free.tolist(), speakers.tolist(), drawn.tolist(), strict=True):
                    if token != conversations[row].stop:
                        continue
                    answer = conversations[row].reply(tokens[row, turn_start[row] : t].tolist())
                    if answer is None:
                        live[at], finished[row] = False, True
                        continue
                    turn_start[row] = known[row] = min(t + 1 + len(answer), max_len)
                    tokens[row, t + 1 : turn_start[row]] = torch.tensor(answer[: max_len - t - 1], dtype=torch.long)
            # A finished row still costs its share of every step, but dropping it copies the cache: drop rows a tenth at a time.
            if live.sum() <= 0.9 * len(rows):
                cache.select(live.nonzero()[:, 0].to(device))
                rows, live = rows[live], torch.ones(int(live.sum()), dtype=torch.bool)
        version = torch.where(sampled, self.version, -1)
        return [
            Rollout(tokens[b, :k], sampled[b, :k], logp[b, :k], version[b, :k], experts[b, : k - 1], finished[b])
            for b, k in enumerate(known.tolist())
        ]

    def follow(
        self,
        conversations: Sequence[Conversation],
        max_len: int,
        after: Callable[[int, Rollout], Conversation | None],
        temperature: float = 1.0,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
    ) -> None:
        """Run conversations that have several contexts. `after` receives the number of a conversation and the rollout of its context, once
        that is over, and returns the next one, or None. All first contexts are one batch, all second ones the next, and so on."""
        live = list(enumerate(conversations))
        while live:
            own = [generator[n] for n, _ in live] if isinstance(generator, Sequence) else generator
            rollouts = self.rollout([c for _, c in live], max_len, temperature, own)
            following = ((n, after(n, rollout)) for (n, _), rollout in zip(live, rollouts, strict=True))
            live = [(n, c) for n, c in following if c is not None]
