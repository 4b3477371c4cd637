"""Rows of `etude bench sandbox`: whole episodes of the scripted oracle, graded.

The task is one function of examples/words. The oracle reads its file, writes it and lints it, and runs the package's
tests twice, as a model would: with a pytest that is started for it. Then 32 tests that it has not seen are played in a
sandbox of their own. In the first two kinds of episodes both sandboxes are open when it begins, and a judge waits in
the second one; in the second kind the oracle runs no tests itself. In the third kind nothing is open. An episode counts
only if it is paid in full.
"""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from environments.grading.guarded import Exam, grade, prepare_exam
from environments.grading.lay import Editable, write
from environments.grading.ready import Judges, nursery_of_judges
from environments.harness import record
from environments.harness.episode import Episode
from environments.harness.jobs import WORKING
from environments.harness.messages import Reply
from environments.harness.record import Record
from environments.harness.scripted import Script, oracle
from environments.harness.tools import TOOLS
from environments.harness.workspace import Job
from environments.sandbox.interface import Sandbox
from environments.sandbox.open import open_sandbox
from environments.sandbox.store import Store
from environments.tasks.build import GRADING
from kit.settings import RunError

__all__ = ["AT_ONCE", "TWO", "Plays"]

PACKAGE = Path(__file__).parents[2] / "examples" / "words"
FILE, TESTS, HIDDEN = "words/nouns.py", "tests/test_nouns.py", "hidden.py"
TOP, NEXT = b"def counted(number, noun):\n", b"\n\ndef listed("
"""Where the function that is taken out begins, and what comes behind it."""
HELD_OUT_TESTS = 32
TWO = 2
"""Episodes at once, where their number a second is measured."""
AT_ONCE = (
    ("oracle", True, False),
    ("oracle, no tests", False, False),
    ("oracle, nursery", True, True),
    ("oracle, no tests, nursery", False, True),
)
"""Of episodes that are counted by the second: a name, whether the oracle runs tests itself, and whether each grading
has a fork of a nursery."""
KINDS = (("oracle", True, True), ("oracle, no tests", False, True), ("oracle, cold", True, False))
"""Of episodes: a name, whether the oracle runs tests itself, and whether both sandboxes are open when the episode
begins."""


def exam_of(package: Path) -> Exam:
    """The package without the body of a function. Raises RunError where the package is not there."""
    gold = {path.relative_to(package).as_posix(): path.read_bytes() for path in sorted(package.rglob("*.py"))}
    before, top, remainder = gold.get(FILE, b"").partition(TOP)
    _, bottom, behind = remainder.partition(NEXT)
    if not bottom:
        raise RunError(
            f"the benchmark runs a task of examples/words, which is not in {package}; run it in a "
            f"clone of the repository"
        )
    start_files = {**gold, FILE: before + top + b"    raise NotImplementedError\n" + bottom + behind}
    phrases = ((number, "1 city" if number == 1 else f"{number} cities") for number in range(HELD_OUT_TESTS))
    tests = [f'def test_{number}():\n    assert counted({number}, "city") == "{text}"\n' for number, text in phrases]
    hidden = "\n\n".join(["from words.nouns import counted\n", *tests])
    return Exam(
        start_files,
        gold,
        Editable((FILE,)),
        {HIDDEN: hidden},
        tuple(f"{HIDDEN}::test_{number}" for number in range(HELD_OUT_TESTS)),
        "words",
    )


class Plays:
    """Episodes of the oracle, whose trees lie in `store`. Raises RunError where the package is not there."""

    def __init__(self, store: Store, package: Path = PACKAGE) -> None:
        self.store, self.fresh = store, partial(open_sandbox, limits=GRADING, store=store)
        self.exam = prepare_exam(exam_of(package), "words", self.fresh)
        with tempfile.TemporaryDirectory(prefix="etude-bench-") as name:
            write(self.exam.given_tree, Path(name) / "tree")
            self.tree = store.add_folder(Path(name) / "tree")

    def open_workspace(self, tree: str) -> Sandbox:
        """A sandbox for the oracle over a stored tree."""
        return open_sandbox(tree, limits=WORKING, store=self.store)

    def agent(self, path: Path, tested: bool, ready: Sandbox | None = None) -> tuple[Record, str]:
        """The oracle's part: the transcript, and the tree that is left. `tested`: it runs tests itself. `ready`: its
        sandbox, if one is open."""
        script = oracle(self.exam.given_tree, self.exam.gold_tree, (TESTS,))
        if not tested:
            script = Script(
                Reply(reply.text, tuple(call for call in reply.calls if call.name != "shell"))
                for reply in script.replies
            )
        tools = tuple(tool for tool in TOOLS if tool != "web_search")
        job = Job("words", "Write counted again.", self.tree, self.exam.given_tree, tools=tools, policy_name="oracle")
        with Record(path) as journal:
            return journal, Episode(
                job, script, journal, lambda tree: ready or self.open_workspace(tree), self.store
            ).play()

    def grading(self, journal: Record, tree: str, judges: Judges) -> None:
        """Grades what was left. Raises RunError unless it is paid in full."""
        result = grade(self.exam, self.store.tree(tree), self.fresh, [*record.calls(journal.lines)], judges=judges)
        if result.reward.total != 1.0:
            raise RunError(f"the oracle is paid {result.reward.total:g}; that is a fault of the program")

    def round_of(self, seconds: dict[str, list[float]], folder: Path, number: int) -> None:
        """One episode of each kind. Its seconds are noted: the agent's part, the grading, and both together."""
        for name, tested, ahead in KINDS:
            with Judges(self.fresh) as judges:
                ready = self.open_workspace(self.tree) if ahead else None
                if ahead:
                    judges.expect()
                    judges.settle()
                times = [time.perf_counter()]
                left = self.agent(folder / f"{number} {name}.jsonl", tested, ready)
                times.append(time.perf_counter())
                self.grading(*left, judges)
                times.append(time.perf_counter())
            for part, first, last in (("agent", 0, 1), ("grading", 1, 2), ("both", 0, 2)):
                seconds.setdefault(f"{name}: {part}", []).append(times[last] - times[first])

    def nurseries(self) -> bool:
        """Whether this machine has nurseries. Where it has none, a line on stderr says why."""
        with nursery_of_judges(GRADING, store=self.store) as nursery:
            try:
                nursery.sandbox().close()
            except RunError as error:
                nursery.refuse(f"no episodes with a nursery are run: {error}")
            return not nursery.refused

    def a_second(self, folder: Path, name: str, tested: bool, nursed: bool, count: int) -> float:
        """Episodes a second, where TWO are played at once and `count` in all. Nothing is open before, but a nursery
        that has imported pytest where gradings are `nursed`; a grading sandbox is opened while its episode is played.
        Raises RunError where one was refused."""
        with ExitStack() as stack:
            nursery = stack.enter_context(nursery_of_judges(GRADING, store=self.store)) if nursed else None
            if nursery is not None:
                nursery.sandbox().close()
            judges = stack.enter_context(Judges(self.fresh, TWO, nursery))
            threads = stack.enter_context(ThreadPoolExecutor(TWO))

            def play_episode(number: int) -> None:
                judges.expect()
                self.grading(*self.agent(folder / f"{number} at once, {name}.jsonl", tested), judges)

            start = time.perf_counter()
            for done in [threads.submit(play_episode, number) for number in range(count)]:
                done.result()
            if nursery is not None and nursery.refused:
                raise RunError(
                    "the nursery has ended while episodes were counted, and others were graded without "
                    "it; run the benchmark again"
                )
            return count / (time.perf_counter() - start)
