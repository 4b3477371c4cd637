"""The report: pages that stand alone, of whole and of half runs."""

import json
import re

import numpy as np
import pytest

from etude.report import page as report
from etude.report import rollouts
from etude.report.record import STAGES, joined_lines, stages_of


def interval(value, width=0.03):
    return {"value": value, "low": value - width, "high": value + width}


def way(speedup, recalled, retracted):
    return {
        "speedup": {"median": speedup, "low": speedup - 0.1, "high": speedup + 0.1},
        "speedup_with_environment": {"median": speedup - 0.05, "low": speedup - 0.2, "high": speedup},
        "tokens_per_s": 410 * speedup,
        "tokens_per_cycle": 3.1,
        "acceptance": [0.93, 0.85, 0.72],
        "recall_acceptance": recalled,
        "identical": 1.0,
        "retracted": retracted,
    }


def write_run(root):
    """A run folder as the recipe leaves it, with invented numbers."""
    draw = np.random.default_rng(0)
    for folder in ("metrics", "stages"):
        (root / folder).mkdir(parents=True)
    (root / "config.json").write_text(
        json.dumps(
            {
                "technique": "recipe",
                "config": {"seed": 0, "data": {"corpus": None}},
                "machine": {"cpu": "A <Processor>", "cores": 2, "python": "3.11", "torch": "2.13.0", "commit": "abc"},
            }
        )
    )

    def lines(name, rows):
        (root / "metrics" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def stage(name, result):
        (root / "stages" / f"{name}.json").write_text(json.dumps({"stage": name, "result": result, "files": {}}))

    def distances(i):
        return {f"kl_{d}": 0.2 * d + np.exp(-i / 30) for d in (1, 2, 3)} | {
            f"agree_{d}": 0.95 - 0.1 * d - 0.5 * np.exp(-i / 30) for d in (1, 2, 3)
        }

    began = 0
    for name, phase, steps in (("cpt", "short", 200), ("long", "long", 60), ("sft", "sft", 60)):
        rows = []
        for i in range(1, steps + 1):
            loss = 1.2 + 5 * np.exp(-(began + i) / 40) + 0.1 * draw.normal()
            rows.append({"step": i, "tokens": i * 8192, "phase": phase, "lr": 0.02, "loss": loss})
            if name != "cpt":
                rows[-1] |= distances(100 + i)
            if i % 20 == 0:
                rows[-1] |= {"codebase_ppl": 20 + 900 * np.exp(-(began + i) / 50), "codebase_bpb": 2.0}
        lines(name, rows)
        began += steps
    lines("mtp", [{"step": i, "tokens": i * 4096, "mtp_loss": 1.0, **distances(i)} for i in range(1, 100)])
    lines(
        "rl",
        [
            {
                "step": i,
                "reward": 0.3 + 0.004 * i + 0.1 * draw.normal(),
                "success": 0.35 + 0.004 * i,
                "tokens": 90 - 0.1 * i,
                "turns": 3.1,
                "invalid_calls": 0.1,
                "kl": 0.001 * i,
                "nll": 0.4,
            }
            for i in range(1, 91)
        ],
    )
    measure = {
        "success": interval(0.42),
        "best_of_8": interval(0.75),
        "greedy": interval(0.55),
        "tokens": interval(92.0, 2),
        "turns": interval(3.2),
        "invalid_calls": interval(0.12),
        "pass_at_k": [0.42 + 0.047 * k for k in range(8)],
        "by_depth": {str(d): {"success": interval(0.6 - 0.2 * d), "best_of_8": interval(0.8)} for d in range(3)},
    }
    after = {
        **measure,
        "success": interval(0.66),
        "pass_at_k": [interval(0.66 + 0.015 * k) for k in range(8)],
        "best_of_8": interval(0.77),
        "greedy": interval(0.68),
    }
    stage(
        "data",
        {
            "files": 1234,
            "bytes": 10**7,
            "tokens": 3 * 10**6,
            "skipped": {"binary": 3, "empty": 9, "huge": 0},
            "heldout": {"name": "json", "files": 5, "bytes": 60000},
            "vocab_size": 1024,
            "world_documents": 20000,
        },
    )
    for name in ("cpt", "mtp", "long", "sft", "rl"):
        stage(name, {"steps": 60})
    stage(
        "eval",
        {
            "tasks": 300,
            "samples": 8,
            "before": measure,
            "after": after,
            "difference": {
                "success": {"value": 0.24, "low": 0.2, "high": 0.28},
                "greedy": interval(0.13),
                "best_of_8": {"value": 0.02, "low": -0.02, "high": 0.06},
                "tokens": interval(-3.0, 1.0),
            },
            "codebase": [
                {"checkpoint": "cpt", "perplexity": 21.3, "bits_per_byte": 1.9},
                {"checkpoint": "final", "perplexity": 24.8, "bits_per_byte": 2.0},
            ],
            "examples": [
                {
                    "prompt": "repo m2 m3 m7 fix m3",
                    "success": True,
                    "transcript": '<read m3>\ndef f(a, b):\n    """double a plus b"""\n' * 4,
                },
                {"prompt": "repo m1 fix m1", "success": False, "transcript": "<b>no</b>"},
            ],
        },
    )
    stage(
        "decode",
        {
            "tasks": 24,
            "acceptance": [0.93, 0.85, 0.72],
            "identical": 1.0,
            "retracted": 0.087,
            "tokens_per_cycle": 3.1,
            "plain_tokens_per_s": 410.0,
            "speculative_tokens_per_s": 860.0,
            "speedup": {"median": 2.1, "low": 2.0, "high": 2.2},
            "ways": {
                "mtp": way(1.5, [], 0.0),
                "mtp+recall": way(1.8, [0.75, 0.61], 0.0),
                "mtp+recall+ahead": way(2.1, [0.74, 0.6], 0.087),
            },
        },
    )
    seconds = {"data": 12.0, "cpt": 140.0, "mtp": 60.0, "rl": 180.0, "eval": 70.0}
    (root / "timings.jsonl").write_text(
        "".join(
            json.dumps({"stage": name, "seconds": value, "finished": True, "peak_memory_gib": 1.7}) + "\n"
            for name, value in seconds.items()
        )
        + '{"stage": "rl", "sec'
    )
    return root


def test_the_whole_report(tmp_path):
    page, data = report.write(write_run(tmp_path / "run"))
    text, record = page.read_text(), json.loads(data.read_text())
    assert text.count("<figure>") == 14 == text.count("data:image/png;base64,")
    assert record["total_seconds"] == 462.0 and record["peak_memory_gib"] == 1.7
    assert record["stages"]["eval"]["tasks"] == 300
    assert "best of 8 did not change measurably (+0.02 [-0.02, +0.06])" in text
    assert "Sampled success rose by 0.24 [0.20, 0.28]" in text
    assert "0.660 [0.630,\u00a00.690]" in text and "2.10 [2.00, 2.20]×" in text
    assert "with and without drafts in 100.0% of the tasks" in text
    rows = re.findall(r"<tr><td>(mtp[+a-z]*)</td>(.*?)</tr>", text)
    cells = {name: re.findall(r"<td class=n>(.*?)</td>", row) for name, row in rows}
    assert [row[0] for row in cells.values()] == [
        "1.50 [1.40,\u00a01.60]",
        "1.80 [1.70,\u00a01.90]",
        "2.10 [2.00,\u00a02.20]",
    ]
    assert cells["mtp"][4:6] == ["–", "0.0%"] and cells["mtp+recall"][4] == "0.75 / 0.61"
    assert cells["mtp+recall+ahead"][1:4] == ["2.05 [1.90,\u00a02.10]", "3.10", "0.93 / 0.85 / 0.72"]
    assert cells["mtp+recall+ahead"][5:] == ["8.7%", "100.0%"]
    assert "skipped: 3 binary, 9 empty" in text
    assert "Unfinished" not in text


def test_the_page_stands_alone_and_escapes(tmp_path):
    text = report.write(write_run(tmp_path / "run"), rollouts.render_rollouts)[0].read_text()
    assert not re.search(r"https?://|<script|<link|@import|url\(", text)
    assert "<b>no</b>" not in text and "&lt;b&gt;no&lt;/b&gt;" in text and "A &lt;Processor&gt;" in text
    assert 'name="viewport"' in text and text.count("<figcaption>") == text.count("alt=")


def test_a_name_that_is_no_text_is_spelled_out_and_a_repeated_corpus_is_told(tmp_path):
    root = write_run(tmp_path / "run")
    data = {"heldout": {"name": "caf\udce9", "files": 2}, "epochs": 3.25}
    (root / "stages" / "data.json").write_text(json.dumps({"stage": "data", "result": data, "files": {}}))
    text = report.write(root)[0].read_text(encoding="utf-8")
    assert "held out: caf\\udce9 (2 files)" in text and "3.25 passes over the corpus" in text


@pytest.mark.parametrize("missing", ["cpt", "eval", "timings", "all"])
def test_half_a_run_has_half_a_report(tmp_path, missing):
    root = write_run(tmp_path / "run")
    for path in [*root.glob("metrics/*"), *root.glob("stages/*"), root / "timings.jsonl", root / "config.json"]:
        if missing in (path.stem, "all"):
            path.unlink()
    page, data = report.write(root)
    record = json.loads(data.read_text())
    assert ("Unfinished" in page.read_text()) == (missing != "timings")
    assert bool(report.before_after(record)) == (missing not in ("eval", "all"))


def test_stages_that_are_left_out_are_not_missing():
    """A full run without draft layers, or without timed decoding."""
    for config, left_out in (
        ({}, set()),
        ({"cluster": {"drafts": True}, "evaluation": {"decode_rounds": 5}}, set()),
        ({"cluster": {"drafts": False}}, {"mtp", "decode"}),
        ({"evaluation": {"decode_rounds": 0}}, {"decode"}),
    ):
        assert {*STAGES} - {*stages_of({"config": config})} == left_out


def test_stages_that_train_one_after_another_are_counted_through():
    metrics = {
        "cpt": [{"step": 1, "tokens": 10}, {"step": 2, "tokens": 20, "phase": "short"}],
        "sft": [{"step": 1, "tokens": 5}],
    }
    joined, borders = joined_lines(metrics, "cpt", "long", "sft")
    assert [(line["step"], line["tokens"], line["phase"]) for line in joined] == [
        (1, 10, "cpt"),
        (2, 20, "short"),
        (3, 25, "sft"),
    ]
    assert borders == [("cpt", 0), ("sft", 2)]


def test_thin_and_torn_results(tmp_path):
    """Plain numbers for intervals, one logged step, an empty evaluation, a torn line: shown, not fatal."""
    root = write_run(tmp_path / "run")
    (root / "metrics" / "rl.jsonl").write_text('{"step": 1, "reward": 0.5, "success": null}\n{"step": 2, "rew')
    (root / "metrics" / "cpt.jsonl").write_text("")
    (root / "stages" / "eval.json").write_text(json.dumps({"before": {"success": 0.5}, "after": None}))
    page, data = report.write(root)
    assert "reward and success by RL step" in page.read_text()
    assert report.before_after(json.loads(data.read_text())) == [("success, sampled", "0.500", "–", "–")]
