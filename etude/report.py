"""The report of a run: `report.json` with every result, `report.html` with pictures, in one file each.

Reads what the stages left in the run folder and shows what there is: a run that stopped half way has
half a report. The page needs nothing from outside: pictures are inside it, and there is no script.
"""

from __future__ import annotations

import base64
import html
import io
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (the backend has to be chosen first)
import numpy as np  # noqa: E402
from matplotlib.ticker import LogLocator, NullFormatter  # noqa: E402

# Okabe and Ito's colours, which people with any colour vision tell apart.
BLUE, ORANGE, GREEN, PURPLE, SKY, RED = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"
BEFORE, AFTER = "#9AA5B1", BLUE


def write(run_root: str | Path) -> tuple[Path, Path]:
    """Writes report.html and report.json into the run folder and returns their paths."""
    root = Path(run_root)
    record = collect(root)
    metrics = {path.stem: _lines(path) for path in sorted((root / "metrics").glob("*.jsonl"))}
    page, data = root / "report.html", root / "report.json"
    _replace(data, json.dumps(record, indent=1) + "\n")
    _replace(page, _page(record, metrics))
    return page, data


def collect(root: Path) -> dict:
    """Configuration, machine, stage results and stage times of a run folder as one dictionary."""
    config = _json(root / "config.json")
    stages = {}
    for path in sorted((root / "stages").glob("*.json")):
        found = _json(path)
        stages[path.stem] = found.get("result", found)
    seconds: dict[str, float] = {}
    memory: dict[str, float] = {}
    for line in _lines(root / "timings.jsonl"):
        stage = line.get("stage", "?")
        seconds[stage] = max(seconds.get(stage, 0.0), line.get("seconds", 0.0))
        if "peak_memory_gib" in line:
            memory[stage] = max(memory.get(stage, 0.0), line["peak_memory_gib"])
    return {
        "technique": config.get("technique"),
        "config": config.get("config"),
        "machine": config.get("machine"),
        "seconds": seconds,
        "total_seconds": round(sum(seconds.values()), 1),
        "peak_memory_gib": max(memory.values(), default=None),
        "stages": stages,
    }


# The stages of the recipe in their order.
STAGES = ("data", "cpt", "mtp", "long", "sft", "rl", "eval", "decode")

# Key, name, number format, and whether more is better (None: neither).
_MEASURES = (
    ("success", "success, sampled", "{:.3f}", True),
    ("best_of_8", "best of 8", "{:.3f}", True),
    ("greedy", "success, greedy", "{:.3f}", True),
    ("tokens", "tokens", "{:.1f}", False),
    ("turns", "turns", "{:.2f}", False),
    ("invalid_calls", "invalid calls", "{:.3f}", False),
)


def before_after(record: dict) -> list[tuple[str, str, str, str]]:
    """Rows (measure, before, after, difference) with intervals as text; empty without an evaluation."""
    result = record.get("stages", {}).get("eval", {})
    before, after, difference = (result.get(key) or {} for key in ("before", "after", "difference"))
    rows = []
    for key, name, form, _ in _MEASURES:
        if key in before or key in after:
            rows.append(
                (
                    name,
                    _interval(before.get(key), form),
                    _interval(after.get(key), form),
                    _interval(difference.get(key), form.replace(":", ":+")),
                )
            )
    return rows


# ------------------------------------------------------------------------------------------- reading a run


def _json(path: Path) -> dict:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _lines(path: Path) -> list[dict]:
    """The whole JSON lines of a file; a kill may have torn the last one."""
    found = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _triple(value: Any) -> tuple[float, float, float] | None:
    """(value, low, high) of a number or an interval; None when it is missing."""
    if isinstance(value, dict):
        middle = value.get("value", value.get("median"))
        if middle is None:
            return None
        low, high = value.get("low"), value.get("high")
        return middle, middle if low is None else low, middle if high is None else high
    return None if value is None else (value, value, value)


def _interval(value: Any, form: str = "{:.3f}") -> str:
    triple = _triple(value)
    if triple is None:
        return "–"
    middle, low, high = (form.format(part) for part in triple)
    return middle if low == middle == high else f"{middle} [{low}, {high}]"


