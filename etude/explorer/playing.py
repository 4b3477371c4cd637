"""A sequence that plays: a slider over its moments, Play beside it, which is Pause meanwhile, and what is drawn at a
moment below them.

All of it is a fragment: a step draws it anew, and nothing else of the page. Streamlit starts and stops the fragment's
timer only while it draws the whole page, so that happens once when playing begins and once when it is over. At the last
moment it is over; Play then begins with the first one.

While it plays, another slider stands in the first one's place, which follows and cannot be moved. The timer sends what
the browser's sliders say, and a browser that is behind would set the sequence back; Streamlit ignores what a disabled
slider sends. The link does not say the moment meanwhile: every step would be a page of its own in the browser's
history.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import streamlit as st

__all__ = ["EVERY", "ahead", "play"]

EVERY = 0.8
"""Seconds from one moment to the next."""
Moment = TypeVar("Moment", int, float)


def ahead(current: Moment, moments: Sequence[Moment]) -> Moment | None:
    """The first of the ordered moments that lies after this one; None at the end."""
    return next((moment for moment in moments if current < moment), None)


def play(
    label: str,
    key: str,
    moments: Sequence[Moment],
    begin: Moment,
    show: Callable[[Moment], None],
    *,
    least: Moment | None = None,
    step: Moment = 1,
    step_label: str = "",
    help: str | None = None,
) -> None:
    """Draws the slider, its buttons and what `show` draws for its value. `key`: the slider's. `moments`: where playing
    stops by, in order. The slider goes from `least`, by default the first of them, to the last, in steps of `step`, and
    is at `begin` at first. `step_label`: what a button says that goes on by one moment. A single moment is shown
    without any control."""
    least = moments[0] if least is None else least
    if least == moments[-1]:
        show(least)
        return
    state, plays_key, button_key = st.session_state, f"{key}-plays", f"{key}-play"
    # While it plays, state[plays_key] is the moment that was shown last: if the slider is still there, the timer has
    # called. None: somebody else has.
    if button_key not in state:
        state.pop(plays_key, None)  # another page was opened meanwhile
    if plays_key in state:
        state[plays_key] = None
        if ahead(state[key], moments) is None:
            del state[plays_key]
    has_timer = plays_key in state

    def toggle() -> None:
        if plays_key in state:
            del state[plays_key]
            return
        if ahead(state[key], moments) is None:
            state[key] = moments[0]
        state[plays_key] = None

    def advance() -> None:
        state.pop(plays_key, None)
        next_moment = ahead(state[key], moments)
        state[key] = moments[0] if next_moment is None else next_moment

    def draw() -> None:
        if plays_key in state and state[plays_key] == state[key]:
            next_moment = ahead(state[key], moments)
            state[key] = state[key] if next_moment is None else next_moment
        is_playing = plays_key in state
        left, right = st.columns([2, 1] if step_label else [4, 1], vertical_alignment="bottom")
        with left:
            if is_playing:
                moment = state[f"{key}-playing"] = state[key]
                st.slider(label, least, moments[-1], begin, step, key=f"{key}-playing", disabled=True, help=help)
            else:
                moment = st.slider(label, least, moments[-1], begin, step, key=key, bind="query-params", help=help)
        with right, st.container(horizontal=True):
            icon = ":material/pause:" if is_playing else ":material/play_arrow:"
            st.button(
                "Pause" if is_playing else "Play",
                key=button_key,
                on_click=toggle,
                icon=icon,
                help="At the end it begins again.",
            )
            if step_label:
                st.button(
                    step_label,
                    key=f"{key}-next",
                    on_click=advance,
                    icon=":material/skip_next:",
                    help="From the end, the first one.",
                )
        show(moment)
        if is_playing:
            state[plays_key] = state[key] = moment
            if ahead(moment, moments) is None:
                del state[plays_key]
        if (plays_key in state) != has_timer:
            st.rerun()  # starts or stops the timer

    st.fragment(draw, run_every=EVERY if has_timer else None)()
