"""Table 2 of the report for any list of bases: coding knowledge, state tracking, codebase NLL, each with a 95%
interval.

    etude eval base smollm2-135m gemma3-270m runs/small/checkpoints/cpt

Every model reads the same questions, chains and files. They follow from the settings and from the *smallest* context
among the models, which every chain and question has to fit; they lie in the run folder as JSONL, to be read. Intervals
are bootstraps over questions, over chains and over files, with the same draws for every model, so that differences
between models are paired.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kit.disk import atomic_write, parse_json, read_lines
from kit.runs import Run
from kit.settings import RunError
from kit.statistics import bootstrap
from ref import cpt
from sims.base_evaluations import knowledge, perplexity, tracking
from sims.base_evaluations.distance import similarity
from sims.base_evaluations.history import from_history
from sims.base_evaluations.models import Base, joined, open_base

__all__ = ["Settings", "asked_chains", "difference", "gained", "measure_models", "picture", "rows_of"]


@dataclass(frozen=True)
class Settings:
    """What every model is asked."""

    codebase: str | None = None
    """Folder whose files give the NLL. None: the part of the standard library that the recipe's runs hold out."""
    codebase_bytes: int = 48_000
    """Bytes of it, whole files in alphabetical order."""
    window: int = 512
    """Tokens of the rolling window, which moves by half of it; fewer if the smallest context is shorter."""
    chains_from: str | None = None
    """Folder of Python whose functions and classes become chains of diffs. None: the standard library."""
    repository: str | None = None
    """Git repository whose history gives the chains instead."""
    diffs: tuple[int, ...] = (1, 2, 4)
    """Lengths of the chains."""
    chains: int = 16
    """Chains of each length."""
    chain_bytes: int = 1200
    """Bytes of a chain and its answer at most."""
    package: str | None = None
    """Installed package that the questions are about; it is not imported. None: the standard library."""
    questions: int = 120
    """Questions, a fourth of each kind."""
    resamples: int = 2000
    """Bootstrap resamples."""
    seed: int = 0
    """Seed of questions, edits and resamples."""

    def __post_init__(self) -> None:
        for name, minimum in (
            ("codebase_bytes", 1),
            ("window", 4),
            ("chains", 1),
            ("chain_bytes", 500),
            ("questions", 4),
            ("resamples", 1),
        ):
            if getattr(self, name) < minimum:
                raise ValueError(f"{name} must be at least {minimum}, got {getattr(self, name)}")
        if not self.diffs or any(n < 1 for n in self.diffs) or len(set(self.diffs)) < len(self.diffs):
            raise ValueError(f"diffs must be different numbers of at least 1, got {list(self.diffs)}")


def measure_models(run: Run, names: Sequence[str], c: Settings) -> list[dict]:
    """The three parts of each model, in order: [{model, title, knowledge: […], tracking: […], codebase: […]}, …], one
    record per question, chain and file. Each part of each model is a stage of the run, and stages are resumable. Raises
    RunError as `opened` does, and for two models of one name."""
    if not names or len(set(names)) < len(names):
        raise RunError("name one or more checkpoints, each once; for example: etude eval base smollm2-135m")

    @functools.cache
    def base(name: str) -> Base:
        print(f"opening {name}", flush=True)
        return open_base(name, run.root / "models", print)

    items = Items.of(run, [functools.partial(base, name) for name in names], c)
    results = []
    for n, name in enumerate(names):
        result: dict[str, Any] = {"model": name}
        for part, evaluate in (("knowledge", know), ("tracking", track), ("codebase", read)):
            stage = run.stage(f"{n}-{part}", total=items.total(part), unit=part)
            if not stage.finished:
                stage.finish({"title": base(name).title, "found": evaluate(stage, base(name), items)})
            result |= {"title": stage.result()["title"], part: stage.result()["found"]}
            stage.close()
        results.append(result)
    return results


def asked_chains(run: Run) -> list[tracking.Chain]:
    """The chains of a run that `measure_models` has played."""
    return [
        dataclasses.replace(tracking.Chain(**record), diffs=tuple(record["diffs"]))
        for record in read_lines(run.root / "data" / "chains.jsonl")
    ]


