"""The front door, the course, files to read, and questions before answers: everything is there once, and every link
leads somewhere."""

import re
from collections import Counter
from urllib.parse import parse_qs

import pytest

from etude import catalog
from etude.explorer import HEADINGS, PAGES, examples, section
from etude.explorer.page import ROOT
from etude.explorer.pages import front
from etude.glossary import TERMS
from etude.stages import PARTS, files, stage_of
from lessons import syllabus

STAGES = [stage for part in PARTS for stage in part.stages]
NAMES = {page.name for page in PAGES}


@pytest.fixture(scope="module")
def lessons():
    return syllabus.lessons()


def astray(at, lessons) -> list[str]:
    """Links on a page to what is no page, no lesson and no file."""
    numbers, found = {f"{one.number:02d}" for one in lessons}, []
    for link in at.get("page_link"):
        asked = parse_qs(link.proto.query_string)
        known = {"lesson": asked.get("n", [""])[0] in numbers, "file": asked.get("file", [""])[0] in files()}
        if not known.get(link.proto.page, link.proto.page in NAMES and not asked):
            found.append(link.proto.label)
    return found


def test_every_technique_is_in_the_diagram_once():
    times = Counter(stage.name for stage in STAGES)
    assert {technique.name for technique in catalog.TECHNIQUES} <= times.keys() and set(times.values()) == {1}
    assert not [stage.name for stage in STAGES if stage.own and catalog.find(stage.name)], (
        "its paths are in the catalogue already"
    )


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_a_stage_says_what_it_does_and_leads_to_what_exists(stage):
    row = stage.paths
    assert re.fullmatch(r"[A-Z].*\.", stage.says) and stage.title
    assert (ROOT / row.lesson).is_file() and (row.page is None or row.page in NAMES)
    found = [path for path in (row.ref, row.scaled, row.kernel, row.sim) if path]
    assert found and all((ROOT / path).is_file() and path in files() for path in found)


def test_a_stage_without_paths_is_refused():
    with pytest.raises(ValueError, match="stage nothing"):
        _ = front.Stage("nothing", "Nothing", "It is not there.").paths
    assert stage_of("nothing") is None and stage_of(None) is None


def test_the_front_door_leads_to_every_stage_page_lesson_and_file(page, lessons):
    at = page("start")
    assert not at.error and not astray(at, lessons)
    boxes = re.findall(r'href="#([^"]+)"', front.diagram())
    assert boxes == [stage.name for stage in STAGES] == [card.anchor for card in at.subheader]
    shown = [parse_qs(link.proto.query_string).get("file", [""])[0] for link in at.get("page_link")]
    assert set(shown) - {""} == set(files())
    assert any(one.value.startswith("repo ") and " fix " in one.value for one in at.code), "a real task"


def test_without_its_example_the_front_door_still_opens(page, tmp_path, monkeypatch):
    monkeypatch.setattr(examples, "FOLDER", tmp_path)
    for content in (None, "{", '{"rollouts": []}'):
        if content is not None:
            (tmp_path / "rollouts.json").write_text(content)
        at = page("start")
        assert len(at.error) == 1 and "\n" not in at.error[0].value and len(at.subheader) == len(STAGES)


def test_every_page_stands_in_one_section(page):
    assert set(HEADINGS) == {section(one) for one in PAGES} and len(set(HEADINGS)) == len(HEADINGS)
    at = page("claims")
    registered = [known["url_pathname"] for known in at._registered_pages.values()]
    assert Counter(registered) == Counter([*NAMES, "lesson", "file", ""])


@pytest.mark.parametrize("one", [one for one in PAGES if one.code], ids=lambda one: one.name)
def test_a_page_asks_before_it_answers(one):
    assert "?" in one.question and re.match(r"[A-Z“]", one.question)
    assert re.fullmatch(r"[A-Z“].*\.", one.look) and one.look not in one.question


def test_the_answer_is_folded_until_somebody_asks(page):
    at = page("claims")
    (answer,) = [box for box in at.expander if box.label == "Show the answer"]
    (told,) = (one for one in PAGES if one.name == "claims")
    assert not answer.proto.expanded and [one.value for one in answer.markdown] == [told.look]
    assert told.question in at.info[0].value and told.look not in at.info[0].value


def test_the_course_has_every_lesson_with_its_page(page, lessons):
    at = page("course")
    assert not astray(at, lessons) and len(at.caption) == len(lessons) + 1
    links = [link.proto for link in at.get("page_link")]
    assert [link.query_string for link in links if link.page == "lesson"] == [f"n={one.number:02d}" for one in lessons]
    assert {link.page for link in links} == {"lesson"} | {row.page for row in catalog.TECHNIQUES if row.page}
    for one, told in zip(lessons, at.caption, strict=False):
        assert f"{one.minutes} minutes" in told.value and one.before in told.value


def test_a_file_is_read_beside_its_twin(page, go):
    at = go(page("course"), "file", file="ref/dr_grpo.py")
    assert (
        at.title[0].value == "ref/dr_grpo.py"
        and at.code[0].value == (ROOT / "ref/dr_grpo.py").read_text(encoding="utf-8").strip()
    )
    assert [parse_qs(link.proto.query_string)["file"] for link in at.get("page_link")[1:]] == [
        ["scaled/dr_grpo.py"],
        ["sims/grpo_bias/experiment.py"],
    ]


@pytest.mark.parametrize(
    "wanted",
    ["", "pyproject.toml", "../../etc/passwd", "ref/../pyproject.toml", "x" * 5000],
    ids=lambda wanted: wanted[:9],
)
def test_only_files_of_the_recipe_are_read(page, go, wanted):
    at = go(page("course"), "file", file=wanted)
    assert at.title[0].value == "Files" and not at.code and len(at.get("page_link")) == len(files())
    assert bool(at.warning) == bool(wanted) and all(len(said.value) < 100 for said in at.warning)


def test_the_glossary_shows_all_terms_or_those_that_say_a_word(page, lessons):
    at = page("glossary")
    assert [term.value for term in at.subheader] == [term.word for term in TERMS] and not astray(at, lessons)
    at = page("glossary", term="ADVANTAGE")
    assert {"advantage", "group"} & {term.value for term in at.subheader} and len(at.subheader) < len(TERMS)
    links = {word for text in at.markdown for word in re.findall(r"\(#([^)]+)\)", text.value)}
    assert links <= {term.anchor for term in at.subheader}, "no link to a term that is not shown"
    assert page("glossary", term="xyzzy").info[0].value == "No term matches."


def test_a_page_explains_its_own_words(page):
    assert next(text for text in page("kl").markdown if text.proto.help).proto.help.startswith("**KL**: ")
    assert not [text for text in page("claims").markdown if text.proto.help]
