"""Continuous batching: conversations of unlike lengths share a batch, and every one of them is where it is.

`sampler.py` keeps all rows at one position, so a row that reads a long answer reads it a token per step, with all others. Here every
context has a position of its own (Orca, OSDI 2022, iteration-level scheduling). A step feeds each context all that it has not read yet:
the token just sampled, or a whole prompt or answer, next to the others' single tokens. A context that is over makes room for the next
one at once. One that waits for its environment costs nothing.

    engine = Engine(sampler, slots=64, max_len=192)
    seat = engine.join(prompt, stop, draws)       a context takes a seat
    for seat in engine.step():                    seats whose turn is over, or whose context is full
        engine.answer(seat, tokens)               goes on with it, now or many steps later
        rollout = engine.leave(seat)              or takes it out
    engine.load(model, version)                   new weights between two steps, in the middle of turns

Weights may change in flight (Composer 2 report, §4.1). `cache="keep"` goes on with the keys and values that the old weights computed, as
PipelineRL does; "recompute" reads every context again first. Either way each token says which version sampled it, and with which log-probability:
that of the distribution that it was drawn from, old keys and values included. This is what the loss needs (`ref/async_rl.py`).

What a conversation draws depends on its own `draws` and its own tokens, not on its neighbours, its seat, or when it joined.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from ref.engine.ragged import Ragged
from ref.engine.sampler import Conversation, Rollout, Sampler, check_temperature, check_tokens, sample, uniform
from ref.network import Transformer

__all__ = ["ContinuousSampler", "Engine"]


class Engine:
    """Decodes up to `slots` contexts of at most `max_len` tokens with the policy of `sampler`. A step reads at most `budget` tokens more than
    one per context, so that a long prompt does not hold up the others for long."""

    def __init__(self, sampler: Sampler, slots: int, max_len: int, temperature: float = 1.0, budget: int = 512):
        check_temperature(temperature)
        for name, value in (("slots", slots), ("max_len", max_len), ("budget", budget)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")
        config = sampler.model.config
        self.sampler, self.temperature, self.budget, self.max_len, self.vocab = sampler, temperature, budget, max_len, config.vocab_size
        self.ragged = Ragged(sampler.model, slots, max_len)
        layers = config.num_hidden_layers if config.num_experts else 0
        self.tokens = torch.zeros(slots, max_len, dtype=torch.long)
        self.sampled, self.logp = torch.zeros(slots, max_len, dtype=torch.bool), torch.zeros(slots, max_len)
        self.version = torch.full((slots, max_len), -1)
        self.experts = torch.zeros(slots, max_len, layers, config.num_experts_per_tok, dtype=torch.int16)
        self.draws = torch.zeros(slots, max_len, dtype=torch.float64)
        # Per seat: tokens known, tokens that the cache holds, positions whose experts are recorded, and where the current turn begins.
        self.known, self.read, self.routed, self.begin, self.stops = ([0] * slots for _ in range(5))
        self.state: list[Literal["free", "ready", "over"]] = ["free"] * slots
        self.seats = list(range(slots))  # the seat of each row of the cache; ready ones are moved to the front
        self.ready, self.full = 0, []  # how many rows are ready; seats that given tokens filled

    @property
    def serving(self) -> int:
        """Version of the weights."""
        return self.sampler.version

    @property
    def free(self) -> int:
        """Seats that nobody holds."""
        return self.state.count("free")

    def join(self, prompt: Sequence[int], stop: int, draws: Float[Tensor, " max_len"] | None = None) -> int:
        """Take a seat with a context that starts with `prompt`, cut off at max_len, and whose turns end with `stop`. `draws`: uniform numbers
        in [0, 1), the t-th for the token at position t; not needed at temperature 0. Raises ValueError if no seat is free, for a prompt that
        is empty or holds tokens outside the vocabulary, and without draws at another temperature."""
        check_tokens("prompt", prompt, self.vocab, least=1)
        if draws is None and self.temperature or draws is not None and draws.shape != (self.max_len,):
            raise ValueError(f"draws must be {self.max_len} numbers, one for each position")
        if not self.free:
            raise ValueError(f"all {len(self.state)} seats are taken: `leave` one first")
        seat = self.state.index("free")
        self.known[seat] = self.read[seat] = self.routed[seat] = 0
        self.sampled[seat], self.logp[seat], self.version[seat], self.stops[seat] = False, 0.0, -1, stop
        if draws is not None:
            self.draws[seat] = draws
        self._give(seat, prompt)
        return seat

    def answer(self, seat: int, tokens: Sequence[int]) -> None:
        """Append given tokens, as far as they fit, after which the policy writes its next turn, if there is room for one. Raises ValueError
        unless the seat's turn is over, and for tokens outside the vocabulary."""
        self._must(seat, "over")
        check_tokens("answer", tokens, self.vocab)
        self._give(seat, tokens)

    def turn(self, seat: int) -> list[int] | None:
        """The turn that is over, without its stop token; None if max_len cut it off."""
        self._must(seat, "over")
        own = self.tokens[seat, self.begin[seat] : self.known[seat]].tolist()
        return own[:-1] if own and own[-1] == self.stops[seat] and self.sampled[seat, self.known[seat] - 1] else None

    def leave(self, seat: int, finished: bool = True) -> Rollout:
        """Free the seat, in whatever state, and return its context so far. `finished`: whether the conversation came to its end."""
        if self.state[seat] == "free":
            raise ValueError(f"seat {seat} is free")
        k, self.state[seat] = self.known[seat], "free"
        self.full = [one for one in self.full if one != seat]
        own = (self.tokens, self.sampled, self.logp, self.version)
        tokens, sampled, logp, version = (x[seat, :k].clone() for x in own)
        return Rollout(tokens, sampled, logp, version, self.experts[seat, : k - 1].clone(), finished)

    def load(self, model: Transformer, version: int, cache: Literal["keep", "recompute"] = "keep") -> None:
        """New weights for all tokens from the next step on. `cache`: what becomes of the keys and values of what was read before."""
        self.sampler.load(model, version)
        self.renewed(version, cache)

    def renewed(self, version: int, cache: Literal["keep", "recompute"] = "keep") -> None:
        """The same, after somebody has written new weights into `sampler.model`."""
        if cache not in ("keep", "recompute"):
            raise ValueError(f'cache must be "keep" or "recompute"; got {cache!r}')
        self.sampler.version = version
        self.ragged.copy()
        if cache == "recompute":
            self.read = [0] * len(self.read)

    @torch.inference_mode()
    def step(self) -> list[int]:
        """Feed every ready context, and sample a token for each that has been read to its end. Returns the seats whose turn is now over, or
        whose context is full. Without a ready context the network does nothing. Raises ValueError for a policy that gives no distribution."""
        self._arrange()
        full, self.full = self.full, []
        seats = self.seats[: self.ready]
        if not seats:
            return full
        left, ends = self.budget, []
        for seat in seats:
            # Nothing follows the last position, so nobody reads it.
            ends.append(min(self.known[seat], self.max_len - 1, self.read[seat] + 1 + left))
            left -= ends[-1] - self.read[seat] - 1
        # The last token of every row first, then what comes before it.
        rest = [(row, t) for row, (seat, end) in enumerate(zip(seats, ends, strict=True)) for t in range(self.read[seat], end - 1)]
        row = torch.tensor([*range(len(seats)), *(row for row, _ in rest)])
        position = torch.tensor([*(end - 1 for end in ends), *(t for _, t in rest)])
        where = torch.tensor(seats)[row]
        device = self.ragged.device
        hidden, chosen = self.ragged.step(self.tokens[where, position].to(device), row.to(device), position.to(device), len(seats))
        if chosen:
            # A context that is read again under new weights keeps the experts under which its tokens were sampled.
            new = position >= torch.tensor(self.routed)[where]
            self.experts[where[new], position[new]] = torch.stack(chosen, 1).to("cpu", torch.int16)[new]
        speakers = []
        for row, (seat, end) in enumerate(zip(seats, ends, strict=True)):
            self.read[seat], self.routed[seat] = end, max(self.routed[seat], end)
            if end == self.known[seat]:
                speakers.append((row, seat))
            elif end == self.max_len - 1:
                self.state[seat] = "over"
                full.append(seat)
        return [*full, *(self._speak(hidden, speakers) if speakers else [])]

    def _speak(self, hidden: Tensor, speakers: list[tuple[int, int]]) -> list[int]:
        rows, seats = (torch.tensor(x) for x in zip(*speakers, strict=True))
        at = torch.tensor([self.known[seat] for _, seat in speakers])
        logits = self.sampler.model.head(hidden[rows.to(hidden.device)])
        drawn, logp = (x.cpu() for x in sample(logits, self.temperature, self.draws[seats, at] if self.temperature else None))
        self.tokens[seats, at], self.sampled[seats, at], self.logp[seats, at], self.version[seats, at] = drawn, True, logp, self.sampler.version
        over = []
        for (_, seat), token in zip(speakers, drawn.tolist(), strict=True):
            self.known[seat] += 1
            if token == self.stops[seat] or self.known[seat] == self.max_len:
                self.state[seat] = "over"
                over.append(seat)
        return over

    def _give(self, seat: int, tokens: Sequence[int]) -> None:
        start = self.known[seat]
        self.known[seat] = self.begin[seat] = end = min(start + len(tokens), self.max_len)
        self.tokens[seat, start:end] = torch.tensor(tokens[: end - start], dtype=torch.long)
        if self.read[seat] < min(end, self.max_len - 1):
            self.state[seat] = "ready"
        else:
            self.state[seat] = "over"
            self.full.append(seat)

    def _arrange(self) -> None:
        """Move the rows of ready contexts to the front."""
        front, back = 0, len(self.seats) - 1
        while True:
            while front <= back and self.state[self.seats[front]] == "ready":
                front += 1
            while front <= back and self.state[self.seats[back]] != "ready":
                back -= 1
            if front > back:
                self.ready = front
                return
            a, b = self.seats[front], self.seats[back]
            self.ragged.exchange(front, back, max(self.read[a] if self.state[a] != "free" else 0, self.read[b]))
            self.seats[front], self.seats[back] = b, a

    def _must(self, seat: int, state: str) -> None:
        if self.state[seat] != state:
            raise ValueError(f"seat {seat} is {self.state[seat]}, not {state}")


