"""What an episode of the small world was, as messages with their places in the chain, and as the record that prices,
monitors and hints read (`ref/transcript.py`).

A chain holds tokens. It says which of them the policy wrote, and where a context ends, but not what a call did. So
every turn is played once more, in a fresh session and one call at a time: equal turns give equal answers. That also
finds answers which the context does not hold, because the turns were used up or a limit cut the context off.

    read m3             Call("read", "m3")                                    its text
    raed m3             Call("raed", valid=False)                             error: no such call
    write m3            Call("write", "m3", wrote="return a + b")             ok
        return a + b
    test                Call("test", tests=(1, 3))                            passed 1 of 3: …
    done                Call("done")
    (an empty turn)     Call("", valid=False)                                 error: no call

All that a session rejects is broken in the record's words, a refused body as well, so nothing is merely failed. A turn
of the small world is nothing but calls: there is no final message, and who prices `silent` prices all rollouts alike.
In a world with manners (`recipe/microrepo/manners.py`) there are messages, to-do items and calls that fail. What was
said last ends the record."""

from collections.abc import Callable
from dataclasses import dataclass

from recipe.microrepo import Session, Task
from recipe.microrepo.manners import ManneredSession, lints
from recipe.microrepo.session import INDENT, MAX_CALLS
from recipe.small.agent import Language, parted
from ref.rollout import SUMMARY, Rollout
from ref.self_summary import Segment
from ref.transcript import Call, Transcript, Turn

__all__ = ["TOOLS", "Message", "calls_in", "messages", "transcript_of"]

TOOLS = ("read", "write", "test", "done")
"""The calls of the small world."""
REQUEST = "note"
"""What the policy hears when it is to summarise (`recipe/small/demonstrations.py`)."""
ENDLESS_TURNS = 10**9


@dataclass(frozen=True)
class Message:
    """What the policy wrote at a stretch: a turn, a summary, or the beginning of one that a limit cut off."""

    segment: int
    """Number of the context in the chain."""
    begin: int
    """Its first token, as a position in that context."""
    end: int
    """One after its last token, which is the one that ends a turn unless a limit cut the message off."""
    text: str
    """What it says, without that token."""
    context_before: str
    """What the context held before it and the policy did not write there: prompt, answers, the summary of an earlier
    context."""
    summary: bool = False
    """Whether it is a summary: nothing was called."""
    is_whole: bool = True
    """Whether the environment received it: the policy ended it, or the limit of a turn did. Otherwise nothing was
    called either."""
    calls: tuple[Call, ...] = ()
    """What it called, in order."""
    answers: tuple[str, ...] = ()
    """What the environment said to each of them; `done` is not answered."""


def messages(
    rollout: Rollout, language: Language, open_session: Callable[[Task, int], Session] = Session
) -> list[Message]:
    """All messages of a finished rollout, in order, over all contexts of its chain. `open_session` begins an episode of
    the kind that was played, in memory."""
    return read_messages(rollout, language, open_session(rollout.task, ENDLESS_TURNS))


def read_messages(rollout: Rollout, language: Language, session: Session) -> list[Message]:
    """All messages of a finished rollout, played in a fresh session without a limit of turns, which ends where the
    episode did."""
    # Turns that the environment received
    message_list, remaining_turns = (
        [],
        sum(chat_message.role == "assistant" and chat_message.name != SUMMARY for chat_message in rollout.messages),
    )
    for number, segment in enumerate(rollout.chain.segments):
        for span, is_own in parted(segment, language.env):
            if is_own:
                message_list.append(read_message(language, session, segment, number, span, remaining_turns > 0))
                remaining_turns -= not message_list[-1].summary
    return message_list


def read_message(
    language: Language, session: Session, segment: Segment, number: int, span: slice, is_received: bool
) -> Message:
    """The message at these positions of a context; a turn is played in `session`. `is_received`: whether the
    environment received the turn; a summary is whole if the policy ended it."""
    ids, given_ids = segment.tokens[span].tolist(), segment.tokens[: span.start][~segment.sampled[: span.start]]
    text, summary = language.decode(ids[:-1] if ids[-1] == language.env else ids), bool(segment.summary[span.start])
    is_whole = ids[-1] == language.env if summary else is_received
    calls, answers = step_turn(session, text) if is_whole and not summary else ((), ())
    return Message(
        number, span.start, span.stop, text, language.decode(given_ids.tolist()), summary, is_whole, calls, answers
    )


