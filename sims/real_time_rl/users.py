"""Users of a served policy: what they see of a session, and how they react to it. A model, all of whose numbers are our
choice.

A session ends with an edit, with a question, or with neither. Let q be the share of the hidden tests that the edit
passes, and t the seconds that the session took. A user tries n inputs, is mistaken with probability s, grows impatient
within about τ seconds, and reacts after d hours in the mean:

    P(kept)      = s + (1 − 2s)·qⁿ                   an edit is kept, or undone                                     (1)
    P(follow-up) = 1 − (1 − c)·exp(−t/τ)             c: of an edit kept, of one undone, of nothing, of a question   (2)
    hours        ~ start + t/3600 + Exp(d)           start: uniform over the hours of a loop                        (3)

    c      a kept edit 0.05, an undone one 0.6, neither edit nor question 0.8; a question 0.05 where the task leaves
           open what is wanted, else 0.6

What follows from it
a. A reaction says little: a right edit is undone in one of twenty sessions, and one user in five has waited too long
   whatever came of it.
b. An edit is undone or not; a question cannot be undone. Who pays for edits kept alone makes a question worth zero, and
   an edit worth 2·P(kept) − 1, which is less where the policy is mostly wrong.
c. Users do not see broken calls. They see what came of the session, and how long it took.
d. What is not known yet is no reaction: a third of them come after the loop has ended, and are collected by the next.

The report on real-time RL names edits that are kept and follow-ups that are dissatisfied, and no model of users; real
users are harder to fool."""

import math
from dataclasses import dataclass, field
from random import Random

__all__ = ["HOURS", "Reaction", "Served", "Users"]

HOURS = 5.0
"""What a loop lasts, as at Cursor."""


@dataclass(frozen=True)
class Served:
    """What came of a session. Raises ValueError for a quality outside of [0, 1] and for negative seconds."""

    edited: bool
    """Whether it left an edit."""
    quality: float
    """Share of the hidden tests that pass; zero without an edit."""
    has_question: bool
    """Whether it ended in a question, and left no edit."""
    open: bool
    """Whether the task leaves open what is wanted."""
    has_broken_call: bool
    """Whether one of its calls was broken. No user sees it; the loop does."""
    seconds: float
    """How long the user waited."""

    def __post_init__(self):
        if not (0 <= self.quality <= 1 and 0 <= self.seconds < math.inf):
            raise ValueError(
                f"quality must lie between 0 and 1, and seconds must be finite and at least 0; got "
                f"{self.quality} and {self.seconds}"
            )
        if self.has_question and self.edited or self.quality and not self.edited:
            raise ValueError("a session with an edit is no question, and only an edit has a quality")

    @property
    def right(self) -> bool:
        """Whether it did what is wanted: an edit that passes all hidden tests, or a question where it was left open."""
        return self.open if self.has_question else self.quality == 1.0


@dataclass(frozen=True)
class Reaction:
    """What a user did about a session."""

    is_kept: bool | None
    """Whether the edit was kept; None without an edit."""
    followed: bool
    """Whether a dissatisfied message followed."""
    hours: float
    """When it was known, in hours since the loop began in which the session was served."""


@dataclass(frozen=True)
class Users:
    """The model's numbers. Raises ValueError where they are none."""

    tries: int = 3
    """n: inputs that a user tries."""
    slip: float = 0.05
    """s: probability that a user keeps what is wrong, or undoes what is right."""
    patience: float = 90.0
    """τ, seconds."""
    delay: float = 2.0
    """d: mean time to the reaction, hours."""
    kept_edit: float = field(default=0.05, metadata={"renamed_from": "kept"})
    """c of an edit that is kept."""
    undone: float = 0.6
    """c of an edit that is undone."""
    nothing: float = 0.8
    """c of a session that leaves neither an edit nor a question."""
    welcome: float = 0.05
    """c of a question where the task leaves open what is wanted."""
    needless: float = 0.6
    """c of any other question."""

    def __post_init__(self):
        for name in ("kept_edit", "undone", "nothing", "welcome", "needless"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a probability, got {getattr(self, name)}")
        if not 0 <= self.slip <= 0.5 or self.tries < 1:
            raise ValueError(
                f"slip must lie between 0 and 0.5, and tries must be at least 1; got {self.slip} and {self.tries}"
            )
        if not (0 < self.patience < math.inf and 0 <= self.delay < math.inf):
            raise ValueError(
                f"patience must be above 0, and delay at least 0, and both finite; got {self.patience} and {self.delay}"
            )

    def keeps(self, quality: float) -> float:
        """(1): the probability that an edit of this quality is kept."""
        return self.slip + (1 - 2 * self.slip) * quality**self.tries

    def follows(self, served: Served, is_kept: bool | None) -> float:
        """(2): the probability of a dissatisfied follow-up."""
        if served.edited:
            complaint = self.kept_edit if is_kept else self.undone
        elif served.has_question:
            complaint = self.welcome if served.open else self.needless
        else:
            complaint = self.nothing
        return 1 - (1 - complaint) * math.exp(-served.seconds / self.patience)

    def react(self, served: Served, rng: Random) -> Reaction:
        """One user's reaction. Takes four numbers from `rng`, always in this order: of keeping, of a follow-up, of the
        start and of the delay. So two sessions can be shown to the same user."""
        keep_draw, follow_draw, start, delay_draw = (rng.random() for _ in range(4))
        is_kept = keep_draw < self.keeps(served.quality) if served.edited else None
        hours = start * HOURS + served.seconds / 3600 - self.delay * math.log1p(-delay_draw)
        return Reaction(is_kept, follow_draw < self.follows(served, is_kept), hours)