class ContinuousSampler(Sampler):
    """A `Sampler` that plays conversations with an engine: at most `slots` at a time, the next as soon as one is over. The tokens are those of
    `Sampler` up to rounding, where every conversation has a generator of its own."""

    slots: int = 128

    def rollout(
        self,
        conversations: Sequence[Conversation],
        max_len: int,
        temperature: float = 1.0,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
    ) -> list[Rollout]:
        """As `Sampler.rollout`."""
        found: dict[int, Rollout] = {}
        self.follow(conversations, max_len, found.__setitem__, temperature, generator)  # returns None: no context follows
        return [found[number] for number in range(len(conversations))]

    def follow(
        self,
        conversations: Sequence[Conversation],
        max_len: int,
        after: Callable[[int, Rollout], Conversation | None],
        temperature: float = 1.0,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
    ) -> None:
        """As `Sampler.follow`, but the next context of a conversation does not wait for the others' first ones."""
        self.check(conversations, max_len, temperature)
        if not conversations:
            return
        engine = Engine(self, min(self.slots, len(conversations)), max_len, temperature)
        waiting, held = [*enumerate(conversations)][::-1], {}
        while waiting or held:
            while waiting and engine.free:
                number, conversation = waiting.pop()
                own = generator[number : number + 1] if isinstance(generator, Sequence) else generator
                held[engine.join(conversation.prompt, conversation.stop, uniform(own, 1, max_len)[0])] = number, conversation
            for seat in engine.step():
                number, conversation = held[seat]
                turn = engine.turn(seat)
                answer = None if turn is None else conversation.reply(turn)
                if answer is not None:
                    engine.answer(seat, answer)
                    continue
                del held[seat]
                following = after(number, engine.leave(seat, finished=turn is not None))
                if following is not None:
                    waiting.append((number, following))
