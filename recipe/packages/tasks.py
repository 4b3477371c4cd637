"""The tasks of a run on packages: which packages are trained on and which are held out, and the task set of a rank.

A run keeps copies of its recipes in RUN/data/recipes, so that it resumes with the tasks that it began with. Packages
and tasks themselves lie in the user's cache folder, where `etude tasks make` has put them, or are made again."""

import hashlib
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from environments.grading.guarded import Exam, Grade, grade, prepare_exam
from environments.harness.environment import HarnessEnvironment, HarnessTask
from environments.harness.hint_audit import make_secret
from environments.harness.jobs import WORKING, make_job
from environments.harness.task_set import HarnessTasks, Levels
from environments.harness.tools import openai, select_tools
from environments.monitor import Call
from environments.sandbox.cache import cache_folder
from environments.sandbox.open import open_sandbox, own_store
from environments.tasks.build import judges_of
from environments.tasks.check import exam_of
from environments.tasks.levels import Schedule
from environments.tasks.load import list_recipes, load_tasks, read_recipe
from environments.tasks.make import Task
from environments.tasks.package import Package
from kit.process import cores
from kit.settings import RunError
from recipe.packages.chat_format import make_chaining
from recipe.packages.own_reward import OwnRewardEnvironment, load_reward
from recipe.packages.settings import PackageSettings
from ref.chat_format import TemplateFormat
from ref.environment import ChatFormat
from ref.messages import Message

__all__ = [
    "REWARD",
    "LoadedPackage",
    "PackageTasks",
    "check_lengths",
    "load_packages",
    "make_schemas",
    "split_packages",
]

REWARD = "reward.py"
"""The user's function of rewards, in a run's folder data/."""
LOADING_SECONDS = 60.0
"""Seconds of processor time for the tests of a package whose tasks are made again."""


@dataclass(frozen=True)
class LoadedPackage:
    """A recipe with its package and tasks."""

    path: Path
    package: Package
    tasks: Mapping[str, Task]

    @property
    def name(self) -> str:
        return f"{self.package.name}-{self.package.version}"

    @property
    def project(self) -> str:
        """What its versions have in common, normalised as PEP 503 does; made-up packages have no versions."""
        is_generated = self.package.origin == "generated"
        return self.name if is_generated else re.sub(r"[-_.]+", "-", self.package.name).lower()


def load_packages(settings: PackageSettings, folder: Path, seconds: float = LOADING_SECONDS) -> list[LoadedPackage]:
    """The packages of the recipes in a folder, by name, and their tasks. Raises RunError."""
    packages = []
    for path in sorted(list_recipes([folder])):
        recipe = read_recipe(path)
        package, tasks = load_tasks(path, recipe, cores(), seconds, settings.sandbox)
        if package.digest != recipe["package"]["digest"]:
            raise RunError(
                f"{recipe['package']['spec']} is not what {path} was made of: its files have changed; restore them, or "
                f"make the tasks again and begin another run"
            )
        packages.append(LoadedPackage(path, package, tasks))
    return sorted(packages, key=lambda package: package.name)


def split_packages(
    settings: PackageSettings, packages: Sequence[LoadedPackage]
) -> tuple[list[LoadedPackage], list[LoadedPackage]]:
    """Packages to train on, and those that are held out: those that are named, else the packages generated:heldout:N if
    there are any, else a share. All versions of a package are on one side. Raises RunError where a name is none of a
    package, and where one side has no tasks."""
    known_names = {name for package in packages for name in (package.name, package.package.name)}
    if unknown_names := [name for name in settings.heldout if name not in known_names]:
        raise RunError(
            f"tasks.heldout names {unknown_names[0]}, and {settings.recipes} has no such package; it has "
            f"{', '.join(package.name for package in packages)}"
        )
    if settings.heldout:
        named = {*settings.heldout}
        heldout_projects = {package.project for package in packages if {package.name, package.package.name} & named}
    else:
        heldout_projects = {package.project for package in packages if package.name.startswith("generated-heldout.")}
    if not heldout_projects:
        projects = {package.project for package in packages}
        by_hash = sorted(projects, key=lambda project: hashlib.sha256(project.encode()).digest())
        heldout_projects = {*by_hash[: max(1, round(settings.heldout_share * len(projects)))]}
    training = [package for package in packages if package.project not in heldout_projects]
    heldout = [package for package in packages if package.project in heldout_projects]
    if not any(package.tasks for package in heldout):
        raise RunError(
            f"the packages that are held out have no tasks ({', '.join(package.name for package in heldout)}); name "
            f"others with tasks.heldout=…"
        )
    if not training or not any(package.tasks for package in training):
        raise RunError(
            f"{settings.recipes} has no package to train on beside those that are held out "
            f"({', '.join(package.name for package in heldout)}): tasks of two packages are needed at least; "
            f"etude tasks make generated:0 adds one that is made up"
        )
    return training, heldout


