"""Episodes against servers that refuse what others forgive, and against servers that send an answer without an end. All
exchanges are recorded."""

import json
import socket
import threading
import time
import urllib.request
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.deadline import fetch_answer
from environments.harness.episode import CUT, CUTS, NUDGE, Budget
from environments.harness.messages import Message, PolicyError
from environments.harness.record import Record, context
from environments.harness.remote import Form, Remote, conversation
from environments.tasks import sources
from kit.settings import RunError
from tests.environments.served import answer, serving
from tests.environments.test_episode import episode


def refuse_thoughtless(number, body):
    """As DeepSeek: a call of the history must stand with the thought that led to it."""
    made = [message for message in body["messages"] if message.get("tool_calls")]
    if not all(str(message.get("reasoning_content")).startswith("thought ") for message in made):
        return "The reasoning_content in the thinking mode must be passed back to the API."


def refuse_max_tokens(number, body):
    """As OpenAI's models that think, which know no log-probs either."""
    if "max_tokens" in body:
        return (
            "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
        )
    if "logprobs" in body:
        return "'logprobs' is not supported with this model."
    return None if body["max_completion_tokens"] > 0 else "a limit must be positive"


def refuse_roles(number, body):
    """As templates of Mistral and Llama 2; none of Gemma takes a system."""
    rows = [message for message in body["messages"] if message["role"] != "tool" and not message.get("tool_calls")]
    roles = [row["role"] for row in rows]
    if "system" in roles:
        return "System role not supported"
    if any(first == second == "user" for first, second in zip(roles, roles[1:], strict=False)):
        return "Conversation roles must alternate user/assistant/user/assistant/..."
    if any(not row["content"] for row in rows):
        return "Assistant message must have either content or tool_calls, but not none."


def refuse_ids(number, body):
    """Every call has its own id, and answers follow their calls."""
    made = [call["id"] for message in body["messages"] for call in message.get("tool_calls", ())]
    answered = [message["tool_call_id"] for message in body["messages"] if message["role"] == "tool"]
    if len({*made}) < len(made) or made != answered or not all(made):
        return f"tool_use ids must be unique and answered in order; got {made} and {answered}"


def refuse_once(number, body):
    """Of another cause."""
    return "model is loading" if number in (1, 6) else None


SERVERS = {
    "thoughts": [refuse_thoughtless],
    "limit": [refuse_max_tokens],
    "roles": [refuse_roles],
    "ids": [refuse_ids],
    "once": [refuse_once],
    "all": [refuse_once, refuse_max_tokens, refuse_thoughtless, refuse_roles, refuse_ids],
}


def strict_server(rules, script):
    """Says the script, one answer for each request that is not refused."""
    refusals, said = [], []

    def say(number, body):
        if words := next((words for rule in rules if (words := rule(number, body))), None):
            refusals.append(words)
            return 400, json.dumps({"error": {"message": words, "type": "invalid_request_error"}})
        if "tools" not in body:
            return answer("I have written a; b is left.", usage=(300, 10))
        said.append(number)
        return script(len(said) - 1, number)

    return say, refusals


def thinking(said, number, **more):
    said["choices"][0]["message"] |= {"reasoning_content": f"thought {number}", **more}
    return said


def script(turn, number):
    """Calls with the same id each time, a reply without a call, one that is cut in its thoughts, a context that fills
    up, the end."""
    writes = ("write", {"path": f"a{turn}", "text": "1"}), ("read", {"path": f"a{turn}"})
    if turn == 1:
        return thinking(answer("Hm."), number)
    if turn in (2, 3):
        return thinking(answer("", finish_reason="length"), number)
    if turn == 7:
        return thinking(answer("", ("finish", {"message": "done"})), number)
    said = thinking(answer("", *writes, usage=(200 if turn != 5 else 900, 10)), number)
    for call in said["choices"][0]["message"]["tool_calls"]:
        call["id"] = "call_0" if turn < 5 else ""
    return said


