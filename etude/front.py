"""What the README shows and no other page does: one rollout of the agent, what RL gained in two lines, and the report's figures."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Sequence

from etude import catalog, figures
from etude.limits import LIMITS
from etude.statements import STATEMENTS, Statement
from etude.tables import ROOT, measured

__all__ = ["chosen", "gain", "report_figures", "rollout", "turns"]

EXAMPLES = "results/examples"
SPEAKERS = {"<|env|>": "environment", "<|agent|>": "agent"}


def turns(text: str) -> list[tuple[str, str]]:
    """A rollout's text as (speaker, words), in order; what says nothing is left out."""
    parts = re.split(r"(<\|env\|>|<\|agent\|>)", text)
    return [(SPEAKERS[mark], words) for mark, words in zip(parts[1::2], parts[2::2], strict=True) if words]


def chosen(rollouts: Sequence[dict]) -> int:
    """Which rollout is shown: the one with the fewest tokens among successes in one context, one call a turn and none invalid, that
    read the target and a helper, write and test. ValueError where there is none."""

    def shown(one: dict) -> bool:
        said = [words.split()[0] for speaker, words in turns(one["text"]) if speaker == "agent"]
        whole = len(said) == one["turns"] == one["calls"] and not one["invalid_calls"]
        return one["success"] and whole and said.count("read") > 1 and {"write", "test"} <= set(said)

    fit = [number for number, one in enumerate(rollouts) if shown(one)]
    if not fit:
        raise ValueError(f"{EXAMPLES}/rollouts.json has no success that reads a helper, writes and tests; play more of them: etude examples")
    return min(fit, key=lambda number: rollouts[number]["own_tokens"])


def rollout() -> str:
    """A rollout with its verdict, and which run, seed and policy it is of."""
    (found,), (run,) = measured("examples/rollouts.json"), measured("examples/recipe/config.json")
    every = found["rollouts"]
    number = chosen(every)
    one = every[number]
    same = [other for other in every if other["task"] == one["task"]]
    lines = ["```"]
    for speaker, words in turns(one["text"]):
        first, *rest = words.split("\n")
        lines += [f"{speaker:13}{first}", *(" " * 13 + line for line in rest)]
    verdict = "pass" if one["success"] else "fail"
    told = (
        f"The hidden tests {verdict}, after {one['turns']} turns and {one['own_tokens']} tokens of the agent's own. This is rollout {number + 1} "
        f"of the {len(every)} in [rollouts.json]({EXAMPLES}/rollouts.json): the shortest success that reads a helper and makes no invalid call. "
        f"Of the {len(same)} rollouts of this task there, {sum(other['success'] for other in same)} succeed. The policy is the one after RL, "
        f"sampled at temperature {run['config']['rl']['temperature']:g}, from a run with seed {run['config']['seed']} "
        f"([settings]({EXAMPLES}/recipe/config.json), commit {run['machine']['commit']})."
    )
    return "\n".join([*lines, "```", "", prose(told)])


def gain() -> str:
    """Success before and after RL by seed, with the mean difference, what a run took, and how often the committed agent succeeds."""
    (found,) = measured("recipe-small.json")

    def change(run: dict) -> str:
        return f"{run['before']['success']['value']:.2f} → {run['after']['success']['value']:.2f}"

    first, box, over = found["runs"][0], found["machine"], found["over_seeds"]
    moved = {name: "{mean:+.3f} ± {sd:.3f}".format(**over[name]["difference"]) for name in ("success", "greedy", "best_of_8")}
    greedy = ", ".join(f"{run['before']['greedy']['value']:.2f} → {run['after']['greedy']['value']:.2f}" for run in found["runs"])
    runs, controls = (", ".join(f"{change(run)} (seed {run['seed']})" for run in found[key]) for key in ("runs", "control"))
    return prose(
        f"Sampled success on {first['tasks']} held-out tasks before → after RL: {runs}. The mean difference is {moved['success']} (standard "
        f"deviation over seeds), of greedy decoding {moved['greedy']} ({greedy}), of best of 8 {moved['best_of_8']}: sampled success rises to "
        f"what greedy decoding had before. Control, with shuffled rewards: {controls}. "
        f"Seed {first['seed']} took {first['seconds'] / 60:.1f} minutes on {box['cores']} cores ({box['cpu']}). "
        f"[All measures](docs/recipe.md). {committed()}"
    )


