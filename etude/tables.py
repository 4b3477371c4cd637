"""The tables of README.md and docs/ that show committed measurements, each made from the file that was measured."""

from __future__ import annotations

import importlib
import io
import statistics
from collections.abc import Iterator
from pathlib import Path

from etude import catalog, full_settings, planning
from kit.disk import read_json, read_toml
from kit.settings import RunError
from sims import gain

__all__ = [
    "bench",
    "by_depth",
    "crowded",
    "decode",
    "delta",
    "explorer",
    "gpu_decode",
    "gpu_step",
    "kernels",
    "measured",
    "perplexity",
    "plan",
    "plan_output",
    "recipe",
    "recipe_plan_output",
    "twins",
]

ROOT = Path(__file__).resolve().parent.parent


def measured(pattern: str) -> list[dict]:
    """The JSON files of results/ that a pattern names. RunError where there is none."""
    found = sorted((ROOT / "results").glob(pattern))
    if not found:
        raise RunError(f"results/{pattern} does not exist: measure first")
    return [read_json(path) for path in found]


def recipe() -> str:
    """What RL gained, by seed, and over the seeds."""
    (found,) = measured("recipe-small.json")
    lines = [gain.table(found), "", "| over the seeds | mean difference ± standard deviation |", "|---|---|"]
    for name, title in gain.FIGURES:
        change = found["over_seeds"][name]["difference"]
        lines.append(f"| {title} | {change['mean']:+.3f} ± {change['sd']:.3f} |")
    first, box = found["runs"][0], found["machine"]
    lines += [
        "",
        f"Seed {first['seed']} took {first['seconds'] / 60:.1f} minutes and {first['peak_memory_gib']:.1f} GiB on {box['cores']} cores "
        f"({box['cpu']}).",
    ]
    return "\n".join(lines)


