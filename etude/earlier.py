"""Records from before claims carried their own rules: what they measured, with today's rules and wording.

Nothing is measured here. A claim of such a record keeps its number, interval and note. Its rule, wording and source come from this table,
and the verdict follows from the rule. Two claims use other columns of the same record, because they did not compare what the source
compares. Newer records carry their own rules and are not looked up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from sims.experiment import above, at_least, at_most, below, claim, untested

__all__ = ["claims_of"]

KERNELS = "§6.1, Kernels"
MARGINS = (
    "both penalties cost the same on average, but the next token costs less under the nonlinear one, on easy tasks too, so "
    "that it is simply the weaker price: to be played with margins matched"
)
SUPERVISED = "the source saw it in RL, and these are eighty supervised steps"


@dataclass(frozen=True)
class Row:
    """Today's version of a claim."""

    rule: dict
    says: str = ""
    """New wording, if it changed."""
    source: str = ""
    """New source, if it changed."""
    why: str = ""
    """Why the record does not test it."""
    needs: dict[str, bool] = field(default_factory=dict)
    """Further conditions of the rule, as in the claim's note."""
    again: Callable[[dict, dict], dict] | None = None
    """Function of (record, claim) that takes number, interval, unit or note from other columns of the record."""


def _widest(kind: str) -> Callable[[dict, dict], dict]:
    def found(record: dict, one: dict) -> dict:
        far = max(abs(row["mean_z"]) for row in record["rows"] if row["part"] == "gaussian" and row["kind"] == kind)
        return {"measured": far, "unit": "σ", "note": f"{one['measured']:.4g} nats: {one['note']}"}

    return found


def _crossing(record: dict, one: dict) -> dict:
    from ref import kl  # import torch late: it is slow

    exact, half = kl.crossing(), (one["interval"][1] - one["interval"][0]) / 2
    note = f"distance of the mean of {len(record['crossings'])} searches, {one['measured']:.4f} nats, from {exact:.4f}"
    return {"measured": abs(one["measured"] - exact) / (half / 1.96), "interval": None, "unit": "σ", "note": note}


def _together(record: dict, one: dict) -> dict:
    """With the price, compared with before RL. The record has an interval for each but not for the difference. Subtracting their opposite
    ends gives a wider interval than a paired difference would."""
    at = {row["setting"]: row for row in record["rows"] if row["part"] == "behaviour" and row["depth"] == 2}
    after, before = at["nonlinear"], at["SFT"]
    return {
        "measured": after["read_together"] - before["read_together"],
        "interval": (after["read_together_low"] - before["read_together_high"], after["read_together_high"] - before["read_together_low"]),
        "note": f"depth 2, of rollouts that read both helpers those that read them in one turn, after RL with a price on turns − before: "
        f"{before['read_together']:.3f} → {after['read_together']:.3f}, without a price on turns {at['turns free']['read_together']:.3f}; "
        "both 95% intervals, subtracted end from end",
    }


def _foretold(outcome: str) -> Callable[[dict, dict], dict]:
    """The slope over budgets for each seed, with Student's interval over seeds. The record has one slope through all training runs."""

    def found(record: dict, one: dict) -> dict:
        from sims.statistics import student
        from sims.trends import line

        trainings = [row for row in record["rows"] if row["part"] == "training"]
        some = [[row for row in trainings if row["seed"] == seed] for seed in sorted({row["seed"] for row in trainings})]
        each = [line(*(np.array([row[key] for row in rows]) for key in ("sft_loss", outcome)))[0] for rows in some]
        over = student(each)
        note = (
            f"slope over the budgets of a seed, {len(trainings)} trainings: {', '.join(f'{v:.3g}' for v in each)}; 95% Student's t over "
            f"seeds; through all trainings at once {one['measured']:.3g}; {one['note'][one['note'].rindex(outcome.split('_')[0]) :]}"
        )
        return {"measured": over["value"], "interval": (over["low"], over["high"]), "note": note}

    return found


def _last(record: dict, one: dict) -> dict:
    """The combined note of two claims that said the same thing twice."""
    widens = next(other["note"] for other in record["claims"] if other["name"] == "widens")
    return {"note": f"{one['note']}. {widens[widens.index('The gap') :]}"}


def _leak(how: str) -> Callable[[dict, dict], dict]:
    def found(record: dict, one: dict) -> dict:
        row = next(r for r in record["rows"] if r["part"] == "leak" and (r["form"], r["how"]) == ("nvfp4-token, float64", how))
        return {"needs": {"with scales per token none moves, in float64": row["share"] == 0}}

    return found


