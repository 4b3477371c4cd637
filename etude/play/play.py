"""`etude play`: an agent, or the reader, repairs a function of the small world, to be watched.

Agents come from a run, from a checkpoint, or, where none is named, from the clone (`etude/play/example_agent.py`). They
are sampled as the recipe samples them in its evaluation: weights in the training's dtype, the sampler in its own,
contexts joined by summaries.
"""

from __future__ import annotations

import itertools
import json
import secrets
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import TextIO

import torch
from rich.console import Console

from etude.play import difference
from etude.play.example_agent import BEFORE, FOLDER, RECORD
from etude.play.rollout import Piece, RolloutView, of_episode, of_session
from etude.play.terminal import LABEL, outcome, render_piece, show
from kit.disk import read_json
from kit.settings import RunError, fill
from recipe.full.settings import FullRecipe
from recipe.microrepo import Session, Task, generate
from recipe.small.agent import Language, play
from recipe.small.data import task_stream
from recipe.small.demonstrations import context
from recipe.small.settings import Recipe
from ref import cpt
from ref.engine.sampler import Sampler
from ref.mtp import MTP
from ref.network import Transformer
from ref.rollout import Rollout

__all__ = ["Agent", "agent_in", "episode_of", "find_checkpoints", "listen", "play_one", "task_of", "turns", "watch"]

NO_CHECKPOINTS = "none"
CALL_HELP = (
    "read FILE, write FILE and the body's lines with four spaces in front, test, done; an empty line ends your turn"
)


@dataclass(frozen=True)
class Agent:
    """A checkpoint with what is needed to play it."""

    folder: Path
    recipe: Recipe
    language: Language

    @property
    def name(self) -> str:
        """What it is called on the terminal."""
        return (
            str(self.folder.relative_to(FOLDER.parents[2]))
            if self.folder in (FOLDER, FOLDER / BEFORE)
            else str(self.folder)
        )

    def network(self) -> Transformer:
        """Its network as the recipe plays it. Raises RunError for a checkpoint stored as a difference from another than
        the one above it."""
        return difference.network(self.folder, self.recipe.mtp.layers).to(getattr(torch, self.recipe.training.dtype))

    @cached_property
    def sampler(self) -> Sampler:
        """What plays it, made once: a rollout changes nothing in it. Raises as `network`."""
        return Sampler(self.network(), getattr(torch, self.recipe.training.sampler_dtype))

    def drafts(self) -> MTP | None:
        """Its draft layers, rounded alike; None where it has none. Raises RunError as `network`, and for layers of
        another shape."""
        layers = difference.drafts(self.folder, self.recipe.mtp.layers)
        return None if layers is None else layers.to(getattr(torch, self.recipe.training.dtype))


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder holds a network."""
    return (folder / "config.json").is_file() and (
        difference.is_stored(folder) or any(folder.glob("model*.safetensors*"))
    )


def find_checkpoints(run_or_checkpoint: Path | None, before: str | None) -> list[Path]:
    """The folders of the checkpoints to play, the earlier one first. Raises RunError."""
    if run_or_checkpoint is None and not is_checkpoint(FOLDER):
        raise RunError(
            "the bundled checkpoint is missing; name a run or a checkpoint, or work in a clone of the repository"
        )
    if run_or_checkpoint is None:
        final = FOLDER
    elif (run_or_checkpoint / "checkpoints").is_dir():
        final = run_or_checkpoint / "checkpoints" / "final"
        if not is_checkpoint(final):
            raise RunError(
                f"{run_or_checkpoint} has no checkpoint final yet; it has "
                f"{list_checkpoints(run_or_checkpoint / 'checkpoints')}: name one of these folders"
            )
    elif is_checkpoint(run_or_checkpoint):
        final = run_or_checkpoint
    else:
        raise RunError(
            f"{run_or_checkpoint} is neither a run nor a checkpoint; make a run with: etude run recipe "
            f"--scale small --out FOLDER"
        )
    if before is None:
        return [final]
    # what the example agent was before lies in its folder
    checkpoint_folder = final.parent if final.parent.name == "checkpoints" else final
    if "/" not in before and is_checkpoint(checkpoint_folder / before):
        return [checkpoint_folder / before, final]
    if is_checkpoint(Path(before)):
        return [Path(before), final]
    advice = (
        "; name a run, whose checkpoint it is"
        if checkpoint_folder == final and list_checkpoints(final) == NO_CHECKPOINTS
        else f"; there are {list_checkpoints(checkpoint_folder)}"
    )
    raise RunError(f"--before expects a checkpoint of the same run or the folder of one, got {before}{advice}")


def list_checkpoints(folder: Path) -> str:
    """The checkpoints in a folder, in a sentence."""
    return ", ".join(sorted(path.name for path in folder.iterdir() if is_checkpoint(path))) or NO_CHECKPOINTS


def load_recipe_settings(folder: Path) -> Recipe:
    """The settings under which a checkpoint was trained: beside it, or in its run; else the recipe's own. Raises
    RunError."""
    kinds = {"recipe": Recipe, "recipe full": FullRecipe}
    run = folder.resolve().parent.parent / "config.json"
    record_path = (folder.parent if difference.is_stored(folder) else folder) / RECORD
    path = record_path if record_path.is_file() else run
    if not path.is_file() or path == run and folder.resolve().parent.name != "checkpoints":
        return Recipe()
    try:
        record = read_json(path)
        technique, config = record.get("technique", "recipe"), record["config"]
    except (ValueError, KeyError, AttributeError) as error:
        raise RunError(f"{path} contains no settings of a run ({error})") from None
    if technique not in kinds:
        return Recipe()
    try:
        settings = fill(kinds[technique], config)
    except RunError as error:
        raise RunError(f"{path}: {error}") from None
    return settings.small if isinstance(settings, FullRecipe) else settings


def agent_in(folder: Path) -> Agent:
    """The agent of a checkpoint; its weights are read when it plays. Raises RunError for one that has learned no
    turns."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise RunError(f"{folder} has no tokenizer.json, which an agent needs")
    try:
        language = Language(cpt.load_tokenizer(path))
    except ValueError as error:
        raise RunError(str(error)) from None
    if None in (language.env, language.agent, language.end):
        raise RunError(
            f"{path} has no tokens {' and '.join(language.speakers)}, which begin the turns of environment and agent"
        )
    return Agent(folder, load_recipe_settings(folder), language)


