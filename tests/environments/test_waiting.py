"""A command that waits: it is told once, byte for byte, bounded as any other, and no tool ever works beside it."""

import hashlib
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from environments.sandbox.interface import Limits

WAITS = "echo ready; exec python3 -I -S -c 'import sys; data = sys.stdin.buffer.read(); print(len(data)); sys.exit(7)'"
SUM = "echo ready; exec sha256sum"


@pytest.fixture(scope="module")
def small(start):
    """A sandbox with little time."""
    return start({"a.txt": "one\n"}, limits=Limits(seconds=2.0))


def test_it_is_told_once_and_its_end_is_seen(small):
    said = small.begin(WAITS)
    assert said.ok and said.text == "ready" and small.waits()
    heard = small.tell("é" * 300_000)  # more than a pipe holds
    assert (heard.text, heard.exit, heard.ok, heard.end_reason) == ("600000\n", 7, False, None) and not small.waits()
    again = small.tell("x")
    assert not again.ok and again.exit is None and again.text == "no command waits for what it is told"


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(codec="utf-8"), max_size=200), st.integers(0, 2000))
def test_what_it_is_told_arrives_byte_for_byte(small, text, times):
    assert small.begin(SUM).ok
    assert small.tell(text * times).text == f"{hashlib.sha256((text * times).encode()).hexdigest()}  -\n"


@pytest.mark.parametrize("tool", ["list", "read", "shell", "nonsense"])
def test_every_call_ends_it_first(small, tool):
    """What a file tool has looked at is what it opens, since nobody else is there."""
    assert small.begin("echo ready; (while true; do date > late.txt; done) & exec cat").ok
    small.call(tool, {"read": {"path": "a.txt"}, "shell": {"command": "true"}}.get(tool, {}))
    assert not small.waits() and not small.tell("x").ok
    alone = small.call("shell", {"command": "ls /proc | grep -c '^[0-9]'"})
    assert int(alone.text) <= 4, "the server, the shell, and the two programs of this command"
    small.call("delete", {"path": "late.txt"})


def test_a_snapshot_and_another_command_end_it(small):
    assert small.begin("echo one; exec cat").ok
    small.snapshot()
    assert not small.waits()
    assert small.begin("echo one; exec cat").ok and small.begin("echo two; exec cat").text == "two"
    assert small.tell("told").text == "told"


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("true", "must say a line and wait"),
        ("head -c 300 /dev/zero", "must say a line and wait"),
        ("sleep 9", "was not ready after 0.5 seconds"),
        ("echo \0", "null character"),
    ],
)
def test_what_is_no_command_that_waits(small, command, why):
    said = small.begin(command, timeout=0.5)
    assert not said.ok and why in said.text and not small.waits()
    assert small.call("read", {"path": "a.txt"}).text == "one\n"


def test_it_is_bounded_as_any_other(small):
    assert small.begin("echo ready; exec sleep 30").ok
    late = small.tell("x" * 1_000_000, timeout=0.5)
    assert not late.ok and late.end_reason == "more than 0.5 seconds"
    assert small.begin("echo ready; cat > /dev/null; sleep 30 & exit 0").ok
    assert small.tell("x").end_reason == "1 process that outlived the call"
    assert small.begin("echo ready; exec 0<&-; sleep 0.05; exit 3").ok
    assert small.tell("x" * 1_000_000).exit == 3, "nobody reads"


def test_one_that_has_ended_waits_no_more(small):
    assert small.begin("echo ready; exit 0").ok
    until = time.monotonic() + 5
    while small.waits() and time.monotonic() < until:
        time.sleep(0.01)
    assert not small.waits()


def test_in_a_sandbox_that_is_closed_nothing_waits(start):
    sandbox = start({})
    assert sandbox.begin("echo ready; exec cat").ok
    sandbox.close()
    assert (
        not sandbox.waits()
        and "closed" in (sandbox.tell("x").end_reason or "")
        and "closed" in (sandbox.begin("true").end_reason or "")
    )
