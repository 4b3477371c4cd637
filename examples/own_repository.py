"""From a folder with your own repository to a checkpoint that was trained on it:

    python examples/own_repository.py examples/words

1. `etude tasks make`: features are taken out of your package, whose tests then fail (Linux, bubblewrap, pytest).
2. Without --checkpoint, a tiny network of random weights with a tokenizer trained on your code: it learns nothing that
   is of use, but goes through all stages on two cores.
3. `etude run recipe --tasks`: SFT on scripted episodes, evaluation, RL in sandboxes, evaluation.

Each command is printed before it runs."""

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from recipe.packages.chat_format import DEFAULT_TEMPLATE
from ref.network import Config, Transformer, save_hf

HELDOUT = "generated:heldout:0"
"""A made-up package to evaluate on: no task that is trained on may come from it."""
REHEARSAL = (
    "tasks.demonstrations=8",
    "tasks.styles=direct",
    "tasks.turns=4",
    "tasks.min_valid_calls=0",
    "training.dtype=float32",
    "sft.epochs=2",
    "sft.rows=4",
    "rl.steps=2",
    "rl.prompts=1",
    "rl.rollouts=4",
    "rl.max_len=2048",
    "rl.turn_tokens=64",
    "cluster.agent_length=2048",
    "evaluation.tasks=2",
    "evaluation.samples=1",
)
"""Settings that make the run of a tiny network short. --checkpoint runs with those of examples/one-gpu.toml alone."""


def make_tiny_checkpoint(repository: Path, folder: Path) -> None:
    """Writes a network of random weights, and a tokenizer of the repository's code with ChatML's control tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    control, alphabet = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, special_tokens=control, initial_alphabet=alphabet, show_progress=False
    )
    code = (path.read_text(encoding="utf-8", errors="replace") for path in sorted(repository.rglob("*.py")))
    tokenizer.train_from_iterator([*code, DEFAULT_TEMPLATE], trainer)
    shape = Config.tiny(tokenizer.get_vocab_size(), num_experts=0, max_position_embeddings=4096)
    save_hf(Transformer(shape), folder)
    tokenizer.save(str(folder / "tokenizer.json"))


def make_commands(repository: Path, out: Path, checkpoint: Path | None) -> list[list[str]]:
    """The commands, as they are typed."""
    tasks, ranks = str(out / "tasks"), ["--backend", "gloo", "--nproc", "2"]
    settings = [word for setting in REHEARSAL for word in ("--set", setting)] if checkpoint is None else []
    run = ["etude", "run", "recipe", "--scale", "full", "--config", "examples/one-gpu.toml", "--tasks", tasks]
    run += ["--checkpoint", str(checkpoint or out / "tiny"), "--out", str(out / "run")]
    return [
        ["etude", "tasks", "make", str(repository), HELDOUT, "--out", tasks],
        [*run, *(ranks if checkpoint is None else ["--nproc", "1"]), *settings],
        ["etude", "play", str(out / "run"), "--before", "sft"],
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a coding agent on your own repository.")
    parser.add_argument("repository", type=Path, help="Folder with a Python package and its tests.")
    parser.add_argument(
        "--checkpoint", type=Path, help="Hugging Face folder; default: a tiny network of random weights."
    )
    parser.add_argument("--out", type=Path, default=Path("runs/own-repository"), help="Folder for tasks and run.")
    options = parser.parse_args()
    if options.checkpoint is None:
        make_tiny_checkpoint(options.repository, options.out / "tiny")
    for command in make_commands(options.repository, options.out, options.checkpoint):
        print("$", shlex.join(command), flush=True)
        code = subprocess.run([sys.executable, "-m", "etude.cli.main", *command[1:]]).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
