"""`etude bench engine`: both samplers play the same conversations, and the record says what came of them. No time is
judged here."""

import json

from etude.bench import engine


def test_both_play_the_same(tiny_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(engine, "SLOTS", (3,))
    record = engine.bench(tiny_run, tmp_path, rounds=2)
    (cell,) = record["cells"]
    assert (
        cell["slots"] == 3
        and all(len(some) == 2 for some in cell["seconds"].values())
        and all(cell["sampled_tokens"].values())
    )
    assert (
        cell["conversations_with_the_same_tokens"] >= 2
    )  # in float32 a token may fall to the other side of a rounding
    assert cell["ratio_range"][0] <= cell["ratio"] <= cell["ratio_range"][1]
    (file,) = tmp_path.glob("engine-*.json")
    assert json.loads(file.read_text()) == record and "3 conversations" in capsys.readouterr().out


def test_a_folder_without_a_policy_is_one_line(tmp_path, ask):
    code, _, said = ask("bench", "engine", tmp_path)
    assert code == 2 and said.count("\n") == 1 and "make small" in said
