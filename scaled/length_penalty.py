"""The nonlinear length penalty on many ranks: `ref/length_penalty.py` unchanged.

A penalty is a function of one rollout's counts, which are known together with its reward, before its tokens are split
over ranks."""

from ref.length_penalty import Effort, EffortWeights, effort, length_penalty, marginal_cost

__all__ = ["length_penalty", "marginal_cost", "Effort", "EffortWeights", "effort"]
