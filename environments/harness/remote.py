"""A policy behind an OpenAI-compatible address: POST …/chat/completions, with tools.

Nothing is assumed of a server but the answer's form. Where it tells them, log-probs, token ids and counts of tokens are
kept. vLLM gives ids to who asks with `return_token_ids`, llama.cpp beside the log-probs; servers that do not know these
fields ignore them or are asked again without them.

Servers differ in what they refuse. A refusal that names a field of ours is answered by leaving that field out, or by
its other name, for as long as the policy lives. One that names none may have another cause, so the next request has all
fields again. What is sent fits the strictest templates: no two messages of the user stand together, and none of the
assistant is empty.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from environments.deadline import Answer, fetch_answer
from environments.harness.messages import Called, Message, PolicyError, Reply, thoughts_in
from environments.harness.tools import Tool, openai
from environments.sandbox.visible import one_line
from kit.disk import parse_json

__all__ = ["Form", "Remote", "conversation", "message_of"]

TRIES, WAIT, LONGEST = 5, 1.0, 30.0
"""Times that a request is made, seconds before the second one, which double, and the most of them."""
RETRY_STATUSES = (408, 409, 425, 429, 500, 502, 503, 504, 529)
"""Statuses behind which the same request may succeed."""
REFUSED = (400, 422)
"""Statuses of a request that the server does not like as it is."""
LARGEST = 64 << 20
"""Bytes of an answer."""
WORDS = 4000
"""Bytes of a refusal in which a field is looked for."""
LIMITS = ("max_tokens", "max_completion_tokens")
"""Names of the limit on a reply. Models that think refuse the first."""
PATIENCE = 2
"""Replies, one after the other, that came only without the extras: then they are not asked for any more."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: it would take the key to another host."""

    def redirect_request(self, *_: object) -> None:
        return None


EXTRAS = {"logprobs": True, "return_token_ids": True}
"""Fields that some servers do not know."""


@dataclass(frozen=True)
class Form:
    """How a server's template wants a conversation."""

    without_system: bool = False
    """What the system says is the user's."""
    alternating: bool = False
    """The user and replies without calls take turns, as if nothing stood between them: what the user says behind
    answers of tools, such as a request for a summary, stands in the last of these."""


