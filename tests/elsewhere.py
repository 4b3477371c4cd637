"""What transformers makes of a checkpoint's folder, beside what we make of it."""

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.small.agent import Language
from ref.engine.sampler import Sampler
from ref.network import load_hf
from ref.network.checkpoint import locate
from tests.talks import contexts_of

__all__ = ["check"]

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "ref").glob("*.py"))


@dataclass
class Monologue:
    """A conversation that is over when the policy ends its first turn."""

    prompt: list[int]
    stop: int

    def reply(self, turn: list[int]) -> None:
        return None


def check(path: Path, drafts: bool = False) -> None:
    """The same ids over all of ref/*.py; the same greedy turns, in float64, where nothing is a tie; stop tokens; the
    model card's own lines run; nothing beside the weights that vLLM, which loads every *.safetensors of a folder, would
    take for a part of the network."""
    language, tokenizer = (
        Language(Tokenizer.from_file(str(path / "tokenizer.json"))),
        AutoTokenizer.from_pretrained(path),
    )
    plain = language.end not in language.encode("<|endoftext|>")
    for source in SOURCES:
        text = source.read_text(encoding="utf-8")
        ids = tokenizer(text, split_special_tokens=plain)["input_ids"]
        assert ids == list(language.encode(text)) and tokenizer.decode(ids) == text, source
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (language.end, language.end)

    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
    stops = [token for token in (language.end, language.env) if token is not None]
    assert theirs.generation_config.eos_token_id == stops
    sampler = Sampler(load_hf(path, torch.float64), torch.float64)
    for text in ("repo m0 m1 m5 m9 fix m0", "repo m2 m7 fix m7"):
        prompt = tokenizer.apply_chat_template(
            [{"role": "env", "content": text}], add_generation_prompt=True, return_tensors="pt"
        )
        ids = [language.env, *language.encode(text), language.agent]
        assert prompt["input_ids"][0].tolist() == ids
        # Our sampler only knows the token that ends a turn: what a text's end would end is cut there.
        [ours] = contexts_of(sampler, [Monologue(ids, language.env)], len(ids) + 24, temperature=0.0)
        turn = ours.tokens[len(ids) :].tolist()
        until = next((i + 1 for i, token in enumerate(turn) if token in stops), len(turn))
        found = theirs.generate(**prompt, max_new_tokens=24)
        assert found[0].tolist() == ids + turn[:until]

    assert {file.name for file in path.glob("*.safetensors")} == set(locate(path).values())
    assert (path / "mtp" / "model.safetensors").exists() == drafts
    [lines] = re.findall(r"```python\n(.*?)```", (path / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    said = io.StringIO()
    with contextlib.chdir(path), contextlib.redirect_stdout(said):
        exec(lines, {})
    assert said.getvalue().startswith(("def ", language.speakers[0]))
