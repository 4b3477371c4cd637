"""The report of a run: `report.json` with every result, `report.html` with pictures, in one file each.

Shows whatever the stages have left in the run folder, so a run that stopped halfway has half a report. The
page is self-contained: it embeds its pictures and has no scripts.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from etude.report import speed, watched
from etude.report.pictures import (
    cpt_pictures,
    eval_pictures,
    mtp_pictures,
    rl_pictures,
    speculative_pictures,
    time_picture,
)
from etude.report.record import (
    as_triple,
    before_after,
    best_of,
    collect,
    columns,
    describe_failed,
    evaluation_of,
    in_words,
    replace_text,
    stages_of,
)
from kit.disk import read_lines

__all__ = ["before_after", "collect", "write"]


def write(run_root: str | Path, rollouts: Callable[[Path, dict], list[str]] = lambda *_: []) -> tuple[Path, Path]:
    """Writes report.html and report.json into the run folder and returns their paths. `rollouts`: what makes HTML of
    the run's rollouts, from its folder and record (`rollouts.py`, which needs torch, as this file does not)."""
    root = Path(run_root)
    record = collect(root)
    metrics = {path.stem: read_lines(path) for path in sorted((root / "metrics").glob("*.jsonl"))}
    page, data = root / "report.html", root / "report.json"
    replace_text(data, json.dumps(record, indent=1) + "\n")
    replace_text(page, _render_page(record, metrics, rollouts(root, record), speed.read_speed(root)))
    return page, data


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


def _render_page(
    record: dict, metrics: dict[str, list[dict]], rollouts: list[str], step_lines: dict[str, list[dict]]
) -> str:
    stages = record["stages"]
    result = evaluation_of(record)
    parts = [
        f"<h1>{_format_title(record)}</h1>",
        f'<p class="lead">{_describe_machine(record)}</p>',
        _render_cards(record),
    ]
    parts += _render_section("Before and after", [_render_before_after(record)], eval_pictures(result))
    failed = describe_failed(record, metrics.get("rl", []))
    parts += _render_section("Reinforcement learning", [f"<p>{failed}.</p>" if failed else ""], rl_pictures(metrics))
    parts += _render_section(
        "What was watched for in RL", [_render_watched(metrics)], watched.picture(metrics.get("rl", []))
    )
    parts += _render_section("Tasks", [_describe_tasks(stages.get("tasks", {}))], [])
    parts += _render_section(
        "Continued pretraining" if "cpt" in stages or "tasks" not in stages else "Supervised fine-tuning",
        [_describe_data(stages.get("data", {})), _render_codebase(result)],
        cpt_pictures(metrics),
    )
    parts += _render_section(
        "Multi-token prediction", [_render_ways(result)], mtp_pictures(metrics) + speculative_pictures(result)
    )
    parts += _render_section("Rollouts", rollouts, [])
    parts += _render_section("The run", [], time_picture(record["seconds"]))
    parts += _render_section("Speed", [_render_speed(step_lines)], speed.picture(step_lines))
    missing = [name for name in stages_of(record) if name not in stages]
    if missing:
        parts.append(f'<p class="note">Unfinished when this was written: {", ".join(missing)}.</p>')
    settings = html.escape(json.dumps(record.get("config"), indent=1))
    parts.append(f"<details><summary>Settings</summary><pre>{settings}</pre></details>")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>etude: {_format_title(record)}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{_STYLE}</style></head>'
        f"<body><main>\n" + "\n".join(filter(None, parts)) + "\n</main></body></html>\n"
    )


def _format_title(record: dict) -> str:
    name = html.escape(str(record.get("technique") or "run"))
    return {"recipe": "The recipe at small scale", "recipe full": "The recipe at full scale"}.get(name, name)


def _describe_machine(record: dict) -> str:
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


def _render_cards(record: dict) -> str:
    """The few numbers that a reader wants to see first."""
    result = evaluation_of(record)
    before, after = (result.get(key) or {} for key in ("before", "after"))
    cards = []
    for key, name in (("success", "sampled success"), ("greedy", "greedy success"), best_of(result)):
        if (first := as_triple(before.get(key))) and (last := as_triple(after.get(key))):
            cards.append((f"{first[0]:.2f} → {last[0]:.2f}", f"{name}, before → after RL"))
    speedup = as_triple((result.get("speculative") or {}).get("speedup"))
    if speedup:
        cards.append((f"{speedup[0]:.2f}×", "speculative decoding speed-up"))
    codebase = result.get("codebase") or []
    if codebase and codebase[-1].get("perplexity") is not None:
        cards.append((f"{codebase[-1]['perplexity']:.1f}", "codebase perplexity, final"))
    if record.get("total_seconds"):
        cards.append((f"{record['total_seconds'] / 60:.1f} min", "from real code to this page"))
    if record.get("peak_memory_gib"):
        cards.append((f"{record['peak_memory_gib']:.1f} GiB", "peak memory"))
    if not cards:
        return ""
    return (
        '<div class="cards">'
        + "".join(f'<div class="card"><b>{value}</b><span>{name}</span></div>' for value, name in cards)
        + "</div>"
    )


def _render_section(title: str, blocks: list[str], figures: list[str]) -> list[str]:
    blocks = [block for block in blocks if block]
    if not blocks and not figures:
        return []
    grid = f'<div class="grid" style="margin-top:16px">{"".join(figures)}</div>' if figures else ""
    return [f"<h2>{title}</h2>", *blocks, grid]


