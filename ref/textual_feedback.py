"""Targeted textual feedback: a hint at the message where a rollout went wrong, and the policy under the hint as its own
teacher.

Sources: the Composer 2.5 release, which names the method and gives no formula. Three papers distil a model that sees
more into the same model that sees less, over the student's own tokens: SDPO (arXiv:2601.20802; the teacher sees
feedback of the environment), SDFT (arXiv:2601.19897; a demonstration) and OPSD (arXiv:2601.18734; a verified solution).

One reward for a rollout of hundreds of messages cannot say which of them was wrong. A hint can. It is a few tokens
("there is no tool of that name") that are put into the context in front of the message. Nothing is sampled again: the
same tokens are scored twice.

    student    … answer |                            message | answer …       s = π(· | context, message so far)
    teacher    … answer | there is no such tool      message                  t = π(· | context, hint, message so far),
                                                                              no gradient

    L = (1/budget) Σ_t w_t · D_t         added to the loss of `ref/dr_grpo.py`, which has the same kind of budget   (1)

             D per token                             gradient in the student's logits
    forward  KL(t‖s) = Σ t · log(t/s)                s − t                               covers what the teacher may do
    reverse  KL(s‖t) = Σ s · log(s/t)                s · (log(s/t) − KL(s‖t))            leaves what the teacher would
                                                                                         not do
    js       (KL(s‖m) + KL(t‖m)) / 2, m = (s+t)/2    s · (log(s/m) − KL(s‖m)) / 2        at most log 2, symmetric

The traps
a. Positions shift by the hint. The logits that predict token t sit at t − 1 of the student's sequence, and at t' − 1 of
   the teacher's, where t' is the place of the same token there. That is not the place to which t − 1 is shifted: the
   hint may stand between t − 1 and t, and then the teacher's first prediction is made by the last token of the hint.
   `hinted` maps tokens, and `predictions` steps back by one in each sequence.
b. A hint that contains the answer distils the answer, and a hint that quotes the message makes the student copy itself.
   `leaked` finds what a hint shares with a text and the context does not already say.
c. The teacher has the student's weights. Without detaching it, the policy could lower the loss by ignoring hints.
d. The denominator is one number for the step, as in `ref/dr_grpo.py`. A mean over the tokens of a message would weigh a
   token by its message's length, and a mean over a micro-batch by its neighbours.
e. D_t is a divergence given the prefix that was sampled. Its gradient does not see that other tokens would lead to
   other prefixes.

Where this file departs from the papers
1. The release says KL and neither its direction nor how many outcomes it sums over. All of the above are here; reverse
   is the default, as in SDPO's formula (the code that its authors published has js as its default).
2. The papers distil a whole answer. Here only the tokens of one message count, and only those that the policy wrote.
3. The release does not say where in the context the hint stands. Here it may be anywhere before its message, but inside
   of no message.
4. With several hints in one segment there is one teacher's sequence, and every teacher sees all hints that stand before
   its message. To avoid that, call `hinted` once for each hint.
5. The top k outcomes are the teacher's: a token that only the hint makes likely is among them, and the partition has no
   gradient. All others are one outcome, so the sum never exceeds the full divergence (data-processing inequality).
   SDPO's code takes the student's.
6. The teacher has the newest weights. A slower copy, which some of the papers use, is the caller's choice: logits are
   arguments.

Run it
    etude run textual-feedback --scale small      `demo` below
    etude run textual-feedback --scale full       hints in RL on many ranks, `scaled/rl.py`
    etude figure textual-feedback                 the small world's agent with hints, without, and with controls

Glossary
    symbol    variable          shape      unit
    s, t      student, teacher  [*, V]     logits, `divergence`
    D         `divergence`      [*]        nats per token
    w         weight            [*]        0 where a token does not count
    t, t'     `Hinted.student`, `Hinted.teacher`   [n]   positions of tokens, not of the logits that predict them
    budget    budget            scalar     global; Dr. GRPO's, or the number of distilled tokens of the step
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from ref.checks import expect, expect_choice, expect_positive, refuse
from ref.engine.sampler import Segment

__all__ = ["Demo", "Hint", "Hinted", "demo", "divergence", "feedback_loss", "hinted", "leaked", "predictions"]

KINDS = ("forward", "reverse", "js")


@dataclass(frozen=True)
class Hint:
    """What the teacher is told, and which message it corrects. Positions are those of the segment's own tokens, without
    any hint."""

    at: int
    """Tokens of the segment that stand before the hint: 0 is in front of all."""
    tokens: tuple[int, ...]
    """The hint; an empty one changes nothing."""
    begin: int
    """First token of the message that is distilled."""
    end: int
    """One after its last token. An empty message, with end = begin, gives no token."""


@dataclass(frozen=True)
class Hinted:
    """The teacher's sequence, and where it has the tokens that the student is judged on."""

    tokens: Int[Tensor, " U"]
    """The segment up to the last distilled token, with the hints inside."""
    student: Int[Tensor, " n"]
    """Positions of the distilled tokens in the segment, ascending."""
    teacher: Int[Tensor, " n"]
    """Positions of the same tokens in `tokens`."""


