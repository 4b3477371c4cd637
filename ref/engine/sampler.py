"""A policy server in miniature: it samples from its own copy of the weights, in its own dtype.

Inference and training are separate engines in this recipe (Composer 2 report §4.1, §6.2): the trainer optimises float32
masters, and the sampler decodes with the latest copy it received. So every token comes back with its log-probability,
the policy version that sampled it, and the experts that its position was routed to. The trainer needs these for
importance ratios, staleness and router replay.

An engine decodes contexts in slots. `ref/rollout.py` drives it, and the environments on the other side:

    engine = sampler.engine(slots, max_len, temperature)
    slot = engine.add(prompt, stop_ids, draws)     a context takes a slot
    for slot in engine.step():                     slots whose turn is over, or whose context is full
        turn = engine.turn(slot)                   None: max_len cut it off
        engine.extend(slot, tokens)                the context goes on with given tokens
        segment = engine.remove(slot)              or is over

`Lockstep`, the engine of this file, is the plain one. Where it departs from a real server (vLLM, SGLang):
1. All rows of a batch share one position. A step feeds every row its next token: a waiting token of the prompt or of an
   observation if there is one, else the token just sampled. There is no paging and no padding mask, and no prefill
   beyond the prompts' common length. Finished rows are dropped by compacting the batch.
2. So all rows wait for the slowest environment, and a new context starts only once all are over. `continuous.py` is the
   engine without both.

| paper | here | shape |
|---|---|---|
| behaviour policy μ | the sampler's copy | – |
| log μ(a_t) | `Segment.logp` | T, zero on given tokens |
| replayed routing | `Segment.experts` | T−1 L K |
"""

import math
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Literal, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ref.engine.layout import Rows
from ref.lora import merged, weights
from ref.network import KVCache, Transformer

__all__ = ["Engine", "Lockstep", "Sampler", "Segment", "SampledTurn", "sample"]


@dataclass
class Segment:
    """One context as the policy saw it, T tokens in total."""

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
    """False if max_len cut the context off."""
    summary: Bool[Tensor, " T"] = cast(Tensor, None)
    """True where the policy wrote a summary (`ref/self_summary.py`); by default nowhere. False on the summary at the
    start of a context, which is given there."""

    def __post_init__(self):
        if self.summary is None:
            self.summary = torch.zeros_like(self.sampled)


@dataclass(frozen=True)
class SampledTurn:
    """What the policy wrote at a stretch."""

    tokens: list[int]
    """Without the stop token."""
    stop: int | None
    """The stop token that it chose; None if it reached the limit of a turn."""


@runtime_checkable
class Engine(Protocol):
    """Decodes contexts in slots: `Lockstep`, `ref.engine.continuous.Continuous`, or vLLM
    (`scaled/async_rl/vllm_engine.py`)."""

    max_len: int
    """Tokens of a context, at most."""
    in_waves: bool
    """Whether contexts start together, once all before them are over."""

    @property
    def version(self) -> int:
        """Of the weights."""
        ...

    @property
    def free_slots(self) -> int:
        """How many contexts may be added now."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether a step would do nothing: no context decodes, and none has become full."""
        ...

    def add(
        self,
        prompt: Sequence[int],
        stop_ids: Collection[int],
        draws: Float[Tensor, " max_len"] | None = None,
        longest_turn: int | None = None,
    ) -> int:
        """Takes a slot with a context that starts with `prompt`, cut off at max_len. A turn ends with one of
        `stop_ids`, the first also with `longest_turn` tokens. `draws`: uniform numbers in [0, 1), the t-th for the
        token at position t; not needed at temperature 0. Raises ValueError if no slot is free, for a prompt that is
        empty or holds tokens outside the vocabulary, and without draws at another temperature."""
        ...

    def step(self) -> list[int]:
        """Decodes. Returns the slots whose turn is now over, or whose context is full."""
        ...

    def turn(self, slot: int) -> SampledTurn | None:
        """The turn that is over; None if max_len cut the context off."""
        ...

    def extend(self, slot: int, tokens: Sequence[int], longest_turn: int | None = None) -> None:
        """Appends given tokens, as far as they fit, after which the policy writes its next turn, of at most
        `longest_turn` tokens, if there is room for one. Raises ValueError unless the slot's turn is over, and for
        tokens outside the vocabulary."""
        ...

    def remove(self, slot: int, finished: bool = True) -> Segment:
        """Frees the slot, in whatever state, and returns its context so far. `finished`: whether it came to its end by
        itself."""
        ...


