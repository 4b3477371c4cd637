"""Self-summarisation: a rollout longer than its context, in segments joined by the policy's summaries.

Paper: Composer 2 technical report (arXiv:2603.24477v2), §4.1.

    segment 1    prompt turn answer turn answer … | request | summary      the context reached the trigger
    segment 2    prompt summary | turn answer … | request | summary
    segment S    prompt summary | turn answer … turn                       the conversation is over

A fixed request, appended to the running context, asks for the summary, so the summary is one more turn on the
same KV cache. Compaction in a separate call has its own prompt and must prefill the entire context again. Every
token that the policy wrote in the chain gets the final reward, summaries included: a summary is good if the
turns after it go well, and nothing else grades it.

    A_c = R_c − mean of R over the chains of c's group              one reward for each chain
    L   = −(1/budget) Σ_c A_c Σ_{s ∈ c} Σ_{t sampled in s} ρ_t      with the clip of `ref/dr_grpo.py`

The trap is that segments are rows of the batch. A baseline or a denominator that counts rows weights a chain
by how often it ran out of context. Here rows only inherit from their chain (`spread`): the baseline is over
chains, and the budget is one number for the step. A later segment starts with the summary, but there the summary
is given and not sampled, so no token counts twice.

Where this file departs from the paper
1. The trigger is checked at the end of a turn, after the answer, so no turn is split. The turn and answer that
   reach it may exceed it by `room` tokens. No context exceeds trigger + room + request + longest_summary.
2. A summary that is too long ends the chain, as truncation ends a plain rollout: unfinished, but not masked.
3. The only harness state carried over is the tokens of `resume`, which are always the same.
4. Rows of the sampler share one position, so no context can restart inside a batch: all first segments are
   sampled together, then all second ones. Prefill is counted as if contexts shared no prompt.
5. For comparison we add "separate" compaction, which gives the summary a segment of its own, "truncate", which
   keeps the newest exchanges in the space of a summary, and "none".

Run it
    etude run self-summary --scale small     seconds; the same as: python -m ref.self_summary
    etude figure self-summary                what joining by summaries is worth to an agent; needs runs/small
    etude run self-summary --scale full      scaled/self_summary.py

Glossary
    report              variable              shape   unit
    trigger length      `Chaining.trigger`    –       tokens of context
    synthetic query     `Chaining.request`    –       tokens, given
    chain, c            `Chain`               C       –
    segment, s          `Segment`             S       rows of the batch, over all chains
    A_c                 `advantages`          C       in units of the reward; `spread` expands it to S
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, Literal, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ref.checks import expect
from ref.engine.conversation import Forkable, converse
from ref.engine.decoder import Decoder
from ref.engine.sampler import Conversation, Rollout, Sampler, check_temperature, check_tokens

__all__ = ["Chain", "Chaining", "Demo", "Segment", "converse_chain", "demo", "rollout_chains", "spread"]


@dataclass(frozen=True)
class Chaining:
    """When a context ends and how the next one starts; lengths in tokens. A ValueError names the wrong field."""

    trigger: int
    """Context length at which a segment ends."""
    longest_summary: int
    """Longest summary, including its stop token; "truncate" keeps as many tokens."""
    room: int
    """How far the turn and answer that reach the trigger may exceed it; any more is taken from the summary."""
    request: tuple[int, ...] = ()
    """Given tokens that ask for the summary, which the policy writes next."""
    resume: tuple[int, ...] = ()
    """Given tokens between a summary's stop token and the policy's next turn."""
    instruction: tuple[int, ...] = ()
    """Given tokens at the start of a separate compaction, before the old context."""
    max_segments: int = 8
    """Contexts that a chain may use, without separate compactions; the last one runs until it is cut off."""
    join: Literal["self", "separate", "truncate", "none"] = "self"
    """How two segments are joined; "none" keeps one context, cut off at the same limit."""

    def __post_init__(self):
        for name, least in (("trigger", 1), ("longest_summary", 1), ("room", 0), ("max_segments", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}; got {value}")
        if self.join not in ("self", "separate", "truncate", "none"):
            raise ValueError(f"join must be self, separate, truncate or none; got {self.join!r}")
        if self.join in ("self", "separate") and not self.request:
            raise ValueError(f'request must not be empty: join="{self.join}" asks for a summary')

    @property
    def limit(self) -> int:
        """Longest context."""
        front = len(self.instruction) if self.join == "separate" else 0
        return front + self.trigger + self.room + len(self.request) + self.longest_summary


@dataclass
class Segment(Rollout):
    """One context of a chain, T tokens: a rollout that knows which of its tokens are a summary. `finished` is
    the sampler's: False if the limit cut this context off."""

    summary: Bool[Tensor, " T"]
    """True where the policy wrote a summary; False on the summary at the start of a context, which is given there."""


