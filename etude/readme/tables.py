"""The tables of README.md and docs/ that show committed measurements, each made from the file that was measured."""

from __future__ import annotations

import importlib
import io
import statistics
from collections.abc import Iterator
from pathlib import Path

from etude import catalog
from etude.ledger import gain
from etude.plan import step as planning
from etude.run import settings as full_settings
from kit.disk import read_json, read_toml
from kit.settings import RunError
from recipe.small.behaviours import BEHAVIOURS

__all__ = [
    "behaviours",
    "bench",
    "by_depth",
    "crowded",
    "decode",
    "delta",
    "distributed",
    "explorer",
    "gpu_decode",
    "gpu_step",
    "kernels",
    "load_results",
    "packages_plan_output",
    "perplexity",
    "plan",
    "plan_output",
    "recipe",
    "recipe_plan_output",
]

ROOT = Path(__file__).resolve().parents[2]


def load_results(pattern: str) -> list[dict]:
    """The JSON files of results/ that a pattern names. RunError where there is none."""
    paths = sorted((ROOT / "results").glob(pattern))
    if not paths:
        raise RunError(f"results/{pattern} does not exist: measure first")
    return [read_json(path) for path in paths]


def recipe() -> str:
    """What RL gained, by seed, and over the seeds."""
    (result,) = load_results("recipe-small.json")
    lines = [gain.table(result), "", "| over the seeds | mean difference ± standard deviation |", "|---|---|"]
    for name, title in gain.FIGURES:
        change = result["over_seeds"][name]["difference"]
        lines.append(f"| {title.format(**result)} | {change['mean']:+.3f} ± {change['sd']:.3f} |")
    first, box = result["runs"][0], result["machine"]
    lines += [
        "",
        f"Seed {first['seed']} took {first['seconds'] / 60:.1f} minutes and "
        f"{first['peak_memory_gib']:.1f} GiB on {box['cores']} cores "
        f"({box['cpu']}).",
    ]
    return "\n".join(lines)


