"""A policy behind an OpenAI-compatible address: POST …/chat/completions, with tools.

Nothing is assumed of a server but the answer's form. Where it tells them, log-probs, token ids and counts of tokens are kept. vLLM gives ids to who
asks with `return_token_ids`, llama.cpp beside the log-probs; servers that do not know these fields ignore them or are asked again without them.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from environments.harness.messages import Called, Message, PolicyError, Reply
from environments.harness.tools import Tool, openai
from environments.sandbox.visible import one_line
from kit.disk import parse_json

__all__ = ["Remote", "message_of"]

TRIES, WAIT, LONGEST = 5, 1.0, 30.0
"""Times that a request is made, seconds before the second one, which double, and the most of them."""
AGAIN = (408, 409, 425, 429, 500, 502, 503, 504, 529)
"""Statuses behind which the same request may succeed."""
LARGEST = 64 << 20
"""Bytes of an answer."""


class _Straight(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: it would take the key to another host."""

    def redirect_request(self, *_: object) -> None:
        return None


OPENER = urllib.request.build_opener(_Straight)
EXTRAS = {"logprobs": True, "return_token_ids": True}
"""Fields that some servers do not know."""


class Remote:
    """`address`: that of the API, such as http://localhost:8000/v1. `key`: sent as a bearer token. `sampling`: further fields of each request, such
    as temperature and seed. `choice`: "required" where each reply must call a tool, if the server can hold it to that. `seconds`: that a server may
    say nothing. `told`: hears why a request is made again."""

    def __init__(
        self,
        address: str,
        model: str,
        key: str = "",
        sampling: Mapping[str, object] | None = None,
        strict: bool = False,
        choice: Literal["auto", "required"] = "auto",
        seconds: float = 600.0,
        told: Callable[[str], None] = lambda why: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Raises ValueError for an address that is none."""
        if not address.startswith(("http://", "https://")) or any(letter <= " " for letter in address):
            raise ValueError(f"{address!r} is no address of a model: it begins with http:// or https://, as in http://localhost:8000/v1")
        if not all("!" <= letter <= "~" for letter in key.strip()):
            raise ValueError("the key of the model holds what no header may hold; set OPENAI_API_KEY to the key alone")
        key = key.strip()
        self.address, self.model, self.key, self.strict, self.choice = address.rstrip("/"), model, key, strict, choice
        self.sampling, self.seconds, self.told, self.sleep = dict(sampling or {}), seconds, told, sleep
        self.extras = dict(EXTRAS)

    def reply(self, messages: Sequence[Message], tools: Sequence[Tool], most: int) -> Reply:
        """See `Policy`. Raises PolicyError for a server that cannot be reached, refuses, or says what is no answer, after a few tries."""
        asked = {"model": self.model, "messages": [message_of(one) for one in messages], "max_tokens": most}
        if tools:
            asked |= {"tools": openai(tools, self.strict), "tool_choice": self.choice}
        asked |= self.sampling
        why = ""
        for number in range(TRIES):
            if number:
                pause = min(LONGEST, WAIT * 2 ** (number - 1))
                self.told(f"{self._without_key(why)}; asked again in {pause:g} s")
                self.sleep(pause)
            try:
                return read(self._ask({**asked, **self.extras}))
            except urllib.error.HTTPError as error:
                why = f"{self.address} answers {error.code}: {_body(error)}"
                if error.code in (400, 422) and self.extras:
                    self.extras = {}  # perhaps it does not know them
                elif error.code not in AGAIN:
                    break
            except (OSError, http.client.HTTPException, ValueError) as error:
                why = f"{self.address}: {one_line(str(getattr(error, 'reason', error))) or type(error).__name__}"
        raise PolicyError(self._without_key(why))

    def _without_key(self, text: str) -> str:
        """A server may say what it was sent."""
        return text.replace(self.key, "…") if self.key else text

    def _ask(self, asked: Mapping[str, object]) -> bytes:
        headers = {"Content-Type": "application/json", "User-Agent": "etude"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        request = urllib.request.Request(f"{self.address}/chat/completions", json.dumps(asked).encode(), headers)
        with OPENER.open(request, timeout=self.seconds) as answer:
            data = answer.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise ValueError(f"the answer has more than {LARGEST >> 20} MiB")
        return data


def _body(error: urllib.error.HTTPError) -> str:
    """What a server says of a refusal, in one line, if it does."""
    try:
        with error:
            return one_line(error.read(1000).decode(errors="replace"))
    except (OSError, http.client.HTTPException):
        return "nothing"


def _object(arguments: str) -> str:
    """Arguments as a server reads them in a history: what is no JSON object would be refused, with all that follows."""
    try:
        if isinstance(parse_json(arguments), dict):
            return arguments
    except (ValueError, RecursionError):
        pass
    return json.dumps({"written": arguments})


def message_of(one: Message) -> dict:
    """A message as chat completions have it."""
    if one.role == "tool":
        return {"role": "tool", "tool_call_id": one.answers, "content": one.text}
    found: dict = {"role": one.role, "content": one.text}
    if one.calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _object(call.arguments)}} for call in one.calls
        ]
    return found


def read(data: bytes) -> Reply:
    """The reply in an answer of chat completions. Raises ValueError for what is none; a broken call is part of a reply."""
    try:
        said = parse_json(data)
        choice = said["choices"][0]
        message = choice["message"]
        text = message.get("content") or ""
        if isinstance(text, list):  # parts
            text = "".join(part.get("text", "") for part in text if isinstance(part, dict))
        calls = tuple(_called(number, one) for number, one in enumerate(message.get("tool_calls") or ()))
        usage = said.get("usage") or {}
        if not isinstance(text, str):
            raise TypeError("content")
        return Reply(
            text,
            calls,
            _count(usage, "prompt_tokens"),
            _count(usage, "completion_tokens"),
            _ids(choice.get("token_ids")) or _ids([one.get("id") for one in _rows(choice.get("logprobs"))]),
            _logprobs(choice.get("logprobs")),
            _ids(said.get("prompt_token_ids")),
            choice.get("finish_reason") == "length",
        )
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        words = one_line(data[:200].decode(errors="replace"))
        raise ValueError(f"the answer is none of chat completions ({type(error).__name__}): {words}") from None


def _called(number: int, one: dict) -> Called:
    """A call; a server that gives it no id, or arguments as an object, is forgiven."""
    function = one["function"]
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps({} if arguments is None else arguments)
    return Called(str(one.get("id") or f"call-{number}"), str(function.get("name") or ""), arguments)


def _count(usage: object, name: str) -> int | None:
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if type(value) is int and value >= 0 else None


def _ids(found: object) -> tuple[int, ...] | None:
    return tuple(found) if isinstance(found, list) and found and all(type(one) is int for one in found) else None


def _rows(found: object) -> list[dict]:
    """What an answer says of each sampled token."""
    rows = found.get("content") if isinstance(found, dict) else None
    return rows if isinstance(rows, list) and all(isinstance(row, dict) for row in rows) else []


def _logprobs(found: object) -> tuple[float, ...] | None:
    values = [row.get("logprob") for row in _rows(found)]
    if not values:
        return None
    return tuple(map(float, values)) if all(isinstance(one, int | float) and not isinstance(one, bool) for one in values) else None  # pyright: ignore
