"""Transcripts by hand: what a reply called and what it was told, in few words."""

import json

__all__ = ["PATH", "begin", "changed", "grade", "made", "summary", "turn"]

PATH = "words/nouns.py"


def begin(task="words-1.0-0", prompt=f"In {PATH}: write `plural` again.") -> dict:
    tools = ["read", "write", "edit", "grep", "shell", "lints", "finish"]
    asked = {
        "task": task,
        "system": "You work.",
        "prompt": prompt,
        "tools": tools,
        "strict": False,
        "budget": {},
        "tree": "0",
    }
    schema = {
        "type": "function",
        "function": {"name": "read", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
    }
    return {"kind": "begin", **asked, "schemas": [schema]}


def made(name: str, said="", *, ok=True, exit=None, broken=False, ended=None, **arguments) -> tuple[dict, dict]:
    """A call with its answer. `arguments`: where there is one called `written`, it is sent as it is."""
    code = {"exit": exit} if exit is not None else {}
    text = said + (f"\n[exit code {exit}]" if exit else "") + (f"\n[ended: {ended}]" if ended else "")
    more = code | ({"broken": True} if broken else {}) | ({"ended": ended} if ended else {})
    call = {"id": "", "name": name, "arguments": arguments.get("written", json.dumps(arguments))}
    return call, {
        "kind": "answer",
        "id": "",
        "tool": name,
        "text": text.strip("\n"),
        "ok": ok and not (exit or broken or ended),
        **more,
        "seconds": 0.1,
    }


def turn(*calls, text="", diff="", **more) -> list[dict]:
    """The lines of a turn: a reply, the answers, and its end. Calls have the ids call_0, call_1, …, as some servers
    give them."""
    asked = [{**call, "id": f"call_{number}"} for number, (call, _) in enumerate(calls)]
    answers = [{**answer, "id": f"call_{number}"} for number, (_, answer) in enumerate(calls)]
    end = {"kind": "turn", "tree": "0", "spent": 1.0} | ({"diff": diff} if diff else {})
    return [{"kind": "reply", "text": text, "calls": asked, "seconds": 0.1, **more}, *answers, end]


def changed(path=PATH, old="    return noun", new='    return noun + "s"', was_there=True) -> str:
    """A difference of one line."""
    head = "@@ -9 +9 @@" if was_there else "@@ -0,0 +1 @@"
    return "\n".join([f"--- a/{path}", f"+++ b/{path}", head, *([f"-{old}"] if was_there else []), f"+{new}"])


def summary(text="nothing yet") -> list[dict]:
    return [{"kind": "summary", "text": text, "tree": "0", "spent": 1.0, "seconds": 0.1}]


def grade(*failed, success=False) -> dict:
    return {
        "kind": "grade",
        "reward": float(success),
        "success": success,
        "flags": [],
        "passed": 1,
        "of": 2,
        "failed": dict.fromkeys(failed, "failed"),
    }
