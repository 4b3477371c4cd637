"""The nonlinear length penalty: the more effort a task has taken, the less each further unit costs.

Paper: Composer 2 technical report (arXiv:2603.24477v2), §4.2 and Figure 6.

    C_{k,q}(x) = ((1 + kx)^{1−q} − 1) / (k(1 − q))          C'(x) = (1 + kx)^{−q}

x is a weighted sum of what a rollout spent: thinking tokens, tool-call tokens, tool-output tokens, tokens of
the final message, number of tool calls, number of turns. C starts with slope one and flattens. On an easy task,
where x is small, each further step costs nearly its full price, so the policy learns to be quick. On a hard task
the next step is almost free, so the policy keeps its room to think. Turns have a weight of their own, so the
same work in fewer turns is cheaper; this teaches parallel tool calls.

    q → 1         ln(1 + kx) / k                     q = 0 or k → 0    x itself, a plain linear price
    q > 1         bounded by 1 / (k(q − 1))          0 < q ≤ 1         concave, but it grows without bound

The trap is the slope. What moves the policy is the price of the next unit, C', not the cost so far. Of two
curves scaled to the same mean cost, the one with more curvature charges more for the next unit of an easy task
and less for one of a hard task. Where kx stays far below one, every curve is the linear price. Choose k and the
scale from `marginal_cost` at the efforts that the policy actually makes.

Where this file departs from the paper
1. The formula as printed is 0/0 at both limits and loses digits near them (three to five remain at q = 1 +
   1e-12). We write the same function with the limits factored out, ψ(y) = log1p(y)/y and φ(z) = expm1(z)/z,
   both 1 at zero:
       C = x · ψ(kx) · φ((1 − q)·log1p(kx))
   This one formula has a relative error below 1e-12 everywhere and needs no threshold between branches.
2. The report does not give k, q or the weights. `EffortWeights` holds our choice, in token equivalents.
3. Negative x, k or q raise an error: the curve would be convex or complex there, and training would exploit a
   reward that pays for spending before its author noticed.

Run it
    etude run length-penalty --scale small      a second; the same as: python -m ref.length_penalty
    etude figure length-penalty                 Figure 6, and what agents trained under each curve do
    etude run length-penalty --scale full       scaled/length_penalty.py

Glossary
    symbol       variable   shape    unit                where
    x            x          any      token equivalents   §4.2, `effort`
    k            k          scalar   1 / unit of x       where it bends: at x = 1/k the slope is 2^{−q}
    q            q          scalar   –                   how much it bends
    ln(1 + kx)   growth     as x     –                   ours, departure 1
    C_{k,q}(x)   –          as x     unit of x           `length_penalty`
    C'(x)        –          as x     –                   `marginal_cost`
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import overload

import numpy as np
import torch
from torch import Tensor

__all__ = ["length_penalty", "marginal_cost", "Effort", "EffortWeights", "effort"]

Number = int | float | np.ndarray | np.number | Tensor


def _log_growth(x: Number, k: int | float, q: int | float) -> tuple[Tensor, Tensor]:
    """x in float64 and log(1 + kx), after checks that both public curves share."""
    if not (0 <= k < math.inf and 0 <= q < math.inf):
        raise ValueError(f"k and q must be finite and not negative; got k={k}, q={q}")
    if not isinstance(x, Number) or (x.is_complex() if isinstance(x, Tensor) else np.iscomplexobj(x)):
        raise ValueError(f"effort x must be a real number, array or tensor; got type {type(x).__name__}")
    wide = torch.as_tensor(x, dtype=torch.float64)
    growth = torch.log1p(k * wide)  # ln(1 + kx)
    if not bool(((wide >= 0) & growth.isfinite()).all()):
        raise ValueError("effort x and kx must be finite and not negative, but some are not")
    return wide, growth


def _match_type(result: Tensor, x: Number) -> Number:
    """`result` as the caller's type of number: tensor (in its own float dtype), array or Python float."""
    if isinstance(x, Tensor):
        return result.to(x.dtype) if x.is_floating_point() else result
    return result.numpy() if isinstance(x, np.ndarray) else result.item()


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator, or its limit 1 where the denominator is so small that its square underflows to
    zero, since the gradient divides by that square."""
    is_zero = denominator.abs() < 1e-150
    return torch.where(is_zero, 1.0, numerator / denominator.masked_fill(is_zero, 1.0))


@overload
def length_penalty(x: Tensor, k: int | float, q: int | float) -> Tensor: ...
@overload
def length_penalty(x: np.ndarray, k: int | float, q: int | float) -> np.ndarray: ...
@overload
def length_penalty(x: int | float | np.number, k: int | float, q: int | float) -> float: ...
def length_penalty(x: Number, k: int | float, q: int | float) -> Number:
    """C_{k,q}(x), in the unit of x, for a number, an array or a tensor; in float64, differentiable in x.

    k ≥ 0 per unit of x, q ≥ 0. The relative error is below 1e-12 for every k and q, limits included (§4.2).
    Returns a float for a number, an array for an array, and a tensor of its own dtype for a tensor.
    Raises ValueError if x, k or q is negative or not finite, if kx overflows float64, and if x is not a real
    number.
    """
    wide, growth = _log_growth(x, k, q)
    z = (1 - q) * growth  # φ(z) = expm1(z)/z
    # C = x · ψ(kx) · φ((1 − q) ln(1 + kx))
    return _match_type(wide * _ratio(growth, k * wide) * _ratio(torch.expm1(z), z), x)


@overload
def marginal_cost(x: Tensor, k: int | float, q: int | float) -> Tensor: ...
@overload
def marginal_cost(x: np.ndarray, k: int | float, q: int | float) -> np.ndarray: ...
@overload
def marginal_cost(x: int | float | np.number, k: int | float, q: int | float) -> float: ...
def marginal_cost(x: Number, k: int | float, q: int | float) -> Number:
    """C'(x) = (1 + kx)^{−q}: the price of one more unit. Arguments and errors as for `length_penalty`."""
    _, growth = _log_growth(x, k, q)
    return _match_type(torch.exp(-q * growth), x)  # C'(x) = (1 + kx)^{−q}


