"""Pages that show the agent at work, and lessons: every control to both ends, and what is shown is what `ref` and
`sims` say."""

import base64
import json
import shutil

import pytest
import torch
from streamlit.testing.v1 import AppTest

from etude.explorer import examples
from etude.explorer.pages import lesson, mtp, replay, summary
from kit.disk import seal_record
from lessons import syllabus
from ref import dr_grpo, self_summary
from sims.mtp import drafting

PIXEL = base64.b64encode(
    bytes.fromhex(
        "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de"
        "0000000c4944415408d763f8cfc000000301010018dd8db00000000049454e44ae426082"
    )
).decode()


LESSONS = """
import streamlit as st
from etude.explorer.pages import lesson
from etude.explorer.page import PLACES, show
PLACES.clear()
PLACES["lesson"] = st.Page(lesson.draw, title="Lesson", url_path="lesson", default=True)
PLACES["course"] = st.Page(lambda: show(lesson.PAGE), title="The course", url_path="course")
st.navigation([*PLACES.values()]).run()
"""


def lessons(n: str) -> AppTest:
    """The page of lessons, as its link would open it."""
    at = AppTest.from_string(LESSONS, default_timeout=120)
    at.query_params["n"] = n
    return at.run()


def metric(at: AppTest, label: str) -> str:
    return next(one.value for one in at.metric if one.label == label)


@pytest.mark.parametrize("name", ["summary", "replay", "mtp"])
def test_every_control_goes_to_both_ends(page, drive, name):
    at = page(name)
    before = dict(at.query_params)
    assert drive(at) > 8 and not at.error
    assert dict(at.query_params) == before, "every control is back where it began, and the URL with it"


@pytest.mark.parametrize(
    ("name", "kind", "key", "most"),
    [
        ("summary", "slider", "piece-1", 1),
        ("replay", "slider", "first-1", 1),
        ("replay", "select_slider", "plausibility", 2),
        ("mtp", "slider", "drafts", 2),
    ],
)
def test_a_control_draws_what_it_changes_and_nothing_else(page, redrawn, tmp_path, monkeypatch, name, kind, key, most):
    """The files are another copy: no picture can have been kept from another test."""
    shutil.copytree(examples.FOLDER, tmp_path / "examples")
    monkeypatch.setattr(examples, "FOLDER", tmp_path / "examples")
    at = page(name)
    control = getattr(at, kind)(key=key)
    values = (
        examples.load("routing")["alphas"] if kind == "select_slider" else range(int(control.min), int(control.max) + 1)
    )
    for value in [value for value in values if value != control.value][:3]:
        assert 1 <= redrawn(at, getattr(at, kind)(key=key), value) <= most


def test_a_chain_is_credited_undivided(page, table):
    at = page("summary")
    chain = examples.load("chain")["chains"][0]
    rewards = torch.tensor([[one["reward"] for one in chain["group"]]], dtype=torch.float64)
    advantages = dr_grpo.group_advantages(rewards)[0]
    assert metric(at, "Credit") == f"{advantages[chain['place']]:+.3f}"
    rows = table(at, "credit of each token")
    for row, advantage in zip(rows.to_dict("records"), advantages.tolist(), strict=True):
        each = row["credit of each token"].split(", ")
        assert each == [f"{advantage:+.3f}"] * row["contexts"], "every context has its chain's advantage, undivided"
    assert any(row["contexts"] > 1 for row in rows.to_dict("records"))


def test_a_chain_counts_as_ref_counts_it(page, whole, plays):
    at = page("summary")
    chain = examples.load("chain")["chains"][0]
    everything = summary.chain_of([summary.count_tokens(pieces) for pieces in chain["contexts"]], chain["saved"])
    assert isinstance(everything, self_summary.Chain)
    assert [int(metric(at, label)) for label in ("Prefill", "Written", "Saved")] == [
        everything.prefill,
        everything.num_sampled_tokens,
        chain["saved"],
    ]
    counts = chain["group"][chain["place"]]["contexts"]
    assert (everything.prefill, everything.num_sampled_tokens, everything.summary_tokens) == tuple(
        map(sum, zip(*counts, strict=True))
    )
    at.slider(key="piece-1").set_value(1)
    whole(at.run())
    assert metric(at, "Written") == "0" and metric(at, "Context") == f"1 of {len(counts)}"
    assert int(metric(at, "Prefill")) == len(chain["contexts"][0][0]["tokens"])
    assert plays(at, "piece-1") == 1


def test_a_link_opens_the_view_it_was_copied_from(page):
    at = page("replay", layer="2", plausibility="0.9", only="false")
    assert (
        at.slider(key="layer").value == 2
        and at.select_slider(key="plausibility").value == 0.9
        and at.toggle(key="only").value is False
    )
    at = page("replay", layer="99", plausibility="2")
    assert at.slider(key="layer").value == 4 and at.select_slider(key="plausibility").value == 0.5


