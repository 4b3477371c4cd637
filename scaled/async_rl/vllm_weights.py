"""Weights that vLLM serves and that follow the trainer's versions (`ref/weight_sync.py`), from inside vLLM's own worker
process.

vLLM imports this file because `vllm_engine.py` names `Extension` as its worker's. It keeps the last version in
bfloat16, in the names and shapes of a Hugging Face folder: vLLM fuses and packs what it is given, and nobody can apply
a difference to that. So a version is built and checked beside what serves, and then all tensors go the way that a
checkpoint goes.

What serves afterwards is read back through the kernels that compute with it: an identity matrix through a linear layer
gives its weights to the bit, wherever and however these lie. Only experts cannot be read in this way. They count as
what is stored, if they also compute what that would."""

# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from ref.weight_sync import Part, Reader, digest
from scaled.async_rl.services import open_stores
from scaled.async_rl.vllm_engine import OWNER

__all__ = ["Deltas", "Extension"]


@dataclass
class StoreInfo(WeightTransferInitInfo):
    """What is followed."""

    store: str
    """Address of the store."""
    name: str
    """Under which the store knows this reader."""
    shapes: dict[str, list[int]]
    """Of every tensor of a Hugging Face folder."""


@dataclass
class VersionInfo(WeightTransferUpdateInfo):
    """What is to be served next."""

    version: int


class Deltas(WeightTransferEngine[StoreInfo, VersionInfo]):
    """vLLM's side of `ref.weight_sync.Writer`."""

    init_info_cls, update_info_cls = StoreInfo, VersionInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: StoreInfo) -> None:
        self.parts = [
            Part(name, tuple(shape), 0, torch.zeros(shape, dtype=torch.bfloat16))
            for name, shape in init_info.shapes.items()
        ]
        self.reader = Reader(open_stores(init_info.store).weights, self.parts, init_info.name)
        self.building: threading.Thread | None = None
        self.error: Exception | None = None

    def build(self, version: int) -> None:
        """Begins to build a version beside the one that serves."""

        def fetch() -> None:
            try:
                self.reader.fetch(version)
            except Exception as error:
                self.reader.manifests.clear()  # a manifest may be replaced by one with a new anchor
                self.error = error

        assert self.building is None
        self.error, self.building = None, threading.Thread(target=fetch, daemon=True)
        self.building.start()

    def poll_build(self) -> tuple[str, str] | None:
        """None as long as it is not; then the kind of its error and what that says, both empty if it worked."""
        assert self.building is not None
        if self.building.is_alive():
            return None
        self.building = None
        return (
            ("", "")
            if self.error is None
            else ("store" if isinstance(self.error, OSError) else type(self.error).__name__, str(self.error))
        )

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: VersionInfo) -> None:
        version = self.reader.swap()
        assert version == update_info.version
        self.model.load_weights((part.name, part.weights.to(self.device, copy=True)) for part in self.parts)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in self.model.modules():
            if isinstance(layer, ParallelLMHead):
                # Nothing of a head is loaded that shares the embedding's weights, so vLLM would keep the copy that
                # oneDNN has packed, where it has packed one: on CPUs with AVX512-BF16 and no AMX.
                layer.quant_method.process_weights_after_loading(layer)

    def sums(self) -> tuple[dict[str, str], dict[str, str]]:
        """Digests of all tensors that serve, and of the trainer's: those in the manifest."""
        assert self.reader.version is not None
        stored_weights, digests = {part.name: part.weights for part in self.parts}, dict[str, str]()
        for name, weights in served_weights(self.model):
            if name in stored_weights and weights.shape == stored_weights[name].shape:
                # A product with an identity matrix loses the sign of a zero.
                served_copy = torch.where(
                    (weights.cpu() == 0) & (stored_weights[name] == 0), stored_weights[name], weights.cpu().bfloat16()
                )
                value = f"{digest(Part(name, tuple(served_copy.shape), 0, served_copy)):032x}"
                digests[name] = value if digests.get(name, value) == value else "served twice, and differently"
        return digests, self.reader.manifests[self.reader.version]["digests"]

    def shutdown(self) -> None: ...