def by_depth() -> str:
    """Success before → after RL by kind of task and depth, over the tasks of all seeds."""
    (result,) = load_results("recipe-small.json")
    samples = result["samples"]
    lines = [f"| task | depth | tasks | sampled | greedy | best of {samples} |", "|---" * 6 + "|"]
    outcomes = [outcome for run in result["runs"] for outcome in run["outcomes"]]
    groups = {(outcome["kind"], outcome["depth"]) for outcome in outcomes}
    for kind, depth in sorted(groups, key=lambda group: (group[0] != "multi-hop", group[1])):
        group = [outcome for outcome in outcomes if (outcome["kind"], outcome["depth"]) == (kind, depth)]
        cells = [
            " → ".join(
                f"{statistics.mean(solved(outcome[phase], samples) for outcome in group):.2f}"
                for phase in ("before", "after")
            )
            for solved in gain.SOLVED.values()
        ]
        lines.append(f"| {kind} | {depth} | {len(group)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def behaviours() -> str:
    """Shares of rollouts that read, test and repair before → after RL, by seed."""
    (result,) = load_results("recipe-small.json")
    columns = [(f"seed {run['seed']}", run) for run in result["runs"]]
    columns += [(f"control, seed {run['seed']}", run) for run in result["control"]]
    lines = ["| of the rollouts that could | " + " | ".join(name for name, _ in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")

    def format_share(share: dict | None) -> str:
        return f"{share['value']:.2f} [{share['low']:.2f}, {share['high']:.2f}]" if share else "–"

    for key, title in BEHAVIOURS.items():
        cells = [
            " → ".join(format_share(run[phase]["behaviours"].get(key)) for phase in ("before", "after"))
            for _, run in columns
        ]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def perplexity() -> str:
    """Held-out codebase after each stage, by seed."""
    (result,) = load_results("recipe-small.json")
    names = {"mid-cpt": "mid-CPT", "cpt": "long context", "sft": "SFT", "final": "RL"}
    lines = ["| codebase perplexity after | " + " | ".join(names.values()) + " |", "|---" * (len(names) + 1) + "|"]
    for run in result["runs"]:
        values = {c["checkpoint"]: c["perplexity"] for c in run["codebase"]}
        lines.append(f"| seed {run['seed']} | " + " | ".join(f"{values[name]:.0f}" for name in names) + " |")
    return "\n".join(lines)


def decode() -> str:
    """Speculative against plain decoding, by way and seed."""
    (result,) = load_results("recipe-small.json")
    ways = {
        "mtp": "drafts of the MTP layers",
        "mtp+recall": "and turns begun with what last followed the same tokens",
        "mtp+recall+ahead": "and turns carried out, in a forked environment, before their last drafts are verified",
    }
    seeds = [f"seed {run['seed']}" for run in result["runs"]]
    lines = [f"| decoding | {' | '.join(seeds)} | tokens a pass | drafts kept, by depth | same text |"]
    lines.append("|---" * (len(seeds) + 4) + "|")
    first = result["runs"][0]["decode"]["ways"]
    for name, title in ways.items():
        speeds = [run["decode"]["ways"][name]["speedup"] for run in result["runs"]]
        cells = [f"{s['median']:.2f}× [{s['low']:.2f}, {s['high']:.2f}]" for s in speeds]
        acceptance = " ".join(f"{a:.2f}" for a in first[name]["acceptance"])
        identical_share = min(run["decode"]["ways"][name]["identical"] for run in result["runs"])
        lines.append(
            f"| {title} | {' | '.join(cells)} | {first[name]['tokens_per_cycle']:.2f} | {acceptance} | "
            f"{identical_share:.0%} |"
        )
    return "\n".join(lines)


def bench() -> str:
    """Training step beside transformers, by machine."""
    lines = [
        "| machine | dtype, batches | etude, tokens/s | transformers, tokens/s (its fastest setting) | "
        "ratio | over our plain network |"
    ]
    lines.append("|---" * 6 + "|")
    for record in load_results("model-*.json"):
        for result in record["results"]:
            rates, fastest = result["tokens_per_second"], result["their_fastest"]
            low, high = result["ratio_middle_half"]
            lines.append(
                f"| {record['machine']['cpu']}, {record['machine']['threads']} threads | {result['dtype']}, "
                f"{'new ones' if result['batches'] == 'new' else 'always one'} | {rates['etude']['median']:,.0f} | "
                f"{rates[fastest]['median']:,.0f} ({fastest.removeprefix('transformers, ')}) | {result['ratio']:.2f} "
                f"[{low:.2f}, {high:.2f}] | " + (f"{result['over_plain']:.2f} |" if "over_plain" in result else "– |")
            )
    return "\n".join(lines)


def crowded() -> str:
    """What a run's parts cost alone, with threads, and next to busy programs, by machine."""
    words = {
        "sampling": "128 rollouts of a step",
        "step": "the step on them",
        "decoding": "decoding 8 tasks",
        "evaluation": "2,400 rollouts",
        "products": "matrix products alone",
    }
    lines = []
    for record in load_results("crowded-*.json"):
        lines += [
            f"| {record['machine']['cpu']}, {record['busy']} cores, median of {record['rounds']} | alone | with "
            f"threads instead | "
            f"next to {record['busy']} busy programs |",
            "|---|---|---|---|",
        ]
        for name, part in record["parts"].items():
            lines.append(
                f"| {words[name]} | {part['alone_s']:.1f} s | {part['threads_s']:.1f} s, "
                f"{part['faster_than_threads']:.2f} × | "
                f"{part['crowded_s']:.1f} s, {part['slower_in_a_crowd']:.2f} × |"
            )
    return "\n".join(lines)


def explorer() -> str:
    """How long the explorer takes to open its pages and to redraw them, by machine."""
    lines = [
        "| machine | slowest page, cold | redraw, median of all | median of the slowest control |",
        "|---|---|---|---|",
    ]
    for record in load_results("explorer-*.json"):
        box, pages, controls = record["machine"], record["pages"], record["controls"]
        page, control = max(pages, key=lambda row: row["cold_s"]), max(controls, key=lambda row: row["median_s"])
        lines.append(
            f"| {box['cpu']}, {box['cores']} cores | {page['page']}, of {len(pages)}: {page['cold_s'] * 1e3:.0f} ms "
            f"| {record['median_s'] * 1e3:.0f} ms "
            f"| {control['control']} of {control['page']}, of {len(controls)}: {control['median_s'] * 1e3:.0f} ms |"
        )
    return "\n".join(lines)


def delta() -> str:
    """How fast one core encodes and decodes differences of weights, by machine."""
    lines = []
    for record in load_results("delta-*.json"):
        lines += [
            f"| {record['machine']['cpu']}, one core, median of {record['rounds']} | changed | times smaller | encode, "
            f"GB/s | of XOR's | "
            "decode, GB/s | of XOR's |",
            "|---|---|---|---|---|---|---|",
        ]
        names = {"gap + step": "gap + step", "XOR": "XOR, zstd 1", "all": "all weights, zstd 1"}
        for row in record["rows"]:
            lines.append(
                f"| {names[row['way']]} | {100 * row['share']:.1f}% | {row['times_smaller']:.1f} | "
                f"{row['encode_gb_s']:.2f} | "
                f"{row['encode_of_XOR']:.2f} | {row['decode_gb_s']:.2f} | {row['decode_of_XOR']:.2f} |"
            )
        loads = sorted(record["load"])
        lines += [
            "",
            f"Digests of the result go at {record['digest_gb_s']:.2f} GB/s. The least ratio to zstd level 1 up to 2% "
            f"changed is "
            f"{record['least_ratio']:.2f}; the aim was {record['target']}. The machine's load was {loads[0]:.1f} to "
            f"{loads[-1]:.1f}.",
        ]
    return "\n".join(lines)


def kernels() -> str:
    """What `etude bench kernels` measured, by GPU: each kernel beside what one would otherwise call."""
    lines = []
    for record in load_results("kernels-nvidia-*.json"):
        box = record["machine"]
        lines += [
            f"| {box['gpu']}, torch {box['torch']}, Triton {box['triton']}, median of "
            f"{record['rounds']} | size | ours | speed | times as fast as |",
            "|---|---|---|---|---|",
        ]
        for row in record["results"]:
            for kernel_name in [name for name in row["seconds"] if name.startswith("kernel")]:
                unit = next((unit for unit in ("TB/s", "TFLOP/s") if unit in row), None)
                speed = (
                    f"{row[unit][kernel_name]:.3g} {unit}" if unit else f"{1e6 * row['seconds'][kernel_name]:.0f} µs"
                )
                pairs = {
                    name.split(" / ")[1]: ratio
                    for name, ratio in row["ratio_and_middle_half"].items()
                    if name.split(" / ")[0] == kernel_name
                }
                comparisons = "; ".join(
                    f"{name} {middle:.2f} [{low:.2f}, {high:.2f}]" for name, (middle, low, high) in pairs.items()
                )
                lines.append(
                    f"| {row['case']} | {row['size']} | "
                    f"{kernel_name.removeprefix('kernel').strip(', ') or 'kernel'} | {speed} | {comparisons} |"
                )
        correct_count = sum(row["wrong"] is None for row in record["results"])
        lines += [
            "",
            f"{correct_count} of {len(record['results'])} cases gave the right result at these sizes, "
            f"and only those have a speed.",
        ]
    return "\n".join(lines)


def gpu_step() -> str:
    """What `etude bench step` measured, by GPU: a training step beside the plan."""
    lines = []
    for record in load_results("step-nvidia-*.json"):
        box = record["machine"]
        lines += [
            f"| {box['gpu']}, torch {box['torch']} | step | tokens/s | MFU | launches | plan's time / "
            f"measured | peak | plan / peak |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for cell in record["cells"]:
            blocks = "recomputed" if cell["formats"]["rematerialise"] else "kept"
            lines.append(
                f"| blocks {blocks}, experts in {cell['formats'].get('experts', cell['dtype'])} | "
                f"{statistics.median(cell['seconds']):.3f} s | "
                f"{cell['tokens_per_second']:,.0f} | {cell['mfu']:.1%} | {cell['launches']:,} | "
                f"{cell['planned_over_measured']:.2f} | "
                f"{cell['peak_bytes'] / 1e9:.1f} GB | {cell['planned_over_peak']:.2f} |"
            )
        size = f"{record['parameters'] / 1e9:.1f} B parameters, {record['active'] / 1e9:.2f} B active per token"
        lines += [
            "",
            f"`{record['command']}`: {size}; {record['tokens']:,} tokens in rows of {record['length']:,}, documents of "
            f"{record['document']:,}; median of "
            f"{record['rounds']} steps.",
        ]
    return "\n".join(lines)


def gpu_decode() -> str:
    """What `etude bench decode` measured, by GPU: both samplers beside the plan."""
    lines = []
    for record in load_results("decode-nvidia-*.json"):
        box = record["machine"]
        lines += [
            f"| {box['gpu']}, torch {box['torch']} | rows | tokens/s, by round | plan's time / measured |",
            "|---|---|---|---|",
        ]
        for cell in record["cells"]:
            rates = ", ".join(f"{cell['tokens'] / seconds:,.0f}" for seconds in cell["seconds"])
            lines.append(f"| `{cell['sampler']}` | {cell['rows']} | {rates} | {cell['planned_over_measured']:.2f} |")
        lines += ["", f"`{record['command']}`, {record['dtype']}; prompts were read before the clock started."]
    return "\n".join(lines)


def plan_output() -> str:
    """What `etude plan` prints."""
    from rich.console import Console

    text, model, hardware = io.StringIO(), "qwen3_30b_a3b", "h200"
    step_plans = planning.plan_steps(model, [8, 64, 512], cp=2, ep=8, length=32_768, rows=1, hardware=hardware)
    planning.show(step_plans, model, hardware, Console(file=text, width=110, color_system=None))
    return "\n".join(["```", "$ etude plan", *(line.rstrip() for line in text.getvalue().rstrip().split("\n")), "```"])


def recipe_plan_output() -> str:
    """What `etude plan --recipe` prints for the example without its tokenizer."""
    from rich.console import Console

    from etude.plan import recipe as prices

    model, hardware, text = "qwen3_30b_a3b", "h200", io.StringIO()
    toml = read_toml(ROOT / "examples" / "qwen3-30b-a3b.toml")
    config = full_settings.settings("recipe", "nccl", {key: value for key, value in toml.items() if key != "study"})
    conversation_lengths = prices.conversations(config, None)
    stage_prices = [
        prices.prices(config, planning.network_of(model), n, planning.hardware_of(hardware), conversation_lengths)
        for n in (8, 64, 512)
    ]
    assumptions = prices.describe(config, conversation_lengths, planning.hardware_of(hardware))
    prices.show(stage_prices, model, hardware, assumptions, console=Console(file=text, width=110, color_system=None))
    command = "$ etude plan --recipe examples/qwen3-30b-a3b.toml"
    return "\n".join(["```", command, *(line.rstrip() for line in text.getvalue().rstrip().split("\n")), "```"])


def packages_plan_output() -> str:
    """What `etude plan --recipe` prints for the example of one GPU, on two GPUs, without a tokenizer."""
    from rich.console import Console

    from etude.plan import packages
    from etude.plan import recipe as prices

    model, text = "qwen2_5_0_5b", io.StringIO()
    config = full_settings.settings("recipe", "nccl", read_toml(ROOT / "examples" / "one-gpu.toml"))
    console = Console(file=text, width=110, color_system=None)
    for hardware in ("rtx-4090", "h100"):
        machine = planning.hardware_of(hardware)
        print(f"$ etude plan --recipe examples/one-gpu.toml --model {model} --hardware {hardware}", file=text)
        stage_prices, *notes = packages.plan_run(config, planning.network_of(model), None, [1], machine)
        prices.show(stage_prices, model, hardware, *notes, console=console)
        print(file=text)
    return "\n".join(["```", *(line.rstrip() for line in text.getvalue().rstrip().split("\n")), "```"])


def published_plan_output() -> str:
    """What `etude plan --published` prints."""
    from rich.console import Console

    from etude.plan import published

    text = io.StringIO()
    print("$ etude plan --published", file=text)
    published.show(Console(file=text, width=80, color_system=None))
    return "\n".join(["```", *(line.rstrip() for line in text.getvalue().rstrip().split("\n")), "```"])


def kernels_plan_output() -> str:
    """What `etude plan --kernels` prints."""
    from rich.console import Console

    from etude.plan import kernels as kernel_costs

    text = io.StringIO()
    kernel_costs.show(Console(file=text, width=110, color_system=None))
    return "\n".join(
        ["```", "$ etude plan --kernels", *(line.rstrip() for line in text.getvalue().rstrip().split("\n")), "```"]
    )


def plan() -> str:
    """What the plan says a step takes, beside what it took, by network and layout."""
    (record,) = load_results("plan-*.json")
    lines = [
        "| network, parameters | dp · cp · ep | predicted | measured | predicted / measured |",
        "|---|---|---|---|---|",
    ]
    for step in record["steps"]:
        lines.append(
            f"| {step['shape']}, {step['parameters'] / 1e6:.1f} M | {step['dp']} · {step['cp']} · {step['ep']} | "
            f"{step['predicted_s'] * 1e3:.0f} ms | "
            f"{step['measured_s'] * 1e3:.0f} ms [{step['least_s'] * 1e3:.0f}, {step['most_s'] * 1e3:.0f}] | "
            f"{step['predicted_s'] / step['measured_s']:.2f} |"
        )
    ratios, box = record["predicted_over_measured"], record["machine"]
    lines += [
        "",
        f"{record['ranks']} ranks of one thread each on {box['cpu']}, gloo, median of {record['rounds']} steps with "
        f"the least and the most; "
        f"predicted over measured: median {ratios['median']:.2f}, from {ratios['least']:.2f} to {ratios['most']:.2f}.",
    ]
    return "\n".join(lines)


def flatten(tree: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Dotted key and value of every setting in a tree."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def distributed() -> str:
    """Technique by technique: reference, distributed version, the names that both have, what its full run trains."""
    rows = ["| technique | reference | distributed version | names that both have | full run |", "|---" * 5 + "|"]
    for technique in catalog.TECHNIQUES:
        if technique.module and technique.ref and technique.scaled:
            links = [f"[{path}]({path})" for path in (technique.ref, technique.scaled)]
            names = ", ".join(
                f"`{name}`"
                for name in importlib.import_module(technique.module).__all__
                if name not in ("Demo", "demo")
            )
            kind = "training on text" if technique.name in full_settings.PRETRAINING else "RL in the small world"
            kind = "all pieces of a package, tried in sandboxes" if technique.name == full_settings.DELETION else kind
            changed = (full_settings.PRETRAINING | full_settings.RL | {full_settings.DELETION: {}})[technique.name]
            kind += "".join(f", `{name}={value}`" for name, value in flatten(changed))
            rows.append(f"| `{technique.name}` | {' | '.join(links)} | {names} | {kind} |")
    return "\n".join(rows)
