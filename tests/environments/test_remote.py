"""A policy behind an OpenAI-compatible address: what is asked and read, and every way in which a server may fail."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.harness.messages import Called, Message, PolicyError
from environments.harness.remote import TRIES, Remote, read
from environments.harness.tools import openai, select_tools
from tests.environments.served import CUT, SILENT, answer, serving

TOOLS = select_tools(["read", "shell", "finish"])
CONTEXT = [
    Message("system", "You work."),
    Message("user", "Do it."),
    Message("assistant", "I look.", (Called("1", "read", '{"path": "a"}'), Called("2", "fly", "no JSON"))),
    Message("tool", "one", answers="1"),
    Message("tool", "there is no tool 'fly'", answers="2"),
]


def remote(address, **more):
    said, slept = [], []
    policy = Remote(address, "a-model", on_retry=said.append, sleep=slept.append, **{"seconds": 10.0, **more})
    return policy, said, slept


def test_what_is_asked_and_what_is_read():
    """Parallel calls, malformed ones among them; ids of tokens and log-probs where they are told."""
    told = answer(
        "Now both.",
        ("read", {"path": "b"}),
        ("shell", '{"command": '),
        token_ids=[5, 6, 7],
        logprobs={"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1}]},
        finish_reason="length",
    )
    told["prompt_token_ids"] = [1, 2]
    with serving(lambda number, body: told) as (address, asked):
        policy, _, _ = remote(address + "/", key="secret", sampling={"temperature": 0.7, "seed": 3}, strict=True)
        found = policy.reply(CONTEXT, TOOLS, 50)
    assert found.text == "Now both." and found.calls == (
        Called("call_0", "read", '{"path": "b"}'),
        Called("call_1", "shell", '{"command": '),
    )
    assert (found.prompt_tokens, found.tokens, found.cut) == (100, 7, True)
    assert (found.token_ids, found.prompt_ids, found.logprobs) == ((5, 6, 7), (1, 2), (-0.5, -1.0))
    ((body, headers),) = asked
    assert headers["Authorization"] == "Bearer secret" and body["tools"] == openai(TOOLS, True)
    assert (body["model"], body["max_tokens"], body["temperature"], body["seed"]) == ("a-model", 50, 0.7, 3)
    assert body["messages"][0] == {"role": "system", "content": "You work."}
    assert [one["function"] for one in body["messages"][2]["tool_calls"]] == [
        {"name": "read", "arguments": '{"path": "a"}'},
        {"name": "fly", "arguments": '{"written": "no JSON"}'},  # what servers refuse, with all that follows
    ]
    assert body["messages"][3] == {"role": "tool", "tool_call_id": "1", "content": "one"}


def test_ids_beside_log_probs_are_read_too():
    """As llama.cpp tells them."""
    rows = [{"id": 57, "token": "I", "logprob": -2.25}, {"id": 9, "token": "!", "logprob": -0.5}]
    assert read(json.dumps(answer("I!", logprobs={"content": rows})).encode()).token_ids == (57, 9)
    assert (
        read(json.dumps(answer("I!", logprobs={"content": [{**rows[0], "id": None}, rows[1]]})).encode()).token_ids
        is None
    )


def test_each_reply_must_call_a_tool_where_that_is_asked():
    with serving(lambda number, body: answer("", ("read", {"path": "b"}))) as (address, asked):
        remote(address, choice="required")[0].reply(CONTEXT, TOOLS, 50)
        remote(address)[0].reply(CONTEXT, TOOLS, 50)
    assert [body["tool_choice"] for body, _ in asked] == ["required", "auto"]


def test_without_tools_none_are_sent():
    with serving(lambda number, body: answer("A summary.")) as (address, asked):
        found = remote(address)[0].reply(CONTEXT[:2], (), 50)
    assert found.text == "A summary." and found.calls == () and found.token_ids is None and found.logprobs is None
    assert "tools" not in asked[0][0] and "Authorization" not in asked[0][1]


@pytest.mark.parametrize(
    "fault", [CUT, (500, "oops"), (503, ""), (429, "slow down"), b"{", b"[]", b'{"choices": []}', b'{"choices": [{}]}']
)
def test_what_may_pass_is_asked_again(fault):
    with serving(lambda number, body: answer("At last.") if number == 2 else fault) as (address, asked):
        policy, said, slept = remote(address)
        assert policy.reply(CONTEXT, TOOLS, 50).text == "At last."
    assert (
        len(asked) == 3 and slept == [1.0, 2.0] and all("asked again in" in one and one.isprintable() for one in said)
    )


def test_what_does_not_pass_ends_in_one_line():
    with serving(lambda number, body: (503, "\x1b[31mloading\nthe model")) as (address, asked):
        policy, _, slept = remote(address)
        with pytest.raises(PolicyError, match=r"answers 503: \\x1b\[31mloading the model$"):
            policy.reply(CONTEXT, TOOLS, 50)
    assert len(asked) == TRIES and slept == [1.0, 2.0, 4.0, 8.0]


def test_a_refusal_is_not_asked_again():
    with serving(lambda number, body: (401, "no such key")) as (address, asked):
        with pytest.raises(PolicyError, match="answers 401: no such key"):
            remote(address)[0].reply(CONTEXT, TOOLS, 50)
    assert len(asked) == 1


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed(status):
    """It would take the key to another host."""
    with serving(lambda number, body: answer("Hello.")) as (other, heard):
        with serving(lambda number, body: (status, f"{other}/chat/completions")) as (address, asked):
            with pytest.raises(PolicyError, match=f"answers {status}"):
                remote(address, key="secret")[0].reply(CONTEXT, TOOLS, 50)
    assert len(asked) == 1 and not heard


@pytest.mark.parametrize("key", ["sk-a\nb", "sk-é", "sk a"])
def test_a_key_that_no_header_may_hold_is_not_said(key):
    with pytest.raises(ValueError, match="set OPENAI_API_KEY to the key alone") as said:
        Remote("http://localhost:1/v1", "a-model", key)
    assert "sk" not in str(said.value)


def test_a_server_that_says_the_key_again():
    with serving(lambda number, body: (401, "no such key: sk-secret")) as (address, asked):
        with pytest.raises(PolicyError) as said:
            remote(address, key="sk-secret\n")[0].reply(CONTEXT, TOOLS, 50)
    assert (
        asked[0][1]["Authorization"] == "Bearer sk-secret"
        and "no such key: …" in str(said.value)
        and "sk-" not in str(said.value)
    )


def test_a_refusal_whose_words_never_come():
    with serving(lambda number, body: (500, CUT)) as (address, asked):
        with pytest.raises(PolicyError, match="answers 500"):
            remote(address, seconds=0.3)[0].reply(CONTEXT, TOOLS, 50)
    assert len(asked) == TRIES


def test_a_log_prob_of_many_digits():
    with pytest.raises(ValueError, match="none of chat completions"):
        read(json.dumps(answer("", logprobs={"content": [{"logprob": -(10**400)}]})).encode())


def test_a_server_that_does_not_know_a_field_is_asked_without_it():
    def say(number, body):
        return (
            (400, "Unrecognized request argument: return_token_ids") if "return_token_ids" in body else answer("Good.")
        )

    with serving(say) as (address, asked):
        policy, _, _ = remote(address)
        assert [policy.reply(CONTEXT, TOOLS, 50).text for _ in range(2)] == ["Good.", "Good."]
    assert ["return_token_ids" in body for body, _ in asked] == [True, False, False]
    assert all("logprobs" in body for body, _ in asked), "what was not refused is asked for on"


def test_a_server_that_says_nothing():
    with serving(lambda number, body: SILENT if number else answer("Once.")) as (address, _):
        policy, said, _ = remote(address, seconds=0.2)
        assert policy.reply(CONTEXT, TOOLS, 50).text == "Once."
        with pytest.raises(PolicyError, match="timed out"):
            policy.reply(CONTEXT, TOOLS, 50)
    assert len(said) == TRIES - 1


def test_nobody_there():
    with serving(lambda number, body: answer()) as (address, _):
        pass
    with pytest.raises(PolicyError, match=r"^http://127\.0\.0\.1:\d+/v1: .*refused"):
        remote(address)[0].reply(CONTEXT, TOOLS, 50)


@pytest.mark.parametrize("address", ["", "localhost:8000", "file:///etc/passwd", "http://a b"])
def test_what_is_no_address(address):
    with pytest.raises(ValueError, match="is no address of a model: it begins with http"):
        Remote(address, "a-model")


@pytest.mark.parametrize(
    ("message", "text", "calls"),
    [
        ({"content": None, "tool_calls": None}, "", ()),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab", ()),
        (
            {"tool_calls": [{"function": {"name": "read", "arguments": {"path": "a"}}}]},
            "",
            (Called("call-0", "read", '{"path": "a"}'),),
        ),
        ({"tool_calls": [{"id": 7, "function": {"name": None}}]}, "", (Called("7", "", "{}"),)),
    ],
)
def test_servers_that_differ_are_read(message, text, calls):
    found = read(json.dumps({"choices": [{"message": message}]}).encode())
    assert (found.text, found.calls, found.tokens, found.prompt_tokens) == (text, calls, None, None)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda x: st.lists(x) | st.dictionaries(st.text(), x),
    max_leaves=4,
)


@given(JSON, JSON, JSON, JSON)
def test_whatever_a_server_says_is_a_reply_or_an_error(content, calls, usage, more):
    said = {
        "choices": [{"message": {"content": content, "tool_calls": calls}, "logprobs": more, "token_ids": usage}],
        "usage": usage,
    }
    for one in (said, {"choices": more}, content):
        try:
            found = read(json.dumps(one).encode())
        except ValueError as error:
            assert str(error).startswith("the answer is none of chat completions")
        else:
            assert isinstance(found.text, str) and all(isinstance(call.arguments, str) for call in found.calls)
