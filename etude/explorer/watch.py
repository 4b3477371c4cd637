"""Watch the agent: it repairs a function while you look, beside itself before RL, token by token; then with a docstring of yours."""

import secrets
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from etude import drafted, tokens
from etude.docstring import rewritten
from etude.drafted import Tally
from etude.example_agent import BEFORE, FOLDER, RECORD
from etude.explorer import provenance, rollouts
from etude.explorer.charts import chart
from etude.explorer.files import stamp
from etude.explorer.page import Page, link, table
from etude.explorer.playing import play
from etude.play import Agent, agent_in, found, task_of
from etude.recording import TASK
from etude.tokens import Watched
from kit.disk import read_json
from kit.settings import RunError
from ref.engine.sampler import sample
from sims.microrepo import Task

NUMBERS = 200
"""Held-out tasks, new tasks and samples to choose from."""
TASKS = ("held-out", "new")


def agents() -> dict[str, list[Path]]:
    """Checkpoints by run, the one before RL first: the user's runs, newest first, then the committed agent."""
    there = {}
    for run in provenance.finished():
        try:
            there[run.name] = found(run.folder, BEFORE if (run.folder / "checkpoints" / BEFORE / "config.json").is_file() else None)
        except RunError:
            pass  # its checkpoints are gone
    return there | {provenance.EXAMPLE: []}


def chosen() -> list[Agent]:
    """Draws a box with the runs and a line that names the chosen one. Raises RunError where the committed agents are missing."""
    there = agents()
    left, right = st.columns([1, 3], vertical_alignment="bottom")
    with left:
        name = provenance.choice(list(there), "examples")
    folders = there[name] or found(None, BEFORE)
    with right:
        if there[name]:
            facts = next(run.facts for run in provenance.finished() if run.name == name)
            words = f"Shown: **{provenance.plain(name)}**, your run in {provenance.plain(str(folders[-1].parents[1]))}"
            st.caption(" · ".join([words, *map(provenance.plain, facts)]))
        else:
            st.caption(f"Shown: **{name}**, the small agent of the clone, from another machine · {about()}. `make small` makes a run of yours.")
    return [known(*stamps(folder)) for folder in folders]


@lru_cache(1)
def about() -> str:
    """Of which run the committed agents are, which need not be the run of the recipe's page, and how often they succeed, in words. Raises RunError
    where their record is missing."""
    try:
        record = read_json(FOLDER / RECORD)
        facts = provenance.facts({"config": record["config"], "machine": record["run"]["machine"]})
        found = record["held_out"]
        before, after = (found[name]["success"]["value"] for name in (BEFORE, "agent"))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RunError(f"{FOLDER / RECORD} holds no record of the committed agents ({error}); check it out again") from None
    played = f"on {found['tasks']} held-out tasks, {found['samples']} rollouts each, {before:.0%} succeed before RL and {after:.0%} after"
    return " · ".join([*map(provenance.plain, facts), played])


def stamps(folder: Path) -> tuple[Path, tuple]:
    """A key that changes whenever a checkpoint is written."""
    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors"))
    return folder, tuple(map(stamp, files))


@lru_cache(8)
def known(folder: Path, files: tuple) -> Agent:
    return agent_in(folder)


@lru_cache(64)
def watched(folder: Path, files: tuple, task: Task, temperature: float, seed: int, drafts: bool) -> Watched:
    """A rollout with its tokens."""
    return tokens.watched(known(folder, files), task, temperature, seed, drafts)


def another() -> None:
    """Another new task."""
    st.session_state["tasks"], st.session_state["task"] = TASKS[1], secrets.randbelow(NUMBERS)