def _series(lines: list[dict], y: str, x: str = "step") -> tuple[np.ndarray, np.ndarray]:
    """The points of metric `y` against `x`, from the lines that have it."""
    points = [
        (line.get(x, line["step"]), line[y])
        for line in lines
        if isinstance(line.get(y), (int, float)) and "step" in line
    ]
    array = np.array(points, dtype=float).reshape(-1, 2)
    return array[:, 0], array[:, 1]


def _joined(metrics: dict, *stages: str) -> tuple[list[dict], list[tuple[str, int]]]:
    """The lines of stages that train one after another, steps and tokens counted through; where each began."""
    joined: list[dict] = []
    borders, step, tokens = [], 0, 0
    for stage in stages:
        lines = [line for line in metrics.get(stage, []) if isinstance(line.get("step"), int)]
        if not lines:
            continue
        borders.append((stage, step))
        own = [line.get("tokens") or 0 for line in lines]
        joined += [
            {**line, "step": line["step"] + step, "tokens": count + tokens, "phase": line.get("phase", stage)}
            for line, count in zip(lines, own, strict=True)
        ]
        step, tokens = joined[-1]["step"], tokens + max(own)
    return joined, borders


def _evaluation(record: dict) -> dict:
    """The result of the evaluation, with the timed decoding, which is a stage of its own."""
    stages = record["stages"]
    result = dict(stages.get("eval", {}))
    if stages.get("decode"):
        result["speculative"] = stages["decode"]
    return result


def _smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Centred moving average; the window shrinks at both ends."""
    if width < 2 or len(values) < 3:
        return values
    total = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low, high = np.maximum(index - width // 2, 0), np.minimum(index + width // 2 + 1, len(values))
    return (total[high] - total[low]) / (high - low)


# ------------------------------------------------------------------------------------------------ pictures


def _axes(title: str, x: str, y: str, size: tuple[float, float] = (5.0, 3.1)) -> tuple[Any, Any]:
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E5E8EB", linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _picture(figure: Any, alt: str, words: str) -> str:
    """A figure as HTML with the picture inside and a sentence under it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=144, metadata={"Software": None})
    plt.close(figure)
    data = base64.b64encode(buffer.getvalue()).decode()
    return (
        f'<figure><img alt="{html.escape(alt)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{words}</figcaption></figure>"
    )


def _tokens_axis(axes: Any) -> None:
    axes.xaxis.set_major_formatter(
        lambda value, _: f"{value / 1e6:g}M" if abs(value) >= 1e6 else f"{value / 1e3:g}k" if value else "0"
    )


def _line(
    axes: Any,
    lines: list[dict],
    y: str,
    colour: str,
    label: str | None,
    x: str = "step",
    smooth: int = 0,
    style: str = "-",
) -> np.ndarray:
    """The smoothed curve over its faint raw points; returns the raw values."""
    xs, ys = _series(lines, y, x)
    if len(xs):
        if smooth > 1:
            axes.plot(xs, ys, color=colour, alpha=0.25, linewidth=0.8)
        axes.plot(
            xs,
            _smooth(ys, smooth),
            style,
            color=colour,
            label=label,
            linewidth=1.8,
            marker="o" if len(xs) == 1 else None,
        )
    return ys


