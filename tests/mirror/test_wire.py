"""Frames arrive whole and in order, whoever dies is noticed, and what is no frame ends the line."""

import contextlib
import dataclasses
import os
import socket
import stat
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaled.async_rl.wire import MAX_FRAME_BYTES, ConnectionLost, Hub, Line, meeting_place, meeting_port


def of_this_machine():
    return meeting_port("127.0.0.1")


PLACES = pytest.mark.parametrize("place", [meeting_place, of_this_machine], ids=["path", "port"])


@contextlib.contextmanager
def listening(hub):
    """Whoever connects over TCP is welcomed meanwhile."""
    over, found = threading.Event(), []

    def listen():
        while not over.is_set():
            found.extend(hub.receive(0.01))

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def connect(hub, at):
    with listening(hub) as found:
        line = Line.to(at, 5.0)
    assert not found
    return line


def framed(*frames):
    return b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames)


def hear(hub, number):
    found = []
    for _ in range(500):
        found += hub.receive(0.02)
        if len(found) >= number:
            return found
    raise AssertionError(f"{len(found)} of {number} frames came")


@PLACES
@settings(max_examples=20)
@given(frames=st.lists(st.binary(max_size=9) | st.integers(1, 200_000).map(bytes), min_size=1, max_size=8))
def test_frames_come_whole_and_in_order_both_ways(place, frames):
    with place() as at:
        hub = Hub(at)
        line = connect(hub, at)

        def say():
            for frame in frames:
                line.say(frame)

        speaker = threading.Thread(target=say)
        speaker.start()
        found = hear(hub, len(frames))
        speaker.join()
        assert [data for _, data in found] == frames
        found[0][0].say(b"back")
        assert line.receive(5.0) == [b"back"]
        line.say(b"last")
        line.close()
        assert [data for _, data in hear(hub, 2)] == [b"last", None]
        hub.close()


@PLACES
def test_a_frame_that_comes_in_pieces(place):
    """Also one that is longer than a token, once its sender is welcome."""
    with place() as at:
        hub = Hub(at)
        line, data = connect(hub, at), bytes(range(256)) * 40
        whole = framed(data, b"next")
        for first, last in zip((0, 3, 4, 5000), (3, 4, 5000, len(whole))):
            assert not [frame for _, frame in hub.receive(0.05)]
            line.peer.sendall(whole[first:last])
        assert [frame for _, frame in hear(hub, 2)] == [data, b"next"]
        line.close()
        hub.close()


@PLACES
def test_a_hub_that_dies_and_comes_back(place):
    with place() as at:
        hub = Hub(at)
        line = connect(hub, at)
        assert hub.receive(0.05) == []
        hub.close()
        with pytest.raises(ConnectionLost):
            while True:
                line.receive(1.0)
        with pytest.raises(ConnectionLost):
            for _ in range(100):
                line.say(b"x" * 1000)
        again = Hub(at)
        connect(again, at).say(b"here")
        assert [data for _, data in hear(again, 1)] == [b"here"]
        again.close()


def test_a_path_is_this_user_s_alone():
    """The folder, and the socket itself, which may lie in a folder that others can enter; whatever the umask is."""
    before = os.umask(0)
    try:
        with meeting_place() as path:
            assert oct(os.stat(path.parent).st_mode)[-3:] == "700"
            hub = Hub(path)
            assert stat.S_ISSOCK(os.stat(path).st_mode) and oct(os.stat(path).st_mode)[-3:] == "600"
            hub.close()
    finally:
        os.umask(before)
    assert not path.parent.exists()


@PLACES
def test_nobody_listens(place):
    with place() as at, pytest.raises(ConnectionLost, match="nobody listens"):
        Line.to(at, 0.05)


def test_who_does_not_know_the_token_is_not_heard():
    """Nor does it hear anything; those who know it go on."""
    with of_this_machine() as at:
        hub = Hub(at)
        good = connect(hub, at)
        for token in (b"0" * len(at.token), at.token[:-1], at.token + b"0", b""):
            with listening(hub) as found, pytest.raises(ConnectionLost, match="nobody listens"):
                Line.to(dataclasses.replace(at, token=token), 0.0)
            assert found == []
        stranger = socket.create_connection((at.host, at.number))
        with listening(hub) as found:
            stranger.sendall((1000).to_bytes(4, "big"))  # longer than the token
            stranger.settimeout(5.0)
            assert stranger.recv(1) == b""
        stranger.close()
        assert found == []
        good.say(b"fine")
        assert [data for _, data in hear(hub, 1)] == [b"fine"]
        good.close()
        hub.close()


def test_no_frame_is_swallowed_with_the_token():
    """Who speaks before the welcome is not one of us, though it knows the token: the line ends, and nothing of it is
    taken for said or lost."""
    with of_this_machine() as at:
        hub = Hub(at)
        for behind in (b"x", b"", b"said too early"):
            hasty = socket.create_connection((at.host, at.number))
            hasty.sendall(framed(at.token, behind))
            hasty.settimeout(5.0)
            with listening(hub) as found:
                try:
                    assert hasty.recv(100) == b""
                except ConnectionResetError:
                    pass  # what it said lies there unread
            assert found == []
            hasty.close()
        assert not hub.strangers
        hub.close()


def test_who_listens_without_the_welcome_is_no_hub():
    """Another program that has taken the port, and says something."""
    with of_this_machine() as at, socket.create_server((at.host, 0)) as other:
        heard = []

        def answer():
            peer, _ = other.accept()
            with peer:
                heard.append(peer.recv(100))
                peer.sendall(framed(b"hello"))
                peer.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConnectionLost, match="it has no welcome"):
            Line.to(dataclasses.replace(at, number=other.getsockname()[1]), 0.0)
        thread.join()
        assert heard == [framed(at.token)]


def test_a_token_is_nowhere_to_be_read():
    with of_this_machine() as one, of_this_machine() as other:
        assert one.token != other.token and one.number != other.number
        assert one.token.decode() not in f"{one} {one!r}"


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
            good.say(bytes(MAX_FRAME_BYTES + 1))
        bad.close()
        hub.close()
