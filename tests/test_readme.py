"""README.md and docs/: their numbers are measured ones, their links and commands exist, and their examples run."""

import importlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from etude import catalog
from etude.cli import main as cli
from etude.ledger import figures
from etude.readme import build as readme
from etude.readme import front, tables
from etude.run import settings as full_settings
from etude.run import technique as technique_run
from kit import settings
from kit.settings import RunError
from ref.environment import Environment, Reward, StepResult
from ref.messages import Message

ROOT = readme.ROOT
OTHERS = ("AGENTS.md", "CONTRIBUTING.md", "kernels/README.md", "lessons/README.md")
LINKED = [*readme.pages(), *(ROOT / name for name in OTHERS)]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in LINKED}
FRONT = PAGES["README.md"]
FRONT_BYTES, FRONT_COLUMNS = 8000, 160
"""Limits of README.md: a visitor reads it on a phone, and no line is stuffed to save another."""
BLOCK = re.compile(r"<!-- ([a-z-]+) -->\n(.*?)\n<!-- /\1 -->", re.DOTALL)


def test_pages_say_what_was_measured():
    """Their blocks are what the committed results and the catalogue make: python -m etude.readme.build writes them."""
    for path in readme.pages():
        text = path.read_text(encoding="utf-8")
        assert text == readme.filled(text, path.parent), path
        for name, made in BLOCK.findall(text):
            assert made.strip(), f"{path}: {name} is empty"


def test_every_block_stands_on_one_page():
    found = [name for page in readme.pages() for name, _ in BLOCK.findall(page.read_text(encoding="utf-8"))]
    assert sorted(found) == sorted(readme.BLOCKS)


@pytest.mark.parametrize("name", readme.BLOCKS)
def test_a_number_changed_by_hand_is_seen(name):
    page = next(page for page in readme.pages() if f"<!-- {name} -->" in page.read_text(encoding="utf-8"))
    text = page.read_text(encoding="utf-8")
    made = next(made for found, made in BLOCK.findall(text) if found == name)
    changed = re.sub(r"\d", lambda digit: str(9 - int(digit[0])), made, count=1)
    assert changed != made and readme.filled(text.replace(made, changed), page.parent) == text


def test_what_nobody_makes_is_refused():
    with pytest.raises(RunError, match="block nothing"):
        readme.filled("<!-- nothing -->\n<!-- /nothing -->")
    with pytest.raises(RunError, match="does not end"):
        readme.filled("<!-- gain -->\n1.0\n")


def test_links_of_blocks_lead_on_from_where_the_page_lies():
    (path,) = re.findall(
        r"\]\(([^)]*ref/kl.py)\)", readme.filled("<!-- distributed -->\n<!-- /distributed -->", ROOT / "docs")
    )
    assert path == "../ref/kl.py"


def test_the_front_page_is_short_and_its_measured_numbers_are_not_typed():
    assert len(FRONT.encode()) <= FRONT_BYTES
    assert max(map(len, FRONT.split("\n"))) <= FRONT_COLUMNS
    by_hand = BLOCK.sub("", FRONT)
    assert set(re.findall(r"\d+\.\d+|\d+%", by_hand)) <= {"2603.24477", "3.11", "2.0"}


def test_readme_leads_to_every_page():
    """README.md links the map, docs/README.md, which has exactly one line for every other page of docs/."""
    assert "](docs/README.md)" in FRONT
    lines = re.findall(r"^- \[[^]]+\]\(([\w-]+\.md)\): \S.*$", PAGES["docs/README.md"], re.MULTILINE)
    assert sorted(lines) == sorted(path.name for path in (ROOT / "docs").glob("*.md") if path.name != "README.md")


def anchors(text: str) -> set[str]:
    """What GitHub makes of headings."""
    return {
        re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in text.split("\n")
        if line.startswith("#")
    }


def astray(page: Path, text: str) -> list[str]:
    """Links of a page that lead to no file, or to no heading of it."""
    found = []
    for target, heading in re.findall(r"\]\((?!https?://)([^)#]*)(?:#([^)]*))?\)", text):
        there = (page.parent / target).resolve() if target else page
        if not there.exists() or heading and heading not in anchors(there.read_text(encoding="utf-8")):
            found.append(f"{target}#{heading}" if heading else target)
    return found


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    assert not astray(ROOT / name, PAGES[name])


def test_a_link_that_leads_nowhere_is_seen():
    text = (
        "[a](ref/kl.py) [b](ref/nothing.py) [c](docs/claims.md#laws) [d](docs/claims.md#nothing) "
        "[e](https://arxiv.org/nothing)"
    )
    assert astray(ROOT / "README.md", text) == ["ref/nothing.py", "docs/claims.md#nothing"]


def commands(text: str) -> list[str]:
    """The commands of a page: lines of its fences, and inline code, that begin with etude, without their comments."""
    fenced = [
        line
        for fence in re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        for line in fence.split("\n")
    ]
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    lines = [re.sub(r"^\$ |\s+# .*", "", line).strip() for line in [*fenced, *inline]]
    return [line for line in lines if re.match(r"(\.venv/bin/)?etude( |$)", line)]


