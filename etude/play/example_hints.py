"""The committed faults of the committed agent, for the explorer where there is no run: python -m
etude.play.example_hints

The agent of `etude/play/example_agent.py` plays held-out tasks as `etude examples` lets a run's agent play them;
results/examples/hints.json has its first faults.
"""

import itertools
import json
from pathlib import Path

import torch

from etude.play.example_agent import FOLDER
from etude.play.play import agent_in
from kit.disk import atomic_write
from kit.settings import RunError
from recipe.small.agent import play
from recipe.small.data import task_stream
from recipe.small.demonstrations import context
from ref.engine.sampler import Sampler
from ref.network import load_hf
from sims.examples.hints import hinted_messages
from sims.examples.runs import Sizes

__all__ = ["write"]


def write(out: Path) -> Path:
    """Plays the committed agent and writes its faults to the file `out`, which it returns. Raises RunError or
    OSError."""
    agent, sizes = agent_in(FOLDER), Sizes()
    recipe, language = agent.recipe, agent.language
    tasks = list(itertools.islice(task_stream(recipe, "evaluation"), sizes.tasks))
    model = load_hf(agent.folder).to(getattr(torch, recipe.training.dtype))
    sampler = Sampler(model, getattr(torch, recipe.training.sampler_dtype))
    generator = torch.Generator().manual_seed(sizes.seed)
    r = recipe.rl
    episodes = play(
        sampler,
        language,
        tasks,
        sizes.samples,
        r.limits(context(language, recipe)),
        r.max_turns,
        generator,
        r.temperature,
    )
    faults = hinted_messages(language, tasks, episodes, r.temperature, sizes.seed)
    atomic_write(out, json.dumps(faults, indent=1, ensure_ascii=False) + "\n")
    return out


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        print(write(FOLDER.parent / "hints.json"))
    except (RunError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
