"""The tiny coding agent: connects a policy over tokens with an environment of texts, and scores a batch of
rollouts.

A context is `<|env|> prompt <|agent|> turn <|env|> answer <|agent|> turn <|env|> …`; the agent ends its turn
with the environment's token. Demonstrations (SFT), sampling and training share this encoding,
so the policy sees the same tokens that it was trained on.
"""

import copy
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import torch

from kit.process import on_cores
from ref import cpt
from ref.behaviour import Behaviour, rewarded
from ref.engine.sampler import Rollout, Sampler
from ref.length_penalty import Effort, effort, length_penalty
from ref.self_summary import Chain, Chaining, rollout_chains
from sims.microrepo import Environment, Reward, Session, Task
from sims.recipe.settings import Payment

__all__ = ["Episode", "Language", "hash_seed", "parted", "pay", "play", "single"]


SPEAKERS = (cpt.SPECIAL_TOKENS[1:], ("<|im_end|>", "<|im_start|>"), ("<|eot_id|>", "<|start_header_id|>"))
"""Tokens with which the environment and the agent begin to speak: this project's own; for a network from elsewhere, those that end and begin a
turn in the chats of Qwen and SmolLM2, or of Llama 3."""
ENDS = (cpt.SPECIAL_TOKENS[0], "<|end_of_text|>", "</s>")
"""Tokens that end a document."""


class Language:
    """Texts to tokens and back, with the three special tokens by name; a text that spells a special token is encoded as plain text.
    Caches the encodings of repeated texts. A tokenizer that has none of `SPEAKERS` has None in their place."""

    end: int
    env: int
    agent: int

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer = cpt.as_text(tokenizer)
        self.speakers = next((pair for pair in SPEAKERS if None not in map(tokenizer.token_to_id, pair)), SPEAKERS[0])
        end = next((name for name in ENDS if tokenizer.token_to_id(name) is not None), ENDS[0])
        self.end, self.env, self.agent = map(tokenizer.token_to_id, (end, *self.speakers))
        self.encode = lru_cache(100_000)(lambda text: tuple(tokenizer.encode(text).ids))

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)


class Episode:
    """A conversation (`ref.engine.sampler`, `ref.engine.conversation`) with one environment. After sampling it holds its
    chain of contexts, the verdict, and in `rollout` the concatenated contexts, which it is charged for."""

    chain: Chain
    rollout: Rollout

    def __init__(self, language: Language, environment: Environment, group: int = 0):
        self.language, self.environment, self.group = language, environment, group
        self.prompt = [language.env, *language.encode(environment.prompt), language.agent]
        self.stop = language.env

    def take(self, chain: Chain) -> "Episode":
        self.chain, self.rollout = chain, one_row(chain)
        return self

    def reply(self, turn: list[int]) -> list[int] | None:
        answer = self.environment.step(self.language.decode(turn))
        if self.environment.done:
            return None
        return [*self.language.encode(answer), self.language.agent]

    def fork(self) -> "Episode":
        """A copy of the current episode that continues independently; tokens of the prompt are shared, because they
        never change."""
        twin = copy.copy(self)
        twin.environment = self.environment.fork()
        return twin

    @property
    def verdict(self) -> Reward:
        return self.environment.verify()


def one_row(chain: Chain) -> Rollout:
    """The segments of a chain as one rollout; if there are several, without their experts."""
    if len(chain.segments) == 1:
        return chain.segments[0]
    names = ("tokens", "sampled", "logp", "version")
    columns = {name: torch.cat([getattr(s, name) for s in chain.segments]) for name in names}
    nothing = torch.zeros(len(columns["tokens"]) - 1, 0, 1, dtype=torch.int16)
    return Rollout(**columns, experts=nothing, finished=chain.finished)


def parted(rollout: Rollout, stop: int) -> Iterator[tuple[slice, bool]]:
    """Where the pieces of a rollout lie, in order, and whether the policy wrote them. What it wrote is a turn, which ends with `stop` unless a
    limit cut it, also where the next turn follows at once; what it was given between two turns is one piece."""
    ids, own, start = rollout.tokens.tolist(), rollout.sampled.tolist(), 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or own[end] != own[end - 1] or own[end - 1] and ids[end - 1] == stop:
            yield slice(start, end), own[start]
            start = end


