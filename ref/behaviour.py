"""Behaviour rewards: what a rollout did on its way, priced beside its outcome.

Paper: Composer 2 technical report (arXiv:2603.24477v2), §4.2. It names auxiliary rewards for coding style, for
communication and against poor tool calls such as to-do items that are created and left open, and a nonlinear length
penalty that makes agents call tools together. It gives neither formulas nor prices.

    b(x) = −Σ_j price_j · m_j(x),   0 ≤ m_j ≤ most_j                                                        (1)
    r    = outcome − effort price · C(effort) + b                          C: `ref/length_penalty.py`       (2)
    A_i  = r_i − mean of r over the group = A_i(outcome) + A_i(effort) + Σ_j A_i(m_j)                       (3)

    measure m          what it counts                                                                       unit
    todos              to-do items that are neither done nor cancelled at the end                           items
    broken             calls of tools that do not exist, or with arguments that fail their checks           calls
    failed             calls that a tool could not carry out                                                calls
    silent             no final message, or an empty one                                                    0 or 1
    untrue             the final message says that tests pass, and the record does not show it              0 or 1
    lints              complaints that the diff adds                                                        complaints
    diff               lines that the diff adds and removes                                                 lines
    comments           comments' share of the written code, as far as it exceeds what is free               0 to 1
    sequential         turns with calls that could have been fewer: (turns with calls − 1)/(calls − 1)      0 to 1

The traps
a. Dr. GRPO's advantage (3) is linear in the reward, so every part can be read by itself, and a part that all rollouts
   of a group share moves nothing. A price therefore acts only while the behaviour differs within groups: a fault that
   the policy always makes is not unlearnt by a price, however high. (GRPO's division by the group's deviation would
   break the linearity, and blow small differences up.)
b. Every part is a cost with an upper end. A reward for a behaviour would be earned for its own sake: for comments, for
   calls made together, for to-do items ticked off. A cost without an end would make a long failed rollout outweigh all
   else in its group.
c. Doing nothing avoids most costs. Prices must be small beside the outcome; `Prices.max_penalty` says how much they can
   take in all.
d. Broken rollouts count like others. Where a broken call discards the rollout, the policy learns to break calls on hard
   tasks.
e. Some calls must wait for others, and then `sequential` costs what nobody can save. Within a group the shared part
   cancels.

Where this file departs from the paper
1. All measures, caps and prices are our choice; the report has none in print.
2. Nothing here is graded by a model. A judge's verdict on the final message can replace the rule for `untrue`
   (`claims`).
3. A claim counts as untrue also where tests ran before the last edit only: the record does not show it for the code
   that was handed in.
4. The report rewards calls made together by way of the length penalty (fewer turns, same work). `sequential` prices
   them directly.

Run it
    etude run behaviour --scale small      a second; the same as: python -m ref.behaviour
    etude figure behaviour                 what agents do whose habits have prices, and what without
    etude run behaviour --scale full       RL with prices (`rl.behaviour`), on many ranks

Glossary
    symbol     variable                 shape   unit
    x          transcript               –       `ref/transcript.py`
    m          `measures`               –       see the table
    price      `Prices`                 –       reward per unit
    b          `Behaviour.total`        –       reward, never above zero
    A(m_j)     `group_parts`            N       reward
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from ref.transcript import Call, Todo, Transcript, Turn, claims_tests_pass, comment_share, suite_state

__all__ = ["Behaviour", "Demo", "Prices", "behaviour", "demo", "group_parts", "measures", "compute_reward"]

MEASURE_CAPS = {
    "todos": 5.0,
    "broken": 5.0,
    "failed": 5.0,
    "silent": 1.0,
    "untrue": 1.0,
    "lints": 10.0,
    "diff": 500.0,
    "comments": 1.0,
    "sequential": 1.0,
}
"""Upper end of every measure, in its unit: more costs no more."""


@dataclass(frozen=True)
class Prices:
    """Reward subtracted per unit of each measure. Raises ValueError for a price that is negative or not finite, and for
    another free share."""

    todos: float = 0.02
    """Per open item."""
    broken: float = 0.03
    """Per broken call."""
    failed: float = 0.0
    """Per failed call."""
    silent: float = 0.1
    """For no final message."""
    untrue: float = 0.2
    """For a claim about tests that the record does not show."""
    lints: float = 0.005
    """Per complaint."""
    diff: float = 0.0001
    """Per changed line."""
    comments: float = 0.1
    """For code that is nothing but comments; in proportion for less."""
    sequential: float = 0.02
    """For calls that were made one a turn; in proportion for fewer turns."""
    free_comments: float = 0.3
    """Comments' share of the written code that costs nothing."""

    def __post_init__(self):
        for field in fields(self):
            if not 0 <= getattr(self, field.name) < math.inf:
                raise ValueError(f"{field.name} must be finite and at least 0; got {getattr(self, field.name)}")
        if not self.free_comments < 1:
            raise ValueError(f"free_comments must be below 1; got {self.free_comments}")

    @classmethod
    def free(cls) -> "Prices":
        """Nothing costs anything."""
        return cls(**dict.fromkeys(MEASURE_CAPS, 0.0))

    @property
    def max_penalty(self) -> float:
        """What all parts together can take."""
        return sum(getattr(self, name) * cap for name, cap in MEASURE_CAPS.items())


