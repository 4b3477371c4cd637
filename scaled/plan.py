"""What a training step of a layout holds, sends and computes on each rank, before anyone pays for it.

    weights    every parameter is cut over its mesh (experts over ep, then efsdp; all else over all ranks), short slices padded
    state      weight, gradient and the optimiser's two moments (AdamW) of this rank's slices
    gathered   the largest set of weights that FSDP has whole at once: a block's, the next one's while it is fetched, and the root's
    sent       bytes of one forward and backward pass, n ranks of a group: all-gather (n − 1) slices, reduce-scatter (n − 1) slices

               FSDP        blocks: 2 all-gathers and 1 reduce-scatter; root (embedding, head, last norm): 1 and 1
               attention   keys and values of a layer gathered over cp; their gradients reduce-scattered
               experts     rows there and back, and their gradients back and there; 8 bytes an expert for the counts
               and what a block sent in the forward pass once more, where its activations are computed again

    FLOPs      6 · active weights a token, and causal attention's two products 6 · T² · heads · head_dim a layer and row
    time       max(FLOPs / (peak · efficiency), HBM bytes / bandwidth) + α · collectives + bytes / link bandwidth, nothing overlapped

Weights, state and bytes sent are counts, equal to what torch.distributed really moved and what ranks really held; activations are
within a tenth of what autograd really keeps (`tests/mirror/test_plan.py` measures all of them). FLOPs are the usual count. Time is a
model with the numbers of `Hardware`, which for GPUs are data sheets' and guesses: read it as an order of magnitude. `etude bench plan`
holds it against steps on CPUs, where the numbers can be measured (results/plan-*.json).
"""

import math
from dataclasses import dataclass

import torch

from ref.network import Config, Transformer
from ref.packing import Cost
from scaled.runtime.mesh import Layout

__all__ = ["HARDWARE", "Hardware", "Step", "plan"]


@dataclass(frozen=True)
class Hardware:
    """One accelerator and its links."""

    flops: float
    """Peak, dense, in the training dtype, a second."""
    memory: float
    """Bytes."""
    bandwidth: float
    """Of memory, bytes a second."""
    node: int
    """Accelerators that share the fast link."""
    near: float
    """Bytes a second and direction to others of the node."""
    far: float
    """Bytes a second and direction to other nodes, of each accelerator."""
    latency: float
    """Seconds that a collective takes whatever its size (α)."""
    efficiency: float
    """Share of the peak that products of this size reach: a guess."""
    price: float
    """Dollars an hour: a guess, for comparing layouts."""


HARDWARE = {
    "h200": Hardware(989e12, 141e9, 4.8e12, 8, 450e9, 50e9, 20e-6, 0.5, 3.5),
    "h100": Hardware(989e12, 80e9, 3.35e12, 8, 450e9, 50e9, 20e-6, 0.5, 2.5),
}
"""NVIDIA's data sheets (BF16 dense, HBM, NVLink 4, one 400 Gb/s port each); α, efficiency and price are guesses."""


@dataclass(frozen=True)
class Step:
    """One rank's part of a step; bytes where nothing else is said."""

    parameters: int
    """Parameters of the whole network."""
    active: int
    """Parameters that a token uses."""
    held: int
    """Parameters that this rank keeps, padding of slices included."""
    weights: int
    """Those, in the dtype they are kept in."""
    gradients: int
    """Of as many parameters, in that dtype."""
    moments: int
    """AdamW's two, float32."""
    gathered: int
    """Weights that are whole at once while a block is computed, in the dtype of the computation."""
    activations: int
    """Kept from the forward to the backward pass (`saved`)."""
    fsdp: int
    """Sent for weights and their gradients."""
    attention: int
    """Sent for keys and values."""
    experts: int
    """Sent for expert rows, where routing is even."""
    collectives: int
    """How many of them, roughly."""
    tokens: int
    """Tokens of this rank."""
    flops: float
    """Floating-point operations, forward and backward."""

    @property
    def memory(self) -> int:
        """All that is held at the peak."""
        return self.weights + self.gradients + self.moments + self.gathered + self.activations

    def seconds(self, hardware: Hardware, layout: Layout) -> dict[str, float]:
        """How long the parts of a step take on such hardware, nothing overlapped: compute, memory, network."""
        far = layout.world > hardware.node
        link = hardware.far if far else hardware.near
        inside = hardware.near if layout.ep <= hardware.node else hardware.far
        return {
            "compute": self.flops / (hardware.flops * hardware.efficiency),
            "memory": 3 * (self.weights + self.gathered + self.activations + self.moments) / hardware.bandwidth,
            "network": self.fsdp / link + (self.attention + self.experts) / inside + self.collectives * hardware.latency,
        }


