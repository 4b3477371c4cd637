"""README.md and docs/: their numbers are those that were measured, their links lead on, and their commands exist."""

import importlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from etude import catalog, cli, front, full_settings, playing, readme, tables
from kit import settings
from kit.settings import RunError

ROOT = readme.ROOT
LINKED = [*readme.pages(), ROOT / "CONTRIBUTING.md", ROOT / "kernels" / "README.md", ROOT / "lessons" / "README.md"]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in LINKED}
FRONT = PAGES["README.md"]
BLOCK = re.compile(r"<!-- ([a-z-]+) -->\n(.*?)\n<!-- /\1 -->", re.DOTALL)


def test_pages_say_what_was_measured():
    """Their blocks are what the committed results and the catalogue make: python -m etude.readme writes them."""
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
    (path,) = re.findall(r"\]\(([^)]*ref/kl.py)\)", readme.filled("<!-- twins -->\n<!-- /twins -->", ROOT / "docs"))
    assert path == "../ref/kl.py"


def test_readme_is_short_and_measured_numbers_are_not_typed():
    assert FRONT.count("\n") <= 130
    by_hand = BLOCK.sub("", FRONT)
    assert set(re.findall(r"\d+\.\d+|\d+%", by_hand)) <= {"2603.24477", "3.11", "2.0"}


def test_readme_leads_to_every_page():
    for page in readme.pages()[1:]:
        assert f"](docs/{page.name}" in FRONT, page.name


def anchors(text: str) -> set[str]:
    """What GitHub makes of headings."""
    return {re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in text.split("\n") if line.startswith("#")}


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
    text = "[a](ref/kl.py) [b](ref/nothing.py) [c](docs/claims.md#laws) [d](docs/claims.md#nothing) [e](https://arxiv.org/nothing)"
    assert astray(ROOT / "README.md", text) == ["ref/nothing.py", "docs/claims.md#nothing"]


def commands(text: str) -> list[str]:
    """What a page asks to type: lines of its fences, and words between backticks, that begin with etude, without their remarks."""
    fenced = [line for fence in re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE) for line in fence.split("\n")]
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    lines = [re.sub(r"^\$ |\s+# .*", "", line).strip() for line in [*fenced, *inline]]
    return [line for line in lines if re.match(r"(\.venv/bin/)?etude( |$)", line)]


def wrong(command: str) -> str | None:
    """What the command line would say against a command; words in capitals stand for the reader's own. None where it would begin."""
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
            kind = playing.config_class(entry) if "technique" in asked else importlib.import_module(entry.module).Experiment
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
    good = ("etude run NAME --scale small", "etude lesson N", "etude bench plan", "etude results RUN… --control RUN", "etude run recipe --help")
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
    asked = {word for text in PAGES.values() for word in re.findall(r"(?:^|`)make ([\w.]+)", text, re.MULTILINE)}
    assert {"small", "test"} <= asked <= rules


def test_the_rollout_is_a_recorded_one():
    """Word for word, and the shortest that reads a helper, edits and tests."""
    every = json.loads((ROOT / front.EXAMPLES / "rollouts.json").read_text(encoding="utf-8"))["rollouts"]
    one = every[front.chosen(every)]
    assert one["success"] and [words.split()[0] for speaker, words in front.turns(one["text"]) if speaker == "agent"] == [
        *("read", "read", "write", "test", "done")
    ]
    made = front.rollout()
    lines = [line[13:] for line in made.split("```")[1].strip().split("\n")]
    assert "".join(lines) == re.sub(r"<\|\w+\|>|\n", "", one["text"])
    assert f"rollout {every.index(one) + 1} of" in made.replace("\n", " ")
    with pytest.raises(ValueError, match="reads a helper"):
        front.chosen([other | {"success": False} for other in every])


def test_a_row_for_each_figure_of_the_report():
    rows = front.report_figures().split("\n\n")[0].split("\n")[2:]
    assert [re.findall(r"`etude figure (\S+)`", row) for row in rows] == [[entry.name] for entry in sorted(catalog.EXPERIMENTS, key=front.place)]
    assert [figure for row in rows for figure in re.findall(r"^\| \[[^]]*Fig\. (\d)", row)] == ["2", "4", "5", "6"]
    assert all("**" in row for row in rows)


def test_a_statement_has_the_verdict_of_its_claims():
    def said(*verdicts):
        return front.verdict([{"verdict": verdict} for verdict in verdicts])

    assert said("holds", "reproduced", "reproduced") == "reproduced" and said("holds", "holds") == "holds, a law"
    assert said("not tested", "reproduced", "reproduced") == "2 reproduced, 1 not tested"
    assert said("holds", "broken") == "broken" and said("contradicted") == "contradicted"
    kinds = ["contradicted", "1 reproduced, 1 not at this scale", "holds, a law", "reproduced", "not tested"]
    assert sorted(kinds, key=front.order) == [kinds[3], kinds[1], kinds[0], kinds[4], kinds[2]]


def test_every_twin_has_a_row():
    rows = tables.twins().split("\n")[2:]
    assert [row.split("`")[1] for row in rows] == [technique.name for technique in catalog.TECHNIQUES if technique.scaled]


def test_a_bar_does_not_end_a_cell():
    """Of a table, all rows have as many cells as the head."""
    for name, text in PAGES.items():
        for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
            assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.strip().split("\n")}) == 1, f"{name}: {table[:80]}"
