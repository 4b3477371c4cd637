"""Behaviour rewards on many ranks: `ref/behaviour.py`, which has the measures, the traps and the glossary.

A rollout is measured and priced where it was played, from its own transcript: those functions are `ref`'s. A group is
on many ranks, and what a part adds to its advantages (3) belongs to the complete group: `group_parts` gathers the
parts, nine numbers a rollout, and returns those of this rank's rollouts. With a mean over the rollouts of one rank a
price would act only where one rank has both kinds.
"""

from collections.abc import Sequence

import torch.distributed as dist

from ref import behaviour as ref
from ref.behaviour import Behaviour, Demo, Prices, behaviour, compute_reward, demo, measures
from scaled.runtime.mesh import current

__all__ = ["Behaviour", "Demo", "Prices", "behaviour", "demo", "group_parts", "measures", "compute_reward"]


def group_parts(
    group: Sequence[Behaviour], *, groups: Sequence[int] | None = None, axis: str = "dp"
) -> dict[str, list[float]]:
    """`ref.behaviour.group_parts` for this rank's rollouts, of which it may have none, over their group's rollouts on
    all ranks of the axis.

    `groups`: the number of each rollout's group, where there are several groups; one call then does for all of them.
    `axis`: "dp" where cp ranks hold the same rollouts, and "all" where each rank has its own, as `scaled.rl.share`
    deals them. Raises ValueError as in `ref`, on every rank, and unless all groups are priced by one table."""
    rank_group, group_numbers = current().group(axis), [0] * len(group) if groups is None else groups
    local_parts = [(number, member.parts) for number, member in zip(group_numbers, group, strict=True)]
    parts_by_rank: list[list[tuple[int, dict[str, float]]]] = [local_parts]
    if rank_group.size > 1:
        parts_by_rank = [[] for _ in range(rank_group.size)]
        dist.all_gather_object(parts_by_rank, local_parts, group=rank_group.handle)
    by_group: dict[int, list[Behaviour]] = {}
    positions = []
    for rank, rank_parts in enumerate(parts_by_rank):
        for number, parts in rank_parts:
            by_group.setdefault(number, []).append(Behaviour(parts))
            if rank == rank_group.rank:
                positions.append((number, len(by_group[number]) - 1))
    names = [*{tuple(member.parts): None for members in by_group.values() for member in members}]
    if len(names) != 1:
        # It raises the error that says what is wrong.
        return ref.group_parts([member for members in by_group.values() for member in members])
    # Eq. 3 (ref/behaviour.py): A(m_j) of every part, over the complete group.
    advantages = {number: ref.group_parts(members) for number, members in by_group.items()}
    return {name: [advantages[number][name][position] for number, position in positions] for name in names[0]}
