"""Real-time RL: rewards of an edit, a question and a broken call; a dashboard of sessions, reactions and policies."""

import numpy as np
import streamlit as st

from etude.explorer import provenance
from etude.explorer.charts.chart import Axis, Look, chart, drawing, lines, rule
from etude.explorer.drawing import Drawing
from etude.explorer.page import ROOT, Page, table
from etude.explorer.spans import exact, metrics
from kit.disk import read_json
from kit.settings import RunError
from sims.real_time_rl import experiment
from sims.real_time_rl.rewards import Distilling, expected
from sims.real_time_rl.users import Served, Users

RECORD = ROOT / "results" / "figures" / "real-time-rl.json"
"""What `etude figure real-time-rl` found."""
WAY_NAMES = {
    "loop": "both cures",
    "thrown": "broken calls thrown away",
    "edits": "edits kept alone",
    "daily": "both cures, shipped daily",
    "weekly": "both cures, never shipped",
}
DASHBOARD_SERIES = {
    "right": ("did what is wanted", Look("blue", "-")),
    "kept": ("edits kept", Look("green", "--")),
    "followed": ("dissatisfied follow-ups", Look("orange", "-.")),
    "needless": ("questions on clear tasks", Look("purple", ":")),
    "broken_hard": ("broken calls on hard tasks", Look("red", "--")),
}
"""Figures of the dashboard: what they are called, and how they are drawn."""
HELD_OUT_NAMES = {
    "right": "did what is wanted",
    "edited": "edited",
    "needless": "questions on clear tasks",
    "welcome": "questions on open tasks",
    "broken_hard": "broken calls on hard tasks",
    "kept": "edits kept",
    "followed": "dissatisfied follow-ups",
    "seconds": "seconds",
}
"""Figures of held-out tasks, and what they are called: shares, and the seconds of a session."""
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Where hovering finds a figure on a straight line."""
SECONDS = 20.0
"""What the sessions of the first picture take."""
RIGHT_EDIT = Served(edited=True, quality=1.0, has_question=False, open=False, has_broken_call=False, seconds=SECONDS)
WRONG_EDIT = Served(edited=True, quality=0.0, has_question=False, open=False, has_broken_call=False, seconds=SECONDS)
NEEDLESS_QUESTION = Served(
    edited=False, quality=0.0, has_question=True, open=False, has_broken_call=False, seconds=SECONDS / 2
)
WELCOME_QUESTION = Served(
    edited=False, quality=0.0, has_question=True, open=True, has_broken_call=False, seconds=SECONDS / 2
)
BROKEN_CALL = Served(edited=True, quality=1.0, has_question=False, open=False, has_broken_call=True, seconds=SECONDS)


def worth(distil: Distilling, users: Users, batch: float) -> dict[str, tuple[float, float]]:
    """Mean reward of each way to end a session, where the policy never solves the task and where it always does. What
    is thrown away is worth the mean of its batch, of which the share `batch` is solved: its advantage is zero."""

    def compute_mean(served: Served) -> float:
        reward = expected(distil, users, served)
        return batch * compute_mean(RIGHT_EDIT) + (1 - batch) * compute_mean(WRONG_EDIT) if reward is None else reward

    flat = {
        "question, clear task": NEEDLESS_QUESTION,
        "question, open task": WELCOME_QUESTION,
        "broken call": BROKEN_CALL,
    }
    return {"edit": (compute_mean(WRONG_EDIT), compute_mean(RIGHT_EDIT))} | {
        name: (compute_mean(session), compute_mean(session)) for name, session in flat.items()
    }


def even(rewards: dict[str, tuple[float, float]], name: str) -> float:
    """The share of solved tasks, in [0, 1], below which this way is worth more than an edit."""
    (low, high), (way_reward, _) = rewards["edit"], rewards[name]
    return float(np.clip((way_reward - low) / (high - low), 0.0, 1.0)) if high > low else float(way_reward > low)


LOOKS = {
    "edit": Look("blue", "-"),
    "question, clear task": Look("purple", ":"),
    "question, open task": Look("green", "--"),
    "broken call": Look("red", "-."),
}


def build_reward_chart(rewards: dict[str, tuple[float, float]]) -> Drawing:
    """Rewards against the share of such tasks that the policy solves."""
    rows = [
        {"way": name, "solved": s, "reward": low + s * (high - low)}
        for name, (low, high) in rewards.items()
        for s in SHARES
    ]
    x_axis = Axis("share of such tasks that the policy solves")
    return drawing(x_axis, "mean reward", rule(y=0), lines(rows, "solved", "reward", "way"), looks=LOOKS)


def record() -> dict | None:
    """The experiment, the user's or the committed one; None if there is none. Raises RunError if it is damaged."""
    path = provenance.newest(RECORD)
    try:
        content = read_json(path)
        return {part: content[part] for part in ("rows", "ends")}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{path.name} is damaged ({error}); restore it, or make it again with: etude figure {path.stem}"
        ) from None


def build_dashboard(rows: list[dict]) -> Drawing:
    """The figures of a way along its loops: each training thin, the mean thick."""
    steps = sorted({row["step"] for row in rows})
    training_rows = [
        {"what": label, "training": row["training"], "loop": row["step"], "share": float(row[name])}
        for name, (label, _) in DASHBOARD_SERIES.items()
        for row in rows
    ]
    mean_rows = [
        {"what": label, "loop": step, "share": float(np.mean([row[name] for row in rows if row["step"] == step]))}
        for name, (label, _) in DASHBOARD_SERIES.items()
        for step in steps
    ]
    training_lines = lines(training_rows, "loop", "share", "what", thin=True, split="training", tell=("training",))
    return drawing(
        "loops of five hours",
        Axis("share", upper=1.02),
        training_lines,
        lines(mean_rows, "loop", "share", "what"),
        looks=dict(DASHBOARD_SERIES.values()),
    )


