"""Muon: momentum with each update replaced by the nearest orthogonal matrix.

Sources: Keller Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024), and its code;
Moonlight (arXiv:2502.16982) for weight decay. Composer 2.5 adds it, sharded (its release). The Composer 2
report uses only Adam: AdamW for continued pretraining (§3.1), full-parameter Adam for RL (§4.1).

A gradient matrix has a few large singular values and many small ones, and so does its running mean. A step
along it moves a few directions and barely moves the rest. Muon keeps the directions and sets every singular
value to about one, G = UΣVᵀ → UVᵀ. This is steepest descent if a step's size is measured by its effect on an
activation (the spectral norm). No decomposition is computed: an odd polynomial of a matrix acts only on its
singular values, so five rounds of

    A ← X Xᵀ        X ← aX + (bA + cA²)X        (a, b, c) = (3.4445, −4.7750, 2.0315)                     (1)

push all of (0, 1] towards one. The coefficients trade exactness for slope at zero: a singular value of 0.002
arrives within five rounds, but all values end up in [0.68, 1.21] rather than at one. Training does not mind.

    M ← μM + (1 − μ)G       U = (1 − μ)G + μM  (Nesterov; else U = M)                                     (2)
    W ← (1 − ηλ)W − η · sqrt(max(1, m/n)) · NS(U)                                                         (3)

The factor in (3) is Jordan's, so `lr` does not mean the same as in Moonlight, which uses 0.2·sqrt(max(m, n)) to
match the size of AdamW's updates and share its learning rate. Here Muon has its own learning rate, about 0.02.

Which parameters: matrices between hidden activations. Embeddings, the head, the router and vectors stay with
AdamW: rows of the first two stand for tokens, many of them rare, rather than directions, and the router is a
small classifier whose rows must be able to grow apart. A fused matrix is orthogonalised as stored: an expert's
gate and up projections are one matrix here.

The trap: the size of a gradient is thrown away. If no token visits an expert any more, it keeps moving at full
speed on momentum alone until the momentum decays below EPS. Exact zeros (an expert never visited) stay zero.

Where this file departs from the sources
1. Leading dimensions are separate matrices: an expert stack [E, m, n] is E problems, each at its own scale.
2. All parameters of one shape are stacked into one batched product: same numbers, far fewer and larger calls.
3. A tall matrix is multiplied from the right instead of being transposed: same result, two fewer copies.
4. Attention projections are orthogonalised as one matrix. Composer 2.5 works per head: to do that, give Muon
   the parameter as [heads, head_dim, n].

Run it
    etude run muon --scale small      a few seconds; the same as: python -m ref.muon
    etude run muon --scale full       scaled/muon.py

Glossary
    symbol   variable          shape         where
    G        grad              [..., m, n]   gradient; m outputs, n inputs, as in y = W x
    M        momentum_buffer   [..., m, n]   (2), in the optimiser's state
    U        update            [..., m, n]   (2)
    X        x                 [b, m, n]     (1)
    A        gram              [b, s, s]     (1); s = min(m, n)
    η, λ, μ  lr, weight_decay, momentum      (2), (3)
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ref.network import bfloat16  # noqa: F401 – replaces torch's bfloat16 products on processors that lack them

__all__ = ["newton_schulz", "Muon", "split_parameters", "optimizers"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7


def newton_schulz(
    G: Float[Tensor, "*batch m n"], steps: int = 5, *, dtype: torch.dtype | None = None
) -> Float[Tensor, "*batch m n"]:
    """Approximate UVᵀ of each matrix G = UΣVᵀ: singular values above 0.002·‖G‖_F land in [0.68, 1.21] (1).

    The iteration runs in `dtype`, by default that of G. The method was designed for bfloat16, which adds about
    1% of error. The result has the dtype of G. Scaling G changes nothing while ‖G‖_F is well above EPS, however
    large G is. Zero stays zero. A matrix with NaN or inf becomes all NaN.
    """
    a, b, c = COEFFICIENTS
    tall = G.shape[-2] > G.shape[-1]
    x = normalised(G.reshape(-1, *G.shape[-2:])).to(dtype or G.dtype)
    for _ in range(steps):
        # X·Xᵀ or Xᵀ·X, whichever is smaller: p(XXᵀ)X = X p(XᵀX).
        gram = x.mT @ x if tall else x @ x.mT  # Eq. 1: A ← X Xᵀ
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # Eq. 1: bA + cA²
        # Eq. 1: X ← aX + (bA + cA²)X
        x = torch.baddbmm(x, x, polynomial, beta=a) if tall else torch.baddbmm(x, polynomial, x, beta=a)
    return x.to(G.dtype).reshape(G.shape)


def normalised(x: Float[Tensor, "b m n"]) -> Float[Tensor, "b m n"]:
    """Each matrix divided by its Frobenius norm plus EPS."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=wide)
    is_overflow = norm == torch.inf
    # Squares overflow float32 from about 1e19: measure such a matrix in units of its largest entry
    if bool(is_overflow.any()):
        x = torch.where(is_overflow, x / x.abs().amax((1, 2), keepdim=True), x)
        norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=wide)
    return x / (norm + EPS)  # X = G / ‖G‖_F