def wrong(command: str) -> str | None:
    """The error of the command line for a command, or None. Words in capitals stand for the reader's own."""
    words: list[str] = shlex.split(command.replace("…", ""))[1:]
    at: Any = typer.main.get_command(cli.app)
    while words and hasattr(at, "commands"):
        word, *words = words
        if word not in at.commands:
            return f"there is no command {word}"
        at = at.commands[word]
    if hasattr(at, "commands") or "--help" in words:
        return None
    try:
        asked = at.make_context("etude", ["0" if word == "N" else word for word in words]).params
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        return str(error)
    name = asked.get("technique") or asked.get("name")
    if name and not name.isupper():
        find = catalog.find if "technique" in asked else catalog.find_experiment
        if asked.get("scale") == "full":
            kind = full_settings.settings(name, asked["backend"])
        elif (entry := find(name)) is None:
            return f"there is no {name}"
        else:
            kind = (
                technique_run.config_class(entry)
                if "technique" in asked
                else importlib.import_module(entry.module).Experiment
            )
        known = {key for key, *_ in settings.describe(kind)}
        odd = [one for one in asked["sets"] or () if one.partition("=")[0] not in known and not one.isupper()]
        return f"there is no setting {odd[0]}" if odd else None
    return None


@pytest.mark.parametrize("name", PAGES)
def test_commands_exist(name):
    found = {command: error for command in commands(PAGES[name]) if (error := wrong(command))}
    assert not found


def test_a_command_that_does_not_exist_is_seen():
    """By its words, its options, its technique, its settings."""
    text = "```\n$ etude plan  # so\nmake small\n```\nand `etude figure kl-variance` or `etude.toml`, `etude run`"
    assert commands(text) == ["etude plan", "etude figure kl-variance", "etude run"]
    good = (
        "etude run NAME --scale small",
        "etude lesson N",
        "etude bench plan",
        "etude results RUN… --control RUN",
        "etude run recipe --help",
    )
    assert not any(map(wrong, good)) and not wrong("etude run cpt --scale full --backend gloo --set ep=2")
    for bad in (
        "etude explain",
        "etude plan --gpu 8",
        "etude run kll",
        "etude figure kl",
        "etude run kl --set nothing=1",
        "etude run cpt --scale full --set nothing=1",
        "etude bench nothing",
        "etude lesson first",
    ):
        assert wrong(bad), bad
    assert sum(len(commands(text)) for text in PAGES.values()) > 100


