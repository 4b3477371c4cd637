"""Low precision: conversion of a number to a format and back, bit by bit; the effect of an outlier on other numbers and
on earlier tokens."""

import html
import math
from collections.abc import Callable
from functools import lru_cache

import streamlit as st
import torch
from torch import Tensor

from etude.explorer.charts.chart import Axis, chart, drawing, lines, points
from etude.explorer.page import COLOURS, Page, folded
from etude.explorer.pages.number_formats import FORMS, Way, bits_of, fields, grid, near, reading, verdict, way
from etude.explorer.spans import exact, metrics, tint
from ref import formats, quant

COMPANIONS = (0.0, 0.01, 0.1, 1.0, 2.0, 6.0, 10.0, 100.0, 1000.0, 1e6)
OUTLIERS = (1.0, 3.0, 10.0, 30.0, 100.0, 1e3, 1e4, 1e5, 1e6)
TOKENS, WIDTH, AT = 8, 64, 5
"""The batch of the second half, and the place of the outlier in its last token."""
DEFAULT_NUMBER = "0.3"
"""The number that the page begins with, and shows for a link that holds none."""
COLUMNS = (("sign", "red", "solid"), ("exponent", "blue", "double"), ("mantissa", "green", "dashed"))
SHARED: dict[str, Callable[[Tensor], Tensor]] = {
    "FP8, one scale per tensor": lambda x: round_fp8(x, len(x), x.shape[1]),
    "FP8, one per token": lambda x: round_fp8(x, 1, x.shape[1]),
    "FP8, one per 16": lambda x: round_fp8(x, 1, 16),
    "MXFP8, one per 32": lambda x: quant.rounded(x, "mxfp8"),
    "NVFP4, per tensor and 16": lambda x: quant.rounded(x, "nvfp4-tensor"),
    "NVFP4, per token and 16": lambda x: quant.rounded(x, "nvfp4-token"),
}
"""What shares a scale, and a matrix rounded in that way."""
GROUPS = ("earlier tokens", "rest of its token", "its block of 16")
LARGE = 1e6
"""The outlier with which the page begins: too large for every format's scales, so that the lines of the picture
part."""


def round_fp8(x: Tensor, rows: int, columns: int) -> Tensor:
    return quant.blockwise_fp8_dequantize(*quant.blockwise_fp8_quantize(x, (rows, columns)), (rows, columns))


def parse_number(text: str) -> float | None:
    """The number that somebody typed, which may be inf or nan; None if it is none."""
    try:
        return float(text.strip().replace("−", "-"))
    except ValueError:
        return None


@lru_cache(16)
def batch(outlier: float, seed: int) -> Tensor:
    """Activations [TOKENS, WIDTH] with standard deviation one, and one number of this size in the last token."""
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))
    x[-1, AT] = outlier
    return x


def make_groups() -> dict[str, Tensor]:
    """The numbers that may suffer, each group a mask [TOKENS, WIDTH]."""
    row, column = torch.meshgrid(torch.arange(TOKENS), torch.arange(WIDTH), indexing="ij")
    last = row == TOKENS - 1
    return dict(zip(GROUPS, (~last, last & (column >= 16), last & (column < 16) & (column != AT)), strict=True))


@lru_cache(128)
def payers(outlier: float, seed: int) -> list[dict]:
    """One row for each way to share a scale: the error of each group relative to its size, the share of its numbers
    that become zero with the outlier and without it, and what of the earlier tokens is other than it was without the
    outlier."""
    x, calm_batch = batch(outlier, seed), batch(1.0, seed)
    weight = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed + 1)) / WIDTH**0.5
    rows = []
    for name, rounding in SHARED.items():
        rounded_batch, rounded_calm = rounding(x), rounding(calm_batch)
        row: dict = {"scale": name, "past numbers that change": int((rounded_batch != rounded_calm)[:-1].sum())}
        for group, mask in make_groups().items():
            row[f"error, {group}"] = ((rounded_batch - x)[mask].norm() / x[mask].norm()).item()
            row[f"lost, {group}"] = (rounded_batch[mask] == 0).double().mean().item()
            row[f"lost without, {group}"] = (rounded_calm[mask] == 0).double().mean().item()
        row["past outputs move by"] = (rounded_batch @ weight - rounded_calm @ weight)[:-1].abs().max().item()
        rows.append(row)
    return rows


