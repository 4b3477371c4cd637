"""Estimates what a training step holds, sends and computes on each rank of a layout.

    weights    every parameter is split over its mesh (experts over ep, then efsdp; all else over all ranks), short
               slices padded
    state      weight, gradient and the optimiser's two moments (AdamW) of this rank's slices; with LoRA gradients and
               moments of the adapters alone
    gathered   the largest set of weights that FSDP gathers at once: a block, the next one while it is prefetched, and
               the root
    sent       bytes of one forward and backward pass, n ranks of a group: all-gather (n − 1) slices, reduce-scatter (n
               − 1) slices

               FSDP        blocks: 2 all-gathers and 1 reduce-scatter; root (embedding, head, last norm): 1 and 1
               attention   keys and values of a layer gathered over cp; their gradients reduce-scattered
               experts     rows there and back, and their gradients back and there; 8 bytes per expert for the counts
               plus what a block sent in the forward pass again, if its activations are recomputed

    FLOPs      6 · active weights per token, plus causal attention's two products 6 · T² · heads · head_dim per layer
               and row; with LoRA 4 · active weights and 6 · weights of adapters
    eager      what the operations between products read and write, each of them a kernel
    time       max(FLOPs / (peak · efficiency), HBM bytes / bandwidth) + eager bytes / bandwidth + α · collectives +
               bytes / link bandwidth, nothing overlapped

Weights, state and bytes sent are exact counts: they equal what torch.distributed moves and what ranks hold. Activations
are within a tenth of what autograd keeps (`tests/mirror/test_plan.py` measures all of these). FLOPs are the usual
count. Time is a model with the numbers of `Hardware`, which for GPUs come from data sheets and guesses: read it as an
order of magnitude. `etude bench plan` compares it with steps on CPUs, where the numbers can be measured
(results/plan-*.json).
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from ref.lora import adapters, replace_projections
from ref.network import Config, Transformer
from ref.packing import Cost
from scaled.runtime.mesh import Layout

__all__ = [
    "HARDWARE",
    "Hardware",
    "Step",
    "adapter_shapes_of",
    "chip_named",
    "eager_bytes",
    "flops",
    "plan",
    "saved",
    "shapes_of",
]


@dataclass(frozen=True)
class Hardware:
    """One accelerator and its links."""

    flops: float
    """Peak FLOPs per second, dense, in the training dtype."""
    memory: float
    """Bytes."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    node: int
    """Number of accelerators that share the fast link."""
    node_bandwidth: float
    """Bytes per second and direction to others in the node."""
    network_bandwidth: float
    """Bytes per second and direction to other nodes, per accelerator."""
    latency: float
    """Seconds per collective, independent of its size (α)."""
    efficiency: float
    """Share of peak that matrix products of this size reach: a guess."""
    price: float
    """Dollars per hour: a guess, for comparing layouts."""
    float32_flops: float
    """Peak FLOPs per second in float32, without tensor cores: torch's default for float32 products."""

    def computing_in(self, dtype: str) -> "Hardware":
        """The same with the peak of "float32", or of "bfloat16", which `flops` is."""
        return replace(self, flops=self.float32_flops) if dtype == "float32" else self


HARDWARE = {
    "h200": Hardware(989e12, 141e9, 4.8e12, 8, 450e9, 50e9, 20e-6, 0.5, 3.5, 67e12),
    "h100": Hardware(989e12, 80e9, 3.35e12, 8, 450e9, 50e9, 20e-6, 0.5, 2.5, 67e12),
    # NVIDIA Ada GPU architecture, appendix A: BF16 dense with FP32 accumulation, 24 GB of GDDR6X; PCIe 4.0 ×16, no
    # NVLink; one port of 25 Gb/s for the machine is a guess.
    "rtx-4090": Hardware(165e12, 24e9, 1.008e12, 8, 32e9, 3e9, 20e-6, 0.5, 0.5, 82.6e12),
}
"""NVIDIA's data sheets (BF16 dense, HBM, NVLink 4, one 400 Gb/s port each, FP32); α, efficiency and price are
guesses."""


def chip_named(name: str) -> Hardware | None:
    """The row of `HARDWARE` whose name is part of a device's, as torch gives it; None for others."""
    words = name.lower().replace(" ", "-")
    return next((row for key, row in HARDWARE.items() if key in words), None)


