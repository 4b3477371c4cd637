"""Generated blocks of the README and its first pages: commands, what RL gains, verdicts, techniques, one rollout."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from etude import catalog
from etude.ledger import figures
from etude.ledger.qualifications import LIMITS
from etude.ledger.statements import STATEMENTS, Statement
from etude.readme.tables import ROOT, load_results

__all__ = [
    "IDENTITY",
    "TELLING",
    "bundled",
    "catalogue",
    "commands",
    "figure_order",
    "gain",
    "parse_turns",
    "report_figures",
    "rollout",
    "select_rollout",
    "statement_verdict",
    "techniques",
    "verdict_order",
    "verdicts",
]

EXAMPLES = "results/examples"
SPEAKERS = {"<|env|>": "environment", "<|agent|>": "agent"}
IDENTITY = "identity, verified"
"""The verdict of a statement that is tested by closed forms and identities alone."""
SPACE = "\N{NO-BREAK SPACE}"
"""Between links of one table cell: a phone scrolls the table instead of breaking every row into five lines."""


class Telling(NamedTuple):
    """A claim that the README shows."""

    name: str
    """EXPERIMENT/CLAIM in results/claims.json."""
    text: str
    """The claim in one short line, with {} where the measured number and its interval stand."""


TELLING = (
    Telling("tampered-tests/finds-the-tests", "RL amplifies seeded test tampering, by {} of the rollouts"),
    Telling("textual-feedback/sparse", "hints teach what the reward alone never reaches: success rises by {}"),
    Telling("async-rl/half-the-time", "with slow tools asynchronous RL takes half the time: {} × as fast"),
    Telling("mtp/speed-up", "decoding with MTP drafts is 2–3 × as fast: here {} ×"),
    Telling("best-of-k/best-of-16", "RL raises best of 16, too: by {}"),
)
"""Claims of different verdicts."""


def commands() -> str:
    """The commands of the first hour, with the time and memory that the committed run took."""
    (record,) = load_results("recipe-small.json")
    run, machine = record["runs"][0], record["machine"]
    minutes = run["seconds"] / 60
    lines = [
        "```",
        "git clone ADDRESS-OF-THIS-REPOSITORY etude && cd etude",
        "make demo     # a trained agent solves a task: seconds, once installed",
        f"make small    # trains an agent: {minutes:.0f} minutes, {run['peak_memory_gib']:.1f} GiB of memory",
        "make test     # runs all tests: about 20 minutes",
        "source .venv/bin/activate    # for the commands below",
        "```",
        "",
    ]
    core, test = (install_size(name) for name in ("CORE_SIZE", "TEST_SIZE"))
    note = (
        f"On {machine['cores']} cores ({machine['cpu']}), without a GPU. Needs Git, make, Python 3.11 or newer, and "
        f"{core} of disk ({test} for the tests) with PyTorch's CPU build. "
        "[Your first hour](docs/first-hour.md) goes through it."
    )
    return "\n".join([*lines, prose(note)])


def install_size(name: str) -> str:
    """A size that the Makefile prints before it installs."""
    match = re.search(rf"^{name} := (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        raise ValueError(f"the Makefile does not set {name}")
    return match[1]


def gain() -> str:
    """Success before and after RL, as means over the seeds, and the control."""
    (record,) = load_results("recipe-small.json")
    (control,), seeds, tasks = record["control"], len(record["runs"]), record["runs"][0]["tasks"]
    rows = ["| success | before → after | gain by RL |", "|---|---|---|"]
    names = {"greedy": "greedy", "success": "sampled", "best": f"best of {record['samples']}"}
    for name, title in names.items():
        over_seeds = record["over_seeds"][name]
        change = " → ".join(f"{over_seeds[part]['mean']:.2f}" for part in ("before", "after"))
        interval = "{value:+.2f} [{low:.2f}, {high:.2f}]".format(**over_seeds["interval"])
        rows.append(f"| {title} | {change} | {interval} |")
    rows += [
        f"| {title}, rejection fine-tuning | {before:.2f} → {after:.2f} | {after - before:+.2f} |"
        for title, before, after in rejection()
    ]
    for name, title in names.items():
        before, after, difference = (control[part][name]["value"] for part in ("before", "after", "difference"))
        rows.append(f"| {title}, control | {before:.2f} → {after:.2f} | {difference:+.2f} |")
    note = (
        f"Means over {seeds} seeds, {tasks} held-out tasks each, with 95% intervals over seeds and tasks. The world is "
        "one of search: docstrings refer to other files, and demonstrations often guess instead of reading them. "
        "[Rejection fine-tuning](docs/claims.md#rejection-fine-tuning) continues SFT on those of as many rollouts that "
        "solve their task; the control trains on shuffled rewards. [By depth, behaviours and all "
        "measures](docs/recipe.md)."
    )
    return "\n".join([*rows, "", prose(note)])


def rejection() -> list[tuple[str, float, float]]:
    """Greedy and sampled success after SFT and after rejection fine-tuning, over the tasks of all seeds."""
    (record,) = load_results("figures/rejection.json")

    def average(arm: str, measure: str) -> float:
        rows = [row for row in record["rows"] if row["arm"] == arm]
        return sum(row[measure] * row["tasks"] for row in rows) / sum(row["tasks"] for row in rows)

    return [(measure, average("SFT", measure), average("rejection", measure)) for measure in ("greedy", "sampled")]


def verdicts() -> str:
    """A few claims with their verdict and measurement, and how many claims have which verdict."""
    claims = figures.load(ROOT / "results" / "claims.json")
    by_name = {f"{claim['experiment']}/{claim['name']}": claim for claim in claims}
    lines = []
    for name, text in TELLING:
        claim = by_name[name]
        link = f"[{plain_verdict(claim['verdict'])}](results/figures/{claim['experiment']}.png)"
        lines.append(f"- {link}: {text.format(figures.format_measured_value(claim | {'unit': ''}))}")
    counts = Counter(claim["verdict"] for claim in figures.of_sources(claims))
    total = ", ".join(f"{counts[verdict]} {plain_verdict(verdict)}" for verdict in figures.COLOURS if counts[verdict])
    laws = figures.laws(claims)
    holding = sum(law["verdict"] == "holds" for law in laws)
    late = sum(bool(claim.get("after_the_fact")) for claim in claims)
    note = (
        f"[All {counts.total()} claims](docs/claims.md), judged by rules written before the measurement ({late} after "
        f"it): {total}. {holding} of {len(laws)} identities hold."
    )
    return "\n".join([*lines, "", prose(note)])


def plain_verdict(verdict: str) -> str:
    """A verdict of the ledger for readers who do not know its words."""
    return {"not at this scale": "inconclusive"}.get(verdict, verdict)


def techniques() -> str:
    """A folded table with a row for each technique: its name, linked to its reference, source, lesson, experiment."""
    summary = f"{len(catalog.TECHNIQUES)} techniques: reference file, source, lesson and experiment"
    rows = [f"<details><summary>{summary}</summary>", "", "| technique | source | links |", "|---|---|---|"]
    for technique in catalog.TECHNIQUES:
        name = f"[`{technique.name}`]({technique.ref})" if technique.ref else f"`{technique.name}`"
        folder = technique.sim and technique.sim.removesuffix("/experiment.py")
        paths = {"lesson": technique.lesson, "sim": folder}
        links = SPACE.join(f"[{title}]({path})" for title, path in paths.items() if path)
        rows.append(f"| {name} | {technique.source} | {links} |")
    return "\n".join([*rows, "", "</details>"])


def catalogue() -> str:
    """A row for each technique: its name, what it is, its source, and every file of it."""
    rows = ["| technique | what it is | source | files |", "|---|---|---|---|"]
    for technique in catalog.TECHNIQUES:
        paths = {
            "lesson": technique.lesson,
            "reference": technique.ref,
            "distributed": technique.scaled,
            "kernel": technique.kernel,
            "experiment": technique.sim,
            "figure": technique.figure,
        }
        links = ", ".join(f"[{title}]({path})" for title, path in paths.items() if path)
        rows.append(f"| `{technique.name}` | {technique.title} | {technique.source} | {links} |")
    return "\n".join(rows)


def parse_turns(text: str) -> list[tuple[str, str]]:
    """A rollout's text as (speaker, words), in order, without empty turns."""
    parts = re.split(r"(<\|env\|>|<\|agent\|>)", text)
    return [(SPEAKERS[mark], words) for mark, words in zip(parts[1::2], parts[2::2], strict=True) if words]