def _cpt_pictures(metrics: dict) -> list[str]:
    (lines, _), found = _joined(metrics, "cpt", "long", "sft"), []
    phases = {"short": BLUE, "long": ORANGE, "sft": GREEN}
    if len(_series(lines, "loss")[0]):
        figure, axes = _axes("Continued pretraining: loss", "tokens", "nats per token")
        for phase in dict.fromkeys(line.get("phase") for line in lines if "loss" in line):
            part = [line for line in lines if line.get("phase") == phase]
            _line(axes, part, "loss", phases.get(phase, PURPLE), phase, "tokens", max(1, len(part) // 25))
        axes.legend(frameon=False, title="phase")
        _tokens_axis(axes)
        found.append(
            _picture(
                figure,
                "loss against tokens by phase",
                "Steep at first, flatter with the decay of the "
                "learning rate. Each phase has data of its own, so a jump where the colour changes is no "
                "fault: SFT counts action tokens only.",
            )
        )
    xs, ys = _series(lines, "codebase_ppl", "tokens")
    if len(xs):
        figure, axes = _axes("Held-out codebase", "tokens", "perplexity per token")
        axes.plot(xs, ys, "o-", color=BLUE, linewidth=1.8, markersize=4)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        _tokens_axis(axes)
        found.append(
            _picture(
                figure,
                "codebase perplexity against tokens",
                f"Perplexity on code that training never "
                f"saw: {ys[0]:.1f} at first, {ys.min():.1f} at its best, {ys[-1]:.1f} at the end. "
                f"It may rise again in the last phase, which trains on the agent's work only.",
            )
        )
    return found


def _mtp_pictures(metrics: dict) -> list[str]:
    found, colours = [], [BLUE, ORANGE, GREEN, PURPLE, SKY, RED]
    for prefix, title, y, words in (
        (
            "kl",
            "MTP: distance from the main head",
            "KL, nats",
            "How far each draft layer is from the main head's distribution. All should fall; a deeper layer, "
            "which guesses further ahead, stays higher.",
        ),
        (
            "agree",
            "MTP: agreement with the main head",
            "share of positions",
            "How often a draft layer's first choice is the main head's. The higher, the more drafts are kept.",
        ),
    ):
        own = {stage: [line for line in lines if f"{prefix}_1" in line] for stage, lines in metrics.items()}
        lines, borders = _joined(own, "mtp", "long", "sft", "rl")
        if not lines:
            continue
        figure, axes = _axes(title, "step", y)
        for depth in range(1, 1 + sum(key.startswith(f"{prefix}_") for key in lines[0])):
            colour, width = colours[(depth - 1) % 6], max(1, len(lines) // 25)
            _line(axes, lines, f"{prefix}_{depth}", colour, f"depth {depth}", smooth=width)
        axes.set_ylim(0, 1.12 * axes.get_ylim()[1])
        for name, border in borders:
            axes.axvline(border, color="#B8C2CC", linewidth=0.8, linestyle=":")
            axes.text(border, 1.0, f" {name}", transform=axes.get_xaxis_transform(), va="top", fontsize=8)
        axes.legend(frameon=False)
        found.append(_picture(figure, title, words))
    return found


def _rl_pictures(metrics: dict) -> list[str]:
    lines, found = metrics.get("rl", []), []
    width = max(1, len(lines) // 12)
    if len(_series(lines, "reward")[0]) or len(_series(lines, "success")[0]):
        figure, axes = _axes("RL: reward and success", "step", "mean over the batch")
        _line(axes, lines, "reward", ORANGE, "reward", smooth=width)
        success = _line(axes, lines, "success", BLUE, "success", smooth=width)
        axes.legend(frameon=False)
        tenth = max(1, len(success) // 10)
        told = (
            (
                f" Success went from {success[:tenth].mean():.2f} over the first tenth of the steps to "
                f"{success[-tenth:].mean():.2f} over the last."
            )
            if len(success)
            else ""
        )
        found.append(
            _picture(
                figure,
                "reward and success by RL step",
                "Every step plays prompts never seen before, "
                "so this curve cannot rise by memory. Reward lies under success by the penalties." + told,
            )
        )
    for y, title, unit, words in (
        (
            "tokens",
            "RL: length of a rollout",
            "tokens",
            "The length penalty pulls it down; a crash towards zero "
            "would mean that the agent gives up early.",
        ),
        (
            "invalid_calls",
            "RL: invalid calls",
            "per rollout",
            "Calls that the world could not understand. They cost reward and should not grow.",
        ),
        (
            "kl",
            "RL: distance from the reference",
            "k1, nats",
            "How far the policy has moved from where RL began. A slow rise is learning; a jump is trouble.",
        ),
        (
            "nll",
            "RL: entropy, by samples",
            "nats per token",
            "What is left of the policy's uncertainty. Near zero it no longer explores.",
        ),
    ):
        if len(_series(lines, y)[0]):
            figure, axes = _axes(title, "step", unit)
            _line(axes, lines, y, BLUE, None, smooth=width)
            if y in ("tokens", "invalid_calls", "nll"):
                axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
            found.append(_picture(figure, title, words))
    return found


def _bars(axes: Any, names: list[str], before: list, after: list) -> None:
    places = np.arange(len(names))
    for shift, values, colour, label in (
        (-0.2, before, BEFORE, "before RL"),
        (0.2, after, AFTER, "after RL"),
    ):
        kept = [(place, _triple(value)) for place, value in zip(places, values) if _triple(value)]
        if not kept:
            continue
        xs = np.array([place for place, _ in kept]) + shift
        middle, low, high = np.array([triple for _, triple in kept], dtype=float).T
        axes.bar(xs, middle, 0.38, color=colour, label=label)
        axes.errorbar(
            xs,
            middle,
            [np.maximum(middle - low, 0), np.maximum(high - middle, 0)],
            fmt="none",
            ecolor="#333",
            capsize=3,
            linewidth=1,
        )
        for x, value, top in zip(xs, middle, high):
            axes.text(x, top + 0.01, f"{value:.2f}", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(places, names)
    axes.legend(frameon=False, ncols=2, loc="upper left", bbox_to_anchor=(0, -0.12))


def _moved(difference: Any) -> str:
    """What an interval of a difference allows to say."""
    triple = _triple(difference)
    if triple is None:
        return "was not compared"
    value, low, high = triple
    if low > 0:
        return f"rose by {value:.2f} [{low:.2f}, {high:.2f}]"
    if high < 0:
        return f"fell by {-value:.2f} [{-high:.2f}, {-low:.2f}]"
    return f"did not change measurably ({value:+.2f} [{low:+.2f}, {high:+.2f}])"


def _eval_pictures(result: dict) -> list[str]:
    before, after, found = result.get("before") or {}, result.get("after") or {}, []
    difference = result.get("difference") or {}
    keys = [
        (key, name)
        for key, name in (("success", "sampled"), ("greedy", "greedy"), ("best_of_8", "best of 8"))
        if key in before or key in after
    ]
    if keys:
        figure, axes = _axes("Success on held-out tasks", "", "share of tasks")
        _bars(
            axes,
            [name for _, name in keys],
            [before.get(key) for key, _ in keys],
            [after.get(key) for key, _ in keys],
        )
        axes.set_ylim(0, 1.08)
        found.append(
            _picture(
                figure,
                "success before and after RL",
                f"Whiskers: 95% bootstrap over "
                f"{result.get('tasks', 'the')} tasks. Sampled success {_moved(difference.get('success'))}, "
                f"best of 8 {_moved(difference.get('best_of_8'))}, "
                f"greedy {_moved(difference.get('greedy'))}. "
                f"Where sampled rises and best of 8 does not, RL made likely what was already within reach.",
            )
        )
    depths = sorted({*(before.get("by_depth") or {}), *(after.get("by_depth") or {})})
    if depths:
        figure, axes = _axes(
            "Sampled success by depth", "files whose code must be read, beside the task's", "share"
        )
        pick = [
            [((part.get("by_depth") or {}).get(depth) or {}).get("success") for depth in depths]
            for part in (before, after)
        ]
        _bars(axes, [f"depth {depth}" for depth in depths], *pick)
        axes.set_xlabel("")
        axes.set_ylim(0, 1.08)
        found.append(
            _picture(
                figure,
                "success by depth",
                "Depth 0: the docstring says all. Deeper tasks refer to "
                "helpers in other files, which must be read and worked in.",
            )
        )
    if before.get("pass_at_k") or after.get("pass_at_k"):
        figure, axes = _axes("pass@k", "k samples", "share of tasks solved at least once")
        for part, colour, label, style in (
            (before, BEFORE, "before RL", "s-"),
            (after, AFTER, "after RL", "o-"),
        ):
            values = [_triple(value) for value in part.get("pass_at_k") or []]
            if values and all(values):
                axes.plot(
                    range(1, len(values) + 1),
                    [value[0] for value in values],
                    style,
                    color=colour,
                    label=label,
                    linewidth=1.8,
                    markersize=4,
                )
        axes.set_ylim(0, 1.02)
        axes.legend(frameon=False, loc="lower right")
        found.append(
            _picture(
                figure,
                "pass at k before and after RL",
                "The left end is what one try gives, the right "
                "end what the policy can reach. Curves that meet at the right: RL sharpened; a gap that "
                "stays: RL widened.",
            )
        )
    return found


def _speculative_pictures(result: dict) -> list[str]:
    speculative = result.get("speculative") or {}
    acceptance = [triple[0] for triple in map(_triple, speculative.get("acceptance") or []) if triple]
    if not acceptance:
        return []
    figure, axes = _axes("Speculative decoding: acceptance", "", "share of drafted tokens kept")
    axes.bar(range(len(acceptance)), acceptance, 0.55, color=BLUE)
    for x, value in enumerate(acceptance):
        axes.text(x, value + 0.01, f"{value:.2f}", ha="center", va="bottom", fontsize=9)
    axes.set_xticks(range(len(acceptance)), [f"depth {depth + 1}" for depth in range(len(acceptance))])
    axes.set_ylim(0, 1.08)
    told = f"Speed-up over plain cached decoding: {_interval(speculative.get('speedup'), '{:.2f}')}×"
    plain, fast = (speculative.get(f"{kind}_tokens_per_s") for kind in ("plain", "speculative"))
    if _triple(plain) and _triple(fast):
        told += f" ({_triple(plain)[0]:.0f} → {_triple(fast)[0]:.0f} tokens/s at batch 1)"
    if _triple(speculative.get("tokens_per_cycle")):
        told += f", {_triple(speculative['tokens_per_cycle'])[0]:.2f} tokens per pass of the model"
    share = _triple(speculative.get("identical"))
    same = f" Greedy text was the same with and without drafts in {share[0]:.1%} of the tasks." if share else ""
    return [
        _picture(
            figure,
            "acceptance by depth",
            told + ". Each further token is kept less often." + same,
        )
    ]


def _ways_table(result: dict) -> str:
    """Ways of speculative decoding side by side."""

    def shares(values: Any) -> str:
        return " / ".join(f"{value:.2f}" for value in values or []) or "–"

    rows = [
        [
            name,
            _interval(way.get("speedup"), "{:.2f}"),
            _interval(way.get("speedup_with_environment"), "{:.2f}"),
            _interval(way.get("tokens_per_cycle"), "{:.2f}"),
            shares(way.get("acceptance")),
            shares(way.get("recall_acceptance")),
            _interval(way.get("retracted"), "{:.1%}"),
            _interval(way.get("identical"), "{:.1%}"),
        ]
        for name, way in ((result.get("speculative") or {}).get("ways") or {}).items()
    ]
    if not rows:
        return ""
    words = (
        "Speculative decoding at batch 1, times as fast as plain decoding of the same rollouts: median of "
        "the rounds, and their range. mtp: drafts of the layers; recall: a turn opens with what last "
        "followed the same tokens; ahead: a turn is carried out, in an environment that can be forked, before its "
        "last drafts are verified."
    )
    header = ["drafts", "speed-up", "with environment", "tokens per pass", "kept, by depth", "kept, recalled"]
    return f"<p>{words}</p>" + _table([*header, "turns taken back", "same text"], rows)


def _time_picture(seconds: dict[str, float]) -> list[str]:
    order = [name for name in STAGES if name in seconds]
    names = order + [name for name in seconds if name not in order]
    if not names:
        return []
    figure, axes = _axes("Where the time went", "seconds", "", (5.0, 0.7 + 0.36 * len(names)))
    axes.grid(False)
    axes.barh(names[::-1], [seconds[name] for name in names[::-1]], color=SKY)
    for place, name in enumerate(names[::-1]):
        axes.text(seconds[name], place, f" {seconds[name]:.0f}", va="center", fontsize=9)
    axes.margins(x=0.12)
    return [
        _picture(
            figure,
            "seconds by stage",
            f"Together {sum(seconds.values()) / 60:.1f} minutes, interruptions left out.",
        )
    ]


# ---------------------------------------------------------------------------------------------------- page

_STYLE = """
:root{color-scheme:light}*{box-sizing:border-box}
body{margin:0;font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
color:#1b2733;background:#f5f7f9}
main{max-width:1060px;margin:0 auto;padding:24px 16px 64px}
h1{font-size:1.7rem;line-height:1.2;margin:.2em 0}h2{font-size:1.2rem;margin:2.2em 0 .7em}
p{max-width:70ch}.lead{color:#4a5a6a;margin-top:.2em}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:20px 0}
.card,figure,.box{background:#fff;border:1px solid #dfe5ea;border-radius:10px}
.card{padding:12px 14px}.card b{display:block;font-size:1.4rem;line-height:1.25}
.card span{color:#4a5a6a;font-size:.86rem}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,440px),1fr));gap:16px}
figure{margin:0;padding:12px}figure img{width:100%;height:auto;display:block}
figcaption{font-size:.9rem;color:#38485a;margin-top:6px}
.box{overflow-x:auto;padding:4px 12px}
table{border-collapse:collapse;width:100%;font-size:.92rem}
th,td{text-align:left;padding:7px 14px 7px 0;border-bottom:1px solid #eaeef2;vertical-align:top}
tr:last-child td{border-bottom:0}td.n{font-variant-numeric:tabular-nums;white-space:nowrap}
pre{background:#fff;border:1px solid #dfe5ea;border-radius:10px;padding:12px;overflow-x:auto;
white-space:pre-wrap;overflow-wrap:anywhere;font:.84rem/1.5 ui-monospace,SFMono-Regular,Menlo,monospace}
details{margin:8px 0}summary{cursor:pointer}.note{color:#4a5a6a;font-size:.9rem}
@media(max-width:480px){main{padding:16px 12px 48px}h1{font-size:1.4rem}figure{padding:8px}
th,td{padding-right:10px}table.wide td.n{white-space:normal}}
"""


def _page(record: dict, metrics: dict[str, list[dict]]) -> str:
    stages = record["stages"]
    result = _evaluation(record)
    parts = [f"<h1>{_title(record)}</h1>", f'<p class="lead">{_machine_words(record)}</p>', _cards(record)]
    parts += _section("Before and after", [_before_after_table(record)], _eval_pictures(result))
    parts += _section("Reinforcement learning", [], _rl_pictures(metrics))
    parts += _section(
        "Continued pretraining",
        [_data_words(stages.get("data", {})), _codebase_table(result)],
        _cpt_pictures(metrics),
    )
    parts += _section(
        "Multi-token prediction",
        [_ways_table(result)],
        _mtp_pictures(metrics) + _speculative_pictures(result),
    )
    parts += _section("A rollout", _examples(result), [])
    parts += _section("The run", [], _time_picture(record["seconds"]))
    missing = [name for name in STAGES if name not in stages]
    if missing:
        parts.append(f'<p class="note">Not finished when this was written: {", ".join(missing)}.</p>')
    settings = html.escape(json.dumps(record.get("config"), indent=1))
    parts.append(f"<details><summary>Settings</summary><pre>{settings}</pre></details>")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>etude: {_title(record)}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{_STYLE}</style></head>'
        f"<body><main>\n" + "\n".join(filter(None, parts)) + "\n</main></body></html>\n"
    )


def _title(record: dict) -> str:
    name = html.escape(str(record.get("technique") or "run"))
    return "The recipe, played small" if name == "recipe" else name


def _machine_words(record: dict) -> str:
    machine = record.get("machine") or {}
    seed = (record.get("config") or {}).get("seed")
    words = [
        f"{machine.get('cpu')}, {machine.get('cores')} cores" if machine.get("cpu") else "",
        f"Python {machine['python']}" if machine.get("python") else "",
        f"torch {machine['torch']}" if machine.get("torch") else "",
        f"seed {seed}" if seed is not None else "",
        f"commit {machine['commit']}" if machine.get("commit") else "",
    ]
    return html.escape(" · ".join(filter(None, words)))


def _cards(record: dict) -> str:
    """The few numbers that a reader wants first."""
    result = _evaluation(record)
    before, after = (result.get(key) or {} for key in ("before", "after"))
    cards = []
    for key, name in (
        ("success", "sampled success, before → after RL"),
        ("best_of_8", "best of 8, before → after RL"),
    ):
        if _triple(before.get(key)) and _triple(after.get(key)):
            cards.append((f"{_triple(before[key])[0]:.2f} → {_triple(after[key])[0]:.2f}", name))
    speedup = _triple((result.get("speculative") or {}).get("speedup"))
    if speedup:
        cards.append((f"{speedup[0]:.2f}×", "speculative over plain decoding"))
    codebase = result.get("codebase") or []
    if codebase and codebase[-1].get("perplexity") is not None:
        cards.append((f"{codebase[-1]['perplexity']:.1f}", "codebase perplexity, final"))
    if record.get("total_seconds"):
        cards.append((f"{record['total_seconds'] / 60:.1f} min", "from real code to this page"))
    if record.get("peak_memory_gib"):
        cards.append((f"{record['peak_memory_gib']:.1f} GiB", "memory at its peak"))
    if not cards:
        return ""
    return (
        '<div class="cards">'
        + "".join(f'<div class="card"><b>{value}</b><span>{name}</span></div>' for value, name in cards)
        + "</div>"
    )


def _section(title: str, blocks: list[str], figures: list[str]) -> list[str]:
    blocks = [block for block in blocks if block]
    if not blocks and not figures:
        return []
    grid = f'<div class="grid" style="margin-top:16px">{"".join(figures)}</div>' if figures else ""
    return [f"<h2>{title}</h2>", *blocks, grid]


def _table(header: list[str], rows: list[list[str]]) -> str:
    rows = [[cell.replace(", ", ",\u00a0") for cell in row] for row in rows]  # an interval stays on one line
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>"
        + "".join(f"<td{' class=n' if i else ''}>{html.escape(cell)}</td>" for i, cell in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return f'<div class="box"><table class="wide"><tr>{head}</tr>{body}</table></div>'


def _before_after_table(record: dict) -> str:
    rows = before_after(record)
    result = record["stages"].get("eval", {})
    if not rows:
        return ""
    words = (
        f"{result['tasks']} held-out tasks, {result.get('samples', '?')} samples each; "
        if result.get("tasks")
        else ""
    )
    return f"<p>{html.escape(words)}brackets are 95% bootstrap intervals over tasks.</p>" + _table(
        ["", "before RL", "after RL", "difference"], [list(row) for row in rows]
    )


def _data_words(data: dict) -> str:
    if not data:
        return ""
    skipped = {reason: count for reason, count in (data.get("skipped") or {}).items() if count}
    heldout = data.get("heldout") or {}
    words = [
        f"{data['files']:,} files" if "files" in data else "",
        f"{data['tokens']:,} tokens" if "tokens" in data else "",
        f"a vocabulary of {data['vocab_size']:,}" if "vocab_size" in data else "",
        f"{data['world_documents']:,} documents of the small world" if "world_documents" in data else "",
        f"held out: {heldout.get('name')} ({heldout.get('files')} files)" if heldout.get("name") else "",
        "skipped: " + ", ".join(f"{count} {reason}" for reason, count in skipped.items()) if skipped else "",
    ]
    return f"<p>The corpus: {html.escape('; '.join(filter(None, words)))}.</p>"


def _codebase_table(result: dict) -> str:
    rows = [
        [
            str(row.get("checkpoint", "?")),
            _interval(row.get("perplexity"), "{:.2f}"),
            _interval(row.get("bits_per_byte"), "{:.3f}"),
        ]
        for row in result.get("codebase") or []
    ]
    return _table(["checkpoint", "codebase perplexity", "bits per byte"], rows) if rows else ""


def _examples(result: dict) -> list[str]:
    found = []
    for example in (result.get("examples") or [])[:4]:
        transcript = example.get("transcript", "")
        if not isinstance(transcript, str):
            transcript = "\n".join(map(str, transcript))
        label = "solved" if example.get("success") else "not solved"
        found.append(
            f"<details{' open' if not found else ''}><summary><b>{label}</b>: "
            f"{html.escape(str(example.get('prompt', '')).strip())}</summary>"
            f"<pre>{html.escape(transcript)}</pre></details>"
        )
    return found
