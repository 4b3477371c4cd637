"""Watch the agent: what the page shows is what was played, each token has the probability with which it was sampled,
and a docstring is a task."""

import dataclasses
import json
import logging.handlers
import random
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.explorer import PAGES, provenance
from etude.explorer.charts import vega
from etude.explorer.pages import rollouts
from etude.play import docstring, example_agent, play, tokens
from etude.play.docstring import rewritten
from etude.play.recording import TASK
from kit.settings import RunError
from recipe.microrepo import Session, WorldConfig, generate
from recipe.microrepo.language import BINARY, UNARY, draw_first, draw_step
from ref.network import load_hf, save_hf
from tests.app.test_runs import played, runs  # noqa: F401 – a fixture

FOLDER = example_agent.FOLDER
CLOSE = 1e-4
"""Between the sampler's probability and that of one pass in float32."""


@pytest.fixture(scope="module")
def agent():
    return play.agent_in(FOLDER)


@pytest.fixture
def mine(runs):  # noqa: F811
    """A finished run of the user's whose agent before RL is less sure: its logits are smaller by a tenth."""
    folder = played(runs / "mine")
    config = json.loads((folder / "config.json").read_text())
    config["config"] = {**json.loads((FOLDER / example_agent.RECORD).read_text())["config"], "seed": 7}
    (folder / "config.json").write_text(json.dumps(config))
    last, first = (folder / "checkpoints" / name for name in ("final", "sft"))
    shutil.copytree(FOLDER, last, ignore=shutil.ignore_patterns("record.json", "sft"))
    model = load_hf(FOLDER)
    with torch.no_grad():
        model.norm.weight.mul_(0.9)
    save_hf(model, first)
    shutil.copy(FOLDER / "tokenizer.json", first)
    return folder


def watched(agent, number=TASK, temperature=1.0, seed=0, drafts=False):
    return tokens.watched(agent, play.task_of(agent.recipe, number, None), temperature, seed, drafts)


def episode(agent, number, temperature=1.0, seed=0):
    return play.episode_of(agent, play.task_of(agent.recipe, number, None), temperature, seed)[0]


def html(at) -> str:
    return "".join(one.proto.body for one in at.get("html"))


# ------------------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_a_token_has_the_probability_with_which_it_was_sampled(agent, temperature):
    one = watched(agent, 3, temperature)
    logp = torch.cat([segment.logp[segment.sampled] for segment in episode(agent, 3, temperature).chain.segments])
    assert [token.probability for token in one.tokens] == pytest.approx(logp.exp().tolist(), abs=CLOSE) and len(
        one.tokens
    ) == one.view.own_tokens
    for token in one.tokens:
        chances = [chance for _, chance in token.alternatives]
        assert (
            len(chances) == tokens.NUM_ALTERNATIVES
            and chances == sorted(chances, reverse=True)
            and token.text not in [text for text, _ in token.alternatives]
        )
        assert sum(chances) + token.probability <= 1 + CLOSE


def test_the_tokens_of_a_turn_are_what_was_said(agent):
    one = watched(agent, 0, 2.0)  # hot, so that it says many things
    said = [piece.text for piece in one.view.pieces if piece.role in ("agent", "summary")]
    assert ["".join(token.text for token in turn if token.text is not None) for turn in one.turns] == said
    assert all(token.text is not None for turn in one.turns for token in turn[:-1])
    recorded = torch.cat([segment.experts[segment.sampled[1:]] for segment in episode(agent, 0, 2.0).chain.segments])
    assert [token.experts for token in one.tokens] == [tuple(map(tuple, each)) for each in recorded.tolist()]


def test_a_greedy_rollout_takes_the_likeliest_token(agent):
    one = watched(agent, 1, 0.0)
    assert all(token.probability >= token.alternatives[0][1] - CLOSE and token.probability < 1 for token in one.tokens)


@given(ids=st.lists(st.integers(3, 1023), max_size=12), words=st.text(max_size=4))
@settings(max_examples=50, deadline=None)
def test_texts_of_tokens_are_the_text(agent, ids, words):
    """Also where several tokens spell one character, or none."""
    ids = [*ids, *agent.language.encode(words)]
    texts = tokens.texts(agent.language, ids)
    assert len(texts) == len(ids) and "".join(texts) == agent.language.decode(ids)


