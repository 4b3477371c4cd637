"""What a template leaves out of a chat is named, and what is trained on is what transformers gives: the templates that
TRL's wheel carries as published, and small ones that lose a part each."""

import importlib.util
import re
from collections import Counter
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from recipe.small.chat_template import Template
from ref import sft
from tests import chats
from tests.chats import spoken

FOLDER = Path(importlib.util.find_spec("trl").submodule_search_locations[0]) / "chat_templates"
PUBLISHED = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.jinja"))}
NAMES = re.compile(
    r"<\|[a-zA-Z_0-9]+\|>|<[a-z_]+\|>|<\|[a-z_]+>|<｜[^｜'\"]+｜>|<end_of_turn>|<start_of_turn>|\[/?[A-Z_]+\]"
)
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


@lru_cache
def loaded(source):
    """A tokenizer with the control tokens that a template writes, as transformers has it, and the template. Tags are
    not special, as in Qwen3."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = chats.bytes_tokenizer(control=tuple(sorted({*NAMES.findall(source), "<|bos|>", "<|eos|>"})))
    tokenizer.encode_special_tokens = False
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    names = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|eos|>"}
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names)
    return tokenizer, theirs, Template(source, names)


def call(number, **arguments):
    return {"id": f"c{number}", "type": "function", "function": {"name": f"tool{number}", "arguments": arguments}}


TOOLS = [
    {
        "type": "function",
        "function": {"name": "tool1", "description": "d", "parameters": {"type": "object", "properties": {}}},
    }
]
ASKED, FIRST, SECOND = ("u", "ASK"), call(1, path="PATH1"), call(2, path="PATH2")
CASES = {
    "plain": [("s", "SYS"), ASKED, ("a", "ANSWER")],
    "two turns": [ASKED, ("a", "FIRST"), ("u", "MORE"), ("a", "ANSWER")],
    "call": [
        ASKED,
        ("a", {"content": None, "tool_calls": [FIRST]}),
        ("t", {"content": "RESULT", "tool_call_id": "c1"}),
        ("a", "ANSWER"),
    ],
    "call and text": [
        ASKED,
        ("a", {"content": "LOOK", "tool_calls": [FIRST]}),
        ("t", {"content": "RESULT", "tool_call_id": "c1"}),
        ("a", "ANSWER"),
    ],
    "calls": [
        ASKED,
        ("a", {"content": None, "tool_calls": [FIRST, SECOND]}),
        ("t", {"content": "RESULT1", "tool_call_id": "c1"}),
        ("t", {"content": "RESULT2", "tool_call_id": "c2"}),
        ("a", "ANSWER"),
    ],
    "thought": [ASKED, ("a", {"content": "ANSWER", "reasoning_content": "HMM"})],
    "thought in content": [ASKED, ("a", "<think>\nHMM\n</think>\n\nANSWER")],
    "developer": [("u", {"role": "developer", "content": "DEV"}), ASKED, ("a", "ANSWER")],
}


def test_published_templates_lose_nothing_silently():
    """72 templates × 8 conversations: the ids of transformers, or a reason that names the message. Every word in
    capitals stands in the text."""
    counts, other = Counter(), []
    for name, source in PUBLISHED.items():
        tokenizer, theirs, render = loaded(source)
        for case, turns in CASES.items():
            tools = TOOLS if "call" in case else []
            chat = spoken(*turns, tools=tools)
            try:
                contexts = sft.tokens_and_mask(chat, render, tokenizer)
            except ValueError as error:
                assert re.match(r"message \d: ", str(error)) and "\n" not in str(error), (name, case, error)
                counts["refused"] += 1
                continue
            texts = [tokenizer.decode(ids.tolist(), skip_special_tokens=False) for ids, _ in contexts]
            words = set(re.findall(r"\b[A-Z]+[12]?\b", str(turns)))
            assert all(any(word in text for text in texts) for word in words), (name, case, texts)
            learned = [text for pieces in chats.said(contexts, tokenizer) for text in pieces]
            own = set(re.findall(r"\b[A-Z]+[12]?\b", str([turn for turn in turns if turn[0] == "a"])))
            assert all(any(word in text for text in learned) for word in own), (name, case, learned)
            assert not any(word in text for text in learned for word in words - own), (name, case, learned)
            try:
                wanted = theirs.apply_chat_template(
                    [m.plain() for m in chat.messages], tools=tools or None, chat_template=source
                )["input_ids"]
            except Exception:  # it leaves null contents out, which two templates ask for
                other.append((name, case))
            else:
                assert contexts[-1][0].tolist() == wanted, (name, case)
                counts["equal"] += 1
    assert len(PUBLISHED) >= 72 and counts["equal"] >= 281 and counts.total() + len(other) == 8 * len(PUBLISHED)
    assert {name for name, _ in other} <= {"deepseekv3_training"}


BODY = (
    "{%- if tools -%}{{- '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' -}}{%- endif -%}"
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' -}}"
    "{%- if m.reasoning_content -%}{{- '<think>' + m.reasoning_content + '</think>' -}}{%- endif "
    "-%}{{- m.content or '' -}}"
    "{%- for c in m.tool_calls or [] -%}{{- '<tool_call>' + c.function | tojson + '</tool_call>' -}}{%- endfor -%}"
    "{{- '<|im_end|>\\n' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- "
    "'<|im_start|>assistant\\n' -}}{%- endif -%}"
)
"""Writes everything."""
OURS = {
    "all": BODY,
    "no developer": BODY.replace("messages -%}", "messages if m.role != 'developer' -%}"),
    "no answers": BODY.replace("messages -%}", "messages if m.role != 'tool' -%}"),
    "no thoughts": BODY.replace("m.reasoning_content -%}", "false -%}"),
    "thoughts of the last turn": BODY.replace("m.reasoning_content -%}", "m.reasoning_content and loop.last -%}"),
    "no calls": BODY.replace("m.tool_calls or []", "[]"),
    "first call": BODY.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"),
    "names of calls": BODY.replace("c.function | tojson", "c.function.name"),
    "arguments of calls": BODY.replace("c.function | tojson", "c.function.arguments | tojson"),
    "first argument": BODY.replace(
        "c.function | tojson", "c.function.name ~ (c.function.arguments.items() | list)[:1]"
    ),
    "calls instead of text": BODY.replace("m.content or ''", "m.content or '' if not m.tool_calls else ''"),
    "stripped": BODY.replace("m.content or ''", "(m.content or '') | trim"),
    "first word": BODY.replace("m.content or ''", "(m.content or '').split(' ')[0]"),
    "first characters": BODY.replace("m.content or ''", "(m.content or '')[:6]"),
    "no thought in the content": BODY.replace("m.content or ''", "(m.content or '').split('</think>')[-1]"),
    "no spaces": BODY.replace("m.content or ''", "(m.content or '').replace(' ', '')"),
    "no first message": BODY.replace("messages -%}", "messages[1:] -%}"),
    "default system": BODY.replace(
        "{%- for m in messages", "{{- '<|im_start|>system\\nHelp.<|im_end|>\\n' -}}{%- for m in messages"
    ),
    "date": BODY.replace("{%- for m in messages", "{{- strftime_now('%d %b %Y') -}}{%- for m in messages"),
    "marked": chats.MARKED,
}
"""What each of them leaves out, or does besides."""
PIECES = [
    *"abé1 \n<{\"'\\",
    "ok",
    "fix it",
    "None",
    "true",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "e\u0301",
    "😀",
    "x = 1\n    y",
    "<b>",
]
texts = st.lists(st.sampled_from(PIECES), max_size=4).map("".join)
values = st.recursive(
    texts | st.none() | st.booleans() | st.integers(-9, 99) | st.floats(-9, 9),
    lambda x: st.lists(x, max_size=2),
    max_leaves=3,
)
arguments = st.dictionaries(st.sampled_from(["path", "n", "é"]), values, max_size=2)
calls = st.lists(st.tuples(st.sampled_from(["read", "f"]), arguments), min_size=1, max_size=2)


@st.composite
def conversations(draw):
    turns = [(draw(st.sampled_from(["s", "d"])), {"content": draw(texts)})] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 2))):
        turns.append(("u", {"content": draw(texts)}))
        while draw(st.booleans()):
            items = [
                {"id": f"c{k}", "function": {"name": name, "arguments": given}}
                for k, (name, given) in enumerate(draw(calls))
            ]
            turns.append(("a", {"content": draw(st.none() | texts), "tool_calls": items}))
            turns += [("t", {"content": draw(texts), "tool_call_id": item["id"]}) for item in items]
        turns.append(("a", {"content": draw(texts)}))
    for role, message in turns:
        if role == "a" and draw(st.integers(0, 3)) == 0:
            message["reasoning_content"] = draw(texts)
        if role == "a" and draw(st.integers(0, 5)) == 0:
            message["weight"] = 0
    turns = [("u", message | {"role": "developer"}) if role == "d" else (role, message) for role, message in turns]
    return spoken(*turns, tools=draw(st.sampled_from([[], TOOLS])))


def swapped(value):
    """JSON with "NEEDLE" in place of a text that has words, or of another value; once for each."""
    if isinstance(value, dict):
        yield from ({**value, key: new} for key, item in value.items() for new in swapped(item))
    elif isinstance(value, list):
        yield from ([*value[:k], new, *value[k + 1 :]] for k, item in enumerate(value) for new in swapped(item))
    elif not isinstance(value, str) or value.strip():
        yield "NEEDLE"


def with_needles(messages):
    """For each part of the messages: the number of its message, and the messages with a needle in its place."""
    for k, message in enumerate(messages):
        parts = {key: message[key] for key in ("content", "reasoning_content") if message.get(key) is not None}
        changed = list(swapped(parts))
        for n, item in enumerate(calls := message.get("tool_calls") or []):
            changed += [
                {"tool_calls": [*calls[:n], item | {"function": new}, *calls[n + 1 :]]}
                for new in swapped(item["function"])
            ]
        yield from ((k, [*messages[:k], message | part, *messages[k + 1 :]]) for part in changed)


@settings(max_examples=100)
@given(st.sampled_from([*OURS, *PUBLISHED]), conversations())
def test_the_ids_of_transformers_or_a_reason(name, chat):
    """Whatever is said, called and thought. A part that is replaced by a needle has the needle in the text: nothing was
    lost."""
    source = OURS.get(name) or PUBLISHED[name]
    tokenizer, theirs, render = loaded(source)
    try:
        contexts = sft.tokens_and_mask(chat, render, tokenizer)
    except ValueError as error:
        assert "\n" not in str(error) and re.match(r"message \d+: |the chat template decides", str(error))
        return
    learned = [k for k, m in enumerate(chat.messages) if m.role == "assistant" and m.learn]
    if not learned:
        assert contexts == []
        return
    plain, tools = [m.plain() for m in chat.messages], list(chat.tools)
    last = contexts[-1][0].tolist()
    users = [item for message in plain if message["role"] != "assistant" for item in message.values()]
    if not any(tag in item for item in users for tag in TAGS) and "<|im_end|>" not in str(plain):
        sides = [
            [{key: x for key, x in m.items() if drop is False or x is not None} for m in plain[: learned[-1] + 1]]
            for drop in (True, False)
        ]
        wanted = []
        for messages in sides:
            try:
                wanted.append(tokenizer.encode(render(messages, tools, False)[0], add_special_tokens=False).ids)
                wanted.append(
                    theirs.apply_chat_template(messages, tools=tools or None, chat_template=source)["input_ids"]
                )
            except Exception:
                continue
        assert last in wanted
    for k, messages in with_needles(plain):
        if k > learned[-1]:
            continue
        count = k + 1 if plain[k]["role"] == "assistant" else learned[-1] + 1
        texts = []
        for drop in (True, False):
            try:
                texts.append(
                    render(
                        [{key: x for key, x in m.items() if not drop or x is not None} for m in messages[:count]],
                        tools,
                        False,
                    )[0]
                )
            except ValueError:
                continue
        assert not texts or any("NEEDLE" in text for text in texts), (k, messages[k], texts)


@pytest.mark.parametrize(
    "name, turns, why",
    [
        ("no developer", CASES["developer"], "message 1: the chat template leaves out its content: 'DEV'"),
        ("no answers", CASES["call"], "message 3: the chat template leaves out its content: 'RESULT'"),
        ("no thoughts", CASES["thought"], "message 2: the chat template leaves out its thought: 'HMM'"),
        ("no calls", CASES["call"], "message 2: the chat template leaves out the function's name: 'tool1'"),
        ("first call", CASES["calls"], "message 2: the chat template leaves out the function's name: 'tool2'"),
        ("names of calls", CASES["call"], "message 2: the chat template leaves out an argument: 'PATH1'"),
        ("arguments of calls", CASES["call"], "message 2: the chat template leaves out the function's name: 'tool1'"),
        (
            "first argument",
            [ASKED, ("a", {"tool_calls": [call(1, a=True, b=None)]})],
            "message 2: the chat template leaves out an argument's name: 'b'",
        ),
        (
            "calls instead of text",
            CASES["call and text"],
            "message 2: the chat template leaves out its content: 'LOOK'",
        ),
        ("first word", [("u", "fix it now"), ("a", "ok")], "message 1: the chat template leaves out its content: 'it'"),
        (
            "first characters",
            [ASKED, ("a", "ok then")],
            "message 2: the chat template decides by the spelling of its words",
        ),
        ("no spaces", [("u", "fix it now"), ("a", "ok")], "message 1: the chat template leaves out its content: 'it'"),
        (
            "no thought in the content",
            CASES["thought in content"],
            "message 2: the chat template leaves out its content: '</think>'",
        ),
        ("no first message", CASES["two turns"], "message 1: the chat template leaves out its content: 'ASK'"),
        (
            "no thoughts",
            [
                *CASES["two turns"][:1],
                ("a", {"content": "A", "reasoning_content": "HMM", "weight": 0}),
                ASKED,
                ("a", "B"),
            ],
            "thought: 'HMM'",
        ),
    ],
)
def test_what_is_left_out_is_named(name, turns, why):
    assert OURS[name] != BODY
    tokenizer, _, render = loaded(OURS[name])
    with pytest.raises(ValueError, match=re.escape(why)):
        sft.tokens_and_mask(spoken(*turns), render, tokenizer)
    tokenizer, _, render = loaded(BODY)
    assert sft.tokens_and_mask(spoken(*turns), render, tokenizer)


def test_thoughts_that_a_template_drops_from_earlier_turns_are_learned_in_their_own():
    tokenizer, _, render = loaded(OURS["thoughts of the last turn"])
    thought = [
        ASKED,
        ("a", {"content": "A", "reasoning_content": "HMM"}),
        ("u", "x"),
        ("a", {"content": "B", "reasoning_content": "AHA"}),
    ]
    assert chats.said(sft.tokens_and_mask(spoken(*thought), render, tokenizer), tokenizer) == [
        ["<think>HMM</think>A<|im_end|>"],
        ["<think>AHA</think>B<|im_end|>"],
    ]
    thought[1][1]["weight"] = 0  # it stands in the text of its own turn, which nobody learns
    assert len(sft.tokens_and_mask(spoken(*thought), render, tokenizer)) == 1
