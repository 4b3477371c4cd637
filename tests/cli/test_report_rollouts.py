"""Rollouts in the report: the first success and the first failure of the evaluation, before and after RL, token by
token."""

import html
import itertools
import json
import re
import shutil
from dataclasses import replace

import pytest

from etude.play import example_agent, play, tokens
from etude.play import html as rendering
from etude.report import page as report
from etude.report import rollouts
from recipe.small.data import task_stream

FOLDER = example_agent.FOLDER
FLAGS = [False, True, True, True, True, True, False, True]
"""Which of the first held-out tasks the clone's agent solves greedily."""


def result(greedy: float = 0.82, flags: list[bool] = FLAGS, tasks: int = 300) -> dict:
    """What an evaluation left."""
    transcript = "<|env|>repo m1 fix m1<|agent|>read <b>m1</b>\x1b<|env|>ok"
    return {
        "tasks": tasks,
        "after": {"greedy": {"value": greedy, "low": greedy, "high": greedy}},
        "examples": [
            {"prompt": f"repo m{number} fix m{number}", "success": flag, "transcript": transcript}
            for number, flag in enumerate(flags)
        ],
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with the clone's agents as its checkpoints; the one before RL is a difference from the one after it, as in
    the clone."""
    root = tmp_path_factory.mktemp("report") / "run"
    (root / "stages").mkdir(parents=True)
    shutil.copytree(FOLDER, root / "checkpoints" / "final", ignore=shutil.ignore_patterns("record.json", "sft"))
    model, recipe = (
        play.agent_in(FOLDER / example_agent.BEFORE).network(),
        json.loads((FOLDER / example_agent.RECORD).read_text())["config"],
    )
    example_agent.save_hf(
        model, root / "checkpoints" / "sft", sidecar_files={"tokenizer.json": (FOLDER / "tokenizer.json").read_bytes()}
    )
    (root / "config.json").write_text(json.dumps({"technique": "recipe", "config": recipe}))
    (root / "stages" / "eval.json").write_text(json.dumps({"result": result()}))
    return root


def played(folder, number: int) -> tokens.Watched:
    agent = play.agent_in(folder)
    return tokens.watched(agent, play.task_of(agent.recipe, number, None), 0.0, 0)


def test_a_success_and_a_failure_stand_beside_the_same_task_before_rl(run):
    text = report.write(run, rollouts.render_rollouts)[0].read_text(encoding="utf-8")
    success, failure = (
        text.index("Held-out task 1 is the first that the agent after RL solves"),
        text.index("Held-out task 0 is the first"),
    )
    assert 0 < success < failure and "does not solve with greedy decoding" in text[failure:]
    assert text.count("<h3>before RL</h3>") == text.count("<h3>after RL</h3>") == 2
    for place, number, name in ((success, 1, "sft"), (failure, 0, "final")):
        one = played(run / "checkpoints" / name, number)
        assert rendering.render_rollout(one, len(one.turns)) in text[place:], (
            "what etude play and the explorer show, with every token's probability"
        )
        assert html.escape(f"etude play {run} --task {number} --greedy --before sft") in text
    assert not re.search(r"https?://|<script|<link|@import|url\(", text), "it stands alone"


@pytest.fixture(scope="module")
def one():
    """Some rollout."""
    return played(FOLDER, 1)


@pytest.mark.parametrize(
    ("greedy", "flags", "numbers", "plays"),
    [
        (0.5, "01010101", [0, 1], 4),
        (0.5, "", [0, 1], 4),
        (0.0, "00000000", [0], 2),
        (1.0, "11111111", [0], 2),
        (0.9, "11111111", [0, 8], 4),
        (0.1, "1", [0], 11),
    ],
)
def test_nothing_is_looked_for_that_the_evaluation_did_not_find(run, one, greedy, flags, numbers, plays, monkeypatch):
    """Of ten tasks those are played of which the evaluation says that they are of a kind that is missing, or of which
    it says nothing."""
    asked, solved = [], dict(enumerate(flags or "01")) | {8: "0" if greedy == 0.9 else "1", 9: "1"}
    keys = {
        task.key: number
        for number, task in enumerate(itertools.islice(task_stream(play.agent_in(FOLDER).recipe, "evaluation"), 10))
    }

    def watched(agent, task, *_):
        asked.append(agent.folder.name)
        good = solved.get(keys[task.key], "1") == "1"
        return replace(one, view=replace(one.view, reward=replace(one.view.reward, tests=float(good))))

    monkeypatch.setattr(tokens, "watched", watched)
    found = [*rollouts.pairs(run, result(greedy, [flag == "1" for flag in flags], 10))]
    assert [number for number, *_ in found] == numbers and len(asked) == plays and asked.count("sft") == len(found)
    assert len({after.view.success for _, _, after in found}) == len(found)


def test_without_checkpoints_stored_transcripts_are_shown(run, tmp_path):
    for part in ("stages", "config.json"):
        (shutil.copytree if part == "stages" else shutil.copy)(run / part, tmp_path / part)
    text = report.write(tmp_path, rollouts.render_rollouts)[0].read_text(encoding="utf-8")
    assert (
        "<b>solved</b>: repo m1 fix m1" in text
        and "<b>not solved</b>: repo m0 fix m0" in text
        and "Held-out task" not in text
    )
    assert (
        "read &lt;b&gt;m1&lt;/b&gt;\\x1b" in text
        and text.count('<span class="who">agent</span>') == 2
        and 'class="token' not in text
    )


def test_a_checkpoint_that_cannot_be_read_leaves_the_transcripts(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "final" / "model.safetensors").write_bytes(b"no tensors")
    assert "<b>solved</b>: repo m1" in report.write(tmp_path / "run", rollouts.render_rollouts)[0].read_text(
        encoding="utf-8"
    )
