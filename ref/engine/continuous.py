"""Continuous batching: contexts of unlike lengths share a batch, and every one of them is where it is.

`Lockstep` (`sampler.py`) keeps all rows at one position, so a row that reads a long answer reads it a token per step,
with all others. Here every context has a position of its own (Orca, OSDI 2022, iteration-level scheduling). A step
feeds each context all that it has not read yet: the token just sampled, or a whole prompt or answer, next to the
others' single tokens. A context that is over makes room for the next one at once. One that waits for its environment
costs nothing.

    engine = Continuous(sampler, slots=64, max_len=192)
    engine.load(model, version)                   new weights between two steps, in the middle of turns

Weights may change in flight (Composer 2 report, §4.1). `cache="keep"` goes on with the keys and values that the old
weights computed, as PipelineRL does; "recompute" reads every context again first. Either way each token says which
version sampled it, and with which log-probability: that of the distribution that it was drawn from, old keys and values
included. This is what the loss needs (`ref/async_rl.py`).

What a context draws depends on its own `draws` and its own tokens, not on its neighbours, its slot, or when it was
added.

Keys and values lie in pages (`ref/engine/pages.py`), which a context holds as far as it is read. `cache_tokens` bounds
them. If they are short, contexts go on in the order in which they were added: those that find no page wait in their
slots, and the newest is put back, which means that its keys and values are dropped and that it is read again once there
are pages. The oldest context that is ready takes pages from any other one, so it always goes on, and every context
comes to its end. A context that is read again has the same keys and values up to rounding.

Contexts that begin alike, as the rollouts of a group do, read their common beginning once (RadixAttention,
arXiv:2312.07104): the first of them reads it, the others wait for it and copy its keys and values."""

from collections.abc import Collection, Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from ref.engine.ragged import Ragged
from ref.engine.sampler import (
    Engine,
    SampledTurn,
    Sampler,
    Segment,
    check_context,
    check_sizes,
    check_state,
    check_tokens,
    sample,
)
from ref.network import Transformer

__all__ = ["MIN_SHARED", "Continuous", "ContinuousSampler", "make_sampler"]

MIN_SHARED = 16
"""Tokens that two contexts must have in common at their beginning, for one of them to copy keys and values."""


