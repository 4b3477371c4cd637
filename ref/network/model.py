"""Qwen3-MoE and its dense relatives, written to be read: one file from token ids to logits.

The published scaling study of the recipe uses Qwen3-Coder-30B-A3B (Composer 2 report §3.1, Appendix B). Its
architecture is that of Qwen3-30B-A3B (arXiv:2505.09388). This file defines the same network at any size:
`Config.tiny()` trains on a laptop, and `Config.qwen3_30b_a3b()` has 30,532,122,624 parameters, of which one token uses
3,353,032,704.

The logits match those of `transformers` within 1e-5 in float32, for every family below. Everything here is plain
PyTorch. `fast.py` computes the same network with fewer and larger operations and hand-written gradients; all other
rooms use that one, as `ref.network.Transformer`. Tests hold the two equal to float64 rounding, in values and in
gradients.

| family (`Config.model_type`) | `num_experts` | `qk_norm` | `attention_bias` | published, for example |
|---|---|---|---|---|
| `qwen3_moe` | > 0 | yes | no | Qwen3-30B-A3B, Qwen3-Coder-30B-A3B |
| `qwen3` | 0 | yes | no | Qwen3-0.6B to 32B |
| `qwen2` | 0 | no | yes | Qwen2.5, Qwen2.5-Coder |
| `llama` | 0 | no | no | Llama 3, SmolLM2 |

Each of them may scale its rotary embedding (`rope.py`). What no family has, `Config` refuses.

What this file adds to `transformers`
1. Routing can be observed and overridden. Every forward pass returns router logits and chosen experts, and it accepts
   the experts of another engine (router replay, report §6.2). The gates are computed from this router's own scores, so
   the gradient still reaches the router.
2. `doc` numbers the documents that are packed in a row. Attention stays inside a document.
3. A dense model is the case `num_experts = 0`.

| paper | here | shape |
|---|---|---|
| hidden state h | `x` | B T D |
| router logits | `router_logits` | B·T E |
| top-k set | `experts` | B·T K |
| gates g (normalised over the top-k) | `gates` | B·T K |
| query, key, value heads | `q`, `k`, `v` | B H T d (keys and values: fewer heads, GQA) |

Checkpoints are Hugging Face folders: see `ref/network/checkpoint.py`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from dataclasses import fields as fields_of
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ref.network.checkpoint import CheckpointError, family, load_extra, read_config, read_tensors, write_checkpoint
from ref.network.rope import RopeScaling, frequencies

__all__ = [
    "Block",
    "CheckpointError",
    "Config",
    "KVCache",
    "Output",
    "Transformer",
    "load_balancing_loss",
    "load_extra",
    "load_hf",
    "save_hf",
]


@dataclass(frozen=True)
class Config:
    """Shape of the network. Field names are those of a Hugging Face `config.json`; there, `qk_norm` and the biases
    follow from the family."""

    vocab_size: int = 1024
    """Tokens in the vocabulary (V)."""
    hidden_size: int = 128
    """Width of the residual stream (D)."""
    num_hidden_layers: int = 4
    """Blocks (L)."""
    num_attention_heads: int = 4
    """Query heads (H)."""
    num_key_value_heads: int = 2
    """Key and value heads; each serves num_attention_heads / num_key_value_heads query heads (GQA)."""
    head_dim: int = 32
    """Width of one head (d)."""
    qk_norm: bool = True
    """A norm on the queries and keys of every head (Qwen3)."""
    attention_bias: bool = False
    """A bias on queries, keys and values (Qwen2)."""
    intermediate_size: int = 384
    """Width of the dense SwiGLU layer, used when num_experts is 0."""
    num_experts: int = 8
    """Experts per layer (E); 0 makes every layer dense."""
    num_experts_per_tok: int = 2
    """Experts that a token uses (K)."""
    moe_intermediate_size: int = 192
    """Width of one expert's SwiGLU."""
    norm_topk_prob: bool = True
    """Divide the gates by their sum over the top-k."""
    rope_theta: float = 10_000.0
    """Base of the rotary embedding's wavelengths."""
    rope_scaling: RopeScaling = RopeScaling()
    """How the rotary embedding is scaled for longer contexts."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square in every RMSNorm."""
    max_position_embeddings: int = 512
    """Longest context the run trains for (recorded, not enforced)."""
    tie_word_embeddings: bool = True
    """The head is the transposed embedding."""
    router_aux_loss_coef: float = 0.01
    """Weight of the load-balancing loss during pretraining."""
    initializer_range: float = 0.06
    """Standard deviation of the initial weights; residual outputs get it divided by sqrt(2 L)."""

    def __post_init__(self):
        width = "moe_intermediate_size" if self.num_experts else "intermediate_size"
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            width,
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_experts < 0:
            raise ValueError(f"num_experts must not be negative, got {self.num_experts}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        if self.num_experts and not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError("num_experts_per_tok must lie between 1 and num_experts")
        if self.head_dim % 2:
            raise ValueError("head_dim must be even: rotary embedding turns pairs")
        if self.rope_scaling.rope_type == "yarn" and self.rope_theta <= 1:
            raise ValueError(f"rope_theta must be greater than 1 for yarn, got {self.rope_theta}")
        if self.model_type == "llama" and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                "hidden_size must be a multiple of num_attention_heads in a Llama network: transformers reads no other"
            )

    @property
    def model_type(self) -> str:
        """The family, as Hugging Face names it; it follows from `num_experts`, `qk_norm` and `attention_bias`."""
        return family(vars(self))

    @classmethod
    def tiny(cls, vocab_size: int = 1024, **changes) -> "Config":
        """The laptop's network: 4 layers of 8 experts, top-2; every field can be changed."""
        return replace(cls(vocab_size=vocab_size), **changes)

    @classmethod
    def qwen3_30b_a3b(cls) -> "Config":
        """Qwen3-30B-A3B, the network of the published scaling study."""
        return cls(
            vocab_size=151_936,
            hidden_size=2048,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            intermediate_size=6144,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            rope_theta=1e6,
            max_position_embeddings=32_768,
            tie_word_embeddings=False,
            router_aux_loss_coef=0.001,
            initializer_range=0.02,
        )

    @classmethod
    def qwen2_5_0_5b(cls) -> "Config":
        """Qwen2.5-0.5B, a small dense network with a large vocabulary."""
        return cls(
            vocab_size=151_936,
            hidden_size=896,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            head_dim=64,
            intermediate_size=4864,
            num_experts=0,
            num_experts_per_tok=0,
            rope_theta=1e6,
            max_position_embeddings=32_768,
            tie_word_embeddings=True,
            initializer_range=0.02,
            qk_norm=False,
            attention_bias=True,
        )

    def parameters(self, active: bool = False) -> int:
        """Parameters in all, or (active) those that one token's forward pass uses, embedding table
        included."""
        D, d = self.hidden_size, self.head_dim
        attention = 2 * D * d * (self.num_attention_heads + self.num_key_value_heads) + (2 * d if self.qk_norm else 0)
        if self.attention_bias:
            attention += d * (self.num_attention_heads + 2 * self.num_key_value_heads)
        if self.num_experts:
            num_used_experts = self.num_experts_per_tok if active else self.num_experts
            mlp = 3 * D * self.moe_intermediate_size * num_used_experts + D * self.num_experts
        else:
            mlp = 3 * D * self.intermediate_size
        tables = self.vocab_size * D * (1 if self.tie_word_embeddings else 2)
        return self.num_hidden_layers * (attention + mlp + 2 * D) + D + tables


