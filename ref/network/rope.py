"""The frequencies of the rotary embedding, and how they are scaled for contexts longer than those of pretraining.

RoFormer (arXiv:2104.09864, eq. 14 and 15) turns the i-th pair of a head by position · θ_i, where θ_i = base^(−2i/d).
`frequencies` gives these θ to every network of this project: the plain one, the fast one, the sampler's, the decoder's,
and the one on many ranks.

| `rope_type` | what becomes of θ_i | source |
|---|---|---|
| `default` | nothing | RoFormer |
| `linear` | θ_i / s: positions are interpolated | Position Interpolation, arXiv:2306.15595 |
| `llama3` | θ_i / s where the pair turns slowly, θ_i where it turns fast, a mean of both between | Meta's Llama 3.1 |
| `yarn` | the same with another ramp; queries and keys are also multiplied by √(1/t) | YaRN, arXiv:2309.00071 |

| paper | here | shape |
|---|---|---|
| θ_d, frequency in radians per position | first result of `frequencies` | d/2 |
| b, base | `theta` | scalar |
| s, how much longer contexts become | `factor` | scalar |
| L, longest context of pretraining, in tokens | `original_max_position_embeddings` | scalar |
| α, β, turns within L where the ramp begins and ends | `beta_slow`, `beta_fast` | scalars |
| √(1/t), temperature of the scores | `attention_factor`, second result | scalar |

Where this file departs from the YaRN paper
1. The paper's ramp γ is linear in r, the number of turns within L. Here it is linear in the number of the pair, between
   the pairs that make `beta_fast` and `beta_slow` turns. The authors' own code and `transformers` do so too, and
   published networks are trained with it.
2. The paper divides scores by t. Here cosine and sine are multiplied by √(1/t), as the paper proposes for its code:
   attention does not change.

The order of operations is that of `transformers`. At a position of 100,000 the last bit of a frequency moves the angle
by 0.006 radians."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["RopeScaling", "frequencies"]


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary embedding is stretched. Field names are those of `rope_scaling` in a Hugging Face
    `config.json`."""

    rope_type: Literal["default", "linear", "llama3", "yarn"] = "default"
    """Kind of scaling; the default has none, and ignores all other fields."""
    factor: float = 1.0
    """How much longer contexts become (s)."""
    original_max_position_embeddings: int = 8192
    """Longest context of pretraining, in tokens (L); llama3 and yarn."""
    low_freq_factor: float = 1.0
    """A pair that makes fewer turns than this within L is slowed down by the whole factor; llama3."""
    high_freq_factor: float = 4.0
    """A pair that makes more turns than this within L keeps its frequency; llama3."""
    beta_fast: float = 32.0
    """Pairs that make more turns than this within L keep their frequency (β); yarn."""
    beta_slow: float = 1.0
    """Pairs that make fewer turns than this within L are slowed down by the whole factor (α); yarn."""
    truncate: bool = True
    """The ramp between both begins and ends at a whole number of a pair; yarn."""
    attention_factor: float | None = None
    """What multiplies cosine and sine (√(1/t)); none means 0.1 ln s + 1; yarn."""

    def __post_init__(self):
        if self.rope_type not in ("default", "linear", "llama3", "yarn"):
            raise ValueError(f"rope_type must be default, linear, llama3 or yarn; got {self.rope_type!r}")
        if not 1 <= self.factor < math.inf:
            raise ValueError(f"factor must be at least 1 and finite; got {self.factor}")
        if self.original_max_position_embeddings < 1:
            raise ValueError(
                f"original_max_position_embeddings must be at least 1; got {self.original_max_position_embeddings}"
            )
        if not 0 < self.low_freq_factor < self.high_freq_factor < math.inf:
            raise ValueError(
                f"low_freq_factor must lie between 0 and high_freq_factor; got {self.low_freq_factor} "
                f"and {self.high_freq_factor}"
            )
        if not 0 < self.beta_slow <= self.beta_fast < math.inf:
            raise ValueError(f"beta_slow must lie between 0 and beta_fast; got {self.beta_slow} and {self.beta_fast}")
        if self.attention_factor is not None and not 0 < self.attention_factor < math.inf:
            raise ValueError(f"attention_factor must be positive and finite; got {self.attention_factor}")


def frequencies(
    head_dim: int, theta: float, scaling: RopeScaling, dtype: torch.dtype, device=None
) -> tuple[Float[Tensor, " n"], float]:
    """Frequencies in radians per position, for the n = d/2 pairs of a head, and what cosine and sine are multiplied
    by."""
    i = torch.arange(0, head_dim, 2, dtype=dtype, device=device)
    period = theta ** (i / head_dim)  # positions per radian
    if scaling.rope_type == "linear":
        return 1.0 / period / scaling.factor, 1.0  # θ_i / s
    if scaling.rope_type == "llama3":
        return llama3(1.0 / period, scaling), 1.0
    if scaling.rope_type == "yarn":
        return yarn(period, theta, scaling), temperature(scaling)
    return 1.0 / period, 1.0  # θ_i = base^(−2i/d)


def llama3(own: Float[Tensor, " n"], scaling: RopeScaling) -> Float[Tensor, " n"]:
    """Three bands by the number of turns within L. In the middle one, the share of a pair's own frequency grows
    linearly in its turns."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position_embeddings / (2 * math.pi / own)  # L θ / 2π
    share = ((turns - low) / (high - low)).clamp(0, 1)  # 0 below low, 1 above high
    return (1 - share) * own / scaling.factor + share * own  # between θ/s and θ


def yarn(period: Float[Tensor, " n"], theta: float, scaling: RopeScaling) -> Float[Tensor, " n"]:
    """The paper's "NTK-by-parts" interpolation, h(θ) = (1 − γ) θ/s + γ θ, with the ramp of departure 1."""
    n = len(period)

    def pair_with(turns: float) -> float:
        """The number of the pair, not rounded, that makes so many turns within L: 2π · turns = L · base^(−pair/n)."""
        return n * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi)) / math.log(theta)

    first, last = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * n - 1)
    if first == last:
        last += 0.001  # a step instead of a ramp
    # γ: from 1 at the first pair to 0 at the last
    gamma = 1 - ((torch.arange(n, dtype=period.dtype, device=period.device) - first) / (last - first)).clamp(0, 1)
    return (1.0 / (scaling.factor * period)) * (1 - gamma) + (1.0 / period) * gamma  # h(θ) = (1 − γ) θ/s + γ θ


def temperature(scaling: RopeScaling) -> float:
    """The paper's √(1/t) = 0.1 ln s + 1, unless the network was trained with another."""
    # √(1/t) = 0.1 ln s + 1
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.attention_factor is None else scaling.attention_factor
