"""The page of textual feedback: every control, and what it shows against a network that is asked by hand."""

import json
import math
import shutil
from functools import cache

import pyarrow
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.explorer import examples, provenance
from etude.explorer.charts import vega
from etude.explorer.page import COLOURS
from etude.explorer.pages import hint_tokens, hinting
from etude.explorer.pages.hinting import (
    ANSWER,
    FAULT_HINT,
    HINT_SOURCES,
    KINDS,
    MESSAGE,
    OTHER_HINT,
    OWN,
    case_of,
    encoded,
    given_away,
    read,
    words_of,
)
from etude.explorer.pages.textual_feedback import PAGE
from etude.explorer.pages.watch import stamps
from etude.play import example_agent, play
from recipe.small.hints import RULES
from ref.network import load_hf, save_hf
from tests.app.test_runs import played, runs  # noqa: F401 – a fixture

FOLDER = example_agent.FOLDER
FOUND = examples.load("hints")
NUMBERS = range(len(FOUND["rollouts"]))


@pytest.fixture(scope="module")
def agent():
    return play.agent_in(FOLDER)


@pytest.fixture(scope="module")
def cases(agent):
    return [case_of(agent, stamps(FOLDER)[1], FOUND, number) for number in NUMBERS]


@pytest.fixture(scope="module")
def network(agent):
    """Logits [T, V] of the committed agent in float32, as nobody else has loaded it."""
    model = load_hf(FOLDER).to(getattr(torch, agent.recipe.training.dtype)).float()

    @cache
    def logits(*ids):
        with torch.inference_mode():
            return model(torch.tensor(ids)[None]).logits[0].double()

    return logits


@pytest.fixture
def short(tmp_path, monkeypatch, runs):  # noqa: F811
    """Two of the committed faults, where no run lies."""
    folder = tmp_path / "short"
    folder.mkdir()
    rollouts = [next(one for one in FOUND["rollouts"] if one["rule"] == rule) for rule in ("unread", "needless")]
    (folder / "hints.json").write_text(json.dumps(FOUND | {"rollouts": rollouts}))
    monkeypatch.setattr(examples, "FOLDER", folder)
    return folder


@pytest.fixture
def mine(runs):  # noqa: F811
    """A finished run of the user's, whose agent is less sure than the committed one: its logits are smaller by a
    tenth."""
    folder = played(runs / "mine")
    config = json.loads((folder / "config.json").read_text())
    config["config"] = json.loads((FOLDER / example_agent.RECORD).read_text())["config"]
    (folder / "config.json").write_text(json.dumps(config))
    model = load_hf(FOLDER)
    with torch.no_grad():
        model.norm.weight.mul_(0.9)
    save_hf(model, folder / "checkpoints" / "final")
    shutil.copy(FOLDER / "tokenizer.json", folder / "checkpoints" / "final")
    (folder / provenance.PLACE).mkdir()
    shutil.copy(examples.FOLDER / "hints.json", folder / provenance.PLACE)
    return folder


def metrics(at):
    return {one.label: one.value for one in at.metric}


def charted(at, column) -> list[list]:
    """What this column of each chart's table says."""
    tables = [
        pyarrow.ipc.open_stream(one.proto.data.data or one.proto.datasets[0].data.data).read_all()
        for one in at.get("vega_lite_chart")
    ]
    return [table.column(column).to_pylist() for table in tables]


def html(at) -> str:
    return "".join(one.proto.body for one in at.get("html"))


# ----------------------------------------------------------------------------------------------------- the example


def test_the_committed_example_is_small_and_has_every_rule():
    text = (examples.FOLDER / "hints.json").read_text(encoding="utf-8")
    assert len(text) < 100_000 and text == json.dumps(json.loads(text), indent=1, ensure_ascii=False) + "\n"
    assert {one["rule"] for one in FOUND["rollouts"]} == {rule.name for rule in RULES}


def test_the_student_is_the_policy_that_wrote_the_message(cases):
    for case in cases:
        logp = math.fsum(math.log(word.outcome.student) for word in read(case, case.says).words)
        assert logp == pytest.approx(case.logp, abs=1e-3)


def test_hints_give_nothing_away_and_the_traps_do(cases):
    for case in cases:
        assert not given_away(case, case.says)
        found = given_away(case, words_of(case, ANSWER, ""))
        known = case.answer in case.agent.language.decode(case.tokens[: case.begin])
        assert ("the task's answer" in found) != known, "unless the agent has written it before"
        if case.text:
            assert "the message itself" in given_away(case, words_of(case, MESSAGE, ""))


