"""The recipe in stages, as the explorer's front door draws it: what each does in one sentence, and in which part of the
recipe it stands.

Page, lesson, reference, twin and kernel of a technique are in `etude/catalog.py` alone. What the recipe needs beside
its techniques, such as data or SFT, brings its own paths here. A test holds that every technique of the catalogue is in
one stage, and that every path exists."""

from __future__ import annotations

from dataclasses import dataclass, replace

from etude.catalog import TECHNIQUES, Technique, find

__all__ = ["PARTS", "Part", "Stage", "files", "stage_of"]


@dataclass(frozen=True)
class Stage:
    """One box of the diagram."""

    name: str
    """Name of its technique, or its own where it is none."""
    title: str
    """What the box says."""
    says: str
    """What it does, in one sentence."""
    after: bool = False
    """Whether it begins with what the stage before it left."""
    own: Technique | None = None
    """Its paths, where the catalogue has none."""
    page: str | None = None
    """Name of its page, where the catalogue names none."""

    @property
    def paths(self) -> Technique:
        """Its page and files, as a row of the catalogue."""
        row = self.own or find(self.name)
        if row is None:
            raise ValueError(f"stage {self.name} is no technique of the catalogue, and has no paths of its own")
        return replace(row, page=row.page or self.page)


@dataclass(frozen=True)
class Part:
    """Stages that belong together."""

    name: str
    """Its name."""
    says: str
    """What it is, in one sentence."""
    section: str
    """Section of the explorer's navigation in which its pages stand."""
    stages: tuple[Stage, ...]
    """Its stages, in order."""
    after: bool = False
    """Whether it begins with what the parts above it left."""


def make_paths(name: str, ref: str | None, lesson: str, scaled: str | None = None, sim: str | None = None) -> Technique:
    """Paths of a stage that is no technique."""
    return Technique(name=name, title="", source="", ref=ref, scaled=scaled, sim=sim, lesson=lesson)


