"""Where the words of a chat stand in the text that a chat template renders, and which of them the template leaves out.

A template may drop a role, a thought, a call or a tool's answer without an error, and most published ones drop
something. The rendered text alone does not tell: a lost "ok" may stand in another message as well. So the chat is
rendered a second time, with a mark in every part of every message. Without its marks that text must be the first one.
Each mark then says where its part stands, and the text around it is compared.

    part      a content, a thought, the name of a function, the name or the value of an argument
    mark      MARK, the number of the part, MARK; behind the first letter of the part
    MARK²     (two) in control tokens that a message spells, behind their first character

A part is complete where it stands as it is, trimmed, with other white space, or escaped as JSON or Python write
strings. Numbers, booleans and null cannot hold a mark and are looked for in the text of their call. A template may
write arguments by position and leave out all their names. The `name` of a message and the ids of calls address a
message; they are not among its words.
"""

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ref.control_tokens import MARK, ChatTokenizer

__all__ = ["ChatPart", "Place", "Traced", "Words"]

MARKS = re.compile(rf"(?:{MARK}|\\{{1,16}}ufdd0)(\d{{0,9}})(?:{MARK}|\\{{1,16}}ufdd0)")
"""A mark as it is, or escaped."""
RESERVED = re.compile("[\ufdd0-\ufdd2]")
"""What a chat may not hold: `MARK`, and the marks of `{% generation %}` (`recipe/small/chat_template.py`)."""
LETTER = re.compile(r"<[^<>\s]*>|\[[^\[\]\s]*\]|([^\W_])")
"""A tag, which templates look for and a mark would hide, or a letter or digit outside of tags."""
THOUGHT = "</think>"
"""Ends a thought that is written into a content."""
ESCAPES: tuple[Callable[[str], str], ...] = (
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text)[1:-1],
    lambda text: repr(text)[1:-1],
    lambda text: json.dumps(json.dumps(text, ensure_ascii=False), ensure_ascii=False)[3:-3],
)
KINDS = {"name": "function", "arguments": "value"}
NAMES = {
    "content": "its content",
    "thought": "its thought",
    "function": "the function's name",
    "key": "an argument's name",
    "value": "an argument",
}


class ChatPart(NamedTuple):
    """A text of a message, or a number, boolean or null of a call."""

    message: int
    """Number of the message, from 0."""
    kind: str
    """A key of `NAMES`."""
    text: str
    call: int = -1
    """Number of the call, from 0; −1 outside of calls."""
    mark_offset: int | None = None
    """Where the mark stands; None for what can hold no mark. Its `text` is then as JSON writes it."""

    @property
    def answer(self) -> int:
        """Where a content goes on behind its thought; 0 where it has none."""
        return find_answer(self.text) if self.kind == "content" else 0


def find_answer(text: str) -> int:
    """Where a content goes on behind its thought; 0 where it has none."""
    return text.rfind(THOUGHT) + len(THOUGHT) if THOUGHT in text else 0


def mark_position(text: str, control: re.Pattern | None) -> int:
    """Behind the first letter outside of tags and control tokens, in the answer if there is one; before its first
    character if there is none. `control`: None for a text without control tokens."""
    start = find_answer(text)
    start = start if text[start:].strip() else 0
    token_spans = [token.span() for token in control.finditer(text, start)] if control else []
    for match in LETTER.finditer(text, start):
        if match[1] and not any(a < match.end() < b for a, b in token_spans):
            return match.end()
    return skip_space(text, start)


class Place(NamedTuple):
    """A range of the rendered text in which a part stands, or a piece of it."""

    start: int
    end: int
    letter: int
    """Where the character stands that has the mark."""
    first: int = 0
    """The part's first character there that is no white space; 0 if the part stands there from its beginning."""
    stop: int | None = None
    """The part's character that would come next and does not; None if the part stands there up to its end."""

    @property
    def complete(self) -> bool:
        return not self.first and self.stop is None


def locate_part(part: ChatPart, text: str, mark: int) -> Place:
    """The place of a part in a text, around the position of its mark."""
    assert part.mark_offset is not None
    part_text, stripped_text = part.text, part.text.strip()
    stripped_offset = part.mark_offset - skip_space(part_text, 0)
    letter = mark - (part.mark_offset > 0 and part_text[part.mark_offset - 1].isalnum())
    for form, offset in ((part_text, part.mark_offset), (stripped_text, stripped_offset)):
        if mark >= offset and text.startswith(form, mark - offset):
            return Place(mark - offset, mark - offset + len(form), letter)
    for escape in ESCAPES:
        form = MARKS.sub(MARK, escape(stripped_text[:stripped_offset] + MARK * 2 + stripped_text[stripped_offset:]))
        offset, form = form.index(MARK), form.replace(MARK, "")
        if mark >= offset and text.startswith(form, mark - offset):
            return Place(mark - offset, mark - offset + len(form), letter)
    (first, start), (stop, end) = (
        walk_back(part_text, part.mark_offset, text, mark),
        walk_on(part_text, part.mark_offset, text, mark),
    )
    return Place(start, end, letter, first, stop)