def format_lost_share(row: dict, group: str) -> str:
    """Which share of a group becomes zero without the outlier, and with it."""
    calm_share, outlier_share = row[f"lost without, {group}"], row[f"lost, {group}"]
    return exact(outlier_share) if calm_share == outlier_share == 0 else f"{calm_share:.1%} → {outlier_share:.1%}"


def render_cells(layout: str, code: int) -> str:
    """A code as boxes, one for each bit."""
    cell_spans = []
    for (name, colour, line), bits in zip(COLUMNS, fields(layout, code), strict=True):
        style = f"{tint(colour, 0.18)};border-bottom:3px {line} {COLOURS[colour]}"
        boxes = "".join(f'<span style="{style};padding:0 .28em;margin-right:1px">{bit}</span>' for bit in bits)
        cell_spans.append(
            f'<span title="{name}" class="{name}" '
            f'style="margin-right:.4em;display:inline-flex;flex-wrap:wrap">{boxes}</span>'
            if bits
            else ""
        )
    return f"<span style=\"font-family:'Source Code Pro',monospace\">{''.join(cell_spans)}</span>"


def render_step(label: str, content: str, words: str) -> str:
    """One step of the way: what it is called, what it shows (HTML), and what is to be said of it."""
    remark = f"<div>{html.escape(words)}</div>" if words else ""
    return (
        '<div style="display:flex;flex-wrap:wrap;column-gap:.8rem;margin-bottom:.55rem">'
        f'<div style="flex:0 0 9rem;opacity:.75">{html.escape(label)}</div><div style="flex:1 1 '
        f'14rem">{content}{remark}</div></div>'
    )


def render_steps(conversion: Way) -> str:
    """The way of a number as HTML."""
    bits, code = bits_of(torch.tensor(conversion.number)), conversion.code
    parts = [
        render_step(
            "The number, float32",
            render_cells("float32", bits),
            f"{conversion.number:.9g} = {reading('float32', bits)}",
        )
    ]
    parts += [
        render_step(f"Scale of its {owner}, {layout}", render_cells(layout, scale_code), f"{size:.6g}")
        for owner, layout, scale_code, size in conversion.scales
    ]
    if conversion.scales:
        parts.append(render_step("Number over scale", f"{conversion.quotient:.9g}", ""))
    parts.append(render_step("Rounded", render_line(conversion), verdict(conversion)))
    parts.append(
        render_step(
            f"Code, {conversion.layout}",
            render_cells(conversion.layout, code),
            f"{code:#x}: {conversion.rounded:g} = {reading(conversion.layout, code)}",
        )
    )
    times = (
        f"{conversion.rounded:g} · {' · '.join(f'{size:.4g}' for *_, size in conversion.scales)}"
        if conversion.scales
        else ""
    )
    parts.append(render_step("What comes back", f"<b>{conversion.back:.9g}</b>", times))
    return "".join(parts)


def render_line(conversion: Way) -> str:
    """The format's values around what is rounded, to scale, as HTML; the number is a triangle, what it becomes a thick
    line."""
    values = near(conversion)
    low, high = values[0], values[-1]
    marks = []
    for value in values:
        is_rounded = value == conversion.rounded
        style = (
            f"border-left:{'4px' if is_rounded else '1px'} solid "
            f"{COLOURS['blue'] if is_rounded else 'currentColor'};height:1.5em"
        )
        percent = 100 * (value - low) / (high - low)
        marks.append(
            f'<span title="{value:.9g}" style="position:absolute;left:{percent:.2f}%;top:.9em;{style}"></span>'
        )
        label = f"<b>{value:.4g}</b>" if is_rounded else f"{value:.4g}"
        marks.append(
            f"<span "
            f'style="position:absolute;left:{percent:.2f}%;top:3.1em;transform:translateX(-50%);font-size:.75em">'
            f"{label}</span>"
        )
    if math.isfinite(conversion.quotient):
        percent = 100 * min(max((conversion.quotient - low) / (high - low), 0), 1)
        style = f"position:absolute;left:{percent:.2f}%;top:-.2em;transform:translateX(-50%);color:{COLOURS['orange']}"
        marks.append(f'<span title="{conversion.quotient:.9g}" style="{style}">▼</span>')
    return f'<div style="position:relative;height:3.4em;margin:0 2.2em">{"".join(marks)}</div>'


