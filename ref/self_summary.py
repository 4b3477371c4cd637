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
4. Prefill is counted as if contexts shared no prompt.
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
    segment, s          `ref.engine.sampler.Segment`  S   rows of the batch, over all chains
    A_c                 `advantages`          C       in units of the reward; `spread` expands it to S
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from ref.checks import expect
from ref.engine.sampler import Sampler, Segment, uniform

__all__ = ["Chain", "ChainBuilder", "Chaining", "Demo", "Segment", "demo", "spread"]


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
        for name, minimum in (("trigger", 1), ("longest_summary", 1), ("room", 0), ("max_segments", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < minimum:
                raise ValueError(f"{name} must be a whole number of at least {minimum}; got {value}")
        if self.join not in ("self", "separate", "truncate", "none"):
            raise ValueError(f"join must be self, separate, truncate or none; got {self.join!r}")
        if self.join in ("self", "separate") and not self.request:
            raise ValueError(f'request must not be empty: join="{self.join}" asks for a summary')

    @property
    def limit(self) -> int:
        """Longest context."""
        front = len(self.instruction) if self.join == "separate" else 0
        # trigger + room + request + longest_summary
        return front + self.trigger + self.room + len(self.request) + self.longest_summary


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
        return sum(int((~segment.sampled).sum()) for segment in self.segments)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that the policy wrote, summaries included."""
        return sum(int(segment.sampled.sum()) for segment in self.segments)

    @property
    def summary_tokens(self) -> int:
        """Tokens that the policy wrote in summaries."""
        return sum(int(segment.summary.sum()) for segment in self.segments)


class ChainBuilder:
    """The contexts of one rollout, while it is sampled: when one ends, and how the next one opens. It knows tokens and
    no environment.

    builder = ChainBuilder(prompt, chaining)
    engine.add(builder.prompt, …)                   the context that is open
    builder.is_summary                              whether the turn that the policy writes now is a summary
    tokens = builder.answer(turn, answer)           after a turn and its answer: tokens to append, or None if the
                                                    context ends here
    builder.close(segment)                          takes what was sampled; True if another context is open
    """

    def __init__(self, prompt: Sequence[int], chaining: Chaining):
        opening = len(prompt) + chaining.longest_summary + len(chaining.resume)
        if chaining.join != "none" and chaining.trigger <= opening:
            raise ValueError(
                f"trigger must exceed the prompt plus longest_summary plus resume, {opening} tokens in total, "
                f"or no turn fits in a context that starts with a summary; got {chaining.trigger}"
            )
        self.first, self.chaining, self.chain = list(prompt), chaining, Chain()
        self.num_contexts = 0  # contexts worked in
        self.base, self.dropped = self.first, 0  # with which the turns of the context begin; the turns before them
        self.exchanges: list[
            tuple[list[int], int]
        ] = []  # of the context: tokens of turns with their answers, and how many turns
        # How the next context opens, where the format has rewritten the messages
        self.rewritten_prompt: list[int] | None = None
        self.is_lost = False
        self.open(self.first)

    def open(self, prompt: list[int], work: bool = True) -> None:
        """Opens a context: one to work in, or a separate compaction, whose only turn is the summary."""
        self.prompt, self.length, self.num_contexts = prompt, len(prompt), self.num_contexts + work
        self.summary_start = None if work else len(prompt)  # where the summary starts
        self.pending: list[int] = []  # the last answer, once the trigger is reached
        self.summary: list[int] | None = None

    @property
    def is_summary(self) -> bool:
        """Whether the policy now writes a summary."""
        return self.summary_start is not None

    def summarise(self, turn: Sequence[int]) -> None:
        """Takes the summary with its stop token; its context ends here."""
        self.summary = list(turn)

    def answer(self, turn: Sequence[int], answer: Sequence[int]) -> list[int] | None:
        """Takes the sampled tokens of a turn and the given ones that answer it. Returns the tokens to append after the
        turn, or None if the context ends here."""
        chaining, exchange = self.chaining, [*turn, *answer]
        self.exchanges.append((exchange, 1))
        self.length += len(exchange)
        if chaining.join == "none" or self.length < chaining.trigger or self.num_contexts == chaining.max_segments:
            return list(answer)
        self.pending = list(answer)
        if chaining.join != "self":
            return None
        self.summary_start = self.length + len(chaining.request)
        return [*answer, *chaining.request]

    def finish(self) -> None:
        """The episode is over."""
        self.chain.finished = True

    def close(self, segment: Segment) -> bool:
        """Adds what was sampled to the chain. Returns whether another context follows, which is then open."""
        chaining, T = self.chaining, len(segment.tokens)
        segment.summary = torch.arange(T) >= (T if self.summary_start is None else self.summary_start)
        self.chain.segments.append(segment)
        if chaining.join == "self" and bool(segment.summary.any()):
            # A separate call would also have read the last answer, but then the running context would not.
            self.chain.saved += len(chaining.instruction) + self.length - len(self.pending)
        return segment.finished and self.go_on(segment.tokens.tolist())

    def go_on(self, tokens: list[int]) -> bool:
        """After a context that no limit cut off, opens the next one, if there is one."""
        chaining = self.chaining
        if self.chain.finished or self.is_lost:
            return False
        if self.summary is not None:
            if len(self.summary) > chaining.longest_summary:
                return False
            self._drop_exchanges(len(self.exchanges))
            self.base = [*self.first, *self.summary, *chaining.resume]
            self.open(self.base)
        elif self.rewritten_prompt is not None:
            self._open_rewritten(self.rewritten_prompt)
        elif chaining.join == "separate":
            self.open([*chaining.instruction, *tokens, *self.pending, *chaining.request], work=False)
        else:
            num_kept, size = 0, 0
            for exchange, _ in reversed(self.exchanges):
                size += len(exchange)
                if num_kept and size > chaining.longest_summary:
                    break
                num_kept += 1  # always keep the newest, whatever its size: it holds the last answer
            self._drop_exchanges(len(self.exchanges) - num_kept)
            self.open([*self.first, *sum((exchange for exchange, _ in self.exchanges), [])])
        return True

    def _drop_exchanges(self, count: int) -> None:
        """The next context does without the first exchanges of this one."""
        self.dropped += sum(turns for _, turns in self.exchanges[:count])
        del self.exchanges[:count]

    def rewrite(self, prompt: Sequence[int] | None) -> None:
        """The format has rewritten the messages after `base`: this context ends, and the next one opens with `prompt`,
        which holds them all. None: they cannot be written so; the chain is cut off here."""
        if prompt is None:
            self.is_lost = True
            return
        self.rewritten_prompt = list(prompt)
        # They are one exchange from now on, the turn that has just been answered among them.
        self.exchanges = [(self.rewritten_prompt[len(self.base) :], sum(turns for _, turns in self.exchanges) + 1)]

    def _open_rewritten(self, prompt: list[int]) -> None:
        """Opens a context with rewritten messages. If they reach the trigger, its first turn is the summary."""
        chaining, self.rewritten_prompt = self.chaining, None
        if (
            len(prompt) < chaining.trigger
            or self.num_contexts == chaining.max_segments
            or chaining.join in ("none", "truncate")
        ):
            self.open(prompt)
            self.num_contexts -= 1  # it goes on with the same messages
        elif chaining.join == "separate":
            self.open([*chaining.instruction, *prompt, *chaining.request], work=False)
        else:
            self.open([*prompt, *chaining.request])
            self.num_contexts, self.length, self.summary_start = self.num_contexts - 1, len(prompt), len(self.prompt)

    def fork(self) -> "ChainBuilder":
        """A copy in its current state, which continues independently."""
        twin = copy.copy(self)
        twin.exchanges = list(self.exchanges)
        twin.chain = replace(self.chain, segments=list(self.chain.segments))
        return twin


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
    counts = torch.tensor([len(chain.segments) for chain in chains], device=advantages.device)
    if not bool((counts > 0).all()):
        raise ValueError(f"chains must have segments, but chain {int(counts.argmin())} has none")
    return advantages.repeat_interleave(counts)  # A_c for every segment s ∈ c


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


def _sample_chains(sampler: Sampler, chaining: Chaining, config: Demo) -> list[Chain]:
    """Chains of conversations in which each of `turns` turns is answered with three given tokens. `ref/rollout.py` does
    this for real."""
    stop, generator = 0, torch.Generator().manual_seed(config.seed)
    builders = [ChainBuilder([1, 2, 3, 4], chaining) for _ in range(config.chains)]
    engine, turns_left, open_contexts = (
        sampler.engine(config.chains, chaining.limit),
        [config.turns] * config.chains,
        range(config.chains),
    )
    while open_contexts:
        slots = {
            engine.add(builders[chain_number].prompt, [stop], uniform(generator, chaining.limit)): chain_number
            for chain_number in open_contexts
        }
        next_contexts = []
        while slots:
            for slot in engine.step():
                chain_number, turn = slots[slot], engine.turn(slot)
                builder, answer = builders[chain_number], None
                if turn is not None and builder.is_summary:
                    builder.summarise([*turn.tokens, stop])
                elif turn is not None:
                    turns_left[chain_number] -= 1
                    if turns_left[chain_number]:
                        answer = builder.answer([*turn.tokens, stop], [5, 6, 7])
                    else:
                        builder.finish()
                if answer is not None:
                    engine.extend(slot, answer)
                    continue
                del slots[slot]
                if builder.close(engine.remove(slot, finished=turn is not None)):
                    next_contexts.append(chain_number)
        open_contexts = sorted(next_contexts)
    return [builder.chain for builder in builders]


def demo(config: Demo = Demo(), log: Callable[..., None] = lambda *_, **__: None) -> dict[str, float]:
    """For each way of joining, means over chains: segments, finished, tokens written, summary tokens,
    prefill, and the prefill saved over separate compaction of the same chains. Then the trap, with a made-up
    reward of −1 per 100 tokens written: a chain's mean advantage if the baseline were over rows (over chains it
    is zero), and the largest number of segments in a chain."""
    from ref.network import Config, Transformer

    torch.manual_seed(config.seed)
    shape = Config.tiny(
        8,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=0,
        intermediate_size=16,
    )
    sampler = Sampler(Transformer(shape), torch.float32)
    metrics: dict[str, float] = {}
    for step, join in enumerate(("self", "separate", "truncate", "none"), 1):
        chaining = Chaining(
            config.trigger,
            config.longest_summary,
            room=32,
            request=(6, 6),
            resume=(7,),
            instruction=(5,) * 8,
            join=join,
        )
        chains = _sample_chains(sampler, chaining, config)
        counts = {
            "segments": [len(chain.segments) for chain in chains],
            "finished": [chain.finished for chain in chains],
            "written": [chain.num_sampled_tokens for chain in chains],
        }
        for name in ("summary_tokens", "prefill", "saved"):
            counts[name] = [getattr(chain, name) for chain in chains]
        metrics |= {f"{join}_{name}": sum(values) / len(chains) for name, values in counts.items()}
        if join == "self":
            rewards = -torch.tensor(counts["written"]) / 100
            # The trap: mean of R over chains − mean of R over rows
            metrics["advantage_over_rows"] = (rewards.mean() - spread(rewards, chains).mean()).item()
            metrics["most_segments"] = float(max(counts["segments"]))
        log(step, 4, **metrics)
    return metrics


if __name__ == "__main__":
    for name, value in demo().items():
        print(f"{name:24s} {value:.3f}")
