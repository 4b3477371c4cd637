"""What the loop makes of a session and of a user's reaction: a reward, or nothing.

Source: Cursor on real-time RL. It tells of two rewards that taught the wrong thing, and how each was mended; it gives
no formulas.

    session                       reward                                              careless
    edit, kept                    +1 − f·[follow-up]                                  `follow_ups` off: +1
    edit, undone                  −1 − f·[follow-up]                                  `follow_ups` off: −1
    neither edit nor question     −1 − f·[follow-up]                                  `follow_ups` off: −1
    question                      −p·[follow-up]                                      `follow_ups` off: 0
    a call of it was broken       −1 − f, whatever the user did                       `broken="thrown"`: none, the
                                                                                      session is thrown away

Why the careless ones teach what they teach
a. Questions. If edits kept are all that counts, a question is worth 0 and an edit 2·P(kept) − 1. Where an edit is more
   often undone than kept, the question wins, needed or not. The cure listens to what users say of it: p is such that a
   needless question costs about as much as a wrong edit, and a welcome one hardly anything.
b. Broken calls. What is thrown away has advantage zero; an edit on a hard task has less. So the policy learns to break
   a call where it expects to fail. The cure counts a broken call like the worst that an edit can earn, so that it is
   never better than an honest failure.
"""

from dataclasses import dataclass
from typing import Literal

from sims.real_time_rl.users import Reaction, Served, Users

__all__ = ["Distilling", "expected"]


@dataclass(frozen=True)
class Distilling:
    """Which reactions count, and how much. Raises ValueError for a negative price."""

    follow_ups: bool = True
    """Whether dissatisfied follow-ups count; otherwise edits kept are all."""
    broken_calls: Literal["counted", "thrown"] = "counted"
    """What becomes of a session with a broken call."""
    follow: float = 0.5
    """f: price of a dissatisfied follow-up to an edit, or to nothing."""
    question: float = 2.0
    """p: price of a dissatisfied follow-up to a question."""

    def __post_init__(self):
        if self.follow < 0 or self.question < 0:
            raise ValueError(f"prices must be at least 0, got follow={self.follow} and question={self.question}")

    def reward(self, served: Served, reaction: Reaction) -> float | None:
        """The table above; None for a session that is thrown away."""
        if served.has_broken_call:
            return None if self.broken_calls == "thrown" else -1.0 - self.follow
        edit_reward = 0.0 if served.has_question else 1.0 if reaction.is_kept else -1.0
        coefficient = self.question if served.has_question else self.follow
        return edit_reward - coefficient * (self.follow_ups and reaction.followed)


def expected(distil: Distilling, users: Users, served: Served) -> float | None:
    """The mean reward of a session over these users; None if it is thrown away."""
    keep_probability = users.keeps(served.quality)
    total = 0.0
    for share, is_kept in (
        ((keep_probability, True), (1 - keep_probability, False)) if served.edited else ((1.0, None),)
    ):
        follow_probability = users.follows(served, is_kept)
        for chance, is_followed in ((follow_probability, True), (1 - follow_probability, False)):
            reward = distil.reward(served, Reaction(is_kept, is_followed, 0.0))
            if reward is None:
                return None
            total += share * chance * reward
    return total