def walk_back(words: str, first: int, text: str, start: int) -> tuple[int, int]:
    """From words[:first] and text[:start] back as far as they are alike: 0, or where the words differ, and where the
    text does. White space may differ in kind and length, and beside a tag it may be missing."""
    while True:
        word_index, text_index = skip_space_back(words, first), skip_space_back(text, start)
        if not word_index:
            return 0, start
        is_alike = (
            (word_index < first) == (text_index < start)
            or words[word_index - 1] == ">"
            or words[first : first + 1] == "<"
        )
        if not (text_index and is_alike and words[word_index - 1] == text[text_index - 1]):
            return first, start
        first, start = word_index - 1, text_index - 1


def walk_on(words: str, stop: int, text: str, end: int) -> tuple[int | None, int]:
    """As `walk_back`, from words[stop:] and text[end:] on; None where the words end."""
    while True:
        word_index, text_index = skip_space(words, stop), skip_space(text, end)
        if word_index == len(words):
            return None, end
        is_alike = (
            (word_index > stop) == (text_index > end) or words[stop - 1 : stop] == ">" or words[word_index] == "<"
        )
        if not (text_index < len(text) and is_alike and words[word_index] == text[text_index]):
            return word_index, end
        stop, end = word_index + 1, text_index + 1


def skip_space_back(text: str, index: int) -> int:
    """Where text[:at] ends without the white space at its end."""
    while index and text[index - 1].isspace():
        index -= 1
    return index


def skip_space(text: str, index: int) -> int:
    """Where text[at:] begins without the white space at its beginning."""
    while index < len(text) and text[index].isspace():
        index += 1
    return index


@dataclass
class Traced:
    """A rendered text, and what of it is the messages'."""

    text: str
    places: dict[int, list[Place]] = field(default_factory=dict)
    """Number of a part → where it stands."""
    spelled: list[tuple[int, int]] = field(default_factory=list)
    """Ranges of control tokens that messages and tools spell."""
    names: bool = True
    """Whether the names of functions and arguments have marks."""


