"""The curves C_{k,q} of the length penalty compared with closed forms: the first part of the experiment
`length-penalty`."""

import itertools
from collections.abc import Sequence
from decimal import Decimal, localcontext

import numpy as np

from ref.length_penalty import length_penalty, marginal_cost
from sims.experiment import at_most, claim

__all__ = ["curves", "printed", "verdicts"]

EFFORTS = tuple(np.geomspace(1, 1e4, 33).tolist())


def printed(x: float, k: float, q: float) -> Decimal:
    """C_{k,q}(x) as printed in the report, with the limits q = 1 and k = 0 or q = 0 filled in, in 60 digits."""
    with localcontext() as context:
        context.prec = 60
        effort, bend, power = Decimal(x), Decimal(k), Decimal(q)
        if bend == 0 or power == 0:
            return effort
        growth = (1 + bend * effort).ln()
        return growth / bend if power == 1 else (((1 - power) * growth).exp() - 1) / (bend * (1 - power))


def curves(bends: Sequence[float], exponents: Sequence[float]) -> list[dict]:
    """One row per curve and effort; the exponents q = 1 ± 1e-9 are added."""
    return [
        {
            "part": "curve",
            "k": k,
            "q": q,
            "x": x,
            "exact": float(printed(x, k, q)),
            "cost": length_penalty(x, k, q),
            "slope": marginal_cost(x, k, q),
        }
        for k, q, x in itertools.product(bends, sorted({*exponents, 1 - 1e-9, 1 + 1e-9}), EFFORTS)
    ]


def verdicts(rows: list[dict], bends: Sequence[float], exponents: Sequence[float]) -> list[dict]:
    """Laws for the rows of `curves`: digits, shape, limits."""
    source = "§4.2, Fig. 6"
    error = max(abs(row["cost"] / row["exact"] - 1) for row in rows)
    violations = pairs = 0
    for k, q in itertools.product(bends, exponents):
        curve_rows = [row for row in rows if (row["k"], row["q"]) == (k, q)]
        secants = [(b["cost"] - a["cost"]) / (b["x"] - a["x"]) for a, b in itertools.pairwise(curve_rows)]
        for secant, (a, b) in zip(secants, itertools.pairwise(curve_rows), strict=True):
            # A concave curve's secant lies between its slopes at the two ends.
            violations += not (a["slope"] > secant > b["slope"] > 0 if q else abs(secant - 1) < 1e-9)
            pairs += 1
    distances = [
        abs(length_penalty(x, curve_k, q) / limit - 1)
        for x, k in itertools.product(EFFORTS, bends)
        for log in [np.log1p(k * x) / k]
        for q, curve_k, limit in [(1 + 1e-9, k, log), (1 - 1e-9, k, log), (0.0, k, x), (2.0, 1e-13, x)]
    ]
    bounds = [length_penalty(1e30, k, q) * k * (q - 1) for k in bends for q in exponents if q > 1]
    is_bounded = all(1 - 1e-6 < b <= 1 + 1e-12 for b in bounds)
    return [
        claim(
            "formula",
            "the curves are C(x) = ((1 + kx)^(1−q) − 1) / (k(1−q))",
            source,
            error,
            at_most(1e-12),
            note=f"greatest relative distance from the printed formula in 60 digits, {len(rows)} points, q "
            f"= 1 ± 1e-9 too",
        ),
        claim(
            "concave",
            "C increases and is concave",
            source,
            violations / pairs,
            at_most(0.0),
            unit="of the steps break it",
            note=f"{pairs} steps from x = 1 to 10000: secants lie between (1 + kx)^(−q) at their ends; q = "
            f"0 is straight",
        ),
        claim(
            "limits",
            "q → 1 gives ln(1 + kx)/k, k → 0 or q = 0 gives x, and for q > 1 C is bounded by 1/(k(q − 1))",
            "closed forms",
            max(distances),
            at_most(1e-7),
            needs={"bounded for q > 1": is_bounded},
            note="greatest relative distance at q = 1 ± 1e-9, q = 0 and k = 1e-13; "
            f"at x = 1e30 C is {min(bounds, default=1.0):.6f} of its bound or more",
        ),
    ]
