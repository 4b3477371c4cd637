"""What users make of an edit, a question and a broken call, and the loop's dashboard: what was served, what users did, and what was shipped."""

import json
from functools import lru_cache

import numpy as np
import streamlit as st

from etude.explorer import provenance
from etude.explorer.page import COLOURS, ROOT, Page, axes, figure, png, table
from etude.explorer.spans import metrics
from kit.settings import RunError
from sims.real_time_rl import figure as experiment
from sims.real_time_rl.rewards import Distilling, expected
from sims.real_time_rl.users import Served, Users

RECORD = ROOT / "results" / "figures" / "real-time-rl.json"
"""What `etude figure real-time-rl` found."""
SAYS = {
    "loop": "both cures",
    "thrown": "broken calls thrown away",
    "edits": "edits kept alone",
    "daily": "both cures, shipped daily",
    "weekly": "both cures, never shipped",
}
SHOWN = {
    "right": ("did what is wanted", "blue", "-"),
    "kept": ("edits kept", "green", "--"),
    "followed": ("dissatisfied follow-ups", "orange", "-."),
    "needless": ("questions on clear tasks", "purple", ":"),
    "broken_hard": ("broken calls on hard tasks", "red", (0, (5, 1, 1, 1))),
}
"""Figures of the dashboard: what they are called, their colour, and their dashes."""
SECONDS = 20.0
"""What the sessions of the first picture take."""
RIGHT = Served(edited=True, quality=1.0, asked=False, open=False, broken=False, seconds=SECONDS)
WRONG = Served(edited=True, quality=0.0, asked=False, open=False, broken=False, seconds=SECONDS)
NEEDLESS = Served(edited=False, quality=0.0, asked=True, open=False, broken=False, seconds=SECONDS / 2)
WELCOME = Served(edited=False, quality=0.0, asked=True, open=True, broken=False, seconds=SECONDS / 2)
BROKEN = Served(edited=True, quality=1.0, asked=False, open=False, broken=True, seconds=SECONDS)


def worth(distil: Distilling, users: Users, batch: float) -> dict[str, tuple[float, float]]:
    """Mean reward of each way to end a session, where the policy never solves the task and where it always does. What is thrown away is worth the
    mean of its batch, of which the share `batch` is solved: its advantage is zero."""

    def mean(served: Served) -> float:
        found = expected(distil, users, served)
        return batch * mean(RIGHT) + (1 - batch) * mean(WRONG) if found is None else found

    flat = {"question, clear task": NEEDLESS, "question, open task": WELCOME, "broken call": BROKEN}
    return {"edit": (mean(WRONG), mean(RIGHT))} | {name: (mean(one), mean(one)) for name, one in flat.items()}


def even(found: dict[str, tuple[float, float]], name: str) -> float:
    """The share of solved tasks, in [0, 1], below which this way is worth more than an edit."""
    (low, high), (other, _) = found["edit"], found[name]
    return float(np.clip((other - low) / (high - low), 0.0, 1.0)) if high > low else float(other > low)


LOOKS = {"edit": ("blue", "-"), "question, clear task": ("purple", ":"), "question, open task": ("green", "--"), "broken call": ("red", "-.")}


@lru_cache(32)
def picture(distil: Distilling, users: Users, batch: float) -> bytes:
    """Rewards against the share of such tasks that the policy solves."""
    fig, ax = axes("share of such tasks that the policy solves", "mean reward", height=3.4)
    for name, ends in worth(distil, users, batch).items():
        colour, dashes = LOOKS[name]
        ax.plot((0, 1), ends, dashes, color=COLOURS[colour], linewidth=2, label=name)
    ax.axhline(0, color=COLOURS["grey"], linewidth=0.6)
    ax.legend(frameon=False, fontsize=9)
    return png(fig)


def record() -> dict | None:
    """The committed experiment; None if there is none. Raises RunError if it is damaged."""
    try:
        found = json.loads(RECORD.read_text(encoding="utf-8"))
        return {part: found[part] for part in ("rows", "ends")}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"results/figures/{RECORD.name} is damaged ({error}); restore it") from None


@lru_cache(32)
def dashboard(way: str, changed: float) -> bytes:
    """The figures of a way along its loops: each training thin, the mean thick. `changed`: when the record was written, for the cache."""
    rows = [row for row in (record() or {"rows": []})["rows"] if row["way"] == way]
    fig, ax = axes("loops of five hours", "share", height=3.8)
    for name, (label, colour, dashes) in SHOWN.items():
        for training in {row["training"] for row in rows}:
            some = [row for row in rows if row["training"] == training]
            ax.plot([row["step"] for row in some], [row[name] for row in some], color=COLOURS[colour], linewidth=0.5, alpha=0.4)
        steps = sorted({row["step"] for row in rows})
        means = [np.mean([row[name] for row in rows if row["step"] == step]) for step in steps]
        ax.plot(steps, means, color=COLOURS[colour], linestyle=dashes, linewidth=2, label=label)
    ax.set(ylim=(-0.02, 1.02), xticks=range(0, max(row["step"] for row in rows) + 1, 2))
    ax.legend(frameon=False, fontsize=9, ncols=2)
    return png(fig)


