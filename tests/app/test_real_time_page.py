"""The page of real-time RL: every control, what a session is worth, and the dashboard of a small record."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.explorer.pages import real_time_rl
from etude.explorer.pages.real_time_rl import even, worth
from sims.real_time_rl.experiment import WAYS
from sims.real_time_rl.users import Users

USERS = Users()
FIGURES = ("right", "edited", "needless", "welcome", "broken", "broken_hard", "kept", "followed", "seconds")


@pytest.fixture
def record(tmp_path, monkeypatch):
    """A record of one training in each way, with two loops."""
    line = dict.fromkeys(FIGURES, 0.5) | {"age": 1.0, "thrown": 0.25, "shipped": 1.0}
    rows = [{"way": way, "training": 0, "step": step} | line for way in WAYS for step in (1, 2)]
    ends = [{"way": way, "training": 0, "at": "learnt"} | dict.fromkeys(FIGURES, 0.125) for way in WAYS]
    path = tmp_path / "real-time-rl.json"
    path.write_text(json.dumps({"rows": rows, "ends": ends}))
    monkeypatch.setattr(real_time_rl, "RECORD", path)
    return path


def test_every_control_goes_to_both_ends(page, drive, record):
    at = page("real-time-rl")
    before = dict(at.query_params)
    assert drive(at) > 12 and not at.error and dict(at.query_params) == before


def test_it_shows_what_was_played(page, table, record):
    at = page("real-time-rl", loop="daily")
    shown = {metric.label: metric.value for metric in at.metric}
    assert shown["Age of the data"] == "1.0 steps" and shown["Thrown away"] == "25.0%" and shown["Latency"] == "0.5 s"
    assert shown["Shipped"] == "0 of 0"  # the record ends before the first shipment of a day
    assert {metric.value for metric in page("real-time-rl").metric} >= {"2 of 2"}
    assert len(table(at, "policy")) == len(WAYS) and (table(at, "policy")["did what is wanted"] == 0.125).all()


def test_it_leads_to_the_lesson(page, record):
    assert page("real-time-rl").get("page_link")[-1].proto.query_string == "n=18"


def test_without_a_record_it_shows_what_a_session_is_worth_and_says_so(page, tmp_path, monkeypatch):
    monkeypatch.setattr(real_time_rl, "RECORD", tmp_path / "real-time-rl.json")
    at = page("real-time-rl")
    assert not at.error and "not been run" in at.info[-1].value and len(at.metric) == 3


def test_a_damaged_record_costs_one_line(page, record):
    record.write_text("[3]")
    at = page("real-time-rl")
    assert len(at.error) == 1 and "is damaged" in at.error[0].value and "\n" not in at.error[0].value


def test_what_pays_where():
    """The careless rewards make a way around the work pay, and the careful one does not."""
    found = {way: worth(WAYS[way][0], USERS, 0.4) for way in ("loop", "thrown", "edits")}
    assert "“edits kept alone”" in real_time_rl.PAGE.look and "less than half" in real_time_rl.PAGE.look
    assert even(found["edits"], "question, clear task") == pytest.approx(0.5)
    assert even(found["loop"], "question, clear task") < 0.05 and even(found["loop"], "broken call") == 0.0
    assert even(found["thrown"], "broken call") == pytest.approx(0.4)


@given(st.sampled_from([*WAYS]), st.floats(0, 0.5), st.floats(10, 300), st.floats(0, 1))
def test_shares_are_shares_whoever_the_users_are(way, slip, patience, batch):
    found = worth(WAYS[way][0], Users(slip=slip, patience=patience), batch)
    assert all(0 <= even(found, name) <= 1 for name in found)