@pytest.mark.parametrize("name", SERVERS)
def test_an_episode_ends_well_against_a_strict_server(tmp_path, name):
    say, refusals = strict_server(SERVERS[name], script)
    with serving(say) as (address, asked):
        policy = Remote(address, "m", sleep=lambda seconds: None)
        played, journal = episode(tmp_path / "t", policy, Budget(context=1000, reply=100))
        tree = played.play()
        assert journal.lines[-1]["why"] == "finish", refusals
        sent = [body for body, _ in asked]
        assert len(refusals) <= {"thoughts": 0, "limit": 2, "roles": 2, "ids": 0, "once": 2}.get(name, 6), refusals
        # A session that goes on behind the summary meets the same server.
        journal.close()
        lines = (tmp_path / "t").read_text().splitlines(keepends=True)
        behind = next(at for at, line in enumerate(lines) if json.loads(line)["kind"] == "summary") + 1
        (tmp_path / "u").write_text("".join(lines[:behind]))
        turns = sum(json.loads(line)["kind"] == "reply" for line in lines[:behind])
        say, _ = strict_server(SERVERS[name], lambda turn, number: script(turn + turns, number))
    with serving(say) as (address, _):
        again, resumed = episode(tmp_path / "u", Remote(address, "m", sleep=lambda seconds: None))
        assert again.play() == tree and resumed.lines[-1]["why"] == "finish"
    if name == "once":
        assert "logprobs" in sent[-1] and "return_token_ids" in sent[-1]
    thoughts = [line["thoughts"]["reasoning_content"] for line in journal.lines if line["kind"] == "reply"]
    assert len(thoughts) == 8 and all(thought.startswith("thought ") for thought in thoughts), (
        "what was sampled stands in the transcript"
    )
    nudges = [line["text"] for line in journal.lines if line["kind"] == "nudge"]
    assert nudges == [NUDGE, CUT, CUT]


def test_a_server_that_never_takes_the_extras_is_asked_without_them_in_the_end():
    def say(number, body):
        return (400, "bad request") if "logprobs" in body else answer("Fine.")

    heard = []
    with serving(say) as (address, asked):
        policy = Remote(address, "m", on_retry=heard.append, sleep=lambda seconds: None)
        assert [policy.reply([Message("user", "Go.")], (), 50).text for _ in range(4)] == ["Fine."] * 4
    assert ["logprobs" in body for body, _ in asked] == [True, False, True, False, False, False]
    assert "asked again in 1 s, without logprobs and return_token_ids" in heard[0] and heard[-1].endswith(
        "not asked for any more"
    )


