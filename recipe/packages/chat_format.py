"""The chat format of a run on packages: the checkpoint's own chat template if it can write tool calls, or else a
default one that SFT teaches.

The default format is ChatML with the calls of Qwen3-Coder. It needs a tokenizer with the control tokens <|im_start|>
and <|im_end|>, which Qwen's and SmolLM2's have:

    <|im_start|>system
    You work in a folder …

    Tools, as NAME(ARGUMENTS): what it does. An argument with ? may be left out.
    read(path, start?, lines?): Read a text file.
    A call:
    <tool_call>
    <function=NAME>
    <parameter=ARGUMENT>
    VALUE
    </parameter>
    </function>
    </tool_call><|im_end|>
    <|im_start|>user
    …<|im_end|>
    <|im_start|>assistant
    I read it.
    <tool_call>
    <function=read>
    <parameter=path>
    words.py
    </parameter>
    </function>
    </tool_call><|im_end|>
    <|im_start|>tool
    …<|im_end|>

A value stands there as it is, so a small model copies code without escaping it; what is no text is JSON. Thoughts stand
before the text, between <think> and </think>. The tools are told in a line each: the JSON schemas of five tools take
500 tokens and more.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kit.disk import read_json
from kit.settings import RunError
from recipe.packages.settings import PackageSettings
from recipe.small.agent import Language, single
from recipe.small.chat_template import Template, template_of
from ref.chat_format import ChatFormatError, TemplateFormat
from ref.cpt import load_tokenizer
from ref.messages import Message
from ref.self_summary import Chaining

__all__ = ["DEFAULT_TEMPLATE", "choose_template", "load_chat_format", "make_chaining"]

DEFAULT_TEMPLATE = """\
{%- macro write_tools() -%}
Tools, as NAME(ARGUMENTS): what it does. An argument with ? may be left out.
{% for tool in tools -%}
{%- set function = tool['function'] or tool -%}
{%- set required = function['parameters']['required'] or [] -%}
{{- function['name'] + '(' -}}
{%- for name in function['parameters']['properties'] or [] -%}
{{- (', ' if not loop.first else '') + name + ('' if name in required else '?') -}}
{%- endfor -%}
{{- '): ' + function['description'] + '\\n' -}}
{%- endfor %}
A call:
<tool_call>
<function=NAME>
<parameter=ARGUMENT>
VALUE
</parameter>
</function>
</tool_call>
{%- endmacro -%}
{%- if tools and (not messages or messages[0]['role'] != 'system') -%}
{{- '<|im_start|>system\\n' + write_tools() + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' and message['reasoning_content'] -%}
{{- '<think>\\n' + message['reasoning_content'] + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- message['content'] or '' -}}
{%- if loop.first and tools and message['role'] == 'system' -%}
{{- '\\n\\n' + write_tools() -}}
{%- endif -%}
{%- for call in message['tool_calls'] or [] -%}
{{- ('\\n' if message['content'] or not loop.first else '') + '<tool_call>\\n<function=' -}}
{{- call['function']['name'] + '>\\n' -}}
{%- for name, value in call['function']['arguments'].items() -%}
{{- '<parameter=' + name + '>\\n' -}}
{{- (value if value is string else value | tojson) + '\\n</parameter>\\n' -}}
{%- endfor -%}
{{- '</function>\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
DEFAULT_TOKENS = ("<|im_start|>", "<|im_end|>")
ASK_SUMMARY = (
    "The context is nearly full. Write a summary for yourself: what was asked, what you have read and changed, "
    "with the names of files, and what is left to do."
)
GO_ON = "That was your summary of the work so far. Go on."


def choose_template(folder: Path, tools: Sequence[dict[str, Any]]) -> tuple[Template, str]:
    """The chat template for a checkpoint and these tools, and why it is not the checkpoint's own, empty if it is.
    Raises RunError where neither its own nor the default one can be used."""
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    try:
        template = template_of(folder, Language(tokenizer))
        TemplateFormat(tokenizer, template, tools)
        return template, ""
    except (RunError, ChatFormatError) as error:
        reason = str(error).removeprefix("the chat template cannot be used for rollouts: ")
    if missing_tokens := [token for token in DEFAULT_TOKENS if tokenizer.token_to_id(token) is None]:
        raise RunError(
            f"{folder}: its chat template cannot be used ({reason}), and the default one needs the token "
            f"{missing_tokens[0]}; choose a checkpoint with another template"
        )
    return Template(DEFAULT_TEMPLATE), reason


def load_chat_format(folder: Path, tools: Sequence[dict[str, Any]]) -> TemplateFormat:
    """The chat format of a folder with a tokenizer, a chat template and, maybe, a generation config, whose tokens end
    turns as well. Raises RunError."""
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    path = folder / "generation_config.json"
    stop_ids = read_json(path).get("eos_token_id", []) if path.is_file() else []
    stop_ids = (
        [stop_ids] if isinstance(stop_ids, int) else [token for token in stop_ids or [] if isinstance(token, int)]
    )
    try:
        return TemplateFormat(tokenizer, template_of(folder, Language(tokenizer)), tools, stop_ids)
    except ChatFormatError as error:
        raise RunError(f"{folder}: {error}") from None


def write_default_template(folder: Path, stop_id: int) -> list[Path]:
    """Puts the default template into a folder with a tokenizer, and the token that ends its turns among those of the
    generation config. Returns the files."""
    template, generation = folder / "chat_template.jinja", folder / "generation_config.json"
    template.write_text(DEFAULT_TEMPLATE, encoding="utf-8")
    settings = read_json(generation) if generation.is_file() else {}
    previous_ids = settings.get("eos_token_id") or []
    previous_ids = [previous_ids] if isinstance(previous_ids, int) else previous_ids
    settings["eos_token_id"] = [stop_id, *(token for token in previous_ids if token != stop_id)]
    generation.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return [template, generation]


def make_chaining(settings: PackageSettings, chat_format: TemplateFormat, max_len: int) -> Chaining:
    """How contexts are joined. The request for a summary ends the turn that was to come, asks as a user, and begins
    another turn; the next context opens with the summary as a turn of the policy, and the user's word to go on. Raises
    ValueError where the contexts have no room for that."""
    if not settings.summary_at:
        return single(max_len)
    history = [Message("user", "What is it?"), Message("assistant", "A zebra.")]
    stop_id = chat_format.stop_ids[0]
    request = chat_format.encode_answer(history, [Message("user", ASK_SUMMARY)])
    resume = chat_format.encode_answer(history, [Message("user", GO_ON)])
    assert request is not None and resume is not None  # the format was checked by such a conversation
    room = max_len - settings.summary_at - len(request) - 1 - settings.summary_tokens
    if room < 0:
        raise ValueError(
            f"rl.max_len={max_len} must hold tasks.summary_at, tasks.summary_tokens and the request for a summary: "
            f"{max_len - room} tokens"
        )
    return Chaining(
        settings.summary_at,
        settings.summary_tokens,
        room,
        (stop_id, *request),
        tuple(resume),
        max_segments=settings.contexts,
    )