class Remote:
    """`address`: that of the API, such as http://localhost:8000/v1. `key`: sent as a bearer token. `sampling`: further
    fields of each request, such as temperature and seed; None for a field that is not to be sent. `choice`: "required"
    where each reply must call a tool, if the server can hold it to that. `seconds`: in which a whole answer must have
    come. `on_retry`: hears why a request is made again."""

    def __init__(
        self,
        address: str,
        model: str,
        key: str = "",
        sampling: Mapping[str, object] | None = None,
        strict: bool = False,
        choice: Literal["auto", "required"] = "auto",
        seconds: float = 600.0,
        on_retry: Callable[[str], None] = lambda reason: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Raises ValueError for an address that is none."""
        if not address.startswith(("http://", "https://")) or any(letter <= " " for letter in address):
            raise ValueError(
                f"{address!r} is no address of a model: it begins with http:// or https://, as in "
                f"http://localhost:8000/v1"
            )
        if not all("!" <= letter <= "~" for letter in key.strip()):
            raise ValueError("the key of the model holds what no header may hold; set OPENAI_API_KEY to the key alone")
        key = key.strip()
        self.address, self.model, self.key, self.strict, self.choice = address.rstrip("/"), model, key, strict, choice
        self.sampling, self.seconds, self.on_retry, self.sleep = dict(sampling or {}), seconds, on_retry, sleep
        self.extras = dict(EXTRAS)
        self.limit = LIMITS["max_completion_tokens" in self.sampling and "max_tokens" not in self.sampling]
        self.form = Form()
        self.bare_replies = 0

    def reply(self, messages: Sequence[Message], tools: Sequence[Tool], max_tokens: int) -> Reply:
        """See `Policy`. Raises PolicyError for a server that cannot be reached, refuses, or says what is no answer,
        after a few tries."""
        previous = dict(self.extras), self.limit, self.form
        failures, bare, adapted = 0, False, set[str]()
        while True:
            change = ""
            try:
                extras = {} if bare else self.extras
                answer = self._send({**self._request(messages, tools, max_tokens), **extras})
                if answer.status == 200:
                    reply = read(answer.data)
                    self._count_bare(bare)
                    return reply
                error_text = (
                    f"{self.address} answers {answer.status}: "
                    f"{one_line(answer.data[:1000].decode(errors='replace')) or 'nothing'}"
                )
                if answer.status in REFUSED:
                    change = self._adapt(answer.data[:WORDS].decode(errors="replace"), adapted)
                    if not change and (bare or not self.extras):
                        break
                    if change:
                        self.on_retry(f"{self._without_key(error_text)}; asked again {change}")
                        continue
                    bare, change = True, f", without {' and '.join(self.extras)}"
                elif answer.status not in RETRY_STATUSES:
                    break
            except (OSError, http.client.HTTPException, ValueError) as error:
                error_text = f"{self.address}: {one_line(str(getattr(error, 'reason', error))) or type(error).__name__}"
            failures += 1
            if failures == TRIES:
                break
            pause = min(LONGEST, WAIT * 2 ** (failures - 1))
            self.on_retry(f"{self._without_key(error_text)}; asked again in {pause:g} s{change}")
            self.sleep(pause)
        self.extras, self.limit, self.form = previous  # none of it has helped
        raise PolicyError(self._without_key(error_text))

    def _request(self, messages: Sequence[Message], tools: Sequence[Tool], max_tokens: int) -> dict[str, object]:
        """The fields of a request, without the extras."""
        fields: dict[str, object] = {"model": self.model, "messages": conversation(messages, self.form)}
        if tools:
            fields |= {"tools": openai(tools, self.strict), "tool_choice": self.choice}
        limits = [self.sampling[name] for name in LIMITS if name in self.sampling]
        if limits != [None]:
            fields[self.limit] = min([max_tokens, *(value for value in limits if isinstance(value, int))])
        return fields | {
            name: value for name, value in self.sampling.items() if name not in LIMITS and value is not None
        }

    def _adapt(self, words: str, adapted: set[str]) -> str:
        """Changes what a refusal names, each once in a reply; says how, or nothing. `adapted`: what was changed
        before."""
        lower = words.lower()
        for name in [name for name in self.extras if name in lower]:
            del self.extras[name]
            return f"without {name}, from now on"
        other_limit = LIMITS[self.limit == LIMITS[0]]
        if self.limit in lower and "limit" not in adapted:
            adapted.add("limit")
            self.limit = other_limit
            return f"with {other_limit}, from now on"
        if "system" in lower and "role" in lower and not self.form.without_system:
            self.form = replace(self.form, without_system=True)
            return "with what the system says in the user's first message, from now on"
        if "alternat" in lower and not self.form.alternating:
            self.form = replace(self.form, alternating=True)
            return "with what the user says behind answers of tools in the last of them, from now on"
        return ""

    def _count_bare(self, bare: bool) -> None:
        """Counts replies that came only without the extras, and gives these up when there is no other cause to be
        seen."""
        self.bare_replies = self.bare_replies + 1 if bare else 0
        if self.bare_replies == PATIENCE and self.extras:
            self.on_retry(f"{self.address} answers only without {' and '.join(self.extras)}: not asked for any more")
            self.extras = {}

    def _without_key(self, text: str) -> str:
        """A server may say what it was sent."""
        return text.replace(self.key, "…") if self.key else text

    def _send(self, fields: Mapping[str, object]) -> Answer:
        headers = {"Content-Type": "application/json", "User-Agent": "etude"} | (
            {"Authorization": f"Bearer {self.key}"} if self.key else {}
        )
        request = urllib.request.Request(f"{self.address}/chat/completions", json.dumps(fields).encode(), headers)
        return fetch_answer(request, self.seconds, LARGEST, _NoRedirects())


def _encode_object(arguments: str) -> str:
    """Arguments as a server reads them in a history: what is no JSON object would be refused, with all that follows."""
    try:
        if isinstance(parse_json(arguments), dict):
            return arguments
    except (ValueError, RecursionError):
        pass
    return json.dumps({"written": arguments})


def message_of(message: Message) -> dict:
    """A message as chat completions have it."""
    if message.role == "tool":
        return {"role": "tool", "tool_call_id": message.answers, "content": message.text}
    fields: dict = {"role": message.role, "content": message.text, **(message.thoughts or {})}
    if message.calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _encode_object(call.arguments)},
            }
            for call in message.calls
        ]
    return fields


def conversation(messages: Sequence[Message], form: Form = Form()) -> list[dict]:
    """Messages as chat completions have them, for templates that want roles to alternate: what the user says in a row
    is one message, and a reply with neither a text nor a call is left out."""
    rows: list[dict] = []
    for message in messages:
        if message.role == "assistant" and not message.text and not message.calls:
            continue
        role = "user" if message.role == "system" and form.without_system else message.role
        last = rows[-1]["role"] if rows else ""
        if role == "user" and (last == "user" or last == "tool" and form.alternating):
            rows[-1]["content"] += f"\n\n{message.text}"
        else:
            rows.append(message_of(replace(message, role=role)))
    return rows


def read(data: bytes) -> Reply:
    """The reply in an answer of chat completions. Raises ValueError for what is none; a broken call is part of a
    reply."""
    try:
        response = parse_json(data)
        choice = response["choices"][0]
        message = choice["message"]
        text = message.get("content") or ""
        if isinstance(text, list):  # parts
            text = "".join(part.get("text") or "" for part in text if isinstance(part, dict))
        calls = tuple(_parse_call(number, call) for number, call in enumerate(message.get("tool_calls") or ()))
        usage = response.get("usage") or {}
        if not isinstance(text, str):
            raise TypeError("content")
        return Reply(
            text,
            calls,
            _read_count(usage, "prompt_tokens"),
            _read_count(usage, "completion_tokens"),
            _read_ids(choice.get("token_ids"))
            or _read_ids([row.get("id") for row in _logprob_rows(choice.get("logprobs"))]),
            _read_logprobs(choice.get("logprobs")),
            _read_ids(response.get("prompt_token_ids")),
            choice.get("finish_reason") == "length",
            thoughts_in(message),
        )
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        words = one_line(data[:200].decode(errors="replace"))
        raise ValueError(f"the answer is none of chat completions ({type(error).__name__}): {words}") from None


def _parse_call(number: int, call: dict) -> Called:
    """A call; a server that gives it no id, or arguments as an object, is forgiven."""
    function = call["function"]
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps({} if arguments is None else arguments)
    return Called(str(call.get("id") or f"call-{number}"), str(function.get("name") or ""), arguments)


def _read_count(usage: object, name: str) -> int | None:
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if type(value) is int and value >= 0 else None


def _read_ids(tokens: object) -> tuple[int, ...] | None:
    return (
        tuple(tokens) if isinstance(tokens, list) and tokens and all(type(token) is int for token in tokens) else None
    )


def _logprob_rows(logprobs: object) -> list[dict]:
    """What an answer says of each sampled token."""
    rows = logprobs.get("content") if isinstance(logprobs, dict) else None
    return rows if isinstance(rows, list) and all(isinstance(row, dict) for row in rows) else []


def _read_logprobs(logprobs: object) -> tuple[float, ...] | None:
    values = [row.get("logprob") for row in _logprob_rows(logprobs)]
    if not values:
        return None
    return (
        tuple(map(float, values))  # pyright: ignore
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        else None
    )
