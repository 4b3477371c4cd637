"""The gradient of each KL estimator, for the page of KL estimators: closed until the reader has guessed, and exact
zeros say so."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import streamlit as st

from etude.explorer.page import download
from etude.explorer.spans import exact
from etude.figures import as_csv
from sims import kl_variance

__all__ = ["ROUNDING", "gradients", "said", "section", "worded"]

MEASURE_COLUMNS = {
    "size": "size",
    "from ∇KL(q‖p)": "distance from ∇KL(π‖π_ref)",
    "from ∇KL(p‖q)": "distance from ∇KL(π_ref‖π)",
}
"""Column names for those of `sims/kl_variance.py`, whose q is π and whose p is π_ref."""
ROUNDING = 1e-12
"""Below this, a figure of the enumeration is an identity that float64 has rounded: the docstring of `ref/kl.py` derives
them."""


@lru_cache(1)
def gradients() -> list[dict]:
    """Norm of each estimator's expected gradient and its distance from the gradient of either KL, by full enumeration
    (`sims/kl_variance.py`): medians, blank if not measured."""
    rows: dict[str, dict] = {}
    for name, values in kl_variance.gradients_of_one_token(kl_variance.Experiment()).items():
        gradient, _, measure = name.rpartition(", ")
        if measure not in MEASURE_COLUMNS:
            gradient, measure = name, "from ∇KL(q‖p)"
        row = rows.setdefault(gradient, {"gradient": gradient} | dict.fromkeys(MEASURE_COLUMNS.values()))
        row[MEASURE_COLUMNS[measure]] = float(np.median(values))
    return list(rows.values())


def said() -> list[dict]:
    """The rows of `gradients`, their figures in words: zero where it is that by law."""
    return [
        {"gradient": row["gradient"]}
        | {
            name: None if row[name] is None else exact(0.0 if row[name] < ROUNDING else row[name], "{:.4g}")
            for name in MEASURE_COLUMNS.values()
        }
        for row in gradients()
    ]


def worded(shown: Sequence[dict], rows: Sequence[dict], name: str) -> None:
    """A table in which some figures are in words, and others have four digits. Its CSV file has all figures with all
    digits."""
    floats = {key for row in shown for key, value in row.items() if isinstance(value, float)}
    config = {key: st.column_config.NumberColumn(format="%.4g") for key in floats}
    st.dataframe(list(shown), hide_index=True, width="stretch", column_config=config, placeholder="")
    download("Data (CSV)", lambda: as_csv(rows), f"{name}.csv", "text/csv")


def section() -> None:
    """The table, and how to read it."""
    st.subheader("The gradient of each estimator, compared with ∇KL(π‖π_ref)")
    st.markdown(
        "By full enumeration over a small vocabulary, without sampling. Medians over twenty pairs of random "
        "softmax policies, whatever is chosen above. The size is the norm relative to the true "
        "gradient; distance 0 means the true gradient, "
        "distance 1 means no use at all."
    )
    with st.expander("Guess what each pulls on, and open the table"):
        worded(said(), gradients(), "kl-gradients")
        st.caption(f"Exact zeros are identities; in float64 the enumeration is within {ROUNDING:g} of them.")
