"""A message with a fault, read twice by the agent that wrote it: as it was, and under a hint. What the page of textual
feedback shows.

Everything is `ref/textual_feedback.py` on a checkpoint: `hinted` says what the teacher reads, `predictions` which
logits belong together, `divergence` how far they are apart, and `leaked` whether the hint gave something away. Both
sides have the sampler's dtype and their own experts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from etude.play import tokens
from etude.play.play import Agent
from kit.process import one_thread
from recipe.small.agent import Language
from ref.engine.sampler import Sampler, Segment
from ref.network import Transformer, load_hf
from ref.textual_feedback import Hint, Hinted, divergence, hinted, leaked, predictions

__all__ = [
    "ANSWER",
    "FAULT_HINT",
    "KINDS",
    "MESSAGE",
    "OTHER_HINT",
    "OWN",
    "HINT_SOURCES",
    "Case",
    "Read",
    "Word",
    "case_of",
    "encoded",
    "given_away",
    "read",
    "words_of",
]

KINDS = ("reverse", "forward", "js")
"""Divergences of ref, its default first."""
HINT_SOURCES = FAULT_HINT, OTHER_HINT, ANSWER, MESSAGE, OWN = (
    "its hint",
    "hint of another rollout",
    "the answer",
    "the message itself",
    "your words",
)
"""What the teacher may be told: two hints, the second a control, and two that give something away."""
NAMED = 4
"""How many likely tokens of each side are named."""


@dataclass(frozen=True)
class Case:
    """The context of a fault, as a checkpoint reads it."""

    agent: Agent
    stamps: tuple
    """Changes whenever the checkpoint is written."""
    temperature: float
    """At which it was sampled."""
    task: str
    answer: str
    """A right body."""
    success: bool
    """Whether the rollout solved its task."""
    rule: str
    """The rule that the message broke."""
    says: str
    """Its hint."""
    other_hint: str
    """The hint of another rollout."""
    text: str
    """The message."""
    begin: int
    end: int
    """Its tokens in the context."""
    logp: float
    """Its log-probability as the sampler noted it, nats."""
    own: tuple[tuple[int, int], ...]
    """From where to where the policy wrote, message by message."""
    tokens: tuple[int, ...]

    @property
    def segment(self) -> Segment:
        """The context as `ref` takes it. What else the sampler noted is not needed, and not there."""
        ids, sampled = torch.tensor(self.tokens), torch.zeros(len(self.tokens), dtype=torch.bool)
        for begin, end in self.own:
            sampled[begin:end] = True
        nothing = torch.zeros(len(ids) - 1, 0, 1, dtype=torch.int16)
        return Segment(ids, sampled, torch.zeros(len(ids)), torch.where(sampled, 0, -1), nothing, True)


@dataclass(frozen=True)
class Outcome:
    """What a token may be, and how likely that is."""

    text: str | None
    """None for the one that ends a message."""
    student: float
    teacher: float
    """Probability without and with the hint."""


@dataclass(frozen=True)
class Word:
    """A token of the message with both distributions."""

    outcome: Outcome
    alternatives: tuple[Outcome, ...]
    """What else is likely on a side, likeliest first."""
    divergences: dict[str, float]
    """Divergence of each of `KINDS`, nats."""


@dataclass(frozen=True)
class Read:
    """Both readings of a message."""

    alignment: Hinted
    words: tuple[Word, ...]
    likelier: float
    """log of how many times as likely the whole message is under the hint, nats."""


def case_of(agent: Agent, stamps: tuple, hints: dict, number: int) -> Case:
    """A rollout of hints.json. Raises ValueError for one that this agent cannot have written: its tokens spell
    something else."""
    entry = hints["rollouts"][number]
    ids, begin, end, own = entry["tokens"], entry["begin"], entry["end"], entry["own"]
    is_valid = [begin, end] in own and all(len(span) == 2 and 1 < span[0] < span[1] <= len(ids) for span in own)
    is_valid = is_valid and all(0 <= token < agent.language.tokenizer.get_vocab_size() for token in ids)
    has_end = is_valid and ids[end - 1] == agent.language.env
    if not is_valid or agent.language.decode(ids[begin : end - has_end]) != entry["text"]:
        raise ValueError(f"rollout {number + 1} is not one of {agent.name}")
    facts = {name: value for name, value in entry.items() if name in Case.__dataclass_fields__}
    run_facts = {"own": tuple(map(tuple, own)), "tokens": tuple(ids), "temperature": float(hints["temperature"])}
    run_facts["other_hint"] = entry["other"]
    return Case(**{"agent": agent, "stamps": stamps} | facts | run_facts)


def words_of(case: Case, source: str, own: str) -> str:
    """What the teacher is told, in words; `own` are the reader's."""
    return {
        FAULT_HINT: case.says,
        OTHER_HINT: case.other_hint,
        ANSWER: case.answer,
        MESSAGE: f"error:\n{case.text}",
        OWN: own,
    }[source]


