"""The chat format of a checkpoint from elsewhere: messages to tokens and back, by its own chat template.

    chat_format = TemplateFormat(tokenizer, render, tools)         `render`: the template, as `ref.sft.Render`
    ids = chat_format.encode_opening(messages)                      a context that begins with these messages
    message = chat_format.decode_turn(ids)                          what the policy wrote: thought, text, calls
    ids = chat_format.encode_answer(history, answers)               what follows its stop token

Rendering by differences. A policy's turn is never rendered again: its ids are those that were sampled. What follows it
is what the rendering of the whole conversation says behind the turn's stop token. That is exact only if the template
has left the messages before as they were, which is checked each time: the text before the turn, and which thoughts
stand there. Where it has rewritten them (Qwen3's drops the thoughts of earlier turns as soon as a user speaks),
`encode_answer` returns None, and a new context opens. For these renderings the policy's turns have placeholders as
words, with as many calls and thoughts: what a policy writes cannot make a template fail.

A template that cannot be used so is refused when the format is made, by name of what it does (`ChatFormatError`): one
that does not end turns with a control token, goes on otherwise than with its generation prompt, drops a word of a
message, or knows no tool calls.

    family    a call in the text                                                                template (example)
    hermes    <tool_call>{"name": …, "arguments": {…}}</tool_call>                              Qwen2.5, Qwen3, ChatML
                                                                                                of Hermes
    xml       <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call> Qwen3-Coder
    llama     {"name": …, "parameters": {…}}, the whole turn                                    Llama 3.1

Calls are looked for between control tokens where the tokenizer has them, not in text that spells them. A call that
cannot be read keeps its text as `arguments`, so the environment can answer it, and count it. A parameter of the xml
family is a text if its schema says so, and else JSON."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from ref.chat_words import RESERVED, Words
from ref.checks import parse_json
from ref.control_tokens import chat_tokenizer
from ref.messages import Message, ToolCall
from ref.sft import Render, end_of_turn

__all__ = ["ChatFormatError", "Family", "TemplateFormat", "parse_turn"]

Family = Literal["hermes", "xml", "llama"]
PROBE = ToolCall("look_up", {"word": "zebra"}, "callAAAA1")
"""A call that is rendered to see how a template writes calls."""
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": PROBE.name,
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
OPEN, CLOSE = "<tool_call>", "</tool_call>"
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)


class ChatFormatError(ValueError):
    """A chat template that cannot serve as a chat format, in one line that says why."""


class TemplateFormat:
    """A `ref.environment.ChatFormat`. `tokenizer`: a `tokenizers.Tokenizer`; `tools`: JSON schemas of the tools, which
    the template shows to the policy; `stop_ids`: further tokens that end a turn, such as those of a checkpoint's
    generation config. Raises ChatFormatError."""

    def __init__(
        self, tokenizer: Any, render: Render, tools: Sequence[dict[str, Any]] = (), stop_ids: Sequence[int] = ()
    ):
        self.tokenizer, self.render, self.tools = tokenizer, render, list(tools)
        self.types = parameter_types(self.tools)
        try:
            self.reader = chat_tokenizer(tokenizer)
            opening, reply = [Message("user", "What is it?")], Message("assistant", "A zebra.")
            stop_id = self._find_stop(opening, reply)
            self.stop_ids = (stop_id, *(token for token in dict.fromkeys(stop_ids) if token != stop_id))
            self.family: Family | None = self._find_family(opening) if tools else None
            if self.encode_answer([*opening, reply], [Message("user", "Why?")]) is None:
                raise ChatFormatError("rewrites a plain conversation when it goes on")
            if self.encode_opening(opening)[-1:] == [stop_id]:
                raise ChatFormatError("has no generation prompt")
        except ChatFormatError as error:
            raise ChatFormatError(f"the chat template cannot be used for rollouts: it {error}") from None
        except ValueError as error:
            raise ChatFormatError(f"the chat template cannot be used for rollouts: {error}") from None

    def encode_opening(self, messages: Sequence[Message]) -> list[int]:
        """See `ChatFormat`. Raises ValueError, by the number of the message, for one of which a word would be lost."""
        text, spelled, _ = self._render_prompt(messages)
        return self._encode_text(text, spelled)

    def encode_answer(self, history: Sequence[Message], messages: Sequence[Message]) -> list[int] | None:
        """See `ChatFormat`. Raises ValueError as `encode_opening`, but not for what the policy wrote."""
        turns = [make_placeholder(message) if message.role == "assistant" else message for message in history]
        before, _, _ = self._render_plain(turns[:-1])
        _, _, thoughtless = self._render_plain(turns)
        full_text, spelled, thoughtless_now = self._render_prompt([*turns, *messages])
        if not full_text.startswith(before) or thoughtless != {
            number for number in thoughtless_now if number < len(turns)
        }:
            return None
        offset = self._find_turn_end(full_text, len(before), spelled)
        return self._encode_text(
            full_text[offset:], [(start - offset, stop - offset) for start, stop in spelled if start >= offset]
        )

    def decode_turn(self, tokens: Sequence[int]) -> Message:
        """See `ChatFormat`."""
        return parse_turn(self._split_pieces(tokens), self.family, OPEN in self.reader.tokens, self.types)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, with control tokens as they are spelled."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=False)

    def encode_turn(self, history: Sequence[Message], message: Message) -> list[int]:
        """The tokens, without the stop token, with which a policy would write this message: for scripted policies and
        demonstrations. Raises ValueError as `encode_opening`."""
        before, _, _ = self._render_prompt(history)
        text, spelled, _ = self._render_plain([*history, message])
        if not text.startswith(before):
            raise ValueError("the template writes the turn otherwise than its generation prompt begins it")
        start = len(before)
        end = self._find_turn_end(text, start, spelled) - len(self._stop)
        return self._encode_text(
            text[start:end], [(first - start, last - start) for first, last in spelled if start <= first < end]
        )

    def _encode_text(self, text: str, spelled: list[tuple[int, int]]) -> list[int]:
        return self.reader.encode(text, np.zeros(len(text), dtype=bool), spelled)[0]

    def _render_plain(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]], set[int]]:
        """The text of some messages without a generation prompt, the control tokens in it that a message spells, and
        the messages whose thought is not in it. Raises ValueError."""
        plain = plain_messages(messages)
        text, _ = self.render(plain, self.tools, False)
        words = Words(plain, self.tools, self.reader)
        traced = words.trace(self.render, len(plain), text)
        return text, traced.spelled, words.check(traced, len(plain), {})

    def _render_prompt(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]], set[int]]:
        """The same with the generation prompt."""
        text, spelled, thoughtless = self._render_plain(messages)
        full_text, _ = self.render(plain_messages(messages), self.tools, True)
        if not full_text.startswith(text):
            raise ChatFormatError("does not go on with its generation prompt")
        return full_text, spelled, thoughtless

    def _find_turn_end(self, text: str, start: int, spelled: list[tuple[int, int]]) -> int:
        """Behind the stop token of the turn that begins at `start`. Raises ValueError."""
        ends = (
            token.end()
            for token in self.reader.control.finditer(text, start)
            if token[0] == self._stop and token.span() not in spelled
        )
        end = next(ends, None)
        if end is None:
            raise ValueError(f"the template ends this turn otherwise than with {self._stop}")
        return end

    def _find_stop(self, opening: list[Message], reply: Message) -> int:
        """The token with which a turn ends."""
        before, _, _ = self._render_plain(opening)
        text, spelled, _ = self._render_plain([*opening, reply])
        if not text.startswith(before):
            raise ChatFormatError("rewrites what was asked when it is answered")
        end = text[: end_of_turn(text, len(before), len(text), self.reader, spelled)]
        self._stop = next(name for name in sorted(self.reader.tokens, key=len, reverse=True) if end.endswith(name))
        return self.tokenizer.token_to_id(self._stop)

    def _find_family(self, opening: list[Message]) -> Family:
        """How the template writes calls."""
        call_message = Message("assistant", "", tool_calls=(PROBE,))
        probe = TemplateFormat.__new__(TemplateFormat)
        probe.__dict__.update(self.__dict__, tools=[PROBE_TOOL], family=None)
        try:
            tokens = probe.encode_turn(opening, call_message)
        except ValueError as error:
            raise ChatFormatError(f"does not write tool calls ({error})") from None
        pieces = probe._split_pieces(tokens)
        for family in ("hermes", "xml", "llama"):
            calls = parse_turn(pieces, family, OPEN in self.reader.tokens, parameter_types([PROBE_TOOL])).tool_calls
            if [(call.name, call.arguments) for call in calls] == [(PROBE.name, PROBE.arguments)]:
                break
        else:
            raise ChatFormatError(
                f"writes tool calls in no way that is known here: {''.join(text for _, text in pieces)[:80]!r}"
            )
        answer = Message("tool", "An animal.", tool_call_id=PROBE.id, name=PROBE.name)
        if probe.encode_answer([*opening, call_message], [answer]) is None:
            raise ChatFormatError("rewrites a call when it is answered")
        return family

    def _split_pieces(self, tokens: Sequence[int]) -> list[tuple[bool, str]]:
        """Tokens as texts: (whether it is a control token, its text)."""
        pieces: list[tuple[bool, str]] = []
        plain: list[int] = []
        names = {self.tokenizer.token_to_id(name): name for name in self.reader.tokens}

        def flush() -> None:
            if plain:
                pieces.append((False, self.tokenizer.decode(plain, skip_special_tokens=False)))
                plain.clear()

        for token in tokens:
            if token in names:
                flush()
                pieces.append((True, names[token]))
            else:
                plain.append(token)
        flush()
        return pieces


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates read them. Code points that mark words here (`ref/chat_words.py`) are no characters, and
    become U+FFFD."""
    return [_replace_reserved(message.plain()) for message in messages]