@pytest.mark.parametrize(("alpha", "same"), [(0.0, "sampler"), (1.0, "trainer's own")])
def test_the_ends_of_alpha(page, table, alpha, same):
    """α = 0 is plain replay, α = 1 the router's own choice."""
    alphas = examples.load("routing")["alphas"]
    for rollout in range(len(examples.load("routing")["rollouts"])):
        for layer in range(4):
            for row in replay.token_rows(rollout, layer, alphas.index(alpha), alphas):
                assert row["replayed"] == row[same]
    at = page("replay", plausibility=f"{alpha}", only="false")
    rows = table(at, "replayed")
    assert (rows["replayed"] == rows[same]).all() and len(rows) == len(replay.stored(0)["sampler"])
    assert metric(at, "Sampler's experts dropped" if alpha == 0 else "Used, but not the trainer's own") == "exactly 0"


def test_a_field_tells_the_routers_probability_and_whose_choice_it_is():
    """Probabilities of a token add up to one; each way chooses as many experts as the table says; every choice has its
    mark, and no other field."""
    alphas, layer, first = examples.load("routing")["alphas"], 1, replay.beginning(0)
    at = alphas.index(0.9)
    rows = replay.token_rows(0, layer, at, alphas)
    fields = replay.fields(0, layer, at, first, rows)
    shown = rows[first : first + replay.WINDOW]
    assert [field["position"] for field in fields] == [
        row["position"] for row in shown for _ in range(len(fields) // len(shown))
    ]
    for row in shown:
        mine = [field for field in fields if field["position"] == row["position"]]
        assert sum(field["probability"] for field in mine) == pytest.approx(1.0, abs=1e-5)
        for way in replay.CHOICES:
            assert " ".join(str(field["expert"]) for field in mine if field[way]) == row[way]
    drawn = replay.picture(fields, layer, 0.9)
    assert drawn.layers[0].rows == fields and sum(len(marks.rows) for marks in drawn.layers[1:]) == sum(
        f[way] for f in fields for way in replay.CHOICES
    )
    assert list(drawn.looks) == ["sampler", "trainer's own", "replayed, α = 0.9"]


def test_mismatch_of_own_experts_is_that_of_alpha_one():
    rows = {row["experts"]: row for row in replay.quantiles()}
    assert rows["own"]["p99"] == pytest.approx(rows["α = 1"]["p99"], rel=1e-3)
    assert rows["α = 0"]["mean log μ − log π"] != rows["own"]["mean log μ − log π"]


def test_the_committed_measurement_is_predicted_as_it_was():
    for drafts, row in mtp.load_measurements().items():
        assert drafting.predicted(row["alpha"], drafts, row["draft_cost"]) == pytest.approx(row["predicted"])
        shown = mtp.speeds(row["alpha"], row["draft_cost"], row["verify_cost"], row["opening_cost"])[drafts - 1]
        assert shown["predicted"] == pytest.approx(row["predicted"]) and shown["measured"] == row["speedup"]


def test_speed_follows_the_sliders(page):
    at = page("mtp", drafts="2", alpha="0.5", cost="0.25")
    assert metric(at, "Predicted") == f"{drafting.predicted(0.5, 2, 0.25):.2f}×"
    assert metric(at, "Tokens per pass, at best") == f"{drafting.predicted(0.5, 2, 0.0):.2f}"
    for k, row in enumerate(mtp.depths(1.0, 4), 1):
        assert row["depth"] == k and row["from α"] == 1.0


def test_drafted_is_accepted_and_rejected(page, table, whole, plays):
    at = page("mtp")
    found = examples.load("drafting")
    passes = at.slider(key="pass")
    for place in (1, passes.max // 2, passes.max):
        at.slider(key="pass").set_value(place)
        whole(at.run())
        drafted, accepted, rejected = (int(metric(at, label)) for label in ("Drafted", "Accepted", "Rejected"))
        assert drafted == accepted + rejected
        rows = table(at, "rejected")
        assert len(rows) == place and rows["drafted"].sum() == drafted and rows["accepted"].sum() == accepted
    assert rejected > 0 and passes.max == sum(step["kind"] != "given" for step in found["steps"])
    assert plays(at, "pass") == 1 and len(table(at, "rejected")) == 1, "from the end once more from the beginning"


@pytest.mark.parametrize(("name", "missing"), [("summary", "chain"), ("replay", "routing"), ("mtp", "drafting")])
def test_a_missing_example_is_one_line(page, name, missing, tmp_path, monkeypatch):
    page(name)  # what is kept of the files is no answer
    monkeypatch.setattr(examples, "FOLDER", tmp_path)
    at = page(name)
    assert not at.exception and [one.value for one in at.error if missing in one.value and "\n" not in one.value]


def test_a_lesson_is_shown_from_its_notebook_or_its_script():
    one = syllabus.lessons()[0]
    at = lessons(f"{one.number:02d}")
    assert any(one.title in text.value for text in at.markdown)
    assert at.code and not at.warning
    assert "Solution" in [box.label for box in at.expander]


def test_a_lessons_equations_stand_apart():
    """Dollars that open or close a displayed equation have a line of their own, or Streamlit shows its source in red
    where it has several."""
    many = 0
    for one in syllabus.lessons():
        for cell in lesson.of_script(one.path.read_text(encoding="utf-8")):
            if cell.kind == "markdown":
                lines = lesson.drawable(cell.text).splitlines()
                assert all(line == "$$" for line in lines if "$$" in line), (one.number, cell.text)
                many += lines.count("$$")
    assert many >= 2 * 12 and many % 2 == 0


def test_what_was_measured_elsewhere_stands_between_the_sliders_ends(page, tmp_path, monkeypatch):
    """Another machine may verify drafts at the cost of one row, or open a turn at that of ten; and measure more
    drafts."""
    found = json.loads(mtp.RECORD_PATH.read_text(encoding="utf-8"))
    for row in found["rows"]:
        if row["part"] == "decode" and row["way"] == "3":
            row |= {"way": "9", "verify_cost": 0.97, "opening_cost": 10, "draft_cost": 1.5}
    (tmp_path / "mtp.json").write_text(json.dumps(seal_record(found)))
    monkeypatch.setattr(mtp, "RECORD_PATH", tmp_path / "mtp.json")
    at = page("mtp")
    assert [at.slider(key=key).value for key in ("drafts", "cost", "verify", "opening")] == [
        8,
        1.0,
        1.0,
        4.0,
    ] and not at.error


@pytest.mark.parametrize("wanted", ["", "99", "x", "../../etc", "1" * 5000, "٣"], ids=lambda wanted: wanted[:9])
def test_without_a_lesson_there_is_the_list(wanted):
    at = lessons(wanted)
    assert not at.exception and all(len(said.value) < 80 for said in at.warning)
    assert at.title[0].value == "The course" and len(at.caption) == len(syllabus.lessons())
    assert bool(at.warning) == bool(wanted)


def test_outputs_of_a_notebook(tmp_path, monkeypatch):
    script = syllabus.lessons()[0].path
    cells = [
        {
            "cell_type": "markdown",
            "source": ["# 5 · A title\n", "$x^2$, [`file`](../ref/kl.py), [other](../x.md), [web](https://arxiv.org)"],
        },
        {
            "cell_type": "code",
            "source": "print(1)",
            "metadata": {},
            "outputs": [
                {"output_type": "stream", "name": "stdout", "text": ["\x1b[31mone\x1b[0m\n"]},
                {"output_type": "display_data", "data": {"image/png": PIXEL, "text/plain": "<Figure>"}},
                {"output_type": "execute_result", "data": {"text/plain": ["'shown'"]}},
                {"output_type": "error", "ename": "ValueError", "evalue": "wrong", "traceback": []},
            ],
        },
        {"cell_type": "code", "source": "install", "metadata": {"tags": ["colab"]}, "outputs": []},
        {"cell_type": "code", "source": "answer = 42", "metadata": {"tags": ["solution"]}, "outputs": []},
    ]
    path = tmp_path / "made.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    monkeypatch.setattr(syllabus, "notebook", lambda script: path)
    at = lessons(script.name[:2])
    assert not at.exception and [one.value for one in at.error] == ["ValueError: wrong"]
    assert [one.value for one in at.code] == ["print(1)", "one", "'shown'", "answer = 42"]
    assert "`file`, `other`, [web](https://arxiv.org)" in at.markdown[0].value and len(at.get("image")) == 1
    path.write_text("{")
    lesson.of_notebook.cache_clear()
    assert [one.value for one in at.run().error][0].startswith(
        "notebook made.ipynb cannot be read"
    ) and not at.exception


def test_a_percent_script_in_cells():
    text = (
        '# %% [markdown]\n# # Title\n#\n# text\n\n# %%\nx = 1\n\n# %% tags=["solution"] '
        'jupyter={"source_hidden": true}\ny = 2\n'
    )
    cells = lesson.of_script(text)
    assert [(c.kind, c.text, c.tags) for c in cells] == [
        ("markdown", "# Title\n\ntext", []),
        ("code", "x = 1", []),
        ("code", "y = 2", ["solution"]),
    ]
