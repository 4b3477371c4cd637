"""Watch the agent: rollouts before and after RL, token by token, on tasks and docstrings that the reader chooses."""

import secrets
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from etude.explorer import provenance
from etude.explorer.charts.chart import chart
from etude.explorer.files import stamp
from etude.explorer.page import Page, link, table
from etude.explorer.pages import rollouts
from etude.explorer.playing import play
from etude.play import draft_acceptance, tokens
from etude.play.docstring import rewritten
from etude.play.draft_acceptance import Tally
from etude.play.example_agent import BEFORE, FOLDER, RECORD
from etude.play.play import Agent, agent_in, find_checkpoints, task_of
from etude.play.recording import TASK
from etude.play.tokens import Watched
from kit.disk import read_json
from kit.settings import RunError
from recipe.microrepo import Task
from ref.engine.sampler import sample

NUMBERS = 200
"""Held-out tasks, new tasks and samples to choose from."""
TASKS = ("held-out", "new")


def list_checkpoints() -> dict[str, list[Path]]:
    """Checkpoints by run, the one before RL first: the user's runs, newest first, then the committed agent."""
    folders_by_run = {}
    for run in provenance.finished():
        try:
            folders_by_run[run.name] = find_checkpoints(
                run.folder, BEFORE if (run.folder / "checkpoints" / BEFORE / "config.json").is_file() else None
            )
        except RunError:
            pass  # its checkpoints are gone
    return folders_by_run | {provenance.EXAMPLE: []}


def choose_agents() -> list[Agent]:
    """Draws a box with the runs and a line that names the chosen one. Raises RunError where the committed agents are
    missing."""
    folders_by_run = list_checkpoints()
    left, right = st.columns([1, 3], vertical_alignment="bottom")
    with left:
        name = provenance.choice(list(folders_by_run), "examples")
    folders = folders_by_run[name] or find_checkpoints(None, BEFORE)
    with right:
        if folders_by_run[name]:
            facts = next(run.facts for run in provenance.finished() if run.name == name)
            caption = (
                f"Shown: **{provenance.plain(name)}**, your run in {provenance.plain(str(folders[-1].parents[1]))}"
            )
            st.caption(" · ".join([caption, *map(provenance.plain, facts)]))
        else:
            st.caption(
                f"Shown: **{name}**, the small agent of the repository, from another machine · {describe_agents()}. "
                "`make small` trains your own."
            )
    return [load_agent(*stamps(folder)) for folder in folders]


@lru_cache(1)
def describe_agents() -> str:
    """Of which run the committed agents are, which need not be the run of the recipe's page, and how often they
    succeed, in words. Raises RunError where their record is missing."""
    try:
        record = read_json(FOLDER / RECORD)
        facts = provenance.facts({"config": record["config"], "machine": record["run"]["machine"]})
        held_out = record["held_out"]
        before, after = (held_out[name]["success"]["value"] for name in (BEFORE, "agent"))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RunError(
            f"{FOLDER / RECORD} holds no record of the committed agents ({error}); check it out again"
        ) from None
    success_text = (
        f"on {held_out['tasks']} held-out tasks, {held_out['samples']} rollouts each, {before:.0%} "
        f"succeed before RL and {after:.0%} after"
    )
    return " · ".join([*map(provenance.plain, facts), success_text])


def stamps(folder: Path) -> tuple[Path, tuple]:
    """A key that changes whenever a checkpoint is written."""
    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors"))
    return folder, tuple(map(stamp, files))


@lru_cache(8)
def load_agent(folder: Path, files: tuple) -> Agent:
    return agent_in(folder)


@lru_cache(64)
def watch_rollout(folder: Path, files: tuple, task: Task, temperature: float, seed: int, drafts: bool) -> Watched:
    """A rollout with its tokens."""
    return tokens.watched(load_agent(folder, files), task, temperature, seed, drafts)


def choose_new_task() -> None:
    """Another new task."""
    st.session_state["tasks"], st.session_state["task"] = TASKS[1], secrets.randbelow(NUMBERS)


def draw_controls(agent: Agent, top_container: DeltaGenerator) -> tuple[Task, float, int]:
    """Draws the controls, of which the docstring and the next task stand above. The task, temperature and seed that
    they say. Raises RunError for a docstring that is none."""
    recipe_temperature = agent.recipe.rl.temperature
    task_column, number_column, sampling_column = st.columns(3)
    with task_column:
        kind = st.radio("Task", TASKS, key="tasks", bind="query-params", horizontal=True)
    with number_column:
        number = st.slider(
            "Number",
            0,
            NUMBERS - 1,
            TASK,
            key="task",
            bind="query-params",
            help="Of the held-out task, or the seed of a new one.",
        )
    with sampling_column:
        temperature = st.slider(
            "Temperature",
            0.0,
            max(2.0, recipe_temperature),
            recipe_temperature,
            0.05,
            key="heat",
            bind="query-params",
            help="0 is greedy.",
        )
        seed = st.slider("Seed of sampling", 0, NUMBERS - 1, 0, key="draw", bind="query-params")
    task = task_of(agent.recipe, number, number if kind == TASKS[1] else None)
    module = task.files[task.target]
    # Each task has a box of its own, so that none is given the words of another one.
    key = f"doc-{blake2b(task.key.encode(), digest_size=4).hexdigest()}"
    with top_container:
        left, right = st.columns([4, 1], vertical_alignment="bottom")
        label = f"Docstring of {task.target}({', '.join(module.args)})"
        doc = left.text_input(label, module.doc, key=key, bind="query-params", help="Change it and press Enter.")
        right.button("New task", key="new-task", on_click=choose_new_task, icon=":material/casino:")
    return (task if doc == module.doc else rewritten(task, doc)), temperature, seed


