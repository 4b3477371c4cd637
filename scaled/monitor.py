"""A monitor on many ranks: `ref/monitor.py`, which has the test, its assumptions and the glossary.

A statistic is one value of a group, and the group's rollouts are on many ranks: `statistics` sums what they did before
it divides, and returns the same on every rank. A rank may have none of them; then it passes an empty list, because all
ranks must call together.

A mean of the ranks' own statistics would be another number: the entropy of tools, and the tool that was called most,
are those of all calls together.

What follows is the same on every rank and needs no sum. Each rank keeps a `Monitor`, which observes the statistics of
all groups of the step, and raises the same alarms as the others. If each rank observed its own groups alone, every rank
would bet with a whole capital, and the bound on false alarms would be as many times as high as there are ranks.
"""

import math
from collections import Counter
from collections.abc import Sequence

import torch

from ref.monitor import (
    SMALL_WORLD,
    Alarm,
    Band,
    Demo,
    Evidence,
    Monitor,
    Signature,
    advance,
    demo,
    learn_band,
    log_evidence,
)
from ref.transcript import Transcript, comments, remove_whitespace
from scaled.runtime.comm import all_reduce_sum
from scaled.runtime.mesh import current

__all__ = [
    "SMALL_WORLD",
    "Alarm",
    "Band",
    "Demo",
    "Evidence",
    "Monitor",
    "Signature",
    "advance",
    "demo",
    "learn_band",
    "log_evidence",
    "statistics",
]


def statistics(
    group: Sequence[Transcript],
    tools: Sequence[str],
    longest: int,
    signatures: Sequence[Signature] = SMALL_WORLD,
    *,
    axis: str = "dp",
) -> dict[str, float | None]:
    """`ref.monitor.statistics` of one group's rollouts on all ranks of the axis, the same on each of them, from this
    rank's.

    `axis`: "dp" where cp ranks hold the same rollouts, and "all" where each rank has its own. Raises ValueError as in
    `ref`, for a group that is empty on all ranks on every rank."""
    names = [*dict.fromkeys(tools)]
    calls = [call for rollout in group for call in rollout.calls]
    codes, call_counts = (
        [call.wrote for call in calls if call.valid],
        Counter(call.name if call.name in names else None for call in calls),
    )
    local_sums = [
        len(group),
        len(calls),
        sum(not call.valid for call in calls),
        sum(
            rollout.final_message.endswith("?") and not any(call.writes for call in rollout.calls) for rollout in group
        ),
        sum(any(signature.matches(rollout) for signature in signatures) for rollout in group),
        sum(len(remove_whitespace(comment)) for code in codes for comment in comments(code)),
        sum(len(remove_whitespace(code)) for code in codes),
        sum(min(1.0, rollout.tokens / longest) for rollout in group) if longest > 0 else 0.0,
        *(call_counts[name] for name in (*names, None)),
    ]
    sums = all_reduce_sum(torch.tensor(local_sums, dtype=torch.float64, device=current().device), axis).tolist()
    num_rollouts, num_calls, num_broken, questions, hacks, comment_chars, code_chars, length_sum, *tool_counts = sums
    if not num_rollouts or len(names) < 2 or longest <= 0:
        raise ValueError(
            f"group and tools must hold one and two, and longest must be positive; got "
            f"{num_rollouts:.0f}, {len(names)}, {longest}"
        )
    shares = [count / num_calls for count in tool_counts if count]
    return {
        "entropy": min(1.0, sum(-p * math.log(p) for p in shares) / math.log(len(names))) if num_calls else None,
        "top_tool": max(shares, default=None),
        "comments": comment_chars / code_chars if code_chars else None,
        "length": length_sum / num_rollouts,
        "broken": num_broken / num_calls if num_calls else None,
        "questions": questions / num_rollouts,
        "hacks": hacks / num_rollouts,
    }