def select_rollout(rollouts: Sequence[dict]) -> int:
    """The number of the rollout that is shown: the one with the fewest tokens among successes in one context, with one
    call a turn and none invalid, that read the target and a helper, write and test. ValueError if there is none."""

    def is_clear(candidate: dict) -> bool:
        calls = [words.split()[0] for speaker, words in parse_turns(candidate["text"]) if speaker == "agent"]
        is_single = len(calls) == candidate["turns"] == candidate["calls"] and not candidate["invalid_calls"]
        return candidate["success"] and is_single and calls.count("read") > 1 and {"write", "test"} <= set(calls)

    numbers = [number for number, candidate in enumerate(rollouts) if is_clear(candidate)]
    if not numbers:
        raise ValueError(
            f"{EXAMPLES}/rollouts.json has no success that reads a helper, writes and tests; sample "
            f"more with etude examples"
        )
    return min(numbers, key=lambda number: rollouts[number]["own_tokens"])


def rollout() -> str:
    """A rollout with its verdict, and the run, seed and policy that it comes from."""
    (record,), (run,) = load_results("examples/rollouts.json"), load_results("examples/recipe/config.json")
    rollouts = record["rollouts"]
    number = select_rollout(rollouts)
    example = rollouts[number]
    same_task = [candidate for candidate in rollouts if candidate["task"] == example["task"]]
    lines = ["```"]
    for speaker, words in parse_turns(example["text"]):
        first, *other_lines = words.split("\n")
        lines += [f"{speaker:13}{first}", *(" " * 13 + line for line in other_lines)]
    successes = sum(candidate["success"] for candidate in same_task)
    config = run["config"]
    note = (
        f"The hidden tests {'pass' if example['success'] else 'fail'} after {example['turns']} turns and "
        f"{example['own_tokens']} sampled tokens. This is rollout {number + 1} of the {len(rollouts)} in "
        f"[rollouts.json]({EXAMPLES}/rollouts.json): the shortest success that reads a helper and makes no invalid "
        f"call. Of the {len(same_task)} rollouts of this task in the file, {successes} succeed. The policy is the one "
        f"after RL, sampled at temperature {config['rl']['temperature']:g}, from a run with seed {config['seed']} "
        f"([settings]({EXAMPLES}/recipe/config.json), commit {run['machine']['commit']})."
    )
    return "\n".join([*lines, "```", "", prose(note)])