class Muon(torch.optim.Optimizer):
    """Muon, equations (1)–(3), for parameters [..., m, n] whose leading dimensions are separate matrices.

    `lr` η is the spectral norm of one step, before the factor in (3); `weight_decay` λ is decoupled.
    The iteration runs in `ns_dtype` (None: the parameter's dtype). Parameters without a gradient do not change.
    Raises ValueError for a parameter with fewer than two dimensions: give vectors to AdamW.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        *,
        steps: int = 5,
        ns_dtype: torch.dtype | None = torch.bfloat16,
    ) -> None:
        if not (lr >= 0 and 0 <= momentum < 1 and weight_decay >= 0):
            raise ValueError(
                f"lr and weight_decay must be ≥ 0, and 0 ≤ momentum < 1; got {lr}, {weight_decay}, {momentum}"
            )
        defaults = dict(lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)
        super().__init__(params, defaults)
        self.steps, self.ns_dtype = steps, ns_dtype
        for group in self.param_groups:
            for param in group["params"]:
                if param.ndim < 2:
                    raise ValueError(f"Muon takes matrices; got a parameter of shape {tuple(param.shape)}")

    @torch.no_grad()
    def step(self, closure: Callable | None = None):
        """Take one step; returns the closure's loss if a closure is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            buckets: dict[tuple, list[Tensor]] = {}
            for param in group["params"]:
                if param.grad is not None:
                    buckets.setdefault((param.shape[-2:], param.dtype, param.device), []).append(param)
            for params in buckets.values():
                self.step_equal_shapes(params, group)
        return loss

    def orthogonalised(self, stacked: Float[Tensor, "b m n"]) -> Float[Tensor, "b m n"]:
        """`newton_schulz` of the updates, in the steps and the dtype of this optimiser."""
        return newton_schulz(stacked, self.steps, dtype=self.ns_dtype)

    def step_equal_shapes(self, params: list[Tensor], group: dict) -> None:
        """Equations (2) and (3) for parameters whose matrices have the same shape, in one call to `newton_schulz`."""
        momentum, (m, n) = group["momentum"], params[0].shape[-2:]
        for param in params:
            if "momentum_buffer" not in self.state[param]:
                self.state[param]["momentum_buffer"] = torch.zeros_like(param)
        buffers, updates = (
            [self.state[param]["momentum_buffer"] for param in params],
            [param.grad for param in params if param.grad is not None],
        )
        torch._foreach_lerp_(buffers, updates, 1 - momentum)  # Eq. 2: M ← μM + (1 − μ)G
        # Eq. 2: U = (1 − μ)G + μM, or M without Nesterov
        updates = torch._foreach_lerp(updates, buffers, momentum) if group["nesterov"] else buffers
        update_stack = torch.cat([update.reshape(-1, m, n) for update in updates])
        orthogonal = self.orthogonalised(update_stack)  # Eq. 3: NS(U)
        pieces = orthogonal.split([param.numel() // (m * n) for param in params])
        pieces = [piece.view_as(param) for piece, param in zip(pieces, params)]
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])  # Eq. 3: W ← (1 − ηλ)W
        scale = max(1.0, m / n) ** 0.5  # Eq. 3: sqrt(max(1, m/n))
        torch._foreach_add_(params, pieces, alpha=-group["lr"] * scale)  # Eq. 3: W ← W − η · scale · NS(U)


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(matrices for Muon, the rest for AdamW), in the model's order; frozen parameters are in neither.

    The rest: anything with fewer than two dimensions, every weight of an nn.Embedding (including a head tied to
    it), parameters with `lm_head`, `head`, `gate` or `router` as a component of their name, and adapters:
    orthogonalising A and B one by one does not orthogonalise the update of their product.
    """
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    embedding_ids = {id(param) for module in embeddings for param in module.parameters()}
    matrices, adamw_params = [], []
    for name, param in model.named_parameters():
        if param.requires_grad:
            special_parts = {"lm_head", "head", "gate", "router", "lora_A", "lora_B"} & set(name.split("."))
            (adamw_params if param.ndim < 2 or id(param) in embedding_ids or special_parts else matrices).append(param)
    return matrices, adamw_params


def optimizers(
    model: nn.Module,
    muon_lr: float = 0.02,
    adamw_lr: float = 3e-3,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.0,
    use_muon: bool = True,
) -> list[torch.optim.Optimizer]:
    """[Muon for the matrices, AdamW for the rest], or [AdamW] for everything when `use_muon` is False.

    Norms and biases get no weight decay. AdamW is the fused implementation, one pass over memory.
    """
    matrices, adamw_params = split_parameters(model)
    if not use_muon:
        matrices, adamw_params = [], matrices + adamw_params
    decay_params, no_decay_params = (
        [param for param in adamw_params if param.ndim >= 2],
        [param for param in adamw_params if param.ndim < 2],
    )
    groups = [{"params": decay_params, "weight_decay": weight_decay}, {"params": no_decay_params, "weight_decay": 0.0}]
    all_optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        all_optimizers.append(Muon(matrices, muon_lr, weight_decay=weight_decay))
    if adamw_params:
        adamw = [group for group in groups if group["params"]]
        all_optimizers.append(torch.optim.AdamW(adamw, lr=adamw_lr, betas=betas, eps=1e-8, fused=True))
    return all_optimizers


@dataclass(frozen=True)
class Demo:
    """What the iteration does to singular values, and a regression in which most directions are rare."""

    rows: int = 32
    """Outputs m of the learned matrix."""
    columns: int = 64
    """Inputs n."""
    decay: float = 1.0
    """The i-th input direction has standard deviation i^−decay, so later ones are rare in every batch."""
    batch: int = 64
    """Examples per step."""
    steps: int = 100
    """Steps per run; the learning rate falls linearly to zero."""
    muon_lrs: tuple[float, ...] = (0.05, 0.1, 0.2)
    """Learning rates tried for Muon; the best counts."""
    adamw_lrs: tuple[float, ...] = (0.03, 0.1, 0.3)
    """Learning rates tried for AdamW; the best counts."""
    seed: int = 0
    """Seed of the problem and of every batch."""


def _regression_loss(config: Demo, name: str, lr: float, rotated: bool) -> float:
    """Final loss over first loss of min E‖(W − W*)x‖², where x is spread along the axes or along rotated ones."""
    generator = torch.Generator().manual_seed(config.seed)
    target = torch.randn(config.rows, config.columns, generator=generator) / config.columns**0.5
    basis = torch.linalg.qr(torch.randn(config.columns, config.columns, generator=generator)).Q
    spread = torch.diag(torch.arange(1, config.columns + 1) ** -config.decay)
    spread, target = (spread @ basis, target @ basis) if rotated else (spread, target)
    weight = nn.Parameter(torch.zeros_like(target))
    if name == "muon":
        optimizer = Muon([weight], ns_dtype=None)
    else:
        optimizer = torch.optim.AdamW([weight], weight_decay=0.0, fused=True)
    for step in range(config.steps):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / config.steps)
        x = torch.randn(config.batch, config.columns, generator=generator) @ spread
        optimizer.zero_grad()
        ((weight - target) @ x.mT).square().sum(0).mean().backward()
        optimizer.step()
    first, final = target @ spread.mT, (weight.detach() - target) @ spread.mT
    return (final.norm() / first.norm()).square().item()


def demo(config: Demo = Demo(), log: Callable[..., None] = lambda *_, **__: None) -> dict[str, float]:
    """Singular values after (1) in float32 and bfloat16; Muon and AdamW on a regression, each at its best rate.

    AdamW scales each weight separately, which is right when rare directions are rare *inputs*. Rotate the same
    problem and that advantage is gone. Muon cannot tell the two problems apart.
    """
    noise = torch.randn(config.rows, config.columns, generator=torch.Generator().manual_seed(config.seed))
    before = torch.linalg.svdvals(noise)
    metrics = {"condition_before": (before.max() / before.min()).item()}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        values = torch.linalg.svdvals(newton_schulz(noise, dtype=dtype))
        metrics |= {f"smallest_{name}": values.min().item(), f"largest_{name}": values.max().item()}
    rates = [("muon", lr) for lr in config.muon_lrs] + [("adamw", lr) for lr in config.adamw_lrs]
    runs = [(name, lr, rotated) for rotated in (False, True) for name, lr in rates]
    for step, (name, lr, rotated) in enumerate(runs, 1):
        loss = _regression_loss(config, name, lr, rotated)
        key = f"{name}_loss_{'rotated' if rotated else 'axes'}"
        metrics[key] = min(loss, metrics.get(key, float("inf")))
        log(step, len(runs), loss=loss, lr=lr)
    return metrics


if __name__ == "__main__":
    print(demo())
