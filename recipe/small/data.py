"""Training data of the recipe: a real corpus, modules of the small world, demonstrations, and endless tasks."""

import itertools
import json
import random
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kit.disk import parse_json
from kit.runs import Run
from kit.settings import RunError
from recipe.microrepo import Task, demonstration, documents, generate, transcript
from recipe.small.agent import Language
from recipe.small.chat_template import template_of
from recipe.small.conversations import ROWS, check_conversations, pack_conversations
from recipe.small.settings import Recipe
from ref import cpt
from ref.network.release import TOKENIZER_FILES

__all__ = ["Prepared", "data", "heldout_codebase", "heldout_file", "shown_episodes", "task_stream"]

HELDOUT = "heldout.jsonl"


class Prepared(Protocol):
    """A corpus that is tokenised already (`scaled.data.read.Prepared`); whoever plays the recipe hands it in."""

    record: dict[str, Any]

    @property
    def documents(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    @property
    def heldout(self) -> str: ...

    def read_heldout(self) -> cpt.Corpus:
        """The held-out codebase."""
        ...

    def stream(self, length: int, seed: int, end: int) -> Any:
        """Rows: `pieces()` are their documents of at most `length` tokens, endlessly; `epochs(rows)` how often so many
        rows read each source."""
        ...


def task_stream(config: Recipe, use: str) -> Iterable[Task]:
    """Endless tasks for one purpose (demonstrations, rl, evaluation), each with its own generator; no key appears
    twice."""
    rng = random.Random(f"{config.seed}-{use}")
    world = config.world
    if use == "demonstrations":
        world = replace(world, depth_mix=config.sft.depth_mix, hop_mix=config.sft.hop_mix)
    elif use == "evaluation":
        world = replace(world, hop_mix=config.evaluation.hop_mix)
    seen_keys: set[str] = set()
    while True:
        task = generate(rng, "heldout" if use == "evaluation" else "train", config=world)
        if task.key not in seen_keys:
            seen_keys.add(task.key)
            yield task


def data(
    run: Run,
    config: Recipe,
    tokenizer: Path | None = None,
    agent_length: int | None = None,
    prepared: Prepared | None = None,
) -> None:
    """Reads the corpus, holds a codebase out, trains the tokenizer or takes the one in a tokenizer.json, packs both
    context lengths, and the conversations of `sft.conversations` in rows of `agent_length` tokens (by default those of
    the long phase). A `prepared` corpus of that tokenizer is neither read nor tokenised again."""
    stage = run.stage("data", total=5, unit="steps")
    if stage.finished:
        return
    stage.restore()
    c, t, file = config.data, config.training, config.sft.conversations
    check_conversations(file)
    corpus = cpt.Corpus() if prepared else cpt.read_library() if c.corpus is None else cpt.read_corpus(c.corpus)

    def make_error(problem: object) -> RunError:
        skipped_text = ", ".join(f"{n} {reason}" for reason, n in sorted(corpus.skipped.items())) or "none"
        corpus_name = "of the standard library" if c.corpus is None else c.corpus
        return RunError(
            f"corpus {corpus_name}: {problem} (skipped: {skipped_text}); choose another folder with --corpus"
        )

    try:
        name, train_corpus, heldout = (
            (prepared.heldout, corpus, prepared.read_heldout())
            if prepared
            else cpt.hold_out_codebase(corpus, c.heldout_share)
        )
    except ValueError as error:
        raise make_error(error) from None
    stage.progress(1, files=prepared.documents if prepared else len(corpus.files))

    rng = random.Random(f"{config.seed}-data")
    total = t.tokens + t.long_tokens
    stream = documents(rng, config.world)
    world = list(itertools.islice(stream, int(total * c.world_share / 55) + 64))
    if tokenizer is None:
        demonstration_texts = [
            text for task, turns in itertools.islice(shown_episodes(config), 300) for _, text in transcript(task, turns)
        ]
        coder = cpt.train_tokenizer(
            itertools.chain((text[:20_000] for text in train_corpus.files.values()), world[:8000], demonstration_texts),
            c.vocab_size,
        )
    else:
        coder = cpt.load_tokenizer(tokenizer)
    vocabulary, end = coder.get_vocab_size(), Language(coder).end
    stage.progress(2, vocabulary=vocabulary)

    texts = list(train_corpus.files.values())
    rng.shuffle(texts)
    target_tokens, row = total * (1 - c.world_share), max(t.length, t.long_length)
    pieces = [] if prepared else code_pieces(coder, texts, target_tokens, t.long_length, end, rng)
    available_tokens = prepared.tokens if prepared else sum(map(len, pieces))
    if available_tokens < min(target_tokens, row):
        raise make_error(f"{available_tokens:,} training tokens are fewer than a row of {row:,}")
    if len(coder.encode("\n".join(heldout.files.values())).ids) < 2:
        raise make_error("the held-out part is a single token, with no token before it")
    mixture = prepared.stream(t.long_length, config.seed, end) if prepared else None
    epochs_by_source = (
        mixture.epochs(round(target_tokens / t.long_length))
        if mixture
        else {"": target_tokens / max(available_tokens, 1)}
    )
    epochs = max(1.0, *epochs_by_source.values())
    for source, times in epochs_by_source.items():
        if times > 1:
            subject = f"source {source}" if source else "it"
            print(
                f"corpus: the phases need {target_tokens:,.0f} tokens and it has {available_tokens:,} for training, so "
                f"{subject} is read {times:,.2f} times",
                flush=True,
            )
    code = mixture.pieces() if mixture else repeat_pieces(pieces, rng)
    modules = itertools.chain(
        ([*e.ids, end] for e in coder.encode_batch(world)), ([*coder.encode(text).ids, end] for text in stream)
    )
    stage.progress(3)

    paths, counts = [run.path("data", "tokenizer.json")], {}
    if tokenizer is None:
        paths[0].write_text(coder.to_str(pretty=True), encoding="utf-8")
    else:  # with the files beside it, for `ref.network.release`
        paths += [run.path("data", name) for name in TOKENIZER_FILES[1:] if (tokenizer.parent / name).is_file()]
        for path in paths:
            shutil.copyfile(tokenizer.parent / path.name, path)
    for phase, tokens, length in (("short", t.tokens, t.length), ("long", t.long_tokens, t.long_length)):
        phase_documents = list(take(modules, tokens * c.world_share))
        phase_documents += take(code, tokens * (1 - c.world_share))
        ids, doc = cpt.pack(phase_documents, length, end)
        order = np.random.default_rng([config.seed, len(ids)]).permutation(len(ids))
        ids, doc = narrow(ids[order], vocabulary, np.uint16, np.uint32), narrow(doc[order], length, np.int16, np.int32)
        paths.append(run.path("data", f"{phase}.npz"))
        np.savez(paths[-1], ids=ids, doc=doc)
        counts[phase] = int((doc >= 0).sum())
        stage.progress(4, tokens=counts[phase])
    paths.append(run.path("data", HELDOUT))
    keep(heldout, paths[-1])
    conversation_counts: dict[str, Any] = {}
    if file is not None:
        language = Language(coder)
        (ids, doc, weight), conversation_counts["conversations"] = pack_conversations(
            file,
            template_of(run.root / "data", language),
            language,
            agent_length or t.long_length,
            lambda done, total: stage.progress(4, conversations=done, of=total),
        )
        paths.append(run.path("data", ROWS))
        np.savez(paths[-1], ids=ids, doc=doc, weight=weight)
    files, size, skipped_counts = len(corpus.files), corpus.bytes, dict(sorted(corpus.skipped.items()))
    if prepared:
        files, size = (
            prepared.documents,
            sum(source_record["kept"]["bytes"] for source_record in prepared.record["sources"]),
        )
        dropped_files = [
            item for source_record in prepared.record["sources"] for item in source_record["dropped"].items()
        ]
        skipped_counts = {
            cause: sum(entry["count"] for dropped_cause, entry in dropped_files if dropped_cause == cause)
            for cause, _ in sorted(dropped_files)
        }
    stage.log(1, files=files, bytes=size, **{f"{k}_tokens": v for k, v in counts.items()})
    stage.finish(
        {
            "files": files,
            "bytes": size,
            "skipped": skipped_counts,
            "tokens": sum(counts.values()),
            "vocab_size": vocabulary,
            "world_documents": len(world),
            "epochs": round(epochs, 2),
            "heldout": {"name": name, "files": len(heldout.files), "bytes": heldout.bytes},
            **conversation_counts,
        },
        paths,
    )


def narrow(numbers: np.ndarray, count: int, *kinds: type) -> np.ndarray:
    """Numbers below `count`, in the first dtype of `kinds` that can hold them all."""
    return numbers.astype(next(kind for kind in kinds if count - 1 <= np.iinfo(kind).max))


def code_pieces(
    tokenizer, files: Iterable[str], tokens: float, length: int, end: int, rng: random.Random
) -> list[list[int]]:
    """Shuffled pieces of at most `length` tokens, `tokens` in total, from the beginnings of files in the given order;
    fewer if the files have fewer. A file gives at most 64 pieces; otherwise a single large table or manual could fill a
    complete phase. If that leaves too little, the limit doubles, and so on."""
    max_pieces, is_cut = 64, True
    while is_cut:
        pieces: list[list[int]] = []
        remaining, is_cut = tokens, False
        for text in files:
            ids = [*tokenizer.encode(text[: 4 * max_pieces * length]).ids, end]
            file_pieces = [ids[i : i + length] for i in range(0, len(ids), length)]
            pieces += file_pieces[:max_pieces]
            remaining -= min(len(ids), max_pieces * length)
            if remaining <= 0:
                is_cut = False
                break
            is_cut = is_cut or len(file_pieces) > max_pieces or len(text) > 4 * max_pieces * length
        max_pieces *= 2
    rng.shuffle(pieces)
    return pieces


def repeat_pieces(pieces: list[list[int]], rng: random.Random) -> Iterator[list[int]]:
    """The pieces in order, then reshuffled, endlessly."""
    while pieces:
        yield from pieces
        pieces = rng.sample(pieces, len(pieces))


def take(pieces: Iterable[list[int]], tokens: float) -> Iterable[list[int]]:
    """Documents until they have `tokens` tokens."""
    for piece in pieces:
        if tokens <= 0:
            return
        tokens -= len(piece)
        yield piece


def shown_episodes(config: Recipe) -> Iterable[tuple[Task, list[str]]]:
    """Endless demonstrations: tasks and the scripted agent's turns."""
    rng = random.Random(f"{config.seed}-scripted-agent")
    for task in task_stream(config, "demonstrations"):
        yield task, demonstration(task, rng, config.sft.noise)


def keep(heldout: cpt.Corpus, path: Path) -> None:
    """Writes what `heldout_codebase` reads: one file per line. JSON escapes everything but ASCII, so no name or text
    can break a line or be changed, not even by bytes that are not UTF-8."""
    path.write_text(
        "".join(json.dumps({"name": name, "text": text}) + "\n" for name, text in heldout.files.items()),
        encoding="ascii",
    )


def heldout_file(root: Path) -> Path:
    """Path of the held-out codebase in the run folder `root`."""
    path = root / "data" / HELDOUT
    return path if path.exists() else path.with_suffix(".txt")  # as earlier versions wrote it


def heldout_codebase(root: Path) -> cpt.Corpus:
    """The held-out codebase of the run folder `root`, with exactly the names and characters that were read."""
    path = heldout_file(root)
    if path.name == HELDOUT:
        files = map(parse_json, path.read_text(encoding="ascii").splitlines())
        return cpt.Corpus({file["name"]: file["text"] for file in files})
    return cpt.Corpus(dict(part.split("\1", 1) for part in path.read_bytes().decode("utf-8").split("\0")))