# --------------------------------------------------------------------------------------- both readings, by hand


def by_hand(network, case, words, shift=True):
    """Distributions of the message's tokens on both sides: lists joined by hand, and one pass over each prefix's
    sequence."""
    ids, hint = [*case.tokens], [*encoded(case, words)]
    teacher = ids[: case.begin - 1] + hint + ids[case.begin - 1 : case.end]
    places = range(case.begin - 1, case.end - 1)  # each token is predicted by the one before it
    asked, told = (network(*some) / case.temperature for some in (ids, teacher))
    moved = [place + len(hint) * shift for place in places]
    return asked[[*places]].softmax(-1), told[moved].softmax(-1)


@pytest.mark.parametrize("told", HINT_SOURCES[:4])
def test_both_sides_are_what_the_network_says(cases, network, told):
    for case in cases[::4]:
        words = words_of(case, told, "")
        for shift in (True, False):
            s, t = by_hand(network, case, words, shift)
            found, m = read(case, words, shift), (s + t) / 2
            own = torch.tensor(case.tokens[case.begin : case.end])[:, None]
            assert [word.outcome.student for word in found.words] == pytest.approx(
                s.gather(-1, own)[:, 0].tolist(), abs=1e-4
            )
            assert [word.outcome.teacher for word in found.words] == pytest.approx(
                t.gather(-1, own)[:, 0].tolist(), abs=1e-4
            )
            kl = {
                "reverse": s * (s / t).log(),
                "forward": t * (t / s).log(),
                "js": (s * (s / m).log() + t * (t / m).log()) / 2,
            }
            for kind in KINDS:
                assert [word.divergences[kind] for word in found.words] == pytest.approx(
                    kl[kind].sum(-1).tolist(), rel=1e-3, abs=1e-4
                )
            assert found.likelier == pytest.approx((t / s).gather(-1, own).log().sum().item(), rel=1e-3, abs=1e-3)
            for word, asked, told_ in zip(
                found.words, s.max(-1).values.tolist(), t.max(-1).values.tolist(), strict=True
            ):
                outcomes = [word.outcome, *word.alternatives]
                assert max(one.student for one in outcomes) == pytest.approx(asked, abs=1e-4)
                assert max(one.teacher for one in outcomes) == pytest.approx(told_, abs=1e-4)
                chances = [max(one.student, one.teacher) for one in word.alternatives]
                assert chances == sorted(chances, reverse=True) and sum(one.student for one in outcomes) < 1 + 1e-4


def test_the_tokens_of_a_message_are_its_text(cases):
    for case in cases:
        texts = [word.outcome.text for word in read(case, case.says).words]
        assert "".join(text for text in texts if text is not None) == case.text and None not in texts[:-1]


@given(number=st.sampled_from(NUMBERS), words=st.text(max_size=40))
@settings(max_examples=15, deadline=None)
def test_whatever_the_hint_says_the_message_moves_by_its_tokens(cases, number, words):
    """No words change nothing, and no divergence is below zero or, where it is Jensen and Shannon's, above log 2."""
    case = cases[number]
    found = read(case, words)
    length = len(encoded(case, words))
    assert (found.alignment.teacher - found.alignment.student).tolist() == [length] * (case.end - case.begin)
    assert found.alignment.tokens[found.alignment.teacher].tolist() == [*case.tokens[case.begin : case.end]]
    for word in found.words:
        assert (
            all(value >= -1e-6 for value in word.divergences.values()) and word.divergences["js"] <= math.log(2) + 1e-6
        )
    nothing = read(case, "")
    assert nothing.likelier == 0 and all(
        value == pytest.approx(0, abs=1e-6) for word in nothing.words for value in word.divergences.values()
    )


def test_what_to_look_for_is_so(cases):
    """Three tokens carry most of it in every message; another hint and the answer change what is learnt."""
    assert "few tokens have most" in PAGE.look
    for case in cases:
        apart = sorted((word.divergences["reverse"] for word in read(case, case.says).words), reverse=True)
        assert sum(apart[:3]) > 0.5 * sum(apart)
        for told in (OTHER_HINT, ANSWER):
            assert abs(read(case, words_of(case, told, "")).likelier - read(case, case.says).likelier) > 0.01


# ------------------------------------------------------------------------------------------------------- the page


def test_every_control_goes_to_both_ends(page, drive, short):
    at = page("textual-feedback")
    before = dict(at.query_params)
    assert drive(at) >= 15 and not at.error and dict(at.query_params) == before