def draw() -> None:
    way_column, slip_column, patience_column, batch_column = st.columns(4)
    help_text = (
        "Which reactions count, and how often it is shipped: "
        + "; ".join(f"{name}: {words}" for name, words in WAY_NAMES.items())
        + "."
    )
    way = way_column.selectbox("Reward", [*experiment.WAYS], key="loop", bind="query-params", help=help_text)
    slip = slip_column.slider(
        "Mistaken users",
        0.0,
        0.5,
        0.05,
        0.01,
        key="slip",
        bind="query-params",
        help="Share of users who keep a wrong edit or undo a right one.",
    )
    patience = patience_column.slider("Patience, seconds", 10, 300, 90, 10, key="patience", bind="query-params")
    batch = batch_column.slider(
        "Solved in a batch",
        0.0,
        1.0,
        0.4,
        0.05,
        key="batch",
        bind="query-params",
        help="Share of solved tasks; a discarded session is worth the mean reward of its batch.",
    )
    (distil, ship_every), users = experiment.WAYS[way], Users(slip=slip, patience=float(patience))
    rewards = worth(distil, users, batch)
    st.subheader("Mean reward of a session")
    chart(
        build_reward_chart(rewards),
        "real-time-rewards",
        [{"way": name, "never solved": low, "always solved": high} for name, (low, high) in rewards.items()],
        "Mean reward over users of an edit, by the share of such tasks that the policy solves, and of "
        "a question or a broken call instead.",
    )
    hints = {
        "question, clear task": "Below this share of solved tasks a question has more reward than an edit, though the "
        "task is clear.",
        "question, open task": "Below this share a question has more reward than an edit if the task leaves open what "
        "is wanted.",
        "broken call": "Below this share a broken call has more reward than an edit.",
    }
    metrics(*((f"{name} pays below", exact(even(rewards, name), "{:.2f}"), hint) for name, hint in hints.items()))
    st.subheader("The loop's dashboard")
    if loop_record := record():
        st.caption(f"Shown: {provenance.recorded(provenance.newest(RECORD))}")
        draw_dashboard(way, ship_every, loop_record)
    else:
        st.info("The loop has not been run in full yet. `sims/real_time_rl/experiment.py` describes the experiment.")


def draw_dashboard(way: str, ship_every: int, loop_record: dict) -> None:
    """What a way served along its loops, and held-out tasks at the end of all ways."""
    rows = [row for row in loop_record["rows"] if row["way"] == way]
    chart(
        build_dashboard(rows),
        "real-time-dashboard",
        rows,
        f"Sessions and reactions of users in each loop: {WAY_NAMES[way]}. Thin lines: each training; thick lines: "
        "their mean. A policy is served from the loop after its shipment.",
    )
    due_rows = [row for row in rows if row["step"] % ship_every == 0]
    metrics(
        (
            "Shipped",
            f"{sum(int(row['shipped']) for row in due_rows)} of {len(due_rows)}",
            "Policies that passed the gate, of those tested.",
        ),
        (
            "Age of the data",
            f"{np.mean([row['age'] for row in rows]):.1f} steps",
            "Mean number of RL steps since the policy that served a session.",
        ),
        (
            "Thrown away",
            exact(float(np.mean([row["thrown"] for row in rows])), "{:.1%}"),
            "Share of sessions that are not trained on.",
        ),
        ("Latency", f"{np.mean([row['seconds'] for row in rows]):.1f} s", "Mean duration of a session."),
    )
    st.subheader("Held-out tasks at the end")
    ends = loop_record["ends"]
    groups = {
        (end["way"], end["at"]): [
            candidate for candidate in ends if (candidate["way"], candidate["at"]) == (end["way"], end["at"])
        ]
        for end in ends
    }
    table(
        [
            {"way": WAY_NAMES[name], "policy": policy}
            | {label: float(np.mean([end[column] for end in group])) for column, label in HELD_OUT_NAMES.items()}
            for (name, policy), group in groups.items()
        ],
        "real-time-ends",
    )


PAGE = Page(
    name="real-time-rl",
    title="Real-time RL",
    says="A policy is served to users, who keep its edits, undo them or complain. Their reactions are the reward of "
    "the next loop of five hours. Here the users are a model, and the loop runs in the small world.",
    formula=r"\begin{gathered}P(\text{kept}) = s + (1 - 2s)\,q^n \\"
    r"P(\text{follow-up}) = 1 - (1 - c)\,\exp(-t/\tau)\end{gathered}",
    symbols={
        "P": "probability that an edit is kept, or that a dissatisfied follow-up is sent",
        "s": "probability that a user is mistaken",
        "q": "share of the hidden tests that the edit passes",
        "n": "inputs that a user tries",
        "c": "probability of a follow-up to this outcome without any waiting",
        "t": "seconds that the session took",
        r"\tau": "patience in seconds",
    },
    question="Users keep good edits, undo bad ones and answer questions. Under which reward does a policy learn "
    "to avoid the work?",
    look="Under “edits kept alone”: a question has no penalty there, so its reward is higher than that of an edit "
    "wherever less than half of such tasks is solved, and the policy learns to ask. If sessions with broken calls are "
    "only discarded, broken calls pay off on hard tasks.",
    draw=draw,
    code=(Users, Distilling),
    technique="monitor",  # lesson 18 has the loop, too
)