def hinted(segment: Segment, hints: Sequence[Hint]) -> Hinted:
    """The segment of a chain as the teacher reads it: every hint stands at its place, and every message is unchanged.

    Distilled are the tokens of the hints' messages that the policy wrote (`segment.sampled`); a summary is a message
    like others, in the segment in which it was written. What follows the last of them is left out, since nothing there
    is asked for.
    Raises ValueError, with the number of the hint, for positions outside of the segment; a hint behind the start of its
    message or inside any message; messages that overlap; a message of which the policy wrote nothing; and one that
    begins with the first token of the segment, which nothing predicts."""
    sampled, T = segment.sampled, len(segment.tokens)
    for number, hint in enumerate(hints):
        if not (0 <= hint.at <= T and 0 <= hint.begin <= hint.end <= T):
            raise ValueError(
                f"hint {number} must have positions in order between 0 and {T}; got at {hint.at}, "
                f"message {hint.begin} to {hint.end}"
            )
        if hint.at > hint.begin:
            raise ValueError(
                f"hint {number} must stand before its message, which begins at {hint.begin}; got at {hint.at}"
            )
        if 0 < hint.at < T and bool(sampled[hint.at - 1] & sampled[hint.at]):
            raise ValueError(
                f"hint {number} must stand between messages; token {hint.at - 1} and token {hint.at} "
                f"are of the same one"
            )
        if hint.end > hint.begin and not bool(sampled[hint.begin : hint.end].any()):
            raise ValueError(
                f"hint {number} must name a message of the policy's; it wrote no token from {hint.begin} to {hint.end}"
            )
        if hint.begin == 0 < hint.end and bool(sampled[0]):
            raise ValueError(f"hint {number} must not ask for token 0 of the segment, which no token predicts")
        if any(other_hint.begin < hint.at < other_hint.end for other_hint in hints):
            raise ValueError(f"hint {number} must stand between messages; {hint.at} is inside of one that is corrected")
    spans = sorted((hint.begin, hint.end) for hint in hints if hint.end > hint.begin)
    for (begin, end), (next_begin, _) in zip(spans, spans[1:]):
        if next_begin < end:
            raise ValueError(
                f"hints must correct different messages; one is {begin} to {end}, and another begins at {next_begin}"
            )
    is_distilled = torch.zeros(T, dtype=torch.bool)
    for begin, end in spans:
        is_distilled[begin:end] = sampled[begin:end].cpu()
    student = is_distilled.nonzero()[:, 0]
    last = int(student[-1]) + 1 if len(student) else max((hint.at for hint in hints), default=0)
    pieces, shift, start = [], torch.zeros(last, dtype=torch.long), 0
    for hint in sorted((hint for hint in hints if hint.at <= last), key=lambda hint: hint.at):
        pieces += [segment.tokens[start : hint.at], segment.tokens.new_tensor(hint.tokens)]
        shift[hint.at :] += len(hint.tokens)
        start = hint.at
    tokens = torch.cat([*pieces, segment.tokens[start:last]])
    # t' = t + the tokens of all hints before t
    return Hinted(tokens, student.to(tokens.device), (student + shift[student]).to(tokens.device))


def predictions(
    student: Float[Tensor, "T D"], teacher: Float[Tensor, "U D"], hinted_sequence: Hinted
) -> tuple[Float[Tensor, "n D"], Float[Tensor, "n D"]]:
    """What predicts the distilled tokens in both sequences: logits, or hidden states before the head is run. The
    teacher's part is detached. Each sequence is read at the position before the token. Raises ValueError if one is
    shorter than `hinted_sequence` asks for."""
    for name, states, positions in (
        ("student", student, hinted_sequence.student),
        ("teacher", teacher, hinted_sequence.teacher),
    ):
        if len(positions) and len(states) < int(positions[-1]):
            raise ValueError(f"{name} must have at least {int(positions[-1])} positions; got {len(states)}")
    return student[hinted_sequence.student - 1], teacher[
        hinted_sequence.teacher - 1
    ].detach()  # read at t − 1 and t' − 1


