"""Muon on many ranks: `ref/muon.py`, which explains the method.

Orthogonalising an update needs the full matrix, but with FSDP every rank has only a slice of each. Composer 2.5's Muon
is sharded, with Newton–Schulz at the natural granularity (its release; the Composer 2 report only has Adam). Here each
matrix is gathered on one rank:

    experts       rank r of an efsdp group already owns complete experts if they divide evenly: nothing is sent
    all others    matrix i goes to rank i mod n (all-to-all of slices), is orthogonalised there, and its slices come
                  back

No work is done twice, and each rank sends its slices of the momentum and gets them back: two all-to-alls per step.
Momentum and weights stay sharded. On one rank, this is exactly `ref`.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from ref import muon as ref
from ref.muon import split_parameters
from scaled.runtime.engine import fast, kernel

__all__ = ["newton_schulz", "Muon", "split_parameters", "optimizers"]


def newton_schulz(
    G: Float[Tensor, "*batch m n"], steps: int = 5, *, dtype: torch.dtype | None = None
) -> Float[Tensor, "*batch m n"]:
    """`ref.muon.newton_schulz`; on GPUs by `kernels/muon.py`, which iterates in float32 and bfloat16."""
    # Eq. 1 (ref/muon.py), by a kernel or by `ref`.
    if fast(G) and (dtype or G.dtype) in (torch.float32, torch.bfloat16):
        return kernel("muon").newton_schulz(G, steps, dtype=dtype)
    return ref.newton_schulz(G, steps, dtype=dtype)


class Muon(ref.Muon):
    """`ref.muon.Muon` for parameters that may be sharded (DTensor, over one mesh dimension)."""

    def orthogonalised(self, stacked: Float[Tensor, "b m n"]) -> Float[Tensor, "b m n"]:
        """As in `ref`, by the function above."""
        return newton_schulz(stacked, self.steps, dtype=self.ns_dtype)

    def step_equal_shapes(self, params: list[Tensor], group: dict) -> None:
        """Equations (2) and (3) of `ref/muon.py` for parameters whose matrices share a shape."""
        # A group has parameters of one shape that are sharded over the same ranks in the same way, or not at all.
        kinds: dict[tuple[tuple[dist.ProcessGroup, int] | None, torch.Size], list[Tensor]] = {}
        for p in params:
            sharding = (p.device_mesh.get_group(), dim_of(p)) if isinstance(p, DTensor) else None
            kinds.setdefault((sharding, p.shape), []).append(p)
        for (sharding, _), kind_params in kinds.items():
            if sharding is None:
                super().step_equal_shapes(kind_params, group)
            else:
                self._step_sharded([p for p in kind_params if isinstance(p, DTensor)], group, *sharding)

    def _step_sharded(self, params: list[DTensor], group: dict, handle, dim: int) -> None:
        momentum, (m, n) = group["momentum"], params[0].shape[-2:]
        for p in params:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [self.state[p]["momentum_buffer"].to_local() for p in params]
        updates, local = (
            [p.grad.to_local() for p in params if isinstance(p.grad, DTensor)],
            [p.to_local() for p in params],
        )
        # Eq. 2: M ← μM + (1 − μ)G; then U, with or without Nesterov.
        torch._foreach_lerp_(buffers, updates, 1 - momentum)
        updates = torch._foreach_lerp(updates, buffers, momentum) if group["nesterov"] else buffers
        if params[0].ndim > 2 and dim == 0:  # full matrices are on this rank
            stacked = torch.cat([update.reshape(-1, m, n) for update in updates])
            orthogonal = self.orthogonalised(stacked) if len(stacked) else stacked
            pieces = orthogonal.split([len(update.reshape(-1, m, n)) for update in updates])
        else:
            pieces = self._orthogonalise_by_rank(updates, params, handle, dim)
        # Eq. 3: W ← (1 − ηλ)W − η · sqrt(max(1, m/n)) · NS(U).
        if group["weight_decay"]:
            torch._foreach_mul_(local, 1 - group["lr"] * group["weight_decay"])
        pieces = [piece.reshape(x.shape) for piece, x in zip(pieces, local, strict=True)]
        torch._foreach_add_(local, pieces, alpha=-group["lr"] * max(1.0, m / n) ** 0.5)

    def _orthogonalise_by_rank(
        self, updates: Sequence[Tensor], params: list[DTensor], handle, dim: int
    ) -> Sequence[Tensor]:
        """Slices of the orthogonalised updates; update i is gathered and orthogonalised on rank i mod n."""
        n, rank = dist.get_world_size(handle), dist.get_rank(handle)
        shape, size = params[0].shape, params[0].shape[dim]
        step = -(-size // n)  # how torch.chunk and FSDP divide
        lengths = [max(0, min(size, (r + 1) * step) - r * step) for r in range(n)]
        owned_ids = [i for i in range(len(params)) if i % n == rank]
        row_numel = shape.numel() // size
        send = [len(range(r, len(params), n)) * lengths[rank] * row_numel for r in range(n)]
        receive = [len(owned_ids) * length * row_numel for length in lengths]
        order = [i for r in range(n) for i in range(r, len(params), n)]
        flat = torch.cat([updates[i].movedim(dim, 0).reshape(-1) for i in order])
        received_slices = flat.new_empty(sum(receive))
        dist.all_to_all_single(received_slices, flat, receive, send, group=handle)
        slice_shape = (size, *shape[:dim], *shape[dim + 1 :])
        if owned_ids:
            parts = [
                part.view(len(owned_ids), length, *slice_shape[1:])
                for part, length in zip(received_slices.split(receive), lengths, strict=True)
            ]
            full_updates = torch.cat(parts, 1).movedim(1, dim + 1)
            full_updates = self.orthogonalised(full_updates.reshape(-1, *shape[-2:])).view(len(owned_ids), *shape)
            received_slices = torch.cat(
                [part.reshape(-1) for part in full_updates.movedim(dim + 1, 1).split(lengths, 1)]
            )
        returned_slices = torch.empty_like(flat)
        dist.all_to_all_single(returned_slices, received_slices, send, receive, group=handle)
        pieces: list[Tensor] = [flat] * len(params)
        for i, piece in (
            zip(order, returned_slices.split(lengths[rank] * row_numel), strict=True) if lengths[rank] else ()
        ):
            pieces[i] = piece.view(lengths[rank], *slice_shape[1:]).movedim(0, dim)
        return pieces if lengths[rank] else updates


def dim_of(p: DTensor) -> int:
    """The dimension along which a parameter is sharded."""
    placement = p.placements[0]
    assert isinstance(placement, Shard)
    return placement.dim


def optimizers(
    model: nn.Module,
    muon_lr: float = 0.02,
    adamw_lr: float = 3e-3,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.0,
    use_muon: bool = True,
) -> list[torch.optim.Optimizer]:
    """`ref.muon.optimizers` with the Muon above."""
    ref_optimizers = ref.optimizers(model, muon_lr, adamw_lr, betas, weight_decay, use_muon)
    return [_shard_muon(optimizer) if isinstance(optimizer, ref.Muon) else optimizer for optimizer in ref_optimizers]


def _shard_muon(optimizer: ref.Muon) -> Muon:
    groups: Iterable = [{k: v for k, v in group.items()} for group in optimizer.param_groups]
    return Muon(groups, steps=optimizer.steps, ns_dtype=optimizer.ns_dtype)
