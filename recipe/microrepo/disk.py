"""The small world on disk: the same episodes with files of Python in a sandbox, tests that pytest runs, and the grader
of real environments.

The agent says and hears the same as in memory (`recipe/microrepo/session.py`), byte for byte, so a policy can be moved
from one to the other, and a training run of RL has the same curves in both. What an answer says comes from the machine:
`read` reads the file, `write` writes it, `test` runs pytest on a file with the three visible tests, and the verdict is
that of `environments/grading` on 32 hidden ones, in a sandbox of their own.

Two answers differ, because Python knows more than the world's own arithmetic: a negative power is a fraction, and a
number may have more than 4,096 bits. In memory both are failures of the body, so a body that only passes through one (2
** -1 * 2 * a) can be right on disk and wrong in memory."""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from environments.grading.guarded import Exam, grade
from environments.grading.lay import Editable, write
from environments.grading.ready import Judges, nursery_of_judges
from environments.sandbox.cache import cache_folder
from environments.sandbox.interface import Limits, Sandbox
from environments.sandbox.open import open_sandbox, own_store
from recipe.microrepo.environment import Verdict
from recipe.microrepo.session import Session, called, short
from recipe.microrepo.task import Case, Task
from ref.environment import EnvironmentFailure

__all__ = ["DiskSession", "files_of", "tests_of"]

LIMITS = Limits(processes=16, memory=256 << 20, disk=16 << 20, inodes=500, seconds=8.0)
RUN = "import gc, os, pytest, sys; gc.freeze(); code = pytest.main(sys.argv[1:]); sys.stdout.flush(); os._exit(code)"
"""As `python -m pytest`, in two thirds of its time: collections of garbage leave out what pytest has made, and the
process ends at once."""
PYTEST = f"COLUMNS=2000 python3 -B -c '{RUN}' -q --tb=no -rf -p no:cacheprovider test_{{}}.py"
"""-B: a file that is written twice in a second with as many bytes would run from the bytecode of the first."""
JUDGES = Judges(lambda tree: open_sandbox(tree, limits=LIMITS), nursery=nursery_of_judges(LIMITS))
"""One for the process: episodes that are played beside each other are graded one after the other. The nursery begins
with the first of them, and ends with the process."""
FAILED = re.compile(r"^FAILED test_m\d+\.py::test_(\d+) - (.*)$", re.MULTILINE)
NOT_EQUAL = re.compile(r"(?:AssertionError: )?assert (\S+) == ")
HIDDEN_TESTS_FILE = "test_hidden.py"


def tests_of(task: Task, cases: Sequence[Case]) -> str:
    """A file of tests, one function for each case."""
    tests = [
        f"def test_{number}():\n    assert {called(task, case)} == {case.want}\n" for number, case in enumerate(cases)
    ]
    return "\n\n".join([f"from {task.target} import {task.target}\n", *tests])


def files_of(task: Task) -> dict[str, bytes]:
    """The repository with its visible tests; the target without its body."""
    modules = {
        name: module.source(name, None if name == task.target else module.body) for name, module in task.files.items()
    }
    texts = {f"{name}.py": text + "\n" for name, text in modules.items()} | {
        f"test_{task.target}.py": tests_of(task, task.visible_tests)
    }
    return {name: text.encode() for name, text in texts.items()}


@lru_cache(4096)
def store_repository(task: Task, extra_files: tuple[tuple[str, str], ...]) -> str:
    """The hash of the repository in the user's store. `extra_files`: files beside it, path and text."""
    with tempfile.TemporaryDirectory(prefix="etude-small-world-") as name:
        write(files_of(task) | {path: text.encode() for path, text in extra_files}, Path(name) / "tree")
        return own_store(cache_folder() / "store").add_folder(Path(name) / "tree")


