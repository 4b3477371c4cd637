"""The files that go with a checkpoint's weights, so that transformers and vLLM read and sample it as this project does.

    tokenizer.json            as it was trained
    tokenizer_config.json     use tokenizer.json unchanged: without this file transformers silently uses Qwen's
                              tokenizer,
                              which splits text differently. Also the end of text, and the agent's turns as a chat
    generation_config.json    the tokens that end a turn
    README.md                 the model card

An agent's context is `<|env|> prompt <|agent|> turn <|env|> answer <|agent|> turn <|env|>`: the token that starts the
environment's text ends the turn. Roles "assistant" and "agent" are the agent's, all others the environment's.

Special tokens in a text are read as plain text here. transformers does the same with
`tokenizer(text, split_special_tokens=True)`. It cannot be the folder's default: a chat is rendered to text before it is
tokenised, and its control tokens would be lost.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from ref.checks import parse_json
from ref.cpt import SPECIAL_TOKENS
from ref.network.checkpoint import FAMILIES
from ref.network.model import Config

__all__ = ["make_sidecar_files", "make_model_card"]

END, ENV, AGENT = SPECIAL_TOKENS
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
"""Files copied from the folder of the tokenizer."""


def make_chat_template(env: str, agent: str) -> str:
    """The chat template of an agent: the texts that its context consists of, each after the token of who says it. A
    tool call is a line: its name, the first argument behind it, and others on lines of their own. Answers to the calls
    of one turn are lines of one text."""
    return (
        "{%- set own = ['assistant', 'agent'] -%}{%- set given = namespace(lines=false) -%}"
        "{%- for message in messages -%}"
        "{%- set text = message['content'] or '' -%}"
        f"{{%- if message['role'] in own -%}}{{{{- '{agent}' + text -}}}}"
        "{%- for call in message['tool_calls'] or [] -%}"
        "{{- ('\\n' if text or not loop.first else '') + call['function']['name'] -}}"
        "{%- for value in call['function']['arguments'].values() -%}{{- (' ' if loop.first else '\\n') "
        "~ value -}}{%- endfor -%}"
        "{%- endfor -%}"
        "{%- elif message['role'] == 'tool' and loop.previtem is defined and loop.previtem['role'] == 'tool' -%}"
        "{{- ('\\n' if given.lines and text else '') + text -}}{%- set given.lines = given.lines or text != '' -%}"
        f"{{%- else -%}}{{{{- '{env}' + text -}}}}{{%- set given.lines = text != '' -%}}{{%- endif -%}}"
        "{%- endfor -%}"
        f"{{%- if add_generation_prompt -%}}{{{{- '{agent}' -}}}}"
        f"{{%- elif messages[-1]['role'] in own -%}}{{{{- '{env}' -}}}}{{%- endif -%}}"
    )


def make_sidecar_files(
    source: str | Path, config: Config, about: str, speakers: tuple[str, str] = (ENV, AGENT)
) -> dict[str, bytes]:
    """Name → content of the files that go with a network of shape `config`. The tokenizer and its settings are copied
    from the folder `source`, which must have a tokenizer.json; missing settings are written here. `about`: the model
    card. `speakers`: the tokens with which environment and agent begin to speak; others than this project's own replace
    the chat template and the stop tokens that are there."""
    files = {name: (Path(source) / name).read_bytes() for name in TOKENIZER_FILES if (Path(source) / name).is_file()}
    ids = {token["content"]: token["id"] for token in parse_json(files["tokenizer.json"]).get("added_tokens", [])}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_position_embeddings,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
    if END in ids:
        tokenizer_config |= {"eos_token": END, "pad_token": END}
    if {*speakers} <= ids.keys():
        tokenizer_config["chat_template"] = make_chat_template(*speakers)
    settings = {"tokenizer_config.json": tokenizer_config}
    if END in ids:
        stops = [ids[token] for token in (END, speakers[0]) if token in ids]
        settings["generation_config.json"] = {"eos_token_id": stops, "pad_token_id": ids[END]}
    if speakers != (ENV, AGENT):
        for name in (*settings, "chat_template.jinja"):
            files.pop(name, None)
    setting_files = {name: (json.dumps(record, indent=2) + "\n").encode() for name, record in settings.items()}
    return setting_files | files | {"README.md": about.encode(errors="replace")}


def make_model_card(
    name: str,
    summary: str,
    config: Config,
    facts: Mapping[str, str],
    opening: str | None = None,
    drafts: bool = False,
    role: str = "env",
) -> str:
    """The model card in Markdown: `summary` the model is in a sentence or two, `facts` about data and results, and how
    to sample it. `opening`: the environment's first text, for a network that has learned the agent's turns. `drafts`:
    whether there are multi-token-prediction layers. `role`: who speaks first."""
    kind = FAMILIES[config.model_type].title
    if config.num_experts:
        kind += f", {config.num_experts} experts per layer, {config.num_experts_per_tok} per token"
    rows = {
        "network": f"{kind}; {config.num_hidden_layers} layers of width {config.hidden_size}",
        "parameters": f"{config.parameters():,}, of which a token uses {config.parameters(active=True):,}",
        "vocabulary, context": f"{config.vocab_size:,} tokens, {config.max_position_embeddings:,} positions",
        **facts,
    }
    table = "\n".join(f"| {key} | {' '.join(value.replace('|', ' ').split())} |" for key, value in rows.items())
    if opening is None:
        prompt = 'tokenizer("def ", return_tensors="pt")'
    else:
        message = json.dumps([{"role": role, "content": opening}])
        prompt = f'tokenizer.apply_chat_template({message}, add_generation_prompt=True, return_tensors="pt")'
    layers = (
        "\n`mtp/model.safetensors` holds draft layers (multi-token prediction) for etude's decoder; other "
        "programs ignore them.\n"
    )
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

{summary}

| | |
|---|---|
{table}

## Sampling

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # the folder of this file
tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
prompt = {prompt}
found = model.generate(**prompt, max_new_tokens=64)  # greedy; do_sample=True, top_k=0 samples
print(tokenizer.decode(found[0]))
```
{layers if drafts else ""}
Made with etude, a reference implementation of the training recipe behind Composer 2. \
Its figures say nothing about Composer itself.
"""