@torch.no_grad()
def served_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Names and weights that a network of vLLM computes with, as a Hugging Face folder has them. A head that shares the
    embedding's weights, and holds them in its own way, comes a second time under their name."""
    fused_names: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    embedding = ""
    for prefix, layer in model.named_modules():
        params = dict(layer.named_parameters(recurse=False, remove_duplicate=False))
        if isinstance(layer, LinearBase):
            *path, last = prefix.split(".")
            names = (
                [".".join([*path, name]) for name in fused_names.get(last, [last])]
                if hasattr(layer, "output_sizes")
                else [prefix]
            )
            sizes = layer.output_sizes if len(names) > 1 else [layer.output_size]
            for name, weight in zip(names, read_through_kernel(layer, layer.input_size).split(sizes), strict=True):
                yield f"{name}.weight", weight
            if params.get("bias") is not None:
                yield from ((f"{name}.bias", x) for name, x in zip(names, params["bias"].split(sizes), strict=True))
        elif isinstance(layer, ParallelLMHead):  # before what it derives from
            tied = bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))
            yield (
                f"{embedding if tied else prefix}.weight",
                read_through_kernel(layer, layer.embedding_dim)[: layer.org_vocab_size],
            )
        elif isinstance(layer, VocabParallelEmbedding):
            embedding = prefix
            yield (
                f"{prefix}.weight",
                layer.quant_method.embedding(layer, torch.arange(layer.org_vocab_size, device=params["weight"].device)),
            )
        elif isinstance(layer, RoutedExperts):
            yield from experts(prefix.removesuffix(".routed_experts"), layer)
        else:
            yield from ((f"{prefix}.{name}", x) for name, x in params.items())


def read_through_kernel(layer: Any, width: int) -> Tensor:
    """The weights of a layer [out, width], read by its own kernel."""
    like = next(layer.parameters())
    return layer.quant_method.apply(layer, torch.eye(width, dtype=torch.bfloat16, device=like.device)).T.contiguous()


def experts(prefix: str, layer: Any) -> Iterator[tuple[str, Tensor]]:
    """A layer's experts as they are stored; none that computes something else."""
    w13, w2 = layer.w13_weight, layer.w2_weight
    generator = torch.Generator().manual_seed(0)
    for e in range(len(w2)):
        (gate, up), down = w13[e].chunk(2), w2[e]
        x = torch.randn(16, gate.shape[1], generator=generator).to(down)
        ids = torch.full((16, 1), e, dtype=torch.int32, device=x.device)
        output = layer.quant_method.apply(layer, x.clone(), torch.ones(16, 1, device=x.device), ids, None, None).float()
        expected_output = F.linear(
            F.silu(F.linear(x.float(), gate.float())) * F.linear(x.float(), up.float()), down.float()
        )
        # Two roundings to bfloat16 differ by less than 1%, and experts in another order by more than 100%.
        if (output - expected_output).norm() <= 0.1 * expected_output.norm():
            yield from (
                (f"{prefix}.{e}.{name}_proj.weight", weight)
                for name, weight in (("gate", gate), ("up", up), ("down", down))
            )


class Extension:
    """What vLLM's worker can be asked besides."""

    weight_transfer_engine: Deltas

    def build_version(self, version: int) -> None:
        self.weight_transfer_engine.build(version)

    def built_version(self) -> tuple[str, str] | None:
        return self.weight_transfer_engine.poll_build()

    def served_sums(self) -> tuple[dict[str, str], dict[str, str]]:
        return self.weight_transfer_engine.sums()


def _exit_with_owner(pid: int) -> None:
    """Ends vLLM's processes, this one and the one that started it, with the process that wanted them, even if that is
    killed."""
    with contextlib.suppress(ProcessLookupError):
        multiprocessing.connection.wait([os.pidfd_open(pid)])
    parent = multiprocessing.parent_process()
    if parent is not None and parent.is_alive() and parent.pid is not None:
        os.kill(parent.pid, signal.SIGKILL)
    os._exit(1)


WeightTransferEngineFactory.register_engine("etude", Deltas)
if OWNER in os.environ and multiprocessing.parent_process() is not None:
    threading.Thread(target=_exit_with_owner, args=(int(os.environ[OWNER]),), daemon=True).start()
