"""Suggestions for mistyped names, and for names of another kind than the command expects: a technique, a figure, a
command, a run's folder.

The error message names the command that takes such a name. `Commands` orders the commands of `etude --help` by panel.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from typer import BadParameter
from typer.core import TyperGroup

from etude import catalog
from kit.disk import read_json
from kit.settings import RunError

__all__ = ["PANELS", "Commands", "a_run", "read_technique", "lesson_number", "no_experiment", "no_technique", "what_is"]

PANELS = {
    "Start": ("play", "list", "glossary", "explore", "lesson", "challenge"),
    "Train": ("run", "eval", "plan", "data", "export-sft", "examples"),
    "Reproduce": ("figure", "claims", "results"),
    "Environments": ("tasks", "show"),
    "Develop": ("bench", "kernels"),
}
"""The groups of commands in `etude --help`, in order."""
MAY_BE_EMPTY = ("--name", "--model", "--who")
"""Options that accept an empty value, because their default is one."""
NON_TECHNIQUES = ("data", "eval base")
"""Names of runs that are no techniques: to resume one, its command needs more than the folder."""


def what_is(word: str) -> str:
    """Describes a technique or a figure, with the commands that run it; empty for any other word."""
    kinds = {"technique": ("run", catalog.find(word)), "figure": ("figure", catalog.find_experiment(word))}
    commands = {kind: f"etude {verb} {entry.name}" for kind, (verb, entry) in kinds.items() if entry is not None}
    return f"{word} is a {' and a '.join(commands)}: {', '.join(commands.values())}" if commands else ""


def read_technique(folder: Path) -> str:
    """The name of the run in a folder, such as `recipe` or `figure mtp`; empty if the folder holds no run."""
    try:
        technique = read_json(folder / "config.json")["technique"]
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    return technique if isinstance(technique, str) else ""


def describe_run_folder(word: str) -> str:
    """Describes a run's folder, with the commands that resume and show it; empty for any other word."""
    technique, folder = read_technique(Path(word)), shlex.quote(word)
    if not technique:
        return ""
    if technique in NON_TECHNIQUES:
        return f"{word} is a run of etude {technique}"
    name, full = technique.removesuffix(" full"), " --scale full" * technique.endswith(" full")
    resume_command = f"etude {name if ' ' in name else 'run ' + name}{full} --out {folder} --resume"
    play_hint = f"; to watch its agent: etude play {folder}" * (name == "recipe")
    rank_hint = ", with its --backend and --nproc" * bool(full)
    return f"{word} is a run of {technique}; to resume it: {resume_command}{rank_hint}{play_hint}"


def suggest_name(word: str, kind: str, commands: Iterable[str]) -> str:
    """A question with the closest name: one of the same `kind`, or of another kind with its command; empty if nothing
    is close."""
    descriptions = {f"the command etude {name}": name for name in commands}
    descriptions |= {f"the figure {entry.name}, etude figure {entry.name}": entry.name for entry in catalog.EXPERIMENTS}
    descriptions |= {f"the technique {entry.name}, etude run {entry.name}": entry.name for entry in catalog.TECHNIQUES}
    closest = difflib.get_close_matches(word, set(descriptions.values()), n=1)
    matches = [description for description, name in descriptions.items() if name in closest]
    same_kind = [description for description in matches if description.startswith(f"the {kind}")]
    return f"did you mean {closest[0] if same_kind else matches[0]}?" if matches else ""


def no_technique(word: str, commands: Iterable[str]) -> NoReturn:
    """Raises RunError for a word that is not a technique. `commands`: the names of all commands."""
    if entry := catalog.find_experiment(word):
        run_commands = [f"etude run {technique.name}" for technique in catalog.TECHNIQUES if technique.sim == entry.sim]
        hint = f"; to run the technique behind it: {', '.join(run_commands)}" if run_commands else ""
        raise RunError(f"{entry.name} is a figure: etude figure {entry.name}{hint}")
    raise_unknown_name(word, "technique", commands, [entry.name for entry in catalog.TECHNIQUES])


def no_experiment(word: str, commands: Iterable[str]) -> NoReturn:
    """Raises RunError for a word that is not an experiment."""
    if entry := catalog.find(word):
        figure_commands = [
            f"etude figure {experiment.name}" for experiment in catalog.EXPERIMENTS if experiment.sim == entry.sim
        ]
        hint = (
            f"to reproduce its figure: {', '.join(figure_commands)}"
            if figure_commands
            else "it has no figure of its own"
        )
        raise RunError(f"{entry.name} is a technique: etude run {entry.name}; {hint}")
    raise_unknown_name(word, "experiment", commands, [entry.name for entry in catalog.EXPERIMENTS])


