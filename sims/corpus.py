"""What the recipe learns from: a real corpus, modules of the small world, demonstrations, and endless tasks."""

import itertools
import random
import sysconfig
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from etude.runs import Run, RunError
from ref import cpt
from sims.microrepo import Task, demonstration, documents, generate, transcript

if TYPE_CHECKING:
    from sims.recipe import Recipe

__all__ = ["data", "heldout_codebase", "shown_episodes", "task_stream"]

STDLIB_EXCLUDE = ("site-packages", "test", "tests", "lib2to3", "idlelib", "turtledemo", "ensurepip", "__pycache__")


def task_stream(config: "Recipe", use: str) -> Iterable[Task]:
    """Endless tasks for one use (demonstrations, rl, evaluation), each with its own generator; no key comes twice."""
    rng = random.Random(f"{config.seed}-{use}")
    world = replace(config.world, depth_mix=config.sft.depth_mix) if use == "demonstrations" else config.world
    seen: set[str] = set()
    while True:
        task = generate(rng, "heldout" if use == "evaluation" else "train", config=world)
        if task.key not in seen:
            seen.add(task.key)
            yield task


def data(run: Run, config: "Recipe") -> None:
    """Reads the corpus, holds a codebase out, trains the tokenizer, packs both context lengths."""
    stage = run.stage("data", total=5, unit="steps")
    if stage.finished:
        return
    stage.restore()
    c, t = config.data, config.training
    if c.corpus is None:
        corpus = cpt.read_corpus(sysconfig.get_paths()["stdlib"], (".py",), STDLIB_EXCLUDE)
    else:
        corpus = cpt.read_corpus(c.corpus)
    try:
        name, train, held = cpt.hold_out_codebase(corpus, c.heldout_share)
    except ValueError as error:
        skipped = ", ".join(f"{n} {reason}" for reason, n in sorted(corpus.skipped.items())) or "none"
        raise RunError(f"corpus {c.corpus or 'of the standard library'}: {error} (skipped: {skipped}); "
                       "choose another folder with --corpus") from None  # fmt: skip
    folder = run.root / "data"
    folder.mkdir(exist_ok=True)
    stage.progress(1, files=len(corpus.files))

    rng = random.Random(f"{config.seed}-data")
    total = t.tokens + t.long_tokens
    world = list(itertools.islice(documents(rng, config.world), int(total * c.world_share / 55) + 64))
    spoken = [text for task, turns in itertools.islice(shown_episodes(config), 300) for _, text in transcript(task, turns)]
    tokenizer = cpt.train_tokenizer(
        itertools.chain((text[:20_000] for text in train.files.values()), world[:8000], spoken), c.vocab_size
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    stage.progress(2, vocabulary=tokenizer.get_vocab_size())

    end = tokenizer.token_to_id("<|endoftext|>")
    files = list(train.files.values())
    rng.shuffle(files)
    code = iter(code_pieces(tokenizer, files, total * (1 - c.world_share), t.long_length, end, rng))
    modules = iter([[*e.ids, end] for e in tokenizer.encode_batch(world)])
    stage.progress(3)
    paths = [folder / "tokenizer.json"]
    counts = {}
    for phase, tokens, length in (("short", t.tokens, t.length), ("long", t.long_tokens, t.long_length)):
        pieces = list(take(modules, tokens * c.world_share))
        pieces += take(code, tokens * (1 - c.world_share))
        ids, doc = cpt.pack(pieces, length, end)
        order = np.random.default_rng([config.seed, len(ids)]).permutation(len(ids))
        paths.append(folder / f"{phase}.npz")
        np.savez(paths[-1], ids=ids[order].astype(np.uint16), doc=doc[order].astype(np.int16))
        counts[phase] = int((doc >= 0).sum())
        stage.progress(4, tokens=counts[phase])
    paths.append(folder / "heldout.txt")
    paths[-1].write_text("\0".join(f"{n}\1{text}" for n, text in held.files.items()), encoding="utf-8")
    stage.log(1, files=len(corpus.files), bytes=corpus.bytes, **{f"{k}_tokens": v for k, v in counts.items()})
    stage.finish({
        "files": len(corpus.files), "bytes": corpus.bytes, "skipped": dict(sorted(corpus.skipped.items())),
        "tokens": sum(counts.values()), "vocab_size": tokenizer.get_vocab_size(), "world_documents": len(world),
        "heldout": {"name": name, "files": len(held.files), "bytes": held.bytes},
    }, paths)  # fmt: skip


def code_pieces(tokenizer, files: Iterable[str], tokens: float, length: int, end: int, rng: random.Random) -> list[list[int]]:
    """Shuffled pieces of at most `length` tokens, `tokens` in all, from the beginnings of files in the order given. No file
    gives more than 64 pieces: a large table or a manual of one project would otherwise be a phase's whole diet."""
    pieces: list[list[int]] = []
    for text in files:
        ids = [*tokenizer.encode(text[: 256 * length]).ids, end]
        pieces += [ids[i : i + length] for i in range(0, len(ids), length)][:64]
        tokens -= min(len(ids), 64 * length)
        if tokens <= 0:
            break
    rng.shuffle(pieces)
    return pieces


def take(pieces: Iterable[list[int]], tokens: float) -> Iterable[list[int]]:
    """Documents until they hold `tokens` tokens."""
    for piece in pieces:
        if tokens <= 0:
            return
        tokens -= len(piece)
        yield piece


def shown_episodes(config: "Recipe") -> Iterable[tuple[Task, list[str]]]:
    """Endless demonstrations: tasks and the scripted agent's turns."""
    rng = random.Random(f"{config.seed}-scripted-agent")
    for task in task_stream(config, "demonstrations"):
        yield task, demonstration(task, rng, config.sft.noise)


def heldout_codebase(run: Run) -> cpt.Corpus:
    text = run.path("data", "heldout.txt").read_text(encoding="utf-8")
    return cpt.Corpus(dict(part.split("\1", 1) for part in text.split("\0")))
