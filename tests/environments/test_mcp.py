"""The Model Context Protocol: what a line means in either age of it, what is never said, and an episode whose calls a
client makes."""

import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.harness import mcp as module
from environments.harness.episode import Budget
from environments.harness.mcp import HANDSHAKE, STATELESS, McpPolicy, Protocol, ToolRequest
from environments.harness.record import read
from environments.harness.tools import TOOLS, mcp, select_tools
from kit.settings import RunError
from tests.environments.test_episode import Paper, episode

META = "io.modelcontextprotocol/"
NOW = {f"{META}protocolVersion": STATELESS[0], f"{META}clientCapabilities": {}}
"""What a request says of itself since 2026-07-28."""


def protocol(begun=True):
    found = Protocol(select_tools([*TOOLS]), "Write it.", "1.0")
    if begun:
        found.handle_line(line("initialize", protocolVersion=HANDSHAKE[0]))
    return found


def line(method, number=1, meta=None, /, **params):
    whole = params | ({"_meta": meta} if meta is not None else {})
    return json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": whole}).encode() + b"\n"


def said(answer):
    """The one message in a line."""
    assert answer.endswith(b"\n") and answer.count(b"\n") == 1
    found = json.loads(answer)
    assert found["jsonrpc"] == "2.0" and ("result" in found) != ("error" in found)
    return found


@pytest.mark.parametrize(
    ("asked", "agreed"),
    [
        *((one, one) for one in HANDSHAKE),
        ("2025-03-26", "2024-11-05"),
        ("2024-01-01", HANDSHAKE[0]),
        (STATELESS[0], HANDSHAKE[0]),
    ],
)
def test_a_version_is_agreed_on(asked, agreed):
    """That of the client where it is known, else our newest one of those that have a handshake."""
    found = said(
        protocol(False).handle_line(
            line("initialize", protocolVersion=asked, capabilities={}, clientInfo={"name": "c", "version": "1"})
        )
    )
    assert (
        found["id"] == 1
        and found["result"]["protocolVersion"] == agreed
        and found["result"]["serverInfo"] == {"name": "etude", "version": "1.0"}
    )
    assert (
        found["result"]["capabilities"] == {"tools": {}, "prompts": {}}
        and found["result"]["instructions"] == "Write it."
    )


def test_a_session_by_hand():
    one = protocol(False)
    assert said(one.handle_line(line("ping", "a"))) == {"jsonrpc": "2.0", "id": "a", "result": {}}
    assert said(one.handle_line(line("tools/list")))["error"]["code"] == -32602, "nobody has agreed on a version"
    one.handle_line(line("initialize", protocolVersion="2025-06-18"))
    assert one.handle_line(b'{"jsonrpc": "2.0", "method": "notifications/initialized"}\n') is None
    tools = said(one.handle_line(line("tools/list", 2)))
    assert tools == {"jsonrpc": "2.0", "id": 2, "result": {"tools": mcp(select_tools([*TOOLS]))}}
    asked = one.handle_line(line("tools/call", 3, name="read", arguments={"path": "a"}))
    assert asked == ToolRequest(3, "read", {"path": "a"}, False) and one.handle_line(
        line("tools/call", 3, name="list")
    ) == ToolRequest(3, "list", {}, False)
    content = [{"type": "text", "text": "é\nü"}]
    assert said(one.answer(asked, "é\nü", False)) == {
        "jsonrpc": "2.0",
        "id": 3,
        "result": {"content": content, "isError": True},
    }
    assert said(one.handle_line(line("prompts/list")))["result"]["prompts"][0]["name"] == "task"
    assert said(one.handle_line(line("prompts/get", name="task")))["result"]["messages"][0]["content"] == {
        "type": "text",
        "text": "Write it.",
    }


def test_requests_that_name_their_version_need_no_session():
    """Each says what it is, and so does each result; nothing is remembered from one to the next."""
    one = protocol(False)
    found = said(one.handle_line(line("server/discover", "d", NOW)))["result"]
    assert found["supportedVersions"] == [*STATELESS, *HANDSHAKE] and found["capabilities"] == {
        "tools": {},
        "prompts": {},
    }
    assert found["instructions"] == "Write it." and found["cacheScope"] == "private" and found["ttlMs"] > 0
    listed = said(one.handle_line(line("tools/list", 2, NOW)))["result"]
    asked = one.handle_line(line("tools/call", 3, NOW, name="list"))
    assert (
        listed["tools"] == mcp(select_tools([*TOOLS]))
        and listed["ttlMs"] > 0
        and asked == ToolRequest(3, "list", {}, True)
    )
    for result in (found, listed, said(one.answer(asked, "", True))["result"]):
        assert result["resultType"] == "complete" and result["_meta"] == {
            f"{META}serverInfo": {"name": "etude", "version": "1.0"}
        }
    for method in ("ping", "initialize"):
        assert said(one.handle_line(line(method, 4, NOW, protocolVersion=HANDSHAKE[0])))["error"]["code"] == -32601, (
            "they are gone"
        )
    assert said(one.handle_line(line("tools/list", 5)))["error"]["code"] == -32602
    for version in ("1900-01-01", HANDSHAKE[0]):
        error = said(one.handle_line(line("tools/list", 6, NOW | {f"{META}protocolVersion": version})))["error"]
        assert error["code"] == -32022 and error["data"] == {
            "supported": [*STATELESS, *HANDSHAKE],
            "requested": version,
        }


