"""A sequence that plays, on a stage in Streamlit's place: who moves it, when its timer runs, and that it ends."""

from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.explorer import playing


class Stage:
    """What `playing.py` asks of Streamlit. `part()` is what the timer calls, and a click in the fragment; `page()`
    draws the whole page."""

    def __init__(self, moments, begin, one=""):
        self.session_state, self.seen, self.reruns, self.labels, self.clicks, self.bound = {}, [], 0, {}, {}, None
        self.page = lambda: playing.play("Turn", "turn", moments, begin, self.seen.append, step_label=one)

    def columns(self, sizes, **how):
        return [nullcontext() for _ in sizes]

    def container(self, **how):
        return nullcontext()

    def slider(self, label, least, most, begin, step, *, key, help, bind=None, disabled=False):
        self.bound = bind
        assert disabled == (bind is None), (
            "what the browser says of it while it plays may be of yesterday, and is ignored"
        )
        return self.session_state.setdefault(key, begin)

    def button(self, label, *, key, on_click, **how):
        self.labels[key], self.clicks[key], self.session_state[key] = label, on_click, False

    def fragment(self, part, run_every):
        self.part, self.every = part, run_every
        return part

    def rerun(self):
        self.reruns += 1
        self.page()

    def click(self, key):
        self.clicks[key]()
        self.part()


@pytest.fixture
def stage(monkeypatch):
    def made(moments, begin, one=""):
        found = Stage(moments, begin, one)
        monkeypatch.setattr(playing, "st", found)
        found.page()
        return found

    return made


@given(st.lists(st.integers(-5, 5), unique=True), st.integers(-6, 6))
def test_the_moment_ahead(moments, now):
    moments.sort()
    later = [moment for moment in moments if moment > now]
    assert playing.ahead(now, moments) == (later[0] if later else None)


def test_it_plays_from_the_beginning_to_the_end_and_draws_the_page_twice(stage):
    on = stage([2, 3, 5], 5)
    assert on.seen == [5] and on.every is None and on.labels["turn-play"] == "Play" and on.bound
    on.click("turn-play")
    assert (
        on.seen[-1] == 2
        and on.every == playing.EVERY
        and on.labels["turn-play"] == "Pause"
        and not on.bound
        and on.reruns == 1
    )
    on.part()
    assert on.seen[-1] == 3 and on.reruns == 1, "a step draws the fragment alone"
    on.part()
    assert on.seen[-1] == 5 and on.every is None and on.labels["turn-play"] == "Play" and on.bound and on.reruns == 2
    on.part()
    assert on.seen[-1] == 5 and on.reruns == 2


def test_it_goes_on_from_where_it_was_paused_or_moved(stage):
    on = stage([1, 2, 3, 4, 5], 1)
    on.click("turn-play")
    on.part()
    on.click("turn-play")
    assert on.seen[-1] == 2 and on.every is None and on.labels["turn-play"] == "Play"
    on.click("turn-play")
    assert on.seen[-1] == 2 and on.every
    on.session_state["turn"] = 4  # by hand
    on.part()
    assert on.seen[-1] == 4, "the reader has moved it, not the timer"
    on.page()
    assert on.seen[-1] == 4 and on.every, "another control draws the page, and it plays on"
    on.session_state["turn"] = 5
    on.part()
    assert on.seen[-1] == 5 and on.every is None


def test_a_single_step_ends_playing(stage):
    on = stage([1, 2, 3], 1, one="Next")
    on.click("turn-play")
    on.click("turn-next")
    assert on.seen[-1] == 2 and on.every is None and on.labels["turn-play"] == "Play"
    for moment in (3, 1):
        on.click("turn-next")
        assert on.seen[-1] == moment


def test_another_page_ends_playing(stage):
    on = stage([1, 2, 3], 1)
    on.click("turn-play")
    del on.session_state["turn-play"]  # as Streamlit forgets what a page no longer draws
    on.page()
    assert on.every is None and on.labels["turn-play"] == "Play" and on.seen[-1] == 1


def test_a_single_moment_has_no_controls(stage):
    on = stage([1], 1)
    assert on.seen == [1] and not on.labels and not on.session_state
