"""The glossary: the terms of the field that the project uses, each with a page or a lesson that uses it.

The explorer shows all terms and explains those of each page; `etude glossary` prints them. A test checks that they are
sorted, that the pages and lessons of a term exist, and that it occurs there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches

from kit.settings import RunError

__all__ = ["TERMS", "Term", "find", "explain_terms", "used"]


@dataclass(frozen=True)
class Term:
    """One term of the field."""

    word: str
    """The term."""
    says: str
    """What it means, in one or two sentences."""
    places: tuple[str | int, ...]
    """Where it is used: names of pages of the explorer, and numbers of lessons."""
    see: tuple[str, ...] = ()
    """Related terms."""
    forms: tuple[str, ...] = ()
    """Other names of the same thing."""

    @property
    def pattern(self) -> re.Pattern[str]:
        """The term, its plural and its forms as whole words."""
        return re.compile(
            rf"(?<![\w-])(?:{'|'.join(map(re.escape, (self.word, *self.forms)))})(?:e?s)?(?![\w-])", re.IGNORECASE
        )


TERMS: tuple[Term, ...] = (
    Term("acceptance rate", "The share of drafts that the model accepts.", (3,), ("draft", "depth"), ("acceptance",)),
    Term(
        "advantage",
        "By how much a rollout's reward exceeds that of its group. Its sign says whether its tokens become likelier.",
        ("advantages", 4),
    ),
    Term(
        "alarm",
        "Raised by the monitor when a statistic of the rollouts has changed, with an error rate fixed in advance.",
        (18,),
        ("e-process",),
    ),
    Term(
        "anchor",
        "A version of the weights that is stored in full, so that a reader needs no older one.",
        ("weight-sync", 12),
        ("delta",),
    ),
    Term(
        "baseline",
        "What is subtracted from a reward to make an advantage; in Dr. GRPO it is the mean of the group.",
        (4,),
        ("advantage", "group"),
    ),
    Term(
        "bits per byte",
        "Surprise at a text per byte of it, which networks with other tokenizers share as a unit.",
        (1,),
        ("perplexity", "nat"),
    ),
    Term(
        "budget",
        "The number by which the loss of a step is divided, the same on every rank and micro-batch.",
        ("advantages", 4),
        ("token",),
    ),
    Term(
        "chain",
        "A rollout in several contexts, each of which starts with the summary of the previous one.",
        ("summary", 7),
        ("segment",),
    ),
    Term(
        "context",
        "The tokens that the network reads before it writes the next one. Its length is limited.",
        ("summary", 7),
        ("segment",),
    ),
    Term("context parallelism", "Ranks share the tokens of one sequence.", (11,), ("rank", "expert parallelism")),
    Term(
        "delta",
        "The change from one version of the weights to the next, encoded without loss.",
        ("weight-sync", 12),
        ("anchor",),
    ),
    Term(
        "depth",
        "Of a draft layer: how many tokens after the next one it predicts. Of a task in the small "
        "world: how many helpers of helpers must be read.",
        (3, 0),
        ("draft",),
    ),
    Term(
        "draft",
        "A token that a small layer proposes, before the full model has checked it.",
        ("mtp", 3),
        ("acceptance rate",),
    ),
    Term(
        "e-process",
        "The monitor's evidence: the capital of bets that win only if something has changed.",
        (18,),
        ("alarm",),
        ("evidence",),
    ),
    Term(
        "effort", "The cost of a rollout: a weighted sum of its tokens, calls and turns.", ("penalties", 6), ("price",)
    ),
    Term(
        "entropy",
        "The uncertainty of a distribution, in nats or bits. It falls while RL makes some rollouts likelier.",
        (12,),
        ("nat",),
    ),
    Term(
        "environment",
        "What the agent interacts with: files, tools, tests, and a grader.",
        ("episodes", 15),
        ("sandbox",),
    ),
    Term("episode", "One attempt at a task, from the first prompt to the verdict.", ("episodes", 15), ("rollout",)),
    Term(
        "expert",
        "One of several small networks in a layer, of which each token uses a few.",
        ("replay", 8),
        ("router",),
    ),
    Term(
        "expert parallelism",
        "Ranks share the experts of a layer, and send tokens to where their experts are.",
        (11,),
        ("expert", "rank"),
    ),
    Term(
        "gate",
        "The weight of an expert's output in the sum; elsewhere a test that a policy must pass before it is shipped.",
        (8, 18),
    ),
    Term("group", "Rollouts of one prompt that are compared with each other.", ("advantages", 4), ("advantage",)),
    Term("held-out", "What no training stage has seen: tasks, functions, a codebase.", ("recipe", 0)),
    Term(
        "hint", "A text placed before a message in which a rollout went wrong.", ("textual-feedback", 16), ("teacher",)
    ),
    Term(
        "KL",
        "How far one distribution is from another. Without further words: of the policy from its reference.",
        ("kl", 5),
        ("reference policy",),
    ),
    Term("log-prob", "The logarithm of the probability that the policy gave to a token.", (8, 13), ("logit", "nat")),
    Term(
        "logit",
        "A network's score for a token, before softmax makes a probability of it.",
        ("watch", 13),
        ("log-prob",),
    ),
    Term(
        "mesh",
        "The arrangement of ranks: which of them share rows, tokens of a row, or experts.",
        (11,),
        ("rank", "shard"),
    ),
    Term("nat", "A unit of information with the natural logarithm: 0.69 nats are one bit.", ("kl", 5)),
    Term("nop", "A solution that changes nothing. Its reward should be 0.", (14,), ("oracle",)),
    Term(
        "off-policy",
        "Training on tokens that were sampled by another policy than the one being trained.",
        (5,),
        ("staleness",),
    ),
    Term(
        "oracle",
        "A source of the right answer: a closed form for an estimate, or a script that writes the original code.",
        (5, 15),
        ("nop",),
    ),
    Term(
        "perplexity",
        "The effective number of tokens among which a model chooses: e to the power of its nats per token.",
        (1,),
        ("nat", "bits per byte"),
    ),
    Term("policy", "The network as an agent: it gives each possible next token a probability.", (4, "kl")),
    Term(
        "price",
        "The coefficient of a penalty: what a unit of effort, or an unwanted behaviour, subtracts from the reward.",
        ("penalties", 17),
        ("effort",),
    ),
    Term("rank", "One of the processes that train together; each has its part of the work.", (11,), ("shard",)),
    Term(
        "reference policy",
        "The policy to which RL stays close, usually the one before RL.",
        ("kl", 5),
        ("KL",),
        ("reference",),
    ),
    Term(
        "reward", "The score of a finished rollout: for its tests, minus penalties.", ("advantages", 4), ("advantage",)
    ),
    Term(
        "rollout",
        "Everything that an agent wrote and read in one attempt at a task.",
        ("advantages", 4),
        ("group", "episode"),
    ),
    Term("router", "The small layer that chooses a token's experts.", ("replay", 8), ("expert",)),
    Term(
        "sandbox",
        "An isolated environment in which an agent can run any code and reaches nothing outside.",
        (15,),
        ("snapshot",),
    ),
    Term("segment", "The part of a chain that lies in one context.", (7,), ("chain", "context")),
    Term("shard", "The part of a tensor, or of the data, that one rank holds.", (11, 12), ("rank",)),
    Term("snapshot", "A stored state of a sandbox's files, named by their content.", (15,), ("sandbox",)),
    Term(
        "staleness",
        "The maximum age, in steps, of the weights that sampled the training data.",
        ("async-rl", 13),
        ("off-policy",),
    ),
    Term(
        "step",
        "One update of the weights. In RL: the rollouts of many groups, and one gradient.",
        (0, "recipe"),
        ("group",),
    ),
    Term(
        "teacher",
        "The source of a distribution to imitate: the main head for draft layers, or the policy with a hint.",
        ("textual-feedback", 3),
        ("hint",),
    ),
    Term(
        "token",
        "The piece of text that a network reads and writes: a word, a part of one, or a sign.",
        ("watch", 0),
        ("logit",),
    ),
    Term("turn", "What an agent writes before the environment replies.", ("watch", 7), ("environment",)),
)


def find(word: str) -> Term:
    """The term of that name, in any case and also in the plural. RunError where there is none, with the nearest
    ones."""
    terms_by_word = {term.word.casefold(): term for term in TERMS}
    query = " ".join(word.split()).casefold()
    for form in (query, query.removesuffix("s"), query.removesuffix("es")):
        if form in terms_by_word:
            return terms_by_word[form]
    close = get_close_matches(query, terms_by_word, n=3)
    suggestion = f"did you mean {', '.join(terms_by_word[name].word for name in close)}? " if close else ""
    raise RunError(f"the glossary has no term {word!r}; {suggestion}etude glossary lists all terms")


def used(text: str) -> list[Term]:
    """The terms that a text uses, in the order of the glossary."""
    return [term for term in TERMS if term.pattern.search(text)]


def explain_terms(text: str) -> str:
    """Markdown that explains the terms of a text; empty where it uses none."""
    return "\n\n".join(f"**{term.word}**: {term.says}" for term in used(text))
