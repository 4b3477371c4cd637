"""Supervised fine-tuning on conversations: which tokens are the assistant's, and the loss on them alone.

Paper: Composer 2 technical report (arXiv:2603.24477v2), §3.1: after the long-context phase, a short SFT phase on
targeted coding tasks.

    conversations → text, by the checkpoint's chat template → tokens and a mask → packed rows → loss → step

    L = −(1/n) Σ_{b,t} w_{b,t} log p(x_t | the tokens of its own context before it)      n = Σ w over the whole step

w is 1 on what the assistant wrote, and 0 elsewhere: on system text, users, tools' answers, and the template's own
words. A *context* is what the network saw when it wrote a turn. A chat usually is one context.

The traps
a. Where a turn stands in the text is only known from the template. Turn i is what rendering messages 0 … i adds to
   messages 0 … i−1 with the generation prompt. That needs the second text to begin with the first, which is checked; a
   chat in which it does not is refused, by the number of the message. A template that marks the assistant's text
   itself, with `{% generation %}`, is believed instead.
b. Templates look ahead: Qwen3's drops the thinking of earlier turns as soon as a user speaks again. The text of the
   whole chat is then not what the network saw at each turn. So a turn goes into the running context only if that is
   still the beginning of its text; otherwise it begins another context. Every turn is learned once, under the text that
   sampling would have had before it.
c. Tokens do not end where texts do: the newline of "assistant\\n" and one at the start of the content can be one token.
   A context is tokenised as it will be read, not message by message, and a token belongs to whoever wrote its first
   character.
d. The token that ends a turn is the assistant's. A policy that never learns it never stops. What a template writes
   behind it, a newline in ChatML, is not the assistant's: sampling ends before it.
e. A content that spells a control token (`<|im_end|>` in a file that the agent reads) is text. It may neither end a
   turn nor begin one. The ids are otherwise those that the checkpoint's tokenizer gives for the whole text
   (`ref/control_tokens.py`).
f. Only the count of the complete step may divide the loss; a micro-batch's own count gives tokens in sparse rows more
   weight.
g. A context longer than a row is cut behind its last turn that fits, never inside one, and dropped if none fits. Both
   are counted.
h. Templates leave out what they do not know, without an error: a role, a thought, a call, a tool's answer. A chat of
   which a word that is learned or answered is missing in the text is refused (`ref/chat_words.py`). So is a turn that
   would be learned without its words.

Where this file departs from the paper
1. The report names neither the format of its data nor its mask. Ours is OpenAI's: lines of JSON with `messages`,
   `tools` and tool calls, and `weight` 0 on an assistant message that gives context without being learned.
2. Only text is read. Contents with pictures or sound, and the older `function_call`, are refused by line.
3. Weights and optimisers are the recipe's (`ref/cpt.py`, `ref/muon.py`). The report trains MTP layers along in this
   phase; so does the recipe (`recipe/small/learner.py`), with the rows of this file.

Run it
    etude run recipe --scale small --set sft.conversations=FILE.jsonl       trains the SFT stage on a file
    etude export-sft runs/small --out FILE.jsonl                            writes the small recipe's demonstrations to
                                                                            one
    etude run recipe --scale full                                           scaled/sft.py, the same on many ranks

Glossary
    symbol      variable     shape      where
    x           ids          [B, T]     token ids of packed rows
    context     doc          [B, T]     numbered in each row, −1 for padding
    w           weight       [B, T]     1 on the assistant's tokens
    n           n_tokens     scalar     `count_learned`: of all micro-batches and ranks
    –           mask         [T]        w of a single context
"""

import contextlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ref.chat_words import Traced, Words
from ref.checks import parse_json
from ref.control_tokens import ChatTokenizer, chat_tokenizer
from ref.cpt import next_token_loss
from ref.cpt import pack as pack_documents
from ref.messages import Message, ToolCall
from ref.network import Transformer, load_balancing_loss

__all__ = [
    "Chat",
    "Message",
    "Render",
    "ToolCall",
    "fitted",
    "pack",
    "read_conversations",
    "count_learned",
    "sft_loss",
    "sft_step",
    "tokens_and_mask",
]