@dataclass(frozen=True)
class Step:
    """One rank's part of a step; in bytes unless noted otherwise."""

    parameters: int
    """Parameters of the complete network."""
    active: int
    """Parameters that a token uses."""
    parameters_held: int
    """Parameters that this rank keeps, including padding of slices."""
    weights: int
    """Their weights, in the storage dtype."""
    gradients: int
    """Their gradients, in the same dtype."""
    moments: int
    """The two moments of AdamW, in float32."""
    gathered: int
    """Weights that are gathered at once while a block is computed, in the compute dtype."""
    activations: int
    """Activations kept from the forward to the backward pass (`saved`)."""
    fsdp: int
    """Sent for weights and their gradients."""
    attention: int
    """Sent for keys and values."""
    experts: int
    """Sent for expert rows, if routing is balanced."""
    collectives: int
    """Approximate number of collectives."""
    tokens: int
    """Tokens of this rank."""
    flops: float
    """Floating-point operations, forward and backward."""
    eager: float
    """Bytes that the operations between products read and write, each as a kernel of its own."""

    @property
    def memory(self) -> int:
        """Total memory at the peak."""
        return self.weights + self.gradients + self.moments + self.gathered + self.activations

    def seconds(self, hardware: Hardware, layout: Layout) -> dict[str, float]:
        """Seconds for each part of a step on this hardware, without overlap: compute, memory, network, and eager: the
        operations between products."""
        crosses_nodes = layout.world > hardware.node
        link = hardware.network_bandwidth if crosses_nodes else hardware.node_bandwidth
        expert_link = hardware.node_bandwidth if layout.ep <= hardware.node else hardware.network_bandwidth
        return {
            # time: FLOPs / (peak · efficiency); HBM bytes / bandwidth; α · collectives + bytes / link bandwidth.
            "compute": self.flops / (hardware.flops * hardware.efficiency),
            "memory": 3 * (self.weights + self.gathered + self.activations + self.moments) / hardware.bandwidth,
            "network": self.fsdp / link
            + (self.attention + self.experts) / expert_link
            + self.collectives * hardware.latency,
            "eager": self.eager / hardware.bandwidth,
        }


