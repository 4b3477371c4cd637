"""SFT on conversations: what is read, which tokens are the assistant's, what is packed, and what the loss is divided
by."""

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ref import sft
from ref.control_tokens import chat_tokenizer
from ref.network import Config, Transformer
from tests import chats
from tests.chats import AGENT, CHATML, CONTROL, LLAMA3, MARKED, QWEN3, QWEN25, spoken, template

PLAIN = chats.bytes_tokenizer()
EVERY = {"chatml": CHATML, "marked": MARKED, "qwen2.5": QWEN25, "qwen3": QWEN3, "llama3": LLAMA3, "agent": AGENT}
CALL = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"file": "a.py"}'}}
CONFIG = Config.tiny(
    300,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    num_experts=0,
    intermediate_size=16,
)


def learned(chat, source, tokenizer=PLAIN):
    return chats.said(sft.tokens_and_mask(chat, template(source), tokenizer), tokenizer)


# ------------------------------------------------------------------------------------------------ reading


def file_of(tmp_path, *lines):
    path = tmp_path / "chats.jsonl"
    path.write_bytes(
        b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines) + b"\n"
    )
    return path


def test_the_shape_of_openai_is_read(tmp_path):
    tool = {"type": "function", "function": {"name": "read", "parameters": {}}}
    parts = [{"type": "text", "text": "fix "}, {"type": "text", "text": "it"}]
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": parts, "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": "x = 1"},
        {"role": "assistant", "content": "done", "weight": 0, "reasoning_content": "hm"},
    ]
    path = file_of(
        tmp_path,
        {"messages": messages, "tools": [tool]},
        b"",
        b'{"messages": [{"role": "user", "content": "\xc3\xa9"}]}',
    )
    [(first, chat), (third, other)], refused = sft.read_conversations(path)
    assert (first, third, refused) == (1, 3, []) and other.messages[0].content == "é"
    assert chat.tools == (tool,) and [m.learn for m in chat.messages] == [True] * 4 + [False]
    assert chat.messages[1].plain() == {"role": "user", "content": "fix it", "name": "ann"}
    asked = chat.messages[2].plain()
    assert asked["content"] is None and asked["tool_calls"] == [
        CALL | {"function": {"name": "read", "arguments": {"file": "a.py"}}}
    ]
    assert chat.messages[4].plain() == {"role": "assistant", "content": "done", "reasoning_content": "hm"}


@pytest.mark.parametrize(
    "line, why",
    [
        (b"{", "not a line of JSON"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "not a line of JSON in UTF-8"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "not a line of JSON in UTF-8"),
        (b"[" * 100_000, "not a line of JSON"),
        ([], "must be an object with a list"),
        ({"messages": []}, "must be an object with a list"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": "read"}, '"tools" must be a list'),
        (
            {"messages": [{"role": "robot", "content": "a"}]},
            "message 1: a message must be an object with a role, one of system",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "user"}]},
            "message 2: a message without tool calls must have a content",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "message 1: every part of a content must be text",
        ),
        ({"messages": [{"role": "user", "content": 5}]}, "message 1: the content must be text"),
        ({"messages": [{"role": "user", "content": "a", "weight": 1}]}, "message 1: only the assistant"),
        ({"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}, "message 1: the weight must be 0 or 1"),
        (
            {"messages": [{"role": "assistant", "content": "a", "function_call": {"name": "f"}}]},
            "message 1: 'function_call' cannot be trained on",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            "message 1: a tool call must be an object",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "arguments of f must be a JSON object",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]},
            "arguments of f must be",
        ),
        (
            {"messages": [{"role": "tool", "tool_call_id": "c9", "content": ""}]},
            "message 1: tool_call_id 'c9' names no earlier call",
        ),
    ],
)
def test_a_bad_line_is_named_and_the_others_are_kept(tmp_path, line, why):
    good = {"messages": [{"role": "user", "content": "a"}]}
    path = file_of(tmp_path, good, line, good)
    found, [said] = sft.read_conversations(path)
    assert (
        [number for number, _ in found] == [1, 3]
        and said.startswith(f"{path}:2: ")
        and why in said
        and "\n" not in said
    )