def test_what_helps_against_no_refusal_is_taken_back():
    """A context that is too long names the limit as well."""
    with serving(lambda number, body: (400, "max_tokens or max_completion_tokens too large")) as (address, asked):
        policy = Remote(address, "m", sleep=lambda seconds: None)
        for _ in range(2):
            with pytest.raises(PolicyError, match="too large"):
                policy.reply([Message("user", "Go.")], (), 50)
    assert ["max_tokens" in body for body, _ in asked[: len(asked) // 2]] == [
        "max_tokens" in body for body, _ in asked[len(asked) // 2 :]
    ]
    assert policy.limit == "max_tokens" and len(policy.extras) == 2 and len(asked) <= 6


def test_replies_that_are_always_cut_end_the_episode(tmp_path):
    with serving(lambda number, body: thinking(answer("", finish_reason="length"), number)) as (address, _):
        played, journal = episode(tmp_path / "t", Remote(address, "m"))
        played.play()
    assert journal.lines[-1]["why"] == f"{CUTS} replies in a row were cut off before they called anything"


@pytest.mark.parametrize(
    "thoughts",
    [
        {"reasoning": "so"},
        {"reasoning_content": "so", "reasoning": "so"},
        {"reasoning_details": [{"type": "reasoning.encrypted", "data": "AAAA", "index": 0}], "reasoning": None},
    ],
)
def test_thoughts_go_back_as_they_came(tmp_path, thoughts):
    def say(number, body):
        said = answer("", ("list", {}) if number == 0 else ("finish", {"message": "done"}))
        said["choices"][0]["message"] |= thoughts
        return said

    with serving(say) as (address, asked):
        played, journal = episode(tmp_path / "t", Remote(address, "m"))
        played.play()
    sent = asked[1][0]["messages"][2]
    given = {name: value for name, value in thoughts.items() if value}
    assert {name: value for name, value in sent.items() if name.startswith("reasoning")} == given
    journal.close()
    with Record(tmp_path / "t") as again:
        assert context(again.lines)[2].thoughts == given


ROLES = st.sampled_from(["system", "user", "assistant", "tool"])


@given(st.lists(st.tuples(ROLES, st.sampled_from(["", "a", "b\n"])), max_size=12), st.booleans(), st.booleans())
def test_no_two_messages_of_the_user_stand_together_and_no_word_is_lost(rows, without_system, alternating):
    messages = [Message(role, text, answers="1" if role == "tool" else "") for role, text in rows]
    sent = conversation(messages, Form(without_system, alternating))
    roles = [row["role"] for row in sent]
    assert not any(first == second == "user" for first, second in zip(roles, roles[1:], strict=False))
    assert not (without_system and "system" in roles)
    assert not (alternating and ("tool", "user") in zip(roles, roles[1:], strict=False))
    words = "".join(row["content"] for row in sent).replace("\n", "")
    assert words == "".join(text for _, text in rows).replace("\n", "")


# Answers that never end.


@contextmanager
def dripping(beginning: bytes, rest: bytes = b"x"):
    """Sends the beginning at once, and then a byte every few milliseconds until the other side has gone."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.02)

        def drip(peer):
            with peer:
                try:
                    peer.recv(65536)
                    peer.sendall(beginning)
                    at = 0
                    while not over.wait(0.005):
                        peer.sendall(rest[at % len(rest) : at % len(rest) + 1])
                        at += 1
                except OSError:
                    pass

        def accept():
            while not over.is_set():
                try:
                    peer, _ = server.accept()
                except OSError:
                    continue
                peer.setblocking(True)
                threading.Thread(target=drip, args=(peer,), daemon=True).start()

        listener = threading.Thread(target=accept, daemon=True)
        listener.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            over.set()
            listener.join()


WHOLE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n{"
STREAM = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{"
CHUNKS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
HELLO = b"\x16\x03\x03\x40\x00\x02\x00\x3f\xfc\x03\x03"
"""A handshake of TLS that says it has 16 KiB."""


@pytest.mark.parametrize(
    ("scheme", "beginning", "rest"),
    [
        ("http", WHOLE, b"x"),
        ("http", STREAM, b"x"),
        ("http", CHUNKS, b"1\r\nx\r\n"),
        ("https", HELLO, b"x"),
        ("http", b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
)
def test_a_server_that_drips_is_given_up_in_time(scheme, beginning, rest):
    """A byte every few milliseconds keeps within every timeout of a socket."""
    with dripping(beginning, rest) as place:
        policy, since = Remote(f"{scheme}://{place}/v1", "m", seconds=0.1, sleep=lambda seconds: None), time.monotonic()
        with pytest.raises(PolicyError, match="timed out"):
            policy.reply([Message("user", "Go.")], (), 50)
    assert time.monotonic() - since < 20


def test_a_refusal_that_drips_is_a_refusal():
    with dripping(b"HTTP/1.1 401 No\r\nContent-Length: 1000\r\n\r\nno") as place:
        with pytest.raises(PolicyError, match="answers 401"):
            Remote(f"http://{place}/v1", "m", seconds=0.1).reply([Message("user", "Go.")], (), 50)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, len(WHOLE)))
def test_wherever_the_dripping_begins_the_answer_is_given_up(at):
    with dripping(WHOLE[:at], WHOLE[at:] + b"x" * 1000) as place, pytest.raises(OSError, match="timed out"):
        fetch_answer(urllib.request.Request(f"http://{place}/"), 0.05, 10**6)


def test_an_index_that_drips_is_given_up(monkeypatch, tmp_path):
    monkeypatch.setattr(sources, "SECONDS", 0.1)
    with dripping(WHOLE) as place:
        monkeypatch.setenv("PIP_INDEX_URL", f"http://{place}/simple")
        with pytest.raises(RunError, match="cannot be reached: the request timed out"):
            sources.fetch("words", None, tmp_path)