@dataclass
class Chain:
    """One rollout: segments in the order in which they were sampled."""

    segments: list[Segment] = field(default_factory=list)
    """Rows of the batch. Every token that the policy wrote is `sampled` in exactly one of them."""
    finished: bool = False
    """Whether the conversation came to its end; False if a limit or an overlong summary cut it off."""
    saved: int = 0
    """Extra prefill that separate compaction would have needed: `instruction` and the context again."""

    @property
    def prefill(self) -> int:
        """Given tokens that the engine ran: prompts, answers, requests, and the start of each context."""
        return sum(int((~s.sampled).sum()) for s in self.segments)

    @property
    def written(self) -> int:
        """Tokens that the policy wrote, summaries included."""
        return sum(int(s.sampled.sum()) for s in self.segments)

    @property
    def summary_tokens(self) -> int:
        """Tokens that the policy wrote in summaries."""
        return sum(int(s.summary.sum()) for s in self.segments)


C = TypeVar("C", bound=Conversation)
F = TypeVar("F", bound=Forkable)


class Link(Generic[C]):
    """A conversation as the sampler sees it, one context after another: answers until the trigger, then the
    request. `take` receives what was sampled and opens the next context."""

    def __init__(self, inner: C, how: Chaining):
        self.inner, self.how, self.stop, self.chain = inner, how, inner.stop, Chain()
        self.used, self.exchanges = 0, []  # contexts worked in; turns with their answers
        self.open(list(inner.prompt))

    def open(self, prompt: list[int], work: bool = True) -> None:
        """Open a new context: one to work in, or a separate compaction, whose only turn is the summary."""
        self.prompt, self.length, self.used = prompt, len(prompt), self.used + work
        self.over = False  # the context ended by itself; no limit cut it off
        self.begin = None if work else len(prompt)  # where the summary starts
        self.answer: list[int] = []  # the last one, once the trigger is reached
        self.summary: list[int] | None = None

    def reply(self, turn: list[int]) -> list[int] | None:
        answer = self.answer_to(turn)
        self.over = answer is None
        return answer

    def answer_to(self, turn: list[int]) -> list[int] | None:
        if self.begin is not None:
            self.summary = turn
            return None
        answer = self.inner.reply(turn)
        if answer is None:
            self.chain.finished = True
            return None
        self.exchanges.append([*turn, self.stop, *answer])
        self.length += len(self.exchanges[-1])
        if self.how.join == "none" or self.length < self.how.trigger or self.used == self.how.max_segments:
            return answer
        self.answer = answer
        if self.how.join != "self":
            return None
        self.begin = self.length + len(self.how.request)
        return [*answer, *self.how.request]

    def take(self, rollout: Rollout) -> bool:
        """Add the segment to the chain. Returns True if another context follows, which is then already open."""
        how, T = self.how, len(rollout.tokens)
        summary = torch.arange(T) >= (T if self.begin is None else self.begin)
        self.chain.segments.append(Segment(**vars(rollout), summary=summary))
        if how.join == "self" and bool(summary.any()):
            # A separate call would also have read the last answer, but then the running context would not.
            self.chain.saved += len(how.instruction) + self.length - len(self.answer)
        return rollout.finished and self.go_on(rollout.tokens.tolist())

    def go_on(self, tokens: list[int]) -> bool:
        """After a context that no limit cut off, open the next one, if there is one."""
        how = self.how
        if self.chain.finished:
            return False
        if self.summary is not None:
            if len(self.summary) + 1 > how.longest_summary:
                return False
            self.open([*self.inner.prompt, *self.summary, self.stop, *how.resume])
        elif how.join == "separate":
            self.open([*how.instruction, *tokens, *self.answer, *how.request], work=False)
        else:
            kept, size = [], 0
            for exchange in reversed(self.exchanges):
                size += len(exchange)
                if kept and size > how.longest_summary:
                    break
                kept.insert(0, exchange)  # always keep the newest, whatever its size: it holds the last answer
            self.open([*self.inner.prompt, *sum(kept, [])])
        return True

    def fork(self: "Link[F]") -> "Link[F]":
        """A copy of the conversation in its current state, which continues independently (`ref.engine.conversation`)."""
        twin = copy.copy(self)
        twin.inner, twin.exchanges = self.inner.fork(), list(self.exchanges)
        twin.chain = replace(self.chain, segments=list(self.chain.segments))
        return twin