class KVCache:
    """Keys and values of every layer for a batch whose rows share one position.

    `length` tokens are held; appending beyond `max_len` raises. `truncate(n)` forgets all after the first n
    (speculative decoding rejects tokens so); `select(rows)` keeps some rows (finished rollouts leave the
    batch).
    """

    def __init__(
        self, config: Config, batch: int, max_len: int, dtype=torch.float32, layers: int | None = None, device=None
    ):
        shape = (batch, config.num_key_value_heads, max_len, config.head_dim)
        layers = config.num_hidden_layers if layers is None else layers
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.length, self.max_len = 0, max_len

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k, v [B, Hkv, T, d] behind the first `length` positions of one layer; return all up to
        there."""
        end = self.length + k.shape[2]
        if end > self.max_len:
            raise ValueError(f"KV cache is full: {end} positions asked of {self.max_len}")
        self.keys[layer][:, :, self.length : end] = k
        self.values[layer][:, :, self.length : end] = v
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)

    def select(self, rows: Int[Tensor, " R"]) -> None:
        self.keys = [k[rows] for k in self.keys]
        self.values = [v[rows] for v in self.values]


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + ε) · w, over the last dimension."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # x / sqrt(mean(x²) + ε) · w
        return (wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()).to(x.dtype) * self.weight


def rope_table(config: Config, positions: Int[Tensor, "*B T"], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [*B, T, 1, d] of position · θ_i (RoFormer, arXiv:2104.09864; `rope.py` has the θ), the i-th pair
    being (i, i + d/2). Under YaRN both are multiplied by its attention factor.

    The sine of the first half carries the minus sign of the rotation, so that turning is `x·cos +
    swap(x)·sin`.
    """
    wide = torch.promote_types(dtype, torch.float32)
    frequency, factor = frequencies(config.head_dim, config.rope_theta, config.rope_scaling, wide, positions.device)
    angle = positions[..., None, None].to(wide) * frequency  # position · θ_i
    cos, sin = angle.cos() * factor, angle.sin() * factor
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rotate_pairs(x: Float[Tensor, "B T H d"], rope: tuple[Tensor, Tensor]) -> Float[Tensor, "B T H d"]:
    """Each pair (i, i + d/2) of a head, rotated by its position's angle."""
    cos, sin = rope
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin  # x·cos + swap(x)·sin