def _render_table(header: list[str], rows: list[list[str]]) -> str:
    rows = [[cell.replace(", ", ",\u00a0") for cell in row] for row in rows]  # an interval stays on one line
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>"
        + "".join(f"<td{' class=n' if i else ''}>{html.escape(cell)}</td>" for i, cell in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return f'<div class="box"><table class="wide"><tr>{head}</tr>{body}</table></div>'


def _render_before_after(record: dict) -> str:
    rows = before_after(record)
    result = record["stages"].get("eval", {})
    if not rows:
        return ""
    words = (
        f"{result['tasks']} held-out tasks, {result.get('samples', '?')} samples each; " if result.get("tasks") else ""
    )
    packages = result.get("packages") or []
    unit = "packages" if len(packages) > 1 else "the tasks of one package" if packages else "tasks"
    return f"<p>{html.escape(words)}brackets are 95% bootstrap intervals over {unit}.</p>" + _render_table(
        ["", *columns(record)], [list(row) for row in rows]
    )


def _render_watched(metrics: dict[str, list[dict]]) -> str:
    lines = metrics.get("rl", [])
    rows = watched.rows(lines)
    header = ["", "usual", "at the end", "evidence of a change, nats", "changed"]
    return f"<p>{html.escape(watched.sentence(lines))}</p>" + _render_table(header, rows) if rows else ""


def _render_speed(step_lines: dict[str, list[dict]]) -> str:
    words = (
        "Medians over steps. MFU: FLOPs of the forward and backward passes of the tokens trained on, without what is "
        "recomputed, over what the ranks' peak would do while they train. On a CPU the peak is that of one large "
        "product."
    )
    rows = speed.rows(step_lines)
    return f"<p>{words}</p>" + _render_table(speed.HEADER, rows) if rows else ""


def _describe_data(data: dict) -> str:
    if not data.keys() & {"files", "heldout"}:  # a run on packages without a corpus has neither
        return ""
    skipped = {reason: count for reason, count in (data.get("skipped") or {}).items() if count}
    heldout = data.get("heldout") or {}
    words = [
        f"{data['files']:,} files" if "files" in data else "",
        f"{data['tokens']:,} tokens" if "tokens" in data else "",
        f"{data['epochs']:g} passes over the corpus" if data.get("epochs", 1) > 1 else "",
        f"a vocabulary of {data['vocab_size']:,}" if "vocab_size" in data else "",
        f"{data['world_documents']:,} documents of the small world" if "world_documents" in data else "",
        f"held out: {heldout.get('name')} ({heldout.get('files')} files)" if heldout.get("name") else "",
        "skipped: " + ", ".join(f"{count} {reason}" for reason, count in skipped.items()) if skipped else "",
    ]
    return f"<p>The corpus: {html.escape('; '.join(filter(None, words)))}.</p>"


def _describe_tasks(tasks: dict) -> str:
    """Which packages a run trained on, and which it was evaluated on."""
    if not tasks:
        return ""
    styles = ", ".join(f"{count} {style}" for style, count in (tasks.get("demonstrations") or {}).items())
    words = [
        f"Trained on {tasks.get('training_tasks')} tasks of {', '.join(tasks.get('training_packages') or [])}",
        f"held out: {tasks.get('heldout_tasks')} tasks of {', '.join(tasks.get('heldout_packages') or [])}",
        f"SFT on scripted episodes: {styles}" if styles else "SFT on conversations of a file",
    ]
    return f"<p>{html.escape('; '.join(words))}.</p>"


def _render_codebase(result: dict) -> str:
    rows = [
        [
            str(row.get("checkpoint", "?")),
            in_words(row.get("perplexity"), "{:.2f}"),
            in_words(row.get("bits_per_byte"), "{:.3f}"),
        ]
        for row in result.get("codebase") or []
    ]
    return _render_table(["checkpoint", "codebase perplexity", "bits per byte"], rows) if rows else ""


def _render_ways(result: dict) -> str:
    """Speculative decoding methods side by side."""

    def shares(values: Any) -> str:
        return " / ".join(f"{value:.2f}" for value in values or []) or "–"

    rows = [
        [
            name,
            in_words(way.get("speedup"), "{:.2f}"),
            in_words(way.get("speedup_with_environment"), "{:.2f}"),
            in_words(way.get("tokens_per_cycle"), "{:.2f}"),
            shares(way.get("acceptance")),
            shares(way.get("recall_acceptance")),
            in_words(way.get("retracted"), "{:.1%}"),
            in_words(way.get("identical"), "{:.1%}"),
        ]
        for name, way in ((result.get("speculative") or {}).get("ways") or {}).items()
    ]
    if not rows:
        return ""
    words = (
        "Speed-up of speculative decoding at batch size 1 over plain decoding of the same rollouts: median over "
        "rounds, with their range. mtp: drafts by the MTP layers; recall: each turn opens with the tokens that "
        "last followed the same tokens; ahead: a turn is executed in a forkable environment before its last "
        "drafts are verified."
    )
    header = ["drafts", "speed-up", "with environment", "tokens per pass", "accepted, by depth", "accepted, recalled"]
    return f"<p>{words}</p>" + _render_table([*header, "turns taken back", "same text"], rows)
