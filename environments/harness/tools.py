"""The tools of an agent: one description of each, rendered for OpenAI, Anthropic and MCP, and checked by the same.

Eight of them run in the sandbox, as environments/sandbox/inside/server.py has them. The others are the harness's own: a
to-do list, lints, a search through the source as it was at the beginning, a search through a frozen corpus of pages,
and the end of the episode.

An environment chooses a subset, and how strict it is (Composer 2, §6.2). Strict: a call that does not fit its schema is
broken. Lenient: numbers and truth values that stand there as text are read, and arguments that do not exist are left
out. A broken call is never an error of the rollout: the agent is told in one line what is wrong, and a figure counts
it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kit.disk import parse_json

__all__ = [
    "INSIDE",
    "OWN",
    "STATES",
    "TOOLS",
    "Argument",
    "BadCall",
    "Tool",
    "anthropic",
    "select_tools",
    "mcp",
    "openai",
]

STATES = ("open", "started", "done", "cancelled")
"""Of an item of the to-do list."""
TODO = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "state": {"type": "string", "enum": [*STATES]}},
    "required": ["text", "state"],
    "additionalProperties": False,
}
WORDS = {"string": "text", "integer": "a whole number", "boolean": "true or false", "array": "a list"}


class BadCall(ValueError):
    """What is wrong with a call, in one line that the agent is told."""


@dataclass(frozen=True)
class Argument:
    name: str
    kind: str
    """"string", "integer", "boolean" or "array"; an array holds items of the to-do list."""
    says: str
    needed: bool = True

    def schema(self, nullable: bool = False) -> dict:
        """JSON schema. `nullable`: null stands for an argument that is not given, as OpenAI's strict mode wants it."""
        kind = [self.kind, "null"] if nullable and not self.needed else self.kind
        return {"type": kind, "description": self.says} | ({"items": TODO} if self.kind == "array" else {})


@dataclass(frozen=True)
class Tool:
    name: str
    says: str
    arguments: tuple[Argument, ...] = ()

    def schema(self, strict: bool = False) -> dict:
        """JSON schema of the arguments. `strict`: as OpenAI's strict mode wants it, every argument required."""
        return {
            "type": "object",
            "properties": {argument.name: argument.schema(strict) for argument in self.arguments},
            "required": [argument.name for argument in self.arguments if argument.needed or strict],
            "additionalProperties": False,
        }

    def parse_arguments(self, arguments: str | Mapping[str, object], strict: bool = False) -> dict:
        """The arguments of a call, from what a model wrote. Raises BadCall."""
        arguments_by_name = {argument.name: argument for argument in self.arguments}
        args = _parse_arguments(self.name, arguments)
        values = {}
        for name, value in args.items():
            if name not in arguments_by_name:
                if strict:
                    raise BadCall(
                        f"{self.name} has no argument {name[:100]!r}; it has {', '.join(arguments_by_name) or 'none'}"
                    )
                continue
            if value is None and not arguments_by_name[name].needed:
                continue
            values[name] = _check_value(self.name, arguments_by_name[name], value, strict)
        for name, argument in arguments_by_name.items():
            if argument.needed and name not in values:
                raise BadCall(f"{self.name} needs {name}, {WORDS[argument.kind]}")
        return values


def _parse_arguments(tool: str, arguments: str | Mapping[str, object]) -> Mapping[str, object]:
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise BadCall(f"the arguments of {tool} are no JSON: {str(error)[:100]}") from None
    if not isinstance(arguments, Mapping):
        raise BadCall(f"the arguments of {tool} must be a JSON object, with a name for each")
    return arguments


def _check_value(tool: str, argument: Argument, value: object, strict: bool) -> object:
    if not strict and isinstance(value, str):
        text = value.strip()
        if (
            argument.kind == "integer"
            and text.removeprefix("-").isascii()
            and text.removeprefix("-").isdigit()
            and len(text) < 20
        ):
            return int(text)
        if argument.kind == "boolean" and text.lower() in ("true", "false"):
            return text.lower() == "true"
    if not strict and argument.kind == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)
    expected = {"string": str, "integer": int, "boolean": bool, "array": list}[argument.kind]
    if type(value) is not expected:
        raise BadCall(f"{argument.name} of {tool} must be {WORDS[argument.kind]}; got {json.dumps(value)[:100]}")
    if isinstance(value, list):
        return [_check_item(tool, argument.name, item) for item in value]
    return value


