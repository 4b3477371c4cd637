"""The chat template of a checkpoint: a Jinja program that turns messages into the text that the network reads.

It is foreign code, as the checkpoint is. It runs in jinja2's sandbox, in which nothing can be changed and no attribute with an underscore can
be read, and it is given plain JSON and nothing else. It can still waste time and memory.

Settings and additions are those of transformers, so that a template means the same here: `raise_exception`, `tojson` without HTML's escapes,
`break` and `continue`, and `{% generation %}`, which marks what the assistant says. There is no clock (`strftime_now`): templates that want
today's date would give other rows on another day. Those that ask for it first take their default, and others are refused.
"""

import json
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kit.disk import read_json
from kit.settings import RunError
from ref.network import release
from sims.recipe.agent import SPEAKERS, Language

__all__ = ["Template", "template_of"]

BEGIN, END = "\ufdd1", "\ufdd2"
"""Around what a template marks, until it is rendered: Unicode reserves them for such uses."""
CONTROL = ("bos_token", "eos_token", "pad_token", "unk_token")


class Generation(Extension):
    """`{% generation %}…{% endgeneration %}`."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

    def marked(self, caller) -> str:
        return BEGIN + caller() + END


def sandbox() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
    for name in ("lipsum", "cycler", "joiner"):
        del env.globals[name]
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = refuse
    return env


def tojson(value: Any, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def refuse(why: str) -> None:
    raise jinja2.TemplateError(why)


class Template:
    """A chat template, as `ref.sft.Render`."""

    def __init__(self, source: str, tokens: dict[str, str] | None = None):
        """`tokens`: the control tokens that a template may ask for by name. Raises ValueError for a source that is no template."""
        self.source, self.tokens = source, tokens or {}
        try:
            self.template = sandbox().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ValueError(f"the chat template is not one that Jinja reads ({said(error)})") from None

    def __call__(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], prompt: bool) -> tuple[str, list[tuple[int, int]] | None]:
        """The text, and where it is marked as the assistant's; None for a template without marks. ValueError if it refuses the messages."""
        try:
            text = self.template.render(messages=messages, tools=tools or None, add_generation_prompt=prompt, **self.tokens)
        except Exception as error:  # a program from elsewhere may fail in any way
            raise ValueError(f"the chat template refuses it ({said(error)})") from None
        if "generation" not in self.source or BEGIN not in text:
            return text, None if "endgeneration" not in self.source else []
        clean, spans = "", []
        for number, piece in enumerate(text.split(BEGIN)):
            inner, _, rest = piece.partition(END) if number else ("", "", piece)
            spans += [(len(clean), len(clean) + len(inner))] if number else []
            clean += inner + rest
        return clean, spans


def said(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def template_of(folder: str | Path, language: Language) -> Template:
    """The chat template in a checkpoint's folder; for a tokenizer of this project, the agent's own. Raises RunError if there is none."""
    folder = Path(folder)
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            try:
                record = read_json(folder / name)
            except ValueError as error:
                raise RunError(f"{folder / name} is not JSON ({said(error)})") from None
            if not isinstance(record, dict):
                raise RunError(f"{folder / name} is not an object of JSON")
            settings |= record
    source = settings.get("chat_template")
    if isinstance(source, list):  # several by name
        named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
        source = named.get("tool_use") or named.get("default")
    if (folder / "chat_template.jinja").is_file():
        source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if not source and language.speakers == SPEAKERS[0]:
        source = release.chat(*language.speakers)
    if not isinstance(source, str) or not source:
        where = "chat_template.jinja, or chat_template in tokenizer_config.json"
        raise RunError(f"{folder} has no chat template, which sft.conversations needs: {where}")
    tokens = {name: settings[name] for name in CONTROL if settings.get(name)}
    tokens = {name: token["content"] if isinstance(token, dict) else str(token) for name, token in tokens.items()}
    try:
        return Template(source, tokens)
    except ValueError as error:
        raise RunError(f"{folder}: {error}") from None