def draw() -> None:
    # what the agent does comes first, and below it what it can be asked
    top_container, chart_container = st.container(), st.container()
    agents = choose_agents()
    task, temperature, seed = draw_controls(agents[-1], top_container)
    helpers = {0: "no helper", 1: "1 helper"}.get(task.depth, f"{task.depth} helpers")
    drafts = st.toggle(
        "Drafts",
        key="drafted",
        bind="query-params",
        help="Marks the tokens that its own draft layers would have drafted, to be checked several at a time "
        "(speculative decoding).",
    )
    with top_container, st.spinner("Sampling the rollouts …"):
        watched_rollouts = [watch_rollout(*stamps(agent.folder), task, temperature, seed, drafts) for agent in agents]
    st.html(rollouts.STYLE)

    def draw_until(message: int) -> None:
        st.html(rollouts.legend(drafts))
        for rollout, column in zip(watched_rollouts, st.columns(len(watched_rollouts)), strict=True):
            with column:
                st.markdown(
                    f"**{format_heading(rollout, len(watched_rollouts))}** · {helpers} to read"
                    + (f" · {describe_drafts(rollout.drafts)}" if drafts else "")
                )
                st.html(rollouts.render_rollout(rollout, message))

    message_count = max(len(rollout.turns) for rollout in watched_rollouts)
    with top_container:
        play("Shown up to message", f"turns-{message_count}", range(1, message_count + 1), message_count, draw_until)
    temperature_text = (
        f"at temperature {temperature:g}" if temperature else "at temperature 1, though the rollout is greedy"
    )
    caption = (
        f"Probability of each token {temperature_text}, in the order of sampling; dotted lines separate the "
        f"turns of {watched_rollouts[-1].name}."
    )
    with chart_container:
        chart(rollouts.picture(watched_rollouts), "watch-tokens", rollouts.rows(watched_rollouts), caption)
    draw_experts(watched_rollouts[-1])
    link("start", "How it was trained: overview of the stages", ":material/account_tree:")


def describe_drafts(tally: Tally) -> str:
    """What drafts would have done for a rollout, in words."""
    if not tally.checked:
        return "no draft layers: one pass for every token"
    share, tokens_per_pass = tally.accepted / tally.checked, tally.tokens / tally.passes
    return (
        f"{tally.accepted} of {tally.checked} drafts kept ({share:.0%}): {tally.tokens} tokens in "
        f"{tally.passes} passes, {tokens_per_pass:.1f} a pass"
    )


def format_heading(rollout: Watched, rollout_count: int) -> str:
    """The name of a checkpoint, with when it was."""
    stage_text = "" if rollout_count == 1 else ", before RL" if rollout.name == BEFORE else ", after RL"
    return provenance.plain(rollout.name) + stage_text


def draw_experts(rollout: Watched) -> None:
    """The experts of one token, on demand."""
    with st.expander("Experts of a token"):
        if not any(token.experts for token in rollout.tokens):
            st.markdown("The network is dense and has no experts.")
            return
        token_count = len(rollout.tokens)
        token = rollout.tokens[
            st.slider("Token", 1, token_count, 1, key=f"token-{token_count}", bind="query-params") - 1
            if token_count > 1
            else 0
        ]
        st.markdown(
            f"`{rollouts.named(token.text)}`, {rollouts.chance(token.probability)}: the experts to "
            f"which the position before it was routed."
        )
        table(
            [
                {"layer": layer, "experts": ", ".join(map(str, layer_experts))}
                for layer, layer_experts in enumerate(token.experts)
            ],
            "watch-experts",
        )


PAGE = Page(
    name="watch",
    title="Watch the agent",
    says="A small coding agent writes the missing body of a function: it reads files, writes code, runs tests and "
    "stops. Change the docstring to ask for another body.",
    formula=r"p(t) = \mathrm{softmax}(z / \tau)_t",
    symbols={
        "p(t)": "probability that the next token is t",
        r"\mathrm{softmax}": "exp of each entry over the sum of all",
        "z": "logits of the network",
        r"\tau": "temperature; 0 is greedy decoding",
    },
    question="Which tokens does the agent sample with a high probability, and which with a low one? Guess before you "
    "hover over one.",
    look="Almost every token has a high probability. Where it is low, the alternatives shown by hovering are other "
    "bodies. The hidden tests decide which of them is right.",
    draw=draw,
    code=(sample, tokens.turns, draft_acceptance.of_turn, rewritten),
    technique="recipe",
    opens=True,
)