def single(max_len: int) -> Chaining:
    """A single context, truncated at `max_len` tokens."""
    return Chaining(max_len - 1, longest_summary=1, room=0, join="none")


LEAST, MOST = 32, 600
"""Bounds for the conversations in one batch, which has a quarter of them otherwise. A step of the network has a fixed cost as high as that of 100
conversations, so small batches are inefficient; large ones take memory, half a megabyte per conversation."""


def play(
    sampler: Sampler,
    language: Language,
    tasks: Sequence[Task],
    samples: int,
    how: Chaining,
    max_turns: int,
    generator: torch.Generator | None,
    temperature: float = 1.0,
    progress: Callable[[int], None] = lambda done: None,
    opened: Callable[[Task, int], Environment] = Session,
) -> list[Episode]:
    """`samples` rollouts of every task on all cores, each a chain of contexts under `how`; rollouts of a task are adjacent. The random numbers
    of a rollout depend on a number from `generator`, its task and its index. `progress` is called with the number of finished rollouts. `opened`
    begins an episode of a task with so many turns at most.

    Batches do not depend on the number of processes, because the last bit of a product depends on its number of rows."""
    stream = 0 if generator is None else int(torch.randint(2**62, (), generator=generator))
    count: Counter[str] = Counter()
    wanted = []
    for group, task in enumerate(tasks):
        for _ in range(samples):
            wanted.append((group, task, count[task.key]))
            count[task.key] += 1

    def rollouts(part: range) -> list[tuple[Environment, Chain]]:
        episodes = [Episode(language, opened(wanted[i][1], max_turns), wanted[i][0]) for i in part]
        seeds = [hash_seed(stream, wanted[i][1].key, wanted[i][2]) for i in part]
        draws = None if generator is None else [torch.Generator().manual_seed(seed) for seed in seeds]
        try:
            chains = rollout_chains(sampler, episodes, how, temperature, draws)
            for episode in episodes:
                episode.environment.judge()
            return [(e.environment, c) for e, c in zip(episodes, chains, strict=True)]
        finally:
            for episode in episodes:
                episode.environment.close()

    size = min(max(LEAST, -(-len(wanted) // 4)), MOST)
    parts = [range(len(wanted))[start : start + size] for start in range(0, len(wanted), size)]
    found = itertools.chain(*on_cores(rollouts, parts, lambda done: progress(min(done * size, len(wanted))), each=2))
    return [Episode(language, environment, group).take(chain) for (group, _, _), (environment, chain) in zip(wanted, found, strict=True)]


def hash_seed(*parts) -> int:
    """A 63-bit seed from parts, the same in every process."""
    return random.Random("-".join(map(str, parts))).getrandbits(63)


def pay(episode: Episode, payment: Payment, behaved: Behaviour | None = None) -> dict[str, float]:
    """The reward of an episode in named parts, those of its behaviour among them if that is priced; `reward` is their sum (without KL, which
    needs the reference's log-probs)."""
    verdict, rollout = episode.verdict, episode.rollout
    own = int(rollout.sampled.sum())
    given = len(rollout.tokens) - own - len(episode.prompt)
    spent = effort(
        Effort(
            thinking_tokens=0, tool_call_tokens=own, tool_output_tokens=given, final_message_tokens=0, tool_calls=verdict.calls, turns=verdict.turns
        ),
        payment.weights,
    )
    cost = payment.effort_price * length_penalty(spent, payment.k, payment.q)
    invalid = payment.invalid_call * verdict.invalid_calls
    parts = {"tests": verdict.tests, "effort": -cost, "invalid": -invalid}
    if behaved is None:
        return parts | {"reward": verdict.tests - cost - invalid}
    return parts | behaved.parts | {"reward": rewarded(verdict.tests, cost, behaved) - invalid}