class Attention(nn.Module):
    """Grouped-query attention with rotary embedding; Qwen3 has a norm on queries and keys (QK-norm), and Qwen2 a bias
    on queries, keys and values."""

    def __init__(self, c: Config):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, self.heads * c.head_dim, bias=c.attention_bias)
        self.k_proj = nn.Linear(c.hidden_size, self.kv_heads * c.head_dim, bias=c.attention_bias)
        self.v_proj = nn.Linear(c.hidden_size, self.kv_heads * c.head_dim, bias=c.attention_bias)
        self.o_proj = nn.Linear(self.heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else None

    def forward(self, x, rope: tuple[Tensor, Tensor], mask: Tensor | None, cache: KVCache | None, layer: int) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )  # B T H d
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate_pairs(q, rope), rotate_pairs(k, rope)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if cache is not None:
            k, v = cache.append(layer, k, v)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))  # B H S d
        scores = q @ k.transpose(2, 3) * self.head_dim**-0.5  # q kᵀ / √d
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        y = scores.softmax(-1) @ v  # softmax(q kᵀ / √d) v
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate x) · up x)."""

    def __init__(self, c: Config):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # down(silu(gate x) · up x)


Choose = Callable[[Tensor], Tensor]
"""Router logits [N, E] → experts [N, K]."""


def weigh(scores: Float[Tensor, "N E"], experts: Int[Tensor, "N K"], normalise: bool) -> Float[Tensor, "N K"]:
    """Gates of the chosen experts: the softmax over the chosen ones if `normalise`, else their share of the softmax
    over all E."""
    if normalise:
        return scores.gather(-1, experts).softmax(-1)  # g_e = exp(s_e) / Σ over the chosen
    return scores.softmax(-1).gather(-1, experts)  # g_e = exp(s_e) / Σ over all E


class MoE(nn.Module):
    """Top-k router and its experts, each a SwiGLU. The weights of all experts lie in two tensors, as `grouped_mm` wants
    them."""

    def __init__(self, c: Config):
        super().__init__()
        self.top_k, self.normalise = c.num_experts_per_tok, c.norm_topk_prob
        self.gate = nn.Linear(c.hidden_size, c.num_experts, bias=False)
        self.gate_up_proj = nn.Parameter(torch.empty(c.num_experts, 2 * c.moe_intermediate_size, c.hidden_size))
        self.down_proj = nn.Parameter(torch.empty(c.num_experts, c.hidden_size, c.moe_intermediate_size))

    def route(
        self, x: Float[Tensor, "N D"], experts: "Int[Tensor, 'N K'] | Choose | None"
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Router logits [N, E], gates [N, K] and experts [N, K]. The experts are this router's own top-k, or the ones
        supplied, or what a function of the logits chooses."""
        logits: Tensor = self.gate(x)
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if experts is None:
            experts = scores.topk(self.top_k, -1)[1]
        elif not isinstance(experts, Tensor):
            experts = experts(scores.detach())
        return logits, weigh(scores, experts, self.normalise).to(x.dtype), experts

    def forward(self, x: Float[Tensor, "N D"], experts=None) -> tuple[Tensor, Tensor, Tensor]:
        logits, gates, experts = self.route(x, experts)
        return self.mix(x, gates, experts), logits, experts

    def mix(
        self, x: Float[Tensor, "N D"], gates: Float[Tensor, "N K"], experts: Int[Tensor, "N K"]
    ) -> Float[Tensor, "N D"]:
        """The sum over a token's experts of the gate times the expert's output."""
        y = torch.zeros_like(x)
        for e, (gate_up, down) in enumerate(zip(self.gate_up_proj, self.down_proj, strict=True)):
            token, k = (experts == e).nonzero(as_tuple=True)
            gate, up = F.linear(x[token], gate_up).chunk(2, -1)
            # Σ_k g_k · down(silu(gate x) · up x)
            y = y.index_add(0, token, gates[token, k, None] * F.linear(F.silu(gate) * up, down))
        return y


