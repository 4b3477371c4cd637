"""What an experiment is: settings, a function of a run folder, a picture, and its verdicts on claims of the sources.

The `experiment.py` of a folder beside this file has
    Experiment          frozen dataclass of settings with a `seed`; `Experiment.quick()` is the half-minute version
    experiment(run, config)   → {"rows": [dict, …], "claims": [claim(…), …], …}; long parts are stages of the run
    picture(results, path)    draws what the source draws

A claim comes with a rule that is written down before it is measured. The verdict is computed from rule and measurement
only, so anyone can recompute it from the file that holds both:

    above(null)             an effect: the complete interval is above `null`, the value without an effect
    above(null, amount)     … and as large as the source says: the measured value reaches `amount`, the complete
                            interval half of it
    below(null, amount)     the same downwards
    between(low, high)      a number that the source gives
    at_most(bound)          a law: a closed form or an identity, and the largest deviation from it
    at_least(bound)         a law: two things differ by at least this much
    untested()              measured or not, it does not test the claim; the note says why

    reproduced          the interval is beyond the null, the amount is reached, and all further conditions are met
    partly              the interval is beyond the null, but the measured value reaches only half of the amount, or the
                        interval holds less than half of it, or a condition is not met
    contradicted        the complete interval is on the wrong side of the null
    not at this scale   the interval contains the null, or less than half of the amount is reached: the claim may hold
                        elsewhere
    not tested          there is no measurement of it
A number without an interval counts as an interval of length zero. A law holds or is broken; laws are counted
separately.

A record is tied to the code that measured it (`etude/ledger/fingerprints.py`). Where that code has changed since, the
ledger shows "stale" in place of the verdict. A rule that was written or changed after its data gives a verdict *after
the fact*, until the experiment is run again.

    etude figure kl-variance --quick        PNG, CSV and JSON in runs/figure/kl-variance
    etude claims                            every claim, what was measured, and the verdict
"""

import math
from collections.abc import Mapping, Sequence

__all__ = [
    "LAW_VERDICTS",
    "VERDICTS",
    "above",
    "at_least",
    "at_most",
    "below",
    "between",
    "claim",
    "is_law",
    "judge",
    "untested",
]

VERDICTS = ("reproduced", "partly", "contradicted", "not at this scale", "not tested")
LAW_VERDICTS = ("holds", "broken")
KINDS = {
    "above": ("null", "amount"),
    "below": ("null", "amount"),
    "between": ("low", "high"),
    "at most": ("bound",),
    "at least": ("bound",),
    "not tested": (),
}
"""Kinds of rules, and what belongs to each."""


def above(null: float = 0.0, amount: float | None = None) -> dict:
    """An effect above `null`, as large as `amount` if the source gives its size."""
    return {"kind": "above", "null": null, "amount": amount}


def below(null: float = 0.0, amount: float | None = None) -> dict:
    """An effect below `null`, as large as `amount` if the source gives its size."""
    return {"kind": "below", "null": null, "amount": amount}


def between(low: float, high: float) -> dict:
    """A number from the source, with the range that still counts as equal."""
    return {"kind": "between", "low": low, "high": high}


def at_most(bound: float) -> dict:
    """A law: the largest deviation from it, `measured`, is at most the bound."""
    return {"kind": "at most", "bound": bound}


def at_least(bound: float) -> dict:
    """A law that two things differ: their smallest difference, `measured`, is at least the bound."""
    return {"kind": "at least", "bound": bound}


def untested() -> dict:
    """Any measurement there may be does not test the claim."""
    return {"kind": "not tested"}


def is_law(rule: Mapping) -> bool:
    """Whether the rule is that of a law."""
    return rule["kind"] in ("at most", "at least")


def judge(
    rule: Mapping, value: float | None, interval: Sequence[float] | None = None, needs: Mapping[str, bool] | None = None
) -> str:
    """The verdict, one of VERDICTS, or of LAW_VERDICTS for a law.

    needs: further conditions of the rule, in words, and whether they are met. Raises ValueError for an invalid rule."""
    if set(rule) != {"kind", *KINDS.get(rule.get("kind", ""), ("",))}:
        raise ValueError(f"a rule must be one of {', '.join(KINDS)}, with its own fields; got {dict(rule)}")
    meets_needs = all((needs or {}).values())
    if rule["kind"] == "not tested" or value is None:
        return "not tested"
    if is_law(rule):
        is_inside = value <= rule["bound"] if rule["kind"] == "at most" else value >= rule["bound"]
        return "holds" if is_inside and meets_needs else "broken"
    low, high = interval or (value, value)
    if rule["kind"] == "between":
        if high < rule["low"] or low > rule["high"]:
            return "contradicted"
        is_inside = rule["low"] <= low and high <= rule["high"]
        return "not at this scale" if not is_inside else "reproduced" if meets_needs else "partly"
    # "below" is "above" with the sign flipped.
    sign = 1 if rule["kind"] == "above" else -1
    null, amount = sign * rule["null"], None if rule["amount"] is None else sign * rule["amount"]
    if amount is not None and amount <= null:
        raise ValueError(f"amount must be on the claim's side of null; got {dict(rule)}")
    value, low, high = sign * value, *sorted((sign * low, sign * high))
    if high < null:
        return "contradicted"
    half = null if amount is None else (null + amount) / 2
    if low <= null or value < half:
        return "not at this scale"
    # The measured value decides whether the amount is reached. Its upper end would make wide intervals reach anything.
    return "reproduced" if meets_needs and (amount is None or value >= amount and low >= half) else "partly"


def claim(
    name: str,
    says: str,
    source: str,
    value: float | None,
    rule: Mapping,
    interval: tuple[float, float] | None = None,
    unit: str = "",
    note: str = "",
    needs: Mapping[str, bool] | None = None,
) -> dict:
    """One claim of a source, or one law, with its measurement and verdict.

    name: short and unique within the experiment; says: the claim in a sentence; source: section, figure or arXiv
    number; measured: the number that decides, or None (say why in `note`); rule: see the top of this file; interval:
    its uncertainty (say in `note` what kind); note: what the reader should know, with the likely reason if the claim
    did not reproduce; needs: further conditions for it to be reproduced, in words, and whether they are met.
    Raises ValueError for an invalid rule, for a number that is not finite, and for an interval that is reversed or has
    no number."""
    if value is not None and not math.isfinite(value):
        raise ValueError(f"measured must be finite; got {value} for {name}")
    if interval is not None and (value is None or not -math.inf < interval[0] <= interval[1] < math.inf):
        raise ValueError(f"interval must be finite (low, high) and needs a measured number; got {interval} for {name}")
    bounds = None if interval is None else [float(v) for v in interval]
    needs = {condition: bool(is_met) for condition, is_met in (needs or {}).items()}
    return {
        "name": name,
        "claim": says,
        "source": source,
        "measured": value,
        "unit": unit,
        "interval": bounds,
        "rule": dict(rule),
        "needs": needs,
        "verdict": judge(rule, value, bounds, needs),
        "note": note,
    }
