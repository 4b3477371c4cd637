"""Frames arrive whole and in order, whoever dies is noticed, and what is no frame ends the line."""

import os
import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaled.async_rl.wire import MOST, Hub, Line, Lost, meeting_place


def hear(hub, number):
    found = []
    for _ in range(500):
        found += hub.heard(0.02)
        if len(found) >= number:
            return found
    raise AssertionError(f"{len(found)} of {number} frames came")


@settings(max_examples=20)
@given(st.lists(st.binary(max_size=9) | st.integers(1, 200_000).map(bytes), min_size=1, max_size=8))
def test_frames_come_whole_and_in_order_both_ways(frames):
    with meeting_place() as path:
        hub, line = Hub(path), Line.to(path, 5.0)

        def say():
            for frame in frames:
                line.say(frame)

        speaker = threading.Thread(target=say)
        speaker.start()
        found = hear(hub, len(frames))
        speaker.join()
        assert [data for _, data in found] == frames
        found[0][0].say(b"back")
        assert line.heard(5.0) == [b"back"]
        line.say(b"last")
        line.close()
        assert [data for _, data in hear(hub, 2)] == [b"last", None]
        hub.close()


def test_a_hub_that_dies_and_comes_back():
    with meeting_place() as path:
        hub, line = Hub(path), Line.to(path, 5.0)
        hear_nothing = hub.heard(0.0)
        hub.heard(0.05)
        hub.close()
        with pytest.raises(Lost):
            while True:
                line.heard(1.0)
        with pytest.raises(Lost):
            for _ in range(100):
                line.say(b"x" * 1000)
        again = Hub(path)
        Line.to(path, 5.0).say(b"here")
        assert [data for _, data in hear(again, 1)] == [b"here"] and hear_nothing == []
        again.close()
        assert oct(os.stat(path.parent).st_mode)[-3:] == "700"
    assert not path.parent.exists()


def test_nobody_listens():
    with meeting_place() as path, pytest.raises(Lost, match="nobody listens"):
        Line.to(path, 0.05)


def test_what_is_no_frame_ends_the_line_and_only_that():
    with meeting_place() as path:
        hub, good = Hub(path), Line.to(path, 5.0)
        bad = socket.socket(socket.AF_UNIX)
        bad.connect(str(path))
        bad.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert [data for _, data in hear(hub, 1)] == [None]
        good.say(b"fine")
        assert [data for _, data in hear(hub, 1)] == [b"fine"]
        with pytest.raises(ValueError, match="a frame may have"):
            good.say(bytes(MOST + 1))
        bad.close()
        hub.close()