def uniform(generator: torch.Generator | None, length: int) -> Float[Tensor, " T"]:
    """Uniform numbers in [0, 1), float64: what a context draws at position t."""
    device = generator.device if generator is not None else "cpu"
    return torch.rand(length, generator=generator, dtype=torch.float64, device=device).cpu()


def sample(logits: Float[Tensor, "B V"], temperature: float, u: Float[Tensor, " B"] | None):
    """Tokens [B] drawn from softmax(logits / temperature) by inverting the cumulative distribution at u, uniform in [0,
    1), and their log-probabilities [B] under it (float32). Temperature 0 is greedy and needs no u: it takes the first
    maximum, with log-probability
    0. Raises ValueError for a temperature that is negative or not finite, and for logits that define no distribution
       (NaN, inf, or
    −inf everywhere)."""
    check_temperature(temperature)
    if temperature == 0:
        token = logits.argmax(-1)
        check_logits(logits.gather(1, token[:, None]).isfinite())
        return token, torch.zeros(len(logits), device=logits.device)
    assert u is not None
    logp = (logits.float() / temperature).log_softmax(-1)  # log μ
    mass = logp.exp().double().cumsum(-1)
    check_logits(mass[:, -1:] > 0)
    # The cumulative distribution of μ, inverted at u
    token = torch.searchsorted(mass, u[:, None].to(mass) * mass[:, -1:], right=True).clamp_(max=logits.shape[-1] - 1)
    return token[:, 0], logp.gather(1, token)[:, 0]


def check_temperature(temperature: float) -> None:
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be finite and not negative; got {temperature}")


def check_logits(fine: Bool[Tensor, "B 1"]) -> None:
    if not bool(fine.all()):
        row = int(fine[:, 0].logical_not().nonzero()[0])
        raise ValueError(
            f"logits / temperature must be finite or −inf, with a finite one in each row; row {row} of "
            f"{len(fine)} is not"
        )


def check_tokens(name: str, tokens: Sequence, vocab: int | float, least: int = 0) -> None:
    if len(tokens) < least or not all(isinstance(t, int) and 0 <= t < vocab for t in tokens):
        raise ValueError(f"{name} must hold tokens 0 to {vocab - 1}, and a prompt must not be empty")


def check_sizes(temperature: float, **sizes: int) -> None:
    check_temperature(temperature)
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}")


def check_context(
    engine: "Engine", prompt: Sequence[int], draws: Tensor | None, vocab: int, temperature: float
) -> None:
    """What `Engine.add` refuses."""
    check_tokens("prompt", prompt, vocab, least=1)
    if draws is None and temperature or draws is not None and draws.shape != (engine.max_len,):
        raise ValueError(f"draws must be {engine.max_len} numbers, one for each position")
    if not engine.free_slots:
        raise ValueError("all slots are taken: `remove` a context first")


def check_state(states: Sequence[str], slot: int, state: str) -> None:
    if states[slot] != state:
        raise ValueError(f"slot {slot} is {states[slot]}, not {state}")


