"""One episode: a policy, tools, a sandbox, and a transcript that a killed episode goes on with.

A turn is a reply and the answers to its calls, which are made in the order in which they stand there. Behind each turn
the tree is stored, so the transcript names a tree for each: an episode that was interrupted goes on from the last one,
in a fork. A context that comes near its limit is replaced by the policy's own summary (self-summarisation;
ref/self_summary.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace

from environments.harness.messages import Called, Message, Policy, PolicyError, text_of
from environments.harness.record import Record, context, elapsed_seconds
from environments.harness.tools import openai, select_tools
from environments.harness.workspace import INVALID_CALL, Job, Workspace
from environments.sandbox.interface import Sandbox
from environments.sandbox.store import Store
from environments.sandbox.visible import one_line
from kit.settings import RunError

__all__ = ["CUT", "NUDGE", "PATIENCE", "Budget", "Episode", "size"]

NUDGE = "You have called no tool. Call one, or call finish if you are done."
CUT = "Your reply reached its limit on length before it called a tool. Think less, and call one."
SUMMARISE = (
    "The context is nearly full. Write a summary for yourself with which you can go on: what was "
    "asked, what you have found and changed, with the "
    "names of files, and what is left to do. Nothing else of this conversation will be there."
)
LEAST = 16
"""Tokens that a reply may always have."""
ROOM = 0.8
"""Share of a context behind which it is summarised."""
PATIENCE, CUTS = 2, 6
"""Replies without a call, one after the other, that end an episode; and those that were cut off before they could call
anything."""


@dataclass(frozen=True)
class Budget:
    """What an episode may use. Raises ValueError unless all are positive."""

    turns: int = 40
    tokens: int = 60_000
    """That the policy samples, in all."""
    seconds: float = 1800.0
    """Of wall-clock in all."""
    context: int = 16_000
    """Tokens of a context. Where a policy does not tell how many it has, four characters count as one."""
    reply: int = 2_000
    """Tokens of a reply, at most."""
    call: float = 60.0
    """Seconds of a call."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"{field.name} must be positive; got {getattr(self, field.name)}")


def size(messages: Sequence[Message]) -> int:
    """Tokens of some messages, at four characters each."""
    letters = (
        len(message.text)
        + len(text_of(message.thoughts))
        + sum(len(call.name) + len(call.arguments) for call in message.calls)
        for message in messages
    )
    return sum(letters) // 4


