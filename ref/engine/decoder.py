"""Decoding one context, plain or speculative: the two share all code except drafting.

Speculative decoding is arXiv:2211.17192; its drafts come from multi-token-prediction layers (`ref/mtp.py`).
Where this file departs from the paper:
1. Greedy decoding is compared token by token. Verification runs several rows in one pass, and plain decoding
   one, so the same logits differ in their last bits. If the two best tokens tie within rounding, either may
   win. In float32 that needs a tie within about 1e-6; in bfloat16 ties are common.
2. We add two options, both off by default. `recall` drafts for a turn's first pass, where the MTP layers have no
   hidden state to start from. `ahead` returns a turn before its last drafts are verified; the caller must be able
   to undo its effects (`ref/rollout.py`). Neither changes the output.

| paper | here | shape |
|---|---|---|
| p(x), target distribution | `p` | d+1 V |
| q(x), draft distribution | `q` | d V |
| γ, drafts per cycle | `draft_len` | – |
| tokens accepted per cycle | `num_accepted` | – |
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ref.engine.layout import Stack, copied, unit
from ref.network import Config, Transformer

__all__ = ["Decoder", "Generation", "accept"]


def accept(
    p: Float[Tensor, "d1 V"], q: Float[Tensor, "d V"], draft: Sequence[int], u: Sequence[float]
) -> tuple[int, int]:
    """The accept/reject rule of arXiv:2211.17192: (number of accepted drafts, the token after them).

    p: distributions of the main head at the d drafts and one position further. q: the distributions that the
    drafts were drawn from. u: d+1 uniform numbers in [0, 1). Draft x is accepted with probability min(1,
    p(x)/q(x)). At the first rejection the next token is drawn from norm(max(p − q, 0)); if all are accepted, it
    is drawn from the last p. The result is distributed as p for any q. Raises ValueError for other shapes, drafts
    outside the vocabulary, u outside [0, 1), p or q negative or not finite, and a p that is zero everywhere."""
    d, V = len(draft), p.shape[-1]
    shapes = (("p", list(p.shape), [d + 1, V]), ("q", list(q.shape), [d, V]), ("u", [len(u)], [d + 1]))
    for name, actual, shape in shapes:
        if actual != shape:
            raise ValueError(f"{name} must have shape {shape} for {d} drafts; got {actual}")
    for name, x in (("p", p), ("q", q)):
        if not (x.is_floating_point() and bool(((x >= 0) & (x < math.inf)).all())):
            raise ValueError(f"{name} must hold floating-point probabilities that are finite and not negative")
    if not all(0 <= x < V for x in draft):
        raise ValueError(f"draft must hold tokens 0 to {V - 1}; got {list(draft)}")
    if not all(0 <= x < 1 for x in u):
        raise ValueError(f"u must hold numbers in [0, 1); got {list(u)}")
    for k, x in enumerate(draft):
        # Rejected with probability 1 − min(1, p(x)/q(x))
        if u[k] * float(q[k, x]) >= float(p[k, x]):
            residual = (p[k] - q[k]).clamp_(min=0)  # max(p − q, 0)
            # Nothing is left if p and q differ only by rounding: then p itself is just as good.
            return k, invert(residual if bool(residual.any()) else p[k], u[-1])
    return len(draft), invert(p[len(draft)], u[-1])


def invert(mass: Float[Tensor, " V"], u: float) -> int:
    """The token at which the cumulative distribution of `mass` (not normalised) passes a share u of its total,
    0 ≤ u < 1. The token always has nonzero mass. Raises ValueError for a total that is zero or not finite."""
    total = mass.double().cumsum(-1)
    end = float(total[-1])
    if not 0 < end < math.inf:
        raise ValueError(f"mass must be finite and positive somewhere, or there is no token to draw; its sum is {end}")
    # The first token at which the cumulative mass exceeds u · total
    return int(torch.searchsorted(total, min(u * end, math.nextafter(end, 0.0)), right=True))


@dataclass
class Generation:
    """What was generated and what it cost."""

    tokens: list[int] = field(default_factory=list)
    """Generated tokens, including the stop token if there was one."""
    cycles: int = 0
    """Passes of the trunk, each of which gave at least one token."""
    draft_counts: list[int] = field(default_factory=list)
    """Drafts proposed at each depth."""
    accept_counts: list[int] = field(default_factory=list)
    """Drafts accepted at each depth."""
    recall_counts: list[int] = field(default_factory=list)
    """Drafts proposed by `recall` at each position of a turn's first pass."""
    recalled_accepted: list[int] = field(default_factory=list)
    """Accepted drafts of `recall`, by position."""
    retracted: int = 0
    """Turns taken back: returned before they were verified, and wrong."""
    seconds: float = 0.0
    """Wall-clock time, including prefill."""

    def __add__(self, generation: "Generation") -> "Generation":
        """Both together: tokens concatenated, counts added."""
        sums = {}
        for name, value in vars(self).items():
            other_value, is_count_list = getattr(generation, name), isinstance(value, list) and name != "tokens"
            sums[name] = (
                [a + b for a, b in zip(value, other_value, strict=True)] if is_count_list else value + other_value
            )
        return Generation(**sums)

    @property
    def tokens_per_cycle(self) -> float:
        return len(self.tokens) / max(self.cycles, 1)

    @property
    def acceptance(self) -> list[float]:
        """Share of drafts accepted at each depth (a draft is rejected if any draft before it is)."""
        return [a / max(d, 1) for a, d in zip(self.accept_counts, self.draft_counts, strict=True)]

    @property
    def recall_acceptance(self) -> list[float]:
        """The same for `recall`, by position in the turn."""
        return [a / max(d, 1) for a, d in zip(self.recalled_accepted, self.recall_counts, strict=True)]