@lru_cache(32)
def shapes_of(config: Config) -> dict[str, tuple[int, ...]]:
    """Parameter → its shape."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in Transformer(config).named_parameters()}


@lru_cache(32)
def adapter_shapes_of(config: Config, lora: int) -> dict[str, tuple[int, ...]]:
    """Parameter of an adapter of rank `lora` → its shape."""
    with torch.device("meta"):
        model = Transformer(config)
        replace_projections(model, lora)
        return {name: tuple(x.shape) for name, x in adapters(model).items()}


def slice_numel(shape: tuple[int, ...], ranks: int, dim: int = 0) -> int:
    """Elements of a rank's slice of a parameter; short slices are padded as in FSDP."""
    return -(-shape[dim] // ranks) * (math.prod(shape) // shape[dim])


def plan(
    config: Config,
    layout: Layout,
    rows: int,
    length: int,
    *,
    storage_bytes: int = 4,
    computed: int = 2,
    remake: bool = True,
    crossing: int | None = None,
    lora: int = 0,
) -> Step:
    """One step of `rows` rows of `length` tokens on all ranks together. `storage_bytes` and `computed`: bytes per
    weight in storage and in compute. `remake`: activations of a block are recomputed. `crossing`: expert rows that one
    rank sends and receives in the forward pass of a layer; default: balanced routing. `lora`: rank of adapters, the
    only parameters that are trained then (`ref/lora.py`); 0: all are. Raises ValueError for rows or tokens that do not
    divide evenly."""
    if rows % layout.dp or length % (2 * layout.cp if layout.cp > 1 else 1):
        raise ValueError(
            f"rows must be a multiple of dp = {layout.dp} and length of 2 · cp = {2 * layout.cp}; got "
            f"{rows} and {length}"
        )
    shapes, adapter_shapes = shapes_of(config), adapter_shapes_of(config, lora)
    n, ep, efsdp = layout.world, layout.ep, layout.efsdp
    num_held = num_trained = fsdp = 0
    blocks: dict[str, int] = {}
    for name, shape in (*shapes.items(), *adapter_shapes.items()):
        is_trained = not lora or name in adapter_shapes
        block, ranks, dim = ".".join(name.split(".")[:2]) if name.startswith("layers.") else "root", n, 0
        if ep > 1 and name.endswith(("gate_up_proj", "mlp.down_proj")) and len(shape) == 3:
            shape, ranks = (shape[0] // ep, *shape[1:]), efsdp
            dim = 1 if shape[0] % efsdp and shape[1] % efsdp == 0 else 0
        part = slice_numel(shape, ranks, dim)
        num_held += part
        num_trained += part * is_trained
        # sent: an all-gather or a reduce-scatter over n ranks moves n − 1 slices.
        traffic = (ranks - 1) * part
        # A weight is gathered in the forward pass and, outside the root, again in the backward pass; its gradient is
        # sent once.
        fsdp += traffic * ((1 if block == "root" else 2) + is_trained) * computed
        blocks[block] = blocks.get(block, 0) + math.prod(shape)
    B, T = rows // layout.dp, length // layout.cp
    D, d, K = config.hidden_size, config.head_dim, config.num_experts_per_tok
    kv_bytes = B * T * 2 * config.num_key_value_heads * d * computed
    forwards = 2 if remake else 1  # recomputing a block repeats what it sent in the forward pass
    # attention: keys and values gathered over cp, their gradients reduce-scattered.
    attention = (forwards + 1) * (layout.cp - 1) * kv_bytes * config.num_hidden_layers
    if config.num_experts and ep > 1:
        # experts: rows there and back, and their gradients back and there.
        rows_sent = 2 * B * T * K * (ep - 1) // ep if crossing is None else crossing
        counts = 8 * config.num_experts * (ep - 1) // ep
        experts = config.num_hidden_layers * ((forwards + 1) * rows_sent * D * computed + forwards * counts)
    else:
        experts = 0
    largest = max((size for name, size in blocks.items() if name != "root"), default=0)
    layers = config.num_hidden_layers
    per_block = (
        3 + (3 + 3 if ep > 1 and config.num_experts else 0) + (2 if layout.cp > 1 else 0) + (5 if experts else 0)
    )
    return Step(
        parameters=config.parameters(),
        active=config.parameters(active=True),
        parameters_held=num_held,
        weights=num_held * storage_bytes,
        gradients=num_trained * storage_bytes,
        moments=num_trained * 8,
        gathered=(2 * largest + blocks["root"]) * computed if n > 1 else 0,
        activations=saved(config, B * T, remake, computed, ep, layout.cp)
        + adapter_bytes(config, lora, B * T, remake, computed),
        fsdp=fsdp,
        attention=attention,
        experts=experts,
        collectives=layers * per_block + 2,
        tokens=B * T,
        flops=flops(config, B * T, length, False, lora),
        eager=eager_bytes(config, B * T, remake, computed),
    )


def flops(config: Config, tokens: int, length: float, remake: bool, lora: int = 0) -> float:
    """Floating-point operations of a step on so many tokens of documents of `length` tokens: the forward pass (twice
    with `remake`), and a backward pass that costs two of them: the gradients of what a product multiplies, one each. Of
    frozen weights there is none."""
    cost, forwards = Cost.of(config), 2 if remake else 1
    adapter_linear = 2 * sum(map(math.prod, adapter_shapes_of(config, lora).values()))
    linear = cost.linear * (forwards + (1 if lora else 2)) + adapter_linear * (forwards + 2)
    return tokens * (linear + cost.quadratic * length * (forwards + 2))


def eager_bytes(config: Config, tokens: int, remake: bool, size: int) -> float:
    """Bytes that the operations between products read and write: norms, rotary embedding, residuals, gates, and moving
    the rows of experts. `EAGER` has their factors. Attention, products, the head and the loss are not included."""
    K, I = config.num_experts_per_tok, config.moe_intermediate_size
    widths = {
        "hidden": config.hidden_size,
        "heads": (config.num_attention_heads + config.num_key_value_heads) * config.head_dim,
        "dense": 0 if config.num_experts else config.intermediate_size,
        "rows": K * config.hidden_size if config.num_experts else 0,
        "experts": K * I if config.num_experts else 0,
        "scores": config.num_experts,
    }
    forward, backward = (sum(EAGER[name][way] * width for name, width in widths.items()) for way in (0, 1))
    return config.num_hidden_layers * tokens * ((2 if remake else 1) * forward + backward) * size / 2


EAGER = {
    "hidden": (34.0, 68.0),
    "heads": (34.5, 47.5),
    "dense": (10.0, 18.0),
    "rows": (5.2, 17.5),
    "experts": (9.1, 13.2),
    "scores": (29.0, 11.0),
}
"""Width of a layer → bytes per value of it, forward and backward, in bfloat16: a fit to what blocks of the reference
read and write on a CPU, which a test counts again. Kernels that fuse operations read and write less."""


def adapter_bytes(config: Config, lora: int, tokens: int, remake: bool, size: int) -> int:
    """What adapters add to `saved`: A x, of `lora` values a token, which B's gradient needs."""
    num_adapters = len(adapter_shapes_of(config, lora)) // 2  # A and B each
    return num_adapters // (config.num_hidden_layers if remake else 1) * tokens * lora * size


def saved(config: Config, tokens: int, remake: bool, size: int, ep: int = 1, cp: int = 1) -> int:
    """Bytes kept from the forward to the backward pass for this many tokens, with flash attention: the input of every
    block, and what the products and norms read in each block (with `remake`: only in the current one). `size`: bytes
    per value. Does not include the head, the loss or the allocator's rounding."""
    D, d, H, G = config.hidden_size, config.head_dim, config.num_attention_heads, config.num_key_value_heads
    E, K, L = config.num_experts, config.num_experts_per_tok, config.num_hidden_layers
    # Outputs of the projections; queries; keys and values of the complete row; the output of attention, twice.
    heads = (4 * H + 2 * G + 2 * G * cp) * d
    block = (
        tokens * size * (3 * D + heads + (H + G if config.qk_norm else 0))
        + tokens * 4 * (2 + H)
        + D * (H + 2 * G) * d * size
    )
    if E:
        pad = 2 ** max(4, (tokens * K * ep // E // 16).bit_length() - 1)
        rows = tokens * K + E // ep * pad // 2  # groups are padded to multiples of pad, half of it on average
        block += rows * size * (2 * D + 4 * config.moe_intermediate_size) + tokens * (E * size + 2 * K * size + 8 * K)
        if ep > 1:  # results from the ranks that own the experts, and the index of each row
            block += tokens * K * (D * size + 4 * 8 + size)
    else:
        block += tokens * size * 4 * config.intermediate_size
    root_bytes = tokens * (8 + (D + 2 * d) * size + 4)
    return L * tokens * D * size + (1 if remake else L) * block + root_bytes