def rollout_chains(
    sampler: Sampler,
    conversations: Sequence[Conversation],
    how: Chaining,
    temperature: float = 1.0,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
) -> list[Chain]:
    """Run every conversation until it or its chain ends; chains are returned in the order given. A `Sampler` plays all
    first segments as one batch, all second ones as the next, and so on; a `ContinuousSampler` does not wait. No
    context is longer than `how.limit` tokens. `generator`: one for all, or one for each conversation, as in
    `sampler.rollout`.

    A conversation that ends below the trigger gives one segment, the rollout of `sampler.rollout`. Raises
    ValueError if there are no conversations, for given tokens outside the vocabulary, an empty prompt, an invalid
    temperature, and a policy whose log-probs are not finite. `trigger` must exceed every prompt plus the longest
    summary and `resume`, or a context could start at the trigger. §4.1."""
    if not conversations:
        raise ValueError("conversations must hold at least one conversation")
    check_temperature(temperature)
    given = {f"prompt of conversation {n}": c.prompt for n, c in enumerate(conversations)}
    network = getattr(sampler, "model", None)  # a scripted stand-in has no model
    vocab = network.config.vocab_size if network is not None else math.inf
    for name, tokens in (given | {n: getattr(how, n) for n in ("request", "resume", "instruction")}).items():
        check_tokens(name, tokens, vocab, least=1 if name in given else 0)
    opening = max(len(c.prompt) for c in conversations) + how.longest_summary + len(how.resume)
    if how.join != "none" and how.trigger <= opening:
        raise ValueError(
            f"trigger must exceed the longest prompt plus longest_summary plus resume, {opening} tokens in total, "
            f"or no turn fits in a context that starts with a summary; got {how.trigger}"
        )
    links = [Link(c, how) for c in conversations]

    def follow(number: int, rollout: Rollout) -> Link | None:
        if not bool(rollout.logp.isfinite().all()):
            raise ValueError("sampler must give finite log-probs, but its policy gave others")
        return links[number] if links[number].take(rollout) else None

    play = getattr(sampler, "follow", None) or partial(Sampler.follow, sampler)
    play(links, how.limit, follow, temperature, generator)
    return [link.chain for link in links]


def converse_chain(decoder: Decoder, conversation: F, how: Chaining, ahead: bool = True) -> Iterator[F]:
    """Run one chain at batch 1, as `ref.engine.conversation.converse` runs one context. After each context, when
    `decoder.tokens` holds it, yields the current conversation: the one given, or a fork of it. Raises ValueError
    if the decoder's max_len is not `how.limit`, where a context is cut off."""
    if decoder.max_len != how.limit:
        raise ValueError(f"decoder must have max_len {how.limit}, which is how.limit; got {decoder.max_len}")
    link = Link(conversation, how)
    while True:
        link = converse(decoder, link, ahead=ahead)
        yield link.inner
        if not (link.over and link.go_on(decoder.tokens)):
            return


