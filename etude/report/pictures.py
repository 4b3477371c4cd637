"""The report's pictures: functions from metrics or results to HTML figures with embedded pictures."""

from __future__ import annotations

import base64
import html
import io
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import LogLocator, NullFormatter

from etude.report.record import STAGES, as_triple, best_of, in_words, joined_lines, points_of, smoothed

# Okabe and Ito's colours: people with any colour vision can tell them apart.
BLUE, ORANGE, GREEN, PURPLE, SKY, RED = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"
BEFORE, AFTER = "#9AA5B1", BLUE


def make_axes(title: str, x: str, y: str, size: tuple[float, float] = (5.0, 3.1)) -> tuple[Any, Any]:
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E5E8EB", linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def embedded(figure: Any, alt: str, words: str) -> str:
    """An HTML figure with an embedded picture and a caption."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=144, metadata={"Software": None})
    plt.close(figure)
    data = base64.b64encode(buffer.getvalue()).decode()
    return (
        f'<figure><img alt="{html.escape(alt)}" '
        f'src="data:image/png;base64,{data}"><figcaption>{words}</figcaption></figure>'
    )


def _format_tokens_axis(axes: Any) -> None:
    axes.xaxis.set_major_formatter(
        lambda value, _: f"{value / 1e6:g}M" if abs(value) >= 1e6 else f"{value / 1e3:g}k" if value else "0"
    )


def _plot_line(
    axes: Any,
    lines: list[dict],
    y: str,
    colour: str,
    label: str | None,
    x: str = "step",
    smooth: int = 0,
    style: str = "-",
) -> np.ndarray:
    """Draws the smoothed curve over its faint raw points; returns the raw values."""
    xs, ys = points_of(lines, y, x)
    if len(xs):
        if smooth > 1:
            axes.plot(xs, ys, color=colour, alpha=0.25, linewidth=0.8)
        axes.plot(
            xs,
            smoothed(ys, smooth),
            style,
            color=colour,
            label=label,
            linewidth=1.8,
            marker="o" if len(xs) == 1 else None,
        )
    return ys


def cpt_pictures(metrics: dict) -> list[str]:
    (lines, _), figures = joined_lines(metrics, "cpt", "long", "sft"), []
    phases: dict[str | None, str] = {"short": BLUE, "long": ORANGE, "sft": GREEN}
    if len(points_of(lines, "loss")[0]):
        figure, axes = make_axes("Continued pretraining: loss", "tokens", "nats per token")
        for phase in dict.fromkeys(line.get("phase") for line in lines if "loss" in line):
            part = [line for line in lines if line.get("phase") == phase]
            _plot_line(axes, part, "loss", phases.get(phase, PURPLE), phase, "tokens", max(1, len(part) // 25))
        axes.legend(frameon=False, title="phase")
        _format_tokens_axis(axes)
        figures.append(
            embedded(
                figure,
                "loss against tokens by phase",
                "Steep at first, flatter with the decay of the "
                "learning rate. Each phase has its own data, so a jump where the colour changes is "
                "normal: SFT counts action tokens only.",
            )
        )
    xs, ys = points_of(lines, "codebase_ppl", "tokens")
    if len(xs):
        figure, axes = make_axes("Held-out codebase", "tokens", "perplexity per token")
        axes.plot(xs, ys, "o-", color=BLUE, linewidth=1.8, markersize=4)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        _format_tokens_axis(axes)
        figures.append(
            embedded(
                figure,
                "codebase perplexity against tokens",
                f"Perplexity on code that training never "
                f"saw: {ys[0]:.1f} at first, {ys.min():.1f} at its best, {ys[-1]:.1f} at the end. "
                f"It may rise again in the last phase, which trains only on the agent's work.",
            )
        )
    return figures


def mtp_pictures(metrics: dict) -> list[str]:
    figures, colours = [], [BLUE, ORANGE, GREEN, PURPLE, SKY, RED]
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
            "How often a draft layer's first choice is also the main head's. The higher, the more drafts are accepted.",
        ),
    ):
        stage_lines = {stage: [line for line in lines if f"{prefix}_1" in line] for stage, lines in metrics.items()}
        lines, borders = joined_lines(stage_lines, "mtp", "long", "sft", "rl")
        if not lines:
            continue
        figure, axes = make_axes(title, "step", y)
        for depth in range(1, 1 + sum(key.startswith(f"{prefix}_") for key in lines[0])):
            colour, width = colours[(depth - 1) % 6], max(1, len(lines) // 25)
            _plot_line(axes, lines, f"{prefix}_{depth}", colour, f"depth {depth}", smooth=width)
        axes.set_ylim(0, 1.12 * axes.get_ylim()[1])
        for name, border in borders:
            axes.axvline(border, color="#B8C2CC", linewidth=0.8, linestyle=":")
            axes.text(border, 1.0, f" {name}", transform=axes.get_xaxis_transform(), va="top", fontsize=8)
        axes.legend(frameon=False)
        figures.append(embedded(figure, title, words))
    return figures


def rl_pictures(metrics: dict) -> list[str]:
    lines, figures = metrics.get("rl", []), []
    width = max(1, len(lines) // 12)
    if len(points_of(lines, "reward")[0]) or len(points_of(lines, "success")[0]):
        figure, axes = make_axes("RL: reward and success", "step", "mean over the batch")
        _plot_line(axes, lines, "reward", ORANGE, "reward", smooth=width)
        success = _plot_line(axes, lines, "success", BLUE, "success", smooth=width)
        axes.legend(frameon=False)
        tenth = max(1, len(success) // 10)
        success_text = (
            (
                f" Success went from {success[:tenth].mean():.2f} over the first tenth of the steps to "
                f"{success[-tenth:].mean():.2f} over the last."
            )
            if len(success)
            else ""
        )
        figures.append(
            embedded(
                figure,
                "reward and success by RL step",
                "Every step uses new prompts, so memorisation cannot raise this curve. Reward is "
                "success minus the penalties." + success_text,
            )
        )
    for y, title, unit, words in (
        (
            "tokens",
            "RL: rollout length",
            "tokens",
            "The length penalty pulls it down; a crash towards zero would mean that the agent gives up early.",
        ),
        (
            "invalid_calls",
            "RL: invalid calls",
            "per rollout",
            "Calls that the environment could not parse. They cost reward and should not increase.",
        ),
        (
            "kl",
            "RL: distance from the reference",
            "k1, nats",
            "How far the policy has moved from the policy before RL. A slow rise is learning; a jump is trouble.",
        ),
        (
            "nll",
            "RL: entropy, estimated from samples",
            "nats per token",
            "The policy's remaining uncertainty. Near zero it no longer explores.",
        ),
    ):
        if len(points_of(lines, y)[0]):
            figure, axes = make_axes(title, "step", unit)
            _plot_line(axes, lines, y, BLUE, None, smooth=width)
            if y in ("tokens", "invalid_calls", "nll"):
                axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
            figures.append(embedded(figure, title, words))
    return figures


def _plot_bars(axes: Any, names: list[str], before: list, after: list) -> None:
    places = np.arange(len(names))
    for shift, values, colour, label in ((-0.2, before, BEFORE, "before RL"), (0.2, after, AFTER, "after RL")):
        intervals = [(place, as_triple(value)) for place, value in zip(places, values) if as_triple(value)]
        if not intervals:
            continue
        xs = np.array([place for place, _ in intervals]) + shift
        middle, low, high = np.array([triple for _, triple in intervals], dtype=float).T
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


def _describe_change(difference: Any) -> str:
    """Describes a difference as far as its interval allows."""
    triple = as_triple(difference)
    if triple is None:
        return "was not compared"
    value, low, high = triple
    if low > 0:
        return f"rose by {value:.2f} [{low:.2f}, {high:.2f}]"
    if high < 0:
        return f"fell by {-value:.2f} [{-high:.2f}, {-low:.2f}]"
    return f"did not change measurably ({value:+.2f} [{low:+.2f}, {high:+.2f}])"


def _describe_units(result: dict) -> str:
    """What the intervals of an evaluation are over."""
    packages = result.get("packages")
    return f"packages ({len(packages)})" if packages and len(packages) > 1 else f"{result.get('tasks', 'the')} tasks"


DEPTHS = {
    "composition": "Depth 0: the docstring says everything. Deeper tasks refer to helpers in other files, which the "
    "agent must read and use.",
    "multi-hop": "The docstring refers to a file, which refers to a file, and so on to the body. The depth is the "
    "number of references.",
}


def _depth_pictures(parts: list[dict], kind: str) -> list[str]:
    """Success by depth before and after RL, of one kind of task; none without tasks."""
    depths = sorted({*parts[0], *parts[1]})
    if not depths:
        return []
    title = "Sampled success by depth" + (", multi-hop tasks" if kind == "multi-hop" else "")
    figure, axes = make_axes(title, "files that must be read, besides the task's own", "share")
    success_rates = [[(part.get(depth) or {}).get("success") for depth in depths] for part in parts]
    _plot_bars(axes, [f"depth {depth}" for depth in depths], *success_rates)
    axes.set_xlabel("")
    axes.set_ylim(0, 1.08)
    return [embedded(figure, title.lower(), DEPTHS.get(kind, ""))]


def eval_pictures(result: dict) -> list[str]:
    before, after, figures = result.get("before") or {}, result.get("after") or {}, []
    difference, best = result.get("difference") or {}, best_of(result)
    keys = [
        (key, name)
        for key, name in (("success", "sampled"), ("greedy", "greedy"), best)
        if key in before or key in after
    ]
    if keys:
        figure, axes = make_axes("Success on held-out tasks", "", "share of tasks")
        _plot_bars(
            axes, [name for _, name in keys], [before.get(key) for key, _ in keys], [after.get(key) for key, _ in keys]
        )
        axes.set_ylim(0, 1.08)
        figures.append(
            embedded(
                figure,
                "success before and after RL",
                f"Whiskers: 95% bootstrap over "
                f"{_describe_units(result)}. Sampled success {_describe_change(difference.get('success'))}, "
                f"{best[1]} {_describe_change(difference.get(best[0]))}, "
                f"greedy {_describe_change(difference.get('greedy'))}. "
                f"If sampled success rises and {best[1]} does not, RL made likely what was already within reach.",
            )
        )
    kinds = {**(before.get("by_kind") or {}), **(after.get("by_kind") or {})}
    if kinds:
        for kind in kinds:
            figures += _depth_pictures([(part.get("by_kind") or {}).get(kind) or {} for part in (before, after)], kind)
    else:
        figures += _depth_pictures([part.get("by_depth") or {} for part in (before, after)], "composition")
    if before.get("pass_at_k") or after.get("pass_at_k"):
        figure, axes = make_axes("pass@k", "k samples", "share of tasks solved at least once")
        for part, colour, label, style in ((before, BEFORE, "before RL", "s-"), (after, AFTER, "after RL", "o-")):
            values = [as_triple(value) for value in part.get("pass_at_k") or []]
            means = [value[0] for value in values if value]
            if means and len(means) == len(values):
                axes.plot(
                    range(1, len(values) + 1), means, style, color=colour, label=label, linewidth=1.8, markersize=4
                )
        axes.set_ylim(0, 1.02)
        axes.legend(frameon=False, loc="lower right")
        figures.append(
            embedded(
                figure,
                "pass at k before and after RL",
                "The left end is the success of one try, the right "
                "end what the policy can reach. If the curves meet at the right, RL sharpened; if a gap "
                "remains, RL widened.",
            )
        )
    return figures


def speculative_pictures(result: dict) -> list[str]:
    speculative = result.get("speculative") or {}
    acceptance = [triple[0] for triple in map(as_triple, speculative.get("acceptance") or []) if triple]
    if not acceptance:
        return []
    figure, axes = make_axes("Speculative decoding: acceptance", "", "share of drafted tokens kept")
    axes.bar(range(len(acceptance)), acceptance, 0.55, color=BLUE)
    for x, value in enumerate(acceptance):
        axes.text(x, value + 0.01, f"{value:.2f}", ha="center", va="bottom", fontsize=9)
    axes.set_xticks(range(len(acceptance)), [f"depth {depth + 1}" for depth in range(len(acceptance))])
    axes.set_ylim(0, 1.08)
    speed_text = f"Speed-up over plain cached decoding: {in_words(speculative.get('speedup'), '{:.2f}')}×"
    plain, fast = (as_triple(speculative.get(f"{kind}_tokens_per_s")) for kind in ("plain", "speculative"))
    if plain and fast:
        speed_text += f" ({plain[0]:.0f} → {fast[0]:.0f} tokens/s at batch 1)"
    if per_cycle := as_triple(speculative.get("tokens_per_cycle")):
        speed_text += f", {per_cycle[0]:.2f} tokens per pass of the model"
    share = as_triple(speculative.get("identical"))
    identity_text = (
        f" Greedy text was the same with and without drafts in {share[0]:.1%} of the tasks." if share else ""
    )
    return [
        embedded(
            figure, "acceptance by depth", speed_text + ". Later draft tokens are accepted less often." + identity_text
        )
    ]


def time_picture(seconds: dict[str, float]) -> list[str]:
    order = [name for name in STAGES if name in seconds]
    names = order + [name for name in seconds if name not in order]
    if not names:
        return []
    figure, axes = make_axes("Where the time went", "seconds", "", (5.0, 0.7 + 0.36 * len(names)))
    axes.grid(False)
    axes.barh(names[::-1], [seconds[name] for name in names[::-1]], color=SKY)
    for place, name in enumerate(names[::-1]):
        axes.text(seconds[name], place, f" {seconds[name]:.0f}", va="center", fontsize=9)
    axes.margins(x=0.12)
    return [
        embedded(
            figure, "seconds by stage", f"{sum(seconds.values()) / 60:.1f} minutes in total, without interruptions."
        )
    ]