@dataclass
class PendingTurn:
    """A turn that was returned before its last tokens were verified."""

    draft: list[int]
    """The unverified tokens; the stop token is last."""
    q: Tensor | None
    """The distributions they were drawn from; None if they were certain."""
    counts: tuple[list[int], list[int]]
    """Where to count them: proposed and accepted, by depth."""
    begin: int
    """Position of the turn's first token."""
    end: int
    """First position after the longest possible turn."""
    fed_tokens: list[int] = field(default_factory=list)
    """Tokens fed since."""


@runtime_checkable
class Drafts(Protocol):
    """The source of drafts: `ref.mtp.MTP`, whose file imports this one."""

    config: Config
    mtp: Any
    layers: Any


class Decoder:
    """One context, decoded at batch 1 with a KV cache; speculatively if `mtp` is given.

        decoder = Decoder(model, mtp, max_len=256)
        decoder.feed(prompt)                        given tokens: a prompt, an observation
        turn = decoder.generate(stop, max_new=64)   new tokens, including the stop token
        decoder.total                               a Generation that sums all turns since the last reset()

    The weights are copied in `dtype` at construction: after an optimiser step, make a new decoder."""

    def __init__(
        self,
        model: Transformer,
        mtp: Drafts | None = None,
        *,
        max_len: int = 512,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
        draft_len: int | None = None,
        recall: int = 0,
        dtype: torch.dtype = torch.float32,
    ):
        """`draft_len`: number of MTP layers to use (default: all). `recall`: number of drafts for a turn's first
        pass, where the layers have no hidden state yet (0: no drafts). The drafts repeat the first tokens of the
        turn that last followed the same one to four tokens in this decoder's lifetime."""
        depth = 0 if mtp is None else mtp.mtp.depth if draft_len is None else draft_len
        if mtp is not None and not 1 <= depth <= mtp.mtp.depth:
            raise ValueError(f"draft_len must lie between 1 and {mtp.mtp.depth}; got {draft_len}")
        if not (max_len >= 1 and recall >= 0 and 0 <= temperature < math.inf):
            raise ValueError(
                f"max_len must be at least 1, recall not negative, and temperature finite and not "
                f"negative; got {max_len}, {recall}, {temperature}"
            )
        self.depth, self.max_len, self.temperature, self.generator = depth, max_len, temperature, generator
        self.recall = recall
        table = model.embed_tokens if model.config.tie_word_embeddings else model.lm_head
        with torch.no_grad():
            self.trunk = Stack(model.config, list(model.layers), max_len, dtype)
            self.eps = self.trunk.eps
            self.embedding, self.norm = (copied(model.embed_tokens.weight, dtype), copied(model.norm.weight, dtype))
            self.head = copied(table.weight.t(), dtype)
            layers = list(mtp.layers[:depth]) if mtp is not None else []
            self.drafter = (
                Stack(mtp.config, [layer.block for layer in layers], max_len, dtype)
                if mtp is not None and layers
                else None
            )
            # W·[h; e] needs a product only for h; the half for e is precomputed for every token of the vocabulary.
            self.draft_layers = []
            for layer in layers:
                h_weight, e_weight = layer.eh_proj.weight.to(dtype).chunk(2, 1)
                token_projection = unit(self.embedding, self.eps) * layer.enorm.weight.to(dtype) @ e_weight.t()
                h_projection = copied((h_weight * layer.hnorm.weight.to(dtype)).t(), dtype)
                self.draft_layers.append((h_projection, token_projection, copied(layer.norm.weight, dtype)))
        self.prenorm = torch.zeros(max_len, model.config.hidden_size, dtype=dtype)
        self.reset(forget=True)

    def reset(self, forget: bool = False) -> None:
        """Drop the context and the counts; `forget` also drops what `recall` remembers."""
        self.tokens: list[int] = []
        self.trunk_length = 0  # positions that the trunk has run, all on accepted tokens
        self.settled = 0  # positions that every MTP layer has run on accepted tokens
        self.pending: list[PendingTurn] = []
        self.retracted = 0
        draft_counts, accept_counts, recall_counts, recall_accept_counts = (
            [0] * n for n in (self.depth, self.depth, self.recall, self.recall)
        )
        self.total = Generation([], 0, draft_counts, accept_counts, recall_counts, recall_accept_counts)
        if forget:
            self.turns: dict[tuple[int, ...], tuple[list[int], int]] = {}

    @property
    def length(self) -> int:
        """Tokens in the context, including those not yet verified."""
        return len(self.tokens) + sum(len(p.draft) + len(p.fed_tokens) for p in self.pending)

    def feed(self, tokens: Sequence[int]) -> None:
        """Append given tokens; the next `generate` runs them in one pass. Raises ValueError beyond max_len and for
        tokens outside the vocabulary."""
        V = len(self.embedding)
        if not all(isinstance(t, int) and 0 <= t < V for t in tokens):
            raise ValueError(f"tokens must be whole numbers from 0 to {V - 1}; got {list(tokens)}")
        if self.length + len(tokens) > self.max_len:
            raise ValueError(
                f"a context of {self.length} tokens plus {len(tokens)} more exceeds max_len {self.max_len}"
            )
        (self.pending[-1].fed_tokens if self.pending else self.tokens).extend(tokens)

    @torch.inference_mode()
    def generate(self, stop: int | None = None, max_new: int | None = None, ahead: bool = False) -> list[int]:
        """Continue until `stop` (which is returned and stays in the context), `max_new` tokens, or max_len.

        `ahead`: a turn whose drafts reach `stop` is returned before they are verified, and a turn that recall is
        sure of is returned before any pass. The next pass verifies everything pending, together with what was fed
        since. If a draft is rejected, everything after it is dropped, `retracted` says how many turns are taken
        back, and the returned list replaces the first of them: undo what they did. `generate(stop, 0)` only
        verifies; it returns nothing if all drafts are accepted. Raises ValueError if nothing was fed, and for a
        model whose logits define no distribution (NaN among its weights)."""
        if not self.tokens:
            raise ValueError("nothing to continue: feed at least one token")
        start_time, total, self.retracted = time.perf_counter(), self.total, 0
        unverified = [token for p in self.pending for token in (*p.draft, *p.fed_tokens)]
        context = self.tokens + unverified
        begin, end = len(context), self.max_len if max_new is None else len(context) + max_new
        end = min(end, self.max_len)
        draft, is_certain = self.remember(context)
        q, x, counts = None, None, (total.recall_counts, total.recalled_accepted)
        if ahead and is_certain and draft[-1] == stop and len(draft) < end - begin:
            self.pending.append(PendingTurn(draft, q, counts, begin, end))
            total.seconds += time.perf_counter() - start_time
            return list(draft)
        draft = draft[: max(0, end - begin - 1)]
        if self.pending:
            x = self.run_trunk(unverified + draft)
            for number, p in enumerate(self.pending):
                if self.settle(x[: len(p.draft) + 1], p.draft, p.q, stop, p.counts) < len(p.draft):
                    self.retracted = len(self.pending) - number
                    total.retracted += self.retracted
                    begin, end, draft, x = p.begin, p.end, [], None
                    break
                self.tokens += p.fed_tokens
                x = x[len(p.draft) + len(p.fed_tokens) :]
            self.pending = []
        while len(self.tokens) < end and (len(self.tokens) == begin or self.tokens[-1] != stop):
            if len(self.tokens) > begin:
                max_drafts = min(self.depth, end - len(self.tokens) - 1)
                draft, q = self.guess(max_drafts, stop) if max_drafts > 0 else ([], None)
                counts = total.draft_counts, total.accept_counts
                if ahead and draft and draft[-1] == stop:
                    self.pending.append(PendingTurn(draft, q, counts, begin, end))
                    break
            self.settle(self.run_trunk(draft) if x is None else x, draft, q, stop, counts)
            x = None
        turn = self.tokens[begin:] + (self.pending[0].draft if self.pending else [])
        if self.recall and turn:
            for start in range(max(0, begin - 4), begin):
                ending = tuple(self.tokens[start:begin])
                previous_turn, repeats = self.turns.get(ending, ([], 0))
                self.turns[ending] = turn, repeats + 1 if turn == previous_turn else 1
        total.seconds += time.perf_counter() - start_time
        return turn

    def remember(self, context: list[int]) -> tuple[list[int], bool]:
        """The first `recall` tokens of the turn that last followed the same last four tokens of `context`, or else
        three, two or one; and whether they are the complete turn and it has followed one of these endings three
        times in a row."""
        if not self.recall:
            return [], False
        matches = [self.turns[suffix] for n in range(4, 0, -1) if (suffix := tuple(context[-n:])) in self.turns]
        turn = matches[0][0] if matches else []
        is_certain = 0 < len(turn) <= self.recall and any(t == turn and repeats > 2 for t, repeats in matches)
        return turn[: self.recall], is_certain

    def run_trunk(self, ahead: list[int]) -> Float[Tensor, "rows D"]:
        """Run the tokens that the trunk has not seen, then those `ahead`, in one pass. Returns the final hidden
        states from the last known token on."""
        start, context_length = self.trunk_length, len(self.tokens)
        ids = torch.tensor(self.tokens[start:] + ahead)
        x = self.trunk.run(F.embedding(ids, self.embedding), *self.trunk.frame(start, len(ids)))
        if self.depth:
            self.prenorm[start : start + len(x)] = x
        self.total.cycles += 1
        return unit(x[context_length - 1 - start :], self.eps) * self.norm

    def settle(self, x: Tensor, draft: list[int], q: Tensor | None, stop: int | None, counts: tuple) -> int:
        """Append the accepted drafts and the token after them, but nothing after `stop`. Returns the number of
        accepted drafts."""
        context_length = len(self.tokens)
        num_accepted, token = self.verify(torch.mm(x, self.head), draft, q)
        new_tokens = [*draft[:num_accepted], token]
        if stop in new_tokens:
            new_tokens = new_tokens[: new_tokens.index(stop) + 1]
        num_accepted = min(num_accepted, len(new_tokens))
        self.tokens += new_tokens
        self.total.tokens += new_tokens
        self.trunk_length = context_length + len(new_tokens) - 1
        for k in range(len(draft)):
            counts[0][k] += 1
            counts[1][k] += k < num_accepted
        if counts[0] is self.total.draft_counts and len(draft) == self.depth:
            # At the last D−1 positions layer k saw earlier drafts: if one was rejected, the layer must run again.
            self.settled = max(0, context_length - 1 - max(0, self.depth - 1 - num_accepted))
        return num_accepted

    def guess(self, n: int, stop: int | None) -> tuple[list[int], Tensor | None]:
        """Up to n drafts, none after `stop`, and the distributions [n, V] they were drawn from (None if greedy)."""
        assert self.drafter is not None
        start, end = self.settled, len(self.tokens) - 1
        ids, x, qs = self.tokens[start:], self.prenorm[start:end], []
        mask, blocks = self.drafter.frame(start, end - start)
        for k, (h_projection, token_projection, norm) in enumerate(self.draft_layers[:n], 1):
            token_ids = torch.tensor(ids[k : k + end - start])
            # W·[h; e], `ref/mtp.py` Eq. 1
            x = torch.addmm(F.embedding(token_ids, token_projection), unit(x, self.eps), h_projection)
            x = self.drafter.run(x, mask, blocks[k - 1 : k])
            logits = torch.mm(unit(x[-1:], self.eps) * norm, self.head)
            if self.temperature:
                qs.append((logits[0] / self.temperature).softmax(-1))  # q(x)
                ids.append(invert(qs[-1], torch.rand((), generator=self.generator, dtype=torch.float64).item()))
            else:
                ids.append(int(logits.argmax(-1)))
            if ids[-1] == stop:
                break
        return ids[end - start + 1 :], torch.stack(qs) if qs else None

    def verify(self, logits: Tensor, draft: list[int], q: Tensor | None) -> tuple[int, int]:
        """(number of accepted drafts, the token after them)."""
        if self.temperature:
            p = (logits / self.temperature).softmax(-1)  # p(x)
            u = torch.rand(len(draft) + 1, generator=self.generator, dtype=torch.float64).tolist()
            if q is None:  # recalled drafts are certain
                q = F.one_hot(torch.tensor(draft, dtype=torch.long), p.shape[-1]).to(p.dtype)
            return accept(p, q, draft, u)
        max_logits, best_tokens = (tensor.tolist() for tensor in logits.max(-1))
        if not all(map(math.isfinite, max_logits)):
            raise ValueError(f"model must give logits with a finite maximum; the maxima are {max_logits}")
        num_accepted = next((k for k, x in enumerate(draft) if x != best_tokens[k]), len(draft))
        return num_accepted, best_tokens[num_accepted]