def _check_item(tool: str, name: str, item: object) -> dict:
    if not isinstance(item, Mapping) or not isinstance(item.get("text"), str) or item.get("state") not in STATES:
        raise BadCall(f"each of {name} of {tool} must have a text and a state: {', '.join(STATES)}")
    return {"text": item["text"], "state": item["state"]}


def _path_argument(says: str = "Path in the work tree.") -> Argument:
    return Argument("path", "string", says)


IN_FOLDER = Argument("path", "string", "Folder to look in; the work tree by default.", False)
INSIDE = (
    Tool(
        "read",
        "Read a text file.",
        (
            _path_argument(),
            Argument("start", "integer", "Number of the first line, from 1.", False),
            Argument("lines", "integer", "How many lines; 0 for all.", False),
        ),
    ),
    Tool(
        "write",
        "Make or replace a file, and the folders that it lies in.",
        (_path_argument(), Argument("text", "string", "The whole file.")),
    ),
    Tool(
        "edit",
        "Replace a piece of a file by another one.",
        (
            _path_argument(),
            Argument("old", "string", "What stands there now, exactly; it must occur once."),
            Argument("new", "string", "What shall stand there."),
            Argument("every", "boolean", "Replace it wherever it occurs.", False),
        ),
    ),
    Tool("delete", "Delete a file, a link, or a folder with all that is in it.", (_path_argument(),)),
    Tool("list", "List a folder.", (IN_FOLDER,)),
    Tool(
        "glob",
        "Find files by name: * and ? stay within a folder, ** crosses folders.",
        (Argument("pattern", "string", "The glob."), IN_FOLDER),
    ),
    Tool(
        "grep",
        "Find lines by a regular expression of Python.",
        (
            Argument("pattern", "string", "The expression."),
            IN_FOLDER,
            Argument("glob", "string", "Only in files that this glob matches.", False),
            Argument("ignore_case", "boolean", "Take capitals and small letters for the same.", False),
        ),
    ),
    Tool(
        "shell",
        "Run a command with sh. There is no network. Processes end with the command.",
        (
            Argument("command", "string", "The command."),
            Argument("cwd", "string", "Folder to run it in; the work tree by default.", False),
        ),
    ),
)
"""Those that run in the sandbox."""
OWN = (
    Tool("lints", "Say what a reviewer would find in the lines of a file that are new.", (_path_argument(),)),
    Tool("todo", "Replace the to-do list.", (Argument("items", "array", "All items, in order."),)),
    Tool(
        "semantic_search",
        "Find places in the source, as it was at the beginning, by words that say what they are about.",
        (Argument("query", "string", "Words."),),
    ),
    Tool("web_search", "Find pages in a frozen copy of documentation.", (Argument("query", "string", "Words."),)),
    Tool(
        "finish",
        "End the episode. What lies in the work tree is graded.",
        (Argument("message", "string", "What was done, in short."),),
    ),
)
"""Those of the harness."""
TOOLS = {tool.name: tool for tool in (*INSIDE, *OWN)}


def select_tools(names: Sequence[str]) -> tuple[Tool, ...]:
    """Tools by their names. Raises ValueError for one that does not exist, and where `finish` is missing: an episode
    could not end well."""
    if unknown := [name for name in names if name not in TOOLS]:
        raise ValueError(f"there is no tool {unknown[0]!r}; there are {', '.join(TOOLS)}")
    if "finish" not in names or len({*names}) != len(names):
        raise ValueError(f"tools must hold finish, and each once; got {', '.join(names)}")
    return tuple(TOOLS[name] for name in names)


def openai(tools: Sequence[Tool], strict: bool = False) -> list[dict]:
    """`tools` of a request for chat completions."""
    strict_field = {"strict": True} if strict else {}
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.says, "parameters": tool.schema(strict)} | strict_field,
        }
        for tool in tools
    ]


def anthropic(tools: Sequence[Tool]) -> list[dict]:
    """`tools` of a request for messages."""
    return [{"name": tool.name, "description": tool.says, "input_schema": tool.schema()} for tool in tools]


def mcp(tools: Sequence[Tool]) -> list[dict]:
    """`tools` of an answer to tools/list, Model Context Protocol."""
    return [{"name": tool.name, "description": tool.says, "inputSchema": tool.schema()} for tool in tools]
