"""`etude run recipe --tasks` where sandboxes are killed or cannot be opened: what is left out, counted, and said."""

import json
from pathlib import Path

from etude.run.settings import settings
from kit.disk import read_lines
from scaled.runtime import launch
from tests.mirror import killed_sandboxes
from tests.mirror.test_packages import recipes, start, words
from tests.mirror.workers import ranks

__all__ = ["recipes", "start"]  # fixtures


def test_failures_are_left_out_counted_and_said(start, recipes, tmp_path, ask, monkeypatch):
    """First no sandbox of RL opens: the run stops with one line, and goes on later. Then one rollout of four loses its
    grading in each step, and one sample of each held-out task has no sandbox."""
    modes = [True, False]

    def play(module, arguments, nproc, restarts, node):
        config = settings("recipe", "gloo", json.loads(arguments[1])["config"])
        layout = dict(dp=nproc, cp=1, ep=1)
        ranks(nproc).run(layout, killed_sandboxes.whole, Path(arguments[0]), config, modes.pop(0))
        return 0

    monkeypatch.setattr(launch, "start", play)
    out, sets = tmp_path / "out", ("tasks.max_failed_share=0.3", "sft.epochs=1", "cluster.timeout=3000")
    code, _, error = ask(*words(out, start, recipes, *sets))
    assert code == 2 and error.count("\n") == 1, error
    assert "of 4 of 4 rollouts failed, more than max_failed_share=0.3" in error
    assert "no space is left for a sandbox" in error and "Continue with: etude run recipe" in error
    assert (out / "stages" / "measure.json").exists() and not (out / "stages" / "rl.json").exists()

    code, said, error = ask(*words(out, start, recipes, *sets), "--resume")
    assert code == 0 and not error, error
    assert [line["failed"] for line in read_lines(out / "metrics" / "rl.jsonl")] == [1, 1]
    assert "2 of 8 rollouts were left out, as their environments failed, in 2 of 2 steps" in said
    report = json.loads((out / "report.json").read_text())["stages"]["eval"]
    for moment in ("checkpoint", "before", "after"):
        assert report[moment]["failed"] == 2 and report[moment]["success"]["value"] >= 0
        assert report[moment]["best_of_3"] is None and report[moment]["pass_at_k"][2] is None, "two samples say nothing"
    page = (out / "report.html").read_text()
    assert "2 of 8 rollouts were left out" in page and "left out: sandbox failed" in page
