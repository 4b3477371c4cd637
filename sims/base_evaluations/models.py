"""A base model behind one small interface, so that every evaluation reads the same whoever computes: our network, or
transformers.

    base = opened("runs/small/checkpoints/cpt", cache)      a Hugging Face folder, or a name of packages.py
    base.scored([(prompt, answer), …])                      log-probs of each answer's tokens, given its prompt
    base.continued([prompt, …], [n, …], stop)               greedy text of at most n tokens, up to `stop`

Families that `ref/network` knows are opened there; others go through transformers, if it is installed. Both compute in
float32, with one thread to a batch and a batch to a core. The batches follow from the texts alone, so that a resumed
run repeats every bit.

The traps
a. Gemma reads a `<bos>` before everything, and talks nonsense without it. What a tokenizer.json puts before an empty
   text is put before every row here (`prefix`), and is never scored.
b. Prompt and answer are encoded apart and joined, so that a token never spans both. All answers of a question are cut
   alike.
c. Rows of a batch share one position while decoding: a row is fed its own prompt until it ends, then its own words.
   Nothing is padded on the left, and no mask is needed.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kit.disk import read_json
from kit.process import map_on_cores
from kit.settings import RunError
from ref.cpt import load_tokenizer
from ref.network import CheckpointError, KVCache, Transformer, load_hf
from sims.base_evaluations.packages import PACKAGES, folder_of, offline

__all__ = ["Base", "HuggingFace", "Network", "Reference", "Scored", "joined", "open_base"]

Progress = Callable[[int], None]


class Network(Protocol):
    """What computes."""

    context: int
    """Tokens of a row at most."""
    vocab: int
    """Tokens of the vocabulary."""

    def logits(self, ids: Int[Tensor, "B T"], keep: Int[Tensor, " K"]) -> Float[Tensor, "B K V"]:
        """Logits at the positions `keep` of every row."""
        ...

    def decoder(self, batch: int, length: int) -> Callable[[Int[Tensor, "B t"]], Float[Tensor, "B V"]]:
        """A function that takes the next t tokens of every row, remembers them, and returns the logits behind them."""
        ...


class Reference:
    """Our network (`ref/network`)."""

    def __init__(self, model: Transformer):
        self.model, self.context, self.vocab = (
            model.requires_grad_(False),
            model.config.max_position_embeddings,
            model.config.vocab_size,
        )

    def logits(self, ids: Int[Tensor, "B T"], keep: Int[Tensor, " K"]) -> Float[Tensor, "B K V"]:
        return self.model.head(self.model(ids, logits=False).hidden[:, keep])

    def decoder(self, batch: int, length: int) -> Callable[[Int[Tensor, "B t"]], Float[Tensor, "B V"]]:
        cache = KVCache(self.model.config, batch, length)
        return lambda ids: self.model.head(self.model(ids, cache=cache, logits=False).hidden[:, -1])


class HuggingFace:
    """A causal language model of transformers."""

    def __init__(self, model: Any):
        text = model.config.get_text_config()
        self.model, self.context, self.vocab = model.eval(), int(text.max_position_embeddings), int(text.vocab_size)

    def logits(self, ids: Int[Tensor, "B T"], keep: Int[Tensor, " K"]) -> Float[Tensor, "B K V"]:
        return self.model(ids, use_cache=False, logits_to_keep=keep).logits

    def decoder(self, batch: int, length: int) -> Callable[[Int[Tensor, "B t"]], Float[Tensor, "B V"]]:
        cache: list[Any] = [None]

        def feed(ids: Tensor) -> Tensor:
            out = self.model(ids, past_key_values=cache[0], use_cache=True, logits_to_keep=1)
            cache[0] = out.past_key_values
            return out.logits[:, -1]

        return feed


@dataclass(frozen=True)
class Scored:
    """An answer under a model."""

    logp: tuple[float, ...]
    """Log-probability of each token, nats."""
    greedy: tuple[bool, ...]
    """Whether the token is the model's first choice."""

    @property
    def total(self) -> float:
        """Log-probability of the answer, nats."""
        return sum(self.logp)


