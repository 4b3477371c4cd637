"""What an experiment is: settings, a function of a run folder, a picture, and verdicts on claims of the sources.

A file of this room that reproduces a figure holds
    Experiment          frozen dataclass of settings with a `seed`; `Experiment.quick()` is the half-minute version
    experiment(run, config)   → {"rows": [dict, …], "claims": [claim(…), …], …}; long parts are stages of the run
    picture(found, path)      draws what the source draws

    etude figure kl-variance --quick        PNG, CSV and JSON in runs/figure/kl-variance
    etude claims                            every claim, what was measured, and the verdict
"""

import math

__all__ = ["VERDICTS", "claim", "decide"]

VERDICTS = ("reproduced", "partly", "not at this scale")


def claim(
    name: str,
    says: str,
    source: str,
    measured: float | None,
    verdict: str,
    interval: tuple[float, float] | None = None,
    unit: str = "",
    note: str = "",
) -> dict:
    """One claim of a source beside what was measured.

    name: short and unique within the experiment; says: the claim in a sentence; source: section, figure or arXiv number;
    measured: the number that decides, None when there is none to give; interval: where it lies with its uncertainty (say in `note` what kind);
    note: what the reader should know, the reason looked for when the claim did not reproduce. ValueError for a verdict that is
    none of VERDICTS, for a number that is not finite, and for an interval upside down."""
    if verdict not in VERDICTS:
        raise ValueError(f"verdict must be one of {', '.join(VERDICTS)}; got {verdict!r}")
    if measured is not None and not math.isfinite(measured):
        raise ValueError(f"measured must be finite; got {measured} for {name}")
    if interval is not None and not -math.inf < interval[0] <= interval[1] < math.inf:
        raise ValueError(f"interval must be (low, high), finite; got {interval} for {name}")
    return {
        "name": name, "claim": says, "source": source, "measured": measured, "unit": unit,
        "interval": None if interval is None else [float(v) for v in interval], "verdict": verdict, "note": note,
    }  # fmt: skip


def decide(holds: bool, partly: bool = False) -> str:
    """The verdict: reproduced when it holds, else partly or not at this scale."""
    return VERDICTS[0] if holds else VERDICTS[1] if partly else VERDICTS[2]