def sliced(shape: tuple[int, ...], ranks: int, dim: int = 0) -> int:
    """Elements of a rank's slice of a parameter, short ones padded as FSDP pads them."""
    return -(-shape[dim] // ranks) * (math.prod(shape) // shape[dim])


def plan(
    config: Config, layout: Layout, rows: int, length: int, *, kept: int = 4, computed: int = 2, remake: bool = True, crossing: int | None = None
) -> Step:
    """One step of `rows` rows of `length` tokens on all ranks together. `kept` and `computed`: bytes of a weight at rest and at work.
    `remake`: a block's activations are computed again. `crossing`: expert rows that one rank sends in a layer's forward pass and that
    it receives, together; even routing where it is not told. ValueError for rows or tokens that do not share out."""
    if rows % layout.dp or length % (2 * layout.cp if layout.cp > 1 else 1):
        raise ValueError(f"rows must be a multiple of dp = {layout.dp} and length of 2 · cp = {2 * layout.cp}; got {rows} and {length}")
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in Transformer(config).named_parameters()}
    n, ep, efsdp = layout.world, layout.ep, layout.efsdp
    held = fsdp = 0
    blocks: dict[str, int] = {}
    for name, shape in shapes.items():
        block, ranks, dim = ".".join(name.split(".")[:2]) if name.startswith("layers.") else "root", n, 0
        if ep > 1 and name.endswith(("gate_up_proj", "mlp.down_proj")) and len(shape) == 3:
            shape, ranks = (shape[0] // ep, *shape[1:]), efsdp
            dim = 1 if shape[0] % efsdp and shape[1] % efsdp == 0 else 0
        part = sliced(shape, ranks, dim)
        held += part
        moved = (ranks - 1) * part
        # A weight is fetched in the forward and, outside the root, again in the backward pass; its gradient goes once.
        fsdp += moved * ((1 if block == "root" else 2) * computed + computed)
        blocks[block] = blocks.get(block, 0) + math.prod(shape)
    B, T = rows // layout.dp, length // layout.cp
    D, d, K = config.hidden_size, config.head_dim, config.num_experts_per_tok
    each = B * T * 2 * config.num_key_value_heads * d * computed
    forwards = 2 if remake else 1  # what a block sends in the forward pass it sends again when it is computed again
    attention = (forwards + 1) * (layout.cp - 1) * each * config.num_hidden_layers
    if config.num_experts and ep > 1:
        even = 2 * B * T * K * (ep - 1) // ep if crossing is None else crossing
        counts = 8 * config.num_experts * (ep - 1) // ep
        experts = config.num_hidden_layers * ((forwards + 1) * even * D * computed + forwards * counts)
    else:
        experts = 0
    largest = max((size for name, size in blocks.items() if name != "root"), default=0)
    layers = config.num_hidden_layers
    per_block = 3 + (3 + 3 if ep > 1 and config.num_experts else 0) + (2 if layout.cp > 1 else 0) + (5 if experts else 0)
    cost = Cost.of(config)
    return Step(
        parameters=config.parameters(),
        active=config.parameters(active=True),
        held=held,
        weights=held * kept,
        gradients=held * kept,
        moments=held * 8,
        gathered=(2 * largest + blocks["root"]) * computed,
        activations=saved(config, B * T, remake, computed, ep),
        fsdp=fsdp,
        attention=attention,
        experts=experts,
        collectives=layers * per_block + 2,
        tokens=B * T,
        flops=3 * (cost.linear * B * T + cost.quadratic * B * length * T),
    )


def saved(config: Config, tokens: int, remake: bool, size: int, ep: int = 1) -> int:
    """Bytes kept from the forward to the backward pass for so many tokens, with a flash kernel's attention: of every block its input;
    of each block, or with `remake` of the one at work, what its products and norms read. `size`: bytes of a value. What the head and
    the loss keep is the caller's, and an allocator's rounding is left out."""
    D, d, H, G = config.hidden_size, config.head_dim, config.num_attention_heads, config.num_key_value_heads
    E, K, L = config.num_experts, config.num_experts_per_tok, config.num_hidden_layers
    heads = (4 * H + 4 * G) * d  # what the projections gave; queries, keys, values; attention's output, twice
    block = tokens * size * (3 * D + heads + (H + G)) + tokens * 4 * (2 + H) + D * (H + 2 * G) * d * size
    if E:
        pad = 2 ** max(4, (tokens * K * ep // E // 16).bit_length() - 1)
        rows = tokens * K + E // ep * pad // 2  # groups are filled up to multiples of pad, half of it on average
        block += rows * size * (2 * D + 4 * config.moe_intermediate_size) + tokens * (E * size + 2 * K * size + 8 * K)
        if ep > 1:  # what came back from the ranks that own the experts, and where each row belongs
            block += tokens * K * (D * size + 4 * 8 + size)
    else:
        block += tokens * size * 4 * config.intermediate_size
    once = tokens * (8 + (D + 2 * d) * size + 4)
    return L * tokens * D * size + (1 if remake else L) * block + once