def task_of(recipe: Recipe, number: int, new: int | None) -> Task:
    """A held-out task of the recipe's evaluation by its number, or a new one from a seed."""
    if new is not None:
        return generate(Random(f"{new}-play"), "heldout", config=recipe.world)
    return next(itertools.islice(iter(task_stream(recipe, "evaluation")), number, None))


def episode_of(agent: Agent, task: Task, temperature: float, seed: int) -> tuple[Rollout, Transformer]:
    """An agent's rollout and the network that sampled it; temperature 0 is greedy. Raises RunError for a network that
    gives no distribution or no room for the task."""
    recipe = agent.recipe
    generator = torch.Generator().manual_seed(seed) if temperature else None
    limits = recipe.rl.limits(context(agent.language, recipe))
    try:
        (episode,) = play(agent.sampler, agent.language, [task], 1, limits, recipe.rl.max_turns, generator, temperature)
    except ValueError as error:
        raise RunError(f"{agent.name} cannot be sampled: {error}") from None
    return episode, agent.sampler.model


def play_one(agent: Agent, task: Task, temperature: float, seed: int) -> RolloutView:
    """The same rollout as a reader sees it. Raises RunError as `episode_of`."""
    return of_episode(agent.name, episode_of(agent, task, temperature, seed)[0], agent.language)


def turns(lines: Iterable[str]) -> Iterator[str]:
    """A reader's turns: an empty line ends one, and so does the end. Empty lines before a turn are none."""
    turn: list[str] = []
    for text in (line.rstrip("\r\n") for line in lines):
        if text.strip():
            turn.append(text)
        elif turn:
            yield "\n".join(turn)
            turn = []
    if turn:
        yield "\n".join(turn)


def listen(agent: Agent, task: Task, input_stream: TextIO, console: Console) -> RolloutView:
    """The reader plays `task` with lines of `input_stream`, and hears each answer at once. What was typed on a terminal
    is not printed again."""
    session, pieces, own_tokens, is_terminal = (
        Session(task, agent.recipe.rl.max_turns),
        [Piece("environment", task.prompt)],
        0,
        input_stream.isatty(),
    )

    def print_pieces(*new_pieces: Piece) -> None:
        for text in (text for piece in new_pieces for text in render_piece(piece)):
            console.print(text, soft_wrap=True, highlight=False)

    def read_input_lines() -> Iterator[str]:
        while True:
            if is_terminal:
                console.print(" " * LABEL, end="")
            if not (text := input_stream.readline()):
                return
            yield text

    print_pieces(Piece("context", CALL_HELP), *pieces)
    for turn in turns(read_input_lines()):
        answer = session.step(turn)
        turn_pieces = [Piece("agent", turn), *([Piece("environment", answer)] if answer else [])]
        pieces += turn_pieces
        own_tokens += len(agent.language.encode(turn)) + 1
        print_pieces(*(turn_pieces[1:] if is_terminal else turn_pieces))
        if session.done:
            break
    rollout = of_session("you", session, tuple(pieces), own_tokens)
    for text in outcome(rollout):
        console.print(text, soft_wrap=True, highlight=False)
    return rollout


def watch(
    run_or_checkpoint: Path | None,
    number: int | None,
    new: bool,
    before: str | None,
    temperature: float | None,
    seed: int | None,
    me: bool,
    as_json: bool,
) -> None:
    """Plays and shows. `temperature`: None is the recipe's. Raises RunError."""
    if me and (before is not None or temperature is not None):
        raise RunError("--me does not sample an agent; leave out --before, --greedy and --temperature")
    if new and number is not None:
        raise RunError("--task chooses a task, and --new generates one; leave one of them out")
    agents = [agent_in(folder) for folder in find_checkpoints(run_or_checkpoint, before)]
    agent = agents[-1]
    new = number is None
    if seed is None:
        seed = secrets.randbelow(10**6) if new else 0
    task, heat = (
        task_of(agent.recipe, number or 0, seed if new else None),
        agent.recipe.rl.temperature if temperature is None else temperature,
    )
    sampling_facts = {"task": number, "new": new, "seed": seed, "temperature": None if me else heat}
    task_name = f"new task of seed {seed}" if new else f"held-out task {number}"
    helpers = {0: "no helper", 1: "1 helper"}.get(task.depth, f"{task.depth} helpers")
    sampling_note = "" if me else ", greedy" if not heat else f", temperature {heat:g}, seed {seed}"
    console = Console(file=sys.stderr) if as_json else Console()
    if me or not as_json:
        console.print(f"{task_name}, {helpers} to read{sampling_note}", highlight=False, soft_wrap=True)
    if me and (reconfigure := getattr(sys.stdin, "reconfigure", None)) is not None:
        reconfigure(errors="replace")  # bytes that are no text are a wrong call, not the end
    rollouts = (
        [listen(agent, task, sys.stdin, console)] if me else [play_one(player, task, heat, seed) for player in agents]
    )
    if as_json:
        for rollout in rollouts:
            print(json.dumps({**sampling_facts, **rollout.as_json()}, ensure_ascii=False))
    elif not me:
        show(rollouts, console)
