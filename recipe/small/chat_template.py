"""The chat template of a checkpoint: a Jinja program that turns messages into the text that the network reads.

It is foreign code, as the checkpoint is. It runs in jinja2's sandbox, in which nothing can be changed and no attribute
with an underscore can be read, and it is given plain JSON and nothing else. It can still waste time and memory.

Settings and additions are those of transformers, so that a template means the same here: `raise_exception`, `tojson`
without HTML's escapes, `break` and `continue`, `{% generation %}`, which marks what the assistant says, `thinking` as
another name of `reasoning_content`, and `strftime_now`. A template that writes today's date gives other rows on another
day; the environment variable SOURCE_DATE_EPOCH, seconds since 1970, sets the date. Where a checkpoint has several
templates, chats with tools take `tool_use`, and all others `default`."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kit.disk import read_json
from kit.settings import RunError
from recipe.small.agent import SPEAKERS, Language
from ref.network import release

__all__ = ["Template", "template_of"]

BEGIN, END = "\ufdd1", "\ufdd2"
"""Around what a template marks, until it is rendered: Unicode reserves them for such uses."""
CONTROL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TEMPLATE_FOLDER = "additional_chat_templates"
"""A folder of templates by name. As in transformers, files of templates replace those in tokenizer_config.json."""
NO_DEFAULT = "{{- raise_exception('the checkpoint has a template named tool_use, and none for chats without tools') -}}"


class Generation(Extension):
    """`{% generation %}…{% endgeneration %}`."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

    def marked(self, caller) -> str:
        return BEGIN + caller() + END


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which decides about an attribute of plain JSON once instead of at every access: a third of the
    time of a rendering."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        kind = type(obj)
        if kind not in (str, dict, list):
            return super().is_safe_attribute(obj, attr, value)
        if (kind, attr) not in self.decisions:
            self.decisions[kind, attr] = super().is_safe_attribute(obj, attr, value)
        return self.decisions[kind, attr]

    decisions: dict[tuple[type, str], bool]


def make_sandbox(date: datetime) -> Sandbox:
    """Jinja's, with the additions of transformers. `date`: the date for templates that write it."""
    env = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
    env.decisions = {}
    for name in ("lipsum", "cycler", "joiner"):
        del env.globals[name]
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_template_error
    env.globals["strftime_now"] = date.strftime
    return env


def tojson(value: Any, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def read_current_date() -> datetime:
    """The local time, or that of SOURCE_DATE_EPOCH in UTC. Raises ValueError if the variable holds no number of
    seconds."""
    seconds = os.environ.get("SOURCE_DATE_EPOCH")
    if seconds is None:
        return datetime.now()
    try:
        return datetime.fromtimestamp(int(seconds), UTC)
    except (ValueError, OverflowError, OSError):
        raise ValueError(
            f"SOURCE_DATE_EPOCH={seconds} is not a number of seconds since 1970; correct or unset it"
        ) from None


def add_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its thought under both names that templates know."""
    return (
        {"thinking": message["reasoning_content"], **message}
        if message.get("reasoning_content") is not None
        else message
    )


def raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)


class Template:
    """A chat template, as `ref.sft.Render`."""

    def __init__(self, source: str, tokens: dict[str, str] | None = None, tool_use: str | None = None):
        """`tokens`: the control tokens that a template may ask for by name. `tool_use`: another source, for chats with
        tools. Raises ValueError for a source that is no template."""
        self.source, self.tokens, self.created_at = source, tokens or {}, read_current_date()
        self.with_tools = None if tool_use is None else Template(tool_use, tokens)
        try:
            self.template = make_sandbox(self.created_at).from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ValueError(f"the chat template is not one that Jinja reads ({describe_error(error)})") from None

    @property
    def date(self) -> str | None:
        """The date that the template may write; None if it asks for none."""
        uses_date = "strftime_now" in self.source or (self.with_tools is not None and self.with_tools.date is not None)
        return f"{self.created_at:%Y-%m-%d}" if uses_date else None

    def __call__(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], prompt: bool
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """The text, and where it is marked as the assistant's; None for a template without marks. ValueError if it
        refuses the messages."""
        if tools and self.with_tools is not None:
            return self.with_tools(messages, tools, prompt)
        try:
            if any("reasoning_content" in message for message in messages):
                messages = [*map(add_thinking, messages)]
            text = self.template.render(
                messages=messages, tools=tools or None, add_generation_prompt=prompt, **self.tokens
            )
        except Exception as error:  # a program from elsewhere may fail in any way
            raise ValueError(f"the chat template refuses it ({describe_error(error)})") from None
        if "generation" not in self.source or BEGIN not in text:
            return text, None if "endgeneration" not in self.source else []
        clean, spans = "", []
        for number, piece in enumerate(text.split(BEGIN)):
            marked_text, _, tail = piece.partition(END) if number else ("", "", piece)
            spans += [(len(clean), len(clean) + len(marked_text))] if number else []
            clean += marked_text + tail
        return clean, spans


def describe_error(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def template_of(folder: str | Path, language: Language) -> Template:
    """The chat template in a checkpoint's folder; for a tokenizer of this project, the agent's own. Raises RunError if
    there is none."""
    folder = Path(folder)
    settings = read_json_object(folder / "special_tokens_map.json") | read_json_object(folder / "tokenizer_config.json")
    templates = {"default": folder / "chat_template.jinja"} | {
        path.stem: path for path in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))
    }
    sources = {name: path.read_text(encoding="utf-8") for name, path in templates.items() if path.is_file()}
    for fields in (settings, {} if sources else read_json_object(folder / "chat_template.json")):
        source = fields.get("chat_template")
        if isinstance(source, list):
            source = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
        sources = sources or {
            name: text for name, text in (source if isinstance(source, dict) else {"default": source}).items() if text
        }
    if not sources and language.speakers == SPEAKERS[0]:
        sources["default"] = release.make_chat_template(*language.speakers)
    selected_sources = [sources[name] for name in ("default", "tool_use") if name in sources]
    if not selected_sources or not all(isinstance(source, str) for source in selected_sources):
        expected_place = (
            f"chat_template.jinja, or chat_template in "
            f"tokenizer_config.json{f'; it has only {sorted(map(str, sources))}' if sources else ''}"
        )
        raise RunError(f"{folder} has no chat template, which sft.conversations needs: {expected_place}")
    tokens = {name: settings[name] for name in CONTROL_TOKENS if settings.get(name)}
    tokens = {name: token["content"] if isinstance(token, dict) else str(token) for name, token in tokens.items()}
    try:
        return Template(sources.get("default", NO_DEFAULT), tokens, sources.get("tool_use"))
    except ValueError as error:
        raise RunError(f"{folder}: {error}") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a file of JSON; an empty one if there is no such file. Raises RunError if the file holds anything
    else."""
    return read_json(path) if path.is_file() else {}
