"""The commands of docs/your-own-model.md and of examples/own_repository.py, as far as the start of their ranks:
settings, files and layouts that a reader types are accepted together."""

import runpy
import shlex
import shutil
from pathlib import Path

import pytest
import torch

from recipe.full import stages
from recipe.packages.chat_format import DEFAULT_TEMPLATE
from scaled import pretrain
from scaled.runtime import launch
from tests.test_readme import PAGES, ROOT, commands, wrong

EXAMPLE = runpy.run_path(str(ROOT / "examples" / "own_repository.py"))
RUNS = [
    command
    for command in commands(PAGES["docs/your-own-model.md"])
    if "--scale full" in command and not {"--help", "async-rl"} & {*command.split()} and len(command.split()) > 5
]


class Started(BaseException):
    """The ranks would start now."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "network"
    EXAMPLE["make_tiny_checkpoint"](ROOT / "examples" / "words", folder)
    return folder


@pytest.fixture
def reader(checkpoint, tmp_path, monkeypatch):
    """A folder with what the page says that the reader has, and one GPU; what takes long before the ranks is left
    out."""
    monkeypatch.chdir(tmp_path)
    for name in ("FOLDER", "runs/packages/checkpoints/sft"):
        shutil.copytree(checkpoint, tmp_path / name)
        (tmp_path / name / "chat_template.jinja").write_text(DEFAULT_TEMPLATE)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "CODE").symlink_to(ROOT / "examples" / "words")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "reward.py").write_text("def reward(episode):\n    return {}\n")
    message = '{"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]}\n'
    (tmp_path / "chats.jsonl").write_text(message)

    def start(*arguments):
        raise Started

    monkeypatch.setattr(launch, "start", start)
    monkeypatch.setattr(stages, "prepare", lambda run, config: None)
    monkeypatch.setattr(pretrain, "prepare", lambda config, out: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return tmp_path


def test_the_page_has_runs():
    assert len(RUNS) >= 6 and {command.split()[2] for command in RUNS} >= {"recipe", "cpt", "mtp", "dr-grpo"}


@pytest.mark.parametrize(
    "command", [*RUNS, *(c for c in commands(PAGES["docs/your-own-environment.md"]) if "tasks.reward" in c)]
)
def test_a_documented_run_starts_its_ranks(command, reader, ask, capsys):
    words = shlex.split(command)[1:]
    if "--out" not in words:
        words += ["--out", "runs/new"]
    words[words.index("--out") + 1] = "runs/new"
    with pytest.raises(Started):
        code, _, error = ask(*words)
        pytest.fail(f"exit code {code}: {error}")


def test_the_examples_commands_are_those_of_the_command_line(tmp_path):
    for checkpoint in (None, Path("FOLDER")):
        for command in EXAMPLE["make_commands"](ROOT / "examples" / "words", tmp_path, checkpoint):
            assert wrong(shlex.join(command)) is None, command


def test_the_examples_run_starts_its_ranks(reader, ask):
    """With the tiny checkpoint that it makes, and with one of the reader's."""
    for checkpoint in (None, reader / "FOLDER"):
        shutil.rmtree(reader / "new", ignore_errors=True)
        shutil.copytree(reader / "FOLDER", reader / "new" / "tiny")
        _, run, _ = EXAMPLE["make_commands"](ROOT / "examples" / "words", reader / "new", checkpoint)
        with pytest.raises(Started):
            code, _, error = ask(*run[1:])
            pytest.fail(f"exit code {code}: {error}")