class Block(nn.Module):
    """x + attention(norm x), then x + MLP(norm x) or the mixture of experts."""

    Norm, Attention, MoE = RMSNorm, Attention, MoE

    def __init__(self, c: Config):
        super().__init__()
        self.input_layernorm = self.Norm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = self.Attention(c)
        self.post_attention_layernorm = self.Norm(c.hidden_size, c.rms_norm_eps)
        self.mlp = self.MoE(c) if c.num_experts else MLP(c)

    def forward(self, x, rope, mask=None, cache=None, layer=0, experts=None):
        """Returns x [B, T, D], router logits [B·T, E] and experts [B·T, K] (both None in a dense block)."""
        x = x + self.self_attn(self.input_layernorm(x), rope, mask, cache, layer)  # x + attention(norm x)
        y = self.post_attention_layernorm(x)
        if isinstance(self.mlp, MLP):
            return x + self.mlp(y), None, None
        y, logits, experts = self.mlp(y.view(-1, y.shape[-1]), experts)
        return x + y.view_as(x), logits, experts


@dataclass
class Output:
    """What a forward pass returns."""

    logits: Tensor | None
    """[B, T, V], in the model's dtype; None when logits=False."""
    hidden: Tensor
    """[B, T, D] after the final norm: `model.head(hidden)` gives the logits."""
    prenorm: Tensor
    """[B, T, D] before the final norm: what a multi-token-prediction layer reads."""
    router_logits: list[Tensor]
    """Per MoE layer [B·T, E]."""
    experts: list[Tensor]
    """Per MoE layer [B·T, K], int64."""


