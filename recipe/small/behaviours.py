"""What an agent of the small world does in an episode, beside solving it: read before it writes, test what it wrote,
repair after a test that failed. Each is a share of the rollouts in which it could have been done."""

from recipe.microrepo import Task
from ref.transcript import Transcript

__all__ = ["BEHAVIOURS", "count_behaviours"]

BEHAVIOURS = {
    "reads_first": "read all files that the body depends on before writing",
    "tests": "tested the last body written",
    "repairs": "wrote again after a failed test",
    "recovers": "passed the tests after a failed test",
}
"""Name → what is counted: reads_first and tests among rollouts that write a body, repairs and recovers among those in
which a test of a body failed."""


def count_behaviours(task: Task, transcript: Transcript) -> dict[str, tuple[int, int]]:
    """Name → (whether the agent did it, whether it could have), as 0 or 1."""
    calls = transcript.calls
    writes = [number for number, call in enumerate(calls) if call.writes]
    runs = {number: call.tests for number, call in enumerate(calls) if call.tests and writes and number > writes[0]}
    failures = [number for number, (passed, total) in runs.items() if passed < total]
    has_written, has_failed = int(bool(writes)), int(bool(failures))
    first_write, first_failure = (numbers[0] if numbers else len(calls) for numbers in (writes, failures))
    files_read = {call.path for call in calls[:first_write] if call.name == "read" and call.valid}
    return {
        "reads_first": (int(has_written and {task.target, *task.helpers} <= files_read), has_written),
        "tests": (int(has_written and any(number > writes[-1] for number in runs)), has_written),
        "repairs": (int(has_failed and writes[-1] > first_failure), has_failed),
        "recovers": (
            int(any(passed == total for number, (passed, total) in runs.items() if number > first_failure)),
            has_failed,
        ),
    }
