"""Settings of a run on packages: which tasks, which tools, and how long an episode may be."""

from dataclasses import dataclass
from typing import Literal

from environments.harness.demonstrations import STYLES, TOOLS_SHOWN
from environments.harness.tools import select_tools
from recipe.small.checks import check_ranges

__all__ = ["PackageSettings"]

SYSTEM = """You work in a folder with the source of a Python package, through tools. \
Write the code that is missing, run the tests, and call finish."""
"""Short, since a small model has a short context."""


@dataclass(frozen=True)
class PackageSettings:
    """Tasks of packages, in the sandboxes and with the grader of `environments/`. Without `recipes`, the run trains in
    the small world."""

    recipes: str | None = None
    """Recipe of tasks, or a folder of them, as `etude tasks make` writes them."""
    heldout: tuple[str, ...] = ()
    """Names of the packages that are evaluated on and never trained on, such as words; all versions of a package go
    with it. Empty: the packages generated:heldout:N, or without any a share of all, `heldout_share`."""
    heldout_share: float = 0.25
    """Share of the packages that are held out, one at least; which ones follows from a hash of their names."""
    prompt: Literal["specified", "terse"] = "specified"
    """What a task says: everything that the tests expect, or a sentence."""
    system: str = SYSTEM
    """The system message. Which tools there are is said by the chat template."""
    tools: tuple[str, ...] = TOOLS_SHOWN
    """Tools of the agent, finish among them; `etude tasks try --help` names all."""
    strict: bool = False
    """Whether a call that does not fit its schema is broken. Otherwise numbers that stand there as text are read, and
    arguments that do not exist are left out."""
    demonstrations: int = 0
    """Scripted episodes that SFT learns from, at most; 0: one of each style for each task of the training packages.
    Unused with `sft.conversations`."""
    styles: tuple[str, ...] = STYLES
    """Styles of the scripted episodes: direct, tests-first, repair."""
    turns: int = 12
    """Turns of an episode."""
    summary_at: int = 0
    """Tokens of a context at which the policy has to write a summary, with which a new context begins; 0: never, an
    episode has a single context of `rl.max_len` tokens."""
    summary_tokens: int = 256
    """Tokens of a summary, at most."""
    contexts: int = 4
    """Contexts of an episode, at most."""
    call_seconds: float = 60.0
    """Seconds that a call of a tool may take."""
    episode_seconds: float = 600.0
    """Seconds that all calls of an episode may take together."""
    grading_seconds: float = 60.0
    """Seconds of processor time for the tests of a task."""
    fresh_inputs: bool = True
    """Grade also by inputs that stand in no test."""
    levels: int = 0
    """Levels of difficulty in RL, the easiest first (`environments/tasks/levels.py`): the level rises where more than
    three quarters of its rollouts succeed, and falls where less than a quarter does. 0: tasks come in a fixed order."""
    level_rollouts: int = 64
    """Rollouts after which the level is decided on."""
    reward: str | None = None
    """Python file whose function reward(episode) returns further terms of the reward, numbers by name."""
    threads: bool = True
    """Whether tools run while the model writes other turns. False: one after the other, so a run that is repeated or
    resumed has the same bits."""
    max_failed_share: float = 0.2
    """Share of the rollouts of a step of RL, or of an evaluation, whose sandboxes may fail; where more do, the run
    stops, and is resumed."""
    engine: Literal["continuous", "lockstep"] = "continuous"
    """How rollouts are sampled. continuous: each goes on as soon as its tools have answered, and the next one begins as
    soon as a slot is free; lockstep: all share a position, and wait for the slowest."""
    slots: int = 32
    """Rollouts that a rank samples at once with engine=continuous, at most: their keys and values take memory."""
    sandbox: Literal["bubblewrap", "docker"] = "bubblewrap"
    """What sandboxes are made with."""
    min_valid_calls: float = 0.05
    """Share of the calls of the evaluation after SFT that must be valid; below it the run stops before RL, because no
    reward could be earned. 0: no minimum."""

    def __post_init__(self):
        least: dict[str, float] = dict.fromkeys(("turns", "summary_tokens", "contexts", "level_rollouts", "slots"), 1)
        least |= dict.fromkeys(
            ("demonstrations", "summary_at", "call_seconds", "episode_seconds", "grading_seconds", "levels"), 0
        )
        check_ranges(self, least=least, shares=("heldout_share", "max_failed_share", "min_valid_calls"))
        select_tools(self.tools)
        if unknown_styles := [style for style in self.styles if style not in STYLES]:
            raise ValueError(f"styles must be of {', '.join(STYLES)}; got {unknown_styles[0]}")
        if not self.styles:
            raise ValueError("styles must not be empty")