def asked(agent: Agent, above: DeltaGenerator) -> tuple[Task, float, int]:
    """Draws the controls, of which the docstring and the next task stand above. The task, temperature and seed that they say. Raises RunError for a
    docstring that is none."""
    own = agent.recipe.rl.temperature
    first, second, third = st.columns(3)
    with first:
        kind = st.radio("Task", TASKS, key="tasks", bind="query-params", horizontal=True)
    with second:
        number = st.slider("Number", 0, NUMBERS - 1, TASK, key="task", bind="query-params", help="Of the held-out task, or the seed of a new one.")
    with third:
        heat = st.slider("Temperature", 0.0, max(2.0, own), own, 0.05, key="heat", bind="query-params", help="0 is greedy.")
        seed = st.slider("Seed of sampling", 0, NUMBERS - 1, 0, key="draw", bind="query-params")
    task = task_of(agent.recipe, number, number if kind == TASKS[1] else None)
    module = task.files[task.target]
    # Each task has a box of its own, so that none is given the words of another one.
    key = f"doc-{blake2b(task.key.encode(), digest_size=4).hexdigest()}"
    with above:
        left, right = st.columns([4, 1], vertical_alignment="bottom")
        label = f"Docstring of {task.target}({', '.join(module.args)})"
        doc = left.text_input(label, module.doc, key=key, bind="query-params", help="Change it and press Enter.")
        right.button("New task", key="new-task", on_click=another, icon=":material/casino:")
    return (task if doc == module.doc else rewritten(task, doc)), heat, seed


def draw() -> None:
    above, drawn = st.container(), st.container()  # what the agent does comes first, and below it what it can be asked
    some = chosen()
    task, heat, seed = asked(some[-1], above)
    helpers = {0: "no helper", 1: "1 helper"}.get(task.depth, f"{task.depth} helpers")
    drafts = st.toggle(
        "Drafts",
        key="drafted",
        bind="query-params",
        help="Which of its tokens would have been drafts of its own small layers, checked several at a time (speculative decoding).",
    )
    with above, st.spinner("The agent plays …"):
        beside = [watched(*stamps(agent.folder), task, heat, seed, drafts) for agent in some]
    st.html(rollouts.STYLE)

    def until(message: int) -> None:
        st.html(rollouts.legend(drafts))
        for one, column in zip(beside, st.columns(len(beside)), strict=True):
            with column:
                st.markdown(f"**{heading(one, len(beside))}** · {helpers} to read" + (f" · {rate(one.drafts)}" if drafts else ""))
                st.html(rollouts.shown(one, message))

    most = max(len(one.turns) for one in beside)
    with above:
        play("Shown up to message", f"turns-{most}", range(1, most + 1), most, until)
    how = f"at temperature {heat:g}" if heat else "at temperature 1, though the rollout is greedy"
    words = f"Probability of each token {how}, in the order in which they were written; dotted lines part the turns of {beside[-1].name}."
    with drawn:
        chart(rollouts.picture(beside), "watch-tokens", rollouts.rows(beside), words)
    experts(beside[-1])
    link("start", "How it was trained: the recipe, stage by stage", ":material/account_tree:")


def rate(found: Tally) -> str:
    """What drafts would have done for a rollout, in words."""
    if not found.checked:
        return "no draft layers: every token took a pass of its own"
    share, each = found.kept / found.checked, found.tokens / found.passes
    return f"{found.kept} of {found.checked} drafts kept ({share:.0%}): {found.tokens} tokens in {found.passes} passes, {each:.1f} a pass"


def heading(one: Watched, of: int) -> str:
    """The name of a checkpoint, with when it was."""
    when = "" if of == 1 else ", before RL" if one.name == BEFORE else ", after RL"
    return provenance.plain(one.name) + when


def experts(one: Watched) -> None:
    """The experts of one token, on demand."""
    with st.expander("Experts of a token"):
        if not any(token.experts for token in one.tokens):
            st.markdown("There are none: the network is dense.")
            return
        most = len(one.tokens)
        token = one.tokens[st.slider("Token", 1, most, 1, key=f"token-{most}", bind="query-params") - 1 if most > 1 else 0]
        st.markdown(f"`{rollouts.named(token.text)}`, {rollouts.chance(token.probability)}: the experts to which the position before it was routed.")
        table([{"layer": layer, "experts": ", ".join(map(str, some))} for layer, some in enumerate(token.experts)], "watch-experts")


PAGE = Page(
    name="watch",
    title="Watch the agent",
    says="A small coding agent repairs a function that has lost its body: it reads files, writes the body, tests it, and is done. It plays "
    "here, now. Change the docstring, and it has to write something else.",
    formula=r"p(t) = \operatorname{softmax}(\text{logits} / \tau)_t",
    question="Of which tokens is the agent sure, and of which is it not? Guess before you point at one.",
    look="It is sure of almost every token. Where it is not, the alternatives under the pointer are other bodies. Hidden tests decide.",
    draw=draw,
    code=(sample, tokens.turns, drafted.of_turn, rewritten),
    technique="recipe",
    opens=True,
)