@dataclass(frozen=True)
class Behaviour:
    """The priced behaviour of one rollout."""

    parts: dict[str, float]
    """−price · measure for each measure, in the order of `MEASURE_CAPS`; in units of the reward, between −price · cap
    and 0."""

    @property
    def total(self) -> float:
        """b, the sum of the parts."""
        return math.fsum(self.parts.values())  # Eq. 1: b = Σ_j parts


def measures(
    transcript: Transcript, free_comments: float = 0.3, claims: Callable[[str], bool] = claims_tests_pass
) -> dict[str, float]:
    """The table above, before the caps. `claims` says whether a final message states that tests pass. §4.2."""
    calls = transcript.calls
    rounds = sum(bool(turn.calls) for turn in transcript.turns)
    share = comment_share([call.wrote for call in calls if call.valid]) or 0.0
    message = transcript.final_message
    return {
        "todos": float(sum(todo.state in ("open", "started") for todo in transcript.todos)),
        "broken": float(sum(not call.valid for call in calls)),
        "failed": float(sum(call.valid and not call.ok for call in calls)),
        "silent": float(not message),
        "untrue": float(bool(message) and claims(message) and suite_state(transcript) != "passed"),
        "lints": float(transcript.lints),
        "diff": float(transcript.changed_lines),
        "comments": max(0.0, share - free_comments) / (1 - free_comments),  # share above what is free, 0 to 1
        # (turns with calls − 1) / (calls − 1)
        "sequential": (rounds - 1) / (len(calls) - 1) if len(calls) > 1 else 0.0,
    }


def behaviour(transcript: Transcript, prices: Prices, claims: Callable[[str], bool] = claims_tests_pass) -> Behaviour:
    """(1): every measure, capped and priced."""
    counts = measures(transcript, prices.free_comments, claims)
    # Eq. 1: −price_j · min(m_j, most_j)
    return Behaviour({name: 0.0 - getattr(prices, name) * min(counts[name], cap) for name, cap in MEASURE_CAPS.items()})


def compute_reward(outcome: float, effort_cost: float, parts: Behaviour) -> float:
    """(2): what a group compares. `outcome` is the tests' reward and `effort_cost` the priced length penalty, which is
    subtracted. Raises ValueError unless both are finite and the cost is not negative."""
    if not (math.isfinite(outcome) and 0 <= effort_cost < math.inf):
        raise ValueError(
            f"outcome must be finite and effort_cost finite and at least 0; got {outcome} and {effort_cost}"
        )
    return outcome - effort_cost + parts.total  # Eq. 2: r = outcome − effort + b


def group_parts(group: Sequence[Behaviour]) -> dict[str, list[float]]:
    """(3): what each part adds to the advantages of a group of N rollouts, N numbers for every part. They sum to zero,
    and a part that all rollouts share is exactly zero. Raises ValueError for an empty group, and for rollouts that were
    not priced alike."""
    if not group:
        raise ValueError("group must hold at least one rollout")
    if len({tuple(rollout.parts) for rollout in group}) > 1:
        raise ValueError("group must be priced by one table; some rollouts have other parts")
    advantages = {}
    for name, first in group[0].parts.items():
        # Equal parts give exact zeros, as in `ref/dr_grpo.py`
        relative = [rollout.parts[name] - first for rollout in group]
        mean = math.fsum(relative) / len(group)  # Eq. 3: mean over the group
        advantages[name] = [value - mean for value in relative]  # Eq. 3: A_i(m_j)
    return advantages


@dataclass(frozen=True)
class Demo:
    """Four rollouts of one task, all of them right, each with one habit of its own; and one habit that they share."""

    prices: Prices = Prices()
    """What habits cost."""


def demo(config: Demo = Demo(), log: Callable[..., None] = lambda *_, **__: None) -> dict[str, float]:
    """Returns for each rollout its reward and its advantage, and by how much a fault that all four share moves the
    advantages: nothing."""
    read, test = Call("read", "a.py"), Call("test", tests=(3, 3))
    write = Call("write", "a.py", "def f(a):\n    return a + 1\n")
    claim = Turn("assistant", "f adds one. All tests pass.")

    def make_transcript(*turns: tuple[Call, ...], final_turn: Turn = claim, open_todos: int = 1) -> Transcript:
        return Transcript(
            (*(Turn("assistant", calls=calls) for calls in turns), final_turn),
            (Todo("write it up", "open"),) * open_todos,
        )

    broken_call = Call("grep", valid=False)
    rollouts = {
        "tidy": make_transcript((read,), (write, test)),
        "clumsy": make_transcript((broken_call,), (broken_call, read), (write, test)),
        "silent": make_transcript((read,), (write, test), final_turn=Turn("assistant")),
        "boastful": make_transcript((read,), (write,)),
    }
    group = [behaviour(transcript, config.prices) for transcript in rollouts.values()]
    advantages = group_parts(group)
    metrics = {}
    for index, name in enumerate(rollouts):
        metrics |= {
            f"{name}_reward": compute_reward(1.0, 0.0, group[index]),
            f"{name}_advantage": math.fsum(values[index] for values in advantages.values()),
        }
        log(index + 1, len(group), **{key: value for key, value in metrics.items() if key.startswith(name)})
    return metrics | {"shared_fault_moves": max(map(abs, advantages["todos"]))}


if __name__ == "__main__":
    for name, value in demo().items():
        print(f"{name:20s} {value:.3f}")
