"""The small world: generated Python repositories, where a tiny coding agent learns to repair a function.

task = generate(random.Random(0), "train")     a repository with one missing body
session = Session(task)                        the agent's view of it: prompt, step, done, verify
documents(rng)                                 text for continued pretraining
demonstration(task, rng)                       a scripted agent's turns, for supervised fine-tuning
"""

from recipe.microrepo.corpus import NoiseConfig, demonstration, document, documents, mutate, transcript
from recipe.microrepo.environment import MicroRepo, Verdict
from recipe.microrepo.evaluator import EvaluationError
from recipe.microrepo.session import Session
from recipe.microrepo.task import Case, Module, Split, Task, WorldConfig, generate, held_out

__all__ = [
    "Case",
    "MicroRepo",
    "EvaluationError",
    "Module",
    "NoiseConfig",
    "Verdict",
    "Session",
    "Split",
    "Task",
    "WorldConfig",
    "demonstration",
    "document",
    "documents",
    "generate",
    "held_out",
    "mutate",
    "transcript",
]