KEYS = st.sampled_from(
    ["messages", "role", "content", "tool_calls", "function", "name", "arguments", "tools", "weight", "assistant", "id"]
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda x: st.lists(x) | st.dictionaries(KEYS, x),
    max_leaves=8,
)
some_messages = st.lists(
    st.dictionaries(KEYS, json_values | st.sampled_from(["user", "assistant", "tool"])), max_size=3
)


@settings(max_examples=60)
@given(json_values | st.fixed_dictionaries({"messages": some_messages}))
def test_whatever_stands_there_is_a_chat_or_a_reason(record):
    try:
        chat = sft.chat_of(record)
    except ValueError as error:
        assert str(error)
    else:
        assert isinstance(chat, sft.Chat) and json.dumps([m.plain() for m in chat.messages])


# ------------------------------------------------------------------------------------------------ which tokens


def test_tokens_counted_by_hand():
    """A byte is a token: "ok" and the end of the turn are three, after 1 + 5 + 4 + 1 + 1 + 1 + 4 + … of the
    template."""
    chat = spoken(("s", "S"), ("u", "hey"), ("a", "ok"))
    [(ids, mask)] = sft.tokens_and_mask(chat, template(CHATML), PLAIN)
    system, user, header = 1 + 7 + 1 + 1 + 1, 1 + 5 + 3 + 1 + 1, 1 + 10
    assert len(ids) == system + user + header + 2 + 1 + 1  # the newline behind the end is the template's
    assert mask.nonzero()[:, 0].tolist() == [system + user + header + i for i in range(3)]
    assert ids[mask].tolist() == [*PLAIN.encode("ok").ids, PLAIN.token_to_id("<|im_end|>")]


def test_two_tokens_of_the_agent_s_own_template():
    chat = spoken(("u", "p"), ("a", "x"), ("t", "y"), ("a", ""))
    [(ids, mask)] = sft.tokens_and_mask(chat, template(AGENT), PLAIN)
    assert mask.tolist() == [False, False, False, True, True, False, False, True]
    assert PLAIN.decode(ids.tolist(), skip_special_tokens=False) == "<|env|>p<|agent|>x<|env|>y<|agent|><|env|>"


def test_calls_are_the_assistant_s_and_answers_are_not():
    chat = spoken(
        ("u", "q"),
        ("a", {"content": "", "tool_calls": [CALL, CALL]}),
        ("t", "one"),
        ("t", "two"),
        ("a", "end"),
        tools=[{"name": "read"}],
    )
    call = '<call>{"name": "read", "arguments": {"file": "a.py"}}</call>'
    assert learned(chat, QWEN25) == [[f"{call}\n{call}<|im_end|>", "end<|im_end|>"]]
    with pytest.raises(ValueError, match="message 2: the chat template leaves out the function's name: 'read'"):
        learned(chat, LLAMA3)  # it writes the first call of a turn alone
    single = spoken(("u", "q"), ("a", {"content": None, "tool_calls": [CALL]}), ("t", "one"), ("a", "end"))
    assert learned(single, LLAMA3) == [['{"name": "read", "arguments": {"file": "a.py"}}<|eot|>', "end<|eot|>"]]
    assert learned(chat, AGENT) == [["read a.py\nread a.py<|env|>", "end<|env|>"]]


def test_each_turn_is_learned_under_what_sampling_would_have_had_before_it():
    """Qwen3 drops thinking once a user speaks again: two contexts, and each turn stands in one of them."""
    thought = {"content": "one", "reasoning_content": "hm", "tool_calls": [CALL]}
    chat = spoken(
        ("u", "q"),
        ("a", thought),
        ("t", "x"),
        ("a", {"content": "two", "reasoning_content": "so"}),
        ("u", "r"),
        ("a", "three"),
    )
    contexts = sft.tokens_and_mask(chat, template(QWEN3), PLAIN)
    call = '\n<call>{"name": "read", "arguments": {"file": "a.py"}}</call><|im_end|>'
    assert chats.said(contexts, PLAIN) == [
        ["<think>\nhm\n</think>\n\none" + call, "<think>\nso\n</think>\n\ntwo<|im_end|>"],
        ["<think>\n\n</think>\n\nthree<|im_end|>"],
    ]
    second = PLAIN.decode(contexts[1][0].tolist(), skip_special_tokens=False)
    assert "hm" not in second and "so" not in second and second.endswith("</think>\n\nthree<|im_end|>\n")


