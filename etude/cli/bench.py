"""The commands `etude bench …`."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from etude.cli import suggestions
from etude.cli.course import need_streamlit
from etude.console.options import integer_option

__all__ = ["bench_app"]

bench_app = typer.Typer(no_args_is_help=True, help="Measure speed; records go to results/.")
SMALL = typer.Argument(
    help="Small run of the recipe; the benchmark uses its policy after SFT.", callback=suggestions.a_run
)


@bench_app.callback()
def bench() -> None:
    """Measure speed; records go to results/."""


@bench_app.command("model")
def bench_model() -> None:
    """Training tokens/s of ref.network and of transformers' Qwen3Moe."""
    importlib.import_module("etude.bench.training").model()


@bench_app.command("kernels")
def bench_kernels() -> None:
    """Every Triton kernel against the best alternative, on a CUDA GPU."""
    from kit.settings import RunError

    if importlib.util.find_spec("triton") is None:
        raise RunError("etude bench kernels needs Triton (Linux): pip install triton")
    importlib.import_module("etude.bench.kernels").kernels()


MODEL = typer.Option(help="qwen3_30b_a3b, qwen2_5_0_5b, tiny, or a Hugging Face folder; only its config.json is read.")


@bench_app.command("step")
def bench_step(
    model: Annotated[str, MODEL] = "qwen3_30b_a3b",
    layers: Annotated[
        int, typer.Option(help="Number of layers; all widths are the model's.", **integer_option(1, 1000))
    ] = 4,
    tokens: Annotated[int, typer.Option(help="Tokens per step.", **integer_option(2))] = 16_384,
    length: Annotated[int, typer.Option(help="Tokens per row.", **integer_option(2))] = 8192,
) -> None:
    """A training step on one device, next to the plan.

    Measures tokens/s, kernel launches and memory."""
    importlib.import_module("etude.bench.step").bench(model, layers, tokens, length)


@bench_app.command("decode")
def bench_decode(
    model: Annotated[str, MODEL] = "qwen3_30b_a3b",
    layers: Annotated[
        int, typer.Option(help="Number of layers; all widths are the model's.", **integer_option(1, 1000))
    ] = 8,
    rows: Annotated[
        list[int] | None,
        typer.Option(
            help="Number of concurrent conversations; repeatable.", show_default="32 and 128", **integer_option(1, 4096)
        ),
    ] = None,
    prompt: Annotated[int, typer.Option(help="Tokens per prompt.", **integer_option(1, 65_536))] = 256,
    new: Annotated[int, typer.Option(help="Tokens to sample per conversation.", **integer_option(2, 65_536))] = 64,
) -> None:
    """Sampled tokens/s of two samplers on one device, next to the plan."""
    importlib.import_module("etude.bench.decode").bench(model, layers, rows or [32, 128], prompt, new)


@bench_app.command("plan")
def bench_plan() -> None:
    """Predicted and measured step time of two ranks on this machine."""
    importlib.import_module("etude.bench.plan").bench()


@bench_app.command("data")
def bench_data(
    tokenizer: Annotated[Path, typer.Option(help="tokenizer.json, or a checkpoint's folder.", metavar="FILE")] = Path(
        "runs/small/checkpoints/mid-cpt"
    ),
    archives: Annotated[Path, typer.Option(help="Folder for the ten wheels; missing ones are downloaded.")] = Path(
        "runs/wheels"
    ),
) -> None:
    """Data preparation with one process and with two.

    Prepares a million lines of ten packages, with planted duplicates."""
    importlib.import_module("etude.bench.data").bench(tokenizer, archives)


@bench_app.command("delta")
def bench_delta() -> None:
    """Weight deltas on one core, against zstd level 1.

    Encodes and decodes the same bytes with both."""
    importlib.import_module("etude.bench.delta").bench()


@bench_app.command("sandbox")
def bench_sandbox() -> None:
    """Start, calls, snapshots and forks of sandboxes, and idle memory.

    All sandboxes are over a tree of 25 MB."""
    importlib.import_module("etude.bench.sandboxes").bench()


@bench_app.command("crowded", hidden=True)  # its name in earlier versions
@bench_app.command("contention")
def bench_contention(run: Annotated[Path, SMALL] = Path("runs/small")) -> None:
    """Parts of a run under CPU contention.

    Times them alone, and next to one busy program per core."""
    importlib.import_module("etude.bench.crowded").bench(run)


@bench_app.command("engine")
def bench_engine(run: Annotated[Path, SMALL] = Path("runs/small")) -> None:
    """Sampled tokens/s, without and with continuous batching.

    Without it, all rows of a batch are at the same position."""
    importlib.import_module("etude.bench.engine").bench(run)


@bench_app.command("tools")
def bench_tools() -> None:
    """Rollouts with slow or hanging tools, against fast ones."""
    importlib.import_module("etude.bench.tools").bench()


@bench_app.command("packages")
def bench_packages(
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder of a checkpoint.", show_default="a tiny random network")
    ] = None,
    tasks: Annotated[
        Path | None,
        typer.Option(help="Folder of recipes of tasks.", metavar="RECIPES", show_default="two made-up packages"),
    ] = None,
    rollouts: Annotated[
        list[int] | None,
        typer.Option(
            help="Number of rollouts at once; repeatable.", show_default="8, 16 and 32", **integer_option(2, 4096)
        ),
    ] = None,
    blocks: Annotated[
        int, typer.Option(help="Blocks to train, from the last one; 0: all weights.", **integer_option(0, 1000))
    ] = 0,
    turn_tokens: Annotated[int, typer.Option(help="Tokens of each turn.", **integer_option(1, 65_536))] = 64,
    max_len: Annotated[int, typer.Option(help="Tokens of a context.", **integer_option(2, 65_536))] = 2048,
) -> None:
    """Tokens/s on tasks of packages, and time spent waiting for sandboxes.

    Prefill, decoding and training, with each engine."""
    from etude.bench import packages

    packages.bench(checkpoint, tasks, rollouts or packages.COUNTS, blocks, turn_tokens, max_len)


@bench_app.command("explorer")
def bench_explorer() -> None:
    """Redraw time of every control in the explorer."""
    need_streamlit("etude bench explorer")
    importlib.import_module("etude.bench.explorer").bench()
