"""The nonlinear length penalty on many ranks: `ref/length_penalty.py` as it stands.

A penalty is a function of one rollout's counts, and the counts of a rollout are known where its reward is: before its tokens are cut
over ranks.
"""

from ref.length_penalty import Effort, EffortWeights, effort, length_penalty, marginal_cost

__all__ = ["length_penalty", "marginal_cost", "Effort", "EffortWeights", "effort"]