def test_a_turn_of_weight_0_is_context_only():
    chat = spoken(("u", "q"), ("a", {"content": "bad", "weight": 0}), ("u", "again"), ("a", "good"), ("u", "thanks"))
    [(ids, mask)] = sft.tokens_and_mask(chat, template(CHATML), PLAIN)
    text = PLAIN.decode(ids.tolist(), skip_special_tokens=False)
    assert chats.said([(ids, mask)], PLAIN) == [["good<|im_end|>"]] and "bad" in text and "thanks" not in text
    assert sft.tokens_and_mask(spoken(("u", "q"), ("a", {"content": "x", "weight": 0})), template(CHATML), PLAIN) == []


def test_a_token_is_of_whoever_wrote_its_first_character():
    """The header's newline and one of the content are one token, which is the template's. At its end a control token
    cuts the turn off."""
    tokenizer = chats.bytes_tokenizer(("Ċ", "Ċ"))
    assert learned(spoken(("u", "q"), ("a", "\nx")), CHATML, tokenizer) == [["x<|im_end|>"]]
    assert learned(spoken(("u", "q"), ("a", "\n\nx")), CHATML, tokenizer) == [["\nx<|im_end|>"]]


def test_the_end_of_a_turn_that_a_mark_leaves_out():
    outside = MARKED.replace(
        "m.content + '<|im_end|>\\n' -}}{%- endgeneration -%}",
        "m.content -}}{%- endgeneration -%}{{- '<|im_end|>\\n' -}}",
    )
    chat = spoken(("u", "q"), ("a", "one"), ("u", "r"), ("a", ""))
    assert outside != MARKED and learned(chat, outside) == learned(chat, MARKED) == [["one<|im_end|>", "<|im_end|>"]]


@pytest.mark.parametrize(
    "source, chat, why",
    [
        (AGENT, spoken(("a", "x")), "message 1: the assistant may not speak first"),
        (
            "{{ messages[0].content }}{% if add_generation_prompt %}<|im_start|>{% endif %}",
            spoken(("u", "q"), ("a", "x")),
            "message 2: .*otherwise than its",
        ),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            spoken(("u", "q"), ("a", "x")),
            "message 2: .*without a control token",
        ),
        (
            MARKED.replace("'assistant' -%}{%- gen", "'assistant' and loop.last -%}{%- gen"),
            spoken(("u", "q"), ("a", "x"), ("a", "y")),
            "message 3: .*marks",
        ),
        (
            "{{ raise_exception('no tools here') }}",
            spoken(("u", "q"), ("a", "x")),
            "message 2: the chat template refuses it .no tools here",
        ),
        (CHATML, spoken(("u", "\ufdd0"), ("a", "x")), "U.FDD0"),
    ],
)
def test_what_cannot_be_told_is_refused_by_message(source, chat, why):
    with pytest.raises(ValueError, match=why):
        sft.tokens_and_mask(chat, template(source), PLAIN)


def test_a_tokenizer_without_control_tokens_is_refused():
    with pytest.raises(ValueError, match="control tokens"):
        sft.tokens_and_mask(spoken(("u", "q"), ("a", "x")), template(CHATML), chats.bytes_tokenizer(control=()))


words = st.lists(
    st.text(max_size=4) | st.sampled_from([*CONTROL, "\n", " ", "<|im_", "e\u0301", "😀", "</think>"]), max_size=4
).map("".join)
texts = words.filter(lambda x: not any("\ufdd0" <= c <= "\ufdd2" for c in x))
rounds = st.lists(st.tuples(texts, texts), min_size=1, max_size=4)