def test_it_shows_what_was_read(page, whole, table, cases, short):
    case = next(case for case in cases if case.rule == "unread")
    at = page("textual-feedback", divergence="forward")
    assert at.selectbox(key="fault").value == f"1, unread: {case.says.removeprefix('error: ')}"
    for told in (FAULT_HINT, OTHER_HINT, ANSWER):
        at.radio(key="told").set_value(told)
        whole(at.run())
        words = words_of(case, told, "")
        found = read(case, words)
        apart = [word.divergences["forward"] for word in found.words]
        assert metrics(at)["Divergence of the message"] == f"{math.fsum(apart):.3f} nats"
        assert metrics(at)["Likelihood under the hint"] == f"{math.exp(found.likelier):.3g}×"
        assert metrics(at)["Positions that shift"] == str(len(encoded(case, words)))
        shown = table(at, "forward")
        assert shown["forward"].tolist() == sorted(apart, reverse=True) and "reverse" not in shown.columns
        first = found.words[shown["place"].iloc[0] - 1]
        assert hint_tokens.readings(found, "forward") in html(at)
        assert vega.table(hint_tokens.distributions(first))["t1"] in charted(at, "t1")
        assert bool([one for one in at.warning if "leaks" in one.value]) == (told == ANSWER)
    assert "Shown: **committed example**, a run from another machine" in " ".join(one.value for one in at.caption)


def test_the_hint_stands_before_its_message_and_only_there(cases):
    for case in cases:
        shown = hint_tokens.context(case, "HERE")
        assert shown.count("said fault") == shown.count("said hint") == shown.count("HERE") == 1
        hint, fault = shown.index("said hint"), shown.index("said fault")
        assert hint < fault and 'class="said"' not in shown[hint:fault]
        assert "said hint" not in hint_tokens.context(case, "")


def test_words_of_the_readers_stay_text(page, whole, short, cases):
    at = page("textual-feedback", told=OWN)
    at.text_input(key="words").set_value("<script>`|env|>")
    whole(at.run())
    assert "<script>" not in html(at) and "&lt;script&gt;" in html(at) and not at.error
    at.text_input(key="words").set_value("")
    whole(at.run())
    assert metrics(at)["Divergence of the message"] == "0.000 nats" and metrics(at)["Likelihood under the hint"] == "1×"
    assert page("textual-feedback", told=OWN, words="read m5").text_input(key="words").value == "read m5"


def test_forgetting_the_shift_is_said(page, short, cases):
    case = next(case for case in cases if case.rule == "unread")
    at = page("textual-feedback", unshifted="true")
    wrong = math.fsum(word.divergences["reverse"] for word in read(case, case.says, False).words)
    assert metrics(at)["Divergence of the message"] == f"{wrong:.3f} nats" and "is meaningless" in at.warning[0].value
    assert wrong > 10 * math.fsum(word.divergences["reverse"] for word in read(case, case.says).words)


def test_a_control_draws_what_it_changes_and_nothing_else(page, redrawn, short):
    at = page("textual-feedback")
    assert redrawn(at, at.radio(key="told"), MESSAGE) == 4
    assert redrawn(at, at.radio(key="divergence"), "js") == 1
    slider = next(one for one in at.slider if one.key.startswith("rank"))
    assert redrawn(at, slider, slider.max) == 1 and redrawn(at, at.radio(key="told"), MESSAGE) == 0


def test_charts_say_what_was_read(cases):
    """Each token at its probabilities and its divergence; each alternative with both of its bars; as rows the same."""
    case = cases[0]
    found = read(case, case.says)
    rows, many = hint_tokens.rows(found), len(found.words)
    above, below = hint_tokens.probabilities(found), hint_tokens.draw_divergences(found, "js")
    marks = above.layers[-1].rows
    assert [(row["place"], row["probability"]) for row in marks if row["side"] == "student"] == [
        (row["place"], row["student"]) for row in rows
    ]
    assert [row["probability"] for row in marks if row["side"] != "student"] == [
        row["teacher"] for row in rows
    ] and len(marks) == 2 * many
    assert [(row["low"], row["js"]) for row in below.layers[0].rows] == [(0.0, row["js"]) for row in rows]
    assert [*(above.x.ticks or ())] == [*(below.x.ticks or ())] == [*range(1, many + 1)]
    word = found.words[0]
    drawn = hint_tokens.distributions(word)
    bars = {(row["token"], row["side"]): row["right"] - row["left"] for row in drawn.layers[0].rows}
    for outcome, row in zip((word.outcome, *word.alternatives), hint_tokens.make_outcome_rows(word), strict=True):
        assert [bars[row["token"], side] for side in hint_tokens.LOOKS] == [outcome.student, outcome.teacher]
    assert (
        len(bars) == 2 * len(drawn.y.ticks or ())
        and [row["token"].endswith("(written)") for row in hint_tokens.make_outcome_rows(word)].count(True) == 1
    )


