"""The commands `etude bench …`: words in, one call into a room."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from etude import meant
from etude.course_commands import need_streamlit
from etude.given import whole

__all__ = ["bench_app"]

bench_app = typer.Typer(no_args_is_help=True, help="Measure speed; results go to results/.")
SMALL = typer.Argument(help="A small run of the recipe; the benchmark uses its policy after SFT.", callback=meant.a_run)


@bench_app.callback()
def bench() -> None:
    """Measure speed; results go to results/."""


@bench_app.command("model")
def bench_model() -> None:
    """Training tokens/s of ref.network and of Qwen3Moe from transformers, timed in alternation."""
    importlib.import_module("etude.bench.training").model()


@bench_app.command("kernels")
def bench_kernels() -> None:
    """Every Triton kernel against the best alternative call, on a CUDA GPU."""
    from kit.settings import RunError

    if importlib.util.find_spec("triton") is None:
        raise RunError("etude bench kernels needs Triton (Linux): pip install triton")
    importlib.import_module("etude.bench.kernels").kernels()


MODEL = typer.Option(help="qwen3_30b_a3b, tiny, or a Hugging Face folder, of which only config.json is read.")


@bench_app.command("step")
def bench_step(
    model: Annotated[str, MODEL] = "qwen3_30b_a3b",
    layers: Annotated[int, typer.Option(help="Layers; the widths are the model's.", **whole(1, 1000))] = 4,
    tokens: Annotated[int, typer.Option(help="Tokens of a step.", **whole(2))] = 16_384,
    length: Annotated[int, typer.Option(help="Tokens of a row.", **whole(2))] = 8192,
) -> None:
    """A training step on one device: tokens/s, launches and memory beside the plan."""
    importlib.import_module("etude.bench.step").bench(model, layers, tokens, length)


@bench_app.command("decode")
def bench_decode(
    model: Annotated[str, MODEL] = "qwen3_30b_a3b",
    layers: Annotated[int, typer.Option(help="Layers; the widths are the model's.", **whole(1, 1000))] = 8,
    rows: Annotated[
        list[int] | None,
        typer.Option(help="Conversations at once; repeatable.", show_default="32 and 128", **whole(1, 4096)),
    ] = None,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.", **whole(1, 65_536))] = 256,
    new: Annotated[int, typer.Option(help="Tokens that each conversation samples.", **whole(2, 65_536))] = 64,
) -> None:
    """Sampled tokens/s of both samplers on one device, beside the plan."""
    importlib.import_module("etude.bench.decode").bench(model, layers, rows or [32, 128], prompt, new)


@bench_app.command("plan")
def bench_plan() -> None:
    """The plan's predicted step time against the measured time of two ranks on this machine."""
    importlib.import_module("etude.bench.plan").bench()


@bench_app.command("data")
def bench_data(
    tokenizer: Annotated[Path, typer.Option(help="tokenizer.json, or a checkpoint's folder.", metavar="FILE")] = Path(
        "runs/small/checkpoints/mid-cpt"
    ),
    archives: Annotated[
        Path, typer.Option(help="Folder for the ten wheels; pip downloads those that are missing.")
    ] = Path("runs/wheels"),
) -> None:
    """Prepare a million lines of ten packages, on one process and on two, with planted duplicates."""
    importlib.import_module("etude.bench.data").bench(tokenizer, archives)


@bench_app.command("delta")
def bench_delta() -> None:
    """Encode and decode weight deltas on one core, beside zstd level 1 on the same bytes."""
    importlib.import_module("etude.bench.delta").bench()


@bench_app.command("sandbox")
def bench_sandbox() -> None:
    """Start, call, store and fork sandboxes over a tree of 25 MB, and weigh idle ones."""
    importlib.import_module("etude.bench.sandboxes").bench()


@bench_app.command("crowded")
def bench_crowded(run: Annotated[Path, SMALL] = Path("runs/small")) -> None:
    """Parts of a run, timed alone and next to as many busy programs as there are cores."""
    importlib.import_module("etude.bench.crowded").bench(run)


@bench_app.command("engine")
def bench_engine(run: Annotated[Path, SMALL] = Path("runs/small")) -> None:
    """Sampled tokens per second of two samplers: all rows at one position, and continuous batching."""
    importlib.import_module("etude.bench.engine").bench(run)


@bench_app.command("tools")
def bench_tools() -> None:
    """Time rollouts whose tools are slow, or hang, beside an engine."""
    importlib.import_module("etude.bench.tools").bench()


@bench_app.command("explorer")
def bench_explorer() -> None:
    """Redraw time of every slider in the explorer."""
    need_streamlit("etude bench explorer")
    importlib.import_module("etude.bench.explorer").bench()
