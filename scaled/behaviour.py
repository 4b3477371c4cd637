"""Behaviour rewards on many ranks: `ref/behaviour.py`, which has the measures, the traps and the glossary.

A rollout is measured and priced where it was played, from its own transcript: those functions are `ref`'s. A group is on many ranks, and what a part
adds to its advantages (3) belongs to the complete group: `group_parts` gathers the parts, nine numbers a rollout, and returns those of this
rank's rollouts. With a mean over the rollouts of one rank a price would act only where one rank has both kinds.
"""

from collections.abc import Sequence

import torch.distributed as dist

from ref import behaviour as ref
from ref.behaviour import Behaviour, Demo, Prices, behaviour, demo, measures, rewarded
from scaled.runtime.mesh import current

__all__ = ["Behaviour", "Demo", "Prices", "behaviour", "demo", "group_parts", "measures", "rewarded"]


def group_parts(group: Sequence[Behaviour], *, groups: Sequence[int] | None = None, axis: str = "dp") -> dict[str, list[float]]:
    """`ref.behaviour.group_parts` for this rank's rollouts, of which it may have none, over their group's rollouts on all ranks of the axis.

    `groups`: the number of each rollout's group, where there are several groups; one call then does for all of them. `axis`: "dp" where cp
    ranks hold the same rollouts, and "all" where each rank has its own, as `scaled.rl.share` deals them. Raises ValueError as in `ref`, on every
    rank, and unless all groups are priced by one table."""
    here, numbers = current().group(axis), [0] * len(group) if groups is None else groups
    mine = [(number, one.parts) for number, one in zip(numbers, group, strict=True)]
    every: list[list[tuple[int, dict[str, float]]]] = [mine]
    if here.size > 1:
        every = [[] for _ in range(here.size)]
        dist.all_gather_object(every, mine, group=here.handle)
    whole: dict[int, list[Behaviour]] = {}
    places = []
    for rank, some in enumerate(every):
        for number, parts in some:
            whole.setdefault(number, []).append(Behaviour(parts))
            if rank == here.rank:
                places.append((number, len(whole[number]) - 1))
    names = [*{tuple(one.parts): None for some in whole.values() for one in some}]
    if len(names) != 1:
        return ref.group_parts([one for some in whole.values() for one in some])  # which says what is wrong
    found = {number: ref.group_parts(some) for number, some in whole.items()}
    return {name: [found[number][name][place] for number, place in places] for name in names[0]}