class DiskSession(Session):
    """A session of a task on disk, with a sandbox from its first call to `close`. Raises RunError where this machine
    has no sandboxes, and EnvironmentFailure where one dies."""

    def __init__(self, task: Task, max_turns: int = 12) -> None:
        super().__init__(task, max_turns)
        self._sandbox: Sandbox | None = None
        self._is_grading_expected = False
        self._saved_verdict: Verdict | None = None

    def verify(self) -> Verdict:
        """What the grader says of the tree as it is, or as it was when the session was closed."""
        return self._saved_verdict or self._grade()

    def judge(self) -> None:
        """Grades now, so that the verdict outlives the sandbox."""
        self._saved_verdict = self.verify()

    def close(self) -> None:
        """Ends the sandbox. Without `judge` before, the verdict is that of no body."""
        if self._sandbox is not None:
            self._sandbox.close()
        self._sandbox = None

    def fork(self) -> DiskSession:
        """The same episode in a sandbox of its own, which begins with the files as they are now."""
        twin = copy.copy(self)
        twin.counts = dict(self.counts)
        if self._sandbox is not None:
            twin._sandbox = self._sandbox.fork(self._sandbox.snapshot())
        return twin

    def __getstate__(self) -> dict:
        """A session that is sent to another process leaves its sandbox behind."""
        return {**self.__dict__, "_sandbox": None}

    def call_tool(self, tool: str, args: Mapping[str, object]) -> str:
        """What a tool says. A command may fail, which its text tells; nothing else may."""
        if self._sandbox is None:
            self._sandbox = open_sandbox(store_repository(self.task, self.list_extra_files()), limits=LIMITS)
        observation = self._sandbox.call(tool, args)
        if not observation.ok and observation.exit is None and tool != "shell":
            raise EnvironmentFailure(
                f"the small world's sandbox cannot {tool}: {observation.end_reason or observation.text}"
            )
        return observation.text

    def list_extra_files(self) -> tuple[tuple[str, str], ...]:
        """Files that lie beside the repository, path and text. A world of its own may have some."""
        return ()

    def source_of(self, name: str) -> str:
        return self.call_tool("read", {"path": f"{name}.py"}).rstrip("\n")

    def write_body(self) -> None:
        target = self.task.target
        if not self._is_grading_expected:  # who writes will be graded
            JUDGES.expect()
            self._is_grading_expected = True
        self.call_tool(
            "write", {"path": f"{target}.py", "text": self.task.files[target].source(target, self.text) + "\n"}
        )

    def complaints(self, cases: Sequence[Case]) -> list[str | None]:
        """Of the visible cases: what pytest says of each."""
        if self.body is None:
            return ["no body"] * len(cases)
        output = self.call_tool("shell", {"command": PYTEST.format(self.task.target)})
        failures = {int(number): message for number, message in FAILED.findall(output)}
        if not failures and f"{len(cases)} passed" not in output:
            return [f"{called(self.task, case)} fails, no answer" for case in cases]  # it was ended
        return [
            _complaint(self.task, case, failures[number]) if number in failures else None
            for number, case in enumerate(cases)
        ]

    def _grade(self) -> Verdict:
        """Hidden tests, in a sandbox of their own; without a body none can pass."""
        cases = self.task.hidden_tests
        if self.body is None or self._sandbox is None:
            return self.reward_of([False] * len(cases))
        original_files, target = files_of(self.task), f"{self.task.target}.py"
        gold = {
            **original_files,
            target: self.task.files[self.task.target].source(self.task.target, self.task.answer).encode() + b"\n",
        }
        names = [f"{HIDDEN_TESTS_FILE}::test_{number}" for number in range(len(cases))]
        exam = Exam(
            original_files, gold, Editable((target,)), {HIDDEN_TESTS_FILE: tests_of(self.task, cases)}, tuple(names)
        )
        final_tree = own_store(cache_folder() / "store").tree(self._sandbox.snapshot())
        result = grade(exam, final_tree, JUDGES.fresh, seconds=LIMITS.seconds, judges=JUDGES)
        return self.reward_of([name in result.verdicts.passed and not result.reward.flags for name in names])


def _complaint(task: Task, case: Case, message: str) -> str:
    """What pytest says of a failed test, in the world's words."""
    if match := NOT_EQUAL.match(message):
        value = {"True": "1", "False": "0"}.get(match[1], match[1])
        number = re.fullmatch(r"-?\d+", value)
        return (
            f"{called(task, case)} is "
            f"{short(int(value)) if number else 'large' if '...' in value else value[:12]}, want {short(case.want)}"
        )
    kind = message.partition(":")[0]
    return f"{called(task, case)} fails, {'division by zero' if kind == 'ZeroDivisionError' else kind[:20]}"