@dataclass(frozen=True)
class Items:
    """What is asked."""

    questions: list[knowledge.Question]
    chains: list[tracking.Chain]
    texts: dict[str, str]
    window: int

    @classmethod
    def of(cls, run: Run, bases: Sequence[Callable[[], Base]], c: Settings) -> Items:
        """Made in the first process, read back in later ones."""
        stage, places = (
            run.stage("items", total=3, unit="parts"),
            [run.path("data", f"{name}.jsonl") for name in ("questions", "chains", "files")],
        )
        if not stage.finished:
            items = cls.make([base() for base in bases], c, stage.progress)
            lines = (
                [dataclasses.asdict(question) for question in items.questions],
                [dataclasses.asdict(chain) for chain in items.chains],
                [{"name": name, "text": text} for name, text in items.texts.items()],
            )
            for path, records in zip(places, lines, strict=True):
                atomic_write(path, "".join(json.dumps(entry) + "\n" for entry in records))
            stage.finish({"window": items.window}, places)
        question_records, file_records = (read_lines(path) for path in places[::2])
        return cls(
            [
                dataclasses.replace(
                    knowledge.Question(**record), answers=tuple(record["answers"]), check=tuple(record["check"])
                )
                for record in question_records
            ],
            asked_chains(run),
            {record["name"]: record["text"] for record in file_records},
            stage.result()["window"],
        )

    @classmethod
    def make(cls, bases: Sequence[Base], c: Settings, progress: Callable[[int], None] = lambda done: None) -> Items:
        def question_fits(question: knowledge.Question) -> bool:
            return all(
                joined(base, question.prompt, "") + answer_limit(base, question) <= base.network.context
                for base in bases
            )

        def chain_fits(chain: tracking.Chain) -> bool:
            return all(
                joined(base, chain.prompt, "") + chain_limit(base, chain) <= base.network.context for base in bases
            )

        fitting_questions = [
            question for question in knowledge.questions(c.package, c.questions, c.seed) if question_fits(question)
        ]
        if not all(knowledge.verified(fitting_questions)) or not fitting_questions:
            raise RunError(
                "questions whose answers cannot be verified, or that fit no context; choose another --set package=…"
            )
        progress(1)
        if c.repository is not None:
            chains = from_history(c.repository, c.diffs, c.chains, c.chain_bytes, chain_fits)
        else:
            texts = (cpt.read_library() if c.chains_from is None else cpt.read_corpus(c.chains_from)).files
            try:
                chains = tracking.synthetic(texts, c.diffs, c.chains, c.chain_bytes, c.seed, chain_fits)
            except ValueError as error:
                raise RunError(str(error)) from None
        progress(2)
        window = min(c.window, *(base.network.context - len(base.prefix) for base in bases))
        return cls(fitting_questions, chains, perplexity.codebase(c.codebase, c.codebase_bytes), window)

    def total(self, part: str) -> float:
        """Steps of a part's progress."""
        return {"knowledge": 9 * len(self.questions), "tracking": 2 * len(self.chains), "codebase": 1}[part]


def answer_limit(base: Base, question: knowledge.Question) -> int:
    """Tokens that a model may write for the answer of a question: a few more than its longest answer has."""
    return max(len(base.encode(answer + "\n")) for answer in question.answers) + 4


def chain_limit(base: Base, chain: tracking.Chain) -> int:
    """Tokens that a model may write for a chain: a quarter more than the right answer has."""
    return len(base.encode(chain.answer + tracking.FENCE)) * 5 // 4 + 4


CHUNK = 32
"""Questions or chains between two checkpoints of a stage."""


