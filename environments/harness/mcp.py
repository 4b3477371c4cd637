"""The tools over the Model Context Protocol, on two streams: whoever speaks it works on a task as a policy would.

JSON-RPC 2.0, one message a line. Two ages of the protocol are spoken, since clients of both are about. From 2026-07-28
on every request names its version and what its client can do in `_meta`, and `server/discover` tells what there is.
Before, `initialize` agreed on a version for all that follows. Batches are refused, as every version but 2025-03-26
wants it, and that one is not agreed on. What is wrong with a message is an error of JSON-RPC; what is wrong with a call
of a tool is a result with `isError`, which the client's model reads.

`Protocol` is what a line means and what is said to it, without a stream. `McpPolicy` is the policy (see messages.py):
its next reply is the client's next call, and the client hears the answer once the turn stands in the transcript.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from environments.harness.messages import Called, Message, Reply
from environments.harness.tools import Tool, mcp
from kit.disk import parse_json

__all__ = ["HANDSHAKE", "LARGEST", "STATELESS", "ToolRequest", "McpPolicy", "Protocol"]

STATELESS = ("2026-07-28",)
"""Versions that each request names, newest first."""
HANDSHAKE = ("2025-11-25", "2025-06-18", "2024-11-05")
"""Versions that `initialize` agrees on, newest first. Not 2025-03-26, the only one whose servers must take batches: a
call is answered behind its turn, so the calls of a batch have no common answer."""
META = "io.modelcontextprotocol/"
"""What names of the protocol's own fields in `_meta` begin with."""
NO_JSON, NO_REQUEST, NO_METHOD, BAD_PARAMS, NO_VERSION = -32700, -32600, -32601, -32602, -32022
LARGEST = 16 << 20
"""Bytes of a message."""
FRESH = {"ttlMs": 3_600_000, "cacheScope": "private"}
"""How long a client may remember what there is, in milliseconds, and that it is for it alone."""
OVER = "the episode is over; this call was not made"
METHODS = {"initialize", "ping", "server/discover", "tools/list", "tools/call", "prompts/list", "prompts/get"}
STATEFUL_METHODS = {"initialize", "ping"}
"""Methods that stateless versions do not have."""


@dataclass(frozen=True)
class ToolRequest:
    """A call that a client waits for."""

    id: str | int
    name: str
    arguments: Mapping[str, object]
    stateless: bool
    """Whether it came in a request that names its version."""


class Refused(Exception):
    """An error of JSON-RPC."""

    def __init__(self, code: int, says: str, data: object = None) -> None:
        super().__init__(says)
        self.error = {"code": code, "message": says} | ({"data": data} if data is not None else {})


def line_of(message: Mapping[str, object]) -> bytes:
    return json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n"


class Protocol:
    """`prompt`: what the client's model is asked, which it gets as instructions and as a prompt called `task`.
    `version`: of this server."""

    def __init__(self, tools: Sequence[Tool], prompt: str, version: str) -> None:
        self.tools, self.prompt, self.initialized = {tool.name: tool for tool in tools}, prompt, False
        self.about = {"name": "etude", "version": version}
        self.able = {"capabilities": {"tools": {}, "prompts": {}}, "instructions": prompt}

    def handle_line(self, line: bytes) -> ToolRequest | bytes | None:
        """What a line asks for, if it is a call; else the line that answers it, or None where nothing is to be said."""
        request_id = None
        try:
            message = message_of(line)
            if "id" in message:
                if type(message["id"]) not in (str, int):
                    raise Refused(NO_REQUEST, "the id of a request must be text or a whole number")
                request_id = message["id"]
            method, params = message.get("method"), message.get("params", {})
            if method is None and ("result" in message or "error" in message):
                return None  # nothing was asked of the client
            if message.get("jsonrpc") != "2.0" or not isinstance(method, str):
                raise Refused(NO_REQUEST, 'a message must have "jsonrpc": "2.0" and a method')
            if request_id is None:
                return None  # of notifications, none asks for anything here
            if not isinstance(params, dict):
                raise Refused(BAD_PARAMS, "params must be an object, with a name for each")
            stateless = self._stateless(params)
            if method not in METHODS or stateless and method in STATEFUL_METHODS:
                raise Refused(NO_METHOD, f"there is no method {method[:100]!r}")
            if method == "tools/call":
                return self._call(request_id, params, stateless)
            result = self._result(method, params, stateless)
        except Refused as error:
            return line_of({"id": request_id, "error": error.error})
        return self._encode_result(request_id, result, stateless)

    def answer(self, request: ToolRequest, text: str, good: bool) -> bytes:
        """The line that answers a call."""
        return self._encode_result(
            request.id, {"content": [{"type": "text", "text": text}], "isError": not good}, request.stateless
        )

    def _encode_result(self, request_id: str | int | None, result: dict, stateless: bool) -> bytes:
        envelope = {"resultType": "complete", "_meta": {f"{META}serverInfo": self.about}} if stateless else {}
        return line_of({"id": request_id, "result": result | envelope})

    def _stateless(self, params: Mapping) -> bool:
        """Whether a request names its version, as it must where nobody has agreed on one."""
        meta = params.get("_meta", {})
        if not isinstance(meta, dict):
            raise Refused(BAD_PARAMS, "_meta must be an object")
        version = meta.get(f"{META}protocolVersion")
        if version is None:
            return False
        if not isinstance(version, str) or not isinstance(meta.get(f"{META}clientCapabilities"), dict):
            raise Refused(
                BAD_PARAMS, f"_meta needs {META}protocolVersion, a text, and {META}clientCapabilities, an object"
            )
        if version not in STATELESS:
            data = {"supported": [*STATELESS, *HANDSHAKE], "requested": version[:100]}
            raise Refused(NO_VERSION, "Unsupported protocol version", data)
        return True

    def _check_agreement(self, stateless: bool) -> None:
        if not stateless and not self.initialized:
            raise Refused(BAD_PARAMS, f"_meta needs {META}protocolVersion, or initialize must come first")

    def _call(self, request_id: str | int, params: Mapping, stateless: bool) -> ToolRequest:
        self._check_agreement(stateless)
        tool, arguments = params.get("name"), params.get("arguments", {})
        if not isinstance(tool, str) or not isinstance(arguments, dict):
            raise Refused(BAD_PARAMS, "a call needs a name, a text, and arguments, an object")
        if tool not in self.tools:
            raise Refused(BAD_PARAMS, f"there is no tool {tool[:100]!r}; there are {', '.join(self.tools)}")
        return ToolRequest(request_id, tool, arguments, stateless)

    def _result(self, method: str, params: Mapping, stateless: bool) -> dict:
        if method == "ping":
            return {}
        if method == "initialize":
            version = params.get("protocolVersion")
            if not isinstance(version, str):
                raise Refused(BAD_PARAMS, "initialize needs protocolVersion, a text")
            self.initialized = True
            # a client of an unknown version knows those before it
            older = (candidate for candidate in HANDSHAKE if candidate <= version)
            return {"protocolVersion": next(older, HANDSHAKE[0]), "serverInfo": self.about, **self.able}
        if method == "server/discover" and not stateless:
            raise Refused(BAD_PARAMS, f"_meta needs {META}protocolVersion")
        self._check_agreement(stateless)
        fresh = FRESH if stateless else {}
        if method == "server/discover":
            return {"supportedVersions": [*STATELESS, *HANDSHAKE], **self.able, **fresh}
        if method == "prompts/get":
            if params.get("name") != "task":
                raise Refused(BAD_PARAMS, "there is one prompt, task")
            return {"messages": [{"role": "user", "content": {"type": "text", "text": self.prompt}}]}
        if params.get("cursor") is not None:
            raise Refused(BAD_PARAMS, "there is no such cursor: the first page is the only one")
        if method == "prompts/list":
            return {"prompts": [{"name": "task", "description": "What is asked."}], **fresh}
        return {"tools": mcp([*self.tools.values()]), **fresh}