@dataclass(frozen=True)
class Effort:
    """What one rollout spent, in the six terms of §4.2."""

    thinking_tokens: int | float = 0
    """Tokens of reasoning before an answer or a call."""
    tool_call_tokens: int | float = 0
    """Tokens the policy wrote to call tools."""
    tool_output_tokens: int | float = 0
    """Tokens that tools returned into the context."""
    final_message_tokens: int | float = 0
    """Tokens of the last message to the user."""
    tool_calls: int | float = 0
    """Number of tool calls."""
    turns: int | float = 0
    """Number of turns; parallel calls share one turn."""


@dataclass(frozen=True)
class EffortWeights:
    """Price of one unit of each term, in token equivalents. The report gives none; these are our choice."""

    thinking_tokens: float = 1.0
    """Every generated token costs one."""
    tool_call_tokens: float = 1.0
    """As above."""
    tool_output_tokens: float = 0.1
    """Read, not generated: prefill is about this much cheaper than decoding."""
    final_message_tokens: float = 1.0
    """As above."""
    tool_calls: float = 20.0
    """Running a tool."""
    turns: float = 100.0
    """A round trip that the user waits for; the reason to call tools in parallel."""


def effort(counts: Effort, weights: EffortWeights = EffortWeights()) -> float:
    """x = Σ weight · count over the six terms, in token equivalents. Raises ValueError unless all are finite
    and not negative."""
    price, total = asdict(weights), 0.0
    for name, count in asdict(counts).items():
        if not (0 <= count < math.inf and 0 <= price[name] < math.inf):
            raise ValueError(f"{name}: count and weight must be finite and not negative; got {count} and {price[name]}")
        total += price[name] * count  # x = Σ weight · count
    return total


@dataclass(frozen=True)
class Demo:
    """The curves of Figure 6, their limits, and what they reward."""

    k: float = 0.01
    """Curvature, per token equivalent."""
    exponents: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0)
    """Values of q, one curve each."""
    efforts: tuple[float, ...] = (10.0, 100.0, 1000.0, 10000.0)
    """Efforts x at which each curve is evaluated."""
    files: int = 6
    """Files that the two example rollouts read, one per turn or all in one turn."""
    seed: int = 0
    """Unused: nothing here is random."""


def demo(config: Demo = Demo(), log: Callable[..., None] = lambda *_, **__: None) -> dict[str, float]:
    """Cost and marginal cost along each curve; the error of the printed formula near q = 1; what parallel calls
    save."""
    metrics: dict[str, float] = {}
    for step, q in enumerate(config.exponents, 1):
        for x in config.efforts:
            metrics[f"cost_q{q:g}@{x:g}"] = float(length_penalty(x, config.k, q))
            metrics[f"marginal_q{q:g}@{x:g}"] = float(marginal_cost(x, config.k, q))
        log(step, len(config.exponents), q=q, cost=metrics[f"cost_q{q:g}@{config.efforts[-1]:g}"])
    xs, q = torch.linspace(config.efforts[0], config.efforts[-1], 1000, dtype=torch.float64), 1 + 1e-12
    # C as printed: ((1 + kx)^{1−q} − 1) / (k(1 − q))
    printed_formula = ((1 + config.k * xs) ** (1 - q) - 1) / (config.k * (1 - q))
    error = (printed_formula / length_penalty(xs, config.k, q) - 1).abs().max()
    metrics["printed_formula_error_near_q1"] = error.item()
    files = config.files
    serial, parallel = (
        effort(Effort(0, 12 * files, 300 * files, 0, tool_calls=files, turns=turns)) for turns in (files, 1)
    )
    for q in config.exponents:
        saving = length_penalty(serial, config.k, q) - length_penalty(parallel, config.k, q)
        metrics[f"parallel_saving_q{q:g}"] = float(saving)
    return metrics


if __name__ == "__main__":
    print(demo())