EXACT, ANOTHER, SIGMA = at_most(1e-9), at_least(0.05), at_most(4.0)
ROWS: dict[str, Row | None] = {
    **{f"kl-variance/{name}": Row(SIGMA) for name in ("k1-unbiased", "k3-unbiased", "variances")},
    "kl-variance/k2-biased": Row(SIGMA, again=_widest("k2")),
    "kl-variance/k3-wins-near": Row(at_most(1.0)),
    "kl-variance/k3-loses-far": Row(at_least(2.0)),
    "kl-variance/crossing": Row(SIGMA, again=_crossing),
    "kl-variance/real-tokens": Row(above(1.0)),
    **{f"kl-variance/{name}": Row(EXACT) for name in ("k1-loss", "k2-loss", "k3-loss", "k1-reward", "k3-ratio", "off-policy-weight", "sequence-k1")},
    **{f"kl-variance/{name}": Row(ANOTHER) for name in ("k3-reward", "off-policy", "sequence-k2")},
    **{f"grpo-bias/{name}": Row(EXACT) for name in ("mean-factor", "rloo-exact", "mean-against-others")},
    "grpo-bias/std-blow-up": Row(at_least(0.5), needs={"undivided less than 0.1": True}),
    "grpo-bias/length-gradient": Row(above(0.05), "divided by the rollout's length, the gradient points elsewhere than the expected reward's"),
    "grpo-bias/std-gradient": Row(above(0.05), "divided by the group's deviation, it does too"),
    "grpo-bias/std-gradient-priced": Row(above(0.05)),
    **{
        f"grpo-bias/{name}": Row(above())
        for name in ("wrong-longer", "wrong-grow", "wrong-longer-trained", "std-share", "masked-cut-off", "masked-longer", "masked-grows")
    },
    **{f"grpo-bias/{name}": Row(below()) for name in ("right-shorter", "unmasked-cut-off")},
    "grpo-bias/as-good": Row(
        above(-0.01), "Dr. GRPO earns what GRPO earns (less 0.01 at most), with shorter wrong answers", needs={"its wrong answers are shorter": True}
    ),
    "best-of-k/average": Row(above()),
    "best-of-k/best-of-4": Row(above()),
    "best-of-k/best-of-16": Row(above(), "best-of-16 rises too: RL widens what is reachable, it does not only sharpen", again=_last),
    "best-of-k/widens": None,  # best-of-16 in other words
    "best-of-k/no-crossing": None,  # best-of-16 in other words
    "length-penalty/formula": Row(at_most(1e-12)),
    "length-penalty/concave": Row(at_most(0.0)),
    "length-penalty/limits": Row(at_most(1e-7)),
    "length-penalty/easy-quick": Row(above()),
    "length-penalty/easy-more-than-hard": Row(untested(), why=MARGINS),
    "length-penalty/hard-room": Row(untested(), why=MARGINS),
    "length-penalty/hard-success": Row(untested(), why=MARGINS),
    "length-penalty/parallel": Row(above(), again=_together),
    "self-summary/half-error": Row(
        untested(), why="one agent was trained under the limit and the other was not: to be played with both trained under it"
    ),
    "self-summary/shorter": Row(below(1.0, 0.5)),
    "self-summary/cache": Row(above()),
    "self-summary/rl-improves": Row(above(), needs={"the loss against play without limit falls": False}),
    "self-summary/one-weight": Row(EXACT),
    "cpt-rl/codebase-loss": Row(below()),
    "cpt-rl/codebase-loss-along": Row(below()),
    **{
        f"cpt-rl/loss-{name}": Row(
            below(),
            f"between pretraining budgets, lower loss after SFT goes with higher RL reward after a fixed number of steps ({words})",
            again=_foretold(outcome),
        )
        for name, outcome, words in (
            ("success", "success_after", "success on held-out tasks"),
            ("reward", "reward_last", "training reward of the last 10 steps"),
        )
    },
    "cpt-rl/budget-order": Row(above()),
    **{f"low-precision/{how}-leak": Row(above(), source=KERNELS, again=_leak(how)) for how in ("batch", "later")},
    "low-precision/division-mxfp8": Row(below(1e-4), source=KERNELS),
    "low-precision/trains": Row(below(0.02), source=KERNELS),
    "low-precision/tensor-training": Row(untested(), "with the scale per tensor, RL diverges", KERNELS, SUPERVISED),
    "low-precision/division-nvfp4": Row(untested(), "fast division in NVFP4 makes RL diverge after roughly a hundred steps", KERNELS, SUPERVISED),
}
"""By experiment and claim; None for a claim that no source makes, or that is said twice."""


def _perplexity(record: dict) -> list[dict]:
    from sims.cpt_rl import perplexity_foretells

    return perplexity_foretells([row for row in record["rows"] if row["part"] == "training"])


def _transplanted(record: dict) -> list[dict]:
    from sims.joint_mtp import transplanted

    return transplanted(record["rows"])


def _on_policy(record: dict) -> list[dict]:
    from sims.real_time_rl.verdicts import on_policy

    return [on_policy(record["rows"])]


LATER = {"cpt-rl": _perplexity, "mtp": _transplanted, "real-time-rl": _on_policy}
"""Experiment → claims that came after its record, from what the record measured."""


def claims_of(record: dict) -> list[dict]:
    """The claims of a record with rules and verdicts: its own, those of ROWS for a record without rules, and those of LATER that it does not have.
    Raises KeyError for a claim without a rule that is not in ROWS."""
    found = []
    for one in record["claims"]:
        if "rule" in one:
            found.append(one)
        elif row := ROWS[f"{record['experiment']}/{one['name']}"]:
            new = {"measured": one["measured"], "interval": one["interval"], "unit": one["unit"], "note": one["note"], "needs": row.needs}
            new |= row.again(record, one) if row.again else {}
            new["note"] = "; ".join(filter(None, (row.why, new["note"])))
            found.append(claim(one["name"], row.says or one["claim"], row.source or one["source"], rule=row.rule, **new))
    known = {one["name"] for one in record["claims"]}
    if record["experiment"] in LATER:
        found += [one for one in LATER[record["experiment"]](record) if one["name"] not in known]
    return found