def by_depth() -> str:
    """Success before → after RL by the files that have to be read, mean over the seeds."""
    (found,) = measured("recipe-small.json")
    lines = ["| helpers to read | sampled | best of 8 | greedy |", "|---|---|---|---|"]
    for depth in found["runs"][0]["before"]["by_depth"]:
        cells = []
        for name in ("success", "best_of_8", "greedy"):
            before, after = (
                sum(run[when]["by_depth"][depth][name]["value"] for run in found["runs"]) / len(found["runs"]) for when in ("before", "after")
            )
            cells.append(f"{before:.2f} → {after:.2f}")
        lines.append(f"| {depth} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def perplexity() -> str:
    """Held-out codebase after each stage, by seed."""
    (found,) = measured("recipe-small.json")
    names = {"mid-cpt": "mid-CPT", "cpt": "long context", "sft": "SFT", "final": "RL"}
    lines = ["| codebase perplexity after | " + " | ".join(names.values()) + " |", "|---" * (len(names) + 1) + "|"]
    for run in found["runs"]:
        values = {c["checkpoint"]: c["perplexity"] for c in run["codebase"]}
        lines.append(f"| seed {run['seed']} | " + " | ".join(f"{values[name]:.0f}" for name in names) + " |")
    return "\n".join(lines)


def decode() -> str:
    """Speculative against plain decoding, by way and seed."""
    (found,) = measured("recipe-small.json")
    ways = {
        "mtp": "drafts of the MTP layers",
        "mtp+recall": "and turns begun with what last followed the same tokens",
        "mtp+recall+ahead": "and turns carried out, in a forked environment, before their last drafts are verified",
    }
    seeds = [f"seed {run['seed']}" for run in found["runs"]]
    lines = [f"| decoding | {' | '.join(seeds)} | tokens a pass | drafts kept, by depth | same text |"]
    lines.append("|---" * (len(seeds) + 4) + "|")
    first = found["runs"][0]["decode"]["ways"]
    for name, title in ways.items():
        speeds = [run["decode"]["ways"][name]["speedup"] for run in found["runs"]]
        cells = [f"{s['median']:.2f}× [{s['low']:.2f}, {s['high']:.2f}]" for s in speeds]
        kept = " ".join(f"{a:.2f}" for a in first[name]["acceptance"])
        same = min(run["decode"]["ways"][name]["identical"] for run in found["runs"])
        lines.append(f"| {title} | {' | '.join(cells)} | {first[name]['tokens_per_cycle']:.2f} | {kept} | {same:.0%} |")
    return "\n".join(lines)


def bench() -> str:
    """Training step beside transformers, by machine."""
    lines = ["| machine | dtype, batches | etude, tokens/s | transformers, tokens/s (its fastest setting) | ratio | over our plain network |"]
    lines.append("|---" * 6 + "|")
    for found in measured("model-*.json"):
        for x in found["results"]:
            rates, fastest = x["tokens_per_second"], x["their_fastest"]
            low, high = x["ratio_middle_half"]
            lines.append(
                f"| {found['machine']['cpu']}, {found['machine']['threads']} threads | {x['dtype']}, "
                f"{'new ones' if x['batches'] == 'new' else 'always one'} | {rates['etude']['median']:,.0f} | "
                f"{rates[fastest]['median']:,.0f} ({fastest.removeprefix('transformers, ')}) | {x['ratio']:.2f} [{low:.2f}, {high:.2f}] | "
                + (f"{x['over_plain']:.2f} |" if "over_plain" in x else "– |")
            )
    return "\n".join(lines)


def crowded() -> str:
    """What a run's parts cost alone, with threads, and beside busy programs, by machine."""
    words = {
        "sampling": "128 rollouts of a step",
        "step": "the step on them",
        "decoding": "decoding 8 tasks",
        "evaluation": "2,400 rollouts",
        "products": "matrix products alone",
    }
    lines = []
    for found in measured("crowded-*.json"):
        lines += [
            f"| {found['machine']['cpu']}, {found['busy']} cores, median of {found['rounds']} | alone | with threads instead | "
            f"beside {found['busy']} busy programs |",
            "|---|---|---|---|",
        ]
        for name, one in found["parts"].items():
            lines.append(
                f"| {words[name]} | {one['alone_s']:.1f} s | {one['threads_s']:.1f} s, {one['faster_than_threads']:.2f} × | "
                f"{one['crowded_s']:.1f} s, {one['slower_in_a_crowd']:.2f} × |"
            )
    return "\n".join(lines)


def explorer() -> str:
    """How long the explorer takes to open its pages and to redraw them, by machine."""
    lines = ["| machine | slowest page, cold | redraw, median of all | median of the slowest control |", "|---|---|---|---|"]
    for found in measured("explorer-*.json"):
        box, pages, controls = found["machine"], found["pages"], found["controls"]
        page, control = max(pages, key=lambda one: one["cold_s"]), max(controls, key=lambda one: one["median_s"])
        lines.append(
            f"| {box['cpu']}, {box['cores']} cores | {page['page']}, of {len(pages)}: {page['cold_s'] * 1e3:.0f} ms "
            f"| {found['median_s'] * 1e3:.0f} ms "
            f"| {control['control']} of {control['page']}, of {len(controls)}: {control['median_s'] * 1e3:.0f} ms |"
        )
    return "\n".join(lines)


def delta() -> str:
    """How fast one core encodes and decodes differences of weights, by machine."""
    lines = []
    for found in measured("delta-*.json"):
        lines += [
            f"| {found['machine']['cpu']}, one core, median of {found['rounds']} | changed | times smaller | encode, GB/s | of XOR's | "
            "decode, GB/s | of XOR's |",
            "|---|---|---|---|---|---|---|",
        ]
        names = {"gap + step": "gap + step", "XOR": "XOR, zstd 1", "all": "all weights, zstd 1"}
        for row in found["rows"]:
            lines.append(
                f"| {names[row['way']]} | {100 * row['share']:.1f}% | {row['times_smaller']:.1f} | {row['encode_gb_s']:.2f} | "
                f"{row['encode_of_XOR']:.2f} | {row['decode_gb_s']:.2f} | {row['decode_of_XOR']:.2f} |"
            )
        loads = sorted(found["load"])
        lines += [
            "",
            f"Digests of the result go at {found['digest_gb_s']:.2f} GB/s. The least ratio to zstd level 1 up to 2% changed is "
            f"{found['least_ratio']:.2f}; the aim was {found['target']}. The machine's load was {loads[0]:.1f} to {loads[-1]:.1f}.",
        ]
    return "\n".join(lines)


def kernels() -> str:
    """What `etude bench kernels` measured, by GPU: each kernel beside what one would otherwise call."""
    lines = []
    for found in measured("kernels-nvidia-*.json"):
        box = found["machine"]
        lines += [
            f"| {box['gpu']}, torch {box['torch']}, Triton {box['triton']}, median of {found['rounds']} | size | ours | speed | times as fast as |",
            "|---|---|---|---|---|",
        ]
        for row in found["results"]:
            for ours in [name for name in row["seconds"] if name.startswith("kernel")]:
                unit = next((unit for unit in ("TB/s", "TFLOP/s") if unit in row), None)
                speed = f"{row[unit][ours]:.3g} {unit}" if unit else f"{1e6 * row['seconds'][ours]:.0f} µs"
                pairs = {name.split(" / ")[1]: three for name, three in row["ratio_and_middle_half"].items() if name.split(" / ")[0] == ours}
                others = "; ".join(f"{name} {middle:.2f} [{low:.2f}, {high:.2f}]" for name, (middle, low, high) in pairs.items())
                lines.append(f"| {row['case']} | {row['size']} | {ours.removeprefix('kernel').strip(', ') or 'kernel'} | {speed} | {others} |")
        right = sum(row["wrong"] is None for row in found["results"])
        lines += ["", f"{right} of {len(found['results'])} cases gave the right result at these sizes, and only those have a speed."]
    return "\n".join(lines)


def gpu_step() -> str:
    """What `etude bench step` measured, by GPU: a training step beside the plan."""
    lines = []
    for found in measured("step-nvidia-*.json"):
        box = found["machine"]
        lines += [
            f"| {box['gpu']}, torch {box['torch']} | step | tokens/s | MFU | launches | plan's time / measured | peak | plan / peak |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for cell in found["cells"]:
            blocks = "recomputed" if cell["formats"]["rematerialise"] else "kept"
            lines.append(
                f"| blocks {blocks}, experts in {cell['formats'].get('experts', cell['dtype'])} | {statistics.median(cell['seconds']):.3f} s | "
                f"{cell['tokens_per_second']:,.0f} | {cell['mfu']:.1%} | {cell['launches']:,} | {cell['planned_over_measured']:.2f} | "
                f"{cell['peak_bytes'] / 1e9:.1f} GB | {cell['planned_over_peak']:.2f} |"
            )
        size = f"{found['parameters'] / 1e9:.1f} B parameters, {found['active'] / 1e9:.2f} B active per token"
        lines += [
            "",
            f"`{found['command']}`: {size}; {found['tokens']:,} tokens in rows of {found['length']:,}, documents of {found['document']:,}; median of "
            f"{found['rounds']} steps.",
        ]
    return "\n".join(lines)


def gpu_decode() -> str:
    """What `etude bench decode` measured, by GPU: both samplers beside the plan."""
    lines = []
    for found in measured("decode-nvidia-*.json"):
        box = found["machine"]
        lines += [f"| {box['gpu']}, torch {box['torch']} | rows | tokens/s, by round | plan's time / measured |", "|---|---|---|---|"]
        for cell in found["cells"]:
            rates = ", ".join(f"{cell['tokens'] / seconds:,.0f}" for seconds in cell["seconds"])
            lines.append(f"| `{cell['sampler']}` | {cell['rows']} | {rates} | {cell['planned_over_measured']:.2f} |")
        lines += ["", f"`{found['command']}`, {found['dtype']}; prompts were read before the clock started."]
    return "\n".join(lines)


def plan_output() -> str:
    """What `etude plan` prints."""
    from rich.console import Console

    text, model, hardware = io.StringIO(), "qwen3_30b_a3b", "h200"
    found = planning.plans(model, [8, 64, 512], cp=2, ep=8, length=32_768, rows=1, hardware=hardware)
    planning.show(found, model, hardware, Console(file=text, width=110, color_system=None))
    return "\n".join(["```", "$ etude plan", *(line.rstrip() for line in text.getvalue().rstrip().split("\n")), "```"])


def recipe_plan_output() -> str:
    """What `etude plan --recipe` prints for the example without its tokenizer."""
    from rich.console import Console

    from etude import prices

    model, hardware, text = "qwen3_30b_a3b", "h200", io.StringIO()
    toml = read_toml(ROOT / "examples" / "qwen3-30b-a3b.toml")
    config = full_settings.settings("recipe", "nccl", {key: value for key, value in toml.items() if key != "study"})
    talk = prices.conversations(config, None)
    found = [prices.prices(config, planning.network_of(model), n, planning.hardware_of(hardware), talk) for n in (8, 64, 512)]
    prices.show(found, config, model, hardware, talk, Console(file=text, width=110, color_system=None))
    command = "$ etude plan --recipe examples/qwen3-30b-a3b.toml"
    return "\n".join(["```", command, *(line.rstrip() for line in text.getvalue().rstrip().split("\n")), "```"])


def kernels_plan_output() -> str:
    """What `etude plan --kernels` prints."""
    from rich.console import Console

    from etude import kernel_costs

    text = io.StringIO()
    kernel_costs.show(Console(file=text, width=110, color_system=None))
    return "\n".join(["```", "$ etude plan --kernels", *(line.rstrip() for line in text.getvalue().rstrip().split("\n")), "```"])


def plan() -> str:
    """What the plan says a step takes, beside what it took, by network and layout."""
    (found,) = measured("plan-*.json")
    lines = ["| network, parameters | dp · cp · ep | predicted | measured | predicted / measured |", "|---|---|---|---|---|"]
    for x in found["steps"]:
        lines.append(
            f"| {x['shape']}, {x['parameters'] / 1e6:.1f} M | {x['dp']} · {x['cp']} · {x['ep']} | {x['predicted_s'] * 1e3:.0f} ms | "
            f"{x['measured_s'] * 1e3:.0f} ms [{x['least_s'] * 1e3:.0f}, {x['most_s'] * 1e3:.0f}] | {x['predicted_s'] / x['measured_s']:.2f} |"
        )
    all_of_it, box = found["predicted_over_measured"], found["machine"]
    lines += [
        "",
        f"{found['ranks']} ranks of one thread each on {box['cpu']}, gloo, median of {found['rounds']} steps with the least and the most; "
        f"predicted over measured: median {all_of_it['median']:.2f}, from {all_of_it['least']:.2f} to {all_of_it['most']:.2f}.",
    ]
    return "\n".join(lines)


def flat(tree: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Dotted key and value of every setting in a tree."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def twins() -> str:
    """Technique by technique: reference, twin, the names that both have, and what its full run trains."""
    rows = ["| technique | reference | twin | names that both have | full run |", "|---|---|---|---|---|"]
    for technique in catalog.TECHNIQUES:
        if technique.module and technique.ref and technique.scaled:
            links = [f"[{path}]({path})" for path in (technique.ref, technique.scaled)]
            names = ", ".join(f"`{name}`" for name in importlib.import_module(technique.module).__all__ if name not in ("Demo", "demo"))
            kind = "training on text" if technique.name in full_settings.PRETRAINING else "RL in the small world"
            kind = "all pieces of a package, tried in sandboxes" if technique.name == full_settings.DELETION else kind
            changed = (full_settings.PRETRAINING | full_settings.RL | {full_settings.DELETION: {}})[technique.name]
            kind += "".join(f", `{name}={value}`" for name, value in flat(changed))
            rows.append(f"| `{technique.name}` | {' | '.join(links)} | {names} | {kind} |")
    return "\n".join(rows)
