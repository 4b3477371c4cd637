"""What a run on packages prepares before its ranks start.

    tasks   recipes are copied into RUN/data/recipes, their tasks made, the chat format chosen; scripted episodes on the
            training packages are recorded in RUN/data/demonstrations.jsonl; a reward of the user's own is copied into
            RUN/data/reward.py
    data    the conversations, or those episodes, packed in rows (`recipe/small/conversations.py`)

The tokenizer's files, with the chat template of the run, lie in RUN/data/tokenizer, and in RUN/data, from where they go
with every checkpoint."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from environments.harness.demonstration_file import Packages, record_demonstrations
from environments.tasks.load import list_recipes
from kit.disk import read_json, read_lines
from kit.process import cores
from kit.runs import Run
from kit.settings import RunError
from recipe.packages.chat_format import choose_template, load_chat_format, write_default_template
from recipe.packages.settings import PackageSettings
from recipe.packages.tasks import REWARD, check_lengths, load_packages, make_schemas, split_packages
from recipe.small.agent import Language
from recipe.small.chat_template import template_of
from recipe.small.conversations import ROWS, pack_conversations
from ref.cpt import load_tokenizer
from ref.network import Config, release

__all__ = ["add_empty_rows", "conversations_of", "make_card", "pack_rows", "prepare_tasks", "record_scripted"]

DEMONSTRATIONS = "demonstrations.jsonl"
DESCRIPTIONS = {
    "sft": ("sft", "A coding agent, fine-tuned on conversations about tasks of Python packages."),
    "final": ("rl", "A coding agent, after reinforcement learning ({algorithm}) on tasks of Python packages."),
}
"""Checkpoint → the stage that writes it, and its description."""
LABELS = {"loss": "loss in the last step", "success": "success, tasks of the last step", "reward": "reward there"}


def record_scripted(
    path: Path,
    packages: Packages,
    settings: PackageSettings,
    limit: int | None = None,
    progress: Callable[[int], None] = lambda count: None,
) -> None:
    """Writes scripted episodes as SFT of a run reads them (`record_demonstrations`). Raises RunError where no sandbox
    can be opened."""
    record_demonstrations(
        path,
        packages,
        settings.styles,
        settings.prompt,
        cores(),
        settings.sandbox,
        tools=settings.tools,
        system=settings.system,
        strict=settings.strict,
        hides_times=True,
        limit=limit,
        progress=progress,
    )


def prepare_tasks(
    run: Run, settings: PackageSettings, checkpoint: Path, conversations: str | None, max_len: int
) -> None:
    """The stage `tasks`. `conversations`: a file of the user's, in place of scripted episodes. Raises RunError."""
    stage = run.stage("tasks", total=0, unit="episodes")
    if stage.finished:
        return
    stage.restore()
    assert settings.recipes is not None
    folder = run.path("data", "recipes", "x").parent
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in list_recipes([Path(settings.recipes)]):
        shutil.copyfile(path, folder / path.name)
    packages = load_packages(settings, folder)
    training, heldout = split_packages(settings, packages)
    groups = {"training": training, "held-out": heldout}
    counts = {name: sum(len(package.tasks) for package in group) for name, group in groups.items()}
    print(
        f"tasks: {counts['training']} of {len(training)} packages, and {counts['held-out']} held out, of "
        f"{', '.join(package.name for package in heldout)}",
        flush=True,
    )
    paths = [*copy_tokenizer(run, settings, checkpoint), *sorted(folder.iterdir())]
    if settings.reward is not None:
        paths.append(run.path("data", REWARD))
        shutil.copyfile(settings.reward, paths[-1])
    chat_format = load_chat_format(run.root / "data" / "tokenizer", make_schemas(settings))
    all_tasks = [task for package in packages for task in package.tasks.values()]
    prompts = {task.id: task.specified if settings.prompt == "specified" else task.terse for task in all_tasks}
    check_lengths(settings, chat_format, prompts, max_len)
    if settings.levels > counts["training"]:
        raise RunError(
            f"tasks.levels={settings.levels} must be at most the number of tasks to train on, {counts['training']}"
        )
    demonstration_counts: dict[str, int] = {}
    (run.root / "stages" / "data.json").unlink(missing_ok=True)  # rows are packed of what is trained on now
    if conversations is None:
        path = run.path("data", DEMONSTRATIONS)
        training_tasks = {name for package in training for name in package.tasks}
        if not {row.get("task") for row in (read_lines(path) if path.exists() else [])} <= training_tasks:
            path.unlink()  # the folder of recipes has changed since an interruption
        stage.total = settings.demonstrations or len(settings.styles) * counts["training"]
        done = 0

        def progress(count: int) -> None:
            nonlocal done
            done += count
            stage.progress(min(done, stage.total))

        packages_of_tasks = [(package.package, package.tasks) for package in training]
        record_scripted(path, packages_of_tasks, settings, settings.demonstrations or None, progress)
        for row in read_lines(path):
            demonstration_counts[row["style"]] = demonstration_counts.get(row["style"], 0) + 1
        if not demonstration_counts:
            raise RunError(
                "no scripted episode solves a task of the training packages; give conversations with "
                "--set sft.conversations=FILE.jsonl"
            )
        paths.append(path)
    stage.finish(
        {
            "training_packages": [package.name for package in training],
            "heldout_packages": [package.name for package in heldout],
            "training_tasks": counts["training"],
            "heldout_tasks": counts["held-out"],
            "demonstrations": demonstration_counts,
            "chat_format": chat_format.family,
        },
        paths,
    )