def calls_in(turn: str) -> list[str]:
    """The calls of a turn, each with the lines that belong to it, divided as `Session.step` divides them."""
    lines, calls = [line.rstrip() for line in turn.split("\n")], []
    while lines:
        call = [lines.pop(0)]
        while call[0].startswith("write ") and lines and lines[0].startswith(INDENT):
            call.append(lines.pop(0))
        if call[0]:
            calls.append("\n".join(call))
    return calls


def step_turn(session: Session, turn: str) -> tuple[tuple[Call, ...], tuple[str, ...]]:
    """A turn's calls and their answers. What follows `done` is not called, and one call too many ends the turn."""
    calls, answers = [], []
    for text in calls_in(turn)[:MAX_CALLS] or [""]:
        call, answer = step_call(session, text)
        calls.append(call)
        answers.append(answer)
        if session.done:
            break
    extra_calls = calls_in(turn)[MAX_CALLS:]
    if extra_calls and not session.done:
        calls.append(parse_call(extra_calls[0], valid=False))
        answers.append("error: too many calls")
    return tuple(calls), tuple(answers)


def step_call(session: Session, text: str) -> tuple[Call, str]:
    """One call, played as a turn of its own."""
    invalid_before, runs_before = (session.counts[name] for name in ("invalid_calls", "test_runs"))
    failures_before = count_failures(session)
    answer = session.step(text)
    tests = None
    if session.counts["test_runs"] > runs_before:
        complaints = session.complaints(session.task.visible_tests)
        tests = (complaints.count(None), len(complaints))
    return (
        parse_call(
            text, session.counts["invalid_calls"] == invalid_before, count_failures(session) == failures_before, tests
        ),
        answer,
    )


def count_failures(session: Session) -> int:
    """How many calls have failed so far."""
    return session.failed if isinstance(session, ManneredSession) else 0


def parse_call(text: str, valid: bool, ok: bool = True, tests: tuple[int, int] | None = None) -> Call:
    """The call that this text makes."""
    line, *body = text.split("\n")
    name, *arguments = line.strip(" ").split(" ")
    paths = (
        arguments if name in ("read", "write") else arguments[1:] if name == "sh" and arguments[:1] == ["cat"] else []
    )
    return Call(name, paths[0] if paths else "", "\n".join(part[len(INDENT) :] for part in body), valid, ok, tests)


def transcript_of(rollout: Rollout, open_session: Callable[[Task, int], Session] = Session) -> Transcript:
    """The record of a finished rollout. The prompt and requests for a summary are the user's turns; a summary is a turn
    of the assistant's without calls. What the next context repeats stands here once. A rollout that a limit cut off
    ends in an empty turn: what it had begun to say was not called, and is no final message. `open_session` begins an
    episode of the kind that was played, in memory."""
    session = open_session(rollout.task, ENDLESS_TURNS)
    turns, body = [Turn("user", session.prompt)], ""
    for chat_message in rollout.messages:
        text = chat_message.content or ""
        if chat_message.role != "assistant":
            continue
        if chat_message.name == SUMMARY:
            turns += [Turn("user", REQUEST), Turn("assistant", text)]
            continue
        all_calls, answers = step_turn(session, text)
        calls = tuple(call for call in all_calls if call.name != "say" or not call.valid)
        turns += [Turn("assistant", calls=calls)] if calls else []
        answer_text = "\n".join(answer for answer in answers if answer)
        turns += [Turn("tool", answer_text)] if answer_text else []
        body = next((call.wrote for call in reversed(all_calls) if call.writes), body)
    extras, final_text = {}, ""
    if isinstance(session, ManneredSession):
        extras, final_text = {"todos": session.todos, "lints": lints(session.body)}, session.message
    if final_text or not rollout.chain.finished:
        turns.append(Turn("assistant", final_text if rollout.chain.finished else ""))
    return Transcript(
        tuple(turns), changed_lines=len(body.splitlines()), tokens=rollout.chain.num_sampled_tokens, **extras
    )