class Words:
    """The parts of a chat."""

    parts: list[ChatPart]

    def __init__(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], reader: ChatTokenizer):
        """`messages` and `tools`: as the template reads them. Raises ValueError for a text that holds a reserved code
        point."""
        self.reader, self.messages, self.parts = reader, messages, []
        chat_json = json.dumps([messages, tools], ensure_ascii=False)
        if match := RESERVED.search(chat_json):
            raise ValueError(f"a text holds U+{ord(match[0]):X}, which is no character")
        self.may_spell_control = reader.has_escapes or reader.control.search(chat_json) is not None
        """Whether a text may spell a control token."""
        self.marked_messages = [self.mark_message(number, message) for number, message in enumerate(messages)]
        self.marked_tools = [spell(tool, reader.control) for tool in tools] if self.may_spell_control else tools

    def mark_message(self, number: int, message: dict[str, Any]) -> dict[str, Any]:
        """A message with marks in its parts, which are added to `parts`, and in the control tokens that it spells."""
        marked_message = dict(message)
        for key, kind in (("content", "content"), ("reasoning_content", "thought")):
            if isinstance(message.get(key), str):
                marked_message[key] = self.mark(number, kind, message[key])
        if calls := message.get("tool_calls"):
            marked_message["tool_calls"] = [
                item
                | {
                    "function": {
                        key: self.mark(number, KINDS[key], value, call) for key, value in item["function"].items()
                    }
                }
                for call, item in enumerate(calls)
            ]
        if not self.may_spell_control:
            return marked_message
        control = self.reader.reserved if message["role"] == "assistant" else self.reader.control
        return {key: value if key == "role" else spell(value, control) for key, value in marked_message.items()}

    def mark(self, message: int, kind: str, value: Any, call: int = -1) -> Any:
        """A value with marks in its parts, which are added to `parts`."""
        if isinstance(value, dict):
            return {
                self.mark(message, "key", key, call): self.mark(message, kind, item, call)
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self.mark(message, kind, item, call) for item in value]
        if not isinstance(value, str):
            self.parts.append(ChatPart(message, kind, json.dumps(value), call))
        elif value.strip():
            offset = mark_position(value, self.reader.control if self.may_spell_control else None)
            self.parts.append(ChatPart(message, kind, value, call, offset))
            return f"{value[:offset]}{MARK}{len(self.parts) - 1}{MARK}{value[offset:]}"
        return value

    def trace(self, render: Callable[..., tuple[str, Any]], count: int, text: str) -> Traced:
        """Where the parts of the first `count` messages stand in `text`, which `render` makes of them. Raises
        ValueError where the template writes another text once the words have marks."""
        if (traced := self.compare(render, self.marked_messages[:count], text)) is not None:
            return traced
        names = {number for number, part in enumerate(self.parts) if part.kind in ("function", "key")}
        # Templates may look names up in the tools
        unmarked_messages = [unmark(message, names) for message in self.marked_messages[:count]]
        if (traced := self.compare(render, unmarked_messages, text)) is not None:
            traced.names = False
            return traced
        for number in range(count):
            if (
                self.compare(
                    render,
                    [*self.messages[:number], unmarked_messages[number], *self.messages[number + 1 : count]],
                    text,
                )
                is None
            ):
                raise ValueError(
                    f"message {number + 1}: the chat template decides by the spelling of its words, so "
                    f"their place cannot be told"
                )
        raise ValueError(
            "the chat template decides by the spelling of the tools or of several messages, so the "
            "place of their words cannot be told"
        )

    def compare(self, render: Callable[..., tuple[str, Any]], marked: list[dict[str, Any]], text: str) -> Traced | None:
        """The places of the marks; None if the template makes another text of them, or refuses them."""
        try:
            marked_text, _ = render(marked, self.marked_tools, False)
        except ValueError:
            return None
        pieces, marks, offset, length = [], [], 0, 0
        for mark in MARKS.finditer(marked_text):
            pieces.append(marked_text[offset : mark.start()])
            length += len(pieces[-1])
            marks.append((mark[1], length))
            offset = mark.end()
        if "".join([*pieces, marked_text[offset:]]) != text:
            return None
        traced = Traced(text)
        for number, mark in marks:
            if number:
                traced.places.setdefault(int(number), []).append(locate_part(self.parts[int(number)], text, mark))
            elif token := self.reader.control.match(text, mark - 1):
                traced.spelled.append(token.span())
        return traced

    def check(self, traced: Traced, count: int, turns: dict[int, tuple[int, int]]) -> set[int]:
        """The messages, of the first `count`, whose thought is not in the text, because a template leaves it out of
        earlier turns. `turns`: the ranges of the turns to learn, by the numbers of their messages. Raises ValueError,
        by the number of the message, for every other part that is missing, for one of a turn that stands outside of its
        range, and for one that stands in a turn of another message."""
        thoughtless: set[int] = set()
        calls: dict[tuple[int, int], list[int]] = {}
        firsts, order = [turns[message][0] for message in sorted(turns)], sorted(turns)
        tokens = [token.span() for token in self.reader.control.finditer(traced.text)]
        for number, part in enumerate(self.parts):
            if part.message >= count:
                break
            places, counted_places = traced.places.get(number, []), []
            for place in places:
                index = bisect_right(firsts, place.letter) - 1
                owner = order[index] if index >= 0 and place.letter < turns[order[index]][1] else None
                if owner is not None and owner != part.message:
                    description = f"{NAMES[part.kind]} into the turn of message {owner + 1}"
                    raise ValueError(f"message {part.message + 1}: the chat template writes {description}")
                if owner is not None or part.message not in turns:
                    counted_places.append(place)
                if place.complete and (token := find_crossing_token(tokens, place)) is not None:
                    word = traced.text[slice(*token)]
                    raise ValueError(
                        f"message {part.message + 1}: {NAMES[part.kind]} and the text beside it spell {word!r} together"
                    )
            if part.call >= 0:
                calls.setdefault((part.message, part.call), []).append(number)
            elif not any(place.complete for place in counted_places):
                is_earlier_turn = part.message not in turns and self.messages[part.message]["role"] == "assistant"
                has_answer = not part.text[part.answer :].strip() or any(
                    place.first <= part.answer and place.stop is None for place in counted_places
                )
                if not (is_earlier_turn and (part.kind == "thought" or part.answer and has_answer)):
                    raise ValueError(describe_loss(part, places, counted_places))
                thoughtless.add(part.message)
        for (message, _), numbers in calls.items():
            self.check_call(numbers, traced, turns.get(message))
        return thoughtless

    def check_whole(self, traced: Traced, message: int) -> None:
        """Raises ValueError unless the content and the thought of a message stand in the text."""
        for number, part in enumerate(self.parts):
            places = traced.places.get(number, [])
            if part.message == message and part.call < 0 and not any(place.complete for place in places):
                raise ValueError(describe_loss(part, [], places))

    def check_call(self, numbers: list[int], traced: Traced, turn: tuple[int, int] | None) -> None:
        """Raises ValueError unless a call stands in the text, in the range of its turn if that is learned. All names of
        its arguments may be missing, where a template writes them by position."""
        start, end = turn or (0, len(traced.text))
        places_by_part = {
            number: [place for place in traced.places.get(number, []) if start <= place.letter < end]
            for number in numbers
        }
        missing = [
            self.parts[number] for number in numbers if not any(place.complete for place in places_by_part[number])
        ]
        if unmarked := [
            part for part in missing if part.mark_offset is None or not traced.names and part.kind != "value"
        ]:
            start = min((place.start for places in places_by_part.values() for place in places), default=start)
            later_starts = (
                place.start for number, places in traced.places.items() if number > numbers[-1] for place in places
            )
            text = traced.text[
                start : min((later_start for later_start in later_starts if start < later_start < end), default=end)
            ]
            written_parts = [part for part in unmarked if is_written(part, text, unmarked)]
            missing = [part for part in missing if part not in written_parts]
        if not missing:
            return
        keys = [self.parts[number] for number in numbers if self.parts[number].kind == "key"]
        is_positional = all(part in missing for part in keys)
        for part in missing:
            if part.kind != "key" or not is_positional:
                number = next(part_number for part_number in numbers if self.parts[part_number] is part)
                raise ValueError(describe_loss(part, traced.places.get(number, []), places_by_part[number]))