WRONG = [
    (b"{nope", -32700, None),
    (b'{"a": NaN}', -32700, None),
    (b'\xff{"jsonrpc": "2.0"}', -32700, None),
    (b"[" * 100_000, -32700, None),
    (b"[]", -32600, None),
    (b'[{"jsonrpc": "2.0", "id": 1, "method": "ping"}]', -32600, None),
    (b"3", -32600, None),
    (b'{"jsonrpc": "2.0", "id": null, "method": "ping"}', -32600, None),
    (b'{"jsonrpc": "2.0", "id": true, "method": "ping"}', -32600, None),
    (b'{"jsonrpc": "2.0", "id": 1.5, "method": "ping"}', -32600, None),
    (b'{"jsonrpc": "1.0", "id": 7, "method": "ping"}', -32600, 7),
    (b'{"jsonrpc": "2.0", "id": 7}', -32600, 7),
    (b'{"jsonrpc": "2.0", "id": 7, "method": 3}', -32600, 7),
    (b'{"jsonrpc": "2.0", "id": 7, "method": "ping", "params": [1]}', -32602, 7),
    (line("resources/list", 7), -32601, 7),
    (line("nothing", 7), -32601, 7),
    (line("nothing", 7, NOW), -32601, 7),
    (line("tools/call", 7, name="fly"), -32602, 7),
    (line("tools/call", 7, name=3), -32602, 7),
    (line("tools/call", 7, name="read", arguments=["a"]), -32602, 7),
    (line("tools/list", 7, cursor="next"), -32602, 7),
    (line("prompts/get", 7, name="other"), -32602, 7),
    (line("initialize", 7), -32602, 7),
    (line("server/discover", 7), -32602, 7),
    (line("ping", 7, 3), -32602, 7),
    (line("tools/list", 7, {f"{META}protocolVersion": STATELESS[0]}), -32602, 7),
    (line("tools/list", 7, NOW | {f"{META}protocolVersion": 3}), -32602, 7),
]


@pytest.mark.parametrize(("bytes_", "code", "name"), WRONG, ids=range(len(WRONG)))
def test_errors_of_the_protocol(bytes_, code, name):
    error = said(protocol().handle_line(bytes_))
    assert error["error"]["code"] == code and error["id"] == name and error["error"]["message"].isprintable()


def test_what_is_never_answered():
    """Notifications, whatever they say, and answers to what nobody asked."""
    for message in (
        {"method": "notifications/cancelled", "params": 3},
        {"method": "tools/call"},
        {"id": 1, "result": {}},
        {"id": 1, "error": {}},
    ):
        assert protocol().handle_line(json.dumps({"jsonrpc": "2.0", **message}).encode()) is None


VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.text() | st.floats(), st.lists, max_leaves=4)
METHODS = st.sampled_from([*sorted(module.METHODS), "notifications/x"]) | VALUES
PARAMS = (
    st.dictionaries(
        st.sampled_from(["name", "arguments", "cursor", "protocolVersion", "_meta"]), VALUES | st.just(NOW), max_size=4
    )
    | VALUES
)
MESSAGES = st.fixed_dictionaries(
    {}, optional={"jsonrpc": st.just("2.0") | VALUES, "id": VALUES, "method": METHODS, "params": PARAMS}
)


@settings(max_examples=60)
@given(MESSAGES.map(json.dumps).map(str.encode) | st.binary(max_size=40), st.booleans())
def test_whatever_is_written_is_answered_once_or_not_at_all(written, begun):
    """A request under its own id, and nothing without one but what cannot be read."""
    found = protocol(begun).handle_line(written)
    try:
        message = json.loads(written)
    except ValueError:
        message = None
    if isinstance(found, ToolRequest):
        assert found.name in TOOLS and message is not None and found.id == message["id"]
    elif found is not None:
        answer = said(found)
        whole = (
            isinstance(message, dict)
            and type(message.get("id")) in (str, int)
            and "NaN" not in str(written)
            and "Infinity" not in str(written)
        )
        assert answer["id"] == (message["id"] if whole else None) and (
            "result" in answer or answer["error"]["code"] in range(-32768, -31999)
        )


