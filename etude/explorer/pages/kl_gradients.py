"""The gradient of each KL estimator, for the page of KL estimators, in a closed box; exact zeros are marked."""

from functools import lru_cache

import numpy as np
import streamlit as st

from etude.explorer.page import table
from etude.explorer.spans import exact
from sims.kl_variance import experiment as kl_variance

__all__ = ["ROUNDING", "gradients", "format_gradients", "section"]

MEASURE_COLUMNS = {
    "size": "size",
    "from ∇KL(q‖p)": "distance from ∇KL(π‖π_ref)",
    "from ∇KL(p‖q)": "distance from ∇KL(π_ref‖π)",
}
"""Column names for those of `sims/kl_variance/experiment.py`, whose q is π and whose p is π_ref."""
ROUNDING = 1e-12
"""Below this, a figure of the enumeration is an identity that float64 has rounded: the docstring of `ref/kl.py` derives
them."""


@lru_cache(1)
def gradients() -> list[dict]:
    """Norm of each estimator's expected gradient and its distance from the gradient of either KL, by full enumeration
    (`sims/kl_variance/experiment.py`): medians, blank if not measured."""
    rows: dict[str, dict] = {}
    for name, values in kl_variance.gradients_of_one_token(kl_variance.Experiment()).items():
        gradient, _, measure = name.rpartition(", ")
        if measure not in MEASURE_COLUMNS:
            gradient, measure = name, "from ∇KL(q‖p)"
        row = rows.setdefault(gradient, {"gradient": gradient} | dict.fromkeys(MEASURE_COLUMNS.values()))
        row[MEASURE_COLUMNS[measure]] = float(np.median(values))
    return list(rows.values())


def format_gradients() -> list[dict]:
    """The rows of `gradients`, with exact zeros in words."""
    return [
        {"gradient": row["gradient"]}
        | {
            name: None if row[name] is None else exact(0.0 if row[name] < ROUNDING else row[name], "{:.4g}")
            for name in MEASURE_COLUMNS.values()
        }
        for row in gradients()
    ]


def section() -> None:
    """The table, and how to read it."""
    st.subheader("The gradient of each estimator, compared with ∇KL(π‖π_ref)")
    st.markdown(
        "By full enumeration over a small vocabulary, without sampling. Medians over twenty pairs of random softmax "
        "policies; the controls above have no effect. The size is the norm relative to the true gradient; distance 0 "
        "is the true gradient, and a zero gradient has distance 1."
    )
    with st.expander("Predict each gradient, then open the table"):
        table(gradients(), "kl-gradients", format_gradients())
        st.caption(f"Exact zeros are identities; in float64 the enumeration is within {ROUNDING:g} of them.")