def render_heat(x: Tensor, rounded_batch: Tensor) -> str:
    """The batch as HTML, a row for each token: the stronger its colour, the more of a number is gone; what became zero
    is crossed out."""
    cell_spans = []
    for row, (numbers, rounded_numbers) in enumerate(zip(x.tolist(), rounded_batch.tolist(), strict=True)):
        for column, (original, rounded) in enumerate(zip(numbers, rounded_numbers, strict=True)):
            loss_share = min(abs(rounded - original) / abs(original), 1.0) if original else 0.0
            style = (
                f"{tint('orange', loss_share**0.5)};"
                f"outline:{'2px solid' if (row, column) == (TOKENS - 1, AT) else '0'} {COLOURS['red']}"
            )
            title = f"token {row + 1}, number {column + 1}: {original:.4g} becomes {rounded:.4g}"
            cell_spans.append(
                f'<span title="{title}" '
                f'style="{style};text-align:center;overflow:hidden">{"" if rounded else "×"}</span>'
            )
    grid = (
        f"display:grid;grid-template-columns:repeat({WIDTH},1fr);grid-auto-rows:1.1em;gap:1px;"
        "font-size:.7rem;line-height:1.1em"
    )
    return f'<div class="heat" style="{grid}">{"".join(cell_spans)}</div>'


def draw() -> None:
    col1, col2, col3, col4 = st.columns(4)
    text = col1.text_input(
        "Number", DEFAULT_NUMBER, 40, key="number", bind="query-params", help="Also −0, inf and nan."
    )
    form = col2.selectbox("Format", FORMS, list(FORMS).index("NVFP4"), key="format", bind="query-params")
    has_scale = form in ("FP8 E4M3, scaled", "MXFP8", "NVFP4")
    block = col3.select_slider(
        "Largest neighbour in its block",
        COMPANIONS,
        1.0,
        key="neighbour",
        bind="query-params",
        disabled=not has_scale,
        format_func="{:g}".format,
    )
    token = col4.select_slider(
        "Largest elsewhere in its token",
        COMPANIONS,
        2.0,
        key="elsewhere",
        bind="query-params",
        disabled=form != "NVFP4",
        format_func="{:g}".format,
    )
    value = parse_number(text)
    if value is None:
        st.warning(f"That is no number; the page shows {DEFAULT_NUMBER}.")
    conversion = way(float(DEFAULT_NUMBER) if value is None else value, form, block, token)
    st.caption(
        f"{form}: {FORMS[form][1]} Boxes are bits: "
        + ", ".join(f"{name} ({kind} line)" for name, _, kind in COLUMNS)
        + "."
    )
    error = conversion.back - conversion.number
    metrics(
        ("Comes back as", f"{conversion.back:.6g}", f"The number itself is {conversion.number:.9g} in float32."),
        ("Error", exact(error), "The value that comes back, minus the number."),
        (
            "Relative error",
            exact(abs(error / conversion.number)) if conversion.number and math.isfinite(error) else "–",
            "Of the number.",
        ),
        (
            "Values of the format",
            f"{len(grid(conversion.layout)):,}",
            "Finite ones, before the scale; −0 and 0 are one.",
        ),
    )
    st.html(f'<div style="font-size:.95rem;line-height:1.6">{render_steps(conversion)}</div>')
    st.subheader("The effect of one outlier")
    show_outlier_section()