def copy_tokenizer(run: Run, settings: PackageSettings, checkpoint: Path) -> list[Path]:
    """Copies the tokenizer's files into RUN/data/tokenizer, with the default chat template where the checkpoint's own
    cannot be used, and says so. Where it can, the file holds what is used with tools, which several files may have
    told."""
    template, reason = choose_template(checkpoint, make_schemas(settings))
    folder, paths = run.path("data", "tokenizer", "x").parent, []
    for name in release.TOKENIZER_FILES:
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, folder / name)
            paths.append(folder / name)
    if not reason:
        path = folder / "chat_template.jinja"
        path.write_text((template.with_tools or template).source, encoding="utf-8")
        return [*dict.fromkeys((*paths, path))]
    print(f"chat format: the default one, since the checkpoint's template cannot be used: {reason}", flush=True)
    stop_id = load_tokenizer(folder / "tokenizer.json").token_to_id("<|im_end|>")
    assert stop_id is not None  # `choose_template` has looked
    return [*dict.fromkeys((*paths, *write_default_template(folder, stop_id)))]


def conversations_of(run_root: Path, conversations: str | None) -> Path:
    """The file that SFT learns from: the user's, or the scripted episodes."""
    return Path(conversations) if conversations is not None else run_root / "data" / DEMONSTRATIONS


def pack_rows(run: Run, conversations: str | None, length: int) -> None:
    """The stage `data` of a run without pretraining: packs conversations in rows of `length` tokens."""
    stage = run.stage("data", total=1, unit="steps")
    if stage.finished:
        return
    stage.restore()
    folder, paths = run.root / "data" / "tokenizer", []
    for path in sorted(folder.iterdir()):
        copy = run.path("data", path.name)
        shutil.copyfile(path, copy)
        paths.append(copy)
    language = Language(load_tokenizer(folder / "tokenizer.json"))
    (ids, doc, weight), counts = pack_conversations(
        conversations_of(run.root, conversations),
        template_of(run.root / "data", language),
        language,
        length,
        lambda done, total: stage.progress(0, conversations=done, of=total),
    )
    paths.append(run.path("data", ROWS))
    np.savez(paths[-1], ids=ids, doc=doc, weight=weight)
    stage.log(1, **{name: value for name, value in counts.items() if isinstance(value, int)})
    stage.finish({"vocab_size": language.tokenizer.get_vocab_size(), "conversations": counts}, paths)


def add_empty_rows(
    rows: tuple[np.ndarray, np.ndarray, np.ndarray], count: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Packed rows, as many as a step has at least: ranks need a row each, and a few conversations fill fewer. What is
    added is padding."""
    ids, doc, weight = rows
    missing = max(0, count - len(ids))

    def extend(values: np.ndarray, padding: int) -> np.ndarray:
        return np.concatenate([values, np.full((missing, values.shape[1]), padding, values.dtype)])

    return extend(ids, 0), extend(doc, -1), extend(weight, 0)


def make_card(run: Run, name: str, config: Config, algorithm: str, drafts: bool) -> str:
    """The model card of the checkpoint `name`."""
    stage, description = DESCRIPTIONS[name]
    result = read_json(run.root / "stages" / "tasks.json")["result"]
    packed = read_json(run.root / "stages" / "data.json")["result"]["conversations"]
    facts = {
        "data": f"{packed['conversations']} conversations, {packed['learned']:,} tokens of them the assistant's; "
        f"{result['training_tasks']} tasks of {', '.join(result['training_packages'])}",
        "held out": ", ".join(result["heldout_packages"]),
        "stage": stage,
    }
    last = (read_lines(run.root / "metrics" / f"{stage}.jsonl") or [{}])[-1]
    facts |= {label: f"{last[key]:.4g}" for key, label in LABELS.items() if isinstance(last.get(key), (int, float))}
    return release.make_model_card(
        f"etude {name}", description.format(algorithm=algorithm), config, facts, "Fix it.", drafts, role="user"
    )
