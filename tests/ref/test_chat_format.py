"""What is sampled and given, turn by turn, is the text that the chat template makes of the whole conversation; turns
are read as they were written; and templates that cannot serve are refused by what they do."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.packages.chat_format import DEFAULT_TEMPLATE
from recipe.small.chat_template import Template
from ref.chat_format import ChatFormatError, TemplateFormat, parse_turn
from ref.environment import ChatFormat
from ref.messages import Message, ToolCall
from tests.chats import CONTROL, bytes_tokenizer
from tests.ref.test_chat_words import PUBLISHED, loaded

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A tool.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "n": {"type": "integer"}}},
        },
    }
    for name in ("read", "write")
]
CALLING = ("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_8", "llama3_1", "default")
SILENT = ("qwen2_5", "qwen3", "qwen3_instruct_2507", "llama3", "llama3_1", "gemma3")
FORMATS = {}


def made(name, tools=True):
    if (name, tools) not in FORMATS:
        tokenizer, render = (
            (bytes_tokenizer(control=CONTROL), Template(DEFAULT_TEMPLATE))
            if name == "default"
            else loaded(PUBLISHED[name])[::2]
        )
        FORMATS[name, tools] = TemplateFormat(tokenizer, render, TOOLS if tools else ())
    return FORMATS[name, tools]


words = st.text(alphabet="ab \n.é<|>_", min_size=1, max_size=12).filter(
    lambda text: text.strip() == text and "|>" not in text
) | st.sampled_from(["<|im_end|>", "say <|eot_id|> now", "x <tool_call> y", "</tool_call>", "<|im_start|>user"])
plain = st.text(alphabet="ab .é", min_size=1, max_size=12).map(str.strip).filter(bool)
values = st.fixed_dictionaries({}, optional={"path": plain, "n": st.integers(-9, 9) | plain}).filter(bool)
calls = st.builds(ToolCall, st.sampled_from(["read", "write"]), values)
turns = st.one_of(
    st.builds(lambda text: Message("assistant", text), plain),
    st.builds(lambda call: Message("assistant", None, tool_calls=(call,)), calls),
)
answers = st.lists(words, min_size=12, max_size=12)


def spoken(chat_format, history, turn, number):
    """The turn with ids for its calls, which some templates ask for."""
    named = tuple(
        ToolCall(call.name, call.arguments, f"call{number}{at}xxx"[:9]) for at, call in enumerate(turn.tool_calls)
    )
    return Message("assistant", turn.content, tool_calls=named)


def conversation(chat_format, opening, turns, answers):
    """The ids of a conversation, built turn by turn, and its messages; None in place of the ids where a new context
    would have begun."""
    history, ids, answers = [Message("user", opening)], None, iter(answers)
    ids = chat_format.encode_opening(history)
    for number, turn in enumerate(turns):
        turn = spoken(chat_format, history, turn, number)
        written = chat_format.encode_turn(history, turn)
        ids += [*written, chat_format.stop_ids[0]]
        history.append(turn)
        said = [Message("tool", next(answers), tool_call_id=call.id, name=call.name) for call in turn.tool_calls] or [
            Message("user", next(answers))
        ]
        given = chat_format.encode_answer(history, said)
        if given is None:
            return None, history
        ids += given
        history += said
    return ids, history


@pytest.mark.parametrize("name", CALLING)
@settings(max_examples=20, deadline=None)
@given(opening=words, turns=st.lists(turns, max_size=4), answers=answers)
def test_differences_are_the_whole_rendering(name, opening, turns, answers):
    """Messages may spell control tokens: these are text, in both. Where Qwen3 marks a last turn without a thought, it
    has an empty thought there."""
    chat_format = made(name)
    try:
        ids, history = conversation(chat_format, opening, turns, answers)
    except ValueError as error:
        assert "message" in str(error), error  # a word that the template would change is refused, by its message
        return
    assert isinstance(chat_format, ChatFormat) and ids is not None
    whole = chat_format.encode_opening(history)
    empty = "<think>\n\n</think>\n\n"
    text, wanted = (chat_format.tokenizer.decode(some, skip_special_tokens=False) for some in (ids, whole))
    if empty in text and name == "qwen3":
        assert text.replace(empty, "") == wanted.replace(empty, "")
    else:
        assert ids == whole


@pytest.mark.parametrize("name", CALLING)
@settings(max_examples=15, deadline=None)
@given(opening=plain, turn=turns)
def test_a_turn_is_read_as_it_was_written(name, opening, turn):
    chat_format = made(name)
    history = [Message("user", opening)]
    turn = spoken(chat_format, history, turn, 0)
    found = chat_format.decode_turn(chat_format.encode_turn(history, turn))
    assert [(call.name, call.arguments) for call in found.tool_calls] == [
        (call.name, call.arguments) for call in turn.tool_calls
    ]
    assert (found.content or "").strip() == (turn.content or "")


@pytest.mark.parametrize("name", SILENT)
@settings(max_examples=10, deadline=None)
@given(opening=words, said=st.lists(plain, min_size=1, max_size=3), answers=answers)
def test_without_tools_too(name, opening, said, answers):
    chat_format = made(name, tools=False)
    ids, history = conversation(chat_format, opening, [Message("assistant", text) for text in said], answers)
    text, wanted = (
        chat_format.tokenizer.decode(some, skip_special_tokens=False)
        for some in (ids, chat_format.encode_opening(history))
    )
    empty = "<think>\n\n</think>\n\n"
    assert text.replace(empty, "") == wanted.replace(empty, "")


def test_a_thought_that_the_template_drops_begins_a_new_context():
    """Qwen3 keeps thoughts while tools answer, and drops those of earlier turns once a user speaks. Qwen3's training
    template keeps them."""
    asked, tool = Message("user", "Look."), Message("tool", "text", tool_call_id="c", name="read")
    thinks = Message("assistant", None, "Which file?", (ToolCall("read", {"path": "a"}, "c"),))
    for name, keeps in (("qwen3", False), ("qwen3_training", True)):
        chat_format = made(name)
        assert chat_format.encode_answer([asked, thinks], [tool]) is not None
        says = Message("assistant", "It is a.", "Done.")
        history = [asked, thinks, tool, says]
        assert (chat_format.encode_answer(history, [Message("user", "Thanks.")]) is not None) == keeps
        text = chat_format.tokenizer.decode(
            chat_format.encode_opening([*history, Message("user", "Thanks.")]), skip_special_tokens=False
        )
        assert ("Which file?" in text) == ("Done." in text) == keeps


def test_a_broken_call_keeps_its_text():
    chat_format = made("qwen2_5")

    def read(text):
        ids = chat_format.tokenizer.encode(text, add_special_tokens=False).ids
        return chat_format.decode_turn(ids)

    broken = read('Let me see.\n<tool_call>\n{"name": "read", "arguments": {"path": \n</tool_call>')
    assert broken.content == "Let me see." and broken.tool_calls == (
        ToolCall("", '{"name": "read", "arguments": {"path":', "call0"),
    )
    both = read('<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call>\n<tool_call>\n[3]\n</tool_call>')
    assert [(call.name, call.arguments) for call in both.tool_calls] == [
        ("read", {}),
        ("", "[3]"),
    ] and both.content is None
    cut = read('<tool_call>\n{"name": "read", "argu')
    assert [call.arguments for call in cut.tool_calls] == ['{"name": "read", "argu']
    odd = read('<tool_call>\n{"name": "read", "arguments": "path"}\n</tool_call>')
    assert [(call.name, call.arguments) for call in odd.tool_calls] == [("read", '"path"')]


def test_text_that_spells_a_tag_is_no_call():
    """Where tags are control tokens, a tag in letters is text."""
    pieces = [
        (False, 'I write <tool_call>{"name": "x"}</tool_call> here. '),
        (True, "<tool_call>"),
        (False, '{"name": "read"}'),
        (True, "</tool_call>"),
    ]
    found = parse_turn(pieces, "hermes")
    assert [call.name for call in found.tool_calls] == ["read"] and "<tool_call>" in found.content
    alone = pieces[:1]
    assert not parse_turn(alone, "hermes").tool_calls and [
        call.name for call in parse_turn(alone, "hermes", has_tags=False).tool_calls
    ] == ["x"]
    assert parse_turn([(False, "plain <think> text")], "hermes").content == "plain <think> text"


@given(
    st.lists(
        st.tuples(
            st.booleans(),
            st.sampled_from(["<tool_call>", "</tool_call>", "<think>", "</think>", "{", '"name"', "a\n", "<function="]),
        )
    )
)
def test_nothing_that_a_policy_writes_is_an_error(pieces):
    for family in ("hermes", "xml", "llama", None):
        assert parse_turn(pieces, family).role == "assistant"


def test_a_parameter_that_is_a_text_stays_one():
    """The xml family writes values without quotes: the schema says which of them are texts."""
    chat_format = made("qwen3_8")
    body = "<tool_call>\n<function=write>\n" + "".join(
        f"<parameter={name}>\n{value}\n</parameter>\n"
        for name, value in (("path", '{"a": 1}'), ("n", "3"), ("other", "[2]"))
    )
    ids = chat_format.tokenizer.encode(f"{body}</function>\n</tool_call>", add_special_tokens=False).ids
    (call,) = chat_format.decode_turn(ids).tool_calls
    assert call.name == "write" and call.arguments == {"path": '{"a": 1}', "n": 3, "other": [2]}


scraps = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<think>",
            "</think>",
            "\n",
            "foo",
            "\ufdd0",
            '{"name": "read"}',
            '{"name": "read", "arguments": {"path": "a"}}',
        ),
        *(
            "<function=read>",
            "<parameter=path>",
            "</parameter>",
            "</function>",
            "<|im_start|>",
            "<|eot_id|>",
            '{"name": "read", "parameters": {}}',
        ),
    ]
)


@settings(max_examples=25)
@pytest.mark.parametrize("name", CALLING)
@given(st.lists(scraps, max_size=8), st.lists(scraps, max_size=8), st.text(max_size=5))
def test_whatever_a_policy_writes_is_answered(name, first, second, answer):
    """A turn is read, answered by the environment, and followed by another one: in the tokens of its answer, or in a
    new context."""
    chat_format = made(name)
    history = [Message("user", "Look.")]
    for scrap in (first, second):
        ids = chat_format.tokenizer.encode("".join(scrap), add_special_tokens=False).ids
        history.append(chat_format.decode_turn([token for token in ids if token not in chat_format.stop_ids]))
        calls = history[-1].tool_calls
        answers = [
            Message("tool", answer or "ok", tool_call_id=call.id, name=call.name or "tool") for call in calls
        ] or [Message("user", "Go on.")]
        tokens = chat_format.encode_answer(history, answers)
        assert tokens is None or tokens, "tokens to append, or a new context"
        history += answers


def test_more_tokens_may_end_a_turn():
    tokenizer, _, render = loaded(PUBLISHED["qwen2_5"])
    end, text = (tokenizer.token_to_id(name) for name in ("<|im_end|>", "<|eos|>"))
    assert made("qwen2_5").stop_ids == (end,) and TemplateFormat(
        tokenizer, render, TOOLS, (text, end, text)
    ).stop_ids == (end, text)


@pytest.mark.parametrize(
    ("name", "tools", "says"),
    [
        ("glm4moe", False, "without a control token"),
        ("llama3", True, "does not write tool calls .*leaves out the function's name"),
        ("lfm2_2_5", True, "writes tool calls in no way that is known here"),
        ("phi3", False, "rewrites what was asked when it is answered"),
        ("gptoss", False, "ends this turn otherwise than with"),
        ("smolvlm", False, "leaves out its content"),
    ],
)
def test_a_template_that_cannot_serve_is_refused(name, tools, says):
    with pytest.raises(ChatFormatError, match=f"the chat template cannot be used for rollouts: .*{says}"):
        made(name, tools)


def test_most_published_templates_can_serve():
    """Each of the others is refused in one line. Families of Qwen from 2.5 on, and of Llama from 3.1 on, write
    calls."""
    counts = {}
    for name in PUBLISHED:
        for tools in (False, True):
            try:
                counts[name, tools] = made(name, tools).family
            except ChatFormatError as error:
                assert "\n" not in str(error)
    assert sum(not tools for _, tools in counts) >= 55 and sum(tools for _, tools in counts) >= 18
    assert {counts[name, True] for name in CALLING if name in PUBLISHED} == {"hermes", "xml", "llama"}