def _replace_reserved(value: Any) -> Any:
    if isinstance(value, str):
        return RESERVED.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_replace_reserved(key): _replace_reserved(item) for key, item in value.items()}
    return [_replace_reserved(item) for item in value] if isinstance(value, list) else value


def make_placeholder(turn: Message) -> Message:
    """A turn of the policy with other words: a text where it has one, a thought where it has one, and as many calls of
    the same ids."""
    calls = tuple(ToolCall(PROBE.name, PROBE.arguments, call.id) for call in turn.tool_calls)
    words = "A zebra." if turn.content and turn.content.strip() else turn.content
    return replace(turn, content=words, reasoning="Stripes." if turn.reasoning else "", tool_calls=calls)


Types = dict[tuple[str, str], str]
"""(tool, parameter) → its type in the tool's schema."""


def parameter_types(tools: Sequence[dict[str, Any]]) -> Types:
    """The types of all parameters that have one."""
    types: Types = {}
    for tool in tools:
        function = tool.get("function", tool)
        for name, schema in function.get("parameters", {}).get("properties", {}).items():
            if isinstance(schema, dict) and isinstance(schema.get("type"), str):
                types[function["name"], name] = schema["type"]
    return types


def parse_turn(
    pieces: Sequence[tuple[bool, str]], family: Family | None, has_tags: bool = True, types: Types | None = None
) -> Message:
    """The message of a turn: its thought, its text and its calls. A control token that means nothing here stays in the
    text. `has_tags`: whether the tags of calls are control tokens; `types`: of the tools' parameters."""
    text = "".join(text for _, text in pieces)
    thought = ""
    if "</think>" in text:
        thought, _, text = text.partition("</think>")
        thought = thought.removeprefix("<think>").strip("\n")
        pieces = _pieces_after(pieces, "</think>")
    calls: list[ToolCall] = []
    if family == "llama":
        call = _parse_json_call(text.removeprefix("<|python_tag|>"), "parameters")
        if call is not None:
            return Message("assistant", None, thought, (replace(call, id="call0"),))
        return Message("assistant", text.strip("\n"), thought)
    if family is not None:
        text_pieces, is_inside, body = [], False, ""
        for is_control, piece in pieces if has_tags else _split_tags(text):
            if piece == OPEN and is_control:
                is_inside, body = True, ""
            elif piece == CLOSE and is_control and is_inside:
                calls.append(_parse_call(body, family, len(calls), types or {}))
                is_inside = False
            elif is_inside:
                body += piece
            else:
                text_pieces.append(piece)
        if is_inside:  # a limit cut it off
            calls.append(_parse_call(body, family, len(calls), types or {}))
        text = "".join(text_pieces)
    text = text.strip("\n")
    return Message("assistant", None if calls and not text.strip() else text, thought, tuple(calls))


