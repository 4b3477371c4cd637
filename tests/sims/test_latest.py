"""What is kept of RL's newest rollouts, and how a run that trains shows it; `test_watching.py` holds that training has
the same bits."""

import json

import pytest
import torch

from etude.explorer.runs import rollouts as run_rollouts
from etude.explorer.runs.kinds import RunData
from recipe.small import latest_rollouts
from recipe.small.latest_rollouts import Latest
from ref.self_summary import Chain, Segment
from tests import scripted


def chain(language, *texts):
    def segment(ids):
        n = len(ids)
        none = torch.zeros(n, dtype=torch.bool)
        return Segment(
            torch.tensor(ids),
            none,
            torch.zeros(n),
            none.long(),
            torch.zeros(n - 1, 0, 1, dtype=torch.int16),
            True,
            none,
        )

    return Chain([segment(language.encode(text)) for text in texts], True)


def run(folder, **more):
    return RunData("mine", folder, "recipe", [], {}, {}, {}, ["rl", "eval"], 0.0, **more)


def test_a_run_that_trains_shows_them_and_says_of_which_step(tmp_path, monkeypatch):
    """A long one is cut, a large group too; once there is an evaluation, its rollouts stand there."""
    monkeypatch.setattr(latest_rollouts, "LONGEST", 6)
    folder, language = tmp_path / "mine", scripted.speaker()
    assert run_rollouts.last(run(folder)) == ("", []) and run_rollouts.silence(run(folder)).startswith(
        "No rollouts yet"
    )
    some = [chain(language, "m3", "m4"), chain(language, "read m3"), *[chain(language, "m3")] * 9]
    Latest(folder / "rollouts" / "rl.json", language).keep(
        7, "Repair m3.", some, [1.0, -0.25] + [0.0] * 30, [True, False] + [False] * 30
    )
    assert (
        len(json.loads((folder / "rollouts" / "rl.json").read_text(encoding="utf-8"))["rollouts"])
        == latest_rollouts.MAX_ROLLOUTS
    )
    of, shown = run_rollouts.last(run(folder))
    assert of == "of step 7 of RL, 4 of one group" and len(shown) == run_rollouts.MAX_ROLLOUTS
    assert shown[0].says == "solved, reward 1.000, contexts: 2, task: Repair m3." and shown[0].text == "m3\nm4"
    assert (
        shown[1].says == "not solved, reward -0.250, contexts: 1, task: Repair m3."
        and shown[1].text == "read m\n(cut off: 7 characters)"
    )
    (folder / "rollouts" / ".tmp-rl.json").write_text("{")
    assert run_rollouts.last(run(folder)) == (of, shown), "a file that is being written is not looked at"
    greedy = {"success": True, "prompt": "p", "transcript": "t"}
    assert run_rollouts.last(run(folder, examples=[greedy])) == (
        "of the evaluation after RL, greedy",
        [run_rollouts.Rollout("solved, task: p", "t")],
    )


@pytest.mark.parametrize(
    "damaged", ['{"step": 7, "rollo', "[]", "{}", '{"step": 7, "prompt": "p", "rollouts": [{"success": true}]}', "\0"]
)
def test_a_damaged_file_is_one_line(tmp_path, damaged):
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "rl.json").write_text(damaged)
    said = run_rollouts.silence(run(tmp_path))
    assert (
        run_rollouts.last(run(tmp_path)) == ("", [])
        and said.startswith("Its last rollouts cannot be read: ")
        and "rl.json" in said
    )
    assert "\n" not in said
