"""The stages of the recipe for the explorer's start page: what each one does in one sentence, and its part of the
recipe.

Page, lesson, reference, distributed version and kernel of a technique are in `etude/catalog.py` only. Stages that are
no technique, such as data and SFT, have their paths here. A test checks that every technique of the catalogue is in one
stage, and that every path exists.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from etude.catalog import TECHNIQUES, Technique, find

__all__ = ["PARTS", "Part", "Stage", "files", "stage_of"]


@dataclass(frozen=True)
class Stage:
    """One box of the diagram."""

    name: str
    """Name of its technique, or its own name if it is none."""
    title: str
    """The text of the box."""
    says: str
    """What it does, in one sentence."""
    after: bool = False
    """Whether it starts from the result of the previous stage."""
    own: Technique | None = None
    """Its paths, if the catalogue has none."""
    page: str | None = None
    """Name of its page, if the catalogue names none."""

    @property
    def paths(self) -> Technique:
        """Its page and files, as a row of the catalogue."""
        row = self.own or find(self.name)
        if row is None:
            raise ValueError(f"stage {self.name} is not a technique of the catalogue, and has no paths of its own")
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
    """Whether it starts from the result of the parts above it."""


def make_paths(name: str, ref: str | None, lesson: str, scaled: str | None = None, sim: str | None = None) -> Technique:
    """Paths of a stage that is no technique."""
    return Technique(name=name, title="", source="", ref=ref, scaled=scaled, sim=sim, lesson=lesson)


PARTS: tuple[Part, ...] = (
    Part(
        "All of it",
        "One command runs every stage on two cores, at toy scale.",
        "Training",
        (
            Stage(
                "recipe",
                "The whole recipe",
                "All stages in one run: from files of code to a trained agent, with a report.",
            ),
        ),
    ),
    Part(
        "Before RL",
        "Training on code, draft layers, and fine-tuning on demonstrations. Each stage starts from the "
        "weights of the previous one.",
        "Training",
        (
            Stage(
                "data",
                "Base model and data",
                "An open base model, or random weights, and files of code: cleaned, without "
                "duplicates, and with a codebase held out.",
                own=make_paths("data", "recipe/small/data.py", "lessons/01_cpt.py", scaled="scaled/data/prepare.py"),
            ),
            Stage(
                "cpt",
                "Continued pretraining",
                "The model trains on code, first in short contexts, then in long ones.",
                after=True,
            ),
            Stage(
                "mtp",
                "Multi-token prediction",
                "Small layers draft several tokens, and the model keeps the drafts that it would have "
                "generated itself.",
                after=True,
            ),
            Stage(
                "sft",
                "Fine-tuning on demonstrations",
                "The model learns from demonstrations; the loss covers only the tokens that the agent wrote.",
                after=True,
                own=make_paths("sft", "ref/sft.py", "lessons/00_recipe.py", scaled="scaled/sft.py"),
            ),
            Stage(
                "muon",
                "Muon",
                "The optimiser of the matrices: orthogonalised momentum, so every direction gets a "
                "step of the same size.",
            ),
        ),
    ),
    Part(
        "Tasks",
        "RL needs tasks that tests can grade, and sandboxes in which an agent can run any code.",
        "Agent and environments",
        (
            Stage(
                "feature-deletion",
                "Feature deletion",
                "Code is deleted from a package; the tests that then fail are the task's reward.",
            ),
            Stage(
                "environments",
                "Environments and grader",
                "The agent works on real files in a sandbox, and a guarded grader runs hidden tests.",
            ),
        ),
        after=True,
    ),
    Part(
        "Reinforcement learning",
        "The policy samples several rollouts per task. Their rewards give advantages, and advantages the gradient.",
        "Training",
        (
            Stage(
                "step",
                "A step of RL",
                "From finished rollouts to a gradient, with the techniques below in the order in which "
                "a step calls them.",
                own=make_paths("step", "ref/rl.py", "lessons/04_dr_grpo.py", scaled="scaled/rl.py"),
            ),
            Stage(
                "dr-grpo",
                "Dr. GRPO",
                "A rollout's advantage is its reward minus its group's mean, divided by neither length nor deviation.",
            ),
            Stage(
                "kl",
                "KL",
                "How far the policy has moved from its reference, and which estimator of it to differentiate.",
            ),
            Stage(
                "length-penalty",
                "Length penalty",
                "A concave penalty on effort: rollouts on easy tasks get shorter, and hard tasks keep room.",
            ),
            Stage(
                "behaviour",
                "Behaviour penalties",
                "Broken calls, open to-do items and untrue messages lower the reward, whatever the tests say.",
            ),
            Stage(
                "self-summary",
                "Self-summary",
                "A rollout that exceeds its context continues after a summary that the policy wrote itself.",
            ),
            Stage(
                "textual-feedback",
                "Textual feedback",
                "A hint is added where a rollout went wrong, and the policy with the hint teaches the "
                "policy without it.",
            ),
        ),
        after=True,
    ),
    Part(
        "Systems",
        "The same step on many machines, in few bits, and without waiting.",
        "Systems",
        (
            Stage(
                "async-rl",
                "Asynchronous RL",
                "Sampling and training run at the same time, with a bound on the age of a sample.",
            ),
            Stage(
                "router-replay",
                "Router replay",
                "The trainer uses the experts that the sampler chose, because rounding could change the choice.",
            ),
            Stage(
                "weight-sync",
                "Weight sync",
                "After a step only the changed weights are sent, and every engine rebuilds the same bits.",
            ),
            Stage(
                "packing",
                "Packing",
                "Sequences are balanced over ranks by cost, and packed into rows in which no sequence "
                "attends to another.",
            ),
            Stage("quant", "Low precision", "Experts compute in 4 and 8 bits, with scales that leak no later token."),
            Stage(
                "mirror",
                "The mirror",
                "The same code on many ranks: loss and gradient do not depend on which rank computes which part.",
                own=make_paths("mirror", None, "lessons/11_mirror.py", scaled="scaled/runtime/mesh.py"),
            ),
        ),
    ),
    Part(
        "Afterwards",
        "Evaluation on held-out tasks, feedback of users, and monitoring.",
        "Agent and environments",
        (
            Stage(
                "evaluation",
                "Evaluation",
                "Held-out tasks and a held-out codebase, before and after RL, with intervals.",
                own=make_paths("evaluation", None, "lessons/00_recipe.py", sim="recipe/small/evaluation.py"),
                page="recipe",
            ),
            Stage(
                "real-time-rl",
                "Real-time RL",
                "The policy is served, users' reactions become the next reward, and a new policy is "
                "evaluated before it is shipped.",
                after=True,
                own=make_paths("real-time-rl", None, "lessons/18_monitor.py", sim="sims/real_time_rl/loop.py"),
                page="real-time-rl",
            ),
            Stage(
                "monitor",
                "Monitor",
                "Statistics of the rollouts at every step, with an alarm whose error rate is bounded.",
                page="recipe",
            ),
        ),
        after=True,
    ),
)


def stage_of(name: str | None) -> tuple[Part, Stage] | None:
    """The stage of that name, which may be a technique's, and its part."""
    return next(((part, stage) for part in PARTS for stage in part.stages if stage.name == name), None)


def files() -> tuple[str, ...]:
    """All source files in the diagram, sorted."""
    rows = [*TECHNIQUES, *(stage.paths for part in PARTS for stage in part.stages)]
    return tuple(sorted({path for row in rows for path in (row.ref, row.scaled, row.kernel, row.sim) if path}))
