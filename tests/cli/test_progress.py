"""The live line of a stage, by hand: percent, rate, time left, and numbers in few characters."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit import progress
from kit.progress import Progress


class Stage:
    """A stage of 200 steps that another process has already worked on for an hour."""

    name, unit, total, start_time = "rl", "tokens", 200.0, 100.0

    def __init__(self):
        self.notes = []

    @property
    def seconds(self):
        return 3600.0 + progress.time.perf_counter() - self.start_time

    def note_time(self, **facts):
        self.notes.append(facts)


class Clock:
    """In place of the module `time`."""

    now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(progress, "time", made)
    return made


def test_a_resumed_stage_by_hand(clock, capsys):
    """It goes on at step 50. Ten more steps take 30 seconds, so the 140 that are left take 420; steps of the process
    before tell no speed."""
    line = Progress(Stage())
    assert line.rate() == 0.0 and line.left() == "-:--"
    clock.now = 110.0
    line.update(50, 50_000, {"loss": 2.0})
    assert capsys.readouterr().out == "    rl  25%  1:00:10 < -:--  loss 2\n"
    clock.now = 130.0
    line.update(60, 60_000, {"reward": 0.12345})
    assert capsys.readouterr().out == "    rl  30%  1:00:30 < 7:00  500 tokens/s  loss 2  reward 0.123\n"
    clock.now = 131.0
    line.update(61, 61_000, {})
    assert capsys.readouterr().out == ""  # a line each five seconds
    assert line.stage.notes == [
        {"step": 50, "rate": 0.0, "unit": "tokens"},
        {"step": 60, "rate": 500.0, "unit": "tokens"},
    ]
    line.update(210, 210_000, {})  # beyond the total, which some stages cannot know
    assert line.percent() == 100.0 and line.left() == "0:00"
    line.last()
    assert capsys.readouterr().out.startswith("    rl 100%  1:00:31 < 0:00  ")


def test_a_stage_without_steps_is_complete(clock):
    stage = Stage()
    stage.total = 0.0
    assert Progress(stage).percent() == 100.0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.000123456, "0.000123"),
        (12.0, "12"),
        (1234.5, "1234"),
        (9999, "9999"),
        (12_345, "12.3k"),
        (-12_345, "-12.3k"),
        (2.5e6, "2.5M"),
        (3e9, "3.0G"),
    ],
)
def test_a_number_in_few_characters(clock, value, text):
    line = Progress(Stage())
    line.values = {"x": value}
    assert line.words() == f"x {text}"


@settings(max_examples=20)
@given(st.lists(st.tuples(st.floats(0.3, 100.0), st.floats(0, 1e9)), min_size=2, max_size=80))
def test_a_rate_is_that_of_the_last_updates_and_never_negative(steps):
    """Of constant speed it is that speed, whatever was before the window."""
    line, clock = Progress(Stage()), Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "time", clock)
        patch.setattr(line, "print_line", lambda: None)
        for pause, units in steps:
            clock.now += pause
            line.update(1, units, {})
            assert line.rate() >= 0.0
        for number in range(64):
            clock.now += 1.0
            line.update(1, 7.0 * number, {})
        assert line.rate() == pytest.approx(7.0)
