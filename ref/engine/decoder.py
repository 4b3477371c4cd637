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
| tokens accepted per cycle | `taken` | – |
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


def accept(p: Float[Tensor, "d1 V"], q: Float[Tensor, "d V"], draft: Sequence[int], u: Sequence[float]) -> tuple[int, int]:
    """The accept/reject rule of arXiv:2211.17192: (number of accepted drafts, the token after them).

    p: distributions of the main head at the d drafts and one position further. q: the distributions that the
    drafts were drawn from. u: d+1 uniform numbers in [0, 1). Draft x is accepted with probability min(1,
    p(x)/q(x)). At the first rejection the next token is drawn from norm(max(p − q, 0)); if all are accepted, it
    is drawn from the last p. The result is distributed as p for any q. Raises ValueError for other shapes, drafts
    outside the vocabulary, u outside [0, 1), p or q negative or not finite, and a p that is zero everywhere."""
    d, V = len(draft), p.shape[-1]
    found = (("p", list(p.shape), [d + 1, V]), ("q", list(q.shape), [d, V]), ("u", [len(u)], [d + 1]))
    for name, got, shape in found:
        if got != shape:
            raise ValueError(f"{name} must have shape {shape} for {d} drafts; got {got}")
    for name, x in (("p", p), ("q", q)):
        if not (x.is_floating_point() and bool(((x >= 0) & (x < math.inf)).all())):
            raise ValueError(f"{name} must hold floating-point probabilities that are finite and not negative")
    if not all(0 <= x < V for x in draft):
        raise ValueError(f"draft must hold tokens 0 to {V - 1}; got {list(draft)}")
    if not all(0 <= x < 1 for x in u):
        raise ValueError(f"u must hold numbers in [0, 1); got {list(u)}")
    for k, x in enumerate(draft):
        if u[k] * float(q[k, x]) >= float(p[k, x]):
            left = (p[k] - q[k]).clamp_(min=0)
            # Nothing is left if p and q differ only by rounding: then p itself is just as good.
            return k, invert(left if bool(left.any()) else p[k], u[-1])
    return len(draft), invert(p[len(draft)], u[-1])


def invert(mass: Float[Tensor, " V"], u: float) -> int:
    """The token at which the cumulative distribution of `mass` (not normalised) passes a share u of its total,
    0 ≤ u < 1. The token always has nonzero mass. Raises ValueError for a total that is zero or not finite."""
    total = mass.double().cumsum(-1)
    end = float(total[-1])
    if not 0 < end < math.inf:
        raise ValueError(f"mass must be finite and positive somewhere, or there is no token to draw; its sum is {end}")
    return int(torch.searchsorted(total, min(u * end, math.nextafter(end, 0.0)), right=True))


@dataclass
class Generation:
    """What was generated and what it cost."""

    tokens: list[int] = field(default_factory=list)
    """Generated tokens, including the stop token if there was one."""
    cycles: int = 0
    """Passes of the trunk, each of which gave at least one token."""
    drafted: list[int] = field(default_factory=list)
    """Drafts proposed at each depth."""
    accepted: list[int] = field(default_factory=list)
    """Drafts accepted at each depth."""
    recalled: list[int] = field(default_factory=list)
    """Drafts proposed by `recall` at each position of a turn's first pass."""
    recalled_accepted: list[int] = field(default_factory=list)
    """Accepted drafts of `recall`, by position."""
    retracted: int = 0
    """Turns taken back: returned before they were verified, and wrong."""
    seconds: float = 0.0
    """Wall-clock time, including prefill."""

    def __add__(self, other: "Generation") -> "Generation":
        """Both together: tokens concatenated, counts added."""
        sums = {}
        for name, mine in vars(self).items():
            theirs, counts = getattr(other, name), isinstance(mine, list) and name != "tokens"
            sums[name] = [a + b for a, b in zip(mine, theirs, strict=True)] if counts else mine + theirs
        return Generation(**sums)

    @property
    def tokens_per_cycle(self) -> float:
        return len(self.tokens) / max(self.cycles, 1)

    @property
    def acceptance(self) -> list[float]:
        """Share of drafts accepted at each depth (a draft is rejected if any draft before it is)."""
        return [a / max(d, 1) for a, d in zip(self.accepted, self.drafted, strict=True)]

    @property
    def recall_acceptance(self) -> list[float]:
        """The same for `recall`, by position in the turn."""
        return [a / max(d, 1) for a, d in zip(self.recalled_accepted, self.recalled, strict=True)]