class Transformer(nn.Module):
    """The complete network. Parameters have their Hugging Face names, without the leading `model.`."""

    Block = Block

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers: Sequence[Block] = nn.ModuleList(  # pyright: ignore[reportAttributeAccessIssue]
            self.Block(config) for _ in range(config.num_hidden_layers)
        )
        self.norm = self.Block.Norm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        initialise(self, config)

    def head(self, hidden: Float[Tensor, "*B D"]) -> Float[Tensor, "*B V"]:
        """Logits of final hidden states."""
        return F.linear(hidden, (self.embed_tokens if self.config.tie_word_embeddings else self.lm_head).weight)

    def logprob(self, hidden: Float[Tensor, "N D"], targets: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
        """Log-probability (nats, float32 or wider) of each target under the head's distribution at the same row."""
        logits = self.head(hidden)
        return (
            logits.to(torch.promote_types(logits.dtype, torch.float32))
            .log_softmax(-1)
            .gather(-1, targets[:, None])[:, 0]
        )

    def mask(self, T: int, start: int, doc: Tensor | None, x: Tensor) -> Tensor | None:
        """What `Attention` is told about who may look at whom: see `visible`."""
        return visible(T, start, doc, x.device)

    def forward(
        self,
        ids: Int[Tensor, "B T"],
        positions: Int[Tensor, "B T"] | None = None,
        doc: Int[Tensor, "B T"] | None = None,
        cache: KVCache | None = None,
        experts: "list[Int[Tensor, 'N K']] | list[Choose] | None" = None,
        logits: bool = True,
    ) -> Output:
        """positions default to 0..T−1 behind the cache; `doc` numbers the documents packed in a row, and
        attention stays inside a document; `experts` (per layer: indices, or a function of router logits
        [B·T, E] that gives them) replace the router's choice; `logits=False` leaves the head out."""
        start = cache.length if cache is not None else 0
        T = ids.shape[1]
        if positions is None:
            positions = torch.arange(start, start + T, device=ids.device)
        x = self.embed_tokens(ids)
        rope = rope_table(self.config, positions, x.dtype)
        mask = self.mask(T, start, doc, x)
        router_logits, layer_experts = [], []
        for i, block in enumerate(self.layers):
            x, block_logits, block_experts = block(x, rope, mask, cache, i, None if experts is None else experts[i])
            if block_logits is not None:
                router_logits.append(block_logits)
                layer_experts.append(block_experts)
        if cache is not None:
            cache.length = start + T
        hidden = self.norm(x)
        return Output(self.head(hidden) if logits else None, hidden, x, router_logits, layer_experts)


def visible(T: int, start: int, doc: Int[Tensor, "B T"] | None, device: torch.device) -> Bool[Tensor, "B 1 T S"] | None:
    """True where a query may look at a key: T queries behind `start` cached keys, S = start + T keys in all. A query
    sees no key behind its own and, in packed rows, only keys of its own document. None where every query sees every
    key. ValueError for packed rows behind a filled cache."""
    if doc is not None and start:
        raise ValueError("packed documents and a filled KV cache do not go together")
    if T == 1:
        return None
    mask = torch.ones(T, start + T, dtype=torch.bool, device=device).tril(start)[None]
    if doc is not None:
        mask = mask & (doc[:, :, None] == doc[:, None, :])
    return mask[:, None]


@torch.no_grad()
def initialise(module: nn.Module, config: Config) -> None:
    """Normal weights; the two outputs into the residual stream are scaled by 1/sqrt(2 L) so that depth keeps
    its variance. Biases are zero, and norms keep their ones."""
    for name, param in module.named_parameters():
        if param.is_meta:
            continue
        if param.ndim >= 2:
            param.normal_(0.0, initial_std(name, config))
        elif name.endswith(".bias"):
            param.zero_()


def initial_std(name: str, config: Config) -> float:
    """Standard deviation of a matrix's initial weights."""
    residual = "o_proj" in name or "down_proj" in name
    # 1/sqrt(2 L) for the residual outputs
    return config.initializer_range / math.sqrt(2 * config.num_hidden_layers) if residual else config.initializer_range


def load_balancing_loss(router_logits: list[Tensor], experts: list[Tensor]) -> Float[Tensor, ""]:
    """Switch Transformer's balance loss (arXiv:2101.03961, eq. 4), mean over layers: E · Σ_e f_e · P_e, f_e
    the share of assignments that expert e received (Σ f = 1) and P_e its mean probability. 1 when balanced, E
    when one expert takes all."""
    wide = torch.promote_types(router_logits[0].dtype, torch.float32)
    total = router_logits[0].new_zeros((), dtype=wide)
    for logits, layer_experts in zip(router_logits, experts, strict=True):
        E = logits.shape[-1]
        share = torch.bincount(layer_experts.flatten(), minlength=E).to(wide) / layer_experts.numel()  # f_e
        total = total + E * (share * logits.to(wide).softmax(-1).mean(0)).sum()  # E · Σ_e f_e · P_e
    return total / len(router_logits)


def config_of(path: str | Path) -> Config:
    """The shape of the network in a Hugging Face folder. CheckpointError as `load_hf`."""
    fields = read_config(Path(path))
    float_fields = {field.name for field in fields_of(Config) if field.type in (float, "float")}
    # JSON's 1 is 1.0
    fields |= {name: float(value) for name, value in fields.items() if name in float_fields and type(value) is int}
    try:
        return Config(**fields | {"rope_scaling": RopeScaling(**fields["rope_scaling"])})
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{Path(path) / 'config.json'}: {error}") from None


Network = TypeVar("Network", bound=Transformer)


def loaded(kind: type[Network], path: str | Path, dtype: torch.dtype) -> Network:
    """`load_hf` for a class of one's own."""
    config = config_of(path)
    with torch.device("meta"):
        model = kind(config)
    shapes = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    model.load_state_dict(read_tensors(Path(path), shapes, dtype), assign=True)
    return model


def load_hf(path: str | Path, dtype: torch.dtype = torch.float32) -> Transformer:
    """The network in a Hugging Face folder of one of the families above, its weights converted to `dtype`.

    Raises CheckpointError (a ValueError): one line that names the file or tensor at fault."""
    return loaded(Transformer, path, dtype)


def save_hf(
    model: Transformer,
    path: str | Path,
    max_shard_bytes: int = 5 * 2**30,
    extra: Mapping[str, Tensor] | None = None,
    sidecar_files: Mapping[str, bytes] | None = None,
) -> None:
    """Writes the network as a Hugging Face folder, completely or not at all: an existing folder is replaced only
    once the new one is complete, and its other files are kept. `extra` tensors (multi-token-prediction layers)
    go to a file of their own, for `load_extra`. `sidecar_files`: name → content of files that go with the weights
    (`ref.network.release`). CheckpointError if a folder stands where a file belongs, or a file where a folder does."""
    write_checkpoint(path, asdict(model.config), model.state_dict(), max_shard_bytes, extra, sidecar_files)