ROLES = ("system", "developer", "user", "assistant", "tool")
MESSAGE_KEYS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name", "weight")


@dataclass(frozen=True)
class Chat:
    """A conversation."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    """JSON schemas of the tools that the assistant may call."""


def read_conversations(path: str | Path) -> tuple[list[tuple[int, Chat]], list[str]]:
    """The chats of a JSONL file with the numbers of their lines, and "FILE:LINE: why" for each line that is not one;
    blank lines are passed over. Raises OSError if the file cannot be read."""
    chats, refused = [], []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    record = parse_json(line.decode("utf-8-sig" if number == 1 else "utf-8"))
                    json.dumps(record, ensure_ascii=False).encode()  # half a surrogate pair cannot be tokenised
                    chats.append((number, chat_of(record)))
                except (UnicodeError, json.JSONDecodeError, RecursionError) as error:
                    refused.append(f"{path}:{number}: not a line of JSON in UTF-8 ({error})")
                except ValueError as error:
                    refused.append(f"{path}:{number}: {error}")
    return chats, refused


def chat_of(record: Any) -> Chat:
    """A chat from its JSON. Raises ValueError that says which message is wrong, counted from 1, and why."""
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError('a conversation must be an object with a list "messages" that is not empty')
    tools = record.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError('"tools" must be a list of objects')
    parsed_messages, call_ids = [], set()
    for number, message_record in enumerate(messages, 1):
        try:
            message = parse_message(message_record)
            if message.tool_call_id and message.tool_call_id not in call_ids:
                raise ValueError(f"tool_call_id {message.tool_call_id!r} names no earlier call")
        except ValueError as error:
            raise ValueError(f"message {number}: {error}") from None
        call_ids |= {call.id for call in message.tool_calls}
        parsed_messages.append(message)
    return Chat(tuple(parsed_messages), tuple(tools))


def parse_message(record: Any) -> Message:
    if not isinstance(record, dict) or record.get("role") not in ROLES:
        raise ValueError(f"a message must be an object with a role, one of {', '.join(ROLES)}")
    if unknown_keys := [
        key for key, value in record.items() if key not in MESSAGE_KEYS and value not in (None, "", [], {})
    ]:
        raise ValueError(f"{unknown_keys[0]!r} cannot be trained on")
    content, calls, weight = record.get("content"), record.get("tool_calls") or [], record.get("weight", 1)
    if isinstance(content, list):
        if not all(
            isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            for part in content
        ):
            raise ValueError("every part of a content must be text")
        content = "".join(part["text"] for part in content)
    if content is None and not calls:
        raise ValueError("a message without tool calls must have a content")
    if not isinstance(content or "", str):
        raise ValueError("the content must be text, a list of texts, or null")
    if (calls or "weight" in record) and record["role"] != "assistant":
        raise ValueError("only the assistant has tool calls and a weight")
    if weight not in (0, 1) or not isinstance(calls, list):
        raise ValueError("the weight must be 0 or 1, and tool_calls a list")
    words = [record.get(key) or "" for key in ("reasoning_content", "tool_call_id", "name")]
    if not all(isinstance(word, str) for word in words):
        raise ValueError("reasoning_content, tool_call_id and name must be text")
    return Message(record["role"], content, words[0], tuple(map(parse_call, calls)), words[1], words[2], bool(weight))


def parse_call(record: Any) -> ToolCall:
    """The arguments may be an object, or a text that spells one, as OpenAI's are."""
    function = record.get("function") if isinstance(record, dict) else None
    if (
        not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or not isinstance(record.get("id") or "", str)
    ):
        raise ValueError('a tool call must be an object with a "function" that has a name')
    arguments = function.get("arguments") or {}
    try:
        arguments = parse_json(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {function['name']} must be a JSON object")
    return ToolCall(function["name"], arguments, record.get("id") or "")


@runtime_checkable
class Render(Protocol):
    """A chat template."""

    def __call__(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], prompt: bool
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """The text of messages, with the generation prompt if `prompt`, and where in it the template marks the
        assistant's text; None if it marks nothing. ValueError if it refuses them."""
        ...


def tokens_and_mask(chat: Chat, render: Render, tokenizer) -> list[tuple[Int[Tensor, " T"], Bool[Tensor, " T"]]]:
    """The contexts of a chat, each with its tokens [T] and which of them the assistant has to learn [T]. There is none
    if it has no turn to learn, and usually one. `tokenizer`: the checkpoint's, as `ref.cpt.load_tokenizer` gives it or
    as it is. Raises ValueError, by the number of the message, where it cannot be told what the assistant wrote, and
    where the template leaves words out."""
    reader, plain = chat_tokenizer(tokenizer), [m.plain() for m in chat.messages]
    forms = [plain]
    if any(
        message["content"] is None for message in plain
    ):  # transformers leaves such a content out; older templates ask whether it is null
        forms.insert(0, [{key: value for key, value in message.items() if value is not None} for message in plain])
    for messages in forms[:-1]:
        with contextlib.suppress(ValueError):
            return encode(chat, Words(messages, list(chat.tools), reader), render)
    return encode(chat, Words(plain, list(chat.tools), reader), render)


def encode(chat: Chat, words: Words, render: Render) -> list[tuple[Int[Tensor, " T"], Bool[Tensor, " T"]]]:
    """`tokens_and_mask` of the messages in `words`."""
    encoded = []
    for context in contexts(chat, words, render):
        traced = trace(chat, words, render, context)
        is_assistant = np.zeros(len(context.text), dtype=bool)
        for number, (start, end) in context.turns.items():
            try:
                is_assistant[start : end_of_turn(context.text, start, end, words.reader, traced.spelled)] = True
            except ValueError as error:
                raise ValueError(f"message {number + 1}: {error}") from None
        ids, mask = words.reader.encode(context.text, is_assistant, traced.spelled)
        encoded.append((torch.tensor(ids), torch.tensor(mask)))
    return encoded


@dataclass
class Context:
    """What the network saw when it wrote the last of some turns."""

    text: str
    turns: dict[int, tuple[int, int]]
    """Number of a message to learn → the range of its turn, up to the end of what the template writes for it."""
    count: int
    """The messages that it was rendered from, from the first one on."""


def contexts(chat: Chat, words: Words, render: Render) -> list[Context]:
    """Contexts in which every turn to learn stands once, under what sampling would have had before it."""
    plain, tools = words.messages, list(chat.tools)
    all_contexts: list[Context] = []
    for index, message in enumerate(chat.messages):
        if message.role != "assistant" or not message.learn:
            continue
        try:
            text, marked_spans = render(plain[: index + 1], tools, False)
            if marked_spans is None:
                if not index:
                    raise ValueError(
                        "the assistant may not speak first, where nothing says how the template begins its turns"
                    )
                before, _ = render(plain[:index], tools, True)
                if not text.startswith(before):
                    raise ValueError(
                        "the template writes the turn otherwise than its generation prompt begins it, "
                        "and does not mark it"
                    )
                turn = len(before), len(text)
            elif len(marked_spans) != sum(item.role == "assistant" for item in chat.messages[: index + 1]):
                raise ValueError("the template's {% generation %} marks are not one for each turn")
            else:
                turn = marked_spans[-1]
        except ValueError as error:
            raise ValueError(f"message {index + 1}: {error}") from None
        open_turns = all_contexts.pop().turns if all_contexts and text.startswith(all_contexts[-1].text) else {}
        all_contexts.append(Context(text, open_turns | {index: turn}, index + 1))
    return all_contexts


def trace(chat: Chat, words: Words, render: Render, context: Context) -> Traced:
    """Where the words of the messages stand in a context. Raises ValueError, by the number of the message, unless all
    of them do. Only thoughts of turns that are not learned in it may be missing, as far as they stand in the text of
    their own turn."""
    traced = words.trace(render, context.count, context.text)
    for number in words.check(traced, context.count, context.turns):
        if not chat.messages[number].learn:
            text, _ = render(words.messages[: number + 1], list(chat.tools), False)
            words.check_whole(words.trace(render, number + 1, text), number)
    return traced


def end_of_turn(text: str, start: int, end: int, reader: ChatTokenizer, spelled: list[tuple[int, int]]) -> int:
    """Behind the control token that ends the turn text[start:end], or that follows it where a template's mark leaves it
    out. Those that a message spells and those that close a tag end no turn."""
    tokens = [token for token in reader.ends.finditer(text, start, end) if token.span() not in spelled]
    if tokens and not text[tokens[-1].end() : end].strip():
        return tokens[-1].end()
    next_token = reader.ends.match(text, end)
    if next_token is None:
        raise ValueError(
            "the template ends the turn without a control token, so the assistant would never learn to stop"
        )
    return next_token.end()


def fitted(contexts: Iterable[tuple[Tensor, Tensor]], length: int) -> tuple[list[tuple[Tensor, Tensor]], int, int]:
    """Contexts of at most `length` tokens, and how many were cut, and how many dropped. A longer one is cut behind its
    last turn that fits; where none does, it is dropped."""
    fitted_contexts, cut, dropped = [], 0, 0
    for ids, mask in contexts:
        if len(ids) > length:
            ends = (mask[:length] & ~mask[1 : length + 1]).nonzero()[:, 0] + 1
            if not len(ends):
                dropped += 1
                continue
            cut += 1
            ids, mask = ids[: int(ends[-1])], mask[: int(ends[-1])]
        fitted_contexts.append((ids, mask))
    return fitted_contexts, cut, dropped


def pack(contexts: Iterable[tuple[Tensor, Tensor]], length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Packs contexts, tokens [T] and mask [T], into rows of `length` tokens: ids [R, length] int32, doc [R, length]
    int32 and weight [R, length] bool. `fitted` comes first; what is longer than a row is cut here in pieces, as
    `ref.cpt.pack` does."""
    # A token and its mask are one number
    combined_ids, doc = pack_documents([(2 * ids + mask).tolist() for ids, mask in contexts], length, pad=0)
    return combined_ids // 2, doc, combined_ids % 2 == 1


def count_learned(doc: Int[Tensor, "B T"], weight: Float[Tensor, "B T"]) -> float:
    """n: the weights of all tokens that have a token of their context before them, of the rows of a complete step."""
    # n = Σ w
    return (weight[:, 1:] * ((doc[:, 1:] == doc[:, :-1]) & (doc[:, 1:] >= 0))).sum(dtype=torch.float64).item()


def sft_loss(
    model: Transformer, ids: Int[Tensor, "B T"], doc: Int[Tensor, "B T"], weight: Float[Tensor, "B T"], n_tokens: float
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """L of a micro-batch, nats, and the balance loss of its experts, 0 for a dense network. `n_tokens`: of the complete
    step (`count_learned`); a step without a token to learn has a loss of zero. Raises ValueError as
    `ref.cpt.next_token_loss`."""
    output = model(ids, doc=doc, logits=False)
    nll, _ = next_token_loss(model, output.hidden, ids, doc, weight)
    balance = (
        load_balancing_loss(output.router_logits, output.experts)
        if output.router_logits
        else torch.zeros((), device=nll.device)
    )
    return nll / (n_tokens or 1.0), balance  # L = −(1/n) Σ w log p


def sft_step(
    model: Transformer,
    optimizers: Sequence[torch.optim.Optimizer],
    ids: Int[Tensor, "B T"],
    doc: Int[Tensor, "B T"],
    weight: Float[Tensor, "B T"],
    micro_rows: int = 1,
) -> dict[str, float]:
    """One optimiser step on packed rows, `micro_rows` rows at a time: L in nats per token, and n. Gradients are zero
    before and after. The balance loss is averaged over micro-batches."""
    n_tokens, loss = count_learned(doc, weight), 0.0
    parts = range(0, len(ids), micro_rows)
    for first in parts:
        rows = slice(first, first + micro_rows)
        part_loss, balance = sft_loss(model, ids[rows], doc[rows], weight[rows], n_tokens)
        (part_loss + model.config.router_aux_loss_coef * balance / len(parts)).backward()
        loss += part_loss.item()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return {"loss": loss, "n_tokens": n_tokens}