def spread(advantages: Float[Tensor, " C"], chains: Sequence[Chain]) -> Float[Tensor, " S"]:
    """Expand the advantages of C chains to their S segments, in the order of
    `[s for c in chains for s in c.segments]`. Every segment gets its chain's advantage, undivided. The policy
    loss, masked by `sampled`, then applies it once to every token that the policy wrote in the chain.

    Compute `advantages` over chains (one reward each), and divide the loss by a budget that does not count
    segments. Raises ValueError if there are no chains, if a chain has no segments, or if the advantages are not
    C finite floating-point numbers."""
    if not chains:
        raise ValueError("chains must hold at least one chain")
    expect("advantages", advantages, "float", len(chains))
    if not bool(advantages.isfinite().all()):
        raise ValueError(f"advantages must be finite; got {advantages.tolist()}")
    counts = torch.tensor([len(c.segments) for c in chains], device=advantages.device)
    if not bool((counts > 0).all()):
        raise ValueError(f"chains must have segments, but chain {int(counts.argmin())} has none")
    return advantages.repeat_interleave(counts)


@dataclass(frozen=True)
class Demo:
    """A random network in a made-up conversation: nothing is learned, and all figures are counts."""

    chains: int = 64
    """Number of conversations, all identical."""
    turns: int = 10
    """Turns after which a conversation is over."""
    trigger: int = 64
    """Context length that triggers a summary."""
    longest_summary: int = 40
    """Longest summary; turns of the random network are about 8 tokens long."""
    seed: int = 0
    """Seed of the weights and of sampling."""


class _Quiz:
    """Answers each of `turns` turns with three given tokens."""

    def __init__(self, turns: int):
        self.prompt, self.stop, self.left = [1, 2, 3, 4], 0, turns

    def reply(self, turn: list[int]) -> list[int] | None:
        self.left -= 1
        return [5, 6, 7] if self.left else None


def demo(config: Demo = Demo(), log: Callable[..., None] = lambda *_, **__: None) -> dict[str, float]:
    """For each way of joining, means over chains: segments, finished, tokens written, summary tokens,
    prefill, and the prefill saved over separate compaction of the same chains. Then the trap, with a made-up
    reward of −1 per 100 tokens written: a chain's mean advantage if the baseline were over rows (over chains it
    is zero), and the largest number of segments in a chain."""
    from ref.network import Config, Transformer

    torch.manual_seed(config.seed)
    shape = Config.tiny(
        8, hidden_size=16, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=16, num_experts=0, intermediate_size=16
    )
    sampler = Sampler(Transformer(shape), torch.float32)
    figures: dict[str, float] = {}
    for step, join in enumerate(("self", "separate", "truncate", "none"), 1):
        how = Chaining(config.trigger, config.longest_summary, room=32, request=(6, 6), resume=(7,), instruction=(5,) * 8, join=join)
        quizzes = [_Quiz(config.turns) for _ in range(config.chains)]
        chains = rollout_chains(sampler, quizzes, how, generator=torch.Generator().manual_seed(config.seed))
        counts = {"segments": [len(c.segments) for c in chains], "finished": [c.finished for c in chains]}
        for name in ("written", "summary_tokens", "prefill", "saved"):
            counts[name] = [getattr(c, name) for c in chains]
        figures |= {f"{join}_{name}": sum(values) / len(chains) for name, values in counts.items()}
        if join == "self":
            rewards = -torch.tensor(counts["written"]) / 100
            figures["advantage_over_rows"] = (rewards.mean() - spread(rewards, chains).mean()).item()
            figures["most_segments"] = float(max(counts["segments"]))
        log(step, 4, **figures)
    return figures


if __name__ == "__main__":
    for name, value in demo().items():
        print(f"{name:24s} {value:.3f}")