def played(path, *lines, sandbox=Paper, **more):
    """An episode with a client that says these lines and goes; what it hears, and the transcript."""
    writer = io.BytesIO()
    door = McpPolicy(Protocol(select_tools([*TOOLS]), "Write it.", "1.0"), io.BytesIO(b"".join(lines)), writer)
    game, journal = episode(path, door, sandbox=sandbox, **more)
    game.on_line = door.on_line
    tree = game.play()
    door.outlast()
    return [*map(said, writer.getvalue().splitlines(keepends=True))], read(path), Paper.trees[tree]


HELLO = line("initialize", 0, protocolVersion="2025-11-25")


def call(number, tool, **arguments):
    return line("tools/call", number, name=tool, arguments=arguments)


def test_a_client_s_calls_are_turns(tmp_path):
    """Each is answered in order, in one turn of the transcript, until it finishes; what comes then is answered and not
    made."""
    calls = [
        call(1, "write", path="a", text="1"),
        call(2, "read", path="no"),
        call(3, "read", path=3),
        line("ping", 4),
        call(5, "finish", message="x"),
    ]
    heard, lines, tree = played(
        tmp_path / "t", HELLO, b"\n", *calls, call(6, "write", path="a", text="2"), line("ping", 7)
    )
    assert tree == {"a": "1"} and [one["id"] for one in heard] == [*range(8)]
    texts = {
        one["id"]: (one["result"]["content"][0]["text"], one["result"]["isError"])
        for one in heard
        if "content" in one["result"]
    }
    assert texts == {
        1: ("wrote it", False),
        2: ("there is nothing\n[exit code 3]", True),
        3: ("path of read must be text; got 3", True),
        5: ("the episode is over", False),
        6: ("the episode is over; this call was not made", True),
    }
    replies = [one for one in lines if one["kind"] == "reply"]
    assert [one["calls"][0]["name"] for one in replies] == ["write", "read", "read", "finish"] and lines[-1][
        "why"
    ] == "finish"
    assert (
        len({one["calls"][0]["id"] for one in replies}) == 4
        and [one.get("broken", False) for one in lines if one["kind"] == "answer"][2]
    )


def test_a_client_that_goes_has_finished(tmp_path):
    """Also one that says half a message last, and one that hears nothing any more."""
    heard, lines, tree = played(tmp_path / "t", HELLO, call(1, "write", path="a", text="1"), b'{"jsonrpc": "2.')
    assert tree == {"a": "1"} and lines[-1]["why"] == "finish" and heard[-1]["error"]["code"] == -32700
    assert "has closed the connection" in [one for one in lines if one["kind"] == "reply"][-1]["calls"][0]["arguments"]
    door = McpPolicy(Protocol(select_tools([*TOOLS]), "", "1.0"), io.BytesIO(HELLO + call(1, "list")), io.BytesIO())
    door.writer.close()
    assert door.reply([], select_tools([*TOOLS]), 9).calls[0].name == "list"
    door.on_line({"kind": "turn"})
    assert door.reply([], select_tools([*TOOLS]), 9).calls[0].name == "finish"


def test_what_the_harness_says_reaches_the_client(tmp_path):
    """A tree that cannot be stored is none of the call's own answer."""

    class Full(Paper):
        def snapshot(self):
            if self.files:
                raise RunError("a FIFO lies there")
            return super().snapshot()

    heard, _, tree = played(tmp_path / "t", HELLO, call(1, "write", path="a", text="1"), sandbox=Full)
    result = heard[1]["result"]
    assert (
        result["isError"] and "wrote it\n[The work tree cannot be stored" in result["content"][0]["text"] and tree == {}
    )


def test_budgets_end_it_and_ids_go_on(tmp_path):
    heard, lines, _ = played(
        tmp_path / "t", HELLO, call(1, "list"), call(2, "list"), call(3, "list"), budget=Budget(turns=2)
    )
    assert lines[-1]["why"] == "2 turns" and [one["result"].get("isError") for one in heard[1:]] == [False, False, True]
    door = McpPolicy(
        Protocol(select_tools([*TOOLS]), "", "1.0"), io.BytesIO(HELLO + call(1, "list")), io.BytesIO(), reply_count=2
    )
    assert door.reply([], select_tools([*TOOLS]), 9).calls[0].id == "call-3"


def test_a_message_that_is_too_long_is_refused_and_the_next_one_heard(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LARGEST", 200)
    long = [call(1, "write", path="a", text="x" * size) for size in (300, 5000)]
    heard, _, tree = played(tmp_path / "t", HELLO, *long, call(2, "read", path="a"))
    assert [one.get("error", {}).get("code") for one in heard] == [None, -32600, -32600, None] and tree == {}