def make_schemas(settings: PackageSettings) -> list[dict]:
    """The JSON schemas of the tools."""
    return openai(select_tools(settings.tools), settings.strict)


def check_lengths(
    settings: PackageSettings, chat_format: TemplateFormat, prompts: Mapping[str, str], max_len: int
) -> None:
    """Raises RunError where the opening of a task leaves no room in a context for a turn. `prompts`: by task."""
    try:
        chaining = make_chaining(settings, chat_format, max_len)
    except ValueError as error:
        raise RunError(str(error)) from None
    lengths = {
        name: len(chat_format.encode_opening([Message("system", settings.system), Message("user", prompt)]))
        for name, prompt in prompts.items()
    }
    name = max(lengths, key=lambda name: lengths[name])
    limit = settings.summary_at or max_len
    # a context may begin with a summary and the word to go on (`ref/self_summary.py`)
    summary_length = chaining.longest_summary + len(chaining.resume) if settings.summary_at else 0
    if lengths[name] + summary_length + 16 > limit:
        setting = "tasks.summary_at" if settings.summary_at else "rl.max_len"
        raise RunError(
            f"the system message and prompt of {name} have {lengths[name]} tokens; contexts of {setting}={limit} leave "
            f"no room for an answer: use a larger one, or tasks.prompt=terse"
        )


class PackageTasks(HarnessTasks):
    """The task set of one process: streams "rl" and "heldout" of the packages in RUN/data/recipes. Graders and
    sandboxes are this process's own."""

    def __init__(self, settings: PackageSettings, root: Path, chat_format: ChatFormat, seed: int):
        """`root`: the run folder. Raises RunError."""
        training, heldout = split_packages(settings, load_packages(settings, root / "data" / "recipes"))
        self.settings, self.judges = settings, judges_of(settings.sandbox)
        self.own_reward = None if settings.reward is None else load_reward(root / "data" / REWARD)
        self.exams: dict[str, Exam] = {}
        self.lock = threading.Lock()
        self.package_of: dict[str, str] = {}
        """Task → name of its package."""
        self.bits: dict[str, float] = {}
        """Task → bits of difficulty, (5) of `ref/feature_deletion.py`."""
        super().__init__(
            {"rl": self._make_tasks(training), "heldout": self._make_tasks(heldout)},
            partial(open_sandbox, kind=settings.sandbox, limits=WORKING),
            own_store(cache_folder() / "store"),
            self.grade,
            chat_format,
            seed,
            settings.episode_seconds,
            settings.call_seconds,
        )
        self.tools: Sequence[str] = settings.tools
        self.is_slow = settings.threads

    def _make_tasks(self, packages: Iterable[LoadedPackage]) -> list[HarnessTask]:
        tasks, settings = [], self.settings
        for package in packages:
            for name, task in package.tasks.items():
                exam = exam_of(task, package.package)
                job = make_job(
                    task,
                    exam,
                    settings.prompt,
                    strict=settings.strict,
                    tools=settings.tools,
                    system=settings.system,
                    hides_times=True,
                )
                self.package_of[name], self.bits[name] = package.name, task.difficulty.bits
                secret = make_secret(task, package.package, exam)
                tasks.append(HarnessTask(job, exam, frozenset(task.visible), secret))
        return tasks

    def heldout_tasks(self, count: int) -> list[HarnessTask]:
        """The first held-out tasks, in the order of this seed; all of them if there are fewer."""
        return [self.task("heldout", number) for number in range(min(count, len(self.streams["heldout"])))]

    def curriculum(self) -> Levels | None:
        """The levels of the settings; None without."""
        if not self.settings.levels:
            return None
        trained = {task.key for task in self.streams["rl"]}
        bits = {name: value for name, value in self.bits.items() if name in trained}
        return Levels(Schedule(bits, self.settings.levels, self.settings.level_rollouts, self.seed), self)

    def environment(self, task: HarnessTask, number: int) -> HarnessEnvironment:
        """See `TaskSet`. A sandbox for its grading is opened ahead."""
        self.judges.expect()
        if self.own_reward is None:
            return super().environment(task, number)
        parts = self.fork, self.store, self.grader, self.seconds, self.call_seconds
        return OwnRewardEnvironment(self.own_reward, task, *parts)

    def grade(self, task: HarnessTask, tree: str, calls: Sequence[Call]) -> Grade:
        """The grade of a stored tree. The exam is prepared at a task's first grading: fresh inputs follow from the
        task's name, so all processes ask the same."""
        seconds, fresh = self.settings.grading_seconds, self.judges.fresh
        with self.lock:
            exam = self.exams.get(task.key)
        if exam is None:
            exam = prepare_exam(task.exam, task.key, fresh, seconds, self.judges, ask=self.settings.fresh_inputs)
            with self.lock:
                exam = self.exams.setdefault(task.key, exam)
        return grade(exam, self.store.tree(tree), fresh, calls, seconds, judges=self.judges)