def bundled() -> str:
    """How often the bundled checkpoint succeeds, after and before RL."""
    (record,) = load_results("examples/agent/record.json")
    held_out, megabytes = record["held_out"], record["weights"]["bytes"] / 1e6
    rates = {
        name: "{value:.2f} [{low:.2f}, {high:.2f}]".format(**held_out[name]["success"]) for name in ("agent", "sft")
    }
    return prose(
        f"[The bundled checkpoint]({EXAMPLES}/agent/record.json) has {megabytes:.1f} MB of bfloat16 weights. "
        f"On {held_out['tasks']} held-out tasks with {held_out['samples']} rollouts each it succeeds in "
        f"{rates['agent']}; before RL, in {rates['sft']}."
    )


def report_figures() -> str:
    """A row for each figure or section of the report that an experiment reproduces: its statements, by verdict."""
    claims = figures.load(ROOT / "results" / "claims.json")
    rows = ["| figure or section | statements by verdict | command |", "|---|---|---|"]
    for entry in sorted(catalog.EXPERIMENTS, key=figure_order):
        by_verdict: dict[str, list[str]] = {}
        entry_claims = [claim for claim in claims if claim["experiment"] == entry.name]
        for statement in STATEMENTS:
            if tests := tests_of(entry, statement, entry_claims):
                limits = dict.fromkeys(
                    limit for claim in tests if (limit := LIMITS.get(f"{entry.name}/{claim['name']}"))
                )
                text = statement.says + (f" ({'; '.join(limits)})" if limits else "")
                by_verdict.setdefault(statement_verdict(tests), []).append(text)
        ordered = sorted(by_verdict.items(), key=lambda item: verdict_order(item[0]))
        cell = "<br>".join(f"**{verdict}**: {'; '.join(texts)}" for verdict, texts in ordered)
        link = f"[{entry.source}](results/figures/{entry.name}.png)"
        rows.append(f"| {link} | {figures.cell(cell)} | `etude figure {entry.name}` |")
    late, unrecorded = (sum(bool(claim.get(key)) for claim in claims) for key in ("after_the_fact", "unrecorded"))
    note = (
        f"{late} rules were written after their data, and {unrecorded} rows do not record the code that measured them."
    )
    return "\n".join([*rows, "", prose(note)])


def figure_order(entry: catalog.Experiment) -> tuple:
    """Figures first, in the report's order, then sections."""
    figure = re.search(r"Fig\. (\d+)", entry.source)
    return (0, int(figure[1])) if figure else (1, entry.source)


def tests_of(entry: catalog.Experiment, statement: Statement, claims: Sequence[dict]) -> list[dict]:
    """The claims that test a statement, if the statement is of the source that the experiment reproduces. Statements of
    other papers are left out."""
    tests = [claim for claim in claims if f"{entry.name}/{claim['name']}" in statement.tests]
    place = r"§[\d.]*\d|arXiv:[\d.]*\d|App\. [A-Z]|Composer 2\.5|real-time RL"
    names = re.findall(place, entry.source)
    sources = [statement.section, *(claim["source"] for claim in tests)]
    return tests if any(name in re.findall(place, source) for name in names for source in sources) else []


def statement_verdict(claims: Sequence[dict]) -> str:
    """The verdict that all claims of a statement share, identities left out, or how many have which."""
    counts = Counter(claim["verdict"] for claim in claims if claim["verdict"] != "holds")
    if len(counts) < 2:
        return next(iter(counts), IDENTITY)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in figures.COLOURS if counts[verdict])


def verdict_order(verdict: str) -> list[int]:
    """The place of a verdict among those of a row: first what was reproduced, last the identities."""
    verdicts = ["holds"] if verdict == IDENTITY else re.sub(r"\d+ ", "", verdict).split(", ")
    return [number for number, name in enumerate(figures.COLOURS) if name in verdicts]


def prose(text: str) -> str:
    """Text in lines as long as those of the page around it."""
    return textwrap.fill(text, 140, break_long_words=False, break_on_hyphens=False)