class Continuous:
    """An `Engine` that decodes up to `slots` contexts of at most `max_len` tokens with the policy of `sampler`. A step
    reads at most `budget` tokens more than one per context, so that a long prompt does not hold up the others for
    long. `cache_tokens`: tokens whose keys and values are held, at most, in whole pages; None: as many as the contexts
    of all slots may have. Raises ValueError if that does not hold one context of `max_len`."""

    in_waves = False

    def __init__(
        self,
        sampler: Sampler,
        slots: int,
        max_len: int,
        temperature: float = 1.0,
        budget: int = 512,
        cache_tokens: int | None = None,
    ):
        check_sizes(temperature, slots=slots, max_len=max_len, budget=budget)
        config = sampler.model.config
        self.sampler, self.temperature, self.budget, self.max_len, self.vocab = (
            sampler,
            temperature,
            budget,
            max_len,
            config.vocab_size,
        )
        self.ragged = Ragged(sampler.model, slots, max_len)
        self.pages = self.ragged.pages
        self.max_pages = None if cache_tokens is None else cache_tokens // self.pages.size
        if self.max_pages is not None and self.max_pages < (min_pages := self.pages.count(max_len)):
            raise ValueError(
                f"cache_tokens must hold a context of max_len={max_len}, which has {min_pages} pages of "
                f"{self.pages.size} tokens: {min_pages * self.pages.size}; got {cache_tokens}"
            )
        layers = config.num_hidden_layers if config.num_experts else 0
        self.tokens = torch.zeros(slots, max_len, dtype=torch.long)
        self.sampled, self.logp = torch.zeros(slots, max_len, dtype=torch.bool), torch.zeros(slots, max_len)
        self.versions = torch.full((slots, max_len), -1)
        self.experts = torch.zeros(slots, max_len, layers, config.num_experts_per_tok, dtype=torch.int16)
        self.draws = torch.zeros(slots, max_len, dtype=torch.float64)
        # Per slot: tokens known, tokens that the cache holds, positions whose experts are recorded, where the current
        # turn begins, the tokens that end it, and how long it may be.
        self.lengths, self.cached_lengths, self.routed_lengths, self.turn_starts = ([0] * slots for _ in range(4))
        self.turn_limits: list[int | None] = [None] * slots  # tokens of the current turn, at most
        self.stop_ids: list[Collection[int]] = [()] * slots
        self.state: list[Literal["free", "ready", "over"]] = ["free"] * slots
        self.ages, self.added = [0] * slots, 0  # which context it is, in the order in which they were added
        self.slots = list(range(slots))  # the slot of each row of the cache; those that a step reads are at the front
        self.loads, self.first_loads = 0, [0] * slots  # weights so far; those that began to read a context
        self.ready, self.full = 0, []  # how many rows a step reads; slots that given tokens filled

    @property
    def version(self) -> int:
        """Version of the weights."""
        return self.sampler.version

    @property
    def free_slots(self) -> int:
        return self.state.count("free")

    @property
    def is_idle(self) -> bool:
        return not self.full and "ready" not in self.state

    def add(
        self,
        prompt: Sequence[int],
        stop_ids: Collection[int],
        draws: Float[Tensor, " max_len"] | None = None,
        longest_turn: int | None = None,
    ) -> int:
        check_context(self, prompt, draws, self.vocab, self.temperature)
        slot = self.state.index("free")
        self.lengths[slot] = self.cached_lengths[slot] = self.routed_lengths[slot] = 0
        self.sampled[slot], self.logp[slot], self.versions[slot] = False, 0.0, -1
        self.stop_ids[slot], self.turn_limits[slot] = stop_ids, longest_turn
        self.ages[slot], self.added = self.added, self.added + 1
        if draws is not None:
            self.draws[slot] = draws
        self._append_tokens(slot, prompt)
        return slot

    def extend(self, slot: int, tokens: Sequence[int], longest_turn: int | None = None) -> None:
        check_state(self.state, slot, "over")
        check_tokens("answer", tokens, self.vocab)
        self.turn_limits[slot] = longest_turn
        self._append_tokens(slot, tokens)

    def turn(self, slot: int) -> SampledTurn | None:
        check_state(self.state, slot, "over")
        turn_tokens = self.tokens[slot, self.turn_starts[slot] : self.lengths[slot]].tolist()
        if turn_tokens and turn_tokens[-1] in self.stop_ids[slot] and self.sampled[slot, self.lengths[slot] - 1]:
            return SampledTurn(turn_tokens[:-1], turn_tokens[-1])
        return None if self.lengths[slot] == self.max_len else SampledTurn(turn_tokens, None)

    def remove(self, slot: int, finished: bool = True) -> Segment:
        if self.state[slot] == "free":
            raise ValueError(f"slot {slot} is free")
        num_tokens, self.state[slot] = self.lengths[slot], "free"
        self._drop_cache(slot)
        self.full = [full_slot for full_slot in self.full if full_slot != slot]
        buffers = (self.tokens, self.sampled, self.logp, self.versions)
        tokens, sampled, logp, version = (x[slot, :num_tokens].clone() for x in buffers)
        return Segment(tokens, sampled, logp, version, self.experts[slot, : num_tokens - 1].clone(), finished)

    def load(self, model: Transformer, version: int, cache: Literal["keep", "recompute"] = "keep") -> None:
        """New weights for all tokens from the next step on. `cache`: what becomes of the keys and values of what was
        read before."""
        self.sampler.load(model, version)
        self.renewed(version, cache)

    def renewed(self, version: int, cache: Literal["keep", "recompute"] = "keep") -> None:
        """The same, after somebody has written new weights into `sampler.model`."""
        if cache not in ("keep", "recompute"):
            raise ValueError(f'cache must be "keep" or "recompute"; got {cache!r}')
        self.sampler.version = version
        self.loads += 1
        self.ragged.copy()
        if cache == "recompute":
            for slot in range(len(self.slots)):
                self._drop_cache(slot)

    @torch.inference_mode()
    def step(self) -> list[int]:
        """Feed every ready context, and sample a token for each that has been read to its end. Returns the slots whose
        turn is now over, or whose context is full. Without a ready context the network does nothing. Raises ValueError
        for a policy that gives no distribution."""
        self._move_rows(self._share_prefixes(self._choose_slots()))
        full, self.full = self.full, []
        slots = self.slots[: self.ready]
        if not slots:
            return full
        budget_left, ends = self.budget, []
        for slot in slots:
            # Nothing follows the last position, so nobody reads it.
            ends.append(min(self.lengths[slot], self.max_len - 1, self.cached_lengths[slot] + 1 + budget_left))
            budget_left -= ends[-1] - self.cached_lengths[slot] - 1
        for row, end in enumerate(ends):
            self.pages.resize(row, end)
        # The last token of every row first, then what comes before it.
        earlier_tokens = [
            (row, t)
            for row, (slot, end) in enumerate(zip(slots, ends, strict=True))
            for t in range(self.cached_lengths[slot], end - 1)
        ]
        row = torch.tensor([*range(len(slots)), *(row for row, _ in earlier_tokens)])
        position = torch.tensor([*(end - 1 for end in ends), *(t for _, t in earlier_tokens)])
        token_slots = torch.tensor(slots)[row]
        device = self.ragged.device
        hidden, layer_experts = self.ragged.step(
            self.tokens[token_slots, position].to(device), row.to(device), position.to(device), len(slots)
        )
        if layer_experts:
            experts = torch.stack(layer_experts, 1).to("cpu", torch.int16)
            if any(self.cached_lengths[slot] < self.routed_lengths[slot] for slot in slots):
                # A context that is read again under new weights keeps the experts under which its tokens were sampled.
                is_new = position >= torch.tensor(self.routed_lengths)[token_slots]
                token_slots, position, experts = token_slots[is_new], position[is_new], experts[is_new]
            self.experts[token_slots, position] = experts
        sampling_rows = []
        for row, (slot, end) in enumerate(zip(slots, ends, strict=True)):
            if not self.routed_lengths[slot]:
                self.first_loads[slot] = self.loads
            self.cached_lengths[slot], self.routed_lengths[slot] = end, max(self.routed_lengths[slot], end)
            if end == self.lengths[slot]:
                sampling_rows.append((row, slot))
            elif end == self.max_len - 1:
                self.state[slot] = "over"
                full.append(slot)
        return [*full, *(self._sample_tokens(hidden, sampling_rows) if sampling_rows else [])]

    def _sample_tokens(self, hidden: Tensor, sampling_rows: list[tuple[int, int]]) -> list[int]:
        rows, slots = (torch.tensor(x) for x in zip(*sampling_rows, strict=True))
        index = torch.tensor([self.lengths[slot] for _, slot in sampling_rows])
        logits = self.sampler.model.head(hidden[rows.to(hidden.device)])
        next_tokens, logp = (
            x.cpu() for x in sample(logits, self.temperature, self.draws[slots, index] if self.temperature else None)
        )
        self.tokens[slots, index], self.sampled[slots, index], self.logp[slots, index], self.versions[slots, index] = (
            next_tokens,
            True,
            logp,
            self.sampler.version,
        )
        finished_slots = []
        for (_, slot), token in zip(sampling_rows, next_tokens.tolist(), strict=True):
            self.lengths[slot] += 1
            length, limit = self.lengths[slot] - self.turn_starts[slot], self.turn_limits[slot]
            if (
                token in self.stop_ids[slot]
                or self.lengths[slot] == self.max_len
                or limit is not None
                and length >= limit
            ):
                self.state[slot] = "over"
                finished_slots.append(slot)
        return finished_slots

    def _append_tokens(self, slot: int, tokens: Sequence[int]) -> None:
        start = self.lengths[slot]
        self.lengths[slot] = self.turn_starts[slot] = end = min(start + len(tokens), self.max_len)
        self.tokens[slot, start:end] = torch.tensor(tokens[: end - start], dtype=torch.long)
        if self.cached_lengths[slot] < min(end, self.max_len - 1):
            self.state[slot] = "ready"
        else:
            self.state[slot] = "over"
            self.full.append(slot)

    def _choose_slots(self) -> list[bool]:
        """Whether each slot is read in this step: if it is ready, and if there are pages for all that is known of it.
        Where they are short, older contexts come first, and take pages from newer ones; the oldest that is ready takes
        them from any other one."""
        is_ready = [state == "ready" for state in self.state]
        if self.max_pages is None:
            return is_ready
        counts = [self.pages.count(length) for length in self.cached_lengths]
        is_read = [False] * len(counts)
        by_age = sorted((slot for slot, state in enumerate(self.state) if state != "free"), key=self.ages.__getitem__)
        for slot in (slot for slot in by_age if is_ready[slot]):
            num_pages = self.pages.count(min(self.lengths[slot], self.max_len - 1))
            num_missing = sum(counts) - counts[slot] + num_pages - self.max_pages
            victims = [victim for victim in reversed(by_age) if victim != slot and not is_read[victim]]
            if any(is_read):
                victims = [victim for victim in victims if self.ages[victim] > self.ages[slot]]
            if num_missing > sum(counts[victim] for victim in victims):
                continue
            for victim in victims:
                if num_missing > 0 and counts[victim]:
                    num_missing -= counts[victim]
                    counts[victim] = 0
                    self._drop_cache(victim)
            is_read[slot], counts[slot] = True, num_pages
        return is_read

    def _share_prefixes(self, is_read: list[bool]) -> list[bool]:
        """Copies what contexts of which nothing is read yet have in common with others. Returns which slots are read in
        this step: a context waits only for an older one that is read now and has not come to the end of what they
        share. Keys, values and experts are copied only if the present weights gave them."""
        by_age = sorted((slot for slot, state in enumerate(self.state) if state != "free"), key=self.ages.__getitem__)
        for at, slot in enumerate(by_age):
            if not is_read[slot] or self.cached_lengths[slot]:
                continue
            # The last token is read even if all are known: its hidden state gives the next one.
            length = min(self.lengths[slot], self.max_len - 1) - 1
            older = [source for source in by_age[:at] if is_read[source] or self.cached_lengths[source]]
            newer = [source for source in by_age[at + 1 :] if self.cached_lengths[source]]
            sources = [
                source
                for source in (*older, *newer)
                if not self.routed_lengths[source] or self.first_loads[source] == self.loads
            ]
            if length < MIN_SHARED or not sources:
                continue
            are_equal = self.tokens[sources, :length] == self.tokens[slot, :length]
            limits = torch.tensor([self.lengths[source] for source in sources])
            shared_lengths = are_equal.cumprod(1).sum(1).minimum(limits).tolist()
            num_shared, source = max(zip(shared_lengths, sources, strict=True), key=lambda pair: pair[0])
            available = min(num_shared, self.cached_lengths[source])
            if available < num_shared and source in older and is_read[source] and num_shared >= MIN_SHARED:
                is_read[slot] = False
            elif available >= MIN_SHARED:
                self._copy_prefix(source, slot, available)
        return is_read

    def _copy_prefix(self, source: int, slot: int, length: int) -> None:
        self.pages.copy(self.slots.index(source), self.slots.index(slot), length)
        num_routed = self.routed_lengths[slot]
        if not num_routed:
            self.first_loads[slot] = self.loads
        self.experts[slot, num_routed:length] = self.experts[source, num_routed:length]
        self.cached_lengths[slot], self.routed_lengths[slot] = length, max(num_routed, length)

    def _drop_cache(self, slot: int) -> None:
        """Forgets the keys and values of a context: if it goes on, it is read again."""
        self.cached_lengths[slot] = 0
        self.pages.resize(self.slots.index(slot), 0)

    def _move_rows(self, is_read: list[bool]) -> None:
        """Moves the rows of contexts that are read to the front."""
        front, back = 0, len(self.slots) - 1
        while True:
            while front <= back and is_read[self.slots[front]]:
                front += 1
            while front <= back and not is_read[self.slots[back]]:
                back -= 1
            if front > back:
                self.ready = front
                return
            a, b = self.slots[front], self.slots[back]
            self.pages.exchange(front, self.cached_lengths[a], back, self.cached_lengths[b])
            self.slots[front], self.slots[back] = b, a


class ContinuousSampler(Sampler):
    """A `Sampler` whose engines are `Continuous`, with at most `slots` contexts at a time: the next one starts as soon
    as one is over. The tokens are those of `Sampler` up to rounding, where every rollout has a generator of its own."""

    slots: int = 128  # pyright: ignore[reportIncompatibleVariableOverride] – always bounded
    cache_tokens: int | None = None
    """See `Continuous`."""

    def engine(self, slots: int, max_len: int, temperature: float = 1.0) -> Engine:
        return Continuous(self, min(self.slots, slots), max_len, temperature, cache_tokens=self.cache_tokens)


def make_sampler(
    engine: Literal["lockstep", "continuous"], model: Transformer, dtype: torch.dtype, slots: int, copy: bool = True
) -> Sampler:
    """A sampler whose engines are such. `slots`: contexts of a continuous engine, at most. `copy`: see `Sampler`."""
    if engine == "lockstep":
        return Sampler(model, dtype, copy=copy)
    sampler = ContinuousSampler(model, dtype, copy=copy)
    sampler.slots = slots
    return sampler