def encoded(case: Case, words: str) -> tuple[int, ...]:
    """The hint's tokens: one more line of what the environment said; none for no words."""
    return case.agent.language.encode(f"\n{words}") if words else ()


def given_away(case: Case, words: str) -> dict[str, str]:
    """What a hint shares with the task's answer and with its message, as `leaked` finds it; empty where it gives
    nothing away."""
    encode, hint = case.agent.language.encode, encoded(case, words)
    secrets = {"the task's answer": case.answer, "the message itself": case.text}
    runs = {name: leaked(hint, encode(secret), case.tokens[: case.begin]) for name, secret in secrets.items() if secret}
    return {name: case.agent.language.decode(run) for name, run in runs.items() if run is not None}


@lru_cache(2)
def load_network(agent: Agent, stamps: tuple) -> Transformer:
    """An agent's network as it samples."""
    training_dtype, sampler_dtype = (
        getattr(torch, name) for name in (agent.recipe.training.dtype, agent.recipe.training.sampler_dtype)
    )
    return Sampler(load_hf(agent.folder).to(training_dtype), sampler_dtype).model


@lru_cache(256)
def compute_hidden(agent: Agent, stamps: tuple, ids: tuple[int, ...]) -> Tensor:
    """What the head of an agent reads behind every token, [T, D]."""
    with one_thread():
        hidden_states = load_network(agent, stamps)(torch.tensor(ids)[None], logits=False).hidden
    return hidden_states[0]


@lru_cache(256)
@torch.inference_mode()
def read(case: Case, words: str, shift: bool = True) -> Read:
    """The message as student and teacher read it. Without `shift` the teacher is read where the student is, which is
    wrong: the hint has moved its tokens."""
    language, segment = case.agent.language, case.segment
    # As in recipe/small/hints.py: the environment says it, before the token that hands the word over.
    alignment = hinted(segment, [Hint(case.begin - 1, encoded(case, words), case.begin, case.end)])
    student, teacher = (
        compute_hidden(case.agent, case.stamps, ids)
        for ids in (case.tokens[: case.end], tuple(alignment.tokens.tolist()))
    )
    read_alignment = alignment if shift else replace(alignment, teacher=alignment.student)
    head = load_network(case.agent, case.stamps).head
    student, teacher = (head(x).float() / case.temperature for x in predictions(student, teacher, read_alignment))
    divergences = torch.stack([divergence(student, teacher, kind) for kind in KINDS], -1)
    logs, logt = student.log_softmax(-1), teacher.log_softmax(-1)
    ids = segment.tokens[alignment.student]
    end_count = int(ids[-1] == language.env)
    texts = [*tokens.texts(language, ids[: len(ids) - end_count].tolist()), *[None] * end_count]
    likelier = (logt - logs).gather(-1, ids[:, None]).sum()
    rows = zip(texts, ids.tolist(), logs.exp(), logt.exp(), divergences.tolist(), strict=True)
    return Read(alignment, tuple(make_word(language, *row) for row in rows), float(likelier))


def make_word(
    language: Language,
    text: str | None,
    sampled_token: int,
    student: Tensor,
    teacher: Tensor,
    divergences: Sequence[float],
) -> Word:
    """A token and what else was likely, from both distributions [V]."""
    best: set[int] = set()
    for side in (student, teacher):
        best |= {
            *[token for token in side.topk(min(NAMED + 1, len(side))).indices.tolist() if token != sampled_token][
                :NAMED
            ]
        }
    likely = torch.maximum(student, teacher)
    ranked = sorted(best, key=lambda token: (-float(likely[token]), token))
    alternatives = tuple(
        Outcome(
            None if token == language.env else language.decode([token]), float(student[token]), float(teacher[token])
        )
        for token in ranked
    )
    return Word(
        Outcome(text, float(student[sampled_token]), float(teacher[sampled_token])),
        alternatives,
        dict(zip(KINDS, divergences, strict=True)),
    )