def committed() -> str:
    """How often the agent in the clone succeeds, beside itself before RL."""
    (record,) = measured("examples/agent/record.json")
    tried = record["held_out"]
    said = {name: "{value:.2f} [{low:.2f}, {high:.2f}]".format(**tried[name]["success"]) for name in ("agent", "sft")}
    return (
        f"[The clone's agent]({EXAMPLES}/agent/record.json), {record['weights']['bytes'] / 1e6:.1f} MB of bfloat16, solves {said['agent']} of "
        f"{tried['tasks']} × {tried['samples']}, before RL {said['sft']}."
    )


def report_figures() -> str:
    """A row for each figure of the report, or section without one, that an experiment plays: what it claims, ordered by what was found."""
    claims = figures.load(ROOT / "results" / "claims.json")
    rows = ["| in the report | what it claims, and what was found here | command |", "|---|---|---|"]
    for entry in sorted(catalog.EXPERIMENTS, key=place):
        said: dict[str, list[str]] = {}
        mine = [claim for claim in claims if claim["experiment"] == entry.name]
        for statement in STATEMENTS:
            if some := about(entry, statement, mine):
                limits = dict.fromkeys(limit for c in some if (limit := LIMITS.get(f"{entry.name}/{c['name']}")))
                said.setdefault(verdict(some), []).append(statement.says + (f" ({'; '.join(limits)})" if limits else ""))
        cell = "<br>".join(f"**{word}**: {'; '.join(what)}" for word, what in sorted(said.items(), key=lambda item: order(item[0])))
        rows.append(f"| [{entry.source}](results/figures/{entry.name}.png) | {figures.cell(cell)} | `etude figure {entry.name}` |")
    counts = Counter(claim["verdict"] for claim in figures.of_sources(claims))
    verdicts = ", ".join(f"{counts[word]} {word}" for word in figures.COLOURS if counts[word])
    laws = figures.laws(claims)
    unrecorded, late = (sum(bool(claim.get(key)) for claim in claims) for key in ("unrecorded", "after_the_fact"))
    told = (
        f"{figures.covered(claims)} Claims: {verdicts}. Laws: "
        f"{sum(law['verdict'] == 'holds' for law in laws)} of {len(laws)} hold. {late} rules came after their data, and {unrecorded} rows "
        f"name no code."
    )
    return "\n".join([*rows, "", prose(told)])


def place(entry: catalog.Experiment) -> tuple:
    """Figures first, in the report's order, then sections."""
    figure = re.search(r"Fig\. (\d+)", entry.source)
    return (0, int(figure[1])) if figure else (1, entry.source)


def about(entry: catalog.Experiment, statement: Statement, claims: Sequence[dict]) -> list[dict]:
    """The claims that test a statement, where it is one of the source that the experiment reproduces; another paper's are left out."""
    some = [claim for claim in claims if f"{entry.name}/{claim['name']}" in statement.tests]
    place = r"§[\d.]*\d|arXiv:[\d.]*\d|App\. [A-Z]|Composer 2\.5|real-time RL"
    named = re.findall(place, entry.source)
    heads = [statement.section, *(claim["source"] for claim in some)]
    return some if any(name in re.findall(place, head) for name in named for head in heads) else []


def verdict(claims: Sequence[dict]) -> str:
    """Of a statement: the verdict that all of its claims share, laws that hold beside, or how many have which."""
    counts = Counter(claim["verdict"] for claim in claims if claim["verdict"] != "holds")
    if len(counts) < 2:
        return next(iter(counts), "holds, a law")
    return ", ".join(f"{counts[word]} {word}" for word in figures.COLOURS if counts[word])


def order(said: str) -> list[int]:
    """Where a verdict stands among those of a row: reproduced, in part, contradicted, not shown, not tested, laws."""
    return [number for number, word in enumerate(figures.COLOURS) if word in re.sub(r"\d+ ", "", said).split(", ")]


def prose(text: str) -> str:
    """Text in lines as long as those of the page around it."""
    return textwrap.fill(text, 140, break_long_words=False, break_on_hyphens=False)