def test_positions_are_those_of_ref(cases):
    """The hint moves the message by its length; on both sides the last token before the message predicts its first
    one."""
    for case in cases[:4]:
        drawn = hint_tokens.positions(case, case.says)
        hint, boxes = encoded(case, case.says), [row for row in drawn.layers[0].rows if row["whose"] != "before it"]
        begins = {
            who: min(row["position"] for row in boxes if row["who"] == who and row["whose"] == "message")
            for who in ("student", "teacher")
        }
        assert begins == {"student": case.begin, "teacher": case.begin + len(hint)}
        assert sum(row["whose"] == "hint" for row in boxes) == len(hint) and {
            row["who"] for row in boxes if row["whose"] == "hint"
        } == {"teacher"}
        where = read(case, case.says).alignment
        first = {"student": int(where.student[0]), "teacher": int(where.teacher[0])}
        lines = [layer.rows for layer in drawn.layers if layer.kind == "line" and layer.tell == ("predicts",)]
        arcs = {rows[0]["who"]: (rows[0]["x"], rows[-1]["x"]) for rows in lines}
        assert begins == first and arcs == {who: (place - 1, place) for who, place in first.items()}
    assert not [layer for layer in hint_tokens.positions(case, "").layers if layer.tell == ("trap",)], (
        "without a hint there is no trap"
    )


def test_a_runs_own_agent_reads_its_own_faults(page, mine, cases):
    at = page("textual-feedback", fault="12, needless: m6 not needed")
    assert "Shown: **mine**, your run in runs/mine" in " ".join(one.value for one in at.caption) and not at.error
    agent = play.agent_in(mine / "checkpoints" / "final")
    theirs, ours = (
        next(case for case in cases if case.says == "error: m6 not needed"),
        case_of(agent, stamps(agent.folder)[1], FOUND, 11),
    )
    assert metrics(at)["Likelihood under the hint"] == f"{math.exp(read(ours, ours.says).likelier):.3g}×"
    assert read(ours, ours.says).likelier != read(theirs, theirs.says).likelier


@pytest.mark.parametrize("how", ["without examples", "without faults", "of another agent"])
def test_a_run_with_nothing_to_show_is_one_line(page, mine, how):
    path = mine / provenance.PLACE / "hints.json"
    if how == "without examples":
        path.unlink()
    else:
        entry = FOUND["rollouts"][0] | {"text": "read m1"}
        path.write_text(json.dumps(FOUND | {"rollouts": [entry] if how == "of another agent" else []}))
    at = page("textual-feedback")
    if how == "without examples":
        assert not at.error and any("etude examples --run runs/mine" in one.value for one in at.info)
        return
    (line,) = [one.value for one in at.error]
    wanted = {
        "without faults": f"broke no rule in {FOUND['played']}",
        "of another agent": "again with: etude examples --run runs/mine",
    }
    assert wanted[how] in line and "\n" not in line


@pytest.mark.parametrize("content", [None, b"", b"{}", b"[" * 10**5])
def test_a_broken_example_names_the_command_that_makes_it(page, short, content):
    path = short / "hints.json"
    path.unlink() if content is None else path.write_bytes(content)
    (line,) = [one.value for one in page("textual-feedback").error]
    assert (
        "hints.json cannot be read" in line
        and line.endswith("again with: python -m etude.play.example_hints")
        and "\n" not in line
    )


@pytest.mark.parametrize(
    "damage",
    [{"tokens": [10**6] * 200}, {"begin": 0}, {"own": [[5, 900]]}, {"own": [[3]]}, {"end": 10**6}, {"text": "x"}],
)
def test_a_rollout_that_the_agent_cannot_have_written_is_refused(agent, damage):
    found = FOUND | {"rollouts": [FOUND["rollouts"][0] | damage]}
    with pytest.raises(ValueError, match="rollout 1 is not one of"):
        case_of(agent, (), found, 0)


def test_colours_of_both_sides_are_apart():
    assert len({COLOURS[name] for name in (hint_tokens.STUDENT, hint_tokens.TEACHER, hint_tokens.DIVERGENCE)}) == 3
    assert hinting.KINDS[0] == "reverse", "the default of ref"
