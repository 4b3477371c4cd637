"""Control tokens: which tokens of a vocabulary they are, and how a chat is tokenised in which only the template may
write them.

A tokenizer.json lists its *added tokens*. Those with `"special": true` are control tokens. Many others are as well:
`<think>` and `<tool_call>` of Qwen3, `<｜User｜>` of DeepSeek, `<|fim_prefix|>` of Qwen2.5-Coder, and every token that
`add_tokens` adds, stand there with `"special": false`. The remaining added tokens are ordinary text that is worth a
token of its own: runs of spaces or newlines, HTML tags in Gemma.

transformers tokenises a rendered chat as a whole, so a file that spells `<|im_end|>` ends the turn there. Here the ids
are those of the tokenizer for the rendered text, with one exception: what a message spells is text.
"""

import copy
import json
import re
import weakref
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
from jaxtyping import Bool

__all__ = ["MARK", "ChatTokenizer", "chat_tokenizer", "control_tokens", "without_options"]

MARK = "\ufdd0"
"""Unicode reserves this code point for internal use: it is no character. A chat that holds it is refused."""

BRACKETED = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
ELEMENT = re.compile(r"</?(?!s>)[A-Za-z_][\w-]*>")
"""An opening or closing tag; `<s>` and `</s>` begin and end a document."""
HTML = frozenset(
    "a abbr article aside b blockquote body br button caption center code col colgroup dd del details "
    "div dl dt em figcaption figure"
    " footer form h1 h2 h3 h4 h5 h6 head header hr html i img input ins kbd label li link main mark "
    "meta nav ol optgroup option p pre q"
    " samp script section select small span strong style sub summary sup table tbody td template "
    "textarea tfoot th thead title tr u ul"
    " var video".split()
)
"""Elements whose tags are ordinary text, where a vocabulary has them as added tokens that are not special."""


def is_control(token) -> bool:
    """Whether an added token is a control token: a special one of at least two characters, or one in brackets that is
    no HTML tag."""
    name = token.content
    if token.special:
        return len(name) > 1
    return BRACKETED.fullmatch(name) is not None and name.strip("</>") not in HTML


def control_tokens(tokenizer) -> list:
    """The control tokens among the added tokens of a `tokenizers.Tokenizer`."""
    return [token for token in tokenizer.get_added_tokens_decoder().values() if is_control(token)]


def without_options(tokenizer, as_text: bool):
    """A copy that truncates nothing, pads nothing and adds nothing before or after a text. `as_text`: whether a control
    token in a text is read as plain text."""
    twin = copy.deepcopy(tokenizer)
    twin.no_truncation()
    twin.no_padding()
    twin.encode_special_tokens, twin.post_processor = as_text, None
    if as_text and (plain_tokens := [token for token in control_tokens(twin) if not token.special]):
        twin.add_special_tokens([rename_token(token, token.content, special=True) for token in plain_tokens])
    return twin


def rename_token(token, name: str, special: bool):
    """An added token that is matched as `token` is, under another name."""
    from tokenizers import AddedToken

    flags = {flag: getattr(token, flag) for flag in ("single_word", "lstrip", "rstrip")}
    return AddedToken(name, special=special, normalized=token.normalized and name == token.content, **flags)


