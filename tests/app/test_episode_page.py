"""The page of episodes: every turn of a transcript, what is wrong with one, and text of agents that stays text."""

import json
import shutil
from pathlib import Path

import pytest

from environments.harness import record
from etude.explorer.pages import episodes

ORACLE = next(Path(__file__).resolve().parents[2].glob("results/episodes/oracle.jsonl"))


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    """Where no run lies."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def mine(tmp_path):
    """A transcript of the user's."""
    path = tmp_path / "runs" / "episodes" / "mine.jsonl"
    path.parent.mkdir(parents=True)
    shutil.copy(ORACLE, path)
    return path


def test_every_control_goes_to_both_ends(page, drive):
    at = page("episodes")
    assert not at.query_params and drive(at) >= 4 and not at.error
    assert {*at.query_params} == {"episode"}, (
        "which transcript is shown stays in the URL, and every other control is back where it began"
    )


def test_an_agent_that_called_nothing_is_shown(page, mine):
    """Its chart of calls has nothing to draw, and says so."""
    shutil.copy(next(ORACLE.parent.glob("model-checkpoint-*.jsonl")), mine)
    at = page("episodes")
    assert not at.error and not at.exception
    assert any(caption.value.startswith("Nothing to draw yet.") for caption in at.caption)


def test_each_turn_shows_what_was_said_called_and_changed(page, mine):
    lines = record.read(mine)
    turns = episodes.steps(tuple(lines))
    assert [len(turn["answers"]) for turn in turns] == [len(line["calls"]) for line in lines if line["kind"] == "reply"]
    assert len(turns) == 4 and ["diff" in line for line in lines if line["kind"] == "turn"] == [
        False,
        True,
        False,
        False,
    ]
    for number, turn in enumerate(turns, 1):
        at = page("episodes", turn=str(number))
        said = " ".join(one.value for one in at.markdown)
        assert all(f"**{call['name']}**" in said for call in turn["said"]["calls"])
        texts = [one.value for one in at.code]
        assert all(answer["text"] in texts for answer in turn["answers"] if answer["text"])
        assert (turn["diff"] in [one.value for one in at.code]) == bool(turn["diff"])
    shown = {one.label: one.value for one in at.metric}
    grade = lines[-1]
    assert (
        shown["Reward"] == f"{grade['reward']:.2f}" == "1.00"
        and shown["Tests"] == f"{grade['passed']} of {grade['of']}"
        and shown["Flags"] == "0"
    )


def test_turns_in_figures_and_played(page, table, plays):
    at = page("episodes", turn="3")
    shown = table(at, "lines changed")
    assert (
        shown["turn"].tolist() == [1, 2, 3, 4]
        and shown["calls"].tolist()[-1] == "finish"
        and shown["lines changed"].tolist()[1] > 0
    )
    assert plays(at, "turn") == 3


def test_calls_are_counted(page):
    spec = json.loads(page("episodes").get("vega_lite_chart")[0].proto.spec)
    assert spec["layer"][0]["encoding"]["y"]["axis"].items() >= {"format": "d", "tickMinStep": 1}.items()


def test_hostile_text_stays_text(page, mine):
    lines = record.read(mine)
    for line in lines:
        if line["kind"] == "reply":
            line["text"] = "**bold** <script>alert(1)</script> \x1b[31m \u202e"
            line["calls"] = [{"id": "x", "name": "a**b**`c`<b>", "arguments": '["no object"'}]
    lines[-1]["flags"] = ["call 1: ![x](https://example.com/a.png) <b>"]
    mine.write_text("".join(json.dumps(line) + "\n" for line in lines))
    at = page("episodes")
    (flag,) = [one.value for one in at.error]
    assert (
        "![" not in flag
        and "<b>" not in flag
        and "**bold** <script>alert(1)</script> \\x1b[31m \\u202e" in [one.value for one in at.text]
    )
    (called,) = [one.value for one in at.markdown if "· ok" in one.value]
    assert "<b>" not in called and "a**b" not in called


@pytest.mark.parametrize(("text", "says"), [("{}\n", "is no transcript"), ("", "is no transcript")])
def test_what_is_broken_is_one_line(page, mine, text, says):
    mine.write_text(text)
    (line,) = [error.value for error in page("episodes").error]
    assert says in line and "\n" not in line


def test_an_episode_that_has_only_begun(page, mine):
    mine.write_text(mine.read_text().splitlines(keepends=True)[0])
    (line,) = [error.value for error in page("episodes").error]
    assert "has no turn yet" in line