class Episode:
    """`fork`: opens a sandbox over a stored tree. `on_line`: hears every line of the transcript, to show it."""

    def __init__(
        self,
        job: Job,
        policy: Policy,
        record: Record,
        fork: Callable[[str], Sandbox],
        store: Store,
        budget: Budget = Budget(),
        on_line: Callable[[dict], None] = lambda line: None,
    ) -> None:
        """A transcript that holds lines already is gone on with, under the budget that it was begun with. Raises
        RunError for another task's."""
        self.job, self.policy, self.record, self.store, self.budget, self.on_line = (
            job,
            policy,
            record,
            store,
            budget,
            on_line,
        )
        self.tools = {tool.name: tool for tool in select_tools(job.tools)}
        if not record.lines:
            begin_fields = {
                "task": job.task,
                "system": job.system,
                "prompt": job.prompt,
                "tools": [*self.tools],
                "strict": job.strict,
                "who": job.policy_name,
            }
            self._add(
                "begin",
                **begin_fields,
                budget=asdict(budget),
                schemas=openai([*self.tools.values()], job.strict),
                tree=job.tree,
            )
        begin = record.lines[0]
        if (begin["task"], begin["prompt"], begin["strict"], begin["tools"]) != (
            job.task,
            job.prompt,
            job.strict,
            [*self.tools],
        ):
            raise RunError(
                f"{record.path} is a transcript of {one_line(begin['task'])}, or was begun with "
                f"another prompt or other tools"
            )
        if begin.get("who", "") != job.policy_name:
            raise RunError(
                f"{record.path} was begun by {one_line(begin.get('who', '')) or 'nobody'}, not by "
                f"{job.policy_name or 'nobody'}"
            )
        try:
            self.budget = Budget(**begin["budget"])
        except (TypeError, ValueError) as error:
            raise RunError(f"{record.path}: line 1 is none of a transcript: {one_line(str(error))}") from None
        self.schemas = len(json.dumps(openai([*self.tools.values()], job.strict))) // 4
        self.before = elapsed_seconds(record.lines)
        self.since = time.monotonic()
        self.turns = sum(line["kind"] == "reply" for line in record.lines)
        self.tokens = sum(line.get("tokens") or 0 for line in record.lines if line["kind"] in ("reply", "summary"))
        self.ids = {call["id"] for line in record.lines if line["kind"] == "reply" for call in line["calls"]}
        self.next_id = 1
        tree = next(line["tree"] for line in reversed(record.lines) if "tree" in line)
        self.workspace = Workspace(job, fork, store, self.budget.call, tree)
        self.workspace.over = next((line["over"] for line in record.lines if "over" in line), "")

    @property
    def tree(self) -> str:
        """The stored tree behind the last turn."""
        return self.workspace.tree

    def play(self) -> str:
        """Plays until the episode is over, and gives the hash of the tree that is left. Raises PolicyError where the
        policy gives no answer: the same transcript goes on later."""
        if any(line["kind"] == "end" for line in self.record.lines):
            return self.tree
        try:
            while not (reason := self._end_reason()):
                self._turn()
            self._add("end", why=reason, seconds=self._elapsed_seconds())
        except PolicyError as error:
            self._add("stop", why=one_line(str(error)))
            raise
        finally:
            self.workspace.close()
        return self.tree

    def _end_reason(self) -> str:
        """Why the episode is over, if it is."""
        b, lines = self.budget, self.record.lines
        replies = [line for line in lines if line["kind"] == "reply"][-CUTS:]
        unfinished = [not line["calls"] and bool(line.get("cut")) for line in replies]
        silent = [not line["calls"] and not line.get("cut") for line in replies[-PATIENCE:]]
        if self.workspace.over:
            return self.workspace.over
        if len(silent) == PATIENCE and all(silent):
            return "nothing was called"
        if len(unfinished) == CUTS and all(unfinished):
            return f"{CUTS} replies in a row were cut off before they called anything"
        if self.turns >= b.turns:
            return f"{b.turns} turns"
        if self.tokens >= b.tokens:
            return f"{b.tokens} tokens"
        if self._elapsed_seconds() >= b.seconds:
            return f"{b.seconds:g} seconds"
        return ""

    def _elapsed_seconds(self) -> float:
        return self.before + time.monotonic() - self.since

    def _add(self, kind: str, **fields: object) -> None:
        self.record.add(kind, **fields)
        self.on_line(self.record.lines[-1])

    def _size(self, messages: Sequence[Message]) -> int:
        """Tokens of the context: those that the policy told of its last one, and what came since."""
        replies = [at for at, message in enumerate(messages) if message.role == "assistant"]
        last = next((line for line in reversed(self.record.lines) if line["kind"] in ("reply", "summary")), None)
        if replies and last and last["kind"] == "reply" and last.get("prompt_tokens") is not None:
            return last["prompt_tokens"] + (last.get("tokens") or 0) + size(messages[replies[-1] + 1 :])
        return size(messages) + self.schemas

    def _turn(self) -> None:
        """A reply and the answers to its calls; or a summary."""
        messages, b, since = context(self.record.lines), self.budget, time.monotonic()
        context_tokens = self._size(messages)
        if len(messages) > 3 and context_tokens > ROOM * b.context:
            prompt = shorten([*messages, Message("user", SUMMARISE)], b.context - min(b.reply, b.context // 4))
            reply = self.policy.reply(prompt, (), max(1, min(b.reply, b.context // 4, b.tokens - self.tokens)))
            text = reply.text or text_of(reply.thoughts)
            self.tokens += self._count(text, reply.tokens)
            usage = {"prompt_tokens": reply.prompt_tokens, "tokens": self._count(text, reply.tokens)}
            self._add(
                "summary",
                text=text,
                **usage,
                tree=self.tree,
                spent=self._elapsed_seconds(),
                seconds=time.monotonic() - since,
            )
            return
        reply = self.policy.reply(
            messages,
            [*self.tools.values()],
            max(LEAST, min(b.reply, b.tokens - self.tokens, b.context - context_tokens)),
        )
        calls = self._with_ids(reply.calls)
        token_count = self._count(
            reply.text + text_of(reply.thoughts) + "".join(call.arguments for call in calls), reply.tokens
        )
        self.tokens, self.turns = self.tokens + token_count, self.turns + 1
        sample_fields = {
            name: getattr(reply, name)
            for name in ("token_ids", "logprobs", "prompt_ids")
            if getattr(reply, name) is not None
        }
        sample_fields |= {"thoughts": dict(reply.thoughts)} if reply.thoughts else {}
        reply_fields = {"prompt_tokens": reply.prompt_tokens, "tokens": token_count, "cut": reply.cut, **sample_fields}
        self._add(
            "reply",
            text=reply.text,
            calls=[asdict(call) for call in calls],
            **reply_fields,
            seconds=time.monotonic() - since,
        )
        for number, call in enumerate(calls):
            answer = self.workspace.call(call, number, self.budget.seconds - self._elapsed_seconds())
            answer_fields = {INVALID_CALL: True} if answer.is_invalid else {}
            answer_fields |= {
                name: value
                for name, value in (("exit", answer.exit), ("ended", answer.end_reason))
                if value is not None
            }
            self._add(
                "answer",
                id=call.id,
                tool=call.name,
                text=answer.text,
                ok=answer.ok,
                **answer_fields,
                seconds=answer.seconds,
            )
        if not calls:
            self._add("nudge", text=CUT if reply.cut else NUDGE)
        changed, complaint = self.workspace.keep() if calls else ("", "")
        if complaint:
            self._add("nudge", text=complaint)
        turn_fields = {name: value for name, value in (("diff", changed), ("over", self.workspace.over)) if value}
        self._add("turn", tree=self.tree, **turn_fields, spent=self._elapsed_seconds())

    def _with_ids(self, calls: Sequence[Called]) -> tuple[Called, ...]:
        """The calls of a reply, each with an id that no other one of the transcript has: by them answers find their
        calls. Servers give none, the same ones in each reply, or one twice. New ones have nine letters and digits,
        which the strictest server wants."""
        unique_calls = []
        for call in calls:
            name = call.id
            while not name or name in self.ids:
                name, self.next_id = f"c{self.next_id:08d}", self.next_id + 1
            self.ids.add(name)
            unique_calls.append(replace(call, id=name))
        return tuple(unique_calls)

    def _count(self, text: str, reported: int | None) -> int:
        return reported if reported is not None else -(-len(text) // 4)


def shorten(messages: Sequence[Message], max_tokens: int) -> list[Message]:
    """The messages in at most so many tokens, if that can be had: the oldest answers of tools lose their text first,
    then what the policy wrote."""
    shortened = [*messages]
    for role in ("tool", "assistant"):
        for at, message in enumerate(shortened):
            if size(shortened) <= max_tokens:
                return shortened
            if message.role == role:
                calls = tuple(Called(call.id, call.name, "{}") for call in message.calls)
                shortened[at] = Message(role, "[left out: there is no room]", calls, message.answers)
    return shortened
