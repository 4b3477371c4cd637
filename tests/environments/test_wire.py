"""Whatever the other end of the pipe does, the harness has an answer or one line."""

import os
import resource
import threading
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from environments.sandbox.wire import Wire, WireError


class Peer:
    """The other end, played by a test."""

    def __init__(self, **how):
        (reader, self.says), (self.hears, writer) = os.pipe(), os.pipe()
        self.handles = [reader, writer, self.says, self.hears]
        self.wire = Wire(reader, writer, **how)

    def close(self, *handles):
        for handle in handles or self.handles:
            if handle in self.handles:
                self.handles.remove(handle)
                os.close(handle)


@pytest.fixture
def peer():
    made = Peer()
    yield made
    made.close()


def soon(seconds=20.0):
    return time.monotonic() + seconds


def test_an_answer_comes_through(peer):
    os.write(peer.says, b'{"a": 1}\n')
    assert peer.wire.answer(soon(), 100) == {"a": 1}


def test_any_number_of_handles():
    """select(2) knows none above 1023."""
    kept, most = [], resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(1100, most[0]), most[1]))
        while not kept or kept[-1] < 1030:
            kept.append(os.dup(0))
        other = Peer()
        other.wire.send(b"{}\n", soon())
        assert os.read(other.hears, 10) == b"{}\n"
        os.write(other.says, b'{"a": 1}\n')
        assert other.wire.answer(soon(), 100) == {"a": 1}
        other.close()
    finally:
        for handle in kept:
            os.close(handle)
        resource.setrlimit(resource.RLIMIT_NOFILE, most)


@given(st.binary(max_size=200), st.integers(1, 100))
@example(b"[1]\n", 10)
@example(b'{"a": 1}\n{"b": 2}\n', 100)
@example(b"[" * 190 + b"\n", 200)
def test_what_is_no_answer_is_one_line(data, most):
    other = Peer()
    try:
        os.write(other.says, data)
        other.close(other.says)
        found = other.wire.answer(soon(), most)
        assert isinstance(found, dict)
    except WireError as error:
        assert str(error).startswith("the sandbox's server ") and "\n" not in str(error)
    finally:
        other.close()


def test_a_deeply_nested_answer_is_one_line(peer):
    os.write(peer.says, b"[" * 50_000 + b"\n")
    with pytest.raises(WireError, match="no answer"):
        peer.wire.answer(soon(), 1 << 17)


def test_a_flood_without_an_end_is_cut_off_at_its_bound():
    other = Peer()

    def flood():
        try:
            while True:
                os.write(other.says, b"x" * 65536)
        except OSError:
            pass

    thread = threading.Thread(target=flood)
    thread.start()
    with pytest.raises(WireError, match="more than 1000000 bytes"):
        other.wire.answer(soon(), 1_000_000)
    assert len(other.wire.buffer) <= 1_000_000 + 65536
    other.close(other.wire.reader)
    thread.join()
    other.close()


def test_silence_ends_at_its_time_and_ticks_meanwhile():
    ticks = []
    other = Peer(tick=lambda: ticks.append(time.monotonic()))
    with pytest.raises(WireError, match="in time"):
        other.wire.answer(soon(0.2), 100)
    assert ticks
    other.close()


def test_a_peer_that_reads_nothing_does_not_hold_the_harness(peer):
    with pytest.raises(WireError, match="in time"):
        peer.wire.send(b"x" * 1_000_000, soon(0.2))


def test_a_peer_that_is_gone(peer):
    peer.close(peer.hears, peer.says)
    with pytest.raises(WireError, match="has ended"):
        peer.wire.send(b"x", soon())
    with pytest.raises(WireError, match="has ended"):
        peer.wire.answer(soon(), 100)


def test_bytes_behind_a_line_are_read_as_they_are(peer):
    os.write(peer.says, b"6\nab\ncde{}\n")
    found = peer.wire.line(soon(), 100), peer.wire.read(3, soon()) + peer.wire.read(3, soon())
    assert found == (b"6", b"ab\ncde") and peer.wire.answer(soon(), 10) == {}


@pytest.mark.parametrize("behind", [b"x", b"\n", b'{"a": 2}\n'])
def test_an_answer_is_the_last_that_is_said(peer, behind):
    """Bytes behind it would be taken for the answer to the next request."""
    os.write(peer.says, b'{"a": 1}\n' + behind)
    with pytest.raises(WireError, match="no answer"):
        peer.wire.answer(soon(), 100)


def test_whether_the_other_end_was_closed(peer):
    """What still comes is thrown away, and it is not waited for longer than was said."""
    os.write(peer.says, b"x" * 1000)
    assert not peer.wire.drain(soon(0.05)) and not peer.wire.buffer
    os.write(peer.says, b"more")
    peer.close(peer.says)
    assert peer.wire.drain(soon())