class Sampler:
    """Holds a copy of a policy, and makes the engines that decode with it.

    copy: False takes the weights of `model` themselves, and converts them to `dtype`: no second network is held, and
    `model` must not be trained any more.
    rounding: applied to every weight matrix of the layers before it is stored in `dtype`, as in an engine with coarser
    weights. It includes routers and expert stacks, but not norms, embedding and head. None: no rounding."""

    def __init__(
        self,
        model: Transformer,
        dtype: torch.dtype = torch.bfloat16,
        version: int = 0,
        rounding: Callable[[Tensor], Tensor] | None = None,
        copy: bool = True,
    ):
        plain = merged(model)
        self.model = (deepcopy(plain) if copy else plain).to(dtype).requires_grad_(False)
        self.dtype, self.version, self.rounding = dtype, version, rounding
        if rounding is not None:
            self.load(model, version)

    @torch.no_grad()
    def load(self, model: Transformer, version: int) -> None:
        """Copies the weights of `model`, its adapters merged, rounded to the sampler's dtype."""
        for (name, param), (_, source) in zip(self.model.named_parameters(), weights(model), strict=True):
            round_weight = self.rounding if name.startswith("layers.") and source.ndim > 1 else None
            param.copy_(source if round_weight is None else round_weight(source))
        self.version = version

    slots: int | None = None
    """Contexts that its engines hold at a time, at most; None: as many as they are asked for."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return self.model.config.vocab_size

    def engine(self, slots: int, max_len: int, temperature: float = 1.0) -> Engine:
        """An engine for up to `slots` contexts at a time, of at most `max_len` tokens each. Raises ValueError for an
        invalid temperature, and for slots or max_len below 1."""
        return Lockstep(self, slots, max_len, temperature)


class Lockstep:
    """An `Engine` whose contexts share one position. All of them are added before the first step."""

    in_waves = True

    def __init__(self, sampler: Sampler, slots: int, max_len: int, temperature: float = 1.0):
        check_sizes(temperature, slots=slots, max_len=max_len)
        self.sampler, self.slots, self.max_len, self.temperature = sampler, slots, max_len, temperature
        self.prompts: list[tuple[Sequence[int], Collection[int], Tensor | None]] = []
        self.turn_limits: list[int | None] = []  # tokens of the current turn, at most
        self.state: list[Literal["free", "ready", "over"]] = []
        self.started = False

    @property
    def version(self) -> int:
        return self.sampler.version

    @property
    def free_slots(self) -> int:
        return 0 if self.started else self.slots - len(self.prompts)

    @property
    def is_idle(self) -> bool:
        return "ready" not in self.state or "over" in self.state

    def add(
        self,
        prompt: Sequence[int],
        stop_ids: Collection[int],
        draws: Float[Tensor, " max_len"] | None = None,
        longest_turn: int | None = None,
    ) -> int:
        check_context(self, prompt, draws, self.sampler.vocab_size, self.temperature)
        self.prompts.append((prompt, stop_ids, draws))
        self.turn_limits.append(longest_turn)
        self.state.append("ready")
        return len(self.prompts) - 1

    def turn(self, slot: int) -> SampledTurn | None:
        check_state(self.state, slot, "over")
        if self.full[slot]:
            return None
        turn_tokens = self.tokens[slot, self.turn_starts[slot] : self.lengths[slot]].tolist()
        if turn_tokens[-1] in self.prompts[slot][1]:
            return SampledTurn(turn_tokens[:-1], turn_tokens[-1])
        return None if self.lengths[slot] == self.max_len else SampledTurn(turn_tokens, None)

    def extend(self, slot: int, tokens: Sequence[int], longest_turn: int | None = None) -> None:
        check_state(self.state, slot, "over")
        check_tokens("answer", tokens, self.sampler.vocab_size)
        start = self.lengths[slot]
        end = self.lengths[slot] = self.turn_starts[slot] = min(start + len(tokens), self.max_len)
        self.tokens[slot, start:end] = torch.tensor(tokens[: end - start], dtype=torch.long)
        self.state[slot], self.turn_limits[slot] = "ready", longest_turn

    def remove(self, slot: int, finished: bool = True) -> Segment:
        if self.state[slot] == "free":
            raise ValueError(f"slot {slot} is free")
        self.state[slot] = "free"
        segment = self._make_segment(slot, finished) if self.started else self._make_prompt_segment(slot, finished)
        if set(self.state) == {"free"}:
            self.prompts, self.turn_limits, self.state, self.started = [], [], [], False
        return segment

    def _make_segment(self, slot: int, finished: bool) -> Segment:
        length = self.lengths[slot]
        version = torch.where(self.sampled[slot, :length], self.version, -1)
        tokens, sampled, logp = (x[slot, :length].clone() for x in (self.tokens, self.sampled, self.logp))
        return Segment(tokens, sampled, logp, version, self.experts[slot, : length - 1].clone(), finished)

    def _make_prompt_segment(self, slot: int, finished: bool) -> Segment:
        """Before the first step: the prompt alone."""
        tokens, config = torch.tensor(self.prompts[slot][0][: self.max_len]), self.sampler.model.config
        length, layers = len(tokens), config.num_hidden_layers if config.num_experts else 0
        experts = torch.zeros(length - 1, layers, config.num_experts_per_tok, dtype=torch.int16)
        return Segment(
            tokens,
            torch.zeros(length, dtype=torch.bool),
            torch.zeros(length),
            torch.full((length,), -1),
            experts,
            finished,
        )

    def start(self) -> None:
        """Lays out the contexts that were added."""
        config, B = self.sampler.model.config, len(self.prompts)
        layers = config.num_hidden_layers if config.num_experts else 0
        self.lengths = [min(len(prompt), self.max_len) for prompt, *_ in self.prompts]  # tokens known of each
        self.turn_starts, self.full = list(self.lengths), [False] * B  # where the current turn begins
        self.tokens = torch.zeros(B, self.max_len, dtype=torch.long)
        for row, (prompt, *_) in enumerate(self.prompts):
            self.tokens[row, : self.lengths[row]] = torch.tensor(prompt[: self.max_len])
        self.sampled = torch.zeros(B, self.max_len, dtype=torch.bool)
        self.logp = torch.zeros(B, self.max_len)
        self.experts = torch.zeros(B, self.max_len, layers, config.num_experts_per_tok, dtype=torch.int16)
        draws = [draws for _, _, draws in self.prompts if draws is not None]
        self.draws = torch.stack(draws) if draws else torch.zeros(B, self.max_len, dtype=torch.float64)
        device = self.sampler.model.embed_tokens.weight.device
        with torch.inference_mode():
            self.cache = KVCache(config, B, self.max_len, self.sampler.dtype, device=device)
            self.decode = Rows(self.sampler.model, self.max_len)
        self.rows, self.t, self.started = list(range(B)), 0, True  # the contexts that are rows of the batch

    def step(self) -> list[int]:
        """Decodes until a turn is over, or until all contexts are full."""
        if self.is_idle:
            return []
        if not self.started:
            self.start()
        finished_slots: list[int] = []
        while not finished_slots and self.t < self.max_len - 1:
            finished_slots = self._decode_tokens()
        if not finished_slots:
            finished_slots = [slot for slot, state in enumerate(self.state) if state == "ready"]
            for slot in finished_slots:
                self.full[slot] = True
        for slot in finished_slots:
            self.state[slot] = "over"
        return finished_slots

    @torch.inference_mode()
    def _decode_tokens(self) -> list[int]:
        """One token per row, or as many as every row already knows: the prompts' common length runs in one pass.
        Returns the slots whose turn is now over."""
        model, t = self.sampler.model, self.t
        live_rows = [index for index, slot in enumerate(self.rows) if self.state[slot] == "ready"]
        # A finished row still costs its share of every step, but dropping it copies the cache: drop rows a tenth at a
        # time.
        if len(live_rows) <= 0.9 * len(self.rows):
            self.cache.select(torch.tensor(live_rows).to(self.device))
            self.rows, live_rows = [self.rows[index] for index in live_rows], list(range(len(live_rows)))
        rows = torch.tensor(self.rows)
        self.t = n = min(max(t + 1, min(self.lengths[self.rows[index]] for index in live_rows)), self.max_len - 1)
        if n == t + 1:
            hidden, layer_experts = self.decode.step(self.tokens[rows, t].to(self.device), self.cache)
        else:
            output = model(self.tokens[rows, t:n].to(self.device), cache=self.cache, logits=False)
            hidden, layer_experts = output.hidden[:, -1], output.experts
        if layers := self.experts.shape[2]:
            self.experts[rows, t:n] = (
                torch.stack(layer_experts, 1).to("cpu", torch.int16).view(len(rows), n - t, layers, -1)
            )
        sampling_rows = [index for index in live_rows if self.lengths[self.rows[index]] == n]
        if not sampling_rows:
            return []
        slots = [self.rows[index] for index in sampling_rows]
        slot_index = torch.tensor(slots)
        logits = model.head(hidden[torch.tensor(sampling_rows).to(self.device)])
        next_tokens, logp = (x.cpu() for x in sample(logits, self.temperature, self.draws[slot_index, n]))
        self.tokens[slot_index, n], self.sampled[slot_index, n], self.logp[slot_index, n] = next_tokens, True, logp
        finished_slots = []
        for slot, token in zip(slots, next_tokens.tolist(), strict=True):
            self.lengths[slot], limit = n + 1, self.turn_limits[slot]
            if token in self.prompts[slot][1] or limit is not None and n + 1 - self.turn_starts[slot] >= limit:
                finished_slots.append(slot)
        return finished_slots

    @property
    def device(self) -> torch.device:
        return self.sampler.model.embed_tokens.weight.device