def _pieces_after(pieces: Sequence[tuple[bool, str]], tag: str) -> list[tuple[bool, str]]:
    """The pieces behind the first tag."""
    for index, (is_control, text) in enumerate(pieces):
        if tag in text:
            remainder = text.partition(tag)[2]
            return [*([(is_control, remainder)] if remainder else []), *pieces[index + 1 :]]
    return list(pieces)


def _split_tags(text: str) -> list[tuple[bool, str]]:
    """A text by the tags of calls, for families whose tags are no control tokens."""
    return [
        (piece in (OPEN, CLOSE), piece) for piece in re.split(f"({re.escape(OPEN)}|{re.escape(CLOSE)})", text) if piece
    ]


def _parse_call(body: str, family: Family, number: int, types: Types) -> ToolCall:
    """A call between its tags; one that cannot be read has its text as arguments."""
    call = _parse_json_call(body, "arguments") if family == "hermes" else _parse_xml_call(body, types)
    return replace(call or ToolCall("", body.strip()), id=f"call{number}")


def _parse_json_call(body: str, key: str) -> ToolCall | None:
    try:
        fields = parse_json(body.strip())
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or not isinstance(name := fields.get("name"), str):
        return None
    arguments = fields.get(key, fields.get("arguments", {}))
    return ToolCall(name, arguments if isinstance(arguments, dict) else json.dumps(arguments))


def _parse_xml_call(body: str, types: Types) -> ToolCall | None:
    match = FUNCTION.fullmatch(body)
    if match is None:
        return None
    tool = match[1]
    return ToolCall(
        tool, {name: _parse_value(value, types.get((tool, name), "")) for name, value in PARAMETER.findall(match[2])}
    )


def _parse_value(text: str, kind: str) -> Any:
    """The value of a parameter of this type: a text, or JSON; what is no JSON is a text."""
    try:
        return text if kind == "string" else parse_json(text)
    except (ValueError, RecursionError):
        return text