def raise_unknown_name(word: str, kind: str, commands: Iterable[str], names: list[str]) -> NoReturn:
    """Raises RunError with a hint that depends on the word: a run's folder, a command, or a name close to it."""
    commands, lists = (
        list(commands),
        {"technique": "etude list shows the techniques", "experiment": "etude figure lists the experiments"},
    )
    if description := describe_run_folder(word):
        raise RunError(description)
    if word in commands:
        raise RunError(
            f"{word} is a command, etude {word}, and not {'an' if kind[0] in 'aeiou' else 'a'} {kind}; {lists[kind]}"
        )
    suggestion = suggest_name(word, "figure" if kind == "experiment" else kind, commands)
    if suggestion and suggestion not in [f"did you mean {name}?" for name in names]:
        raise RunError(f"unknown {kind} {word!r}; {suggestion} {lists[kind]}")
    raise RunError(
        f"unknown {kind} {word!r}; {suggestion + ' Choose from' if suggestion else 'choose from'}: {', '.join(names)}"
    )


def a_run(context: Any, value: Path | list[Path] | None) -> Path | list[Path] | None:
    """Returns the folders of runs unchanged. Raises RunError for the name of a technique or figure, for a run's name
    without its folder, and for the folder of a technique or figure if the command needs an agent of the recipe."""
    for path in [] if context.resilient_parsing else value if isinstance(value, list) else [value] if value else []:
        technique, claims = read_technique(path), context.info_name == "claims"
        kind = "finished experiment" if claims else "run of the recipe"
        usage = f"{context.command_path} takes the folder of a {kind}, such as {example_folder(path, claims)}"
        if not path.exists() and read_technique(Path("runs") / path).startswith("figure" if claims else "recipe"):
            raise RunError(f"{path} does not exist; did you mean {Path('runs') / path}?")
        if not path.exists() and (description := what_is(str(path))):
            raise RunError(f"{description}; {usage}")
        if not claims and technique and technique != "recipe" and not any((path / "checkpoints").glob("*/config.json")):
            raise RunError(f"{path} is a run of {technique}, and contains no agent; {usage}")
    return value


def example_folder(path: Path, claims: bool) -> Path:
    """An example of a folder that a command takes: a figure's for `claims`, a run of the recipe for the others."""
    entry = catalog.find_experiment(str(path)) or catalog.EXPERIMENTS[0]
    return Path("runs") / "figure" / entry.name if claims else Path("runs") / "small"


def lesson_number(word: str | int) -> int:
    """The number of a lesson, or that of a technique's lesson. Raises BadParameter."""
    entry = catalog.find(str(word))
    if entry is not None and entry.lesson is not None:
        return int(Path(entry.lesson).name.partition("_")[0])
    if not (str(word).isascii() and str(word).isdecimal() and len(str(word)) < 10):
        hint = f"; {what_is(str(word))}" if what_is(str(word)) else ""
        raise BadParameter(
            f"expected the number of a lesson or the name of a technique, got {word!r}{hint}; etude lesson lists them"
        )
    return int(word)


def reject_empty_arguments(words: list[str]) -> None:
    """Raises RunError for an empty argument, such as a shell passes for an unset variable: as a path it would mean the
    current folder."""
    for previous_word, word in zip(["", *words], words):
        option = word[:-1] if word.startswith("--") and word.endswith("=") else "" if word else previous_word
        if (not word or option) and option not in MAY_BE_EMPTY:
            position = f"the value of {option}" if option.startswith("--") else "an argument"
            raise RunError(f"{position} is empty; for the current folder, write a dot")


class Commands(TyperGroup):
    """The commands, ordered by panel. The name of a technique or figure in place of a command raises RunError, with the
    command that runs it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for panel, names in PANELS.items():
            for command in (self.commands[name] for name in names if name in self.commands):
                command.rich_help_panel = panel  # pyright: ignore[reportAttributeAccessIssue]

    def list_commands(self, ctx: Any) -> list[str]:
        ordered = [name for names in PANELS.values() for name in names if name in self.commands]
        return [*ordered, *(name for name in super().list_commands(ctx) if name not in ordered)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            reject_empty_arguments(args)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and not ctx.resilient_parsing and (description := what_is(args[0])):
            raise RunError(description)
        return super().resolve_command(ctx, args)