# --------------------------------------------------------------------------------------------------- docstrings


@given(seed=st.integers(0, 10**6), steps=st.integers(0, 3), depth=st.sampled_from([0, 1, 2]))
@settings(max_examples=50, deadline=None)
def test_answer_and_tests_follow_from_the_docstring(seed, steps, depth):
    """An expression that was drawn for the target's arguments comes back from its phrase; its answer passes the tests,
    and the old one no longer where the two differ. The task's own docstring changes nothing."""
    rng = random.Random(seed)
    task = generate(rng, "heldout", depth, config=WorldConfig())
    assert rewritten(task, f"  {task.files[task.target].doc} ") == task
    args = task.files[task.target].args
    drawn = draw_first(rng, args, 0.5)
    for _ in range(steps):
        drawn = draw_step(rng, drawn, args, 0.5)
    edited = rewritten(task, drawn.phrase)
    assert edited.answer == f"return {drawn.code}" and edited.depth == 0 and edited.prompt == task.prompt
    assert (edited.key == task.key) == (drawn.phrase == task.files[task.target].doc)
    for answer in (edited.answer, task.answer):
        session = Session(edited)
        session.step(f"write {edited.target}\n    {answer}")
        assert session.body is not None
        right = [session.body.evaluate(case.inputs) for case in edited.hidden_tests] == [
            case.want for case in edited.hidden_tests
        ]
        assert bool(session.verify().tests) == right and (right or answer == task.answer)


def test_a_docstring_may_name_other_files(agent):
    task = play.task_of(agent.recipe, 0, None)
    other = next(name for name, module in task.files.items() if name != task.target and len(module.args) == 2)
    edited = rewritten(task, f"{other} then double")
    assert (edited.depth, edited.helpers, edited.answer) == (
        1,
        (other,),
        f"return {_times_two(task.files[other].expr)}",
    )
    assert set(play.task_of(agent.recipe, 0, None).files) == set(edited.files)


def _times_two(code: str) -> str:
    return f"{code} * 2" if code.endswith(")") and code.startswith(("max", "min")) else f"({code}) * 2"


@pytest.mark.parametrize(
    ("doc", "says"),
    [
        ("zebra", "not a first operation: 'zebra'; a docstring is "),
        ("", "not a first operation"),
        ("a plus b then zap", "not a step: 'zap'"),
        ("a plus m99", "operands are a, b, c, 0 to 9, m"),
        ("a plus m2", "not an atom: 'm2'"),
        ("square a" + " then square" * 8, "at most 8 operations"),
        ("m3 times m3" + " then square" * 7, "describes a function without a value: "),
    ],
)
def test_what_is_no_docstring_is_one_line(agent, doc, says):
    task = play.task_of(agent.recipe, 3, None)
    assert task.target == "m2" and "m3" in task.files
    with pytest.raises(RunError, match=".") as caught:
        rewritten(task, doc)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_an_argument_that_the_target_has_not_is_named(agent):
    task = next(
        task
        for number in range(50)
        if len((task := play.task_of(agent.recipe, number, None)).files[task.target].args) == 2
    )
    with pytest.raises(RunError, match=f"{task.target} has no argument c, which its docstring uses; it has a, b"):
        rewritten(task, "a plus c")


def test_the_grammar_names_every_operation():
    assert all(word in docstring.GRAMMAR for word in (*BINARY, *UNARY))


# ----------------------------------------------------------------------------------------------------- the page


def test_it_is_the_first_page_and_every_control_goes_to_both_ends(page, drive, runs):  # noqa: F811
    assert PAGES[0].name == "watch"
    at = page("watch")
    assert not at.query_params and not at.error
    assert drive(at) >= 12


