"""What one process trains: `services.Learner` with float32 masters, bfloat16 weights and Adam."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import torch

from ref.network import Transformer
from ref.network.masters import Masters
from ref.rl import Settings, improve
from ref.rollout import MapFunction, Rollout, common_names, map_in_order

__all__ = ["Trained"]


class Trained:
    """RL on a network, which becomes the masters. reference: the policy before RL, if drift from it is paid for;
    `map_fn`: as for `ref.rl.improve`."""

    def __init__(
        self,
        c: Settings,
        network: Transformer,
        reference: Transformer | None = None,
        map_fn: MapFunction = map_in_order,
    ):
        self.c, self.map_fn, self.done = c, map_fn, 0
        self.masters = Masters(network, torch.bfloat16)
        self.reference = None if reference is None else reference.bfloat16().requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.masters.masters.parameters(), lr=c.lr, betas=(0.9, 0.95), fused=True)

    @property
    def model(self) -> Transformer:
        return self.masters.model

    def step(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        result = improve(self.c, self.model, self.reference, rollouts, map_fn=self.map_fn)
        self.optimizer.param_groups[0]["lr"] = self.c.lr * self.c.rate(self.done)
        norm = self.masters.step([self.optimizer], gradients=result.gradients)
        self.done += 1
        ratio, clip = result.gap.exp(), self.c.objective
        outside = ((ratio < 1 - clip.clip_low) | (ratio > 1 + clip.clip_high)).double().mean().item()
        logged_metrics = [rollout.logged for rollout in rollouts if not rollout.failure]
        means = {
            name: float(np.mean([metrics[name] for metrics in logged_metrics])) for name in common_names(logged_metrics)
        }
        means |= {"failed": float(len(rollouts) - len(logged_metrics))} if len(logged_metrics) < len(rollouts) else {}
        reward, drift = result.rewards.nanmean().item(), result.drift.nanmean().item()
        if result.divergence is not None:
            means |= {"distilled": float(result.distilled), "divergence": result.divergence}
        return {"reward": reward, **means, "kl": drift, "grad_norm": norm.item(), "outside_clip": outside}

    def save(self) -> bytes:
        file = io.BytesIO()
        torch.save(
            {"done": self.done, "masters": self.masters.masters.state_dict(), "optimizer": self.optimizer.state_dict()},
            file,
        )
        return file.getvalue()

    def restore(self, data: bytes) -> None:
        state = torch.load(io.BytesIO(data), weights_only=True)
        self.done = state["done"]
        self.masters.masters.load_state_dict(state["masters"])
        self.masters.copy_down()
        self.optimizer.load_state_dict(state["optimizer"])