def run_in_chunks(stage: Any, items: Sequence[Any], evaluate: Callable[[Sequence[Any], int], list[dict]]) -> list[dict]:
    """evaluate(chunk, items before it), chunk after chunk; a killed stage goes on behind the last saved one."""
    state = stage.restore()
    records = parse_json(state["found"]) if state else []
    for start in range(len(records), len(items), CHUNK):
        records += evaluate(items[start : start + CHUNK], start)
        stage.log(start // CHUNK, done=len(records))
        if stage.due() and len(records) < len(items):
            stage.save({"found": json.dumps(records)}, len(records))
    return records


def know(stage: Any, base: Base, items: Items) -> list[dict]:
    """One record per question: which answer the model prefers, which it prefers without the question, and what it
    writes."""

    def evaluate(questions: Sequence[knowledge.Question], offset: int) -> list[dict]:
        pairs = [
            (prompt, answer + "\n")
            for question in questions
            for prompt in (question.prompt, question.unasked)
            for answer in question.answers
        ]
        logp = iter(base.scored(pairs, lambda done: stage.progress(9 * offset + done)))
        limits = [answer_limit(base, question) for question in questions]
        outputs = base.continued(
            [q.prompt for q in questions],
            limits,
            "\n",
            lambda done: stage.progress(9 * offset + 8 * len(questions) + done),
        )
        records = []
        for question, text in zip(questions, outputs, strict=True):
            choice, blind_choice = (
                knowledge.choose_answer([next(logp).total for _ in question.answers], question.answers)
                for _ in range(2)
            )
            right, exact = question.right, text.strip() == question.answers[question.right]
            records.append(
                {
                    "kind": question.kind,
                    "chosen": choice,
                    "right": choice == right,
                    "form": blind_choice == right,
                    "written": text,
                    "exact": exact,
                }
            )
        return records

    return run_in_chunks(stage, items.questions, evaluate)


def track(stage: Any, base: Base, items: Items) -> list[dict]:
    """One record per chain: what the model writes, how near it is, and what it gives the true text."""

    def evaluate(chains: Sequence[tracking.Chain], offset: int) -> list[dict]:
        scores = base.scored(
            [(c.prompt, c.answer + tracking.FENCE) for c in chains], lambda done: stage.progress(2 * offset + done)
        )
        limits = [chain_limit(base, chain) for chain in chains]
        outputs = base.continued(
            [c.prompt for c in chains],
            limits,
            tracking.FENCE,
            lambda done: stage.progress(2 * offset + len(chains) + done),
        )
        return [
            {
                "diffs": len(chain.diffs),
                "similarity": similarity(text, chain.answer),
                "exact": text == chain.answer,
                "nats": -score.total,
                "bytes": len((chain.answer + tracking.FENCE).encode()),
                "first_choices": sum(score.greedy) / len(score.greedy),
                "written": text,
                "wanted": chain.answer,
            }
            for chain, score, text in zip(chains, scores, outputs, strict=True)
        ]

    return run_in_chunks(stage, items.chains, evaluate)


def read(stage: Any, base: Base, items: Items) -> list[list[float]]:
    """[nats, tokens, bytes] of each file."""

    return [
        list(file_record)
        for file_record in perplexity.file_nll(base, items.texts, items.window, progress=stage.progress)
    ]


def gained(result: dict, c: Settings) -> dict[str, float]:
    """{value, low, high}: by how many points of % more right answers a model chooses with the question than without it,
    paired over questions."""
    return bootstrap([100.0 * (q["right"] - q["form"]) for q in result["knowledge"]], n=c.resamples, seed=c.seed)


def rows_of(results: Sequence[dict], chains: Sequence[dict[str, float]], c: Settings) -> list[dict]:
    """One flat row per model, then one per baseline: chance, who copies the first version, who copies the last hunk."""

    def interval(name: str, values: Sequence[float]) -> dict[str, float]:
        estimate = bootstrap(values, n=c.resamples, seed=c.seed)
        return {name: estimate["value"], f"{name}_low": estimate["low"], f"{name}_high": estimate["high"]}

    rows = []
    for result in results:
        total = perplexity.summed(result["codebase"], c.resamples, c.seed)
        low, high = total["nats_interval"], total["bits_interval"]
        bits = sum(t["nats"] for t in result["tracking"]) / sum(t["bytes"] for t in result["tracking"]) / np.log(2)
        rows.append(
            {"model": result["title"]}
            | interval("knowledge", [100.0 * q["right"] for q in result["knowledge"]])
            | interval("knowledge_form", [100.0 * q["form"] for q in result["knowledge"]])
            | interval("knowledge_exact", [100.0 * q["exact"] for q in result["knowledge"]])
            | interval("tracking", [t["similarity"] for t in result["tracking"]])
            | interval("tracking_exact", [100.0 * t["exact"] for t in result["tracking"]])
            | {
                "tracking_first_choices": 100 * float(np.mean([t["first_choices"] for t in result["tracking"]])),
                "tracking_bits_per_byte": float(bits),
            }
            | {"nats": total["nats"], "nats_low": low[0], "nats_high": low[1]}
            | {"bits_per_byte": total["bits_per_byte"], "bits_low": high[0], "bits_high": high[1]}
            | {"perplexity": total["perplexity"], "tokens": total["tokens"], "bytes": total["bytes"]}
        )
    rows.append({"model": "chance", "knowledge": 25.0})
    for name, label in (("first", "copies the first version"), ("hunk", "copies the last hunk")):
        rows.append({"model": label} | interval("tracking", [baseline[name] for baseline in chains]))
    return rows


def difference(results: Sequence[dict], part: str, a: int, b: int, c: Settings) -> dict[str, float]:
    """{value, low, high} of model a less model b: points of knowledge (%) or tracking, or bits per byte; paired over
    questions, chains or files."""
    if part == "codebase":
        first_files, second_files = (np.array(results[n]["codebase"], dtype=float) for n in (a, b))
        draws = perplexity.bootstrap_bits(first_files, c.resamples, c.seed) - perplexity.bootstrap_bits(
            second_files, c.resamples, c.seed
        )
        low, high = np.quantile(draws, [0.025, 0.975])
        value = (first_files[:, 0].sum() - second_files[:, 0].sum()) / first_files[:, 2].sum() / np.log(2)
        return {"value": float(value), "low": float(low), "high": float(high)}
    key, scale = ("right", 100.0) if part == "knowledge" else ("similarity", 1.0)
    return bootstrap(
        [scale * (x[key] - y[key]) for x, y in zip(results[a][part], results[b][part], strict=True)],
        n=c.resamples,
        seed=c.seed,
    )


def picture(rows: Sequence[dict], path: Path) -> None:
    """Three panels as Table 2 has columns: knowledge, state tracking, bits per byte; one bar per model, and the
    baselines as lines."""
    from kit.plots import COLOURS, GREY, save, sheet

    models = [row for row in rows if "nats" in row]
    figure, panels = sheet(3, "Base evaluations, as Table 2", width=4.4, height=1.4 + 0.42 * len(models))
    columns = (
        ("knowledge", "", "right answers of four, %"),
        ("tracking", "", "state tracking, 0 … 100"),
        ("bits_per_byte", "bits", "codebase NLL, bits per byte"),
    )
    for panel, (name, stem, label) in zip(panels, columns, strict=True):
        for index, row in enumerate(models):
            low, high = row[f"{stem or name}_low"], row[f"{stem or name}_high"]
            panel.barh(index, row[name], color=COLOURS[0], height=0.6)
            panel.errorbar(
                row[name],
                index,
                xerr=[[max(0.0, row[name] - low)], [max(0.0, high - row[name])]],
                color="black",
                capsize=3,
                fmt="none",
            )
            if name != "bits_per_byte":
                panel.plot(
                    row[f"{name}_exact"], index, "o", color=COLOURS[1], label="exact match" if index == 0 else None
                )
            if name == "knowledge":
                panel.plot(
                    row["knowledge_form"],
                    index,
                    "D",
                    color="white",
                    markeredgecolor="black",
                    label="without the question" if index == 0 else None,
                )
        for colour, row in zip(
            (GREY, COLOURS[2]),
            [r for r in rows if "nats" not in r and name in r and name != "bits_per_byte"],
            strict=False,
        ):
            panel.axvline(row[name], color=colour, linestyle="--", linewidth=1, label=row["model"])
        panel.set_yticks(
            range(len(models)), [row["model"] for row in models] if panel is panels[0] else [""] * len(models)
        )
        panel.invert_yaxis()
        panel.set(xlabel=label)
        if panel.get_legend_handles_labels()[1]:
            panel.legend(
                frameon=False,
                fontsize=8,
                loc="lower center",
                bbox_to_anchor=(0.5, 1.0),
                ncols=3,
                columnspacing=1.0,
                handletextpad=0.3,
            )
    save(figure, path)
