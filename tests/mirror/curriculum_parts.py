"""What ranks are asked to do with a curriculum. Every call gets the whole problem, and takes this rank's part."""

from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from environments.tasks.levels import Schedule, State
from kit.disk import read_lines
from ref.rollout import Rollout, RolloutResult
from ref.self_summary import Chain
from scaled import rl
from scaled.curriculum import JOURNAL, FollowedCurriculum
from scaled.runtime.mesh import current

__all__ = ["Climb", "follow"]


class Climb:
    """Levels of eight named tasks, as `environments.harness.task_set.Levels` climbs them."""

    def __init__(self, every: int) -> None:
        self.schedule, self.state = Schedule({f"task-{n}": float(n) for n in range(8)}, 4, every), State()

    @property
    def metrics(self) -> dict[str, float]:
        return {"level": float(self.state.level)}

    def choose(self, step: int, count: int) -> list[str]:
        tasks = []
        for _ in range(count):
            name, self.state = self.schedule.draw(self.state)
            tasks.append(name)
        return tasks

    def update(self, tasks: Sequence[str], outcomes: Sequence[RolloutResult]) -> None:
        assert [outcome.task for outcome in outcomes[:: len(outcomes) // len(tasks)]] == [*tasks]
        valid = [outcome for outcome in outcomes if not outcome.failure]
        self.state = self.schedule.update(self.state, int(sum(o.metrics["success"] for o in valid)), len(valid))


def follow(
    steps: Sequence[Sequence[float | None]], prompts: int, every: int, folder: Path, restarts: Sequence[tuple[int, int]]
) -> tuple[list[list[str]], list[dict[str, float]], int]:
    """The tasks of every step, what is logged of it, and the lines of the journal. `steps`: the success of every
    rollout, None where its environment failed. A restart (end, begin) is a group of ranks that dies before step `end`;
    the next one goes on from step `begin`."""
    N, tasks, logged = len(steps[0]), {}, {}
    ends, begins = [*(end for end, _ in restarts), len(steps)], [0, *(begin for _, begin in restarts)]
    for begin, end in zip(begins, ends, strict=True):
        curriculum = FollowedCurriculum(Climb(every), folder, prompts, N // prompts)
        for step in range(begin, end):
            tasks[step] = curriculum.choose(step)
            ended = [steps[step][n] for n in rl.share(N).tolist()]
            rollouts = [
                Rollout(Chain([]), failure="dead")
                if success is None
                else Rollout(Chain([]), metrics={"success": success})
                for success in ended
            ]
            logged[step] = curriculum.update(step, tasks[step], rollouts)
    order = range(len(steps))
    if current().group("all").size > 1:
        dist.barrier()  # rank 0 writes the journal
    return [tasks[step] for step in order], [logged[step] for step in order], len(read_lines(folder / JOURNAL))