@dataclass(frozen=True)
class Base:
    """A network with its tokenizer."""

    name: str
    """What the user called it."""
    title: str
    """What a table calls it."""
    network: Network
    tokenizer: Any
    """`tokenizers.Tokenizer` that reads special tokens as plain text."""
    prefix: tuple[int, ...] = ()
    """Tokens that the tokenizer puts before a text."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, without the prefix."""
        return self.tokenizer.encode(text).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=False)

    def rows(self) -> int:
        """Rows that are scored together: fewer for a large vocabulary, whose logits fill the memory."""
        return max(1, min(8, 400_000 // self.network.vocab))

    def log_probs(
        self, rows: Sequence[Sequence[int]], starts: Sequence[int], progress: Progress = lambda done: None
    ) -> list[Scored]:
        """Log-probs of row[start:] for each row, given the prefix and row[:start]; a start of 0 without a prefix leaves
        the first token out. Raises ValueError for a row that is longer than the network's context, and for log-probs
        that are not finite."""
        prefix_length = len(self.prefix)
        if rows and prefix_length + max(map(len, rows)) > self.network.context:
            raise ValueError(
                f"a row of {prefix_length + max(map(len, rows))} tokens is longer than the context of "
                f"{self.name}, {self.network.context}"
            )
        order = sorted(range(len(rows)), key=lambda i: (len(rows[i]), starts[i], i))
        parts = [order[start : start + self.rows()] for start in range(0, len(order), self.rows())]

        @torch.inference_mode()
        def score(part: list[int]) -> list[Scored]:
            width = prefix_length + max(len(rows[i]) for i in part)
            ids = torch.zeros(len(part), width, dtype=torch.long)
            for slot, i in enumerate(part):
                ids[slot, : prefix_length + len(rows[i])] = torch.tensor([*self.prefix, *rows[i]])
            low = max(1, prefix_length + min(starts[i] for i in part))
            keep = torch.arange(low - 1, width - 1)
            logits = self.network.logits(ids, keep).float()
            targets = ids[:, low:]
            logp = logits.gather(-1, targets[..., None])[..., 0] - logits.logsumexp(-1)
            is_greedy = logits.argmax(-1) == targets
            scores = []
            for slot, i in enumerate(part):
                span = slice(max(0, prefix_length + starts[i] - low), prefix_length + len(rows[i]) - low)
                scores.append(Scored(tuple(logp[slot, span].tolist()), tuple(is_greedy[slot, span].tolist())))
                if not bool(logp[slot, span].isfinite().all()):
                    raise ValueError(f"{self.name} gives log-probs that are not finite")
            return scores

        answers = map_on_cores(score, parts, lambda done: progress(sum(map(len, parts[:done]))))
        scores_by_index = {
            i: row_score
            for part, part_scores in zip(parts, answers, strict=True)
            for i, row_score in zip(part, part_scores, strict=True)
        }
        return [scores_by_index[i] for i in range(len(rows))]

    def scored(self, pairs: Sequence[tuple[str, str]], progress: Progress = lambda done: None) -> list[Scored]:
        """Log-probs of the tokens of each answer, given its prompt."""
        prompts = [self.encode(prompt) for prompt, _ in pairs]
        return self.log_probs(
            [p + self.encode(a) for p, (_, a) in zip(prompts, pairs, strict=True)], [len(p) for p in prompts], progress
        )

    def continued(
        self,
        prompts: Sequence[str],
        limits: Sequence[int],
        stop: str,
        progress: Progress = lambda done: None,
        batch: int = 4,
    ) -> list[str]:
        """The greedy continuation of each prompt: its text before `stop`, or its first tokens, as many as its limit
        says. Raises ValueError for a prompt that leaves no room for its limit."""
        prompt_rows = [[*self.prefix, *self.encode(prompt)] for prompt in prompts]
        for tokens, limit in zip(prompt_rows, limits, strict=True):
            if not tokens or limit < 1 or len(tokens) + limit > self.network.context:
                raise ValueError(
                    f"{len(tokens)} tokens and {limit} more do not fit the context of {self.name}, "
                    f"{self.network.context}"
                )
        order = sorted(range(len(prompt_rows)), key=lambda i: (len(prompt_rows[i]), i))
        parts = [order[start : start + batch] for start in range(0, len(order), batch)]

        @torch.inference_mode()
        def write(part: list[int]) -> list[str]:
            token_rows, outputs = [list(prompt_rows[i]) for i in part], [""] * len(part)
            ends, live = [len(prompt_rows[i]) + limits[i] for i in part], set(range(len(part)))
            feed, position = self.network.decoder(len(part), max(ends)), 0
            while live:
                until = max(position + 1, min(map(len, token_rows)))
                # Zeros for rows that have ended
                ids = torch.tensor(
                    [(row[position:until] + [0] * (until - position))[: until - position] for row in token_rows]
                )
                choice, position = feed(ids).argmax(-1).tolist(), until
                for n in sorted(live):
                    if len(token_rows[n]) == position:
                        token_rows[n].append(choice[n])
                        outputs[n] = self.decode(token_rows[n][len(prompt_rows[part[n]]) :])
                        if stop in outputs[n] or len(token_rows[n]) == ends[n]:
                            live.discard(n)
            return [text.partition(stop)[0] for text in outputs]

        answers = map_on_cores(write, parts, lambda done: progress(sum(map(len, parts[:done]))))
        answers_by_index = {
            i: answer
            for part, part_answers in zip(parts, answers, strict=True)
            for i, answer in zip(part, part_answers, strict=True)
        }
        return [answers_by_index[i] for i in range(len(prompts))]


def joined(base: Base, prompt: str, answer: str) -> int:
    """Tokens of a prompt and its answer, with what the tokenizer puts before them."""
    return len(base.prefix) + len(base.encode(prompt)) + len(base.encode(answer))


def open_base(name: str, cache: str | Path, say: Callable[[str], None] = lambda line: None) -> Base:
    """The base model in a Hugging Face folder, or of a package (sims/base_evaluations/packages.py), whose folder lies
    in `cache`.

    Raises RunError, in one line, for a folder without config.json or tokenizer.json, for an unknown name, for a family
    that nothing here opens, and for weights that do not fit."""
    folder = folder_of(name, cache, say) if name in PACKAGES else Path(name)
    for file in ("config.json", "tokenizer.json"):
        if not (folder / file).is_file():
            problem = "has no" if folder.is_dir() else f"is neither one of {', '.join(PACKAGES)} nor a folder with"
            raise RunError(f"{name} {problem} {file}; pass a Hugging Face folder")
    try:
        tokenizer = load_tokenizer(folder / "tokenizer.json")
        network = network_of(name, folder)
    except (OSError, CheckpointError, ValueError) as error:
        raise RunError(f"{name}: {' '.join(str(error).split())}") from None
    if tokenizer.get_vocab_size() > network.vocab:
        raise RunError(
            f"{name}: its tokenizer has {tokenizer.get_vocab_size()} tokens, and the network only {network.vocab}"
        )
    return Base(name, read_title(name, folder), network, tokenizer, read_prefix(folder))


def network_of(name: str, folder: Path) -> Network:
    try:
        return Reference(load_hf(folder))
    except CheckpointError as error:
        if not str(error).partition(", only ")[0].endswith("not supported"):  # damaged, not unknown
            raise
        reason = str(error)
    if importlib.util.find_spec("transformers") is None:
        raise RunError(
            f"{name}: {reason}; other families need transformers, in the clone: pip install -c "
            f"constraints.txt -e '.[real]'"
        )
    with offline():
        from transformers import AutoModelForCausalLM

        try:
            return HuggingFace(
                AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
            )
        except (ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
            raise RunError(
                f"{name}: {reason}; and transformers cannot open it ({str(error).strip().splitlines()[0]})"
            ) from None


def read_prefix(folder: Path) -> tuple[int, ...]:
    """What tokenizer.json puts before an empty text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer.no_padding()
    return tuple(tokenizer.encode("").ids)


def read_title(name: str, folder: Path) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(read_json(folder / "etude.json")["title"])
    return Path(name).name
