"""What goes beside a checkpoint's weights, so that transformers and vLLM read and sample it as this project does.

    tokenizer.json            as it was trained
    tokenizer_config.json     read it as it stands: without this file transformers takes Qwen's tokenizer, which splits
                              text elsewhere, and says nothing. Also the end of text, and the agent's turns as a chat
    generation_config.json    where a turn ends
    README.md                 the model card

An agent's context is `<|env|> prompt <|agent|> turn <|env|> answer <|agent|> turn <|env|>`: the word that hands over to
the environment ends the turn. Roles "assistant" and "agent" speak for the agent, all others for the environment.

Text is text here: a special token's name in a file is read like any other text. transformers does the same with
`tokenizer(text, split_special_tokens=True)`; it cannot be the folder's default, since a chat is rendered to text before it
is read, and its tokens would be lost.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from ref.cpt import SPECIAL_TOKENS
from ref.network.model import Config

__all__ = ["beside", "card"]

END, ENV, AGENT = SPECIAL_TOKENS
CHAT = (
    "{%- set own = ['assistant', 'agent'] -%}"
    "{%- for message in messages -%}"
    f"{{{{- ('{AGENT}' if message['role'] in own else '{ENV}') + message['content'] -}}}}"
    "{%- endfor -%}"
    f"{{%- if add_generation_prompt -%}}{{{{- '{AGENT}' -}}}}"
    f"{{%- elif messages[-1]['role'] in own -%}}{{{{- '{ENV}' -}}}}{{%- endif -%}}"
)
GIVEN = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
"""What comes along from the folder that the tokenizer is taken from."""


def beside(source: str | Path, config: Config, about: str) -> dict[str, bytes]:
    """Name → content of the files that go with a network of shape `config`: the tokenizer of the folder `source`, which
    has a tokenizer.json, with all that it says of it there; what it does not say is written here. `about`: the model card."""
    found = {name: (Path(source) / name).read_bytes() for name in GIVEN if (Path(source) / name).is_file()}
    ids = {token["content"]: token["id"] for token in json.loads(found["tokenizer.json"]).get("added_tokens", [])}
    reading = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_position_embeddings,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
    if END in ids:
        reading |= {"eos_token": END, "pad_token": END}
    if {ENV, AGENT} <= ids.keys():
        reading["chat_template"] = CHAT
    written = {"tokenizer_config.json": reading}
    if END in ids:
        stops = [ids[token] for token in (END, ENV) if token in ids]
        written["generation_config.json"] = {"eos_token_id": stops, "pad_token_id": ids[END]}
    made = {name: (json.dumps(record, indent=2) + "\n").encode() for name, record in written.items()}
    return made | found | {"README.md": about.encode(errors="replace")}


def card(name: str, what: str, config: Config, facts: Mapping[str, str], opening: str | None = None, drafts: bool = False) -> str:
    """The model card, Markdown: `what` the model is in a sentence or two, `facts` about data and figures, and how to sample it.
    `opening`: what the environment says first, for a network that has learnt the agent's turns. `drafts`: whether
    multi-token-prediction layers are there."""
    kind = "Qwen3, dense"
    if config.num_experts:
        kind = f"Qwen3-MoE, {config.num_experts} experts a layer, {config.num_experts_per_tok} a token"
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
        message = json.dumps([{"role": "env", "content": opening}])
        prompt = f'tokenizer.apply_chat_template({message}, add_generation_prompt=True, return_tensors="pt")'
    layers = "\n`mtp/model.safetensors` holds draft layers (multi-token prediction) for etude's decoder; others leave them.\n"
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

{what}

| | |
|---|---|
{table}

## Sampling

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # where this file lies
tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
prompt = {prompt}
found = model.generate(**prompt, max_new_tokens=64)  # the likeliest; do_sample=True, top_k=0 draws
print(tokenizer.decode(found[0]))
```
{layers if drafts else ""}
Made with etude, a reference implementation of the training recipe behind Composer 2. Its figures say nothing about Composer itself.
"""