def message_of(line: bytes) -> dict:
    """The object in a line. Raises Refused for what is none."""
    if len(line) > LARGEST:
        raise Refused(NO_REQUEST, f"a message must have at most {LARGEST >> 20} MiB")
    try:
        message = parse_json(line.decode(), parse_constant=no_number)
    except (ValueError, RecursionError):
        raise Refused(NO_JSON, "the line is no JSON in UTF-8") from None
    if isinstance(message, list):
        raise Refused(NO_REQUEST, "batches are not part of the protocol: send one message a line")
    if not isinstance(message, dict):
        raise Refused(NO_REQUEST, "a message must be an object")
    return message


def no_number(name: str) -> None:
    """NaN and infinities, which Python would read. Raises ValueError."""
    raise ValueError(f"{name} is no JSON")


class McpPolicy:
    """A policy whose replies are a client's calls, one in each; when the client has gone, it finishes. `reply_count`:
    how many replies came before, in an episode that goes on. An episode tells it every line of its transcript
    (`told`)."""

    def __init__(self, protocol: Protocol, reader: BinaryIO, writer: BinaryIO, reply_count: int = 0) -> None:
        self.protocol, self.reader, self.writer, self.reply_count = protocol, reader, writer, reply_count
        self.waits: ToolRequest | None = None
        self.text, self.good = "", False

    def reply(self, messages: Sequence[Message], tools: Sequence[Tool], max_tokens: int) -> Reply:
        """See `Policy`. Waits for the client, and answers what is no call."""
        self.waits, self.reply_count = self._next_call(), self.reply_count + 1
        name = f"call-{self.reply_count}"
        if self.waits is None:
            return Reply(
                "", (Called(name, "finish", json.dumps({"message": "The client has closed the connection."})),)
            )
        return Reply("", (Called(name, self.waits.name, json.dumps(self.waits.arguments)),))

    def on_line(self, line: Mapping[str, object]) -> None:
        """Hears a line of the transcript, and answers the client at the end of a turn."""
        if line["kind"] == "answer":
            self.text, self.good = str(line["text"]), bool(line["ok"])
        elif line["kind"] == "nudge":
            self.text, self.good = f"{self.text}\n[{line['text']}]".strip(), False
        elif line["kind"] == "turn" and self.waits is not None:
            self._write_line(self.protocol.answer(self.waits, self.text, self.good))
            self.waits = None

    def outlast(self) -> None:
        """Goes on answering when the episode is over, until the client has gone. No call is made any more."""
        while (request := self._next_call()) is not None:
            self._write_line(self.protocol.answer(request, OVER, False))

    def _next_call(self) -> ToolRequest | None:
        """The next call; None where the client has gone."""
        while line := self.reader.readline(LARGEST + 1):
            remainder = line
            while len(line) > LARGEST and remainder and not remainder.endswith(b"\n"):
                remainder = self.reader.readline(LARGEST)  # of a line that is too long, the end is read and forgotten
            if not line.strip():
                continue
            call_or_answer = self.protocol.handle_line(line)
            if isinstance(call_or_answer, ToolRequest):
                return call_or_answer
            if call_or_answer is not None:
                self._write_line(call_or_answer)
        return None

    def _write_line(self, line: bytes) -> None:
        try:
            self.writer.write(line)
            self.writer.flush()
        except (OSError, ValueError):
            pass  # it does not listen any more; its end of the other stream will close, too
