"""The recipes in examples/tasks: well formed, without code, as many as promised, and as docs/tasks.md counts them."""

import json
import re
from pathlib import Path

import pytest

from environments.tasks.package import LICENCES
from environments.tasks.recipe import SLOW

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "tasks"
RECIPES = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))}
NAME = re.compile(r"[\w./-]+\.py:[\w.<>,]+")
"""A file and the qualified names of its functions."""


def test_as_many_as_promised():
    """300 tasks of 12 packages, none twice, in less than a megabyte. Nothing else lies there but what a check
    writes."""
    ids = [row["id"] for recipe in RECIPES.values() for row in recipe["tasks"]]
    assert (
        len(ids) == len(set(ids)) >= 300
        and len({recipe["package"]["name"] for recipe in RECIPES.values()}) == len(RECIPES) >= 12
    )
    assert sum(path.stat().st_size for path in FOLDER.glob("*.json")) < 1_000_000
    assert {path.name for path in FOLDER.iterdir() if not path.name.endswith(".checks.jsonl")} == RECIPES.keys()


@pytest.mark.parametrize("file", RECIPES)
def test_a_recipe_holds_what_it_must_and_no_more(file):
    """Names and numbers, by which the package is found and its tasks are known again; no code, and no path of the
    machine that made it."""
    recipe = RECIPES[file]
    about, pieces, tasks = recipe["package"], recipe["pieces"], recipe["tasks"]
    assert recipe.keys() == {"package", "pieces", "tasks"}
    assert about.keys() == {
        "spec",
        "name",
        "version",
        "licence",
        "origin",
        "digest",
        "left out",
        "slow",
        "ungradable",
        "flaky",
    }
    assert (
        file == f"{about['name']}-{about['version']}.json" and about["spec"] == f"{about['name']}=={about['version']}"
    )
    assert about["licence"] in LICENCES and re.fullmatch("[0-9a-f]{64}", about["digest"])
    assert re.fullmatch("sdist, SHA-256 [0-9a-f]{64}", about["origin"])
    for test in (*about["left out"], *about["slow"], *about["ungradable"], *about["flaky"]):
        assert re.match(r"[\w./-]+\.py(::|$)", test) and not test.startswith("/")
    assert set(pieces) <= {"tried", "again", "flag", "fool", "leak", "short", "style", "tests"}
    assert pieces["tried"] == len(tasks) + sum(count for why, count in pieces.items() if why != "tried")
    assert [row["id"] for row in tasks] == sorted(row["id"] for row in tasks) and tasks
    for row in tasks:
        assert row.keys() == {"id", "way", "name", "tests", "difficulty"} and row["way"] in ("slice", "body", "symbol")
        assert re.fullmatch(re.escape(f"{about['name']}-{about['version']}-") + "[0-9a-f]{12}", row["id"])
        assert all(NAME.fullmatch(part) and not part.startswith("/") for part in row["name"].split("+"))
        tests, difficulty = row["tests"], row["difficulty"]
        assert tests.keys() == {"visible", "held out", "kept"} and tests["visible"] >= 1 and tests["held out"] >= 1
        assert difficulty.keys() == {"lines", "functions", "files", "tests", "callers"}
        assert difficulty["tests"] == tests["visible"] + tests["held out"] >= 3
        assert all(type(number) is int and number >= 0 for number in (*tests.values(), *difficulty.values()))


def test_the_table_says_what_the_recipes_say():
    """Package, version, licence, tasks and pieces tried, in the order of their names; and their sums in the last
    row."""
    page = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")
    ][2:]
    abouts = [(recipe["package"], len(recipe["tasks"]), recipe["pieces"]["tried"]) for recipe in RECIPES.values()]
    said = [
        [about["name"], about["version"], about["licence"], str(tasks), str(tried)] for about, tasks, tried in abouts
    ]
    total = [f"{len(RECIPES)} packages", "", "", str(sum(one[1] for one in abouts)), str(sum(one[2] for one in abouts))]
    assert [row[:5] for row in rows] == [*said, total]
    assert all(float(row[5]) > 0 for row in rows) and f"more than {SLOW:g} s" in " ".join(page.split())