def test_without_a_run_the_committed_agents_play_and_say_so(page, runs, agent):  # noqa: F811
    at = page("watch", task="3")
    both = [watched(one, 3) for one in (play.agent_in(FOLDER / example_agent.BEFORE), agent)]
    said = " ".join([*(caption.value for caption in at.caption), *(one.value for one in at.markdown)])
    assert "Shown: **committed example**, the small agent of the repository" in said
    assert "`make small`" in said and not at.error
    run = json.loads((FOLDER / example_agent.RECORD).read_text())["run"]
    assert f"seed {run['seed']}" in said and f"commit {run['commit']}" in said, (
        "which run it is, for the recipe's page may show another one"
    )
    assert "on 100 held-out tasks, 4 rollouts each, 59% succeed before RL and 74% after" in said
    assert "**sft, before RL**" in said and "**agent, after RL**" in said
    shown = html(at)
    for one in both:
        assert (
            "solved" if one.view.success else "not solved"
        ) in shown and f"hidden: passed {one.view.hidden.count(None)} of 32" in shown
        assert f"{one.view.own_tokens} tokens written" in shown
    assert shown.count('class="more"') == sum(one.view.own_tokens for one in both)
    assert "font-weight:700" in shown[shown.index("verdict") :] and shown.count("font-weight:700") == 2, (
        "the verdicts alone are bold"
    )
    assert at.text_input[0].label.startswith(f"Docstring of {both[0].view.prompt.split()[-1]}(")


def test_drafts_are_shown_on_demand(page, runs, whole, agent):  # noqa: F811
    at = page("watch")
    assert " kept" not in html(at).replace("a kept draft", "") and not any(
        "drafts kept" in one.value for one in at.markdown
    )
    at.toggle(key="drafted").set_value(True)
    whole(at.run())
    one = watched(agent, drafts=True)
    found, shown = one.drafts, html(at)
    assert found.tokens == one.view.own_tokens and 0 < found.accepted <= found.checked < found.tokens
    assert any(f"{found.accepted} of {found.checked} drafts kept" in said.value for said in at.markdown)
    assert all(rollouts.spanned(token) in shown for token in one.tokens) and "kept: a draft of layer 1" in shown


def test_an_agent_without_draft_layers_says_so(page, mine):
    shutil.rmtree(mine / "checkpoints" / "final" / "mtp")
    at = page("watch", drafted="true")
    said = [one.value for one in at.markdown if one.value.startswith(("**sft", "**final"))]
    assert len(said) == 2 and all("no draft layers: one pass for every token" in one for one in said) and not at.error


def test_a_run_plays_its_own_task_before_and_after_rl(page, mine):
    at = page("watch")
    assert at.selectbox(key="examples").value == "mine" and not at.error
    folders = play.find_checkpoints(mine, "sft")
    said = " ".join([*(caption.value for caption in at.caption), *(one.value for one in at.markdown)])
    assert (
        "Shown: **mine**, your run in runs/mine · seed 7" in said
        and "**sft, before RL**" in said
        and "**final, after RL**" in said
    )
    first, last = (watched(play.agent_in(folder)) for folder in folders)
    assert first.view.prompt == last.view.prompt != watched(play.agent_in(FOLDER)).view.prompt, (
        "the run's settings draw its tasks"
    )
    shown = html(at)
    assert shown.count('class="more"') == first.view.own_tokens + last.view.own_tokens
    for one in (first, last):
        assert all(rollouts.spanned(token) in shown for token in one.tokens)
    assert first.tokens[0].probability < last.tokens[0].probability


def test_turns_appear_one_after_the_other(page, runs, whole, plays, agent):  # noqa: F811
    at = page("watch")
    both = [watched(one) for one in (play.agent_in(FOLDER / example_agent.BEFORE), agent)]
    slider = next(slider for slider in at.slider if slider.key.startswith("turns"))
    assert slider.value == slider.max == max(len(one.turns) for one in both)
    slider.set_value(1)
    whole(at.run())
    assert html(at).count('class="more"') == sum(len(one.turns[0]) for one in both) and "verdict" not in html(at)
    assert plays(at, slider.key) == 1, "from where it is"
    whole(slider.set_value(slider.max).run())
    assert plays(at, slider.key) == 1 and "verdict" not in html(at), "and from the end once more from the beginning"


def test_a_summary_is_no_turn(agent):
    """So that the page counts as the verdict does."""
    one = watched(agent)
    assert f"agent, turn {one.view.reward.turns}<" in rollouts.render_rollout(one, len(one.turns))
    last = max(at for at, piece in enumerate(one.view.pieces) if piece.role == "agent")
    pieces = [
        dataclasses.replace(piece, role="summary") if at == last else piece for at, piece in enumerate(one.view.pieces)
    ]
    shown = rollouts.render_rollout(
        dataclasses.replace(one, view=dataclasses.replace(one.view, pieces=tuple(pieces))), len(one.turns)
    )
    assert '<span class="who">summary</span>' in shown and f"turn {one.view.reward.turns}<" not in shown