def test_targets_of_make_exist():
    rules = set(re.findall(r"^([\w.]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    by_page = {name: set(re.findall(r"(?:^|`)make ([\w.]+)", text, re.MULTILINE)) for name, text in PAGES.items()}
    assert {"demo", "small", "test"} <= by_page["README.md"] and set().union(*by_page.values()) <= rules


def test_the_rollout_is_a_recorded_one():
    """Word for word, and the shortest that reads a helper, edits and tests."""
    rollouts = json.loads((ROOT / front.EXAMPLES / "rollouts.json").read_text(encoding="utf-8"))["rollouts"]
    shown = rollouts[front.select_rollout(rollouts)]
    calls = [words.split()[0] for speaker, words in front.parse_turns(shown["text"]) if speaker == "agent"]
    assert shown["success"] and calls == ["read", "read", "write", "test", "done"]
    block = front.rollout()
    lines = [line[13:] for line in block.split("```")[1].strip().split("\n")]
    assert "".join(lines) == re.sub(r"<\|\w+\|>|\n", "", shown["text"])
    assert f"rollout {rollouts.index(shown) + 1} of" in block.replace("\n", " ")
    with pytest.raises(ValueError, match="reads a helper"):
        front.select_rollout([rollout | {"success": False} for rollout in rollouts])


def test_a_row_for_each_measure_and_the_control():
    rows = front.gain().split("\n\n")[0].split("\n")[2:]
    assert [row.split("|")[1].strip() for row in rows] == [
        *("greedy", "sampled", "best of 16"),
        *("greedy, rejection fine-tuning", "sampled, rejection fine-tuning"),
        *("greedy, control", "sampled, control", "best of 16, control"),
    ]


def test_the_verdicts_of_the_front_page_are_those_of_the_ledger():
    """Five claims of all kinds of verdicts, each with its number and its picture."""
    by_name = {
        f"{claim['experiment']}/{claim['name']}": claim for claim in figures.load(ROOT / "results" / "claims.json")
    }
    claims = [by_name[telling.name] for telling in front.TELLING]
    lines = front.verdicts().split("\n\n")[0].split("\n")
    assert len(lines) == len(claims) == 5
    for line, claim in zip(lines, claims, strict=True):
        verdict, picture = front.plain_verdict(claim["verdict"]), f"results/figures/{claim['experiment']}.png"
        assert (
            line.startswith(f"- [{verdict}]({picture}): ")
            and figures.format_measured_value(claim | {"unit": ""}) in line
        )
    assert {claim["verdict"] for claim in claims} == {"reproduced", "partly", "contradicted", "not at this scale"}


def test_a_row_for_each_technique():
    """Three columns on the front page, and every file of the technique on the map."""
    rows = [row for row in front.techniques().split("\n") if row.startswith("|")]
    names = [technique.name for technique in catalog.TECHNIQUES]
    assert [row.split("`")[1] for row in rows[2:]] == names and all(row.count("|") == 4 for row in rows)
    for technique, short, full in zip(catalog.TECHNIQUES, rows[2:], front.catalogue().split("\n")[2:], strict=True):
        parts = [getattr(technique, part) for part in ("ref", "scaled", "kernel", "sim", "lesson", "figure")]
        assert all(f"]({path})" in full for path in parts if path) and technique.title in full
        folder = technique.sim and technique.sim.removesuffix("/experiment.py")
        assert all(f"]({path})" in short for path in (technique.ref, technique.lesson, folder) if path)


def test_a_row_for_each_figure_of_the_report():
    rows = front.report_figures().split("\n\n")[0].split("\n")[2:]
    entries = sorted(catalog.EXPERIMENTS, key=front.figure_order)
    assert [re.findall(r"`etude figure (\S+)`", row) for row in rows] == [[entry.name] for entry in entries]
    numbers = [figure for row in rows for figure in re.findall(r"^\| \[[^]]*Fig\. (\d)", row)]
    assert numbers == ["2", "4", "5", "6"] and all("**" in row for row in rows)


def test_a_statement_has_the_verdict_of_its_claims():
    def verdict_of(*verdicts):
        return front.statement_verdict([{"verdict": verdict} for verdict in verdicts])

    assert verdict_of("holds", "reproduced", "reproduced") == "reproduced"
    assert verdict_of("holds", "holds") == front.IDENTITY == "identity, verified"
    assert verdict_of("not tested", "reproduced", "reproduced") == "2 reproduced, 1 not tested"
    assert verdict_of("holds", "broken") == "broken" and verdict_of("contradicted") == "contradicted"
    kinds = ["contradicted", "1 reproduced, 1 not at this scale", front.IDENTITY, "reproduced", "not tested"]
    assert sorted(kinds, key=front.verdict_order) == [kinds[3], kinds[1], kinds[0], kinds[4], kinds[2]]


def test_every_distributed_version_has_a_row():
    rows = tables.distributed().split("\n")[2:]
    assert [row.split("`")[1] for row in rows] == [
        technique.name for technique in catalog.TECHNIQUES if technique.scaled
    ]


def test_a_bar_does_not_end_a_cell():
    """Of a table, all rows have as many cells as the head."""
    for name, text in PAGES.items():
        for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
            assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.strip().split("\n")}) == 1, (
                f"{name}: {table[:80]}"
            )


def undefined(page: Path, text: str) -> list[str]:
    """Names that a page says are in a file, `NAME` in [FILE](FILE), and that the file does not define."""
    return [
        f"{name} in {target}"
        for name, target in re.findall(r"`(\w+)` in\s+\[[^]]+\]\(([^)#]+\.py)\)", text)
        if not re.search(
            rf"^(def|class) {name}\b|^{name}\b.* = ", (page.parent / target).read_text("utf-8"), re.MULTILINE
        )
    ]


@pytest.mark.parametrize("name", PAGES)
def test_names_are_where_the_pages_say(name):
    assert not undefined(ROOT / name, PAGES[name])


def test_a_name_that_is_elsewhere_is_seen():
    text = (
        "`train` in [ref/rl.py](ref/rl.py), `FAMILY` in\n[x](ref/dr_grpo.py), `policy_loss` in [ref/rl.py](ref/rl.py)"
    )
    assert undefined(ROOT / "README.md", text) == ["policy_loss in ref/rl.py"]
    assert sum(len(re.findall(r"`\w+` in\s+\[", PAGES[name])) for name in ("CONTRIBUTING.md", "AGENTS.md")) > 30


def python_of(name: str) -> str:
    """The Python examples of a page."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```", PAGES[name], re.DOTALL | re.MULTILINE))


def test_the_environment_of_the_front_page_is_one():
    names: dict[str, Any] = {"Message": Message, "Reward": Reward, "StepResult": StepResult}
    exec(python_of("README.md"), names)
    for content, success in (("7", 1.0), ("3", 0.0)):
        environment = names["Guess"]()
        assert isinstance(environment, Environment) and environment.reset()
        assert environment.step(Message("assistant", content)).done
        assert environment.reward().metrics == {"success": success}
        environment.close()


def test_the_example_of_the_environment_page_trains(capsys, monkeypatch):
    """One step instead of twenty, from the bundled checkpoint, as a reader would type it in the clone."""
    monkeypatch.chdir(ROOT)
    code = python_of("docs/your-own-environment.md")
    assert code.count("steps=20") == 1
    exec(code.replace("steps=20", "steps=1"), {"__name__": "example"})
    (line,) = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"step 1: mean reward -?\d+\.\d+", line)