def divergence(
    student: Float[Tensor, "*batch V"],
    teacher: Float[Tensor, "*batch V"],
    kind: str = "reverse",
    top_k: int | None = None,
) -> Float[Tensor, "*batch"]:
    """D of the table above, in nats at each position, from logits, in float32 or wider. No gradient reaches the
    teacher.

    `top_k`: the teacher's k likeliest tokens are outcomes of their own, and all others together are one. A token that
    both forbid (logit −inf) contributes nothing. One that only the left distribution of a KL allows makes it infinite,
    and that position has no gradient; "js" is always finite.
    Raises ValueError for another kind; for tensors that are not floating point or differ in shape; for logits that
    define no distribution; and unless 1 ≤ top_k ≤ V."""
    expect_choice("kind", kind, *KINDS)
    expect("student", student, "float", *getattr(student, "shape", ())[:-1], "V")
    expect("teacher", teacher, "float", *student.shape)
    V = student.shape[-1]
    for name, x in (("student", student), ("teacher", teacher)):
        if not (V and bool((x < math.inf).all() and (x > -math.inf).any(-1).all())):
            raise ValueError(f"{name} must be finite or −inf, with a finite logit in each row; got {list(x.shape)}")
    if top_k is not None and not 1 <= top_k <= V:
        raise ValueError(f"top_k must be between 1 and the vocabulary's {V}; got {top_k}")
    wide = torch.promote_types(torch.promote_types(student.dtype, teacher.dtype), torch.float32)
    logs, logt = student.to(wide).log_softmax(-1), teacher.detach().to(wide).log_softmax(-1)
    if top_k is not None:
        top_tokens = logt.topk(top_k, -1).indices
        logs, logt = merge_other_tokens(logs, top_tokens), merge_other_tokens(logt, top_tokens)
    if kind == "forward":
        return kl_divergence(logt, logs)  # KL(t‖s)
    if kind == "reverse":
        return kl_divergence(logs, logt)  # KL(s‖t)
    return (mixture_kl(logs, logt) + mixture_kl(logt, logs)) / 2  # (KL(s‖m) + KL(t‖m)) / 2


def merge_other_tokens(logp: Float[Tensor, "*batch V"], tokens: Int[Tensor, "*batch k"]) -> Float[Tensor, "*batch k+1"]:
    """Log-probs of the chosen tokens, and of all others together; −inf where none is left."""
    other_logp = logp.scatter(-1, tokens, -math.inf)
    is_empty = (other_logp == -math.inf).all(-1, keepdim=True)
    other_total = other_logp.masked_fill(is_empty, 0).logsumexp(-1, keepdim=True).masked_fill(is_empty, -math.inf)
    return torch.cat((logp.gather(-1, tokens), other_total), -1)


def kl_divergence(logp: Float[Tensor, "*batch V"], logq: Float[Tensor, "*batch V"]) -> Float[Tensor, "*batch"]:
    """KL(p‖q) of normalised log-probs; inf where p allows what q forbids."""
    probs = logp.exp()
    infinite = (logp > -math.inf) & (logq == -math.inf)
    # 0·log 0 = 0. Both factors are masked before they meet, which keeps NaN out of the backward pass as well.
    is_excluded = infinite | (probs == 0)
    gap = logp.masked_fill(is_excluded, 0) - logq.masked_fill(is_excluded, 0)
    return (probs * gap).sum(-1).masked_fill(infinite.any(-1), math.inf)  # KL(p‖q) = Σ p · log(p/q)


def mixture_kl(logp: Float[Tensor, "*batch V"], logq: Float[Tensor, "*batch V"]) -> Float[Tensor, "*batch"]:
    """KL(p‖m), m = (p + q)/2: Σ p · (log 2 − log(1 + q/p)), exactly zero where p = q."""
    probs = logp.exp()
    is_excluded = probs == 0
    odds = logq.masked_fill(is_excluded, 0) - logp.masked_fill(is_excluded, 0)
    # log(p/m) = log 2 − log(1 + q/p)
    gap = torch.logaddexp(torch.zeros_like(odds), torch.zeros_like(odds)) - torch.logaddexp(
        torch.zeros_like(odds), odds
    )
    return (probs * gap).sum(-1)


