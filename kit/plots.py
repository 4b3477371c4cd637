"""The look of the experiments' pictures."""

from pathlib import Path
from typing import Any

__all__ = ["BLUE", "BY_NAME", "COLOURS", "GREEN", "GREY", "ORANGE", "PURPLE", "RED", "SKY", "save", "sheet"]

# Okabe and Ito's colours: people with any colour vision can tell them apart.
BLUE, ORANGE, GREEN, PURPLE, SKY, RED = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"
COLOURS = (BLUE, RED, GREEN, PURPLE, SKY, ORANGE)
GREY = "#8A97A3"
BY_NAME = {"blue": BLUE, "orange": ORANGE, "green": GREEN, "purple": PURPLE, "sky": SKY, "red": RED, "grey": GREY}


def sheet(columns: int, title: str, rows: int = 1, width: float = 4.6, height: float = 3.7) -> tuple[Any, Any]:
    """A figure with a title and its axes (an array if there are several), without decoration."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["axes.titlesize"], pyplot.rcParams["axes.titlelocation"] = 11, "left"
    figure, axes = pyplot.subplots(rows, columns, figsize=(width * columns, height * rows + 0.4), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=13)
    for axis in axes.flat if rows * columns > 1 else [axes]:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#E5E8EB", linewidth=0.8)
        axis.set_axisbelow(True)
    return figure, axes


def save(figure: Any, path: Path) -> None:
    """Writes the figure as PNG or SVG (by the suffix of `path`) and closes it."""
    from matplotlib import pyplot

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