def show_outlier_section() -> None:
    """The second half of the page: a batch with an outlier in its last token."""
    col1, col2, col3 = st.columns([2, 2, 1])
    outlier = col1.select_slider(
        "One number of the last token; others: about 1",
        OUTLIERS,
        LARGE,
        key="outlier",
        bind="query-params",
        format_func="{:g}".format,
    )
    scale_name = col2.selectbox("What shares a scale", SHARED, 4, key="shared", bind="query-params")
    seed = col3.slider("Seed of the batch", 0, 20, 0, key="batch-seed", bind="query-params")
    rows = payers(outlier, seed)
    row = next(row for row in rows if row["scale"] == scale_name)
    changed, past = row["past numbers that change"], (TOKENS - 1) * WIDTH
    metrics(
        *(
            (
                f"Lost, {group}",
                format_lost_share(row, group),
                "Share of these numbers that become zero: with 1 in the outlier's place → with the outlier.",
            )
            for group in GROUPS
        ),
        (
            "Past numbers that change",
            f"{changed} of {past}" if changed else "exactly 0",
            "Numbers of earlier tokens that the outlier changes.",
        ),
        (
            "Past outputs move by",
            exact(row["past outputs move by"]),
            "Largest change of an earlier token's output, the product with a weight matrix. Outputs have a standard "
            "deviation of about 1.",
        ),
    )
    x = batch(outlier, seed)
    st.caption("Lost: the share of numbers that become zero, with 1 in the outlier's place → with the outlier.")
    st.html(render_heat(x, SHARED[scale_name](x)))
    st.caption(
        "Each row is a token, the last one at the bottom; the outlier is framed. Colour: relative error of a "
        "number; ×: it became zero."
    )
    group = st.radio("Error of", GROUPS, key="whose", bind="query-params", horizontal=True)
    sweep = [
        {"outlier": size, "scale": payer["scale"], "error": payer[f"error, {group}"]}
        for size in OUTLIERS
        for payer in payers(size, seed)
    ]
    chart(
        drawing(
            Axis("size of the outlier", log=True),
            Axis("error over size", log=True),
            lines(sweep, "outlier", "error", "scale"),
            points(sweep, "outlier", "error", "scale"),
        ),
        "outlier-errors",
        sweep,
        f"Error over size of the numbers, {group}, for each way to share a scale.",
    )
    folded(rows, "outlier", "Errors and lost numbers by scale, at this outlier")


PAGE = Page(
    name="low-precision",
    title="Low precision",
    says="Four or eight bits per number are enough if a block of numbers shares a scale. The page converts a number "
    "to a format and back, bit by bit, and shows the errors of all numbers that share a scale with a large one.",
    formula=r"\begin{gathered}\underbrace{x \approx \mathrm{value}\cdot 2^{\mathrm{byte}-127}}_{\text{MXFP8}} \\"
    r"\underbrace{x \approx \mathrm{value}\cdot \mathrm{block}\cdot s,\quad s = "
    r"\frac{\max|x|}{448\cdot 6}}_{\text{NVFP4}}\end{gathered}",
    symbols={
        "x": "the number",
        r"\mathrm{value}": "its code's value: E4M3 in MXFP8, E2M1 in NVFP4",
        r"\mathrm{byte}": "E8M0 scale of a block of 32 numbers",
        r"\mathrm{block}": "E4M3 scale of a block of 16 numbers",
        "s": "float32 scale of a token; 448 and 6 are the largest values of E4M3 and E2M1",
    },
    question="One number of the last token is far larger than all others. Under which scales do tokens before "
    "it change? From which size on are "
    "they lost?",
    look="With a scale per tensor a large number in the last token changes numbers of tokens before it, in spite of "
    "the causal mask; in an inference engine, another request of the batch has the same effect. With a scale per "
    "token or per block exactly none change. At a hundred the errors are no larger than before, because the exponent "
    "range of E4M3 is wide enough; at a million most numbers are lost.",
    draw=draw,
    code=(quant.mxfp8_quantize, quant.nvfp4_quantize, formats.e4m3_encode, formats.e2m1_encode),
    technique="quant",
)
