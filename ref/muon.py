"""Muon: momentum whose update is replaced by the nearest orthogonal matrix.

Sources: Keller Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024), and its code; Moonlight
(arXiv:2502.16982) for weight decay. Composer 2.5 trains with it, sharded (kernels post); the report itself used AdamW.

A gradient matrix has a few large singular values and many small ones, and so does its running mean: a step along it
moves a few directions and forgets the rest. Muon keeps the directions and sets every singular value to about one,
G = UΣVᵀ → UVᵀ, which is steepest descent when a step's size is measured by what it can do to an activation (the
spectral norm). No decomposition is computed. An odd polynomial of a matrix acts on its singular values alone, so five
rounds of

    A ← X Xᵀ        X ← aX + (bA + cA²)X        (a, b, c) = (3.4445, −4.7750, 2.0315)                          (1)

push all of (0, 1] towards one. The coefficients trade exactness for slope at zero: a singular value of 0.01 arrives
within five rounds, and everything ends up in roughly [0.7, 1.2] rather than at one. Training does not mind.

    M ← μM + (1 − μ)G       U = (1 − μ)G + μM  (Nesterov; else U = M)                                          (2)
    W ← (1 − ηλ)W − η · sqrt(max(1, m/n)) · NS(U)                                                              (3)

The factor in (3) is Jordan's; `lr` therefore does not mean what it means in Moonlight, which uses 0.2·sqrt(max(m, n)) to
match the size of AdamW's updates and share its learning rate. Here Muon has a learning rate of its own, about 0.02.

Which parameters: matrices between hidden activations. Embeddings, the head, the router and vectors stay with AdamW:
the rows of the first two are rare tokens rather than directions, and the router is a small classifier whose rows
must be able to grow apart. A fused matrix is orthogonalised as stored: gate and up of an expert are one matrix here.

Where this file departs from the sources
1. Leading dimensions are separate matrices: an expert stack [E, m, n] is E problems, each at its own scale.
2. All parameters of one shape are stacked into one batched product. Same numbers, far fewer and larger calls.
3. The norm that starts the iteration has no added constant, so NS(sG) = NS(G) for tiny gradients too; NS(0) = 0.
4. Attention projections are taken whole. Composer 2.5 goes per head: give Muon the parameter as [heads, head_dim, n].

Run it
    etude run muon --scale small      a few seconds; the same as: python -m ref.muon
    etude run muon --scale full       scaled/muon.py, or a clear answer while that does not exist

Glossary
    symbol   variable          shape         where
    G        grad              [..., m, n]   gradient; m outputs, n inputs, as in y = W x
    M        momentum_buffer   [..., m, n]   (2), in the optimiser's state
    U        update            [..., m, n]   (2)
    X        x                 [b, s, l]     (1); s = min(m, n), l = max(m, n)
    A        gram              [b, s, s]     (1)
    η, λ, μ  lr, weight_decay, momentum      (2), (3)
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

__all__ = ["newton_schulz", "Muon", "split_parameters", "optimizers"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def newton_schulz(
    G: Float[Tensor, "*batch m n"], steps: int = 5, *, dtype: torch.dtype | None = None
) -> Float[Tensor, "*batch m n"]:
    """UVᵀ of each matrix G = UΣVᵀ, approximately: singular values above about 0.005·‖G‖_F land in [0.7, 1.2] (1).

    The iteration runs in `dtype`, by default that of G; bfloat16 is what the method was designed for. The result has the
    dtype of G. A zero matrix stays zero. Scaling G does not change the result.
    """
    a, b, c = COEFFICIENTS
    rows, columns = G.shape[-2:]
    x = G.reshape(-1, rows, columns)
    # The products are Gram matrices of the shorter side: the cheaper one, and the same answer.
    x = x.mT if rows > columns else x
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.promote_types(G.dtype, torch.float32))
    x = (x / norm.clamp_min(torch.finfo(norm.dtype).tiny)).to(dtype or G.dtype, memory_format=torch.contiguous_format)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.mT if rows > columns else x
    return x.to(G.dtype).reshape(G.shape)


class Muon(torch.optim.Optimizer):
    """Muon, equations (1)–(3), for parameters [..., m, n] whose leading dimensions are separate matrices.

    `lr` η is the spectral norm of one step, before the factor sqrt(max(1, m/n)); `weight_decay` λ is decoupled.
    The iteration runs in `ns_dtype` (None: the parameter's own). Parameters without a gradient are left alone.
    Raises ValueError for a parameter of fewer than two dimensions: give vectors to AdamW.
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
            raise ValueError(f"want lr ≥ 0, 0 ≤ momentum < 1, weight_decay ≥ 0; got {lr}, {momentum}, {weight_decay}")
        defaults = dict(lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)
        super().__init__(params, defaults | dict(steps=steps, ns_dtype=ns_dtype))
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim < 2:
                    raise ValueError(f"Muon takes matrices; got a parameter of shape {tuple(p.shape)}")

    @torch.no_grad()
    def step(self, closure: Callable | None = None):
        """One step; returns the closure's loss, if a closure is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            buckets: dict[tuple, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    buckets.setdefault((p.shape[-2:], p.dtype, p.device), []).append(p)
            for params in buckets.values():
                self._step_equal_shapes(params, group)
        return loss

    def _step_equal_shapes(self, params: list[Tensor], group: dict) -> None:
        """Equations (2) and (3) for parameters whose matrices have one shape, with one call to `newton_schulz`."""
        momentum, (m, n) = group["momentum"], params[0].shape[-2:]
        for p in params:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers, updates = [self.state[p]["momentum_buffer"] for p in params], [p.grad for p in params]
        torch._foreach_lerp_(buffers, updates, 1 - momentum)
        updates = torch._foreach_lerp(updates, buffers, momentum) if group["nesterov"] else buffers
        stacked = torch.cat([update.reshape(-1, m, n) for update in updates])
        orthogonal = newton_schulz(stacked, group["steps"], dtype=group["ns_dtype"])
        pieces = orthogonal.split([p.numel() // (m * n) for p in params])
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        scale = max(1.0, m / n) ** 0.5
        torch._foreach_add_(params, [piece.view_as(p) for piece, p in zip(pieces, params)], alpha=-group["lr"] * scale)


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(matrices for Muon, the rest for AdamW), in the model's order; frozen parameters are in neither.

    The rest: anything of fewer than two dimensions, every weight of an nn.Embedding (a head tied to it included), and
    parameters with `lm_head`, `head`, `gate` or `router` as a component of their name.
    """
    outside = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    matrices, rest = [], []
    for name, p in model.named_parameters():
        if p.requires_grad:
            named = {"lm_head", "head", "gate", "router"} & set(name.split("."))
            (rest if p.ndim < 2 or id(p) in outside or named else matrices).append(p)
    return matrices, rest


def optimizers(
    model: nn.Module,
    muon_lr: float = 0.02,
    adamw_lr: float = 3e-3,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.0,
    use_muon: bool = True,
) -> list[torch.optim.Optimizer]:
    """[Muon for the matrices, AdamW for the rest], or [AdamW] for everything when `use_muon` is False.

    Norms and biases are not decayed. AdamW is the fused implementation, one pass over memory on CPU and GPU alike.
    """
    matrices, rest = split_parameters(model)
    if not use_muon:
        matrices, rest = [], matrices + rest
    decayed, spared = [p for p in rest if p.ndim >= 2], [p for p in rest if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": spared, "weight_decay": 0.0}]
    found: list[torch.optim.Optimizer] = [Muon(matrices, muon_lr, weight_decay=weight_decay)] if matrices else []
    if rest:
        adamw = [group for group in groups if group["params"]]
        found.append(torch.optim.AdamW(adamw, lr=adamw_lr, betas=betas, eps=1e-8, fused=True))
    return found


@dataclass(frozen=True)
class Demo:
    """What the iteration does to singular values, and a regression where some directions are rare."""

    rows: int = 64
    """Outputs m of the matrix that is learnt."""
    columns: int = 96
    """Inputs n."""
    decay: float = 1.0
    """The i-th input direction has standard deviation i^−decay: later ones are rare in every batch."""
    batch: int = 128
    """Examples per step."""
    steps: int = 200
    """Steps per run; the learning rate falls linearly to zero."""
    muon_lrs: tuple[float, ...] = (0.02, 0.05, 0.1, 0.2)
    """Learning rates tried for Muon; the best counts."""
    adamw_lrs: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3)
    """Learning rates tried for AdamW; the best counts."""
    seed: int = 0
    """Seed of the problem and of every batch."""


def demo(config: Demo = Demo(), log: Callable[..., None] = lambda step, total, **metrics: None) -> dict[str, float]:
    """Singular values after (1) in float32 and bfloat16; final error of Muon and AdamW, each at its best rate.

    The error is ‖W − W*‖_F² / ‖W*‖_F², every direction counted alike, and the loss E‖(W − W*)x‖² relative to its start.
    """
    generator = torch.Generator().manual_seed(config.seed)
    noise = torch.randn(config.rows, config.columns, generator=generator)
    scales = torch.arange(1, config.columns + 1) ** -config.decay
    figures: dict[str, float] = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        values = torch.linalg.svdvals(newton_schulz(noise, dtype=dtype))
        figures |= {f"smallest_{name}": values.min().item(), f"largest_{name}": values.max().item()}
    before = torch.linalg.svdvals(noise)
    figures["condition_before"] = (before.max() / before.min()).item()
    runs = [("muon", lr) for lr in config.muon_lrs] + [("adamw", lr) for lr in config.adamw_lrs]
    for step, (name, lr) in enumerate(runs, 1):
        generator = torch.Generator().manual_seed(config.seed + 1)
        target = torch.randn(config.rows, config.columns, generator=generator) / config.columns**0.5
        weight = nn.Parameter(torch.zeros_like(target))
        optimizer = Muon([weight], lr) if name == "muon" else torch.optim.AdamW([weight], lr, weight_decay=0, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / config.steps)
        for _ in range(config.steps):
            x = torch.randn(config.batch, config.columns, generator=generator) * scales
            optimizer.zero_grad()
            ((weight - target) @ x.mT).square().sum(0).mean().backward()
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            gap = weight - target
            error = (gap.norm() / target.norm()).square().item()
            loss = ((gap * scales).norm() / (target * scales).norm()).square().item()
        for key, value in ((f"{name}_error", error), (f"{name}_loss", loss)):
            figures[key] = min(value, figures.get(key, float("inf")))
        log(step, len(runs), optimizer=name, lr=lr, error=error, loss=loss)
    return figures


if __name__ == "__main__":
    print(demo())