def find_crossing_token(tokens: list[tuple[int, int]], place: Place) -> tuple[int, int] | None:
    """The range, among those of `tokens`, that has the beginning or the end of a place inside of it; None if there is
    none."""
    for border in (place.start, place.end):
        index = bisect_left(tokens, (border, 0)) - 1
        if index >= 0 and tokens[index][1] > border:
            return tokens[index]
    return None


def describe_loss(part: ChatPart, places: list[Place], inside: list[Place]) -> str:
    """Why a part cannot be learned from; `inside`: those of its places that count."""
    if any(place.complete for place in places):
        return f"message {part.message + 1}: the chat template writes {NAMES[part.kind]} outside of its turn"
    words, offset = part.text, 0
    if inside:
        place = max(inside, key=lambda place: place.end - place.start)
        offset = skip_space_back(words, place.first) - 1 if place.first else place.stop or 0
    start = (
        max((index + 1 for index in range(offset) if words[index].isspace()), default=0)
        if inside
        else skip_space(words, 0)
    )
    word = words[start:].split(maxsplit=1)[0]
    word = word if len(word) <= 40 else word[:39] + "…"
    return f"message {part.message + 1}: the chat template leaves out {NAMES[part.kind]}: {word!r}"


def is_written(part: ChatPart, text: str, unmarked: list[ChatPart]) -> bool:
    """Whether a part without a mark stands in the text of its call: a name, or a number, boolean or null as JSON or
    Python writes it, as often as among the parts without marks."""
    if part.mark_offset is not None:
        return any(form in text for form in (part.text, *(escape(part.text) for escape in ESCAPES)))
    form = {"true": "[Tt]rue", "false": "[Ff]alse", "null": "null|[Nn]one"}.get(part.text, re.escape(part.text))
    return len(re.findall(rf"(?<![\w.])(?:{form})(?!\w|\.\d)", text)) >= unmarked.count(part)


def spell(value: Any, control: re.Pattern) -> Any:
    """The same JSON, with two `MARK`s in every control token that a text in it spells."""
    if isinstance(value, str):
        return control.sub(lambda token: token[0][0] + MARK * 2 + token[0][1:], value)
    if isinstance(value, dict):
        return {spell(key, control): spell(item, control) for key, item in value.items()}
    return [spell(item, control) for item in value] if isinstance(value, list) else value


def unmark(value: Any, numbers: set[int]) -> Any:
    """The same JSON without the marks of `numbers`."""
    if isinstance(value, str):
        return MARKS.sub(lambda mark: "" if mark[1] and int(mark[1]) in numbers else mark[0], value)
    if isinstance(value, dict):
        return {unmark(key, numbers): unmark(item, numbers) for key, item in value.items()}
    return [unmark(item, numbers) for item in value] if isinstance(value, list) else value