def test_another_docstring_is_played(page, runs, whole, agent):  # noqa: F811
    at = page("watch")
    doc = at.text_input[0]
    key, target = doc.key, doc.label.split("(")[0].removeprefix("Docstring of ")
    doc.set_value("a times b then plus 3")
    whole(at.run())
    assert "a times b then plus 3" in html(at) and not at.error and at.text_input[0].proto.query_param_key == key
    at.text_input(key=key).set_value("add a to b")
    whole(at.run())
    (line,) = [error.value for error in at.error]
    assert "a docstring is two operands around plus" in line and "\n" not in line
    at.slider(key="task").set_value(5)
    whole(at.run())
    assert not at.error and at.text_input[0].key != key, (
        f"the next task has a docstring of its own, not that of {target}"
    )


def test_a_new_task_is_another_one(page, runs, whole):  # noqa: F811
    at = page("watch")
    at.button(key="new-task").click()
    whole(at.run())
    assert at.radio(key="tasks").value == "new" and not at.error
    link = dict(at.query_params)
    assert link["tasks"] in ("new", ["new"]) and html(page("watch", **link)) == html(at)


def test_each_token_is_a_mark_in_the_chart(page, runs, agent):  # noqa: F811
    """Where its turn and its place say, at its probability; what is told of a mark is that token's. A click has no
    control to move."""
    both = [watched(one) for one in (play.agent_in(FOLDER / example_agent.BEFORE), agent)]
    drawn = rollouts.picture(both)
    marks = drawn.layers[-1].rows
    for one in both:
        mine = [row for row in marks if row["agent"] == one.name]
        assert [row["place"] for row in mine] == list(range(1, len(one.tokens) + 1))
        assert [row["probability"] for row in mine] == [token.probability for token in one.tokens]
        assert [row["token"] for row in mine] == [rollouts.named(token.text) for token in one.tokens]
    parts = [layer.rows[0]["x"] for layer in drawn.layers[:-1]]
    last = [row for row in marks if row["agent"] == both[-1].name]
    assert parts == [after["place"] - 0.5 for before, after in zip(last, last[1:]) if before["turn"] != after["turn"]]
    told = vega.table(drawn)
    assert (
        told["part"].count(len(parts)) == len(marks)
        and told["t3"][-1] == last[-1]["token"]
        and told["t5"][-1] == last[-1]["other 1"]
    )
    (chart,) = page("watch").get("vega_lite_chart")
    assert json.loads(chart.proto.spec)["height"] == drawn.height


def test_a_control_that_a_click_sets_keeps_its_default_and_nothing_is_logged(
    page,
    runs,  # noqa: F811
    whole,
    monkeypatch,
):
    said = logging.handlers.BufferingHandler(100)
    policies = logging.getLogger("streamlit.elements.lib.policies")
    monkeypatch.setattr(policies, "handlers", [said])
    monkeypatch.setattr("streamlit.elements.lib.policies._shown_default_value_warning", False)
    at = page("watch", task="7")
    assert at.slider(key="task").value == 7
    at.button(key="new-task").click()
    whole(at.run())
    assert not [line.getMessage() for line in said.buffer] and page("watch").slider(key="task").value == TASK


def test_what_an_agent_writes_stays_text(agent):
    one = watched(agent)
    evil = tokens.Token("<b>\x1b\n", 0.2, (("<script>", 0.3), (None, 0.1)), ())
    pieces = [
        dataclasses.replace(one.view.pieces[0], text="<img src=x>"),
        dataclasses.replace(one.view.pieces[1], text="<b>"),
    ]
    bad = dataclasses.replace(
        one, view=dataclasses.replace(one.view, pieces=tuple(pieces), diff=("+<i>",)), turns=((evil,),)
    )
    shown = rollouts.render_rollout(bad, 1)
    assert (
        not any(tag in shown for tag in ("<b>", "<script>", "<img", "<i>", "\x1b"))
        and "&lt;b&gt;\\x1b↵" in shown
        and "end of the turn" in shown
    )


def test_a_run_without_its_checkpoints_is_left_out(page, mine):
    shutil.rmtree(mine / "checkpoints" / "final")
    at = page("watch")
    assert at.selectbox(key="examples").options == [provenance.EXAMPLE] and not at.error