@settings(max_examples=120)
@given(st.sampled_from(sorted(EVERY)), rounds, st.booleans())
def test_learned_are_the_assistant_s_contents_and_the_ends_of_its_turns(name, turns, merged):
    """Whatever is said, whatever control tokens it spells: these texts, and no control token that the template did not
    write."""
    tokenizer = chats.bytes_tokenizer(("Ċ", "x"), ("a", "b"), ("<", "|")) if merged else PLAIN
    chat = spoken(*(turn for asked, answered in turns for turn in (("u", asked), ("a", answered))))
    contexts = sft.tokens_and_mask(chat, template(EVERY[name]), tokenizer)
    end = {"llama3": "<|eot|>", "agent": "<|env|>"}.get(name, "<|im_end|>")
    wanted = [answered for _, answered in turns]
    if name == "llama3":
        wanted = [text.strip() for text in wanted]
    if name == "qwen3":
        wanted = ["<think>\n\n</think>\n\n" + text.lstrip("\n") for text in wanted]
        assert len(contexts) == len(turns)
    elif (
        merged and name != "agent"
    ):  # a newline of the header may have taken the first letter with it: "\nx" is one token of the template's
        wanted = [text.removeprefix("x") for text in wanted]
    assert [text for texts in chats.said(contexts, tokenizer) for text in texts] == [text + end for text in wanted]
    ids = contexts[-1][0].tolist()
    opened = ids.count(tokenizer.token_to_id({"llama3": "<|start|>", "agent": "<|agent|>"}.get(name, "<|im_start|>")))
    assert opened == (len(turns) if name == "agent" else 2 * len(turns) + (name == "chatml"))


@settings(max_examples=60)
@given(st.sampled_from(sorted(EVERY)), rounds)
def test_the_tokens_are_those_of_transformers(name, turns):
    """Where nothing spells a control token, of the whole text read at once."""
    from transformers import PreTrainedTokenizerFast

    turns = [tuple(text.replace("|", "") for text in pair) for pair in turns]
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=chats.bytes_tokenizer(), bos_token="<|bos|>", clean_up_tokenization_spaces=False
    )
    chat = spoken(*(turn for asked, answered in turns for turn in (("u", asked), ("a", answered))))
    ids, mask = sft.tokens_and_mask(chat, template(EVERY[name]), PLAIN)[-1]
    plain = [m.plain() for m in chat.messages]
    assert ids.tolist() == theirs.apply_chat_template(plain, chat_template=EVERY[name])["input_ids"]
    if name == "marked":  # transformers believes the mark, with the newline behind the end of the turn
        whole = theirs.apply_chat_template(
            plain, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
        )
        newline = torch.cat((torch.tensor([False]), mask[:-1] & ~mask[1:]))
        assert (mask | newline).tolist() == [bool(x) for x in whole["assistant_masks"]]


# ------------------------------------------------------------------------------------------------ rows and loss


def context(*own: int):
    return torch.arange(1, len(own) + 1), torch.tensor(own, dtype=torch.bool)


def test_a_long_context_is_cut_behind_its_last_turn_that_fits():
    long = context(0, 1, 1, 0, 0, 1, 0, 1)
    for length, wanted in ((8, 8), (7, 6), (6, 6), (5, 3), (3, 3)):
        [(ids, mask)], cut, dropped = sft.fitted([long], length)
        assert (len(ids), len(mask), cut, dropped) == (wanted, wanted, int(length < 8), 0) and ids.tolist() == list(
            range(1, wanted + 1)
        )
    kept, cut, dropped = sft.fitted([long, context(0, 1)], 2)
    assert (len(kept), cut, dropped) == (1, 0, 1) and kept[0][0].tolist() == [1, 2]


@settings(max_examples=60)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=9), max_size=7), st.integers(1, 9))
def test_rows_hold_every_context_once(masks, length):
    kept, cut, dropped = sft.fitted([context(*own) for own in masks], length)
    ids, doc, weight = sft.pack(kept, length)
    assert (
        len(kept) + dropped == len(masks)
        and weight.dtype == bool
        and not weight[doc < 0].any()
        and not ids[doc < 0].any()
    )
    found = [
        (ids[r][doc[r] == n].tolist(), weight[r][doc[r] == n].tolist())
        for r in range(len(ids))
        for n in range(doc[r].max() + 1)
    ]
    assert sorted(found) == sorted((x.tolist(), own.tolist()) for x, own in kept)
    for own in masks:
        if len(own) > length:
            short = [x.tolist() for x, _ in sft.fitted([context(*own)], length)[0]]
            ends = [i + 1 for i in range(length) if own[i] and not own[i + 1]]
            assert [len(x) for x in short] == ends[-1:]