def draw() -> None:
    one, two, three, four = st.columns(4)
    said = "Which reactions count, and how often it is shipped: " + "; ".join(f"{name}: {words}" for name, words in SAYS.items()) + "."
    way = one.selectbox("Reward", [*experiment.WAYS], key="loop", bind="query-params", help=said)
    slip = two.slider("Mistaken users", 0.0, 0.5, 0.05, 0.01, key="slip", bind="query-params", help="They keep what is wrong, or undo what is right.")
    patience = three.slider("Patience, seconds", 10, 300, 90, 10, key="patience", bind="query-params")
    batch = four.slider("Solved in a batch", 0.0, 1.0, 0.4, 0.05, key="batch", bind="query-params", help="What is thrown away is worth its mean.")
    (distil, every), users = experiment.WAYS[way], Users(slip=slip, patience=float(patience))
    found = worth(distil, users, batch)
    st.subheader("What a session is worth")
    figure(
        picture(distil, users, batch),
        "real-time-rewards",
        [{"way": name, "never solved": low, "always solved": high} for name, (low, high) in found.items()],
        "Mean reward over users of an edit, by the share of such tasks that the policy solves, and of a question or a broken call instead.",
    )
    hints = {
        "question, clear task": "A question pays below this share of solved tasks, though the task says everything.",
        "question, open task": "A question pays below this share where the task leaves open what is wanted.",
        "broken call": "A broken call pays below this share.",
    }
    metrics(*((f"{name} pays below", f"{even(found, name):.2f}", hint) for name, hint in hints.items()))
    st.subheader("The loop's dashboard")
    if played := record():
        st.caption(f"Shown: {provenance.committed(RECORD)}")
        board(way, every, played)
    else:
        st.info("The loop has not been played in full yet, so there is nothing to show here. `sims/real_time_rl/figure.py` says what it will be.")


def board(way: str, every: int, played: dict) -> None:
    """What a way served along its loops, and held-out tasks at the end of all ways."""
    rows = [row for row in played["rows"] if row["way"] == way]
    figure(
        dashboard(way, RECORD.stat().st_mtime),
        "real-time-dashboard",
        rows,
        f"What was served in each loop, and what users did: {SAYS[way]}. Each training is thin, their mean thick. A policy is served from the loop"
        " on that follows its shipment.",
    )
    due = [row for row in rows if row["step"] % every == 0]
    metrics(
        ("Shipped", f"{sum(int(row['shipped']) for row in due)} of {len(due)}", "Policies that passed the gate, of those that came to it."),
        ("Age of the data", f"{np.mean([row['age'] for row in rows]):.1f} steps", "Steps of RL since the policy that served them, in the mean."),
        ("Thrown away", f"{np.mean([row['thrown'] for row in rows]):.0%}", "Sessions of which nothing is learnt."),
        ("Latency", f"{np.mean([row['seconds'] for row in rows]):.1f} s", "What a session takes, in the mean."),
    )
    st.subheader("Held-out tasks at the end")
    names = ("right", "edited", "needless", "welcome", "broken_hard", "kept", "followed", "seconds")
    ends = played["ends"]
    groups = {(end["way"], end["at"]): [other for other in ends if (other["way"], other["at"]) == (end["way"], end["at"])] for end in ends}
    table(
        [
            {"way": SAYS[name], "policy": at} | {column: float(np.mean([end[column] for end in some])) for column in names}
            for (name, at), some in groups.items()
        ],
        "real-time-ends",
    )


PAGE = Page(
    name="real-time-rl",
    title="Real-time RL",
    says="A policy is served, users keep its edits, undo them or complain, and what they do becomes the reward of the next five hours. The users "
    "are a model, and the loop plays in the small world.",
    formula=r"P(\text{kept}) = s + (1 - 2s)\,q^n, \qquad P(\text{follow-up}) = 1 - (1 - c)\,e^{-t/\tau}",
    question="Users keep good edits, undo bad ones and answer questions. Under which reward does a policy learn to avoid the work?",
    look="Where an edit falls below a question, or below a broken call: there the policy learns to avoid the work. Choose the reward that makes "
    "it so, and see in the dashboard what became of it.",
    draw=draw,
    code=(Users, Distilling),
)