class ChatTokenizer:
    """The tokenizer of a checkpoint, for rendered chats."""

    def __init__(self, tokenizer):
        """`tokenizer`: a `tokenizers.Tokenizer`, which stays as it is. Raises ValueError if it has no control
        tokens."""
        self.tokens = {token.content: token for token in control_tokens(tokenizer)}
        if not self.tokens:
            raise ValueError("the tokenizer must have control tokens, to end a turn")
        self.plain_tokenizer = without_options(tokenizer, as_text=False)
        self.control = compile_alternatives(self.tokens)
        """Matches every control token."""
        self.tags = frozenset(
            name for name in self.tokens if ELEMENT.fullmatch(name) and partner_tag(name) in self.tokens
        )
        """Tokens that open and close something: `<think>` and `</think>`. They end no turn, and an assistant's own text
        may spell them: to write one is to generate it."""
        self.ends = self.reserved = compile_alternatives(self.tokens.keys() - self.tags)
        """Matches the control tokens that may end a turn; the same ones are text where an assistant's words spell
        them."""

    @cached_property
    def placeholders(self) -> dict[str, str]:
        """For each control token, two characters that no text holds."""
        return {name: MARK + chr(0x100000 + number) for number, name in enumerate(self.tokens)}

    @cached_property
    def split(self):
        """A twin to which control tokens are text, and their placeholders are tokens; and the control token's id for
        the placeholder's."""
        twin = without_options(self.plain_tokenizer, as_text=True)
        twin.add_tokens(
            [rename_token(self.tokens[name], place, special=False) for name, place in self.placeholders.items()]
        )
        return twin, {twin.token_to_id(place): twin.token_to_id(name) for name, place in self.placeholders.items()}

    @cached_property
    def has_escapes(self) -> bool:
        """Whether JSON writes a control token otherwise than it is."""
        return any(json.dumps(name, ensure_ascii=False) != f'"{name}"' for name in self.tokens)

    def encode(
        self, text: str, own: Bool[np.ndarray, " C"], spelled: Sequence[tuple[int, int]] = ()
    ) -> tuple[list[int], list[bool]]:
        """Ids of a text of C characters, and whether the first character of each is `own`. The control tokens
        text[start:end] of `spelled` are read as text. Raises ValueError if the tokenizer cannot do so."""
        if not spelled:
            encoding = self.plain_tokenizer.encode(text, add_special_tokens=False)
            return encoding.ids, mark_own_tokens(encoding.offsets, own)
        ranges, pieces, flags, offset = set(spelled), [], [], 0
        for token in self.control.finditer(text):
            if token.span() not in ranges:
                pieces += [text[offset : token.start()], self.placeholders[token[0]]]
                flags += [own[offset : token.start()], own[[token.start()] * 2]]
                offset = token.end()
        text_tokenizer, ids = self.split
        encoding = text_tokenizer.encode("".join([*pieces, text[offset:]]), add_special_tokens=False)
        if control_ids := {*encoding.ids} & {*ids.values()}:
            raise ValueError(
                f"it spells {text_tokenizer.id_to_token(min(control_ids))!r}, which this tokenizer cannot read as text"
            )
        return (
            [ids.get(token_id, token_id) for token_id in encoding.ids],
            mark_own_tokens(encoding.offsets, np.concatenate([*flags, own[offset:]])),
        )


def mark_own_tokens(offsets: Sequence[tuple[int, int]], own: Bool[np.ndarray, " C"]) -> list[bool]:
    """For each token whether its first character is `own`."""
    if not offsets:
        return []
    return own[np.minimum([first for first, _ in offsets], len(own) - 1)].tolist()


def compile_alternatives(names: Iterable[str]) -> re.Pattern:
    """Matches the longest of `names` that begins at a place; nothing if there are none."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")


def partner_tag(name: str) -> str:
    """The closing tag of an opening one, and the other way round."""
    return "<" + name[2:] if name[1] == "/" else "</" + name[1:]


TOKENIZER_CACHE: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
"""Tokenizer → (size of its vocabulary, ChatTokenizer)."""


def chat_tokenizer(tokenizer) -> ChatTokenizer:
    """The `ChatTokenizer` of a `tokenizers.Tokenizer`, made once for each and again after tokens were added to it.
    Raises ValueError as that does."""
    size, reader = TOKENIZER_CACHE.get(tokenizer, (None, None))
    if reader is None or size != tokenizer.get_vocab_size():
        reader = ChatTokenizer(tokenizer)
        TOKENIZER_CACHE[tokenizer] = tokenizer.get_vocab_size(), reader
    return reader