def rows_of(*lengths: int, width: int = 8):
    draw = torch.Generator().manual_seed(len(lengths))
    doc = torch.full((1, width), -1)
    at = 0
    for number, length in enumerate(lengths):
        doc[0, at : at + length] = number
        at += length
    weight = torch.zeros(1, width)
    weight[0, 1::2] = 1.0
    return torch.randint(0, 300, (1, width), generator=draw), doc, weight * (doc >= 0)


def test_n_counts_tokens_that_have_one_of_their_context_before_them():
    """Weights at 1, 3, 5; the context that begins at 3 does not predict its first token."""
    _, doc, weight = rows_of(3, 3)
    assert weight[0].tolist() == [0, 1, 0, 1, 0, 1, 0, 0] and sft.count_learned(doc, weight) == 2.0


def test_an_even_network_pays_the_logarithm_of_its_vocabulary():
    model = Transformer(replace(CONFIG, tie_word_embeddings=False))
    torch.nn.init.zeros_(model.lm_head.weight)
    ids, doc, weight = rows_of(8)
    loss, balance = sft.sft_loss(model, ids, doc, weight, sft.count_learned(doc, weight))
    assert loss.item() == pytest.approx(math.log(300)) and not balance


def test_only_the_assistant_s_tokens_are_learned():
    """Its probability rises in a step; the text that it was given may change without changing the loss' own terms."""
    torch.manual_seed(0)
    model = Transformer(CONFIG)
    ids, doc, weight = rows_of(8)
    with torch.no_grad():
        logits = model(ids, doc=doc).logits.log_softmax(-1)[0]
        by_hand = -sum(logits[t - 1, ids[0, t]].item() for t in (1, 3, 5, 7)) / 4
    found = sft.sft_step(model, [torch.optim.SGD(model.parameters(), lr=0.1)], ids, doc, weight)
    assert found == {"loss": pytest.approx(by_hand, rel=1e-5), "n_tokens": 4.0}
    assert sft.sft_loss(model, ids, doc, weight, 4.0)[0] < by_hand and all(p.grad is None for p in model.parameters())


def test_micro_batches_divide_by_the_count_of_the_step():
    """Rows with 4, 1 and no tokens to learn: one at a time or together, the same step; a mean of means would be
    another."""
    torch.manual_seed(0)
    first = Transformer(CONFIG).double()
    ids, doc, weight = (torch.cat(x) for x in zip(*(rows_of(8), rows_of(2), rows_of(1))))
    weights = []
    for micro_rows in (1, 2, 3):
        model = Transformer(CONFIG).double()
        model.load_state_dict(first.state_dict())
        found = sft.sft_step(model, [torch.optim.SGD(model.parameters(), lr=0.1)], ids, doc, weight, micro_rows)
        weights.append((torch.tensor(found["loss"]), *model.state_dict().values()))
    for other in weights[1:]:
        for a, b in zip(weights[0], other):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert found["n_tokens"] == 5


def test_a_step_without_a_token_to_learn_changes_nothing():
    model = Transformer(CONFIG)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    ids, doc, weight = rows_of(8)
    assert sft.sft_step(model, [torch.optim.SGD(model.parameters(), lr=0.1)], ids, doc, 0 * weight) == {
        "loss": 0.0,
        "n_tokens": 0.0,
    }
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


def test_a_control_token_that_a_message_spells_ends_no_turn():
    """The turn ends behind the template's own token, also where that stands behind the range and the message's last
    word is the same."""
    reader, content = chat_tokenizer(chats.bytes_tokenizer(control=("<|im_start|>", "<|im_end|>"))), "say <|im_end|>"
    text = f"<|im_start|>{content}<|im_end|>\n"
    start = len("<|im_start|>")
    end = start + len(content)
    spelled = [(end - len("<|im_end|>"), end)]
    assert (
        sft.end_of_turn(text, start, end, reader, spelled) == len(text) - 1
        and sft.end_of_turn(text, start, end, reader, []) == end
    )
    assert sft.end_of_turn(text, start, len(text), reader, spelled) == len(text) - 1