@dataclass
class Pending:
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
    given: list[int] = field(default_factory=list)
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
                f"max_len must be at least 1, recall not negative, and temperature finite and not negative; got {max_len}, {recall}, {temperature}"
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
            self.drafter = Stack(mtp.config, [layer.block for layer in layers], max_len, dtype) if mtp is not None and layers else None
            # W·[h; e] needs a product only for h; the half for e is precomputed for every token of the vocabulary.
            self.entrances = []
            for layer in layers:
                of_h, of_e = layer.eh_proj.weight.to(dtype).chunk(2, 1)
                tokens = unit(self.embedding, self.eps) * layer.enorm.weight.to(dtype) @ of_e.t()
                entrance = copied((of_h * layer.hnorm.weight.to(dtype)).t(), dtype)
                self.entrances.append((entrance, tokens, copied(layer.norm.weight, dtype)))
        self.prenorm = torch.zeros(max_len, model.config.hidden_size, dtype=dtype)
        self.reset(forget=True)

    def reset(self, forget: bool = False) -> None:
        """Drop the context and the counts; `forget` also drops what `recall` remembers."""
        self.tokens: list[int] = []
        self.seen = 0  # positions that the trunk has run, all on accepted tokens
        self.settled = 0  # positions that every MTP layer has run on accepted tokens
        self.pending: list[Pending] = []
        self.retracted = 0
        drafted, accepted, recalled, stood = ([0] * n for n in (self.depth, self.depth, self.recall, self.recall))
        self.total = Generation([], 0, drafted, accepted, recalled, stood)
        if forget:
            self.turns: dict[tuple[int, ...], tuple[list[int], int]] = {}

    @property
    def length(self) -> int:
        """Tokens in the context, including those not yet verified."""
        return len(self.tokens) + sum(len(p.draft) + len(p.given) for p in self.pending)

    def feed(self, tokens: Sequence[int]) -> None:
        """Append given tokens; the next `generate` runs them in one pass. Raises ValueError beyond max_len and for
        tokens outside the vocabulary."""
        V = len(self.embedding)
        if not all(isinstance(t, int) and 0 <= t < V for t in tokens):
            raise ValueError(f"tokens must be whole numbers from 0 to {V - 1}; got {list(tokens)}")
        if self.length + len(tokens) > self.max_len:
            raise ValueError(f"a context of {self.length} tokens plus {len(tokens)} more exceeds max_len {self.max_len}")
        (self.pending[-1].given if self.pending else self.tokens).extend(tokens)

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
        started, total, self.retracted = time.perf_counter(), self.total, 0
        unverified = [token for p in self.pending for token in (*p.draft, *p.given)]
        context = self.tokens + unverified
        begin, end = len(context), self.max_len if max_new is None else len(context) + max_new
        end = min(end, self.max_len)
        draft, sure = self.remember(context)
        q, x, counts = None, None, (total.recalled, total.recalled_accepted)
        if ahead and sure and draft[-1] == stop and len(draft) < end - begin:
            self.pending.append(Pending(draft, q, counts, begin, end))
            total.seconds += time.perf_counter() - started
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
                self.tokens += p.given
                x = x[len(p.draft) + len(p.given) :]
            self.pending = []
        while len(self.tokens) < end and (len(self.tokens) == begin or self.tokens[-1] != stop):
            if len(self.tokens) > begin:
                room = min(self.depth, end - len(self.tokens) - 1)
                draft, q = self.guess(room, stop) if room > 0 else ([], None)
                counts = total.drafted, total.accepted
                if ahead and draft and draft[-1] == stop:
                    self.pending.append(Pending(draft, q, counts, begin, end))
                    break
            self.settle(self.run_trunk(draft) if x is None else x, draft, q, stop, counts)
            x = None
        turn = self.tokens[begin:] + (self.pending[0].draft if self.pending else [])
        if self.recall and turn:
            for start in range(max(0, begin - 4), begin):
                ending = tuple(self.tokens[start:begin])
                last, times = self.turns.get(ending, ([], 0))
                self.turns[ending] = turn, times + 1 if turn == last else 1
        total.seconds += time.perf_counter() - started
        return turn

    def remember(self, context: list[int]) -> tuple[list[int], bool]:
        """The first `recall` tokens of the turn that last followed the same last four tokens of `context`, or else
        three, two or one; and whether they are the complete turn and it has followed one of these endings three
        times in a row."""
        if not self.recall:
            return [], False
        found = [self.turns[e] for n in range(4, 0, -1) if (e := tuple(context[-n:])) in self.turns]
        turn = found[0][0] if found else []
        sure = 0 < len(turn) <= self.recall and any(t == turn and times > 2 for t, times in found)
        return turn[: self.recall], sure

    def run_trunk(self, ahead: list[int]) -> Float[Tensor, "rows D"]:
        """Run the tokens that the trunk has not seen, then those `ahead`, in one pass. Returns the final hidden
        states from the last known token on."""
        start, known = self.seen, len(self.tokens)
        ids = torch.tensor(self.tokens[start:] + ahead)
        x = self.trunk.run(F.embedding(ids, self.embedding), *self.trunk.frame(start, len(ids)))
        if self.depth:
            self.prenorm[start : start + len(x)] = x
        self.total.cycles += 1
        return unit(x[known - 1 - start :], self.eps) * self.norm

    def settle(self, x: Tensor, draft: list[int], q: Tensor | None, stop: int | None, counts: tuple) -> int:
        """Append the accepted drafts and the token after them, but nothing after `stop`. Returns the number of
        accepted drafts."""
        known = len(self.tokens)
        taken, token = self.verify(torch.mm(x, self.head), draft, q)
        new = [*draft[:taken], token]
        if stop in new:
            new = new[: new.index(stop) + 1]
        taken = min(taken, len(new))
        self.tokens += new
        self.total.tokens += new
        self.seen = known + len(new) - 1
        for k in range(len(draft)):
            counts[0][k] += 1
            counts[1][k] += k < taken
        if counts[0] is self.total.drafted and len(draft) == self.depth:
            # At the last D−1 positions layer k saw earlier drafts: if one was rejected, the layer must run again.
            self.settled = max(0, known - 1 - max(0, self.depth - 1 - taken))
        return taken

    def guess(self, n: int, stop: int | None) -> tuple[list[int], Tensor | None]:
        """Up to n drafts, none after `stop`, and the distributions [n, V] they were drawn from (None if greedy)."""
        assert self.drafter is not None
        start, end = self.settled, len(self.tokens) - 1
        ids, x, qs = self.tokens[start:], self.prenorm[start:end], []
        mask, blocks = self.drafter.frame(start, end - start)
        for k, (entrance, tokens, norm) in enumerate(self.entrances[:n], 1):
            at = torch.tensor(ids[k : k + end - start])
            x = torch.addmm(F.embedding(at, tokens), unit(x, self.eps), entrance)
            x = self.drafter.run(x, mask, blocks[k - 1 : k])
            logits = torch.mm(unit(x[-1:], self.eps) * norm, self.head)
            if self.temperature:
                qs.append((logits[0] / self.temperature).softmax(-1))
                ids.append(invert(qs[-1], torch.rand((), generator=self.generator, dtype=torch.float64).item()))
            else:
                ids.append(int(logits.argmax(-1)))
            if ids[-1] == stop:
                break
        return ids[end - start + 1 :], torch.stack(qs) if qs else None

    def verify(self, logits: Tensor, draft: list[int], q: Tensor | None) -> tuple[int, int]:
        """(number of accepted drafts, the token after them)."""
        if self.temperature:
            p = (logits / self.temperature).softmax(-1)
            u = torch.rand(len(draft) + 1, generator=self.generator, dtype=torch.float64).tolist()
            if q is None:  # recalled drafts are certain
                q = F.one_hot(torch.tensor(draft, dtype=torch.long), p.shape[-1]).to(p.dtype)
            return accept(p, q, draft, u)
        most, best = (found.tolist() for found in logits.max(-1))
        if not all(map(math.isfinite, most)):
            raise ValueError(f"model must give logits with a finite maximum; the maxima are {most}")
        taken = next((k for k, x in enumerate(draft) if x != best[k]), len(draft))
        return taken, best[taken]
