"""Where the time of a step goes: parts, FLOPs, ranks, and what becomes of them in a report."""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from etude.report import speed
from kit.disk import read_lines
from ref.network import Config, Transformer
from ref.packing import Cost
from scaled.plan import HARDWARE, chip_named
from scaled.runtime import step_times
from scaled.runtime.step_times import StepTimes, count, document_lengths, measure_peak, part
from tests.mirror import calls
from tests.mirror.workers import ranks

CPU = torch.device("cpu")


class Clock:
    """Seconds that a test lets pass."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(StepTimes, "read_clock", lambda _: self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(step_times, "measure_peak", lambda *_: 1000.0)
    return Clock(monkeypatch)


def test_a_part_within_another_one_does_not_count_twice(tmp_path, clock):
    path = tmp_path / "speed.jsonl"
    with StepTimes(path, CPU, torch.float32) as times:
        for step in (1, 2):
            with part("train"):
                clock.wait(1)
                with part("sample"):
                    clock.wait(2)
                with part("wait"):
                    clock.wait(0.5)
                clock.wait(4)
            clock.wait(0.25)  # belongs to no part
            with pytest.raises(KeyError), part("train"):
                clock.wait(8 * step)
                raise KeyError
            times.end(step)
    for line, step in zip(read_lines(path), (1, 2), strict=True):
        parts = {name: line[name] for name in step_times.PARTS}
        assert parts == {"sample": 2, "wait": 0.5, "train": 5 + 8 * step, "update": 0, "look": 0, "save": 0}
        assert line["step"] == step and line["seconds"] == sum(parts.values()) + 0.25
        assert 0 < line["memory"] <= line["peak"] and line["reserved"] is None
    with part("train"):
        clock.wait(1)
    assert len(read_lines(path)) == 2 and StepTimes.active is None, "nothing is timed outside"


@pytest.mark.parametrize("num_experts", [0, 4])
def test_utilisation_counts_forward_and_backward_passes(tmp_path, clock, num_experts):
    """Three forward passes' FLOPs of these documents, or one where nothing is trained."""
    config = Config.tiny(50, num_experts=num_experts, intermediate_size=32)
    model, lengths = Transformer(config), torch.tensor([3, 8, 1])
    forward = Cost.of(config)(lengths).sum().item()
    path = tmp_path / "speed.jsonl"
    with StepTimes(path, CPU, torch.float32) as times:
        for is_trained in (True, False):
            with part("train"):
                clock.wait(2)
                count(model, lengths, is_trained)
                count(model, lengths[:0])
            clock.wait(2)
            times.end(1)
    trained, read = read_lines(path)
    assert trained["mfu"] == pytest.approx(3 * forward / (2 * 1000)) and read["mfu"] == pytest.approx(
        trained["mfu"] / 3
    )
    assert trained["tokens_per_second"] == 12 / 4


@given(st.lists(st.lists(st.integers(1, 5), max_size=4), min_size=1, max_size=4))
def test_lengths_of_documents_in_packed_rows(rows):
    """Also of neighbours in two rows that have the same number."""
    width = max(1, *(sum(row) for row in rows)) if len(rows) > 1 else max(1, sum(rows[0]))
    doc = torch.full((len(rows), width), -1)
    for number, row in enumerate(rows):
        doc[number, : sum(row)] = torch.arange(len(row)).repeat_interleave(torch.tensor(row, dtype=torch.long))
    assert document_lengths(doc).tolist() == [length for row in rows for length in row]


def test_ranks_are_summarised(tmp_path):
    """On two ranks, one of which takes longer: the slowest one's seconds, means of parts, the tokens of both."""
    first, second = ranks(2).run(dict(dp=2, cp=1, ep=1), calls.timed, tmp_path / "speed.jsonl")
    (line,) = read_lines(tmp_path / "speed.jsonl")
    assert line["seconds"] == pytest.approx(max(first["seconds"], second["seconds"]), rel=0.2)
    assert second["sample"] > 0.2 > first["sample"], "the second rank samples for longer"
    assert line["sample"] == pytest.approx((first["sample"] + second["sample"]) / 2, abs=0.05)
    assert line["wait"] > 0.05, "half of what the first one waits"
    assert line["tokens_per_second"] == pytest.approx(10 / line["seconds"] / 2) and line["mfu"] > 0


def test_a_peak_is_the_data_sheet_s_or_measured():
    assert chip_named("NVIDIA H200") is HARDWARE["h200"]
    assert chip_named("NVIDIA GeForce RTX 4090") is HARDWARE["rtx-4090"] and chip_named("Tesla T4") is None
    assert 1e8 < measure_peak(CPU, torch.float32) < 1e14


LINE = {"step": 1, "seconds": 4.0, "sample": 1.0, "wait": 0.5, "train": 2.0, "update": 0.25, "look": 0.0, "save": 0.0}


def test_a_report_s_rows(tmp_path):
    """Medians without the first step; lines and files of other kinds change nothing."""
    (tmp_path / "speed").mkdir()
    lines = [LINE | {"seconds": 90.0}, *([LINE | {"mfu": 0.25, "tokens_per_second": 1200.0, "peak": 2e9}] * 2)]
    text = "".join(f"{line}\n".replace("'", '"') for line in lines)
    (tmp_path / "speed" / "rl.jsonl").write_text(text + '{"step": 4, "seconds": "zebra"}\n[1]\n{')
    (tmp_path / "speed" / "sft.jsonl").write_text("{}\n")
    lines_by_stage = speed.read_speed(tmp_path)
    assert speed.rows(lines_by_stage) == [["rl", "3", "4", "25%", "12%", "50%", "1,200", "25.0%", "2.00 GB"]]
    assert len(speed.picture(lines_by_stage)) == 1 and speed.picture({}) == [] and speed.rows({}) == []
    assert math.isfinite(speed.middle(lines_by_stage["rl"], "train") or math.nan)
