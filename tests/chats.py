"""Chat templates as small as their families allow, and a tokenizer of bytes to count by hand: what tests of
conversations share.

They have the structure of the families' templates (which texts stand where, what is trimmed, merged or dropped), and
none of their words."""

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from recipe.small.chat_template import Template
from ref.cpt import as_text
from ref.network.release import make_chat_template
from ref.sft import Chat, chat_of

__all__ = [
    "AGENT",
    "CHATML",
    "CONTROL",
    "LLAMA3",
    "MARKED",
    "QWEN25",
    "QWEN3",
    "bytes_tokenizer",
    "said",
    "spoken",
    "template",
]

CONTROL = ("<|im_start|>", "<|im_end|>", "<|bos|>", "<|start|>", "<|end|>", "<|eot|>", "<|env|>", "<|agent|>")

PROMPT = "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
CHATML = (
    "{%- for m in messages -%}"
    "{%- if loop.first and m.role != 'system' -%}{{- '<|im_start|>system\\nHelp.<|im_end|>\\n' -}}{%- endif -%}"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}{%- endfor -%}" + PROMPT
)
"""SmolLM2: a system text where there is none."""
MARKED = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' -}}"
    "{%- if m.role == 'assistant' -%}{%- generation -%}{{- m.content + '<|im_end|>\\n' -}}{%- endgeneration -%}"
    "{%- else -%}{{- m.content + '<|im_end|>\\n' -}}{%- endif -%}{%- endfor -%}" + PROMPT
)
"""ChatML that marks the assistant's turns."""
CALLS = (
    "{%- for call in m.tool_calls or [] -%}"
    "{{- ('\\n' if m.content or not loop.first else '') + '<call>' + {'name': call.function.name, "
    "'arguments': call.function.arguments} | tojson"
    " + '</call>' -}}{%- endfor -%}"
)
ANSWERS = (
    "{%- elif m.role == 'tool' -%}"
    "{%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}"
    "{{- '\\n<answer>' + m.content + '</answer>' -}}"
    "{%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}"
)
QWEN25 = (
    "{%- if tools -%}{{- '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' -}}{%- endif -%}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'assistant' -%}{{- '<|im_start|>assistant\\n' + m.content -}}"
    + CALLS
    + "{{- '<|im_end|>\\n' -}}"
    + ANSWERS
    + "{%- else -%}"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}{%- endif -%}{%- endfor -%}" + PROMPT
)
"""Tools, calls, and answers that are merged into one message."""
QWEN3 = (
    "{%- set ns = namespace(last=-1) -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'assistant' -%}{{- '<|im_start|>assistant\\n' -}}"
    "{%- if loop.index0 > ns.last and (loop.last or m.reasoning_content) -%}"
    "{{- '<think>\\n' + (m.reasoning_content or '').strip('\\n') + '\\n</think>\\n\\n' + m.content.lstrip('\\n') -}}"
    "{%- else -%}{{- m.content -}}{%- endif -%}" + CALLS + "{{- '<|im_end|>\\n' -}}" + ANSWERS + "{%- else -%}"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}{%- endif -%}{%- endfor -%}" + PROMPT
)
"""Thinking, of which only the turns after the last user's message keep theirs."""
LLAMA3 = (
    "{{- bos_token -}}{%- for m in messages -%}"
    "{{- '<|start|>' + m.role + '<|end|>\\n\\n' -}}"
    "{%- if m.tool_calls -%}{{- m.tool_calls[0].function | tojson -}}{%- else -%}{{- m.content | trim "
    "-}}{%- endif -%}{{- '<|eot|>' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|start|>assistant<|end|>\\n\\n' -}}{%- endif -%}"
)
"""Trimmed contents, one call a turn, nothing behind the end of a turn."""
AGENT = make_chat_template("<|env|>", "<|agent|>")
"""This project's own: the token that begins the next text ends the turn."""


def bytes_tokenizer(*merges: tuple[str, str], control: tuple[str, ...] = CONTROL) -> Tokenizer:
    """A token for each byte, for each pair of `merges` (bytes as ByteLevel spells them), and for each of `control`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({x: i for i, x in enumerate([*alphabet, *map("".join, merges)])}, list(merges)))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False, use_regex=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in control])
    return as_text(tokenizer)


def spoken(*turns: tuple[str, object], **more: object) -> Chat:
    """A chat of (role, content) or (role, a message's other fields); "a", "u", "s" and "t" are roles."""
    roles = {"a": "assistant", "u": "user", "s": "system", "t": "tool"}
    messages = [{"role": roles[role]} | (said if isinstance(said, dict) else {"content": said}) for role, said in turns]
    return chat_of(json.loads(json.dumps({"messages": messages} | more)))


def said(contexts, tokenizer: Tokenizer) -> list[list[str]]:
    """For each context the texts of its tokens to learn, one for each piece of the mask."""
    found = []
    for ids, mask in contexts:
        own, pieces = [False, *mask.tolist(), False], []
        starts = [i for i in range(len(ids)) if own[i + 1] and not own[i]]
        ends = [i + 1 for i in range(len(ids)) if own[i + 1] and not own[i + 2]]
        pieces = [tokenizer.decode(ids[a:b].tolist(), skip_special_tokens=False) for a, b in zip(starts, ends)]
        found.append(pieces)
    return found


def template(source: str) -> Template:
    return Template(source, {"bos_token": "<|bos|>"})