def feedback_loss(
    student: Float[Tensor, "*batch V"],
    teacher: Float[Tensor, "*batch V"],
    weight: Shaped[Tensor, "*batch"],
    *,
    budget: int | float,
    kind: str = "reverse",
    top_k: int | None = None,
) -> Float[Tensor, ""]:
    """The loss (1), a scalar to minimise beside the policy loss: Σ w · D / budget, in nats.

    `weight` is boolean, or a weight per token. Where it is zero, logits may hold anything, NaN included, and contribute
    nothing to the value or the gradient. Gradients flow through `student` only. Without a token that counts the loss is
    zero.
    Raises ValueError unless budget > 0; as `divergence` does; and for a weight or a divergence that is not finite where
    it counts."""
    expect_positive("budget", budget)
    expect("student", student, "float", *getattr(student, "shape", ())[:-1], "V")
    expect("teacher", teacher, "float", *student.shape)
    expect("weight", weight, "any", *student.shape[:-1])
    is_counted = weight != 0
    divergences = divergence(student[is_counted], teacher[is_counted], kind, top_k)
    weights = weight[is_counted].to(divergences.dtype)
    refuse("weight must be finite", ~weights.isfinite())
    refuse(
        f"the {kind} divergence must be finite: one side forbids what the other allows, and only js can be taken there",
        ~divergences.isfinite(),
    )
    return (weights * divergences).sum() / budget  # Eq. 1: (1/budget) Σ_t w_t · D_t


def leaked(hint: Sequence[int], answer: Sequence[int], context: Sequence[int], n: int = 4) -> tuple[int, ...] | None:
    """The first n tokens in a row that the hint shares with the answer and that the context does not hold; None if
    there are none.

    `answer` is what a hint must not give away: a known solution, and also the message that it corrects, since a teacher
    that reads the message copies it. What the student has in its context may be repeated. An answer or a hint of fewer
    than n tokens is looked for as a whole. Raises ValueError unless n ≥ 1."""
    if n < 1:
        raise ValueError(f"n must be at least 1; got {n}")
    n = min(n, len(answer), len(hint))

    def runs(tokens: Sequence[int]) -> list[tuple[int, ...]]:
        return [tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)] if n else []

    secret = set(runs(answer)) - set(runs(context))
    return next((run for run in runs(hint) if run in secret), None)


@dataclass(frozen=True)
class Demo:
    """An agent that chooses a tool in each of a few turns. One tool is not there; its call wastes the turn."""

    tools: int = 6
    """Tools; number 0 is unavailable."""
    turns: int = 6
    """Turns of a rollout."""
    groups: int = 8
    """Groups per step."""
    rollouts: int = 4
    """Rollouts per group."""
    steps: int = 60
    """Optimiser steps."""
    lr: float = 0.05
    """Adam's learning rate."""
    share: float = 1.0
    """Weight of the feedback loss beside the policy loss."""
    seed: int = 0
    """Seed of sampling."""


def demo(config: Demo = Demo(), log: Callable[..., None] = lambda *_, **__: None) -> dict[str, float]:
    """Trains with the outcome reward alone and with feedback beside it. A rollout is rewarded for tool 1 in its last
    turn, whatever it called before. The policy is one table of logits for each turn and one for the hint, so the
    teacher is the sum of both, and it understands the hint from the start. Returns for both trainings unavailable calls
    per rollout and the success, before and after."""
    metrics: dict[str, float] = {}
    for name, share in (("outcome", 0.0), ("feedback", config.share)):
        generator = torch.Generator().manual_seed(config.seed)
        turns = torch.zeros(config.turns, config.tools, dtype=torch.float64, requires_grad=True)
        hint = torch.tensor([-4.0] + [0.0] * (config.tools - 1), dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.Adam([turns, hint], lr=config.lr)
        for step in range(config.steps + 1):
            probs = turns.detach().softmax(-1)
            if step in (0, config.steps):
                phase = "after" if step else "before"
                metrics |= {
                    f"{name}_faults_{phase}": probs[:, 0].sum().item(),
                    f"{name}_success_{phase}": probs[-1, 1].item(),
                }
            calls = torch.multinomial(probs, config.groups * config.rollouts, replacement=True, generator=generator).t()
            reward = (calls[:, -1] == 1).double().view(config.groups, config.rollouts)
            advantage = (reward - reward.mean(1, keepdim=True)).flatten()  # A = R − mean of the group
            budget = calls.numel()
            logits = turns.expand(len(calls), -1, -1)
            logp = logits.log_softmax(-1).gather(-1, calls[:, :, None])[:, :, 0]
            loss = -(advantage[:, None] * logp).sum() / budget
            if share:
                loss = loss + share * feedback_loss(logits, logits + hint, calls == 0, budget=budget)  # plus Eq. 1
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log(step, config.steps, loss=loss.item())
    return metrics


if __name__ == "__main__":
    for name, value in demo().items():
        print(f"{name:24s} {value:.3f}")