PARTS: tuple[Part, ...] = (
    Part(
        "All of it",
        "One command runs every stage on two cores, in a world that is small enough.",
        "Training",
        (
            Stage(
                "recipe",
                "The whole recipe",
                "All stages in one run: from files of code to a trained agent, with a report of what changed.",
            ),
        ),
    ),
    Part(
        "Before RL",
        "A base model reads code, learns to draft, and sees an agent at work. Each stage begins with "
        "the weights that the one before it left.",
        "Training",
        (
            Stage(
                "data",
                "Base model and data",
                "An open base model, or random weights, and files of code: cleaned, without "
                "duplicates, and with a codebase held out.",
                own=make_paths("data", "sims/recipe/data.py", "lessons/01_cpt.py", scaled="scaled/data/prepare.py"),
            ),
            Stage(
                "cpt",
                "Continued pretraining",
                "The model reads code, most of it in short contexts and the rest in long ones.",
                after=True,
            ),
            Stage(
                "mtp",
                "Multi-token prediction",
                "Small layers draft several tokens, and the model keeps those that it would have written itself.",
                after=True,
            ),
            Stage(
                "sft",
                "Fine-tuning on demonstrations",
                "The model learns from an agent at work, and only from the tokens that the agent wrote.",
                after=True,
                own=make_paths("sft", "ref/sft.py", "lessons/00_recipe.py", scaled="scaled/sft.py"),
            ),
            Stage(
                "muon",
                "Muon",
                "The optimiser of the matrices: every direction of a gradient gets a step of the same size.",
            ),
        ),
    ),
    Part(
        "Tasks",
        "RL needs tasks with a verdict that no person gives, and a place where an agent may do what it likes.",
        "Agent and environments",
        (
            Stage(
                "feature-deletion",
                "Feature deletion",
                "Code is taken out of a package; the tests that then fail are the task's reward.",
            ),
            Stage(
                "environments",
                "Environments and grader",
                "The agent works on real files in a sandbox, and a grader that believes nobody runs hidden tests.",
            ),
        ),
        after=True,
    ),
    Part(
        "Reinforcement learning",
        "The agent tries each task several times. Rewards become advantages, and advantages a gradient.",
        "Training",
        (
            Stage(
                "step",
                "A step of RL",
                "From finished rollouts to a gradient: it calls the techniques below in the order in "
                "which a step needs them.",
                own=make_paths("step", "ref/rl.py", "lessons/04_dr_grpo.py", scaled="scaled/rl.py"),
            ),
            Stage(
                "dr-grpo",
                "Dr. GRPO",
                "A rollout's advantage is its reward less its group's mean, divided by neither length nor deviation.",
            ),
            Stage(
                "kl",
                "KL",
                "How far the policy has moved from its reference, and which estimate of it may be differentiated.",
            ),
            Stage(
                "length-penalty",
                "Length penalty",
                "Effort has a price that bends: easy tasks are hurried, and hard ones keep room to think.",
            ),
            Stage(
                "behaviour",
                "Prices of habits",
                "Broken calls, to-do items left open and untrue messages cost something, whatever the tests say.",
            ),
            Stage(
                "self-summary",
                "Self-summary",
                "A rollout that outgrows its context goes on after a summary that the policy wrote itself.",
            ),
            Stage(
                "textual-feedback",
                "Textual feedback",
                "A hint stands where a rollout went wrong, and the policy that has read it teaches the "
                "one that has not.",
            ),
        ),
        after=True,
    ),
    Part(
        "Systems",
        "What lets the same step run on many machines, in few bits, and without waiting.",
        "Systems",
        (
            Stage(
                "async-rl",
                "Asynchronous RL",
                "Sampling and training go on at the same time, with a bound on how old a sample may be.",
            ),
            Stage(
                "router-replay",
                "Router replay",
                "The trainer takes the experts that the sampler chose, since rounding would choose others.",
            ),
            Stage(
                "weight-sync",
                "Weight sync",
                "After a step only what has changed in the weights is sent, and every engine rebuilds the same bits.",
            ),
            Stage(
                "packing",
                "Packing",
                "Sequences are dealt to ranks so that none waits for another, and laid in rows in "
                "which none sees another.",
            ),
            Stage(
                "quant",
                "Low precision",
                "Experts compute in 4 and 8 bits, with scales that let no token see a later one.",
            ),
            Stage(
                "mirror",
                "The mirror",
                "The same code on many ranks: a loss and a gradient that do not depend on who computes which part.",
                own=make_paths("mirror", None, "lessons/11_mirror.py", scaled="scaled/runtime/mesh.py"),
            ),
        ),
    ),
    Part(
        "Afterwards",
        "Is it better, did anything else change, and what do users say?",
        "Agent and environments",
        (
            Stage(
                "evaluation",
                "Evaluation",
                "Tasks and a codebase that no stage has seen, before RL and after it, with intervals.",
                own=make_paths("evaluation", None, "lessons/00_recipe.py", sim="sims/recipe/evaluation.py"),
                page="recipe",
            ),
            Stage(
                "real-time-rl",
                "Real-time RL",
                "The policy is served, what users do becomes the next reward, and what was learned is "
                "looked at before it is shipped.",
                after=True,
                own=make_paths("real-time-rl", None, "lessons/18_monitor.py", sim="sims/real_time_rl/loop.py"),
                page="real-time-rl",
            ),
            Stage(
                "monitor",
                "Monitor",
                "What rollouts do, step by step, and an alarm that means something however often one looks.",
                page="recipe",
            ),
        ),
        after=True,
    ),
)


def stage_of(name: str | None) -> tuple[Part, Stage] | None:
    """The stage of a technique, or of that name, and the part in which it stands."""
    return next(((part, stage) for part in PARTS for stage in part.stages if stage.name == name), None)


def files() -> tuple[str, ...]:
    """All source files that the diagram names, sorted."""
    rows = [*TECHNIQUES, *(stage.paths for part in PARTS for stage in part.stages)]
    return tuple(sorted({path for row in rows for path in (row.ref, row.scaled, row.kernel, row.sim) if path}))
